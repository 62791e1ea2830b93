//! Signs of congestion by interface, summed over all flows that ever were: marks, retransmissions, CNPs and round trips.

use harmonaize_analysis::trace::Record;
use harmonaize_events::{FlowKey, RttStats, Traffic};
use harmonaize_metrics::Buckets;
use std::collections::{BTreeMap, HashMap};

/// Flows whose counts are remembered.
const FLOWS: usize = 1 << 16;

/// Upper bounds of round trips, in seconds.
static RTT_SECONDS: [f64; 12] = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.5];

/// Counts of a flow, or of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets with ECN's mark.
    pub ecn_marks: u64,
    /// Packets that were sent again, as seen here.
    pub retransmissions: u64,
    /// Congestion notifications of RoCE.
    pub notifications: u64,
    /// Round trips that were measured.
    round_trips: u64,
}

impl Counts {
    fn of(traffic: &Traffic, retransmissions: u64, notifications: u64, rtt: &RttStats) -> Self {
        Self { ecn_marks: traffic.ecn_ce, retransmissions, notifications, round_trips: rtt.count }
    }
}

/// What an interface came to.
#[derive(Clone, Debug, PartialEq)]
pub struct OfInterface {
    /// Signs of congestion.
    pub counts: Counts,
    /// Round trips that ended last before a flow was sampled.
    pub round_trips: Buckets<12>,
}

impl Default for OfInterface {
    fn default() -> Self {
        Self { counts: Counts::default(), round_trips: Buckets::new(&RTT_SECONDS) }
    }
}

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signals {
    /// As last seen, by flow and direction, where any is not 0.
    flows: HashMap<(FlowKey, bool), Counts>,
    interfaces: BTreeMap<u32, OfInterface>,
}

impl Signals {
    /// By the interface's index.
    pub(crate) fn interfaces(&self) -> &BTreeMap<u32, OfInterface> {
        &self.interfaces
    }

    /// Takes in a record of a flow; others tell nothing.
    ///
    /// Cost: nothing to speak of where a flow has no signs; else a look into a table for each direction.
    pub(crate) fn take(&mut self, record: &Record) {
        match record {
            Record::Tcp { key, flow, .. } => {
                for (way, egress) in [(&flow.ingress, false), (&flow.egress, true)] {
                    let now = Counts::of(&way.traffic, way.retransmissions, 0, &way.rtt);
                    self.count((*key, egress), now, &way.rtt);
                }
            }
            Record::Roce { key, counters, .. } => {
                let way = counters;
                let now = Counts::of(&way.traffic, way.retransmissions, way.notifications, &way.rtt);
                self.count((*key, false), now, &way.rtt);
            }
            _ => {}
        }
    }

    fn count(&mut self, flow: (FlowKey, bool), now: Counts, rtt: &RttStats) {
        if now == Counts::default() {
            return;
        }
        if self.flows.len() >= FLOWS && !self.flows.contains_key(&flow) {
            // Those that go on are counted from where they are; what is lost is what the others did meanwhile.
            self.flows.clear();
            self.flows.insert(flow, now);
            return;
        }
        let mut before = self.flows.insert(flow, now).unwrap_or_default();
        if now.ecn_marks < before.ecn_marks || now.retransmissions < before.retransmissions {
            // It was evicted, and is counted anew.
            before = Counts::default();
        }
        let of = self.interfaces.entry(flow.0.interface).or_default();
        of.counts.ecn_marks += now.ecn_marks.saturating_sub(before.ecn_marks);
        of.counts.retransmissions += now.retransmissions.saturating_sub(before.retransmissions);
        of.counts.notifications += now.notifications.saturating_sub(before.notifications);
        if now.round_trips != before.round_trips {
            of.round_trips.observe(rtt.last_ns as f64 / 1e9);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_events::{RoceCounters, TcpCounters, TcpFlow};

    fn tcp(marks: u64, again: u64) -> Record {
        let egress = TcpCounters {
            traffic: Traffic { ecn_ce: marks, ..Traffic::default() },
            retransmissions: again,
            rtt: RttStats { last_ns: 30_000, count: marks, ..RttStats::default() },
            ..TcpCounters::default()
        };
        let key = FlowKey { interface: 7, ..FlowKey::default() };
        Record::Tcp { time_ns: 1, key, flow: TcpFlow { egress, ..TcpFlow::default() } }
    }

    #[test]
    fn counts_never_fall_when_a_flow_is_evicted() {
        let mut signals = Signals::default();
        for record in [tcp(2, 5), tcp(2, 6), tcp(1, 1)] {
            signals.take(&record);
        }
        let counters = RoceCounters { notifications: 9, ..RoceCounters::default() };
        let key = FlowKey { interface: 7, queue_pair: 3, ..FlowKey::default() };
        signals.take(&Record::Roce { time_ns: 1, key, counters });
        let of = &signals.interfaces()[&7];
        assert_eq!((of.counts.ecn_marks, of.counts.retransmissions, of.counts.notifications), (3, 7, 9));
        assert_eq!(of.round_trips.count(), 2);
    }
}
