//! A rank that is far ahead of another one of its host.

use crate::common::{SMALL, World, call, tcp};
use harmonaize_abi::{Collective, Status};

/// More than rings have entries.
const CALLS: u64 = 3000;
/// Bytes between the tensors of two calls.
const STRIDE: u64 = 64;
const OUTPUT: u64 = 1 << 20;

/// Rank 0 broadcasts, and rank 1 of its host calls late. Nobody's call is matched with another one of a slower rank.
#[test]
fn a_rank_far_ahead_waits_for_the_slower_ones_of_its_host() {
    let mut world = World::new(tcp(2), &[vec![0, 1], vec![2]], SMALL);
    let broadcast = |number: u64| {
        let at = number * STRIDE;
        call(Collective::Broadcast, 1, 1, at, OUTPUT + at, 0)
    };
    (0..CALLS).for_each(|number| world.write(0, number * STRIDE, &[number + 1]));
    let (mut called, mut done) = ([0_u64; 3], [0_u64; 3]);
    let late = std::cell::Cell::new(false);
    // Once nothing moves without the slower rank, it calls, too.
    let mut idle = 0;
    let mut turn = |world: &mut World| {
        for rank in 0..3 {
            if rank == 1 && !late.get() {
                continue;
            }
            let communicator = world.tenants[rank].communicator;
            while called[rank] < CALLS {
                let call = harmonaize_abi::Submission { communicator, ..broadcast(called[rank]) };
                if world.tenants[rank].end.submit(&call).is_err() {
                    break;
                }
                called[rank] += 1;
                idle = 0;
            }
            while let Some(completion) = world.tenants[rank].end.completion().unwrap() {
                assert_eq!(Status::from_code(completion.status).unwrap(), Status::Ok, "rank {rank}");
                done[rank] += 1;
                idle = 0;
            }
        }
        idle += 1;
        late.set(late.get() || idle > 1000);
        done == [CALLS; 3]
    };
    world.until("all", |world| turn(world));
    for rank in 0..3 {
        for number in 0..CALLS {
            assert_eq!(world.read(rank, OUTPUT + number * STRIDE, 1), [number + 1], "rank {rank}");
        }
    }
}
