//! Whole operations through engines, rings and transports, in one process.

use crate::common::{LONGEST, SMALL, World, call, input, loopback, reduce, tcp};
use crate::counting::counting;
use harmonaize_abi::{Collective, OperationId, Rank, ReduceOp, Status, Submission};
use harmonaize_core::Failure;
use harmonaize_engine::{Command, CommunicatorId, Epoch, Notice};
use harmonaize_plan::{Algorithm, AlgorithmTable, Tuning};
use harmonaize_transport::Transport;
use std::sync::atomic::Ordering;
use std::time::Instant;

fn groupings() -> Vec<Vec<Vec<u32>>> {
    vec![
        vec![vec![0]],
        vec![vec![0, 1, 2]],
        vec![vec![0], vec![1]],
        vec![vec![0, 3], vec![1, 2], vec![4]],
        vec![vec![2], vec![0], vec![3], vec![1]],
    ]
}

fn everything_is_right(transports: fn(usize) -> Vec<Box<dyn Transport + Send>>, tuning: Tuning) {
    for ranks in groupings() {
        let mut world = World::new(transports(ranks.len()), &ranks, tuning);
        let n = world.tenants.len();
        for count in [0_usize, 1, 3, 200, 50_000] {
            allreduce(&mut world, count, 16 << 20);
            allreduce(&mut world, count, 0);
            alltoall(&mut world, n, count.min(5_000));
            broadcast(&mut world, n, count);
            (0..n).for_each(|rank| world.submit(rank, call(Collective::Barrier, 0, 1, 0, 0, 0)));
            assert!(world.completions().iter().all(|c| c.status == 0), "barrier");
        }
    }
}

fn allreduce(world: &mut World, count: usize, to: u64) {
    world.begin_sum(count, to);
    world.end_sum(count, to);
}

fn alltoall(world: &mut World, n: usize, count: usize) {
    (0..n).for_each(|rank| world.write(rank, 0, &input(rank, count * n)));
    (0..n).for_each(|r| world.submit(r, call(Collective::AllToAll, count as u64, n as u64, 0, 16 << 20, 0)));
    assert!(world.completions().iter().all(|c| c.status == 0));
    for rank in 0..n {
        let expected: Vec<u64> = (0..n)
            .flat_map(|from| input(from, count * n)[rank * count..(rank + 1) * count].to_vec())
            .collect();
        assert!(world.read(rank, 16 << 20, count * n) == expected, "rank {rank} of {n}, {count} elements");
    }
}

fn broadcast(world: &mut World, n: usize, count: usize) {
    let root = n - 1;
    (0..n).for_each(|rank| world.write(rank, 0, &input(rank, count)));
    (0..n).for_each(|r| world.submit(r, call(Collective::Broadcast, count as u64, 1, 0, 0, root as u32)));
    assert!(world.completions().iter().all(|c| c.status == 0));
    for rank in 0..n {
        assert!(world.read(rank, 0, count) == input(root, count), "rank {rank} of {n}, {count} elements");
    }
}

#[test]
fn every_collective_is_right_in_process() {
    everything_is_right(loopback, SMALL);
}

#[test]
fn every_collective_is_right_over_tcp() {
    everything_is_right(tcp, SMALL);
}

/// Of 200 elements in one shot, copied; of 50,000 in two; or all in one.
#[test]
fn every_collective_is_right_by_direct_exchange() {
    for transports in [loopback, tcp] {
        everything_is_right(
            transports,
            Tuning { algorithms: AlgorithmTable::direct(2000, 500_000), ..SMALL },
        );
    }
    everything_is_right(loopback, Tuning { algorithms: AlgorithmTable::direct(500_000, 0), ..SMALL });
}

/// Small tensors, copied, and large ones in many segments; among two, three and four participants.
#[test]
fn every_collective_is_right_by_powers_of_two() {
    for algorithm in [Algorithm::RecursiveDoubling, Algorithm::RecursiveHalving, Algorithm::BinomialTree] {
        let tuning = Tuning { algorithms: AlgorithmTable::all_by(algorithm), ..SMALL };
        everything_is_right(loopback, tuning);
    }
    let algorithms = AlgorithmTable::all_by(Algorithm::RecursiveHalving);
    everything_is_right(tcp, Tuning { algorithms, ..SMALL });
}

