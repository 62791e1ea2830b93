//! Topologies of made-up traces.
#![allow(clippy::unwrap_used)] // tests alone

use super::*;
use harmonaize_planner::{SwitchKind, Topology};

/// Control's fabric: hosts, and switches with their addresses.
fn fabric(hosts: &[&str], switches: &[(&str, &[&str])]) -> v1::TopologyReply {
    let host = |name: &&str| v1::FabricHost { name: (*name).to_owned(), ..v1::FabricHost::default() };
    let switch = |(name, addresses): &(&str, &[&str])| v1::FabricSwitch {
        name: (*name).to_owned(),
        addresses: addresses.iter().map(|address| (*address).to_owned()).collect(),
        ..v1::FabricSwitch::default()
    };
    v1::TopologyReply {
        hosts: hosts.iter().map(host).collect(),
        switches: switches.iter().map(switch).collect(),
        ..v1::TopologyReply::default()
    }
}

/// Traces, each a host, the hops, and a host; `*` for a hop that did not answer.
fn traced(routes: &[&str]) -> v1::TracedPathsReply {
    let path = |route: &&str| {
        let words: Vec<&str> = route.split_whitespace().collect();
        let [from, hops @ .., to] = words.as_slice() else { panic!("{route}") };
        let hop = |hop: &&str| if *hop == "*" { String::new() } else { (*hop).to_owned() };
        let (from, to) = ((*from).to_owned(), (*to).to_owned());
        v1::TracedPathRecord { from, to, hops: hops.iter().map(hop).collect(), ..Default::default() }
    };
    v1::TracedPathsReply { paths: routes.iter().map(path).collect() }
}

/// The file of these traces, and the topology that control reads in it.
fn discovered(fabric: &v1::TopologyReply, routes: &[&str]) -> (String, Topology) {
    let file = draft(fabric, &traced(routes)).unwrap().file().unwrap();
    let topology = Topology::parse(&file).unwrap();
    (file, topology)
}

/// Links by their ends, such as "h0 leaf0, h1 leaf0"; addresses stand for the switches that are named after them.
fn links(topology: &Topology) -> String {
    let ends = topology.links().iter().map(|link| {
        let mut ends = [link.from, link.to].map(|node| topology.node_name(node).replace("switch-", ""));
        ends.sort();
        ends.join(" ")
    });
    let mut links: Vec<String> = ends.collect();
    links.sort();
    links.join(", ")
}

/// How many lines have a text.
fn count(file: &str, text: &str) -> usize {
    file.lines().filter(|line| line.contains(text)).count()
}

#[test]
fn two_racks_with_a_spine() {
    let routes = [
        "h0 10.64.0.1 h1",
        "h0 10.64.0.1 10.64.0.3 10.64.0.2 h2",
        "h1 10.64.0.1 10.64.0.3 10.64.0.2 h3",
        "h2 10.64.0.2 10.64.0.3 10.64.0.1 h0",
        "h3 10.64.0.2 h2",
    ];
    let (file, topology) = discovered(&fabric(&["h0", "h1", "h2", "h3"], &[]), &routes);
    let expected = "10.64.0.1 10.64.0.3, 10.64.0.1 h0, 10.64.0.1 h1, 10.64.0.2 10.64.0.3, \
                    10.64.0.2 h2, 10.64.0.2 h3";
    assert_eq!(links(&topology), expected, "{file}");
    let kinds: Vec<SwitchKind> = topology.switches().iter().map(|switch| switch.kind).collect();
    assert_eq!(kinds, [SwitchKind::Leaf, SwitchKind::Leaf, SwitchKind::Spine]);
    // Nothing but rates is unsure.
    assert_eq!((count(&file, "# ? "), count(&file, "# ? rate assumed")), (6, 6), "{file}");
}

/// Each port has an address of its own: those of a cable's two ends are 2n and 2n + 1.
const PORTS: [&str; 8] = [
    "h0 10.1.0.1 10.9.0.1 10.9.0.4 h2",
    "h0 10.1.0.1 10.9.0.3 10.9.0.6 h2",
    "h1 10.1.0.1 10.9.0.1 10.9.0.4 h3",
    "h1 10.1.0.1 10.9.0.3 10.9.0.6 h3",
    "h2 10.1.1.1 10.9.0.5 10.9.0.0 h0",
    "h2 10.1.1.1 10.9.0.7 10.9.0.2 h0",
    "h3 10.1.1.1 10.9.0.5 10.9.0.0 h1",
    "h3 10.1.1.1 10.9.0.7 10.9.0.2 h1",
];

