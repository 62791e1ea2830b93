//! Traces of several hosts, made one.

use super::{Observer, Record};

/// Merges traces, each in the order of its time, into one in the order of time.
///
/// Where the hosts' clocks differ, each trace's times are brought to the first's by what the [`Observer`] records say of
/// CLOCK_REALTIME. A trace without such a record counts as of the host with its place in the list, by the first's clock.
pub fn merge(traces: &[&[Record]]) -> Vec<Record> {
    let observer = |place: usize, trace: &[Record]| {
        let found = trace.iter().find_map(|record| match record {
            Record::Observer(observer) => Some(*observer),
            _ => None,
        });
        found.unwrap_or(Observer { time_ns: 0, host: place as u64, realtime_offset_ns: 0 })
    };
    let first = traces.first().map_or(0, |trace| observer(0, trace).realtime_offset_ns);
    let mut all = Vec::with_capacity(traces.iter().map(|trace| trace.len()).sum());
    for (place, trace) in traces.iter().enumerate() {
        let mut now = observer(place, trace);
        for record in trace.iter() {
            if let Record::Observer(observer) = record {
                now = *observer;
                continue;
            }
            let shift = match (now.realtime_offset_ns, first) {
                (0, _) | (_, 0) => 0,
                (own, first) => own.wrapping_sub(first),
            };
            all.push((now.host, shift, *record));
        }
    }
    all.sort_by_key(|(_, shift, record)| record.time().0.saturating_add_signed(*shift));
    let mut merged = Vec::with_capacity(all.len() + traces.len());
    let mut last = None;
    for (host, shift, mut record) in all {
        shifted(&mut record, shift);
        if last != Some(host) {
            let time_ns = record.time().0;
            merged.push(Record::Observer(Observer { time_ns, host, realtime_offset_ns: first }));
            last = Some(host);
        }
        merged.push(record);
    }
    merged
}

/// Moves every time of a record; a time that is 0 stands for none.
fn shifted(record: &mut Record, shift: i64) {
    if shift == 0 {
        return;
    }
    let by = |time: &mut u64| {
        if *time != 0 {
            *time = time.saturating_add_signed(shift);
        }
    };
    let traffic = |traffic: &mut harmonaize_events::Traffic| {
        by(&mut traffic.first_ns);
        by(&mut traffic.last_ns);
        by(&mut traffic.burst_began_ns);
        by(&mut traffic.congestion_signal_ns);
    };
    match record {
        Record::Observer(observer) => by(&mut observer.time_ns),
        Record::Event(event) => {
            by(&mut event.time_ns);
            by(&mut event.burst_began_ns);
            by(&mut event.burst_ended_ns);
        }
        Record::Tcp { time_ns, flow, .. } => {
            by(time_ns);
            for counters in [&mut flow.ingress, &mut flow.egress] {
                traffic(&mut counters.traffic);
                by(&mut counters.measured_ns);
            }
        }
        Record::Roce { time_ns, counters, .. } => {
            by(time_ns);
            traffic(&mut counters.traffic);
            by(&mut counters.measured_ns);
        }
        Record::Totals { time_ns, .. } => by(time_ns),
        Record::Mark(mark) => by(&mut mark.time_ns),
        Record::Owner(owner) => by(&mut owner.time_ns),
        Record::Link(link) => by(&mut link.time_ns),
        Record::Lost(lost) => by(&mut lost.time_ns),
        Record::Port(port) => by(&mut port.time_ns),
        Record::Completion(completion) => by(&mut completion.time_ns),
    }
}
