//! What the protection of links costs an AllReduce of u64 between two engines over TCP. It prints sizes by protections as a table.
//! Engines and tenants run in one thread, so that the time is the processor time of all of them, both hosts' together. Runs of the
//! protections take turns; a run is the median of its operations. `PROTECTION_RUNS` sets how many runs.
#![allow(missing_docs, dead_code, clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // no part of the product

#[path = "../tests/engine/common.rs"]
mod common;

use common::{World, call, protected_tcp};
use harmonaize_abi::{Collective, Region, Submission};
use harmonaize_plan::Tuning;
use harmonaize_transport::tcp::LinkProtection::{Authenticated, Encrypted, None};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const OUTPUT: u64 = 64 * MIB;
/// Bytes of a tensor, and operations of a run.
const CASES: [(u64, usize); 3] = [(1 << 10, 2000), (MIB, 100), (64 * MIB, 5)];

fn main() {
    let runs = std::env::var("PROTECTION_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(11);
    let protections = [None, Authenticated, Encrypted];
    let mut worlds = protections.map(|protection| {
        let tuning = Tuning { chunk_bytes: 256 << 10, ..Tuning::default() };
        let transports = protected_tcp(2, protection);
        World::with_sizes(transports, &[vec![0], vec![1]], tuning, 2 * OUTPUT, 4)
    });
    println!("{runs} runs of each, interleaved; medians, with smallest and largest");
    for (bytes, operations) in CASES {
        let mut times = [const { Vec::new() }; 3];
        for run in 0..=runs {
            for (world, times) in worlds.iter_mut().zip(&mut times) {
                let mut each: Vec<_> = (0..operations).map(|_| once(world, bytes)).collect();
                if run > 0 {
                    times.push(middle(&mut each)[1]);
                }
            }
        }
        let plain = middle(&mut times[0])[1].as_secs_f64();
        for (protection, times) in protections.iter().zip(&mut times) {
            let [first, median, last] = middle(times).map(|time| time.as_secs_f64() * 1e6);
            let ratio = median / 1e6 / plain;
            println!(
                "{bytes} bytes, {protection}: {median:.1} us ({first:.1} to {last:.1}), {ratio:.3} of none"
            );
        }
    }
}

fn once(world: &mut World, bytes: u64) -> Duration {
    let [input, output] = [0, OUTPUT].map(|offset| Region { offset, bytes });
    let start = Instant::now();
    for rank in 0..2 {
        world
            .submit(rank, Submission { input, output, ..call(Collective::AllReduce, bytes / 8, 1, 0, 0, 0) });
    }
    assert!(world.completions().iter().all(|completion| completion.status == 0));
    start.elapsed()
}

/// The smallest, the median and the largest.
fn middle(times: &mut [Duration]) -> [Duration; 3] {
    times.sort_unstable();
    [0, times.len() / 2, times.len() - 1].map(|at| times[at])
}
