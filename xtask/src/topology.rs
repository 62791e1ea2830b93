//! The provider's topology as the emulation needs it: nodes, and links with rate and delay.

use anyhow::{Context, Result};
use harmonaize_planner as planner;
use std::path::Path;
use std::time::Duration;

/// What a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Runs an agent and tenants.
    Host,
    /// Forwards.
    Switch,
}

/// A host or a switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its name in the topology file, unique over hosts and switches.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

/// A link, the same in both directions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The nodes at its ends, as indices into [`Topology::nodes`].
    pub ends: [usize; 2],
    /// Bits per second in each direction.
    pub rate: u64,
    /// One-way delay.
    pub delay: Duration,
}

/// Nodes (hosts first, in the file's order, then switches) and links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Hosts and switches.
    pub nodes: Vec<Node>,
    /// Links between them.
    pub links: Vec<Link>,
    /// The text that they were read from, for control.
    pub text: String,
}

impl Topology {
    /// Reads control's topology file.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} is not a topology", path.display()))
    }

    /// Parses the text of a topology file, by control's own reader.
    pub fn parse(text: &str) -> Result<Self> {
        let read = planner::Topology::parse(text)?;
        let hosts = read.hosts().iter().map(|host| Node { name: host.name.clone(), kind: Kind::Host });
        let switches =
            read.switches().iter().map(|switch| Node { name: switch.name.clone(), kind: Kind::Switch });
        let nodes = hosts.chain(switches).collect();
        let index = |node: planner::Node| match node {
            planner::Node::Host(host) => host.0,
            planner::Node::Switch(switch) => read.hosts().len() + switch.0,
        };
        let links = read.links().iter().map(|link| Link {
            ends: [index(link.from), index(link.to)],
            rate: link.rate.0,
            delay: link.delay.into(),
        });
        Ok(Self { nodes, links: links.collect(), text: text.to_owned() })
    }

    /// The indices of the hosts.
    pub fn hosts(&self) -> impl Iterator<Item = usize> {
        self.of_kind(Kind::Host)
    }

    /// The indices of the switches.
    pub fn switches(&self) -> impl Iterator<Item = usize> {
        self.of_kind(Kind::Switch)
    }

    fn of_kind(&self, kind: Kind) -> impl Iterator<Item = usize> {
        self.nodes.iter().enumerate().filter(move |(_, node)| node.kind == kind).map(|(index, _)| index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_has_hosts_before_switches() {
        let text = "[[switch]]\nname = 's'\n[[host]]\nname = 'a'\n[[link]]\nfrom = 'a'\nto = 's'\n\
                    rate = '1Gbit/s'\ndelay = '20us'\n";
        let topology = Topology::parse(text).unwrap();
        assert_eq!(topology.nodes[0], Node { name: "a".into(), kind: Kind::Host });
        let link = Link { ends: [0, 1], rate: 1_000_000_000, delay: Duration::from_micros(20) };
        assert_eq!(topology.links, [link]);
    }
}
