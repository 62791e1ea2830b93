//! The demo's last act: two elastic jobs and an inference tenant trade hosts by bids while a spine is congested. The load of the inference
//! tenant rises and falls, and its bid with it. Control's own market clears the bids; control places, recalls and offers.

use super::course::{ENDS, most_crossed};
use super::trade::{Cleared, Flow, Record, Sample, Trade, Trader, printed_prices};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::clock::realtime_ns;
use harmonaize_testkit::cross_traffic::{CrossTraffic, PACKET_BITS};
use harmonaize_testkit::deployment::Deployment;
use harmonaize_testkit::job::{Programs, Spaces};
use harmonaize_testkit::lines::{Line, whole};
use harmonaize_testkit::placed::{self, Steps};
use harmonaize_testkit::plans;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::served::Served;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The program of the elastic jobs' workers.
pub const PROGRAM: &str = "placed";

/// Lines for control's configuration. Rounds are short, as the act is. An hour of a host costs 0.30 dollars at least.
pub const ALLOCATOR: &str = r#"
[allocator]
policy = "market"
round = "2s"
notice = "8s"
[[allocator.kind]]
name = ""
hire = 0.3
"#;

/// Who trades.
const TRADERS: [Trader; 3] = [
    Trader { tenant: "a", job: "pretrain", workers: (1, 2), elastic: true },
    Trader { tenant: "b", job: "finetune", workers: (1, 2), elastic: true },
    Trader { tenant: "c", job: "answers", workers: (2, 2), elastic: false },
];
/// What the elastic jobs bid for their first host and for the second, in dollars an hour. A job stops without the first.
const FIXED: [[f64; 2]; 2] = [[3.0, 0.9], [2.5, 0.7]];
/// What the inference tenant has for a thousand requests, in dollars. It bids all of it, in equal parts for its hosts.
const PER_THOUSAND: f64 = 0.05;
/// Requests a second, one after another. The program makes as many as the second says.
const LOADS: [f64; 3] = [2.0, 20.0, 2.0];
/// From one request to the next at that load, and the 99th percentile that is asked for; in milliseconds.
const EVERY_MS: u64 = 50;
const P99_MS: u64 = 50;

/// How often control is asked.
const POLL: Duration = Duration::from_millis(200);
/// How long each placement is looked at, and how long one is waited for.
const HOLDS: Duration = Duration::from_secs(4);
const UNTIL_PLACED: Duration = Duration::from_secs(30);
/// Requests that are waited for before the load falls, and for how long.
const REQUESTS: usize = 100;
const UNTIL_SERVED: Duration = Duration::from_secs(20);
/// How long control may take to answer a bid.
const UNTIL_BID: Duration = Duration::from_secs(10);
/// How long runners may take to end: control's notice, and some.
const UNTIL_ENDED: Duration = Duration::from_secs(15);

/// What the act runs on.
#[derive(Debug)]
pub struct Stage<'a> {
    /// Control and agents.
    pub deployment: &'a mut Deployment,
    /// Those of tenants A, B and C.
    pub spaces: [&'a Spaces; 3],
    /// The tenants' programs.
    pub programs: &'a Programs,
    /// For what runners and workers print.
    pub logs: &'a Path,
    /// The rate of the cross traffic in bits a second.
    pub rate: u64,
}

/// Runners of a job, one a host. Dropping them ends them all at once.
#[derive(Debug, Default)]
struct Runners(Vec<Process>);

impl Runners {
    fn ask_to_end(&mut self) -> Result<()> {
        self.0.iter_mut().try_for_each(|runner| runner.signal(Signal::TERM))
    }

    /// An error with its last lines where one has ended.
    fn check(&mut self) -> Result<()> {
        for runner in &mut self.0 {
            if let Some(status) = runner.status()? {
                bail!("{} ended with {status}; its last lines:\n{}", runner.name(), runner.log_tail(2048));
            }
        }
        Ok(())
    }
}

impl Drop for Runners {
    fn drop(&mut self) {
        if let Err(error) = self.ask_to_end() {
            eprintln!("warning: runners may still run: {error:#}");
        }
    }
}

/// Runs the act. `go_on` is asked meanwhile.
///
/// # Errors
/// Where a program fails, or `go_on` says so. What hosts did not do is for the checks of what comes back.
pub fn trade(stage: Stage<'_>, go_on: impl Fn() -> Result<()>) -> Result<Trade> {
    eprintln!("Two elastic jobs and an inference tenant trade hosts, by bids and while a spine is congested");
    let hosts = stage.deployment.hosts().iter().map(|host| host.name.clone()).collect();
    let record = Record { traders: TRADERS.to_vec(), hosts, ..Record::default() };
    let mut act = Act { stage, go_on, record, runners: BTreeMap::new(), logs: BTreeMap::new() };
    act.run().context("the trade of hosts did not finish")?;
    Ok(Trade::of(&act.record))
}

