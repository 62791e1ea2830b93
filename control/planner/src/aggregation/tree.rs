//! Aggregators of two levels. Those at racks' switches sum what their racks send; one is above them, at a spine or in any rack.
//!
//! An uplink then carries one part for a rack where it carried one for each host; below, nothing changes. Each sum takes the way through one
//! machine more. Hosts of racks without an aggregator, and of the one above's own, send to the one above.

use super::ecmp::EcmpRoutes;
use super::{AggregatorOffer, AggregatorPath, HEADER_BYTES, bytes_per_second, seconds};
use crate::conditions::Conditions;
use harmonaize_topology::DirectedLink;
use harmonaize_topology::{Aggregator, AggregatorId, HostId, Node, SwitchId, Topology};
use std::collections::BTreeMap;

/// Most rates, and most delays, of aggregators below that are told apart.
const MAX_STEPS: usize = 16;

/// An aggregator below another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeafAggregator {
    /// Which.
    pub aggregator: AggregatorId,
    /// The hosts that send to it, as indices into the group's, ascending.
    pub hosts: Vec<usize>,
}

/// Hosts whose links all lead to one switch; or one host with links to several.
struct Rack {
    /// Where their ways part from the others': the switch, or the host.
    from: Node,
    hosts: Vec<usize>,
    /// What each can send to the switch, and receive, in a second: of the slowest; headers and all.
    host_rate: f64,
    /// One way to the switch, of the farthest.
    delay: f64,
}

/// The way from a rack to the aggregator above.
struct UplinkPath {
    /// Of what one sends, the part that crosses each link.
    loads: BTreeMap<DirectedLink, f64>,
    delay: f64,
}

/// The tree that takes least time for operations of `size` bytes: the one above, those below, and the way. None where no tree can be. Exact
/// among trees whose aggregators below stand at their hosts' own switches and where payloads are alike (of at most [`MAX_STEPS`] rates and
/// delays): whoever uses one below at a rate and a delay loses nothing by using all that are as good. Cost: the offers times the switches; and
/// the offers times the racks and their links for each rate and delay.
pub(super) fn best_tree(
    topology: &Topology,
    conditions: &Conditions,
    hosts: &[HostId],
    offers: &[AggregatorOffer],
    size: f64,
) -> Option<(AggregatorId, Vec<LeafAggregator>, AggregatorPath)> {
    // Sums of codes are not added again.
    let exact = || offers.iter().filter(|offer| offer.tensor_bytes == offer.payload);
    let racks = racks(topology, conditions, hosts)?;
    let at =
        |offer: &AggregatorOffer| topology.aggregators().get(offer.aggregator.0).map(|known| known.switch);
    let below: Vec<Vec<&AggregatorOffer>> = racks
        .iter()
        .map(|rack| match rack.from {
            Node::Switch(switch) if rack.hosts.len() > 1 => {
                exact().filter(|offer| offer.supports_parents && at(offer) == Some(switch)).collect()
            }
            _ => Vec::new(),
        })
        .collect();
    if racks.len() < 2 || below.iter().all(Vec::is_empty) {
        return None;
    }
    let mut best: Option<(f64, AggregatorId, Vec<LeafAggregator>, AggregatorPath)> = None;
    for root in exact() {
        let Some(above) = TreeRoot::new(topology, conditions, &racks, root) else { continue };
        for leaves in above.leaf_choices(&below) {
            let Some(way) = above.path(&leaves) else { continue };
            let time = way.time(size);
            if best.as_ref().is_some_and(|(least, ..)| *least <= time) {
                continue;
            }
            let used = racks.iter().zip(&leaves);
            let used = used.filter_map(|(rack, leaf)| {
                Some(LeafAggregator { aggregator: (*leaf)?.aggregator, hosts: rack.hosts.clone() })
            });
            best = Some((time, root.aggregator, used.collect(), way));
        }
    }
    best.map(|(_, root, leaves, way)| (root, leaves, way))
}

