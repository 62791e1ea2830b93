//! What goes at once while a communicator waits for a gap of its tenant's operations.

use super::common::{SMALL, World, call, loopback};
use super::{OTHER, formation};
use crate::communicator_state::CommunicatorState;
use crate::{Command, CommunicatorId, Formation, Notice};
use harmonaize_abi::{ABI_VERSION, Collective, Direction, Dtype, Region, Submission};
use harmonaize_plan::Participant;

/// Two engines of a rank each, with two communicators of one tenant.
fn world() -> World {
    let mut world = World::new(loopback(2), &[vec![0], vec![1]], SMALL);
    for me in 0..2 {
        let beside = formation(&world, 2, OTHER, Participant(me));
        let beside = Formation { tenant: 0, ..beside };
        world.engines[me as usize].handle_command(Command::Form(Box::new(beside)));
    }
    world.until("formed beside", |world| {
        let prepared = |n: &Notice| matches!(n, Notice::Prepared { communicator: CommunicatorId(2), .. });
        world.all_reported(prepared)
    });
    world
}

/// An offer is no part of the message: the other end learns of it before any byte may go. Without that this test fails unless this thread
/// stands still for as long as patience lasts.
#[test]
fn words_to_peers_wait_for_no_gap() {
    let mut world = world();
    // What rank 1 does not call is in flight at rank 0's engine.
    world.submit(0, call(Collective::AllReduce, 3, 1, 0, 0, 0));
    let mut quiet = 0;
    world.until("nothing more to do", |world| {
        let worked: usize = world.engines.iter_mut().map(|engine| engine.progress(64)).sum();
        quiet = if worked == 0 { quiet + 1 } else { 0 };
        quiet == 10
    });
    let send = Submission {
        version: ABI_VERSION,
        collective: Direction::Send.code(),
        dtype: Dtype::U64.code(),
        root: 1,
        count: 8,
        input: Region { offset: 4096, bytes: 64 },
        cookie: 42,
        communicator: OTHER,
        tensor_class: 4,
        ..Submission::default()
    };
    world.tenants[0].end.submit(&send).unwrap();
    for _ in 0..20 {
        world.engines[0].progress(64);
    }
    assert!(world.engines[0].communicators.iter().any(CommunicatorState::is_tenant_busy));
    let heard: usize = (0..5).map(|_| world.engines[1].progress(64)).sum();
    assert!(heard > 0, "the other end has not heard of the message");
}
