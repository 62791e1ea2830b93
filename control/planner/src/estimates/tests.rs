//! Reports in, estimates out: who is blamed, how much is left, when to look again.

use super::*;
use harmonaize_abi::CommunicatorId;
use harmonaize_topology::Node;

const MS: u64 = 1_000_000;

fn at(ms: u64) -> Nanos {
    Nanos(ms * MS)
}

/// Two racks of four hosts (h0 to h3, h4 to h7), two spines, 1 Gbit/s everywhere.
fn fabric() -> Topology {
    with_hosts_at("1Gbit/s")
}

/// The same with links of hosts at another rate.
fn with_hosts_at(rate: &str) -> Topology {
    let mut text = String::new();
    for switch in ["spine0", "spine1", "leaf0", "leaf1"] {
        text += &format!("[[switch]]\nname = \"{switch}\"\n");
    }
    let mut join = |from: &str, to: &str, risk: &str| {
        let rate = if from.starts_with('h') { rate } else { "1Gbit/s" };
        text += &format!("[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nrate = \"{rate}\"\nrisk = [{risk}]\n");
    };
    join("leaf0", "spine0", "\"duct\"");
    join("leaf0", "spine1", "");
    join("leaf1", "spine0", "\"duct\", \"bridge\"");
    join("leaf1", "spine1", "");
    for host in 0..8 {
        join(&format!("h{host}"), &format!("leaf{}", host / 4), "");
    }
    for host in 0..8 {
        text += &format!("[[host]]\nname = \"h{host}\"\n");
    }
    Topology::parse(&text).unwrap()
}

fn path(topology: &Topology, names: &[&str]) -> Path {
    let node = |name: &&str| {
        let switch = topology.switch(name).map(Node::Switch);
        switch.or_else(|| topology.host(name).map(Node::Host)).unwrap()
    };
    topology.path_along(&names.iter().map(node).collect::<Vec<_>>()).unwrap()
}

fn over(topology: &Topology, from: usize, to: usize, spine: usize) -> Path {
    let (from, to) = ((format!("h{from}"), from / 4), (format!("h{to}"), to / 4));
    let leaves = [format!("leaf{}", from.1), format!("leaf{}", to.1)];
    path(topology, &[&from.0, &leaves[0], &format!("spine{spine}"), &leaves[1], &to.0])
}

fn connection(from: usize, to: usize, port: u16) -> Connection {
    Connection { communicator: CommunicatorId(1), from: HostId(from), to: HostId(to), port }
}

fn report(
    topology: &Topology,
    from: usize,
    to: usize,
    spine: usize,
    level: CongestionLevel,
    own: u64,
) -> CongestionReport {
    let (connection, path) = (connection(from, to, spine as u16), over(topology, from, to, spine));
    let lost = level == CongestionLevel::Severe;
    CongestionReport {
        connection,
        path,
        level,
        cause: CongestionCause::CrossTraffic,
        own_rate: Rate(own * 1_000_000),
        had_loss: lost,
        cross_traffic: None,
    }
}

/// Each host to the one opposite, over both spines, both ways.
fn all(topology: &Topology) -> Vec<(Connection, Path, Rate)> {
    let pairs = (0..4).flat_map(|low| [(low, low + 4), (low + 4, low)]);
    let each = pairs.flat_map(|(from, to)| [0, 1].map(|spine| (from, to, spine)));
    each.map(|(from, to, spine)| {
        (connection(from, to, spine as u16), over(topology, from, to, spine), Rate(0))
    })
    .collect()
}

/// What is estimated, by name: Mbit/s of others.
fn estimated(topology: &Topology, estimates: &Estimates) -> Vec<(String, u64)> {
    estimates
        .links()
        .map(|(link, estimate)| (topology.link_name(link), estimate.cross_traffic.0 / 1_000_000))
        .collect()
}

