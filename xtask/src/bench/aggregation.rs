//! Suite aggregation: what a core does as an aggregator, beside what the machine can; AllReduces by an aggregator against the same
//! hosts' own; and how tenants fare that share one.

use super::lab::{Lab, Measured};
use super::part::{self, Outcome, Part};
use super::row::{Better, Case, Row, median};
use crate::fabric::Faults;
use crate::topology::{Topology, star_with_aggregator};
use crate::workspace::Binaries;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

mod fairness;
mod tree;

const MIB: u64 = 1 << 20;

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Effort {
    /// Rounds in which everything has its turn.
    pub rounds: usize,
    /// Milliseconds of each turn.
    pub turn: u64,
    /// Bytes of a large operation.
    pub large: u64,
    /// Parts alone: core, large, codes, eight, lossy, faults, killed, small, fair, hog, tree; all if empty.
    pub only: Vec<String>,
}

impl Effort {
    /// For figures.
    pub fn new(rounds: usize, only: &[String]) -> Self {
        Self { rounds, turn: 100, large: 64 * MIB, only: only.to_vec() }
    }

    /// Shows that everything runs, and measures nothing worth a figure.
    pub fn smoke(only: &[String]) -> Self {
        Self { rounds: 1, turn: 5, large: 4 * MIB, only: only.to_vec() }
    }
}

struct Suite {
    effort: Effort,
    binaries: Binaries,
    stop: Arc<AtomicBool>,
}

const PARTS: &[Part<Suite>] = &[
    ("core", core),
    ("large", large),
    ("codes", codes),
    ("eight", eight),
    ("lossy", lossy),
    ("faults", faults),
    ("killed", killed),
    ("small", small),
    ("fair", fairness::fair),
    ("hog", fairness::hog),
    ("tree", tree::tree),
];

/// Measures.
pub fn run(effort: Effort, binaries: Binaries, stop: Arc<AtomicBool>) -> Outcome {
    let suite = Suite { effort, binaries, stop };
    part::run(&suite, PARTS, &suite.effort.only)
}

/// What `aggregator` prints for a size of chunk.
#[derive(Debug, Deserialize)]
struct Figures {
    bytes: u64,
    kernel_ns: Vec<f64>,
    aggregator_ns: Vec<f64>,
    ceiling: Vec<f64>,
    sum_loop: Vec<f64>,
}

/// The sum loop against the ceiling of sums; packets a second, in and as many out, beside those of the kernel alone.
fn core(suite: &Suite) -> Result<Vec<Row>> {
    let (rounds, turn) = (suite.effort.rounds.to_string(), suite.effort.turn.to_string());
    let mut command = Command::new(suite.binaries.path("aggregator")?);
    command.args(["--rounds", &rounds, "--turn", &turn]).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().context("cannot start the program `aggregator`")?;
    ensure!(output.status.success(), "the program `aggregator` ended with {}", output.status);
    let printed = String::from_utf8_lossy(&output.stdout);
    let figures: Vec<Figures> = printed.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(!figures.is_empty(), "no figures");
    let mut rows = Vec::new();
    for Figures { bytes, kernel_ns, aggregator_ns, ceiling, sum_loop } in figures {
        let middle = |values: &[f64]| median(values).unwrap_or(f64::NAN);
        let (kernel, own) = (middle(&kernel_ns), middle(&aggregator_ns));
        eprintln!(
            "chunks of {bytes} bytes: {:.0} packets a second and core through the kernel and the aggregator, {:.0} through the kernel alone ({kernel:.0} ns), {:.0} through the aggregator alone ({own:.0} ns)",
            1e9 / (kernel + own),
            1e9 / kernel,
            1e9 / own,
        );
        let case = Case {
            suite: "aggregation",
            case: format!("sum loop, chunks of {bytes} bytes: GB/s of parts"),
            size: bytes,
            ranks: 1,
            better: Better::More,
            bar: 0.5,
        };
        let rates = |values: &[f64]| values.iter().map(|rate| rate / 1e9).collect::<Vec<f64>>();
        rows.push(case.compare(&rates(&sum_loop), &rates(&ceiling), "one pass over a long vector"));
    }
    Ok(rows)
}

