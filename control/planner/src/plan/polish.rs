//! The last stretch for plans small enough: single moves. They are judged by the predicted score itself instead of by the sum
//! over links.

use super::Job;
use super::model::{Candidate, EdgeRoutes, Ring};
use super::search::Search;
use crate::conditions::LinkUse;
use harmonaize_topology::SwitchId;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// A score to be made small. Its parts: jobs stuck and hops over what is to be left alone, slowdown, and the sum over links where those
/// are alike.
type Objective = ((u32, usize), f64, f64);

/// A prediction costs so many times what a look at each of its links costs.
const PREDICTION_COST: u64 = 8;

/// Orders are tried for jobs of at most so many participants.
const MAX_SWAPPED: usize = 12;

/// Each single move is tried so many times at most.
const MAX_TRIES: u64 = 400;

/// A step may make the score worse by so much at first, by less and less later.
const START_TEMPERATURE: f64 = 0.15;

/// Makes single moves while the score gets better, then parts jobs that share all their switches. Then makes random moves,
/// always the same ones, that may make the score worse for a while, and keeps the best plan (Dueck and Scheuer, "Threshold
/// accepting", 1990). Examines at most `budget` links.
pub(super) fn polish(search: &mut Search<'_, '_>, budget: u64) {
    let mut polish = Polish { remaining_budget: budget, search };
    // Small fabrics do not need it all.
    let budget =
        budget.min(polish.moves().saturating_mul(polish.search.size() * PREDICTION_COST * MAX_TRIES));
    polish.remaining_budget = budget;
    let mut best = polish.objective();
    polish.descend(&mut best);
    polish.concentrate(&mut best, budget / 8 * 5);
    polish.anneal(&mut best);
    polish.descend(&mut best);
}

/// Nobody can be quicker than its own links let it be.
fn is_perfect(objective: Objective) -> bool {
    objective.0 == (0, 0) && objective.1 <= 1.0 + 1e-9
}

/// Numbers that look random: splitmix64 (Steele, Lea and Flood, 2014).
struct SplitMix(u64);

impl SplitMix {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound.max(1) as u64) as usize
    }
}

struct Polish<'s, 'm, 'a> {
    search: &'s mut Search<'m, 'a>,
    remaining_budget: u64,
}

