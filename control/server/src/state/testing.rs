//! What the tests of this crate read of the state machine. It also has the steps that they take past its
//! messages. It exists only with the feature `testing`.

use super::Controller;
use super::ctx::ctx;
use super::job::coding::{choose_coding, coded_outcome, zeros_outcome};
use super::job::communicator::Communicator;
use super::job::decisions::Trigger;
use super::job::lifecycle::EpochConfig;
use super::job::planning::{checked, jobs};
use super::job::reconcile::proposer::proposer;
use super::job::reconcile::reorder;
use super::job::stored::{plan_change, touched};
use super::output::{Output, SessionId};
use super::settings::Settings;
use super::view::view;
use super::world::link_state::answers::MOST_STRANGE;
use super::world::link_state::ports::pair_of;
use harmonaize_abi::{CommunicatorId, Epoch, Nanos};
use harmonaize_api::v1;
use harmonaize_codec::Codec;
use harmonaize_disclose::{Fact, Feed};
use harmonaize_planner::{
    AggregationReason, AlgorithmChoice, Bytes, CodecReason, DirectedLink, Discipline, HostId, LinkId, Rate,
    RateLimits,
};
use harmonaize_store::Change;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The most addresses of unknown switches that are reported.
pub const MOST_UNKNOWN_HOPS: usize = MOST_STRANGE;

/// A communicator as it stands.
#[derive(Clone, Debug)]
pub struct CommunicatorView {
    /// The tenant that owns it.
    pub tenant: String,
    /// The name that the tenant gave it.
    pub name: String,
    /// The number of its ranks.
    pub ranks: u32,
    /// Its participants; indices are the same in every epoch.
    pub members: Vec<MemberView>,
    /// Whether an operator chose the order.
    pub pinned: bool,
    /// The bytes of a chunk.
    pub chunk: Bytes,
    /// How many changes of its plan are remembered.
    pub changes: usize,
    /// What it runs by; none while the first epoch is prepared.
    pub current: Option<EpochView>,
    /// What it is about to run by.
    pub next: Option<EpochView>,
}

/// A participant.
#[derive(Clone, Debug)]
pub struct MemberView {
    /// The host that it runs on.
    pub host: HostId,
    /// The session of its agent; none while control waits for it.
    pub session: Option<SessionId>,
    /// The ranks that it has, ascending.
    pub ranks: Vec<u32>,
    /// The ranks that have left.
    pub departed: BTreeSet<u32>,
    /// Whether it takes no part any more.
    pub closed: bool,
}

/// What a communicator runs by in one epoch.
#[derive(Clone, Debug)]
pub struct EpochView {
    /// The number of the epoch; the first is 1.
    pub epoch: Epoch,
    /// The participants along the ring.
    pub order: Vec<u32>,
    /// The source ports that its connections hold, by connecting host.
    pub ports: Vec<(HostId, u16)>,
    /// The source ports of each link between two participants, the lower first.
    pub links: BTreeMap<(u32, u32), Vec<u16>>,
    /// The participants whose links go over TCP alone.
    pub over_tcp: BTreeSet<u32>,
    /// What each host sends to the next, as planned; none where it was not planned.
    pub share: Option<Rate>,
    /// What the plan holds links to.
    pub planned_limit: Option<Rate>,
    /// The rate limits of its connections.
    pub rate_limits: RateLimits,
    /// The codec of its tensors.
    pub codec: Codec,
    /// Why that codec.
    pub codec_reason: CodecReason,
    /// The algorithm of operations, by size.
    pub algorithm: AlgorithmChoice,
    /// Why an aggregator sums, or none does.
    pub aggregation_reason: AggregationReason,
}

/// A source port whose way agents trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortView {
    /// The source port.
    pub port: u16,
    /// Whether the way from the connecting end is known.
    pub traced: bool,
    /// Whether packets come back the way they went.
    pub symmetric: bool,
}

