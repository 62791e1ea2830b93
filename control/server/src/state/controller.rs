//! The controller: takes in messages and the time. It has each part do its own, and hands what one part did
//! on to the others.

mod act;
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
mod timers;
pub(crate) mod topology;

use crate::state::ctx::ctx;
use crate::state::effects::{Effects, LearnedPort};
use crate::state::job::communicators::Communicators;
use crate::state::job::decisions::{Decisions, Trigger};
use crate::state::job::ended::History;
use crate::state::job::planning::PlanRequest;
use crate::state::jobs::Jobs;
use crate::state::output::{Output, SessionId};
use crate::state::queries::Queries;
use crate::state::queries::questions::Questions;
use crate::state::settings::Settings;
use crate::state::tenants::agreements::Agreements;
use crate::state::tenants::budgets::JoinRates;
use crate::state::tenants::events::Events;
use crate::state::tenants::hints::AllHints;
use crate::state::tenants::joins::Joins;
use crate::state::tenants::regroup::Regroups;
use crate::state::tenants::splits::Splits;
use crate::state::tenants::turns::AllTurns;
use crate::state::world::agents::Session;
use crate::state::world::aggregators::Aggregators;
use crate::state::world::handovers::HandOvers;
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
    pub(crate) handovers: HandOvers,
    pub(crate) link_state: LinkState,
    pub(crate) aggregators: Aggregators,
    pub(crate) telemetry: Telemetry,
    // Jobs.
    pub(crate) communicators: Communicators,
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
    pub(crate) jobs: Jobs,
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
            handovers: HandOvers::default(),
            link_state,
            aggregators: Aggregators::default(),
            telemetry: Telemetry::default(),
            communicators: Communicators::default(),
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
            jobs: Jobs::default(),
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
        self.jobs.store(&ctx!(self, Duration::ZERO), &mut self.outbox);
        let mut outputs = std::mem::take(&mut self.outbox.outputs);
        if !self.outbox.to_store.is_empty() {
            outputs.push(Output::Keep(std::mem::take(&mut self.outbox.to_store)));
        }
        outputs
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
            regroups: &self.regroups,
            decisions: &self.decisions,
            history: &self.history,
            jobs: &self.jobs,
        }
    }

    /// Notes that the call or message before this one is over, by the clock. The time that it took to plan is
    /// no pause between two plans.
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
}