/// None where a host has no open link.
fn racks(topology: &Topology, conditions: &Conditions, hosts: &[HostId]) -> Option<Vec<Rack>> {
    let mut racks: BTreeMap<Node, Rack> = BTreeMap::new();
    for (index, host) in hosts.iter().enumerate() {
        let (mut loads, node) = (BTreeMap::new(), Node::Host(*host));
        let (from, own, delay) = match EcmpRoutes::only_switch(topology, conditions, *host)? {
            Some(switch) => {
                let delay = EcmpRoutes::at_switch(topology, conditions, switch).add_load(node, &mut loads)?;
                (Node::Switch(switch), min_available(conditions, &loads), delay)
            }
            None => (node, f64::INFINITY, 0.0),
        };
        let rack = racks.entry(from).or_insert(Rack { from, hosts: Vec::new(), host_rate: own, delay });
        rack.hosts.push(index);
        (rack.host_rate, rack.delay) = (rack.host_rate.min(own), rack.delay.max(delay));
    }
    Some(racks.into_values().collect())
}

/// What links allow of what crosses them in these parts, in both directions; bytes a second.
fn min_available(conditions: &Conditions, loads: &BTreeMap<DirectedLink, f64>) -> f64 {
    let allowed = loads.iter().map(|(link, load)| {
        let both = [*link, link.reversed()].map(|link| bytes_per_second(conditions.available(link)));
        both.into_iter().fold(f64::INFINITY, f64::min) / load
    });
    allowed.fold(f64::INFINITY, f64::min)
}

/// What an aggregator carries for each of `count` senders or receivers, in bytes of payload a second.
fn sum_rate(known: &Aggregator, offer: &AggregatorOffer, payload: f64, count: f64) -> f64 {
    let link = bytes_per_second(known.rate) * payload / (payload + HEADER_BYTES);
    let core = match offer.packets_per_second {
        0 => f64::INFINITY,
        packets => packets as f64 * payload,
    };
    link.min(core) / (count * (1.0 + f64::from(offer.other_communicators)))
}

/// An aggregator above, and the racks' ways to it.
struct TreeRoot<'a> {
    topology: &'a Topology,
    conditions: &'a Conditions,
    racks: &'a [Rack],
    root: &'a AggregatorOffer,
    aggregator: &'a Aggregator,
    uplinks: Vec<UplinkPath>,
}

impl<'a> TreeRoot<'a> {
    /// None where a rack has no way of open links.
    fn new(
        topology: &'a Topology,
        conditions: &'a Conditions,
        racks: &'a [Rack],
        root: &'a AggregatorOffer,
    ) -> Option<Self> {
        let known = topology.aggregators().get(root.aggregator.0)?;
        let spread = EcmpRoutes::new(topology, conditions, known.switch);
        let up = |rack: &Rack| {
            let mut loads = BTreeMap::new();
            let delay = spread.add_load(rack.from, &mut loads)?;
            Some(UplinkPath { loads, delay })
        };
        let ups = racks.iter().map(up).collect::<Option<_>>()?;
        Some(Self { topology, conditions, racks, root, aggregator: known, uplinks: ups })
    }

    /// What a rack's hosts have by one below. It is the payload a second that it can do, and the delay to the switch of the
    /// one above.
    fn leaf_rate(&self, rack: &Rack, up: &UplinkPath, offer: &AggregatorOffer) -> Option<(f64, f64)> {
        let known = self.topology.aggregators().get(offer.aggregator.0)?;
        // Its hosts' parts and the sum from above come in; their sums and the part go out.
        let count = rack.hosts.len() as f64 + 1.0;
        let rate = sum_rate(known, offer, offer.payload.0.max(1) as f64, count);
        Some((rate, rack.delay + 2.0 * seconds(known.delay) + up.delay))
    }

