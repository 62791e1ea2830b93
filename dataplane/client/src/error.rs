//! What can go wrong, said so that a person knows what to do.

use crate::{AgentLoss, ProtocolError};
use harmonaize_abi::session::{
    FailureDetail, JoinRefusal, MessageError, RefusalKind, RegionRefused, RequestError,
};
use harmonaize_abi::{Called, Dtype, OperationId, Rank, ReduceOp, Status};
use harmonaize_shm::{EndError, MemoryError};
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nobody answers where the agent should be.
    #[error("cannot connect to the agent at {at}: {source}. {}", remedy(at, source.kind()))]
    Connect {
        /// The socket or the address.
        at: String,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// A variable of the environment is not set, or its value means nothing.
    #[error("{text}")]
    Environment {
        /// Which variable.
        variable: &'static str,
        /// What is wrong with it, and what it may be.
        text: String,
    },
    /// The agent refused the attachment.
    #[error("the agent refused the attachment: {text}")]
    Refused {
        /// For programs.
        kind: RefusalKind,
        /// The agent's words.
        text: String,
    },
    /// Whoever listens there does not know the tenant's secret.
    #[error("whoever listens at {at} is not the provider's agent, or does not know this tenant's secret")]
    Unauthenticated {
        /// The address.
        at: String,
    },
    /// The file with the tenant's secret is of no use.
    #[error("the secret in {}: {reason}", path.display())]
    Secret {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Attachments over RDMA are not in this build.
    #[error("attachments over RDMA need this library built with its feature `rdma`")]
    NoRdma,
    /// An RDMA device, or memory on it.
    #[cfg(feature = "rdma")]
    #[error(transparent)]
    Rdma(#[from] harmonaize_verbs::VerbsError),
    /// The agent broke the protocol, or is of another version.
    #[error("cannot talk to the agent: {0}")]
    Protocol(ProtocolError),
    /// The agent died, closed the attachment, or broke the protocol. Attach again and join again.
    #[error("the agent is lost: {reason}; attach and join again")]
    AgentLost {
        /// What was seen.
        reason: AgentLoss,
    },
    /// The provider has ended the attachment, because it serves the tenant there no longer.
    #[error("the agent has ended the attachment: {text}")]
    Detached {
        /// For programs.
        kind: RefusalKind,
        /// The agent's words.
        text: String,
    },
    /// This process is a child by `fork` of the one that attached, and has only inherited the handle. Attach in this one.
    #[error("this attachment belongs to the process that this one was forked from; attach anew here")]
    Forked,
    /// The kernel refused something.
    #[error("{call}: {source}")]
    System {
        /// Which call.
        call: &'static str,
        /// What it said.
        source: std::io::Error,
    },
    /// A range outside a tensor.
    #[error("elements {offset}..{offset}+{count} of a tensor of {elements}")]
    OutOfRange {
        /// First element asked for.
        offset: u64,
        /// How many.
        count: u64,
        /// The tensor's elements.
        elements: u64,
    },
    /// Memory that cannot be had or reached.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The arena has no room.
    #[error(
        "no room for {requested} bytes in the arena of {arena}: {free} are free, at most {largest} in one piece; drop tensors or attach with a larger arena{}",
        not_grown(*refused)
    )]
    NoRoom {
        /// Bytes asked for.
        requested: u64,
        /// Bytes of the arena.
        arena: u64,
        /// Bytes free.
        free: u64,
        /// Bytes of the largest free piece.
        largest: u64,
        /// Why the agent did not add to it, if it was asked.
        refused: Option<RegionRefused>,
    },
    /// Memory was not added to the attachment, or not let go.
    #[error("memory beside the arena: {0}")]
    Region(RegionRefused),
    /// A tensor of another element type.
    #[error("a tensor of {found} where {expected} is needed")]
    Dtype {
        /// What the call needs.
        expected: Dtype,
        /// What the tensor has.
        found: Dtype,
    },
    /// Elements of this type are not so reduced ([`ReduceOp::takes`]).
    #[error("a tensor of {dtype} has no reduction {reduce}")]
    Reduction {
        /// Which reduction.
        reduce: ReduceOp,
        /// Of which type.
        dtype: Dtype,
    },
    /// Tensors whose sizes do not fit the operation.
    #[error("{0}")]
    Shape(String),
    /// A tensor of another attachment.
    #[error("the tensor belongs to another attachment; tensors and communicator must come from one client")]
    Foreign,
    /// An operation in flight has elements of the slice, or of the tensor that is sliced. One of the two operations
    /// writes them.
    #[error("{bytes} bytes of the slice are in use by an operation in flight; wait for it first")]
    InUse {
        /// How many both have.
        bytes: u64,
    },
    /// As many operations as the rings hold are in flight or unclaimed.
    #[error(
        "{limit} operations are in flight or not yet waited for; wait for some, or attach with more entries"
    )]
    TooMany {
        /// Entries of the rings.
        limit: u32,
    },
    /// Joining a communicator failed.
    #[error(
        "cannot join \"{name}\" as rank {rank} of {ranks}: {text}{}",
        listed(", ranks concerned: ", concerned)
    )]
    Join {
        /// The communicator.
        name: String,
        /// As which rank.
        rank: Rank,
        /// Of how many.
        ranks: u32,
        /// For programs.
        kind: JoinRefusal,
        /// The agent's words.
        text: String,
        /// Those that never came, or are taken or gone.
        concerned: Vec<Rank>,
    },
    /// A communicator does not go on with other ranks. The one before is as it was.
    #[error("cannot regroup \"{name}\": {text}{}", listed(", ranks concerned: ", concerned))]
    Regroup {
        /// The communicator.
        name: String,
        /// For programs.
        kind: JoinRefusal,
        /// The agent's words.
        text: String,
        /// Members that did not come.
        concerned: Vec<Rank>,
    },
    /// A communicator does not split. It goes on as it was, unless it is over.
    #[error("cannot split \"{name}\": {text}{}", listed(", ranks concerned: ", concerned))]
    Split {
        /// The communicator.
        name: String,
        /// For programs.
        kind: JoinRefusal,
        /// The agent's words.
        text: String,
        /// Those that never called, or are gone.
        concerned: Vec<Rank>,
    },
    /// A time-out of operations that the operator does not allow.
    #[error("a time-out of {asked:?} for operations; the operator allows {longest:?}")]
    TimeoutTooLong {
        /// What was asked for.
        asked: Duration,
        /// The operator's ceiling.
        longest: Duration,
    },
    /// A rank has [aborted](crate::Communicator::abort) the communicator.
    #[error("the communicator was aborted{}", by.map_or_else(String::new, |rank| format!(" by rank {rank}")))]
    Aborted {
        /// Which; none if the agent did not say.
        by: Option<Rank>,
    },
    /// A budget was not taken.
    #[error("the budget was not taken: {0}")]
    Budget(String),
    /// Events cannot be read.
    #[error("no events: {0}")]
    Events(String),
    /// No communicator of the tenant's that runs has this name. It is the name in a proposal, hints, or a question
    /// about an agreement or an iteration.
    #[error("no agreement: {0}")]
    NoCommunicator(String),
    /// Nothing came of a proposal, or of a question about an agreement or an iteration.
    #[error("no agreement: {0}")]
    Agreement(String),
    /// A runner has nothing that it could do: the provider cannot be asked now, or does not run its job.
    #[error("no order for the runner: {0}")]
    Runner(String),
    /// The tenant has asked the provider too much lately through this agent. This question was not looked at.
    #[error("too many questions to the provider; the next in {retry_after:?}")]
    TooOften {
        /// After so long one will be answered.
        retry_after: Duration,
    },
    /// Waiting took too long; what was waited for goes on.
    #[error("{what} did not end within {waited:?}; it is still in flight and can be waited for again")]
    WaitTimeout {
        /// What was waited for.
        what: String,
        /// For how long.
        waited: Duration,
    },
    /// The operation's [group](crate::Group) has not ended, so it was not called.
    #[error("the operation's group has not ended, so it was not called")]
    GroupOpen,
    /// The call is on a [group](crate::Group) that has ended.
    #[error("the group of this call has ended")]
    GroupEnded,
    /// State was not protected, sealed or restored.
    #[error(transparent)]
    Protection(#[from] ProtectionError),
    /// An operation failed.
    #[error("{called}, operation {operation}, failed: {status}{}", explained(detail.as_deref()))]
    Operation {
        /// How.
        status: Status,
        /// Its number on its communicator.
        operation: OperationId,
        /// What this rank called.
        called: Called,
        /// What the agent knows: ranks that never arrived or were lost, who called what.
        detail: Option<Box<FailureDetail>>,
    },
}

