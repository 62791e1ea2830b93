//! Takes connections in for all endpoints of one listening address, on a thread of its own.
//!
//! Only addresses come in that control introduced for a link that is open; others are reset at once. Who comes in says hello and
//! proves that it knows the link's secret (`handshake`), within bounds of number and time. An endpoint sees authenticated
//! connections alone, so that strangers cost its poll loop nothing. The same thread gives endpoints' signs of life (`pulse`).

use super::awaited::{Admission, Arrivals, Awaited, Expected, Rejected};
use super::guests::Guests;
use super::handshake::{Hello, Status};
use super::incoming::{Incoming, IncomingProgress};
use super::poll::{Poll, Token};
use super::pulse::Pulse;
use super::records::LinkProtection;
use super::{Config, LONGEST_TICK, tune};
use crate::{DownReason, Introduction};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Connections taken in one call.
const ACCEPTS: usize = 16;

/// How long the acceptor waits when the system has no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// A listening address for any number of endpoints. The thread ends with the last clone and endpoint.
#[derive(Clone, Debug)]
pub struct Acceptor(Arc<Running>);

#[derive(Debug)]
struct Running {
    local: SocketAddr,
    /// For another process of the agent's.
    listener: OwnedFd,
    awaited: Arc<Awaited>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Listens where the configuration says, and starts the thread.
    ///
    /// # Errors
    /// If the address cannot be had, or the kernel grants no descriptor or thread.
    pub fn bind(config: &Config) -> io::Result<Self> {
        let listener =
            Socket::new(Domain::for_address(config.listen), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
        listener.set_reuse_address(true)?;
        tune(&listener, config)?;
        listener.bind(&SockAddr::from(config.listen))?;
        listener.listen(1024)?;
        Self::on(listener, config)
    }

    /// Goes on with a socket that another process of the agent's listens on.
    ///
    /// # Errors
    /// If it is none, or the kernel grants no descriptor or thread.
    pub fn inherit(listener: OwnedFd, config: &Config) -> io::Result<Self> {
        Self::on(Socket::from(listener), config)
    }

    fn on(listener: Socket, config: &Config) -> io::Result<Self> {
        let descriptor = listener.as_fd().try_clone_to_owned()?;
        let local = listener.local_addr()?.as_socket();
        let local = local.ok_or_else(|| io::Error::other("the listening socket has no address"))?;
        let awaited = Arc::new(Awaited::new()?);
        let poll = Poll::new()?;
        poll.add_listener(&listener)?;
        poll.add_bell(awaited.bell())?;
        let reception = Reception {
            handshake_timeout: config.handshake_timeout,
            tick: config.tick(),
            beat: None,
            listener,
            paused: None,
            poll,
            awaited: Arc::clone(&awaited),
            guests: Guests::new(config.max_incoming, config.max_incoming_per_peer),
            next_serial: 1,
            rearm: false,
        };
        let thread = std::thread::Builder::new().name("acceptor".into()).spawn(move || reception.run())?;
        Ok(Self(Arc::new(Running { local, listener: descriptor, awaited, thread: Some(thread) })))
    }

    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.0.local
    }

    /// Another descriptor of the listening socket.
    ///
    /// # Errors
    /// If the kernel grants none.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.0.listener.try_clone()
    }

    /// Who has come so far that nobody introduced.
    pub fn rejected(&self) -> Rejected {
        self.0.awaited.rejected()
    }

    /// How many links ended by a record that their peer did not make.
    pub fn forged(&self) -> u64 {
        self.0.awaited.forged()
    }

    pub(super) fn count_forged(&self) {
        self.0.awaited.count_forged();
    }

    /// From now on gives a path's signs of life.
    pub(super) fn beat(&self, pulse: &Arc<Pulse>) {
        if self.0.awaited.pulses.enter(Arc::downgrade(pulse)) {
            self.0.awaited.bell().ring();
        }
    }

    /// Whether the thread is gone: no link comes up any more.
    pub fn is_finished(&self) -> bool {
        self.0.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Has the peer of an introduction come in, to `to`.
    pub(super) fn expect(
        &self,
        introduction: &Introduction,
        protection: LinkProtection,
        to: &Arc<Arrivals>,
    ) -> Result<Expected, DownReason> {
        Expected::enter(&self.0.awaited, introduction, protection, to)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.awaited.end();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that takes connections in has panicked");
        }
    }
}

/// What the thread has.
struct Reception {
    handshake_timeout: Duration,
    /// Between two beats.
    tick: Duration,
    /// When paths next give signs of life, if there are any.
    beat: Option<Instant>,
    listener: Socket,
    /// Out of descriptors: no more connections are taken before then.
    paused: Option<Instant>,
    poll: Poll,
    awaited: Arc<Awaited>,
    guests: Guests,
    next_serial: u64,
    /// A deadline may have changed.
    rearm: bool,
}

