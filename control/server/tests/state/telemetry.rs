//! Reports of what agents measure: bounds, bad values, and findings over several agents.

use super::world::{SECOND, World, hello, settings};
use harmonaize_abi::Nanos;
use harmonaize_api::v1::{
    self, Congestion, CongestionCause, CongestionLevel, Edge, EventKind, Operation, Straggler,
    StragglerCause, TelemetryReport, finding_change, from_agent,
};
use harmonaize_server::state::{Fact, Output, RankTime, SessionId};

const MILLI: u64 = 1_000_000;
/// Some moment of CLOCK_REALTIME.
const REAL: u64 = 1_763_755_542_000_000_000;

fn world() -> World {
    World::new(settings(4), 7)
}

fn send_report(world: &mut World, session: SessionId, report: TelemetryReport) {
    world.send(session, from_agent::Message::Telemetry(report));
}

fn fabric(world: &World) -> v1::FabricSnapshot {
    world.state.queries(world.now).fabric(Nanos(REAL))
}

fn congested(interface: &str, level: CongestionLevel) -> Congestion {
    Congestion {
        interface: interface.to_owned(),
        level: level.into(),
        cause: CongestionCause::CrossTraffic.into(),
        since_ns: REAL - 3,
        ..Congestion::default()
    }
}

fn link(interface: &str) -> v1::Link {
    let congestion = Some(congested(interface, CongestionLevel::Mild));
    v1::Link { interface: interface.to_owned(), egress_bps: 940_000_000, congestion, ..v1::Link::default() }
}

fn late(communicator: u64, job: &str, rank: u32) -> Straggler {
    let kind = StragglerCause::Compute.into();
    Straggler {
        communicator,
        job: job.to_owned(),
        rank,
        cause: kind,
        delay_ns: MILLI,
        ..Straggler::default()
    }
}

/// A whole operation of a ring as one participant with one rank sees it.
fn operation(communicator: u64, number: u64, me: u32, of: u32, called_ns: u64, ended_ns: u64) -> Operation {
    let (next, before) = ((me + 1) % of, (me + of - 1) % of);
    let mut peers = vec![next, before];
    peers.sort_unstable();
    peers.dedup();
    let edges = peers.into_iter().map(|peer| Edge {
        peer,
        sent_bytes: if peer == next { 1000 } else { 0 },
        first_sent_ns: if peer == next { called_ns } else { 0 },
        last_sent_ns: if peer == next { ended_ns } else { 0 },
        received_bytes: if peer == before { 1000 } else { 0 },
        first_received_ns: if peer == before { called_ns } else { 0 },
        last_received_ns: if peer == before { ended_ns } else { 0 },
    });
    let timed = super::world::operation(communicator, number, 1000, me, (called_ns, ended_ns));
    Operation { edges: edges.collect(), complete: true, ..timed }
}

/// A session that ends leaves measuring as it was; an agent that is started again has measured nothing meanwhile.
#[test]
fn a_restart_of_an_agent_is_a_gap() {
    let mut world = world();
    let gaps = |world: &World| fabric(world).hosts[1].losses.map(|losses| losses.gaps);
    let mut session = world.hello(hello(1, vec![]));
    let heard = |world: &mut World, session, begun_ns, gaps| {
        world.now += SECOND;
        let losses = Some(v1::TelemetryLosses { gaps, ..v1::TelemetryLosses::default() });
        send_report(
            world,
            session,
            TelemetryReport { sequence: 1, begun_ns, losses, ..TelemetryReport::default() },
        );
    };
    heard(&mut world, session, 500, 2);
    assert_eq!(gaps(&world), Some(2));
    // The same run goes on in another session; then another run, and one of an agent that does not say which it is.
    for (begun_ns, own, told) in [(500, 3, 3), (700, 0, 4), (700, 1, 5), (0, 0, 4), (900, 2, 7), (900, 2, 7)]
    {
        world.gone(session);
        session = world.hello(hello(1, vec![]));
        assert_eq!(gaps(&world), None);
        heard(&mut world, session, begun_ns, own);
        assert_eq!(gaps(&world), Some(told), "{begun_ns} {own}");
    }
}

