//! Where nobody has an operation under way, what comes by the network may wait for a moment. Tenants never do.

use super::common::{SMALL, World, loopback, reduce, tcp};
use crate::run::{BUDGET, DOZE};
use crate::{AttachmentId, Engine, Epoch, PassSharing};
use harmonaize_abi::{ReduceOp, Status};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is no attachment's, but the network's.
const NETWORK: AttachmentId = AttachmentId(u64::MAX);

/// Whether a sleep would end at once because of this.
fn wakes(engine: &Engine, by: AttachmentId) -> bool {
    crate::wake::sleep(engine.wake(), Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).contains(by)
}

#[test]
fn tenants_end_a_doze_and_the_network_does_not() {
    let mut world = World::new(tcp(2), &[vec![0], vec![1]], SMALL);
    world.until("idle", |world| world.engines.iter().all(Engine::is_idle));
    let call = reduce(ReduceOp::Sum, 1000, 0, 1 << 20);
    world.submit(1, call);
    let (before, mut rounds) = (world.engines[1].served, 0);
    while !wakes(&world.engines[0], NETWORK) {
        world.engines[1].progress(64);
        rounds += 1;
        assert!(rounds < 1_000_000, "nothing comes");
    }
    assert!(world.engines[1].served > before, "an operation has begun");
    let engine = &mut world.engines[0];
    assert!(engine.is_idle(), "that is a peer's");
    assert!(engine.prepare_doze() && engine.attend_network(false));
    assert!(!wakes(engine, NETWORK) && !wakes(engine, AttachmentId(0)));
    world.submit(0, call);
    let engine = &mut world.engines[0];
    assert!(wakes(engine, AttachmentId(0)));
    assert!(engine.attend_network(true) && wakes(engine, NETWORK));
    let woken = crate::wake::sleep(engine.wake(), Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    engine.cancel_sleep(&woken);
    let done = world.completions();
    assert!(done.iter().all(|done| done.status == Status::Ok.code()), "{done:?}");
    world.until("idle again", |world| world.engines.iter().all(Engine::is_idle));
}

/// A loop that could not hear the network any more never sleeps before it does.
#[test]
fn who_is_deaf_hears_before_it_sleeps() {
    let mut world = World::new(tcp(2), &[vec![0], vec![1]], SMALL);
    world.run_rounds(100);
    let engine = &mut world.engines[0];
    assert!(engine.attend_network(false) && engine.deaf);
    while !engine.prepare_sleep() {
        engine.progress(64);
    }
    assert!(!engine.deaf);
}

#[test]
fn an_operation_that_waits_for_a_late_rank_is_no_idleness() {
    let mut world = World::new(tcp(2), &[vec![0], vec![1]], SMALL);
    world.until("idle", |world| world.engines.iter().all(Engine::is_idle));
    world.submit(0, reduce(ReduceOp::Sum, 1000, 0, 1 << 20));
    // Each look at it is another time at which it is under way.
    let late = world.engines[0].now().after(10 * crate::engine::IDLE_AFTER);
    world.until("the call has waited", |world| world.engines[0].served >= late);
}

/// Links on their way up, and participants that agree on a plan, are brought on at once.
#[test]
fn a_change_of_plan_is_no_idleness() {
    let mut world = World::new(tcp(2), &[vec![0], vec![1]], SMALL);
    world.until("idle", |world| world.engines.iter().all(Engine::is_idle));
    world.change(Epoch(2), &[1, 0], |_, _| true);
    // The peer stands still, so they do not agree.
    let late = world.engines[0].now().after(10 * crate::engine::IDLE_AFTER);
    let deadline = Instant::now() + Duration::from_secs(20);
    while world.engines[0].served < late {
        world.engines[0].progress(BUDGET);
        assert!(Instant::now() < deadline, "it counts as idle");
    }
    world.until_switched(Epoch(2));
    world.until("idle again", |world| world.engines.iter().all(Engine::is_idle));
}

#[test]
fn a_loop_dozes_where_all_is_read_and_nobody_has_it_spin() {
    let mut world = World::new(tcp(2), &[vec![0], vec![1]], SMALL);
    world.until("idle", |world| world.engines.iter().all(Engine::is_idle));
    let (_handle, runner) = crate::prepare(world.engines.remove(0), 4).unwrap();
    let spin = DOZE / 20;
    assert!(runner.may_doze(1, spin) && runner.may_doze(BUDGET - 1, Duration::ZERO));
    assert!(!runner.may_doze(0, spin), "it has found nothing: it sleeps");
    assert!(!runner.may_doze(BUDGET, spin), "there may be more to read");
    assert!(!runner.may_doze(1, Duration::from_secs(1)), "it is to be awake");
}

/// As one that sleeps is.
#[test]
fn a_thread_that_dozes_is_woken_for_anothers_pass() {
    let mut parts = PassSharing::among(2);
    let (other, own) = (parts.pop().unwrap(), parts.pop().unwrap());
    let mut world = World::new(loopback(1), &[vec![0]], SMALL);
    let engine = &mut world.engines[0];
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
    crate::wake::watch(engine.wake(), bell.as_fd()).unwrap();
    engine.share_passes(own);
    engine.passes.set_bell(&bell);
    engine.passes.quiet();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !other.wake_one() {
        assert!(Instant::now() < deadline, "it has nothing to do, and does not help");
        std::thread::yield_now();
    }
    let mut count = [0; 8];
    assert!(rustix::io::read(&*bell, &mut count).is_err(), "it is awake");
    assert!(engine.prepare_doze() && other.wake_one());
    assert!(rustix::io::read(&*bell, &mut count).is_ok(), "nothing wakes it");
}
