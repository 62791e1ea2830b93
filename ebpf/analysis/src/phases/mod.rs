//! Foreign traffic: jobs, their iterations, and when they communicate, inferred from bursts alone.

use crate::trace::Timed;

/// An address as in a flow's key: 16 bytes in memory order, IPv4 mapped.
pub type Address = [u32; 4];

/// The communication of one iteration of a foreign job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phase {
    /// The job, by the number that it got when it was found.
    pub job: u64,
    /// The iteration, from 0 at the first that was seen; one that was missed leaves a gap.
    pub iteration: u64,
    /// When its first bytes passed.
    pub began_ns: u64,
    /// When its last bytes passed.
    pub ended_ns: u64,
    /// Bytes on the wire of the job's flows, each direction of a connection once.
    pub bytes: u64,
    /// The job's period as known then.
    pub period_ns: u64,
    /// The ring's steps, where the job's edges are a ring.
    pub ring: Option<RingSteps>,
    /// The rank whose first bytes came late, where one did.
    pub late: Option<Late>,
    /// Whether something was lost meanwhile: times and bytes may be too small.
    pub lossy: bool,
}

/// How a ring moved a phase's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingSteps {
    /// Hosts on the ring.
    pub hosts: u32,
    /// Steps that each of them took, 2 (hosts - 1) for each AllReduce.
    pub steps: u32,
    /// The bytes that an edge carries in a step.
    pub bytes: u64,
}

/// Who was late, and by how much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Late {
    /// The host.
    pub host: Address,
    /// After the median of the job's hosts.
    pub by_ns: u64,
}

/// A foreign job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Its number.
    pub job: u64,
    /// Its hosts, in the ring's order where there is a ring.
    pub hosts: Vec<Address>,
    /// How many flows it has, each direction of a connection once.
    pub flows: u32,
    /// Its period, once known.
    pub period_ns: Option<u64>,
    /// When it was found.
    pub since_ns: u64,
    /// Iterations seen.
    pub iterations: u64,
    /// Whether its edges are a ring.
    pub ring: bool,
}

impl Timed for Phase {
    fn time_ns(&self) -> u64 {
        self.began_ns
    }

    fn says_as(&self, other: &Self) -> bool {
        (self.job, self.iteration, self.ring, self.lossy)
            == (other.job, other.iteration, other.ring, other.lossy)
    }
}
