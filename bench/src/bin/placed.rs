//! A worker of an elastic job that the provider places. It makes verified steps, each once, with as many workers as there are.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::Parser;
use harmonaize_bench::elastic::tags;
use harmonaize_bench::report::{now_us, print};
use harmonaize_client::{
    AttachOptions, Client, Communicator, Dtype, Error, Rank, ReduceOp, Tensor, job_from_env,
};
use harmonaize_testkit::placed::Line;
use harmonaize_tests::place::{Latest, Place, is_agreed, reduced};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longer than anything may take.
const HANG: Duration = Duration::from_secs(30);
/// Micro-batches of a step, over all workers.
const BATCH: u64 = 64;
/// Room beside the gradients.
const ROOM: u64 = 4096;

/// Makes steps until SIGTERM, and prints lines of JSON. A step sums the numbers of its micro-batches over all workers, and the sum
/// must be right. Its place comes from `harmonaize tenant run --elastic`.
#[derive(Parser)]
struct Arguments {
    /// Numbers of an AllReduce, of 8 bytes each
    #[arg(long, default_value_t = 32 << 10)]
    elements: usize,
    /// What one worker alone computes for a step, in milliseconds; it is slept
    #[arg(long, default_value_t = 80)]
    compute_ms: u64,
}

fn main() -> Result<()> {
    let Arguments { elements, compute_ms } = Arguments::parse();
    ensure!(elements > 0, "--elements 0: an AllReduce has one number at least");
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let place =
        Place::from_env().context("no place in the environment; `harmonaize tenant run` gives one")?;
    let (job, mut place) = (job_from_env(), place);
    let arena_bytes = elements as u64 * 8 + ROOM;
    let client = Client::from_env(AttachOptions { arena_bytes, ..AttachOptions::default() })?;
    let mut communicator = match std::env::var_os("HARMONAIZE_ENTER") {
        Some(_) => client.enter(&job, &place.options(HANG))?,
        None => client.join(&job, Rank(place.rank), place.workers, HANG)?,
    };
    let mut worker = Worker {
        compute: Duration::from_millis(compute_ms),
        gradients: client.tensor(Dtype::U64, elements as u64)?,
        values: vec![0; elements],
        scalar: client.tensor(Dtype::U64, 1)?,
        latest: Latest::follow(place),
        stop,
        steps: 0,
        sum: 0,
    };
    loop {
        let seat = (communicator.rank(), communicator.ranks());
        ensure!(seat == (Rank(place.rank), place.workers), "rank and workers are {seat:?}, not of {place:?}");
        let next = match worker.run(&communicator, place) {
            Ok(Some(next)) => next,
            Ok(None) => break,
            Err(error) if error.downcast_ref::<Error>().is_none() => return Err(error),
            // Another one has gone.
            Err(_) if worker.leaves() => break,
            Err(error) => worker.latest.after(place, HANG).ok_or(error)?,
        };
        communicator = communicator.regroup(&next.options(HANG))?;
        place = next;
    }
    print(&Line::Ended { at_us: now_us(), steps: worker.steps })
}

struct Worker {
    compute: Duration,
    gradients: Tensor,
    values: Vec<u64>,
    scalar: Tensor,
    latest: Latest,
    stop: Arc<AtomicBool>,
    /// Steps that all workers have done, and the sum of their micro-batches' numbers.
    steps: u64,
    sum: u64,
}

impl Worker {
    fn leaves(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Makes steps until all that stay have read the same next place, or all are to end; none: this one ends.
    fn run(&mut self, communicator: &Communicator, place: Place) -> Result<Option<Place>> {
        let Place { generation, rank, workers } = place;
        self.catch_up(communicator)?;
        print(&Line::Placed { at_us: now_us(), generation, rank, workers, steps: self.steps })?;
        loop {
            self.step(communicator, place)?;
            // All decide after the same step. Who leaves has no say in which generation is next.
            let (leaves, next) = (self.leaves(), self.latest.get());
            let (low, high) = if leaves { (u64::MAX, 0) } else { (next.generation, next.generation) };
            let least = self.reduced(communicator, low, ReduceOp::Min)?;
            let largest = self.reduced(communicator, high, ReduceOp::Max)?;
            let all_leave = least == u64::MAX;
            if all_leave || is_agreed(generation, least, largest) {
                return Ok((!leaves).then_some(next));
            }
        }
    }

    /// Has what the workers have done that were here before.
    fn catch_up(&mut self, communicator: &Communicator) -> Result<()> {
        let steps = self.reduced(communicator, self.steps, ReduceOp::Max)?;
        let own = if steps == self.steps { self.sum } else { 0 };
        let sum = self.reduced(communicator, own, ReduceOp::Max)?;
        let expected = tags(0, steps * BATCH);
        ensure!(sum == expected, "after {steps} steps the sum of micro-batches is {sum}, not {expected}");
        (self.steps, self.sum) = (steps, sum);
        Ok(())
    }

    /// Makes a step: each worker has its share of the micro-batches.
    fn step(&mut self, communicator: &Communicator, place: Place) -> Result<()> {
        let (rank, workers) = (u64::from(place.rank), u64::from(place.workers).max(1));
        std::thread::sleep(self.compute / place.workers.max(1));
        let first = self.steps * BATCH;
        let from = |rank: u64| first + BATCH * rank / workers;
        self.values.fill(tags(from(rank), from(rank + 1) - from(rank)));
        self.gradients.write(0, &self.values)?;
        let began = Instant::now();
        communicator.all_reduce_in_place(&self.gradients, ReduceOp::Sum)?.wait(HANG)?;
        let took = began.elapsed();
        self.gradients.read(0, &mut self.values)?;
        let (step, expected) = (self.steps, tags(first, BATCH));
        ensure!(self.values.iter().all(|sum| *sum == expected), "step {step}: a sum is not {expected}");
        self.steps += 1;
        self.sum += expected;
        let (generation, collective_us) = (place.generation, took.as_micros() as u64);
        print(&Line::Worked { at_us: now_us(), step, generation, collective_us })
    }

    /// What all workers have, as one.
    fn reduced(&self, communicator: &Communicator, own: u64, by: ReduceOp) -> Result<u64> {
        Ok(reduced(communicator, &self.scalar, own, by, HANG)?)
    }
}
