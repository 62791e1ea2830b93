//! Communicators that split: who is in which, who is told why there is none, and how long many take.

use super::topology::leaf_spine;
use super::world::{SECOND, World, hello, join_of, settings, settings_of};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, FailureKind, JoinRefusedKind, from_agent, to_agent};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Instruction, SessionId};
use harmonaize_store::WithdrawalKind;
use std::collections::BTreeMap;
use std::time::Instant;

/// Four hosts of which each has a rank of `job`, and its id.
fn job(world: &mut World) -> (Vec<SessionId>, u64) {
    let sessions: Vec<SessionId> = (0..4).map(|host| world.agent(host)).collect();
    let id = world.form(&sessions, "job");
    (sessions, id)
}

fn world() -> World {
    World::new(settings(4), 7)
}

fn split(communicator: u64, rank: u32, color: Option<u32>, key: u32) -> v1::Join {
    let split = Some(v1::Split { communicator, rank, color, key });
    v1::Join { request: 1000 + u64::from(rank), split, ..join_of("a", "job", 0, 0) }
}

fn ask(world: &mut World, session: SessionId, join: v1::Join) {
    world.send(session, from_agent::Message::Join(join));
}

/// Hosts of a communicator by rank.
fn hosts(recipe: &v1::Recipe) -> Vec<String> {
    let parts = recipe.participants.iter();
    let mut hosts: Vec<(u32, String)> =
        parts.flat_map(|part| part.ranks.iter().map(|rank| (*rank, part.host.clone()))).collect();
    hosts.sort();
    hosts.into_iter().map(|(_, host)| host).collect()
}

#[test]
fn ranks_of_a_color_are_ordered_by_key_and_rank() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    for (rank, color, key) in [(2, Some(7), 1), (0, Some(7), 5), (1, None, 0)] {
        ask(&mut world, sessions[rank as usize], split(id, rank, color, key));
        assert!(world.is_quiet(&sessions), "not before all have called");
    }
    ask(&mut world, sessions[3], split(id, 3, Some(7), 1));
    let left_out = world.refusal(sessions[1]);
    assert_eq!((left_out.kind(), left_out.request), (JoinRefusedKind::LeftOut, 1001));
    let members = [sessions[0], sessions[2], sessions[3]];
    let recipes = world.recipes(&members);
    assert_eq!((recipes[0].name.as_str(), recipes[0].tenant.as_str()), ("job#1.7", "a"));
    assert_eq!(hosts(&recipes[0]), ["h2", "h3", "h0"]);
    assert!(recipes.iter().all(|recipe| recipe.communicator == recipes[0].communicator));
    let child = recipes[0].communicator;
    world.prepare(&members, child, 1);
    assert_eq!(world.state.communicator_ids(), [CommunicatorId(id), CommunicatorId(child)], "it goes on");
    assert!(sessions.iter().all(|session| world.state.open_joins(*session).is_empty()));
    // The next one has another number while that of this one is there, and a child splits too.
    for rank in 0..4 {
        ask(&mut world, sessions[rank as usize], split(id, rank, Some(rank / 2), 0));
    }
    let names: Vec<String> = world.recipes(&sessions).into_iter().map(|recipe| recipe.name).collect();
    assert_eq!(names, ["job#2.0", "job#2.0", "job#2.1", "job#2.1"]);
    for (rank, session) in (0..).zip([sessions[2], sessions[3], sessions[0]]) {
        ask(&mut world, session, split(child, rank, Some(0), 0));
    }
    assert_eq!(world.recipe(sessions[0]).name, "job#1.7#1.0");
}

