//! Whether a worker hears what goes to all workers at once.

use std::time::Duration;

/// So many sums in a row that had to be asked for, and none that came to all at once: the group is not heard any more.
const DEAF: u32 = 64;
/// For how many times its patience who is deaf takes no call, at first and at most.
const PAUSES: [u32; 2] = [8, 512];

/// What a worker has heard in a session. It may be its processors that were late, or the network that is mended: so who is deaf tries again, and
/// twice as late each time, since a trial that fails costs as many questions as it takes to be deaf.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hearing {
    patience: Duration,
    hears: bool,
    /// Since when.
    since: Duration,
    /// For how long no call is taken; 0 where it was never deaf.
    pause: Duration,
    /// Sums in a row that were asked for and came by themselves.
    alone: u32,
}

impl Hearing {
    pub(super) fn new(patience: Duration) -> Self {
        Self { patience, hears: false, since: Duration::ZERO, pause: Duration::ZERO, alone: 0 }
    }

    /// Nothing has been heard in this session.
    pub(super) fn begin(&mut self) {
        *self = Self::new(self.patience);
    }

    pub(super) fn hears(&self) -> bool {
        self.hears
    }

    /// A call has come.
    pub(super) fn called(&mut self, now: Duration) {
        if !self.hears && now >= self.since + self.pause {
            (self.hears, self.since, self.alone) = (true, now, 0);
        }
    }

    /// A sum has come to all at once.
    pub(super) fn heard(&mut self) {
        self.alone = 0;
    }

    /// A sum has come by itself. Who hears the group need not ask; where sums are late some come by themselves all the same.
    pub(super) fn alone(&mut self, now: Duration, asked: bool) {
        self.alone = if asked { self.alone + 1 } else { 0 };
        if self.alone <= DEAF || !self.hears {
            return;
        }
        let [least, most] = PAUSES.map(|times| self.patience * times);
        // Who heard for longer than it paused was not deaf meanwhile.
        let long = now.saturating_sub(self.since) > self.pause;
        self.pause = if long { least } else { (self.pause * 2).clamp(least, most) };
        (self.hears, self.since, self.alone) = (false, now, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_millis(150);

    /// Of a call a millisecond, when it was taken, if what follows each of those is so many sums by themselves.
    fn trials(hearing: &mut Hearing, milliseconds: std::ops::Range<u64>, sums: u32) -> Vec<u64> {
        let mut taken = Vec::new();
        for at in milliseconds {
            let now = Duration::from_millis(at);
            let before = hearing.hears();
            hearing.called(now);
            if hearing.hears() && !before {
                taken.push(at);
                (0..sums).for_each(|_| hearing.alone(now, true));
            }
        }
        taken
    }

    #[test]
    fn who_is_deaf_tries_again_ever_more_seldom() {
        let mut hearing = Hearing::new(PATIENCE);
        assert_eq!(trials(&mut hearing, 0..20_000, DEAF + 1), [0, 1200, 3600, 8400, 18_000]);
        let last = trials(&mut hearing, 20_000..1_000_000, DEAF + 1);
        assert!(last.windows(2).all(|pair| pair[1] - pair[0] <= 76_800), "{last:?}");
        // What it hears for long makes good what was before.
        assert_eq!(trials(&mut hearing, 1_000_000..1_080_000, 1).len(), 1);
        let now = Duration::from_millis(1_500_000);
        (0..=DEAF).for_each(|_| hearing.alone(now, true));
        assert!(!hearing.hears());
        assert_eq!(trials(&mut hearing, 1_500_000..1_502_000, DEAF + 1), [1_501_200]);
    }

    #[test]
    fn sums_that_come_unasked_or_to_all_are_none_that_were_missed() {
        let mut hearing = Hearing::new(PATIENCE);
        hearing.called(Duration::ZERO);
        for _ in 0..3 * DEAF {
            (0..DEAF).for_each(|_| hearing.alone(Duration::ZERO, true));
            hearing.heard();
            (0..DEAF).for_each(|_| hearing.alone(Duration::ZERO, true));
            hearing.alone(Duration::ZERO, false);
        }
        assert!(hearing.hears());
        hearing.begin();
        assert!(!hearing.hears());
    }
}
