//! Links that are handed over to another process's endpoint. Each path is at the end of a frame, with nothing left to
//! send.

use super::link::{Link, Slot};
use super::liveness::LivenessTimer;
use super::path::Path;
use super::poll::Token;
use super::records::Records;
use super::{Config, TcpTransport, tune};
use crate::{Introduction, LinkHandOverError, LinkId, TrafficClass};
use serde::{Deserialize, Serialize};
use socket2::Socket;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

#[derive(Serialize, Deserialize)]
struct LinkImage {
    id: LinkId,
    name: [u8; 16],
    secret: [u8; 32],
    peer: SocketAddr,
    initiate: bool,
    source_ports: Vec<u16>,
    rate: Option<u64>,
    class: TrafficClass,
    paths: Vec<PathImage>,
}

/// A path, but for its connection.
#[derive(Serialize, Deserialize)]
pub(super) struct PathImage {
    /// What was read and not given on.
    pub(super) plain: Vec<u8>,
    pub(super) records: Option<RecordsImage>,
}

/// Both directions of a protected path.
#[derive(Serialize, Deserialize)]
pub(super) struct RecordsImage {
    /// What the keys come from, beside the link's secret.
    pub(super) salt: Vec<u8>,
    /// The numbers of the next record to seal, and to open.
    pub(super) next: (u64, u64),
    /// Verified and not given on, then not looked at yet.
    pub(super) opened: Vec<u8>,
    pub(super) unopened: Vec<u8>,
}

impl TcpTransport {
    pub(super) fn set_frozen(&mut self, frozen: bool) {
        self.frozen = frozen;
        let mut paths = Vec::new();
        for (id, link) in &mut self.links {
            for (number, path) in link.paths() {
                path.freeze(frozen);
                paths.push((*id, number));
            }
        }
        if !frozen {
            paths.into_iter().for_each(|(id, number)| self.enqueue(id, number));
        }
    }

    pub(super) fn rests(&mut self) -> bool {
        self.links
            .values_mut()
            .all(|link| link.up && link.ending.is_none() && link.paths().all(|(_, path)| path.rests()))
    }

    pub(super) fn image(&self) -> Result<(Vec<u8>, Vec<OwnedFd>), LinkHandOverError> {
        let (mut links, mut descriptors) = (Vec::new(), Vec::new());
        for (id, link) in &self.links {
            let mut paths = Vec::new();
            for slot in &link.slots {
                let Slot::Ready(path) = slot else { return Err(LinkHandOverError::NotUp) };
                descriptors.push(path.socket().as_fd().try_clone_to_owned()?);
                paths.push(path.image());
            }
            let Introduction { name, secret, peer, initiate, source_ports, over_tcp: _ } =
                link.introduction.clone();
            let (rate, class) = (link.rate, link.class);
            let id = *id;
            links.push(LinkImage { id, name, secret, peer, initiate, source_ports, rate, class, paths });
        }
        Ok((postcard::to_allocvec(&links)?, descriptors))
    }

    pub(super) fn inherit(
        &mut self,
        links: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), LinkHandOverError> {
        let links: Vec<LinkImage> = postcard::from_bytes(links)?;
        let mut descriptors = descriptors.into_iter();
        let now = Instant::now();
        self.frozen = true;
        for LinkImage { id, name, secret, peer, initiate, source_ports, rate, class, paths } in links {
            let over_tcp = true;
            let introduction = Introduction { name, secret, peer, initiate, source_ports, over_tcp };
            let expected = self.acceptor.expect(&introduction, self.config.protection, &self.arrivals)?;
            expected.set_up();
            let mut link = Link::new(introduction, expected, now, self.config.connect_timeout);
            (link.up, link.rate, link.class) = (true, rate, class);
            for (number, image) in (0..).zip(paths) {
                let socket = Socket::from(descriptors.next().ok_or(LinkHandOverError::NoConnection)?);
                let other = self.host_congestion.other(&socket);
                tune(&socket, &self.config)?;
                // What control chose stays, which the image does not say.
                if other.is_some() && self.host_congestion.apply(&socket, other, &peer) {
                    link.congestion = other;
                }
                self.poll.add(&socket, Token::Path(id, number))?;
                let records = image.records.as_ref().map(|records| {
                    Records::resume(self.config.protection, initiate, &secret, records)
                        .ok_or(LinkHandOverError::NoKeys)
                });
                let records = records.transpose()?;
                let Config { queue_frames, read_buffer, .. } = self.config;
                let mut path = Path::new(socket, queue_frames, read_buffer, records, self.sender.is_some());
                path.resume(&image.plain).ok_or(LinkHandOverError::ReadAhead)?;
                path.begin(now);
                path.freeze(true);
                self.acceptor.beat(&path.pulse);
                let slot = link.slots.get_mut(usize::from(number)).ok_or(LinkHandOverError::TooManyPaths)?;
                *slot = Slot::Ready(Box::new(path));
            }
            if !link.is_complete() {
                return Err(LinkHandOverError::TooFewPaths);
            }
            self.next_link = self.next_link.max(id.0 + 1);
            self.names.insert(name, id);
            self.links.insert(id, link);
        }
        self.liveness.get_or_insert_with(|| LivenessTimer::begin(now, &self.config));
        self.rearm = true;
        Ok(())
    }
}
