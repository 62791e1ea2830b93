//! Trains a model of digits: in one process, or as one worker of several whose gradients go through their agent.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use harmonaize_bench::communicator::{Communicator, SingleProcess};
use harmonaize_bench::model::Kind;
use harmonaize_bench::record::Recorded;
use harmonaize_bench::report::{Line, now_us};
use harmonaize_bench::tenant::{Seat, Worker, budget};
use harmonaize_bench::training::{Recipe, train};
use harmonaize_client::Budget;
use signal_hook::consts::{SIGINT, SIGTERM};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Room for the gradients and what rides along.
const ARENA: u64 = 4 << 20;

/// Trains a model on handwritten digits and prints a line of JSON per step.
#[derive(Parser)]
struct Arguments {
    /// Train in this process alone, on whole batches
    #[arg(long, conflicts_with_all = ["socket", "rank", "ranks"])]
    single: bool,
    #[command(flatten)]
    seat: Seat,
    /// What is trained
    #[arg(long, value_enum, default_value_t)]
    model: Kind,
    /// What may be lost of gradients: exact, as-bf16, a bound on vNMSE such as 0.001, or a codec's name
    #[arg(long, default_value = "exact", value_parser = budget)]
    budget: Budget,
    /// Seed of split, weights and batches
    #[arg(long, default_value_t = Recipe::default().seed)]
    seed: u64,
    /// Steps
    #[arg(long, default_value_t = Recipe::default().steps)]
    steps: usize,
    /// Go on after those until SIGTERM to any worker: all of them end after the same step
    #[arg(long)]
    until_stopped: bool,
    /// Print what the provider tells the tenant, at rank 0
    #[arg(long)]
    listen: bool,
    /// Learning rate; what suits the model if it is left out
    #[arg(long)]
    rate: Option<f32>,
    /// Images a step, over all workers
    #[arg(long, default_value_t = Recipe::default().batch)]
    batch: usize,
    /// Test images that are told at the end
    #[arg(long, default_value_t = Recipe::default().tested, value_name = "IMAGES")]
    tested: usize,
    /// Test after every so many steps too, at rank 0
    #[arg(long, default_value_t = 0, value_name = "STEPS")]
    every: usize,
    /// Write the gradients of some steps into this folder, at rank 0, as it gives them to be averaged: MODEL-STEP.npy
    #[arg(long, value_name = "FOLDER")]
    record: Option<PathBuf>,
    /// Which steps, from 1
    #[arg(long, value_delimiter = ',', default_value = "5,50,95", value_name = "STEP", requires = "record")]
    record_steps: Vec<usize>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let Arguments { seed, steps, batch, tested, every, .. } = arguments;
    let rate = arguments.rate.unwrap_or(arguments.model.rate());
    let recipe =
        Recipe { kind: arguments.model, seed, steps, batch, tested, every, rate, ..Recipe::default() };
    let told = Arc::new(AtomicBool::new(!arguments.until_stopped));
    if arguments.until_stopped {
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&told))?;
        }
    }
    let record = arguments.record.map(|folder| (folder, arguments.record_steps));
    if arguments.single {
        return recorded(&recipe, &mut SingleProcess, record, &told);
    }
    let mut worker = Worker::join(&arguments.seat, ARENA, arguments.budget)?;
    if arguments.listen && worker.rank() == 0 {
        worker.participant().print_events()?;
    }
    recorded(&recipe, &mut worker, record, &told)
}

/// Trains, and keeps the gradients of some steps where that was asked for.
fn recorded(
    recipe: &Recipe,
    inner: &mut dyn Communicator,
    record: Option<(PathBuf, Vec<usize>)>,
    stop_requested: &AtomicBool,
) -> Result<()> {
    let Some((folder, steps)) = record.filter(|_| inner.rank() == 0) else {
        return work(recipe, inner, stop_requested);
    };
    let name = recipe.kind.to_possible_value().context("a model without a name")?.get_name().to_owned();
    work(recipe, &mut Recorded { inner, folder, name, steps, made: 0 }, stop_requested)
}

fn work(recipe: &Recipe, communicator: &mut dyn Communicator, told: &AtomicBool) -> Result<()> {
    let (rank, ranks) = (communicator.rank(), communicator.ranks());
    Line::Start { at_us: now_us(), rank, ranks }.print()?;
    let outcome =
        train(recipe, communicator, &|| told.load(Ordering::Relaxed), &mut |step| Line::from(step).print())?;
    Line::from(&outcome).print()
}