#[test]
fn one_report_blames_the_unshared_link() {
    let topology = fabric();
    let mut estimates = Estimates::default();
    estimates.active(&topology, at(0), all(&topology));
    assert!(estimates.apply_report(
        &topology,
        at(1),
        report(&topology, 0, 4, 0, CongestionLevel::Severe, 300)
    ));
    // Three others cross both links of the spine; the access links are crossed by one each, on the other spine.
    assert_eq!(
        estimated(&topology, &estimates),
        [("h0 -> leaf0".to_owned(), 700), ("leaf1 -> h4".to_owned(), 700)]
    );
    // The others complain as well: it is the spine, either end of it.
    for host in 1..4 {
        estimates.apply_report(
            &topology,
            at(2),
            report(&topology, host, host + 4, 0, CongestionLevel::Severe, 100),
        );
    }
    let links: Vec<(String, u32, bool)> = estimates
        .links
        .iter()
        .map(|(link, kept)| (topology.link_name(*link), kept.estimate.confidence_ppm, kept.supported))
        .collect();
    let expected = [("leaf0 -> spine0", 500_000, true), ("spine0 -> leaf1", 500_000, true)];
    assert_eq!(links, expected.map(|(name, confidence, supported)| (name.to_owned(), confidence, supported)));
}

#[test]
fn several_hosts_blame_the_link_they_share() {
    let topology = fabric();
    let mut estimates = Estimates::default();
    let rack = [(0, 4, 0), (1, 5, 0), (0, 4, 1), (1, 5, 1), (2, 3, 9)];
    let active = rack.iter().map(|(from, to, spine)| {
        let path = if *spine == 9 {
            path(&topology, &["h2", "leaf0", "h3"])
        } else {
            over(&topology, *from, *to, *spine)
        };
        (connection(*from, *to, *spine as u16), path, Rate(0))
    });
    estimates.active(&topology, at(0), active.collect());
    estimates.apply_report(&topology, at(1), report(&topology, 0, 4, 0, CongestionLevel::Mild, 250));
    estimates.apply_report(&topology, at(1), report(&topology, 1, 5, 0, CongestionLevel::Mild, 250));
    let spine = [("leaf0 -> spine0".to_owned(), 500), ("spine0 -> leaf1".to_owned(), 500)];
    assert_eq!(estimated(&topology, &estimates), spine);
    let (_, estimate) = estimates.links().next().unwrap();
    assert_eq!(estimate.evidence, "2 paths of 2 hosts are congested there");
    let conditions = estimates.conditions(&topology, &Drains::default());
    assert_eq!(conditions.available(over(&topology, 0, 4, 0).links()[1]), Rate(500_000_000));
    assert_eq!(conditions.available(over(&topology, 4, 0, 0).links()[1]), Rate(1_000_000_000));
}

#[test]
fn false_reports_affect_only_own_links() {
    let topology = fabric();
    let mut estimates = Estimates::default();
    estimates.active(&topology, at(0), all(&topology));
    for spine in [0, 1] {
        estimates.apply_report(&topology, at(1), report(&topology, 2, 6, spine, CongestionLevel::Severe, 1));
    }
    let expected = [("h2 -> leaf0".to_owned(), 900), ("leaf1 -> h6".to_owned(), 900)];
    assert_eq!(estimated(&topology, &estimates), expected);
}

