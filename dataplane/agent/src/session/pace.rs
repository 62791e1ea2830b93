//! How often an attachment may ask the provider something.

use harmonaize_abi::session::Unanswered;
use std::time::{Duration, Instant};

/// Between two questions in the long run: what is answered changes once a second.
const EVERY: Duration = Duration::from_millis(10);

/// Questions at once by who has long asked nothing: a whole feed of events is read by fewer.
const AT_ONCE: u32 = 600;

/// The questions of one attachment, joins included. One more than it may have is not passed on, whoever would answer it.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// When those that it has had would all have come, had they kept their distance.
    through: Option<Instant>,
}

impl Pace {
    /// Takes a question at `now`; or says when there may be one.
    pub(super) fn take(&mut self, now: Instant) -> Result<(), Unanswered> {
        let ahead = self.through.map_or(Duration::ZERO, |through| through.saturating_duration_since(now));
        let again = (ahead + EVERY).saturating_sub(EVERY * AT_ONCE);
        if again.is_zero() {
            self.through = now.checked_add(ahead + EVERY);
            Ok(())
        } else {
            Err(Unanswered::TooOften { again })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_may_come_at_once_and_then_one_at_a_time() {
        let (mut pace, begin) = (Pace::default(), Instant::now());
        let all = (0..2 * AT_ONCE).filter(|_| pace.take(begin).is_ok()).count();
        assert_eq!(all, AT_ONCE as usize);
        assert_eq!(pace.take(begin), Err(Unanswered::TooOften { again: EVERY }));
        let half = begin + EVERY / 2;
        assert_eq!(pace.take(half), Err(Unanswered::TooOften { again: EVERY / 2 }));
        let second = (0..1000).filter(|ms| pace.take(begin + Duration::from_millis(*ms)).is_ok()).count();
        assert_eq!(second, 99);
        // Refusals cost nothing: after a time of silence it is as at first.
        let late = begin + EVERY * AT_ONCE * 3;
        assert_eq!((0..2 * AT_ONCE).filter(|_| pace.take(late).is_ok()).count(), AT_ONCE as usize);
    }
}
