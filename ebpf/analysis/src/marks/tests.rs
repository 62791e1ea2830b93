//! Operations come out as they were marked, and never wrong in silence.

use super::*;
use crate::trace::{Lost, LostKind, Record};
use harmonaize_events::{Mark, MarkKind};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

const LINGER: u64 = 2_000_000;

fn mark(kind: MarkKind, time_ns: u64, operation: u64) -> Mark {
    Mark { time_ns, communicator: 7, operation, kind: kind as u32, participant: 1, ..Mark::default() }
}

fn called(time_ns: u64, operation: u64, rank: u32) -> Mark {
    Mark { rank, bytes: 4096, channel: 5, ..mark(MarkKind::Called, time_ns, operation) }
}

fn ended(time_ns: u64, operation: u64, rank: u32) -> Mark {
    Mark { rank, ..mark(MarkKind::Ended, time_ns, operation) }
}

fn moved(kind: MarkKind, time_ns: u64, operation: u64, peer: u32, bytes: u64) -> Mark {
    Mark { peer, bytes, epoch: 3, ..mark(kind, time_ns, operation) }
}

fn take(marks: &mut Marks, all: &[Mark]) {
    all.iter().for_each(|mark| marks.take(&Record::Mark(*mark)));
}

fn polled(marks: &mut Marks) -> Vec<Operation> {
    std::iter::from_fn(|| marks.poll()).collect()
}

/// An operation of two local ranks between two peers.
fn operation(start: u64, number: u64) -> Vec<Mark> {
    vec![
        called(start, number, 4),
        moved(MarkKind::Received, start + 5, number, 0, 100),
        called(start + 10, number, 5),
        Mark { epoch: 2, ..mark(MarkKind::SegmentBegan, start + 11, number) },
        moved(MarkKind::Sent, start + 12, number, 2, 60),
        moved(MarkKind::Sent, start + 20, number, 2, 40),
        ended(start + 30, number, 4),
        ended(start + 31, number, 5),
        moved(MarkKind::Sent, start + 40, number, 2, 1),
    ]
}

#[test]
fn operation_is_reported_complete_after_linger() {
    let mut marks = Marks::default();
    take(&mut marks, &operation(1000, 0));
    marks.advance(Nanos(1040 + LINGER - 1));
    assert_eq!((polled(&mut marks), marks.open().count()), (vec![], 1));
    marks.advance(Nanos(1040 + LINGER));
    let rank = |rank, called, ended| RankCall {
        rank,
        called: Some(Nanos(called)),
        ended: Some(Nanos(ended)),
        failed: false,
        bytes: 4096,
        zero_input: None,
        zero_output: None,
    };
    let none = Moved::default();
    let edges = vec![
        Edge {
            peer: 0,
            sent: none,
            received: Moved { count: 1, bytes: 100, first: Nanos(1005), last: Nanos(1005) },
        },
        Edge {
            peer: 2,
            sent: Moved { count: 3, bytes: 101, first: Nanos(1012), last: Nanos(1040) },
            received: none,
        },
    ];
    let expected = Operation {
        communicator: CommunicatorId(7),
        operation: OperationId(0),
        participant: 1,
        collective: Some(4),
        epochs: (Epoch(2), Epoch(3)),
        began: Nanos(1000),
        ended: Nanos(1040),
        ranks: vec![rank(4, 1000, 1030), rank(5, 1010, 1031)],
        edges,
        segments: 1,
        first_segment: Some(Nanos(1011)),
        coded: None,
        whole: true,
    };
    assert_eq!(polled(&mut marks), [expected]);
    // What comes after is counted, and opens nothing.
    take(&mut marks, &[moved(MarkKind::Sent, 9_000_000, 0, 2, 1)]);
    assert_eq!((marks.counts().late, marks.open().count()), (1, 0));
}

#[test]
fn reported_operation_has_its_losses() {
    let mut marks = Marks::default();
    let coded = Mark { segment: 0.25_f64.to_bits(), bytes: 9, channel: 1, ..mark(MarkKind::Coded, 5, 0) };
    take(&mut marks, &[called(1, 0, 0), coded, ended(8, 0, 0)]);
    marks.advance(Nanos(1 << 40));
    let told = polled(&mut marks);
    assert_eq!(told[0].coded, Some(Coded { error: 0.25, saved_bytes: 9, refused: true }));
}

#[test]
fn a_failure_ends_a_rank_too() {
    let mut marks = Marks::default();
    let failed = Mark { rank: 1, ..mark(MarkKind::Failed, 9, 0) };
    take(&mut marks, &[called(1, 0, 0), called(2, 0, 1), ended(8, 0, 0)]);
    marks.advance(Nanos(1 << 40));
    assert_eq!(polled(&mut marks), []);
    take(&mut marks, &[failed]);
    marks.advance(Nanos(1 << 40));
    let told = polled(&mut marks);
    assert_eq!(told[0].ranks.iter().map(|rank| rank.failed).collect::<Vec<_>>(), [false, true]);
    assert!(told[0].whole);
}

