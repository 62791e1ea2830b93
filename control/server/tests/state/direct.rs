//! How operations go by their size. It depends on delays, rates and what hosts have measured. An operator may choose. After a
//! restart it is as before.

use super::fabric::{Fabric, two_by_two};
use super::topology::{leaf_spine, star};
use super::world::{SECOND, World, hello, join_of, running, settings, settings_of};
use harmonaize_abi::{Collective, CommunicatorId};
use harmonaize_api::v1;
use harmonaize_plan::Algorithm;
use harmonaize_planner::{AlgorithmOverride, AlgorithmReason, Bytes};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Settings, TenantAlgorithm};
use std::ops::RangeInclusive;
use std::time::Duration;

/// Up to which sizes AllReduces go in one shot and in two; 0 for none.
pub(super) fn sizes(recipe: &v1::Recipe) -> (u64, u64) {
    let ranges = &recipe.tuning.as_ref().unwrap().algorithms;
    let size = |algorithm: &str| {
        let mut by =
            ranges.iter().filter(|range| range.collective == "allreduce" && range.algorithm == algorithm);
        by.next_back().map_or(0, |range| range.up_to_bytes)
    };
    (size("one-shot"), size("two-shot"))
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
        assert!(matches!(reason, AlgorithmReason::Fastest(_)), "{reason}");
        sizes(&recipes[0])
    });
    let [(near, _), (far, two)] = found;
    // 1 ms and 70 us of messages, at 125 MB/s over 5.25.
    assert!((25_470..25_480).contains(&far) && near < 4096 && near > 0, "{found:?}");
    assert_eq!(two, 1 << 20);
}

/// A choice for AllReduces of these sizes.
fn chosen_by_operator(
    tenant: Option<&str>,
    sizes: RangeInclusive<u64>,
    algorithm: Algorithm,
) -> TenantAlgorithm {
    let (collective, tenant) = (Collective::AllReduce, tenant.map(str::to_owned));
    let (from, to) = (Bytes(*sizes.start()), Bytes(*sizes.end()));
    TenantAlgorithm { tenant, choice: AlgorithmOverride { collective, from, to, algorithm } }
}

#[test]
fn an_operator_may_choose_for_a_tenant() {
    let mut settings = settings_of(&star(8, "0.5ms"));
    settings.algorithms = vec![
        chosen_by_operator(None, 0..=2000, Algorithm::RecursiveDoubling),
        chosen_by_operator(Some("a"), 1000..=u64::MAX, Algorithm::TwoShot),
    ];
    let mut world = World::new(settings, 3);
    let sessions = world.connect((0..4).map(|host| hello(host, vec![])));
    let [own, everybody] = ["a", "b"].map(|tenant| {
        let recipe = &world.join_all(&sessions, &join_of(tenant, "world", 0, 0))[0];
        [999, 1000, 2000, 1 << 30].map(|bytes| chosen(recipe, bytes).to_owned())
    });
    assert_eq!(own, ["recursive-doubling", "two-shot", "two-shot", "two-shot"]);
    assert_eq!(everybody, ["recursive-doubling", "recursive-doubling", "recursive-doubling", "ring"]);
}

#[test]
fn a_reread_choice_holds_from_the_next_epoch() {
    let (mut fabric, id) = Fabric::formed(4, 1, &[0, 1, 2, 3]);
    let algorithm = |fabric: &Fabric| chosen(&fabric.recipe_of(0, id), 1 << 20).to_owned();
    let before = algorithm(&fabric);
    assert_ne!(before, "recursive-halving");
    let algorithms = vec![chosen_by_operator(None, 0..=u64::MAX, Algorithm::RecursiveHalving)];
    let again = Settings { algorithms, ..settings_of(&two_by_two()) };
    fabric.state.configure(fabric.now, again).unwrap();
    fabric.run_until_quiet();
    assert_eq!(algorithm(&fabric), before);
    let order: Vec<u32> = fabric.epoch(id).order.iter().rev().copied().collect();
    fabric.state.propose_order(fabric.now, CommunicatorId(id), order).unwrap();
    fabric.run_until_quiet();
    fabric.run(SECOND * 3);
    assert_eq!(algorithm(&fabric), "recursive-halving");
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
    assert!(after.epoch >= u64::from(epoch) && sizes(&after) == before, "{after:?}");
    let one_shot = fabric.epoch(id).algorithm.table.choose(Collective::AllReduce, before.0);
    assert_eq!(one_shot, Algorithm::OneShot);
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
    let of = |algorithm: &str| {
        let mut ranges = plan.algorithms.iter().filter(|range| range.algorithm == algorithm);
        ranges.find(|range| range.collective == "allreduce").and_then(|range| range.to_bytes).unwrap_or(0)
    };
    assert_eq!((of("one-shot"), of("two-shot")), expected);
    assert!(plan.algorithms.iter().all(|range| range.predicted.is_empty()), "predicted from nothing");
}

