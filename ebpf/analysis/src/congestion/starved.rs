//! Paths that are starved. What is sent over them is acknowledged late, and much less of it than they have carried. Of a path
//! that others congest that is seldom wrong, while round trips alone, and bytes over some milliseconds, look alike with others
//! and without.

use super::Limits;
use super::bins::{length, number_at};
use super::monitor::{Monitor, per_second};
use harmonaize_abi::Nanos;
use std::time::Duration;

/// Over so long it was so, at least. That is so many bins, whose first and last are inexact, and so many of the shortest queues that
/// are news.
const STARVED: Duration = length(6);
const STARVED_UNITS: u32 = 2;
/// Longer than this says nothing of now; neither does what was acknowledged longer ago than the other.
const MAX_PERIOD: Duration = Duration::from_millis(90);
const AGE: Duration = Duration::from_millis(10);
/// Of that time, in percent, something measured was on its way: else the sender has paused.
const WAITED: u32 = 50;
/// Too little is less than this part of what the link carries.
const STARVED_PART: f64 = 0.72;
/// Less than this part is no traffic to speak of. It finds the queues of others of ours, or late acknowledgements.
const MIN_PART: f64 = 0.1;
/// The path has carried so much of what is stated, of a million, over so many bins. Otherwise some other place is narrower.
const ABOUT_ALL_PPM: u64 = 800_000;
const CARRIED_BINS: u64 = 40;
/// Round trips that are kept.
const MAX_SAMPLES: usize = 12;

/// What the round trips between two looks at a connection told; at most one is under way at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RttSample {
    /// When the last of those that it measures was sent.
    pub(super) sent: Nanos,
    /// When the last of those that it measures was acknowledged.
    pub(super) acknowledged: Nanos,
    /// All of them together.
    pub(super) total: Duration,
}

impl RttSample {
    /// How long one took: the last, or what stands for it.
    pub(super) fn took(&self) -> Duration {
        self.acknowledged.since(self.sent)
    }
}

/// The latest round trips, the newest last, and the one that is under way.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RttHistory {
    samples: [RttSample; MAX_SAMPLES],
    pending: Option<RttSample>,
}

impl RttHistory {
    /// Round trips have ended.
    pub(super) fn push(&mut self, leg: RttSample) {
        self.samples.rotate_left(1);
        if let Some(last) = self.samples.last_mut() {
            *last = leg;
        }
        self.pending = None;
    }

    /// What was sent at a time is not acknowledged by `now`.
    pub(super) fn set_pending(&mut self, sent: Nanos, now: Nanos) {
        let waited = now.since(sent);
        self.pending = Some(RttSample { sent, acknowledged: now, total: waited });
    }
}

/// A while in which all round trips were late. What was sent in one span of time was acknowledged in another one, or later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LatePeriod {
    /// When the first of it was sent.
    pub(super) from: Nanos,
    /// When the last of it was sent.
    pub(super) until: Nanos,
    /// When the last of it was acknowledged.
    pub(super) acknowledged: Nanos,
    /// The least time from the acknowledgement of what was sent before to the acknowledgement of all of it.
    pub(super) took: Duration,
}

impl Monitor {
    /// How much later than at rest an acknowledgement is late.
    fn is_late(&self, trip: Duration) -> bool {
        let late = |rest: Duration| trip >= rest.saturating_add(rest.max(self.late));
        self.min_rtt.min().is_some_and(late)
    }

    /// Whether the path has carried about all that is stated.
    pub(super) fn fills_link(&self) -> bool {
        !self.is_interface() && self.max_utilization_ppm.max() >= Some(ABOUT_ALL_PPM)
    }

    /// The last while in which all that was measured was late. It is there only where the path has carried about all that is
    /// stated.
    pub(super) fn late_period(&self, end: Nanos) -> Option<LatePeriod> {
        if !self.fills_link() {
            return None;
        }
        let late = |leg: &RttSample| self.is_late(leg.took());
        let open = self.rtt_history.pending.filter(late);
        let mut legs = open.into_iter().chain(self.rtt_history.samples.iter().rev().copied());
        let last = legs.next().filter(late)?;
        if end.since(last.acknowledged) >= AGE {
            return None;
        }
        let (mut waited, least) = (last.total, STARVED.max(STARVED_UNITS * self.unit));
        for leg in legs {
            let took = last.acknowledged.since(leg.acknowledged);
            if took >= least {
                let waited = waited.saturating_mul(100) >= took.saturating_mul(WAITED);
                let (from, until, acknowledged) = (leg.sent, last.sent, last.acknowledged);
                let of = LatePeriod { from, until, acknowledged, took };
                return Some(of).filter(|_| waited && took <= MAX_PERIOD);
            }
            if !late(&leg) {
                return None;
            }
            waited = waited.saturating_add(leg.total);
        }
        None
    }

    /// Whether in that while too little passed to fill a link of a capacity: what was sent explains no queue.
    pub(super) fn has_room(&self, late: &LatePeriod, capacity: u64) -> bool {
        self.used_part(late, capacity) < STARVED_PART
    }

    /// The same while it was acknowledged. Paths of an interface may have queues apart: one is served while another's sender pauses.
    pub(super) fn had_room(&self, late: &LatePeriod, capacity: u64) -> bool {
        let (from, until) = (late.acknowledged.before(late.took), late.acknowledged);
        self.has_room(&LatePeriod { from, until, ..*late }, capacity)
    }

    /// Whether there was anything to speak of.
    pub(super) fn has_traffic(&self, late: &LatePeriod, capacity: u64) -> bool {
        self.used_part(late, capacity) >= MIN_PART
    }

    fn used_part(&self, late: &LatePeriod, capacity: u64) -> f64 {
        let mut bytes = 0;
        self.sent_between(late.from, late.until, |_, seen, _| bytes += seen);
        per_second(bytes, late.took) as f64 / capacity.max(1) as f64
    }

    /// Takes note of what the path carries at most.
    pub(super) fn update_carried(&mut self, end: Nanos, stated: u64, limits: &Limits) {
        if stated == 0 {
            return;
        }
        // What passed in the millisecond under way is not all there yet.
        let last = number_at(self.last_seen).saturating_sub(1);
        let bytes: u64 = self.bins.before(last, CARRIED_BINS).map(|(_, bin)| bin.observed_bytes()).sum();
        let ppm = u128::from(per_second(bytes, length(CARRIED_BINS))) * 1_000_000 / u128::from(stated);
        let ppm = u64::try_from(ppm).unwrap_or(u64::MAX);
        self.max_utilization_ppm.update(end, limits.min_rtt_window, ppm, u64::max);
    }

    /// Whether a long queue may stand on a path that has carried about all that is stated. A closer sample would show whether it
    /// is starved.
    pub(super) fn may_be_starved(&self) -> bool {
        self.fills_link()
            && !self.measure.signals.starved
            && (self.is_late(self.measure.rtt) || self.was_late())
    }

    /// Whether the latest round trip was late, however long those took that ended with it.
    fn was_late(&self) -> bool {
        let lately = |leg: &&RttSample| self.measured.since(leg.acknowledged) < AGE;
        self.rtt_history.samples.last().filter(lately).is_some_and(|leg| self.is_late(leg.took()))
    }
}
