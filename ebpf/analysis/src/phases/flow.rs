//! Flows as interfaces see them, and the bursts that events and snapshots tell of.

use harmonaize_abi::Nanos;
use harmonaize_events::{Event, FlowKey, Traffic};
use std::time::Duration;

/// Lengths of an acknowledgement on the wire: IPv4 and IPv6, without and with a timestamp; RoCE over both.
const ACK_LENGTHS: [u64; 6] = [54, 66, 74, 86, 62, 82];
/// More bytes are no acknowledgements alone.
const MAX_ACK_BYTES: u64 = 1500;

/// More bytes are no words alone.
const MAX_ANNOUNCEMENT_BYTES: u64 = 1024;

/// Traffic of one direction of a connection without a gap, as one interface saw it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Burst {
    pub(super) began: Nanos,
    pub(super) ended: Nanos,
    pub(super) bytes: u64,
    /// The connection's place in the table.
    pub(super) connection: u32,
    /// From the connection's second end to its first.
    pub(super) reverse: bool,
    /// Seen leaving the sender, and not coming in at the receiver.
    pub(super) leaving: bool,
    /// Its bytes count: nobody else tells of them.
    pub(super) is_counted: bool,
}

impl Burst {
    /// Whether it is words alone: some messages of 48 or 64 bytes with their headers and acknowledgements.
    pub(super) const fn is_announcement(&self) -> bool {
        self.bytes <= MAX_ANNOUNCEMENT_BYTES
    }

    /// Whether it may be acknowledgements alone.
    pub(super) fn is_ack_only(&self) -> bool {
        self.bytes <= MAX_ACK_BYTES && ACK_LENGTHS.iter().any(|length| self.bytes.is_multiple_of(*length))
    }
}

/// One direction of a flow.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Side {
    /// The running burst, as far as it is known; `began` 0 before the first.
    pub(super) began: Nanos,
    pub(super) last: Nanos,
    pub(super) bytes: u64,
    /// When the last snapshot with this burst was taken; 0 when none was.
    pub(super) snapshot_at: Nanos,
    /// A snapshot that knows of a burst whose event has not come.
    pending_burst: Option<Running>,
    /// Counters at the last snapshot, and as they were told last.
    pub(super) quality: Quality,
    reported_quality: Quality,
}

/// A running burst, by a snapshot.
#[derive(Debug, Clone, Copy)]
struct Running {
    began: Nanos,
    last: Nanos,
    bytes: u64,
    snapshot_at: Nanos,
}

/// What tells how well an edge works; counts since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Quality {
    pub(super) rtt_count: u64,
    pub(super) rtt_sum: Duration,
    pub(super) retransmissions: u64,
}

/// A stretch that has ended: when it began and ended, and its bytes.
pub(super) type Ended = (Nanos, Nanos, u64);

impl Side {
    /// The flow's first packet passed.
    pub(super) fn flow_began(&mut self, time: Nanos) {
        if self.began == Nanos(0) {
            (self.began, self.last) = (time, time);
            self.catch_up();
        }
    }

    /// A burst began, and one before has ended; there may be one more that only a snapshot knew of. `lost` says that an event is
    /// missing before this one.
    pub(super) fn burst_began(&mut self, event: &Event, lost: &mut bool) -> [Option<Ended>; 2] {
        let time = Nanos(event.time_ns);
        if time <= self.began {
            return [None, None];
        }
        let before = (Nanos(event.burst_began_ns), Nanos(event.burst_ended_ns), event.burst_bytes);
        let missed = self.began != Nanos(0) && before.0 > self.began;
        let missed = missed.then_some((self.began, self.last, self.bytes));
        *lost |= missed.is_some();
        (self.began, self.last) = (time, time);
        (self.bytes, self.snapshot_at) = (0, Nanos(0));
        self.catch_up();
        // A burst that was reported as missed before may come again.
        [missed, (before.0 != Nanos(0) && before.0 <= before.1 && before.1 < time).then_some(before)]
    }

    fn catch_up(&mut self) {
        if let Some(ahead) = self.pending_burst
            && ahead.began <= self.began
        {
            self.pending_burst = None;
            if ahead.began == self.began {
                self.adopt(&ahead);
            }
        }
    }

