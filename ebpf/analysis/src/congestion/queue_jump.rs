//! Queues that leap up: a late round trip, as the programs report it at once. What the connection sent since the one before does not
//! explain it. That is said too soon to be sure, for a path that carries about all that is stated: whoever acts on it has it proven.

use super::Limits;
use super::bins::number_at;
use super::monitor::Monitor;
use super::starved::RttSample;
use harmonaize_abi::Nanos;
use harmonaize_events::Event;
use std::time::Duration;

/// How much of the queue that it found is not of the connection. In tenths of the shortest queue that is news. More no queue
/// grows by between two round trips: a host stood still.
const UNEXPLAINED: std::ops::Range<u32> = 10..27;
/// The least that is left beyond the wait of what it measures for itself, in the same tenths. A host may hand over all of that at
/// once.
const MIN_REMAINDER: u32 = 2;
/// Fewer bytes than this between the two are no traffic to speak of: their acknowledgement may have been delayed.
const MIN_BYTES: u64 = 4 << 10;
/// An event is of now for so long.
const MAX_AGE: Duration = Duration::from_millis(10);
/// Recent bins over which another path moved little of what its interface moved. That is one part in so many at most: what it sent
/// since is not known.
const RECENT_BINS: u64 = 40;
const MAX_OTHER_PART: u64 = 4;

/// A late round trip that was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueJump {
    pub(super) rtt: RttSample,
    /// The bytes that left from when the one before began until it had begun. They are all that can be in a queue of what the
    /// connection sent.
    bytes: u64,
    /// The last of it, and how long before that the one before had ended.
    size: u64,
    paused: Duration,
}

impl QueueJump {
    pub(super) fn from_event(event: &Event) -> Self {
        let (sent, acknowledged) = (Nanos(event.burst_ended_ns), Nanos(event.time_ns));
        let rtt = RttSample { sent, acknowledged, total: acknowledged.since(sent) };
        let (bytes, size) = (event.burst_bytes, u64::from(event.size));
        Self { rtt, bytes, size, paused: Duration::from_nanos(event.paused_ns.into()) }
    }

    /// The part of the queue that it found that is not what the connection had sent before. It is over a link of a capacity, and comes with
    /// how long what it measures takes itself.
    ///
    /// When the one before was acknowledged, what had left later than the path at rest takes may have stood in the queue, at most all that was sent
    /// since that one left; and from then on the link has drained it.
    fn unexplained(&self, rest: Duration, capacity: u64) -> (Duration, Duration) {
        let takes = |bytes: u64| {
            let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(capacity.max(1));
            Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
        };
        let own = takes(self.bytes).saturating_sub(rest).saturating_sub(self.paused);
        let queue = self.rtt.took().saturating_sub(rest);
        (queue.saturating_sub(own), takes(self.size))
    }
}

impl Monitor {
    /// Whether a reported round trip shows that others came to this path. The path is its interface's only busy one, as far as is known.
    pub(super) fn is_queue_jump(&self, leap: &QueueJump, whole: &Self, now: Nanos, stated: u64) -> bool {
        let Some(rest) = self.min_rtt.min().filter(|_| stated > 0 && self.fills_link()) else {
            return false;
        };
        let (unexplained, itself) = leap.unexplained(rest, stated);
        let old = now.since(leap.rtt.acknowledged) >= MAX_AGE;
        let tenth = self.unit / 10;
        let alone = unexplained >= itself.saturating_add(MIN_REMAINDER * tenth);
        let grown = (UNEXPLAINED.start * tenth..UNEXPLAINED.end * tenth).contains(&unexplained) && alone;
        grown && !old && leap.bytes >= MIN_BYTES && self.dominates(whole)
    }

    /// Whether hardly anything else passes through its interface.
    pub(super) fn dominates(&self, whole: &Self) -> bool {
        let last = number_at(self.last_seen).saturating_sub(1);
        let lately =
            |of: &Self| of.bins.before(last, RECENT_BINS).map(|(_, bin)| bin.observed_bytes()).sum::<u64>();
        let (all, these) = (lately(whole), lately(self));
        all.saturating_sub(these) <= all / MAX_OTHER_PART
    }

    /// Takes note that it did.
    pub(super) fn on_queue_jump(&mut self, leap: &QueueJump, limits: &Limits) {
        self.record_rtt(leap.rtt.acknowledged, leap.rtt, limits);
        (self.queue_jumped, self.updated) = (true, true);
    }
}
