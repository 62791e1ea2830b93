//! The agent's control plane: what tenants ask, what control decides, and what the engine reports, brought together.
//!
//! One task owns all of it and never waits for anyone: every answer arrives as a message.

mod handover;
mod prepare;

pub use handover::AgentImage;
pub use prepare::{Check, Checked};

use crate::coding;
use crate::control::Event;
use crate::counters::{Counted, Counters};
use crate::engines::{Engines, Thread};
use crate::interleave::read_interleaving;
use crate::paths::Paths;
use crate::questions::Questions;
use crate::recipe::VerifiedPlans;
use crate::report;
use crate::session::{
    AttachmentId, Joined, LinkGrant, LinkNeeds, ProcessUsage, SessionRequest, TenantLimits,
};
use crate::telemetry;
use harmonaize_abi::session::{Budget, FailureDetail, JoinRefusal, JoinRefused, Regrouping};
use harmonaize_abi::{CommunicatorHandle, Rank};
use harmonaize_api::v1::{self, from_agent};
use harmonaize_core::Failure;
use harmonaize_engine::{Command, CommunicatorId, Epoch, Notice, PanicScope, SlotId};
use harmonaize_plan::Participant;
use harmonaize_transport::Flow;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};

type JoinReply = oneshot::Sender<Result<Joined, JoinRefused>>;
type RegionReply = oneshot::Sender<bool>;
type DetailReply = oneshot::Sender<Option<FailureDetail>>;

/// However often control wants to hear what was measured, no more often than this.
const MIN_REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// How long control's word that a communicator ended waits for the peers' own.
const DISSOLVE_GRACE: Duration = Duration::from_secs(1);

/// Messages to control that are left for what the engine notices; tenants' requests find no room in them.
const RESERVE: usize = 512;

/// Messages to control that wait for room at most, beside those that its queue has.
const MAX_UNSENT: usize = 1 << 16;

/// Operator-facing errors that are kept for status.
const MAX_RECENT_ERRORS: usize = 16;

/// A tenant's process.
#[derive(Debug)]
struct Attachment {
    tenant: String,
    limits: TenantLimits,
    thread: Thread,
    /// Whether its tensors are mapped here.
    mapped: bool,
    /// Handle to communicator and rank.
    joined: HashMap<CommunicatorHandle, (CommunicatorId, Rank)>,
    next_handle: CommunicatorHandle,
}

/// A join that control has not answered.
#[derive(Debug)]
struct PendingJoin {
    attachment: AttachmentId,
    /// None if control says which.
    rank: Option<Rank>,
    reply: JoinReply,
}

/// A local rank of a communicator.
#[derive(Debug)]
struct LocalMember {
    attachment: AttachmentId,
    rank: Rank,
    handle: CommunicatorHandle,
    /// The tenant waits for it still.
    reply: Option<JoinReply>,
}

/// A communicator that this agent takes part in, or did while a tenant may still ask why it ended.
#[derive(Debug)]
struct Communicator {
    /// Of its epoch it has the number, and whose links go over TCP alone.
    recipe: v1::Recipe,
    /// Of an epoch under way: whose links go over TCP alone.
    change_over_tcp: Option<(u64, Vec<u32>)>,
    /// That of its tenant's attachments when it formed.
    thread: Thread,
    members: Vec<LocalMember>,
    ended: Option<FailureDetail>,
    /// Those of its tenant, and what its links have of them; none where nobody of it is attached any more.
    limits: Option<TenantLimits>,
    granted: Option<LinkGrant>,
    /// What links of one epoch need, and staging.
    needs: LinkNeeds,
    /// Asked before the end was known here.
    detail_requests: Vec<(Rank, DetailReply)>,
}

