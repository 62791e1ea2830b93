//! A model of TCP flows through one bottleneck, in virtual time, and the records that telemetry makes of them.
//!
//! The bottleneck is a queue with a rate and a limit, as a shaper is, behind the point where packets are counted. Flows have a
//! window that grows with acknowledgements (slow start, then a piece a round trip) and halves on loss or on a mark. Hidden flows
//! share the queue and are not seen.

use harmonaize_analysis::trace::{Label, Link, Owner, Record};
use harmonaize_events::{Event, EventKind, FlowKey, Protocol, TcpFlow};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BinaryHeap;

pub const MS: u64 = 1_000_000;
pub const INTERFACE: u32 = 3;
const PACKETS: u64 = 8;
const PAYLOAD: f64 = 1448.0 * 8.0;
const WIRE: f64 = 1514.0 * 8.0;

/// Whose a flow is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowOwner {
    Own,
    CrossTraffic,
    UnseenCrossTraffic,
}

/// What an application sends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source {
    /// As much as it can.
    Greedy,
    /// So many bytes a second, in pieces at a distance that varies.
    Paced(f64),
    /// So many bytes at once, then a pause after they were acknowledged.
    Bursts { bytes: f64, pause_ns: u64 },
}

/// The bottleneck.
#[derive(Debug, Clone, Copy)]
pub struct Bottleneck {
    pub bytes_per_second: f64,
    /// The longest queue.
    pub limit_ns: f64,
    /// The round trip without a queue.
    pub base_ns: f64,
    /// A queue longer than this marks.
    pub mark_ns: Option<f64>,
    /// An acknowledgement is late by up to this, now and then by ten times as much.
    pub noise_ns: f64,
}

impl Default for Bottleneck {
    fn default() -> Self {
        Self { bytes_per_second: 125e6, limit_ns: 50e6, base_ns: 150e3, mark_ns: None, noise_ns: 60e3 }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Ack { sent_ns: u64, measured: bool, ecn_ce: bool },
    Loss,
    Send,
}

#[derive(Debug, PartialEq, Eq)]
struct Due {
    at_ns: std::cmp::Reverse<u64>,
    order: std::cmp::Reverse<u64>,
    flow: usize,
    action: Action,
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_ns, self.order).cmp(&(other.at_ns, other.order))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

struct Flow {
    owner: FlowOwner,
    source: Source,
    key: FlowKey,
    counters: TcpFlow,
    last_snapshot: TcpFlow,
    window: f64,
    threshold: f64,
    in_flight: f64,
    backlog: f64,
    halved_ns: u64,
    measuring: bool,
    repeat: u64,
    stops_ns: u64,
}

/// Flows through the bottleneck.
pub struct World {
    pub bottleneck: Bottleneck,
    /// The local port of the first flow; further ones follow.
    pub first_port: u16,
    /// A round trip that is longer than the least by this, and by the least, is told where the one before was not; 0: none is.
    pub late_ns: u64,
    random: ChaCha8Rng,
    now_ns: u64,
    free_ns: f64,
    flows: Vec<Flow>,
    due: BinaryHeap<Due>,
    order: u64,
    events: Vec<Record>,
}

impl World {
    pub fn new(bottleneck: Bottleneck, seed: u64) -> Self {
        Self {
            bottleneck,
            first_port: 10_000,
            late_ns: 0,
            random: ChaCha8Rng::seed_from_u64(seed),
            now_ns: 1_000 * MS,
            free_ns: 0.0,
            flows: Vec::new(),
            due: BinaryHeap::new(),
            order: 0,
            events: Vec::new(),
        }
    }

    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// The queue that a packet would find now.
    pub fn queue_ns(&self) -> f64 {
        (self.free_ns - self.now_ns as f64).max(0.0)
    }

    /// Says what the link can carry; 0 for what is not known.
    pub fn link(&self, bytes_per_second: u64) -> Record {
        let name = Label::new("uplink");
        Record::Link(Link {
            time_ns: self.now_ns,
            interface: INTERFACE,
            name,
            bytes_per_second,
            watched: true,
        })
    }

    /// A flow to a host that begins at a time, and stops at another. The record says whose it is.
    pub fn add(
        &mut self,
        whose: FlowOwner,
        host: u32,
        source: Source,
        from_ns: u64,
        until_ns: u64,
    ) -> Record {
        let flow = self.flows.len();
        let key = FlowKey {
            local: FlowKey::mapped(1),
            remote: FlowKey::mapped(100 + host),
            local_port: self.first_port + flow as u16,
            remote_port: 5000,
            interface: INTERFACE,
            protocol: Protocol::Tcp as u8,
            ..FlowKey::default()
        };
        self.flows.push(Flow {
            owner: whose,
            source,
            key,
            counters: TcpFlow::default(),
            last_snapshot: TcpFlow::default(),
            window: 10.0 * 1448.0,
            threshold: f64::INFINITY,
            in_flight: 0.0,
            backlog: 0.0,
            halved_ns: 0,
            measuring: false,
            repeat: 0,
            stops_ns: until_ns,
        });
        self.plan(from_ns, flow, Action::Send);
        let (tenant, communicator) = (Label::new("tenant"), 1);
        let owner = Owner {
            time_ns: self.now_ns,
            flow: key,
            tenant,
            communicator,
            epoch: 0,
            from: 0,
            to: host,
            owned: true,
        };
        Record::Owner(Owner { owned: whose == FlowOwner::Own, ..owner })
    }

