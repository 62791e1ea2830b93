//! Suite small: AllReduces of sizes at which hops count more than bytes, on eight hosts far apart. They run by each algorithm, and
//! as control chooses, a tenant each, in turn in one run.

use super::lab::{Lab, Measured};
use super::row::{Case, Row, median};
use super::suite::Request;
use anyhow::{Context, Result, ensure};
use harmonaize_plan::Algorithm;
use harmonaize_testkit::deployment::{Setup, Tenant};
use harmonaize_testkit::topology::{Topology, star};
use harmonaize_testkit::workspace::Binaries;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const RANKS: usize = 8;
const SIZES: [u64; 3] = [4 << 10, 24 << 10, 256 << 10];
/// Bytes a second of each host's link, and seconds from one host to another: 0.5 ms on each one's link.
const RATE: f64 = 125e6;
const ONE_WAY_DELAY: f64 = 1e-3;
/// The algorithms, each with a tenant for which an operator chose it.
const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::Ring,
    Algorithm::OneShot,
    Algorithm::TwoShot,
    Algorithm::RecursiveDoubling,
    Algorithm::RecursiveHalving,
];

/// Adds a tenant for each of these algorithms, by whose name it goes.
pub(crate) fn add_tenants(setup: &mut Setup, algorithms: impl IntoIterator<Item = Algorithm>) {
    for (algorithm, user) in algorithms.into_iter().zip(3002..) {
        setup.tenants.push(Tenant { name: algorithm.to_string(), user });
        setup.algorithms.push((algorithm.to_string(), algorithm));
    }
}

/// How much is measured.
#[derive(Debug, Clone, Copy)]
struct Budget {
    rounds: usize,
    iterations: usize,
    smoke: bool,
}

impl Budget {
    fn of(request: &Request) -> Self {
        match request.smoke {
            true => Self { rounds: 1, iterations: 5, smoke: true },
            false => Self { rounds: request.rounds(), iterations: 100, smoke: false },
        }
    }
}

/// The least that an algorithm can take, in seconds. It counts its hops one after the other, and the bytes that each
/// host sends.
fn bound(algorithm: Algorithm, bytes: u64) -> f64 {
    let (hosts, bytes) = (RANKS as f64, bytes as f64);
    let (others, levels, whole) = (hosts - 1.0, hosts.log2(), 2.0 * (hosts - 1.0) / hosts);
    let (hops, copies) = match algorithm {
        // Without racks the last is a ring.
        Algorithm::Ring | Algorithm::Hierarchical => (2.0 * others, whole),
        Algorithm::OneShot => (1.0, others),
        Algorithm::TwoShot => (2.0, whole),
        Algorithm::RecursiveDoubling | Algorithm::BinomialTree => (levels, levels),
        Algorithm::RecursiveHalving => (2.0 * levels, whole),
    };
    hops * ONE_WAY_DELAY + copies * bytes / RATE
}

/// Measures.
pub fn run(request: &Request, binaries: Binaries, stop: Arc<AtomicBool>) -> Result<Vec<Row>> {
    let budget = Budget::of(request);
    let topology = star(RANKS, "1Gbit/s").replace("\"1Gbit/s\"\n", "\"1Gbit/s\"\ndelay = \"0.5ms\"\n");
    let topology = Topology { forwards: true, ..Topology::parse(&topology)? };
    let mut lab = Lab::on(topology, binaries, stop, |mut setup| {
        add_tenants(&mut setup, ALGORITHMS);
        setup
    })?;
    ensure!(budget.smoke || lab.fabric().delays(), "links without delays show nothing of what this is about");
    let hosts: Vec<usize> = (0..RANKS).collect();
    let (sizes, iterations) = (SIZES.map(|size| size.to_string()).join(","), budget.iterations.to_string());
    let arguments = ["--bytes", &sizes, "--warmup", "5", "--iterations", &iterations];
    // By tenant, first the lab's own for whom control chooses, and size: the median of each round, in microseconds.
    let mut medians = [const { [const { Vec::new() }; SIZES.len()] }; 1 + ALGORITHMS.len()];
    for round in 1..=budget.rounds {
        eprint!("round {round}/{}, p50:", budget.rounds);
        let names = std::iter::once("chosen".to_owned()).chain(ALGORITHMS.map(|each| each.to_string()));
        for ((tenant, name), medians) in names.enumerate().zip(&mut medians) {
            let measured = lab.ours_of(tenant, &hosts, &arguments)?;
            eprint!(" {name}");
            for (size, medians) in SIZES.iter().zip(medians) {
                let of_size = |measured: &&Measured| measured.bytes == *size;
                let found = measured.iter().find(of_size).context("a size was not measured")?;
                let middle = median(&found.times_us).context("nothing was timed")?;
                eprint!(" {:.2} ms", middle / 1e3);
                medians.push(middle);
            }
        }
        eprintln!();
    }
    let [chosen, others @ ..] = medians;
    let mut rows = Vec::new();
    for (at, size) in SIZES.iter().enumerate() {
        let case = |what: String, bar: f64| {
            Case::less("small", format!("allreduce f32, 0.5 ms on each link, 1 Gbit/s, {what}: p50 us"), bar)
                .of(*size, RANKS)
        };
        let of = |ways: &[Vec<f64>; SIZES.len()]| ways.get(at).cloned().unwrap_or_default();
        let each = ALGORITHMS.into_iter().zip(others.iter().map(of));
        let best = each.clone().min_by(|one, other| {
            median(&one.1).unwrap_or(f64::MAX).total_cmp(&median(&other.1).unwrap_or(f64::MAX))
        });
        let (best, theirs) = best.context("no algorithm")?;
        // What control chose is as fast as the best of them, to a tenth.
        rows.push(case("chosen".to_owned(), 1.1).compare(&of(&chosen), &theirs, best.name()));
        for (algorithm, figures) in each {
            let ideal = vec![bound(algorithm, *size) * 1e6; figures.len()];
            // How near each comes to what its hops and bytes must take.
            rows.push(case(algorithm.to_string(), 1.0).stated().compare(
                &figures,
                &ideal,
                "hops and bytes alone",
            ));
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_hops_and_bytes() {
        let near = |algorithm, kib: u64, ms: f64| {
            let found = bound(algorithm, kib << 10);
            assert!((found * 1e3 - ms).abs() < 1e-3, "{algorithm}: {found}");
        };
        // 24 KiB seven times, three times, and seven quarters of them.
        near(Algorithm::OneShot, 24, 2.376);
        near(Algorithm::RecursiveDoubling, 24, 3.590);
        near(Algorithm::TwoShot, 24, 2.344);
        near(Algorithm::RecursiveHalving, 24, 6.344);
        near(Algorithm::Ring, 4, 14.057);
    }
}
