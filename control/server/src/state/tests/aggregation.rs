//! Aggregators come and go: whom they are granted, what workers are told, and that nothing that runs is disturbed.

use super::world::{SECOND, World, hello, settings_of};
use crate::state::{SessionId, Settings, Terms};
use harmonaize_aggregator::worker_key;
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, RefusedKind, from_agent, to_agent};
use std::collections::BTreeSet;

pub(super) fn settings() -> Settings {
    let mut text = "[[switch]]\nname = \"s0\"\n".to_owned();
    for host in 0..4 {
        text += &format!(
            "[[host]]\nname = \"h{host}\"\n[[link]]\nfrom = \"h{host}\"\nto = \"s0\"\nrate = \"1Gbit/s\"\ndelay = \"50us\"\n"
        );
    }
    text += "[[aggregator]]\nname = \"agg0\"\nswitch = \"s0\"\nrate = \"4Gbit/s\"\n";
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
    v1::Hello { abilities: Some(abilities), ..hello(host, running) }
}

fn agents(world: &mut World) -> Vec<SessionId> {
    let sessions: Vec<SessionId> = (0..4).map(|host| world.hello(able(host, vec![]))).collect();
    sessions.iter().for_each(|session| drop(world.received(*session)));
    sessions
}

pub(super) fn grants(world: &mut World, session: SessionId) -> Vec<v1::GrantAggregation> {
    let heard = world.received(session).into_iter();
    let grants = heard.filter_map(|message| match message {
        to_agent::Message::GrantAggregation(grant) => Some(grant),
        _ => None,
    });
    grants.collect()
}

pub(super) fn revoked(world: &mut World, session: SessionId) -> Vec<u64> {
    let heard = world.received(session).into_iter();
    let revoked = heard.filter_map(|message| match message {
        to_agent::Message::RevokeAggregation(revoked) => Some(revoked.communicator),
        _ => None,
    });
    revoked.collect()
}

pub(super) fn answer(world: &mut World, session: SessionId, communicator: u64, refused: &str) {
    let refused = refused.to_owned();
    let answer = v1::AggregationGranted { communicator, refused };
    world.send(session, from_agent::Message::AggregationGranted(answer));
}

/// All prepare the epoch that they were told of, and use it; their recipes.
pub(super) fn change_over(world: &mut World, sessions: &[SessionId], id: u64, epoch: u64) -> Vec<v1::Recipe> {
    let recipes: Vec<v1::Recipe> = sessions.iter().map(|session| world.recipe(*session)).collect();
    assert!(recipes.iter().all(|recipe| recipe.epoch == epoch), "{recipes:?}");
    world.prepare(sessions, id, epoch);
    for session in sessions {
        let switched = v1::Switched { communicator: id, epoch, first_segment: 0 };
        world.send(*session, from_agent::Message::Switched(switched));
    }
    recipes
}

/// What an agent that has this recipe says after control has restarted.
pub(super) fn running(recipe: &v1::Recipe) -> Vec<v1::Recipe> {
    let aggregation = recipe.aggregation.clone().map(|told| v1::Aggregation { key: vec![], ..told });
    vec![v1::Recipe { peers: vec![], aggregation, ..recipe.clone() }]
}

pub(super) fn plan(world: &World, id: u64) -> v1::PlanStatus {
    world.state.plans_reply(id).unwrap().plans.remove(0)
}

pub(super) fn join_all(world: &mut World, sessions: &[SessionId], tenant: &str) -> Vec<v1::Recipe> {
    for (rank, session) in sessions.iter().enumerate() {
        world.join_as(*session, tenant, "world", rank as u32, sessions.len() as u32);
    }
    sessions.iter().map(|session| world.recipe(*session)).collect()
}

