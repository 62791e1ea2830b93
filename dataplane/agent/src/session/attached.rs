//! A connection after the handshake: requests and answers until either side goes away.

use super::handover::{FrozenSession, OneOf, SessionImage};
use super::memory::AttachedMemory;
use super::rdma::{Places, Rdma};
use super::stream::Stream;
use super::tenant::{Life, Tenant, metered};
use super::{AttachmentId, Joined, Question, SessionRequest};
use crate::counters::Counted;
use bytes::{Buf, BytesMut};
use harmonaize_abi::session::{
    ALL_EVENTS, Access, AddedRegion, AgentRefusal, Answer, BATCHES, BIDS, Bounded, Budget, Clause,
    Constraints, ElasticOrder, FailureDetail, JobBid, JoinRefusal, JoinRefused, MAX_LISTED, MAX_NAME,
    MessageError, Negotiated, Offer, PairEnd, PricedOrder, RUNNERS, Reason, Refusal, RefusalKind, Refused,
    RegionRefused, Regrouping, Request, RequestError, RunnerReport, SUCCESSORS, Succession, TYPED_REFUSALS,
    decode, encode, full_name, is_name, length,
};
use harmonaize_abi::{CommunicatorHandle, Rank};
use harmonaize_shm::Memory;
use harmonaize_verbs::attachment::Rejoin;
use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinError, JoinSet};

/// Most requests of one attachment that wait for the agent.
const MAX_PENDING: usize = 256;
/// Answers that wait for the process to read them.
const MAX_ANSWERS: usize = 64;

/// How long the last word to a process may take.
const FINAL_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// How often a session that is to stand still looks whether it can.
const FREEZE_INTERVAL: Duration = Duration::from_millis(1);

/// Most descriptors that came and belong to no request.
const MAX_DESCRIPTORS: usize = 4;

/// What a process may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    Join,
    Detail,
    Events,
    Negotiate,
    Iteration,
    Hint,
    Runner,
    Bid,
    /// At this offset.
    AddRegion(u64),
    RemoveRegion(u64),
    Reconnect,
}

