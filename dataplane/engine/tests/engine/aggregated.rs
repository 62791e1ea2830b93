//! Operations by an aggregator: real engines, real datagrams and the aggregator's state machine behind a socket of its own.

use crate::common::{World, reduce};
use crate::served::{CHUNK, Served, any, my_turn, ordinary, whole_by, world, world_of};
use harmonaize_abi::{Collective, Completion, Dtype, ReduceOp, Region, Submission};
use harmonaize_aggregator::PayloadFormat;
use harmonaize_engine::{Command, Engine, Epoch, Leases, Notice};
use harmonaize_events::{Mark, MarkKind};
use harmonaize_transport::tcp::{Config, TcpTransport};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn input(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at * (rank + 3)) % 1000) as f32 - 300.0).collect()
}

/// One AllReduce of all ranks, `disturb`ed in its midst; its completions. Results must be exact: the sums of these floats are.
pub(crate) fn all_reduce(
    world: &mut World,
    count: usize,
    in_place: bool,
    disturb: impl FnOnce(&mut World),
) -> Vec<Completion> {
    let ranks = world.tenants.len();
    let output = if in_place { 0 } else { 16 << 20 };
    (0..ranks).for_each(|rank| world.write_floats(rank, 0, &input(rank, count)));
    (0..ranks).for_each(|rank| world.submit(rank, reduce(ReduceOp::Sum, count as u64, 0, output)));
    disturb(world);
    let completions = world.completions();
    let expected = (0..ranks)
        .map(|rank| input(rank, count))
        .fold(vec![0.0; count], |sum, values| sum.iter().zip(&values).map(|(a, b)| a + b).collect());
    for (rank, completion) in completions.iter().enumerate() {
        assert_eq!(completion.status, 0, "rank {rank}: {completion:?}");
        assert!(
            world.read_floats(rank, output, count) == expected,
            "rank {rank} has a wrong sum of {count}, in place: {in_place}"
        );
    }
    completions
}

/// AllReduces until one has gone by the aggregator whole. Where its thread does not get its turn in time, hosts take over for a while.
pub(crate) fn aggregated(world: &mut World, count: usize, in_place: bool) {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let completions = all_reduce(world, count, in_place, |_| {});
        // Each host sends its tensor once.
        let whole = (9, 0, count as u64 * 4);
        let how =
            |completion: &Completion| (completion.algorithm, completion.fallback, completion.wire_bytes);
        if completions.iter().all(|completion| how(completion) == whole) {
            return;
        }
        assert!(Instant::now() < deadline, "the aggregator is never used: {completions:?}");
    }
}

#[test]
fn large_sums_go_by_the_aggregator_and_others_by_the_hosts() {
    let _turn = my_turn();
    for ranks in [vec![vec![0], vec![1], vec![2], vec![3]], vec![vec![0, 2], vec![1], vec![3, 4, 5]]] {
        let served = Served::start(any(), 7, ranks.len() as u16, 0);
        let mut world = world(&ranks, served.reached_by(ranks.len() as u32));
        for (count, in_place) in [(300, false), (300, true), (100_000, false), (100_001, true), (777, false)]
        {
            let before = served.sums();
            aggregated(&mut world, count, in_place);
            world.until("sums are counted", |_| {
                served.sums() >= before + (count as u64).div_ceil(CHUNK.into())
            });
        }
        let before = served.sums();
        let completions = all_reduce(&mut world, 200, false, |_| {});
        assert!(completions.iter().all(|completion| completion.algorithm != 9), "less than is worth it");
        assert_eq!(served.sums(), before);
    }
}

#[test]
fn losses_are_made_good() {
    let _turn = my_turn();
    let ranks = [vec![0], vec![1], vec![2]];
    let served = Served::start(any(), 7, 3, 20);
    let mut world = world(&ranks, served.reached_by(3));
    for round in 0..6 {
        all_reduce(&mut world, 40_000, round % 2 == 0, |_| {});
    }
    assert!(served.sums() > 0);
}

