//! Packets from any bytes: a defined answer, never a panic, and nothing believed that the key's owner did not send.

use crate::{COMMUNICATOR, Zeros, answers, grant, key, quick};
use harmonaize_abi::{Dtype, ReduceOp, SegmentIndex};
use harmonaize_aggregator::packet::{
    HEADER_BYTES, Header, Kind, MAX_PAYLOAD, PacketError, Sealed, VERSION, seal,
};
use harmonaize_aggregator::{
    Aggregator, Codes, Counters, Grant, GrantError, Key, PayloadFormat, Pool, Recipient, Share, Task,
    Tensors, Worker, WorkerConfig,
};
use harmonaize_kernels::codes::Squares;
use proptest::prelude::*;
use std::time::Duration;

fn kind() -> impl Strategy<Value = Kind> {
    proptest::sample::select(vec![
        Kind::Begin,
        Kind::Granted,
        Kind::Contribution,
        Kind::Result,
        Kind::Acknowledge,
        Kind::Waiting,
        Kind::Lost,
    ])
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..5_u64, any::<u64>(), Just(u64::MAX)]
}

prop_compose! {
    fn header()(
        kind in kind(),
        worker in 0..4_u16,
        count in any::<u16>(),
        session in number(),
        incarnation in prop_oneof![Just(7), number()],
        sequence in number(),
        chunk in number(),
        had in number(),
        window in any::<u16>(),
        note in 0..3_u8,
    ) -> Header {
        Header { kind, worker, count, communicator: COMMUNICATOR, session, incarnation, sequence, chunk, had, window, note }
    }
}

fn packet(header: &Header, key: &Key, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0; HEADER_BYTES];
    packet.extend_from_slice(payload);
    seal(header, key, &mut packet);
    packet
}

fn worker() -> Worker {
    Worker::new(WorkerConfig { window: 4, segments: 2, ..quick(0) })
}

#[test]
fn a_header_is_what_its_table_says() {
    let header = Header {
        kind: Kind::Contribution,
        worker: 2,
        count: 1,
        communicator: COMMUNICATOR,
        session: 0x11,
        incarnation: 0x12,
        sequence: 0x13,
        chunk: 0x14,
        had: 0x15,
        window: 0x1617,
        note: 0x18,
    };
    let bytes = packet(&header, &key(2), &[5; 3]);
    assert_eq!(bytes.len(), HEADER_BYTES + 3);
    assert_eq!(HEADER_BYTES, 80);
    assert_eq!(&bytes[..16], &[b'h', b'A', 2, 3, 2, 0, 1, 0, 8, 7, 6, 5, 4, 3, 2, 1]);
    for (at, value) in [(16, 0x11), (24, 0x12), (32, 0x13), (40, 0x14), (48, 0x15)] {
        assert_eq!(u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()), value);
    }
    assert_eq!(&bytes[56..64], &[3, 0, 0x17, 0x16, 0x18, 0, 0, 0]);
    let mut other = bytes.clone();
    other[2] = VERSION + 1;
    assert_eq!(Sealed::read(&other).err(), Some(PacketError::Version(VERSION + 1)));
    other[0] = 0;
    assert_eq!(Sealed::read(&other).err(), Some(PacketError::Magic));
    assert_eq!(Sealed::read(&bytes[..79]).err(), Some(PacketError::Length));
    assert_eq!(Sealed::read(&[]).err(), Some(PacketError::Length));
}

