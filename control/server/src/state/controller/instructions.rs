//! What operators decide while control runs: considered, stored by the actor, then in effect.

use super::Controller;
use super::topology::TopologyRefusal;
use crate::state::ctx::ctx;
use crate::state::job::communicator::EndCause;
use crate::state::job::decisions::Trigger;
use crate::state::settings::Settings;
use crate::state::tenants::events::note_maintenance;
use crate::state::tenants::served::announce_tenants;
use crate::state::world::agents::OpenJoin;
use crate::state::world::operator::Instruction;
use crate::state::world::withdrawals::InstructionError;
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{FailureKind, JoinRefusedKind};
use harmonaize_disclose::JoinFailure;
use harmonaize_store::{Change, Stored};
use std::time::Duration;

impl Controller {
    /// Takes up what an earlier start left. Time is 0, `realtime` what the clock says then. Before
    /// anything else.
    pub fn restore(&mut self, mut stored: Stored, realtime: Nanos) {
        if let Some(boot) = stored.boot {
            self.boot = boot;
        }
        self.operator.restore(&mut self.settings, &mut stored, realtime);
        self.agreements.restore(stored.agreements);
        self.regroups.past.restore(&self.settings, &self.operator, stored.pasts);
        self.jobs.restore(&self.settings, &self.operator, stored.jobs);
        self.operator.update_windows(&self.settings, Duration::ZERO, &mut self.outbox.trigger);
    }

    /// What must be stored for an instruction to be in effect: then [`Controller::apply_stored`] has it be
    /// so.
    ///
    /// # Errors
    /// Why it is not followed; nothing has changed.
    pub fn consider(
        &self,
        now: Duration,
        instruction: &Instruction,
    ) -> Result<Vec<Change>, InstructionError> {
        let ctx = ctx!(self, now);
        let communicators = |tenant: &str| self.regroups.communicators_of(&ctx, &self.joins, tenant, "");
        self.operator.consider(&self.settings, now, instruction, communicators)
    }

    /// Carries out what is stored.
    pub fn apply_stored(&mut self, now: Duration, changes: &[Change]) {
        let served = self.operator.served();
        for change in changes {
            if let Change::Agreement(record) = change {
                self.agreements.agreed(&ctx!(self, now), &mut self.outbox, record);
                self.settle(now);
            } else if let Some(tenant) = self.operator.apply(&mut self.settings, change) {
                self.forget_tenant(now, &tenant);
            }
        }
        announce_tenants(&ctx!(self, now), &mut self.outbox, &served);
        self.operator.update_windows(&self.settings, now, &mut self.outbox.trigger);
        note_maintenance(&ctx!(self, now), &mut self.outbox, None);
        self.regroups.mark_all_due();
        self.act(now);
    }

    /// Applies the configuration file, which was read again. Its topology, its tenants, their hosts and terms, and the algorithms and
    /// congestion controls chosen for them hold from now on. What tenants have that it has no longer ends.
    ///
    /// # Errors
    /// Where the topology lacks what is in use. Nothing has changed then.
    pub fn configure(&mut self, now: Duration, again: Settings) -> Result<(), TopologyRefusal> {
        let Settings { topology, tenants, hosts, terms, algorithms, congestion_controls, .. } = again;
        self.change_topology(now, topology)?;
        self.settings.hosts = hosts;
        (self.settings.algorithms, self.settings.congestion_controls) = (algorithms, congestion_controls);
        let served = self.operator.served();
        for tenant in self.operator.configure(&mut self.settings, tenants) {
            self.forget_tenant(now, &tenant);
        }
        if terms != self.settings.terms {
            self.settings.terms = terms;
            self.outbox.want_plan(Trigger::Aggregators);
        }
        announce_tenants(&ctx!(self, now), &mut self.outbox, &served);
        self.regroups.mark_all_due();
        self.act(now);
        Ok(())
    }

    /// What was to be stored could not be: it is not in effect.
    pub fn store_failed(&mut self, now: Duration, changes: &[Change]) {
        self.regroups.past.store_again(now, changes);
        self.jobs.store_again(now, changes);
        for change in changes {
            if let Change::Agreement(record) = change {
                self.agreements.store_failed(
                    &ctx!(self, now),
                    &mut self.outbox,
                    CommunicatorId(record.communicator),
                );
            }
        }
        self.settle(now);
    }

    /// A tenant is gone. Whoever joined in its name while that was stored is refused, and what formed
    /// meanwhile ends.
    fn forget_tenant(&mut self, now: Duration, name: &str) {
        let joins = self.sessions.iter().flat_map(|(session, known)| {
            let own = known.joins.iter().filter(move |(_, join)| match join {
                OpenJoin::Rank(key, _) | OpenJoin::Regroup(key) => key.0 == name,
                // Told when the communicator ends.
                OpenJoin::Split(_) => false,
            });
            own.map(move |(request, join)| ((*session, *request), join.clone()))
        });
        for ((session, request), join) in joins.collect::<Vec<_>>() {
            self.withdraw_join((session, request), join);
            let kind = JoinRefusedKind::UnknownTenant;
            self.outbox.end_join(session, request, kind, &JoinFailure::UnknownTenant);
        }
        let formed = self.communicators.iter().filter(|(_, known)| known.tenant == name);
        for id in formed.map(|(id, _)| *id).collect::<Vec<_>>() {
            let detail = "its tenant was removed".to_owned();
            self.end(now, id, EndCause { kind: FailureKind::Operator, ranks: Vec::new(), detail }, None);
        }
        self.settle(now);
        self.regroups.past.forget(name);
        self.agreements.forget(name);
        self.hints.forget(name);
        self.history.forget(name);
        self.events.forget_tenant(&ctx!(self, now), &mut self.outbox, name);
        self.jobs.forget_tenant(&mut self.outbox, name);
    }
}
