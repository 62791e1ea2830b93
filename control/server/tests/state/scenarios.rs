//! What control does in each case that an operator or a tenant may meet.

use super::aggregation::aggregator;
use super::world::{SECOND, World, hello, join_of, settings, settings_of};
use harmonaize_abi::Epoch;
use harmonaize_api::v1::{self, FailureKind, JoinRefusedKind, Phase, RefusedKind, from_agent, to_agent};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Reason, ReorderError, SessionId, Terms};
use std::time::Duration;

fn world() -> World {
    World::new(settings(4), 7)
}

fn refused(world: &mut World, session: SessionId) -> RefusedKind {
    only!(world.received(session), Refused).kind()
}

fn dissolved(world: &mut World, session: SessionId) -> (u64, FailureKind, Vec<u32>) {
    let end = only!(world.received(session), Dissolve);
    (end.communicator, end.kind(), end.ranks)
}

#[test]
fn sessions_that_are_refused() {
    let mut world = world();
    let good = || hello(0, vec![]);
    let first = world.agent(0);
    let cases = [
        (v1::Hello { protocol_version: 2, ..good() }, RefusedKind::Version),
        (v1::Hello { host: "h9".to_owned(), ..good() }, RefusedKind::UnknownHost),
        (v1::Hello { host: "leaf0".to_owned(), ..good() }, RefusedKind::UnknownHost),
        (v1::Hello { listen: "here".to_owned(), ..hello(1, vec![]) }, RefusedKind::Protocol),
        (v1::Hello { listen: "0.0.0.0:1".to_owned(), ..hello(1, vec![]) }, RefusedKind::Protocol),
        (v1::Hello { listen: "10.0.0.1:0".to_owned(), ..hello(1, vec![]) }, RefusedKind::Protocol),
        (good(), RefusedKind::HostInUse),
    ];
    for (hello, kind) in cases {
        let session = world.hello(hello);
        assert_eq!(refused(&mut world, session), kind);
        assert_eq!(world.ended.pop(), Some(session));
    }
    world.gone(first);
    world.agent(0);
}

#[test]
fn who_listens_elsewhere_than_the_topology_says_is_refused() {
    let topology = "host = [{ name = \"h0\", addresses = [\"10.0.0.7\"] }, { name = \"h1\" }]\n\
        switch = [{ name = \"s\" }]\n\
        link = [{ from = \"h0\", to = \"s\", rate = \"1Gbit/s\" }, { from = \"h1\", to = \"s\", rate = \"1Gbit/s\" }]\n\
        aggregator = [{ name = \"agg0\", switch = \"s\", rate = \"1Gbit/s\", addresses = [\"10.0.0.9\"] }]\n";
    let mut world = World::new(settings_of(topology), 7);
    let cases = [
        (hello(0, vec![]), "10.0.0.8:4000", false),
        (hello(0, vec![]), "[::ffff:10.0.0.7]:4000", true),
        (hello(1, vec![]), "224.0.0.1:4000", false),
        (hello(1, vec![]), "255.255.255.255:4000", false),
        (hello(1, vec![]), "[ff02::1]:4000", false),
        (hello(1, vec![]), "10.9.9.9:4000", true),
        (aggregator(&[]), "10.0.0.8:7400", false),
        (aggregator(&[]), "10.0.0.9:7400", true),
    ];
    for (hello, listen, welcome) in cases {
        let session = world.hello(v1::Hello { listen: listen.to_owned(), ..hello });
        match welcome {
            true => drop(only!(world.received(session), Welcome)),
            false => assert_eq!(refused(&mut world, session), RefusedKind::Protocol, "{listen}"),
        }
    }
}

#[test]
fn a_breach_costs_only_its_session() {
    let breaches: [&dyn Fn(u64) -> v1::FromAgent; 6] = [
        &|_| v1::FromAgent { message: None },
        &|_| from_agent::Message::Hello(hello(0, vec![])).into(),
        &|id| from_agent::Message::Prepared(v1::Prepared { communicator: id, epoch: 1, links: None }).into(),
        &|id| from_agent::Message::Failed(v1::Failed { communicator: id, ..Default::default() }).into(),
        &|id| from_agent::Message::Closed(v1::Closed { communicator: id }).into(),
        &|id| from_agent::Message::Leave(v1::Leave { communicator: id, rank: 0, request: 0 }).into(),
    ];
    for breach in breaches {
        let mut world = world();
        let sessions: Vec<SessionId> = (0..4).map(|host| world.agent(host)).collect();
        let others = world.form(&sessions[..2], "others");
        let own = world.form(&sessions[2..], "own");
        world.state.message(world.now, sessions[3], breach(others));
        world.run_until_quiet();
        assert_eq!(refused(&mut world, sessions[3]), RefusedKind::Protocol);
        assert_eq!(world.ended, [sessions[3]]);
        assert!(world.got.is_empty(), "{:?}", world.got);
        let phases =
            world.status().communicators.into_iter().map(|known| (known.communicator, known.phase()));
        assert_eq!(phases.collect::<Vec<_>>(), [(others, Phase::Running), (own, Phase::Recovering)]);
    }
    let mut world = world();
    let stranger = SessionId(99);
    world.send(stranger, from_agent::Message::Closed(v1::Closed { communicator: 1 }));
    assert_eq!(refused(&mut world, stranger), RefusedKind::Protocol);
}

