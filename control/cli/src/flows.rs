//! `harmonaize flows`: every flow of a host, as a table or as JSON.

use crate::Failure;
use crate::agent::{Agent, Socket};
use crate::describe::protocol_text;
use crate::table::{row, table};
use crate::text::{bytes, clean, duration};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{Flow, FlowDirection, FlowEndpoint, FlowOwner, FlowProtocol, TcpInfo};
use serde_json::{Value, json};

/// Examples, and what the fields of the JSON mean.
pub(crate) const FIELDS: &str = "\
Examples:
  harmonaize flows --agent unix:/run/harmonaize/telemetry.sock --interface eth0
  harmonaize flows --json | jq '.flows | sort_by(-.egress.bytes)[:10]'

JSON: {\"time_ns\", \"flows\": [...]}. Times are CLOCK_REALTIME nanoseconds, 0 where not known (some tools
round integers of this size: jq before 1.7 does); durations nanoseconds; bytes and packets those on the
wire with the link's header, since the programs were loaded; rates bits a second. Of each flow:
  interface            the interface that saw it
  protocol             \"tcp\": a connection; \"roce\": what goes to one queue pair of RoCE v2
  local, local_port    the end on this side; the port is 0 for RoCE
  remote, remote_port  the other end
  queue_pair           RoCE: the destination queue pair; else 0
  source_port          RoCE: the UDP port that chooses the path; else 0
  owner                null, or {tenant, communicator, epoch, participant, peer}: own traffic
  job                  null, or the foreign job that it was counted to
  egress, ingress      what leaves, what comes in; null for the other direction of RoCE:
    packets, bytes, bits
    first_ns, last_ns          the first and last packet
    burst_began_ns, burst_bytes  the running burst: no gap as long as the idle gap
    marked                     packets that a queue marked (ECN CE)
    retransmissions            packets sent again as seen from here (RoCE: repeated sequence numbers)
    gaps                       RoCE: sequence numbers missing
    round_trips                {count, least_ns, last_ns, mean_ns}, or null: none was measured
    slowed, echoed, zero_windows                       TCP: CWR, ECE, windows of zero
    notifications, sequence_naks, not_ready_naks, fatal_naks  RoCE: CNP, NAKs
  kernel               null, or what the kernel's socket says: smoothed_ns, variation_ns, window,
                       retransmissions, unacknowledged, delivery_bits
  end                  null, or whose this side's end is: process, name, device (RoCE; else null), user, cgroup
                       (null where not known)";

/// Runs the command.
pub(crate) async fn run(socket: &Socket, interface: String, json: bool) -> Result<String, Failure> {
    let mut agent = Agent::connect(socket).await?;
    let (time_ns, flows) = agent.flows(interface).await?;
    if json {
        let flows: Vec<Value> = flows.iter().map(flow_json).collect();
        return Ok(format!("{:#}\n", json!({"time_ns": time_ns, "flows": flows})));
    }
    Ok(text(&flows))
}

fn text(flows: &[Flow]) -> String {
    if flows.is_empty() {
        return "no flow has been seen\n".to_owned();
    }
    let head = row([
        "on",
        "proto",
        "local",
        "remote",
        "whose",
        "sent",
        "received",
        "round trip",
        "resent",
        "marked",
    ]);
    let rows = flows.iter().map(|flow| {
        let none = FlowDirection::default();
        let (out, into) = (flow.egress.as_ref().unwrap_or(&none), flow.ingress.as_ref().unwrap_or(&none));
        let [local, remote] = ends(flow);
        let whose = match &flow.owner {
            Some(owner) => format!("{}/{}", clean(&owner.tenant), communicator_text(owner.communicator)),
            None if flow.job.is_empty() => "-".to_owned(),
            None => format!("job {}", clean(&flow.job)),
        };
        let trip = if out.rtt_samples == 0 { "-".to_owned() } else { duration(out.last_rtt_ns) };
        let resent = out.retransmits.saturating_add(into.retransmits);
        let marked = out.ecn_ce.saturating_add(into.ecn_ce);
        row([
            &clean(&flow.interface),
            protocol_text(flow.protocol()),
            &local,
            &remote,
            &whose,
            &bytes(out.bytes),
            &bytes(into.bytes),
            &trip,
            &resent.to_string(),
            &marked.to_string(),
        ])
    });
    table(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
}

/// Both ends as people write them.
pub(crate) fn ends(flow: &Flow) -> [String; 2] {
    let (local, remote) = (clean(&flow.local), clean(&flow.remote));
    if flow.protocol() == FlowProtocol::Roce {
        return [local, format!("{remote} qp {}", flow.queue_pair)];
    }
    let end = |address: String, port: u32| match address.contains(':') {
        true => format!("[{address}]:{port}"),
        false => format!("{address}:{port}"),
    };
    [end(local, flow.local_port), end(remote, flow.remote_port)]
}

fn flow_json(flow: &Flow) -> Value {
    json!({
        "interface": flow.interface,
        "protocol": protocol_text(flow.protocol()),
        "local": flow.local,
        "local_port": flow.local_port,
        "remote": flow.remote,
        "remote_port": flow.remote_port,
        "queue_pair": flow.queue_pair,
        "source_port": flow.source_port,
        "owner": flow.owner.as_ref().map(owner_json),
        "job": (!flow.job.is_empty()).then_some(&flow.job),
        "egress": flow.egress.as_ref().map(direction_json),
        "ingress": flow.ingress.as_ref().map(direction_json),
        "kernel": flow.kernel.as_ref().map(kernel_json),
        "end": flow.end.as_ref().map(end_json),
    })
}

fn owner_json(owner: &FlowOwner) -> Value {
    json!({
        "tenant": owner.tenant,
        "communicator": communicator_text(owner.communicator),
        "epoch": owner.epoch,
        "participant": owner.participant,
        "peer": owner.peer,
    })
}

fn direction_json(way: &FlowDirection) -> Value {
    let trips = json!({
        "count": way.rtt_samples,
        "least_ns": way.min_rtt_ns,
        "last_ns": way.last_rtt_ns,
        "mean_ns": way.mean_rtt_ns,
    });
    json!({
        "packets": way.packets,
        "bytes": way.bytes,
        "bits": way.rate_bps,
        "first_ns": way.first_ns,
        "last_ns": way.last_ns,
        "burst_began_ns": way.burst_start_ns,
        "burst_bytes": way.burst_bytes,
        "marked": way.ecn_ce,
        "retransmissions": way.retransmits,
        "gaps": way.gaps,
        "round_trips": (way.rtt_samples > 0).then_some(trips),
        "slowed": way.cwr,
        "echoed": way.ece,
        "zero_windows": way.zero_windows,
        "notifications": way.cnps,
        "sequence_naks": way.sequence_naks,
        "not_ready_naks": way.not_ready_naks,
        "fatal_naks": way.fatal_naks,
    })
}

fn end_json(end: &FlowEndpoint) -> Value {
    json!({
        "process": (end.pid != 0).then_some(end.pid),
        "name": (!end.process_name.is_empty()).then_some(&end.process_name),
        "device": (!end.device.is_empty()).then_some(&end.device),
        "user": end.uid,
        "cgroup": (end.cgroup_id != 0).then_some(end.cgroup_id),
    })
}

fn kernel_json(kernel: &TcpInfo) -> Value {
    json!({
        "smoothed_ns": kernel.srtt_ns,
        "variation_ns": kernel.rttvar_ns,
        "window": kernel.cwnd,
        "retransmissions": kernel.retransmits,
        "unacknowledged": kernel.unacknowledged,
        "delivery_bits": kernel.delivery_bps,
    })
}
