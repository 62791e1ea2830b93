//! Suite aggregation: what a core does as an aggregator, beside what the machine can; AllReduces by an aggregator against the same
//! hosts' own; and how tenants fare that share one.

use super::lab::{Lab, Measured};
use super::part::Part;
use super::row::{Better, Case, Row, median};
use super::suite::{Bench, BenchBudget, Request};
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::deployment::Tenant;
use harmonaize_testkit::fabric::Faults;
use harmonaize_testkit::topology::{Topology, star_with_aggregator};
use serde::Deserialize;
use serde_json::Value;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

mod fairness;
mod killed;
mod tree;

const MIB: u64 = 1 << 20;

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Budget {
    /// Rounds in which everything has its turn.
    pub rounds: usize,
    /// Milliseconds of each turn.
    pub turn: u64,
    /// Bytes of a large operation.
    pub large: u64,
}

/// What all parts work with.
type Suite = Bench<Budget>;

impl BenchBudget for Budget {
    const PARTS: &'static [Part<Suite>] = &[
        ("core", core),
        ("large", large),
        ("codes", codes),
        ("wide", wide),
        ("eight", eight),
        ("lossy", lossy),
        ("faults", faults),
        ("killed", killed::killed),
        ("small", small),
        ("fair", fairness::fair),
        ("hog", fairness::hog),
        ("tree", tree::tree),
    ];

    fn new(request: &Request) -> Self {
        Self { rounds: request.rounds(), turn: 100, large: 64 * MIB }
    }

    fn smoke() -> Self {
        Self { rounds: 1, turn: 5, large: 4 * MIB }
    }
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
    let (rounds, turn) = (suite.budget.rounds.to_string(), suite.budget.turn.to_string());
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
const RATES: [u64; 5] = [1000, 500, 250, 125, 62];
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
        rows.extend(suite.against_hosts(star, &[(suite.budget.large, 1.42)])?.0);
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

/// Bits of an element, and of the hosts' codes of it.
const ELEMENT: f64 = 32.0;
const BITS: f64 = 4.0;

/// 4 hosts, whose 4-bit codes have sums of 6 bits.
fn codes(suite: &Suite) -> Result<Vec<Row>> {
    suite.in_codes(4, 6.0, 7.0, Some(0.021))
}

/// 5 hosts: the least whose sums of 4-bit codes have 8 bits. Of the ideal the bar is as much as 5.4 is of what it is for 4 hosts, 6.
/// What they lose is held against the receipt alone: so wide sums fill a chunk best in smaller blocks, which lose more.
fn wide(suite: &Suite) -> Result<Vec<Row>> {
    let bar = 5.4 / ratio_of_codes(4, 8.0) * ratio_of_codes(5, 8.0);
    suite.in_codes(5, 8.0, bar, None)
}

/// How many times as fast as exact along the ring a large operation in codes can be, whose sums have so many bits: each way takes what it
/// carries for an element.
fn ratio_of_codes(hosts: usize, sum_bits: f64) -> f64 {
    let hosts = hosts as f64;
    2.0 * (hosts - 1.0) / hosts * ELEMENT / sum_bits.max(BITS)
}

/// How many times as fast as the best of the hosts' own ways an operation can be by an aggregator, on a star whose hosts' links have this rate in
/// Mbit/s and this delay, if nothing but ways and bytes takes time.
fn ideal(hosts: usize, rate: u64, delay: Duration, size: u64) -> f64 {
    let (hosts, way) = (hosts as f64, 2.0 * delay.as_secs_f64());
    let all = size as f64 * 8.0 / (rate as f64 * 1e6);
    let ring = 2.0 * (hosts - 1.0) * (way + all / hosts);
    let (one, two) = (way + (hosts - 1.0) * all, 2.0 * (way + (hosts - 1.0) / hosts * all));
    // Sums leave while parts come; the aggregator's own link has no delay.
    ring.min(one).min(two) / (way + all)
}

/// 8 hosts, a large operation, at the highest rate at which processors have time to spare.
fn eight(suite: &Suite) -> Result<Vec<Row>> {
    for rate in RATES {
        let star = Star { hosts: 8, rate, delay: "0us", mtu: JUMBO, faults: None };
        let (rows, busy) = suite.against_hosts(star, &[(suite.budget.large, 1.6)])?;
        if busy < BUSY {
            return Ok(rows);
        }
    }
    let case = Case {
        suite: "aggregation",
        case: "allreduce f32, 8 hosts, at the highest rate that leaves processors time: us".to_owned(),
        size: suite.budget.large,
        ranks: 8,
        better: Better::Less,
        bar: 1.0 / 1.6,
    };
    let row =
        case.missing("the same by the hosts alone", "a rate at which processors are busy for less than 60%");
    Ok(vec![row.of_ideal(ideal(8, RATES[0], Duration::ZERO, suite.budget.large))])
}

