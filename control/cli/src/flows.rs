//! `harmonaize flows`: every flow of a host, as a table or as JSON.

use crate::Failure;
use crate::agent::{Agent, Socket};
use crate::table::{row, table};
use crate::text::{bytes, clean, duration, page};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{Flow, FlowDirection, FlowProtocol, FlowsReply};

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
  job                  the external job that it was counted to; empty for none
  egress, ingress      what leaves, what comes in; null for the other direction of RoCE:
    packets, bytes, rate_bps
    first_ns, last_ns          the first and last packet
    burst_start_ns, burst_bytes  the running burst: no gap as long as the idle gap
    ecn_ce                     packets that a queue marked
    retransmits                packets sent again as seen from here (RoCE: repeated sequence numbers)
    gaps                       RoCE: sequence numbers missing
    rtt_samples                round trips measured; then min_rtt_ns, last_rtt_ns, mean_rtt_ns
    cwr, ece, zero_windows                             TCP
    cnps, sequence_naks, not_ready_naks, fatal_naks    RoCE
  kernel               null, or what the kernel's socket says: srtt_ns, rttvar_ns, cwnd, retransmits,
                       unacknowledged, delivery_bps
  end                  null, or whose this side's end is: pid, process_name, device (RoCE), uid, cgroup_id;
                       0 or empty where not known";

/// Runs the command.
pub(crate) async fn run(socket: &Socket, interface: String, json: bool) -> Result<String, Failure> {
    let mut agent = Agent::connect(socket).await?;
    let (time_ns, flows) = agent.flows(interface).await?;
    if json {
        return Ok(page(&FlowsReply { time_ns, flows }));
    }
    Ok(text(&flows))
}

fn text(flows: &[Flow]) -> String {
    if flows.is_empty() {
        return "no flow has been seen\n".to_owned();
    }
    let head =
        row(["on", "proto", "local", "remote", "owner", "sent", "received", "rtt", "retransmits", "ecn ce"]);
    let rows = flows.iter().map(|flow| {
        let none = FlowDirection::default();
        let (out, into) = (flow.egress.as_ref().unwrap_or(&none), flow.ingress.as_ref().unwrap_or(&none));
        let [local, remote] = ends(flow);
        let owner = match &flow.owner {
            Some(owner) => format!("{}/{}", clean(&owner.tenant), communicator_text(owner.communicator)),
            None if flow.job.is_empty() => "-".to_owned(),
            None => format!("job {}", clean(&flow.job)),
        };
        let rtt = if out.rtt_samples == 0 { "-".to_owned() } else { duration(out.last_rtt_ns) };
        let retransmits = out.retransmits.saturating_add(into.retransmits);
        let ecn_ce = out.ecn_ce.saturating_add(into.ecn_ce);
        row([
            &clean(&flow.interface),
            &flow.protocol().text(),
            &local,
            &remote,
            &owner,
            &bytes(out.bytes),
            &bytes(into.bytes),
            &rtt,
            &retransmits.to_string(),
            &ecn_ce.to_string(),
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