proptest! {
    #[test]
    fn what_is_sealed_opens_with_its_key_alone(header in header(), payload in proptest::collection::vec(any::<u8>(), 1..100), flip in any::<prop::sample::Index>()) {
        let carries = matches!(header.kind, Kind::Contribution | Kind::Result);
        let payload = if carries { payload } else { Vec::new() };
        let bytes = packet(&header, &key(header.worker), &payload);
        let opened = Sealed::read(&bytes).unwrap();
        prop_assert_eq!(opened.open(&key(header.worker)).unwrap(), (header, &payload[..]));
        prop_assert_eq!(opened.open(&key(header.worker + 1)).unwrap_err(), PacketError::Tag);
        let mut damaged = bytes;
        let bit = flip.index(damaged.len() * 8);
        damaged[bit / 8] ^= 1 << (bit % 8);
        let believed = Sealed::read(&damaged).is_ok_and(|sealed| sealed.open(&key(header.worker)).is_ok());
        prop_assert!(!believed, "bit {}", bit);
    }

    #[test]
    fn any_bytes_have_an_answer(bytes in proptest::collection::vec(any::<u8>(), 0..300), shaped in any::<bool>(), oversized in any::<bool>()) {
        let mut bytes = bytes;
        if shaped {
            // As far as a stranger gets: all but the tag.
            let header = Header { kind: Kind::Contribution, worker: 1, count: 1, communicator: COMMUNICATOR, session: 1, incarnation: 7, sequence: 1, chunk: 0, had: 0, window: 0, note: 0 };
            bytes = packet(&header, &Key::new(&[3; 32]), &bytes);
        }
        if oversized {
            bytes.resize(HEADER_BYTES + MAX_PAYLOAD + 1, 0);
        }
        let mut aggregator = Aggregator::new(7, Pool::new(16, 16));
        aggregator.grant(grant()).unwrap();
        aggregator.receive(Duration::ZERO, &bytes, &mut |_: Recipient, _: &[u8]| panic!("answered"));
        prop_assert_eq!(aggregator.counters(COMMUNICATOR).unwrap().received, 0);
        let mut worker = worker();
        worker.begin(Duration::ZERO, 1);
        worker.receive(Duration::ZERO, &bytes, &mut Zeros);
        prop_assert_eq!(worker.poll_event(), None);
    }

    /// Whatever those who have keys say, nothing panics, and memory stays within the share.
    #[test]
    fn any_words_of_workers_are_bounded(headers in proptest::collection::vec((header(), 0..6_usize), 1..200)) {
        let mut aggregator = Aggregator::new(7, Pool::new(16, 16));
        aggregator.grant(grant()).unwrap();
        let mut worker = worker();
        worker.begin(Duration::ZERO, 1);
        worker.submit(SegmentIndex(0), Task::Sum(30));
        let mut buffer = [0; 256];
        for (index, (header, elements)) in headers.into_iter().enumerate() {
            let now = Duration::from_micros(10 * index as u64);
            let carries = matches!(header.kind, Kind::Contribution | Kind::Result);
            let payload = vec![1; if carries { 4 * elements } else { 0 }];
            let bytes = packet(&header, &key(header.worker), &payload);
            let mut sent = 0;
            aggregator.receive(now, &bytes, &mut |_: Recipient, _: &[u8]| sent += 1);
            prop_assert!(sent <= 3, "no more than a sum for each worker");
            worker.receive(now, &bytes, &mut Zeros);
            while worker.poll_transmit(now, &Zeros, &mut buffer).is_some() {}
            while worker.poll_event().is_some() {}
        }
        prop_assert!(16 - aggregator.pool().free() <= 8);
        aggregator.revoke(COMMUNICATOR);
        prop_assert_eq!(aggregator.pool().free(), 16, "all is given back");
    }
}

/// A broadcast's chunk is opened by whoever comes first, with or without bytes; the root's may be too many for a unit.
#[test]
fn more_bytes_for_all_than_a_unit_has_end_the_session() {
    let mut aggregator = Aggregator::new(7, Pool::new(16, 16));
    aggregator.grant(grant()).unwrap();
    let mut send = |kind, worker: u16, elements: usize| {
        // The note of bytes for all.
        let note = if kind == Kind::Begin { 0 } else { 2 };
        let (communicator, session, incarnation) = (COMMUNICATOR, 1, 7);
        let [sequence, chunk, had] = [0; 3];
        let [count, window] = [0; 2];
        let header = Header {
            kind,
            worker,
            count,
            communicator,
            session,
            incarnation,
            sequence,
            chunk,
            had,
            window,
            note,
        };
        let bytes = packet(&header, &key(worker), &vec![1; 4 * elements]);
        aggregator.receive(Duration::ZERO, &bytes, &mut |_: Recipient, _: &[u8]| {});
        aggregator.pool().free()
    };
    assert_eq!(send(Kind::Begin, 0, 0), 16);
    assert!(send(Kind::Contribution, 0, 0) < 16, "the chunk is open");
    assert_eq!(send(Kind::Contribution, 1, 5), 16, "the session is lost");
}

