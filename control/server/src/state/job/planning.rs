//! What the planner sees of communicators, when a plan is due, and plans that have no effect.

use crate::state::job::communicator::{Communicator, MOST_RECENT};
use crate::state::job::decisions::Trigger;
use crate::state::view::View;
use crate::state::world::link_state::LinkState;
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1;
use harmonaize_planner::{
    Bytes, CheckError, Conditions, Current, Drains, HostId, Job, Plan, Policy, Request, Routes, Topology,
    check, plan,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// Least time between two plans, and what each participant adds to it: planning for very many takes longer.
const SPACING: (Duration, Duration) = (Duration::from_millis(1), Duration::from_micros(10));

/// For how long a change of plan makes the next one dearer. In that time control makes [`MOST_RECENT`]
/// changes of one communicator at most. What passes nothing, or was withdrawn, is left however often that
/// happens.
const RECENT: Duration = Duration::from_secs(30);

/// What makes control plan anew.
#[derive(Debug, Default)]
pub(crate) struct PlanRequest {
    /// The first thing that moved since the last plan.
    trigger: Option<Trigger>,
    /// Not sooner than this.
    not_before: Duration,
    /// The least time until the next plan, while it is not known when the last was over.
    made: Option<Duration>,
}

impl PlanRequest {
    /// Something moved.
    pub(crate) fn want(&mut self, trigger: Trigger) {
        self.trigger.get_or_insert(trigger);
    }

    /// What has moved makes no plan.
    pub(crate) fn forget(&mut self) {
        self.trigger = None;
    }

    /// Returns what moved, if a plan of so many participants is due now; the next is after a while.
    pub(crate) fn take(&mut self, now: Duration, participants: usize) -> Option<Trigger> {
        if now < self.not_before {
            return None;
        }
        let trigger = self.trigger.take()?;
        let participants = u32::try_from(participants).unwrap_or(u32::MAX);
        let spacing = SPACING.0 + SPACING.1.saturating_mul(participants);
        self.not_before = now.saturating_add(spacing);
        self.made = Some(spacing);
        Some(trigger)
    }

    /// The plan that was taken last was made by now.
    pub(crate) fn made(&mut self, now: Duration) {
        if let Some(spacing) = self.made.take() {
            self.not_before = now.saturating_add(spacing);
        }
    }

    /// Returns when a plan is due that had to wait.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        self.trigger.as_ref().map(|_| self.not_before)
    }
}

/// A plan, without any effect.
pub(crate) fn checked(
    topology: &Topology,
    links: &LinkState,
    jobs: &[Job],
    conditions: &Conditions,
) -> Result<Plan, CheckError> {
    let request = Request {
        topology,
        conditions,
        jobs,
        routes: Routes::Listed(links.ports.paths()),
        policy: Policy::default(),
    };
    let plan = plan(&request);
    check(&request, &plan).map(|()| plan)
}

/// Returns the jobs of a plan in which communicators form on these hosts. All others stay as they are for
/// now.
pub(crate) fn jobs_with(view: &View<'_>, formed: Vec<(CommunicatorId, Vec<HostId>)>) -> Vec<Job> {
    let mut jobs = jobs(view);
    jobs.iter_mut().for_each(|job| job.movable = false);
    jobs.extend(formed.into_iter().map(|(id, hosts)| Job {
        communicator: id,
        hosts,
        connections: view.ctx.settings.paths,
        weight: view.agreements.quarters(id),
        guaranteed: view.agreements.promised(id),
        rate_limit: None,
        operation: Bytes(0),
        iteration_pattern: None,
        current: None,
        movable: true,
    }));
    jobs
}

/// All communicators as the planner sees them.
pub(crate) fn jobs(view: &View<'_>) -> Vec<Job> {
    view.ctx.communicators.iter().map(|(id, known)| job(view, *id, known)).collect()
}

fn job(view: &View<'_>, id: CommunicatorId, known: &Communicator) -> Job {
    let recent = known.changes.iter().filter(|at| **at + RECENT > view.ctx.now).count();
    let latest = known.latest();
    let current = Current {
        order: latest.map_or_else(Vec::new, |latest| latest.order.clone()),
        edges: latest.map_or_else(Vec::new, |latest| view.links.hops(known, latest)),
        recent_changes: recent as u32,
    };
    let running = known.phase() == v1::Phase::Running;
    let (operation, iteration_pattern) =
        view.ctx.iterations.get(&id).map_or((0, None), |known| (known.bytes(), known.pattern()));
    Job {
        communicator: id,
        hosts: known.members.iter().map(|member| member.host).collect(),
        connections: view.ctx.settings.paths,
        weight: view.agreements.quarters(id),
        guaranteed: view.agreements.promised(id),
        rate_limit: None,
        operation: Bytes(if operation == 0 { view.hints.dominant_bytes(id) } else { operation }),
        iteration_pattern,
        current: Some(current),
        movable: running && !known.pinned && known.backoff_until.is_none() && recent < MOST_RECENT,
    }
}

/// Returns how all communicators would be slowed, as they run or are about to, without others' traffic.
/// Nothing while all of the fabric is in use.
pub(crate) fn undisturbed(view: &View<'_>) -> BTreeMap<CommunicatorId, f64> {
    let Drains { hosts, switches, links } = view.ctx.operator.withdrawn();
    if hosts.is_empty() && switches.is_empty() && links.is_empty() && !view.links.failures.any() {
        return BTreeMap::new();
    }
    let mut jobs = jobs(view);
    jobs.iter_mut().for_each(|job| job.movable = false);
    let topology = &view.ctx.settings.topology;
    let mut conditions = view.conditions();
    for (link, _) in view.links.estimates() {
        let rate = topology.links().get(link.link.0).map(|link| link.rate);
        conditions.set_available(link, rate.unwrap_or_default());
    }
    let plan = checked(topology, view.links, &jobs, &conditions).ok();
    let each = plan.into_iter().flat_map(|plan| plan.assignments);
    each.map(|part| (part.communicator, part.slowdown)).collect()
}
