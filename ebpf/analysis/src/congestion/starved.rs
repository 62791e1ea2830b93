//! Paths that are starved: a long queue stands, and what passes is much less than has passed before. Of a path that others congest
//! that is seldom wrong, while round trips alone, and bytes over some milliseconds, look alike with others and without.

use super::Limits;
use super::bins::BIN_NS;
use super::monitor::{Monitor, QUIET, per_second};

/// Bins over which the queue stood and too little passed.
const STARVED: u64 = 8;
/// Too little is less than this part of what the link carries.
const TOO_LITTLE: f64 = 0.72;
/// Less than this part is no traffic to speak of, which finds the queues of others of ours, or late acknowledgements.
const SOMETHING: f64 = 0.2;
/// The path has carried so much of what is stated, of a million, over so many bins, or some other place is narrower.
const ABOUT_ALL_PPM: u64 = 800_000;
const CARRIED: u64 = 40;

impl Monitor {
    /// Whether too little passes to fill the link, so that its own traffic explains no queue.
    pub(super) fn has_room(&self, stated: u64) -> bool {
        self.used(STARVED, stated).is_some_and(|used| used < TOO_LITTLE)
    }

    /// The part of a capacity that was used over so many bins, if they passed without a pause.
    fn used(&self, bins: u64, capacity: u64) -> Option<f64> {
        let last = self.heard_ns / BIN_NS;
        let (mut bytes, mut silence) = (0, 0);
        // What passed in the millisecond under way is not all there yet.
        for (_, bin) in self.bins.before(last.saturating_sub(1), bins) {
            bytes += bin.seen();
            silence = if bin.seen() == 0 { silence + 1 } else { 0 };
            if silence > QUIET {
                return None;
            }
        }
        Some(per_second(bytes, bins * BIN_NS) as f64 / capacity.max(1) as f64)
    }

    /// Whether a long queue stands on a path that has carried about all that is stated: it may be starved.
    fn is_suspect(&self, limits: &Limits) -> bool {
        let long = |rest: u64| self.measure.trip_ns >= rest.saturating_add(limits.severe_delay_ns);
        self.most_ppm.most() >= Some(ABOUT_ALL_PPM) && self.rest.least().is_some_and(long)
    }

    /// Whether a path may be starved, and a closer look would tell.
    pub(super) fn may_be_starved(&self, limits: &Limits) -> bool {
        !self.is_whole() && !self.measure.signals.starved && self.is_suspect(limits)
    }

    /// Whether a long queue stood all the while, and yet the path carried much less than it has carried: about all that is stated.
    pub(super) fn is_starved(&mut self, end_ns: u64, stated: u64, limits: &Limits) -> bool {
        if stated == 0 {
            return false;
        }
        if let Some(used) = self.used(CARRIED, stated) {
            self.most_ppm.take(end_ns, limits.rest_age_ns, (used * 1e6) as u64, u64::max);
        }
        let Some(used) = self.used(STARVED, stated) else { return false };
        let Some(rest) = self.rest.least().filter(|_| self.most_ppm.most() >= Some(ABOUT_ALL_PPM)) else {
            return false;
        };
        let bins = self.bins.before(self.heard_ns / BIN_NS, STARVED + 1);
        let least = bins.filter_map(|(_, bin)| bin.trip).min();
        let stands = least.is_some_and(|trip| trip >= rest.saturating_add(limits.severe_delay_ns));
        stands && (SOMETHING..TOO_LITTLE).contains(&used)
    }
}
