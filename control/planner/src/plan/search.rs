//! The search: jobs move one after the other to where the fabric is least loaded, until none wants to. Each move lowers one sum
//! over all links, so it ends (Rosenthal, "A class of games possessing pure-strategy Nash equilibria", 1973).

use super::model::{Candidate, EcmpSpread, EdgeOptions, EdgeRoutes, LinkIndex, Model, Ring};
use super::shares::{FairFlow, Shares};
use super::{Job, Score};
use crate::conditions::LinkUse;
use crate::ring_order::{LINK_WEIGHT, UNREACHABLE_DISTANCE, order_by};
use harmonaize_topology::HostId;
use std::collections::BTreeSet;
use std::rc::Rc;

/// Most rounds over all jobs.
const MAX_ROUNDS: usize = 8;

/// Orders are looked for anew where a job has at most so many participants.
const MAX_REORDERED: usize = 64;

/// A move must lower the sum by this part of it.
const MIN_IMPROVEMENT: f64 = 1e-9;

/// What a shared risk costs two connections of a hop; decides between paths that are alike otherwise.
const SHARED_RISK_COST: f64 = 1e-3;

/// Rings on links, and how loaded those are.
pub(super) struct Search<'m, 'a> {
    pub(super) model: &'m mut Model<'a>,
    /// Of each job; empty before it is placed.
    pub(super) rings: Vec<Ring>,
    usages: Vec<Vec<(LinkIndex, f64)>>,
    load: Vec<f64>,
    links_examined: u64,
    shares: Shares,
    has_shared_risks: bool,
}

/// How many times a way that is to be left alone counts beside one that is open.
fn avoidance_factor(usable: LinkUse) -> f64 {
    if usable == LinkUse::Open { 0.0 } else { 64.0 }
}

/// What a link costs at a load. The cost grows steeply where demand nears what is there, so that the sum is led by the fullest.
fn cost(load: f64, capacity: f64) -> f64 {
    let filled = load.max(0.0) / capacity.max(1e-3);
    let square = filled * filled;
    0.01 * square + square * square * square
}

impl<'m, 'a> Search<'m, 'a> {
    /// With what runs now; jobs that form are not placed.
    pub(super) fn new(model: &'m mut Model<'a>) -> Self {
        let jobs = model.jobs();
        let rings: Vec<Ring> = jobs.iter().map(|job| model.current(job).unwrap_or_default()).collect();
        let risky = model.request.topology.links().iter().any(|link| !link.risk.is_empty());
        let usages = vec![Vec::new(); rings.len()];
        let mut search = Self {
            model,
            rings,
            usages,
            load: Vec::new(),
            links_examined: 0,
            shares: Shares::default(),
            has_shared_risks: risky,
        };
        for job in 0..jobs.len() {
            search.add_load(job);
        }
        search
    }

    /// What may still be looked at.
    pub(super) fn remaining_budget(&self) -> u64 {
        self.model.request.policy.search_budget.saturating_sub(self.links_examined)
    }

    fn demand(&self, job: usize) -> f64 {
        self.model.demand.get(job).copied().unwrap_or(0.0)
    }

    fn capacity(&self, link: LinkIndex) -> f64 {
        self.model.capacity.get(link as usize).copied().unwrap_or(0.0)
    }

    fn loaded(&self, link: LinkIndex) -> f64 {
        self.load.get(link as usize).copied().unwrap_or(0.0)
    }

    fn add(&mut self, link: LinkIndex, load: f64) {
        if self.load.len() <= link as usize {
            self.load.resize(self.model.links.len().max(link as usize + 1), 0.0);
        }
        if let Some(cell) = self.load.get_mut(link as usize) {
            *cell += load;
        }
    }

    /// Takes a job's bytes off its links.
    fn remove_load(&mut self, job: usize) {
        let demand = self.demand(job);
        let usage = self.usages.get_mut(job).map(std::mem::take).unwrap_or_default();
        usage.iter().for_each(|(link, part)| self.add(*link, -part * demand));
    }

    /// Puts them back, as its ring is now.
    fn add_load(&mut self, job: usize) {
        let demand = self.demand(job);
        let usage = self.rings.get(job).map(Ring::usage).unwrap_or_default();
        usage.iter().for_each(|(link, part)| self.add(*link, part * demand));
        if let Some(cell) = self.usages.get_mut(job) {
            *cell = usage;
        }
    }

