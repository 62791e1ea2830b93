//! What a communicator asks of its caller: steps to execute, messages to send, and how operations ended.

use crate::aggregation::AggregationReport;
use crate::failure::Failure;
use crate::message::{Header, Message};
use arrayvec::ArrayVec;
use harmonaize_abi::{
    ChannelId, Epoch, OperationId, P2pSignature, Rank, SegmentId, Sequence, Signature, SlotId, StepId, Token,
};
use harmonaize_plan::{Algorithm, MAX_STEP_PEERS, Participant};
use serde::{Deserialize, Serialize};

/// One message of a step, to or from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerMessage {
    /// The other end.
    pub peer: Participant,
    /// Number on the stream; the payload lies in landing slot [`Sequence::slot`].
    pub sequence: Sequence,
    /// Bytes of payload. A compressed payload to be sent may have fewer, which the caller knows.
    pub bytes: u32,
    /// Whether the payload of this source lies in the step's first memory destination already; see [`Action::Post`].
    pub posted: bool,
    /// The header to send; unused for a source.
    pub header: Header,
}

/// The report of a completed operation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Receipt {
    /// The number of the operation.
    pub operation: OperationId,
    /// What was called.
    pub signature: Signature,
    /// Tensor bytes that this participant sent, compressed where they were sent so.
    pub wire_bytes: u64,
    /// The algorithm between participants of what was not compressed.
    pub algorithm: Algorithm,
    /// Totals of compression; `None` if nothing was compressed.
    pub coded: Option<CodingReport>,
    /// Totals of aggregation; `None` if no aggregator was to sum any of it.
    pub aggregation: Option<AggregationReport>,
}

/// The report of a send or a receive that has ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct P2pReceipt {
    /// The number of the message among those from its sender to its receiver.
    pub number: u64,
    /// What was called.
    pub signature: P2pSignature,
    /// The rank at the other end.
    pub peer: Rank,
    /// Bytes that this participant sent.
    pub wire_bytes: u64,
}

/// Totals of compression over an operation's chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CodingReport {
    /// Bytes of the chunks that were sent, each as often as it was sent.
    pub wire_bytes: u64,
    /// The codec, as in [`harmonaize_plan::Coding::codec`]; [`CodingReport::MIXED`] if there were several.
    pub codec: u16,
    /// The bound of the squared error of the decoded results, as their encoders reported it.
    pub error: f64,
    /// The squared error of the decoded results, as their encoders measured it.
    pub measured: f64,
    /// The sum of squares of the decoded results, to which the errors relate.
    pub squares: f64,
    /// Whether a chunk was written or read uncompressed although its plan says otherwise.
    pub uncompressed_chunks: bool,
}

impl CodingReport {
    /// The codec of what was not compressed.
    pub const EXACT: u16 = 0;
    /// The codec of an operation whose parts were compressed by several.
    pub const MIXED: u16 = u16::MAX;

    /// Adds what one step came to.
    pub(crate) fn add(&mut self, step: &Self) {
        self.codec = match (self.codec, step.codec) {
            (known, Self::EXACT) => known,
            (known, codec) if known == codec || known == Self::EXACT => codec,
            _ => Self::MIXED,
        };
        self.wire_bytes += step.wire_bytes;
        self.error += step.error;
        self.measured += step.measured;
        self.squares += step.squares;
        self.uncompressed_chunks |= step.uncompressed_chunks;
    }
}

