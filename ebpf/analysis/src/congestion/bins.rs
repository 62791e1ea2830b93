//! What crossed a link lately, by the millisecond.

use crate::nanos;
use harmonaize_abi::Nanos;
use std::time::Duration;

/// The length of a bin.
pub(super) const BIN: Duration = Duration::from_nanos(BIN_NS);
/// The same in nanoseconds: what is done for each bin is plain arithmetic.
const BIN_NS: u64 = 1_000_000;
/// How many are kept.
pub(super) const BINS: usize = 128;
/// Over so many at most an amount is spread: what is read more seldom tells nothing of single ones.
const MAX_SPREAD_BINS: u64 = 96;
/// No amount in a bin grows beyond this, so that sums do not overflow.
const MAX_AMOUNT: u64 = 1 << 50;

/// The length of so many bins.
pub(super) const fn length(bins: u64) -> Duration {
    Duration::from_nanos(bins * BIN_NS)
}

/// How many bins are over in such a time.
pub(super) fn count(span: Duration) -> u64 {
    nanos(span) / BIN_NS
}

/// The number of the bin of a time.
pub(super) const fn number_at(time: Nanos) -> u64 {
    time.0 / BIN_NS
}

/// When a bin begins.
pub(super) const fn begin_of(number: u64) -> Nanos {
    Nanos(number.saturating_mul(BIN_NS))
}

/// Adds to an amount in a bin.
pub(super) fn add(amount: &mut u64, more: u64) {
    *amount = amount.saturating_add(more).min(MAX_AMOUNT);
}

/// A millisecond.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Bin {
    /// Bytes of own communicators.
    pub(super) own: u64,
    /// Bytes of other flows.
    pub(super) cross_traffic: u64,
    /// Bytes of everything, by the interface's totals.
    pub(super) total: u64,
    /// Packets of flows.
    pub(super) packets: u64,
    /// Of those, marked; and notifications.
    pub(super) ecn_ce: u64,
    /// Packets lost, or sent again.
    pub(super) lost: u64,
    /// The least round trip that was measured now.
    pub(super) rtt: Option<Duration>,
    /// What was sent now, at a time, found a queue of so much time: the least.
    pub(super) queue: Option<QueueSample>,
}

/// A queue that a packet found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueSample {
    /// When it was sent.
    pub(super) sent: Nanos,
    /// How much longer than at rest it was on its way.
    pub(super) delay: Duration,
}

impl Bin {
    /// Bytes that were seen, one way or another.
    pub(super) fn observed_bytes(&self) -> u64 {
        (self.own + self.cross_traffic).max(self.total)
    }
}

/// A ring of bins that ends at the latest time it has heard of.
#[derive(Debug, Clone)]
pub(super) struct Bins {
    bins: Box<[Bin; BINS]>,
    /// The number of the latest bin; bin `n` begins `n` milliseconds after time 0.
    latest: u64,
}

impl Bins {
    pub(super) fn new(now: Nanos) -> Self {
        Self { bins: Box::new([Bin::default(); BINS]), latest: number_at(now) }
    }

    /// The number of the latest bin.
    pub(super) fn latest(&self) -> u64 {
        self.latest
    }

    fn slot(number: u64) -> usize {
        usize::try_from(number % BINS as u64).unwrap_or_default()
    }

    /// Moves the end to a time; what is older than the ring is forgotten.
    pub(super) fn advance(&mut self, now: Nanos) {
        let number = number_at(now);
        if number <= self.latest {
            return;
        }
        let first = number.saturating_sub(BINS as u64 - 1).max(self.latest + 1);
        for number in first..=number {
            if let Some(bin) = self.bins.get_mut(Self::slot(number)) {
                *bin = Bin::default();
            }
        }
        self.latest = number;
    }

    /// The bin of a time; none where that is too long ago.
    pub(super) fn at(&mut self, time: Nanos) -> Option<&mut Bin> {
        self.advance(time);
        let number = number_at(time);
        if self.latest - number >= BINS as u64 {
            return None;
        }
        self.bins.get_mut(Self::slot(number))
    }

