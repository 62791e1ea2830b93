//! What has changed on a flow between two of its snapshots, each way.

use super::starved::Leg;
use harmonaize_events::{Direction, RoceCounters, RoundTrips, TcpFlow, Traffic};

/// A round trip shorter than this is not lengthened by a delayed acknowledgement: Linux waits for at least 40 ms.
const DELAYED_ACK_NS: u64 = 30_000_000;
/// A receiver that has had so many bytes acknowledges at once: more than two of the largest segments.
const PROMPT_BYTES: u64 = 32 << 10;
/// How long a flow that its receiver has held up says nothing of the network.
const LIMITED_NS: u64 = 50_000_000;
/// A flow that is new counts from its first packet, if that was not longer ago.
const NEW_NS: u64 = 50_000_000;

/// What is remembered of one way of a flow.
#[derive(Debug, Clone, Copy, Default)]
struct Way {
    bytes: u64,
    packets: u64,
    last_ns: u64,
    marks: u64,
    lost: u64,
    trips: u64,
    trips_sum: u64,
    least_ns: u64,
    /// The segment under measurement, and how many bytes had passed when that was first seen.
    measured_ns: u64,
    measured_bytes: u64,
}

/// What is remembered of a flow.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory {
    pub(super) own: bool,
    pub(super) heard_ns: u64,
    known: bool,
    out: Way,
    into: Way,
    limits: u64,
    limited_ns: u64,
}

/// What has changed, one way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Change {
    /// Bytes on the wire,
    pub(super) bytes: u64,
    /// and their packets,
    pub(super) packets: u64,
    /// since when
    pub(super) from_ns: u64,
    /// until when.
    pub(super) to_ns: u64,
    /// Marks and notifications.
    pub(super) marks: u64,
    /// Packets lost, or sent again.
    pub(super) lost: u64,
    /// Round trips that have ended: the mean of them, or the last, whichever was shorter, from when what it measures was sent.
    pub(super) trip: Option<Leg>,
    /// The least that the round trip under way will be.
    pub(super) pending: Option<u64>,
    /// The least round trip that the flow ever had, where that is news.
    pub(super) least: Option<u64>,
}

/// What one way of a snapshot says.
#[derive(Default)]
struct Reading<'a> {
    traffic: Option<&'a Traffic>,
    trips: Option<(&'a RoundTrips, u64)>,
    marks: u64,
    lost: u64,
}

impl Way {
    /// Takes a reading; none where the counters went back, which is another flow by the same key.
    fn change(&mut self, time_ns: u64, known: bool, limited: bool, reading: &Reading<'_>) -> Option<Change> {
        let mut change = Change { from_ns: time_ns, to_ns: time_ns, ..Change::default() };
        if let Some(traffic) = reading.traffic {
            change.bytes = traffic.bytes.checked_sub(self.bytes)?;
            change.packets = traffic.packets.checked_sub(self.packets)?;
            change.to_ns = traffic.last_ns.min(time_ns);
            let since = if self.last_ns == 0 { traffic.first_ns } else { self.last_ns };
            let resumed = traffic.burst_began_ns > since
                && change.bytes <= traffic.bytes - traffic.burst_after.min(traffic.bytes);
            change.from_ns = if resumed { traffic.burst_began_ns } else { since }.min(change.to_ns);
            (self.bytes, self.packets, self.last_ns) = (traffic.bytes, traffic.packets, traffic.last_ns);
        }
        change.marks = reading.marks.checked_sub(self.marks)?;
        // An event may have told more already.
        change.lost = reading.lost.saturating_sub(self.lost);
        (self.marks, self.lost) = (reading.marks, self.lost.max(reading.lost));
        if let Some((trips, measured_ns)) = reading.trips {
            let taken = trips.count.checked_sub(self.trips)?;
            let sum = trips.sum_ns.checked_sub(self.trips_sum)?;
            let prompt = |bytes: u64| bytes.saturating_sub(self.measured_bytes) >= PROMPT_BYTES;
            if taken > 0 && known {
                let trip = (sum / taken).min(trips.last_ns);
                // The one that was under way at the last snapshot began at a time that is known.
                let known = (taken == 1 && self.measured_ns != 0).then_some(self.measured_ns);
                let sent_ns = known.unwrap_or(time_ns.saturating_sub(trip));
                let acknowledged_ns = sent_ns.saturating_add(trip);
                change.trip = (trip < DELAYED_ACK_NS || prompt(self.bytes)).then_some(Leg {
                    sent_ns,
                    acknowledged_ns,
                    waited_ns: sum,
                });
            }
            if taken > 0 && trips.least_ns != self.least_ns {
                change.least = Some(trips.least_ns);
            }
            (self.trips, self.trips_sum, self.least_ns) = (trips.count, trips.sum_ns, trips.least_ns);
            if measured_ns != self.measured_ns {
                (self.measured_ns, self.measured_bytes) = (measured_ns, self.bytes);
            } else if measured_ns != 0 && prompt(self.bytes) && change.bytes > 0 {
                change.pending = Some(time_ns.saturating_sub(measured_ns));
            }
        }
        if limited {
            change.lost = 0;
            (change.trip, change.pending) = (None, None);
        }
        Some(change)
    }
}

