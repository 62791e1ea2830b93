//! How often a tenant's processes may attach and join.

use super::Quota;
use harmonaize_units::{Gcra, Quota as Rate};
use std::time::{Duration, Instant};

/// Joins at once by who has long joined nothing: many processes, each in some communicators.
const JOINS_AT_ONCE: u32 = 600;

/// How fast messages of a tenant's processes are read in the long run, whatever they hold. It is 20,000 a second of at most 256
/// bytes, or 5 MB a second of the longest. As much at once.
const MESSAGES: Rate = Rate { interval: Duration::from_micros(50), burst: 20_000 };
/// Each so many bytes of a message count as one more.
const MESSAGE_UNIT: usize = 256;

/// The attaches, joins and messages of one tenant at this agent, and the processor time of its sessions. Outlives attachments, so that
/// attaching anew gains nothing.
#[derive(Debug)]
pub(super) struct Rates {
    begun: Instant,
    attaches: Gcra,
    joins: Gcra,
    messages: Gcra,
    /// In microseconds.
    processor: Gcra,
}

/// One too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooOften {
    per_second: u32,
    at_once: u32,
    retry_after: Duration,
}

impl TooOften {
    /// What was done too often, by which key, for people.
    pub(super) fn describe(&self, what: &str, key: &str) -> String {
        let Self { per_second, at_once, retry_after } = self;
        format!(
            "this tenant's processes {what} too often: {per_second} a second are possible, and {at_once} at once; do so again in \
             {retry_after:?}, or have the provider raise `{key}`"
        )
    }
}

impl Default for Rates {
    fn default() -> Self {
        let (attaches, joins, messages, processor) = Default::default();
        Self { begun: Instant::now(), attaches, joins, messages, processor }
    }
}

impl Rates {
    /// Counts a connection that is to attach. As many at once as there may be attachments.
    pub(super) fn attach(&mut self, now: Instant, quota: &Quota) -> Result<(), TooOften> {
        take(&mut self.attaches, now.saturating_duration_since(self.begun), quota.attaches, quota.attachments)
    }

    /// Counts a join.
    pub(super) fn join(&mut self, now: Instant, quota: &Quota) -> Result<(), TooOften> {
        take(&mut self.joins, now.saturating_duration_since(self.begun), quota.joins, JOINS_AT_ONCE)
    }

    /// Counts a message of so many bytes that was read. Returns until when no other is looked at, if it is not now.
    pub(super) fn message(&mut self, now: Instant, bytes: usize) -> Option<Instant> {
        let at = now.saturating_duration_since(self.begun);
        let units = u32::try_from(bytes / MESSAGE_UNIT).unwrap_or(u32::MAX).saturating_add(1);
        let next = self.messages.charge_times(at, MESSAGES, units);
        (next > at).then(|| now + (next - at))
    }

    /// Counts processor time that sessions have taken.
    pub(super) fn spend(&mut self, now: Instant, took: Duration, quota: &Quota) {
        let at = now.saturating_duration_since(self.begun);
        let microseconds = u32::try_from(took.as_nanos().div_ceil(1000)).unwrap_or(u32::MAX);
        self.processor.charge_times(at, processor(quota), microseconds);
    }

    /// Returns until when sessions are to take no processor time, if it is not now.
    pub(super) fn throttled_until(&self, now: Instant, quota: &Quota) -> Option<Instant> {
        let at = now.saturating_duration_since(self.begun);
        let next = self.processor.next(processor(quota));
        (next > at).then(|| now + (next - at))
    }
}

/// How fast microseconds of processor time are earned: a second's worth may be taken at once.
fn processor(quota: &Quota) -> Rate {
    let percent = quota.session_percent.clamp(1, 100);
    Rate { interval: Duration::from_micros(100) / percent, burst: percent * 10_000 }
}

fn take(rate: &mut Gcra, now: Duration, per_second: u32, least_burst: u32) -> Result<(), TooOften> {
    let per_second = per_second.max(1);
    let at_once = per_second.max(least_burst);
    let quota = Rate { interval: Duration::from_secs(1) / per_second, burst: at_once };
    rate.take(now, quota).map_err(|next| TooOften {
        per_second,
        at_once,
        retry_after: next.saturating_sub(now),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_abi::session::MAX_MESSAGE;

    #[test]
    fn a_flood_of_messages_is_read_at_a_pace() {
        let begin = Instant::now();
        let at_once = |bytes| {
            let mut rates = Rates::default();
            (1..).find(|_| rates.message(begin, bytes).is_some()).unwrap()
        };
        assert_eq!((at_once(40), at_once(MAX_MESSAGE)), (20_000, 20_000 / 257 + 1));
        let mut rates = Rates::default();
        let (mut now, mut bytes) = (begin, 0);
        while now < begin + Duration::from_secs(10) {
            now = rates.message(now, MAX_MESSAGE).unwrap_or(now);
            bytes += MAX_MESSAGE;
        }
        assert!((50_000_000..60_000_000).contains(&bytes), "{bytes} in ten seconds");
    }

    #[test]
    fn sessions_take_their_part_of_a_core() {
        for percent in [1, 25, 100] {
            let (mut rates, begin) = (Rates::default(), Instant::now());
            let quota = Quota { session_percent: percent, ..Quota::default() };
            let (mut now, mut taken) = (begin, Duration::ZERO);
            while now < begin + Duration::from_secs(100) {
                now = rates.throttled_until(now, &quota).unwrap_or(now);
                // Whoever has a turn keeps the processor for so long.
                let took = Duration::from_micros(300);
                now += took;
                rates.spend(now, took, &quota);
                taken += took;
            }
            // Of 100 s, and a second's worth that was saved up.
            let share = Duration::from_secs(1) * percent;
            assert!(taken > share * 99 / 100 && taken < share * 102 / 100, "{percent}%: {taken:?}");
        }
    }

    #[test]
    fn a_burst_passes_and_then_so_many_a_second() {
        let (mut rates, begin) = (Rates::default(), Instant::now());
        let quota = Quota { attachments: 64, attaches: 10, joins: 1000, ..Quota::default() };
        let attach = |rates: &mut Rates, ms| rates.attach(begin + Duration::from_millis(ms), &quota);
        assert_eq!((0..1000).filter(|_| attach(&mut rates, 0).is_ok()).count(), 64);
        let refused = attach(&mut rates, 0).unwrap_err();
        assert_eq!((refused.per_second, refused.at_once), (10, 64));
        assert!(refused.retry_after <= Duration::from_millis(100), "{refused:?}");
        assert_eq!((1..=1000).filter(|ms| attach(&mut rates, *ms).is_ok()).count(), 10);
        let joins = (0..5000).filter(|_| rates.join(begin, &quota).is_ok()).count();
        assert_eq!(joins, 1000, "another limit, and at least a second's worth at once");
        let text = refused.describe("attach", "attaches");
        assert!(
            text.contains("10 a second") && text.contains("64 at once") && text.contains("`attaches`"),
            "{text}"
        );
    }
}
