//! Hysteresis: when a pressure becomes a state, and when it is one no longer.

use super::Limits;
use crate::nanos;
use harmonaize_abi::{CongestionLevel, Nanos};
use std::time::Duration;

/// The pressure at which a link becomes mildly congested; below [`MILD_EXIT`] it is so no longer.
pub(super) const MILD: f64 = 1.0;
const MILD_EXIT: f64 = 0.6;
const SEVERE: f64 = 2.0;
const SEVERE_EXIT: f64 = 1.4;

/// Re-entries sooner than so many times the hold after leaving double it; calm as long halves it.
const CALM: u32 = 16;

/// A state with its dwell times.
#[derive(Debug, Clone)]
pub(super) struct HysteresisState {
    pub(super) level: CongestionLevel,
    /// When what led to the state began.
    pub(super) since: Nanos,
    mild: Option<Rise>,
    severe: Option<Rise>,
    /// Since when the pressure is below what the state needs.
    below: Option<Nanos>,
    /// How long it must stay there.
    exit_dwell: Duration,
    last_exit: Option<Nanos>,
}

#[derive(Debug, Clone, Copy)]
struct Rise {
    since: Nanos,
    evidence: u64,
}

impl HysteresisState {
    pub(super) fn new(limits: &Limits) -> Self {
        let exit_dwell = limits.exit_dwell;
        Self {
            level: CongestionLevel::None,
            since: Nanos(0),
            mild: None,
            severe: None,
            below: None,
            exit_dwell,
            last_exit: None,
        }
    }

    /// Takes the pressure at a time; `evidence` counts what has spoken for congestion so far. Whether the state has changed.
    pub(super) fn step(&mut self, now: Nanos, pressure: f64, evidence: u64, limits: &Limits) -> bool {
        let rise = |rising: &mut Option<Rise>, threshold: f64| {
            if pressure < threshold {
                *rising = None;
                return None;
            }
            let rise = *rising.get_or_insert(Rise { since: now, evidence });
            let stayed = now.since(rise.since) >= limits.dwell;
            (stayed && evidence.saturating_sub(rise.evidence) + 1 >= limits.evidence).then_some(rise.since)
        };
        let mild = rise(&mut self.mild, MILD);
        let severe = rise(&mut self.severe, SEVERE);
        debug_assert!(self.severe.is_none() || self.mild.is_some(), "what is severe is mild");
        debug_assert!(
            self.level != CongestionLevel::None || self.below.is_none(),
            "there is nothing to leave"
        );
        debug_assert!(self.exit_dwell <= limits.max_exit_dwell.max(limits.exit_dwell));
        let reached = match (severe, mild) {
            (Some(since), _) => Some((CongestionLevel::Severe, since)),
            (None, Some(since)) => Some((CongestionLevel::Mild, since)),
            (None, None) => None,
        };
        if let Some((level, since)) = reached.filter(|(level, _)| *level > self.level) {
            self.enter(now, limits);
            (self.level, self.since) = (level, since);
            self.below = None;
            return true;
        }
        self.leave(now, pressure, limits)
    }

    /// Becomes mild, where it was not: what says so need not last. Whether it has changed.
    pub(super) fn begin(&mut self, now: Nanos, limits: &Limits) -> bool {
        if self.level != CongestionLevel::None {
            return false;
        }
        self.enter(now, limits);
        (self.level, self.since, self.below) = (CongestionLevel::Mild, now, None);
        true
    }

