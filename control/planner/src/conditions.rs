//! What a fabric can carry for us now. For each directed link that is what cross traffic leaves, and whether the link may be
//! used.

use harmonaize_topology::{DirectedLink, HostId, Link, LinkId, Node, Path, SwitchId, Topology};
use harmonaize_units::Rate;
use std::collections::BTreeSet;

/// Whether a link may be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkUse {
    /// Yes.
    #[default]
    Open,
    /// Only where there is no other way: it is drained, or shares a risk with one that failed.
    Avoid,
    /// Nothing passes.
    Failed,
}

/// What operators have asked to be left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drains {
    /// Hosts that take no new communicators.
    pub hosts: BTreeSet<HostId>,
    /// Switches that no path shall cross.
    pub switches: BTreeSet<SwitchId>,
    /// Links that no path shall cross.
    pub links: BTreeSet<LinkId>,
}

impl Drains {
    /// All links that no path shall cross: those named, and those of switches. A drained host's own stay, for what runs there.
    pub fn all_links(&self, topology: &Topology) -> BTreeSet<LinkId> {
        let of_switches = self.switches.iter().flat_map(|switch| topology.links_at(Node::Switch(*switch)));
        of_switches.chain(&self.links).copied().collect()
    }
}

/// The fabric as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conditions {
    cells: Vec<(Rate, LinkUse)>,
}

impl Conditions {
    /// Everything idle and whole.
    pub fn clear(topology: &Topology) -> Self {
        let usable = |link: &Link| if link.is_gone() { LinkUse::Failed } else { LinkUse::Open };
        Self { cells: topology.links().iter().flat_map(|link| [(link.rate, usable(link)); 2]).collect() }
    }

    /// What others leave us of a directed link; 0 for one that the topology does not have.
    pub fn available(&self, link: DirectedLink) -> Rate {
        self.cells.get(link.index()).map_or(Rate(0), |(rate, _)| *rate)
    }

    /// Whether it may be used.
    pub fn usable(&self, link: DirectedLink) -> LinkUse {
        self.cells.get(link.index()).map_or(LinkUse::Failed, |(_, usable)| *usable)
    }

    /// The worst of a path's links.
    pub fn path(&self, path: &Path) -> LinkUse {
        path.links().iter().map(|link| self.usable(*link)).max().unwrap_or(LinkUse::Failed)
    }

    /// Says what others leave.
    pub fn set_available(&mut self, link: DirectedLink, rate: Rate) {
        if let Some(cell) = self.cells.get_mut(link.index()) {
            cell.0 = rate;
        }
    }

    /// Makes a link's use worse in both directions, never better.
    pub fn restrict(&mut self, link: LinkId, usable: LinkUse) {
        for forward in [true, false] {
            if let Some(cell) = self.cells.get_mut(DirectedLink { link, forward }.index()) {
                cell.1 = cell.1.max(usable);
            }
        }
    }
}
