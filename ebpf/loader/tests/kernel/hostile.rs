//! Whatever a packet claims, it is counted in the one class that it belongs to, and for its flow. Random, truncated and
//! hostile packets run through the programs in the kernel.

use crate::support::model::{self, Kind};
use crate::support::packets::{Segment, Transfer, ethernet, ip, udp};
use crate::support::{collector, seed};
use harmonaize_events::{Direction, FlowKey, Totals};
use harmonaize_loader::{Flows, Options, Programs, Trial};
use rand::prelude::*;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const PACKETS: usize = 30_000;

/// Packets and bytes of flows, in both directions.
type Counts = BTreeMap<FlowKey, [(u64, u64); 2]>;

fn any<T: Copy>(random: &mut ChaCha8Rng, of: &[T]) -> T {
    of[random.random_range(0..of.len())]
}

fn addresses(random: &mut ChaCha8Rng) -> (IpAddr, IpAddr) {
    let host = |random: &mut ChaCha8Rng| random.random_range(1..4u8);
    let (a, b) = (host(random), host(random));
    if random.random() {
        (Ipv4Addr::new(10, 0, 0, a).into(), Ipv4Addr::new(10, 0, 0, b).into())
    } else {
        let of = |host: u8| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host.into());
        (of(a).into(), of(b).into())
    }
}

fn transport(random: &mut ChaCha8Rng) -> (u8, Vec<u8>) {
    let port = |random: &mut ChaCha8Rng| any(random, &[1, 80, 4791]);
    match random.random_range(0..8) {
        0..3 => {
            let segment = Segment {
                source: port(random),
                destination: port(random),
                sequence: random.random(),
                acknowledgement: random.random(),
                flags: random.random(),
                window: any(random, &[0, 1, 65535]),
                payload: random.random_range(0..100),
            };
            let mut bytes = segment.bytes();
            if random.random_range(0..4) == 0 {
                // Options, or none where it says that there are.
                bytes[12] = random.random();
            }
            (6, bytes)
        }
        3..6 => {
            let transfer = Transfer {
                opcode: any(random, &[0, 4, 6, 10, 12, 13, 16, 17, 18, 0x24, 0x64, 0x81, 0x91, 0xb1, 0xff]),
                queue_pair: random.random_range(1..4),
                sequence: random.random_range(0..1 << 24),
                asks: random.random(),
                extended: random.random(),
                payload: any(random, &[0, 0, 1, 64]),
            };
            let mut bytes = transfer.bytes(random.random());
            if random.random_range(0..4) == 0 {
                bytes[9] = random.random();
            }
            if random.random_range(0..4) == 0 {
                // Its own length, about as short as it may be.
                bytes[5] = random.random_range(8 + 12..8 + 12 + 4 + 6);
            }
            (17, bytes)
        }
        6 => (17, udp(port(random), port(random), &vec![0; random.random_range(0..40)])),
        _ => (any(random, &[1, 2, 47, 50, 132, 59]), vec![0; random.random_range(0..40)]),
    }
}

/// IPv6's extension headers before a transport: those that exist, chained at random.
fn extended(random: &mut ChaCha8Rng, protocol: u8, payload: Vec<u8>) -> (u8, Vec<u8>) {
    let (mut next, mut bytes) = (protocol, payload);
    for _ in 0..random.random_range(0..9) {
        let kind = any(random, &[0, 43, 44, 51, 60]);
        let length = any(random, &[0, 0, 0, 1, 2, 5]);
        let mut header = vec![next, length];
        let fragment: u16 = any(random, &[0, 0, 0, 1, 8, 6]);
        header.extend(if kind == 44 { fragment.to_be_bytes() } else { [0, 0] });
        header.resize(
            match kind {
                44 => 8,
                51 => 8 + 4 * usize::from(length),
                _ => 8 + 8 * usize::from(length),
            },
            0,
        );
        header.extend(&bytes);
        (next, bytes) = (kind, header);
    }
    (next, bytes)
}

