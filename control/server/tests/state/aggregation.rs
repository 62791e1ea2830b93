//! Aggregators come and go: whom they are granted, what workers are told, and that nothing that runs is disturbed.

use super::topology;
use super::world::{SECOND, World, hello, join_of, running, settings_of};
use harmonaize_abi::{CommunicatorId, GrantId};
use harmonaize_aggregator::worker_key;
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, RefusedKind, from_agent};
use harmonaize_planner::{AggregationReason, Drawback};
use harmonaize_server::state::{SessionId, Settings, Terms};
use std::collections::BTreeSet;
use std::time::Duration;

/// So many hosts and an aggregator on one switch.
pub(super) fn settings(hosts: usize) -> Settings {
    let text = topology::star(hosts, "50us") + &topology::aggregator(0, "s0");
    Settings { source_ports: None, ..settings_of(&text) }
}

pub(super) fn aggregator(granted: &[u64]) -> v1::Hello {
    let aggregator = v1::Aggregator {
        incarnation: 7,
        units: 4096,
        unit_bytes: 1392,
        packets_per_second: 0,
        granted: granted.to_vec(),
        datagrams: None,
    };
    v1::Hello {
        protocol_version: PROTOCOL_VERSION,
        host: "agg0".to_owned(),
        listen: "10.0.0.99:7400".to_owned(),
        aggregator: Some(aggregator),
        ..v1::Hello::default()
    }
}

pub(super) fn able(host: usize, running: Vec<v1::Recipe>) -> v1::Hello {
    let abilities = v1::Capabilities { aggregation: true, ..v1::Capabilities::default() };
    v1::Hello { capabilities: Some(abilities), ..hello(host, running) }
}

pub(super) fn grants(world: &mut World, session: SessionId) -> Vec<v1::GrantAggregation> {
    every!(world.received(session), GrantAggregation)
}

pub(super) fn revoked(world: &mut World, session: SessionId) -> Vec<u64> {
    let revoked = every!(world.received(session), RevokeAggregation);
    revoked.into_iter().map(|revoked| revoked.communicator).collect()
}

pub(super) fn answer(world: &mut World, session: SessionId, communicator: u64, refused: &str) {
    let refused = refused.to_owned();
    let answer = v1::AggregationGranted { communicator, refused };
    world.send(session, from_agent::Message::AggregationGranted(answer));
}

/// All prepare the epoch that they were told of, and use it; their recipes.
pub(super) fn change_over(world: &mut World, sessions: &[SessionId], id: u64, epoch: u64) -> Vec<v1::Recipe> {
    let recipes = world.recipes(sessions);
    assert!(recipes.iter().all(|recipe| recipe.epoch == epoch), "{recipes:?}");
    world.prepare(sessions, id, epoch);
    for session in sessions {
        let switched = v1::Switched { communicator: id, epoch, first_segment: 0 };
        world.send(*session, from_agent::Message::Switched(switched));
    }
    recipes
}

pub(super) fn plan(world: &World, id: u64) -> v1::PlanStatus {
    world.state.queries(Duration::ZERO).plans(CommunicatorId(id)).unwrap().plans.remove(0)
}

#[test]
fn each_worker_has_its_own_key() {
    let mut world = World::new(settings(4), 1);
    let agg = world.hello(aggregator(&[]));
    only!(world.received(agg), Welcome);
    let sessions = world.connect((0..4).map(|host| able(host, vec![])));
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    let [grant] = grants(&mut world, agg).try_into().unwrap();
    assert_eq!((grant.workers, grant.tenant.as_str(), grant.weight), (4, "a", 1));
    assert!(
        grant.guaranteed_units >= 2 && grant.guaranteed_units <= grant.max_units && grant.max_units <= 4096,
        "{grant:?}"
    );
    assert_eq!(grant.chunk_elements, 348);
    let secret: [u8; 32] = grant.secret.clone().try_into().unwrap();
    let mut keys = BTreeSet::new();
    for (index, recipe) in recipes.iter().enumerate() {
        let told = recipe.aggregation.clone().unwrap();
        assert_eq!((told.address.as_str(), told.communicator), ("10.0.0.99:7400", grant.communicator));
        assert_eq!((told.worker, told.workers), (index as u32, 4));
        assert_eq!(told.key, worker_key(&secret, GrantId(grant.communicator), index as u16));
        assert!(
            told.min_bytes >= 1024 && told.window >= 16 && 8 * told.window <= grant.max_units,
            "{told:?}"
        );
        keys.insert(told.key);
    }
    assert_eq!(keys.len(), 4);
    let id = recipes[0].communicator;
    world.prepare(&sessions, id, 1);
    let shown = plan(&world, id);
    assert_eq!(shown.aggregator, "agg0");
    assert!(shown.aggregation_reason.contains("by agg0 at s0"), "{shown:?}");
    let fabric = world.state.queries(world.now).topology().aggregators;
    assert_eq!((fabric[0].connected, fabric[0].communicators, fabric[0].units), (true, 1, 4096));
    assert_eq!((fabric[0].switch.as_str(), fabric[0].guaranteed_units), ("s0", grant.guaranteed_units));
    assert!(world.dissolve(id));
    assert_eq!(revoked(&mut world, agg), [] as [u64; 0], "segments may be under way");
    world.wait(SECOND * 5);
    assert_eq!(revoked(&mut world, agg), [grant.communicator]);
}

