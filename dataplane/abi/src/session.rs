//! Messages between a tenant's process and its agent, over a Unix socket or, after a [proof](AuthRequest), over TCP. A handshake
//! opens an attachment. Others join and leave communicators, and ask why an operation failed.
//!
//! A message is a little-endian `u32` length (of what follows, at most [`MAX_MESSAGE`]) and a postcard encoding. The
//! first message each way opens with [`MAGIC`] and the sender's version, in that order and for ever, so that any two
//! versions can tell each other what they speak. File descriptors travel with the first byte of [`Welcome`]
//! (see [`Access`] for which), of [`Request::Register`] and of [`Answer::Grown`].

use crate::{ABI_VERSION, Rank, Signature, Status};
use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

mod auth;
mod bid;
mod budget;
mod constraints;
mod event;
mod hints;
mod knobs;
mod list;
mod name;
mod offer;
mod region;
mod request_error;
mod runner;
mod succession;

pub use auth::{AuthConfirmation, AuthRequest, Challenge, MIN_SECRET, Response, Secret};
pub use bid::{BIDS, BidError, HostPrice, JobBid, MAX_CHECKPOINT_NS, MAX_PRICE, Price, PricedOrder};
pub use budget::{Budget, MAX_CODECS};
pub use constraints::{
    Agreement, BUSBW, Clause, Constraints, MAX_COMPLETIONS, MAX_TARGET_BYTES, MAX_WEIGHT,
    MIN_BANDWIDTH_BYTES, Negotiated, OnFailure, Priority, REGROUP, Reason, Record, TARGETS, Target,
};
pub use event::{
    ALL_EVENTS, EncodedBatch, EncodedEvent, Event, EventBatch, EventCursor, EventKind, MAX_EVENTS, released,
};
pub use hints::{Expected, Hints, HintsError, MAX_EXPECTED_BYTES, MAX_SEQUENCE, MAX_TASK_PRIORITY, PERIODS};
pub use knobs::{
    BATCHES, BatchChoice, BatchKnobs, Checkpoint, Choice, ChoiceReason, Knobs, KnobsError, LearningRate,
    MAX_ACCUMULATE, MAX_SAMPLES,
};
pub use name::is_name;
pub use offer::{Offer, PairEnd, Registered};
pub use region::{AddedRegion, RegionRefused};
pub use request_error::{AgentRefusal, Refusal, RequestError, TYPED_REFUSALS};
pub use runner::{
    ElasticOrder, RUNNERS, RecallReason, RunnerError, RunnerOrder, RunnerReport, WorkerPlace, WorkerState,
};
pub use succession::{SUCCESSORS, Succession};

/// Opens the first message each way.
pub const MAGIC: [u8; 8] = *b"harmoniz";
/// Most bytes of one message, without its length.
pub const MAX_MESSAGE: usize = 64 * 1024;
/// Most bytes of a communicator's name.
pub const MAX_NAME: usize = 128;
/// Most ranks that a [`FailureDetail`] or a [`JoinRefused`] lists; more are left out.
pub const MAX_LISTED: usize = 1024;
/// Most bytes of a text for people; longer ones are cut.
pub const MAX_TEXT: usize = 1024;
/// Most reasons of a refused proposal.
pub const MAX_REASONS: usize = 16;

/// What a communicator is called wherever one is named: `job/name`, or `name` without a job. Those of a split are called after the one
/// before: `name#1.7` is of its first split, and of color 7.
pub fn full_name(job: &str, name: &str) -> String {
    if job.is_empty() { String::from(name) } else { [job, "/", name].concat() }
}

/// The job in a [full name](full_name); empty without one.
pub fn job_of(full_name: &str) -> &str {
    full_name.split_once('/').map_or("", |(job, _)| job)
}

/// How the agent reaches the tenant's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// Both map the arena. With [`Welcome`] come three descriptors: arena, ring segment, and the doorbell, a stream socket
    /// on which either side sends a byte to wake the other.
    Mapped,
    /// Nothing is mapped: descriptors and tensor bytes travel over a stream socket, the one descriptor that comes with
    /// [`Welcome`].
    Remote,
    /// Nothing is mapped: descriptors and tensors are written and read over a queue pair. No descriptors come with
    /// [`Welcome`]; a [`PairEnd`] follows it.
    Rdma,
}

