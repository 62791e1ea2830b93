//! Budgets and codecs: what ranks must agree on, and what control chooses. Control does not change its mind all the time.

use super::fabric::{CrossTraffic, EVERYONE, Fabric, MS, two_by_two};
use super::world::{SECOND, World, hello, join_of, operation as timed, running, settings, settings_of};
use harmonaize_abi::session::Hints;
use harmonaize_abi::{Collective, CommunicatorId, Nanos};
use harmonaize_api::v1::{self, JoinRefusedKind, budget::Kind, from_agent, to_agent};
use harmonaize_codec::Codec;
use harmonaize_planner::CodecReason;
use harmonaize_server::state::testing::{Testing as _, outdated_plan};
use harmonaize_server::state::{Fact, Output, Reason, SessionId};
use harmonaize_store::{Change, Loss, Stored};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

fn bound(most: f64) -> Option<v1::Budget> {
    Some(v1::Budget { kind: Some(Kind::Vnmse(most)) })
}

fn listed(names: &[&str]) -> Option<v1::Budget> {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    Some(v1::Budget { kind: Some(Kind::Codecs(v1::CodecNames { names })) })
}

/// The codec of the epoch in use, and its number.
fn runs(fabric: &Fabric, id: u64) -> (&'static str, u64) {
    let known = fabric.epoch(id);
    (known.codec.name(), known.epoch)
}

fn set_budget(fabric: &mut Fabric, id: u64, rank: u32, budget: Option<v1::Budget>) {
    let known = fabric.communicator(id);
    let member = known.members.iter().find(|member| member.ranks.contains(&rank)).unwrap();
    let session = member.session.unwrap();
    let said = v1::SetBudget { communicator: id, rank, budget };
    fabric.send(session, from_agent::Message::SetBudget(said));
}

/// A join with a budget.
fn within(budget: Option<v1::Budget>) -> v1::Join {
    v1::Join { budget, ..join_of("a", "world", 0, 0) }
}

fn plan(fabric: &Fabric, id: u64) -> v1::PlanStatus {
    fabric.state.queries(Duration::ZERO).plans(CommunicatorId(id)).unwrap().plans.remove(0)
}

#[test]
fn a_slow_fabric_compresses_within_the_budget() {
    for (budget, codec, most) in [
        (None, "exact", None),
        (bound(1e-6), "fp16", Some(1e-6)),
        (bound(0.01), "int8", Some(0.01)),
        (bound(0.05), "rotated 4", Some(0.05)),
        (bound(0.5), "rotated 2", Some(0.5)),
        (listed(&["exact", "bf16"]), "bf16", None),
        (Some(v1::Budget { kind: Some(Kind::MatchBf16(true)) }), "bf16", None),
    ] {
        let mut fabric = Fabric::traced(1, 1);
        let beside = fabric.form("b", "beside", &EVERYONE);
        let id = fabric.create_within("a", "world", &EVERYONE, budget.clone());
        fabric.run(SECOND * 3);
        assert_eq!(runs(&fabric, id).0, codec, "{budget:?}: {}", plan(&fabric, id).codec_reason);
        let recipe = fabric.recipe_of(0, id);
        let expected = (codec != "exact").then(|| (codec.to_owned(), most));
        let coding = recipe.coding.map(|coding| (coding.codec, coding.max_vnmse));
        assert_eq!((coding, recipe.budget), (expected, budget));
        assert_eq!((plan(&fabric, id).codec, runs(&fabric, beside).0), (codec.to_owned(), "exact"));
        assert_eq!(fabric.recipe_of(0, beside).coding, None);
    }
}

