//! Events as processes of release 0.1.0 read them. What they say cannot change; kinds that came later are left out.

use super::EventCursor;
use crate::session::Clause;
use crate::{CongestionLevel, Rank};
use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// See [`EventKind`](super::EventKind).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(missing_docs, reason = "they are those of the other")]
pub enum EventKind {
    Congestion(CongestionLevel),
    Capacity(CongestionLevel),
    Failure { ranks: Vec<Rank>, regroup_by_ns: u64 },
    Maintenance { ranks: Vec<Rank>, at_ns: u64 },
    PlanChanged,
    Newcomers { waiting: u32 },
    AgreementBroken { clauses: Vec<Clause> },
    AgreementEnded { clauses: Vec<Clause> },
}

/// See [`Event`](super::Event).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[expect(missing_docs, reason = "they are those of the other")]
pub struct Event {
    pub number: u64,
    pub communicator: String,
    pub kind: EventKind,
    pub since_ns: u64,
}

/// See [`EventBatch`](super::EventBatch).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "they are those of the other")]
pub struct EventBatch {
    pub missed: u64,
    pub events: Vec<Event>,
    pub cursor: EventCursor,
}

impl From<super::EventBatch> for EventBatch {
    fn from(batch: super::EventBatch) -> Self {
        let event = |super::Event { number, communicator, kind, since_ns }| {
            Some(Event { number, communicator, kind: released(kind)?, since_ns })
        };
        let events = batch.events.into_iter().filter_map(event).collect();
        Self { missed: batch.missed, events, cursor: batch.cursor }
    }
}

impl From<EventBatch> for super::EventBatch {
    fn from(batch: EventBatch) -> Self {
        let event = |Event { number, communicator, kind, since_ns }| super::Event {
            number,
            communicator,
            kind: kind.into(),
            since_ns,
        };
        Self {
            missed: batch.missed,
            events: batch.events.into_iter().map(event).collect(),
            cursor: batch.cursor,
        }
    }
}

/// The kind as it was released, if it was.
fn released(kind: super::EventKind) -> Option<EventKind> {
    use super::EventKind as Kind;
    Some(match kind {
        Kind::Congestion(level) => EventKind::Congestion(level),
        Kind::Capacity(level) => EventKind::Capacity(level),
        Kind::Failure { ranks, regroup_by_ns } => EventKind::Failure { ranks, regroup_by_ns },
        Kind::Maintenance { ranks, at_ns } => EventKind::Maintenance { ranks, at_ns },
        Kind::PlanChanged => EventKind::PlanChanged,
        Kind::Newcomers { waiting } => EventKind::Newcomers { waiting },
        Kind::AgreementBroken { clauses } => EventKind::AgreementBroken { clauses },
        Kind::AgreementEnded { clauses } => EventKind::AgreementEnded { clauses },
        Kind::Stragglers { .. } => return None,
    })
}

impl From<EventKind> for super::EventKind {
    fn from(kind: EventKind) -> Self {
        match kind {
            EventKind::Congestion(level) => Self::Congestion(level),
            EventKind::Capacity(level) => Self::Capacity(level),
            EventKind::Failure { ranks, regroup_by_ns } => Self::Failure { ranks, regroup_by_ns },
            EventKind::Maintenance { ranks, at_ns } => Self::Maintenance { ranks, at_ns },
            EventKind::PlanChanged => Self::PlanChanged,
            EventKind::Newcomers { waiting } => Self::Newcomers { waiting },
            EventKind::AgreementBroken { clauses } => Self::AgreementBroken { clauses },
            EventKind::AgreementEnded { clauses } => Self::AgreementEnded { clauses },
        }
    }
}
