//! Suite rdma: our links, collectives and attachments beside what the devices give to perftest, on the hosts of a testbed.

use super::cluster::{self, Carrier, Cluster};
use super::part::Outcome;
use super::perftest::{self, End, Measure};
use super::row::{Better, Case, Row, median};
use super::suite::Request;
use super::testbed::{Faults, Testbed};
use anyhow::{Context, Result};
use harmonaize_testkit::workspace::{Binaries, Profile};
use serde::Deserialize;
use std::time::{Duration, Instant};

/// Payload of the stream.
const CHUNK: u64 = 1 << 20;
/// Payloads and writes under way.
const DEPTH: u32 = 16;
/// Payload of the ping-pong.
const SMALL: u64 = 64;
/// Rounds with slow links, at most.
const MOST_SLOW: usize = 3;
/// The longest run of anything.
const LIMIT: Duration = Duration::from_secs(120);
/// What agents are told for the rows about failures: how long a peer may be silent.
const PEER_TIMEOUT: Duration = Duration::from_secs(3);
/// The same for the others, where a busy testbed is no failure.
const CALM: Duration = Duration::from_secs(20);

/// Programs that the hosts need.
const PROGRAMS: [&str; 4] = ["wire", "collective", "harmonaize-agent", "harmonaize-control"];

/// How much is measured.
#[derive(Debug, Clone, Default)]
pub struct Budget {
    /// Interleaved runs of each contestant.
    pub rounds: usize,
    /// Seconds of a stream.
    pub seconds: u32,
    /// Writes of a run of ib_write_bw, at least.
    pub writes: u64,
    /// Round trips of a ping-pong.
    pub round_trips: u64,
    /// Bytes of a rank's tensor.
    pub tensor: u64,
    /// Timed operations of a run.
    pub operations: usize,
    /// Parts alone: stream, latency, allreduce, loss, slow, failure; all if empty.
    pub only: Vec<String>,
}

impl Budget {
    /// For figures.
    pub fn new(request: &Request) -> Self {
        Self {
            rounds: request.rounds(),
            seconds: 2,
            writes: 2 * u64::from(DEPTH),
            round_trips: 2000,
            tensor: 16 << 20,
            operations: 3,
            only: request.only.clone(),
        }
    }

    /// Shows that all programs run, and measures nothing worth a figure.
    pub fn smoke() -> Self {
        let only = ["stream", "latency", "allreduce"].map(str::to_owned).to_vec();
        Self { rounds: 1, seconds: 1, writes: 8, round_trips: 20, tensor: 1 << 20, operations: 1, only }
    }

    fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == part)
    }
}

/// Names of parts, for `--only`.
pub const PARTS: &[&str] = &["stream", "latency", "allreduce", "loss", "slow", "failure"];

/// A testbed whose hosts were looked at, and have the programs.
struct Suite {
    testbed: Testbed,
    ends: Vec<End>,
    budget: Budget,
    secret: String,
    /// Writes of a run of ib_write_bw, so that it lasts about as long as a stream.
    writes: u64,
    figures: Figures,
}

/// Figures of the rounds, in their order.
#[derive(Debug, Default)]
struct Figures {
    write_bandwidth: Vec<f64>,
    stream: Vec<f64>,
    stream_tcp: Vec<f64>,
    write_latency: Vec<f64>,
    send_latency: Vec<f64>,
    latency: Vec<f64>,
    ring: Vec<f64>,
    mapped: Vec<f64>,
    over_tcp: Vec<f64>,
    attached: Vec<f64>,
    lossy: Vec<f64>,
    to_itself: Vec<f64>,
    added: Vec<f64>,
    slow_ring: Vec<f64>,
    slow_mapped: Vec<f64>,
    slow_attached: Vec<f64>,
    killed: Vec<f64>,
    unplugged: Vec<f64>,
}

/// The names that ask for a part, what it is, and the part.
type Part = (&'static [&'static str], &'static str, fn(&mut Suite) -> Result<()>);

