//! The ring's order: as few links between switches as possible, hosts of one leaf next to each other.
//!
//! Hosts that hang on the same switches (and stand in the same rack) are one *place*. A ring that visits each place once
//! is a travelling salesman's tour over places; up to [`MAX_EXACT_PLACES`] it is solved exactly (Held and Karp 1962), beyond
//! that by a walk round a minimum spanning tree, optimal where distances form a tree as in a fat tree, and 2-opt.

use harmonaize_topology::PathFinder;
use harmonaize_topology::{HostId, Node, Topology};
use std::collections::BTreeMap;

/// Up to so many places the order is exact.
const MAX_EXACT_PLACES: usize = 11;

/// Most passes of 2-opt.
const MAX_PASSES: usize = 32;

/// A link between switches outweighs every difference of racks.
pub(crate) const LINK_WEIGHT: u64 = 1 << 32;

/// So many links stand for no way at all.
pub(crate) const UNREACHABLE_DISTANCE: u64 = 1 << 16;

/// A ring order over hosts: indices into `hosts`, each once, starting with 0. The same input gives the same order.
pub fn order(topology: &Topology, hosts: &[HostId]) -> Vec<usize> {
    let mut ways = PathFinder::new(topology);
    let crossings =
        |from, to| ways.crossings(from, to).unwrap_or(UNREACHABLE_DISTANCE).saturating_mul(LINK_WEIGHT);
    order_by(topology, hosts, crossings)
}

/// What [`order`] does, with other distances between hosts of different places; they should be symmetric.
pub(crate) fn order_by(
    topology: &Topology,
    hosts: &[HostId],
    distance: impl FnMut(HostId, HostId) -> u64,
) -> Vec<usize> {
    let places = places(topology, hosts);
    let distances = Distances::new(topology, hosts, &places, distance);
    let tour = if places.len() <= MAX_EXACT_PLACES { exact(&distances) } else { approximate(&distances) };
    let mut ring: Vec<usize> =
        tour.iter().filter_map(|place| places.get(*place)).flatten().copied().collect();
    normalise(&mut ring);
    ring
}

/// How many links between switches a ring crosses, all hops together.
pub fn ring_crossings(topology: &Topology, ring: &[HostId]) -> u64 {
    if ring.len() < 2 {
        return 0;
    }
    let mut ways = PathFinder::new(topology);
    let next = ring.iter().cycle().skip(1);
    ring.iter().zip(next).map(|(from, to)| ways.crossings(*from, *to).unwrap_or(0)).sum()
}

/// The racks along a ring.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Racks {
    /// How many hosts each has, one rack after another; empty where no operation goes by them.
    pub sizes: Vec<u32>,
    /// Where in the ring the first of them begins. The last may go on at the ring's beginning.
    pub from: u32,
}

/// The places of a ring. None where all stand in one or each in one of its own, or where those of a place do not follow one another.
pub fn racks(topology: &Topology, ring: &[HostId]) -> Racks {
    let places = places(topology, ring);
    let mut place_of = vec![0; ring.len()];
    for (number, place) in places.iter().enumerate() {
        for host in place {
            if let Some(place) = place_of.get_mut(*host) {
                *place = number;
            }
        }
    }
    let before = place_of.iter().cycle().skip(ring.len().saturating_sub(1));
    let from = place_of.iter().zip(before).position(|(place, before)| place != before).unwrap_or(0);
    place_of.rotate_left(from);
    let sizes: Vec<u32> = place_of.chunk_by(|one, next| one == next).map(|run| run.len() as u32).collect();
    let together = sizes.len() == places.len() && (2..ring.len()).contains(&sizes.len());
    if together { Racks { sizes, from: from as u32 } } else { Racks::default() }
}

/// What a host hangs on, and its rack.
pub(crate) type Place<'a> = (Vec<Node>, Option<&'a str>);

/// The place of a host.
pub(crate) fn place_of(topology: &Topology, host: HostId) -> Place<'_> {
    let rack = topology.hosts().get(host.0).and_then(|host| host.rack.as_deref());
    (topology.neighbours(host), rack)
}

/// Hosts by what they hang on, each list ascending; the first place has host 0.
fn places(topology: &Topology, hosts: &[HostId]) -> Vec<Vec<usize>> {
    let mut places: Vec<Vec<usize>> = Vec::new();
    let mut known = BTreeMap::new();
    for (index, host) in hosts.iter().enumerate() {
        let place = *known.entry(place_of(topology, *host)).or_insert_with(|| {
            places.push(Vec::new());
            places.len() - 1
        });
        if let Some(place) = places.get_mut(place) {
            place.push(index);
        }
    }
    places
}

/// Symmetric distances between places.
struct Distances {
    size: usize,
    cells: Vec<u64>,
}

