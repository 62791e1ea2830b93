//! Communicators that go on with fewer or more ranks: who is waited for, who is in, and in which order.

use super::world::{SECOND, World, join_of, settings};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, FailureKind, JoinRefusedKind, from_agent};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Instruction, SessionId};
use harmonaize_store::WithdrawalKind;
use std::time::Duration;

/// Four hosts of which each has a rank of `job`, and its id.
fn job(world: &mut World) -> (Vec<SessionId>, u64) {
    let sessions: Vec<SessionId> = (0..4).map(|host| world.agent(host)).collect();
    let id = world.form(&sessions, "job");
    (sessions, id)
}

fn world() -> World {
    World::new(settings(6), 7)
}

#[derive(Clone, Copy)]
struct Ask {
    of: u64,
    member: u32,
    key: u32,
    least: u32,
    timeout: Duration,
}

/// A member that keeps its place.
fn member(of: u64, member: u32) -> Ask {
    Ask { of, member, key: member, least: 1, timeout: SECOND * 10 }
}

fn newcomer() -> Ask {
    Ask { of: 0, member: 0, key: u32::MAX, least: 1, timeout: SECOND * 30 }
}

fn ask(world: &mut World, session: SessionId, request: u64, ask: Ask) {
    let Ask { of: communicator, member, key, least, timeout } = ask;
    let regroup = Some(v1::Regroup { communicator, previous_rank: member, key, min_ranks: least });
    let timeout_ns = timeout.as_nanos() as u64;
    let join = v1::Join { request, timeout_ns, regroup, ..join_of("a", "job", 0, 0) };
    world.send(session, from_agent::Message::Join(join));
}

fn leave(world: &mut World, session: SessionId, communicator: u64, rank: u32) {
    world.send(session, from_agent::Message::Leave(v1::Leave { communicator, rank, request: 0 }));
}

/// The new communicator's recipe, which every session got; hosts by rank, and where each rank was before.
fn formed(world: &mut World, sessions: &[SessionId]) -> (u64, Vec<String>, Vec<Option<u32>>) {
    let recipes = world.recipes(sessions);
    let recipe = &recipes[0];
    assert!(recipes.iter().all(|other| other.communicator == recipe.communicator && other.epoch == 1));
    let mut hosts: Vec<(u32, String)> = Vec::new();
    for part in &recipe.participants {
        hosts.extend(part.ranks.iter().map(|rank| (*rank, part.host.clone())));
    }
    hosts.sort();
    let before = recipe.previous_ranks.iter().map(|rank| rank.checked_sub(1)).collect();
    (recipe.communicator, hosts.into_iter().map(|(_, host)| host).collect(), before)
}

fn quiet(world: &mut World, sessions: &[SessionId]) {
    assert!(world.is_quiet(sessions));
}

#[test]
fn survivors_of_a_lost_host_regroup_at_once() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    let [other, another] = [4, 5].map(|host| world.agent(host));
    let others = world.form(&[other, another], "others");
    // The first has noticed before control has.
    ask(&mut world, sessions[0], 1, member(id, 0));
    quiet(&mut world, &sessions);
    // Its agent tells, and the others are told.
    world.dies(sessions[1]);
    for session in [sessions[2], sessions[3]] {
        assert_eq!(only!(world.received(session), Dissolve).ranks, [1]);
    }
    ask(&mut world, sessions[3], 1, member(id, 3));
    quiet(&mut world, &sessions);
    ask(&mut world, sessions[2], 1, member(id, 2));
    let left = [sessions[0], sessions[2], sessions[3]];
    let (next, hosts, before) = formed(&mut world, &left);
    assert_eq!(hosts, ["h0", "h2", "h3"]);
    assert_eq!(before, [Some(0), Some(2), Some(3)]);
    world.prepare(&left, next, 1);
    quiet(&mut world, &[other, another]);
    assert!(world.state.communicator_view(CommunicatorId(others)).is_some());
    // What was before is over: who comes late is a newcomer to the next.
    ask(&mut world, sessions[0], 2, member(id, 0));
    quiet(&mut world, &left);
    let again: Vec<Ask> = (0..3).map(|rank| member(next, rank)).collect();
    for (session, again) in left.iter().zip(again) {
        ask(&mut world, *session, 3, again);
    }
    let recipe = world.recipe(left[0]);
    assert_eq!(recipe.previous_ranks, [1, 0, 2, 3], "it has rank 0's key, which a member has first");
}

