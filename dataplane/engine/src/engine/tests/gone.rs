//! Processes that close their end of the rings: what they asked last still counts.

use super::common::{SMALL, World, loopback, reduce};
use crate::{AttachmentId, Command, CommunicatorId, Notice};
use harmonaize_abi::{Rank, ReduceOp, Status, Submission};
use harmonaize_core::Failure;

/// Two engines, at which the ranks but the first have called.
fn called() -> World {
    let mut world = World::new(loopback(2), &[vec![0, 1], vec![2]], SMALL);
    for tenant in world.tenants.iter_mut().skip(1) {
        let call = reduce(ReduceOp::Sum, 1000, 0, 1 << 20);
        tenant.end.submit(&Submission { communicator: 7, ..call }).unwrap();
    }
    // Its process is gone, which the engine sees when it would sleep.
    drop(world.tenants.remove(0));
    let engine = &mut world.engines[0];
    engine.prepare_sleep();
    let woken = crate::wake::sleep(engine.wake(), Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }));
    assert!([(0, true), (1, false)].into_iter().all(|(id, rang)| woken.contains(AttachmentId(id)) == rang));
    engine.cancel_sleep(&woken);
    world.run_rounds(100);
    world
}

fn statuses(world: &mut World) -> Vec<Status> {
    let done = world.completions();
    done.iter().map(|completion| Status::from_code(completion.status).unwrap()).collect()
}

#[test]
fn an_abort_of_a_gone_process_counts() {
    let mut world = called();
    let failure = Failure::Aborted { rank: Rank(0) };
    world.engines[0].handle_command(Command::Dissolve { communicator: CommunicatorId(1), failure });
    world.engines[0].handle_command(Command::Detach { attachment: AttachmentId(0) });
    assert_eq!(statuses(&mut world), [Status::Aborted; 2]);
}

#[test]
fn a_process_that_goes_is_lost_once_the_agent_says_so() {
    let mut world = called();
    world.engines[0].handle_command(Command::Detach { attachment: AttachmentId(0) });
    assert_eq!(statuses(&mut world), [Status::RankLost; 2]);
}

#[test]
fn a_process_that_goes_is_lost_though_nobody_says_so() {
    let mut world = called();
    assert_eq!(statuses(&mut world), [Status::RankLost; 2]);
    let let_go = |notice: &Notice| matches!(notice, Notice::Detached { attachment: AttachmentId(0), .. });
    assert!(world.notices[0].lock().unwrap().iter().any(let_go));
}
