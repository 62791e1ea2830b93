//! All places where tenants' processes come in, made and served together.

use super::attached::Rejoining;
use super::connection::Connection;
use super::handover::{Freeze, FrozenSession};
use super::memory::{AttachedMemory, OVER_RDMA, THROUGH_SOCKET};
use super::network::{Gate, NetworkServer};
use super::rdma::Rdma;
use super::socket::{SocketFile, SocketServer};
use super::stream::Stream;
use super::tenant::{Life, Tenant};
use super::{RdmaRules, SessionRequest, TenantLimits, TenantRules};
use crate::counters::Counters;
use harmonaize_shm::{AgentEnd, EndError, InheritEnd, InheritedEnd, Lease, RemoteEnd};
use harmonaize_verbs::VerbsError;
use harmonaize_verbs::attachment::{Rejoin, SuccessorEnd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, sockopt};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// What else a refusal can come of.
fn sandbox_hint(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => {
            "; a folder that the configuration did not name at the agent's start goes into `write` of [sandbox]"
        }
        _ => "",
    }
}

/// Why a session of another process does not go on here, for the operator.
#[derive(Debug, thiserror::Error)]
pub enum InheritError {
    /// Its tenant is not among the configuration's.
    #[error("tenant {0} is not served by this configuration")]
    NotServed(String),
    /// It came without descriptors.
    #[error("a session without its connection")]
    NoConnection,
    /// Its descriptor is no connection.
    #[error(transparent)]
    Connection(#[from] std::io::Error),
    /// Attachments over RDMA are not served here.
    #[error("tenant {0} is attached over RDMA, which this configuration has no [rdma] for")]
    NoRdma(String),
    /// Tensors of attachments over RDMA cannot be reached from here.
    #[error("attachments over RDMA cannot go on here: {0}")]
    Rdma(EndError),
}

/// Why tenants could not be served.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process serves this socket.
    #[error("tenant {tenant}: {} is served by a live process; stop the other agent or choose another path", path.display())]
    Live {
        /// Whose socket.
        tenant: String,
        /// Which.
        path: PathBuf,
    },
    /// The path is taken by something that is no socket.
    #[error("tenant {tenant}: {} exists and is no socket; remove it or choose another path", path.display())]
    NotASocket {
        /// Whose socket.
        tenant: String,
        /// Which.
        path: PathBuf,
    },
    /// No user is allowed.
    #[error("tenant {tenant}: no user may attach; name at least one uid")]
    NoUser {
        /// Whose socket.
        tenant: String,
    },
    /// The socket cannot be given to the tenant's user.
    #[error(
        "tenant {tenant}: cannot give {} to user {uid}: {source}; run the agent as root or with CAP_CHOWN", path.display()
    )]
    Owner {
        /// Whose socket.
        tenant: String,
        /// Which.
        path: PathBuf,
        /// The tenant's user.
        uid: u32,
        /// What the kernel said.
        source: Errno,
    },
    /// The kernel refused.
    #[error("tenant {tenant}: {call} {}: {source}{}", path.display(), sandbox_hint(source))]
    System {
        /// Whose socket.
        tenant: String,
        /// Which.
        path: PathBuf,
        /// Which call.
        call: &'static str,
        /// What it said.
        source: std::io::Error,
    },
    /// No device for attachments over RDMA.
    #[error("attachments over RDMA: {0}")]
    Rdma(#[from] VerbsError),
    /// No place to listen over TCP.
    #[error("cannot listen on {listen} for tenants: {source}")]
    Network {
        /// Where.
        listen: SocketAddr,
        /// What the kernel said.
        source: std::io::Error,
    },
}

impl BindError {
    /// The tenant that it is about, if it is about one.
    pub fn tenant(&self) -> Option<&str> {
        match self {
            Self::Live { tenant, .. }
            | Self::NotASocket { tenant, .. }
            | Self::NoUser { tenant }
            | Self::Owner { tenant, .. }
            | Self::System { tenant, .. } => Some(tenant),
            Self::Rdma(_) | Self::Network { .. } => None,
        }
    }
}