    /// Gives a job another ring; its old one.
    pub(super) fn replace(&mut self, job: usize, ring: Ring) -> Ring {
        self.remove_load(job);
        let old = self.rings.get_mut(job).map(|cell| std::mem::replace(cell, ring)).unwrap_or_default();
        self.add_load(job);
        old
    }

    /// How much fuller than it can be the fullest link of a job is, by what all demand.
    pub(super) fn pressure(&self, job: usize) -> f64 {
        let usage = self.usages.get(job).map_or(&[][..], Vec::as_slice);
        let filled = usage.iter().map(|(link, _)| self.loaded(*link) / self.capacity(*link).max(1e-3));
        filled.fold(0.0, f64::max)
    }

    /// Places those that form, moves the others where that helps, until nothing moves or the effort is spent.
    pub(super) fn run(&mut self) {
        let jobs = self.model.jobs();
        for (index, job) in jobs.iter().enumerate() {
            if self
                .rings
                .get(index)
                .is_some_and(|ring| ring.order.len() != job.hosts.len() || ring.order.is_empty())
            {
                self.place_job(index, job);
            }
        }
        for _ in 0..MAX_ROUNDS {
            let mut queue: Vec<(usize, f64)> = (0..jobs.len())
                .filter(|job| !self.model.fixed.get(*job).copied().unwrap_or(true))
                .map(|job| (job, if self.forced(job) { f64::INFINITY } else { self.pressure(job) }))
                .filter(|(_, pressure)| *pressure > 1.0)
                .collect();
            queue.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            let mut moved = false;
            for (index, _) in queue {
                if let (Some(job), true) = (jobs.get(index), self.remaining_budget() > 0) {
                    moved |= self.improve(index, job);
                }
            }
            if !moved {
                break;
            }
        }
    }

    /// Whether a job crosses what it should not.
    pub(super) fn forced(&self, job: usize) -> bool {
        self.rings.get(job).is_some_and(|ring| ring.worst() != LinkUse::Open)
    }

    fn place_job(&mut self, index: usize, job: &Job) {
        let mut best: Option<(f64, Ring)> = None;
        for order in self.orders(job) {
            let ring = self.build(index, job, &order, &Ring::default());
            let cost = self.ring_cost(index, &ring);
            if best.as_ref().is_none_or(|(least, _)| cost < *least * (1.0 - MIN_IMPROVEMENT)) {
                best = Some((cost, ring));
            }
        }
        if let Some((_, ring)) = best {
            self.replace(index, ring);
        }
    }

    fn improve(&mut self, index: usize, job: &Job) -> bool {
        let Some(ring) = self.rings.get(index).cloned() else { return false };
        let mut changed = false;
        for (hop, (from, to, both)) in self.model.ends(job, &ring.order).into_iter().enumerate() {
            changed |= from != to && self.respond(index, job, hop, (from, to, both));
        }
        if job.hosts.len() <= MAX_REORDERED && self.is_degraded(index) {
            changed |= self.reorder(index, job);
        }
        changed
    }

    /// Whether a job's fullest link has less than the topology says, or its ring is not in order.
    fn is_degraded(&self, job: usize) -> bool {
        let usage = self.usages.get(job).map_or(&[][..], Vec::as_slice);
        let fullest = usage.iter().max_by(|a, b| {
            let filled = |link: LinkIndex| self.loaded(link) / self.capacity(link).max(1e-3);
            filled(a.0).total_cmp(&filled(b.0))
        });
        let less = fullest.is_some_and(|(link, _)| {
            self.model.rate.get(*link as usize).is_some_and(|rate| self.capacity(*link) < rate * 0.99)
        });
        less || self.forced(job)
    }

    /// Tries other orders for a job.
    fn reorder(&mut self, index: usize, job: &Job) -> bool {
        let Some(old) = self.rings.get(index).cloned() else { return false };
        self.remove_load(index);
        let mut best = (self.ring_cost(index, &old), None);
        for order in self.orders(job) {
            if order == old.order {
                continue;
            }
            let ring = self.build(index, job, &order, &old);
            let cost = self.ring_cost(index, &ring);
            if (ring.worst(), cost) < (old.worst(), best.0 * (1.0 - 1e-3)) || ring.worst() < old.worst() {
                best = (cost, Some(ring));
            }
        }
        let found = best.1.is_some();
        if let (Some(ring), Some(cell)) = (best.1, self.rings.get_mut(index)) {
            *cell = ring;
        }
        self.add_load(index);
        found
    }

