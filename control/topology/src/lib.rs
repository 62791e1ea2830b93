//! The provider's topology as its file describes it: hosts, switches, links with rate and delay, and the paths over them.
//!
//! Architecture invariant: no clock, socket or file; a topology comes as text. Whoever reads it needs no planner.
#![forbid(unsafe_code)]

use core::net::IpAddr;
use harmonaize_units::{Nanos, Position, Rate, TextError};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

mod connected;
mod file;
mod numbered;
mod path;
pub mod text;

pub use path::{DirectedLink, MAX_PATHS, Path, PathFinder, TraceError};

/// Most hosts, and most switches, that a topology may have.
pub const MAX_NODES: usize = 16384;

/// A host, counted from 0 in the file's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub usize);

/// A switch, counted from 0 in the file's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwitchId(pub usize);

/// A link, counted from 0 in the file's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub usize);

/// An aggregator, counted from 0 in the file's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AggregatorId(pub usize);

/// An end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// A host. Hosts do not forward for others.
    Host(HostId),
    /// A switch.
    Switch(SwitchId),
}

/// A host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name, unique among hosts and switches.
    pub name: String,
    /// Its rack, where the provider says so; breaks ties between orders.
    pub rack: Option<String>,
    /// The kind of its accelerators, where the provider says so. Hosts of one kind count as alike.
    pub kind: Option<String>,
    /// The addresses at which its agent may listen; any where there are none.
    pub addresses: Vec<IpAddr>,
}

/// What a switch is for; routing does not depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SwitchKind {
    /// Hosts hang on it.
    #[default]
    Leaf,
    /// Joins leaves.
    Spine,
    /// Joins pods.
    Core,
}

/// A switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Switch {
    /// Its name, unique among hosts and switches.
    pub name: String,
    /// What it is for.
    pub kind: SwitchKind,
    /// The addresses from which it answers a packet whose time to live has run out. None where they are not known.
    pub addresses: Vec<IpAddr>,
}

/// A machine at a switch that sums what hosts send. No ring crosses it, and its link is its own alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aggregator {
    /// Its name, unique among hosts, switches and aggregators.
    pub name: String,
    /// What it hangs on.
    pub switch: SwitchId,
    /// What its link carries in each direction.
    pub rate: Rate,
    /// One way.
    pub delay: Nanos,
    /// The addresses at which it may listen; any where there are none.
    pub addresses: Vec<IpAddr>,
}

/// A full-duplex link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// One end.
    pub from: Node,
    /// The other.
    pub to: Node,
    /// In each direction.
    pub rate: Rate,
    /// One way.
    pub delay: Nanos,
    /// What fails together with others that name it, such as a conduit or a line card.
    pub risk: BTreeSet<String>,
}

/// A checked topology: names are unique, every link has two ends, every host reaches every other through switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    hosts: Vec<Host>,
    switches: Vec<Switch>,
    links: Vec<Link>,
    aggregators: Vec<Aggregator>,
    by_name: BTreeMap<String, Node>,
    by_address: BTreeMap<IpAddr, SwitchId>,
    host_links: Vec<Vec<LinkId>>,
    switch_links: Vec<Vec<LinkId>>,
    between_switches: Vec<Vec<LinkId>>,
}

/// What is wrong with a topology, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// Not TOML, an unknown or missing key, a value of the wrong kind.
    #[error(transparent)]
    Text(#[from] TextError),
    /// No host at all.
    #[error("the topology has no [[host]]")]
    NoHosts,
    /// More than control can handle.
    #[error("the topology has more than {MAX_NODES} {0}")]
    TooMany(&'static str),
    /// A name that is empty, too long or has unusual characters.
    #[error(
        "{at}: `{name}` is not a usable name: 1 to 63 letters, digits, `.`, `_` and `-`, the first a letter or digit"
    )]
    BadName {
        /// Where.
        at: Position,
        /// The name.
        name: String,
    },
    /// A kind that is empty, too long or has unusual characters.
    #[error(
        "{at}: `{name}` is not a usable kind: 1 to 63 letters, digits, `.`, `_` and `-`, the first a letter or digit"
    )]
    BadKind {
        /// Where.
        at: Position,
        /// The kind.
        name: String,
    },
    /// Two hosts or switches of one name.
    #[error("{at}: `{name}` is there already, from line {first}")]
    DuplicateName {
        /// Where.
        at: Position,
        /// The name.
        name: String,
        /// Line of the first.
        first: usize,
    },
    /// A link to nowhere.
    #[error("{at}: no host or switch is named `{name}`")]
    UnknownNode {
        /// Where.
        at: Position,
        /// The name.
        name: String,
    },
    /// An aggregator that hangs on no switch.
    #[error("{at}: no switch is named `{name}`")]
    NoSwitch {
        /// Where.
        at: Position,
        /// The name.
        name: String,
    },
    /// A link from a node to itself.
    #[error("{at}: the link joins `{name}` to itself")]
    Loop {
        /// Where.
        at: Position,
        /// The node.
        name: String,
    },
    /// Two links between the same nodes.
    #[error(
        "{at}: `{from}` and `{to}` are joined already, by the link of line {first}; give one link the sum of the rates"
    )]
    DuplicateLink {
        /// Where.
        at: Position,
        /// One end.
        from: String,
        /// The other.
        to: String,
        /// Line of the first.
        first: usize,
    },
    /// An address that no machine or switch can have.
    #[error("{at}: `{text}` is not a usable address; write one such as \"10.64.0.3\" or \"fd00::3\"")]
    BadAddress {
        /// Where.
        at: Position,
        /// What stands there.
        text: String,
    },
    /// Two switches of one address.
    #[error("{at}: the address {address} is that of `{other}` already")]
    DuplicateAddress {
        /// Where.
        at: Position,
        /// The address.
        address: IpAddr,
        /// The switch that has it.
        other: String,
    },
    /// A name of a shared risk that is empty or too long.
    #[error("{at}: a shared risk's name has 1 to 63 characters")]
    BadRisk {
        /// Where.
        at: Position,
    },
    /// A link that carries nothing.
    #[error("{at}: the link's rate is zero")]
    ZeroRate {
        /// Where.
        at: Position,
    },
    /// A host that cannot reach another.
    #[error("{at}: host `{host}` cannot reach host `{other}`: no chain of links and switches joins them")]
    Disconnected {
        /// Where the host is described.
        at: Position,
        /// The host.
        host: String,
        /// The first one that it cannot reach.
        other: String,
    },
}

