//! Staggering: periodic jobs that share a link take turns on it. After Rajasekaran et al., "CASSINI: Network-aware job
//! scheduling in machine learning clusters", NSDI 2024: each job is a circle of its period, turned until busy parts no longer meet.

use crate::all_to_all::line_rate;
use crate::conditions::Conditions;
use crate::iterations::IterationPattern;
use crate::plan::{Assignment, Job, hosts_rate, ring_bits, usage};
use harmonaize_topology::{DirectedLink, PathFinder};
use harmonaize_topology::{HostId, Topology};
use harmonaize_units::{Bytes, Nanos};
use std::collections::{BTreeMap, BTreeSet};

mod reason;
mod slots;

pub use reason::{InterleaveReason, Overlap};
pub use slots::{InterleaveSlot, plan_interleaving};

/// Parts of a circle.
const SLOTS: usize = 128;

/// Periods count as the same, or as a whole multiple, up to so much of the shorter.
const PERIOD_TOLERANCE: f64 = 0.05;

/// Most turns of the shortest circle in the longest.
const MAX_REPEATS: f64 = 4.0;

/// A link is contended where the jobs together ask for this much more than it has.
const CONTENDED: f64 = 1.02;

/// Least part of the period by which the jobs must hold each other up less afterwards.
const MIN_GAIN: f64 = 0.08;

/// Most jobs that are turned together.
const MAX_JOBS: usize = 32;

/// A periodic job as it would be alone.
struct PeriodicJob {
    job: usize,
    /// Nanoseconds of an iteration.
    period: f64,
    /// Of it, those in which it communicates.
    busy: f64,
    /// What it puts on each link meanwhile, bits a second.
    demand: BTreeMap<DirectedLink, f64>,
    iteration_pattern: IterationPattern,
}

/// How long an AllReduce of so many bytes takes these hosts along a ring. Their own links are taken to be the only limit.
pub fn isolated_time(topology: &Topology, hosts: &[HostId], bytes: Bytes) -> Nanos {
    let rate = line_rate(topology, hosts).0.max(1) as f64;
    Nanos((ring_bits(bytes, hosts.len()) / rate * 1e9).min(1e18) as u64)
}

/// The jobs that have a rhythm.
fn periodic_jobs(
    topology: &Topology,
    conditions: &Conditions,
    jobs: &[Job],
    assignments: &[Assignment],
) -> Vec<PeriodicJob> {
    let mut paths = PathFinder::new(topology);
    let each = jobs.iter().zip(assignments).enumerate();
    each.filter_map(|(index, (job, assignment))| {
        periodic_job(topology, conditions, &mut paths, index, job, assignment)
    })
    .collect()
}

fn periodic_job(
    topology: &Topology,
    conditions: &Conditions,
    paths: &mut PathFinder<'_>,
    index: usize,
    job: &Job,
    assignment: &Assignment,
) -> Option<PeriodicJob> {
    let rhythm = job.iteration_pattern?;
    let parts = usage(paths, job, assignment);
    let tightest = parts.iter().map(|(link, part)| conditions.available(*link).0 as f64 / part);
    let rate = tightest.fold(hosts_rate(topology, job), f64::min);
    let told = rhythm.busy.0 as f64;
    let alone = ring_bits(rhythm.bytes, job.hosts.len()) / rate.max(1.0) * 1e9;
    let busy = if rhythm.bytes.0 == 0 { told } else { alone.min(told) };
    let period = rhythm.period.0.saturating_sub(rhythm.busy.0) as f64 + busy;
    if parts.is_empty() || rate < 1.0 || busy < 1.0 || period < 1000.0 {
        return None;
    }
    let asks = parts.into_iter().map(|(link, part)| (link, part * rate)).collect();
    Some(PeriodicJob { job: index, period, busy, demand: asks, iteration_pattern: rhythm })
}

/// Circles that meet on contended links, directly or through others.
fn groups(conditions: &Conditions, circles: &[PeriodicJob]) -> Vec<BTreeSet<usize>> {
    let mut on: BTreeMap<DirectedLink, (f64, BTreeSet<usize>)> = BTreeMap::new();
    for (index, circle) in circles.iter().enumerate() {
        for (link, ask) in &circle.demand {
            let entry = on.entry(*link).or_default();
            entry.0 += ask;
            entry.1.insert(index);
        }
    }
    let contended = on.into_iter().filter(|(link, (asks, jobs))| {
        jobs.len() > 1 && *asks > conditions.available(*link).0 as f64 * CONTENDED
    });
    let mut groups: Vec<BTreeSet<usize>> = Vec::new();
    for (_, (_, mut jobs)) in contended {
        groups.retain(|group| {
            let apart = group.is_disjoint(&jobs);
            if !apart {
                jobs.extend(group);
            }
            apart
        });
        groups.push(jobs);
    }
    groups
}

