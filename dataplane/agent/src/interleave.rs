//! How a communicator takes turns with others, as control tells it.

use harmonaize_api::v1;
use harmonaize_core::Interleaving;
use std::time::Duration;

/// What the engine is to know; none where operations wait for no turn.
pub(crate) fn read_interleaving(told: &v1::Interleaving) -> Option<Interleaving> {
    let v1::Interleaving {
        max_wait_ns: patience_ns,
        min_bytes: least_bytes,
        max_operations: operations,
        max_idle_ns: pause_ns,
        ..
    } = *told;
    (patience_ns > 0).then(|| Interleaving {
        max_wait: Duration::from_nanos(patience_ns),
        min_bytes: least_bytes,
        operations: operations.max(1),
        idle_timeout: Duration::from_nanos(pause_ns),
    })
}