fn packet(random: &mut ChaCha8Rng) -> Vec<u8> {
    let (source, destination) = addresses(random);
    let (mut protocol, mut payload) = transport(random);
    if source.is_ipv6() {
        (protocol, payload) = extended(random, protocol, payload);
    }
    let mut packet = ip(source, destination, protocol, random.random_range(0..4), &payload);
    if source.is_ipv4() {
        match random.random_range(0..6) {
            // A fragment, or flags and offset of any kind.
            0 => packet[20..22].copy_from_slice(&random.random::<[u8; 2]>()),
            // Options, which may well reach into the transport's header.
            1 => packet[14] = 0x40 | random.random_range(0..16),
            _ => {}
        }
    }
    let kind = u16::from_be_bytes([packet[12], packet[13]]);
    let tags: Vec<u16> = (0..random.random_range(0..4)).map(|_| any(random, &[0x8100, 0x88a8])).collect();
    if random.random() {
        packet = ethernet(&tags, kind, &packet[14..]);
    }
    // Lies: some bytes, the length, the end.
    for _ in 0..any(random, &[0, 0, 0, 1, 2, 8]) {
        let at = random.random_range(0..packet.len());
        packet[at] = random.random();
    }
    match random.random_range(0..4) {
        0 => packet.truncate(random.random_range(15..=packet.len().max(15))),
        1 => packet.resize(packet.len() + random.random_range(0..60), 0),
        _ => {}
    }
    packet
}

/// True for packets that newer kernels do not run programs on. Those are marked as IP and shorter than its header. Behind a VLAN
/// tag they take them.
fn refused(packet: &[u8]) -> bool {
    match (packet[12], packet[13]) {
        (0x08, 0x00) => packet.len() < 14 + 20,
        (0x86, 0xdd) => packet.len() < 14 + 40,
        _ => false,
    }
}

fn less(after: Totals, before: Totals) -> Totals {
    Totals {
        buffers: after.buffers - before.buffers,
        buffer_bytes: after.buffer_bytes - before.buffer_bytes,
        packets: after.packets - before.packets,
        bytes: after.bytes - before.bytes,
        tcp: after.tcp - before.tcp,
        roce: after.roce - before.roce,
        other: after.other - before.other,
        fragments: after.fragments - before.fragments,
        malformed: after.malformed - before.malformed,
        unplaced: after.unplaced - before.unplaced,
    }
}

fn totals(collector: &Programs, direction: Direction) -> Totals {
    let totals = collector.totals(Programs::TRIAL_INTERFACE).unwrap();
    if direction == Direction::Egress { totals.egress } else { totals.ingress }
}

fn counted(flows: &Flows) -> Counts {
    let mut counts = Counts::new();
    for (key, flow) in &flows.tcp {
        let both = [flow.ingress, flow.egress].map(|own| (own.traffic.packets, own.traffic.bytes));
        assert_eq!(counts.insert(*key, both), None);
    }
    for (key, flow) in &flows.roce {
        let mut both = [(0, 0); 2];
        both[usize::from(key.direction) - 1] = (flow.traffic.packets, flow.traffic.bytes);
        assert_eq!(counts.insert(*key, both), None);
    }
    counts
}

