//! A connection whose link is closed here. Its last words go out, then it lingers a moment so that they are not lost.

use super::pulse::Pulse;
use super::sys;
use bytes::{Buf, Bytes};
use socket2::Socket;
use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Instant;

/// Holds no memory but its own.
#[derive(Debug)]
pub(super) struct Closing {
    /// Has no frames any more.
    pulse: Arc<Pulse>,
    pub(super) serial: u64,
    pub(super) deadline: Instant,
    pending: Bytes,
    shut: bool,
}

impl Closing {
    pub(super) fn new(pulse: Arc<Pulse>, serial: u64, deadline: Instant, pending: Vec<u8>) -> Self {
        Self { pulse, serial, deadline, pending: pending.into(), shut: false }
    }

    pub(super) fn socket(&self) -> &Socket {
        &self.pulse.socket
    }

    /// Writes what can be written; true while something is left.
    pub(super) fn write(&mut self) -> io::Result<bool> {
        while self.pending.has_remaining() {
            match sys::send_bytes(self.socket(), &self.pending) {
                Ok(count) => self.pending.advance(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Goes on; true once the peer has closed too and nothing more need be done. Input is thrown away: closing a socket
    /// that has unread input would take back what is on its way out.
    pub(super) fn finish(&mut self) -> io::Result<bool> {
        if !self.write()? && !self.shut {
            self.socket().shutdown(Shutdown::Write)?;
            self.shut = true;
        }
        for _ in 0..64 {
            match sys::discard(self.socket()) {
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

/// Lets the oldest go whose words are out, while there are more than `most`. Of those that still write nothing bounds the number but
/// their deadline.
pub(super) fn let_go(closings: &mut VecDeque<Closing>, most: usize) {
    let mut excess = closings.len().saturating_sub(most);
    closings.retain(|closing| {
        let goes = excess > 0 && closing.shut;
        excess -= usize::from(goes);
        !goes
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::outbox::Outbox;
    use crate::tcp::sender::Loan;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    #[test]
    fn those_that_still_have_words_stay() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut closings, mut peers) = (VecDeque::new(), Vec::new());
        for serial in 0..6 {
            let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            ours.set_nonblocking(true).unwrap();
            peers.push(listener.accept().unwrap());
            // More than the kernel takes while nobody reads, of every second.
            let words = vec![7; if serial % 2 == 0 { 16 << 20 } else { 8 }];
            let deadline = Instant::now() + Duration::from_secs(60);
            let pulse = Arc::new(Pulse::new(ours.into(), Outbox::new(1, None), Loan::new(None)));
            let mut closing = Closing::new(pulse, serial, deadline, words);
            assert!(!closing.finish().unwrap());
            closings.push_back(closing);
        }
        let mut left = |most: usize| {
            let_go(&mut closings, most);
            closings.iter().map(|closing| closing.serial).collect::<Vec<_>>()
        };
        assert_eq!(left(6), [0, 1, 2, 3, 4, 5]);
        assert_eq!(left(5), [0, 2, 3, 4, 5]);
        assert_eq!(left(1), [0, 2, 4]);
    }
}
