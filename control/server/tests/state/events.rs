//! What tenants are told while their communicators run, and who of them.

use super::fabric::{CrossTraffic, EVERYONE, Fabric};
use super::turns::{Job, run};
use super::world::{SECOND, operation};
use harmonaize_api::v1::{self, CongestionCause, CongestionLevel, EventKind, from_agent};
use harmonaize_disclose::CursorError;
use harmonaize_server::state::RequestRefusal;
use harmonaize_server::state::testing::Testing as _;
use harmonaize_store::WithdrawalKind;

/// Reads on until nothing comes for three ticks: kinds, levels and ranks; and where that ends.
fn read_events(
    fabric: &mut Fabric,
    from: v1::EventCursor,
) -> (Vec<(EventKind, CongestionLevel, Vec<u32>)>, v1::EventCursor) {
    let (mut events, mut cursor) = (Vec::new(), from);
    for request in 1000.. {
        fabric.read(0, request, "a", Some(cursor), SECOND * 3);
        fabric.run(SECOND * 4);
        let read = fabric.read.pop().unwrap();
        assert_eq!((read.request, read.refused.as_str(), read.missed), (request, "", 0));
        cursor = read.cursor.unwrap();
        if read.events.is_empty() {
            break;
        }
        for event in read.events {
            assert_eq!((event.communicator.as_str(), event.since_ns % 1_000_000_000), ("world", 0));
            events.push((event.kind(), event.level(), event.ranks));
        }
    }
    (events, cursor)
}

#[test]
fn lost_ranks_are_reported_at_the_next_tick() {
    let (mut fabric, _) = Fabric::formed(1, 1, &[1, 2, 5]);
    let from = fabric.here();
    fabric.read(0, 7, "a", Some(from), SECOND * 30);
    fabric.run(SECOND * 3);
    assert!(fabric.read.is_empty(), "nothing has happened");
    fabric.kill(5);
    fabric.run(SECOND * 2);
    let read = fabric.read.pop().unwrap();
    assert_eq!((read.request, read.events.len()), (7, 1));
    assert_eq!((read.events[0].kind(), read.events[0].ranks.as_slice()), (EventKind::Failure, &[2][..]));
}

#[test]
fn maintenance_events_name_the_ranks_concerned() {
    let (mut fabric, _) = Fabric::formed(2, 1, &[0, 3, 6]);
    let from = fabric.here();
    let now = fabric.now.as_nanos() as u64;
    let window = (now + 60_000_000_000, now + 90_000_000_000);
    fabric.withdraw("h6", WithdrawalKind::Maintenance, window);
    let (events, from) = read_events(&mut fabric, from);
    assert_eq!(events, [(EventKind::Maintenance, CongestionLevel::Unspecified, vec![2])]);
    // Of another host, nothing; a second communicator hears of it as it forms.
    fabric.drain("h1");
    fabric.end_drain("h1");
    fabric.restore("h6", WithdrawalKind::Maintenance);
    let (events, _) = read_events(&mut fabric, from);
    assert_eq!(events, [(EventKind::Maintenance, CongestionLevel::Unspecified, vec![])]);
}

#[test]
fn congestion_is_reported_at_onset_and_end() {
    let (mut fabric, id) = Fabric::formed(3, 1, &EVERYONE);
    let from = fabric.here();
    // Half of both spines, which no plan avoids.
    cross_spine(&mut fabric, 0, "spine0", 600_000_000);
    cross_spine(&mut fabric, 1, "spine1", 600_000_000);
    let (events, from) = read_events(&mut fabric, from);
    let levels = |events: &[(EventKind, CongestionLevel, Vec<u32>)]| -> Vec<CongestionLevel> {
        assert!(events.iter().all(|(.., ranks)| ranks.is_empty()), "{events:?}");
        let congestion = events.iter().filter(|(kind, ..)| *kind == EventKind::Congestion);
        congestion.map(|(_, level, _)| *level).collect()
    };
    let last = levels(&events).last().copied();
    assert!(matches!(last, Some(CongestionLevel::Mild | CongestionLevel::Severe)), "{events:?}");
    fabric.calm();
    fabric.run(SECOND * 60);
    let (events, _) = read_events(&mut fabric, from);
    assert_eq!(levels(&events).last(), Some(&CongestionLevel::None), "{events:?}");
    assert!(fabric.ids().contains(&id));
}

