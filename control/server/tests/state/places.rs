//! How many communicators a tenant has. Each counts once, whether it runs, is kept for its members, or goes on from another.

use super::world::{SECOND, World, settings};
use harmonaize_abi::session::{Constraints, OnFailure};
use harmonaize_api::v1::{self, FailureKind, JoinRefusedKind, from_agent, to_agent};
use harmonaize_server::state::SessionId;
use harmonaize_server::state::testing::Testing as _;

/// As many as a tenant may have.
const MOST: usize = 6;

const NAMES: [&str; MOST] = ["c0", "c1", "c2", "c3", "c4", "c5"];

/// Two agents.
fn world() -> (World, [SessionId; 2]) {
    let mut world = World::new(settings(2), 7);
    let sessions = [0, 1].map(|host| world.agent(host));
    (world, sessions)
}

fn occupied(world: &World) -> usize {
    world.state.tenant_communicators("a")
}

/// It fails, and no rank is lost.
fn fail(world: &mut World, sessions: &[SessionId; 2], communicator: u64) {
    let kind = FailureKind::Timeout.into();
    let failed = v1::Failed { communicator, kind, ranks: vec![], detail: "late".to_owned() };
    world.send(sessions[0], from_agent::Message::Failed(failed));
    world.ignore(sessions);
}

fn ask(world: &mut World, session: SessionId, name: &str, (communicator, member): (u64, u32)) {
    let regroup = Some(v1::Regroup { communicator, previous_rank: member, key: member, min_ranks: 1 });
    let (tenant, communicator) = ("a".to_owned(), name.to_owned());
    let request = communicator.bytes().fold(u64::from(member), |sum, byte| sum * 251 + u64::from(byte));
    let join =
        v1::Join { request: request + (1 << 60), tenant, communicator, regroup, ..v1::Join::default() };
    world.send(session, from_agent::Message::Join(join));
}

/// Both members want to go on; what the first was told.
fn regroup(world: &mut World, sessions: &[SessionId; 2], name: &str, id: u64) -> to_agent::Message {
    for (member, session) in (0..).zip(sessions) {
        ask(world, *session, name, (id, member));
    }
    world.received(sessions[1]);
    world.received(sessions[0]).remove(0)
}

/// It goes on, and the next one is in use.
fn goes_on(world: &mut World, sessions: &[SessionId; 2], name: &str, id: u64) -> u64 {
    let to_agent::Message::Form(recipe) = regroup(world, sessions, name, id) else { panic!("no recipe") };
    world.prepare(sessions, recipe.communicator, 1);
    recipe.communicator
}

fn is_full(message: &to_agent::Message) -> bool {
    matches!(message, to_agent::Message::JoinRefused(refused) if refused.kind() == JoinRefusedKind::Limit)
}

fn leave(world: &mut World, sessions: &[SessionId; 2], communicator: u64) {
    for (rank, session) in (0..).zip(sessions) {
        let leave = v1::Leave { communicator, rank, request: 0 };
        world.send(*session, from_agent::Message::Leave(leave));
    }
}

#[test]
fn without_a_policy_a_successor_needs_a_place() {
    let (mut world, sessions) = world();
    let failed = NAMES.map(|name| world.form(&sessions, name));
    assert_eq!(occupied(&world), MOST);
    failed.iter().for_each(|id| fail(&mut world, &sessions, *id));
    // Their places are anybody's, so others take them.
    assert_eq!(occupied(&world), 0);
    let others = ["d0", "d1", "d2", "d3", "d4", "d5"].map(|name| world.form(&sessions, name));
    assert!(is_full(&regroup(&mut world, &sessions, "c0", failed[0])));
    leave(&mut world, &sessions, others[0]);
    goes_on(&mut world, &sessions, "c0", failed[0]);
    assert_eq!(occupied(&world), MOST);
    assert!(is_full(&regroup(&mut world, &sessions, "c1", failed[1])));
}

#[test]
fn repeated_regrouping_without_leaving_is_limited() {
    let (mut world, sessions) = world();
    let first = NAMES.map(|name| world.form(&sessions, name));
    let second = [0, 1].map(|at| goes_on(&mut world, &sessions, NAMES[at], first[at]));
    assert_eq!(occupied(&world), MOST + 2, "those before are there still");
    assert!(is_full(&regroup(&mut world, &sessions, NAMES[0], second[0])));
    world.join(sessions[0], "more", 0, 1);
    assert_eq!(world.refusal(sessions[0]).kind(), JoinRefusedKind::Limit);
    leave(&mut world, &sessions, first[0]);
    goes_on(&mut world, &sessions, NAMES[0], second[0]);
}

#[test]
fn a_kept_communicator_and_its_successor_count_once() {
    let (mut world, sessions) = world();
    let ids: Vec<u64> = NAMES.iter().take(MOST - 1).map(|name| world.form(&sessions, name)).collect();
    let wanted = Constraints::new().on_failure(OnFailure::Regroup { within: SECOND * 60 });
    let (tenant, communicator) = ("a".to_owned(), NAMES[0].to_owned());
    let asked = v1::Negotiate { request: 1, tenant, communicator, propose: Some((&wanted).into()) };
    world.send(sessions[0], from_agent::Message::Negotiate(asked));
    world.received(sessions[0]);
    fail(&mut world, &sessions, ids[0]);
    assert_eq!(occupied(&world), MOST - 1, "kept");
    ask(&mut world, sessions[0], NAMES[0], (ids[0], 0));
    assert_eq!(occupied(&world), MOST - 1, "one of its members waits");
    ask(&mut world, sessions[1], NAMES[0], (ids[0], 1));
    let next = sessions.map(|session| world.recipe(session).communicator)[0];
    assert_eq!(occupied(&world), MOST - 1, "it forms");
    // So there is room for one more, and not for two.
    world.form(&sessions, "more");
    world.join(sessions[0], "too many", 0, 1);
    assert_eq!(world.refusal(sessions[0]).kind(), JoinRefusedKind::Limit);
    world.prepare(&sessions, next, 1);
    assert_eq!(occupied(&world), MOST);
    // Who joins anew under the name of what is kept takes its place, and its members have none beside that.
    fail(&mut world, &sessions, next);
    world.join(sessions[0], NAMES[0], 0, 2);
    assert_eq!(occupied(&world), MOST);
    ask(&mut world, sessions[1], NAMES[0], (next, 1));
    assert_eq!(world.refusal(sessions[1]).kind(), JoinRefusedKind::Limit);
}
