//! Whether every host reaches every other. Hosts do not forward, so they reach each other by a direct link or through switches
//! that hang together.

use super::{HostId, Node, SwitchId, Topology};
use std::collections::{BTreeMap, BTreeSet};

/// What a host reaches. That is groups of switches that hang together, by number, and hosts that it has a direct link to.
#[derive(Default)]
struct Reach {
    groups: BTreeSet<usize>,
    hosts: BTreeSet<HostId>,
}

impl Topology {
    /// A pair of hosts that cannot reach one another, the higher first.
    pub(super) fn disconnected(&self) -> Option<(HostId, HostId)> {
        let reach = self.host_reach();
        // One group that all hosts hang on is the usual case, and settles it.
        let everywhere =
            reach.first()?.groups.iter().find(|group| reach.iter().all(|host| host.groups.contains(group)));
        if everywhere.is_some() {
            return None;
        }
        for (from, ours) in reach.iter().enumerate() {
            for (to, theirs) in reach.iter().enumerate().skip(from + 1) {
                if ours.groups.is_disjoint(&theirs.groups) && !ours.hosts.contains(&HostId(to)) {
                    return Some((HostId(to), HostId(from)));
                }
            }
        }
        None
    }

    fn host_reach(&self) -> Vec<Reach> {
        let groups = self.switch_groups();
        let hosts = (0..self.hosts.len()).map(|host| {
            let mut reach = Reach::default();
            for end in self.neighbours(HostId(host)) {
                match end {
                    Node::Host(other) => drop(reach.hosts.insert(other)),
                    Node::Switch(switch) => reach.groups.extend(groups.get(&switch)),
                }
            }
            reach
        });
        hosts.collect()
    }

    /// The group of each switch.
    fn switch_groups(&self) -> BTreeMap<SwitchId, usize> {
        let mut groups = BTreeMap::new();
        for start in (0..self.switches.len()).map(SwitchId) {
            let mut open = vec![start];
            while let Some(switch) = open.pop() {
                if groups.contains_key(&switch) {
                    continue;
                }
                groups.insert(switch, start.0);
                let node = Node::Switch(switch);
                let links = self.links_at(node).iter().filter_map(|id| self.links.get(id.0));
                open.extend(links.filter_map(|link| {
                    match if link.from == node { link.to } else { link.from } {
                        Node::Switch(next) => Some(next),
                        Node::Host(_) => None,
                    }
                }));
            }
        }
        groups
    }
}
