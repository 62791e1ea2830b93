//! From introductions to authenticated paths: dialling, and greeting those who dial.

use super::dial::{Dial, DialProgress};
use super::handshake::{Hello, Proof, Status};
use super::incoming::{Incoming, IncomingProgress};
use super::link::{Link, Slot};
use super::liveness::LivenessTimer;
use super::path::Path;
use super::poll::Token;
use super::{TcpTransport, tune};
use crate::{DownReason, Event, LinkId};
use socket2::Socket;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Connections taken in one call.
const ACCEPTS: usize = 16;

/// How long the endpoint waits when the system has no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// What is to become of a guest.
enum Admission {
    Answer,
    Wait,
    Refuse(Status),
}

impl TcpTransport {
    /// Starts to connect one path.
    pub(super) fn dial(&mut self, id: LinkId, number: u16, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let peer = link.introduction.peer;
        let port = link.introduction.source_ports.get(usize::from(number)).copied().unwrap_or(0);
        let same_family = self.config.listen.is_ipv4() == peer.is_ipv4();
        let address = if same_family { self.config.listen.ip() } else { unspecified(&peer) };
        let local = (port != 0 || !address.is_unspecified()).then(|| SocketAddr::new(address, port));
        let config = &self.config;
        let dial = Dial::start(&link.introduction, number, local, &|socket| tune(socket, config));
        let outcome = match dial {
            Ok(mut dial) => match self.poll.add(&dial.socket, Token::Path(id, number)) {
                Ok(()) => {
                    let outcome = dial.advance(&link.introduction, false);
                    if let Some(slot) = link.slots.get_mut(usize::from(number))
                        && let Slot::Retry(_, pause) = slot
                    {
                        *slot = Slot::Dialling(Box::new(dial), *pause);
                    }
                    outcome
                }
                Err(error) => DialProgress::Retry(DownReason::Connect(format!("epoll: {error}"))),
            },
            Err(outcome) => outcome,
        };
        self.dialled(id, number, outcome, sink);
    }

