//! Epochs: prepared by all, then in use by all, or given up.

use super::Controller;
use crate::state::breach::Breach;
use crate::state::ctx::ctx;
use crate::state::job::communicator::EndCause;
use crate::state::job::decisions::Trigger;
use crate::state::job::lifecycle::{Change, Completed};
use crate::state::job::link_reuse;
use crate::state::job::reconcile;
use crate::state::job::reconcile::proposer::proposer;
use crate::state::output::{Fact, SessionId};
use crate::state::reason::Reason;
use crate::state::tenants::agreements::Room;
use crate::state::view::view;
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_api::v1::{self, FailureKind, to_agent};
use harmonaize_disclose::Fact as TenantFact;
use std::time::Duration;

/// Why an order is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReorderError {
    /// No such communicator.
    #[error("no such communicator; it may have ended")]
    Unknown,
    /// It is forming, leaving or recovering.
    #[error("the communicator is not running: {0}")]
    NotRunning(&'static str),
    /// Another change is under way.
    #[error("epoch {0} is under way; try again when it is in use")]
    UnderWay(Epoch),
    /// The hosts are not exactly those of the communicator.
    #[error("{0}; the communicator's hosts are {1}")]
    Hosts(String, String),
}

impl Controller {
    /// Starts a change to another ring order; the number of the new epoch.
    ///
    /// # Errors
    /// Where there is no such communicator, it is not running, or the hosts are not exactly its own.
    pub fn reorder(
        &mut self,
        now: Duration,
        id: CommunicatorId,
        hosts: &[String],
    ) -> Result<Epoch, ReorderError> {
        let communicator = self.communicators.get(&id).ok_or(ReorderError::Unknown)?;
        match communicator.phase() {
            v1::Phase::Running => {}
            v1::Phase::Forming => return Err(ReorderError::NotRunning("it is forming")),
            v1::Phase::Leaving => return Err(ReorderError::NotRunning("ranks have left")),
            v1::Phase::Recovering => return Err(ReorderError::NotRunning("not all agents have a session")),
            _ => {
                return Err(ReorderError::UnderWay(communicator.pending_epoch()));
            }
        }
        let known: Vec<String> =
            communicator.members.iter().map(|member| self.settings.host_name(member.host)).collect();
        let wrong = |what: String| ReorderError::Hosts(what, known.join(", "));
        let mut order: Vec<u32> = Vec::with_capacity(known.len());
        for host in hosts {
            let Some(index) = known.iter().position(|name| name == host) else {
                return Err(wrong(format!("`{host}` has no part in it")));
            };
            if order.contains(&(index as u32)) {
                return Err(wrong(format!("`{host}` stands twice")));
            }
            order.push(index as u32);
        }
        if order.len() != known.len() {
            return Err(wrong(format!("{} hosts are given, not {}", order.len(), known.len())));
        }
        reconcile::reorder(&mut proposer!(self, now), id, order).ok_or(ReorderError::Unknown)
    }

    /// Gives an order that an operator chose back to control: it may change it, at once if another is better.
    ///
    /// # Errors
    /// Where there is no such communicator.
    pub fn unpin(&mut self, now: Duration, id: CommunicatorId) -> Result<Epoch, ReorderError> {
        let communicator = self.communicators.get_mut(&id).ok_or(ReorderError::Unknown)?;
        if std::mem::take(&mut communicator.pinned) {
            let (tenant, name) = (communicator.tenant.clone(), communicator.name.clone());
            self.outbox.fact(Fact::OrderFreed { communicator: id, tenant, name });
            self.outbox.want_plan(Trigger::Unpinned);
            self.act(now);
        }
        let known = self.communicators.get(&id).ok_or(ReorderError::Unknown)?;
        Ok(known.latest().map_or(Epoch(0), |latest| latest.epoch))
    }

