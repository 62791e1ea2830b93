//! An aggregator above another, packet by packet. Nothing is held above once all have everything, and who starts again there says so.

use crate::{COMMUNICATOR, config, grant};
use harmonaize_abi::{SegmentId, SegmentIndex};
use harmonaize_aggregator::packet::HEADER_BYTES;
use harmonaize_aggregator::{
    Aggregator, Agreement, Event, Grant, Key, Leader, Parent, Pool, Reason, Recipient, Share, Task, Tensors,
    Worker, WorkerConfig,
};
use std::collections::VecDeque;
use std::time::Duration;

const UNITS: u32 = 64;
const SECRETS: [[u8; 32]; 2] = [[1; 32], [2; 32]];

struct Ones;

impl Tensors for Ones {
    fn read(&self, _: SegmentIndex, _: u64, _: usize, bytes: &mut [u8]) {
        bytes.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&1_i32.to_le_bytes()));
    }
    fn write(&mut self, _: SegmentIndex, _: u64, _: usize, bytes: &[u8]) {
        assert!(bytes.chunks_exact(4).all(|word| word == 3_i32.to_le_bytes()), "{bytes:?}");
    }
}

/// Above: a host and the one below. Below: two hosts.
fn aggregator(at: usize, incarnation: u64) -> Aggregator {
    let parent = Parent {
        worker: 1,
        key: Key::derive(&SECRETS[0], COMMUNICATOR, 1),
        timeout: Duration::from_millis(100),
        retry_after: Duration::from_millis(1),
    };
    let mut aggregator = Aggregator::new(incarnation, Pool::new(UNITS, 16));
    aggregator
        .grant(Grant {
            secret: SECRETS[at],
            workers: 2,
            share: Share { tenant: 1, weight: 1, guaranteed: 8, most: UNITS },
            parent: (at == 1).then_some(parent),
            ..grant()
        })
        .unwrap();
    aggregator
}

/// The three hosts: the first is above's, the others are below's.
const PLACES: [(usize, u16); 3] = [(0, 0), (1, 0), (1, 1)];

/// After so long without parts an aggregator is told by a packet of its own what is there.
const LATER: Duration = Duration::from_millis(20);

struct Tree {
    /// Whether the one above is gone.
    headless: bool,
    aggregators: [Aggregator; 2],
    workers: Vec<Worker>,
}

impl Tree {
    fn new() -> Self {
        let worker = |(at, worker): (usize, u16)| {
            Worker::new(WorkerConfig {
                key: Key::derive(&SECRETS[at], COMMUNICATOR, worker),
                ..config(worker)
            })
        };
        let mut tree = Self {
            headless: false,
            aggregators: [aggregator(0, 10), aggregator(1, 20)],
            workers: PLACES.into_iter().map(worker).collect(),
        };
        tree.workers.iter_mut().for_each(|worker| worker.begin(Duration::ZERO, 1));
        tree
    }

    /// All that is sent now arrives, and what follows from it; what came of it.
    fn run_until_idle(&mut self, now: Duration) -> Vec<Event> {
        let (mut events, mut waiting) = (Vec::new(), VecDeque::new());
        loop {
            for (worker, (at, _)) in self.workers.iter_mut().zip(PLACES) {
                let mut packet = [0; HEADER_BYTES + 16];
                while let Some(bytes) = worker.poll_transmit(now, &Ones, &mut packet) {
                    waiting.push_back((at, packet[..bytes].to_vec()));
                }
                events.extend(std::iter::from_fn(|| worker.poll_event()));
            }
            let Some((at, packet)) = waiting.pop_front() else { return events };
            if at == 0 && self.headless {
                continue;
            }
            let mut sent = Vec::new();
            self.aggregators[at]
                .receive(now, &packet, &mut |to: Recipient, packet: &[u8]| sent.push((to, packet.to_vec())));
            for (to, packet) in sent {
                match to {
                    Recipient::Parent { .. } => waiting.push_back((0, packet)),
                    Recipient::Worker { worker: 1, .. } if at == 0 => waiting.push_back((1, packet)),
                    Recipient::Worker { worker, .. } => {
                        let host = PLACES.iter().position(|place| *place == (at, worker)).unwrap();
                        self.workers[host].receive(now, &packet, &mut Ones);
                    }
                }
            }
        }
    }
}

