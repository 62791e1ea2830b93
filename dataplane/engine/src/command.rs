//! Commands to an engine, and its notices.

use crate::containment::PanicScope;
use crate::error::{HandOverError, PrepareError};
use crate::handover::{EngineImage, InheritedEpoch, Leases};
use harmonaize_abi::{CommunicatorHandle, CommunicatorId, CongestionControl, Epoch, SegmentId, SlotId};
use harmonaize_core::{EpochPlan, Failure, InFlight, Interleaving, MessageInFlight};
use harmonaize_plan::Participant;
use harmonaize_shm::{AgentEnd, Memory};
use harmonaize_transport::datagram::RdmaAddress;
use harmonaize_transport::{Flow, Introduction};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// An attachment of a tenant's process, numbered by the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct AttachmentId(pub u64);

/// A rank that this agent drives.
#[derive(Clone, Copy, Debug)]
pub struct LocalRank {
    /// The rank.
    pub rank: harmonaize_abi::Rank,
    /// The attachment with its memory and rings.
    pub attachment: AttachmentId,
    /// The name of the communicator in that attachment's descriptors.
    pub handle: CommunicatorHandle,
}

/// Another participant, and how to reach it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The participant.
    pub participant: Participant,
    /// Control's introduction, of which the other end has its half; none: the link of the epoch before goes on.
    pub introduction: Option<Introduction>,
    /// The rate limit towards it, in bits a second; none: no limit.
    pub rate: Option<u64>,
    /// The TCP congestion control of the link's connections; none: the host's own.
    pub congestion_control: Option<CongestionControl>,
}

/// The aggregator that a participant sends to in an epoch.
#[derive(Clone, serde::Serialize, serde::Deserialize)]
pub struct Aggregator {
    /// Its address over UDP.
    pub address: SocketAddr,
    /// Its address over RDMA, and the key that datagrams carry; none unless it and all participants have RDMA. Their links are not handed over.
    #[serde(skip)]
    pub rdma: Option<(RdmaAddress, u32)>,
    /// The number of its grant for the communicator's epoch ([`harmonaize_abi::GrantId`]); a hand-over's layout keeps the integer.
    pub communicator: u64,
    /// The participant's number among its workers; another than its own where several aggregators serve the epoch.
    pub worker: u16,
    /// The bytes of this worker's key ([`harmonaize_aggregator::worker_key`]).
    pub key: [u8; 32],
    /// Elements of a chunk; its bytes fit a packet.
    pub chunk_elements: u32,
    /// The most chunks in flight.
    pub window: u16,
    /// The bound of a sum's squared error over the squares of all ranks' elements, where it sums shared codes.
    pub max_error: Option<f64>,
}

impl std::fmt::Debug for Aggregator {
    /// Without the key: commands end up in logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { address, communicator, worker, .. } = self;
        let mut f = f.debug_struct("Aggregator");
        f.field("address", address).field("communicator", communicator).field("worker", worker);
        f.finish_non_exhaustive()
    }
}

/// Everything that a communicator needs at this agent.
#[derive(Debug)]
pub struct Formation {
    /// Its number.
    pub communicator: CommunicatorId,
    /// The agent's number of its tenant. Communicators of a tenant share one window to aggregators.
    pub tenant: u32,
    /// The tenant's weight where tenants compete for the engine, at least 1. That of the last communicator to form counts.
    pub weight: u32,
    /// This participant.
    pub me: Participant,
    /// Its first plan.
    pub plan: EpochPlan,
    /// Every other participant.
    pub peers: Vec<Peer>,
    /// The aggregator, if the plan has one.
    pub aggregator: Option<Aggregator>,
    /// The local ranks.
    pub locals: Vec<LocalRank>,
}

/// The longest that an operation waits for its interleave slot.
pub const MAX_PATIENCE: Duration = Duration::from_secs(1);

