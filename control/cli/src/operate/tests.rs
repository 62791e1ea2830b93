//! What operators read, from answers that are made up.

use super::{Moment, text};
use crate::text::page;
use harmonaize_api::v1;
use harmonaize_planner::Nanos;
use harmonaize_testkit::golden::same;
use std::time::{Duration, SystemTime};

/// 2025-11-21 20:05:42.123 UTC.
const AT: u64 = 1_763_755_542_123_000_000;

fn ms(count: u64) -> u64 {
    AT + count * 1_000_000
}

fn plan() -> v1::PlanStatus {
    let path = |source_port, switches: &[&str]| v1::PlannedPath {
        source_port,
        switches: switches.iter().map(|name| (*name).to_owned()).collect(),
    };
    let hop = |from: &str, to: &str, paths| v1::PlannedRingEdge {
        from: from.to_owned(),
        to: to.to_owned(),
        paths,
        rate_bps: 400_000_000,
    };
    let over = |spine| ["leaf0", spine, "leaf1"];
    v1::PlanStatus {
        communicator: 0x1_0000_0001,
        tenant: "a".to_owned(),
        name: "world".to_owned(),
        epoch: 3,
        next_epoch: 4,
        order: vec!["h0".to_owned(), "h1".to_owned()],
        ring_edges: vec![
            hop("h0", "h1", vec![path(20001, &over("spine1")), path(20002, &over("spine1"))]),
            hop("h1", "h0", vec![path(20001, &over("spine1")), path(20007, &[])]),
        ],
        predicted_ns: 5_000_000,
        slowdown_ppm: 1_250_000,
        share_bps: 400_000_000,
        reason: "others fill \u{1b}[2Jspine0".to_owned(),
        ..Default::default()
    }
}