impl Access {
    /// How many descriptors come with [`Welcome`].
    pub const fn descriptors(self) -> usize {
        match self {
            Self::Mapped => 3,
            Self::Remote => 1,
            Self::Rdma => 0,
        }
    }
}

/// What the tenant asks for: the first message on a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// How tensors are reached.
    pub access: Access,
    /// Bytes of tensor memory; rounded up to whole pages by the agent.
    pub arena_bytes: u64,
    /// Entries of each ring, a power of two: most operations in flight.
    pub entries: u32,
}

/// The agent's first message when it accepts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Bytes of tensor memory granted; offsets in descriptors are below it.
    pub arena_bytes: u64,
    /// Entries of each ring, as asked.
    pub entries: u32,
    /// Most communicators that this attachment may be in at once.
    pub communicators: u32,
    /// The longest time-out that an operation may have, in nanoseconds.
    pub operation_timeout_ns: u64,
}

/// Why an attachment was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RefusalKind {
    /// The agent speaks another version.
    Version,
    /// The first message was no hello.
    Malformed,
    /// The connecting user or address is not one of the tenant's, or did not prove to be.
    User,
    /// The tenant has as many attachments as it may have.
    Attachments,
    /// The arena asked for is empty or exceeds what the tenant has left.
    Arena,
    /// Ring entries not a power of two, or too many.
    Entries,
    /// This access is not offered here.
    Access,
    /// No hello arrived in time.
    Slow,
    /// The agent could not create what the attachment needs, or is going down.
    Agent,
    /// The tenant was attached, and is served here no longer.
    Removed,
}

/// The agent's first and last message when it refuses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Why, for programs.
    pub kind: RefusalKind,
    /// Why and what to do, for people.
    pub text: String,
}

