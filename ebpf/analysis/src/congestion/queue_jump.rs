//! Queues that leap up: a late round trip, as the programs tell at once, where what the connection sent since the one before does not
//! explain it. That is said too soon to be sure, for a path that carries about all that is stated: whoever acts on it has it proven.

use super::Limits;
use super::bins::BIN_NS;
use super::monitor::Monitor;
use super::starved::RttSample;
use harmonaize_events::Event;

/// So much of the queue that it found is not of the connection. More no queue grows by between two round trips: a host stood still.
const UNEXPLAINED_NS: std::ops::Range<u64> = 2_600_000..7_000_000;
/// And so much is left where what it measures, which a host may hand over all at once, waited for itself.
const MIN_REMAINDER_NS: u64 = 500_000;
/// Fewer bytes than this between the two are no traffic to speak of: their acknowledgement may have been delayed.
const MIN_BYTES: u64 = 4 << 10;
/// An event is of now for so long.
const MAX_AGE_NS: u64 = 10_000_000;
/// Of what its interface moved over so many bins, another path moved one part in so many at most: what that sent since is not known.
const RECENT_BINS: u64 = 40;
const MAX_OTHER_PART: u64 = 4;

/// A late round trip that was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueJump {
    pub(super) rtt: RttSample,
    /// What left from when the one before began until it had begun: all that can be in a queue of what the connection sent.
    bytes: u64,
    /// The last of it, and how long before that the one before had ended.
    size: u64,
    paused_ns: u64,
}

impl QueueJump {
    pub(super) fn from_event(event: &Event) -> Self {
        let (sent_ns, acknowledged_ns) = (event.burst_ended_ns, event.time_ns);
        let rtt = RttSample { sent_ns, acknowledged_ns, total_ns: acknowledged_ns.saturating_sub(sent_ns) };
        let (bytes, size) = (event.burst_bytes, u64::from(event.size));
        Self { rtt, bytes, size, paused_ns: event.paused_ns.into() }
    }

    /// Of the queue that it found, what is not of what the connection had sent before, over a link of a capacity; and how long what it measures takes itself.
    ///
    /// When the one before was acknowledged, what had left later than the path at rest takes may have stood in the queue, at most all that was sent
    /// since that one left; and from then on the link has drained it.
    fn unexplained(&self, rest_ns: u64, capacity: u64) -> (u64, u64) {
        let takes_ns = |bytes: u64| {
            let time_ns = u128::from(bytes) * 1_000_000_000 / u128::from(capacity.max(1));
            u64::try_from(time_ns).unwrap_or(u64::MAX)
        };
        let own_ns = takes_ns(self.bytes).saturating_sub(rest_ns).saturating_sub(self.paused_ns);
        let queue_ns = self.rtt.took_ns().saturating_sub(rest_ns);
        (queue_ns.saturating_sub(own_ns), takes_ns(self.size))
    }
}

impl Monitor {
    /// Whether a round trip that was told shows that others came to this path, which is its interface's only busy one, as far as is known.
    pub(super) fn is_queue_jump(&self, leap: &QueueJump, whole: &Self, now_ns: u64, stated: u64) -> bool {
        let Some(rest_ns) = self.min_rtt.min().filter(|_| stated > 0 && self.fills_link()) else {
            return false;
        };
        let (unexplained_ns, itself_ns) = leap.unexplained(rest_ns, stated);
        let old = now_ns.saturating_sub(leap.rtt.acknowledged_ns) >= MAX_AGE_NS;
        let alone = unexplained_ns >= itself_ns.saturating_add(MIN_REMAINDER_NS);
        let grown = UNEXPLAINED_NS.contains(&unexplained_ns) && alone;
        grown && !old && leap.bytes >= MIN_BYTES && self.dominates(whole)
    }

    /// Whether hardly anything else passes through its interface.
    fn dominates(&self, whole: &Self) -> bool {
        let last = (self.last_seen_ns / BIN_NS).saturating_sub(1);
        let lately =
            |of: &Self| of.bins.before(last, RECENT_BINS).map(|(_, bin)| bin.observed_bytes()).sum::<u64>();
        let (all, these) = (lately(whole), lately(self));
        all.saturating_sub(these) <= all / MAX_OTHER_PART
    }

    /// Takes note that it did.
    pub(super) fn on_queue_jump(&mut self, leap: &QueueJump, limits: &Limits) {
        self.record_rtt(leap.rtt.acknowledged_ns, leap.rtt, limits);
        (self.queue_jumped, self.updated) = (true, true);
    }
}
