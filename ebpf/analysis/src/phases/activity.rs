//! When a connection was active, as bits: what is active together belongs together.

const BITMAP_LEN: usize = 16;
/// Slots that are remembered.
pub(super) const SLOTS: u64 = 64 * BITMAP_LEN as u64;
/// The lengths of a slot: one for iterations of milliseconds, one for those of seconds, and one between.
pub(super) const SCALES: [u64; 3] = [4_000_000, 16_000_000, 64_000_000];
/// Fewer onsets within what is remembered tell nothing.
const MIN_ONSETS: u32 = 4;

/// The last slots of a connection at one scale, in a circle.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Activity {
    bits: [u64; BITMAP_LEN],
    /// The first slot that was ever active, and the latest that is remembered.
    first: Option<u64>,
    head: u64,
}

/// The same, the latest slot first.
#[derive(Debug, Clone, Copy)]
pub(super) struct Signature {
    bits: [u64; BITMAP_LEN],
    /// Slots since the first activity, of those remembered.
    length: u64,
    onsets: u32,
}

impl Activity {
    /// Notes activity in these slots.
    pub(super) fn note(&mut self, first: u64, last: u64) {
        let last = last.max(first);
        self.first.get_or_insert(first);
        if last > self.head {
            self.forward(last);
        }
        let oldest = self.head.saturating_sub(SLOTS - 1);
        for slot in first.max(oldest)..=last {
            if let Some(word) = self.bits.get_mut((slot % SLOTS / 64) as usize) {
                *word |= 1 << (slot % 64);
            }
        }
    }

    /// Forgets what is older than the slots that end at `head`.
    fn forward(&mut self, head: u64) {
        if head - self.head >= SLOTS {
            self.bits = [0; BITMAP_LEN];
        } else {
            for slot in self.head + 1..=head {
                if let Some(word) = self.bits.get_mut((slot % SLOTS / 64) as usize) {
                    *word &= !(1 << (slot % 64));
                }
            }
        }
        self.head = head;
    }

    /// As seen at slot `now`.
    pub(super) fn signature(&mut self, now: u64) -> Signature {
        if now > self.head {
            self.forward(now);
        }
        let mut bits = [0; BITMAP_LEN];
        let word = |slot: u64| self.bits.get((slot % SLOTS / 64) as usize).copied().unwrap_or_default();
        for (place, first) in bits.iter_mut().zip((0..).step_by(64)) {
            // The 64 slots up to this one lie in two words of the circle, the latest highest.
            let last = self.head.wrapping_sub(first);
            let offset = last % 64;
            let older = word(last.wrapping_sub(64)).checked_shr(offset as u32 + 1).unwrap_or(0);
            *place = (word(last) << (63 - offset) | older).reverse_bits();
        }
        let length = self.first.map_or(0, |first| (self.head - first.min(self.head) + 1).min(SLOTS));
        let mut onsets = 0;
        let mut carry = 0;
        for word in bits.iter().rev() {
            // Time runs towards lower bits: an onset is a bit whose elder, the next higher, is not set.
            onsets += (word & !(word >> 1 | carry << 63)).count_ones();
            carry = word & 1;
        }
        Signature { bits, length, onsets }
    }
}

impl Signature {
    /// Whether there is enough to compare.
    pub(super) const fn has_evidence(&self) -> bool {
        self.onsets >= MIN_ONSETS
    }

    /// The correlation of two (phi coefficient), over the time that both have been there. It is 1 where the same slots are
    /// active, and 0 where one shows nothing of the other.
    pub(super) fn correlation(&self, other: &Self) -> f64 {
        let length = self.length.min(other.length);
        let (mut both, mut one, mut two) = (0_u32, 0, 0);
        for ((a, b), first) in self.bits.iter().zip(&other.bits).zip((0_u64..).step_by(64)) {
            let mask = match length.saturating_sub(first) {
                0 => break,
                rest if rest >= 64 => u64::MAX,
                rest => (1 << rest) - 1,
            };
            both += (a & b & mask).count_ones();
            one += (a & mask).count_ones();
            two += (b & mask).count_ones();
        }
        let (n, both, one, two) = (length as f64, f64::from(both), f64::from(one), f64::from(two));
        let spread = one * (n - one) * two * (n - two);
        if spread <= 0.0 { 0.0 } else { (n * both - one * two) / spread.sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_active_together_correlates() {
        let (mut one, mut same, mut other) = (Activity::default(), Activity::default(), Activity::default());
        for period in 0..200_u64 {
            let at = 5000 + period * 12;
            one.note(at, at + 4);
            same.note(at, at + 3);
            other.note(5000 + period * 17, 5000 + period * 17 + 7);
        }
        let now = 5000 + 200 * 12;
        let [one, same, other] = [one, same, other].map(|mut activity| activity.signature(now));
        assert!(one.has_evidence() && one.onsets > 80 && one.onsets < 90, "{}", one.onsets);
        assert!(one.correlation(&same) > 0.8, "{}", one.correlation(&same));
        assert!(one.correlation(&other).abs() < 0.1, "{}", one.correlation(&other));
        assert!((one.correlation(&one) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn old_slots_expire_and_bad_times_are_harmless() {
        let mut activity = Activity::default();
        activity.note(10, 10_000);
        assert_eq!(activity.signature(10_000 + SLOTS).bits, [0; BITMAP_LEN]);
        activity.note(u64::MAX, 3);
        activity.note(0, u64::MAX);
        assert_eq!(activity.signature(u64::MAX).bits, [u64::MAX; BITMAP_LEN]);
        activity.note(5, 5);
        assert_eq!(activity.signature(7).onsets, 1);
    }

    #[test]
    fn onsets_span_bitmap_elements() {
        let mut activity = Activity::default();
        (0..10).for_each(|at| activity.note(60 + at * 64, 66 + at * 64));
        assert_eq!(activity.signature(1000).onsets, 10);
        assert_eq!(activity.signature(1010).onsets, 10);
    }
}
