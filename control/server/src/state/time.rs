//! Control's time as others count it.

use harmonaize_planner::Nanos;
use std::time::Duration;

/// Returns a time or duration as the planner counts it.
pub(crate) fn nanos(time: Duration) -> Nanos {
    Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}
