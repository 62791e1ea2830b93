//! Sessions with tenants' processes, through Unix sockets and over TCP. They decide who may attach and with how much, and
//! have the handshake and requests on their way to the agent.
//!
//! Control traffic only. An attachment's data path is the [`AgentEnd`] handed over in [`SessionRequest::Attached`].

mod attached;
mod connection;
mod handover;
mod log_limit;
mod memory;
mod network;
mod rates;
mod rdma;
mod request_quota;
mod server;
mod socket;
mod stream;
mod tenant;

pub use handover::{Freeze, FrozenSession, SessionImage};
pub use server::{BindError, InheritError, Inherited, SessionServer};
pub(crate) use tenant::{ATTACHMENT_DESCRIPTORS, ProcessUsage};
pub use tenant::{LinkGrant, LinkNeeds, NoRoom, TenantLimits};

use harmonaize_abi::session::{
    BatchChoice, BatchKnobs, Budget, Choice, Constraints, EventBatch, EventCursor, FailureDetail, Hints,
    JobBid, JoinRefused, Knobs, Negotiated, PricedOrder, Refusal, Regrouping, RunnerReport, Secret,
};
use harmonaize_abi::{CommunicatorHandle, Rank};
use harmonaize_shm::{AgentEnd, Memory};
use harmonaize_verbs::{Devices, PortOptions};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;

/// An attachment of this agent, never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct AttachmentId(pub u64);

impl AttachmentId {
    fn next() -> Self {
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Another process of the agent's gave this one: no other is given up to it.
    fn skip(self) {
        NEXT.fetch_max(self.0 + 1, Ordering::Relaxed);
    }
}

static NEXT: AtomicU64 = AtomicU64::new(1);

impl std::fmt::Display for AttachmentId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A tenant: who may attach, in which ways, and with how much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRules {
    /// The tenant's name, for logs and [`SessionRequest::Attached`].
    pub tenant: String,
    /// For processes on this host.
    pub socket: Option<SocketRules>,
    /// What processes that come over TCP must know; none: nobody may come so.
    pub secret: Option<Secret>,
    /// Where processes over TCP may come from, and where queue pairs may be beside this host.
    pub addresses: Vec<IpAddr>,
    /// How much the tenant may have.
    pub quota: Quota,
    /// Whether attachments that map nothing are offered.
    pub remote: bool,
    /// Whether attachments over RDMA are.
    pub rdma: bool,
    /// How long a connection may take to say hello.
    pub handshake: Duration,
}

/// A tenant's Unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketRules {
    /// Where the socket is made. The folder must exist and must not be writable for the tenant.
    pub path: PathBuf,
    /// Users that may attach. With exactly one, the socket file belongs to it and is closed to all others; with more,
    /// everybody can connect and all but these are refused.
    pub uids: Vec<u32>,
}

/// How attachments over RDMA are served.
#[derive(Clone, Debug)]
pub struct RdmaRules {
    /// The devices to choose from.
    pub devices: Devices,
    /// Which, and how packets go.
    pub port: PortOptions,
    /// If no device is named, the one that has this address.
    pub address: IpAddr,
    /// Where tenants' processes may connect over TCP.
    pub listen: Option<SocketAddr>,
    /// How long a connection over TCP may take to prove whose it is.
    pub handshake: Duration,
}

/// How much a tenant may have on this agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Attachments at once.
    pub attachments: u32,
    /// Bytes of tensor memory, over all attachments: arenas, and regions beside them.
    pub arena_bytes: u64,
    /// Regions beside the arenas, over all attachments.
    pub regions: u32,
    /// Entries of a ring.
    pub entries: u32,
    /// Communicators of one attachment at once, those being joined included.
    pub communicators: u32,
    /// Ranks of one communicator.
    pub ranks: u32,
    /// The longest time-out of an operation.
    pub operation_timeout: Duration,
    /// Operations in flight, over all attachments: the sum of their rings' entries.
    pub operations: u32,
    /// Descriptors that the agent holds for the tenant: those of attachments, and one for each path to another agent.
    pub descriptors: u32,
    /// Bytes that links to other agents receive into, and that operations keep between their steps. They count over all
    /// communicators; what is touched of them is the agent's memory.
    pub landing_bytes: u64,
    /// Processes that attach in a second in the long run; as many as `attachments` may at once.
    pub attaches: u32,
    /// Joins in a second in the long run, over all attachments.
    pub joins: u32,
    /// Lines of the log about the tenant in a minute.
    pub log_lines: u32,
    /// Processor time that the sessions of all attachments take in the long run, in percent of a core. At once they may
    /// take a second's worth.
    pub session_percent: u32,
}

