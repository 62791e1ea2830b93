//! The connection to the agent: the handshake, then requests and answers, never blocking.

use crate::{AgentAddress, AgentLoss, Error, ProtocolError};
use bytes::{Buf, BytesMut};
use harmonaize_abi::session::{
    Answer, AuthConfirmation, AuthRequest, Challenge, Hello, MAX_MESSAGE, MessageError, Refused, Request,
    Secret, Welcome, decode, decode_first, encode, encode_first, length,
};
use harmonaize_shm::{receive_with_descriptors, send_with_descriptors};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Bytes taken from the socket with one call.
const CHUNK: usize = 4096;
/// Over TCP, an agent's host that is silent for so long is gone.
const SILENCE: Duration = Duration::from_secs(10);

/// The socket after the handshake.
#[derive(Debug)]
pub(crate) struct Session {
    socket: OwnedFd,
    received: BytesMut,
    /// Those of answers that have not arrived whole.
    descriptors: VecDeque<OwnedFd>,
    unsent: VecDeque<Unsent>,
}

/// Bytes that wait for room in the socket, and the descriptor that goes with the first of them.
#[derive(Debug)]
struct Unsent {
    bytes: BytesMut,
    descriptor: Option<OwnedFd>,
}

/// Why a request was not sent.
#[derive(Debug)]
pub(crate) enum SendError {
    /// It cannot be written as a message.
    Message(MessageError),
    /// The kernel refused.
    System(Errno),
}

/// What sends.
const SENDMSG: &str = "sendmsg";

impl From<SendError> for Error {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Message(error) => error.into(),
            SendError::System(error) => system(SENDMSG)(error),
        }
    }
}

impl From<SendError> for AgentLoss {
    fn from(error: SendError) -> Self {
        match error {
            SendError::Message(error) => Self::Request(error),
            SendError::System(source) => Self::System { call: SENDMSG, source },
        }
    }
}

fn system(call: &'static str) -> impl Fn(Errno) -> Error {
    move |source| Error::System { call, source: source.into() }
}

/// The socket during the handshake, where every call waits for the agent, at most as long as the options say.
#[derive(Debug)]
pub(crate) struct Opening {
    socket: OwnedFd,
}

impl Opening {
    /// Connects, and over TCP proves whose process this is.
    pub(crate) fn connect(at: &AgentAddress, timeout: Duration) -> Result<Self, Error> {
        let refused = |source: std::io::Error| Error::Connect { at: at.to_string(), source };
        match at {
            AgentAddress::Socket(path) => {
                let flags = SocketFlags::CLOEXEC;
                let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                    .map_err(system("socket"))?;
                let opening = Self { socket };
                opening.limit(timeout)?;
                let address = SocketAddrUnix::new(path).map_err(|error| refused(error.into()))?;
                rustix::net::connect(&opening.socket, &address).map_err(|error| refused(error.into()))?;
                Ok(opening)
            }
            AgentAddress::Tcp { address, tenant, secret } => {
                let stream = TcpStream::connect_timeout(address, timeout).map_err(refused)?;
                let opening = Self { socket: stream.into() };
                opening.limit(timeout)?;
                watched(opening.socket.as_fd()).map_err(system("setsockopt(TCP)"))?;
                opening.authenticate(tenant, secret, at)?;
                Ok(opening)
            }
        }
    }

    fn limit(&self, timeout: Duration) -> Result<(), Error> {
        for which in [Timeout::Send, Timeout::Recv] {
            set_socket_timeout(&self.socket, which, Some(timeout))
                .map_err(system("setsockopt(SO_RCVTIMEO)"))?;
        }
        Ok(())
    }