    pub(crate) fn expire_communicators(&mut self, now: Duration) {
        for id in self.communicators.due(now) {
            let Some(communicator) = self.communicators.get(&id) else { continue };
            if communicator.deadline().is_none_or(|at| at > now) {
                continue;
            }
            let ranks = communicator.lapsed(now);
            if !ranks.is_empty() {
                let detail = "agents did not come back within the lease".to_owned();
                self.end(now, id, EndCause { kind: FailureKind::RanksLost, ranks, detail }, None);
                continue;
            }
            let Some(change) = communicator.change() else { continue };
            let late =
                communicator.members.iter().enumerate().filter(|(index, _)| !change.prepared.contains(index));
            let late: Vec<String> = late.map(|(_, member)| self.settings.host_name(member.host)).collect();
            let epoch = change.to.epoch;
            self.give_up(now, id, epoch, &format!("not prepared in time by {}", late.join(", ")));
        }
    }

    pub(crate) fn prepared(
        &mut self,
        now: Duration,
        from: SessionId,
        (id, epoch): (CommunicatorId, Epoch),
        links: Option<v1::LinkUsage>,
    ) -> Result<(), Breach> {
        let Some((_, index)) = ctx!(self, now).part(from, id)? else { return Ok(()) };
        let Some(communicator) = self.communicators.get_mut(&id) else { return Ok(()) };
        if let (Some(member), Some(links)) = (communicator.members.get_mut(index), links) {
            member.links = links;
        }
        let members = communicator.members.len();
        let change = communicator.lifecycle.change_mut().filter(|change| change.to.epoch == epoch);
        let Some(change) = change else { return Ok(()) };
        change.prepared.insert(index);
        if change.prepared.len() < members || change.deadline.take().is_none() {
            return Ok(());
        }
        let decision = change.decision;
        if communicator.is_forming()
            && let Some(Completed { reason, .. }) = communicator.complete_change(now)
        {
            let before = communicator.succeeds.take();
            let (tenant, name) = (communicator.tenant.clone(), communicator.name.clone());
            match before {
                Some(before) => {
                    self.regroups.past.next_formed(before, id);
                    self.take_over_agreement(now, before, id);
                    self.regroups.past.succeeded(before, &(tenant.clone(), name.clone()));
                }
                None => self.regroups.past.superseded(&tenant, &name),
            }
            self.jobs.formed(&tenant, &name);
            self.outbox.fact(Fact::EpochCurrent { communicator: id, tenant, name, epoch, reason });
            self.link_state.active_changed();
            self.outbox.want_plan(Trigger::Communicators);
        }
        if let Some(changed) = self.decisions.changed(decision, id) {
            changed.prepared = Some(now);
        }
        if let Some(known) = self.communicators.get(&id) {
            let ready = v1::Ready { communicator: id.0, epoch: epoch.into() };
            self.outbox.send_to_members(known, &to_agent::Message::Ready(ready));
        }
        Ok(())
    }