#[test]
fn who_never_called_is_named_to_all() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    ask(&mut world, sessions[0], split(id, 0, Some(0), 0));
    world.wait(SECOND);
    let soon = v1::Join { timeout_ns: (SECOND * 5).as_nanos() as u64, ..split(id, 1, None, 0) };
    ask(&mut world, sessions[1], soon);
    assert_eq!(world.state.splitting_ranks(), 2);
    world.wait(SECOND * 4);
    assert!(world.is_quiet(&sessions));
    world.wait(SECOND);
    for session in &sessions[..2] {
        let refused = world.refusal(*session);
        assert_eq!((refused.kind(), refused.ranks), (JoinRefusedKind::Timeout, vec![2, 3]));
        assert_eq!(refused.text, "ranks 2, 3 of 4 have not called split in time");
    }
    assert_eq!(world.state.splitting_ranks(), 0);
    // Whoever is late finds nobody, and all may call again.
    for rank in 0..4 {
        ask(&mut world, sessions[rank as usize], split(id, rank, Some(0), 0));
    }
    assert_eq!(hosts(&world.recipes(&sessions)[0]), ["h0", "h1", "h2", "h3"]);
}

#[test]
fn a_split_without_all_ranks_ends_at_once() {
    type End = fn(&mut World, &[SessionId], u64);
    let leaves: End = |world, sessions, id| {
        let leave = v1::Leave { communicator: id, rank: 3, request: 0 };
        world.send(sessions[3], from_agent::Message::Leave(leave));
    };
    let dies: End = |world, sessions, _| world.dies(sessions[3]);
    let fails: End = |world, sessions, id| {
        let failed = v1::Failed { communicator: id, kind: FailureKind::Timeout.into(), ..Default::default() };
        world.send(sessions[0], from_agent::Message::Failed(failed));
    };
    let is_dissolved: End = |world, _, id| assert!(world.dissolve(id));
    for (end, kind) in [
        (leaves, JoinRefusedKind::RankLost),
        (dies, JoinRefusedKind::RankLost),
        (fails, JoinRefusedKind::Over),
        (is_dissolved, JoinRefusedKind::Over),
    ] {
        let mut world = world();
        let (sessions, id) = job(&mut world);
        for rank in 0..3 {
            ask(&mut world, sessions[rank as usize], split(id, rank, Some(0), 0));
        }
        end(&mut world, &sessions, id);
        for session in &sessions[..3] {
            let refused = every!(world.received(*session), JoinRefused);
            assert_eq!(refused.iter().map(v1::JoinRefused::kind).collect::<Vec<_>>(), [kind]);
        }
        assert_eq!(world.state.splitting_ranks(), 0);
        // And so does one that is begun afterwards.
        ask(&mut world, sessions[0], split(id, 0, Some(0), 0));
        let refused = every!(world.received(sessions[0]), JoinRefused);
        let later = if kind == JoinRefusedKind::RankLost
            && world.state.communicator_view(CommunicatorId(id)).is_some()
        {
            JoinRefusedKind::RankLost
        } else {
            JoinRefusedKind::Over
        };
        assert_eq!(refused.iter().map(v1::JoinRefused::kind).collect::<Vec<_>>(), [later]);
        assert!(world.ended.is_empty());
    }
}

#[test]
fn senseless_splits_are_refused() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    ask(&mut world, sessions[0], split(id, 0, Some(0), 0));
    let again = v1::Join { request: 2, ..split(id, 0, Some(1), 0) };
    ask(&mut world, sessions[0], again);
    let refused = world.refusal(sessions[0]);
    assert_eq!(
        (refused.kind(), refused.request, refused.ranks),
        (JoinRefusedKind::DuplicateRank, 2, vec![0])
    );
    ask(&mut world, sessions[1], split(id + 1, 1, Some(0), 0));
    assert_eq!(world.refusal(sessions[1]).kind(), JoinRefusedKind::Over);
    // A process that gives up takes its call back.
    let leave = v1::Leave { communicator: 0, rank: 0, request: 1000 };
    world.send(sessions[0], from_agent::Message::Leave(leave));
    assert_eq!(world.state.splitting_ranks(), 0);
    // As many communicators as a job may have, and one more.
    for rank in 0..4 {
        ask(&mut world, sessions[rank as usize], split(id, rank, Some(rank), 0));
    }
    world.recipes(&sessions);
    for rank in 0..4 {
        ask(&mut world, sessions[rank as usize], split(id, rank, Some(rank % 2), 0));
    }
    for session in &sessions {
        assert_eq!(world.refusal(*session).kind(), JoinRefusedKind::Limit);
    }
    // An agent that speaks for ranks of others.
    ask(&mut world, sessions[1], split(id, 2, Some(0), 0));
    assert_eq!(world.ended, [sessions[1]]);
}