/// Runs three segments, so far apart, and counts the packets that go up and down. A while later nothing is
/// held.
fn segments(apart: Duration) -> (u64, u64) {
    let mut tree = Tree::new();
    let free = |tree: &Tree| tree.aggregators.iter().all(|it| it.pool().free() == UNITS as usize);
    let mut now = Duration::ZERO;
    for segment in 0..3 {
        tree.workers
            .iter_mut()
            .for_each(|worker| assert!(worker.submit(SegmentIndex(segment), Task::Sum(100))));
        let done = tree.run_until_idle(now).into_iter().filter(|event| matches!(event, Event::Done { .. }));
        assert_eq!(done.count(), 3);
        now += apart;
        tree.run_until_idle(now);
        assert_eq!(free(&tree), apart >= LATER, "what is there until others follow");
    }
    tree.run_until_idle(now + LATER);
    assert!(free(&tree), "something is held for nobody");
    let [above, below] = [0, 1].map(|at| tree.aggregators[at].counters(COMMUNICATOR).unwrap());
    assert_eq!((above.up, above.down), (0, 0));
    (below.up, below.down)
}

#[test]
fn above_nothing_is_held_once_all_below_have_everything() {
    // Begins of both, a part a chunk, and a word a segment; answers, and a sum a chunk.
    assert_eq!(segments(LATER), (2 + 75 + 3, 2 + 75));
}

#[test]
fn parts_that_follow_say_what_is_there() {
    assert_eq!(segments(Duration::from_millis(1)), (2 + 75 + 1, 2 + 75));
}

#[test]
fn a_restarted_parent_ends_the_session() {
    let mut tree = Tree::new();
    tree.workers.iter_mut().for_each(|worker| assert!(worker.submit(SegmentIndex(0), Task::Sum(4))));
    assert_eq!(tree.run_until_idle(Duration::ZERO).len(), 3);
    tree.aggregators[0] = aggregator(0, 11);
    // The part that goes up is answered at once; the hosts below hear of it at their next question, long before anybody's patience ends.
    tree.workers.iter_mut().for_each(|worker| assert!(worker.submit(SegmentIndex(1), Task::Sum(4))));
    let mut ended = tree.run_until_idle(Duration::from_millis(1));
    ended.extend(tree.run_until_idle(Duration::from_millis(50)));
    assert_eq!(ended, [Event::Ended(Reason::Lost); 3]);
}

#[test]
fn a_returning_parent_is_found_again() {
    let mut tree = Tree::new();
    tree.run_until_idle(Duration::ZERO);
    tree.headless = true;
    tree.workers.iter_mut().for_each(Worker::stop);
    let hold = Duration::from_secs(1);
    let mut leader = Leader::new(1, 1, hold, hold);
    leader.restart();
    let say = |leader: &mut Leader, message: Agreement| match leader.receive(Duration::ZERO, 0, message) {
        Some((_, Agreement::Stop { session } | Agreement::Resume { session, .. })) => session,
        said => panic!("{said:?}"),
    };
    let stopped = |session| Agreement::Stopped { session, done: SegmentId(0), done_everywhere: SegmentId(0) };
    let first = say(&mut leader, stopped((1 << 32) + 1));
    let by_hosts = say(&mut leader, Agreement::Ask { session: first });
    assert_eq!(say(&mut leader, stopped(by_hosts)), by_hosts);
    // The leader's worker is below.
    let knock = |tree: &mut Tree, leader: &mut Leader, now: Duration| {
        tree.workers[1].begin(now, leader.poll(now).unwrap());
        for later in 0..20 {
            tree.run_until_idle(now + Duration::from_millis(10) * later);
        }
        tree.workers[1].is_answered()
    };
    assert!(!knock(&mut tree, &mut leader, hold));
    leader.handle_probe_outcome(hold, false);
    tree.headless = false;
    tree.aggregators[0] = aggregator(0, 11);
    assert!(knock(&mut tree, &mut leader, 3 * hold), "what could not be opened once never can be");
}
