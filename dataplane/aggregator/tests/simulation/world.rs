//! The simulated world: virtual time, a network, hosts, aggregators, and the invariants that are looked at as it goes.

use super::coded;
use super::node::{Memory, Node};
use super::roles::{ROOT_SECRET, above, aggregator, grant, new_leader, new_worker, workers_of};
use super::scenario::{Incident, Kind as Act, MICROSECOND, Scenario};
use harmonaize_abi::{GrantId, SegmentId, SegmentIndex};
use harmonaize_aggregator::packet::Kind;
use harmonaize_aggregator::{
    Aggregator, Agreement, Audience, Event, Key, Leader, Recipient, Share, Summation,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

pub(crate) const COMMUNICATOR: GrantId = GrantId(0x5eed_c0de);
/// Nothing takes longer.
pub(crate) const BOUND: Duration = Duration::from_secs(4);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    Worker(usize),
    Aggregator(usize),
}

#[derive(Debug)]
enum What {
    Packet(Place, Vec<u8>),
    Timer(usize),
    Refused(usize),
    LeaderTimer,
    Message { from: usize, to: usize, alive: (u32, u32), message: Agreement },
    Summed { worker: usize, session: u64, segment: u64 },
    Ready,
}

/// What a run came to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Statistics {
    pub(crate) packets: u64,
    pub(crate) lost: u64,
    pub(crate) by_aggregator: u64,
    pub(crate) by_hosts: u64,
    pub(crate) sessions: u64,
    /// Packets with wrong tags.
    pub(crate) tag: u64,
    pub(crate) hostile: u64,
    pub(crate) again: u64,
    /// Broadcasts that were there before another worker had come to them.
    pub(crate) ahead: u64,
}

pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) random: ChaCha8Rng,
    pub(crate) now: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    events: BTreeMap<u64, What>,
    number: u64,
    pub(crate) nodes: Vec<Node>,
    pub(crate) leader: Leader,
    pub(crate) aggregators: Vec<Option<Aggregator>>,
    /// Last delivery from one worker to another.
    links: BTreeMap<(usize, usize), Duration>,
    hosts: BTreeMap<(u64, u64), BTreeSet<usize>>,
    /// Packets that somebody has kept.
    pub(crate) captured: Vec<(Place, Vec<u8>)>,
    begins: Vec<(Place, Vec<u8>)>,
    /// The latest packets.
    sent: VecDeque<(Place, Vec<u8>)>,
    pub(crate) statistics: Statistics,
    pub(crate) killed: Option<Duration>,
    /// When hosts summed the first segment after the aggregator was killed.
    pub(crate) recovered: Option<Duration>,
}

