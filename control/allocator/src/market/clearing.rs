//! Assigns units of each kind to buyers, at most one unit each. The sum of what the buyers gain is the largest. Buyers enter one
//! by one. Each enters where others can make room at least loss: they leave, or move to another kind.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Gains that differ by less are alike.
const ALIKE: f64 = 1e-9;

/// Who may get one unit.
#[derive(Debug, Clone)]
pub(super) struct Buyer {
    /// What it gains by a unit of each kind, above its base price; `None` where it may not have one.
    pub(super) gains: Vec<Option<f64>>,
    /// The kind of which it has a unit now: of equal ones the best.
    pub(super) current: Option<usize>,
}

/// A gain that is a number.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Gain(f64);

impl Eq for Gain {}

impl PartialOrd for Gain {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Gain {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Buyers of a kind by what a move gains them, of equal ones the first.
type Moves = BinaryHeap<(Gain, Reverse<usize>)>;

/// How a unit of a kind becomes free.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Room {
    /// One is left.
    Free,
    /// A buyer leaves.
    Leave(usize),
    /// A buyer moves to another kind.
    Move(usize, usize),
}

/// An assignment of buyers to kinds.
pub(super) struct Clearing<'a> {
    buyers: &'a [Buyer],
    /// Units of each kind that nobody has.
    free: Vec<u32>,
    seats: Vec<Option<usize>>,
    /// What a kind's buyers would gain by moving to another kind, by kind. What they would gain by leaving stands at the place of
    /// their own kind. Entries of buyers that have gone are passed over.
    moves: Vec<Vec<Moves>>,
}

impl<'a> Clearing<'a> {
    /// The assignment of all buyers, in their order: of equal ones the first stays.
    pub(super) fn new(units: &[u32], buyers: &'a [Buyer]) -> Self {
        let kinds = units.len();
        let mut clearing = Self {
            buyers,
            free: units.to_vec(),
            seats: vec![None; buyers.len()],
            moves: vec![vec![Moves::new(); kinds]; kinds],
        };
        for buyer in 0..buyers.len() {
            clearing.enter(buyer);
        }
        clearing
    }

    /// The kind of which each buyer has a unit.
    pub(super) fn seats(&self) -> &[Option<usize>] {
        &self.seats
    }

    /// What one more unit of each kind would be worth to those who lack one. That above its base is the kind's price: the least at which
    /// nobody wants another kind, and by kind what the winners' presence costs the others.
    pub(super) fn worth_of_another(&mut self) -> Vec<f64> {
        let mut worth: Vec<f64> = vec![0.0; self.free.len()];
        let waiting = self.buyers.iter().zip(&self.seats).filter(|(_, seat)| seat.is_none());
        for (buyer, _) in waiting {
            for (worth, gain) in worth.iter_mut().zip(&buyer.gains) {
                *worth = gain.unwrap_or(0.0).max(*worth);
            }
        }
        let moves = self.best_moves();
        for _ in 0..worth.len() {
            for (from, to, gain, _) in &moves {
                let through = worth.get(*from).map_or(0.0, |after| gain + after);
                if let Some(worth) = worth.get_mut(*to) {
                    *worth = through.max(*worth);
                }
            }
        }
        worth
    }

    /// From each kind to each other the move that gains most: from, to, gain and buyer. To the same kind it is leaving.
    fn best_moves(&mut self) -> Vec<(usize, usize, f64, usize)> {
        let mut best = Vec::new();
        for (from, by_kind) in self.moves.iter_mut().enumerate() {
            for (to, heap) in by_kind.iter_mut().enumerate() {
                while let Some((Gain(gain), Reverse(buyer))) = heap.peek().copied() {
                    if self.seats.get(buyer).copied().flatten() == Some(from) {
                        best.push((from, to, gain, buyer));
                        break;
                    }
                    heap.pop();
                }
            }
        }
        let (leave, change): (Vec<_>, Vec<_>) = best.into_iter().partition(|(from, to, ..)| from == to);
        // Who leaves comes first, so that the others build on it.
        leave.into_iter().chain(change).collect()
    }

    /// By kind, how a unit becomes free at the least loss, and what that gains.
    fn rooms(&mut self) -> Vec<Option<(f64, Room)>> {
        let free = |free: &u32| (*free > 0).then_some((0.0, Room::Free));
        let mut rooms: Vec<Option<(f64, Room)>> = self.free.iter().map(free).collect();
        let moves = self.best_moves();
        for _ in 0..rooms.len() {
            let mut is_settled = true;
            for (from, to, gain, buyer) in &moves {
                let (through, room) = if from == to {
                    (Some(*gain), Room::Leave(*buyer))
                } else {
                    let after = rooms.get(*to).copied().flatten();
                    (after.map(|(after, _)| gain + after), Room::Move(*buyer, *to))
                };
                if let (Some(through), Some(before)) = (through, rooms.get_mut(*from))
                    && before.is_none_or(|(before, _)| through > before + ALIKE)
                {
                    *before = Some((through, room));
                    is_settled = false;
                }
            }
            if is_settled {
                break;
            }
        }
        rooms
    }