#[test]
fn ports_of_two_spines_are_guessed_together() {
    let (file, topology) = discovered(&fabric(&["h0", "h1", "h2", "h3"], &[]), &PORTS);
    let switches: Vec<Vec<String>> = topology
        .switches()
        .iter()
        .map(|switch| switch.addresses.iter().map(ToString::to_string).collect())
        .collect();
    let expected = [
        vec!["10.1.0.1", "10.9.0.0", "10.9.0.2"],
        vec!["10.1.1.1", "10.9.0.4", "10.9.0.6"],
        vec!["10.9.0.1", "10.9.0.5"],
        vec!["10.9.0.3", "10.9.0.7"],
    ];
    assert_eq!(switches, expected, "{file}");
    assert_eq!(topology.links().len(), 8, "{file}");
    assert_eq!((count(&file, CABLES), count(&file, LAST_HOPS)), (2, 2), "each guess is marked: {file}");
}

#[test]
fn what_an_earlier_file_left_apart_is_joined() {
    let apart: [(&str, &[&str]); 3] =
        [("switch-10.9.0.1", &["10.9.0.1"]), ("switch-10.9.0.5", &["10.9.0.5"]), ("unseen", &[])];
    let (file, topology) = discovered(&fabric(&["h0", "h1", "h2", "h3"], &apart), &PORTS);
    assert_eq!((file, topology), discovered(&fabric(&["h0", "h1", "h2", "h3"], &[]), &PORTS));
}

#[test]
fn cables_with_four_addresses_have_two_ends() {
    let routes = ["h0 10.1.0.5 10.9.0.2 10.9.0.5 h1", "h1 10.1.1.5 10.9.0.6 10.9.0.1 h0"];
    let (file, topology) = discovered(&fabric(&["h0", "h1"], &[]), &routes);
    let at = |address: [u8; 4]| topology.switch_at(IpAddr::from(address)).unwrap();
    assert_eq!(at([10, 9, 0, 2]), at([10, 9, 0, 6]), "{file}");
    assert_eq!(topology.switches().len(), 3, "{file}");
}

