//! Communicators in virtual time. Participants have real memory, and the network every delay that a seed can think of.
//! What can go wrong does, each with what must be reported of it. `HARMONAIZE_SEED=x` or `HARMONAIZE_SEEDS=a..b` chooses
//! seeds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "simulation/aggregator.rs"]
mod aggregator;
#[path = "simulation/coded.rs"]
mod coded;
#[path = "simulation/execute.rs"]
mod execute;
#[path = "simulation/faults.rs"]
mod faults;
#[path = "simulation/hostile.rs"]
mod hostile;
#[path = "simulation/interleave.rs"]
mod interleave;
#[path = "simulation/memory.rs"]
mod memory;
#[path = "simulation/network.rs"]
mod network;
#[path = "simulation/node.rs"]
mod node;
#[path = "simulation/p2p.rs"]
mod p2p;
#[path = "simulation/scenario.rs"]
mod scenario;
#[path = "simulation/seeds.rs"]
mod seeds;
#[path = "simulation/statistics.rs"]
mod statistics;
#[path = "simulation/world.rs"]
mod world;

use harmonaize_abi::{ChannelId, Direction, Dtype, Nanos, OperationId, P2pSignature, Rank, Token};
use harmonaize_core::{Action, Failure, Header, Kind, P2pCall, Payload};
use harmonaize_plan::Participant;
use node::Outcome;
use scenario::{Incident, MILLISECOND, SECOND, Scenario, nanos};
use seeds::{Seed, seeds};
use statistics::Statistics;
use std::collections::{BTreeSet, HashSet};
use std::time::Duration;
use world::World;

/// Runs a family: builds each seed's scenario, runs it, judges it, and prints what it came to.
fn family(
    name: &'static str,
    usual: u64,
    faulty: bool,
    build: impl Fn(u64) -> Scenario,
    judge: impl Fn(&World),
) -> Statistics {
    let mut sum = Statistics::default();
    let mut count = 0;
    for seed in seeds(usual) {
        let _seed = Seed(name, seed);
        let mut world = World::new(build(seed), faulty);
        world.run();
        judge(&world);
        sum.add(&world.statistics);
        count += 1;
    }
    println!("{name}: {count} seeds, {sum}");
    sum
}

/// On a rough network; every other seed changes plans.
fn rough_and_changing(seed: u64) -> Scenario {
    let scenario = Scenario::new(seed, 2).rough();
    if seed.is_multiple_of(2) { scenario } else { scenario.changing() }
}

/// How a participant's communicator failed, and when.
fn failure_of<'a>(world: &World, node: &'a node::Node) -> &'a (Failure, u64) {
    node.failure.as_ref().unwrap_or_else(|| panic!("no end\n{}", world.describe()))
}

/// Everything ended well, everybody has closed, and all switched alike.
fn well(world: &World) {
    agreed(world);
    // Later than this, only an inquiry can have moved what had stopped.
    let bound = nanos(world.scenario.timeouts[0]);
    assert!(world.last < bound, "it took until {}\n{}", world.last, world.describe());
    for (index, node) in world.nodes.iter().enumerate() {
        assert!(node.closed, "participant {index} never finished\n{}", world.describe());
    }
    for (rank, state) in world.ranks.iter().enumerate() {
        let acts = world.scenario.scripts[rank].acts.len();
        assert!(state.outcomes.len() == acts, "rank {rank} lacks completions");
        assert!(world.has_messaged(Rank(rank as u32)), "rank {rank} lacks messages\n{}", world.describe());
    }
}

#[test]
fn clean() {
    let sum = family("clean", 150, false, |seed| Scenario::new(seed, 1), well);
    assert!(sum.posted > 0, "no payload went straight to its place");
}

#[test]
fn rough() {
    family("rough", 125, false, |seed| Scenario::new(seed, 1).rough(), well);
}

#[test]
fn change() {
    let sum = family("change", 125, false, |seed| Scenario::new(seed, 1).changing(), well);
    assert!(sum.switches > 0, "no plan was ever changed");
}