#[test]
fn ranks_must_name_the_same_budget() {
    let mut world = World::new(settings(4), 1);
    let sessions: Vec<SessionId> = (0..4).map(|host| world.agent(host)).collect();
    let join = |world: &mut World, rank: u32, budget: Option<v1::Budget>| {
        let join = v1::Join { budget, ..join_of("a", "world", rank, 4) };
        world.send(sessions[rank as usize], from_agent::Message::Join(join));
    };
    join(&mut world, 0, bound(0.01));
    join(&mut world, 2, bound(0.01));
    join(&mut world, 3, None);
    let refused = world.refusal(sessions[3]);
    assert_eq!((refused.kind(), refused.ranks), (JoinRefusedKind::Budget, vec![0, 2]));
    assert_eq!(
        refused.text,
        "rank 3 joins with the budget \"exact\", but ranks 0, 2 have joined with \"vNMSE at most 0.01\""
    );
    for (budget, text) in [
        (bound(f64::NAN), "a bound of NaN on vNMSE"),
        (bound(0.0), "a bound of 0 on vNMSE"),
        (bound(-1.0), "a bound of -1 on vNMSE"),
        (bound(1.5), "a bound of 1.5 on vNMSE"),
        (listed(&["int9"]), "no codec is called \"int9\""),
        (listed(&[]), "0 codecs are allowed"),
    ] {
        join(&mut world, 1, budget);
        let refused = world.refusal(sessions[1]);
        assert_eq!(refused.kind(), JoinRefusedKind::Budget);
        assert!(refused.text.starts_with(text), "{}", refused.text);
    }
    // The same codecs in another order are the same budget.
    let mut world = World::new(settings(4), 2);
    let sessions: Vec<SessionId> = (0..2).map(|host| world.agent(host)).collect();
    for (rank, names) in [["int8", "bf16"], ["bf16", "int8"]].iter().enumerate() {
        let join = v1::Join { budget: listed(names), ..join_of("a", "world", rank as u32, 2) };
        world.send(sessions[rank], from_agent::Message::Join(join));
    }
    let recipe = world.recipe(sessions[0]);
    assert_eq!(
        (recipe.budget, recipe.coding),
        (listed(&["bf16", "int8"]), None),
        "these agents take no codec"
    );
}

#[test]
fn a_budget_takes_effect_when_all_ranks_agree() {
    let mut fabric = Fabric::traced(2, 1);
    let id = fabric.form("a", "world", &EVERYONE);
    fabric.run(SECOND * 3);
    let (_, epoch) = runs(&fabric, id);
    let links = fabric.epoch(id).links.clone();
    for rank in 0..7 {
        set_budget(&mut fabric, id, rank, bound(0.05));
    }
    // One that takes its word back, and another budget meanwhile.
    set_budget(&mut fabric, id, 3, None);
    set_budget(&mut fabric, id, 7, bound(0.01));
    fabric.run(SECOND * 3);
    assert_eq!(runs(&fabric, id), ("exact", epoch));
    set_budget(&mut fabric, id, 3, bound(0.05));
    set_budget(&mut fabric, id, 7, bound(0.05));
    fabric.run(SECOND);
    assert_eq!(runs(&fabric, id), ("rotated 4", epoch + 1));
    assert_eq!(fabric.recipe_of(0, id).budget, bound(0.05));
    let known = fabric.communicator(id);
    assert_eq!(known.current.unwrap().links, links, "no connection is made");
    assert!(fabric.recipe_of(3, id).peers.iter().all(|peer| peer.reused));
    assert_eq!(known.changes, 0, "no way is dearer for it");
    let told = fabric.state.queries(Duration::ZERO).decisions().last().unwrap();
    let Reason::Budget { budget, codec, .. } = &told.changes[0].reason else { panic!("{told:?}") };
    assert_eq!((budget.as_str(), codec.name()), ("vNMSE at most 0.05", "rotated 4"));
    // Back to exact, though the codec has changed just before.
    (0..8).for_each(|rank| set_budget(&mut fabric, id, rank, None));
    fabric.run(SECOND);
    assert_eq!(runs(&fabric, id), ("exact", epoch + 2));
    assert_eq!(fabric.recipe_of(0, id).budget, None);
}

#[test]
fn a_budget_changes_amid_changes_and_without_planning() {
    let mut fabric = Fabric::traced(3, 1);
    let id = fabric.form("a", "world", &EVERYONE);
    fabric.run(SECOND * 3);
    let order: Vec<String> = [0, 4, 1, 5, 2, 6, 3, 7].iter().map(|host| format!("h{host}")).collect();
    fabric.state.reorder(fabric.now, CommunicatorId(id), &order).unwrap();
    (0..8).for_each(|rank| set_budget(&mut fabric, id, rank, bound(0.05)));
    fabric.run(SECOND * 2);
    assert_eq!(runs(&fabric, id).0, "rotated 4", "also where an operator chose the order");
    assert!(fabric.communicator(id).pinned);
    let mut fabric = Fabric::new(4, 1);
    fabric.state.settings_mut().replan = false;
    fabric.run(SECOND * 3);
    let id = fabric.form("a", "world", &EVERYONE);
    fabric.run(SECOND);
    (0..8).for_each(|rank| set_budget(&mut fabric, id, rank, bound(0.05)));
    fabric.run(SECOND);
    assert_eq!(runs(&fabric, id), ("rotated 4", 2));
    fabric.state.settings_mut().compression = false;
    (0..8).for_each(|rank| set_budget(&mut fabric, id, rank, bound(0.06)));
    fabric.run(SECOND);
    assert_eq!(runs(&fabric, id), ("exact", 3));
    assert_eq!(fabric.epoch(id).codec_reason, CodecReason::Disabled);
}