impl Distances {
    fn new(
        topology: &Topology,
        hosts: &[HostId],
        places: &[Vec<usize>],
        mut distance: impl FnMut(HostId, HostId) -> u64,
    ) -> Self {
        let first: Vec<HostId> =
            places.iter().filter_map(|place| hosts.get(*place.first()?)).copied().collect();
        let rack = |host: HostId| topology.hosts().get(host.0).and_then(|host| host.rack.as_deref());
        let mut cells = Vec::with_capacity(first.len() * first.len());
        for from in &first {
            for to in &first {
                let far = distance(*from, *to).min(UNREACHABLE_DISTANCE * LINK_WEIGHT);
                cells.push(far + u64::from(rack(*from) != rack(*to)));
            }
        }
        Self { size: first.len(), cells }
    }

    fn at(&self, from: usize, to: usize) -> u64 {
        self.cells.get(from * self.size + to).copied().unwrap_or(u64::MAX >> 8)
    }
}

/// The best tour from place 0. It finds the cheapest route that has visited each set of places and stands at each of them.
fn exact(distances: &Distances) -> Vec<usize> {
    let size = distances.size;
    let mut best: BTreeMap<(u32, usize), (u64, usize)> = BTreeMap::from([((1, 0), (0, 0))]);
    for set in 1_u32..(1 << size) {
        for last in 0..size {
            let Some((cost, _)) = best.get(&(set, last)).copied() else { continue };
            for next in (0..size).filter(|next| set & (1 << next) == 0) {
                let onward = cost + distances.at(last, next);
                let entry = best.entry((set | 1 << next, next)).or_insert((u64::MAX, 0));
                if onward < entry.0 {
                    *entry = (onward, last);
                }
            }
        }
    }
    let mut set = ((1_u64 << size) - 1) as u32;
    let closing = |last: &usize| best.get(&(set, *last)).map(|(cost, _)| cost + distances.at(*last, 0));
    let mut last =
        (0..size).filter(|last| closing(last).is_some()).min_by_key(|last| closing(last)).unwrap_or(0);
    let mut tour = Vec::with_capacity(size);
    while set != 0 && tour.len() < size {
        tour.push(last);
        let before = best.get(&(set, last)).map_or(0, |(_, before)| *before);
        set &= !(1 << last);
        last = before;
    }
    tour.reverse();
    tour
}

/// A walk round a minimum spanning tree, then 2-opt.
fn approximate(distances: &Distances) -> Vec<usize> {
    let mut tour = tree_walk(distances);
    for _ in 0..MAX_PASSES {
        if !two_opt(distances, &mut tour) {
            break;
        }
    }
    tour
}

fn tree_walk(distances: &Distances) -> Vec<usize> {
    let mut children = vec![Vec::new(); distances.size];
    let mut near: Vec<(u64, usize)> = (0..distances.size).map(|to| (distances.at(0, to), 0)).collect();
    let mut left: Vec<usize> = (1..distances.size).collect();
    while let Some(next) = left.iter().copied().min_by_key(|to| near.get(*to).map(|(cost, _)| *cost)) {
        left.retain(|to| *to != next);
        if let Some(list) = near.get(next).and_then(|(_, from)| children.get_mut(*from)) {
            list.push(next);
        }
        for to in &left {
            let cost = distances.at(next, *to);
            if let Some(known) = near.get_mut(*to)
                && cost < known.0
            {
                *known = (cost, next);
            }
        }
    }
    let mut tour = Vec::with_capacity(distances.size);
    let mut open = vec![0];
    while let Some(place) = open.pop() {
        tour.push(place);
        open.extend(children.get(place).into_iter().flatten().rev());
    }
    tour
}

/// Reverses stretches of the tour where that shortens it; whether it did.
fn two_opt(distances: &Distances, tour: &mut [usize]) -> bool {
    let mut improved = false;
    let size = tour.len();
    for low in 1..size {
        for high in low + 1..size {
            let at = |index: usize| tour.get(index % size).copied().unwrap_or(0);
            let (before, first, last, after) = (at(low - 1), at(low), at(high), at(high + 1));
            let now = distances.at(before, first) + distances.at(last, after);
            let then = distances.at(before, last) + distances.at(first, after);
            if then < now
                && let Some(stretch) = tour.get_mut(low..=high)
            {
                stretch.reverse();
                improved = true;
            }
        }
    }
    improved
}

/// Starts the ring at 0, and of the two directions takes the one that goes on with the lower neighbour.
fn normalise(ring: &mut [usize]) {
    if let Some(start) = ring.iter().position(|index| *index == 0) {
        ring.rotate_left(start);
    }
    if ring.get(1) > ring.last()
        && let Some(rest) = ring.get_mut(1..)
    {
        rest.reverse();
    }
}

#[cfg(test)]
mod tests;
