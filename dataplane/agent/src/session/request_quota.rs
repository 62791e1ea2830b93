//! How often a tenant may ask the provider something.

use harmonaize_abi::session::RequestError;
use std::time::{Duration, Instant};

/// Between two questions in the long run, for each attachment that there is: what is answered changes once a second.
const REFILL_INTERVAL: Duration = Duration::from_millis(10);

/// Questions at once by who has long asked nothing: a whole feed of events is read by fewer.
const BURST: u32 = 600;

/// The questions of one tenant at this agent, joins included, through whichever attachments. One more than it may have is not passed on,
/// whoever would answer it.
#[derive(Debug, Default)]
pub(super) struct RequestQuota {
    /// What it has had beyond what it earned, and when that was so. The debt is the time in which one attachment earns
    /// it.
    debt: Duration,
    updated: Option<Instant>,
}

impl RequestQuota {
    /// Takes a question at `now` of a tenant with so many attachments; or says when there may be one.
    pub(super) fn take(&mut self, now: Instant, attachments: u32) -> Result<(), RequestError> {
        let attachments = attachments.max(1);
        // Attachments' clocks are read before their turn here comes: one may be a little behind another's.
        let at = self.updated.map_or(now, |at| at.max(now));
        let since = self.updated.map_or(Duration::ZERO, |before| at.saturating_duration_since(before));
        let ahead = self.debt.saturating_sub(since.saturating_mul(attachments));
        (self.debt, self.updated) = (ahead, Some(at));
        let lacks = (ahead + REFILL_INTERVAL).saturating_sub(REFILL_INTERVAL * BURST);
        if lacks.is_zero() {
            self.debt = ahead + REFILL_INTERVAL;
            return Ok(());
        }
        let again = lacks.as_nanos().div_ceil(u128::from(attachments));
        Err(RequestError::TooOften {
            retry_after: Duration::from_nanos(u64::try_from(again).unwrap_or(u64::MAX)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_may_come_at_once_and_then_one_at_a_time() {
        let (mut pace, begin) = (RequestQuota::default(), Instant::now());
        let all = (0..2 * BURST).filter(|_| pace.take(begin, 1).is_ok()).count();
        assert_eq!(all, BURST as usize);
        assert_eq!(pace.take(begin, 1), Err(RequestError::TooOften { retry_after: REFILL_INTERVAL }));
        let half = begin + REFILL_INTERVAL / 2;
        assert_eq!(pace.take(half, 1), Err(RequestError::TooOften { retry_after: REFILL_INTERVAL / 2 }));
        let second = (0..1000).filter(|ms| pace.take(begin + Duration::from_millis(*ms), 1).is_ok()).count();
        assert_eq!(second, 99);
        // Refusals cost nothing: after a time of silence it is as at first.
        let late = begin + REFILL_INTERVAL * BURST * 3;
        assert_eq!((0..2 * BURST).filter(|_| pace.take(late, 1).is_ok()).count(), BURST as usize);
    }

    #[test]
    fn more_attachments_raise_the_rate_not_the_burst() {
        let (mut pace, begin) = (RequestQuota::default(), Instant::now());
        let at_once = |pace: &mut RequestQuota, at, attachments| {
            (0..2 * BURST).filter(|_| pace.take(at, attachments).is_ok()).count()
        };
        assert_eq!(at_once(&mut pace, begin, 4), BURST as usize);
        assert_eq!(pace.take(begin, 4), Err(RequestError::TooOften { retry_after: REFILL_INTERVAL / 4 }));
        // Who goes and comes again has had what it had.
        assert_eq!([at_once(&mut pace, begin, 0), at_once(&mut pace, begin, 64)], [0, 0]);
        let second = (0..=1000).filter(|ms| pace.take(begin + Duration::from_millis(*ms), 4).is_ok()).count();
        assert_eq!(second, 400);
        // What was promised of when the next is taken holds.
        let late = begin + Duration::from_secs(1);
        let Err(RequestError::TooOften { retry_after: again }) = pace.take(late, 3) else {
            panic!("one too many")
        };
        assert_eq!(pace.take(late + again, 3), Ok(()));
    }
}