#[test]
fn reports_are_asked_for_and_kept() {
    let mut world = world();
    let session = world.hello(hello(1, vec![]));
    assert_eq!(only!(world.received(session), Welcome).telemetry_interval_ns, 1_000_000_000);
    let report = TelemetryReport {
        sequence: 1,
        links: vec![link("eth0")],
        flow_count: 12,
        changes: vec![congested("eth0", CongestionLevel::Mild)],
        ..TelemetryReport::default()
    };
    send_report(&mut world, session, report);
    world.now += SECOND;
    let snapshot = fabric(&world);
    assert_eq!(snapshot.time_ns, REAL);
    let host = &snapshot.hosts[1];
    assert_eq!((host.host.as_str(), host.reports, host.age_ns), ("h1", 1, 1_000_000_000));
    assert_eq!((host.links.as_slice(), host.flow_count), ([link("eth0")].as_slice(), 12));
    assert!(host.connected && !snapshot.hosts[0].connected);
    let finding = Some(finding_change::Finding::Congestion(congested("eth0", CongestionLevel::Mild)));
    let change = v1::FindingChange { time_ns: REAL - 1_000_000_000, host: "h1".to_owned(), finding };
    assert_eq!(snapshot.changes, [change]);
    let status = world.status();
    assert_eq!(status.agents[1].telemetry.as_ref().unwrap().links, [link("eth0")]);
    assert_eq!(status.agents[0].telemetry, None);

    // Its next session begins anew.
    world.gone(session);
    assert!(!fabric(&world).hosts[1].connected);
    world.agent(1);
    assert_eq!((fabric(&world).hosts[1].reports, fabric(&world).changes.len()), (0, 0));
}

#[test]
fn a_flood_is_dropped_and_counted() {
    let mut world = world();
    let [loud, quiet] = [0, 1].map(|host| world.agent(host));
    let report = |sequence| TelemetryReport { sequence, flow_count: sequence, ..Default::default() };
    let mut facts = Vec::new();
    for sequence in 1..=100 {
        let message = from_agent::Message::Telemetry(report(sequence));
        world.state.message(world.now, loud, message.into());
        facts.extend(world.state.take_outputs());
    }
    send_report(&mut world, quiet, report(1));
    let counts = |world: &World, host: usize| {
        let host = &fabric(world).hosts[host];
        (host.reports, host.dropped, host.refused, host.flow_count)
    };
    assert_eq!(counts(&world, 0), (4, 96, 0, 4), "a few at once, and no more");
    assert_eq!(counts(&world, 1), (1, 0, 0, 1));
    let told = facts.iter().map(|output| match output {
        Output::Fact(Fact::TelemetryRefused { host, count, .. }) if host == "h0" => *count,
        other => panic!("{other:?}"),
    });
    assert_eq!(told.collect::<Vec<_>>(), [1, 2, 4, 8, 16, 32, 64]);
    // Twice the rate that is asked for passes, however long it lasts.
    world.now += SECOND * 3600;
    for sequence in 101..200 {
        send_report(&mut world, loud, report(sequence));
        world.now += SECOND / 2;
    }
    assert_eq!(counts(&world, 0), (4 + 99, 96, 0, 199));

    let mut unasked = settings(4);
    unasked.telemetry_interval = std::time::Duration::ZERO;
    let mut world = World::new(unasked, 7);
    let session = world.agent(0);
    send_report(&mut world, session, report(1));
    assert_eq!(counts(&world, 0), (0, 1, 0, 0));
}

