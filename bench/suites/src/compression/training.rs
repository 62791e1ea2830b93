//! Trainings of two models whose gradients travel in fewer bits, on links so slow that steps wait for them. Rows say how
//! long it is until a model tells so many of the test images, and how many it tells in the end.

use super::super::lab::Lab;
use super::super::pictures::chart;
use super::super::row::{Better, Case, Row, median};
use super::{LIMIT, RANKS, Suite};
use anyhow::{Context, Result};
use harmonaize_plot::{Chart, Series};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;

const RATE: &str = "10Mbit/s";
/// Those of one codec, and a bound on vNMSE, within which control chooses.
const BUDGETS: [&str; 5] = ["exact", "bf16", "int8", "rotated 4", "0.05"];
/// What must be how many times faster than what.
const FASTER: [(&str, &str, f64); 5] = [
    ("bf16", "exact", 1.0),
    ("int8", "exact", 2.0),
    ("rotated 4", "exact", 2.0),
    ("rotated 4", "bf16", 2.0),
    ("0.05", "exact", 2.0),
];
/// Steps between two tests.
const EVERY: &str = "5";

/// A line that `train` prints, as far as it matters here.
#[derive(Debug, Deserialize)]
struct Printed {
    at_us: u64,
    bytes: Option<u64>,
    correct: Option<f64>,
    tested: Option<f64>,
}

/// A training.
struct Run {
    /// Bytes of the gradients.
    bytes: u64,
    /// Seconds from the start, and percent of the test images told then.
    curve: Vec<(f64, f64)>,
}

impl Run {
    fn of(printed: &[Printed]) -> Result<Self> {
        let (started, ended) = printed.first().zip(printed.last()).context("nothing was printed")?;
        let tested = ended.tested.context("the training did not end")?.max(1.0);
        let point = |line: &Printed| {
            let seconds = line.at_us.saturating_sub(started.at_us) as f64 / 1e6;
            line.correct.map(|correct| (seconds, 100.0 * correct / tested))
        };
        let bytes = printed.iter().find_map(|line| line.bytes).context("no step was made")?;
        Ok(Self { bytes, curve: printed.iter().filter_map(point).collect() })
    }

    /// Seconds until so many percent were told.
    fn until(&self, percent: f64) -> Option<f64> {
        self.curve.iter().find(|(_, told)| *told >= percent).map(|(seconds, _)| *seconds)
    }

    fn last(&self) -> f64 {
        self.curve.last().map_or(0.0, |(_, told)| *told)
    }
}

/// The convolutional network, until it tells 95% of the test images.
pub(super) fn convolutional(suite: &Suite) -> Result<Vec<Row>> {
    run(suite, "convolutional", 95.0)
}

/// The transformer, until it tells 80%: with plain momentum it learns slowly.
pub(super) fn transformer(suite: &Suite) -> Result<Vec<Row>> {
    run(suite, "transformer", 80.0)
}

/// A row for each bar: a training with each seed and budget, budgets in turn.
fn run(suite: &Suite, model: &str, percent: f64) -> Result<Vec<Row>> {
    let mut lab = Lab::build(RANKS, RATE, suite.binaries.clone(), Arc::clone(&suite.stop))?;
    let mut runs: BTreeMap<&str, Vec<Run>> = BTreeMap::new();
    for seed in 1..=suite.budget.rounds {
        for budget in BUDGETS {
            let run = train(suite, &mut lab, model, budget, seed)?;
            let until =
                run.until(percent).map_or("never".to_owned(), |seconds| format!("after {seconds:.2} s"));
            let last = run.last();
            eprintln!("{RATE}, {model}, {budget}, seed {seed}: {percent}% {until}, {last:.2}% in the end");
            runs.entry(budget).or_default().push(run);
        }
    }
    if let Some(folder) = &suite.request.figures {
        curves(model, &runs).write(folder, &format!("training-{model}"))?;
    }
    Ok(rows(model, percent, &runs))
}

/// What a budget is called.
fn named(budget: &str) -> String {
    budget.parse::<f64>().map_or(budget.to_owned(), |most| format!("within vNMSE {most}"))
}

/// How many of the test images are told when: of each test, the medians over seeds.
fn curves(model: &str, runs: &BTreeMap<&str, Vec<Run>>) -> Chart {
    let series = |budget: &&str| {
        let of = runs.get(budget).map_or(&[][..], Vec::as_slice);
        let tests = of.iter().map(|run| run.curve.len()).max().unwrap_or(0);
        let middle = |values: Vec<f64>| median(&values).unwrap_or(f64::NAN);
        let point = |test: usize| {
            let points = || of.iter().filter_map(|run| run.curve.get(test));
            (middle(points().map(|(at, _)| *at).collect()), middle(points().map(|(_, told)| *told).collect()))
        };
        Series { name: named(budget), points: (0..tests).map(point).collect() }
    };
    let title = format!("A {model} network on four hosts with links of {RATE}");
    let axes = ("seconds", "test images told, %");
    chart(title, axes, BUDGETS.iter().map(series).collect(), Vec::new())
}