#[test]
fn forms_when_all_ranks_have_joined() {
    let mut world = world();
    let [first, second, third] = [0, 1, 2].map(|host| world.agent(host));
    for (session, rank) in [(third, 3), (second, 0), (third, 4), (first, 1), (second, 5)] {
        world.join(session, "world", rank, 6);
        assert!(world.got.is_empty());
    }
    world.join(first, "world", 2, 6);
    let recipes = [second, first, third].map(|session| world.recipe(session));
    let parts: Vec<_> =
        recipes[0].participants.iter().map(|part| (part.host.as_str(), part.ranks.clone())).collect();
    assert_eq!(parts, [("h1", vec![0, 5]), ("h0", vec![1, 2]), ("h2", vec![3, 4])]);
    for (me, recipe) in recipes.iter().enumerate() {
        assert_eq!((recipe.me as usize, recipe.epoch, recipe.tenant.as_str()), (me, 1, "a"));
        assert_eq!(recipe.participants, recipes[0].participants);
        // h0 and h2 hang on one leaf.
        assert_eq!(recipe.order, [0, 1, 2]);
        assert_eq!(recipe.peers.iter().map(|peer| peer.participant as usize).collect::<Vec<_>>(), {
            let mut others = vec![0, 1, 2];
            others.remove(me);
            others
        });
    }
    let [near, far] = [&recipes[0].peers[1], &recipes[2].peers[0]];
    assert_eq!((&near.link, &near.secret, &near.source_ports), (&far.link, &far.secret, &far.source_ports));
    assert_eq!((near.initiate, far.initiate), (true, false));
    assert_eq!((near.address.as_str(), far.address.as_str()), ("10.0.0.2:4000", "10.0.0.1:4000"));
    assert_eq!(near.source_ports, [20000, 20001], "the first host in the topology's order connects");
}

#[test]
fn joins_that_are_refused() {
    let mut world = world();
    let [first, second] = [0, 1].map(|host| world.agent(host));
    world.join(first, "world", 1, 4);
    let mut refusal = |tenant: &str, name: &str, rank, ranks| {
        world.join_as(second, tenant, name, rank, ranks);
        let refused = world.refusal(second);
        (refused.kind(), refused.text, refused.ranks)
    };
    let kind = |(kind, _, _)| kind;
    assert_eq!(kind(refusal("c", "world", 0, 4)), JoinRefusedKind::UnknownTenant);
    assert_eq!(kind(refusal("a", "", 0, 4)), JoinRefusedKind::Invalid);
    assert_eq!(kind(refusal("a", &"x".repeat(129), 0, 4)), JoinRefusedKind::Invalid);
    for c in ['\n', '\u{200b}', '\u{202e}'] {
        assert_eq!(kind(refusal("a", &format!("a{c}b"), 0, 4)), JoinRefusedKind::Invalid, "{c:?}");
    }
    assert_eq!(kind(refusal("a", "world", 0, 0)), JoinRefusedKind::Invalid);
    assert_eq!(kind(refusal("a", "world", 0, 65)), JoinRefusedKind::Invalid);
    assert_eq!(kind(refusal("a", "world", 0, u32::MAX)), JoinRefusedKind::Invalid);
    assert_eq!(
        refusal("a", "world", 4, 4),
        (JoinRefusedKind::Invalid, "rank 4 lies outside a communicator of 4 ranks".to_owned(), vec![4])
    );
    assert_eq!(
        refusal("a", "world", 1, 4),
        (
            JoinRefusedKind::DuplicateRank,
            "another process is rank 1 of this communicator already".to_owned(),
            vec![1]
        )
    );
    let text = "rank 2 joins a communicator of 5 ranks, but rank 1 one of 4";
    assert_eq!(refusal("a", "world", 2, 5), (JoinRefusedKind::SizeMismatch, text.to_owned(), vec![1]));
    // Another tenant's communicator of the same name is another one.
    world.join_as(second, "b", "world", 1, 2);
    assert!(world.got.is_empty());
}

#[test]
fn a_tenant_has_only_so_many_communicators() {
    let mut world = world();
    let session = world.agent(0);
    for index in 0..6 {
        world.join(session, &format!("c{index}"), 0, 1 + index % 2);
    }
    world.received(session);
    world.join(session, "one more", 0, 1);
    assert_eq!(world.refusal(session).kind(), JoinRefusedKind::Limit);
    world.join_as(session, "b", "one more", 0, 1);
    only!(world.received(session), Form);
}

