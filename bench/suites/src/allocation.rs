//! Suite allocation: policies over workloads in virtual time, beside what their papers print.

use crate::part::{self, Outcome, Part};
use crate::row::{Case, Row};
use crate::suite::Request;
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::job::printed;
use harmonaize_testkit::workspace;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

const SUITE: &str = "allocation";

/// Names the folder `sia-simulator` of Sia's artifact.
const VARIABLE: &str = "HARMONAIZE_SIA";

/// The parts.
pub(crate) const PARTS: &[Part<Traces>] = &[
    ("gavel", gavel),
    ("sia", sia),
    ("queues", queues),
    ("fairness", fairness),
    ("adapting", adapting),
    ("market", market),
    ("time", time),
    ("own", own),
];

/// What the artifact's own simulator prints of Gavel by workload: hours of completion and of makespan, restarts. It ran as its README says,
/// see docs/performance/allocation.md.
const GAVEL: &[(&str, f64, f64, f64)] = &[
    ("saturn/workload-1", 1.7984, 27.274, 3.719),
    ("saturn/workload-2", 1.7172, 34.049, 4.394),
    ("saturn/workload-3", 2.5965, 48.572, 10.356),
    ("saturn/workload-4", 2.5571, 50.445, 9.137),
    ("saturn/workload-5", 2.0346, 40.769, 6.994),
];

/// The same over all ten workloads of Helios, as the artifact's README prints it.
const GAVEL_ON_HELIOS: (usize, f64, f64, f64) = (10, 2.548, 43.25, 7.408);

/// Sia's mean hours of completion by trace, in its paper, and in how many workloads.
const SIA: &[(&str, &str, usize, f64)] =
    &[("philly", "Philly", 8, 0.6), ("saturn", "Helios", 10, 0.7), ("newtrace", "newTrace", 10, 0.7)];

/// The most rounds of 2,048 accelerators that are timed, and of 10,048. The latter are 157 times as many as a workload of
/// our own is for.
const LARGE_ROUNDS: usize = 60;
const HUGE: u32 = 157;
const HUGE_ROUNDS: usize = 20;

/// Accelerators of a workload of our own.
const ACCELERATORS: u32 = 64;

/// Seeds of our own workloads. Nothing was tuned on any of them.
const SEEDS: std::ops::RangeInclusive<u32> = 1..=5;

/// What a line of `cargo run -p harmonaize-allocator --example traces` says of one workload.
#[derive(Debug, Clone, Deserialize)]
struct Ran {
    workload: String,
    jobs: usize,
    completion_hours: f64,
    makespan_hours: f64,
    restarts: f64,
    accelerator_hours: f64,
    policy_p50_ms: f64,
    policy_p95_ms: f64,
    /// Finish-time fairness, the mean and the worst, and how many jobs have none; where it was asked for.
    #[serde(default)]
    fairness_mean: Option<f64>,
    #[serde(default)]
    fairness_max: Option<f64>,
    #[serde(default)]
    fairness_unknown: usize,
}

/// What `cargo run -p harmonaize-allocator --example market -- rounds` prints.
#[derive(Debug, Deserialize)]
struct MarketRounds {
    bids: u64,
    round_p50_ms: f64,
    round_p95_ms: f64,
}

/// A line of what `cargo run -p harmonaize-allocator --example market -- gains` prints.
#[derive(Debug, Deserialize)]
struct MarketGains {
    bids: u64,
    gain_mean_percent: f64,
    gain_max_percent: f64,
}

/// Most that prices may add to the adjusted Rand index of who goes by offers and recalls alone.
const MAX_PRICE_GAIN: f64 = 0.02;
/// Least that prices of racks would add to it: else the adversary is no good.
const MIN_RACK_GAIN: f64 = 0.3;

/// A line of what the allocator's test `neighbours` prints: what prices tell of this question. A gain has its mean over sites, the
/// mean's standard error, the median, and the largest of one site.
#[derive(Debug, Deserialize)]
struct PriceDisclosure {
    strategy: String,
    question: String,
    sites: usize,
    rounds: usize,
    jobs: usize,
    /// The index by offers and recalls.
    alone: f64,
    disclosed: [f64; 4],
    shuffled: [f64; 4],
    exact: [f64; 4],
    by_rack: [f64; 4],
    /// How well a neighbour's coming is told from nothing: by what is told, and by prices of racks.
    presence: [f64; 2],
}

/// The built programs that run policies, the market, and the adversary that hears its prices.
#[derive(Debug)]
pub(crate) struct Traces {
    program: PathBuf,
    market: PathBuf,
    neighbours: PathBuf,
    smoke: bool,
}