/// A star of hosts and an aggregator whose link is as wide as all of theirs.
#[derive(Debug, Clone, Copy)]
struct Star {
    hosts: usize,
    /// Of each host's link, Mbit/s.
    rate: u64,
    /// Of each host's link, as topology files have it.
    delay: &'static str,
    /// What a frame carries.
    mtu: u32,
    /// What goes wrong with frames at each end; none: they go in large buffers, with which nothing does.
    faults: Option<Faults>,
}

/// What frames carry between hosts that move tensors, and what they carry elsewhere.
const JUMBO: u32 = 9000;
const PLAIN: u32 = 1500;
/// Hosts' rates that are tried, Mbit/s, and what of the processors an operation may take at the one that counts.
const RATES: [u64; 4] = [1000, 500, 250, 125];
const BUSY: f64 = 0.6;
/// The budget of codes that add.
const SHARED: &str = "shared 4";
/// For how long a job of codes may last.
const LIMIT: Duration = Duration::from_secs(150);

/// 4 hosts at 1 Gbit/s, a large operation; with frames of both sizes.
fn large(suite: &Suite) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for mtu in [JUMBO, PLAIN] {
        let star = Star { hosts: 4, rate: RATES[0], delay: "0us", mtu, faults: None };
        rows.extend(suite.against_hosts(star, &[(suite.effort.large, 1.42)])?.0);
    }
    Ok(rows)
}

/// What `coded` prints for a budget.
#[derive(Debug, Deserialize)]
struct Coded {
    budget: String,
    times_us: Vec<f64>,
    algorithm: String,
    fallback: bool,
    claimed: f64,
    measured: f64,
}

/// 4 hosts, a large operation summed in codes that add, against the same exact by the hosts alone: at 1 Gbit/s, and at rates at which
/// processors have time to spare. Sums of 4 hosts' 4-bit codes have 6 bits.
fn codes(suite: &Suite) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for rate in RATES {
        let topology = star_with_aggregator(4, rate, "0us");
        let alone = topology.split("[[aggregator]]").next().unwrap_or_default();
        let before = busy()?;
        let (by_aggregator, took) = suite.coded(&topology, &[SHARED, "exact", "rotated 4"])?;
        let busy = (busy()? - before) / took;
        let (by_hosts, _) = suite.coded(alone, &["exact"])?;
        let of = |figures: &[Coded], name: &str| {
            let found = figures.iter().find(|found| found.budget == name);
            found.map(|found| (found.times_us.clone(), found.measured, found.claimed))
        };
        let ring = of(&by_hosts, "exact").context("no figures of the ring")?;
        let (ours, measured, claimed) = of(&by_aggregator, SHARED).context("no figures of codes")?;
        let case = |case: &str, better, bar| Case {
            suite: "aggregation",
            case: format!("allreduce f32 in codes that add, 4 hosts, {rate} Mbit/s: {case}"),
            size: suite.effort.large,
            ranks: 4,
            better,
            bar,
        };
        rows.push(case("us", Better::Less, 1.0 / 7.0).compare(&ours, &ring.0, "exact by the hosts alone"));
        if let Some((chunks, ..)) = of(&by_aggregator, "rotated 4") {
            rows.push(case("us", Better::Less, 1.0).compare(&ours, &chunks, "in 4 bits by the hosts alone"));
        }
        rows.push(case("vNMSE", Better::Less, 1.0).limit(&[measured], 0.021));
        rows.push(case("vNMSE", Better::Less, 1.0).compare(&[measured], &[claimed], "the receipt"));
        eprintln!("{rate} Mbit/s: processors busy for {:.0}% of the time with the aggregator", 100.0 * busy);
        if busy < BUSY {
            break;
        }
    }
    Ok(rows)
}

