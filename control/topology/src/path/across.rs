//! Which hosts' packets can cross a link on the shortest ways.

use super::DirectedLink;
use crate::{HostId, Node, SwitchId, Topology};
use std::collections::VecDeque;

/// How many links every host is from a node, by host; none of those that do not reach it.
struct Distances(Vec<Option<u32>>);

impl Distances {
    fn of(&self, host: HostId) -> Option<u32> {
        self.0.get(host.0).copied().flatten()
    }
}

impl Topology {
    /// Hosts from which, and hosts to which, a shortest path can cross a directed link. They are those for which it leads away from them,
    /// and towards them. Takes the time of looking at each link once.
    pub fn hosts_across(&self, link: DirectedLink) -> [Vec<HostId>; 2] {
        let Some((from, to)) = self.ends(link) else { return [Vec::new(), Vec::new()] };
        let (near, far) = (self.distances(from), self.distances(to));
        let beyond = |one: &Distances, other: &Distances| {
            let hosts = (0..self.hosts().len()).map(HostId);
            hosts
                .filter(|host| one.of(*host).is_some_and(|count| other.of(*host) == Some(count + 1)))
                .collect()
        };
        [beyond(&near, &far), beyond(&far, &near)]
    }

    fn distances(&self, from: Node) -> Distances {
        let mut hosts = vec![None; self.hosts().len()];
        let mut switches = vec![None; self.switches().len()];
        let mut open = VecDeque::from([(from, 0)]);
        while let Some((node, count)) = open.pop_front() {
            let cell = match node {
                Node::Host(HostId(host)) => hosts.get_mut(host),
                Node::Switch(SwitchId(switch)) => switches.get_mut(switch),
            };
            let Some(cell) = cell.filter(|cell| cell.is_none()) else { continue };
            *cell = Some(count);
            // Hosts do not forward.
            if matches!(node, Node::Switch(_)) || node == from {
                let links = self.links_at(node).iter().filter_map(|link| self.directed(*link, node));
                open.extend(links.filter_map(|link| Some((self.ends(link)?.1, count + 1))));
            }
        }
        Distances(hosts)
    }
}