#[test]
fn a_full_job_leaves_room_for_others_up_to_64() {
    let mut world = world();
    let session = world.agent(0);
    let form = |world: &mut World, name: &str| {
        world.join(session, name, 0, 1);
        only!(world.received(session), Form).communicator
    };
    let mut last = 0;
    for index in 0..6 {
        last = form(&mut world, &format!("full/c{index}"));
    }
    let text = beyond(&mut world, session, "full/c6", 1);
    assert!(text.contains("the job has 6 communicators"), "{text}");
    // Beside it 63 more, one of which are the names without a job.
    let jobs: Vec<u64> = (1..63).map(|job| form(&mut world, &format!("job{job}/c"))).collect();
    form(&mut world, "c");
    for name in ["job63/c", "job64/c"] {
        let text = beyond(&mut world, session, name, 1);
        assert!(text.contains("communicators of 64 jobs"), "{text}");
    }
    // That is no limit of the jobs that there are, nor of another tenant.
    form(&mut world, "job1/d");
    form(&mut world, "d");
    world.join_as(session, "b", "job63/c", 0, 1);
    only!(world.received(session), Form);
    // One that is over makes room in its job, and a job whose last is over makes room for another.
    world.send(session, from_agent::Message::Closed(v1::Closed { communicator: last }));
    form(&mut world, "full/c6");
    beyond(&mut world, session, "job63/c", 1);
    beyond(&mut world, session, "job63/c", 1);
    world.send(session, from_agent::Message::Closed(v1::Closed { communicator: jobs[1] }));
    form(&mut world, "job63/c");
}

/// A world in which tenant `a` has these terms.
fn world_with(terms: Terms) -> World {
    let mut settings = settings(4);
    settings.terms.insert("a".to_owned(), terms);
    World::new(settings, 1)
}

/// Joins and says why that was refused.
fn beyond(world: &mut World, session: SessionId, name: &str, ranks: u32) -> String {
    world.join(session, name, 0, ranks);
    let refused = world.refusal(session);
    assert_eq!(refused.kind(), JoinRefusedKind::Limit, "{}", refused.text);
    refused.text
}

#[test]
fn communicators_are_limited_over_all_jobs_and_hosts() {
    let mut world = world_with(Terms { communicators: Some(2), ..Terms::default() });
    let [first, second] = [0, 1].map(|host| world.agent(host));
    // Each of a job of its own; one waits for its other rank.
    world.join(first, "one", 0, 1);
    world.join(second, "two", 0, 2);
    world.received(first);
    let text = beyond(&mut world, first, "three", 1);
    assert!(text.contains("2 of 2 communicators") && text.contains("`communicators`"), "{text}");
    world.join_as(first, "b", "three", 0, 1);
    only!(world.received(first), Form);
    // What was begun is completed, and then there are as many as before.
    world.join(first, "two", 1, 2);
    only!(world.received(first), Form);
    only!(world.received(second), Form);
    beyond(&mut world, second, "three", 1);
}

#[test]
fn ranks_are_limited_over_all_communicators() {
    let mut world = world_with(Terms { ranks: Some(5), ..Terms::default() });
    let session = world.agent(0);
    world.join(session, "one", 0, 1);
    world.received(session);
    let text = beyond(&mut world, session, "five", 5);
    assert!(text.contains("1 of 5 ranks") && text.contains("5 more") && text.contains("`ranks`"), "{text}");
    world.join(session, "four", 0, 4);
    beyond(&mut world, session, "more", 1);
    for rank in 1..4 {
        world.join(session, "four", rank, 4);
    }
    let id = only!(world.received(session), Form).communicator;
    beyond(&mut world, session, "more", 1);
    // Four ranks that split would be four more.
    world.prepare(&[session], id, 1);
    for rank in 0..4 {
        let split = Some(v1::Split { communicator: id, rank, color: Some(0), key: 0 });
        let join = v1::Join { split, ..join_of("a", "four", rank, 0) };
        world.send(session, from_agent::Message::Join(join));
    }
    let refused = every!(world.received(session), JoinRefused);
    assert_eq!(refused.len(), 4);
    assert!(refused.iter().all(|one| one.kind() == JoinRefusedKind::Limit), "{refused:?}");
    // Whose communicator is over may have another.
    world.send(session, from_agent::Message::Closed(v1::Closed { communicator: id }));
    world.join(session, "again", 0, 4);
    assert!(world.got.is_empty(), "it waits for the others");
}

