//! What records become: tracks as expected, bytes that decode to them, and nothing that hostile records break.

use super::schema::{COUNTER, INSTANT, SLICE_BEGIN, SLICE_END, Trace};
use super::track::{Slice, lanes};
use super::{Builder, encode, picture};
use harmonaize_analysis::trace::{Label, Link, Lost, LostKind, Observer, Owner, Record};
use harmonaize_analysis::{CommunicatorId, Epoch};
use harmonaize_events::{
    Direction, Event, EventKind, FlowKey, InterfaceTotals, Mark, MarkKind, Protocol, RoceCounters, TcpFlow,
    Totals, Traffic,
};
use harmonaize_planner::Nanos;
use harmonaize_testkit::golden::same;
use prost::Message;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::fmt::Write;

const MICRO: u64 = 1000;
const MILLI: u64 = 1_000_000;
const WORLD: u64 = 0x5f3a_9c12_0000_0001;
/// Boot times of the two hosts, CLOCK_REALTIME.
const BOOT: [i64; 2] = [1_763_755_500_000_000_000, 1_763_755_400_000_000_000];

fn key(host: usize) -> FlowKey {
    let address = |host: usize| FlowKey::mapped(u32::from_ne_bytes([10, 64, 0, host as u8 + 1]));
    FlowKey {
        local: address(host),
        remote: address(1 - host),
        local_port: if host == 0 { 7200 } else { 41_022 },
        remote_port: if host == 0 { 41_022 } else { 7200 },
        interface: 2,
        protocol: Protocol::Tcp as u8,
        ..FlowKey::default()
    }
}

/// A moment by host's own clock.
fn at(host: usize, time_ns: u64) -> u64 {
    time_ns + (BOOT[0] - BOOT[1]) as u64 * host as u64
}

fn burst(host: usize, direction: Direction, began_ns: u64, ended_ns: u64, bytes: u64) -> Record {
    let flow = FlowKey { direction: direction as u8, ..key(host) };
    Record::Event(Event {
        time_ns: at(host, ended_ns + MILLI),
        flow,
        kind: EventKind::BurstBegan as u32,
        burst_began_ns: at(host, began_ns),
        burst_ended_ns: at(host, ended_ns),
        burst_bytes: bytes,
        ..Event::default()
    })
}

fn totals(host: usize, time_ns: u64, egress: u64, ingress: u64) -> Record {
    let way = |bytes| Totals { bytes, ..Totals::default() };
    let totals = InterfaceTotals { interface: 2, egress: way(egress), ingress: way(ingress) };
    Record::Totals { time_ns: at(host, time_ns), totals }
}

/// One host's records of some operations between two participants, each of one segment and a ring's two steps.
fn host(host: usize, operations: u64) -> Vec<Record> {
    let start = 10 * MILLI;
    let time_ns = at(host, start);
    let mut records = vec![
        Record::Observer(Observer { time_ns, host: host as u64, realtime_offset_ns: BOOT[host] }),
        Record::Link(Link {
            time_ns,
            interface: 2,
            name: Label::new("eth0"),
            bytes_per_second: 125_000_000,
            watched: true,
        }),
        Record::Owner(Owner {
            time_ns,
            flow: key(host),
            tenant: Label::new("a"),
            communicator: CommunicatorId(WORLD),
            epoch: Epoch(1),
            from: host as u32,
            to: 1 - host as u32,
            owned: true,
        }),
        totals(host, start, 0, 0),
    ];
    for operation in 0..operations {
        // The second host calls late in the last operation.
        let late = if host == 1 && operation + 1 == operations { 2 * MILLI } else { 0 };
        let begin = start + operation * 12 * MILLI;
        let called = begin + late + host as u64 * 100 * MICRO;
        let moving = begin + 200 * MICRO + if operation + 1 == operations { 2 * MILLI } else { 0 };
        let base = Mark {
            communicator: WORLD,
            operation,
            participant: host as u32,
            rank: host as u32,
            ..Mark::default()
        };
        let mark = |time_ns, kind: MarkKind, bytes| Mark {
            time_ns: at(host, time_ns),
            bytes,
            kind: kind as u32,
            ..base
        };
        let on = |mark: Mark| Mark {
            segment: operation,
            epoch: 1,
            peer: 1 - host as u32,
            channel: (operation % 2) as u32,
            ..mark
        };
        let size = 512 << 10;
        let half = size / 2;
        records.extend(
            [
                mark(called, MarkKind::Called, size),
                on(mark(called + 20 * MICRO, MarkKind::SegmentBegan, size)),
                on(mark(moving, MarkKind::Sent, half)),
                on(mark(moving + 2 * MILLI, MarkKind::Received, half)),
                on(mark(moving + 2100 * MICRO, MarkKind::Sent, half)),
                on(mark(moving + 4200 * MICRO, MarkKind::Received, half)),
                mark(moving + 4300 * MICRO, MarkKind::Ended, 0),
            ]
            .map(Record::Mark),
        );
        let wire = half + half / 20;
        records.push(burst(host, Direction::Egress, moving, moving + 2 * MILLI, wire));
        records.push(burst(host, Direction::Egress, moving + 2150 * MICRO, moving + 4100 * MICRO, wire));
        records.push(burst(host, Direction::Ingress, moving + 40 * MICRO, moving + 4150 * MICRO, 2 * wire));
        records.push(totals(host, begin + 6 * MILLI, (2 * operation + 2) * wire, (2 * operation + 2) * wire));
        records.push(totals(
            host,
            begin + 12 * MILLI,
            (2 * operation + 2) * wire,
            (2 * operation + 2) * wire,
        ));
    }
    let sent_again = FlowKey { direction: Direction::Egress as u8, ..key(host) };
    if host == 0 {
        records.push(Record::Event(Event {
            time_ns: at(host, start + MILLI),
            flow: sent_again,
            kind: EventKind::Retransmission as u32,
            total: 1,
            ..Event::default()
        }));
        records.push(Record::Lost(Lost {
            time_ns: at(host, start + 5 * MILLI),
            kind: LostKind::Events,
            count: 3,
        }));
    }
    records
}

