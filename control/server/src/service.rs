//! The gRPC layer: streams and calls become commands to the actor.

#[cfg(feature = "testing")]
mod simulated;
#[cfg(test)]
mod tests;

use crate::access::{Caller, Current, Decision, Role, Speaker, peer, refused};
use crate::actor::{Actor, Command, SESSION_QUEUE, realtime};
use crate::config::{Config, Place};
use crate::http::log_unknown;
use crate::keeper::Keeper;
use crate::leader::{Commands, Leader};
use crate::operators::{Operators, Stored as Shared};
use crate::page::Feed;
use crate::relay::{Downstream, Relay};
use crate::reload::follow;
use crate::state::{ReorderError, SessionId, Settings};
use crate::thread::Running;
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1::operator_server::OperatorServer;
use harmonaize_api::v1::provider_server::{Provider, ProviderServer};
use harmonaize_api::v1::{
    AnswerEnd, AnswerPart, DissolveReply, DissolveRequest, FabricSnapshot, FromAgent, LeaderReply,
    LeaderRequest, ReorderReply, ReorderRequest, StatusReply, StatusRequest, WatchTelemetryRequest,
    from_agent,
};
use harmonaize_identity::{self as identity, Identity, Places, Protection};
use harmonaize_program::{Compiled, Watchdog};
use harmonaize_store::etcd::{Election, Role as Elected, Term};
use harmonaize_store::{Change, Embedded, Fabric, Memory, Store, StoreError, Stored};
use harmonaize_units::{Gcra, Quota};
use prost::Message;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

#[cfg(feature = "testing")]
pub use simulated::Simulated;

/// Commands that wait for the actor.
const COMMAND_QUEUE: usize = 1024;

/// How long agents may take to answer a status request that does not say, and at most.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Time between two snapshots for who watches telemetry: where it does not say, at least, at most.
const WATCH: (Duration, Duration, Duration) =
    (Duration::from_secs(1), Duration::from_millis(100), Duration::from_secs(60));

/// Most who watch telemetry at a time.
const WATCHERS: usize = 64;

/// Most bytes of a message of an agent or aggregator, and of an operator's call.
const MESSAGE_BYTES: (usize, usize) = (16 << 20, 64 << 10);

/// Most connections of one certificate's holder. An agent or aggregator has one, or two while it comes again; an operator has
/// one for each tool that runs.
const CONNECTIONS: (usize, usize) = (8, 64);

/// Most sessions of one certificate's holder. They are the one that it has, and the one before that nobody knows to be dead.
const SESSIONS: usize = 2;

/// Most streams at once of a connection of an agent's, and of an operator's.
const STREAMS: (u32, u32) = (8, 64);

/// How long the state of an elected control may give no sign of life before another is to lead.
const STUCK: Duration = Duration::from_secs(10);

/// The pause before a leader tries again to read what is stored.
const TAKE_OVER_AGAIN: Duration = Duration::from_millis(500);

/// How long streams may take to end after the shutdown.
const GRACE: Duration = Duration::from_secs(2);

/// A control server that listens.
pub struct Server {
    connections: Connections,
    address: SocketAddr,
    /// Where operators have a listener of their own.
    operators: Option<(Connections, SocketAddr)>,
    page: Option<(Connections, SocketAddr)>,
    /// Where schedulers ask.
    extender: Option<(Connections, SocketAddr)>,
    config: Config,
    kept: Kept,
}

/// What outlives this process.
enum Kept {
    /// Nobody else has it, and so this control leads.
    Own(Box<dyn Store>, Stored),
    /// Whoever is elected has it.
    Shared(Election),
}

type Connections = ReceiverStream<std::io::Result<identity::Connection>>;

/// Why a server does not go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The listener failed.
    #[error("serving: {0}")]
    Serve(tonic::transport::Error),
    /// Nobody can tell control to read its configuration again.
    #[error("cannot listen for SIGHUP: {0}")]
    Signal(std::io::Error),
    /// The system gives no randomness.
    #[error("the system gives no randomness: {0}")]
    Random(getrandom::Error),
    /// The system gives no thread for the store, or for the state.
    #[error("no thread for the store or the state: {0}")]
    Thread(std::io::Error),
    /// This control was elected, and its state answers nothing.
    #[error("the state has not answered for {0:?}; another control is to lead")]
    Stuck(Duration),
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address cannot be had.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The system gives no randomness.
    #[error("the system gives no randomness: {0}")]
    Random(getrandom::Error),
    /// What an earlier start left cannot be had, or this start's number not be kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Control has no identity.
    #[error(transparent)]
    Identity(#[from] identity::Error),
}

