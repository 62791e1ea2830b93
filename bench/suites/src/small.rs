//! Suite small: AllReduces of sizes at which hops count and not bytes, on eight hosts far apart: along the ring, in one shot, in two,
//! and as control chooses, a tenant each, in turn in one run.

use super::lab::{Lab, Measured};
use super::row::{Case, Row, median};
use super::suite::Request;
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::deployment::Tenant;
use harmonaize_testkit::topology::{Topology, star};
use harmonaize_testkit::workspace::Binaries;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const RANKS: usize = 8;
const SIZES: [u64; 3] = [4 << 10, 24 << 10, 256 << 10];
/// Bytes a second of each host's link, and seconds from one host to another: 0.5 ms on each one's link.
const RATE: f64 = 125e6;
const ONE_WAY_DELAY: f64 = 1e-3;
/// The lab's own tenant, for whom control chooses, and one for each way that an operator chose.
const ALGORITHMS: [&str; 4] = ["chosen", "ring", "one shot", "two shots"];

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

/// The least that each way can take, in seconds: its hops, and the bytes that each host sends.
fn bound(way: &str, bytes: u64) -> f64 {
    let (others, bytes) = (RANKS as f64 - 1.0, bytes as f64);
    let twice = 2.0 * others / RANKS as f64 * bytes / RATE;
    match way {
        "ring" => 2.0 * others * ONE_WAY_DELAY + twice,
        "one shot" => ONE_WAY_DELAY + others * bytes / RATE,
        "two shots" => 2.0 * ONE_WAY_DELAY + twice,
        _ => ["ring", "one shot", "two shots"]
            .map(|way| bound(way, bytes as u64))
            .into_iter()
            .fold(1e9, f64::min),
    }
}

/// Measures.
pub fn run(request: &Request, binaries: Binaries, stop: Arc<AtomicBool>) -> Result<Vec<Row>> {
    let budget = Budget::of(request);
    let topology = star(RANKS, "1Gbit/s").replace("\"1Gbit/s\"\n", "\"1Gbit/s\"\ndelay = \"0.5ms\"\n");
    let topology = Topology { forwards: true, ..Topology::parse(&topology)? };
    let mut lab = Lab::on(topology, binaries, stop, |mut setup| {
        setup.control += "direct = { ring = \"never\", one = \"one-shot\", two = \"two-shot\" }\n";
        let more = ["ring", "one", "two"].iter().zip(3002..);
        setup.tenants.extend(more.map(|(name, user)| Tenant { name: (*name).to_owned(), user }));
        setup
    })?;
    ensure!(budget.smoke || lab.fabric().delays(), "links without delays show nothing of what this is about");
    let hosts: Vec<usize> = (0..RANKS).collect();
    let (sizes, iterations) = (SIZES.map(|size| size.to_string()).join(","), budget.iterations.to_string());
    let arguments = ["--bytes", &sizes, "--warmup", "5", "--iterations", &iterations];
    // By way and size: the median of each round, in microseconds.
    let mut medians = [const { [const { Vec::new() }; SIZES.len()] }; ALGORITHMS.len()];
    for round in 1..=budget.rounds {
        eprint!("round {round}/{}, p50:", budget.rounds);
        for ((tenant, way), medians) in ALGORITHMS.iter().enumerate().zip(&mut medians) {
            let measured = lab.ours_of(tenant, &hosts, &arguments)?;
            eprint!(" {way}");
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
        let ways = ALGORITHMS.iter().skip(1).zip(others.iter().map(of));
        let best = ways.clone().min_by(|one, other| {
            median(&one.1).unwrap_or(f64::MAX).total_cmp(&median(&other.1).unwrap_or(f64::MAX))
        });
        let (best, theirs) = best.context("no way")?;
        // What control chose is as fast as the best of them, to a tenth.
        rows.push(case("chosen".to_owned(), 1.1).compare(&of(&chosen), &theirs, best));
        for (way, figures) in ways {
            let ideal = vec![bound(way, *size) * 1e6; figures.len()];
            // How near each comes to what its hops and bytes must take.
            rows.push(case((*way).to_owned(), 1.0).stated().compare(
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
        // 24 KiB seven times, and seven quarters of them twice as far.
        assert!((bound("one shot", 24 << 10) - 2.376e-3).abs() < 1e-6);
        assert!((bound("two shots", 24 << 10) - 2.344e-3).abs() < 1e-6);
        assert!((bound("ring", 4 << 10) - 14.057e-3).abs() < 1e-6);
        assert_eq!(bound("chosen", 4 << 10), bound("one shot", 4 << 10));
    }
}
