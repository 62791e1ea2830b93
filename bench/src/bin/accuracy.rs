//! How well models learn where their gradients lose something: trainings with several seeds and codecs, in one process, with the
//! arithmetic of coded AllReduces. Prints a row of a table for each model and codec.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, anyhow};
use clap::Parser;
use harmonaize_bench::lossy::{Coding, Lossy};
use harmonaize_bench::model::Kind;
use harmonaize_bench::training::{Recipe, train};
use harmonaize_codec::Codec;

/// Trains models of digits by exact gradients and by such as lose something.
#[derive(Parser)]
struct Arguments {
    /// Models
    #[arg(long, value_enum, value_delimiter = ',', default_value = "convolutional,transformer")]
    models: Vec<Kind>,
    /// Codecs by name, with "+feedback" behind where what a step left out is added in the next; exact is always first
    #[arg(
        long,
        value_delimiter = ';',
        default_value = "bf16;int8;int4;rotated 4;rotated 2;rotated 1;rotated 1+feedback"
    )]
    codecs: Vec<String>,
    /// Seeds of split, weights and batches: 1 to this
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Workers
    #[arg(long, default_value_t = 4)]
    workers: usize,
    /// Steps
    #[arg(long, default_value_t = 150)]
    steps: usize,
}

/// One training.
struct Run {
    /// Percent of the test images.
    accuracy: f64,
    /// Mean loss of the last tenth of the steps.
    loss: f64,
    /// What was lost of all gradients, vNMSE, as encoders measured it.
    lost: f64,
}

fn run(arguments: &Arguments, kind: Kind, seed: u64, coding: Coding) -> Result<Run> {
    let recipe = Recipe { kind, seed, steps: arguments.steps, rate: kind.rate(), ..Recipe::default() };
    let last = arguments.steps - arguments.steps.div_ceil(10);
    let work = |mut rank: Lossy| -> Result<Run> {
        let (mut sum, mut count) = (0.0, 0.0);
        let outcome = train(&recipe, &mut rank, &|| true, &mut |step| {
            if step.number >= last {
                sum += f64::from(step.loss);
                count += 1.0;
            }
            Ok(())
        })?;
        let accuracy = 100.0 * outcome.correct as f64 / outcome.tested as f64;
        Ok(Run { accuracy, loss: sum / count, lost: rank.relative_error()? })
    };
    std::thread::scope(|scope| {
        let ranks = Lossy::new(arguments.workers, coding).into_iter();
        let threads: Vec<_> = ranks.map(|rank| scope.spawn(|| work(rank))).collect();
        let mut runs =
            threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a worker panicked")));
        runs.next().context("no worker")?
    })?
}

fn coding(text: &str) -> Result<Coding> {
    let (name, feedback) = text.strip_suffix("+feedback").map_or((text, false), |name| (name, true));
    let codec = Codec::named(name).with_context(|| format!("no codec is called \"{name}\""))?;
    Ok(Coding { codec, most: None, feedback })
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    println!(
        "| model | gradients | accuracy: mean (least to most) | loss | lost (vNMSE) | mean within exact's range |"
    );
    println!("|---|---|---|---|---|---|");
    for kind in &arguments.models {
        let mut range = (0.0, 100.0);
        for name in std::iter::once("exact").chain(arguments.codecs.iter().map(String::as_str)) {
            let coding = coding(name)?;
            let runs = (1..=arguments.seeds).map(|seed| run(&arguments, *kind, seed, coding));
            let runs = runs.collect::<Result<Vec<Run>>>()?;
            let all = || runs.iter().map(|run| run.accuracy);
            let (least, most) = (all().fold(100.0, f64::min), all().fold(0.0, f64::max));
            let mean = |of: fn(&Run) -> f64| runs.iter().map(of).sum::<f64>() / runs.len() as f64;
            let accuracy = mean(|run| run.accuracy);
            if name == "exact" {
                range = (least, most);
            }
            // Better than exact is no harm.
            let within = if accuracy >= range.0 { "yes" } else { "no" };
            let (loss, lost) = (mean(|run| run.loss), mean(|run| run.lost));
            println!(
                "| {kind:?} | {name} | {accuracy:.2}% ({least:.2} to {most:.2}) | {loss:.4} | {lost:.2e} | {within} |"
            );
        }
    }
    Ok(())
}
