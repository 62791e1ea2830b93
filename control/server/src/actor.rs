//! The one task that owns the state, on a thread of its own. It feeds the state messages, calls and the time, and carries out what
//! it decides.

use crate::keeper::{Copied, Keeper, StoreAck};
use crate::log::log;
use crate::metrics::Happened;
use crate::relay::{Downstream, Relay};
use crate::requests::{Requests, Sorted};
use crate::state::{Controller, Instruction, InstructionError, Output, ReorderError, SessionId, Settings};
use crate::state::{TopologyRefusal, plan_change, touched};
use harmonaize_abi::{CommunicatorId, Epoch, Nanos};
use harmonaize_api::v1::{FabricSnapshot, FromAgent, StatusReply, ToAgent, to_agent};
use harmonaize_metrics::Page;
use harmonaize_store::{Change, StoreError, Stored};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// Most messages that wait for one agent; one that reads slower than that loses its session.
pub(crate) const SESSION_QUEUE: usize = 4096;

/// How long changes of plans are gathered before they are written. A switch is several changes, and none of it waits for the disk.
const GATHER: Duration = Duration::from_millis(20);

/// Most commands that are served before a tenant's request that waits.
const BEFORE_REQUEST: usize = 16;

/// How long after plans could not be written, or timed work panicked, that is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// Most instructions that wait for the disk.
const MOST_INSTRUCTIONS: usize = 1024;

/// How long the last changes may take to be written when control goes down.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// A look at the state at this time of it.
pub(crate) type Query = Box<dyn FnOnce(&mut Controller, Duration) + Send>;

/// What the gRPC layer asks for.
pub(crate) enum Command {
    /// A stream opened.
    Open {
        session: SessionId,
        agent: mpsc::Sender<Downstream>,
        ended: oneshot::Sender<()>,
        relay: Arc<Relay>,
    },
    /// A stream's next message.
    Message(SessionId, Box<FromAgent>),
    /// A stream ended.
    Closed(SessionId),
    /// `harmonaize status`.
    Status(Duration, oneshot::Sender<StatusReply>),
    /// `harmonaize reorder`; without hosts, control chooses the order again.
    Reorder(CommunicatorId, Vec<String>, oneshot::Sender<Result<Epoch, ReorderError>>),
    /// `harmonaize top`.
    Fabric(oneshot::Sender<FabricSnapshot>),
    /// What Prometheus scrapes.
    Metrics(oneshot::Sender<Page>),
    /// What an operator looks at.
    Look(Query),
    /// Something that an operator wants changed, and kept. The answer comes once it is, and is in effect.
    Instruct(Instruction, oneshot::Sender<Result<(), Refusal>>),
    /// The configuration file was read again. The answer is whether it is in force.
    Configure(Box<Settings>, oneshot::Sender<Result<(), TopologyRefusal>>),
    /// `harmonaize backup`: all that is stored, as the bytes of a store's file.
    Backup(oneshot::Sender<Copied>),
    /// `harmonaize dissolve`; the answer is whether there was one.
    Dissolve(CommunicatorId, String, oneshot::Sender<bool>),
}

/// Why an instruction is not followed.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It makes no sense, or not now.
    Senseless(InstructionError),
    /// Too many wait.
    Busy,
    /// It could not be stored, and has no effect.
    NotStored(Arc<StoreError>),
}

/// Changes that are in effect once they are on disk.
struct Waiting {
    changes: Vec<Change>,
    /// For an operator's.
    answer: Option<oneshot::Sender<Result<(), Refusal>>>,
}

/// An open stream. Dropping it ends the stream after what is queued.
struct Stream {
    agent: mpsc::Sender<Downstream>,
    _ended: oneshot::Sender<()>,
    relay: Arc<Relay>,
}

/// The task.
pub(crate) struct Actor {
    state: Controller,
    start: Instant,
    most_streams: usize,
    streams: BTreeMap<SessionId, Stream>,
    status: BTreeMap<u64, oneshot::Sender<StatusReply>>,
    keeper: Keeper,
    acks: mpsc::UnboundedReceiver<StoreAck>,
    /// By the keeper's number.
    waiting: BTreeMap<u64, Waiting>,
    plans: Plans,
    /// When timed work of the state may be tried again that has panicked.
    timed_again: Option<Instant>,
    happened: Happened,
    requests: Requests,
}

/// Plans that are to be written.
#[derive(Default)]
struct Plans {
    waiting: BTreeSet<CommunicatorId>,
    /// When they will be.
    at: Option<Instant>,
    /// Those that are being written, and the keeper's number for that.
    writing: Option<(u64, BTreeSet<CommunicatorId>)>,
}