    /// Lets a buyer in where that gains most, if it gains anything, or if a unit is left.
    fn enter(&mut self, buyer: usize) {
        let rooms = self.rooms();
        let Some(Buyer { gains, current }) = self.buyers.get(buyer) else { return };
        let entry = |kind: usize| {
            let (gain, (room, _)) = ((*gains.get(kind)?)?, (*rooms.get(kind)?)?);
            Some((kind, gain + room))
        };
        let entries = current.iter().copied().chain(0..rooms.len()).filter_map(entry);
        let better = |one: (usize, f64), next: (usize, f64)| if next.1 > one.1 + ALIKE { next } else { one };
        let Some((entry, gain)) = entries.reduce(better) else { return };
        let mut steps = Vec::new();
        let (mut kind, mut last) = (entry, None);
        while steps.len() < rooms.len() {
            last = rooms.get(kind).copied().flatten().map(|(_, room)| room);
            let Some(Room::Move(other, to)) = last else { break };
            steps.push((other, to));
            kind = to;
        }
        match last {
            Some(Room::Free) if gain >= -ALIKE => {
                if let Some(free) = self.free.get_mut(kind) {
                    *free -= 1;
                }
            }
            Some(Room::Leave(other)) if gain > ALIKE => {
                if let Some(seat) = self.seats.get_mut(other) {
                    *seat = None;
                }
            }
            _ => return,
        }
        for (other, to) in steps {
            self.seat(other, to);
        }
        self.seat(buyer, entry);
    }

    /// Gives a buyer a unit of a kind.
    fn seat(&mut self, buyer: usize, kind: usize) {
        let Some(Buyer { gains, .. }) = self.buyers.get(buyer) else { return };
        let (Some(seat), Some(heaps)) = (self.seats.get_mut(buyer), self.moves.get_mut(kind)) else { return };
        *seat = Some(kind);
        let here = gains.get(kind).copied().flatten().unwrap_or(0.0);
        for (to, (heap, gain)) in heaps.iter_mut().zip(gains).enumerate() {
            let there = if to == kind { Some(0.0) } else { *gain };
            if let Some(there) = there {
                heap.push((Gain(there - here), Reverse(buyer)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// The largest sum of gains of the buyers from one on, by trying all.
    fn exhaustive(units: &[u32], buyers: &[Buyer], from: usize) -> f64 {
        let Some(Buyer { gains, .. }) = buyers.get(from) else { return 0.0 };
        let without = exhaustive(units, buyers, from + 1);
        (0..units.len()).filter(|kind| units[*kind] > 0).fold(without, |best, kind| match gains[kind] {
            Some(gain) => {
                let mut left = units.to_vec();
                left[kind] -= 1;
                best.max(gain + exhaustive(&left, buyers, from + 1))
            }
            None => best,
        })
    }

    #[test]
    fn gains_are_maximal_and_prices_their_slope() {
        for seed in 0..300 {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let kinds = random.random_range(1..=3_usize);
            let units: Vec<u32> = (0..kinds).map(|_| random.random_range(0..=3)).collect();
            let gain = |random: &mut ChaCha8Rng| {
                random.random_bool(0.8).then(|| f64::from(random.random_range(0..20_u32)) / 10.0)
            };
            let count = random.random_range(0..=6);
            let gains = (0..count).map(|_| (0..kinds).map(|_| gain(&mut random)).collect());
            let buyers: Vec<Buyer> = gains.map(|gains| Buyer { gains, current: None }).collect();
            let mut clearing = Clearing::new(&units, &buyers);
            let seats = clearing.seats().iter().zip(&buyers);
            let sum: f64 = seats.filter_map(|(seat, buyer)| buyer.gains[(*seat)?]).sum();
            let best = exhaustive(&units, &buyers, 0);
            assert!((sum - best).abs() < 1e-6, "seed {seed}: {sum} of {best}, {units:?} {buyers:?}");
            for (kind, worth) in clearing.worth_of_another().into_iter().enumerate() {
                let mut more = units.clone();
                more[kind] += 1;
                let slope = exhaustive(&more, &buyers, 0) - best;
                assert!((worth - slope).abs() < 1e-6, "seed {seed}, kind {kind}: {worth} of {slope}");
            }
        }
    }
}