/// The range of all blocks.
const RANGE: f32 = 3000.0;

/// Hands packets from workers to an aggregator and back until nobody has any; returns what was counted.
struct Table {
    aggregator: Aggregator,
    workers: Vec<Worker>,
    memories: Vec<Memory>,
}

struct Memory {
    input: Vec<u8>,
    output: Vec<u8>,
    part: usize,
    sum: usize,
    elements: usize,
}

impl Tensors for Memory {
    fn read(&self, _: SegmentIndex, offset: u64, _: usize, bytes: &mut [u8]) {
        let at = offset as usize / self.elements * self.part;
        bytes.copy_from_slice(&self.input[at..at + bytes.len()]);
    }
    fn write(&mut self, _: SegmentIndex, offset: u64, _: usize, bytes: &[u8]) {
        let at = offset as usize / self.elements * self.sum;
        self.output[at..at + bytes.len()].copy_from_slice(bytes);
    }
    fn ranges(&self, _: SegmentIndex, _: u64, _: usize, bytes: &mut [u8]) {
        bytes.chunks_exact_mut(4).for_each(|range| range.copy_from_slice(&RANGE.to_le_bytes()));
    }
    fn encode(
        &self,
        segment: SegmentIndex,
        offset: u64,
        elements: usize,
        ranges: &[u8],
        bytes: &mut [u8],
    ) -> Squares {
        assert!(ranges.chunks_exact(4).all(|range| range == RANGE.to_le_bytes()));
        self.read(segment, offset, elements, bytes);
        Squares { error: 1.0, signal: 100.0 }
    }
}

impl Table {
    /// Workers with these inputs of `total` elements; `order` is in which their packets come.
    fn run(grant: Grant, inputs: &[Vec<u8>], total: usize, order: &[usize]) -> (Vec<Vec<u8>>, Counters) {
        let (form, elements) = (grant.format, grant.elements as usize);
        let whole = |bytes: fn(PayloadFormat, usize) -> Option<usize>| bytes(form, elements).unwrap();
        let (part, sum) = (whole(PayloadFormat::part_bytes), whole(PayloadFormat::sum_bytes));
        // What is lost of codes stands behind them.
        let behind = if matches!(form, PayloadFormat::Shared { .. }) { 8 } else { 0 };
        let chunks = total.div_ceil(elements);
        let mut aggregator = Aggregator::new(7, Pool::new(64, part.max(sum)));
        aggregator.grant(grant.clone()).unwrap();
        let mut table = Self { aggregator, workers: Vec::new(), memories: Vec::new() };
        for (index, input) in inputs.iter().enumerate() {
            let mut worker = Worker::new(WorkerConfig {
                communicator: grant.communicator,
                worker: index as u16,
                key: Key::derive(&grant.secret, grant.communicator, index as u16),
                format: form,
                elements: grant.elements,
                hosts: grant.workers,
                codes: Codes { segment_elements: 1000, ..Codes::default() },
                ..quick(0)
            });
            worker.begin(Duration::ZERO, 1);
            assert!(worker.submit(SegmentIndex(0), Task::Sum(total as u64)));
            table.workers.push(worker);
            table.memories.push(Memory {
                input: input.clone(),
                output: vec![0; sum * chunks],
                part: part - behind,
                sum: sum - behind,
                elements,
            });
        }
        let mut packet = vec![0; HEADER_BYTES + part.max(sum)];
        for step in 0..200 {
            let now = Duration::from_micros(step);
            for index in order {
                while let Some(bytes) =
                    table.workers[*index].poll_transmit(now, &table.memories[*index], &mut packet)
                {
                    for (worker, packet) in answers(&mut table.aggregator, now, &packet[..bytes]) {
                        table.workers[worker].receive(now, &packet, &mut table.memories[worker]);
                    }
                }
            }
        }
        let outputs = table.memories.iter().map(|memory| memory.output.clone()).collect();
        (outputs, table.aggregator.counters(grant.communicator).unwrap())
    }
}