/// A request of the tenant's process after the handshake. `id` is its own choice and comes back with the answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// Become `rank` of the communicator `name`, of `ranks` ranks. Answered when all have come, or none will.
    Join {
        /// Comes back.
        id: u64,
        /// Name of the job; empty without one. Communicators of different jobs are different ones.
        job: String,
        /// The communicator's name, common to its ranks. With the job's at most [`MAX_NAME`] bytes; see [`full_name`].
        name: String,
        /// This rank, below `ranks`.
        rank: Rank,
        /// How many there are.
        ranks: u32,
        /// How long to wait for the others, in nanoseconds.
        timeout_ns: u64,
        /// What may be lost of its tensors.
        budget: Budget,
    },
    /// Become a rank of a communicator that goes on with fewer or more ranks. It is a new communicator of the same
    /// name. Answered as a join is.
    Regroup {
        /// Comes back.
        id: u64,
        /// Who asks.
        who: Regrouping,
        /// New ranks ascend by this; where it is the same members come first, by rank, then newcomers as they came.
        key: u32,
        /// Fewest ranks that it goes on with.
        min_ranks: u32,
        /// How long to wait for members; then it goes on with those who came, if they are enough. A newcomer waits so long for them.
        timeout_ns: u64,
    },
    /// Become a rank of a new communicator by a split of one's own. Its ranks name the same color. One's own
    /// communicator goes on. Answered once all its ranks have asked, as a join is: of a rank without color with
    /// [`JoinRefusal::LeftOut`].
    Split {
        /// Comes back.
        id: u64,
        /// Handle from [`Answer::Joined`].
        communicator: u32,
        /// Who names the same is in the same.
        color: Option<u32>,
        /// New ranks ascend by this; where it is the same by rank.
        key: u32,
        /// How long to wait for the others, in nanoseconds.
        timeout_ns: u64,
    },
    /// Leave a communicator. Its operations in flight complete with an error.
    Leave {
        /// Comes back.
        id: u64,
        /// Handle from [`Answer::Joined`].
        communicator: u32,
    },
    /// Abort a communicator: its operations end at all ranks, with an error that names this one. Of one that is over, nothing.
    Abort {
        /// Comes back.
        id: u64,
        /// Handle from [`Answer::Joined`].
        communicator: u32,
    },
    /// Ask why the communicator ended.
    Detail {
        /// Comes back. With [`RUNNERS`] the answer may be [`Answer::TakesRunners`], with [`BIDS`] [`Answer::TakesBids`]. With
        /// [`SUCCESSORS`] the process reads [`Answer::Succession`].
        id: u64,
        /// Handle from [`Answer::Joined`].
        communicator: u32,
    },
    /// Use another budget from now on, as far as this rank is concerned. It is in effect once all ranks have asked for
    /// the same.
    SetBudget {
        /// Comes back.
        id: u64,
        /// Handle from [`Answer::Joined`].
        communicator: u32,
        /// What may be lost.
        budget: Budget,
    },
    /// The tenant's events. Answered once there is one, or the wait is over; one such request at a time.
    Events {
        /// Comes back. With [`ALL_EVENTS`] it is answered by [`Answer::AllEvents`], else by [`Answer::Events`].
        id: u64,
        /// Where the reader stands; what comes from now on if it stands nowhere.
        from: Option<EventCursor>,
        /// How long to wait for the first, in nanoseconds.
        wait_ns: u64,
    },
    /// Propose what the provider shall promise for a communicator of the tenant's, or ask what it has promised.
    Negotiate {
        /// Comes back. With [`TYPED_REFUSALS`] the answer may be [`Answer::NoCommunicator`].
        id: u64,
        /// The communicator's name; this process need not be in it.
        communicator: String,
        /// What is wanted; nothing to ask.
        propose: Option<Constraints>,
    },
    /// An iteration of a communicator's job begins: what the provider chooses for it.
    Iteration {
        /// Comes back, as of [`Request::Negotiate`]. With [`BATCHES`] the answer may be [`Answer::TakesBatches`].
        id: u64,
        /// The communicator's name.
        communicator: String,
        /// What is left to the provider.
        knobs: Knobs,
    },
    /// What is expected of a communicator of the tenant's, in place of what was before.
    Hint {
        /// Comes back, as of [`Request::Negotiate`].
        id: u64,
        /// The communicator's name; this process need not be in it.
        communicator: String,
        /// None: nothing is expected any more.
        hints: Hints,
    },
    /// More tensor memory, made by the agent.
    Grow {
        /// Comes back.
        id: u64,
        /// How much, in bytes; rounded up to whole pages by the agent.
        bytes: u64,
    },
    /// Tensor memory that the process has already. With the first byte comes the descriptor of a memfd.
    Register {
        /// Comes back.
        id: u64,
        /// First byte of the file that is meant, a multiple of a page.
        offset: u64,
        /// How many bytes, a multiple of a page.
        bytes: u64,
    },
    /// Have the agent let go of memory that was added.
    Unregister {
        /// Comes back.
        id: u64,
        /// [`AddedRegion::base`].
        base: u64,
    },
    /// As [`Request::Iteration`], where the batch is left to the provider too; only to an agent that has answered
    /// [`Answer::TakesBatches`].
    Batch {
        /// Comes back, as of [`Request::Negotiate`].
        id: u64,
        /// The communicator's name.
        communicator: String,
        /// What else is left to the provider.
        knobs: Knobs,
        /// The batch.
        batch: BatchKnobs,
    },
    /// The process starts workers on this host for a job: what it is to do. Answered once it is to do something, or the wait is over;
    /// one such request at a time, and only to an agent that has answered [`Answer::TakesRunners`].
    Runner {
        /// Comes back.
        id: u64,
        /// What it says of itself.
        report: RunnerReport,
        /// How long to wait, in nanoseconds.
        wait_ns: u64,
    },
    /// The same of a runner of an elastic job, to such an agent.
    Elastic {
        /// Comes back.
        id: u64,
        /// What it says of itself.
        report: RunnerReport,
        /// How long to wait, in nanoseconds.
        wait_ns: u64,
    },
    /// To [`Succession::Connect`]: where this process's new queue pair is.
    Reconnect {
        /// Comes back.
        id: u64,
        /// The agent's queue pair that it is joined to. What is about another is passed over.
        agent: PairEnd,
        /// This one, and the arena.
        offer: Offer,
        /// How many completions have arrived here since the attachment began.
        arrived: u64,
    },
    /// What a job of the tenant's bids from now on; only to an agent that has answered [`Answer::TakesBids`].
    Bid {
        /// Comes back.
        id: u64,
        /// The job's name.
        job: String,
        /// What stands from now on.
        bid: JobBid,
    },
    /// As [`Request::Runner`] or, of an elastic job, [`Request::Elastic`], with prices; to such an agent.
    Bidding {
        /// Comes back.
        id: u64,
        /// What it says of itself.
        report: RunnerReport,
        /// Whether the job's workers run on when it gets more hosts or fewer.
        elastic: bool,
        /// What the job bids, where no bid of it stands.
        bid: Option<JobBid>,
        /// How long to wait, in nanoseconds.
        wait_ns: u64,
    },
}