impl Default for Quota {
    /// 64 attachments, 16 GiB, 1024 regions, 256 entries, 128 communicators, 1024 ranks, 1 h. Also 16,384 operations, 8,192 descriptors,
    /// 8 GiB for links, 64 attaches and 100 joins a second, 600 lines a minute, and a quarter of a core for sessions.
    fn default() -> Self {
        Self {
            attachments: 64,
            arena_bytes: 16 << 30,
            regions: 1024,
            entries: 256,
            communicators: 128,
            ranks: 1024,
            operation_timeout: Duration::from_secs(3600),
            operations: 64 * 256,
            descriptors: 8192,
            landing_bytes: 8 << 30,
            attaches: 64,
            joins: 100,
            log_lines: 600,
            session_percent: 25,
        }
    }
}

/// A communicator that was joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// Its handle for descriptors of this attachment.
    pub communicator: CommunicatorHandle,
    /// Its full name within the tenant.
    pub name: String,
    /// The process's rank.
    pub rank: Rank,
    /// How many there are.
    pub ranks: u32,
    /// Where it goes on from another: by rank, the rank there, and nothing for newcomers.
    pub before: Vec<Option<Rank>>,
}

/// What a tenant's process wants of the agent. For one attachment they come in order: first `Attached`, last `Detached`.
#[derive(Debug)]
pub enum SessionRequest {
    /// A process attached.
    Attached {
        /// Names the attachment from now on.
        attachment: AttachmentId,
        /// Whose it is.
        tenant: String,
        /// Its data path.
        end: Box<dyn AgentEnd>,
        /// The longest time-out that its operations may have.
        operation_timeout: Duration,
        /// What else bounds the tenant here.
        limits: TenantLimits,
    },
    /// Descriptors may name more memory, if the attachment is mapped.
    AddRegion {
        /// Which attachment.
        attachment: AttachmentId,
        /// The offset of its first byte; no other region has any of its offsets.
        base: u64,
        /// The memory.
        memory: Arc<Memory>,
        /// Whether they may.
        reply: oneshot::Sender<bool>,
    },
    /// They may no longer, unless an operation in flight uses it.
    RemoveRegion {
        /// Which attachment.
        attachment: AttachmentId,
        /// The offset of its first byte.
        base: u64,
        /// Whether it is gone.
        reply: oneshot::Sender<bool>,
    },
    /// Become a rank of a communicator. Name, rank, size and budget are checked. If `reply` is closed, nobody waits any more: the
    /// process went away.
    Join {
        /// Which attachment.
        attachment: AttachmentId,
        /// The communicator's full name within the tenant.
        name: String,
        /// Which rank.
        rank: Rank,
        /// Of how many.
        ranks: u32,
        /// How long the process is ready to wait for the others.
        timeout: Duration,
        /// What may be lost of its tensors.
        budget: Budget,
        /// What it has become, or why not.
        reply: oneshot::Sender<Result<Joined, JoinRefused>>,
    },
    /// Become a rank of a communicator that goes on with fewer or more ranks. A name is checked, and a handle was joined. If `reply` is
    /// closed, nobody waits any more.
    Regroup {
        /// Which attachment.
        attachment: AttachmentId,
        /// The member that it is, or the communicator that it wants into.
        who: Regrouping,
        /// What new ranks ascend by.
        key: u32,
        /// Fewest ranks to go on with.
        min_ranks: u32,
        /// How long the process is ready to wait for the others.
        timeout: Duration,
        /// What it has become, or why not.
        reply: oneshot::Sender<Result<Joined, JoinRefused>>,
    },
    /// Become a rank of a new communicator with those of one that was joined that name the same color. If `reply` is closed, nobody waits
    /// any more.
    Split {
        /// Which attachment.
        attachment: AttachmentId,
        /// Handle from joining.
        communicator: CommunicatorHandle,
        /// Who names the same is in the same.
        color: Option<u32>,
        /// What new ranks ascend by.
        key: u32,
        /// How long the process is ready to wait for the others.
        timeout: Duration,
        /// What it has become, or why not.
        reply: oneshot::Sender<Result<Joined, JoinRefused>>,
    },
    /// Leave a communicator that was joined.
    Leave {
        /// Which attachment.
        attachment: AttachmentId,
        /// Handle from joining.
        communicator: CommunicatorHandle,
    },
    /// Abort a communicator that was joined.
    Abort {
        /// Which attachment.
        attachment: AttachmentId,
        /// Handle from joining.
        communicator: CommunicatorHandle,
    },
    /// Say why a communicator ended, if it has.
    Detail {
        /// Which attachment.
        attachment: AttachmentId,
        /// Handle from joining.
        communicator: CommunicatorHandle,
        /// What this attachment's rank may know.
        reply: oneshot::Sender<Option<FailureDetail>>,
    },
    /// Another budget, which makes sense, for a communicator that was joined.
    SetBudget {
        /// Which attachment.
        attachment: AttachmentId,
        /// Handle from joining.
        communicator: CommunicatorHandle,
        /// What may be lost.
        budget: Budget,
    },
    /// Ask control.
    Ask {
        /// Which attachment.
        attachment: AttachmentId,
        /// What, which makes sense.
        question: Question,
    },
    /// The process is gone, or the socket is going down.
    Detached {
        /// Which attachment.
        attachment: AttachmentId,
    },
}

