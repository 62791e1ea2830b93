//! What all handles of an attachment share, and how threads wait on it together. One sleeps in the kernel, the others on a
//! condition variable.

use crate::communicator::nanos;
use crate::completions::{Watch, eventfd};
use crate::in_flight::{Buffers, InFlight};
use crate::journal::{Journal, JournalGuard};
use crate::session::Session;
use crate::{AgentLoss, Error};
use harmonaize_abi::session::{
    ALL_EVENTS, AddedRegion, Answer, BATCHES, BIDS, RUNNERS, Refused, Request, SUCCESSORS, Succession,
    TYPED_REFUSALS, Welcome,
};
use harmonaize_abi::{ABI_VERSION, CommunicatorHandle, Completion, Cookie, Submission};
use harmonaize_shm::{Breach, DroppedByOwner, EndError, ForkGuard, TenantEnd};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::Shutdown;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

/// How often polling without waiting, and spinning, looks for answers and whether the agent is still there.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Regions that nobody uses any more, for whoever next has the state to tell the agent of.
#[derive(Debug, Default)]
struct Leaving {
    any: AtomicBool,
    bases: Mutex<Vec<u64>>,
}

impl Leaving {
    fn push(&self, base: u64) {
        self.bases.lock().unwrap_or_else(PoisonError::into_inner).push(base);
        self.any.store(true, Ordering::Release);
    }

    fn take(&self) -> Vec<u64> {
        if !self.any.load(Ordering::Relaxed) || !self.any.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut *self.bases.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Copies of the two descriptors that tell the agent that this process is attached. Who reads tensors has them too: the agent frees their
/// memory when both have ended.
#[derive(Debug)]
pub(crate) struct Presence {
    wake: OwnedFd,
    session: OwnedFd,
    guard: Arc<ForkGuard>,
}

impl Drop for Presence {
    fn drop(&mut self) {
        if !self.guard.is_inherited() {
            // The agent sees the end though children may have copies of the socket.
            let _ = rustix::net::shutdown(&self.session, Shutdown::Both);
        }
    }
}

#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    leaving: Arc<Leaving>,
    guard: Arc<ForkGuard>,
    changed: Condvar,
    /// What is slept on, so that the lock is free meanwhile.
    presence: Arc<Presence>,
    /// Wakes the thread that sleeps in the kernel for what is no work of the agent's.
    nudge: OwnedFd,
    spin: Duration,
    /// Entries of the rings.
    pub(crate) entries: u32,
    /// The longest time-out that the operator allows operations.
    longest_timeout: Duration,
    /// Last, so that everything before it has ended when it writes all.
    journal: Option<JournalGuard>,
}

/// Behind the lock.
#[derive(Debug)]
pub(crate) struct State {
    end: DroppedByOwner<Box<dyn TenantEnd>>,
    session: Session,
    pub(crate) in_flight: InFlight,
    /// Requests whose answers someone waits for.
    answers: HashMap<u64, PendingAnswer>,
    /// One for events that nobody waits for any more, while the agent waits for events: it takes no other meanwhile.
    pub(crate) abandoned: Option<u64>,
    next_id: u64,
    leaving: Arc<Leaving>,
    /// Whether a thread sleeps in the kernel for all. Nobody else takes completions or answers meanwhile.
    driving: bool,
    last_poll: Instant,
    lost: Option<Lost>,
    /// Who wants to be told of operations' ends.
    pub(crate) watch: Watch,
    journal: Option<Arc<Journal>>,
}

/// An answer that someone waits for.
#[derive(Debug, Default)]
struct PendingAnswer {
    answer: Option<Answer>,
    /// What came with it.
    descriptor: Option<OwnedFd>,
    /// The task that waits for it.
    task: Option<Waker>,
}

impl Shared {
    pub(crate) fn new(
        end: Box<dyn TenantEnd>,
        session: Session,
        spin: Duration,
        guard: Arc<ForkGuard>,
        welcome: &Welcome,
        journal: Option<Arc<Journal>>,
    ) -> Result<Self, Error> {
        let copy = |fd: std::os::fd::BorrowedFd<'_>| {
            fd.try_clone_to_owned().map_err(|source| Error::System { call: "dup", source })
        };
        let (wake, session_fd, entries) = (copy(end.wake_fd())?, copy(session.fd())?, end.entries());
        let presence = Arc::new(Presence { wake, session: session_fd, guard: Arc::clone(&guard) });
        let leaving = Arc::<Leaving>::default();
        let state = State {
            end: DroppedByOwner::new(end, &guard),
            session,
            in_flight: InFlight::new(entries),
            answers: HashMap::new(),
            abandoned: None,
            next_id: 0,
            leaving: Arc::clone(&leaving),
            driving: false,
            last_poll: Instant::now(),
            lost: None,
            watch: Watch::default(),
            journal: journal.clone(),
        };
        Ok(Self {
            state: Mutex::new(state),
            leaving,
            guard,
            changed: Condvar::new(),
            presence,
            nudge: eventfd(0)?,
            spin,
            entries,
            longest_timeout: Duration::from_nanos(welcome.operation_timeout_ns),
            journal: journal.map(JournalGuard),
        })
    }

