//! Making, serving and removing a tenant's socket, and counting what its attachments hold.

use super::connection::Connection;
use super::{SessionRequest, TenantSocket};
use harmonaize_abi::session::{RefusalKind, Refused};
use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// Connections that may be shaking hands beyond a tenant's attachments.
const HANDSHAKES: u32 = 16;
/// How long accepting pauses when the agent is out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Why a tenant's socket could not be made.
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
}

/// Removes the socket's file when dropped, if it is still the same.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), identity: identity(path) }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    rustix::fs::lstat(path).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some() && identity(&self.path) == self.identity {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// What a tenant's attachments hold together.
#[derive(Debug, Default)]
struct Held {
    connections: u32,
    attachments: u32,
    arena_bytes: u64,
}

/// A tenant's socket with what its connections need.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) socket: TenantSocket,
    held: Mutex<Held>,
}

/// A part of a tenant's quota, given back when dropped.
#[derive(Debug)]
pub(super) struct Grant {
    tenant: Arc<Tenant>,
    part: Held,
}

impl Drop for Grant {
    fn drop(&mut self) {
        let mut held = self.tenant.held();
        held.connections -= self.part.connections;
        held.attachments -= self.part.attachments;
        held.arena_bytes -= self.part.arena_bytes;
    }
}

impl Tenant {
    fn held(&self) -> std::sync::MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn connection(self: &Arc<Self>) -> Result<Grant, Refused> {
        let mut held = self.held();
        let most = self.socket.quota.attachments.saturating_add(HANDSHAKES);
        if held.connections >= most {
            let text = format!("{most} connections are open; close some");
            return Err(Refused { kind: RefusalKind::Attachments, text });
        }
        held.connections += 1;
        Ok(Grant { tenant: Arc::clone(self), part: Held { connections: 1, ..Held::default() } })
    }

    /// Room for an attachment with an arena of this size, or why there is none.
    pub(super) fn attachment(self: &Arc<Self>, arena_bytes: u64) -> Result<Grant, Refused> {
        let (mut held, quota) = (self.held(), self.socket.quota);
        if held.attachments >= quota.attachments {
            let text = format!("{} attachments are open, as many as this tenant may have", held.attachments);
            return Err(Refused { kind: RefusalKind::Attachments, text });
        }
        let left = quota.arena_bytes.saturating_sub(held.arena_bytes);
        if arena_bytes == 0 || arena_bytes > left {
            let text = format!(
                "an arena of {arena_bytes} bytes was asked for; 1 to {left} are possible (this tenant may have {} in all)",
                quota.arena_bytes
            );
            return Err(Refused { kind: RefusalKind::Arena, text });
        }
        held.attachments += 1;
        held.arena_bytes += arena_bytes;
        Ok(Grant { tenant: Arc::clone(self), part: Held { connections: 0, attachments: 1, arena_bytes } })
    }
}

/// A tenant's socket, listening.
#[derive(Debug)]
pub struct SessionServer {
    tenant: Arc<Tenant>,
    listener: UnixListener,
    file: SocketFile,
}

impl SessionServer {
    /// Makes the socket, in place of a stale one that a dead agent left. Within a tokio runtime.
    pub fn bind(socket: TenantSocket) -> Result<Self, BindError> {
        let (tenant, path) = (socket.tenant.clone(), socket.path.clone());
        if socket.uids.is_empty() {
            return Err(BindError::NoUser { tenant });
        }
        let system = |call| {
            let (tenant, path) = (tenant.clone(), path.clone());
            move |source: Errno| BindError::System { tenant, path, call, source: source.into() }
        };
        remove_stale(&socket)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(system("socket for"))?;
        let address = SocketAddrUnix::new(&path).map_err(system("address"))?;
        rustix::net::bind(&listener, &address).map_err(system("bind"))?;
        let file = SocketFile::new(&path);
        // Nobody can connect before `listen`, so owner and mode are in place in time.
        let mode = match socket.uids.as_slice() {
            [uid] => {
                let owner = Some(rustix::fs::Uid::from_raw(*uid));
                rustix::fs::chown(&path, owner, None).map_err(|source| BindError::Owner {
                    tenant: tenant.clone(),
                    path: path.clone(),
                    uid: *uid,
                    source,
                })?;
                0o600
            }
            _ => 0o666,
        };
        rustix::fs::chmod(&path, Mode::from_raw_mode(mode)).map_err(system("chmod"))?;
        rustix::net::listen(&listener, 128).map_err(system("listen on"))?;
        let listener = UnixListener::from_std(listener.into()).map_err(|source| BindError::System {
            tenant: tenant.clone(),
            path: path.clone(),
            call: "watch",
            source,
        })?;
        Ok(Self { tenant: Arc::new(Tenant { socket, held: Mutex::default() }), listener, file })
    }

