//! A topology in the numbers of the one before it, so that what is known by a number stays true.

use super::{Aggregator, AggregatorId, Host, HostId, Link, LinkId, Node, Switch, SwitchId, Topology};
use harmonaize_units::Rate;
use std::collections::BTreeMap;

impl Link {
    /// Whether the topology has it no longer, and keeps its number alone.
    pub fn is_gone(&self) -> bool {
        self.rate == Rate(0)
    }
}

impl Aggregator {
    /// Whether the topology has it no longer, and keeps its number alone.
    pub fn is_gone(&self) -> bool {
        self.rate == Rate(0)
    }
}

impl Topology {
    /// Whether the topology has a node, and not its number alone.
    pub fn has(&self, node: Node) -> bool {
        self.by_name.get(self.node_name(node)) == Some(&node)
    }

    /// Hosts that the topology has, with their numbers.
    pub fn hosts_there(&self) -> impl Iterator<Item = (HostId, &Host)> {
        let all = self.hosts.iter().enumerate().map(|(index, host)| (HostId(index), host));
        all.filter(move |(id, _)| self.has(Node::Host(*id)))
    }

    /// Switches that the topology has, with their numbers.
    pub fn switches_there(&self) -> impl Iterator<Item = (SwitchId, &Switch)> {
        let all = self.switches.iter().enumerate().map(|(index, switch)| (SwitchId(index), switch));
        all.filter(move |(id, _)| self.has(Node::Switch(*id)))
    }

    /// Links that the topology has, with their numbers.
    pub fn links_there(&self) -> impl Iterator<Item = (LinkId, &Link)> {
        let all = self.links.iter().enumerate().map(|(index, link)| (LinkId(index), link));
        all.filter(|(_, link)| !link.is_gone())
    }

    /// Aggregators that the topology has, with their numbers.
    pub fn aggregators_there(&self) -> impl Iterator<Item = (AggregatorId, &Aggregator)> {
        let all = self.aggregators.iter().enumerate().map(|(index, known)| (AggregatorId(index), known));
        all.filter(|(_, known)| !known.is_gone())
    }

    /// This topology in the numbers of `before`. What both have keeps its number, and what is new has the numbers behind. What is gone
    /// keeps its number too: hosts and switches without links or name to be found by, links and aggregators with a rate of 0.
    #[must_use]
    pub fn numbered_as(self, before: &Self) -> Self {
        let name = |host: &Host| host.name.clone();
        let (hosts, host_numbers) =
            merge(before.hosts.clone(), self.hosts, name, |place, host| *place = host);
        let name = |switch: &Switch| switch.name.clone();
        let (switches, switch_numbers) =
            merge(before.switches.clone(), self.switches, name, |place, switch| *place = switch);
        let switch = |id: SwitchId| switch_numbers.get(id.0).map_or(id, |number| SwitchId(*number));
        let node = |node: Node| match node {
            Node::Host(id) => Node::Host(host_numbers.get(id.0).map_or(id, |number| HostId(*number))),
            Node::Switch(id) => Node::Switch(switch(id)),
        };
        let links = self.links.into_iter();
        let links: Vec<Link> =
            links.map(|link| Link { from: node(link.from), to: node(link.to), ..link }).collect();
        let gone: Vec<Link> =
            before.links.iter().map(|link| Link { rate: Rate(0), ..link.clone() }).collect();
        let ends = |link: &Link| (link.from.min(link.to), link.from.max(link.to));
        // Each end keeps its place: which direction is which goes by that.
        let (links, _) = merge(gone, links, ends, |place, link| {
            (place.rate, place.delay, place.risk) = (link.rate, link.delay, link.risk);
        });
        let aggregators = self.aggregators.into_iter();
        let aggregators = aggregators.map(|known| Aggregator { switch: switch(known.switch), ..known });
        let gone = before.aggregators.iter().map(|known| Aggregator { rate: Rate(0), ..known.clone() });
        let name = |known: &Aggregator| known.name.clone();
        let (aggregators, _) =
            merge(gone.collect(), aggregators.collect(), name, |place, known| *place = known);
        let by_name = self.by_name.into_iter().map(|(name, at)| (name, node(at))).collect();
        let by_address = self.by_address.into_iter().map(|(address, at)| (address, switch(at))).collect();
        Self::wire(hosts, switches, links, aggregators, by_name, by_address)
    }
}

/// Puts each of `now` in the place of the one that has its key, or behind all. Returns all, and the places of those of `now`.
fn merge<T, K: Ord>(
    mut all: Vec<T>,
    now: Vec<T>,
    key: impl Fn(&T) -> K,
    put: impl Fn(&mut T, T),
) -> (Vec<T>, Vec<usize>) {
    let mut places: BTreeMap<K, usize> = all.iter().enumerate().map(|(at, one)| (key(one), at)).collect();
    let mut numbers = Vec::with_capacity(now.len());
    for one in now {
        let at = *places.entry(key(&one)).or_insert(all.len());
        numbers.push(at);
        match all.get_mut(at) {
            Some(place) => put(place, one),
            None => all.push(one),
        }
    }
    (all, numbers)
}
