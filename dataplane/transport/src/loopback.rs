//! Agents in one process: a payload goes from the sender's memory straight into the receiver's slot, or what it posted.

use crate::rings::Rings;
use crate::timer::Timer;
use crate::{
    DownReason, Event, Introduction, Landing, LinkId, LinkRefusal, MAX_HEADER, Ring, SendError, Transport,
};
use harmonaize_abi::Tag;
use harmonaize_shm::Span;
use std::collections::{BTreeMap, VecDeque};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use subtle::ConstantTimeEq;

/// How many frames a path holds before the receiver has taken them.
const QUEUE_FRAMES: usize = 128;

/// Where the endpoints of one process meet.
#[derive(Clone, Debug)]
pub struct Hub {
    fabric: Arc<Mutex<Fabric>>,
    connect_timeout: Duration,
}

impl Default for Hub {
    fn default() -> Self {
        Self::new()
    }
}

impl Hub {
    /// A hub with no endpoints, whose links have 5 s to come up.
    pub fn new() -> Self {
        Self::with_timeout(Duration::from_secs(5))
    }

    /// As [`Hub::new`], with another time for a link to come up.
    pub fn with_timeout(connect_timeout: Duration) -> Self {
        let fabric = Fabric { endpoints: Vec::new(), ends: BTreeMap::new(), next_link: 1 };
        Self { fabric: Arc::new(Mutex::new(fabric)), connect_timeout }
    }

    /// A new endpoint; at most 65,535 over the hub's life.
    pub fn endpoint(&self) -> std::io::Result<Loopback> {
        let timer = Arc::new(Timer::new()?);
        let mut fabric = lock(&self.fabric);
        let endpoint = fabric.endpoints.len();
        let port = u16::try_from(endpoint + 1).map_err(|_| std::io::Error::other("too many endpoints"))?;
        fabric.endpoints.push(Endpoint { timer: Arc::clone(&timer), awake: false });
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let hub = self.clone();
        let frame = Frame { header: [0; MAX_HEADER], header_bytes: 0, path: 0, payload: None, posted: false };
        Ok(Loopback { hub, endpoint, address, timer, links: Vec::new(), next: 0, waiting: 0, frame })
    }
}

/// What all endpoints share.
#[derive(Debug)]
struct Fabric {
    endpoints: Vec<Endpoint>,
    ends: BTreeMap<LinkId, End>,
    next_link: u64,
}

#[derive(Debug)]
struct Endpoint {
    timer: Arc<Timer>,
    /// Whether the timer was set to fire since the endpoint last looked.
    awake: bool,
}

/// One end of a link.
#[derive(Debug)]
struct End {
    endpoint: usize,
    introduction: Introduction,
    deadline: Instant,
    /// The other end, once they have met.
    peer: Option<LinkId>,
    /// Whether `Up` is still to be reported.
    rising: bool,
    refused: bool,
    rings: Rings,
    inbox: VecDeque<Frame>,
    /// Frames in `inbox` by path.
    queued: Vec<usize>,
    sent: VecDeque<Tag>,
    down: Option<DownReason>,
}

#[derive(Debug)]
struct Frame {
    header: [u8; MAX_HEADER],
    header_bytes: usize,
    path: u16,
    payload: Option<(Landing, u32)>,
    posted: bool,
}

/// What a link has to report next.
enum Next {
    Up,
    Sent(Tag),
    Frame,
    Down(DownReason),
}