#[test]
fn bad_reports_are_refused_in_whole() {
    let (mut world, sessions, id) = World::formed::<2>();
    let other = world.agent(2);
    let others = world.form(&[other], "other");
    let good = TelemetryReport { sequence: 1, links: vec![link("eth0")], ..Default::default() };
    send_report(&mut world, sessions[0], good.clone());
    let before = fabric(&world);
    let with = |change: &dyn Fn(&mut TelemetryReport)| {
        let mut report = TelemetryReport { sequence: 2, links: vec![link("eth7")], ..Default::default() };
        change(&mut report);
        report
    };
    let op = |change: &dyn Fn(&mut Operation)| {
        let mut one = operation(id, 0, 0, 2, 100, 200);
        change(&mut one);
        with(&|report| report.operations = vec![one.clone()])
    };
    let finding = |one: Straggler| with(&|report| report.stragglers = vec![one.clone()]);
    let cases: Vec<(TelemetryReport, &str)> = vec![
        (with(&|report| report.sequence = 1), "report 1 after report 1"),
        (with(&|report| report.links = vec![link("e"); 65]), "65 links; at most 64"),
        (with(&|report| report.changes = vec![congested("e", CongestionLevel::None); 65]), "65 changes"),
        (with(&|report| report.stragglers = vec![late(id, "", 0); 65]), "65 stragglers"),
        (with(&|report| report.open = vec![operation(id, 0, 0, 2, 100, 0); 65]), "65 open operations"),
        (with(&|report| report.open = vec![operation(id, 0, 1, 2, 100, 0)]), "participant 0 speaks as 1"),
        (with(&|report| report.open = vec![operation(id, 0, 0, 2, 100, 99)]), "before it was called"),
        (with(&|report| report.operations = vec![Operation::default(); 257]), "257 operations"),
        (with(&|report| report.links[0].interface = "e\u{1b}[2J".to_owned()), "a link that is no name"),
        (with(&|report| report.links[0].interface = "e".repeat(65)), "a link that is no name"),
        (
            with(&|report| report.links[0].congestion = Some(Congestion { level: 9, ..Default::default() })),
            "level 9",
        ),
        (with(&|report| report.changes = vec![Congestion { cause: -1, ..Default::default() }]), "cause -1"),
        (
            with(&|report| report.changes = vec![Congestion { lost_ppm: 1_000_001, ..Default::default() }]),
            "a part of a million",
        ),
        (finding(Straggler { cause: 0, ..late(id, "", 0) }), "a straggler of kind 0"),
        (finding(late(0, "", 0)), "of no communicator and no job"),
        (finding(late(id, "7", 0)), "of no communicator and no job, or of both"),
        (finding(late(id, "", 1)), "a finding on rank 1, which is not the agent's"),
        (op(&|one| one.communicator = others), "that the agent has no part in"),
        (op(&|one| one.participant = 1), "participant 0 speaks as 1"),
        (op(&|one| one.ranks[0].rank = 1), "an operation of rank 1, which is not the agent's"),
        (op(&|one| one.ranks[0].ended_ns = 99), "ended before it was called"),
        (op(&|one| one.ranks = vec![one.ranks[0]; 2]), "ranks of an operation that do not ascend"),
        (op(&|one| one.ranks = vec![one.ranks[0]; 1025]), "1025 ranks of an operation"),
        (op(&|one| one.edges[0].peer = 2), "an edge to participant 2"),
        (op(&|one| one.edges[0].peer = u32::MAX), "an edge to participant 4294967295"),
        (op(&|one| one.edges = vec![one.edges[0]; 2]), "edges of an operation that do not ascend"),
        (op(&|one| one.edges.truncate(1)), ""),
    ];
    let mut refused = 0;
    for (report, why) in cases.iter().filter(|(_, why)| !why.is_empty()) {
        world.now += SECOND;
        send_report(&mut world, sessions[0], report.clone());
        let mut after = fabric(&world);
        refused += 1;
        assert_eq!(after.hosts[0].refused, refused, "{why}");
        assert!(after.hosts[0].refusal.contains(why), "{:?}: {why}", after.hosts[0].refusal);
        (after.hosts[0].refused, after.hosts[0].refusal, after.hosts[0].age_ns) = (0, String::new(), 1);
        assert_eq!(after, before, "{why}");
    }
    // What control knows nothing of is no fault, nor is the good part of what was refused.
    world.now += SECOND;
    send_report(&mut world, sessions[0], op(&|one| one.communicator = 99));
    assert_eq!(fabric(&world).hosts[0].reports, 2);
    assert_eq!(world.ended, []);
}

/// Plays operations on three hosts whose clocks are seconds apart; `delay` is each rank's lateness, in milliseconds.
fn iterate(
    world: &mut World,
    sessions: &[SessionId; 3],
    id: u64,
    numbers: std::ops::Range<u64>,
    delay: [u64; 3],
) {
    const CLOCKS: [u64; 3] = [0, 7_000 * MILLI, 1_500 * MILLI];
    for number in numbers {
        let began = REAL + number * 50 * MILLI;
        let called = delay.map(|delay| began + delay * MILLI);
        let ended = called.into_iter().max().unwrap() + 10 * MILLI;
        // Agents tell in turn, each at its own time.
        for (me, session) in sessions.iter().enumerate() {
            let (called, ended) = (called[me] + CLOCKS[me], ended + CLOCKS[me] + me as u64 * 10_000);
            let operations = vec![operation(id, number, me as u32, 3, called, ended)];
            let report = TelemetryReport { sequence: number + 1, operations, ..Default::default() };
            send_report(world, *session, report);
        }
        world.now += SECOND;
    }
}

