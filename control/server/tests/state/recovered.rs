//! What agents report as running after a restart of control. The tests show what of it is accepted, and
//! whom a lie costs something.

use super::world::{SECOND, World, hello, join_of, running, settings};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, FailureKind, Phase};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{SessionId, Settings, Terms};
use harmonaize_store::{Change, Stored, Tenant};

/// What the agents of hosts 0 and 1 tell of a communicator of theirs, and what was stored of it.
fn recovered_state() -> ([v1::Recipe; 2], Stored) {
    let mut world = World::new(settings(4), 7);
    let sessions = [0, 1].map(|host| world.agent(host));
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    let recipes = [0, 1].map(|at: usize| running(&recipes[at]).remove(0));
    world.prepare(&sessions, recipes[0].communicator, 1);
    let mut stored = Stored::default();
    stored.apply(&world.state.plan_change(CommunicatorId(recipes[0].communicator)));
    (recipes, stored)
}

/// The next start of control.
fn again(stored: Stored) -> World {
    again_with(settings(4), stored)
}

/// The same by other settings.
fn again_with(settings: Settings, stored: Stored) -> World {
    let mut world = World::new(settings, 8);
    world.state.restore(stored, Nanos(0));
    world.run_until_quiet();
    world
}

/// The same as another agent's, about hosts 2 and 3.
fn lie(recipe: &v1::Recipe) -> v1::Recipe {
    let part = |(rank, host): (u32, &str)| v1::Participant { ranks: vec![rank], host: host.to_owned() };
    v1::Recipe { participants: [(0, "h2"), (1, "h3")].map(part).to_vec(), me: 0, ..recipe.clone() }
}

/// What an agent was told to let go of since it was looked at.
fn let_go(world: &mut World, session: SessionId) -> Vec<(u64, FailureKind)> {
    let ends = every!(world.received(session), Dissolve).into_iter();
    ends.map(|end| (end.communicator, end.kind())).collect()
}

#[test]
fn communicators_are_recovered_only_after_a_start() {
    let (recipes, stored) = recovered_state();
    let id = recipes[0].communicator;
    for stored in [Stored::default(), stored] {
        let mut world = again(stored.clone());
        world.wait(SECOND * 28);
        let session = world.hello(hello(0, vec![recipes[0].clone()]));
        assert_eq!(let_go(&mut world, session), []);
        assert_eq!(world.status().communicators.len(), 1);
        let mut world = again(stored);
        world.wait(SECOND * 30);
        let session = world.hello(hello(0, vec![recipes[0].clone()]));
        assert_eq!(let_go(&mut world, session), [(id, FailureKind::Operator)]);
        assert_eq!(world.ended, []);
        assert!(world.status().communicators.is_empty());
    }
}

#[test]
fn what_links_take_is_counted_after_a_restart() {
    let (recipes, stored) = recovered_state();
    let mut limited = settings(4);
    limited.terms.insert("a".to_owned(), Terms { landing: Some(100), ..Terms::default() });
    let mut world = again_with(limited, stored);
    let links = Some(v1::LinkUsage { descriptors: 1, landing_bytes: 60 });
    let sessions = world.connect((0..2).map(|host| {
        let recipe = v1::Recipe { links, ..recipes[host].clone() };
        hello(host, vec![recipe])
    }));
    world.join(sessions[0], "next", 0, 1);
    let refused = every!(world.received(sessions[0]), JoinRefused).remove(0);
    assert_eq!(refused.kind(), v1::JoinRefusedKind::Limit);
    assert!(refused.text.contains("have 120 bytes"), "{}", refused.text);
    assert!(world.dissolve(recipes[0].communicator));
    world.ignore(&sessions);
    world.join(sessions[0], "next", 0, 1);
    assert_eq!(every!(world.received(sessions[0]), Form).len(), 1);
}

