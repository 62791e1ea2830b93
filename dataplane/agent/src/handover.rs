//! How a successor takes an agent's place while its tenants' operations are in flight. This is what the two processes
//! exchange.
//!
//! The successor connects to a Unix socket of the agent's. It gets the listening sockets, starts with them, and says when it is ready.
//! The agent brings its sessions to rest, ends its session with control, has its engine stand still, and sends all that it has. Its
//! process ends once the successor has taken everything in. Until then it can go on, and does wherever anything goes wrong.

use crate::agent::AgentImage;
use crate::control::LedgerImage;
use crate::session::{FrozenSession, SessionImage};
use harmonaize_engine::EngineImage;
use harmonaize_shm::{receive_with_descriptors, send_with_descriptors};
use rustix::fs::{MemfdFlags, Mode};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The version of all that is said here, and of the state that it carries. Raise it with every change of these, of
/// `harmonaize_core::Communicator`, or of the engine's image: a successor of another version is refused, and the agent goes on. What some
/// images alone have can follow behind a mark that agents without it refuse, as aggregation does.
pub const VERSION: u32 = 1;

/// How long the other process may take for anything but its start.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long the successor may take to start.
const START: Duration = Duration::from_secs(30);
/// How long control and peers may take to have an agent's links go over TCP alone, before the successor starts. Operations go on
/// meanwhile, and epochs are switched between them.
pub const LINKS: Duration = Duration::from_secs(40);
/// For how long links are to go over TCP alone then, for the rest of the hand-over. What asked for it may die before it takes it back.
pub const OVER_TCP: Duration = Duration::from_secs(120);
/// Descriptors that go with one byte.
const AT_ONCE: usize = 4;
/// Most bytes and descriptors of a message: far more than an agent has.
const MAX_BYTES: u64 = 1 << 30;
const MAX_DESCRIPTORS: u64 = 1 << 20;

/// Why an agent's place is not taken.
#[derive(Debug, thiserror::Error)]
pub enum HandOverError {
    /// The other process refuses.
    #[error("refused: {0}")]
    Refused(String),
    /// What came is no message of this version.
    #[error("the other process sent nonsense: {0}")]
    Malformed(String),
    /// The other process is gone, or too slow.
    #[error("{call}: {source}")]
    System {
        /// Which call.
        call: &'static str,
        /// What the kernel said.
        source: std::io::Error,
    },
}

/// What of an agent ends with its process, so that nobody can take its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// Links are queue pairs, and nobody can make them anew.
    #[error(
        "this agent's links go over RDMA, queue pairs end with their process, and control, which could have them go over TCP meanwhile, is away; \
         try again once there is a session with it"
    )]
    NoControl,
    /// The same, of a control that is there.
    #[error(
        "this agent's links go over RDMA, queue pairs end with their process, and control is of a release that cannot have them go over TCP \
         meanwhile; upgrade control first, or drain the host and start it anew"
    )]
    OldControl,
    /// Links have not come to go over TCP in time.
    #[error(
        "{communicators} communicators have links over RDMA still, {} s after control was asked to have them go over TCP; try again, and \
         where an agent of theirs is of release 0.2.0 or before, drain its host and start it anew first", LINKS.as_secs()
    )]
    Late {
        /// So many.
        communicators: usize,
    },
    /// Tenants' attachments are, and their processes would not come to a successor.
    #[error(
        "{count} processes are attached to this agent over RDMA that have not said that they can come to a successor, and queue pairs end \
         with their process; try again, and where their client library is of release 0.2.0 or before, have them attach anew with this \
         one's, or drain the host and start it anew"
    )]
    Attachments {
        /// So many.
        count: usize,
    },
}

impl Obstacle {
    /// Why this agent cannot hand over while so many attachments end with its process; none where there are none.
    pub fn of_attachments(count: usize) -> Option<Self> {
        (count > 0).then_some(Self::Attachments { count })
    }

