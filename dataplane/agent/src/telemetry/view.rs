//! Readings in the words of the provider's interface: two of them make a snapshot with rates.

use crate::telemetry::analysis::JobActivity;
use crate::telemetry::clock::realtime_ns;
use crate::telemetry::cpu_budget::nanoseconds;
use crate::telemetry::names::Names;
use crate::telemetry::own_flows::Traffic;
use crate::telemetry::reading::{LinkReading, Reading};
use crate::telemetry::to_proto::{self, Clock};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_analysis::congestion;
use harmonaize_analysis::phases::Job;
use harmonaize_analysis::trace::Owner;
use harmonaize_api::v1;
use harmonaize_events::{
    Direction, FlowKey, QueuePair, RoceCounters, RttStats, Socket, TcpCounters, TcpFlow, Traffic as Counted,
};
use harmonaize_loader::Flows;
use std::collections::HashMap;
use std::time::Duration;

/// Most operations, and jobs, in a snapshot.
const MOST: usize = 64;

/// What changed from one reading to the next, and how long that took.
struct Span<'a> {
    before: &'a Reading,
    now: &'a Reading,
    clock: Clock,
    /// Bytes of each flow before, by its entry: egress, ingress.
    bytes: HashMap<FlowKey, (u64, u64)>,
    /// And now.
    bytes_now: HashMap<FlowKey, (u64, u64)>,
}

fn bytes_of(flows: &Flows) -> HashMap<FlowKey, (u64, u64)> {
    let tcp = flows.tcp.iter().map(|(key, flow)| (*key, bytes_of_tcp(flow)));
    let roce = flows.roce.iter().map(|(key, counters)| (*key, bytes_of_roce(key, counters)));
    tcp.chain(roce).collect()
}

impl<'a> Span<'a> {
    fn new(before: &'a Reading, now: &'a Reading) -> Self {
        let (bytes, bytes_now) = (bytes_of(&before.flows), bytes_of(&now.flows));
        Self { before, now, clock: Clock(now.offset_ns), bytes, bytes_now }
    }

    fn length(&self) -> Duration {
        self.now.time.since(self.before.time)
    }

    /// Bits in a second.
    fn rate(&self, before: u64, now: u64) -> u64 {
        let length = self.length();
        if length.is_zero() {
            return 0;
        }
        let bits = u128::from(now.saturating_sub(before)) * 8_000_000_000 / length.as_nanos();
        u64::try_from(bits).unwrap_or(u64::MAX)
    }

    /// Of a flow, egress and ingress.
    fn rates(&self, key: &FlowKey) -> (u64, u64) {
        let now = self.bytes_now.get(key).copied().unwrap_or((0, 0));
        // A flow that is new has all its bytes of now.
        let before = self.bytes.get(key).copied().unwrap_or((0, 0));
        (self.rate(before.0, now.0), self.rate(before.1, now.1))
    }
}

fn bytes_of_tcp(flow: &TcpFlow) -> (u64, u64) {
    (flow.egress.traffic.bytes, flow.ingress.traffic.bytes)
}

fn bytes_of_roce(key: &FlowKey, counters: &RoceCounters) -> (u64, u64) {
    if key.direction == Direction::Egress as u8 {
        (counters.traffic.bytes, 0)
    } else {
        (0, counters.traffic.bytes)
    }
}

/// The names of the interfaces that are measured.
pub(crate) fn names(reading: &Reading, names: &mut Names) {
    reading.links.iter().for_each(|link| names.insert(link.measured.index, &link.measured.name));
}