impl From<&Communicator> for CommunicatorView {
    fn from(known: &Communicator) -> Self {
        let members = known.members.iter().map(|member| MemberView {
            host: member.host,
            session: member.session,
            ranks: member.ranks.clone(),
            departed: member.departed.clone(),
            closed: member.closed,
        });
        Self {
            tenant: known.tenant.clone(),
            name: known.name.clone(),
            ranks: known.ranks,
            members: members.collect(),
            pinned: known.pinned,
            chunk: known.tuning.chunk,
            changes: known.changes.len(),
            current: known.current().map(EpochView::from),
            next: known.change().map(|change| EpochView::from(&change.to)),
        }
    }
}

impl CommunicatorView {
    /// Whether a rank is in it and has not left.
    pub fn holds(&self, rank: u32) -> bool {
        let has = |member: &MemberView| member.ranks.contains(&rank) && !member.departed.contains(&rank);
        self.members.iter().any(|member| has(member) && !member.closed)
    }
}

impl From<&EpochConfig> for EpochView {
    fn from(config: &EpochConfig) -> Self {
        Self {
            epoch: config.epoch,
            order: config.order.clone(),
            ports: config.ports.clone(),
            links: config.links.clone(),
            over_tcp: config.over_tcp.clone(),
            share: config.plan.as_ref().map(|plan| plan.share),
            planned_limit: config.plan.as_ref().and_then(|plan| plan.pace),
            rate_limits: config.rate_limits,
            codec: config.codec.codec,
            codec_reason: config.codec.reason,
            algorithm: config.algorithm.clone(),
            aggregation_reason: config.aggregation.reason.clone(),
        }
    }
}

/// Returns the communicator whose stored plan an output outdates.
pub fn outdated_plan(output: &Output) -> Option<CommunicatorId> {
    touched(output)
}

/// What tests read of control, and the steps that they take past its messages.
pub trait Testing {
    /// Returns what is read.
    fn controller(&self) -> &Controller;

    /// Returns what is changed.
    fn controller_mut(&mut self) -> &mut Controller;

    /// Returns the ids of all communicators, ascending.
    fn communicator_ids(&self) -> Vec<CommunicatorId> {
        self.controller().communicators.keys().copied().collect()
    }

    /// Returns a communicator as it stands.
    fn communicator_view(&self, id: CommunicatorId) -> Option<CommunicatorView> {
        self.controller().communicators.get(&id).map(CommunicatorView::from)
    }

    /// Returns how many communicators count against a tenant's limit.
    fn tenant_communicators(&self, tenant: &str) -> usize {
        self.controller().regroups.communicators_of(
            &ctx!(self.controller(), Duration::ZERO),
            &self.controller().joins,
            tenant,
            "",
        )
    }

    /// Returns all open sessions of hosts' agents.
    fn open_sessions(&self) -> Vec<SessionId> {
        self.controller().sessions.keys().copied().collect()
    }

    /// Returns the session of a host's agent.
    fn session_of(&self, host: HostId) -> Option<SessionId> {
        self.controller().hosts.get(&host).copied()
    }

    /// Returns the requests of a session's open joins.
    fn open_joins(&self, session: SessionId) -> BTreeSet<u64> {
        self.controller()
            .sessions
            .get(&session)
            .into_iter()
            .flat_map(|known| known.joins.keys().copied())
            .collect()
    }

    /// Returns how many ranks have joined each communicator that waits for more.
    fn waiting_ranks(&self) -> Vec<usize> {
        self.controller().joins.waiting().values().map(|waiting| waiting.joined.len()).collect()
    }

    /// Returns how many processes wait to regroup.
    fn regrouping_processes(&self) -> usize {
        self.controller().regroups.processes()
    }

    /// Returns how many ranks have called a split that waits for others.
    fn splitting_ranks(&self) -> usize {
        self.controller().splits.ranks()
    }

    /// Whether nothing is kept of communicators that failed.
    fn keeps_no_past(&self) -> bool {
        self.controller().regroups.past.is_empty()
    }

    /// Returns how many questions to agents are open.
    fn open_questions(&self) -> usize {
        self.controller().questions.len()
    }

    /// Returns the links that are thought to be congested or to have failed.
    fn congested_links(&self) -> Vec<DirectedLink> {
        self.controller().link_state.estimates().map(|(link, _)| link).collect()
    }

