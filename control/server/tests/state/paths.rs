//! Traces, reports and probes that are wrong, late, lone or nobody's: what control makes of each.

use super::fabric::{EVERYONE, two_by_two};
use super::topology::{leaf_spine, star};
use super::world::{SECOND, World, hello, operation, settings, settings_of};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, CongestionCause, CongestionLevel, from_agent, to_agent};
use harmonaize_planner::{HostId, LinkId, Topology};
use harmonaize_server::state::testing::{MOST_UNKNOWN_HOPS, Testing as _};
use harmonaize_server::state::{Fact, Instruction, Output, Reason, SessionId};
use harmonaize_store::WithdrawalKind;
use std::collections::BTreeSet;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

/// An agent that can do everything over TCP; what it is asked stays to be looked at.
fn able(world: &mut World, host: usize) -> SessionId {
    able_over(world, host, false)
}

/// The same, whose links go over RDMA or not.
fn able_over(world: &mut World, host: usize, rdma: bool) -> SessionId {
    able_by(world, host, (rdma, rdma))
}

/// The same; whether its links go over RDMA, and whether their ways can be traced.
fn able_by(world: &mut World, host: usize, (links_over_tcp, queue_pair_routes): (bool, bool)) -> SessionId {
    let abilities = v1::Capabilities {
        trace: true,
        probe: true,
        probe_address: format!("10.0.0.{}:5000", host + 1),
        probe_key: vec![host as u8; 32],
        rate_limit: true,
        congestion_reports: true,
        links_over_tcp,
        queue_pair_routes,
        missing: vec!["nothing".to_owned(); 20],
        ..v1::Capabilities::default()
    };
    let hello = v1::Hello {
        listen: format!("10.0.0.{}:4000", host + 1),
        capabilities: Some(abilities),
        ..hello(host, vec![])
    };
    let session = world.hello(hello);
    let heard = world.received(session);
    let welcome = heard.iter().find_map(|message| match message {
        to_agent::Message::Welcome(welcome) => Some(welcome.congestion_reports_per_second),
        _ => None,
    });
    assert_eq!(welcome, Some(100));
    world.got.entry(session).or_default().extend(heard.into_iter().skip(1));
    session
}

/// The questions that a session got about paths; what else it got is dropped.
fn questions(world: &mut World, session: SessionId) -> Vec<v1::TracePaths> {
    every!(world.received(session), TracePaths)
}

/// Answers a question: each port by the spine that `spine` says, or by none.
fn answer(
    world: &mut World,
    session: SessionId,
    question: &v1::TracePaths,
    (leaf, far): (u8, u8),
    spine: impl Fn(u32) -> Option<u8>,
) {
    let path = |ports: &v1::PortPair| {
        let port = ports.source_port.max(ports.destination_port);
        let hops = [Some(leaf), spine(port), spine(port).map(|_| far)];
        let text = |hop: Option<u8>| hop.map_or_else(String::new, |hop| format!("10.64.0.{hop}"));
        let v1::PortPair { source_port, destination_port } = *ports;
        v1::TracedPath { source_port, destination_port, hops: hops.into_iter().map(text).collect() }
    };
    let paths = question.ports.iter().map(path).collect();
    let (question, error) = (question.request, String::new());
    world
        .send(session, from_agent::Message::PathsTraced(v1::PathsTraced { request: question, paths, error }));
}

fn two_racks() -> World {
    let mut settings = settings_of(&two_by_two());
    settings.source_ports = Some((20000, 29999));
    World::new(settings, 5)
}

/// Even ports go by the first spine, odd ones by the second.
fn parity(port: u32) -> Option<u8> {
    Some(3 + (port % 2) as u8)
}

/// Answers until nobody is asked any more; how many ports were asked about.
fn answer_traces(
    world: &mut World,
    sessions: &[(SessionId, (u8, u8))],
    spine: &dyn Fn(usize, u32) -> Option<u8>,
) -> usize {
    let mut ports = 0;
    for _ in 0..40 {
        for (at, (session, ends)) in sessions.iter().enumerate() {
            for question in questions(world, *session).iter().filter(|question| question.hops >= 3) {
                ports += question.ports.len();
                answer(world, *session, question, *ends, |port| spine(at, port));
            }
        }
        world.wait(MS * 50);
    }
    ports
}