#[test]
fn tensor_memory_is_limited_over_all_hosts() {
    let mut world = world_with(Terms { arena: Some(100), ..Terms::default() });
    let sessions = [0, 1].map(|host| world.agent(host));
    let join = |world: &mut World, at: usize, name: &str, tensor_bytes| {
        let join = v1::Join { tensor_bytes, ..join_of("a", name, 0, 1) };
        world.send(sessions[at], from_agent::Message::Join(join));
    };
    join(&mut world, 0, "one", 60);
    let id = only!(world.received(sessions[0]), Form).communicator;
    join(&mut world, 1, "two", 41);
    let refused = only!(world.received(sessions[1]), JoinRefused);
    assert_eq!(refused.kind(), JoinRefusedKind::Limit);
    let text = refused.text;
    assert!(text.contains("have 101 bytes") && text.contains("of 100") && text.contains("`arena`"), "{text}");
    join(&mut world, 1, "two", 40);
    only!(world.received(sessions[1]), Form);
    // What a host without ranks of the tenant said before counts no more.
    world.send(sessions[0], from_agent::Message::Closed(v1::Closed { communicator: id }));
    join(&mut world, 1, "three", 100);
    only!(world.received(sessions[1]), Form);
}

#[test]
fn operations_in_flight_are_limited_over_all_hosts() {
    let mut world = world_with(Terms { operations: Some(128), ..Terms::default() });
    let sessions = [0, 1].map(|host| world.agent(host));
    let join = |world: &mut World, (at, tenant): (usize, &str), name: &str, ring_entries| {
        let join = v1::Join { ring_entries, ..join_of(tenant, name, 0, 1) };
        world.send(sessions[at], from_agent::Message::Join(join));
    };
    join(&mut world, (0, "a"), "one", 64);
    only!(world.received(sessions[0]), Form);
    join(&mut world, (1, "a"), "two", 65);
    let refused = only!(world.received(sessions[1]), JoinRefused);
    assert_eq!(refused.kind(), JoinRefusedKind::Limit);
    let text = refused.text;
    assert!(
        text.contains("for 129 operations") && text.contains("of 128") && text.contains("`operations`"),
        "{text}"
    );
    // A process has gone, and the others are within the limit.
    join(&mut world, (1, "a"), "two", 64);
    only!(world.received(sessions[1]), Form);
    join(&mut world, (1, "b"), "theirs", 1 << 20);
    only!(world.received(sessions[1]), Form);
}

/// One rank forms a communicator, for which its agent then holds this; its id.
fn formed(world: &mut World, session: SessionId, join: v1::Join, links: v1::LinkUsage) -> u64 {
    world.send(session, from_agent::Message::Join(join));
    let communicator = only!(world.received(session), Form).communicator;
    let prepared = v1::Prepared { communicator, epoch: 1, links: Some(links) };
    world.send(session, from_agent::Message::Prepared(prepared));
    assert_eq!(every!(world.received(session), Ready).len(), 1);
    communicator
}

/// What control says that tenant `a` has of its limits.
fn limits_of(world: &World) -> Vec<(String, u64, u64)> {
    let mut tenants = world.state.queries(world.now).tenants().tenants;
    let limits = tenants.remove(0).limits.into_iter();
    limits.map(|limit| (limit.key, limit.used, limit.max)).collect()
}

#[test]
fn landing_memory_is_limited_over_all_hosts() {
    let mut world = world_with(Terms { landing: Some(100), ..Terms::default() });
    let sessions = [0, 1].map(|host| world.agent(host));
    let form = |world: &mut World, at: usize, name: &str, landing_bytes| {
        let links = v1::LinkUsage { landing_bytes, ..Default::default() };
        formed(world, sessions[at], join_of("a", name, 0, 1), links)
    };
    form(&mut world, 0, "one", 60);
    form(&mut world, 1, "two", 40);
    // What a communicator takes is known when it has links: this one passes the limit, and the next is refused.
    let last = form(&mut world, 0, "three", 1);
    let text = beyond(&mut world, sessions[1], "four", 1);
    assert!(
        text.contains("have 101 bytes") && text.contains("of 100") && text.contains("`landing`"),
        "{text}"
    );
    assert_eq!(limits_of(&world), [("landing".to_owned(), 101, 100)]);
    world.join_as(sessions[1], "b", "theirs", 0, 1);
    only!(world.received(sessions[1]), Form);
    // The end of one makes room on whichever host.
    world.send(sessions[0], from_agent::Message::Closed(v1::Closed { communicator: last }));
    assert_eq!(limits_of(&world), [("landing".to_owned(), 100, 100)]);
    form(&mut world, 1, "four", 0);
}

#[test]
fn descriptors_are_limited_over_all_hosts() {
    let mut world = world_with(Terms { descriptors: Some(20), ..Terms::default() });
    let sessions = [0, 1].map(|host| world.agent(host));
    // A process has 9 on each host.
    let join = |name: &str| v1::Join { process_descriptors: 9, ..join_of("a", name, 0, 1) };
    let links = v1::LinkUsage { descriptors: 5, ..Default::default() };
    let one = formed(&mut world, sessions[0], join("one"), links);
    world.send(sessions[1], from_agent::Message::Join(join("two")));
    let refused = world.refusal(sessions[1]);
    assert_eq!(refused.kind(), JoinRefusedKind::Limit);
    let text = refused.text;
    assert!(
        text.contains("have 23 descriptors") && text.contains("of 20") && text.contains("`descriptors`"),
        "{text}"
    );
    // Of a host without ranks of the tenant neither its processes nor links are counted.
    world.send(sessions[0], from_agent::Message::Closed(v1::Closed { communicator: one }));
    formed(&mut world, sessions[1], join("two"), links);
    assert_eq!(limits_of(&world), [("descriptors".to_owned(), 14, 20)]);
}

