//! A rank that is ahead of another one of its host, by as many calls as its rings have entries, and by more.

use crate::common::{SMALL, World, call, tcp};
use harmonaize_abi::{Collective, Status, Submission};
use harmonaize_engine::{AttachmentId, Notice};

/// Many times the entries of rings.
const CALLS: u64 = 3000;
/// Bytes between the tensors of two calls.
const STRIDE: u64 = 64;
const OUTPUT: u64 = 1 << 20;
/// Rounds after which nothing moves any more.
const ROUNDS: u32 = 200;

fn world() -> World {
    let world = World::new(tcp(2), &[vec![0, 1], vec![2]], SMALL);
    (0..CALLS).for_each(|number| world.write(0, number * STRIDE, &[number + 1]));
    world
}

/// A broadcast of rank 0's.
fn broadcast(world: &World, rank: usize, number: u64) -> Submission {
    let at = number * STRIDE;
    let communicator = world.tenants[rank].communicator;
    Submission { communicator, ..call(Collective::Broadcast, 1, 1, at, OUTPUT + at, 0) }
}

/// Rank 1 stands still whenever the others go on. Nobody's call is matched with another one of a slower rank.
#[test]
fn a_rank_far_ahead_is_matched_with_its_own_calls() {
    let mut world = world();
    let entries = u64::from(world.tenants[0].end.entries());
    let (mut called, mut done, mut idle) = ([0_u64; 3], [0_u64; 3], 0);
    world.until("all", |world| {
        idle += 1;
        let late = idle > ROUNDS;
        for rank in 0..3 {
            while (rank != 1 || late) && called[rank] < CALLS.min(done[rank] + entries) {
                let call = broadcast(world, rank, called[rank]);
                world.tenants[rank].end.submit(&call).unwrap();
                called[rank] += 1;
                idle = 0;
            }
            while let Some(completion) = world.tenants[rank].end.completion().unwrap() {
                assert_eq!(Status::from_code(completion.status).unwrap(), Status::Ok, "rank {rank}");
                done[rank] += 1;
                idle = 0;
            }
        }
        done == [CALLS; 3]
    });
    for rank in 0..3 {
        for number in 0..CALLS {
            assert_eq!(world.read(rank, OUTPUT + number * STRIDE, 1), [number + 1], "rank {rank}");
        }
    }
}

/// Who has more in flight than its rings have entries harms itself alone: its attachment ends.
#[test]
fn more_in_flight_than_entries_ends_the_attachment() {
    let mut world = world();
    let mut called = 0;
    world.until("the end", |world| {
        let call = broadcast(world, 0, called);
        called += u64::from(called < CALLS && world.tenants[0].end.submit(&call).is_ok());
        let _ = world.tenants[0].end.completion();
        let notices = world.notices[0].lock().unwrap();
        notices.iter().any(|notice| matches!(notice, Notice::Detached { attachment: AttachmentId(0), .. }))
    });
    assert!(called > u64::from(world.tenants[1].end.entries()), "{called} calls");
}
