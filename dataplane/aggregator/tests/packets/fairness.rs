//! Tenants that share one aggregator's memory, packet by packet in virtual time: what slots are worth in sums. Every packet takes
//! the same time, so that a communicator's rate is its window's.

use crate::{SECRET, Zeros, config, grant};
use harmonaize_abi::{GrantId, SegmentIndex};
use harmonaize_aggregator::packet::HEADER_BYTES;
use harmonaize_aggregator::{Aggregator, Grant, Key, Pool, Recipient, Share, Task, Worker, WorkerConfig};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const WORKERS: u16 = 2;
const DELAY: Duration = Duration::from_micros(10);

/// A packet to a worker, or to the aggregator.
type Flying = (Option<(GrantId, u16)>, Vec<u8>);

/// Runs communicators of these shares until `until`, each from its own beginning on; the sums of each after `from`. A host has at most
/// `window` chunks of a tenant under way.
fn sums(units: u32, window: u16, shares: &[(Share, Duration)], from: Duration, until: Duration) -> Vec<u64> {
    let mut aggregator = Aggregator::new(7, Pool::new(units, 4));
    let mut workers: BTreeMap<(GrantId, u16), Worker> = BTreeMap::new();
    for (id, (share, _)) in (1..).map(GrantId).zip(shares) {
        let grant = Grant { communicator: id, workers: WORKERS, elements: 1, share: *share, ..grant() };
        aggregator.grant(grant).unwrap();
        for worker in 0..WORKERS {
            let config = WorkerConfig {
                communicator: id,
                key: Key::derive(&SECRET, id, worker),
                elements: 1,
                window,
                segments: 2,
                hosts: WORKERS,
                timeout: Duration::from_secs(1),
                min_retry: Duration::from_millis(1),
                max_retry: Duration::from_millis(50),
                max_loss_permille: 1000,
                ..config(worker)
            };
            let sharers = shares.iter().filter(|(other, _)| other.tenant == share.tenant).count();
            let mut worker_of = Worker::new(config);
            worker_of.share_window(sharers as u16);
            workers.insert((id, worker), worker_of);
        }
    }
    let mut flying: BTreeMap<Duration, Vec<Flying>> = BTreeMap::new();
    let (mut now, mut begun, mut before) = (Duration::ZERO, BTreeSet::new(), vec![0; shares.len()]);
    while now < until {
        let count = |id: u64| aggregator.counters(GrantId(id)).unwrap().sums;
        if now <= from {
            before = (1..=shares.len() as u64).map(count).collect();
        }
        let mut answers = Vec::new();
        for (to, packet) in flying.remove(&now).unwrap_or_default() {
            match to {
                Some(worker) => workers.get_mut(&worker).unwrap().receive(now, &packet, &mut Zeros),
                None => aggregator.receive(now, &packet, &mut |to: Recipient, packet: &[u8]| {
                    let Recipient::Worker { communicator, worker } = to else { panic!("no parent") };
                    answers.push((Some((communicator, worker)), packet.to_vec()));
                }),
            }
        }
        let mut packet = [0; HEADER_BYTES + 4];
        for ((id, number), worker) in &mut workers {
            if now >= shares[id.0 as usize - 1].1 {
                if begun.insert((*id, *number)) {
                    worker.begin(now, 1);
                    assert!(worker.submit(SegmentIndex(0), Task::Sum(1 << 40)));
                }
                while let Some(bytes) = worker.poll_transmit(now, &Zeros, &mut packet) {
                    answers.push((None, packet[..bytes].to_vec()));
                }
            }
        }
        now += DELAY;
        flying.insert(now, answers);
    }
    (1..)
        .zip(before)
        .take(shares.len())
        .map(|(id, before)| aggregator.counters(GrantId(id)).unwrap().sums - before)
        .collect()
}

fn jain(values: &[u64]) -> f64 {
    let (sum, squares) = values
        .iter()
        .map(|value| *value as f64)
        .fold((0.0, 0.0), |(sum, squares), value| (sum + value, squares + value * value));
    sum * sum / (values.len() as f64 * squares)
}

fn share(tenant: u32, guaranteed: u32, most: u32) -> Share {
    Share { tenant, weight: 1, guaranteed, most }
}

#[test]
fn eight_tenants_of_equal_weight_get_equal_sums() {
    // The later they come, the more the first ones have borrowed.
    let shares: Vec<(Share, Duration)> =
        (0..8).map(|tenant| (share(tenant, 4, 1024), DELAY * 20 * tenant)).collect();
    let sums = sums(256, 512, &shares, DELAY * 200, DELAY * 600);
    assert!(jain(&sums) >= 0.95, "{sums:?}");
    assert!(sums.iter().all(|sums| *sums > 1000), "{sums:?}");
}

#[test]
fn a_hog_costs_nobody_a_guaranteed_sum() {
    let (from, until) = (DELAY * 100, DELAY * 400);
    let guaranteed: Vec<(Share, Duration)> =
        (1..8).map(|tenant| (share(tenant, 16, 16), DELAY * 50)).collect();
    let alone = sums(256, 512, &guaranteed, from, until);
    // A tenant with eight communicators that want everything, and have had it before the others begin.
    let mut crowd = guaranteed;
    crowd.extend((0..8).map(|_| (share(0, 2, 1024), Duration::ZERO)));
    let beside = sums(256, 512, &crowd, from, until);
    for (alone, beside) in alone.iter().zip(&beside) {
        assert!(*beside * 100 >= alone * 95, "{alone} alone, {beside} beside the hog");
    }
    assert!(beside[7..].iter().sum::<u64>() > beside[0] * 4, "what is nobody's is lent: {beside:?}");
}

#[test]
fn many_communicators_give_a_tenant_no_more() {
    // There is memory for all: windows alone say who gets how much.
    let mut shares: Vec<(Share, Duration)> =
        (1..8).map(|tenant| (share(tenant, 64, 128), Duration::ZERO)).collect();
    shares.extend((0..4).map(|_| (share(0, 64, 128), Duration::ZERO)));
    let sums = sums(4096, 16, &shares, DELAY * 100, DELAY * 500);
    let mut tenants = sums[..7].to_vec();
    tenants.push(sums[7..].iter().sum());
    assert!(jain(&tenants) >= 0.99, "{sums:?}");
}