#[test]
fn joins_are_limited_over_all_hosts() {
    let mut world = world_with(Terms { joins: Some(2), ..Terms::default() });
    let [first, second] = [0, 1].map(|host| world.agent(host));
    // As many at once as a communicator may have ranks.
    for rank in 0..64 {
        world.join([first, second][rank as usize % 2], "large", rank, 64);
    }
    assert_eq!(every!(world.received(first), Form).len() + every!(world.received(second), Form).len(), 2);
    let text = beyond(&mut world, second, "next", 2);
    assert!(text.contains("2 a second") && text.contains("64 at once") && text.contains("`joins`"), "{text}");
    // Each of these could be a communicator of its own, which control would plan, and all of them again with each that follows.
    for number in 0..500 {
        world.join([first, second][number % 2], &format!("churn{number}"), 0, 1);
    }
    for session in [first, second] {
        let answers = world.received(session);
        assert_eq!(every!(answers.clone(), JoinRefused).len(), 250);
        assert!(every!(answers, Form).is_empty(), "control plans what a tenant has it plan without end");
    }
    world.join_as(second, "b", "next", 0, 1);
    only!(world.received(second), Form);
    world.wait(SECOND / 2);
    world.join(first, "next", 0, 1);
    only!(world.received(first), Form);
    beyond(&mut world, first, "more", 1);
}

#[test]
fn a_rank_that_left_may_join_again() {
    let (mut world, sessions, old) = World::formed::<2>();
    world.join(sessions[0], "world", 0, 2);
    assert_eq!(world.refusal(sessions[0]).kind(), JoinRefusedKind::DuplicateRank);
    world.send(sessions[0], from_agent::Message::Leave(v1::Leave { communicator: old, rank: 0, request: 0 }));
    world.join(sessions[0], "world", 0, 2);
    assert!(world.got.is_empty(), "it waits for the other, which is still in the old one");
    assert_eq!(world.status().communicators[0].phase(), Phase::Leaving);
    world.got.clear();
    world.send(sessions[1], from_agent::Message::Closed(v1::Closed { communicator: old }));
    world.join(sessions[1], "world", 1, 2);
    let new = world.recipe(sessions[0]).communicator;
    assert_ne!(new, old);
    assert_eq!(world.status().errors, 0);
}

#[test]
fn late_ranks_are_named() {
    let mut world = world();
    let [first, second] = [0, 1].map(|host| world.agent(host));
    world.join(first, "world", 2, 5);
    world.wait(SECOND * 30);
    world.join(second, "world", 0, 5);
    assert_eq!(world.status().waiting[0].joined, [0, 2]);
    world.got.clear();
    assert_eq!(world.state.next_deadline(), Some(SECOND * 61));
    world.wait(SECOND * 30);
    for session in [first, second] {
        let refused = world.refusal(session);
        assert_eq!((refused.kind(), refused.ranks), (JoinRefusedKind::Timeout, vec![1, 3, 4]));
        assert_eq!(refused.text, "ranks 1, 3, 4 of 5 have not joined in time");
    }
    assert_eq!(world.state.next_deadline(), None);
}

/// Joins with a rank's own patience; the rank is its session's place.
fn join_for(world: &mut World, session: SessionId, rank: u32, patience: Duration) {
    let timeout_ns = patience.as_nanos() as u64;
    let join = v1::Join { timeout_ns, ..join_of("a", "world", rank, 4) };
    world.send(session, from_agent::Message::Join(join));
}

#[test]
fn ranks_that_gave_up_are_not_named_missing() {
    let mut world = world();
    let sessions = [0, 1, 2, 3].map(|host| world.agent(host));
    let moment = Duration::from_millis(5);
    for rank in 0..3 {
        join_for(&mut world, sessions[rank as usize], rank, SECOND * 10);
        world.wait(moment);
    }
    world.wait(SECOND * 10 - moment * 3);
    for session in &sessions[..3] {
        let refused = world.refusal(*session);
        assert_eq!((refused.kind(), refused.ranks), (JoinRefusedKind::Timeout, vec![3]));
        world.wait(moment);
    }
    assert!(world.status().waiting.is_empty());
}