#[test]
fn a_newcomer_is_announced_and_taken_in() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    let new = world.agent(4);
    ask(&mut world, new, 1, newcomer());
    world.wait(SECOND * 2);
    let feed = read_events(&mut world, sessions[0], None).cursor.unwrap().feed;
    let told = read_events(&mut world, sessions[0], Some(v1::EventCursor { feed, next: 0 })).events;
    let [event] = told.as_slice() else { panic!("{told:?}") };
    assert_eq!((event.kind(), event.waiting), (v1::EventKind::Newcomers, 1));
    for rank in 0..4 {
        quiet(&mut world, &[sessions[0], new]);
        ask(&mut world, sessions[rank as usize], 5, member(id, rank));
    }
    let all = [&sessions[..], &[new]].concat();
    let (next, hosts, before) = formed(&mut world, &all);
    assert_eq!(hosts, ["h0", "h1", "h2", "h3", "h4"]);
    assert_eq!(before, [Some(0), Some(1), Some(2), Some(3), None]);
    // The one before is there until its ranks have left it.
    assert!(world.state.communicator_view(CommunicatorId(id)).is_some());
    world.prepare(&all, next, 1);
    for (rank, session) in (0..).zip(&sessions) {
        leave(&mut world, *session, id, rank);
    }
    assert_eq!(world.state.communicator_ids(), [CommunicatorId(next)]);
}

fn read_events(world: &mut World, session: SessionId, from: Option<v1::EventCursor>) -> v1::EventsRead {
    let read = v1::ReadEvents { request: 9, tenant: "a".to_owned(), from, wait_ns: 0 };
    world.send(session, from_agent::Message::ReadEvents(read));
    only!(world.received(session), EventsRead)
}

#[test]
fn ranks_are_renumbered_as_the_tenant_asks() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    let new = world.agent(4);
    // Backwards, and the newcomer takes the place of rank 2, which leaves.
    ask(&mut world, new, 1, Ask { key: 1, ..newcomer() });
    for (rank, key) in [(0, 3), (1, 2), (3, 0)] {
        ask(&mut world, sessions[rank as usize], 1, Ask { key, ..member(id, rank) });
    }
    quiet(&mut world, &[new]);
    leave(&mut world, sessions[2], id, 2);
    let (_, hosts, before) = formed(&mut world, &[sessions[0], sessions[1], sessions[3], new]);
    assert_eq!(hosts, ["h3", "h4", "h1", "h0"]);
    assert_eq!(before, [Some(3), None, Some(1), Some(0)]);
}

#[test]
fn a_drained_hosts_ranks_are_refused() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    for rank in [0, 1, 2] {
        ask(&mut world, sessions[rank as usize], 1, member(id, rank));
    }
    quiet(&mut world, &sessions);
    let (targets, kind) = (vec!["h3".to_owned()], WithdrawalKind::Drain);
    let drain =
        Instruction::Withdraw { targets, kind, from: Nanos(0), until: Nanos(0), reason: String::new() };
    let changes = world.state.consider(world.now, &drain).unwrap();
    world.state.apply_stored(world.now, &changes);
    world.run_until_quiet();
    let (next, hosts, _) = formed(&mut world, &sessions[..3]);
    assert_eq!(hosts, ["h0", "h1", "h2"]);
    world.prepare(&sessions[..3], next, 1);
    world.received(sessions[3]);
    ask(&mut world, sessions[3], 1, member(id, 3));
    let refused = world.refusal(sessions[3]);
    assert_eq!((refused.kind(), refused.ranks), (JoinRefusedKind::Unavailable, vec![3]));
}

