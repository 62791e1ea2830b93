//! Who is the cause of a link's congestion, and when another becomes it.

use super::Limits;
use harmonaize_abi::CongestionCause;

/// A cause changes sooner than so many times the dwell time after the last change: the dwell time doubles.
const CALM: u64 = 16;

/// The cause with its dwell time.
#[derive(Debug, Clone)]
pub(super) struct CauseState {
    cause: CongestionCause,
    /// Another that may become it, and since when.
    pending: Option<(CongestionCause, u64)>,
    dwell_ns: u64,
    changed_ns: u64,
    /// When the path was last starved.
    starved_ns: Option<u64>,
}

impl CauseState {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            cause: CongestionCause::Unknown,
            pending: None,
            dwell_ns: limits.cause_dwell_ns,
            changed_ns: 0,
            starved_ns: None,
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
    pub(super) fn note_starved(&mut self, now_ns: u64, limits: &Limits) -> bool {
        let before = self.starved_ns.replace(now_ns);
        let news = before.is_none_or(|before| now_ns.saturating_sub(before) >= limits.exit_dwell_ns);
        let turned = self.cause != CongestionCause::CrossTraffic;
        (self.cause, self.pending) = (CongestionCause::CrossTraffic, None);
        news || turned
    }

    /// Takes who seems to be the cause as of now. Whether the cause has changed.
    pub(super) fn step(&mut self, now_ns: u64, cause: CongestionCause, limits: &Limits) -> bool {
        debug_assert!(self.pending.is_none_or(|(pending, _)| pending != self.cause));
        debug_assert!(self.dwell_ns <= limits.max_exit_dwell_ns.max(limits.cause_dwell_ns));
        if cause == self.cause || cause == CongestionCause::Unknown {
            self.pending = None;
            return false;
        }
        let (turning, since_ns) = *self.pending.get_or_insert((cause, now_ns));
        if turning != cause {
            self.pending = Some((cause, now_ns));
            return false;
        }
        if now_ns.saturating_sub(since_ns) < self.dwell_ns && self.cause != CongestionCause::Unknown {
            return false;
        }
        let soon = now_ns.saturating_sub(self.changed_ns) < (CALM * self.dwell_ns).max(limits.calm_ns);
        self.dwell_ns =
            if soon { (2 * self.dwell_ns).min(limits.max_exit_dwell_ns) } else { limits.cause_dwell_ns };
        (self.cause, self.pending, self.changed_ns) = (cause, None, now_ns);
        true
    }
}