impl RequestKind {
    /// For who asks before the answer to the last question of this kind.
    fn is_outstanding(self) -> AgentRefusal {
        match self {
            Self::Events => AgentRefusal::AwaitsEvents,
            Self::Negotiate => AgentRefusal::AwaitsTerms,
            Self::Iteration => AgentRefusal::AwaitsChoice,
            Self::Hint => AgentRefusal::AwaitsHints,
            Self::Runner => AgentRefusal::AwaitsOrder,
            Self::Join
            | Self::Detail
            | Self::Bid
            | Self::AddRegion(_)
            | Self::RemoveRegion(_)
            | Self::Reconnect => AgentRefusal::AwaitsAnswer,
        }
    }
}

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum DetachReason {
    #[error("the process is gone")]
    ProcessGone,
    #[error("the agent goes down")]
    AgentStops,
    #[error("the tenant is served here no longer")]
    TenantRemoved,
    #[error("its queue pair could not be joined to this agent's, a successor: {}", .0.text)]
    NotRejoined(Refused),
    #[error("a request failed: {0}")]
    RequestFailed(JoinError),
    #[error("the process sent nonsense: {0}")]
    Malformed(#[from] MessageError),
}

/// What becomes of a request.
enum Handled {
    /// It is answered at once.
    Answered(Answer),
    /// The agent is told; an answer follows if one is due.
    PassedOn(SessionRequest),
    /// The agent is told, and the answer is known.
    Both(SessionRequest, Answer),
    /// An answer follows, or none is due.
    Done,
}

/// Joins an attachment over RDMA to its process once more, after another process of the agent's had it.
pub(super) struct Rejoining {
    pub(super) rdma: Arc<Rdma>,
    pub(super) ours: Rejoin,
    /// Whether the process is on this host.
    pub(super) here: bool,
    /// Until it has, the process is one that has not come.
    pub(super) awaited: OneOf,
}

/// A connection after the handshake.
pub(super) struct AttachedSession {
    attachment: AttachmentId,
    tenant: Arc<Tenant>,
    memory: AttachedMemory,
    requests: mpsc::Sender<SessionRequest>,
    /// Handles that the process has joined and not left.
    joined: HashSet<CommunicatorHandle>,
    /// Requests that the agent has not answered, and their kinds.
    pending: JoinSet<(RequestKind, Answer)>,
    outstanding: Vec<RequestKind>,
    /// Those of them that another process may ask again.
    repeatable: Vec<(RequestKind, Request)>,
    /// Bytes of the arena, and entries of each ring.
    size: (u64, u32),
    /// Answers that are not with the kernel yet.
    unsent: Arc<AtomicUsize>,
    /// What another process read and has not taken in, and descriptors that came with it.
    unread: (BytesMut, VecDeque<OwnedFd>),
    /// Over RDMA, until the process has said that it can come to a successor.
    bound: Option<OneOf>,
    /// Whether the process was told that a hand-over begins.
    announced: bool,
    /// Over RDMA, until the process has come to this agent, a successor.
    rejoining: Option<Rejoining>,
}

impl AttachedSession {
    pub(super) fn new(
        attachment: AttachmentId,
        tenant: Arc<Tenant>,
        memory: AttachedMemory,
        requests: mpsc::Sender<SessionRequest>,
        size: (u64, u32),
    ) -> Self {
        let (joined, pending, outstanding) = (HashSet::new(), JoinSet::new(), Vec::new());
        let (repeatable, unsent, unread) = (Vec::new(), Arc::default(), Default::default());
        let bound = (memory.access() == Access::Rdma).then(|| tenant.freeze.bind());
        Self {
            attachment,
            tenant,
            memory,
            requests,
            joined,
            pending,
            outstanding,
            repeatable,
            size,
            unsent,
            unread,
            bound,
            announced: false,
            rejoining: None,
        }
    }

    /// Goes on where another process's session stands, of which this is left. Only those are handed over that can be again.
    pub(super) fn resume(
        mut self,
        joined: Vec<u32>,
        (received, descriptors): (&[u8], Vec<OwnedFd>),
        rejoining: Option<Rejoining>,
    ) -> Self {
        self.joined.extend(joined.into_iter().map(CommunicatorHandle));
        self.unread = (BytesMut::from(received), descriptors.into());
        (self.bound, self.rejoining) = (None, rejoining);
        self
    }

    /// What another process needs to go on; none while something is under way that it could not go on with.
    fn image(&self, reader: &Reader) -> Option<FrozenSession> {
        let repeatable = |kind: &RequestKind| self.repeatable.iter().any(|(known, _)| known == kind);
        if self.unsent.load(Ordering::Acquire) > 0
            || !self.outstanding.iter().all(repeatable)
            || self.bound.is_some()
        {
            return None;
        }
        let (next, regions) = self.memory.image()?;
        let mut received = Vec::new();
        for (_, request) in &self.repeatable {
            received.extend(encode(request).ok()?);
        }
        received.extend_from_slice(&reader.received);
        let own = [reader.stream.as_fd()].into_iter().chain(reader.descriptors.iter().map(AsFd::as_fd));
        let image = SessionImage {
            attachment: self.attachment,
            tenant: self.tenant.name.clone(),
            size: self.size,
            next,
            regions,
            joined: self.joined.iter().map(|handle| handle.0).collect(),
            received,
            descriptors: reader.descriptors.len(),
        };
        let descriptors = own.map(|fd| fd.try_clone_to_owned()).collect::<Result<_, _>>().ok()?;
        Some(FrozenSession { image, descriptors })
    }

    /// Serves requests, as long as the tenant is served. Returns why it ended; where the tenant was removed the process has
    /// been told.
    pub(super) async fn serve(mut self, stream: Stream) -> DetachReason {
        let stream = Arc::new(stream);
        let (answers, unsent) = mpsc::channel(MAX_ANSWERS);
        // Aborted with the set when this future is dropped.
        let mut writer = JoinSet::new();
        let writes = write_answers(Arc::clone(&stream), unsent, Arc::clone(&self.unsent));
        writer.spawn(metered(Arc::clone(&self.tenant), writes));
        let (received, descriptors) = std::mem::take(&mut self.unread);
        let (tenant, paused_until) = (Arc::clone(&self.tenant), None);
        let reader = Reader { stream, received, descriptors, tenant, paused_until };
        let ended = Arc::clone(&self.tenant).ended();
        let (refused, why) = tokio::select! {
            done = self.exchange(reader, answers.clone()) => match done {
                Err(DetachReason::NotRejoined(refused)) => {
                    (refused.clone(), DetachReason::NotRejoined(refused))
                }
                done => return done.err().unwrap_or(DetachReason::ProcessGone),
            },
            life = ended => match life {
                Life::Removed => {
                    let text = "the provider serves this tenant here no longer; ask its operators".to_owned();
                    (Refused { kind: RefusalKind::Removed, text }, DetachReason::TenantRemoved)
                }
                Life::Served | Life::AgentStops => return DetachReason::AgentStops,
            },
        };
        let last = Answer::Detached { id: 0, refused };
        let said = async {
            let _ = answers.send((last, None)).await;
            drop(answers);
            writer.join_next().await
        };
        let _ = tokio::time::timeout(FINAL_ANSWER_TIMEOUT, said).await;
        why
    }

    /// What the process is to know of a hand-over that is `held` for, or not any more.
    fn succession(&mut self, held: bool) -> Option<Succession> {
        if self.memory.access() != Access::Rdma || self.bound.is_some() || held == self.announced {
            return None;
        }
        // Until then it would take that it has come to this agent for the end of the hand-over.
        if self.outstanding.contains(&RequestKind::Reconnect) {
            return None;
        }
        self.announced = held;
        Some(if held { Succession::Begins } else { Succession::CalledOff })
    }

    async fn exchange(
        &mut self,
        mut reader: Reader,
        answers: mpsc::Sender<Reply>,
    ) -> Result<(), DetachReason> {
        let mut freeze = self.tenant.freeze.watch();
        let connect = |Rejoining { ours, .. }: &Rejoining| {
            Some(Succession::Connect { end: ours.end(), taken: ours.taken()? })
        };
        if let Some(step) = self.rejoining.as_ref().and_then(connect) {
            send_answer(&self.unsent, &answers, (Answer::Succession { id: 0, step }, None)).await;
        }
        // A successor's sessions stand still from their beginning. Meanwhile processes come to it; what else they ask is for later.
        let (mut began, mut later) = (!*freeze.borrow(), VecDeque::new());
        loop {
            let held = *freeze.borrow_and_update();
            began |= !held;
            if began && let Some(step) = self.succession(held) {
                send_answer(&self.unsent, &answers, (Answer::Succession { id: 0, step }, None)).await;
            }
            if began
                && self.may_ask()
                && let Some(request) = later.pop_front()
            {
                if let Some(answer) = self.request(request, None).await? {
                    send_answer(&self.unsent, &answers, (answer, None)).await;
                }
                continue;
            }
            let comes = !began && self.rejoining.is_some() && later.len() < MAX_PENDING;
            if held
                && !comes
                && later.is_empty()
                && let Some(session) = self.image(&reader)
            {
                self.tenant.freeze.stands(session);
                // If the other process does go on, this one ends meanwhile.
                let _ = freeze.wait_for(|held| !held).await;
                continue;
            }
            let answer = tokio::select! {
                Ok(()) = freeze.changed() => None,
                () = tokio::time::sleep(FREEZE_INTERVAL), if held => None,
                Some(answered) = self.pending.join_next() => {
                    let (kind, answer) = answered.map_err(DetachReason::RequestFailed)?;
                    if let Answer::Detached { refused, .. } = answer {
                        return Err(DetachReason::NotRejoined(refused));
                    }
                    Some(self.finish(kind, answer))
                }
                request = reader.next(), if self.may_ask() && (!held || comes) => match request? {
                    // A descriptor is for memory that is mapped, of which this attachment has none.
                    Some((request, _)) if comes && !matches!(request, Request::Reconnect { .. }) => {
                        later.push_back(request);
                        None
                    }
                    Some((request, memfd)) => self.request(request, memfd).await?.map(|answer| (answer, None)),
                    None => return Ok(()),
                },
            };
            if let Some(answer) = answer {
                send_answer(&self.unsent, &answers, answer).await;
            }
        }
    }

    /// Whether another request is looked at now. One for memory is waited for: no process fills the engine's queue with them.
    fn may_ask(&self) -> bool {
        let memory =
            |kind: &RequestKind| matches!(kind, RequestKind::AddRegion(_) | RequestKind::RemoveRegion(_));
        self.pending.len() < MAX_PENDING && !self.outstanding.iter().any(memory)
    }

    fn finish(&mut self, kind: RequestKind, answer: Answer) -> Reply {
        let at = self.outstanding.iter().position(|outstanding| *outstanding == kind);
        debug_assert!(at.is_some(), "{kind:?} was answered twice");
        at.map(|at| self.outstanding.swap_remove(at));
        self.repeatable.retain(|(known, _)| *known != kind);
        if let Answer::Joined { communicator, .. } = &answer {
            self.joined.insert(CommunicatorHandle(*communicator));
        }
        let added = |memory: &mut AttachedMemory, done: &Result<AddedRegion, _>| match kind {
            RequestKind::AddRegion(base) => memory.added(base, done.is_ok()),
            _ => Err(RegionRefused::Failed),
        };
        match answer {
            Answer::Grown { id, added: done } => match added(&mut self.memory, &done) {
                Ok((place, descriptor)) => (Answer::Grown { id, added: Ok(place) }, descriptor),
                Err(refused) => (Answer::Grown { id, added: Err(refused) }, None),
            },
            Answer::Registered { id, added: done } => {
                let added = added(&mut self.memory, &done).map(|(place, _)| place);
                (Answer::Registered { id, added }, None)
            }
            Answer::Unregistered { id, refused } => {
                let removed = match kind {
                    RequestKind::RemoveRegion(base) => self.memory.removed(base, refused.is_none()),
                    _ => Err(RegionRefused::Failed),
                };
                (Answer::Unregistered { id, refused: removed.err() }, None)
            }
            answer => (answer, None),
        }
    }

    /// Passes a request on; the answer, if there is one at once.
    async fn request(
        &mut self,
        request: Request,
        memfd: Option<OwnedFd>,
    ) -> Result<Option<Answer>, DetachReason> {
        let again = repeatable(&request).map(|kind| (kind, request.clone()));
        let (passed_on, answer) = match self.handle(request, memfd) {
            Handled::Answered(answer) => (None, Some(answer)),
            Handled::PassedOn(request) => (Some(request), None),
            Handled::Both(request, answer) => (Some(request), Some(answer)),
            Handled::Done => (None, None),
        };
        if let Some(request) = passed_on {
            self.repeatable.extend(again);
            self.requests.send(request).await.map_err(|_| DetachReason::AgentStops)?;
        }
        Ok(answer)
    }

    fn handle(&mut self, request: Request, memfd: Option<OwnedFd>) -> Handled {
        let attachment = self.attachment;
        #[cfg(test)]
        assert!(!matches!(request, Request::Detail { communicator: u32::MAX, .. }), "a fault of the test's");
        match request {
            Request::Join { id, job, name, rank, ranks, timeout_ns, budget } => {
                let checked = self.check_join((&job, &name), rank, ranks, &budget);
                let timeout = Duration::from_nanos(timeout_ns);
                self.join(id, checked, |reply| SessionRequest::Join {
                    attachment,
                    name: full_name(&job, &name),
                    rank,
                    ranks,
                    timeout,
                    budget,
                    reply,
                })
            }
            Request::Regroup { id, who, key, min_ranks, timeout_ns } => {
                let (checked, timeout) =
                    (self.check_regroup(&who, min_ranks), Duration::from_nanos(timeout_ns));
                self.join(id, checked, |reply| SessionRequest::Regroup {
                    attachment,
                    who,
                    key,
                    min_ranks,
                    timeout,
                    reply,
                })
            }
            Request::Split { id, communicator, color, key, timeout_ns } => {
                let communicator = CommunicatorHandle(communicator);
                let (checked, timeout) = (self.check_split(communicator), Duration::from_nanos(timeout_ns));
                self.join(id, checked, |reply| SessionRequest::Split {
                    attachment,
                    communicator,
                    color,
                    key,
                    timeout,
                    reply,
                })
            }
            Request::Leave { id, communicator } if self.joined.remove(&CommunicatorHandle(communicator)) => {
                let communicator = CommunicatorHandle(communicator);
                Handled::Both(SessionRequest::Leave { attachment, communicator }, Answer::Left { id })
            }
            Request::Leave { id, .. } => Handled::Answered(Answer::Left { id }),
            Request::Abort { id, communicator }
                if self.joined.contains(&CommunicatorHandle(communicator)) =>
            {
                let communicator = CommunicatorHandle(communicator);
                Handled::Both(SessionRequest::Abort { attachment, communicator }, Answer::Aborted { id })
            }
            Request::Abort { id, .. } => Handled::Answered(Answer::Aborted { id }),
            Request::Detail { id, .. } if id & RUNNERS != 0 => Handled::Answered(Answer::TakesRunners { id }),
            Request::Detail { id, .. } if id & BIDS != 0 => Handled::Answered(Answer::TakesBids { id }),
            Request::Detail { id, .. } if id & SUCCESSORS != 0 => {
                self.bound = None;
                Handled::Answered(Answer::Detail { id, detail: None })
            }
            Request::Reconnect { id, agent, offer, arrived } => self.reconnect(id, agent, (offer, arrived)),
            Request::Detail { id, communicator }
                if self.joined.contains(&CommunicatorHandle(communicator)) =>
            {
                let communicator = CommunicatorHandle(communicator);
                let reply = self.await_reply(RequestKind::Detail, move |detail| {
                    let detail: Option<FailureDetail> = detail.ok().flatten();
                    Answer::Detail { id, detail: detail.map(Bounded::bounded) }
                });
                Handled::PassedOn(SessionRequest::Detail { attachment, communicator, reply })
            }
            Request::Detail { id, .. } => Handled::Answered(Answer::Detail { id, detail: None }),
            Request::SetBudget { id, communicator, budget } => {
                let communicator = CommunicatorHandle(communicator);
                let known = self.joined.contains(&communicator);
                let unknown = || AgentRefusal::UnknownCommunicator.to_string();
                let refused = nonsense(&budget).or_else(|| (!known).then(unknown)).map(RequestError::from);
                match refused.map_or_else(|| self.paced(), Err) {
                    Ok(()) => Handled::Both(
                        SessionRequest::SetBudget { attachment, communicator, budget },
                        Answer::BudgetSet { id, refused: None },
                    ),
                    Err(refused) => {
                        Handled::Answered(Answer::BudgetSet { id, refused: Some(refused.bounded()) })
                    }
                }
            }
            Request::Events { id, from, wait_ns } => self.ask(
                id,
                RequestKind::Events,
                Ok(()),
                |reply| Question::Events { from, wait: Duration::from_nanos(wait_ns), reply },
                || Err(AgentRefusal::Away.into()),
                move |read| {
                    let read = read.map(Bounded::bounded);
                    match id & ALL_EVENTS {
                        0 => Answer::Events { id, read: read.map(Into::into) },
                        _ => Answer::AllEvents { id, read: read.map(Into::into) },
                    }
                },
            ),
            Request::Negotiate { id, communicator, propose } => {
                let senseless = propose.as_ref().map_or_else(Vec::new, senseless);
                self.ask(
                    id,
                    RequestKind::Negotiate,
                    check_communicator(&communicator),
                    |reply| Question::Negotiate { communicator, propose, reply },
                    || match senseless.is_empty() {
                        true => Err(AgentRefusal::Away.into()),
                        false => Ok(Negotiated::Refused { reasons: senseless, counter: None }),
                    },
                    move |outcome| Answer::Negotiated { id, outcome: outcome.map(Bounded::bounded) },
                )
            }
            Request::Iteration { id, .. } if id & BATCHES != 0 => {
                Handled::Answered(Answer::TakesBatches { id })
            }
            Request::Iteration { id, communicator, knobs } => {
                let checked = knobs.check().map_err(|error| error.to_string().into());
                self.ask(
                    id,
                    RequestKind::Iteration,
                    checked.and_then(|()| check_communicator(&communicator)),
                    |reply| Question::Iteration { communicator, knobs, batch: None, reply },
                    // An iteration waits for nobody who is away.
                    move || Ok((knobs.fallback(), None)),
                    move |choice| Answer::Iteration { id, choice: choice.map(|(choice, _)| choice) },
                )
            }
            Request::Batch { id, communicator, knobs, batch } => {
                let checked = knobs.check().and_then(|()| batch.check());
                let checked = checked.map_err(|error| error.to_string().into());
                self.ask(
                    id,
                    RequestKind::Iteration,
                    checked.and_then(|()| check_communicator(&communicator)),
                    |reply| Question::Iteration { communicator, knobs, batch: Some(batch), reply },
                    move || Ok((knobs.fallback(), None)),
                    move |choice| Answer::Batch { id, choice },
                )
            }
            Request::Hint { id, communicator, hints } => {
                let checked = hints.check().map_err(|error| error.to_string().into());
                self.ask(
                    id,
                    RequestKind::Hint,
                    checked.and_then(|()| check_communicator(&communicator)),
                    |reply| Question::Hint { communicator, hints, reply },
                    || Err(AgentRefusal::Away.into()),
                    move |hinted| Answer::Hinted { id, refused: hinted.err() },
                )
            }
            Request::Runner { id, report, wait_ns } => {
                self.ask_runner(id, (report, false), None, wait_ns, move |order| Answer::Runner {
                    id,
                    order: order.map(|priced| ElasticOrder::of_any_job(priced.order)),
                })
            }
            Request::Elastic { id, report, wait_ns } => {
                self.ask_runner(id, (report, true), None, wait_ns, move |order| Answer::Elastic {
                    id,
                    order: order.map(|priced| priced.order),
                })
            }
            Request::Bidding { id, report, elastic, bid, wait_ns } => {
                self.ask_runner(id, (report, elastic), bid, wait_ns, move |order| Answer::Bidding {
                    id,
                    order: order.map(|PricedOrder { order, price }| PricedOrder {
                        order: if elastic { order } else { order.of_any_job().into() },
                        price,
                    }),
                })
            }
            Request::Bid { id, job, bid } => {
                let checked = bid.check().map_err(|error| error.to_string().into());
                let is_job = is_name(&job) && !job.contains(['/', '#']);
                let named = if is_job { Ok(()) } else { Err(AgentRefusal::JobName.into()) };
                self.ask(
                    id,
                    RequestKind::Bid,
                    checked.and(named),
                    |reply| Question::Bid { job, bid, reply },
                    || Err(AgentRefusal::NoJobs.into()),
                    move |outcome| Answer::Bid { id, refused: outcome.err() },
                )
            }
            Request::Grow { id, bytes } => {
                let made = self.memory.grow(bytes);
                self.add_region(made, move |added| Answer::Grown { id, added })
            }
            Request::Register { id, offset, bytes } => {
                let made = self.memory.register(memfd, offset, bytes);
                self.add_region(made, move |added| Answer::Registered { id, added })
            }
            Request::Unregister { id, base } => match self.memory.unregister(base) {
                Ok(()) => {
                    let reply = self.await_reply(RequestKind::RemoveRegion(base), move |done| {
                        let refused = (done != Ok(true)).then_some(RegionRefused::InUse);
                        Answer::Unregistered { id, refused }
                    });
                    Handled::PassedOn(SessionRequest::RemoveRegion { attachment, base, reply })
                }
                Err(refused) => Handled::Answered(Answer::Unregistered { id, refused: Some(refused) }),
            },
        }
    }

    /// Joins this agent's queue pair to the process's new one, unless that is about another, of an agent before.
    fn reconnect(&mut self, id: u64, agent: PairEnd, theirs: (Offer, u64)) -> Handled {
        let meant = self.rejoining.take_if(|rejoining| rejoining.ours.end() == agent);
        let Some(Rejoining { rdma, ours, here, awaited }) = meant else { return Handled::Done };
        let (rules, arena_bytes) = (self.tenant.rules(), self.size.0);
        self.outstanding.push(RequestKind::Reconnect);
        let rejoins = async move {
            let places = Places { here, addresses: &rules.addresses };
            let answer = match rdma.rejoin(ours, theirs, arena_bytes, places).await {
                Ok(()) => Answer::Succession { id, step: Succession::Connected },
                Err(refused) => Answer::Detached { id, refused },
            };
            drop(awaited);
            (RequestKind::Reconnect, answer)
        };
        self.pending.spawn(metered(Arc::clone(&self.tenant), rejoins));
        Handled::Done
    }

    /// Passes memory on that was made or mapped. The answer says where it lies.
    fn add_region(
        &mut self,
        made: Result<(AddedRegion, Arc<Memory>), RegionRefused>,
        answer: impl FnOnce(Result<AddedRegion, RegionRefused>) -> Answer + Send + 'static,
    ) -> Handled {
        let (place, memory) = match made {
            Ok(made) => made,
            Err(refused) => return Handled::Answered(answer(Err(refused))),
        };
        let (attachment, base) = (self.attachment, place.base);
        let reply = self.await_reply(RequestKind::AddRegion(base), move |done| {
            answer(if done == Ok(true) { Ok(place) } else { Err(RegionRefused::Failed) })
        });
        Handled::PassedOn(SessionRequest::AddRegion { attachment, base, memory, reply })
    }

    /// Asks control, unless the question makes no sense, is one too many or comes before the last one's answer. `away` is the
    /// answer where control cannot be asked.
    fn ask<T: Send + 'static>(
        &mut self,
        id: u64,
        kind: RequestKind,
        checked: Result<(), RequestError>,
        question: impl FnOnce(oneshot::Sender<Result<T, Refusal>>) -> Question,
        away: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
        answer: impl FnOnce(Result<T, RequestError>) -> Answer + Send + 'static,
    ) -> Handled {
        let first = !self.outstanding.contains(&kind);
        let first = if first { Ok(()) } else { Err(kind.is_outstanding().into()) };
        if let Err(refused) = first.and(checked).and_then(|()| self.paced()) {
            return Handled::Answered(answer(Err(refused)));
        }
        let reply = self.await_reply(kind, move |replied| match replied.unwrap_or_else(|_| away()) {
            Err(Refusal::NoCommunicator(text)) if id & TYPED_REFUSALS != 0 => {
                Answer::NoCommunicator { id, text: text.bounded() }
            }
            replied => answer(replied.map_err(|why| RequestError::from(why).bounded())),
        });
        Handled::PassedOn(SessionRequest::Ask { attachment: self.attachment, question: question(reply) })
    }

    /// Passes on what a runner of a job asks, which is `elastic` or not.
    fn ask_runner(
        &mut self,
        id: u64,
        (report, elastic): (RunnerReport, bool),
        bid: Option<JobBid>,
        wait_ns: u64,
        answer: impl FnOnce(Result<PricedOrder, RequestError>) -> Answer + Send + 'static,
    ) -> Handled {
        let wait = Duration::from_nanos(wait_ns);
        let checked = bid.map_or(Ok(()), |bid| bid.check()).map_err(|error| error.to_string().into());
        self.ask(
            id,
            RequestKind::Runner,
            checked.and_then(|()| report.check().map_err(|error| error.to_string().into())),
            |reply| Question::Runner { report, elastic, bid, wait, reply },
            || Err(AgentRefusal::NoJobs.into()),
            answer,
        )
    }

    /// Passes a join on that was checked.
    fn join(
        &mut self,
        id: u64,
        checked: Result<(), JoinRefused>,
        request: impl FnOnce(oneshot::Sender<Result<Joined, JoinRefused>>) -> SessionRequest,
    ) -> Handled {
        if let Err(refused) = checked.and_then(|()| self.paced_join()) {
            return Handled::Answered(Answer::JoinRefused { id, refused });
        }
        Handled::PassedOn(request(self.await_reply(RequestKind::Join, move |joined| {
            match joined.unwrap_or_else(|_| Err(dropped())) {
                Ok(Joined { communicator, name, rank, ranks, before }) => {
                    let before = if before.len() > MAX_LISTED { Vec::new() } else { before };
                    Answer::Joined { id, communicator: communicator.0, name, rank, ranks, before }
                }
                Err(refused) => Answer::JoinRefused { id, refused: refused.bounded() },
            }
        })))
    }

    /// Has the agent's reply answered.
    fn await_reply<T: Send + 'static>(
        &mut self,
        kind: RequestKind,
        answer: impl FnOnce(Result<T, oneshot::error::RecvError>) -> Answer + Send + 'static,
    ) -> oneshot::Sender<T> {
        let (reply, replied) = oneshot::channel();
        self.outstanding.push(kind);
        let answered = async move { (kind, answer(replied.await)) };
        self.pending.spawn(metered(Arc::clone(&self.tenant), answered));
        reply
    }

    /// Counts a question for control. Fails if it is one too many.
    fn paced(&self) -> Result<(), RequestError> {
        self.tenant.admit_request(Instant::now())
    }

    /// Counts a join, which control hears of, too.
    fn paced_join(&self) -> Result<(), JoinRefused> {
        let joined = self.tenant.admit_join(Instant::now());
        joined.or_else(|often| refused(JoinRefusal::Quota, often.describe("join", "joins")))?;
        self.paced().or_else(|error| match error {
            RequestError::TooOften { retry_after } => refused(
                JoinRefusal::Quota,
                format!("this tenant has asked the provider too much; the next in {retry_after:?}"),
            ),
            RequestError::Refused(text) => refused(JoinRefusal::Quota, text),
        })
    }

    fn check_regroup(&self, who: &Regrouping, least: u32) -> Result<(), JoinRefused> {
        match who {
            Regrouping::Newcomer { name } => check_name(name)?,
            Regrouping::Member { communicator }
                if !self.joined.contains(&CommunicatorHandle(*communicator)) =>
            {
                return refused(JoinRefusal::Name, AgentRefusal::UnknownCommunicator.to_string());
            }
            Regrouping::Member { .. } => {}
        }
        self.check_room(least)
    }

    fn check_split(&self, communicator: CommunicatorHandle) -> Result<(), JoinRefused> {
        if !self.joined.contains(&communicator) {
            return refused(JoinRefusal::Name, AgentRefusal::UnknownCommunicator.to_string());
        }
        self.check_room(0)
    }

    /// Whether one more communicator, of so many ranks, is within the tenant's quota.
    fn check_room(&self, ranks: u32) -> Result<(), JoinRefused> {
        let quota = self.tenant.rules().quota;
        if ranks > quota.ranks {
            let text = format!("{ranks} ranks; this tenant's communicators have at most {}", quota.ranks);
            return refused(JoinRefusal::Quota, text);
        }
        let joining = self.outstanding.iter().filter(|kind| **kind == RequestKind::Join).count();
        if self.joined.len() + joining >= quota.communicators as usize {
            let text =
                format!("this attachment is in {} communicators, as many as it may be", quota.communicators);
            return refused(JoinRefusal::Quota, text);
        }
        Ok(())
    }

    fn check_join(
        &self,
        (job, name): (&str, &str),
        rank: Rank,
        ranks: u32,
        budget: &Budget,
    ) -> Result<(), JoinRefused> {
        if name.is_empty() || [job, name].iter().any(|part| part.contains(['/', '#'])) {
            let text = "the names of a job and of its communicators have no `/` and no `#`, and the latter are not empty";
            return refused(JoinRefusal::Name, text.to_owned());
        }
        check_name(&full_name(job, name))?;
        if rank.0 >= ranks {
            return refused(JoinRefusal::Rank, format!("rank {rank} of {ranks}; ranks count from 0"));
        }
        self.check_room(ranks)?;
        match nonsense(budget) {
            Some(text) => refused(JoinRefusal::Budget, text),
            None => Ok(()),
        }
    }
}

