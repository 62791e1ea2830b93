//! What control knows and decides, as a pure state machine: messages, calls and the time come in, outputs go out.

mod admission;
mod agents;
mod aggregation;
mod aggregator_refusals;
mod agreements;
mod algorithm;
mod change;
mod codec;
mod coding;
mod communicator;
mod decisions;
mod effects;
mod events;
mod hints;
mod iterations;
mod join;
mod lifecycle;
mod link_reuse;
mod link_state;
pub(crate) mod operator;
mod rate_limits;
mod reason;
mod recipe;
mod reconcile;
mod recover;
mod reduction;
mod regroup;
mod replan;
mod session;
mod slowdown;
mod status;
mod telemetry;
mod tenant_limits;
mod turns;

#[cfg(test)]
mod tests;

use agents::Session;
pub use aggregation::Terms;
pub use change::ReorderError;
use communicator::{Communicator, Ended};
pub use decisions::{Changed, Counts, Decision, Noticed, Outcome, Trigger};
use effects::{Ctx, Effects, LearnedPort};
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, FailureKind, RefusedKind, from_agent, to_agent};
use harmonaize_planner::{AlgorithmPolicy, Conditions, HostId, Topology};
use harmonaize_store::Change;
use join::Waiting;
use link_state::LinkState;
pub use operator::{Instruction, InstructionError};
use rand::SeedableRng;
use rand_chacha::ChaCha20Rng;
pub use reason::{RateChange, Reason};
use status::Question;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// An agent's session, or a connection that may become one. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// What control does.
#[derive(Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "most are messages, and each is carried out where it was made")]
pub enum Output {
    /// Send to an agent.
    Send(SessionId, to_agent::Message),
    /// Close a session once what was sent is out. The state has forgotten it.
    End(SessionId),
    /// The answer to [`State::ask_status`].
    Status(u64, Box<v1::StatusReply>),
    /// For the operator's log.
    Fact(Fact),
    /// Keep this; then [`State::apply_stored`] or [`State::store_failed`].
    Keep(Vec<Change>),
}

/// Something that an operator wants to read about.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // each field is named after what it holds
pub enum Fact {
    /// An agent's session opened.
    AgentConnected { host: String, listen: String },
    /// An agent's session ended.
    AgentGone { host: String },
    /// An aggregator's session opened.
    AggregatorConnected { name: String, address: String },
    /// An aggregator's session ended; what it serves it may serve on.
    AggregatorGone { name: String },
    /// An aggregator does not serve a communicator, and says why.
    GrantRefused { name: String, communicator: u64, why: String },
    /// An agent cannot do all that agents can, and says why.
    AgentLacks { host: String, what: String },
    /// On the way of a host's packets an address answered that is no switch's in the topology.
    UnknownHop { host: String, address: String },
    /// A session was refused or ended by control.
    SessionRefused { reason: String },
    /// All ranks have joined.
    Formed { communicator: u64, tenant: String, name: String, ranks: u32, hosts: Vec<String> },
    /// An epoch is in use.
    EpochCurrent { communicator: u64, tenant: String, name: String, epoch: u64 },
    /// An epoch was given up.
    EpochAbandoned { communicator: u64, tenant: String, name: String, epoch: u64, why: String },
    /// Control chooses a communicator's order again.
    OrderFreed { communicator: u64, tenant: String, name: String },
    /// A communicator ended in good order.
    Closed { communicator: u64, tenant: String, name: String },
    /// An agent's telemetry, or what it says of turns, was refused or dropped: so often by now.
    TelemetryRefused { host: String, count: u64, why: String },
    /// Control decided on new plans: for which communicators, and their new epochs.
    Decided { decision: u64, trigger: String, reason: String, changes: Vec<(u64, u64)> },
    /// A plan did not pass the check, and is not used: so often by now.
    PlanUnfit { count: u64, why: String },
    /// A communicator's operations lose or send otherwise by a codec than was known.
    LossLearned { communicator: u64, codec: &'static str },
    /// A communicator takes turns with these others from now on.
    TakesTurns { communicator: u64, tenant: String, name: String, with: Vec<u64>, reason: String },
    /// It takes no turns any more.
    TurnsOver { communicator: u64, tenant: String, name: String, why: String },
    /// Something has been promised for a communicator, which takes the place of what was before.
    Agreed { communicator: u64, tenant: String, name: String, number: u64, promise: String },
    /// What of an agreement is not kept; nothing: it is again.
    AgreementBroken { communicator: u64, tenant: String, name: String, number: u64, broken: Vec<String> },
    /// What a tenant expects of a communicator, in words.
    Hinted { communicator: u64, tenant: String, name: String, hints: String },
    /// What a tenant expected is not what was measured.
    HintsDropped { communicator: u64, tenant: String, name: String, hints: String },
    /// What was agreed on for the communicator before this one cannot be promised for it: because of these clauses; of none: it could not
    /// be stored.
    AgreementLost { communicator: u64, tenant: String, name: String, lost: Vec<String> },
    /// A communicator that failed is kept for its members to regroup.
    Kept { communicator: u64, tenant: String, name: String, within: Duration },
    /// They have not, and it is over.
    NotRegrouped { communicator: u64, tenant: String, name: String, within: Duration },
    /// A communicator ended otherwise.
    Ended {
        communicator: u64,
        tenant: String,
        name: String,
        kind: FailureKind,
        ranks: Vec<u32>,
        detail: String,
    },
}

/// What the operator decided.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Hosts and links.
    pub topology: Topology,
    /// Names of tenants.
    pub tenants: Vec<String>,
    /// How long the first rank to join waits for the last.
    pub join_timeout: Duration,
    /// How long agents may take to prepare an epoch.
    pub prepare_timeout: Duration,
    /// How long control waits for agents of communicators that outlived its restart.
    pub recovery_timeout: Duration,
    /// How long an operation waits for ranks that have not arrived.
    pub operation_timeout: Duration,
    /// Paths of a link.
    pub paths: u32,
    /// Source ports that links take, first and last; any where absent.
    pub source_ports: Option<(u16, u16)>,
    /// Most ranks of a communicator.
    pub most_ranks: u32,
    /// Most communicators of a tenant, waiting ones included.
    pub most_communicators: usize,
    /// How often agents are asked to report what they measure; zero for never.
    pub telemetry_interval: Duration,
    /// Whether control makes new plans while communicators run; else only operators do.
    pub replan: bool,
    /// Whether periodic communicators take turns on links that they share.
    pub turns: bool,
    /// Whether tensors may travel in fewer bits where tenants let something be lost.
    pub compression: bool,
    /// How small operations of a tenant go; as control decides where it is absent.
    pub direct: BTreeMap<String, AlgorithmPolicy>,
    /// What tenants have of aggregators, where that is another than usual.
    pub terms: BTreeMap<String, Terms>,
    /// The largest weight that a tenant can have promised.
    pub most_weight: u32,
    /// How long a communicator that failed, and what was promised for it, are kept at most for its members to regroup.
    pub longest_regroup: Duration,
}