/// Tenants' sockets and the address for those over TCP, served. Dropped, it is as if the agent died.
#[derive(Debug)]
pub struct SessionServer {
    rdma: Option<Arc<Rdma>>,
    network: Option<Network>,
    served: BTreeMap<String, Served>,
    requests: mpsc::Sender<SessionRequest>,
    counters: Counters,
    freeze: Arc<Freeze>,
    /// Listeners of another process of the agent's, by their paths, that no tenant has yet.
    inherited: BTreeMap<PathBuf, OwnedFd>,
    tasks: JoinSet<()>,
}

/// Where tenants' processes come over TCP, for as long as this is there.
#[derive(Debug)]
struct Network {
    address: SocketAddr,
    gate: Arc<Gate>,
    /// For another process of the agent's.
    descriptor: OwnedFd,
    _stop: watch::Sender<bool>,
}

/// The path of the listener over TCP among those of tenants' sockets, of which none has it.
fn network_path() -> &'static Path {
    Path::new("")
}

/// What another process of the agent's handed over of an attachment. It has what memory is lent on by offset, and the session, to
/// be served once the other process is gone.
pub struct Inherited {
    /// What tenant it is of.
    pub limits: TenantLimits,
    /// What memory of it is lent on.
    pub leases: Vec<(u64, Lease)>,
    /// What its end goes on by, where it is not mapped.
    pub end: Option<InheritEnd>,
    session: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// A tenant, and its socket if it has one.
#[derive(Debug)]
struct Served {
    tenant: Arc<Tenant>,
    socket: Option<Listening>,
}

/// A socket that takes connections until this is dropped; its file goes at once.
#[derive(Debug)]
struct Listening {
    file: SocketFile,
    /// For another process of the agent's.
    descriptor: Option<OwnedFd>,
    _stop: watch::Sender<bool>,
}

/// What is ready to be served, and not served yet.
enum Prepared {
    /// A tenant that was not there, and its socket.
    New(Arc<Tenant>, Option<(SocketServer, SocketFile)>),
    /// A tenant's other rules; another socket, or none any more.
    Changed(Box<TenantRules>, Socket),
}

/// What becomes of a tenant's socket.
enum Socket {
    /// It is still the same.
    Kept,
    /// It goes.
    Closed,
    /// Another takes its place.
    Moved(SocketServer, SocketFile),
}

impl SessionServer {
    /// Opens the RDMA device, if attachments over RDMA are served, and listens over TCP. Nobody is served before
    /// [`SessionServer::apply`]. Within a tokio runtime.
    ///
    /// # Errors
    /// Says which address or device, and what to do.
    pub fn bind(
        rdma: Option<RdmaRules>,
        requests: mpsc::Sender<SessionRequest>,
        counters: Counters,
    ) -> Result<Self, BindError> {
        Self::bind_frozen(rdma, requests, counters, Freeze::new(false).0, BTreeMap::new())
    }

    /// The same for an agent that hands over, or takes over. What is served stands still as `freeze` says, and these listeners, by their
    /// paths, are another process's.
    ///
    /// # Errors
    /// As of [`SessionServer::bind`].
    pub fn bind_frozen(
        rdma: Option<RdmaRules>,
        requests: mpsc::Sender<SessionRequest>,
        counters: Counters,
        freeze: Freeze,
        mut inherited: BTreeMap<PathBuf, OwnedFd>,
    ) -> Result<Self, BindError> {
        let freeze = Arc::new(freeze);
        let (mut device, mut network, mut tasks) = (None, None, JoinSet::new());
        let theirs = inherited.remove(network_path());
        if let Some(rules) = rdma {
            if let Some(listen) = rules.listen {
                let server = NetworkServer::bind(listen, theirs, rules.handshake, counters.clone())?;
                let (stop, stopped) = watch::channel(false);
                let failed = |source| BindError::Network { listen, source };
                let descriptor = server.descriptor().map_err(failed)?;
                let (address, gate) = (server.local_address(), server.gate());
                network = Some(Network { address, gate, descriptor, _stop: stop });
                tasks.spawn(server.run(requests.clone(), (stopped, freeze.watch())));
            }
            device = Some(Arc::new(Rdma::open(rules)?));
        }
        let served = BTreeMap::new();
        Ok(Self { rdma: device, network, served, requests, counters, freeze, inherited, tasks })
    }

