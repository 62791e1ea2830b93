//! Findings in the words of the provider's interface. Times become CLOCK_REALTIME, rates bits in a second.

use crate::telemetry::clock::realtime_ns;
use crate::telemetry::cpu_budget::nanoseconds;
use crate::telemetry::finding::{Finding, Found, LocatedStraggler};
use crate::telemetry::names::Names;
use harmonaize_abi::Nanos;
use harmonaize_analysis::congestion::{Congestion, Path};
use harmonaize_analysis::marks::{Coded, Edge, Operation};
use harmonaize_analysis::phases::Phase;
use harmonaize_analysis::straggler::{Kind, Subject};
use harmonaize_api::v1;
use harmonaize_events::{Direction, FlowKey};
use std::net::{IpAddr, Ipv6Addr};

/// An address of a flow's key.
pub(crate) fn address(words: [u32; 4]) -> IpAddr {
    Ipv6Addr::from(FlowKey::octets(words)).to_canonical()
}

/// From the programs' clock to that for people.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(pub(crate) i64);

impl Clock {
    fn at(self, time: Nanos) -> u64 {
        realtime_ns(time, self.0)
    }

    fn at_all(self, time: Option<Nanos>) -> u64 {
        time.map_or(0, |time| self.at(time))
    }
}

pub(crate) fn operation(operation: &Operation, clock: Clock) -> v1::Operation {
    let ranks = operation.ranks.iter().map(|rank| v1::RankTiming {
        rank: rank.rank,
        called_ns: clock.at_all(rank.called),
        ended_ns: clock.at_all(rank.ended),
        failed: rank.failed,
        zero_input: rank.zero_input,
        zero_output: rank.zero_output,
    });
    let edge = |edge: &Edge| v1::Edge {
        peer: edge.peer,
        sent_bytes: edge.sent.bytes,
        first_sent_ns: clock.at(edge.sent.first),
        last_sent_ns: clock.at(edge.sent.last),
        received_bytes: edge.received.bytes,
        first_received_ns: clock.at(edge.received.first),
        last_received_ns: clock.at(edge.received.last),
    };
    v1::Operation {
        communicator: operation.communicator.0,
        operation: operation.operation.0,
        bytes: operation.ranks.iter().map(|rank| rank.bytes).max().unwrap_or(0),
        ranks: ranks.collect(),
        edges: operation.edges.iter().map(edge).collect(),
        participant: operation.participant,
        collective: operation.collective,
        first_epoch: operation.epochs.0.into(),
        last_epoch: operation.epochs.1.into(),
        segments: operation.segments,
        first_segment_ns: clock.at_all(operation.first_segment),
        compression: operation.coded.map(|Coded { error, saved_bytes, refused }| v1::CompressedOperation {
            error,
            saved_bytes,
            uncompressed_chunks: refused,
        }),
        complete: operation.whole,
    }
}

pub(crate) fn phase(phase: &Phase, clock: Clock) -> v1::TrafficPhase {
    v1::TrafficPhase {
        job: phase.job.to_string(),
        iteration: phase.iteration,
        start_ns: clock.at(phase.began),
        end_ns: clock.at(phase.ended),
        bytes: phase.bytes,
        ring_steps: phase.ring.map_or(0, |ring| ring.steps),
        delayed_host: phase.late.map_or_else(String::new, |late| address(late.host).to_string()),
        delay_ns: phase.late.map_or(0, |late| nanoseconds(late.by)),
        ring_hosts: phase.ring.map_or(0, |ring| ring.hosts),
        ring_step_bytes: phase.ring.map_or(0, |ring| ring.bytes),
        period_ns: nanoseconds(phase.period),
        lossy: phase.lossy,
    }
}

pub(crate) fn congestion(found: &Congestion, names: &Names, clock: Clock) -> v1::Congestion {
    let path = match found.link.path {
        Path::Whole => String::new(),
        Path::Remote { address: remote, port: 0 } => address(remote).to_string(),
        Path::Remote { address: remote, port } => format!("{} from port {port}", address(remote)),
        Path::Connection { address: other, local, remote } => {
            format!("{} port {remote} from port {local}", address(other))
        }
        Path::Rdma => "RDMA".to_owned(),
        Path::QueuePair { address: other, number } => format!("{} queue pair {number}", address(other)),
    };
    let source = match found.link.path {
        Path::Rdma => v1::TelemetrySource::RdmaCounters,
        Path::QueuePair { .. } => v1::TelemetrySource::Engine,
        Path::Whole | Path::Remote { .. } | Path::Connection { .. } => v1::TelemetrySource::KernelPrograms,
    };
    let (level, cause): (v1::CongestionLevel, v1::CongestionCause) = (found.level.into(), found.cause.into());
    v1::Congestion {
        interface: names.get(found.link.interface),
        path,
        level: level.into(),
        cause: cause.into(),
        since_ns: clock.at(found.since),
        ecn_ce_ppm: found.ecn_ce_ppm,
        lost_ppm: found.lost_ppm,
        rtt_ns: nanoseconds(found.rtt),
        min_rtt_ns: nanoseconds(found.min_rtt),
        utilization_ppm: found.used_ppm,
        ingress: found.link.direction == Direction::Ingress,
        found_ns: clock.at(found.found),
        delay: found.signals.delay,
        ecn_ce: found.signals.ecn_ce,
        loss: found.signals.loss,
        load: found.signals.load,
        starved: found.signals.starved,
        own_bps: found.own_rate.saturating_mul(8),
        cross_traffic_bps: found.cross_traffic_rate.saturating_mul(8),
        capacity_bps: found.capacity.saturating_mul(8),
        source: source.into(),
    }
}

pub(crate) fn straggler(late: &LocatedStraggler, clock: Clock) -> v1::Straggler {
    let found = &late.straggler;
    let (communicator, job, source) = match found.subject {
        Subject::Communicator(id) => (id.0, String::new(), v1::TelemetrySource::Engine),
        Subject::Job(job) => (0, job.to_string(), v1::TelemetrySource::KernelPrograms),
    };
    let kind = match found.kind {
        Kind::Compute => v1::StragglerCause::Compute,
        Kind::Network => v1::StragglerCause::Network,
    };
    v1::Straggler {
        communicator,
        job,
        rank: found.rank,
        host: late.host.map_or_else(String::new, |host| address(host).to_string()),
        cause: kind.into(),
        since_ns: clock.at(found.since),
        delay_ns: nanoseconds(found.by),
        iterations: found.units,
        ended_ns: clock.at_all(found.ended),
        edge_from: found.edge.map(|edge| edge.0),
        edge_to: found.edge.map(|edge| edge.1),
        found_ns: clock.at(found.found),
        since_unit: found.since_unit,
        source: source.into(),
    }
}

pub(crate) fn finding(finding: &Finding, names: &Names) -> v1::Finding {
    use v1::finding::Finding as Told;
    let clock = Clock(finding.offset_ns);
    let told = match &finding.found {
        Found::Operation(found) => Told::Operation(operation(found, clock)),
        Found::Phase(found) => Told::Phase(phase(found, clock)),
        Found::Congestion(found) => Told::Congestion(congestion(found, names, clock)),
        Found::Straggler(found) => Told::Straggler(straggler(found, clock)),
    };
    v1::Finding { time_ns: clock.at(finding.time), finding: Some(told) }
}