/// Hosts 0 and 4, of two racks, with a traced pool and a communicator in use.
fn traced_pair() -> (World, [SessionId; 2], u64) {
    traced_pair_over(false)
}

/// The same, whose links go over RDMA or not.
fn traced_pair_over(rdma: bool) -> (World, [SessionId; 2], u64) {
    let mut world = two_racks();
    let sessions = [0, 4].map(|host| able_over(&mut world, host, rdma));
    let ends = [(sessions[0], (1, 2)), (sessions[1], (2, 1))];
    assert_eq!(answer_traces(&mut world, &ends, &|_, port| parity(port)), 48, "each way of 24 ports, once");
    let id = world.form(&sessions, "world");
    assert_eq!(answer_traces(&mut world, &ends, &|_, port| parity(port)), 0, "it has enough");
    (world, sessions, id)
}

fn path_count(world: &mut World) -> usize {
    let ports = world.state.ports_between(HostId(0), HostId(4)).into_iter();
    ports.filter(|port| port.symmetric).count()
}

/// Queue pairs send from their port at both ends. Where one end has none, links are connections.
#[test]
fn ways_of_queue_pairs_are_traced_from_both_ends() {
    let mut world = two_racks();
    let sessions = [0, 4].map(|host| able_over(&mut world, host, true));
    let mut asked = 0;
    for _ in 0..40 {
        for (session, ends) in sessions.into_iter().zip([(1, 2), (2, 1)]) {
            for question in questions(&mut world, session) {
                assert!(question.queue_pairs, "{question:?}");
                let to_roce = |ports: &v1::PortPair| ports.destination_port == 4791;
                assert!(question.ports.iter().all(to_roce), "{question:?}");
                asked += question.ports.len();
                answer(&mut world, session, &question, ends, parity);
            }
        }
        world.wait(MS * 50);
    }
    assert_eq!((asked, path_count(&mut world)), (48, 24), "each way of 24 ports, once");

    let mut world = two_racks();
    let sessions = [(0, true), (4, false)].map(|(host, rdma)| able_over(&mut world, host, rdma));
    let asked = sessions.map(|session| questions(&mut world, session)).concat();
    assert!(!asked.is_empty() && asked.iter().all(|question| !question.queue_pairs), "{asked:?}");
}

/// What is traced lies between the addresses at which agents listen. Queue pairs of other devices go by other ways.
#[test]
fn ways_of_queue_pairs_at_other_addresses_are_not_traced() {
    for routes in [[false, true], [true, false], [false, false]] {
        let mut world = two_racks();
        let sessions =
            [(0, routes[0]), (4, routes[1])].map(|(host, routes)| able_by(&mut world, host, (true, routes)));
        let id = world.form(&sessions, "world");
        world.wait(SECOND);
        let asked = sessions.map(|session| questions(&mut world, session)).concat();
        assert_eq!(asked, [], "{routes:?}");
        let port = u32::from(*world.epoch(id).links.values().flatten().next().unwrap());
        let report = v1::CongestionReport { queue_pair: true, ..congestion_report(id, 1, port) };
        world.send(sessions[0], from_agent::Message::CongestionReport(report));
        assert_eq!(world.state.report_counts("h0"), (1, 0, 0), "{routes:?}");
        assert!(world.state.congested_links().is_empty());
    }
}

/// An agent that was started again with RDMA, or without, links otherwise by the same ports.
#[test]
fn ways_are_traced_anew_when_links_go_otherwise() {
    let mut world = two_racks();
    let mut answered = |rdma: bool| {
        let sessions = [0, 4].map(|host| able_over(&mut world, host, rdma));
        let ends = [(sessions[0], (1, 2)), (sessions[1], (2, 1))];
        // A port leads datagrams over the other spine.
        let spine = |_: usize, port: u32| parity(port + u32::from(rdma));
        let count = answer_traces(&mut world, &ends, &spine);
        assert_eq!(answer_traces(&mut world, &ends, &spine), 0, "once");
        assert_eq!(path_count(&mut world), 24);
        assert!(world.state.failed_links().is_empty(), "no link is dead for that");
        sessions.iter().for_each(|session| world.gone(*session));
        world.wait(SECOND);
        count
    };
    assert_eq!([false, true, true, false].map(&mut answered), [48, 48, 0, 48]);
}

