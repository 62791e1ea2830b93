//! What is below every class moves where its tenant has nothing else in flight.

use crate::common::{SMALL, World, call, loopback};
use crate::p2p::message;
use harmonaize_abi::{Collective, CommunicatorHandle, Direction, Submission};
use harmonaize_core::Interleaving;
use harmonaize_engine::{AttachmentId, Command, CommunicatorId, Epoch, Formation, LocalRank, Notice};
use harmonaize_plan::Participant;
use std::time::{Duration, Instant};

/// The longest that what is below every class has no turn, and the bytes that it copies in one there.
const PATIENCE: Duration = Duration::from_millis(20);
const COPIED: u64 = 256 << 10;
const PIECES: u64 = 32;
const FROM: u64 = 4 << 20;
const TO: u64 = 16 << 20;
/// The communicator of the messages.
const BESIDE: u32 = 9;

/// More rounds than what waits for no gap needs, and far fewer than there are while patience ends again and again.
const ROUNDS: usize = 1000;

/// Two ranks on one engine with two communicators. On the first an operation of rank 0 is in flight.
fn beside() -> World {
    let mut world = World::new(loopback(1), &[vec![0, 1]], SMALL);
    let locals = world.group.local(Participant(0)).iter().map(|&rank| LocalRank {
        rank,
        attachment: AttachmentId(rank.0.into()),
        handle: CommunicatorHandle(BESIDE),
    });
    let formation = Formation {
        communicator: CommunicatorId(2),
        tenant: 0,
        weight: 1,
        me: Participant(0),
        plan: world.plan(Epoch(1), &[0]),
        peers: Vec::new(),
        aggregator: None,
        locals: locals.collect(),
    };
    world.engines[0].handle_command(Command::Form(Box::new(formation)));
    // What rank 1 does not call yet is in flight.
    world.submit(0, call(Collective::AllReduce, 3, 1, 0, 0, 0));
    world.run_rounds(10);
    world
}

/// The same, and a message of rank 0 to itself on the second, of a class.
fn world(tensor_class: u8) -> World {
    let mut world = beside();
    let values: Vec<u64> = (0..PIECES * COPIED / 8).collect();
    world.write(0, FROM, &values);
    for (direction, at) in [(Direction::Send, FROM), (Direction::Receive, TO)] {
        let end = message(direction, 0, values.len() as u64, at);
        world.tenants[0].end.submit(&Submission { communicator: BESIDE, tensor_class, ..end }).unwrap();
    }
    world
}

/// How many operations of a rank end in some rounds, all of them well.
fn ended(world: &mut World, rank: usize) -> usize {
    let mut ended = 0;
    for _ in 0..ROUNDS {
        world.run_rounds(1);
        if let Some(done) = world.tenants[rank].end.completion().unwrap() {
            assert_eq!(done.status, 0, "{done:?}");
            ended += 1;
        }
    }
    ended
}

/// Drives it until so many operations of rank 0 have ended.
fn end(world: &mut World, count: usize) {
    let mut done = Vec::new();
    world.until("operations of rank 0", |world| {
        done.extend(world.tenants[0].end.completion().unwrap());
        done.len() >= count
    });
    assert!(done.iter().all(|done| done.status == 0), "{done:?}");
}

#[test]
fn what_is_below_every_class_waits_for_the_tenants_operations() {
    let mut world = world(4);
    let (began, mut early) = (Instant::now(), 0);
    while began.elapsed() < 4 * PATIENCE {
        world.run_rounds(10);
        let ended = world.tenants[0].end.completion().unwrap();
        // However late this thread is, it copies no more than a piece each time that patience ends.
        let most = began.elapsed().as_millis() as u64 / PATIENCE.as_millis() as u64 + 1;
        assert!(ended.is_none() || most >= PIECES, "{ended:?} after {:?}", began.elapsed());
        early += usize::from(ended.is_some());
    }
    world.submit(1, call(Collective::AllReduce, 3, 1, 0, 0, 0));
    end(&mut world, 3 - early);
    let expected: Vec<u64> = (0..PIECES * COPIED / 8).collect();
    assert!(world.read(0, TO, expected.len()) == expected, "the message is another one");
}

#[test]
fn what_is_of_a_class_does_not_wait() {
    let mut world = world(3);
    assert_eq!(ended(&mut world, 0), 2);
}

/// Else others would wait for its slot as long as it waits for its own tenant.
#[test]
fn what_is_below_every_class_takes_no_interleave_slot() {
    for (tensor_class, slots) in [(4, 0), (3, 1)] {
        let mut world = beside();
        let communicator = CommunicatorId(2);
        let (max_wait, idle_timeout) = (Duration::from_millis(1), Duration::ZERO);
        let rules = Interleaving { max_wait, min_bytes: 1, operations: 1, idle_timeout };
        world.engines[0].handle_command(Command::Interleave { communicator, interleaving: Some(rules) });
        let sum = call(Collective::AllReduce, 3, 1, FROM, TO, 0);
        for tenant in &mut world.tenants {
            tenant.end.submit(&Submission { communicator: BESIDE, tensor_class, ..sum }).unwrap();
        }
        assert!(world.completions().iter().all(|done| done.status == 0));
        // The slot is over in a turn after that.
        world.run_rounds(ROUNDS);
        let notices = world.notices[0].lock().unwrap();
        let requested = notices.iter().filter(|notice| matches!(notice, Notice::SlotRequested { .. }));
        let released = notices.iter().filter(|notice| matches!(notice, Notice::SlotReleased { .. }));
        assert_eq!((requested.count(), released.count()), (slots, slots), "class {tensor_class}");
    }
}

#[test]
fn without_an_end_to_the_tenants_operations_it_ends_all_the_same() {
    let mut world = world(4);
    end(&mut world, 2);
}
