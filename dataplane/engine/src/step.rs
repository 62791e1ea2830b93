//! What executing a step needs and leaves: where operands lie, results, errors.

use crate::transfer::PendingTransfer;
use harmonaize_codec::Sums;
use harmonaize_core::{CodingReport, Segment};
use harmonaize_plan::{Buffer, Encoding, Operand, Part, Participant, Step};
use harmonaize_shm::{EndError, Memory, Span};
use std::sync::Arc;

/// Destinations that one pass of a kernel writes; the rest are copied from the first.
pub(crate) const MAX_DESTINATIONS: usize = 8;

/// A step that cannot be executed: a bug here or in the plan, or what a peer sent. Ends the communicator.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecuteError {
    #[error("operand {0:?} lies nowhere")]
    Operand(Operand),
    #[error("step without source")]
    NoSource,
    #[error(transparent)]
    Memory(#[from] harmonaize_shm::MemoryError),
    #[error("kernel: {0}")]
    Kernel(String),
    #[error("participant {} sent no chunk that could be decoded: {error}", .peer.0)]
    Chunk { peer: Participant, error: harmonaize_codec::CodecError },
    #[error("attachment: {0}")]
    End(#[from] EndError),
}

/// Who sent the chunk that is to blame, if one is.
pub(crate) fn culprit(error: &ExecuteError) -> Option<Participant> {
    match error {
        ExecuteError::Chunk { peer, .. } => Some(*peer),
        _ => None,
    }
}
/// What executing a step leaves to the caller.
pub(crate) enum StepResult {
    /// The memory from which the step's sends go, if any.
    Sends(Option<Span>),
    /// The same of a coded step.
    Coded(CodedStep),
    /// So many steps, this one the first, have copied their blocks. Nothing is sent.
    Copied { steps: u32 },
    /// A fetch or store to start.
    Transfer(PendingTransfer),
    /// One that has ended: what stands for the tensor is here.
    Transferred,
    /// Nothing yet: the turn is over in its midst.
    Unfinished,
}

/// The outcome of a compressed step.
#[derive(Default)]
pub(crate) struct CodedStep {
    /// The chunk that the step's sends carry.
    pub(crate) from: Option<Span>,
    /// The own part's sum after this step, if it added to it.
    pub(crate) sums: Option<Sums>,
    /// The report of the step, without the bytes sent; `None` of no elements.
    pub(crate) done: Option<CodingReport>,
    /// The part of which this participant's account is settled.
    pub(crate) residual_part: Option<Part>,
}

/// Memory, and the offset and length in bytes of what lies in it.
pub(crate) type Located<'a> = (&'a Arc<Memory>, u64, u64);

/// Whether an operand is a message to or from a peer.
pub(crate) fn is_peer_operand(operand: &Operand) -> bool {
    matches!(operand.buffer, Buffer::Peer(_))
}

/// Whether a step has compressed operands.
pub(crate) fn is_coded(step: &Step) -> bool {
    step.sources.iter().chain(&step.destinations).any(|operand| operand.encoding != Encoding::Exact)
}

/// Offset and length in bytes of an operand in its tensor.
pub(crate) fn tensor_range(segment: &Segment, size: u64, operand: &Operand) -> (u64, u64) {
    let (start, elements) = segment.elements(operand);
    (start * size, elements * size)
}