    /// Orders that cross few links, and among those few that are slow; each in both directions.
    fn orders(&mut self, job: &Job) -> Vec<Vec<u32>> {
        let topology = self.model.request.topology;
        if job.hosts.len() < 3 {
            return vec![(0..job.hosts.len() as u32).collect()];
        }
        let mut seen = BTreeSet::new();
        let mut orders = Vec::new();
        for mindful in [false, true] {
            let search = &mut *self;
            let distance = |from: HostId, to: HostId| search.distance(from, to, mindful);
            let found: Vec<u32> =
                order_by(topology, &job.hosts, distance).into_iter().map(|at| at as u32).collect();
            let mut back = found.clone();
            if let Some(rest) = back.get_mut(1..) {
                rest.reverse();
            }
            orders.extend([found, back].into_iter().filter(|order| seen.insert(order.clone())));
        }
        orders
    }

    /// Links between switches from one host to another, and, where conditions matter, how much slower the best path is.
    fn distance(&mut self, from: HostId, to: HostId, mindful: bool) -> u64 {
        let crossings =
            self.model.switch_hops(from, to).unwrap_or(UNREACHABLE_DISTANCE).saturating_mul(LINK_WEIGHT);
        if !mindful || from == to {
            return crossings;
        }
        let slower = [(from, to), (to, from)].map(|(from, to)| {
            let options = self.model.options(from, to, false);
            let of_path = |path: &Rc<Candidate>| {
                let less = path.links.iter().map(|link| {
                    let rate = self.model.rate.get(*link as usize).copied().unwrap_or(0.0);
                    (rate / self.capacity(*link).max(1.0)).min(64.0)
                });
                less.fold(1.0, f64::max) + avoidance_factor(path.usable)
            };
            let best = options.candidates.iter().map(of_path).fold(f64::INFINITY, f64::min);
            let spread = |spread: &EcmpSpread| 1.0 + avoidance_factor(spread.usable);
            if best.is_finite() { best } else { options.ecmp.as_ref().map_or(1e4, spread) }
        });
        let [there, back] = slower;
        crossings.saturating_add(((there + back - 2.0) * LINK_WEIGHT as f64) as u64)
    }

    /// A ring of this order: hops that an old one has too keep their paths, others take the cheapest. The job is not on its
    /// links meanwhile.
    pub(super) fn build(&mut self, index: usize, job: &Job, order: &[u32], old: &Ring) -> Ring {
        let demand = self.demand(index);
        let kept: Vec<_> = self.model.ends(job, &old.order).into_iter().zip(&old.edges).collect();
        let mut ring = Ring { order: order.to_vec(), edges: Vec::new() };
        for ends in self.model.ends(job, order) {
            let old = kept.iter().find(|(known, hop)| *known == ends && hop.worst() == LinkUse::Open);
            let choice = match old {
                _ if ends.0 == ends.1 => EdgeRoutes::Local,
                Some((_, hop)) => (*hop).clone(),
                None => self.choose(job, ends, demand),
            };
            choice.each(|link, part| self.add(link, part * demand));
            ring.edges.push(choice);
        }
        for hop in &ring.edges {
            hop.each(|link, part| self.add(link, -part * demand));
        }
        ring
    }

    /// What the connections of a hop best take.
    fn choose(&mut self, job: &Job, (from, to, both): (HostId, HostId, bool), demand: f64) -> EdgeRoutes {
        let options = self.model.options(from, to, both);
        if options.candidates.is_empty() {
            return options.ecmp.clone().map_or(EdgeRoutes::Unreachable, EdgeRoutes::EcmpSpread);
        }
        let count = job.connections.clamp(1, 64) as usize;
        let part = demand / count as f64;
        let mut paths: Vec<Rc<Candidate>> = Vec::with_capacity(count);
        for _ in 0..count {
            let Some(path) = self.cheapest(&options, part, &paths) else { return EdgeRoutes::Unreachable };
            path.links.iter().for_each(|link| self.add(*link, part));
            paths.push(path);
        }
        for path in &paths {
            path.links.iter().for_each(|link| self.add(*link, -part));
        }
        EdgeRoutes::Pinned(paths)
    }

