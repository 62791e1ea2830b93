//! Tensors in regions beside the arena, which come and go while operations run.

use crate::common::{ARENA, SMALL, World, call, loopback, tcp};
use harmonaize_abi::{Collective, Status};
use harmonaize_engine::{AttachmentId, Command, Notice};
use harmonaize_shm::Memory;
use std::sync::Arc;

const COUNT: usize = 20_000;
const BYTES: u64 = COUNT as u64 * 8;
const BASE: u64 = ARENA + (1 << 20);

fn region() -> Arc<Memory> {
    Memory::private(2 * BYTES as usize).unwrap()
}

/// What the engine says to a command of rank 0's attachment.
fn done(world: &mut World, command: Command) -> bool {
    world.notices[0].lock().unwrap().clear();
    world.engines[0].handle_command(command);
    let notices = world.notices[0].lock().unwrap();
    let [Notice::Regions { attachment, done, .. }] = notices.as_slice() else { panic!("{notices:?}") };
    assert_eq!(*attachment, AttachmentId(0));
    *done
}

fn add(world: &mut World, base: u64, memory: &Arc<Memory>) -> bool {
    let memory = Arc::clone(memory);
    done(world, Command::AddRegion { attachment: AttachmentId(0), base, memory })
}

fn remove(world: &mut World, base: u64) -> bool {
    done(world, Command::RemoveRegion { attachment: AttachmentId(0), base })
}

fn values(rank: u64) -> Vec<u64> {
    (0..COUNT as u64).map(|i| (i + 1) << (8 * rank)).collect()
}

fn bytes(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn submit(world: &mut World, rank: usize, from: u64, to: u64) {
    world.submit(rank, call(Collective::AllReduce, COUNT as u64, 1, from, to, 0));
}

#[test]
fn an_operation_takes_its_tensors_from_any_region() {
    for (transports, ranks) in [
        (loopback(1), vec![vec![0, 1]]),
        (loopback(2), vec![vec![0], vec![1]]),
        (tcp(2), vec![vec![0], vec![1]]),
    ] {
        let mut world = World::new(transports, &ranks, SMALL);
        let (memory, other) = (region(), region());
        assert!(add(&mut world, BASE, &memory) && add(&mut world, 2 * BASE, &other));
        let sum: Vec<u64> = values(0).iter().zip(values(1)).map(|(one, other)| one + other).collect();
        for (from, to) in
            [(BASE, BASE), (BASE, BASE + BYTES), (BASE, 0), (0, 2 * BASE + BYTES), (2 * BASE, BASE)]
        {
            let place = |at: u64| match at {
                at if at >= 2 * BASE => (&other, at - 2 * BASE),
                at if at >= BASE => (&memory, at - BASE),
                at => (world.tenants[0].end.memory(), at),
            };
            let ((input, at), (output, out)) = (place(from), place(to));
            let (input, output) = (Arc::clone(input), Arc::clone(output));
            input.write(at, &bytes(&values(0))).unwrap();
            world.write(1, 0, &values(1));
            submit(&mut world, 0, from, to);
            submit(&mut world, 1, 0, 0);
            let completions = world.completions();
            assert!(completions.iter().all(|done| done.status == 0), "{from} to {to}: {completions:?}");
            let mut found = vec![0; BYTES as usize];
            output.read(out, &mut found).unwrap();
            assert!(found == bytes(&sum), "{from} to {to}");
            assert!(world.read(1, 0, COUNT) == sum);
        }
        // One that begins in the arena and ends behind it, or spans two regions.
        for (from, to) in [(ARENA - 8, 0), (0, BASE + BYTES + 8), (BASE - 8, 0), (u64::MAX - 7, 0)] {
            submit(&mut world, 0, from, to);
            assert_eq!(world.completion(0).status, Status::OutOfRange.code(), "{from} to {to}");
        }
    }
}

#[test]
fn regions_in_use_stay_and_gone_ones_fail() {
    let mut world = World::new(loopback(2), &[vec![0], vec![1]], SMALL);
    let memory = region();
    assert!(add(&mut world, BASE, &memory));
    assert!(!add(&mut world, BASE, &memory) && !add(&mut world, ARENA - 4096, &memory), "taken");
    assert!(!add(&mut world, u64::MAX - 4095, &memory), "the end of all offsets");
    assert!(!remove(&mut world, 0) && !remove(&mut world, BASE + 4096), "no region begins there");
    memory.write(0, &bytes(&values(0))).unwrap();
    world.write(1, 0, &values(1));
    submit(&mut world, 0, BASE, BASE + BYTES);
    world.run_rounds(100);
    assert!(!remove(&mut world, BASE), "rank 1 is late");
    submit(&mut world, 1, 0, 0);
    assert!(world.completions().iter().all(|done| done.status == 0));
    assert!(remove(&mut world, BASE));
    assert!(!remove(&mut world, BASE), "once");
    let mapped = Arc::downgrade(&memory);
    drop(memory);
    world.until("unmapped", |_| mapped.upgrade().is_none());
    submit(&mut world, 0, BASE, 0);
    assert_eq!(world.completion(0).status, Status::OutOfRange.code());
}

#[test]
fn a_detached_process_takes_its_regions_along() {
    let mut world = World::new(loopback(1), &[vec![0, 1]], SMALL);
    let memories: Vec<_> = (0..1000).map(|_| Memory::private(4096).unwrap()).collect();
    for (memory, base) in memories.iter().zip((BASE..).step_by(8192)) {
        assert!(add(&mut world, base, memory));
    }
    let mapped: Vec<_> = memories.iter().map(Arc::downgrade).collect();
    drop(memories);
    world.engines[0].handle_command(Command::Detach { attachment: AttachmentId(0) });
    world.until("all unmapped", |_| mapped.iter().all(|memory| memory.upgrade().is_none()));
    let late = Memory::private(4096).unwrap();
    assert!(!add(&mut world, BASE, &late), "nobody is there");
}
