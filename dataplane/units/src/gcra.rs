//! How often something may happen: the generic cell rate algorithm, as virtual scheduling (ITU-T I.371).

use std::time::Duration;

/// How often something may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Time between two on average.
    pub interval: Duration,
    /// How many may come at once after a pause; at least 1.
    pub burst: u32,
}

impl Quota {
    /// Returns a quota of so many a second, and as many at once; at least one.
    pub const fn per_second(most: u32) -> Self {
        let burst = if most == 0 { 1 } else { most };
        Self { interval: Duration::from_nanos(1_000_000_000 / burst as u64), burst }
    }

    /// How long before it would be earned the last of a burst may come.
    fn tolerance(self) -> Duration {
        self.interval.saturating_mul(self.burst.saturating_sub(1))
    }
}

/// What has happened of late of something that has a quota. Times never go back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gcra {
    /// When all that has happened is earned: the theoretical arrival time.
    earned_at: Duration,
}

impl Gcra {
    /// Takes one, if it may happen now.
    ///
    /// # Errors
    /// When it may happen at the soonest; nothing was taken.
    pub fn take(&mut self, now: Duration, quota: Quota) -> Result<(), Duration> {
        let next = self.next(quota);
        if next > now {
            return Err(next);
        }
        self.charge(now, quota);
        Ok(())
    }

    /// Takes one, whether it may happen or not. Returns when the next may.
    pub fn charge(&mut self, now: Duration, quota: Quota) -> Duration {
        self.charge_times(now, quota, 1)
    }

    /// The same of so many at once.
    pub fn charge_times(&mut self, now: Duration, quota: Quota, count: u32) -> Duration {
        let earned = quota.interval.saturating_mul(count);
        self.earned_at = self.earned_at.max(now).saturating_add(earned);
        self.next(quota)
    }

    /// Returns when one may happen at the soonest.
    pub fn next(&self, quota: Quota) -> Duration {
        self.earned_at.saturating_sub(quota.tolerance())
    }

    /// Whether what has happened makes no difference any more.
    pub fn is_idle(&self, now: Duration) -> bool {
        self.earned_at <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_burst_then_one_each_interval() {
        let (mut limit, quota, mut now) = (Gcra::default(), Quota::per_second(100), MS * 5000);
        let take = |limit: &mut Gcra, now| (0..1000).filter(|_| limit.take(now, quota).is_ok()).count();
        assert_eq!(take(&mut limit, now), 100, "as many at once");
        assert_eq!(limit.take(now, quota), Err(now + MS * 10), "the next is earned after an interval");
        now += MS * 105;
        assert_eq!(take(&mut limit, now), 10);
        let mut count = 0;
        for _ in 0..10_000 {
            now += MS / 10;
            count += usize::from(limit.take(now, quota).is_ok());
        }
        assert_eq!(count, 100, "a second's worth, however fast they come");
        assert!(!limit.is_idle(now) && limit.is_idle(now + MS * 1000));
    }

    #[test]
    fn what_is_charged_beyond_the_quota_is_earned_first() {
        let (mut limit, quota) = (Gcra::default(), Quota { interval: MS * 10, burst: 2 });
        assert_eq!([(); 4].map(|()| limit.charge(MS, quota)), [1, 11, 21, 31].map(|ms| MS * ms));
        assert_eq!(limit.take(MS * 30, quota), Err(MS * 31));
        assert_eq!(limit.take(MS * 31, quota), Ok(()));
    }
}
