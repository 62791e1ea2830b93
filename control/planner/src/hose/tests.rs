//! Hoses of known fabrics, and that nobody's place in a rack changes what is promised.

use super::*;
use harmonaize_topology::LinkId;
use harmonaize_topology::text::{host, link, switch};
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

/// Racks as given for each host, each joined to all spines at 1 Gbit/s like the hosts.
fn fabric(racks: &[usize], spines: usize) -> Topology {
    let leaves = racks.iter().max().map_or(0, |most| most + 1);
    let names = (0..leaves).map(|leaf| format!("leaf{leaf}"));
    let mut text: String =
        names.chain((0..spines).map(|spine| format!("spine{spine}"))).map(switch).collect();
    for (at, rack) in racks.iter().enumerate() {
        text += &host(at, format!("leaf{rack}"), "1Gbit/s", "0us");
    }
    for (leaf, spine) in (0..leaves).flat_map(|leaf| (0..spines).map(move |spine| (leaf, spine))) {
        text += &link(format!("leaf{leaf}"), format!("spine{spine}"), "1Gbit/s", "0us");
    }
    Topology::parse(&text).unwrap()
}

fn ids(hosts: &[usize]) -> Vec<HostId> {
    hosts.iter().copied().map(HostId).collect()
}

fn capacity(topology: &Topology, conditions: &Conditions) -> GuaranteeCapacity {
    HoseModel::new(topology).capacity(conditions, 1.0)
}

fn max_guarantee(room: &GuaranteeCapacity, hosts: &[usize], others: &[(&[usize], f64)]) -> u64 {
    let others: Vec<(Vec<HostId>, f64)> =
        others.iter().map(|(hosts, rate)| (ids(hosts), rate * 1e6)).collect();
    let others: Vec<Guarantee<'_>> =
        others.iter().map(|(hosts, rate)| Guarantee { hosts, rate: *rate }).collect();
    (room.max_guarantee(&ids(hosts), &others) / 1e6).round() as u64
}

#[test]
fn two_racks_of_four_at_two_spines() {
    let topology = fabric(&[0, 0, 0, 0, 1, 1, 1, 1], 2);
    let clear = Conditions::clear(&topology);
    let whole = capacity(&topology, &clear);
    assert_eq!((whole.trees, whole.rate, whole.tiers.as_slice()), (2, 1e9, [(4, 2)].as_slice()));
    // Alone all that a link has, and one who is far from all others may have as much; then the rest, whoever's it is.
    assert_eq!(max_guarantee(&whole, &[0, 4], &[]), 1000);
    assert_eq!(max_guarantee(&whole, &[1, 5], &[(&[0, 4], 900.0)]), 1000);
    assert_eq!(max_guarantee(&whole, &[2, 6], &[(&[0, 4], 900.0), (&[1, 5], 800.0)]), 200);
    // Its own link is a limit too.
    assert_eq!(max_guarantee(&whole, &[0, 5], &[(&[0, 4], 900.0)]), 100);
    // Two fit into one tree, and the third leaves the rest of the other.
    let pairs: [&[usize]; 3] = [&[0, 4], &[1, 5], &[2, 6]];
    assert_eq!(max_guarantee(&whole, &[3, 7], &pairs.map(|pair| (pair, 400.0))), 600);
    // Beside hoses on one tree, all of the other: 1000 / 4.
    assert_eq!(max_guarantee(&whole, &[3, 7], &pairs.map(|pair| (pair, 250.0))), 1000);
    // A drained spine, or one drained link: half of it is left to all.
    let spine = topology.switch("spine1").unwrap();
    for links in [topology.links_at(Node::Switch(spine)), &[LinkId(topology.links().len() - 1)]] {
        let mut drained = clear.clone();
        links.iter().for_each(|link| drained.restrict(*link, LinkUse::Avoid));
        let left = capacity(&topology, &drained);
        assert_eq!((left.trees, left.rate, left.tiers[0]), (1, 1e9, (4, 1)));
        assert_eq!(max_guarantee(&left, &[1, 5], &[(&[0, 4], 900.0)]), 100);
    }
    // Nothing passes out of a rack: its own business.
    let mut cut = clear.clone();
    (8..10).for_each(|link| cut.restrict(LinkId(link), LinkUse::Failed));
    assert_eq!((capacity(&topology, &cut).trees, capacity(&topology, &cut).rate), (1, 0.5e9));
}

#[test]
fn guarantees_leave_other_hoses_intact() {
    let racks: Vec<usize> = (0..32).map(|host| host / 8).collect();
    let topology = fabric(&racks, 8);
    let room = capacity(&topology, &Conditions::clear(&topology));
    // On four of eight trees eight hosts have 4 / 11 of a link each.
    let greedy: Vec<(Vec<HostId>, f64)> = (0..4).map(|pair| (ids(&[pair, 31 - pair]), 0.9e9)).collect();
    let greedy: Vec<Guarantee<'_>> =
        greedy.iter().map(|(hosts, rate)| Guarantee { hosts, rate: *rate }).collect();
    let others = (4..27).map(|first| (room.max_guarantee(&ids(&[first, first + 1]), &greedy) / 1e6) as u64);
    assert!(others.clone().all(|most| most == 363), "{:?}", others.collect::<Vec<_>>());
    let mut all = greedy.clone();
    let hosts: Vec<[HostId; 2]> = (2..14).map(|pair| [HostId(2 * pair), HostId(2 * pair + 1)]).collect();
    for pair in &hosts {
        assert_eq!((room.max_guarantee(pair, &all) / 1e6) as u64, 363);
        all.push(Guarantee { hosts: pair, rate: 0.363e9 });
    }
}

#[test]
fn without_switch_links_hosts_are_the_limit() {
    let topology = fabric(&[0, 0, 0], 0);
    let room = capacity(&topology, &Conditions::clear(&topology));
    assert_eq!(max_guarantee(&room, &[0, 1], &[(&[0, 2], 300.0)]), 700);
    // Two switches in a row: whatever crosses, crosses one link.
    let hosts = [(0, "a"), (1, "a"), (2, "b"), (3, "b")].map(|(at, to)| host(at, to, "1Gbit/s", "0us"));
    let text = hosts.concat() + &["a", "b"].map(switch).concat() + &link("a", "b", "1Gbit/s", "0us");
    let topology = Topology::parse(&text).unwrap();
    let room = HoseModel::new(&topology).capacity(&Conditions::clear(&topology), 1.0);
    assert_eq!((room.trees, room.tiers.as_slice()), (1, [(2, 1)].as_slice()));
    assert_eq!(max_guarantee(&room, &[0, 2], &[(&[1, 3], 400.0)]), 600);
}

#[test]
fn guarantees_do_not_depend_on_placement() {
    for seed in 0..50 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (leaves, each, spines) = (rng.random_range(2..5), rng.random_range(1..6), rng.random_range(1..5));
        let mut racks: Vec<usize> = (0..leaves * each).map(|host| host / each).collect();
        let one = fabric(&racks, spines);
        racks.shuffle(&mut rng);
        let other = fabric(&racks, spines);
        let [one, other] = [one, other].map(|topology| capacity(&topology, &Conditions::clear(&topology)));
        assert_eq!(one, other, "seed {seed}");
    }
}
