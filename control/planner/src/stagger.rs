//! Staggering: periodic jobs that share a link take turns on it: in `turns` for as long as they do, here once. After Rajasekaran et al., "CASSINI: Network-aware job
//! scheduling in machine learning clusters", NSDI 2024: each job is a circle of its period, turned until busy parts no longer meet.

use crate::conditions::Conditions;
use crate::exchange::line_rate;
use crate::path::{DirectedLink, Ways};
use crate::plan::{Assignment, Job, hosts_rate, ring_bits, usage};
use crate::rhythm::Rhythm;
use crate::topology::{HostId, Topology};
use crate::units::{Bytes, Nanos};
use std::collections::{BTreeMap, BTreeSet};

mod turns;

pub use turns::{Turn, turns};

/// Parts of a circle.
const SLOTS: usize = 128;

/// Periods count as the same, or as a whole multiple, up to so much of the shorter.
const ALIKE: f64 = 0.05;

/// Most turns of the shortest circle in the longest.
const MOST_TURNS: f64 = 4.0;

/// A link is contended where the jobs together ask for this much more than it has.
const CONTENDED: f64 = 1.02;

/// Least part of the period by which the jobs must hold each other up less afterwards.
const LEAST_GAIN: f64 = 0.08;

/// Busy parts are kept apart by so much of their length, for no job is as regular as a clock.
const MARGIN: f64 = 0.15;

/// The shortest hold that is worth a message.
const LEAST_HOLD: Nanos = Nanos(100_000);

/// Most jobs that are turned together.
const MOST_TOGETHER: usize = 32;

/// Hold the next operation of a communicator back, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Which communicator.
    pub communicator: u64,
    /// For how long: less than its period, and no longer than the longest busy part of those that take turns.
    pub hold: Nanos,
    /// Why, in words.
    pub reason: String,
}

/// A periodic job as it would be alone.
struct Circle {
    job: usize,
    /// Whether it may be held.
    may: bool,
    /// Nanoseconds of an iteration.
    period: f64,
    /// Of it, those in which it communicates.
    busy: f64,
    /// What it puts on each link meanwhile, bits a second.
    asks: BTreeMap<DirectedLink, f64>,
    rhythm: Rhythm,
}

/// How long an AllReduce of so many bytes takes these hosts along a ring, if their own links are the only limit.
pub fn alone(topology: &Topology, hosts: &[HostId], bytes: Bytes) -> Nanos {
    let rate = line_rate(topology, hosts).0.max(1) as f64;
    Nanos((ring_bits(bytes.0, hosts.len()) / rate * 1e9).min(1e18) as u64)
}

/// Which jobs to hold back so that those that share links take turns; none where nothing is gained by it. Jobs without a rhythm,
/// and those whose period is no multiple of the others', are left alone. `only`: no others than these communicators are held.
pub fn stagger(
    topology: &Topology,
    conditions: &Conditions,
    jobs: &[Job],
    assignments: &[Assignment],
    only: &BTreeSet<u64>,
) -> Vec<Hold> {
    let circles =
        circles(topology, conditions, jobs, assignments, |communicator| only.contains(&communicator));
    let mut holds = Vec::new();
    for group in groups(conditions, &circles) {
        let group: Vec<&Circle> = group.iter().filter_map(|index| circles.get(*index)).collect();
        holds.extend(
            Turning::new(topology, conditions, compatible(group))
                .and_then(|turning| turning.holds(jobs))
                .into_iter()
                .flatten(),
        );
    }
    holds
}

/// The jobs that have a rhythm; `may`: whether a communicator may be held.
fn circles(
    topology: &Topology,
    conditions: &Conditions,
    jobs: &[Job],
    assignments: &[Assignment],
    may: impl Fn(u64) -> bool,
) -> Vec<Circle> {
    let mut ways = Ways::new(topology);
    let each = jobs.iter().zip(assignments).enumerate();
    each.filter_map(|(index, (job, assignment))| {
        let place = (index, may(job.communicator));
        circle(topology, conditions, &mut ways, place, job, assignment)
    })
    .collect()
}