/// Measures.
pub fn run(testbed: Testbed, budget: Budget) -> Result<Outcome> {
    let mut ends = Vec::new();
    for host in &testbed.hosts {
        ends.push(End::check(host)?);
    }
    install(&testbed)?;
    let figures = Figures::default();
    let mut suite = Suite { testbed, ends, budget, secret: secret()?, writes: 0, figures };
    suite.calibrate()?;
    let parts: [Part; 4] = [
        (&["stream", "latency"], "between two hosts", Suite::between_two),
        (&["allreduce", "loss"], "on all hosts", Suite::collectives),
        (&["slow"], "with slow links", Suite::slowly),
        (&["failure"], "with failures", Suite::failures),
    ];
    let mut problems = Vec::new();
    for (names, what, part) in parts {
        if names.iter().any(|name| suite.budget.wants(name))
            && let Err(error) = part(&mut suite)
        {
            eprintln!("error: {what}: {error:#}");
            problems.push(format!("{what}: {error:#}"));
        }
    }
    Ok(Outcome { rows: suite.rows(), problems })
}

/// Copies the programs to the hosts, unless they are installed there.
fn install(testbed: &Testbed) -> Result<()> {
    let folder = cluster::programs(testbed);
    if testbed.programs.is_some() {
        for host in &testbed.hosts {
            for name in PROGRAMS {
                let path = folder.join(name).display().to_string();
                let missing = || format!("host {} has no program {path}, and `programs` says so", host.name);
                host.launcher.shell("test -x \"$1\"", &[&path], b"").with_context(missing)?;
            }
        }
        return Ok(());
    }
    let binaries = Binaries::build_with(Profile::Release, &["harmonaize-bench"])?;
    for name in PROGRAMS {
        let program = std::fs::read(binaries.path(name)?)?;
        for host in &testbed.hosts {
            eprintln!("copying {name} to {}", host.name);
            host.launcher.write(&folder.join(name), &program, true)?;
        }
    }
    Ok(())
}