/// A snapshot with at most so many flows, the fastest first. For the first of all, `before` is `now`: rates are 0.
pub(crate) fn snapshot(host: &str, before: &Reading, now: &Reading, most: usize) -> v1::Snapshot {
    let span = Span::new(before, now);
    let mut known = Names::default();
    names(now, &mut known);
    let mut flows: Vec<(u64, v1::Flow)> = all_flows(&span)
        .map(|flow| {
            let bits = |way: &Option<v1::FlowDirection>| way.as_ref().map_or(0, |way| way.rate_bps);
            (bits(&flow.egress) + bits(&flow.ingress), flow)
        })
        .collect();
    let own = own_rates(&flows);
    flows.sort_by_key(|(bits, _)| std::cmp::Reverse(*bits));
    let communicator = |(id, traffic): (&CommunicatorId, &Traffic)| communicator(&span, *id, traffic);
    v1::Snapshot {
        host: host.to_owned(),
        time_ns: realtime_ns(now.time, now.offset_ns),
        interval_ns: nanoseconds(span.length()),
        uptime_ns: nanoseconds(now.uptime),
        links: now.links.iter().map(|one| link(&span, one, &known, &own)).collect(),
        flows: flows.into_iter().take(most).map(|(_, flow)| flow).collect(),
        flow_count: now.flow_count,
        communicators: now.communicators.iter().map(communicator).collect(),
        operations: now
            .operations
            .iter()
            .take(MOST)
            .map(|one| to_proto::operation(one, span.clock))
            .collect(),
        external_jobs: jobs(&span),
        stragglers: now.stragglers.iter().map(|one| to_proto::straggler(one, span.clock)).collect(),
        losses: Some(losses(now)),
        cost: Some(cost(before, now)),
        missing: now.missing.clone(),
    }
}

/// Every flow, of one interface or of all; without rates.
pub(crate) fn flows<'a>(now: &'a Reading, interface: &'a str) -> Vec<v1::Flow> {
    let span = Span::new(now, now);
    all_flows(&span).filter(|flow| interface.is_empty() || flow.interface == interface).collect()
}

/// Links without rates of flows, for control.
pub(crate) fn links(before: &Reading, now: &Reading) -> Vec<v1::Link> {
    let span = Span::new(before, now);
    let mut known = Names::default();
    names(now, &mut known);
    now.links.iter().map(|one| link(&span, one, &known, &HashMap::new())).collect()
}

fn own_rates(flows: &[(u64, v1::Flow)]) -> HashMap<String, u64> {
    let mut own: HashMap<String, u64> = HashMap::new();
    for (_, flow) in flows.iter().filter(|(_, flow)| flow.owner.is_some()) {
        let bits = flow.egress.as_ref().map_or(0, |way| way.rate_bps);
        *own.entry(flow.interface.clone()).or_default() += bits;
    }
    own
}

fn link(span: &Span<'_>, link: &LinkReading, names: &Names, own: &HashMap<String, u64>) -> v1::Link {
    let index = link.measured.index;
    let then = span.before.links.iter().find(|one| one.measured.index == index);
    let then = then.map(|one| one.totals).unwrap_or_default();
    let (egress, ingress) = (link.totals.egress, link.totals.ingress);
    let (marked, retransmissions) = signs(span.now, index);
    let of_link = |found: &&congestion::Congestion| found.link.interface == index;
    let worst = span.now.congestion.iter().filter(of_link).max_by_key(|found| (found.level, found.used_ppm));
    v1::Link {
        interface: link.measured.name.clone(),
        index,
        capacity_bps: link.measured.bits.unwrap_or(0),
        egress_bps: span.rate(then.egress.bytes, egress.bytes),
        ingress_bps: span.rate(then.ingress.bytes, ingress.bytes),
        own_egress_bps: own.get(&link.measured.name).copied().unwrap_or(0),
        congestion: worst.map(|found| to_proto::congestion(found, names, span.clock)),
        counters: Some(v1::LinkCounters {
            egress_packets: egress.packets,
            egress_bytes: egress.bytes,
            ingress_packets: ingress.packets,
            ingress_bytes: ingress.bytes,
            ecn_ce: marked,
            retransmits: retransmissions,
            untracked: egress.unplaced + ingress.unplaced,
            malformed: egress.malformed + ingress.malformed,
        }),
    }
}