    fn authenticate(&self, tenant: &str, secret: &Secret, at: &AgentAddress) -> Result<(), Error> {
        let mut nonce = [0; 32];
        getrandom::fill(&mut nonce)
            .map_err(|error| Error::System { call: "getrandom", source: std::io::Error::other(error) })?;
        let knock = AuthRequest { tenant: tenant.to_owned(), nonce };
        self.write(&encode_first(&knock)?)?;
        let challenge: Challenge = first(&self.read(&mut Vec::new())?)?;
        self.send(&secret.response(&knock, &challenge))?;
        let proven: AuthConfirmation = self.receive_or_refused()?;
        match secret.verify_agent(&knock, &challenge, &proven) {
            true => Ok(()),
            false => Err(Error::Unauthenticated { at: at.to_string() }),
        }
    }

    /// Says hello. The agent's welcome and the descriptors that came with it.
    pub(crate) fn hello(&self, hello: &Hello) -> Result<(Welcome, Vec<OwnedFd>), Error> {
        self.write(&encode_first(hello)?)?;
        let mut descriptors = Vec::new();
        let message = self.read(&mut descriptors)?;
        match first::<Result<Welcome, Refused>>(&message)? {
            Ok(welcome) if descriptors.len() == hello.access.descriptors() => Ok((welcome, descriptors)),
            Ok(_) => {
                let (came, needed) = (descriptors.len(), hello.access.descriptors());
                Err(ProtocolError::Descriptors { came, needed }.into())
            }
            Err(Refused { kind, text }) => Err(Error::Refused { kind, text }),
        }
    }

    /// This end's address, over TCP.
    #[cfg(feature = "rdma")]
    pub(crate) fn local(&self) -> Option<std::net::IpAddr> {
        let name = rustix::net::getsockname(&self.socket).ok()?;
        std::net::SocketAddr::try_from(name).ok().map(|address| address.ip().to_canonical())
    }

    /// Sends a message that is not the first.
    pub(crate) fn send(&self, message: &impl Serialize) -> Result<(), Error> {
        self.write(&encode(message)?)
    }

    /// Receives a message that is not the first.
    pub(crate) fn receive<T: DeserializeOwned>(&self) -> Result<T, Error> {
        Ok(decode(&self.read(&mut Vec::new())?)?)
    }

    /// The same, where the agent may refuse instead.
    pub(crate) fn receive_or_refused<T: DeserializeOwned>(&self) -> Result<T, Error> {
        self.receive::<Result<T, Refused>>()?.map_err(|Refused { kind, text }| Error::Refused { kind, text })
    }

    /// The handshake is over.
    pub(crate) fn into_session(self) -> Session {
        let (descriptors, unsent) = (VecDeque::new(), VecDeque::new());
        Session { socket: self.socket, received: BytesMut::new(), descriptors, unsent }
    }

    fn write(&self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            match rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                // The agent may have refused and closed already: what it said can still be read.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(error) => return Err(system("send")(error)),
            }
        }
        Ok(())
    }

    /// A message without its length, and what came with it.
    fn read(&self, descriptors: &mut Vec<OwnedFd>) -> Result<Vec<u8>, Error> {
        let mut prefix = [0; 4];
        receive_exactly(self.socket.as_fd(), &mut prefix, descriptors)?;
        let mut message = vec![0; length(prefix)?];
        receive_exactly(self.socket.as_fd(), &mut message, descriptors)?;
        Ok(message)
    }
}

/// Small messages go at once, and a host that vanishes without a word is noticed within [`SILENCE`].
fn watched(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, SILENCE / 2)?;
    sockopt::set_tcp_keepintvl(socket, SILENCE / 5)?;
    sockopt::set_tcp_user_timeout(socket, SILENCE.as_millis() as u32)
}

fn first<T: DeserializeOwned>(message: &[u8]) -> Result<T, Error> {
    Ok(decode_first(message)?)
}