/// What the caller must do next.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[expect(
    clippy::large_enum_variant,
    reason = "actions are passed by value, one at a time; a box would be an allocation a step"
)]
pub enum Action {
    /// Execute a step of the segment on `channel` (see [`crate::Communicator::segment`]): memory operands, then `sends` in order.
    ///
    /// [`crate::Communicator::handle_completion`] follows once per send when its bytes may be overwritten, and once for a fetch or store
    /// when it has ended; steps without either are complete when executed. [`crate::Communicator::handle_coded`] follows a step with
    /// compressed operands.
    Step {
        /// The channel.
        channel: ChannelId,
        /// The index in the segment's program.
        step: StepId,
        /// Messages that the peer sources consume, in order of the operands.
        sources: ArrayVec<PeerMessage, MAX_STEP_PEERS>,
        /// Messages for the peer destinations, in order of the operands.
        sends: ArrayVec<PeerMessage, MAX_STEP_PEERS>,
    },
    /// If the transport can, let the payload of a message to come land in a step's memory. That is the step's first memory
    /// destination, in place of the message's slot. Nothing else touches that memory until the step is issued.
    Post {
        /// The channel.
        channel: ChannelId,
        /// The index in the segment's program of a [`harmonaize_plan::StepKind::Move`] from a peer.
        step: StepId,
        /// The sender of the message, on the link of the segment's epoch.
        peer: Participant,
        /// The message's number on the stream.
        sequence: Sequence,
    },
    /// Begin this session with the aggregator of `epoch`; see [`crate::Communicator::handle_aggregated`] and
    /// [`crate::Communicator::handle_aggregation_ended`].
    Join {
        /// The epoch.
        epoch: Epoch,
        /// The session.
        session: u64,
    },
    /// Probe the aggregator of `epoch`: begin a session with it that nothing is submitted in, while hosts go on.
    /// [`crate::Communicator::handle_aggregator_alive`] or [`crate::Communicator::handle_aggregation_ended`] follows.
    ProbeAggregator {
        /// The epoch.
        epoch: Epoch,
        /// The session.
        session: u64,
    },
    /// End the session with the aggregator of `epoch`: from now on nothing is read or written for it.
    Leave {
        /// The epoch.
        epoch: Epoch,
    },
    /// Have the aggregator do the segment on `channel`, the session's next (see [`crate::Segment::aggregated`]).
    ///
    /// This participant's part of a sum is the sum of its local ranks' inputs. Results go to their outputs; those of a segment that
    /// stages them ([`crate::Segment::stages_output`]) go to staging, and the root's own part of a broadcast goes to its output at once.
    Aggregate {
        /// The channel.
        channel: ChannelId,
    },
    /// Copy the sum of the segment on `channel` from staging to the local ranks' outputs. The copy divides an average.
    ///
    /// Everybody has the sum, or this participant has it and keeps it ([`crate::Segment::retains_output`]). Where that takes longer than
    /// the action, [`crate::Communicator::defer_copy_out`] says so.
    CopyOut {
        /// The channel.
        channel: ChannelId,
    },
    /// Send a piece of a rank's tensor: the bytes from `offset` on, as many as the message has.
    ///
    /// [`crate::Communicator::handle_completion`] on [`crate::Communicator::p2p_channel`] follows when they may be overwritten.
    P2pSend {
        /// The sender.
        rank: Rank,
        /// The token of its call.
        token: Token,
        /// The first byte.
        offset: u64,
        /// The number of the completion.
        step: StepId,
        /// The message, on the link of its header's epoch.
        message: PeerMessage,
    },
    /// Store a piece that has landed on [`crate::Communicator::p2p_channel`] in a rank's tensor from `offset` on. The completion as of
    /// [`Action::P2pSend`] follows when it is there. The landing slot is free then.
    P2pReceive {
        /// The receiver.
        rank: Rank,
        /// The token of its call.
        token: Token,
        /// The first byte.
        offset: u64,
        /// The number of the completion.
        step: StepId,
        /// The message, on the link of its header's epoch.
        message: PeerMessage,
    },
    /// Copy from one local rank's tensor to another's; the completion as of [`Action::P2pSend`] follows when it is done.
    P2pCopy {
        /// The sender and the token of its call.
        from: (Rank, Token),
        /// The receiver and the token of its call.
        to: (Rank, Token),
        /// The first byte.
        offset: u64,
        /// How many.
        bytes: u64,
        /// The number of the completion.
        step: StepId,
    },
    /// A local rank's send or receive has ended well.
    P2pComplete {
        /// The rank.
        rank: Rank,
        /// The token of its call.
        token: Token,
        /// The report.
        receipt: P2pReceipt,
    },
    /// Send a message without payload, on path 0 of the link of `epoch`.
    Send {
        /// The receiver.
        to: Participant,
        /// The epoch of the link.
        epoch: Epoch,
        /// The message.
        message: Message,
    },
    /// A local rank's operation has ended well.
    Complete {
        /// The rank.
        rank: Rank,
        /// The token of its call.
        token: Token,
        /// The report.
        receipt: Receipt,
    },
    /// A local rank's operation has ended badly; the reason came with [`Action::Ended`].
    Fail {
        /// The rank.
        rank: Rank,
        /// The token of its call.
        token: Token,
        /// The number of the operation. Of a send or a receive: of the message among those from its sender to its receiver.
        operation: OperationId,
    },
    /// The communicator has ended; only [`Action::Send`], [`Action::Fail`] and the [`Action::P2pComplete`] of what had ended before follow.
    Ended(Failure),
    /// Ask for this interleave slot; see [`crate::Communicator::handle_slot_granted`]. An [`Action::ReleaseSlot`] follows, unless the
    /// communicator ends.
    RequestSlot {
        /// Its number, higher than any before.
        slot: SlotId,
    },
    /// Announce that this interleave slot is over, or no longer wanted.
    ReleaseSlot {
        /// Its number.
        slot: SlotId,
    },
    /// All participants switch to `epoch` at `segment`.
    Switched {
        /// The new epoch.
        epoch: Epoch,
        /// Its first segment.
        segment: SegmentId,
    },
    /// Nothing needs the links of this epoch any more.
    Retire {
        /// The old epoch.
        epoch: Epoch,
    },
}

impl Action {
    /// Whether it is a message's: a collective does not wait for it.
    pub(crate) fn is_p2p(&self) -> bool {
        matches!(self, Self::P2pSend { .. } | Self::P2pReceive { .. } | Self::P2pCopy { .. })
    }
}
