//! What control's choice of order and of times is worth. It runs against the tenant's own order of ranks beside another job, and
//! for two periodic jobs on one spine.

use super::job::{Running, bytes_for};
use super::{HOSTS, HOSTS_A_RACK, Suite, case, plan_when};
use crate::lab::Lab;
use crate::row::{Better, Row};
use crate::runs::interleave;
use anyhow::{Context, Result, bail};
use harmonaize_testkit::clock::monotonic_ns;
use harmonaize_testkit::plans;
use harmonaize_testkit::truth::Iteration;
use std::time::Duration;

/// How many times the bandwidth of the tenant's own order.
const ORDER: f64 = 1.7;
/// How many times shorter an iteration is when the jobs take turns.
const STAGGERED: f64 = 1.2;
/// How long an operation takes where the links are the job's own.
const OPERATION: Duration = Duration::from_millis(40);
/// How long a periodic job computes, and how long it communicates where the spine is its own.
const COMPUTE: Duration = Duration::from_millis(60);
const COMMUNICATE: Duration = Duration::from_millis(60);
/// How many spans it takes for jobs that wander to have been in each other's way as much as not.
const WANDERING: u32 = 6;
/// How long ranks have to join before both jobs begin at once.
const JOINING: Duration = Duration::from_secs(4);

/// Eight ranks whose neighbours are in different racks, and another job of two hosts a rack. The order that control gives them
/// runs against their own, which an operator pins, in turn.
pub(super) fn order(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = suite.lab("")?;
    let alternating: Vec<usize> = (0..HOSTS_A_RACK).flat_map(|host| [host, host + HOSTS_A_RACK]).collect();
    let other = Running::start(&mut lab, &[2, 3, 6, 7], bytes_for(4, OPERATION), Duration::ZERO)?;
    let own: Vec<String> = alternating.iter().map(|host| format!("h{host}")).collect();
    let bytes = bytes_for(HOSTS, OPERATION);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 1..=suite.budget.rounds {
        let mut job = Running::start(&mut lab, &alternating, bytes, Duration::ZERO)?;
        let name = job.name().to_owned();
        let plan =
            plan_when(&mut lab, &name, "of control's own order", |plan| !same_ring(&plan.order, &own))?;
        let with_ours = stable_busbw(&mut lab, &mut job, suite)?;
        lab.deployment().harmonaize(&["reorder", &plan.communicator, &own.join(",")])?;
        plan_when(&mut lab, &name, "of the tenant's order", |plan| same_ring(&plan.order, &own))?;
        let with_theirs = stable_busbw(&mut lab, &mut job, suite)?;
        eprintln!("order, round {round}: busbw {with_ours:.1} MB/s, in rank order {with_theirs:.1}");
        ours.push(with_ours);
        theirs.push(with_theirs);
        job.end(&mut lab)?;
    }
    other.end(&mut lab)?;
    let what = "8 ranks in bad order beside another job: busbw MB/s";
    Ok(vec![case(what.to_owned(), Better::More, ORDER).compare(&ours, &theirs, "ring in rank order")])
}

/// The bandwidth in MB/s once what the switch left has gone.
fn stable_busbw(lab: &mut Lab, job: &mut Running, suite: &Suite) -> Result<f64> {
    job.busbw(lab, suite.budget.span / 4)?;
    Ok(job.busbw(lab, suite.budget.span)? / 1e6)
}

/// Whether two orders are one ring, wherever it begins.
fn same_ring(one: &[String], other: &[String]) -> bool {
    one.len() == other.len()
        && (0..one.len()).any(|by| one.iter().cycle().skip(by).zip(other).all(|(one, other)| one == other))
}

/// Two jobs that compute and reduce for as long each, with turns given to them, and without. They are on one spine, and begin at
/// once, so that they are in each other's way all the time. The mean over some dozen seconds counts, for without turns they wander.
pub(super) fn stagger(suite: &Suite) -> Result<Vec<Row>> {
    let mut labs = [suite.lab("")?, suite.lab("turns = false\n")?];
    labs.iter_mut().try_for_each(|lab| lab.deployment().harmonaize(&["drain", "spine1"]).map(drop))?;
    let runs = interleave(suite.budget.rounds, labs.len(), |which| {
        let lab = labs.get_mut(which).context("no such fabric")?;
        let period = periodic(lab, suite)?;
        let turns = if which == 0 { "with turns" } else { "without" };
        eprintln!("stagger, {turns}: iteration {period:.1} ms");
        Ok(period)
    })?;
    let [ours, theirs] = runs.as_slice() else { bail!("{} contestants of two", runs.len()) };
    let what = "two periodic jobs on one spine that begin at once: ms an iteration";
    Ok(vec![case(what.to_owned(), Better::Less, 1.0 / STAGGERED).compare(ours, theirs, "without turns")])
}

/// The mean of both jobs' iterations, once control has had the time to learn their rhythm.
fn periodic(lab: &mut Lab, suite: &Suite) -> Result<f64> {
    let bytes = bytes_for(4, COMMUNICATE);
    let begins = monotonic_ns()? + u64::try_from(JOINING.as_nanos())?;
    let mut one = Running::launch(lab, &[0, 1, 4, 5], bytes, COMPUTE, begins)?;
    let mut other = Running::launch(lab, &[2, 3, 6, 7], bytes, COMPUTE, begins)?;
    one.begun(lab)?;
    other.begun(lab)?;
    one.period_ms(lab, suite.budget.learning)?;
    let from = monotonic_ns()?;
    one.period_ms(lab, suite.budget.span * WANDERING)?;
    let plans = plans::plans(lab.deployment())?;
    let interleaved = plans.iter().filter(|plan| !plan.interleaving_reason_code.is_empty());
    interleaved.for_each(|plan| eprintln!("{}: {}", plan.name, plan.interleaving));
    let logs = [one.end(lab)?, other.end(lab)?];
    let within = |log: &Vec<Iteration>| {
        let times = log.iter().filter(|one| one.began_ns >= from);
        let times: Vec<f64> =
            times.map(|one| one.done_ns.saturating_sub(one.began_ns) as f64 / 1e6).collect();
        times.iter().sum::<f64>() / times.len().max(1) as f64
    };
    Ok(logs.iter().map(within).sum::<f64>() / logs.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotated_rings_are_equal() {
        let ring = |names: &str| names.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert!(same_ring(&ring("a b c"), &ring("c a b")));
        assert!(!same_ring(&ring("a b c"), &ring("c b a")));
        assert!(!same_ring(&ring("a b"), &ring("a b c")));
    }
}
