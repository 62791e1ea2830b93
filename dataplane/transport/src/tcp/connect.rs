//! From introductions to authenticated paths: dialling, and taking those who dialled.

use super::dial::{Dial, DialProgress};
use super::handshake::Status;
use super::link::Slot;
use super::liveness::LivenessTimer;
use super::path::Path;
use super::poll::Token;
use super::records::Records;
use super::{Config, TcpTransport, tune};
use crate::{DownReason, Event, LinkId};
use socket2::Socket;
use std::cell::Cell;
use std::net::SocketAddr;
use std::time::Instant;

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
        let (host, choice, taken) = (&self.host_congestion, link.congestion, Cell::new(true));
        let prepare = |socket: &Socket| {
            tune(socket, config)?;
            // Before it connects: a control that needs ECN agrees on it with the first packet.
            taken.set(choice.is_none() || host.apply(socket, choice, &peer));
            Ok(())
        };
        let dial = Dial::start(&link.introduction, number, config.protection, local, &prepare);
        link.congestion = choice.filter(|_| taken.get());
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
                    let records = dial.records(&link.introduction.secret);
                    match records.and_then(|records| Ok((dial.into_socket()?, records))) {
                        Ok((socket, records)) => self.install(id, number, socket, records, sink),
                        Err(error) => self.down(id, DownReason::Connect(error.to_string()), sink),
                    }
                }
            }
        }
    }

    /// An authenticated connection becomes the path; with the last the link is up.
    fn install(
        &mut self,
        id: LinkId,
        number: u16,
        socket: Socket,
        records: Option<Records>,
        sink: &mut dyn FnMut(LinkId, Event<'_>),
    ) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let Config { queue_frames, read_buffer, .. } = self.config;
        let mut path = Path::new(socket, queue_frames, read_buffer, records, self.sender.is_some());
        path.freeze(self.frozen);
        if let Some(slot) = link.slots.get_mut(usize::from(number)) {
            *slot = Slot::Ready(Box::new(path));
        }
        if !link.is_complete() {
            return;
        }
        link.up = true;
        link.expected.set_up();
        link.trouble = None;
        if link.rate.is_some() {
            link.pace();
        }
        if link.congestion.is_some() {
            link.control_congestion(&self.host_congestion, link.congestion);
        }
        if let Some(dscp) = self.config.dscp {
            link.mark(dscp.of(link.class));
        }
        let (paths, now) = (link.slots.len() as u16, Instant::now());
        // While one was being made, nobody spoke on the others.
        for (_, path) in link.paths() {
            path.begin(now);
            self.acceptor.beat(&path.pulse);
        }
        self.timed.remove(&id);
        self.liveness.get_or_insert_with(|| LivenessTimer::begin(now, &self.config));
        self.rearm = true;
        sink(id, Event::Up);
        (0..paths).for_each(|number| self.enqueue(id, number));
    }

    /// Connections that have proved an introduction become paths.
    pub(super) fn take_arrivals(&mut self, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        for (guest, hello) in self.arrivals.take() {
            let id = self.names.get(&hello.name).copied();
            let link = id.and_then(|id| Some((id, self.links.get(&id)?)));
            // Since it proved itself the link may have ended, or come up with another of its peer's.
            let (id, number, records) = match link {
                Some((id, link)) if link.accepts(&hello) => {
                    let records = guest.records(self.config.protection, &link.introduction.secret);
                    (id, hello.path.get(), records)
                }
                Some(_) => {
                    guest.refuse(Status::Up);
                    continue;
                }
                None => {
                    guest.refuse(Status::UnknownName);
                    continue;
                }
            };
            if let Ok(records) = records
                && self.poll.add(&guest.socket, Token::Path(id, number)).is_ok()
                && guest.welcome().is_ok()
            {
                self.install(id, number, guest.socket, records, sink);
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
