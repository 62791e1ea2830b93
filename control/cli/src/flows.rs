//! Flows as a table, and what their fields mean.

use crate::table::{row, table};
use crate::text::{bytes, clean, duration, moment};
use harmonaize_api::communicator_text;
use harmonaize_api::v1::{Flow, FlowDirection, FlowProtocol};

/// Examples, and what the fields of the JSON mean.
pub(crate) const FIELDS: &str = "\
Examples:
  harmonaize flows                            of all hosts, through control
  harmonaize flows --follow --tenant a        every flow of a tenant once, as it appears
  harmonaize flows --host h0,h1 --peer 10.0.0.2 --since 5min -o wide
  harmonaize flows --agent unix:/run/harmonaize/telemetry.sock --interface eth0
  harmonaize flows -o json | jq -s 'sort_by(-.egress.bytes)[:10]'
  harmonaize flows -o yaml --last 1           every field of one flow, a field a line
  harmonaize flows --follow -o json --file flows.json --max-bytes 64MiB --keep 4
  harmonaize flows -o jsonpath='{.host} {.remote} {.egress.bytes}'

With --follow a flow comes when it appears, and again when its owner or job changes. Hosts that do not
answer are named on standard error, or as `kind` \"host\" with failure and omitted (rows beyond an agent's
limit of 10,000).

JSON: an object a line, by the schema that `schema` names (docs/rows.schema.json): `host` (empty from
an agent itself), `kind`, `time_ns` (when flows were read). Times are CLOCK_REALTIME nanoseconds, 0 where not known (some tools
round integers of this size: jq before 1.7 does); durations nanoseconds; bytes and packets those on the
wire with the link's header, since the programs were loaded; rates bits a second. Of `kind` \"flow\":
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

/// Flows as a table, whose head comes once.
pub(crate) struct FlowTable {
    wide: bool,
    begun: bool,
}

const HEAD: [&str; 11] =
    ["host", "on", "proto", "local", "remote", "owner", "sent", "received", "rtt", "retransmits", "ecn ce"];

/// What stands behind in a wide table.
const WIDE: [&str; 7] = ["first", "last", "min rtt", "gaps", "cnps", "uid", "process"];

impl FlowTable {
    pub(crate) const fn new(wide: bool) -> Self {
        Self { wide, begun: false }
    }

    /// Lines of flows, each with its host and when it was read.
    pub(crate) fn rows(&mut self, flows: &[(String, u64, Flow)]) -> String {
        if flows.is_empty() {
            return String::new();
        }
        let mut head = row(HEAD);
        if self.wide {
            head.extend(row(WIDE));
        }
        let rows = flows.iter().map(|(host, read_ns, flow)| self.cells(host, *read_ns, flow));
        let shown = table(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
        match std::mem::replace(&mut self.begun, true) {
            false => shown,
            true => shown.split_once('\n').map_or_else(String::new, |(_, rows)| rows.to_owned()),
        }
    }

    fn cells(&self, host: &str, read_ns: u64, flow: &Flow) -> Vec<String> {
        let none = FlowDirection::default();
        let (out, into) = (flow.egress.as_ref().unwrap_or(&none), flow.ingress.as_ref().unwrap_or(&none));
        let [local, remote] = ends(flow);
        let owner = match &flow.owner {
            Some(owner) => format!("{}/{}", clean(&owner.tenant), communicator_text(owner.communicator)),
            None if flow.job.is_empty() => "-".to_owned(),
            None => format!("job {}", clean(&flow.job)),
        };
        let rtt = |nanos| if out.rtt_samples == 0 { "-".to_owned() } else { duration(nanos) };
        let retransmits = out.retransmits.saturating_add(into.retransmits);
        let ecn_ce = out.ecn_ce.saturating_add(into.ecn_ce);
        let mut cells = row([
            if host.is_empty() { "-" } else { host },
            &clean(&flow.interface),
            &flow.protocol().text(),
            &local,
            &remote,
            &owner,
            &bytes(out.bytes),
            &bytes(into.bytes),
            &rtt(out.last_rtt_ns),
            &retransmits.to_string(),
            &ecn_ce.to_string(),
        ]);
        if self.wide {
            let both = [out, into];
            let first = both.map(|way| way.first_ns).into_iter().filter(|first| *first > 0).min();
            let end = flow.end.as_ref();
            cells.extend(row([
                &moment(read_ns, first.unwrap_or(0)),
                &moment(read_ns, flow.last_packet_ns()),
                &rtt(out.min_rtt_ns),
                &both.iter().fold(0, |sum: u64, way| sum.saturating_add(way.gaps)).to_string(),
                &both.iter().fold(0, |sum: u64, way| sum.saturating_add(way.cnps)).to_string(),
                &end.map_or_else(|| "-".to_owned(), |end| end.uid.to_string()),
                &end.map(|end| clean(&end.process_name))
                    .filter(|name| !name.is_empty())
                    .unwrap_or("-".to_owned()),
            ]));
        }
        cells
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_and_last_packets_of_another_day_have_dates() {
        const SECOND: u64 = 1_000_000_000;
        /// 2025-11-21 20:05:42 UTC.
        const FIRST: u64 = 1_763_755_542 * SECOND;
        let last_ns = FIRST + 86_400 * SECOND;
        let way = FlowDirection { first_ns: FIRST, last_ns, ..FlowDirection::default() };
        let flow = Flow { egress: Some(way), ..Flow::default() };
        let shown = FlowTable::new(true).rows(&[("h0".to_owned(), last_ns + SECOND, flow)]);
        assert!(shown.contains("  2025-11-21T20:05:42Z  20:05:42.000  "), "{shown}");
    }
}
