//! `cargo xtask demo`: three tenants share links, and cross traffic congests a spine meanwhile. One trains a model through the provider's
//! AllReduce, another exchanges by AllToAll, a third answers requests within a time that was promised. Then the first trains so that it
//! reacts to what it is told, while hosts are taken away and lost, beside one that adopts nothing. At last two elastic jobs and an
//! inference tenant trade hosts by bids, while a spine is congested. All results are proved right.

pub mod changes;
pub mod course;
pub mod page;
pub mod picture;
pub mod schedule;
pub mod timeline;
pub mod trade;
pub mod trading;
pub mod views;

use anyhow::{Context, Result, bail};
use changes::Changes;
use course::Course;
use harmonaize_testkit::bystander::Bystander;
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant};
use harmonaize_testkit::elastic::disturbances::{Moments, Places};
use harmonaize_testkit::elastic::{self, Recipe, Stage};
use harmonaize_testkit::fabric::Fabric;
use harmonaize_testkit::job::{self, Job, Programs, Spaces};
use harmonaize_testkit::lines::{Line, Tail};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::plans;
use harmonaize_testkit::summary::{self, Printed, Summary};
use harmonaize_testkit::topology::{self, Topology};
use harmonaize_testkit::workspace::{self, Binaries, Profile};
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use timeline::{Seen, Timeline};
use trade::Trade;
use views::Views;

/// Racks, hosts with agents in each, spines.
const RACKS: usize = 2;
const HOSTS_A_RACK: usize = 2;
const SPINES: usize = 2;
const HOSTS: usize = RACKS * HOSTS_A_RACK;
const WORKERS_PER_HOST: usize = 2;
/// Rate of each link between switches, in bits a second. Two cores forward it over three switches with time to spare.
const RATE: u64 = 250_000_000;
/// The rate of each link of a host, in bits a second. So a spine, and not the hosts that both tenants use,
/// decides what a job gets.
const HOST_RATE: u64 = 2 * RATE;
/// What the cross traffic takes of a spine. With less, half of it is still as good as half of the other.
const CROSS_TRAFFIC: u64 = RATE / 4 * 3;
/// The hosts of the other tenant's ranks, one a rack, and how long they rest after a round.
const EXCHANGE: [usize; 4] = [0, 0, HOSTS_A_RACK, HOSTS_A_RACK];
const PAUSE: Duration = Duration::from_millis(20);
/// The hosts of the third tenant's ranks, in one rack. They are on host links that it shares with both others, and on no spine. And what it
/// asks for: 99 of 100 requests answered in so many milliseconds.
const REQUESTS: [usize; 2] = [0, 1];
const P99_MS: u64 = 50;
/// The first tenant's training that reacts. The constants give its micro-batches, the time between losses of a host, what happens to it
/// and where. None of the others' hosts is taken away. The notice is long enough for who accumulates the most as it is given: an event
/// comes within a second, its step may have to end first and the next carries the decision, some 1.5 s each, and the state takes 1 s to
/// save.
const WORK: u64 = 1200;
const BETWEEN_LOSSES: Duration = Duration::from_secs(60);
const MOMENTS: Moments = Moments {
    congested: 0.1,
    drained: 0.4,
    lost: 0.7,
    flows: Duration::from_secs(9),
    until_adapted: true,
    notice: Duration::from_secs(8),
    away: Duration::from_secs(2),
};
const PLACES: Places = Places { rate: RATE, drained: HOSTS - 1, lost: HOSTS - 1 };
/// For how long the tenant that adopts nothing is seen before that.
const BEFORE: Duration = Duration::from_secs(4);
/// How long the training may stand still.
const STANDSTILL: Duration = Duration::from_secs(60);

/// What `cargo xtask demo` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask demo                  asks before it installs anything
  cargo xtask demo --yes --steps 60 a short one, for CI
  cargo xtask demo --json           figures and checks as JSON on standard output")]