    /// Returns the links that are thought to have failed.
    fn failed_links(&self) -> BTreeSet<LinkId> {
        self.controller().link_state.failed_links()
    }

    /// Returns how many congestion reports trains of packets have shown to be right, and wrong.
    fn verified_reports(&self) -> (u64, u64) {
        self.controller().link_state.reports.suspicions()
    }

    /// Returns what a host's congestion reports came to: taken, dropped as too many, refused as wrong.
    fn report_counts(&self, host: &str) -> (u64, u64, u64) {
        self.controller()
            .settings
            .topology
            .host(host)
            .map_or((0, 0, 0), |host| self.controller().link_state.reports.counts(host))
    }

    /// Returns the traced source ports between two hosts.
    fn ports_between(&self, one: HostId, other: HostId) -> Vec<PortView> {
        let pool = self.controller().link_state.ports.pool_of(pair_of(one, other));
        pool.map(|(port, known)| PortView {
            port,
            traced: known.there.is_some(),
            symmetric: known.is_symmetric(),
        })
        .collect()
    }

    /// Returns the traced source ports that connections hold, by connecting host.
    fn reserved_ports(&self) -> BTreeSet<(HostId, u16)> {
        let ports = &self.controller().link_state.ports;
        let of_pair = |pair| {
            let held = ports.pool_of(pair).filter(move |(port, _)| ports.in_use(pair, *port));
            held.map(move |(port, _)| (pair.0, port))
        };
        ports.pairs().flat_map(of_pair).collect()
    }

    /// Returns how many paths from one host to another are known.
    fn known_paths(&self, from: HostId, to: HostId) -> usize {
        self.controller().link_state.ports.paths().get(&(from, to)).map_or(0, Vec::len)
    }

    /// Returns the rate that is promised for a communicator.
    fn promised_rate(&self, id: CommunicatorId) -> Rate {
        self.controller().agreements.promised(id)
    }

    /// Whether some communicators take turns.
    fn is_interleaved(&self) -> bool {
        !self.controller().turns.is_empty()
    }

    /// Has turns go by that discipline from now on.
    fn serve_turns_by(&mut self, discipline: Discipline) {
        self.controller_mut().turns.discipline = discipline;
    }

    /// Whether an operation waited so long for its turn that its times say nothing of links and ranks.
    fn was_delayed(&self, operation: &v1::Operation) -> bool {
        self.controller().turns.delayed(operation)
    }

    /// Returns what a host's agent has reported.
    fn telemetry_of(&self, now: Duration, host: HostId) -> v1::HostTelemetry {
        self.controller().queries(now).host_telemetry(host)
    }

    /// Returns how much slower all is predicted to be than on an idle fabric. There is none where no plan
    /// passes the check.
    fn predicted_slowdown(&self, now: Duration) -> Option<f64> {
        let view = view!(self.controller(), now);
        let checked = checked(
            &self.controller().settings.topology,
            &self.controller().link_state,
            &jobs(&view),
            &view.conditions(),
        );
        checked.ok().map(|plan| plan.before.slowdown)
    }

    /// Returns the codec that is best for a communicator now, and why.
    fn best_codec(&self, now: Duration, id: CommunicatorId) -> (Codec, CodecReason) {
        let current = self.controller().communicators.get(&id).and_then(Communicator::current);
        let choice = choose_coding(
            &view!(self.controller(), now),
            id,
            current.and_then(|current| current.plan.as_ref()),
        );
        (choice.codec, choice.reason)
    }

    /// Returns what the operator decided, to be changed.
    fn settings_mut(&mut self) -> &mut Settings {
        &mut self.controller_mut().settings
    }

    /// Returns a tenant's feed.
    fn feed_of(&mut self, tenant: &str) -> &mut Feed {
        self.controller_mut().events.feed(tenant)
    }

    /// Returns all facts that went into feeds: what tenants would see if nothing stood between.
    fn noted_facts(&mut self) -> &mut Vec<(Duration, CommunicatorId, Fact)> {
        &mut self.controller_mut().events.facts
    }

