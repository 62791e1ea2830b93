//! Agents over RDMA: a reliable queue pair per path, with a TCP link beneath for each link.
//!
//! The TCP link authenticates the peer, carries the queue pairs' parameters and the addresses of rings (`exchange`), and
//! stays as the life line: it knows when the peer's process has ended, and takes the last words that a queue pair did not get
//! out. A frame is an RDMA WRITE of the payload into its slot, and an RDMA WRITE WITH IMMEDIATE of a message with its header
//! into the receiver's mailbox (`mailbox`); small payloads travel in the message. Whoever writes into a mailbox holds credit
//! for the slot, so a receive request is always there. Completion queues are polled; `prepare_sleep` arms them.
//!
//! A link whose introduction asks for TCP alone has no queue pairs: it is a link of the endpoint beneath, and its frames go there. Such
//! links alone can be handed over.

mod delays;
mod exchange;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod link;
mod mailbox;
mod outbox;
mod path;
mod rail;
mod reaper;
mod wake;

use crate::tcp::{self, Acceptor, TcpTransport};
use crate::{
    DownReason, Event, Flow, Introduction, Landing, LinkHandOverError, LinkId, LinkRefusal, MAX_PATHS, Owner,
    Ring, SendError, TrafficClass, Transport,
};
use exchange::{Control, RemoteMemory, RingEnd};
use harmonaize_abi::{CongestionControl, Tag};
use harmonaize_shm::Span;
use harmonaize_verbs::{Access, VerbsError};
pub use harmonaize_verbs::{Devices, PortOptions};
use link::{Link, Outcome, Stage};
use path::Fault;
use rail::Rail;
use reaper::Reaper;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use wake::{Token, Wake};

/// After a queue pair failed, the TCP link has this long to say why.
const GRACE: Duration = Duration::from_millis(200);

/// How often memory is looked for that nobody uses any more.
const SWEEP: Duration = Duration::from_secs(1);

/// Rounds and frames, while frames flow or there is nothing to do, after which the TCP links are looked after.
/// That takes system calls, which would come between a poll loop and the message that it waits for.
const ROUNDS: usize = 256;

/// Frames that the TCP link of each link queues, at least: parameters of all paths, and last words.
const EXCHANGE_FRAMES: usize = 256;

/// How an endpoint is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// The TCP links beneath: where to listen, time-outs, and how many frames a path queues.
    pub tcp: tcp::Config,
    /// Devices by name, "mlx5_0", or with their port, "mlx5_0:1"; the paths of a link take turns. None: the one that has
    /// the listening address.
    pub devices: Vec<String>,
    /// The rest of what is asked of each of them; its `device` is not looked at. The usual GID is the one with the listening
    /// address, or the first for UDP over IPv4.
    pub options: PortOptions,
    /// Slots of a path's mailbox, 8 to 4096, rounded up to a power of two: messages under way at once.
    pub mailbox_slots: u32,
    /// Payloads of at most so many bytes travel in the message with the header.
    pub inline_payload: usize,
}

impl Config {
    /// The usual settings.
    pub fn new(tcp: tcp::Config) -> Self {
        Self {
            tcp,
            devices: Vec::new(),
            options: PortOptions::default(),
            mailbox_slots: 128,
            inline_payload: 256,
        }
    }
}

/// How long a device may take at most to send a message or give up. A try may take four times its time-out, which is endless where it is 0
/// (InfiniBand Architecture Specification, volume 1, 9.7.6.1.3).
fn settled_within(options: &PortOptions) -> Duration {
    if options.timeout == 0 {
        return Duration::MAX;
    }
    let once = Duration::from_nanos(4096).saturating_mul(1 << options.timeout.min(31));
    once.saturating_mul(4 * (u32::from(options.retries) + 1))
}

/// Why an endpoint could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The TCP links beneath.
    #[error(transparent)]
    Tcp(#[from] io::Error),
    /// A device.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// More than a link can spread over.
    #[error("{0} devices are more than 16")]
    TooManyDevices(usize),
}

