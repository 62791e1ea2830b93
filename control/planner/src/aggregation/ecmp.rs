//! The shortest ways to a switch, and what they carry.

use crate::conditions::{Conditions, LinkUse};
use harmonaize_topology::DirectedLink;
use harmonaize_topology::{Node, SwitchId, Topology};
use std::collections::{BTreeMap, VecDeque};

/// The shortest ways of open links to a switch.
pub(super) struct EcmpRoutes<'a> {
    topology: &'a Topology,
    conditions: &'a Conditions,
    /// Of each switch that reaches it: how many links away it is.
    distances: BTreeMap<SwitchId, u32>,
}

impl<'a> EcmpRoutes<'a> {
    pub(super) fn new(topology: &'a Topology, conditions: &'a Conditions, target: SwitchId) -> Self {
        let mut distances = BTreeMap::from([(target, 0)]);
        let mut next = VecDeque::from([(target, 0)]);
        let spread = Self { topology, conditions, distances: BTreeMap::new() };
        while let Some((switch, steps)) = next.pop_front() {
            for (_, node) in spread.open_links(Node::Switch(switch)) {
                if let Node::Switch(other) = node
                    && !distances.contains_key(&other)
                {
                    distances.insert(other, steps + 1);
                    next.push_back((other, steps + 1));
                }
            }
        }
        Self { distances, ..spread }
    }

    /// Links that are open both ways, as they leave a node, and where they lead.
    pub(super) fn open_links(&self, node: Node) -> impl Iterator<Item = (DirectedLink, Node)> {
        let links =
            self.topology.links_at(node).iter().filter_map(move |link| self.topology.directed(*link, node));
        let usable = |link: &DirectedLink| self.conditions.usable(*link) == LinkUse::Open;
        let open = links.filter(move |link| usable(link) && usable(&link.reversed()));
        open.filter_map(|link| Some((link, self.topology.ends(link)?.1)))
    }

    /// Links from a node that lead nearer.
    fn next_hops(&self, node: Node) -> Vec<(DirectedLink, SwitchId)> {
        let own = match node {
            Node::Switch(switch) => self.distances.get(&switch).copied(),
            Node::Host(_) => None,
        };
        let steps = |node: Node| match node {
            Node::Switch(switch) => self.distances.get(&switch).map(|away| (switch, *away)),
            Node::Host(_) => None,
        };
        let mut all: Vec<(DirectedLink, SwitchId, u32)> = self
            .open_links(node)
            .filter_map(|(link, next)| steps(next).map(|(switch, away)| (link, switch, away)))
            .collect();
        let nearest = all.iter().map(|(_, _, away)| *away).min();
        all.retain(|(_, _, away)| Some(*away) == nearest && own.is_none_or(|own| *away < own));
        all.into_iter().map(|(link, switch, _)| (link, switch)).collect()
    }

    /// The same for who hangs on the switch itself. Cost: nothing.
    pub(super) fn at_switch(topology: &'a Topology, conditions: &'a Conditions, target: SwitchId) -> Self {
        Self { topology, conditions, distances: BTreeMap::from([(target, 0)]) }
    }

    /// Adds what a node sends, split alike over equal ways; its delay, in seconds, by the longest of them.
    pub(super) fn add_load(&self, from: Node, loads: &mut BTreeMap<DirectedLink, f64>) -> Option<f64> {
        let mut parts: BTreeMap<Node, (f64, f64)> = BTreeMap::from([(from, (1.0, 0.0))]);
        // All parts are as far away at each step.
        loop {
            let arrived =
                |node: &Node| matches!(node, Node::Switch(switch) if self.distances.get(switch) == Some(&0));
            if parts.keys().all(arrived) {
                return parts.into_values().map(|(_, delay)| delay).reduce(f64::max);
            }
            let mut next: BTreeMap<Node, (f64, f64)> = BTreeMap::new();
            for (node, (part, delay)) in parts {
                let links = self.next_hops(node);
                if links.is_empty() {
                    return None;
                }
                let each = part / links.len() as f64;
                for (link, switch) in links {
                    *loads.entry(link).or_default() += each;
                    let known = self.topology.links().get(link.link.0)?;
                    let entry = next.entry(Node::Switch(switch)).or_default();
                    *entry = (entry.0 + each, entry.1.max(delay + super::seconds(known.delay)));
                }
            }
            parts = next;
        }
    }
}