    /// Where this process's operations are noted, if anywhere.
    pub(crate) fn journal(&self) -> Option<&Arc<Journal>> {
        self.journal.as_ref().map(|JournalGuard(journal)| journal)
    }

    /// The time-out of operations in a descriptor's nanoseconds: 0 for the usual one.
    pub(crate) fn operation_timeout_ns(&self, asked: Option<Duration>) -> Result<u64, Error> {
        let longest = self.longest_timeout;
        match asked {
            Some(asked) if asked > longest => Err(Error::TimeoutTooLong { asked, longest }),
            asked => Ok(asked.map_or(0, |asked| nanos(asked).max(1))),
        }
    }

    /// The state, in the process that attached. In a child of it nobody would ever unlock what another thread had locked.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, State>, Error> {
        if self.guard.is_inherited() {
            return Err(Error::Forked);
        }
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Has the agent let go of a region. Perhaps this thread has the state already: then whoever has it next tells the agent. Nothing in a
    /// child by `fork`.
    pub(crate) fn unregister(&self, base: u64) {
        if self.guard.is_inherited() {
            return;
        }
        self.leaving.push(base);
        if let Ok(mut state) = self.state.try_lock() {
            state.unregister_unused();
        }
    }

    /// The same after a wait.
    fn lock_again(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what has arrived, without waiting, and gives the state to look at.
    pub(crate) fn poll(&self) -> Result<MutexGuard<'_, State>, Error> {
        let mut state = self.lock()?;
        if !state.driving {
            state.take();
            if state.last_poll.elapsed() >= POLL_INTERVAL {
                state.receive();
            }
        }
        Ok(state)
    }

    /// Waits until `check` finds something, the agent is lost, or the deadline (`None`: never) has passed (`Ok(None)`).
    /// Spins for a while, yielding, then sleeps.
    pub(crate) fn wait<T>(
        &self,
        deadline: Option<Instant>,
        check: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        self.wait_spinning(deadline, self.spin, check)
    }

