//! Who is the cause of a link's congestion, and when another becomes it.

use super::Limits;
use harmonaize_abi::{CongestionCause, Nanos};
use std::time::Duration;

/// A cause changes sooner than so many times the dwell time after the last change: the dwell time doubles.
const CALM: u32 = 16;

/// What a measure changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Nothing.
    Same,
    /// Nothing, but the path is starved after a while in which it was not.
    StarvedAgain,
    /// The state or the cause.
    Changed,
}

/// The cause with its dwell time.
#[derive(Debug, Clone)]
pub(super) struct CauseState {
    cause: CongestionCause,
    /// Another that may become it, and since when.
    pending: Option<(CongestionCause, Nanos)>,
    dwell: Duration,
    changed: Nanos,
    /// When the path was last starved, since its state began.
    last_starved: Option<Nanos>,
}

impl CauseState {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            cause: CongestionCause::Unknown,
            pending: None,
            dwell: limits.cause_dwell,
            changed: Nanos(0),
            last_starved: None,
        }
    }

    pub(super) fn get(&self) -> CongestionCause {
        self.cause
    }

    /// Whether another may become the cause.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// There is no congestion. Never news: the level is.
    pub(super) fn clear(&mut self) -> Outcome {
        self.last_starved = None;
        self.begin(CongestionCause::Unknown)
    }

    /// Congestion begins, with this cause. Never news: the level is.
    pub(super) fn begin(&mut self, cause: CongestionCause) -> Outcome {
        (self.cause, self.pending) = (cause, None);
        Outcome::Same
    }

    /// The path is starved: at once cross traffic is the cause, whatever it was. Returns what that changes.
    pub(super) fn note_starved(&mut self, now: Nanos, limits: &Limits) -> Outcome {
        let before = self.last_starved.replace(now);
        let turned = self.cause != CongestionCause::CrossTraffic;
        (self.cause, self.pending) = (CongestionCause::CrossTraffic, None);
        match before {
            Some(_) if turned => Outcome::Changed,
            // It is the first time since the state began.
            None => Outcome::Changed,
            Some(before) if now.since(before) >= limits.exit_dwell => Outcome::StarvedAgain,
            Some(_) => Outcome::Same,
        }
    }

    /// Takes who seems to be the cause as of now. Returns what that changes.
    pub(super) fn step(&mut self, now: Nanos, cause: CongestionCause, limits: &Limits) -> Outcome {
        debug_assert!(self.pending.is_none_or(|(pending, _)| pending != self.cause));
        debug_assert!(self.dwell <= limits.max_exit_dwell.max(limits.cause_dwell));
        if cause == self.cause || cause == CongestionCause::Unknown {
            self.pending = None;
            return Outcome::Same;
        }
        let (turning, since) = *self.pending.get_or_insert((cause, now));
        if turning != cause {
            self.pending = Some((cause, now));
            return Outcome::Same;
        }
        if now.since(since) < self.dwell && self.cause != CongestionCause::Unknown {
            return Outcome::Same;
        }
        let soon = now.since(self.changed) < (CALM * self.dwell).max(limits.calm);
        self.dwell = if soon { (2 * self.dwell).min(limits.max_exit_dwell) } else { limits.cause_dwell };
        (self.cause, self.pending, self.changed) = (cause, None, now);
        Outcome::Changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starvation_that_comes_again_changes_nothing() {
        let limits = Limits::default();
        let mut cause = CauseState::new(&limits);
        let mut starved = |ms: u64| cause.note_starved(Nanos(ms * 1_000_000), &limits);
        assert_eq!(starved(100), Outcome::Changed, "nobody was the cause");
        assert_eq!([101, 140, 180].map(&mut starved), [Outcome::Same; 3], "it lasts");
        assert_eq!(starved(230), Outcome::StarvedAgain);
        cause.begin(CongestionCause::Own);
        assert_eq!(cause.note_starved(Nanos(231_000_000), &limits), Outcome::Changed);
    }
}
