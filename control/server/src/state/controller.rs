//! The controller: takes messages and the time in, has each part do its own, and hands what one part did on
//! to the others.

pub(crate) mod change;
mod end;
mod form;
mod instructions;
mod join;
mod messages;
mod operations;
mod plan;
mod recover;
mod session;

use crate::state::ctx::ctx;
use crate::state::effects::{Effects, LearnedPort};
use crate::state::job::communicator::Communicator;
use crate::state::job::decisions::{Decisions, Trigger};
use crate::state::job::ended::History;
use crate::state::job::planning::PlanRequest;
use crate::state::output::{Output, SessionId};
use crate::state::queries::Queries;
use crate::state::queries::questions::Questions;
use crate::state::settings::Settings;
use crate::state::tenants::agreements::Agreements;
use crate::state::tenants::budgets::JoinRates;
use crate::state::tenants::events::{Events, note_maintenance};
use crate::state::tenants::hints::AllHints;
use crate::state::tenants::joins::Joins;
use crate::state::tenants::regroup::Regroups;
use crate::state::tenants::splits::Splits;
use crate::state::tenants::turns::AllTurns;
use crate::state::world::agents::Session;
use crate::state::world::aggregators::Aggregators;
use crate::state::world::iterations::Operations;
use crate::state::world::link_state::LinkState;
use crate::state::world::operator::Operator;
use crate::state::world::telemetry::Telemetry;
use harmonaize_abi::CommunicatorId;
use harmonaize_planner::HostId;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha20Rng;
use std::collections::BTreeMap;
use std::time::Duration;

/// Everything that control knows. It alone has the parts meet.
#[derive(Debug)]
pub struct Controller {
    // The world.
    pub(crate) settings: Settings,
    pub(crate) sessions: BTreeMap<SessionId, Session>,
    pub(crate) hosts: BTreeMap<HostId, SessionId>,
    pub(crate) iterations: BTreeMap<CommunicatorId, Operations>,
    pub(crate) operator: Operator,
    pub(crate) link_state: LinkState,
    pub(crate) aggregators: Aggregators,
    pub(crate) telemetry: Telemetry,
    // Jobs.
    pub(crate) communicators: BTreeMap<CommunicatorId, Communicator>,
    pub(crate) decisions: Decisions,
    pub(crate) plan_request: PlanRequest,
    pub(crate) history: History,
    // Tenants.
    pub(crate) agreements: Agreements,
    pub(crate) hints: AllHints,
    pub(crate) events: Events,
    pub(crate) turns: AllTurns,
    pub(crate) joins: Joins,
    pub(crate) join_rates: JoinRates,
    pub(crate) regroups: Regroups,
    pub(crate) splits: Splits,
    // Operators.
    pub(crate) questions: Questions,
    // Its own.
    pub(crate) random: ChaCha20Rng,
    /// Upper half of the ids that this process gives; tells its communicators from those of an earlier one.
    pub(crate) boot: u32,
    pub(crate) formed: u32,
    /// What parts have done, until it is taken or handed on.
    pub(crate) outbox: Effects,
}

impl Controller {
    /// Control with nothing connected. `seed` must be unpredictable: names and secrets of links come from it.
    pub fn new(settings: Settings, seed: [u8; 32]) -> Self {
        let mut random = ChaCha20Rng::from_seed(seed);
        let boot = random.next_u32();
        let mut feeds = [0; 32];
        random.fill_bytes(&mut feeds);
        let link_state = LinkState::new(settings.source_ports);
        Self {
            settings,
            sessions: BTreeMap::new(),
            hosts: BTreeMap::new(),
            iterations: BTreeMap::new(),
            operator: Operator::default(),
            link_state,
            aggregators: Aggregators::default(),
            telemetry: Telemetry::default(),
            communicators: BTreeMap::new(),
            decisions: Decisions::default(),
            plan_request: PlanRequest::default(),
            history: History::default(),
            agreements: Agreements::default(),
            hints: AllHints::default(),
            events: Events::new(ChaCha20Rng::from_seed(feeds)),
            turns: AllTurns::default(),
            joins: Joins::default(),
            join_rates: JoinRates::default(),
            regroups: Regroups::default(),
            splits: Splits::default(),
            questions: Questions::default(),
            random,
            boot,
            formed: 0,
            outbox: Effects::default(),
        }
    }