proptest! {
    #[test]
    fn floats_in_order_are_the_same_whoever_comes_first(values in proptest::collection::vec(proptest::collection::vec(-1.0e9..1.0e9_f32, 37), 11), order in Just((0..11).collect::<Vec<usize>>()).prop_shuffle()) {
        let inputs: Vec<Vec<u8>> = values.iter().map(|input| input.iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
        let expected: Vec<u8> = (0..37).flat_map(|at| values.iter().map(|input| input[at]).reduce(|sum, value| sum + value).unwrap().to_le_bytes()).collect();
        let form = PayloadFormat::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum };
        let grant = Grant { workers: 11, format: form, ordered: true, share: Share { tenant: 1, weight: 1, guaranteed: 44, most: 44 }, ..grant() };
        let (outputs, _) = Table::run(grant, &inputs, 37, &order);
        for output in outputs {
            prop_assert_eq!(&output[..4 * 37], &expected[..]);
        }
    }

    #[test]
    fn shared_codes_add_undecoded(bits in 1..=4_usize, total in 1..700_usize, seed in any::<u64>(), order in Just(vec![0_usize, 1, 2]).prop_shuffle()) {
        use harmonaize_abi::{View, ViewMut};
        use harmonaize_kernels::{Isa, codes};
        let (block, elements) = (64_usize, 128_usize);
        let form = PayloadFormat::Shared { bits: bits as u8, block: block as u16, ranks: 3 };
        let one = codes::Code::Shared { bits, block, ranks: 1 };
        let values: Vec<Vec<f32>> = (0..3).map(|rank| (0..total).map(|at| ((at * 7 + rank * 13) % 101) as f32 - 50.0).collect()).collect();
        let ranges = vec![RANGE; elements / block];
        // A host encodes each chunk by itself, with the chunk's own seed.
        let inputs: Vec<Vec<u8>> = values.iter().enumerate().map(|(rank, values)| {
            values.chunks(elements).flat_map(|chunk| {
                let mut bytes = vec![0; one.bytes(chunk.len()).unwrap()];
                let ranges = &ranges[..chunk.len().div_ceil(block)];
                codes::encode_shared(Isa::detect(), bits, block, seed, seed ^ (rank as u64 + 1), View::from(ranges), View::from(chunk), ViewMut::from(&mut bytes[..])).unwrap();
                bytes
            }).collect()
        }).collect();
        let grant = Grant { format: form, elements: elements as u32, ..grant() };
        let (outputs, counters) = Table::run(grant, &inputs, total, &order);
        prop_assert_eq!(counters.sums, (total.div_ceil(elements) + total.div_ceil(form.ranged(elements))) as u64);
        let sum = codes::Code::Shared { bits, block, ranks: 3 };
        let (part, whole) = (one.bytes(elements).unwrap(), sum.bytes(elements).unwrap());
        for (at, length) in (0..total).step_by(elements).map(|from| elements.min(total - from)).enumerate() {
            let mut expected = vec![0; sum.bytes(length).unwrap()];
            for (rank, input) in inputs.iter().enumerate() {
                let input = &input[at * part..][..one.bytes(length).unwrap()];
                codes::add_shared(Isa::detect(), bits, block, 3, length, View::from(input), rank == 0, ViewMut::from(&mut expected[..])).unwrap();
            }
            for output in &outputs {
                prop_assert_eq!(&output[at * whole..][..expected.len()], &expected[..]);
            }
        }
    }
}

