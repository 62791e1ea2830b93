//! A communicator's life from its recipe to its end.

use super::aggregation;
use super::coding::{Chosen, Coding};
use super::decisions::Trigger;
use super::direct::Shots;
use super::paces::Held;
use super::replan::{MOST_RECENT, Planned};
use super::status::Ended;
use super::{Fact, SessionId, State};
use harmonaize_abi::session::OnFailure;
use harmonaize_api::v1::{self, FailureKind, to_agent};
use harmonaize_planner::{HostId, Tuning};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Most ends that are remembered.
const MOST_ENDED: usize = 64;

/// Longest detail of an end that is told and kept.
const DETAIL_CHARS: usize = 500;

/// A communicator.
#[derive(Debug)]
pub(super) struct Communicator {
    pub tenant: String,
    pub name: String,
    pub ranks: u32,
    /// Its participants; indices are the same in every epoch.
    pub members: Vec<Member>,
    pub tuning: Tuning,
    /// How small operations go.
    pub shots: Shots,
    /// In use; 0 while the first is prepared.
    pub epoch: u64,
    /// Ring order of the epoch in use.
    pub order: Vec<u32>,
    /// Ports of the epoch in use.
    pub ports: Vec<(HostId, u16)>,
    pub pending: Option<Pending>,
    /// Number that the next epoch gets.
    pub next_epoch: u64,
    /// Until when participants may come back after a restart of control.
    pub recovering: Option<Duration>,
    pub last_change: String,
    /// Ports of each link between two participants, the lower first: what its two hosts' pool says of them is their paths.
    /// Together with `ports` to be found again after a restart.
    pub links: BTreeMap<(u32, u32), Vec<u16>>,
    /// Why it runs by this order and these links.
    pub plan: Option<Planned>,
    /// Whether an operator chose the order: then it is no longer control's to choose.
    pub pinned: bool,
    /// When its plan changed lately, oldest first.
    pub changes: VecDeque<Duration>,
    /// Until when it is left alone because changes were given up.
    pub held_off: Option<Duration>,
    /// What its links are held to in the epoch in use.
    pub held: Held,
    /// Changes given up in a row.
    pub failures: u32,
    /// What its ranks let be lost, and how its tensors travel.
    pub coding: Coding,
    /// How its large operations are summed in the epoch in use.
    pub aggregation: aggregation::Chosen,
    /// Aggregators that it does without for a while.
    pub refused: aggregation::Refusals,
    /// Where it goes on from another: by rank, one more than the rank there, and 0 for newcomers.
    pub before: Vec<u32>,
    /// Which it goes on from, until its own first epoch is in use.
    pub succeeds: Option<u64>,
}

/// A participant.
#[derive(Debug)]
pub(super) struct Member {
    pub host: HostId,
    /// None only while control waits for it to come back.
    pub session: Option<SessionId>,
    /// Ascending.
    pub ranks: Vec<u32>,
    /// By rank: the agent's number of the join.
    pub requests: Vec<(u32, u64)>,
    pub left: BTreeSet<u32>,
    pub closed: bool,
}

/// An epoch under way.
#[derive(Debug)]
pub(super) struct Pending {
    pub epoch: u64,
    pub order: Vec<u32>,
    pub ports: Vec<(HostId, u16)>,
    pub links: BTreeMap<(u32, u32), Vec<u16>>,
    pub plan: Option<Planned>,
    /// What its connections are held to.
    pub held: Held,
    pub coding: Chosen,
    pub shots: Shots,
    pub aggregation: aggregation::Chosen,
    /// The decision that it comes from.
    pub decision: Option<u64>,
    pub prepared: BTreeSet<usize>,
    pub switched: BTreeSet<usize>,
    /// Until when all must have prepared it; none once they have.
    pub deadline: Option<Duration>,
}

/// Why a communicator ends.
#[derive(Clone, Debug)]
pub(super) struct EndCause {
    pub kind: FailureKind,
    pub ranks: Vec<u32>,
    pub detail: String,
}

impl Pending {
    /// Whether some participant may be using it already.
    pub(super) fn in_use(&self) -> bool {
        self.deadline.is_none() || !self.switched.is_empty()
    }
}

impl Communicator {
    /// Takes note of a change of plan.
    pub(super) fn changes_now(&mut self, now: Duration) {
        if self.changes.len() >= MOST_RECENT {
            self.changes.pop_front();
        }
        self.changes.push_back(now);
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        let prepare = self.pending.as_ref().and_then(|pending| pending.deadline);
        prepare.into_iter().chain(self.recovering).min()
    }