/// The circles whose periods fit that of the longest, each with how often it turns in that.
fn compatible(group: Vec<&PeriodicJob>) -> Vec<(&PeriodicJob, usize)> {
    let longest = group.iter().map(|circle| circle.period).fold(0.0, f64::max);
    let fits = |circle: &PeriodicJob| {
        let turns = longest / circle.period;
        let whole = turns.round();
        ((turns - whole).abs() <= PERIOD_TOLERANCE * whole && whole <= MAX_REPEATS).then_some(whole as usize)
    };
    group.into_iter().filter_map(|circle| Some((circle, fits(circle)?))).take(MAX_JOBS).collect()
}

/// Circles that are turned against each other.
struct PhasePlan<'a> {
    jobs: Vec<(&'a PeriodicJob, usize)>,
    period: f64,
    /// The contended links: what each has, and what each circle asks of it.
    links: Vec<(f64, Vec<f64>, String)>,
}

impl<'a> PhasePlan<'a> {
    fn new(
        topology: &Topology,
        conditions: &Conditions,
        circles: Vec<(&'a PeriodicJob, usize)>,
    ) -> Option<Self> {
        let period = circles.iter().map(|(circle, _)| circle.period).fold(0.0, f64::max);
        let all: BTreeSet<DirectedLink> =
            circles.iter().flat_map(|(circle, _)| circle.demand.keys()).copied().collect();
        let link = |link: DirectedLink| {
            let asks = circles.iter().map(|(circle, _)| circle.demand.get(&link).copied().unwrap_or(0.0));
            let asks: Vec<f64> = asks.collect();
            let has = conditions.available(link).0 as f64;
            (asks.iter().sum::<f64>() > has * CONTENDED).then(|| (has, asks, topology.link_name(link)))
        };
        let links: Vec<_> = all.into_iter().filter_map(link).collect();
        (circles.len() > 1 && !links.is_empty()).then_some(Self { jobs: circles, period, links })
    }

    /// In which slots a circle is busy, at this phase.
    fn slots(&self, index: usize, phase: f64) -> [bool; SLOTS] {
        let mut slots = [false; SLOTS];
        let Some((circle, turns)) = self.jobs.get(index) else { return slots };
        let own = self.period / *turns as f64;
        for (at, slot) in slots.iter_mut().enumerate() {
            let time = (at as f64 + 0.5) * self.period / SLOTS as f64;
            *slot = (time - phase).rem_euclid(own) < circle.busy;
        }
        slots
    }

    /// The part of the period's work on contended links that finds no room at these phases. The period is longer by that part.
    fn excess(&self, phases: &[f64]) -> f64 {
        let slots: Vec<_> =
            phases.iter().enumerate().map(|(index, phase)| self.slots(index, *phase)).collect();
        let of_link = |(has, asks, _): &(f64, Vec<f64>, String)| {
            let over = (0..SLOTS).map(|at| {
                let busy =
                    slots.iter().zip(asks).filter(|(slots, _)| slots.get(at).copied().unwrap_or(false));
                (busy.map(|(_, ask)| ask).sum::<f64>() / has.max(1.0) - 1.0).max(0.0)
            });
            over.sum::<f64>() / SLOTS as f64
        };
        self.links.iter().map(of_link).fold(0.0, f64::max)
    }

    /// Where each circle stands by its newest busy part.
    fn phases(&self) -> Vec<f64> {
        let reference =
            self.jobs.iter().map(|(circle, _)| circle.iteration_pattern.last_began.0).max().unwrap_or(0);
        let phase = |(circle, turns): &(&PeriodicJob, usize)| {
            // What passed since, in periods as they are now, and that many of those as they will be.
            let now = circle.iteration_pattern.period.0.max(1) as f64;
            let passed = (reference - circle.iteration_pattern.last_began.0) as f64 / now;
            (-passed * self.period / *turns as f64).rem_euclid(self.period / *turns as f64)
        };
        self.jobs.iter().map(phase).collect()
    }

    /// The name of the link of which most is asked for what it has.
    fn busiest_link(&self) -> &str {
        let asked = |(has, asks, _): &&(f64, Vec<f64>, String)| asks.iter().sum::<f64>() / has;
        let fullest = self.links.iter().max_by(|a, b| asked(a).total_cmp(&asked(b)));
        fullest.map_or("", |(_, _, name)| name)
    }
}

#[cfg(test)]
mod tests;
