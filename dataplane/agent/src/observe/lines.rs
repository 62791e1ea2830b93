//! For programs: a JSON object a line. Its `kind` says what it is; times are CLOCK_REALTIME in nanoseconds, 0 where unknown.

use super::Printer;
use super::text::address;
use crate::telemetry::{Finding, Found, LocatedStraggler, Names, Reading, realtime_ns};
use harmonaize_analysis::congestion::{Congestion, Path};
use harmonaize_analysis::marks::{Moved, Operation};
use harmonaize_analysis::phases::Phase;
use harmonaize_analysis::straggler::{Kind, Subject};
use harmonaize_events::{Direction, Totals};
use harmonaize_loader::ProgramCost;
use serde_json::{Value, json};

pub(super) struct Lines;

impl Printer for Lines {
    fn finding(&mut self, finding: &Finding, names: &Names) -> String {
        let time = |time_ns: u64| realtime_ns(time_ns, finding.offset_ns);
        let (kind, mut object) = match &finding.found {
            Found::Operation(operation) => ("operation", of_operation(operation, &time)),
            Found::Phase(phase) => ("phase", of_phase(phase, &time)),
            Found::Congestion(congestion) => ("congestion", of_congestion(congestion, names, &time)),
            Found::Straggler(late) => ("straggler", of_straggler(late, &time)),
        };
        if let Some(object) = object.as_object_mut() {
            object.insert("kind".into(), kind.into());
            object.insert("time_ns".into(), time(finding.time_ns).into());
        }
        line(&object)
    }

    fn status(&mut self, before: &Reading, now: &Reading) -> String {
        let time = |time_ns: u64| realtime_ns(time_ns, now.offset_ns);
        let interval_ns = now.time_ns.saturating_sub(before.time_ns);
        let links = now.links.iter().map(|link| {
            let then = before.links.iter().find(|one| one.measured.index == link.measured.index);
            let way = |of: fn(&crate::telemetry::LinkReading) -> &Totals| {
                let totals = of(link);
                let passed = totals.bytes.saturating_sub(then.map_or(0, |then| of(then).bytes));
                let bits = u128::from(passed) * 8_000_000_000 / u128::from(interval_ns.max(1));
                json!({
                    "packets": totals.packets, "bytes": totals.bytes,
                    "bits": u64::try_from(bits).unwrap_or(u64::MAX), "tcp_packets": totals.tcp,
                    "roce_packets": totals.roce, "other_packets": totals.other,
                    "fragments": totals.fragments, "malformed": totals.malformed, "unplaced": totals.unplaced,
                })
            };
            json!({
                "interface": link.measured.name, "index": link.measured.index,
                "capacity_bits": link.measured.bits,
                "ingress": way(|one| &one.totals.ingress), "egress": way(|one| &one.totals.egress),
            })
        });
        let gaps = now.losses;
        let thread = now.thread.saturating_sub(before.thread).as_nanos() as u64;
        let timed = now.cost.as_ref().filter(|cost| cost.timed);
        let cost = timed.map(|cost| {
            let one = |one: &ProgramCost| {
                let time_ns = u64::try_from(one.time.as_nanos()).unwrap_or(u64::MAX);
                json!({"program": one.name, "runs": one.runs, "time_ns": time_ns})
            };
            cost.programs.iter().map(one).collect::<Vec<_>>()
        });
        line(&json!({
            "kind": "standing", "time_ns": time(now.time_ns), "interval_ns": interval_ns,
            "links": links.collect::<Vec<_>>(), "flows": now.flow_count,
            "lost": {
                "events": gaps.events, "flows": gaps.flows, "ambiguous": gaps.ambiguous,
                "records": gaps.records, "gaps": gaps.count, "unlisted": gaps.unregistered, "ends": gaps.ends,
            },
            "thread_ns": thread, "cost": cost, "missing": now.missing,
        }))
    }

    fn missed(&mut self, count: u64) -> String {
        line(&json!({"kind": "missed", "findings": count}))
    }
}

fn line(object: &Value) -> String {
    format!("{object}\n")
}

