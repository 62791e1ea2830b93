//! Shortest ways between hosts: fewest links between switches, then fewest links, then the widest, then the quickest.

use crate::topology::{HostId, LinkId, Node, Topology};
use crate::units::{Nanos, Rate};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// A way between two hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The links, in order.
    pub links: Vec<LinkId>,
    /// How many of them join two switches.
    pub switch_links: u64,
    /// Rate of the slowest.
    pub rate: Rate,
    /// One way, all links together.
    pub delay: Nanos,
}

/// What makes one way better than another; the least is best.
type Cost = (u64, u64, Reverse<u64>, u64);

impl Topology {
    /// The best way between two hosts; none from a host to itself, or where there is none.
    pub fn route(&self, from: HostId, to: HostId) -> Option<Route> {
        let reached = self.routes(from);
        let target = Node::Host(to);
        let ((switch_links, _, Reverse(rate), delay), _) = *reached.get(&target)?;
        let mut links = Vec::new();
        let mut node = target;
        while let Some((_, Some((link, before)))) = reached.get(&node) {
            links.push(*link);
            node = *before;
        }
        links.reverse();
        (from != to).then_some(Route { links, switch_links, rate: Rate(rate), delay: Nanos(delay) })
    }

    /// How many links between switches lie between a host and each host that it reaches.
    pub(crate) fn crossings(&self, from: HostId) -> BTreeMap<HostId, u64> {
        let hosts = self.routes(from).into_iter().filter_map(|(node, (cost, _))| match node {
            Node::Host(id) => Some((id, cost.0)),
            Node::Switch(_) => None,
        });
        hosts.collect()
    }

    fn routes(&self, from: HostId) -> BTreeMap<Node, (Cost, Option<(LinkId, Node)>)> {
        let mut best: BTreeMap<Node, (Cost, Option<(LinkId, Node)>)> = BTreeMap::new();
        let start: Cost = (0, 0, Reverse(u64::MAX), 0);
        let mut open = BinaryHeap::from([Reverse((start, Node::Host(from)))]);
        best.insert(Node::Host(from), (start, None));
        while let Some(Reverse((cost, node))) = open.pop() {
            let stale = best.get(&node).is_some_and(|(known, _)| *known < cost);
            if stale || (matches!(node, Node::Host(_)) && node != Node::Host(from)) {
                continue;
            }
            for id in self.links_at(node) {
                let Some(link) = self.links().get(id.0) else { continue };
                let next = if link.from == node { link.to } else { link.from };
                let between = matches!((node, next), (Node::Switch(_), Node::Switch(_)));
                let onward: Cost = (
                    cost.0 + u64::from(between),
                    cost.1 + 1,
                    Reverse(cost.2.0.min(link.rate.0)),
                    cost.3.saturating_add(link.delay.0),
                );
                if best.get(&next).is_none_or(|(known, _)| onward < *known) {
                    best.insert(next, (onward, Some((*id, node))));
                    open.push(Reverse((onward, next)));
                }
            }
        }
        best
    }
}