    /// A bin by its number; none where that is too long ago, or yet to come.
    pub(super) fn number(&self, number: u64) -> Option<&Bin> {
        let age = self.latest.checked_sub(number)?;
        if age >= BINS as u64 { None } else { self.bins.get(Self::slot(number)) }
    }

    /// The `length` bins up to and with a number, newest first; those that are not there any more left out.
    pub(super) fn before(&self, number: u64, length: u64) -> impl Iterator<Item = (u64, &Bin)> {
        let first = (number + 1).saturating_sub(length);
        (first..=number).rev().filter_map(|number| Some((number, self.number(number)?)))
    }

    /// Adds amounts evenly over a span of time, in the bins that are kept.
    pub(super) fn spread(
        &mut self,
        from: Nanos,
        to: Nanos,
        amount: u64,
        mut give: impl FnMut(&mut Bin, u64),
    ) {
        self.advance(to);
        let (from_ns, to_ns) = (from.0, to.0);
        let last = to_ns / BIN_NS;
        let oldest = self.latest.saturating_sub(MAX_SPREAD_BINS - 1);
        let first = (from_ns.min(to_ns) / BIN_NS).max(oldest);
        if first == last || last < first {
            if let Some(bin) = self.at(to) {
                give(bin, amount);
            }
            return;
        }
        // One division for all bins that are full, whatever their number.
        let length = u128::from((to_ns - from_ns.min(to_ns)).max(1));
        let part =
            |nanos: u64| u64::try_from(u128::from(amount) * u128::from(nanos) / length).unwrap_or(amount);
        let full = part(BIN_NS);
        let mut left = amount;
        for number in first..=last {
            let begin_ns = number * BIN_NS;
            let share = if number == last && first * BIN_NS <= from_ns {
                left
            } else if number == last {
                part(to_ns - begin_ns)
            } else if begin_ns < from_ns {
                part((begin_ns + BIN_NS).saturating_sub(from_ns))
            } else {
                full
            };
            left = left.saturating_sub(share);
            if let Some(bin) = self.bins.get_mut(Self::slot(number)) {
                give(bin, share);
            }
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.bins.fill(Bin::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(bins: &Bins, number: u64) -> u64 {
        bins.number(number).map_or(u64::MAX, |bin| bin.own)
    }

    #[test]
    fn bytes_are_spread_over_their_time() {
        let mut bins = Bins::new(Nanos(0));
        bins.spread(Nanos(500_000), Nanos(2_500_000), 2000, |bin, bytes| bin.own += bytes);
        assert_eq!([0, 1, 2].map(|number| own(&bins, number)), [500, 1000, 500]);
        bins.spread(Nanos(2_600_000), Nanos(2_700_000), 7, |bin, bytes| bin.own += bytes);
        assert_eq!(own(&bins, 2), 507);
        assert_eq!(own(&bins, 3), u64::MAX, "yet to come");
        bins.spread(Nanos(0), begin_of(200), 2000, |bin, bytes| bin.own += bytes);
        let kept: u64 = bins.before(200, 128).map(|(_, bin)| bin.own).sum();
        assert_eq!(kept, 950, "what is older is gone");
        assert!(bins.at(Nanos(3)).is_none());
        bins.advance(begin_of(1000));
        assert_eq!(bins.before(1000, 128).map(|(_, bin)| bin.own).sum::<u64>(), 0);
    }

    #[test]
    fn hostile_times_do_no_harm() {
        let mut bins = Bins::new(Nanos(5));
        bins.spread(Nanos(u64::MAX - 1), Nanos(7), u64::MAX, |bin, bytes| add(&mut bin.own, bytes));
        bins.spread(Nanos(0), Nanos(u64::MAX), u64::MAX, |bin, bytes| add(&mut bin.own, bytes));
        bins.advance(Nanos(u64::MAX));
        assert!(bins.at(Nanos(0)).is_none());
    }
}