/// Who regroups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Regrouping {
    /// A member of a communicator, which may have ended.
    Member {
        /// Handle from [`Answer::Joined`].
        communicator: u32,
    },
    /// A process that wants to be one.
    Newcomer {
        /// The communicator's name; at most [`MAX_NAME`] bytes.
        name: String,
    },
}

/// The agent's answer to the request with the same `id`. Answers come in any order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// All ranks are there.
    Joined {
        /// Of the request.
        id: u64,
        /// Names the communicator in submissions of this attachment.
        communicator: u32,
        /// Its [full name](full_name).
        name: String,
        /// This process's rank.
        rank: Rank,
        /// How many there are.
        ranks: u32,
        /// Where it goes on from another: by rank, the rank there, and nothing for newcomers. At most [`MAX_LISTED`]; else empty.
        before: Vec<Option<Rank>>,
    },
    /// Not joined.
    JoinRefused {
        /// Of the request.
        id: u64,
        /// Why.
        refused: JoinRefused,
    },
    /// Left; the handle means nothing any more.
    Left {
        /// Of the request.
        id: u64,
    },
    /// The agent ends the communicator, if this attachment is in it and it is not over.
    Aborted {
        /// Of the request.
        id: u64,
    },
    /// Why the communicator ended; nothing if it has not, or is not known.
    Detail {
        /// Of the request.
        id: u64,
        /// What is known.
        detail: Option<FailureDetail>,
    },
    /// The budget was passed on, or why not.
    BudgetSet {
        /// Of the request.
        id: u64,
        /// Or so.
        refused: Option<RequestError>,
    },
    /// Events of the kinds of release 0.1.0, or why there are none to be had.
    Events {
        /// Of the request.
        id: u64,
        /// Or not.
        read: Result<released::EventBatch, RequestError>,
    },
    /// What came of a proposal, or what is agreed on.
    Negotiated {
        /// Of the request.
        id: u64,
        /// Or why nothing came of it.
        outcome: Result<Negotiated, RequestError>,
    },
    /// What the provider chose.
    Iteration {
        /// Of the request.
        id: u64,
        /// Or not.
        choice: Result<Choice, RequestError>,
    },
    /// Hints were taken note of, or why not.
    Hinted {
        /// Of the request.
        id: u64,
        /// Or so.
        refused: Option<RequestError>,
    },
    /// There is more memory. With the first byte comes the descriptor of its memfd.
    Grown {
        /// Of the request.
        id: u64,
        /// Or not, and then no descriptor comes.
        added: Result<AddedRegion, RegionRefused>,
    },
    /// Descriptors may name the memory.
    Registered {
        /// Of the request.
        id: u64,
        /// Or not.
        added: Result<AddedRegion, RegionRefused>,
    },
    /// The agent has let go of the memory, or why not.
    Unregistered {
        /// Of the request.
        id: u64,
        /// Or so.
        refused: Option<RegionRefused>,
    },
    /// The agent's last word: it ends the attachment.
    Detached {
        /// 0: of no request.
        id: u64,
        /// Why.
        refused: Refused,
    },
    /// Events, or why there are none to be had.
    AllEvents {
        /// Of the request, with [`ALL_EVENTS`].
        id: u64,
        /// Or not.
        read: Result<EncodedBatch, RequestError>,
    },
    /// No communicator of the tenant's that runs has the name in the request.
    NoCommunicator {
        /// Of the request, with [`TYPED_REFUSALS`].
        id: u64,
        /// For people.
        text: String,
    },
    /// The agent reads [`Request::Batch`].
    TakesBatches {
        /// Of the request, with [`BATCHES`].
        id: u64,
    },
    /// What the provider chose; without a batch where it cannot be asked, or is of a release that chooses none.
    Batch {
        /// Of the request.
        id: u64,
        /// Or not.
        choice: Result<(Choice, Option<BatchChoice>), RequestError>,
    },
    /// The agent reads [`Request::Runner`] and [`Request::Elastic`].
    TakesRunners {
        /// Of the request, with [`RUNNERS`].
        id: u64,
    },
    /// What the runner is to do, or why that was not looked at.
    Runner {
        /// Of the request.
        id: u64,
        /// Or so.
        order: Result<RunnerOrder, RequestError>,
    },
    /// The same for [`Request::Elastic`].
    Elastic {
        /// Of the request.
        id: u64,
        /// Or so.
        order: Result<ElasticOrder, RequestError>,
    },
    /// Over RDMA: the agent has a successor, or is about to.
    Succession {
        /// 0: of no request, or of [`Request::Reconnect`].
        id: u64,
        /// What becomes of the queue pair.
        step: Succession,
    },
    /// The agent reads [`Request::Bid`] and [`Request::Bidding`].
    TakesBids {
        /// Of the request, with [`BIDS`].
        id: u64,
    },
    /// The bid stands, or why not.
    Bid {
        /// Of the request.
        id: u64,
        /// Or so.
        refused: Option<RequestError>,
    },
    /// What the runner is to do, and at which price.
    Bidding {
        /// Of the request.
        id: u64,
        /// Or so.
        order: Result<PricedOrder, RequestError>,
    },
}

