//! What telemetry costs: a packet, a mark, a job's bandwidth, the agent's thread.

use super::{HOSTS, Suite, Telemetry};
use crate::figures::{summary, upper_bound};
use crate::lab::{Lab, Measured};
use crate::row::{Case, Row, median};
use anyhow::{Context, Result, bail, ensure};
use harmonaize_testkit::job::printed;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::usage::processor_time_of;
use harmonaize_testkit::workspace;
use std::process::Command;
use std::time::{Duration, Instant};

/// Messages of these bytes.
const SIZES: [u64; 2] = [128 << 10, 4 << 20];
/// Operations of each size in a run.
type Operations = [usize; SIZES.len()];
/// How links are, the most that telemetry may take of busbw, in percent, and how many operations are a run. Where processors
/// are short, runs differ most. Telemetry takes less once it has seen so, which a short run would not show.
const UNSHAPED: (&str, f64, Operations) = ("unshaped", 3.0, [4000, 160]);
const SHAPED: (&str, f64, Operations) = ("1 Gbit/s", 1.0, [100, 8]);
/// Runs with telemetry (0), without (1), and without on a network of their own (2), in turn. What drifts steadily is the same for all.
const ORDERS: [[usize; 6]; 3] = [[0, 1, 2, 2, 1, 0], [1, 2, 0, 0, 2, 1], [2, 0, 1, 1, 0, 2]];
/// The most that the agent's telemetry thread may take of a core, in percent.
const CORE: f64 = 2.0;
/// How the kernel names that thread.
const THREAD: &str = "telemetry";
/// Messages a second over all flows.
const MESSAGES: u32 = 1000;

fn case(case: String, size: u64, ranks: usize) -> Case {
    Case::less("telemetry", case, 1.0).of(size, ranks)
}

/// The programs run on one packet in the kernel: `cargo bench -p harmonaize-loader --bench packet`.
pub(super) fn packet(_: &Suite) -> Result<Vec<Row>> {
    let mut bench = workspace::cargo();
    bench.args(["bench", "--quiet", "--package", "harmonaize-loader", "--bench", "packet"]);
    let text = printed(&mut bench)?;
    eprint!("{text}");
    let found = packets(&text)?;
    let row = |(name, both, bar): (String, f64, f64)| {
        let case = case(format!("{name}: ns a packet, both ways"), 0, 1);
        if bar > 0.0 { case.limit(&[both], bar) } else { case.state(&[both]) }
    };
    Ok(found.into_iter().map(row).collect())
}

/// Name and time of both directions, and the bar, of those lines that have one; 0 where none is held.
fn packets(text: &str) -> Result<Vec<(String, f64, f64)>> {
    let mut found = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |word: &&str| word.parse::<f64>().ok();
        let Some(at) = words.iter().position(|word| number(word).is_some()) else { continue };
        let (name, figures) = words.split_at(at);
        let figures: Vec<f64> = figures.iter().map_while(number).collect();
        if let [_ingress, _egress, both, _itself, bar] = figures.as_slice()
            && name != ["other"]
        {
            found.push((name.join(" "), *both, *bar));
        }
    }
    ensure!(!found.is_empty(), "no figures in: {text}");
    Ok(found)
}

/// A mark of the engine, beside the look at the clock that is a part of it. The figures are from
/// `cargo bench -p harmonaize-engine --bench marks`.
pub(super) fn mark(_: &Suite) -> Result<Vec<Row>> {
    let mut bench = workspace::cargo();
    bench.args(["bench", "--quiet", "--package", "harmonaize-engine", "--bench", "marks"]);
    let text = printed(&mut bench)?;
    eprint!("{text}");
    let of = |name: &str| figure(&text, name).with_context(|| format!("no figure of {name} in: {text}"));
    let (mark, clock) = (of("a mark")?, of("a look at the clock")?);
    let case = case("a mark of an own operation: ns".into(), 0, 1).stated();
    Ok(vec![case.compare(&[mark], &[clock], "a look at the clock")])
}

