//! What an operation between two engines over TCP costs: both engines and tenants in one thread, so that the time is the
//! processor time of all of them. Prints the median and range of each case. `OPERATIONS_RUNS` sets how many runs.
#![allow(missing_docs, dead_code, clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // no part of the product

#[path = "../tests/common/mod.rs"]
mod common;

use common::{World, call};
use harmonaize_abi::Collective;
use harmonaize_plan::Tuning;
use harmonaize_transport::Transport;
use harmonaize_transport::tcp::{Config, TcpTransport};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const OUTPUT: u64 = 64 * MIB;

fn main() {
    let runs = std::env::var("OPERATIONS_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(15);
    let bind = || TcpTransport::bind(Config::new("127.0.0.1:0".parse().unwrap())).unwrap();
    let transports = (0..2).map(|_| Box::new(bind()) as Box<dyn Transport + Send>).collect();
    let tuning = Tuning { chunk_bytes: 256 << 10, ..Tuning::default() };
    let mut world = World::with_sizes(transports, &[vec![0], vec![1]], tuning, 2 * OUTPUT, 4);
    for size in [16 * MIB, 64 * MIB] {
        for (name, collective, output) in [
            ("allreduce", Collective::AllReduce, OUTPUT),
            ("allreduce in place", Collective::AllReduce, 0),
            ("alltoall", Collective::AllToAll, OUTPUT),
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
}

fn once(world: &mut World, collective: Collective, bytes: u64, output: u64) -> Duration {
    let blocks = if collective == Collective::AllToAll { 2 } else { 1 };
    let start = Instant::now();
    for rank in 0..2 {
        world.submit(rank, call(collective, bytes / 8 / blocks, blocks, 0, output, 0));
    }
    assert!(world.completions().iter().all(|completion| completion.status == 0));
    start.elapsed()
}

fn report(name: &str, bytes: u64, times: &mut [Duration]) {
    times.sort_unstable();
    let [first, median, last] = [0, times.len() / 2, times.len() - 1].map(|at| times[at].as_secs_f64() * 1e3);
    println!("{name}, {} MiB: median {median:.2} ms ({first:.2} to {last:.2})", bytes / MIB);
}