impl World {
    pub(crate) fn new(scenario: Scenario) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(scenario.seed);
        let inputs: Vec<Vec<Vec<i32>>> = (0..scenario.workers)
            .map(|_| {
                let segment = |elements: &u64| (0..*elements).map(|_| random.random()).collect();
                scenario.segments.iter().map(segment).collect()
            })
            .collect();
        let sum = |segment: usize, element: usize| {
            if let Act::Broadcast(root) = scenario.kind(segment as u64) {
                return inputs[root][segment][element];
            }
            let parts = inputs.iter().map(|input| input[segment][element]);
            if scenario.kind(segment as u64) == Act::Greatest {
                return parts.max().unwrap();
            }
            parts.fold(0, i32::wrapping_add)
        };
        let expected: Vec<Vec<i32>> = (scenario.segments.iter().enumerate())
            .map(|(segment, elements)| (0..*elements as usize).map(|element| sum(segment, element)).collect())
            .collect();
        let (expected, codes) = if scenario.coded { coded::of(&scenario, &inputs) } else { (expected, None) };
        let nodes = inputs.into_iter().enumerate().map(|(index, inputs)| Node {
            incarnation: 1,
            worker: new_worker(&scenario, index),
            memory: Memory {
                inputs,
                outputs: expected.iter().map(|segment| vec![None; segment.len()]).collect(),
                expected: expected.clone(),
                written: BTreeSet::new(),
                host: index,
                codes: codes.clone(),
            },
            session: 0,
            summation: None,
            done: 0,
            done_everywhere: 0,
            next: 0,
            entered: 0,
            timer: None,
            knocks: false,
        });
        let mut world = Self {
            nodes: nodes.collect(),
            leader: new_leader(&scenario, 1),
            aggregators: (0..=scenario.leaves)
                .map(|index| Some(aggregator(&scenario, index, 1 + index as u64)))
                .collect(),
            scenario,
            random,
            now: Duration::ZERO,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            number: 0,
            links: BTreeMap::new(),
            hosts: BTreeMap::new(),
            captured: Vec::new(),
            begins: Vec::new(),
            sent: VecDeque::new(),
            statistics: Statistics::default(),
            killed: None,
            recovered: None,
        };
        let (audience, message) = world.leader.restart();
        world.send_agreement(audience, message);
        if let Some((_, _, late)) = world.scenario.straggler {
            world.at(late, What::Ready);
        }
        world
    }

    fn at(&mut self, time: Duration, what: What) {
        self.number += 1;
        self.queue.push(Reverse((time, self.number)));
        self.events.insert(self.number, what);
    }

    pub(crate) fn done(&self) -> bool {
        let (session, segments) = (self.nodes[0].session, self.scenario.segments.len() as u64);
        self.nodes
            .iter()
            .all(|node| node.done == segments && node.session == session && node.summation.is_some())
    }

    /// Runs until all have all.
    pub(crate) fn run(&mut self) {
        while !self.done() {
            let Some(Reverse((time, number))) = self.queue.pop() else { panic!("it hangs\n{self:?}") };
            assert!(time < BOUND, "it takes too long\n{self:?}");
            self.now = time;
            match self.events.remove(&number).unwrap() {
                What::Packet(place, bytes) => self.deliver(&place, &bytes),
                What::Timer(index) => {
                    self.nodes[index].timer = None;
                    self.turn(index);
                }
                What::Refused(index) => {
                    self.nodes[index].worker.handle_refused(self.now);
                    self.turn(index);
                }
                What::LeaderTimer => {
                    if let Some(session) = self.leader.poll(self.now) {
                        self.nodes[0].worker.begin(self.now, session);
                        self.nodes[0].knocks = true;
                        self.turn(0);
                    }
                }
                What::Message { from, to, alive, message } => {
                    if alive == (self.nodes[from].incarnation, self.nodes[to].incarnation) {
                        self.message(from, to, message);
                    }
                }
                What::Summed { worker, session, segment } => self.summed(worker, session, segment),
                What::Ready => (0..self.nodes.len()).for_each(|index| self.turn(index)),
            }
        }
        for node in &self.nodes {
            assert!(node.memory.holds(u64::MAX), "something is missing");
        }
    }

    fn incidents(&mut self) {
        let at = self.statistics.packets;
        let due: Vec<Incident> =
            self.scenario.incidents.iter().filter(|(when, _)| *when == at).map(|(_, what)| *what).collect();
        self.statistics.packets += 1;
        for incident in due {
            match incident {
                Incident::RestartWorker(index) => self.restart(index),
                Incident::RestartAggregator(index) => {
                    if self.aggregators[index].is_some() {
                        let incarnation = self.random.random_range(1000..u64::MAX);
                        self.aggregators[index] = Some(aggregator(&self.scenario, index, incarnation));
                        // What was long on its way comes after all: the session seems to begin.
                        for (place, packet) in self.begins.clone() {
                            if place == Place::Aggregator(index) && self.random.random() {
                                self.later(place, packet);
                            }
                        }
                    }
                }
                Incident::KillAggregator(index) => {
                    self.aggregators[index] = None;
                    self.killed = Some(self.now);
                    if self.scenario.replaying {
                        for again in 1..100 {
                            for (place, packet) in self.sent.clone() {
                                self.at(self.now + 500 * again * MICROSECOND, What::Packet(place, packet));
                            }
                        }
                    }
                }
                Incident::Squeeze => {
                    let grain = if self.scenario.ordered { self.scenario.workers as u32 } else { 1 };
                    let share = Share { tenant: 2, weight: 5, guaranteed: 0, most: 1 << 20 };
                    let (other_id, mut other) = (GrantId(2), grant(&self.scenario, 0));
                    (other.communicator, other.parent, other.ordered) = (other_id, None, false);
                    other.share = Share { guaranteed: 2.min(self.scenario.units - 2 * grain), ..share };
                    if let Some(aggregator) = &mut self.aggregators[0] {
                        // Where nothing is left to be guaranteed, nobody is admitted.
                        if aggregator.grant(other).is_ok() {
                            let key = Key::derive(&ROOT_SECRET, other_id, 0);
                            let begin = super::hostile::begin(other_id, 0, 1, &key);
                            aggregator.receive(self.now, &begin, &mut |_: Recipient, _: &[u8]| ());
                        }
                    }
                }
            }
        }
    }

    fn deliver(&mut self, place: &Place, bytes: &[u8]) {
        self.incidents();
        match place {
            Place::Worker(index) => {
                let node = &mut self.nodes[*index];
                node.worker.receive(self.now, bytes, &mut node.memory);
                self.turn(*index);
            }
            Place::Aggregator(index) => {
                let mut sent = Vec::new();
                let Some(aggregator) = &mut self.aggregators[*index] else {
                    return self.nobody_is_there(*index, bytes);
                };
                aggregator.receive(self.now, bytes, &mut |to: Recipient, packet: &[u8]| {
                    sent.push((to, packet.to_vec()))
                });
                for (to, packet) in sent {
                    match to {
                        Recipient::Parent { .. } => self.send(Place::Aggregator(0), packet),
                        Recipient::Worker { communicator, worker } => {
                            assert_eq!(communicator, COMMUNICATOR);
                            self.send(self.below(*index, worker), packet);
                        }
                    }
                }
            }
        }
    }

    /// A packet to a dead aggregator: its sender may be told.
    fn nobody_is_there(&mut self, aggregator: usize, packet: &[u8]) {
        let known = self.scenario.refusing && packet.len() > 8;
        let worker = if known { u16::from_le_bytes([packet[4], packet[5]]) } else { return };
        if usize::from(worker) < workers_of(&self.scenario, aggregator)
            && let Place::Worker(index) = self.below(aggregator, worker)
        {
            self.at(self.now + 5 * MICROSECOND, What::Refused(index));
        }
    }

    /// Somebody says to a host that nobody is there.
    pub(crate) fn lie(&mut self) {
        let index = self.random.random_range(0..self.nodes.len());
        self.at(self.now + MICROSECOND, What::Refused(index));
    }

    /// Who worker `worker` of an aggregator is.
    fn below(&self, aggregator: usize, worker: u16) -> Place {
        let (worker, Scenario { leaves, direct, .. }) = (usize::from(worker), &self.scenario);
        if *leaves == 0 || (aggregator == 0 && worker < *direct) {
            Place::Worker(worker)
        } else if aggregator == 0 {
            Place::Aggregator(1 + worker - direct)
        } else {
            Place::Worker(direct + worker * leaves + aggregator - 1)
        }
    }

    fn chance(&mut self, of_ten_thousand: u32) -> bool {
        of_ten_thousand > 0 && self.random.random_range(0..10_000) < of_ten_thousand
    }

    pub(crate) fn send(&mut self, place: Place, mut packet: Vec<u8>) {
        if packet[3] == Kind::Begin as u8 {
            self.begins.push((place.clone(), packet.clone()));
        }
        self.sent.push_back((place.clone(), packet.clone()));
        if self.sent.len() > 48 {
            self.sent.pop_front();
        }
        if self.chance(self.scenario.hostility) {
            self.hostile(&place, &packet);
        }
        if self.chance(self.scenario.loss) {
            self.statistics.lost += 1;
            return;
        }
        if self.chance(self.scenario.duplication) {
            self.later(place.clone(), packet.clone());
        }
        if self.chance(self.scenario.corruption) {
            let bit = self.random.random_range(0..packet.len() * 8);
            packet[bit / 8] ^= 1 << (bit % 8);
        }
        self.later(place, packet);
    }

    pub(crate) fn later(&mut self, place: Place, packet: Vec<u8>) {
        let mut delay = 5 + self.random.random_range(0..10);
        if self.chance(self.scenario.reordering) {
            delay += self.random.random_range(0..3000);
        }
        self.at(self.now + MICROSECOND * delay, What::Packet(place, packet));
    }

    /// Lets a host do all that it can do now.
    fn turn(&mut self, index: usize) {
        self.submit(index);
        let place = Place::Aggregator(above(&self.scenario, index));
        let mut packet = [0; 1024];
        loop {
            let node = &mut self.nodes[index];
            if let Some(bytes) = node.worker.poll_transmit(self.now, &node.memory, &mut packet) {
                self.send(place.clone(), packet[..bytes].to_vec());
                continue;
            }
            let Some(event) = node.worker.poll_event() else { break };
            match event {
                Event::Done { segment: SegmentIndex(segment), squares } => {
                    assert_eq!(squares.signal > 0.0, self.scenario.coded);
                    // Of 4 bits: what a host loses, and no more where all lose alike.
                    assert!(squares.error <= 0.1 * squares.signal, "{squares:?}");
                    assert_eq!(segment, node.done, "segments are done in order");
                    self.statistics.by_aggregator += 1;
                    let all = self.nodes.iter().all(|node| node.entered > segment);
                    assert!(
                        all || self.scenario.kind(segment) != Act::Barrier,
                        "a barrier that not all have come to"
                    );
                    self.statistics.ahead += u64::from(!all);
                    self.whole(index);
                    self.submit(index);
                }
                Event::Ended(_) if std::mem::take(&mut node.knocks) => self.knocked(false),
                Event::Ended(_) => {
                    let session = node.session;
                    self.message_to(index, 0, Agreement::Ask { session });
                }
            }
        }
        let node = &mut self.nodes[index];
        if node.knocks && node.worker.is_answered() {
            node.knocks = false;
            self.knocked(true);
        }
        let node = &mut self.nodes[index];
        if let Some(due) = node.worker.poll_timeout() {
            let due = due.max(self.now + MICROSECOND);
            if node.timer.is_none_or(|timer| timer > due) {
                node.timer = Some(due);
                self.at(due, What::Timer(index));
            }
        }
    }

    /// The leader is told whether the aggregator is there.
    fn knocked(&mut self, there: bool) {
        match self.leader.handle_probe_outcome(self.now, there) {
            Some((audience, message)) => self.send_agreement(audience, message),
            None => self.arm_leader(),
        }
    }

    fn arm_leader(&mut self) {
        if let Some(due) = self.leader.poll_timeout() {
            self.at(due.max(self.now), What::LeaderTimer);
        }
    }

    /// One more segment is whole at a host.
    fn whole(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        node.done += 1;
        assert!(node.memory.holds(node.done), "a segment is whole that has holes");
        let (session, below) = (node.session, node.done);
        self.message_to(index, 0, Agreement::Done { session, below: SegmentId(below) });
    }

    fn is_ready(&self, index: usize, segment: u64) -> bool {
        self.scenario
            .straggler
            .is_none_or(|(worker, from, late)| worker != index || segment < from || self.now >= late)
    }

    fn submit(&mut self, index: usize) {
        loop {
            let segment = self.nodes[index].next;
            let Some(task) = self.scenario.task(segment, index) else { return };
            if !self.is_ready(index, segment) {
                return;
            }
            let node = &mut self.nodes[index];
            match node.summation {
                None => return,
                Some(Summation::Aggregator) => {
                    if !node.worker.submit(SegmentIndex(segment), task) {
                        return;
                    }
                    if self.scenario.kind(segment) == Act::Broadcast(index) {
                        let memory = &mut node.memory;
                        let own = memory.inputs[segment as usize].iter().copied().map(Some).collect();
                        memory.outputs[segment as usize] = own;
                    }
                    node.next += 1;
                    node.entered = node.entered.max(node.next);
                }
                Some(Summation::Hosts) => {
                    // One at a time; what comes of it is told when all have come.
                    if segment > node.done {
                        return;
                    }
                    node.next += 1;
                    node.entered = node.entered.max(node.next);
                    let session = node.session;
                    let there = self.hosts.entry((session, segment)).or_default();
                    there.insert(index);
                    if there.len() == self.scenario.workers {
                        for worker in 0..self.scenario.workers {
                            let took = MICROSECOND * self.random.random_range(50..150);
                            self.at(self.now + took, What::Summed { worker, session, segment });
                        }
                    }
                }
            }
        }
    }

    fn summed(&mut self, index: usize, session: u64, segment: u64) {
        let node = &mut self.nodes[index];
        if node.session != session || node.summation != Some(Summation::Hosts) {
            return;
        }
        self.statistics.by_hosts += 1;
        node.memory.outputs[segment as usize] =
            node.memory.expected[segment as usize].iter().copied().map(Some).collect();
        if self.killed.is_some() {
            self.recovered.get_or_insert(self.now);
        }
        self.whole(index);
        self.turn(index);
    }

    fn restart(&mut self, index: usize) {
        let worker = new_worker(&self.scenario, index);
        let node = &mut self.nodes[index];
        (node.incarnation, node.knocks) = (node.incarnation + 1, false);
        (node.worker, node.session, node.summation, node.done, node.done_everywhere, node.next) =
            (worker, 0, None, 0, 0, 0);
        node.memory.written.clear();
        if index == 0 {
            self.leader = new_leader(&self.scenario, node.incarnation);
            let (audience, message) = self.leader.restart();
            self.send_agreement(audience, message);
        } else {
            self.message_to(index, 0, Agreement::Ask { session: 0 });
        }
    }

    fn send_agreement(&mut self, audience: Audience, message: Agreement) {
        match audience {
            Audience::All => (0..self.nodes.len()).for_each(|index| self.message_to(0, index, message)),
            Audience::One(index) => self.message_to(0, usize::from(index), message),
        }
        self.arm_leader();
    }

    fn message_to(&mut self, from: usize, to: usize, message: Agreement) {
        let delay = MICROSECOND * self.random.random_range(5..60);
        let last = self.links.entry((from, to)).or_default();
        let time = (self.now + delay).max(*last);
        *last = time;
        let alive = (self.nodes[from].incarnation, self.nodes[to].incarnation);
        self.at(time, What::Message { from, to, alive, message });
    }

    fn message(&mut self, from: usize, to: usize, message: Agreement) {
        let node = &mut self.nodes[to];
        match message {
            Agreement::Ask { .. } | Agreement::Stopped { .. } | Agreement::Done { .. } => {
                if let Some((audience, message)) = self.leader.receive(self.now, from as u16, message) {
                    if let Agreement::Resume { from, .. } = message {
                        self.resumes(from.0);
                    }
                    self.send_agreement(audience, message);
                }
            }
            Agreement::Stop { session } => {
                assert!(session > node.session, "sessions have greater numbers each time");
                node.worker.stop();
                node.knocks = false;
                (node.session, node.summation) = (session, None);
                let (done, done_everywhere) = (SegmentId(node.done), SegmentId(node.done_everywhere));
                self.message_to(to, 0, Agreement::Stopped { session, done, done_everywhere });
            }
            Agreement::Resume { session, from: SegmentId(from), summation: way } => {
                if session != node.session {
                    return;
                }
                assert!(from >= node.done_everywhere, "inputs of settled segments are gone");
                self.statistics.sessions += 1;
                (node.summation, node.done, node.next) = (Some(way), from, from);
                node.memory.written.clear();
                for output in node.memory.outputs.iter_mut().skip(from as usize).flatten() {
                    *output = None;
                }
                if way == Summation::Aggregator {
                    node.worker.begin(self.now, session);
                }
                self.turn(to);
            }
            // Here nothing is done at once.
            Agreement::HaveSums { .. } => {}
            Agreement::DoneEverywhere { below: SegmentId(below) } => {
                node.done_everywhere = node.done_everywhere.max(below);
                assert!(self.nodes.iter().all(|node| node.memory.holds(below)), "settled before all have it");
            }
        }
    }

    /// All hold what is not done again.
    fn resumes(&self, from: u64) {
        for node in &self.nodes {
            assert!(node.memory.holds(from), "segment below {from} would be lost\n{self:?}");
            assert!(node.done_everywhere <= from);
        }
    }

    /// What the aggregators counted, in all.
    pub(crate) fn counters(&self) -> Vec<harmonaize_aggregator::Counters> {
        self.aggregators.iter().flatten().filter_map(|aggregator| aggregator.counters(COMMUNICATOR)).collect()
    }
}