#[test]
fn plans_in_words() {
    let coded = v1::PlanStatus {
        budget: "vNMSE at most 0.001".to_owned(),
        codec: "int8".to_owned(),
        codec_reason: "4.000 ms for 1.0 MiB, which take 13.000 ms exact".to_owned(),
        aggregator: "agg0".to_owned(),
        aggregation_reason: "1.0 ms for 1 MiB by agg0 at s0, 1.5 ms by the hosts".to_owned(),
        ..plan()
    };
    let reply =
        v1::PlansReply { plans: vec![coded], changes_completed: 2, changes_abandoned: 1, plans_made: 9 };
    assert_eq!(
        text::plans(&reply),
        "1 communicator; 2 changes of plan done, 1 given up

PLANS
                id  name      epoch  ring   operation  slowdown  share, bit/s  order by
  0000000100000001  a/world  3 -> 4  h0 h1  5.0ms          1.25  400M          control

LINKS OF RINGS
  name     link      paths (source port)                    held to, bit/s
  a/world  h0 -> h1  leaf0 spine1 leaf1 (20001, 20002)      400M
  a/world  h1 -> h0  leaf0 spine1 leaf1 (20001); ? (20007)  400M

a/world: others fill  [2Jspine0

a/world: tensors travel as int8 (budget: vNMSE at most 0.001): 4.000 ms for 1.0 MiB, which take 13.000 ms exact

a/world: agg0 sums large operations on the way: 1.0 ms for 1 MiB by agg0 at s0, 1.5 ms by the hosts
"
    );
    let value = serde_json::to_value(&reply).unwrap();
    assert_eq!(value["plans"][0]["aggregator"], "agg0");
    let alone = v1::PlanStatus { aggregation_reason: "no aggregator is there".to_owned(), ..plan() };
    let shown = text::plans(&v1::PlansReply { plans: vec![alone], ..v1::PlansReply::default() });
    assert!(shown.ends_with("a/world: no aggregator sums on the way: no aggregator is there\n"), "{shown}");
}

#[test]
fn aggregators_in_words() {
    let tenant = v1::AggregatedTenant { tenant: "a".to_owned(), sums: 12, ..v1::AggregatedTenant::default() };
    let report =
        v1::AggregatorReport { tenants: vec![tenant], used_units: 3, unrecognized: 1, send_errors: 0 };
    let one = v1::FabricAggregator {
        name: "agg0".to_owned(),
        switch: "s0".to_owned(),
        rate_bps: 4_000_000_000,
        connected: true,
        address: "10.0.0.9:7400".to_owned(),
        units: 4096,
        guaranteed_units: 64,
        unit_bytes: 1392,
        communicators: 1,
        report: Some(report),
    };
    let away =
        v1::FabricAggregator { name: "agg1".to_owned(), switch: "s0".to_owned(), ..Default::default() };
    let reply = v1::TopologyReply { aggregators: vec![one, away], ..v1::TopologyReply::default() };
    let shown = text::topology(&reply);
    for line in ["agg0", "agg1"] {
        let line = shown.lines().find(|text| text.contains(line)).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[0] {
            "agg0" => assert_eq!(words, ["agg0", "s0", "4.00G", "connected", "1", "64", "of", "4096", "12"]),
            _ => assert_eq!(words, ["agg1", "s0", "0", "away", "0", "-", "0"]),
        }
    }
    let value = serde_json::to_value(&reply).unwrap();
    assert_eq!(value["aggregators"][0]["report"]["tenants"][0]["sums"], 12);
    assert!(value["aggregators"][1]["report"].is_null());
}

/// A fabric of two racks: `extra` more links that are well.
fn fabric(extra: usize) -> v1::TopologyReply {
    let owned = |text: &str| text.to_owned();
    let host = |name: &str, rack: &str, connected, withdrawn| v1::FabricHost {
        name: owned(name),
        rack: owned(rack),
        connected,
        withdrawn,
        communicators: u32::from(connected),
        kind: if connected { owned("a100") } else { String::new() },
    };
    let switch = |name: &str, kind: &str, withdrawn, connections| v1::FabricSwitch {
        name: owned(name),
        kind: owned(kind),
        addresses: vec![owned("10.255.0.1")],
        withdrawn,
        connections,
    };
    let link = |from: &str, to: &str, state: v1::LinkState| v1::DirectedLinkStatus {
        from: owned(from),
        to: owned(to),
        capacity_bps: 100_000_000_000,
        state: state.into(),
        ..v1::DirectedLinkStatus::default()
    };
    let congested = v1::DirectedLinkStatus {
        cross_traffic_bps: 37_500_000_000,
        since_ns: AT,
        confidence_ppm: 925_000,
        connections: 4,
        ..link("leaf0", "spine0", v1::LinkState::Congested)
    };
    let failed = v1::DirectedLinkStatus {
        capacity_bps: 0,
        since_ns: ms(1500),
        confidence_ppm: 1_000_000,
        ..link("spine0", "leaf1", v1::LinkState::Failed)
    };
    let withdrawn = link("leaf0", "spine1", v1::LinkState::Withdrawn);
    let well = std::iter::repeat_n(link("h0", "leaf0", v1::LinkState::Ok), 1 + extra);
    let tenant = v1::AggregatedTenant { tenant: owned("a"), sums: 12, ..v1::AggregatedTenant::default() };
    let report = v1::AggregatorReport { tenants: vec![tenant], ..v1::AggregatorReport::default() };
    let aggregator = v1::FabricAggregator {
        name: owned("agg0"),
        switch: owned("spine0"),
        rate_bps: 4_000_000_000,
        connected: true,
        address: owned("10.0.0.9:7400"),
        units: 4096,
        guaranteed_units: 64,
        unit_bytes: 1392,
        communicators: 1,
        report: Some(report),
    };
    v1::TopologyReply {
        hosts: vec![host("h0", "r0", true, false), host("a-host-of-a-long-name", "", false, true)],
        switches: vec![
            switch("leaf0", "leaf", false, 8),
            switch("spine0", "spine", false, 4),
            switch("spine1", "spine", true, 0),
        ],
        links: [congested, failed, withdrawn].into_iter().chain(well).collect(),
        aggregators: vec![aggregator],
        now_ns: ms(192_000),
    }
}

#[test]
fn a_topology_fills_every_section() {
    same("control/cli/tests/golden/topology.txt", &text::topology(&fabric(0)));
    same("control/cli/tests/golden/topology.json", &page(&fabric(0)));
}

/// A control of release 0.2.0 does not say when it answered, and this machine's clock may be another.
#[test]
fn without_controls_clock_links_have_dates() {
    let shown = text::topology(&v1::TopologyReply { now_ns: 0, ..fabric(0) });
    let line = shown.lines().find(|line| line.contains("congested  ")).unwrap();
    assert!(line.contains("  2025-11-21T20:05:42Z  ") && !shown.contains("3min12s"), "{shown}");
}

/// Of a large fabric only links are listed with which something is wrong.
#[test]
fn a_large_topology_lists_what_is_wrong() {
    same("control/cli/tests/golden/topology-large.txt", &text::topology(&fabric(100)));
}

fn decision() -> v1::DecisionRecord {
    let report = v1::CongestionReportRecord {
        host: "h0".to_owned(),
        path: "h0 leaf0 spine0 leaf1 h1".to_owned(),
        finding: "severe congestion by others".to_owned(),
        since_ns: ms(0),
        found_ns: ms(2),
        received_ns: ms(3),
    };
    let change = v1::ChangeRecord {
        communicator: 0x1_0000_0001,
        tenant: "a".to_owned(),
        name: "world".to_owned(),
        epoch: 4,
        reason: "leaves spine0".to_owned(),
        reason_code: "planned".to_owned(),
        sent_ns: ms(4),
        prepared_ns: ms(10),
        first_switched_ns: ms(15),
        switched_ns: ms(18),
        outcome: "in use".to_owned(),
        outcome_code: v1::ChangeOutcome::InUse.into(),
    };
    v1::DecisionRecord {
        number: 7,
        at_ns: ms(4),
        cause: "h0 tells of congestion".to_owned(),
        reason: "spine1 is free".to_owned(),
        score_before_ppm: 2_000_000,
        score_after_ppm: 1_000_000,
        congestion_report: Some(report),
        changes: vec![change],
        ..Default::default()
    }
}

#[test]
fn algorithms_in_words() {
    let time = |algorithm: &str, micros: u64| v1::PredictedTime {
        algorithm: algorithm.to_owned(),
        time_ns: micros * 1000,
    };
    let range = |from_bytes, to_bytes, algorithm: &str, predicted, overridden| v1::AlgorithmStatus {
        collective: "allreduce".to_owned(),
        from_bytes,
        to_bytes,
        algorithm: algorithm.to_owned(),
        at_bytes: to_bytes.unwrap_or(16 << 20),
        predicted,
        overridden,
    };
    let times = || vec![time("ring", 420), time("recursive-doubling", 150)];
    let algorithms = vec![
        range(0, Some(4096), "recursive-doubling", times(), false),
        range(4097, Some(8192), "one-shot", Vec::new(), true),
        range(8193, None, "ring", times(), false),
    ];
    let algorithm_reason = "20us one way".to_owned();
    let route = |route: &str, name: &str, reason: &str| v1::CongestionControlStatus {
        route: route.to_owned(),
        name: name.to_owned(),
        reason: reason.to_owned(),
        reason_code: String::new(),
    };
    let congestion_controls = vec![
        route("rack", "", "an operator chose dctcp, which h1 does not have"),
        route("racks", "bbr", "an operator chose it"),
    ];
    let plan = v1::PlanStatus { algorithms, algorithm_reason, congestion_controls, ..plan() };
    let reply = v1::PlansReply { plans: vec![plan], ..v1::PlansReply::default() };
    let shown = text::plans(&reply);
    let line = "a/world: allreduce recursive-doubling up to 4.00KiB, allreduce one-shot up to 8.00KiB: 20us one way\n";
    assert!(shown.contains(line) && !shown.contains("ALGORITHMS"), "{shown}");
    let shown = text::explain(&v1::ExplainReply::default(), Some(&reply));
    let table = |title: &str, lines: usize| -> Vec<String> {
        let lines = shown.lines().skip_while(|line| *line != title).skip(2).take(lines);
        let cells = |line: &str| {
            let cells: Vec<&str> = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
            cells.join("|")
        };
        lines.map(cells).collect()
    };
    assert_eq!(
        table("CONGESTION CONTROL", 2),
        [
            "a/world|within a rack|the host's own|an operator chose dctcp, which h1 does not have",
            "a/world|between racks|bbr|an operator chose it",
        ],
        "{shown}"
    );
    assert_eq!(
        table("ALGORITHMS", 3),
        [
            "a/world|allreduce|0B|4.00KiB|recursive-doubling|150us|4.00KiB|predicted|ring 420us",
            "a/world|allreduce|4.00KiB|8.00KiB|one-shot|-|-|an operator chose|-",
            "a/world|allreduce|8.00KiB|-|ring|420us|16.0MiB|predicted|recursive-doubling 150us",
        ],
        "{shown}"
    );
}

#[test]
fn decisions_in_words() {
    let reply = v1::ExplainReply { decisions: vec![decision()], now_ns: ms(100), ..Default::default() };
    assert_eq!(
        text::explain(&reply, None),
        "decision 7 at 20:05:42.127: h0 tells of congestion
  spine1 is free
  slowdown 2.00 before, 1.00 after
  report of h0: severe congestion by others on h0 leaf0 spine0 leaf1 h1; planned 1.0ms later
  name     epoch  sent   prepared  first uses it  all use it  now     why
  a/world      4  1.0ms  7.0ms     12.0ms         15.0ms      in use  leaves spine0
"
    );
    let of_yesterday = v1::ExplainReply { now_ns: ms(86_500_000), ..reply.clone() };
    let shown = text::explain(&of_yesterday, None);
    assert!(shown.starts_with("decision 7 at 2025-11-21T20:05:42Z: h0 tells of congestion\n"), "{shown}");
    let empty = v1::ExplainReply::default();
    assert_eq!(text::explain(&empty, None), "nothing was decided since control started\n");
    let (congestion_reports_verified, congestion_reports_refuted) = (5, 2);
    let counted = v1::ExplainReply {
        congestion_reports_verified,
        congestion_reports_refuted,
        ..v1::ExplainReply::default()
    };
    let shown = text::explain(&counted, None);
    let expected = "since control began packet trains verified 5 reports of cross traffic, and refuted 2\n";
    assert!(shown.ends_with(expected), "{shown}");
    assert_eq!(serde_json::to_value(&counted).unwrap()["congestion_reports_refuted"], 2);
    let value = serde_json::to_value(&reply).unwrap();
    assert_eq!(value["decisions"][0]["changes"][0]["switched_ns"], ms(18));
    assert_eq!(value["decisions"][0]["congestion_report"]["received_ns"], ms(3));
}

#[test]
fn drains_in_words() {
    let record = |target: &str, what: &str, in_effect, left, unknown| v1::WithdrawalRecord {
        target: target.to_owned(),
        target_kind: what.to_owned(),
        kind: v1::WithdrawalKind::Drain.into(),
        from_ns: AT,
        in_effect,
        remaining: left,
        unknown_paths: unknown,
        ..Default::default()
    };
    let records = [
        record("h3", "host", true, 2, 0),
        record("leaf0:spine0", "link", true, 0, 1),
        record("spine0", "switch", true, 4, 0),
        record("spine1", "switch", true, 0, 0),
        record("spine9", "unknown", false, 0, 0),
    ];
    let shown = text::withdrawals(v1::WithdrawalKind::Drain, &records);
    let states = [
        "2 communicators go on",
        "1 connection may cross it",
        "4 connections still cross it",
        "free of ours",
        "not in the topology",
    ];
    for (line, state) in shown.lines().skip(1).zip(states) {
        assert!(line.contains(state) && line.contains("2025-11-21T20:05:42Z"), "{shown}");
    }
}

#[test]
fn moments_are_times_or_distances() {
    assert_eq!("+30min".parse(), Ok(Moment::In(Nanos(1_800_000_000_000))));
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_763_755_542);
    assert_eq!("2025-11-21T20:05:42Z".parse(), Ok(Moment::At(at)));
    assert_eq!("2025-11-21 20:05:42".parse(), Ok(Moment::At(at)));
    for bad in ["", "tomorrow", "+30", "30min", "2025-13-01T00:00:00Z"] {
        assert!(bad.parse::<Moment>().is_err(), "{bad}");
    }
}

