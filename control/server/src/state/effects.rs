//! What parts of control have done by others.

use crate::state::ctx::Ctx;
use crate::state::job::communicator::Communicator;
use crate::state::job::decisions::Trigger;
use crate::state::output::{Fact, Output, SessionId};
use crate::state::world::agents::OpenJoin;
use harmonaize_abi::CommunicatorId;
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, JoinRefusedKind, RefusedKind, to_agent};
use harmonaize_codec::Budget;
use harmonaize_disclose::{Fact as TenantFact, JoinFailure, disclose_join};
use harmonaize_planner::HostId;
use harmonaize_store::Change;

/// A connection's source port that control learned from an agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LearnedPort {
    /// The connection's communicator.
    pub communicator: CommunicatorId,
    /// Its participants, the lower first.
    pub ends: (u32, u32),
    /// The host that connects.
    pub host: HostId,
    /// The port.
    pub port: u16,
}

/// A fact for the feed of a communicator's tenant.
#[derive(Debug)]
pub(crate) struct Note {
    /// The tenant.
    pub tenant: String,
    /// The communicator.
    pub id: CommunicatorId,
    /// The communicator's name.
    pub name: String,
    /// The fact.
    pub fact: TenantFact,
}

/// What a part has done, in order. The controller sends and stores the outputs, and hands the rest to the
/// parts that it concerns.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// Messages and facts.
    pub outputs: Vec<Output>,
    /// What is to be stored: all of it or nothing.
    pub to_store: Vec<Change>,
    /// The first thing that makes control plan.
    pub trigger: Option<Trigger>,
    /// Ports of connections that control did not know.
    pub ports: Vec<LearnedPort>,
    /// Communicators on whose paths a long queue stands, as an agent says.
    pub queues: Vec<CommunicatorId>,
    /// What tenants may hear of.
    pub notes: Vec<Note>,
    /// Budgets that hold for communicators from the next epoch on.
    pub budgets: Vec<(CommunicatorId, Budget)>,
    /// Joins that an agent waits for, by its number.
    pub joins_open: Vec<(SessionId, u64, OpenJoin)>,
    /// Joins that are over.
    pub joins_over: Vec<(SessionId, u64)>,
}

impl Effects {
    /// Sends a message.
    pub(crate) fn send(&mut self, to: SessionId, message: to_agent::Message) {
        self.outputs.push(Output::Send(to, message));
    }

    /// Sends a message to all agents of a communicator that take part still.
    pub(crate) fn send_to_members(&mut self, known: &Communicator, message: &to_agent::Message) {
        let there = known.members.iter().filter(|member| !member.closed);
        for session in there.filter_map(|member| member.session) {
            self.send(session, message.clone());
        }
    }

    /// Tells the operator's log.
    pub(crate) fn fact(&mut self, fact: Fact) {
        self.outputs.push(Output::Fact(fact));
    }

    /// Has a change stored.
    pub(crate) fn store(&mut self, change: Change) {
        self.to_store.push(change);
    }

    /// Something moved that may make another plan better.
    pub(crate) fn want_plan(&mut self, trigger: Trigger) {
        self.trigger.get_or_insert(trigger);
    }

    /// Notes a fact about a communicator that there is, for its tenant.
    pub(crate) fn note(&mut self, ctx: &Ctx<'_>, id: CommunicatorId, fact: TenantFact) {
        if let Some((tenant, name)) = ctx.owner(id) {
            self.notes.push(Note { tenant, id, name, fact });
        }
    }

    /// Refuses a session and ends it.
    pub(crate) fn refuse(&mut self, session: SessionId, kind: RefusedKind, reason: String) {
        self.fact(Fact::SessionRefused { reason: reason.clone() });
        let refused = v1::Refused { kind: kind.into(), reason, protocol_version: PROTOCOL_VERSION };
        self.send(session, to_agent::Message::Refused(refused));
        self.outputs.push(Output::End(session));
    }

    /// Refuses a join.
    pub(crate) fn refuse_join(
        &mut self,
        to: SessionId,
        request: u64,
        kind: JoinRefusedKind,
        failure: &JoinFailure,
    ) {
        let told = disclose_join(failure);
        let ranks = told.ranks.iter().map(|rank| rank.0).collect();
        let refused = v1::JoinRefused { request, kind: kind.into(), text: told.text, ranks };
        self.send(to, to_agent::Message::JoinRefused(refused));
    }

    /// Refuses a join that was open, which is over with that.
    pub(crate) fn end_join(
        &mut self,
        to: SessionId,
        request: u64,
        kind: JoinRefusedKind,
        failure: &JoinFailure,
    ) {
        self.joins_over.push((to, request));
        self.refuse_join(to, request, kind, failure);
    }

    /// Writes to the operator's log what was refused of a host's agent. It writes the first of a kind, and
    /// then ever more rarely.
    pub(crate) fn unusual(&mut self, ctx: &Ctx<'_>, host: HostId, count: u64, why: &str) {
        if count.is_power_of_two() {
            let host = ctx.host_name(host);
            self.fact(Fact::TelemetryRefused { host, count, why: why.to_owned() });
        }
    }
}