    fn plan(&mut self, at_ns: u64, flow: usize, what: Action) {
        self.order += 1;
        let at_ns = std::cmp::Reverse(at_ns);
        self.due.push(Due { at_ns, order: std::cmp::Reverse(self.order), flow, action: what });
    }

    /// Runs until a time, and hands out what a reading then finds: events, and flows that have changed.
    pub fn poll(&mut self, until_ns: u64, mut take: impl FnMut(&Record)) {
        self.run(until_ns, &mut take);
        for flow in &mut self.flows {
            if flow.owner != FlowOwner::UnseenCrossTraffic && flow.counters != flow.last_snapshot {
                flow.last_snapshot = flow.counters;
                take(&Record::Tcp { time_ns: until_ns, key: flow.key, flow: flow.counters });
            }
        }
    }

    /// Runs until a time, and hands out events alone.
    pub fn run(&mut self, until_ns: u64, take: impl FnMut(&Record)) {
        while let Some(due) = self.due.peek() {
            if due.at_ns.0 > until_ns {
                break;
            }
            let Some(due) = self.due.pop() else { break };
            self.now_ns = self.now_ns.max(due.at_ns.0);
            match due.action {
                Action::Send => self.wake(due.flow),
                Action::Ack { sent_ns, measured, ecn_ce: marked } => {
                    self.acknowledge(due.flow, sent_ns, measured, marked)
                }
                Action::Loss => self.lose(due.flow),
            }
            self.send(due.flow);
        }
        self.now_ns = until_ns;
        let events: Vec<Record> = self.events.drain(..).collect();
        events.iter().for_each(take);
    }

    /// The application has something to send.
    fn wake(&mut self, index: usize) {
        let now_ns = self.now_ns;
        let flow = &mut self.flows[index];
        if now_ns >= flow.stops_ns {
            flow.backlog = 0.0;
            return;
        }
        match flow.source {
            Source::Greedy => flow.backlog = f64::INFINITY,
            Source::Paced(rate) => {
                flow.backlog += PAYLOAD;
                let gap = PAYLOAD / rate * 1e9 * self.random.random_range(0.2..1.8);
                self.plan(now_ns + gap as u64, index, Action::Send);
            }
            Source::Bursts { bytes, .. } => flow.backlog = bytes,
        }
    }

    fn send(&mut self, index: usize) {
        let now_ns = self.now_ns;
        loop {
            let queue_ns = self.queue_ns();
            let bottleneck = self.bottleneck;
            let flow = &mut self.flows[index];
            if now_ns >= flow.stops_ns {
                flow.backlog = 0.0;
            }
            let again = flow.repeat > 0;
            if flow.in_flight + PAYLOAD > flow.window.max(PAYLOAD) || (flow.backlog < PAYLOAD && !again) {
                return;
            }
            flow.in_flight += PAYLOAD;
            count(&mut flow.counters, now_ns);
            let mut event = None;
            if again {
                flow.repeat -= 1;
                flow.counters.egress.retransmissions += PACKETS;
                let key = FlowKey { direction: 2, ..flow.key };
                let (kind, total) = (EventKind::Retransmission as u32, flow.counters.egress.retransmissions);
                event = Some(Event { time_ns: now_ns, flow: key, kind, total, ..Event::default() });
            } else {
                flow.backlog -= PAYLOAD;
            }
            let measured = !flow.measuring && !again;
            if measured {
                flow.measuring = true;
                flow.counters.egress.measured_ns = now_ns;
                flow.counters.egress.measured_bytes = flow.counters.egress.traffic.bytes as u32;
                flow.counters.egress.measured_size = WIRE as u32;
            }
            let hidden = flow.owner == FlowOwner::UnseenCrossTraffic;
            self.events.extend(event.filter(|_| !hidden).map(Record::Event));
            if queue_ns > bottleneck.limit_ns {
                if measured {
                    self.flows[index].measuring = false;
                    self.flows[index].counters.egress.measured_ns = 0;
                }
                self.plan(now_ns + (queue_ns + bottleneck.base_ns) as u64, index, Action::Loss);
                continue;
            }
            self.free_ns = self.free_ns.max(now_ns as f64) + WIRE / bottleneck.bytes_per_second * 1e9;
            let slow = if self.random.random_bool(0.01) { 10.0 } else { 1.0 };
            let noise = self.random.random::<f64>() * bottleneck.noise_ns * slow;
            let marked = bottleneck.mark_ns.is_some_and(|mark_ns| queue_ns > mark_ns);
            let back_ns = (self.free_ns + bottleneck.base_ns + noise) as u64;
            self.plan(back_ns, index, Action::Ack { sent_ns: now_ns, measured, ecn_ce: marked });
        }
    }

