//! The recorded traces of `tests/traces`, replayed: what is found in them is what the trainings' own logs say.

use anyhow::{Context, Result, ensure};
use harmonaize_analysis::trace::{Record, merge};
use harmonaize_testkit::found::{Found, compare, errors, period_error, phases};
use harmonaize_testkit::truth::{Library, Truth};
use harmonaize_tests::replay::{Replay, records};
use std::path::{Path, PathBuf};

/// Iterations until a job is made out, and those of which nothing is asked.
const FIRST: usize = 10;

/// The folders of the traces, with what was logged.
fn runs() -> Result<Vec<(PathBuf, Truth)>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
    let mut runs = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            runs.push((path.clone(), Truth::read(&path.join("truth.json"))?));
        }
    }
    runs.sort_by(|(one, _), (other, _)| one.cmp(other));
    ensure!(runs.len() >= 3, "the traces are not in {}", folder.display());
    Ok(runs)
}

/// What all hosts of a run together show.
fn found(folder: &Path, truth: &Truth) -> Result<Vec<Found>> {
    let read = |place: usize| -> Result<Vec<Record>> {
        let path = folder.join(format!("h{place}.trace"));
        let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
        Ok(records(&bytes, 0, u64::MAX)?)
    };
    let traces: Vec<Vec<Record>> = (0..truth.places.len()).map(read).collect::<Result<_>>()?;
    let merged = merge(&traces.iter().map(Vec::as_slice).collect::<Vec<_>>());
    Ok(Replay::of(traces.len()).run(&merged))
}

fn median(values: &[f64]) -> f64 {
    let mut sorted: Vec<f64> = values.iter().map(|value| value.abs()).collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

#[test]
fn external_training_phases_match_their_logs() {
    for (folder, truth) in runs().unwrap() {
        if truth.library != Library::Gloo {
            continue;
        }
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let found = phases(&found(&folder, &truth).unwrap());
        let agreement = compare(&truth, &found, FIRST);
        let expected = truth.iterations() - FIRST;
        // The job goes on as it was made out, whatever is done to it: at most one phase is cut or joined while it changes.
        assert!(agreement.matched + 1 >= expected, "{name}: {agreement:?}");
        assert!(agreement.extra <= 1, "{name}: {agreement:?}");
        assert!(median(&agreement.beginnings_ms) < 1.0, "{name}: {agreement:?}");
        // These were recorded on busy machines, where a rank may be told late that it is done.
        assert!(median(&agreement.ends_ms) < 4.0, "{name}: {agreement:?}");
        let period = period_error(&truth, &found, FIRST).unwrap();
        assert!(period.abs() < 0.3, "{name}: the period is {period}% off");
    }
}

/// A hundred iterations match the training's log. Their period, beginnings and ends are as close to it as is asked for on quiet
/// machines.
#[test]
fn a_hundred_iterations_match_the_log() {
    let (folder, truth) =
        runs().unwrap().into_iter().find(|(folder, _)| folder.ends_with("gloo-long")).unwrap();
    let found = phases(&found(&folder, &truth).unwrap());
    let agreement = compare(&truth, &found, FIRST);
    assert_eq!((agreement.logged, agreement.matched, agreement.extra), (100, 100, 0), "{agreement:?}");
    let (begin, end) = (median(&agreement.beginnings_ms), median(&agreement.ends_ms));
    let period = period_error(&truth, &found, FIRST).unwrap();
    println!("beginnings {begin} ms off, ends {end} ms off, the period {period}%");
    assert!(begin < 1.0 && end < 2.0 && period.abs() < 0.3, "{begin} ms, {end} ms, {period}%");
}

#[test]
fn stragglers_match_the_injections() {
    for (folder, truth) in runs().unwrap() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(errors(&truth, &found(&folder, &truth).unwrap(), 3), Vec::<String>::new(), "{name}");
    }
}

#[test]
fn own_operations_match_the_log() {
    let mut seen = 0;
    for (folder, truth) in runs().unwrap() {
        if truth.library != Library::Ours {
            continue;
        }
        seen += 1;
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let operations = found(&folder, &truth).unwrap().into_iter().filter_map(|found| match found {
            Found::Operation { ranks, .. } => Some(ranks),
            _ => None,
        });
        let operations: Vec<_> = operations.collect();
        for (rank, log) in truth.ranks.iter().enumerate() {
            for (number, iteration) in log.iter().enumerate() {
                // A mark is made when the agent takes the call, and when it has told the end: within the rank's own times.
                let within = |(of, called_ns, ended_ns): &(u32, u64, u64)| {
                    *of as usize == rank
                        && *called_ns >= iteration.called_ns
                        && *ended_ns <= iteration.done_ns
                };
                let count = operations.iter().flatten().filter(|times| within(times)).count();
                assert_eq!(count, truth.buckets, "{name}: rank {rank}, iteration {number}");
            }
        }
    }
    assert!(seen > 0, "there is no trace of our own");
}