#[test]
fn carried() {
    let sum = family("carried", 200, false, |seed| Scenario::new(seed, 2).changing().carrying(), well);
    assert!(sum.switches > 0 && sum.carried > 0, "no link was ever carried over");
}

/// Messages from rank to rank, beside collectives and whatever else changes.
#[test]
fn p2p() {
    let build = |seed| match seed % 6 {
        0 => Scenario::new(seed, 1),
        1 => Scenario::new(seed, 1).rough(),
        2 => Scenario::new(seed, 2).changing(),
        3 => Scenario::new(seed, 2).rough().changing().carrying(),
        4 => Scenario::new(seed, 2).changing().carrying().unlinkable(),
        _ => Scenario::new(seed, 2).rough().changing().aggregating(true),
    };
    let sum = family("p2p", 200, false, |seed| build(seed).messaging(), well);
    assert!(sum.messages > 0 && sum.pieces > sum.messages && sum.switches > 0, "{sum}");
}

/// Turns end in the midst of steps and copies, and whatever happens meanwhile is told. Now and then words go before all else.
#[test]
fn sliced() {
    let build = |seed| match seed % 4 {
        0 => Scenario::new(seed, 1),
        1 => Scenario::new(seed, 1).rough(),
        2 => Scenario::new(seed, 2).changing().carrying(),
        _ => Scenario::new(seed, 2).rough().changing().messaging(),
    };
    let sum = family("sliced", 200, false, |seed| build(seed).sliced(), well);
    assert!(sum.slices > 0 && sum.control_messages > 0 && sum.switches > 0 && sum.messages > 0, "{sum}");
}

#[test]
fn p2p_death() {
    let build = |seed| {
        let scenario = Scenario::new(seed, 2).rough().sometimes_changing();
        scenario.messaging().killing()
    };
    let sum = family("p2p_death", 300, true, build, mourned);
    assert!(sum.messages > 0 && sum.failures > 0, "{sum}");
}

#[test]
fn p2p_process_dies() {
    family(
        "p2p_process_dies",
        200,
        true,
        |seed| Scenario::of_two_ranks(seed).rough().sometimes_changing().messaging().rank_dying(),
        |world| {
            let Some((_, Incident::RankGone(gone))) = world.scenario.incidents.last() else { unreachable!() };
            missed(world, *gone);
        },
    );
}

#[test]
fn p2p_abort() {
    let build = |seed| Scenario::of_two_ranks(seed).rough().sometimes_changing().messaging().aborting();
    let sum = family("p2p_abort", 200, true, build, aborted);
    assert!(sum.failures > 0 && sum.messages > 0, "{sum}");
}

/// Both ends of a message give other counts: everybody learns who gave which.
#[test]
fn p2p_mismatch() {
    family(
        "p2p_mismatch",
        200,
        true,
        |seed| Scenario::of_two_ranks(seed).sometimes_changing().messaging().with_a_wrong_message(),
        |world| {
            for node in &world.nodes {
                let (failure, _) = failure_of(world, node);
                let Failure::P2pMismatch { sent, received, .. } = failure else {
                    // Where somebody receives from anybody.
                    assert!(!world.scenario.names_senders(), "{failure}\n{}", world.describe());
                    continue;
                };
                assert!(sent != received, "{failure}");
            }
        },
    );
}

/// Nobody sends, or nobody receives: the time-out says who.
#[test]
fn p2p_never_called() {
    family(
        "p2p_never_called",
        100,
        true,
        |seed| Scenario::of_two_ranks(seed).sometimes_changing().messaging().with_half_a_message(),
        |world| {
            // The last acknowledgements of collectives are progress, too.
            let bound = world.active + nanos(patience(world)) + 200 * MILLISECOND;
            for node in &world.nodes {
                let (failure, at) = failure_of(world, node);
                let Failure::P2pTimeout { rank, call, missing } = failure else {
                    panic!("{failure}\n{}", world.describe());
                };
                let right = call.peer.is_none_or(|peer| *missing == [peer]);
                assert!(right && *at <= bound, "{rank} {call} {missing:?} at {at}");
            }
        },
    );
}

