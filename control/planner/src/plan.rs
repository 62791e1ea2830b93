//! Plans: for all communicators together the order of each ring, the paths of its connections, and their shares.

use crate::conditions::Conditions;
use crate::iterations::IterationPattern;
use harmonaize_abi::CommunicatorId;
use harmonaize_topology::{DirectedLink, Path};
use harmonaize_topology::{HostId, Topology};
use harmonaize_units::{Bytes, Nanos, Rate};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

mod change;
mod check;
mod describe;
mod model;
mod polish;
mod priority;
mod reason;
mod search;
mod shares;
mod slowdown;

pub use check::check;

use change::{ChangeOutcome, keep_unless_gained};
use describe::{reason, summary};
use model::{LinkIndex, Model, Ring};
pub(crate) use model::{hosts_rate, ring_bits};
use polish::polish;
pub(crate) use priority::usage;
pub use priority::{Task, apply_priorities};
pub use reason::{AssignmentReason, Bottleneck, PlanReason, RingChange};
use search::Search;

/// A communicator that is to be planned for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Which.
    pub communicator: CommunicatorId,
    /// The host of each participant.
    pub hosts: Vec<HostId>,
    /// Connections of each link between two participants.
    pub connections: u32,
    /// Its share of a link that it shares, relative to others'; 0 counts as 1.
    pub weight: u32,
    /// Least that each of its hosts can send to the next, whatever others do; 0 where nothing is promised.
    pub guaranteed: Rate,
    /// Most that it may send into the fabric from a host; none where it is not limited.
    pub rate_limit: Option<Rate>,
    /// Bytes of a typical operation; 0 where not known.
    pub operation: Bytes,
    /// When it communicates; none where that is not known, then it counts as always communicating.
    pub iteration_pattern: Option<IterationPattern>,
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
    pub edges: Vec<RingEdge>,
    /// Changes of plan within the last 30 s: the more, the more the next must gain.
    pub recent_changes: u32,
}

/// From one participant to the next along the ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RingEdge {
    /// The path of each connection, in the direction of the ring. Empty where they are not known; then the hop's bytes count
    /// as spread over all equal-cost paths.
    pub paths: Vec<Path>,
}

/// Which paths connections can be made to take.
#[derive(Clone, Copy, Debug)]
pub enum Routes<'a> {
    /// Every equal-cost path.
    All,
    /// The paths from one host to another for which a source port is known. Pairs that are not named are spread by hash.
    Listed(&'a BTreeMap<(HostId, HostId), Vec<Path>>),
    /// None: all are spread by hash.
    Hashed,
}

/// When a change is worth it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Least gain in a communicator's predicted time, of a million. Doubles with each recent change beyond two.
    pub min_gain_ppm: u32,
    /// Most that is searched, in links looked at; bounds the time a plan takes.
    pub search_budget: u64,
    /// Of it, most that goes into the last stretch, where the predicted score itself is tried out. A small fabric's plan is
    /// seldom far from the best without it. With the default it is within a twentieth of the best, which takes some
    /// milliseconds.
    pub polish_budget: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Self { min_gain_ppm: 100_000, search_budget: 20_000_000, polish_budget: 600_000 }
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

/// How good a plan is predicted to be. Times of operations are relative to the same job where only its hosts' own links are a
/// limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    /// Mean over the jobs, by weight; 1 is best.
    pub slowdown: f64,
    /// The worst job's.
    pub worst: f64,
    /// Jobs that cannot move a byte: some hop has no way left. Not in the others.
    pub unreachable_jobs: u32,
    /// What of promises is not kept: the missing part of each job's, summed; 0 is best.
    pub unmet_guarantees: f64,
}

impl Score {
    /// What a promise that is not kept at all counts beside slowdowns.
    const GUARANTEE_WEIGHT: f64 = 100.0;

    /// What is missing of promises, beside a sum of slowdowns by weights that are together so much.
    fn unmet_of(&self, weights: f64) -> f64 {
        Self::GUARANTEE_WEIGHT * self.unmet_guarantees * weights
    }

    /// One number to be made small: the slowdown, and what is missing of promises far before it.
    fn total(&self) -> f64 {
        self.slowdown + Self::GUARANTEE_WEIGHT * self.unmet_guarantees
    }
}

