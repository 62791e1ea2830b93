//! Who is whose worker, and what each is told of it.

use super::node::worker;
use super::scenario::Scenario;
use super::world::COMMUNICATOR;
use harmonaize_aggregator::{Aggregator, Grant, Key, Leader, Parent, Pool, Share};
use std::time::Duration;

pub(crate) const ROOT_SECRET: [u8; 32] = [1; 32];

/// A host's number at its aggregator, and its key.
pub(crate) fn key_of(scenario: &Scenario, index: usize) -> (u16, Key) {
    let aggregator = above(scenario, index);
    let worker = if aggregator == 0 { index } else { (index - scenario.direct) / scenario.leaves } as u16;
    (worker, Key::derive(&secret(aggregator), COMMUNICATOR, worker))
}

/// The aggregator that a host sends to.
pub(crate) fn above(scenario: &Scenario, index: usize) -> usize {
    let Scenario { leaves, direct, .. } = scenario;
    if *leaves == 0 || index < *direct { 0 } else { 1 + (index - direct) % leaves }
}

pub(crate) fn new_worker(scenario: &Scenario, index: usize) -> harmonaize_aggregator::Worker {
    let (number, key) = key_of(scenario, index);
    worker(scenario, number, key)
}

fn secret(aggregator: usize) -> [u8; 32] {
    [1 + aggregator as u8; 32]
}

/// Workers that an aggregator serves.
pub(crate) fn workers_of(scenario: &Scenario, aggregator: usize) -> usize {
    let hosts = (0..scenario.workers).filter(|host| above(scenario, *host) == aggregator).count();
    hosts + if aggregator == 0 { scenario.leaves } else { 0 }
}

pub(crate) fn new_leader(scenario: &Scenario, incarnation: u32) -> Leader {
    let hold = Duration::from_millis(5);
    Leader::new(scenario.workers as u16, incarnation, hold, hold * 16)
}

pub(crate) fn grant(scenario: &Scenario, index: usize) -> Grant {
    let workers = workers_of(scenario, index);
    let number = (workers_of(scenario, 0) - scenario.leaves + index).wrapping_sub(1) as u16;
    let parent = (index > 0).then(|| Parent {
        worker: number,
        key: Key::derive(&ROOT_SECRET, COMMUNICATOR, number),
        timeout: super::scenario::PATIENCE,
        retry_after: Duration::from_micros(100),
    });
    let grain = if scenario.ordered { workers as u32 } else { 1 };
    Grant {
        communicator: COMMUNICATOR,
        secret: secret(index),
        workers: workers as u16,
        format: scenario.form(),
        elements: scenario.elements,
        ordered: scenario.ordered,
        share: Share { tenant: 1, weight: 1, guaranteed: 2 * grain, most: scenario.units },
        parent,
    }
}

pub(crate) fn aggregator(scenario: &Scenario, index: usize, incarnation: u64) -> Aggregator {
    let unit = scenario.form().sum_bytes(scenario.elements as usize).unwrap();
    let mut aggregator = Aggregator::new(incarnation, Pool::new(scenario.units.max(4), unit));
    aggregator.grant(grant(scenario, index)).unwrap();
    aggregator
}