/// 8 hosts, a large operation, at the highest rate at which processors have time to spare.
fn eight(suite: &Suite) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for rate in RATES {
        let star = Star { hosts: 8, rate, delay: "0us", mtu: JUMBO, faults: None };
        let busy;
        (rows, busy) = suite.against_hosts(star, &[(suite.effort.large, 1.6)])?;
        if busy < BUSY {
            break;
        }
    }
    Ok(rows)
}

/// 8 hosts at 1 Gbit/s, half a millisecond on each host's link and none at the aggregator. Where the delay is made here each datagram
/// costs a read and a write of a thread, so that frames of 9,000 tell more.
fn small(suite: &Suite) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for mtu in [JUMBO, PLAIN] {
        let star = Star { hosts: 8, rate: RATES[0], delay: "500us", mtu, faults: None };
        rows.extend(suite.against_hosts(star, &[(24 << 10, 1.4), (4 << 10, 1.0)])?.0);
    }
    Ok(rows)
}

/// 4 hosts where each end loses one frame in a hundred, against the same where none is lost. So many frames that each goes by itself
/// leave a machine of two cores time to spare at a quarter of the rate.
fn lossy(suite: &Suite) -> Result<Vec<Row>> {
    let of_a_hundred = Faults { lost: 10_000, ..Faults::default() };
    suite.against_none("1% of frames lost at each end", of_a_hundred, 1.0 / 0.7)
}

/// The same where each end loses one in twenty, has one in a hundred twice, and others overtake one in twenty. No bar stands on the
/// time; that sums are right the tests see.
fn faults(suite: &Suite) -> Result<Vec<Row>> {
    let faults = Faults { lost: 50_000, twice: 10_000, late: 50_000 };
    suite.against_none("5% of frames lost, 1% twice, 5% late at each end", faults, 100.0)
}

/// For how long operations may go on longer than the hosts' own take if the aggregator dies in the middle of one, us.
const TAKE_OVER: f64 = 200_000.0;

/// 4 hosts and large operations, in one of which the aggregator is killed: how long that one takes, against the hosts' own and what a
/// takeover may cost. `collective` checks every result.
fn killed(suite: &Suite) -> Result<Vec<Row>> {
    let star = Star { hosts: 4, rate: 250, delay: "0us", mtu: JUMBO, faults: None };
    let topology = star_with_aggregator(4, 250, "0us");
    let alone = topology.split("[[aggregator]]").next().unwrap_or_default();
    let by_hosts = suite.times(alone, star, &[(suite.effort.large, 1.0)], false)?.of(suite.effort.large)?;
    let usual = median(&by_hosts).context("nothing was timed")?;
    let (bytes, mut longest) = (suite.effort.large.to_string(), Vec::new());
    for _ in 0..suite.effort.rounds {
        let fabric = Topology { mtu: star.mtu, ..Topology::parse(&topology)? };
        let mut lab = Lab::on(fabric, suite.binaries.clone(), Arc::clone(&suite.stop), |setup| setup)?;
        let arguments =
            ["--collective", "allreduce", "--bytes", &bytes, "--warmup", "1", "--iterations", "6", "--json"];
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        let job = lab.start("collective", &[0, 1, 2, 3], &arguments)?;
        // Sums are told now and then; by then the next operation is under way, and some are still to come.
        lab.deployment().wait_until("the aggregator has summed nothing", |this| {
            let told = this.ask(&["topology"])?;
            Ok(summed(&told, 0).then_some(()))
        })?;
        let aggregator = lab.deployment().aggregator(0)?.id();
        let mut kill = Command::new("kill");
        ensure!(kill.args(["-9", &aggregator.to_string()]).status()?.success(), "it cannot be killed");
        let measured: Vec<Measured> = lab.finish_without_check(job, LIMIT)?;
        let times = measured.first().context("no figures")?.times_us.iter();
        longest.push(times.copied().fold(0.0, f64::max));
    }
    let case = Case {
        suite: "aggregation",
        case: "allreduce f32, 4 hosts, 250 Mbit/s, the aggregator killed in the middle: the longest of 6, us"
            .to_owned(),
        size: suite.effort.large,
        ranks: 4,
        better: Better::Less,
        bar: 1.0,
    };
    Ok(vec![case.compare(&longest, &[usual + TAKE_OVER], "200 ms more than the hosts alone")])
}

