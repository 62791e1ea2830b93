//! How long coflows take where the one with least left goes first, beside max-min fair sharing. They come from a recorded trace,
//! or are made up.
//!
//! `cargo run --release -p harmonaize-planner --example coflows [-- TRACE]`; `TRACE`: a file of the Coflow-Benchmark. Without one there are
//! three made-up hours.

use harmonaize_planner::{Discipline, Rate, Sharing, Workload, simulate};
use std::error::Error;
use std::time::Instant;

/// What each port sends and receives.
const RATE: Rate = Rate(1_000_000_000);

/// Made-up hours, and coflows of each.
const SEEDS: [u64; 3] = [1, 2, 3];
const COFLOWS: usize = 526;

/// Mean, median and 95th percentile in seconds.
fn summary(mut times: Vec<f64>) -> [f64; 3] {
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times.get((times.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN);
    [times.iter().sum::<f64>() / times.len() as f64, at(0.5), at(0.95)]
}

fn table(name: &str, workload: &Workload) {
    let transfers: usize = workload.coflows().iter().map(|coflow| coflow.transfers.len()).sum();
    let bytes = workload
        .coflows()
        .iter()
        .flat_map(|coflow| &coflow.transfers)
        .map(|transfer| transfer.bytes.0 as f64);
    println!(
        "{name}: {} coflows, {transfers} transfers, {:.2} TB, {} ports of {RATE}",
        workload.coflows().len(),
        bytes.sum::<f64>() / 1e12,
        workload.ports(),
    );
    println!(
        "| sharing | mean s | median s | p95 s | of fair's mean | of its median | of its p95 | mean of each one's ratio | slower |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let all = [
        ("max-min fair", Sharing::Fair),
        ("first come, first served", Sharing::Ordered(Discipline::FirstComeFirstServed)),
        ("least left first", Sharing::Ordered(Discipline::LeastRemaining)),
        ("least attained first", Sharing::LeastAttained),
    ];
    let mut fair: Vec<f64> = Vec::new();
    for (name, sharing) in all {
        let begin = Instant::now();
        let times: Vec<f64> =
            simulate(workload, RATE, sharing).iter().map(|time| time.0 as f64 / 1e9).collect();
        if sharing == Sharing::Fair {
            fair.clone_from(&times);
        }
        let ratios =
            || times.iter().zip(&fair).filter(|(_, fair)| **fair > 0.0).map(|(own, fair)| own / fair);
        let slower = ratios().filter(|ratio| *ratio > 1.01).count();
        let each = ratios().sum::<f64>() / ratios().count().max(1) as f64;
        let ([mean, median, p95], [fair_mean, fair_median, fair_p95]) =
            (summary(times.clone()), summary(fair.clone()));
        println!(
            "| {name} | {mean:.2} | {median:.3} | {p95:.1} | {:.3} | {:.3} | {:.3} | {each:.3} | {slower} |",
            mean / fair_mean,
            median / fair_median,
            p95 / fair_p95,
        );
        eprintln!("{:.1} s for {name}", begin.elapsed().as_secs_f64());
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1) {
        Some(path) => table("recorded", &Workload::parse(&std::fs::read_to_string(path)?)?),
        None => SEEDS
            .iter()
            .for_each(|seed| table(&format!("made up, seed {seed}"), &Workload::generate(*seed, COFLOWS))),
    }
    Ok(())
}
