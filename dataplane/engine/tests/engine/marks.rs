//! Marks tell of own operations exactly: who called and when, which bytes went to whom, and when it ended.

use crate::common::{MARKS, SMALL, World, call, tcp};
use harmonaize_abi::{Collective, ReduceOp, Status};
use harmonaize_engine::{Notice, marks};
use harmonaize_events::{Mark, MarkKind, SAMPLED_BLOCKS};
use harmonaize_plan::Participant;
use harmonaize_transport::Flow;

fn world(ranks: &[Vec<u32>]) -> World {
    World::new(tcp(ranks.len()), ranks, SMALL)
}

/// What an engine has marked since it was last asked.
fn read(world: &World, engine: usize) -> Vec<Mark> {
    std::iter::from_fn(|| world.marks[engine].read()).collect()
}

fn of(marks: &[Mark], kind: MarkKind) -> impl Iterator<Item = &Mark> {
    marks.iter().filter(move |mark| mark.kind == kind as u32)
}

/// Bytes of messages of a kind with a peer.
fn bytes(marks: &[Mark], kind: MarkKind, peer: u32) -> u64 {
    of(marks, kind).filter(|mark| mark.peer == peer).map(|mark| mark.bytes).sum()
}

/// Zeros in large tensors of f32 are reported. Nobody has to say what the tensors hold, but how much of it is
/// zeros.
#[test]
fn zeros_are_told_of_large_tensors() {
    let mut world = world(&[vec![0], vec![1]]);
    const COUNT: usize = 300 << 10;
    let sum = |count: u64, world: &mut World| {
        for rank in 0..2 {
            let sum = crate::common::reduce(ReduceOp::Sum, count, 0, 16 << 20);
            world.submit(rank, sum);
        }
        assert!(world.completions().iter().all(|completion| completion.status == Status::Ok.code()));
        [0, 1].map(|engine| {
            let marks = read(world, engine);
            [MarkKind::Called, MarkKind::Ended].map(|kind| of(&marks, kind).next().unwrap().segment)
        })
    };
    let mut values = vec![0.0_f32; COUNT];
    world.write_floats(0, 0, &values);
    values.fill(1.5);
    world.write_floats(1, 0, &values);
    let all = 1 + u64::from(SAMPLED_BLOCKS);
    assert_eq!(sum(COUNT as u64, &mut world), [[all, 1], [1, 1]]);
    world.write_floats(1, 0, &vec![0.0; COUNT]);
    assert_eq!(sum(COUNT as u64, &mut world), [[all, all]; 2]);
    assert_eq!(sum(1000, &mut world), [[0, 0]; 2], "small ones are not looked into");
}

#[test]
fn marks_cover_the_operation() {
    let mut world = world(&[vec![2], vec![0], vec![1]]);
    const COUNT: u64 = 6_000;
    for operation in 0..3 {
        (0..3).for_each(|rank| world.write(rank, 0, &vec![rank as u64 + operation; COUNT as usize]));
        (0..3).for_each(|rank| world.submit(rank, call(Collective::AllReduce, COUNT, 1, 0, 16 << 20, 0)));
        assert!(world.completions().iter().all(|completion| completion.status == Status::Ok.code()));
        (0..3).for_each(|rank| assert_eq!(world.read(rank, 16 << 20, 2), [3 + 3 * operation; 2]));
        let told: Vec<_> = (0..3).map(|engine| read(&world, engine)).collect();
        for (me, marks) in told.iter().enumerate() {
            assert!(marks.iter().all(|mark| mark.operation == operation && mark.communicator == 1));
            assert!(marks.iter().all(|mark| mark.participant == me as u32));
            assert!(marks.is_sorted_by_key(|mark| mark.time_ns), "times go back");
            let rank = [2, 0, 1][me];
            let whole = |kind| of(marks, kind).map(|mark| (mark.rank, mark.bytes)).collect::<Vec<_>>();
            assert_eq!(whole(MarkKind::Called), [(rank, COUNT * 8)]);
            assert_eq!(whole(MarkKind::Ended), [(rank, 0)]);
            let called = of(marks, MarkKind::Called).map(|mark| mark.channel);
            assert!(called.eq([1 + u32::from(Collective::AllReduce.code())]));
            assert_eq!(of(marks, MarkKind::Failed).count(), 0);
            let segments: Vec<_> = of(marks, MarkKind::SegmentBegan).collect();
            assert_eq!(segments.iter().map(|mark| mark.bytes).sum::<u64>(), COUNT * 8);
            assert!(
                segments.is_sorted_by(|a, b| a.segment < b.segment) && segments.len() > 1,
                "{segments:?}"
            );
        }
        let (mut all, n) = (0, told.len());
        for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))) {
            let sent = bytes(&told[from], MarkKind::Sent, to as u32);
            assert_eq!(sent, bytes(&told[to], MarkKind::Received, from as u32), "{from} to {to}");
            all += sent;
        }
        assert_eq!(all, 2 * (3 - 1) * COUNT * 8, "the ring's bytes");
    }
    assert!(world.marks.iter().all(|reader| reader.lost() == 0));
}

