//! Operations that wait for their interleave slot.

use crate::common::{SMALL, World, call, loopback};
use harmonaize_abi::Collective;
use harmonaize_core::Interleaving;
use harmonaize_engine::{Command, CommunicatorId, Notice, SlotId};
use std::time::{Duration, Instant};

/// Runs an AllReduce; how long it took.
fn operation(world: &mut World) -> Duration {
    let begun = Instant::now();
    (0..2).for_each(|rank| world.submit(rank, call(Collective::AllReduce, 5000, 1, 0, 1 << 20, 0)));
    let completions = world.completions();
    assert!(completions.iter().all(|completion| completion.status == 0), "{completions:?}");
    begun.elapsed()
}

const COMMUNICATOR: CommunicatorId = CommunicatorId(1);

/// The slots that the first engine requested, and those that it released.
fn slots(world: &World) -> (Vec<u64>, Vec<u64>) {
    let notices = world.notices[0].lock().unwrap();
    let wanted = notices.iter().filter_map(|notice| match notice {
        Notice::SlotRequested { slot, .. } => Some(slot.0),
        _ => None,
    });
    let done = notices.iter().filter_map(|notice| match notice {
        Notice::SlotReleased { slot, .. } => Some(slot.0),
        _ => None,
    });
    (wanted.collect(), done.collect())
}

#[test]
fn an_operation_waits_for_its_slot_within_bounds() {
    let mut world = World::new(loopback(2), &[vec![0], vec![1]], SMALL);
    operation(&mut world);
    // What is longer than a second is cut to that.
    let patience = Duration::from_secs(3600);
    let rules =
        Interleaving { max_wait: patience, min_bytes: 1000, operations: 1, idle_timeout: Duration::ZERO };
    let told = |interleaving| Command::Interleave { communicator: COMMUNICATOR, interleaving };
    world.engines[0].handle_command(told(Some(rules)));
    assert!(operation(&mut world) >= Duration::from_secs(1), "it did not wait");
    assert_eq!(slots(&world), (vec![1], vec![1]));
    // Given before the patience ends; what was given before, or never asked for, is nothing.
    (0..2).for_each(|rank| world.submit(rank, call(Collective::AllReduce, 5000, 1, 0, 1 << 20, 0)));
    for slot in [1, 7].map(SlotId) {
        world.engines[0].handle_command(Command::SlotGranted { communicator: COMMUNICATOR, slot });
    }
    world.until("the slot is requested", |world| slots(world).0.len() == 2);
    world.engines[0].handle_command(Command::SlotGranted { communicator: COMMUNICATOR, slot: SlotId(2) });
    assert!(world.completions().iter().all(|completion| completion.status == 0));
    world.until("the slot is released", |world| slots(world).1 == [1, 2]);
    // Small ones request none; nor does any, once there are no rules.
    (0..2).for_each(|rank| world.submit(rank, call(Collective::AllReduce, 5, 1, 0, 1 << 20, 0)));
    world.completions();
    world.engines[0].handle_command(told(None));
    operation(&mut world);
    assert_eq!(slots(&world), (vec![1, 2], vec![1, 2]));
}
