//! Lines of the log that somebody else's doing causes, at a limited rate.

use crate::counters::{Counted, Counters};
use harmonaize_units::{Gcra, Quota};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines about one tenant, or about strangers. Those beyond the rate are left out and counted.
#[derive(Debug)]
pub(super) struct LogLimit {
    begun: Instant,
    /// What was logged of late, and how many lines have been left out since the last.
    state: Mutex<(Gcra, u64)>,
    counters: Counters,
}

impl LogLimit {
    pub(super) fn new(counters: Counters) -> Self {
        Self { begun: Instant::now(), state: Mutex::default(), counters }
    }

    /// Logs a line, behind one that says how many before it were left out; or leaves it out.
    pub(super) fn log(&self, per_minute: u32, about: &str, line: impl FnOnce()) {
        let Some(left_out) = self.take(per_minute, self.begun.elapsed()) else { return };
        if left_out > 0 {
            tracing::warn!(about, left_out, "lines were left out, more than `log_lines` a minute");
        }
        line();
    }

    /// Takes a line at so long since the beginning: how many were left out before it. None if it is left out itself.
    fn take(&self, per_minute: u32, now: Duration) -> Option<u64> {
        let burst = per_minute.max(1);
        let quota = Quota { interval: Duration::from_secs(60) / burst, burst };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (rate, left_out) = &mut *state;
        if rate.take(now, quota).is_ok() {
            return Some(std::mem::take(left_out));
        }
        *left_out += 1;
        self.counters.add(Counted::LogLine);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_rate_are_counted() {
        let counters = Counters::default();
        let limit = LogLimit::new(counters.clone());
        let at = Duration::from_secs;
        let logged = (0..1000).filter(|_| limit.take(60, at(0)).is_some()).count();
        assert_eq!((logged, counters.get(Counted::LogLine)), (60, 940));
        assert_eq!([limit.take(60, at(1)), limit.take(60, at(1))], [Some(940), None]);
        assert_eq!(limit.take(60, at(2)), Some(1));
    }
}