/// The algorithm of an AllReduce of so many bytes, as a recipe says.
fn chosen(recipe: &v1::Recipe, bytes: u64) -> &str {
    let mut ranges = recipe.tuning.as_ref().unwrap().algorithms.iter();
    let range = ranges.find(|range| range.collective == "allreduce" && bytes <= range.up_to_bytes);
    range.map_or("ring", |range| &range.algorithm)
}

#[test]
fn what_hosts_measure_moves_sizes() {
    let found = [None, Some((200_000, 0)), Some((0, 0)), Some((200_000, u64::MAX))].map(|costs| {
        let mut world = World::new(settings_of(&star(8, "20us")), 1);
        let costs = costs.map(|(message_ns, reduced_byte_ps)| v1::HostCosts { message_ns, reduced_byte_ps });
        // One of them has measured: all wait for it.
        let sessions = world.connect((0..8).map(|host| {
            let capabilities =
                v1::Capabilities { costs: costs.filter(|_| host == 3), ..v1::Capabilities::default() };
            v1::Hello { capabilities: Some(capabilities), ..hello(host, vec![]) }
        }));
        let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
        assert!(recipes.iter().all(|recipe| recipe.tuning == recipes[0].tuning), "all have one table");
        let plan = world.state.queries(world.now).plans(CommunicatorId(recipes[0].communicator)).unwrap();
        (chosen(&recipes[0], 100).to_owned(), plan.plans.len())
    });
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    // Where a message takes 200 us, 3 exchanges are sooner done than 7 messages; what cannot be is not believed.
    assert_eq!(names, ["one-shot", "recursive-doubling", "one-shot", "one-shot"]);
}

#[test]
fn an_operator_may_choose_by_collective_and_size() {
    let mut settings = settings_of(&star(8, "0.5ms"));
    settings.algorithms.push(chosen_by_operator(None, 1000..=2000, Algorithm::RecursiveHalving));
    let mut world = World::new(settings, 3);
    let sessions = world.connect((0..8).map(|host| hello(host, vec![])));
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    let sizes = [999, 1000, 2000, 2001].map(|bytes| chosen(&recipes[0], bytes));
    assert_eq!(sizes, ["one-shot", "recursive-halving", "recursive-halving", "one-shot"]);
    let id = recipes[0].communicator;
    world.prepare(&sessions, id, 1);
    let plan = world.state.queries(world.now).plans(CommunicatorId(id)).unwrap().plans.remove(0);
    let own: Vec<_> = plan.algorithms.iter().filter(|range| range.overridden).collect();
    assert_eq!(own.len(), 1, "{:?}", plan.algorithms);
    assert_eq!((own[0].from_bytes, own[0].to_bytes, own[0].at_bytes), (1000, Some(2000), 2000));
    let times: Vec<(&str, u64)> =
        own[0].predicted.iter().map(|one| (one.algorithm.as_str(), one.time_ns)).collect();
    assert_eq!(times.len(), 5);
    assert!(times.iter().all(|(_, time)| *time >= 1_000_000), "{times:?}");
}

#[test]
fn racks_are_only_for_agents_that_take_them() {
    let found = [4, 3].map(|able| {
        let mut settings = settings_of(&leaf_spine(&[0, 1, 0, 0], 1, || "50us".to_owned()));
        settings.algorithms.push(chosen_by_operator(None, 1000..=u64::MAX, Algorithm::Hierarchical));
        let mut world = World::new(settings, 3);
        let sessions = world.connect((0..4).map(|host| {
            let capabilities = v1::Capabilities { racks: host < able, ..v1::Capabilities::default() };
            v1::Hello { capabilities: Some(capabilities), ..hello(host, vec![]) }
        }));
        let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
        assert!(recipes.iter().all(|recipe| recipe.racks == recipes[0].racks), "all have the same");
        let mut racks = recipes[0].racks.clone();
        racks.sort_unstable();
        (chosen(&recipes[0], 1 << 30).to_owned(), racks)
    });
    assert_eq!(found, [("hierarchical".to_owned(), vec![1, 3]), ("ring".to_owned(), vec![])]);
}