/// Marks and retransmissions of an interface's flows.
fn signs(reading: &Reading, interface: u32) -> (u64, u64) {
    let tcp = reading.flows.tcp.iter().filter(|(key, _)| key.interface == interface);
    let tcp = tcp.flat_map(|(_, flow)| [&flow.ingress, &flow.egress]);
    let tcp = tcp.map(|way| (way.traffic.ecn_ce, way.retransmissions));
    let roce = reading.flows.roce.iter().filter(|(key, _)| key.interface == interface);
    let roce = roce.map(|(_, way)| (way.traffic.ecn_ce + way.notifications, way.retransmissions));
    tcp.chain(roce).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

/// External jobs, most traffic first.
fn jobs(span: &Span<'_>) -> Vec<v1::ExternalJob> {
    let mut rates: HashMap<u64, u64> = HashMap::new();
    for (key, job) in span.now.job_of.iter() {
        let (egress, ingress) = span.rates(key);
        *rates.entry(*job).or_default() += egress + ingress;
    }
    let job = |(job, lately): &(Job, JobActivity)| v1::ExternalJob {
        job: job.job.to_string(),
        hosts: job.hosts.iter().take(MOST).map(|host| to_proto::address(*host).to_string()).collect(),
        flows: job.flows.into(),
        iterations: job.iterations,
        period_ns: job.period.map_or(0, nanoseconds),
        rate_bps: rates.get(&job.job).copied().unwrap_or(0),
        last: lately.last_phase.as_ref().map(|phase| to_proto::phase(phase, span.clock)),
        ring: job.ring,
        since_ns: realtime_ns(job.since, span.clock.0),
    };
    let mut jobs: Vec<v1::ExternalJob> = span.now.jobs.iter().map(job).collect();
    jobs.sort_by_key(|job| std::cmp::Reverse(job.rate_bps));
    jobs.truncate(MOST);
    jobs
}

fn communicator(span: &Span<'_>, id: CommunicatorId, traffic: &Traffic) -> v1::CommunicatorTraffic {
    let before = span.before.communicators.get(&id);
    v1::CommunicatorTraffic {
        communicator: id.0,
        tenant: traffic.tenant.clone(),
        name: traffic.name.clone(),
        ranks: traffic.ranks.clone(),
        epoch: traffic.epoch.into(),
        operations: traffic.operations,
        failed: traffic.failed,
        egress_bps: span.rate(before.map_or(0, |one| one.sent_bytes), traffic.sent_bytes),
        ingress_bps: span.rate(before.map_or(0, |one| one.received_bytes), traffic.received_bytes),
        last_operation_ns: traffic.recent.back().copied().map_or(0, nanoseconds),
        median_operation_ns: nanoseconds(traffic.median()),
    }
}

pub(crate) fn losses(now: &Reading) -> v1::TelemetryLosses {
    let unplaced = now.links.iter().map(|one| one.totals.ingress.unplaced + one.totals.egress.unplaced);
    v1::TelemetryLosses {
        events: now.losses.events,
        evicted: now.losses.flows,
        untracked: unplaced.sum(),
        ambiguous: now.losses.ambiguous,
        marks: now.losses.marks,
        records: now.losses.records,
        gaps: now.losses.count,
        unregistered: now.losses.unregistered,
        endpoints: now.losses.ends,
    }
}

pub(crate) fn cost(before: &Reading, now: &Reading) -> v1::TelemetryCost {
    let used = now.thread.saturating_sub(before.thread).as_nanos();
    let length = now.time.since(before.time).as_nanos().max(1);
    let programs = now.cost.iter().flat_map(|cost| &cost.programs);
    let timed = now.cost.as_ref().is_some_and(|cost| cost.timed);
    let (runs, run_ns) =
        programs.fold((0, 0), |(runs, time), one| (runs + one.runs, time + one.time.as_nanos()));
    v1::TelemetryCost {
        thread_ppm: u32::try_from(used * 1_000_000 / length).unwrap_or(u32::MAX),
        timed,
        runs: if timed { runs } else { 0 },
        run_ns: if timed { u64::try_from(run_ns).unwrap_or(u64::MAX) } else { 0 },
    }
}

fn all_flows<'a>(span: &'a Span<'a>) -> impl Iterator<Item = v1::Flow> + 'a {
    let mut known = Names::default();
    names(span.now, &mut known);
    let others = known.clone();
    let tcp = span.now.flows.tcp.iter().map(move |(key, flow)| {
        let (egress, ingress) = span.rates(key);
        v1::Flow {
            protocol: v1::FlowProtocol::Tcp.into(),
            egress: Some(tcp_direction(&flow.egress, egress, span.clock)),
            ingress: Some(tcp_direction(&flow.ingress, ingress, span.clock)),
            kernel: span.now.endpoints.socket(key).map(kernel_tcp),
            end: span.now.endpoints.socket(key).map(end_of_socket),
            ..flow_of(span, key, &known)
        }
    });
    let roce = span.now.flows.roce.iter().map(move |(key, counters)| {
        let (egress, ingress) = span.rates(key);
        let way = roce_direction(counters, egress + ingress, span.clock);
        let leaves = key.direction == Direction::Egress as u8;
        let (egress, ingress) = if leaves { (Some(way), None) } else { (None, Some(way)) };
        v1::Flow {
            protocol: v1::FlowProtocol::Roce.into(),
            source_port: counters.source_port,
            end: span.now.endpoints.queue_pair(key).map(|(_, pair)| end_of_queue_pair(pair)),
            egress,
            ingress,
            ..flow_of(span, key, &others)
        }
    });
    tcp.chain(roce)
}

fn flow_of(span: &Span<'_>, key: &FlowKey, names: &Names) -> v1::Flow {
    let owner = span.now.owners.get(&FlowKey { interface: 0, ..*key });
    v1::Flow {
        interface: names.get(key.interface),
        local: key.local_address().to_string(),
        local_port: key.local_port.into(),
        remote: key.remote_address().to_string(),
        remote_port: key.remote_port.into(),
        queue_pair: key.queue_pair,
        owner: owner.map(owner_of),
        job: span.now.job_of.get(key).map_or_else(String::new, u64::to_string),
        ..v1::Flow::default()
    }
}

/// What a socket said when it was last sampled.
fn kernel_tcp(socket: &Socket) -> v1::TcpInfo {
    v1::TcpInfo {
        srtt_ns: socket.srtt_ns,
        rttvar_ns: socket.rttvar_ns,
        cwnd: socket.congestion_window,
        retransmits: socket.retransmissions,
        unacknowledged: socket.unacknowledged,
        delivery_bps: socket.delivery_rate.saturating_mul(8),
    }
}

fn end_of_socket(socket: &Socket) -> v1::FlowEndpoint {
    v1::FlowEndpoint { uid: socket.user, cgroup_id: socket.cgroup, ..v1::FlowEndpoint::default() }
}

fn end_of_queue_pair(pair: &QueuePair) -> v1::FlowEndpoint {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
    v1::FlowEndpoint {
        pid: pair.process,
        process_name: text(&pair.name),
        device: text(&pair.device),
        uid: pair.user,
        cgroup_id: pair.cgroup,
    }
}

fn owner_of(owner: &Owner) -> v1::FlowOwner {
    v1::FlowOwner {
        tenant: owner.tenant.to_string(),
        communicator: owner.communicator.0,
        epoch: owner.epoch.into(),
        participant: owner.from,
        peer: owner.to,
    }
}

fn direction(traffic: &Counted, trips: &RttStats, bits: u64, clock: Clock) -> v1::FlowDirection {
    let time = |time_ns| realtime_ns(Nanos(time_ns), clock.0);
    let measured = trips.count > 0;
    v1::FlowDirection {
        packets: traffic.packets,
        bytes: traffic.bytes,
        rate_bps: bits,
        first_ns: time(traffic.first_ns),
        last_ns: time(traffic.last_ns),
        burst_start_ns: time(traffic.burst_began_ns),
        burst_bytes: traffic.bytes.saturating_sub(traffic.burst_after),
        ecn_ce: traffic.ecn_ce,
        rtt_samples: trips.count,
        min_rtt_ns: if measured { trips.min_ns } else { 0 },
        last_rtt_ns: if measured { trips.last_ns } else { 0 },
        mean_rtt_ns: trips.sum_ns.checked_div(trips.count).unwrap_or(0),
        ..v1::FlowDirection::default()
    }
}

fn tcp_direction(counters: &TcpCounters, bits: u64, clock: Clock) -> v1::FlowDirection {
    v1::FlowDirection {
        retransmits: counters.retransmissions,
        cwr: counters.cwr.into(),
        ece: counters.ece,
        zero_windows: counters.zero_windows.into(),
        ..direction(&counters.traffic, &counters.rtt, bits, clock)
    }
}

fn roce_direction(counters: &RoceCounters, bits: u64, clock: Clock) -> v1::FlowDirection {
    v1::FlowDirection {
        retransmits: counters.retransmissions,
        gaps: counters.gaps,
        cnps: counters.notifications,
        sequence_naks: counters.sequence_naks,
        not_ready_naks: counters.not_ready_naks,
        fatal_naks: counters.fatal_naks,
        ..direction(&counters.traffic, &counters.rtt, bits, clock)
    }
}
