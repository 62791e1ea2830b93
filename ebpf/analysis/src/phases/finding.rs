//! What is found of external jobs.

use crate::straggler::{EdgeTimes, Observed, RankTimes};
use crate::trace::Timed;
use harmonaize_abi::Nanos;
use std::time::Duration;

/// An address as in a flow's key: 16 bytes in memory order, IPv4 mapped.
pub type Address = [u32; 4];

/// The communication of one iteration of an external job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phase {
    /// The job, by the number that it got when it was found.
    pub job: u64,
    /// The iteration, from 0 at the first that was seen; one that was missed leaves a gap.
    pub iteration: u64,
    /// When its first bytes passed.
    pub began: Nanos,
    /// When its last bytes passed.
    pub ended: Nanos,
    /// Bytes on the wire of the job's flows, each direction of a connection once.
    pub bytes: u64,
    /// The job's period as known then.
    pub period: Duration,
    /// The ring's steps, where all of a ring is seen.
    pub ring: Option<RingSteps>,
    /// The rank whose first bytes came late, where one did.
    pub late: Option<Late>,
    /// Whether something was lost meanwhile: times and bytes may be too small.
    pub lossy: bool,
    /// Each of the job's hosts, in the order of [`Job::hosts`].
    pub hosts: Vec<HostPhase>,
    /// Each edge that carried more than acknowledgements, by its hosts' places.
    pub edges: Vec<EdgePhase>,
}

/// A host's part in a phase. Times are 0 where there is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostPhase {
    /// Which.
    pub host: Address,
    /// When its own first bytes passed, acknowledgements not among them.
    pub first_sent: Nanos,
    /// When the last bytes to it passed.
    pub last_received: Nanos,
    /// How long it was held up by others since the last bytes of the phase before. That is in broadcasts and the like, or waiting for
    /// what it began with.
    pub waited: Duration,
}

/// An edge's part in a phase. Times are 0 where there is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EdgePhase {
    /// The sender's place among the job's hosts.
    pub from: u32,
    /// The receiver's.
    pub to: u32,
    /// When its first bytes passed, acknowledgements not among them.
    pub first: Nanos,
    /// When its last bytes passed at the sender, or at the receiver where the sender is not watched.
    pub last: Nanos,
    /// When they passed at the receiver; 0 where that is not watched.
    pub arrived: Nanos,
    /// How long bytes were on their way: the sum of its bursts.
    pub active: Duration,
    /// Bytes on the wire.
    pub bytes: u64,
    /// The mean of its round trips; 0 where none were measured.
    pub rtt: Duration,
    /// Packets that were sent again.
    pub retransmissions: u64,
}

/// How a ring moved a phase's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSteps {
    /// Hosts on the ring.
    pub hosts: u32,
    /// Steps that each of them took: a multiple of 2 (hosts - 1), which one AllReduce takes. A step is a piece that is sent at
    /// once: where a library cuts its steps there are so many more, and fewer where some leave without a pause. 0 where bursts do
    /// not tell.
    pub steps: u32,
    /// The bytes that an edge carries in a step; 0 where bursts do not tell.
    pub bytes: u64,
}

/// Who was late, and by how much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Late {
    /// The host.
    pub host: Address,
    /// After the median of the other hosts.
    pub by: Duration,
}

/// An external job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Its number.
    pub job: u64,
    /// Its hosts: those of a ring in its order, then others as they came. A host keeps its place.
    pub hosts: Vec<Address>,
    /// How many flows it has, each direction of a connection once.
    pub flows: u32,
    /// Its period, once known.
    pub period: Option<Duration>,
    /// When its first phase began.
    pub since: Nanos,
    /// Iterations seen.
    pub iterations: u64,
    /// Whether its edges are a ring.
    pub ring: bool,
}

impl Phase {
    /// What [`Detector`](crate::straggler::Detector) takes in. A rank is a host's place in the job.
    pub fn observed(&self) -> Observed {
        let known = |time: Nanos| (time != Nanos(0)).then_some(time);
        let measured = |span: Duration| (!span.is_zero()).then_some(span);
        let rank = |(rank, host): (u32, &HostPhase)| RankTimes {
            rank,
            start: known(host.first_sent),
            end: known(host.last_received),
            waited: host.waited,
        };
        let edge = |edge: &EdgePhase| EdgeTimes {
            from: edge.from,
            to: edge.to,
            first: known(edge.first),
            last: known(edge.last),
            arrived: known(edge.arrived),
            active: measured(edge.active),
            bytes: edge.bytes,
            rtt: measured(edge.rtt),
            retransmissions: edge.retransmissions,
        };
        let ranks = (0..).zip(&self.hosts).map(rank).collect();
        Observed { unit: self.iteration, ranks, edges: self.edges.iter().map(edge).collect() }
    }
}

impl Timed for Phase {
    fn time(&self) -> Nanos {
        self.began
    }

    fn same_content(&self, other: &Self) -> bool {
        let name = |one: &Self| (one.job, one.iteration, one.ring, one.lossy);
        name(self) == name(other)
    }
}