/// Whether the aggregator that is `position`-th has told of sums.
fn summed(fabric: &Value, position: usize) -> bool {
    let tenants = fabric.pointer(&format!("/aggregators/{position}/report/tenants"));
    let tenants = tenants.and_then(Value::as_array);
    let sums = |tenant: &Value| tenant.get("sums").and_then(Value::as_u64).unwrap_or(0);
    tenants.is_some_and(|tenants| tenants.iter().any(|tenant| sums(tenant) > 0))
}

/// Operations' times, and what of the processors they took at most.
struct Timed {
    measured: Vec<Measured>,
    busy: f64,
}

impl Timed {
    fn of(&self, size: u64) -> Result<Vec<f64>> {
        let found = self.measured.iter().find(|measured| measured.bytes == size);
        found.map(|found| found.times_us.clone()).with_context(|| format!("no figure for {size} bytes"))
    }
}

/// Seconds that all processors of this machine were busy since it started (proc(5), /proc/stat: user, nice, system, then idle and
/// waiting, then interrupts, soft ones, and what others took), in ticks of a hundredth.
fn busy() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let fields = text.lines().next().unwrap_or_default().split_whitespace().skip(1).take(8);
    let ticks: Vec<f64> = fields.map(str::parse).collect::<Result<_, _>>().context("/proc/stat")?;
    let idle: f64 = ticks.iter().skip(3).take(2).sum();
    Ok((ticks.iter().sum::<f64>() - idle) / 100.0)
}

impl Suite {
    /// Operations of these sizes where there is an aggregator, against the same hosts without; each size with its bar. And what of
    /// the processors they took with it.
    fn against_hosts(&self, star: Star, sizes: &[(u64, f64)]) -> Result<(Vec<Row>, f64)> {
        let Star { hosts, rate, delay, mtu, .. } = star;
        let topology = star_with_aggregator(hosts, rate, delay);
        let alone = topology.split("[[aggregator]]").next().unwrap_or_default();
        let by_aggregator = self.times(&topology, star, sizes, true)?;
        let by_hosts = self.times(alone, star, sizes, false)?;
        let name = format!("{hosts} hosts, {rate} Mbit/s, {delay} a link, frames of {mtu}");
        eprintln!(
            "{name}: processors busy for at most {:.0}% of the time by the aggregator, {:.0}% by the hosts",
            100.0 * by_aggregator.busy,
            100.0 * by_hosts.busy
        );
        let mut rows = Vec::new();
        for (size, bar) in sizes {
            let case = Case {
                suite: "aggregation",
                case: format!("allreduce f32, {name}: us"),
                size: *size,
                ranks: hosts,
                better: Better::Less,
                bar: 1.0 / bar,
            };
            let (ours, theirs) = (by_aggregator.of(*size)?, by_hosts.of(*size)?);
            let row = case.compare(&ours, &theirs, "the same by the hosts alone");
            eprintln!(
                "{name}, {size} bytes: {:.2} times as fast by the aggregator",
                row.ratio.unwrap_or_default()
            );
            rows.push(row);
        }
        Ok((rows, by_aggregator.busy))
    }