/// Runs the parts that were asked for. Without the artifact only our own workload and the market are run.
pub(crate) fn run(request: &Request) -> Result<Outcome> {
    let mut build = workspace::cargo();
    if request.smoke {
        // With the features of the whole workspace, whose crates are built already.
        build.args([
            "build",
            "--workspace",
            "--bins",
            "--tests",
            "--example",
            "traces",
            "--example",
            "market",
        ]);
    } else {
        build.args(["build", "--release", "--package", "harmonaize-allocator"]);
        build.args(["--example", "traces", "--example", "market", "--test", "neighbours"]);
    }
    let built = workspace::executables(&mut build, &["traces", "market", "neighbours"])?.into_iter();
    // A test of the workspace is called `traces`, too.
    let is_example = |path: &Path| path.parent().is_some_and(|folder| folder.ends_with("examples"));
    let is_wanted = |(name, path): &(String, PathBuf)| is_example(path) != (name == "neighbours");
    let mut built: BTreeMap<String, PathBuf> = built.filter(is_wanted).collect();
    let program = built.remove("traces").context("cargo built no example `traces`")?;
    let market = built.remove("market").context("cargo built no example `market`")?;
    let neighbours = built.remove("neighbours").context("cargo built no test `neighbours`")?;
    let traces = Traces { program, market, neighbours, smoke: request.smoke };
    let mut only = request.only.clone();
    if only.is_empty() && (request.smoke || std::env::var_os(VARIABLE).is_none()) {
        eprintln!(
            "Without {VARIABLE}, the folder sia-simulator of Sia's artifact, only our own workload and the market are run"
        );
        only.extend(["own".to_owned(), "market".to_owned()]);
    }
    Ok(part::run(&traces, PARTS, &only))
}

impl Traces {
    fn run(&self, arguments: &[&str]) -> Result<Vec<Ran>> {
        lines(Command::new(&self.program).args(arguments))
    }
}

/// The lines of JSON that a program prints, one at least.
fn lines<T: DeserializeOwned>(command: &mut Command) -> Result<Vec<T>> {
    let text = printed(command)?;
    let lines = text.lines().filter(|line| line.starts_with('{'));
    let lines: Vec<T> = lines
        .map(|line| serde_json::from_str(line).context("not what the example prints"))
        .collect::<Result<_>>()?;
    ensure!(!lines.is_empty(), "no line of JSON in: {text}");
    Ok(lines)
}

/// The mean over all jobs of all workloads.
fn mean(ran: &[Ran], of: impl Fn(&Ran) -> f64) -> f64 {
    let jobs: usize = ran.iter().map(|ran| ran.jobs).sum();
    ran.iter().map(|ran| of(ran) * ran.jobs as f64).sum::<f64>() / jobs.max(1) as f64
}

/// By how many percent a figure is off, held to so many.
fn off(case: String, ours: f64, reference: f64, percent: f64) -> Row {
    let off = 100.0 * (ours / reference - 1.0).abs();
    Case::less(SUITE, format!("{case}: {ours:.3} for {reference}, off by %"), 1.0).limit(&[off], percent)
}

/// Whether the simulator is the artifact's: Gavel workload by workload, and over all of Helios where all ten are there.
fn gavel(traces: &Traces) -> Result<Vec<Row>> {
    let ran = traces.run(&["gavel", "saturn"])?;
    let mut rows = Vec::new();
    for (workload, completion, makespan, restarts) in GAVEL {
        for one in ran.iter().filter(|ran| ran.workload == *workload) {
            let case = |what: &str| format!("Gavel, {workload}: {what}");
            rows.push(off(case("JCT h"), one.completion_hours, *completion, 2.0));
            rows.push(off(case("makespan h"), one.makespan_hours, *makespan, 2.0));
            rows.push(off(case("restarts"), one.restarts, *restarts, 2.0));
        }
    }
    let (workloads, completion, makespan, restarts) = GAVEL_ON_HELIOS;
    let makespans = ran.iter().map(|ran| ran.makespan_hours).sum::<f64>() / ran.len().max(1) as f64;
    let figures = [
        ("JCT h", mean(&ran, |ran| ran.completion_hours), completion),
        ("makespan h", makespans, makespan),
        ("restarts", mean(&ran, |ran| ran.restarts), restarts),
    ];
    for (what, ours, reference) in figures {
        let case = format!("Gavel, Helios, {} of {workloads} workloads: {what}", ran.len());
        rows.push(if ran.len() == workloads {
            off(case, ours, reference, 2.0)
        } else {
            Case::less(SUITE, case, 1.0).stated().compare(
                &[ours],
                &[reference],
                "all of them, the artifact's README",
            )
        });
    }
    Ok(rows)
}