#[test]
fn coded() {
    let sum = family("coded", 200, false, |seed| Scenario::new(seed, 2).coding(), well);
    assert!(sum.coded > 0, "nothing was ever coded");
}

/// From exact to coded and to another codec in the midst of operations.
#[test]
fn coded_change() {
    let build = |seed| {
        let scenario = Scenario::new(seed, 2).changing();
        if seed % 2 == 0 { scenario.coding() } else { scenario.carrying().coding() }
    };
    let sum = family("coded_change", 125, false, build, well);
    assert!(sum.coded > 0 && sum.switches > 0, "nothing was coded, or no plan changed");
}

/// An aggregator that dies, comes back and loses sessions at any time.
#[test]
fn aggregated() {
    let build = |seed| match seed % 4 {
        0 => Scenario::new(seed, 2).aggregating(false),
        1 => Scenario::new(seed, 2).aggregating(true),
        2 => Scenario::new(seed, 2).rough().aggregating(true),
        _ => Scenario::new(seed, 2).changing().carrying().aggregating(true),
    };
    let sum = family("aggregated", 300, false, build, well);
    assert!(sum.aggregated > 0 && sum.again > sum.restored && sum.restored > 0 && sum.switches > 0, "{sum}");
    assert!(sum.copied_late > 0, "{sum}");
}

/// A segment of the session before waits for an acknowledgement that is late, with the index that one of this session has.
#[test]
fn an_index_is_of_one_session() {
    let mut world = World::new(Scenario::new(1274, 2).rough().aggregating(true), false);
    world.run();
    well(&world);
}

/// Participants go on as other processes, at any time: nothing fails, and what was being aggregated is done by hosts.
#[test]
fn succeeded() {
    let build = |seed| match seed % 4 {
        0 => Scenario::new(seed, 2).succeeding(),
        1 => Scenario::new(seed, 2).aggregating(false).succeeding(),
        2 => Scenario::new(seed, 2).rough().aggregating(true).succeeding(),
        _ => Scenario::new(seed, 2).changing().carrying().aggregating(false).succeeding(),
    };
    let sum = family("succeeded", 200, false, build, well);
    assert!(sum.aggregated > 0 && sum.again > 0 && sum.switches > 0, "{sum}");
}

/// The longest that a call took.
fn longest(scenario: Scenario) -> (u64, Statistics) {
    let mut world = World::new(scenario, false);
    world.run();
    well(&world);
    let ends = world.ranks.iter().flat_map(|rank| rank.outcomes.values());
    (ends.map(|(_, at)| *at).max().unwrap(), world.statistics)
}

/// When the aggregator dies in an operation, it takes at most 200 ms more than by hosts alone. A twentieth is for chance.
#[test]
fn an_operation_in_which_the_aggregator_dies_is_little_longer() {
    let mut sum = Statistics::default();
    for seed in seeds(12) {
        let _seed = Seed("aggregator_dies", seed);
        let scenario = Scenario::new(seed, 3);
        if scenario.group.participants() > 5 {
            continue;
        }
        let (by_hosts, _) = longest(scenario.clone().long(false));
        let (by_aggregator, _) = longest(scenario.clone().long(true));
        assert!(by_hosts > SECOND, "{by_hosts} ns, {by_aggregator} by the aggregator");
        for tenths in [0, 1, 5, 9] {
            let mut killed = scenario.clone().long(true);
            let at = by_aggregator / 10 * tenths;
            killed.incidents.push((at, Incident::Aggregator { dead: true }));
            let (took, statistics) = longest(killed);
            let bound = by_hosts.max(by_aggregator) / 20 * 21 + 200 * MILLISECOND;
            assert!(
                took < bound,
                "killed at {at} it took {took} ns, {by_hosts} by hosts and {by_aggregator} by the aggregator"
            );
            sum.add(&statistics);
        }
    }
    assert!(sum.again > 0 && sum.probes > 20, "{} knocks, {sum}", sum.probes);
}

#[test]
fn aggregated_death() {
    let build = |seed| rough_and_changing(seed).killing().aggregating(seed % 3 > 0);
    let sum = family("aggregated_death", 300, true, build, mourned);
    assert!(sum.aggregated > 0 && sum.failures > 0, "{sum}");
}

