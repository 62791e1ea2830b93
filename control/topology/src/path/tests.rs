//! Paths against a plain search through all simple ones, and traces.

use super::*;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Switches joined at random, some by a tree and more; hosts on one or two of them, some joined directly.
fn random(rng: &mut impl Rng) -> Topology {
    let (switches, hosts) = (rng.random_range(1..8), rng.random_range(2..6));
    let mut joined = std::collections::BTreeSet::new();
    let mut links = String::new();
    let mut join = |a: String, b: String, forward: bool| {
        let ends = if a < b { (a, b) } else { (b, a) };
        if ends.0 != ends.1 && joined.insert(ends.clone()) {
            let (from, to) = if forward { ends } else { (ends.1, ends.0) };
            links += &format!("[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nrate = \"1Gbit/s\"\n");
        }
    };
    let mut text = String::new();
    for switch in 0..switches {
        text += &format!("[[switch]]\nname = \"s{switch}\"\naddresses = [\"10.0.0.{}\"]\n", switch + 1);
        for _ in 0..rng.random_range(1..3) {
            join(format!("s{switch}"), format!("s{}", rng.random_range(0..switch.max(1))), rng.random());
        }
    }
    for host in 0..hosts {
        text += &format!("[[host]]\nname = \"h{host}\"\n");
        for _ in 0..rng.random_range(1..3) {
            join(format!("h{host}"), format!("s{}", rng.random_range(0..switches)), rng.random());
        }
        if rng.random_bool(0.2) {
            join(format!("h{host}"), format!("h{}", rng.random_range(0..hosts)), rng.random());
        }
    }
    Topology::parse(&(text + &links)).unwrap()
}

/// All simple paths, by trying each link.
fn all(
    topology: &Topology,
    node: Node,
    to: Node,
    seen: &mut Vec<Node>,
    links: &mut Vec<DirectedLink>,
    found: &mut Vec<Path>,
) {
    if node == to {
        found.push(Path(links.as_slice().into()));
        return;
    }
    if matches!(node, Node::Host(_)) && seen.len() > 1 {
        return;
    }
    for link in topology.links_at(node) {
        let link = topology.directed(*link, node).unwrap();
        let (_, next) = topology.ends(link).unwrap();
        if !seen.contains(&next) {
            seen.push(next);
            links.push(link);
            all(topology, next, to, seen, links, found);
            links.pop();
            seen.pop();
        }
    }
}

#[test]
fn all_shortest_and_only_those() {
    for seed in 0..300 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let topology = random(&mut rng);
        let mut ways = PathFinder::new(&topology);
        for from in (0..topology.hosts().len()).map(HostId) {
            for to in (0..topology.hosts().len()).map(HostId).filter(|to| *to != from) {
                let (start, target) = (Node::Host(from), Node::Host(to));
                let mut simple = Vec::new();
                all(&topology, start, target, &mut vec![start], &mut Vec::new(), &mut simple);
                let least = simple.iter().map(|path| path.links().len()).min().unwrap();
                simple.retain(|path| path.links().len() == least);
                simple.sort();
                let mut found = ways.between(from, to);
                found.sort();
                assert_eq!(found, simple, "seed {seed} {from:?} {to:?}");
                let crossings = simple[0].links().len() as u64 - if least == 1 { 1 } else { 2 };
                assert_eq!(ways.crossings(from, to), Some(crossings), "seed {seed}");
            }
        }
    }
}

#[test]
fn traces_with_silent_hops_find_paths() {
    let mut ambiguous = 0;
    for seed in 0..300 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let topology = random(&mut rng);
        let (from, to) = (HostId(0), HostId(1));
        let paths = topology.equal_cost_paths(from, to);
        for path in &paths {
            let address = |switch: &SwitchId| topology.switches()[switch.0].addresses.first().copied();
            let mut hops: Vec<Option<IpAddr>> = topology.switches_of(path).iter().map(address).collect();
            assert_eq!(topology.traced_path(from, to, &hops), Ok(path.clone()), "seed {seed}");
            assert_eq!(path.reversed().reversed(), *path);
            let Some(hop) = (!hops.is_empty()).then(|| rng.random_range(0..hops.len())) else { continue };
            hops[hop] = None;
            match topology.traced_path(from, to, &hops) {
                Ok(found) => assert_eq!(found, *path, "seed {seed}"),
                Err(TraceError::Ambiguous(count)) => {
                    ambiguous += 1;
                    assert!((2..=paths.len()).contains(&count), "seed {seed}");
                }
                Err(other) => panic!("seed {seed}: {other}"),
            }
            hops[hop] = Some([192, 0, 2, 1].into());
            let error = topology.traced_path(from, to, &hops).unwrap_err();
            assert!(matches!(error, TraceError::UnknownAddress { .. }), "{error}");
        }
    }
    assert!(ambiguous > 10, "{ambiguous}");
}

#[test]
fn full_traces_find_longer_paths() {
    let mut text = "host = [{ name = \"a\" }, { name = \"b\" }]\n".to_owned();
    text += "switch = [{ name = \"s\", addresses = [\"10.0.0.1\"] }, { name = \"t\", addresses = [\"10.0.0.2\", \"fd00::2\"] }]\n";
    text += "link = [";
    for (from, to) in [("a", "s"), ("s", "t"), ("b", "t"), ("b", "s")] {
        text += &format!("{{ from = \"{from}\", to = \"{to}\", rate = \"1Gbit/s\" }},");
    }
    let topology = Topology::parse(&(text + "]\n")).unwrap();
    let hops = |addresses: &[&str]| addresses.iter().map(|text| text.parse().ok()).collect::<Vec<_>>();
    let path = topology.traced_path(HostId(0), HostId(1), &hops(&["10.0.0.1", "fd00::2"])).unwrap();
    let names: Vec<String> = path.links().iter().map(|link| topology.link_name(*link)).collect();
    assert_eq!(names, ["a -> s", "s -> t", "t -> b"]);
    for wrong in [&["10.0.0.2", "10.0.0.1"][..], &["10.0.0.2", ""], &[]] {
        assert_eq!(
            topology.traced_path(HostId(0), HostId(1), &hops(wrong)),
            Err(TraceError::NoSuchPath),
            "{wrong:?}"
        );
    }
}

#[test]
fn paths_across_a_link_join_its_ends() {
    for seed in 0..300 {
        let topology = random(&mut ChaCha8Rng::seed_from_u64(seed));
        let hosts = || (0..topology.hosts().len()).map(HostId);
        for (from, to) in hosts().flat_map(|from| hosts().map(move |to| (from, to))) {
            for path in topology.equal_cost_paths(from, to) {
                for link in path.links() {
                    let [senders, receivers] = topology.hosts_across(*link);
                    assert!(senders.contains(&from) && receivers.contains(&to), "seed {seed}: {link:?}");
                    assert!(!senders.contains(&to) && !receivers.contains(&from), "seed {seed}: {link:?}");
                }
            }
        }
    }
}
