//! Imports of inputs in the tools' real formats, held against the samples in `docs/examples`.
#![allow(clippy::unwrap_used)] // tests alone

use super::*;
use clap::Parser;
use harmonaize_testkit::{golden::same, workspace};

#[derive(Parser)]
struct Line {
    #[command(subcommand)]
    action: TopologyAction,
}

fn topology(line: &str) -> Result<String, String> {
    let words = ["topology"].into_iter().chain(line.split_whitespace());
    let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
    run(line.action).map_err(|failure| failure.to_string())
}

/// The path of an input.
fn input(name: &str) -> String {
    format!("{}/tests/topology/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// The error for a file of this text.
fn refusal(source: &str, name: &str, text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    let error = topology(&format!("import {source} {}", path.display())).unwrap_err();
    error.replace(&path.display().to_string(), name)
}

#[test]
fn lldp_of_hosts_and_switches_becomes_a_topology() {
    let files = |folder: &str, names: &[&str]| -> String {
        names.iter().map(|name| input(&format!("{folder}/{name}.json "))).collect()
    };
    let hosts = files("hosts", &["h0", "h1", "h2", "h3"]);
    let switches = files("switches", &["leaf0.fabric.example", "leaf1.fabric.example"]);
    let made = topology(&format!("import lldp {hosts} --without oob-switch --switches {switches}")).unwrap();
    same("docs/examples/lldp.toml", &made);
    // The second cable of h3 has no rate of its own; both ends of each cable are one.
    assert!(made.contains("rates of 1 of 2 cables assumed"), "{made}");
    let fabric = Topology::parse(&made).unwrap();
    assert_eq!((fabric.hosts().len(), fabric.switches().len(), fabric.links().len()), (4, 4, 7));
    let h3 = fabric.host("h3").unwrap();
    assert_eq!(fabric.uplink(h3), Rate(200_000_000_000));
}

#[test]
fn lldp_names_a_node_that_is_not_there() {
    let error = topology(&format!("import lldp {} --without oob", input("hosts/h0.json"))).unwrap_err();
    assert!(error.starts_with("--without oob: there is no such node; nodes are h0, "), "{error}");
}

#[test]
fn ibnetdiscover_becomes_a_topology() {
    let made = topology(&format!("import ibnetdiscover {}", input("ibnetdiscover.txt"))).unwrap();
    same("docs/examples/ibnetdiscover.toml", &made);
    let fabric = Topology::parse(&made).unwrap();
    // A chassis' chips are switches of their own, and an adapter without a host's name is one.
    assert!(fabric.switch("core-S01-U1").is_some() && fabric.switch("core-S02-U1").is_some());
    assert_eq!((fabric.hosts().len(), fabric.switches().len()), (5, 4));
    assert_eq!(fabric.uplink(fabric.host("gpu01").unwrap()), Rate(400_000_000_000));
    assert!(made.contains("the two ends report different numbers of cables"), "{made}");
}

#[test]
fn topograph_becomes_a_topology() {
    let made = topology(&format!("import topograph {} --rate 400Gbit/s", input("model.yaml"))).unwrap();
    same("docs/examples/topograph.toml", &made);
    let fabric = Topology::parse(&made).unwrap();
    assert_eq!((fabric.hosts().len(), fabric.switches().len(), fabric.links().len()), (5, 5, 9));
    assert_eq!(fabric.hosts().first().unwrap().rack.as_deref(), Some("nvl1"));
    let made = topology(&format!("import topograph {}", input("instances.json"))).unwrap();
    assert_eq!(Topology::parse(&made).unwrap().hosts().len(), 3);
}

#[test]
fn older_models_have_lists_with_names() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.yaml");
    let model = "switches:\n- name: s1\n  switches: [s2, s3]\n- name: s2\n  capacity_blocks: [cb2]\n- name: s3\n  \
                 capacity_blocks: [cb3]\ncapacity_blocks:\n- name: cb2\n  nvlink: nvl2\n  nodes: [a, b]\n- name: cb3\n  nodes: [c]\n";
    std::fs::write(&path, model).unwrap();
    let made = topology(&format!("import topograph {}", path.display())).unwrap();
    let fabric = Topology::parse(&made).unwrap();
    assert_eq!((fabric.hosts().len(), fabric.links().len()), (3, 5));
}

#[test]
fn counts_become_a_topology() {
    let made = topology("new --racks 4 --hosts 16 --spines 2").unwrap();
    same("docs/examples/leaf-spine.toml", &made);
    let fabric = Topology::parse(&made).unwrap();
    assert_eq!((fabric.hosts().len(), fabric.switches().len(), fabric.links().len()), (64, 6, 72));
    // Leaves send on all that their hosts send.
    assert_eq!(fabric.links().last().unwrap().rate, Rate(800_000_000_000));
    let error = topology("new --racks 2 --hosts 1 --spines 0").unwrap_err();
    assert_eq!(error, "2 racks need a spine at least");
    let error = topology("new --racks 4096 --hosts 5 --spines 1").unwrap_err();
    assert_eq!(error, "4096 racks of 5 hosts are more than 16384 hosts");
}

#[test]
fn errors_name_file_and_place() {
    let cases = [
        ("lldp", "h0.json", "{\n  \"lldp\": [,\n}", "h0.json: line 2, column 12: "),
        ("lldp", "h0.json", "{}", "h0.json: (its root): there is no `lldp`"),
        (
            "lldp",
            "h0.json",
            r#"{"lldp":{"interface":[{"eth0":{"chassis":{"a":{}}}},{"eth1":{"port":{}}}]}}"#,
            "h0.json: lldp.interface[1].eth1: it has no `chassis`",
        ),
        ("lldp", "-.json", r#"{"lldp":{}}"#, "-.json: line 1: its name is no name of a host"),
        ("ibnetdiscover", "f", "nonsense\n", "f: line 1: no line with Switch or Ca"),
        ("ibnetdiscover", "f", "# x\n[1] \"S-1\"[2]\n", "f: line 2: a port before any node: [1] \"S-1\"[2]"),
        (
            "ibnetdiscover",
            "f",
            "Ca 1 \"H-1\"\n[1] \"S-2\"[3]\n",
            "f: line 2: the cable leads to S-2, which the",
        ),
        ("ibnetdiscover", "f", "Ca 1\n", "f: line 1: a node without its GUID in quotes: Ca 1"),
        ("topograph", "m.yaml", "switches:\n  a: [\n", "m.yaml: line "),
        ("topograph", "m.yaml", "a: 1\n", "m.yaml: (its root): there are neither `switches` nor `instances`"),
        (
            "topograph",
            "m.yaml",
            "switches:\n  l: {nodes: [\"n[1-99999999999]\"]}\n",
            "m.yaml: switches.l.nodes[0]: `1-99999999999` has no number, or more than 16384",
        ),
        (
            "topograph",
            "m.yaml",
            "switches: {l: {nodes: [n]}, m: {nodes: [n]}}\nnodes: {n: {}}\n",
            "m.yaml: switches.m: `n` hangs on `l` and on `m`",
        ),
        (
            "topograph",
            "m.yaml",
            "switches: {l: {nodes: [n]}}\n",
            "m.yaml: switches.l: it has the node `n`, which",
        ),
        (
            "topograph",
            "m.yaml",
            "switches: {l: {}}\n",
            "what was read makes no topology: the topology has no [[host]]",
        ),
    ];
    for (source, name, text, start) in cases {
        let error = refusal(source, name, text);
        assert!(error.starts_with(start), "{error}\ninstead of\n{start}");
    }
}

#[test]
fn a_file_is_shown() {
    let file = workspace::root().join("docs/examples/leaf-spine.toml");
    let page = topology(&format!("show {}", file.display())).unwrap();
    let page = page.replace(&file.display().to_string(), "docs/examples/leaf-spine.toml");
    same("control/cli/tests/golden/topology-show.txt", &page);
}

/// A name or a description is not what ends a line of the file.
#[test]
fn texts_of_files_stay_within_quotes_and_comments() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    let text = "Switch 2 \"S-1\" # \"MF0;l\\eaf]:X/U1\"\n[1] \"H-1\"[1] # \"h\"\n[2] \"H-2\"[1] # \"x\"\n\
                Ca 1 \"H-1\" # \"a\u{7} b c\"\n[1] \"S-1\"[1] # 4xEDR\nCa 1 \"H-2\" # \"n2 mlx5_0\"\n[1] \"S-1\"[2] # 4xEDR\n";
    std::fs::write(&path, text).unwrap();
    let made = topology(&format!("import ibnetdiscover {}", path.display())).unwrap();
    assert!(Topology::parse(&made).unwrap().switch("l-eaf").is_some(), "{made}");
    assert!(made.contains("# ? its description names no host: a  b c\n"), "{made}");
}
