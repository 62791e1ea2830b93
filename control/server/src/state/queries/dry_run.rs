//! What would be planned, now or if more were withdrawn. It is taken from the state at once, and planned
//! where nobody waits for it.

use super::Queries;
use super::reply::{ring, with_plan};
use crate::state::job::lifecycle::Planned;
use crate::state::job::planning::jobs;
use crate::state::job::stored::ppm;
use crate::state::world::withdrawals::{InstructionError, withdrawn_with};
use harmonaize_api::v1;
use harmonaize_planner::{
    Assignment, Conditions, HostId, Job, Node, Path, Plan, PlanReason, Policy, Request, Routes, Topology,
    check, plan,
};
use std::collections::BTreeMap;

/// Everything that a plan is made from.
#[derive(Debug)]
pub struct DryRun {
    topology: Topology,
    conditions: Conditions,
    jobs: Vec<Job>,
    paths: BTreeMap<(HostId, HostId), Vec<Path>>,
    /// What each job runs by now.
    now: Vec<v1::PlanStatus>,
}

impl Queries<'_> {
    /// Returns what a plan would be made from if these were withdrawn too.
    ///
    /// # Errors
    /// Where the topology has no such thing.
    pub(crate) fn dry_run(&self, targets: &[String]) -> Result<DryRun, InstructionError> {
        let ctx = &self.ctx;
        let topology = ctx.settings.topology.clone();
        let withdrawn = withdrawn_with(&topology, ctx.operator.withdrawn(), targets)?;
        let jobs = jobs(&self.view());
        let status = |job: &Job| {
            let known = ctx.communicators.get(&job.communicator);
            known.map_or_else(v1::PlanStatus::default, |known| self.plan_status(job.communicator, known))
        };
        let now = jobs.iter().map(status).collect();
        let conditions = self.links.conditions(&topology, &withdrawn);
        Ok(DryRun { topology, conditions, jobs, paths: self.links.ports.paths().clone(), now })
    }
}

impl DryRun {
    /// Plans. With thousands of communicators it takes up to a second.
    pub fn reply(self) -> v1::DryRunReply {
        let request = Request {
            topology: &self.topology,
            conditions: &self.conditions,
            jobs: &self.jobs,
            routes: Routes::Listed(&self.paths),
            policy: Policy::default(),
        };
        let mut planned = plan(&request);
        if let Err(error) = check(&request, &planned) {
            planned.reason = PlanReason::Unusable(error);
        }
        let Plan { assignments, before, after, reason } = planned;
        let moved = |part: &&Assignment| part.changed;
        let changed = assignments.iter().filter(moved).map(|part| part.communicator.0).collect();
        let parts = self.jobs.iter().zip(&self.now).zip(&assignments);
        let plans = parts.map(|((job, now), part)| self.status(job, now, part)).collect();
        v1::DryRunReply {
            score_before_ppm: ppm(before.slowdown),
            score_after_ppm: ppm(after.slowdown),
            stuck_before: before.unreachable_jobs,
            stuck_after: after.unreachable_jobs,
            reason: reason.to_string(),
            reason_code: reason.code().to_owned(),
            plans,
            changed,
        }
    }

    fn status(&self, job: &Job, now: &v1::PlanStatus, part: &Assignment) -> v1::PlanStatus {
        let planned = Planned::from(part);
        if !part.changed {
            return with_plan(now.clone(), &planned);
        }
        let name = |host: HostId| self.topology.node_name(Node::Host(host)).to_owned();
        let via = |path: &Path| {
            let switches = self.topology.switches_of(path).into_iter();
            switches.map(|switch| self.topology.node_name(Node::Switch(switch)).to_owned()).collect()
        };
        let ring = ring(&part.order, &job.hosts);
        let hops = ring.iter().zip(&part.edges).map(|(((_, from), (_, to)), hop)| v1::PlannedRingEdge {
            from: name(*from),
            to: name(*to),
            paths: hop
                .paths
                .iter()
                .map(|path| v1::PlannedPath { source_port: 0, switches: via(path) })
                .collect(),
            rate_bps: part.rate_limit.map_or(0, |pace| pace.0),
        });
        let hops = hops.collect();
        let order = ring.iter().map(|((_, host), _)| name(*host)).collect();
        with_plan(v1::PlanStatus { order, ring_edges: hops, ..now.clone() }, &planned)
    }
}
