//! One end of a stream socket on which either side sends a byte to wake the other.
//!
//! Not an eventfd: its non-blocking flag belongs to the shared file description, so the other side could clear it, or
//! fill the counter, and make a poll loop block. Here each side has a description of its own and asks not to block call by call.

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

#[derive(Debug)]
pub(crate) struct Doorbell {
    socket: OwnedFd,
    closed: bool,
}

impl Doorbell {
    /// Both ends.
    pub(crate) fn pair() -> Result<(Self, OwnedFd), Errno> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        Ok((Self::from(ours), theirs))
    }

    /// Wakes the other side. One system call; never blocks. A full buffer means that the other side has not yet taken
    /// earlier bytes, and so is woken anyway.
    pub(crate) fn ring(&mut self) {
        let sent = rustix::net::send(&self.socket, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        if matches!(sent, Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN)) {
            self.closed = true;
        }
    }

    /// Takes the bytes that woke this side. One system call; never blocks. What one call leaves keeps the descriptor
    /// readable.
    pub(crate) fn quiet(&mut self) {
        let mut bytes = [0u8; 512];
        match rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) | Err(Errno::CONNRESET | Errno::NOTCONN) => self.closed = true,
            _ => {}
        }
    }

    /// Whether the other side was seen to be gone.
    pub(crate) fn closed(&self) -> bool {
        self.closed
    }

    /// Readable when the other side has rung or gone.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<OwnedFd> for Doorbell {
    fn from(socket: OwnedFd) -> Self {
        Self { socket, closed: false }
    }
}