/// Of messages over RDMA some are timed, whose bytes the device has carried out.
#[test]
fn completions_are_marked_over_rdma() {
    let mut world = World::new(crate::verbs_allocations::transports(), &[vec![0], vec![1]], SMALL);
    for _ in 0..2 {
        (0..2).for_each(|rank| world.submit(rank, call(Collective::AllReduce, 6_000, 1, 0, 16 << 20, 0)));
        assert!(world.completions().iter().all(|completion| completion.status == Status::Ok.code()));
    }
    for engine in 0..2 {
        let marks = read(&world, engine);
        let other = 1 - engine as u32;
        let sent = bytes(&marks, MarkKind::Sent, other);
        let told: Vec<_> = of(&marks, MarkKind::Completed).collect();
        assert!(!told.is_empty());
        for mark in told {
            assert_eq!(
                (mark.communicator, mark.participant, mark.peer),
                (1, engine as u32, other),
                "{mark:?}"
            );
            assert!(mark.operation == 0 && mark.channel < 2, "one of two paths: {mark:?}");
            assert!(mark.epoch > 0 && (1..=sent).contains(&mark.bytes) && mark.segment > 0, "{mark:?}");
        }
    }
}

#[test]
fn an_operation_that_fails_says_so() {
    let mut world = world(&[vec![0], vec![1]]);
    world.submit(0, call(Collective::AllReduce, 100, 1, 0, 16 << 20, 0));
    world.submit(1, call(Collective::AllReduce, 101, 1, 0, 16 << 20, 0));
    assert!(world.completions().iter().all(|completion| completion.status == Status::Mismatch.code()));
    for engine in 0..2 {
        let marks = read(&world, engine);
        assert_eq!(of(&marks, MarkKind::Ended).count(), 0);
        let failed: Vec<_> = of(&marks, MarkKind::Failed).map(|mark| (mark.rank, mark.operation)).collect();
        assert_eq!(failed, [(engine as u32, 0)], "{marks:?}");
    }
}

#[test]
fn a_queue_that_nobody_reads_loses_the_rest_and_counts_it() {
    let mut world = world(&[vec![0], vec![1]]);
    (0..2).for_each(|rank| world.submit(rank, call(Collective::AllReduce, 300_000, 1, 0, 16 << 20, 0)));
    assert!(world.completions().iter().all(|completion| completion.status == Status::Ok.code()));
    for engine in 0..2 {
        let lost = world.marks[engine].lost();
        let kept = read(&world, engine);
        assert_eq!(kept.len(), MARKS);
        // 2.4 MB in messages of 4 KiB, each way.
        assert!(lost > 2 * 2_400_000 / 4096 - MARKS as u64, "{lost}");
        assert_eq!(of(&kept, MarkKind::Ended).count(), 0);
    }
    let (writer, reader) = marks(0);
    drop(writer);
    assert_eq!(reader.read(), None);
}

#[test]
fn an_epoch_that_is_prepared_tells_its_flows() {
    let world = world(&[vec![0], vec![1]]);
    let flows: Vec<Vec<(Participant, Flow)>> = (0..2)
        .map(|engine| {
            let notices = world.notices[engine].lock().unwrap();
            let flows = notices.iter().find_map(|notice| match notice {
                Notice::Prepared { flows, .. } => Some(flows.clone()),
                _ => None,
            });
            flows.unwrap()
        })
        .collect();
    for (engine, flows) in flows.iter().enumerate() {
        assert_eq!(flows.len(), 2, "one per path: {flows:?}");
        assert!(flows.iter().all(|(peer, _)| *peer == Participant(1 - engine as u32)));
    }
    for ((_, one), (_, other)) in flows[0].iter().zip(&flows[1]) {
        let (Flow::Tcp { local, remote }, Flow::Tcp { local: theirs, remote: ours }) = (one, other) else {
            panic!("{one:?} and {other:?}")
        };
        assert_eq!((local, remote), (ours, theirs));
        assert_eq!(*remote, world.addresses[1]);
    }
}
