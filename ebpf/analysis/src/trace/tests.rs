//! Traces come back as they were written, and bytes of any kind are read without harm.

use super::*;
use harmonaize_events::{Mark, MarkKind, TcpCounters, Traffic};
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::Duration;

fn key(random: &mut ChaCha8Rng) -> FlowKey {
    FlowKey {
        local: FlowKey::mapped(random.random_range(0..20)),
        remote: FlowKey::mapped(random.random_range(0..20)),
        local_port: random.random_range(0..50),
        interface: 3,
        protocol: 6,
        direction: random.random_range(0..3),
        ..FlowKey::default()
    }
}

fn wild(random: &mut ChaCha8Rng) -> u64 {
    match random.random_range(0..4) {
        0 => 0,
        1 => u64::MAX,
        2 => random.random_range(0..1000),
        _ => random.next_u64(),
    }
}

fn counters(random: &mut ChaCha8Rng) -> TcpCounters {
    TcpCounters {
        traffic: Traffic { packets: wild(random), last_ns: wild(random), ..Traffic::default() },
        cwr: random.random(),
        state: random.random(),
        ..TcpCounters::default()
    }
}

fn any(random: &mut ChaCha8Rng) -> Record {
    let time_ns = wild(random);
    match random.random_range(0..11) {
        0 => Record::Observer(Observer { time_ns, host: wild(random), realtime_offset_ns: random.random() }),
        1 => Record::Event(Event {
            time_ns,
            flow: key(random),
            kind: random.random(),
            count: random.random(),
            total: wild(random),
            burst_began_ns: wild(random),
            burst_ended_ns: wild(random),
            burst_bytes: wild(random),
            paused_ns: random.random(),
            size: random.random(),
        }),
        2 => {
            let flow = TcpFlow { ingress: counters(random), egress: counters(random) };
            Record::Tcp { time_ns, key: key(random), flow }
        }
        3 => {
            let counters = RoceCounters { sends: wild(random), ..RoceCounters::default() };
            Record::Roce { time_ns, key: key(random), counters }
        }
        4 => {
            let totals = InterfaceTotals { interface: wild(random), ..InterfaceTotals::default() };
            Record::Totals { time_ns, totals }
        }
        5 => Record::Mark(Mark { time_ns, bytes: wild(random), epoch: random.random(), ..Mark::default() }),
        6 => Record::Owner(Owner {
            time_ns,
            flow: key(random),
            tenant: Label::new("a tenant ü"),
            communicator: CommunicatorId(wild(random)),
            epoch: Epoch(random.random()),
            from: random.random(),
            to: random.random(),
            owned: random.random(),
        }),
        7 => Record::Link(Link {
            time_ns,
            interface: random.random(),
            name: Label::new("eth0"),
            bytes_per_second: wild(random),
            watched: random.random(),
        }),
        8 => Record::Port(Port {
            time_ns,
            interface: random.random(),
            number: random.random(),
            device: Label::new("mlx5_0"),
            not_ready: wild(random),
            egress: PortDirection { packets: wild(random), ecn_ce: wild(random), ..PortDirection::default() },
            ingress: PortDirection { bytes: wild(random), lost: wild(random), ..PortDirection::default() },
        }),
        9 => Record::Completion(Completion {
            time_ns,
            flow: key(random),
            took_ns: wild(random),
            bytes: wild(random),
        }),
        _ => Record::Lost(Lost {
            time_ns,
            kind: LostKind::from_number(random.random_range(1..6)).unwrap(),
            count: wild(random),
        }),
    }
}

fn written(records: &[Record]) -> Vec<u8> {
    let mut writer = Writer::new();
    records.iter().for_each(|record| writer.write(record));
    writer.into_bytes()
}

fn read(bytes: &[u8]) -> (Vec<Record>, Result<Replayed, Error>) {
    let mut records = Vec::new();
    let replayed = replay(bytes, |record| records.push(*record));
    (records, replayed)
}

#[test]
fn torn_end_loses_only_the_last_record() {
    for seed in 0..50 {
        println!("seed {seed}");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let records: Vec<_> = (0..300).map(|_| any(&mut random)).collect();
        let bytes = written(&records);
        let (back, replayed) = read(&bytes);
        assert_eq!(back, records);
        assert_eq!(replayed, Ok(Replayed { records: 300, skipped: 0, torn: None }));
        // Cut anywhere: what is before comes whole.
        let cut = random.random_range(16..bytes.len());
        let (back, replayed) = read(&bytes[..cut]);
        let replayed = replayed.unwrap();
        assert_eq!(back, records[..back.len()]);
        let whole = written(&records[..back.len()]).len();
        assert_eq!(replayed.torn, (whole != cut).then_some(whole));
        assert!(cut < written(&records[..=back.len()]).len());
    }
}

#[test]
fn a_trace_in_parts_is_one() {
    let mut random = ChaCha8Rng::seed_from_u64(5);
    let (mut writer, mut bytes) = (Writer::new(), Vec::new());
    let records: Vec<_> = (0..1000).map(|_| any(&mut random)).collect();
    for part in records.chunks(7) {
        part.iter().for_each(|record| writer.write(record));
        bytes.extend_from_slice(writer.bytes());
        writer.clear();
    }
    assert_eq!(read(&bytes).0, records);
}

