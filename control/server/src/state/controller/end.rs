//! Communicators that end, and what their end takes along.

use super::Controller;
use crate::state::breach::Breach;
use crate::state::ctx::ctx;
use crate::state::job::communicator::{Communicator, EndCause, dissolved};
use crate::state::job::decisions::Trigger;
use crate::state::output::{Fact, SessionId};
use crate::state::tenants::events::clock;
use harmonaize_abi::session::OnFailure;
use harmonaize_abi::{CommunicatorId, Rank};
use harmonaize_api::v1::{self, FailureKind};
use harmonaize_disclose::Fact as TenantFact;
use std::collections::BTreeSet;
use std::time::Duration;

/// Longest detail of an end that is told and kept.
const DETAIL_CHARS: usize = 500;

impl Controller {
    /// An agent tells that a communicator failed.
    pub(crate) fn failed(
        &mut self,
        now: Duration,
        from: SessionId,
        failed: v1::Failed,
    ) -> Result<(), Breach> {
        let id = CommunicatorId(failed.communicator);
        let Some((communicator, _)) = ctx!(self, now).part(from, id)? else {
            // It was known to have ended, but not why.
            if failed.kind() == FailureKind::RanksLost {
                self.regroups.past.lost(id, from, &failed.ranks);
            }
            return Ok(());
        };
        let ranks: BTreeSet<u32> =
            failed.ranks.iter().copied().filter(|rank| *rank < communicator.ranks).collect();
        let kind = match failed.kind() {
            FailureKind::Unspecified => FailureKind::Internal,
            kind => kind,
        };
        let cause = EndCause { kind, ranks: ranks.into_iter().collect(), detail: failed.detail };
        self.end(now, id, cause, Some(from));
        Ok(())
    }

    /// Ends a communicator: its agents are told, but for the one that said so.
    pub(crate) fn end(
        &mut self,
        now: Duration,
        id: CommunicatorId,
        cause: EndCause,
        except: Option<SessionId>,
    ) {
        // Agents and operators say it at any length; all members are told.
        let detail = cause.detail.chars().take(DETAIL_CHARS).collect();
        let cause = EndCause { detail, ..cause };
        if cause.kind == FailureKind::RanksLost {
            self.splits.lost(&mut self.outbox, id, &cause.ranks);
            let policy = self.agreements.inherited(id).and_then(|left| left.on_failure());
            let within = policy.and_then(|policy| match policy {
                OnFailure::Regroup { within } => Some(within),
                OnFailure::End => None,
            });
            let ranks = cause.ranks.iter().copied().map(Rank).collect();
            let ctx = &ctx!(self, now);
            let regroup_by = within.map(|within| clock(ctx, now).saturating_add(within));
            self.outbox.note(ctx, id, TenantFact::Failure { ranks, regroup_by });
        }
        self.agreements.watch_end(&ctx!(self, now), &mut self.outbox, id, &cause);
        let agreement = self.agreements.inherited(id);
        let Some(communicator) = self.remove(now, id) else { return };
        self.regroups.ended(&ctx!(self, now), &mut self.outbox, (id, &communicator), &cause, agreement);
        if let Some(before) = communicator.succeeds.filter(|_| cause.kind != FailureKind::Operator) {
            self.regroups.past.prolong(before, now.saturating_add(self.settings.prepare_timeout));
        }
        for member in communicator.members.iter().filter(|member| !member.closed) {
            if let Some(session) = member.session.filter(|session| Some(*session) != except)
                && self.sessions.contains_key(&session)
            {
                self.outbox.send(session, dissolved(id, &cause));
            }
        }
        self.outbox.fact(Fact::Ended {
            communicator: id,
            tenant: communicator.tenant.clone(),
            name: communicator.name.clone(),
            kind: cause.kind,
            ranks: cause.ranks.clone(),
            detail: cause.detail.clone(),
        });
        self.history.add(now, id, communicator, cause);
    }

    /// Forgets a communicator that is over.
    pub(crate) fn remove(&mut self, now: Duration, id: CommunicatorId) -> Option<Communicator> {
        let ctx = &ctx!(self, now);
        self.events.forget(ctx, &mut self.outbox, id);
        self.agreements.end(&mut self.outbox, id);
        self.hints.end(id);
        self.splits.over(&mut self.outbox, id);
        let mut communicator = self.communicators.remove(&id)?;
        if let Some(before) = communicator.succeeds {
            self.regroups.past.next_formed(before, id);
        }
        for config in communicator.lifecycle.configs_mut() {
            self.aggregators.end(now, &config.aggregation);
            self.link_state.ports.release(&mut config.ports);
        }
        if let Some(change) = communicator.change() {
            self.decisions.ended(change.decision, id);
        }
        self.iterations.remove(&id);
        self.turns.forget(&ctx!(self, now), &mut self.outbox, id);
        self.link_state.active_changed();
        self.outbox.want_plan(Trigger::Communicators);
        Some(communicator)
    }

    /// An operator ends a communicator, or what is kept of one for its members. Whether there was something.
    pub fn dissolve(&mut self, now: Duration, id: CommunicatorId, reason: &str) -> bool {
        let known = self.communicators.contains_key(&id);
        let detail = reason.to_owned();
        self.end(now, id, EndCause { kind: FailureKind::Operator, ranks: Vec::new(), detail }, None);
        let kept = self.regroups.end_retained(&mut self.outbox, id);
        self.act(now);
        known || kept
    }
}
