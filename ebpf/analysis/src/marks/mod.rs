//! Own operations, exactly, from what the engine says of them.

mod assembly;
#[cfg(test)]
mod tests;

pub use assembly::{Counts, Limits, Marks};

use crate::trace::Timed;
use harmonaize_abi::{CommunicatorId, Epoch, Nanos, OperationId};

/// An operation of one of this host's own communicators, ended or given up.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    /// The communicator, as control numbers it.
    pub communicator: CommunicatorId,
    /// The operation's number on it.
    pub operation: OperationId,
    /// Which participant this host is.
    pub participant: u32,
    /// Which collective, by its code in descriptors; none where that is not known.
    pub collective: Option<u32>,
    /// The lowest and highest epoch that its segments ran by; 0 where it had none.
    pub epochs: (Epoch, Epoch),
    /// The earliest time of its marks.
    pub began: Nanos,
    /// The latest time of its marks.
    pub ended: Nanos,
    /// Each local rank, by its number.
    pub ranks: Vec<RankCall>,
    /// Each peer, by its number.
    pub edges: Vec<Edge>,
    /// How many segments began.
    pub segments: u64,
    /// When its first segment began.
    pub first_segment: Option<Nanos>,
    /// What coding it came to; none where it travelled as it is.
    pub coded: Option<Coded>,
    /// Whether all is here. No mark was lost while it ran, every rank that called it has ended, and nothing found no room.
    pub whole: bool,
}

/// A local rank's part in an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankCall {
    /// Which rank.
    pub rank: u32,
    /// When it called; none where that was lost.
    pub called: Option<Nanos>,
    /// When it ended, well or not; none where that is not known.
    pub ended: Option<Nanos>,
    /// Whether it ended with an error.
    pub failed: bool,
    /// Bytes of its tensor.
    pub bytes: u64,
    /// Of [`harmonaize_events::SAMPLED_BLOCKS`] blocks of its input, how many were zeros; none where nobody looked.
    pub zero_input: Option<u32>,
    /// The same of its output.
    pub zero_output: Option<u32>,
}

/// What travelling in fewer bits came to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Coded {
    /// The error of the receipt: vNMSE, at most.
    pub error: f64,
    /// Bytes that this host sent less than for an exact operation.
    pub saved_bytes: u64,
    /// Whether chunks went exact, for the budget.
    pub refused: bool,
}

/// What moved between this host and a peer in an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge {
    /// The other participant.
    pub peer: u32,
    /// What was handed to the transport for it.
    pub sent: Moved,
    /// What arrived from it.
    pub received: Moved,
}

/// Bytes and their times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Marks of such.
    pub count: u64,
    /// Bytes in all.
    pub bytes: u64,
    /// When the first moved; 0 where none has.
    pub first: Nanos,
    /// When the last moved.
    pub last: Nanos,
}

impl Timed for Operation {
    fn time(&self) -> Nanos {
        self.began
    }

    fn same_content(&self, other: &Self) -> bool {
        let name = |one: &Self| (one.communicator, one.operation, one.participant, one.segments, one.whole);
        name(self) == name(other)
    }
}