#[test]
fn a_host_in_maintenance_gets_no_new_communicators() {
    let mut world = world();
    let (sessions, id) = job(&mut world);
    let (targets, kind) = (vec!["h3".to_owned()], WithdrawalKind::Drain);
    let drain =
        Instruction::Withdraw { targets, kind, from: Nanos(0), until: Nanos(0), reason: String::new() };
    let changes = world.state.consider(world.now, &drain).unwrap();
    world.state.apply_stored(world.now, &changes);
    world.run_until_quiet();
    world.ignore(&sessions);
    ask(&mut world, sessions[0], split(id, 0, Some(0), 0));
    ask(&mut world, sessions[3], split(id, 3, Some(0), 0));
    for session in [sessions[0], sessions[3]] {
        let refused = world.refusal(session);
        assert_eq!((refused.kind(), refused.ranks), (JoinRefusedKind::Unavailable, vec![3]));
    }
}

#[test]
fn children_have_the_parents_budget_and_no_ranks_but_theirs() {
    let mut world = world();
    let sessions: Vec<SessionId> = (0..2).map(|host| world.agent(host)).collect();
    let budget = Some(v1::Budget { kind: Some(v1::budget::Kind::MatchBf16(true)) });
    let join = v1::Join { budget: budget.clone(), ..join_of("a", "job", 0, 0) };
    let id = world.join_all(&sessions, &join)[0].communicator;
    world.prepare(&sessions, id, 1);
    for rank in 0..2 {
        ask(&mut world, sessions[rank as usize], split(id, rank, Some(rank), 0));
    }
    for recipe in world.recipes(&sessions) {
        assert_eq!((recipe.budget, recipe.participants.len()), (budget.clone(), 1));
    }
}

/// 64 groups of 8 ranks, of one communicator of 64 hosts with 8 ranks each. All call, each agent prepares what it
/// hears of, and the clock stops once the last group is ready. Prints what control itself takes, in real time.
#[test]
fn many_groups_form_of_one_split() {
    const GROUPS: u32 = 64;
    const HOSTS: usize = 64;
    let racks: Vec<usize> = (0..HOSTS).map(|host| host / 16).collect();
    let mut settings = settings_of(&leaf_spine(&racks, 4, || "50us".to_owned()));
    (settings.most_ranks, settings.most_communicators) = (8 * GROUPS, 2 * GROUPS as usize);
    let mut world = World::new(settings, 1);
    let hosts = world.connect((0..HOSTS).map(|host| hello(host, vec![])));
    let ranks: Vec<SessionId> = hosts.iter().flat_map(|session| [*session; 8]).collect();
    for (rank, session) in (0..).zip(&ranks) {
        ask(&mut world, *session, join_of("a", "job", rank, 8 * GROUPS));
    }
    let id = world.recipes(&hosts)[0].communicator;
    world.prepare(&hosts, id, 1);
    let begin = Instant::now();
    for (rank, session) in (0..).zip(&ranks) {
        ask(&mut world, *session, split(id, rank, Some(rank % GROUPS), rank));
    }
    let formed = begin.elapsed();
    let mut members: BTreeMap<u64, u32> = BTreeMap::new();
    for session in &hosts {
        for recipe in every!(world.received(*session), Form) {
            *members.entry(recipe.communicator).or_default() += recipe.local_ranks.len() as u32;
            let prepared = v1::Prepared { communicator: recipe.communicator, epoch: 1, links: None };
            world.send(*session, from_agent::Message::Prepared(prepared));
        }
    }
    let took = begin.elapsed();
    assert_eq!(members.into_values().collect::<Vec<_>>(), [8; GROUPS as usize]);
    for session in &hosts {
        let ready = |message: &to_agent::Message| matches!(message, to_agent::Message::Ready(_));
        assert_eq!(world.received(*session).iter().filter(|message| ready(message)).count(), 8);
    }
    println!("{GROUPS} groups of 8 ranks: {formed:?} until recipes are out, {took:?} until all are ready");
}
