//! What operators decide while control runs: tenants, and what is withdrawn from use. Decided here, stored by
//! the actor, then in effect.

use crate::state::job::decisions::Trigger;
use crate::state::settings::Settings;
use crate::state::world::withdrawals::{self, InstructionError, MOST_TENANTS, Windows};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::{is_tenant_name, v1};
use harmonaize_planner::{Drains, HostId};
use harmonaize_store::{Change, Plan, Stored, Tenant, Withdrawal, WithdrawalKind};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What an operator wants changed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // each field is named after what it holds
pub enum Instruction {
    /// A tenant beside those of the configuration.
    AddTenant(v1::AddTenantRequest),
    /// That tenant is to be gone.
    RemoveTenant { name: String },
    /// Hosts, switches and links ("end:end") that are to carry nothing. Times are CLOCK_REALTIME; `until` is 0
    /// for a drain.
    Withdraw { targets: Vec<String>, kind: WithdrawalKind, from: Nanos, until: Nanos, reason: String },
    /// They may carry again.
    Restore { targets: Vec<String>, kind: WithdrawalKind },
}

/// What operators have decided.
#[derive(Clone, Debug, Default)]
pub(crate) struct Operator {
    /// CLOCK_REALTIME at time 0 of the state.
    began: Nanos,
    /// Tenants of the configuration, once it is known that there are others.
    configured: Vec<String>,
    /// Tenants that operators added. One that the configuration has too is as there.
    added: BTreeMap<String, Tenant>,
    withdrawals: BTreeMap<(String, WithdrawalKind), Withdrawal>,
    windows: Windows,
    /// From an earlier start, of communicators that have not come back yet.
    plans: BTreeMap<CommunicatorId, Plan>,
    /// Until when they may.
    plans_until: Option<Duration>,
}

impl Operator {
    /// Takes up what an earlier start left, at time 0; `realtime` is what the clock says then.
    pub(crate) fn restore(&mut self, settings: &mut Settings, stored: &mut Stored, realtime: Nanos) {
        self.added = std::mem::take(&mut stored.tenants);
        let configured = std::mem::take(&mut settings.tenants);
        self.configure(settings, configured);
        self.began = realtime;
        self.withdrawals = std::mem::take(&mut stored.withdrawals);
        self.plans = std::mem::take(&mut stored.plans);
        self.plans_until = (!self.plans.is_empty()).then_some(settings.lease);
    }

    /// The configuration has these tenants now. Returns those that are gone by it.
    pub(crate) fn configure(&mut self, settings: &mut Settings, configured: Vec<String>) -> Vec<String> {
        let added = self.added.keys().filter(|name| !configured.contains(name));
        let tenants = configured.iter().chain(added).cloned().collect();
        let before = std::mem::replace(&mut settings.tenants, tenants);
        self.configured = configured;
        before.into_iter().filter(|name| !settings.tenants.contains(name)).collect()
    }

    /// Returns the tenants that some agents shall serve beside their own.
    pub(crate) fn served(&self) -> Vec<Tenant> {
        let added = self.added.keys().filter_map(|name| self.added_tenant(name));
        added.filter(|tenant| !tenant.uids.is_empty()).cloned().collect()
    }

    /// Returns the tenants that a host's agent shall serve beside its own.
    pub(crate) fn served_at(&self, host: &str) -> Vec<v1::AddedTenant> {
        let here =
            |tenant: &&Tenant| tenant.hosts.is_empty() || tenant.hosts.iter().any(|known| known == host);
        let added = self.added.keys().filter_map(|name| self.added_tenant(name));
        let served =
            added.filter(here).filter(|tenant| !tenant.uids.is_empty()).map(|tenant| v1::AddedTenant {
                name: tenant.name.clone(),
                uids: tenant.uids.clone(),
                quota: v1::TenantQuota::decode(tenant.quota.as_slice()).ok(),
            });
        served.collect()
    }

    /// Whether a tenant that operators added may not be on a host.
    pub(crate) fn is_elsewhere(&self, tenant: &str, host: &str) -> bool {
        let added = self.added_tenant(tenant);
        added.is_some_and(|added| !added.hosts.is_empty() && !added.hosts.iter().any(|known| known == host))
    }