fn built(operations: u64) -> Builder {
    let mut builder = Builder::default();
    for one in 0..2 {
        builder.begin(one, 0);
        host(one, operations).iter().for_each(|record| builder.take(record));
    }
    builder
}

/// A trace's packets, a line each.
fn dump(bytes: &[u8]) -> String {
    let trace = Trace::decode(bytes).unwrap();
    let mut text = String::new();
    let mut names: BTreeMap<u64, String> = BTreeMap::new();
    for packet in &trace.packet {
        assert_eq!(packet.trusted_packet_sequence_id, Some(1));
        if let Some(clocks) = &packet.clock_snapshot {
            let clocks: Vec<_> = clocks.clocks.iter().map(|one| (one.clock_id(), one.timestamp())).collect();
            writeln!(text, "clocks {clocks:?}").unwrap();
        }
        if let Some(track) = &packet.track_descriptor {
            let above = track.parent_uuid.map_or_else(String::new, |above| names[&above].clone() + " / ");
            let unit = track.counter.as_ref().map_or("", |counter| counter.unit_name());
            let name = above + track.name();
            writeln!(text, "track {} = {name} {unit}", track.uuid()).unwrap();
            names.insert(track.uuid(), name);
        }
        if let Some(event) = &packet.track_event {
            let facts = event.debug_annotations.iter().map(|fact| match &fact.string_value {
                Some(text) => format!("{}={text}", fact.name()),
                None => format!("{}={}", fact.name(), fact.uint_value()),
            });
            let facts = facts.collect::<Vec<_>>().join(", ");
            let what = match event.r#type() {
                SLICE_BEGIN => format!("begin {} [{facts}] {:?}", event.name(), event.flow_ids),
                SLICE_END => "end".to_owned(),
                INSTANT => format!("moment {} [{facts}]", event.name()),
                COUNTER => format!("counter {}", event.counter_value()),
                other => panic!("type {other}"),
            };
            writeln!(text, "{} on {}: {what}", packet.timestamp(), event.track_uuid()).unwrap();
        }
    }
    text
}

#[test]
fn records_become_tracks() {
    let tracks = built(2).finish();
    same("control/cli/tests/golden/trace.txt", &dump(&encode(&tracks)));
}

/// A host's records, with a clock that goes wrong by so much.
fn skewed(by: i64) -> Builder {
    let mut builder = Builder::default();
    for one in 0..2 {
        builder.begin(one, 0);
        for record in host(one, 4) {
            match record {
                Record::Observer(observer) if one == 1 => {
                    let realtime_offset_ns = observer.realtime_offset_ns + by;
                    builder.take(&Record::Observer(Observer { realtime_offset_ns, ..observer }));
                }
                record => builder.take(&record),
            }
        }
    }
    builder
}

#[test]
fn clocks_that_messages_belie_are_aligned() {
    for by in [-50 * MILLI as i64, 50 * MILLI as i64] {
        let mut builder = skewed(by);
        assert_eq!(builder.align(), [("host 10.64.0.2".to_owned(), -by)]);
        assert_eq!(builder.finish(), built(4).finish());
    }
    // Nothing arrives before it was sent: the clocks may be right, and ends apart.
    let mut builder = skewed(MILLI as i64);
    assert!(builder.align().is_empty());
    assert_ne!(builder.finish(), built(4).finish());
}

#[test]
fn the_picture_of_the_guide_is_what_the_trace_holds() {
    let tracks = built(4).finish();
    same("docs/pictures/trace.svg", &picture::svg(&tracks, "a trace of two hosts"));
}

