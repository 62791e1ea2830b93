//! A link while it comes up and while it is up. It has what was exchanged, what is known of the peer, and its paths.

use super::delays::Delay;
use super::exchange::{Control, PathEnd, RingEnd};
use super::path::{Fault, Outlet, Path};
use super::rail::Rail;
use crate::rings::Rings;
use crate::{DownReason, Event, LinkId, LinkRefusal};
use std::collections::VecDeque;
use std::time::Instant;

/// How far a link has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The TCP link is not up.
    Waiting,
    /// Parameters are on their way.
    Exchanging,
    /// Frames flow.
    Up,
}

/// One link.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) id: LinkId,
    pub(super) stage: Stage,
    /// Whose it is, by the agent's number; none where nobody has said so.
    pub(super) tenant: Option<u32>,
    /// One per path.
    source_ports: Vec<u16>,
    /// Slots of each of our mailboxes.
    slots: u32,
    pub(super) queue_frames: usize,
    pub(super) paths: Vec<Path>,
    /// The peer's devices and slots, once it has said so.
    hello: Option<(u16, u32)>,
    ends: Vec<Option<PathEnd>>,
    /// We are ready, the peer is.
    ready: (bool, bool),
    pub(super) rings: Rings,
    pub(super) peer_rings: Vec<RingEnd>,
    /// Frames of the exchange that the TCP link has not taken yet.
    pub(super) outgoing: VecDeque<Vec<u8>>,
    /// While not up: when it has to be.
    pub(super) deadline: Option<Instant>,
    /// The network failed: when to say so, unless the TCP link knows better before.
    pub(super) failing: Option<(Instant, DownReason)>,
}

/// What a frame of the exchange brought about.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Nothing to tell.
    Idle,
    /// The paths have been made: their descriptors are to be watched.
    Paths,
    /// The link is up.
    Up,
}

impl Link {
    pub(super) fn new(
        id: LinkId,
        source_ports: Vec<u16>,
        rails: usize,
        slots: u32,
        queue_frames: usize,
    ) -> Self {
        let mut link = Self {
            id,
            stage: Stage::Waiting,
            slots,
            queue_frames,
            paths: Vec::with_capacity(source_ports.len()),
            hello: None,
            ends: vec![None; source_ports.len()],
            ready: (false, false),
            rings: Rings::default(),
            peer_rings: Vec::new(),
            outgoing: VecDeque::new(),
            deadline: None,
            failing: None,
            source_ports,
            tenant: None,
        };
        let paths = link.source_ports.len() as u16;
        link.queue_control(&Control::Hello { paths, rails: rails as u16, slots });
        link
    }

    /// Says whose link it is, as long as nothing has been made for it.
    pub(super) fn set_tenant(&mut self, tenant: u32) {
        if self.hello.is_none() && self.rings.is_empty() {
            self.tenant = Some(tenant);
        }
    }

    /// Queues a frame of the exchange.
    pub(super) fn queue_control(&mut self, frame: &Control<'_>) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.outgoing.push_back(bytes);
    }

    pub(super) fn flows(&self) -> bool {
        self.stage == Stage::Up && self.failing.is_none()
    }

