//! The one task that owns the state: feeds it messages, calls and the time, and carries out what it decides.

use crate::state::{Fact, Output, ReorderError, SessionId, Settings, State};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{FabricSnapshot, FromAgent, StatusReply, ToAgent};
use std::collections::BTreeMap;
use std::future::Future;
use std::time::{Duration, SystemTime};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

/// Most messages that wait for one agent; one that reads slower than that loses its session.
pub(crate) const SESSION_QUEUE: usize = 4096;

/// What an agent's stream carries.
pub(crate) type Downstream = Result<ToAgent, tonic::Status>;

/// What the gRPC layer asks for.
pub(crate) enum Command {
    /// A stream opened.
    Open { session: SessionId, agent: mpsc::Sender<Downstream>, ended: oneshot::Sender<()> },
    /// A stream's next message.
    Message(SessionId, FromAgent),
    /// A stream ended.
    Closed(SessionId),
    /// `harmonaize status`.
    Status(Duration, oneshot::Sender<StatusReply>),
    /// `harmonaize reorder`.
    Reorder(u64, Vec<String>, oneshot::Sender<Result<u64, ReorderError>>),
    /// `harmonaize top`.
    Fabric(oneshot::Sender<FabricSnapshot>),
    /// `harmonaize dissolve`; the answer is whether there was one.
    Dissolve(u64, String, oneshot::Sender<bool>),
}

/// An open stream. Dropping it ends the stream after what is queued.
struct Stream {
    agent: mpsc::Sender<Downstream>,
    _ended: oneshot::Sender<()>,
}

/// The task.
pub(crate) struct Actor {
    state: State,
    start: Instant,
    most_streams: usize,
    streams: BTreeMap<SessionId, Stream>,
    status: BTreeMap<u64, oneshot::Sender<StatusReply>>,
}

impl Actor {
    pub(crate) fn new(settings: Settings, seed: [u8; 32]) -> Self {
        let most_streams = settings.topology.hosts().len() * 2 + 16;
        let state = State::new(settings, seed);
        Self { state, start: Instant::now(), most_streams, streams: BTreeMap::new(), status: BTreeMap::new() }
    }

    /// Runs until `shutdown`, then tells the agents and ends their streams.
    pub(crate) async fn run(
        mut self,
        mut commands: mpsc::Receiver<Command>,
        shutdown: impl Future<Output = ()>,
    ) {
        tokio::pin!(shutdown);
        loop {
            let wake = self.state.next_deadline().and_then(|deadline| self.start.checked_add(deadline));
            let timer = async {
                match wake {
                    Some(wake) => tokio::time::sleep_until(wake).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.command(command),
                    None => break,
                },
                () = timer => self.state.expire(self.start.elapsed()),
                () = &mut shutdown => break,
            }
            self.carry_out();
        }
        self.state.shut_down();
        self.carry_out();
    }

    fn command(&mut self, command: Command) {
        let now = self.start.elapsed();
        match command {
            Command::Open { session, agent, ended } => {
                if self.streams.len() >= self.most_streams {
                    let _ = agent.try_send(Err(tonic::Status::resource_exhausted("too many sessions")));
                    return;
                }
                self.streams.insert(session, Stream { agent, _ended: ended });
            }
            // What a stream still held when its session was ended is nobody's.
            Command::Message(session, message) if self.streams.contains_key(&session) => {
                self.state.message(now, session, message);
            }
            Command::Message(..) => {}
            Command::Closed(session) => {
                self.streams.remove(&session);
                self.state.session_ended(now, session);
            }
            Command::Status(patience, answer) => {
                let id = self.state.ask_status(now, patience);
                self.status.insert(id, answer);
            }
            Command::Fabric(answer) => {
                let realtime = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                let realtime = u64::try_from(realtime.as_nanos()).unwrap_or(u64::MAX);
                let _ = answer.send(self.state.fabric(now, realtime));
            }
            Command::Reorder(id, hosts, answer) => {
                let _ = answer.send(self.state.reorder(now, id, &hosts));
            }
            Command::Dissolve(id, reason, answer) => {
                let _ = answer.send(self.state.dissolve(now, id, &reason));
            }
        }
    }

    fn carry_out(&mut self) {
        loop {
            let outputs = self.state.take_outputs();
            if outputs.is_empty() {
                return;
            }
            for output in outputs {
                match output {
                    Output::Send(session, message) => self.send(session, message.into()),
                    Output::End(session) => drop(self.streams.remove(&session)),
                    Output::Status(id, reply) => {
                        if let Some(answer) = self.status.remove(&id) {
                            let _ = answer.send(*reply);
                        }
                    }
                    Output::Fact(fact) => log(&fact),
                }
            }
        }
    }

    fn send(&mut self, session: SessionId, message: ToAgent) {
        let Some(stream) = self.streams.get(&session) else { return };
        if let Err(error) = stream.agent.try_send(Ok(message)) {
            tracing::warn!(session = session.0, %error, "an agent does not read; its session ends");
            self.streams.remove(&session);
            self.state.session_ended(self.start.elapsed(), session);
        }
    }
}

fn log(fact: &Fact) {
    let id = communicator_text;
    match fact {
        Fact::AgentConnected { host, listen } => tracing::info!(%host, %listen, "agent connected"),
        Fact::AgentGone { host } => tracing::warn!(%host, "agent gone"),
        Fact::SessionRefused { reason } => tracing::warn!(%reason, "session refused"),
        Fact::Formed { communicator, tenant, name, ranks, hosts } => {
            let (communicator, hosts) = (id(*communicator), hosts.join(","));
            tracing::info!(%tenant, %communicator, %name, ranks, %hosts, "communicator formed");
        }
        Fact::EpochCurrent { communicator, tenant, name, epoch } => {
            tracing::info!(%tenant, communicator = %id(*communicator), %name, epoch, "epoch in use");
        }
        Fact::EpochAbandoned { communicator, tenant, name, epoch, why } => {
            tracing::warn!(%tenant, communicator = %id(*communicator), %name, epoch, %why, "epoch given up");
        }
        Fact::Closed { communicator, tenant, name } => {
            tracing::info!(%tenant, communicator = %id(*communicator), %name, "communicator closed");
        }
        Fact::TelemetryRefused { host, count, why } => {
            tracing::warn!(%host, count, %why, "telemetry refused or dropped");
        }
        Fact::Ended { communicator, tenant, name, kind, ranks, detail } => {
            let communicator = id(*communicator);
            tracing::warn!(%tenant, %communicator, %name, ?kind, ?ranks, %detail, "communicator ended");
        }
    }
}