    /// Why links of so many communicators, which go over RDMA, cannot come to go over TCP; none where control can be asked for it, or
    /// there are none. `connected` is whether there is a session with control, and `can` whether it knows what it would be asked for.
    pub fn of_links(communicators: usize, connected: bool, can: bool) -> Option<Self> {
        let obstacle = match (connected, can) {
            (true, true) => None,
            (true, false) => Some(Self::OldControl),
            (false, _) => Some(Self::NoControl),
        };
        obstacle.filter(|_| communicators > 0)
    }
}

fn system<E: Into<std::io::Error>>(call: &'static str) -> impl FnOnce(E) -> HandOverError {
    move |source| HandOverError::System { call, source: source.into() }
}

/// What a successor says first. Its form never changes, so that another version is refused and not misread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// [`VERSION`].
    pub version: u32,
    /// The build, for the log.
    pub build: String,
    /// The host that its configuration names.
    pub host: String,
    /// How many threads its engine has.
    pub threads: usize,
    /// How links are protected, and what else must be the same on both sides, as text.
    pub links: String,
}

impl Greeting {
    /// Why a successor that says this cannot take the place of an agent that would say `self`, if it cannot.
    pub fn refuse(&self, successor: &Self) -> Option<String> {
        if self.version != successor.version {
            return Some(format!(
                "the successor ({}) hands over by version {}, this agent ({}) by version {}; drain the host and start it anew",
                successor.build, successor.version, self.build, self.version
            ));
        }
        if self.host != successor.host {
            return Some(format!("the successor is of host {}, this agent of {}", successor.host, self.host));
        }
        if self.threads != successor.threads {
            let (theirs, ours) = (successor.threads, self.threads);
            return Some(format!("the successor's engine has {theirs} threads, this agent's {ours}"));
        }
        if self.links != successor.links {
            return Some(format!(
                "the successor's links are {}, this agent's {}",
                successor.links, self.links
            ));
        }
        None
    }
}

/// The agent's sockets, whose descriptors come along: where other agents connect, where successors do, then each tenant's. The empty path
/// among these is where tenants come over TCP.
#[derive(Debug, Serialize, Deserialize)]
pub struct Offer {
    /// Tenants' sockets.
    pub sockets: Vec<PathBuf>,
}

/// All that an agent has. Descriptors come along: the engines', then the sessions'.
#[derive(Debug, Serialize, Deserialize)]
pub struct Description {
    engines: Vec<(Vec<u8>, usize)>,
    sessions: Vec<SessionImage>,
    /// Control's tenants, each encoded.
    pub added: Vec<Vec<u8>>,
    /// The agent's own part.
    pub agent: AgentImage,
    /// The session with control.
    pub ledger: LedgerImage,
}

/// What is said between the large messages.
#[derive(Debug, Serialize, Deserialize)]
enum Signal {
    /// The successor has started.
    Started,
    /// The successor has taken everything in.
    Taken,
    /// It is the agent from now on.
    Yours,
}

/// The place where successors come.
#[derive(Debug)]
pub struct Place {
    listener: tokio::net::UnixListener,
}

impl Place {
    /// Listens, for processes of this user and root alone. A socket that a dead agent left is replaced. Within a tokio runtime.
    ///
    /// # Errors
    /// If the socket cannot be had.
    pub fn bind(path: &Path) -> std::io::Result<Self> {
        if UnixStream::connect(path).is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
        {
            std::fs::remove_file(path)?;
        }
        // Nobody else may connect between the two calls either.
        let before = rustix::process::umask(Mode::RWXG | Mode::RWXO | Mode::XUSR);
        let listener = UnixListener::bind(path);
        rustix::process::umask(before);
        Self::inherit(listener?.into())
    }

    /// The place that was another process's, with whoever waits there. Within a tokio runtime.
    ///
    /// # Errors
    /// If it is no listening Unix socket.
    pub fn inherit(listener: OwnedFd) -> std::io::Result<Self> {
        let listener = UnixListener::from(listener);
        listener.set_nonblocking(true)?;
        Ok(Self { listener: tokio::net::UnixListener::from_std(listener)? })
    }

