//! Links between agents: the loopback's, whose events come later, as a network's do, and which end when it is severed.

use harmonaize_abi::Tag;
use harmonaize_shm::Span;
use harmonaize_transport::loopback::{Hub, Loopback};
use harmonaize_transport::{DownReason, Event, Introduction, Landing, LinkId, Ring, SendError, Transport};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// How long a link may take to come up.
pub(crate) const CONNECT: Duration = Duration::from_secs(5);

/// The network of all agents.
#[derive(Clone)]
pub(crate) struct Network {
    hub: Hub,
    shared: Arc<Mutex<Shared>>,
}

struct Shared {
    random: ChaCha8Rng,
    /// Most milliseconds that an event takes.
    delay: u64,
    /// Most events of an endpoint that wait: behind them the loopback's own queues fill up.
    most: usize,
    /// By endpoint's port: who is woken when something is for it, and the ports to which its links are cut.
    endpoints: BTreeMap<u16, (Arc<Notify>, Vec<u16>)>,
}

impl Network {
    pub(crate) fn new(mut random: ChaCha8Rng) -> Self {
        // Nobody but `Links` ends a link that takes too long.
        let hub = Hub::with_timeout(Duration::from_secs(1 << 20));
        let delay = random.random_range(0..6);
        let most = *[2, 8, 64, 1024].get(random.random_range(0..4)).unwrap();
        Self { hub, shared: Arc::new(Mutex::new(Shared { random, delay, most, endpoints: BTreeMap::new() })) }
    }

    /// An endpoint; `wake` is notified when there is something for it.
    pub(crate) fn endpoint(&self, wake: Arc<Notify>) -> Links {
        let inner = self.hub.endpoint().unwrap();
        let port = inner.local_address().port();
        self.shared.lock().unwrap().endpoints.insert(port, (wake, Vec::new()));
        Links { network: self.clone(), port, inner, links: BTreeMap::new(), due: Arc::default() }
    }

    /// Ends all links between two endpoints, as a network that loses everything for long.
    pub(crate) fn sever(&self, one: u16, other: u16) {
        let mut shared = self.shared.lock().unwrap();
        for (from, to) in [(one, other), (other, one)] {
            if let Some((wake, severed)) = shared.endpoints.get_mut(&from) {
                severed.push(to);
                wake.notify_one();
            }
        }
    }

    /// Ends all links of an endpoint whose process was killed.
    pub(crate) fn kill(&self, port: u16) {
        let mut shared = self.shared.lock().unwrap();
        shared.endpoints.remove(&port);
        for (wake, severed) in shared.endpoints.values_mut() {
            severed.push(port);
            wake.notify_one();
        }
    }

    /// How long events take at most from now on, in milliseconds.
    pub(crate) fn set_delay(&self, delay: u64) {
        self.shared.lock().unwrap().delay = delay;
    }

    fn wake_all(&self) {
        self.shared.lock().unwrap().endpoints.values().for_each(|(wake, _)| wake.notify_one());
    }
}

/// An agent's endpoint.
pub(crate) struct Links {
    network: Network,
    port: u16,
    inner: Loopback,
    links: BTreeMap<LinkId, Link>,
    /// When the next event comes.
    due: Arc<Mutex<Option<Instant>>>,
}

struct Link {
    peer: u16,
    /// Until when it is to be up; none once it is.
    deadline: Option<Instant>,
    events: VecDeque<(Instant, Delayed)>,
}

enum Delayed {
    Up,
    Received { header: Vec<u8>, payload: Option<(Landing, u32)>, posted: bool },
    Sent { tag: Tag },
    Down { reason: DownReason },
}

