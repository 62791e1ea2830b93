//! Files that are right, and every way in which one can be wrong.

use super::*;
use proptest::prelude::*;

const GOOD: &str = r#"
[[host]]
name = "h0"
rack = "r0"
[[host]]
name = "h1"

[[switch]]
name = "leaf"
[[switch]]
name = "top"
kind = "spine"

[[link]]
from = "h0"
to = "leaf"
rate = "1Gbit/s"
delay = "50us"
[[link]]
from = "top"
to = "h1"
rate = "10Gbit/s"
[[link]]
from = "leaf"
to = "top"
rate = "400Mbit/s"
delay = "1ms"
"#;

#[test]
fn reads_a_good_file() {
    let topology = Topology::parse(GOOD).unwrap();
    assert_eq!(
        topology.hosts()[0],
        Host { name: "h0".to_owned(), rack: Some("r0".to_owned()), kind: None, addresses: Vec::new() }
    );
    assert_eq!(topology.switches()[1].kind, SwitchKind::Spine);
    assert_eq!(topology.host("h1"), Some(HostId(1)));
    assert_eq!(topology.host("leaf"), None);
    let paths = topology.equal_cost_paths(HostId(0), HostId(1));
    let links: Vec<LinkId> = paths[0].links().iter().map(|link| link.link).collect();
    assert_eq!((paths.len(), links), (1, vec![LinkId(0), LinkId(2), LinkId(1)]));
    assert_eq!(topology.path_rate(&paths[0]), Rate(400_000_000));
    assert_eq!(topology.path_delay(&paths[0]), Nanos(1_050_000));
    assert!(topology.equal_cost_paths(HostId(0), HostId(0)).is_empty());
    assert!(topology.equal_cost_paths(HostId(0), HostId(7)).is_empty());
    assert_eq!(topology.node_name(Node::Switch(SwitchId(9))), "");
}

#[test]
fn one_host_needs_no_link() {
    let topology = Topology::parse("host = [{ name = \"only\" }]").unwrap();
    assert_eq!(topology.hosts().len(), 1);
}

#[test]
fn a_host_may_have_a_kind() {
    let with = |kind: &str| GOOD.replacen("rack = \"r0\"", &format!("kind = \"{kind}\""), 1);
    let topology = Topology::parse(&with("a100-80.v2")).unwrap();
    assert_eq!([0, 1, 9].map(|host| topology.kind(HostId(host))), ["a100-80.v2", "", ""]);
    for wrong in ["", "a 100", "-a", &"a".repeat(64)] {
        let error = Topology::parse(&with(wrong)).unwrap_err().to_string();
        let expected = format!("line 4, column 8: `{wrong}` is not a usable kind: 1 to 63 letters");
        assert!(error.starts_with(&expected), "{error}");
    }
    // Control reads its file again: a host's kind may change.
    let now = Topology::parse(&with("h100")).unwrap().numbered_as(&topology);
    assert_eq!(now.kind(HostId(0)), "h100");
}