    /// Another descriptor of its socket.
    ///
    /// # Errors
    /// If this process may have no more.
    pub fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.listener.as_fd().try_clone_to_owned()
    }

    /// The next process of this user's or root's that comes.
    pub async fn next(&self) -> Peer {
        loop {
            let Ok((stream, _)) = self.listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let Ok(stream) =
                stream.into_std().and_then(|stream| stream.set_nonblocking(false).map(|()| stream))
            else {
                continue;
            };
            let own = rustix::process::geteuid();
            match rustix::net::sockopt::socket_peercred(&stream) {
                Ok(peer) if peer.uid == own || peer.uid.is_root() => {
                    return Peer { stream, pid: peer.pid.as_raw_nonzero().get() };
                }
                Ok(peer) => {
                    tracing::warn!(uid = peer.uid.as_raw(), "another user asked for this agent's place");
                }
                Err(error) => tracing::warn!(%error, "somebody asked for this agent's place"),
            }
        }
    }
}

/// The other process.
#[derive(Debug)]
pub struct Peer {
    stream: UnixStream,
    /// Its number.
    pub pid: i32,
}

impl Peer {
    /// Connects to the agent whose place is to be taken; none if there is none.
    ///
    /// # Errors
    /// If its socket does not answer.
    pub fn connect(path: &Path) -> Result<Option<Self>, HandOverError> {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        match UnixStream::connect(path) {
            Ok(stream) => Ok(Some(Self { stream, pid: 0 })),
            Err(error) if matches!(error.kind(), ConnectionRefused | NotFound) => Ok(None),
            Err(error) => Err(system("connect")(error)),
        }
    }

    /// The agent's first part: whether the successor can take its place. Blocks.
    ///
    /// # Errors
    /// Why there will be no hand-over.
    pub fn greeted(&self, own: &Greeting) -> Result<(), HandOverError> {
        let (greeting, _): (Greeting, _) = self.receive(PATIENCE)?;
        if let Some(refused) = own.refuse(&greeting) {
            self.refuse(&refused);
            return Err(HandOverError::Refused(refused));
        }
        Ok(())
    }

    /// The agent's part up to the successor's start. Blocks.
    ///
    /// # Errors
    /// Why there will be no hand-over.
    pub fn admit(&self, offer: &Offer, sockets: &[OwnedFd]) -> Result<(), HandOverError> {
        self.send(offer, sockets)?;
        self.await_signal(START)
    }

    /// The successor's first part: the agent's sockets, once its links can be handed over. Blocks.
    ///
    /// # Errors
    /// Why there will be no hand-over.
    pub fn greet(&self, own: &Greeting) -> Result<(Offer, Vec<OwnedFd>), HandOverError> {
        self.send(own, &[])?;
        self.receive(LINKS + 2 * PATIENCE)
    }

    /// The successor has started: all that the agent has. Blocks.
    ///
    /// # Errors
    /// Why there will be no hand-over.
    pub fn take(&self) -> Result<(Description, Vec<EngineImage>, Vec<FrozenSession>), HandOverError> {
        self.send(&Signal::Started, &[])?;
        let (mut description, descriptors): (Description, _) = self.receive(2 * PATIENCE)?;
        let mut descriptors = descriptors.into_iter();
        let image = |(state, count): (Vec<u8>, usize)| EngineImage {
            state,
            descriptors: descriptors.by_ref().take(count).collect(),
        };
        let engines = std::mem::take(&mut description.engines).into_iter().map(image).collect();
        let session = |image: SessionImage| {
            let descriptors = descriptors.by_ref().take(image.descriptors()).collect();
            FrozenSession { image, descriptors }
        };
        let sessions = std::mem::take(&mut description.sessions).into_iter().map(session).collect();
        Ok((description, engines, sessions))
    }