fn lock(fabric: &Mutex<Fabric>) -> MutexGuard<'_, Fabric> {
    fabric.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fabric {
    fn wake(&mut self, link: LinkId) {
        let Some(endpoint) = self.ends.get(&link).map(|end| end.endpoint) else { return };
        if let Some(endpoint) = self.endpoints.get_mut(endpoint)
            && !std::mem::replace(&mut endpoint.awake, true)
        {
            endpoint.timer.set(Some(Duration::ZERO));
        }
    }

    fn end_with(&mut self, link: LinkId, reason: DownReason) {
        if let Some(end) = self.ends.get_mut(&link)
            && end.down.is_none()
        {
            end.down = Some(reason);
            self.wake(link);
        }
    }

    /// Joins a new end to the one that waits for it, if there is one.
    fn meet(&mut self, link: LinkId) {
        let Some(new) = self.ends.get(&link) else { return };
        let other = self.ends.iter().find(|(_, end)| {
            end.introduction.name == new.introduction.name
                && end.introduction.initiate != new.introduction.initiate
                && end.peer.is_none()
                && end.down.is_none()
                && {
                    let (from, to) = if new.introduction.initiate { (new, *end) } else { (*end, new) };
                    from.introduction.peer.port() as usize == to.endpoint + 1
                }
        });
        let Some((&other, found)) = other else { return };
        let same = bool::from(found.introduction.secret.ct_eq(&new.introduction.secret));
        let paths = found.introduction.source_ports.len() == new.introduction.source_ports.len();
        let (initiator, acceptor) = if new.introduction.initiate { (link, other) } else { (other, link) };
        if !same || !paths {
            let why = if same { LinkRefusal::PathsDiffer } else { LinkRefusal::Secret };
            self.end_with(initiator, DownReason::Refused(why));
            if let Some(end) = self.ends.get_mut(&acceptor) {
                end.refused = true;
            }
            return;
        }
        for (end, peer) in [(link, other), (other, link)] {
            if let Some(end) = self.ends.get_mut(&end) {
                end.peer = Some(peer);
                end.rising = true;
            }
            self.wake(end);
        }
    }

    fn send(
        &mut self,
        link: LinkId,
        path: u16,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) -> Result<(), SendError> {
        let end = self.ends.get(&link).ok_or(SendError::Down)?;
        let (Some(peer), false, None) = (end.peer, end.rising, &end.down) else {
            return Err(SendError::Down);
        };
        if header.len() > MAX_HEADER || usize::from(path) >= end.queued.len() {
            return Err(SendError::Invalid);
        }
        let bytes = payload.as_ref().map_or(0, |(_, span, _)| span.bytes());
        let bytes = u32::try_from(bytes).map_err(|_| SendError::Invalid)?;
        let full = end.sent.len() >= end.sent.capacity();
        let Some(other) = self.ends.get_mut(&peer) else { return Err(SendError::Down) };
        let Some(queued) = other.queued.get_mut(usize::from(path)) else { return Err(SendError::Invalid) };
        if full || *queued >= QUEUE_FRAMES {
            return Err(SendError::Full);
        }
        let mut frame = Frame {
            header: [0; MAX_HEADER],
            header_bytes: header.len(),
            path,
            payload: payload.as_ref().map(|(landing, _, _)| (*landing, bytes)),
            posted: false,
        };
        if let Some(room) = frame.header.get_mut(..header.len()) {
            room.copy_from_slice(header);
        }
        let mut tag = None;
        if let Some((landing, span, sent)) = payload {
            let posted = other.rings.begin(landing, bytes);
            let slot = match posted.and_then(|posted| Ok((other.rings.slot(landing, bytes)?, posted))) {
                Ok((slot, posted)) => {
                    frame.posted = posted.is_some();
                    posted.as_ref().map_or(slot.pointer(), |posted| posted.view_mut().pointer())
                }
                Err(breach) => {
                    self.end_with(peer, breach);
                    self.end_with(link, DownReason::Closed);
                    return Ok(());
                }
            };
            // SAFETY: both views cover `bytes` bytes of live mappings that no Rust reference covers; they may overlap
            // when both ends use the same memory.
            unsafe { std::ptr::copy(span.view().pointer(), slot, bytes as usize) };
            other.rings.landed(landing);
            tag = Some(sent);
        }
        *queued += 1;
        other.inbox.push_back(frame);
        self.wake(peer);
        if let (Some(tag), Some(end)) = (tag, self.ends.get_mut(&link)) {
            end.sent.push_back(tag);
            self.wake(link);
        }
        Ok(())
    }

    /// What `link` has to report; a frame is moved to `into`.
    fn next(&mut self, link: LinkId, into: &mut Frame, now: Option<Instant>) -> Option<Next> {
        let end = self.ends.get_mut(&link)?;
        if end.peer.is_none() && end.down.is_none() && now.is_some_and(|now| now >= end.deadline) {
            end.down = Some(if end.refused {
                DownReason::Refused(LinkRefusal::Introduction)
            } else {
                DownReason::Connect("the peer did not come in time".into())
            });
        }
        if std::mem::take(&mut end.rising) {
            return Some(Next::Up);
        }
        if let Some(tag) = end.sent.pop_front() {
            return Some(Next::Sent(tag));
        }
        if let Some(frame) = end.inbox.pop_front() {
            if let Some(queued) = end.queued.get_mut(usize::from(frame.path)) {
                *queued -= 1;
            }
            *into = frame;
            return Some(Next::Frame);
        }
        let reason = end.down.clone()?;
        self.remove(link);
        Some(Next::Down(reason))
    }

    fn remove(&mut self, link: LinkId) {
        if let Some(end) = self.ends.remove(&link)
            && let Some(peer) = end.peer
        {
            self.end_with(peer, DownReason::Closed);
        }
    }
}

/// An endpoint in this process.
#[derive(Debug)]
pub struct Loopback {
    hub: Hub,
    endpoint: usize,
    address: SocketAddr,
    timer: Arc<Timer>,
    links: Vec<LinkId>,
    /// Index in `links` to go on with, so that each gets its turn.
    next: usize,
    /// Links that had not met their peer when last looked at.
    waiting: usize,
    frame: Frame,
}