/// Why the completion queues of a link cannot wake a sleeper.
#[derive(Debug, thiserror::Error)]
enum WatchError {
    /// A queue has nothing to wait for.
    #[error(transparent)]
    Queue(#[from] VerbsError),
    /// It cannot be waited for.
    #[error(transparent)]
    Poll(#[from] io::Error),
}

/// What happened on a TCP link beneath.
#[derive(Debug)]
enum TcpEvent {
    Up,
    Frame(Vec<u8>),
    Down(DownReason),
}

/// An endpoint over RDMA.
#[derive(Debug)]
pub struct VerbsTransport {
    config: Config,
    devices: Devices,
    /// None while a device is gone: they are opened anew for the next link.
    rails: Vec<Rail>,
    /// The TCP link beneath each link, and links over TCP alone.
    inner: TcpTransport,
    /// Those over RDMA, by number, which only grows.
    links: Vec<Link>,
    reaper: Reaper,
    /// Whose turn it is first.
    first: usize,
    rounds: usize,
    /// Whether nothing is queued for the TCP links, and nothing had come when they were last served. What comes shows in
    /// the descriptor that one sleeps on.
    quiet: bool,
    tcp_events: VecDeque<(LinkId, TcpEvent)>,
    wake: Wake,
    due: Option<Instant>,
    sweep: Instant,
    /// Whether some messages are timed.
    timed: bool,
}

impl VerbsTransport {
    /// An endpoint with an address of its own: opens the devices and listens.
    pub fn bind(config: Config, devices: &Devices) -> Result<Self, SetupError> {
        Self::accepting(&Acceptor::bind(&config.tcp)?, config, devices)
    }

    /// An endpoint that shares an address with others: opens the devices. See [`TcpTransport::accepting`].
    pub fn accepting(acceptor: &Acceptor, config: Config, devices: &Devices) -> Result<Self, SetupError> {
        let mut config = config;
        config.mailbox_slots = mailbox::nearest_slots(config.mailbox_slots);
        let queue_frames = config.tcp.queue_frames.max(EXCHANGE_FRAMES);
        let inner = TcpTransport::accepting(acceptor, tcp::Config { queue_frames, ..config.tcp.clone() })?;
        let wake = Wake::new()?;
        if let Some(fd) = inner.wake_fd() {
            wake.add(fd, Token::Other)?;
        }
        let mut transport = Self {
            config,
            devices: devices.clone(),
            rails: Vec::new(),
            inner,
            links: Vec::new(),
            reaper: Reaper::begin()?,
            first: 0,
            rounds: 0,
            quiet: false,
            tcp_events: VecDeque::new(),
            wake,
            due: None,
            sweep: Instant::now(),
            timed: false,
        };
        transport.open_devices()?;
        transport.set_timer();
        Ok(transport)
    }

    fn open_devices(&mut self) -> Result<(), SetupError> {
        let rails = Rail::open_all(&self.config, &self.devices)?;
        for (at, rail) in (0_u16..).zip(&rails) {
            self.wake.add(rail.device.event_fd()?, Token::Device(at))?;
        }
        self.rails = rails;
        Ok(())
    }

    /// Before a link: its devices must be there. One that was taken away and is back is opened anew, once nothing stands on
    /// the old one any more.
    fn have_devices(&mut self) -> Result<(), DownReason> {
        let lost = self.rails.iter().find(|rail| !rail.device.check_present());
        if let Some(name) = lost.map(|rail| rail.device.name().to_owned()) {
            if !self.links.is_empty() {
                return Err(DownReason::DeviceGone(name));
            }
            self.rails.clear();
        }
        if self.rails.is_empty() {
            self.open_devices().map_err(|error| DownReason::Connect(error.to_string()))?;
        }
        Ok(())
    }

    fn at(&self, id: LinkId) -> Option<usize> {
        self.links.binary_search_by_key(&id, |link| link.id).ok()
    }

    /// Whether there are links over TCP alone.
    fn has_links_over_tcp(&self) -> bool {
        self.inner.link_count() > self.links.len()
    }

    fn link(&mut self, id: LinkId) -> Option<&mut Link> {
        self.at(id).and_then(|at| self.links.get_mut(at))
    }

    /// Lets every link move frames.
    fn flow(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        let (mut done, count) = (0, self.links.len());
        let mut faults = Vec::new();
        for step in 0..count {
            if done >= budget {
                break;
            }
            let Some(link) = self.links.get_mut((self.first + step) % count) else { continue };
            if !link.flows() {
                continue;
            }
            let id = link.id;
            let left = budget - done;
            let how = (self.config.inline_payload, self.timed);
            match link.work(&mut self.rails, left, how, &mut |event| sink(id, event)) {
                Ok(worked) => {
                    done += worked;
                    self.quiet &= link.outgoing.is_empty();
                }
                Err((path, fault)) => faults.push((id, path, fault)),
            }
        }
        self.first = (self.first + 1) % count.max(1);
        for (id, path, fault) in faults {
            done += 1;
            self.fault(id, path, fault, sink);
        }
        done
    }

    /// A path has failed.
    fn fault(&mut self, id: LinkId, path: usize, fault: Fault, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        match fault {
            Fault::Breach(reason) => self.fail(id, reason, sink),
            Fault::Network(why) => {
                let reason = self.and_ports(DownReason::Network(format!("path {path}: {why}")));
                let Some(link) = self.link(id) else { return };
                link.failing.get_or_insert((Instant::now() + GRACE, reason));
                self.set_timer();
            }
        }
    }

    /// Ends links of which a device has lost what was to be sent.
    fn check_paths(&mut self, now: Instant, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        let (limit, mut faults) = (settled_within(&self.config.options), Vec::new());
        for link in self.links.iter_mut().filter(|link| link.flows()) {
            for (number, path) in link.paths.iter_mut().enumerate() {
                if let Err(fault) = path.check(now, limit) {
                    faults.push((link.id, number, fault));
                }
            }
        }
        for (id, path, fault) in faults {
            self.fault(id, path, fault, sink);
        }
    }

    /// The reason, and with it which of our own ports are not active: that is where to look first.
    fn and_ports(&self, reason: DownReason) -> DownReason {
        let states = self.rails.iter().filter_map(|rail| rail.device.active(rail.route.port).err());
        let down: String = states.map(|error| format!("; {error}")).collect();
        match reason {
            DownReason::Network(why) => DownReason::Network(why + &down),
            DownReason::Connect(why) => DownReason::Connect(why + &down),
            other => other,
        }
    }

    /// Looks after the TCP links, descriptors, and what came up there.
    fn poll_control(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        let mut done = 0;
        for token in self.wake.ready() {
            match token {
                Token::Other => {}
                Token::Path(id, number) => {
                    if let Some(path) = self.link(id).and_then(|link| link.paths.get_mut(usize::from(number)))
                    {
                        path.woken();
                    }
                }
                Token::Device(at) => done += self.device_event(usize::from(at)),
            }
        }
        for at in 0..self.links.len() {
            done += self.pump(at);
        }
        let mut heard = std::mem::take(&mut self.tcp_events);
        let links = &self.links;
        let over_rdma = |id: &LinkId| links.binary_search_by_key(id, |link| link.id).is_ok();
        done += self.inner.progress(budget, &mut |id, event| match event {
            event if !over_rdma(&id) => sink(id, event),
            Event::Up => heard.push_back((id, TcpEvent::Up)),
            Event::Received { header, .. } => heard.push_back((id, TcpEvent::Frame(header.to_vec()))),
            Event::Down { reason } => heard.push_back((id, TcpEvent::Down(reason))),
            Event::Sent { .. } | Event::Completed { .. } => {}
        });
        while let Some((id, heard)) = heard.pop_front() {
            self.handle_tcp_event(id, heard, sink);
        }
        self.tcp_events = heard;
        done + self.lost_devices(sink)
    }

    /// Hands the TCP link what the link has to say; says how many frames it took.
    fn pump(&mut self, at: usize) -> usize {
        let Some(link) = self.links.get_mut(at) else { return 0 };
        let mut taken = 0;
        while link.stage != Stage::Waiting
            && let Some(frame) = link.outgoing.front()
            && self.inner.send(link.id, 0, frame, None).is_ok()
        {
            link.outgoing.pop_front();
            taken += 1;
        }
        taken
    }

    fn handle_tcp_event(&mut self, id: LinkId, heard: TcpEvent, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        let timeout = self.config.tcp.connect_timeout;
        let Some(at) = self.at(id) else { return };
        let Some(link) = self.links.get_mut(at) else { return };
        match heard {
            TcpEvent::Up => {
                link.stage = Stage::Exchanging;
                link.deadline = Some(Instant::now() + timeout);
                self.set_timer();
            }
            TcpEvent::Frame(frame) => {
                match link.handle_control(&frame, &mut self.rails, &mut |event| sink(id, event)) {
                    Ok(Outcome::Idle) => {}
                    Ok(Outcome::Paths) => {
                        if let Err(error) = self.watch(at) {
                            let reason = format!("the completion queue cannot be watched: {error}");
                            return self.fail(id, DownReason::Connect(reason), sink);
                        }
                    }
                    Ok(Outcome::Up) => {
                        sink(id, Event::Up);
                        self.set_timer();
                    }
                    Err(reason) => return self.fail(id, reason, sink),
                }
            }
            TcpEvent::Down(reason) => {
                let mut link = self.links.remove(at);
                if link.stage == Stage::Up {
                    for path in &mut link.paths {
                        path.drain(&link.rings, &mut |event| sink(id, event));
                    }
                }
                self.destroy(link);
                self.set_timer();
                let reason = self.and_ports(reason);
                return sink(id, Event::Down { reason });
            }
        }
        self.pump(at);
    }

    /// Adds the completion queues of a link's paths to what one sleeps on.
    fn watch(&self, at: usize) -> Result<(), WatchError> {
        let Some(link) = self.links.get(at) else { return Ok(()) };
        for (number, path) in (0_u16..).zip(&link.paths) {
            let fd = path.completions().wake_fd()?;
            self.wake.add(fd, Token::Path(link.id, number))?;
        }
        Ok(())
    }

    /// Ends a link from within, and tells the peer why if it is still on its way up.
    fn fail(&mut self, id: LinkId, reason: DownReason, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        let Some(at) = self.at(id) else { return };
        self.quiet = false;
        self.pump(at);
        let link = self.links.remove(at);
        if link.stage == Stage::Exchanging {
            let mut frame = Vec::new();
            Control::Refuse(&reason.to_string()).encode(&mut frame);
            let _ = self.inner.send(id, 0, &frame, None);
        }
        self.destroy(link);
        self.inner.close(id);
        self.set_timer();
        sink(id, Event::Down { reason });
    }

    /// Destroys a link's queue pairs: without waiting, but for those of a device that is gone, which waits for them.
    fn destroy(&self, link: Link) {
        for path in link.paths {
            if self.rails.get(path.rail).is_some_and(|rail| !rail.device.lost()) {
                self.reaper.destroy(path);
            }
        }
    }

    /// Takes note of what happened to a device.
    fn device_event(&self, at: usize) -> usize {
        let Some(rail) = self.rails.get(at) else { return 0 };
        let mut taken = 0;
        while let Ok(Some(event)) = rail.device.take_event() {
            tracing::warn!(device = rail.device.name(), ?event, "RDMA device event");
            taken += 1;
        }
        taken
    }

    /// Ends the links of devices that are gone, and lets go of these: some drivers wait for it.
    fn lost_devices(&mut self, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        let mut ended = 0;
        for rail in 0..self.rails.len() {
            let Some(device) = self.rails.get(rail).map(|rail| &rail.device).filter(|device| device.lost())
            else {
                continue;
            };
            let reason = DownReason::DeviceGone(device.name().to_owned());
            let uses = |link: &&Link| link.paths.iter().any(|path| path.rail == rail);
            let ids: Vec<LinkId> = self.links.iter().filter(uses).map(|link| link.id).collect();
            for id in ids {
                ended += 1;
                self.fail(id, reason.clone(), sink);
            }
        }
        if self.links.is_empty() && self.rails.iter().any(|rail| rail.device.lost()) {
            self.rails.clear();
        }
        ended
    }

    /// Does what is due.
    fn timers(&mut self, sink: &mut dyn FnMut(LinkId, Event<'_>)) {
        let now = Instant::now();
        if self.sweep <= now {
            self.sweep = now + SWEEP;
            self.rails.iter_mut().for_each(Rail::sweep);
            if !self.rails.iter().all(|rail| rail.device.check_present()) {
                self.lost_devices(sink);
            }
            self.check_paths(now, sink);
        }
        let timeout = self.config.tcp.connect_timeout;
        let mut late = Vec::new();
        for link in &self.links {
            if let Some((_, reason)) = link.failing.as_ref().filter(|(when, _)| *when <= now) {
                late.push((link.id, reason.clone()));
            } else if link.deadline.is_some_and(|when| when <= now) {
                let reason = format!("the peer did not give its queue pairs within {timeout:?}");
                late.push((link.id, DownReason::Connect(reason)));
            }
        }
        for (id, reason) in late {
            self.fail(id, reason, sink);
        }
        self.set_timer();
    }

    fn set_timer(&mut self) {
        let links = self.links.iter();
        let due = links
            .filter_map(|link| link.deadline.into_iter().chain(link.failing.as_ref().map(|f| f.0)).min());
        // Without links, too: a device that is taken away is not gone before all have let go of it.
        self.due = due.chain((!self.rails.is_empty()).then_some(self.sweep)).min();
        self.wake.at(self.due);
    }
}

impl Transport for VerbsTransport {
    fn local_address(&self) -> SocketAddr {
        self.inner.local_address()
    }

    fn flow(&self, link: LinkId, path: u16) -> Option<Flow> {
        let Some(at) = self.at(link) else { return self.inner.flow(link, path) };
        let link = self.links.get(at)?;
        link.paths.get(usize::from(path))?.flow()
    }

    fn open(&mut self, introduction: Introduction) -> Result<LinkId, DownReason> {
        if introduction.over_tcp {
            return self.inner.open(introduction);
        }
        let source_ports = introduction.source_ports;
        let paths = source_ports.len();
        if paths == 0 || paths > usize::from(MAX_PATHS) {
            return Err(DownReason::Refused(LinkRefusal::Paths(paths)));
        }
        self.have_devices()?;
        let first = source_ports.iter().copied().take(1).collect();
        let id = self.inner.open(Introduction { source_ports: first, ..introduction })?;
        let (slots, frames) = (self.config.mailbox_slots, self.config.tcp.queue_frames);
        self.links.push(Link::new(id, source_ports, self.rails.len(), slots, frames));
        self.quiet = false;
        Ok(id)
    }

    fn set_owner(&mut self, link: LinkId, owner: Owner) {
        match self.at(link).and_then(|at| self.links.get_mut(at)) {
            Some(link) => link.set_tenant(owner.tenant),
            None => self.inner.set_owner(link, owner),
        }
    }

    fn pace(&mut self, link: LinkId, bits_per_second: Option<u64>) -> bool {
        self.at(link).is_none() && self.inner.pace(link, bits_per_second)
    }

    fn set_congestion_control(&mut self, link: LinkId, control: Option<CongestionControl>) {
        if self.at(link).is_none() {
            self.inner.set_congestion_control(link, control);
        }
    }

    fn set_class(&mut self, link: LinkId, class: TrafficClass) {
        if self.at(link).is_none() {
            self.inner.set_class(link, class);
        }
    }

    fn attach_ring(&mut self, link: LinkId, ring: u16, memory: Ring) -> Result<(), DownReason> {
        let Some(at) = self.at(link) else { return self.inner.attach_ring(link, ring, memory) };
        let Some(link) = self.links.get_mut(at) else { return Err(DownReason::Closed) };
        let mut end =
            RingEnd { number: ring, slot_bytes: memory.slot_bytes, slots: memory.slots, places: Vec::new() };
        // The registrations keep them for as long as the link has the ring.
        for rail in &mut self.rails {
            let region = rail
                .registrations(link.tenant)
                .and_then(|regions| regions.region(memory.memory.memory(), Access::REMOTE_WRITE))
                .map_err(|error| DownReason::Connect(format!("ring {ring}: {error}")))?;
            let address = region.address() + memory.memory.offset() as u64;
            end.places.push(RemoteMemory { address, rkey: region.rkey() });
        }
        link.rings.attach(ring, memory)?;
        link.queue_control(&Control::Ring(end));
        self.quiet = false;
        self.pump(at);
        Ok(())
    }

    fn post(&mut self, link: LinkId, landing: Landing, span: Span) -> bool {
        self.at(link).is_none() && self.inner.post(link, landing, span)
    }

    fn send(
        &mut self,
        link: LinkId,
        path: u16,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) -> Result<(), SendError> {
        if self.at(link).is_none() {
            return self.inner.send(link, path, header, payload);
        }
        let inline_payload = self.config.inline_payload;
        let link = self.link(link).filter(|link| link.flows()).ok_or(SendError::Down)?;
        let path = link.paths.get_mut(usize::from(path)).ok_or(SendError::Invalid)?;
        path.push(header, payload, inline_payload)
    }

    fn progress(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        let mut done = self.flow(budget, sink);
        self.rounds += 1 + done;
        if (done == 0 && !self.quiet) || self.rounds >= ROUNDS || self.has_links_over_tcp() {
            self.rounds = 0;
            let looked = self.poll_control(budget, sink);
            self.quiet = looked == 0;
            done += looked;
            if self.due.is_some_and(|due| due <= Instant::now()) {
                self.timers(sink);
            }
        }
        done
    }

    fn time_completions(&mut self) {
        self.timed = true;
    }

    fn close(&mut self, link: LinkId) {
        let id = link;
        let Some(at) = self.at(id) else { return self.inner.close(id) };
        self.quiet = false;
        self.pump(at);
        let mut link = self.links.remove(at);
        if link.stage == Stage::Up {
            let Link { paths, rings, .. } = &mut link;
            let mut frame = Vec::new();
            for (number, path) in (0_u16..).zip(paths) {
                path.drain(rings, &mut |_| {});
                path.stop();
                path.unsent_headers(|message, header| {
                    for (offset, bytes) in path::pieces(header) {
                        let total = header.len() as u16;
                        frame.clear();
                        Control::Piece { path: number, message, total, offset, bytes }.encode(&mut frame);
                        let _ = self.inner.send(id, 0, &frame, None);
                    }
                });
            }
        }
        self.destroy(link);
        self.inner.close(id);
        self.set_timer();
    }

    fn freeze(&mut self, frozen: bool) {
        self.inner.freeze(frozen);
    }

    fn is_frozen(&mut self) -> Result<bool, LinkHandOverError> {
        match self.links.len() {
            0 => self.inner.is_frozen(),
            links => Err(LinkHandOverError::QueuePairs(links)),
        }
    }

    fn hand_over(&mut self) -> Result<(Vec<u8>, Vec<OwnedFd>), LinkHandOverError> {
        self.inner.hand_over()
    }

    fn take_over(&mut self, links: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), LinkHandOverError> {
        self.inner.take_over(links, descriptors)
    }

    fn prepare_sleep(&mut self) -> bool {
        let paths = self.links.iter_mut().filter(|link| link.flows()).flat_map(|link| &mut link.paths);
        let busy = paths.filter_map(|path| (!path.prepare_sleep()).then_some(())).count();
        // Whatever wakes the sleeper is looked for at once.
        self.quiet = false;
        self.inner.prepare_sleep() && busy == 0
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }
}