    fn cheapest(
        &mut self,
        options: &EdgeOptions,
        part: f64,
        others: &[Rc<Candidate>],
    ) -> Option<Rc<Candidate>> {
        let mut best: Option<(f64, &Rc<Candidate>)> = None;
        for path in &options.candidates {
            let cost = self.path_cost(path, part, others);
            if best.is_none_or(|(least, _)| cost < least * (1.0 - MIN_IMPROVEMENT)) {
                best = Some((cost, path));
            }
        }
        best.map(|(_, path)| Rc::clone(path))
    }

    /// What it adds to the sum to send so much along a path.
    fn path_cost(&mut self, path: &Candidate, load: f64, others: &[Rc<Candidate>]) -> f64 {
        self.links_examined += path.links.len() as u64;
        let links = path.links.iter().map(|link| {
            let (now, capacity) = (self.loaded(*link), self.capacity(*link));
            cost(now + load, capacity) - cost(now, capacity)
        });
        let risk = if self.has_shared_risks {
            SHARED_RISK_COST * self.shared_risks(path, others) as f64
        } else {
            0.0
        };
        links.sum::<f64>() + risk
    }

    fn shared_risks(&self, path: &Candidate, others: &[Rc<Candidate>]) -> usize {
        let links = self.model.request.topology.links();
        let risks = |path: &Candidate| -> BTreeSet<&String> {
            path.path
                .links()
                .iter()
                .filter_map(|at| links.get(at.link.0))
                .flat_map(|link| &link.risk)
                .collect()
        };
        let ours = risks(path);
        others.iter().map(|other| ours.intersection(&risks(other)).count()).sum()
    }

    /// What a ring adds to the sum; its job is not on its links.
    pub(super) fn ring_cost(&mut self, index: usize, ring: &Ring) -> f64 {
        let demand = self.demand(index);
        let usage = ring.usage();
        self.links_examined += usage.len() as u64;
        let stuck = ring.edges.iter().filter(|hop| matches!(hop, EdgeRoutes::Unreachable)).count();
        let links = usage.iter().map(|(link, part)| {
            let (now, capacity) = (self.loaded(*link), self.capacity(*link));
            cost(now + part * demand, capacity) - cost(now, capacity)
        });
        links.sum::<f64>() + stuck as f64 * 1e30
    }

    /// Lets each connection of a hop take the path that is cheapest for it; whether one moved.
    fn respond(&mut self, index: usize, job: &Job, hop: usize, ends: (HostId, HostId, bool)) -> bool {
        let options = self.model.options(ends.0, ends.1, ends.2);
        let best = options.candidates.iter().map(|path| path.usable).min();
        let choice = self.rings.get(index).and_then(|ring| ring.edges.get(hop)).cloned();
        match choice {
            Some(EdgeRoutes::Pinned(paths))
                if best.is_some_and(|best| paths.iter().all(|path| path.usable <= best)) =>
            {
                self.respond_each(index, hop, &options, paths)
            }
            Some(old) => {
                self.remove_load(index);
                let demand = self.demand(index);
                let new = self.choose(job, ends, demand);
                let better = match (&old, &new) {
                    (EdgeRoutes::EcmpSpread(_), EdgeRoutes::EcmpSpread(_)) | (_, EdgeRoutes::Unreachable) => {
                        false
                    }
                    (EdgeRoutes::EcmpSpread(_), EdgeRoutes::Pinned(_)) if new.worst() == old.worst() => {
                        self.choice_cost(&new, demand) < self.choice_cost(&old, demand) * (1.0 - 1e-3)
                    }
                    (EdgeRoutes::EcmpSpread(_), EdgeRoutes::Pinned(_)) => new.worst() < old.worst(),
                    _ => true,
                };
                if let (true, Some(cell)) =
                    (better, self.rings.get_mut(index).and_then(|ring| ring.edges.get_mut(hop)))
                {
                    *cell = new;
                }
                self.add_load(index);
                better
            }
            None => false,
        }
    }

    fn choice_cost(&mut self, choice: &EdgeRoutes, demand: f64) -> f64 {
        let ring = Ring { order: Vec::new(), edges: vec![choice.clone()] };
        let mut sum = 0.0;
        for (link, part) in ring.usage() {
            let (now, capacity) = (self.loaded(link), self.capacity(link));
            sum += cost(now + part * demand, capacity) - cost(now, capacity);
        }
        sum
    }