/// What a communicator is to run by.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// Which.
    pub communicator: CommunicatorId,
    /// Participants along the ring.
    pub order: Vec<u32>,
    /// The hops, one from each place of the order to the next.
    pub edges: Vec<RingEdge>,
    /// Whether it differs from what runs now.
    pub changed: bool,
    /// Its weighted max-min share, and no less than is promised where that can be had. It is what each host sends to the next, bits a
    /// second; 0 where stuck.
    pub share: Rate,
    /// The rate limit of each participant's links, so that shares come out as planned. None where that is not needed.
    pub rate_limit: Option<Rate>,
    /// Predicted time of the job's typical operation, an AllReduce (of 1 MiB where it is not known). The largest time where it is
    /// stuck.
    pub time: Nanos,
    /// That time relative to the job where only its hosts' own links are a limit; infinite where stuck. For a job with a rhythm it is
    /// that of operations while they run, though links may carry all that it sends on average.
    pub slowdown: f64,
    /// Whether it has less for jobs that matter more to its tenant: see [`priority`].
    pub yields: bool,
    /// Why.
    pub reason: AssignmentReason,
}

/// A plan for all communicators.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// One for each job, in their order.
    pub assignments: Vec<Assignment>,
    /// What is predicted if everything stays as it is; jobs that form are not in it.
    pub before: Score,
    /// What is predicted for the plan.
    pub after: Score,
    /// Why.
    pub reason: PlanReason,
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
    #[error("communicator {id:x}: the order does not name each participant once", id = .0.0)]
    Order(CommunicatorId),
    /// Not one hop from each participant to the next.
    #[error("communicator {id:x}: the hops do not go along the order", id = .0.0)]
    Edges(CommunicatorId),
    /// A path that is broken, or leads elsewhere.
    #[error("communicator {id:x}: a path of hop {edge} does not lead from its host to the next", id = .communicator.0)]
    Path {
        /// Which.
        communicator: CommunicatorId,
        /// Which hop, from 0.
        edge: usize,
    },
    /// A path over a link that passes nothing, or that is drained, though there is another.
    #[error("communicator {id:x}: hop {edge} crosses {link}, though there is another way", id = .communicator.0)]
    Forbidden {
        /// Which.
        communicator: CommunicatorId,
        /// Which hop, from 0.
        edge: usize,
        /// The link.
        link: String,
    },
    /// Shares that a link cannot carry.
    #[error("the shares on {link} are {shares} together, of {available}")]
    Overcommitted {
        /// The link.
        link: String,
        /// What is planned on it.
        shares: Rate,
        /// What it has.
        available: Rate,
    },
}

/// Plans for all communicators together. The same request gives the same plan. Time: bounded by [`Policy::search_budget`] and by one
/// look at each path of each hop.
pub fn plan(request: &Request<'_>) -> Plan {
    let mut model = Model::new(request);
    let mut search = Search::new(&mut model);
    let running: Vec<Option<Ring>> =
        search.rings.iter().map(|ring| (!ring.order.is_empty()).then(|| ring.clone())).collect();
    let runs = |index: usize| running.get(index).is_some_and(Option::is_some);
    let (old, before) = search.predict(&runs);
    let loads_before = search.loads();
    search.run();
    let budget = search.remaining_budget().min(request.policy.polish_budget);
    polish(&mut search, budget);
    let mut outcomes = keep_unless_gained(&mut search, &running, request.policy.search_budget / 8);
    let (mut each, mut after) = search.predict(&|_| true);
    let voluntary =
        !outcomes.iter().any(|outcome| matches!(outcome, ChangeOutcome::Forming | ChangeOutcome::Forced));
    if voluntary && (after.unreachable_jobs, after.total()) > (before.unreachable_jobs, before.total()) {
        // What the fullest links promised did not come out: nothing changes.
        for (index, ring) in running.iter().enumerate() {
            search.replace(index, ring.clone().unwrap_or_default());
        }
        outcomes.fill(ChangeOutcome::Unchanged);
        (each, after) = search.predict(&|_| true);
    }
    let paces = rate_limits(&search, &each);
    let slowdowns = slowdown::slowdowns(&search, &each);
    let mut assignments = Vec::with_capacity(request.jobs.len());
    for (index, job) in request.jobs.iter().enumerate() {
        let (Some(ring), Some((share, on_average)), Some(slowdown), Some(outcome)) = (
            search.rings.get(index),
            each.get(index).copied(),
            slowdowns.get(index).copied(),
            outcomes.get(index).copied(),
        ) else {
            continue;
        };
        let load = |link: LinkIndex| loads_before.get(link as usize).copied().unwrap_or(0.0);
        let slow_before = old.get(index).map_or(1.0, |(_, slowdown)| *slowdown);
        let was = running.get(index).and_then(Option::as_ref).map(|ring| (ring, slow_before));
        let bytes = if job.operation == Bytes(0) { Bytes(1 << 20) } else { job.operation };
        let seconds = ring_bits(bytes, job.hosts.len()) / search.model.line_rate(job) * slowdown;
        assignments.push(Assignment {
            communicator: job.communicator,
            order: ring.order.clone(),
            edges: search.model.ring_edges(ring),
            changed: matches!(
                outcome,
                ChangeOutcome::Forming | ChangeOutcome::Forced | ChangeOutcome::Gained(_)
            ),
            share: Rate(share as u64),
            rate_limit: paces.get(index).copied().flatten(),
            time: Nanos((seconds * 1e9).min(1e18) as u64),
            slowdown,
            yields: false,
            reason: reason(search.model, outcome, was, (ring, on_average), &load),
        });
    }
    debug_assert_eq!(assignments.len(), request.jobs.len(), "each job has its assignment");
    debug_assert!(
        request.jobs.iter().zip(&assignments).all(|(job, one)| model::is_order(&one.order, job.hosts.len())),
        "each order names each participant once"
    );
    let reason = summary(&assignments, &outcomes, before, after);
    Plan { assignments, before, after, reason }
}