impl Links {
    /// Where it is said when the next event comes.
    pub(crate) fn due(&self) -> Arc<Mutex<Option<Instant>>> {
        Arc::clone(&self.due)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Takes the loopback's events in, each to come later than those before it on its link.
    fn take_in(&mut self, now: Instant, budget: usize) -> usize {
        let mut shared = self.network.shared.lock().unwrap();
        let waiting: usize = self.links.values().map(|link| link.events.len()).sum();
        if waiting >= shared.most {
            return 0;
        }
        let (mut came, links, delay) = (Vec::new(), &mut self.links, shared.delay);
        let count = self.inner.progress(budget, &mut |link, event| {
            came.push((
                link,
                match event {
                    Event::Up => Delayed::Up,
                    Event::Received { header, payload, posted } => {
                        Delayed::Received { header: header.to_vec(), payload, posted }
                    }
                    Event::Sent { tag } => Delayed::Sent { tag },
                    Event::Down { reason } => Delayed::Down { reason },
                },
            ));
        });
        for (id, event) in came {
            let Some(link) = links.get_mut(&id) else { continue };
            let after = Duration::from_millis(shared.random.random_range(0..=delay));
            let last = link.events.back().map_or(now, |(due, _)| *due);
            if matches!(event, Delayed::Up | Delayed::Down { .. }) {
                link.deadline = None;
            }
            link.events.push_back(((now + after).max(last), event));
        }
        count
    }

    /// Ends links that are severed, or did not come up in time.
    fn end_links(&mut self, now: Instant) {
        let severed = match self.network.shared.lock().unwrap().endpoints.get_mut(&self.port) {
            Some((_, severed)) => std::mem::take(severed),
            None => Vec::new(),
        };
        for (id, link) in &mut self.links {
            let late = link.deadline.is_some_and(|deadline| now >= deadline);
            let ends = link.events.iter().any(|(_, event)| matches!(event, Delayed::Down { .. }));
            if ends || !(late || severed.contains(&link.peer)) {
                continue;
            }
            let reason = match late {
                true => DownReason::Connect("the peer did not come in time".into()),
                false => DownReason::Network("severed".into()),
            };
            self.inner.close(*id);
            link.deadline = None;
            link.events.push_back((now, Delayed::Down { reason }));
        }
    }
}

impl Transport for Links {
    fn local_address(&self) -> SocketAddr {
        self.inner.local_address()
    }

    fn open(&mut self, introduction: Introduction) -> Result<LinkId, DownReason> {
        let peer = introduction.peer.port();
        let id = self.inner.open(introduction)?;
        let deadline = Some(Instant::now() + CONNECT);
        self.links.insert(id, Link { peer, deadline, events: VecDeque::new() });
        self.network.wake_all();
        Ok(id)
    }

    fn attach_ring(&mut self, link: LinkId, ring: u16, memory: Ring) -> Result<(), DownReason> {
        self.inner.attach_ring(link, ring, memory)
    }

    fn post(&mut self, link: LinkId, landing: Landing, span: Span) -> bool {
        self.inner.post(link, landing, span)
    }

    fn send(
        &mut self,
        link: LinkId,
        path: u16,
        header: &[u8],
        payload: Option<(Landing, Span, Tag)>,
    ) -> Result<(), SendError> {
        self.inner.send(link, path, header, payload)?;
        self.network.wake_all();
        Ok(())
    }

    fn progress(&mut self, budget: usize, sink: &mut dyn FnMut(LinkId, Event<'_>)) -> usize {
        let now = Instant::now();
        let mut done = self.take_in(now, budget);
        self.end_links(now);
        let mut ended = Vec::new();
        for (id, link) in &mut self.links {
            while done < budget
                && let Some((_, event)) = link.events.pop_front_if(|(due, _)| *due <= now)
            {
                done += 1;
                match event {
                    Delayed::Up => sink(*id, Event::Up),
                    Delayed::Received { header, payload, posted } => {
                        sink(*id, Event::Received { header: &header, payload, posted });
                    }
                    Delayed::Sent { tag } => sink(*id, Event::Sent { tag }),
                    Delayed::Down { reason } => {
                        ended.push(*id);
                        sink(*id, Event::Down { reason });
                    }
                }
            }
        }
        ended.iter().for_each(|id| drop(self.links.remove(id)));
        let next = self
            .links
            .values()
            .flat_map(|link| link.events.front().map(|(due, _)| *due).into_iter().chain(link.deadline));
        *self.due.lock().unwrap() = next.min();
        done
    }

    fn close(&mut self, link: LinkId) {
        if self.links.remove(&link).is_some() {
            self.inner.close(link);
            self.network.wake_all();
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_fd()
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.network.shared.lock().unwrap().endpoints.remove(&self.port);
        self.network.wake_all();
    }
}
