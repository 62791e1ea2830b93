//! The provider's topology as the emulation needs it: nodes, and links with rate and delay.

use anyhow::{Context, Result};
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

/// Hosts named h0, h1, ... around the switch s0, as control's topology file.
pub fn star(hosts: usize, rate: &str) -> String {
    let mut text = "[[switch]]\nname = \"s0\"\n".to_owned();
    for host in 0..hosts {
        text += &format!("[[host]]\nname = \"h{host}\"\n");
        text += &link(&format!("h{host}"), "s0", rate);
    }
    text
}

/// The same with the aggregator agg0 at the switch. Its link is as wide as those of all hosts together, `rate` in Mbit/s.
pub fn star_with_aggregator(hosts: usize, rate: u64, delay: &str) -> String {
    let mut text = "[[switch]]\nname = \"s0\"\n".to_owned();
    for host in 0..hosts {
        text += &format!("[[host]]\nname = \"h{host}\"\n");
        text += &link(&format!("h{host}"), "s0", &format!("{rate}Mbit/s"));
        text += &format!("delay = \"{delay}\"\n");
    }
    let wide = rate * hosts as u64;
    text + &format!("[[aggregator]]\nname = \"agg0\"\nswitch = \"s0\"\nrate = \"{wide}Mbit/s\"\n")
}

/// Racks of `hosts` hosts each on leaves, as control's topology file. Every leaf is linked to every spine, all links of one
/// rate.
pub fn racks(racks: usize, hosts: usize, spines: usize, rate: &str) -> String {
    racks_with_uplinks(racks, hosts, spines, rate, rate)
}

/// The same with links of another rate between leaves and spines.
pub fn racks_with_uplinks(racks: usize, hosts: usize, spines: usize, rate: &str, uplink: &str) -> String {
    let mut text = String::new();
    for rack in 0..racks {
        text += &format!("[[switch]]\nname = \"leaf{rack}\"\n");
        for host in rack * hosts..(rack + 1) * hosts {
            text += &format!("[[host]]\nname = \"h{host}\"\nrack = \"r{rack}\"\n");
            text += &link(&format!("h{host}"), &format!("leaf{rack}"), rate);
        }
    }
    for spine in 0..spines {
        text += &format!("[[switch]]\nname = \"spine{spine}\"\nkind = \"spine\"\n");
        (0..racks).for_each(|rack| text += &link(&format!("leaf{rack}"), &format!("spine{spine}"), uplink));
    }
    text
}

/// Racks of `hosts` hosts each whose leaves hang on one spine, with aggregators.
/// Links of hosts are of `rate` and those of leaves of `uplink`, in Mbit/s. An aggregator is at each leaf, agg0, agg1, ..., and the
/// last at the spine. Each has a link that is as wide as those of all whom it may serve.
pub fn racks_with_aggregators(racks: usize, hosts: usize, rate: u64, uplink: u64) -> String {
    let mut text = "[[switch]]\nname = \"spine0\"\nkind = \"spine\"\n".to_owned();
    let aggregator = |at: usize, switch: &str, wide: u64| {
        format!("[[aggregator]]\nname = \"agg{at}\"\nswitch = \"{switch}\"\nrate = \"{wide}Mbit/s\"\n")
    };
    let mut aggregators = String::new();
    for rack in 0..racks {
        let leaf = format!("leaf{rack}");
        text += &format!("[[switch]]\nname = \"{leaf}\"\n");
        text += &link(&leaf, "spine0", &format!("{uplink}Mbit/s"));
        for host in rack * hosts..(rack + 1) * hosts {
            text += &format!("[[host]]\nname = \"h{host}\"\nrack = \"r{rack}\"\n");
            text += &link(&format!("h{host}"), &leaf, &format!("{rate}Mbit/s"));
        }
        aggregators += &aggregator(rack, &leaf, rate * (hosts as u64 + 1));
    }
    text + &aggregators + &aggregator(racks, "spine0", rate * (racks * hosts) as u64)
}

/// The racks of [`racks`], and on each leaf one host more: f0, f1 and so on. The traffic of those hosts is none
/// of the provider's.
pub fn racks_with_unmanaged_hosts(racks: usize, hosts: usize, spines: usize, rate: &str) -> String {
    let mut text = self::racks(racks, hosts, spines, rate);
    for rack in 0..racks {
        text += &format!("[[host]]\nname = \"f{rack}\"\nrack = \"r{rack}\"\n");
        text += &link(&format!("f{rack}"), &format!("leaf{rack}"), rate);
    }
    text
}

/// The same text with other rates for the links of hosts with agents than for all others.
pub fn with_host_rate(text: &str, rate: &str) -> Result<String> {
    let mut table: toml::Table = text.parse().context("the topology is not TOML")?;
    let links = table.get_mut("link").and_then(toml::Value::as_array_mut);
    let of_host = |link: &toml::Value| {
        let from = link.get("from").and_then(toml::Value::as_str);
        from.is_some_and(|from| from.starts_with('h'))
    };
    for link in links.into_iter().flatten().filter(|link| of_host(link)) {
        link.as_table_mut().and_then(|link| link.insert("rate".to_owned(), rate.into()));
    }
    Ok(toml::to_string(&table)?)
}

fn link(from: &str, to: &str, rate: &str) -> String {
    format!("[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nrate = \"{rate}\"\n")
}

/// What a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Runs an agent and tenants.
    Host,
    /// Forwards.
    Switch,
    /// Sums what hosts send.
    Aggregator,
}

/// A host, a switch or an aggregator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its name in the topology file, unique over all.
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