/// The first figure of the line of a name.
fn figure(text: &str, name: &str) -> Option<f64> {
    let number = |word: &str| word.parse::<f64>().ok();
    let figure = |line: &str| number(line.strip_prefix(name)?.split_whitespace().next()?);
    text.lines().find_map(figure)
}

/// AllReduce on four hosts with telemetry on and off, in turn. Rows are the loss of busbw that it stays below with 95% confidence,
/// and what two networks without telemetry differ by in the same rounds.
pub(super) fn unshaped(suite: &Suite) -> Result<Vec<Row>> {
    busbw(suite, |telemetry| suite.unshaped(telemetry), UNSHAPED)
}

/// The same over links of 1 Gbit/s.
pub(super) fn shaped(suite: &Suite) -> Result<Vec<Row>> {
    busbw(suite, |telemetry| suite.lab(telemetry), SHAPED)
}

fn busbw(
    suite: &Suite,
    build: impl Fn(Telemetry) -> Result<Lab>,
    (link, limit, counts): (&str, f64, Operations),
) -> Result<Vec<Row>> {
    let mut labs = [build(Telemetry::On)?, build(Telemetry::Off)?, build(Telemetry::Off)?];
    let mut losses = SIZES.map(|_| [Vec::new(), Vec::new()]);
    for (_, order) in (0..suite.budget.pairs).zip(ORDERS.iter().cycle()) {
        for ((bytes, operations), losses) in SIZES.iter().zip(counts).zip(&mut losses) {
            let mut times = [0.0; 3];
            for which in *order {
                let (Some(lab), Some(time)) = (labs.get_mut(which), times.get_mut(which)) else { continue };
                *time += operation(lab, *bytes, operations)?;
            }
            let [on, off, again] = times;
            for (losses, other) in losses.iter_mut().zip([on, again]) {
                losses.push((1.0 - off / other) * 100.0);
            }
        }
    }
    let mut rows = Vec::new();
    for (bytes, [by_telemetry, by_chance]) in SIZES.iter().zip(&losses) {
        let what = format!("allreduce f32, {link}: % of busbw lost, upper 95% bound of the median");
        rows.push(bound(case(what, *bytes, HOSTS), by_telemetry, limit));
        let what = format!("allreduce f32, {link}: the same between two networks without telemetry");
        rows.push(bound(case(what, *bytes, HOSTS).stated(), by_chance, limit));
    }
    Ok(rows)
}

/// A row of the bound of losses.
fn bound(case: Case, losses: &[f64], limit: f64) -> Row {
    eprintln!("{}, {} bytes: loss in percent {}", case.case, case.size, summary(losses));
    match upper_bound(losses) {
        Some(bound) => Row { runs: losses.len(), spread: spread(losses), ..case.limit(&[bound], limit) },
        None => case.missing("limit", "a bound needs five pairs or more"),
    }
}

/// Largest less smallest loss, as a share of the bandwidth.
fn spread(losses: &[f64]) -> Option<f64> {
    let (least, most) = losses.iter().fold((f64::MAX, f64::MIN), |(a, b), loss| (a.min(*loss), b.max(*loss)));
    Some((most - least) / 100.0).filter(|spread| spread.is_finite() && *spread >= 0.0)
}

/// Microseconds of an AllReduce at the median of a run.
pub(super) fn operation(lab: &mut Lab, bytes: u64, operations: usize) -> Result<f64> {
    let hosts: Vec<usize> = (0..HOSTS).collect();
    let (bytes, operations) = (bytes.to_string(), operations.to_string());
    let arguments = ["--bytes", &bytes, "--warmup", "3", "--iterations", &operations, "--in-place"];
    let measured = lab.ours(&hosts, &arguments)?;
    let [Measured { times_us, .. }] = measured.as_slice() else { bail!("one size, and not one figure") };
    median(times_us).context("nothing was timed")
}