#[test]
fn one_shot_and_two_give_all_ranks_the_same_bits() {
    let ranks: Vec<Vec<u32>> = vec![vec![3], vec![0, 6], vec![2], vec![5], vec![1], vec![4]];
    let count = 3000;
    let values = |rank: u32| -> Vec<f32> {
        let number = |i: u32| ((i * 7 + rank) as f32 * 0.37).sin() * 10_f32.powi((i % 9) as i32 - 4);
        (0..count).map(number).collect()
    };
    let of_bits = |low: f32, high: f32| u64::from(high.to_bits()) << 32 | u64::from(low.to_bits());
    let mut results: Vec<Vec<u64>> = Vec::new();
    // Copied, and not; each in one shot, and in two.
    for (copy_bytes, one_shot, class) in [(65536, 65536, 7), (65536, 0, 8), (0, 65536, 7), (0, 0, 8)] {
        let tuning = Tuning { copy_bytes, algorithms: AlgorithmTable::direct(one_shot, 65536), ..SMALL };
        let mut world = World::new(loopback(ranks.len()), &ranks, tuning);
        for rank in 0..7 {
            let bits: Vec<u64> = values(rank).chunks_exact(2).map(|two| of_bits(two[0], two[1])).collect();
            world.write(rank as usize, 0, &bits);
        }
        let sum = reduce(ReduceOp::Sum, count.into(), 0, 16 << 20);
        (0..7).for_each(|rank| world.submit(rank, sum));
        let completions = world.completions();
        assert!(completions.iter().all(|c| c.status == 0 && c.algorithm == class), "{completions:?}");
        results.extend((0..7).map(|rank| world.read(rank, 16 << 20, count as usize / 2)));
    }
    assert!(results.iter().all(|result| *result == results[0]), "bits differ");
    let sums = results[0].iter().flat_map(|bits| [*bits as u32, (bits >> 32) as u32]);
    for (index, sum) in sums.enumerate() {
        let exact: f64 = (0..7).map(|rank| f64::from(values(rank)[index])).sum();
        let found = f64::from(f32::from_bits(sum));
        let scale: f64 = (0..7).map(|rank| f64::from(values(rank)[index]).abs()).sum();
        assert!((found - exact).abs() <= scale * 1e-6, "element {index}: {found} of {exact}");
    }
}

/// A running operation changes its ring order midway and gives the same bits.
#[test]
fn a_running_operation_changes_its_plan() {
    let mut world = World::new(tcp(4), &[vec![0], vec![1], vec![2], vec![3]], SMALL);
    let count = 1 << 20;
    world.begin_sum(count, 16 << 20);
    world.run_rounds(20);
    world.change(Epoch(2), &[0, 2, 1, 3], |_, _| true);
    world.end_sum(count, 16 << 20);
    let segments: Vec<_> = world
        .notices
        .iter()
        .map(|heard| {
            let heard = heard.lock().unwrap();
            heard.iter().find_map(|n| match n {
                Notice::Switched { epoch: Epoch(2), segment, .. } => Some(*segment),
                _ => None,
            })
        })
        .collect();
    let total = (count as u64 * 8).div_ceil(16384);
    assert!(
        segments.iter().all(|s| *s == segments[0] && s.is_some_and(|s| s.0 > 0 && s.0 < total)),
        "{segments:?} of {total}"
    );
}

/// Who has switched takes the next change at once, in the same operation.
#[test]
fn a_change_may_follow_as_soon_as_one_is_made() {
    let mut world = World::new(tcp(4), &[vec![0], vec![1], vec![2], vec![3]], SMALL);
    let count = 1 << 20;
    world.begin_sum(count, 16 << 20);
    for (epoch, order) in [(2, [0, 2, 1, 3]), (3, [0, 1, 2, 3]), (4, [0, 3, 1, 2])] {
        world.change(Epoch(epoch), &order, |_, _| true);
        world.until_switched(Epoch(epoch));
    }
    world.end_sum(count, 16 << 20);
    for heard in &world.notices {
        let heard = heard.lock().unwrap();
        assert!(!heard.iter().any(|n| matches!(n, Notice::PrepareFailed { .. })), "{heard:?}");
    }
}

#[test]
fn bad_calls_are_refused_and_hurt_nobody() {
    let mut world = World::new(loopback(2), &[vec![0], vec![1]], SMALL);
    world.submit(0, call(Collective::AllReduce, u64::MAX / 16, 1, 0, 0, 0));
    assert_eq!(world.completion(0).status, Status::OutOfRange.code());
    allreduce(&mut world, 1000, 1 << 20);
}

#[test]
fn a_timeout_beyond_the_longest_is_refused_and_hurts_nobody() {
    let mut world = World::new(loopback(2), &[vec![0], vec![1]], SMALL);
    let right = call(Collective::AllReduce, 100, 1, 0, 4096, 0);
    let longest = LONGEST.as_nanos() as u64;
    for timeout_ns in [longest + 1, u64::MAX] {
        world.submit(0, Submission { timeout_ns, ..right });
        assert_eq!(world.completion(0).status, Status::TimeoutTooLong.code());
    }
    (0..2).for_each(|rank| world.submit(rank, Submission { timeout_ns: longest, ..right }));
    assert!(world.completions().iter().all(|c| c.status == Status::Ok.code()));
}