#[test]
fn ranks_that_gave_up_may_be_missing() {
    let mut world = world();
    let sessions = [0, 1, 2, 3].map(|host| world.agent(host));
    for (rank, patience) in [(0, 5), (1, 20), (2, 20)] {
        join_for(&mut world, sessions[rank as usize], rank, SECOND * patience);
    }
    world.wait(SECOND * 5);
    assert_eq!(world.refusal(sessions[0]).ranks, [3]);
    join_for(&mut world, sessions[3], 3, SECOND * 20);
    world.wait(SECOND * 15);
    assert_eq!(world.refusal(sessions[1]).ranks, [0]);
    assert_eq!(world.refusal(sessions[2]).ranks, [0]);
    // It comes back: then it waits, and nobody is said to be missing but those who are.
    join_for(&mut world, sessions[0], 0, SECOND * 5);
    world.wait(SECOND * 5);
    assert_eq!(world.refusal(sessions[0]).ranks, [1, 2]);
    assert_eq!(world.refusal(sessions[3]).ranks, [1, 2]);
}

#[test]
fn withdrawn_and_lost_joins_make_room() {
    let mut world = world();
    let [first, second, third] = [0, 1, 2].map(|host| world.agent(host));
    world.join(first, "world", 0, 2);
    let request = super::world::request("a", "world", 0);
    world.send(first, from_agent::Message::Leave(v1::Leave { communicator: 0, rank: 0, request }));
    world.join(second, "world", 0, 3);
    world.gone(second);
    world.join(third, "world", 0, 1);
    assert_eq!(world.recipe(third).participants.len(), 1);
}

#[test]
fn a_hosts_end_ends_its_communicators_alone() {
    let mut world = world();
    let sessions = [0, 1, 2, 3].map(|host| world.agent(host));
    let all = world.form(&sessions, "all");
    let pair = world.form(&sessions[..2], "pair");
    world.dies(sessions[3]);
    for session in &sessions[1..3] {
        assert_eq!(dissolved(&mut world, *session), (all, FailureKind::RanksLost, vec![3]));
    }
    let status = world.status();
    assert_eq!(status.communicators.iter().map(|known| known.communicator).collect::<Vec<_>>(), [pair]);
    assert_eq!((status.errors, status.recent_errors[0].detail.as_str()), (1, "its links are down"));
    assert_eq!((status.tenants[0].errors, status.tenants[1].errors), (1, 0));
}

#[test]
fn a_failure_is_told_to_the_others() {
    let (mut world, sessions, id) = World::formed::<3>();
    let failed = v1::Failed {
        communicator: id,
        kind: FailureKind::Timeout.into(),
        ranks: vec![2, 2, 77],
        detail: "h2 is away".to_owned(),
    };
    world.send(sessions[0], from_agent::Message::Failed(failed.clone()));
    assert_eq!(world.received(sessions[0]), []);
    for session in &sessions[1..] {
        assert_eq!(dissolved(&mut world, *session), (id, FailureKind::Timeout, vec![2]));
    }
    // The others say so a moment later; that is news of the past.
    world.send(sessions[1], from_agent::Message::Failed(failed));
    assert!(world.got.is_empty() && world.ended.is_empty());
}

#[test]
fn an_epoch_that_cannot_be_had() {
    let mut world = world();
    let sessions = [0, 1].map(|host| world.agent(host));
    let fail = |communicator, epoch| {
        from_agent::Message::PrepareFailed(v1::PrepareFailed { communicator, epoch, reason: "no".to_owned() })
    };
    // The first: the communicator ends.
    let id = world.join_all(&sessions, &join_of("a", "first", 0, 0))[0].communicator;
    world.send(sessions[1], fail(id, 1));
    for session in sessions {
        assert_eq!(dissolved(&mut world, session), (id, FailureKind::Prepare, vec![]));
    }
    // A later one: it goes on.
    let id = world.form(&sessions, "later");
    assert_eq!(world.reorder(id, &["h1", "h0"]), Ok(2));
    let changes = sessions.map(|session| world.recipe(session));
    assert_eq!((changes[0].order.as_slice(), changes[0].epoch), ([1, 0].as_slice(), 2));
    assert_eq!(world.reorder(id, &["h1", "h0"]), Err(ReorderError::UnderWay(Epoch(2))));
    world.send(sessions[0], fail(id, 2));
    for session in sessions {
        let abandon = only!(world.received(session), Abandon);
        assert_eq!((abandon.epoch, abandon.reason.as_str()), (2, "h0: no"));
    }
    let status = world.status();
    let known = &status.communicators[0];
    assert_eq!((known.phase(), known.epoch, known.order.as_slice()), (Phase::Running, 1, [0, 1].as_slice()));
    assert_eq!(known.last_change, "epoch 2 was given up: h0: no");
    world.got.clear();
    // Nobody prepares in time.
    assert_eq!(world.reorder(id, &["h1", "h0"]), Ok(3));
    sessions.iter().for_each(|session| drop(world.recipe(*session)));
    world.send(
        sessions[1],
        from_agent::Message::Prepared(v1::Prepared { communicator: id, epoch: 3, links: None }),
    );
    world.wait(SECOND * 10);
    assert_eq!(only!(world.received(sessions[0]), Abandon).reason, "not prepared in time by h0");
}