/// Many flows through a host: the share of a core that its agent's telemetry thread takes.
pub(super) fn thread(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = suite.lab(Telemetry::On)?;
    let flows = suite.budget.flows;
    let mut talk = Talk::begin(&lab, flows, MESSAGES, suite.budget.seconds + 6)?;
    let agent = lab.deployment().agent(0)?.id();
    let mut shares = Vec::new();
    // What the flows' beginnings have left is worked off first.
    std::thread::sleep(Duration::from_secs(3));
    for _ in 0..suite.budget.seconds {
        let (before, began) = (processor_time_of(agent, THREAD)?, Instant::now());
        std::thread::sleep(Duration::from_secs(1));
        let used = processor_time_of(agent, THREAD)?.saturating_sub(before);
        shares.push(used.as_secs_f64() / began.elapsed().as_secs_f64() * 100.0);
        lab.check()?;
    }
    talk.end()?;
    eprintln!("telemetry thread, {flows} flows: percent of a core {}", summary(&shares));
    let what =
        format!("the agent's telemetry thread, {flows} flows, {MESSAGES} messages a second: % of a core");
    Ok(vec![case(what, 0, 1).limit(&shares, CORE)])
}

/// Small messages over many connections of others, from the first host to the second.
pub(super) struct Talk {
    sender: Process,
    receiver: Process,
    deadline: Instant,
}

impl Talk {
    /// Connects, and goes on for so many seconds from then.
    pub(super) fn begin(lab: &Lab, flows: usize, per_second: u32, seconds: u64) -> Result<Self> {
        const LIMIT: Duration = Duration::from_secs(120);
        let [from, to, ..] = lab.fabric().hosts() else { bail!("flows need two hosts") };
        let address = to.addresses.first().context("a host without address")?;
        let deadline = Instant::now() + LIMIT;
        let flows = flows.to_string();
        let mut receive = Command::new(lab.program("flows"));
        receive.arg("receive").arg(format!("{address}:0")).args(["--flows", &flows]);
        let log = lab.logs().join("flows-receive.log");
        let mut receiver = Process::start("the flows' receiver", &mut receive, &to.namespace, &log)?;
        let listens = receiver.line_by(deadline, |_| true)?;
        let mut send = Command::new(lab.program("flows"));
        send.args(["send", &listens, "--flows", &flows, "--per-second", &per_second.to_string()]);
        send.args(["--seconds", &seconds.to_string()]);
        let log = lab.logs().join("flows-send.log");
        let mut sender = Process::start("the flows' sender", &mut send, &from.namespace, &log)?;
        sender.line_by(deadline, |line| line == "connected")?;
        Ok(Self { sender, receiver, deadline })
    }

    /// Waits until it is over.
    pub(super) fn end(&mut self) -> Result<()> {
        self.sender.succeed_by(self.deadline)?;
        self.receiver.succeed_by(self.deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_packets_are_read() {
        let text = "ns a packet, medians of 15 interleaved rounds\n\
                    packet         ingress  egress    both by itself   bar\n\
                    TCP, IPv4           72      73     145        19   150 within\n\
                    RoCE RC ACK            90      95     185        40     0 stated\n\
                    the same, each after 2048 KiB of something else were written: medians\n\
                    cold caches, RoCE RC ACK  140   150     290        40   300 within\n\
                    other               11      11      22        19   150 within\n";
        let expected = [
            ("TCP, IPv4", 145.0, 150.0),
            ("RoCE RC ACK", 185.0, 0.0),
            ("cold caches, RoCE RC ACK", 290.0, 300.0),
        ];
        assert_eq!(packets(text).unwrap(), expected.map(|(name, both, bar)| (name.to_owned(), both, bar)));
        assert!(packets("nothing").is_err());
    }

    #[test]
    fn figures_of_marks_are_read() {
        let text = "ns, medians of 101 rounds of 4096\na mark                        52.5 (51.0 to 60.1)\n\
                    a mark that nobody reads       0.4 (0.4 to 0.5)\n";
        assert_eq!(figure(text, "a mark"), Some(52.5));
        assert_eq!(figure(text, "a look at the clock"), None);
    }

    #[test]
    fn loss_spread_is_relative_to_bandwidth() {
        assert_eq!(spread(&[-1.0, 2.0, 0.0]), Some(0.03));
        assert_eq!(spread(&[]), None);
    }
}
