//! When communicators communicate, from what agents tell of their operations; and who, by that, should take turns.

use super::{Fact, SessionId, State};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::{Bytes, Job, Nanos, Operation, Rhythm};
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

/// Longest that an operation is held back, or waits for its turn.
pub(super) const LONGEST: Duration = Duration::from_secs(1);

/// One communicator's operations.
#[derive(Debug, Default)]
pub(super) struct Operations {
    /// Number and times, oldest first, by the clock of one participant's agent.
    kept: VecDeque<(u64, Operation)>,
    heard: Duration,
    /// Until then what is told may be of before a hold.
    stale: Duration,
}

impl Operations {
    /// Bytes of a typical operation; 0 where none is known.
    pub(super) fn bytes(&self) -> u64 {
        let mut all: Vec<u64> = self.kept.iter().map(|(_, operation)| operation.bytes.0).collect();
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or(0)
    }

    /// Bytes of the operation that the middle one of all bytes belongs to: however many small ones there are beside, the large ones
    /// are what takes time. 0 where none is known.
    pub(super) fn bulk(&self) -> u64 {
        middle(self.kept.iter().map(|(_, operation)| operation.bytes.0).collect())
    }

    pub(super) fn rhythm(&self) -> Option<Rhythm> {
        self.rhythm_until(Nanos(u64::MAX))
    }

    /// The rhythm as it was at that time.
    fn rhythm_until(&self, at: Nanos) -> Option<Rhythm> {
        let all = self.kept.iter().map(|(_, operation)| *operation);
        Rhythm::of(&all.filter(|operation| operation.began <= at).collect::<Vec<_>>())
    }

    /// Whether these are iterations of so many operations, enough to say something of them, or as many operations as are kept.
    pub(super) fn says_something_of(&self, operations: usize) -> bool {
        self.kept.len() >= operations.saturating_mul(ITERATIONS).min(MOST_OPERATIONS)
    }

    /// Whether there are as many as are kept.
    pub(super) fn is_full(&self) -> bool {
        self.kept.len() == MOST_OPERATIONS
    }

    /// When the newest iteration of so many operations began, as far as that can be told up to `at`: after the longest silence of late.
    pub(super) fn iteration_began(&self, count: usize, at: Nanos) -> Option<Nanos> {
        let all: Vec<&Operation> = self.kept.iter().map(|(_, operation)| operation).collect();
        let until = all.iter().filter(|operation| operation.began <= at).count().max(1);
        let late: Vec<&Operation> = all.into_iter().take(until).rev().take(count.max(1) + 1).collect();
        let silence = |pair: &&[&Operation]| match pair {
            [next, one] => next.began.0.saturating_sub(one.ended.0),
            _ => 0,
        };
        let began = late.windows(2).max_by_key(silence).and_then(|pair| pair.first());
        began.or(late.first()).map(|operation| operation.began)
    }

    /// When the newest operation began.
    fn newest(&self) -> Option<Nanos> {
        self.kept.back().map(|(_, operation)| operation.began)
    }

    fn take(&mut self, now: Duration, told: &v1::Operation) {
        self.heard = now;
        let called = told.ranks.iter().map(|rank| rank.called_ns).filter(|at| *at > 0).min();
        let ended = told.ranks.iter().map(|rank| rank.ended_ns).max();
        let newest = self.kept.back().map(|(number, _)| *number);
        if newest.is_some_and(|newest| told.operation > newest.saturating_add(1)) {
            // Where some are left out, nothing tells which belong together.
            self.kept.clear();
        }
        let newer = newest.is_none_or(|newest| newest < told.operation) && now >= self.stale;
        if let (true, Some(began), Some(ended)) = (newer, called, ended)
            && began < ended
        {
            if self.kept.len() == MOST_OPERATIONS {
                self.kept.pop_front();
            }
            let (began, ended, bytes) = (Nanos(began), Nanos(ended), Bytes(told.bytes));
            self.kept.push_back((told.operation, Operation { began, ended, bytes }));
        }
    }

    /// Forgets what was before a change of the rhythm, and what is told of it until `stale`.
    pub(super) fn forget(&mut self, stale: Duration) {
        self.kept.clear();
        self.stale = stale;
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
    pub(super) fn operation_told(&mut self, now: Duration, from: SessionId, told: &v1::Operation) {
        self.watch_operation(now, told);
        let Some(known) = self.communicators.get(&told.communicator) else { return };
        let first = known.members.first().and_then(|member| member.session);
        let rhythm = self.rhythms.entry(told.communicator).or_default();
        rhythm.heard = now;
        if first == Some(from) {
            rhythm.take(now, told);
            self.compare_hints(told.communicator);
            self.learn_coded(now, told);
            self.learn_zeros(now, told);
        }
    }

    /// Whether a communicator has traffic, as far as agents tell.
    pub(super) fn seems_busy(&self, now: Duration, id: u64) -> bool {
        let interval = self.settings.telemetry_interval;
        let heard = self.rhythms.get(&id).map(|known| known.heard);
        interval.is_zero() || heard.is_none_or(|at| at + interval * 3 > now)
    }

    /// Has communicators take turns that share a link and gain by it, and holds those back, once, that are only said to.
    pub(super) fn take_turns(&mut self, now: Duration) {
        if !self.settings.replan || now < self.staggered + BETWEEN {
            return;
        }
        self.staggered = now;
        let mut jobs = self.jobs(now);
        let rhythms = jobs.iter().filter(|job| job.rhythm.is_some()).count();
        if rhythms < 2 && !self.any_said() && self.turns.is_empty() {
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
            job.rhythm = known.filter(|_| runs).and_then(|known| known.rhythm_until(at));
            job.movable = false;
        }
        let conditions = self.estimates.conditions(&self.settings.topology, self.withdrawn());
        let Some(plan) = self.fit_plan(&jobs, &conditions) else { return };
        self.take_said_turns(now, at, &conditions, &jobs, &plan.assignments);
        if self.settings.turns {
            self.group_turns(now, jobs, &plan.assignments);
        }
    }

    /// Has a communicator's next operation held back, where its agent can. Whether it is.
    pub(super) fn send_hold(&mut self, id: u64, hold: Duration, reason: String) -> bool {
        let Some(known) = self.communicators.get(&id) else { return false };
        let leader = self.leader(id);
        let able =
            leader.and_then(|leader| self.sessions.get(&leader)).is_some_and(|leader| leader.abilities.hold);
        let (true, Some(leader), false) = (able, leader, hold.is_zero()) else { return false };
        let hold_ns = u64::try_from(hold.as_nanos()).unwrap_or(u64::MAX);
        let (tenant, name) = (known.tenant.clone(), known.name.clone());
        self.send(leader, to_agent::Message::Hold(v1::Hold { communicator: id, hold_ns }));
        self.fact(Fact::Held { communicator: id, tenant, name, hold, reason });
        true
    }
}