#[test]
fn later_communicators_have_as_large_a_window() {
    let mut settings = settings(4);
    settings.terms.insert("b".to_owned(), Terms::default());
    let mut world = World::new(settings, 3);
    world.hello(aggregator(&[]));
    let sessions = world.connect((0..4).map(|host| able(host, vec![])));
    let windows: Vec<u32> = ["a", "b"]
        .map(|tenant| {
            let recipes = world.join_all(&sessions, &join_of(tenant, "world", 0, 0));
            let told = recipes[0].aggregation.clone();
            told.unwrap_or_else(|| panic!("{tenant} has no aggregator")).window
        })
        .to_vec();
    assert!(windows[0] > 16 && windows[0] == windows[1], "{windows:?}");
}

#[test]
fn packets_go_over_rdma_where_all_ends_can() {
    let port = v1::DatagramPort { gid: vec![1; 16], number: 17, key: 5, bytes: 1024 };
    let all = [Some(4096), Some(1024), Some(768), Some(2048)];
    let none = [Some(4096), None, Some(768), Some(2048)];
    let bad = v1::DatagramPort { gid: vec![1; 15], ..port.clone() };
    for (told, hosts, elements) in [
        (Some(port.clone()), all, Some((768 - 80) / 4)),
        (Some(port.clone()), [Some(4096); 4], Some((1024 - 80) / 4)),
        (Some(port), none, None),
        (Some(bad), all, None),
        (None, all, None),
    ] {
        let mut world = World::new(settings(4), 3);
        let mut said = aggregator(&[]);
        said.aggregator.as_mut().unwrap().datagrams = told.clone();
        world.hello(said);
        let sessions = world.connect((0..4).zip(hosts).map(|(host, bytes)| {
            let mut said = able(host, vec![]);
            said.capabilities.as_mut().unwrap().datagram_bytes = bytes.unwrap_or(0);
            said
        }));
        let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
        let aggregation = recipes[0].aggregation.clone().unwrap();
        assert_eq!(aggregation.chunk_elements, elements.unwrap_or(348), "{told:?}");
        assert_eq!(aggregation.datagrams, told.filter(|_| elements.is_some()));
    }
}

#[test]
fn hosts_sum_without_an_aggregator_and_learn_why() {
    type Case = (AggregationReason, fn(&mut Settings), bool, bool);
    let cases: [Case; 3] = [
        (
            AggregationReason::NotAllowed,
            |settings| {
                settings.terms.insert("a".to_owned(), Terms { allowed: false, ..Terms::default() });
            },
            true,
            true,
        ),
        (AggregationReason::NoOffer, |_| {}, false, true),
        (AggregationReason::NotAllAgents, |_| {}, true, false),
    ];
    for (why, change, there, can) in cases {
        let mut settings = settings(4);
        change(&mut settings);
        let mut world = World::new(settings, 2);
        let agg = there.then(|| world.hello(aggregator(&[])));
        let mut sessions = world.connect((0..4).map(|host| able(host, vec![])));
        if !can {
            world.gone(sessions[3]);
            sessions[3] = world.agent(3);
        }
        let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
        assert!(recipes.iter().all(|recipe| recipe.aggregation.is_none()), "{why}");
        assert!(agg.is_none_or(|agg| grants(&mut world, agg).is_empty()), "{why}");
        let id = recipes[0].communicator;
        world.prepare(&sessions, id, 1);
        assert_eq!(world.epoch(id).aggregation_reason, why);
    }
    let bare = settings_of("[[host]]\nname = \"h0\"\n");
    let mut world = World::new(bare, 2);
    let session = world.hello(able(0, vec![]));
    world.received(session);
    let id = world.form(&[session], "world");
    assert_eq!(world.epoch(id).aggregation_reason, AggregationReason::Undecided);
}