    /// Takes in who holds communicators up, as a host's agent finds.
    fn take_stragglers(&mut self, now: Duration, host: HostId, found: Vec<v1::Straggler>) {
        let control = self.controller_mut();
        control.telemetry.take_stragglers(&ctx!(control, now), &mut control.outbox, host, found);
        control.settle(now);
    }

    /// Takes in what an agent reports of an operation.
    fn take_operation(&mut self, now: Duration, from: SessionId, operation: &v1::Operation) {
        let control = self.controller_mut();
        control.record_operation(now, from, operation);
        control.settle(now);
    }

    /// Takes in what an agent reports of an operation that has not ended.
    fn take_open_operation(&mut self, now: Duration, at: Nanos, operation: &v1::Operation) {
        let control = self.controller_mut();
        control.agreements.watch_open(&ctx!(control, now), &mut control.outbox, at, operation);
        control.settle(now);
    }

    /// Takes in what an operation lost by its codec.
    fn take_coded(&mut self, now: Duration, operation: &v1::Operation) {
        let control = self.controller_mut();
        let outcome = coded_outcome(&ctx!(control, now), operation);
        control.learn_codec(now, CommunicatorId(operation.communicator), outcome);
        control.settle(now);
    }

    /// Takes in how many zeros an operation had.
    fn take_zeros(&mut self, now: Duration, operation: &v1::Operation) {
        let control = self.controller_mut();
        let outcome = zeros_outcome(&ctx!(control, now), operation);
        control.learn_codec(now, CommunicatorId(operation.communicator), outcome);
        control.settle(now);
    }

    /// Returns what is to be stored of a communicator's plans now.
    fn plan_change(&self, id: CommunicatorId) -> Change {
        let control = self.controller();
        plan_change(&control.settings, &control.communicators, id)
    }

    /// Returns plans of communicators that did not come back in time, and forgets them.
    fn lost_plans(&mut self, now: Duration) -> Vec<CommunicatorId> {
        self.controller_mut().operator.lost_plans(now)
    }

    /// Returns what is to be removed from the store of windows that are over.
    fn expired_withdrawals<'a>(
        &self,
        now: Duration,
        waiting: impl Iterator<Item = &'a Change>,
    ) -> Vec<Change> {
        self.controller().operator.expired(now, waiting)
    }

    /// Makes a plan, if the last is long enough ago.
    fn plan_now(&mut self, now: Duration) {
        let control = self.controller_mut();
        control.outbox.want_plan(Trigger::Faded);
        control.act(now);
    }

    /// Proposes an epoch with another order to a communicator's agents.
    fn propose_order(&mut self, now: Duration, id: CommunicatorId, order: Vec<u32>) -> Option<Epoch> {
        let control = self.controller_mut();
        let pinned = control.communicators.get(&id)?.pinned;
        let epoch = reorder(&mut proposer!(control, now), id, order);
        control.communicators.get_mut(&id)?.pinned = pinned;
        epoch
    }

    /// Has what was agreed on for one communicator hold for another.
    fn pass_agreement(&mut self, now: Duration, before: CommunicatorId, id: CommunicatorId) {
        let control = self.controller_mut();
        control.take_over_agreement(now, before, id);
        control.settle(now);
    }

    /// Takes away what is kept of the agreement of a communicator that failed, in words.
    fn take_agreement(&mut self, id: CommunicatorId) -> Option<String> {
        self.controller_mut().regroups.past.take_agreement(id).map(|left| format!("{left:?}"))
    }

    /// Forgets the ports of a communicator, as after a restart without a store.
    fn forget_ports(&mut self, id: CommunicatorId) {
        let control = self.controller_mut();
        let known = control.communicators.get_mut(&id).and_then(|known| known.lifecycle.current_mut());
        if let Some(current) = known {
            current.links.clear();
            control.link_state.ports.release(&mut current.ports);
        }
    }
}

impl Testing for Controller {
    fn controller(&self) -> &Controller {
        self
    }

    fn controller_mut(&mut self) -> &mut Controller {
        self
    }
}
