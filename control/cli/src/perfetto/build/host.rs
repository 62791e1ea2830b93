//! One host of a timeline: rates of its interfaces, flows, and the bursts of each.

use super::Shift;
use super::communicator::Spans;
use crate::perfetto::track::{Counter, Fact, Moment, Slice, Track};
use harmonaize_analysis::CommunicatorId;
use harmonaize_analysis::trace::{Link, Lost, LostKind, Owner, Record};
use harmonaize_api::communicator_text;
use harmonaize_events::{
    Direction, Event, EventKind, FlowKey, InterfaceTotals, Protocol, RoceCounters, TcpFlow, Traffic,
};
use harmonaize_planner::Nanos;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// A host.
#[derive(Debug, Default)]
pub(super) struct Host {
    /// CLOCK_REALTIME less CLOCK_MONOTONIC.
    pub offset_ns: i64,
    links: BTreeMap<u32, Interface>,
    flows: BTreeMap<FlowKey, Flow>,
    losses: Vec<Lost>,
}

#[derive(Debug, Default)]
struct Interface {
    name: String,
    bytes_per_second: u64,
    last: Option<(Nanos, InterfaceTotals)>,
    egress: Vec<(Nanos, u64)>,
    ingress: Vec<(Nanos, u64)>,
}

/// By when they began: when they ended, and their bytes.
type Bursts = BTreeMap<Nanos, (Nanos, u64)>;

#[derive(Debug, Default)]
struct Flow {
    owner: Option<Owner>,
    /// Egress first.
    bursts: [Bursts; 2],
    moments: Vec<(Nanos, EventKind, bool, u64)>,
    source_port: u32,
}

/// A flow's key without the direction of a packet.
fn flow_key(key: &FlowKey) -> FlowKey {
    let direction = if key.protocol == Protocol::Tcp as u8 { 0 } else { key.direction };
    FlowKey { direction, ..*key }
}

fn is_ingress(direction: u8) -> bool {
    direction == Direction::Ingress as u8
}

impl Host {
    pub(super) fn is_empty(&self) -> bool {
        self.links.is_empty() && self.flows.is_empty() && self.losses.is_empty()
    }

    /// The address that most flows have on this side.
    pub(super) fn address(&self) -> Option<IpAddr> {
        let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for key in self.flows.keys() {
            *counts.entry(key.local_address()).or_default() += 1;
        }
        counts
            .into_iter()
            .max_by_key(|(address, count)| (*count, std::cmp::Reverse(*address)))
            .map(|(one, _)| one)
    }

    /// Tenants of communicators.
    pub(super) fn tenants(&self) -> impl Iterator<Item = (CommunicatorId, String)> {
        let owners = self.flows.values().filter_map(|flow| flow.owner.as_ref());
        owners.map(|owner| (owner.communicator, owner.tenant.as_str().to_owned()))
    }

    pub(super) fn take(&mut self, record: &Record) {
        match record {
            Record::Event(event) => self.event(event),
            Record::Tcp { key, flow, .. } => self.tcp(key, flow),
            Record::Roce { key, counters, .. } => self.roce(key, counters),
            Record::Totals { time_ns, totals } => self.totals(Nanos(*time_ns), totals),
            Record::Owner(owner) if owner.owned => self.flow(&owner.flow).owner = Some(*owner),
            Record::Link(link) => self.link(link),
            Record::Lost(lost) => self.losses.push(*lost),
            // Flows stay whose they were; the rest is not a host's.
            Record::Owner(_) | Record::Observer(_) | Record::Mark(_) => {}
            // Of later versions of the trace.
            #[allow(unreachable_patterns)]
            _ => {}
        }
    }

    fn flow(&mut self, key: &FlowKey) -> &mut Flow {
        self.flows.entry(flow_key(key)).or_default()
    }

