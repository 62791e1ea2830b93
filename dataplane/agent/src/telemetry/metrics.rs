//! Metrics for Prometheus: few series, however many flows and communicators there are.

use crate::counters::{Counters, METRICS};
use crate::telemetry::completions::CompletionDelays;
use crate::telemetry::pipeline::cause;
use crate::telemetry::rdma_ports::PortReading;
use crate::telemetry::reading::{LinkReading, Reading};
use crate::telemetry::series::{Series, SeriesTotals};
use harmonaize_abi::{CongestionCause, CongestionLevel};
use harmonaize_analysis::congestion::{Congestion, Path};
use harmonaize_events::{Direction, FlowKey, Totals};
use harmonaize_loader::{Dcqcn, PortCounter, QueuePairCounter, QueuePairCounters};
use harmonaize_metrics::{Family, Labels, Page, label};
use std::collections::{BTreeMap, HashSet};

/// What the agent tells of itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Own {
    /// Whether this host's traffic is measured.
    pub measures: bool,
    /// When the certificate ends that it shows control, in seconds since 1970.
    pub certificate_ends: Option<u64>,
}

/// A reading as metrics, in the text format of OpenMetrics.
pub(crate) fn text(reading: &Reading, counters: &Counters, own: Own) -> Result<String, std::fmt::Error> {
    let mut page = Page::default();
    page.build("agent", harmonaize_program::version());
    page.gauge("telemetry_active", "", "Whether this host's traffic is measured")
        .count(Vec::new(), own.measures.into());
    page.certificate(own.certificate_ends);
    links(&mut page, reading);
    signals(&mut page, reading);
    rdma_ports(&mut page, &reading.ports);
    queue_pairs(&mut page, reading);
    dcqcn(&mut page, &reading.dcqcn);
    completions(&mut page, &reading.completions);
    congestion(&mut page, reading);
    communicators(&mut page, reading);
    agent(&mut page, counters);
    telemetry(&mut page, reading);
    page.text()
}

fn one(name: &'static str, value: impl ToString) -> Labels {
    vec![(name, value.to_string())]
}

fn with(labels: &Labels, name: &'static str, value: &str) -> Labels {
    let mut labels = labels.clone();
    labels.push((name, value.to_owned()));
    labels
}

const BOTH: [(Direction, &str); 2] = [(Direction::Ingress, "ingress"), (Direction::Egress, "egress")];

