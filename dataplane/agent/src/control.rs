//! The agent's session with control: connects, and connects again, says Hello, carries messages both ways.
//!
//! Communicators run on while control is away. When it is back, Hello names them, and joins that were open are sent
//! again; a join that has waited for control too long is refused here.

mod ledger;

use crate::telemetry::Answers;
use harmonaize_abi::{CommunicatorId, Epoch, GrantId};
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_api::v1::{self, RefusedKind, from_agent, to_agent};
use harmonaize_identity::{CONTROL, Dial, Protection, Remote};
use ledger::Ledger;
pub use ledger::LedgerImage;
use std::collections::VecDeque;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

/// Messages and events that wait in each direction, usually.
const QUEUE: usize = 1024;

/// Most bytes of a message.
const MESSAGE_BYTES: usize = 16 << 20;

/// Why there is no session while another process takes over.
const PAUSED: &str = "the agent hands over to its successor";

/// How long the last messages may take when the agent goes down.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// What the agent's operator decided about control.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where each control listens, "host:port": one of them leads.
    pub control: Vec<String>,
    /// How the session is protected.
    pub protection: Protection,
    /// What makes connections with control; the system's TCP where nothing else does.
    pub dial: Option<Dial>,
    /// How many messages and events wait in each direction.
    pub queue: usize,
    /// Name of this host in control's topology.
    pub host: String,
    /// Where other agents connect to this one.
    pub listen: SocketAddr,
    /// First and longest pause between attempts to connect.
    pub retry: (Duration, Duration),
    /// How long a connection with control may take.
    pub connect_timeout: Duration,
    /// How long a silent control counts as alive.
    pub session_timeout: Duration,
    /// How long a join waits for a control that cannot be reached.
    pub join_timeout: Duration,
    /// What this agent can do where its host allows it.
    pub abilities: v1::Capabilities,
    /// What this is, if no host's agent but an aggregator.
    pub aggregator: Option<v1::Aggregator>,
    /// What answers operators' questions on rows; without it they stay without an answer.
    pub answers: Option<Answers>,
}

impl Settings {
    /// The usual times.
    pub fn new(control: Vec<String>, protection: Protection, host: String, listen: SocketAddr) -> Self {
        // Where several could take over, one of them does so within seconds, and one that does not answer costs as long.
        let several = control.len() > 1;
        Self {
            control,
            protection,
            dial: None,
            queue: QUEUE,
            host,
            listen,
            retry: (Duration::from_millis(100), Duration::from_secs(if several { 1 } else { 3 })),
            connect_timeout: Duration::from_secs(if several { 1 } else { 5 }),
            session_timeout: Duration::from_secs(5),
            join_timeout: Duration::from_secs(30),
            abilities: v1::Capabilities::default(),
            aggregator: None,
            answers: None,
        }
    }
}

/// What control says, or what becomes of the session.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The session is open.
    Connected(v1::Welcome),
    /// The session ended or could not be opened. Another attempt follows; nothing else changes.
    Disconnected {
        /// Why, for the operator.
        reason: String,
        /// The kind, where control refused the session.
        refused: Option<RefusedKind>,
    },
    /// A communicator has formed: prepare its first epoch, then send `Prepared`. A rank whose join was withdrawn
    /// meanwhile is to be answered with `Failed`.
    Form(v1::Recipe),
    /// Prepare this epoch beside the current one, then send `Prepared`.
    Change(v1::Recipe),
    /// Every participant has prepared the epoch. May come again after control restarted.
    Ready {
        /// Which.
        communicator: CommunicatorId,
        /// Its epoch.
        epoch: Epoch,
    },
    /// An epoch that was prepared will not be used.
    Abandon(v1::Abandon),
    /// A join will not happen; its text is made for the tenant.
    JoinRefused(v1::JoinRefused),
    /// The communicator has ended elsewhere. Its reason is for the operator alone.
    Dissolve(v1::Dissolved),
    /// Say which way connections would take: answer with `PathsTraced`.
    TracePaths(v1::TracePaths),
    /// Say how much of a way is free: answer with `PathProbed`.
    ProbePath(v1::ProbePath),
    /// Have large operations of a communicator wait for their turn: ask with `TurnWanted`, and say `TurnDone`.
    Turns(v1::Interleaving),
    /// The turn that was asked for.
    TurnGiven(v1::GrantSlot),
    /// Serve a communicator: answer with `AggregationGranted`.
    GrantAggregation(v1::GrantAggregation),
    /// Serve this grant no longer.
    RevokeAggregation(GrantId),
    /// Serve these tenants beside those of the configuration, and no others: answer with `TenantsServed`.
    ServeTenants(Vec<v1::AddedTenant>),
    /// Answer to what a tenant asked.
    Answered(ControlAnswer),
    /// Answer with a `Report` of this id.
    ReportRequest {
        /// For the answer.
        id: u64,
    },
}