    /// Whether nothing is under way, so that a step with no pressure would change nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.level == CongestionLevel::None && self.mild.is_none()
    }

    /// Sets how long the state is kept. What comes back soon after it went is kept longer, so that a load that hugs a threshold
    /// does not flap.
    fn enter(&mut self, now: Nanos, limits: &Limits) {
        let Some(left) = self.last_exit else { return };
        let calm = now.since(left);
        let soon = (CALM * self.exit_dwell).max(limits.calm);
        if calm < soon {
            self.exit_dwell = (2 * self.exit_dwell).min(limits.max_exit_dwell);
        } else {
            let halvings = (nanos(calm) / nanos(soon)).min(63) as u32;
            self.exit_dwell = Duration::from_nanos(nanos(self.exit_dwell) >> halvings).max(limits.exit_dwell);
        }
    }

    fn leave(&mut self, now: Nanos, pressure: f64, limits: &Limits) -> bool {
        let needed = match self.level {
            CongestionLevel::None => return false,
            CongestionLevel::Mild => MILD_EXIT,
            CongestionLevel::Severe => SEVERE_EXIT,
        };
        if pressure >= needed {
            self.below = None;
            return false;
        }
        let below = *self.below.get_or_insert(now);
        if now.since(below) < self.exit_dwell.max(limits.exit_dwell) {
            return false;
        }
        let before = self.level;
        self.level = if pressure < MILD_EXIT { CongestionLevel::None } else { CongestionLevel::Mild };
        debug_assert!(self.level < before, "a level is left for a lower one");
        (self.since, self.below, self.last_exit) = (below, None, Some(now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn run(
        hysteresis: &mut HysteresisState,
        from_ms: u64,
        to_ms: u64,
        pressure: f64,
    ) -> Vec<(u64, CongestionLevel)> {
        let limits = Limits::default();
        let step = |now: u64, hysteresis: &mut HysteresisState| {
            hysteresis.step(Nanos(now * MS), pressure, now, &limits)
        };
        (from_ms..to_ms).filter_map(|now| step(now, hysteresis).then_some((now, hysteresis.level))).collect()
    }

    #[test]
    fn it_needs_time_to_enter_and_to_leave() {
        let limits = Limits::default();
        let dwell = nanos(limits.dwell) / MS;
        let hold = nanos(limits.exit_dwell) / MS;
        let mut hysteresis = HysteresisState::new(&limits);
        assert_eq!(run(&mut hysteresis, 0, 100, 0.99), []);
        assert_eq!(run(&mut hysteresis, 100, 101, 5.0), []);
        assert_eq!(run(&mut hysteresis, 101, 200, 0.0), [], "one reading is not enough");
        assert_eq!(run(&mut hysteresis, 200, 300, 1.2), [(200 + dwell, CongestionLevel::Mild)]);
        assert_eq!(hysteresis.since, Nanos(200 * MS));
        assert_eq!(run(&mut hysteresis, 300, 400, 2.5), [(300 + dwell, CongestionLevel::Severe)]);
        assert_eq!(run(&mut hysteresis, 400, 500, 1.0), [(400 + hold, CongestionLevel::Mild)]);
        assert_eq!(run(&mut hysteresis, 500, 600, 0.7), [], "between the thresholds nothing changes");
        assert_eq!(run(&mut hysteresis, 600, 700, 0.1), [(600 + hold, CongestionLevel::None)]);
        assert_eq!(hysteresis.since, Nanos(600 * MS));
    }

    #[test]
    fn evidence_must_grow() {
        let limits = Limits::default();
        let mut hysteresis = HysteresisState::new(&limits);
        assert!(
            (0..50).all(|now| !hysteresis.step(Nanos(now * MS), 3.0, 7, &limits)),
            "one piece of evidence, held"
        );
        assert!(hysteresis.step(Nanos(50 * MS), 3.0, 8, &limits));
    }

    #[test]
    fn reentry_doubles_exit_dwell() {
        let limits = Limits::default();
        let mut hysteresis = HysteresisState::new(&limits);
        let mut changes = 0;
        for round in 0..3600 * 4 {
            // An hour of 250 ms on, 250 ms off.
            let pressure = if round % 2 == 0 { 1.5 } else { 0.0 };
            changes += run(&mut hysteresis, round * 250, round * 250 + 250, pressure).len();
        }
        assert_eq!(changes, 7, "on and off thrice, and on for good");
    }
}