#[test]
fn the_shortest_timeout_of_ranks_ends_the_operation_for_all() {
    let mut world = World::new(loopback(3), &[vec![0, 1], vec![2], vec![3]], SMALL);
    let right = call(Collective::AllReduce, 100, 1, 0, 4096, 0);
    let began = Instant::now();
    for (rank, timeout_ns) in [(0, 0), (1, 100_000_000), (2, 0)] {
        world.submit(rank, Submission { timeout_ns, ..right });
    }
    world.until("the end", |world| world.all_reported(|notice| matches!(notice, Notice::Ended { .. })));
    assert!(began.elapsed() < LONGEST, "the others' would not have ended it yet");
    for heard in &world.notices {
        let heard = heard.lock().unwrap();
        let failure = heard.iter().find_map(|n| match n {
            Notice::Ended { failure, .. } => Some(failure.clone()),
            _ => None,
        });
        let Some(Failure::Timeout { operation: OperationId(0), missing, .. }) = failure else {
            panic!("{failure:?}")
        };
        assert_eq!(missing, [Rank(3)]);
    }
    for rank in 0..3 {
        let completion = world.tenants[rank].end.completion().unwrap().unwrap();
        assert_eq!(completion.status, Status::Timeout.code(), "rank {rank}");
    }
}

#[test]
fn an_abort_ends_what_others_wait_for() {
    let mut world = World::new(loopback(3), &[vec![0], vec![1], vec![2]], SMALL);
    (0..2).for_each(|rank| world.submit(rank, call(Collective::AllReduce, 100, 1, 0, 4096, 0)));
    let abort =
        || Command::Dissolve { communicator: CommunicatorId(1), failure: Failure::Aborted { rank: Rank(2) } };
    // Again, and of what is not there: nothing.
    let other = Command::Dissolve { communicator: CommunicatorId(9), failure: Failure::Dissolved };
    [abort(), abort(), other].into_iter().for_each(|command| world.engines[2].handle_command(command));
    world.until("the end", |world| world.all_reported(|notice| matches!(notice, Notice::Ended { .. })));
    world.submit(2, call(Collective::AllReduce, 100, 1, 0, 4096, 0));
    assert!(world.completions().iter().all(|c| c.status == Status::Aborted.code()));
    for heard in &world.notices {
        let heard = heard.lock().unwrap();
        let by = |n: &Notice| matches!(n, Notice::Ended { failure: Failure::Aborted { rank: Rank(2) }, .. });
        assert_eq!(heard.iter().filter(|n| by(n)).count(), 1, "{heard:?}");
    }
}

#[test]
fn different_calls_end_the_communicator_at_both() {
    let mut world = World::new(loopback(2), &[vec![0], vec![1]], SMALL);
    world.submit(0, call(Collective::AllReduce, 100, 1, 0, 4096, 0));
    world.submit(1, call(Collective::AllReduce, 101, 1, 0, 4096, 0));
    assert!(world.completions().iter().all(|c| c.status == Status::Mismatch.code()));
}

#[test]
fn what_is_only_copied_lands_in_its_place() {
    for transports in [loopback, tcp] {
        let (counted, counts): (Vec<_>, Vec<_>) = transports(2).into_iter().map(counting).unzip();
        let mut world = World::new(counted, &[vec![0], vec![1]], SMALL);
        let elements = 50_000;
        for to in [16 << 20, 0] {
            let before: Vec<u64> = counts.iter().map(|count| count.posted.load(Ordering::Relaxed)).collect();
            allreduce(&mut world, elements, to);
            for (count, before) in counts.iter().zip(before) {
                // Half of the elements come reduced, and only after what they wait for was sent.
                assert_eq!(count.posted.load(Ordering::Relaxed) - before, elements as u64 * 8 / 2);
            }
        }
    }
}

#[test]
fn a_rank_can_leave_a_communicator_that_is_over() {
    let mut world = World::new(loopback(2), &[vec![0], vec![1]], SMALL);
    let communicator = CommunicatorId(1);
    for engine in &mut world.engines {
        engine.handle_command(Command::Dissolve { communicator, failure: Failure::Dissolved });
    }
    world.until("the end", |world| world.all_reported(|notice| matches!(notice, Notice::Ended { .. })));
    let refused = |world: &mut World, status: Status| {
        (0..2).for_each(|rank| world.submit(rank, call(Collective::AllReduce, 1, 1, 0, 0, 0)));
        let completions = world.completions();
        assert!(completions.iter().all(|c| c.status == status.code()), "{completions:?}");
    };
    refused(&mut world, Status::Dissolved);
    for (rank, engine) in (0..).map(Rank).zip(&mut world.engines) {
        engine.handle_command(Command::Leave { communicator, rank });
    }
    refused(&mut world, Status::BadCommunicator);
}
