//! What operators decide while control runs: tenants, and what is withdrawn from use. Decided here, stored by the actor, then
//! in effect.

mod dry_run;
mod plans;
mod reply;
mod withdrawal;

use super::State;
use super::communicator::EndCause;
use harmonaize_api::is_tenant_name;
use harmonaize_api::v1::{FailureKind, JoinRefusedKind};
use harmonaize_disclose::JoinFailure;
use harmonaize_planner::Drains;
use harmonaize_store::{Change, Plan, Stored, Tenant, Withdrawal, WithdrawalKind};
pub(crate) use plans::touched;
use std::collections::BTreeMap;
use std::time::Duration;

/// Most tenants, those of the configuration included.
const MOST_TENANTS: usize = 10_000;

/// Most targets of one instruction.
const MOST_TARGETS: usize = 1024;

/// Most characters of a reason.
const REASON_CHARS: usize = 200;

/// What an operator wants changed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // each field is named after what it holds
pub enum Instruction {
    /// A tenant beside those of the configuration.
    AddTenant { name: String },
    /// That tenant is to be gone.
    RemoveTenant { name: String },
    /// Hosts, switches and links ("end:end") that are to carry nothing. Times are CLOCK_REALTIME in nanoseconds; `until_ns` is 0
    /// for a drain.
    Withdraw { targets: Vec<String>, kind: WithdrawalKind, from_ns: u64, until_ns: u64, reason: String },
    /// They may carry again.
    Restore { targets: Vec<String>, kind: WithdrawalKind },
}

/// Why an instruction is not followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InstructionError {
    /// A name that no tenant can have.
    #[error("`{0}` is not a usable name: 1 to 63 visible ASCII characters, no slash")]
    BadName(String),
    /// The tenant is there.
    #[error("tenant `{0}` is there already")]
    TenantThere(String),
    /// The tenant is not there.
    #[error("there is no tenant `{0}`")]
    NoTenant(String),
    /// The tenant is the configuration's.
    #[error("tenant `{0}` stands in the configuration file: take it out there, and start control again")]
    Configured(String),
    /// The tenant has communicators.
    #[error("tenant `{0}` has {1} communicators; dissolve them first")]
    TenantBusy(String, usize),
    /// No room.
    #[error("there are {MOST_TENANTS} tenants already")]
    TooManyTenants,
    /// Nothing, or too much, is named.
    #[error("name 1 to {MOST_TARGETS} hosts, switches or links, not {0}")]
    Targets(usize),
    /// The topology has no such thing.
    #[error("the topology has no {0}")]
    Unknown(String),
    /// A window that ends before it begins, or is over.
    #[error("the window {0}")]
    Window(&'static str),
    /// Nothing of the kind.
    #[error("{0}")]
    NotWithdrawn(String),
}

/// What operators have decided.
#[derive(Debug, Default)]
pub(super) struct Operator {
    /// CLOCK_REALTIME at time 0 of the state.
    began_ns: u64,
    /// Tenants beside those of the configuration.
    added: BTreeMap<String, Tenant>,
    withdrawals: BTreeMap<(String, WithdrawalKind), Withdrawal>,
    /// In effect now.
    withdrawn: Drains,
    /// When a window begins or ends next.
    next: Option<Duration>,
    /// From an earlier start, of communicators that have not come back yet.
    plans: BTreeMap<u64, Plan>,
    /// Until when they may.
    plans_until: Option<Duration>,
}

impl State {
    /// Takes up what an earlier start left. Time is 0, `realtime_ns` what the clock says then. Before anything else.
    pub fn restore(&mut self, stored: Stored, realtime_ns: u64) {
        if let Some(boot) = stored.boot {
            self.boot = boot;
        }
        let configured = &self.settings.tenants;
        self.operator.added =
            stored.tenants.into_iter().filter(|(name, _)| !configured.contains(name)).collect();
        self.settings.tenants.extend(self.operator.added.keys().cloned());
        self.operator.began_ns = realtime_ns;
        self.operator.withdrawals = stored.withdrawals;
        self.operator.plans_until = (!stored.plans.is_empty()).then_some(self.settings.recovery_timeout);
        self.operator.plans = stored.plans;
        self.agreements.restore(stored.agreements);
        self.restore_pasts(stored.pasts);
        self.update_windows(Duration::ZERO);
    }

    /// What must be stored for an instruction to be in effect: then [`State::apply_stored`] has it be so.
    ///
    /// # Errors
    /// Why it is not followed; nothing has changed.
    pub fn consider(
        &self,
        now: Duration,
        instruction: &Instruction,
    ) -> Result<Vec<Change>, InstructionError> {
        match instruction {
            Instruction::AddTenant { name } => self.add_tenant(now, name),
            Instruction::RemoveTenant { name } => self.remove_tenant(name),
            Instruction::Withdraw { targets, kind, from_ns, until_ns, reason } => {
                self.consider_withdrawal(now, targets, *kind, (*from_ns, *until_ns), reason)
            }
            Instruction::Restore { targets, kind } => self.consider_restoring(targets, *kind),
        }
    }