    /// Serves until `stop` becomes true (or its sender is dropped), then detaches everybody and removes the socket.
    pub async fn run(self, requests: mpsc::Sender<SessionRequest>, mut stop: watch::Receiver<bool>) {
        let mut connections = JoinSet::new();
        let own_stop = stop.clone();
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                Some(_) = connections.join_next() => continue,
                _ = stop.wait_for(|stop| *stop) => break,
            };
            match accepted {
                Ok((stream, _)) => match self.admit(&stream) {
                    Ok(grant) => {
                        let connection = Connection::new(Arc::clone(&self.tenant), stream, grant);
                        connections.spawn(connection.run(requests.clone(), own_stop.clone()));
                    }
                    Err(refused) => {
                        tracing::warn!(tenant = self.tenant.socket.tenant, "refused: {}", refused.text);
                        refuse_at_once(&stream, &refused);
                    }
                },
                Err(error) => {
                    tracing::error!(tenant = self.tenant.socket.tenant, "cannot accept: {error}");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        drop(self.listener);
        drop(self.file);
        while connections.join_next().await.is_some() {}
    }

    fn admit(&self, stream: &UnixStream) -> Result<Grant, Refused> {
        let credentials = rustix::net::sockopt::socket_peercred(stream.as_fd());
        let uid = credentials.map(|credentials| credentials.uid.as_raw());
        match uid {
            Ok(uid) if self.tenant.socket.uids.contains(&uid) => self.tenant.connection(),
            Ok(uid) => Err(Refused {
                kind: RefusalKind::User,
                text: format!(
                    "user {uid} is not one of this tenant's; run as a user that the provider has registered"
                ),
            }),
            Err(error) => Err(Refused { kind: RefusalKind::User, text: format!("unknown user: {error}") }),
        }
    }
}

/// Says why, as far as the socket's buffer takes it (always, as nothing was sent before).
fn refuse_at_once(stream: &UnixStream, refused: &Refused) {
    if let Ok(message) = harmonaize_abi::session::encode_first(&Err::<(), _>(refused)) {
        let _ = stream.try_write(&message);
    }
}

/// Removes what a dead agent left at the socket's path; fails if it is anything else.
fn remove_stale(socket: &TenantSocket) -> Result<(), BindError> {
    let (tenant, path) = (socket.tenant.clone(), socket.path.clone());
    let system = |call| {
        let (tenant, path) = (tenant.clone(), path.clone());
        move |source: Errno| BindError::System { tenant, path, call, source: source.into() }
    };
    match rustix::fs::lstat(&path) {
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(system("look at")(error)),
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Socket => {
            return Err(BindError::NotASocket { tenant, path });
        }
        Ok(_) => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe: OwnedFd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(system("socket for"))?;
    let address = SocketAddrUnix::new(&path).map_err(system("address"))?;
    match rustix::net::connect(&probe, &address) {
        Err(Errno::CONNREFUSED) => rustix::fs::unlink(&path).map_err(system("remove stale")),
        Err(Errno::NOENT) => Ok(()),
        // Connected, or a full backlog.
        Ok(()) | Err(Errno::AGAIN) => Err(BindError::Live { tenant, path }),
        Err(error) => Err(system("probe")(error)),
    }
}