/// Operations wait for turns that are never given, late, or twice, beside changes of plan and aggregation. Every turn that is asked for
/// ends.
#[test]
fn turning() {
    let build = |seed| match seed % 5 {
        0 => Scenario::new(seed, 1).turning(),
        1 => Scenario::new(seed, 2).rough().turning(),
        2 => Scenario::new(seed, 2).changing().turning(),
        3 => Scenario::new(seed, 2).changing().carrying().turning(),
        _ => Scenario::new(seed, 2).rough().aggregating(true).turning(),
    };
    let sum = family("turning", 250, false, build, |world| {
        well(world);
        let open = world.nodes.iter().find(|node| node.slot_requests.open.is_some());
        // Who has left ends as it is: whoever gives turns hears of that.
        assert!(open.is_none_or(|node| node.closed), "a turn never ends");
        // Seven operations at most wait, each no longer than its patience.
        assert!(world.last < 5 * SECOND, "it took until {}\n{}", world.last, world.describe());
    });
    assert!(sum.slots[0] > sum.slots[1] && sum.slots[1] > 0 && sum.switches > 0, "{sum}");
}

#[test]
fn turning_death() {
    let build = |seed| rough_and_changing(seed).killing().turning();
    let sum = family("turning_death", 250, true, build, mourned);
    assert!(sum.slots[0] > 0 && sum.failures > 0, "{sum}");
}

#[test]
fn direct() {
    let build = |seed| match seed % 3 {
        0 => Scenario::new(seed, 2).rough().direct(),
        1 => Scenario::new(seed, 2).changing().direct(),
        _ => Scenario::new(seed, 2).changing().carrying().direct(),
    };
    let sum = family("direct", 125, false, build, well);
    assert!(sum.one_two_shot.iter().all(|count| *count > 0) && sum.switches > 0, "{sum}");
}

#[test]
fn direct_death() {
    let build = |seed| rough_and_changing(seed).killing().direct();
    let sum = family("direct_death", 200, true, build, mourned);
    assert!(sum.one_two_shot.iter().all(|count| *count > 0) && sum.failures > 0, "{sum}");
}

#[test]
fn recursive() {
    let build = |seed| match seed % 3 {
        0 => Scenario::new(seed, 2).rough().recursive(),
        1 => Scenario::new(seed, 2).changing().recursive(),
        _ => Scenario::new(seed, 2).changing().carrying().recursive(),
    };
    let sum = family("recursive", 100, false, build, well);
    assert!(sum.recursive.iter().all(|count| *count > 0) && sum.switches > 0, "{sum}");
}

#[test]
fn recursive_death() {
    let build = |seed| rough_and_changing(seed).killing().recursive();
    let sum = family("recursive_death", 150, true, build, mourned);
    assert!(sum.recursive.iter().all(|count| *count > 0) && sum.failures > 0, "{sum}");
}

#[test]
fn coded_death() {
    let build = |seed| rough_and_changing(seed).killing().coding();
    family("coded_death", 200, true, build, mourned);
}

#[test]
fn carried_and_given_up() {
    let build = |seed| Scenario::new(seed, 2).changing().carrying().unlinkable();
    family("carried_and_given_up", 200, false, build, well);
}

fn cutting(seed: u64) -> Scenario {
    Scenario::new(seed, 2).changing().carrying().cutting()
}

/// Whoever lost a peer says so soon; nobody else hangs.
fn parted(world: &World) {
    agreed(world);
    assert!(world.last < 5 * SECOND, "it took until {}\n{}", world.last, world.describe());
    for (index, node) in world.nodes.iter().enumerate() {
        match &node.failure {
            None => assert!(node.closed, "participant {index} hangs\n{}", world.describe()),
            Some((Failure::RanksLost { .. }, _)) => {}
            Some((other, _)) => panic!("participant {index} fails: {other}\n{}", world.describe()),
        }
    }
}