/// See the module's documentation.
pub struct Agent {
    engines: Engines,
    control: mpsc::Sender<from_agent::Message>,
    /// Those for which control's queue has no room yet, in order.
    unsent: VecDeque<from_agent::Message>,
    counters: Counters,
    telemetry: telemetry::Handle,
    paths: Paths,
    attachments: HashMap<AttachmentId, Attachment>,
    /// Regions that come to attachments or go, by their offsets there.
    pending_regions: HashMap<(u64, u64), RegionReply>,
    pending_joins: BTreeMap<u64, PendingJoin>,
    next_request: u64,
    communicators: HashMap<CommunicatorId, Communicator>,
    /// The engine knows tenants by their places here.
    tenants: Vec<String>,
    questions: Questions,
    verified: VerifiedPlans,
    /// Communicator and epoch of the recipe that is being checked, and whether links go over RDMA by it.
    checking: Option<(CommunicatorId, Epoch, bool)>,
    start: Instant,
    errors: u64,
    recent: Vec<String>,
    stopping: bool,
    /// Communicators that control has ended, kept a moment for the reason that peers give.
    dissolving: Vec<(Instant, CommunicatorId, Failure, String)>,
}

impl Agent {
    /// An agent whose engine's threads run, and whose messages to control go into `control`. Telemetry hears whose flows are, and `paths`
    /// what control asks of routes.
    pub fn new(
        engines: Engines,
        control: mpsc::Sender<from_agent::Message>,
        telemetry: telemetry::Handle,
        paths: Paths,
        counters: Counters,
    ) -> Self {
        Self {
            engines,
            control,
            unsent: VecDeque::new(),
            counters,
            telemetry,
            paths,
            attachments: HashMap::new(),
            pending_regions: HashMap::new(),
            pending_joins: BTreeMap::new(),
            next_request: 1,
            communicators: HashMap::new(),
            tenants: Vec::new(),
            questions: Questions::default(),
            verified: VerifiedPlans::default(),
            checking: None,
            start: Instant::now(),
            errors: 0,
            recent: Vec::new(),
            stopping: false,
            dissolving: Vec::new(),
        }
    }

    fn send_to_control(&mut self, message: from_agent::Message) {
        if self.unsent.len() >= MAX_UNSENT {
            self.counters.add(Counted::MessageLost);
            return self.note("control does not keep up; a message was dropped".into());
        }
        self.unsent.push_back(message);
        let before = self.unsent.len();
        self.flush_to_control();
        if self.unsent.len() == before {
            self.counters.add(Counted::MessageLate);
        }
    }

    fn flush_to_control(&mut self) {
        while let Some(message) = self.unsent.pop_front() {
            match self.control.try_send(message) {
                Ok(()) => {}
                Err(TrySendError::Full(message)) => return self.unsent.push_front(message),
                // The session's task ends with the agent alone.
                Err(TrySendError::Closed(_)) => self.counters.add(Counted::MessageLost),
            }
        }
    }

    /// Gives engine and control what waits for room there.
    pub fn flush(&mut self) {
        self.engines.flush();
        self.flush_to_control();
    }

    /// Whether something waits for room at the engine or control: [`Agent::flush`] is to be called before long.
    pub fn is_late(&self) -> bool {
        self.engines.is_late() || !self.unsent.is_empty()
    }

    /// Gives the thread of a communicator a command about it. No thread has anything of a communicator that the agent
    /// does not know.
    fn command_of(&mut self, communicator: CommunicatorId, command: Command) {
        if let Some(thread) = self.communicators.get(&communicator).map(|known| known.thread) {
            self.try_command(thread, command);
        }
    }

    /// Gives a thread of the engine a command; whether it took it.
    fn try_command(&mut self, thread: Thread, command: Command) -> bool {
        let taken = self.engines.command(thread, command);
        self.note_taken(taken)
    }

    fn note_taken(&mut self, taken: bool) -> bool {
        if !taken && !self.stopping {
            self.note("a thread of the engine has stopped; a command was dropped".into());
        }
        taken
    }

    /// Whether engine and control take what a tenant's request leads to. Where they do not, what asks something of control is to wait.
    pub fn has_room(&self) -> bool {
        !self.is_late() && self.control.capacity() > RESERVE
    }