fn refused(kind: JoinRefusal, text: String) -> Result<(), JoinRefused> {
    Err(JoinRefused { kind, text, ranks: Vec::new() })
}

fn check_name(name: &str) -> Result<(), JoinRefused> {
    if !is_name(name) {
        let text = format!(
            "a name has 1 to {MAX_NAME} bytes, no control characters, and none that are not seen or change how text runs"
        );
        return refused(JoinRefusal::Name, text);
    }
    Ok(())
}

/// Fails where no communicator can have this name.
fn check_communicator(name: &str) -> Result<(), RequestError> {
    if is_name(name) { Ok(()) } else { Err(AgentRefusal::CommunicatorName.into()) }
}

/// Why constraints make no sense, if they do not.
fn senseless(constraints: &Constraints) -> Vec<Reason> {
    let mut reasons = constraints.check().err().unwrap_or_default();
    let budget = constraints.budget.as_ref().and_then(nonsense);
    reasons.extend(budget.map(|text| Reason { clause: Clause::Budget, text }));
    reasons
}

/// Why a budget makes no sense, if it does not.
fn nonsense(budget: &Budget) -> Option<String> {
    harmonaize_codec::Budget::try_from(budget).err().map(|error| error.to_string())
}

fn dropped() -> JoinRefused {
    JoinRefused {
        kind: JoinRefusal::Internal,
        text: "the agent dropped the request; try again".into(),
        ranks: Vec::new(),
    }
}

