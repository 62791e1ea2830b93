//! Turns that are given one by one: who may not communicate while whom, where that pays.
//!
//! Jobs that share a link fairly keep whatever distance they have, so one that is brought about once is soon lost. Where a busy part waits
//! until the other's is over, what it waits is the distance that was missing, and the next time it waits less.

use super::*;

/// A communicator that takes turns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Which.
    pub communicator: u64,
    /// How long its busy part takes alone.
    pub busy: Nanos,
    /// How often that comes while the slowest of those that take turns comes once; at least 1.
    pub often: u32,
    /// Those with which it shares a link that has not enough for both.
    pub beside: BTreeSet<u64>,
    /// Why, in words.
    pub reason: String,
}

/// Which communicators should take turns, for as long as they share links and keep their rhythms. `taking`: those that do already, which
/// go on as long as they would be in each other's way without.
pub fn turns(
    topology: &Topology,
    conditions: &Conditions,
    jobs: &[Job],
    assignments: &[Assignment],
    taking: &BTreeSet<u64>,
) -> Vec<Turn> {
    let circles = circles(topology, conditions, jobs, assignments, |_| true);
    let mut turns = Vec::new();
    for group in groups(conditions, &circles) {
        let group: Vec<&Circle> = group.iter().filter_map(|index| circles.get(*index)).collect();
        if let Some(turning) = Turning::new(topology, conditions, compatible(group)) {
            turns.extend(turning.turns(jobs, taking).into_iter().flatten());
        }
    }
    turns
}

impl Turning<'_> {
    /// The part of the period by which it is longer where no two that ask for more than a link has communicate at once.
    fn crowded(&self) -> f64 {
        let of_link = |(_, asks, _): &(f64, Vec<f64>, String)| {
            let asking = self.circles.iter().zip(asks).filter(|(_, ask)| **ask > 0.0);
            let busy: f64 = asking.map(|((circle, turns), _)| circle.busy * *turns as f64).sum();
            (busy / self.period - 1.0).max(0.0)
        };
        self.links.iter().map(of_link).fold(0.0, f64::max)
    }

    /// Those beside one on a link that has not enough for both.
    fn beside(&self, index: usize) -> impl Iterator<Item = usize> {
        let meets = move |other: &usize| {
            *other != index
                && self.links.iter().any(|(has, asks, _)| {
                    let ask = |index: usize| asks.get(index).copied().unwrap_or(0.0);
                    ask(index) > 0.0 && ask(*other) > 0.0 && ask(index) + ask(*other) > has * CONTENDED
                })
        };
        (0..self.circles.len()).filter(meets)
    }

    fn turns(&self, jobs: &[Job], taking: &BTreeSet<u64>) -> Option<Vec<Turn>> {
        let communicator = |index: usize| Some(jobs.get(self.circles.get(index)?.0.job)?.communicator);
        let all: Vec<u64> = (0..self.circles.len()).filter_map(communicator).collect();
        let goes_on = all.iter().filter(|id| taking.contains(id)).count() > 1;
        // Those that take turns are in nobody's way for that very reason; without they would be wherever they drift.
        let now = if goes_on { vec![0.0; self.circles.len()] } else { self.phases() };
        let (before, after) = (self.excess(&now, 0.0), self.crowded());
        if before - after < LEAST_GAIN {
            return None;
        }
        let reason = self.words((before, if goes_on { "could be" } else { "is" }), (after, "as"));
        let turn = |(index, (circle, turns)): (usize, &(&Circle, usize))| {
            let beside: BTreeSet<u64> = self.beside(index).filter_map(communicator).collect();
            let busy = Nanos(circle.busy as u64);
            let (communicator, reason) = (communicator(index)?, reason.clone());
            (!beside.is_empty()).then_some(Turn { communicator, busy, often: *turns as u32, beside, reason })
        };
        Some(self.circles.iter().enumerate().filter_map(turn).collect())
    }
}
