//! Events: what a tenant is told of the network while its collectives run.

use super::Clause;
use crate::{CongestionLevel, Rank, StragglerCause};
use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

pub mod released;

/// Added to the id of a [`Request::Events`](super::Request::Events) by a process that reads
/// [`Answer::AllEvents`](super::Answer::AllEvents). An agent that does not know it answers with the events of release 0.1.0.
pub const ALL_EVENTS: u64 = 1 << 63;

/// Most events of one [`EventBatch`]: with all their ranks they fit a message.
pub const MAX_EVENTS: usize = 8;

/// What an event says of its communicator. Later releases add variants at the end.
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
        /// Until when the remaining ranks are expected to [have gone on](super::OnFailure::Regroup), in nanoseconds
        /// since 1970. It is rounded down, and 0 where that was not agreed on.
        regroup_by_ns: u64,
    },
    /// The hosts of these ranks, and of no further ones, will be taken away. The ranks ascend. Without ranks, the
    /// maintenance is called off, or over.
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
    /// It went on from another communicator, whose agreement ends: nothing is promised now. These clauses of that
    /// agreement cannot be had any more. Proposed again, it is answered with what can be had. Of [`Clause::OnFailure`]
    /// alone: its members have not gone on in time.
    AgreementEnded {
        /// Ascending.
        clauses: Vec<Clause>,
    },
    /// For this cause these ranks, and no others, hold its operations up; of none: no rank does any more.
    Stragglers {
        /// Why they are late.
        cause: StragglerCause,
        /// Of the communicator, ascending. By the network at most one, and one of all communicators of the tenant.
        ranks: Vec<Rank>,
    },
}

/// Something that the provider tells a tenant. Times are rounded down to the provider's tick, a second by default.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Event {
    /// Its number in the tenant's feed, from 0. A gap is an event of a kind that agent or process does not know.
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventBatch {
    /// Events that it came too late for.
    pub missed: u64,
    /// At most [`MAX_EVENTS`], in order; none if nothing came in time.
    pub events: Vec<Event>,
    /// Where it stands then.
    pub cursor: EventCursor,
}

/// A batch of events of any kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodedBatch {
    /// As [`EventBatch::missed`].
    pub missed: u64,
    /// As [`EventBatch::events`].
    pub events: Vec<EncodedEvent>,
    /// As [`EventBatch::cursor`].
    pub cursor: EventCursor,
}

/// An event whose kind is encoded by itself, so that a process passes over those that it does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodedEvent {
    /// As [`Event::number`].
    pub number: u64,
    /// As [`Event::communicator`].
    pub communicator: String,
    /// As [`Event::since_ns`].
    pub since_ns: u64,
    /// An [`EventKind`].
    pub kind: Vec<u8>,
}

impl From<EventBatch> for EncodedBatch {
    fn from(batch: EventBatch) -> Self {
        let event = |Event { number, communicator, kind, since_ns }| {
            let kind = postcard::to_extend(&kind, Vec::new()).ok()?;
            Some(EncodedEvent { number, communicator, since_ns, kind })
        };
        let events = batch.events.into_iter().filter_map(event).collect();
        Self { missed: batch.missed, events, cursor: batch.cursor }
    }
}

impl From<EncodedBatch> for EventBatch {
    /// Leaves out events of kinds that are not known.
    fn from(batch: EncodedBatch) -> Self {
        let event = |EncodedEvent { number, communicator, since_ns, kind }| {
            let kind = super::decode(&kind).ok()?;
            Some(Event { number, communicator, kind, since_ns })
        };
        let events = batch.events.into_iter().filter_map(event).collect();
        Self { missed: batch.missed, events, cursor: batch.cursor }
    }
}
