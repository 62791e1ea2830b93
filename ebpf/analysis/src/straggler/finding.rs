//! What is taken in of operations and iterations, and what is found of ranks.

use crate::trace::Timed;
use harmonaize_abi::{CommunicatorId, Nanos};
use std::time::Duration;

/// Whose operations or iterations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Subject {
    /// An own communicator, as control numbers it.
    Communicator(CommunicatorId),
    /// An external job, by its number.
    Job(u64),
}

/// One operation, or one iteration, of a subject.
///
/// Every time of a rank is by one clock, that of the host that measured it; clocks of different hosts may differ by a
/// constant (or slowly drifting) amount. What is not known is left out: a rank that is not listed, a time that is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    /// Its number, ascending: an operation's on its communicator, or an iteration's of a job.
    pub unit: u64,
    /// Each rank that is known, in ascending order.
    pub ranks: Vec<RankTimes>,
    /// Each edge that is known, in ascending order of `(from, to)`.
    pub edges: Vec<EdgeTimes>,
}

/// A rank's part.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankTimes {
    /// Which.
    pub rank: u32,
    /// When it was ready: it called (own), or its first bytes left it (external).
    pub start: Option<Nanos>,
    /// When it had the result: its call ended (own), or the last bytes reached it (external).
    pub end: Option<Nanos>,
    /// How long others held it up between its end of the unit before and its start of this one.
    pub waited: Duration,
}

/// What moved from one rank to another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EdgeTimes {
    /// The sending rank.
    pub from: u32,
    /// The receiving rank.
    pub to: u32,
    /// When the first bytes left, by the sender's clock.
    pub first: Option<Nanos>,
    /// When the last bytes left, by the sender's clock.
    pub last: Option<Nanos>,
    /// When the last bytes had arrived, by the receiver's clock.
    pub arrived: Option<Nanos>,
    /// How long bytes were on their way: the sum of its bursts, idle gaps left out.
    pub active: Option<Duration>,
    /// Bytes.
    pub bytes: u64,
    /// The mean round trip of its flows meanwhile.
    pub rtt: Option<Duration>,
    /// Packets of its flows that were sent again meanwhile.
    pub retransmissions: u64,
}

/// Why a rank holds the others up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// It starts late: the worker is slow.
    Compute,
    /// It starts in time, and its bytes move late.
    Network,
}

/// A rank that holds the others up, found, or over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Straggler {
    /// Whose rank.
    pub subject: Subject,
    /// Which.
    pub rank: u32,
    /// Why.
    pub kind: Kind,
    /// Network: the slowest edge that it is an end of.
    pub edge: Option<(u32, u32)>,
    /// The first unit that it held up.
    pub since_unit: u64,
    /// When that began, by the clock of the earliest rank.
    pub since: Nanos,
    /// When the unit ended by which it was found, or found to be over.
    pub found: Nanos,
    /// By how much it holds a unit up: the median.
    pub by: Duration,
    /// Over how many units.
    pub units: u64,
    /// When the last unit ended that it held up, once it is over.
    pub ended: Option<Nanos>,
}

impl Timed for Straggler {
    fn time(&self) -> Nanos {
        self.found
    }

    fn same_content(&self, other: &Self) -> bool {
        let name = |one: &Self| (one.subject, one.rank, one.kind, one.ended.is_some());
        name(self) == name(other)
    }
}