impl Server {
    /// Takes up what an earlier start left, has this start's number stored, and starts to listen. Where several controls share a
    /// store that is for the one that leads, whenever it does.
    ///
    /// # Errors
    /// Where the address or the store cannot be had, or the system gives no randomness.
    pub async fn bind(config: Config) -> Result<Self, StartError> {
        Self::compiled_bind(config).await
    }

    fn compiled_bind(config: Config) -> Compiled<'static, Result<Self, StartError>> {
        Box::pin(Self::begin(config))
    }

    async fn begin(config: Config) -> Result<Self, StartError> {
        let first = u32::from_le_bytes(random().map_err(StartError::Random)?);
        let topology = config.store.as_ref().map(|store| store.topology.as_str());
        let own = |store: Box<dyn Store>| {
            begin(store, topology, |stored| stored.next_boot(first))
                .map(|(store, stored)| Kept::Own(store, stored))
        };
        let kept = match config.store.as_ref().map(|store| &store.place) {
            None => own(Box::new(Memory::new()))?,
            Some(Place::File(path)) => own(Box::new(Embedded::open(path)?))?,
            Some(Place::Etcd(members)) => {
                Kept::Shared(Election::join(members.clone(), config.listen.to_string())?)
            }
        };
        let protection = &config.access.protection;
        let shared = config.listen_operators.is_none();
        let most = if shared { CONNECTIONS.1 } else { CONNECTIONS.0 };
        let (connections, address) = listen(config.listen, protection, most).await?;
        let operators = match config.listen_operators {
            Some(operators) => Some(listen(operators, protection, CONNECTIONS.1).await?),
            None => None,
        };
        let page = listen(config.page, protection, CONNECTIONS.1).await;
        let page = page.inspect_err(|error| tracing::error!("no page: {error}")).ok();
        let extender = match config.scheduler_extender {
            Some(extender) => Some(listen(extender, protection, CONNECTIONS.1).await?),
            None => None,
        };
        Ok(Self { connections, address, operators, page, extender, config, kept })
    }

    /// Where agents and aggregators connect.
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Where operators' tools connect.
    pub fn operators_address(&self) -> SocketAddr {
        self.operators.as_ref().map_or(self.address, |(_, address)| *address)
    }

    /// Where operators' browsers read the page; none where that address could not be had.
    pub fn page_address(&self) -> Option<SocketAddr> {
        self.page.as_ref().map(|(_, address)| *address)
    }

    /// Where schedulers of Kubernetes ask about hosts; none where that is not configured.
    pub fn extender_address(&self) -> Option<SocketAddr> {
        self.extender.as_ref().map(|(_, address)| *address)
    }

    /// Serves until `shutdown`; then agents are told, and streams end. Communicators run on without control. What control decides it
    /// computes on a thread of its own: meanwhile connections are served, and their pings answered.
    ///
    /// # Errors
    /// Where the listener fails, or the system gives no thread.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), RunError> {
        self.compiled(Box::pin(shutdown)).await
    }

    fn compiled<'a>(self, shutdown: Compiled<'a, ()>) -> Compiled<'a, Result<(), RunError>> {
        Box::pin(self.serve(shutdown))
    }

    async fn serve(self, shutdown: Compiled<'_, ()>) -> Result<(), RunError> {
        let access = Arc::new(Current::new(self.config.access));
        let (leads, commands) = Commands::new();
        let (in_force, settings) = watch::channel(self.config.settings);
        let shared = match &self.kept {
            Kept::Own(..) => None,
            Kept::Shared(election) => Some(Shared { reader: election.reader(), settings: settings.clone() }),
        };
        let mut background = JoinSet::new();
        if let Some(source) = self.config.source {
            let hangup = signal(SignalKind::hangup()).map_err(RunError::Signal)?;
            let (access, shared) = (Arc::clone(&access), shared.clone());
            background.spawn(follow(source, hangup, access, in_force, commands.clone(), shared));
        }
        background.spawn(report_life(commands.clone()));
        let (metrics, metrics_closed) = watch::channel(false);
        if let Some(listener) = harmonaize_metrics::listen(self.config.metrics, Duration::ZERO).await {
            let all = (commands.clone(), access.get().protection.clone());
            let scrape = move || {
                let (commands, protection) = all.clone();
                scrape_page(commands, protection)
            };
            background.spawn(harmonaize_metrics::serve(scrape, listener, metrics_closed));
        }
        if let Some((connections, _)) = self.page {
            let feed = Feed::new();
            background.spawn(Arc::clone(&feed).run(commands.clone()));
            background.spawn(crate::page::serve(connections, Arc::clone(&access), feed));
        }
        if let Some((connections, _)) = self.extender {
            background.spawn(crate::extender::serve(connections, Arc::clone(&access), commands.clone()));
        }
        let relay = Arc::new(Relay::new());
        let operators = Operators::new(commands.clone(), Arc::clone(&access), shared, Arc::clone(&relay));
        let operators = OperatorServer::new(operators);
        let half = (self.config.session_timeout / 2).max(Duration::from_millis(50));
        let operators = operators.max_decoding_message_size(MESSAGE_BYTES.1);
        let agents = Service {
            commands: commands.clone(),
            access,
            door: if self.operators.is_some() { Door::Agents } else { Door::Both },
            sessions: Arc::default(),
            places: Places::default(),
            watchers: Arc::new(Semaphore::new(WATCHERS)),
            relay,
            hello_timeout: self.config.session_timeout,
            listen: self.address.to_string().into(),
            queue: SESSION_QUEUE,
        };
        let (stop, stopped) = watch::channel(false);
        let builder = |streams| {
            tonic::transport::Server::builder()
                .http2_keepalive_interval(Some(half))
                .http2_keepalive_timeout(Some(half))
                .max_concurrent_streams(Some(streams))
        };
        let until = |mut stopped: watch::Receiver<bool>| async move {
            let _ = stopped.wait_for(|stop| *stop).await;
        };
        let provider =
            |service: Service, bytes| ProviderServer::new(service).max_decoding_message_size(bytes);
        let mut serves = JoinSet::new();
        let shared = self.operators.is_none();
        if let Some((connections, _)) = self.operators {
            let own = provider(Service { door: Door::Operators, ..agents.clone() }, MESSAGE_BYTES.1);
            let routes = Routes::new(own).add_service(operators.clone());
            let router = builder(STREAMS.1).add_routes(log_unknown(routes));
            let serve = router.serve_with_incoming_shutdown(connections, until(stopped.clone()));
            serves.spawn(serve);
        }
        let streams = if shared { STREAMS.1 } else { STREAMS.0 };
        let mut routes = Routes::new(provider(agents, MESSAGE_BYTES.0));
        if shared {
            routes = routes.add_service(operators);
        }
        let router = builder(streams).add_routes(log_unknown(routes));
        serves.spawn(router.serve_with_incoming_shutdown(self.connections, until(stopped)));
        let serve = async {
            while let Some(served) = serves.join_next().await {
                served.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))?;
            }
            Ok(())
        };
        tokio::pin!(serve);
        let topology = self.config.store.map(|store| store.topology);
        let lead = Lead { leads, commands, settings, topology };
        let lead = async {
            match self.kept {
                // No other control takes its place, and systemd's watchdog waits for it.
                Kept::Own(store, stored) => lead.lead(store, stored, None, shutdown).await,
                Kept::Shared(election) => lead.when_elected(election, shutdown).await,
            }
        };
        tokio::select! {
            ended = &mut serve => return ended.map_err(RunError::Serve),
            ended = lead => ended?,
        }
        metrics.send_replace(true);
        stop.send_replace(true);
        tokio::time::timeout(GRACE, serve).await.unwrap_or(Ok(())).map_err(RunError::Serve)
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("address", &self.address)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// Has systemd's watchdog, where there is one, wait for answers of the state. Where another control leads there is none to wait for.
async fn report_life(commands: Commands) {
    let mut watchdog = Watchdog::new(Instant::now());
    let Some(interval) = watchdog.interval() else { return };
    loop {
        commands.probe().await;
        watchdog.alive(Instant::now());
        tokio::time::sleep(interval).await;
    }
}