impl Memory {
    /// Takes a snapshot of a connection: what has changed of what leaves, and of what comes in.
    pub(super) fn tcp(&mut self, time_ns: u64, flow: &TcpFlow) -> Option<(Change, Change)> {
        let (ingress, egress) = (&flow.ingress, &flow.egress);
        let out = Reading {
            traffic: Some(&egress.traffic),
            trips: Some((&egress.round_trips, egress.measured_ns)),
            marks: ingress.echoed,
            lost: egress.retransmissions,
        };
        let into = Reading {
            traffic: Some(&ingress.traffic),
            marks: ingress.traffic.marked,
            lost: ingress.retransmissions,
            ..Reading::default()
        };
        let first = match (egress.traffic.first_ns, ingress.traffic.first_ns) {
            (0, first) | (first, 0) => first,
            (one, other) => one.min(other),
        };
        self.change(time_ns, first, ingress.zero_windows, &out, &into)
    }

    /// Takes a snapshot of one direction to a queue pair.
    pub(super) fn roce(
        &mut self,
        time_ns: u64,
        direction: Direction,
        counters: &RoceCounters,
    ) -> Option<(Change, Change)> {
        let traffic = Reading {
            traffic: Some(&counters.traffic),
            trips: Some((&counters.round_trips, counters.measured_ns)),
            ..Reading::default()
        };
        let (out, into, not_ready) = match direction {
            Direction::Egress => {
                let out = Reading { lost: counters.repeats, ..traffic };
                (out, Reading { marks: counters.notifications, ..Reading::default() }, 0)
            }
            Direction::Ingress => {
                let lost = counters.gaps.max(counters.repeats);
                let into = Reading { marks: counters.traffic.marked, lost, trips: None, ..traffic };
                let out = Reading {
                    marks: counters.notifications,
                    lost: counters.sequence_naks,
                    ..Reading::default()
                };
                (out, into, counters.not_ready_naks)
            }
        };
        self.change(time_ns, counters.traffic.first_ns, not_ready, &out, &into)
    }

    /// Takes what an event says of a counter that only grows: packets sent again of a connection.
    pub(super) fn lost(&mut self, time_ns: u64, direction: Direction, total: u64) -> u64 {
        let limited = time_ns < self.limited_ns;
        let way = match direction {
            Direction::Egress => &mut self.out,
            Direction::Ingress => &mut self.into,
        };
        // The first of a flow that is not known may be any number.
        if !self.known || limited {
            return 0;
        }
        let lost = total.saturating_sub(way.lost);
        way.lost += lost;
        lost
    }

    /// What follows is not what follows on the last snapshot.
    pub(super) fn interrupted(&mut self) {
        self.known = false;
    }

    fn change(
        &mut self,
        time_ns: u64,
        first_ns: u64,
        held_up: u64,
        out: &Reading<'_>,
        into: &Reading<'_>,
    ) -> Option<(Change, Change)> {
        let fresh = self.known || time_ns.saturating_sub(first_ns) < NEW_NS;
        if held_up > self.limits {
            self.limited_ns = time_ns.saturating_add(LIMITED_NS);
        }
        self.limits = held_up;
        let limited = time_ns < self.limited_ns;
        let changes = self.out.change(time_ns, fresh, limited, out);
        let changes = changes.zip(self.into.change(time_ns, fresh, limited, into));
        self.heard_ns = time_ns;
        if changes.is_none() {
            // Another flow by the same key: it begins with this snapshot.
            (self.out, self.into, self.limits) = (Way::default(), Way::default(), held_up);
            self.out.change(time_ns, false, false, out);
            self.into.change(time_ns, false, false, into);
        }
        self.known = true;
        let least = |change: Change| Change { least: change.least, ..Change::default() };
        changes.map(|(out, into)| if fresh { (out, into) } else { (least(out), least(into)) })
    }
}
