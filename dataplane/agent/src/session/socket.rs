//! A tenant's Unix socket: making it, letting the tenant's users in, and removing it.

use super::connection::Connection;
use super::server::{BindError, serve_connections};
use super::stream::Stream;
use super::tenant::{Grant, Tenant};
use super::{SessionRequest, SocketRules};
use harmonaize_abi::session::{RefusalKind, Refused};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::Context;
use std::time::Instant;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};

/// Removes the socket's file when dropped, if it is still the same.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// The file itself. Whoever may write its folder can put another under its name, which stays as it is.
    file: OwnedFd,
}

impl SocketFile {
    /// The socket that was bound just now.
    ///
    /// # Errors
    /// Where something else has its name already: no socket of this process's user, or one that has another name too.
    fn new(path: &Path) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        let socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
        if !socket || stat.st_nlink != 1 || stat.st_uid != rustix::process::geteuid().as_raw() {
            return Err(Errno::STALE);
        }
        Ok(Self { path: path.to_owned(), file })
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Lets these users connect: one alone owns the file.
    pub(super) fn open_to(&self, tenant: &str, uids: &[u32]) -> Result<(), BindError> {
        let (tenant, path) = (tenant.to_owned(), self.path.clone());
        let mode = match uids {
            [] => return Err(BindError::NoUser { tenant }),
            [uid] => {
                let uid = *uid;
                let owner = Some(rustix::fs::Uid::from_raw(uid));
                rustix::fs::chownat(&self.file, c"", owner, None, AtFlags::EMPTY_PATH).map_err(|source| {
                    let (tenant, path) = (tenant.clone(), path.clone());
                    BindError::Owner { tenant, path, uid, source }
                })?;
                0o600
            }
            _ => 0o666,
        };
        // The kernel changes no mode by a descriptor that is only a place (open(2), O_PATH), but by its name there.
        let place = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::chmod(place, Mode::from_raw_mode(mode)).map_err(|source| BindError::System {
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

impl Drop for SocketFile {
    fn drop(&mut self) {
        let same = rustix::fs::lstat(&self.path).and_then(|there| {
            let own = rustix::fs::fstat(&self.file)?;
            Ok((there.st_dev, there.st_ino) == (own.st_dev, own.st_ino))
        });
        if same == Ok(true) {
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
        let mut file = SocketFile::new(&name).map_err(system("own"))?;
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

    /// Goes on with a socket that another process of the agent's listens on, at the same path.
    ///
    /// # Errors
    /// If the path has another socket by now.
    pub(super) fn inherit(
        of: &Arc<Tenant>,
        rules: &SocketRules,
        listener: OwnedFd,
    ) -> Result<(Self, SocketFile), BindError> {
        let (tenant, SocketRules { path, uids }) = (of.name.clone(), rules.clone());
        let system = |call| {
            let (tenant, path) = (tenant.clone(), path.clone());
            move |source: std::io::Error| BindError::System { tenant, path, call, source }
        };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(&path, flags, Mode::empty());
        let file =
            SocketFile { path: path.clone(), file: file.map_err(|error| system("open")(error.into()))? };
        file.open_to(&tenant, &uids)?;
        let listener = UnixListener::from_std(listener.into()).map_err(system("watch"))?;
        Ok((Self { tenant: Arc::clone(of), listener }, file))
    }

    /// Another descriptor of the listener.
    pub(super) fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
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
                tenant.log(|| tracing::warn!(tenant = tenant.name, "refused: {}", refused.text));
                refuse_at_once(&stream, &refused);
                None
            }
        };
        let held = tenant.freeze.watch();
        serve_connections(&place, accept, admit, (stop, held)).await;
    }
}

/// Admits a process of a user who may attach.
fn admit(tenant: &Arc<Tenant>, stream: &UnixStream) -> Result<Grant, Refused> {
    let credentials = rustix::net::sockopt::socket_peercred(stream.as_fd());
    let rules = tenant.rules();
    let may = |uid: &u32| rules.socket.as_ref().is_some_and(|socket| socket.uids.contains(uid));
    let text = match credentials.map(|credentials| credentials.uid.as_raw()) {
        Ok(uid) if may(&uid) => return tenant.connection(Instant::now()),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};

    /// A tenant that may write the socket's folder puts something of another's under the socket's name.
    #[test]
    fn what_takes_a_sockets_name_is_neither_given_away_nor_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, victim) = (folder.path().join("agent.sock"), folder.path().join("shadow"));
        std::fs::write(&victim, "secret").unwrap();
        let before = victim.metadata().unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let file = SocketFile::new(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        symlink(&victim, &path).unwrap();
        let own = rustix::process::geteuid().as_raw();
        for uids in [&[own][..], &[own, 7]] {
            file.open_to("a", uids).unwrap();
        }
        drop(file);
        let after = victim.metadata().unwrap();
        assert_eq!((after.mode(), after.uid()), (before.mode(), before.uid()));
        assert!(path.is_symlink(), "what is not the socket stays");
        // Nor is a link, a file or a socket with two names taken for the socket in the first place.
        assert!(SocketFile::new(&path).is_err() && SocketFile::new(&victim).is_err());
        let twice = folder.path().join("twice");
        let _second = std::os::unix::net::UnixListener::bind(&twice).unwrap();
        std::fs::hard_link(&twice, folder.path().join("other")).unwrap();
        assert!(SocketFile::new(&twice).is_err());
    }
}