#[test]
fn grants_that_cannot_work_are_refused() {
    let mut aggregator = Aggregator::new(7, Pool::new(16, 16));
    let half = PayloadFormat::Tensor { dtype: Dtype::F16, op: ReduceOp::Sum };
    let few = PayloadFormat::Shared { bits: 4, block: 64, ranks: 2 };
    for (grant, refused) in [
        (Grant { workers: 0, ..grant() }, GrantError::Workers(0)),
        (Grant { workers: 1025, ..grant() }, GrantError::Workers(1025)),
        (Grant { format: half, ..grant() }, GrantError::Format(half)),
        (Grant { format: few, ..grant() }, GrantError::Format(few)),
        (Grant { elements: 5, ..grant() }, GrantError::Chunk { elements: 5, bytes: Some(20), unit: 16 }),
        (Grant { elements: 0, ..grant() }, GrantError::Chunk { elements: 0, bytes: Some(0), unit: 16 }),
    ] {
        assert_eq!(aggregator.grant(grant).unwrap_err(), refused);
    }
    aggregator.grant(grant()).unwrap();
}

/// All that counts what is not believed, or not taken.
fn counts(aggregator: &Aggregator) -> Vec<(&'static str, u64)> {
    let (strangers, counters) = (aggregator.unrecognized(), aggregator.counters(COMMUNICATOR).unwrap());
    vec![
        ("length", strangers.length),
        ("stranger", strangers.magic),
        ("version", strangers.version),
        ("unknown kind", strangers.kind),
        ("communicator", strangers.communicator),
        ("duplicates", counters.duplicates),
        ("stale", counters.stale),
        ("lost", counters.lost),
        ("no slot", counters.no_slot),
        ("size", counters.size),
        ("ahead", counters.ahead),
        ("worker", counters.worker),
        ("tag", counters.tag),
        ("kind", counters.kind),
    ]
}

