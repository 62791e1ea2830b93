//! One rank with the rhythm of a data-parallel training, and a log of its iterations as `bench/peers/training.py` has it.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::Parser;
use harmonaize_bench::tenant::{Member, Seat};
use harmonaize_client::{ReduceOp, Tensor};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use std::io::Write;
use std::time::Duration;

/// How long an operation may take.
const OPERATION: Duration = Duration::from_secs(60);

/// Sleeps for as long as an accelerator would compute, reduces its gradients by the bucket, and again. Each iteration is a
/// line of JSON, times in nanoseconds of CLOCK_MONOTONIC.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    /// How many
    #[arg(long, default_value_t = 100)]
    iterations: u64,
    /// AllReduces of an iteration
    #[arg(long, default_value_t = 3)]
    buckets: u32,
    /// Bytes of a bucket
    #[arg(long, default_value_t = 410_880)]
    bytes: usize,
    /// What an accelerator takes forward, in milliseconds
    #[arg(long, default_value_t = 20.0)]
    forward_ms: f64,
    /// And backward, for all buckets together
    #[arg(long, default_value_t = 6.0)]
    backward_ms: f64,
    /// The first iteration that takes longer
    #[arg(long, requires = "slow_ms")]
    slow_from: Option<u64>,
    /// How much longer it and all later ones take
    #[arg(long, default_value_t = 0.0)]
    slow_ms: f64,
    /// Of which rank
    #[arg(long, default_value_t = 0)]
    slow_rank: usize,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    ensure!(arguments.buckets > 0, "an iteration without AllReduces tells nothing");
    let elements = arguments.bytes / 4;
    let room = u64::from(arguments.buckets) * (arguments.bytes as u64 + 4096);
    let member = Member::join(&arguments.seat, room)?;
    let tensors: Vec<Tensor> =
        (0..arguments.buckets).map(|_| member.tensor::<f32>(elements)).collect::<Result<_>>()?;
    let zeros = vec![0f32; elements];
    tensors.iter().try_for_each(|tensor| tensor.write(0, &zeros))?;
    member.barrier()?;
    say(&json!({"connected_ns": now_ns()?}))?;
    for number in 0..arguments.iterations {
        let began_ns = now_ns()?;
        std::thread::sleep(arguments.forward(member.rank(), number)?);
        let (mut called_ns, mut under_way) = (None, Vec::new());
        for tensor in &tensors {
            std::thread::sleep(duration(arguments.backward_ms / f64::from(arguments.buckets))?);
            called_ns = Some(called_ns.map_or_else(now_ns, Ok)?);
            under_way.push(member.start_all_reduce(tensor, ReduceOp::Average)?);
        }
        for mut operation in under_way {
            operation.wait(OPERATION)?;
        }
        let done_ns = now_ns()?;
        say(&json!({"iteration": number, "began_ns": began_ns, "called_ns": called_ns, "done_ns": done_ns}))?;
    }
    member.barrier()
}

impl Arguments {
    /// How long a rank computes before the first gradients of an iteration are there.
    fn forward(&self, rank: usize, iteration: u64) -> Result<Duration> {
        let slow = rank == self.slow_rank && self.slow_from.is_some_and(|from| iteration >= from);
        duration(self.forward_ms + if slow { self.slow_ms } else { 0.0 })
    }
}

fn duration(milliseconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(milliseconds / 1e3)
        .with_context(|| format!("{milliseconds} ms cannot be slept"))
}

fn now_ns() -> Result<u64> {
    let now = clock_gettime(ClockId::Monotonic);
    Ok(u64::try_from(now.tv_sec)? * 1_000_000_000 + u64::try_from(now.tv_nsec)?)
}

fn say(line: &serde_json::Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