/// The aggregator dies in the midst of an operation, and hosts go on. It comes back under its address, and is used
/// again.
#[test]
fn an_aggregator_that_dies_costs_no_operation() {
    let _turn = my_turn();
    let ranks = [vec![0], vec![1, 4], vec![2], vec![3]];
    let mut served = Some(Served::start(any(), 1, 4, 0));
    let reached = served.as_ref().unwrap().reached_by(4);
    let address = reached[0].address;
    let mut world = world(&ranks, reached);
    let (mut incarnation, deadline) = (1, Instant::now() + Duration::from_secs(120));
    for in_place in [false, true] {
        loop {
            aggregated(&mut world, 20_000, in_place);
            let completions = all_reduce(&mut world, 1_000_000, in_place, |world| {
                let (before, soon) =
                    (served.as_ref().unwrap().sums(), Instant::now() + Duration::from_secs(1));
                let some =
                    |_: &mut World| served.as_ref().unwrap().sums() > before + 200 || Instant::now() > soon;
                world.until("some of the sums", some);
                served = None;
            });
            // Without it.
            for completion in all_reduce(&mut world, 50_000, in_place, |_| {}) {
                assert_ne!((completion.algorithm, completion.fallback), (9, 0));
            }
            incarnation += 1;
            served = Some(Served::start(address, incarnation, 4, 0));
            if completions.iter().any(|completion| completion.fallback == 1) {
                break;
            }
            assert!(Instant::now() < deadline, "it never dies in the midst of a segment: {completions:?}");
        }
    }
    aggregated(&mut world, 50_000, true);
}

