//! A connection whose link is closed here: its last words go out, then it lingers a moment so that they are not lost.

use super::sys;
use socket2::Socket;
use std::io;
use std::net::Shutdown;
use std::time::Instant;

/// Holds no memory but its own.
#[derive(Debug)]
pub(super) struct Closing {
    pub(super) socket: Socket,
    pub(super) serial: u64,
    pub(super) deadline: Instant,
    words: Vec<u8>,
    written: usize,
    shut: bool,
}

impl Closing {
    pub(super) fn new(socket: Socket, serial: u64, deadline: Instant, words: Vec<u8>) -> Self {
        Self { socket, serial, deadline, words, written: 0, shut: false }
    }

    /// Writes what can be written; true while something is left.
    pub(super) fn write(&mut self) -> io::Result<bool> {
        loop {
            let rest = self.words.get(self.written..).unwrap_or_default();
            if rest.is_empty() {
                return Ok(false);
            }
            match sys::send_bytes(&self.socket, rest) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }

    /// Goes on; true once the peer has closed too and nothing more need be done. Input is thrown away: closing a socket
    /// that has unread input would take back what is on its way out.
    pub(super) fn finish(&mut self) -> io::Result<bool> {
        if !self.write()? && !self.shut {
            self.socket.shutdown(Shutdown::Write)?;
            self.shut = true;
        }
        for _ in 0..64 {
            match sys::discard(&self.socket) {
                Ok(0) => return Ok(true),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        // It sends faster than we throw away: it does not listen.
        Ok(true)
    }
}
