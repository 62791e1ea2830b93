//! Suite compression: AllReduces in fewer bits against exact ones, in turn in one run on four hosts; and what control chooses where
//! links are fast and slow.

use super::lab::Lab;
use super::part::{self, Outcome, Part};
use super::row::{Better, Case, Row, median};
use crate::workspace::Binaries;
use anyhow::{Context, Result};
use serde::Deserialize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const RANKS: usize = 4;
const MIB: u64 = 1 << 20;
/// How long one run may take.
const LIMIT: Duration = Duration::from_secs(600);

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Effort {
    /// Rounds in which every budget has its turn; seeds of trainings.
    pub rounds: usize,
    /// Steps of a training.
    pub steps: usize,
    /// Bytes of a rank's tensor.
    pub bytes: u64,
    /// Parts alone: speed, slow, fast, training; all if empty.
    pub only: Vec<String>,
}

impl Effort {
    /// For figures.
    pub fn new(rounds: usize, only: &[String]) -> Self {
        Self { rounds, steps: 200, bytes: 64 * MIB, only: only.to_vec() }
    }

    /// Shows that everything runs, and measures nothing worth a figure.
    pub fn smoke(only: &[String]) -> Self {
        Self { rounds: 1, steps: 5, bytes: 4 * MIB, only: only.to_vec() }
    }
}

/// What all parts work with.
struct Suite {
    effort: Effort,
    binaries: Binaries,
    stop: Arc<AtomicBool>,
}

const PARTS: &[Part<Suite>] = &[("speed", speed), ("slow", slow), ("fast", fast), ("training", training)];

/// Measures.
pub fn run(effort: Effort, binaries: Binaries, stop: Arc<AtomicBool>) -> Outcome {
    let suite = Suite { effort, binaries, stop };
    part::run(&suite, PARTS, &suite.effort.only)
}

/// What `coded` prints for a budget.
#[derive(Debug, Deserialize)]
struct Figures {
    budget: String,
    times_us: Vec<f64>,
    algorithm: String,
    fallback: bool,
    bits_per_element: f64,
    claimed: f64,
    measured: f64,
}

impl Suite {
    fn case(&self, case: String, better: Better, bar: f64) -> Case {
        Case { suite: "compression", case, size: self.effort.bytes, ranks: RANKS, better, bar }
    }

    /// One run on a star with links of that rate, budgets in turn; exact first.
    fn figures(&self, rate: &str, budgets: &[&str], rounds: usize) -> Result<Vec<Figures>> {
        let mut lab = Lab::build(RANKS, rate, self.binaries.clone(), Arc::clone(&self.stop))?;
        let (bytes, budgets, rounds) = (self.effort.bytes.to_string(), budgets.join(","), rounds.to_string());
        let arguments = ["--bytes", &bytes, "--budgets", &budgets, "--warmup", "2", "--iterations", &rounds];
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        let hosts: Vec<usize> = (0..RANKS).collect();
        let figures: Vec<Figures> = lab.figures("coded", &hosts, &arguments, LIMIT)?;
        for found in &figures {
            eprintln!(
                "{rate}, {}: {:.1} ms, {}, {:.2} bits an element, vNMSE {:.3e} claimed and {:.3e} measured{}",
                found.budget,
                median(&found.times_us).unwrap_or(0.0) / 1e3,
                found.algorithm,
                found.bits_per_element,
                found.claimed,
                found.measured,
                if found.fallback { ", in part exact" } else { "" }
            );
        }
        Ok(figures)
    }
}

/// A line that `train` prints.
#[derive(Debug, Deserialize)]
struct Printed {
    at_us: u64,
    correct: Option<f64>,
    tested: Option<f64>,
}

impl Suite {
    /// Seconds of a training, and percent of the test images that it tells right.
    fn train(&self, lab: &mut Lab, model: &str, budget: &str, seed: usize) -> Result<(f64, f64)> {
        let (seed, steps) = (seed.to_string(), self.effort.steps.to_string());
        let arguments = ["--model", model, "--budget", budget, "--seed", &seed, "--steps", &steps];
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        let hosts: Vec<usize> = (0..RANKS).collect();
        let printed: Vec<Printed> = lab.figures("train", &hosts, &arguments, LIMIT)?;
        let (started, ended) = printed.first().zip(printed.last()).context("nothing was printed")?;
        let (correct, tested) = ended.correct.zip(ended.tested).context("the training did not end")?;
        let seconds = ended.at_us.saturating_sub(started.at_us) as f64 / 1e6;
        Ok((seconds, 100.0 * correct / tested.max(1.0)))
    }
}

/// busbw of a run's operations, GB/s.
fn busbw(bytes: u64, figures: &Figures) -> Vec<f64> {
    let factor = 2.0 * (RANKS as f64 - 1.0) / RANKS as f64;
    figures.times_us.iter().map(|time| factor * bytes as f64 / time / 1e3).collect()
}

