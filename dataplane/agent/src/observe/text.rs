//! For people: a line for each finding, and one for each interface and interval.

use super::Printer;
use crate::telemetry::{Finding, Found, LinkReading, LocatedStraggler, Names, Reading, realtime_ns};
use harmonaize_abi::{CongestionCause, CongestionLevel};
use harmonaize_analysis::congestion::Congestion;
use harmonaize_analysis::marks::Operation;
use harmonaize_analysis::phases::{Address, Phase};
use harmonaize_analysis::straggler::{Kind, Subject};
use harmonaize_events::{Direction, FlowKey, Totals};
use std::fmt::Write;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

pub(super) struct Text;

impl Printer for Text {
    fn finding(&mut self, finding: &Finding, names: &Names) -> String {
        let text = match &finding.found {
            Found::Operation(operation) => of_operation(operation),
            Found::Phase(phase) => of_phase(phase),
            Found::Congestion(congestion) => of_congestion(congestion, names),
            Found::Straggler(late) => of_straggler(late),
        };
        format!("{}  {text}\n", clock(realtime_ns(finding.time, finding.offset_ns)))
    }

    fn status(&mut self, before: &Reading, now: &Reading) -> String {
        let mut text = String::new();
        let time = clock(realtime_ns(now.time, now.offset_ns));
        let seconds = now.time.since(before.time).as_nanos().max(1) as f64 / 1e9;
        for link in &now.links {
            let then = before.links.iter().find(|one| one.measured.index == link.measured.index);
            let (inward, outward) = rates(then, link, seconds);
            let flows = flows_of(now, link.measured.index);
            let name = &link.measured.name;
            let _ = writeln!(text, "{time}  {name}: in {inward}, out {outward}, {flows} flows");
        }
        for one in now.cost.iter().filter(|cost| cost.timed).flat_map(|cost| &cost.programs) {
            let each = one.time.as_nanos().checked_div(u128::from(one.runs));
            if let Some(each) = each {
                let _ = writeln!(text, "{time}  {}: {} runs so far, {each} ns each", one.name, one.runs);
            }
        }
        for missing in &now.missing {
            let _ = writeln!(text, "{time}  {missing}");
        }
        let (lost, known) = (now.losses, before.losses);
        if lost != known {
            let _ = writeln!(
                text,
                "{time}  lost so far: {} events, {} flows, {} records; {} gaps",
                lost.events, lost.flows, lost.records, lost.count
            );
        }
        text
    }

    fn missed(&mut self, count: u64) -> String {
        format!("{count} findings were not shown: they came faster than they could be printed\n")
    }
}

fn rates(then: Option<&LinkReading>, now: &LinkReading, seconds: f64) -> (String, String) {
    let rate = |of: fn(&LinkReading) -> &Totals| {
        let passed = of(now).bytes.saturating_sub(then.map_or(0, |then| of(then).bytes));
        bits(passed as f64 * 8.0 / seconds)
    };
    (rate(|one| &one.totals.ingress), rate(|one| &one.totals.egress))
}

fn flows_of(reading: &Reading, interface: u32) -> usize {
    let tcp = reading.flows.tcp.iter().filter(|(key, _)| key.interface == interface);
    tcp.count() + reading.flows.roce.iter().filter(|(key, _)| key.interface == interface).count()
}

fn of_operation(operation: &Operation) -> String {
    let sent: u64 = operation.edges.iter().map(|edge| edge.sent.bytes).sum();
    format!(
        "communicator {:016x}: operation {} took {}, sent {sent} B",
        operation.communicator,
        operation.operation,
        duration(operation.ended.since(operation.began)),
    )
}

fn of_phase(phase: &Phase) -> String {
    let mut text = format!(
        "job {}: iteration {}, {} of communication, {} B, period {}",
        phase.job,
        phase.iteration,
        duration(phase.ended.since(phase.began)),
        phase.bytes,
        duration(phase.period)
    );
    if let Some(ring) = phase.ring {
        let _ = write!(text, ", ring of {} in {} steps of {} B", ring.hosts, ring.steps, ring.bytes);
    }
    if let Some(late) = phase.late {
        let _ = write!(text, ", {} late by {}", address(late.host), duration(late.by));
    }
    text
}

fn of_congestion(congestion: &Congestion, names: &Names) -> String {
    let link = congestion.link;
    let mut text = names.get(link.interface);
    text.push_str(if link.direction == Direction::Egress { " outward" } else { " inward" });
    if let Some(remote) = link.path.address() {
        let _ = write!(text, ", path with {}", address(remote));
    }
    let state = match congestion.level {
        CongestionLevel::None => "not congested",
        CongestionLevel::Mild => "mild congestion",
        CongestionLevel::Severe => "severe congestion",
    };
    let cause = match congestion.cause {
        CongestionCause::Unknown => "",
        CongestionCause::Own => " by own traffic",
        CongestionCause::CrossTraffic => " by others' traffic",
    };
    let _ = write!(text, ": {state}{cause}");
    text
}

fn of_straggler(late: &LocatedStraggler) -> String {
    let straggler = &late.straggler;
    let whose = match straggler.subject {
        Subject::Communicator(id) => format!("communicator {id:016x}"),
        Subject::Job(job) => format!("job {job}"),
    };
    let why = match straggler.kind {
        Kind::Compute => "starts late",
        Kind::Network => "moves its bytes late",
    };
    let at = late.host.map_or_else(String::new, |host| format!(" ({})", address(host)));
    let rank = format!("{}{at}", straggler.rank);
    if straggler.ended.is_some() {
        return format!("{whose}: rank {rank} is no straggler any more");
    }
    let (by, units) = (duration(straggler.by), straggler.units);
    format!("{whose}: straggler: rank {rank} {why}, by {by} over {units} iterations")
}

pub(super) fn address(words: Address) -> IpAddr {
    Ipv6Addr::from(FlowKey::octets(words)).to_canonical()
}

/// The time of day, UTC.
fn clock(time_ns: u64) -> String {
    let (seconds, rest) = (time_ns / 1_000_000_000, time_ns % 1_000_000_000);
    let of_day = seconds % 86_400;
    let (hours, minutes, seconds) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02}.{:03}", rest / 1_000_000)
}

fn duration(span: Duration) -> String {
    let nanoseconds = span.as_nanos();
    let value = nanoseconds as f64;
    match nanoseconds {
        0..1_000 => format!("{nanoseconds} ns"),
        1_000..1_000_000 => format!("{:.1} us", value / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", value / 1e6),
        _ => format!("{:.3} s", value / 1e9),
    }
}

fn bits(rate: f64) -> String {
    match rate {
        rate if rate < 1e3 => format!("{rate:.0} bit/s"),
        rate if rate < 1e6 => format!("{:.1} kbit/s", rate / 1e3),
        rate if rate < 1e9 => format!("{:.1} Mbit/s", rate / 1e6),
        rate => format!("{:.2} Gbit/s", rate / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_short() {
        assert_eq!(clock(86_400_000_000_000 * 9 + 3_723_004_000_000), "01:02:03.004");
        let durations = [0, 999, 1_500, 2_250_000, 3_000_000_000].map(Duration::from_nanos).map(duration);
        assert_eq!(durations, ["0 ns", "999 ns", "1.5 us", "2.25 ms", "3.000 s"]);
        let rates = [0.0, 1_500.0, 2e6, 3.456e9].map(bits);
        assert_eq!(rates, ["0 bit/s", "1.5 kbit/s", "2.0 Mbit/s", "3.46 Gbit/s"]);
    }
}