fn train(suite: &Suite, lab: &mut Lab, model: &str, budget: &str, seed: usize) -> Result<Run> {
    let (seed, steps) = (seed.to_string(), suite.budget.steps.to_string());
    let arguments =
        ["--model", model, "--budget", budget, "--seed", &seed, "--steps", &steps, "--every", EVERY];
    let hosts: Vec<usize> = (0..RANKS).collect();
    Run::of(&lab.figures::<Printed>("train", &hosts, &arguments, LIMIT)?)
}

fn rows(model: &str, percent: f64, runs: &BTreeMap<&str, Vec<Run>>) -> Vec<Row> {
    let of = |budget: &str| runs.get(budget).map_or(&[][..], Vec::as_slice);
    let case = |case: String, better, bar| {
        let size = of("exact").first().map_or(0, |run| run.bytes);
        Case::new("compression", format!("training, {model}, {case}"), better, bar).of(size, RANKS)
    };
    let faster = FASTER.iter().map(|(ours, theirs, bar)| {
        let case = case(format!("{}, {RATE}: seconds to {percent}%", named(ours)), Better::Less, 1.0 / bar);
        let times = |budget| of(budget).iter().map(|run| run.until(percent)).collect::<Option<Vec<f64>>>();
        match times(ours).zip(times(theirs)) {
            Some((ours, reference)) => case.compare(&ours, &reference, theirs),
            None => case.missing(theirs, "a training never told so many"),
        }
    });
    // The mean is within the range of what seeds alone make of exact trainings, or above.
    let least = of("exact").iter().map(Run::last).fold(f64::INFINITY, f64::min);
    let told = BUDGETS.iter().filter(|budget| **budget != "exact").map(|budget| {
        let told = of(budget);
        let mean = told.iter().map(Run::last).sum::<f64>() / told.len().max(1) as f64;
        case(format!("{}: mean accuracy, %", named(budget)), Better::More, 1.0).compare(
            &[mean],
            &[least],
            "the worst exact seed",
        )
    });
    faster.chain(told).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(step_us: u64, told: [f64; 3]) -> Run {
        let mut lines = vec![format!(r#"{{"event":"start","at_us":1000000,"rank":0,"ranks":4}}"#)];
        for (at, told) in (1..).zip(told) {
            let at_us = 1_000_000 + at * step_us;
            lines.push(format!(r#"{{"event":"step","at_us":{at_us},"bytes":400,"correct":{told}}}"#));
        }
        lines.push(format!(r#"{{"event":"trained","at_us":9000000,"correct":{},"tested":200}}"#, told[2]));
        let printed: Vec<Printed> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        Run::of(&printed).unwrap()
    }

    #[test]
    fn the_first_test_at_target_accuracy_counts() {
        let runs = BTreeMap::from([
            ("exact", vec![run(1_000_000, [100.0, 190.0, 188.0])]),
            ("bf16", vec![run(500_000, [100.0, 190.0, 196.0])]),
            ("int8", vec![run(400_000, [190.0, 190.0, 187.0])]),
            ("rotated 4", vec![run(100_000, [0.0, 0.0, 189.9])]),
            ("0.05", vec![run(100_000, [0.0, 190.0, 190.0])]),
        ]);
        let rows = rows("m", 95.0, &runs);
        let of = |case: &str| rows.iter().filter(|row| row.case.contains(case)).collect::<Vec<_>>();
        let seconds = of("seconds to 95%");
        assert_eq!((seconds[0].ours, seconds[0].reference, seconds[0].size), (Some(1.0), Some(2.0), 400));
        assert!(seconds[0].passed() && seconds[1].passed() && seconds[1].ratio == Some(5.0));
        assert!(!seconds[2].passed() && !seconds[3].passed() && seconds[2].ours.is_none());
        let held: Vec<bool> = of("mean accuracy").iter().map(|row| row.passed()).collect();
        assert_eq!(held, [true, false, true, true]);
        assert!(of("within vNMSE 0.05").len() == 2 && seconds[4].passed());
    }

    #[test]
    fn a_curve_is_the_middle_of_its_seeds() {
        let seeds = vec![run(250_000, [0.0, 190.0, 190.0]), run(750_000, [10.0, 191.0, 192.0])];
        let chart = curves("m", &BTreeMap::from([("0.05", seeds)]));
        assert_eq!(chart.series[4].points, [(0.5, 2.5), (1.0, 95.25), (1.5, 95.5), (8.0, 95.5)]);
        assert_eq!((chart.series.len(), chart.series[4].name.as_str()), (5, "within vNMSE 0.05"));
    }
}
