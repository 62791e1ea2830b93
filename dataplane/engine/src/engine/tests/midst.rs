//! Actions whose turns are over in their midst: others go on, and so do they, unless their communicator ends.

use super::common::{ARENA, World, loopback, reduce};
use super::{OTHER, VICTIM, formation};
use crate::{AttachmentId, Command, CommunicatorId};
use harmonaize_abi::{Completion, Rank, ReduceOp, Status, Submission};
use harmonaize_core::Failure;
use harmonaize_plan::{Participant, Tuning};

/// Elements of a tensor that one action sums: it reads and writes 16 MiB.
const COUNT: usize = 1 << 20;
const OUTPUT: u64 = 8 << 20;
/// Where a small operation's tensors lie.
const BESIDE: u64 = 24 << 20;
/// What no sum is.
const UNWRITTEN: f32 = -1.0;

/// Two ranks of one engine in two communicators. The engine's actions give up their turns after 64 bytes of each operand.
fn world() -> World {
    let tuning = Tuning { segment_bytes: 16 << 20, ..Tuning::default() };
    let mut world = World::with_sizes(loopback(1), &[vec![0, 1]], tuning, ARENA, 2);
    let beside = Command::Form(Box::new(formation(&world, 2, OTHER, Participant(0))));
    world.engines[0].handle_command(beside);
    world.engines[0].slice_actions(64);
    for rank in 0..2 {
        world.write_floats(rank, 0, &values(rank));
        world.write_floats(rank, OUTPUT, &vec![UNWRITTEN; COUNT]);
    }
    world
}

fn values(rank: usize) -> Vec<f32> {
    (0..COUNT).map(|at| ((at * 7 + rank * 13) % 1000) as f32).collect()
}

/// How many communicators are in the midst of an action.
fn in_midst(world: &World) -> usize {
    world.engines[0].communicators.iter().filter(|member| member.unfinished.is_some()).count()
}

/// Calls the large sum at both ranks, and goes on until its only action has begun.
fn begin(world: &mut World) {
    let call = reduce(ReduceOp::Sum, COUNT as u64, 0, OUTPUT);
    for tenant in &mut world.tenants {
        tenant.end.submit(&Submission { communicator: VICTIM, cookie: 1, ..call }).unwrap();
    }
    world.until("its midst", |world| in_midst(world) == 1);
}

/// Calls a small sum in the other communicator.
fn call_beside(world: &mut World) {
    let call = reduce(ReduceOp::Sum, 2, BESIDE, BESIDE + 4096);
    for (rank, tenant) in world.tenants.iter_mut().enumerate() {
        let bytes: Vec<u8> =
            [1.5, 2.5 + rank as f32].into_iter().flat_map(|value: f32| value.to_le_bytes()).collect();
        tenant.end.memory().write(BESIDE, &bytes).unwrap();
        tenant.end.submit(&Submission { communicator: OTHER, cookie: 2, ..call }).unwrap();
    }
}

/// Cookie and status of the next completion of each rank.
fn ends(world: &mut World) -> Vec<(u64, Status)> {
    let of = |done: &Completion| (done.cookie, Status::from_code(done.status).unwrap());
    world.completions().iter().map(of).collect()
}

fn assert_summed(world: &World) {
    let sum: Vec<f32> = values(0).iter().zip(values(1)).map(|(one, other)| one + other).collect();
    for rank in 0..2 {
        assert!(world.read_floats(rank, OUTPUT, COUNT) == sum, "rank {rank}'s sum");
        assert!(world.read_floats(rank, 0, COUNT) == values(rank), "rank {rank}'s input has changed");
    }
}

#[test]
fn others_have_turns_in_the_midst_of_a_long_action() {
    let mut world = world();
    begin(&mut world);
    call_beside(&mut world);
    assert_eq!(ends(&mut world), [(2, Status::Ok); 2]);
    assert_eq!(in_midst(&world), 1, "the small operation waited for the large one");
    (0..2).for_each(|rank| assert_eq!(world.read_floats(rank, BESIDE + 4096, 2), [3.0, 6.0]));
    assert_eq!(ends(&mut world), [(1, Status::Ok); 2]);
    assert_summed(&world);
}