impl Plans {
    /// Those of these communicators may have changed: they are written after a moment, or after those that are being written.
    fn changed(&mut self, communicators: impl IntoIterator<Item = CommunicatorId>) {
        self.waiting.extend(communicators);
        if !self.waiting.is_empty() && self.writing.is_none() {
            self.at = self.at.or_else(|| Some(Instant::now() + GATHER));
        }
    }

    /// Ends the keeper's job of this number. Plans that could not be written are to be written once more.
    fn written(&mut self, number: u64, well: bool) {
        let Some((_, plans)) = self.writing.take_if(|(writing, _)| *writing == number) else { return };
        if !well {
            self.waiting.extend(plans);
        }
        let pause = if well { GATHER } else { AGAIN };
        self.at = (!self.waiting.is_empty()).then(|| Instant::now() + pause);
    }
}

impl Actor {
    /// With what an earlier start left, and who keeps what this one decides.
    pub(crate) fn new(
        settings: Settings,
        seed: [u8; 32],
        stored: Stored,
        (keeper, acks): (Keeper, mpsc::UnboundedReceiver<StoreAck>),
    ) -> Self {
        let most_streams = most_streams(&settings);
        let mut state = Controller::new(settings, seed);
        state.restore(stored, realtime());
        Self {
            state,
            start: Instant::now(),
            most_streams,
            streams: BTreeMap::new(),
            status: BTreeMap::new(),
            keeper,
            acks,
            waiting: BTreeMap::new(),
            plans: Plans::default(),
            timed_again: None,
            happened: Happened::default(),
            requests: Requests::default(),
        }
    }

    /// Runs until `shutdown`, then tells the agents and ends their streams.
    pub(crate) async fn run(
        mut self,
        mut commands: mpsc::Receiver<Command>,
        shutdown: impl Future<Output = ()>,
    ) {
        tokio::pin!(shutdown);
        // What was taken up from the store may have something to say.
        self.execute_outputs();
        loop {
            let wake = self.wake();
            let timer = async {
                match wake {
                    Some(wake) => tokio::time::sleep_until(wake).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.take(command, &mut commands),
                    None => break,
                },
                () = std::future::ready(()), if !self.requests.is_empty() => {}
                Some(ack) = self.acks.recv() => {
                    self.contain("store", |this| this.on_ack(ack));
                }
                () = timer => self.expire(),
                () = &mut shutdown => break,
            }
            self.finish();
            if let Some((session, message)) = self.requests.next() {
                self.command(Command::Message(session, message));
                self.finish();
            }
        }
        self.contain("shutdown", |this| this.state.shut_down());
        self.execute_outputs();
        self.flush().await;
    }

    /// Takes in a command and what waits behind it: tenants' requests into their queues. Of what is served at once some is taken later.
    fn take(&mut self, first: Command, commands: &mut mpsc::Receiver<Command>) {
        let (mut taken, mut served) = (0, 0);
        let mut next = Some(first);
        while let Some(command) = next.take() {
            taken += 1;
            let command = match command {
                Command::Message(session, message) => match self.requests.sort(session, message) {
                    Sorted::Now(message) => Some(Command::Message(session, message)),
                    Sorted::Taken => None,
                    Sorted::Refused(message) => {
                        self.send(session, (*message).into());
                        None
                    }
                },
                command => Some(command),
            };
            if let Some(command) = command {
                self.command(command);
                self.finish();
                served += 1;
            }
            if served < BEFORE_REQUEST && taken < commands.max_capacity() {
                next = commands.try_recv().ok();
            }
        }
    }

    fn finish(&mut self) {
        self.execute_outputs();
        self.state.finished(self.start.elapsed());
    }

    /// When there is something to do by the time.
    fn wake(&mut self) -> Option<Instant> {
        let deadline = self.contain("timer", |this| this.state.next_deadline());
        let deadline = deadline.unwrap_or_else(|| Some(self.start.elapsed() + AGAIN));
        let deadline = deadline.and_then(|deadline| self.start.checked_add(deadline));
        let deadline = deadline.map(|at| self.timed_again.map_or(at, |again| at.max(again)));
        deadline.into_iter().chain(self.plans.at).min()
    }

    fn expire(&mut self) {
        if self.timed_again.is_none_or(|at| at <= Instant::now()) {
            let expired = self.contain("timer", |this| this.state.expire(this.start.elapsed()));
            let removed = self.contain("timer", Self::remove_expired);
            // What panicked is due still: without a pause it would be tried for ever.
            self.timed_again = expired.and(removed).is_none().then(|| Instant::now() + AGAIN);
        }
        if self.plans.at.is_some_and(|at| at <= Instant::now()) {
            self.write_plans();
        }
    }

