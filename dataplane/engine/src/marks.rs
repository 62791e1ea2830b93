//! Marks of own operations for whoever measures: a bounded queue that the poll loop never waits for.

use crate::attachment::Attachment;
use crate::communicator_state::CommunicatorState;
use crossbeam::queue::ArrayQueue;
use harmonaize_abi::{Dtype, OperationId, Rank, Region, Signature};
use harmonaize_codec::Squares;
use harmonaize_core::{CodingReport, Header, Receipt};
use harmonaize_events::{Mark, MarkKind, SAMPLED_BLOCKS};
use harmonaize_kernels::codes::zero_blocks;
use harmonaize_plan::Participant;
use rustix::time::{ClockId, clock_gettime};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Tensors of fewer bytes are not looked into.
const LARGE: u64 = 1 << 20;

#[derive(Debug)]
struct Queue {
    marks: ArrayQueue<Mark>,
    lost: AtomicU64,
    /// Whether the next mark is to ring.
    awaited: AtomicBool,
    bell: OnceLock<Arc<OwnedFd>>,
}

/// The end that an engine writes; see [`crate::Engine::set_mark_writer`]. The default one leads nowhere.
#[derive(Debug, Default)]
pub struct MarkWriter(Option<Arc<Queue>>);

/// The other end. Each mark goes to one of its clones.
#[derive(Clone, Debug)]
pub struct MarkReader(Arc<Queue>);

/// A queue for `capacity` marks (at least one), of 72 bytes each.
pub fn marks(capacity: usize) -> (MarkWriter, MarkReader) {
    let (marks, lost) = (ArrayQueue::new(capacity.max(1)), AtomicU64::new(0));
    let queue = Queue { marks, lost, awaited: AtomicBool::new(false), bell: OnceLock::new() };
    let queue = Arc::new(queue);
    (MarkWriter(Some(Arc::clone(&queue))), MarkReader(queue))
}

impl MarkReader {
    /// The oldest mark that was not read yet.
    pub fn read(&self) -> Option<Mark> {
        self.0.marks.pop()
    }

    /// Has marks ring this bell, an eventfd that does not block, when [awaited](Self::await_mark). The first bell stays.
    pub fn set_bell(&self, bell: &Arc<OwnedFd>) {
        let _ = self.0.bell.set(Arc::clone(bell));
    }

    /// The next mark rings the bell, once. False: a mark is there already, and none may ring.
    pub fn await_mark(&self) -> bool {
        self.0.awaited.store(true, Ordering::SeqCst);
        self.0.marks.is_empty()
    }

    /// How many were lost so far because the queue was full.
    pub fn lost(&self) -> u64 {
        self.0.lost.load(Ordering::Relaxed)
    }
}

impl MarkWriter {
    /// Whether there is somebody who reads marks.
    pub(crate) fn has_reader(&self) -> bool {
        self.0.is_some()
    }

    /// Writes a mark of now, which is made only if somebody reads marks. It is lost, and counted, if the queue is full.
    ///
    /// Cost: a look at the clock, and a place in the queue, which two threads at most change at a time; `benches/marks.rs` measures it.
    /// A mark that is awaited costs a system call, too.
    pub fn write(&self, kind: MarkKind, mark: impl FnOnce() -> Mark) {
        let Some(queue) = &self.0 else { return };
        let now = clock_gettime(ClockId::Monotonic);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        let time_ns = seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0);
        if queue.marks.push(Mark { time_ns, kind: kind as u32, ..mark() }).is_err() {
            queue.lost.fetch_add(1, Ordering::Relaxed);
        }
        if queue.awaited.load(Ordering::SeqCst) {
            queue.ring();
        }
    }
}

impl Queue {
    #[cold]
    fn ring(&self) {
        if self.awaited.swap(false, Ordering::SeqCst)
            && let Some(bell) = self.bell.get()
        {
            // A full counter means that the bell is ringing already.
            let _ = rustix::io::write(&**bell, &1_u64.to_ne_bytes());
        }
    }
}

/// What a mark says of a message of data that `member` sent to `peer`, or received from there.
pub(crate) fn of_message(member: &CommunicatorState, peer: Participant, header: &Header, bytes: u32) -> Mark {
    Mark {
        operation: header.operation,
        segment: header.segment,
        bytes: bytes.into(),
        epoch: header.epoch.0,
        peer: peer.0,
        channel: header.channel.0.into(),
        ..member.mark()
    }
}

/// What a mark says of a coded operation: what it lost, and what it saved against an exact one's ring.
pub(crate) fn of_coded(member: &CommunicatorState, receipt: &Receipt, coded: &CodingReport) -> Mark {
    let Signature { count, dtype, .. } = receipt.signature;
    let of = u64::from(member.participants.max(1));
    let exact = count.saturating_mul(dtype.size() as u64).saturating_mul(2 * (of - 1)) / of;
    let bytes = exact.saturating_sub(receipt.wire_bytes);
    let CodingReport { error, squares: signal, uncompressed_chunks: refused, .. } = *coded;
    let segment = Squares { error, signal }.relative().to_bits();
    Mark { operation: receipt.operation.0, segment, bytes, channel: refused.into(), ..member.mark() }
}

/// What a mark says of the end of a local rank's operation.
pub(crate) fn of_end(member: &CommunicatorState, rank: Rank, operation: OperationId) -> Mark {
    Mark { operation: operation.0, rank: rank.0, ..member.mark() }
}

/// What marks tell of the zeros in an AllReduce's tensor. It is 0 where nobody looked, for the tensor is small, not of f32, or in memory
/// that is not mapped; else 1 and how many of [`SAMPLED_BLOCKS`] blocks were zeros. Cost: some 8 bytes a block of a dense tensor.
pub(crate) fn zeros(
    attachment: &Attachment,
    signature: &Signature,
    tensor: Region,
    operation: OperationId,
) -> u64 {
    let Signature { collective, dtype, .. } = *signature;
    if !collective.takes_feedback() || dtype != Dtype::F32 || tensor.bytes < LARGE {
        return 0;
    }
    let view = attachment.end.memory().and_then(|memory| memory.view(tensor.offset, tensor.bytes).ok());
    let zeros = view.and_then(|view| zero_blocks(view, operation.0, SAMPLED_BLOCKS).ok());
    zeros.map_or(0, |zeros| 1 + u64::from(zeros))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn only_a_mark_that_is_awaited_rings_and_once() {
        let (writer, reader) = marks(4);
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let rings = || {
            let mut count = [0; 8];
            rustix::io::read(&*bell, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
        };
        let mark = || writer.write(MarkKind::Called, Mark::default);
        reader.set_bell(&bell);
        mark();
        assert_eq!(rings(), 0, "nobody waits");
        assert!(!reader.await_mark(), "one is there");
        while reader.read().is_some() {}
        assert!(reader.await_mark());
        assert_eq!(rings(), 0, "nothing has happened");
        mark();
        mark();
        assert_eq!(rings(), 1);
        mark();
        assert_eq!(rings(), 0, "nobody waits any more");
    }
}