/// A request to the engine.
#[derive(Debug)]
pub enum Command {
    /// A tenant's process has attached.
    Attach {
        /// Its number.
        attachment: AttachmentId,
        /// The agent's end.
        end: Box<dyn AgentEnd>,
        /// The longest time-out that its operations may have.
        operation_timeout: Duration,
    },
    /// It is gone; its ranks leave.
    Detach {
        /// Its number.
        attachment: AttachmentId,
    },
    /// Descriptors of a mapped attachment may name more memory; [`Notice::Regions`] follows.
    AddRegion {
        /// The attachment's number.
        attachment: AttachmentId,
        /// The offset of its first byte.
        base: u64,
        /// The memory.
        memory: Arc<Memory>,
    },
    /// They may no longer, unless an operation in flight has tensors there; [`Notice::Regions`] follows.
    RemoveRegion {
        /// The attachment's number.
        attachment: AttachmentId,
        /// The offset of its first byte.
        base: u64,
    },
    /// Form a communicator; [`Notice::Prepared`] or [`Notice::PrepareFailed`] follows.
    Form(Box<Formation>),
    /// Change the plan; [`Notice::Prepared`] or [`Notice::PrepareFailed`] follows, then [`Notice::Switched`].
    Change {
        /// The communicator.
        communicator: CommunicatorId,
        /// The new plan.
        plan: Box<EpochPlan>,
        /// Links for it.
        peers: Vec<Peer>,
        /// Its aggregator, if it has one.
        aggregator: Option<Box<Aggregator>>,
    },
    /// Every participant has reported [`Notice::Prepared`] of a change, which need not wait for their own messages.
    AllPrepared {
        /// The communicator.
        communicator: CommunicatorId,
        /// The epoch.
        epoch: Epoch,
    },
    /// Have large operations of a communicator wait here for interleave slots, each at most [`MAX_PATIENCE`]; none: no longer.
    Interleave {
        /// The communicator.
        communicator: CommunicatorId,
        /// The rules.
        interleaving: Option<Interleaving>,
    },
    /// An interleave slot that [`Notice::SlotRequested`] asked for is granted.
    SlotGranted {
        /// The communicator.
        communicator: CommunicatorId,
        /// Its number.
        slot: SlotId,
    },
    /// Give up a change that is not under way yet.
    Abandon {
        /// The communicator.
        communicator: CommunicatorId,
        /// The epoch.
        epoch: Epoch,
    },
    /// A local rank leaves, perhaps a communicator that is over: its handle names nothing any more.
    Leave {
        /// The communicator.
        communicator: CommunicatorId,
        /// The rank.
        rank: harmonaize_abi::Rank,
    },
    /// End a communicator.
    Dissolve {
        /// Which.
        communicator: CommunicatorId,
        /// Why.
        failure: Failure,
    },
    /// Report the state of everything; [`Notice::Status`] follows.
    Status {
        /// Comes back.
        id: u64,
    },
    /// Stand still, for the engine of another process to go on; [`Notice::HandedOver`] follows. Without an error only
    /// [`Command::Resume`] may come next.
    HandOver {
        /// Comes back.
        thread: usize,
    },
    /// Take over what another process's engine had, and stand still until [`Command::Resume`]; [`Notice::TakenOver`] follows. The first
    /// command of all.
    TakeOver {
        /// Comes back.
        thread: usize,
        /// What it had.
        image: Box<EngineImage>,
        /// What memory was lent on.
        leases: Leases,
    },
    /// Go on after [`Command::HandOver`], which was called off, or after [`Command::TakeOver`], with the other process gone.
    Resume,
    /// End every communicator in order and stop the loop.
    Stop,
}

