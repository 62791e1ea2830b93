//! Suite rdma: our links, collectives and attachments beside what the devices give to perftest, on the hosts of a testbed.

use super::cluster::{self, Carrier, Cluster};
use super::part::Outcome;
use super::perftest::{self, End, Measure};
use super::row::{Better, Case, Row, median};
use super::suite::Request;
use super::testbed::{Faults, Testbed};
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::workspace::{Binaries, Profile};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub mod named;

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
    /// Parts alone: stream, latency, allreduce, loss, slow, failure, aggregated; all if empty.
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
pub const PARTS: &[&str] = &["stream", "latency", "allreduce", "loss", "slow", "failure", "aggregated"];

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

/// What is measured round by round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Series {
    WriteBandwidth,
    Stream,
    StreamTcp,
    WriteLatency,
    SendLatency,
    Latency,
    Ring,
    Mapped,
    OverTcp,
    Attached,
    Lossy,
    Lossless,
    ToItself,
    Added,
    SlowRing,
    SlowMapped,
    SlowAttached,
    ByHosts,
    Aggregated,
    Killed,
    Unplugged,
    PeerTimeout,
}

/// What a row's ranks move.
#[derive(Debug, Clone, Copy)]
enum Payload {
    Chunk,
    Message,
    Tensor,
    Block,
}

