//! What has changed on a flow between two of its snapshots, each way.

use super::starved::RttSample;
use crate::nanos;
use harmonaize_abi::Nanos;
use harmonaize_events::{Direction, Event, RoceCounters, RttStats, TcpFlow, Traffic};
use std::time::Duration;

/// A round trip shorter than this is not lengthened by a delayed acknowledgement: Linux waits for at least 40 ms.
const DELAYED_ACK: Duration = Duration::from_millis(30);
/// A receiver that has had so many bytes acknowledges at once: more than two of the largest segments.
const PROMPT_BYTES: u64 = 32 << 10;
/// How long a flow that its receiver has held up says nothing of the network.
const RECEIVER_LIMITED: Duration = Duration::from_millis(50);
/// A flow that is new counts from its first packet, if that was not longer ago.
const NEW: Duration = Duration::from_millis(50);

/// What is remembered of one way of a flow: the counters as the last snapshot had them.
#[derive(Debug, Clone, Copy, Default)]
struct DirectionState {
    bytes: u64,
    packets: u64,
    last_ns: u64,
    ecn_ce: u64,
    lost: u64,
    rtt_count: u64,
    rtt_sum_ns: u64,
    min_rtt_ns: u64,
    /// The segment under measurement, and how many bytes had passed when that was first seen.
    measured_ns: u64,
    measured_bytes: u64,
    /// What an event told since the last snapshot.
    late_rtt: Option<LateRtt>,
}

/// A late round trip that an event told of.
#[derive(Debug, Clone, Copy)]
struct LateRtt {
    /// Which one of the flow's it was, modulo 2^32.
    count: u32,
    /// The round trip before it.
    before: RttSample,
    /// The late round trip itself.
    late: RttSample,
    /// Bytes of the flow until what it measured had left.
    until: u64,
    /// Bytes of the flow from what the round trip before it measured until what it measured itself.
    between: u64,
}

/// What passed from one time to another.
type Span = (Nanos, Nanos, u64);

impl LateRtt {
    fn from_event(event: &Event) -> Self {
        let leg = |sent: Nanos, acknowledged: Nanos| RttSample {
            sent,
            acknowledged,
            total: acknowledged.since(sent),
        };
        let sent = Nanos(event.burst_ended_ns);
        Self {
            count: event.count,
            // When what is measured next leaves, the one before has ended.
            before: leg(Nanos(event.burst_began_ns), sent),
            late: leg(sent, Nanos(event.time_ns)),
            until: event.total,
            between: event.burst_bytes,
        }
    }

    /// The round trips since the last snapshot, `taken` that took `sum` together, one after the other. They are split into all others, the
    /// one before this one, this one, and the one after; and into what passed until when. None where this one is not among them, or the
    /// snapshots contradict it. What is not known to have been sent in time would seem not to have been sent at all.
    fn split_samples(
        &self,
        taken: u64,
        sum: Duration,
        trips: &RttStats,
        change: &Change,
        known: u64,
    ) -> Option<([Option<RttSample>; 4], [Span; 3])> {
        let after = (trips.count as u32).wrapping_sub(self.count);
        let last = match after {
            0 => None,
            1 => Some(Duration::from_nanos(trips.last_ns)),
            _ => return None,
        };
        let (before, late) = (self.before, self.late);
        let others = taken.checked_sub(1 + u64::from(after))?;
        let sum = sum.checked_sub(late.total)?.checked_sub(last.unwrap_or_default())?;
        let later = last.map(|last| RttSample {
            sent: late.acknowledged,
            acknowledged: late.acknowledged.after(last),
            total: last,
        });
        if others == 0 {
            return Some((
                [None, None, Some(late), later],
                [change.span(), Span::default(), Span::default()],
            ));
        }
        let sum = sum.checked_sub(before.total)?;
        let earlier = nanos(sum).checked_div(others - 1).map(|mean| RttSample {
            sent: before.sent.before(Duration::from_nanos(mean)),
            acknowledged: before.sent,
            total: sum,
        });
        let until = self.until.checked_sub(known)?;
        let (between, since) = (self.between.min(until), change.bytes.checked_sub(until)?);
        let sent = before.sent.max(change.from);
        if late.sent < sent || late.sent > change.to {
            return None;
        }
        let spans =
            [(change.from, sent, until - between), (sent, late.sent, between), (late.sent, change.to, since)];
        Some(([earlier, Some(before), Some(late), later], spans))
    }
}

