//! A topology that is read again while communicators run: what is in use stays, and the rest comes and goes.

use super::topology::{aggregator, host, link, switch};
use super::world::{SECOND, World, hello, settings, settings_of};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, RefusedKind};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_server::state::{Settings, TopologyRefusal};
use harmonaize_store::Stored;

fn configure(world: &mut World, settings: Settings) -> Result<(), TopologyRefusal> {
    let outcome = world.state.configure(world.now, settings);
    world.run_until_quiet();
    outcome
}

fn topology(world: &World) -> v1::TopologyReply {
    world.state.queries(world.now).topology()
}

fn hosts(world: &World) -> Vec<String> {
    topology(world).hosts.into_iter().map(|host| host.name).collect()
}

/// Four hosts, each below one of two leaves. The file names all in another order than that of `settings`, and links the other way round.
fn leaves(leaf: impl Fn(usize) -> usize) -> String {
    let mut text = ["leaf1", "leaf0", "spine"].map(switch).concat();
    for number in (0..4).rev() {
        text += &host(number);
        text += &link(&format!("leaf{}", leaf(number)), &format!("h{number}"), "50us");
    }
    text + &["leaf1", "leaf0"].map(|leaf| link("spine", leaf, "50us")).concat()
}

/// Those below one leaf are next to each other.
fn side_by_side() -> String {
    leaves(|host| host / 2)
}

#[test]
fn a_host_under_a_job_cannot_go() {
    let (mut world, sessions, id) = World::formed::<3>();
    let runs_by = |world: &World| (world.epoch(id).epoch, world.epoch(id).order, world.epoch(id).links);
    let before = runs_by(&world);
    let mut fewer = settings(2);
    fewer.tenants.push("c".to_owned());
    assert_eq!(configure(&mut world, fewer), Err(TopologyRefusal::HostInUse("h2".to_owned())));
    assert_eq!(hosts(&world), ["h0", "h1", "h2", "h3"]);
    assert_eq!(world.state.queries(world.now).tenants().tenants.len(), 2, "nothing of it is in force");
    assert!(world.is_quiet(&sessions) && world.ended.is_empty());
    assert_eq!(runs_by(&world), before);
    // Once the job is over it can.
    assert!(world.dissolve(id));
    assert_eq!(configure(&mut world, settings(2)), Ok(()));
    assert_eq!((hosts(&world).len(), &world.ended), (2, &vec![sessions[2]]));
}

#[test]
fn a_host_with_ranks_by_the_store_cannot_go() {
    let (world, _, id) = World::formed::<3>();
    let mut stored = Stored::default();
    stored.apply(&world.state.plan_change(CommunicatorId(id)));
    // As a control does that follows.
    let mut follower = World::new(settings(4), 8);
    follower.state.restore(stored, Nanos(0));
    assert_eq!(configure(&mut follower, settings(2)), Err(TopologyRefusal::HostInUse("h2".to_owned())));
    assert_eq!(hosts(&follower), ["h0", "h1", "h2", "h3"]);
    assert_eq!(configure(&mut follower, settings(3)), Ok(()));
}

#[test]
fn a_host_whose_processes_join_cannot_go() {
    let mut world = World::new(settings(3), 7);
    let session = world.agent(2);
    world.join(session, "world", 0, 2);
    assert_eq!(configure(&mut world, settings(2)), Err(TopologyRefusal::HostInUse("h2".to_owned())));
    assert!(world.ended.is_empty());
}

#[test]
fn hosts_without_ranks_go_and_come_beside_a_job() {
    let (mut world, sessions, id) = World::formed::<3>();
    let runs_by = |world: &World| (world.epoch(id).epoch, world.epoch(id).order, world.epoch(id).links);
    let before = runs_by(&world);
    let spare = world.agent(3);
    assert_eq!(configure(&mut world, settings(3)), Ok(()));
    assert_eq!(only!(world.received(spare), Refused).kind(), RefusedKind::UnknownHost);
    assert_eq!((hosts(&world).len(), &world.ended), (3, &vec![spare]));
    assert!(topology(&world).links.iter().all(|link| link.from != "h3" && link.to != "h3"));
    let again = world.hello(hello(3, vec![]));
    assert_eq!(only!(world.received(again), Refused).kind(), RefusedKind::UnknownHost);
    assert_eq!(configure(&mut world, settings(5)), Ok(()));
    assert_eq!(hosts(&world), ["h0", "h1", "h2", "h3", "h4"]);
    let more = [3, 4].map(|host| world.agent(host));
    world.ignore(&sessions);
    assert_eq!(runs_by(&world), before, "the job runs on as it did");
    world.form(&[sessions[0], more[0], more[1]], "wider");
}

#[test]
fn a_plan_follows_the_links() {
    let mut world = World::new(settings(4), 7);
    let sessions: Vec<_> = (0..4).map(|host| world.agent(host)).collect();
    let id = world.form(&sessions, "world");
    // Whoever is next to another in the ring will be below the other leaf.
    let order = world.epoch(id).order;
    let leaf = |host: usize| order.iter().position(|at| *at as usize == host).unwrap() % 2;
    let text = leaves(leaf);
    world.wait(SECOND * 60);
    world.ignore(&sessions);
    assert_eq!(configure(&mut world, settings_of(&text)), Ok(()));
    world.wait(SECOND);
    let change = only!(world.received(sessions[0]), Change);
    let next = change.order.iter().skip(1).chain(change.order.first());
    let crossings =
        change.order.iter().zip(next).filter(|(from, to)| leaf(**from as usize) != leaf(**to as usize));
    assert_eq!(crossings.count(), 2);
    // Hosts are who they were, though the file has another order.
    assert_eq!(hosts(&world), ["h0", "h1", "h2", "h3"]);
    let names: Vec<String> = change.participants.into_iter().map(|part| part.host).collect();
    assert_eq!(names, ["h0", "h1", "h2", "h3"]);
}

#[test]
fn rates_change_and_the_same_file_changes_nothing() {
    let (mut world, sessions, _) = World::formed::<3>();
    assert_eq!(configure(&mut world, settings_of(&side_by_side())), Ok(()));
    world.ignore(&sessions);
    let faster = side_by_side().replace("1Gbit/s", "4Gbit/s");
    assert_eq!(configure(&mut world, settings_of(&faster)), Ok(()));
    assert!(topology(&world).links.iter().all(|link| link.capacity_bps == 4_000_000_000));
    let made =
        |world: &World| world.state.queries(world.now).plans(CommunicatorId(0)).map(|plans| plans.plans_made);
    world.wait(SECOND);
    let before = made(&world);
    assert_eq!(configure(&mut world, settings_of(&faster)), Ok(()));
    world.wait(SECOND);
    assert_eq!(made(&world), before);
}

#[test]
fn an_idle_aggregator_goes() {
    let with = side_by_side() + &aggregator(0, "spine");
    let mut world = World::new(settings_of(&with), 7);
    assert_eq!(topology(&world).aggregators.len(), 1);
    assert_eq!(configure(&mut world, settings_of(&side_by_side())), Ok(()));
    assert_eq!(topology(&world).aggregators, []);
    assert_eq!(configure(&mut world, settings_of(&with)), Ok(()));
    assert_eq!(topology(&world).aggregators[0].switch, "spine");
}