fn links(page: &mut Page, reading: &Reading) {
    type Class = (&'static str, &'static str, &'static str, fn(&Totals) -> u64);
    let classes: [Class; 5] = [
        ("interface_packets", "", "Packets on the wire", |totals| totals.packets),
        ("interface", "bytes", "Their bytes, with the link's header", |totals| totals.bytes),
        ("interface_roce_packets", "", "Of the packets, those of RoCE v2", |totals| totals.roce),
        ("interface_malformed_packets", "", "Packets that contradict themselves", |totals| totals.malformed),
        ("interface_unplaced_packets", "", "Packets without a place in the table of flows", |totals| {
            totals.unplaced
        }),
    ];
    for (name, unit, help, of) in classes {
        let family = page.counter(name, unit, help);
        for (link, (direction, way)) in reading.links.iter().flat_map(|link| BOTH.map(|way| (link, way))) {
            let totals = match direction {
                Direction::Ingress => &link.totals.ingress,
                Direction::Egress => &link.totals.egress,
            };
            family.count(with(&interface(link), "direction", way), of(totals));
        }
    }
    let help = "What the link carries in each direction";
    let family = page.gauge("interface_capacity", "bytes_per_second", help);
    for (link, bits) in reading.links.iter().filter_map(|link| Some((link, link.measured.bits?))) {
        family.real(interface(link), bits as f64 / 8.0);
    }
}

fn interface(link: &LinkReading) -> Labels {
    one("interface", &link.measured.name)
}

/// Marks, retransmissions, notifications and round trips.
fn signals(page: &mut Page, reading: &Reading) {
    let of = |link: &LinkReading| reading.signals.get(&link.measured.index).cloned().unwrap_or_default();
    let signals: Vec<_> = reading.links.iter().map(|link| (interface(link), of(link))).collect();
    type Sign = (&'static str, &'static str, fn(&crate::telemetry::Counts) -> u64);
    let signs: [Sign; 3] = [
        ("interface_ecn_marked_packets", "Packets that a queue has marked", |counts| counts.ecn_marks),
        ("interface_retransmitted_packets", "Packets that were sent again, as seen here", |counts| {
            counts.retransmissions
        }),
        ("interface_cnp_packets", "Congestion notifications of RoCE", |counts| counts.notifications),
    ];
    for (name, help, of) in signs {
        let family = page.counter(name, "", help);
        for (labels, signals) in &signals {
            family.count(labels.clone(), of(&signals.counts));
        }
    }
    let family = page.histogram("interface_round_trip", "seconds", "Round trips of flows, as sampled");
    for (labels, signals) in &signals {
        family.buckets(labels.clone(), &signals.round_trips);
    }
}

/// What RDMA devices count themselves, those counters that each has.
fn rdma_ports(page: &mut Page, ports: &[PortReading]) {
    use PortCounter::*;
    if ports.is_empty() {
        return;
    }
    type Counted = (&'static str, &'static str, &'static str, &'static [(&'static str, PortCounter)]);
    let families: [Counted; 11] = [
        (
            "rdma_port_packets",
            "",
            "Packets of an RDMA port",
            &[("egress", SentPackets), ("ingress", ReceivedPackets)],
        ),
        ("rdma_port", "bytes", "Their bytes", &[("egress", SentBytes), ("ingress", ReceivedBytes)]),
        (
            "rdma_port_cnp_packets",
            "",
            "Congestion notifications: sent, and those that slowed a sender here down",
            &[("egress", NotificationsSent), ("ingress", NotificationsReceived)],
        ),
        ("rdma_port_ecn_marked_packets", "", "Packets that a queue has marked", &[("ingress", EcnMarked)]),
        ("rdma_port_out_of_sequence_packets", "", "Packets out of sequence", &[("ingress", OutOfSequence)]),
        (
            "rdma_port_duplicate_requests",
            "",
            "Requests that came once more",
            &[("ingress", DuplicateRequests)],
        ),
        ("rdma_port_sequence_naks", "", "NAKs for a gap in the sequence", &[("ingress", SequenceNaks)]),
        (
            "rdma_port_receiver_not_ready_naks",
            "",
            "NAKs of receivers that were not ready",
            &[("ingress", ReceiverNotReady)],
        ),
        ("rdma_port_timeouts", "", "Acknowledgements that did not come in time", &[("egress", Timeouts)]),
        ("rdma_port_retries", "", "Times that a sender here began anew", &[("egress", Retries)]),
        (
            "rdma_port_failures",
            "",
            "Queue pairs that failed after all retries",
            &[("egress", RetriesExceeded)],
        ),
    ];
    let labels =
        |one: &PortReading| vec![("device", one.port.device.clone()), ("port", one.port.number.to_string())];
    for (name, unit, help, counted) in families {
        let family = page.counter(name, unit, help);
        for (one, (direction, counter)) in
            ports.iter().flat_map(|one| counted.iter().map(move |of| (one, of)))
        {
            if let Some(value) = one.port.counters.get(*counter) {
                family.count(with(&labels(one), "direction", direction), value);
            }
        }
    }
    let help = "What congestion of an RDMA port is found by; always 1";
    let family = page.gauge("rdma_port_source", "", help);
    for one in ports {
        let labels = with(&labels(one), "interface", &one.port.interface);
        family.count(with(&labels, "source", &one.source.text()), 1);
    }
}

/// Bound counters that have series.
const BOUND: usize = 64;

/// What RDMA devices count by queue pair, where counters are bound.
fn queue_pairs(page: &mut Page, reading: &Reading) {
    use PortCounter::*;
    let devices = &reading.queue_pair_counters;
    if devices.is_empty() {
        return;
    }
    let help = "Whether a device's counters by queue pair are bound; always 1";
    let family = page.gauge("rdma_queue_pair_counters", "", help);
    for one in devices {
        let state = one.counters.as_ref().map_or_else(|reason| reason.label(), |_| "bound");
        family.count(with(&vec![("device", one.device.clone())], "state", state), 1);
    }
    let repeated = repeated_numbers(devices);
    let bound: Vec<(Labels, &QueuePairCounter)> = devices
        .iter()
        .flat_map(|one| one.counters.iter().flatten().map(move |counter| (&one.device, counter)))
        .take(BOUND)
        .map(|(device, counter)| {
            let (port, number) = (counter.port.to_string(), counter.number.to_string());
            let labels = vec![("device", device.clone()), ("port", port), ("counter", number)];
            (with(&labels, "peer", &peer(reading, &counter.queue_pairs, &repeated)), counter)
        })
        .collect();
    let families: [(&'static str, &'static str, PortCounter); 7] = [
        ("rdma_queue_pair_out_of_sequence_packets", "Packets out of sequence", OutOfSequence),
        ("rdma_queue_pair_duplicate_requests", "Requests that came once more", DuplicateRequests),
        ("rdma_queue_pair_sequence_naks", "NAKs for a gap in the sequence", SequenceNaks),
        (
            "rdma_queue_pair_receiver_not_ready_naks",
            "NAKs of receivers that were not ready",
            ReceiverNotReady,
        ),
        ("rdma_queue_pair_timeouts", "Acknowledgements that did not come in time", Timeouts),
        ("rdma_queue_pair_retries", "Times that a sender here began anew", Retries),
        ("rdma_queue_pair_failures", "Queue pairs that failed after all retries", RetriesExceeded),
    ];
    for (name, help, counter) in families {
        let family = page.counter(name, "", help);
        for (labels, one) in &bound {
            if let Some(value) = one.counters.get(counter) {
                family.count(labels.clone(), value);
            }
        }
    }
}

/// How devices slow down at notifications, where their drivers show it.
fn dcqcn(page: &mut Page, devices: &[Dcqcn]) {
    if devices.is_empty() {
        return;
    }
    let help = "A parameter of DCQCN, in the driver's unit";
    let family = page.gauge("rdma_dcqcn_parameter", "", help);
    for one in devices {
        for (name, value) in &one.parameters {
            family.count(with(&vec![("device", one.device.clone())], "parameter", name), *value);
        }
    }
}

/// Numbers of queue pairs that counters of more than one device are bound to: each device numbers its own.
fn repeated_numbers(devices: &[QueuePairCounters]) -> HashSet<u32> {
    let (mut seen, mut repeated) = (HashSet::new(), HashSet::new());
    for one in devices {
        let counters = one.counters.iter().flatten();
        let numbers: HashSet<u32> =
            counters.flat_map(|counter| counter.queue_pairs.iter().copied()).collect();
        repeated.extend(numbers.intersection(&seen));
        seen.extend(numbers);
    }
    repeated
}

/// The other end's address, where all of some queue pairs are own ones to there. Else it is empty, as where more than one device has
/// queue pairs of these numbers.
fn peer(reading: &Reading, queue_pairs: &[u32], repeated: &HashSet<u32>) -> String {
    let own = reading.owners.keys().filter(|key| key.direction == Direction::Ingress as u8);
    let own: Vec<_> = own.filter(|key| queue_pairs.contains(&key.queue_pair)).collect();
    let Some(first) = own.first() else { return String::new() };
    let known = |pair: &u32| !repeated.contains(pair) && own.iter().any(|key| key.queue_pair == *pair);
    // A device has an address of its own.
    let same = |key: &&FlowKey| (key.local, key.remote) == (first.local, first.remote);
    if queue_pairs.iter().all(known) && own.iter().all(same) {
        first.remote_address().to_string()
    } else {
        String::new()
    }
}

/// What the engine times itself.
fn completions(page: &mut Page, series: &[CompletionDelays]) {
    if series.is_empty() {
        return;
    }
    let help = "Time from handing a message to an RDMA device until the engine saw its completion";
    let family = page.histogram("rdma_completion", "seconds", help);
    for one in series {
        let labels = vec![("interface", label(&one.interface)), ("peer", one.peer.clone())];
        family.buckets(labels, &one.seconds);
    }
}

fn congestion(page: &mut Page, reading: &Reading) {
    let (mut levels, mut paths) = (Vec::new(), Vec::new());
    for (link, (direction, way)) in reading.links.iter().flat_map(|link| BOTH.map(|way| (link, way))) {
        let of = |found: &&Congestion| {
            found.link.interface == link.measured.index && found.link.direction == direction
        };
        let labels = with(&interface(link), "direction", way);
        for by in [CongestionCause::Unknown, CongestionCause::Own, CongestionCause::CrossTraffic] {
            let found = reading.congestion.iter().filter(of).filter(|found| found.cause == by);
            let level = |found: &Congestion| match found.level {
                CongestionLevel::None => 0,
                CongestionLevel::Mild => 1,
                CongestionLevel::Severe => 2,
            };
            let whole = found.clone().filter(|found| found.link.path == Path::Whole);
            let labels = with(&labels, "cause", cause(by));
            levels.push((labels.clone(), whole.map(level).max().unwrap_or(0)));
            let parts =
                found.filter(|found| found.link.path != Path::Whole && found.level > CongestionLevel::None);
            paths.push((labels, parts.count() as u64));
        }
    }
    let add = |family: &mut Family, series: Vec<(Labels, u64)>| {
        series.into_iter().for_each(|(labels, value)| {
            family.count(labels, value);
        });
    };
    let help = "How congested an interface is: 0 not, 1 mildly, 2 severely";
    add(page.gauge("link_congestion_level", "", help), levels);
    add(page.gauge("congested_paths", "", "Paths through an interface that are congested"), paths);
    let family =
        page.counter("congestion_events", "", "Times that an interface or a path was found congested");
    for ((cause, level), count) in &reading.events.congestion {
        family.count(vec![("cause", (*cause).to_owned()), ("level", (*level).to_owned())], *count);
    }
    page.gauge("stragglers", "", "Ranks that hold others up now")
        .count(Vec::new(), reading.stragglers.len() as u64);
    page.counter("straggler_events", "", "Times that a rank was found to hold others up")
        .count(Vec::new(), reading.events.stragglers);
}

/// Name, unit, help, and whether a series stands for it where it is 0.
const SUMS: [(&str, &str, &str, bool); 10] = [
    ("operations", "", "Operations that ended for all local ranks", true),
    ("operations_failed", "", "Of those, the ones that failed", true),
    ("tensor_sent", "bytes", "Tensor bytes handed to the transport", true),
    ("tensor_received", "bytes", "Tensor bytes that arrived", true),
    ("operations_compressed", "", "Operations that travelled in fewer bits", false),
    ("operations_uncompressed_chunks", "", "Of those, the ones of which chunks went uncompressed", false),
    ("tensor_saved", "bytes", "Tensor bytes that those sent less than uncompressed ones", false),
    ("operations_aggregated", "", "Operations that an aggregator was to sum", false),
    ("operations_fallback", "", "Of those, the ones of which hosts did some", false),
    ("aggregation_given_up", "", "Sessions with an aggregator that were given up here", false),
];

fn communicators(page: &mut Page, reading: &Reading) {
    let SeriesTotals { communicators, tenants } = reading.series.totals(reading.communicators.values());
    let labels = |tenant: &str, name: &str| vec![("tenant", label(tenant)), ("communicator", label(name))];
    let communicators: BTreeMap<Labels, _> =
        communicators.iter().map(|((tenant, name), sums)| (labels(tenant, name), sums)).collect();
    for (at, (name, unit, help, always)) in SUMS.into_iter().enumerate() {
        let family = page.counter(name, unit, help);
        for (labels, sums) in &communicators {
            let value = sums.get(at).copied().unwrap_or(0);
            if always || value > 0 {
                family.count(labels.clone(), value);
            }
        }
    }
    let help = "What the last compressed operation lost: the error's square over the tensor's (vNMSE)";
    let family = page.gauge("compression_error", "ratios", help);
    let living = reading.communicators.values();
    let errors: BTreeMap<Labels, f64> = living
        .filter(|traffic| traffic.coded > 0 && traffic.error.is_finite())
        .map(|traffic| (labels(&traffic.tenant, &traffic.name), traffic.error))
        .collect();
    for (labels, error) in errors.into_iter().take(crate::telemetry::series::COMMUNICATORS) {
        family.real(labels, error);
    }
    let help = "Time from an operation's first call here to its last end here, of those that ended well";
    let family = page.histogram("operation", "seconds", help);
    let tenants: BTreeMap<String, _> =
        tenants.iter().map(|(tenant, durations)| (label(tenant), durations)).collect();
    for (tenant, durations) in &tenants {
        for (size, buckets) in durations.classes() {
            family.buckets(vec![("tenant", tenant.clone()), ("size", size.to_owned())], buckets);
        }
    }
    busbw(page, &reading.series);
    page.gauge("communicators", "", "Communicators of this agent")
        .count(Vec::new(), reading.communicators.len() as u64);
}

fn busbw(page: &mut Page, series: &Series) {
    let help = "Bus bandwidth of operations that ended well, as nccl-tests have it";
    let family = page.histogram("operation_busbw", "bytes_per_second", help);
    for (collective, size, buckets) in series.busbw() {
        family
            .buckets(vec![("collective", collective.name().to_owned()), ("size", size.to_owned())], buckets);
    }
}

/// What the agent itself counts.
fn agent(page: &mut Page, counters: &Counters) {
    for (name, help, label, counted) in METRICS {
        let family = page.counter(name, "", help);
        for (value, counted) in counted {
            let labels = value.map(|value| (label, value.to_owned())).into_iter().collect();
            family.count(labels, counters.get(*counted));
        }
    }
}

fn telemetry(page: &mut Page, reading: &Reading) {
    let losses = reading.losses;
    let lost = [
        ("events", losses.events),
        ("flows", losses.flows),
        ("ambiguous", losses.ambiguous),
        ("marks", losses.marks),
        ("records", losses.records),
        ("gaps", losses.count),
        ("unregistered", losses.unregistered),
        ("endpoints", losses.ends),
    ];
    let family = page.counter("telemetry_lost", "", "What was lost on the way, by what");
    for (what, count) in lost {
        family.count(one("what", what), count);
    }
    page.gauge("flows", "", "Flows that were known when all were last read")
        .count(Vec::new(), reading.flow_count);
    page.counter("telemetry_thread_cpu", "seconds", "Processor time of the telemetry thread")
        .real(Vec::new(), reading.thread.as_secs_f64());
    let help = "Times from an event in the kernel until what follows from it was decided";
    page.histogram("event_decision", "seconds", help).buckets(Vec::new(), &reading.latencies.0);
    let programs = || reading.cost.iter().filter(|cost| cost.timed).flat_map(|cost| &cost.programs);
    let family = page.counter("program_runs", "", "Runs of a program in the kernel");
    programs().for_each(|program| {
        family.count(one("program", &program.name), program.runs);
    });
    let family = page.counter("program_cpu", "seconds", "Processor time of those runs");
    programs().for_each(|program| {
        family.real(one("program", &program.name), program.time.as_secs_f64());
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::Counted;
    use crate::telemetry::own_flows::{EpochLinks, OwnFlows};
    use crate::telemetry::series::{COMMUNICATORS, TENANT_COMMUNICATORS};
    use harmonaize_abi::{CommunicatorId, Epoch, Nanos, OperationId};
    use harmonaize_analysis::marks::{Operation, RankCall};
    use harmonaize_events::{Mark, MarkKind};
    use std::time::{Duration, Instant};

    fn formed(communicator: u64, tenant: u64) -> EpochLinks {
        EpochLinks {
            communicator: CommunicatorId(communicator),
            tenant: format!("tenant-{tenant}"),
            name: format!("job \"{communicator}\"\n"),
            ranks: vec![0],
            size: 2,
            epoch: Epoch(1),
            participant: 0,
            flows: Vec::new(),
        }
    }

    /// A communicator with this number comes, and runs a compressed operation that saves five bytes.
    fn come(own: &mut OwnFlows, communicator: u64, tenant: u64) {
        own.formed(&formed(communicator, tenant), Nanos(1), &[], &mut Vec::new());
        let (coded, error) = (MarkKind::Coded as u32, 0.25_f64.to_bits());
        own.mark(&Mark { communicator, kind: coded, bytes: 5, segment: error, ..Mark::default() });
        for (kind, segment) in [(MarkKind::Aggregated, 0), (MarkKind::Aggregated, 1), (MarkKind::GivenUp, 0)]
        {
            own.mark(&Mark { communicator, kind: kind as u32, segment, ..Mark::default() });
        }
        for bytes in [1 << 10, 1 << 20, 1 << 30] {
            own.operation(&operation(communicator, bytes));
        }
    }

    /// An AllReduce that took 2 ms.
    fn operation(communicator: u64, bytes: u64) -> Operation {
        let rank = RankCall {
            rank: 0,
            called: Some(Nanos(1_000_000)),
            ended: Some(Nanos(3_000_000)),
            failed: false,
            bytes,
            zero_input: None,
            zero_output: None,
        };
        Operation {
            communicator: CommunicatorId(communicator),
            operation: OperationId(0),
            participant: 0,
            collective: Some(harmonaize_abi::Collective::AllReduce.code().into()),
            epochs: (Epoch(1), Epoch(1)),
            began: Nanos(1_000_000),
            ended: Nanos(3_000_000),
            ranks: vec![rank],
            edges: Vec::new(),
            segments: 1,
            first_segment: None,
            coded: None,
            whole: true,
        }
    }

    fn reading(own: &OwnFlows) -> Reading {
        let (communicators, series) = (own.communicators().clone(), own.series());
        Reading { communicators, series, ..Reading::default() }
    }

    fn scrape(own: &OwnFlows) -> String {
        text(&reading(own), &Counters::default(), Own::default()).unwrap()
    }

    fn series(text: &str, name: &str) -> BTreeMap<String, u64> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(&format!("harmonaize_{name}{{")));
        lines
            .map(|line| line.rsplit_once(' ').unwrap())
            .map(|(l, v)| (l.into(), v.parse().unwrap()))
            .collect()
    }

    #[test]
    fn a_thousand_live_by_name_after_ten_thousand_have_passed() {
        let mut own = OwnFlows::default();
        (0..1_000).for_each(|number| come(&mut own, number, number % 200));
        for number in 1_000..11_000 {
            come(&mut own, number, number % 200);
            own.ended(CommunicatorId(number), Nanos(2), &[], &mut Vec::new());
        }
        let began = Instant::now();
        let text = scrape(&own);
        // Printed for the page of metrics; no time is asserted.
        println!("{} bytes in {:?}", text.len(), began.elapsed());
        assert!(text.len() < 2_000_000, "{}", text.len());
        let saved = series(&text, "tensor_saved_bytes_total");
        assert_eq!(saved.len(), COMMUNICATORS, "all that there is room for");
        for number in 0..1_000 {
            let label = format!("tenant=\"tenant-{}\",communicator=\"job__{number}__\"}}", number % 200);
            assert_eq!(saved.get(&label), Some(&5), "{label}");
        }
        assert!(!text.contains("\"other\""));
    }

    #[test]
    fn those_beyond_the_room_are_summed_up() {
        let mut own = OwnFlows::default();
        let all = COMMUNICATORS as u64 + 10;
        (0..all).for_each(|number| come(&mut own, number, number % 5));
        let text = scrape(&own);
        let other = "tenant=\"other\",communicator=\"other\"}";
        for (name, sum) in [
            ("operations_total", 30),
            ("operations_compressed_total", 10),
            ("tensor_saved_bytes_total", 50),
            ("operations_aggregated_total", 20),
            ("operations_fallback_total", 10),
            ("aggregation_given_up_total", 10),
        ] {
            assert_eq!(series(&text, name)[other], sum, "{name}");
        }
        // One that has no series of its own keeps to that, and what it came to stays.
        own.ended(CommunicatorId(0), Nanos(2), &[], &mut Vec::new());
        own.ended(CommunicatorId(all - 1), Nanos(2), &[], &mut Vec::new());
        assert_eq!(series(&scrape(&own), "tensor_saved_bytes_total")[other], 50);
    }

    #[test]
    fn one_tenant_has_its_share_of_series_alone() {
        let mut own = OwnFlows::default();
        (0..COMMUNICATORS as u64).for_each(|number| come(&mut own, number, 1));
        (5_000..5_500).for_each(|number| come(&mut own, number, number % 2 + 2));
        let saved = series(&scrape(&own), "tensor_saved_bytes_total");
        let of = |tenant: u32| {
            let label = format!("tenant=\"tenant-{tenant}\",");
            saved.keys().filter(|known| known.starts_with(&label)).count()
        };
        assert_eq!([of(1), of(2), of(3)], [TENANT_COMMUNICATORS, 250, 250]);
        let other = saved["tenant=\"other\",communicator=\"other\"}"];
        assert_eq!(other, 5 * (COMMUNICATORS - TENANT_COMMUNICATORS) as u64, "all others are summed up");
    }

    #[test]
    fn operations_are_counted_by_size() {
        let mut own = OwnFlows::default();
        come(&mut own, 7, 1);
        let text = scrape(&own);
        for line in [
            "operation_seconds_bucket{le=\"0.001\",tenant=\"tenant-1\",size=\"small\"} 0",
            "operation_seconds_bucket{le=\"0.003\",tenant=\"tenant-1\",size=\"small\"} 1",
            "operation_seconds_sum{tenant=\"tenant-1\",size=\"large\"} 0.002",
            // 1 MiB in 2 ms, and a factor of 1.
            "operation_busbw_bytes_per_second_sum{collective=\"allreduce\",size=\"medium\"} 524288000.0",
            "operation_busbw_bytes_per_second_bucket{le=\"1000000000.0\",collective=\"allreduce\",size=\"medium\"} 1",
            "compression_error_ratios{tenant=\"tenant-1\",communicator=\"job__7__\"} 0.25",
        ] {
            assert!(text.contains(&format!("harmonaize_{line}\n")), "{line} in {text}");
        }
    }

    #[test]
    fn what_the_agent_counts_is_shown_by_label() {
        let counters = Counters::default();
        counters.add(Counted::CommunicatorPanic);
        (0..3).for_each(|_| counters.add(Counted::CommandLate));
        counters.add(Counted::LogLine);
        let mut reading = Reading::default();
        [10_000, 60_000, 70_000, 1 << 40]
            .into_iter()
            .for_each(|lag| reading.latencies.note(Duration::from_nanos(lag)));
        let own = Own { measures: true, certificate_ends: Some(5) };
        let text = text(&reading, &counters, own).unwrap();
        for line in [
            "panics_total{scope=\"communicator\"} 1",
            "panics_total{scope=\"session\"} 0",
            "engine_commands_total{what=\"late\"} 3",
            "engine_commands_total{what=\"lost\"} 0",
            "quota_refusals_total{quota=\"joins\"} 0",
            "session_pauses_total 0",
            "log_lines_left_out_total 1",
            "telemetry_active 1",
            "certificate_expiry_timestamp_seconds 5",
            "event_decision_seconds_count 4",
            "event_decision_seconds_bucket{le=\"0.1\"} 3",
        ] {
            assert!(text.contains(&format!("harmonaize_{line}\n")), "{line} in {text}");
        }
    }

    #[test]
    fn rdma_ports_show_the_counters_that_they_have() {
        assert!(!scrape(&OwnFlows::default()).contains("rdma_port"), "there is no device");
        let counters = [(PortCounter::SentPackets, 5), (PortCounter::NotificationsReceived, 7)];
        let port = harmonaize_loader::RdmaPort {
            device: "mlx5_0".into(),
            number: 1,
            interface: "eth0".into(),
            counters: counters.into_iter().collect(),
        };
        let source = harmonaize_api::v1::TelemetrySource::RdmaCounters;
        let ports = vec![PortReading { port, source, ..PortReading::default() }];
        let reading = Reading { ports, ..Reading::default() };
        let text = text(&reading, &Counters::default(), Own::default()).unwrap();
        let shown: Vec<&str> = text.lines().filter(|line| line.starts_with("harmonaize_rdma_port")).collect();
        assert_eq!(
            shown,
            [
                "harmonaize_rdma_port_packets_total{device=\"mlx5_0\",port=\"1\",direction=\"egress\"} 5",
                "harmonaize_rdma_port_cnp_packets_total{device=\"mlx5_0\",port=\"1\",direction=\"ingress\"} 7",
                "harmonaize_rdma_port_source{device=\"mlx5_0\",port=\"1\",interface=\"eth0\",source=\"rdma_counters\"} 1",
            ]
        );
    }

    #[test]
    fn bound_counters_name_their_queue_pairs_peer() {
        assert!(!scrape(&OwnFlows::default()).contains("rdma_queue_pair"), "there is no device");
        let mut own = OwnFlows::default();
        let flow = |local_pair, host: u8| harmonaize_transport::Flow::Roce {
            local: [10, 0, 0, 1].into(),
            remote: [10, 0, 0, host].into(),
            local_pair,
            remote_pair: 99,
            source_port: 0,
        };
        let flows = vec![(1, flow(17, 2)), (1, flow(18, 2)), (2, flow(19, 3))];
        own.formed(&EpochLinks { flows, ..formed(1, 1) }, Nanos(1), &[], &mut Vec::new());
        let counter = |number, queue_pairs: &[u32]| QueuePairCounter {
            port: 1,
            number,
            queue_pairs: queue_pairs.to_vec(),
            counters: [(PortCounter::OutOfSequence, 5)].into_iter().collect(),
        };
        let bound = vec![counter(1, &[17, 18]), counter(2, &[18, 19]), counter(3, &[17, 4711])];
        let device =
            |device: &str, counters| harmonaize_loader::QueuePairCounters { device: device.into(), counters };
        let unsupported =
            harmonaize_loader::NotCounted::Unsupported { device: "rxe0".into(), driver: "a driver".into() };
        let reading = Reading {
            owners: std::sync::Arc::new(own.owners().clone()),
            queue_pair_counters: vec![device("mlx5_0", Ok(bound)), device("rxe0", Err(unsupported))],
            ..Reading::default()
        };
        let text = text(&reading, &Counters::default(), Own::default()).unwrap();
        let shown = text.lines().filter_map(|line| line.strip_prefix("harmonaize_rdma_queue_pair_"));
        let label = |number, peer| {
            format!(
                "out_of_sequence_packets_total{{device=\"mlx5_0\",port=\"1\",counter=\"{number}\",peer=\"{peer}\"}} 5"
            )
        };
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [
                "counters{device=\"mlx5_0\",state=\"bound\"} 1",
                "counters{device=\"rxe0\",state=\"unsupported\"} 1",
                &label(1, "10.0.0.2"),
                &label(2, ""),
                &label(3, ""),
            ]
        );
    }

    /// Two devices have queue pairs of the same numbers, whoever owns which.
    #[test]
    fn numbers_of_several_devices_name_no_other_end() {
        let peers = |flows: Vec<(u8, u32)>, bound: &[&[u32]]| {
            let mut own = OwnFlows::default();
            let flows = flows.into_iter().map(|(device, local_pair)| {
                let local = [10, 0, device, 1].into();
                let remote = [10, 0, 9, 9].into();
                let (remote_pair, source_port) = (99, 0);
                (1, harmonaize_transport::Flow::Roce { local, remote, local_pair, remote_pair, source_port })
            });
            own.formed(
                &EpochLinks { flows: flows.collect(), ..formed(1, 1) },
                Nanos(1),
                &[],
                &mut Vec::new(),
            );
            let device = |(at, pairs): (usize, &&[u32])| QueuePairCounters {
                device: format!("mlx5_{at}"),
                counters: Ok(vec![QueuePairCounter {
                    queue_pairs: pairs.to_vec(),
                    counters: [(PortCounter::Timeouts, 5)].into_iter().collect(),
                    ..QueuePairCounter::default()
                }]),
            };
            let reading = Reading {
                owners: std::sync::Arc::new(own.owners().clone()),
                queue_pair_counters: bound.iter().enumerate().map(device).collect(),
                ..Reading::default()
            };
            let text = text(&reading, &Counters::default(), Own::default()).unwrap();
            let lines =
                text.lines().filter(|line| line.starts_with("harmonaize_rdma_queue_pair_timeouts_total{"));
            lines.map(|line| line.contains("peer=\"10.0.9.9\"")).collect::<Vec<_>>()
        };
        assert_eq!(peers(vec![(0, 17), (0, 18)], &[&[17], &[19]]), [true, false]);
        // One is of another process.
        assert_eq!(peers(vec![(0, 17), (0, 18)], &[&[17], &[17, 18], &[18]]), [false, false, false]);
        // Both are own ones, and go to the same host.
        assert_eq!(peers(vec![(0, 17), (1, 17), (0, 18)], &[&[17]]), [false]);
        assert_eq!(peers(vec![(0, 17), (1, 17), (0, 18)], &[&[18]]), [true]);
    }

    #[test]
    fn parameters_of_dcqcn_are_shown_where_there_are_any() {
        assert!(!scrape(&OwnFlows::default()).contains("rdma_dcqcn"), "there is no device");
        let parameters = [("np_cnp_dscp".to_owned(), 48)].into_iter().collect();
        let dcqcn = vec![Dcqcn { device: "mlx5_0".into(), parameters }];
        let text =
            text(&Reading { dcqcn, ..Reading::default() }, &Counters::default(), Own::default()).unwrap();
        let line = "harmonaize_rdma_dcqcn_parameter{device=\"mlx5_0\",parameter=\"np_cnp_dscp\"} 48\n";
        assert!(text.contains(line), "{text}");
    }

    #[test]
    fn completions_are_shown_by_the_other_end() {
        assert!(!scrape(&OwnFlows::default()).contains("rdma_completion"), "there is no queue pair");
        static BOUNDS: [f64; 15] =
            [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
        let mut seconds = harmonaize_metrics::Buckets::new(&BOUNDS);
        [2e-5, 3e-4].into_iter().for_each(|took| seconds.observe(took));
        let one = CompletionDelays { interface: "eth0".into(), peer: "10.0.0.2".into(), seconds };
        let reading = Reading { completions: std::sync::Arc::new(vec![one]), ..Reading::default() };
        let text = text(&reading, &Counters::default(), Own::default()).unwrap();
        for line in [
            "bucket{le=\"0.0001\",interface=\"eth0\",peer=\"10.0.0.2\"} 1",
            "count{interface=\"eth0\",peer=\"10.0.0.2\"} 2",
        ] {
            assert!(
                text.contains(&format!("harmonaize_rdma_completion_seconds_{line}\n")),
                "{line} in {text}"
            );
        }
    }

    #[test]
    fn counters_never_fall() {
        let mut own = OwnFlows::default();
        let mut before = BTreeMap::new();
        for round in 0_u64..200 {
            come(&mut own, round % 120, 1);
            if round % 3 > 0 {
                own.ended(CommunicatorId(round * 7 % 120), Nanos(2), &[], &mut Vec::new());
            }
            let now = series(&scrape(&own), "tensor_saved_bytes_total");
            for (label, value) in &before {
                assert!(now.get(label) >= Some(value), "round {round}: {label} {value}: {now:?}");
            }
            assert_eq!(now.values().sum::<u64>(), (round + 1) * 5);
            before = now;
        }
    }
}
