//! What an operation between two engines over TCP costs. After it comes an AllReduce of f32 between four in one process, exact
//! and coded. Engines and tenants run in one thread, so that the time is the processor time of all of them. Prints the median
//! and range of each case. `OPERATIONS_RUNS` sets how many runs.
#![allow(missing_docs, dead_code, clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // no part of the product

#[path = "../tests/engine/common.rs"]
mod common;

use common::{World, call, loopback, reduce, tcp};
use harmonaize_abi::{Collective, Rank, ReduceOp, Region, Submission};
use harmonaize_codec::Codec;
use harmonaize_plan::{Coding, Tuning};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const OUTPUT: u64 = 64 * MIB;

fn main() {
    let runs = std::env::var("OPERATIONS_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(15);
    let transports = tcp(2);
    let tuning = Tuning { chunk_bytes: 256 << 10, ..Tuning::default() };
    let mut world = World::with_sizes(transports, &[vec![0], vec![1]], tuning, 2 * OUTPUT, 4);
    for size in [16 * MIB, 64 * MIB] {
        for (name, collective, output) in [
            ("allreduce", Collective::AllReduce, OUTPUT),
            ("allreduce in place", Collective::AllReduce, 0),
            ("alltoall", Collective::AllToAll, OUTPUT),
            ("allgather", Collective::AllGather, OUTPUT),
            ("reducescatter", Collective::ReduceScatter, OUTPUT),
            ("broadcast", Collective::Broadcast, OUTPUT),
        ] {
            let mut times = Vec::new();
            for run in 0..=runs {
                let time = once(&mut world, collective, size, output);
                if run > 0 {
                    times.push(time);
                }
            }
            report(name, size, &mut times);
        }
    }
    ["exact", "bf16", "int8", "int8 stochastic", "rotated 4"].iter().for_each(|name| coded(name, runs));
}

/// An AllReduce of f32 between four with the same random inputs.
fn coded(name: &str, runs: usize) {
    let bytes = 16 * MIB;
    let codec = Codec::NAMED.iter().position(|(known, _)| *known == name).unwrap() as u16;
    let coding = (name != "exact").then_some(Coding { codec, finer: None, max_error: None });
    let transports = loopback(4);
    let tuning = Tuning { chunk_bytes: 256 << 10, ..Tuning::default() };
    let ranks = [vec![0], vec![1], vec![2], vec![3]];
    let mut world = World::with_coding(transports, &ranks, tuning, 2 * OUTPUT, 4, coding);
    let mut state = 1_u64;
    let values: Vec<u64> = (0..bytes / 8)
        .map(|_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            // Two floats from 0.5 to 2.
            state >> 9 & 0x00ff_ffff_00ff_ffff | 0x3f00_0000_3f00_0000
        })
        .collect();
    (0..4).for_each(|rank| world.write(rank, 0, &values));
    let (mut times, mut wire) = (Vec::new(), 0);
    for run in 0..=runs {
        let start = Instant::now();
        (0..4).for_each(|rank| world.submit(rank, reduce(ReduceOp::Sum, bytes / 4, 0, OUTPUT)));
        let completions = world.completions();
        assert!(completions.iter().all(|completion| completion.status == 0));
        if run > 0 {
            times.push(start.elapsed());
        }
        wire = completions[0].wire_bytes;
    }
    report(
        &format!("allreduce of f32 between 4, {name}, {:.1} MiB sent by each", wire as f64 / MIB as f64),
        bytes,
        &mut times,
    );
}

fn once(world: &mut World, collective: Collective, bytes: u64, output: u64) -> Duration {
    let [inputs, outputs] = collective.blocks(2, Rank(0), Rank(0)).map(u64::from);
    let block = bytes / inputs.max(outputs);
    let [input, output] =
        [(0, inputs), (output, outputs)].map(|(offset, blocks)| Region { offset, bytes: blocks * block });
    let start = Instant::now();
    for rank in 0..2 {
        world.submit(rank, Submission { input, output, ..call(collective, block / 8, 1, 0, 0, 0) });
    }
    assert!(world.completions().iter().all(|completion| completion.status == 0));
    start.elapsed()
}

fn report(name: &str, bytes: u64, times: &mut [Duration]) {
    times.sort_unstable();
    let [first, median, last] = [0, times.len() / 2, times.len() - 1].map(|at| times[at].as_secs_f64() * 1e3);
    println!("{name}, {} MiB: median {median:.2} ms ({first:.2} to {last:.2})", bytes / MIB);
}
