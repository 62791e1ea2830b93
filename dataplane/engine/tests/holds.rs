//! Operations that are held back so that jobs take turns.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

#[allow(dead_code, reason = "other tests need more of it")]
mod common;

use common::{SMALL, World, call};
use harmonaize_abi::Collective;
use harmonaize_engine::{Command, CommunicatorId};
use harmonaize_transport::Transport;
use harmonaize_transport::loopback::Hub;
use std::time::{Duration, Instant};

/// Runs an AllReduce; how long it took.
fn operation(world: &mut World) -> Duration {
    let begun = Instant::now();
    (0..2).for_each(|rank| world.submit(rank, call(Collective::AllReduce, 5000, 1, 0, 1 << 20, 0)));
    let completions = world.completions();
    assert!(completions.iter().all(|completion| completion.status == 0), "{completions:?}");
    begun.elapsed()
}

#[test]
fn the_next_operation_is_held_back_and_only_that() {
    let hub = Hub::new();
    let transports = (0..2).map(|_| Box::new(hub.endpoint().unwrap()) as Box<dyn Transport + Send>).collect();
    let mut world = World::new(transports, &[vec![0], vec![1]], SMALL);
    operation(&mut world);
    let hold = Duration::from_millis(200);
    for span in [Duration::from_secs(3600), hold] {
        // The later takes the place of the earlier.
        world.engines[0].command(Command::Hold { communicator: CommunicatorId(1), hold: span });
    }
    world.engines[0].command(Command::Hold { communicator: CommunicatorId(9), hold });
    assert!(operation(&mut world) >= hold, "it was not held");
    // What is longer than a second is cut to that.
    world.engines[1]
        .command(Command::Hold { communicator: CommunicatorId(1), hold: Duration::from_secs(60) });
    assert!(operation(&mut world) >= Duration::from_secs(1), "it was not held");
    // And nothing holds what comes after: the world would give up before.
    for _ in 0..20 {
        operation(&mut world);
    }
}
