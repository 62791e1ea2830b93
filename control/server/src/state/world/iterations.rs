//! When communicators communicate, from what agents tell of their operations.

use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1;
use harmonaize_planner::{Bytes, IterationPattern, Job, Nanos, Operation};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Operations that are kept of a communicator.
const MOST_OPERATIONS: usize = 64;

/// Iterations after which something is said of them.
const ITERATIONS: usize = 4;

/// Whoever has begun nothing for so much longer than others does not run.
const SILENT: Duration = Duration::from_secs(3);

/// One communicator's operations.
#[derive(Debug, Default)]
pub(crate) struct Operations {
    /// Number and times, oldest first, by the clock of one participant's agent.
    recent: VecDeque<(u64, Operation)>,
    last_report: Duration,
}

impl Operations {
    /// Bytes of a typical operation; 0 where none is known.
    pub(crate) fn bytes(&self) -> u64 {
        let mut all: Vec<u64> = self.recent.iter().map(|(_, operation)| operation.bytes.0).collect();
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or(0)
    }

    /// Bytes of the operation that the middle one of all bytes belongs to. However many small ones there are
    /// beside, the large ones are what takes time. 0 where none is known.
    pub(crate) fn dominant_bytes(&self) -> u64 {
        middle(self.recent.iter().map(|(_, operation)| operation.bytes.0).collect())
    }

    pub(crate) fn pattern(&self) -> Option<IterationPattern> {
        self.pattern_until(Nanos(u64::MAX))
    }

    /// Returns the iterations as they were at that time.
    fn pattern_until(&self, at: Nanos) -> Option<IterationPattern> {
        let all = self.recent.iter().map(|(_, operation)| *operation);
        IterationPattern::detect(&all.filter(|operation| operation.began <= at).collect::<Vec<_>>())
    }

    /// Whether these are iterations of so many operations, enough to judge them by. As many operations as are
    /// kept are enough too.
    pub(crate) fn has_enough(&self, operations: usize) -> bool {
        self.recent.len() >= operations.saturating_mul(ITERATIONS).min(MOST_OPERATIONS)
    }

    /// Whether there are as many as are kept.
    pub(crate) fn is_full(&self) -> bool {
        self.recent.len() == MOST_OPERATIONS
    }

    /// Returns when an agent last told of an operation.
    pub(crate) fn last_report(&self) -> Duration {
        self.last_report
    }

    /// When the newest operation began.
    fn newest(&self) -> Option<Nanos> {
        self.recent.back().map(|(_, operation)| operation.began)
    }

    /// Takes in an operation that an agent reported. Its times count where they are by the clock of the first
    /// participant's agent.
    pub(crate) fn record(&mut self, now: Duration, told: &v1::Operation, by_first: bool) {
        self.last_report = now;
        if !by_first {
            return;
        }
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
pub(crate) fn middle(mut operations: Vec<u64>) -> u64 {
    operations.sort_unstable();
    let half = operations.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes)) / 2;
    let mut before = 0_u64;
    let middle = operations.into_iter().find(|bytes| {
        before = before.saturating_add(*bytes);
        before > half
    });
    middle.unwrap_or(0)
}

/// Gives jobs their iterations as of one moment, and has none move. At that moment all that still run had
/// begun their newest operation.
pub(crate) fn align(iterations: &BTreeMap<CommunicatorId, Operations>, jobs: &mut [Job]) {
    // Who was heard last tells of later iterations, which say nothing of where the others were then: all are
    // laid together where the records end of those that still run.
    let newest = |job: &Job| iterations.get(&job.communicator).and_then(Operations::newest);
    let latest = jobs.iter().filter_map(newest).max().unwrap_or_default();
    let runs = |at: &Nanos| at.after(SILENT) >= latest;
    let at = jobs.iter().filter_map(newest).filter(runs).min().unwrap_or_default();
    for job in jobs {
        let known = iterations.get(&job.communicator);
        let runs = known.and_then(Operations::newest).filter(runs).is_some();
        job.iteration_pattern = known.filter(|_| runs).and_then(|known| known.pattern_until(at));
        job.movable = false;
    }
}
