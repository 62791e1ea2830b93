//! A tenant's Unix socket: making it, letting the tenant's users in, and removing it.

use super::connection::Connection;
use super::server::{BindError, serve_connections};
use super::stream::Stream;
use super::tenant::{Grant, Tenant};
use super::{SessionRequest, SocketRules};
use harmonaize_abi::session::{RefusalKind, Refused};
use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::Context;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};

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

    /// Gives it another name, which nobody may have.
    fn rename(&mut self, path: &Path) -> Result<(), Errno> {
        use rustix::fs::{CWD, RenameFlags, rename, renameat_with};
        match renameat_with(CWD, &self.path, CWD, path, RenameFlags::NOREPLACE) {
            // A file system that cannot ask.
            Err(Errno::INVAL | Errno::NOSYS) => rename(&self.path, path)?,
            done => done?,
        }
        self.path = path.to_owned();
        Ok(())
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

/// A tenant's socket, listening.
#[derive(Debug)]
pub(super) struct SocketServer {
    tenant: Arc<Tenant>,
    uids: Vec<u32>,
    listener: UnixListener,
    file: SocketFile,
}

impl SocketServer {
    /// Makes the socket, in place of a stale one that a dead agent left. Within a tokio runtime.
    pub(super) fn bind(of: &Arc<Tenant>) -> Result<Self, BindError> {
        let (tenant, socket) = (of.rules.tenant.clone(), of.rules.socket.clone());
        let Some(SocketRules { path, uids }) = socket.filter(|socket| !socket.uids.is_empty()) else {
            return Err(BindError::NoUser { tenant });
        };
        let system = |call| {
            let (tenant, path) = (tenant.clone(), path.clone());
            move |source: Errno| BindError::System { tenant, path, call, source: source.into() }
        };
        // What nobody could connect to is refused here.
        SocketAddrUnix::new(&path).map_err(system("address"))?;
        remove_stale(&tenant, &path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(system("socket for"))?;
        // Under another name until it listens: a socket that is there takes connections.
        let name = path.with_file_name(format!(".{}", std::process::id()));
        remove_stale(&tenant, &name)?;
        let address = SocketAddrUnix::new(&name).map_err(system("address"))?;
        rustix::net::bind(&listener, &address).map_err(system("bind"))?;
        let mut file = SocketFile::new(&name);
        let mode = match uids.as_slice() {
            [uid] => {
                let owner = Some(rustix::fs::Uid::from_raw(*uid));
                rustix::fs::chown(&name, owner, None).map_err(|source| BindError::Owner {
                    tenant: tenant.clone(),
                    path: path.clone(),
                    uid: *uid,
                    source,
                })?;
                0o600
            }
            _ => 0o666,
        };
        rustix::fs::chmod(&name, Mode::from_raw_mode(mode)).map_err(system("chmod"))?;
        rustix::net::listen(&listener, 128).map_err(system("listen on"))?;
        file.rename(&path).map_err(system("name"))?;
        let listener = UnixListener::from_std(listener.into()).map_err(|source| BindError::System {
            tenant: tenant.clone(),
            path: path.clone(),
            call: "watch",
            source,
        })?;
        Ok(Self { tenant: Arc::clone(of), uids, listener, file })
    }

    /// Serves until `stop` becomes true (or its sender is dropped), then detaches everybody and removes the socket.
    pub(super) async fn run(self, requests: mpsc::Sender<SessionRequest>, stop: watch::Receiver<bool>) {
        let Self { tenant, uids, listener, file } = self;
        let place = format!("for tenant {}", tenant.rules.tenant);
        let accept = move |cx: &mut Context<'_>| {
            let _goes_with_the_listener = &file;
            listener.poll_accept(cx).map_ok(|(stream, _)| stream)
        };
        let own_stop = stop.clone();
        let admit = |stream: UnixStream| match admit(&tenant, &uids, &stream) {
            Ok(grant) => {
                let connection = Connection::new(Arc::clone(&tenant), Stream::Unix(stream), grant);
                Some(connection.run(requests.clone(), own_stop.clone()))
            }
            Err(refused) => {
                tracing::warn!(tenant = tenant.rules.tenant, "refused: {}", refused.text);
                refuse_at_once(&stream, &refused);
                None
            }
        };
        serve_connections(&place, accept, admit, stop).await;
    }
}

/// Admits a process of a user who may attach.
fn admit(tenant: &Arc<Tenant>, uids: &[u32], stream: &UnixStream) -> Result<Grant, Refused> {
    let credentials = rustix::net::sockopt::socket_peercred(stream.as_fd());
    let text = match credentials.map(|credentials| credentials.uid.as_raw()) {
        Ok(uid) if uids.contains(&uid) => return tenant.connection(),
        Ok(uid) => {
            format!("user {uid} is not one of this tenant's; run as a user that the provider has registered")
        }
        Err(error) => format!("unknown user: {error}"),
    };
    Err(Refused { kind: RefusalKind::User, text })
}

/// Says why, as far as the socket's buffer takes it (always, as nothing was sent before).
fn refuse_at_once(stream: &UnixStream, refused: &Refused) {
    if let Ok(message) = harmonaize_abi::session::encode_first(&Err::<(), _>(refused)) {
        let _ = stream.try_write(&message);
    }
}

/// Removes what a dead agent left at the socket's path; fails if it is anything else.
fn remove_stale(tenant: &str, path: &Path) -> Result<(), BindError> {
    let (tenant, path) = (tenant.to_owned(), path.to_owned());
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