impl Answer {
    /// The request's id.
    pub const fn id(&self) -> u64 {
        match self {
            Self::Joined { id, .. }
            | Self::JoinRefused { id, .. }
            | Self::Left { id }
            | Self::Aborted { id }
            | Self::Detail { id, .. }
            | Self::BudgetSet { id, .. }
            | Self::Events { id, .. }
            | Self::Negotiated { id, .. }
            | Self::Iteration { id, .. }
            | Self::Hinted { id, .. }
            | Self::Grown { id, .. }
            | Self::Registered { id, .. }
            | Self::Unregistered { id, .. }
            | Self::Detached { id, .. }
            | Self::AllEvents { id, .. }
            | Self::NoCommunicator { id, .. }
            | Self::TakesBatches { id }
            | Self::Batch { id, .. }
            | Self::TakesRunners { id }
            | Self::Runner { id, .. }
            | Self::Elastic { id, .. }
            | Self::Succession { id, .. }
            | Self::TakesBids { id }
            | Self::Bid { id, .. }
            | Self::Bidding { id, .. } => *id,
        }
    }
}

/// Why joining failed, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum JoinRefusal {
    /// Name empty, too long, or with control characters.
    Name,
    /// Rank not below the number of ranks, or no ranks at all.
    Rank,
    /// Another process has this rank.
    Taken,
    /// Ranks disagree on how many they are.
    Size,
    /// Some ranks never came.
    Timeout,
    /// As many communicators or ranks as the tenant may have.
    Quota,
    /// A rank that had come went away before all were there.
    RankLost,
    /// The provider cannot form communicators at the moment.
    Unavailable,
    /// A bug or broken invariant in the agent.
    Internal,
    /// The budget makes no sense, or ranks name different ones.
    Budget,
    /// The communicator to go on from, or the one that was to split, is over. The first is over by what its tenant
    /// agreed on for failures.
    Over,
    /// No error: the rank named no color in a split that has ended well.
    LeftOut,
}

/// Why joining failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinRefused {
    /// For programs.
    pub kind: JoinRefusal,
    /// For people.
    pub text: String,
    /// The ranks concerned: those that never came, or that are taken or gone.
    pub ranks: Vec<Rank>,
}

/// Why a communicator ended, as far as its ranks may know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureDetail {
    /// The kind of failure.
    pub status: Status,
    /// Number of the operation on its communicator, from 0.
    pub operation: u64,
    /// What this rank had called, if it had.
    pub signature: Option<Signature>,
    /// The ranks concerned: those that never arrived, were lost, or aborted it.
    pub ranks: Vec<Rank>,
    /// Who called what, where ranks called different operations.
    pub calls: Vec<(Rank, Signature)>,
    /// For people.
    pub text: String,
}

/// Cuts lists and text to what a message holds: [`MAX_LISTED`] entries, [`MAX_TEXT`] bytes.
pub trait Bounded {
    /// The same, cut.
    fn bounded(self) -> Self;
}

impl Bounded for String {
    fn bounded(mut self) -> Self {
        self.truncate(self.floor_char_boundary(MAX_TEXT));
        self
    }
}

impl Bounded for JoinRefused {
    fn bounded(mut self) -> Self {
        self.ranks.truncate(MAX_LISTED);
        self.text = self.text.bounded();
        self
    }
}