    /// Returns what must be stored for an instruction to be in effect. `communicators` counts those of a
    /// tenant.
    ///
    /// # Errors
    /// Why it is not followed; nothing has changed.
    pub(crate) fn consider(
        &self,
        settings: &Settings,
        now: Duration,
        instruction: &Instruction,
        communicators: impl Fn(&str) -> usize,
    ) -> Result<Vec<Change>, InstructionError> {
        let clock = self.realtime(now);
        match instruction {
            Instruction::AddTenant(asked) => add_tenant(settings, clock, asked),
            Instruction::RemoveTenant { name } => self.remove_tenant(settings, name, communicators),
            Instruction::Withdraw { targets, kind, from, until, reason } => withdrawals::consider_withdrawal(
                &settings.topology,
                &self.withdrawals,
                clock,
                (targets, *kind, (*from, *until), reason),
            ),
            Instruction::Restore { targets, kind } => {
                withdrawals::consider_restoring(&settings.topology, &self.withdrawals, targets, *kind)
            }
        }
    }

    /// Carries out what is stored. Returns the tenant that is gone by it.
    pub(crate) fn apply(&mut self, settings: &mut Settings, change: &Change) -> Option<String> {
        match change {
            Change::Tenant(tenant) if !settings.tenants.contains(&tenant.name) => {
                settings.tenants.push(tenant.name.clone());
                self.added.insert(tenant.name.clone(), tenant.clone());
            }
            Change::NoTenant(name)
                if self.added.remove(name).is_some() && !self.configured.contains(name) =>
            {
                settings.tenants.retain(|known| known != name);
                return Some(name.clone());
            }
            Change::Withdraw(record) => {
                self.withdrawals.insert((record.target.clone(), record.kind()), record.clone());
            }
            Change::Restore(target, kind) => {
                self.withdrawals.remove(&(target.clone(), *kind));
            }
            // Not an operator's, or in effect already.
            _ => {}
        }
        None
    }

    fn remove_tenant(
        &self,
        settings: &Settings,
        name: &str,
        communicators: impl Fn(&str) -> usize,
    ) -> Result<Vec<Change>, InstructionError> {
        let name = name.to_owned();
        if !settings.tenants.contains(&name) {
            return Err(InstructionError::NoTenant(name));
        }
        if self.added_tenant(&name).is_none() {
            return Err(InstructionError::Configured(name));
        }
        match communicators(&name) {
            0 => Ok(vec![Change::NoTenant(name)]),
            busy => Err(InstructionError::TenantBusy(name, busy)),
        }
    }

    /// Returns what is to carry nothing now.
    pub(crate) fn withdrawn(&self) -> &Drains {
        &self.windows.withdrawn
    }

    /// Returns a copy as if these hosts were drained, and those were not.
    pub(crate) fn with_hosts_drained(&self, drained: &BTreeSet<HostId>, others: &BTreeSet<HostId>) -> Self {
        let mut copy = self.clone();
        copy.windows.withdrawn.hosts.extend(drained);
        copy.windows.withdrawn.hosts.retain(|host| !others.contains(host));
        copy
    }

    /// Returns all withdrawals by target and kind.
    pub(crate) fn withdrawals(&self) -> &BTreeMap<(String, WithdrawalKind), Withdrawal> {
        &self.withdrawals
    }

    /// Returns the record of a tenant that is not the configuration's.
    pub(crate) fn added_tenant(&self, name: &str) -> Option<&Tenant> {
        self.added.get(name).filter(|_| !self.configured.iter().any(|known| known == name))
    }

