//! Events: what a tenant is told of the network while its collectives run.

use super::Clause;
use crate::{CongestionLevel, Rank};
use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// Most events of one [`EventBatch`]: with all their ranks they fit a message.
pub const MAX_EVENTS: usize = 8;

/// What an event says of its communicator.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EventKind {
    /// Others' traffic slows the tenant's communicators this much now: the one that has it worst, told of all alike.
    Congestion(CongestionLevel),
    /// While something of the network is out of use they are slowed this much, told alike too.
    Capacity(CongestionLevel),
    /// These ranks are lost; ascending.
    Failure {
        /// Of the communicator.
        ranks: Vec<Rank>,
        /// Until when the others are expected to [have gone on](super::OnFailure::Regroup), in nanoseconds since 1970, rounded down; 0
        /// where that was not agreed on.
        regroup_by_ns: u64,
    },
    /// The hosts of these ranks, ascending, and of no others, will be taken away; of none: it is called off, or over.
    Maintenance {
        /// Of the communicator.
        ranks: Vec<Rank>,
        /// When the first is, in nanoseconds since 1970, rounded down; 0 if none is.
        at_ns: u64,
    },
    /// Since then some operations of the tenant's take another way; told of all its communicators.
    PlanChanged,
    /// So many processes wait to be taken in when its members regroup.
    Newcomers {
        /// 0: they no longer do.
        waiting: u32,
    },
    /// Of what was agreed on for it, the provider does not keep this now; of nothing: it is kept again.
    AgreementBroken {
        /// Ascending.
        clauses: Vec<Clause>,
    },
    /// It went on from another, and of what was agreed on for that one this cannot be had any more: nothing is promised now.
    /// Proposed again, it is answered with what can be had. Of [`Clause::OnFailure`] alone: its members have not gone on in time.
    AgreementEnded {
        /// Ascending.
        clauses: Vec<Clause>,
    },
}

/// Something that the provider tells a tenant. Times are rounded down to the provider's tick, a second by default.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Event {
    /// Its number in the tenant's feed, from 0, without gaps.
    pub number: u64,
    /// The communicator, by the name that the tenant gave it.
    pub communicator: String,
    /// What it says.
    pub kind: EventKind,
    /// Since when, in nanoseconds since 1970.
    pub since_ns: u64,
}

/// Where a reader stands in its tenant's feed of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EventCursor {
    /// The feed: another tenant's cursor, or one of a feed that is no more, is known by it.
    pub feed: u64,
    /// The next event's number.
    pub next: u64,
}

/// What a reader gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventBatch {
    /// Events that it came too late for.
    pub missed: u64,
    /// At most [`MAX_EVENTS`], in order; none if nothing came in time.
    pub events: Vec<Event>,
    /// Where it stands then.
    pub cursor: EventCursor,
}
