//! What control knows and decides, as a pure state machine: messages, calls and the time come in, outputs go out.

mod aggregation;
mod agreements;
mod carry;
mod change;
mod coding;
mod communicator;
mod decisions;
mod direct;
mod events;
mod failures;
mod form;
mod hints;
mod join;
mod lately;
pub(crate) mod operator;
mod paces;
mod ports;
mod probes;
mod recover;
mod regroup;
mod replan;
mod rhythms;
mod session;
mod slowness;
mod status;
mod sums;
mod telemetry;
mod trace;
mod turns;
mod verdicts;

pub use direct::Directly;

#[cfg(test)]
mod tests;

pub use aggregation::Terms;
pub use change::ReorderError;
use communicator::Communicator;
pub use decisions::{Changed, Counts, Decision, Noticed, Outcome, Trigger};
use harmonaize_api::v1::{self, FailureKind, from_agent, to_agent};
use harmonaize_disclose::Tariff;
use harmonaize_planner::{Estimates, HostId, Topology};
use harmonaize_store::Change;
use join::Waiting;
pub use operator::{Instruction, InstructionError};
use ports::Ports;
use rand::SeedableRng;
use rand_chacha::ChaCha20Rng;
use session::Session;
use status::{Ended, Question};
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
    /// Keep this; then [`State::carry_out`] or [`State::not_kept`].
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
    /// A communicator's next operation is held back once, so that it comes to take turns with others.
    Held { communicator: u64, tenant: String, name: String, hold: Duration, reason: String },
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
    pub direct: BTreeMap<String, Directly>,
    /// What tenants have of aggregators, where that is another than usual.
    pub terms: BTreeMap<String, Terms>,
    /// The largest weight that a tenant can have promised.
    pub most_weight: u32,
    /// How long a communicator that failed, and what was promised for it, are kept at most for its members to regroup.
    pub longest_regroup: Duration,
    /// What promises cost.
    pub tariff: Tariff,
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
    ports: Ports,
    ended: VecDeque<Ended>,
    errors: u64,
    tenant_errors: BTreeMap<String, u64>,
    questions: BTreeMap<u64, Question>,
    asked: u64,
    telemetry: telemetry::Telemetry,
    traces: trace::Traces,
    verdicts: verdicts::Verdicts,
    failures: failures::Failures,
    probes: probes::Probes,
    estimates: Estimates,
    rhythms: BTreeMap<u64, rhythms::Operations>,
    /// When it was last looked at who may take turns.
    staggered: Duration,
    turns: turns::AllTurns,
    decisions: decisions::Decisions,
    wanted: replan::Wanted,
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
        let ports = Ports::new(settings.source_ports);
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
            ports,
            ended: VecDeque::new(),
            errors: 0,
            tenant_errors: BTreeMap::new(),
            questions: BTreeMap::new(),
            asked: 0,
            telemetry: telemetry::Telemetry::default(),
            traces: trace::Traces::default(),
            verdicts: verdicts::Verdicts::default(),
            failures: failures::Failures::default(),
            probes: probes::Probes::default(),
            estimates: Estimates::default(),
            rhythms: BTreeMap::new(),
            staggered: Duration::ZERO,
            turns: turns::AllTurns::default(),
            decisions: decisions::Decisions::default(),
            wanted: replan::Wanted::default(),
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
            Message::PathCongestion(told) => self.path_congestion(now, from, told),
            Message::PathsTraced(answer) => self.traced(now, from, &answer),
            Message::PathProbed(answer) => {
                self.probed(now, from, &answer);
                self.prove_waiting(now);
            }
            Message::SetBudget(said) => return self.set_budget(now, from, &said),
            Message::ReadEvents(asked) => return self.read_events(now, from, asked),
            Message::Negotiate(asked) => self.negotiate(now, from, asked),
            Message::BeginIteration(asked) => self.begin_iteration(now, from, &asked),
            Message::Hint(asked) => self.hint(now, from, &asked),
            Message::TurnWanted(wanted) => return self.turn_wanted(now, from, wanted),
            Message::TurnDone(done) => return self.turn_done(now, from, done),
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
            self.trace_deadline(),
            self.probes.deadline(),
            self.plan_deadline(),
            self.aggregation_deadline(),
            self.events_deadline(),
            self.regroups_deadline(),
            self.agreements_deadline(),
            self.turns.deadline(),
        ];
        waiting.chain(communicators).chain(questions).chain(plans.into_iter().flatten()).min()
    }

    /// Ends what has waited long enough.
    pub fn expire(&mut self, now: Duration) {
        self.expire_joins(now);
        self.expire_regroups(now);
        self.expire_communicators(now);
        self.expire_questions(now);
        self.expire_aggregations(now);
        self.look_at_windows(now);
        self.expire_traces(now);
        self.prove_waiting(now);
        self.expire_plans(now);
        self.expire_agreements(now);
        self.expire_turns(now);
        self.act(now);
        self.expire_events(now);
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
