//! The programs and the reader, emulated: packets in, events and snapshots out, as interfaces of several hosts would tell.

use harmonaize_analysis::trace::{Lost, LostKind, Observer, Record};
use harmonaize_events::{Direction, Event, EventKind, FlowKey, Protocol, TcpFlow, Traffic};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

pub const IDLE_GAP_NS: u64 = 500_000;

/// Something on the wire, from one host to another: it leaves at `time_ns` and is there `delay_ns` later.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Packet {
    pub time_ns: u64,
    pub from: u32,
    pub to: u32,
    pub from_port: u16,
    pub to_port: u16,
    pub bytes: u64,
    /// How long its acknowledgement takes to come back; 0 where that is not measured.
    pub rtt_ns: u64,
}

pub const DELAY_NS: u64 = 30_000;

pub fn address(host: u32) -> [u32; 4] {
    FlowKey::mapped(u32::from_ne_bytes(Ipv4Addr::from(0x0a40_0001 + host).octets()))
}

/// How it is observed.
#[derive(Debug, Clone)]
pub struct Watch {
    pub hosts: Vec<u32>,
    /// Between two readings of all flows; 0 for none.
    pub sweep_ns: u64,
    /// This part of the events is lost.
    pub loss: f64,
    /// Whether each reading tells that it took place, though no flow has changed.
    pub totals: bool,
}

impl Watch {
    pub fn all(hosts: impl IntoIterator<Item = u32>) -> Self {
        Self { hosts: hosts.into_iter().collect(), sweep_ns: 10_000_000, loss: 0.0, totals: true }
    }
}

#[derive(Default)]
struct Flows {
    flows: BTreeMap<FlowKey, TcpFlow>,
    changed: BTreeSet<FlowKey>,
}

impl Flows {
    fn packet(&mut self, key: FlowKey, direction: Direction, packet: &Packet, time_ns: u64) -> Option<Event> {
        let Packet { bytes, rtt_ns, .. } = *packet;
        let flow = self.flows.entry(key).or_default();
        self.changed.insert(key);
        let counters = if direction == Direction::Egress { &mut flow.egress } else { &mut flow.ingress };
        if direction == Direction::Egress && rtt_ns > 0 {
            counters.rtt.count += 1;
            counters.rtt.sum_ns += rtt_ns;
        }
        let traffic = &mut counters.traffic;
        let before = *traffic;
        traffic.packets += 1;
        traffic.bytes += bytes;
        traffic.last_ns = time_ns;
        let event =
            Event { time_ns, flow: FlowKey { direction: direction as u8, ..key }, ..Event::default() };
        if before.first_ns == 0 {
            (traffic.first_ns, traffic.burst_began_ns) = (time_ns, time_ns);
            return Some(Event { kind: EventKind::FlowBegan as u32, ..event });
        }
        if time_ns <= before.last_ns + IDLE_GAP_NS {
            return None;
        }
        (traffic.burst_began_ns, traffic.burst_after) = (time_ns, before.bytes);
        let Traffic { burst_began_ns, last_ns: burst_ended_ns, .. } = before;
        let burst_bytes = before.bytes - before.burst_after;
        let kind = EventKind::BurstBegan as u32;
        Some(Event { kind, burst_began_ns, burst_ended_ns, burst_bytes, ..event })
    }
}

/// What the watched hosts tell of packets, in the order of time, as one merged trace.
pub fn records(mut packets: Vec<Packet>, watch: &Watch, seed: u64) -> Vec<Record> {
    let mut random = ChaCha8Rng::seed_from_u64(seed ^ 0x5eed);
    packets.sort_unstable();
    let end = packets.last().map_or(0, |packet| packet.time_ns) + 100_000_000;
    // What each host sees: it leaves, and it comes in.
    let mut seen = Vec::new();
    for packet in &packets {
        seen.push((packet.time_ns, packet.from, Direction::Egress, *packet));
        seen.push((packet.time_ns + DELAY_NS, packet.to, Direction::Ingress, *packet));
    }
    seen.retain(|(_, host, ..)| watch.hosts.contains(host));
    seen.sort_unstable_by_key(|(time, host, direction, packet)| (*time, *host, *direction as u8, *packet));
    let mut told: Vec<(u64, u32, Record)> = Vec::new();
    for host in &watch.hosts {
        let mut flows = Flows::default();
        let mut sweep = random.random_range(0..watch.sweep_ns.max(1));
        let mut lost = 0;
        let mut here = seen.iter().filter(|(_, at, ..)| at == host).peekable();
        while here.peek().is_some() || (sweep < end && watch.sweep_ns > 0) {
            let next = here.peek().map_or(u64::MAX, |(time, ..)| *time);
            if watch.sweep_ns > 0 && sweep < next {
                for key in std::mem::take(&mut flows.changed) {
                    let flow = flows.flows[&key];
                    told.push((sweep, *host, Record::Tcp { time_ns: sweep, key, flow }));
                }
                if lost > 0 {
                    let what = LostKind::Events;
                    let gap = Lost { time_ns: sweep, kind: what, count: std::mem::take(&mut lost) };
                    told.push((sweep, *host, Record::Lost(gap)));
                }
                if watch.totals {
                    told.push((sweep, *host, Record::Totals { time_ns: sweep, totals: Default::default() }));
                }
                sweep += watch.sweep_ns;
                continue;
            }
            let Some((time, _, direction, packet)) = here.next() else { break };
            let ((local, local_port), (remote, remote_port)) = match direction {
                Direction::Egress => ((packet.from, packet.from_port), (packet.to, packet.to_port)),
                Direction::Ingress => ((packet.to, packet.to_port), (packet.from, packet.from_port)),
            };
            let key = FlowKey {
                local: address(local),
                remote: address(remote),
                local_port,
                remote_port,
                interface: 2,
                protocol: Protocol::Tcp as u8,
                ..FlowKey::default()
            };
            if let Some(event) = flows.packet(key, *direction, packet, *time) {
                if random.random::<f64>() < watch.loss {
                    lost += 1;
                } else {
                    told.push((*time, *host, Record::Event(event)));
                }
            }
        }
    }
    told.sort_by_key(|(time, host, _)| (*time, *host));
    let mut records = Vec::with_capacity(told.len());
    let mut last = None;
    for (time_ns, host, record) in told {
        if last != Some(host) {
            let observer = Observer { time_ns, host: host.into(), realtime_offset_ns: 0 };
            records.push(Record::Observer(observer));
            last = Some(host);
        }
        records.push(record);
    }
    records
}