impl Settings {
    fn terms(&self, tenant: &str) -> Terms {
        self.terms.get(tenant).copied().unwrap_or_default()
    }
}

/// Everything that control knows.
#[derive(Debug)]
pub struct State {
    settings: Settings,
    random: ChaCha20Rng,
    /// Upper half of the ids that this process gives; tells its communicators from those of an earlier one.
    boot: u32,
    formed: u32,
    sessions: BTreeMap<SessionId, Session>,
    hosts: BTreeMap<HostId, SessionId>,
    waiting: BTreeMap<(String, String), Waiting>,
    regroups: regroup::Regroups,
    communicators: BTreeMap<u64, Communicator>,
    aggregators: aggregation::Aggregators,
    link_state: LinkState,
    ended: VecDeque<Ended>,
    errors: u64,
    tenant_errors: BTreeMap<String, u64>,
    questions: BTreeMap<u64, Question>,
    next_question: u64,
    telemetry: telemetry::Telemetry,
    rhythms: BTreeMap<u64, iterations::Operations>,
    /// When it was last looked at who may take turns.
    staggered: Duration,
    turns: turns::AllTurns,
    decisions: decisions::Decisions,
    plan_request: replan::PlanRequest,
    operator: operator::Operator,
    events: events::Events,
    agreements: agreements::Agreements,
    hints: hints::AllHints,
    outputs: Vec<Output>,
    /// What is to be kept of what was done since outputs were taken: all of it or nothing.
    to_store: Vec<Change>,
}

impl State {
    /// Control with nothing connected. `seed` must be unpredictable: names and secrets of links come from it.
    pub fn new(settings: Settings, seed: [u8; 32]) -> Self {
        use rand::Rng;
        let mut random = ChaCha20Rng::from_seed(seed);
        let boot = random.next_u32();
        let link_state = LinkState::new(settings.source_ports);
        Self {
            settings,
            random,
            boot,
            formed: 0,
            sessions: BTreeMap::new(),
            hosts: BTreeMap::new(),
            waiting: BTreeMap::new(),
            regroups: regroup::Regroups::default(),
            communicators: BTreeMap::new(),
            aggregators: aggregation::Aggregators::default(),
            link_state,
            ended: VecDeque::new(),
            errors: 0,
            tenant_errors: BTreeMap::new(),
            questions: BTreeMap::new(),
            next_question: 0,
            telemetry: telemetry::Telemetry::default(),
            rhythms: BTreeMap::new(),
            staggered: Duration::ZERO,
            turns: turns::AllTurns::default(),
            decisions: decisions::Decisions::default(),
            plan_request: replan::PlanRequest::default(),
            operator: operator::Operator::default(),
            events: events::Events::default(),
            agreements: agreements::Agreements::default(),
            hints: hints::AllHints::default(),
            outputs: Vec::new(),
            to_store: Vec::new(),
        }
    }