/// A new link breaks. The plan is given up, or, once it was promised, the link's ends are lost to each other.
#[test]
fn cut() {
    let sum = family("cut", 150, true, cutting, parted);
    assert!(sum.cut > 0 && sum.switches > 0, "nothing was cut, or nothing switched");
}

/// One participant ends between the commit and the end of the old epoch. A new link that is broken tells so. An
/// old link breaks while a third plan takes over, with segments left that need it.
#[test]
fn cut_while_two_plans_are_in_force() {
    for seed in [1267, 2005] {
        let _seed = Seed("cut", seed);
        let mut world = World::new(cutting(seed), true);
        world.run();
        parted(&world);
    }
}

/// All who switched did so at the same segment.
fn agreed(world: &World) {
    for plan in &world.plans {
        let mut points: Vec<_> =
            world.nodes.iter().filter_map(|node| node.switched.get(&plan.epoch)).collect();
        points.dedup();
        assert!(points.len() <= 1, "epoch {} begins at {points:?}", plan.epoch);
    }
}

#[test]
fn given_up() {
    family(
        "given_up",
        150,
        false,
        |seed| Scenario::new(seed, 2).changing().unlinkable(),
        |world| {
            well(world);
            for (epoch, _) in &world.scenario.unlinkable {
                let switched = world.nodes.iter().any(|node| node.switched.contains_key(epoch));
                assert!(!switched, "a plan is in force that a participant could not prepare");
            }
        },
    );
}

/// Every survivor ended well, or names ranks of participants that died, within a bounded time; all switched alike.
fn mourned(world: &World) {
    agreed(world);
    assert!(world.last < 5 * SECOND, "it took until {}\n{}", world.last, world.describe());
    let mut dead = Vec::new();
    let mut last = 0;
    for (at, incident) in &world.scenario.incidents {
        if let Incident::Kill(p) = incident {
            dead.push(world.scenario.group.local(*p).to_vec());
            last = last.max(*at);
        }
    }
    let all: BTreeSet<Rank> = dead.iter().flatten().copied().collect();
    for (index, node) in world.nodes.iter().enumerate().filter(|(_, node)| node.alive) {
        let ranks = match &node.failure {
            None => {
                assert!(node.closed, "participant {index} hangs\n{}", world.describe());
                continue;
            }
            Some((Failure::RanksLost { ranks }, at)) => {
                let bound = last + world::NOTICE + 200 * MILLISECOND;
                assert!(*at <= bound, "participant {index} learns of it only at {at}, after {bound}");
                ranks
            }
            Some((other, _)) => panic!("participant {index} fails: {other}\n{}", world.describe()),
        };
        let right = !ranks.is_empty() && ranks.iter().all(|rank| all.contains(rank));
        let whole = dead.len() > 1 || dead.iter().flatten().all(|rank| ranks.contains(rank));
        let left =
            world.scenario.ranks().any(|rank| world.ranks[rank.0 as usize].gone && all.contains(&rank));
        assert!(
            right && (whole || left),
            "participant {index} names {ranks:?} of {dead:?}\n{}",
            world.describe()
        );
    }
}

#[test]
fn death() {
    family("death", 200, true, |seed| Scenario::new(seed, 2).rough().killing(), mourned);
}

#[test]
fn death_during_change() {
    let build = |seed| {
        let scenario = Scenario::new(seed, 2).rough().changing();
        if seed % 2 == 0 { scenario.killing() } else { scenario.carrying().killing() }
    };
    family("death_during_change", 200, true, build, mourned);
}

/// The longest time-out of a rank's calls.
fn patience(world: &World) -> Duration {
    world.scenario.timeouts.iter().copied().max().unwrap()
}