    /// Does what a frame of the exchange asks for.
    pub(super) fn handle_control(
        &mut self,
        frame: &[u8],
        rails: &mut [Rail],
        sink: &mut dyn FnMut(Event<'_>),
    ) -> Result<Outcome, DownReason> {
        match (Control::decode(frame)?, self.hello) {
            (Control::Refuse(why), _) => Err(DownReason::Refused(LinkRefusal::ByPeer(why.to_owned()))),
            (Control::Hello { paths, rails: theirs, slots }, None) => {
                self.greeted(paths, theirs, slots, rails)?;
                Ok(Outcome::Paths)
            }
            (Control::Path(end), Some((_, slots))) if !self.ready.0 => {
                let known = self.ends.get_mut(usize::from(end.number)).filter(|known| known.is_none());
                *known.ok_or_else(|| unexpected("path", end.number))? = Some(end);
                if self.ends.iter().all(Option::is_some) {
                    self.connect(slots)?;
                }
                Ok(self.outcome())
            }
            (Control::Ready, Some(_)) if !self.ready.1 => {
                self.ready.1 = true;
                Ok(self.outcome())
            }
            (Control::Ring(ring), Some((theirs, _))) => {
                let number = ring.number;
                if ring.places.len() != usize::from(theirs) {
                    return Err(unexpected("places of ring", number));
                }
                match self.peer_rings.binary_search_by_key(&number, |ring| ring.number) {
                    Ok(_) => return Err(unexpected("ring", number)),
                    Err(at) => self.peer_rings.insert(at, ring),
                }
                self.paths.iter_mut().for_each(Path::ring_announced);
                Ok(Outcome::Idle)
            }
            (Control::Want { landing, bytes }, Some(_)) => {
                self.rings.slot(landing, bytes)?;
                Ok(Outcome::Idle)
            }
            (Control::Piece { path, message, total, offset, bytes }, Some(_)) if self.stage == Stage::Up => {
                let Self { paths, rings, .. } = self;
                let path = paths.get_mut(usize::from(path)).ok_or_else(|| unexpected("path", path))?;
                path.drain(rings, sink);
                if let Some(header) = path.handle_piece(message, total, offset, bytes)? {
                    sink(received(&header));
                }
                Ok(Outcome::Idle)
            }
            (frame, _) => {
                let stage = self.stage;
                Err(DownReason::Protocol(format!("{frame:?} while {stage:?} in the exchange")))
            }
        }
    }

    /// Lets every path take what came and send what may go; says how much that was, and which path failed.
    pub(super) fn work(
        &mut self,
        rails: &mut [Rail],
        budget: usize,
        (inline_payload, timed): (usize, bool),
        sink: &mut dyn FnMut(Event<'_>),
    ) -> Result<usize, (usize, Fault)> {
        let share = (budget / self.paths.len().max(1)).max(1);
        let mut done = 0;
        for number in 0..self.paths.len() {
            let Self { paths, rings, peer_rings, .. } = self;
            let Some(path) = paths.get_mut(number) else { break };
            let mut want = None;
            let mut outlet = Outlet { rails, rings: peer_rings, want: &mut want, inline_payload, timed };
            let fault = |fault| (number, fault);
            // What is ready to go does not wait until what came has been looked at.
            if path.has_batch() {
                done += path.flush(&mut outlet, sink).map_err(fault)?;
            }
            done += path.poll(share, rings, sink).map_err(fault)?;
            if let Some(Delay { took, bytes }) = path.take_delay() {
                sink(Event::Completed { path: number as u16, took, bytes });
            }
            done += path.flush(&mut outlet, sink).map_err(fault)?;
            if let Some((landing, bytes)) = want {
                self.queue_control(&Control::Want { landing, bytes });
                done += 1;
            }
        }
        Ok(done)
    }

    /// The peer said what it expects: makes the paths.
    fn greeted(&mut self, paths: u16, theirs: u16, slots: u32, rails: &mut [Rail]) -> Result<(), DownReason> {
        let ours = self.source_ports.len();
        if usize::from(paths) != ours {
            return Err(DownReason::Refused(LinkRefusal::PathCounts { theirs: paths, ours }));
        }
        self.hello = Some((theirs, slots));
        let spread = rails.len().min(usize::from(theirs)).max(1);
        let ports = std::mem::take(&mut self.source_ports);
        for (number, port) in (0_u16..).zip(&ports) {
            let at = usize::from(number) % spread;
            let rail = rails.get_mut(at).ok_or_else(|| DownReason::Connect("no device".into()))?;
            let made = (self.tenant, self.slots, self.queue_frames);
            let (path, end) = Path::create(rail, at, made, *port, number)
                .map_err(|error| DownReason::Connect(format!("path {number}: {error}")))?;
            self.paths.push(path);
            self.queue_control(&Control::Path(end));
        }
        Ok(())
    }

    fn connect(&mut self, slots: u32) -> Result<(), DownReason> {
        for (path, end) in self.paths.iter_mut().zip(self.ends.iter().flatten()) {
            path.connect(end, slots)?;
        }
        self.ready.0 = true;
        self.queue_control(&Control::Ready);
        Ok(())
    }

    fn outcome(&mut self) -> Outcome {
        if self.ready != (true, true) {
            return Outcome::Idle;
        }
        self.stage = Stage::Up;
        self.deadline = None;
        Outcome::Up
    }
}

/// A frame without payload.
pub(super) fn received(header: &[u8]) -> Event<'_> {
    Event::Received { header, payload: None, posted: false }
}

fn unexpected(what: &str, number: u16) -> DownReason {
    DownReason::Protocol(format!("{what} {number} in the exchange: unknown, or twice"))
}