/// A stranger's flow from the first rack to the second, over a spine.
fn cross_spine(fabric: &mut Fabric, number: u32, spine: &str, bits: u64) {
    for (way, (from, to)) in (0..).zip([("leaf0", spine), (spine, "leaf1")]) {
        let link = fabric.link(from, to);
        fabric.cross_traffic.insert(number * 2 + way, CrossTraffic { link, bits });
    }
    fabric.sample_all();
}

#[test]
fn a_mostly_computing_job_hears_of_congestion() {
    // So much of each spine; of the larger flow nothing is left that a connection's own agent would call traffic.
    for (seed, bits) in [(0, 900_000_000), (1, 900_000_000), (2, 960_000_000), (3, 960_000_000)] {
        let mut fabric = Fabric::new(seed, 1);
        fabric.state.settings_mut().telemetry_interval = SECOND;
        fabric.run(SECOND * 3);
        let mut jobs = [Job::of("a", &mut fabric, 0, (120.0, 30.0, 10.0))];
        run(&mut fabric, &mut jobs, 10);
        let from = fabric.here();
        let levels = |fabric: &mut Fabric, from| -> (Vec<CongestionLevel>, v1::EventCursor) {
            let (told, from) = fabric.events_from(from);
            let told = told.iter().filter(|event| event.kind() == EventKind::Congestion);
            (told.map(|event| event.level()).collect(), from)
        };
        // One spine is left to the stranger; the other has room for all.
        cross_spine(&mut fabric, 0, "spine0", bits);
        run(&mut fabric, &mut jobs, 10);
        let (told, from) = levels(&mut fabric, from);
        assert!(told.last().is_none_or(|level| *level == CongestionLevel::None), "seed {seed}: {told:?}");
        // What it sends on average passes over what is left of both, and its operations take five times as long.
        cross_spine(&mut fabric, 1, "spine1", bits);
        run(&mut fabric, &mut jobs, 10);
        let (told, from) = levels(&mut fabric, from);
        assert_eq!(told.last(), Some(&CongestionLevel::Severe), "seed {seed}: {told:?}");
        fabric.calm();
        run(&mut fabric, &mut jobs, 40);
        let (told, _) = levels(&mut fabric, from);
        assert_eq!(told.last(), Some(&CongestionLevel::None), "seed {seed}: {told:?}");
    }
}

/// Both agents of a pair report ten operations more of so many milliseconds. The second's rank had called a second before.
fn both_report(fabric: &mut Fabric, id: u64, report: u64, ms: u64) {
    for participant in 0..2 {
        let operation = |number: u64| {
            let called = 1_700_000_000_000_000_000 + number * 2_000_000_000;
            let times = (called - u64::from(participant) * 1_000_000_000, called + ms * 1_000_000);
            operation(id, number, 1 << 20, participant, times)
        };
        let operations = (report * 10..report * 10 + 10).map(operation).collect();
        let told = v1::TelemetryReport { sequence: report + 1, operations, ..Default::default() };
        let session = fabric.session(id, participant as usize);
        fabric.send(session, from_agent::Message::Telemetry(told));
    }
    fabric.run(SECOND);
}

/// The agent of host 0 says that a long queue stands on its connection, which trains find free.
fn queue(fabric: &mut Fabric, id: u64) {
    let recipe = fabric.recipe_of(0, id);
    let congestion = v1::Congestion {
        interface: "eth0".to_owned(),
        level: CongestionLevel::Severe.into(),
        cause: CongestionCause::Unspecified.into(),
        delay: true,
        capacity_bps: 1_000_000_000,
        ..v1::Congestion::default()
    };
    let told = v1::CongestionReport {
        congestion: Some(congestion),
        communicator: id,
        epoch: recipe.epoch,
        peer: 1,
        source_port: recipe.peers[0].source_ports[0],
        queue_pair: false,
    };
    let session = fabric.session(id, 0);
    fabric.send(session, from_agent::Message::CongestionReport(told));
}