    /// The agent's last part: sends all that it has, and waits for the successor to have taken it in. Blocks. After it this process must
    /// end, or, on an error, go on.
    ///
    /// # Errors
    /// Why there was no hand-over.
    pub fn give(
        &self,
        engines: Vec<EngineImage>,
        sessions: Vec<FrozenSession>,
        (added, agent, ledger): (Vec<Vec<u8>>, AgentImage, LedgerImage),
    ) -> Result<(), HandOverError> {
        let mut descriptors = Vec::new();
        let engine = |image: EngineImage| {
            let count = image.descriptors.len();
            descriptors.extend(image.descriptors);
            (image.state, count)
        };
        let engines = engines.into_iter().map(engine).collect();
        let session = |session: FrozenSession| {
            descriptors.extend(session.descriptors);
            session.image
        };
        let sessions = sessions.into_iter().map(session).collect();
        self.send(&Description { engines, sessions, added, agent, ledger }, &descriptors)?;
        self.await_signal(PATIENCE)?;
        self.send(&Signal::Yours, &[])
    }

    /// The successor has taken everything in: returns once it is the agent. Blocks.
    ///
    /// # Errors
    /// Why it is not.
    pub fn taken(&self) -> Result<(), HandOverError> {
        self.send(&Signal::Taken, &[])?;
        self.await_signal(PATIENCE)
    }

    /// Waits for the other process to end, for a moment. Blocks.
    pub fn gone(&self) {
        let _ = self.stream.set_read_timeout(Some(PATIENCE));
        let _ = (&self.stream).read(&mut [0]);
    }

    /// Says why there will be no hand-over.
    pub fn refuse(&self, why: &str) {
        let _ = self.write(&Err::<(), &str>(why), &[]);
    }