#[test]
fn every_packet_is_counted_once_and_right() {
    let Some(mut collector) = collector(Options::default()) else { return };
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    let mut expected = Counts::new();
    let mut seen = [0; 5];
    for number in 0..PACKETS {
        let packet = packet(&mut random);
        let direction = if random.random() { Direction::Egress } else { Direction::Ingress };
        let kind = model::read(&packet, direction == Direction::Egress);
        let before = if number == 0 { Totals::default() } else { totals(&collector, direction) };
        let trial = Trial { direction, packet: &packet, segments: None, repeat: 1 };
        match collector.trial(trial) {
            Err(_) if refused(&packet) => continue,
            ran => ran.unwrap_or_else(|error| panic!("packet {number}: {error}: {packet:02x?}")),
        };
        let change = less(totals(&collector, direction), before);
        assert_eq!(
            change,
            kind.totals(packet.len()),
            "packet {number} {direction:?} {kind:?}: {packet:02x?}"
        );
        let (at, flow) = match kind {
            Kind::Tcp(flow) => (0, Some(flow)),
            Kind::Roce(flow) => (1, Some(flow)),
            Kind::Other => (2, None),
            Kind::Fragment => (3, None),
            Kind::Malformed => (4, None),
        };
        seen[at] += 1;
        if let Some(flow) = flow {
            let own = &mut expected.entry(flow).or_default()[direction as usize - 1];
            own.0 += 1;
            own.1 += packet.len() as u64;
        }
    }
    eprintln!("TCP, RoCE, other, fragments, malformed: {seen:?}");
    assert!(seen.iter().all(|count| *count > PACKETS / 100), "each class has its share: {seen:?}");
    let mut flows = Flows::default();
    collector.read_flows(&mut flows).unwrap();
    let found = counted(&flows);
    for (key, counts) in &expected {
        assert_eq!(found.get(key), Some(counts), "{key:?}");
    }
    assert_eq!(found.len(), expected.len());
    assert_eq!((flows.evicted, collector.losses().unwrap().entries), (0, found.len() as u64));
}

/// The shortest and longest that the kernel takes, and every length of a good packet.
#[test]
fn every_truncation_is_counted() {
    let Some(mut collector) = collector(Options::default()) else { return };
    let (source, destination) = ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
    let transfer = Transfer { opcode: 17, queue_pair: 5, sequence: 1, asks: false, extended: 0, payload: 0 };
    let whole = ip(source, destination, 17, 0, &transfer.bytes(49152));
    let whole = ethernet(&[0x8100], 0x86dd, &whole[14..]);
    for length in 15..=whole.len() {
        let packet = &whole[..length];
        let kind = model::read(packet, false);
        let expected =
            if length == whole.len() { matches!(kind, Kind::Roce(_)) } else { kind == Kind::Malformed };
        assert!(expected, "{length}: {kind:?}");
        let before = if length == 15 { Totals::default() } else { totals(&collector, Direction::Ingress) };
        collector.trial(Trial { direction: Direction::Ingress, packet, segments: None, repeat: 1 }).unwrap();
        assert_eq!(less(totals(&collector, Direction::Ingress), before), kind.totals(length), "{length}");
    }
}

/// The program before the stack counts the same packets as the one behind it, flow by flow.
#[test]
fn packets_before_the_stack_are_counted_alike() {
    let Some(mut collector) = collector(Options { xdp: true, ..Options::default() }) else { return };
    let mut random = ChaCha8Rng::seed_from_u64(seed());
    let mut expected = Counts::new();
    for number in 0..PACKETS / 3 {
        let packet = packet(&mut random);
        let kind = model::read(&packet, false);
        let before = if number == 0 { Totals::default() } else { totals(&collector, Direction::Ingress) };
        let trial = Trial { direction: Direction::Ingress, packet: &packet, segments: None, repeat: 1 };
        collector.trial_xdp(trial).unwrap_or_else(|error| panic!("packet {number}: {error}: {packet:02x?}"));
        let change = less(totals(&collector, Direction::Ingress), before);
        assert_eq!(change, kind.totals(packet.len()), "packet {number} {kind:?}: {packet:02x?}");
        if let Kind::Tcp(flow) | Kind::Roce(flow) = kind {
            let own = &mut expected.entry(flow).or_default()[0];
            own.0 += 1;
            own.1 += packet.len() as u64;
        }
    }
    let mut flows = Flows::default();
    collector.read_flows(&mut flows).unwrap();
    assert_eq!(counted(&flows), expected);
}
