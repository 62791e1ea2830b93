//! When communicators communicate, from what agents tell of their operations; and holds, so that those who share a link take turns.

use super::{Fact, SessionId, State};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::{Bytes, Nanos, Operation, Rhythm, stagger};
use std::collections::VecDeque;
use std::time::Duration;

/// Operations that are kept of a communicator.
const MOST_OPERATIONS: usize = 64;

/// Least time between two looks at who may take turns.
const BETWEEN: Duration = Duration::from_secs(1);

/// Periods that pass before the same communicator is held back again.
const PERIODS: u32 = 10;

/// The longest hold.
const LONGEST: Duration = Duration::from_secs(1);

/// One communicator's operations.
#[derive(Debug, Default)]
pub(super) struct Operations {
    /// Number and times, oldest first, by the clock of one participant's agent.
    kept: VecDeque<(u64, Operation)>,
    heard: Duration,
    held: Option<Duration>,
}

impl Operations {
    /// Bytes of a typical operation; 0 where none is known.
    pub(super) fn bytes(&self) -> u64 {
        let mut all: Vec<u64> = self.kept.iter().map(|(_, operation)| operation.bytes.0).collect();
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or(0)
    }

    pub(super) fn rhythm(&self) -> Option<Rhythm> {
        let all: Vec<Operation> = self.kept.iter().map(|(_, operation)| *operation).collect();
        Rhythm::of(&all)
    }

    fn take(&mut self, now: Duration, told: &v1::Operation) {
        self.heard = now;
        let called = told.ranks.iter().map(|rank| rank.called_ns).filter(|at| *at > 0).min();
        let ended = told.ranks.iter().map(|rank| rank.ended_ns).max();
        let newer = self.kept.back().is_none_or(|(number, _)| *number < told.operation);
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
}

impl State {
    /// Takes in an operation that the communicator's first participant told of, so that all times are by one clock.
    pub(super) fn operation_told(&mut self, now: Duration, from: SessionId, told: &v1::Operation) {
        let Some(known) = self.communicators.get(&told.communicator) else { return };
        let first = known.members.first().and_then(|member| member.session);
        let rhythm = self.rhythms.entry(told.communicator).or_default();
        rhythm.heard = now;
        if first == Some(from) {
            rhythm.take(now, told);
        }
    }

    /// Whether a communicator has traffic, as far as agents tell.
    pub(super) fn seems_busy(&self, now: Duration, id: u64) -> bool {
        let interval = self.settings.telemetry_interval;
        let heard = self.rhythms.get(&id).map(|known| known.heard);
        interval.is_zero() || heard.is_none_or(|at| at + interval * 3 > now)
    }

    /// Holds communicators back that can take turns with others on a link they share.
    pub(super) fn take_turns(&mut self, now: Duration) {
        if !self.settings.replan || now < self.staggered + BETWEEN || self.rhythms.len() < 2 {
            return;
        }
        self.staggered = now;
        let mut jobs = self.jobs(now);
        if jobs.iter().filter(|job| job.rhythm.is_some()).count() < 2 {
            return;
        }
        jobs.iter_mut().for_each(|job| job.movable = false);
        let conditions = self.estimates.conditions(&self.settings.topology, self.withdrawn());
        let Some(plan) = self.fit_plan(&jobs, &conditions) else { return };
        for hold in stagger(&self.settings.topology, &conditions, &jobs, &plan.assignments) {
            let period = jobs.iter().find(|job| job.communicator == hold.communicator);
            let period = period.and_then(|job| job.rhythm).map_or(Nanos(0), |rhythm| rhythm.period);
            self.hold(now, hold.communicator, hold.hold, period, hold.reason);
        }
    }

    fn hold(&mut self, now: Duration, id: u64, hold: Nanos, period: Nanos, reason: String) {
        let pause = Duration::from(period).saturating_mul(PERIODS);
        let Some(rhythm) = self.rhythms.get_mut(&id) else { return };
        if rhythm.held.is_some_and(|at| at.saturating_add(pause) > now) {
            return;
        }
        let Some(known) = self.communicators.get(&id) else { return };
        // The lowest live participant leads.
        let leader = known.members.iter().find(|member| !member.closed).and_then(|member| member.session);
        let able =
            leader.and_then(|leader| self.sessions.get(&leader)).is_some_and(|leader| leader.abilities.hold);
        let hold = Duration::from(hold).min(LONGEST);
        if let (true, Some(leader), false) = (able, leader, hold.is_zero()) {
            rhythm.held = Some(now);
            let hold_ns = u64::try_from(hold.as_nanos()).unwrap_or(u64::MAX);
            let (tenant, name) = (known.tenant.clone(), known.name.clone());
            self.send(leader, to_agent::Message::Hold(v1::Hold { communicator: id, hold_ns }));
            self.fact(Fact::Held { communicator: id, tenant, name, hold, reason });
        }
    }
}
