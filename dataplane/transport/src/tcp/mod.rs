//! Agents over TCP: a connection per path, non-blocking, driven by one epoll set.
//!
//! A connection is authenticated by both ends before it carries a frame (`handshake`), and protected from then on as the operator
//! chose (`records`). An [`Acceptor`] takes connections in, for any
//! number of endpoints that share its address, on a thread of its own. Frames are gathered into one system
//! call, payloads straight from the memory that they lie in; what arrives goes straight into its slot where it is large. On a
//! protected connection both pass through a buffer of records, and are hashed by the pass that copies them.
//! A path that is silent for the peer's time-out has lost its peer: each end gives a sign of life when it has nothing else
//! to say, because the kernel alone notices a vanished host only while data is on its way. The acceptor's thread gives them
//! (`pulse`), so that no work of the endpoint's holds them up.
//!
//! What a large operation sends may be sealed and written by a thread beside the endpoint's (`sender`).

mod acceptor;
mod awaited;
mod bell;
mod closing;
mod congestion;
mod connect;
mod dial;
mod frame;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod guests;
mod handshake;
mod inbox;
mod incoming;
mod inherit;
#[cfg(test)]
mod landing;
mod link;
mod liveness;
mod outbox;
mod path;
mod poll;
mod pulse;
mod records;
mod refusal;
#[cfg(test)]
mod released;
mod sender;
mod shares;
mod sys;

use crate::{
    DownReason, Event, Flow, Introduction, Landing, LinkHandOverError, LinkId, MAX_PATHS, Owner, Ring,
    SendError, TrafficClass, Transport, Uplink,
};

pub use acceptor::Acceptor;
pub use awaited::Rejected;
pub use records::LinkProtection;
pub use refusal::LinkRefusal;

use awaited::Arrivals;
use closing::{Closing, let_go};
use congestion::HostCongestion;
use harmonaize_abi::{CongestionControl, Tag};
use harmonaize_shm::Span;
use link::{Link, Slot};
use liveness::LivenessTimer;
use poll::{Poll, Ready, Token};
use sender::SenderThread;
use shares::Shares;
use socket2::Socket;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// After the peer closed one path of a link, the others have this long to deliver what it still said.
const ENDING: Duration = Duration::from_millis(200);

/// How long last words may take to get out.
const LINGER: Duration = Duration::from_secs(1);

/// Most closed connections that linger; beyond, the oldest whose last words are out is cut off.
const MAX_CLOSING: usize = 256;

/// Between two looks for signs of life at most: a peer's time-out may be shorter than this end's.
const LONGEST_TICK: Duration = Duration::from_millis(500);

/// How an endpoint is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen; port 0 for any. Connections are made from the same address, unless it is unspecified.
    pub listen: SocketAddr,
    /// How frames are protected; the same at both ends.
    pub protection: LinkProtection,
    /// How long a link may take to come up.
    pub connect_timeout: Duration,
    /// How long a peer may be silent before it counts as gone, at least 100 ms.
    pub peer_timeout: Duration,
    /// How long an unauthenticated peer may take to name itself. A connection whose link is not open here yet may wait
    /// so long, too.
    pub handshake_timeout: Duration,
    /// Most connections that are not authenticated yet. Beyond, the oldest of the address that has most of them is cut
    /// off.
    pub max_incoming: u16,
    /// Most of them from one address; beyond, its oldest is cut off.
    pub max_incoming_per_peer: u16,
    /// TCP congestion control by name, else the system's.
    pub congestion: Option<String>,
    /// Size of the kernel's send buffer in bytes, else as the kernel sees fit.
    pub send_buffer: Option<usize>,
    /// Size of the kernel's receive buffer in bytes, else as the kernel sees fit.
    pub receive_buffer: Option<usize>,
    /// Most bytes that the kernel takes in before they can be sent (TCP_NOTSENT_LOWAT), else as many as fit.
    pub unsent: Option<u32>,
    /// Most frames that a path queues; 528 bytes are set aside for each.
    pub queue_frames: usize,
    /// Bytes of a path's buffer for heads and small payloads. A protected path has two more of 64 KiB.
    pub read_buffer: usize,
    /// Bytes queued on a path from which another thread than the endpoint's seals and writes them. None without such a
    /// thread.
    pub sender_bytes: Option<usize>,
    /// The host's port, where tenants share it.
    pub uplink: Option<Arc<Uplink>>,
    /// How packets are marked by what their link carries, else not at all.
    pub dscp: Option<Dscp>,
}