/// What tenant a is told from a place in its feed on, and where that ends.
fn read_events(
    world: &mut World,
    session: SessionId,
    from: Option<v1::EventCursor>,
) -> (Vec<v1::TenantEvent>, v1::EventCursor) {
    let read = v1::ReadEvents { request: 9, tenant: "a".to_owned(), from, wait_ns: 0 };
    world.wait(SECOND * 2);
    world.received(session);
    world.send(session, from_agent::Message::ReadEvents(read));
    let read = only!(world.received(session), EventsRead);
    (read.events, read.cursor.unwrap())
}

#[test]
fn a_late_rank_is_found_over_several_agents() {
    let (mut world, sessions, id) = World::formed::<3>();
    iterate(&mut world, &sessions, id, 0..20, [0, 0, 0]);
    let snapshot = fabric(&world);
    assert_eq!(snapshot.stragglers, []);
    let known = &snapshot.communicators[0];
    assert_eq!((known.tenant.as_str(), known.name.as_str(), known.ranks), ("a", "world", 3));
    assert_eq!((known.operations, known.last_operation_ns), (20, 10 * MILLI + 20_000));
    assert_eq!(known.median_operation_ns, known.last_operation_ns);

    let (told, from) = read_events(&mut world, sessions[0], None);
    assert_eq!(told, []);
    iterate(&mut world, &sessions, id, 20..30, [0, 0, 8]);
    // Its tenant hears of it at any agent, by rank and cause; the finding was made of the third late operation.
    let [one] = <[_; 1]>::try_from(read_events(&mut world, sessions[1], Some(from)).0).unwrap();
    assert_eq!(
        (one.kind(), one.cause(), one.ranks.as_slice()),
        (EventKind::Stragglers, StragglerCause::Compute, &[2][..])
    );
    assert_eq!((one.communicator.as_str(), one.since_ns % SECOND.as_nanos() as u64), ("world", 0));
    assert!(!format!("{one:?}").contains("h2"), "{one:?}");
    let snapshot = fabric(&world);
    let [found] = snapshot.stragglers.as_slice() else { panic!("{:?}", snapshot.stragglers) };
    assert_eq!((found.communicator, found.rank, found.host.as_str()), (id, 2, "h2"));
    assert_eq!((found.cause(), found.since_unit, found.ended_ns), (StragglerCause::Compute, 20, 0));
    assert!((7 * MILLI..9 * MILLI).contains(&found.delay_ns), "{}", found.delay_ns);
    assert_eq!(snapshot.communicators[0].straggler.as_ref(), Some(found));
    let status = world.status();
    assert_eq!(status.communicators[0].telemetry.as_ref().unwrap().straggler.as_ref(), Some(found));
    let [change] = snapshot.changes.as_slice() else { panic!("{:?}", snapshot.changes) };
    let Some(finding_change::Finding::Straggler(change)) = &change.finding else { panic!("{change:?}") };
    assert_eq!((change.rank, change.host.as_str(), change.ended_ns), (2, "h2", 0));

    iterate(&mut world, &sessions, id, 30..50, [0, 0, 0]);
    let snapshot = fabric(&world);
    assert_eq!((snapshot.stragglers.len(), snapshot.changes.len()), (0, 2));
    assert!(fabric(&world).hosts.iter().all(|host| host.refused == 0 && host.dropped == 0));
    let (told, _) = read_events(&mut world, sessions[0], Some(from));
    let told: Vec<_> = told.iter().map(|one| (one.kind(), one.ranks.as_slice())).collect();
    assert_eq!(told, [(EventKind::Stragglers, &[2][..]), (EventKind::Stragglers, &[])]);

    // With the communicator goes what was known of it.
    assert!(world.dissolve(id));
    assert_eq!(fabric(&world).communicators, []);
}

