//! Trees against all that there could be, on small fabrics; and where they are taken.

use super::*;
use crate::aggregation::{AggregationDecision, decide_aggregation};
use harmonaize_units::{Bytes, Rate};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn offer(aggregator: usize, packets_per_second: u64) -> AggregatorOffer {
    AggregatorOffer {
        aggregator: AggregatorId(aggregator),
        payload: Bytes(8192),
        tensor_bytes: Bytes(8192),
        codec_rate: Rate(0),
        packets_per_second,
        other_communicators: 0,
        supports_parents: true,
    }
}

fn link(from: &str, to: &str, rate: u64, delay: u64) -> String {
    format!("[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nrate = \"{rate}Mbit/s\"\ndelay = \"{delay}us\"\n")
}

fn aggregator(name: &str, switch: &str, rate: u64, delay: u64) -> String {
    format!(
        "[[aggregator]]\nname = \"{name}\"\nswitch = \"{switch}\"\nrate = \"{rate}Mbit/s\"\ndelay = \"{delay}us\"\n"
    )
}

/// Racks, spines, hosts and aggregators of all sizes.
fn any_fabric(random: &mut ChaCha8Rng) -> Topology {
    let (racks, spines) = (random.random_range(1..=4), random.random_range(1..=2));
    let mut text = String::new();
    for spine in 0..spines {
        text += &format!("[[switch]]\nname = \"s{spine}\"\n");
    }
    let (mut hosts, mut aggregators) = (0, String::new());
    for rack in 0..racks {
        let leaf = format!("l{rack}");
        text += &format!("[[switch]]\nname = \"{leaf}\"\n");
        for spine in 0..spines {
            text += &link(
                &leaf,
                &format!("s{spine}"),
                random.random_range(500..4000),
                random.random_range(0..80),
            );
        }
        for _ in 0..random.random_range(1..=4) {
            text += &format!("[[host]]\nname = \"h{hosts}\"\n");
            text += &link(
                &format!("h{hosts}"),
                &leaf,
                random.random_range(500..2000),
                random.random_range(0..40),
            );
            hosts += 1;
        }
        for at in 0..random.random_range(0..=2) {
            let (rate, delay) = (random.random_range(500..9000), random.random_range(0..60));
            aggregators += &aggregator(&format!("a{rack}-{at}"), &leaf, rate, delay);
        }
    }
    if random.random() {
        aggregators += &aggregator("top", "s0", random.random_range(500..9000), random.random_range(0..60));
    }
    Topology::parse(&(text + &aggregators)).unwrap()
}

/// The time of a tree in which host `i` sends to `of[i]`. That is an aggregator below, or the root. Each link's load is counted
/// host by host.
fn reference_time(
    topology: &Topology,
    conditions: &Conditions,
    root: &AggregatorOffer,
    of: &[Option<&AggregatorOffer>],
    size: f64,
) -> Option<f64> {
    let known = |offer: &AggregatorOffer| &topology.aggregators()[offer.aggregator.0];
    let (mut loads, mut at, mut farthest) = (BTreeMap::new(), BTreeMap::<usize, f64>::new(), 0.0_f64);
    let to_root = EcmpRoutes::new(topology, conditions, known(root).switch);
    for (host, leaf) in of.iter().enumerate() {
        let node = Node::Host(HostId(host));
        let delay = match leaf {
            None => {
                *at.entry(root.aggregator.0).or_default() += 1.0;
                to_root.add_load(node, &mut loads)?
            }
            Some(leaf) => {
                if !at.contains_key(&leaf.aggregator.0) {
                    to_root.add_load(Node::Switch(known(leaf).switch), &mut loads)?;
                    *at.entry(root.aggregator.0).or_default() += 1.0;
                    at.insert(leaf.aggregator.0, 1.0);
                }
                *at.entry(leaf.aggregator.0).or_default() += 1.0;
                let up = to_root.add_load(Node::Switch(known(leaf).switch), &mut BTreeMap::new())?;
                let own =
                    EcmpRoutes::new(topology, conditions, known(leaf).switch).add_load(node, &mut loads)?;
                own + 2.0 * seconds(known(leaf).delay) + up
            }
        };
        farthest = farthest.max(delay);
    }
    let goes = 8192.0 / (8192.0 + HEADER_BYTES);
    let links = loads.iter().map(|(link, load)| bytes_per_second(conditions.available(*link)) * goes / load);
    let machines = at.iter().map(|(index, count)| {
        let cores = if root.packets_per_second == 0 { f64::INFINITY } else { root.packets_per_second as f64 };
        (bytes_per_second(topology.aggregators()[*index].rate) * goes).min(cores * 8192.0) / count
    });
    let rate = links.chain(machines).fold(f64::INFINITY, f64::min);
    Some(size / rate + 2.0 * (farthest + seconds(known(root).delay)))
}

