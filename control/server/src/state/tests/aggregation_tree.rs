//! Aggregators above and below each other: what each is told, and that they come and go together.

use super::aggregation::{aggregator, answer, grants, join_all, plan, revoked};
use super::world::{SECOND, World, hello, settings_of};
use crate::state::{SessionId, Settings};
use harmonaize_aggregator::worker_key;
use harmonaize_api::v1::{self, to_agent};

/// Two racks of two, uplinks no wider than a host's link, an aggregator at each leaf and, the last, at the spine.
fn settings() -> Settings {
    let mut text = "[[switch]]\nname = \"spine\"\n".to_owned();
    let link = |from: &str, to: &str| {
        format!("[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nrate = \"1Gbit/s\"\ndelay = \"10us\"\n")
    };
    for rack in 0..2 {
        let leaf = format!("leaf{rack}");
        text += &format!("[[switch]]\nname = \"{leaf}\"\n{}", link(&leaf, "spine"));
        for host in [2 * rack, 2 * rack + 1] {
            text += &format!("[[host]]\nname = \"h{host}\"\n{}", link(&format!("h{host}"), &leaf));
        }
    }
    for (at, switch) in ["leaf0", "leaf1", "spine"].iter().enumerate() {
        text += &format!("[[aggregator]]\nname = \"agg{at}\"\nswitch = \"{switch}\"\nrate = \"4Gbit/s\"\n");
    }
    Settings { source_ports: None, ..settings_of(&text) }
}

const ABOVE: usize = 2;

fn machine(at: usize, granted: &[u64]) -> v1::Hello {
    v1::Hello { host: format!("agg{at}"), listen: format!("10.0.0.9{at}:7400"), ..aggregator(granted) }
}

fn able(host: usize, running: Vec<v1::Recipe>) -> v1::Hello {
    let abilities = v1::Capabilities { aggregation: true, ..v1::Capabilities::default() };
    v1::Hello { abilities: Some(abilities), ..hello(host, running) }
}

fn machines(world: &mut World) -> [SessionId; 3] {
    [0, 1, 2].map(|at| world.hello(machine(at, &[])))
}

fn agents(world: &mut World, hello: impl Fn(usize) -> v1::Hello) -> Vec<SessionId> {
    let sessions: Vec<SessionId> = (0..4).map(|host| world.hello(hello(host))).collect();
    sessions.iter().for_each(|session| drop(world.received(*session)));
    sessions
}

/// The one grant that each of the machines got.
fn granted(world: &mut World, machines: [SessionId; 3]) -> [v1::GrantAggregation; 3] {
    machines.map(|machine| {
        let [grant] = grants(world, machine).try_into().unwrap();
        grant
    })
}

#[test]
fn each_is_told_its_own_and_those_below_whom_they_are_to_the_one_above() {
    let mut world = World::new(settings(), 1);
    let machines = machines(&mut world);
    let sessions = agents(&mut world, |host| able(host, vec![]));
    let recipes = join_all(&mut world, &sessions, "a");
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
            key: worker_key(&secrets[ABOVE], number, at as u16).to_vec(),
        });
        assert_eq!(grant.parent, parent);
    }
    for (host, recipe) in recipes.iter().enumerate() {
        let (rack, place) = (host / 2, host % 2);
        let heard = recipe.aggregation.clone().unwrap();
        assert_eq!((heard.address, heard.communicator), (format!("10.0.0.9{rack}:7400"), number));
        assert_eq!((heard.worker, heard.workers), (host as u32, 4), "of the whole");
        assert_eq!(heard.branch, Some(v1::Branch { worker: place as u32, workers: 2 }));
        assert_eq!(heard.key, worker_key(&secrets[rack], number, place as u16));
        assert!(heard.at_once && !heard.barriers && heard.broadcast_most_bytes == 0);
    }
    let id = recipes[0].communicator;
    world.prepare(&sessions, id, 1);
    let shown = plan(&world, id);
    assert_eq!(shown.aggregator, "agg2 above agg0, agg1");
    assert!(shown.aggregation_reason.contains("agg2 at spine above agg0 at leaf0"), "{shown:?}");
    let fabric = world.state.topology_reply(world.now).aggregators;
    assert!(fabric.iter().zip(&told).all(|(one, told)| {
        one.communicators == 1 && one.guaranteed == told.guaranteed && told.guaranteed >= 2
    }));
    assert!(world.state.dissolve(world.now, id, "over"));
    world.wait(SECOND * 5);
    for machine in machines {
        assert_eq!(revoked(&mut world, machine), [number]);
    }
}

#[test]
fn where_one_refuses_the_others_are_let_go_and_hosts_sum() {
    for refuses in 0..3 {
        let mut world = World::new(settings(), 2);
        let machines = machines(&mut world);
        let sessions = agents(&mut world, |host| able(host, vec![]));
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
fn any_that_starts_again_is_told_its_own_again_and_nobody_else_hears_of_it() {
    let mut world = World::new(settings(), 3);
    let mut machines = machines(&mut world);
    let sessions = agents(&mut world, |host| able(host, vec![]));
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
        for machine in machines {
            assert!(world.received(machine).is_empty());
        }
    }
    assert!(sessions.iter().all(|session| world.received(*session).is_empty()));
}

#[test]
fn a_restart_of_control_knows_them_all_again() {
    let mut world = World::new(settings(), 4);
    let first = machines(&mut world);
    let sessions = agents(&mut world, |host| able(host, vec![]));
    let recipes = join_all(&mut world, &sessions, "a");
    let number = granted(&mut world, first)[0].communicator;
    let mut world = World::new(settings(), 5);
    let running = |recipe: &v1::Recipe| {
        let aggregation = recipe.aggregation.clone().map(|told| v1::Aggregation { key: vec![], ..told });
        vec![v1::Recipe { peers: vec![], aggregation, ..recipe.clone() }]
    };
    // Some are back before the agents, one after them.
    let [below, above] = [0, ABOVE].map(|at| world.hello(machine(at, &[number])));
    let sessions: Vec<SessionId> =
        recipes.iter().enumerate().map(|(host, recipe)| world.hello(able(host, running(recipe)))).collect();
    let last = world.hello(machine(1, &[number]));
    world.wait(SECOND * 40);
    let id = recipes[0].communicator;
    assert_eq!(plan(&world, id).aggregator, "agg0, agg1, agg2");
    let changes = |world: &mut World, session: &SessionId| {
        let heard = world.received(*session).into_iter();
        heard.filter(|message| matches!(message, to_agent::Message::Change(_))).count()
    };
    assert!(sessions.iter().all(|session| changes(&mut world, session) == 0), "what runs goes on");
    assert!(world.state.dissolve(world.now, id, "over"));
    world.wait(SECOND * 5);
    for machine in [below, above, last] {
        assert_eq!(revoked(&mut world, machine), [number]);
    }
}