/// 64 hexadecimal digits that nobody knows yet.
fn secret() -> Result<String> {
    let mut bytes = [0; 32];
    let mut source = std::fs::File::open("/dev/urandom").context("no random numbers")?;
    std::io::Read::read_exact(&mut source, &mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Of a tensor, what a ring's AllReduce puts on each link.
fn wire_share(ranks: usize) -> f64 {
    2.0 * (ranks as f64 - 1.0) / ranks as f64
}

impl Suite {
    /// Finds how many writes ib_write_bw makes in the seconds of a stream.
    fn calibrate(&mut self) -> Result<()> {
        let rate = self.perftest(&[(0, 1)], self.writing(self.budget.writes))?;
        let count = rate * f64::from(self.budget.seconds) / CHUNK as f64;
        self.writes = (count as u64).clamp(self.budget.writes, 1_000_000);
        Ok(())
    }

    fn writing(&self, count: u64) -> Measure {
        Measure::Bandwidth { bytes: CHUNK, depth: DEPTH, count }
    }

    /// The rounds of stream and ping-pong, from the first host to the second.
    fn between_two(&mut self) -> Result<()> {
        let Budget { rounds, seconds, round_trips: trips, .. } = self.budget;
        for round in 1..=rounds {
            if self.budget.wants("stream") {
                let theirs = self.perftest(&[(0, 1)], self.writing(self.writes))? / 1e6;
                let ours = self.stream("verbs", seconds)? / 1e6;
                let tcp = self.stream("tcp", seconds)? / 1e6;
                eprintln!(
                    "round {round}/{rounds}: ib_write_bw {theirs:.1} MB/s, ours {ours:.1}, ours over TCP {tcp:.1}"
                );
                self.figures.write_bandwidth.push(theirs);
                self.figures.stream.push(ours);
                self.figures.stream_tcp.push(tcp);
            }
            if self.budget.wants("latency") {
                let measure = |sends| Measure::Latency { sends, bytes: SMALL, iterations: trips };
                let writes = self.perftest(&[(0, 1)], measure(false))?;
                let ours = self.ping(trips)?;
                let sends = self.perftest(&[(0, 1)], measure(true))?;
                eprintln!(
                    "round {round}/{rounds}: ib_write_lat {writes:.1} us, ib_send_lat {sends:.1}, ours {ours:.1}"
                );
                self.figures.write_latency.push(writes);
                self.figures.send_latency.push(sends);
                self.figures.latency.push(ours);
            }
        }
        Ok(())
    }

    fn perftest(&self, pairs: &[(usize, usize)], measure: Measure) -> Result<f64> {
        perftest::measure(&self.testbed, &self.ends, pairs, measure)
    }

    /// Bytes a second of our stream.
    fn stream(&self, carrier: &str, seconds: u32) -> Result<f64> {
        #[derive(Deserialize)]
        struct Line {
            bytes_per_second: f64,
        }
        let (bytes, depth, seconds) = (CHUNK.to_string(), DEPTH.to_string(), seconds.to_string());
        let own = ["--carrier", carrier, "--bytes", &bytes, "--depth", &depth];
        let line = self.wire("stream", &own, &["--seconds", &seconds], "{\"bytes_per_second\"")?;
        Ok(serde_json::from_str::<Line>(&line)?.bytes_per_second)
    }

    /// Microseconds of our message one way, at the median.
    fn ping(&self, trips: u64) -> Result<f64> {
        #[derive(Deserialize)]
        struct Line {
            median_us: f64,
        }
        let (bytes, trips) = (SMALL.to_string(), trips.to_string());
        let line = self.wire(
            "latency",
            &["--bytes", &bytes, "--iterations", &trips, "--wait", "poll"],
            &[],
            "median_us",
        )?;
        Ok(serde_json::from_str::<Line>(&line)?.median_us)
    }

    /// Runs `wire` between the first two hosts; the line of the connecting end that holds `wanted`.
    fn wire(&self, what: &str, both: &[&str], connecting: &[&str], wanted: &str) -> Result<String> {
        #[derive(Deserialize)]
        struct Listening {
            listening: String,
        }
        let deadline = Instant::now() + LIMIT;
        let program = cluster::programs(&self.testbed).join("wire").display().to_string();
        let secret = format!("HARMONAIZE_LINK_SECRET={}", self.secret);
        let start = |at: usize, more: &[&str]| {
            let host = self.testbed.hosts.get(at).context("no such host")?;
            let (device, address) = (format!("{}:{}", host.device, host.port), format!("{}:0", host.address));
            let mut words = vec!["env", &secret, &program, what, "--device", &device, "--address", &address];
            let gid = host.gid_index.map(|index| index.to_string());
            words.extend(gid.iter().flat_map(|index| ["--gid-index", index.as_str()]));
            words.extend(both.iter().chain(more));
            host.launcher.start(&format!("wire {what} on {}", host.name), &words)
        };
        let mut listener = start(1, &[])?;
        let (_, line) = listener.line(deadline, |line| line.contains("\"listening\""))?;
        let Listening { listening } =
            serde_json::from_str(&line).with_context(|| format!("a strange line: {line}"))?;
        let mut connector = start(0, &[&["--connect", &listening], connecting].concat())?;
        let printed = connector.finish(deadline)?;
        listener.finish(deadline)?;
        printed
            .into_iter()
            .find(|line| line.contains(wanted))
            .with_context(|| format!("wire {what} told nothing"))
    }

    /// The rounds of AllReduce on all hosts, then with lost packets.
    fn collectives(&mut self) -> Result<()> {
        let rounds = self.budget.rounds;
        let hosts = self.testbed.hosts.len();
        let ring: Vec<(usize, usize)> = (0..hosts).map(|host| (host, (host + 1) % hosts)).collect();
        let own: Vec<(usize, usize)> = (0..hosts).map(|host| (host, host)).collect();
        let mut verbs = Cluster::start(&self.testbed, Carrier::Verbs, CALM)?;
        let mut tcp = Cluster::start(&self.testbed, Carrier::Tcp, CALM)?;
        let runs = if self.budget.wants("allreduce") { rounds } else { 1 };
        for round in 1..=runs {
            let writes = self.writing((self.writes / hosts as u64).max(self.budget.writes));
            let bound = self.perftest(&ring, writes)? / 1e6;
            let mapped = self.allreduce(&mut verbs, "mapped")?;
            let over_tcp = self.allreduce(&mut tcp, "mapped")?;
            let attached = self.allreduce(&mut verbs, "rdma")?;
            let own = self.perftest(&own, writes)? / 1e6;
            eprintln!(
                "round {round}/{runs}: ib_write_bw in a ring {bound:.1} MB/s a host, to itself {own:.1}; busbw {mapped:.1} MB/s, over TCP {over_tcp:.1}, attached over RDMA {attached:.1}"
            );
            // Attached over RDMA each tensor is read once and written once, between host and unit.
            let added = 1.0 / attached - 1.0 / mapped;
            if added > 0.0 {
                self.figures.to_itself.push(own);
                self.figures.added.push(2.0 / wire_share(hosts) / added);
            }
            self.figures.ring.push(bound);
            self.figures.mapped.push(mapped);
            self.figures.over_tcp.push(over_tcp);
            self.figures.attached.push(attached);
        }
        drop(tcp);
        if !self.budget.wants("loss") {
            return Ok(());
        }
        let Some(faults) = self.testbed.faults.clone() else { return Ok(()) };
        self.on_all(&faults.lossy)?;
        let lossy = self.allreduce(&mut verbs, "mapped");
        self.on_all(&faults.lossless)?;
        let lossy = lossy.context("with lost packets")?;
        eprintln!("with lost packets: busbw {lossy:.1} MB/s, all results right");
        self.figures.lossy.push(lossy);
        Ok(())
    }

    /// The rounds of AllReduce with links that are slower than emulated devices: what waits for what shows, and not what
    /// costs how much of a processor.
    fn slowly(&mut self) -> Result<()> {
        let faults = self.testbed.faults.clone();
        let Some((slow, fast)) = faults.and_then(|faults| faults.slow.zip(faults.fast)) else {
            return Ok(());
        };
        let mut cluster = Cluster::start(&self.testbed, Carrier::Verbs, CALM)?;
        self.on_all(&slow)?;
        let rounds = self.budget.rounds.min(MOST_SLOW);
        let outcome = (1..=rounds).try_for_each(|round| self.slow_round(&mut cluster, round, rounds));
        self.on_all(&fast)?;
        outcome
    }

    fn slow_round(&mut self, cluster: &mut Cluster, round: usize, rounds: usize) -> Result<()> {
        let hosts = self.testbed.hosts.len();
        let ring: Vec<(usize, usize)> = (0..hosts).map(|host| (host, (host + 1) % hosts)).collect();
        let bound = self.perftest(&ring, self.writing(self.budget.writes))? / 1e6;
        let [mapped, attached] = ["mapped", "rdma"].map(|access| self.timed(cluster, access, 1));
        let (mapped, attached) = (mapped?, attached?);
        eprintln!(
            "slow links, round {round}/{rounds}: ib_write_bw in a ring {bound:.1} MB/s a host; busbw {mapped:.1} MB/s, attached over RDMA {attached:.1}"
        );
        self.figures.slow_ring.push(bound);
        self.figures.slow_mapped.push(mapped);
        self.figures.slow_attached.push(attached);
        Ok(())
    }

    /// busbw of AllReduce in MB/s, at the median operation; every rank checks its results.
    fn allreduce(&self, cluster: &mut Cluster, access: &str) -> Result<f64> {
        self.timed(cluster, access, self.budget.operations)
    }

    /// The same with so many timed operations.
    fn timed(&self, cluster: &mut Cluster, access: &str, operations: usize) -> Result<f64> {
        let (bytes, operations) = (self.budget.tensor.to_string(), operations.to_string());
        let arguments = ["--bytes", &bytes, "--warmup", "1", "--iterations", &operations, "--access", access];
        let measured = cluster.run(&arguments, LIMIT)?;
        let took = median(&measured.times_us).context("nothing was timed")?;
        Ok(wire_share(self.testbed.hosts.len()) * self.budget.tensor as f64 / took)
    }

    fn on_all(&self, template: &str) -> Result<()> {
        for (index, host) in self.testbed.hosts.iter().enumerate() {
            host.launcher.shell(&Faults::command(template, index, &host.name), &[], b"")?;
        }
        Ok(())
    }

    /// An agent that is killed, and a port that goes down, each while an operation runs: how long until every rank knows.
    fn failures(&mut self) -> Result<()> {
        let mut cluster = Cluster::start(&self.testbed, Carrier::Verbs, PEER_TIMEOUT)?;
        let arguments = ["--bytes", "4194304", "--until-lost"];
        let mut ranks = cluster.ranks(&arguments)?;
        ranks.begun()?;
        eprintln!("the agent of the last host is killed");
        let since = cluster.kill_last()?;
        self.figures.killed.push(ranks.lost(since, 0, LIMIT)?.as_secs_f64());
        drop(cluster);
        let Some(faults) = self.testbed.faults.clone() else { return Ok(()) };
        let (last, host) = self.testbed.hosts.iter().enumerate().next_back().context("no host")?;
        let mut cluster = Cluster::start(&self.testbed, Carrier::Verbs, PEER_TIMEOUT)?;
        let mut ranks = cluster.ranks(&arguments)?;
        ranks.begun()?;
        eprintln!("the port of the last host goes down");
        host.launcher.shell(&Faults::command(&faults.down, last, &host.name), &[], b"")?;
        let lost = ranks.lost(Instant::now(), 0, LIMIT);
        host.launcher.shell(&Faults::command(&faults.up, last, &host.name), &[], b"")?;
        self.figures.unplugged.push(lost?.as_secs_f64());
        Ok(())
    }

    fn rows(&self) -> Vec<Row> {
        let tensor = self.budget.tensor;
        let (hosts, figures) = (self.testbed.hosts.len(), &self.figures);
        let case = |case: &str, size, ranks, better, bar| Case {
            suite: "rdma",
            case: case.to_owned(),
            size,
            ranks,
            better,
            bar,
        };
        let more = |name: &str, size, ranks, bar, ours: &[f64], theirs: &[f64], reference: &str| {
            (!ours.is_empty())
                .then(|| case(name, size, ranks, Better::More, bar).compare(ours, theirs, reference))
        };
        let less = |name: &str, size, ranks, bar, ours: &[f64], theirs: &[f64], reference: &str| {
            (!ours.is_empty())
                .then(|| case(name, size, ranks, Better::Less, bar).compare(ours, theirs, reference))
        };
        let configured = |ours: &[f64]| vec![PEER_TIMEOUT.as_secs_f64(); ours.len()];
        let Figures { mapped, .. } = figures;
        let calm = median(mapped).map_or(Vec::new(), |calm| vec![calm; figures.lossy.len()]);
        [
            more(
                "stream, one link: MB/s",
                CHUNK,
                2,
                0.90,
                &figures.stream,
                &figures.write_bandwidth,
                "ib_write_bw",
            ),
            more(
                "stream, one link: MB/s",
                CHUNK,
                2,
                0.0,
                &figures.stream,
                &figures.stream_tcp,
                "ours over TCP",
            ),
            less(
                "message one way: us",
                SMALL,
                2,
                1.3,
                &figures.latency,
                &figures.write_latency,
                "ib_write_lat",
            ),
            less(
                "message one way: us",
                SMALL,
                2,
                f64::INFINITY,
                &figures.latency,
                &figures.send_latency,
                "ib_send_lat",
            ),
            more(
                "allreduce f32: busbw MB/s",
                tensor,
                hosts,
                0.80,
                mapped,
                &figures.ring,
                "ib_write_bw, all hosts in a ring",
            ),
            more("allreduce f32: busbw MB/s", tensor, hosts, 0.0, mapped, &figures.over_tcp, "ours over TCP"),
            more(
                "allreduce f32, attached over RDMA: busbw MB/s",
                tensor,
                hosts,
                0.70,
                &figures.attached,
                mapped,
                "attached by mapping",
            ),
            more(
                "allreduce f32, what attaching over RDMA adds: MB/s of tensors, in and out",
                tensor,
                hosts,
                0.90,
                &figures.added,
                &figures.to_itself,
                "ib_write_bw, all hosts to themselves",
            ),
            more(
                "allreduce f32, slow links: busbw MB/s",
                tensor,
                hosts,
                0.80,
                &figures.slow_mapped,
                &figures.slow_ring,
                "ib_write_bw, all hosts in a ring",
            ),
            more(
                "allreduce f32, slow links, attached over RDMA: busbw MB/s",
                tensor,
                hosts,
                0.70,
                &figures.slow_attached,
                &figures.slow_mapped,
                "attached by mapping",
            ),
            more(
                "allreduce f32, lost packets: busbw MB/s",
                tensor,
                hosts,
                0.0,
                &figures.lossy,
                &calm,
                "without loss",
            ),
            less(
                "an agent is killed: seconds to the last rank's error",
                4 << 20,
                hosts,
                1.0,
                &figures.killed,
                &configured(&figures.killed),
                "peer_timeout",
            ),
            less(
                "a port goes down: seconds to the last rank's error",
                4 << 20,
                hosts,
                1.0,
                &figures.unplugged,
                &configured(&figures.unplugged),
                "peer_timeout",
            ),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}