    fn respond_each(
        &mut self,
        index: usize,
        hop: usize,
        options: &EdgeOptions,
        mut paths: Vec<Rc<Candidate>>,
    ) -> bool {
        let part = self.demand(index) / paths.len().max(1) as f64;
        let mut moved = false;
        for at in 0..paths.len() {
            let Some(old) = paths.get(at).cloned() else { continue };
            old.links.iter().for_each(|link| self.add(*link, -part));
            let others: Vec<_> = if self.has_shared_risks {
                paths
                    .iter()
                    .enumerate()
                    .filter(|(other, _)| *other != at)
                    .map(|(_, path)| Rc::clone(path))
                    .collect()
            } else {
                Vec::new()
            };
            let now = self.path_cost(&old, part, &others);
            let new = self.cheapest(options, part, &others).filter(|new| new.path != old.path);
            let new = new.filter(|new| self.path_cost(new, part, &others) < now * (1.0 - 1e-6));
            let path = new.unwrap_or_else(|| Rc::clone(&old));
            path.links.iter().for_each(|link| self.add(*link, part));
            if let (true, Some(cell)) = (!Rc::ptr_eq(&path, &old), paths.get_mut(at)) {
                *cell = path;
                moved = true;
            }
        }
        if let (true, Some(ring)) = (moved, self.rings.get_mut(index)) {
            if let Some(cell) = ring.edges.get_mut(hop) {
                *cell = EdgeRoutes::Pinned(paths);
            }
            // The loads stand already: only what is remembered of them is to be brought up to date.
            let usage = ring.usage();
            if let Some(cell) = self.usages.get_mut(index) {
                *cell = usage;
            }
        }
        moved
    }

    /// What all jobs demand of each link.
    pub(super) fn loads(&self) -> Vec<f64> {
        self.load.clone()
    }

    /// The sum over all links that moves lower.
    pub(super) fn sum(&self) -> f64 {
        self.load.iter().zip(&self.model.capacity).map(|(load, capacity)| cost(*load, *capacity)).sum()
    }

    /// What all rings cost together, links looked at.
    pub(super) fn size(&self) -> u64 {
        self.usages.iter().map(|usage| usage.len() as u64 + 1).sum()
    }

    /// Predicts exactly: the share of each job (0 where stuck) and its slowdown, and the score over those that count.
    pub(super) fn predict(&mut self, counts: &dyn Fn(usize) -> bool) -> (Vec<(f64, f64)>, Score) {
        let jobs = self.model.jobs();
        let flows: Vec<FairFlow<'_>> = jobs
            .iter()
            .zip(&self.usages)
            .zip(&self.model.demand)
            .map(|((job, usage), demand)| FairFlow {
                usage,
                weight: f64::from(job.weight.max(1)),
                demand: *demand,
                guaranteed: job.guaranteed.0 as f64,
            })
            .collect();
        let rates = self.shares.fill(&self.model.capacity, &flows);
        let (mut sum, mut weights, mut score) =
            (0.0, 0.0, Score { slowdown: 1.0, worst: 1.0, unreachable_jobs: 0, unmet_guarantees: 0.0 });
        let mut each = Vec::with_capacity(jobs.len());
        for (index, (flow, rate)) in flows.iter().zip(rates).enumerate() {
            let stuck = self
                .rings
                .get(index)
                .is_none_or(|ring| ring.edges.iter().any(|hop| matches!(hop, EdgeRoutes::Unreachable)));
            let (rate, slowdown) = if stuck || *rate < 1.0 {
                (0.0, f64::INFINITY)
            } else {
                (*rate, (flow.demand / rate).max(1.0))
            };
            each.push((rate, slowdown));
            if counts(index) && flow.guaranteed > 0.0 {
                let lacks = 1.0 - rate / flow.guaranteed.min(flow.demand);
                score.unmet_guarantees += if lacks > 1e-6 { lacks } else { 0.0 };
            }
            if counts(index) && rate > 0.0 {
                sum += flow.weight * slowdown;
                weights += flow.weight;
                score.worst = score.worst.max(slowdown);
            } else if counts(index) {
                score.unreachable_jobs += 1;
            }
        }
        if weights > 0.0 {
            score.slowdown = sum / weights;
        }
        (each, score)
    }
}