    /// Has what is over removed from the store: plans of communicators that did not come back, and windows.
    fn remove_expired(&mut self) {
        let now = self.start.elapsed();
        let lost = self.state.operator.lost_plans(now);
        self.plans.changed(lost);
        let waiting = self.waiting.values().flat_map(|waiting| &waiting.changes);
        let over = self.state.operator.expired(now, waiting);
        if !over.is_empty() {
            self.state.apply_stored(now, &over);
            self.keeper.keep(over);
        }
    }

    /// Writes the plans that have changed, as they are now; agents wait for none of it.
    fn write_plans(&mut self) {
        self.plans.at = None;
        if self.plans.writing.is_none() && !self.plans.waiting.is_empty() {
            let changed = std::mem::take(&mut self.plans.waiting);
            let change = |id: &CommunicatorId| {
                self.contain("store", |this| {
                    plan_change(&this.state.settings, &this.state.communicators, *id)
                })
            };
            let changes = changed.iter().filter_map(change).collect();
            self.plans.writing = Some((self.keeper.keep(changes), changed));
        }
    }

    /// Something is stored, or cannot be.
    fn on_ack(&mut self, StoreAck { number, outcome }: StoreAck) {
        if let Some(Waiting { changes, answer }) = self.waiting.remove(&number) {
            match &outcome {
                Ok(()) => self.state.apply_stored(self.start.elapsed(), &changes),
                Err(error) => {
                    tracing::error!(%error, "not stored, and not in effect");
                    self.state.store_failed(self.start.elapsed(), &changes);
                }
            }
            if let Some(answer) = answer {
                // Who asked may have gone; what was asked is done all the same.
                let _ = answer.send(outcome.map_err(Refusal::NotStored));
            }
            return;
        }
        if let Err(error) = &outcome {
            tracing::error!(%error, "not stored; until it is, a restart finds less of what ran");
        }
        self.plans.written(number, outcome.is_ok());
    }

    fn instruct(&mut self, instruction: &Instruction, answer: oneshot::Sender<Result<(), Refusal>>) {
        let considered = match self.waiting.len() {
            MOST_INSTRUCTIONS.. => Err(Refusal::Busy),
            _ => self.state.consider(self.start.elapsed(), instruction).map_err(Refusal::Senseless),
        };
        match considered {
            Ok(changes) => {
                tracing::info!(?instruction, "an operator's instruction");
                let number = self.keeper.keep(changes.clone());
                self.waiting.insert(number, Waiting { changes, answer: Some(answer) });
            }
            Err(refusal) => drop(answer.send(Err(refusal))),
        }
    }

    /// Has everything written that is to be kept.
    async fn flush(mut self) {
        self.plans.writing = None;
        self.write_plans();
        let Self { keeper, acks: mut kept, waiting, .. } = self;
        // The thread ends after what is queued, and the answers with it.
        drop((keeper, waiting));
        let last = async {
            while let Some(StoreAck { outcome, .. }) = kept.recv().await {
                if let Err(error) = outcome {
                    tracing::error!(%error, "not all is stored");
                }
            }
        };
        if tokio::time::timeout(FLUSH_TIMEOUT, last).await.is_err() {
            tracing::error!("not all is stored: the disk takes too long");
        }
    }

    /// Returns what work comes to; nothing where it panics. That costs what the work was for: its sender, or one timer, acknowledgement
    /// or output. All else goes on.
    fn contain<T>(&mut self, work: &'static str, run: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let outcome = catch_unwind(AssertUnwindSafe(|| run(self)));
        if outcome.is_err() {
            // Where and why was printed by the panic itself.
            tracing::error!(work, "control panicked, and goes on");
            self.happened.panicked(work);
        }
        outcome.ok()
    }

    /// A command whose handling panics costs whoever sent it: an agent its session, an operator the answer.
    fn command(&mut self, command: Command) {
        let session = match &command {
            Command::Message(session, _) => Some(*session),
            _ => None,
        };
        let work = if session.is_some() { "message" } else { "command" };
        if self.contain(work, |this| this.execute(command)).is_some() {
            return;
        }
        match session {
            Some(session) => {
                tracing::error!(
                    session = session.0,
                    "an agent's message made control panic; its session ends"
                );
                self.end_session(session);
            }
            None => tracing::error!("what an operator asked made control panic; it gets no answer"),
        }
    }

