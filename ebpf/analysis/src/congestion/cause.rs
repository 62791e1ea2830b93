//! Who is the cause of a link's congestion, and when another becomes it.

use super::Limits;
use harmonaize_abi::{CongestionCause, Nanos};
use std::time::Duration;

/// A cause changes sooner than so many times the dwell time after the last change: the dwell time doubles.
const CALM: u32 = 16;

/// The cause with its dwell time.
#[derive(Debug, Clone)]
pub(super) struct CauseState {
    cause: CongestionCause,
    /// Another that may become it, and since when.
    pending: Option<(CongestionCause, Nanos)>,
    dwell: Duration,
    changed: Nanos,
    /// When the path was last starved.
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
    pub(super) fn clear(&mut self) -> bool {
        self.begin(CongestionCause::Unknown)
    }

    /// Congestion begins, with this cause. Never news: the level is.
    pub(super) fn begin(&mut self, cause: CongestionCause) -> bool {
        (self.cause, self.pending) = (cause, None);
        false
    }

    /// The path is starved: at once cross traffic is the cause, whatever it was. Whether that is news.
    pub(super) fn note_starved(&mut self, now: Nanos, limits: &Limits) -> bool {
        let before = self.last_starved.replace(now);
        let news = before.is_none_or(|before| now.since(before) >= limits.exit_dwell);
        let turned = self.cause != CongestionCause::CrossTraffic;
        (self.cause, self.pending) = (CongestionCause::CrossTraffic, None);
        news || turned
    }

    /// Takes who seems to be the cause as of now. Whether the cause has changed.
    pub(super) fn step(&mut self, now: Nanos, cause: CongestionCause, limits: &Limits) -> bool {
        debug_assert!(self.pending.is_none_or(|(pending, _)| pending != self.cause));
        debug_assert!(self.dwell <= limits.max_exit_dwell.max(limits.cause_dwell));
        if cause == self.cause || cause == CongestionCause::Unknown {
            self.pending = None;
            return false;
        }
        let (turning, since) = *self.pending.get_or_insert((cause, now));
        if turning != cause {
            self.pending = Some((cause, now));
            return false;
        }
        if now.since(since) < self.dwell && self.cause != CongestionCause::Unknown {
            return false;
        }
        let soon = now.since(self.changed) < (CALM * self.dwell).max(limits.calm);
        self.dwell = if soon { (2 * self.dwell).min(limits.max_exit_dwell) } else { limits.cause_dwell };
        (self.cause, self.pending, self.changed) = (cause, None, now);
        true
    }
}
