//! `harmonaize phases`: what an agent found, as lines of text or of JSON.

use crate::Failure;
use crate::agent::{Agent, Socket};
use crate::describe::{cause_text, congestion_text, level_text, straggler_sentence, straggler_text};
use crate::text::{bytes, clean, clock, duration, ranks};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{
    CompressedOperation, Congestion, Edge, Finding, Operation, RankTiming, Straggler, TrafficPhase, finding,
};
use serde_json::{Value, json};
use std::io::Write;

/// Examples, and what the fields of the JSON mean.
pub(crate) const FIELDS: &str = "\
Examples:
  harmonaize phases --agent unix:/run/harmonaize/telemetry.sock --last 20
  harmonaize phases --json --follow | jq 'select(.kind == \"straggler\")'

JSON: an object a line, oldest first, with `time_ns` (when it was found) and `kind`. Times are
CLOCK_REALTIME nanoseconds, 0 where not known (jq before 1.7 rounds them); durations nanoseconds.
  \"operation\"   an own operation ended here: communicator, operation, participant, bytes (of a rank's
                tensor), segments, first_segment_ns, first_epoch, last_epoch, whole (no mark was lost),
                ranks [{rank, called_ns, ended_ns, failed}] of this agent,
                coded {error (vNMSE), saved_bytes, refused} or null (it was exact), and
                edges [{peer, sent_bytes, first_sent_ns, last_sent_ns, received_bytes,
                first_received_ns, last_received_ns}] to the other participants
  \"phase\"       a foreign job communicated: job, iteration, began_ns, ended_ns, bytes, period_ns,
                ring {hosts, steps, step_bytes} or null, late {host, by_ns} or null, lossy
  \"congestion\"  a link's state changed: interface, direction (egress, ingress), path (null: the link as
                a whole), level (none, mild, severe), cause (own, foreign, null), since_ns, signals
                [delay, marks, loss, load, starved], marked_ppm, lost_ppm, used_ppm, round_trip_ns, rest_ns,
                own_bits, other_bits, capacity_bits
  \"straggler\"   a verdict on a rank: communicator or job, rank, host, why (compute, network), since_ns,
                since_unit (operation or iteration), by_ns, iterations, edge [from, to] or null,
                ended_ns (0: it holds)
  \"lost\"        count: so many findings were not told";

/// Runs the command.
pub(crate) async fn run(socket: &Socket, last: u32, follow: bool, json: bool) -> Result<String, Failure> {
    let mut agent = Agent::connect(socket).await?;
    let mut stream = agent.phases(last, follow).await?;
    let mut out = std::io::stdout();
    while let Some(found) = stream.message().await.map_err(|status| agent.failure(&status))? {
        let line = if json { format!("{}\n", finding_json(&found)) } else { finding_text(&found) };
        // A reader that has seen enough, such as `head`, is no failure.
        if out.write_all(line.as_bytes()).and_then(|()| out.flush()).is_err() {
            break;
        }
    }
    Ok(String::new())
}

/// A finding as a line.
fn finding_text(found: &Finding) -> String {
    let what = match &found.finding {
        None => "something that this build does not know".to_owned(),
        Some(finding::Finding::Lost(count)) => format!("{count} findings were not told"),
        Some(finding::Finding::Congestion(one)) => congestion_text(one),
        Some(finding::Finding::Straggler(one)) => straggler_sentence(one),
        Some(finding::Finding::Phase(one)) => {
            let lasted = duration(one.end_ns.saturating_sub(one.start_ns));
            let late = match one.delayed_host.as_str() {
                "" => String::new(),
                host => format!(", {} late by {}", clean(host), duration(one.delay_ns)),
            };
            let (job, moved) = (clean(&one.job), bytes(one.bytes));
            format!("job {job}: iteration {}, {lasted}, {moved}{late}", one.iteration)
        }
        Some(finding::Finding::Operation(one)) => operation_text(one),
    };
    format!("{}  {what}\n", clock(found.time_ns))
}

fn operation_text(one: &Operation) -> String {
    let began = one.ranks.iter().map(|rank| rank.called_ns).filter(|called| *called > 0).min();
    let ended = one.ranks.iter().map(|rank| rank.ended_ns).max().unwrap_or(0);
    let lasted = began.map_or_else(|| "-".to_owned(), |began| duration(ended.saturating_sub(began)));
    let own: Vec<u32> = one.ranks.iter().map(|rank| rank.rank).collect();
    let failed = if one.ranks.iter().any(|rank| rank.failed) { ", failed" } else { "" };
    let (id, own, size) = (communicator_text(one.communicator), ranks(&own), bytes(one.bytes));
    format!("{id}: operation {}, {lasted}, {size}, ranks {own}{failed}", one.operation)
}