fn receive_exactly(
    socket: BorrowedFd<'_>,
    mut into: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<(), Error> {
    while !into.is_empty() {
        match receive_with_descriptors(socket, into, RecvFlags::empty()) {
            Ok((0, _)) | Err(Errno::CONNRESET) => {
                return Err(ProtocolError::Closed.into());
            }
            Ok((received, mut more)) => {
                descriptors.append(&mut more);
                into = into.get_mut(received..).unwrap_or_default();
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                return Err(ProtocolError::Silent.into());
            }
            Err(error) => return Err(system("recvmsg")(error)),
        }
    }
    Ok(())
}

impl Session {
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether requests wait for room in the socket.
    pub(crate) fn unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends a request, with a descriptor if it has one, or keeps what does not fit for [`Self::flush`].
    pub(crate) fn send(&mut self, request: &Request, descriptor: Option<OwnedFd>) -> Result<(), SendError> {
        let message = encode(request).map_err(SendError::Message)?;
        match self.unsent.back_mut() {
            Some(last) if descriptor.is_none() => last.bytes.extend_from_slice(&message),
            _ => self.unsent.push_back(Unsent { bytes: BytesMut::from(message.as_slice()), descriptor }),
        }
        self.flush()
    }

    /// Sends what waits. An agent that is gone shows when receiving.
    pub(crate) fn flush(&mut self) -> Result<(), SendError> {
        while let Some(Unsent { bytes, descriptor }) = self.unsent.front_mut() {
            let along = descriptor.as_ref().map(AsFd::as_fd);
            match send_with_descriptors(self.socket.as_fd(), bytes, along.as_slice(), SendFlags::DONTWAIT) {
                Ok(sent) => {
                    bytes.advance(sent);
                    *descriptor = None;
                    if bytes.is_empty() {
                        self.unsent.pop_front();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(Errno::PIPE | Errno::CONNRESET) => self.unsent.clear(),
                Err(error) => return Err(SendError::System(error)),
            }
        }
        Ok(())
    }

    /// Takes the answers that have arrived, and the descriptors that came with them. An error means that the agent is lost.
    pub(crate) fn receive(&mut self, answers: &mut Vec<(Answer, Option<OwnedFd>)>) -> Result<(), AgentLoss> {
        loop {
            let mut chunk = [0; CHUNK];
            match receive_with_descriptors(self.socket.as_fd(), &mut chunk, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(AgentLoss::Closed),
                Ok((received, came)) => {
                    self.descriptors.extend(came);
                    self.received.extend_from_slice(chunk.get(..received).unwrap_or_default());
                    self.parse(answers).map_err(AgentLoss::Nonsense)?;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(source) => return Err(AgentLoss::System { call: "recvmsg", source }),
            }
        }
    }

    fn parse(&mut self, answers: &mut Vec<(Answer, Option<OwnedFd>)>) -> Result<(), MessageError> {
        debug_assert!(self.received.len() <= MAX_MESSAGE + 4 + CHUNK);
        while let Some((prefix, rest)) = self.received.split_first_chunk::<4>() {
            let bytes = length(*prefix)?;
            let Some(message) = rest.get(..bytes) else { break };
            let answer = decode(message)?;
            self.received.advance(4 + bytes);
            let takes = matches!(answer, Answer::Grown { added: Ok(_), .. });
            let descriptor = if takes { self.descriptors.pop_front() } else { None };
            answers.push((answer, descriptor));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A session, and the agent's end of its socket.
    fn pair() -> (Session, OwnedFd) {
        let (socket, agent) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        let (received, descriptors, unsent) = Default::default();
        (Session { socket, received, descriptors, unsent }, agent)
    }

    #[test]
    fn an_agent_that_closes_differs_from_a_hostile_one() {
        let mut answers = Vec::new();
        let (mut session, agent) = pair();
        session.receive(&mut answers).unwrap();
        rustix::io::write(&agent, &[0; 4]).unwrap();
        let loss = session.receive(&mut answers).unwrap_err();
        assert!(matches!(loss, AgentLoss::Nonsense(MessageError::Length(0))), "{loss}");
        let (mut session, agent) = pair();
        drop(agent);
        assert!(matches!(session.receive(&mut answers), Err(AgentLoss::Closed)));
        assert!(answers.is_empty());
    }
}
