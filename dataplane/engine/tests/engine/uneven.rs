//! Counts of an uneven operation, where the tenant's memory is not mapped: they are fetched before the operation begins.

use crate::common::{World, call, loopback};
use harmonaize_abi::{Collective, Region, Status, Submission, flags};

/// Elements of each rank.
const COUNTS: [u64; 3] = [3, 0, 5];
const OUTPUT: u64 = 1 << 20;
const COUNTS_AT: u64 = 2 << 20;

fn gather(rank: usize, cookie: u64) -> Submission {
    let region = |offset, count: u64| Region { offset, bytes: count * 8 };
    Submission {
        flags: flags::UNEVEN,
        input: region(0, COUNTS[rank]),
        output: region(OUTPUT, COUNTS.iter().sum()),
        residual_in: region(COUNTS_AT, COUNTS.len() as u64),
        cookie,
        ..call(Collective::AllGather, 5, 1, 0, 0, 0)
    }
}

fn write_counts(world: &World) {
    for (rank, count) in COUNTS.into_iter().enumerate() {
        world.write(rank, COUNTS_AT, &COUNTS);
        let own: Vec<u64> = (0..count).map(|at| rank as u64 * 100 + at).collect();
        world.write(rank, 0, &own);
    }
}

#[test]
fn counts_are_fetched_and_calls_keep_their_order() {
    let mut world = World::with_away(loopback(2), &[vec![0, 1], vec![2]], None, &|rank| rank != 1);
    write_counts(&world);
    for rank in 0..COUNTS.len() {
        world.submit(rank, gather(rank, 1));
        // What is called behind must not overtake it: it would be another operation at this rank.
        world.submit(rank, Submission { cookie: 2, ..call(Collective::Barrier, 0, 0, 0, 0, 0) });
        world.submit(rank, gather(rank, 3));
    }
    for cookie in 1..=3 {
        for done in world.completions() {
            assert_eq!((done.status, done.cookie), (0, cookie), "{:?}", world.notices);
        }
    }
    for rank in 0..COUNTS.len() {
        assert_eq!(world.read(rank, OUTPUT, 8), [0, 1, 2, 200, 201, 202, 203, 204]);
    }
}

#[test]
fn counts_beyond_the_memory_or_of_too_few_ranks_are_refused() {
    let mut world = World::with_away(loopback(1), &[vec![0, 1, 2]], None, &|_| true);
    write_counts(&world);
    let arena = crate::common::ARENA;
    for wrong in [(arena - 16, 24), (u64::MAX, 24), (COUNTS_AT, 16), (COUNTS_AT, 1 << 40)] {
        let residual_in = Region { offset: wrong.0, bytes: wrong.1 };
        world.submit(0, Submission { residual_in, ..gather(0, 9) });
        assert_eq!(world.completion(0).status, Status::OutOfRange.code(), "{wrong:?}");
    }
    // The right one goes on.
    (0..COUNTS.len()).for_each(|rank| world.submit(rank, gather(rank, 1)));
    assert!(world.completions().iter().all(|done| done.status == 0));
}
