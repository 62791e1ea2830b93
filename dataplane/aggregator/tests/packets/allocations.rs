//! Once a communicator is granted, neither side allocates: not for a packet, not for a segment.

#[path = "../../../transport/tests/counting/mod.rs"]
mod counting;

use crate::{grant, quick};
use counting::Counting;
use harmonaize_abi::SegmentIndex;
use harmonaize_aggregator::packet::HEADER_BYTES;
use harmonaize_aggregator::{
    Aggregator, Event, Grant, Pool, Recipient, Share, Task, Tensors, Worker, WorkerConfig,
};
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: Counting = Counting(counting::here);

const WORKERS: usize = 3;
const ELEMENTS: usize = 64;

struct Ones(u64);

impl Tensors for Ones {
    fn read(&self, _: SegmentIndex, _: u64, _: usize, bytes: &mut [u8]) {
        bytes.chunks_exact_mut(4).for_each(|to| to.copy_from_slice(&1_i32.to_le_bytes()));
    }
    fn write(&mut self, _: SegmentIndex, _: u64, elements: usize, bytes: &[u8]) {
        assert!(bytes.chunks_exact(4).all(|value| value == (WORKERS as i32).to_le_bytes()));
        self.0 += elements as u64;
    }
}

/// Sums segments `from..to`, and loses a packet now and then.
fn sum(aggregator: &mut Aggregator, workers: &mut [(Worker, Ones)], from: u64, to: u64, steps: &mut u64) {
    let mut packet = [0; HEADER_BYTES + 4 * ELEMENTS];
    let mut next = [from; WORKERS];
    let mut done = [from; WORKERS];
    while done.iter().any(|done| *done < to) {
        *steps += 1;
        let now = Duration::from_micros(50 * *steps);
        for index in 0..WORKERS {
            if next[index] < to && workers[index].0.submit(SegmentIndex(next[index]), Task::Sum(1000)) {
                next[index] += 1;
            }
            loop {
                let (worker, ones) = &mut workers[index];
                let Some(bytes) = worker.poll_transmit(now, ones, &mut packet) else { break };
                *steps += 1;
                if steps.is_multiple_of(29) {
                    continue;
                }
                aggregator.receive(now, &packet[..bytes], &mut |to: Recipient, packet: &[u8]| {
                    let Recipient::Worker { worker, .. } = to else { panic!("no parent") };
                    let (worker, ones) = &mut workers[usize::from(worker)];
                    worker.receive(now, packet, ones);
                });
            }
            while let Some(event) = workers[index].0.poll_event() {
                let Event::Done { segment: SegmentIndex(segment), .. } = event else { panic!("{event:?}") };
                done[index] = segment + 1;
            }
        }
    }
}

#[test]
fn nothing_is_allocated_for_a_packet() {
    for ordered in [false, true] {
        let mut aggregator = Aggregator::new(7, Pool::new(64, 4 * ELEMENTS));
        let share = Share { tenant: 1, weight: 1, guaranteed: 48, most: 48 };
        let elements = ELEMENTS as u32;
        aggregator.grant(Grant { elements, ordered, share, ..grant() }).unwrap();
        let member = |worker| {
            let config =
                WorkerConfig { elements, window: 32, timeout: Duration::from_secs(10), ..quick(worker) };
            (Worker::new(config), Ones(0))
        };
        let mut members: Vec<(Worker, Ones)> = (0..WORKERS as u16).map(member).collect();
        for (worker, _) in &mut members {
            worker.begin(Duration::ZERO, 1);
        }
        let mut steps = 0;
        // The session's begin wakes the communicator, and the pool is divided.
        sum(&mut aggregator, &mut members, 0, 1, &mut steps);
        let before = counting::so_far();
        assert!(before > 0, "the counter counts");
        sum(&mut aggregator, &mut members, 1, 60, &mut steps);
        assert_eq!(counting::so_far() - before, 0, "ordered: {ordered}");
        assert!(members.iter().all(|(_, ones)| ones.0 == 60_000));
        assert!(members.iter().any(|(worker, _)| worker.counters().retransmits > 0), "nothing was lost");
    }
}
