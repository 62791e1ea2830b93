//! Workers and aggregators in virtual time, over a network that loses, repeats, mixes, damages and invents packets. They may
//! restart at any moment. Every sum is bit for bit right, nothing is lost or counted twice, and nothing hangs.
//! `HARMONAIZE_SEED=x` or `HARMONAIZE_SEEDS=a..b` chooses seeds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

#[path = "simulation/coded.rs"]
mod coded;
#[path = "simulation/describe.rs"]
mod describe;
#[path = "simulation/hostile.rs"]
mod hostile;
#[path = "simulation/node.rs"]
mod node;
#[path = "simulation/roles.rs"]
mod roles;
#[path = "simulation/scenario.rs"]
mod scenario;
#[path = "../../core/tests/simulation/seeds.rs"]
mod seeds;
#[path = "simulation/world.rs"]
mod world;

use scenario::{Incident, PATIENCE, RETRY_MOST, Scenario};
use seeds::{Seed, seeds};
use std::time::Duration;
use world::{Statistics, World};

/// Runs a family of scenarios, and returns what they came to together.
fn family(
    name: &'static str,
    usual: u64,
    build: impl Fn(u64) -> Scenario,
    judge: impl Fn(&World),
) -> Statistics {
    let (mut sum, mut count) = (Statistics::default(), 0);
    for seed in seeds(usual) {
        let _seed = Seed(name, seed);
        let mut world = World::new(build(seed));
        world.run();
        judge(&world);
        let one = world.statistics;
        sum.packets += one.packets;
        sum.lost += one.lost;
        sum.by_aggregator += one.by_aggregator;
        sum.by_hosts += one.by_hosts;
        sum.sessions += one.sessions;
        sum.tag += world.counters().iter().map(|counters| counters.tag).sum::<u64>();
        sum.hostile += one.hostile;
        sum.ahead += one.ahead;
        sum.again += world.nodes.iter().map(|node| node.worker.counters().retransmits).sum::<u64>();
        count += 1;
    }
    println!("{name}: {count} seeds, {sum:?}");
    sum
}

/// The same where losses, and whatever else there is, drive hardly anybody away.
fn undaunted(name: &'static str, usual: u64, build: impl Fn(u64) -> Scenario) -> Statistics {
    let sum = family(name, usual, build, |_| ());
    assert!(sum.by_hosts * 1000 < sum.by_aggregator, "losses alone drive nobody away: {sum:?}");
    sum
}

/// The aggregator did all.
fn unaided(world: &World) {
    assert_eq!(world.statistics.by_hosts, 0, "hosts had to help\n{world:?}");
}

/// Likewise, and nothing was odd.
fn spotless(world: &World) {
    unaided(world);
    for counters in world.counters() {
        assert_eq!((counters.no_slot, counters.tag, counters.lost), (0, 0, 0), "{world:?}");
    }
}

#[test]
fn clean() {
    let sum = family("clean", 300, Scenario::new, |world| {
        spotless(world);
        assert!(world.statistics.sessions == world.nodes.len() as u64);
    });
    assert!(sum.by_aggregator > 0, "{sum:?}");
}

#[test]
fn rough() {
    let sum = undaunted("rough", 600, |seed| Scenario::new(seed).rough());
    assert!(sum.hostile > 0 && sum.tag > 0, "nobody did harm: {sum:?}");
}

#[test]
fn restarts() {
    let sum = family("restarts", 400, |seed| Scenario::new(seed).rough().restarting(), |_| ());
    assert!(sum.by_aggregator > 0 && sum.sessions > 0);
}

/// From the kill until a question is asked, and until it is given up. Then until all have stopped and gone on, and the hosts' own time.
/// Where hosts are told that nobody is there they give it up sooner.
fn soon(world: &World) {
    let told = world.scenario.refusing && world.scenario.leaves == 0;
    let patience = if told { PATIENCE / 5 } else { PATIENCE };
    let bound = RETRY_MOST + patience + RETRY_MOST + Duration::from_millis(2);
    if let (Some(killed), Some(recovered)) = (world.killed, world.recovered) {
        assert!(recovered - killed <= bound, "{:?} from the kill\n{world:?}", recovered - killed);
    }
}

/// In whatever state segments are: an aggregator dies before each packet of a run in turn.
#[test]
fn a_kill_at_any_packet_is_made_good_in_time() {
    let flat = || {
        let plain = Scenario { workers: 3, leaves: 0, direct: 0, elements: 4, units: 6, ..Scenario::new(1) };
        Scenario { segments: vec![31, 12], ordered: false, ..plain }
    };
    let tree = || Scenario { workers: 6, leaves: 2, direct: 2, ..flat() };
    let shapes: [(&str, &dyn Fn() -> Scenario); 3] =
        [("flat", &flat), ("tree", &tree), ("coded", &|| flat().coded())];
    for (name, scenario) in shapes {
        let mut whole = World::new(scenario());
        whole.run();
        assert_eq!(whole.statistics.by_hosts, 0, "{name}: hosts had to help");
        let (packets, mut by_hosts) = (whole.statistics.packets, 0);
        for (at, aggregator) in (0..packets).flat_map(|at| (0..=scenario().leaves).map(move |one| (at, one)))
        {
            println!("{name}: aggregator {aggregator} dies before packet {at} of {packets}");
            let mut killed = scenario();
            killed.incidents.push((at, Incident::KillAggregator(aggregator)));
            let mut world = World::new(killed);
            world.run();
            soon(&world);
            by_hosts += world.statistics.by_hosts;
        }
        assert!(
            packets > 40 && by_hosts > packets,
            "{name}: {by_hosts} segments by hosts, {packets} packets"
        );
    }
}