impl Config {
    /// The usual settings.
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            protection: LinkProtection::Authenticated,
            connect_timeout: Duration::from_secs(10),
            peer_timeout: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(2),
            max_incoming: 1024,
            max_incoming_per_peer: 128,
            congestion: None,
            send_buffer: None,
            receive_buffer: None,
            unsent: None,
            queue_frames: 128,
            read_buffer: 64 << 10,
            sender_bytes: None,
            uplink: None,
            dscp: None,
        }
    }

    /// How often links are looked at for signs of life.
    fn tick(&self) -> Duration {
        (self.peer_timeout / 10).clamp(Duration::from_millis(10), LONGEST_TICK)
    }

    /// With how long a silence a peer is gone: two ticks less than its time, for who looks late.
    fn silence_limit(&self) -> Duration {
        self.peer_timeout.saturating_sub(2 * self.tick())
    }
}

/// Code points of differentiated services (RFC 2474), each from 0 to 63, by class as in [`TrafficClass::ALL`]. A link's signs of
/// life and acknowledgements carry what its frames do. Queue pairs carry that of [`TrafficClass::Normal`], whatever goes through them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dscp(pub [u8; TrafficClass::ALL.len()]);

impl Dscp {
    /// Returns the code point of a class.
    pub fn of(&self, class: TrafficClass) -> u8 {
        self.0.get(class as usize).copied().unwrap_or(0)
    }
}

/// An endpoint over TCP.
#[derive(Debug)]
pub struct TcpTransport {
    config: Config,
    host_congestion: HostCongestion,
    acceptor: Acceptor,
    /// Connections that the acceptor has for this endpoint.
    arrivals: Arc<Arrivals>,
    poll: Poll,
    links: BTreeMap<LinkId, Link>,
    /// Those that have a time of their own: they are not up yet, or about to end.
    timed: BTreeSet<LinkId>,
    names: HashMap<[u8; 16], LinkId>,
    closing: VecDeque<Closing>,
    /// Paths with something to do, each once at most.
    queue: VecDeque<(LinkId, u16)>,
    shares: Option<Shares>,
    sender: Option<SenderThread>,
    next_link: u64,
    next_serial: u64,
    /// Looks for signs of life, while any link is up.
    liveness: Option<LivenessTimer>,
    /// A deadline may have changed.
    rearm: bool,
    /// Whether no path begins to read another frame.
    frozen: bool,
}

impl TcpTransport {
    /// An endpoint with an address of its own; see [`Acceptor::bind`].
    pub fn bind(config: Config) -> io::Result<Self> {
        Self::accepting(&Acceptor::bind(&config)?, config)
    }

    /// An endpoint that shares an address with others: who comes there goes to the one that waits for its link.
    pub fn accepting(acceptor: &Acceptor, config: Config) -> io::Result<Self> {
        let arrivals = Arc::new(Arrivals::new()?);
        let poll = Poll::new()?;
        poll.add_bell(arrivals.bell())?;
        let shares = config.uplink.clone().map(Shares::new);
        let sender = config.sender_bytes.map(|least| SenderThread::start(least, &arrivals)).transpose()?;
        Ok(Self {
            host_congestion: HostCongestion::new(&config)?,
            config,
            shares,
            sender,
            acceptor: acceptor.clone(),
            arrivals,
            poll,
            links: BTreeMap::new(),
            timed: BTreeSet::new(),
            names: HashMap::new(),
            closing: VecDeque::new(),
            queue: VecDeque::new(),
            next_link: 1,
            next_serial: 1,
            liveness: None,
            rearm: false,
            frozen: false,
        })
    }

    /// How many links there are, up or not.
    pub(crate) fn link_count(&self) -> usize {
        self.links.len()
    }

    /// Works off the queue of paths, each a bounded piece at a time.
    fn work(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        let mut done = 0;
        while done < budget {
            let Some((id, number)) = self.queue.pop_front() else { break };
            done += self.serve(id, number, budget - done, sink);
        }
        done
    }

