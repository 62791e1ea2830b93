//! The initiator's side of one connection until it is authenticated.

use super::handshake::{Hello, PROOF, Proof, REPLY, Reply, Status, VERSION, WELCOME, Welcome};
use super::records::{LinkProtection, Records};
use super::sys;
use crate::{DownReason, Introduction, LinkRefusal};
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// After so long a silence the kernel asks the peer's whether it has the connection still. Who resets one says so in a single packet,
/// which may be lost.
const ALIVE: Duration = Duration::from_secs(1);

/// A connection that is being made.
#[derive(Debug)]
pub(super) struct Dial {
    pub(super) socket: Socket,
    hello: Hello,
    protection: LinkProtection,
    /// The acceptor's.
    nonce: [u8; 32],
    stage: Stage,
    input: [u8; REPLY],
    have: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Connecting,
    Reply,
    Welcome,
}

/// How far a dial has come.
pub(super) enum DialProgress {
    Waiting,
    /// Authenticated by both ends.
    Done,
    /// Worth another try later.
    Retry(DownReason),
    /// Not worth another.
    Fatal(DownReason),
}

impl Dial {
    /// Starts to connect from `local` (its port 0 for any).
    pub(super) fn start(
        introduction: &Introduction,
        path: u16,
        protection: LinkProtection,
        local: Option<SocketAddr>,
        prepare: &dyn Fn(&Socket) -> io::Result<()>,
    ) -> Result<Self, DialProgress> {
        let failed = |what: &str, error: io::Error| {
            DialProgress::Retry(DownReason::Connect(format!("{what} {}: {error}", introduction.peer)))
        };
        let paths = introduction.source_ports.len() as u16;
        let mut nonce = [0; 32];
        getrandom::fill(&mut nonce).map_err(|error| failed("no nonce for", std::io::Error::other(error)))?;
        let socket = Socket::new(
            Domain::for_address(introduction.peer),
            Type::STREAM.nonblocking(),
            Some(Protocol::TCP),
        )
        .map_err(|error| failed("no socket for", error))?;
        prepare(&socket).map_err(|error| failed("no socket for", error))?;
        let alive = TcpKeepalive::new().with_time(ALIVE).with_interval(ALIVE);
        socket.set_tcp_keepalive(&alive).map_err(|error| failed("no socket for", error))?;
        if let Some(local) = local {
            socket.set_reuse_address(true).map_err(|error| failed("no socket for", error))?;
            socket.bind(&SockAddr::from(local)).map_err(|error| {
                DialProgress::Fatal(DownReason::Connect(format!("source {local} for path {path}: {error}")))
            })?;
        }
        match socket.connect(&SockAddr::from(introduction.peer)) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => {
                let from = local.map_or(String::new(), |local| format!("from {local} "));
                return Err(failed(&format!("path {path} {from}to"), error));
            }
        }
        let hello = Hello::new(introduction.name, path, paths, protection, nonce);
        let (stage, nonce, input) = (Stage::Connecting, [0; 32], [0; REPLY]);
        Ok(Self { socket, hello, protection, nonce, stage, input, have: 0 })
    }

    /// Goes as far as it can without waiting. `writable`: the kernel says that connecting is over.
    pub(super) fn advance(&mut self, introduction: &Introduction, writable: bool) -> DialProgress {
        let peer = introduction.peer;
        match self.steps(introduction, writable) {
            Ok(dialled) => dialled,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => DialProgress::Waiting,
            Err(error) if self.stage != Stage::Connecting && is_end(&error) => {
                let why = format!("{peer} closes connections from here, to which it has not been introduced");
                DialProgress::Retry(DownReason::Connect(why))
            }
            Err(error) => DialProgress::Retry(DownReason::Connect(format!("{peer}: {error}"))),
        }
    }

    fn steps(&mut self, introduction: &Introduction, writable: bool) -> io::Result<DialProgress> {
        if self.stage == Stage::Connecting {
            if !writable {
                return Ok(DialProgress::Waiting);
            }
            if let Some(error) = self.socket.take_error()? {
                return Err(error);
            }
            whole(&self.socket, self.hello.as_bytes())?;
            self.stage = Stage::Reply;
        }
        if self.stage == Stage::Reply {
            self.fill(REPLY)?;
            let Ok(reply) = Reply::read_from_bytes(&self.input) else { return Ok(DialProgress::Waiting) };
            if let Some(refused) = self.judge(introduction, &reply)? {
                return Ok(refused);
            }
            let proof = Proof::new(&introduction.secret, &self.hello, &reply.nonce);
            whole(&self.socket, proof.as_bytes())?;
            (self.stage, self.have, self.nonce) = (Stage::Welcome, 0, reply.nonce);
        }
        self.fill(WELCOME)?;
        let Ok((welcome, _)) = Welcome::read_from_prefix(&self.input) else {
            return Ok(DialProgress::Waiting);
        };
        Ok(match Status::of(welcome.status) {
            Some(Status::Accepted) => DialProgress::Done,
            status => self.refusal(status, VERSION),
        })
    }

    /// What is wrong with the acceptor's reply, if anything.
    fn judge(&self, introduction: &Introduction, reply: &Reply) -> io::Result<Option<DialProgress>> {
        if !reply.is_ours() {
            return Err(io::Error::other("something else than an agent answers there"));
        }
        match Status::of(reply.status) {
            Some(Status::Accepted) if reply.proves(&introduction.secret, &self.hello) => {
                // An agent that knows nothing of protection accepts any, and has none.
                let differ = reply.protection != self.hello.protection;
                let (ours, theirs) = (self.protection, reply.protection.get());
                let why = LinkRefusal::Protection { ours, theirs };
                Ok(differ.then_some(DialProgress::Fatal(DownReason::Refused(why))))
            }
            Some(Status::Accepted) => {
                // The word is a courtesy: if it does not get out, the peer sees the connection end.
                let _ = whole(&self.socket, Proof::refuse(Status::Secret).as_bytes());
                Ok(Some(self.refusal(Some(Status::Secret), VERSION)))
            }
            status => Ok(Some(self.refusal(status, reply.version.get()))),
        }
    }

    /// What becomes of a dial that the peer, which speaks `version`, refuses.
    fn refusal(&self, status: Option<Status>, version: u16) -> DialProgress {
        let Some(status) = status else {
            return DialProgress::Fatal(DownReason::Refused(LinkRefusal::Unknown));
        };
        let reason = DownReason::Refused(status.refusal(version, self.protection));
        if status == Status::UnknownName { DialProgress::Retry(reason) } else { DialProgress::Fatal(reason) }
    }

    /// The connection, which gives signs of life of its own from now on.
    pub(super) fn into_socket(self) -> io::Result<Socket> {
        self.socket.set_keepalive(false)?;
        Ok(self.socket)
    }

    /// The protection of a connection that is authenticated.
    pub(super) fn records(&self, secret: &[u8; 32]) -> io::Result<Option<Records>> {
        Records::derive(self.protection, true, secret, &self.hello, &self.nonce)
    }

    /// Reads on until `need` bytes are there, and never more.
    fn fill(&mut self, need: usize) -> io::Result<()> {
        fill(&self.socket, self.input.get_mut(..need).unwrap_or_default(), &mut self.have)
    }
}

/// Whether the peer has ended the connection.
fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset)
}

/// Reads into what `have` leaves of `room`; `WouldBlock` until it is full.
pub(super) fn fill(socket: &Socket, room: &mut [u8], have: &mut usize) -> io::Result<()> {
    loop {
        let rest = room.get_mut(*have..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(());
        }
        match sys::receive_bytes(socket, rest)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => *have += got,
        }
    }
}

/// Writes a message of the handshake, which always fits an empty socket buffer.
pub(super) fn whole(socket: &Socket, bytes: &[u8]) -> io::Result<()> {
    const { assert!(PROOF < 100 && REPLY < 100) };
    if sys::send_bytes(socket, bytes)? == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}