#[test]
fn never_called() {
    family(
        "never_called",
        150,
        true,
        |seed| {
            let scenario = Scenario::of_two_ranks(seed).sometimes_changing().silent();
            if seed % 2 == 0 { scenario } else { scenario.differently_patient() }
        },
        |world| {
            let lengths = world.scenario.scripts.iter().map(|script| script.acts.len());
            let first = lengths.min().unwrap();
            if world.statistics.failures == 0 {
                // The root of a small Broadcast need not wait for anybody.
                let mut ranks = world.ranks.iter();
                assert!(ranks.all(|rank| rank.outcomes.len() == rank.called), "{}", world.describe());
                return;
            }
            let lacks = |rank: &Rank| world.scenario.scripts[rank.0 as usize].acts.len() == first;
            let missing: Vec<Rank> = world.scenario.ranks().filter(lacks).collect();
            // Others may have ended operations for which they needed nothing of the missing.
            let ended = |operation: OperationId| {
                let mut callers = world.scenario.ranks().filter(|rank| !lacks(rank));
                callers.all(|rank| {
                    let outcome = world.ranks[rank.0 as usize].outcomes.get(&operation);
                    matches!(outcome, Some((Outcome::Complete, _)))
                })
            };
            let operation = (first as u64..).map(OperationId).find(|operation| !ended(*operation)).unwrap();
            let caller =
                world.scenario.scripts.iter().find_map(|script| script.acts.get(operation.0 as usize));
            let expected =
                Failure::Timeout { operation, signature: caller.map(|act| act.signature), missing };
            let bound =
                world.active + nanos(patience(world)) + nanos(world.scenario.inquiry) + 50 * MILLISECOND;
            for node in &world.nodes {
                let (failure, at) = failure_of(world, node);
                assert_eq!(*failure, expected, "{}", world.describe());
                assert!(*at <= bound, "at {at}, not by {bound}");
            }
        },
    );
}

#[test]
fn mismatch() {
    family(
        "mismatch",
        250,
        true,
        |seed| Scenario::of_two_ranks(seed).sometimes_changing().mismatched(),
        |world| {
            let scripts = &world.scenario.scripts;
            let differs = |operation: &usize| {
                scripts
                    .iter()
                    .any(|script| script.acts[*operation].signature != scripts[0].acts[*operation].signature)
            };
            let first = (0..scripts[0].acts.len()).find(differs).unwrap();
            let bound = world.active + 10 * nanos(world.scenario.inquiry);
            for node in &world.nodes {
                let (failure, at) = failure_of(world, node);
                assert!(*at <= bound, "at {at}, not by {bound}\n{}", world.describe());
                let Failure::Mismatch { operation, calls } = failure else {
                    panic!("{failure}\n{}", world.describe());
                };
                assert_eq!(operation.0, first as u64);
                let kinds: HashSet<_> = calls.iter().map(|(_, signature)| signature).collect();
                assert!(kinds.len() >= 2 && kinds.len() == calls.len(), "{calls:?}");
                for (rank, signature) in calls {
                    assert_eq!(scripts[rank.0 as usize].acts[first].signature, *signature, "who called what");
                }
            }
        },
    );
}

/// Whoever ends names the count, and who said what of it.
#[test]
fn counts_that_differ() {
    family(
        "counts_that_differ",
        300,
        true,
        |seed| Scenario::of_two_ranks(seed).sometimes_changing().with_a_wrong_count(),
        |world| {
            let Some((at, index, liar)) = world.scenario.wrong_count else { unreachable!() };
            let (ranks, signature) =
                (world.scenario.group.ranks(), world.scenario.scripts[0].acts[at.0 as usize].signature);
            let counts = memory::counts(world.scenario.seed, at, &signature, ranks).unwrap();
            let right = counts[index as usize];
            let wrong = if right == signature.count { 0 } else { signature.count };
            let pair = match signature.collective.is_pairwise() {
                true => (Rank(index / ranks), Some(Rank(index % ranks))),
                false => (Rank(index), None),
            };
            for node in &world.nodes {
                let (failure, _) = failure_of(world, node);
                let Failure::Counts { operation, from, to, reported } = failure else {
                    panic!("{failure}\n{}", world.describe());
                };
                assert_eq!((*operation, *from, *to), (at, pair.0, pair.1), "{}", world.describe());
                assert!(reported.len() >= 2, "{reported:?}");
                for (rank, count) in reported {
                    assert_eq!(*count, if *rank == liar { wrong } else { right }, "{rank} of {reported:?}");
                }
            }
        },
    );
}

