//! Aggregators above and below each other: what each is told, and that they come and go together.

use super::aggregation::{able, aggregator, answer, grants, plan, revoked};
use super::topology;
use super::world::{SECOND, World, join_of, running, settings_of};
use harmonaize_abi::GrantId;
use harmonaize_aggregator::worker_key;
use harmonaize_api::v1;
use harmonaize_server::state::{SessionId, Settings};

/// Two racks of two hosts, with uplinks no wider than a host's link. There is an aggregator at each leaf and, the
/// last, at the spine.
fn settings() -> Settings {
    let mut text = topology::switch("spine");
    for rack in 0..2 {
        let leaf = format!("leaf{rack}");
        text += &(topology::switch(&leaf) + &topology::link(&leaf, "spine", "10us"));
        for host in [2 * rack, 2 * rack + 1] {
            text += &(topology::host(host) + &topology::link(&format!("h{host}"), &leaf, "10us"));
        }
    }
    let aggregators = ["leaf0", "leaf1", "spine"].iter().enumerate();
    text += &aggregators.map(|(at, switch)| topology::aggregator(at, switch)).collect::<String>();
    Settings { source_ports: None, ..settings_of(&text) }
}

const ABOVE: usize = 2;

fn machine(at: usize, granted: &[u64]) -> v1::Hello {
    v1::Hello { host: format!("agg{at}"), listen: format!("10.0.0.9{at}:7400"), ..aggregator(granted) }
}

fn machines(world: &mut World) -> [SessionId; 3] {
    [0, 1, 2].map(|at| world.hello(machine(at, &[])))
}

/// The one grant that each of the machines got.
fn granted(world: &mut World, machines: [SessionId; 3]) -> [v1::GrantAggregation; 3] {
    machines.map(|machine| {
        let [grant] = grants(world, machine).try_into().unwrap();
        grant
    })
}

#[test]
fn each_aggregator_has_its_grant_and_its_parent() {
    let mut world = World::new(settings(), 1);
    let machines = machines(&mut world);
    let sessions = world.connect((0..4).map(|host| able(host, vec![])));
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    let told = granted(&mut world, machines);
    let number = told[0].communicator;
    let secrets = told.each_ref().map(|grant| <[u8; 32]>::try_from(grant.secret.clone()).unwrap());
    assert!(secrets[0] != secrets[1] && secrets[1] != secrets[ABOVE] && secrets[0] != secrets[ABOVE]);
    for (at, grant) in told.iter().enumerate() {
        assert_eq!((grant.communicator, grant.workers), (number, 2), "{grant:?}");
        assert_eq!((&grant.form, grant.chunk_elements), (&told[0].form, told[0].chunk_elements));
        let parent = (at != ABOVE).then(|| v1::ParentAggregator {
            address: "10.0.0.92:7400".to_owned(),
            worker: at as u32,
            key: worker_key(&secrets[ABOVE], GrantId(number), at as u16).to_vec(),
        });
        assert_eq!(grant.parent, parent);
    }
    for (host, recipe) in recipes.iter().enumerate() {
        let (rack, place) = (host / 2, host % 2);
        let heard = recipe.aggregation.clone().unwrap();
        assert_eq!((heard.address, heard.communicator), (format!("10.0.0.9{rack}:7400"), number));
        assert_eq!((heard.worker, heard.workers), (host as u32, 4), "of the whole");
        assert_eq!(heard.branch, Some(v1::Branch { worker: place as u32, workers: 2 }));
        assert_eq!(heard.key, worker_key(&secrets[rack], GrantId(number), place as u16));
        assert!(heard.small_operations && !heard.barriers && heard.broadcast_max_bytes == 0);
    }
    let id = recipes[0].communicator;
    world.prepare(&sessions, id, 1);
    let shown = plan(&world, id);
    assert_eq!(shown.aggregator, "agg2 above agg0, agg1");
    assert!(shown.aggregation_reason.contains("agg2 at spine above agg0 at leaf0"), "{shown:?}");
    let fabric = world.state.queries(world.now).topology().aggregators;
    assert!(fabric.iter().zip(&told).all(|(one, told)| {
        one.communicators == 1 && one.guaranteed_units == told.guaranteed_units && told.guaranteed_units >= 2
    }));
    assert!(world.dissolve(id));
    world.wait(SECOND * 5);
    for machine in machines {
        assert_eq!(revoked(&mut world, machine), [number]);
    }
}

#[test]
fn one_refusal_revokes_all_and_hosts_sum() {
    for refuses in 0..3 {
        let mut world = World::new(settings(), 2);
        let machines = machines(&mut world);
        let sessions = world.connect((0..4).map(|host| able(host, vec![])));
        let id = world.form(&sessions, "world");
        let number = granted(&mut world, machines)[0].communicator;
        answer(&mut world, machines[refuses], number, "no room");
        for (at, machine) in machines.into_iter().enumerate() {
            let expected = if at == refuses { vec![] } else { vec![number] };
            assert_eq!(revoked(&mut world, machine), expected, "{refuses} refuses");
        }
        let shown = plan(&world, id);
        assert_eq!(shown.aggregator, "");
        assert_eq!(shown.aggregation_reason, format!("agg{refuses} refused: no room"));
        // Words of the others come too late to matter.
        answer(&mut world, machines[(refuses + 1) % 3], number, "");
        answer(&mut world, machines[(refuses + 2) % 3], number, "neither here");
        assert_eq!(plan(&world, id).aggregation_reason, format!("agg{refuses} refused: no room"));
    }
}

#[test]
fn a_restarted_aggregator_alone_gets_its_grant_again() {
    let mut world = World::new(settings(), 3);
    let mut machines = machines(&mut world);
    let sessions = world.connect((0..4).map(|host| able(host, vec![])));
    world.form(&sessions, "world");
    let told = granted(&mut world, machines);
    for at in 0..3 {
        world.gone(machines[at]);
        machines[at] = world.hello(machine(at, &[told[at].communicator]));
        assert_eq!(grants(&mut world, machines[at]), [], "it serves on");
        world.gone(machines[at]);
        machines[at] = world.hello(machine(at, &[]));
        assert_eq!(grants(&mut world, machines[at]), [told[at].clone()]);
        world.wait(SECOND * 10);
        assert!(world.is_quiet(&machines));
    }
    assert!(world.is_quiet(&sessions));
}

#[test]
fn a_restart_of_control_knows_them_all_again() {
    let mut world = World::new(settings(), 4);
    let first = machines(&mut world);
    let sessions = world.connect((0..4).map(|host| able(host, vec![])));
    let recipes = world.join_all(&sessions, &join_of("a", "world", 0, 0));
    let number = granted(&mut world, first)[0].communicator;
    let mut world = World::new(settings(), 5);
    // Some are back before the agents, one after them.
    let [below, above] = [0, ABOVE].map(|at| world.hello(machine(at, &[number])));
    let sessions: Vec<SessionId> =
        recipes.iter().enumerate().map(|(host, recipe)| world.hello(able(host, running(recipe)))).collect();
    let last = world.hello(machine(1, &[number]));
    world.wait(SECOND * 40);
    let id = recipes[0].communicator;
    assert_eq!(plan(&world, id).aggregator, "agg0, agg1, agg2");
    let mut changes = sessions.iter().flat_map(|session| every!(world.received(*session), Change));
    assert!(changes.next().is_none(), "what runs goes on");
    assert!(world.dissolve(id));
    world.wait(SECOND * 5);
    for machine in [below, above, last] {
        assert_eq!(revoked(&mut world, machine), [number]);
    }
}
