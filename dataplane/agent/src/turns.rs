//! How a communicator takes turns with others, as control tells it.

use harmonaize_api::v1;
use harmonaize_core::{Nanos, Turns};

/// What the engine is to know; none where operations wait for no turn.
pub(crate) fn turns(told: &v1::Turns) -> Option<Turns> {
    let v1::Turns { patience_ns, least_bytes, operations, pause_ns, .. } = *told;
    (patience_ns > 0).then(|| Turns {
        patience: Nanos(patience_ns),
        least_bytes,
        operations: operations.max(1),
        pause: Nanos(pause_ns),
    })
}