    fn event(&mut self, event: &Event) {
        let (ingress, flow) = (is_ingress(event.flow.direction), self.flow(&event.flow));
        match EventKind::from_number(event.kind) {
            Some(EventKind::BurstBegan) => {
                let [egress, other] = &mut flow.bursts;
                let bursts = if ingress { other } else { egress };
                let (began, ended) = (Nanos(event.burst_began_ns), Nanos(event.burst_ended_ns));
                burst(bursts, began, ended, event.burst_bytes);
            }
            Some(EventKind::FlowBegan) | None => {}
            Some(kind @ EventKind::LateRtt) => {
                let took_ns = event.time_ns.saturating_sub(event.burst_ended_ns);
                flow.moments.push((Nanos(event.time_ns), kind, ingress, took_ns));
            }
            Some(kind) => flow.moments.push((Nanos(event.time_ns), kind, ingress, event.total)),
        }
    }

    fn tcp(&mut self, key: &FlowKey, counters: &TcpFlow) {
        let [egress, ingress] = &mut self.flow(key).bursts;
        running(egress, &counters.egress.traffic);
        running(ingress, &counters.ingress.traffic);
    }

    fn roce(&mut self, key: &FlowKey, counters: &RoceCounters) {
        let flow = self.flow(key);
        flow.source_port = counters.source_port;
        let [egress, ingress] = &mut flow.bursts;
        running(if is_ingress(key.direction) { ingress } else { egress }, &counters.traffic);
    }

    fn link(&mut self, link: &Link) {
        let interface = self.links.entry(link.interface).or_default();
        link.name.as_str().clone_into(&mut interface.name);
        interface.bytes_per_second = link.bytes_per_second;
    }

    /// The rate since the snapshot before.
    fn totals(&mut self, time: Nanos, totals: &InterfaceTotals) {
        let index = u32::try_from(totals.interface).unwrap_or(u32::MAX);
        let interface = self.links.entry(index).or_default();
        if let Some((since, before)) = interface.last.replace((time, *totals))
            && since < time
        {
            let rate = |now: u64, then: u64| {
                let bits = u128::from(now.saturating_sub(then)) * 8 * 1_000_000_000;
                u64::try_from(bits / time.since(since).as_nanos()).unwrap_or(u64::MAX)
            };
            interface.egress.push((since, rate(totals.egress.bytes, before.egress.bytes)));
            interface.ingress.push((since, rate(totals.ingress.bytes, before.ingress.bytes)));
        }
    }

    /// The tracks; bursts are joined to the operations that they are part of.
    pub(super) fn finish(self, operations: Option<&Spans>) -> Vec<Track> {
        let shift = Shift(self.offset_ns);
        let mut tracks = Vec::new();
        let name = |index: &u32| match self.links.get(index) {
            Some(link) if !link.name.is_empty() => link.name.clone(),
            _ => format!("interface {index}"),
        };
        for (index, link) in &self.links {
            for (way, values) in [("out", &link.egress), ("in", &link.ingress)] {
                if values.is_empty() {
                    continue;
                }
                let values = values.iter().map(|(time, rate)| (shift.real(*time), *rate)).collect();
                let counter = Some(Counter { unit: "bit/s", values });
                tracks.push(Track { counter, ..Track::named(format!("{} {way}", name(index))) });
            }
        }
        let mut flows = Track::named("flows");
        let mut sorted: Vec<(FlowKey, Flow)> = self.flows.into_iter().collect();
        // Own flows first.
        sorted.sort_by_key(|(key, flow)| {
            (flow.owner.map_or(CommunicatorId(u64::MAX), |owner| owner.communicator), *key)
        });
        for (key, flow) in sorted {
            flows.add(flow_track(&key, &flow, shift, operations, &name(&key.interface)));
        }
        tracks.push(flows);
        let mut losses = Track::named("lost");
        losses.moments = self.losses.iter().map(|lost| loss(lost, shift)).collect();
        tracks.push(losses);
        tracks.retain(|track| *track != Track::named(track.name.clone()));
        tracks
    }
}

/// Notes a burst, or more of one.
fn burst(bursts: &mut Bursts, began: Nanos, ended: Nanos, bytes: u64) {
    if began > Nanos(0) && bytes > 0 {
        let known = bursts.entry(began).or_default();
        *known = (known.0.max(ended), known.1.max(bytes));
    }
}

