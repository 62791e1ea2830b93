//! How much staging a program needs at most, known before a segment runs by it.

use crate::program::{CODED_ROOM, Program};

/// The share of a slot that holds the whole of a block's segment.
const WHOLE: u64 = 1 << 20;

/// Bytes of a slot beside its part. They are for an element that the cut goes through, what coding may add, and an
/// aligned start.
const SLOT_ROOM: u64 = 16 + CODED_ROOM as u64 + 64;

/// What the staging slots of a program come to, whatever the size of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingSize {
    slots: u64,
    /// What all slots hold of a block's segment, in parts of [`WHOLE`].
    share: u64,
}

impl StagingSize {
    /// Returns of each number the larger.
    pub fn max(self, other: Self) -> Self {
        Self { slots: self.slots.max(other.slots), share: self.share.max(other.share) }
    }

    /// Returns the most bytes that all slots take, with segments of at most so many bytes of a block.
    pub fn bytes(self, segment_bytes: u64) -> u64 {
        let parts = (u128::from(segment_bytes) * u128::from(self.share)).div_ceil(u128::from(WHOLE));
        let room = self.slots.saturating_mul(SLOT_ROOM);
        u64::try_from(parts).unwrap_or(u64::MAX).saturating_add(room)
    }
}

impl Program {
    /// Returns what its staging slots come to.
    pub fn staging_size(&self) -> StagingSize {
        let shares = self.slots.iter().map(|of| WHOLE.div_ceil(u64::from((*of).max(1))));
        StagingSize { slots: self.slots.len() as u64, share: shares.fold(0, u64::saturating_add) }
    }
}
