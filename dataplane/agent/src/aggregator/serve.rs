//! The aggregator's thread: datagrams in, datagrams out, and commands in between. Nothing is allocated for a datagram.

use super::grant::TenantGrant;
use super::metrics::{Reading, add};
use super::routes::Routes;
use anyhow::Context;
use harmonaize_abi::GrantId;
use harmonaize_aggregator::packet::Header;
use harmonaize_aggregator::{Aggregator, Counters, GrantError, Outbox, PoolError, Recipient};
use harmonaize_transport::datagram::{Address, DatagramCounters, Endpoint};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Why a communicator is not served. The text goes to control.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ServeError {
    /// The aggregator has no place for it, or it makes no sense.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// Nobody is there to serve it.
    #[error("the aggregator's thread has ended")]
    Ended,
}

/// Commands that wait.
const COMMANDS: usize = 256;
/// How often it is looked at who has fallen still, and after how long that is said of a communicator.
const TICK: Duration = Duration::from_millis(100);
const IDLE: Duration = Duration::from_secs(1);
/// Bytes of what arrived that wait to be looked at: as much as one call brings.
const ARRIVED: usize = 1 << 20;
/// Calls to receive between two looks at commands.
const CALLS: usize = 16;
/// Tenants whose counts are kept when they have no communicators here any more; others' are summed up in `other`.
const MAX_TENANTS: usize = 64;

/// What the thread is asked.
enum Command {
    Grant(Box<TenantGrant>, oneshot::Sender<Result<(), ServeError>>),
    Revoke(GrantId),
    Read(oneshot::Sender<Reading>),
}

/// A communicator that is served.
struct ServedCommunicator {
    secret: [u8; 32],
    tenant: String,
}

/// What one call brought, copied so that answers can go out while it is looked at.
struct ReceiveBuffer {
    bytes: Box<[u8]>,
    /// Sender, and where its datagram begins and ends.
    datagrams: Vec<(Address, usize, usize)>,
    used: usize,
}

impl ReceiveBuffer {
    fn new() -> Self {
        // The shortest packet is a header.
        let most = ARRIVED / harmonaize_aggregator::packet::HEADER_BYTES;
        let bytes = vec![0; ARRIVED].into_boxed_slice();
        Self { bytes, datagrams: Vec::with_capacity(most), used: 0 }
    }

    fn clear(&mut self) {
        self.datagrams.clear();
        self.used = 0;
    }

    /// Takes a datagram; false, and nothing has happened, if there is no room.
    fn push(&mut self, from: Address, datagram: &[u8]) -> bool {
        let end = self.used + datagram.len();
        let Some(room) = self.bytes.get_mut(self.used..end) else { return false };
        if self.datagrams.len() == self.datagrams.capacity() {
            return false;
        }
        room.copy_from_slice(datagram);
        self.datagrams.push((from, self.used, end));
        self.used = end;
        true
    }
}

/// Where datagrams come and go: over UDP, and over RDMA where there is a device.
pub(super) struct Endpoints {
    pub udp: Endpoint,
    pub rdma: Option<Endpoint>,
}

impl Endpoints {
    fn iter_mut(&mut self) -> impl Iterator<Item = &mut Endpoint> {
        std::iter::once(&mut self.udp).chain(&mut self.rdma)
    }

    /// The one by which an address can be reached.
    fn to(&mut self, address: Address) -> Option<&mut Endpoint> {
        match address {
            Address::Udp(_) => Some(&mut self.udp),
            Address::Rdma(_) => self.rdma.as_mut(),
        }
    }

    fn counters(&self) -> DatagramCounters {
        let rdma = self.rdma.as_ref().map(Endpoint::counters).unwrap_or_default();
        self.udp.counters().and(rdma)
    }
}

/// Where the answers to a datagram go.
struct Answers<'a> {
    /// Where it came from.
    from: Address,
    routes: &'a mut Routes,
    endpoints: &'a mut Endpoints,
    unsent: &'a mut u64,
}

impl Outbox for Answers<'_> {
    fn send(&mut self, to: Recipient, packet: &[u8]) {
        let sent = self.routes.find(to).is_some_and(|to| {
            let push = |endpoint: &mut Endpoint| {
                endpoint.push(|room| {
                    room.get_mut(..packet.len())?.copy_from_slice(packet);
                    Some((to, packet.len()))
                })
            };
            self.endpoints.to(to).is_some_and(push)
        });
        *self.unsent += u64::from(!sent);
    }

    fn authenticated(&mut self, from: &Header) {
        self.routes.learn(self.from, from);
    }
}