/// Sia on its three traces.
fn sia(traces: &Traces) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (folder, trace, workloads, paper) in SIA {
        let ran = traces.run(&["sia", folder])?;
        let case = |what: &str| format!("Sia, {trace}, {} of {workloads} workloads: {what}", ran.len());
        let completion = mean(&ran, |ran| ran.completion_hours);
        let mut jct = Case::less(SUITE, case("JCT h"), 1.05);
        if ran.len() != *workloads {
            // The paper's mean is of other workloads too.
            jct = jct.stated();
        }
        rows.push(jct.compare(&[completion], &[*paper], "the paper, over all, rounded"));
        rows.push(Case::less(SUITE, case("restarts"), 1.0).state(&[mean(&ran, |ran| ran.restarts)]));
        let hours = mean(&ran, |ran| ran.accelerator_hours);
        rows.push(Case::less(SUITE, case("GPU h a job"), 1.0).state(&[hours]));
        rows.extend(times(&case(""), &ran, 96.0));
    }
    Ok(rows)
}

/// How long decisions took: the median held to a limit, of every workload.
fn times(case: &str, ran: &[Ran], limit: f64) -> [Row; 2] {
    let of = |figure: fn(&Ran) -> f64| ran.iter().map(figure).collect::<Vec<f64>>();
    let medians =
        Case::less(SUITE, format!("{case}policy p50 ms"), 1.0).limit(&of(|ran| ran.policy_p50_ms), limit);
    let slow = Case::less(SUITE, format!("{case}policy p95 ms"), 1.0).state(&of(|ran| ran.policy_p95_ms));
    [medians, slow]
}

/// First in first out, and least attained service, on Helios.
fn queues(traces: &Traces) -> Result<Vec<Row>> {
    let gavel = mean(&traces.run(&["gavel", "saturn"])?, |ran| ran.completion_hours);
    let mut rows = Vec::new();
    for (policy, name) in [("fifo", "FIFO"), ("las", "LAS")] {
        let ran = traces.run(&[policy, "saturn"])?;
        let ours = mean(&ran, |ran| ran.completion_hours);
        let case = format!("{name}, Helios, {} workloads: JCT h", ran.len());
        rows.push(Case::less(SUITE, case, 1.0).stated().compare(&[ours], &[gavel], "Gavel, ours"));
    }
    Ok(rows)
}

/// Finish-time fairness on Helios. Links are not contended there, so that it is stated.
fn fairness(traces: &Traces) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (policy, name) in [("gavel", "Gavel"), ("sia", "Sia")] {
        let ran = traces.run(&[policy, "saturn", "fair"])?;
        rows.extend(ratios(&format!("{name}, Helios, {} workloads: ", ran.len()), &ran));
    }
    Ok(rows)
}

/// Rows of finish-time fairness: each workload's mean, and its worst. Jobs that cannot run alone are named.
fn ratios(case: &str, ran: &[Ran]) -> Vec<Row> {
    let unknown: usize = ran.iter().map(|ran| ran.fairness_unknown).sum();
    let but = if unknown == 0 { String::new() } else { format!(" but {unknown} jobs") };
    let row = |what: &str, of: fn(&Ran) -> Option<f64>| {
        let figures: Vec<f64> = ran.iter().filter_map(of).collect();
        Case::less(SUITE, format!("{case}finish-time fairness, {what}{but}"), 1.0).state(&figures)
    };
    vec![row("mean", |ran| ran.fairness_mean), row("worst", |ran| ran.fairness_max)]
}

/// Pollux and the market on Sia's traces, beside Sia.
fn adapting(traces: &Traces) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (folder, trace, ..) in SIA {
        let sia = mean(&traces.run(&["sia", folder])?, |ran| ran.completion_hours);
        for (policy, name) in [("pollux", "Pollux"), ("market", "Market")] {
            let ran = traces.run(&[policy, folder])?;
            let case = |what: &str| {
                Case::less(SUITE, format!("{name}, {trace}, {} workloads: {what}", ran.len()), 1.0)
            };
            let hours = mean(&ran, |ran| ran.completion_hours);
            rows.push(case("JCT h").stated().compare(&[hours], &[sia], "Sia, ours"));
            rows.push(case("restarts").state(&[mean(&ran, |ran| ran.restarts)]));
            rows.push(case("GPU h a job").state(&[mean(&ran, |ran| ran.accelerator_hours)]));
            let medians: Vec<f64> = ran.iter().map(|ran| ran.policy_p50_ms).collect();
            rows.push(case("policy p50 ms").state(&medians));
        }
    }
    Ok(rows)
}