impl Polish<'_, '_, '_> {
    fn objective(&mut self) -> Objective {
        self.remaining_budget = self.remaining_budget.saturating_sub(self.search.size() * PREDICTION_COST);
        let (_, score) = self.search.predict(&|_| true);
        let edges = self.search.rings.iter().flat_map(|ring| &ring.edges);
        let avoided = edges.filter(|edge| edge.worst() == LinkUse::Avoid).count();
        ((score.unreachable_jobs, avoided), score.total(), self.search.sum())
    }

    /// Makes single moves until none makes the score better.
    fn descend(&mut self, best: &mut Objective) {
        let jobs = self.search.model.jobs();
        loop {
            let mut moved = false;
            for (index, job) in self.movable().into_iter().filter_map(|index| Some((index, jobs.get(index)?)))
            {
                moved |= self.orders(index, job, best) | self.paths(index, job, best);
            }
            if !moved {
                return;
            }
        }
    }

    /// Puts one job whole onto routes over one switch and builds the others anew around it. It does so while more than `floor` is left of
    /// the budget. Who shares all of its switches with another is as slow on one as on all; to part them takes many single moves, each of
    /// which makes it worse.
    fn concentrate(&mut self, best: &mut Objective, floor: u64) {
        let jobs = self.search.model.jobs();
        let movable = self.movable();
        for (index, job) in movable.iter().filter_map(|index| Some((*index, jobs.get(*index)?))) {
            if self.remaining_budget <= floor || is_perfect(*best) {
                return;
            }
            for switch in self.switches(index, job) {
                if self.remaining_budget <= floor || is_perfect(*best) {
                    return;
                }
                let (saved, record) = (self.search.rings.clone(), *best);
                let others = movable.iter().copied().filter(|other| *other != index);
                let others: Vec<(usize, Ring)> =
                    others.map(|other| (other, self.search.replace(other, Ring::default()))).collect();
                if let Some(ring) = self.over(index, job, switch) {
                    self.search.replace(index, ring);
                }
                for (other, old) in others {
                    let Some(job) = jobs.get(other) else { continue };
                    let ring = self.search.build(other, job, &old.order, &Ring::default());
                    self.search.replace(other, ring);
                }
                *best = self.objective();
                self.descend(best);
                if !is_better(*best, record) {
                    *best = record;
                    self.restore(saved);
                }
            }
        }
    }

    /// The switches that a job's connections may cross or leave aside.
    fn switches(&mut self, index: usize, job: &Job) -> BTreeSet<SwitchId> {
        let topology = self.search.model.request.topology;
        let order = self.search.rings.get(index).map(|ring| ring.order.clone()).unwrap_or_default();
        let mut found = BTreeSet::new();
        for (from, to, both) in self.search.model.ends(job, &order) {
            let options = self.search.model.options(from, to, both);
            let mut crossed: BTreeMap<SwitchId, usize> = BTreeMap::new();
            for switch in
                options.candidates.iter().flat_map(|candidate| topology.switches_of(&candidate.path))
            {
                *crossed.entry(switch).or_default() += 1;
            }
            let all = options.candidates.len();
            found.extend(crossed.into_iter().filter(|(_, count)| *count < all).map(|(switch, _)| switch));
        }
        found
    }

    /// A job's ring with all connections over a switch, wherever they can cross it.
    fn over(&mut self, index: usize, job: &Job, switch: SwitchId) -> Option<Ring> {
        let topology = self.search.model.request.topology;
        let mut ring = self.search.rings.get(index)?.clone();
        for (hop, (from, to, both)) in self.search.model.ends(job, &ring.order).into_iter().enumerate() {
            let options = self.search.model.options(from, to, both);
            let crosses = |path: &&Rc<Candidate>| topology.switches_of(&path.path).contains(&switch);
            let Some(path) = options.candidates.iter().find(crosses) else { continue };
            for at in 0..job.connections.clamp(1, 64) as usize {
                set(&mut ring, hop, at, path);
            }
        }
        Some(ring)
    }

    /// Returns the number of single moves that there are.
    fn moves(&mut self) -> u64 {
        let jobs = self.search.model.jobs();
        let mut moves = 0;
        for (index, job) in self.movable().into_iter().filter_map(|index| Some((index, jobs.get(index)?))) {
            let Some(ring) = self.search.rings.get(index).cloned() else { continue };
            for ((from, to, both), edge) in
                self.search.model.ends(job, &ring.order).into_iter().zip(&ring.edges)
            {
                let count = self.search.model.options(from, to, both).candidates.len();
                if let (EdgeRoutes::Pinned(paths), true) = (edge, count > 1) {
                    moves += paths.len() * count;
                }
            }
            let count = job.hosts.len();
            moves += if (3..=MAX_SWAPPED).contains(&count) { count * (count - 1) } else { 0 };
        }
        moves as u64
    }

    fn movable(&self) -> Vec<usize> {
        let fixed = self.search.model.fixed.iter().enumerate();
        fixed.filter(|(_, fixed)| !**fixed).map(|(job, _)| job).collect()
    }

    fn restore(&mut self, rings: Vec<Ring>) {
        for (job, ring) in rings.into_iter().enumerate() {
            self.search.replace(job, ring);
        }
    }

    /// Moves at random while budget is left, accepting ever less of a worse score. Ends with the best plan that it met.
    fn anneal(&mut self, best: &mut Objective) {
        let jobs = self.search.model.jobs();
        let (movable, start) = (self.movable(), self.remaining_budget);
        let (mut now, mut record, mut random) = (*best, self.search.rings.clone(), SplitMix(1));
        while self.remaining_budget > 0 && !movable.is_empty() && !is_perfect(*best) {
            self.remaining_budget -= 1;
            let index = movable.get(random.below(movable.len())).copied().unwrap_or(0);
            let Some(job) = jobs.get(index) else { return };
            let heat = START_TEMPERATURE * self.remaining_budget as f64 / start.max(1) as f64;
            let Some(ring) = self.propose(&mut random, index, job) else { continue };
            let old = self.search.replace(index, ring);
            let objective = self.objective();
            if objective.0 <= now.0 && objective.1 <= now.1 * (1.0 + heat) {
                now = objective;
                if is_better(now, *best) {
                    *best = now;
                    record.clone_from(&self.search.rings);
                }
            } else {
                self.search.replace(index, old);
            }
        }
        self.restore(record);
    }

    /// Returns a ring that differs by chance. It differs in its order, or in the path of a connection or of all connections of a
    /// hop.
    fn propose(&mut self, random: &mut SplitMix, index: usize, job: &Job) -> Option<Ring> {
        let old = self.search.rings.get(index)?.clone();
        let count = job.hosts.len();
        if (3..=MAX_SWAPPED).contains(&count) && random.below(4) == 0 {
            let mut order = old.order.clone();
            order.swap(random.below(count), random.below(count));
            let old = self.search.replace(index, Ring::default());
            let ring = self.search.build(index, job, &order, &old);
            self.search.replace(index, old);
            return Some(ring);
        }
        let mut ring = old;
        let ends = self.search.model.ends(job, &ring.order);
        let hop = random.below(ends.len());
        let (from, to, both) = ends.get(hop).copied()?;
        let options = self.search.model.options(from, to, both);
        let connections = job.connections.clamp(1, 64) as usize;
        let (first, all) = (random.below(connections), random.below(4) == 0);
        let mut changed = false;
        for at in if all { 0..connections } else { first..first + 1 } {
            let path = options.candidates.get(random.below(options.candidates.len()))?;
            changed |= set(&mut ring, hop, at, path);
        }
        changed.then_some(ring)
    }

    /// Keeps a ring if it makes the score better.
    fn attempt(&mut self, index: usize, ring: Ring, best: &mut Objective) -> bool {
        let old = self.search.replace(index, ring);
        let objective = self.objective();
        let better = is_better(objective, *best);
        if better {
            *best = objective;
        } else {
            self.search.replace(index, old);
        }
        better
    }

    fn paths(&mut self, index: usize, job: &Job, best: &mut Objective) -> bool {
        let Some(ring) = self.search.rings.get(index).cloned() else { return false };
        let mut moved = false;
        for (hop, (from, to, both)) in self.search.model.ends(job, &ring.order).into_iter().enumerate() {
            let options = self.search.model.options(from, to, both);
            let count = match ring.edges.get(hop) {
                Some(EdgeRoutes::Pinned(paths)) if options.candidates.len() > 1 => paths.len(),
                _ => continue,
            };
            for (at, path) in (0..count).flat_map(|at| options.candidates.iter().map(move |path| (at, path)))
            {
                if self.remaining_budget == 0 {
                    return moved;
                }
                let Some(mut ring) = self.search.rings.get(index).cloned() else { return moved };
                if set(&mut ring, hop, at, path) {
                    moved |= self.attempt(index, ring, best);
                }
            }
        }
        moved
    }

    /// Two participants change places, or a stretch is turned round.
    fn orders(&mut self, index: usize, job: &Job, best: &mut Objective) -> bool {
        let count = job.hosts.len();
        if !(3..=MAX_SWAPPED).contains(&count) {
            return false;
        }
        let mut moved = false;
        let pairs = (0..count).flat_map(|low| (low + 1..count).map(move |high| (low, high)));
        for (low, high) in pairs {
            for turn in [false, true] {
                if self.remaining_budget == 0 {
                    return moved;
                }
                let Some(old) = self.search.rings.get(index).cloned() else { return moved };
                let mut order = old.order.clone();
                match order.get_mut(low..=high) {
                    Some(stretch) if turn => stretch.reverse(),
                    Some(_) => order.swap(low, high),
                    None => continue,
                }
                let old = self.search.replace(index, Ring::default());
                let ring = self.search.build(index, job, &order, &old);
                self.search.replace(index, old);
                moved |= self.attempt(index, ring, best);
            }
        }
        moved
    }
}

/// Sets one connection's path; whether that changes anything.
fn set(ring: &mut Ring, hop: usize, at: usize, path: &Rc<Candidate>) -> bool {
    let Some(EdgeRoutes::Pinned(paths)) = ring.edges.get_mut(hop) else { return false };
    let Some(cell) = paths.get_mut(at).filter(|cell| cell.path != path.path) else { return false };
    *cell = Rc::clone(path);
    true
}

fn is_better(new: Objective, old: Objective) -> bool {
    if new.0 != old.0 {
        return new.0 < old.0;
    }
    let alike = (new.1 - old.1).abs() <= 1e-9 * old.1;
    if alike { new.2 < old.2 * (1.0 - 1e-6) } else { new.1 < old.1 }
}
