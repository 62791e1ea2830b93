//! Tests that screens are drawn as expected and that keys do what they promise. Neither a text from outside nor an odd size
//! breaks anything.

use super::draw::{draw, lines, without_colours};
use super::screen::{Action, Screen};
use super::{View, complete, picture};
use harmonaize_api::v1::{self, CongestionCause, CongestionLevel, FlowProtocol, StragglerCause};
use harmonaize_testkit::golden::same;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;
use serde_json::Value;

const MILLI: u64 = 1_000_000;
const SECOND: u64 = 1000 * MILLI;
const NOW: u64 = 1_763_755_542_123_456_789;
const WORLD: u64 = 0x5f3a_9c12_0000_0001;

fn congestion(interface: &str, level: CongestionLevel, cause: CongestionCause, age: u64) -> v1::Congestion {
    v1::Congestion {
        interface: interface.to_owned(),
        level: level.into(),
        cause: cause.into(),
        since_ns: NOW - age,
        ..Default::default()
    }
}

fn link(interface: &str, rates: [u64; 3], finding: v1::Congestion, faults: [u64; 2]) -> v1::Link {
    let [egress_bits, own_egress_bits, ingress_bits] = rates.map(|rate| rate * 1_000_000);
    let [marked, retransmissions] = faults;
    v1::Link {
        interface: interface.to_owned(),
        capacity_bps: 1_000_000_000,
        egress_bps: egress_bits,
        ingress_bps: ingress_bits,
        own_egress_bps: own_egress_bits,
        congestion: Some(finding),
        counters: Some(v1::LinkCounters {
            ecn_ce: marked,
            retransmits: retransmissions,
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn direction(bits: u64, bytes: u64, trip: [u64; 2], resent: u64) -> v1::FlowDirection {
    let [round_trip_last_ns, round_trip_least_ns] = trip.map(|micros| micros * 1000);
    v1::FlowDirection {
        rate_bps: bits * 1_000_000,
        bytes,
        packets: bytes / 1448,
        retransmits: resent,
        rtt_samples: u64::from(trip[0] > 0),
        last_rtt_ns: round_trip_last_ns,
        min_rtt_ns: round_trip_least_ns,
        ..Default::default()
    }
}

fn tcp(ports: [u32; 2], remote: &str, out: v1::FlowDirection, into: v1::FlowDirection) -> v1::Flow {
    v1::Flow {
        interface: "eth0".to_owned(),
        protocol: FlowProtocol::Tcp.into(),
        local: "10.64.0.1".to_owned(),
        local_port: ports[0],
        remote: remote.to_owned(),
        remote_port: ports[1],
        egress: Some(out),
        ingress: Some(into),
        ..Default::default()
    }
}

fn flows() -> Vec<v1::Flow> {
    let owner =
        v1::FlowOwner { tenant: "a".to_owned(), communicator: WORLD, epoch: 1, participant: 0, peer: 1 };
    let mut own = tcp(
        [7200, 41_022],
        "10.64.0.2",
        direction(461, 8 << 30, [412, 96], 3),
        direction(2, 40 << 20, [0, 0], 0),
    );
    own.owner = Some(owner.clone());
    let mut back = tcp(
        [40_118, 7200],
        "10.64.0.4",
        direction(2, 41 << 20, [388, 97], 0),
        direction(455, 8 << 30, [0, 0], 0),
    );
    back.owner = Some(v1::FlowOwner { peer: 3, ..owner });
    let mut gloo = tcp(
        [34_560, 50_001],
        "10.64.0.3",
        direction(402, 3 << 30, [2210, 101], 41),
        direction(398, 3 << 30, [0, 0], 2),
    );
    gloo.job = "1".to_owned();
    let roce = v1::Flow {
        interface: "eth1".to_owned(),
        protocol: FlowProtocol::Roce.into(),
        local: "fd00::1".to_owned(),
        remote: "fd00::2".to_owned(),
        queue_pair: 0x11a,
        source_port: 49_152,
        egress: Some(v1::FlowDirection { ecn_ce: 12, cnps: 4, ..direction(88, 1 << 30, [31, 12], 0) }),
        ..Default::default()
    };
    vec![own, back, gloo, roce]
}

/// A host whose link others congest, with an own communicator and an external job.
fn snapshot() -> v1::Snapshot {
    let congested = congestion("eth0", CongestionLevel::Severe, CongestionCause::CrossTraffic, 4200 * MILLI);
    let quiet = congestion("eth1", CongestionLevel::None, CongestionCause::Unspecified, 3900 * SECOND);
    let operation = v1::Operation {
        communicator: WORLD,
        operation: 4118,
        ranks: vec![v1::RankTiming { rank: 0, called_ns: NOW - 31 * MILLI, ..Default::default() }],
        ..Default::default()
    };
    let phase = v1::TrafficPhase {
        job: "1".to_owned(),
        iteration: 206,
        start_ns: NOW - 92 * MILLI,
        end_ns: NOW - 31 * MILLI,
        bytes: 98 << 20,
        delayed_host: "10.64.0.3".to_owned(),
        delay_ns: 7 * MILLI,
        ..Default::default()
    };
    v1::Snapshot {
        host: "h0".to_owned(),
        time_ns: NOW,
        interval_ns: SECOND,
        uptime_ns: 3912 * SECOND,
        links: vec![
            link("eth0", [878, 463, 855], congested, [0, 46]),
            link("eth1", [88, 0, 1], quiet, [12, 0]),
        ],
        flows: flows(),
        flow_count: 214,
        communicators: vec![v1::CommunicatorTraffic {
            communicator: WORLD,
            tenant: "a".to_owned(),
            name: "world".to_owned(),
            ranks: vec![0, 1],
            epoch: 1,
            operations: 4118,
            egress_bps: 441_000_000,
            ingress_bps: 437_000_000,
            last_operation_ns: 38_400_000,
            median_operation_ns: 21_100_000,
            ..Default::default()
        }],
        operations: vec![operation],
        external_jobs: vec![v1::ExternalJob {
            job: "1".to_owned(),
            hosts: ["10.64.0.1", "10.64.0.3", "10.64.0.2", "10.64.0.4"].map(str::to_owned).to_vec(),
            flows: 8,
            iterations: 207,
            period_ns: 182 * MILLI,
            rate_bps: 800_000_000,
            last: Some(phase),
            ring: true,
            since_ns: NOW - 40 * SECOND,
        }],
        stragglers: vec![v1::Straggler {
            job: "1".to_owned(),
            rank: 1,
            host: "10.64.0.3".to_owned(),
            cause: StragglerCause::Compute.into(),
            since_ns: NOW - 12 * SECOND,
            delay_ns: 7 * MILLI,
            iterations: 64,
            ..Default::default()
        }],
        losses: Some(v1::TelemetryLosses { evicted: 3, ..Default::default() }),
        cost: Some(v1::TelemetryCost { thread_ppm: 4200, timed: true, runs: 1000, run_ns: 92_000 }),
        missing: vec!["queue pairs: the kernel has no symbol ib_create_qp_kernel".to_owned()],
    }
}

/// Four hosts as control sees them.
fn fabric() -> v1::FabricSnapshot {
    let late = v1::Straggler {
        communicator: WORLD,
        rank: 2,
        host: "h2".to_owned(),
        cause: StragglerCause::Network.into(),
        since_ns: NOW - 8 * SECOND,
        delay_ns: 16_800_000,
        iterations: 38,
        edge_from: Some(1),
        edge_to: Some(2),
        ..Default::default()
    };
    let host = |name: &str, reports: u64, links: Vec<v1::Link>| v1::HostTelemetry {
        host: name.to_owned(),
        connected: name != "h3",
        reports,
        age_ns: if reports > 0 { 310 * MILLI } else { 0 },
        links,
        flow_count: 40 * reports.min(3),
        cost: Some(v1::TelemetryCost { thread_ppm: 3100, ..Default::default() }),
        ..Default::default()
    };
    let quiet = congestion("eth0", CongestionLevel::None, CongestionCause::Unspecified, 700 * SECOND);
    let own = congestion("eth0", CongestionLevel::Mild, CongestionCause::Own, 61 * SECOND);
    let congested = congestion("eth0", CongestionLevel::Severe, CongestionCause::CrossTraffic, 8 * SECOND);
    let finding = v1::finding_change::Finding::Congestion(congested.clone());
    let changes = vec![
        v1::FindingChange { time_ns: NOW - 8 * SECOND, host: "h2".to_owned(), finding: Some(finding) },
        v1::FindingChange {
            time_ns: NOW - 7 * SECOND,
            host: String::new(),
            finding: Some(v1::finding_change::Finding::Straggler(late.clone())),
        },
    ];
    let mut hosts = vec![
        host("h0", 412, vec![link("eth0", [463, 461, 455], quiet.clone(), [0, 0])]),
        host("h1", 398, vec![link("eth0", [951, 940, 455], own, [0, 2])]),
        host("h2", 407, vec![link("eth0", [463, 461, 949], congested, [0, 977])]),
        host("h3", 0, vec![]),
    ];
    hosts[1].refused = 1;
    v1::FabricSnapshot {
        time_ns: NOW,
        hosts,
        communicators: vec![v1::CommunicatorTelemetry {
            communicator: WORLD,
            tenant: "a".to_owned(),
            name: "world".to_owned(),
            ranks: 4,
            operations: 4118,
            last_operation_ns: 38_400_000,
            median_operation_ns: 21_100_000,
            straggler: Some(late.clone()),
        }],
        stragglers: vec![late],
        changes,
    }
}

fn screen_of(view: &View, screen: &Screen, note: &str, size: (u16, u16)) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).unwrap();
    terminal.draw(|frame| draw(view, screen, note, frame.buffer_mut())).unwrap();
    terminal.backend().buffer().clone()
}

fn press(screen: &mut Screen, view: &View, keys: &[KeyCode]) {
    for key in keys {
        let asked = screen.key(KeyEvent::new(*key, KeyModifiers::NONE), view);
        assert_eq!(asked, Action::Nothing, "{key:?}");
    }
}

#[test]
fn programs_get_what_is_drawn() {
    let plan = v1::PlanStatus { epoch: 3, ..v1::PlanStatus::default() };
    let plans = v1::PlansReply { plans: vec![plan], ..v1::PlansReply::default() };
    let decision = v1::DecisionRecord { number: 7, ..v1::DecisionRecord::default() };
    let decisions = v1::ExplainReply { decisions: vec![decision], ..v1::ExplainReply::default() };
    let (agent, control) = (complete::snapshot(&snapshot()), complete::fabric(&fabric(), &plans, &decisions));
    assert_eq!((&control["plans"][0]["epoch"], &control["decisions"][0]["number"]), (&3.into(), &7.into()));
    assert_eq!((&agent["flows"][3]["protocol"], &agent["losses"]["evicted"]), (&"roce".into(), &3.into()));
    assert_eq!(control["hosts"][2]["links"][0]["congestion"]["level"], "severe");
    assert_eq!(control["communicators"][0]["communicator"], "5f3a9c1200000001");
    let changes =
        [&control["changes"][0]["congestion"]["cause"], &control["changes"][1]["straggler"]["rank"]];
    assert_eq!(changes, [&Value::from("cross_traffic"), &Value::from(2)]);
}

#[test]
fn frames_are_drawn_as_expected() {
    let (agent, control) = (View::agent(&snapshot()), View::fabric(&fabric()));
    let screen = Screen::default();
    let golden = |name: &str, view: &View, screen: &Screen, size| {
        let frame = lines(&screen_of(view, screen, "", size));
        same(&format!("control/cli/tests/golden/{name}.txt"), &frame);
    };
    golden("top-agent-80x24", &agent, &screen, (80, 24));
    golden("top-agent-140x30", &agent, &screen, (140, 30));
    golden("top-control-80x24", &control, &screen, (80, 24));
    golden("top-agent-40x10", &agent, &screen, (40, 10));
    let mut alone = Screen::default();
    press(&mut alone, &agent, &[KeyCode::Char('2'), KeyCode::Enter]);
    golden("top-flows-80x24", &agent, &alone, (80, 24));
    press(&mut alone, &agent, &[KeyCode::Char('?')]);
    golden("top-help-80x24", &agent, &alone, (80, 24));
    golden("top-empty-80x24", &View::agent(&v1::Snapshot::default()), &screen, (80, 24));
}

#[test]
fn the_help_lists_all_that_is_not_measured() {
    let mut missing = snapshot().missing;
    let long = format!("round trips: {} \u{1b}end", "word ".repeat(30).trim_end());
    missing.extend([long, "sockets: no such file".to_owned()]);
    let view = View::agent(&v1::Snapshot { missing, ..snapshot() });
    let mut screen = Screen::default();
    press(&mut screen, &view, &[KeyCode::Char('?')]);
    let shown = lines(&screen_of(&view, &screen, "", (40, 30)));
    let rest: Vec<&str> = shown.lines().skip_while(|line| *line != "  not measured:").collect();
    let first = ["  queue pairs: the kernel has no symbol", "    ib_create_qp_kernel"];
    assert_eq!(rest[1..3], first, "{shown}");
    assert_eq!(shown.matches("word").count(), 30, "{shown}");
    assert!(shown.contains(" ?end\n  sockets: no such file\n"), "{shown}");
}

#[test]
fn communicators_have_names_where_they_are_known() {
    let late = |communicator| v1::Straggler { communicator, ..v1::Straggler::default() };
    let stragglers = vec![late(WORLD), late(7)];
    let named = |view: &View| {
        let panel = view.panels.iter().find(|panel| panel.title == "STRAGGLERS").unwrap();
        panel.rows.iter().map(|row| row[0].text.clone()).collect::<Vec<_>>()
    };
    let agent = View::agent(&v1::Snapshot { stragglers: stragglers.clone(), ..snapshot() });
    let control = View::fabric(&v1::FabricSnapshot { stragglers, ..fabric() });
    for view in [&agent, &control] {
        assert_eq!(named(view), ["a/world", "0000000000000007"]);
    }
}

#[test]
fn without_colours_all_else_stays() {
    let coloured = screen_of(&View::agent(&snapshot()), &Screen::default(), "", (118, 27));
    let mut plain = coloured.clone();
    without_colours(&mut plain);
    assert_eq!(lines(&plain), lines(&coloured));
    let modifiers = |buffer: &Buffer| buffer.content.iter().map(|cell| cell.modifier).collect::<Vec<_>>();
    assert_eq!(modifiers(&plain), modifiers(&coloured));
    let colours = |buffer: &Buffer| {
        buffer.content.iter().any(|cell| (cell.fg, cell.bg) != (Color::Reset, Color::Reset))
    };
    assert!(colours(&coloured) && !colours(&plain));
}

#[test]
fn pictures_of_the_guide_are_what_top_draws() {
    for (name, view) in [("top-agent", View::agent(&snapshot())), ("top-control", View::fabric(&fabric()))] {
        let buffer = screen_of(&view, &Screen::default(), "", (118, 27));
        let drawn = picture::svg(&buffer, "harmonaize top");
        same(&format!("docs/pictures/{name}.svg"), &drawn);
    }
}

#[test]
fn keys_do_what_the_help_says() {
    let view = View::agent(&snapshot());
    let mut screen = Screen::default();
    let column = |screen: &Screen, cell: usize| -> Vec<String> {
        screen.rows(&view.panels[1]).iter().map(|row| row[cell].text.clone()).collect()
    };
    assert_eq!(column(&screen, 4), ["461M", "2.00M", "402M", "88.0M"], "as they come");
    press(&mut screen, &view, &[KeyCode::Tab]);
    press(&mut screen, &view, &[KeyCode::Char('s'); 5]);
    assert_eq!(column(&screen, 4), ["2.00M", "88.0M", "402M", "461M"]);
    press(&mut screen, &view, &[KeyCode::Char('r')]);
    assert_eq!(column(&screen, 4), ["461M", "402M", "88.0M", "2.00M"]);
    press(&mut screen, &view, &[KeyCode::Char('S'); 4]);
    assert_eq!(column(&screen, 0), ["tcp", "tcp", "tcp", "roce"]);
    press(&mut screen, &view, &[KeyCode::Char('/'), KeyCode::Char('Q'), KeyCode::Char('p'), KeyCode::Enter]);
    assert_eq!(column(&screen, 2), ["fd00::2 qp 282"], "in any case");
    press(
        &mut screen,
        &view,
        &[KeyCode::Char('/'), KeyCode::Backspace, KeyCode::Backspace, KeyCode::Char('q')],
    );
    assert!(screen.typing, "q is a letter there");
    press(&mut screen, &view, &[KeyCode::Esc]);
    assert_eq!((screen.filter.as_str(), column(&screen, 0).len()), ("", 4));
    press(&mut screen, &view, &[KeyCode::End, KeyCode::PageDown, KeyCode::Up]);
    let kind = view.panels[1].kind;
    assert_eq!(screen.window(kind, 4, 2), (2, 2), "never beyond the last row");
    press(&mut screen, &view, &[KeyCode::Home]);
    assert_eq!(screen.window(kind, 4, 2), (0, 2));
    press(&mut screen, &view, &[KeyCode::Char('p'), KeyCode::BackTab, KeyCode::BackTab, KeyCode::Char('9')]);
    assert_eq!((screen.paused, screen.focus), (true, 4));

    for quit in [KeyCode::Char('q'), KeyCode::Esc] {
        assert_eq!(screen.key(KeyEvent::new(quit, KeyModifiers::NONE), &view), Action::Quit);
    }
    press(&mut screen, &view, &[KeyCode::Char('/')]);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(screen.key(interrupt, &view), Action::Quit, "whatever else goes on");
}

#[test]
fn every_size_is_drawn() {
    let mut nasty = snapshot();
    let text = "\u{1b}[31m\u{202e}\u{65e5}\u{672c}\u{1f600}\n\t\0".repeat(20);
    nasty.host.clone_from(&text);
    nasty.links[0].interface.clone_from(&text);
    nasty.flows[0].local.clone_from(&text);
    nasty.flows[1].remote = String::new();
    nasty.communicators[0].name.clone_from(&text);
    nasty.communicators[0].ranks = (0..5000).step_by(2).collect();
    nasty.stragglers[0].job.clone_from(&text);
    nasty.missing = vec![text; 99];
    nasty.external_jobs[0].last = None;
    nasty.links.resize(3000, v1::Link { egress_bps: u64::MAX, capacity_bps: 1, ..Default::default() });
    let views = [View::agent(&nasty), View::fabric(&fabric()), View::agent(&v1::Snapshot::default())];
    for view in &views {
        for alone in [false, true] {
            let mut screen = Screen::default();
            screen.maximized = alone;
            for width in (0..130).step_by(7) {
                for height in (0..40).step_by(5) {
                    let buffer = screen_of(view, &screen, "the agent is gone", (width, height));
                    let shown = lines(&buffer);
                    assert!(!shown.chars().any(|c| c.is_control() && c != '\n'), "{width}x{height}");
                }
            }
        }
    }
}