    fn serve(
        &mut self,
        id: LinkId,
        number: u16,
        budget: usize,
        sink: &mut dyn FnMut(LinkId, Event<'_>),
    ) -> usize {
        let Some(link) = self.links.get_mut(&id) else { return 0 };
        let Some(Slot::Ready(path)) = link.slots.get_mut(usize::from(number)) else { return 0 };
        path.in_queue = false;
        if let Some(sender) = &mut self.sender {
            sender.consider(id, number, path, link.share.owner);
        }
        match path.work(&mut link.rings, budget, &mut |event| sink(id, event)) {
            Err(reason) => {
                self.down(id, reason, sink);
                1
            }
            Ok(done) => {
                if path.has_work() {
                    path.in_queue = true;
                    self.queue.push_back((id, number));
                } else if path.ended {
                    if link.paths().all(|(_, path)| path.ended) {
                        self.down(id, DownReason::Closed, sink);
                    } else if link.ending.is_none() {
                        link.ending = Some(Instant::now() + ENDING);
                        self.timed.insert(id);
                        self.rearm = true;
                    }
                }
                done
            }
        }
    }

    /// Reports what the sender has written.
    fn collect(&mut self, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        let Some(sender) = self.sender.as_mut() else { return 0 };
        if !sender.has_news() {
            return 0;
        }
        let mut done = 0;
        let (links, queue) = (&mut self.links, &mut self.queue);
        sender.lent().retain(|&(id, number)| {
            let Some(path) = links.get_mut(&id).and_then(|link| link.path(number)) else { return false };
            done += path.collect(&mut |event| sink(id, event));
            if !path.lent && !path.in_queue && path.has_work() {
                path.in_queue = true;
                queue.push_back((id, number));
            }
            path.lent
        });
        done
    }

    /// Puts a path that has something to do into the queue.
    fn enqueue(&mut self, id: LinkId, number: u16) {
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.up
            && let Some(path) = link.path(number)
            && !path.in_queue
            && path.has_work()
        {
            path.in_queue = true;
            self.queue.push_back((id, number));
        }
    }

    fn event(&mut self, token: Token, ready: Ready, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        match token {
            Token::Timer => self.timers(sink),
            Token::Bell => self.take_arrivals(sink),
            // These are the acceptor's.
            Token::Listener | Token::Incoming(..) => {}
            Token::Path(id, number) => self.path_event(id, number, ready, sink),
            Token::Closing(serial) => {
                if let Some(at) = self.closing.iter().position(|closing| closing.serial == serial)
                    && let Some(closing) = self.closing.get_mut(at)
                    && closing.finish().unwrap_or(true)
                {
                    self.closing.remove(at);
                }
            }
        }
    }

    fn path_event(&mut self, id: LinkId, number: u16, ready: Ready, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        let Some(link) = self.links.get_mut(&id) else { return };
        match link.slots.get_mut(usize::from(number)) {
            Some(Slot::Dialling(dial, _)) => {
                let outcome = dial.advance(&link.introduction, ready.writable);
                self.dialled(id, number, outcome, sink);
            }
            Some(Slot::Ready(_)) if !link.up && ready.hung_up => {
                link.lose(number, Instant::now(), None);
                self.rearm = true;
            }
            Some(Slot::Ready(path)) => {
                path.ready(ready);
                self.enqueue(id, number);
            }
            _ => {}
        }
    }

    /// Ends a link from within: releases all that it had, then says so.
    fn down(&mut self, id: LinkId, reason: DownReason, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        if let Some(link) = self.forget(id) {
            if let DownReason::Forged(what) = &reason {
                self.acceptor.count_forged();
                let peer = link.introduction.peer.ip();
                tracing::warn!(link = ?link.introduction.name, %peer, what, "a link ends: what came on it is not the peer's");
            }
            drop(link);
            sink(id, Event::Down { reason });
        }
    }

    fn forget(&mut self, id: LinkId) -> Option<Link> {
        let mut link = self.links.remove(&id)?;
        self.timed.remove(&id);
        self.names.remove(&link.introduction.name);
        self.rearm = true;
        if let Some(sender) = &mut self.sender {
            link.paths().for_each(|(_, path)| path.pulse.loan().stop());
            sender.forget(id);
        }
        Some(link)
    }

    /// The timer fired: does whatever is due.
    fn timers(&mut self, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        self.poll.disarm();
        self.rearm = true;
        let now = Instant::now();
        self.closing.retain(|closing| closing.deadline > now);
        if self.liveness.is_some_and(|looks| looks.next <= now) {
            self.tick(now, sink);
        }
        let mut late = Vec::new();
        let mut dials = Vec::new();
        for (id, link) in self.timed.iter().filter_map(|id| Some((id, self.links.get(id)?))) {
            if link.ending.is_some_and(|at| at <= now) {
                late.push((*id, DownReason::Closed));
            } else if !link.up && link.deadline <= now {
                late.push((*id, link.too_late(self.config.connect_timeout)));
            } else if !link.up {
                let due = |slot: &Slot| matches!(slot, Slot::Retry(at, _) if *at <= now);
                dials.extend(
                    (0..).zip(&link.slots).filter(|(_, slot)| due(slot)).map(|(path, _)| (*id, path)),
                );
            }
        }
        for (id, reason) in late {
            self.down(id, reason, sink);
        }
        for (id, number) in dials {
            self.dial(id, number, sink);
        }
    }

    /// Looks for signs of life, where a peer may be gone.
    fn tick(&mut self, now: Instant, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        let Some(mut looks) = self.liveness.take() else { return };
        let (away, limit) = (looks.check(now, &self.config), self.config.silence_limit());
        if !looks.is_due(now, away) {
            looks.schedule(&self.config);
            self.liveness = Some(looks);
            return;
        }
        let mut rest = limit;
        let mut silent = Vec::new();
        let mut up = false;
        for (id, link) in self.links.iter_mut().filter(|(_, link)| link.up) {
            up = true;
            for (number, path) in link.paths() {
                if !path.ended {
                    let left = limit.saturating_sub(path.tick(now, away));
                    if left > Duration::ZERO {
                        rest = rest.min(left);
                    } else if !path.input_waits() {
                        silent.push(*id);
                    } else {
                        // What waits is read first.
                        rest = rest.min(self.config.tick());
                    }
                }
                if !path.in_queue && path.has_work() {
                    path.in_queue = true;
                    self.queue.push_back((*id, number));
                }
            }
        }
        looks.note(rest);
        looks.schedule(&self.config);
        self.liveness = up.then_some(looks);
        for id in silent {
            let reason = format!("no sign of life from the peer for {:?}", self.config.peer_timeout);
            self.down(id, DownReason::Network(reason), sink);
        }
    }

    /// Sets the timer for the first thing that will be due.
    fn arm(&mut self) {
        self.rearm = false;
        let closing = self.closing.iter().map(|closing| closing.deadline);
        let links = self.timed.iter().filter_map(|id| self.links.get(id)?.next());
        let next = closing.chain(links);
        let next = next.chain(self.liveness.map(|looks| looks.next)).min();
        self.poll.arm(next);
    }
}

/// What every socket of the endpoint is set to.
fn tune(socket: &Socket, config: &Config) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if let Some(congestion) = &config.congestion {
        socket.set_tcp_congestion(congestion.as_bytes()).map_err(|error| {
            io::Error::new(error.kind(), format!("congestion control {congestion}: {error}"))
        })?;
    }
    if let Some(bytes) = config.send_buffer {
        socket.set_send_buffer_size(bytes)?;
    }
    if let Some(bytes) = config.receive_buffer {
        socket.set_recv_buffer_size(bytes)?;
    }
    if let Some(bytes) = config.unsent {
        socket.set_tcp_notsent_lowat(bytes)?;
    }
    Ok(())
}