    /// What to do now, in order.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        self.store_pasts();
        if !self.to_store.is_empty() {
            self.outputs.push(Output::Keep(std::mem::take(&mut self.to_store)));
        }
        std::mem::take(&mut self.outputs)
    }

    /// A message of an agent. Whatever it holds, it costs at most that agent's session. A verdict that makes another plan better
    /// leads to that plan's messages within this call.
    pub fn message(&mut self, now: Duration, from: SessionId, message: v1::FromAgent) {
        use from_agent::Message;
        let Some(message) = message.message else {
            return self.breach(now, from, "a message without content");
        };
        match message {
            message if self.is_aggregator(from) => {
                if let Err(breach) = self.aggregator_message(now, from, message) {
                    self.breach(now, from, breach);
                }
            }
            Message::Hello(hello) if !self.sessions.contains_key(&from) => self.hello(now, from, &hello),
            _ if !self.sessions.contains_key(&from) => self.breach(now, from, "a message before Hello"),
            message => {
                if let Err(breach) = self.message_of(now, from, message) {
                    self.breach(now, from, breach);
                }
            }
        }
        self.act(now);
    }

    /// A message of an agent that has a session. An error is a breach of protocol.
    fn message_of(
        &mut self,
        now: Duration,
        from: SessionId,
        message: from_agent::Message,
    ) -> Result<(), &'static str> {
        use from_agent::Message;
        match message {
            Message::Hello(_) => return Err("a second Hello"),
            Message::Join(join) => return self.join(now, from, join),
            Message::Leave(leave) => return self.leave(now, from, &leave),
            Message::Prepared(prepared) => {
                return self.prepared(now, from, prepared.communicator, prepared.epoch);
            }
            Message::PrepareFailed(failed) => return self.prepare_failed(now, from, &failed),
            Message::Switched(switched) => {
                return self.switched(now, from, switched.communicator, switched.epoch);
            }
            Message::Failed(failed) => return self.failed(now, from, failed),
            Message::Closed(closed) => return self.closed(now, from, closed.communicator),
            Message::Report(report) => self.report(now, from, report),
            Message::Telemetry(report) => self.telemetry(now, from, report),
            Message::CongestionReport(told) => {
                self.with_links(now, |links, ctx, effects| links.path_congestion(ctx, effects, from, told));
            }
            Message::PathsTraced(answer) => {
                self.with_links(now, |links, ctx, effects| links.traced(ctx, effects, from, &answer));
            }
            Message::PathProbed(answer) => {
                self.with_links(now, |links, ctx, effects| links.probed(ctx, effects, from, &answer));
            }
            Message::SetBudget(said) => return self.set_budget(from, &said),
            Message::ReadEvents(asked) => return self.read_events(now, from, asked),
            Message::Negotiate(asked) => self.negotiate(now, from, asked),
            Message::BeginIteration(asked) => self.begin_iteration(now, from, &asked),
            Message::Hint(asked) => self.hint(now, from, &asked),
            Message::RequestSlot(wanted) => return self.slot_requested(now, from, wanted),
            Message::ReleaseSlot(done) => return self.turn_done(now, from, done),
            Message::AggregationGranted(_) | Message::Aggregator(_) => {
                return Err("a host's agent that speaks as an aggregator");
            }
        }
        Ok(())
    }

    /// The next time at which [`State::expire`] has something to do.
    pub fn next_deadline(&self) -> Option<Duration> {
        let waiting = self.waiting.values().map(join::Waiting::next_deadline);
        let communicators = self.communicators.values().filter_map(Communicator::deadline);
        let questions = self.questions.values().map(|question| question.deadline);
        let plans = [
            self.operator.deadline(),
            self.link_state.next_timeout(&self.ctx(Duration::ZERO)),
            self.plan_deadline(),
            self.aggregation_deadline(),
            self.events_deadline(),
            self.regroups_deadline(),
            self.past_deadline(),
            self.agreements_deadline(),
            self.turns.deadline(),
        ];
        waiting.chain(communicators).chain(questions).chain(plans.into_iter().flatten()).min()
    }

    /// Ends what has waited long enough.
    pub fn expire(&mut self, now: Duration) {
        self.expire_joins(now);
        self.expire_past(now);
        self.expire_regroups(now);
        self.expire_communicators(now);
        self.expire_questions(now);
        self.expire_aggregations(now);
        if self.update_windows(now) {
            self.note_maintenance(now, None);
        }
        self.with_links(now, LinkState::expire);
        self.expire_plans(now);
        self.expire_agreements(now);
        self.expire_turns(now);
        self.act(now);
        self.expire_events(now);
    }

    /// Something moved: a plan is made before this message or call is over, or as soon as may be.
    fn want_plan(&mut self, trigger: Trigger) {
        self.plan_request.want(trigger);
    }

    /// Forms who regrouped, and plans, if something moved and the last plan is long enough ago.
    fn act(&mut self, now: Duration) {
        self.close_regroups(now);
        if !self.settings.replan {
            self.plan_request.forget();
            self.reconcile_agreed(now);
        }
        let members = self.communicators.values().map(|known| known.members.len()).sum();
        let Some(trigger) = self.plan_request.take(now, members) else { return };
        let Some(decision) = self.replan(now, trigger) else { return };
        for id in self.note_rates(now) {
            self.watch_plan(now, id);
        }
        if !decision.changes.is_empty() {
            self.decided(decision);
        }
    }

    /// The call or message before this one is over, by the clock: what it took to plan is no pause between two plans.
    pub fn finished(&mut self, now: Duration) {
        self.plan_request.made(now);
    }

    /// The communicator and the index of the agent in it; `None` for one that has ended, an error for another's.
    fn part(&mut self, from: SessionId, id: u64) -> Result<Option<(&mut Communicator, usize)>, &'static str> {
        let Some(communicator) = self.communicators.get_mut(&id) else { return Ok(None) };
        let index = communicator.index_of(from).ok_or("a message about a communicator of others")?;
        Ok(Some((communicator, index)))
    }

    fn refuse(&mut self, session: SessionId, kind: RefusedKind, reason: String) {
        self.fact(Fact::SessionRefused { reason: reason.clone() });
        let refused = v1::Refused { kind: kind.into(), reason, protocol_version: PROTOCOL_VERSION };
        self.send(session, to_agent::Message::Refused(refused));
        self.outputs.push(Output::End(session));
    }

    /// Returns what parts read beside their own fields.
    fn ctx(&self, now: Duration) -> Ctx<'_> {
        let Self { settings, sessions, hosts, communicators, rhythms: iterations, operator, .. } = self;
        let withdrawn = operator.withdrawn();
        Ctx { now, settings, sessions, hosts, communicators, iterations, withdrawn }
    }

    /// Has the state of links take something in, and does what follows.
    fn with_links<R>(
        &mut self,
        now: Duration,
        step: impl FnOnce(&mut LinkState, &Ctx<'_>, &mut Effects) -> R,
    ) -> R {
        let Self {
            settings, sessions, hosts, communicators, rhythms: iterations, operator, link_state, ..
        } = self;
        let withdrawn = operator.withdrawn();
        let ctx = Ctx { now, settings, sessions, hosts, communicators, iterations, withdrawn };
        let mut effects = Effects::default();
        let result = step(link_state, &ctx, &mut effects);
        self.apply(now, effects);
        result
    }

    /// Does what a part has done by others.
    fn apply(&mut self, now: Duration, effects: Effects) {
        let Effects { outputs, trigger, ports, queues } = effects;
        self.outputs.extend(outputs);
        trigger.into_iter().for_each(|trigger| self.want_plan(trigger));
        for LearnedPort { communicator, ends, host, port } in ports {
            let known = self.communicators.get_mut(&communicator);
            if let Some(current) = known.and_then(|known| known.lifecycle.current_mut()) {
                current.learn_port(ends, (host, port));
            }
        }
        queues.into_iter().for_each(|id| self.queue_stands(now, id));
    }

    /// Returns what links have left for ours.
    fn conditions(&self) -> Conditions {
        self.link_state.conditions(&self.settings.topology, self.withdrawn())
    }

    fn send(&mut self, to: SessionId, message: to_agent::Message) {
        self.outputs.push(Output::Send(to, message));
    }

    fn store(&mut self, change: Change) {
        self.to_store.push(change);
    }

    fn fact(&mut self, fact: Fact) {
        self.outputs.push(Output::Fact(fact));
    }

    fn host_name(&self, host: HostId) -> String {
        self.settings.topology.hosts().get(host.0).map_or_else(String::new, |host| host.name.clone())
    }
}

#[cfg(test)]
impl State {
    /// What the congestion reports of a host's agent came to: taken, dropped as too many, refused as wrong.
    fn report_counts(&self, host: &str) -> (u64, u64, u64) {
        self.settings.topology.host(host).map_or((0, 0, 0), |host| self.link_state.reports.counts(host))
    }
}