pub struct Args {
    /// Install missing packages without asking
    #[arg(long)]
    pub yes: bool,
    /// Print figures and checks as JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Steps of the training, at least: it goes on until the cross traffic has come and gone
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub steps: u64,
    /// Seed of data split, weights, batches and payloads
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    // Before anything is installed or built, which takes minutes.
    let topology = fabric_topology()?;
    Fabric::check(&topology)?;
    let needed = [packages::EMULATION, packages::BUILDING].concat();
    packages::require(&needed, Consent::from_flag(args.yes))?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let folder = workspace::target().join("demo");
    let logs = folder.join("logs");
    std::fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
    eprintln!("Building agent, control and the tenants' programs (minutes, the first time)");
    let binaries = Binaries::build_with(Profile::Release, &["harmonaize-bench"])?;
    let began = Instant::now();
    let demo = Demo { args, logs, stop, binaries, topology };
    let Ran { mut printed, seen, requests, changes, trade } = demo.tenants()?;
    eprintln!("The same training in one process");
    printed.reference = demo.reference(printed.steps())?;
    let mut summary = summary::judge(&printed, HOSTS, RATE as f64 / 8.0)?;
    let (began_us, ended_us) = summary::span(&printed.workers)?;
    let timeline = Timeline::of(&seen, began_us * 1000, ended_us * 1000);
    timeline.checks.iter().for_each(|check| summary.add_check(check.clone()));
    let training = printed.workers.first().map(Vec::as_slice).unwrap_or_default();
    let views = Views::of(&timeline, training, &requests, began_us);
    summary.add_check(views.check.clone());
    changes.checks.iter().chain(&trade.checks).for_each(|check| summary.add_check(check.clone()));
    let report = folder.join("report.html");
    let setting = demo.setting(began.elapsed());
    let hosts: Vec<picture::Host> = demo.topology.hosts().map(placed).collect();
    let cross: Vec<&str> = timeline.spine.as_deref().map(course::path).into_iter().flatten().collect();
    let picture = picture::fabric(&demo.topology, &hosts, &cross);
    let page = page::page(&summary, &picture, &timeline, (&views, &changes, &trade), &setting)?;
    std::fs::write(&report, page).with_context(|| format!("cannot write {}", report.display()))?;
    show(args, (&summary, &trade), &report)?;
    if !summary.passed {
        let failed = summary.checks.iter().filter(|check| !check.passed && !check.warns);
        let failed: Vec<String> = failed.map(|check| format!("{}: {}", check.what, check.found)).collect();
        bail!("failed: {}; {} has the programs' logs", failed.join("; "), demo.logs.display());
    }
    Ok(())
}

/// What came of the tenants.
struct Ran {
    printed: Printed,
    seen: Seen,
    /// What the ranks printed that answer requests.
    requests: Vec<Vec<Line>>,
    changes: Changes,
    trade: Trade,
}

/// What is printed as JSON.
#[derive(serde::Serialize)]
struct Json<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    trade: &'a Trade,
}

struct Demo<'a> {
    args: &'a Args,
    logs: PathBuf,
    stop: Arc<AtomicBool>,
    binaries: Binaries,
    topology: Topology,
}

/// The rates of links between switches and of those of hosts, as a topology file has them.
fn rates() -> [String; 2] {
    [RATE, HOST_RATE].map(|rate| format!("{}Mbit/s", rate / 1_000_000))
}

/// The fabric of the demo.
fn fabric_topology() -> Result<Topology> {
    let [rate, host_rate] = rates();
    let topology = topology::racks_with_unmanaged_hosts(RACKS, HOSTS_A_RACK, SPINES, &rate);
    Topology::parse(&topology::with_host_rate(&topology, &host_rate)?)
}

/// The host of each worker of the training.
fn workers() -> Vec<usize> {
    (0..HOSTS * WORKERS_PER_HOST).map(|rank| rank / WORKERS_PER_HOST).collect()
}