#[test]
fn a_communicator_alone_goes_on_likewise() {
    let tuning = Tuning { segment_bytes: 16 << 20, ..Tuning::default() };
    let mut world = World::with_sizes(loopback(1), &[vec![0, 1]], tuning, ARENA, 2);
    (0..2).for_each(|rank| world.write_floats(rank, 0, &values(rank)));
    world.engines[0].slice_actions(20_000);
    begin(&mut world);
    assert_eq!(ends(&mut world), [(1, Status::Ok); 2]);
    assert_summed(&world);
}

#[test]
fn what_is_in_the_midst_is_finished_before_a_hand_over() {
    let mut world = world();
    begin(&mut world);
    world.engines[0].finish_actions();
    assert_eq!(in_midst(&world), 0);
    assert_eq!(ends(&mut world), [(1, Status::Ok); 2]);
    assert_summed(&world);
}

/// What is fetched for a `PremulSum` is scaled in turns. A hand-over finds nothing of that left.
#[test]
fn what_was_fetched_is_scaled_before_a_hand_over() {
    let mut world = World::with_away(loopback(1), &[vec![0, 1]], None, &|_| true);
    world.engines[0].slice_actions(64);
    let count = 1 << 14;
    for rank in 0..2 {
        world.write_floats(rank, 0, values(rank).get(..count).unwrap());
        let factor = (2.0 + rank as f64).to_bits();
        world.submit(rank, Submission { factor, ..reduce(ReduceOp::PremulSum, count as u64, 0, OUTPUT) });
    }
    let left = |world: &World| -> usize {
        world.engines[0].communicators.iter().map(|member| member.fetched.len()).sum()
    };
    world.until("what was fetched", |world| left(world) > 0);
    world.engines[0].finish_actions();
    assert_eq!((left(&world), in_midst(&world)), (0, 0));
    assert!(world.completions().iter().all(|done| done.status == 0));
    let sum: Vec<f32> = values(0).iter().zip(values(1)).map(|(one, other)| 2.0 * one + 3.0 * other).collect();
    (0..2).for_each(|rank| assert!(world.read_floats(rank, OUTPUT, count) == sum[..count], "rank {rank}"));
}

/// The victim has ended, and the rest of its action is never done. The other goes on.
fn assert_dropped(world: &mut World) {
    assert_eq!(in_midst(world), 0);
    let outputs = |world: &World| -> Vec<Vec<f32>> {
        (0..world.tenants.len()).map(|rank| world.read_floats(rank, OUTPUT, COUNT)).collect()
    };
    let left = outputs(world);
    for output in &left {
        assert!(output[0] == 13.0 && output[COUNT - 1] == UNWRITTEN, "it has begun, and not ended");
    }
    world.run_rounds(200);
    assert!(outputs(world) == left, "written after the end");
}

#[test]
fn an_abort_in_its_midst_ends_an_action() {
    let mut world = world();
    begin(&mut world);
    let failure = Failure::Aborted { rank: Rank(0) };
    world.engines[0].handle_command(Command::Dissolve { communicator: CommunicatorId(1), failure });
    assert_eq!(ends(&mut world), [(1, Status::Aborted); 2]);
    assert_dropped(&mut world);
    call_beside(&mut world);
    assert_eq!(ends(&mut world), [(2, Status::Ok); 2]);
}

#[test]
fn a_hand_over_after_an_abort_finishes_nothing() {
    let mut world = world();
    begin(&mut world);
    let failure = Failure::Dissolved;
    world.engines[0].handle_command(Command::Dissolve { communicator: CommunicatorId(1), failure });
    world.engines[0].finish_actions();
    assert_eq!(ends(&mut world), [(1, Status::Dissolved); 2]);
    assert_dropped(&mut world);
}

#[test]
fn the_loss_of_a_rank_in_its_midst_ends_an_action() {
    let mut world = world();
    begin(&mut world);
    drop(world.tenants.remove(0));
    world.engines[0].handle_command(Command::Detach { attachment: AttachmentId(0) });
    assert_eq!(ends(&mut world), [(1, Status::RankLost)]);
    assert_dropped(&mut world);
}