/// Control's answer to what a tenant asked.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "one at a time, handed on at once")]
pub enum ControlAnswer {
    /// To `ReadEvents`.
    Events(v1::EventsRead),
    /// To `Negotiate`.
    Negotiated(v1::Negotiated),
    /// To `BeginIteration`.
    Iteration(v1::IterationChoice),
    /// To `Hint`.
    Hinted(v1::Hinted),
    /// To `AwaitOrder`.
    Runner(v1::RunnerOrder),
    /// To `SetBid`.
    Bid(v1::BidSet),
}

/// The agent's end of the session. Dropping `to_control` ends it after what is queued.
#[derive(Debug)]
pub struct Control {
    /// Messages to control; Hello is sent without being asked for. Full while control reads slower than the agent talks.
    pub to_control: mpsc::Sender<from_agent::Message>,
    /// What control says, in order.
    pub events: mpsc::Receiver<Event>,
    /// Ends once `to_control` is dropped, or `events`.
    pub task: JoinHandle<()>,
    /// For an agent that hands over, or takes over.
    pub pause: Pause,
}

/// Has the session pause, for another process to go on with it.
#[derive(Debug)]
pub struct Pause {
    paused: watch::Sender<bool>,
    images: mpsc::Sender<oneshot::Sender<Option<LedgerImage>>>,
}

impl Pause {
    /// From now on there is no session, or there is one again. One that is open ends once all is said; [`Event::Disconnected`] follows.
    pub fn set(&self, paused: bool) {
        self.paused.send_replace(paused);
    }

    /// What another process's session goes on with, while there is none here; none while joins are open.
    pub async fn image(&self) -> Option<LedgerImage> {
        let (reply, image) = oneshot::channel();
        self.images.send(reply).await.ok()?;
        image.await.ok().flatten()
    }
}

/// Starts the session's task on the current tokio runtime.
pub fn connect(settings: Settings) -> Control {
    let ledger = Ledger::new(&settings);
    begin(settings, ledger, false)
}

/// The same where another process's session is gone on with.
///
/// # Errors
/// If the image is none.
pub fn resume(settings: Settings, image: LedgerImage) -> Result<Control, prost::DecodeError> {
    let mut ledger = Ledger::new(&settings);
    ledger.inherit(image)?;
    Ok(begin(settings, ledger, false))
}

fn begin(settings: Settings, ledger: Ledger, paused: bool) -> Control {
    let (to_control, outgoing) = mpsc::channel(settings.queue);
    let (sink, events) = mpsc::channel(settings.queue);
    let (images, image_requests) = mpsc::channel(1);
    let (paused, pause) = watch::channel(paused);
    let session = Session {
        pause,
        image_requests,
        settings,
        at: 0,
        ledger,
        outgoing,
        events: sink,
        outbox: VecDeque::new(),
        inbox: VecDeque::new(),
    };
    let pause = Pause { paused, images };
    Control { to_control, events, task: tokio::spawn(session.run()), pause }
}

/// A thread for the session with control and for nothing else. No tenant's process holds it up, however much it asks.
#[derive(Debug)]
pub struct SessionThread {
    runtime: Handle,
    /// The thread ends once this is dropped.
    _stop: oneshot::Sender<()>,
}

impl SessionThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the process may have no more threads or descriptors.
    pub fn start() -> std::io::Result<Self> {
        let own = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (runtime, (stop, stopped)) = (own.handle().clone(), oneshot::channel::<()>());
        let until = move || drop(own.block_on(stopped));
        std::thread::Builder::new().name("control".to_owned()).spawn(until)?;
        Ok(Self { runtime, _stop: stop })
    }

    /// Has [`connect`] or [`resume`] start the session's task on this thread.
    pub fn enter<T>(&self, start: impl FnOnce() -> T) -> T {
        let _entered = self.runtime.enter();
        start()
    }
}

/// Why the task stops trying.
struct AgentGone;

struct Session {
    pause: watch::Receiver<bool>,
    /// Who wants to know what another process's session needs.
    image_requests: mpsc::Receiver<oneshot::Sender<Option<LedgerImage>>>,
    settings: Settings,
    /// Which control is tried now, or talked to.
    at: usize,
    ledger: Ledger,
    outgoing: mpsc::Receiver<from_agent::Message>,
    events: mpsc::Sender<Event>,
    /// Towards control, not yet taken by the stream.
    outbox: VecDeque<from_agent::Message>,
    /// Towards the agent, not yet taken by it.
    inbox: VecDeque<Event>,
}