/// Those that fail name exactly the rank that is gone; the others completed everything.
fn missed(world: &World, gone: Rank) {
    assert!(world.last < 5 * SECOND, "it took until {}\n{}", world.last, world.describe());
    for (index, node) in world.nodes.iter().enumerate() {
        match &node.failure {
            Some((failure, _)) => {
                assert_eq!(*failure, Failure::RanksLost { ranks: vec![gone] }, "{}", world.describe());
            }
            None => assert!(node.closed, "participant {index} hangs\n{}", world.describe()),
        }
    }
}

#[test]
fn one_rank_leaves_first() {
    family(
        "leaves_early",
        800,
        true,
        |seed| Scenario::of_two_ranks(seed).rough().sometimes_changing().leaving(),
        |world| {
            let shortest = world.scenario.scripts.iter().map(|script| script.acts.len()).min().unwrap();
            let left = |rank: &Rank| world.scenario.scripts[rank.0 as usize].acts.len() == shortest;
            let gone = world.scenario.ranks().find(left).unwrap();
            missed(world, gone);
            // Whoever called more than the one that left has been told.
            for rank in world.scenario.ranks().filter(|rank| *rank != gone) {
                let node = &world.nodes[world.home(rank).0 as usize];
                assert!(node.failure.is_some(), "rank {rank} was promised more operations");
            }
        },
    );
}

#[test]
fn process_dies() {
    family(
        "process_dies",
        150,
        true,
        |seed| Scenario::of_two_ranks(seed).rough().sometimes_changing().rank_dying(),
        |world| {
            let Some((_, Incident::RankGone(gone))) = world.scenario.incidents.last() else { unreachable!() };
            missed(world, *gone);
        },
    );
}

/// Everybody who had not ended well names one that aborted, or one that died, within a bounded time; nobody hangs.
fn aborted(world: &World) {
    agreed(world);
    let (mut who, mut dead, mut last) = (BTreeSet::<Rank>::new(), BTreeSet::<Rank>::new(), 0);
    for (at, incident) in &world.scenario.incidents {
        match incident {
            Incident::Abort(rank) => who.extend([rank]),
            Incident::Kill(p) => dead.extend(world.scenario.group.local(*p)),
            _ => continue,
        }
        last = last.max(*at);
    }
    for (index, node) in world.nodes.iter().enumerate().filter(|(_, node)| node.alive) {
        let Some((failure, at)) = &node.failure else {
            assert!(node.closed, "participant {index} hangs\n{}", world.describe());
            continue;
        };
        let right = match failure {
            Failure::Aborted { rank } => who.contains(rank),
            Failure::RanksLost { ranks } => ranks.iter().all(|rank| dead.contains(rank)),
            _ => false,
        };
        assert!(right, "participant {index} fails: {failure}\n{}", world.describe());
        let bound = last + world::NOTICE + 200 * MILLISECOND;
        assert!(*at <= bound, "participant {index} learns of it only at {at}, after {bound}");
    }
}

#[test]
fn abort() {
    let build = |seed| {
        let scenario = Scenario::of_two_ranks(seed).rough();
        match seed % 4 {
            0 => scenario.aborting(),
            1 => scenario.changing().aborting(),
            2 => scenario.changing().carrying().aborting(),
            _ => scenario.aborting().aggregating(true),
        }
    };
    let sum = family("abort", 300, true, build, aborted);
    assert!(sum.failures > 0 && sum.switches > 0 && sum.aggregated > 0, "{sum}");
}

#[test]
fn abort_in_the_midst_of_an_action() {
    let build = |seed| Scenario::of_two_ranks(seed).rough().sometimes_changing().aborting().sliced();
    let sum = family("abort_in_the_midst_of_an_action", 200, true, build, aborted);
    assert!(sum.failures > 0 && sum.slices > 0, "{sum}");
}

#[test]
fn abort_beside_death() {
    let build = |seed| rough_and_changing(seed).aborting().killing();
    let sum = family("abort_beside_death", 200, true, build, aborted);
    assert!(sum.failures > 0, "{sum}");
}