#[test]
fn aggregators_come_and_go_without_disturbance() {
    let mut world = World::new(settings(4), 3);
    let sessions = world.connect((0..4).map(|host| able(host, vec![])));
    let id = world.form(&sessions, "world");
    world.wait(SECOND);
    world.ignore(&sessions);
    let agg = world.hello(aggregator(&[]));
    world.wait(SECOND);
    let [grant] = grants(&mut world, agg).try_into().unwrap();
    let recipes = change_over(&mut world, &sessions, id, 2);
    assert!(recipes.iter().all(|recipe| {
        recipe.aggregation.as_ref().is_some_and(|told| told.communicator == grant.communicator)
    }));
    assert!(recipes.iter().all(|recipe| recipe.peers.iter().all(|peer| peer.reused)), "links go on");
    answer(&mut world, agg, grant.communicator, "");
    assert_eq!(plan(&world, id).aggregator, "agg0");
    world.gone(agg);
    world.wait(SECOND * 60);
    assert!(world.is_quiet(&sessions), "nothing that runs is disturbed");
    let back = world.hello(aggregator(&[grant.communicator]));
    world.wait(SECOND);
    assert_eq!(grants(&mut world, back), [], "it serves on");
    world.gone(back);
    let anew = world.hello(aggregator(&[]));
    assert_eq!(grants(&mut world, anew), [grant], "a new start is told again");
    assert!(world.is_quiet(&sessions));
}

#[test]
fn a_refused_grant_is_requested_again_later() {
    let mut world = World::new(settings(4), 4);
    let agg = world.hello(aggregator(&[]));
    let sessions = world.connect((0..4).map(|host| able(host, vec![])));
    let id = world.form(&sessions, "world");
    let [grant] = grants(&mut world, agg).try_into().unwrap();
    answer(&mut world, agg, grant.communicator, "the pool is promised to others");
    let shown = plan(&world, id);
    assert_eq!(shown.aggregator, "");
    assert_eq!(shown.aggregation_reason, "agg0 refused: the pool is promised to others");
    // Each pause is twice as long as the one before.
    let mut epoch = 2;
    for pause in [10, 20, 40] {
        world.wait(SECOND);
        let recipes = change_over(&mut world, &sessions, id, epoch);
        assert!(recipes.iter().all(|recipe| recipe.aggregation.is_none()), "they wait for none");
        assert!(matches!(world.epoch(id).aggregation_reason, AggregationReason::Refused(_)));
        world.wait(SECOND * (pause - 2));
        assert_eq!(grants(&mut world, agg), [], "it is not asked yet");
        assert!(world.is_quiet(&sessions));
        world.wait(SECOND);
        let [grant] = grants(&mut world, agg).try_into().unwrap();
        let recipes = change_over(&mut world, &sessions, id, epoch + 1);
        let told = |recipe: &v1::Recipe| recipe.aggregation.as_ref().map(|told| told.communicator);
        assert!(recipes.iter().all(|recipe| told(recipe) == Some(grant.communicator)));
        assert_eq!(plan(&world, id).aggregator, "agg0");
        answer(&mut world, agg, grant.communicator, "the pool is promised to others");
        epoch += 2;
    }
    world.wait(SECOND);
    change_over(&mut world, &sessions, id, epoch);
    world.gone(agg);
    let agg = world.hello(aggregator(&[]));
    world.wait(SECOND);
    assert_eq!(grants(&mut world, agg).len(), 1, "another start has another pool");
}