#[test]
fn tenants_show_what_they_have_of_their_limits() {
    let limit = |key: &str, used, max| v1::TenantLimit { key: key.to_owned(), used, max };
    let limits = vec![limit("descriptors", 23, 20), limit("landing", 1 << 20, 1 << 30)];
    let limited = v1::TenantRecord { name: "a".to_owned(), configured: true, limits, ..Default::default() };
    let free = v1::TenantRecord { name: "b".to_owned(), configured: true, ..Default::default() };
    let reply = v1::TenantsReply { tenants: vec![limited, free.clone()] };
    let shown = text::tenants(&reply);
    let (_, limits) = shown.split_once("LIMITS, ALL HOSTS").expect("a section of its own");
    let rows: Vec<Vec<&str>> = limits.trim().lines().map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows[1], ["a", "descriptors", "23", "20"], "{shown}");
    assert_eq!(rows[2][..2], ["a", "landing"], "{shown}");
    assert_eq!(rows.len(), 3, "{shown}");
    let value: serde_json::Value = serde_json::from_str(&page(&reply)).unwrap();
    assert_eq!(value["tenants"][0]["limits"][1]["used"], 1 << 20);
    let shown = text::tenants(&v1::TenantsReply { tenants: vec![free] });
    assert!(!shown.contains("LIMITS"), "{shown}");
}
