//! The last stretch for plans small enough: single moves, judged by the predicted score itself instead of by the sum over links.

use super::Job;
use super::model::{Candidate, Choice, Ring};
use super::search::Search;
use std::rc::Rc;

/// A score to be made small: jobs stuck, slowdown, and the sum over links where those are alike.
type Merit = (u32, f64, f64);

/// A prediction costs so many times what a look at each of its links costs.
const PREDICTION: u64 = 8;

/// Orders are tried for jobs of at most so many participants.
const MOST_SWAPPED: usize = 12;

/// Makes single moves while the score gets better, for at most so many looks at links.
pub(super) fn polish(search: &mut Search<'_, '_>, budget: u64) {
    let mut polish = Polish { left: budget, search };
    let mut best = polish.merit();
    while polish.round(&mut best) {}
}

struct Polish<'s, 'm, 'a> {
    search: &'s mut Search<'m, 'a>,
    left: u64,
}

impl Polish<'_, '_, '_> {
    fn merit(&mut self) -> Merit {
        self.left = self.left.saturating_sub(self.search.size() * PREDICTION);
        let (_, score) = self.search.predict(&|_| true);
        (score.stuck, score.slowdown, self.search.sum())
    }

    /// One pass over all moves of all jobs; whether one was made.
    fn round(&mut self, best: &mut Merit) -> bool {
        let jobs = self.search.model.jobs();
        let mut moved = false;
        for (index, job) in jobs.iter().enumerate() {
            if !self.search.model.fixed.get(index).copied().unwrap_or(true) {
                moved |= self.orders(index, job, best);
                moved |= self.paths(index, job, best);
                moved |= self.exchanges(index, job, best);
            }
        }
        moved
    }

    /// Keeps a ring if it makes the score better.
    fn attempt(&mut self, index: usize, ring: Ring, best: &mut Merit) -> bool {
        let old = self.search.replace(index, ring);
        let merit = self.merit();
        let better = is_better(merit, *best);
        if better {
            *best = merit;
        } else {
            self.search.replace(index, old);
        }
        better
    }

    fn paths(&mut self, index: usize, job: &Job, best: &mut Merit) -> bool {
        let Some(ring) = self.search.rings.get(index).cloned() else { return false };
        let mut moved = false;
        for (hop, (from, to, both)) in self.search.model.ends(job, &ring.order).into_iter().enumerate() {
            let options = self.search.model.options(from, to, both);
            let count = match ring.hops.get(hop) {
                Some(Choice::Pinned(paths)) if options.candidates.len() > 1 => paths.len(),
                _ => continue,
            };
            for (at, path) in (0..count).flat_map(|at| options.candidates.iter().map(move |path| (at, path)))
            {
                if self.left == 0 {
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
    fn orders(&mut self, index: usize, job: &Job, best: &mut Merit) -> bool {
        let count = job.hosts.len();
        if !(3..=MOST_SWAPPED).contains(&count) {
            return false;
        }
        let mut moved = false;
        let pairs = (0..count).flat_map(|low| (low + 1..count).map(move |high| (low, high)));
        for (low, high) in pairs {
            for turn in [false, true] {
                if self.left == 0 {
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

    /// A path for one of this job's connections, and another one for a connection of another job that is in its way.
    fn exchanges(&mut self, index: usize, job: &Job, best: &mut Merit) -> bool {
        let jobs = self.search.model.jobs();
        let mut moved = false;
        for (other, second) in jobs.iter().enumerate().skip(index) {
            if self.search.model.fixed.get(other).copied().unwrap_or(true) {
                continue;
            }
            for first in self.single_moves(index, job) {
                for then in self.single_moves(other, second) {
                    if self.left == 0 {
                        return moved;
                    }
                    moved |= self.attempt_both((index, &first), (other, &then), best);
                }
            }
        }
        moved
    }

    fn attempt_both(&mut self, first: (usize, &Move), then: (usize, &Move), best: &mut Merit) -> bool {
        let before = self.search.rings.get(first.0).cloned().zip(self.search.rings.get(then.0).cloned());
        let Some((ring, other)) = before else { return false };
        let mut changed = true;
        for (index, (hop, at, path)) in [first, then] {
            let Some(mut ring) = self.search.rings.get(index).cloned() else { return false };
            changed &= set(&mut ring, *hop, *at, path);
            self.search.replace(index, ring);
        }
        let merit = if changed { self.merit() } else { *best };
        let better = changed && is_better(merit, *best);
        if better {
            *best = merit;
        } else {
            self.search.replace(then.0, other);
            self.search.replace(first.0, ring);
        }
        better
    }

    fn single_moves(&mut self, index: usize, job: &Job) -> Vec<Move> {
        let Some(ring) = self.search.rings.get(index).cloned() else { return Vec::new() };
        let mut moves = Vec::new();
        for (hop, (from, to, both)) in self.search.model.ends(job, &ring.order).into_iter().enumerate() {
            let options = self.search.model.options(from, to, both);
            if let (Some(Choice::Pinned(paths)), true) = (ring.hops.get(hop), options.candidates.len() > 1) {
                let each =
                    (0..paths.len()).flat_map(|at| options.candidates.iter().map(move |path| (at, path)));
                moves.extend(each.map(|(at, path)| (hop, at, Rc::clone(path))));
            }
        }
        moves
    }
}

/// Hop, connection, path.
type Move = (usize, usize, Rc<Candidate>);

/// Sets one connection's path; whether that changes anything.
fn set(ring: &mut Ring, hop: usize, at: usize, path: &Rc<Candidate>) -> bool {
    let Some(Choice::Pinned(paths)) = ring.hops.get_mut(hop) else { return false };
    let Some(cell) = paths.get_mut(at).filter(|cell| cell.path != path.path) else { return false };
    *cell = Rc::clone(path);
    true
}

fn is_better(new: Merit, old: Merit) -> bool {
    if new.0 != old.0 {
        return new.0 < old.0;
    }
    let alike = (new.1 - old.1).abs() <= 1e-9 * old.1;
    if alike { new.2 < old.2 * (1.0 - 1e-6) } else { new.1 < old.1 }
}
