//! Tenants that share an aggregator and the links to it. Rows state how alike they fare, and what one that wants everything costs
//! the others.

use super::{PLAIN, Suite};
use crate::lab::{Lab, options};
use crate::processors::Busy;
use crate::row::{Case, Row};
use crate::steady::{Interval, Steady, common, finish, nanos};
use anyhow::{Result, ensure};
use harmonaize_testkit::clock::monotonic_ns;
use harmonaize_testkit::deployment::Tenant;
use harmonaize_testkit::job::Job;
use harmonaize_testkit::topology::{Topology, star_with_aggregator};
use std::sync::Arc;
use std::time::Duration;

/// Tenants of equal weight, each with a rank on every host.
const TENANTS: usize = 8;
const HOSTS: usize = 4;
/// Of each host's link, Mbit/s: so little that processors have time to spare.
const RATE: u64 = 100;
/// Of a frame of 1,514 bytes, those of a tensor.
const GOODPUT: f64 = 1392.0 / 1514.0;
/// Bytes of tensors that a tenant with enough to do has under way.
const BYTES_IN_FLIGHT: u64 = 1 << 20;
/// Bytes of the hog's tensors, how many of its communicators reduce at once, and how many in each.
const LARGE: u64 = 1 << 20;
const GREEDY: usize = 4;
const IN_FLIGHT: u64 = 4;
/// Of its share of the links, what a tenant with little to do uses, in operations of so many bytes.
const MODERATE: f64 = 0.6;
const SMALL: u64 = 64 << 10;
/// How long tenants may take to join, and rates to settle.
const JOIN: Duration = Duration::from_secs(5);
const STABILIZE: Duration = Duration::from_secs(1);
/// How long a job may take.
const LIMIT: Duration = Duration::from_secs(60);

/// What one communicator does.
#[derive(Clone, Copy)]
struct Load {
    tenant: usize,
    bytes: u64,
    in_flight: u64,
    /// One operation each so often; zero: always another.
    every: Duration,
}

/// Jain, Chiu, Hawe, A quantitative measure of fairness, 1984: 1 where all are alike, 1/n where one has everything.
fn jain(values: &[f64]) -> f64 {
    let (sum, squares) =
        values.iter().fold((0.0, 0.0), |(sum, squares), value| (sum + value, squares + value * value));
    sum * sum / (values.len() as f64 * squares)
}

/// Eight tenants that always have something to reduce: tensors of one size, and of several.
pub(super) fn fair(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = tenants(suite)?;
    let sizes: [(&str, &[u64]); 2] = [
        ("of 256 KiB", &[256 << 10]),
        ("of 32 KiB to 512 KiB", &[32 << 10, 128 << 10, 256 << 10, 512 << 10]),
    ];
    let mut rows = Vec::new();
    for (name, sizes) in sizes {
        let load = |tenant: usize| {
            let bytes = sizes.get(tenant % sizes.len()).copied().unwrap_or(SMALL);
            Load { tenant, bytes, in_flight: BYTES_IN_FLIGHT / bytes, every: Duration::ZERO }
        };
        let loads: Vec<Load> = (0..TENANTS).map(load).collect();
        let mut indexes = Vec::new();
        for _ in 0..suite.budget.rounds {
            let busy = Busy::now()?;
            let until = monotonic_ns()? + nanos(JOIN + suite.window());
            let jobs =
                loads.iter().map(|load| start(&mut lab, *load, until)).collect::<Result<Vec<Job>>>()?;
            let steady = finish(&mut lab, jobs, LIMIT)?;
            let interval = common(&steady, until, STABILIZE)?;
            let processors = busy.share()?;
            let rates: Vec<f64> = steady.iter().map(|one| one.rate(interval)).collect();
            print_rates(&format!("tensors {name}"), &steady, interval);
            eprintln!(
                "Jain's index {:.4}; {:.0}% of what the links carry; processors busy for {:.0}% of the time",
                jain(&rates),
                100.0 * rates.iter().sum::<f64>() / carried(),
                100.0 * processors
            );
            indexes.push(jain(&rates));
        }
        let case = case(&format!("tensors {name}: Jain's index of their rates"), 0.95);
        rows.push(case.compare(&indexes, &vec![1.0; indexes.len()], "all alike"));
    }
    Ok(rows)
}

/// How a tenant wants everything.
#[derive(Clone, Copy, PartialEq)]
enum Hog {
    /// By the aggregator, with several communicators and large tensors.
    Reduces,
    /// By its hosts' own connections, with AllToAlls.
    Exchanges,
}