    /// Whether the engine takes what a tenant's request leads to. Where it does not, all requests are to wait.
    pub fn accepts_requests(&self) -> bool {
        !self.engines.is_late()
    }

    /// Returns the tenant of an attachment that has not ended.
    pub(crate) fn tenant_of(&self, attachment: AttachmentId) -> Option<&str> {
        self.attachments.get(&attachment).map(|attached| attached.tenant.as_str())
    }

    /// Refuses a request because too many wait for control already.
    pub(crate) fn refuse_request(&self, request: SessionRequest) {
        // With its reply dropped, a question is answered as where control is away.
        if let SessionRequest::Join { reply, .. }
        | SessionRequest::Regroup { reply, .. }
        | SessionRequest::Split { reply, .. } = request
        {
            refuse(reply, JoinRefusal::Unavailable, Vec::new(), UNAVAILABLE);
        }
    }

    /// Whether what control says is taken in: the engine keeps up, and no recipe is being checked.
    pub fn listens(&self) -> bool {
        !self.engines.is_late() && !self.is_checking()
    }

    /// Keeps an error for the operator's status, and logs it.
    pub fn note(&mut self, error: String) {
        tracing::warn!("{error}");
        self.keep_error(error);
    }

    /// The same of an error that a tenant's doing may be the cause of: its lines are bounded.
    fn note_of(&mut self, limits: Option<&TenantLimits>, error: String) {
        match limits {
            Some(limits) => limits.log(|| tracing::warn!("{error}")),
            None => tracing::warn!("{error}"),
        }
        self.keep_error(error);
    }

    fn keep_error(&mut self, error: String) {
        self.errors += 1;
        if self.recent.len() == MAX_RECENT_ERRORS {
            self.recent.remove(0);
        }
        self.recent.push(error);
    }

    /// Takes in what a tenant's process wants. If that panics, the process's attachment ends, and nothing else.
    pub fn handle_request(&mut self, request: SessionRequest) {
        let attachment = request.attachment();
        if catch_unwind(AssertUnwindSafe(|| self.dispatch(request))).is_ok() {
            return;
        }
        self.counters.add(Counted::SessionPanic);
        tracing::error!(%attachment, "a request panicked; its attachment ends");
        if catch_unwind(AssertUnwindSafe(|| self.handle_detached(attachment))).is_err() {
            tracing::error!(%attachment, "its end panicked, too");
        }
    }