/// What links are to be held to. Links of limited jobs are, and those of jobs that share a full link with one of another weight
/// or with one that has a promise. Else connections share alike by themselves.
fn rate_limits(search: &Search<'_, '_>, each: &[(f64, f64)]) -> Vec<Option<Rate>> {
    let jobs = search.model.jobs();
    let mut links: BTreeMap<LinkIndex, Contenders> = BTreeMap::new();
    let crossing = |index: usize| search.rings.get(index).map(Ring::usage).unwrap_or_default();
    let first = jobs.first().map(|first| first.weight.max(1));
    if jobs.iter().any(|job| Some(job.weight.max(1)) != first || job.guaranteed.0 > 0) {
        for ((index, job), (share, slowdown)) in jobs.iter().enumerate().zip(each) {
            for (link, part) in crossing(index) {
                let entry = links.entry(link).or_default();
                entry.load += part * share;
                entry.guaranteed += u32::from(job.guaranteed.0 > 0);
                // Who has all that it asks for contends with nobody.
                entry.weights.extend((*slowdown > 1.001).then_some(job.weight.max(1)));
            }
        }
        let capacity = &search.model.capacity;
        links.retain(|link, Contenders { load, weights, guaranteed: promised }| {
            let unequal = weights.len() > 1 || *promised > 0 && !weights.is_empty();
            unequal && capacity.get(*link as usize).is_some_and(|capacity| *load >= capacity * 0.99)
        });
    }
    let pace = |(index, (job, (share, _))): (usize, (&Job, &(f64, f64)))| {
        let over = crossing(index);
        let unequal = over.iter().any(|(link, _)| links.contains_key(link));
        let promises =
            over.iter().filter_map(|(link, _)| Some(links.get(link)?.guaranteed)).max().unwrap_or(0);
        // The share of a job with a rhythm is one over time, unless it is counted as always communicating beside a promise.
        let share = (unequal && *share >= 1.0 && (job.iteration_pattern.is_none() || promises > 0))
            .then_some(Rate(*share as u64))
            // Who alone has a promise takes what the others, who are held to theirs, leave.
            .filter(|_| job.guaranteed.0 == 0 || promises > 1);
        let held = [share, job.rate_limit].into_iter().flatten().min();
        held.filter(|_| job.hosts.len() > 1)
    };
    jobs.iter().zip(each).enumerate().map(pace).collect()
}

/// Who crosses a link.
#[derive(Debug, Default)]
struct Contenders {
    /// Bits a second.
    load: f64,
    /// Of those who want more.
    weights: BTreeSet<u32>,
    /// Those who have a promise.
    guaranteed: u32,
}

/// Returns for each of these pairs of hosts paths for connections beside the ring (acknowledgements, AllToAll).
/// Those are between two participants that are not next to each other in it. The paths have the most left, each once before any
/// twice; empty where none is known.
pub fn off_ring_paths(request: &Request<'_>, pairs: &[(HostId, HostId)], connections: u32) -> Vec<Vec<Path>> {
    let request = Request { jobs: &[], ..*request };
    let mut model = Model::new(&request);
    let available = |link: &DirectedLink| request.conditions.available(*link);
    let left = |path: &Path| {
        let links = path.links().iter().flat_map(|link| [*link, link.reversed()]);
        links.map(|link| available(&link)).min().unwrap_or_default()
    };
    let between = |(from, to): &(HostId, HostId)| {
        let options = model.options(*from, *to, true);
        let mut paths: Vec<Path> =
            options.candidates.iter().map(|candidate| candidate.path.clone()).collect();
        let most = paths.iter().map(left).max().unwrap_or_default();
        // Half of the best is still worth a connection of its own.
        paths.retain(|path| left(path).0 >= most.0 / 2);
        paths.sort_by_key(|path| Reverse(left(path)));
        let count = if paths.is_empty() { 0 } else { connections as usize };
        paths.iter().cycle().take(count).cloned().collect::<Vec<Path>>()
    };
    pairs.iter().map(between).collect()
}

#[cfg(test)]
mod tests;
