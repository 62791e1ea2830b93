//! A spine that a job crosses is drained, or cut dead.

use super::job::{Running, bytes_for};
use super::{HOSTS, PATIENCE, Suite, case, plan_when, spine_of};
use crate::figures::summary;
use crate::lab::Lab;
use crate::row::{Better, Row};
use anyhow::{Result, ensure};
use harmonaize_testkit::clock::{monotonic_ns, realtime_ns};
use harmonaize_testkit::load::{Load, Watch};
use harmonaize_testkit::truth::Iteration;
use std::time::Duration;

/// The most until a drained spine carries no byte of ours, in milliseconds.
const DRAINED_MS: f64 = 200.0;
/// The most that a spine's death costs an operation, in milliseconds.
const CUT_MS: f64 = 1000.0;
/// How long an operation takes where the links are the job's own.
const OPERATION: Duration = Duration::from_millis(30);
/// How often a spine's links are read.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(5);
/// Bytes from one look to the next that are none of ours: neighbours asking for addresses.
const STRAY: u64 = 200;

pub(super) fn drain(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = suite.lab("")?;
    let hosts: Vec<usize> = (0..HOSTS).collect();
    let mut job = Running::start(&mut lab, &hosts, bytes_for(HOSTS, OPERATION), Duration::ZERO)?;
    let mut times = Vec::new();
    for _ in 0..suite.budget.rounds {
        let (_, spine) = spine_of(&mut lab, job.name())?;
        let watch = Watch::start(lab.fabric(), &[&spine], SAMPLE_INTERVAL)?;
        job.busbw(&mut lab, suite.budget.span)?;
        let asked = realtime_ns()?;
        lab.deployment().harmonaize(&["drain", &spine])?;
        let name = job.name().to_owned();
        plan_when(&mut lab, &name, "beside a drained spine", |plan| {
            plan.paths_known() && !plan.crossed("spine").contains(&spine.as_str())
        })?;
        job.busbw(&mut lab, suite.budget.span)?;
        let loads = watch.finish()?;
        ensure!(carried(&loads, 0, asked) > 0, "{spine} carried nothing before it was drained");
        let last = loads.iter().filter_map(|load| load.last_over(STRAY)).max().unwrap_or(asked);
        times.push(last.saturating_sub(asked) as f64 / 1e6);
        lab.deployment().harmonaize(&["drain", &spine, "--end"])?;
    }
    job.end(&mut lab)?;
    eprintln!("drained: ms until silence {}", summary(&times));
    let what = "a spine is drained: ms until it carries no byte of ours";
    Ok(vec![case(what.to_owned(), Better::Less, 1.0).limit(&times, DRAINED_MS)])
}

fn carried(loads: &[Load], from_ns: u64, to_ns: u64) -> u64 {
    loads.iter().map(|load| load.between(from_ns, to_ns)).sum()
}

pub(super) fn cut(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = suite.lab("")?;
    let hosts: Vec<usize> = (0..HOSTS).collect();
    let mut job = Running::start(&mut lab, &hosts, bytes_for(HOSTS, OPERATION), Duration::ZERO)?;
    let mut gaps = Vec::new();
    for _ in 0..suite.budget.rounds {
        let (_, spine) = spine_of(&mut lab, job.name())?;
        job.busbw(&mut lab, suite.budget.span)?;
        let at = monotonic_ns()?;
        lab.fabric().set_switch(&spine, false)?;
        let gap = stood_still(&mut lab, &mut job, at);
        lab.fabric().set_switch(&spine, true)?;
        gaps.push(gap?);
        job.busbw(&mut lab, suite.budget.span)?;
    }
    job.end(&mut lab)?;
    eprintln!("cut dead: ms that no operation ended {}", summary(&gaps));
    let what = "a spine is cut dead: ms that no operation ended, none failed";
    Ok(vec![case(what.to_owned(), Better::Less, 1.0).limit(&gaps, CUT_MS)])
}

/// The longest time without an operation's end from `at` on, in milliseconds.
fn stood_still(lab: &mut Lab, job: &mut Running, at: u64) -> Result<f64> {
    // Whatever comes after ten operations more is no consequence.
    let deadline = at + u64::try_from(PATIENCE.as_nanos())?;
    loop {
        lab.check()?;
        let log = job.log()?;
        let after = log.iter().filter(|one| one.done_ns > at).count();
        ensure!(monotonic_ns()? < deadline, "{after} operations in {PATIENCE:?} after the cut");
        let late = Duration::from_nanos(monotonic_ns()?.saturating_sub(at)) > Duration::from_secs(3);
        if after >= 10 && late {
            return Ok(longest(&log, at));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn longest(log: &[Iteration], at: u64) -> f64 {
    let pairs = log.iter().zip(log.iter().skip(1)).filter(|(_, next)| next.done_ns > at);
    let gaps = pairs.map(|(one, next)| next.done_ns.saturating_sub(one.done_ns.max(at)));
    gaps.max().unwrap_or(u64::MAX) as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_time_counts_from_the_cut() {
        let done = |done_ns| Iteration { began_ns: 0, called_ns: 0, done_ns };
        let log = [1_000_000, 40_000_000, 45_000_000, 60_000_000].map(done);
        assert_eq!(longest(&log, 2_000_000), 38.0);
        assert_eq!(longest(&log, 39_000_000), 15.0);
    }
}