#[test]
fn what_nobody_waits_for_stays_exact() {
    const BYTES: u64 = 16 << 20;
    let mut fabric = Fabric::traced(1, 1);
    let id = fabric.create_within("a", "world", &EVERYONE, bound(0.05));
    fabric.run(SECOND * 3);
    let mut follows = |hints: Hints| {
        fabric.hint("a", "world", &hints).unwrap();
        // Longer than a change of the codec makes the next one dearer.
        fabric.run(SECOND * 120);
        let epoch = fabric.epoch(id);
        (epoch.codec.name(), epoch.codec_reason)
    };
    let reduce = Collective::AllReduce;
    assert_eq!(
        follows(Hints::new().period(SECOND * 5)).0,
        "rotated 4",
        "nothing is said of what it waits for"
    );
    let overlapped = follows(Hints::new().period(SECOND * 5).overlapped(reduce, BYTES));
    assert_eq!(overlapped, ("exact", CodecReason::Overlapped));
    // Four of them have a quarter of the time each: too little for exact ones, and fewer bits than what ends in time gain nothing.
    let four = (0..4).fold(Hints::new().period(MS * 500), |hints, _| hints.overlapped(reduce, BYTES));
    assert_eq!(follows(four).0, "int8");
    assert_eq!(follows(Hints::new().period(SECOND * 5).overlapped(reduce, BYTES)).0, "exact");
    // What the iteration waits for takes from the period, and another AllReduce that it waits for says nothing of which is which.
    let gathers =
        Hints::new().period(SECOND * 5).overlapped(reduce, BYTES).expect(Collective::AllGather, BYTES << 6);
    assert_eq!(follows(gathers).0, "rotated 4");
    assert_eq!(follows(Hints::new().period(SECOND * 5).overlapped(reduce, BYTES)).0, "exact");
    assert_eq!(
        follows(Hints::new().period(SECOND * 5).expect(reduce, BYTES).overlapped(reduce, BYTES)).0,
        "rotated 4"
    );
}

#[test]
fn a_fast_fabric_stays_uncompressed_until_slow() {
    for (rate, codec) in [("100Gbit/s", "exact"), ("1Gbit/s", "rotated 4"), ("100Mbit/s", "rotated 4")] {
        let topology = two_by_two().replace("1Gbit/s", rate);
        let mut fabric = Fabric::of(settings_of(&topology), 5, 1, 0);
        fabric.run(SECOND * 3);
        let id = fabric.create_within("a", "world", &EVERYONE, bound(0.05));
        fabric.run(SECOND * 3);
        assert_eq!(runs(&fabric, id).0, codec, "{rate}: {}", plan(&fabric, id).codec_reason);
    }
}