    fn adopt(&mut self, running: &Running) {
        self.began = running.began;
        self.last = running.last;
        self.bytes = running.bytes;
        self.snapshot_at = running.snapshot_at;
    }

    /// A snapshot was taken. Says which burst has ended, where its event never came.
    pub(super) fn snapshot(&mut self, time: Nanos, traffic: &Traffic, lost: &mut bool) -> Option<Ended> {
        if traffic.first_ns == 0 || traffic.burst_began_ns == 0 || traffic.last_ns < traffic.burst_began_ns {
            return None;
        }
        let running = Running {
            began: Nanos(traffic.burst_began_ns),
            last: Nanos(traffic.last_ns),
            bytes: traffic.bytes.saturating_sub(traffic.burst_after),
            snapshot_at: time,
        };
        if self.began == Nanos(0) || running.began == self.began {
            self.adopt(&running);
            return None;
        }
        if running.began < self.began {
            return None;
        }
        // Its event may still come, as events and snapshots are read one after the other.
        let ahead = self.pending_burst.replace(running).filter(|ahead| ahead.began != running.began)?;
        let ended = (self.began, self.last, self.bytes);
        self.adopt(&ahead);
        *lost = true;
        Some(ended)
    }

    /// What has come to its counters since this was last asked.
    pub(super) fn quality_since(&mut self) -> Quality {
        let (now, before) = (self.quality, std::mem::replace(&mut self.reported_quality, self.quality));
        Quality {
            rtt_count: now.rtt_count.saturating_sub(before.rtt_count),
            rtt_sum: now.rtt_sum.saturating_sub(before.rtt_sum),
            retransmissions: now.retransmissions.saturating_sub(before.retransmissions),
        }
    }

    /// Returns the running burst, and whether all of it is known. It is where snapshots were taken of everything since, and had
    /// no more of it.
    pub(super) fn running(&self, swept: Nanos, timeout: Duration, now: Nanos) -> Option<(Ended, bool)> {
        if self.began == Nanos(0) {
            return None;
        }
        let known = self.snapshot_at != Nanos(0) && self.snapshot_at < swept && self.last < swept;
        let given_up = self.last.max(self.snapshot_at).after(timeout) < now;
        Some(((self.began, self.last, self.bytes), known || given_up))
    }
}

/// A connection, whoever sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Ends {
    pub(super) first: ([u32; 4], u32),
    pub(super) second: ([u32; 4], u32),
    protocol: u8,
}

impl Ends {
    /// The connection of a flow, and whether what leaves the interface goes from its second end to its first.
    pub(super) fn of(key: &FlowKey) -> (Self, bool) {
        let (mut local, mut remote) =
            ((key.local, u32::from(key.local_port)), (key.remote, u32::from(key.remote_port)));
        if key.queue_pair != 0 {
            // What goes to a queue pair is all that its packets tell: the other direction is another connection.
            let incoming = key.direction == harmonaize_events::Direction::Ingress as u8;
            let receiver = if incoming { &mut local } else { &mut remote };
            receiver.1 = key.queue_pair | 1 << 31;
        }
        let protocol = key.protocol;
        let reverse = local > remote;
        let (first, second) = if reverse { (remote, local) } else { (local, remote) };
        (Self { first, second, protocol }, reverse)
    }
}

