//! Findings as lines of text, and what their fields mean.

use crate::describe::{congestion_text, straggler_sentence};
use crate::text::{bytes, clean, clock, duration, number_of, ranks};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{Finding, Operation, finding};

/// Examples, and what the fields of the JSON mean.
pub(crate) const FIELDS: &str = "\
Examples:
  harmonaize phases --last 20                 of all hosts, through control
  harmonaize phases --cause cross_traffic --since 10min --follow
  harmonaize phases --agent unix:/run/harmonaize/telemetry.sock --last 20
  harmonaize phases --json --follow | jq 'select(.kind == \"straggler\")'

JSON: an object a line, oldest first, by the schema that `schema` names (docs/rows.schema.json), with `host`
(empty from an agent itself), `time_ns` (when it was found) and `kind`. Times are
CLOCK_REALTIME nanoseconds, 0 where not known (jq before 1.7 rounds them); durations nanoseconds.
  \"operation\"   an own operation ended here: communicator, operation, participant, bytes (of a rank's
                tensor), collective (its code), segments, first_segment_ns, first_epoch, last_epoch,
                complete (no mark was lost), compression {error (vNMSE), saved_bytes,
                uncompressed_chunks} or null, ranks [{rank, called_ns, ended_ns, failed, zero_input,
                zero_output}] of this agent, and edges [{peer, sent_bytes, first_sent_ns, last_sent_ns,
                received_bytes, first_received_ns, last_received_ns}] to the other participants
  \"phase\"       an external job communicated: job, iteration, start_ns, end_ns, bytes, period_ns,
                ring_hosts, ring_steps, ring_step_bytes (0: no ring), delayed_host (empty: none),
                delay_ns, lossy
  \"congestion\"  a link's state changed: interface, ingress (else egress), path (empty: the link as a
                whole), level (none, mild, severe), cause (own, cross_traffic, unknown), since_ns,
                found_ns, what spoke for it (delay, ecn_ce, loss, load, starved), ecn_ce_ppm, lost_ppm,
                utilization_ppm, rtt_ns, min_rtt_ns, own_bps, cross_traffic_bps, capacity_bps,
                what it was seen by in `source` (kernel_programs, rdma_counters)
  \"straggler\"   a rank is late: communicator (0: external) or job, rank, host, why in `cause` (compute,
                network), since_ns, found_ns, since_unit (operation or iteration), delay_ns,
                iterations, edge_from and edge_to or null, ended_ns (0: it holds), source
                (engine, kernel_programs)
  \"lost\"        count: findings that the reader was too slow for
  \"host\"        failure, omitted: rows of this host are missing, and why";

/// A finding as a line; its host stands before it where there are several.
pub(crate) fn finding_text(host: &str, found: &Finding) -> String {
    let what = match &found.finding {
        None => "something that this build does not know".to_owned(),
        Some(finding::Finding::Lost(lost)) => number_of(lost.count, "finding was lost", "findings were lost"),
        Some(finding::Finding::Congestion(one)) => congestion_text(one),
        Some(finding::Finding::Straggler(one)) => {
            straggler_sentence(one, &communicator_text(one.communicator))
        }
        Some(finding::Finding::Phase(one)) => {
            let lasted = duration(one.end_ns.saturating_sub(one.start_ns));
            let late = match one.delayed_host.as_str() {
                "" => String::new(),
                host => format!(", {} delayed by {}", clean(host), duration(one.delay_ns)),
            };
            let (job, moved) = (clean(&one.job), bytes(one.bytes));
            format!("job {job}: iteration {}, {lasted}, {moved}{late}", one.iteration)
        }
        Some(finding::Finding::Operation(one)) => operation_text(one),
    };
    let host = if host.is_empty() { String::new() } else { format!("{}  ", clean(host)) };
    format!("{}  {host}{what}\n", clock(found.time_ns))
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
