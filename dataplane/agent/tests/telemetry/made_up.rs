//! The telemetry thread on a source that a test sets: what it takes in, hands on, loses and survives.

use crate::{block, wait};
use harmonaize_abi::{CommunicatorId, CongestionLevel, Epoch};
use harmonaize_agent::telemetry::{EpochLinks, Handle, Reading, Setup, parts, start};
use harmonaize_analysis::congestion::Path;
use harmonaize_analysis::trace::{LostKind, Record, replay};
use harmonaize_engine::marks;
use harmonaize_events::{Direction, Event, EventKind, FlowKey, Mark, MarkKind, Protocol, TcpFlow};
use harmonaize_loader::fake::Fake;
use harmonaize_loader::{Error, PortCounter, RdmaPort};
use harmonaize_transport::Flow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

pub(crate) fn key(interface: u32, port: u16) -> FlowKey {
    FlowKey { interface, local_port: port, protocol: Protocol::Tcp as u8, ..FlowKey::default() }
}

/// Now, by the programs' clock.
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

pub(crate) fn setup(record: Option<PathBuf>) -> Setup {
    Setup {
        host: "h0".into(),
        interfaces: vec!["made0".into()],
        rates: BTreeMap::from([("made0".to_owned(), 8_000_000_000)]),
        interval: Duration::from_millis(2),
        record: record.map(|path| (path, u64::MAX)),
        marks: Vec::new(),
        decide: Box::new(|_| {}),
    }
}

pub(crate) fn begin(fake: &Fake, record: Option<PathBuf>) -> (Handle, JoinHandle<()>) {
    let source = fake.clone();
    start(setup(record), move || Ok(Box::new(source))).unwrap()
}

pub(crate) fn read(handle: &Handle) -> Arc<Reading> {
    block(handle.read(true)).unwrap()
}

/// A packet of a flow passes, and is told.
pub(crate) fn pass(fake: &Fake, key: FlowKey, bytes: u64) {
    let time_ns = now_ns();
    let mut scene = fake.scene();
    let known = scene.flows.tcp.iter().position(|(other, _)| *other == key);
    let (began, mut flow) = match known {
        Some(at) => (false, scene.flows.tcp.remove(at).1),
        None => (true, TcpFlow::default()),
    };
    flow.egress.traffic.packets += 1;
    flow.egress.traffic.bytes += bytes;
    flow.egress.traffic.last_ns = time_ns;
    scene.flows.tcp.push((key, flow));
    if began {
        let (kind, flow) = (EventKind::FlowBegan as u32, FlowKey { direction: 2, ..key });
        scene.events.push_back(Event { time_ns, kind, flow, ..Event::default() });
    }
}

fn records(bytes: &[u8]) -> Vec<Record> {
    let mut records = Vec::new();
    if bytes.is_empty() {
        return records;
    }
    let replayed = replay(bytes, |record| records.push(*record)).unwrap();
    assert_eq!((replayed.torn, replayed.skipped), (None, 0));
    records
}

#[test]
fn what_happens_is_in_the_trace_with_what_was_lost() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace");
    let fake = Fake::default();
    fake.scene().interfaces.insert("made0".into(), 7);
    let (handle, thread) = begin(&fake, Some(file.clone()));
    let links = |reading: &Reading| -> Vec<u32> { reading.links.iter().map(|l| l.measured.index).collect() };
    assert_eq!(links(&read(&handle)), [7]);
    pass(&fake, key(7, 1), 100);
    wait("the flow is known", || read(&handle).flow_count == 1);
    // A call fails once: the next reading has all.
    fake.scene().failure = Some(12);
    pass(&fake, key(7, 2), 100);
    wait("both flows are known", || read(&handle).flow_count == 2);
    fake.scene().losses.events = 5;
    fake.scene().losses.unregistered = 4;
    fake.scene().endpoints.losses.sockets_unplaced = 2;
    fake.scene().flows.evicted = 3;
    wait("losses are counted", || {
        let gaps = read(&handle).losses;
        (gaps.events, gaps.flows, gaps.unregistered, gaps.ends) == (5, 3, 4, 2)
    });
    // Replaced by another of its name, then gone, then back.
    fake.scene().interfaces.insert("made0".into(), 9);
    wait("the other is measured", || links(&read(&handle)) == [9]);
    assert_eq!(read(&handle).losses.count, 1);
    fake.scene().interfaces.clear();
    wait("it is missed", || read(&handle).links.is_empty());
    let missing = read(&handle).missing.join("; ");
    assert!(missing.contains("made0"), "{missing}");
    fake.scene().interfaces.insert("made0".into(), 11);
    wait("it is measured again", || links(&read(&handle)) == [11]);
    assert_eq!((read(&handle).losses.count, read(&handle).missing.len()), (2, 0));
    pass(&fake, key(11, 3), 100);
    handle.stop();
    thread.join().unwrap();
    assert!(block(handle.read(false)).is_none());

    let records = records(&std::fs::read(&file).unwrap());
    let Record::Observer(observer) = records[0] else { panic!("{:?}", records[0]) };
    assert!(observer.host != 0 && observer.realtime_offset_ns > 0, "{observer:?}");
    let watched: Vec<_> = records
        .iter()
        .filter_map(|record| match record {
            Record::Link(link) => Some((link.interface, link.watched, link.bytes_per_second)),
            _ => None,
        })
        .collect();
    let rate = 1_000_000_000;
    assert_eq!(
        watched,
        [(7, true, rate), (7, false, rate), (9, true, rate), (9, false, rate), (11, true, rate)]
    );
    let lost = |what: LostKind| -> Vec<u64> {
        records
            .iter()
            .filter_map(|record| match record {
                Record::Lost(lost) if lost.kind == what => Some(lost.count),
                _ => None,
            })
            .collect()
    };
    assert_eq!((lost(LostKind::Events), lost(LostKind::Flows)), (vec![5], vec![3]));
    assert_eq!(lost(LostKind::Gap).len(), 2);
    for port in [1, 2, 3] {
        let event = records.iter().position(|r| matches!(r, Record::Event(e) if e.flow.local_port == port));
        let flow =
            records.iter().position(|r| matches!(r, Record::Tcp { key, .. } if key.local_port == port));
        assert!(event < flow && event.is_some(), "port {port}: {event:?} {flow:?}");
    }
}