/// A flow at an interface.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flow {
    pub(super) observer: u64,
    pub(super) key: FlowKey,
    pub(super) connection: u32,
    /// What leaves goes from the connection's second end to its first.
    pub(super) reverse: bool,
    pub(super) ingress: Side,
    pub(super) egress: Side,
    pub(super) last_seen: Nanos,
    pub(super) owned: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traffic(began: u64, last: u64, bytes: u64, after: u64) -> Traffic {
        let first_ns = 1;
        Traffic {
            first_ns,
            burst_began_ns: began,
            last_ns: last,
            bytes,
            burst_after: after,
            ..Traffic::default()
        }
    }

    fn event(time_ns: u64, began: u64, ended: u64, bytes: u64) -> Event {
        Event {
            time_ns,
            burst_began_ns: began,
            burst_ended_ns: ended,
            burst_bytes: bytes,
            ..Event::default()
        }
    }

    const GAP: Duration = Duration::from_nanos(1000);

    fn ended(began: u64, ended: u64, bytes: u64) -> Ended {
        (Nanos(began), Nanos(ended), bytes)
    }

    #[test]
    fn events_give_bursts_snapshots_the_running_one() {
        let (mut side, mut lost) = (Side::default(), false);
        side.flow_began(Nanos(10));
        assert_eq!(side.snapshot(Nanos(20), &traffic(10, 18, 500, 0), &mut lost), None);
        assert_eq!(side.running(Nanos(20), GAP, Nanos(25)), Some((ended(10, 18, 500), false)));
        assert_eq!(side.running(Nanos(30), GAP, Nanos(31)), Some((ended(10, 18, 500), true)));
        assert_eq!(side.burst_began(&event(50, 10, 19, 700), &mut lost), [None, Some(ended(10, 19, 700))]);
        assert_eq!(side.running(Nanos(60), GAP, Nanos(61)), Some((ended(50, 50, 0), false)));
        assert_eq!(side.running(Nanos(60), GAP, Nanos(1051)), Some((ended(50, 50, 0), true)));
        assert!(!lost);
        // The snapshot is read before the event: both tell the same in the end.
        assert_eq!(side.snapshot(Nanos(90), &traffic(80, 88, 1700, 1000), &mut lost), None);
        assert_eq!(side.running(Nanos(60), GAP, Nanos(95)), Some((ended(50, 50, 0), false)));
        assert_eq!(side.burst_began(&event(80, 50, 60, 300), &mut lost), [None, Some(ended(50, 60, 300))]);
        assert_eq!(side.running(Nanos(100), GAP, Nanos(100)), Some((ended(80, 88, 700), true)));
        assert!(!lost);
    }

    #[test]
    fn lost_events_are_inferred_and_flagged() {
        let (mut side, mut lost) = (Side::default(), false);
        side.flow_began(Nanos(10));
        side.snapshot(Nanos(20), &traffic(10, 18, 500, 0), &mut lost);
        // The event at 40 was lost.
        let found = side.burst_began(&event(80, 40, 60, 300), &mut lost);
        assert_eq!((found, lost), ([Some(ended(10, 18, 500)), Some(ended(40, 60, 300))], true));
        // Those at 100 and 140 are: snapshots tell.
        lost = false;
        assert_eq!(side.snapshot(Nanos(120), &traffic(100, 118, 2000, 1000), &mut lost), None);
        assert_eq!(
            side.snapshot(Nanos(160), &traffic(140, 158, 4000, 3000), &mut lost),
            Some(ended(80, 80, 0))
        );
        assert!(lost);
        assert_eq!(side.running(Nanos(160), GAP, Nanos(160)).unwrap().0, ended(100, 118, 1000));
        // Old news changes nothing.
        assert_eq!(side.burst_began(&event(90, 80, 85, 1), &mut lost), [None, None]);
    }

    #[test]
    fn both_ends_see_one_connection() {
        let (a, b) = (FlowKey::mapped(1), FlowKey::mapped(2));
        let key =
            FlowKey { local: a, remote: b, local_port: 5, remote_port: 6, protocol: 6, ..FlowKey::default() };
        let other = FlowKey { local: b, remote: a, local_port: 6, remote_port: 5, interface: 9, ..key };
        assert_eq!(Ends::of(&key).0, Ends::of(&other).0);
        assert_ne!(Ends::of(&key).1, Ends::of(&other).1);
        let roce =
            FlowKey { local: a, remote: b, queue_pair: 77, protocol: 17, direction: 2, ..FlowKey::default() };
        let other = FlowKey { local: b, remote: a, direction: 1, ..roce };
        assert_eq!(Ends::of(&roce).0, Ends::of(&other).0);
        let back = FlowKey { direction: 1, ..roce };
        assert_ne!(Ends::of(&roce).0, Ends::of(&back).0);
    }

    #[test]
    fn messages_are_distinguished_from_acks() {
        let acknowledges = |bytes| Burst { bytes, ..Burst::default() }.is_ack_only();
        assert!([66, 132, 54, 86].into_iter().all(acknowledges));
        assert!(![114, 228, 107_568, 340].into_iter().any(acknowledges));
    }
}