    /// The same, spinning for so long.
    pub(crate) fn wait_spinning<T>(
        &self,
        deadline: Option<Instant>,
        spin: Duration,
        mut check: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let spin_until = Instant::now().checked_add(spin);
        let mut state = self.lock()?;
        loop {
            if !state.driving {
                state.take();
            }
            if let Some(found) = check(&mut state) {
                return Ok(Some(found));
            }
            state.alive()?;
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(None);
            }
            if spin_until.is_none_or(|until| now < until) {
                if !state.driving && now.duration_since(state.last_poll) >= POLL_INTERVAL {
                    state.receive();
                }
                drop(state);
                std::thread::yield_now();
                state = self.lock_again();
                continue;
            }
            let left = deadline.map(|deadline| deadline - now);
            state = if state.driving { self.follow(state, left) } else { self.sleep(state, left) };
        }
    }

    /// The answer to a request, or pending. Then `context` is woken once it is there, or [`Self::session`] can be read and this is
    /// to be called again.
    #[cfg(feature = "async")]
    pub(crate) fn poll_answer(
        &self,
        context: &std::task::Context<'_>,
        id: u64,
    ) -> std::task::Poll<Result<Answer, Error>> {
        use std::task::Poll;
        let mut state = match self.lock() {
            Ok(state) => state,
            Err(error) => return Poll::Ready(Err(error)),
        };
        if !state.driving {
            state.take();
            state.receive();
        }
        if let Some(answer) = state.answer(id) {
            return Poll::Ready(Ok(answer));
        }
        if let Err(lost) = state.alive() {
            return Poll::Ready(Err(lost));
        }
        if let Some(awaited) = state.answers.get_mut(&id) {
            // A thread that comes to sleep may read the answer before the descriptor is seen to be readable.
            awaited.task = Some(context.waker().clone());
        }
        Poll::Pending
    }

    /// A copy of the session's descriptor, to wait on.
    #[cfg(feature = "async")]
    pub(crate) fn session(&self) -> std::io::Result<OwnedFd> {
        self.presence.session.try_clone()
    }

    /// What keeps the attachment at the agent.
    pub(crate) fn presence(&self) -> &Arc<Presence> {
        &self.presence
    }

    /// Has every thread that waits look again.
    pub(crate) fn nudge(&self) {
        // Fails where the counter is at its most: it is readable then.
        let _ = rustix::io::write(&self.nudge, &1_u64.to_ne_bytes());
        self.changed.notify_all();
    }

    /// Waits for the thread that sleeps in the kernel.
    fn follow<'a>(&'a self, state: MutexGuard<'a, State>, left: Option<Duration>) -> MutexGuard<'a, State> {
        match left {
            Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Sleeps in the kernel for all threads, unless there is work.
    fn sleep<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        remaining: Option<Duration>,
    ) -> MutexGuard<'a, State> {
        if state.end.prepare_sleep() {
            state.driving = true;
            let output = if state.session.unsent() { PollFlags::OUT } else { PollFlags::empty() };
            drop(state);
            let mut fds = [
                PollFd::from_borrowed_fd(self.presence.wake.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.presence.session.as_fd(), PollFlags::IN | output),
                PollFd::from_borrowed_fd(self.nudge.as_fd(), PollFlags::IN),
            ];
            let timeout = remaining.and_then(|left| Timespec::try_from(left).ok());
            let ready = rustix::event::poll(&mut fds, timeout.as_ref());
            let session = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
            if fds.get(2).is_some_and(|fd| !fd.revents().is_empty()) {
                // What it counted is seen to now.
                let _ = rustix::io::read(&self.nudge, &mut [0_u8; 8]);
            }
            state = self.lock_again();
            state.driving = false;
            if let Err(error) = ready
                && error != Errno::INTR
            {
                state.lose(Lost::Agent(AgentLoss::System { call: "poll", source: error }));
            }
            // What comes from now on a task would notice, and what came before it may have left to this thread.
            if session || state.answers.values().any(|awaited| awaited.task.is_some()) {
                state.receive();
            }
        }
        state.end.cancel_sleep();
        state.take();
        self.changed.notify_all();
        state
    }
}

/// Why there is no attachment any more.
#[derive(Debug)]
enum Lost {
    /// The agent went, or broke the protocol.
    Agent(AgentLoss),
    /// The agent said so.
    Detached(Refused),
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Agent(loss) => write!(f, "{loss}"),
            Self::Detached(Refused { text, .. }) => f.write_str(text),
        }
    }
}

impl State {
    fn lose(&mut self, lost: Lost) {
        if let (Some(journal), None) = (&self.journal, &self.lost) {
            journal.failed(format!("the attachment is over: {lost}"));
        }
        self.lost.get_or_insert(lost);
        self.watch.signal();
        self.answers.values_mut().filter_map(|awaited| awaited.task.take()).for_each(Waker::wake);
    }

