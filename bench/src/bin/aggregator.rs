//! What a core does as an aggregator, beside what the machine can. Both are measured in the same run and in turns; there is
//! no network but the loopback device.
//!
//! Prints a line of JSON for each size of chunk. `kernel_ns`: a datagram sent and received through a socket, and nothing else.
//! `aggregator_ns`: a part read, its tag, the sum, and the tag of a sum for it. `ceiling` and `sum_loop`: bytes of parts a second, of one
//! pass of the kernel over a long vector in the cache, and of the same slot by slot.

use anyhow::{Context, Result};
use clap::Parser;
use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use harmonaize_agent::aggregator::calibrate;
use harmonaize_kernels::reduce;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Measures what one core does as an aggregator.
#[derive(Parser)]
struct Args {
    /// Bytes of a chunk, several with commas
    #[arg(long, value_delimiter = ',', default_value = "1024,1392,4096,8192")]
    bytes: Vec<usize>,
    /// Rounds in which everything has its turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds of each turn
    #[arg(long, default_value_t = 100)]
    turn: u64,
}

#[derive(Serialize)]
struct Figures {
    bytes: usize,
    kernel_ns: Vec<f64>,
    aggregator_ns: Vec<f64>,
    ceiling: Vec<f64>,
    sum_loop: Vec<f64>,
}

/// Bytes of all parts of a round: sum and parts fit the cache of a core.
const PARTS: usize = 512 << 10;

/// Bytes a second of adding parts of `bytes` bytes to slots, by the fastest of the passes within `turn`.
fn adding(bytes: usize, turn: Duration) -> Result<f64> {
    let each = (bytes / 4).max(1);
    let parts = vec![1.0_f32; PARTS / 4 / each * each];
    let mut slots = vec![0.0_f32; parts.len()];
    let (begun, mut best) = (Instant::now(), Duration::MAX);
    while begun.elapsed() < turn || best == Duration::MAX {
        let pass = Instant::now();
        for (slot, part) in slots.chunks_exact_mut(each).zip(parts.chunks_exact(each)) {
            let to = ViewMut::from(slot);
            reduce(ReduceOp::Sum, Dtype::F32, &[to.as_view(), View::from(part)], &[to], None)?;
        }
        best = best.min(pass.elapsed());
    }
    Ok((slots.len() * 4) as f64 / best.as_secs_f64())
}

fn main() -> Result<()> {
    let args = Args::parse();
    let turn = Duration::from_millis(args.turn);
    for bytes in args.bytes {
        let [kernel_ns, aggregator_ns, ceiling, sum_loop] = [const { Vec::new() }; 4];
        let mut figures = Figures { bytes, kernel_ns, aggregator_ns, ceiling, sum_loop };
        for _ in 0..args.rounds {
            let measured = calibrate(bytes, turn).context("no part has so many bytes")?;
            figures.kernel_ns.push(measured.kernel.as_secs_f64() * 1e9);
            figures.aggregator_ns.push(measured.aggregator.as_secs_f64() * 1e9);
            figures.ceiling.push(adding(PARTS, turn)?);
            figures.sum_loop.push(adding(bytes, turn)?);
        }
        println!("{}", serde_json::to_string(&figures)?);
    }
    Ok(())
}