#[test]
fn the_last_operation_is_kept_by_ranks() {
    let (mut world, sessions, id) = World::formed::<3>();
    let last = |world: &World| world.state.queries(world.now).last_operations();
    assert_eq!(last(&world), []);
    iterate(&mut world, &sessions, id, 0..1, [0, 3, 8]);
    let [one] = <[_; 1]>::try_from(last(&world)).unwrap();
    assert_eq!((one.communicator.0, one.number, one.bytes, one.others), (id, 0, 1000, 0));
    // Clocks are laid together by the ends, which come 10 us after each other here.
    let rank =
        |rank, called_ns| RankTime { rank, host: format!("h{rank}"), called_ns, ended_ns: Some(18 * MILLI) };
    assert_eq!(one.ranks, [rank(0, 0), rank(1, 3 * MILLI - 10_000), rank(2, 8 * MILLI - 20_000)]);
    // It stays for 5 s, so that a page does not change with each.
    iterate(&mut world, &sessions, id, 1..5, [0, 0, 0]);
    assert_eq!(last(&world)[0].number, 0);
    iterate(&mut world, &sessions, id, 5..7, [0, 0, 0]);
    assert_eq!(last(&world)[0].number, 5);
    assert!(world.dissolve(id));
    assert_eq!(last(&world), []);
}

#[test]
fn an_agents_flood_spoils_only_its_own_reports() {
    let (mut world, sessions, id) = World::formed::<3>();
    iterate(&mut world, &sessions, id, 0..5, [0, 0, 0]);
    // Numbers far ahead, which nobody else will tell of.
    let operations: Vec<Operation> =
        (0..200).map(|number| operation(id, 1 << 40 | number, 2, 3, REAL, REAL + 1)).collect();
    send_report(&mut world, sessions[2], TelemetryReport { sequence: 6, operations, ..Default::default() });
    world.now += SECOND;
    iterate(&mut world, &sessions, id, 6..10, [0, 0, 0]);
    let snapshot = fabric(&world);
    assert_eq!(snapshot.communicators[0].operations, 5, "its own old operations made room for its new ones");
    assert_eq!(snapshot.hosts[2].refused, 0);
    // What it says of operations that are over changes nothing.
    let old = vec![operation(id, 3, 2, 3, REAL, REAL + 1)];
    send_report(
        &mut world,
        sessions[2],
        TelemetryReport { sequence: 99, operations: old, ..Default::default() },
    );
    assert_eq!(fabric(&world).communicators, snapshot.communicators);
}

#[test]
fn what_agents_find_alone_is_shown_beside() {
    let (mut world, sessions, id) = World::formed::<2>();
    let stragglers = vec![late(id, "", 0), late(0, "3", 5)];
    send_report(&mut world, sessions[0], TelemetryReport { sequence: 1, stragglers, ..Default::default() });
    let found = fabric(&world).stragglers;
    assert_eq!(
        found.iter().map(|one| (one.rank, one.host.as_str())).collect::<Vec<_>>(),
        [(0, "h0"), (5, "h0")]
    );
    assert_eq!(fabric(&world).changes.len(), 2);
    // Its tenant hears of its own rank, and no word of an external job.
    let (_, begun) = read_events(&mut world, sessions[0], None);
    let heard = |world: &mut World| -> Vec<Vec<u32>> {
        let told = read_events(world, sessions[1], Some(v1::EventCursor { next: 0, ..begun })).0;
        assert!(told.iter().all(|one| one.kind() == EventKind::Stragglers && one.communicator == "world"));
        told.into_iter().map(|one| one.ranks).collect()
    };
    assert_eq!(heard(&mut world), [[0]]);
    // Told again, nothing has changed; over, it has.
    for (sequence, ended_ns, changes) in [(2, 0, 2), (3, REAL, 3)] {
        let stragglers = vec![late(id, "", 0), Straggler { ended_ns, ..late(0, "3", 5) }];
        send_report(&mut world, sessions[0], TelemetryReport { sequence, stragglers, ..Default::default() });
        assert_eq!(fabric(&world).changes.len(), changes);
    }
    assert_eq!(fabric(&world).stragglers.len(), 1);
    assert_eq!(heard(&mut world), [[0]]);
    send_report(&mut world, sessions[0], TelemetryReport { sequence: 4, ..Default::default() });
    assert_eq!(heard(&mut world), [vec![0], vec![]]);
    let stragglers = vec![late(id, "", 0)];
    send_report(&mut world, sessions[0], TelemetryReport { sequence: 5, stragglers, ..Default::default() });
    assert_eq!(heard(&mut world).len(), 3);
    // Of an agent that is gone nothing holds for operators; its tenant hears once there is another.
    world.gone(sessions[0]);
    assert_eq!(fabric(&world).stragglers, []);
}
