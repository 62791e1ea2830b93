//! Paths that are starved: what is sent over them is acknowledged late, and much less of it than they have carried. Of a path that
//! others congest that is seldom wrong, while round trips alone, and bytes over some milliseconds, look alike with others and without.

use super::Limits;
use super::bins::BIN_NS;
use super::monitor::{Monitor, per_second};

/// Over so long it was so, at least.
const STARVED_NS: u64 = 6_000_000;
/// Longer than this says nothing of now; neither does what was acknowledged longer ago than the other.
const MAX_PERIOD_NS: u64 = 90_000_000;
const AGE_NS: u64 = 10_000_000;
/// Of that time, in percent, something measured was on its way: else the sender has paused.
const WAITED: u64 = 50;
/// Too little is less than this part of what the link carries.
const STARVED_PART: f64 = 0.72;
/// Less than this part is no traffic to speak of, which finds the queues of others of ours, or late acknowledgements.
const MIN_PART: f64 = 0.1;
/// The path has carried so much of what is stated, of a million, over so many bins, or some other place is narrower.
const ABOUT_ALL_PPM: u64 = 800_000;
const CARRIED_BINS: u64 = 40;
/// Round trips that are kept.
const MAX_SAMPLES: usize = 12;

/// What the round trips between two looks at a connection told; at most one is under way at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RttSample {
    /// When the last of those that it measures was sent,
    pub(super) sent_ns: u64,
    /// and acknowledged.
    pub(super) acknowledged_ns: u64,
    /// All of them together.
    pub(super) total_ns: u64,
}

impl RttSample {
    /// How long one took: the last, or what stands for it.
    pub(super) fn took_ns(&self) -> u64 {
        self.acknowledged_ns.saturating_sub(self.sent_ns)
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

    /// What was sent at a time is not acknowledged by `now_ns`.
    pub(super) fn set_pending(&mut self, sent_ns: u64, now_ns: u64) {
        let waited_ns = now_ns.saturating_sub(sent_ns);
        self.pending = Some(RttSample { sent_ns, acknowledged_ns: now_ns, total_ns: waited_ns });
    }
}

/// A while in which all round trips were late. What was sent in one span of time was acknowledged in another one, or later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LatePeriod {
    /// From when
    pub(super) from_ns: u64,
    /// until when it was sent,
    pub(super) until_ns: u64,
    /// and how long it took until that was acknowledged, from when what was sent before was; at least.
    pub(super) took_ns: u64,
}

impl Monitor {
    /// How much later than at rest an acknowledgement is late.
    fn is_late(&self, trip_ns: u64, limits: &Limits) -> bool {
        let late = |rest: u64| trip_ns >= rest.saturating_add(rest.max(limits.severe_delay_ns / 2));
        self.min_rtt.min().is_some_and(late)
    }

    /// Whether the path has carried about all that is stated.
    pub(super) fn fills_link(&self) -> bool {
        !self.is_interface() && self.max_utilization_ppm.max() >= Some(ABOUT_ALL_PPM)
    }

    /// The last while in which all that was measured was late, where the path has carried about all that is stated.
    pub(super) fn late_period(&self, end_ns: u64, limits: &Limits) -> Option<LatePeriod> {
        if !self.fills_link() {
            return None;
        }
        let late = |leg: &RttSample| self.is_late(leg.took_ns(), limits);
        let open = self.rtt_history.pending.filter(late);
        let mut legs = open.into_iter().chain(self.rtt_history.samples.iter().rev().copied());
        let last = legs.next().filter(late)?;
        if end_ns.saturating_sub(last.acknowledged_ns) >= AGE_NS {
            return None;
        }
        let mut waited_ns = last.total_ns;
        for leg in legs {
            let took_ns = last.acknowledged_ns.saturating_sub(leg.acknowledged_ns);
            if took_ns >= STARVED_NS {
                let waited = waited_ns.saturating_mul(100) >= took_ns.saturating_mul(WAITED);
                let of = LatePeriod { from_ns: leg.sent_ns, until_ns: last.sent_ns, took_ns };
                return Some(of).filter(|_| waited && took_ns <= MAX_PERIOD_NS);
            }
            if !late(&leg) {
                return None;
            }
            waited_ns = waited_ns.saturating_add(leg.total_ns);
        }
        None
    }

    /// Whether in that while too little passed to fill a link of a capacity: what was sent explains no queue.
    pub(super) fn has_room(&self, late: &LatePeriod, capacity: u64) -> bool {
        self.used_part(late, capacity) < STARVED_PART
    }

    /// Whether there was anything to speak of.
    pub(super) fn has_traffic(&self, late: &LatePeriod, capacity: u64) -> bool {
        self.used_part(late, capacity) >= MIN_PART
    }

    fn used_part(&self, late: &LatePeriod, capacity: u64) -> f64 {
        let mut bytes = 0;
        self.sent_between(late.from_ns, late.until_ns, |_, seen, _| bytes += seen);
        per_second(bytes, late.took_ns) as f64 / capacity.max(1) as f64
    }

    /// Takes note of what the path carries at most.
    pub(super) fn update_carried(&mut self, end_ns: u64, stated: u64, limits: &Limits) {
        if stated == 0 {
            return;
        }
        // What passed in the millisecond under way is not all there yet.
        let last = (self.last_seen_ns / BIN_NS).saturating_sub(1);
        let bytes: u64 = self.bins.before(last, CARRIED_BINS).map(|(_, bin)| bin.observed_bytes()).sum();
        let ppm = u128::from(per_second(bytes, CARRIED_BINS * BIN_NS)) * 1_000_000 / u128::from(stated);
        let ppm = u64::try_from(ppm).unwrap_or(u64::MAX);
        self.max_utilization_ppm.update(end_ns, limits.min_rtt_window_ns, ppm, u64::max);
    }

    /// Whether a long queue may stand on a path that has carried about all that is stated, and a closer look would tell whether it
    /// is starved.
    pub(super) fn may_be_starved(&self, limits: &Limits) -> bool {
        self.fills_link()
            && !self.measure.signals.starved
            && (self.is_late(self.measure.rtt_ns, limits) || self.was_late(limits))
    }

    /// Whether the latest round trip was late, however long those took that ended with it.
    fn was_late(&self, limits: &Limits) -> bool {
        let lately = |leg: &&RttSample| self.measured_ns.saturating_sub(leg.acknowledged_ns) < AGE_NS;
        self.rtt_history.samples.last().filter(lately).is_some_and(|leg| self.is_late(leg.took_ns(), limits))
    }
}