/// All that the thread has.
pub(super) struct Server {
    endpoints: Endpoints,
    aggregator: Aggregator,
    receive_buffer: ReceiveBuffer,
    routes: Routes,
    spin: Duration,
    served: BTreeMap<GrantId, ServedCommunicator>,
    /// Tenants' numbers in the pool.
    tenants: BTreeMap<String, u32>,
    next_tenant: u32,
    /// What was done for communicators that are served no longer.
    ended: BTreeMap<String, Counters>,
    /// Packets that could not go out: their end is not known, or the kernel takes no more.
    unsent: u64,
    begun: Instant,
}

impl Server {
    pub(super) fn new(endpoints: Endpoints, aggregator: Aggregator, spin: Duration) -> Self {
        Self {
            endpoints,
            aggregator,
            receive_buffer: ReceiveBuffer::new(),
            routes: Routes::default(),
            spin,
            served: BTreeMap::new(),
            tenants: BTreeMap::new(),
            next_tenant: 0,
            ended: BTreeMap::new(),
            unsent: 0,
            begun: Instant::now(),
        }
    }

    fn run(mut self, mut commands: mpsc::Receiver<Command>, signals: &Signals) {
        let mut ticked = Instant::now();
        let mut busy = Instant::now();
        while !signals.over.load(Ordering::Relaxed) {
            while let Ok(command) = commands.try_recv() {
                self.command(command);
            }
            let now = Instant::now();
            if now.duration_since(ticked) >= TICK {
                ticked = now;
                self.aggregator.handle_timeout(now.duration_since(self.begun), IDLE);
            }
            if self.progress() {
                busy = Instant::now();
            } else if busy.elapsed() < self.spin {
                std::thread::yield_now();
            } else {
                self.wait(&signals.bell);
            }
        }
    }

    /// Looks at what has arrived, some calls' worth, and sends what that gives; whether there was anything.
    pub(super) fn progress(&mut self) -> bool {
        let mut some = false;
        for _ in 0..CALLS {
            let udp = self.serve(|endpoints| Some(&mut endpoints.udp));
            let rdma = self.serve(|endpoints| endpoints.rdma.as_mut());
            some |= udp || rdma;
            // What is not taken now goes with what follows.
            for endpoint in self.endpoints.iter_mut() {
                let _ = endpoint.flush();
            }
            if !udp && !rdma {
                break;
            }
        }
        some
    }

    /// One call's worth of what came to an endpoint; whether there was anything.
    fn serve(&mut self, endpoint: impl Fn(&mut Endpoints) -> Option<&mut Endpoint>) -> bool {
        let Self { endpoints, aggregator, receive_buffer: arrived, routes, unsent, .. } = self;
        arrived.clear();
        let Some(from) = endpoint(endpoints) else { return false };
        let taken = from.receive(&mut |from, datagram| {
            // Longer ones fit: a call brings no more bytes than there is room for. Shorter ones are no packets.
            let _ = arrived.push(from, datagram);
        });
        let now = self.begun.elapsed();
        for (from, start, end) in &arrived.datagrams {
            let packet = arrived.bytes.get(*start..*end).unwrap_or_default();
            let mut answers = Answers { from: *from, routes, endpoints, unsent };
            aggregator.receive(now, packet, &mut answers);
        }
        taken > 0
    }

    /// Sleeps until something arrives, is asked, or is due.
    fn wait(&mut self, bell: &OwnedFd) {
        if self.endpoints.iter_mut().map(Endpoint::prepare_sleep).any(|nothing| !nothing) {
            return;
        }
        let mut interest = PollFlags::IN;
        if self.endpoints.udp.waiting() > 0 {
            interest |= PollFlags::OUT;
        }
        let Ok(udp) = self.endpoints.udp.wake_fd() else { return };
        // A device that is gone wakes nobody.
        let rdma = self.endpoints.rdma.as_ref().and_then(|endpoint| endpoint.wake_fd().ok());
        let last =
            rdma.map_or(PollFd::new(bell, PollFlags::IN), |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let mut descriptors =
            [PollFd::from_borrowed_fd(udp, interest), PollFd::new(bell, PollFlags::IN), last];
        let limit = Timespec::try_from(TICK).ok().filter(|_| !self.served.is_empty());
        // A signal, or an error of the socket, is looked at like what has come.
        let _ = poll(&mut descriptors, limit.as_ref());
        let _ = rustix::io::read(bell, &mut [0; 8]);
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Grant(told, answer) => drop(answer.send(self.grant(*told))),
            Command::Revoke(communicator) => self.revoke(communicator),
            Command::Read(answer) => drop(answer.send(self.read())),
        }
    }