/// What is remembered of a flow.
#[derive(Debug, Clone, Default)]
pub(super) struct FlowHistory {
    pub(super) own: bool,
    pub(super) last_seen: Nanos,
    has_baseline: bool,
    egress: DirectionState,
    ingress: DirectionState,
    receiver_limits: u64,
    receiver_limited_until: Nanos,
}

/// What has changed, one way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Change {
    /// Bytes on the wire.
    pub(super) bytes: u64,
    /// Packets on the wire.
    pub(super) packets: u64,
    /// When the change began.
    pub(super) from: Nanos,
    /// When the change ended.
    pub(super) to: Nanos,
    /// Marks and notifications.
    pub(super) ecn_ce: u64,
    /// Packets lost, or sent again.
    pub(super) lost: u64,
    /// The round trips that have ended: the mean of them, or the last, whichever was shorter. It counts from when what it
    /// measures was sent.
    pub(super) rtt: Option<RttSample>,
    /// The same one after the other, where an event told of a late one among them.
    pub(super) rtt_samples: [Option<RttSample>; 4],
    /// From when until when which of the bytes passed.
    pub(super) spans: [Span; 3],
    /// The least that the round trip under way will be.
    pub(super) pending_rtt: Option<Duration>,
    /// The least round trip that the flow ever had, where that is news.
    pub(super) min_rtt: Option<Duration>,
}

impl Change {
    /// All that passed.
    fn span(&self) -> Span {
        (self.from, self.to, self.bytes)
    }
}

/// What one way of a snapshot says.
#[derive(Default)]
struct Reading<'a> {
    traffic: Option<&'a Traffic>,
    rtt: Option<(&'a RttStats, u64)>,
    ecn_ce: u64,
    lost: u64,
}

