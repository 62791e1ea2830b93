//! Tasks of one tenant: what its communicators have together goes first to those that matter most to it. What others have is not
//! touched, so that whatever a tenant says of its own tasks costs nobody else anything.

use super::shares::{FairFlow, Shares};
use super::{Assignment, AssignmentReason, Job};
use crate::conditions::Conditions;
use harmonaize_topology::{DirectedLink, PathFinder};
use harmonaize_topology::{HostId, Topology};
use harmonaize_units::{Nanos, Rate};
use std::collections::{BTreeMap, BTreeSet};

/// Who gives way keeps this part of its share, and what it was promised.
const MIN_SHARE_PART: f64 = 0.25;

/// A share is another where it differs by more than this part.
const SHARE_TOLERANCE: f64 = 1e-3;

/// Whose a job is, and how much it matters to its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Tenants by any number.
    pub tenant: usize,
    /// The more, the sooner served.
    pub priority: u8,
}

/// The part of a ring's rate on each link that it crosses.
pub(crate) fn usage(
    paths: &mut PathFinder<'_>,
    job: &Job,
    assignment: &Assignment,
) -> BTreeMap<DirectedLink, f64> {
    let mut parts: BTreeMap<DirectedLink, f64> = BTreeMap::new();
    let host = |at: &u32| job.hosts.get(*at as usize).copied().unwrap_or(HostId(usize::MAX));
    let next = assignment.order.iter().cycle().skip(1);
    for ((from, to), hop) in assignment.order.iter().zip(next).zip(&assignment.edges) {
        let spread = if hop.paths.is_empty() { paths.between(host(from), host(to)) } else { Vec::new() };
        let paths = if hop.paths.is_empty() { &spread } else { &hop.paths };
        for link in paths.iter().flat_map(|path| path.links()) {
            *parts.entry(*link).or_default() += 1.0 / paths.len() as f64;
        }
    }
    parts
}

/// Puts each tenant's tasks in its own order: shares, rate limits and times of a plan. All else of the plan stays; `tasks` are those of the
/// jobs, in their order. A task takes from others of its tenant that matter less, on the links of both, and what nobody uses; who gives way
/// keeps a quarter, and what was promised. Jobs with a rhythm are left alone: what they have is an average, and they take turns instead.
pub fn apply_priorities(
    topology: &Topology,
    conditions: &Conditions,
    jobs: &[Job],
    tasks: &[Task],
    assignments: &mut [Assignment],
) {
    let mut priorities: BTreeMap<usize, BTreeSet<u8>> = BTreeMap::new();
    for task in tasks {
        priorities.entry(task.tenant).or_default().insert(task.priority);
    }
    priorities.retain(|_, known| known.len() > 1);
    if priorities.is_empty() {
        return;
    }
    let mut ways = PathFinder::new(topology);
    let mut numbers: BTreeMap<DirectedLink, u32> = BTreeMap::new();
    let mut left: Vec<f64> = Vec::new();
    let mut used: Vec<Vec<(u32, f64)>> = Vec::new();
    for (job, assignment) in jobs.iter().zip(assignments.iter()) {
        let mut parts = Vec::new();
        for (link, part) in usage(&mut ways, job, assignment) {
            let next = left.len() as u32;
            let number = *numbers.entry(link).or_insert(next);
            if number == next {
                left.push(conditions.available(link).0 as f64);
            }
            parts.push((number, part));
        }
        take_rate(&mut left, &parts, assignment.share.0 as f64);
        used.push(parts);
    }
    left.iter_mut().for_each(|left| *left = left.max(0.0));
    for (tenant, known) in priorities {
        let own = |index: &usize| {
            let (Some(job), Some(task), Some(assignment)) =
                (jobs.get(*index), tasks.get(*index), assignments.get(*index))
            else {
                return false;
            };
            task.tenant == tenant
                && job.iteration_pattern.is_none()
                && job.hosts.len() > 1
                && assignment.share.0 > 0
        };
        let own: Vec<usize> = (0..jobs.len()).filter(own).collect();
        let mut shares: BTreeMap<usize, f64> = BTreeMap::new();
        for index in &own {
            let (Some(job), Some(assignment), Some(parts)) =
                (jobs.get(*index), assignments.get(*index), used.get(*index))
            else {
                continue;
            };
            let share = assignment.share.0 as f64;
            let floor = (share * MIN_SHARE_PART).max(job.guaranteed.0 as f64).min(share);
            take_rate(&mut left, parts, floor - share);
            shares.insert(*index, floor);
        }
        let classes: Vec<Vec<usize>> = known
            .into_iter()
            .rev()
            .map(|priority| {
                let of_class =
                    |index: &usize| tasks.get(*index).is_some_and(|task| task.priority == priority);
                own.iter().copied().filter(of_class).collect()
            })
            .collect();
        for class in classes {
            share_out(&class, assignments, &used, &mut left, &mut shares);
        }
        for (index, share) in shares {
            if let Some((job, assignment)) = jobs.get(index).zip(assignments.get_mut(index)) {
                set_share(job, assignment, share);
            }
        }
    }
}

/// Shares out what is left among the jobs of one priority, on top of what they have.
fn share_out(
    class: &[usize],
    assignments: &[Assignment],
    used: &[Vec<(u32, f64)>],
    left: &mut [f64],
    shares: &mut BTreeMap<usize, f64>,
) {
    let flow = |index: &usize| {
        let (assignment, floor) = (assignments.get(*index)?, shares.get(index)?);
        let share = assignment.share.0 as f64;
        // Who is not slowed has all that it asks for.
        let wants = share * assignment.slowdown.max(1.0);
        let weight = (share - floor).max(1.0);
        Some(FairFlow { usage: used.get(*index)?, weight, demand: (wants - floor).max(0.0), guaranteed: 0.0 })
    };
    let flows: Vec<FairFlow<'_>> = class.iter().filter_map(flow).collect();
    let more = Shares::default().fill(left, &flows).to_vec();
    for (index, more) in class.iter().zip(more) {
        if let Some(parts) = used.get(*index) {
            take_rate(left, parts, more);
        }
        *shares.entry(*index).or_default() += more;
    }
}

fn take_rate(left: &mut [f64], parts: &[(u32, f64)], rate: f64) {
    for (link, part) in parts {
        if let Some(left) = left.get_mut(*link as usize) {
            *left -= part * rate;
        }
    }
}

fn set_share(job: &Job, assignment: &mut Assignment, share: f64) {
    let before = assignment.share.0 as f64;
    let less = share < before * (1.0 - SHARE_TOLERANCE);
    if !less && share <= before * (1.0 + SHARE_TOLERANCE) {
        return;
    }
    assignment.share = Rate(share as u64);
    assignment.time = Nanos((assignment.time.0 as f64 * before / share.max(1.0)).min(1e18) as u64);
    let held = less || assignment.rate_limit.is_some();
    assignment.rate_limit = held.then_some(Rate(share as u64)).into_iter().chain(job.rate_limit).min();
    assignment.yields = less;
    if less {
        let beside = std::mem::take(&mut assignment.reason);
        assignment.reason = AssignmentReason::GivesWay(Box::new(beside));
    }
}
