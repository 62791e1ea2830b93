//! Epochs: prepared by all, then in use by all, or given up.

use super::communicator::EndCause;
use super::decisions::Trigger;
use super::form::Proposal;
use super::{Fact, SessionId, State};
use harmonaize_api::v1::{self, FailureKind, to_agent};
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
    UnderWay(u64),
    /// The hosts are not exactly those of the communicator.
    #[error("{0}; the communicator's hosts are {1}")]
    Hosts(String, String),
}

impl State {
    /// Starts a change to another ring order; the number of the new epoch.
    ///
    /// # Errors
    /// Where there is no such communicator, it is not running, or the hosts are not exactly its own.
    pub fn reorder(&mut self, now: Duration, id: u64, hosts: &[String]) -> Result<u64, ReorderError> {
        let communicator = self.communicators.get(&id).ok_or(ReorderError::Unknown)?;
        match communicator.phase() {
            v1::Phase::Running => {}
            v1::Phase::Forming => return Err(ReorderError::NotRunning("it is forming")),
            v1::Phase::Leaving => return Err(ReorderError::NotRunning("ranks have left")),
            v1::Phase::Recovering => return Err(ReorderError::NotRunning("not all agents are back")),
            _ => {
                let epoch = communicator.pending.as_ref().map_or(0, |pending| pending.epoch);
                return Err(ReorderError::UnderWay(epoch));
            }
        }
        let known: Vec<String> =
            communicator.members.iter().map(|member| self.host_name(member.host)).collect();
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
        if let Some(communicator) = self.communicators.get_mut(&id) {
            communicator.pinned = true;
        }
        let proposal = Proposal { order, ..Proposal::default() };
        Ok(self.propose(now, id, proposal))
    }

    /// Gives an order that an operator chose back to control: it may change it, at once if another is better.
    ///
    /// # Errors
    /// Where there is no such communicator.
    pub fn unpin(&mut self, now: Duration, id: u64) -> Result<u64, ReorderError> {
        let communicator = self.communicators.get_mut(&id).ok_or(ReorderError::Unknown)?;
        if std::mem::take(&mut communicator.pinned) {
            let (tenant, name) = (communicator.tenant.clone(), communicator.name.clone());
            self.fact(Fact::OrderFreed { communicator: id, tenant, name });
            self.want_plan(Trigger::Unpinned);
            self.act(now);
        }
        let known = self.communicators.get(&id).ok_or(ReorderError::Unknown)?;
        Ok(known.pending.as_ref().map_or(known.epoch, |pending| pending.epoch))
    }

