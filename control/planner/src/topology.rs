//! The provider's topology as its file describes it: hosts, switches, links with rate and delay.

use crate::text::{Position, TextError, parse_toml};
use crate::units::{Nanos, Rate};
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use toml::Spanned;

/// Most hosts, and most switches, that a topology may have.
const MOST_NODES: usize = 4096;

/// A host, counted from 0 in the file's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub usize);

/// A switch, counted from 0 in the file's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwitchId(pub usize);

/// A link, counted from 0 in the file's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub usize);

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
}

/// A full-duplex link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// One end.
    pub from: Node,
    /// The other.
    pub to: Node,
    /// In each direction.
    pub rate: Rate,
    /// One way.
    pub delay: Nanos,
}

/// A checked topology: names are unique, every link has two ends, every host reaches every other through switches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    hosts: Vec<Host>,
    switches: Vec<Switch>,
    links: Vec<Link>,
    by_name: BTreeMap<String, Node>,
    host_links: Vec<Vec<LinkId>>,
    switch_links: Vec<Vec<LinkId>>,
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
    #[error("the topology has more than {MOST_NODES} {0}")]
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    host: Vec<FileHost>,
    #[serde(default)]
    switch: Vec<FileSwitch>,
    #[serde(default)]
    link: Vec<FileLink>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileHost {
    name: Spanned<String>,
    rack: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileSwitch {
    name: Spanned<String>,
    #[serde(default)]
    kind: SwitchKind,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLink {
    from: Spanned<String>,
    to: Spanned<String>,
    rate: Spanned<Rate>,
    #[serde(default)]
    delay: Nanos,
}

/// What is known while a file is read.
struct Reader<'a> {
    text: &'a str,
    names: HashMap<String, (Node, usize)>,
}

impl Reader<'_> {
    fn at<T>(&self, value: &Spanned<T>) -> Position {
        Position::of(self.text, value.span().start)
    }

    fn name(&mut self, name: &Spanned<String>, node: Node) -> Result<String, TopologyError> {
        let (at, text) = (self.at(name), name.get_ref().clone());
        let usual = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if text.len() > 63
            || !text.chars().all(usual)
            || !text.starts_with(|c: char| c.is_ascii_alphanumeric())
        {
            return Err(TopologyError::BadName { at, name: text.chars().take(80).collect() });
        }
        if let Some((_, first)) = self.names.insert(text.clone(), (node, at.line)) {
            return Err(TopologyError::DuplicateName { at, name: text, first });
        }
        Ok(text)
    }

    fn end(&self, name: &Spanned<String>) -> Result<Node, TopologyError> {
        let known = self.names.get(name.get_ref()).map(|(node, _)| *node);
        known.ok_or_else(|| TopologyError::UnknownNode { at: self.at(name), name: name.get_ref().clone() })
    }

    fn link(
        &self,
        link: &FileLink,
        joined: &mut HashMap<(Node, Node), usize>,
    ) -> Result<Link, TopologyError> {
        let (from, to) = (self.end(&link.from)?, self.end(&link.to)?);
        let at = self.at(&link.from);
        if from == to {
            return Err(TopologyError::Loop { at, name: link.from.get_ref().clone() });
        }
        if *link.rate.get_ref() == Rate(0) {
            return Err(TopologyError::ZeroRate { at: self.at(&link.rate) });
        }
        if let Some(first) = joined.insert((from.min(to), from.max(to)), at.line) {
            let (from, to) = (link.from.get_ref().clone(), link.to.get_ref().clone());
            return Err(TopologyError::DuplicateLink { at, from, to, first });
        }
        Ok(Link { from, to, rate: *link.rate.get_ref(), delay: link.delay })
    }
}

