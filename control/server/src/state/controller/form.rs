//! From a complete set of joins to a communicator with its first epoch.

use super::Controller;
use crate::state::ctx::ctx;
use crate::state::job::group::Group;
use crate::state::job::lifecycle::Planned;
use crate::state::job::planning::{checked, jobs};
use crate::state::job::proposer::Proposal;
use crate::state::output::Fact;
use crate::state::tenants::events::note_maintenance;
use harmonaize_planner::{Bytes, Conditions, HostId, Job, Plan, order};
use std::time::Duration;

impl Controller {
    /// Forms sets of ranks that are complete.
    pub(crate) fn form_all(&mut self, now: Duration, groups: Vec<Group>) {
        groups.into_iter().for_each(|group| self.form(now, group));
    }

    /// All ranks have joined.
    pub(crate) fn form(&mut self, now: Duration, group: Group) {
        self.formed = self.formed.wrapping_add(1);
        let id = u64::from(self.boot) << 32 | u64::from(self.formed);
        let formed = group.into_communicator(&ctx!(self, now));
        let hosts: Vec<HostId> = formed.members.iter().map(|member| member.host).collect();
        self.outbox.fact(Fact::Formed {
            communicator: id,
            tenant: formed.tenant.clone(),
            name: formed.name.clone(),
            ranks: formed.ranks,
            hosts: hosts.iter().map(|host| self.settings.host_name(*host)).collect(),
        });
        let proposal = self.first_plan(now, id, &hosts);
        self.communicators.insert(id, formed);
        note_maintenance(&ctx!(self, now), &mut self.outbox, Some(id));
        self.proposer(now).propose(id, proposal);
        self.link_state.trace_communicator(&ctx!(self, now), &mut self.outbox, id);
        self.settle(now);
    }

    /// What a communicator that forms begins with: planned beside all others, who stay as they are for now.
    fn first_plan(&mut self, now: Duration, id: u64, hosts: &[HostId]) -> Proposal {
        let mut jobs = jobs(&self.view(now));
        jobs.iter_mut().for_each(|job| job.movable = false);
        jobs.push(Job {
            communicator: id,
            hosts: hosts.to_vec(),
            connections: self.settings.paths,
            weight: self.agreements.quarters(id),
            guaranteed: self.agreements.promised(id),
            rate_limit: None,
            operation: Bytes(0),
            iteration_pattern: None,
            current: None,
            movable: true,
        });
        let conditions = self.view(now).conditions();
        let plan = if self.settings.replan { self.fit_plan(&jobs, &conditions) } else { None };
        match plan.and_then(|plan| plan.assignments.into_iter().find(|part| part.communicator == id)) {
            Some(part) => {
                let plan = Some(Planned::from(&part));
                Proposal { order: part.order, hops: part.edges, plan, ..Proposal::default() }
            }
            None => {
                let ring = order(&self.settings.topology, hosts).into_iter().map(|index| index as u32);
                Proposal { order: ring.collect(), ..Proposal::default() }
            }
        }
    }

    /// A plan that passed the check; none, and the operator is told, where it did not.
    pub(crate) fn fit_plan(&mut self, jobs: &[Job], conditions: &Conditions) -> Option<Plan> {
        self.link_state.ports.refresh(self.settings.paths as usize);
        match checked(&self.settings.topology, &self.link_state, jobs, conditions) {
            Ok(plan) => Some(plan),
            Err(error) => {
                self.decisions.counts.unfit += 1;
                let (count, why) = (self.decisions.counts.unfit, error.to_string());
                self.outbox.fact(Fact::PlanUnfit { count, why });
                None
            }
        }
    }
}