    /// Takes note of how far a dial has come.
    pub(super) fn dialled(
        &mut self,
        id: LinkId,
        number: u16,
        outcome: DialProgress,
        sink: &mut dyn FnMut(LinkId, Event<'_>),
    ) {
        let Some(link) = self.links.get_mut(&id) else { return };
        match outcome {
            DialProgress::Waiting => {}
            DialProgress::Fatal(reason) => self.down(id, reason, sink),
            DialProgress::Retry(reason) => {
                link.lose(number, Instant::now(), Some(reason));
                self.rearm = true;
            }
            DialProgress::Done => {
                if let Some(slot) = link.slots.get_mut(usize::from(number))
                    && let Slot::Dialling(..) = slot
                    && let Slot::Dialling(dial, _) = std::mem::replace(slot, Slot::Absent)
                {
                    self.install(id, number, dial.socket, sink);
                }
            }
        }
    }

    /// An authenticated connection becomes the path; with the last the link is up.
    fn install(&mut self, id: LinkId, number: u16, socket: Socket, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let path = Path::new(socket, self.config.queue_frames, self.config.read_buffer);
        if let Some(slot) = link.slots.get_mut(usize::from(number)) {
            *slot = Slot::Ready(Box::new(path));
        }
        if !link.is_complete() {
            return;
        }
        link.up = true;
        link.trouble = None;
        if link.rate.is_some() {
            link.pace();
        }
        let (paths, now) = (link.slots.len() as u16, Instant::now());
        // While one was being made, nobody spoke on the others.
        link.paths().for_each(|(_, path)| path.begin(now));
        self.liveness.get_or_insert_with(|| LivenessTimer::begin(now, &self.config));
        self.rearm = true;
        sink(id, Event::Up);
        (0..paths).for_each(|number| self.enqueue(id, number));
    }

    /// Takes connections in, a bounded number.
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
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
            if socket.set_nonblocking(true).is_ok() && socket.set_tcp_nodelay(true).is_ok() {
                self.admit(socket);
            }
        }
    }

    /// Gives a connection a place among the guests, if need be that of the one who has been there longest.
    fn admit(&mut self, socket: Socket) {
        let free = self.incoming.iter().position(Option::is_none);
        let oldest =
            || (0..self.incoming.len()).min_by_key(|at| self.incoming.get(*at)?.as_ref().map(|g| g.serial));
        let Some(at) = free.or_else(oldest) else { return };
        let serial = self.next_serial;
        self.next_serial += 1;
        if self.poll.add(socket.as_fd(), Token::Incoming(at as u16, serial)).is_err() {
            return;
        }
        let deadline = Instant::now() + self.config.handshake_timeout;
        if let Some(slot) = self.incoming.get_mut(at) {
            *slot = Some(Incoming::new(socket, serial, deadline));
        }
        self.poll.no_later_than(deadline);
    }

    /// A guest has said something, or gone.
    pub(super) fn handle_incoming(&mut self, at: u16, serial: u64, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        let Some(slot) = self.incoming.get_mut(usize::from(at)) else { return };
        let Some(guest) = slot.as_mut().filter(|guest| guest.serial == serial) else { return };
        match guest.advance() {
            IncomingProgress::Waiting => {}
            IncomingProgress::Gone => *slot = None,
            IncomingProgress::Named(hello) => {
                let link = self.names.get(&hello.name).and_then(|id| self.links.get_mut(id));
                admit_named(slot, &hello, link);
            }
            IncomingProgress::Proved(hello, proof, nonce) => {
                if let Some(guest) = slot.take() {
                    self.promote(guest, &hello, &proof, &nonce, sink);
                }
            }
        }
    }

    /// A guest has sent its proof: it becomes a path or is refused.
    fn promote(
        &mut self,
        guest: Incoming,
        hello: &Hello,
        proof: &Proof,
        nonce: &[u8; 32],
        sink: &mut dyn FnMut(LinkId, Event<'_>),
    ) {
        let Some(&id) = self.names.get(&hello.name) else { return guest.refuse(Status::UnknownName) };
        let Some(link) = self.links.get_mut(&id) else { return };
        if let Admission::Refuse(status) = judge(hello, Some(link)) {
            return guest.refuse(status);
        }
        if !proof.proves(&link.introduction.secret, hello, nonce) {
            let peer = guest.socket.peer_addr().ok().and_then(|peer| peer.as_socket());
            tracing::warn!(?peer, link = id.0, "a connection with a wrong secret was refused");
            link.trouble = Some(DownReason::Refused(Status::Secret.describe(0)));
            return guest.refuse(Status::Secret);
        }
        let number = hello.path.get();
        let ready = self.poll.rename(&guest.socket, Token::Path(id, number));
        if ready.is_ok() && guest.welcome().is_ok() {
            self.install(id, number, guest.socket, sink);
        }
    }

    /// A link was opened: those who wait for it are answered.
    pub(super) fn answer_waiting(&mut self, name: &[u8; 16]) {
        let Some(id) = self.names.get(name).copied() else { return };
        for slot in &mut self.incoming {
            let hello = slot.as_ref().and_then(|guest| guest.waits_for().copied());
            if let Some(hello) = hello.filter(|hello| hello.name == *name) {
                admit_named(slot, &hello, self.links.get_mut(&id));
            }
        }
    }
}

fn unspecified(peer: &SocketAddr) -> std::net::IpAddr {
    match peer {
        SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Whether a connection may become a path of the link that it names.
fn judge(hello: &Hello, link: Option<&Link>) -> Admission {
    let Some(link) = link else { return Admission::Wait };
    let paths = link.slots.len();
    if link.introduction.initiate {
        Admission::Refuse(Status::UnknownName)
    } else if link.up {
        Admission::Refuse(Status::Up)
    } else if usize::from(hello.paths.get()) != paths || usize::from(hello.path.get()) >= paths {
        Admission::Refuse(Status::Paths)
    } else {
        Admission::Answer
    }
}

/// Answers, refuses or keeps a guest that has named its link.
fn admit_named(slot: &mut Option<Incoming>, hello: &Hello, link: Option<&mut Link>) {
    let Some(guest) = slot else { return };
    match judge(hello, link.as_deref()) {
        Admission::Wait => return,
        Admission::Refuse(status) => {
            if let (Status::Paths, Some(link)) = (status, link) {
                link.trouble = Some(DownReason::Refused(status.describe(0)));
            }
            guest.refuse(status);
        }
        Admission::Answer => {
            if let Some(link) = link
                && guest.answer(hello, &link.introduction.secret).is_ok()
            {
                return;
            }
        }
    }
    *slot = None;
}
