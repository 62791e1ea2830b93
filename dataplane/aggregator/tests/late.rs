//! Answers that are late are not lost: a whole window is asked for again, and the session goes on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_abi::{Dtype, ReduceOp};
use harmonaize_aggregator::{
    Aggregator, Event, Form, Grant, Key, Pool, Share, Tensors, To, Worker, WorkerConfig,
};
use std::time::Duration;

const FORM: Form = Form::Tensor { dtype: Dtype::I32, op: ReduceOp::Sum };
const WINDOW: u16 = 256;

struct Zeros;

impl Tensors for Zeros {
    fn read(&self, _: u64, _: u64, _: usize, bytes: &mut [u8]) {
        bytes.fill(0);
    }
    fn write(&mut self, _: u64, _: u64, _: usize, _: &[u8]) {}
}

/// All that the worker sends now.
fn sent(worker: &mut Worker, now: Duration) -> Vec<Vec<u8>> {
    let (mut packet, mut packets) = ([0; 512], Vec::new());
    while let Some(bytes) = worker.poll_transmit(now, &Zeros, &mut packet) {
        packets.push(packet[..bytes].to_vec());
    }
    packets
}

#[test]
fn a_window_that_is_answered_late_ends_no_session() {
    let (communicator, secret) = (5, [1; 32]);
    let mut aggregator = Aggregator::new(1, Pool::new(2 * u32::from(WINDOW), 64));
    let most = 2 * u32::from(WINDOW);
    let share = Share { tenant: 1, weight: 1, guaranteed: most, most };
    aggregator
        .grant(Grant {
            communicator,
            secret,
            workers: 1,
            form: FORM,
            elements: 4,
            ordered: false,
            partial: None,
            share,
            parent: None,
        })
        .unwrap();
    let mut worker = Worker::new(WorkerConfig {
        communicator,
        worker: 0,
        key: Key::derive(&secret, communicator, 0),
        form: FORM,
        elements: 4,
        window: WINDOW,
        segments: 1,
        hosts: 1,
        partial: false,
        patience: Duration::from_millis(150),
        retry_least: Duration::from_millis(4),
        retry_most: Duration::from_millis(40),
        loss_most: 500,
    });
    let answer = |aggregator: &mut Aggregator, worker: &mut Worker, now: Duration, packets: &[Vec<u8>]| {
        let mut answers = Vec::new();
        for packet in packets {
            aggregator.receive(now, packet, &mut |_: To, packet: &[u8]| answers.push(packet.to_vec()));
        }
        answers.iter().for_each(|packet| worker.receive(now, packet, &mut Zeros));
    };
    let mut now = Duration::from_millis(1);
    worker.begin(now, 1);
    let begin = sent(&mut worker, now);
    answer(&mut aggregator, &mut worker, now, &begin);
    // A short chunk tells the worker how fast sums usually come.
    assert!(worker.submit(0, 4));
    let quick = sent(&mut worker, now);
    answer(&mut aggregator, &mut worker, now, &quick);
    assert_eq!(worker.poll_event(), Some(Event::Done { segment: 0, hosts: 1 }));
    assert!(worker.submit(1, 4 * u64::from(WINDOW)));
    let mut late = sent(&mut worker, now);
    assert!(late.len() >= usize::from(WINDOW));
    now += Duration::from_millis(30);
    let again = sent(&mut worker, now);
    assert_eq!(again.len(), usize::from(WINDOW), "all are asked for again");
    late.extend(again);
    assert_eq!(worker.poll_event(), None, "the session has ended");
    answer(&mut aggregator, &mut worker, now, &late);
    assert_eq!(worker.poll_event(), Some(Event::Done { segment: 1, hosts: 1 }));
}
