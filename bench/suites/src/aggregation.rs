//! Suite aggregation: what a core does as an aggregator, beside what the machine can. Also AllReduces by an aggregator against the
//! same hosts' own, and how tenants fare that share one.

use super::lab::{Lab, Measured};
use super::part::Part;
use super::processors::Busy;
use super::row::{Case, Row, median};
use super::runs::interleave;
use super::small::add_tenants;
use super::suite::{Bench, BenchBudget, Request};
use anyhow::{Context, Result, bail, ensure};
use harmonaize_plan::Algorithm;
use harmonaize_testkit::deployment::Setup;
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

/// The sum loop against the ceiling of sums. Packets a second, in and as many out, stand beside those of the kernel
/// alone.
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
        let case =
            Case::more("aggregation", format!("sum loop, chunks of {bytes} bytes: GB/s of parts"), 0.5)
                .of(bytes, 1);
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

/// Four hosts whose processors have time to spare.
const STAR: Star = Star { hosts: 4, rate: 250, delay: "0us", mtu: JUMBO, faults: None };
/// Timed operations of a run.
const OPERATIONS: &str = "4";

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

/// How many times as fast as exact along the ring a large operation in codes can be. Sums have so many bits: each direction takes what it
/// carries for an element.
fn ratio_of_codes(hosts: usize, sum_bits: f64) -> f64 {
    let hosts = hosts as f64;
    2.0 * (hosts - 1.0) / hosts * ELEMENT / sum_bits.max(BITS)
}

/// How many times as fast as the best of the hosts' own algorithms an operation can be by an aggregator. That is on a star
/// whose hosts' links have this rate in Mbit/s and this delay, if nothing but routes and bytes takes time.
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
    let case = Case::less(
        "aggregation",
        "allreduce f32, 8 hosts, at the highest rate that leaves processors time: us",
        1.0 / 1.6,
    )
    .of(suite.budget.large, 8);
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
const HOST_ALGORITHMS: [(Algorithm, &str); 3] =
    [(Algorithm::Ring, "the ring"), (Algorithm::OneShot, "one shot"), (Algorithm::TwoShot, "two shots")];

/// 4 hosts where each end loses one frame in a hundred, against the same where none is lost. So many frames that each goes by itself
/// leave a machine of two cores time to spare at a quarter of the rate.
fn lossy(suite: &Suite) -> Result<Vec<Row>> {
    let of_a_hundred = Faults { lost: 10_000, ..Faults::default() };
    let size = suite.budget.large;
    let runs = suite.with_faults(&[(of_a_hundred, true), (Faults::default(), true)], size)?;
    let [with, without] = runs.as_slice() else { bail!("two contestants, but {} have runs", runs.len()) };
    let case = with_faults("1% of frames lost at each end", size, 1.0 / 0.7);
    Ok(vec![case.compare(with, without, "the same without")])
}

/// Of a large operation so much is done where hosts alone are slow.
const PART: u64 = 8;

/// The same, smaller, on a bad network. Each end loses one frame in twenty, has one in a hundred twice, and one in twenty is overtaken.
/// It stands against the same where nothing does, and against the hosts alone: were they faster, the aggregator would have to be left
/// sooner.
fn faults(suite: &Suite) -> Result<Vec<Row>> {
    let faults = Faults { lost: 50_000, twice: 10_000, late: 50_000 };
    let (size, what) = (suite.budget.large / PART, "5% of frames lost, 1% twice, 5% late at each end");
    let runs = suite.with_faults(&[(faults, true), (Faults::default(), true), (faults, false)], size)?;
    let [with, without, by_hosts] = runs.as_slice() else { bail!("{} contestants of three", runs.len()) };
    let case = with_faults(what, size, 1.0);
    Ok(vec![
        case.clone().stated().compare(with, without, "the same without"),
        case.compare(with, by_hosts, "the same by the hosts alone"),
    ])
}