#[test]
fn a_communicator_gets_an_aggregator_and_each_worker_its_own_key() {
    let mut world = World::new(settings(), 1);
    let agg = world.hello(aggregator(&[]));
    assert!(matches!(world.received(agg).as_slice(), [to_agent::Message::Welcome(_)]));
    let sessions = agents(&mut world);
    let recipes = join_all(&mut world, &sessions, "a");
    let [grant] = grants(&mut world, agg).try_into().unwrap();
    assert_eq!((grant.workers, grant.tenant.as_str(), grant.weight), (4, "a", 1));
    assert!(grant.guaranteed >= 2 && grant.guaranteed <= grant.most && grant.most <= 4096, "{grant:?}");
    assert_eq!(grant.chunk_elements, 348);
    let secret: [u8; 32] = grant.secret.clone().try_into().unwrap();
    let mut keys = BTreeSet::new();
    for (index, recipe) in recipes.iter().enumerate() {
        let told = recipe.aggregation.clone().unwrap();
        assert_eq!((told.address.as_str(), told.communicator), ("10.0.0.99:7400", grant.communicator));
        assert_eq!((told.worker, told.workers), (index as u32, 4));
        assert_eq!(told.key, worker_key(&secret, grant.communicator, index as u16));
        assert!(told.least_bytes >= 1024 && told.window >= 16 && 8 * told.window <= grant.most, "{told:?}");
        keys.insert(told.key);
    }
    assert_eq!(keys.len(), 4);
    let id = recipes[0].communicator;
    world.prepare(&sessions, id, 1);
    let shown = plan(&world, id);
    assert_eq!(shown.aggregator, "agg0");
    assert!(shown.aggregation_reason.contains("by agg0 at s0"), "{shown:?}");
    let fabric = world.state.topology_reply(world.now).aggregators;
    assert_eq!((fabric[0].connected, fabric[0].communicators, fabric[0].units), (true, 1, 4096));
    assert_eq!((fabric[0].at.as_str(), fabric[0].guaranteed), ("s0", grant.guaranteed));
    assert!(world.state.dissolve(world.now, id, "over"));
    world.run_until_quiet();
    assert_eq!(revoked(&mut world, agg), [] as [u64; 0], "segments may be under way");
    world.wait(SECOND * 5);
    assert_eq!(revoked(&mut world, agg), [grant.communicator]);
}

#[test]
fn who_comes_later_has_as_large_a_window_as_who_came_first() {
    let mut settings = settings();
    settings.terms.insert("b".to_owned(), Terms::default());
    let mut world = World::new(settings, 3);
    world.hello(aggregator(&[]));
    let sessions = agents(&mut world);
    let windows: Vec<u32> = ["a", "b"]
        .map(|tenant| {
            let recipes = join_all(&mut world, &sessions, tenant);
            let told = recipes[0].aggregation.clone();
            told.unwrap_or_else(|| panic!("{tenant} has no aggregator")).window
        })
        .to_vec();
    assert!(windows[0] > 16 && windows[0] == windows[1], "{windows:?}");
}

#[test]
fn packets_go_over_rdma_where_all_ends_have_a_device_and_chunks_fit_the_least_of_them() {
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
        let mut world = World::new(settings(), 3);
        let mut said = aggregator(&[]);
        said.aggregator.as_mut().unwrap().datagrams = told.clone();
        world.hello(said);
        let sessions: Vec<SessionId> = (0..4)
            .zip(hosts)
            .map(|(host, bytes)| {
                let mut said = able(host, vec![]);
                said.abilities.as_mut().unwrap().datagram_bytes = bytes.unwrap_or(0);
                world.hello(said)
            })
            .collect();
        sessions.iter().for_each(|session| drop(world.received(*session)));
        let recipes = join_all(&mut world, &sessions, "a");
        let aggregation = recipes[0].aggregation.clone().unwrap();
        assert_eq!(aggregation.chunk_elements, elements.unwrap_or(348), "{told:?}");
        assert_eq!(aggregation.datagrams, told.filter(|_| elements.is_some()));
    }
}

