//! When flows are sampled: for a late round trip at once, and not for communicators that do nothing.

use super::*;
use crate::telemetry::sampler::FAST_INTERVAL;
use harmonaize_engine::marks;
use harmonaize_events::{Event, EventKind, FlowKey, Mark, MarkKind, Protocol, TcpFlow};
use harmonaize_loader::NotCounted;
use harmonaize_loader::fake::Fake;
use std::cell::Cell;

const HOUR: Duration = Duration::from_secs(3600);

fn key(port: u16) -> FlowKey {
    FlowKey { interface: 7, local_port: port, protocol: Protocol::Tcp as u8, ..FlowKey::default() }
}

fn tell(fake: &Fake, kind: EventKind, port: u16) {
    let (flow, kind) = (FlowKey { direction: 2, ..key(port) }, kind as u32);
    fake.scene().events.push_back(Event { time_ns: monotonic().0, flow, kind, ..Event::default() });
}

/// A thread that knows of no flow, and samples none again within an hour.
fn begin(fake: &Fake, marks: Vec<MarkReader>) -> Thread {
    fake.scene().interfaces.insert("made0".into(), 7);
    let setup = Setup {
        host: "h0".into(),
        interfaces: vec!["made0".into()],
        rates: BTreeMap::new(),
        interval: HOUR,
        record: None,
        marks,
        decide: Box::new(|_| {}),
    };
    let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    let source = Box::new(fake.clone());
    let (_, commands) = bounded(1);
    Thread::new(setup, source, commands, bell, Default::default()).unwrap()
}

/// A thread that knows of a flow, and has no other reason to look at it within an hour.
fn thread(fake: &Fake) -> Thread {
    let mut thread = begin(fake, Vec::new());
    let mut flow = TcpFlow::default();
    // It does not rest, whatever this machine does meanwhile.
    (flow.egress.traffic.last_ns, flow.egress.traffic.bytes) = (monotonic().after(HOUR).0, 1 << 30);
    fake.scene().flows.tcp.push((key(1), flow));
    tell(fake, EventKind::FlowBegan, 1);
    turn(&mut thread);
    assert!(thread.sampler.sampled > Nanos(0), "it began");
    thread.sampler.woken = Nanos(0);
    thread.sampler.budget.full_sample = DutyCycle::new(1, [HOUR, HOUR]);
    thread.sampler.budget.full_sample.done(monotonic(), HOUR);
    thread
}

/// A turn, a while after the last look, on a machine of which a test knows how busy it is. Whether it has looked at flows.
fn turn(thread: &mut Thread) -> bool {
    while monotonic() < thread.sampler.sampled.after(FAST_INTERVAL) {
        std::hint::spin_loop();
    }
    thread.sampler.budget.pressure_due = Nanos(u64::MAX);
    let looked = thread.sampler.sampled;
    thread.run_once();
    thread.sampler.sampled != looked
}

#[test]
fn a_late_rtt_samples_a_busy_flow() {
    let fake = Fake::default();
    let mut thread = thread(&fake);
    assert!(!turn(&mut thread), "nothing has happened");
    tell(&fake, EventKind::Retransmission, 1);
    assert!(!turn(&mut thread), "that can wait");
    tell(&fake, EventKind::LateRtt, 9);
    assert!(!turn(&mut thread), "of a flow that nobody knows");
    tell(&fake, EventKind::LateRtt, 1);
    assert!(turn(&mut thread));
    assert!(!turn(&mut thread), "once");
    let (flow, kind) = (FlowKey { direction: 2, ..key(1) }, EventKind::LateRtt as u32);
    let (began, ended) = (50_000_000, 54_000_000);
    for (time_ns, news) in [(61_000_000, false), (62_000_000, true)] {
        let trip =
            Event { time_ns, flow, kind, burst_began_ns: began, burst_ended_ns: ended, ..Event::default() };
        fake.scene().events.push_back(trip);
        assert_eq!(turn(&mut thread), news, "one that took twice as long as the one before");
    }
    thread.sampler.budget.throttled = true;
    tell(&fake, EventKind::LateRtt, 1);
    assert!(!turn(&mut thread), "where all processors are busy it waits");
    thread.sampler.budget.throttled = false;
    assert!(turn(&mut thread), "until they are not");
}

/// An own communicator of two hosts.
fn formed() -> crate::telemetry::EpochLinks {
    let ends = |port| std::net::SocketAddr::from(([10, 0, 0, 1], port));
    crate::telemetry::EpochLinks {
        tenant: "a".into(),
        name: "job".into(),
        communicator: harmonaize_abi::CommunicatorId(3),
        size: 2,
        epoch: harmonaize_abi::Epoch(1),
        ranks: vec![0],
        participant: 0,
        flows: vec![(1, harmonaize_transport::Flow::Tcp { local: ends(2), remote: ends(3) })],
    }
}

#[test]
fn where_operations_run_their_connections_alone_are_looked_at_at_once() {
    let fake = Fake::default();
    let mut thread = thread(&fake);
    thread.apply(Command::Formed(Box::new(formed())));
    tell(&fake, EventKind::LateRtt, 1);
    assert!(!turn(&mut thread), "a stranger's");
    let own = thread.own_flows.owners().keys().next().copied();
    let flow = FlowKey { interface: 7, direction: 2, ..own.unwrap() };
    let (time_ns, kind) = (monotonic().0, EventKind::LateRtt as u32);
    fake.scene().events.push_back(Event { time_ns, flow, kind, ..Event::default() });
    assert!(turn(&mut thread));
}