fn with_faults(what: &str, size: u64, bar: f64) -> Case {
    Case::less("aggregation", format!("allreduce f32, 4 hosts, 250 Mbit/s, {what}: us"), bar).of(size, 4)
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

/// What a contestant's runs took.
struct Timed {
    runs: Vec<Vec<Measured>>,
}

impl Timed {
    /// The median operation of each run, in us.
    fn of(&self, size: u64) -> Result<Vec<f64>> {
        let of_run = |run: &Vec<Measured>| {
            let found = run.iter().find(|measured| measured.bytes == size);
            found.and_then(|found| median(&found.times_us))
        };
        let medians: Option<Vec<f64>> = self.runs.iter().map(of_run).collect();
        medians.with_context(|| format!("no figure for {size} bytes"))
    }

    /// The share of the processors that the median run took, of the size of which it is most.
    fn busy(&self) -> f64 {
        let most = |run: &Vec<Measured>| run.iter().map(|measured| measured.busy).fold(0.0, f64::max);
        median(&self.runs.iter().map(most).collect::<Vec<f64>>()).unwrap_or(0.0)
    }
}

/// A topology's part before its aggregators.
fn without_aggregator(topology: &str) -> &str {
    topology.split("[[aggregator]]").next().unwrap_or_default()
}

impl Suite {
    /// Operations of these sizes where there is an aggregator, against the same hosts without. They run in turn on two standing fabrics;
    /// each size has its bar. And what of the processors they took with it.
    fn against_hosts(&self, star: Star, sizes: &[(u64, f64)]) -> Result<(Vec<Row>, f64)> {
        let topology = star_with_aggregator(star.hosts, star.rate, star.delay);
        let aggregated = self.fabric(&topology, star, |setup| setup)?;
        let alone = self.fabric(without_aggregator(&topology), star, |setup| setup)?;
        let timed = self.interleaved(&mut [aggregated, alone], &[(0, 0), (1, 0)], star, sizes)?;
        let [by_aggregator, by_hosts] = timed.as_slice() else { bail!("{} contestants of two", timed.len()) };
        let name = star.name();
        eprintln!(
            "{name}: processors busy for {:.0}% of the time by the aggregator, {:.0}% by the hosts",
            100.0 * by_aggregator.busy(),
            100.0 * by_hosts.busy()
        );
        let mut rows = Vec::new();
        for (size, bar) in sizes {
            let (ours, theirs) = (by_aggregator.of(*size)?, by_hosts.of(*size)?);
            rows.push(star.row(*size, *bar, &ours, &theirs, "the same by the hosts alone")?);
        }
        Ok((rows, by_aggregator.busy()))
    }

    /// Operations of these sizes by an aggregator, against the best of the algorithms that the same hosts have without. All run in
    /// turn.
    fn against_host_algorithms(&self, star: Star, sizes: &[(u64, f64)]) -> Result<Vec<Row>> {
        let topology = star_with_aggregator(star.hosts, star.rate, star.delay);
        let aggregated = self.fabric(&topology, star, |setup| setup)?;
        let alone = self.fabric(without_aggregator(&topology), star, |mut setup| {
            add_tenants(&mut setup, HOST_ALGORITHMS.map(|(algorithm, _)| algorithm));
            setup
        })?;
        let contestants: Vec<(usize, usize)> =
            std::iter::once((0, 0)).chain((1..=HOST_ALGORITHMS.len()).map(|tenant| (1, tenant))).collect();
        let timed = self.interleaved(&mut [aggregated, alone], &contestants, star, sizes)?;
        let (by_aggregator, by_hosts) = timed.split_first().context("no contestants")?;
        let mut rows = Vec::new();
        for (size, bar) in sizes {
            let mut best: Option<(&str, Vec<f64>)> = None;
            for ((_, name), timed) in HOST_ALGORITHMS.iter().zip(by_hosts) {
                let times = timed.of(*size)?;
                let middle = |times: &[f64]| median(times).unwrap_or(f64::MAX);
                eprintln!("{size} bytes, frames of {}, {name}: {:.0} us", star.mtu, middle(&times));
                if best.as_ref().is_none_or(|(_, best)| middle(&times) < middle(best)) {
                    best = Some((name, times));
                }
            }
            let (name, theirs) = best.context("no algorithm")?;
            let ours = by_aggregator.of(*size)?;
            rows.push(star.row(*size, *bar, &ours, &theirs, &format!("hosts alone, {name}"))?);
        }
        Ok(rows)
    }

    /// The medians of each one's runs of operations of 4 hosts, in us. Each has its faults, by an aggregator or by the hosts alone; they
    /// run in turn.
    fn with_faults(&self, contestants: &[(Faults, bool)], size: u64) -> Result<Vec<Vec<f64>>> {
        let topology = star_with_aggregator(4, 250, "0us");
        let mut labs = Vec::new();
        for (faults, aggregated) in contestants {
            let topology = if *aggregated { &topology } else { without_aggregator(&topology) };
            labs.push(self.fabric(topology, Star { faults: Some(*faults), ..STAR }, |setup| setup)?);
        }
        let places: Vec<(usize, usize)> = (0..labs.len()).map(|lab| (lab, 0)).collect();
        let timed = self.interleaved(&mut labs, &places, STAR, &[(size, 1.0)])?;
        timed.iter().map(|timed| timed.of(size)).collect()
    }

    /// The median operation of one run, in us, of that size by the hosts of a fabric.
    fn one_run(lab: &mut Lab, size: u64) -> Result<f64> {
        let bytes = size.to_string();
        let arguments = ["--bytes", &bytes, "--warmup", "2", "--iterations", OPERATIONS];
        let runs = vec![lab.ours(&(0..STAR.hosts).collect::<Vec<_>>(), &arguments)?];
        Timed { runs }.of(size)?.first().copied().context("nothing was timed")
    }

    /// A large operation summed in codes that add, against the same exact by the hosts alone. They run in turn: at 1 Gbit/s, and at rates
    /// at which processors have time to spare. `loses`: the most that the sums may lose, vNMSE.
    fn in_codes(&self, hosts: usize, sum_bits: f64, bar: f64, loses: Option<f64>) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for rate in RATES {
            let topology = star_with_aggregator(hosts, rate, "0us");
            let star = Star { hosts, rate, ..STAR };
            let mut labs = [&topology, without_aggregator(&topology)]
                .into_iter()
                .map(|topology| self.fabric(topology, star, |setup| setup))
                .collect::<Result<Vec<Lab>>>()?;
            let mut shares = Vec::new();
            let runs = interleave(self.budget.rounds, 2, |which| {
                let lab = labs.get_mut(which).context("no such fabric")?;
                if which == 1 {
                    return self.coded(lab, hosts, &["exact"]);
                }
                let busy = Busy::now()?;
                let figures = self.coded(lab, hosts, &[SHARED, "exact", "rotated 4"])?;
                shares.push(busy.share()?);
                Ok(figures)
            })?;
            let of = |which: usize, budget: &str, figure: fn(&Coded) -> Option<f64>| -> Vec<f64> {
                let figures = runs.get(which).into_iter().flatten().flatten();
                figures.filter(|found| found.budget == budget).filter_map(figure).collect()
            };
            let time = |found: &Coded| median(&found.times_us);
            let (ours, ring) = (of(0, SHARED, time), of(1, "exact", time));
            let (measured, claimed) =
                (of(0, SHARED, |found| Some(found.measured)), of(0, SHARED, |found| Some(found.claimed)));
            let case = |case: &str, bar| {
                let what = format!(
                    "allreduce f32 in codes that add, {hosts} hosts, sums of {sum_bits} bits, {rate} Mbit/s: {case}"
                );
                Case::less("aggregation", what, bar).of(self.budget.large, hosts)
            };
            let row = case("us", 1.0 / bar).compare(&ours, &ring, "exact by the hosts alone");
            rows.push(row.of_ideal(ratio_of_codes(hosts, sum_bits)));
            let chunks = of(0, "rotated 4", time);
            rows.push(case("us", 1.0).compare(&ours, &chunks, "in 4 bits by the hosts alone"));
            rows.extend(loses.map(|most| case("vNMSE", 1.0).limit(&measured, most)));
            rows.push(case("vNMSE", 1.0).compare(&measured, &claimed, "the receipt"));
            let busy = median(&shares).unwrap_or(0.0);
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

    /// A run of budgets in turn.
    fn coded(&self, lab: &mut Lab, hosts: usize, budgets: &[&str]) -> Result<Vec<Coded>> {
        let (bytes, budgets) = (self.budget.large.to_string(), budgets.join(","));
        let arguments =
            ["--bytes", &bytes, "--budgets", &budgets, "--warmup", "2", "--iterations", OPERATIONS];
        let hosts: Vec<usize> = (0..hosts).collect();
        let figures: Vec<Coded> = lab.figures("coded", &hosts, &arguments, LIMIT)?;
        for Coded { budget, times_us, algorithm, fallback, claimed, measured } in &figures {
            eprintln!(
                "{budget}: {:.1} ms, {algorithm}, vNMSE {claimed:.3e} claimed and {measured:.3e} measured{}",
                median(times_us).unwrap_or_default() / 1e3,
                if *fallback { ", in part by the hosts" } else { "" }
            );
        }
        Ok(figures)
    }

    /// A fabric of a topology, with its agents.
    fn fabric(&self, topology: &str, star: Star, settings: impl FnOnce(Setup) -> Setup) -> Result<Lab> {
        let topology = Topology { mtu: star.mtu, forwards: true, ..Topology::parse(topology)? };
        let lab = Lab::on(topology, self.binaries.clone(), Arc::clone(&self.stop), settings)?;
        if let Some(faults) = star.faults {
            lab.fabric().set_faults(faults)?;
        }
        Ok(lab)
    }

    /// Operations of contestants in turn, each a fabric and a tenant on it. It is an error where an aggregator that is there has summed
    /// nothing.
    fn interleaved(
        &self,
        labs: &mut [Lab],
        contestants: &[(usize, usize)],
        star: Star,
        sizes: &[(u64, f64)],
    ) -> Result<Vec<Timed>> {
        let list = sizes.iter().map(|(size, _)| size.to_string()).collect::<Vec<_>>().join(",");
        let arguments =
            ["--collective", "allreduce", "--bytes", &list, "--warmup", "2", "--iterations", OPERATIONS];
        let everyone: Vec<usize> = (0..star.hosts).collect();
        let runs = interleave(self.budget.rounds, contestants.len(), |which| {
            let (lab, tenant) = *contestants.get(which).context("no such contestant")?;
            labs.get_mut(lab).context("no such fabric")?.ours_of(tenant, &everyone, &arguments)
        })?;
        for lab in labs.iter_mut().filter(|lab| lab.has_aggregator()) {
            let tenants = lab.deployment().wait_until("the aggregator has summed nothing", |this| {
                let fabric = this.ask(&["topology"])?;
                let tenants = fabric.pointer("/aggregators/0/report/tenants").cloned();
                Ok(summed(&fabric, 0).then_some(tenants.unwrap_or_default()))
            })?;
            eprintln!("the aggregator's counts: {tenants}");
        }
        Ok(runs.into_iter().map(|runs| Timed { runs }).collect())
    }
}

impl Star {
    fn name(self) -> String {
        let Self { hosts, rate, delay, mtu, .. } = self;
        format!("{hosts} hosts, {rate} Mbit/s, {delay} a link, frames of {mtu}")
    }

    /// The row of a size: so many times as fast as the reference.
    fn row(self, size: u64, bar: f64, ours: &[f64], theirs: &[f64], reference: &str) -> Result<Row> {
        let Self { hosts, rate, delay, .. } = self;
        let what = format!("allreduce f32, {}: us", self.name());
        let case = Case::less("aggregation", what, 1.0 / bar).of(size, hosts);
        let delay = delay_of(&star_with_aggregator(hosts, rate, delay))?;
        Ok(case.compare(ours, theirs, reference).of_ideal(ideal(hosts, rate, delay, size)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_counts_once_whatever_its_operations() {
        let measured = |times_us: [f64; 3], busy| Measured {
            bytes: 8,
            times_us: times_us.to_vec(),
            wire_bytes: 0,
            busy,
        };
        let timed =
            Timed { runs: vec![vec![measured([1.0, 9.0, 2.0], 0.2)], vec![measured([5.0, 4.0, 3.0], 0.4)]] };
        assert_eq!(timed.of(8).unwrap(), [2.0, 4.0]);
        assert!(timed.of(9).is_err() && (timed.busy() - 0.3).abs() < 1e-9);
    }

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