/// Returns all metrics as text; of a control that follows, that it does.
async fn scrape_page(commands: Commands, protection: Protection) -> Option<String> {
    let known = commands.ask(Command::Metrics).await.ok();
    let leads = known.is_some();
    let mut page = known.unwrap_or_default();
    page.build("control", harmonaize_program::version());
    page.gauge("control_leader", "", "Whether this control leads").count(Vec::new(), leads.into());
    page.certificate(protection.certificate_ends().ok().flatten());
    page.text().ok()
}

/// What it takes to lead.
struct Lead {
    leads: watch::Sender<Leader>,
    commands: Commands,
    settings: watch::Receiver<Settings>,
    /// The file, where it is stored.
    topology: Option<String>,
}

impl Lead {
    /// Leads with this store until `over`; then agents are told, and what is decided is written. A state that gives no sign of life for
    /// as long as `patience` is left behind, and that is an error.
    async fn lead(
        &self,
        store: Box<dyn Store>,
        stored: Stored,
        patience: Option<Duration>,
        over: impl Future<Output = ()>,
    ) -> Result<(), RunError> {
        let (tenants, withdrawn, plans) =
            (stored.tenants.len(), stored.withdrawals.len(), stored.plans.len());
        match &self.topology {
            Some(_) => tracing::info!(tenants, withdrawn, plans, "taken up from the store"),
            None => {
                tracing::info!("no `store` is configured: drains and added tenants end with this process")
            }
        }
        let mut settings = self.settings.clone();
        let decided = settings.borrow_and_update().clone();
        let keeper = Keeper::start(store).map_err(RunError::Thread)?;
        let actor = Actor::new(decided, random().map_err(RunError::Random)?, stored, keeper);
        let (commands, queue) = mpsc::channel(COMMAND_QUEUE);
        let running = Running::start(actor, queue).map_err(RunError::Thread)?;
        self.leads.send_replace(Leader::Here(commands.clone()));
        if settings.has_changed().unwrap_or(false) {
            let again = Box::new(settings.borrow().clone());
            let _ = commands.send(Command::Configure(again, oneshot::channel().0)).await;
        }
        drop(commands);
        let ended = running.until(async {
            over.await;
            self.leads.send_replace(Leader::Elsewhere(None));
        });
        let stuck = async {
            match patience {
                Some(patience) => {
                    self.commands.stuck(patience).await;
                    patience
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ended = ended => ended.map_err(RunError::Thread),
            patience = stuck => {
                self.leads.send_replace(Leader::Elsewhere(None));
                Err(RunError::Stuck(patience))
            }
        }
    }

    /// Leads whenever this control is elected, until `shutdown`. In the end it resigns, whyever it came.
    async fn when_elected(
        &self,
        election: Election,
        shutdown: impl Future<Output = ()>,
    ) -> Result<(), RunError> {
        let ended = self.terms(&election, shutdown).await;
        // Its end waits for etcd.
        let _ = tokio::task::spawn_blocking(move || drop(election)).await;
        ended
    }

    /// Leads in each term that this control is elected for.
    async fn terms(&self, election: &Election, shutdown: impl Future<Output = ()>) -> Result<(), RunError> {
        tokio::pin!(shutdown);
        let (mut role, mut down) = (election.role(), false);
        while !down {
            let now = role.borrow_and_update().clone();
            let term = match now {
                Elected::Leads(term) => term,
                Elected::Follows(leader) => {
                    tracing::info!(leader = leader.as_deref().unwrap_or("nobody"), "this control follows");
                    self.leads.send_replace(Leader::Elsewhere(leader));
                    tokio::select! {
                        changed = role.changed() => down = changed.is_err(),
                        () = &mut shutdown => down = true,
                    }
                    continue;
                }
            };
            match self.take_over(election, term).await? {
                Ok((store, stored)) => {
                    tracing::info!("this control leads");
                    let over = async {
                        tokio::select! {
                            _ = role.wait_for(|role| *role != Elected::Leads(term)) => {}
                            () = &mut shutdown => down = true,
                        }
                    };
                    self.lead(store, stored, Some(STUCK), over).await?;
                }
                Err(error) => {
                    tracing::error!(%error, "this control is to lead, and cannot");
                    tokio::select! {
                        _ = tokio::time::sleep(TAKE_OVER_AGAIN) => {}
                        () = &mut shutdown => down = true,
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads what the leader before has left, and begins a start in it.
    async fn take_over(
        &self,
        election: &Election,
        term: Term,
    ) -> Result<Result<(Box<dyn Store>, Stored), StoreError>, RunError> {
        let (store, topology) = (election.store(term), self.topology.clone());
        let boot = u32::from_le_bytes(random().map_err(RunError::Random)?);
        let begun =
            tokio::task::spawn_blocking(move || begin(Box::new(store), topology.as_deref(), |_| boot)).await;
        Ok(begun.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())))
    }
}

/// Randomness of the system's.
fn random<const BYTES: usize>() -> Result<[u8; BYTES], getrandom::Error> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes).map(|()| bytes)
}

/// Reads a store, and begins a start of its own in it, which has this number. `topology` is stored if it is there.
fn begin(
    mut store: Box<dyn Store>,
    topology: Option<&str>,
    number: impl FnOnce(&Stored) -> u32,
) -> Result<(Box<dyn Store>, Stored), StoreError> {
    let mut stored = store.read()?;
    let mut changes = vec![Change::Boot(number(&stored))];
    if let Some(topology) = topology
        && stored.fabric.as_ref().is_none_or(|known| known.text != *topology)
    {
        if stored.fabric.is_some() {
            tracing::warn!("the topology is another than at the last start");
        }
        changes.push(Change::Fabric(Fabric { text: topology.to_owned(), since_ns: realtime().0 }));
    }
    // Durable before any id of this start is given: no two communicators ever have the same.
    store.write(&changes)?;
    changes.iter().for_each(|change| stored.apply(change));
    Ok((store, stored))
}

/// Listens for connections, of which one identity may have `most`.
async fn listen(
    address: SocketAddr,
    protection: &Protection,
    most: usize,
) -> Result<(Connections, SocketAddr), StartError> {
    let failed = |source| StartError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((identity::serve(listener, protection, most)?, address))
}

/// Whom a listener is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    Agents,
    Operators,
    Both,
}

#[derive(Clone)]
struct Service {
    commands: Commands,
    access: Arc<Current>,
    door: Door,
    sessions: Arc<AtomicU64>,
    /// Sessions by the names in certificates.
    places: Places,
    watchers: Arc<Semaphore>,
    relay: Arc<Relay>,
    hello_timeout: Duration,
    /// Where agents connect.
    listen: Arc<str>,
    /// Most messages that wait for one agent.
    queue: usize,
}

impl Service {
    /// Returns who calls, if he may. This must be operators' listener. He must have a role of at least `least`, and must not have
    /// called too often.
    fn operator<T>(&self, request: &Request<T>, least: Role, what: &'static str) -> Result<Caller, Status> {
        if self.door == Door::Agents {
            let why =
                "agents connect here; operators' tools at `listen_operators` of control's configuration";
            return Err(refused(&peer(request)?, what, why));
        }
        self.access.caller(request, least, what)
    }
}

#[tonic::async_trait]
impl Provider for Service {
    type SessionStream = ReceiverStream<Downstream>;
    type WatchTelemetryStream = ReceiverStream<Result<FabricSnapshot, Status>>;

    async fn watch_telemetry(
        &self,
        request: Request<WatchTelemetryRequest>,
    ) -> Result<Response<Self::WatchTelemetryStream>, Status> {
        self.operator(&request, Role::Viewer, "watch telemetry")?;
        let full = |_| Status::resource_exhausted("too many watch telemetry already");
        let place = Arc::clone(&self.watchers).try_acquire_owned().map_err(full)?;
        let interval = match request.into_inner().interval_ns {
            0 => WATCH.0,
            wanted => Duration::from_nanos(wanted).clamp(WATCH.1, WATCH.2),
        };
        let (snapshots, stream) = mpsc::channel(1);
        let commands = self.commands.queue()?;
        tokio::spawn(async move {
            watch(commands, snapshots, interval).await;
            drop(place);
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn session(
        &self,
        request: Request<Streaming<FromAgent>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let peer = peer(&request)?;
        if self.door == Door::Operators {
            let why = "operators' tools connect here; agents at `listen` of control's configuration";
            return Err(refused(&peer, "session", why));
        }
        let commands = self.commands.queue()?;
        let who = peer.identity.to_string();
        let most = if peer.identity == Identity::Local { usize::MAX } else { SESSIONS };
        let place = self.places.take(&who, most).ok_or_else(|| {
            let text = format!("{who} has {SESSIONS} sessions with control, as many as it may have; end one");
            Status::resource_exhausted(text)
        })?;
        let speaker = Speaker::new(peer);
        let session = SessionId(self.sessions.fetch_add(1, Ordering::Relaxed));
        let (agent, stream) = mpsc::channel(self.queue);
        let (ended, end) = oneshot::channel();
        let admission = Admission { access: Arc::clone(&self.access), speaker, agent: agent.downgrade() };
        let relay = Arc::clone(&self.relay);
        let open = Command::Open { session, agent, ended, relay: Arc::clone(&relay) };
        commands.send(open).await.map_err(|_| Status::unavailable("control is going down"))?;
        let upstream = request.into_inner();
        let read =
            read(upstream, session, admission, commands, end, (self.hello_timeout, Arc::clone(&relay)));
        tokio::spawn(async move {
            read.await;
            relay.disconnected(session);
            drop(place);
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn answer(&self, request: Request<Streaming<AnswerPart>>) -> Result<Response<AnswerEnd>, Status> {
        let peer = peer(&request)?;
        if self.door == Door::Operators {
            return Err(refused(&peer, "answer", "operators' tools connect here, and answer nothing"));
        }
        self.relay.answer(&peer, request.into_inner()).await?;
        Ok(Response::new(AnswerEnd {}))
    }

    async fn leader(&self, request: Request<LeaderRequest>) -> Result<Response<LeaderReply>, Status> {
        self.operator(&request, Role::Viewer, "leader")?;
        Ok(Response::new(self.commands.leader(&self.listen)))
    }

    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        self.operator(&request, Role::Viewer, "status")?;
        let patience = match request.into_inner().patience_ns {
            0 => PATIENCE.0,
            wanted => Duration::from_nanos(wanted).min(PATIENCE.1),
        };
        Ok(Response::new(self.commands.ask(|answer| Command::Status(patience, answer)).await?))
    }

    async fn reorder(&self, request: Request<ReorderRequest>) -> Result<Response<ReorderReply>, Status> {
        let caller = self.operator(&request, Role::Operator, "reorder")?;
        let request = request.into_inner();
        let ReorderRequest { communicator, hosts } = request.clone();
        let outcome =
            self.commands.ask(|answer| Command::Reorder(CommunicatorId(communicator), hosts, answer)).await?;
        let outcome = outcome.map_err(|error| match error {
            ReorderError::Unknown => Status::not_found(error.to_string()),
            ReorderError::Hosts(..) => Status::invalid_argument(error.to_string()),
            _ => Status::failed_precondition(error.to_string()),
        });
        let epoch = caller.log(&request, outcome)?;
        Ok(Response::new(ReorderReply { epoch: epoch.into() }))
    }

    async fn dissolve(&self, request: Request<DissolveRequest>) -> Result<Response<DissolveReply>, Status> {
        let caller = self.operator(&request, Role::Operator, "dissolve")?;
        let request = request.into_inner();
        let DissolveRequest { communicator, reason } = request.clone();
        let found = self
            .commands
            .ask(|answer| Command::Dissolve(CommunicatorId(communicator), reason, answer))
            .await?;
        let none = || Status::not_found("no such communicator; it may have ended");
        caller.log(&request, found.then_some(()).ok_or_else(none))?;
        Ok(Response::new(DissolveReply {}))
    }
}

/// Tells a watcher how things stand, once an interval, until either side goes. One that reads slower is told less often.
async fn watch(
    commands: mpsc::Sender<Command>,
    snapshots: mpsc::Sender<Result<FabricSnapshot, Status>>,
    interval: Duration,
) {
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = commands.closed() => return,
            () = snapshots.closed() => return,
        }
        let (answer, answered) = oneshot::channel();
        if commands.send(Command::Fabric(answer)).await.is_err() {
            return;
        }
        let Ok(snapshot) = answered.await else { return };
        if snapshots.send(Ok(snapshot)).await.is_err() {
            return;
        }
    }
}

/// How many messages of one session are read in the long run, and at once. A host has far fewer unless it floods control.
const MESSAGES: Quota = Quota { interval: Duration::from_micros(50), burst: 40_000 };

/// How many KiB of one session's messages are read in the long run, and at once. At once it is a few times the largest message. What is
/// smaller than one KiB is bounded by [`MESSAGES`] alone.
const KIBIBYTES: Quota = Quota { interval: Duration::from_micros(100), burst: 65_536 };

/// What an agent may say, and where it is told what it may not.
struct Admission {
    access: Arc<Current>,
    speaker: Speaker,
    agent: mpsc::WeakSender<Downstream>,
}

impl Admission {
    /// Whether a message goes on; none where the session ends.
    async fn admit(&mut self, message: &FromAgent) -> Option<bool> {
        let (said, goes_on) = match self.speaker.admit(&self.access.get(), message) {
            Decision::Pass => return Some(true),
            Decision::Answer(message) => (Ok((*message).into()), Some(false)),
            Decision::End(status) => (Err(status), None),
        };
        self.agent.upgrade()?.send(said).await.ok()?;
        goes_on
    }

    /// Reports why nothing more is read, if anybody listens.
    fn broke(&self, why: Status) {
        if let Some(agent) = self.agent.upgrade() {
            let _ = agent.try_send(Err(why));
        }
    }
}

/// Carries a stream's messages to the actor until either of the two ends it.
async fn read(
    mut upstream: impl Stream<Item = Result<FromAgent, Status>> + Unpin,
    session: SessionId,
    mut admission: Admission,
    commands: mpsc::Sender<Command>,
    mut end: oneshot::Receiver<()>,
    (hello_timeout, relay): (Duration, Arc<Relay>),
) {
    let (mut patience, begun) = (hello_timeout, Instant::now());
    let (mut messages, mut kibibytes) = (Gcra::default(), Gcra::default());
    loop {
        let next = tokio::time::timeout(patience, upstream.next());
        let message = tokio::select! {
            next = next => match next {
                Ok(Some(Ok(message))) => message,
                Ok(None) => break,
                Ok(Some(Err(error))) => {
                    tracing::debug!(session = session.0, %error, "stream broke");
                    // That it is too large its sender is to know.
                    admission.broke(error);
                    break;
                }
                Err(_) => {
                    tracing::warn!(session = session.0, "no Hello in time");
                    break;
                }
            },
            _ = &mut end => return,
        };
        // Only Hello is waited for with a limit; afterwards the connection's keepalive tells a dead agent.
        patience = Duration::from_secs(u64::from(u32::MAX));
        // Whoever says more is read slowly, and its connection fills.
        let now = begun.elapsed();
        let size = u32::try_from(message.encoded_len() / 1024).unwrap_or(u32::MAX);
        let next = messages.charge(now, MESSAGES).max(kibibytes.charge_times(now, KIBIBYTES, size));
        if let Some(wait) = next.checked_sub(now).filter(|wait| !wait.is_zero()) {
            tokio::time::sleep(wait).await;
        }
        match admission.admit(&message).await {
            Some(true) => {}
            Some(false) => continue,
            None => break,
        }
        // Aggregators have no flows.
        if let Some(from_agent::Message::Hello(hello)) = &message.message
            && hello.aggregator.is_none()
        {
            relay.greeted(&hello.host, session, admission.agent.clone());
        }
        if commands.send(Command::Message(session, Box::new(message))).await.is_err() {
            return;
        }
    }
    let _ = commands.send(Command::Closed(session)).await;
}