#[test]
fn a_false_recovery_ends_no_other_session() {
    let (recipes, stored) = recovered_state();
    let id = recipes[0].communicator;
    // Nothing tells who lies: whoever comes second has to let go, and no more.
    let mut world = again(Stored::default());
    let liar = world.hello(hello(2, vec![lie(&recipes[0])]));
    assert_eq!(let_go(&mut world, liar), []);
    for (host, recipe) in recipes.iter().enumerate() {
        let session = world.hello(hello(host, vec![recipe.clone()]));
        assert_eq!(let_go(&mut world, session), [(id, FailureKind::Operator)]);
    }
    assert_eq!(world.ended, []);
    // The store tells.
    let mut world = again(stored.clone());
    let liar = world.hello(hello(2, vec![lie(&recipes[0])]));
    assert_eq!(let_go(&mut world, liar), [(id, FailureKind::Operator)]);
    for (host, recipe) in recipes.iter().enumerate() {
        let session = world.hello(hello(host, vec![recipe.clone()]));
        assert_eq!(let_go(&mut world, session), []);
    }
    assert_eq!(world.ended, []);
    assert_eq!(world.status().communicators[0].phase(), Phase::Running);
    // Of another tenant or name it is not what was stored either.
    let others = [
        v1::Recipe { tenant: "b".to_owned(), ..recipes[0].clone() },
        v1::Recipe { name: "other".to_owned(), ..recipes[0].clone() },
    ];
    for other in others {
        let mut world = again(stored.clone());
        let session = world.hello(hello(0, vec![other]));
        assert_eq!(let_go(&mut world, session), [(id, FailureKind::Operator)]);
        assert_eq!(world.ended, []);
    }
}

#[test]
fn tenants_are_recovered_only_where_they_may_be() {
    let (recipes, stored) = recovered_state();
    let id = recipes[0].communicator;
    let only = |hosts: &[&str]| {
        let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
        Settings { hosts: [("a".to_owned(), hosts)].into(), ..settings(4) }
    };
    let refused = [(id, FailureKind::Operator)];
    // One participant that may not be where it says is enough, whichever agent tells of it.
    for (hosts, stored, expected) in [
        (&["h0"][..], Stored::default(), &refused[..]),
        (&["h1", "h2"][..], Stored::default(), &refused[..]),
        (&["h0", "h1"][..], Stored::default(), &[][..]),
        (&["h0"][..], stored, &[][..]),
    ] {
        let mut world = again_with(only(hosts), stored);
        for (host, recipe) in recipes.iter().enumerate() {
            let session = world.hello(hello(host, vec![recipe.clone()]));
            assert_eq!(let_go(&mut world, session), expected, "{hosts:?}, of host {host}");
        }
        assert_eq!(world.ended, []);
        assert_eq!(world.status().communicators.is_empty(), !expected.is_empty());
    }
    // So it is with tenants that operators added.
    for (hosts, expected) in [(&["h2"][..], &refused[..]), (&["h1", "h0"][..], &[][..]), (&[][..], &[][..])] {
        let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
        let mut stored = Stored::default();
        stored.apply(&Change::Tenant(Tenant { name: "c".to_owned(), hosts, ..Tenant::default() }));
        let mut world = again(stored);
        let recipe = v1::Recipe { tenant: "c".to_owned(), ..recipes[0].clone() };
        let session = world.hello(hello(0, vec![recipe]));
        assert_eq!(let_go(&mut world, session), expected);
    }
}

#[test]
fn names_of_the_release_before_are_recovered() {
    let (recipes, _) = recovered_state();
    for (name, goes_on) in [("a\u{200d}b", true), ("a\nb", false), ("", false)] {
        let mut world = again(Stored::default());
        let recipe = v1::Recipe { name: name.to_owned(), ..recipes[0].clone() };
        let session = world.hello(hello(0, vec![recipe]));
        assert_eq!(let_go(&mut world, session).is_empty(), goes_on, "{name:?}");
    }
}

#[test]
fn the_limit_of_communicators_holds_after_a_restart() {
    let (recipes, _) = recovered_state();
    let mut world = again(Stored::default());
    let most = settings(4).most_communicators as u64;
    let alone = |number: u64| v1::Recipe {
        communicator: recipes[0].communicator + number,
        name: format!("c{number}"),
        participants: vec![v1::Participant { ranks: vec![0], host: "h0".to_owned() }],
        order: vec![0],
        ..recipes[0].clone()
    };
    let session = world.hello(hello(0, (0..most + 2).map(alone).collect()));
    assert_eq!(let_go(&mut world, session).len(), 2);
    assert_eq!(world.ended, []);
    assert_eq!(world.status().communicators.len() as u64, most);
}
