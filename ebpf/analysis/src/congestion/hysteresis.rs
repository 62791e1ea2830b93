//! Hysteresis: when a pressure becomes a state, and when it is one no longer.

use super::Limits;
use harmonaize_abi::CongestionLevel;

/// The pressure at which a link becomes mildly congested; below [`MILD_EXIT`] it is so no longer.
pub(super) const MILD: f64 = 1.0;
const MILD_EXIT: f64 = 0.6;
const SEVERE: f64 = 2.0;
const SEVERE_EXIT: f64 = 1.4;

/// Re-entries sooner than so many times the hold after leaving double it; calm as long halves it.
const CALM: u64 = 16;

/// A state with its dwell times.
#[derive(Debug, Clone)]
pub(super) struct HysteresisState {
    pub(super) level: CongestionLevel,
    /// When what led to the state began.
    pub(super) since_ns: u64,
    mild: Option<Rise>,
    severe: Option<Rise>,
    /// Since when the pressure is below what the state needs.
    below_ns: Option<u64>,
    /// How long it must stay there.
    exit_dwell_ns: u64,
    last_exit_ns: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Rise {
    since_ns: u64,
    evidence: u64,
}

impl HysteresisState {
    pub(super) fn new(limits: &Limits) -> Self {
        let exit_dwell_ns = limits.exit_dwell_ns;
        Self {
            level: CongestionLevel::None,
            since_ns: 0,
            mild: None,
            severe: None,
            below_ns: None,
            exit_dwell_ns,
            last_exit_ns: None,
        }
    }

    /// Takes the pressure at a time; `evidence` counts what has spoken for congestion so far. Whether the state has changed.
    pub(super) fn step(&mut self, now_ns: u64, pressure: f64, evidence: u64, limits: &Limits) -> bool {
        let rise = |rising: &mut Option<Rise>, threshold: f64| {
            if pressure < threshold {
                *rising = None;
                return None;
            }
            let rise = *rising.get_or_insert(Rise { since_ns: now_ns, evidence });
            let stayed = now_ns.saturating_sub(rise.since_ns) >= limits.dwell_ns;
            (stayed && evidence.saturating_sub(rise.evidence) + 1 >= limits.evidence).then_some(rise.since_ns)
        };
        let mild = rise(&mut self.mild, MILD);
        let severe = rise(&mut self.severe, SEVERE);
        debug_assert!(self.severe.is_none() || self.mild.is_some(), "what is severe is mild");
        debug_assert!(
            self.level != CongestionLevel::None || self.below_ns.is_none(),
            "there is nothing to leave"
        );
        debug_assert!(self.exit_dwell_ns <= limits.max_exit_dwell_ns.max(limits.exit_dwell_ns));
        let reached = match (severe, mild) {
            (Some(since_ns), _) => Some((CongestionLevel::Severe, since_ns)),
            (None, Some(since_ns)) => Some((CongestionLevel::Mild, since_ns)),
            (None, None) => None,
        };
        if let Some((level, since_ns)) = reached.filter(|(level, _)| *level > self.level) {
            self.enter(now_ns, limits);
            (self.level, self.since_ns) = (level, since_ns);
            self.below_ns = None;
            return true;
        }
        self.leave(now_ns, pressure, limits)
    }

    /// Becomes mild, where it was not: what says so need not last. Whether it has changed.
    pub(super) fn begin(&mut self, now_ns: u64, limits: &Limits) -> bool {
        if self.level != CongestionLevel::None {
            return false;
        }
        self.enter(now_ns, limits);
        (self.level, self.since_ns, self.below_ns) = (CongestionLevel::Mild, now_ns, None);
        true
    }

    /// Whether nothing is under way, so that a step with no pressure would change nothing.
    pub(super) fn is_idle(&self) -> bool {
        self.level == CongestionLevel::None && self.mild.is_none()
    }

    /// What comes back soon after it went is kept longer the next time, so that a load that hugs a threshold does not flap.
    fn enter(&mut self, now_ns: u64, limits: &Limits) {
        let Some(left_ns) = self.last_exit_ns else { return };
        let calm = now_ns.saturating_sub(left_ns);
        let soon = (CALM * self.exit_dwell_ns).max(limits.calm_ns);
        if calm < soon {
            self.exit_dwell_ns = (2 * self.exit_dwell_ns).min(limits.max_exit_dwell_ns);
        } else {
            let halvings = (calm / soon).min(63) as u32;
            self.exit_dwell_ns = (self.exit_dwell_ns >> halvings).max(limits.exit_dwell_ns);
        }
    }

    fn leave(&mut self, now_ns: u64, pressure: f64, limits: &Limits) -> bool {
        let needed = match self.level {
            CongestionLevel::None => return false,
            CongestionLevel::Mild => MILD_EXIT,
            CongestionLevel::Severe => SEVERE_EXIT,
        };
        if pressure >= needed {
            self.below_ns = None;
            return false;
        }
        let below_ns = *self.below_ns.get_or_insert(now_ns);
        if now_ns.saturating_sub(below_ns) < self.exit_dwell_ns.max(limits.exit_dwell_ns) {
            return false;
        }
        let before = self.level;
        self.level = if pressure < MILD_EXIT { CongestionLevel::None } else { CongestionLevel::Mild };
        debug_assert!(self.level < before, "a level is left for a lower one");
        (self.since_ns, self.below_ns, self.last_exit_ns) = (below_ns, None, Some(now_ns));
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
        let step =
            |now: u64, hysteresis: &mut HysteresisState| hysteresis.step(now * MS, pressure, now, &limits);
        (from_ms..to_ms).filter_map(|now| step(now, hysteresis).then_some((now, hysteresis.level))).collect()
    }

    #[test]
    fn it_needs_time_to_enter_and_to_leave() {
        let limits = Limits::default();
        let dwell = limits.dwell_ns / MS;
        let hold = limits.exit_dwell_ns / MS;
        let mut hysteresis = HysteresisState::new(&limits);
        assert_eq!(run(&mut hysteresis, 0, 100, 0.99), []);
        assert_eq!(run(&mut hysteresis, 100, 101, 5.0), []);
        assert_eq!(run(&mut hysteresis, 101, 200, 0.0), [], "one reading is not enough");
        assert_eq!(run(&mut hysteresis, 200, 300, 1.2), [(200 + dwell, CongestionLevel::Mild)]);
        assert_eq!(hysteresis.since_ns, 200 * MS);
        assert_eq!(run(&mut hysteresis, 300, 400, 2.5), [(300 + dwell, CongestionLevel::Severe)]);
        assert_eq!(run(&mut hysteresis, 400, 500, 1.0), [(400 + hold, CongestionLevel::Mild)]);
        assert_eq!(run(&mut hysteresis, 500, 600, 0.7), [], "between the thresholds nothing changes");
        assert_eq!(run(&mut hysteresis, 600, 700, 0.1), [(600 + hold, CongestionLevel::None)]);
        assert_eq!(hysteresis.since_ns, 600 * MS);
    }

    #[test]
    fn evidence_must_grow() {
        let limits = Limits::default();
        let mut hysteresis = HysteresisState::new(&limits);
        assert!(
            (0..50).all(|now| !hysteresis.step(now * MS, 3.0, 7, &limits)),
            "one piece of evidence, held"
        );
        assert!(hysteresis.step(50 * MS, 3.0, 8, &limits));
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
