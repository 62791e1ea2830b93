//! Paths: links in the direction in which they are crossed. Here are all equal-cost paths between two hosts, and what a trace
//! shows.

use crate::{HostId, LinkId, Node, SwitchId, Topology};
use core::net::IpAddr;
use harmonaize_units::{Nanos, Rate};
use std::sync::Arc;

mod across;
mod search;

pub use search::PathFinder;

/// Most equal-cost paths between two hosts that are looked at.
pub const MAX_PATHS: usize = 64;

/// A link, one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DirectedLink {
    /// Which link.
    pub link: LinkId,
    /// From the end that the file names first to the other; else back.
    pub forward: bool,
}

impl DirectedLink {
    /// The other direction.
    pub fn reversed(self) -> Self {
        Self { forward: !self.forward, ..self }
    }

    /// Both directions of all links counted through: twice the link's number, one more for the way back.
    pub fn index(self) -> usize {
        self.link.0 * 2 + usize::from(!self.forward)
    }
}

/// A way from a host to another: directed links, each of which begins where the one before it ends. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path(Arc<[DirectedLink]>);

impl Path {
    /// The links, in order.
    pub fn links(&self) -> &[DirectedLink] {
        &self.0
    }

    /// The same links the other way.
    pub fn reversed(&self) -> Self {
        Self(self.0.iter().rev().map(|link| link.reversed()).collect())
    }

    /// Whether it crosses a link, in whichever direction.
    pub fn crosses(&self, link: LinkId) -> bool {
        self.0.iter().any(|at| at.link == link)
    }
}

/// Why a trace names no path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// A hop that no switch of the topology has.
    #[error("hop {hop} answered from {address}, which is no switch's address in the topology")]
    UnknownAddress {
        /// Which, from 1.
        hop: usize,
        /// Its address.
        address: IpAddr,
    },
    /// The topology has no such way.
    #[error("no chain of links joins the switches that answered")]
    NoSuchPath,
    /// Silent hops leave more than one.
    #[error("{0} paths fit the hops that answered")]
    Ambiguous(usize),
}

impl Topology {
    /// A link as it leaves a node; none if it does not touch it.
    pub fn directed(&self, link: LinkId, from: Node) -> Option<DirectedLink> {
        let ends = self.links().get(link.0)?;
        let forward = ends.from == from;
        (forward || ends.to == from).then_some(DirectedLink { link, forward })
    }

    /// Where a directed link begins and ends.
    pub fn ends(&self, link: DirectedLink) -> Option<(Node, Node)> {
        let ends = self.links().get(link.link.0)?;
        Some(if link.forward { (ends.from, ends.to) } else { (ends.to, ends.from) })
    }

    /// A directed link in words, such as `leaf0 -> spine1`.
    pub fn link_name(&self, link: DirectedLink) -> String {
        self.ends(link).map_or_else(String::new, |(from, to)| {
            format!("{} -> {}", self.node_name(from), self.node_name(to))
        })
    }

    /// The path along these nodes; none where two of them are not joined.
    pub fn path_along(&self, nodes: &[Node]) -> Option<Path> {
        let hops = nodes.iter().zip(nodes.iter().skip(1));
        let links = hops.map(|(from, to)| {
            let at = self.links_at(*from).iter().filter_map(|link| self.directed(*link, *from));
            at.into_iter().find(|link| self.ends(*link).is_some_and(|(_, end)| end == *to))
        });
        links.collect::<Option<Arc<[DirectedLink]>>>().filter(|links| !links.is_empty()).map(Path)
    }

    /// The switches of a path, in order.
    pub fn switches_of(&self, path: &Path) -> Vec<SwitchId> {
        let ends = path.links().iter().filter_map(|link| self.ends(*link));
        ends.filter_map(|(_, to)| match to {
            Node::Switch(switch) => Some(switch),
            Node::Host(_) => None,
        })
        .collect()
    }

    /// Rate of the slowest link of a path; 0 for a path of another topology.
    pub fn path_rate(&self, path: &Path) -> Rate {
        let rates =
            path.links().iter().map(|at| self.links().get(at.link.0).map_or(Rate(0), |link| link.rate));
        rates.min().unwrap_or_default()
    }

    /// All links of a path together, one way.
    pub fn path_delay(&self, path: &Path) -> Nanos {
        let delays =
            path.links().iter().filter_map(|at| self.links().get(at.link.0)).map(|link| link.delay.0);
        Nanos(delays.fold(0, u64::saturating_add))
    }

    /// All paths between two hosts with the fewest links, in the links' order, at most [`MAX_PATHS`]. Switches choose among those
    /// by hash. None from a host to itself.
    pub fn equal_cost_paths(&self, from: HostId, to: HostId) -> Vec<Path> {
        PathFinder::new(self).between(from, to)
    }

    /// The path that a trace took: the address of each switch on the way, none for one that kept silent.
    ///
    /// # Errors
    /// Where an address is unknown, or none or several of the topology's paths fit.
    pub fn traced_path(&self, from: HostId, to: HostId, hops: &[Option<IpAddr>]) -> Result<Path, TraceError> {
        let mut switches = Vec::with_capacity(hops.len());
        for (index, hop) in hops.iter().enumerate() {
            let known = hop.map(|address| {
                self.switch_at(address).ok_or(TraceError::UnknownAddress { hop: index + 1, address })
            });
            switches.push(known.transpose()?);
        }
        let fits = |path: &Path| {
            let via = self.switches_of(path);
            via.len() == switches.len()
                && via.iter().zip(&switches).all(|(switch, hop)| hop.is_none_or(|hop| hop == *switch))
        };
        let found: Vec<Path> = self.equal_cost_paths(from, to).into_iter().filter(fits).collect();
        match found.as_slice() {
            [path] => Ok(path.clone()),
            [] => {
                // Not one of the shortest: as it may be while the fabric goes round a failure.
                let via = switches.into_iter().collect::<Option<Vec<_>>>().ok_or(TraceError::NoSuchPath)?;
                let via = via.into_iter().map(Node::Switch);
                let nodes: Vec<Node> =
                    std::iter::once(Node::Host(from)).chain(via).chain([Node::Host(to)]).collect();
                self.path_along(&nodes).ok_or(TraceError::NoSuchPath)
            }
            several => Err(TraceError::Ambiguous(several.len())),
        }
    }
}

#[cfg(test)]
mod tests;
