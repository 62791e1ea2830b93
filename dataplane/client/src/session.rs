//! The Unix socket to the agent: the handshake, then requests and answers, never blocking.

use crate::Error;
use harmonaize_abi::session::{
    Access, Answer, Hello, MAX_MESSAGE, MessageError, Refused, Request, Welcome, decode, decode_first,
    encode, encode_first, length,
};
use harmonaize_shm::receive_with_descriptors;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// Bytes taken from the socket with one call.
const CHUNK: usize = 4096;

/// The socket after the handshake.
#[derive(Debug)]
pub(crate) struct Session {
    socket: OwnedFd,
    received: Vec<u8>,
    unsent: Vec<u8>,
}

fn system(call: &'static str) -> impl Fn(Errno) -> Error {
    move |source| Error::System { call, source: source.into() }
}

/// Connects and says hello. The agent's welcome and the descriptors that came with it.
pub(crate) fn open(
    path: &Path,
    hello: &Hello,
    timeout: Duration,
) -> Result<(Session, Welcome, Vec<OwnedFd>), Error> {
    let connect = |source: Errno| Error::Connect { path: path.to_owned(), source: source.into() };
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(system("socket"))?;
    for which in [Timeout::Send, Timeout::Recv] {
        set_socket_timeout(&socket, which, Some(timeout)).map_err(system("setsockopt(SO_RCVTIMEO)"))?;
    }
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).map_err(connect)?).map_err(connect)?;
    // The agent may have refused and closed already: what it said can still be read.
    match rustix::net::send(&socket, &encode_first(hello)?, SendFlags::NOSIGNAL) {
        Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => {}
        Err(error) => return Err(connect(error)),
    }
    let mut descriptors = Vec::new();
    let mut prefix = [0; 4];
    receive_exactly(socket.as_fd(), &mut prefix, &mut descriptors)?;
    let mut message = vec![0; length(prefix)?];
    receive_exactly(socket.as_fd(), &mut message, &mut descriptors)?;
    match decode_first::<Result<Welcome, Refused>>(&message) {
        Ok(Ok(welcome)) if descriptors.len() == hello.access.descriptors() => {
            Ok((Session { socket, received: Vec::new(), unsent: Vec::new() }, welcome, descriptors))
        }
        Ok(Ok(_)) => Err(Error::Protocol(format!(
            "{} descriptors came with the agent's welcome, not {}",
            descriptors.len(),
            Access::descriptors(hello.access)
        ))),
        Ok(Err(Refused { kind, text })) => Err(Error::Refused { kind, text }),
        Err(MessageError::Version(theirs)) => Err(Error::Protocol(format!(
            "{}; install the client library that belongs to this agent",
            MessageError::Version(theirs)
        ))),
        Err(error) => Err(error.into()),
    }
}

fn receive_exactly(
    socket: BorrowedFd<'_>,
    mut into: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> Result<(), Error> {
    while !into.is_empty() {
        match receive_with_descriptors(socket, into) {
            Ok((0, _)) | Err(Errno::CONNRESET) => {
                return Err(Error::Protocol("the agent closed the connection during the handshake".into()));
            }
            Ok((received, mut more)) => {
                descriptors.append(&mut more);
                into = into.get_mut(received..).unwrap_or_default();
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                return Err(Error::Protocol("the agent did not answer the handshake in time".into()));
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

    /// Sends a request, or keeps what does not fit for [`Self::flush`].
    pub(crate) fn send(&mut self, request: &Request) -> Result<(), Error> {
        self.unsent.append(&mut encode(request)?);
        self.flush()
    }

    /// Sends what waits. An agent that is gone shows when receiving.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        while !self.unsent.is_empty() {
            match rustix::net::send(&self.socket, &self.unsent, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(Errno::PIPE | Errno::CONNRESET) => self.unsent.clear(),
                Err(error) => return Err(system("send")(error)),
            }
        }
        Ok(())
    }

    /// Takes the answers that have arrived. An error means that the agent is lost.
    pub(crate) fn receive(&mut self, answers: &mut Vec<Answer>) -> Result<(), String> {
        loop {
            let mut chunk = [0; CHUNK];
            match rustix::net::recv(&self.socket, &mut chunk[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err("it closed the connection".into()),
                Ok((_, received)) => {
                    self.received.extend_from_slice(chunk.get(..received).unwrap_or_default());
                    self.parse(answers).map_err(|error| format!("it sent nonsense ({error})"))?;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(format!("recv: {error}")),
            }
        }
    }

    fn parse(&mut self, answers: &mut Vec<Answer>) -> Result<(), MessageError> {
        debug_assert!(self.received.len() <= MAX_MESSAGE + 4 + CHUNK);
        let mut rest = self.received.as_slice();
        while let Some((prefix, after)) = rest.split_first_chunk::<4>() {
            let Some((message, after)) = after.split_at_checked(length(*prefix)?) else { break };
            answers.push(decode(message)?);
            rest = after;
        }
        let parsed = self.received.len() - rest.len();
        self.received.drain(..parsed);
        Ok(())
    }
}