impl Topology {
    /// Reads a topology file:
    /// ```toml
    /// [[host]]
    /// name = "h0"
    /// rack = "r0"              # optional
    /// [[switch]]
    /// name = "leaf0"
    /// kind = "leaf"            # leaf (default), spine or core
    /// [[link]]
    /// from = "h0"
    /// to = "leaf0"
    /// rate = "1Gbit/s"         # each direction
    /// delay = "50us"           # one way; 0 where absent
    /// ```
    ///
    /// # Errors
    /// The first thing that is wrong, with its line.
    pub fn parse(text: &str) -> Result<Self, TopologyError> {
        let file: File = parse_toml(text)?;
        if file.host.is_empty() {
            return Err(TopologyError::NoHosts);
        }
        for (count, what) in [(file.host.len(), "hosts"), (file.switch.len(), "switches")] {
            if count > MOST_NODES {
                return Err(TopologyError::TooMany(what));
            }
        }
        let mut reader = Reader { text, names: HashMap::new() };
        let mut hosts = Vec::with_capacity(file.host.len());
        for (index, host) in file.host.iter().enumerate() {
            let name = reader.name(&host.name, Node::Host(HostId(index)))?;
            hosts.push(Host { name, rack: host.rack.clone() });
        }
        let mut switches = Vec::with_capacity(file.switch.len());
        for (index, switch) in file.switch.iter().enumerate() {
            let name = reader.name(&switch.name, Node::Switch(SwitchId(index)))?;
            switches.push(Switch { name, kind: switch.kind });
        }
        let mut joined = HashMap::new();
        let links: Result<Vec<_>, _> = file.link.iter().map(|link| reader.link(link, &mut joined)).collect();
        let by_name = reader.names.iter().map(|(name, (node, _))| (name.clone(), *node)).collect();
        let topology = Self::wire(hosts, switches, links?, by_name);
        if let Some((host, other)) = topology.disconnected() {
            let at =
                file.host.get(host.0).map_or(Position { line: 1, column: 1 }, |host| reader.at(&host.name));
            let name = |id: HostId| topology.node_name(Node::Host(id)).to_owned();
            return Err(TopologyError::Disconnected { at, host: name(host), other: name(other) });
        }
        Ok(topology)
    }

    fn wire(
        hosts: Vec<Host>,
        switches: Vec<Switch>,
        links: Vec<Link>,
        by_name: BTreeMap<String, Node>,
    ) -> Self {
        let mut host_links = vec![Vec::new(); hosts.len()];
        let mut switch_links = vec![Vec::new(); switches.len()];
        for (index, link) in links.iter().enumerate() {
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
        Self { hosts, switches, links, by_name, host_links, switch_links }
    }

    /// Hosts, in the file's order.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Switches, in the file's order.
    pub fn switches(&self) -> &[Switch] {
        &self.switches
    }

    /// Links, in the file's order.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// The host of a name.
    pub fn host(&self, name: &str) -> Option<HostId> {
        match self.by_name.get(name) {
            Some(Node::Host(id)) => Some(*id),
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

    /// What a host hangs on, ascending.
    pub(crate) fn neighbours(&self, host: HostId) -> Vec<Node> {
        let links = self.links_at(Node::Host(host)).iter().filter_map(|id| self.links.get(id.0));
        let ends = links.map(|link| if link.from == Node::Host(host) { link.to } else { link.from });
        let mut ends: Vec<Node> = ends.collect();
        ends.sort_unstable();
        ends
    }

    /// A pair of hosts that cannot reach one another.
    fn disconnected(&self) -> Option<(HostId, HostId)> {
        for from in 0..self.hosts.len() {
            let reached = self.reach(HostId(from));
            if let Some(to) = reached.iter().position(|reached| !reached) {
                let (low, high) = (from.min(to), from.max(to));
                return Some((HostId(high), HostId(low)));
            }
        }
        None
    }

    /// Which hosts a host reaches.
    fn reach(&self, from: HostId) -> Vec<bool> {
        let mut hosts = vec![false; self.hosts.len()];
        let mut switches = vec![false; self.switches.len()];
        let mut open = vec![Node::Host(from)];
        if let Some(seen) = hosts.get_mut(from.0) {
            *seen = true;
        }
        while let Some(node) = open.pop() {
            for id in self.links_at(node) {
                let Some(link) = self.links.get(id.0) else { continue };
                let next = if link.from == node { link.to } else { link.from };
                let seen = match next {
                    Node::Host(id) => hosts.get_mut(id.0),
                    Node::Switch(id) => switches.get_mut(id.0),
                };
                if let Some(seen) = seen
                    && !std::mem::replace(seen, true)
                    && matches!(next, Node::Switch(_))
                {
                    open.push(next);
                }
            }
        }
        hosts
    }
}

#[cfg(test)]
mod tests;