impl Bounded for FailureDetail {
    fn bounded(mut self) -> Self {
        self.ranks.truncate(MAX_LISTED);
        self.calls.truncate(MAX_LISTED);
        self.text = self.text.bounded();
        self
    }
}

impl Bounded for EventBatch {
    fn bounded(mut self) -> Self {
        for event in &mut self.events {
            event.communicator.truncate(event.communicator.floor_char_boundary(MAX_NAME));
            match &mut event.kind {
                EventKind::Failure { ranks, .. }
                | EventKind::Maintenance { ranks, .. }
                | EventKind::Stragglers { ranks, .. } => ranks.truncate(MAX_LISTED),
                EventKind::Congestion(_)
                | EventKind::Capacity(_)
                | EventKind::PlanChanged
                | EventKind::Newcomers { .. }
                | EventKind::AgreementBroken { .. }
                | EventKind::AgreementEnded { .. } => {}
            }
        }
        self.events.truncate(MAX_EVENTS);
        self
    }
}

impl Bounded for Negotiated {
    fn bounded(mut self) -> Self {
        let constraints = match &mut self {
            Self::Agreed(agreement) => Some(&mut agreement.constraints),
            Self::Refused { reasons, counter } => {
                reasons.truncate(MAX_REASONS);
                for reason in reasons {
                    reason.text = core::mem::take(&mut reason.text).bounded();
                }
                counter.as_mut()
            }
        };
        if let Some(constraints) = constraints {
            constraints.completions.truncate(MAX_COMPLETIONS);
        }
        self
    }
}

/// Why a message could not be encoded or understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageError {
    /// Its length is over [`MAX_MESSAGE`] or zero.
    Length(usize),
    /// The other side speaks another version: this one.
    Version(u16),
    /// It does not open with [`MAGIC`].
    Magic,
    /// Not an encoding of the expected message.
    Malformed,
}

impl core::fmt::Display for MessageError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Length(bytes) => write!(f, "a message of {bytes} bytes; 1 to {MAX_MESSAGE} are allowed"),
            Self::Version(theirs) => {
                write!(f, "the other side speaks version {theirs}, this one speaks {ABI_VERSION}")
            }
            Self::Magic => f.write_str("the other side does not speak this protocol"),
            Self::Malformed => f.write_str("a message that cannot be decoded"),
        }
    }
}

impl core::error::Error for MessageError {}

fn framed(opening: &[u8], message: &impl Serialize) -> Result<Vec<u8>, MessageError> {
    let mut bytes = Vec::from([0; 4]);
    bytes.extend_from_slice(opening);
    let mut bytes = postcard::to_extend(message, bytes).map_err(|_| MessageError::Malformed)?;
    let length = bytes.len() - 4;
    if length == 0 || length > MAX_MESSAGE {
        return Err(MessageError::Length(length));
    }
    if let Some(prefix) = bytes.first_chunk_mut() {
        *prefix = (length as u32).to_le_bytes();
    }
    Ok(bytes)
}

fn decoded<T: DeserializeOwned>(message: &[u8]) -> Result<T, MessageError> {
    match postcard::take_from_bytes(message) {
        Ok((value, [])) => Ok(value),
        _ => Err(MessageError::Malformed),
    }
}

/// A message with its length, ready to be written.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, MessageError> {
    framed(&[], message)
}

/// A message without its length.
pub fn decode<T: DeserializeOwned>(message: &[u8]) -> Result<T, MessageError> {
    decoded(message)
}

/// A first message ([`AuthRequest`] or [`Hello`], or the answer to it) with its length, ready to be written.
pub fn encode_first(message: &impl Serialize) -> Result<Vec<u8>, MessageError> {
    let mut opening = [0; 10];
    let (magic, version) = opening.split_at_mut(MAGIC.len());
    magic.copy_from_slice(&MAGIC);
    version.copy_from_slice(&ABI_VERSION.to_le_bytes());
    framed(&opening, message)
}

/// A first message without its length. Magic and version are looked at before anything else.
pub fn decode_first<T: DeserializeOwned>(message: &[u8]) -> Result<T, MessageError> {
    let (magic, rest) = message.split_first_chunk::<8>().ok_or(MessageError::Malformed)?;
    if *magic != MAGIC {
        return Err(MessageError::Magic);
    }
    let (version, body) = rest.split_first_chunk::<2>().ok_or(MessageError::Malformed)?;
    match u16::from_le_bytes(*version) {
        ABI_VERSION => decoded(body),
        other => Err(MessageError::Version(other)),
    }
}