/// While links go over TCP for a hand-over, what is known of a port is the way of queue pairs.
#[test]
fn reports_are_passed_over_while_links_go_over_tcp() {
    let (mut world, sessions, id) = traced_pair_over(true);
    let report = |epoch, queue_pair| {
        let report = v1::CongestionReport { epoch, queue_pair, ..congestion_report(id, 1, 40001) };
        from_agent::Message::CongestionReport(report)
    };
    world.send(sessions[0], report(1, true));
    assert_eq!(world.state.report_counts("h0"), (0, 0, 1), "no queue pair has the port");
    world.send(sessions[1], from_agent::Message::LinksOverTcp(v1::LinksOverTcp { for_ns: 60_000_000_000 }));
    world.wait(MS * 10);
    for session in sessions {
        assert_eq!(every!(world.received(session), Change).len(), 1);
        let prepared = v1::Prepared { communicator: id, epoch: 2, links: None };
        world.send(session, from_agent::Message::Prepared(prepared));
    }
    // One end has switched already.
    world.send(sessions[0], report(2, false));
    assert_eq!(world.state.report_counts("h0"), (1, 0, 1), "it is no fault, and nothing is made of it");
    for session in sessions {
        let switched = v1::Switched { communicator: id, epoch: 2, first_segment: 1 };
        world.send(session, from_agent::Message::Switched(switched));
    }
    assert_eq!(world.epoch(id).over_tcp, BTreeSet::from([1]));
    world.send(sessions[0], report(2, false));
    assert_eq!(world.state.report_counts("h0"), (2, 0, 1));
}

/// A port may lead connections another way than queue pairs.
#[test]
fn reports_count_where_ways_were_traced_alike() {
    for rdma in [true, false] {
        let (mut world, sessions, id) = traced_pair_over(rdma);
        let port = u32::from(*world.epoch(id).links.values().flatten().next().unwrap());
        world.got.clear();
        let report = |queue_pair| {
            let report = v1::CongestionReport { queue_pair, ..congestion_report(id, 1, port) };
            from_agent::Message::CongestionReport(report)
        };
        world.send(sessions[0], report(!rdma));
        assert_eq!(every!(world.received(sessions[0]), ProbePath), []);
        assert!(world.state.congested_links().is_empty());
        world.send(sessions[0], report(rdma));
        requested_train(&mut world, sessions[0]);
    }
}

/// Others' queue pairs may send from the port of a quiet one, and lose packets.
#[test]
fn loss_of_a_quiet_queue_pair_moves_nobody() {
    for rdma in [true, false] {
        let (mut world, sessions, id) = traced_pair_over(rdma);
        let port = u32::from(*world.epoch(id).links.values().flatten().next().unwrap());
        let mut report = v1::CongestionReport { queue_pair: rdma, ..congestion_report(id, 1, port) };
        let found = report.congestion.as_mut().unwrap();
        (found.loss, found.level) = (true, CongestionLevel::Severe.into());
        // Nothing was heard of its operations for long.
        let operations = vec![operation(id, 0, 1000, 0, (1, 2))];
        let told = v1::TelemetryReport { sequence: 1, operations, ..v1::TelemetryReport::default() };
        world.send(sessions[0], from_agent::Message::Telemetry(told));
        world.wait(SECOND * 10);
        world.got.clear();
        world.send(sessions[0], from_agent::Message::CongestionReport(report));
        assert_eq!(every!(world.received(sessions[0]), ProbePath), [], "no train is sent for it");
        assert_eq!(world.state.congested_links().is_empty(), rdma, "a connection's loss is its own");
    }
}

fn congestion_report(communicator: u64, peer: u32, port: u32) -> v1::CongestionReport {
    let congestion = v1::Congestion {
        level: CongestionLevel::Mild.into(),
        cause: CongestionCause::CrossTraffic.into(),
        own_bps: 400_000_000,
        ..v1::Congestion::default()
    };
    let congestion = Some(congestion);
    v1::CongestionReport { congestion, communicator, epoch: 1, peer, source_port: port, queue_pair: false }
}