#[test]
fn who_has_none_goes_by_the_hosts_and_is_told_why() {
    type Case = (&'static str, fn(&mut Settings), bool, bool);
    let cases: [Case; 3] = [
        (
            "the tenant has none",
            |settings| {
                settings.terms.insert("a".to_owned(), Terms { allowed: false, weight: 1 });
            },
            true,
            true,
        ),
        ("no aggregator is there", |_| {}, false, true),
        ("not all agents can", |_| {}, true, false),
    ];
    for (why, change, there, can) in cases {
        let mut settings = settings();
        change(&mut settings);
        let mut world = World::new(settings, 2);
        let agg = there.then(|| world.hello(aggregator(&[])));
        let mut sessions = agents(&mut world);
        if !can {
            world.gone(sessions[3]);
            sessions[3] = world.agent(3);
        }
        let recipes = join_all(&mut world, &sessions, "a");
        assert!(recipes.iter().all(|recipe| recipe.aggregation.is_none()), "{why}");
        assert!(agg.is_none_or(|agg| grants(&mut world, agg).is_empty()), "{why}");
        let id = recipes[0].communicator;
        world.prepare(&sessions, id, 1);
        assert_eq!(plan(&world, id).aggregation_reason, why);
    }
    let bare = settings_of("[[host]]\nname = \"h0\"\n");
    let mut world = World::new(bare, 2);
    let session = world.hello(able(0, vec![]));
    world.received(session);
    let id = world.form(&[session], "world");
    assert_eq!(plan(&world, id).aggregation_reason, "", "nothing is said where there is none at all");
}

#[test]
fn an_aggregator_that_comes_later_is_used_by_who_runs_already_and_one_that_goes_disturbs_nobody() {
    let mut world = World::new(settings(), 3);
    let sessions = agents(&mut world);
    let id = world.form(&sessions, "world");
    world.wait(SECOND);
    sessions.iter().for_each(|session| drop(world.received(*session)));
    let agg = world.hello(aggregator(&[]));
    world.wait(SECOND);
    let [grant] = grants(&mut world, agg).try_into().unwrap();
    let recipes = change_over(&mut world, &sessions, id, 2);
    assert!(recipes.iter().all(|recipe| {
        recipe.aggregation.as_ref().is_some_and(|told| told.communicator == grant.communicator)
    }));
    assert!(recipes.iter().all(|recipe| recipe.peers.iter().all(|peer| peer.carried)), "links go on");
    answer(&mut world, agg, grant.communicator, "");
    assert_eq!(plan(&world, id).aggregator, "agg0");
    world.gone(agg);
    world.wait(SECOND * 60);
    assert!(
        sessions.iter().all(|session| world.received(*session).is_empty()),
        "nothing that runs is disturbed"
    );
    let back = world.hello(aggregator(&[grant.communicator]));
    world.wait(SECOND);
    assert_eq!(grants(&mut world, back), [], "it serves on");
    world.gone(back);
    let anew = world.hello(aggregator(&[]));
    assert_eq!(grants(&mut world, anew), [grant], "a new start is told again");
    assert!(sessions.iter().all(|session| world.received(*session).is_empty()));
}

#[test]
fn a_refused_grant_is_asked_for_again_later_and_agents_do_without_meanwhile() {
    let mut world = World::new(settings(), 4);
    let agg = world.hello(aggregator(&[]));
    let sessions = agents(&mut world);
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
        assert_eq!(plan(&world, id).aggregation_reason, "agg0 refused: the pool is promised to others");
        world.wait(SECOND * (pause - 2));
        assert_eq!(grants(&mut world, agg), [], "it is not asked yet");
        assert!(sessions.iter().all(|session| world.received(*session).is_empty()));
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
fn an_aggregator_that_starts_again_elsewhere_is_told_to_agents_by_another_epoch() {
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
        let mut world = World::new(settings(), 8);
        let agg = world.hello(first);
        let sessions: Vec<SessionId> = (0..4)
            .map(|host| {
                let mut said = able(host, vec![]);
                said.abilities.as_mut().unwrap().datagram_bytes = 4096;
                world.hello(said)
            })
            .collect();
        sessions.iter().for_each(|session| drop(world.received(*session)));
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
        assert!(sessions.iter().all(|session| world.received(*session).is_empty()), "once");
    }
}

#[test]
fn an_aggregator_that_starts_again_after_control_has_restarted_is_granted_another_epoch() {
    // Whether it still serves what it did when it first says so to the new control.
    for named in [true, false] {
        let mut world = World::new(settings(), 5);
        let agg = world.hello(aggregator(&[]));
        let sessions = agents(&mut world);
        let recipes = join_all(&mut world, &sessions, "a");
        let [before] = grants(&mut world, agg).try_into().unwrap();
        let mut world = World::new(settings(), 6);
        let mut agg =
            world.hello(aggregator(if named { std::slice::from_ref(&before.communicator) } else { &[] }));
        let sessions: Vec<SessionId> =
            (0..).zip(&recipes).map(|(host, recipe)| world.hello(able(host, running(recipe)))).collect();
        sessions.iter().for_each(|session| drop(world.received(*session)));
        world.wait(SECOND);
        assert!(sessions.iter().all(|session| world.received(*session).is_empty()));
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
fn a_restart_of_control_finds_grants_again_and_withdraws_what_nobody_names() {
    let mut world = World::new(settings(), 5);
    let agg = world.hello(aggregator(&[]));
    let sessions = agents(&mut world);
    let recipes = join_all(&mut world, &sessions, "a");
    let [grant] = grants(&mut world, agg).try_into().unwrap();
    let mut world = World::new(settings(), 6);
    let agg = world.hello(aggregator(&[grant.communicator, 99]));
    let sessions: Vec<SessionId> =
        recipes.iter().enumerate().map(|(host, recipe)| world.hello(able(host, running(recipe)))).collect();
    world.wait(SECOND);
    let id = recipes[0].communicator;
    assert_eq!(plan(&world, id).aggregator, "agg0");
    assert_eq!(revoked(&mut world, agg), [] as [u64; 0]);
    let guaranteed = |world: &World| world.state.topology_reply(world.now).aggregators[0].guaranteed;
    assert_eq!(guaranteed(&world), 2 * grant.guaranteed, "as much as it was granted");
    world.wait(SECOND * 30);
    assert_eq!(revoked(&mut world, agg), [99]);
    assert_eq!(guaranteed(&world), grant.guaranteed);
    for session in &sessions {
        let changes = world.received(*session).into_iter();
        let changes = changes.filter(|message| matches!(message, to_agent::Message::Change(_)));
        assert_eq!(changes.count(), 0, "what runs goes on");
    }
}

#[test]
fn hellos_without_sense_and_words_of_others_are_refused() {
    let mut world = World::new(settings(), 7);
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
        let heard = world.received(session);
        assert!(
            matches!(heard.as_slice(), [to_agent::Message::Refused(refused)] if refused.kind() == kind),
            "{hello:?}: {heard:?}"
        );
    }
    let agg = world.hello(good());
    world.received(agg);
    let second = world.hello(good());
    let heard = world.received(second);
    assert!(
        matches!(heard.as_slice(), [to_agent::Message::Refused(refused)] if refused.kind() == RefusedKind::HostInUse)
    );
    answer(&mut world, agg, 1234, "");
    assert!(world.received(agg).is_empty(), "of a grant that has ended meanwhile");
    world.join(agg, "world", 0, 1);
    assert!(world.ended.contains(&agg), "an aggregator joins nothing");
    let agent = world.agent(0);
    answer(&mut world, agent, 1, "");
    assert!(world.ended.contains(&agent));
}

/// The four join within a budget; their recipes.
fn join_within(world: &mut World, sessions: &[SessionId], budget: v1::budget::Kind) -> Vec<v1::Recipe> {
    let budget = Some(v1::Budget { lets: Some(budget) });
    for (rank, session) in sessions.iter().enumerate() {
        let (tenant, communicator) = ("a".to_owned(), "world".to_owned());
        let (request, rank, budget) = (rank as u64 + 1, rank as u32, budget.clone());
        let join = v1::Join { request, tenant, communicator, rank, ranks: 4, budget, ..v1::Join::default() };
        world.send(*session, from_agent::Message::Join(join));
    }
    sessions.iter().map(|session| world.recipe(*session)).collect()
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
        let mut world = World::new(settings(), 5);
        let agg = world.hello(aggregator(&[]));
        let sessions: Vec<SessionId> = (0..4)
            .map(|host| {
                let mut hello = able(host, vec![]);
                if own {
                    hello.abilities.as_mut().unwrap().codecs =
                        vec![v1::CodecSpeed { codec: "rotated 4".to_owned(), ..Default::default() }];
                }
                world.hello(hello)
            })
            .collect();
        sessions.iter().for_each(|session| drop(world.received(*session)));
        let recipes = join_within(&mut world, &sessions, budget.clone());
        let [grant] = grants(&mut world, agg).try_into().unwrap();
        for recipe in &recipes {
            let told = recipe.aggregation.clone().unwrap();
            assert_eq!((&told.form, told.chunk_elements), (&grant.form, grant.chunk_elements), "{budget:?}");
            let shared = match told.form.unwrap().form.unwrap() {
                v1::aggregation_form::Form::Shared(shared) => Some((shared.bits, shared.block, shared.ranks)),
                v1::aggregation_form::Form::Tensor(_) => None,
            };
            assert_eq!(shared.is_some(), most.is_some(), "{budget:?}");
            assert_eq!(told.most_error, most.unwrap_or(0.0), "{budget:?}");
            assert!(shared.is_none_or(|shared| shared == (4, 256, 4) && told.chunk_elements == 7 * 256));
            assert!(recipe.coding.is_none(), "hosts do exactly what the aggregator does not");
        }
        let id = recipes[0].communicator;
        world.prepare(&sessions, id, 1);
        let why = plan(&world, id).aggregation_reason;
        assert_eq!(why.contains("in codes that add"), most.is_some(), "{why}");
    }
}

/// Four bits by the hosts' own codes take as long: then nobody else is needed.
#[test]
fn an_aggregator_of_codes_must_be_faster_than_the_hosts_codes() {
    let mut world = World::new(settings(), 5);
    let agg = world.hello(aggregator(&[]));
    let sessions: Vec<SessionId> = (0..4)
        .map(|host| {
            let mut hello = able(host, vec![]);
            let abilities = hello.abilities.as_mut().unwrap();
            abilities.codecs = vec![v1::CodecSpeed { codec: "rotated 4".to_owned(), ..Default::default() }];
            world.hello(hello)
        })
        .collect();
    sessions.iter().for_each(|session| drop(world.received(*session)));
    let recipes = join_within(&mut world, &sessions, v1::budget::Kind::Vnmse(0.05));
    assert!(recipes.iter().all(|recipe| recipe.aggregation.is_none() && recipe.coding.is_some()));
    assert!(grants(&mut world, agg).is_empty());
    let id = recipes[0].communicator;
    world.prepare(&sessions, id, 1);
    let why = plan(&world, id).aggregation_reason;
    assert!(why.contains("in codes that add") && why.contains("by the hosts"), "{why}");
}
