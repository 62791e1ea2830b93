//! From a topology to namespaces, devices, addresses and routes: arithmetic alone, nothing is built here.
//!
//! One switch is a bridge, and its hosts share a subnet. With more switches every switch routes: each link is a
//! subnet of two addresses, and each switch forwards to a host's link along all shortest paths (ECMP by 5-tuple).

use crate::topology::{Kind, Topology};
use anyhow::{Result, bail};
use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::time::Duration;

/// The fabric's addresses: 10.64.0.0/16.
const FABRIC: u32 = u32::from_be_bytes([10, 64, 0, 0]);
/// The management network's addresses: 10.65.0.0/16.
const MANAGEMENT: u32 = u32::from_be_bytes([10, 65, 0, 0]);
/// A subnet of 16 bits holds that many nodes or links of two addresses, with some to spare.
const MOST: usize = 32_000;

/// Where control listens on the management network.
pub const CONTROL_ADDRESS: Ipv4Addr = Ipv4Addr::from_bits(MANAGEMENT + 1);

/// One end of a cable: a device in a node's namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// The node, as an index into the topology's.
    pub node: usize,
    /// The device's name in the node's namespace.
    pub device: String,
    /// Its address and the length of its prefix; a bridge's port has none.
    pub address: Option<(Ipv4Addr, u8)>,
}

/// A link as a pair of devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cable {
    /// Its two ends, in the order of the topology file.
    pub ends: [End; 2],
    /// Bits per second, each way.
    pub rate: u64,
    /// One-way delay asked for.
    pub delay: Duration,
}

/// A route: traffic for a prefix leaves over one next hop or, hashed by flow, over several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The node that has the route.
    pub node: usize,
    /// The destination; `None` is the default route.
    pub prefix: Option<(Ipv4Addr, u8)>,
    /// For traffic from this source address only (a host with several rails).
    pub source: Option<Ipv4Addr>,
    /// The next hops: gateway and device.
    pub via: Vec<(Ipv4Addr, String)>,
}

/// All that is needed to build a fabric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// True when the one switch is a bridge.
    pub bridged: bool,
    /// The cables, in the order of the topology's links.
    pub cables: Vec<Cable>,
    /// The routes; none when bridged.
    pub routes: Vec<Route>,
}

impl Layout {
    /// Lays out a topology; an error names the node that cannot be placed.
    pub fn of(topology: &Topology) -> Result<Self> {
        if topology.nodes.len() > MOST || topology.links.len() > MOST {
            bail!("an emulated fabric has at most {MOST} nodes and {MOST} links");
        }
        let bridged = topology.switches().count() == 1;
        let mut ports = vec![0_usize; topology.nodes.len()];
        let mut cables = Vec::with_capacity(topology.links.len());
        for (index, link) in topology.links.iter().enumerate() {
            let [from, to] = link.ends;
            let ends = [0, 1].map(|side| {
                let node = if side == 0 { from } else { to };
                let kind = kind(topology, node);
                let port = ports.get_mut(node).map_or(0, |next| std::mem::replace(next, *next + 1));
                let stem = if kind == Kind::Switch { "port" } else { "eth" };
                let address = match (bridged, kind) {
                    (true, Kind::Host | Kind::Aggregator) => Some((fabric_address(index as u32 + 1), 16)),
                    (true, Kind::Switch) => None,
                    (false, _) => Some((fabric_address(2 * (index as u32 + 1) + side), 31)),
                };
                End { node, device: format!("{stem}{port}"), address }
            });
            cables.push(Cable { ends, rate: link.rate, delay: link.delay });
        }
        let mut layout = Self { bridged, cables, routes: Vec::new() };
        layout.check(topology)?;
        if !bridged {
            layout.route(topology);
        }
        Ok(layout)
    }

    /// The ends that are `node`'s, with the cable's index and the end on the other side.
    pub fn ends_of(&self, node: usize) -> impl Iterator<Item = (usize, &End, &End)> {
        self.cables.iter().enumerate().filter_map(move |(index, cable)| {
            let [a, b] = &cable.ends;
            if a.node == node {
                Some((index, a, b))
            } else if b.node == node {
                Some((index, b, a))
            } else {
                None
            }
        })
    }

    /// The fabric addresses of a node, one for each of its links.
    pub fn addresses(&self, node: usize) -> Vec<Ipv4Addr> {
        self.ends_of(node).filter_map(|(_, own, _)| own.address.map(|(address, _)| address)).collect()
    }

    fn check(&self, topology: &Topology) -> Result<()> {
        for host in topology.hosts() {
            if self.ends_of(host).next().is_none() {
                bail!("host {} has no link", name(topology, host));
            }
            if self.ends_of(host).any(|(_, _, far)| kind(topology, far.node) == Kind::Host) {
                bail!("host {} is linked to a host; put a switch between them", name(topology, host));
            }
        }
        Ok(())
    }

    fn route(&mut self, topology: &Topology) {
        let mut routes = Vec::new();
        for host in topology.ends() {
            self.route_host(host, &mut routes);
            for (_, own, far) in self.ends_of(host) {
                let Some((address, length)) = own.address else { continue };
                let prefix = Ipv4Addr::from_bits(address.to_bits() & !1);
                let distances = self.distances(topology, far.node);
                for switch in topology.switches().filter(|switch| *switch != far.node) {
                    let via = self.next_hops(switch, &distances);
                    if !via.is_empty() {
                        routes.push(Route {
                            node: switch,
                            prefix: Some((prefix, length)),
                            source: None,
                            via,
                        });
                    }
                }
            }
        }
        self.routes = routes;
    }