#[test]
fn an_epoch_is_current_when_all_use_it() {
    let (mut world, sessions, id) = World::formed::<3>();
    let order = ["h2", "h0", "h1"];
    assert_eq!(world.reorder(id, &order), Ok(2));
    sessions.iter().for_each(|session| drop(world.recipe(*session)));
    world.prepare(&sessions, id, 2);
    let switched =
        |epoch| from_agent::Message::Switched(v1::Switched { communicator: id, epoch, first_segment: 1 });
    for session in &sessions[..2] {
        world.send(*session, switched(2));
    }
    let known = world.status().communicators.remove(0);
    assert_eq!((known.phase(), known.epoch, known.next_epoch), (Phase::Changing, 1, 2));
    world.send(sessions[2], switched(2));
    let known = world.status().communicators.remove(0);
    assert_eq!((known.phase(), known.epoch, known.next_epoch), (Phase::Running, 2, 0));
    assert_eq!(known.order, [2, 0, 1]);
    assert_eq!(world.reasons, [Reason::Formed, Reason::Ordered]);
}

#[test]
fn orders_that_are_refused() {
    let (mut world, sessions, id) = World::formed::<2>();
    let mut reorder = |id, names: &[&str]| match world.reorder(id, names) {
        Err(error) => error.to_string(),
        Ok(epoch) => panic!("epoch {epoch}"),
    };
    assert_eq!(reorder(id + 1, &["h0", "h1"]), "no such communicator; it may have ended");
    assert_eq!(reorder(id, &["h0", "h2"]), "`h2` has no part in it; the communicator's hosts are h0, h1");
    assert_eq!(reorder(id, &["h0", "h0"]), "`h0` stands twice; the communicator's hosts are h0, h1");
    assert_eq!(reorder(id, &["h0"]), "1 hosts are given, not 2; the communicator's hosts are h0, h1");
    world.send(sessions[0], from_agent::Message::Closed(v1::Closed { communicator: id }));
    let refused = world.reorder(id, &["h0", "h1"]);
    assert_eq!(refused, Err(ReorderError::NotRunning("ranks have left")));
}

#[test]
fn an_operator_ends_a_communicator() {
    let (mut world, sessions, id) = World::formed::<2>();
    assert!(world.dissolve(id));
    for session in sessions {
        assert_eq!(dissolved(&mut world, session), (id, FailureKind::Operator, vec![]));
    }
    assert!(!world.dissolve(id));
    assert_eq!(world.status().errors, 0, "a wish is no error");
}

#[test]
fn communicators_outlive_control() {
    let mut before = world();
    let sessions = [0, 1].map(|host| before.agent(host));
    let recipes = before.join_all(&sessions, &join_of("a", "world", 0, 0));
    let id = recipes[0].communicator;
    let back = |world: &mut World, host: usize, running: &[v1::Recipe]| {
        let session = world.hello(hello(host, running.to_vec()));
        let mut heard = world.received(session);
        assert!(matches!(heard.remove(0), to_agent::Message::Welcome(_)));
        (session, heard)
    };
    let ready = to_agent::Message::Ready(v1::Ready { communicator: id, epoch: 1 });

    // Both come back.
    let mut after = World::new(settings(4), 8);
    let (first, heard) = back(&mut after, 0, &recipes[..1]);
    assert_eq!(heard, []);
    assert_eq!(after.status().communicators[0].phase(), Phase::Recovering);
    after.got.clear();
    let (_, heard) = back(&mut after, 1, &recipes[1..]);
    assert_eq!((heard, after.received(first)), (vec![ready.clone()], vec![ready]));
    assert_eq!(after.reorder(id, &["h1", "h0"]), Ok(3), "2 may have been handed out");

    // One does not, in time.
    let mut after = World::new(settings(4), 8);
    let (first, _) = back(&mut after, 0, &recipes[..1]);
    after.wait(SECOND * 30);
    assert_eq!(dissolved(&mut after, first), (id, FailureKind::RanksLost, vec![1]));

    // One comes back without it.
    let mut after = World::new(settings(4), 8);
    let (first, _) = back(&mut after, 0, &recipes[..1]);
    after.agent(1);
    assert_eq!(dissolved(&mut after, first), (id, FailureKind::RanksLost, vec![1]));
    // The end is remembered.
    after.gone(first);
    let (_, heard) = back(&mut after, 0, &recipes[..1]);
    assert!(matches!(heard.as_slice(), [to_agent::Message::Dissolve(_)]), "{heard:?}");

    // The same control, which ended it when the session broke.
    before.gone(sessions[0]);
    assert_eq!(dissolved(&mut before, sessions[1]).0, id);
    let (_, heard) = back(&mut before, 0, &recipes[..1]);
    assert!(matches!(heard.as_slice(), [to_agent::Message::Dissolve(_)]), "{heard:?}");
}

