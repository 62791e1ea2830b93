//! Turns that are given one by one: who may not communicate while whom, where that pays.
//!
//! Jobs that share a link fairly keep whatever distance they have, so one that is brought about once is soon lost. Where a busy part waits
//! until the other's is over, what it waits is the distance that was missing, and the next time it waits less.

use super::*;
use harmonaize_abi::CommunicatorId;

/// A communicator that takes turns.
#[derive(Clone, Debug, PartialEq)]
pub struct InterleaveSlot {
    /// Which.
    pub communicator: CommunicatorId,
    /// How long its busy part takes alone.
    pub busy: Nanos,
    /// How often that comes while the slowest of those that take turns comes once; at least 1.
    pub repeats: u32,
    /// Those with which it shares a link that has not enough for both.
    pub contenders: BTreeSet<CommunicatorId>,
    /// Why.
    pub reason: InterleaveReason,
}

/// Which communicators should take turns, for as long as they share links and keep their rhythms. `taking`: those that do already, which
/// go on as long as they would be in each other's way without.
pub fn plan_interleaving(
    topology: &Topology,
    conditions: &Conditions,
    jobs: &[Job],
    assignments: &[Assignment],
    interleaved: &BTreeSet<CommunicatorId>,
) -> Vec<InterleaveSlot> {
    let circles = periodic_jobs(topology, conditions, jobs, assignments);
    let mut turns = Vec::new();
    for group in groups(conditions, &circles) {
        let group: Vec<&PeriodicJob> = group.iter().filter_map(|index| circles.get(*index)).collect();
        if let Some(turning) = PhasePlan::new(topology, conditions, compatible(group)) {
            turns.extend(turning.assign_slots(jobs, interleaved).into_iter().flatten());
        }
    }
    turns
}

impl PhasePlan<'_> {
    /// The part by which the period is longer with exclusive use of links. No two jobs that ask for more than a link has then
    /// communicate at once.
    fn exclusive_slowdown(&self) -> f64 {
        let of_link = |(_, asks, _): &(f64, Vec<f64>, String)| {
            let asking = self.jobs.iter().zip(asks).filter(|(_, ask)| **ask > 0.0);
            let busy: f64 = asking.map(|((circle, turns), _)| circle.busy * *turns as f64).sum();
            (busy / self.period - 1.0).max(0.0)
        };
        self.links.iter().map(of_link).fold(0.0, f64::max)
    }

    /// Those beside one on a link that has not enough for both.
    fn contenders(&self, index: usize) -> impl Iterator<Item = usize> {
        let meets = move |other: &usize| {
            *other != index
                && self.links.iter().any(|(has, asks, _)| {
                    let ask = |index: usize| asks.get(index).copied().unwrap_or(0.0);
                    ask(index) > 0.0 && ask(*other) > 0.0 && ask(index) + ask(*other) > has * CONTENDED
                })
        };
        (0..self.jobs.len()).filter(meets)
    }

    fn assign_slots(&self, jobs: &[Job], taking: &BTreeSet<CommunicatorId>) -> Option<Vec<InterleaveSlot>> {
        let communicator = |index: usize| Some(jobs.get(self.jobs.get(index)?.0.job)?.communicator);
        let all: Vec<CommunicatorId> = (0..self.jobs.len()).filter_map(communicator).collect();
        let goes_on = all.iter().filter(|id| taking.contains(id)).count() > 1;
        // Those that take turns are in nobody's way for that very reason; without they would be wherever they drift.
        let now = if goes_on { vec![0.0; self.jobs.len()] } else { self.phases() };
        let (before, after) = (self.excess(&now), self.exclusive_slowdown());
        if before - after < MIN_GAIN {
            return None;
        }
        let (link, period) = (self.busiest_link().to_owned(), Nanos(self.period as u64));
        let overlap = Overlap { jobs: self.jobs.len(), link, period, before, after };
        let reason = match goes_on {
            true => InterleaveReason::WouldOverlap(overlap),
            false => InterleaveReason::Overlaps(overlap),
        };
        let turn = |(index, (circle, turns)): (usize, &(&PeriodicJob, usize))| {
            let beside: BTreeSet<CommunicatorId> = self.contenders(index).filter_map(communicator).collect();
            let busy = Nanos(circle.busy as u64);
            let (communicator, reason) = (communicator(index)?, reason.clone());
            (!beside.is_empty()).then_some(InterleaveSlot {
                communicator,
                busy,
                repeats: *turns as u32,
                contenders: beside,
                reason,
            })
        };
        Some(self.jobs.iter().enumerate().filter_map(turn).collect())
    }
}
