//! When communicators communicate, from what agents tell of their operations; and who, by that, should take turns.

use super::{SessionId, State};
use harmonaize_api::v1;
use harmonaize_planner::{Bytes, IterationPattern, Job, Nanos, Operation};
use std::collections::VecDeque;
use std::time::Duration;

/// Operations that are kept of a communicator.
const MOST_OPERATIONS: usize = 64;

/// Iterations after which something is said of them.
const ITERATIONS: usize = 4;

/// Least time between two looks at who may take turns.
const BETWEEN: Duration = Duration::from_secs(1);

/// Whoever has begun nothing for so many nanoseconds longer than others does not run.
const SILENT: u64 = 3_000_000_000;

/// Longest that an operation waits for its turn.
pub(super) const LONGEST: Duration = Duration::from_secs(1);

/// One communicator's operations.
#[derive(Debug, Default)]
pub(super) struct Operations {
    /// Number and times, oldest first, by the clock of one participant's agent.
    recent: VecDeque<(u64, Operation)>,
    last_report: Duration,
}

impl Operations {
    /// Bytes of a typical operation; 0 where none is known.
    pub(super) fn bytes(&self) -> u64 {
        let mut all: Vec<u64> = self.recent.iter().map(|(_, operation)| operation.bytes.0).collect();
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or(0)
    }

    /// Bytes of the operation that the middle one of all bytes belongs to: however many small ones there are beside, the large ones
    /// are what takes time. 0 where none is known.
    pub(super) fn dominant_bytes(&self) -> u64 {
        middle(self.recent.iter().map(|(_, operation)| operation.bytes.0).collect())
    }

    pub(super) fn pattern(&self) -> Option<IterationPattern> {
        self.pattern_until(Nanos(u64::MAX))
    }

    /// The rhythm as it was at that time.
    fn pattern_until(&self, at: Nanos) -> Option<IterationPattern> {
        let all = self.recent.iter().map(|(_, operation)| *operation);
        IterationPattern::detect(&all.filter(|operation| operation.began <= at).collect::<Vec<_>>())
    }

    /// Whether these are iterations of so many operations, enough to say something of them, or as many operations as are kept.
    pub(super) fn has_enough(&self, operations: usize) -> bool {
        self.recent.len() >= operations.saturating_mul(ITERATIONS).min(MOST_OPERATIONS)
    }

    /// Whether there are as many as are kept.
    pub(super) fn is_full(&self) -> bool {
        self.recent.len() == MOST_OPERATIONS
    }

    /// Returns when an agent last told of an operation.
    pub(super) fn last_report(&self) -> Duration {
        self.last_report
    }

    /// When the newest operation began.
    fn newest(&self) -> Option<Nanos> {
        self.recent.back().map(|(_, operation)| operation.began)
    }

    fn take(&mut self, now: Duration, told: &v1::Operation) {
        self.last_report = now;
        let called = told.ranks.iter().map(|rank| rank.called_ns).filter(|at| *at > 0).min();
        let ended = told.ranks.iter().map(|rank| rank.ended_ns).max();
        let newest = self.recent.back().map(|(number, _)| *number);
        if newest.is_some_and(|newest| told.operation > newest.saturating_add(1)) {
            // Where some are left out, nothing tells which belong together.
            self.recent.clear();
        }
        let newer = newest.is_none_or(|newest| newest < told.operation);
        if let (true, Some(began), Some(ended)) = (newer, called, ended)
            && began < ended
        {
            if self.recent.len() == MOST_OPERATIONS {
                self.recent.pop_front();
            }
            let (began, ended, bytes) = (Nanos(began), Nanos(ended), Bytes(told.bytes));
            self.recent.push_back((told.operation, Operation { began, ended, bytes }));
        }
    }
}

/// Bytes of the operation that the middle one of all bytes belongs to; 0 of none.
pub(super) fn middle(mut operations: Vec<u64>) -> u64 {
    operations.sort_unstable();
    let half = operations.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes)) / 2;
    let mut before = 0_u64;
    let middle = operations.into_iter().find(|bytes| {
        before = before.saturating_add(*bytes);
        before > half
    });
    middle.unwrap_or(0)
}

impl State {
    /// Takes in an operation that the communicator's first participant told of, so that all times are by one clock.
    pub(super) fn record_operation(&mut self, now: Duration, from: SessionId, operation: &v1::Operation) {
        self.watch_operation(now, operation);
        let Some(known) = self.communicators.get(&operation.communicator) else { return };
        let first = known.members.first().and_then(|member| member.session);
        let rhythm = self.rhythms.entry(operation.communicator).or_default();
        rhythm.last_report = now;
        if first == Some(from) {
            rhythm.take(now, operation);
            self.compare_hints(operation.communicator);
            self.learn_coded(now, operation);
            self.learn_zeros(now, operation);
        }
    }

    /// Has communicators take turns that share a link and gain by it.
    pub(super) fn take_turns(&mut self, now: Duration) {
        let wanted = self.settings.replan && self.settings.turns;
        if !wanted || now < self.staggered + BETWEEN {
            return;
        }
        self.staggered = now;
        let mut jobs = self.jobs(now);
        let rhythms = jobs.iter().filter(|job| job.iteration_pattern.is_some()).count();
        if rhythms < 2 && self.turns.is_empty() {
            return;
        }
        // Who was heard last tells of later iterations, which say nothing of where the others were then: all are laid together
        // where the records end of those that still run.
        let newest = |job: &Job| self.rhythms.get(&job.communicator).and_then(Operations::newest);
        let latest = jobs.iter().filter_map(newest).max().unwrap_or_default();
        let runs = |at: &Nanos| Nanos(at.0.saturating_add(SILENT)) >= latest;
        let at = jobs.iter().filter_map(newest).filter(runs).min().unwrap_or_default();
        for job in &mut jobs {
            let known = self.rhythms.get(&job.communicator);
            let runs = known.and_then(Operations::newest).filter(runs).is_some();
            job.iteration_pattern = known.filter(|_| runs).and_then(|known| known.pattern_until(at));
            job.movable = false;
        }
        let conditions = self.conditions();
        let Some(plan) = self.fit_plan(&jobs, &conditions) else { return };
        self.group_turns(now, jobs, &plan.assignments);
    }
}