/// Cross traffic comes and goes by the minute and by the second, for hours. The codec changes only now and then, and is within the
/// budget.
#[test]
fn hours_of_strangers_make_nothing_flap() {
    for seed in 0..2 {
        // Agents so slow that an idle fabric is better left exact, and a busy one not.
        let mut fabric = Fabric::of(settings_of(&two_by_two()), seed, 1, 130_000_000);
        fabric.run(SECOND * 3);
        let id = fabric.create_within("a", "world", &EVERYONE, bound(0.05));
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let (mut changes, mut before) = (Vec::new(), "exact");
        let began = fabric.now;
        let hours = 1;
        while fabric.now < began + SECOND * 3600 * hours {
            for (name, (from, to)) in [("leaf0", "spine0"), ("spine1", "leaf1")].into_iter().enumerate() {
                let link = fabric.link(from, to);
                let bits = random.random_range(0..950_000_000);
                match random.random_bool(0.5) {
                    true => drop(fabric.cross_traffic.insert(name as u32, CrossTraffic { link, bits })),
                    false => drop(fabric.cross_traffic.remove(&(name as u32))),
                }
            }
            fabric.sample_all();
            let wait = if random.random_bool(0.5) { 1 } else { random.random_range(5..60) };
            fabric.run(SECOND * wait + MS);
            let (codec, _) = runs(&fabric, id);
            assert!(["exact", "rotated 4", "int8", "bf16", "fp16", "int8 stochastic"].contains(&codec));
            if codec != before {
                changes.push(fabric.now);
            }
            before = codec;
        }
        assert!(!changes.is_empty(), "seed {seed}");
        println!("seed {seed}: {} changes of codec in {hours} h", changes.len());
        assert!(changes.len() <= 60 * hours as usize, "seed {seed}: {} changes", changes.len());
        let minute = |at: &std::time::Duration| {
            changes.iter().filter(|other| *other >= at && **other < *at + SECOND * 60).count()
        };
        let most = changes.iter().map(minute).max().unwrap_or(0);
        assert!(most <= 5, "seed {seed}: {most} changes within a minute");
    }
}

#[test]
fn what_agents_cannot_prepare_is_not_tried_again() {
    let mut fabric = Fabric::traced(6, 1);
    let id = fabric.form("a", "world", &EVERYONE);
    fabric.run(SECOND * 3);
    fabric.deaf(3, true);
    (0..8).for_each(|rank| set_budget(&mut fabric, id, rank, bound(0.05)));
    fabric.run(SECOND * 12);
    fabric.deaf(3, false);
    fabric.run(SECOND * 120);
    let (codec, _) = runs(&fabric, id);
    assert!(codec != "exact" && codec != "rotated 4", "{codec}");
    assert_eq!(fabric.recipe_of(0, id).budget, bound(0.05));
}

/// What an agent says that codes everything.
fn coded(host: usize, running: Vec<v1::Recipe>) -> v1::Hello {
    let codecs = Codec::NAMED
        .iter()
        .map(|(name, _)| v1::CodecSpeed { codec: (*name).to_owned(), ..v1::CodecSpeed::default() });
    let codecs = codecs.collect();
    let abilities = v1::Capabilities { codecs, ..v1::Capabilities::default() };
    v1::Hello { capabilities: Some(abilities), ..hello(host, running) }
}

#[test]
fn a_finer_codec_stands_beside_the_chosen_one() {
    let mut world = World::new(settings(4), 7);
    let sessions = world.connect([0, 1].map(|host| coded(host, vec![])));
    let recipes = world.join_all(&sessions, &within(bound(0.05)));
    for coding in recipes.iter().map(|recipe| recipe.coding.as_ref().unwrap()) {
        assert_eq!(
            (coding.codec.as_str(), coding.fallback_codec.as_deref()),
            ("rotated 4", Some("int8 stochastic"))
        );
    }
}

#[test]
fn a_restart_finds_what_operations_lost() {
    let mut world = World::new(settings(4), 7);
    let sessions = world.connect([0, 1].map(|host| coded(host, vec![])));
    let recipes = world.join_all(&sessions, &within(bound(0.05)));
    let id = recipes[0].communicator;
    world.prepare(&sessions, id, 1);
    let tell = |world: &mut World, error: f64| {
        let coded = Some(v1::CompressedOperation { error, saved_bytes: 14 << 20, ..Default::default() });
        let told =
            v1::Operation { communicator: id, bytes: 16 << 20, compression: coded, ..Default::default() };
        world.state.take_coded(world.now, &v1::Operation { first_epoch: 1, last_epoch: 1, ..told });
        let learned = |output: &Output| matches!(output, Output::Fact(Fact::LossLearned { .. }));
        let outputs = world.state.take_outputs();
        outputs.iter().filter(|output| learned(output)).filter_map(outdated_plan).collect::<Vec<_>>()
    };
    // Something new is written, the same again is not, much more is.
    assert_eq!(tell(&mut world, 0.02), [CommunicatorId(id)]);
    assert!(tell(&mut world, 0.02).is_empty());
    assert_eq!(tell(&mut world, 0.2), [CommunicatorId(id)]);
    let mut stored = Stored::default();
    stored.apply(&world.state.plan_change(CommunicatorId(id)));
    let losses = stored.plans[&CommunicatorId(id)].losses.clone();
    assert_eq!((losses.len(), losses[0].codec.as_str()), (1, "rotated 4"));
    assert!(losses[0].loss > 1.0 && losses[0].bytes > 0.0, "{losses:?}");
    // Senseless ones are passed over.
    let known = stored.plans.get_mut(&CommunicatorId(id)).unwrap();
    known.losses.push(Loss { codec: "int9".to_owned(), loss: 1.0, bytes: 1.0 });
    known.losses.push(Loss { codec: "int8".to_owned(), loss: f64::NAN, bytes: 1.0 });
    let mut world = World::new(settings(4), 8);
    world.state.restore(stored, Nanos(0));
    world.connect(recipes.iter().enumerate().map(|(host, recipe)| coded(host, running(recipe))));
    let Change::Plan(plan) = world.state.plan_change(CommunicatorId(id)) else { panic!("it is not there") };
    assert_eq!(plan.losses, losses);
}