    fn dispatch(&mut self, request: SessionRequest) {
        match request {
            SessionRequest::Attached { attachment, tenant, end, operation_timeout, limits } => {
                let (thread, mapped) = (self.engines.place(&tenant), end.memory().is_some());
                let attached = Attachment {
                    tenant,
                    limits,
                    thread,
                    mapped,
                    joined: HashMap::new(),
                    next_handle: CommunicatorHandle(1),
                };
                self.attachments.insert(attachment, attached);
                let attachment = engine_id(attachment);
                self.try_command(thread, Command::Attach { attachment, end, operation_timeout });
            }
            SessionRequest::AddRegion { attachment, base, memory, reply } => {
                let command = Command::AddRegion { attachment: engine_id(attachment), base, memory };
                self.region((attachment, base), reply, command);
            }
            SessionRequest::RemoveRegion { attachment, base, reply } => {
                let command = Command::RemoveRegion { attachment: engine_id(attachment), base };
                self.region((attachment, base), reply, command);
            }
            SessionRequest::Join { attachment, name, rank, ranks, timeout, budget, reply } => {
                let Some(tenant) = self.attachments.get(&attachment).map(|a| a.tenant.clone()) else {
                    return;
                };
                let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
                let (rank, budget) = (rank.0, coding::to_control(&budget));
                let join = v1::Join {
                    tenant,
                    communicator: name,
                    rank,
                    ranks,
                    timeout_ns,
                    budget,
                    ..v1::Join::default()
                };
                self.join(attachment, join, reply);
            }
            SessionRequest::Regroup { attachment, who, key, min_ranks: least, timeout, reply } => {
                let Some((tenant, name, communicator, member)) = self.regrouping(attachment, who) else {
                    return refuse(reply, JoinRefusal::Unavailable, Vec::new(), FORGOTTEN);
                };
                let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
                let regroup = Some(v1::Regroup {
                    communicator: communicator.0,
                    previous_rank: member,
                    key,
                    min_ranks: least,
                });
                let join =
                    v1::Join { tenant, communicator: name, timeout_ns, regroup, ..v1::Join::default() };
                self.join(attachment, join, reply);
            }
            SessionRequest::Split { attachment, communicator: handle, color, key, timeout, reply } => {
                let who = Regrouping::Member { communicator: handle.0 };
                let Some((tenant, name, communicator, rank)) = self.regrouping(attachment, who) else {
                    return refuse(reply, JoinRefusal::Over, Vec::new(), FORGOTTEN);
                };
                let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
                let split = Some(v1::Split { communicator: communicator.0, rank, color, key });
                let join = v1::Join { tenant, communicator: name, timeout_ns, split, ..v1::Join::default() };
                self.join(attachment, join, reply);
            }
            SessionRequest::SetBudget { attachment, communicator, budget } => {
                self.set_budget(attachment, communicator, &budget);
            }
            SessionRequest::Leave { attachment, communicator } => {
                let Some(attached) = self.attachments.get_mut(&attachment) else { return };
                if let Some((communicator, rank)) = attached.joined.remove(&communicator) {
                    self.leave(communicator, rank);
                }
            }
            SessionRequest::Abort { attachment, communicator } => self.abort(attachment, communicator),
            SessionRequest::Detail { attachment, communicator, reply } => {
                self.detail(attachment, communicator, reply);
            }
            SessionRequest::Ask { attachment, question } => {
                self.cancel_abandoned();
                let Some(attached) = self.attachments.get(&attachment) else { return };
                if let Some(message) = self.questions.ask(&attached.tenant, question) {
                    self.send_to_control(message);
                }
            }
            SessionRequest::Detached { attachment } => self.handle_detached(attachment),
        }
    }

    fn join(&mut self, attachment: AttachmentId, join: v1::Join, reply: JoinReply) {
        if self.stopping {
            return refuse(reply, JoinRefusal::Unavailable, Vec::new(), UNAVAILABLE);
        }
        #[cfg(test)]
        assert_ne!(join.communicator, "panics", "a fault of the test's");
        let request = self.next_request;
        self.next_request += 1;
        let rank = (join.regroup.is_none() && join.split.is_none()).then_some(Rank(join.rank));
        self.pending_joins.insert(request, PendingJoin { attachment, rank, reply });
        let usage = self.attachments.get(&attachment).map(|at| at.limits.process_usage());
        let ProcessUsage { tensor_bytes, ring_entries, descriptors: process_descriptors } =
            usage.unwrap_or_default();
        let join = v1::Join { request, tensor_bytes, ring_entries, process_descriptors, ..join };
        self.send_to_control(from_agent::Message::Join(join));
    }

    /// Who regroups, for control: the tenant, and its name for the communicator. Of a member also which one it is of, and its rank there.
    fn regrouping(
        &self,
        attachment: AttachmentId,
        who: Regrouping,
    ) -> Option<(String, String, CommunicatorId, u32)> {
        let attached = self.attachments.get(&attachment)?;
        match who {
            Regrouping::Newcomer { name } => Some((attached.tenant.clone(), name, CommunicatorId(0), 0)),
            Regrouping::Member { communicator } => {
                let (id, Rank(rank)) = *attached.joined.get(&CommunicatorHandle(communicator))?;
                let name = self.communicators.get(&id)?.recipe.name.clone();
                Some((attached.tenant.clone(), name, id, rank))
            }
        }
    }

    fn set_budget(&mut self, attachment: AttachmentId, handle: CommunicatorHandle, budget: &Budget) {
        let joined = self.attachments.get(&attachment).and_then(|a| a.joined.get(&handle)).copied();
        let Some((CommunicatorId(communicator), Rank(rank))) = joined else { return };
        let budget = coding::to_control(budget);
        self.send_to_control(from_agent::Message::SetBudget(v1::SetBudget { communicator, rank, budget }));
    }

