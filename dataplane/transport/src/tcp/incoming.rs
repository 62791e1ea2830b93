//! The acceptor's side of one connection until it is authenticated: fixed room, a bounded number, a bounded time.

use super::dial::{fill, whole};
use super::handshake::{HELLO, Hello, PREFIX, PROOF, Prefix, Proof, Reply, Status, Welcome};
use super::records::{LinkProtection, Records};
use super::sys;
use socket2::Socket;
use std::io;
use std::net::IpAddr;
use std::time::Instant;
use zerocopy::{FromBytes, IntoBytes};

/// A connection that came in.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) socket: Socket,
    /// Where it comes from.
    pub(super) from: IpAddr,
    pub(super) serial: u64,
    pub(super) deadline: Instant,
    stage: Stage,
    input: [u8; HELLO],
    have: usize,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    Hello,
    /// Its Hello is whole; the link it names is not open here yet.
    Waiting(Hello),
    /// It was answered with this nonce.
    Proof(Hello, [u8; 32]),
}

/// How far a guest has come.
pub(super) enum IncomingProgress {
    Waiting,
    /// It names a link; [`Incoming::answer`] or [`Incoming::refuse`].
    Named(Hello),
    /// It holds the secret that [`Incoming::answer`] was given, or says that we do not.
    Proved(Hello, Proof, [u8; 32]),
    /// It is gone, or no agent, or speaks another version.
    Gone,
}

impl Incoming {
    pub(super) fn new(socket: Socket, from: IpAddr, serial: u64, deadline: Instant) -> Self {
        Self { socket, from, serial, deadline, stage: Stage::Hello, input: [0; HELLO], have: 0 }
    }

    /// The name of the link that it waits for.
    pub(super) fn waits_for(&self) -> Option<&Hello> {
        if let Stage::Waiting(hello) = &self.stage { Some(hello) } else { None }
    }

    /// Goes as far as it can without waiting.
    pub(super) fn advance(&mut self) -> IncomingProgress {
        match self.step() {
            Ok(greeted) => greeted,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => IncomingProgress::Waiting,
            Err(_) => IncomingProgress::Gone,
        }
    }

    fn step(&mut self) -> io::Result<IncomingProgress> {
        match self.stage {
            Stage::Hello => {
                fill(
                    &self.socket,
                    self.input.get_mut(..PREFIX.max(self.have)).unwrap_or_default(),
                    &mut self.have,
                )?;
                match Hello::prefix(&self.input) {
                    Prefix::Ours => {}
                    Prefix::OtherVersion => {
                        self.refuse(Status::Version);
                        return Ok(IncomingProgress::Gone);
                    }
                    Prefix::Unknown => return Ok(IncomingProgress::Gone),
                }
                fill(&self.socket, &mut self.input, &mut self.have)?;
                let Ok(hello) = Hello::read_from_bytes(&self.input) else {
                    return Ok(IncomingProgress::Gone);
                };
                (self.stage, self.have) = (Stage::Waiting(hello), 0);
                Ok(IncomingProgress::Named(hello))
            }
            Stage::Waiting(_) => {
                // It must not speak before it is answered; this notices when it leaves.
                let mut byte = [0];
                sys::receive_bytes(&self.socket, &mut byte)?;
                Ok(IncomingProgress::Gone)
            }
            Stage::Proof(hello, nonce) => {
                fill(&self.socket, self.input.get_mut(..PROOF).unwrap_or_default(), &mut self.have)?;
                let Ok((proof, _)) = Proof::read_from_prefix(&self.input) else {
                    return Ok(IncomingProgress::Gone);
                };
                Ok(IncomingProgress::Proved(hello, proof, nonce))
            }
        }
    }

    /// Proves to the guest that this end knows `secret`, and asks it to do the same.
    pub(super) fn answer(&mut self, hello: &Hello, secret: &[u8; 32]) -> io::Result<()> {
        let mut nonce = [0; 32];
        getrandom::fill(&mut nonce).map_err(std::io::Error::other)?;
        whole(&self.socket, Reply::accept(secret, hello, nonce).as_bytes())?;
        self.stage = Stage::Proof(*hello, nonce);
        Ok(())
    }

    /// Tells the guest why it is refused, as far as it listens.
    pub(super) fn refuse(&self, status: Status) {
        let told = match self.stage {
            Stage::Proof(..) => whole(&self.socket, Welcome::new(status).as_bytes()),
            _ => whole(&self.socket, Reply::refuse(status).as_bytes()),
        };
        // What it has said beyond would turn the end of the connection into a reset.
        let _ = sys::discard(&self.socket);
        if told.is_ok() {
            // Failing means that the guest has gone.
            let _ = self.socket.shutdown(std::net::Shutdown::Write);
        }
    }

    /// The protection of a connection that has proved itself.
    pub(super) fn records(
        &self,
        protection: LinkProtection,
        secret: &[u8; 32],
    ) -> io::Result<Option<Records>> {
        let Stage::Proof(hello, nonce) = &self.stage else {
            return Err(io::Error::other("the connection has not proved itself"));
        };
        Records::derive(protection, false, secret, hello, nonce)
    }

    /// Tells the guest that it is accepted.
    pub(super) fn welcome(&self) -> io::Result<()> {
        whole(&self.socket, Welcome::new(Status::Accepted).as_bytes())
    }
}