impl SessionRequest {
    /// Whose it is.
    pub fn attachment(&self) -> AttachmentId {
        match self {
            Self::Attached { attachment, .. }
            | Self::AddRegion { attachment, .. }
            | Self::RemoveRegion { attachment, .. }
            | Self::Join { attachment, .. }
            | Self::Regroup { attachment, .. }
            | Self::Split { attachment, .. }
            | Self::Leave { attachment, .. }
            | Self::Abort { attachment, .. }
            | Self::Detail { attachment, .. }
            | Self::SetBudget { attachment, .. }
            | Self::Ask { attachment, .. }
            | Self::Detached { attachment } => *attachment,
        }
    }
}

/// What a tenant's process asks of control. Each has a `reply`: the answer, or why there is none; dropped where control cannot
/// be asked. If it is closed, nobody waits any more.
#[derive(Debug)]
pub enum Question {
    /// Read the tenant's events.
    Events {
        /// Where the process stands; what comes from now on if nowhere.
        from: Option<EventCursor>,
        /// How long it waits for the first.
        wait: Duration,
        /// What there is.
        reply: oneshot::Sender<Result<EventBatch, Refusal>>,
    },
    /// Negotiate for the tenant.
    Negotiate {
        /// The communicator's name.
        communicator: String,
        /// What is wanted; nothing to ask what is in force.
        propose: Option<Constraints>,
        /// What came of it.
        reply: oneshot::Sender<Result<Negotiated, Refusal>>,
    },
    /// An iteration begins.
    Iteration {
        /// The communicator's name.
        communicator: String,
        /// What is left to the provider.
        knobs: Knobs,
        /// The batch, if that is.
        batch: Option<BatchKnobs>,
        /// What it chose.
        reply: oneshot::Sender<Result<(Choice, Option<BatchChoice>), Refusal>>,
    },
    /// What is expected of a communicator.
    Hint {
        /// The communicator's name.
        communicator: String,
        /// What.
        hints: Hints,
        /// Once it is taken note of.
        reply: oneshot::Sender<Result<(), Refusal>>,
    },
    /// What a runner is to do.
    Runner {
        /// What it says of itself.
        report: RunnerReport,
        /// Whether the job's workers run on when it gets more hosts or fewer.
        elastic: bool,
        /// What the job bids, where no bid of it stands.
        bid: Option<JobBid>,
        /// How long it waits for something to do.
        wait: Duration,
        /// What it is to do.
        reply: oneshot::Sender<Result<PricedOrder, Refusal>>,
    },
    /// What a job bids from now on.
    Bid {
        /// The job's name.
        job: String,
        /// What stands from now on.
        bid: JobBid,
        /// Once it does.
        reply: oneshot::Sender<Result<(), Refusal>>,
    },
}