    /// Where tenants' processes can connect over TCP.
    pub fn network_address(&self) -> Option<SocketAddr> {
        self.network.as_ref().map(|network| network.address)
    }

    /// Serves these tenants, each by these rules, and no others. Sockets of new ones are there when it returns, in place of
    /// stale ones that a dead agent left. Those of others are gone, and their attachments end. What a tenant holds beyond a
    /// quota that shrinks stays, and so do attachments of a user that may attach no longer.
    ///
    /// # Errors
    /// Says which tenant and path, and what to do. All is as it was then.
    pub fn apply(&mut self, desired: &[TenantRules]) -> Result<(), BindError> {
        while self.tasks.try_join_next().is_some() {}
        let prepared = desired.iter().map(|rules| self.prepare(rules)).collect::<Result<Vec<_>, _>>()?;
        self.open_sockets(desired)?;
        let stays = |name: &String| desired.iter().any(|rules| rules.tenant == *name);
        for (name, gone) in self.served.extract_if(.., |name, _| !stays(name)) {
            tracing::info!(tenant = name, "the tenant is served no longer");
            gone.tenant.end(Life::Removed);
        }
        for change in prepared.into_iter().flatten() {
            self.commit(change);
        }
        if let Some(Network { gate, .. }) = &self.network {
            let tenants = self.served.values().map(|served| &served.tenant);
            gate.admit_only(tenants.filter(|tenant| tenant.rules().secret.is_some()).cloned().collect());
        }
        Ok(())
    }

    /// What serving a tenant by these rules takes; none where it is served by them.
    fn prepare(&mut self, rules: &TenantRules) -> Result<Option<Prepared>, BindError> {
        let mut bind = |tenant: &Arc<Tenant>| {
            let socket = rules.socket.as_ref();
            let made = socket.map(|socket| match self.inherited.remove(&socket.path) {
                Some(listener) => SocketServer::inherit(tenant, socket, listener),
                None => SocketServer::bind(tenant, socket),
            });
            made.transpose()
        };
        let Some(served) = self.served.get(&rules.tenant) else {
            let tenant =
                Tenant::new(rules.clone(), self.rdma.clone(), &self.counters, Arc::clone(&self.freeze));
            let socket = bind(&tenant)?;
            return Ok(Some(Prepared::New(tenant, socket)));
        };
        let before = served.tenant.rules();
        if *before == *rules {
            return Ok(None);
        }
        let path = |rules: &TenantRules| rules.socket.as_ref().map(|socket| socket.path.clone());
        let socket = match path(&before) == path(rules) {
            true => Socket::Kept,
            false => {
                bind(&served.tenant)?.map_or(Socket::Closed, |(server, file)| Socket::Moved(server, file))
            }
        };
        Ok(Some(Prepared::Changed(Box::new(rules.clone()), socket)))
    }