/// 1 Gbit/s: how many times the exact rate, and whether receipts tell the truth of what was lost.
fn speed(suite: &Suite) -> Result<Vec<Row>> {
    let bars = [("bf16", 1.9), ("int8", 3.6), ("rotated 4", 6.5)];
    let budgets: Vec<&str> = std::iter::once("exact").chain(bars.iter().map(|(name, _)| *name)).collect();
    let figures = suite.figures("1Gbit/s", &budgets, suite.effort.rounds)?;
    let of = |name: &str| {
        figures.iter().find(|found| found.budget == name).with_context(|| format!("no figures of {name}"))
    };
    let exact = busbw(suite.effort.bytes, of("exact")?);
    let mut rows = Vec::new();
    for (name, bar) in bars {
        let found = of(name)?;
        let case = suite.case(format!("allreduce f32 as {name}, 1 Gbit/s: busbw GB/s"), Better::More, bar);
        rows.push(case.compare(&busbw(suite.effort.bytes, found), &exact, "the same exact"));
        // Of codes whose errors may be alike at all ranks the receipt tells a bound.
        let case = suite.case(format!("{name}: vNMSE, against the receipt's"), Better::Less, 1.05);
        rows.push(case.compare(&[found.measured], &[found.claimed], "the receipt"));
    }
    Ok(rows)
}

/// 100 Mbit/s: something is chosen within a bound, and it is faster.
fn slow(suite: &Suite) -> Result<Vec<Row>> {
    let rounds = suite.effort.rounds.min(3);
    chosen(suite, "100Mbit/s", rounds, 3.0)
}

/// 10 Gbit/s: whatever is chosen is at most a fiftieth slower than exact.
fn fast(suite: &Suite) -> Result<Vec<Row>> {
    chosen(suite, "10Gbit/s", suite.effort.rounds, 1.0 / 1.02)
}

/// Two models on links so slow that gradients are what their steps wait for: the time of the training, and how many of the test
/// images it tells, exact and in fewer bits.
fn training(suite: &Suite) -> Result<Vec<Row>> {
    const RATE: &str = "20Mbit/s";
    let mut lab = Lab::build(RANKS, RATE, suite.binaries.clone(), Arc::clone(&suite.stop))?;
    let mut rows = Vec::new();
    for model in ["convolutional", "transformer"] {
        let (mut exact, mut accuracy) = (Vec::new(), Vec::new());
        for (budget, bar) in [("exact", 1.0), ("bf16", 1.0), ("int8", 2.0), ("rotated 4", 2.0)] {
            let (mut times, mut told) = (Vec::new(), Vec::new());
            for seed in 1..=suite.effort.rounds {
                let (time, right) = suite.train(&mut lab, model, budget, seed)?;
                times.push(time);
                told.push(right);
            }
            let mean = told.iter().sum::<f64>() / told.len().max(1) as f64;
            eprintln!(
                "{RATE}, {model}, {budget}: {times:.1?} s, {told:.1?}% of the test images, {mean:.2}% in the mean"
            );
            if budget == "exact" {
                (exact, accuracy) = (times, told);
                continue;
            }
            let case =
                suite.case(format!("training, {model}, {budget}, {RATE}: seconds"), Better::Less, 1.0 / bar);
            rows.push(case.compare(&times, &exact, "the same exact"));
            // The mean within the range of what seeds alone make of exact trainings.
            let least = accuracy.iter().copied().fold(f64::INFINITY, f64::min);
            let case = format!("training, {model}, {budget}: mean accuracy, %");
            let held = suite.case(case, Better::More, 1.0);
            rows.push(held.compare(&[mean], &[least], "the worst exact seed"));
        }
    }
    Ok(rows)
}

fn chosen(suite: &Suite, rate: &str, rounds: usize, bar: f64) -> Result<Vec<Row>> {
    const BOUND: &str = "0.01";
    let figures = suite.figures(rate, &["exact", BOUND], rounds)?;
    let [exact, found] = figures.as_slice() else {
        anyhow::bail!("two budgets, but {} figures", figures.len())
    };
    let (ours, exact) = (busbw(suite.effort.bytes, found), busbw(suite.effort.bytes, exact));
    let case = format!("allreduce f32 within vNMSE {BOUND} ({}), {rate}: busbw GB/s", found.algorithm);
    let kept = suite.case(format!("vNMSE at {rate}"), Better::Less, 1.0);
    let bound: f64 = BOUND.parse()?;
    Ok(vec![
        suite.case(case, Better::More, bar).compare(&ours, &exact, "the same exact"),
        kept.limit(&[found.measured], bound),
    ])
}