    /// Carries out what is stored.
    pub fn apply_stored(&mut self, now: Duration, changes: &[Change]) {
        for change in changes {
            match change {
                Change::Tenant(tenant) => {
                    if !self.settings.tenants.contains(&tenant.name) {
                        self.settings.tenants.push(tenant.name.clone());
                        self.operator.added.insert(tenant.name.clone(), tenant.clone());
                    }
                }
                Change::NoTenant(name) => {
                    if self.operator.added.remove(name).is_some() {
                        self.settings.tenants.retain(|known| known != name);
                        self.forget_tenant(now, name);
                    }
                }
                Change::Withdraw(record) => {
                    let key = (record.target.clone(), record.kind());
                    self.operator.withdrawals.insert(key, record.clone());
                }
                Change::Restore(target, kind) => {
                    self.operator.withdrawals.remove(&(target.clone(), *kind));
                }
                Change::Agreement(record) => self.agreed(now, record),
                // Not an operator's, or in effect already.
                Change::Boot(_)
                | Change::Fabric(_)
                | Change::Plan(_)
                | Change::NoPlan(_)
                | Change::NoAgreement(_)
                | Change::Past(_)
                | Change::NoPast(_) => {}
            }
        }
        self.update_windows(now);
        self.note_maintenance(now, None);
        self.regroups.mark_all_due();
        self.act(now);
    }

    /// A tenant is gone. Whoever joined in its name while that was stored is refused, and what formed meanwhile ends.
    fn forget_tenant(&mut self, now: Duration, name: &str) {
        let joins = self.sessions.iter().flat_map(|(session, known)| {
            let own = known.joins.iter().filter(move |(_, (key, _))| key.0 == name);
            own.map(move |(request, join)| ((*session, *request), join.clone()))
        });
        for ((session, request), join) in joins.collect::<Vec<_>>() {
            self.forget_join(session, request);
            self.withdraw_join((session, request), join);
            self.refuse_join(session, request, JoinRefusedKind::UnknownTenant, &JoinFailure::UnknownTenant);
        }
        let formed = self.communicators.iter().filter(|(_, known)| known.tenant == name);
        for id in formed.map(|(id, _)| *id).collect::<Vec<_>>() {
            let detail = "its tenant was removed".to_owned();
            self.end(now, id, EndCause { kind: FailureKind::Operator, ranks: Vec::new(), detail }, None);
        }
        self.regroups.forget(name);
        self.agreements.forget(name);
        self.hints.forget(name);
        self.tenant_errors.remove(name);
        self.events.latest.remove(name);
        self.forget_feed(now, name);
    }

    fn add_tenant(&self, now: Duration, name: &str) -> Result<Vec<Change>, InstructionError> {
        let known = &self.settings.tenants;
        if !is_tenant_name(name) {
            return Err(InstructionError::BadName(name.chars().take(80).collect()));
        }
        if known.iter().any(|known| known == name) {
            return Err(InstructionError::TenantThere(name.to_owned()));
        }
        if known.len() >= MOST_TENANTS {
            return Err(InstructionError::TooManyTenants);
        }
        let added_ns = self.operator.realtime(now);
        Ok(vec![Change::Tenant(Tenant { name: name.to_owned(), added_ns })])
    }

    fn remove_tenant(&self, name: &str) -> Result<Vec<Change>, InstructionError> {
        let name = name.to_owned();
        if !self.settings.tenants.contains(&name) {
            return Err(InstructionError::NoTenant(name));
        }
        if !self.operator.added.contains_key(&name) {
            return Err(InstructionError::Configured(name));
        }
        match self.communicators_of(&name, "") {
            0 => Ok(vec![Change::NoTenant(name)]),
            busy => Err(InstructionError::TenantBusy(name, busy)),
        }
    }
}

impl Operator {
    /// CLOCK_REALTIME at a time of the state, as far as nobody has set the clock since.
    pub(super) fn realtime(&self, now: Duration) -> u64 {
        self.began_ns.saturating_add(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
    }

    /// The time of the state that a CLOCK_REALTIME was or will be; 0 where that is before it began.
    pub(super) fn time(&self, realtime_ns: u64) -> Duration {
        Duration::from_nanos(realtime_ns.saturating_sub(self.began_ns))
    }

    /// Whether a communicator of an earlier start was this tenant's, of this name, and had a part on a host.
    pub(super) fn ran(&self, id: u64, tenant: &str, name: &str, host: &str) -> bool {
        let fits = |plan: &Plan| {
            plan.tenant == tenant && plan.name == name && plan.hosts.iter().any(|known| known == host)
        };
        self.plans.get(&id).is_some_and(fits)
    }
}