/// Nodes (hosts first, in the file's order, then switches, then aggregators) and links, those of aggregators last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Hosts, switches and aggregators.
    pub nodes: Vec<Node>,
    /// Links between them.
    pub links: Vec<Link>,
    /// What a frame carries on every link, bytes.
    pub mtu: u32,
    /// Whether a thread of whoever builds the fabric delays frames where the kernel cannot. Links with delays then do not tell one
    /// end that the other is down.
    pub forwards: bool,
    /// The text that they were read from, for control.
    pub text: String,
}

/// What a frame of Ethernet carries where nothing else is said.
const MTU: u32 = 1500;

impl Topology {
    /// Reads control's topology file.
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} is not a topology", path.display()))
    }

    /// Parses the text of a topology file, by control's own reader.
    pub fn parse(text: &str) -> Result<Self> {
        let read = harmonaize_topology::Topology::parse(text)?;
        let hosts = read.hosts().iter().map(|host| Node { name: host.name.clone(), kind: Kind::Host });
        let switches =
            read.switches().iter().map(|switch| Node { name: switch.name.clone(), kind: Kind::Switch });
        let aggregators =
            read.aggregators().iter().map(|node| Node { name: node.name.clone(), kind: Kind::Aggregator });
        let nodes = hosts.chain(switches).chain(aggregators).collect();
        let index = |node: harmonaize_topology::Node| match node {
            harmonaize_topology::Node::Host(host) => host.0,
            harmonaize_topology::Node::Switch(switch) => read.hosts().len() + switch.0,
        };
        let links = read.links().iter().map(|link| Link {
            ends: [index(link.from), index(link.to)],
            rate: link.rate.0,
            delay: link.delay.into(),
        });
        let first = read.hosts().len() + read.switches().len();
        let own = read.aggregators().iter().enumerate().map(|(at, aggregator)| Link {
            ends: [first + at, read.hosts().len() + aggregator.switch.0],
            rate: aggregator.rate.0,
            delay: aggregator.delay.into(),
        });
        Ok(Self {
            nodes,
            links: links.chain(own).collect(),
            mtu: MTU,
            forwards: false,
            text: text.to_owned(),
        })
    }

    /// The indices of the hosts.
    pub fn hosts(&self) -> impl Iterator<Item = usize> {
        self.of_kind(Kind::Host)
    }

    /// The indices of the aggregators.
    pub fn aggregators(&self) -> impl Iterator<Item = usize> {
        self.of_kind(Kind::Aggregator)
    }

    /// The indices of all that sends and receives: hosts, then aggregators.
    pub fn ends(&self) -> impl Iterator<Item = usize> {
        self.hosts().chain(self.aggregators())
    }

    /// The indices of the switches.
    pub fn switches(&self) -> impl Iterator<Item = usize> {
        self.of_kind(Kind::Switch)
    }

    /// The text for control with the addresses of switches, given by the switch's index. By them a traced hop identifies its
    /// switch.
    pub fn with_addresses(&self, of: impl Fn(usize) -> Vec<Ipv4Addr>) -> Result<String> {
        let mut table: toml::Table = self.text.parse().context("the topology is not TOML")?;
        let switches = table.get_mut("switch").and_then(toml::Value::as_array_mut);
        for (switch, index) in switches.into_iter().flatten().zip(self.switches()) {
            let addresses = of(index);
            if let Some(switch) = switch.as_table_mut().filter(|_| !addresses.is_empty()) {
                let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
                switch.entry("addresses").or_insert_with(|| addresses.into());
            }
        }
        Ok(toml::to_string(&table)?)
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

    #[test]
    fn an_aggregator_is_the_last_node() {
        let topology = Topology::parse(&star_with_aggregator(4, 250, "0us")).unwrap();
        assert_eq!(topology.nodes[5], Node { name: "agg0".into(), kind: Kind::Aggregator });
        let link = Link { ends: [5, 4], rate: 1_000_000_000, delay: Duration::ZERO };
        assert_eq!(topology.links[4], link);
        assert_eq!(topology.ends().collect::<Vec<_>>(), [0, 1, 2, 3, 5]);
    }

    #[test]
    fn each_rack_has_one_unmanaged_host() {
        let topology = Topology::parse(&racks_with_unmanaged_hosts(2, 4, 2, "1Gbit/s")).unwrap();
        assert_eq!(
            (topology.hosts().count(), topology.switches().count(), topology.links.len()),
            (10, 4, 14)
        );
        let rates = with_host_rate(&topology.text, "2Gbit/s").unwrap();
        let rates = Topology::parse(&rates).unwrap().links.into_iter().map(|link| link.rate);
        assert_eq!(rates.filter(|rate| *rate == 2_000_000_000).count(), 8, "those of h0 to h7");
        let names: Vec<&str> = topology.nodes.iter().map(|node| node.name.as_str()).collect();
        assert_eq!(names[7..10], ["h7", "f0", "f1"], "strangers are the last hosts");
        let star = Topology::parse(&star(4, "1Gbit/s")).unwrap();
        assert_eq!((star.hosts().count(), star.switches().count(), star.links.len()), (4, 1, 4));
    }

    #[test]
    fn switch_addresses_are_added_to_the_text() {
        let topology = Topology::parse(&racks(2, 1, 1, "1Gbit/s")).unwrap();
        let of = |switch: usize| match topology.nodes[switch].name.as_str() {
            "leaf1" => vec![Ipv4Addr::new(10, 64, 0, 3), Ipv4Addr::new(10, 64, 0, 8)],
            _ => Vec::new(),
        };
        let mut table: toml::Table = topology.with_addresses(of).unwrap().parse().unwrap();
        let leaf = table["switch"][1].as_table_mut().unwrap();
        let addresses = leaf.remove("addresses").unwrap();
        assert_eq!(addresses.to_string(), "[\"10.64.0.3\", \"10.64.0.8\"]");
        assert_eq!(table, topology.text.parse().unwrap());
    }
}
