//! A model of TCP flows through one bottleneck, in virtual time, and the records that telemetry makes of them.
//!
//! The bottleneck is a queue with a rate and a limit, as a shaper is, behind the point where packets are counted. Flows have a
//! window that grows with acknowledgements (slow start, then a piece a round trip) and halves on loss or on a mark. Hidden flows
//! share the queue and are not seen. Other disciplines have more than one queue, or mark.

use harmonaize_analysis::trace::{Label, Link, Owner, Record};
use harmonaize_analysis::{CommunicatorId, Epoch};
use harmonaize_events::{Event, EventKind, FlowKey, Protocol, TcpFlow};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BinaryHeap, VecDeque};

pub const MS: u64 = 1_000_000;
pub const INTERFACE: u32 = 3;
const PAYLOAD: f64 = 1448.0;
const WIRE: f64 = 1514.0;

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

/// How a bottleneck queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discipline {
    /// One queue that drops at its end, and marks what finds it long where marks are: tbf.
    DropTail,
    /// A queue for each flow, served in turn. What left a queue of 5 ms is marked or dropped after 100 ms, then ever more often: fq_codel.
    FqCodel,
    /// A class for our own flows and one for all others, served in turn. Each has half of the rate, and what the other leaves. HTB.
    Htb,
    /// One queue that marks with a probability that grows with its mean length: RED with ECN.
    Red,
}

/// The bottleneck.
#[derive(Debug, Clone, Copy)]
pub struct Bottleneck {
    pub discipline: Discipline,
    /// Packets of a piece that a host hands over at once.
    pub packets: u64,
    pub bytes_per_second: f64,
    /// The longest queue.
    pub limit_ns: f64,
    /// The round trip without a queue.
    pub base_ns: f64,
    /// A queue longer than this marks.
    pub mark_ns: Option<f64>,
    /// An acknowledgement is late by up to this, now and then by ten times as much.
    pub noise_ns: f64,
    /// The most bytes that a flow has under way, as its host's buffers allow.
    pub most_in_flight: f64,
}

impl Default for Bottleneck {
    fn default() -> Self {
        Self {
            discipline: Discipline::DropTail,
            packets: 8,
            bytes_per_second: 125e6,
            limit_ns: 50e6,
            base_ns: 150e3,
            mark_ns: None,
            noise_ns: 60e3,
            most_in_flight: 4e6,
        }
    }
}

impl Bottleneck {
    /// Bytes of a piece, and the same on the wire.
    fn payload(&self) -> f64 {
        PAYLOAD * self.packets as f64
    }

    fn wire(&self) -> f64 {
        WIRE * self.packets as f64
    }

    /// How long the link takes for a piece.
    fn serialization_ns(&self) -> f64 {
        self.wire() / self.bytes_per_second * 1e9
    }
}

/// A piece in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    flow: usize,
    sent_ns: u64,
    measured: bool,
    ecn_ce: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Served(Piece),
    Ack(Piece),
    Loss,
    Send,
}

/// One of several queues.
#[derive(Default)]
struct Queue {
    pieces: VecDeque<Piece>,
    /// When CoDel marks or drops next, and how often it has.
    next_ns: Option<u64>,
    count: u32,
}

impl Queue {
    /// Whether CoDel marks or drops the piece that leaves now.
    fn codel(&mut self, now_ns: u64, sent_ns: u64) -> bool {
        const TARGET_NS: u64 = 5 * MS;
        const INTERVAL_NS: u64 = 100 * MS;
        if now_ns - sent_ns < TARGET_NS || self.pieces.is_empty() {
            (self.next_ns, self.count) = (None, 0);
            return false;
        }
        let next_ns = *self.next_ns.get_or_insert(now_ns + INTERVAL_NS);
        if now_ns < next_ns {
            return false;
        }
        self.count += 1;
        self.next_ns = Some(next_ns + (INTERVAL_NS as f64 / f64::from(self.count).sqrt()) as u64);
        true
    }
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
    /// A round trip that is longer than the least by this, and by the least, is reported. The one before must not have been;
    /// 0: none is.
    pub late_ns: u64,
    random: ChaCha8Rng,
    /// How long own pieces waited all together, and how many that were.
    pub waited: (f64, u64),
    now_ns: u64,
    free_ns: f64,
    /// What RED takes for the length of its queue.
    mean_ns: f64,
    queues: Vec<Queue>,
    /// The queue that is served, if one is, or was last.
    turn: usize,
    serves: bool,
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
            waited: (0.0, 0),
            now_ns: 1_000 * MS,
            free_ns: 0.0,
            mean_ns: 0.0,
            queues: vec![Queue::default()],
            turn: 0,
            serves: false,
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