    /// Whether the agent is there.
    pub(crate) fn alive(&self) -> Result<(), Error> {
        match &self.lost {
            None => Ok(()),
            Some(Lost::Agent(reason)) => Err(Error::AgentLost { reason: reason.clone() }),
            Some(Lost::Detached(Refused { kind, text })) => {
                Err(Error::Detached { kind: *kind, text: text.clone() })
            }
        }
    }

    /// Serves the agent and takes completions.
    fn take(&mut self) {
        if self.lost.is_none()
            && let Err(error) = self.try_take()
        {
            self.fail(error);
        }
        self.unregister_unused();
    }

    /// The end has failed, which means nothing where the agent has said that it hands over.
    fn fail(&mut self, error: EndError) {
        // Its last word, if it had one, says why.
        let heard = self.receive_answers();
        if heard.is_err() || !self.end.is_paused() {
            self.lose(Lost::Agent(AgentLoss::Attachment(Arc::new(error))));
        }
    }

    /// Goes on with the agent's successor, as far as the agent or it says.
    fn succeed(&mut self, step: &Succession) {
        let came = match self.end.succeed(step) {
            Ok(came) => came,
            Err(error) => return self.lose(Lost::Agent(AgentLoss::Successor(Arc::new(error)))),
        };
        if let (Some((offer, arrived)), Succession::Connect { end, .. }) = (came, step) {
            let agent = *end;
            self.send(|id| Request::Reconnect { id, agent, offer, arrived });
        }
    }

    /// Tells the agent that this process can come to a successor, over RDMA.
    #[cfg(feature = "rdma")]
    pub(crate) fn announce_successors(&mut self) {
        self.send(|id| Request::Detail { id: id | SUCCESSORS, communicator: 0 });
    }

    /// Has the agent let go of the regions that nobody uses any more.
    fn unregister_unused(&mut self) {
        for base in self.leaving.take() {
            self.send(|id| Request::Unregister { id, base });
        }
    }

    fn try_take(&mut self) -> Result<(), EndError> {
        let served = self.end.progress();
        let mut ended = false;
        // Whatever arrived before the agent was lost still counts.
        while let Some(completion) = self.end.completion()? {
            if completion.version != ABI_VERSION {
                return Err(EndError::Protocol(Breach::CompletionVersion));
            }
            if self.in_flight.complete(completion).is_none() {
                return Err(EndError::Protocol(Breach::NotInFlight));
            }
            ended = true;
        }
        if ended {
            self.watch.signal();
        }
        served.map(|_| ())
    }

    /// Takes answers, and notices when the agent is gone.
    fn receive(&mut self) {
        self.last_poll = Instant::now();
        if let Err(reason) = self.receive_answers() {
            self.take();
            self.lose(Lost::Agent(reason));
        }
    }

    /// Takes answers. An error means that the agent is gone.
    fn receive_answers(&mut self) -> Result<(), AgentLoss> {
        let mut answers = Vec::new();
        let received = self.session.flush().map_err(AgentLoss::from);
        let received = received.and_then(|()| self.session.receive(&mut answers));
        for (answer, descriptor) in answers {
            let id = answer.id() & !(ALL_EVENTS | TYPED_REFUSALS | BATCHES | RUNNERS | SUCCESSORS | BIDS);
            match (self.answers.get_mut(&id), answer) {
                (_, Answer::Detached { refused, .. }) => {
                    // What ended before counts.
                    let _ = self.try_take();
                    self.lose(Lost::Detached(refused));
                }
                (_, Answer::Succession { step, .. }) => self.succeed(&step),
                (Some(awaited), answer) => {
                    (awaited.answer, awaited.descriptor) = (Some(answer), descriptor);
                    awaited.task.take().into_iter().for_each(Waker::wake);
                }
                // After all, when nobody waits any more.
                (None, answer) => self.undo(&answer),
            }
        }
        received
    }

    /// Submits an operation on these buffers; its cookie.
    pub(crate) fn submit(
        &mut self,
        submission: Submission,
        buffers: Buffers,
        limit: u32,
    ) -> Result<Cookie, Error> {
        let submission = self.reserve(submission, buffers, limit)?;
        self.submit_reserved(&submission)?;
        Ok(Cookie(submission.cookie))
    }