/// Another engine in the place of one, as one of another process would be. The one before, which must last as long as the world.
fn succeed(world: &mut World, at: usize) -> Engine {
    let deadline = Instant::now() + Duration::from_secs(20);
    let image = loop {
        world.engines[at].handle_command(Command::HandOver { thread: 0 });
        let handed = world.notices[at].lock().unwrap().pop();
        match handed {
            Some(Notice::HandedOver { image: Ok(image), .. }) => break image,
            // A peer was in the midst of a frame.
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
        for engine in &mut world.engines {
            engine.progress(64);
        }
    };
    let transport = Box::new(TcpTransport::bind(Config::new(any())).unwrap());
    let notify = Arc::clone(&world.notices[at]);
    let mut successor = Engine::new(transport, Box::new(move |n| notify.lock().unwrap().push(n))).unwrap();
    successor.handle_command(Command::TakeOver { thread: 0, image, leases: Leases::default() });
    let taken = world.notices[at].lock().unwrap().pop();
    assert!(matches!(taken, Some(Notice::TakenOver { epochs: Ok(_), .. })), "{taken:?}");
    successor.handle_command(Command::Resume);
    std::mem::replace(&mut world.engines[at], successor)
}

/// In the midst of an operation: hosts take over, and the successor is the aggregator's worker again. Of the host that leads, and of another.
#[test]
fn a_successor_goes_on_with_the_aggregator() {
    let _turn = my_turn();
    let served = Served::start(any(), 7, 4, 0);
    let mut world = world(&[vec![0], vec![1, 4], vec![2], vec![3]], served.reached_by(4));
    let mut before = Vec::new();
    for (at, in_place) in [(0, false), (0, true), (1, false), (1, true)] {
        aggregated(&mut world, 20_000, in_place);
        all_reduce(&mut world, 1_000_000, in_place, |world| {
            let (sums, soon) = (served.sums(), Instant::now() + Duration::from_secs(1));
            world.until("some of the sums", |_| served.sums() > sums + 200 || Instant::now() > soon);
            before.push(succeed(world, at));
        });
    }
    aggregated(&mut world, 20_000, true);
}

/// What marks report of aggregated operations. It is the segments that each host did, and how often hosts gave the aggregator up.
fn marked(world: &World) -> (Vec<Vec<u64>>, usize) {
    let mut given_up = 0;
    let of_host = world.marks.iter().map(|marks| {
        let marks: Vec<Mark> = std::iter::from_fn(|| marks.read()).collect();
        let of = |kind: MarkKind| marks.iter().filter(move |mark| mark.kind == kind as u32);
        given_up += of(MarkKind::GivenUp).count();
        of(MarkKind::Aggregated).map(|mark| mark.segment).collect()
    });
    (of_host.collect(), given_up)
}

#[test]
fn marks_tell_of_operations_by_the_aggregator_and_of_its_end() {
    let _turn = my_turn();
    let mut served = Some(Served::start(any(), 1, 3, 0));
    let reached = served.as_ref().unwrap().reached_by(3);
    let address = reached[0].address;
    let mut world = world(&[vec![0], vec![1, 3], vec![2]], reached);
    let (mut incarnation, deadline) = (1, Instant::now() + Duration::from_secs(120));
    loop {
        aggregated(&mut world, 20_000, true);
        // Only so many marks wait to be read.
        marked(&world);
        aggregated(&mut world, 20_000, true);
        let (whole, _) = marked(&world);
        assert!(whole.iter().all(|host| host.last() == Some(&0)), "{whole:?}");
        drop(served.take());
        let completions = all_reduce(&mut world, 20_000, true, |_| {});
        let (again, given_up) = marked(&world);
        if completions.iter().all(|completion| completion.fallback == 1) {
            assert!(again.iter().all(|host| matches!(host[..], [segments] if segments > 0)), "{again:?}");
            assert!(given_up > 0, "nobody gave it up");
            break;
        }
        assert!(Instant::now() < deadline, "it is never in the midst of a session: {completions:?}");
        incarnation += 1;
        served = Some(Served::start(address, incarnation, 3, 0));
    }
}

/// Small sums are done at once. If a rank has one when the aggregator dies, all ranks have its bits, which depend on who came
/// first.
#[test]
fn small_sums_have_the_same_bits_everywhere_when_the_aggregator_dies() {
    let _turn = my_turn();
    let ranks = [vec![0], vec![1, 4], vec![2], vec![3]];
    let first = Served::start(any(), 1, 4, 3);
    let reached = first.reached_by(4);
    let address = reached[0].address;
    let mut world = world(&ranks, reached);
    let (mut served, deadline) = (first, Instant::now() + Duration::from_secs(120));
    for round in 0..8_u64 {
        let op = if round % 3 == 0 { ReduceOp::Average } else { ReduceOp::Sum };
        let inputs: Vec<Vec<f32>> = (0..5).map(|rank| ordinary(rank + round as usize, 1000)).collect();
        let mut used = false;
        while !used {
            let (measured, completions) = coded(&mut world, op, &inputs, round % 2 == 0);
            assert!(measured < 1e-10, "{measured}");
            used = completions.iter().all(|completion| completion.algorithm == 9);
            assert!(Instant::now() < deadline, "the aggregator is not used in round {round}");
        }
        // It dies sooner or later after the operation has begun.
        let sums = served.sums();
        let killer = std::thread::spawn(move || {
            let begun = Instant::now();
            while served.sums() <= sums + round % 4 && begun.elapsed() < Duration::from_millis(20) {
                std::thread::yield_now();
            }
            drop(served);
        });
        let (measured, _) = coded(&mut world, op, &inputs, round % 2 == 1);
        assert!(measured < 1e-10, "{measured}");
        killer.join().unwrap();
        served = Served::start(address, 2 + round, 4, 3);
    }
    drop(served);
}

/// A plan without it takes over in the midst of an operation.
#[test]
fn an_epoch_ends_aggregation() {
    let _turn = my_turn();
    let ranks = [vec![0], vec![1], vec![2], vec![3]];
    let served = Served::start(any(), 7, 4, 0);
    let mut world = world(&ranks, served.reached_by(4));
    aggregated(&mut world, 20_000, true);
    all_reduce(&mut world, 1_000_000, true, |world| {
        let (before, soon) = (served.sums(), Instant::now() + Duration::from_secs(1));
        world.until("some of the sums", |_| served.sums() > before + 20 || Instant::now() > soon);
        world.aggregation = None;
        world.change(Epoch(2), &[0, 2, 1, 3], |_, _| true);
    });
    world.until_switched(Epoch(2));
    let before = served.sums();
    let completions = all_reduce(&mut world, 10_000, false, |_| {});
    assert!(completions.iter().all(|completion| completion.algorithm != 9) && served.sums() == before);
}

/// An engine that has no way to the aggregator asks for the hosts, again and again; operations go on.
#[test]
fn one_host_without_a_way_leaves_it_to_the_hosts() {
    let _turn = my_turn();
    let served = Served::start(any(), 7, 2, 0);
    let mut reached = served.reached_by(2);
    reached.truncate(1);
    let mut world = world(&[vec![0], vec![1]], reached);
    for _ in 0..4 {
        all_reduce(&mut world, 30_000, false, |_| {});
    }
    assert_eq!(served.sums(), 0);
}

/// What would round at each step, and what is no sum: by the hosts.
#[test]
fn what_the_aggregator_does_not_sum_goes_by_the_hosts() {
    let _turn = my_turn();
    let served = Served::start(any(), 7, 2, 0);
    let mut world = world(&[vec![0], vec![1]], served.reached_by(2));
    let bytes = 20_000;
    let (input, output) = (Region { offset: 0, bytes }, Region { offset: 1 << 20, bytes });
    let half =
        Submission { dtype: Dtype::Bf16.code(), input, output, ..reduce(ReduceOp::Sum, 10_000, 0, 1 << 20) };
    let broadcast =
        Submission { collective: Collective::Broadcast.code(), ..reduce(ReduceOp::Sum, 10_000, 0, 1 << 20) };
    for submission in [half, broadcast] {
        (0..2).for_each(|rank| world.submit(rank, submission));
        let completions = world.completions();
        assert!(completions.iter().all(|completion| completion.status == 0 && completion.algorithm != 9));
    }
    assert_eq!(served.sums(), 0);
}

pub(crate) fn codes(hosts: usize) -> PayloadFormat {
    PayloadFormat::Shared { bits: 4, block: 64, ranks: hosts as u16 }
}

/// One AllReduce; what it lost, vNMSE, and its completions. All ranks have the same bits.
pub(crate) fn coded(
    world: &mut World,
    op: ReduceOp,
    inputs: &[Vec<f32>],
    in_place: bool,
) -> (f64, Vec<Completion>) {
    let (ranks, count) = (inputs.len(), inputs[0].len());
    let output = if in_place { 0 } else { 16 << 20 };
    inputs.iter().enumerate().for_each(|(rank, input)| world.write_floats(rank, 0, input));
    (0..ranks).for_each(|rank| world.submit(rank, reduce(op, count as u64, 0, output)));
    let completions = world.completions();
    assert!(completions.iter().all(|completion| completion.status == 0), "{completions:?}");
    let found = world.read_floats(0, output, count);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
    for rank in 1..ranks {
        assert!(bits(&world.read_floats(rank, output, count)) == bits(&found), "rank {rank} has other bits");
    }
    let scale = if op == ReduceOp::Average { ranks as f64 } else { 1.0 };
    let (mut error, mut signal) = (0.0, 0.0);
    for at in 0..count {
        let of_ranks = inputs.iter().map(|input| f64::from(input[at]));
        signal += of_ranks.clone().map(|value| value * value).sum::<f64>();
        error += (f64::from(found[at]) * scale - of_ranks.sum::<f64>()).powi(2);
    }
    (error / signal, completions)
}

/// Sums of codes have the same bits at all ranks, within what receipts say. That is within what 4 bits lose. Averages
/// are summed too.
#[test]
fn codes_are_summed_undecoded() {
    let _turn = my_turn();
    for ranks in [vec![vec![0], vec![1], vec![2], vec![3]], vec![vec![0, 2], vec![1], vec![3, 4, 5]]] {
        let (hosts, all) = (ranks.len(), ranks.iter().map(Vec::len).sum::<usize>());
        let served = Served::of(codes(hosts), any(), 7, hosts as u16, 0);
        let mut world = world_of(codes(hosts), &ranks, served.reached_by(hosts as u32));
        for (count, in_place, op) in [
            (300, false, ReduceOp::Sum),
            (100_000, true, ReduceOp::Sum),
            (100_001, false, ReduceOp::Average),
            (777, true, ReduceOp::Average),
        ] {
            let inputs: Vec<Vec<f32>> = (0..all).map(|rank| ordinary(rank, count)).collect();
            let deadline = Instant::now() + Duration::from_secs(120);
            loop {
                let (measured, completions) = coded(&mut world, op, &inputs, in_place);
                let claimed = f64::from(f32::from_bits(completions[0].error));
                assert!(measured <= claimed.max(1e-9), "{measured} lost, and {claimed} told");
                if whole_by(&completions) {
                    assert!(claimed > 0.0 && claimed < 0.15, "{count}: {claimed}");
                    let bits = completions[0].wire_bytes as f64 * 8.0 / count as f64;
                    assert!(bits < 6.0, "{bits} bits an element");
                    break;
                }
                assert!(Instant::now() < deadline, "the aggregator is never used: {completions:?}");
            }
        }
    }
}

/// What would lose more than it may goes by the hosts. So does what has an element that is no number; nobody has a part of such a sum.
#[test]
fn codes_that_would_lose_too_much_are_left_to_the_hosts() {
    let _turn = my_turn();
    let ranks = [vec![0], vec![1], vec![2]];
    let served = Served::of(codes(3), any(), 7, 3, 0);
    let mut reached = served.reached_by(3);
    reached.iter_mut().for_each(|aggregator| aggregator.max_error = Some(1e-3));
    let mut world = world_of(codes(3), &ranks, reached);
    let inputs: Vec<Vec<f32>> = (0..3).map(|rank| ordinary(rank, 20_000)).collect();
    let deadline = Instant::now() + Duration::from_secs(120);
    while served.sums() == 0 {
        let (measured, completions) = coded(&mut world, ReduceOp::Sum, &inputs, true);
        assert!(measured < 1e-12 && !whole_by(&completions), "{measured} {completions:?}");
        assert!(Instant::now() < deadline, "the aggregator is never tried: {completions:?}");
    }
    drop(world);
    let served = Served::of(codes(3), any(), 7, 3, 0);
    let mut world = world_of(codes(3), &ranks, served.reached_by(3));
    let mut inputs: Vec<Vec<f32>> = (0..3).map(|rank| input(rank, 20_000)).collect();
    inputs[1][9_999] = f32::NAN;
    while served.sums() == 0 {
        let (_, completions) = coded(&mut world, ReduceOp::Sum, &inputs, false);
        assert!(!whole_by(&completions));
        let found = world.read_floats(2, 16 << 20, 20_000);
        assert_eq!(found.iter().filter(|value| value.is_nan()).count(), 1, "by the hosts, exactly");
        assert!(Instant::now() < deadline, "the aggregator is never tried: {completions:?}");
    }
}

/// Lost packets, and a death in the midst of an operation. What was summed in codes and what hosts did again are one result everywhere.
#[test]
fn codes_survive_losses_and_a_death() {
    let _turn = my_turn();
    let ranks = [vec![0], vec![1, 4], vec![2], vec![3]];
    let served = Served::of(codes(4), any(), 1, 4, 20);
    let mut world = world_of(codes(4), &ranks, served.reached_by(4));
    let inputs: Vec<Vec<f32>> = (0..5).map(|rank| ordinary(rank, 400_000)).collect();
    for in_place in [false, true, false] {
        let (measured, _) = coded(&mut world, ReduceOp::Sum, &inputs, in_place);
        assert!(measured < 0.08, "{measured}");
    }
    assert!(served.sums() > 0);
    drop(served);
    let (measured, completions) = coded(&mut world, ReduceOp::Average, &inputs, true);
    assert!(measured < 1e-9 && !whole_by(&completions), "{measured} by the hosts alone");
}
