//! The rhythm of a job: how often it communicates, and for how long, from when its operations began and ended.

use crate::units::{Bytes, Nanos};

/// One operation of a communicator, from its first call to its last end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// When the first rank called.
    pub began: Nanos,
    /// When the last had its result.
    pub ended: Nanos,
    /// Bytes of a rank's tensor.
    pub bytes: Bytes,
}

/// Iterations: a busy part of one or more operations, then a quiet one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rhythm {
    /// From the beginning of a busy part to the next.
    pub period: Nanos,
    /// How long the busy part lasts.
    pub busy: Nanos,
    /// Bytes of a rank's tensors in a busy part.
    pub bytes: Bytes,
    /// When the newest busy part began.
    pub began: Nanos,
}

impl Rhythm {
    /// The rhythm of these operations, oldest first; none where they are too few or not regular.
    pub fn of(operations: &[Operation]) -> Option<Self> {
        let _ = operations;
        None
    }
}
