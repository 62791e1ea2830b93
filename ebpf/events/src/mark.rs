//! What the engine says of the operations that it runs, so that own traffic need not be guessed.

use crate::shared;

/// Blocks of a tensor that are looked at.
pub const SAMPLED_BLOCKS: u32 = 32;

/// What a [`Mark`] tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum MarkKind {
    /// A local rank called an operation. `bytes` are those of its tensor; `segment` is 0, or 1 and how many of [`SAMPLED_BLOCKS`] blocks of 256
    /// elements of its input were zeros; `channel` is 1 and the collective's code in descriptors, or 0 where that is not told.
    Called = 1,
    /// A segment of an operation begins here: its first step is executed. `bytes` are those of its part of a tensor.
    SegmentBegan = 2,
    /// `bytes` for a peer were handed to the transport.
    Sent = 3,
    /// `bytes` from a peer have arrived.
    Received = 4,
    /// The operation has ended well for a local rank. `segment` tells the same of its output.
    Ended = 5,
    /// It has ended with an error for a local rank.
    Failed = 6,
    /// An operation that travelled in fewer bits has ended well, once for all local ranks. `bytes` are those that this participant sent
    /// less than an exact one sends, `segment` the error of the receipt as f64 bits; `channel` is 1 if chunks went exact.
    Coded = 7,
    /// An operation that an aggregator was to sum has ended well, once for all local ranks. `segment` are the segments that hosts did in
    /// its place.
    Aggregated = 8,
    /// A session with an aggregator was given up by this participant; of no operation.
    GivenUp = 9,
    /// A device has carried out a message of payload for a peer, of no operation. `segment` are the nanoseconds from handing it over until
    /// its completion was seen, `bytes` what the device had meanwhile of this engine's payloads, `channel` the path to the peer.
    Completed = 10,
}

impl MarkKind {
    /// The kind with a number; none for one that this version does not know.
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::Called,
            2 => Self::SegmentBegan,
            3 => Self::Sent,
            4 => Self::Received,
            5 => Self::Ended,
            6 => Self::Failed,
            7 => Self::Coded,
            8 => Self::Aggregated,
            9 => Self::GivenUp,
            10 => Self::Completed,
            _ => return None,
        })
    }
}

shared! {
    /// A moment in an operation of one of this host's own communicators.
    pub struct Mark {
        /// When.
        pub time_ns: u64,
        /// The communicator, as control numbers it.
        pub communicator: u64,
        /// The operation's number on the communicator, from 0.
        pub operation: u64,
        /// The segment's number on the communicator, from 0; 0 for `Failed`; see `Called`, `Ended`, and from `Coded` on.
        pub segment: u64,
        /// Depends on the kind; else 0.
        pub bytes: u64,
        /// The epoch that the segment or path is of; 0 for `Called`, `Ended`, `Failed` to `GivenUp`.
        pub epoch: u32,
        /// Which participant of the communicator this agent is.
        pub participant: u32,
        /// `Called`, `Ended`, `Failed`: whose call. Else 0.
        pub rank: u32,
        /// `Sent`, `Received`, `Completed`: the other participant. Else 0.
        pub peer: u32,
        /// A [`MarkKind`], by its number.
        pub kind: u32,
        /// The channel that the segment runs on; 0 for `Ended`, `Failed` and those after; see `Called`, `Coded`, `Completed`.
        pub channel: u32,
    }
}
