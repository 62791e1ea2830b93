//! Readiness: one epoll set, edge-triggered for connections, with a timer in it.

use crate::LinkId;
use crate::timer::Timer;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Events taken in one call.
const EVENTS: usize = 64;

/// Whose descriptor it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Listener,
    Timer,
    /// Another thread has something for this one.
    Bell,
    /// A connection that has not said yet what it is: where it waits, and the how-manieth it is.
    Incoming(u16, u64),
    Path(LinkId, u16),
    Closing(u64),
}

/// What a descriptor is ready for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// The peer will send no more, or the connection has failed.
    pub(super) hung_up: bool,
}

impl Token {
    fn encode(self) -> u64 {
        let pack =
            |kind: u64, big: u64, small: u16| kind << 60 | (big & ((1 << 44) - 1)) << 16 | u64::from(small);
        match self {
            Self::Listener => pack(1, 0, 0),
            Self::Timer => pack(2, 0, 0),
            Self::Incoming(at, serial) => pack(3, serial, at),
            Self::Path(link, path) => pack(4, link.0, path),
            Self::Closing(serial) => pack(5, serial, 0),
            Self::Bell => pack(6, 0, 0),
        }
    }

    fn decode(token: u64) -> Option<Self> {
        let (big, small) = (token >> 16 & ((1 << 44) - 1), token as u16);
        match token >> 60 {
            1 => Some(Self::Listener),
            2 => Some(Self::Timer),
            3 => Some(Self::Incoming(small, big)),
            4 => Some(Self::Path(LinkId(big), small)),
            5 => Some(Self::Closing(big)),
            6 => Some(Self::Bell),
            _ => None,
        }
    }
}

/// The set.
#[derive(Debug)]
pub(super) struct Poll {
    epoll: OwnedFd,
    timer: Timer,
    /// For when the timer is set.
    armed: Option<Instant>,
}

impl Poll {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let timer = Timer::new()?;
        let token = EventData::new_u64(Token::Timer.encode());
        epoll::add(&epoll, &timer, token, EventFlags::IN)?;
        Ok(Self { epoll, timer, armed: None })
    }

    /// Watches a listening socket, for as long as it has connections waiting.
    pub(super) fn add_listener(&self, socket: impl AsFd) -> io::Result<()> {
        let token = EventData::new_u64(Token::Listener.encode());
        Ok(epoll::add(&self.epoll, socket, token, EventFlags::IN)?)
    }

    /// Watches a bell, for as long as it rings.
    pub(super) fn add_bell(&self, bell: impl AsFd) -> io::Result<()> {
        let token = EventData::new_u64(Token::Bell.encode());
        Ok(epoll::add(&self.epoll, bell, token, EventFlags::IN)?)
    }

    /// Watches a socket no longer.
    pub(super) fn remove(&self, socket: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, socket)?)
    }

    /// Watches a connection: once now, and at each change.
    pub(super) fn add(&self, socket: impl AsFd, token: Token) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, socket, EventData::new_u64(token.encode()), Self::EDGES)?)
    }

    /// Gives a connection another token; it is reported once more.
    pub(super) fn rename(&self, socket: impl AsFd, token: Token) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, socket, EventData::new_u64(token.encode()), Self::EDGES)?)
    }

    const EDGES: EventFlags =
        EventFlags::IN.union(EventFlags::OUT).union(EventFlags::RDHUP).union(EventFlags::ET);

    /// What is ready now, without waiting: a bounded number, each in its turn.
    pub(super) fn ready(&self) -> Events {
        self.poll(Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))
    }

    /// Sleeps until something is ready; what is, as of [`Poll::ready`].
    pub(super) fn wait(&self) -> Events {
        self.poll(None)
    }

    fn poll(&self, patience: Option<&Timespec>) -> Events {
        let mut room = [MaybeUninit::<Event>::uninit(); EVENTS];
        let mut events = Events { list: [None; EVENTS] };
        // An interrupted call finds nothing; the caller comes again.
        if let Ok((found, _)) = epoll::wait(&self.epoll, &mut room, patience) {
            for (to, from) in events.list.iter_mut().zip(found.iter()) {
                let flags = from.flags;
                let bad = EventFlags::HUP | EventFlags::ERR;
                let ready = Ready {
                    readable: flags.intersects(EventFlags::IN | EventFlags::RDHUP | bad),
                    writable: flags.intersects(EventFlags::OUT | bad),
                    hung_up: flags.intersects(EventFlags::RDHUP | bad),
                };
                *to = Token::decode(from.data.u64()).map(|token| (token, ready));
            }
        }
        events
    }

    /// Sets the timer for `next`, if it is not set so.
    pub(super) fn arm(&mut self, next: Option<Instant>) {
        if self.armed != next {
            self.armed = next;
            self.timer.set(next.map(|next| next.saturating_duration_since(Instant::now())));
        }
    }

    /// Brings the timer forward to `at`.
    pub(super) fn no_later_than(&mut self, at: Instant) {
        if self.armed.is_none_or(|armed| at < armed) {
            self.arm(Some(at));
        }
    }

    /// The timer fired: it is silent until set again.
    pub(super) fn disarm(&mut self) {
        self.armed = None;
        self.timer.set(None::<Duration>);
    }
}

impl AsFd for Poll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// What was ready.
pub(super) struct Events {
    list: [Option<(Token, Ready)>; EVENTS],
}

impl Events {
    pub(super) fn iter(&self) -> impl Iterator<Item = (Token, Ready)> {
        self.list.iter().map_while(|event| *event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back() {
        for token in [
            Token::Listener,
            Token::Timer,
            Token::Bell,
            Token::Incoming(u16::MAX, 9),
            Token::Path(LinkId(1 << 40), 63),
            Token::Closing(3),
        ] {
            assert_eq!(Token::decode(token.encode()), Some(token));
        }
        assert_eq!(Token::decode(0), None);
    }
}