/// A round of the market with 10,000 nodes, and what tenants gain who withhold.
fn market(traces: &Traces) -> Result<Vec<Row>> {
    let nodes = if traces.smoke { "100" } else { "10000" };
    let mut rows = Vec::new();
    for ran in lines::<MarketRounds>(Command::new(&traces.market).args(["rounds", nodes, "1"]))? {
        let case = |what: &str| {
            Case::less(SUITE, format!("Market, {nodes} nodes, {} bids: round {what} ms", ran.bids), 1.0)
        };
        rows.push(case("p50").state(&[ran.round_p50_ms]));
        rows.push(case("p95").limit(&[ran.round_p95_ms], 1000.0));
    }
    for ran in lines::<MarketGains>(Command::new(&traces.market).args(["gains", "1"]))? {
        let case = |what: &str| {
            let bids = ran.bids;
            Case::less(
                SUITE,
                format!("Market, a tenant with {bids} of 30 bids: {what} gain by withholding, %"),
                1.0,
            )
        };
        let most = case("largest");
        // With several bids the price is no longer independent of a tenant's own.
        let figure = [ran.gain_max_percent];
        rows.push(if ran.bids == 1 { most.limit(&figure, 1.0) } else { most.state(&figure) });
        rows.push(case("mean").state(&[ran.gain_mean_percent]));
    }
    let mut neighbours = Command::new(&traces.neighbours);
    neighbours.args(["full", "--exact", "--ignored", "--nocapture"]);
    if traces.smoke {
        neighbours.envs([("SITES", "6"), ("ROUNDS", "20")]);
    }
    rows.extend(lines::<PriceDisclosure>(&mut neighbours)?.iter().flat_map(disclosure_rows));
    Ok(rows)
}

/// What prices tell of racks or neighbours. Whose racks are to be found has an adversary that would find them by prices of racks.
fn disclosure_rows(found: &PriceDisclosure) -> Vec<Row> {
    let PriceDisclosure { strategy, question, sites, rounds, alone, .. } = found;
    let what = format!(
        "Market, {sites} sites from seed 0 on, {rounds} rounds, {} bids, {question} ({alone:.2} alone): adjusted Rand index added by",
        strategy.to_lowercase()
    );
    let case = |by: &str| Case::less(SUITE, format!("{what} {by}"), 1.0).of(0, found.jobs);
    let [told, error, median, worst] = found.disclosed;
    eprintln!("{what} what is told: {told:+.4} +- {error:.4}, median {median:+.4}, worst site {worst:+.4}");
    let [told_presence, by_rack] = found.presence;
    eprintln!(
        "  a neighbour's coming: area under the curve {told_presence:.3} by what is told, {by_rack:.3} by racks"
    );
    let mut rows = vec![
        case("what is told").limit(&[told.max(0.0)], MAX_PRICE_GAIN),
        case("what is told, median site").state(&[median]),
        case("what is told, worst site").state(&[worst]),
        case("the same at other rounds, mean").state(&[found.shuffled[0]]),
        case("the same at other rounds, worst site").state(&[found.shuffled[3]]),
        case("exact prices").state(&[found.exact[0]]),
    ];
    let planted = Case::more(SUITE, format!("{what} prices of racks"), 1.0).of(0, found.jobs);
    let by_rack = [found.by_rack[0]];
    // Who has few of its jobs at once hears of few prices together.
    rows.push(if (strategy.as_str(), question.as_str()) == ("Steady", "racks") {
        planted.limit(&by_rack, MIN_RACK_GAIN)
    } else {
        planted.state(&by_rack)
    });
    rows
}

/// Sia's decisions with 32 times the accelerators and jobs, and with 157 times those of a workload of our own.
fn time(traces: &Traces) -> Result<Vec<Row>> {
    let rounds = LARGE_ROUNDS.to_string();
    let ran = traces.run(&["sia", "scale/scale_32x/workload-1.csv", "32", &rounds])?;
    let mut rows = times("Sia, 2,048 accelerators: ", &ran, 1000.0).to_vec();
    let ran = traces.run(&["sia", "seed:1", &HUGE.to_string(), &HUGE_ROUNDS.to_string()])?;
    let case = |what: &str| {
        let accelerators = HUGE * ACCELERATORS;
        format!("Sia, {accelerators} accelerators, our own workload, {HUGE_ROUNDS} rounds: policy {what} ms")
    };
    let p50: Vec<f64> = ran.iter().map(|ran| ran.policy_p50_ms).collect();
    let p95: Vec<f64> = ran.iter().map(|ran| ran.policy_p95_ms).collect();
    for (what, times) in [("p50", p50), ("p95", p95)] {
        rows.push(Case::less(SUITE, case(what), 1.0).state(&times));
    }
    Ok(rows)
}