    /// Gives sockets that stay where they are to other users; all or none.
    fn open_sockets(&self, desired: &[TenantRules]) -> Result<(), BindError> {
        let mut opened: Vec<(&SocketFile, &str, Vec<u32>)> = Vec::new();
        for rules in desired {
            let Some(Served { tenant, socket: Some(listening) }) = self.served.get(&rules.tenant) else {
                continue;
            };
            let before = tenant.rules();
            let (Some(old), Some(new)) = (&before.socket, &rules.socket) else { continue };
            if old.path != new.path || old.uids == new.uids {
                continue;
            }
            opened.push((&listening.file, &rules.tenant, old.uids.clone()));
            if let Err(error) = listening.file.open_to(&rules.tenant, &new.uids) {
                for (file, tenant, uids) in opened {
                    // It was so before.
                    let _ = file.open_to(tenant, &uids);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn commit(&mut self, change: Prepared) {
        match change {
            Prepared::New(tenant, socket) => {
                tracing::info!(tenant = tenant.name, "the tenant is served");
                let socket = socket.map(|(server, file)| self.listen(server, file));
                self.served.insert(tenant.name.clone(), Served { tenant, socket });
            }
            Prepared::Changed(rules, socket) => {
                let listening = match socket {
                    Socket::Moved(server, file) => Some(Some(self.listen(server, file))),
                    Socket::Closed => Some(None),
                    Socket::Kept => None,
                };
                let Some(served) = self.served.get_mut(&rules.tenant) else { return };
                tracing::info!(tenant = rules.tenant, "the tenant is served by other rules");
                served.tenant.set_rules(*rules);
                if let Some(listening) = listening {
                    served.socket = listening;
                }
            }
        }
    }

    fn listen(&mut self, server: SocketServer, file: SocketFile) -> Listening {
        let (stop, stopped) = watch::channel(false);
        let descriptor = server.descriptor().ok();
        self.tasks.spawn(server.run(self.requests.clone(), stopped));
        Listening { file, descriptor, _stop: stop }
    }

    /// The listeners, by their paths, for another process of the agent's.
    ///
    /// # Errors
    /// If one cannot be copied.
    pub fn listeners(&self) -> std::io::Result<Vec<(PathBuf, OwnedFd)>> {
        let listening = self.served.values().filter_map(|served| served.socket.as_ref());
        let copied = |listening: &Listening| {
            let descriptor = listening.descriptor.as_ref().ok_or(std::io::ErrorKind::NotFound)?;
            Ok::<_, std::io::Error>((listening.file.path().to_owned(), descriptor.try_clone()?))
        };
        let network = self.network.as_ref();
        let network = network
            .map(|one| Ok::<_, std::io::Error>((network_path().to_owned(), one.descriptor.try_clone()?)));
        listening.map(copied).chain(network).collect()
    }

    /// How many attachments end with this process, since theirs cannot come to a successor.
    pub fn bound(&self) -> usize {
        self.freeze.bound()
    }

    /// How many attachments over RDMA have processes that have not come to this agent, a successor.
    pub fn awaited(&self) -> usize {
        self.freeze.awaited()
    }

    /// How many connections there are, those included that are not attached yet.
    pub fn connections(&self) -> usize {
        self.served.values().map(|served| served.tenant.connections() as usize).sum()
    }

    /// Has sessions and listeners stand still, or go on.
    pub fn freeze(&self, frozen: bool) {
        self.freeze.set(frozen);
    }

    /// Makes what another process's sessions need here, in their order; nothing of them is served yet. Everybody stands still meanwhile.
    ///
    /// # Errors
    /// If a tenant is not served here, or descriptors are no connection; for the operator.
    pub async fn inherit(&self, sessions: Vec<FrozenSession>) -> Result<Vec<Inherited>, InheritError> {
        let over_rdma = |session: &FrozenSession| session.image.next == OVER_RDMA;
        let mut ends = Vec::new();
        if let Some(FrozenSession { image, .. }) = sessions.iter().find(|session| over_rdma(session)) {
            let rdma = self.rdma.as_ref().ok_or_else(|| InheritError::NoRdma(image.tenant.clone()))?;
            let sizes =
                sessions.iter().filter(|session| over_rdma(session)).map(|session| session.image.size);
            ends = rdma.succeed(sizes.collect()).await.map_err(InheritError::Rdma)?;
        }
        let mut ends = ends.into_iter();
        let inherit = |session: FrozenSession| {
            let end = if over_rdma(&session) { ends.next() } else { None };
            self.inherit_one(session, end)
        };
        sessions.into_iter().map(inherit).collect()
    }

    /// The same for one, whose attachment over RDMA goes on by this.
    fn inherit_one(
        &self,
        session: FrozenSession,
        end: Option<(SuccessorEnd, Rejoin)>,
    ) -> Result<Inherited, InheritError> {
        let FrozenSession { mut image, descriptors } = session;
        let missing = || InheritError::NotServed(image.tenant.clone());
        let tenant = &self.served.get(&image.tenant).ok_or_else(missing)?.tenant;
        image.attachment.skip();
        let (connection, grant) = tenant.inherit(image.size);
        let grant = Arc::new(grant);
        let regions = std::mem::take(&mut image.regions);
        let (memory, mut leases) = AttachedMemory::inherit(Arc::clone(tenant), image.next, regions);
        leases.push((0, Box::new(Arc::clone(&grant))));
        let mut descriptors = descriptors.into_iter();
        let stream = descriptors.next().ok_or(InheritError::NoConnection)?;
        let here = sockopt::socket_domain(&stream).map_err(std::io::Error::from)? == AddressFamily::UNIX;
        let stream = match here {
            true => Stream::Unix(UnixStream::from_std(stream.into())?),
            false => Stream::Tcp(TcpStream::from_std(stream.into())?),
        };
        let end = end.zip(self.rdma.clone());
        let end = end.map(|((end, ours), rdma)| {
            let awaited = self.freeze.awaits();
            (inherit_end(end), Rejoining { rdma, ours, here, awaited })
        });
        let (end, rejoining) = end.unzip();
        let remote = image.next == THROUGH_SOCKET;
        let end = end.or_else(|| remote.then(|| inherit_remote(image.size.0)));
        let connection = Connection::new(Arc::clone(tenant), stream, connection);
        let requests = self.requests.clone();
        let session = connection.resume(image, descriptors.collect(), (memory, rejoining), grant, requests);
        let limits = TenantLimits(Arc::clone(tenant));
        Ok(Inherited { limits, leases, end, session: Box::pin(session) })
    }

    /// Serves a session that was taken over.
    pub fn resume(&mut self, inherited: Inherited) {
        self.tasks.spawn(inherited.session);
    }

    /// Begins the end: sockets go, and everybody is detached.
    pub fn stop(&mut self) {
        for (_, served) in std::mem::take(&mut self.served) {
            served.tenant.end(Life::AgentStops);
        }
        // Its sender goes, and with it the listener.
        self.network = None;
    }

    /// Completes once everybody is detached, after [`SessionServer::stop`].
    pub async fn ended(mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

/// What the end of an attachment over RDMA goes on by.
fn inherit_end(end: SuccessorEnd) -> InheritEnd {
    Box::new(move |from: InheritedEnd| {
        let end: Box<dyn AgentEnd> = Box::new(end.inherit(from)?);
        Ok::<_, EndError>(end)
    })
}

/// What one whose tensors, of so many bytes, are reached through a socket goes on by.
fn inherit_remote(arena_bytes: u64) -> InheritEnd {
    Box::new(move |from: InheritedEnd| {
        let end: Box<dyn AgentEnd> = Box::new(RemoteEnd::inherit(from, arena_bytes)?);
        Ok::<_, EndError>(end)
    })
}

/// How long accepting pauses when the agent is out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves connections until `stop` becomes true (or its sender is dropped). Then it closes the listener that `accept`
/// owns and waits for the connections. `admit` returns the future that serves a connection, or none.
pub(super) async fn serve_connections<S, F>(
    place: &str,
    mut accept: impl FnMut(&mut Context<'_>) -> Poll<std::io::Result<S>>,
    admit: impl Fn(S) -> Option<F>,
    (mut stop, mut freeze): (watch::Receiver<bool>, watch::Receiver<bool>),
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        let held = *freeze.borrow_and_update();
        let accepted = tokio::select! {
            Ok(()) = freeze.changed() => continue,
            accepted = poll_fn(&mut accept), if !held => accepted,
            Some(_) = connections.join_next() => continue,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        match accepted.map(&admit) {
            Ok(connection) => connection.into_iter().for_each(|one| drop(connections.spawn(one))),
            Err(error) => {
                tracing::error!("cannot accept {place}: {error}");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    drop(accept);
    while connections.join_next().await.is_some() {}
}