impl Transport for TcpTransport {
    fn local_address(&self) -> SocketAddr {
        self.acceptor.local_address()
    }

    fn flow(&self, link: LinkId, path: u16) -> Option<Flow> {
        let Slot::Ready(path) = self.links.get(&link)?.slots.get(usize::from(path))? else { return None };
        let local = path.socket().local_addr().ok()?.as_socket()?;
        let remote = path.socket().peer_addr().ok()?.as_socket()?;
        Some(Flow::Tcp { local, remote })
    }

    fn open(&mut self, introduction: Introduction) -> Result<LinkId, DownReason> {
        let paths = introduction.source_ports.len();
        if paths == 0 || paths > usize::from(MAX_PATHS) {
            return Err(DownReason::Refused(LinkRefusal::Paths(paths)));
        }
        if self.names.contains_key(&introduction.name) {
            return Err(DownReason::Taken);
        }
        let name = introduction.name;
        let expected = self.acceptor.expect(&introduction, self.config.protection, &self.arrivals)?;
        let link = Link::new(introduction, expected, Instant::now(), self.config.connect_timeout);
        let id = LinkId(self.next_link);
        self.next_link += 1;
        self.links.insert(id, link);
        self.timed.insert(id);
        self.names.insert(name, id);
        self.queue.reserve(self.links.values().map(|link| link.slots.len()).sum());
        self.arm();
        Ok(id)
    }