fn circle(
    topology: &Topology,
    conditions: &Conditions,
    ways: &mut Ways<'_>,
    (index, may): (usize, bool),
    job: &Job,
    assignment: &Assignment,
) -> Option<Circle> {
    let rhythm = job.rhythm?;
    let parts = usage(ways, job, assignment);
    let tightest = parts.iter().map(|(link, part)| conditions.available(*link).0 as f64 / part);
    let rate = tightest.fold(hosts_rate(topology, job), f64::min);
    let told = rhythm.busy.0 as f64;
    let alone = ring_bits(rhythm.bytes.0, job.hosts.len()) / rate.max(1.0) * 1e9;
    let (busy, period) = match rhythm.busy.0 {
        // Not measured: what the tenant says is of the job alone.
        0 => (alone.min(rhythm.period.0 as f64), rhythm.period.0 as f64),
        _ => {
            let busy = if rhythm.bytes.0 == 0 { told } else { alone.min(told) };
            (busy, rhythm.period.0.saturating_sub(rhythm.busy.0) as f64 + busy)
        }
    };
    if parts.is_empty() || rate < 1.0 || busy < 1.0 || period < 1000.0 {
        return None;
    }
    let asks = parts.into_iter().map(|(link, part)| (link, part * rate)).collect();
    Some(Circle { job: index, may, period, busy, asks, rhythm })
}

