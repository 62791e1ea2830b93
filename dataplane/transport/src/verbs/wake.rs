//! What one sleeps on: an epoll set of the TCP link's descriptor, a timer, completion queues and devices.

use crate::LinkId;
use crate::timer::Timer;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// Descriptors looked at in one call.
const EVENTS: usize = 64;

/// Whose descriptor it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    /// The TCP endpoint's, or the timer's: they are looked at in any case.
    Other,
    Path(LinkId, u16),
    Device(u16),
}

impl Token {
    fn encode(self) -> u64 {
        match self {
            Self::Other => 0,
            Self::Path(link, path) => 1 << 62 | (link.0 & ((1 << 46) - 1)) << 16 | u64::from(path),
            Self::Device(at) => 2 << 62 | u64::from(at),
        }
    }

    fn decode(token: u64) -> Self {
        match token >> 62 {
            1 => Self::Path(LinkId(token >> 16 & ((1 << 46) - 1)), token as u16),
            2 => Self::Device(token as u16),
            _ => Self::Other,
        }
    }
}

/// The set. Descriptors leave it when they are closed.
#[derive(Debug)]
pub(super) struct Wake {
    epoll: OwnedFd,
    timer: Timer,
    set_for: Option<Instant>,
}

impl Wake {
    pub(super) fn new() -> io::Result<Self> {
        let (epoll, timer) = (epoll::create(CreateFlags::CLOEXEC)?, Timer::new()?);
        let wake = Self { epoll, timer, set_for: None };
        wake.add(wake.timer.as_fd(), Token::Other)?;
        Ok(wake)
    }

    pub(super) fn add(&self, fd: BorrowedFd<'_>, token: Token) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(token.encode()), EventFlags::IN)?)
    }

    /// Wakes at an instant, and at no other.
    pub(super) fn at(&mut self, when: Option<Instant>) {
        if self.set_for != when {
            self.set_for = when;
            self.timer.set(when.map(|when| when.saturating_duration_since(Instant::now())));
        }
    }

    /// Whose descriptors are readable.
    pub(super) fn ready(&self) -> impl Iterator<Item = Token> + use<> {
        let mut events = [const { MaybeUninit::<Event>::uninit() }; EVENTS];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let count = match epoll::wait(&self.epoll, &mut events, Some(&now)) {
            Ok((ready, _)) => ready.len(),
            Err(_) => 0,
        };
        events.into_iter().take(count).map(|event| {
            // SAFETY: the kernel filled the first `count`.
            Token::decode(unsafe { event.assume_init() }.data.u64())
        })
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back() {
        for token in [Token::Other, Token::Path(LinkId(1 << 45), u16::MAX), Token::Device(3)] {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }
}