#[test]
fn senseless_recoveries_are_breaches() {
    let mut before = world();
    let session = before.agent(0);
    before.join(session, "world", 0, 1);
    let good = before.recipe(session);
    type Damage = fn(&mut v1::Recipe);
    let damages: [Damage; 7] = [
        |recipe| recipe.epoch = 0,
        |recipe| recipe.me = 1,
        |recipe| recipe.order = vec![0, 0],
        |recipe| recipe.order.clear(),
        |recipe| recipe.participants.clear(),
        |recipe| recipe.participants[0].ranks = vec![1],
        |recipe| recipe.participants[0].ranks.clear(),
    ];
    for damage in damages {
        let mut recipe = good.clone();
        damage(&mut recipe);
        let mut after = World::new(settings(4), 8);
        let session = after.hello(hello(0, vec![recipe]));
        assert_eq!(after.ended, [session]);
        assert!(after.status().communicators.is_empty());
    }
    // Another host's part, or the same twice.
    for (host, running) in [(1, vec![good.clone()]), (0, vec![good.clone(), good.clone()])] {
        let mut after = World::new(settings(4), 8);
        let session = after.hello(hello(host, running));
        assert_eq!(after.ended, [session]);
    }
}

#[test]
fn status_says_whom_operations_wait_for() {
    let (mut world, sessions, id) = World::formed::<3>();
    let asked = world.state.ask_status(world.now, SECOND);
    world.run_until_quiet();
    let operation = |operation, waiting_for: &[u32], age_ns| v1::OperationReport {
        operation,
        call: "barrier()".to_owned(),
        waiting_for: waiting_for.to_vec(),
        age_ns,
    };
    let reports = [
        (3, vec![operation(3, &[], 10), operation(4, &[2], 5)]),
        (3, vec![operation(3, &[], 12)]),
        (4, vec![]),
    ];
    for (session, (operations_completed, in_flight)) in sessions.into_iter().zip(reports) {
        assert!(world.status.is_empty(), "answered before all have");
        let own = v1::CommunicatorReport {
            communicator: id,
            operations_completed,
            in_flight,
            bytes_sent: 100,
            ..Default::default()
        };
        let report = v1::Report { id: asked, communicators: vec![own], ..Default::default() };
        world.send(session, from_agent::Message::Report(report));
    }
    let status = world.status.pop().unwrap();
    let known = &status.communicators[0];
    assert_eq!(known.in_flight, [operation(3, &[], 12), operation(4, &[1, 2], 5)]);
    assert_eq!((known.operations_completed, known.bytes_sent), (3, 300));
    assert!(status.agents[..3].iter().all(|agent| agent.connected && agent.report.is_some()));
    assert!(!status.agents[3].connected);
}

#[test]
fn what_an_agent_says_at_length_is_cut() {
    let (mut world, sessions, communicator) = World::formed::<2>();
    let asked = world.state.ask_status(world.now, SECOND);
    world.run_until_quiet();
    let operation = v1::OperationReport {
        call: "x\n".repeat(1 << 12),
        waiting_for: vec![0; 1 << 12],
        ..v1::OperationReport::default()
    };
    let own = v1::CommunicatorReport {
        communicator,
        in_flight: vec![operation; 300],
        ..v1::CommunicatorReport::default()
    };
    let communicators = vec![own];
    let report = v1::Report { id: asked, communicators, ..v1::Report::default() };
    world.send(sessions[0], from_agent::Message::Report(report));
    world.wait(SECOND);
    let status = world.status.pop().unwrap();
    let kept = &status.agents[0].report.as_ref().unwrap().communicators[0].in_flight;
    assert_eq!((kept.len(), kept[0].call.len(), kept[0].waiting_for.len()), (256, 256, 64));
    world.got.clear();

    let detail = "y".repeat(1 << 20);
    let failed = v1::Failed { communicator, detail, ..v1::Failed::default() };
    world.send(sessions[0], from_agent::Message::Failed(failed));
    assert_eq!(only!(world.received(sessions[1]), Dissolve).reason, "y".repeat(500));
}

#[test]
fn what_planning_takes_is_no_pause_between_plans() {
    let (mut world, ..) = World::formed::<2>();
    let plans = |world: &mut World, at: Duration| {
        world.state.plan_now(world.now + at);
        world.state.queries(Duration::ZERO).decision_counts().plans
    };
    let before = plans(&mut world, SECOND);
    world.state.finished(world.now + SECOND * 4);
    assert_eq!(plans(&mut world, SECOND * 4), before);
    assert_eq!(plans(&mut world, SECOND * 5), before + 1);
}

#[test]
fn agents_are_told_when_control_goes() {
    let (mut world, sessions, _) = World::formed::<2>();
    world.state.shut_down();
    world.run_until_quiet();
    for session in sessions {
        assert_eq!(refused(&mut world, session), RefusedKind::Shutdown);
    }
}
