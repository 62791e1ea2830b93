//! Tenants' processes on the fabric: what they ask of control, what they are answered, and what control keeps of it.

use super::{Fabric, Part};
use harmonaize_abi::session::{
    Agreement, BatchChoice, BatchKnobs, Choice, Constraints, Hints, Knobs, Negotiated, Refusal,
};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Controller, Instruction};
use harmonaize_store::{Change, Stored, WithdrawalKind};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What tenants' processes were told, and what control has had stored.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    /// Who negotiated was answered this, in order.
    pub negotiated: Vec<v1::Negotiated>,
    /// What was chosen for iterations, in order.
    pub chosen: Vec<v1::IterationChoice>,
    /// What became of hints, in order.
    pub hinted: Vec<v1::Hinted>,
    /// What agents were told beside that and are not simulated by the fabric itself, in order.
    pub others: Vec<to_agent::Message>,
    pub stored: Stored,
    /// By host and communicator: what an agent knows of one that has ended.
    pub ended: BTreeMap<(usize, u64), v1::Recipe>,
    /// Whether nothing can be stored.
    pub disk_full: bool,
    /// Whether what is to be stored is on its way for ever.
    pub disk_slow: bool,
}

impl Tenants {
    /// What a host's agent says of communicators that have ended.
    pub(super) fn ended(&self, host: usize) -> Vec<v1::Recipe> {
        self.ended.range((host, 0)..=(host, u64::MAX)).map(|(_, recipe)| recipe.clone()).collect()
    }
}

impl Fabric {
    pub(crate) fn ids(&self) -> BTreeSet<u64> {
        self.state.communicator_ids().into_iter().map(u64::from).collect()
    }

    /// An agent hears that a communicator has ended.
    pub(super) fn dissolved(&mut self, host: usize, id: u64) {
        let part = self.agents[host].parts.remove(&id);
        if let Some(mut recipe) = part.and_then(|part| part.recipes.get(&part.epoch).cloned()) {
            recipe.peers.clear();
            self.tenants.ended.insert((host, id), recipe);
        }
    }

    /// Control has something stored.
    pub(super) fn keep(&mut self, changes: &[Change]) {
        if self.tenants.disk_slow {
            return;
        }
        if self.tenants.disk_full {
            return self.state.store_failed(self.now, changes);
        }
        changes.iter().for_each(|change| self.tenants.stored.apply(change));
        self.state.apply_stored(self.now, changes);
    }

    /// An agent that has not heard of the end of a communicator runs it still.
    pub(crate) fn runs(&mut self, host: usize, recipe: &v1::Recipe) {
        let part = Part { recipes: [(recipe.epoch, recipe.clone())].into(), epoch: recipe.epoch };
        self.agents[host].parts.insert(recipe.communicator, part);
    }

    /// Control has started anew, and agents come back with these communicators alone.
    pub(crate) fn restarted(&mut self, state: Controller, running: &[u64]) {
        let hosts: Vec<usize> = (0..self.agents.len()).collect();
        self.restarted_with(state, running, &hosts);
    }

    /// The same where the agents of these hosts alone come back, in this order.
    pub(crate) fn restarted_with(&mut self, state: Controller, running: &[u64], hosts: &[usize]) {
        self.state = state;
        self.events.clear();
        for agent in &mut self.agents {
            agent.session = None;
            agent.parts.retain(|id, _| running.contains(id));
        }
        hosts.iter().for_each(|host| self.connect(*host));
    }

    /// An operator says something.
    pub(crate) fn instruct(&mut self, instruction: &Instruction) {
        let changes = self.state.consider(self.now, instruction).unwrap();
        self.state.apply_stored(self.now, &changes);
        self.run_until_quiet();
    }

    pub(crate) fn withdraw(&mut self, target: &str, kind: WithdrawalKind, (from_ns, until_ns): (u64, u64)) {
        let (targets, reason) = (vec![target.to_owned()], String::new());
        let (from, until) = (Nanos(from_ns), Nanos(until_ns));
        self.instruct(&Instruction::Withdraw { targets, kind, from, until, reason });
    }

    pub(crate) fn restore(&mut self, target: &str, kind: WithdrawalKind) {
        self.instruct(&Instruction::Restore { targets: vec![target.to_owned()], kind });
    }

    pub(crate) fn drain(&mut self, target: &str) {
        self.withdraw(target, WithdrawalKind::Drain, (0, 0));
    }

    pub(crate) fn end_drain(&mut self, target: &str) {
        self.restore(target, WithdrawalKind::Drain);
    }

    /// An operator ends a communicator; whether there was something to end.
    pub(crate) fn dissolve(&mut self, id: u64) -> bool {
        let found = self.state.dissolve(self.now, CommunicatorId(id), "over");
        self.run_until_quiet();
        found
    }

    /// Where the feed of tenant a ends.
    pub(crate) fn here(&mut self) -> v1::EventCursor {
        self.read(0, 1, "a", None, Duration::ZERO);
        let read = self.read.pop().unwrap();
        assert!(read.events.is_empty() && read.refused.is_empty(), "{read:?}");
        read.cursor.unwrap()
    }