impl DirectionState {
    /// Takes a reading; none where the counters went back, which is another flow by the same key.
    fn change(
        &mut self,
        time: Nanos,
        has_baseline: bool,
        limited: bool,
        reading: &Reading<'_>,
    ) -> Option<Change> {
        let mut change = Change { from: time, to: time, ..Change::default() };
        let bytes = self.bytes;
        if let Some(traffic) = reading.traffic {
            change.bytes = traffic.bytes.checked_sub(self.bytes)?;
            change.packets = traffic.packets.checked_sub(self.packets)?;
            change.to = Nanos(traffic.last_ns).min(time);
            let since = if self.last_ns == 0 { traffic.first_ns } else { self.last_ns };
            let resumed = traffic.burst_began_ns > since
                && change.bytes <= traffic.bytes - traffic.burst_after.min(traffic.bytes);
            let from = if resumed { traffic.burst_began_ns } else { since };
            change.from = Nanos(from).min(change.to);
            (self.bytes, self.packets, self.last_ns) = (traffic.bytes, traffic.packets, traffic.last_ns);
        }
        change.spans = [change.span(), Span::default(), Span::default()];
        change.ecn_ce = reading.ecn_ce.checked_sub(self.ecn_ce)?;
        // An event may have told more already.
        change.lost = reading.lost.saturating_sub(self.lost);
        (self.ecn_ce, self.lost) = (reading.ecn_ce, self.lost.max(reading.lost));
        if let Some((trips, measured_ns)) = reading.rtt {
            let taken = trips.count.checked_sub(self.rtt_count)?;
            let sum = trips.sum_ns.checked_sub(self.rtt_sum_ns)?;
            let prompt = |bytes: u64| bytes.saturating_sub(self.measured_bytes) >= PROMPT_BYTES;
            let told = self.late_rtt.take();
            if taken > 0 && has_baseline {
                let trip = Duration::from_nanos((sum / taken).min(trips.last_ns));
                // The one that was under way at the last snapshot began at a time that is known.
                let known = (taken == 1 && self.measured_ns != 0).then_some(Nanos(self.measured_ns));
                let sent = known.unwrap_or(time.before(trip));
                let acknowledged = sent.after(trip);
                let sum = Duration::from_nanos(sum);
                let counts = |leg: &RttSample| leg.took() < DELAYED_ACK || prompt(self.bytes);
                let all = RttSample { sent, acknowledged, total: sum };
                change.rtt = Some(all).filter(counts);
                let apart = told.and_then(|told| told.split_samples(taken, sum, trips, &change, bytes));
                let (legs, spans) = apart.unwrap_or(([None, None, None, Some(all)], change.spans));
                (change.rtt_samples, change.spans) = (legs.map(|leg| leg.filter(counts)), spans);
            }
            if taken > 0 && trips.min_ns != self.min_rtt_ns {
                change.min_rtt = Some(Duration::from_nanos(trips.min_ns));
            }
            (self.rtt_count, self.rtt_sum_ns, self.min_rtt_ns) = (trips.count, trips.sum_ns, trips.min_ns);
            if measured_ns != self.measured_ns {
                (self.measured_ns, self.measured_bytes) = (measured_ns, self.bytes);
            } else if measured_ns != 0 && prompt(self.bytes) && change.bytes > 0 {
                change.pending_rtt = Some(time.since(Nanos(measured_ns)));
            }
        }
        if limited {
            change.lost = 0;
            (change.rtt, change.rtt_samples, change.pending_rtt) = (None, [None; 4], None);
        }
        Some(change)
    }
}

impl FlowHistory {
    /// Takes a snapshot of a connection: what has changed of what leaves, and of what comes in.
    pub(super) fn tcp(&mut self, time: Nanos, flow: &TcpFlow) -> Option<(Change, Change)> {
        let (ingress, egress) = (&flow.ingress, &flow.egress);
        let out = Reading {
            traffic: Some(&egress.traffic),
            rtt: Some((&egress.rtt, egress.measured_ns)),
            ecn_ce: ingress.ece,
            lost: egress.retransmissions,
        };
        let into = Reading {
            traffic: Some(&ingress.traffic),
            ecn_ce: ingress.traffic.ecn_ce,
            lost: ingress.retransmissions,
            ..Reading::default()
        };
        let first = match (egress.traffic.first_ns, ingress.traffic.first_ns) {
            (0, first) | (first, 0) => first,
            (one, other) => one.min(other),
        };
        self.change(time, Nanos(first), ingress.zero_windows.into(), &out, &into)
    }

    /// Takes a snapshot of one direction to a queue pair.
    pub(super) fn roce(
        &mut self,
        time: Nanos,
        direction: Direction,
        counters: &RoceCounters,
    ) -> Option<(Change, Change)> {
        let traffic = Reading {
            traffic: Some(&counters.traffic),
            rtt: Some((&counters.rtt, counters.measured_ns)),
            ..Reading::default()
        };
        let (out, into, not_ready) = match direction {
            Direction::Egress => {
                let out = Reading { lost: counters.retransmissions, ..traffic };
                (out, Reading { ecn_ce: counters.notifications, ..Reading::default() }, 0)
            }
            Direction::Ingress => {
                let lost = counters.gaps.max(counters.retransmissions);
                let into = Reading { ecn_ce: counters.traffic.ecn_ce, lost, rtt: None, ..traffic };
                let out = Reading {
                    ecn_ce: counters.notifications,
                    lost: counters.sequence_naks,
                    ..Reading::default()
                };
                (out, into, counters.not_ready_naks)
            }
        };
        self.change(time, Nanos(counters.traffic.first_ns), not_ready, &out, &into)
    }