    /// Says why there will be no hand-over, and has whatever waits for the other process here wait no longer.
    pub fn hang_up(&self, why: &str) {
        self.refuse(why);
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Whether the other process is there and says nothing, as one does that waits. Blocks only where it says something.
    ///
    /// # Errors
    /// If it is gone, or says why it does not wait.
    pub fn waits(&self) -> Result<(), HandOverError> {
        let mut first = [0_u8];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(&self.stream, &mut first[..], flags) {
            Err(Errno::AGAIN) => Ok(()),
            _ => self
                .await_signal(PATIENCE)
                .and_then(|()| Err(HandOverError::Malformed("it goes on before it is its turn".to_owned()))),
        }
    }

    /// Two that talk to each other.
    #[cfg(test)]
    pub(crate) fn pair() -> std::io::Result<(Self, Self)> {
        let (one, other) = UnixStream::pair()?;
        Ok((Self { stream: one, pid: 0 }, Self { stream: other, pid: 0 }))
    }

    fn await_signal(&self, patience: Duration) -> Result<(), HandOverError> {
        self.receive::<Signal>(patience).map(drop)
    }

    fn send(&self, message: &impl Serialize, descriptors: &[OwnedFd]) -> Result<(), HandOverError> {
        self.write(&Ok::<_, &str>(message), descriptors)
    }

    /// Sends a message in a file of its own, and descriptors after it.
    fn write(
        &self,
        message: &Result<impl Serialize, &str>,
        descriptors: &[OwnedFd],
    ) -> Result<(), HandOverError> {
        let bytes =
            postcard::to_allocvec(message).map_err(|error| HandOverError::Malformed(error.to_string()))?;
        let file = rustix::fs::memfd_create("harmonaize-hand-over", MemfdFlags::CLOEXEC);
        let mut file = File::from(file.map_err(system("memfd_create"))?);
        file.write_all(&bytes).map_err(system("write"))?;
        self.stream.set_write_timeout(Some(PATIENCE)).map_err(system("setsockopt"))?;
        let count = (descriptors.len() as u64).to_le_bytes();
        let sent = send_with_descriptors(self.stream.as_fd(), &count, &[file.as_fd()], SendFlags::empty());
        if sent.map_err(system("sendmsg"))? != count.len() {
            return Err(system("sendmsg")(std::io::Error::from(std::io::ErrorKind::WriteZero)));
        }
        for some in descriptors.chunks(AT_ONCE) {
            let some: Vec<BorrowedFd<'_>> = some.iter().map(AsFd::as_fd).collect();
            send_with_descriptors(self.stream.as_fd(), &[0], &some, SendFlags::empty())
                .map_err(system("sendmsg"))?;
        }
        Ok(())
    }

    fn receive<T: DeserializeOwned>(&self, patience: Duration) -> Result<(T, Vec<OwnedFd>), HandOverError> {
        let malformed = |what: &str| HandOverError::Malformed(what.to_owned());
        self.stream.set_read_timeout(Some(patience)).map_err(system("setsockopt"))?;
        let mut count = [0; 8];
        let (read, file) = receive_with_descriptors(self.stream.as_fd(), &mut count, RecvFlags::empty())
            .map_err(system("recvmsg"))?;
        if read == 0 {
            return Err(system("recvmsg")(std::io::Error::from(std::io::ErrorKind::UnexpectedEof)));
        }
        let count = u64::from_le_bytes(count);
        if read != 8 || count > MAX_DESCRIPTORS {
            return Err(malformed("a message does not begin as one"));
        }
        let file = file.into_iter().next().ok_or_else(|| malformed("a message without content"))?;
        let mut descriptors = Vec::new();
        while (descriptors.len() as u64) < count {
            let (read, some) = receive_with_descriptors(self.stream.as_fd(), &mut [0], RecvFlags::empty())
                .map_err(system("recvmsg"))?;
            if read == 0 || some.is_empty() {
                return Err(malformed("descriptors are missing"));
            }
            descriptors.extend(some);
        }
        let mut bytes = Vec::new();
        let mut file = File::from(file);
        file.rewind().map_err(system("lseek"))?;
        file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(system("read"))?;
        let message: Result<T, String> =
            postcard::from_bytes(&bytes).map_err(|error| malformed(&error.to_string()))?;
        message.map(|message| (message, descriptors)).map_err(HandOverError::Refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_testkit::strict;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    /// Connects as this user, of a thread that then ends.
    fn connect_as(user: u32, path: &Path) -> std::io::Result<UnixStream> {
        let connect = || {
            let user = rustix::thread::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(user, user, user)?;
            UnixStream::connect(path)
        };
        std::thread::scope(|scope| scope.spawn(connect).join().unwrap())
    }

    #[test]
    fn links_over_rdma_need_a_control_that_can_move_them() {
        let of = Obstacle::of_links;
        assert_eq!(of(1, true, true), None);
        assert_eq!(of(1, false, true), Some(Obstacle::NoControl));
        assert_eq!(of(1, false, false), Some(Obstacle::NoControl));
        assert_eq!(of(1, true, false), Some(Obstacle::OldControl));
        assert_eq!(of(0, false, false), None, "there is nothing to move");
        let late = Obstacle::Late { communicators: 3 }.to_string();
        assert!(late.contains("3 communicators") && late.contains("40 s"), "{late}");
    }

    #[test]
    fn who_waits_says_nothing_and_is_there() {
        let (one, other) = Peer::pair().unwrap();
        one.waits().unwrap();
        other.refuse("there is no time");
        let refused = one.waits().unwrap_err();
        assert!(matches!(&refused, HandOverError::Refused(why) if why == "there is no time"), "{refused}");
        one.waits().unwrap();
        drop(other);
        let gone = one.waits().unwrap_err();
        assert!(matches!(gone, HandOverError::System { call: "recvmsg", .. }), "{gone}");
        // Whoever hangs up waits no longer either.
        let (one, other) = Peer::pair().unwrap();
        one.hang_up("it is to end");
        let ended = one.waits().unwrap_err();
        assert!(matches!(ended, HandOverError::System { .. }), "{ended}");
        let refused = other.waits().unwrap_err();
        assert!(matches!(&refused, HandOverError::Refused(why) if why == "it is to end"), "{refused}");
    }

    #[tokio::test]
    async fn another_user_gets_no_agents_place() {
        if !rustix::process::geteuid().is_root() {
            return strict::skip_test("it connects as another user, which needs root");
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
        let path = folder.path().join("handover.sock");
        let place = Place::bind(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let refused = connect_as(65_534, &path).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
        // Where the file lets him connect, the kernel says who he is.
        std::fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        let mut other = connect_as(65_534, &path).unwrap();
        let _own = UnixStream::connect(&path).unwrap();
        let _successor = place.next().await;
        other.set_nonblocking(true).unwrap();
        assert_eq!(other.read(&mut [0]).unwrap(), 0, "he is not closed");
    }
}