fn running(bursts: &mut Bursts, traffic: &Traffic) {
    let bytes = traffic.bytes.saturating_sub(traffic.burst_after);
    burst(bursts, Nanos(traffic.burst_began_ns), Nanos(traffic.last_ns), bytes);
}

fn flow_track(key: &FlowKey, flow: &Flow, shift: Shift, operations: Option<&Spans>, on: &str) -> Track {
    let (local, remote) = (key.local_address(), key.remote_address());
    let end = |address: IpAddr, port: u16| match address {
        IpAddr::V4(address) => format!("{address}:{port}"),
        IpAddr::V6(address) => format!("[{address}]:{port}"),
    };
    let name = match key.protocol == Protocol::Tcp as u8 {
        true => format!("tcp {} - {}", end(local, key.local_port), end(remote, key.remote_port)),
        false if is_ingress(key.direction) => format!("roce {remote} > {local} qp {}", key.queue_pair),
        false => format!("roce {local} > {remote} qp {}", key.queue_pair),
    };
    let mut track = Track::named(name);
    let [egress, ingress] = &flow.bursts;
    for (way, bursts) in [("out", egress), ("in", ingress)] {
        let mut bursts_track = Track::named(way);
        bursts_track.slices = bursts
            .iter()
            .map(|(began, (ended, bytes))| burst_slice((*began, *ended, *bytes), flow, shift, operations, on))
            .collect();
        track.add(bursts_track);
    }
    let moment = |(time, kind, ingress, total): &(Nanos, EventKind, bool, u64)| Moment {
        time: shift.real(*time),
        name: match kind {
            EventKind::FlowBegan => "flow began",
            EventKind::BurstBegan => "burst began",
            EventKind::CongestionBegan => "congestion mark",
            EventKind::Retransmission => "sent again",
            EventKind::Gap => "missing",
            EventKind::Refusal => "NAK",
            EventKind::LateRtt => "late round trip",
        },
        facts: vec![
            ("direction", Fact::Text(if *ingress { "in" } else { "out" }.to_owned())),
            (if *kind == EventKind::LateRtt { "took ns" } else { "so far" }, Fact::Number(*total)),
        ],
    };
    track.moments = flow.moments.iter().map(moment).collect();
    track
}

fn burst_slice(
    (began, ended, bytes): (Nanos, Nanos, u64),
    flow: &Flow,
    shift: Shift,
    operations: Option<&Spans>,
    on: &str,
) -> Slice {
    let (begin, end) = (shift.real(began), shift.real(ended.max(began)));
    let mut facts = vec![("bytes", Fact::Number(bytes)), ("interface", Fact::Text(on.to_owned()))];
    if flow.source_port > 0 {
        facts.push(("source port", Fact::Number(flow.source_port.into())));
    }
    let mut joined = None;
    if let Some(owner) = &flow.owner {
        facts.push(("communicator", Fact::Text(communicator_text(owner.communicator.0))));
        facts.push(("epoch", Fact::Number(owner.epoch.into())));
        facts.push(("from participant", Fact::Number(owner.from.into())));
        facts.push(("to participant", Fact::Number(owner.to.into())));
        let span = operations.and_then(|spans| spans.at(owner.communicator, begin, end));
        if let Some((operation, number)) = span {
            facts.push(("operation", Fact::Number(operation)));
            joined = Some(number);
        }
    }
    Slice { begin, end, name: crate::text::bytes(bytes), facts, joined }
}

fn loss(lost: &Lost, shift: Shift) -> Moment {
    let name = match lost.kind {
        LostKind::Events => "events lost",
        LostKind::Flows => "flows evicted",
        LostKind::Marks => "marks lost",
        LostKind::Records => "records left out",
        LostKind::Gap => "nothing was observed",
    };
    Moment { time: shift.real(Nanos(lost.time_ns)), name, facts: vec![("count", Fact::Number(lost.count))] }
}