    /// Checks an operation on these buffers and takes its place among those in flight: what [`Self::submit_reserved`] is to submit.
    pub(crate) fn reserve(
        &mut self,
        mut submission: Submission,
        buffers: Buffers,
        limit: u32,
    ) -> Result<Submission, Error> {
        self.alive()?;
        if let Some(region) = self.in_flight.conflict(&buffers) {
            return Err(Error::InUse { bytes: region.bytes });
        }
        let cookie = self.in_flight.start(buffers).ok_or(Error::TooMany { limit })?;
        (submission.version, submission.cookie) = (ABI_VERSION, cookie.0);
        Ok(submission)
    }

    /// Submits what was reserved.
    pub(crate) fn submit_reserved(&mut self, submission: &Submission) -> Result<(), Error> {
        if let Err(error) = self.end.submit(submission) {
            self.fail(error);
            if self.lost.is_some() {
                self.in_flight.cancel(Cookie(submission.cookie));
            }
        }
        self.alive()
    }

    /// Looks at who is to be told of what.
    pub(crate) fn watched<T>(&mut self, look: impl FnOnce(&mut Watch, &InFlight) -> T) -> T {
        look(&mut self.watch, &self.in_flight)
    }

    /// How an operation ended, once.
    pub(crate) fn claim(&mut self, cookie: Cookie) -> Option<Completion> {
        self.in_flight.claim(cookie)
    }

    /// Sends a request whose answer [`Self::answer`] will give.
    pub(crate) fn request(&mut self, request: impl FnOnce(u64) -> Request) -> Result<u64, Error> {
        self.request_with(None, request)
    }

    /// The same with a descriptor that goes along.
    pub(crate) fn request_with(
        &mut self,
        descriptor: Option<OwnedFd>,
        request: impl FnOnce(u64) -> Request,
    ) -> Result<u64, Error> {
        self.alive()?;
        let id = self.next_id;
        self.next_id += 1;
        self.session.send(&request(id), descriptor)?;
        self.answers.insert(id, PendingAnswer::default());
        Ok(id)
    }

    /// The answer to a request, once.
    pub(crate) fn answer(&mut self, id: u64) -> Option<Answer> {
        self.answer_with(id).map(|(answer, _)| answer)
    }

    /// The same with the descriptor that came along.
    pub(crate) fn answer_with(&mut self, id: u64) -> Option<(Answer, Option<OwnedFd>)> {
        self.answers.get(&id)?.answer.as_ref()?;
        let PendingAnswer { answer, descriptor, .. } = self.answers.remove(&id)?;
        Some((answer?, descriptor))
    }

    /// Nobody waits for this answer any more.
    pub(crate) fn forget(&mut self, id: u64) {
        if let Some(answer) = self.answers.remove(&id).and_then(|it| it.answer) {
            self.undo(&answer);
        }
    }

    /// Gives back what an answer brings that nobody waits for.
    fn undo(&mut self, answer: &Answer) {
        match answer {
            Answer::Joined { communicator, .. } => self.leave(CommunicatorHandle(*communicator)),
            Answer::Grown { added: Ok(AddedRegion { base, .. }), .. }
            | Answer::Registered { added: Ok(AddedRegion { base, .. }), .. } => {
                self.send(|id| Request::Unregister { id, base: *base });
            }
            _ => {}
        }
    }

    /// Leaves a communicator without waiting for the answer.
    pub(crate) fn leave(&mut self, communicator: CommunicatorHandle) {
        self.send(|id| Request::Leave { id, communicator: communicator.0 });
    }

    /// Has the agent abort a communicator, without waiting for the answer.
    pub(crate) fn abort(&mut self, communicator: CommunicatorHandle) {
        self.send(|id| Request::Abort { id, communicator: communicator.0 });
    }

    /// Sends a request whose answer nobody waits for.
    fn send(&mut self, request: impl FnOnce(u64) -> Request) {
        let id = self.next_id;
        self.next_id += 1;
        if let Err(error) = self.session.send(&request(id), None) {
            self.lose(Lost::Agent(error.into()));
        }
    }
}