/// An open stream.
struct Stream {
    up: mpsc::Sender<v1::FromAgent>,
    down: Streaming<v1::ToAgent>,
    /// For calls beside the session, on its connection.
    beside: ProviderClient<Channel>,
}

/// What happened next in a session.
enum SessionEvent {
    /// Something was handed on.
    Progress,
    /// Another process may go on with the session.
    Paused,
    /// The agent said something, or has gone.
    FromAgent(Option<Box<from_agent::Message>>),
    /// Control said something, or the stream ended.
    FromControl(Result<Option<Box<v1::ToAgent>>, tonic::Status>),
}

impl Session {
    async fn run(mut self) {
        let (mut pause, mut tried) = (self.settings.retry.0, 0);
        loop {
            let mut paused = self.pause.clone();
            if self.idle_until(async move { drop(paused.wait_for(|paused| !paused).await) }).await.is_err() {
                return;
            }
            let outcome = self.attempt().await;
            let Ok((reason, refused, welcomed)) = outcome else { return };
            tracing::warn!(control = self.control(), %reason, "no session with control");
            self.ledger.disconnected(Instant::now());
            self.inbox.push_back(Event::Disconnected { reason, refused });
            self.at = (self.at + 1) % self.settings.control.len().max(1);
            if welcomed {
                (pause, tried) = (self.settings.retry.0, 0);
            }
            tried += 1;
            // The others are asked at once: one of them may lead by now.
            if tried < self.settings.control.len() {
                continue;
            }
            if self.wait(jittered(pause)).await.is_err() {
                return;
            }
            (pause, tried) = ((pause * 2).min(self.settings.retry.1), 0);
        }
    }

    /// One session, from connecting to its end: why it ended, whether control refused it, whether it had been open.
    async fn attempt(&mut self) -> Result<(String, Option<RefusedKind>, bool), AgentGone> {
        self.outbox.clear();
        let (opened, opening) = tokio::sync::oneshot::channel();
        let (server, within) = (self.server(), self.settings.connect_timeout);
        let connecting = tokio::spawn(async move {
            let _ = opened.send(open(server, within).await);
        });
        let stream = self.idle_until(opening).await;
        connecting.abort();
        let mut stream = match stream? {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Ok((error.to_string(), None, false)),
            Err(_) => return Ok(("connecting was cut off".to_owned(), None, false)),
        };
        self.outbox.push_back(self.ledger.hello());
        self.exchange(&mut stream).await
    }

    /// The control that is tried now.
    fn control(&self) -> &str {
        self.settings.control.get(self.at).map_or("", String::as_str)
    }

    fn server(&self) -> Result<Remote, ConnectError> {
        let half = (self.settings.session_timeout / 2).max(Duration::from_millis(50));
        let server = Remote::at(&self.settings.protection, CONTROL, self.control())?;
        let server = match &self.settings.dial {
            Some(dial) => server.through(dial.clone()),
            None => server,
        };
        Ok(server.with(|endpoint| {
            let endpoint = endpoint.tcp_nodelay(true).http2_keep_alive_interval(half);
            endpoint.keep_alive_timeout(half).keep_alive_while_idle(true)
        }))
    }

    async fn exchange(
        &mut self,
        stream: &mut Stream,
    ) -> Result<(String, Option<RefusedKind>, bool), AgentGone> {
        let mut welcomed = false;
        // A stream that control no longer reads may still hold its last word.
        let mut up_open = true;
        loop {
            let most = self.settings.queue;
            let (hear, listen) = (self.inbox.len() < most, self.outbox.len() < most);
            let mut pause = self.pause.clone();
            let step = tokio::select! {
                Ok(_) = pause.wait_for(|paused| *paused) => SessionEvent::Paused,
                message = stream.down.message(), if hear => SessionEvent::FromControl(message.map(|message| message.map(Box::new))),
                permit = stream.up.reserve(), if up_open && !self.outbox.is_empty() => {
                    up_open = permit.is_ok();
                    if let Some((permit, message)) = permit.ok().zip(self.outbox.pop_front()) {
                        permit.send(message.into());
                    }
                    SessionEvent::Progress
                }
                message = self.outgoing.recv(), if listen => SessionEvent::FromAgent(message.map(Box::new)),
                permit = self.events.reserve(), if !self.inbox.is_empty() => {
                    let event = self.inbox.pop_front();
                    let (permit, event) = permit.ok().zip(event).ok_or(AgentGone)?;
                    permit.send(event);
                    SessionEvent::Progress
                }
            };
            match step {
                SessionEvent::Progress => {}
                SessionEvent::Paused => {
                    self.drain(stream).await;
                    return Ok((PAUSED.to_owned(), None, welcomed));
                }
                SessionEvent::FromAgent(Some(message)) => {
                    self.outbox.extend(self.ledger.outgoing(Instant::now(), *message))
                }
                SessionEvent::FromAgent(None) => {
                    self.drain(stream).await;
                    return Err(AgentGone);
                }
                SessionEvent::FromControl(Ok(Some(message))) => match message.message {
                    Some(to_agent::Message::Refused(refused)) => {
                        return Ok((refused.reason.clone(), Some(refused.kind()), welcomed));
                    }
                    Some(to_agent::Message::Welcome(welcome)) => {
                        welcomed = true;
                        self.outbox.extend(self.ledger.connected());
                        self.inbox.push_back(Event::Connected(welcome));
                    }
                    Some(to_agent::Message::Question(question)) => {
                        if let Some(answers) = self.settings.answers.as_ref().filter(|_| welcomed) {
                            answers.begin(question, stream.beside.clone());
                        }
                    }
                    Some(message) => self.inbox.extend(self.ledger.incoming(message)),
                    // Of a later version of the interface.
                    None => {}
                },
                SessionEvent::FromControl(Ok(None)) => {
                    return Ok(("control closed the session".to_owned(), None, welcomed));
                }
                SessionEvent::FromControl(Err(status)) => return Ok((status_text(&status), None, welcomed)),
            }
        }
    }