#[test]
fn agents_that_can_nothing_new_hear_nothing_new() {
    let mut world = World::new(settings(4), 7);
    let old: Vec<SessionId> = (0..3).map(|host| world.agent(host)).collect();
    let able = able(&mut world, 3);
    assert_eq!(questions(&mut world, able), [], "a way is of use if both ends can tell of it");
    for (rank, session) in old.iter().chain([&able]).enumerate() {
        world.join(*session, "world", rank as u32, 4);
    }
    for session in &old {
        assert!(matches!(world.received(*session).as_slice(), [to_agent::Message::Form(_)]));
    }
    let communicator = world.state.communicator_ids()[0];
    for session in old.iter().chain([&able]) {
        world.send(
            *session,
            from_agent::Message::Prepared(v1::Prepared {
                communicator: communicator.0,
                epoch: 1,
                links: None,
            }),
        );
    }
    let asked = questions(&mut world, able);
    assert_eq!(asked.len(), 2, "as many as it may have at a time: {asked:?}");
    assert!(asked.iter().all(|question| question.ports.len() == 2), "of what is in use: {asked:?}");
    world.wait(SECOND * 100);
    for session in old {
        assert_eq!(
            world.received(session),
            [to_agent::Message::Ready(v1::Ready { communicator: communicator.0, epoch: 1 })]
        );
    }
}

#[test]
fn traced_ports_are_used_the_way_they_lead() {
    let (mut world, sessions, id) = traced_pair();
    assert_eq!(path_count(&mut world), 24);
    let ports: Vec<u16> = world.epoch(id).links.values().flatten().copied().collect();
    assert_eq!(ports.iter().map(|port| port % 2).sum::<u16>(), 1, "one each way: {ports:?}");
    assert_eq!(questions(&mut world, sessions[0]).len(), 0, "all is known and fresh");
    world.wait(SECOND * 21);
    let asked = questions(&mut world, sessions[0]).remove(0);
    let mut again: Vec<u16> = asked.ports.iter().map(|ports| ports.source_port as u16).collect();
    again.sort_unstable();
    assert_eq!(again, ports, "and what is in use is traced again when it is not");
}

#[test]
fn answers_that_nobody_asked_for_change_nothing() {
    let mut world = two_racks();
    let [first, second] = [0, 4].map(|host| able(&mut world, host));
    let asked = questions(&mut world, first).remove(0);
    answer(&mut world, second, &asked, (1, 2), parity);
    let there = |world: &World| {
        let ports = world.state.ports_between(HostId(0), HostId(4)).into_iter();
        ports.filter(|port| port.traced).count()
    };
    assert_eq!(there(&world), 0, "another's question");
    let mut odd = asked.clone();
    odd.request = 99;
    answer(&mut world, first, &odd, (1, 2), parity);
    assert_eq!(there(&world), 0);
    // Ports that were not asked for, ports that are none, addresses that are no switch's, and far too many hops.
    let bad = |source_port: u32, hops: Vec<&str>| v1::TracedPath {
        source_port,
        destination_port: 4000,
        hops: hops.into_iter().map(ToOwned::to_owned).collect(),
    };
    let port = asked.ports[0].source_port;
    let paths = vec![
        bad(7, vec!["10.64.0.1", "10.64.0.3", "10.64.0.2"]),
        bad(u32::MAX, vec![]),
        bad(port, vec!["10.64.0.1", "10.9.9.9", "here"]),
        bad(port + 1, vec!["10.64.0.1"; 1000]),
    ];
    let traced = v1::PathsTraced { request: asked.request, paths, error: String::new() };
    world.send(first, from_agent::Message::PathsTraced(traced));
    assert_eq!(there(&world), 0);
    assert!(world.ended.is_empty(), "it costs no session");
    let ends = [(first, (1, 2)), (second, (2, 1))];
    answer_traces(&mut world, &ends, &|_, port| parity(port));
    assert_eq!(path_count(&mut world), 22, "asked again, it answers well; two ports more are not needed");
}