/// Why state is not [protected](crate::Protection), sealed or restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProtectionError {
    /// The ranks are in too few failure domains.
    #[error(
        "{replicas} replicas of each rank's state take {} failure domains; the ranks are in {domains}: use more machines or fewer \
         replicas, or name each rank's domain",
        u64::from(*replicas) + 1
    )]
    TooFewDomains {
        /// Replicas beside a rank's own state.
        replicas: u32,
        /// Failure domains of the ranks.
        domains: u32,
    },
    /// No rank that is left knows of a step that all ranks had whole.
    #[error("no step was sealed by all ranks before; begin anew, or restore by an older protection")]
    NothingSealed,
    /// States are lost with all their replicas.
    #[error(
        "too many ranks are lost{}; go on from a checkpoint",
        listed("; nobody has the state of ranks ", ranks)
    )]
    TooManyLost {
        /// Whose states, by the ranks of then.
        ranks: Vec<Rank>,
    },
    /// The state of a rank that there was not.
    #[error(
        "the state of rank {rank} is asked for; {ranks} ranks were protected: name ranks as they were then"
    )]
    NoRank {
        /// Which, by the ranks of then.
        rank: Rank,
        /// How many there were.
        ranks: u32,
    },
    /// A tensor is not as it was when it was protected.
    #[error(
        "the tensor \"{name}\" has {} elements of {}; {}",
        found.1, found.0,
        protected.map_or("none was protected".into(), |(dtype, elements)| format!("protected were {elements} of {dtype}"))
    )]
    Changed {
        /// Its name.
        name: String,
        /// Type and elements of what was protected by that name, if anything was.
        protected: Option<(Dtype, u64)>,
        /// Type and elements of the tensor.
        found: (Dtype, u64),
    },
    /// Ranks did not call alike.
    #[error("the ranks do not call alike: {0}")]
    Differ(String),
    /// Other ranks have failed, and have errors of their own.
    #[error("other ranks cannot go on{}; their errors say why", listed(": ranks ", ranks))]
    Peers {
        /// Which.
        ranks: Vec<Rank>,
    },
    /// A state that another rank sent cannot be read.
    #[error("a state from another rank is damaged: {0}")]
    Damaged(String),
    /// A state was not written.
    #[error("cannot write {}: {source}", path.display())]
    File {
        /// Where to.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
}

