//! Workers and aggregators, packet by packet in virtual time.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::{Dtype, GrantId, ReduceOp, SegmentIndex};
use harmonaize_aggregator::{
    Aggregator, Codes, Grant, Key, PayloadFormat, Recipient, Share, Tensors, WorkerConfig,
};
use std::time::Duration;

#[cfg(test)]
mod allocations;
#[cfg(test)]
mod bytes;
#[cfg(test)]
mod fairness;
#[cfg(test)]
mod late;
#[cfg(test)]
mod others;
#[cfg(test)]
mod tree;

const COMMUNICATOR: GrantId = GrantId(0x0102_0304_0506_0708);
const SECRET: [u8; 32] = [9; 32];
const FORMAT: PayloadFormat = PayloadFormat::Tensor { dtype: Dtype::I32, op: ReduceOp::Sum };

fn key(worker: u16) -> Key {
    Key::derive(&SECRET, COMMUNICATOR, worker)
}

/// A communicator of three workers with chunks of 16 bytes.
fn grant() -> Grant {
    Grant {
        communicator: COMMUNICATOR,
        secret: SECRET,
        workers: 3,
        format: FORMAT,
        elements: 4,
        ordered: false,
        share: Share { tenant: 1, weight: 1, guaranteed: 4, most: 8 },
        parent: None,
    }
}

/// One of its workers.
fn config(worker: u16) -> WorkerConfig {
    WorkerConfig {
        communicator: COMMUNICATOR,
        worker,
        key: key(worker),
        format: FORMAT,
        elements: 4,
        window: 8,
        segments: 4,
        codes: Codes::default(),
        hosts: 3,
        timeout: Duration::from_millis(150),
        min_retry: Duration::from_millis(4),
        max_retry: Duration::from_millis(40),
        max_loss_permille: 500,
    }
}

/// The same where round trips are short.
fn quick(worker: u16) -> WorkerConfig {
    WorkerConfig {
        timeout: Duration::from_millis(20),
        min_retry: Duration::from_micros(100),
        max_retry: Duration::from_millis(4),
        max_loss_permille: 900,
        ..config(worker)
    }
}

/// Tensors of zeros, of which no sum is kept.
struct Zeros;

impl Tensors for Zeros {
    fn read(&self, _: SegmentIndex, _: u64, _: usize, bytes: &mut [u8]) {
        bytes.fill(0);
    }
    fn write(&mut self, _: SegmentIndex, _: u64, _: usize, _: &[u8]) {}
}

/// Gives a packet to an aggregator without a parent; returns what it sends, and to which worker.
fn answers(aggregator: &mut Aggregator, now: Duration, packet: &[u8]) -> Vec<(usize, Vec<u8>)> {
    let mut sent = Vec::new();
    aggregator.receive(now, packet, &mut |to: Recipient, packet: &[u8]| {
        let Recipient::Worker { worker, .. } = to else { panic!("there is no parent") };
        sent.push((usize::from(worker), packet.to_vec()));
    });
    sent
}