#[test]
fn unknown_hops_are_reported_once() {
    let mut world = two_racks();
    let [first, _] = [0, 4].map(|host| able(&mut world, host));
    let mut told = Vec::new();
    for round in 0..3 {
        for question in questions(&mut world, first) {
            let path = |(index, ports): (usize, &v1::PortPair)| v1::TracedPath {
                source_port: ports.source_port,
                destination_port: ports.destination_port,
                hops: vec![
                    "10.9.9.9".to_owned(),
                    format!("10.8.{round}.{index}"),
                    format!("10.7.{round}.{index}"),
                ],
            };
            let paths = question.ports.iter().enumerate().map(path).collect();
            let traced = v1::PathsTraced { request: question.request, paths, error: String::new() };
            world.state.message(world.now, first, from_agent::Message::PathsTraced(traced).into());
            for output in world.state.take_outputs() {
                match output {
                    Output::Send(to, message) => world.got.entry(to).or_default().push(message),
                    Output::Fact(Fact::UnknownHop { host, address }) => told.push((host, address)),
                    _ => {}
                }
            }
        }
        world.wait(SECOND * 61);
    }
    assert_eq!(told.first().unwrap(), &("h0".to_owned(), "10.9.9.9".to_owned()));
    assert_eq!(told.iter().collect::<BTreeSet<_>>().len(), told.len(), "each once: {told:?}");
    assert_eq!(told.len(), MOST_UNKNOWN_HOPS, "and no more than are kept in mind");
}

#[test]
fn operators_read_routes_over_switches_that_the_topology_lacks() {
    let mut world = two_racks();
    let [first, _] = [0, 4].map(|host| able(&mut world, host));
    let question = questions(&mut world, first).remove(0);
    let path = |ports: &v1::PortPair| v1::TracedPath {
        source_port: ports.source_port,
        destination_port: ports.destination_port,
        hops: vec!["10.9.0.1".to_owned(), "no address".to_owned()],
    };
    let paths = question.ports.iter().map(path).collect();
    let traced = v1::PathsTraced { request: question.request, paths, error: String::new() };
    world.send(first, from_agent::Message::PathsTraced(traced));
    let reply = world.state.queries(world.now).traced_paths();
    let [route] = &reply.paths[..] else { panic!("all ports took one: {reply:?}") };
    assert_eq!((route.from.as_str(), route.to.as_str()), ("h0", "h4"));
    assert_eq!(route.hops, ["10.9.0.1", "", ""]);
    assert!(question.ports.iter().any(|ports| ports.source_port == route.port) && route.traced_ns > 0);
}

#[test]
fn hosts_on_a_switch_without_addresses_trace_whole_routes() {
    let mut settings = settings_of(&star(2, "50us"));
    settings.source_ports = Some((20000, 29999));
    let mut world = World::new(settings, 5);
    let sessions = [0, 1].map(|host| able(&mut world, host));
    for _ in 0..100 {
        for (host, session) in sessions.iter().enumerate() {
            for question in questions(&mut world, *session) {
                let mut hops = ["10.9.0.1", "10.9.0.3", "10.9.0.2"].map(ToOwned::to_owned).to_vec();
                if host == 1 {
                    hops.reverse();
                }
                // Whatever gets to the host is dropped there.
                hops.resize(question.hops as usize, String::new());
                let path = |ports: &v1::PortPair| v1::TracedPath {
                    source_port: ports.source_port,
                    destination_port: ports.destination_port,
                    hops: hops.clone(),
                };
                let paths = question.ports.iter().map(path).collect();
                let traced = v1::PathsTraced { request: question.request, paths, error: String::new() };
                world.send(*session, from_agent::Message::PathsTraced(traced));
            }
        }
        world.wait(MS * 50);
    }
    let reply = world.state.queries(world.now).traced_paths();
    let routes: BTreeSet<String> =
        reply.paths.iter().map(|path| format!("{} {} {}", path.from, path.hops.join(" "), path.to)).collect();
    let expected = ["h0 10.9.0.1 10.9.0.3 10.9.0.2 h1", "h1 10.9.0.2 10.9.0.3 10.9.0.1 h0"];
    assert_eq!(routes, BTreeSet::from(expected.map(ToOwned::to_owned)));
}