    /// A host's routes: by default over its first link, and from each further link's address over that link.
    fn route_host(&self, host: usize, routes: &mut Vec<Route>) {
        for (rail, (_, own, far)) in self.ends_of(host).enumerate() {
            if let (Some((address, _)), Some((gateway, _))) = (own.address, far.address) {
                let source = (rail > 0).then_some(address);
                routes.push(Route {
                    node: host,
                    prefix: None,
                    source,
                    via: vec![(gateway, own.device.clone())],
                });
            }
        }
    }

    /// Hops from each switch to the switch `target`, over switches alone.
    fn distances(&self, topology: &Topology, target: usize) -> Vec<Option<u32>> {
        let mut distances = vec![None; topology.nodes.len()];
        let mut queue = VecDeque::from([(target, 0)]);
        while let Some((node, distance)) = queue.pop_front() {
            match distances.get_mut(node) {
                Some(slot @ None) => *slot = Some(distance),
                _ => continue,
            }
            let switches = self.ends_of(node).filter(|(_, _, far)| kind(topology, far.node) == Kind::Switch);
            queue.extend(switches.map(|(_, _, far)| (far.node, distance + 1)));
        }
        distances
    }

    fn next_hops(&self, switch: usize, distances: &[Option<u32>]) -> Vec<(Ipv4Addr, String)> {
        let distance = |node: usize| distances.get(node).copied().flatten();
        let Some(own) = distance(switch) else { return Vec::new() };
        self.ends_of(switch)
            .filter(|(_, _, far)| distance(far.node).is_some_and(|next| next + 1 == own))
            .filter_map(|(_, near, far)| Some((far.address?.0, near.device.clone())))
            .collect()
    }
}

/// The management address of the host or aggregator that is `position`-th among both.
pub fn management_address(position: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(MANAGEMENT + 2 + (position as u32 & 0x7fff))
}

fn fabric_address(offset: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(FABRIC + (offset & 0xffff))
}

fn kind(topology: &Topology, node: usize) -> Kind {
    topology.nodes.get(node).map_or(Kind::Switch, |node| node.kind)
}

fn name(topology: &Topology, node: usize) -> &str {
    topology.nodes.get(node).map_or("?", |node| &node.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fabric(hosts: &[&str], switches: &[&str], links: &[(&str, &str)]) -> Result<Layout> {
        let mut text = String::new();
        hosts.iter().for_each(|name| text += &format!("[[host]]\nname = '{name}'\n"));
        switches.iter().for_each(|name| text += &format!("[[switch]]\nname = '{name}'\n"));
        for (from, to) in links {
            text += &format!("[[link]]\nfrom = '{from}'\nto = '{to}'\nrate = '1Gbit/s'\n");
        }
        Layout::of(&Topology::parse(&text).unwrap())
    }

    #[test]
    fn one_switch_is_a_bridge() {
        let layout = fabric(&["a", "b"], &["s"], &[("a", "s"), ("s", "b")]).unwrap();
        assert!(layout.bridged && layout.routes.is_empty());
        assert_eq!(layout.addresses(0), [Ipv4Addr::new(10, 64, 0, 1)]);
        assert_eq!(layout.addresses(1), [Ipv4Addr::new(10, 64, 0, 2)]);
        assert_eq!(layout.cables[1].ends[0], End { node: 2, device: "port1".into(), address: None });
    }

    #[test]
    fn leaves_spread_over_both_spines() {
        let links = [("a", "l0"), ("b", "l1"), ("l0", "s0"), ("l0", "s1"), ("l1", "s0"), ("l1", "s1")];
        let layout = fabric(&["a", "b"], &["l0", "l1", "s0", "s1"], &links).unwrap();
        // b's link is 10.64.0.4/31: b holds .4, its leaf .5.
        let to_b = |node| {
            let prefix = Some((Ipv4Addr::new(10, 64, 0, 4), 31));
            let found = layout.routes.iter().find(|route| route.node == node && route.prefix == prefix);
            found.map(|route| route.via.iter().map(|(_, device)| device.as_str()).collect::<Vec<_>>())
        };
        assert_eq!(to_b(2), Some(vec!["port1", "port2"]), "the other leaf has two next hops");
        assert_eq!(to_b(3), None, "b's own leaf is connected");
        assert_eq!(to_b(4), Some(vec!["port1"]));
        assert_eq!(to_b(5), Some(vec!["port1"]));
        let default = layout.routes.iter().find(|route| route.node == 0).unwrap();
        assert_eq!(default.via, [(Ipv4Addr::new(10, 64, 0, 3), "eth0".to_owned())]);
    }

    #[test]
    fn a_second_rail_is_routed_by_its_source() {
        let links = [("a", "r0"), ("a", "r1"), ("b", "r0"), ("b", "r1")];
        let layout = fabric(&["a", "b"], &["r0", "r1"], &links).unwrap();
        assert_eq!(layout.addresses(0).len(), 2);
        let sources: Vec<_> =
            layout.routes.iter().filter(|route| route.node == 0).map(|r| r.source).collect();
        assert_eq!(sources, [None, Some(Ipv4Addr::new(10, 64, 0, 4))]);
    }

    #[test]
    fn what_cannot_be_built_is_named() {
        let wrong = |layout: Result<Layout>| layout.unwrap_err().to_string();
        assert!(wrong(fabric(&["a"], &["s"], &[])).contains("host a has no link"));
        let direct = [("a", "s"), ("b", "s"), ("a", "b")];
        assert!(wrong(fabric(&["a", "b"], &["s"], &direct)).contains("linked to a host"));
    }
}