struct Act<'a, G: Fn() -> Result<()>> {
    stage: Stage<'a>,
    go_on: G,
    record: Record,
    /// By the place of their job.
    runners: BTreeMap<usize, Runners>,
    /// What they printed.
    logs: BTreeMap<usize, Vec<PathBuf>>,
}

impl<G: Fn() -> Result<()>> Act<'_, G> {
    fn run(&mut self) -> Result<()> {
        let [low, high, low_again] = LOADS;
        self.bid(low)?;
        self.hold(HOLDS)?;
        let mut traffic = self.congest()?;
        self.bid(high)?;
        self.hold(HOLDS)?;
        if traffic.is_none() {
            // Jobs that have a rack each cross no spine. The hosts that one took from both do.
            traffic = self.congest()?;
        }
        self.until_served()?;
        self.bid(low_again)?;
        self.hold(HOLDS)?;
        if let (Some(traffic), Some(flow)) = (traffic, &mut self.record.flow) {
            flow.sent = traffic.sent() * PACKET_BITS;
            let [_, ended] = &mut flow.span_ns;
            *ended = traffic.stop()?;
        }
        self.record.decisions = plans::decisions(self.stage.deployment)?;
        // That all end is no trade.
        let traded = self.record.samples.len();
        for place in 0..TRADERS.len() {
            self.end(place)?;
        }
        self.record.samples.truncate(traded);
        self.collect()
    }

    /// Has the inference tenant bid for a load. Waits until control's market has cleared, and control has placed the jobs so.
    fn bid(&mut self, load: f64) -> Result<()> {
        let [.., answers] = TRADERS;
        let (_, hosts) = answers.workers;
        let own = load * 3600.0 / 1000.0 * PER_THOUSAND / f64::from(hosts);
        eprintln!(
            "Tenant C has {load} requests a second, and bids {own:.2} dollars an hour for each of {hosts} hosts"
        );
        let at_ns = realtime_ns()?;
        if self.runners.is_empty() {
            let [first, second] = FIXED;
            for (place, (trader, bid)) in TRADERS.iter().zip([first, second, [own; 2]]).enumerate() {
                self.start(place, trader, bid)?;
            }
        } else {
            self.change_bid(&answers, own)?;
        }
        let placed = self.watch(UNTIL_PLACED, |sample| Ok(sample.is_settled(&TRADERS)))?;
        let sample = self.record.samples.last().context("control was not asked")?;
        if !placed {
            eprintln!("warning: control has not placed the jobs so within {UNTIL_PLACED:?}");
        }
        let (price_millionths, placed_ns) = (sample.price_millionths, placed.then_some(sample.at_ns));
        let has = |trader| sample.of(trader).map_or(0, |job| job.hosts.len());
        let won = TRADERS.iter().map(has).collect();
        eprintln!("A host costs {:.2} dollars an hour", price_millionths as f64 / 1e6);
        self.record.cleared.push(Cleared { at_ns, load, price_millionths, won, placed_ns });
        Ok(())
    }

    /// Changes a job's bid, as its tenant would on a host.
    fn change_bid(&self, trader: &Trader, price: f64) -> Result<()> {
        let Stage { spaces: [.., spaces], programs, logs, .. } = &self.stage;
        let log =
            logs.join(format!("{}-{}-bid-{}.log", trader.tenant, trader.job, self.record.cleared.len()));
        let title = format!("the bid of {}", trader.name());
        let mut bid =
            spaces.start_command(&title, 0, &programs.path("harmonaize"), &log, |command, socket| {
                command.env("HARMONAIZE_SOCKET", socket);
                command.args(["tenant", "bid", trader.job, &format!("{price:.2}")]);
            })?;
        bid.succeed_by(Instant::now() + UNTIL_BID)
    }

    /// Starts a job's runners, one on each host. They bid for its first host and for further ones.
    fn start(&mut self, place: usize, trader: &Trader, [first, further]: [f64; 2]) -> Result<()> {
        let Stage { spaces, programs, logs, .. } = &self.stage;
        let spaces = spaces.get(place).context("the job's tenant has no spaces")?;
        let (least, most) = trader.workers;
        let mut runners = Runners::default();
        for (host, name) in self.record.hosts.iter().enumerate() {
            let title = format!("the runner of {} on {name}", trader.name());
            let log = logs.join(format!("{}-{}-{name}.log", trader.tenant, trader.job));
            let runner = spaces.start_command(
                &title,
                host,
                &programs.path("harmonaize"),
                &log,
                |command, socket| {
                    command.env("HARMONAIZE_SOCKET", socket);
                    command.args(["tenant", "run", "--job", trader.job]);
                    command.args(["--workers", &format!("{least}..{most}")]);
                    command.args(["--bid", &format!("{first:.2}"), "--further", &format!("{further:.2}")]);
                    if trader.elastic {
                        command.arg("--elastic").arg("--").arg(programs.path("placed"));
                    } else {
                        command.args(["--", "sh", "-c", SEATED]).arg(programs.path("inference"));
                        command.args(["--every-ms", &EVERY_MS.to_string(), "--p99-ms", &P99_MS.to_string()]);
                    }
                },
            )?;
            self.logs.entry(place).or_default().push(log);
            runners.0.push(runner);
        }
        self.runners.insert(place, runners);
        Ok(())
    }

    /// Ends a job's runners, and their workers with them. They say so by their exit status, which is none of success.
    fn end(&mut self, place: usize) -> Result<()> {
        let Some(mut runners) = self.runners.remove(&place) else { return Ok(()) };
        runners.ask_to_end()?;
        let deadline = Instant::now() + UNTIL_ENDED;
        for runner in &mut runners.0 {
            while runner.status()?.is_none() {
                (self.go_on)()?;
                if Instant::now() > deadline {
                    let (name, tail) = (runner.name(), runner.log_tail(2048));
                    bail!("{name} has not ended within {UNTIL_ENDED:?}; its last lines:\n{tail}");
                }
                self.sample()?;
                std::thread::sleep(POLL);
            }
        }
        Ok(())
    }

    /// Looks on for a while.
    fn hold(&mut self, time: Duration) -> Result<()> {
        self.watch(time, |_| Ok(false)).map(drop)
    }

    /// Looks on until requests were answered, or time is over.
    fn until_served(&mut self) -> Result<()> {
        let logs = self.logs.get(&(TRADERS.len() - 1)).cloned().unwrap_or_default();
        let done = self.watch(UNTIL_SERVED, |_| Ok(served(&logs)?.requests() >= REQUESTS))?;
        if !done {
            eprintln!(
                "warning: tenant C has answered fewer than {REQUESTS} requests within {UNTIL_SERVED:?}"
            );
        }
        Ok(())
    }

    /// Looks again and again until it is as wanted, or time is over; whether it is.
    fn watch(&mut self, limit: Duration, done: impl Fn(&Sample) -> Result<bool>) -> Result<bool> {
        let since = Instant::now();
        loop {
            (self.go_on)()?;
            self.stage.deployment.check()?;
            self.runners.values_mut().try_for_each(Runners::check)?;
            self.sample()?;
            if let Some(sample) = self.record.samples.last()
                && done(sample)?
            {
                return Ok(true);
            }
            if since.elapsed() > limit {
                return Ok(false);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Notes what control says of jobs.
    fn sample(&mut self) -> Result<()> {
        let placed = plans::jobs(self.stage.deployment)?;
        self.record.samples.push(Sample::new(realtime_ns()?, placed));
        Ok(())
    }

    /// Begins cross traffic on the spine that most connections of the jobs cross, and looks on for a while. None where they cross none.
    fn congest(&mut self) -> Result<Option<CrossTraffic>> {
        let deployment = &*self.stage.deployment;
        let Some((spine, crossing)) = most_crossed(&plans::plans(deployment)?) else { return Ok(None) };
        let rate = self.stage.rate;
        eprintln!("Cross traffic of {} Mbit/s begins on {spine}", rate / 1_000_000);
        let [from, to] = ENDS;
        let traffic = CrossTraffic::start(deployment.fabric(), from, to, spine, rate)
            .with_context(|| format!("no cross traffic over {spine}"))?;
        let (spine, span_ns) = (spine.to_owned(), [traffic.began_realtime_ns(); 2]);
        self.record.flow = Some(Flow { spine, crossing, sent: 0, rate, span_ns });
        self.hold(HOLDS / 2)?;
        Ok(Some(traffic))
    }

    /// Reads what all workers have printed.
    fn collect(&mut self) -> Result<()> {
        for (place, trader) in TRADERS.iter().enumerate() {
            let logs = self.logs.get(&place).cloned().unwrap_or_default();
            if trader.elastic {
                let lines = logs.iter().map(|log| whole::<placed::Line>(log)).collect::<Result<Vec<_>>>()?;
                self.record.steps.push(Steps::of(&lines));
            } else {
                self.record.served = served(&logs)?;
            }
            let said = logs.iter().map(std::fs::read_to_string).collect::<Result<Vec<_>, _>>()?;
            self.record.prices_by_job.push(printed_prices(said.iter().map(String::as_str)));
        }
        Ok(())
    }
}

/// Runs its first argument with the seat that the environment says, and the arguments behind it.
const SEATED: &str = r#"
exec "$0" --socket "$HARMONAIZE_SOCKET" --rank "$RANK" --ranks "$WORLD_SIZE" --name "$HARMONAIZE_JOB" "$@"
"#;

/// What ranks that answer requests have printed so far, the one that agreed on a target first.
fn served(logs: &[PathBuf]) -> Result<Served> {
    let mut lines = logs.iter().map(|log| whole::<Line>(log)).collect::<Result<Vec<_>>>()?;
    lines.sort_by_key(|lines| !lines.iter().any(|line| matches!(line, Line::Promised { .. })));
    Ok(Served::of(&lines))
}
