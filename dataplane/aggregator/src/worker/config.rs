//! What a worker is told, what it tells, and the memory that it reads and writes.

use crate::{Key, PayloadFormat};
use harmonaize_abi::{Dtype, GrantId, ReduceOp, SegmentIndex};
use harmonaize_kernels::codes::Squares;
use std::time::Duration;

/// The memory behind segments; offsets and lengths in elements of the tensor, of which `bytes` hold the form's.
pub trait Tensors {
    /// Copies this host's part of `elements` elements from `offset` of a segment to `bytes`.
    fn read(&self, segment: SegmentIndex, offset: u64, elements: usize, bytes: &mut [u8]);
    /// Takes their sum. It is called once for each, in any order, and never after the session's end.
    fn write(&mut self, segment: SegmentIndex, offset: u64, elements: usize, bytes: &[u8]);
    /// Copies this host's bytes for all from `offset` of a segment.
    fn read_broadcast(&self, _segment: SegmentIndex, _offset: u64, bytes: &mut [u8]) {
        bytes.fill(0);
    }
    /// Takes bytes of another host, each once, as `write` does.
    fn write_broadcast(&mut self, _segment: SegmentIndex, _offset: u64, _bytes: &[u8]) {}
    /// Writes the norms of this host's blocks (`harmonaize_kernels::codes::ranges`). Of shared codes alone.
    fn ranges(&self, _segment: SegmentIndex, _offset: u64, _elements: usize, bytes: &mut [u8]) {
        bytes.fill(0);
    }
    /// Writes this host's part in codes (`harmonaize_kernels::codes::encode_shared`) under the ranges of all hosts. Returns the squares of
    /// what they lose, and of all its ranks' elements. Of shared codes alone, for which `write` takes codes as well.
    fn encode(
        &self,
        _segment: SegmentIndex,
        _offset: u64,
        _elements: usize,
        _ranges: &[u8],
        bytes: &mut [u8],
    ) -> Squares {
        bytes.fill(0);
        Squares::default()
    }
}

/// What is to be done with a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// All workers' elements are added; so many, of the form.
    Sum(u64),
    /// All workers' elements of another type, or reduced otherwise, than the form says.
    Other {
        /// So many.
        elements: u64,
        /// Their type.
        dtype: Dtype,
        /// What is done with them.
        op: ReduceOp,
    },
    /// One worker's bytes go to all others.
    Broadcast {
        /// How many.
        bytes: u64,
        /// Whether they are this worker's.
        root: bool,
    },
    /// All wait for the last.
    Barrier,
}

/// What a worker is told when the communicator forms.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// The communicator, by its grant.
    pub communicator: GrantId,
    /// Which of the aggregator's workers this is.
    pub worker: u16,
    /// The key of this worker.
    pub key: Key,
    /// What payloads are.
    pub format: PayloadFormat,
    /// Elements of a chunk.
    pub elements: u32,
    /// Most chunks that are sent and have no sum yet, whatever the aggregator grants.
    pub window: u16,
    /// Most segments that are submitted and not done.
    pub segments: usize,
    /// Where payloads are codes: how they are summed.
    pub codes: Codes,
    /// Hosts of the whole communicator: no sum of fewer is taken.
    pub hosts: u16,
    /// For how long questions may go unanswered.
    pub timeout: Duration,
    /// The shortest time after which a chunk is sent again.
    pub min_retry: Duration,
    /// The longest; well below the patience.
    pub max_retry: Duration,
    /// Unanswered questions of a thousand above which a session is left: 900 is one answer in ten. They are judged over times as long as
    /// the patience.
    pub max_loss_permille: u32,
}

/// How sums of codes are summed, and what they may lose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Codes {
    /// Most elements of a segment.
    pub segment_elements: u64,
    /// The most that the squared error of a chunk's sum may be, over the squares of all ranks' elements. It is infinite where all
    /// may be.
    pub max_error: f64,
    /// The factor by which the workers' squared errors, added up, give the squared error of their sum. It is at least 1.
    pub spread: f64,
}

impl Default for Codes {
    /// Where there are none.
    fn default() -> Self {
        Self { segment_elements: 0, max_error: f64::INFINITY, spread: 1.0 }
    }
}

/// Why a session has ended. Agreement among the workers follows ([`crate::Leader`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The aggregator does not answer.
    Silent,
    /// The network says that nobody is there ([`crate::Worker::handle_refused`]), and nobody answers.
    Refused,
    /// It has no such session: it restarted, its parent is gone, or workers' lengths differ.
    Lost,
    /// Too many packets are lost on the way.
    Losses,
    /// Codes would lose more than they may, or there is an element that is no number. All workers see it by the same sum, and none
    /// has taken that.
    Bound,
}

/// What a worker tells its caller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// All sums of a segment have been written.
    Done {
        /// The segment; they are done in order.
        segment: SegmentIndex,
        /// Of codes: the squared error of the sums, as [`Codes::spread`] reckons it, and the squares of all ranks' elements.
        squares: Squares,
    },
    /// The session has ended here: nothing is sent or written any more.
    Ended(Reason),
}

/// What was sent, taken, and dropped. All are packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerCounters {
    /// Sent, of all kinds.
    pub sent: u64,
    /// Of these, parts that had been sent before.
    pub retransmits: u64,
    /// Sums taken.
    pub sums: u64,
    /// Sums that were there already, or were not asked for.
    pub duplicates: u64,
    /// Of another session or incarnation.
    pub stale: u64,
    /// Of no shape, another communicator, worker or direction.
    pub unrecognized: u64,
    /// Wrong tags.
    pub tag: u64,
    /// Sums of a wrong length, or of too few hosts.
    pub wrong: u64,
}