/// Each bad packet counts as what it is and as nothing else. It gets no answer but what the protocol says, and the sum is right
/// after all of them.
#[test]
fn bad_packets_are_counted_and_have_no_effect() {
    let mut aggregator = Aggregator::new(7, Pool::new(16, 16));
    aggregator.grant(grant()).unwrap();
    let header = |kind: Kind, worker: u16| Header {
        kind,
        worker,
        count: u16::from(kind == Kind::Contribution),
        communicator: COMMUNICATOR,
        session: 5,
        incarnation: 7,
        sequence: 1,
        chunk: 0,
        had: 0,
        window: 0,
        note: 0,
    };
    let payload = |value: i32| value.to_le_bytes().repeat(4);
    let part = |worker: u16, change: fn(&mut Header)| {
        let mut header = header(Kind::Contribution, worker);
        change(&mut header);
        packet(&header, &key(worker), &payload(1 << worker))
    };
    let as_it_is = |_: &mut Header| ();
    let mut say = |bytes: &[u8]| {
        let before = counts(&aggregator);
        let answers: Vec<_> =
            answers(&mut aggregator, Duration::ZERO, bytes).into_iter().map(|(_, packet)| packet).collect();
        let grown = counts(&aggregator).into_iter().zip(before).filter(|(now, before)| now.1 != before.1);
        let grown: Vec<(&str, u64)> = grown.map(|(now, before)| (now.0, now.1 - before.1)).collect();
        (grown, answers)
    };
    for worker in 0..3 {
        let begin = packet(&header(Kind::Begin, worker), &key(worker), &[]);
        assert_eq!((say(&begin).0, say(&begin).1.len()), (vec![], 1), "granted");
    }
    assert_eq!(say(&part(0, as_it_is)), (vec![], vec![]));
    let damaged = |at: usize| {
        let mut bytes = part(1, as_it_is);
        bytes[at] ^= 1;
        bytes
    };
    let cut = |bytes: usize| part(1, as_it_is)[..bytes].to_vec();
    let longer = |more: usize| [part(1, as_it_is), vec![0; more]].concat();
    let with = |kind: Kind, payload: &[u8]| packet(&header(kind, 1), &key(1), payload);
    let mut unknown = part(1, as_it_is);
    unknown[3] = 9;
    let cases: Vec<(&str, &str, Vec<u8>, Option<Kind>)> = vec![
        ("nothing", "length", vec![], None),
        ("less than a header", "length", cut(HEADER_BYTES - 1), None),
        ("less than it says", "length", cut(HEADER_BYTES + 15), None),
        ("more than it says", "length", longer(1), None),
        ("more than any may have", "length", longer(MAX_PAYLOAD), None),
        ("a part of nothing", "length", with(Kind::Contribution, &[]), None),
        ("a beginning with something", "length", with(Kind::Begin, &[1; 4]), None),
        ("other magic", "stranger", damaged(0), None),
        ("a reserved byte", "stranger", damaged(62), None),
        ("another version", "version", damaged(2), None),
        ("an unknown kind", "unknown kind", unknown, None),
        ("another communicator", "communicator", damaged(8), None),
        ("a worker that is not there", "worker", part(3, as_it_is), None),
        ("a sum, with no aggregator above", "kind", with(Kind::Result, &payload(9)), None),
        ("another's rank", "tag", packet(&header(Kind::Contribution, 1), &key(2), &payload(9)), None),
        ("other bytes", "tag", damaged(HEADER_BYTES), None),
        ("another chunk", "tag", damaged(40), None),
        ("an earlier session", "stale", part(1, |header| header.session = 4), None),
        (
            "the beginning of one",
            "stale",
            packet(&Header { session: 4, ..header(Kind::Begin, 1) }, &key(1), &[]),
            None,
        ),
        (
            "the beginning of none",
            "stale",
            packet(&Header { session: 0, ..header(Kind::Begin, 1) }, &key(1), &[]),
            None,
        ),
        ("a session to come", "lost", part(1, |header| header.session = 6), Some(Kind::Lost)),
        ("another incarnation", "lost", part(1, |header| header.incarnation = 8), Some(Kind::Lost)),
        ("sums that are not there", "ahead", part(1, |header| header.had = 2), None),
        ("a chunk far ahead", "no slot", part(1, |header| header.chunk = 9), Some(Kind::Waiting)),
        ("the same again", "duplicates", part(0, as_it_is), Some(Kind::Waiting)),
        (
            "no whole elements",
            "size",
            packet(&Header { chunk: 1, ..header(Kind::Contribution, 1) }, &key(1), &[1; 6]),
            Some(Kind::Waiting),
        ),
    ];
    for (what, counter, bytes, answered) in &cases {
        let (grown, answers) = say(bytes);
        assert_eq!(grown, [(*counter, 1)], "{what}");
        let kinds: Vec<Kind> = answers.iter().map(|packet| Sealed::read(packet).unwrap().kind()).collect();
        assert_eq!(kinds, answered.iter().copied().collect::<Vec<_>>(), "{what}");
    }
    assert_eq!(say(&part(1, as_it_is)), (vec![], vec![]));
    let (grown, sums) = say(&part(2, as_it_is));
    assert_eq!((grown, sums.len()), (vec![], 3));
    for (worker, sum) in (0..).zip(&sums) {
        let (header, sum) = Sealed::read(sum).unwrap().open(&key(worker)).unwrap();
        assert_eq!((header.kind, header.count, sum), (Kind::Result, 3, &payload(7)[..]));
    }
    // Of a chunk that is there a part of another length ends the session: workers that differ would wait for ever.
    let (grown, answers) = say(&with(Kind::Contribution, &[1; 8]));
    assert_eq!(grown, [("size", 1)]);
    assert_eq!(Sealed::read(&answers[0]).unwrap().kind(), Kind::Lost);
}
