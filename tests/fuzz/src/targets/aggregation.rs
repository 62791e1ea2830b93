//! Packets of aggregation. The fuzzer's are sealed with the right key, for a wrong one ends all there is to find.

use crate::input::Input;
use harmonaize_abi::{Dtype, GrantId, ReduceOp, SegmentIndex};
use harmonaize_aggregator::packet::{HEADER_BYTES, Header, Kind, MAX_PAYLOAD, Sealed, seal};
use harmonaize_aggregator::{
    Aggregator, Codes, Grant, Key, PayloadFormat, Pool, Recipient, Share, Task, Tensors, Worker, WorkerConfig,
};
use std::time::Duration;

const COMMUNICATOR: GrantId = GrantId(7);
const SECRET: [u8; 32] = [9; 32];
const FORMAT: PayloadFormat = PayloadFormat::Tensor { dtype: Dtype::I32, op: ReduceOp::Sum };
const WORKERS: u16 = 3;

fn key(worker: u16) -> Key {
    Key::derive(&SECRET, COMMUNICATOR, worker)
}

/// A number that is near 0 as a rule.
fn number(input: &mut Input<'_>) -> u64 {
    match input.u8() {
        near @ 0..248 => u64::from(near % 16),
        _ => input.u64(),
    }
}

/// The next packet, with its worker's key. In its first bits, now and then, is something else than what should be
/// there.
fn packet(input: &mut Input<'_>, kinds: &[Kind], incarnation: u64) -> Vec<u8> {
    let kind = kinds[usize::from(input.u8()) % kinds.len()];
    let worker = u16::from(input.u8()) % WORKERS;
    let header = Header {
        kind,
        worker,
        count: u16::from(input.u8() % 5),
        communicator: COMMUNICATOR,
        session: number(input),
        incarnation: if input.u8() < 200 { incarnation } else { number(input) },
        sequence: number(input),
        chunk: number(input),
        had: number(input),
        window: number(input) as u16,
        note: input.u8(),
    };
    let mut packet = vec![0; HEADER_BYTES];
    let length = usize::from(input.u8() % 40);
    packet.extend(input.bytes(length));
    seal(&header, &key(worker), &mut packet);
    packet
}

/// The aggregator answers nobody but its workers, whatever they send.
pub(super) fn packets(bytes: &[u8]) {
    let mut aggregator = Aggregator::new(11, Pool::new(16, 64));
    let share = Share { tenant: 1, weight: 1, guaranteed: 6, most: 12 };
    let grant = Grant {
        communicator: COMMUNICATOR,
        secret: SECRET,
        workers: WORKERS,
        format: FORMAT,
        elements: 4,
        ordered: bytes.first().is_some_and(|first| first % 2 == 0),
        share,
        parent: None,
    };
    aggregator.grant(grant).unwrap();
    let mut input = Input(bytes.get(1..).unwrap_or_default());
    let mut now = Duration::from_secs(1);
    while !input.is_empty() {
        now += Duration::from_micros(input.u8().into());
        let packet = match input.u8() {
            0 => input.piece().to_vec(),
            _ => packet(&mut input, &[Kind::Begin, Kind::Contribution, Kind::Acknowledge, Kind::Result], 11),
        };
        let _ = Sealed::read(&packet);
        let mut sent = 0;
        aggregator.receive(now, &packet, &mut |to: Recipient, packet: &[u8]| {
            let Recipient::Worker { communicator: COMMUNICATOR, worker } = to else { panic!("to {to:?}") };
            let (header, payload) = Sealed::read(packet).unwrap().open(&key(worker)).unwrap();
            assert!(!header.kind.of_workers() && payload.len() <= MAX_PAYLOAD);
            sent += 1;
        });
        // No packet is answered by more than all workers' windows.
        assert!(sent <= 8 * usize::from(WORKERS) + 1, "{sent} packets for one");
        if input.u8() == 0 {
            now += Duration::from_secs(1);
            aggregator.handle_timeout(now, Duration::from_secs(2));
        }
    }
}

/// A host's tensor: each element is written once at most.
#[derive(Default)]
struct Memory(Vec<(u64, u64)>);

impl Tensors for Memory {
    fn read(&self, _: SegmentIndex, _: u64, elements: usize, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), 4 * elements);
        bytes.fill(1);
    }

    fn write(&mut self, SegmentIndex(segment): SegmentIndex, offset: u64, elements: usize, bytes: &[u8]) {
        assert_eq!(bytes.len(), 4 * elements);
        assert!(segment < 2 && offset + elements as u64 <= 10, "segment {segment}, {elements} from {offset}");
        assert!(!self.0.contains(&(segment, offset)), "{offset} of segment {segment} twice");
        self.0.push((segment, offset));
    }
}

/// A worker writes no part of a tensor twice, and none that it did not give.
pub(super) fn worker(bytes: &[u8]) {
    let config = WorkerConfig {
        communicator: COMMUNICATOR,
        worker: 1,
        key: key(1),
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
    };
    let mut worker = Worker::new(config);
    let (mut now, mut memory) = (Duration::from_secs(1), Memory::default());
    worker.begin(now, 5);
    let mut input = Input(bytes);
    let mut submitted = 0;
    while !input.is_empty() {
        now += Duration::from_micros(u64::from(input.u8()) * 16);
        match input.u8() {
            0 if submitted < 2 => {
                submitted += u64::from(worker.submit(SegmentIndex(submitted), Task::Sum(10)))
            }
            1 => worker.receive(now, input.piece(), &mut memory),
            _ => {
                let kinds = [Kind::Granted, Kind::Result, Kind::Waiting, Kind::Lost];
                let mut packet = packet(&mut input, &kinds, 11);
                if let Ok(read) = Sealed::read(&packet)
                    && read.worker() != 1
                    && let Ok((header, _)) = read.open(&key(read.worker()))
                {
                    seal(&Header { worker: 1, session: 5, ..header }, &key(1), &mut packet);
                }
                worker.receive(now, &packet, &mut memory);
            }
        }
        let mut out = [0; HEADER_BYTES + 64];
        let mut sent = 0;
        while let Some(length) = worker.poll_transmit(now, &memory, &mut out) {
            assert!(Sealed::read(&out[..length]).unwrap().kind().of_workers());
            sent += 1;
            assert!(sent < 100, "no end of packets");
        }
        while worker.poll_event().is_some() {}
    }
}
