//! Everything that is kept, and the changes to it.

use crate::record::{Agreement, Fabric, Job, Past, Plan, Tenant, Withdrawal, WithdrawalKind};
use harmonaize_abi::CommunicatorId;
use std::collections::BTreeMap;

/// Everything that is kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    /// Number of the last start; upper half of the ids that it gave. None before the first.
    pub boot: Option<u32>,
    /// The topology of the last start.
    pub fabric: Option<Fabric>,
    /// Tenants by name.
    pub tenants: BTreeMap<String, Tenant>,
    /// What is withdrawn, by target and kind.
    pub withdrawals: BTreeMap<(String, WithdrawalKind), Withdrawal>,
    /// Plans by communicator.
    pub plans: BTreeMap<CommunicatorId, Plan>,
    /// Agreements by communicator.
    pub agreements: BTreeMap<CommunicatorId, Agreement>,
    /// Communicators that failed, by number.
    pub pasts: BTreeMap<CommunicatorId, Past>,
    /// Jobs whose workers failed, by tenant and name.
    pub jobs: BTreeMap<(String, String), Job>,
}

/// One change. Carried out twice, it changes no more than once.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A start has this number.
    Boot(u32),
    /// The topology is this.
    Fabric(Fabric),
    /// A tenant is there.
    Tenant(Tenant),
    /// A tenant is not there.
    NoTenant(String),
    /// Something is withdrawn; takes the place of an earlier record of this target and kind.
    Withdraw(Withdrawal),
    /// Nothing is withdrawn under this target and kind.
    Restore(String, WithdrawalKind),
    /// A communicator's plans are these.
    Plan(Box<Plan>),
    /// A communicator is over.
    NoPlan(CommunicatorId),
    /// This is promised for a communicator.
    Agreement(Agreement),
    /// Nothing is promised for it.
    NoAgreement(CommunicatorId),
    /// This is kept of a communicator that failed.
    Past(Box<Past>),
    /// Nothing is kept of it.
    NoPast(CommunicatorId),
    /// This is kept of a job.
    Job(Job),
    /// Nothing is kept of it: its tenant, and its name.
    NoJob(String, String),
}

impl Stored {
    /// Carries a change out.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Boot(boot) => self.boot = Some(*boot),
            Change::Fabric(fabric) => self.fabric = Some(fabric.clone()),
            Change::Tenant(tenant) => drop(self.tenants.insert(tenant.name.clone(), tenant.clone())),
            Change::NoTenant(name) => drop(self.tenants.remove(name)),
            Change::Withdraw(record) => {
                self.withdrawals.insert((record.target.clone(), record.kind()), record.clone());
            }
            Change::Restore(target, kind) => drop(self.withdrawals.remove(&(target.clone(), *kind))),
            Change::Plan(plan) => {
                drop(self.plans.insert(CommunicatorId(plan.communicator), (**plan).clone()))
            }
            Change::NoPlan(communicator) => drop(self.plans.remove(communicator)),
            Change::Agreement(agreement) => {
                self.agreements.insert(CommunicatorId(agreement.communicator), agreement.clone());
            }
            Change::NoAgreement(communicator) => drop(self.agreements.remove(communicator)),
            Change::Past(past) => {
                drop(self.pasts.insert(CommunicatorId(past.communicator), (**past).clone()))
            }
            Change::NoPast(communicator) => drop(self.pasts.remove(communicator)),
            Change::Job(job) => {
                self.jobs.insert((job.tenant.clone(), job.name.clone()), job.clone());
            }
            Change::NoJob(tenant, name) => drop(self.jobs.remove(&(tenant.clone(), name.clone()))),
        }
    }

    /// The changes that make this of nothing.
    pub fn changes(self) -> Vec<Change> {
        let Self { boot, fabric, tenants, withdrawals, plans, agreements, pasts, jobs } = self;
        let mut changes: Vec<Change> = boot.map(Change::Boot).into_iter().collect();
        changes.extend(fabric.map(Change::Fabric));
        changes.extend(tenants.into_values().map(Change::Tenant));
        changes.extend(withdrawals.into_values().map(Change::Withdraw));
        changes.extend(plans.into_values().map(|plan| Change::Plan(Box::new(plan))));
        changes.extend(agreements.into_values().map(Change::Agreement));
        changes.extend(pasts.into_values().map(|past| Change::Past(Box::new(past))));
        changes.extend(jobs.into_values().map(Change::Job));
        changes
    }

    /// The number of the next start: one more than the last's. The first of all is `random`, so that a store that was begun
    /// anew does not give ids that communicators may still have.
    pub fn next_boot(&self, random: u32) -> u32 {
        self.boot.map_or(random, |boot| boot.wrapping_add(1))
    }
}
