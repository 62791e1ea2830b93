//! A communicator's life from its recipe to its end.

use super::aggregator_refusals::Refusals;
use super::codec::CodecState;
use super::decisions::Trigger;
use super::lifecycle::{Change, EpochConfig, Lifecycle};
use super::{Fact, SessionId, State};
use harmonaize_abi::session::OnFailure;
use harmonaize_api::v1::{self, FailureKind, to_agent};
use harmonaize_codec::Codec;
use harmonaize_planner::{HostId, Tuning};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// How many changes of one communicator control makes in a while: what passes nothing, or was withdrawn, is left however often that
/// happens.
pub(super) const MOST_RECENT: usize = 8;

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
    /// Its stage, with the epochs that it runs by.
    pub lifecycle: Lifecycle,
    /// Number that the next epoch gets.
    pub next_epoch: u64,
    pub last_change: String,
    /// Whether an operator chose the order: then it is no longer control's to choose.
    pub pinned: bool,
    /// When its plan changed lately, oldest first.
    pub changes: VecDeque<Duration>,
    /// Until when it is left alone because changes were given up.
    pub backoff_until: Option<Duration>,
    /// Changes given up in a row.
    pub failures: u32,
    /// What its ranks let be lost, and what its operations told of codecs.
    pub coding: CodecState,
    /// Aggregators that it does without for a while.
    pub refused: Refusals,
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
    pub departed: BTreeSet<u32>,
    pub closed: bool,
}

/// A communicator that ended with an error.
#[derive(Debug)]
pub(super) struct Ended {
    pub id: u64,
    pub tenant: String,
    pub name: String,
    pub cause: EndCause,
    pub at: Duration,
}

/// Why a communicator ends.
#[derive(Clone, Debug)]
pub(super) struct EndCause {
    pub kind: FailureKind,
    pub ranks: Vec<u32>,
    pub detail: String,
}

impl Communicator {
    /// Returns what it runs by; none while the first epoch is prepared.
    pub(super) fn current(&self) -> Option<&EpochConfig> {
        self.lifecycle.current()
    }

    /// Returns the change to another epoch that is under way.
    pub(super) fn change(&self) -> Option<&Change> {
        self.lifecycle.change()
    }

    /// Returns what it is about to run by, else what it runs by.
    pub(super) fn latest(&self) -> Option<&EpochConfig> {
        self.change().map(|change| &change.to).or_else(|| self.current())
    }

    /// Returns the hosts of two participants.
    pub(super) fn hosts_of(&self, (one, other): (u32, u32)) -> Option<(HostId, HostId)> {
        let host = |index: u32| self.members.get(index as usize).map(|member| member.host);
        host(one).zip(host(other))
    }

    /// Whether its first epoch is not in use yet.
    pub(super) fn is_forming(&self) -> bool {
        self.current().is_none()
    }

    /// Whether it can be given another epoch now: all its ranks are there, and no change is under way or was given up lately.
    pub(super) fn can_change(&self) -> bool {
        self.phase() == v1::Phase::Running && self.backoff_until.is_none()
    }

    /// Returns the number of the epoch in use as messages have it: 0 while the first is prepared.
    pub(super) fn epoch(&self) -> u64 {
        self.current().map_or(0, |current| current.epoch)
    }

    /// Returns the number of the epoch under way as messages have it: 0 where none is.
    pub(super) fn pending_epoch(&self) -> u64 {
        self.change().map_or(0, |change| change.to.epoch)
    }

    /// Returns the codec of the epoch in use.
    pub(super) fn codec(&self) -> Codec {
        self.current().map_or(Codec::EXACT, |current| current.codec.codec)
    }

    /// Takes note of a change of plan.
    pub(super) fn changes_now(&mut self, now: Duration) {
        if self.changes.len() >= MOST_RECENT {
            self.changes.pop_front();
        }
        self.changes.push_back(now);
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        self.lifecycle.deadline()
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
            .any(|member| member.ranks.contains(&rank) && !member.closed && !member.departed.contains(&rank))
    }

    pub(super) fn phase(&self) -> v1::Phase {
        let leaving = || self.members.iter().any(|member| member.closed || !member.departed.is_empty());
        match &self.lifecycle {
            Lifecycle::Recovering { .. } => v1::Phase::Recovering,
            Lifecycle::New | Lifecycle::Forming(_) => v1::Phase::Forming,
            Lifecycle::Running(_) | Lifecycle::Changing { .. } if leaving() => v1::Phase::Leaving,
            Lifecycle::Changing { .. } => v1::Phase::Changing,
            Lifecycle::Running(_) => v1::Phase::Running,
        }
    }
}

impl State {
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
            let policy = self.agreements.inherited(id).and_then(|left| left.on_failure());
            let within = policy.and_then(|policy| match policy {
                OnFailure::Regroup { within } => Some(within),
                OnFailure::End => None,
            });
            self.note_lost(now, id, &cause.ranks, within);
        }
        self.watch_end(now, id, &cause);
        let agreement = self.agreements.inherited(id);
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

    pub(super) fn remove(&mut self, now: Duration, id: u64) -> Option<Communicator> {
        self.note_end(now, id);
        self.end_agreement(id);
        self.hints.end(id);
        let mut communicator = self.communicators.remove(&id)?;
        for config in communicator.lifecycle.configs_mut() {
            self.end_aggregation(now, &config.aggregation);
            self.link_state.ports.release(&mut config.ports);
        }
        if let Some(change) = communicator.change() {
            self.decisions.ended(change.decision, id);
        }
        self.rhythms.remove(&id);
        self.forget_turns(now, id);
        self.link_state.active_changed();
        self.want_plan(Trigger::Communicators);
        Some(communicator)
    }

    /// An operator ends a communicator, or what is kept of one for its members. Whether there was something.
    pub fn dissolve(&mut self, now: Duration, id: u64, reason: &str) -> bool {
        let known = self.communicators.contains_key(&id);
        let detail = reason.to_owned();
        self.end(now, id, EndCause { kind: FailureKind::Operator, ranks: Vec::new(), detail }, None);
        let kept = self.end_retained(now, id);
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