/// One tenant wants everything; the others have less to do than their share, or as much as they can.
pub(super) fn hog(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = tenants(suite)?;
    let share = carried() / TENANTS as f64;
    let every = Duration::from_secs_f64(SMALL as f64 / (MODERATE * share));
    let moderate = |tenant| Load { tenant, bytes: SMALL, in_flight: 4, every };
    let busy =
        |tenant| Load { tenant, bytes: SMALL, in_flight: BYTES_IN_FLIGHT / SMALL, every: Duration::ZERO };
    type One<'a> = (Hog, &'a str, &'a dyn Fn(usize) -> Load);
    let cases: [One<'_>; 3] = [
        (Hog::Reduces, "a hog, and others that have 60% of their share to do", &moderate),
        (Hog::Reduces, "a hog, and others that have enough to do", &busy),
        (
            Hog::Exchanges,
            "a hog by hosts' connections, and others that have 60% of their share to do",
            &moderate,
        ),
    ];
    let mut rows = Vec::new();
    for (hog, name, load) in cases {
        let (mut kept, mut guaranteed) = (Vec::new(), Vec::new());
        for _ in 0..suite.budget.rounds {
            let (steady, [without, with]) = beside_hog(suite, &mut lab, hog, load)?;
            print_rates(&format!("{name}: without it"), &steady, without);
            print_rates("beside it", &steady, with);
            let rates = |interval| steady.iter().map(move |one: &Steady| one.rate(interval));
            // Who has enough to do uses what others leave: its share is an eighth of what all have together.
            let (ours, share) = if load(1).every.is_zero() {
                (rates(with).fold(f64::INFINITY, f64::min), rates(without).sum::<f64>() / TENANTS as f64)
            } else {
                let lost = rates(without).zip(rates(with)).map(|(without, with)| without - with);
                (share - lost.fold(f64::NEG_INFINITY, f64::max), share)
            };
            kept.push(ours / 1e6);
            guaranteed.push(share / 1e6);
        }
        let case = case(&format!("{name}: MB/s that the least of these keeps of its share"), 0.95);
        rows.push(case.compare(&kept, &guaranteed, "an eighth of the links"));
    }
    Ok(rows)
}

/// First the others alone, then with the hog: what they did, and when they were alone and when not.
fn beside_hog(
    suite: &Suite,
    lab: &mut Lab,
    hog: Hog,
    load: &dyn Fn(usize) -> Load,
) -> Result<(Vec<Steady>, [Interval; 2])> {
    let comes = monotonic_ns()? + nanos(JOIN + suite.window());
    let until = comes + nanos(JOIN + suite.window());
    let mut jobs =
        (1..TENANTS).map(|tenant| start(lab, load(tenant), until)).collect::<Result<Vec<Job>>>()?;
    while monotonic_ns()? < comes {
        lab.check()?;
        std::thread::sleep(Duration::from_millis(10));
    }
    if hog == Hog::Exchanges {
        let arguments =
            ["--collective", "alltoall", "--bytes", "4194304", "--iterations", "1000000", "--json"];
        // It ends when it is dropped.
        let _hog = lab.start_of(0, "collective", &(0..HOSTS).collect::<Vec<_>>(), &arguments)?;
        let steady = finish(lab, jobs, LIMIT)?;
        let without = common(&steady, comes, STABILIZE)?;
        let last = steady.iter().map(Steady::last).min().unwrap_or(0).min(until);
        return Ok((steady, [without, Interval(comes + nanos(JOIN), last)]));
    }
    let greedy = Load { tenant: 0, bytes: LARGE, in_flight: IN_FLIGHT, every: Duration::ZERO };
    jobs.extend((0..GREEDY).map(|_| start(lab, greedy, until)).collect::<Result<Vec<Job>>>()?);
    let mut steady = finish(lab, jobs, LIMIT)?;
    let hogs = steady.split_off(TENANTS - 1);
    let (without, with) = (common(&steady, comes, STABILIZE)?, common(&hogs, until, STABILIZE)?);
    print_rates("the hog's communicators", &hogs, with);
    ensure!(hogs.iter().all(|hog| hog.rate(with) > 0.0), "the hog did nothing");
    Ok((steady, [without, with]))
}

fn case(what: &str, bar: f64) -> Case {
    Case::more("aggregation", format!("{TENANTS} tenants on {HOSTS} hosts, {RATE} Mbit/s, {what}"), bar)
        .of(0, HOSTS)
}

impl Suite {
    /// For how long rates are measured.
    fn window(&self) -> Duration {
        STABILIZE + Duration::from_millis(60 * self.budget.turn)
    }
}

/// The fabric with all tenants on it.
fn tenants(suite: &Suite) -> Result<Lab> {
    let topology = Topology::parse(&star_with_aggregator(HOSTS, RATE, "0us"))?;
    let topology = Topology { mtu: PLAIN, ..topology };
    Lab::on(topology, suite.binaries.clone(), Arc::clone(&suite.stop), |mut setup| {
        for (number, name) in (1..TENANTS).zip(["b", "c", "d", "e", "f", "g", "h"]) {
            setup.tenants.push(Tenant { name: name.to_owned(), user: 3001 + number as u32 });
        }
        setup
    })
}

/// What a host's link carries of tensors, bytes a second.
fn carried() -> f64 {
    RATE as f64 * 1e6 / 8.0 * GOODPUT
}

fn start(lab: &mut Lab, load: Load, until: u64) -> Result<Job> {
    let Load { tenant, bytes, in_flight: at_once, every } = load;
    let arguments = options(&[
        ("--bytes", bytes),
        ("--in-flight", at_once),
        ("--every-us", u64::try_from(every.as_micros())?),
        ("--until-ns", until),
    ]);
    let hosts: Vec<usize> = (0..HOSTS).collect();
    lab.start_of(tenant, "steady", &hosts, &arguments)
}

fn print_rates(what: &str, steady: &[Steady], interval: Interval) {
    let each: Vec<String> = steady
        .iter()
        .map(|one| {
            let (rate, middle) = (one.rate(interval) / 1e6, one.middle_ms(interval));
            format!("{rate:.3} MB/s ({middle:.1} ms, {:.0}% aggregated)", 100.0 * one.aggregated(interval))
        })
        .collect();
    eprintln!("{what}, {:.1} s: {}", (interval.1 - interval.0) as f64 / 1e9, each.join(", "));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jains_index_is_one_where_all_are_alike() {
        assert_eq!((jain(&[2.0; 8]), jain(&[1.0, 0.0, 0.0, 0.0])), (1.0, 0.25));
    }
}