    /// A participant uses an epoch, if that is under way.
    pub(crate) fn switched(&mut self, now: Duration, id: CommunicatorId, index: usize, epoch: Epoch) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        let in_use = !communicator.is_forming();
        let change = communicator.lifecycle.change_mut().filter(|change| change.to.epoch == epoch);
        let Some(change) = change.filter(|_| in_use) else { return };
        change.switched.insert(index);
        // Nobody switches before all have prepared: who has not said so was not heard.
        change.deadline = None;
        let decision = change.decision;
        if let Some(changed) = self.decisions.changed(decision, id) {
            changed.first_switched.get_or_insert(now);
        }
        self.switch_if_complete(now, id);
    }

    /// Makes an epoch current once every participant that is still there uses it.
    pub(crate) fn switch_if_complete(&mut self, now: Duration, id: CommunicatorId) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        let switched = communicator.change().is_some_and(|change| {
            let mut members = communicator.members.iter().enumerate();
            !change.switched.is_empty()
                && members.all(|(index, member)| member.closed || change.switched.contains(&index))
        });
        if !switched {
            return;
        }
        let completed = communicator.complete_change(now);
        let Some(Completed { before: Some(mut before), reason, decision }) = completed else { return };
        let Some(current) = communicator.lifecycle.current() else { return };
        let moved = before.order != current.order || before.links != current.links;
        let epoch = current.epoch;
        link_reuse::keep(&mut before.ports, &current.ports);
        communicator.failures = 0;
        // What changes the codec alone makes no other way dearer, nor does a hand-over, which chooses no way.
        if decision.is_some() && moved && !matches!(reason, Reason::OverTcp | Reason::OverRdma) {
            communicator.changes_now(now);
        }
        communicator.last_change.clear();
        let (tenant, name) = (communicator.tenant.clone(), communicator.name.clone());
        self.link_state.ports.release(&mut before.ports);
        self.aggregators.end(now, &before.aggregation);
        let of_tenants = self.decisions.is_of_tenants(decision);
        self.decisions.switched(now, decision, id);
        self.outbox.fact(Fact::EpochCurrent { communicator: id, tenant, name, epoch, reason });
        // Who starts one communicator beside another would else be told whether the two met.
        if moved && !of_tenants {
            self.outbox.note(&ctx!(self, now), id, TenantFact::PlanChanged);
        }
        self.link_state.active_changed();
        self.outbox.want_plan(Trigger::Settled);
    }

    pub(crate) fn prepare_failed(
        &mut self,
        now: Duration,
        from: SessionId,
        failed: &v1::PrepareFailed,
    ) -> Result<(), Breach> {
        let id = CommunicatorId(failed.communicator);
        let Some((communicator, index)) = ctx!(self, now).part(from, id)? else { return Ok(()) };
        let epoch = communicator.pending_epoch();
        if epoch == Epoch(0) || u64::from(epoch) != failed.epoch {
            return Ok(());
        }
        let host = communicator.members.get(index).map(|member| member.host);
        let host = host.map_or_else(String::new, |host| self.settings.host_name(host));
        self.give_up(now, id, epoch, &format!("{host}: {}", failed.reason));
        Ok(())
    }

    /// An epoch cannot be had. The communicator ends with its first one, or where some may be using it
    /// already, and otherwise goes on with the one that it has.
    pub(crate) fn give_up(&mut self, now: Duration, id: CommunicatorId, epoch: Epoch, why: &str) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        let in_use = communicator.change().is_some_and(Change::in_use);
        let why: String = why.chars().take(500).collect();
        if communicator.is_forming() || in_use {
            let detail = format!("epoch {epoch} could not be prepared: {why}");
            let cause = EndCause { kind: FailureKind::Prepare, ranks: Vec::new(), detail };
            return self.end(now, id, cause, None);
        }
        communicator.last_change = format!("epoch {epoch} was given up: {why}");
        if let Some(change) = communicator.lifecycle.abandon() {
            let Change { mut to, decision, .. } = *change;
            if let Some(current) = communicator.lifecycle.current() {
                link_reuse::keep(&mut to.ports, &current.ports);
            }
            self.link_state.ports.release(&mut to.ports);
            self.decisions.given_up(decision, id, &why);
            let codec = communicator.codec();
            communicator.coding.given_up(codec, to.codec.codec);
            for at in to.aggregation.aggregators() {
                communicator.refused.refuse(now, at, &communicator.last_change);
            }
            self.aggregators.end(now, &to.aggregation);
            communicator.back_off(now);
        }
        let Some(communicator) = self.communicators.get(&id) else { return };
        let (tenant, name) = (communicator.tenant.clone(), communicator.name.clone());
        self.outbox.fact(Fact::EpochAbandoned { communicator: id, tenant, name, epoch, why: why.clone() });
        let abandon = v1::Abandon { communicator: id.0, epoch: epoch.into(), reason: why };
        self.outbox.send_to_members(communicator, &to_agent::Message::Abandon(abandon));
    }

    /// Passes what was promised for a communicator to the one that goes on from it. That one is in use.
    pub(crate) fn take_over_agreement(&mut self, now: Duration, before: CommunicatorId, id: CommunicatorId) {
        // Beside itself it might not fit.
        let left = self.agreements.inherited(before).or_else(|| self.regroups.past.take_agreement(before));
        self.agreements.end(&mut self.outbox, before);
        let Some(left) = left else { return };
        let conditions = view!(self, now).conditions();
        let room = Room { conditions, set_aside: self.regroups.past.set_aside().collect() };
        self.agreements.take_over(&ctx!(self, now), &mut self.outbox, &room, left, id);
    }
}