#[test]
fn snapshots_tell_of_bursts_whose_events_were_lost() {
    let mut builder = Builder::default();
    let traffic = |began, last, bytes| Traffic {
        burst_began_ns: began,
        last_ns: last,
        bytes,
        burst_after: 100,
        ..Traffic::default()
    };
    let mut flow = TcpFlow::default();
    for (last, bytes) in [(20, 300), (25, 400)] {
        flow.egress.traffic = traffic(10, last, bytes);
        builder.take(&Record::Tcp { time_ns: 30, key: key(0), flow });
    }
    let mut counters = RoceCounters { source_port: 49_152, ..RoceCounters::default() };
    counters.traffic = traffic(40, 50, 600);
    let roce = FlowKey {
        protocol: Protocol::Roce as u8,
        direction: Direction::Ingress as u8,
        queue_pair: 7,
        ..key(0)
    };
    builder.take(&Record::Roce { time_ns: 60, key: roce, counters });
    let tracks = builder.finish();
    let [host] = tracks.as_slice() else { panic!("{tracks:?}") };
    let flows = &host.tracks[0].tracks;
    let shown: Vec<(&str, &str, u64, u64, &str)> = flows
        .iter()
        .flat_map(|flow| flow.tracks.iter().map(move |way| (flow, way)))
        .flat_map(|(flow, way)| way.slices.iter().map(move |slice| (flow, way, slice)))
        .map(|(flow, way, slice)| {
            (flow.name.as_str(), way.name.as_str(), slice.begin.0, slice.end.0, slice.name.as_str())
        })
        .collect();
    let expected = [
        ("tcp 10.64.0.1:7200 - 10.64.0.2:41022", "out", 10, 25, "300B"),
        ("roce 10.64.0.2 > 10.64.0.1 qp 7", "in", 40, 50, "500B"),
    ];
    assert_eq!(shown, expected);
}

#[test]
fn slices_of_a_lane_never_overlap() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let slices: Vec<Slice> = (0..500)
        .map(|number| {
            let begin = Nanos(rng.random_range(0..1000));
            let end = Nanos(begin.0 + rng.random_range(0..30));
            Slice { begin, end, name: number.to_string(), facts: vec![], joined: None }
        })
        .collect();
    let lanes = lanes(&slices);
    assert_eq!(lanes.iter().map(Vec::len).sum::<usize>(), 500);
    assert!(lanes.iter().all(|lane| lane.is_sorted_by(|one, next| one.end <= next.begin)));
}

#[test]
fn hostile_records_end_in_a_trace() {
    for seed in 0..200 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut builder = Builder::default();
        for _ in 0..300 {
            let odd = |rng: &mut ChaCha8Rng| match rng.random_range(0..4) {
                0 => 0,
                1 => u64::MAX - rng.random_range(0..3),
                2 => rng.random_range(0..5),
                _ => rng.random(),
            };
            let mut number = || odd(&mut rng);
            let flow = FlowKey {
                interface: number() as u32,
                protocol: number() as u8,
                direction: number() as u8,
                queue_pair: number() as u32,
                ..FlowKey::default()
            };
            let record = match number() % 6 {
                0 => Record::Mark(Mark {
                    time_ns: number(),
                    communicator: number() % 3,
                    operation: number(),
                    segment: number(),
                    bytes: number(),
                    epoch: number() as u32,
                    participant: number() as u32,
                    rank: number() as u32,
                    peer: number() as u32,
                    kind: number() as u32 % 8,
                    channel: number() as u32,
                }),
                1 => Record::Event(Event {
                    time_ns: number(),
                    flow,
                    kind: number() as u32 % 8,
                    count: number() as u32,
                    total: number(),
                    burst_began_ns: number(),
                    burst_ended_ns: number(),
                    burst_bytes: number(),
                    paused_ns: number() as u32,
                    size: number() as u32,
                }),
                2 => Record::Observer(Observer {
                    time_ns: number(),
                    host: number() % 3,
                    realtime_offset_ns: number().cast_signed(),
                }),
                3 => Record::Owner(Owner {
                    time_ns: number(),
                    flow,
                    tenant: Label::new("\u{1b}"),
                    communicator: CommunicatorId(number() % 3),
                    epoch: Epoch(0),
                    from: 0,
                    to: 1,
                    owned: true,
                }),
                4 => {
                    let way = |bytes| Totals { bytes, ..Totals::default() };
                    let (interface, egress) = (number(), way(number()));
                    let totals = InterfaceTotals { interface, egress, ingress: way(number()) };
                    Record::Totals { time_ns: number(), totals }
                }
                _ => {
                    let mut tcp = TcpFlow::default();
                    tcp.ingress.traffic.burst_began_ns = number();
                    tcp.ingress.traffic.burst_after = number();
                    tcp.ingress.traffic.bytes = number();
                    Record::Tcp { time_ns: number(), key: flow, flow: tcp }
                }
            };
            builder.take(&record);
        }
        let trace = Trace::decode(encode(&builder.finish()).as_slice()).unwrap();
        assert!(trace.packet.len() > 1, "seed {seed}");
    }
}
