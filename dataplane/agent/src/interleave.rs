//! How a communicator takes turns with others, as control tells it.

use harmonaize_api::v1;
use harmonaize_core::Interleaving;
use std::time::Duration;

/// What the engine is to know; none where operations wait for no turn.
pub(crate) fn read_interleaving(told: &v1::Turns) -> Option<Interleaving> {
    let v1::Turns { patience_ns, least_bytes, operations, pause_ns, .. } = *told;
    (patience_ns > 0).then(|| Interleaving {
        max_wait: Duration::from_nanos(patience_ns),
        min_bytes: least_bytes,
        operations: operations.max(1),
        idle_timeout: Duration::from_nanos(pause_ns),
    })
}