#[test]
fn a_flow_under_way_is_told_as_it_goes_on() {
    let fake = Fake::default();
    fake.scene().interfaces.insert("made0".into(), 7);
    let (handle, thread) = begin(&fake, None);
    let (to, mut from) = parts();
    handle.trace(to);
    let mut bytes = Vec::new();
    // Of its packets the first alone is told of. It passes them all the while: after a pause of 100 ms it would count as at rest.
    wait("it shows in one snapshot after the other", || {
        pass(&fake, key(7, 1), 10);
        while let Ok(part) = from.try_recv() {
            bytes.extend(part);
        }
        let packets = |record: &Record| match record {
            Record::Tcp { flow, .. } => Some(flow.egress.traffic.packets),
            _ => None,
        };
        records(&bytes).iter().filter_map(packets).collect::<BTreeSet<u64>>().len() >= 20
    });
    // Nobody reads any more: the thread goes on.
    drop(from);
    pass(&fake, key(7, 2), 10);
    wait("the other flow is known", || read(&handle).flow_count == 2);
    handle.stop();
    thread.join().unwrap();
}

#[test]
fn a_port_with_notifications_is_found_congested() {
    let fake = Fake::default();
    fake.scene().interfaces.insert("made0".into(), 7);
    let mut packets = 0;
    // One of twenty packets is followed by a notification; none passes the programs.
    let mut send = || {
        packets += 1000;
        let counted =
            [(PortCounter::SentPackets, packets), (PortCounter::NotificationsReceived, packets / 20)];
        let counters = counted.into_iter().collect();
        let port = RdmaPort { device: "mlx5_0".into(), number: 1, interface: "made0".into(), counters };
        fake.scene().ports = vec![port];
    };
    send();
    let (handle, thread) = begin(&fake, None);
    wait("what leaves is congested", || {
        send();
        let reading = read(&handle);
        let congested = reading.congestion.iter().filter(|found| found.level > CongestionLevel::None);
        congested.clone().for_each(|found| assert_eq!(found.link.path, Path::Rdma));
        congested.clone().any(|found| found.link.direction == Direction::Egress && found.signals.ecn_ce)
    });
    handle.stop();
    thread.join().unwrap();
}

/// A port of which no packet passes the programs, and messages of an own queue pair that the engine times.
#[test]
fn messages_that_wait_are_congestion_towards_their_peer() {
    let fake = Fake::default();
    // The one interface whose address each host has.
    fake.scene().interfaces.insert("lo".into(), 7);
    let counters = [(PortCounter::SentPackets, 1000)].into_iter().collect();
    let port = RdmaPort { device: "mlx5_0".into(), number: 1, interface: "lo".into(), counters };
    fake.scene().ports = vec![port];
    let (writer, reader) = marks(1 << 12);
    let rates = BTreeMap::from([("lo".to_owned(), 8_000_000_000)]);
    let setup = Setup { interfaces: vec!["lo".into()], rates, marks: vec![reader], ..setup(None) };
    let source = fake.clone();
    let (handle, thread) = start(setup, move || Ok(Box::new(source))).unwrap();
    let (local, remote) = ([127, 0, 0, 1].into(), [10, 0, 0, 2].into());
    let flow = Flow::Roce { local, remote, local_pair: 17, remote_pair: 18, source_port: 0 };
    handle.formed(EpochLinks {
        communicator: CommunicatorId(7),
        tenant: "a".into(),
        name: "job".into(),
        ranks: vec![0],
        size: 2,
        epoch: Epoch(1),
        participant: 0,
        flows: vec![(3, flow)],
    });
    // A MiB takes 1.05 ms at the interface's rate.
    let send = |waited_ns: u64| {
        for _ in 0..8 {
            let segment = (1 << 20) + waited_ns;
            let mark =
                Mark { communicator: 7, epoch: 1, peer: 3, segment, bytes: 1 << 20, ..Mark::default() };
            writer.write(MarkKind::Completed, || mark);
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let found = || {
        let reading = read(&handle);
        let pairs =
            reading.congestion.iter().filter(|found| matches!(found.link.path, Path::QueuePair { .. }));
        pairs.map(|found| found.level > CongestionLevel::None && found.signals.delay).collect::<Vec<bool>>()
    };
    wait("messages are evidence", || {
        send(0);
        found() == [false]
    });
    wait("what leaves by the queue pair is congested", || {
        send(3_000_000);
        found() == [true]
    });
    handle.stop();
    thread.join().unwrap();
}

#[test]
fn a_source_that_fails_to_open_says_why() {
    let error = start(setup(None), || {
        Err(Error::Kernel { release: "4.4".into(), what: "BPF ring buffers (Linux 5.8)" })
    });
    let error = format!("{:#}", error.unwrap_err());
    assert!(error.contains("4.4") && error.contains("ring buffers"), "{error}");
    let fake = Fake::default();
    let record = Some(PathBuf::from("/no/such/folder/trace"));
    let error = start(setup(record), move || Ok(Box::new(fake))).unwrap_err();
    assert!(format!("{error:#}").contains("/no/such/folder/trace"), "{error:#}");
}