fn of_operation(operation: &Operation, time: &dyn Fn(u64) -> u64) -> Value {
    let optional = |time_ns: Option<u64>| time_ns.map_or(0, time);
    let ranks = operation.ranks.iter().map(|rank| {
        json!({
            "rank": rank.rank, "called_ns": optional(rank.called_ns), "ended_ns": optional(rank.ended_ns),
            "failed": rank.failed, "bytes": rank.bytes,
        })
    });
    let moved = |moved: &Moved| {
        json!({
            "messages": moved.count, "bytes": moved.bytes,
            "first_ns": time(moved.first_ns), "last_ns": time(moved.last_ns),
        })
    };
    let edges = operation
        .edges
        .iter()
        .map(|edge| json!({"peer": edge.peer, "sent": moved(&edge.sent), "received": moved(&edge.received)}));
    json!({
        "communicator": format!("{:016x}", operation.communicator), "operation": operation.operation,
        "participant": operation.participant, "began_ns": time(operation.began_ns),
        "ended_ns": time(operation.ended_ns), "segments": operation.segments, "whole": operation.whole,
        "ranks": ranks.collect::<Vec<_>>(), "edges": edges.collect::<Vec<_>>(),
    })
}

fn of_phase(phase: &Phase, time: &dyn Fn(u64) -> u64) -> Value {
    let ring = phase.ring.map(|ring| json!({"hosts": ring.hosts, "steps": ring.steps, "bytes": ring.bytes}));
    let late = phase.late.map(|late| json!({"host": address(late.host).to_string(), "delay_ns": late.by_ns}));
    json!({
        "job": phase.job, "iteration": phase.iteration, "began_ns": time(phase.began_ns),
        "ended_ns": time(phase.ended_ns), "bytes": phase.bytes, "period_ns": phase.period_ns,
        "ring": ring, "late": late, "lossy": phase.lossy,
    })
}

fn of_congestion(congestion: &Congestion, names: &Names, time: &dyn Fn(u64) -> u64) -> Value {
    let path = match congestion.link.path {
        Path::Whole => Value::Null,
        Path::Remote { address: remote, port } => {
            json!({"address": address(remote).to_string(), "source_port": port})
        }
        Path::Connection { address: other, local, remote } => {
            json!({"address": address(other).to_string(), "source_port": local, "destination_port": remote})
        }
    };
    let egress = congestion.link.direction == Direction::Egress;
    json!({
        "interface": names.get(congestion.link.interface), "direction": if egress { "egress" } else { "ingress" },
        "path": path, "state": congestion.level.as_str(), "cause": congestion.cause.as_str(),
        "since_ns": time(congestion.since_ns),
        "found_ns": time(congestion.found_ns), "own_bits": congestion.own_rate.saturating_mul(8),
        "other_bits": congestion.cross_traffic_rate.saturating_mul(8),
        "capacity_bits": congestion.capacity.saturating_mul(8), "round_trip_ns": congestion.rtt_ns,
        "rest_ns": congestion.min_rtt_ns, "marked_ppm": congestion.ecn_ce_ppm, "lost_ppm": congestion.lost_ppm,
        "used_ppm": congestion.used_ppm,
    })
}

fn of_straggler(late: &LocatedStraggler, time: &dyn Fn(u64) -> u64) -> Value {
    let straggler = &late.straggler;
    let (communicator, job) = match straggler.subject {
        Subject::Communicator(id) => (Some(format!("{id:016x}")), None),
        Subject::Job(job) => (None, Some(job)),
    };
    json!({
        "communicator": communicator, "job": job, "rank": straggler.rank,
        "host": late.host.map(|host| address(host).to_string()),
        "why": match straggler.kind { Kind::Compute => "compute", Kind::Network => "network" },
        "edge": straggler.edge, "since": straggler.since_unit, "since_ns": time(straggler.since_ns),
        "found_ns": time(straggler.found_ns), "delay_ns": straggler.by_ns, "iterations": straggler.units,
        "ended_ns": straggler.ended_ns.map(time),
    })
}
