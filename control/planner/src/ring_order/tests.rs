//! Orders against all permutations, and shapes whose best order is known.

use super::*;
use rand::{Rng, RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

/// Leaves with so many hosts each, joined by `spines` spines; hosts are numbered round robin over the leaves.
fn leaf_spine(leaves: &[usize], spines: usize) -> Topology {
    let mut text = String::new();
    for spine in 0..spines {
        text += &format!("[[switch]]\nname = \"spine{spine}\"\nkind = \"spine\"\n");
    }
    for leaf in 0..leaves.len() {
        text += &format!("[[switch]]\nname = \"leaf{leaf}\"\n");
        for spine in 0..spines {
            text += &link(&format!("leaf{leaf}"), &format!("spine{spine}"));
        }
    }
    let most = leaves.iter().copied().max().unwrap_or(0);
    for round in 0..most {
        for (leaf, _) in leaves.iter().enumerate().filter(|(_, hosts)| round < **hosts) {
            text += &format!("[[host]]\nname = \"h{leaf}-{round}\"\n");
            text += &link(&format!("h{leaf}-{round}"), &format!("leaf{leaf}"));
        }
    }
    Topology::parse(&text).unwrap()
}

fn link(from: &str, to: &str) -> String {
    format!("[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nrate = \"1Gbit/s\"\n")
}

fn all(topology: &Topology) -> Vec<HostId> {
    (0..topology.hosts().len()).map(HostId).collect()
}

fn crossings(topology: &Topology, hosts: &[HostId], ring: &[usize]) -> u64 {
    let mut sorted = ring.to_vec();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..hosts.len()).collect::<Vec<_>>(), "a permutation");
    let ring: Vec<HostId> = ring.iter().map(|index| hosts[*index]).collect();
    ring_crossings(topology, &ring)
}

/// The least over all rings, by trying each.
fn min_crossings(topology: &Topology, hosts: &[HostId]) -> u64 {
    fn extend(
        rows: &[BTreeMap<HostId, u64>],
        hosts: &[HostId],
        ring: &mut Vec<usize>,
        cost: u64,
        best: &mut u64,
    ) {
        let last = *ring.last().unwrap();
        if ring.len() == hosts.len() {
            *best = (*best).min(cost + rows[last][&hosts[0]]);
        }
        for next in 1..hosts.len() {
            if !ring.contains(&next) {
                ring.push(next);
                extend(rows, hosts, ring, cost + rows[last][&hosts[next]], best);
                ring.pop();
            }
        }
    }
    let mut ways = PathFinder::new(topology);
    let mut row = |from: &HostId| hosts.iter().map(|to| (*to, ways.crossings(*from, *to).unwrap())).collect();
    let rows: Vec<BTreeMap<HostId, u64>> = hosts.iter().map(&mut row).collect();
    let mut best = u64::MAX;
    extend(&rows, hosts, &mut vec![0], 0, &mut best);
    best
}

/// A random connected graph of switches with a host or more on some.
fn random(rng: &mut impl Rng, hosts: usize) -> Topology {
    let switches = rng.random_range(1..10);
    let mut text = String::new();
    for switch in 0..switches {
        text += &format!("[[switch]]\nname = \"s{switch}\"\n");
        if switch > 0 {
            text += &link(&format!("s{switch}"), &format!("s{}", rng.random_range(0..switch)));
        }
    }
    for host in 0..hosts {
        text += &format!("[[host]]\nname = \"h{host}\"\n");
        text += &link(&format!("h{host}"), &format!("s{}", rng.random_range(0..switches)));
    }
    Topology::parse(&text).unwrap()
}

#[test]
fn hosts_of_a_leaf_are_adjacent() {
    let topology = leaf_spine(&[2, 2], 2);
    assert_eq!(order(&topology, &all(&topology)), [0, 2, 1, 3]);
    let topology = leaf_spine(&[3, 2, 4], 1);
    let hosts = all(&topology);
    assert_eq!(crossings(&topology, &hosts, &order(&topology, &hosts)), 6);
}