    /// For each rack one below, or none: for each rate and delay all that are as good.
    fn leaf_choices<'b>(&self, below: &[Vec<&'b AggregatorOffer>]) -> Vec<Vec<Option<&'b AggregatorOffer>>> {
        let racks = || self.racks.iter().zip(&self.uplinks).zip(below);
        let of = |((rack, up), offers): ((&Rack, &UplinkPath), &Vec<&'b AggregatorOffer>)| -> Vec<(&'b AggregatorOffer, f64, f64)> {
            let others = offers.iter().filter(|offer| offer.aggregator != self.root.aggregator);
            others
                .filter_map(|offer| self.leaf_rate(rack, up, offer).map(|(rate, delay)| (*offer, rate, delay)))
                .collect()
        };
        let known: Vec<Vec<(&AggregatorOffer, f64, f64)>> = racks().map(of).collect();
        let rates = steps(known.iter().flatten().map(|(_, rate, _)| *rate).collect());
        let delays = steps(known.iter().flatten().map(|(_, _, delay)| *delay).collect());
        let mut choices: Vec<Vec<Option<&AggregatorOffer>>> = Vec::new();
        // Of what takes the same time the fewest.
        for (rate, delay) in
            rates.iter().rev().flat_map(|rate| delays.iter().map(move |delay| (*rate, *delay)))
        {
            let good = |offers: &Vec<(&'b AggregatorOffer, f64, f64)>| {
                let found = offers.iter().find(|(_, own, way)| *own >= rate && *way <= delay);
                found.map(|(offer, ..)| *offer)
            };
            let choice: Vec<Option<&AggregatorOffer>> = known.iter().map(good).collect();
            if choice.iter().any(Option::is_some) && !choices.contains(&choice) {
                choices.push(choice);
            }
        }
        choices
    }

    /// The way where each rack has this one below, or none.
    fn path(&self, leaves: &[Option<&AggregatorOffer>]) -> Option<AggregatorPath> {
        let used = leaves.iter().flatten().map(|offer| offer.payload).chain([self.root.payload]);
        let payload = used.min().map_or(1.0, |payload| payload.0.max(1) as f64);
        let goes = payload / (payload + HEADER_BYTES);
        let mut loads: BTreeMap<DirectedLink, f64> = BTreeMap::new();
        let (mut count, mut rate) = (0.0, f64::INFINITY);
        let (mut farthest, mut between) = (0.0_f64, 0.0_f64);
        for ((rack, up), leaf) in self.racks.iter().zip(&self.uplinks).zip(leaves) {
            let hosts = rack.hosts.len() as f64;
            rate = rate.min(rack.host_rate * goes);
            let path = rack.delay + up.delay;
            between = between.max(path);
            let (sends, delay) = match leaf {
                Some(offer) => {
                    let known = self.topology.aggregators().get(offer.aggregator.0)?;
                    rate = rate.min(sum_rate(known, offer, payload, hosts + 1.0));
                    (1.0, path + 2.0 * seconds(known.delay))
                }
                None => (hosts, path),
            };
            farthest = farthest.max(delay);
            count += sends;
            for (link, part) in &up.loads {
                *loads.entry(*link).or_default() += part * sends;
            }
        }
        let links = min_available(self.conditions, &loads) * goes;
        let rate = rate.min(links).min(sum_rate(self.aggregator, self.root, payload, count));
        let delay = farthest + seconds(self.aggregator.delay);
        (rate > 1.0).then_some(AggregatorPath {
            rate,
            tensor_rate: rate,
            delay,
            packet_time: 0.0,
            max_host_delay: 2.0 * between,
        })
    }
}

/// The values, each once, ascending; of too many some, from the least to the most.
fn steps(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values.dedup();
    if values.len() <= MAX_STEPS {
        return values;
    }
    let last = values.len() - 1;
    (0..MAX_STEPS).filter_map(|step| values.get(step * last / (MAX_STEPS - 1)).copied()).collect()
}

impl EcmpRoutes<'_> {
    /// The switch that all open links of a host lead to. Returns `Some(None)` where they lead to several, and none where there is
    /// no open link.
    fn only_switch(topology: &Topology, conditions: &Conditions, host: HostId) -> Option<Option<SwitchId>> {
        let spread = EcmpRoutes::at_switch(topology, conditions, SwitchId(usize::MAX));
        let mut ends: Vec<Node> = spread.open_links(Node::Host(host)).map(|(_, end)| end).collect();
        ends.sort_unstable();
        ends.dedup();
        match ends.as_slice() {
            [] => None,
            [Node::Switch(switch)] => Some(Some(*switch)),
            _ => Some(None),
        }
    }
}

#[cfg(test)]
mod tests;