/// 8 hosts at 1 Gbit/s, half a millisecond on each host's link and none at the aggregator. Where the delay is made here each datagram
/// costs a read and a write of a thread, so that frames of 9,000 tell more.
fn small(suite: &Suite) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for mtu in [JUMBO, PLAIN] {
        let star = Star { hosts: 8, rate: RATES[0], delay: "500us", mtu, faults: None };
        rows.extend(suite.against_host_algorithms(star, &[(24 << 10, 1.4), (4 << 10, 1.0)])?);
    }
    Ok(rows)
}

/// The ways that hosts have of their own, as operators choose them for a tenant, and in words.
const HOST_ALGORITHMS: [(&str, &str, &str); 3] =
    [("ring", "never", "the ring"), ("one", "one-shot", "one shot"), ("two", "two-shot", "two shots")];

/// 4 hosts where each end loses one frame in a hundred, against the same where none is lost. So many frames that each goes by itself
/// leave a machine of two cores time to spare at a quarter of the rate.
fn lossy(suite: &Suite) -> Result<Vec<Row>> {
    let of_a_hundred = Faults { lost: 10_000, ..Faults::default() };
    let size = suite.budget.large;
    let [with, without] =
        [of_a_hundred, Faults::default()].map(|faults| suite.with_faults(faults, size, true));
    let case = with_faults("1% of frames lost at each end", size, 1.0 / 0.7);
    Ok(vec![case.compare(&with?, &without?, "the same without")])
}

/// Of a large operation so much is done where hosts alone are slow.
const PART: u64 = 8;

/// The same, smaller, where each end loses one in twenty, has one in a hundred twice, and others overtake one in twenty: against the same where
/// nothing does, on which no bar stands, and by the hosts alone: were they faster, the aggregator would have to be left sooner.
fn faults(suite: &Suite) -> Result<Vec<Row>> {
    let faults = Faults { lost: 50_000, twice: 10_000, late: 50_000 };
    let (size, what) = (suite.budget.large / PART, "5% of frames lost, 1% twice, 5% late at each end");
    let with = suite.with_faults(faults, size, true)?;
    let without = suite.with_faults(Faults::default(), size, true)?;
    let by_hosts = suite.with_faults(faults, size, false)?;
    let case = |bar| with_faults(what, size, bar);
    Ok(vec![
        case(100.0).compare(&with, &without, "the same without"),
        case(1.0).compare(&with, &by_hosts, "the same by the hosts alone"),
    ])
}

fn with_faults(what: &str, size: u64, bar: f64) -> Case {
    Case {
        suite: "aggregation",
        case: format!("allreduce f32, 4 hosts, 250 Mbit/s, {what}: us"),
        size,
        ranks: 4,
        better: Better::Less,
        bar,
    }
}

/// Of the first host's link.
fn delay_of(topology: &str) -> Result<Duration> {
    Ok(Topology::parse(topology)?.links.first().context("no links")?.delay)
}

/// Whether the aggregator that is `position`-th has told of sums.
fn summed(fabric: &Value, position: usize) -> bool {
    let tenants = fabric.pointer(&format!("/aggregators/{position}/report/tenants"));
    let tenants = tenants.and_then(Value::as_array);
    let sums = |tenant: &Value| tenant.get("sums").and_then(Value::as_u64).unwrap_or(0);
    tenants.is_some_and(|tenants| tenants.iter().any(|tenant| sums(tenant) > 0))
}

/// Operations' times, and what of the processors they took.
struct Timed {
    measured: Vec<Measured>,
}

impl Timed {
    fn of(&self, size: u64) -> Result<Vec<f64>> {
        let found = self.measured.iter().find(|measured| measured.bytes == size);
        found.map(|found| found.times_us.clone()).with_context(|| format!("no figure for {size} bytes"))
    }