#[test]
fn a_restart_finds_budget_and_codec_again() {
    let mut world = World::new(settings(4), 7);
    let sessions = world.connect([0, 1].map(|host| coded(host, vec![])));
    let recipes = world.join_all(&sessions, &within(bound(0.05)));
    assert_eq!(recipes[0].coding.as_ref().unwrap().codec, "rotated 4");
    let mut world = World::new(settings(4), 8);
    let sessions: Vec<SessionId> =
        recipes.iter().enumerate().map(|(host, recipe)| world.hello(coded(host, running(recipe)))).collect();
    world.wait(SECOND * 30);
    for session in &sessions {
        let heard = world.received(*session);
        let calm = |message: &to_agent::Message| {
            matches!(message, to_agent::Message::Welcome(_) | to_agent::Message::Ready(_))
        };
        assert!(heard.iter().all(calm), "nothing is disturbed: {heard:?}");
    }
    // What one rank says again after the restart changes nothing; what both say anew does.
    let id = recipes[0].communicator;
    for (budget, heard) in [(bound(0.05), 0), (None, 1)] {
        for (rank, session) in sessions.iter().enumerate() {
            let said = v1::SetBudget { communicator: id, rank: rank as u32, budget: budget.clone() };
            world.send(*session, from_agent::Message::SetBudget(said));
        }
        for session in &sessions {
            assert_eq!(world.received(*session).len(), heard);
        }
    }
}

/// The first agent reports operations of the epoch in use. They sent `saved` of what exact ones would less, and lost `error`.
fn lost(fabric: &mut Fabric, id: u64, operations: u64, saved: f64, error: f64) {
    let epoch = fabric.epoch(id).epoch;
    let bytes = 16 << 20;
    let saved_bytes = (2.0 * 7.0 / 8.0 * f64::from(bytes) * saved) as u64;
    let coded = v1::CompressedOperation { error, saved_bytes, uncompressed_chunks: saved < 0.1 };
    let told = v1::Operation {
        communicator: id,
        bytes: bytes as u64,
        first_epoch: epoch,
        last_epoch: epoch,
        compression: Some(coded),
        ..v1::Operation::default()
    };
    for _ in 0..operations {
        fabric.state.take_coded(fabric.now, &told);
    }
}

#[test]
fn measured_loss_decides_over_assumed_loss() {
    let mut fabric = Fabric::traced(8, 1);
    // Heavy tails would lose too much by int8: it is tried, for normal tensors do not.
    let id = fabric.create_within("a", "world", &EVERYONE, bound(1e-3));
    fabric.run(SECOND * 3);
    assert_eq!(runs(&fabric, id).0, "int8", "{}", plan(&fabric, id).codec_reason);
    lost(&mut fabric, id, 20, 0.745, 6e-4);
    fabric.run(SECOND * 30);
    assert_eq!(runs(&fabric, id).0, "int8", "it keeps the budget");
    // Now nearly everything goes exact.
    lost(&mut fabric, id, 60, 0.01, 1e-5);
    fabric.run(SECOND * 10);
    assert_eq!(runs(&fabric, id).0, "bf16", "{}", plan(&fabric, id).codec_reason);
    let told = fabric.state.queries(Duration::ZERO).decisions().last().unwrap();
    assert_eq!(told.trigger.to_string(), "coded operations lose or send otherwise than was thought");
    fabric.run(SECOND * 500);
    assert_eq!(runs(&fabric, id).0, "bf16");
    // Operations of an epoch that is over, and of nobody, tell nothing of the codec in use.
    let (_, epoch) = runs(&fabric, id);
    let old =
        v1::Operation { communicator: id, bytes: 1 << 20, first_epoch: epoch - 1, ..Default::default() };
    let coded = Some(v1::CompressedOperation::default());
    fabric.state.take_coded(fabric.now, &v1::Operation { compression: coded, last_epoch: epoch, ..old });
    fabric.state.take_coded(
        fabric.now,
        &v1::Operation { communicator: 999, compression: coded, ..Default::default() },
    );
}

