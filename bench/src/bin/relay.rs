//! An AllReduce of f32 by one thread beside the ranks' threads. It waits for them, sums what they have, and gives them
//! the sum: the least that any service costs whose work another than the ranks does. Prints a line of JSON a size, as the
//! peers' programs do.
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use clap::Parser;
use harmonaize_bench::direct::Direct;
use harmonaize_bench::measure::Effort;
use harmonaize_bench::statistics::median;
use serde_json::json;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

/// How often a flag is polled before its processor is left to others. This holds where there is one for each
/// thread.
const SPINS: u32 = 1000;
/// Operations before those that are timed.
const WARM_UP: usize = 20;

/// Times sums by a third thread.
#[derive(Parser)]
struct Arguments {
    /// How many ranks
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Only all_reduce
    collective: String,
    /// Microseconds that a size may take; at least three rounds are timed
    budget_us: f64,
    /// BYTES:ROUNDS
    sizes: Vec<Effort>,
}

/// A counter alone on its cache line.
#[repr(align(128))]
#[derive(Default)]
struct Counter(AtomicU64);

/// What ranks and relay share.
struct Flags {
    /// Of each rank: operations that it has begun.
    begun: Vec<Counter>,
    /// Operations that are done; the greatest number once the relay has failed.
    done: Counter,
    spins: u32,
}

impl Flags {
    fn new(ranks: u32) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Self {
            begun: (0..ranks).map(|_| Counter::default()).collect(),
            done: Counter::default(),
            spins: if processors > ranks as usize { SPINS } else { 0 },
        }
    }

    /// Waits until the counter has come to `target`.
    fn wait(&self, counter: &Counter, target: u64) {
        let mut spins = 0;
        while counter.0.load(Ordering::Acquire) < target {
            if spins < self.spins {
                spins += 1;
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
    }

    /// Operations of a rank one after another; the median time of those that are no warm-up, in microseconds.
    fn rank(&self, own: &Counter, rounds: usize) -> f64 {
        let mut times_us = Vec::with_capacity(WARM_UP + rounds);
        for number in 1..=(WARM_UP + rounds) as u64 {
            let began = Instant::now();
            own.0.store(number, Ordering::Release);
            self.wait(&self.done, number);
            times_us.push(began.elapsed().as_secs_f64() * 1e6);
        }
        median(times_us.get_mut(WARM_UP..).unwrap_or_default())
    }

    /// Sums what the ranks have, as often as they begin.
    fn relay(&self, direct: &Direct, rounds: usize) -> Result<()> {
        for number in 1..=(WARM_UP + rounds) as u64 {
            self.begun.iter().for_each(|begun| self.wait(begun, number));
            direct.run()?;
            self.done.0.store(number, Ordering::Release);
        }
        Ok(())
    }
}

/// The greatest of the ranks' medians, in microseconds.
fn measure(ranks: u32, bytes: usize, rounds: usize, budget_us: f64) -> Result<f64> {
    let direct = Direct::new(ranks, bytes)?;
    direct.run()?;
    let began = Instant::now();
    direct.run()?;
    let fit = budget_us / (began.elapsed().as_secs_f64() * 1e6).max(0.1);
    let rounds = rounds.min((fit as usize).max(3));
    let flags = Flags::new(ranks);
    let greatest = thread::scope(|scope| {
        let start = |own| {
            let flags = &flags;
            scope.spawn(move || flags.rank(own, rounds))
        };
        let handles: Vec<_> = flags.begun.iter().map(start).collect();
        let relayed = flags.relay(&direct, rounds);
        flags.done.0.store(u64::MAX, Ordering::Release);
        let medians = handles.into_iter().filter_map(|handle| handle.join().ok());
        relayed.map(|()| medians.fold(0.0, f64::max))
    })?;
    ensure!(direct.wrong()? == 0, "wrong sums of {bytes} bytes");
    Ok(greatest)
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    ensure!(arguments.ranks >= 2, "two ranks at least");
    ensure!(arguments.collective == "all_reduce", "{} is not summed here", arguments.collective);
    for Effort { bytes, rounds } in arguments.sizes {
        let p50_us = measure(arguments.ranks, bytes, rounds, arguments.budget_us)?;
        println!("{}", json!({ "bytes": bytes, "p50_us": p50_us, "wrong": 0 }));
    }
    Ok(())
}
