//! Suite compression: AllReduces in fewer bits against exact ones, in turn in one run on four hosts. It also shows what control
//! chooses where links are fast and slow, and what fewer bits make of trainings.

mod training;

use super::lab::Lab;
use super::part::Part;
use super::row::{Better, Case, Row, median};
use super::suite::{Bench, BenchBudget, Request};
use anyhow::{Context, Result};
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;

const RANKS: usize = 4;
const MIB: u64 = 1 << 20;
/// How long one run may take.
const LIMIT: Duration = Duration::from_secs(600);

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Budget {
    /// Rounds in which every budget has its turn; seeds of trainings.
    pub rounds: usize,
    /// Steps of a training.
    pub steps: usize,
    /// Bytes of a rank's tensor.
    pub bytes: u64,
}

/// What all parts work with.
type Suite = Bench<Budget>;

impl BenchBudget for Budget {
    const PARTS: &'static [Part<Suite>] = &[
        ("speed", speed),
        ("slow", slow),
        ("fast", fast),
        ("layers", layers),
        ("convolutional", training::convolutional),
        ("transformer", training::transformer),
    ];

    fn new(request: &Request) -> Self {
        Self { rounds: request.rounds(), steps: 100, bytes: 64 * MIB }
    }

    fn smoke() -> Self {
        Self { rounds: 1, steps: 5, bytes: 4 * MIB }
    }
}

/// What `coded` prints for a budget.
#[derive(Debug, Deserialize)]
struct Figures {
    budget: String,
    times_us: Vec<f64>,
    algorithm: String,
    codecs: Vec<String>,
    fallback: bool,
    bits_per_element: f64,
    claimed: f64,
    encoders: f64,
    measured: f64,
}

impl Suite {
    fn case(&self, case: String, better: Better, bar: f64) -> Case {
        Case::new("compression", case, better, bar).of(self.budget.bytes, RANKS)
    }

    /// One run on a star with links of that rate, budgets in turn; exact first.
    fn figures(&self, rate: &str, budgets: &[&str], rounds: usize, more: &[&str]) -> Result<Vec<Figures>> {
        let mut lab = Lab::build(RANKS, rate, self.binaries.clone(), Arc::clone(&self.stop))?;
        let (bytes, budgets, rounds) = (self.budget.bytes.to_string(), budgets.join(","), rounds.to_string());
        let arguments = ["--bytes", &bytes, "--budgets", &budgets, "--warmup", "2", "--iterations", &rounds];
        let arguments = [&arguments[..], more].concat();
        let hosts: Vec<usize> = (0..RANKS).collect();
        let figures: Vec<Figures> = lab.figures("coded", &hosts, &arguments, LIMIT)?;
        for found in &figures {
            eprintln!(
                "{rate}, {}: {:.1} ms, {} ({}), {:.2} bits an element, vNMSE at most {:.3e}, {:.3e} by encoders, {:.3e} against the exact result{}",
                found.budget,
                median(&found.times_us).unwrap_or(0.0) / 1e3,
                found.algorithm,
                found.codecs.join(", "),
                found.bits_per_element,
                found.claimed,
                found.encoders,
                found.measured,
                if found.fallback { ", in part exact" } else { "" }
            );
        }
        Ok(figures)
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
    let figures = suite.figures("1Gbit/s", &budgets, suite.budget.rounds, &[])?;
    let of = |name: &str| {
        figures.iter().find(|found| found.budget == name).with_context(|| format!("no figures of {name}"))
    };
    let exact = busbw(suite.budget.bytes, of("exact")?);
    let mut rows = Vec::new();
    for (name, bar) in bars {
        let found = of(name)?;
        let case = suite.case(format!("allreduce f32 as {name}, 1 Gbit/s: busbw GB/s"), Better::More, bar);
        rows.push(case.compare(&busbw(suite.budget.bytes, found), &exact, "the same exact"));
        let case = suite.case(format!("{name}: vNMSE, against the receipt's bound"), Better::Less, 1.0);
        rows.push(case.compare(&[found.measured], &[found.claimed], "the receipt"));
        let case = suite.case(format!("{name}: vNMSE, against what encoders measured"), Better::Less, 1.05);
        rows.push(case.compare(&[found.measured], &[found.encoders], "the receipt"));
    }
    Ok(rows)
}

/// 100 Mbit/s: something is chosen within a bound, and it is faster.
fn slow(suite: &Suite) -> Result<Vec<Row>> {
    let rounds = suite.budget.rounds.min(3);
    chosen(suite, "100Mbit/s", rounds, 3.0)
}

/// 10 Gbit/s: whatever is chosen is at most a fiftieth slower than exact.
fn fast(suite: &Suite) -> Result<Vec<Row>> {
    chosen(suite, "10Gbit/s", suite.budget.rounds, 1.0 / 1.02)
}

/// Tensors that lose unequally, within a bound that int8 keeps for some of them. They stand against bfloat16, which keeps
/// it for all.
fn layers(suite: &Suite) -> Result<Vec<Row>> {
    const BOUND: &str = "0.001";
    let rounds = suite.budget.rounds.min(3);
    let figures = suite.figures("100Mbit/s", &["exact", "bf16", BOUND], rounds, &["--layers"])?;
    let [_, alone, found] = figures.as_slice() else {
        anyhow::bail!("three budgets, but {} figures", figures.len())
    };
    let (ours, alone) = (busbw(suite.budget.bytes, found), busbw(suite.budget.bytes, alone));
    let case = format!("a step of eight tensors within vNMSE {BOUND}, 100 Mbit/s: busbw GB/s");
    let kept = suite.case("vNMSE of the tensor that lost most".to_owned(), Better::Less, 1.0);
    Ok(vec![
        suite.case(case, Better::More, 1.25).compare(&ours, &alone, "all as bf16"),
        kept.limit(&[found.measured], BOUND.parse()?),
    ])
}

fn chosen(suite: &Suite, rate: &str, rounds: usize, bar: f64) -> Result<Vec<Row>> {
    const BOUND: &str = "0.01";
    let figures = suite.figures(rate, &["exact", BOUND], rounds, &[])?;
    let [exact, found] = figures.as_slice() else {
        anyhow::bail!("two budgets, but {} figures", figures.len())
    };
    let (ours, exact) = (busbw(suite.budget.bytes, found), busbw(suite.budget.bytes, exact));
    let case = format!("allreduce f32 within vNMSE {BOUND} ({}), {rate}: busbw GB/s", found.algorithm);
    let kept = suite.case(format!("vNMSE at {rate}"), Better::Less, 1.0);
    let bound: f64 = BOUND.parse()?;
    Ok(vec![
        suite.case(case, Better::More, bar).compare(&ours, &exact, "the same exact"),
        kept.limit(&[found.measured], bound),
    ])
}