    /// Takes what an event says of a counter that only grows: packets sent again of a connection.
    pub(super) fn lost(&mut self, time: Nanos, direction: Direction, total: u64) -> u64 {
        let limited = time < self.receiver_limited_until;
        let way = match direction {
            Direction::Egress => &mut self.egress,
            Direction::Ingress => &mut self.ingress,
        };
        // The first of a flow that is not known may be any number.
        if !self.has_baseline || limited {
            return 0;
        }
        let lost = total.saturating_sub(way.lost);
        way.lost += lost;
        lost
    }

    /// Takes an event's late round trip of what leaves, unless the last snapshot had it. The next snapshot reports it apart. What passed
    /// meanwhile is known only then.
    pub(super) fn handle_late_rtt(&mut self, event: &Event) {
        if event.count.wrapping_sub(self.egress.rtt_count as u32).cast_signed() > 0 {
            self.egress.late_rtt = Some(LateRtt::from_event(event));
        }
    }

    /// What follows is not what follows on the last snapshot.
    pub(super) fn reset_baseline(&mut self) {
        self.has_baseline = false;
    }

    fn change(
        &mut self,
        time: Nanos,
        first: Nanos,
        zero_windows: u64,
        out: &Reading<'_>,
        into: &Reading<'_>,
    ) -> Option<(Change, Change)> {
        let fresh = self.has_baseline || time.since(first) < NEW;
        if zero_windows > self.receiver_limits {
            self.receiver_limited_until = time.after(RECEIVER_LIMITED);
        }
        self.receiver_limits = zero_windows;
        let limited = time < self.receiver_limited_until;
        let changes = self.egress.change(time, fresh, limited, out);
        let changes = changes.zip(self.ingress.change(time, fresh, limited, into));
        self.last_seen = time;
        if changes.is_none() {
            // Another flow by the same key: it begins with this snapshot.
            (self.egress, self.ingress, self.receiver_limits) =
                (DirectionState::default(), DirectionState::default(), zero_windows);
            self.egress.change(time, false, false, out);
            self.ingress.change(time, false, false, into);
        }
        self.has_baseline = true;
        let least = |change: Change| Change { min_rtt: change.min_rtt, ..Change::default() };
        changes.map(|(out, into)| if fresh { (out, into) } else { (least(out), least(into)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_events::EventKind;

    const MS: u64 = 1_000_000;

    /// A flow's snapshot at a time, after so many bytes and round trips. The round trips took so long together, and the last one
    /// so long.
    fn snapshot(count: u64, sum: u64, last: u64, bytes: u64, time: u64) -> TcpFlow {
        let mut flow = TcpFlow::default();
        let (traffic, trips) = (&mut flow.egress.traffic, &mut flow.egress.rtt);
        (traffic.bytes, traffic.first_ns, traffic.last_ns) = (bytes, 1, time * MS);
        *trips = RttStats { min_ns: MS, last_ns: last * MS, sum_ns: sum * MS, count };
        flow
    }

    /// A round trip after one of 2 ms: which one, and from when to when. Also the flow's bytes until it was sent, and those of the one
    /// before.
    fn late(count: u32, sent: u64, ended: u64, total: u64, between: u64) -> Event {
        Event {
            time_ns: ended * MS,
            kind: EventKind::LateRtt as u32,
            count,
            total,
            burst_began_ns: sent.saturating_sub(2) * MS,
            burst_ended_ns: sent * MS,
            burst_bytes: between,
            ..Event::default()
        }
    }

    fn rtt_sample(sent: u64, acknowledged: u64, waited: u64) -> Option<RttSample> {
        Some(RttSample {
            sent: Nanos(sent * MS),
            acknowledged: Nanos(acknowledged * MS),
            total: Duration::from_millis(waited),
        })
    }

    /// Ten round trips of 1 ms and 10,000 bytes by 100 ms. Then what a second snapshot reports, at 120 ms, with 14,000 more.
    fn change_after(event: Event, count: u64, sum: u64, last: u64) -> Change {
        let mut memory = FlowHistory::default();
        memory.tcp(Nanos(99 * MS), &snapshot(9, 9, 1, 9_000, 99));
        memory.tcp(Nanos(100 * MS), &snapshot(10, 10, 1, 10_000, 100));
        memory.handle_late_rtt(&event);
        memory.tcp(Nanos(120 * MS), &snapshot(count, 10 + sum, last, 24_000, 120)).unwrap().0
    }

    fn spans(change: &Change) -> Vec<(u64, u64, u64)> {
        let spans = change.spans.iter().filter(|(.., bytes)| *bytes > 0);
        spans.map(|(from, to, bytes)| (from.0 / MS, to.0 / MS, *bytes)).collect()
    }

    #[test]
    fn reported_late_rtt_is_split_from_the_mean() {
        // Two of 2 ms each, one of 2, then one of 5 that ended at 119.
        let change = change_after(late(14, 114, 119, 18_000, 3_000), 14, 11, 5);
        assert_eq!(
            change.rtt_samples,
            [rtt_sample(110, 112, 4), rtt_sample(112, 114, 2), rtt_sample(114, 119, 5), None]
        );
        assert_eq!(spans(&change), [(100, 112, 5_000), (112, 114, 3_000), (114, 120, 6_000)]);
        assert_eq!(change.rtt.map(|leg| leg.total), Some(Duration::from_millis(11)), "and all in one");
        // One more had ended when the flow was looked at; the one before began before the last look.
        let change = change_after(late(12, 101, 106, 11_000, 3_000), 13, 13, 6);
        assert_eq!(
            change.rtt_samples,
            [None, rtt_sample(99, 101, 2), rtt_sample(101, 106, 5), rtt_sample(106, 112, 6)]
        );
        assert_eq!(spans(&change), [(100, 101, 1_000), (101, 120, 13_000)]);
        // It alone.
        let change = change_after(late(11, 99, 104, 9_000, 3_000), 11, 5, 5);
        assert_eq!(change.rtt_samples, [None, None, rtt_sample(99, 104, 5), None]);
        assert_eq!(spans(&change), [(100, 120, 14_000)]);
    }

    #[test]
    fn events_count_only_where_snapshots_agree() {
        for (event, why) in [
            (late(10, 114, 119, 18_000, 3_000), "the last snapshot had it"),
            (late(15, 114, 119, 18_000, 3_000), "this one has it not"),
            (late(12, 114, 119, 18_000, 3_000), "too many ended since"),
            (late(14, 60, 119, 18_000, 3_000), "it took longer than all"),
            (
                late(14, 114, 119, 9_000, 3_000),
                "it was sent before the last snapshot, and others ended since",
            ),
            (late(14, 114, 119, 25_000, 3_000), "more had passed than by now"),
            (late(14, 121, 126, 18_000, 3_000), "it left after the last packet"),
        ] {
            let change = change_after(event, 14, 11, 5);
            assert_eq!(change.rtt_samples, [None, None, None, change.rtt], "{why}");
            assert_eq!(spans(&change), [(100, 120, 14_000)], "{why}");
            assert!(change.rtt.is_some(), "{why}");
        }
        // A receiver may have waited with such an acknowledgement.
        let change = change_after(late(11, 79, 119, 9_000, 0), 11, 40, 40);
        assert_eq!((change.rtt_samples, change.rtt), ([None; 4], None));
        // Nonsense does no harm.
        let wild = Event {
            count: 14,
            total: u64::MAX,
            time_ns: 3,
            burst_ended_ns: u64::MAX,
            ..late(14, 0, 0, 0, 0)
        };
        assert!(change_after(wild, 14, 11, 5).rtt.is_some());
    }
}