#[test]
fn own_traffic_is_not_congestion() {
    let topology = fabric();
    let mut estimates = Estimates::default();
    let mut own = report(&topology, 0, 4, 0, CongestionLevel::Severe, 900);
    own.cause = CongestionCause::Own;
    assert!(!estimates.apply_report(&topology, at(1), own.clone()));
    let vague =
        CongestionReport { cause: CongestionCause::Unknown, level: CongestionLevel::Mild, ..own.clone() };
    assert!(!estimates.apply_report(&topology, at(1), vague.clone()));
    assert_eq!(estimates.next_due(), None);
    // Its agent may lay it to others: what it moves fills the link nevertheless, and so do several hosts' parts together.
    let severe = CongestionReport { level: CongestionLevel::Severe, ..vague };
    assert!(!estimates.apply_report(&topology, at(1), severe.clone()));
    assert!(!estimates.apply_report(
        &topology,
        at(1),
        CongestionReport { cause: CongestionCause::CrossTraffic, ..severe.clone() }
    ));
    let half = |from| report(&topology, from, from + 4, 0, CongestionLevel::Severe, 450);
    let mut shared = Estimates::default();
    assert!(shared.apply_report(&topology, at(1), half(0)));
    shared.apply_report(&topology, at(2), half(1));
    assert_eq!(estimated(&topology, &shared), []);
    // A small queue before what sends next to nothing says nothing, a long one does.
    let mild = report(&topology, 2, 6, 0, CongestionLevel::Mild, 50);
    assert!(!estimates.apply_report(&topology, at(1), mild));
    assert!(estimates.apply_report(
        &topology,
        at(1),
        CongestionReport { own_rate: Rate(300_000_000), ..severe }
    ));
    let away = Topology::parse("host = [{ name = \"a\" }]").unwrap();
    assert!(!Estimates::default().apply_report(
        &away,
        at(1),
        CongestionReport { cause: CongestionCause::CrossTraffic, ..own }
    ));
}

#[test]
fn probes_find_the_link_free_again() {
    let topology = fabric();
    let mut estimates = Estimates::default();
    let path = over(&topology, 0, 4, 0);
    estimates.active(&topology, at(0), vec![(connection(0, 4, 0), path.clone(), Rate(0))]);
    estimates.apply_report(&topology, at(1), report(&topology, 0, 4, 0, CongestionLevel::Severe, 0));
    assert!(estimates.probes_due(at(500)).is_empty(), "own traffic crosses it");
    // The traffic goes elsewhere.
    assert!(!estimates.active(&topology, at(500), Vec::new()));
    assert_eq!(estimates.next_due(), Some(at(750)));
    assert!(estimates.probes_due(at(749)).is_empty());
    let mut asked = Vec::new();
    for ms in 750..40_000 {
        let due = estimates.probes_due(at(ms));
        if !due.is_empty() {
            assert_eq!(due.len(), 2, "both between switches");
            asked.push(ms);
            let probe =
                Probe { path: path.clone(), received: Rate(500_000_000), lost_ppm: 0, conclusive: true };
            assert_eq!(estimates.apply_probe(&topology, at(ms), &probe), asked.len() == 1);
        }
    }
    assert_eq!(asked[..5], [750, 1250, 2250, 4250, 6250]);
    assert!(asked[5..].iter().enumerate().all(|(at, ms)| *ms == 8_250 + 2_000 * at as u64), "{asked:?}");
    // C C / (C + f): at 500 of 1000 the others take 1000 at least, and something is left all the same.
    assert!(estimated(&topology, &estimates).iter().all(|(_, cross_traffic)| *cross_traffic == 900));
    let mut probe = Probe { path, received: Rate(800_000_000), lost_ppm: 0, conclusive: true };
    assert!(
        !estimates.apply_probe(&topology, at(40_000), &probe),
        "that others take less alone moves nobody"
    );
    assert!(estimated(&topology, &estimates).iter().all(|(_, cross_traffic)| *cross_traffic == 250));
    probe.received = Rate(940_000_000);
    assert!(!estimates.apply_probe(&topology, at(40_100), &probe));
    assert_eq!(estimates.next_due(), Some(at(40_150)));
    probe.lost_ppm = 60_000;
    assert!(!estimates.apply_probe(&topology, at(40_150), &probe));
    probe.lost_ppm = 0;
    assert!(!estimates.apply_probe(&topology, at(40_200), &probe));
    assert!(estimates.apply_probe(&topology, at(40_250), &probe));
    assert_eq!((estimated(&topology, &estimates), estimates.next_due()), (Vec::new(), None));
}