    /// Serves a communicator.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn grant(
        &mut self,
        TenantGrant { mut grant, parent, tenant }: TenantGrant,
    ) -> Result<(), ServeError> {
        grant.share.tenant = match self.tenants.get(&tenant) {
            Some(number) => *number,
            None => self.next_tenant,
        };
        let number = grant.share.tenant;
        let (communicator, workers, secret) = (grant.communicator, grant.workers, grant.secret);
        match self.aggregator.grant(grant) {
            Ok(()) => {
                self.routes.add(communicator, workers, parent);
                if self.tenants.insert(tenant.clone(), number).is_none() {
                    self.next_tenant = self.next_tenant.wrapping_add(1);
                }
                self.served.insert(communicator, ServedCommunicator { secret, tenant });
                Ok(())
            }
            Err(GrantError::Pool(PoolError::Duplicate(_)))
                if self.served.get(&communicator).is_some_and(|served| served.secret == secret) =>
            {
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Serves a communicator no longer.
    pub(super) fn revoke(&mut self, communicator: GrantId) {
        let Some(served) = self.served.remove(&communicator) else { return };
        if let Some(counters) = self.aggregator.counters(communicator) {
            let known = self.ended.contains_key(&served.tenant) || self.ended.len() < MAX_TENANTS;
            let name = if known { served.tenant.clone() } else { "other".to_owned() };
            add(self.ended.entry(name).or_default(), &counters);
        }
        if self.served.values().all(|other| other.tenant != served.tenant) {
            self.tenants.remove(&served.tenant);
        }
        self.aggregator.revoke(communicator);
        self.routes.remove(communicator);
    }

    /// What was done so far.
    pub(super) fn read(&self) -> Reading {
        let mut tenants: BTreeMap<String, (u32, Counters)> =
            self.ended.iter().map(|(tenant, counters)| (tenant.clone(), (0, *counters))).collect();
        for (communicator, served) in &self.served {
            let (count, counters) = tenants.entry(served.tenant.clone()).or_default();
            *count += 1;
            if let Some(now) = self.aggregator.counters(*communicator) {
                add(counters, &now);
            }
        }
        Reading {
            tenants,
            unrecognized: self.aggregator.unrecognized(),
            datagrams: self.endpoints.counters(),
            unsent: self.unsent,
            free: self.aggregator.pool().free(),
            units: self.aggregator.pool().units(),
        }
    }
}

/// The thread, while it runs.
pub(super) struct Thread {
    commands: Commands,
    thread: JoinHandle<()>,
}

/// What wakes the thread, and ends it.
struct Signals {
    bell: OwnedFd,
    over: AtomicBool,
}

impl Signals {
    fn ring(&self) {
        // A full counter wakes as well.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }
}

/// A way to ask the thread.
#[derive(Clone)]
pub(super) struct Commands {
    commands: mpsc::Sender<Command>,
    signals: Arc<Signals>,
}

impl Commands {
    fn new() -> std::io::Result<(Self, mpsc::Receiver<Command>)> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let signals = Arc::new(Signals { bell, over: AtomicBool::new(false) });
        let (commands, queue) = mpsc::channel(COMMANDS);
        Ok((Self { commands, signals }, queue))
    }

    /// Waits while too many wait: what control says must not be lost. Who asks a thread that has ended gets no answer.
    async fn send(&self, command: Command) {
        drop(self.commands.send(command).await);
        self.signals.ring();
    }

    async fn grant(&self, told: TenantGrant) -> Result<(), ServeError> {
        let (answer, answered) = oneshot::channel();
        self.send(Command::Grant(Box::new(told), answer)).await;
        answered.await.unwrap_or(Err(ServeError::Ended))
    }

    async fn revoke(&self, communicator: GrantId) {
        self.send(Command::Revoke(communicator)).await;
    }

    /// What was done; none where the thread has ended or does not keep up.
    pub(super) async fn read(&self) -> Option<Reading> {
        let (answer, answered) = oneshot::channel();
        drop(self.commands.try_send(Command::Read(answer)));
        self.signals.ring();
        answered.await.ok()
    }
}

impl Thread {
    /// Starts it.
    ///
    /// # Errors
    /// If the system gives no thread or descriptor.
    pub(super) fn start(server: Server) -> std::io::Result<Self> {
        let (asker, queue) = Commands::new()?;
        let rung = Arc::clone(&asker.signals);
        let thread = std::thread::Builder::new()
            .name("aggregator".to_owned())
            .spawn(move || server.run(queue, &rung))?;
        Ok(Self { commands: asker, thread })
    }

    pub(super) fn commands(&self) -> Commands {
        self.commands.clone()
    }

    pub(super) async fn grant(&self, told: TenantGrant) -> Result<(), ServeError> {
        self.commands.grant(told).await
    }

    pub(super) async fn revoke(&self, communicator: GrantId) {
        self.commands.revoke(communicator).await;
    }

    /// Has it end.
    ///
    /// # Errors
    /// If it has panicked.
    pub(super) fn end(self) -> anyhow::Result<()> {
        let Self { commands: Commands { signals, .. }, thread } = self;
        signals.over.store(true, Ordering::Relaxed);
        signals.ring();
        thread.join().map_err(|_| anyhow::anyhow!("it has panicked")).context("the aggregator's thread")
    }
}

#[cfg(test)]
mod tests;