    fn execute(&mut self, command: Command) {
        let now = self.start.elapsed();
        match command {
            Command::Open { session, agent, ended, relay } => {
                if self.streams.len() >= self.most_streams {
                    let _ = agent.try_send(Err(tonic::Status::resource_exhausted("too many sessions")));
                    return;
                }
                self.streams.insert(session, Stream { agent, _ended: ended, relay });
            }
            // What a stream still held when its session was ended is nobody's.
            Command::Message(session, message) if self.streams.contains_key(&session) => {
                self.state.message(now, session, *message);
            }
            Command::Message(..) => {}
            Command::Closed(session) => self.end_session(session),
            Command::Status(patience, answer) => {
                let id = self.state.ask_status(now, patience);
                self.status.insert(id, answer);
            }
            Command::Fabric(answer) => {
                let _ = answer.send(self.state.queries(now).fabric(realtime()));
            }
            Command::Metrics(answer) => {
                let mut page = Page::default();
                self.state.queries(now).metrics(&mut page);
                self.happened.show(&mut page);
                self.keeper.writes.show(&mut page);
                let _ = answer.send(page);
            }
            Command::Look(look) => look(&mut self.state, now),
            Command::Configure(again, answer) => {
                let outcome = self.state.configure(now, *again);
                self.most_streams = most_streams(&self.state.settings);
                // Who begins to lead waits for none.
                let _ = answer.send(outcome);
            }
            Command::Instruct(instruction, answer) => self.instruct(&instruction, answer),
            Command::Backup(answer) => self.keeper.backup(answer),
            Command::Reorder(id, hosts, answer) => {
                let _ = answer.send(match hosts.is_empty() {
                    true => self.state.unpin(now, id),
                    false => self.state.reorder(now, id, &hosts),
                });
            }
            Command::Dissolve(id, reason, answer) => {
                let _ = answer.send(self.state.dissolve(now, id, &reason));
            }
        }
    }

    fn execute_outputs(&mut self) {
        loop {
            let outputs = self.contain("outputs", |this| this.state.take_outputs()).unwrap_or_default();
            if outputs.is_empty() {
                return;
            }
            for output in outputs {
                self.contain("outputs", |this| this.execute_output(output));
            }
        }
    }

    fn execute_output(&mut self, output: Output) {
        self.plans.changed(touched(&output));
        match output {
            Output::Send(session, message) => self.send(session, message.into()),
            Output::End(session) => drop(self.streams.remove(&session)),
            Output::Status(id, reply) => {
                if let Some(answer) = self.status.remove(&id) {
                    let _ = answer.send(*reply);
                }
            }
            Output::Fact(fact) => {
                self.happened.take(&fact);
                log(&fact);
            }
            Output::Keep(changes) => {
                let number = self.keeper.keep(changes.clone());
                self.waiting.insert(number, Waiting { changes, answer: None });
            }
        }
    }

    fn send(&mut self, session: SessionId, message: ToAgent) {
        let Some(stream) = self.streams.get(&session) else { return };
        let welcome = matches!(message.message, Some(to_agent::Message::Welcome(_)));
        let send = || stream.agent.try_send(Ok(message)).map_err(without_message);
        if let Err(error) = if welcome { stream.relay.welcome(session, send) } else { send() } {
            tracing::warn!(session = session.0, %error, "an agent does not read; its session ends");
            self.end_session(session);
        }
    }

    fn end_session(&mut self, session: SessionId) {
        self.streams.remove(&session);
        let forget = |this: &mut Self| this.state.session_ended(this.start.elapsed(), session);
        if self.contain("session", forget).is_none() {
            // It may have come before the session was forgotten, whose host would have no other one.
            self.contain("session", forget);
        }
    }
}

/// Most streams of agents and aggregators at a time.
fn most_streams(Settings { topology, .. }: &Settings) -> usize {
    (topology.hosts().len() + topology.aggregators().len()) * 2 + 16
}

/// CLOCK_REALTIME.
pub(crate) fn realtime() -> Nanos {
    let realtime = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    realtime.into()
}

/// The error alone: nobody sends the message again.
fn without_message<T>(error: TrySendError<T>) -> TrySendError<()> {
    match error {
        TrySendError::Full(_) => TrySendError::Full(()),
        TrySendError::Closed(_) => TrySendError::Closed(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_that_could_not_be_written_are_to_be_once_more() {
        let mut plans = Plans { writing: Some((7, [1, 2].map(CommunicatorId).into())), ..Plans::default() };
        plans.changed([2, 3].map(CommunicatorId));
        assert_eq!(plans.at, None, "those that are being written come first");
        plans.written(6, false);
        assert!(plans.writing.is_some(), "another job");
        plans.written(7, false);
        assert_eq!((plans.waiting.len(), plans.writing.is_some()), (3, false));
        assert!(plans.at.is_some_and(|at| at > Instant::now() + GATHER), "not at once");
        plans.writing = Some((8, std::mem::take(&mut plans.waiting)));
        plans.written(8, true);
        assert_eq!((plans.waiting.len(), plans.writing.is_some(), plans.at), (0, false, None));
    }
}