/// What a row states: the part, the case, its payload, the better direction, and the bar. The bar is there if one can be missed. Then
/// come our series, the reference's, and its name.
type Spec = (&'static str, &'static str, Payload, Better, Option<f64>, Series, Series, &'static str);

/// The rows of all parts.
const ROWS: [Spec; 14] = {
    use Better::{Less, More};
    use Payload::{Block, Chunk, Message, Tensor};
    use Series::*;
    const RING: &str = "ib_write_bw, all hosts in a ring";
    const BUSBW: &str = "allreduce f32: busbw MB/s";
    const SLOW: &str = "allreduce f32, slow links: busbw MB/s";
    const STREAM: &str = "stream, one link: MB/s";
    const MAPPED: &str = "attached by mapping";
    const ADDS: &str = "allreduce f32, what attaching over RDMA adds: MB/s of tensors, in and out";
    const TO_ITSELF: &str = "ib_write_bw, all hosts to themselves";
    const KILLED: &str = "an agent is killed: seconds to the last rank's error";
    const DOWN: &str = "a port goes down: seconds to the last rank's error";
    const ATTACHED: &str = "allreduce f32, attached over RDMA: busbw MB/s";
    const SLOW_ATTACHED: &str = "allreduce f32, slow links, attached over RDMA: busbw MB/s";
    const AGGREGATED: &str = "allreduce f32, attached over RDMA, by an aggregator: busbw MB/s";
    const BY_HOSTS: &str = "the ring, attached over RDMA";
    const LOSS: &str = "allreduce f32, lost packets: busbw MB/s";
    [
        ("stream", STREAM, Chunk, More, Some(0.90), Stream, WriteBandwidth, "ib_write_bw"),
        ("stream", STREAM, Chunk, More, None, Stream, StreamTcp, "ours over TCP"),
        ("latency", "message one way: us", Message, Less, Some(1.3), Latency, WriteLatency, "ib_write_lat"),
        ("latency", "message one way: us", Message, Less, None, Latency, SendLatency, "ib_send_lat"),
        ("allreduce", BUSBW, Tensor, More, Some(0.80), Mapped, Ring, RING),
        ("allreduce", BUSBW, Tensor, More, None, Mapped, OverTcp, "ours over TCP"),
        ("allreduce", ATTACHED, Tensor, More, Some(0.70), Attached, Mapped, MAPPED),
        ("allreduce", ADDS, Tensor, More, Some(0.90), Added, ToItself, TO_ITSELF),
        ("slow", SLOW, Tensor, More, Some(0.80), SlowMapped, SlowRing, RING),
        ("slow", SLOW_ATTACHED, Tensor, More, Some(0.70), SlowAttached, SlowMapped, MAPPED),
        ("loss", LOSS, Tensor, More, None, Lossy, Lossless, "without loss"),
        ("failure", KILLED, Block, Less, Some(1.0), Killed, PeerTimeout, "peer_timeout"),
        ("failure", DOWN, Block, Less, Some(1.0), Unplugged, PeerTimeout, "peer_timeout"),
        ("aggregated", AGGREGATED, Tensor, More, Some(1.3), Aggregated, ByHosts, BY_HOSTS),
    ]
};

/// Bytes of a rank's tensor while something fails.
const BLOCK: u64 = 4 << 20;

/// Figures of the rounds, in their order.
#[derive(Debug, Default)]
struct Figures(BTreeMap<Series, Vec<f64>>);

impl Figures {
    fn push(&mut self, series: Series, figure: f64) {
        self.0.entry(series).or_default().push(figure);
    }

    fn of(&self, series: Series) -> &[f64] {
        self.0.get(&series).map_or(&[], Vec::as_slice)
    }

    /// The rows of the parts that were wanted. One that was not measured is stated: a part that failed fails the run itself.
    fn rows(&self, budget: &Budget, hosts: usize) -> Vec<Row> {
        let wanted = ROWS.iter().filter(|(part, ..)| budget.wants(part));
        let row = |(_, case, payload, better, bar, ours, reference, name): &Spec| {
            let (size, ranks) = match payload {
                Payload::Chunk => (CHUNK, 2),
                Payload::Message => (SMALL, 2),
                Payload::Tensor => (budget.tensor, hosts),
                Payload::Block => (BLOCK, hosts),
            };
            let case = Case::new("rdma", *case, *better, bar.unwrap_or(1.0)).of(size, ranks);
            let case = if bar.is_none() { case.stated() } else { case };
            match self.of(*ours) {
                [] => {
                    case.stated().missing(name, "not measured: no round of it, or no `[faults]` in the file")
                }
                figures => case.compare(figures, self.of(*reference), name),
            }
        };
        wanted.map(row).collect()
    }
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
    let parts: [Part; 5] = [
        (&["stream", "latency"], "between two hosts", Suite::between_two),
        (&["allreduce", "loss"], "on all hosts", Suite::collectives),
        (&["slow"], "with slow links", Suite::slowly),
        (&["failure"], "with failures", Suite::failures),
        (&["aggregated"], "by an aggregator", Suite::aggregated),
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
    Ok(Outcome { rows: suite.figures.rows(&suite.budget, suite.testbed.hosts.len()), problems })
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
            host.launcher.write(&folder.join(name), &program, 0o755)?;
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
                self.figures.push(Series::WriteBandwidth, theirs);
                self.figures.push(Series::Stream, ours);
                self.figures.push(Series::StreamTcp, tcp);
            }
            if self.budget.wants("latency") {
                let measure = |sends| Measure::Latency { sends, bytes: SMALL, iterations: trips };
                let writes = self.perftest(&[(0, 1)], measure(false))?;
                let ours = self.ping(trips)?;
                let sends = self.perftest(&[(0, 1)], measure(true))?;
                eprintln!(
                    "round {round}/{rounds}: ib_write_lat {writes:.1} us, ib_send_lat {sends:.1}, ours {ours:.1}"
                );
                self.figures.push(Series::WriteLatency, writes);
                self.figures.push(Series::SendLatency, sends);
                self.figures.push(Series::Latency, ours);
            }
        }
        Ok(())
    }

    fn perftest(&self, pairs: &[(usize, usize)], measure: Measure) -> Result<f64> {
        perftest::measure(self.testbed.ports, &self.ends, pairs, measure)
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
        let first = self.testbed.hosts.first().context("no host")?;
        let mut listener = start(1, &["--from", &first.address.to_string()])?;
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
        let runs = if self.budget.wants("allreduce") { rounds } else { 0 };
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
                self.figures.push(Series::ToItself, own);
                self.figures.push(Series::Added, 2.0 / wire_share(hosts) / added);
            }
            self.figures.push(Series::Ring, bound);
            self.figures.push(Series::Mapped, mapped);
            self.figures.push(Series::OverTcp, over_tcp);
            self.figures.push(Series::Attached, attached);
        }
        drop(tcp);
        if !self.budget.wants("loss") {
            return Ok(());
        }
        let Some(faults) = self.testbed.faults.clone() else { return Ok(()) };
        for _ in 0..rounds {
            let lossless = self.allreduce(&mut verbs, "mapped")?;
            self.on_all(&faults.lossy)?;
            let lossy = self.allreduce(&mut verbs, "mapped");
            self.on_all(&faults.lossless)?;
            let lossy = lossy.context("with lost packets")?;
            eprintln!("with lost packets: busbw {lossy:.1} MB/s, without {lossless:.1}, all results right");
            self.figures.push(Series::Lossless, lossless);
            self.figures.push(Series::Lossy, lossy);
        }
        Ok(())
    }

    /// The rounds of AllReduce of ranks attached over RDMA, by an aggregator on the first host and by the hosts.
    fn aggregated(&mut self) -> Result<()> {
        let (rounds, tensor) = (self.budget.rounds, self.budget.tensor);
        let mut hosts = Cluster::start(&self.testbed, Carrier::Verbs, CALM)?;
        let mut aggregated = Cluster::start(&self.testbed, Carrier::Aggregated, CALM)?;
        let mut used = 0;
        for round in 1..=rounds {
            let by_hosts = self.allreduce(&mut hosts, "rdma")?;
            let (busbw, sent) = self.measured(&mut aggregated, "rdma", self.budget.operations)?;
            // By an aggregator a host sends its tensor once; in a ring it sends more, from three hosts on.
            used += usize::from(sent == tensor);
            eprintln!(
                "round {round}/{rounds}: attached over RDMA, busbw {busbw:.1} MB/s with {sent} bytes of {tensor} sent a host, by the hosts {by_hosts:.1}"
            );
            self.figures.push(Series::ByHosts, by_hosts);
            self.figures.push(Series::Aggregated, busbw);
        }
        ensure!(used > 0 || rounds == 0, "no operation went by the aggregator");
        Ok(())
    }

    /// The rounds of AllReduce with links that are slower than emulated devices. What waits for what shows, and not what
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
        self.figures.push(Series::SlowRing, bound);
        self.figures.push(Series::SlowMapped, mapped);
        self.figures.push(Series::SlowAttached, attached);
        Ok(())
    }

    /// busbw of AllReduce in MB/s, at the median operation; every rank checks its results.
    fn allreduce(&self, cluster: &mut Cluster, access: &str) -> Result<f64> {
        self.timed(cluster, access, self.budget.operations)
    }

    /// The same with so many timed operations.
    fn timed(&self, cluster: &mut Cluster, access: &str, operations: usize) -> Result<f64> {
        Ok(self.measured(cluster, access, operations)?.0)
    }

    /// The same, and the bytes that the first rank's host sent for the last of them.
    fn measured(&self, cluster: &mut Cluster, access: &str, operations: usize) -> Result<(f64, u64)> {
        let (bytes, operations) = (self.budget.tensor.to_string(), operations.to_string());
        let arguments = ["--bytes", &bytes, "--warmup", "1", "--iterations", &operations, "--access", access];
        let measured = cluster.run(&arguments, LIMIT)?;
        let took = median(&measured.times_us).context("nothing was timed")?;
        let busbw = wire_share(self.testbed.hosts.len()) * self.budget.tensor as f64 / took;
        Ok((busbw, measured.wire_bytes))
    }

    fn on_all(&self, template: &str) -> Result<()> {
        for (index, host) in self.testbed.hosts.iter().enumerate() {
            host.launcher.shell(&Faults::command(template, index, &host.name), &[], b"")?;
        }
        Ok(())
    }

    /// An agent that is killed, and a port that goes down, each while an operation runs. The figure is how long until
    /// every rank knows.
    fn failures(&mut self) -> Result<()> {
        (0..self.budget.rounds).try_for_each(|_| self.failure())
    }

    fn failure(&mut self) -> Result<()> {
        let mut cluster = Cluster::start(&self.testbed, Carrier::Verbs, PEER_TIMEOUT)?;
        let bytes = BLOCK.to_string();
        let arguments = ["--bytes", &bytes, "--until-lost"];
        let mut ranks = cluster.ranks(&arguments)?;
        ranks.begun()?;
        eprintln!("the agent of the last host is killed");
        let since = cluster.kill_last()?;
        self.figures.push(Series::PeerTimeout, PEER_TIMEOUT.as_secs_f64());
        self.figures.push(Series::Killed, ranks.lost(since, 0, LIMIT)?.as_secs_f64());
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
        self.figures.push(Series::Unplugged, lost?.as_secs_f64());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wanted_row_is_there_and_only_bars_are_held() {
        let mut figures = Figures::default();
        figures.push(Series::Stream, 80.0);
        figures.push(Series::StreamTcp, 100.0);
        figures.push(Series::WriteBandwidth, 100.0);
        let all = figures.rows(&Budget::default(), 4);
        assert_eq!(all.len(), ROWS.len());
        assert_eq!(all.iter().filter(|row| row.failed()).count(), 1, "{all:?}");
        assert!(all[0].failed() && all[1].pass.is_none() && all[1].ratio == Some(0.8));
        assert!(all[11].reference_name.contains("not measured") && all[11].pass.is_none());
        let budget = Budget { only: vec!["failure".to_owned()], ..Budget::default() };
        assert_eq!(figures.rows(&budget, 4).len(), 2);
    }
}
