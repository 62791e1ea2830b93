//! From a complete set of joins to a communicator with its first epoch.

use super::Controller;
use crate::state::ctx::ctx;
use crate::state::job::group::Group;
use crate::state::job::planning::{checked, jobs_with};
use crate::state::job::reconcile;
use crate::state::job::reconcile::proposer::proposer;
use crate::state::output::Fact;
use crate::state::tenants::events::note_maintenance;
use crate::state::view::view;
use harmonaize_abi::CommunicatorId;
use harmonaize_planner::{Conditions, HostId, Job, Plan};
use std::time::Duration;

impl Controller {
    /// All ranks of several communicators have joined: one plan for all of them.
    pub(crate) fn form(&mut self, now: Duration, groups: Vec<Group>) {
        let (mut formed, mut planned) = (Vec::new(), Vec::new());
        for group in groups {
            self.formed = self.formed.wrapping_add(1);
            let id = CommunicatorId(u64::from(self.boot) << 32 | u64::from(self.formed));
            let known = group.into_communicator(&ctx!(self, now));
            let hosts: Vec<HostId> = known.members.iter().map(|member| member.host).collect();
            self.outbox.fact(Fact::Formed {
                communicator: id,
                tenant: known.tenant.clone(),
                name: known.name.clone(),
                ranks: known.ranks,
                hosts: hosts.iter().map(|host| self.settings.host_name(*host)).collect(),
            });
            if let Some(before) = known.succeeds {
                self.regroups.past.next_forms(before, id);
            }
            formed.push((id, known));
            planned.push((id, hosts));
        }
        if formed.is_empty() {
            return;
        }
        let view = view!(self, now);
        let (jobs, conditions) = (jobs_with(&view, planned), view.conditions());
        let plan = if self.settings.replan { self.fit_plan(&jobs, &conditions) } else { None };
        for (id, known) in formed {
            self.communicators.insert(id, known);
            note_maintenance(&ctx!(self, now), &mut self.outbox, Some(id));
            reconcile::form(&mut proposer!(self, now), id, plan.as_ref());
            self.link_state.trace_communicator(&ctx!(self, now), &mut self.outbox, id);
        }
        self.settle(now);
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