    /// Returns when a window begins or ends next, or the plans of an earlier start are given up.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        self.windows.next.into_iter().chain(self.plans_until).min()
    }

    /// Brings windows into effect that have begun, and ends those that are over. Returns whether a window's
    /// time had come.
    pub(crate) fn update_windows(
        &mut self,
        settings: &Settings,
        now: Duration,
        trigger: &mut Option<Trigger>,
    ) -> bool {
        let due = self.windows.next.is_some_and(|at| at <= now);
        let (drains, next) =
            withdrawals::in_effect(&settings.topology, self.withdrawals.values(), self.realtime(now));
        self.windows.next = next.map(|at| self.time(at));
        if drains != self.windows.withdrawn {
            self.windows.withdrawn = drains;
            trigger.get_or_insert(Trigger::Withdrawn);
        }
        due
    }

    /// Returns the hosts that are withdrawn, or will be, and since or from when, CLOCK_REALTIME.
    pub(crate) fn host_withdrawals(&self, settings: &Settings, clock: Nanos) -> Vec<(HostId, Nanos)> {
        withdrawals::hosts(&settings.topology, self.withdrawals.values(), clock)
    }

    /// Returns what is to be removed from the store of windows that are over. Those that what is `waiting` to
    /// be stored goes on with stay.
    pub(crate) fn expired<'a>(
        &self,
        now: Duration,
        waiting: impl Iterator<Item = &'a Change>,
    ) -> Vec<Change> {
        withdrawals::expired(self.withdrawals.values(), self.realtime(now), waiting)
    }

    /// Returns the plans that an earlier start stored of a communicator.
    pub(crate) fn stored_plan(&self, id: CommunicatorId) -> Option<&Plan> {
        self.plans.get(&id)
    }

    /// Whether an earlier start stored a plan over a host, of a communicator that may come back.
    pub(crate) fn awaits(&self, host: &str) -> bool {
        self.plans.values().any(|plan| plan.hosts.iter().any(|known| known == host))
    }

    /// Returns plans of communicators that did not come back in time; they are to be removed.
    pub(crate) fn lost_plans(&mut self, now: Duration) -> Vec<CommunicatorId> {
        if self.plans_until.is_none_or(|until| now < until) {
            return Vec::new();
        }
        self.plans_until = None;
        std::mem::take(&mut self.plans).into_keys().collect()
    }

    /// CLOCK_REALTIME at a time of the state, as far as nobody has set the clock since.
    pub(crate) fn realtime(&self, now: Duration) -> Nanos {
        self.began.after(now)
    }

    /// The time of the state that a CLOCK_REALTIME was or will be; 0 where that is before it began.
    pub(crate) fn time(&self, realtime: Nanos) -> Duration {
        realtime.since(self.began)
    }

    /// Whether a communicator of an earlier start was this tenant's, of this name, and had a part on a host.
    pub(crate) fn ran(&self, id: CommunicatorId, tenant: &str, name: &str, host: &str) -> bool {
        let fits = |plan: &Plan| {
            plan.tenant == tenant && plan.name == name && plan.hosts.iter().any(|known| known == host)
        };
        self.plans.get(&id).is_some_and(fits)
    }
}

/// Most users and hosts that are named for a tenant.
const MOST_USERS: usize = 64;

fn add_tenant(
    settings: &Settings,
    added: Nanos,
    request: &v1::AddTenantRequest,
) -> Result<Vec<Change>, InstructionError> {
    let v1::AddTenantRequest { name, uids, hosts, quota } = request.clone();
    let known = &settings.tenants;
    if !is_tenant_name(&name) {
        return Err(InstructionError::BadName(name.chars().take(80).collect()));
    }
    if known.contains(&name) {
        return Err(InstructionError::TenantThere(name));
    }
    if known.len() >= MOST_TENANTS {
        return Err(InstructionError::TooManyTenants);
    }
    if uids.contains(&0) || uids.len() > MOST_USERS {
        return Err(InstructionError::Users);
    }
    if uids.is_empty() && quota.is_some_and(|quota| quota != v1::TenantQuota::default()) {
        return Err(InstructionError::QuotaOfNobody);
    }
    if let Some(unknown) = hosts.iter().find(|host| settings.topology.host(host).is_none()) {
        return Err(InstructionError::Unknown(format!(
            "host `{}`",
            unknown.chars().take(80).collect::<String>()
        )));
    }
    let quota = quota.map(|quota| quota.encode_to_vec()).unwrap_or_default();
    Ok(vec![Change::Tenant(Tenant { name, added_ns: added.0, uids, hosts, quota })])
}
