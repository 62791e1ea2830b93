//! All places where tenants' processes come in, made and served together.

use super::network::NetworkServer;
use super::rdma::Rdma;
use super::socket::SocketServer;
use super::tenant::Tenant;
use super::{RdmaRules, SessionRequest, TenantRules};
use harmonaize_verbs::VerbsError;
use rustix::io::Errno;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

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
    #[error("tenant {tenant}: {call} {}: {source}", path.display())]
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

/// Tenants' sockets and the address for those over TCP, listening.
#[derive(Debug)]
pub struct SessionServer {
    sockets: Vec<SocketServer>,
    network: Option<NetworkServer>,
}

impl SessionServer {
    /// Opens the RDMA device, if attachments over RDMA are served, listens over TCP, and makes the tenants' sockets, in place
    /// of stale ones that a dead agent left. Within a tokio runtime.
    ///
    /// # Errors
    /// Says which tenant, path, address or device, and what to do.
    pub fn bind(tenants: Vec<TenantRules>, rdma: Option<RdmaRules>) -> Result<Self, BindError> {
        let (mut device, mut listen) = (None, None);
        if let Some(rules) = rdma {
            listen = rules.listen.map(|listen| (listen, rules.handshake));
            device = Some(Arc::new(Rdma::open(rules)?));
        }
        let tenants: Vec<Arc<Tenant>> =
            tenants.into_iter().map(|rules| Tenant::new(rules, device.clone())).collect();
        let network =
            listen.map(|(listen, limit)| NetworkServer::bind(listen, limit, &tenants)).transpose()?;
        let with_socket = tenants.iter().filter(|tenant| tenant.rules.socket.is_some());
        let sockets = with_socket.map(SocketServer::bind).collect::<Result<_, _>>()?;
        Ok(Self { sockets, network })
    }

    /// Where tenants' processes can connect over TCP.
    pub fn network_address(&self) -> Option<SocketAddr> {
        self.network.as_ref().map(NetworkServer::local_address)
    }

    /// Serves until `stop` becomes true (or its sender is dropped), then detaches everybody and removes the sockets.
    pub async fn run(self, requests: mpsc::Sender<SessionRequest>, stop: watch::Receiver<bool>) {
        let mut servers = JoinSet::new();
        for server in self.sockets {
            servers.spawn(server.run(requests.clone(), stop.clone()));
        }
        if let Some(server) = self.network {
            servers.spawn(server.run(requests, stop));
        }
        while servers.join_next().await.is_some() {}
    }
}

/// How long accepting pauses when the agent is out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves connections until `stop` becomes true (or its sender is dropped), then closes the listener that `accept` owns and
/// waits for them. `admit` returns the future that serves a connection, or none.
pub(super) async fn serve_connections<S, F>(
    place: &str,
    mut accept: impl FnMut(&mut Context<'_>) -> Poll<std::io::Result<S>>,
    admit: impl Fn(S) -> Option<F>,
    mut stop: watch::Receiver<bool>,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = poll_fn(&mut accept) => accepted,
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