/// Agents tell of operations with so many zeros among 32 blocks of input and output.
fn zeros(fabric: &mut Fabric, id: u64, operations: u64, zeros: Option<u32>) {
    let ranks = vec![v1::RankTiming { zero_input: zeros, zero_output: zeros, ..Default::default() }];
    let told = v1::Operation { communicator: id, bytes: 16 << 20, ranks, ..v1::Operation::default() };
    (0..operations).for_each(|_| fabric.state.take_zeros(fabric.now, &told));
}

#[test]
fn sparse_tensors_go_without_zeros_dense_ones_whole() {
    let mut fabric = Fabric::traced(10, 1);
    let id = fabric.form("a", "world", &EVERYONE);
    fabric.run(SECOND * 3);
    let (_, epoch) = runs(&fabric, id);
    for few in [None, Some(0), Some(2)] {
        zeros(&mut fabric, id, 50, few);
        fabric.run(SECOND * 10);
        assert_eq!(runs(&fabric, id), ("exact", epoch), "{few:?}");
    }
    zeros(&mut fabric, id, 1, Some(30));
    fabric.run(SECOND * 10);
    assert_eq!(runs(&fabric, id), ("nonzero blocks", epoch + 1), "{}", plan(&fabric, id).codec_reason);
    let recipe = fabric.recipe_of(0, id);
    let coding = recipe.coding.unwrap();
    assert_eq!((coding.codec.as_str(), coding.max_vnmse, recipe.budget), ("nonzero blocks", None, None));
    // It goes on while it saves, and operations say so.
    lost(&mut fabric, id, 50, 0.9, 0.0);
    zeros(&mut fabric, id, 50, Some(0));
    fabric.run(SECOND * 30);
    assert_eq!(runs(&fabric, id).0, "nonzero blocks");
    // Then tensors are dense.
    lost(&mut fabric, id, 100, 0.0, 0.0);
    fabric.run(SECOND * 90);
    assert_eq!(runs(&fabric, id).0, "exact", "{}", plan(&fabric, id).codec_reason);
    // Where it is switched off, nobody does.
    fabric.state.settings_mut().compression = false;
    zeros(&mut fabric, id, 50, Some(32));
    fabric.run(SECOND * 90);
    assert_eq!(runs(&fabric, id).0, "exact");
}

#[test]
fn a_fast_fabric_sends_zeros_too() {
    let topology = two_by_two().replace("1Gbit/s", "200Gbit/s");
    let mut fabric = Fabric::of(settings_of(&topology), 5, 1, 0);
    fabric.run(SECOND * 3);
    let id = fabric.form("a", "world", &EVERYONE);
    fabric.run(SECOND * 3);
    zeros(&mut fabric, id, 50, Some(31));
    fabric.run(SECOND * 30);
    assert_eq!(runs(&fabric, id).0, "exact", "{}", plan(&fabric, id).codec_reason);
}

#[test]
fn small_operations_beside_large_ones_keep_nothing_exact() {
    let mut fabric = Fabric::traced(9, 1);
    let id = fabric.create_within("a", "world", &EVERYONE, bound(0.05));
    fabric.run(SECOND * 3);
    let session = fabric.session(id, 0);
    // Three sums of two numbers for each of a gradient.
    for operation in 0..40 {
        let bytes = if operation % 4 == 3 { 64 << 20 } else { 8 };
        let told = timed(id, operation, bytes, 0, (1 + operation * 1000, 500 + operation * 1000));
        fabric.state.take_operation(fabric.now, session, &told);
    }
    let (codec, reason) = fabric.state.best_codec(fabric.now, CommunicatorId(id));
    assert_eq!(codec.name(), "rotated 4", "{reason}");
    assert!(matches!(reason, CodecReason::Fastest(bytes, ..) if bytes.0 == 64 << 20), "{reason}");
}