impl Loopback {
    /// Takes back the wake-up before looking, so that what comes while we look wakes again.
    fn begin(&mut self) -> Option<Instant> {
        let mut fabric = lock(&self.hub.fabric);
        if let Some(endpoint) = fabric.endpoints.get_mut(self.endpoint)
            && std::mem::take(&mut endpoint.awake)
        {
            self.timer.set(None);
        }
        (self.waiting > 0).then(Instant::now)
    }

    /// Sets the timer for what is left: `more` at once, else the first deadline of a link that waits.
    fn end(&mut self, more: bool) {
        let mut fabric = lock(&self.hub.fabric);
        if more {
            if let Some(link) = self.links.first() {
                fabric.wake(*link);
            }
            return;
        }
        if self.waiting == 0 {
            return;
        }
        let ends = self.links.iter().filter_map(|link| fabric.ends.get(link));
        let waiting = ends.filter(|end| end.peer.is_none());
        let (count, first) = waiting.fold((0, None::<Instant>), |(count, first), end| {
            (count + 1, Some(first.map_or(end.deadline, |first| first.min(end.deadline))))
        });
        self.waiting = count;
        if let Some(endpoint) = fabric.endpoints.get_mut(self.endpoint)
            && !endpoint.awake
        {
            self.timer.set(first.map(|first| first.saturating_duration_since(Instant::now())));
        }
    }
}

impl Transport for Loopback {
    fn local_address(&self) -> SocketAddr {
        self.address
    }

    fn open(&mut self, introduction: Introduction) -> Result<LinkId, DownReason> {
        let paths = introduction.source_ports.len();
        if paths == 0 || paths > usize::from(crate::MAX_PATHS) {
            return Err(DownReason::Refused(LinkRefusal::Paths(paths)));
        }
        let mut fabric = lock(&self.hub.fabric);
        let twice = fabric
            .ends
            .values()
            .any(|end| end.endpoint == self.endpoint && end.introduction.name == introduction.name);
        if twice {
            return Err(DownReason::Taken);
        }
        let link = LinkId(fabric.next_link);
        fabric.next_link += 1;
        let end = End {
            endpoint: self.endpoint,
            deadline: Instant::now() + self.hub.connect_timeout,
            peer: None,
            rising: false,
            refused: false,
            rings: Rings::default(),
            inbox: VecDeque::with_capacity(paths * QUEUE_FRAMES),
            queued: vec![0; paths],
            sent: VecDeque::with_capacity(paths * QUEUE_FRAMES),
            down: None,
            introduction,
        };
        fabric.ends.insert(link, end);
        self.links.push(link);
        self.waiting += 1;
        fabric.wake(link);
        fabric.meet(link);
        Ok(link)
    }

    fn attach_ring(&mut self, link: LinkId, ring: u16, memory: Ring) -> Result<(), DownReason> {
        match lock(&self.hub.fabric).ends.get_mut(&link) {
            Some(end) => end.rings.attach(ring, memory),
            None => Err(DownReason::Closed),
        }
    }

    fn post(&mut self, link: LinkId, landing: Landing, span: Span) -> bool {
        let mut fabric = lock(&self.hub.fabric);
        fabric.ends.get_mut(&link).is_some_and(|end| end.down.is_none() && end.rings.post(landing, span))
    }

    fn send(
        &mut self,
        link: LinkId,
        path: u16,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) -> Result<(), SendError> {
        lock(&self.hub.fabric).send(link, path, header, payload)
    }

    fn progress(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        let now = self.begin();
        let mut done = 0;
        let mut idle = 0;
        while done < budget && idle < self.links.len() {
            self.next = if self.next < self.links.len() { self.next } else { 0 };
            let Some(&link) = self.links.get(self.next) else { break };
            // The lock is not held while the sink runs: it may drive another endpoint of the hub.
            let next = lock(&self.hub.fabric).next(link, &mut self.frame, now);
            let Some(next) = next else {
                idle += 1;
                self.next += 1;
                continue;
            };
            idle = 0;
            done += 1;
            self.next += 1;
            match next {
                Next::Up => sink(link, Event::Up),
                Next::Sent(tag) => sink(link, Event::Sent { tag }),
                Next::Frame => {
                    let header = self.frame.header.get(..self.frame.header_bytes).unwrap_or_default();
                    sink(
                        link,
                        Event::Received { header, payload: self.frame.payload, posted: self.frame.posted },
                    );
                }
                Next::Down(reason) => {
                    self.next -= 1;
                    self.links.remove(self.next);
                    sink(link, Event::Down { reason });
                }
            }
        }
        self.end(done >= budget);
        done
    }

    fn close(&mut self, link: LinkId) {
        if let Some(at) = self.links.iter().position(|&known| known == link) {
            self.links.remove(at);
            lock(&self.hub.fabric).remove(link);
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.timer.as_fd())
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        for link in std::mem::take(&mut self.links) {
            lock(&self.hub.fabric).remove(link);
        }
    }
}
