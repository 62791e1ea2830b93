//! What control does: messages, entries of the operator's log, and what is to be stored.

use crate::state::reason::{Reason, TurnsEnd};
use harmonaize_abi::session::RecallReason;
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_api::v1::{self, FailureKind, to_agent};
use harmonaize_planner::{InterleaveReason, PlanReason};
use harmonaize_store::Change;
use std::time::Duration;

/// An agent's session, or a connection that may become one. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// What control does.
#[derive(Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "most are messages, and each is carried out where it was made")]
pub enum Output {
    /// Send to an agent.
    Send(SessionId, to_agent::Message),
    /// Close a session once what was sent is out. The state has forgotten it.
    End(SessionId),
    /// The answer to [`Controller::ask_status`](crate::state::Controller::ask_status).
    Status(u64, Box<v1::StatusReply>),
    /// For the operator's log.
    Fact(Fact),
    /// Keep this; then [`Controller::apply_stored`](crate::state::Controller::apply_stored) or
    /// `store_failed`.
    Keep(Vec<Change>),
}

/// Something that an operator wants to read about.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // each field is named after what it holds
pub enum Fact {
    /// An agent's session opened.
    AgentConnected { host: String, listen: String },
    /// An agent's session ended. It is waited for in so many communicators, for so long.
    AgentGone { host: String, communicators: usize, lease: Duration },
    /// An aggregator's session opened.
    AggregatorConnected { name: String, address: String },
    /// An aggregator's session ended; what it serves it may serve on.
    AggregatorGone { name: String },
    /// An aggregator does not serve a communicator, and says why.
    GrantRefused { name: String, communicator: CommunicatorId, why: String },
    /// An agent cannot do all that agents can, and says why.
    AgentLacks { host: String, what: String },
    /// On the way of a host's packets an address answered that is no switch's in the topology.
    UnknownHop { host: String, address: String },
    /// A session was refused or ended by control.
    SessionRefused { reason: String },
    /// A host's agent asked so for a tenant that operators want elsewhere, and was refused.
    TenantElsewhere { host: String, tenant: String, what: &'static str },
    /// All ranks have joined.
    Formed { communicator: CommunicatorId, tenant: String, name: String, ranks: u32, hosts: Vec<String> },
    /// An epoch is in use.
    EpochCurrent { communicator: CommunicatorId, tenant: String, name: String, epoch: Epoch, reason: Reason },
    /// An epoch was given up.
    EpochAbandoned { communicator: CommunicatorId, tenant: String, name: String, epoch: Epoch, why: String },
    /// Control chooses a communicator's order again.
    OrderFreed { communicator: CommunicatorId, tenant: String, name: String },
    /// A communicator ended in good order.
    Closed { communicator: CommunicatorId, tenant: String, name: String },
    /// An agent's telemetry, or what it says of turns, was refused or dropped: so often by now.
    TelemetryRefused { host: String, count: u64, why: String },
    /// Control decided on new plans: for which communicators, and their new epochs.
    Decided { decision: u64, trigger: String, reason: PlanReason, changes: Vec<(CommunicatorId, Epoch)> },
    /// A plan did not pass the check, and is not used: so often by now.
    PlanUnfit { count: u64, why: String },
    /// A communicator's operations lose or send otherwise by a codec than was known.
    LossLearned { communicator: CommunicatorId, codec: &'static str },
    /// A communicator takes turns with these others from now on.
    TakesTurns {
        communicator: CommunicatorId,
        tenant: String,
        name: String,
        with: Vec<CommunicatorId>,
        reason: InterleaveReason,
    },
    /// It takes no turns any more.
    TurnsOver { communicator: CommunicatorId, tenant: String, name: String, why: TurnsEnd },
    /// Something has been promised for a communicator, which takes the place of what was before.
    Agreed { communicator: CommunicatorId, tenant: String, name: String, number: u64, promise: String },
    /// What of an agreement is not kept; nothing: it is again.
    AgreementBroken {
        communicator: CommunicatorId,
        tenant: String,
        name: String,
        number: u64,
        broken: Vec<String>,
    },
    /// What a tenant expects of a communicator, in words.
    Hinted { communicator: CommunicatorId, tenant: String, name: String, hints: String },
    /// What a tenant expected is not what was measured.
    HintsDropped { communicator: CommunicatorId, tenant: String, name: String, hints: String },
    /// What was agreed on for the communicator before this one cannot be promised for it. It is because of
    /// these clauses; of none: it could not be stored.
    AgreementLost { communicator: CommunicatorId, tenant: String, name: String, lost: Vec<String> },
    /// A communicator that failed is kept for its members to regroup.
    Kept { communicator: CommunicatorId, tenant: String, name: String, within: Duration },
    /// They have not, and it is over.
    NotRegrouped { communicator: CommunicatorId, tenant: String, name: String, within: Duration },
    /// A job has new workers, on these hosts by rank; why.
    JobStarted { tenant: String, name: String, generation: u64, hosts: Vec<String>, why: String },
    /// An elastic job goes on with other workers, on these hosts by rank; why.
    JobResized { tenant: String, name: String, generation: u64, hosts: Vec<String>, why: String },
    /// A job's workers are to end.
    JobRecalled { tenant: String, name: String, generation: u64, reason: RecallReason },
    /// A job is over.
    JobOver { tenant: String, name: String, generation: u64, succeeded: bool },
    /// A round has given nothing to anybody; why.
    JobsUndecided { why: String },
    /// A communicator ended otherwise.
    Ended {
        communicator: CommunicatorId,
        tenant: String,
        name: String,
        kind: FailureKind,
        ranks: Vec<u32>,
        detail: String,
    },
}