    /// Bytes that an owner's flows have sent.
    pub fn sent(&self, owner: FlowOwner) -> u64 {
        let own = self.flows.iter().filter(|flow| flow.owner == owner);
        own.map(|flow| flow.counters.egress.traffic.bytes).sum()
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
        self.queues.push(Queue::default());
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
        let (tenant, communicator) = (Label::new("tenant"), CommunicatorId(1));
        let owner = Owner {
            time_ns: self.now_ns,
            flow: key,
            tenant,
            communicator,
            epoch: Epoch(0),
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
                Action::Served(piece) => {
                    self.depart(piece);
                    self.serve();
                }
                Action::Ack(piece) => self.acknowledge(piece),
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
        let (now_ns, payload) = (self.now_ns, self.bottleneck.payload());
        let flow = &mut self.flows[index];
        if now_ns >= flow.stops_ns {
            flow.backlog = 0.0;
            return;
        }
        match flow.source {
            Source::Greedy => flow.backlog = f64::INFINITY,
            Source::Paced(rate) => {
                flow.backlog += payload;
                let gap = payload / rate * 1e9 * self.random.random_range(0.2..1.8);
                self.plan(now_ns + gap as u64, index, Action::Send);
            }
            Source::Bursts { bytes, .. } => flow.backlog = bytes,
        }
    }

    fn send(&mut self, index: usize) {
        let now_ns = self.now_ns;
        let bottleneck = self.bottleneck;
        let payload = bottleneck.payload();
        loop {
            let place = self.place(index);
            let queue_ns = match bottleneck.discipline {
                Discipline::DropTail | Discipline::Red => self.queue_ns(),
                _ => self.queues[place].pieces.len() as f64 * bottleneck.serialization_ns(),
            };
            let flow = &mut self.flows[index];
            if now_ns >= flow.stops_ns {
                flow.backlog = 0.0;
            }
            let again = flow.repeat > 0;
            if flow.in_flight + payload > flow.window.max(payload) || (flow.backlog < payload && !again) {
                return;
            }
            flow.in_flight += payload;
            count(&mut flow.counters, now_ns, &bottleneck);
            let mut event = None;
            if again {
                flow.repeat -= 1;
                flow.counters.egress.retransmissions += bottleneck.packets;
                let key = FlowKey { direction: 2, ..flow.key };
                let (kind, total) = (EventKind::Retransmission as u32, flow.counters.egress.retransmissions);
                event = Some(Event { time_ns: now_ns, flow: key, kind, total, ..Event::default() });
            } else {
                flow.backlog -= payload;
            }
            let measured = !flow.measuring && !again;
            if measured {
                flow.measuring = true;
                flow.counters.egress.measured_ns = now_ns;
                flow.counters.egress.measured_bytes = flow.counters.egress.traffic.bytes as u32;
                flow.counters.egress.measured_size = bottleneck.wire() as u32;
            }
            let hidden = flow.owner == FlowOwner::UnseenCrossTraffic;
            self.events.extend(event.filter(|_| !hidden).map(Record::Event));
            if queue_ns > bottleneck.limit_ns {
                let piece = Piece { flow: index, sent_ns: now_ns, measured, ecn_ce: false };
                self.discard(piece, queue_ns);
                continue;
            }
            let ecn_ce = match bottleneck.discipline {
                Discipline::DropTail => bottleneck.mark_ns.is_some_and(|mark_ns| queue_ns > mark_ns),
                Discipline::Red => self.red(queue_ns),
                _ => false,
            };
            let piece = Piece { flow: index, sent_ns: now_ns, measured, ecn_ce };
            if matches!(bottleneck.discipline, Discipline::DropTail | Discipline::Red) {
                self.free_ns = self.free_ns.max(now_ns as f64) + bottleneck.serialization_ns();
                self.depart(piece);
            } else {
                self.queues[place].pieces.push_back(piece);
                if !self.serves {
                    self.serve();
                }
            }
        }
    }

    /// The queue of a flow.
    fn place(&self, flow: usize) -> usize {
        match self.bottleneck.discipline {
            Discipline::DropTail | Discipline::Red => 0,
            Discipline::FqCodel => flow,
            Discipline::Htb => usize::from(self.flows[flow].owner != FlowOwner::Own),
        }
    }

    /// Whether RED marks what finds such a queue.
    fn red(&mut self, queue_ns: f64) -> bool {
        // A five hundredth for each packet, as is usual.
        self.mean_ns += (queue_ns - self.mean_ns) * self.bottleneck.packets as f64 / 512.0;
        let (least, most) = (self.bottleneck.limit_ns / 12.0, self.bottleneck.limit_ns / 4.0);
        let above = (self.mean_ns - least) / (most - least);
        above >= 1.0 || self.random.random::<f64>() < 0.1 * above
    }

    /// The link takes up the next piece, of each queue in turn.
    fn serve(&mut self) {
        let (now_ns, count) = (self.now_ns, self.queues.len());
        loop {
            let mut places = (1..=count).map(|step| (self.turn + step) % count);
            let next = places.find(|place| !self.queues[*place].pieces.is_empty());
            self.serves = next.is_some();
            let Some(place) = next else { return };
            self.turn = place;
            let queue = &mut self.queues[place];
            let Some(mut piece) = queue.pieces.pop_front() else { return };
            if self.bottleneck.discipline == Discipline::FqCodel && queue.codel(now_ns, piece.sent_ns) {
                if self.bottleneck.mark_ns.is_none() {
                    self.discard(piece, 0.0);
                    continue;
                }
                piece.ecn_ce = true;
            }
            self.free_ns = self.free_ns.max(now_ns as f64) + self.bottleneck.serialization_ns();
            self.plan(self.free_ns as u64, piece.flow, Action::Served(piece));
            return;
        }
    }

    /// A piece has left the link when that is free again.
    fn depart(&mut self, piece: Piece) {
        if self.flows[piece.flow].owner == FlowOwner::Own {
            self.waited.0 += self.free_ns - piece.sent_ns as f64;
            self.waited.1 += 1;
        }
        let slow = if self.random.random_bool(0.01) { 10.0 } else { 1.0 };
        let noise = self.random.random::<f64>() * self.bottleneck.noise_ns * slow;
        let back_ns = (self.free_ns + self.bottleneck.base_ns + noise) as u64;
        self.plan(back_ns, piece.flow, Action::Ack(piece));
    }

    /// A piece is dropped, which its sender learns once what is before it in the queue has come through.
    fn discard(&mut self, piece: Piece, queue_ns: f64) {
        if piece.measured {
            self.flows[piece.flow].measuring = false;
            self.flows[piece.flow].counters.egress.measured_ns = 0;
        }
        self.plan(self.now_ns + (queue_ns + self.bottleneck.base_ns) as u64, piece.flow, Action::Loss);
    }

    fn acknowledge(&mut self, piece: Piece) {
        let Piece { flow: index, sent_ns, measured, ecn_ce: marked } = piece;
        let (now_ns, most) = (self.now_ns, self.bottleneck.most_in_flight);
        let (payload, packets) = (self.bottleneck.payload(), self.bottleneck.packets);
        let flow = &mut self.flows[index];
        flow.in_flight -= payload;
        flow.window += if flow.window < flow.threshold { payload } else { payload * payload / flow.window };
        flow.window = flow.window.min(most);
        let ingress = &mut flow.counters.ingress;
        ingress.traffic.packets += packets / 2;
        ingress.traffic.bytes += packets / 2 * 66;
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
            flow.counters.ingress.ece += packets / 2;
            halve(flow, now_ns, now_ns - sent_ns, payload);
        }
        if let Source::Bursts { pause_ns, .. } = flow.source
            && flow.in_flight < 1.0
            && flow.backlog < payload
        {
            let pause_ns = (pause_ns as f64 * self.random.random_range(0.8..1.2)) as u64;
            self.plan(now_ns + pause_ns, index, Action::Send);
        }
    }