/// The least time of any tree. It tries each root with each choice of one below, or none, for each rack of at least two hosts.
fn exhaustive_best(
    topology: &Topology,
    conditions: &Conditions,
    offers: &[AggregatorOffer],
    size: f64,
) -> Option<f64> {
    let switch_of = |host: usize| match topology.neighbours(HostId(host)).as_slice() {
        [Node::Switch(switch)] => *switch,
        other => panic!("{other:?}"),
    };
    let switches: Vec<SwitchId> = (0..topology.hosts().len()).map(switch_of).collect();
    let mut racks = switches.clone();
    racks.dedup();
    if racks.len() < 2 {
        return None;
    }
    let mut best: Option<f64> = None;
    for root in offers {
        let choices: Vec<Vec<Option<&AggregatorOffer>>> = racks
            .iter()
            .map(|rack| {
                let here = offers.iter().filter(|offer| {
                    topology.aggregators()[offer.aggregator.0].switch == *rack && *offer != root
                });
                let alone = switches.iter().filter(|switch| *switch == rack).count() < 2;
                std::iter::once(None).chain(here.filter(|_| !alone).map(Some)).collect()
            })
            .collect();
        let mut chosen = vec![0; racks.len()];
        'next: loop {
            let of: Vec<Option<&AggregatorOffer>> = switches
                .iter()
                .map(|switch| {
                    let rack = racks.iter().position(|rack| rack == switch).unwrap();
                    choices[rack][chosen[rack]]
                })
                .collect();
            if of.iter().any(Option::is_some) {
                let time = reference_time(topology, conditions, root, &of, size).unwrap();
                best = Some(best.map_or(time, |best| best.min(time)));
            }
            for rack in 0..racks.len() {
                chosen[rack] += 1;
                if chosen[rack] < choices[rack].len() {
                    continue 'next;
                }
                chosen[rack] = 0;
            }
            break;
        }
    }
    best
}

proptest! {
    #[test]
    fn chosen_tree_is_the_fastest(seed: u64) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let topology = any_fabric(&mut random);
        let conditions = Conditions::clear(&topology);
        let hosts: Vec<HostId> = (0..topology.hosts().len()).map(HostId).collect();
        let packets = if random.random() { 0 } else { random.random_range(20_000..400_000) };
        let offers: Vec<AggregatorOffer> = (0..topology.aggregators().len()).map(|at| offer(at, packets)).collect();
        let size = f64::from(1 << random.random_range(10..28));
        let found = best_tree(&topology, &conditions, &hosts, &offers, size);
        match (exhaustive_best(&topology, &conditions, &offers, size), found) {
            (Some(least), Some((_, leaves, way))) => {
                prop_assert!((way.time(size) - least).abs() <= 1e-9 * least, "{} for {least}", way.time(size));
                prop_assert!(leaves.iter().all(|leaf| leaf.hosts.len() > 1), "{leaves:?}");
            }
            (None, None) => {}
            (brute, found) => prop_assert!(false, "{brute:?}, found {}", found.is_some()),
        }
    }
}

/// Two racks of four at 1 Gbit/s, a spine, and uplinks of so many Mbit/s. An aggregator is at each switch, as wide as its workers'
/// links.
fn two_racks(uplink: u64) -> Topology {
    let mut text = "[[switch]]\nname = \"spine\"\n".to_owned();
    for rack in 0..2 {
        let leaf = format!("leaf{rack}");
        text += &format!("[[switch]]\nname = \"{leaf}\"\n{}", link(&leaf, "spine", uplink, 10));
        for host in 4 * rack..4 * rack + 4 {
            text += &format!("[[host]]\nname = \"h{host}\"\n{}", link(&format!("h{host}"), &leaf, 1000, 10));
        }
    }
    for (at, rate) in [("leaf0", 5000), ("leaf1", 5000), ("spine", 8000)] {
        text += &aggregator(&format!("at-{at}"), at, rate, 0);
    }
    Topology::parse(&text).unwrap()
}

