//! What can be promised of a fabric to whoever's hosts, wherever they stand. Each host has a hose (Duffield et al., "A flexible model
//! for resource management in virtual private networks", SIGCOMM 1999), and those who want more than that share a part.
//!
//! Whether a promise fits is decided without a look at who stands in which rack, so that what is refused tells nobody. Two things
//! make it true for all placements alike. A communicator whose hops all cross one spine puts its rate on each of that spine's links at
//! most once in each direction, for a ring in order of racks leaves each rack once and comes back once: so whatever fits into as many
//! *trees* as there are spines, each communicator whole into one, can be kept. And where no host is promised more than its hose, a
//! rack cannot be asked for more than its hosts' hoses together, on the trees that are not used so; that single paths can carry it between
//! all racks at once is tested, not proved.

use crate::all_to_all::line_rate;
use crate::conditions::{Conditions, LinkUse};
use harmonaize_topology::DirectedLink;
use harmonaize_topology::{HostId, Node, SwitchId, Topology};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The least part of a fabric's trees, and of their rate, that counts as there. Beyond it, what is out of use is so for those
/// alone whom it meets. Their promises are broken then.
const MIN_PART: f64 = 0.5;

/// The links between hosts that stand together and all others, by the topology; hosts are counted, never named.
#[derive(Clone, Debug)]
struct Tier {
    hosts: usize,
    up: Vec<DirectedLink>,
    /// Of the slowest link, bits a second.
    rate: f64,
}

/// A fabric's tiers.
#[derive(Clone, Debug)]
pub struct HoseModel {
    tiers: Vec<Tier>,
    /// What each host's own links carry, bits a second.
    line_rates: Vec<f64>,
}

/// What a fabric has for promises as it is now: the same for all hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct GuaranteeCapacity {
    /// Ways from a rack to all others that share no link.
    trees: usize,
    /// What each carries, bits a second.
    rate: f64,
    /// Of each tier: hosts that stand together, and links from there.
    tiers: Vec<(usize, usize)>,
    line_rates: Vec<f64>,
}

/// Something promised: whose hosts each send so many bits a second to the next.
#[derive(Clone, Copy, Debug)]
pub struct Guarantee<'a> {
    /// Along a ring.
    pub hosts: &'a [HostId],
    /// Bits a second.
    pub rate: f64,
}

impl HoseModel {
    /// Finds the tiers: switches by how far they are from hosts, and below each what hangs on it. Cost: the links, and for each
    /// switch that has others above it the hosts below.
    pub fn new(topology: &Topology) -> Self {
        let count = topology.hosts_there().count();
        let line_rates =
            (0..topology.hosts().len()).map(|host| line_rate(topology, &[HostId(host)]).0 as f64).collect();
        let level = levels(topology);
        let at = |switch: SwitchId| level.get(switch.0).copied().unwrap_or(u32::MAX);
        let mut switches: Vec<SwitchId> = (0..topology.switches().len()).map(SwitchId).collect();
        switches.sort_by_key(|switch| at(*switch));
        let mut below: BTreeMap<SwitchId, BTreeSet<HostId>> = BTreeMap::new();
        let mut above: BTreeMap<Vec<HostId>, Vec<DirectedLink>> = BTreeMap::new();
        let mut tiers = Vec::new();
        let rate =
            |link: &DirectedLink| topology.links().get(link.link.0).map_or(0.0, |link| link.rate.0 as f64);
        for switch in switches {
            let (mut up, mut under) = (Vec::new(), BTreeSet::new());
            for link in topology.links_at(Node::Switch(switch)) {
                let Some(link) = topology.directed(*link, Node::Switch(switch)) else { continue };
                match topology.ends(link).map(|(_, end)| end) {
                    Some(Node::Host(host)) => drop(under.insert(host)),
                    Some(Node::Switch(next)) if at(next) < at(switch) => {
                        under.extend(below.get(&next).into_iter().flatten().copied());
                    }
                    Some(Node::Switch(next)) if at(next) > at(switch) => up.push(link),
                    // Switches of one tier in a row: any link may be the only way from one half of all hosts to the other.
                    Some(Node::Switch(_)) => {
                        tiers.push(Tier { hosts: count.div_ceil(2), up: vec![link], rate: rate(&link) });
                    }
                    None => {}
                }
            }
            if !up.is_empty() && under.len() < count && !under.is_empty() {
                above.entry(under.iter().copied().collect()).or_default().extend(up);
                below.insert(switch, under);
            }
        }
        for (hosts, up) in above {
            let rate = up.iter().map(rate).fold(f64::INFINITY, f64::min);
            tiers.push(Tier { hosts: hosts.len(), up, rate });
        }
        Self { tiers, line_rates }
    }

    /// What there is for promises, of all links this part. What is drained, failed or taken by strangers anywhere is taken off for
    /// all hosts alike, down to half of what there is without.
    pub fn capacity(&self, conditions: &Conditions, part: f64) -> GuaranteeCapacity {
        let available = |link: &DirectedLink| {
            let both = [*link, link.reversed()];
            let open = both.iter().all(|link| conditions.usable(*link) == LinkUse::Open);
            let least = both.iter().map(|link| conditions.available(*link).0).min().unwrap_or(0);
            if open { least as f64 } else { 0.0 }
        };
        let lines: Vec<f64> = self.line_rates.iter().map(|line| line * part).collect();
        let widest = lines.iter().copied().fold(0.0, f64::max);
        let mut room = GuaranteeCapacity {
            trees: usize::MAX,
            rate: f64::INFINITY,
            tiers: Vec::new(),
            line_rates: lines,
        };
        for Tier { hosts, up, rate } in &self.tiers {
            let least = rate * MIN_PART;
            let left: Vec<f64> = up.iter().map(available).filter(|left| *left >= least).collect();
            let links = left.len().max((up.len() as f64 * MIN_PART).ceil() as usize);
            let enough = left.len() == links;
            let slowest = left.iter().copied().fold(f64::INFINITY, f64::min);
            room.rate = room.rate.min(if enough { slowest.min(*rate) } else { least } * part);
            room.trees = room.trees.min(links);
            room.tiers.push((*hosts, links));
        }
        if self.tiers.is_empty() {
            // All hang on one switch: nothing but their own links is a limit.
            (room.trees, room.rate) = (0, widest);
        }
        room.tiers.sort_unstable();
        room.tiers.dedup();
        room
    }
}