/// The length of the message that follows a prefix.
pub fn length(prefix: [u8; 4]) -> Result<usize, MessageError> {
    let length = u32::from_le_bytes(prefix) as usize;
    if length == 0 || length > MAX_MESSAGE {
        return Err(MessageError::Length(length));
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Collective, Dtype, ReduceOp};
    use alloc::vec;

    #[test]
    fn the_largest_detail_fits_a_message() {
        let signature = Signature {
            collective: Collective::Barrier,
            dtype: Dtype::F64,
            reduce: ReduceOp::Average,
            root: Rank(u32::MAX),
            count: u64::MAX,
            uneven: true,
        };
        let detail = FailureDetail {
            status: Status::Mismatch,
            operation: u64::MAX,
            signature: Some(signature),
            ranks: vec![Rank(u32::MAX); 5000],
            calls: vec![(Rank(u32::MAX), signature); 5000],
            text: "ü".repeat(5000),
        };
        let answer = Answer::Detail { id: u64::MAX, detail: Some(detail.bounded()) };
        let bytes = encode(&answer).unwrap();
        assert_eq!(length(*bytes.first_chunk().unwrap()).unwrap(), bytes.len() - 4);
        assert_eq!(decode::<Answer>(&bytes[4..]).unwrap(), answer);
    }

    #[test]
    fn the_largest_batch_of_events_fits_a_message() {
        let kind = EventKind::Maintenance { ranks: vec![Rank(u32::MAX); 5000], at_ns: u64::MAX };
        let communicator = "ü".repeat(200);
        let event = Event { number: u64::MAX, communicator, kind, since_ns: u64::MAX };
        let cursor = EventCursor { feed: u64::MAX, next: u64::MAX };
        let batch = EventBatch { missed: u64::MAX, events: vec![event; 50], cursor }.bounded();
        let read = Ok(released::EventBatch::from(batch.clone()));
        let answers =
            [Answer::Events { id: 1, read }, Answer::AllEvents { id: u64::MAX, read: Ok(batch.into()) }];
        for answer in answers {
            assert_eq!(decode::<Answer>(&encode(&answer).unwrap()[4..]).unwrap(), answer);
        }
    }

    #[test]
    fn older_processes_get_the_kinds_they_know() {
        let late = EventKind::Stragglers { cause: crate::StragglerCause::Network, ranks: vec![Rank(3)] };
        let event = |number, kind| Event { number, communicator: "job".into(), kind, since_ns: 9 };
        let cursor = EventCursor { feed: 7, next: 5 };
        let events = vec![event(3, late), event(4, EventKind::PlanChanged)];
        let batch = EventBatch { missed: 1, events, cursor };
        let older = EventBatch::from(released::EventBatch::from(batch.clone()));
        assert_eq!(older, EventBatch { events: batch.events[1..].to_vec(), ..batch.clone() });
        // What reads all kinds passes over those of a later release.
        let mut encoded = EncodedBatch::from(batch.clone());
        assert_eq!(EventBatch::from(encoded.clone()), batch);
        encoded.events[0].kind = vec![99, 1, 2];
        assert_eq!(EventBatch::from(encoded), older);
    }

    #[test]
    fn versions_and_strangers_are_told_apart() {
        let hello = Hello { access: Access::Remote, arena_bytes: 1 << 40, entries: 64 };
        let bytes = encode_first(&hello).unwrap();
        assert_eq!(decode_first::<Hello>(&bytes[4..]), Ok(hello));
        let mut newer = bytes[4..].to_vec();
        newer[8] = 9;
        newer.truncate(10);
        assert_eq!(decode_first::<Hello>(&newer), Err(MessageError::Version(9)));
        assert_eq!(decode_first::<Hello>(b"GET / HTTP/1.1"), Err(MessageError::Magic));
        assert_eq!(decode_first::<Hello>(b"GET"), Err(MessageError::Malformed));
        let mut longer = bytes[4..].to_vec();
        longer.push(0);
        assert_eq!(decode_first::<Hello>(&longer), Err(MessageError::Malformed));
        assert_eq!(length([0; 4]), Err(MessageError::Length(0)));
        assert_eq!(length((65537u32).to_le_bytes()), Err(MessageError::Length(65537)));
    }
}