#[test]
fn what_control_has_keeps_name_and_rate() {
    let switches: [(&str, &[&str]); 5] = [
        ("leaf0", &["10.1.0.1", "10.9.0.0", "10.9.0.2"]),
        ("leaf1", &["10.1.1.1", "10.9.0.4", "10.9.0.6"]),
        ("spine0", &["10.9.0.1", "10.9.0.5", "10.9.0.9"]),
        ("spine1", &["10.9.0.3", "10.9.0.7"]),
        ("spine2", &["10.9.0.11"]),
    ];
    let mut fabric = fabric(&["h0", "h1", "h2", "h3"], &switches);
    fabric.hosts[0].rack = "r0".to_owned();
    fabric.hosts[0].kind = "a100".to_owned();
    let link = |from: &str, to: &str| v1::DirectedLinkStatus {
        from: from.to_owned(),
        to: to.to_owned(),
        capacity_bps: 25_000_000_000,
        ..v1::DirectedLinkStatus::default()
    };
    fabric.links = vec![link("h0", "leaf0"), link("leaf0", "h0"), link("leaf0", "spine0")];
    let (file, topology) = discovered(&fabric, &PORTS);
    let expected = "h0 leaf0, h1 leaf0, h2 leaf1, h3 leaf1, leaf0 spine0, leaf0 spine1, \
                    leaf1 spine0, leaf1 spine1";
    assert_eq!(links(&topology), expected, "{file}");
    assert!(file.contains(r#"{ from = "leaf0", to = "spine0", rate = "25Gbit/s" },"#), "{file}");
    assert!(file.contains(r#"{ name = "h0", rack = "r0", kind = "a100" },"#), "{file}");
    assert_eq!((count(&file, "# ? "), count(&file, "# ? rate assumed")), (7, 6), "{file}");
    assert_eq!(count(&file, "# ? Switches of control's topology that no route shows, left out: spine2"), 1);
}

#[test]
fn a_silent_hop_beside_a_host_is_found() {
    let routes = ["h0 10.0.0.1 10.0.0.3 * h1", "h1 * 10.0.0.3 10.0.0.1 h0", "h1 10.0.0.2 h2"];
    let (file, topology) = discovered(&fabric(&["h0", "h1", "h2"], &[]), &routes);
    let expected = "10.0.0.1 10.0.0.3, 10.0.0.1 h0, 10.0.0.2 10.0.0.3, 10.0.0.2 h1, 10.0.0.2 h2";
    assert_eq!(links(&topology), expected, "{file}");
    assert_eq!((count(&file, BESIDE_SILENCE), count(&file, TO_HOST)), (1, 1), "{file}");
}

#[test]
fn racks_that_nothing_joins_hang_on_unseen() {
    let routes = ["h0 10.0.0.1 * 10.0.0.2 h1", "h1 10.0.0.2 * 10.0.0.1 h0"];
    let (file, topology) = discovered(&fabric(&["h0", "h1"], &[]), &routes);
    let expected = "10.0.0.1 h0, 10.0.0.1 unseen, 10.0.0.2 h1, 10.0.0.2 unseen";
    assert_eq!(links(&topology), expected, "{file}");
    assert_eq!(count(&file, UNSEEN), 1, "{file}");
    assert_eq!(count(&file, "# ? 2 routes have hops that did not answer"), 1, "{file}");
}

#[test]
fn routes_that_differ_by_direction_keep_both_spines() {
    let routes = ["h0 10.0.0.1 10.0.0.3 10.0.0.2 h1", "h1 10.0.0.2 10.0.0.4 10.0.0.1 h0"];
    let (file, topology) = discovered(&fabric(&["h0", "h1"], &[]), &routes);
    let expected = "10.0.0.1 10.0.0.3, 10.0.0.1 10.0.0.4, 10.0.0.1 h0, 10.0.0.2 10.0.0.3, \
                    10.0.0.2 10.0.0.4, 10.0.0.2 h1";
    assert_eq!(links(&topology), expected, "{file}");
    assert_eq!(count(&file, ONE_SIDE), 2, "{file}");
}

#[test]
fn hosts_without_traces_are_named() {
    let routes = [
        "h0 10.0.0.1 10.0.0.3 10.0.0.2 h1",
        "h0 10.0.0.1 10.0.0.3 10.0.0.2 h2",
        "h1 10.0.0.2 10.0.0.3 10.0.0.1 h0",
    ];
    let (file, topology) = discovered(&fabric(&["h0", "h1", "h2", "h3"], &[]), &routes);
    let expected = "10.0.0.1 10.0.0.3, 10.0.0.1 h0, 10.0.0.2 10.0.0.3, 10.0.0.2 h1, 10.0.0.2 h2, \
                    10.0.0.3 unseen, h3 unseen";
    assert_eq!(links(&topology), expected, "{file}");
    assert_eq!(count(&file, "# ? Hosts without traces: h2, h3"), 1, "{file}");
    assert_eq!(count(&file, TO_HOST), 1, "{file}");
}

/// One end alone has traced, and the switches are numbered through.
#[test]
fn neighbouring_addresses_of_switches_stay_apart() {
    let routes = ["h0 10.64.0.1 10.64.0.3 10.64.0.2 h1", "h0 10.64.0.1 10.64.0.4 10.64.0.2 h1"];
    let (file, topology) = discovered(&fabric(&["h0", "h1"], &[]), &routes);
    assert_eq!((topology.switches().len(), topology.links().len()), (4, 6), "{file}");
}

#[test]
fn routes_that_were_cut_join_no_racks() {
    let (file, topology) =
        discovered(&fabric(&["h0", "h1"], &[("one", &[])]), &["h0 10.0.0.1 h1", "h1 10.0.0.2 h0"]);
    let expected = "10.0.0.1 h0, 10.0.0.1 unseen, 10.0.0.2 h1, 10.0.0.2 unseen";
    assert_eq!(links(&topology), expected, "{file}");
    assert_eq!(count(&file, "# ? 2 routes end before their hosts"), 1, "{file}");
}

#[test]
fn senseless_traces_are_passed_over() {
    let fabric = fabric(&["h0", "h1", "switch-10.0.0.1"], &[]);
    let senseless =
        ["h0 0.0.0.0 h1", "h0 224.0.0.1 nonsense h1", "h9 10.0.0.9 h1", "h0 10.0.0.9 h0", "h0 h1", "h0 * h1"];
    let error = draft(&fabric, &traced(&senseless)).err().unwrap().to_string();
    assert!(error.starts_with("no agent has traced a route yet"), "{error}");
    let routes = [&senseless[..], &["h0 10.0.0.1 10.0.0.1 h1"]].concat();
    let (file, topology) = discovered(&fabric, &routes);
    // A host has the name that the switch would have.
    assert!(topology.switch("switch-10.0.0.1x").is_some(), "{file}");
}