/// A report of the engine.
#[derive(Debug)]
pub enum Notice {
    /// The links of an epoch are up here.
    Prepared {
        /// The communicator.
        communicator: CommunicatorId,
        /// The epoch.
        epoch: Epoch,
        /// The flows of its paths to others, where the transport knows them.
        flows: Vec<(Participant, Flow)>,
    },
    /// An epoch cannot be used; a first one is forgotten, with a later one the current goes on.
    PrepareFailed {
        /// The communicator.
        communicator: CommunicatorId,
        /// The epoch.
        epoch: Epoch,
        /// The reason.
        reason: PrepareError,
    },
    /// All participants have switched to an epoch: what was before it is done, and the next change may come.
    Switched {
        /// The communicator.
        communicator: CommunicatorId,
        /// The epoch.
        epoch: Epoch,
        /// Its first segment.
        segment: SegmentId,
    },
    /// An operation waits for an interleave slot.
    SlotRequested {
        /// The communicator.
        communicator: CommunicatorId,
        /// The slot's number, higher than any before.
        slot: SlotId,
    },
    /// A requested interleave slot is over, granted or not.
    SlotReleased {
        /// The communicator.
        communicator: CommunicatorId,
        /// Its number.
        slot: SlotId,
    },
    /// A communicator has ended with an error.
    Ended {
        /// Which.
        communicator: CommunicatorId,
        /// The reason, in terms of ranks.
        failure: Failure,
        /// More for the operator: links and addresses.
        detail: String,
    },
    /// Work for one communicator or attachment has panicked; that one alone ends, and its own notice follows.
    Panicked {
        /// Whose work.
        scope: PanicScope,
        /// What the panic said.
        reason: String,
    },
    /// A communicator has ended in good order.
    Closed {
        /// Which.
        communicator: CommunicatorId,
    },
    /// An attachment broke the protocol or closed its end, and was let go.
    Detached {
        /// Which.
        attachment: AttachmentId,
        /// Why.
        reason: String,
    },
    /// Answer to [`Command::AddRegion`] or [`Command::RemoveRegion`].
    Regions {
        /// The attachment's number.
        attachment: AttachmentId,
        /// From the command.
        base: u64,
        /// Whether it was done.
        done: bool,
    },
    /// Answer to [`Command::HandOver`].
    HandedOver {
        /// From the command.
        thread: usize,
        /// All that the engine has, which stands still; or why it goes on, for the operator.
        image: Result<Box<EngineImage>, HandOverError>,
    },
    /// Answer to [`Command::TakeOver`].
    TakenOver {
        /// From the command.
        thread: usize,
        /// What was taken over, or why it cannot be, for the operator.
        epochs: Result<Vec<InheritedEpoch>, HandOverError>,
    },
    /// Answer to [`Command::Status`].
    Status {
        /// From the command.
        id: u64,
        /// The state.
        status: Status,
    },
}

/// The state of an engine.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Every communicator.
    pub communicators: Vec<CommunicatorStatus>,
    /// Every attachment.
    pub attachments: Vec<AttachmentStatus>,
}

/// One communicator.
#[derive(Clone, Debug)]
pub struct CommunicatorStatus {
    /// Which.
    pub communicator: CommunicatorId,
    /// The epoch in force.
    pub epoch: Epoch,
    /// Operations that have ended here, at all local ranks.
    pub completed: u64,
    /// Operations that ended with an error.
    pub failed: u64,
    /// Tensor bytes to peers.
    pub bytes_sent: u64,
    /// Tensor bytes from peers.
    pub bytes_received: u64,
    /// Operations in flight.
    pub in_flight: Vec<InFlight>,
    /// Sends and receives in flight.
    pub messages: Vec<MessageInFlight>,
    /// Nanoseconds on the clock of [`InFlight::since`] now.
    pub now: harmonaize_core::Nanos,
}

/// One attachment.
#[derive(Clone, Debug)]
pub struct AttachmentStatus {
    /// Which.
    pub attachment: AttachmentId,
    /// Bytes of tensor memory.
    pub arena_bytes: u64,
    /// Operations in flight.
    pub in_flight: u32,
}
