//! Queues that leap up: a round trip that was late after one that was not, as the programs tell at once, where what the connection
//! sent meanwhile does not explain it. That is said too soon to be sure, for a path that carries about all that is stated: whoever acts on it has it proven.

use super::Limits;
use super::bins::BIN_NS;
use super::monitor::Monitor;
use super::starved::Leg;
use harmonaize_events::Event;

/// It found a queue of so much, at least,
const QUEUE_NS: u64 = 3_600_000;
/// of which so much is not of what was sent since the one before. More than the other no queue grows by between two round trips: a host stood still.
const UNEXPLAINED_NS: std::ops::Range<u64> = 1_300_000..6_200_000;
/// Fewer bytes than this between the two are no traffic to speak of: their acknowledgement may have been delayed.
const LITTLE: u64 = 4 << 10;
/// An event is of now for so long.
const NEWS_NS: u64 = 10_000_000;
/// Of what its interface moved over so many bins, another path moved one part in so many at most: what that sent since is not known.
const LATELY: u64 = 40;
const ALONE: u64 = 4;

/// A late round trip that was told, and the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Leap {
    before: Leg,
    pub(super) late: Leg,
    /// What left from when the one before began until it had begun.
    bytes: u64,
}

impl Leap {
    pub(super) fn of(event: &Event) -> Self {
        let leg = |sent_ns: u64, acknowledged_ns: u64| Leg {
            sent_ns,
            acknowledged_ns,
            waited_ns: acknowledged_ns.saturating_sub(sent_ns),
        };
        let sent_ns = event.burst_ended_ns;
        let (before, late) = (leg(event.burst_began_ns, sent_ns), leg(sent_ns, event.time_ns));
        Self { before, late, bytes: event.burst_bytes }
    }

    /// The queue that the late one found, and of that what a link of a capacity had not from before and from what was sent since.
    fn queue(&self, rest_ns: u64, capacity: u64) -> (u64, u64) {
        let queue = |leg: &Leg| leg.took_ns().saturating_sub(rest_ns);
        let sent_ns = u128::from(self.bytes) * 1_000_000_000 / u128::from(capacity.max(1));
        let sent_ns = u64::try_from(sent_ns).unwrap_or(u64::MAX);
        let passed_ns = self.late.sent_ns.saturating_sub(self.before.sent_ns);
        let own_ns = queue(&self.before).saturating_add(sent_ns).saturating_sub(passed_ns);
        (queue(&self.late), queue(&self.late).saturating_sub(own_ns))
    }
}

impl Monitor {
    /// Whether a round trip that was told shows that others came to this path, which is its interface's only busy one, as far as is known.
    pub(super) fn leaps(&self, leap: &Leap, whole: &Self, now_ns: u64, stated: u64) -> bool {
        let Some(rest_ns) = self.rest.least().filter(|_| stated > 0 && self.fills_link()) else {
            return false;
        };
        let (queue_ns, unexplained_ns) = leap.queue(rest_ns, stated);
        let old = now_ns.saturating_sub(leap.late.acknowledged_ns) >= NEWS_NS;
        let grown = queue_ns >= QUEUE_NS && UNEXPLAINED_NS.contains(&unexplained_ns);
        grown && !old && leap.bytes >= LITTLE && self.is_most_of(whole)
    }

    /// Whether hardly anything else passes through its interface.
    fn is_most_of(&self, whole: &Self) -> bool {
        let last = (self.heard_ns / BIN_NS).saturating_sub(1);
        let lately = |of: &Self| of.bins.before(last, LATELY).map(|(_, bin)| bin.seen()).sum::<u64>();
        let (all, these) = (lately(whole), lately(self));
        all.saturating_sub(these) <= all / ALONE
    }

    /// Takes note that it did.
    pub(super) fn leapt(&mut self, leap: &Leap, limits: &Limits) {
        self.trip(leap.late.acknowledged_ns, leap.late, limits);
        (self.leapt, self.fresh) = (true, true);
    }
}