#[test]
fn operators_read_the_routes_of_both_directions() {
    let (world, ..) = traced_pair();
    let reply = world.state.queries(world.now).traced_paths();
    let mut routes: Vec<String> =
        reply.paths.iter().map(|path| format!("{} {} {}", path.from, path.hops.join(" "), path.to)).collect();
    routes.sort();
    let over = |spine| format!("h0 10.64.0.1 10.64.0.{spine} 10.64.0.2 h4");
    let home = |spine| format!("h4 10.64.0.2 10.64.0.{spine} 10.64.0.1 h0");
    assert_eq!(routes, [over(3), over(4), home(3), home(4)]);
    // The port is that of the end that connects, in both directions.
    assert!(reply.paths.iter().all(|path| (20000..30000).contains(&path.port)), "{reply:?}");
}

#[test]
fn unanswered_traces_are_repeated_ever_more_seldom() {
    let mut world = two_racks();
    let [first, _] = [0, 4].map(|host| able(&mut world, host));
    let mut asked = 0;
    for _ in 0..600 {
        world.wait(SECOND);
        asked += questions(&mut world, first).len();
    }
    assert!((8..=20).contains(&asked), "{asked} questions in ten minutes");
}

#[test]
fn a_silent_switch_is_not_a_dead_link() {
    let (mut world, sessions, _) = traced_pair();
    world.wait(SECOND * 21);
    let asked = questions(&mut world, sessions[0]).remove(0);
    // The spines keep silent, and the far leaf answers.
    let paths = asked.ports.iter().map(|ports| v1::TracedPath {
        source_port: ports.source_port,
        destination_port: ports.destination_port,
        hops: vec!["10.64.0.1".to_owned(), String::new(), "10.64.0.2".to_owned()],
    });
    let traced = v1::PathsTraced { request: asked.request, paths: paths.collect(), error: String::new() };
    world.send(sessions[0], from_agent::Message::PathsTraced(traced));
    assert_eq!(path_count(&mut world), 24, "what was known stays");
    assert!(world.state.failed_links().is_empty());
}

/// A plan that does not pass the check keeps no link from the way that a hand-over needs, nor on it.
#[test]
fn links_go_over_tcp_when_no_plan_passes() {
    let (mut world, sessions, id) = traced_pair_over(true);
    // Traced paths cannot be by this topology: all hosts are at the other leaf. Off a drained spine there is no other way.
    let moved = leaf_spine(&EVERYONE.map(|host| 1 - host / 4), 2, || "50us".to_owned());
    world.state.settings_mut().topology = Topology::parse(&moved).unwrap();
    let (targets, kind) = (vec!["spine0".to_owned()], WithdrawalKind::Drain);
    let (from, until, reason) = (Nanos(0), Nanos(0), String::new());
    let drain = Instruction::Withdraw { targets, kind, from, until, reason };
    let drained = world.state.consider(world.now, &drain).unwrap();
    world.state.apply_stored(world.now, &drained);
    world.run_until_quiet();
    assert_eq!(world.state.predicted_slowdown(world.now), None, "no plan passes the check");
    for (for_ns, over_tcp, why) in [(60_000_000_000, vec![0], Reason::OverTcp), (0, vec![], Reason::OverRdma)]
    {
        world.send(sessions[0], from_agent::Message::LinksOverTcp(v1::LinksOverTcp { for_ns }));
        world.wait(SECOND);
        let told = sessions.map(|session| every!(world.received(session), Change));
        assert!(told.iter().all(|told| told.len() == 1 && told[0].over_tcp == over_tcp), "{told:?}");
        let (communicator, epoch) = (id, told[0][0].epoch);
        for session in sessions {
            let prepared = v1::Prepared { communicator, epoch, links: None };
            world.send(session, from_agent::Message::Prepared(prepared));
        }
        for session in sessions {
            let switched = v1::Switched { communicator, epoch, first_segment: 1 };
            world.send(session, from_agent::Message::Switched(switched));
        }
        assert_eq!(world.reasons.last(), Some(&why));
    }
}

