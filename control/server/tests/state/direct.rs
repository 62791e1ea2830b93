//! How small operations go: by delays and rates; an operator's choice; after a restart as before.

use super::fabric::Fabric;
use super::topology::star;
use super::world::{SECOND, World, hello, join_of, running, settings, settings_of};
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1;
use harmonaize_planner::AlgorithmPolicy;
use harmonaize_server::state::testing::Testing as _;
use std::time::Duration;

fn sizes(recipe: &v1::Recipe) -> (u64, u64) {
    let tuning = recipe.tuning.unwrap();
    (tuning.one_shot_bytes, tuning.two_shot_bytes)
}

#[test]
fn longer_delays_make_one_shot_sizes_larger() {
    let found = ["20us", "0.5ms"].map(|delay| {
        let mut world = World::new(settings_of(&star(8, delay)), 1);
        let sessions = world.connect((0..8).map(|host| hello(host, vec![])));
        let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
        assert!(recipes.iter().all(|recipe| sizes(recipe) == sizes(&recipes[0])));
        let known = world.state.communicator_view(CommunicatorId(recipes[0].communicator)).unwrap();
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
        let mut settings = settings_of(&star(8, "0.5ms"));
        settings.direct.insert("a".to_owned(), choice);
        let mut world = World::new(settings, 3);
        let sessions = world.connect((0..4).map(|host| hello(host, vec![])));
        let [chosen, left] =
            ["a", "b"].map(|tenant| sizes(&world.join_all(&sessions, &join_of(tenant, "world", 0, 0))[0]));
        assert_eq!(chosen, expected);
        assert!(left.0 > 0 && left.1 > left.0, "{left:?}");
    }
}

#[test]
fn a_small_change_of_plan_keeps_sizes() {
    let (mut fabric, id) = Fabric::formed(4, 1, &[0, 1, 2, 3]);
    let before = sizes(&fabric.recipe_of(0, id));
    assert!(before.0 > 0, "{before:?}");
    let order: Vec<u32> = fabric.epoch(id).order.iter().rev().copied().collect();
    let epoch = fabric.state.propose_order(fabric.now, CommunicatorId(id), order).unwrap();
    fabric.run_until_quiet();
    fabric.run(SECOND * 3);
    let after = fabric.recipe_of(0, id);
    assert!(after.epoch >= epoch && sizes(&after) == before, "{after:?}");
    assert_eq!(fabric.epoch(id).algorithm.sizes.one_shot.0, before.0);
}

#[test]
fn a_restart_finds_the_sizes_again() {
    let mut world = World::new(settings(4), 5);
    let sessions = world.connect((0..2).map(|host| hello(host, vec![])));
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    let expected = sizes(&recipes[0]);
    assert!(expected.0 > 0);
    let mut world = World::new(settings(4), 6);
    for (host, recipe) in recipes.iter().enumerate() {
        world.hello(hello(host, running(recipe)));
    }
    world.wait(SECOND * 30);
    let plan = world
        .state
        .queries(Duration::ZERO)
        .plans(CommunicatorId(recipes[0].communicator))
        .unwrap()
        .plans
        .remove(0);
    assert_eq!((plan.one_shot_bytes, plan.two_shot_bytes), expected);
}