impl Topology {
    fn wire(
        hosts: Vec<Host>,
        switches: Vec<Switch>,
        links: Vec<Link>,
        aggregators: Vec<Aggregator>,
        by_name: BTreeMap<String, Node>,
        by_address: BTreeMap<IpAddr, SwitchId>,
    ) -> Self {
        let mut host_links = vec![Vec::new(); hosts.len()];
        let mut switch_links = vec![Vec::new(); switches.len()];
        for (index, link) in links.iter().enumerate().filter(|(_, link)| !link.is_gone()) {
            for node in [link.from, link.to] {
                let list = match node {
                    Node::Host(id) => host_links.get_mut(id.0),
                    Node::Switch(id) => switch_links.get_mut(id.0),
                };
                if let Some(list) = list {
                    list.push(LinkId(index));
                }
            }
        }
        let between = |id: &LinkId| {
            let ends = links.get(id.0).map(|link| (link.from, link.to));
            matches!(ends, Some((Node::Switch(_), Node::Switch(_))))
        };
        let between_switches = switch_links
            .iter()
            .map(|at: &Vec<LinkId>| at.iter().copied().filter(between).collect())
            .collect();
        Self {
            hosts,
            switches,
            links,
            aggregators,
            by_name,
            by_address,
            host_links,
            switch_links,
            between_switches,
        }
    }

    /// Hosts by number: in the file's order, or [as an earlier topology had them](Self::numbered_as).
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Switches by number, likewise.
    pub fn switches(&self) -> &[Switch] {
        &self.switches
    }

    /// Links by number, likewise.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Aggregators by number, likewise.
    pub fn aggregators(&self) -> &[Aggregator] {
        &self.aggregators
    }

    /// The aggregator of a name.
    pub fn aggregator(&self, name: &str) -> Option<AggregatorId> {
        self.aggregators_there().find(|(_, known)| known.name == name).map(|(id, _)| id)
    }

    /// The host of a name.
    pub fn host(&self, name: &str) -> Option<HostId> {
        match self.by_name.get(name) {
            Some(Node::Host(id)) => Some(*id),
            _ => None,
        }
    }

    /// The kind of a host's accelerators; empty where none is named.
    pub fn kind(&self, host: HostId) -> &str {
        self.hosts.get(host.0).and_then(|host| host.kind.as_deref()).unwrap_or("")
    }

    /// The switch that answers from an address.
    pub fn switch_at(&self, address: IpAddr) -> Option<SwitchId> {
        self.by_address.get(&address).copied()
    }

    /// The switch of a name.
    pub fn switch(&self, name: &str) -> Option<SwitchId> {
        match self.by_name.get(name) {
            Some(Node::Switch(id)) => Some(*id),
            _ => None,
        }
    }

    /// The name of a node; empty if it is not of this topology.
    pub fn node_name(&self, node: Node) -> &str {
        match node {
            Node::Host(id) => self.hosts.get(id.0).map_or("", |host| &host.name),
            Node::Switch(id) => self.switches.get(id.0).map_or("", |switch| &switch.name),
        }
    }

    /// Links at a node.
    pub fn links_at(&self, node: Node) -> &[LinkId] {
        let list = match node {
            Node::Host(id) => self.host_links.get(id.0),
            Node::Switch(id) => self.switch_links.get(id.0),
        };
        list.map_or(&[], Vec::as_slice)
    }

    /// What a host sends at most over all its links.
    pub fn uplink(&self, host: HostId) -> Rate {
        let links = self.links_at(Node::Host(host)).iter().filter_map(|id| self.links.get(id.0));
        Rate(links.fold(0, |sum: u64, link| sum.saturating_add(link.rate.0)))
    }

    /// Links from a switch to other switches.
    pub fn links_between_switches(&self, switch: SwitchId) -> &[LinkId] {
        self.between_switches.get(switch.0).map_or(&[], Vec::as_slice)
    }

    /// What a host hangs on, ascending.
    pub fn neighbours(&self, host: HostId) -> Vec<Node> {
        let links = self.links_at(Node::Host(host)).iter().filter_map(|id| self.links.get(id.0));
        let ends = links.map(|link| if link.from == Node::Host(host) { link.to } else { link.from });
        let mut ends: Vec<Node> = ends.collect();
        ends.sort_unstable();
        ends
    }
}

#[cfg(test)]
mod tests;