    /// What to do now, in order.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        self.regroups.past.store(&ctx!(self, Duration::ZERO), &mut self.outbox);
        let mut outputs = std::mem::take(&mut self.outbox.outputs);
        if !self.outbox.to_store.is_empty() {
            outputs.push(Output::Keep(std::mem::take(&mut self.outbox.to_store)));
        }
        outputs
    }

    /// The next time at which [`Controller::expire`] has something to do.
    pub fn next_deadline(&self) -> Option<Duration> {
        let ctx = ctx!(self, Duration::ZERO);
        let communicators = self.communicators.values().flat_map(|known| {
            let until = [known.deadline(), known.backoff_until, known.coding.again, known.refused.due()];
            until.into_iter().flatten()
        });
        let parts = [
            self.joins.next_timeout(),
            self.splits.next_timeout(),
            self.questions.next_timeout(),
            self.operator.next_timeout(),
            self.link_state.next_timeout(&ctx),
            self.plan_request.next_timeout().filter(|_| self.settings.replan),
            self.aggregators.next_timeout(),
            self.events.next_timeout(&ctx),
            self.regroups.next_timeout(&ctx),
            self.agreements.next_timeout(&self.settings),
            self.turns.deadline(),
        ];
        communicators.chain(parts.into_iter().flatten()).min()
    }

    /// Ends what has waited long enough.
    pub fn expire(&mut self, now: Duration) {
        self.joins.expire(now, &mut self.outbox);
        self.splits.expire(&ctx!(self, now), &mut self.outbox);
        let groups = self.regroups.expire_past(&ctx!(self, now), &mut self.outbox);
        groups.into_iter().for_each(|group| self.form(now, group));
        let groups = self.regroups.expire(&ctx!(self, now), &mut self.outbox);
        groups.into_iter().for_each(|group| self.form(now, group));
        self.expire_communicators(now);
        self.answer_questions(now);
        let mut again = self.aggregators.expire(&ctx!(self, now), &mut self.outbox);
        self.communicators.values_mut().for_each(|known| again |= known.refused.expire(now));
        if again {
            self.outbox.want_plan(Trigger::Aggregators);
        }
        if self.operator.update_windows(&self.settings, now, &mut self.outbox.trigger) {
            note_maintenance(&ctx!(self, now), &mut self.outbox, None);
        }
        self.link_state.expire(&ctx!(self, now), &mut self.outbox);
        self.link_state.fade(&ctx!(self, now), &mut self.outbox);
        let mut settled = false;
        for known in self.communicators.values_mut() {
            settled |= known.coding.again.take_if(|at| *at <= now).is_some();
            settled |= known.backoff_until.take_if(|until| *until <= now).is_some();
        }
        if settled {
            self.outbox.want_plan(Trigger::Settled);
        }
        self.agreements.expire(&ctx!(self, now), &mut self.outbox);
        self.turns.expire(&ctx!(self, now), &mut self.outbox);
        self.act(now);
        self.events.expire(&ctx!(self, now), &mut self.outbox);
    }

    /// Returns the replies to operators.
    pub fn queries(&self, now: Duration) -> Queries<'_> {
        Queries {
            ctx: ctx!(self, now),
            links: &self.link_state,
            agreements: &self.agreements,
            hints: &self.hints,
            aggregators: &self.aggregators,
            turns: &self.turns,
            telemetry: &self.telemetry,
            joins: &self.joins,
            decisions: &self.decisions,
            history: &self.history,
        }
    }

    /// The call or message before this one is over, by the clock: what it took to plan is no pause between
    /// two plans.
    pub fn finished(&mut self, now: Duration) {
        self.plan_request.made(now);
    }

    /// Asks all agents; [`Output::Status`] follows with the returned number, after `patience` at the latest.
    pub fn ask_status(&mut self, now: Duration, patience: Duration) -> u64 {
        let deadline = now.saturating_add(patience);
        let id = self.questions.ask(&ctx!(self, now), &mut self.outbox, deadline);
        self.answer_questions(now);
        id
    }

    /// Answers the status requests that wait for nobody any more.
    pub(crate) fn answer_questions(&mut self, now: Duration) {
        for (id, reports) in self.questions.take_answered(now) {
            let reply = self.queries(now).status(&reports);
            self.outbox.outputs.push(Output::Status(id, Box::new(reply)));
        }
    }

    /// Hands what parts did by others to those others.
    pub(crate) fn settle(&mut self, now: Duration) {
        for (session, request, join) in std::mem::take(&mut self.outbox.joins_open) {
            if let Some(session) = self.sessions.get_mut(&session) {
                session.joins.insert(request, join);
            }
        }
        for (session, request) in std::mem::take(&mut self.outbox.joins_over) {
            if let Some(session) = self.sessions.get_mut(&session) {
                session.joins.remove(&request);
            }
        }
        for LearnedPort { communicator, ends, host, port } in std::mem::take(&mut self.outbox.ports) {
            let known = self.communicators.get_mut(&communicator);
            if let Some(current) = known.and_then(|known| known.lifecycle.current_mut()) {
                current.learn_port(ends, (host, port));
            }
        }
        for id in std::mem::take(&mut self.outbox.queues) {
            self.events.queue_stands(now, id);
        }
        for (id, budget) in std::mem::take(&mut self.outbox.budgets) {
            let Some(known) = self.communicators.get_mut(&id) else { continue };
            known.agree_on_budget(&self.settings.topology, budget);
            self.outbox.want_plan(Trigger::Budget);
        }
        for note in std::mem::take(&mut self.outbox.notes) {
            self.events.note(&ctx!(self, now), note);
        }
        if let Some(trigger) = self.outbox.trigger.take() {
            self.plan_request.want(trigger);
        }
    }

    /// Forms who regrouped, and plans, if something moved and the last plan is long enough ago.
    pub(crate) fn act(&mut self, now: Duration) {
        self.settle(now);
        loop {
            let groups = self.regroups.take_complete(&ctx!(self, now), &mut self.outbox);
            if groups.is_empty() {
                break;
            }
            groups.into_iter().for_each(|group| self.form(now, group));
        }
        self.settle(now);
        self.plan(now);
        self.settle(now);
        self.check_invariants();
    }

    /// Checks what holds between calls, where that is soon done.
    fn check_invariants(&self) {
        if cfg!(debug_assertions) && self.communicators.len() <= 64 && self.hosts.len() <= 256 {
            let topology = &self.settings.topology;
            self.communicators.values().for_each(|known| known.check_invariants(topology));
            let agree = |(host, session): (&HostId, &SessionId)| {
                self.sessions.get(session).is_some_and(|known| known.host == *host)
            };
            debug_assert!(self.hosts.iter().all(agree), "a host's session is not the host's");
            debug_assert_eq!(self.hosts.len(), self.sessions.len(), "each session is of one host");
        }
    }
}