#[test]
fn hostile_peer() {
    family(
        "hostile_peer",
        300,
        true,
        |seed| {
            let scenario = Scenario::new(seed, 2).hostile().carrying();
            let scenario = if seed % 2 == 0 { scenario } else { scenario.messaging() };
            match seed % 3 {
                0 => scenario,
                1 => scenario.coding(),
                _ => scenario.aggregating(true),
            }
        },
        |world| {
            let incidents = world.scenario.incidents.iter().map(|(at, _)| *at).max().unwrap_or(0);
            let bound =
                world.active.max(incidents) + 2 * (nanos(patience(world)) + nanos(world.scenario.inquiry));
            for node in &world.nodes {
                assert!(node.failure.as_ref().is_none_or(|(_, at)| *at <= bound), "an end comes late");
            }
        },
    );
}

/// A peer that asks on and on costs its communicator while its link takes nothing. It costs no memory beyond a
/// bound.
#[test]
fn flooding_peer() {
    let build = |seed| {
        let scenario = Scenario::new(seed, 2);
        match seed % 4 {
            0 => scenario.flooding(),
            1 => scenario.rough().changing().flooding(),
            2 => scenario.changing().carrying().flooding(),
            _ => scenario.aggregating(true).flooding(),
        }
    };
    let sum = family("flooding_peer", 200, true, build, |world| {
        let incidents = world.scenario.incidents.iter().map(|(at, _)| *at).max().unwrap_or(0);
        let patience = 2 * (nanos(patience(world)) + nanos(world.scenario.inquiry));
        let bound = world.active.max(incidents) + patience + 50 * MILLISECOND;
        for node in &world.nodes {
            assert!(node.failure.as_ref().is_none_or(|(_, at)| *at <= bound), "an end comes late");
        }
    });
    assert!(sum.crowded > 20, "{} ended for too many questions, {sum}", sum.crowded);
}

/// Whoever offers the same message again and again, and reads none of the answers, ends its communicator.
#[test]
fn offers_without_end_are_a_breach() {
    let scenario = (0..).map(|seed| Scenario::new(seed, 2)).find(|one| one.group.participants() == 2);
    let scenario = scenario.unwrap();
    let (from, me) = (Participant(0), Participant(1));
    let (sender, receiver) = (scenario.group.local(from)[0], scenario.group.local(me)[0]);
    let mut core = node::Node::new(&scenario, me).core;
    let (direction, peer) = (Direction::Receive, Some(sender));
    let signature = P2pSignature { direction, peer, dtype: Dtype::U8, count: 8 };
    let call = P2pCall { signature, token: Token(1), timeout: Duration::from_secs(60) };
    core.handle_p2p_call(Nanos(0), receiver, call).unwrap();
    let link = scenario.plan.epoch;
    let mut header = Header::new(Kind::Offer, link);
    (header.root, header.count, header.dtype, header.segment) =
        (sender.0, receiver.0.into(), Dtype::U8.code(), 8);
    let offers = (0..1 << 17).take_while(|_| {
        core.handle_frame(Nanos(0), from, link, header, None, Payload::default());
        core.failure().is_none()
    });
    assert_eq!(offers.count(), 1 << 16);
    let ranks = scenario.group.local(from).to_vec();
    assert_eq!(core.failure(), Some(&Failure::Internal { ranks }));
}

/// Whatever is sent acknowledges what is done here. So no word goes while a sum is on its way to where it belongs.
#[test]
fn words_wait_for_what_is_copied_out() {
    let scenario = Scenario::new(0, 2);
    let me = Participant(0);
    let leaver = scenario.group.local(me)[0];
    let mut core = node::Node::new(&scenario, me).core;
    core.handle_rank_departed(leaver);
    assert_eq!(core.failure(), None);
    let midst = Action::CopyOut { channel: ChannelId(0) };
    let early = core.poll_control(Nanos(0), Some(&midst));
    assert!(early.is_none(), "a word in the midst of a copy: {early:?}");
    let word = core.poll_control(Nanos(0), None);
    assert!(matches!(word, Some(Action::Send { .. })), "the others learn of who left: {word:?}");
}