    /// Has the engine add a region or remove it. What the engine does not take is not answered.
    fn region(&mut self, (attachment, base): (AttachmentId, u64), reply: RegionReply, command: Command) {
        let Some(thread) = self.attachments.get(&attachment).map(|attached| attached.thread) else { return };
        if self.try_command(thread, command) {
            self.pending_regions.insert((attachment.0, base), reply);
        }
    }

    fn leave(&mut self, id: CommunicatorId, rank: Rank) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        communicator.members.retain(|member| member.rank != rank);
        let (over, empty) = (communicator.ended.is_some(), communicator.members.is_empty());
        let thread = communicator.thread;
        if over && empty {
            self.communicators.remove(&id);
        }
        self.try_command(thread, Command::Leave { communicator: id, rank });
        // Control wants to know even if it is over: the rank is not expected to go on with the others.
        self.send_to_control(from_agent::Message::Leave(v1::Leave {
            communicator: id.0,
            rank: rank.0,
            request: 0,
        }));
    }

    fn abort(&mut self, attachment: AttachmentId, handle: CommunicatorHandle) {
        let joined = self.attachments.get(&attachment).and_then(|a| a.joined.get(&handle)).copied();
        let Some((id, rank)) = joined else { return };
        if let Some(attached) = self.attachments.get(&attachment) {
            attached
                .limits
                .log(|| tracing::info!(communicator = %format_args!("{id:016x}"), %rank, "aborted"));
        }
        let failure = Failure::Aborted { rank };
        self.command_of(id, Command::Dissolve { communicator: id, failure });
    }

    fn detail(&mut self, attachment: AttachmentId, handle: CommunicatorHandle, reply: DetailReply) {
        let joined = self.attachments.get(&attachment).and_then(|a| a.joined.get(&handle)).copied();
        let Some((id, rank)) = joined else { return drop(reply.send(None)) };
        match self.communicators.get_mut(&id) {
            Some(communicator) => match &communicator.ended {
                Some(detail) => drop(reply.send(Some(detail.clone()))),
                // The tenant's completion can overtake the engine's notice.
                None => communicator.detail_requests.push((rank, reply)),
            },
            None => drop(reply.send(None)),
        }
    }

    /// Has control forget the questions of processes that went away. Control keeps those of processes that this agent's
    /// end detaches, which come back.
    fn cancel_abandoned(&mut self) {
        if !self.stopping {
            self.questions.abandoned().into_iter().for_each(|message| self.send_to_control(message));
        }
    }

    fn handle_detached(&mut self, attachment: AttachmentId) {
        self.cancel_abandoned();
        let Some(attached) = self.attachments.remove(&attachment) else { return };
        // The engine sees the end first: with an operation in flight its ranks are lost, not leaving.
        self.try_command(attached.thread, Command::Detach { attachment: engine_id(attachment) });
        self.engines.release(&attached.tenant);
        for (_, (communicator, rank)) in attached.joined {
            self.leave(communicator, rank);
        }
        let gone: Vec<u64> = self
            .pending_joins
            .iter()
            .filter(|(_, w)| w.attachment == attachment)
            .map(|(request, _)| *request)
            .collect();
        for request in gone {
            if let Some(waiting) = self.pending_joins.remove(&request) {
                let rank = waiting.rank.map_or(0, |rank| rank.0);
                self.send_to_control(from_agent::Message::Leave(v1::Leave {
                    communicator: 0,
                    rank,
                    request,
                }));
            }
        }
    }

    /// Takes in what control says. A recipe is to be checked first: until [`Agent::handle_checked`], all else that control says waits.
    pub fn handle_control(&mut self, event: Event) -> Option<Check> {
        match event {
            Event::Form(recipe) => return Some(self.check(recipe, true)),
            Event::Change(recipe) => return Some(self.check(recipe, false)),
            Event::Ready { communicator, epoch } => self.handle_ready(communicator, epoch),
            Event::Abandon(abandon) => {
                if let Ok(epoch) = Epoch::from_wire(abandon.epoch) {
                    let communicator = CommunicatorId(abandon.communicator);
                    self.command_of(communicator, Command::Abandon { communicator, epoch });
                    self.keep_one_epoch(communicator);
                }
            }
            Event::JoinRefused(refused) => {
                if let Some(waiting) = self.pending_joins.remove(&refused.request) {
                    let ranks = refused.ranks.iter().map(|&rank| Rank(rank)).collect();
                    refuse(waiting.reply, report::refusal(refused.kind()), ranks, &refused.text);
                }
            }
            Event::Dissolve(dissolved) => self.dissolve(&dissolved),
            Event::ReportRequest { id } => {
                let taken = self.engines.ask_status(id);
                self.note_taken(taken);
            }
            Event::TracePaths(asked) => {
                if let Some(answer) = self.paths.trace(asked) {
                    self.send_to_control(from_agent::Message::PathsTraced(answer));
                }
            }
            Event::ProbePath(asked) => {
                if let Some(answer) = self.paths.probe(asked) {
                    self.send_to_control(from_agent::Message::PathProbed(answer));
                }
            }
            Event::Turns(told) => {
                let (communicator, interleaving) =
                    (CommunicatorId(told.communicator), read_interleaving(&told));
                self.command_of(communicator, Command::Interleave { communicator, interleaving });
            }
            Event::TurnGiven(v1::GrantSlot { communicator, slot: turn }) => {
                let communicator = CommunicatorId(communicator);
                self.command_of(communicator, Command::SlotGranted { communicator, slot: SlotId(turn) });
            }
            // Control asks these of aggregators alone, and sessions are not the agent's.
            Event::GrantAggregation(_) | Event::RevokeAggregation(_) | Event::ServeTenants(_) => {}
            Event::Answered(answer) => self.questions.answer(answer),
            Event::Connected(welcome) => {
                self.questions.session(true, welcome.cancels_reads, welcome.allocates);
                let interval = welcome.telemetry_interval_ns;
                let interval =
                    (interval > 0).then(|| Duration::from_nanos(interval).max(MIN_REPORT_INTERVAL));
                self.telemetry.report_every(interval);
                let (to, most) = (self.control.downgrade(), welcome.congestion_reports_per_second);
                let (listen, queue_pairs) = (self.paths.listen(), self.paths.traces_queue_pairs());
                self.telemetry.report_paths(to, most, (listen, queue_pairs));
                tracing::info!(build = welcome.build, "session with control is open");
            }
            Event::Disconnected { reason, .. } => {
                self.questions.session(false, false, false);
                // Whoever gives turns next knows nothing of those that were.
                for communicator in self.communicators.keys().copied().collect::<Vec<_>>() {
                    self.command_of(communicator, Command::Interleave { communicator, interleaving: None });
                }
                self.telemetry.report_every(None);
                self.note(format!("no session with control: {reason}"));
            }
        }
        None
    }

    /// When [`Agent::handle_timeout`] has something to do next; none while nothing waits for a time.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.dissolving.iter().map(|(due, ..)| *due).min()
    }

    /// Ends what control has ended.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(due) = self.dissolving.iter().position(|(due, ..)| now >= *due) {
            let (_, id, failure, reason) = self.dissolving.swap_remove(due);
            self.end(id, failure, &reason);
        }
    }

    fn dissolve(&mut self, dissolved: &v1::Dissolved) {
        let id = CommunicatorId(dissolved.communicator);
        if !self.communicators.contains_key(&id) {
            return;
        }
        tracing::info!(communicator = %format_args!("{id:016x}"), reason = dissolved.reason, "dissolved by control");
        let failure = report::failure_from(dissolved);
        if !matches!(dissolved.kind(), v1::FailureKind::Operator | v1::FailureKind::Aborted) {
            // Whoever told control may itself be what the others have lost; what links and peers say here counts more.
            self.dissolving.push((Instant::now() + DISSOLVE_GRACE, id, failure, dissolved.reason.clone()));
            return;
        }
        self.end(id, failure, &dissolved.reason);
    }

    fn end(&mut self, id: CommunicatorId, failure: Failure, reason: &str) {
        let dissolve = Command::Dissolve { communicator: id, failure: failure.clone() };
        self.command_of(id, dissolve);
        // If the engine never had it, or has let it go, nobody else will say that it is over.
        self.finish(id, &failure, reason);
    }

    /// Takes in what the engine says.
    pub fn handle_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Prepared { communicator, epoch, flows } => {
                tracing::debug!(communicator = communicator.0, %epoch, "links are up");
                self.report_links(communicator, epoch, &flows);
                let links = self.communicators.get(&communicator).map(|known| known.needs.usage());
                let (communicator, epoch) = (communicator.0, epoch.into());
                let prepared = v1::Prepared { communicator, epoch, links };
                self.send_to_control(from_agent::Message::Prepared(prepared));
            }
            Notice::PrepareFailed { communicator, epoch, reason } => {
                self.prepare_failed(communicator, epoch, reason.to_string());
            }
            Notice::Switched { communicator, epoch, segment } => {
                let epoch = u64::from(epoch);
                tracing::debug!(
                    communicator = communicator.0,
                    epoch,
                    segment = segment.0,
                    "the epoch before is done"
                );
                if let Some(known) = self.communicators.get_mut(&communicator) {
                    known.recipe.epoch = epoch;
                    let change = known.change_over_tcp.take().filter(|(of, _)| *of == epoch);
                    known.recipe.over_tcp = change.map(|(_, over_tcp)| over_tcp).unwrap_or_default();
                }
                self.keep_one_epoch(communicator);
                let switched = v1::Switched { communicator: communicator.0, epoch, first_segment: segment.0 };
                self.send_to_control(from_agent::Message::Switched(switched));
            }
            Notice::SlotRequested { communicator: CommunicatorId(communicator), slot: SlotId(turn) } => {
                self.send_to_control(from_agent::Message::RequestSlot(v1::RequestSlot {
                    communicator,
                    slot: turn,
                }));
            }
            Notice::SlotReleased { communicator: CommunicatorId(communicator), slot: SlotId(turn) } => {
                self.send_to_control(from_agent::Message::ReleaseSlot(v1::ReleaseSlot {
                    communicator,
                    slot: turn,
                }));
            }
            Notice::Ended { communicator: id, failure, detail } => {
                let limits = self.communicators.get(&id).and_then(|known| known.limits.clone());
                self.note_of(limits.as_ref(), format!("communicator {id:016x} ended: {failure}; {detail}"));
                self.telemetry.ended(id);
                self.send_to_control(from_agent::Message::Failed(report::failed(id, &failure, &detail)));
                self.finish(id, &failure, &detail);
            }
            Notice::Panicked { scope, reason } => {
                self.counters.add(match scope {
                    PanicScope::Communicator => Counted::CommunicatorPanic,
                    PanicScope::Attachment => Counted::AttachmentPanic,
                });
                self.note(format!("a panic that was contained: {reason}"));
            }
            Notice::Closed { communicator } => {
                self.telemetry.ended(communicator);
                self.send_to_control(from_agent::Message::Closed(v1::Closed {
                    communicator: communicator.0,
                }));
                self.communicators.remove(&communicator);
            }
            Notice::Detached { attachment, reason } => {
                let attached = self.attachments.get(&AttachmentId(attachment.0));
                let limits = attached.map(|attached| attached.limits.clone());
                self.note_of(limits.as_ref(), format!("attachment {} let go: {reason}", attachment.0));
            }
            Notice::Regions { attachment, base, done } => {
                if let Some(reply) = self.pending_regions.remove(&(attachment.0, base)) {
                    let _ = reply.send(done);
                }
            }
            // These are answers to a hand-over, which goes on beside the agent.
            Notice::HandedOver { .. } | Notice::TakenOver { .. } => {}
            Notice::Status { id, status } => {
                let Some((id, status)) = self.engines.gather(id, status) else { return };
                let attached = self.attachments.iter().map(|(id, a)| (id.0, a.tenant.clone())).collect();
                let mut report = report::report(id, &status, &attached, self.start.elapsed());
                report.errors = self.errors;
                report.recent_errors.clone_from(&self.recent);
                self.send_to_control(from_agent::Message::Report(report));
            }
        }
    }

    /// An epoch's links are up: telemetry hears whose flows they are.
    fn report_links(&self, id: CommunicatorId, epoch: Epoch, flows: &[(Participant, Flow)]) {
        let Some(known) = self.communicators.get(&id) else { return };
        self.telemetry.formed(telemetry::EpochLinks {
            communicator: id,
            tenant: known.recipe.tenant.clone(),
            name: known.recipe.name.clone(),
            ranks: known.recipe.local_ranks.iter().map(|local| local.rank).collect(),
            size: known.recipe.participants.iter().map(|one| one.ranks.len() as u32).sum(),
            epoch,
            participant: known.recipe.me,
            flows: flows.iter().map(|(peer, flow)| (peer.0, *flow)).collect(),
        });
    }

    /// Of two epochs of a communicator one has no links any more: gives back what they had.
    fn keep_one_epoch(&mut self, id: CommunicatorId) {
        let Some(known) = self.communicators.get_mut(&id) else { return };
        known.change_over_tcp = None;
        let needs = known.needs;
        known.granted.iter_mut().for_each(|granted| granted.shrink_to(needs));
    }

    /// A communicator has ended; whoever waits or asks is told, in terms of ranks.
    fn finish(&mut self, id: CommunicatorId, failure: &Failure, detail: &str) {
        let Some(communicator) = self.communicators.get_mut(&id) else { return };
        let told = communicator.ended.get_or_insert_with(|| report::detail(failure, detail)).clone();
        communicator.granted = None;
        let mut refused = Vec::new();
        for member in &mut communicator.members {
            if let Some(reply) = member.reply.take() {
                refused.push(member.rank);
                if let Some(attached) = self.attachments.get_mut(&member.attachment) {
                    attached.joined.remove(&member.handle);
                }
                let kind =
                    if told.ranks.is_empty() { JoinRefusal::Unavailable } else { JoinRefusal::RankLost };
                refuse(reply, kind, told.ranks.clone(), &told.text);
            }
        }
        for (_, reply) in communicator.detail_requests.drain(..) {
            let _ = reply.send(Some(told.clone()));
        }
        let (attachments, thread) = (&self.attachments, communicator.thread);
        communicator
            .members
            .retain(|m| attachments.get(&m.attachment).is_some_and(|a| a.joined.contains_key(&m.handle)));
        if communicator.members.is_empty() {
            self.communicators.remove(&id);
        }
        for rank in refused {
            self.try_command(thread, Command::Leave { communicator: id, rank });
        }
    }

    /// Tells control which tenants are served here.
    pub fn tenants_served(&mut self, tenants: v1::TenantsServed) {
        self.send_to_control(from_agent::Message::TenantsServed(tenants));
    }

    /// Begins the end: no more joins, every communicator is dissolved.
    pub fn stop(&mut self) {
        self.stopping = true;
        self.engines.stop();
    }
}

const FORGOTTEN: &str = "the provider knows nothing of this communicator any more; join anew";
const UNAVAILABLE: &str = "the provider cannot form communicators now; try again later";

fn engine_id(attachment: AttachmentId) -> harmonaize_engine::AttachmentId {
    harmonaize_engine::AttachmentId(attachment.0)
}

fn refuse(reply: JoinReply, kind: JoinRefusal, ranks: Vec<Rank>, text: &str) {
    // Nobody hears it if the process went away.
    let _ = reply.send(Err(JoinRefused { kind, text: text.to_owned(), ranks }));
}
