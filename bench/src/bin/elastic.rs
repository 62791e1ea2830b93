//! One rank of an elastic training: a stated amount of work, whatever happens to its ranks.
#![forbid(unsafe_code)]

use anyhow::Result;
use clap::Parser;
use harmonaize_bench::elastic::Recipe;
use harmonaize_bench::elastic::trainer::Trainer;
use harmonaize_bench::tenant::Seat;
use std::path::PathBuf;
use std::time::Duration;

/// What an accelerator takes for a micro-batch.
const COMPUTE: Duration = Duration::from_millis(60);
/// The fewest micro-batches that are accumulated, without events always so many, and the most.
const ACCUMULATE: (u32, u32) = (2, 16);
/// What a micro-batch beyond the fewest counts, in percent of one.
const BEYOND: u64 = 70;

/// Trains the demo's perceptron until the work is done, and prints what it does as lines of JSON. Every micro-batch is in the model exactly once at the
/// end, or it is an error. A rank whose own host is lost ends with an error.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    seat: Seat,
    /// Take part in a training that runs, instead of being one of its first ranks
    #[arg(long)]
    enter: bool,
    /// Hear the provider's events and leave choices to it; all ranks or none
    #[arg(long)]
    subscribed: bool,
    /// A folder that all hosts share, for the saved state
    #[arg(long)]
    shared: PathBuf,
    /// Micro-batches to be done
    #[arg(long, default_value_t = 3200)]
    work: u64,
    /// How often the state is saved, at least, in milliseconds
    #[arg(long, default_value_t = 6000)]
    every_ms: u64,
    /// What saving and restoring takes, in milliseconds
    #[arg(long, default_value_t = 1000)]
    cost_ms: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let milliseconds = Duration::from_millis;
    let recipe = Recipe {
        work: arguments.work * harmonaize_bench::elastic::WHOLE,
        compute: COMPUTE,
        accumulate: ACCUMULATE,
        beyond: BEYOND,
        every: milliseconds(arguments.every_ms),
        cost: milliseconds(arguments.cost_ms),
        shared: arguments.shared,
        subscribed: arguments.subscribed,
    };
    Trainer::join(&arguments.seat, recipe, arguments.enter)?.train()
}