impl GuaranteeCapacity {
    /// The most that can be promised to a communicator of these hosts beside the others, bits a second. It is what it would
    /// be wherever any of them stand. Cost: the promises, times trees and hosts.
    pub fn max_guarantee(&self, hosts: &[HostId], others: &[Guarantee<'_>]) -> f64 {
        let loads = guaranteed_rates(others.iter().copied());
        let line = |host: &HostId| {
            let line = self.line_rates.get(host.0).copied().unwrap_or(0.0);
            line - loads.get(host).copied().unwrap_or(0.0)
        };
        let own = hosts.iter().map(line).fold(f64::INFINITY, f64::min);
        if self.tiers.is_empty() {
            return own.max(0.0);
        }
        let mut sorted = others.to_vec();
        sorted.sort_by(|one, other| other.rate.total_cmp(&one.rate));
        let each = (0..=max_whole_trees(self.trees))
            .filter_map(|whole| self.max_guarantee_with(whole, hosts, &sorted));
        each.fold(0.0, f64::max).min(own).max(0.0)
    }

    /// The largest promise where so many trees take communicators whole and the others are for hoses. Returns none where the
    /// others do not fit so.
    fn max_guarantee_with(&self, whole: usize, hosts: &[HostId], others: &[Guarantee<'_>]) -> Option<f64> {
        let hose = self.hose_rate(whole);
        let mut used: BTreeMap<HostId, f64> = BTreeMap::new();
        let mut left = vec![self.rate; whole];
        for other in others {
            let full = |host: &HostId| used.get(host).copied().unwrap_or(0.0) + other.rate > hose;
            if !other.hosts.iter().any(full) {
                other.hosts.iter().for_each(|host| *used.entry(*host).or_default() += other.rate);
                continue;
            }
            // Into the tree where it leaves least, so that what is left lies together.
            let fits = left.iter_mut().filter(|left| **left >= other.rate);
            *fits.min_by(|one, other| one.total_cmp(other))? -= other.rate;
        }
        let of_hose = hosts.iter().map(|host| hose - used.get(host).copied().unwrap_or(0.0));
        let of_hose = of_hose.fold(f64::INFINITY, f64::min);
        Some(left.into_iter().fold(of_hose, f64::max))
    }

    /// What each host may be promised where nobody has more, if so many trees are not there.
    fn hose_rate(&self, less: usize) -> f64 {
        let each =
            self.tiers.iter().map(|(hosts, links)| hose_part(links.saturating_sub(less), *hosts) * self.rate);
        each.fold(f64::INFINITY, f64::min)
    }
}

/// How many trees may take communicators whole. The others are for hoses: whoever has been promised what, each host can still be promised its
/// own. Of fewer than four trees half would leave little for either, and all are whoever's comes first.
fn max_whole_trees(trees: usize) -> usize {
    if trees < 4 { trees } else { trees / 2 }
}

/// The largest part of a link that each of so many hosts can be promised on so many links. Each flow stays whole on one link.
/// First fit finds a place as long as all is no more than `links - (links - 1) * part`. Where at least q fit on a link, it fills
/// q of q + 1.
fn hose_part(links: usize, hosts: usize) -> f64 {
    let (links, hosts) = (links as f64, hosts.max(1) as f64);
    if links < 1.0 {
        return 0.0;
    }
    let by_count = (1..=64).map(f64::from).map(|q| (1.0 / q).min(links * q / (q + 1.0) / hosts));
    by_count.fold(links / (hosts + links - 1.0), f64::max).min(1.0)
}

/// What each host is promised in all.
fn guaranteed_rates<'a>(promised: impl Iterator<Item = Guarantee<'a>>) -> BTreeMap<HostId, f64> {
    let mut loads = BTreeMap::new();
    for Guarantee { hosts, rate } in promised {
        hosts.iter().for_each(|host| *loads.entry(*host).or_insert(0.0) += rate);
    }
    loads
}

/// How many links each switch is from the nearest host.
fn levels(topology: &Topology) -> Vec<u32> {
    let mut level = vec![u32::MAX; topology.switches().len()];
    let mut open = VecDeque::new();
    for (index, level) in level.iter_mut().enumerate() {
        let switch = Node::Switch(SwitchId(index));
        let links = topology.links_at(switch).iter().filter_map(|id| topology.directed(*id, switch));
        let mut ends = links.filter_map(|link| topology.ends(link));
        if ends.any(|(_, end)| matches!(end, Node::Host(_))) {
            *level = 1;
            open.push_back((SwitchId(index), 1));
        }
    }
    while let Some((switch, count)) = open.pop_front() {
        for link in topology.links_between_switches(switch) {
            let directed = topology.directed(*link, Node::Switch(switch));
            let Some((_, Node::Switch(next))) = directed.and_then(|link| topology.ends(link)) else {
                continue;
            };
            if let Some(cell) = level.get_mut(next.0)
                && *cell == u32::MAX
            {
                *cell = count + 1;
                open.push_back((next, count + 1));
            }
        }
    }
    level
}

#[cfg(test)]
mod tests;