#[test]
fn a_star_keeps_the_given_order() {
    let topology = leaf_spine(&[6], 0);
    assert_eq!(order(&topology, &all(&topology)), [0, 1, 2, 3, 4, 5]);
    assert_eq!(order(&topology, &[HostId(3)]), [0]);
    assert_eq!(order(&topology, &[HostId(3), HostId(1)]), [0, 1]);
    assert!(order(&topology, &[]).is_empty());
}

#[test]
fn racks_break_ties() {
    let mut text = "[[switch]]\nname = \"s\"\n".to_owned();
    for (host, rack) in ["a", "b", "a", "b"].into_iter().enumerate() {
        text +=
            &format!("[[host]]\nname = \"h{host}\"\nrack = \"{rack}\"\n{}", link(&format!("h{host}"), "s"));
    }
    let topology = Topology::parse(&text).unwrap();
    let ring = order(&topology, &all(&topology));
    assert!([vec![0, 2, 1, 3], vec![0, 2, 3, 1]].contains(&ring), "{ring:?}");
}

#[test]
fn no_ring_is_better() {
    for seed in 0..120 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let count = rng.random_range(1..=8);
        let topology = random(&mut rng, count);
        let mut hosts = all(&topology);
        hosts.shuffle(&mut rng);
        let ring = order(&topology, &hosts);
        assert_eq!(ring, order(&topology, &hosts), "seed {seed}");
        assert_eq!(crossings(&topology, &hosts, &ring), min_crossings(&topology, &hosts), "seed {seed}");
    }
}

#[test]
fn many_leaves_cost_two_links_each() {
    for leaves in [11, 12, 40] {
        let topology = leaf_spine(&vec![3; leaves], 2);
        let hosts = all(&topology);
        assert_eq!(crossings(&topology, &hosts, &order(&topology, &hosts)), 2 * leaves as u64);
    }
}

#[test]
fn approximate_tours_of_trees_cross_each_link_twice() {
    for seed in 0..40 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let switches = rng.random_range(12..40);
        let mut text = String::new();
        for switch in 0..switches {
            text += &format!("[[switch]]\nname = \"s{switch}\"\n[[host]]\nname = \"h{switch}\"\n");
            text += &link(&format!("h{switch}"), &format!("s{switch}"));
            if switch > 0 {
                text += &link(&format!("s{switch}"), &format!("s{}", rng.random_range(0..switch)));
            }
        }
        let topology = Topology::parse(&text).unwrap();
        let hosts = all(&topology);
        let found = crossings(&topology, &hosts, &order(&topology, &hosts));
        assert_eq!(found, 2 * (switches as u64 - 1), "seed {seed}");
    }
}

#[test]
fn racks_are_runs_round_a_ring() {
    let topology = leaf_spine(&[3, 1, 2], 1);
    let hosts = all(&topology);
    let mut ring: Vec<HostId> = order(&topology, &hosts).into_iter().map(|at| hosts[at]).collect();
    for _ in 0..ring.len() {
        let Racks { mut sizes, from } = racks(&topology, &ring);
        let from = from as usize;
        let rack = |host: HostId| topology.neighbours(host);
        assert_ne!(rack(ring[from]), rack(ring[(from + 5) % 6]), "one begins there");
        let first = sizes[0] as usize;
        assert_eq!(rack(ring[from]), rack(ring[(from + first - 1) % 6]));
        assert_ne!(rack(ring[from]), rack(ring[(from + first) % 6]));
        sizes.sort_unstable();
        assert_eq!(sizes, [1, 2, 3]);
        ring.rotate_left(1);
    }
    let of_leaf = |leaf: &str| -> Vec<HostId> {
        let named = |host: &HostId| topology.hosts()[host.0].name.starts_with(leaf);
        hosts.iter().copied().filter(named).collect()
    };
    let [three, one, two] = ["h0", "h1", "h2"].map(of_leaf);
    assert_eq!(racks(&topology, &three), Racks::default(), "one rack");
    let torn = [&three[..1], &one[..], &three[1..], &two[..]].concat();
    assert_eq!(racks(&topology, &torn), Racks::default(), "a rack in two pieces");
    let alone = leaf_spine(&[1, 1, 1], 1);
    assert_eq!(racks(&alone, &all(&alone)), Racks::default(), "each in its own");
}