#[test]
fn kills() {
    let sum = family("kills", 400, |seed| Scenario::new(seed).killing(), soon);
    assert!(sum.by_hosts > 0);
    let sum = family("kills", 300, |seed| Scenario::new(seed).killing().refusing(), soon);
    assert!(sum.by_hosts > 0);
    // Who lies that nobody is there drives nobody away.
    undaunted("rough", 200, |seed| Scenario::new(seed).rough().refusing());
    family("kills", 200, |seed| Scenario::new(seed).rough().killing().refusing(), |_| ());
    // Somebody sends what the dead one sent, again and again.
    family("kills", 200, |seed| Scenario::new(seed).killing().replaying(), soon);
    family("kills", 200, |seed| Scenario::new(seed).rough().killing(), |_| ());
}

#[test]
fn stragglers() {
    // Who waits is answered, and stays.
    family("stragglers", 200, |seed| Scenario::new(seed).straggling(), unaided);
    undaunted("stragglers", 200, |seed| Scenario::new(seed).rough().straggling());
}

#[test]
fn squeezed() {
    undaunted("squeezed", 300, |seed| Scenario::new(seed).rough().squeezed());
}

/// Sums of codes, whose ranges all agree on first: the same bits everywhere, whatever happens.
#[test]
fn coded() {
    let sum = family("coded", 200, |seed| Scenario::new(seed).coded(), spotless);
    assert!(sum.by_aggregator > 0 && sum.again == 0, "{sum:?}");
    undaunted("coded", 300, |seed| Scenario::new(seed).coded().rough());
    let sum = family("coded", 300, |seed| Scenario::new(seed).coded().rough().restarting(), |_| ());
    assert!(sum.by_aggregator > 0 && sum.sessions > 0);
    let sum = family("coded", 300, |seed| Scenario::new(seed).coded().rough().killing(), |_| ());
    assert!(sum.by_hosts > 0);
    undaunted("coded", 200, |seed| Scenario::new(seed).coded().rough().squeezed().straggling());
}

/// What one worker has goes to all, and all wait for each other, among sums: whatever happens.
#[test]
fn mixed() {
    let sum = family(
        "mixed",
        300,
        |seed| Scenario::new(seed).mixed(),
        |world| {
            unaided(world);
            for counters in world.counters() {
                assert_eq!((counters.size, counters.tag, counters.lost), (0, 0, 0), "{world:?}");
            }
        },
    );
    assert!(sum.by_aggregator > 0, "{sum:?}");
    undaunted("mixed", 400, |seed| Scenario::new(seed).mixed().rough());
    let sum = family("mixed", 400, |seed| Scenario::new(seed).mixed().rough().restarting(), |_| ());
    assert!(sum.by_aggregator > 0 && sum.sessions > 0);
    let sum = family("mixed", 400, |seed| Scenario::new(seed).mixed().killing(), soon);
    assert!(sum.by_hosts > 0);
    family("mixed", 200, |seed| Scenario::new(seed).mixed().rough().killing().replaying(), |_| ());
    // Who has it early does not wait for who comes late.
    let sum = undaunted("mixed", 300, |seed| Scenario::new(seed).mixed().rough().straggling());
    assert!(sum.ahead > 0, "{sum:?}");
    undaunted("mixed", 300, |seed| Scenario::new(seed).mixed().rough().squeezed());
}

/// Segments of another reduction among those of the form, also by aggregators above others.
#[test]
fn reduced() {
    let sum = family("reduced", 200, |seed| Scenario::new(seed).reduced(), unaided);
    assert!(sum.by_aggregator > 0, "{sum:?}");
    undaunted("reduced", 300, |seed| Scenario::new(seed).reduced().rough());
    family("reduced", 300, |seed| Scenario::new(seed).reduced().rough().restarting(), |_| ());
    let sum = family("reduced", 200, |seed| Scenario::new(seed).reduced().killing(), soon);
    assert!(sum.by_hosts > 0);
}

/// Most workers that there can be, below two aggregators and below one.
#[test]
fn as_many_as_there_can_be() {
    for leaves in [0, 2] {
        let mut scenario = Scenario::new(1).rough();
        (scenario.workers, scenario.leaves, scenario.elements, scenario.units) = (1024, leaves, 4, 8);
        (scenario.segments, scenario.ordered) = (vec![10, 9], false);
        let mut world = World::new(scenario);
        world.run();
        assert!(world.statistics.by_aggregator >= 2048, "{:?}", world.statistics);
    }
}

/// A question that is lost is asked again soon. How long sums take, most of which wait for somebody's lost part, says nothing of how long
/// an answer takes.
#[test]
fn lost_requests_delay_little() {
    let scenario = |seed: u64, loss: u32| {
        let mut scenario = Scenario::new(seed);
        (scenario.ordered, scenario.leaves) = (false, 0);
        (scenario.workers, scenario.units, scenario.loss) = (4, 32, loss);
        scenario.segments = vec![u64::from(scenario.elements) * 500];
        scenario
    };
    let median = |loss: u32| {
        let mut times = Vec::new();
        for seed in seeds(30) {
            let _seed = Seed("lost_questions", seed);
            let mut world = World::new(scenario(seed, loss));
            world.run();
            unaided(&world);
            times.push(world.now);
        }
        times.sort_unstable();
        times[times.len() / 2]
    };
    let [none, some, many] = [0, 100, 500].map(median);
    println!("500 chunks: {none:?}, with 1% of packets lost {some:?}, with 5% {many:?}");
    assert!(some < 3 * none && many < 20 * none, "{none:?} {some:?} {many:?}");
}