#[test]
fn an_aggregator_that_moved_brings_another_epoch() {
    let over_rdma = |number| {
        let mut hello = aggregator(&[]);
        let port = v1::DatagramPort { gid: vec![1; 16], number, key: 5, bytes: 4096 };
        hello.aggregator.as_mut().unwrap().datagrams = Some(port);
        hello
    };
    let elsewhere = v1::Hello { listen: "10.0.0.99:7500".to_owned(), ..aggregator(&[]) };
    let cases =
        [(aggregator(&[]), elsewhere), (over_rdma(17), over_rdma(18)), (over_rdma(17), aggregator(&[]))];
    for (first, then) in cases {
        let mut world = World::new(settings(4), 8);
        let agg = world.hello(first);
        let sessions = world.connect((0..4).map(|host| {
            let mut said = able(host, vec![]);
            said.capabilities.as_mut().unwrap().datagram_bytes = 4096;
            said
        }));
        let id = world.form(&sessions, "world");
        let [before] = grants(&mut world, agg).try_into().unwrap();
        world.gone(agg);
        let agg = world.hello(then.clone());
        world.wait(SECOND);
        let [grant] = grants(&mut world, agg).try_into().unwrap();
        assert_ne!(grant.communicator, before.communicator);
        for recipe in change_over(&mut world, &sessions, id, 2) {
            let told = recipe.aggregation.unwrap();
            assert_eq!((told.communicator, &told.address), (grant.communicator, &then.listen));
            assert_eq!(told.datagrams, then.aggregator.as_ref().unwrap().datagrams);
        }
        answer(&mut world, agg, grant.communicator, "");
        world.wait(SECOND * 60);
        assert_eq!(plan(&world, id).aggregator, "agg0");
        assert!(world.is_quiet(&sessions), "once");
    }
}

#[test]
fn aggregator_and_control_restart_brings_another_epoch() {
    // Whether it still serves what it did when it first says so to the new control.
    for named in [true, false] {
        let mut world = World::new(settings(4), 5);
        let agg = world.hello(aggregator(&[]));
        let sessions = world.connect((0..4).map(|host| able(host, vec![])));
        let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
        let [before] = grants(&mut world, agg).try_into().unwrap();
        let mut world = World::new(settings(4), 6);
        let mut agg =
            world.hello(aggregator(if named { std::slice::from_ref(&before.communicator) } else { &[] }));
        let sessions = world.connect((0..).zip(&recipes).map(|(host, recipe)| able(host, running(recipe))));
        world.wait(SECOND);
        assert!(world.is_quiet(&sessions));
        if named {
            world.gone(agg);
            agg = world.hello(aggregator(&[]));
        } else {
            // It might have come later.
            world.wait(SECOND * 30);
        }
        world.wait(SECOND);
        let [grant] = grants(&mut world, agg).try_into().unwrap();
        assert_ne!(grant.communicator, before.communicator);
        let id = recipes[0].communicator;
        for recipe in change_over(&mut world, &sessions, id, 3) {
            assert_eq!(recipe.aggregation.unwrap().communicator, grant.communicator, "named: {named}");
        }
    }
}

#[test]
fn a_restart_restores_grants_and_revokes_unknown_ones() {
    let mut world = World::new(settings(4), 5);
    let agg = world.hello(aggregator(&[]));
    let sessions = world.connect((0..4).map(|host| able(host, vec![])));
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    let [grant] = grants(&mut world, agg).try_into().unwrap();
    let mut world = World::new(settings(4), 6);
    let agg = world.hello(aggregator(&[grant.communicator, 99]));
    let sessions = world.connect((0..).zip(&recipes).map(|(host, recipe)| able(host, running(recipe))));
    world.wait(SECOND);
    let id = recipes[0].communicator;
    assert_eq!(plan(&world, id).aggregator, "agg0");
    assert_eq!(revoked(&mut world, agg), [] as [u64; 0]);
    let guaranteed =
        |world: &World| world.state.queries(world.now).topology().aggregators[0].guaranteed_units;
    assert_eq!(guaranteed(&world), 2 * grant.guaranteed_units, "as much as it was granted");
    world.wait(SECOND * 30);
    assert_eq!(revoked(&mut world, agg), [99]);
    assert_eq!(guaranteed(&world), grant.guaranteed_units);
    for session in &sessions {
        assert_eq!(every!(world.received(*session), Change), [], "what runs goes on");
    }
}

#[test]
fn senseless_hellos_and_foreign_messages_are_refused() {
    let mut world = World::new(settings(4), 7);
    let good = || aggregator(&[]);
    let broken = |change: fn(&mut v1::Aggregator)| {
        let mut hello = good();
        change(hello.aggregator.as_mut().unwrap());
        hello
    };
    let cases = [
        (v1::Hello { host: "h0".to_owned(), ..good() }, RefusedKind::UnknownHost),
        (v1::Hello { listen: "0.0.0.0:1".to_owned(), ..good() }, RefusedKind::Protocol),
        (broken(|told| told.incarnation = 0), RefusedKind::Protocol),
        (broken(|told| told.units = 0), RefusedKind::Protocol),
        (broken(|told| told.unit_bytes = 1 << 20), RefusedKind::Protocol),
        (v1::Hello { host: "agg0".to_owned(), ..hello(0, vec![]) }, RefusedKind::UnknownHost),
    ];
    for (hello, kind) in cases {
        let session = world.hello(hello.clone());
        assert_eq!(only!(world.received(session), Refused).kind(), kind, "{hello:?}");
    }
    let agg = world.hello(good());
    world.received(agg);
    let second = world.hello(good());
    assert_eq!(only!(world.received(second), Refused).kind(), RefusedKind::HostInUse);
    answer(&mut world, agg, 1234, "");
    assert!(world.received(agg).is_empty(), "of a grant that has ended meanwhile");
    world.join(agg, "world", 0, 1);
    assert!(world.ended.contains(&agg), "an aggregator joins nothing");
    let agent = world.agent(0);
    answer(&mut world, agent, 1, "");
    assert!(world.ended.contains(&agent));
}