/// A finding as JSON.
fn finding_json(found: &Finding) -> Value {
    let (kind, value) = match &found.finding {
        None => ("unknown", json!({})),
        Some(finding::Finding::Lost(count)) => ("lost", json!({ "count": count })),
        Some(finding::Finding::Operation(one)) => ("operation", operation_json(one)),
        Some(finding::Finding::Phase(one)) => ("phase", phase_json(one)),
        Some(finding::Finding::Congestion(one)) => ("congestion", congestion_json(one)),
        Some(finding::Finding::Straggler(one)) => ("straggler", straggler_json(one)),
    };
    let mut object = json!({"time_ns": found.time_ns, "kind": kind});
    if let (Some(object), Value::Object(fields)) = (object.as_object_mut(), value) {
        object.extend(fields);
    }
    object
}

fn operation_json(one: &Operation) -> Value {
    let rank = |rank: &RankTiming| {
        json!({
            "rank": rank.rank,
            "called_ns": rank.called_ns,
            "ended_ns": rank.ended_ns,
            "failed": rank.failed,
        })
    };
    let edge = |edge: &Edge| {
        json!({
            "peer": edge.peer,
            "sent_bytes": edge.sent_bytes,
            "first_sent_ns": edge.first_sent_ns,
            "last_sent_ns": edge.last_sent_ns,
            "received_bytes": edge.received_bytes,
            "first_received_ns": edge.first_received_ns,
            "last_received_ns": edge.last_received_ns,
        })
    };
    json!({
        "communicator": communicator_text(one.communicator),
        "operation": one.operation,
        "participant": one.participant,
        "bytes": one.bytes,
        "segments": one.segments,
        "first_segment_ns": one.first_segment_ns,
        "first_epoch": one.first_epoch,
        "last_epoch": one.last_epoch,
        "whole": one.complete,
        "coded": one.compression.as_ref().map(coded_json),
        "ranks": one.ranks.iter().map(rank).collect::<Vec<_>>(),
        "edges": one.edges.iter().map(edge).collect::<Vec<_>>(),
    })
}

fn coded_json(one: &CompressedOperation) -> Value {
    json!({"error": one.error, "saved_bytes": one.saved_bytes, "refused": one.uncompressed_chunks})
}

fn phase_json(one: &TrafficPhase) -> Value {
    let ring = json!({"hosts": one.ring_hosts, "steps": one.ring_steps, "step_bytes": one.ring_step_bytes});
    let late = json!({"host": one.delayed_host, "by_ns": one.delay_ns});
    json!({
        "job": one.job,
        "iteration": one.iteration,
        "began_ns": one.start_ns,
        "ended_ns": one.end_ns,
        "bytes": one.bytes,
        "period_ns": one.period_ns,
        "ring": (one.ring_hosts > 0).then_some(ring),
        "late": (!one.delayed_host.is_empty()).then_some(late),
        "lossy": one.lossy,
    })
}

fn congestion_json(one: &Congestion) -> Value {
    let signals = [
        ("delay", one.delay),
        ("marks", one.ecn_ce),
        ("loss", one.loss),
        ("load", one.load),
        ("starved", one.starved),
    ];
    let signals: Vec<&str> = signals.iter().filter(|(_, set)| *set).map(|(name, _)| *name).collect();
    let cause = cause_text(one.cause());
    json!({
        "interface": one.interface,
        "direction": if one.ingress { "ingress" } else { "egress" },
        "path": (!one.path.is_empty()).then_some(&one.path),
        "level": level_text(one.level()),
        "cause": (cause != "-").then_some(cause),
        "since_ns": one.since_ns,
        "signals": signals,
        "marked_ppm": one.ecn_ce_ppm,
        "lost_ppm": one.lost_ppm,
        "used_ppm": one.utilization_ppm,
        "round_trip_ns": one.rtt_ns,
        "rest_ns": one.min_rtt_ns,
        "own_bits": one.own_bps,
        "other_bits": one.cross_traffic_bps,
        "capacity_bits": one.capacity_bps,
    })
}

fn straggler_json(one: &Straggler) -> Value {
    let own = one.job.is_empty();
    json!({
        "communicator": own.then(|| communicator_text(one.communicator)),
        "job": (!own).then_some(&one.job),
        "rank": one.rank,
        "host": one.host,
        "why": straggler_text(one.kind()),
        "since_ns": one.since_ns,
        "since_unit": one.since_unit,
        "by_ns": one.delay_ns,
        "iterations": one.iterations,
        "edge": one.edge_from.zip(one.edge_to).map(|(from, to)| [from, to]),
        "ended_ns": one.ended_ns,
    })
}