    pub(super) fn prepared(
        &mut self,
        now: Duration,
        from: SessionId,
        id: u64,
        epoch: u64,
    ) -> Result<(), &'static str> {
        let Some((communicator, index)) = self.part(from, id)? else { return Ok(()) };
        let members = communicator.members.len();
        let Some(pending) = communicator.pending.as_mut().filter(|pending| pending.epoch == epoch) else {
            return Ok(());
        };
        pending.prepared.insert(index);
        if pending.prepared.len() < members || pending.deadline.take().is_none() {
            return Ok(());
        }
        let decision = pending.decision;
        if communicator.epoch == 0
            && let Some(pending) = communicator.pending.take()
        {
            communicator.epoch = epoch;
            communicator.order = pending.order;
            communicator.ports = pending.ports;
            communicator.links = pending.links;
            communicator.held = pending.held;
            communicator.plan = pending.plan;
            communicator.coding.switched(now, pending.coding);
            communicator.shots = pending.shots;
            communicator.aggregation = pending.aggregation;
            let before = communicator.succeeds.take();
            let (tenant, name) = (communicator.tenant.clone(), communicator.name.clone());
            match before {
                Some(before) => {
                    self.take_over_agreement(now, before, id);
                    self.regroups.succeeded(before, &(tenant.clone(), name.clone()));
                }
                None => self.regroups.superseded(&tenant, &name),
            }
            self.fact(Fact::EpochCurrent { communicator: id, tenant, name, epoch });
            self.active_changed();
            self.want_plan(Trigger::Communicators);
        }
        if let Some(changed) = self.decisions.changed(decision, id) {
            changed.prepared = Some(now);
        }
        self.tell_all(id, &to_agent::Message::Ready(v1::Ready { communicator: id, epoch }));
        Ok(())
    }

    pub(super) fn switched(
        &mut self,
        now: Duration,
        from: SessionId,
        id: u64,
        epoch: u64,
    ) -> Result<(), &'static str> {
        let Some((communicator, index)) = self.part(from, id)? else { return Ok(()) };
        if let Some(pending) = communicator.pending.as_mut().filter(|pending| pending.epoch == epoch)
            && communicator.epoch != 0
        {
            pending.switched.insert(index);
            let decision = pending.decision;
            if let Some(changed) = self.decisions.changed(decision, id) {
                changed.first_switched.get_or_insert(now);
            }
            self.switch_if_complete(now, id);
        }
        Ok(())
    }

    /// Makes an epoch current once every participant that is still there uses it.
    pub(super) fn switch_if_complete(&mut self, now: Duration, id: u64) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        let Some(pending) = communicator.pending.take_if(|pending| {
            let mut members = communicator.members.iter().enumerate();
            !pending.switched.is_empty()
                && members.all(|(index, member)| member.closed || pending.switched.contains(&index))
        }) else {
            return;
        };
        let moved = communicator.order != pending.order || communicator.links != pending.links;
        communicator.epoch = pending.epoch;
        communicator.order = pending.order;
        communicator.links = pending.links;
        communicator.held = pending.held;
        communicator.plan = pending.plan;
        communicator.coding.switched(now, pending.coding);
        communicator.shots = pending.shots;
        let aggregation = std::mem::replace(&mut communicator.aggregation, pending.aggregation);
        communicator.failures = 0;
        // What changes the codec alone makes no other way dearer.
        if pending.decision.is_some() && moved {
            communicator.changes_now(now);
        }
        communicator.last_change.clear();
        let (tenant, name, epoch) = (communicator.tenant.clone(), communicator.name.clone(), pending.epoch);
        let mut old = std::mem::replace(&mut communicator.ports, pending.ports);
        super::carry::keep(&mut old, &communicator.ports);
        self.ports.release(&mut old);
        self.end_aggregation(now, &aggregation);
        let of_tenants = self.decisions.is_of_tenants(pending.decision);
        self.decisions.switched(now, pending.decision, id);
        self.fact(Fact::EpochCurrent { communicator: id, tenant, name, epoch });
        // Who starts one communicator beside another would else be told whether the two met.
        if moved && !of_tenants {
            self.note_plan_changed(now, id);
        }
        self.active_changed();
        self.want_plan(Trigger::Settled);
    }

    pub(super) fn prepare_failed(
        &mut self,
        now: Duration,
        from: SessionId,
        failed: &v1::PrepareFailed,
    ) -> Result<(), &'static str> {
        let id = failed.communicator;
        let Some((communicator, index)) = self.part(from, id)? else { return Ok(()) };
        if communicator.pending.as_ref().is_none_or(|pending| pending.epoch != failed.epoch) {
            return Ok(());
        }
        let host = communicator.members.get(index).map(|member| member.host);
        let host = host.map_or_else(String::new, |host| self.host_name(host));
        self.give_up(now, id, failed.epoch, &format!("{host}: {}", failed.reason));
        Ok(())
    }

    /// An epoch cannot be had: the communicator ends with its first one, or where some may be using it already, and
    /// otherwise goes on with the one that it has.
    pub(super) fn give_up(&mut self, now: Duration, id: u64, epoch: u64, why: &str) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        let in_use = communicator.pending.as_ref().is_some_and(|pending| pending.in_use());
        let why: String = why.chars().take(500).collect();
        if communicator.epoch == 0 || in_use {
            let detail = format!("epoch {epoch} could not be prepared: {why}");
            let cause = EndCause { kind: FailureKind::Prepare, ranks: Vec::new(), detail };
            return self.end(now, id, cause, None);
        }
        communicator.last_change = format!("epoch {epoch} was given up: {why}");
        if let Some(mut pending) = communicator.pending.take() {
            super::carry::keep(&mut pending.ports, &communicator.ports);
            self.ports.release(&mut pending.ports);
            self.decisions.given_up(pending.decision, id, &why);
            communicator.coding.given_up(&pending.coding);
            for at in pending.aggregation.aggregators() {
                communicator.refused.refuse(now, at, &communicator.last_change);
            }
            self.end_aggregation(now, &pending.aggregation);
            self.hold_off(now, id);
        }
        let Some(communicator) = self.communicators.get(&id) else { return };
        let (tenant, name) = (communicator.tenant.clone(), communicator.name.clone());
        self.fact(Fact::EpochAbandoned { communicator: id, tenant, name, epoch, why: why.clone() });
        self.tell_all(id, &to_agent::Message::Abandon(v1::Abandon { communicator: id, epoch, reason: why }));
    }

    pub(super) fn tell_all(&mut self, id: u64, message: &to_agent::Message) {
        let Some(communicator) = self.communicators.get(&id) else { return };
        let there = communicator.members.iter().filter(|member| !member.closed);
        let sessions: Vec<SessionId> = there.filter_map(|member| member.session).collect();
        for session in sessions {
            self.send(session, message.clone());
        }
    }
}
