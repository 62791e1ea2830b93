//! How long a sum takes, and after how long a chunk is asked for (RFC 6298, with other bounds). Where sums come steadily, one that takes a
//! little longer is not lost.

use std::time::Duration;

/// Smoothed time and its deviation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RttEstimator {
    least: Duration,
    most: Duration,
    smoothed_and_deviation: Option<(Duration, Duration)>,
}

impl RttEstimator {
    pub(crate) fn new(least: Duration, most: Duration) -> Self {
        Self { least, most: most.max(least), smoothed_and_deviation: None }
    }

    /// A chunk whose part was sent once (Karn's rule, but for questions) took so long.
    pub(crate) fn sample(&mut self, took: Duration) {
        self.smoothed_and_deviation = Some(match self.smoothed_and_deviation {
            None => (took, took / 2),
            Some((mean, deviation)) => (mean * 7 / 8 + took / 8, deviation * 3 / 4 + mean.abs_diff(took) / 4),
        });
    }

    /// After how long a chunk is sent again that was sent `attempts` times before now: doubled each time.
    pub(crate) fn retry(&self, attempts: u32) -> Duration {
        let base = self
            .smoothed_and_deviation
            .map_or(self.least * 4, |(mean, deviation)| mean + (deviation * 4).max(mean));
        let base = base.clamp(self.least, self.most);
        base.saturating_mul(1 << attempts.min(16)).min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_settles_on_what_is_measured_and_doubles() {
        let (least, most) = (Duration::from_micros(100), Duration::from_millis(20));
        let mut round_trip = RttEstimator::new(least, most);
        assert_eq!(round_trip.retry(0), least * 4);
        for _ in 0..100 {
            round_trip.sample(Duration::from_millis(1));
        }
        let once = round_trip.retry(0);
        assert!(once >= Duration::from_millis(2) && once < Duration::from_micros(2100), "{once:?}");
        assert_eq!(round_trip.retry(2), once * 4);
        assert_eq!(round_trip.retry(30), most);
        round_trip.sample(Duration::from_secs(5));
        assert_eq!(round_trip.retry(0), most);
    }
}