#[test]
fn slow_operations_beside_queues_are_congestion() {
    let mut fabric = Fabric::new(8, 1);
    fabric.state.settings_mut().telemetry_interval = SECOND;
    fabric.run(SECOND * 3);
    let id = fabric.form("a", "world", &[0, 4]);
    fabric.run(SECOND * 3);
    let mut from = fabric.here();
    let mut report = 0;
    let mut levels = |fabric: &mut Fabric, ms: u64, queued: bool, seconds: u32| -> Vec<CongestionLevel> {
        for _ in 0..seconds {
            if queued {
                queue(fabric, id);
            }
            both_report(fabric, id, report, ms);
            report += 1;
        }
        fabric.run(SECOND);
        let (told, next) = fabric.events_from(from);
        from = next;
        let told = told.iter().filter(|event| event.kind() == EventKind::Congestion);
        told.map(|event| event.level()).collect()
    };
    assert_eq!(levels(&mut fabric, 30, true, 5), []);
    // Without a queue it is a slow host's, or its own doing.
    fabric.run(SECOND * 6);
    assert_eq!(levels(&mut fabric, 300, false, 5), []);
    assert_eq!(levels(&mut fabric, 300, true, 4), [CongestionLevel::Severe]);
    assert_eq!(levels(&mut fabric, 30, true, 3), [CongestionLevel::None]);
    // Beside another of the tenant's own that communicates too, nobody can say whose doing it is.
    let other = fabric.form("a", "other", &[1, 5]);
    fabric.run(SECOND * 3);
    for number in 0..4 {
        both_report(&mut fabric, other, number, 30);
        assert_eq!(levels(&mut fabric, 300, true, 1), []);
    }
}

#[test]
fn own_communicators_are_no_congestion() {
    let (mut fabric, _) = Fabric::formed(6, 1, &[0, 4]);
    let from = fabric.here();
    // All share the hosts' own links, and some those between racks.
    for (number, hosts) in [[0, 5], [1, 4], [0, 4], [2, 6], [3, 7]].iter().enumerate() {
        fabric.form("a", &format!("other{number}"), hosts);
        fabric.run(SECOND * 3);
    }
    let (told, from) = fabric.events_from(from);
    let congestion = told.iter().filter(|event| event.kind() == EventKind::Congestion);
    assert_eq!(congestion.count(), 0, "{told:?}");
    // Another tenant's is.
    for number in 0..3 {
        fabric.form("b", &format!("b{number}"), &[0, 4]);
    }
    fabric.run(SECOND * 3);
    let (told, _) = fabric.events_from(from);
    let mut congested: Vec<String> = told
        .into_iter()
        .filter(|event| event.kind() == EventKind::Congestion && event.level() != CongestionLevel::None)
        .map(|event| event.communicator)
        .collect();
    congested.sort();
    congested.dedup();
    let all = ["other0", "other1", "other2", "other3", "other4", "world"];
    assert_eq!(congested, all, "whichever of them are slowed");
}

#[test]
fn a_window_is_announced_two_minutes_before() {
    let (mut fabric, _) = Fabric::formed(7, 1, &[0, 3, 6]);
    let from = fabric.here();
    let from_ns = (fabric.now + SECOND * 3600).as_nanos() as u64;
    fabric.withdraw("h3", WithdrawalKind::Maintenance, (from_ns, from_ns + 60_000_000_000));
    fabric.run(SECOND * 3470);
    let (events, from) = read_events(&mut fabric, from);
    assert_eq!(events, []);
    fabric.run(SECOND * 20);
    let (events, _) = read_events(&mut fabric, from);
    assert_eq!(events, [(EventKind::Maintenance, CongestionLevel::Unspecified, vec![1])]);
}

