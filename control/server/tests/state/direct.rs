//! How small operations go: by delays and rates; an operator's choice; after a restart as before.

use super::fabric::Fabric;
use super::world::{SECOND, World, hello, settings, settings_of};
use harmonaize_api::v1::{self, from_agent};
use harmonaize_planner::AlgorithmPolicy;
use harmonaize_server::state::SessionId;
use std::time::Duration;

fn sizes(recipe: &v1::Recipe) -> (u64, u64) {
    let tuning = recipe.tuning.unwrap();
    (tuning.one_shot_bytes, tuning.two_shot_bytes)
}

/// Eight hosts on one switch.
fn star(delay: &str) -> String {
    let mut text = "[[switch]]\nname = \"s\"\n".to_owned();
    for host in 0..8 {
        text += &format!("[[host]]\nname = \"h{host}\"\n[[link]]\nfrom = \"h{host}\"\nto = \"s\"\n");
        text += &format!("rate = \"1Gbit/s\"\ndelay = \"{delay}\"\n");
    }
    text
}

/// A communicator of a tenant over agents that say this of themselves; its recipes.
fn form(world: &mut World, tenant: &str, sessions: &[SessionId]) -> Vec<v1::Recipe> {
    for (rank, session) in sessions.iter().enumerate() {
        world.received(*session);
        let (tenant, communicator) = (tenant.to_owned(), "world".to_owned());
        let (request, rank, ranks) = (rank as u64 + 1, rank as u32, sessions.len() as u32);
        let join = v1::Join { request, tenant, communicator, rank, ranks, ..v1::Join::default() };
        world.send(*session, from_agent::Message::Join(join));
    }
    sessions.iter().map(|session| world.recipe(*session)).collect()
}

#[test]
fn the_longer_the_way_the_larger_what_goes_in_one_shot() {
    let found = ["20us", "0.5ms"].map(|delay| {
        let mut world = World::new(settings_of(&star(delay)), 1);
        let sessions: Vec<SessionId> = (0..8).map(|host| world.hello(hello(host, vec![]))).collect();
        let recipes = form(&mut world, "a", &sessions);
        assert!(recipes.iter().all(|recipe| sizes(recipe) == sizes(&recipes[0])));
        let known = world.state.communicator_view(recipes[0].communicator).unwrap();
        let reason = known.next.unwrap().algorithm.reason;
        assert!(reason.contains("one way between the farthest"), "{reason}");
        sizes(&recipes[0])
    });
    let [(near, _), (far, two)] = found;
    // 1 ms and 70 us of messages, at 125 MB/s over 5.25.
    assert!((25_470..25_480).contains(&far) && near < 4096 && near > 0, "{found:?}");
    assert_eq!(two, 1 << 20);
}

#[test]
fn an_operator_may_choose_for_a_tenant() {
    for (choice, expected) in [
        (AlgorithmPolicy::Never, (0, 0)),
        (AlgorithmPolicy::OneShot, (1 << 20, 0)),
        (AlgorithmPolicy::TwoShot, (0, 1 << 20)),
    ] {
        let mut settings = settings_of(&star("0.5ms"));
        settings.direct.insert("a".to_owned(), choice);
        let mut world = World::new(settings, 3);
        let sessions: Vec<SessionId> = (0..4).map(|host| world.hello(hello(host, vec![]))).collect();
        let [chosen, left] = ["a", "b"].map(|tenant| sizes(&form(&mut world, tenant, &sessions)[0]));
        assert_eq!(chosen, expected);
        assert!(left.0 > 0 && left.1 > left.0, "{left:?}");
    }
}

#[test]
fn a_change_of_plan_moves_sizes_only_where_much_has_changed() {
    let mut fabric = Fabric::new(4, 1);
    fabric.run(SECOND * 3);
    let id = fabric.form("a", "world", &[0, 1, 2, 3]);
    fabric.run(SECOND * 3);
    let before = sizes(&fabric.recipe_of(0, id));
    assert!(before.0 > 0, "{before:?}");
    let order: Vec<u32> = fabric.epoch(id).order.iter().rev().copied().collect();
    let epoch = fabric.state.propose_order(fabric.now, id, order).unwrap();
    fabric.run_until_quiet();
    fabric.run(SECOND * 3);
    let after = fabric.recipe_of(0, id);
    assert!(after.epoch >= epoch && sizes(&after) == before, "{after:?}");
    assert_eq!(fabric.epoch(id).algorithm.sizes.one_shot.0, before.0);
}

#[test]
fn a_restart_finds_the_sizes_again() {
    let mut world = World::new(settings(4), 5);
    let sessions: Vec<SessionId> = (0..2).map(|host| world.hello(hello(host, vec![]))).collect();
    let recipes = form(&mut world, "a", &sessions);
    let expected = sizes(&recipes[0]);
    assert!(expected.0 > 0);
    let mut world = World::new(settings(4), 6);
    for (host, recipe) in recipes.iter().enumerate() {
        world.hello(hello(host, vec![v1::Recipe { peers: vec![], ..recipe.clone() }]));
    }
    world.wait(SECOND * 30);
    let plan = world.state.queries(Duration::ZERO).plans(recipes[0].communicator).unwrap().plans.remove(0);
    assert_eq!((plan.one_shot_bytes, plan.two_shot_bytes), expected);
}