impl Reception {
    fn run(mut self) {
        loop {
            let events = self.poll.wait();
            for (token, _) in events.iter() {
                match token {
                    Token::Listener => self.accept(),
                    Token::Timer => self.handle_timeout(),
                    Token::Bell => {
                        self.awaited.bell().silence();
                        let Some(added) = self.awaited.take_added() else { return };
                        self.answer_waiting(&added);
                        if self.beat.is_none() && self.awaited.pulses.any() {
                            self.beat = Some(Instant::now() + self.tick);
                            self.rearm = true;
                        }
                    }
                    Token::Incoming(at, serial) => self.handle_guest(at.into(), serial),
                    Token::Path(..) | Token::Closing(_) => {}
                }
            }
            if std::mem::take(&mut self.rearm) {
                let deadlines = self.guests.iter().map(|(_, guest)| guest.deadline);
                self.poll.arm(deadlines.chain(self.paused).chain(self.beat).min());
            }
        }
    }

    /// Takes connections in, a bounded number.
    fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            let (socket, address) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => {
                    let exhausted = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
                    if error.raw_os_error().is_some_and(|code| exhausted.contains(&code)) {
                        tracing::warn!(%error, "cannot take connections for a moment");
                        self.paused = Some(Instant::now() + PAUSE);
                        self.rearm = true;
                        let _ = self.poll.remove(&self.listener);
                    }
                    return;
                }
            };
            let Some(from) = address.as_socket().map(|address| address.ip().to_canonical()) else { continue };
            if !self.awaited.admits(from) {
                // Reset, so that the kernel keeps nothing of it; otherwise it ends in order.
                let _ = socket.set_linger(Some(Duration::ZERO));
            } else if socket.set_nonblocking(true).is_ok() && socket.set_tcp_nodelay(true).is_ok() {
                self.admit(socket, from);
            }
        }
    }

    /// Gives a connection a place among the guests.
    fn admit(&mut self, socket: Socket, from: IpAddr) {
        let Some(at) = self.guests.make_room(from) else { return };
        let serial = self.next_serial;
        self.next_serial += 1;
        if self.poll.add(socket.as_fd(), Token::Incoming(at as u16, serial)).is_err() {
            return;
        }
        let deadline = Instant::now() + self.handshake_timeout;
        self.guests.put(at, Incoming::new(socket, from, serial, deadline));
        self.rearm = true;
    }

    /// A guest has said something, or gone.
    fn handle_guest(&mut self, at: usize, serial: u64) {
        let Some(guest) = self.guests.get(at, serial) else { return };
        match guest.advance() {
            IncomingProgress::Waiting => {}
            IncomingProgress::Gone => drop(self.guests.remove(at)),
            IncomingProgress::Named(hello) => self.greet(at, serial, &hello),
            IncomingProgress::Proved(hello, proof, nonce) => {
                let Some(guest) = self.guests.remove(at) else { return };
                match self.awaited.verify(&hello, &proof, &nonce) {
                    Ok(to) => {
                        if self.poll.remove(&guest.socket).is_ok() {
                            to.push(guest, hello);
                        }
                    }
                    Err(status) => guest.refuse(status),
                }
            }
        }
    }

    /// Answers, refuses or keeps a guest that has named its link.
    fn greet(&mut self, at: usize, serial: u64, hello: &Hello) {
        let Some(guest) = self.guests.get(at, serial) else { return };
        match self.awaited.judge(hello) {
            Admission::Wait => return,
            Admission::Refuse(status) => guest.refuse(status),
            Admission::Answer(secret) => {
                if guest.answer(hello, &secret).is_ok() {
                    return;
                }
            }
        }
        self.guests.remove(at);
    }

    /// Links were opened: those who wait for them are answered.
    fn answer_waiting(&mut self, added: &[[u8; 16]]) {
        let waiting = |(at, guest): (usize, &Incoming)| {
            let hello = guest.waits_for().copied().filter(|hello| added.contains(&hello.name))?;
            Some((at, guest.serial, hello))
        };
        let waiting: Vec<_> = self.guests.iter().filter_map(waiting).collect();
        for (at, serial, hello) in waiting {
            self.greet(at, serial, &hello);
        }
    }

    /// Ends what has taken too long, and takes connections again.
    fn handle_timeout(&mut self) {
        self.poll.disarm();
        self.rearm = true;
        let now = Instant::now();
        if self.beat.is_some_and(|at| at <= now) {
            let go_on = self.awaited.pulses.beat(self.tick == LONGEST_TICK);
            self.beat = go_on.then(|| now + self.tick);
        }
        if self.paused.is_some_and(|until| until <= now) {
            self.paused = None;
            if let Err(error) = self.poll.add_listener(&self.listener) {
                tracing::error!(%error, "cannot listen any more");
            }
        }
        let late: Vec<usize> =
            self.guests.iter().filter(|(_, guest)| guest.deadline <= now).map(|(at, _)| at).collect();
        for at in late {
            if let Some(guest) = self.guests.remove(at)
                && guest.waits_for().is_some()
            {
                guest.refuse(Status::UnknownName);
            }
        }
    }
}