#[test]
fn a_drain_and_cross_traffic_are_told_apart() {
    let (mut fabric, _) = Fabric::formed(6, 1, &[0, 4]);
    fabric.form("b", "other", &[1, 5]);
    fabric.run(SECOND * 3);
    let from = fabric.here();
    // Both pairs share the spine that is left.
    fabric.drain("spine0");
    let (events, from) = read_events(&mut fabric, from);
    let slow = |events: &[(EventKind, CongestionLevel, Vec<u32>)]| {
        let slow = |(kind, level, _): &(EventKind, CongestionLevel, Vec<u32>)| {
            matches!(kind, EventKind::Congestion | EventKind::Capacity).then_some((*kind, *level))
        };
        events.iter().filter_map(slow).collect::<Vec<_>>()
    };
    let drained = slow(&events);
    assert!(
        matches!(drained.as_slice(), [(EventKind::Capacity, level)] if *level > CongestionLevel::None),
        "{events:?}"
    );
    let link = fabric.link("leaf0", "spine1");
    fabric.cross(0, link, 700_000_000);
    let (events, from) = read_events(&mut fabric, from);
    let congested = slow(&events);
    assert!(
        !congested.is_empty() && congested.iter().all(|(kind, _)| *kind == EventKind::Congestion),
        "{events:?}"
    );
    assert!(congested.last().is_some_and(|(_, level)| *level > CongestionLevel::None), "{events:?}");
    fabric.calm();
    fabric.run(SECOND * 60);
    let (events, from) = read_events(&mut fabric, from);
    assert_eq!(slow(&events).last(), Some(&(EventKind::Congestion, CongestionLevel::None)), "{events:?}");
    fabric.end_drain("spine0");
    fabric.run(SECOND * 10);
    let (events, _) = read_events(&mut fabric, from);
    let whole = slow(&events);
    assert!(whole.contains(&(EventKind::Capacity, CongestionLevel::None)), "{events:?}");
    assert!(whole.last().is_some_and(|(_, level)| *level == CongestionLevel::None), "{events:?}");
}

#[test]
fn a_cursor_of_an_earlier_start_is_refused() {
    let (mut fabric, _) = Fabric::formed(4, 1, &[1, 2]);
    let from = v1::EventCursor { feed: 7, next: 3 };
    fabric.read(0, 2, "b", Some(from), SECOND);
    assert_eq!(fabric.read.pop().unwrap().refused, CursorError::Unknown.to_string());
}

#[test]
fn a_tenant_hears_nothing_of_others() {
    let (mut fabric, _) = Fabric::formed(4, 1, &[1, 2]);
    fabric.form("b", "world", &[3, 4]);
    fabric.run(SECOND * 3);
    let from = fabric.here();
    fabric.read(0, 2, "b", Some(from), SECOND);
    assert_eq!(fabric.read.pop().unwrap().refused, CursorError::Unknown.to_string());
    fabric.kill(4);
    assert_eq!(read_events(&mut fabric, from).0, []);
    fabric.read(0, 3, "b", None, SECOND);
    fabric.read(0, 4, "nobody", None, SECOND);
    assert_eq!(fabric.read.pop().unwrap().refused, RequestRefusal::UnknownTenant.to_string());
    let ahead = v1::EventCursor { next: from.next + 9, ..from };
    fabric.read(0, 5, "a", Some(ahead), SECOND);
    let beyond = CursorError::Ahead { next: from.next }.to_string();
    assert_eq!(fabric.read.pop().unwrap().refused, beyond);
}

#[test]
fn too_many_or_lost_readers_cost_nothing() {
    let (mut fabric, _) = Fabric::formed(5, 1, &[1, 2]);
    for request in 0..1024 {
        fabric.read(6, request, "a", None, SECOND * 600);
    }
    assert!(fabric.read.is_empty());
    fabric.read(6, 5000, "a", None, SECOND);
    assert_eq!(fabric.read.pop().unwrap().refused, RequestRefusal::TooManyReaders.to_string());
    // Another tenant's on that host, and the same tenant's elsewhere, wait as if there were none.
    fabric.read(6, 6000, "b", None, SECOND * 600);
    fabric.read(5, 6000, "a", None, SECOND * 600);
    assert!(fabric.read.is_empty());
    // A process that goes away makes room for another, and hears nothing.
    fabric.cancel_read(6, 7);
    fabric.cancel_read(6, 7);
    fabric.read(6, 1024, "a", None, SECOND * 600);
    assert!(fabric.read.is_empty());
    // No wait is longer than a minute.
    fabric.run(SECOND * 62);
    assert_eq!(fabric.read.len(), 1024 + 2);
    assert!(fabric.read.iter().all(|answer| answer.request != 7));
    fabric.read.clear();
    fabric.read(6, 1, "a", None, SECOND * 30);
    fabric.kill(6);
    fabric.run(SECOND * 31);
    assert!(fabric.read.is_empty() && fabric.state.next_deadline().is_none_or(|at| at > fabric.now));
}