#[test]
fn what_lost_marks_is_not_whole() {
    let lost = |what| Record::Lost(Lost { time_ns: 1050, kind: what, count: 1 });
    for (what, whole) in [(LostKind::Marks, [false, false, true]), (LostKind::Events, [true, true, true])] {
        let mut marks = Marks::default();
        take(&mut marks, &operation(1000, 0));
        marks.take(&lost(what));
        marks.advance(Nanos(1 << 30));
        // What of this one came before its call may have been lost.
        take(&mut marks, &operation(1 << 31, 1));
        marks.advance(Nanos(1 << 32));
        take(&mut marks, &operation(1 << 33, 2));
        marks.advance(Nanos(1 << 34));
        assert_eq!(polled(&mut marks).iter().map(|one| one.whole).collect::<Vec<_>>(), whole, "{what:?}");
    }
    // Without a word of the loss: a rank's call or end is missing.
    for missing in [0, 2] {
        let mut marks = Marks::default();
        take(&mut marks, &operation(0, 0));
        marks.advance(Nanos(1 << 30));
        let mut some = operation(1 << 31, 1);
        some.remove(missing);
        take(&mut marks, &some);
        marks.advance(Nanos(1 << 32));
        assert_eq!(polled(&mut marks).iter().map(|one| one.whole).collect::<Vec<_>>(), [true, false]);
    }
}

#[test]
fn after_a_gap_operations_may_count_anew() {
    let mut marks = Marks::default();
    for number in 0..5 {
        take(&mut marks, &operation(number << 30, number));
        marks.advance(Nanos((number << 30) + (1 << 29)));
    }
    take(&mut marks, &[called(6 << 30, 5, 4)]);
    marks.take(&Record::Lost(Lost { time_ns: 7 << 30, kind: LostKind::Gap, count: 0 }));
    for number in 0..2 {
        take(&mut marks, &operation((8 + number) << 30, number));
        marks.advance(Nanos(((8 + number) << 30) + (1 << 29)));
    }
    let told: Vec<_> = polled(&mut marks).iter().map(|one| (one.operation.0, one.whole)).collect();
    let whole = (0..5).map(|number| (number, true));
    assert_eq!(told, whole.chain([(5, false), (0, false), (1, true)]).collect::<Vec<_>>());
    assert_eq!(marks.counts().late, 0);
}

#[test]
fn concurrent_operations_are_exact() {
    for seed in 0..200 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut all = Vec::new();
        for number in 0..50_u64 {
            let start = 1_000_000 * number + random.random_range(0..3_000_000);
            all.extend(operation(start, number));
        }
        // Marks of several threads come a little out of order.
        all.shuffle(&mut random);
        all.sort_by_key(|mark| mark.time_ns / 500_000);
        let mut marks = Marks::new(Limits { linger: Duration::from_millis(4), ..Limits::default() });
        for mark in &all {
            marks.take(&Record::Mark(*mark));
            marks.advance(Nanos(mark.time_ns));
        }
        marks.advance(Nanos(1 << 40));
        let mut told = polled(&mut marks);
        told.sort_by_key(|one| one.operation);
        assert_eq!(told.len(), 50);
        for (number, one) in told.iter().enumerate() {
            let (calls, sent) = (one.ranks.len(), one.edges[1].sent);
            assert_eq!((one.operation.0, one.whole, calls, sent.bytes), (number as u64, true, 2, 101));
            assert_eq!(one.ended.since(one.began), Duration::from_nanos(40));
        }
    }
}

#[test]
fn hostile_marks_take_bounded_memory() {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let limits =
        Limits { communicators: 16, operations: 8, ends: 4, findings: 32, linger: Duration::from_nanos(10) };
    let mut marks = Marks::new(limits);
    for _ in 0..200_000 {
        let wild = |random: &mut ChaCha8Rng| match random.random_range(0..4) {
            0 => u64::MAX - random.random_range(0..3),
            1 => random.random(),
            _ => random.random_range(0..300),
        };
        let mark = Mark {
            time_ns: wild(&mut random),
            communicator: wild(&mut random),
            operation: wild(&mut random),
            segment: wild(&mut random),
            bytes: wild(&mut random),
            epoch: random.random(),
            participant: random.random(),
            rank: random.random_range(0..9),
            peer: random.random_range(0..9),
            kind: random.random_range(0..8),
            channel: random.random(),
        };
        marks.take(&Record::Mark(mark));
        if random.random_range(0..50) == 0 {
            marks.advance(Nanos(wild(&mut random)));
        }
        if random.random_range(0..500) == 0 {
            let what = if random.random() { LostKind::Gap } else { LostKind::Marks };
            marks.take(&Record::Lost(Lost { time_ns: wild(&mut random), kind: what, count: 1 }));
        }
        assert!(marks.found.len() <= 32 && marks.communicators.len() <= 16);
        assert!(marks.open().count() <= 16 * 8);
    }
    assert!(marks.open().all(|one| one.ranks.len() <= 4 && one.edges.len() <= 4));
}