    fn attach_ring(&mut self, link: LinkId, ring: u16, memory: Ring) -> Result<(), DownReason> {
        match self.links.get_mut(&link) {
            Some(link) => link.rings.attach(ring, memory),
            None => Err(DownReason::Closed),
        }
    }

    fn post(&mut self, link: LinkId, landing: Landing, span: Span) -> bool {
        self.links.get_mut(&link).is_some_and(|link| link.rings.post(landing, span))
    }

    fn send(
        &mut self,
        link: LinkId,
        path: u16,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) -> Result<(), SendError> {
        let id = link;
        let link = self.links.get_mut(&id).ok_or(SendError::Down)?;
        if !link.up || link.ending.is_some() {
            return Err(SendError::Down);
        }
        let slot = link.path(path).ok_or(SendError::Invalid)?;
        slot.push(header, payload)?;
        if !slot.in_queue && slot.has_work() {
            slot.in_queue = true;
            self.queue.push_back((id, path));
        }
        if let Some(shares) = &mut self.shares {
            shares.note_send(id, &mut link.share);
        }
        Ok(())
    }

    fn pace(&mut self, link: LinkId, bits_per_second: Option<u64>) -> bool {
        let Some(link) = self.links.get_mut(&link) else { return false };
        link.rate = bits_per_second;
        link.pace()
    }

    fn set_congestion_control(&mut self, link: LinkId, control: Option<CongestionControl>) {
        if let Some(link) = self.links.get_mut(&link)
            && link.congestion != control
        {
            link.control_congestion(&self.host_congestion, control);
        }
    }

    fn set_owner(&mut self, link: LinkId, owner: Owner) {
        if let Some(link) = self.links.get_mut(&link) {
            link.share.owner = Some(owner);
        }
        if let Some(shares) = &mut self.shares {
            shares.reserve(self.links.len());
        }
    }

    fn set_class(&mut self, link: LinkId, class: TrafficClass) {
        let Some(dscp) = self.config.dscp else { return };
        if let Some(link) = self.links.get_mut(&link)
            && std::mem::replace(&mut link.class, class) != class
        {
            link.mark(dscp.of(class));
        }
    }

    fn progress(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        if let Some(shares) = &mut self.shares {
            shares.divide(&mut self.links);
        }
        let mut done = self.collect(sink);
        done += self.work(budget.saturating_sub(done), sink);
        let events = self.poll.ready();
        for (token, ready) in events.iter() {
            done += 1;
            self.event(token, ready, sink);
        }
        done += self.work(budget.saturating_sub(done), sink);
        if self.rearm {
            self.arm();
        }
        done
    }

    fn close(&mut self, link: LinkId) {
        let Some(link) = self.forget(link) else { return };
        if !link.up {
            return;
        }
        let deadline = Instant::now() + LINGER;
        let before = self.closing.len();
        for slot in link.slots {
            if let Slot::Ready(path) = slot
                && !path.ended
            {
                let words = path.pulse.take_pending();
                let closing = Closing::new(Arc::clone(&path.pulse), self.next_serial, deadline, words);
                self.next_serial += 1;
                self.closing.push_back(closing);
            }
        }
        // All paths' words go before any path's end: the peer counts the link as ended with the first.
        self.closing.range_mut(before..).for_each(|closing| {
            let _ = closing.write();
        });
        for at in (before..self.closing.len()).rev() {
            let Some(closing) = self.closing.get_mut(at) else { continue };
            let over = closing.finish().unwrap_or(true);
            if over || self.poll.rename(closing.socket(), Token::Closing(closing.serial)).is_err() {
                self.closing.remove(at);
            }
        }
        let_go(&mut self.closing, MAX_CLOSING);
        self.poll.no_later_than(deadline);
    }

    fn freeze(&mut self, frozen: bool) {
        self.set_frozen(frozen);
    }

    fn is_frozen(&mut self) -> Result<bool, LinkHandOverError> {
        Ok(self.rests())
    }

    fn hand_over(&mut self) -> Result<(Vec<u8>, Vec<OwnedFd>), LinkHandOverError> {
        self.image()
    }

    fn take_over(&mut self, links: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), LinkHandOverError> {
        self.inherit(links, descriptors)
    }

    fn prepare_sleep(&mut self) -> bool {
        self.sender.as_mut().is_none_or(SenderThread::prepare_sleep)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poll.as_fd())
    }
}
