//! Operations whose frames another thread writes: right as ever, and ended as ever where somebody goes in their midst.

use crate::common::{SMALL, World, tcp_with_sender};
use harmonaize_abi::Status;
use harmonaize_core::Failure;
use harmonaize_engine::{AttachmentId, Command, CommunicatorId};
use harmonaize_transport::tcp::LinkProtection;

const RANKS: usize = 3;
const OUTPUT: u64 = 16 << 20;
const ELEMENTS: usize = 1 << 20;

fn world(protection: LinkProtection) -> World {
    World::new(tcp_with_sender(RANKS, protection), &[vec![0], vec![1], vec![2]], SMALL)
}

/// Has everybody call an AllReduce, and goes on until some of it has crossed.
fn begin(world: &mut World, count: usize) {
    world.begin_sum(count, OUTPUT);
    world.run_rounds(20);
}

/// All ranks that are there have lost the operation.
fn lost(world: &mut World, status: Status) {
    let codes: Vec<_> = world.completions().iter().map(|completion| completion.status).collect();
    assert_eq!(codes, vec![status.code(); codes.len()]);
}

#[test]
fn sums_are_right_at_every_size() {
    for protection in [LinkProtection::None, LinkProtection::Authenticated, LinkProtection::Encrypted] {
        let mut world = world(protection);
        for count in [1, 100, 5_000, 1 << 17, 77, 100_003] {
            begin(&mut world, count);
            world.end_sum(count, OUTPUT);
        }
    }
}

#[test]
fn a_peer_that_dies_ends_the_operation() {
    let mut world = world(LinkProtection::Authenticated);
    begin(&mut world, ELEMENTS);
    drop((world.engines.pop(), world.tenants.pop()));
    lost(&mut world, Status::RankLost);
}

#[test]
fn a_tenant_that_dies_ends_the_operation() {
    let mut world = world(LinkProtection::Authenticated);
    begin(&mut world, ELEMENTS);
    drop(world.tenants.remove(0));
    world.engines[0].handle_command(Command::Detach { attachment: AttachmentId(0) });
    lost(&mut world, Status::RankLost);
}

#[test]
fn a_communicator_that_is_dissolved_ends_the_operation() {
    let mut world = world(LinkProtection::Authenticated);
    begin(&mut world, ELEMENTS);
    for engine in &mut world.engines {
        let (communicator, failure) = (CommunicatorId(1), Failure::Dissolved);
        engine.handle_command(Command::Dissolve { communicator, failure });
    }
    let ok = world.completions().iter().filter(|completion| completion.status == 0).count();
    assert_eq!(ok, 0);
}
