//! The two clocks by which programs log, in nanoseconds.

use anyhow::Result;
use rustix::time::{ClockId, clock_gettime};

/// CLOCK_MONOTONIC: what rates and distances are taken by.
pub fn monotonic_ns() -> Result<u64> {
    now(ClockId::Monotonic)
}

/// CLOCK_REALTIME: what processes agree on that were not started together.
pub fn realtime_ns() -> Result<u64> {
    now(ClockId::Realtime)
}

/// What CLOCK_REALTIME is ahead of CLOCK_MONOTONIC now.
pub fn ahead_ns() -> Result<i64> {
    Ok(i64::try_from(realtime_ns()?)? - i64::try_from(monotonic_ns()?)?)
}

fn now(clock: ClockId) -> Result<u64> {
    let now = clock_gettime(clock);
    Ok(u64::try_from(now.tv_sec)? * 1_000_000_000 + u64::try_from(now.tv_nsec)?)
}