fn decide(
    topology: &Topology,
    hosts: &[usize],
    operation: u64,
    offers: &[AggregatorOffer],
) -> AggregationDecision {
    let hosts: Vec<HostId> = hosts.iter().map(|host| HostId(*host)).collect();
    let rates = (Rate(1_000_000_000), Rate(0));
    decide_aggregation(topology, &Conditions::clear(topology), &hosts, rates, Bytes(operation), offers)
}

const ALL: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

#[test]
fn narrow_uplinks_get_leaves_and_a_root() {
    let topology = two_racks(1000);
    let offers = [offer(0, 0), offer(1, 0), offer(2, 0)];
    let decided = decide(&topology, &ALL, 64 << 20, &offers);
    let chosen = decided.plan.unwrap();
    assert_eq!(chosen.aggregator, AggregatorId(2), "{}", decided.reason);
    let leaf =
        |at: usize| LeafAggregator { aggregator: AggregatorId(at), hosts: (4 * at..4 * at + 4).collect() };
    assert_eq!(chosen.leaves, [leaf(0), leaf(1)]);
    let goes = 8192.0 / (8192.0 + HEADER_BYTES);
    assert!((chosen.rate.0 as f64 / 1e9 - goes).abs() < 1e-3, "one part crosses an uplink: {chosen:?}");
    assert!(chosen.delay.0.abs_diff(20_000) <= 1, "{chosen:?}");
    assert_eq!((chosen.broadcasts, chosen.barriers), (None, false));
    let words = "by at-spine at spine above at-leaf0 at leaf0, at-leaf1 at leaf1";
    assert!(decided.reason.to_string().contains(words), "{}", decided.reason);
    // By the spine alone four parts cross each uplink, which is worse than the ring.
    assert_eq!(decide(&topology, &ALL, 64 << 20, &offers[2..]).plan, None);
    // Without one at the spine one in a rack is above the other, and its own rack sends to it.
    let chosen = decide(&topology, &ALL, 64 << 20, &offers[..2]).plan.unwrap();
    assert_eq!((chosen.aggregator, chosen.leaves), (AggregatorId(0), vec![leaf(1)]));
}

#[test]
fn single_aggregator_replaces_equal_tree() {
    let offers = [offer(0, 0), offer(1, 0), offer(2, 0)];
    // Uplinks as wide as the hosts behind them.
    let wide = two_racks(4000);
    let chosen = decide(&wide, &ALL, 64 << 20, &offers).plan.unwrap();
    assert_eq!((chosen.aggregator, chosen.leaves), (AggregatorId(2), vec![]));
    // Three quarters of it: the one at the spine pays, and those below pay still more.
    let three = two_racks(3000);
    assert!(decide(&three, &ALL, 64 << 20, &offers[2..]).plan.is_some());
    let chosen = decide(&three, &ALL, 64 << 20, &offers).plan.unwrap();
    assert_eq!(chosen.leaves.len(), 2);
    // All in one rack.
    let narrow = two_racks(1000);
    let chosen = decide(&narrow, &ALL[..4], 64 << 20, &offers).plan.unwrap();
    assert_eq!((chosen.aggregator, chosen.leaves), (AggregatorId(0), vec![]));
    // Those that know no aggregator above.
    let alone = offers.clone().map(|offer| AggregatorOffer { supports_parents: false, ..offer });
    assert_eq!(decide(&narrow, &ALL, 64 << 20, &alone).plan, None);
}

#[test]
fn codecs_and_closed_paths_have_no_trees() {
    let topology = two_racks(1000);
    let offers = [offer(0, 0), offer(1, 0), offer(2, 0)];
    let hosts: Vec<HostId> = ALL.map(HostId).to_vec();
    let coded = offers.clone().map(|offer| AggregatorOffer { tensor_bytes: Bytes(40_960), ..offer });
    let mut conditions = Conditions::clear(&topology);
    assert!(best_tree(&topology, &conditions, &hosts, &coded, 1e6).is_none());
    let (_, _, way) = best_tree(&topology, &conditions, &hosts, &offers, 1e6).unwrap();
    let others = offers.clone().map(|offer| AggregatorOffer { other_communicators: 3, ..offer });
    let (_, _, shared) = best_tree(&topology, &conditions, &hosts, &others, 1e6).unwrap();
    assert!(shared.rate < way.rate, "who serves others does less");
    conditions.restrict(crate::LinkId(0), crate::conditions::LinkUse::Failed);
    assert!(best_tree(&topology, &conditions, &hosts, &offers, 1e6).is_none());
}
