//! How often work may be done so that all of it together takes a small share of a core.

use std::time::Duration;

/// Work that is repeated: after `cost` of processor time it rests until that was no more than its share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DutyCycle {
    /// One part in so many of a core.
    parts: u32,
    /// Of that, one part in so many.
    backoff: u32,
    /// At least so long from one time to the next.
    min_interval: Duration,
    /// At most so long, whatever it costs.
    max_interval: Duration,
    due_ns: u64,
}

impl DutyCycle {
    pub(crate) fn new(parts: u32, min_interval: Duration, max_interval: Duration) -> Self {
        Self { parts, backoff: 1, min_interval, max_interval, due_ns: 0 }
    }

    /// From now on it takes one part in so many of its share.
    pub(crate) fn set_backoff(&mut self, thrift: u32) {
        self.backoff = thrift;
    }

    pub(crate) fn due_ns(&self) -> u64 {
        self.due_ns
    }

    /// At least so long passes from one time to the next.
    pub(crate) fn min_interval(&self) -> Duration {
        self.min_interval
    }

    pub(crate) fn is_due(&self, now_ns: u64) -> bool {
        now_ns >= self.due_ns
    }

    /// It was done, and took this much of a processor.
    pub(crate) fn done(&mut self, now_ns: u64, cost: Duration) {
        let parts = self.parts.saturating_mul(self.backoff);
        let rest = cost.saturating_mul(parts).clamp(self.min_interval, self.max_interval);
        self.due_ns = now_ns.saturating_add(nanoseconds(rest));
    }
}

/// Work that comes by itself: done at once as long as its share of the time has not been used up, then in batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Credit {
    parts: u32,
    /// Processor time that may be saved up, and owed.
    limit: i64,
    credit: i64,
    since_ns: u64,
}

impl Credit {
    pub(crate) fn new(parts: u32, limit: Duration) -> Self {
        let limit = i64::try_from(limit.as_nanos()).unwrap_or(i64::MAX);
        Self { parts: parts.max(1), limit, credit: limit, since_ns: 0 }
    }

    /// Takes off what was used, after adding what came meanwhile.
    pub(crate) fn used(&mut self, now_ns: u64, cost: Duration) {
        let cost = i64::try_from(cost.as_nanos()).unwrap_or(i64::MAX);
        self.credit = self.earned(now_ns).saturating_sub(cost).max(-self.limit);
        self.since_ns = now_ns;
    }

    /// How long to let work gather from now on before the next batch.
    pub(crate) fn delay(&self, now_ns: u64) -> Duration {
        let owed = u64::try_from(-self.earned(now_ns)).unwrap_or(0);
        Duration::from_nanos(owed.saturating_mul(self.parts.into()))
    }

    /// What there is with what came since it was last used.
    fn earned(&self, now_ns: u64) -> i64 {
        let passed = now_ns.saturating_sub(self.since_ns) / u64::from(self.parts);
        self.credit.saturating_add(i64::try_from(passed).unwrap_or(i64::MAX)).min(self.limit)
    }
}

pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn costly_work_rests_longer_within_bounds() {
        let mut pace = DutyCycle::new(100, Duration::from_millis(5), Duration::from_secs(1));
        assert!(pace.is_due(0));
        for (cost, rest) in [(1, 5), (50, 5), (100, 10), (4_000, 400), (40_000, 1_000)] {
            pace.done(7, Duration::from_micros(cost));
            assert_eq!(pace.due_ns(), 7 + rest * MS, "{cost}");
        }
        pace.set_backoff(3);
        pace.done(7, Duration::from_micros(50));
        assert_eq!(pace.due_ns(), 7 + 15 * MS, "a third of its share");
    }

    #[test]
    fn what_comes_in_a_row_is_done_at_once_and_then_gathered() {
        let mut credit = Credit::new(100, Duration::from_millis(1));
        credit.used(0, Duration::from_micros(900));
        assert_eq!(credit.delay(0), Duration::ZERO);
        credit.used(0, Duration::from_micros(200));
        assert_eq!(credit.delay(0), Duration::from_millis(10));
        // 10 ms earn 100 us, whether it is used meanwhile or not.
        assert_eq!(credit.delay(4 * MS), Duration::from_millis(6));
        assert_eq!(credit.delay(10 * MS), Duration::ZERO);
        // Whatever happens, no longer than the limit.
        credit.used(10 * MS, Duration::from_secs(9));
        assert_eq!(credit.delay(10 * MS), Duration::from_millis(100));
        assert_eq!(credit.delay(u64::MAX), Duration::ZERO);
        credit.used(u64::MAX, Duration::from_millis(1));
        assert_eq!(credit.delay(u64::MAX), Duration::ZERO);
    }
}