#[test]
fn estimates_decay_faster_with_own_traffic() {
    let topology = fabric();
    let mut estimates = Estimates::default();
    let active = vec![(connection(0, 4, 0), over(&topology, 0, 4, 0), Rate(0))];
    estimates.active(&topology, at(0), active.clone());
    estimates.apply_report(&topology, at(1), report(&topology, 0, 4, 0, CongestionLevel::Severe, 0));
    assert!(!estimates.decay(&topology, at(100_000)), "a report stands for as long as it does");
    let clear = report(&topology, 0, 4, 0, CongestionLevel::None, 400);
    assert!(!estimates.apply_report(&topology, at(200_000), clear.clone()));
    assert_eq!(estimates.next_due(), Some(at(201_000)));
    assert!(estimates.decay(&topology, at(201_000)));
    assert!(estimated(&topology, &estimates).iter().all(|(_, cross_traffic)| *cross_traffic == 250));
    assert!(estimates.decay(&topology, at(204_000)));
    assert!(estimated(&topology, &estimates).is_empty());
    // Without traffic and without probes it takes minutes.
    estimates.apply_report(&topology, at(300_000), report(&topology, 0, 4, 0, CongestionLevel::Severe, 0));
    estimates.active(&topology, at(300_000), Vec::new());
    assert!(!estimates.decay(&topology, at(359_999)));
    assert!(estimates.decay(&topology, at(360_000)));
    assert!(estimates.decay(&topology, at(3_600_000)));
    assert!(estimated(&topology, &estimates).is_empty());
}

#[test]
fn failures_persist_until_restored() {
    let topology = fabric();
    let mut estimates = Estimates::default();
    let dead = LinkId(0);
    assert!(estimates.fail(&topology, at(1), dead));
    assert!(!estimates.fail(&topology, at(2), dead));
    assert!(!estimates.fail(&topology, at(2), LinkId(99)));
    let conditions = estimates.conditions(&topology, &Drains::default());
    assert_eq!(conditions.path(&over(&topology, 0, 4, 0)), LinkUse::Failed);
    assert_eq!(conditions.path(&over(&topology, 0, 4, 1)), LinkUse::Open);
    assert_eq!(conditions.usable(over(&topology, 0, 4, 0).links()[2]), LinkUse::Avoid, "the same duct");
    assert!(!estimates.decay(&topology, at(10_000_000)));
    assert_eq!(estimates.probes_due(at(251)).len(), 2);
    let probe =
        Probe { path: over(&topology, 0, 4, 0), received: Rate(950_000_000), lost_ppm: 0, conclusive: true };
    estimates.apply_probe(&topology, at(252), &probe);
    estimates.apply_probe(&topology, at(302), &probe);
    assert!(estimates.restore(at(303), dead), "the way back is still thought dead");
    assert!(!estimates.restore(at(303), dead));
    assert_eq!(estimates.links().count(), 0);
}

#[test]
fn drains_are_avoided() {
    let topology = fabric();
    let spine = topology.switch("spine1").unwrap();
    let drains = Drains { switches: [spine].into(), links: [LinkId(5)].into(), ..Drains::default() };
    let conditions = Estimates::default().conditions(&topology, &drains);
    assert_eq!(conditions.path(&over(&topology, 2, 6, 1)), LinkUse::Avoid);
    assert_eq!(conditions.path(&over(&topology, 2, 6, 0)), LinkUse::Open);
    assert_eq!(conditions.path(&over(&topology, 1, 6, 0)), LinkUse::Avoid);
}

#[test]
fn faster_upstream_trains_take_more() {
    let topology = with_hosts_at("2Gbit/s");
    let path = over(&topology, 0, 4, 0);
    // 2 Gbit/s of the train and 0.5 of others want 1: four fifths of what comes out are the train's.
    let probe =
        |received| Probe { path: path.clone(), received: Rate(received), lost_ppm: 0, conclusive: true };
    assert_eq!(probe(800_000_000).cross_traffic_on_path(&topology), Rate(500_000_000));
    assert_eq!(probe(800_000_000).cross_traffic(Rate(1_000_000_000), Rate(1_000_000_000)), Rate(250_000_000));
    assert_eq!(probe(1_000_000_000).cross_traffic_on_path(&topology), Rate(0));
    let rate = Rate(1_000_000_000);
    let clean = [840, 850, 1000, 1020, 1021].map(|received| probe(received * 1_000_000).is_clean(rate));
    assert_eq!(clean, [false, true, true, true, false], "none is quicker than the link");
}
