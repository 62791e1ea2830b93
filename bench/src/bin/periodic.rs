//! One rank with the iteration period of a data-parallel training, and a log of its iterations as `bench/peers/training.py` has it.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::Parser;
use harmonaize_bench::tenant::{Participant, Seat};
use harmonaize_client::{ReduceOp, Tensor};
use harmonaize_testkit::clock::monotonic_ns;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long an operation may take.
const OPERATION: Duration = Duration::from_secs(60);

/// Elements of each bucket that are written anew and checked in every iteration, further on each time.
const WINDOW: usize = 64;

/// Sleeps for as long as an accelerator would compute, reduces its gradients by the bucket, and again. Each iteration is a
/// line of JSON, times in nanoseconds of CLOCK_MONOTONIC. A result that is not the average of what the ranks put in is an error.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    /// How many; SIGTERM to any rank ends all of them after the same iteration, sooner
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
    /// When the first iteration begins, by CLOCK_MONOTONIC in nanoseconds; at once if that has passed
    #[arg(long, default_value_t = 0)]
    begins_ns: u64,
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
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let elements = arguments.bytes / 4;
    ensure!(elements > WINDOW, "a bucket has more than {WINDOW} elements of 4 bytes");
    let room = u64::from(arguments.buckets) * (arguments.bytes as u64 + 4096);
    let member = Participant::join(&arguments.seat, room)?;
    let tensors: Vec<Tensor> =
        (0..arguments.buckets).map(|_| member.tensor::<f32>(elements)).collect::<Result<_>>()?;
    let zeros = vec![0f32; elements];
    tensors.iter().try_for_each(|tensor| tensor.write(0, &zeros))?;
    member.barrier()?;
    print_line(&json!({"connected_ns": monotonic_ns()?}))?;
    std::thread::sleep(Duration::from_nanos(arguments.begins_ns.saturating_sub(monotonic_ns()?)));
    for number in 0..arguments.iterations {
        let window = Window { number, elements, ranks: member.ranks() };
        let began_ns = monotonic_ns()?;
        std::thread::sleep(arguments.forward(member.rank(), number)?);
        let (mut called_ns, mut under_way) = (None, Vec::new());
        for tensor in &tensors {
            std::thread::sleep(duration(arguments.backward_ms / f64::from(arguments.buckets))?);
            window.write(tensor, member.rank(), stop.load(Ordering::Relaxed))?;
            called_ns = Some(called_ns.map_or_else(monotonic_ns, Ok)?);
            under_way.push(member.start_all_reduce(tensor, ReduceOp::Average)?);
        }
        for mut operation in under_way {
            operation.wait(OPERATION)?;
        }
        let done_ns = monotonic_ns()?;
        print_line(
            &json!({"iteration": number, "began_ns": began_ns, "called_ns": called_ns, "done_ns": done_ns}),
        )?;
        let wishes = tensors.iter().map(|tensor| window.check(tensor)).collect::<Result<Vec<bool>>>()?;
        if wishes.contains(&true) {
            break;
        }
    }
    member.barrier()
}

/// The part of each bucket that an iteration writes. The bucket's last element is the one by which ranks agree on
/// their end.
struct Window {
    number: u64,
    elements: usize,
    ranks: usize,
}

impl Window {
    fn begins(&self) -> u64 {
        self.number.wrapping_mul(WINDOW as u64) % (self.elements - WINDOW) as u64
    }

    fn value(&self, rank: usize, element: usize) -> f32 {
        ((rank + 1) * (self.number % 1000 + 1) as usize + element) as f32
    }

    fn write(&self, tensor: &Tensor, rank: usize, stop: bool) -> Result<()> {
        let values: Vec<f32> = (0..WINDOW).map(|element| self.value(rank, element)).collect();
        tensor.write(self.begins(), &values)?;
        tensor.write(self.elements as u64 - 1, &[if stop { 1f32 } else { 0.0 }])?;
        Ok(())
    }

    /// Whether the window has the average of all ranks; says whether any of them wants to stop.
    fn check(&self, tensor: &Tensor) -> Result<bool> {
        let (mut values, mut wish) = ([0f32; WINDOW], [0f32]);
        tensor.read(self.begins(), &mut values)?;
        tensor.read(self.elements as u64 - 1, &mut wish)?;
        for (element, value) in values.iter().enumerate() {
            let sum: f32 = (0..self.ranks).map(|rank| self.value(rank, element)).sum();
            let expected = sum / self.ranks as f32;
            let number = self.number;
            ensure!(
                (value - expected).abs() <= expected * 1e-5,
                "iteration {number}: an element is {value}, and not {expected}"
            );
        }
        Ok(wish.iter().any(|wish| *wish > 0.0))
    }
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

fn print_line(line: &serde_json::Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