#[test]
fn a_snapshot_that_hardly_changes_is_short() {
    let key = key(&mut ChaCha8Rng::seed_from_u64(6));
    let mut flow = TcpFlow::default();
    let snapshots = (0..1000).map(|at| {
        let traffic = &mut flow.egress.traffic;
        (traffic.bytes, traffic.packets, traffic.last_ns) = (at * 70_000, at * 50, at * 1_000_000 + at * at);
        Record::Tcp { time_ns: at * 1_000_000, key, flow }
    });
    let bytes = written(&snapshots.collect::<Vec<_>>());
    assert!(bytes.len() < 25 * 1000, "{}", bytes.len());
}

#[test]
fn other_headers_are_refused() {
    let good = written(&[]);
    assert_eq!(read(&good).1, Ok(Replayed::default()));
    for short in 0..good.len() {
        assert_eq!(read(&good[..short]).1, Err(Error::Magic));
    }
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        read(&bytes).1
    };
    assert_eq!(with(0, b'X'), Err(Error::Magic));
    let version = u16::from_ne_bytes([9, good[9]]);
    assert_eq!(with(8, 9), Err(Error::Version(version)));
    let mut swapped = good.clone();
    swapped.swap(10, 11);
    assert_eq!(read(&swapped).1, Err(Error::ByteOrder));
}

#[test]
fn kinds_of_later_versions_are_skipped_and_counted() {
    let lost = Record::Lost(Lost { time_ns: 1, kind: LostKind::Marks, count: 1 });
    let mut bytes = written(&[lost]);
    bytes.extend_from_slice(&[3, 200, 1, 2]);
    let second = written(&[lost, lost]);
    bytes.extend_from_slice(&second[written(&[lost]).len()..]);
    assert_eq!(read(&bytes), (vec![lost, lost], Ok(Replayed { records: 2, skipped: 1, torn: None })));
}

#[test]
fn damaged_traces_never_panic() {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let records: Vec<_> = (0..40).map(|_| any(&mut random)).collect();
    let bytes = written(&records);
    let (mut damaged, mut fine) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = bytes.clone();
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(16..bytes.len());
            bytes[at] = random.random();
        }
        match read(&bytes).1 {
            Err(Error::Damaged { at, .. }) if at < bytes.len() => damaged += 1,
            Ok(_) => fine += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(damaged > 1000 && fine > 1000, "{damaged} {fine}");
    for _ in 0..20_000 {
        let mut bytes = written(&[]);
        let length = random.random_range(0..200);
        bytes.extend((0..length).map(|_| random.random::<u8>()));
        let (records, _) = read(&bytes);
        assert!(records.len() <= length);
    }
    let damaged = |tail: &[u8]| read(&[&written(&[])[..], tail].concat()).1;
    let how = |tail: &[u8]| match damaged(tail) {
        Err(Error::Damaged { at: 16, what }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(how(&[0]), Damage::Length);
    assert_eq!(how(&[0xff; 11]), Damage::LongNumber);
    // A place in the table beyond it, and one that was never told.
    assert_eq!(how(&[4, 2, 0xff, 0xff, 3]), Damage::FlowPlace);
    assert_eq!(how(&[3, 2, 1, 0]), Damage::UnknownFlow);
    assert!(matches!(damaged(&[0x90]), Ok(Replayed { torn: Some(16), .. })));
}

#[test]
fn merged_traces_are_in_order_by_one_clock() {
    let lost = |time_ns| Record::Lost(Lost { time_ns, kind: LostKind::Events, count: 1 });
    let observer =
        |host, realtime_offset_ns| Record::Observer(Observer { time_ns: 0, host, realtime_offset_ns });
    // The second host's clock is 1000 ahead.
    let first = [observer(1, 5000), lost(10), lost(30), lost(35)];
    let second = [observer(2, 4000), lost(1020), lost(1040)];
    let merged = merge(&[&first, &second]);
    let mut host = 0;
    let mut told = Vec::new();
    for record in &merged {
        match record {
            Record::Observer(observer) => host = observer.host,
            record => told.push((host, record.time().0)),
        }
    }
    assert_eq!(told, [(1, 10), (2, 20), (1, 30), (1, 35), (2, 40)]);
    assert_eq!(merge(&[&merged]), merged);
    // Without a word of clocks, the times are taken for one clock's.
    let merged = merge(&[&[lost(10)], &[lost(1)]]);
    assert_eq!(merged.iter().filter(|record| matches!(record, Record::Lost(_))).count(), 2);
    assert_eq!(merged[1], lost(1));
}

#[test]
fn differences_are_reported() {
    let lost = |time_ns, count| Record::Lost(Lost { time_ns, kind: LostKind::Events, count });
    let first = [lost(100, 1), lost(200, 2), lost(300, 3)];
    let second = [lost(104, 1), lost(300, 3), lost(206, 2), lost(400, 3)];
    let found = diff_records(&first, &second, Duration::from_nanos(5));
    assert_eq!((found.common, found.largest), (2, Duration::from_nanos(4)));
    assert_eq!(found.first, [lost(200, 2)]);
    assert_eq!(found.second, [lost(206, 2), lost(400, 3)]);
    assert!(diff_records(&first, &first, Duration::ZERO).is_empty());
    // Each is used once.
    let found = diff_records(&[lost(1, 1), lost(2, 1), lost(3, 1)], &[lost(2, 1)], Duration::from_nanos(5));
    assert_eq!((found.first.len(), found.second.len(), found.common), (2, 0, 1));
}

#[test]
fn a_marks_kind_survives() {
    let mark = Record::Mark(Mark { kind: MarkKind::Received as u32, peer: 9, ..Mark::default() });
    assert_eq!(read(&written(&[mark])).0, [mark]);
}
