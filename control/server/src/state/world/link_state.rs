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
mod trace;
mod traces;

use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::decisions::Trigger;
use crate::state::time::nanos;
use harmonaize_planner::{Conditions, DirectedLink, Drains, Estimate, Estimates, Topology};
use ports::Ports;
use std::time::Duration;

/// How long after it was measured which connections carry traffic that is done again while some link is
/// thought to be congested: whether jobs have gone quiet.
const ACTIVE_AGAIN: Duration = Duration::from_millis(500);

/// What is known of links, and where from.
#[derive(Debug)]
pub(crate) struct LinkState {
    /// Source ports of connections, and which paths they take.
    pub ports: Ports,
    traces: traces::Traces,
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

    /// Returns when [`LinkState::expire`] or [`LinkState::fade`] has something to do.
    pub(crate) fn next_timeout(&self, ctx: &Ctx<'_>) -> Option<Duration> {
        let fades = self.estimates.next_due().map(|at| Duration::from_nanos(at.0));
        let active = self.active_at.map_or(Duration::ZERO, |at| at.saturating_add(ACTIVE_AGAIN));
        let active = self.estimates.links().next().map(|_| active);
        self.trace_deadline(ctx).into_iter().chain(self.probes.deadline()).chain(fades).chain(active).min()
    }

    /// Asks what is due, and gives up on what was not answered.
    pub(crate) fn expire(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        self.expire_traces(ctx, effects);
        self.verify_pending(ctx, effects);
    }

    /// Lets estimates fade, and has links probed that are not in use.
    pub(crate) fn fade(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        if self.estimates.decay(&ctx.settings.topology, nanos(ctx.now)) {
            effects.want_plan(Trigger::Faded);
        }
        self.ask_probes(ctx, effects);
    }
}