/// A join with a budget.
fn within(lets: v1::budget::Kind) -> v1::Join {
    v1::Join { budget: Some(v1::Budget { kind: Some(lets) }), ..join_of("a", "world", 0, 0) }
}

#[test]
fn codes_are_summed_where_the_budget_lets_them() {
    use v1::budget::Kind;
    let named = |name: &str| Kind::Codecs(v1::CodecNames { names: vec![name.to_owned()] });
    // The budget; whether hosts have codes of their own. What comes of it.
    let cases = [
        (Kind::Vnmse(0.05), false, Some(0.05)),
        (named("shared 4"), true, Some(0.0)),
        (Kind::Vnmse(0.02), false, None),
        (named("int8"), false, None),
    ];
    for (budget, own, most) in cases {
        let mut world = World::new(settings(4), 5);
        let agg = world.hello(aggregator(&[]));
        let sessions = world.connect((0..4).map(|host| {
            let mut hello = able(host, vec![]);
            if own {
                hello.capabilities.as_mut().unwrap().codecs =
                    vec![v1::CodecSpeed { codec: "rotated 4".to_owned(), ..Default::default() }];
            }
            hello
        }));
        let recipes = world.join_all(&sessions, &within(budget.clone()));
        let [grant] = grants(&mut world, agg).try_into().unwrap();
        for recipe in &recipes {
            let told = recipe.aggregation.clone().unwrap();
            assert_eq!((&told.form, told.chunk_elements), (&grant.form, grant.chunk_elements), "{budget:?}");
            let shared = match told.form.unwrap().form.unwrap() {
                v1::aggregation_form::Form::Shared(shared) => Some((shared.bits, shared.block, shared.ranks)),
                v1::aggregation_form::Form::Tensor(_) => None,
            };
            assert_eq!(shared.is_some(), most.is_some(), "{budget:?}");
            assert_eq!(told.max_error, most.unwrap_or(0.0), "{budget:?}");
            assert!(shared.is_none_or(|shared| shared == (4, 256, 4) && told.chunk_elements == 7 * 256));
            assert!(recipe.coding.is_none(), "hosts do exactly what the aggregator does not");
        }
        let id = recipes[0].communicator;
        world.prepare(&sessions, id, 1);
        let why = world.epoch(id).aggregation_reason;
        let AggregationReason::Faster(times, _) = &why else { panic!("{why}") };
        assert_eq!(times.coded, most.is_some(), "{why}");
    }
}

/// Four bits by the hosts' own codes take as long: then nobody else is needed.
#[test]
fn an_aggregator_of_codes_must_beat_the_hosts() {
    let mut world = World::new(settings(4), 5);
    let agg = world.hello(aggregator(&[]));
    let sessions = world.connect((0..4).map(|host| {
        let mut hello = able(host, vec![]);
        let abilities = hello.capabilities.as_mut().unwrap();
        abilities.codecs = vec![v1::CodecSpeed { codec: "rotated 4".to_owned(), ..Default::default() }];
        hello
    }));
    let recipes = world.join_all(&sessions, &within(v1::budget::Kind::Vnmse(0.05)));
    assert!(recipes.iter().all(|recipe| recipe.aggregation.is_none() && recipe.coding.is_some()));
    assert!(grants(&mut world, agg).is_empty());
    let id = recipes[0].communicator;
    world.prepare(&sessions, id, 1);
    let why = world.epoch(id).aggregation_reason;
    let AggregationReason::NoneFaster(drawbacks) = &why else { panic!("{why}") };
    let coded = |one: &Drawback| matches!(one, Drawback::Slower(times) if times.coded);
    assert!(drawbacks.iter().any(coded), "{why}");
}