#[test]
fn one_host_alone_makes_no_link_dead() {
    let mut world = two_racks();
    let sessions = [0, 1, 4].map(|host| able(&mut world, host));
    let ends = [(sessions[0], (1, 2)), (sessions[1], (1, 2)), (sessions[2], (2, 1))];
    answer_traces(&mut world, &ends, &|_, port| parity(port));
    world.wait(SECOND * 301);
    // The first host says that nothing gets to the first spine; the other two see that it does.
    let lie = |at: usize, port: u32| parity(port).filter(|spine| at != 0 || *spine != 3);
    assert!(answer_traces(&mut world, &ends, &lie) > 0);
    assert!(world.state.failed_links().is_empty());
    world.wait(SECOND * 301);
    answer_traces(&mut world, &ends, &|at, port| parity(port).filter(|spine| at == 2 || *spine != 3));
    let leaf = world.state.settings_mut().topology.switch("leaf0").unwrap();
    let failed = world.state.failed_links();
    assert_eq!(failed.len(), 1);
    let at_leaf =
        world.state.settings_mut().topology.links_at(harmonaize_planner::Node::Switch(leaf)).to_vec();
    assert!(failed.iter().all(|link: &LinkId| at_leaf.contains(link)));
}

#[test]
fn senseless_congestion_reports_cost_no_session() {
    let (mut world, sessions, id) = traced_pair();
    let port = u32::from(*world.epoch(id).links.values().flatten().next().unwrap());
    let good = || congestion_report(id, 1, port);
    let other = able(&mut world, 1);
    let congestion = |change: &dyn Fn(&mut v1::Congestion)| {
        let mut told = good();
        change(told.congestion.as_mut().unwrap());
        told
    };
    let bad = [
        v1::CongestionReport { congestion: None, ..good() },
        congestion(&|found| found.ingress = true),
        congestion(&|found| found.level = 77),
        congestion(&|found| found.lost_ppm = 2_000_000),
        congestion(&|found| found.interface = "x".repeat(65)),
        v1::CongestionReport { peer: 0, ..good() },
        v1::CongestionReport { peer: 9, ..good() },
        v1::CongestionReport { epoch: 0, ..good() },
        v1::CongestionReport { epoch: 7, ..good() },
        v1::CongestionReport { source_port: 70000, ..good() },
        v1::CongestionReport { source_port: 9, ..good() },
        v1::CongestionReport { source_port: 0, ..good() },
    ];
    for (count, told) in bad.iter().enumerate() {
        world.send(sessions[0], from_agent::Message::CongestionReport(told.clone()));
        assert_eq!(world.state.report_counts("h0"), (0, 0, count as u64 + 1), "{told:?}");
    }
    world.send(other, from_agent::Message::CongestionReport(good()));
    assert_eq!(world.state.report_counts("h1"), (0, 0, 1), "of a communicator of others");
    assert!(world.state.congested_links().is_empty());
    world.send(sessions[0], from_agent::Message::CongestionReport(congestion_report(77, 1, port)));
    assert_eq!(world.state.report_counts("h0").0, 1, "one that has ended is no fault");
    assert!(world.ended.is_empty());
    for _ in 0..1000 {
        world.send(sessions[0], from_agent::Message::CongestionReport(congestion_report(77, 1, port)));
    }
    let (taken, dropped, _) = world.state.report_counts("h0");
    assert_eq!((taken, dropped), (100 - 12, 1000 - 100 + 13));
}

#[test]
fn a_report_on_untraced_ports_awaits_paths() {
    let (mut world, sessions, id) = traced_pair();
    world.state.forget_ports(CommunicatorId(id));
    world.wait(SECOND);
    world.got.clear();
    world.send(sessions[0], from_agent::Message::CongestionReport(congestion_report(id, 1, 40001)));
    assert_eq!(world.state.report_counts("h0"), (1, 0, 0));
    assert!(world.state.congested_links().is_empty(), "its way is not known");
    for (session, ends) in sessions.into_iter().zip([(1, 2), (2, 1)]) {
        let asked = questions(&mut world, session);
        let [question] = asked.as_slice() else { panic!("{asked:?}") };
        assert!(question.ports.iter().any(|ports| ports.source_port.max(ports.destination_port) == 40001));
        world.wait(MS * 5);
        answer(&mut world, session, question, ends, parity);
    }
    let question = requested_train(&mut world, sessions[0]);
    assert!(world.state.congested_links().is_empty(), "it is not believed before");
    train_came(&mut world, sessions[0], question, 600_000_000);
    assert!(!world.state.congested_links().is_empty(), "and then it is");
    assert_eq!(suspicions(&world, 0), (1, 0));
}