/// What runs on a host of the topology, where those with agents come first.
fn placed(host: usize) -> picture::Host {
    let ranks = |of: &[usize]| of.iter().filter(|at| **at == host).count();
    let own = [('A', ranks(&workers())), ('B', ranks(&EXCHANGE)), ('C', ranks(&REQUESTS))];
    let own = own.into_iter().filter(|(_, ranks)| *ranks > 0);
    let mut tenants: Vec<(char, String)> = own
        .map(|(name, ranks)| (name, format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" })))
        .collect();
    let agent = host < HOSTS;
    if !agent {
        tenants.push(('D', "own TCP".to_owned()));
    }
    picture::Host { agent, tenants }
}

impl Demo<'_> {
    /// Runs all tenants on a fabric until the trainings have ended.
    fn tenants(&self) -> Result<Ran> {
        let [rate, host_rate] = rates();
        eprintln!(
            "{RACKS} racks of {HOSTS_A_RACK} hosts with agents and one without, {SPINES} spines, links of {rate}, {host_rate} to \
             hosts, control"
        );
        let fabric = Fabric::build(&self.topology)?;
        let tenants =
            [("a", 3001), ("b", 3002), ("c", 3003)].map(|(name, user)| Tenant { name: name.into(), user });
        let mut setup = Setup::new(self.binaries.clone(), &tenants);
        setup.unmanaged_hosts = RACKS;
        setup.measure(&host_rate);
        setup.control += trading::ALLOCATOR;
        let mut deployment = Deployment::start(fabric, setup)?;
        let done = self.jobs(&mut deployment, &tenants);
        self.keep_logs(&mut deployment);
        done.with_context(|| format!("the tenants did not finish; {} has all logs", self.logs.display()))
    }

    /// The fabric's folder goes with it; what agents and control said is to stay beside the tenants' logs.
    fn keep_logs(&self, deployment: &mut Deployment) {
        let keep = |from: &Path, name: &str| {
            if let Err(error) = std::fs::copy(from, self.logs.join(name)) {
                eprintln!("warning: {} is not kept: {error}", from.display());
            }
        };
        for host in deployment.hosts() {
            keep(&host.folder.join("log"), &format!("agent-{}.log", host.name));
        }
        if let Ok(control) = deployment.control() {
            keep(control.log(), "control.log");
        }
    }

    fn jobs(&self, deployment: &mut Deployment, [a, b, c]: &[Tenant; 3]) -> Result<Ran> {
        let folder = self.binaries.path("train")?.parent().map(Path::to_path_buf).unwrap_or_default();
        let names = ["harmonaize", "train", "alltoall", "inference", "elastic", trading::PROGRAM];
        let programs = Programs::publish(&folder, &names)?;
        let seed = ["--seed".to_owned(), self.args.seed.to_string()];
        let steps = ["--steps".to_owned(), self.args.steps.to_string()];
        let (space_a, space_b) = (Spaces::make(deployment, a)?, Spaces::make(deployment, b)?);
        let space_c = Spaces::make(deployment, c)?;
        let rest = ["--pause-ms".to_owned(), PAUSE.as_millis().to_string()];
        let arguments = [seed.clone(), rest].concat();
        let mut exchange =
            space_b.start("exchange", &EXCHANGE, &programs.path("alltoall"), &arguments, &self.logs)?;
        let p99 = ["--p99-ms".to_owned(), P99_MS.to_string()];
        let mut inference =
            space_c.start("inference", &REQUESTS, &programs.path("inference"), &p99, &self.logs)?;
        let arguments = [&seed[..], &steps[..], &["--until-stopped", "--listen"].map(str::to_owned)].concat();
        let mut training =
            space_a.start("training", &workers(), &programs.path("train"), &arguments, &self.logs)?;
        let mut course = Course::begin(deployment, CROSS_TRAFFIC)?;
        let workers = self.watch(deployment, &mut course, &mut training, &mut exchange)?;
        let seen = course.finish(deployment)?;
        let changes = self.react(deployment, &space_a, programs.path("elastic"))?;
        for job in [&mut inference, &mut exchange] {
            job.stop()?;
            job.wait(STANDSTILL, || self.go_on())?;
        }
        let lines = |job: &Job| -> Result<Vec<Vec<Line>>> {
            job.logs().iter().map(|log| Tail::open(log)?.lines()).collect()
        };
        let (exchangers, requests) = (lines(&exchange)?, lines(&inference)?);
        let printed =
            Printed { workers, exchangers, reference: Vec::new(), workers_per_host: WORKERS_PER_HOST };
        let spaces = [&space_a, &space_b, &space_c];
        let stage =
            trading::Stage { deployment, spaces, programs: &programs, logs: &self.logs, rate: CROSS_TRAFFIC };
        let trade = trading::trade(stage, || self.go_on())?;
        Ok(Ran { printed, seen, requests, changes, trade })
    }

    /// The first tenant trains so that it reacts, beside the others and one that adopts nothing.
    fn react(&self, deployment: &mut Deployment, spaces: &Spaces, program: PathBuf) -> Result<Changes> {
        eprintln!("Tenant A trains on and reacts; tenant D keeps to TCP of its own");
        let bystander = Bystander::start(deployment.fabric(), "f1", "f0")?;
        let since = Instant::now();
        while since.elapsed() < BEFORE {
            self.go_on()?;
            std::thread::sleep(Duration::from_millis(50));
        }
        let mut stage = Stage { deployment, spaces, program, logs: &self.logs };
        let recipe = Recipe::new(WORK, BETWEEN_LOSSES, true);
        let (lines, happened) = elastic::train(&mut stage, &recipe, (MOMENTS, PLACES), || self.go_on())?;
        Changes::of(&lines, &happened, &plans::decisions(stage.deployment)?, &bystander.stop()?)
    }

    fn go_on(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }

    /// Shows progress until the training has ended; returns what its workers printed.
    fn watch(
        &self,
        deployment: &mut Deployment,
        course: &mut Course,
        training: &mut Job,
        exchange: &mut Job,
    ) -> Result<Vec<Vec<Line>>> {
        let logs = training.logs();
        let mut tails = logs.iter().map(|log| Tail::open(log)).collect::<Result<Vec<_>>>()?;
        let mut rounds = exchange.logs().first().map(|log| Tail::open(log)).transpose()?;
        let mut printed: Vec<Vec<Line>> = vec![Vec::new(); tails.len()];
        let mut progress = Progress::new(self.args.steps);
        let (mut moved, mut told) = (Instant::now(), false);
        loop {
            self.go_on()?;
            deployment.check()?;
            // Asked before the logs are read, so that nothing printed before the end is missed.
            let ended = training.ended()?;
            if exchange.ended()? {
                bail!("the other tenant stopped before it was told to");
            }
            for (tail, printed) in tails.iter_mut().zip(&mut printed) {
                let lines = tail.lines()?;
                if !lines.is_empty() {
                    moved = Instant::now();
                }
                printed.extend(lines);
            }
            let exchanged = rounds.as_mut().map(Tail::lines).transpose()?.unwrap_or_default();
            progress.show(printed.first().map_or(&[], Vec::as_slice), &exchanged);
            course.advance(deployment, training.name(), progress.step)?;
            if course.over() && !told {
                training.stop()?;
                told = true;
            }
            if ended {
                progress.bar.finish_and_clear();
                return Ok(printed);
            }
            if moved.elapsed() > STANDSTILL {
                bail!("the training has stood still for {STANDSTILL:?}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn reference(&self, steps: usize) -> Result<Vec<Line>> {
        let mut command = Command::new(self.binaries.path("train")?);
        command.arg("--single").args(["--seed", &self.args.seed.to_string()]);
        command.args(["--steps", &steps.to_string()]).env("RAYON_NUM_THREADS", "1");
        let log = self.logs.join("reference.log");
        std::fs::write(&log, job::printed(&mut command)?)?;
        Tail::open(&log)?.lines()
    }

    /// How it ran, a sentence each.
    fn setting(&self, took: Duration) -> Vec<String> {
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        vec![
            format!("cargo xtask demo --steps {} --seed {}", self.args.steps, self.args.seed),
            format!(
                "Network namespaces as {HOSTS} hosts with agents in {RACKS} racks, a host without agent in each, leaves and \
                 {SPINES} spines that choose among paths by hash; each link shaped to {} Mbit/s in each direction, those of hosts to \
                 {}; {cores} cores for everything; {:.0} s without the build.",
                RATE / 1_000_000,
                HOST_RATE / 1_000_000,
                took.as_secs_f64()
            ),
            "Tenant A: 8 workers, 2 a host; tenant B: 4, 2 each on a host a rack; tenant C: 2, on two hosts of a rack; tenant D: a connection between the hosts without agents. Each process of A, B and C runs under its tenant's user, in a \
             namespace that has loopback alone, and sees its agent's socket."
                .to_owned(),
            "The model: 64-512-512-10, SiLU, SGD with momentum 0.9, rate 0.05, weight decay 1e-3, batches of 128.".to_owned(),
            "A step's communication is taken from the worker that waited least: the collective without the wait for \
             late workers."
                .to_owned(),
        ]
    }
}

/// A bar on a terminal, else a line now and then.
struct Progress {
    bar: ProgressBar,
    steps: u64,
    /// Made so far.
    step: u64,
    printed_tenth: u64,
    rounds: u64,
}

impl Progress {
    fn new(steps: u64) -> Self {
        let bar =
            if std::io::stderr().is_terminal() { ProgressBar::new(steps) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("{bar:30} step {pos}/{len} {elapsed} {msg}") {
            bar.set_style(style);
        }
        Self { bar, steps, step: 0, printed_tenth: 0, rounds: 0 }
    }

    fn show(&mut self, worker: &[Line], exchanged: &[Line]) {
        let rounds = exchanged.iter().filter(|line| matches!(line, Line::Round { .. })).count();
        self.rounds += rounds as u64;
        let last = worker.iter().rev().find_map(|line| match line {
            Line::Step { step, loss, collective_us, .. } => Some((*step as u64 + 1, *loss, *collective_us)),
            _ => None,
        });
        let Some((step, loss, collective_us)) = last else { return };
        self.step = step;
        let milliseconds = collective_us as f64 / 1e3;
        let text = format!(
            "loss {loss:.4}, AllReduce {milliseconds:.1} ms; tenant B: {} rounds of AllToAll",
            self.rounds
        );
        self.bar.set_position(step);
        self.bar.set_message(text.clone());
        // It goes on beyond its steps if the cross traffic takes longer.
        let tenth = step * 10 / self.steps;
        if self.bar.is_hidden() && tenth > self.printed_tenth {
            self.printed_tenth = tenth;
            eprintln!("step {step}/{}: {text}", self.steps);
        }
    }
}

fn show(args: &Args, (summary, trade): (&Summary, &Trade), report: &Path) -> Result<()> {
    if args.json {
        println!("{}", serde_json::to_string_pretty(&Json { summary, trade })?);
    } else {
        println!();
        for (what, figure) in page::rows(summary) {
            println!("{what:<80} {figure:>14}");
        }
        println!();
        trade.story.iter().for_each(|sentence| println!("{sentence}"));
        println!();
        for check in &summary.checks {
            println!("{}  {}\n        {}", check.label(), check.what, check.found);
        }
        println!("\nTolerance: {}", summary::WHY);
    }
    eprintln!("\nReport: {}", report.display());
    Ok(())
}