#[test]
fn errors_have_positions() {
    let change = |from: &str, to: &str| GOOD.replacen(from, to, 1);
    let cases = [
        (
            change("name = \"h1\"", "nmae = \"h1\""),
            "line 6, column 1: unknown field `nmae`, expected one of `name`, `rack`, `kind`, `addresses`",
        ),
        (change("[[switch]]", "[[swich]]"), "line 8, column 3: unknown field `swich`"),
        (change("name = \"h1\"", "name = \"h0\""), "line 6, column 8: `h0` is there already, from line 3"),
        (change("name = \"leaf\"", "name = \"h0\""), "line 9, column 8: `h0` is there already, from line 3"),
        (change("name = \"h1\"", "name = \"h 1\""), "line 6, column 8: `h 1` is not a usable name"),
        (change("name = \"h1\"", "name = \"\""), "line 6, column 8: `` is not a usable name"),
        (change("name = \"h1\"", "rack = \"r1\""), "line 5, column 1: missing field `name`"),
        (change("to = \"leaf\"", "to = \"laef\""), "line 16, column 6: no host or switch is named `laef`"),
        (change("to = \"leaf\"", "to = \"h0\""), "line 15, column 8: the link joins `h0` to itself"),
        (change("1Gbit/s", "0Gbit/s"), "line 17, column 8: the link's rate is zero"),
        (change("1Gbit/s", "1Gb"), "line 17, column 8: `1Gb` is not a rate; write a number and a unit"),
        (
            change("\"50us\"", "50"),
            "line 18, column 9: invalid type: integer `50`, expected a duration in quotes",
        ),
        (change("\"spine\"", "\"spline\""), "line 12, column 8: unknown variant `spline`"),
        (
            GOOD.split_at(GOOD.rfind("[[link]]").unwrap()).0.to_owned(),
            "line 6, column 8: host `h1` cannot reach host `h0`",
        ),
        (
            GOOD.to_owned() + "[[link]]\nfrom = \"top\"\nto = \"leaf\"\nrate = \"1Gbit/s\"\n",
            "line 29, column 8: `top` and `leaf` are joined already, by the link of line 24",
        ),
        ("[[switch]]\nname = \"s\"\n".to_owned(), "the topology has no [[host]]"),
        ("[[host]\n".to_owned(), "line 1, column 8: "),
    ];
    for (text, expected) in cases {
        let error = Topology::parse(&text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "expected {expected}\ngot      {error}");
    }
}

#[test]
fn aggregators_attach_to_switches_only() {
    let aggregator =
        "[[aggregator]]\nname = \"agg0\"\nswitch = \"top\"\nrate = \"2Gbit/s\"\ndelay = \"5us\"\n";
    let good = GOOD.to_owned() + aggregator;
    let topology = Topology::parse(&good).unwrap();
    let [known] = topology.aggregators() else { panic!("{topology:?}") };
    assert_eq!((known.name.as_str(), known.switch, known.rate), ("agg0", SwitchId(1), Rate(2_000_000_000)));
    assert_eq!((topology.aggregator("agg0"), topology.aggregator("top")), (Some(AggregatorId(0)), None));
    assert_eq!((topology.host("agg0"), topology.switch("agg0")), (None, None));
    let refused = |text: String| Topology::parse(&text).unwrap_err();
    let at_host = refused(good.replace("switch = \"top\"", "switch = \"h0\""));
    assert!(matches!(&at_host, TopologyError::NoSwitch { name, .. } if name == "h0"), "{at_host}");
    let leaf = refused(good.replace("\"agg0\"", "\"leaf\""));
    assert!(matches!(&leaf, TopologyError::DuplicateName { name, .. } if name == "leaf"), "{leaf}");
    let idle = refused(good.replace("2Gbit/s", "0Gbit/s"));
    assert!(matches!(idle, TopologyError::ZeroRate { .. }), "{idle}");
    let twice = refused(good.clone() + aggregator);
    assert!(matches!(&twice, TopologyError::DuplicateName { name, .. } if name == "agg0"), "{twice}");
    let link = "[[link]]\nfrom = \"agg0\"\nto = \"leaf\"\nrate = \"1Gbit/s\"\n";
    let linked = refused(good + link);
    assert!(matches!(&linked, TopologyError::UnknownNode { name, .. } if name == "agg0"), "{linked}");
}

#[test]
fn hosts_and_aggregators_have_addresses() {
    let text = |address: &str| {
        format!(
            "host = [{{ name = \"a\", addresses = [\"10.0.0.1\", \"{address}\"] }}]\nswitch = [{{ name = \"s\" }}]\n\
             aggregator = [{{ name = \"g\", switch = \"s\", rate = \"1Gbit/s\", addresses = [\"10.0.0.1\"] }}]\n"
        )
    };
    let topology = Topology::parse(&text("fd00::1")).unwrap();
    let addresses = ["10.0.0.1", "fd00::1"].map(|address| address.parse::<IpAddr>().unwrap());
    assert_eq!(topology.hosts()[0].addresses, addresses);
    assert_eq!(topology.aggregators()[0].addresses, addresses[..1]);
    for address in ["here", "0.0.0.0", "224.0.0.1", "10.0.0.0/24"] {
        let error = Topology::parse(&text(address)).unwrap_err();
        assert!(matches!(&error, TopologyError::BadAddress { text, .. } if text == address), "{error}");
    }
}