    pub(super) fn member_of(&self, session: SessionId) -> Option<&Member> {
        self.members.iter().find(|member| member.session == Some(session))
    }

    pub(super) fn index_of(&self, session: SessionId) -> Option<usize> {
        self.members.iter().position(|member| member.session == Some(session))
    }

    /// Whether a rank is in it and has not left.
    pub(super) fn holds(&self, rank: u32) -> bool {
        self.members
            .iter()
            .any(|member| member.ranks.contains(&rank) && !member.closed && !member.left.contains(&rank))
    }

    pub(super) fn phase(&self) -> v1::Phase {
        if self.recovering.is_some() {
            v1::Phase::Recovering
        } else if self.epoch == 0 {
            v1::Phase::Forming
        } else if self.members.iter().any(|member| member.closed || !member.left.is_empty()) {
            v1::Phase::Leaving
        } else if self.pending.is_some() {
            v1::Phase::Changing
        } else {
            v1::Phase::Running
        }
    }
}

impl State {
    /// The communicator and the index of the agent in it; `None` for one that has ended, an error for another's.
    pub(super) fn part(
        &mut self,
        from: SessionId,
        id: u64,
    ) -> Result<Option<(&mut Communicator, usize)>, &'static str> {
        let Some(communicator) = self.communicators.get_mut(&id) else { return Ok(None) };
        let index = communicator.index_of(from).ok_or("a message about a communicator of others")?;
        Ok(Some((communicator, index)))
    }

    pub(super) fn leave(
        &mut self,
        now: Duration,
        from: SessionId,
        leave: &v1::Leave,
    ) -> Result<(), &'static str> {
        if leave.communicator == 0 {
            if let Some(join) = self.forget_join(from, leave.request) {
                self.withdraw_join((from, leave.request), join);
            }
            return Ok(());
        }
        self.regroups.left(leave.communicator, leave.rank, from);
        let Some((communicator, index)) = self.part(from, leave.communicator)? else { return Ok(()) };
        let Some(member) = communicator.members.get_mut(index) else { return Ok(()) };
        if !member.ranks.contains(&leave.rank) {
            return Err("a rank of others left");
        }
        member.left.insert(leave.rank);
        member.closed |= member.left.len() == member.ranks.len();
        let key = (communicator.tenant.clone(), communicator.name.clone());
        self.regroups.look_at(&key);
        self.close_if_over(now, leave.communicator);
        Ok(())
    }

    pub(super) fn closed(&mut self, now: Duration, from: SessionId, id: u64) -> Result<(), &'static str> {
        let Some((communicator, index)) = self.part(from, id)? else { return Ok(()) };
        if let Some(member) = communicator.members.get_mut(index) {
            member.closed = true;
        }
        let key = (communicator.tenant.clone(), communicator.name.clone());
        self.regroups.look_at(&key);
        self.close_if_over(now, id);
        Ok(())
    }

    fn close_if_over(&mut self, now: Duration, id: u64) {
        let over =
            self.communicators.get(&id).is_some_and(|known| known.members.iter().all(|member| member.closed));
        if over && let Some(Communicator { tenant, name, .. }) = self.remove(now, id) {
            self.fact(Fact::Closed { communicator: id, tenant, name });
        } else {
            self.switch_if_complete(now, id);
        }
    }

    pub(super) fn failed(
        &mut self,
        now: Duration,
        from: SessionId,
        failed: v1::Failed,
    ) -> Result<(), &'static str> {
        let Some((communicator, _)) = self.part(from, failed.communicator)? else { return Ok(()) };
        let ranks: BTreeSet<u32> =
            failed.ranks.iter().copied().filter(|rank| *rank < communicator.ranks).collect();
        let kind = match failed.kind() {
            FailureKind::Unspecified => FailureKind::Internal,
            kind => kind,
        };
        let cause = EndCause { kind, ranks: ranks.into_iter().collect(), detail: failed.detail };
        self.end(now, failed.communicator, cause, Some(from));
        Ok(())
    }

    /// Ends a communicator: its agents are told, but for the one that said so.
    pub(super) fn end(&mut self, now: Duration, id: u64, cause: EndCause, except: Option<SessionId>) {
        // Agents and operators say it at any length; all members are told.
        let detail = cause.detail.chars().take(DETAIL_CHARS).collect();
        let cause = EndCause { detail, ..cause };
        if cause.kind == FailureKind::RanksLost {
            let policy = self.agreements.left(id).and_then(|left| left.on_failure());
            let within = policy.and_then(|policy| match policy {
                OnFailure::Regroup { within } => Some(within),
                OnFailure::End => None,
            });
            self.note_lost(now, id, &cause.ranks, within);
        }
        self.watch_end(now, id, &cause);
        let agreement = self.agreements.left(id);
        let Some(communicator) = self.remove(now, id) else { return };
        self.regroups.ended(now, (id, &communicator), &cause, agreement, &self.hosts);
        self.keep_or_refuse(id);
        if let Some(before) = communicator.succeeds.filter(|_| cause.kind != FailureKind::Operator) {
            self.regroups.prolong(before, now.saturating_add(self.settings.prepare_timeout));
        }
        for member in communicator.members.iter().filter(|member| !member.closed) {
            if let Some(session) = member.session.filter(|session| Some(*session) != except)
                && self.sessions.contains_key(&session)
            {
                self.send(session, dissolved(id, &cause));
            }
        }
        if cause.kind != FailureKind::Operator {
            self.errors += 1;
            *self.tenant_errors.entry(communicator.tenant.clone()).or_default() += 1;
        }
        if self.ended.len() == MOST_ENDED {
            self.ended.pop_front();
        }
        self.fact(Fact::Ended {
            communicator: id,
            tenant: communicator.tenant.clone(),
            name: communicator.name.clone(),
            kind: cause.kind,
            ranks: cause.ranks.clone(),
            detail: cause.detail.clone(),
        });
        self.ended.push_back(Ended {
            id,
            tenant: communicator.tenant,
            name: communicator.name,
            cause,
            at: now,
        });
    }

    fn remove(&mut self, now: Duration, id: u64) -> Option<Communicator> {
        self.note_end(now, id);
        self.end_agreement(id);
        self.hints.end(id);
        let mut communicator = self.communicators.remove(&id)?;
        self.end_aggregation(now, &communicator.aggregation);
        self.ports.release(&mut communicator.ports);
        if let Some(pending) = &mut communicator.pending {
            self.ports.release(&mut pending.ports);
            self.end_aggregation(now, &pending.aggregation);
            self.decisions.ended(pending.decision, id);
        }
        self.rhythms.remove(&id);
        self.forget_turns(now, id);
        self.active_changed();
        self.want_plan(Trigger::Communicators);
        Some(communicator)
    }

    pub(super) fn expire_communicators(&mut self, now: Duration) {
        let late =
            self.communicators.iter().filter(|(_, known)| known.deadline().is_some_and(|at| at <= now));
        for id in late.map(|(id, _)| *id).collect::<Vec<_>>() {
            let Some(communicator) = self.communicators.get(&id) else { continue };
            if communicator.recovering.is_some_and(|at| at <= now) {
                let gone = communicator.members.iter().filter(|member| member.session.is_none());
                let ranks = gone.flat_map(|member| member.ranks.iter().copied()).collect();
                let detail = "agents did not come back after control restarted".to_owned();
                self.end(now, id, EndCause { kind: FailureKind::RanksLost, ranks, detail }, None);
                continue;
            }
            let Some(pending) = &communicator.pending else { continue };
            let late = communicator
                .members
                .iter()
                .enumerate()
                .filter(|(index, _)| !pending.prepared.contains(index));
            let late: Vec<String> = late.map(|(_, member)| self.host_name(member.host)).collect();
            let epoch = pending.epoch;
            self.give_up(now, id, epoch, &format!("not prepared in time by {}", late.join(", ")));
        }
    }

    /// An operator ends a communicator, or what is kept of one for its members. Whether there was something.
    pub fn dissolve(&mut self, now: Duration, id: u64, reason: &str) -> bool {
        let known = self.communicators.contains_key(&id);
        let detail = reason.to_owned();
        self.end(now, id, EndCause { kind: FailureKind::Operator, ranks: Vec::new(), detail }, None);
        let kept = self.end_kept(now, id);
        self.act(now);
        known || kept
    }
}

/// What an agent is told of an end.
pub(super) fn dissolved(communicator: u64, cause: &EndCause) -> to_agent::Message {
    to_agent::Message::Dissolve(v1::Dissolved {
        communicator,
        kind: cause.kind.into(),
        ranks: cause.ranks.clone(),
        reason: cause.detail.clone(),
    })
}