    /// Large operations of 4 hosts with these faults, against the same with none; at most so many times as long.
    fn against_none(&self, what: &str, faults: Faults, bar: f64) -> Result<Vec<Row>> {
        let sizes = [(self.effort.large, 1.0)];
        let topology = star_with_aggregator(4, 250, "0us");
        let times = |faults| {
            let star = Star { hosts: 4, rate: 250, delay: "0us", mtu: JUMBO, faults: Some(faults) };
            self.times(&topology, star, &sizes, true)?.of(self.effort.large)
        };
        let (with, without) = (times(faults)?, times(Faults::default())?);
        let case = Case {
            suite: "aggregation",
            case: format!("allreduce f32, 4 hosts, 250 Mbit/s, {what}: us"),
            size: self.effort.large,
            ranks: 4,
            better: Better::Less,
            bar,
        };
        Ok(vec![case.compare(&with, &without, "the same without")])
    }

    /// Budgets in turn on a fabric; and the processors' time of the whole.
    fn coded(&self, topology: &str, budgets: &[&str]) -> Result<(Vec<Coded>, f64)> {
        let topology = Topology { mtu: JUMBO, ..Topology::parse(topology)? };
        let mut lab = Lab::on(topology, self.binaries.clone(), Arc::clone(&self.stop), |setup| setup)?;
        let (bytes, budgets) = (self.effort.large.to_string(), budgets.join(","));
        let rounds = (4 * self.effort.rounds).to_string();
        let arguments = ["--bytes", &bytes, "--budgets", &budgets, "--warmup", "2", "--iterations", &rounds];
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        let begun = std::time::Instant::now();
        let figures: Vec<Coded> = lab.figures("coded", &[0, 1, 2, 3], &arguments, LIMIT)?;
        for Coded { budget, times_us, algorithm, fallback, claimed, measured } in &figures {
            eprintln!(
                "{budget}: {:.1} ms, {algorithm}, vNMSE {claimed:.3e} claimed and {measured:.3e} measured{}",
                median(times_us).unwrap_or_default() / 1e3,
                if *fallback { ", in part by the hosts" } else { "" }
            );
        }
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as f64;
        Ok((figures, begun.elapsed().as_secs_f64() * cores))
    }

    /// Times of operations on a fabric; an error where an aggregator that is there has summed nothing.
    fn times(&self, topology: &str, star: Star, sizes: &[(u64, f64)], aggregated: bool) -> Result<Timed> {
        let topology = Topology { mtu: star.mtu, forwards: true, ..Topology::parse(topology)? };
        let mut lab = Lab::on(topology, self.binaries.clone(), Arc::clone(&self.stop), |setup| setup)?;
        if let Some(faults) = star.faults {
            lab.fabric().set_faults(faults)?;
        }
        let list = sizes.iter().map(|(size, _)| size.to_string()).collect::<Vec<_>>().join(",");
        let (warmup, iterations) = (2, 4 * self.effort.rounds);
        let counts = [warmup.to_string(), iterations.to_string()];
        let everyone: Vec<usize> = (0..star.hosts).collect();
        let arguments = [
            "--collective",
            "allreduce",
            "--bytes",
            &list,
            "--warmup",
            &counts[0],
            "--iterations",
            &counts[1],
        ];
        let before = busy()?;
        let measured = lab.ours(&everyone, &arguments)?;
        // With the tenants' beginning and end, over the operations' time alone: it was no more.
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as f64;
        let each = (warmup + iterations) as f64;
        let took =
            measured.iter().map(|one| each * median(&one.times_us).unwrap_or_default() / 1e6).sum::<f64>();
        let busy = (busy()? - before) / cores / took.max(f64::MIN_POSITIVE);
        if aggregated {
            let tenants = lab.deployment().wait_until("the aggregator has summed nothing", |this| {
                let fabric = this.ask(&["topology"])?;
                let tenants = fabric.pointer("/aggregators/0/report/tenants").cloned();
                Ok(summed(&fabric, 0).then_some(tenants.unwrap_or_default()))
            })?;
            eprintln!("the aggregator's counts: {tenants}");
        }
        Ok(Timed { measured, busy })
    }
}