/// Workloads of our own, where no artifact is needed: fresh seeds, each a figure.
fn own(traces: &Traces) -> Result<Vec<Row>> {
    let policies: &[(&str, &str)] = &[
        ("gavel", "Gavel"),
        ("fifo", "FIFO"),
        ("las", "LAS"),
        ("sia", "Sia"),
        ("pollux", "Pollux"),
        ("market", "Market"),
    ];
    let policies = if traces.smoke { policies.get(..3).unwrap_or_default() } else { policies };
    let seeds = if traces.smoke { 1 } else { SEEDS.count() };
    let mut rows = Vec::new();
    for (policy, name) in policies {
        let mut ran = Vec::new();
        for seed in SEEDS.take(seeds) {
            ran.extend(traces.run(&[policy, &format!("seed:{seed}"), "fair"])?);
        }
        let case = |what: &str| format!("{name}, {seeds} workloads of our own: {what}");
        let figures = |of: fn(&Ran) -> f64| ran.iter().map(of).collect::<Vec<f64>>();
        let state = |what: &str, of: fn(&Ran) -> f64| Case::less(SUITE, case(what), 1.0).state(&figures(of));
        rows.push(state("JCT h", |ran: &Ran| ran.completion_hours));
        rows.push(state("restarts", |ran: &Ran| ran.restarts));
        rows.extend(ratios(&case(""), &ran));
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_that_is_off_by_more_misses() {
        assert!(off("c".to_owned(), 2.50, 2.548, 2.0).passed());
        assert!(off("c".to_owned(), 2.49, 2.548, 2.0).failed());
        assert!(off("c".to_owned(), 2.60, 2.548, 2.0).failed());
        assert!(off("c".to_owned(), f64::NAN, 2.548, 2.0).failed());
    }

    #[test]
    fn prices_that_tell_more_than_the_bar_miss() {
        let rows = |told: f64, by_rack: f64| {
            let line = format!(
                r#"{{"strategy": "Steady", "question": "racks", "sites": 160, "rounds": 120, "jobs": 12, "alone": 0.3,
                "disclosed": [{told}, 0.003, 0.0, 0.2], "shuffled": [0.001, 0.003, 0.0, 0.2], "exact": [0.002, 0.003, 0.0, 0.2],
                "by_rack": [{by_rack}, 0.01, 0.7, 0.9], "presence": [0.53, 0.7]}}"#
            );
            disclosure_rows(&serde_json::from_str(&line).unwrap())
        };
        let held = |rows: Vec<Row>| rows.iter().filter_map(|row| row.pass).collect::<Vec<bool>>();
        assert_eq!(held(rows(0.019, 0.7)), [true, true]);
        assert_eq!(held(rows(0.021, 0.29)), [false, false]);
        assert_eq!(held(rows(-0.01, 0.7)), [true, true]);
    }

    #[test]
    fn the_mean_is_over_jobs() {
        let ran = |jobs, hours| Ran {
            workload: "w".to_owned(),
            jobs,
            completion_hours: hours,
            makespan_hours: 0.0,
            restarts: 0.0,
            accelerator_hours: 0.0,
            policy_p50_ms: 1.0,
            policy_p95_ms: 2.0,
            fairness_mean: None,
            fairness_max: None,
            fairness_unknown: 0,
        };
        assert_eq!(mean(&[ran(1, 4.0), ran(3, 2.0)], |ran| ran.completion_hours), 2.5);
        assert!(times("", &[ran(1, 1.0)], 96.0)[0].passed());
    }

    #[test]
    fn fairness_is_stated_and_names_the_unknown() {
        let line = r#"{"workload":"seed:1","policy":"Sia","jobs":2,"rounds":9,"completion_hours":1.0,"makespan_hours":2.0,"restarts":0.5,
            "accelerator_hours":3.0,"policy_p50_ms":0.1,"policy_p95_ms":0.2,"policy_max_ms":0.3,
            "fairness_mean":0.85,"fairness_max":1.2,"fairness_unknown":1}"#;
        let rows = ratios("c: ", &[serde_json::from_str(line).unwrap()]);
        assert_eq!([0, 1].map(|row: usize| rows[row].ours), [Some(0.85), Some(1.2)]);
        assert!(rows.iter().all(|row| row.pass.is_none()));
        assert_eq!(rows[1].case, "c: finish-time fairness, worst but 1 jobs");
    }
}
