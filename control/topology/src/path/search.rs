//! All shortest ways between hosts: a search from the target over the switches, remembered for all hosts that hang alike.

use super::{DirectedLink, MAX_PATHS, Path};
use crate::{HostId, Node, SwitchId, Topology};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// Most links of a path.
const MAX_LINKS: usize = 64;

/// A switch that does not reach the target.
const UNREACHABLE: u32 = u32::MAX;

/// Which directed links are not there.
type ExcludeLink<'a> = Box<dyn Fn(DirectedLink) -> bool + 'a>;

/// Finds paths in a topology, or in what is left of it. Memory: four bytes a switch for each set of switches that hosts hang on.
pub struct PathFinder<'a> {
    topology: &'a Topology,
    excluded: Option<ExcludeLink<'a>>,
    /// For each set of last links: how many links each switch is from the target, itself included.
    distances: HashMap<Vec<(SwitchId, bool)>, Rc<[u32]>>,
}

impl<'a> PathFinder<'a> {
    /// In the whole topology.
    pub fn new(topology: &'a Topology) -> Self {
        Self { topology, excluded: None, distances: HashMap::new() }
    }

    /// In the topology without some directed links.
    pub fn excluding(topology: &'a Topology, gone: impl Fn(DirectedLink) -> bool + 'a) -> Self {
        Self { topology, excluded: Some(Box::new(gone)), distances: HashMap::new() }
    }

    /// All paths with the fewest links, in the links' order, at most [`MAX_PATHS`].
    pub fn between(&mut self, from: HostId, to: HostId) -> Vec<Path> {
        if from == to {
            return Vec::new();
        }
        let (start, target) = (Node::Host(from), Node::Host(to));
        let direct = self.outgoing(start).find(|(_, next)| *next == target);
        if let Some((link, _)) = direct {
            return vec![Path([link].as_slice().into())];
        }
        let left = self.distances_to(to);
        let mut found = Vec::new();
        let nearest = self.outgoing(start).filter_map(|(_, next)| distance(&left, next)).min();
        if let Some(nearest) = nearest {
            self.extend(start, target, nearest, &left, &mut Vec::new(), &mut found);
        }
        found
    }

    /// How many links between switches lie between two hosts; none where there is no way.
    pub fn crossings(&mut self, from: HostId, to: HostId) -> Option<u64> {
        let start = Node::Host(from);
        if from == to || self.outgoing(start).any(|(_, next)| next == Node::Host(to)) {
            return Some(0);
        }
        let left = self.distances_to(to);
        let nearest = self.outgoing(start).filter_map(|(_, next)| distance(&left, next)).min()?;
        Some(u64::from(nearest.saturating_sub(1)))
    }

    fn is_excluded(&self, link: DirectedLink) -> bool {
        self.excluded.as_ref().is_some_and(|gone| gone(link))
    }

    /// The links that leave a node, and where they lead.
    fn outgoing(&self, node: Node) -> impl Iterator<Item = (DirectedLink, Node)> + '_ {
        let links = self.topology.links_at(node).iter();
        links.filter_map(move |link| {
            let link = self.topology.directed(*link, node)?;
            let (_, next) = self.topology.ends(link)?;
            (!self.is_excluded(link)).then_some((link, next))
        })
    }

    /// How many links each switch is from a host.
    fn distances_to(&mut self, to: HostId) -> Rc<[u32]> {
        let target = Node::Host(to);
        let mut last: Vec<(SwitchId, bool)> = Vec::new();
        for link in
            self.topology.links_at(target).iter().filter_map(|link| self.topology.directed(*link, target))
        {
            if let Some((_, Node::Switch(switch))) = self.topology.ends(link) {
                last.push((switch, !self.is_excluded(link.reversed())));
            }
        }
        last.sort_unstable();
        if let Some(left) = self.distances.get(&last) {
            return Rc::clone(left);
        }
        let mut left = vec![UNREACHABLE; self.topology.switches().len()];
        let mut open = VecDeque::new();
        for (switch, _) in last.iter().filter(|(_, usable)| *usable) {
            if let Some(cell) = left.get_mut(switch.0) {
                *cell = 1;
                open.push_back((*switch, 1));
            }
        }
        while let Some((switch, count)) = open.pop_front() {
            for link in self.topology.links_between_switches(switch) {
                let Some(link) = self.topology.directed(*link, Node::Switch(switch)) else { continue };
                let Some((_, Node::Switch(next))) = self.topology.ends(link) else { continue };
                if let Some(cell) = left.get_mut(next.0)
                    && *cell == UNREACHABLE
                    && !self.is_excluded(link.reversed())
                {
                    *cell = count + 1;
                    open.push_back((next, count + 1));
                }
            }
        }
        let left: Rc<[u32]> = left.into();
        self.distances.insert(last, Rc::clone(&left));
        left
    }

    fn extend(
        &self,
        node: Node,
        target: Node,
        next_distance: u32,
        left: &[u32],
        links: &mut Vec<DirectedLink>,
        found: &mut Vec<Path>,
    ) {
        if links.len() >= MAX_LINKS {
            return;
        }
        let at = match node {
            Node::Switch(switch) if next_distance > 0 => self.topology.links_between_switches(switch),
            _ => self.topology.links_at(if next_distance == 0 { target } else { node }),
        };
        for link in at.iter().filter_map(|link| self.topology.directed(*link, node)) {
            let Some((_, next)) = self.topology.ends(link) else { continue };
            let nearer =
                if next_distance == 0 { next == target } else { distance(left, next) == Some(next_distance) };
            if found.len() >= MAX_PATHS || !nearer || self.is_excluded(link) {
                continue;
            }
            links.push(link);
            if next_distance == 0 {
                found.push(Path(links.as_slice().into()));
            } else {
                self.extend(next, target, next_distance - 1, left, links, found);
            }
            links.pop();
        }
    }
}

fn distance(distances: &[u32], node: Node) -> Option<u32> {
    match node {
        Node::Switch(switch) => distances.get(switch.0).copied().filter(|count| *count != UNREACHABLE),
        Node::Host(_) => None,
    }
}
