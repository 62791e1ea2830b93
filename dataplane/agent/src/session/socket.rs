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
pub(super) struct SocketFile {
    path: PathBuf,
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), identity: identity(path) }
    }

    /// Lets these users connect: one alone owns the file.
    pub(super) fn open_to(&self, tenant: &str, uids: &[u32]) -> Result<(), BindError> {
        let (tenant, path) = (tenant.to_owned(), self.path.clone());
        let mode = match uids {
            [] => return Err(BindError::NoUser { tenant }),
            [uid] => {
                let uid = *uid;
                let owner = Some(rustix::fs::Uid::from_raw(uid));
                rustix::fs::chown(&path, owner, None).map_err(|source| {
                    let (tenant, path) = (tenant.clone(), path.clone());
                    BindError::Owner { tenant, path, uid, source }
                })?;
                0o600
            }
            _ => 0o666,
        };
        rustix::fs::chmod(&path, Mode::from_raw_mode(mode)).map_err(|source| BindError::System {
            tenant,
            path,
            call: "chmod",
            source: source.into(),
        })
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
    listener: UnixListener,
}

impl SocketServer {
    /// Makes a tenant's socket, in place of a stale one that a dead agent left. Within a tokio runtime. The socket takes
    /// connections as long as its file is kept.
    pub(super) fn bind(of: &Arc<Tenant>, rules: &SocketRules) -> Result<(Self, SocketFile), BindError> {
        let (tenant, SocketRules { path, uids }) = (of.name.clone(), rules.clone());
        if uids.is_empty() {
            return Err(BindError::NoUser { tenant });
        }
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
        file.open_to(&tenant, &uids)?;
        rustix::net::listen(&listener, 128).map_err(system("listen on"))?;
        file.rename(&path).map_err(system("name"))?;
        let listener = UnixListener::from_std(listener.into()).map_err(|source| BindError::System {
            tenant: tenant.clone(),
            path: path.clone(),
            call: "watch",
            source,
        })?;
        Ok((Self { tenant: Arc::clone(of), listener }, file))
    }

    /// Serves until `stop` becomes true (or its sender is dropped) and everybody has gone.
    pub(super) async fn run(self, requests: mpsc::Sender<SessionRequest>, stop: watch::Receiver<bool>) {
        let Self { tenant, listener } = self;
        let place = format!("for tenant {}", tenant.name);
        let accept = move |cx: &mut Context<'_>| listener.poll_accept(cx).map_ok(|(stream, _)| stream);
        let admit = |stream: UnixStream| match admit(&tenant, &stream) {
            Ok(grant) => {
                let connection = Connection::new(Arc::clone(&tenant), Stream::Unix(stream), grant);
                Some(connection.run(requests.clone()))
            }
            Err(refused) => {
                tracing::warn!(tenant = tenant.name, "refused: {}", refused.text);
                refuse_at_once(&stream, &refused);
                None
            }
        };
        serve_connections(&place, accept, admit, stop).await;
    }
}

/// Admits a process of a user who may attach.
fn admit(tenant: &Arc<Tenant>, stream: &UnixStream) -> Result<Grant, Refused> {
    let credentials = rustix::net::sockopt::socket_peercred(stream.as_fd());
    let rules = tenant.rules();
    let may = |uid: &u32| rules.socket.as_ref().is_some_and(|socket| socket.uids.contains(uid));
    let text = match credentials.map(|credentials| credentials.uid.as_raw()) {
        Ok(uid) if may(&uid) => return tenant.connection(),
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