    /// All that tenant a has been told from a place in its feed on, and where that ends.
    pub(crate) fn events_from(
        &mut self,
        mut from: v1::EventCursor,
    ) -> (Vec<v1::TenantEvent>, v1::EventCursor) {
        let mut events = Vec::new();
        loop {
            self.read(0, 1, "a", Some(from), Duration::ZERO);
            let read = self.read.pop().unwrap();
            from = read.cursor.unwrap();
            if read.events.is_empty() {
                return (events, from);
            }
            events.extend(read.events);
        }
    }

    /// What tenant a has been told of a kind from a place in its feed on.
    pub(crate) fn events_of(&mut self, from: v1::EventCursor, kind: v1::EventKind) -> Vec<v1::TenantEvent> {
        let events = self.events_from(from).0.into_iter();
        events.filter(|event| event.kind() == kind).collect()
    }

    pub(crate) fn ask(&mut self, host: usize, message: from_agent::Message) {
        self.send(self.agents[host].session.unwrap(), message);
    }

    /// A process on the host asks for its tenant's events.
    pub(crate) fn read(
        &mut self,
        host: usize,
        request: u64,
        tenant: &str,
        from: Option<v1::EventCursor>,
        wait: Duration,
    ) {
        let (tenant, wait_ns) = (tenant.to_owned(), wait.as_nanos() as u64);
        let asked = v1::ReadEvents { request, tenant, from, wait_ns };
        self.ask(host, from_agent::Message::ReadEvents(asked));
    }

    /// The process on the host that asked so is gone.
    pub(crate) fn cancel_read(&mut self, host: usize, request: u64) {
        self.ask(host, from_agent::Message::CancelRead(v1::CancelRead { request }));
    }

    /// A process on host 0 proposes, or asks; what it is answered, if it is.
    pub(crate) fn negotiate(
        &mut self,
        tenant: &str,
        communicator: &str,
        propose: Option<&Constraints>,
    ) -> Option<Result<Negotiated, Refusal>> {
        self.propose(tenant, communicator, propose.map(Into::into))
    }

    /// The same as agents say it.
    pub(crate) fn propose(
        &mut self,
        tenant: &str,
        communicator: &str,
        propose: Option<v1::Constraints>,
    ) -> Option<Result<Negotiated, Refusal>> {
        let (tenant, communicator) = (tenant.to_owned(), communicator.to_owned());
        let asked = v1::Negotiate { request: 5, tenant, communicator, propose };
        self.tenants.negotiated.clear();
        self.ask(0, from_agent::Message::Negotiate(asked));
        let answer = self.tenants.negotiated.pop()?;
        assert!(answer.request == 5 && self.tenants.negotiated.is_empty());
        Some(answer.outcome())
    }

    /// A process on a host wants to go on with whoever else does, and waits a second. It has a rank of a communicator.
    pub(crate) fn regroup(&mut self, host: usize, tenant: &str, communicator: &str, member: (u64, u32)) {
        self.regroup_within(host, tenant, communicator, member, Duration::from_secs(1));
    }

    /// The same, with its patience.
    pub(crate) fn regroup_within(
        &mut self,
        host: usize,
        tenant: &str,
        communicator: &str,
        (of, member): (u64, u32),
        patience: Duration,
    ) {
        let regroup =
            Some(v1::Regroup { communicator: of, previous_rank: member, key: member, min_ranks: 1 });
        let (tenant, communicator) = (tenant.to_owned(), communicator.to_owned());
        let (request, timeout_ns) = (900_000 + u64::from(member), patience.as_nanos() as u64);
        let join = v1::Join { request, tenant, communicator, timeout_ns, regroup, ..v1::Join::default() };
        self.ask(host, from_agent::Message::Join(join));
    }

    /// What is agreed on.
    pub(crate) fn agreement(&mut self, tenant: &str, communicator: &str) -> Agreement {
        match self.negotiate(tenant, communicator, None) {
            Some(Ok(Negotiated::Agreed(agreement))) => agreement,
            other => panic!("{other:?}"),
        }
    }

    /// An iteration begins; what is chosen for it.
    pub(crate) fn iteration(
        &mut self,
        tenant: &str,
        communicator: &str,
        knobs: &Knobs,
    ) -> Result<Choice, Refusal> {
        let asked = v1::BeginIteration::of(6, tenant, communicator.to_owned(), knobs, None);
        self.ask(0, from_agent::Message::BeginIteration(asked));
        self.tenants.chosen.pop().unwrap().choice().map(|(choice, _)| choice)
    }

    /// The same where the batch is left to the provider, too.
    pub(crate) fn iteration_with_batch(
        &mut self,
        tenant: &str,
        communicator: &str,
        knobs: &Knobs,
        batch: &BatchKnobs,
    ) -> Result<(Choice, Option<BatchChoice>), Refusal> {
        let asked = v1::BeginIteration::of(6, tenant, communicator.to_owned(), knobs, Some(batch));
        self.ask(0, from_agent::Message::BeginIteration(asked));
        self.tenants.chosen.pop().unwrap().choice()
    }

    /// A process on host 0 says what it expects; what it is answered.
    pub(crate) fn hint(&mut self, tenant: &str, communicator: &str, hints: &Hints) -> Result<(), Refusal> {
        let (tenant, communicator) = (tenant.to_owned(), communicator.to_owned());
        let hint = v1::Hint { request: 7, tenant, communicator, hints: Some(hints.into()) };
        self.ask(0, from_agent::Message::Hint(hint));
        self.tenants.hinted.pop().unwrap().outcome()
    }
}
