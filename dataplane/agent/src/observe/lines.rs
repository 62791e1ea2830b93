//! For programs: a JSON object a line. Its `kind` says what it is; times are CLOCK_REALTIME in nanoseconds, 0 where unknown.

use super::Printer;
use crate::telemetry::{Finding, Names, Reading, realtime_ns, to_proto};
use harmonaize_abi::Nanos;
use harmonaize_events::Totals;
use harmonaize_loader::ProgramCost;
use serde::Serialize;
use serde_json::json;

pub(super) struct Lines;

impl Printer for Lines {
    fn finding(&mut self, finding: &Finding, names: &Names) -> String {
        line(&to_proto::finding(finding, names))
    }

    fn status(&mut self, before: &Reading, now: &Reading) -> String {
        let time = |time: Nanos| realtime_ns(time, now.offset_ns);
        let interval_ns = Nanos::from(now.time.since(before.time)).0;
        let links = now.links.iter().map(|link| {
            let then = before.links.iter().find(|one| one.measured.index == link.measured.index);
            let direction = |of: fn(&crate::telemetry::LinkReading) -> &Totals| {
                let totals = of(link);
                let passed = totals.bytes.saturating_sub(then.map_or(0, |then| of(then).bytes));
                let bits = u128::from(passed) * 8_000_000_000 / u128::from(interval_ns.max(1));
                json!({
                    "packets": totals.packets, "bytes": totals.bytes,
                    "rate_bps": u64::try_from(bits).unwrap_or(u64::MAX), "tcp_packets": totals.tcp,
                    "roce_packets": totals.roce, "other_packets": totals.other,
                    "fragments": totals.fragments, "malformed": totals.malformed, "untracked": totals.unplaced,
                })
            };
            json!({
                "interface": link.measured.name, "index": link.measured.index,
                "capacity_bps": link.measured.bits,
                "ingress": direction(|one| &one.totals.ingress), "egress": direction(|one| &one.totals.egress),
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
            "kind": "standing", "time_ns": time(now.time), "interval_ns": interval_ns,
            "links": links.collect::<Vec<_>>(), "flows": now.flow_count,
            "lost": {
                "events": gaps.events, "flows": gaps.flows, "ambiguous": gaps.ambiguous,
                "records": gaps.records, "gaps": gaps.count, "unregistered": gaps.unregistered, "endpoints": gaps.ends,
            },
            "thread_ns": thread, "cost": cost, "missing": now.missing,
        }))
    }

    fn missed(&mut self, count: u64) -> String {
        line(&json!({"kind": "lost", "count": count}))
    }
}

fn line(object: &impl Serialize) -> String {
    // Messages have no keys but texts, and so can always be written.
    serde_json::to_string(object).unwrap_or_default() + "\n"
}