#[test]
fn communicators_without_operations_have_nothing_sampled() {
    let fake = Fake::default();
    let (writer, reader) = marks(16);
    let mut thread = begin(&fake, vec![reader]);
    thread.apply(Command::Formed(Box::new(formed())));
    let sleep = |thread: &Thread| thread.next_wake(thread.begun).timeout;
    assert_eq!(sleep(&thread), Duration::from_secs(1), "until the next look after interfaces");
    thread.sampler.budget.wake.used(thread.begun, HOUR);
    assert_eq!(sleep(&thread), Duration::from_secs(1), "no events gather");
    assert!(!turn(&mut thread), "it does nothing");
    let mark = || Mark { communicator: 3, ..Mark::default() };
    writer.write(MarkKind::Called, mark);
    assert_eq!(sleep(&thread), Duration::ZERO, "a mark waits");
    assert!(turn(&mut thread), "an operation has begun");
    let later = monotonic().after(HOUR);
    assert!(thread.is_busy(later), "and goes on");
    writer.write(MarkKind::Ended, mark);
    thread.gather();
    thread.hand_on(later);
    assert!(!thread.is_busy(later), "it is over");
}

#[test]
fn completions_and_counters_by_queue_pair_are_read() {
    let fake = Fake::default();
    let counters = Err(NotCounted::Unbound { device: "mlx5_0".into() });
    fake.scene().queue_pair_counters = vec![QueuePairCounters { device: "mlx5_0".into(), counters }];
    let (writer, reader) = marks(16);
    let mut thread = begin(&fake, vec![reader]);
    let (local, remote) = ([127, 0, 0, 1].into(), [10, 0, 0, 2].into());
    let (local_pair, remote_pair, source_port) = (17, 18, 0);
    let flow = harmonaize_transport::Flow::Roce { local, remote, local_pair, remote_pair, source_port };
    let formed = crate::telemetry::EpochLinks { flows: vec![(1, flow)], ..formed() };
    thread.apply(Command::Formed(Box::new(formed)));
    let timed = Mark { communicator: 3, epoch: 1, peer: 1, segment: 30_000, ..Mark::default() };
    writer.write(MarkKind::Completed, || timed);
    thread.gather();
    assert!(!thread.pipeline.records.iter().any(|record| matches!(record, Record::Mark(_))));
    let reading = thread.reading(monotonic(), false);
    let [one] = &reading.completions[..] else { panic!("{:?}", reading.completions) };
    assert_eq!((one.peer.as_str(), one.seconds.count()), ("10.0.0.2", 1));
    assert_eq!(reading.queue_pair_counters, fake.scene().queue_pair_counters);
}

#[test]
fn late_devices_are_asked_seldom() {
    let fake = Fake::default();
    let mut thread = begin(&fake, Vec::new());
    assert_eq!(fake.scene().device_readings, 1);
    for (took, rest) in [(1, 10_000), (10, 10_000), (11, 11_000), (3_000, 3_000_000)] {
        let [took, rest] = [took, rest].map(Duration::from_millis);
        let time = Cell::new(thread.devices.due());
        // Each look at this clock takes as long.
        let clock = || time.replace(time.get().after(took));
        let (readings, began) = (fake.scene().device_readings, time.get());
        thread.read_devices_if_due(clock);
        assert_eq!(fake.scene().device_readings, readings + 1);
        let due = began.after(took + rest);
        assert_eq!(thread.devices.due(), due, "{took:?}");
        thread.read_devices_if_due(|| Nanos(due.0 - 1));
        assert_eq!(fake.scene().device_readings, readings + 1, "too early");
    }
    thread.devices = DutyCycle::new(1, [HOUR, HOUR]);
    let readings = fake.scene().device_readings;
    thread.end();
    assert_eq!(fake.scene().device_readings, readings, "who stops does not wait for them");
}

#[test]
fn late_rtts_in_a_storm_keep_their_budget() {
    let fake = Fake::default();
    let mut thread = thread(&fake);
    let mut turns = 0;
    while thread.sampler.budget.late_rtt.delay(monotonic()).is_zero() {
        tell(&fake, EventKind::LateRtt, 9);
        thread.run_once();
        turns += 1;
        assert!(turns < 100_000, "each takes something");
    }
    tell(&fake, EventKind::LateRtt, 1);
    thread.sampler.budget.late_rtt.used(monotonic(), HOUR);
    assert!(!turn(&mut thread), "it waits for the next look");
}

#[test]
fn events_are_taken_in_by_their_times_however_they_were_told() {
    let fake = Fake::default();
    let mut thread = thread(&fake);
    for (kind, time_ns) in [
        (EventKind::LateRtt, 30),
        (EventKind::LateRtt, 60),
        (EventKind::BurstBegan, 20),
        (EventKind::BurstBegan, 50),
    ] {
        let (flow, kind) = (key(1), kind as u32);
        fake.scene().events.push_back(Event { time_ns, flow, kind, ..Event::default() });
    }
    thread.gather();
    let times: Vec<u64> = thread.pipeline.events.iter().map(|event| event.time_ns).collect();
    assert_eq!(times, [20, 30, 50, 60]);
}
