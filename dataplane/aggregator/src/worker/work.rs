//! What a worker has to do: segments, and the chunks that they are cut into.

use super::Task;
use crate::packet::Content;
use harmonaize_abi::SegmentIndex;
use harmonaize_kernels::codes::Squares;
use std::time::Duration;

/// A chunk that is sent, or is to be.
#[derive(Clone, Copy, Default)]
pub(super) struct Flight {
    pub(super) segment: SegmentIndex,
    /// In elements; of bytes for all in bytes.
    pub(super) offset: u64,
    pub(super) elements: usize,
    pub(super) sent: Duration,
    pub(super) due: Duration,
    pub(super) attempts: u32,
    /// What the aggregator last said of this part: that it is in, or that it is not.
    pub(super) part_received: Option<bool>,
    /// When it was last asked since the part was sent.
    pub(super) requested_at: Option<Duration>,
    /// How often, without an answer; and how often the answer was that the part is in, or has no slot.
    pub(super) requests: u32,
    pub(super) waits: u32,
    /// The part was sent more than once.
    pub(super) retransmitted: bool,
    /// The chunk has been made: those of ranges are made ahead of others.
    pub(super) made: bool,
    pub(super) content: Content,
    /// Of bytes for all: they are this worker's.
    pub(super) root: bool,
    pub(super) done: bool,
}

/// A segment that is being summed.
pub(super) struct Work {
    pub(super) segment: SegmentIndex,
    pub(super) task: Task,
    /// As many as are counted of it: elements, bytes for all, or the one chunk of nothing.
    pub(super) elements: u64,
    /// Its first chunk: those of ranges, where there are any, come before the others.
    pub(super) first: u64,
    /// Elements of whose ranges chunks have been made, and whose ranges are there.
    pub(super) ranges_made: u64,
    pub(super) ranged: u64,
    /// Elements of which chunks have been made.
    pub(super) made: u64,
    /// Elements whose sums are there.
    pub(super) summed: u64,
    pub(super) squares: Squares,
}
