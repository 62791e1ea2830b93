//! What control asks of an engine, and what the engine says.

use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_core::{EpochPlan, Failure, InFlight, Interleaving, Timeouts};
use harmonaize_plan::Participant;
use harmonaize_shm::AgentEnd;
use harmonaize_transport::datagram::RdmaAddress;
use harmonaize_transport::{Flow, Introduction};
use std::net::SocketAddr;

/// An attachment of a tenant's process, numbered by the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttachmentId(pub u64);

/// A rank that this agent drives.
#[derive(Clone, Copy, Debug)]
pub struct LocalRank {
    /// Which.
    pub rank: harmonaize_abi::Rank,
    /// Whose memory and rings.
    pub attachment: AttachmentId,
    /// The name of the communicator in that attachment's descriptors.
    pub handle: u32,
}

/// Another participant, and how to reach it.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Which.
    pub participant: Participant,
    /// Both ends were told this by control; none: the link of the epoch before goes on.
    pub introduction: Option<Introduction>,
    /// Most that this end may send to it, in bits a second; none: no bound.
    pub rate: Option<u64>,
}

/// The aggregator that a participant sends to in an epoch.
#[derive(Clone, Debug)]
pub struct Aggregator {
    /// Where it listens, over UDP.
    pub address: SocketAddr,
    /// Where it is over RDMA, and the key that datagrams name; none: it is not, or not all participants are.
    pub rdma: Option<(RdmaAddress, u32)>,
    /// Its number for the communicator's epoch.
    pub communicator: u64,
    /// Which of its workers the participant is: the one of its own number, but where several aggregators serve the epoch.
    pub worker: u16,
    /// This worker's key.
    pub key: harmonaize_aggregator::Key,
    /// Elements of a chunk; its bytes fit a packet.
    pub chunk_elements: u32,
    /// Most chunks in flight.
    pub window: u16,
    /// Where it sums codes: the most that the squared error of a sum may be, over the squares of all ranks' elements.
    pub max_error: Option<f64>,
}

/// Everything that a communicator needs at this agent.
#[derive(Debug)]
pub struct Formation {
    /// Its number.
    pub communicator: CommunicatorId,
    /// Whose it is: the agent's number of the tenant. Communicators of a tenant have one window to aggregators together.
    pub tenant: u32,
    /// Who we are in it.
    pub me: Participant,
    /// Its first plan.
    pub plan: EpochPlan,
    /// Every other participant.
    pub peers: Vec<Peer>,
    /// The aggregator, if the plan has one.
    pub aggregator: Option<Aggregator>,
    /// Our ranks.
    pub locals: Vec<LocalRank>,
    /// Times.
    pub timeouts: Timeouts,
}

/// Longest that an operation waits for its turn.
pub const MAX_PATIENCE: std::time::Duration = std::time::Duration::from_secs(1);

/// A request to the engine.
#[derive(Debug)]
pub enum Command {
    /// A tenant's process has attached.
    Attach {
        /// Its number.
        attachment: AttachmentId,
        /// The agent's end.
        end: Box<dyn AgentEnd>,
    },
    /// It is gone; its ranks leave.
    Detach {
        /// Its number.
        attachment: AttachmentId,
    },
    /// Form a communicator; [`Notice::Prepared`] or [`Notice::PrepareFailed`] follows.
    Form(Box<Formation>),
    /// Change the plan; [`Notice::Prepared`] or [`Notice::PrepareFailed`] follows, then [`Notice::Switched`].
    Change {
        /// Of which communicator.
        communicator: CommunicatorId,
        /// The new plan.
        plan: EpochPlan,
        /// Links for it.
        peers: Vec<Peer>,
        /// Its aggregator, if it has one.
        aggregator: Option<Box<Aggregator>>,
    },
    /// Everybody has said [`Notice::Prepared`] of a change: it need not wait for participants to tell each other.
    AllPrepared {
        /// Of which communicator.
        communicator: CommunicatorId,
        /// Which epoch.
        epoch: Epoch,
    },
    /// Have large operations of a communicator wait here for their turn, each at most [`MAX_PATIENCE`]; none: no longer.
    Interleave {
        /// Of which communicator.
        communicator: CommunicatorId,
        /// How.
        interleaving: Option<Interleaving>,
    },
    /// A turn that [`Notice::SlotRequested`] asked for is given.
    SlotGranted {
        /// To which communicator.
        communicator: CommunicatorId,
        /// Its number.
        slot: u64,
    },
    /// Give up a change that is not under way yet.
    Abandon {
        /// Of which communicator.
        communicator: CommunicatorId,
        /// Which epoch.
        epoch: Epoch,
    },
    /// A local rank leaves, perhaps a communicator that is over: its handle names nothing any more.
    Leave {
        /// Which communicator.
        communicator: CommunicatorId,
        /// Who.
        rank: harmonaize_abi::Rank,
    },
    /// End a communicator.
    Dissolve {
        /// Which.
        communicator: CommunicatorId,
        /// Why.
        failure: Failure,
    },
    /// Say how things stand; [`Notice::Status`] follows.
    Status {
        /// Comes back.
        id: u64,
    },
    /// End every communicator in order and stop the loop.
    Stop,
}

/// What the engine says.
#[derive(Debug)]
pub enum Notice {
    /// The links of an epoch are up here.
    Prepared {
        /// Which communicator.
        communicator: CommunicatorId,
        /// Which epoch.
        epoch: Epoch,
        /// What its paths to others look like on the wire, where that can be told.
        flows: Vec<(Participant, Flow)>,
    },
    /// An epoch cannot be used; a first one is forgotten, with a later one the current goes on.
    PrepareFailed {
        /// Which communicator.
        communicator: CommunicatorId,
        /// Which epoch.
        epoch: Epoch,
        /// Why, for the operator.
        reason: String,
    },
    /// All participants have switched to an epoch: what was before it is done, and the next change may come.
    Switched {
        /// Which communicator.
        communicator: CommunicatorId,
        /// Which epoch.
        epoch: Epoch,
        /// Its first segment.
        segment: u64,
    },
    /// An operation waits for its turn.
    SlotRequested {
        /// Of which communicator.
        communicator: CommunicatorId,
        /// The slot's number, higher than any before.
        slot: u64,
    },
    /// A turn that was wanted is over, given or not.
    SlotReleased {
        /// Of which communicator.
        communicator: CommunicatorId,
        /// Its number.
        slot: u64,
    },
    /// A communicator has ended with an error.
    Ended {
        /// Which.
        communicator: CommunicatorId,
        /// Why, in terms of ranks.
        failure: Failure,
        /// More for the operator: links and addresses.
        detail: String,
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
    /// Answer to [`Command::Status`].
    Status {
        /// From the command.
        id: u64,
        /// How things stand.
        status: Status,
    },
}

/// How things stand in an engine.
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
    /// Operations that ended well.
    pub completed: u64,
    /// Operations that ended with an error.
    pub failed: u64,
    /// Tensor bytes to peers.
    pub bytes_sent: u64,
    /// Tensor bytes from peers.
    pub bytes_received: u64,
    /// Operations in flight.
    pub in_flight: Vec<InFlight>,
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