/// Circles that meet on contended links, directly or through others.
fn groups(conditions: &Conditions, circles: &[Circle]) -> Vec<BTreeSet<usize>> {
    let mut on: BTreeMap<DirectedLink, (f64, BTreeSet<usize>)> = BTreeMap::new();
    for (index, circle) in circles.iter().enumerate() {
        for (link, ask) in &circle.asks {
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
fn compatible(group: Vec<&Circle>) -> Vec<(&Circle, usize)> {
    let longest = group.iter().map(|circle| circle.period).fold(0.0, f64::max);
    let fits = |circle: &Circle| {
        let turns = longest / circle.period;
        let whole = turns.round();
        ((turns - whole).abs() <= ALIKE * whole && whole <= MOST_TURNS).then_some(whole as usize)
    };
    group.into_iter().filter_map(|circle| Some((circle, fits(circle)?))).take(MOST_TOGETHER).collect()
}

/// Circles that are turned against each other.
struct Turning<'a> {
    circles: Vec<(&'a Circle, usize)>,
    period: f64,
    /// The contended links: what each has, and what each circle asks of it.
    links: Vec<(f64, Vec<f64>, String)>,
}

impl<'a> Turning<'a> {
    fn new(topology: &Topology, conditions: &Conditions, circles: Vec<(&'a Circle, usize)>) -> Option<Self> {
        let period = circles.iter().map(|(circle, _)| circle.period).fold(0.0, f64::max);
        let all: BTreeSet<DirectedLink> =
            circles.iter().flat_map(|(circle, _)| circle.asks.keys()).copied().collect();
        let link = |link: DirectedLink| {
            let asks = circles.iter().map(|(circle, _)| circle.asks.get(&link).copied().unwrap_or(0.0));
            let asks: Vec<f64> = asks.collect();
            let has = conditions.available(link).0 as f64;
            (asks.iter().sum::<f64>() > has * CONTENDED).then(|| (has, asks, topology.link_name(link)))
        };
        let links: Vec<_> = all.into_iter().filter_map(link).collect();
        (circles.len() > 1 && !links.is_empty()).then_some(Self { circles, period, links })
    }

    /// In which slots a circle is busy, at this phase, with its busy part longer by a margin.
    fn slots(&self, index: usize, phase: f64, margin: f64) -> [bool; SLOTS] {
        let mut slots = [false; SLOTS];
        let Some((circle, turns)) = self.circles.get(index) else { return slots };
        let own = self.period / *turns as f64;
        let busy = circle.busy * (1.0 + margin);
        for (at, slot) in slots.iter_mut().enumerate() {
            let time = (at as f64 + 0.5) * self.period / SLOTS as f64;
            *slot = (time - phase + circle.busy * margin / 2.0).rem_euclid(own) < busy;
        }
        slots
    }

    /// The part of the period's work on contended links that finds no room at these phases: so much longer it takes.
    fn excess(&self, phases: &[f64], margin: f64) -> f64 {
        let slots: Vec<_> =
            phases.iter().enumerate().map(|(index, phase)| self.slots(index, *phase, margin)).collect();
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
        let reference = self.circles.iter().map(|(circle, _)| circle.rhythm.began.0).max().unwrap_or(0);
        let phase = |(circle, turns): &(&Circle, usize)| {
            // What passed since, in periods as they are now, and that many of those as they will be.
            let now = circle.rhythm.period.0.max(1) as f64;
            let passed = (reference - circle.rhythm.began.0) as f64 / now;
            (-passed * self.period / *turns as f64).rem_euclid(self.period / *turns as f64)
        };
        self.circles.iter().map(phase).collect()
    }

    /// Turns each circle to where it is least in the way of those turned before it, the busiest first, twice.
    fn turned(&self, now: &[f64]) -> Vec<f64> {
        let mut by_work: Vec<usize> = (0..self.circles.len()).collect();
        let work = |index: &usize| {
            self.circles.get(*index).map_or(0.0, |(circle, turns)| circle.busy * *turns as f64)
        };
        by_work.sort_by(|a, b| work(b).total_cmp(&work(a)).then(a.cmp(b)));
        let before = by_work.len();
        by_work.retain(|index| self.circles.get(*index).is_some_and(|(circle, _)| circle.may));
        // Where all may be turned, one of them need not be.
        let stays = usize::from(by_work.len() == before);
        let mut phases = now.to_vec();
        for index in by_work.iter().skip(stays).chain(by_work.iter().skip(stays)) {
            let (Some(start), Some((_, turns))) = (now.get(*index), self.circles.get(*index)) else {
                continue;
            };
            let own = self.period / *turns as f64;
            let mut best = (f64::INFINITY, *start);
            for step in 0..SLOTS / turns {
                let phase = start + step as f64 * self.period / SLOTS as f64;
                let mut tried = phases.clone();
                if let Some(cell) = tried.get_mut(*index) {
                    *cell = phase.rem_euclid(own);
                }
                let cost = self.excess(&tried, 0.0) * 1000.0 + self.excess(&tried, MARGIN);
                if cost < best.0 - 1e-9 {
                    best = (cost, phase.rem_euclid(own));
                }
            }
            if let Some(cell) = phases.get_mut(*index) {
                *cell = best.1;
            }
        }
        phases
    }

    /// The name of the link of which most is asked for what it has.
    fn fullest(&self) -> &str {
        let asked = |(has, asks, _): &&(f64, Vec<f64>, String)| asks.iter().sum::<f64>() / has;
        let fullest = self.links.iter().max_by(|a, b| asked(a).total_cmp(&asked(b)));
        fullest.map_or("", |(_, _, name)| name)
    }

    /// Which part of an iteration is in each other's way, and which as they take turns, in words.
    fn words(&self, (before, is): (f64, &str), (after, if_or_as): (f64, &str)) -> String {
        format!(
            "{} periodic jobs meet on {}: {:.0}% of an iteration of {:.0} ms {is} in each other's way, {:.0}% {if_or_as} they take turns",
            self.circles.len(),
            self.fullest(),
            before * 100.0,
            self.period / 1e6,
            after * 100.0,
        )
    }

    fn holds(&self, jobs: &[Job]) -> Option<Vec<Hold>> {
        let now = self.phases();
        let then = self.turned(&now);
        let (before, after) = (self.excess(&now, 0.0), self.excess(&then, 0.0));
        if before - after < LEAST_GAIN {
            return None;
        }
        let reason = self.words((before, "is"), (after, "if"));
        let longest = self.circles.iter().map(|(circle, _)| circle.busy * (1.0 + MARGIN)).fold(0.0, f64::max);
        let each = self.circles.iter().zip(self.least(&now, &then));
        let holds = each.filter_map(|((circle, _), hold)| {
            let communicator = jobs.get(circle.job)?.communicator;
            let hold = Nanos(hold.min(longest) as u64);
            (hold >= LEAST_HOLD).then(|| Hold { communicator, hold, reason: reason.clone() })
        });
        Some(holds.collect())
    }

    /// How long to hold each circle back to get from one place to the other, least in all: to turn all alike changes nothing, so one
    /// of them needs no hold.
    fn least(&self, now: &[f64], then: &[f64]) -> Vec<f64> {
        let own = |index: usize| {
            self.circles.get(index).map_or(self.period, |(_, turns)| self.period / *turns as f64)
        };
        let delays: Vec<f64> = then.iter().zip(now).map(|(then, now)| then - now).collect();
        let from = |free: &f64| -> Vec<f64> {
            let delay = |(index, delay): (usize, &f64)| (delay - free).rem_euclid(own(index));
            delays.iter().enumerate().map(delay).map(|delay| if delay < 1.0 { 0.0 } else { delay }).collect()
        };
        let sum = |holds: &Vec<f64>| holds.iter().sum::<f64>();
        if self.circles.iter().any(|(circle, _)| !circle.may) {
            return from(&0.0);
        }
        delays.iter().map(from).min_by(|a, b| sum(a).total_cmp(&sum(b))).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
