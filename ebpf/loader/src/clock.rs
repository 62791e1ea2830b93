//! The clock of events, CLOCK_MONOTONIC, against the time of day.

use rustix::time::{ClockId, clock_gettime};

/// How often both clocks are read; the closest pair counts.
const READINGS: usize = 16;

/// What is to be added to CLOCK_MONOTONIC to get CLOCK_REALTIME, as it was when it was measured. The time of day may be set or
/// slewed: measure again now and then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offset {
    /// Nanoseconds to add.
    pub nanoseconds: i64,
    /// The true offset is at most so many nanoseconds away.
    pub uncertainty_ns: u64,
}

impl Offset {
    /// Reads one clock between two readings of the other, some times.
    pub fn measure() -> Self {
        let now = |clock: ClockId| {
            let time = clock_gettime(clock);
            i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
        };
        let reading = || {
            let before = now(ClockId::Monotonic);
            let day = now(ClockId::Realtime);
            let after = now(ClockId::Monotonic);
            let half = (after - before) / 2;
            let nanoseconds = i64::try_from(day - before - half).unwrap_or(0);
            Self { nanoseconds, uncertainty_ns: u64::try_from(half + 1).unwrap_or(u64::MAX) }
        };
        let first = reading();
        (1..READINGS)
            .map(|_| reading())
            .fold(first, |best, next| if next.uncertainty_ns < best.uncertainty_ns { next } else { best })
    }

    /// A time of an event as the time of day, in nanoseconds since 1970.
    pub fn day(self, monotonic_ns: u64) -> u64 {
        monotonic_ns.saturating_add_signed(self.nanoseconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{SystemTime, UNIX_EPOCH};

    #[test]
    fn the_time_of_day_is_met() {
        let offset = Offset::measure();
        let day =
            |time: SystemTime| u64::try_from(time.duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap();
        let before = day(SystemTime::now());
        let time = clock_gettime(ClockId::Monotonic);
        let after = day(SystemTime::now());
        let own = offset.day(u64::try_from(time.tv_sec).unwrap() * 1_000_000_000 + time.tv_nsec as u64);
        // Slewing in between is far below this.
        let slack = offset.uncertainty_ns + 1_000_000;
        assert!(own + slack >= before && own <= after + slack, "{before} {own} {after} {offset:?}");
    }
}