    fn acknowledge(&mut self, index: usize, sent_ns: u64, measured: bool, marked: bool) {
        let now_ns = self.now_ns;
        let flow = &mut self.flows[index];
        flow.in_flight -= PAYLOAD;
        flow.window += if flow.window < flow.threshold { PAYLOAD } else { PAYLOAD * PAYLOAD / flow.window };
        flow.window = flow.window.min(4e6);
        let ingress = &mut flow.counters.ingress;
        ingress.traffic.packets += PACKETS / 2;
        ingress.traffic.bytes += PACKETS / 2 * 66;
        ingress.traffic.first_ns = ingress.traffic.first_ns.max(1).min(now_ns);
        ingress.traffic.last_ns = now_ns;
        ingress.traffic.burst_began_ns = ingress.traffic.first_ns;
        if measured {
            flow.measuring = false;
            flow.counters.egress.measured_ns = 0;
            let trip = now_ns - sent_ns;
            let trips = &mut flow.counters.egress.rtt;
            trips.min_ns = if trips.count == 0 { trip } else { trips.min_ns.min(trip) };
            let (least_ns, late_ns) = (trips.min_ns, self.late_ns.max(trips.min_ns));
            let late = trip - least_ns >= late_ns;
            let (before_ns, count) = (trips.last_ns, trips.count as u32 + 1);
            (trips.last_ns, trips.sum_ns, trips.count) = (trip, trips.sum_ns + trip, trips.count + 1);
            let egress = &mut flow.counters.egress;
            let (sent, all) = (egress.measured_bytes, egress.traffic.bytes);
            let before = std::mem::replace(&mut egress.bytes_before, sent);
            let ended = std::mem::replace(&mut egress.ended, (now_ns >> 10) as u32);
            if late && self.late_ns > 0 && flow.owner != FlowOwner::UnseenCrossTraffic {
                self.events.push(Record::Event(Event {
                    time_ns: now_ns,
                    flow: FlowKey { direction: 2, ..flow.key },
                    kind: EventKind::LateRtt as u32,
                    count,
                    total: all - u64::from((all as u32).wrapping_sub(sent)),
                    burst_began_ns: sent_ns - before_ns,
                    burst_ended_ns: sent_ns,
                    burst_bytes: sent.wrapping_sub(before).into(),
                    paused_ns: ((sent_ns >> 10) as u32).wrapping_sub(ended).saturating_mul(1 << 10),
                    size: egress.measured_size,
                }));
            }
        }
        if marked {
            flow.counters.ingress.ece += PACKETS / 2;
            halve(flow, now_ns, now_ns - sent_ns);
        }
        if let Source::Bursts { pause_ns, .. } = flow.source
            && flow.in_flight < 1.0
            && flow.backlog < PAYLOAD
        {
            let pause_ns = (pause_ns as f64 * self.random.random_range(0.8..1.2)) as u64;
            self.plan(now_ns + pause_ns, index, Action::Send);
        }
    }

    fn lose(&mut self, index: usize) {
        let now_ns = self.now_ns;
        let flow = &mut self.flows[index];
        flow.in_flight -= PAYLOAD;
        flow.repeat += 1;
        halve(flow, now_ns, self.bottleneck.limit_ns as u64);
    }
}

/// Slows a flow down, once a round trip.
fn halve(flow: &mut Flow, now_ns: u64, trip_ns: u64) {
    if now_ns.saturating_sub(flow.halved_ns) > trip_ns {
        flow.window = (flow.window / 2.0).max(2.0 * PAYLOAD);
        (flow.threshold, flow.halved_ns) = (flow.window, now_ns);
    }
}

/// A buffer of packets leaves.
fn count(counters: &mut TcpFlow, now_ns: u64) {
    let traffic = &mut counters.egress.traffic;
    if traffic.first_ns == 0 {
        (traffic.first_ns, traffic.burst_began_ns) = (now_ns, now_ns);
    } else if now_ns - traffic.last_ns > 500_000 {
        (traffic.burst_began_ns, traffic.burst_after) = (now_ns, traffic.bytes);
    }
    traffic.last_ns = now_ns;
    traffic.packets += PACKETS;
    traffic.bytes += WIRE as u64;
}