/// The question by which an agent was just asked for a train of packets.
fn requested_train(world: &mut World, session: SessionId) -> u64 {
    every!(world.received(session), ProbePath)[0].request
}

/// All of a train sent at 1 Gbit/s came, at this rate.
fn train_came(world: &mut World, session: SessionId, question: u64, received_bits: u64) {
    let (packets_sent, packets_received) = (100, 100);
    let probed = v1::PathProbed {
        request: question,
        packets_sent,
        packets_received,
        sent_bps: 1_000_000_000,
        received_bps: received_bits,
        ..v1::PathProbed::default()
    };
    world.send(session, from_agent::Message::PathProbed(probed));
}

/// What became of the suspicions of a host's agent.
fn suspicions(world: &World, host: usize) -> (u64, u64) {
    let told = world.state.telemetry_of(world.now, HostId(host));
    (told.congestion_reports_verified, told.congestion_reports_refuted)
}

#[test]
fn refuted_congestion_reports_are_counted() {
    let (mut world, sessions, id) = traced_pair();
    let port = u32::from(*world.epoch(id).links.values().flatten().next().unwrap());
    for count in 1..=3 {
        world.got.clear();
        world.send(sessions[0], from_agent::Message::CongestionReport(congestion_report(id, 1, port)));
        let question = requested_train(&mut world, sessions[0]);
        train_came(&mut world, sessions[0], question, 990_000_000);
        assert!(world.state.congested_links().is_empty(), "nobody is in the way");
        assert_eq!(suspicions(&world, 0), (0, count));
        world.wait(SECOND * 5);
    }
    assert_eq!(suspicions(&world, 1), (0, 0));
    let explained = world.state.queries(world.now).explain(CommunicatorId(0), 0);
    assert_eq!((explained.congestion_reports_verified, explained.congestion_reports_refuted), (0, 3));
}

/// A train finds no port over the path of a connection between hosts 0 and 4. Returns also the port, and the last byte of the
/// other spine.
fn unreachable_path() -> (World, [SessionId; 2], u32, u8) {
    let (mut world, sessions, id) = traced_pair();
    let port = u32::from(*world.epoch(id).links.values().flatten().next().unwrap());
    world.got.clear();
    world.send(sessions[0], from_agent::Message::CongestionReport(congestion_report(id, 1, port)));
    let request = requested_train(&mut world, sessions[0]);
    let probed = v1::PathProbed { request, unreachable: true, ..v1::PathProbed::default() };
    world.send(sessions[0], from_agent::Message::PathProbed(probed));
    (world, sessions, port, 4 - (port % 2) as u8)
}

#[test]
fn a_path_without_ports_is_traced_at_once() {
    let (mut world, sessions, _, other) = unreachable_path();
    let ends = [(sessions[0], (1, 2)), (sessions[1], (2, 1))];
    answer_traces(&mut world, &ends, &|_, _| Some(other));
    assert_eq!(world.state.failed_links().len(), 2, "both leaves' links to the spine");
}

#[test]
fn a_silent_spines_port_proves_no_link() {
    let (mut world, sessions, port, other) = unreachable_path();
    let asked = questions(&mut world, sessions[0]).remove(0);
    let mut silent = true;
    let paths = asked.ports.iter().map(|ports| {
        // Of those that led over the spine, the first hears nothing of any.
        let first = ports.source_port % 2 == port % 2 && std::mem::take(&mut silent);
        let spine = if first { String::new() } else { format!("10.64.0.{other}") };
        let hops = vec!["10.64.0.1".to_owned(), spine, "10.64.0.2".to_owned()];
        v1::TracedPath { source_port: ports.source_port, destination_port: ports.destination_port, hops }
    });
    let traced = v1::PathsTraced { request: asked.request, paths: paths.collect(), error: String::new() };
    world.send(sessions[0], from_agent::Message::PathsTraced(traced));
    assert_eq!(world.state.failed_links().len(), 1);
}
