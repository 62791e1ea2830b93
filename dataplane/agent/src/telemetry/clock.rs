//! The clocks: the programs' (monotonic), the one for people and other machines, and the thread's own processor time.

use harmonaize_abi::Nanos;
use harmonaize_loader::Offset;
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::time::Duration;

/// CLOCK_MONOTONIC, as the programs in the kernel take it.
pub(crate) fn monotonic() -> Nanos {
    Nanos(nanoseconds(clock_gettime(ClockId::Monotonic)))
}

/// What is to be added to a monotonic time to get CLOCK_REALTIME.
pub(crate) fn realtime_offset_ns() -> i64 {
    Offset::measure().nanoseconds
}

/// A monotonic time as nanoseconds of CLOCK_REALTIME, as messages have it; 0 stays 0, for it stands for none.
pub(crate) fn realtime_ns(time: Nanos, offset_ns: i64) -> u64 {
    if time == Nanos(0) { 0 } else { time.0.saturating_add_signed(offset_ns) }
}

/// Processor time that the calling thread has used.
pub(crate) fn thread_time() -> Duration {
    Duration::from_nanos(nanoseconds(clock_gettime(ClockId::ThreadCPUTime)))
}

fn nanoseconds(time: Timespec) -> u64 {
    let (seconds, rest) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
    seconds.unwrap_or(0).saturating_mul(1_000_000_000).saturating_add(rest.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{SystemTime, UNIX_EPOCH};

    #[test]
    fn a_time_survives_the_change_of_clocks() {
        let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let now = realtime_ns(monotonic(), realtime_offset_ns());
        let after = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        // The clock for people may be set meanwhile, but not by much.
        assert!(before.saturating_sub(now) < 1_000_000_000 && now.saturating_sub(after) < 1_000_000_000);
        assert_eq!(
            (realtime_ns(Nanos(0), 99), realtime_ns(Nanos(5), -9), realtime_ns(Nanos(u64::MAX), 1)),
            (0, 0, u64::MAX)
        );
    }
}