/// An answer, and the descriptor that goes with it.
type Reply = (Answer, Option<OwnedFd>);

/// The kind of a request that may be asked twice, with the same answer.
fn repeatable(request: &Request) -> Option<RequestKind> {
    match request {
        Request::Events { .. } => Some(RequestKind::Events),
        Request::Negotiate { .. } => Some(RequestKind::Negotiate),
        Request::Iteration { .. } | Request::Batch { .. } => Some(RequestKind::Iteration),
        Request::Hint { .. } => Some(RequestKind::Hint),
        Request::Runner { .. } | Request::Elastic { .. } | Request::Bidding { .. } => {
            Some(RequestKind::Runner)
        }
        Request::Bid { .. } => Some(RequestKind::Bid),
        _ => None,
    }
}

async fn send_answer(unsent: &AtomicUsize, answers: &mpsc::Sender<Reply>, answer: Reply) {
    unsent.fetch_add(1, Ordering::AcqRel);
    // One that cannot be sent is nobody's any more; what the process asked before it went is done.
    let _ = answers.send(answer).await;
}

async fn write_answers(stream: Arc<Stream>, mut answers: mpsc::Receiver<Reply>, unsent: Arc<AtomicUsize>) {
    while let Some((answer, descriptor)) = answers.recv().await {
        let sent = match encode(&answer) {
            Ok(message) => stream.answer(&message, descriptor).await.is_ok(),
            Err(_) => false,
        };
        if !sent {
            // Requests that have arrived are read still; then the session ends.
            let _ = rustix::net::shutdown(stream.as_fd(), rustix::net::Shutdown::Read);
            return;
        }
        unsent.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Reads requests; may be dropped at any await without losing bytes.
struct Reader {
    stream: Arc<Stream>,
    received: BytesMut,
    /// Those of requests that have not been read whole.
    descriptors: VecDeque<OwnedFd>,
    tenant: Arc<Tenant>,
    /// Until when nothing is read. The tenant's processes have sent much of late, or its sessions have taken much
    /// processor time.
    paused_until: Option<Instant>,
}

impl Reader {
    /// The next request, and the descriptor that came with it; `None` when the process is gone.
    async fn next(&mut self) -> Result<Option<(Request, Option<OwnedFd>)>, MessageError> {
        loop {
            // Before each receive: a request in many pieces costs turns, too.
            let throttled = self.tenant.throttled_until();
            if throttled > self.paused_until {
                self.paused_until = throttled;
                self.tenant.counters().add(Counted::SessionPaused);
            }
            if let Some(until) = self.paused_until {
                tokio::time::sleep_until(until.into()).await;
                self.paused_until = None;
            }
            if let Some(request) = self.parse()? {
                let takes = matches!(request, Request::Register { .. });
                let descriptor = if takes { self.descriptors.pop_front() } else { None };
                return Ok(Some((request, descriptor)));
            }
            if self.descriptors.len() > MAX_DESCRIPTORS {
                return Err(MessageError::Malformed);
            }
            match self.stream.receive(&mut self.received, &mut self.descriptors).await {
                Ok(0) | Err(_) => return Ok(None),
                Ok(_) => {}
            }
        }
    }

    fn parse(&mut self) -> Result<Option<Request>, MessageError> {
        let Some((prefix, rest)) = self.received.split_first_chunk::<4>() else { return Ok(None) };
        let bytes = length(*prefix)?;
        let Some(message) = rest.get(..bytes) else { return Ok(None) };
        self.paused_until = self.tenant.read(4 + bytes);
        let request = decode(message)?;
        self.received.advance(4 + bytes);
        Ok(Some(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::Counters;
    use crate::session::{Quota, TenantLimits};
    use crate::telemetry::thread_time;
    use std::future::poll_fn;
    use std::task::Poll;
    use tokio::io::AsyncWriteExt;

    /// Two upgrades, one right after the other.
    #[test]
    fn a_process_hears_of_a_hand_over_once_it_has_come() {
        let TenantLimits(tenant) = TenantLimits::of(Quota::default(), &Counters::default());
        let memory = AttachedMemory::new(Arc::clone(&tenant), Access::Rdma, 1 << 16);
        let (requests, _asked) = mpsc::channel(1);
        let mut session = AttachedSession::new(AttachmentId(1), tenant, memory, requests, (1 << 16, 4));
        session.bound = None;
        session.outstanding.push(RequestKind::Reconnect);
        assert!(session.succession(true).is_none(), "its word that it has come is still to be said");
        let said = Answer::Succession { id: 1, step: Succession::Connected };
        session.finish(RequestKind::Reconnect, said);
        assert!(matches!(session.succession(true), Some(Succession::Begins)));
        assert!(session.succession(true).is_none());
        assert!(matches!(session.succession(false), Some(Succession::CalledOff)));
    }

    #[test]
    fn pieces_of_a_request_cost_processor_time() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let quota = Quota { session_percent: 1, ..Quota::default() };
            let TenantLimits(tenant) = TenantLimits::of(quota, &Counters::default());
            let (mut process, stream) = tokio::net::UnixStream::pair().unwrap();
            let mut reader = Reader {
                stream: Arc::new(Stream::Unix(stream)),
                received: BytesMut::new(),
                descriptors: VecDeque::new(),
                tenant: Arc::clone(&tenant),
                paused_until: None,
            };
            let mut next = std::pin::pin!(reader.next());
            let waits = poll_fn(|context| Poll::Ready(next.as_mut().poll(context).is_pending())).await;
            assert!(waits, "nothing was sent");
            let spins = async {
                let begun = thread_time();
                while thread_time() - begun < Duration::from_millis(50) {}
            };
            metered(Arc::clone(&tenant), spins).await;
            process.write_all(&encode(&Request::Detail { id: 1, communicator: 2 }).unwrap()).await.unwrap();
            let paused = poll_fn(|context| match next.as_mut().poll(context) {
                Poll::Ready(_) => Poll::Ready(false),
                Poll::Pending if tenant.counters().get(Counted::SessionPaused) > 0 => Poll::Ready(true),
                Poll::Pending => Poll::Pending,
            });
            assert!(paused.await, "a request is read while its tenant's sessions are throttled");
        });
    }
}