#[test]
fn hosts_do_not_forward() {
    let text = r#"
        host = [{ name = "a" }, { name = "b" }, { name = "c" }]
        link = [{ from = "a", to = "b", rate = "1Gbit/s" }, { from = "b", to = "c", rate = "1Gbit/s" }]
    "#;
    let error = Topology::parse(text).unwrap_err();
    let (host, other) = ("c".to_owned(), "a".to_owned());
    assert_eq!(error, TopologyError::Disconnected { at: Position { line: 2, column: 58 }, host, other });
    assert_eq!(
        error.to_string(),
        "line 2, column 58: host `c` cannot reach host `a`: no chain of links and switches joins them"
    );
}

proptest! {
    #[test]
    fn damaged_files_never_panic(at in 0_usize..GOOD.len(), len in 0_usize..20, put in "\\PC{0,6}") {
        let end = (at + len).min(GOOD.len());
        let _ = Topology::parse(&format!("{}{put}{}", &GOOD[..at], &GOOD[end..]));
    }
}

#[test]
fn what_stays_keeps_its_number() {
    let before = Topology::parse(GOOD).unwrap();
    assert_eq!(before.clone().numbered_as(&before), before);
    // Another host in the place of one, in another order, and a link the other way round.
    let text = r#"
        host = [{ name = "h2" }, { name = "h0", rack = "r7" }]
        switch = [{ name = "top", kind = "spine", addresses = ["10.0.0.9"] }, { name = "leaf" }]
        aggregator = [{ name = "sums", switch = "top", rate = "1Gbit/s" }]
        link = [
            { from = "top", to = "leaf", rate = "800Mbit/s" },
            { from = "h2", to = "top", rate = "10Gbit/s" },
            { from = "h0", to = "leaf", rate = "2Gbit/s" },
        ]
    "#;
    let now = Topology::parse(text).unwrap().numbered_as(&before);
    let hosts: Vec<(HostId, &str)> = now.hosts_there().map(|(id, host)| (id, host.name.as_str())).collect();
    assert_eq!(hosts, [(HostId(0), "h0"), (HostId(2), "h2")]);
    assert_eq!((now.hosts()[0].rack.as_deref(), now.hosts()[1].name.as_str()), (Some("r7"), "h1"));
    assert_eq!((now.host("h1"), now.links_at(Node::Host(HostId(1)))), (None, [].as_slice()));
    assert_eq!((now.switch("leaf"), now.switch("top")), (Some(SwitchId(0)), Some(SwitchId(1))));
    assert_eq!(now.switch_at("10.0.0.9".parse().unwrap()), Some(SwitchId(1)));
    assert_eq!(now.aggregators()[0].switch, SwitchId(1));
    let links: Vec<LinkId> = now.links_there().map(|(id, _)| id).collect();
    assert_eq!(links, [LinkId(0), LinkId(2), LinkId(3)], "the one of h1 is gone");
    let middle = DirectedLink { link: LinkId(2), forward: true };
    assert_eq!(now.link_name(middle), before.link_name(middle), "a direction is the same one");
    assert_eq!(now.links()[2].rate, Rate(800_000_000));
    assert_eq!(now.equal_cost_paths(HostId(0), HostId(2)).len(), 1);
    assert!(now.equal_cost_paths(HostId(0), HostId(1)).is_empty());
    // Who comes back has the number of before, and what was never there is the same again.
    let back = before.clone().numbered_as(&now);
    assert_eq!((back.host("h1"), back.host("h2"), back.aggregator("sums")), (Some(HostId(1)), None, None));
    assert_eq!(back.links_there().count(), 3);
    let path = |topology: &Topology| topology.equal_cost_paths(HostId(0), HostId(1));
    assert_eq!(path(&back), path(&before));
}