    /// Gets the last messages out.
    async fn drain(&mut self, stream: &mut Stream) {
        let rest = async {
            for message in self.outbox.drain(..) {
                if stream.up.send(message.into()).await.is_err() {
                    return;
                }
            }
            let (closed, _) = mpsc::channel(1);
            drop(std::mem::replace(&mut stream.up, closed));
            while let Ok(Some(_)) = stream.down.message().await {}
        };
        let _ = timeout(DRAIN_TIMEOUT, rest).await;
    }

    /// Keeps account of what the agent says, hands out events and refuses joins that waited too long, until `done`.
    async fn idle_until<T>(&mut self, done: impl Future<Output = T>) -> Result<T, AgentGone> {
        tokio::pin!(done);
        loop {
            let deadline = self.ledger.deadline();
            let late = async {
                match deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                value = &mut done => return Ok(value),
                () = late => self.inbox.extend(self.ledger.expire(Instant::now())),
                Some(reply) = self.image_requests.recv() => {
                    let image = (!self.ledger.has_joins()).then(|| self.ledger.image());
                    let _ = reply.send(image);
                }
                message = self.outgoing.recv() => match message {
                    Some(message) => drop(self.ledger.outgoing(Instant::now(), message)),
                    None => return Err(AgentGone),
                },
                permit = self.events.reserve(), if !self.inbox.is_empty() => match permit {
                    Ok(permit) => {
                        if let Some(event) = self.inbox.pop_front() {
                            permit.send(event);
                        }
                    }
                    Err(_) => return Err(AgentGone),
                },
            }
        }
    }

    async fn wait(&mut self, pause: Duration) -> Result<(), AgentGone> {
        self.idle_until(tokio::time::sleep(pause)).await
    }
}

/// Why no session with a control opens.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    /// The address or the certificates cannot be used.
    #[error(transparent)]
    Remote(#[from] harmonaize_identity::Error),
    /// It does not end a handshake.
    #[error("no handshake within {0:?}")]
    Silent(Duration),
    /// It cannot be reached.
    #[error("{}", error_text(.0))]
    Connect(#[from] tonic::transport::Error),
    /// It opens no session.
    #[error("{}", status_text(.0))]
    Session(#[from] Box<tonic::Status>),
}

async fn open(server: Result<Remote, ConnectError>, within: Duration) -> Result<Stream, ConnectError> {
    // A control that stands still takes connections, and never ends a handshake.
    let connected = timeout(within, server?.connect()).await;
    let channel = connected.map_err(|_| ConnectError::Silent(within))??;
    let (up, queue) = mpsc::channel(64);
    let mut beside = ProviderClient::new(channel).max_decoding_message_size(MESSAGE_BYTES);
    let response = beside.session(ReceiverStream::new(queue)).await;
    let down = response.map_err(Box::new)?.into_inner();
    Ok(Stream { up, down, beside })
}

/// Between half and all of a pause, so that agents do not return in step.
fn jittered(pause: Duration) -> Duration {
    let share = (RandomState::new().build_hasher().finish() % 512) as u32;
    pause / 2 + pause / 1024 * share
}

fn status_text(status: &tonic::Status) -> String {
    format!("{}: {}", status.code(), status.message())
}

/// An error with its causes; tonic's own text leaves them out.
fn error_text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
