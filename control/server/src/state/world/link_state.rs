//! What is known of the fabric's links: congestion reports, trains of packets and traces become estimates and
//! paths.
//!
//! It owns its evidence and decides nothing about communicators: what it has agents asked, and that a plan
//! may be better, are effects.

pub(crate) mod answers;
pub(crate) mod congestion_reports;
mod evidence;
mod failed;
mod failures;
mod paths;
pub(crate) mod ports;
mod probes;
mod probing;
mod reports;
mod routes;
mod timers;
mod trace;
mod traces;

use harmonaize_planner::{Conditions, DirectedLink, Drains, Estimate, Estimates, Topology};
use ports::Ports;
use std::time::Duration;

/// What is known of links, and where from.
#[derive(Debug)]
pub(crate) struct LinkState {
    /// Source ports of connections, and which paths they take.
    pub ports: Ports,
    traces: traces::Traces,
    /// What answered on routes, whatever the topology makes of it.
    pub routes: routes::TracedRoutes,
    pub reports: reports::Reports,
    pub failures: failed::Failures,
    probes: probing::Probes,
    estimates: Estimates,
    /// When the estimates were told last which connections carry traffic; none where that has changed since.
    active_at: Option<Duration>,
}

impl LinkState {
    /// Nothing is known. `source_ports`: first and last that links may take; any where absent.
    pub(crate) fn new(source_ports: Option<(u16, u16)>) -> Self {
        Self {
            ports: Ports::new(source_ports),
            traces: traces::Traces::default(),
            routes: routes::TracedRoutes::default(),
            reports: reports::Reports::default(),
            failures: failed::Failures::default(),
            probes: probing::Probes::default(),
            estimates: Estimates::default(),
            active_at: None,
        }
    }

    /// Returns what links have left for ours, where these are withdrawn.
    pub(crate) fn conditions(&self, topology: &Topology, withdrawn: &Drains) -> Conditions {
        self.estimates.conditions(topology, withdrawn)
    }

    /// Returns what is estimated of links that are thought to be congested or to have failed.
    pub(crate) fn estimates(&self) -> impl Iterator<Item = (DirectedLink, &Estimate)> {
        self.estimates.links()
    }

    /// Epochs or paths have changed: other connections carry traffic.
    pub(crate) fn active_changed(&mut self) {
        self.active_at = None;
    }
}
