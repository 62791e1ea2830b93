//! Changes of plan make the links that they need and no others. What is under way on the other links goes on.

use crate::common::{SMALL, World, loopback, tcp, tcp_with_sender};
use crate::counting::{Counts, counting};
use harmonaize_core::Failure;
use harmonaize_engine::{Command, CommunicatorId, Epoch, Notice};
use harmonaize_plan::Participant;
use harmonaize_transport::Transport;
use harmonaize_transport::tcp::LinkProtection;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const RANKS: usize = 4;
const OUTPUT: u64 = 16 << 20;
const COMMUNICATOR: CommunicatorId = CommunicatorId(1);

fn world(transports: Vec<Box<dyn Transport + Send>>) -> (World, Vec<Arc<Counts>>) {
    let (counted, counts): (Vec<_>, Vec<_>) = transports.into_iter().map(counting).unzip();
    let ranks: Vec<Vec<u32>> = (0..RANKS as u32).map(|rank| vec![rank]).collect();
    (World::new(counted, &ranks, SMALL), counts)
}

/// By engine: links opened so far, and closed.
fn links(counts: &[Arc<Counts>]) -> Vec<(u64, u64)> {
    let load =
        |counts: &Arc<Counts>| (counts.opened.load(Ordering::Relaxed), counts.closed.load(Ordering::Relaxed));
    counts.iter().map(load).collect()
}

/// Gives everybody a plan for which the links between these pairs are made. The lower of a pair comes first, and
/// all other links go on.
fn change(world: &mut World, epoch: Epoch, order: &[u32], made: &[(u32, u32)]) {
    world.change(epoch, order, |low, high| made.contains(&(low, high)));
}

/// The other end may hear a moment later that a link is closed.
fn until_links(world: &mut World, counts: &[Arc<Counts>], expected: [(u64, u64); RANKS]) {
    world.until(&format!("links {expected:?}"), |_| links(counts) == expected);
}

fn exactly_the_links_that_are_needed(transports: Vec<Box<dyn Transport + Send>>) {
    let (mut world, counts) = world(transports);
    assert_eq!(links(&counts), [(3, 0); RANKS], "each has a link to every other");
    let count = 1 << 20;
    world.begin_sum(count, OUTPUT);
    world.run_rounds(20);
    // Under way, two pairs get other links: each of the four makes one and closes one.
    change(&mut world, Epoch(2), &[0, 2, 1, 3], &[(0, 1), (2, 3)]);
    world.until_switched(Epoch(2));
    until_links(&mut world, &counts, [(4, 1); RANKS]);
    // Another order by the links that there are, some of the first epoch, some of the second.
    change(&mut world, Epoch(3), &[0, 1, 3, 2], &[]);
    world.until_switched(Epoch(3));
    world.end_sum(count, OUTPUT);
    until_links(&mut world, &counts, [(4, 1); RANKS]);
    // Between operations nobody waits for a call.
    change(&mut world, Epoch(4), &[3, 1, 0, 2], &[(0, 3)]);
    world.until_switched(Epoch(4));
    until_links(&mut world, &counts, [(5, 2), (4, 1), (4, 1), (5, 2)]);
    world.begin_sum(1000, OUTPUT);
    world.end_sum(1000, OUTPUT);
    let failure = Failure::Dissolved;
    for engine in &mut world.engines {
        engine.handle_command(Command::Dissolve { communicator: COMMUNICATOR, failure: failure.clone() });
    }
    until_links(&mut world, &counts, [(5, 5), (4, 4), (4, 4), (5, 5)]);
}

#[test]
fn exactly_the_links_that_are_needed_are_made_in_process() {
    exactly_the_links_that_are_needed(loopback(RANKS));
}

#[test]
fn exactly_the_links_that_are_needed_are_made_over_tcp() {
    exactly_the_links_that_are_needed(tcp(RANKS));
}

#[test]
fn exactly_the_links_that_are_needed_are_made_with_a_sender() {
    exactly_the_links_that_are_needed(tcp_with_sender(RANKS, LinkProtection::Authenticated));
}

#[test]
fn an_abandoned_change_closes_only_its_own_links() {
    let (mut world, counts) = world(tcp(RANKS));
    let count = 1 << 18;
    world.begin_sum(count, OUTPUT);
    world.run_rounds(1);
    change(&mut world, Epoch(2), &[0, 2, 1, 3], &[(1, 2)]);
    for engine in &mut world.engines {
        engine.handle_command(Command::Abandon { communicator: COMMUNICATOR, epoch: Epoch(2) });
    }
    world.end_sum(count, OUTPUT);
    until_links(&mut world, &counts, [(3, 0), (4, 1), (4, 1), (3, 0)]);
    change(&mut world, Epoch(3), &[0, 2, 1, 3], &[(1, 2)]);
    world.until_switched(Epoch(3));
    world.begin_sum(count, OUTPUT);
    world.end_sum(count, OUTPUT);
    until_links(&mut world, &counts, [(3, 0), (5, 2), (5, 2), (3, 0)]);
}

#[test]
fn a_link_that_is_not_there_cannot_go_on() {
    let (mut world, counts) = world(loopback(RANKS));
    let mut peers = world.peers(Epoch(2), Participant(0));
    for peer in &mut peers {
        (peer.participant, peer.introduction) = (Participant(9), None);
    }
    let plan = world.plan(Epoch(2), &[0, 1, 2, 3]);
    world.engines[0].handle_command(Command::Change {
        communicator: COMMUNICATOR,
        plan: Box::new(plan),
        peers,
        aggregator: None,
    });
    world.until("a refusal", |world| {
        let heard = world.notices[0].lock().unwrap();
        heard.iter().any(|notice| matches!(notice, Notice::PrepareFailed { epoch: Epoch(2), .. }))
    });
    until_links(&mut world, &counts, [(3, 0); RANKS]);
    world.begin_sum(1000, OUTPUT);
    world.end_sum(1000, OUTPUT);
}