/// What to do where nobody answers at a socket or address.
fn remedy(at: &str, kind: ErrorKind) -> String {
    let user = rustix::process::geteuid().as_raw();
    match kind {
        ErrorKind::NotFound => format!(
            "There is no socket: start harmonaize-agent on this host, with a [[tenant]] whose `socket` is {at}, or name the socket \
             that the operator has named (HARMONAIZE_SOCKET)"
        ),
        ErrorKind::ConnectionRefused => {
            "Nobody listens there: harmonaize-agent has ended; start it again".to_owned()
        }
        ErrorKind::PermissionDenied => format!(
            "This process runs as user {user}, who may not open it: the operator lets that user into its folder and lists {user} in \
             the tenant's `uids`"
        ),
        _ => format!("Does harmonaize-agent run there, and is user {user} one of the tenant's `uids`?"),
    }
}

impl Error {
    /// Of a variable of the environment.
    pub(crate) fn environment(variable: &'static str, text: impl Into<String>) -> Self {
        Self::Environment { variable, text: text.into() }
    }

    /// Of a question that was not answered.
    pub(crate) fn from_request_error(why: RequestError, refused: fn(String) -> Self) -> Self {
        match why {
            RequestError::TooOften { retry_after: again } => Self::TooOften { retry_after: again },
            RequestError::Refused(text) => refused(text),
        }
    }
}

fn listed(prefix: &str, ranks: &[Rank]) -> String {
    let mut text = String::new();
    for (index, rank) in ranks.iter().enumerate() {
        let _ = write!(text, "{}{rank}", if index == 0 { prefix } else { ", " });
    }
    text
}

fn not_grown(refused: Option<RegionRefused>) -> String {
    refused.map_or_else(String::new, |why| format!("; it does not grow: {why}"))
}

fn explained(detail: Option<&FailureDetail>) -> String {
    let Some(detail) = detail else { return String::new() };
    let mut text = String::new();
    if !detail.text.is_empty() {
        let _ = write!(text, ": {}", detail.text);
    }
    text += &listed("; ranks concerned: ", &detail.ranks);
    for (index, (rank, call)) in detail.calls.iter().enumerate() {
        let _ = write!(text, "{} rank {rank} called {call}", if index == 0 { ";" } else { "," });
    }
    text
}

impl From<MessageError> for Error {
    fn from(error: MessageError) -> Self {
        ProtocolError::Message(error).into()
    }
}

impl From<ProtocolError> for Error {
    fn from(error: ProtocolError) -> Self {
        Self::Protocol(error)
    }
}

impl From<EndError> for Error {
    fn from(error: EndError) -> Self {
        match error {
            EndError::Memory(error) => Self::Memory(error),
            EndError::System { call, source } => Self::System { call, source: source.into() },
            other => Self::AgentLost { reason: AgentLoss::Attachment(Arc::new(other)) },
        }
    }
}
