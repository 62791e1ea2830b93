//! Small operations with a target for their time, beside a tenant that fills the links. One part runs fifty drawn cases against
//! control in virtual time, an experiment of control's own tests. The other runs a handful on the fabric.

use super::{BULK_TENANT, Suite, case, experiment};
use crate::lab::{Lab, options};
use crate::row::{Better, Row};
use anyhow::Result;
use harmonaize_testkit::job::Job;
use harmonaize_testkit::lines::{Line, Tail};
use harmonaize_testkit::served::Served;
use serde::Deserialize;
use std::time::{Duration, Instant};

/// Least part of those that an exact planner could keep.
const ACCEPTED: f64 = 0.8;
/// Hosts of the bulk tenant's ranks: each sends to all others, over both spines.
const FILLS: [usize; 4] = [0, 2, 4, 6];
/// Hosts of the ranks that answer requests, bytes of each, and milliseconds asked for. Some of these can be had, and some nobody can
/// give.
const CASES: [(&[usize], u64, u64); 5] = [
    (&[1, 3], 4 << 10, 20),
    (&[0, 5], 16 << 10, 50),
    (&[1, 4, 7], 64 << 10, 100),
    (&[0, 1, 2, 3], 256 << 10, 100),
    (&[2, 6], 256 << 10, 5),
];
/// How long requests are answered, and the bulk tenant alone before them.
const LASTS: Duration = Duration::from_secs(12);
const BEFORE: Duration = Duration::from_secs(2);
/// How long ranks may take to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the experiment prints.
#[derive(Debug, Deserialize)]
struct InferenceResult {
    cases: u64,
    accepted: u64,
    countered: u64,
    refused: u64,
    /// Those that an exact planner could keep: in one rack, and over both.
    feasible: [u64; 2],
    feasible_accepted: [u64; 2],
    disturbed: u64,
    broken: u64,
    unreported: u64,
}

/// Fifty in virtual time.
pub(super) fn targets(_: &Suite) -> Result<Vec<Row>> {
    let test = "targets::time_targets_are_kept_or_breaches_reported";
    let found: InferenceResult = serde_json::from_str(&experiment(test, false, &[])?.1)?;
    let InferenceResult { cases, accepted, countered, refused, feasible, feasible_accepted, .. } = found;
    eprintln!(
        "{cases} cases in virtual time: {accepted} accepted, {countered} countered, {refused} refused; of those that could be kept \
         {feasible_accepted:?} of {feasible:?} (in one rack, over both); {} disturbed, {} broken, {} without report",
        found.disturbed, found.broken, found.unreported
    );
    let part = |of: u64, all: u64| of as f64 / all.max(1) as f64;
    let [could, kept] = [feasible, feasible_accepted].map(|both| both.iter().sum());
    let told = part(cases - found.unreported, cases);
    Ok(vec![
        case("fifty targets: accepted of those that could be kept", Better::More, 1.0)
            .limit(&[part(kept, could)], ACCEPTED),
        case("fifty targets: kept, or their breach told", Better::More, 1.0).limit(&[told], 1.0),
    ])
}

/// Five on the fabric.
pub(super) fn inference(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = suite.lab("", "")?;
    let chosen = if suite.request.smoke { &CASES[..1] } else { &CASES[..] };
    let mut promised = Vec::new();
    for one in chosen {
        promised.extend(answered(suite, &mut lab, *one)?);
    }
    Ok(vec![row_of_promises(&promised, chosen.len())])
}

/// The row of the promises, each with whether it was kept or its breach told. What was refused is not counted; without any promise it fails.
fn row_of_promises(promised: &[bool], asked: usize) -> Row {
    let fine = promised.iter().filter(|fine| **fine).count() as f64;
    let share = (!promised.is_empty()).then(|| fine / promised.len() as f64);
    let what = format!(
        "{asked} targets on the fabric beside a tenant that fills the links: kept, or their breach told, of those promised"
    );
    case(&what, Better::More, 1.0).limit(share.as_slice(), 1.0)
}

/// Whether what was promised was kept, or its tenant told that it is not; `None` where nothing was promised.
fn answered(
    suite: &Suite,
    lab: &mut Lab,
    (hosts, bytes, p99_ms): (&[usize], u64, u64),
) -> Result<Option<bool>> {
    let mut bulk = lab.start_of(BULK_TENANT, "alltoall", &FILLS, &options(&[("--pause-ms", 0)]))?;
    wait(suite, BEFORE)?;
    let asked = options(&[("--bytes", bytes), ("--p99-ms", p99_ms)]);
    let mut requests = lab.start("inference", hosts, &asked)?;
    wait(suite, LASTS)?;
    for job in [&mut requests, &mut bulk] {
        job.stop()?;
        job.wait(PATIENCE, || lab.check())?;
    }
    let served = Served::of(&lines(&requests)?);
    eprintln!("{hosts:?}, {bytes} B within {p99_ms} ms: {}", served.describe());
    for log in requests.logs().iter().chain(&bulk.logs()) {
        std::fs::remove_file(log)?;
    }
    Ok(served.is_promised().then(|| served.is_met() || served.is_reported()))
}

fn wait(suite: &Suite, time: Duration) -> Result<()> {
    let since = Instant::now();
    while since.elapsed() < time {
        suite.go_on()?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn lines(job: &Job) -> Result<Vec<Vec<Line>>> {
    job.logs().iter().map(|log| Tail::open(log)?.lines()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusing_everything_passes_nothing() {
        assert!(row_of_promises(&[], 5).failed());
        assert!(row_of_promises(&[true, false], 5).failed());
        assert!(row_of_promises(&[true, true], 5).passed());
    }
}
