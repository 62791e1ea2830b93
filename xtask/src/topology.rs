//! The provider's topology as the emulation needs it: nodes, and links with rate and delay.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
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
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    host: Vec<Named>,
    #[serde(default)]
    switch: Vec<Named>,
    #[serde(default)]
    link: Vec<LinkLine>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
struct LinkLine {
    from: String,
    to: String,
    rate: String,
    #[serde(default)]
    delay: Option<String>,
}

impl Topology {
    /// Reads control's topology file.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} is not a topology", path.display()))
    }

    /// Parses the text of a topology file.
    pub fn parse(text: &str) -> Result<Self> {
        let file: File = toml::from_str(text)?;
        let hosts = file.host.into_iter().map(|host| Node { name: host.name, kind: Kind::Host });
        let switches = file.switch.into_iter().map(|switch| Node { name: switch.name, kind: Kind::Switch });
        let nodes: Vec<Node> = hosts.chain(switches).collect();
        for (index, node) in nodes.iter().enumerate() {
            if nodes.iter().take(index).any(|earlier| earlier.name == node.name) {
                bail!("two nodes are named {}", node.name);
            }
        }
        let find = |name: &str| {
            nodes
                .iter()
                .position(|node| node.name == name)
                .with_context(|| format!("a link names {name}, which is neither a host nor a switch"))
        };
        let mut links = Vec::with_capacity(file.link.len());
        for line in &file.link {
            let delay = line.delay.as_deref().map_or(Ok(Duration::ZERO), delay)?;
            links.push(Link { ends: [find(&line.from)?, find(&line.to)?], rate: rate(&line.rate)?, delay });
        }
        Ok(Self { nodes, links })
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

fn rate(text: &str) -> Result<u64> {
    let units = [("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0)];
    let value = scaled(text, &units)
        .with_context(|| format!("\"{text}\" is not a rate; write for example \"1Gbit/s\""))?;
    if !(1.0..=1e15).contains(&value) {
        bail!("a rate of \"{text}\" is out of range");
    }
    Ok(value as u64)
}

fn delay(text: &str) -> Result<Duration> {
    let units = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let value = scaled(text, &units)
        .with_context(|| format!("\"{text}\" is not a delay; write for example \"20us\""))?;
    Duration::try_from_secs_f64(value).with_context(|| format!("a delay of \"{text}\" is out of range"))
}

fn scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let text = text.trim();
    units.iter().find_map(|(unit, scale)| {
        let number = text.strip_suffix(unit)?.trim();
        Some(number.parse::<f64>().ok()? * scale)
    })
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

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = |text: &str| format!("{:#}", Topology::parse(text).unwrap_err());
        assert!(wrong("[[host]]\nname='a'\n[[switch]]\nname='a'\n").contains("two nodes are named a"));
        let link =
            |from, rate| format!("[[host]]\nname='a'\n[[link]]\nfrom='{from}'\nto='a'\nrate='{rate}'\n");
        assert!(wrong(&link("b", "1Gbit/s")).contains("names b"));
        assert!(wrong(&link("a", "fast")).contains("\"fast\" is not a rate"));
        assert!(wrong(&link("a", "0bit/s")).contains("out of range"));
    }
}