    fn lose(&mut self, index: usize) {
        let (now_ns, payload) = (self.now_ns, self.bottleneck.payload());
        let flow = &mut self.flows[index];
        flow.in_flight -= payload;
        flow.repeat += 1;
        halve(flow, now_ns, self.bottleneck.limit_ns as u64, payload);
    }
}

/// Slows a flow down, once a round trip.
fn halve(flow: &mut Flow, now_ns: u64, trip_ns: u64, payload: f64) {
    if now_ns.saturating_sub(flow.halved_ns) > trip_ns {
        flow.window = (flow.window / 2.0).max(2.0 * payload);
        (flow.threshold, flow.halved_ns) = (flow.window, now_ns);
    }
}

/// A buffer of packets leaves.
fn count(counters: &mut TcpFlow, now_ns: u64, bottleneck: &Bottleneck) {
    let traffic = &mut counters.egress.traffic;
    if traffic.first_ns == 0 {
        (traffic.first_ns, traffic.burst_began_ns) = (now_ns, now_ns);
    } else if now_ns - traffic.last_ns > 500_000 {
        (traffic.burst_began_ns, traffic.burst_after) = (now_ns, traffic.bytes);
    }
    traffic.last_ns = now_ns;
    traffic.packets += bottleneck.packets;
    traffic.bytes += bottleneck.wire() as u64;
}