#[test]
fn missing_ranks_are_left_behind_by_enough_others() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    for rank in [0, 1] {
        ask(&mut world, sessions[rank as usize], 1, Ask { least: 3, ..member(id, rank) });
    }
    world.wait(SECOND * 11);
    for session in &sessions[..2] {
        let refused = world.refusal(*session);
        assert_eq!((refused.kind(), refused.ranks), (JoinRefusedKind::Timeout, vec![2, 3]));
        assert_eq!(refused.text, "2 came in time; not ranks 2, 3, and 3 are the fewest to go on with");
    }
    // The one before is as it was, and a newcomer's patience does not end what members wait for.
    assert!(world.state.communicator_view(CommunicatorId(id)).unwrap().holds(0));
    let new = world.agent(4);
    ask(&mut world, new, 1, Ask { timeout: SECOND, ..newcomer() });
    for rank in [0, 1, 2] {
        ask(&mut world, sessions[rank as usize], 2, Ask { least: 3, ..member(id, rank) });
    }
    world.wait(SECOND * 2);
    assert_eq!(world.refusal(new).kind(), JoinRefusedKind::Timeout);
    quiet(&mut world, &sessions);
    world.wait(SECOND * 9);
    let (_, hosts, _) = formed(&mut world, &sessions[..3]);
    assert_eq!(hosts, ["h0", "h1", "h2"]);
}

#[test]
fn a_failed_first_epoch_can_be_retried() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    let everyone = |world: &mut World, request| {
        for (rank, session) in (0..).zip(&sessions) {
            ask(world, *session, request, member(id, rank));
        }
        sessions.iter().map(|session| world.recipe(*session).communicator).max().unwrap()
    };
    let first = everyone(&mut world, 1);
    let reason = "a process that had joined is gone".to_owned();
    let failed = v1::PrepareFailed { communicator: first, epoch: 1, reason };
    world.send(sessions[0], from_agent::Message::PrepareFailed(failed));
    for session in &sessions {
        assert_eq!(only!(world.received(*session), Dissolve).communicator, first);
    }
    let second = everyone(&mut world, 2);
    assert_ne!(first, second);
    world.prepare(&sessions, second, 1);
}

#[test]
fn senseless_regroups_are_refused() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    let most = 65;
    ask(&mut world, sessions[0], 1, Ask { least: most, ..member(id, 0) });
    assert_eq!(world.refusal(sessions[0]).kind(), JoinRefusedKind::Invalid);
    ask(&mut world, sessions[0], 1, Ask { least: 0, ..member(id, 0) });
    assert_eq!(world.refusal(sessions[0]).kind(), JoinRefusedKind::Invalid);
    ask(&mut world, sessions[0], 1, member(id, 0));
    ask(&mut world, sessions[0], 2, member(id, 0));
    assert_eq!(world.refusal(sessions[0]).kind(), JoinRefusedKind::DuplicateRank);
    // Somebody else's rank makes nobody a member: all four are still waited for.
    ask(&mut world, sessions[1], 3, member(id, 2));
    ask(&mut world, sessions[1], 4, member(id, 1));
    ask(&mut world, sessions[3], 1, member(id, 3));
    quiet(&mut world, &sessions);
    assert_eq!(world.state.tenant_communicators("a"), 2, "one that runs, and a set that waits");
    sessions.iter().for_each(|session| world.gone(*session));
    assert_eq!(world.state.tenant_communicators("a"), 1, "it may run still");
    world.wait(SECOND * 30);
    assert_eq!(world.state.tenant_communicators("a"), 0);
    let fresh = world.agent(0);
    // Nobody is left of it: those who come begin anew when the first has waited long enough.
    ask(&mut world, fresh, 1, newcomer());
    world.wait(SECOND * 31);
    assert_eq!(formed(&mut world, &[fresh]).2, [None]);
}

#[test]
fn a_failure_without_loss_keeps_all_ranks() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    let failed = v1::Failed {
        communicator: id,
        kind: FailureKind::Timeout.into(),
        ranks: vec![3],
        detail: "late".to_owned(),
    };
    world.send(sessions[0], from_agent::Message::Failed(failed));
    world.ignore(&sessions);
    for rank in [0, 1, 2] {
        ask(&mut world, sessions[rank as usize], 1, member(id, rank));
    }
    quiet(&mut world, &sessions);
    // Its process gives up: nobody waits for it any more.
    leave(&mut world, sessions[3], id, 3);
    assert_eq!(formed(&mut world, &sessions[..3]).1, ["h0", "h1", "h2"]);
}