    /// Of the size of which it is most.
    fn busy(&self) -> f64 {
        self.measured.iter().map(|measured| measured.busy).fold(0.0, f64::max)
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
            "{name}: processors busy for {:.0}% of the time by the aggregator, {:.0}% by the hosts",
            100.0 * by_aggregator.busy(),
            100.0 * by_hosts.busy()
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
            let row = row.of_ideal(ideal(hosts, rate, delay_of(&topology)?, *size));
            eprintln!(
                "{name}, {size} bytes: {:.2} times as fast by the aggregator",
                row.ratio.unwrap_or_default()
            );
            rows.push(row);
        }
        Ok((rows, by_aggregator.busy()))
    }

    /// Operations of these sizes by an aggregator, against the best of the ways that the same hosts have without, each of them measured.
    fn against_host_algorithms(&self, star: Star, sizes: &[(u64, f64)]) -> Result<Vec<Row>> {
        let Star { hosts, rate, delay, mtu, .. } = star;
        let topology = star_with_aggregator(hosts, rate, delay);
        let alone = topology.split("[[aggregator]]").next().unwrap_or_default();
        let by_aggregator = self.times(&topology, star, sizes, true)?;
        let fabric = Topology { mtu, forwards: true, ..Topology::parse(alone)? };
        let mut lab = Lab::on(fabric, self.binaries.clone(), Arc::clone(&self.stop), |mut setup| {
            let chosen = HOST_ALGORITHMS.map(|(tenant, way, _)| format!("{tenant} = \"{way}\""));
            setup.control += &format!("direct = {{ {} }}\n", chosen.join(", "));
            let more = HOST_ALGORITHMS.iter().zip(3002..);
            setup.tenants.extend(more.map(|((name, ..), user)| Tenant { name: (*name).to_owned(), user }));
            setup
        })?;
        let (everyone, arguments) = self.arguments(star, sizes);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut by_hosts = Vec::new();
        for (tenant, (_, _, way)) in (1..).zip(HOST_ALGORITHMS) {
            by_hosts.push((way, Timed { measured: lab.ours_of(tenant, &everyone, &arguments)? }));
        }
        let mut rows = Vec::new();
        for (size, bar) in sizes {
            let case = Case {
                suite: "aggregation",
                case: format!(
                    "allreduce f32, {hosts} hosts, {rate} Mbit/s, {delay} a link, frames of {mtu}: us"
                ),
                size: *size,
                ranks: hosts,
                better: Better::Less,
                bar: 1.0 / bar,
            };
            let mut best: Option<(&str, Vec<f64>)> = None;
            for (way, timed) in &by_hosts {
                let times = timed.of(*size)?;
                let middle = |times: &[f64]| median(times).unwrap_or(f64::MAX);
                eprintln!("{size} bytes, frames of {mtu}, {way}: {:.0} us", middle(&times));
                if best.as_ref().is_none_or(|(_, best)| middle(&times) < middle(best)) {
                    best = Some((way, times));
                }
            }
            let (way, theirs) = best.context("no way")?;
            let row = case.compare(&by_aggregator.of(*size)?, &theirs, &format!("hosts alone, {way}"));
            rows.push(row.of_ideal(ideal(hosts, rate, delay_of(&topology)?, *size)));
        }
        Ok(rows)
    }

    /// Operations of 4 hosts with these faults, by an aggregator or by the hosts alone.
    fn with_faults(&self, faults: Faults, size: u64, aggregated: bool) -> Result<Vec<f64>> {
        let topology = star_with_aggregator(4, 250, "0us");
        let alone = topology.split("[[aggregator]]").next().unwrap_or_default();
        let star = Star { hosts: 4, rate: 250, delay: "0us", mtu: JUMBO, faults: Some(faults) };
        let topology = if aggregated { &topology } else { alone };
        self.times(topology, star, &[(size, 1.0)], aggregated)?.of(size)
    }

    /// A large operation summed in codes that add, against the same exact by the hosts alone: at 1 Gbit/s, and at rates at which processors
    /// have time to spare. `loses`: the most that the sums may lose, vNMSE.
    fn in_codes(&self, hosts: usize, sum_bits: f64, bar: f64, loses: Option<f64>) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for rate in RATES {
            let topology = star_with_aggregator(hosts, rate, "0us");
            let alone = topology.split("[[aggregator]]").next().unwrap_or_default();
            let before = busy()?;
            let (by_aggregator, took) = self.coded(&topology, hosts, &[SHARED, "exact", "rotated 4"])?;
            let busy = (busy()? - before) / took;
            let (by_hosts, _) = self.coded(alone, hosts, &["exact"])?;
            let of = |figures: &[Coded], name: &str| {
                let found = figures.iter().find(|found| found.budget == name);
                found.map(|found| (found.times_us.clone(), found.measured, found.claimed))
            };
            let ring = of(&by_hosts, "exact").context("no figures of the ring")?;
            let (ours, measured, claimed) = of(&by_aggregator, SHARED).context("no figures of codes")?;
            let case = |case: &str, bar| Case {
                suite: "aggregation",
                case: format!(
                    "allreduce f32 in codes that add, {hosts} hosts, sums of {sum_bits} bits, {rate} Mbit/s: {case}"
                ),
                size: self.budget.large,
                ranks: hosts,
                better: Better::Less,
                bar,
            };
            let row = case("us", 1.0 / bar).compare(&ours, &ring.0, "exact by the hosts alone");
            rows.push(row.of_ideal(ratio_of_codes(hosts, sum_bits)));
            if let Some((chunks, ..)) = of(&by_aggregator, "rotated 4") {
                rows.push(case("us", 1.0).compare(&ours, &chunks, "in 4 bits by the hosts alone"));
            }
            rows.extend(loses.map(|most| case("vNMSE", 1.0).limit(&[measured], most)));
            rows.push(case("vNMSE", 1.0).compare(&[measured], &[claimed], "the receipt"));
            eprintln!(
                "{rate} Mbit/s: processors busy for {:.0}% of the time with the aggregator",
                100.0 * busy
            );
            if busy < BUSY {
                break;
            }
        }
        Ok(rows)
    }

    /// Budgets in turn on a fabric of so many hosts; and the processors' time of the whole.
    fn coded(&self, topology: &str, hosts: usize, budgets: &[&str]) -> Result<(Vec<Coded>, f64)> {
        let topology = Topology { mtu: JUMBO, ..Topology::parse(topology)? };
        let mut lab = Lab::on(topology, self.binaries.clone(), Arc::clone(&self.stop), |setup| setup)?;
        let (bytes, budgets) = (self.budget.large.to_string(), budgets.join(","));
        let rounds = (4 * self.budget.rounds).to_string();
        let arguments = ["--bytes", &bytes, "--budgets", &budgets, "--warmup", "2", "--iterations", &rounds];
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        let begun = std::time::Instant::now();
        let hosts: Vec<usize> = (0..hosts).collect();
        let figures: Vec<Coded> = lab.figures("coded", &hosts, &arguments, LIMIT)?;
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
        let (everyone, arguments) = self.arguments(star, sizes);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let measured = lab.ours(&everyone, &arguments)?;
        if aggregated {
            let tenants = lab.deployment().wait_until("the aggregator has summed nothing", |this| {
                let fabric = this.ask(&["topology"])?;
                let tenants = fabric.pointer("/aggregators/0/report/tenants").cloned();
                Ok(summed(&fabric, 0).then_some(tenants.unwrap_or_default()))
            })?;
            eprintln!("the aggregator's counts: {tenants}");
        }
        Ok(Timed { measured })
    }

    /// All hosts, and what `collective` is told.
    fn arguments(&self, star: Star, sizes: &[(u64, f64)]) -> (Vec<usize>, Vec<String>) {
        let list = sizes.iter().map(|(size, _)| size.to_string()).collect::<Vec<_>>().join(",");
        let iterations = (4 * self.budget.rounds).to_string();
        let words =
            ["--collective", "allreduce", "--bytes", &list, "--warmup", "2", "--iterations", &iterations];
        ((0..star.hosts).collect(), words.iter().map(|word| (*word).to_owned()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ideals_are_what_bytes_and_hops_leave() {
        let (none, far) = (Duration::ZERO, Duration::from_micros(500));
        for (found, right) in [
            (ideal(4, 1000, none, 64 * MIB), 1.5),
            (ideal(8, 125, none, 64 * MIB), 1.75),
            (ideal(8, 1000, far, 24 << 10), 1.96),
            (ideal(8, 1000, far, 4 << 10), 1.19),
            (ratio_of_codes(4, 6.0), 8.0),
            (ratio_of_codes(4, 8.0), 6.0),
            (ratio_of_codes(5, 8.0), 6.4),
        ] {
            assert!((found - right).abs() < 0.005, "{found}, and not {right}");
        }
        assert_eq!(delay_of(&star_with_aggregator(2, 1000, "500us")).unwrap(), far);
    }
}
