//! How often tenants have asked for something lately, and when they may again; and how much of a kind an agent may say in a second.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Most for one communicator, and for all of a tenant together, within [`PER`].
const MOST: (usize, usize) = (8, 128);

/// See [`MOST`].
const PER: Duration = Duration::from_secs(60);

/// When tenants have asked for something, for which communicator.
#[derive(Debug, Default)]
pub(super) struct Lately {
    asked: BTreeMap<String, VecDeque<(Duration, u64)>>,
}

impl Lately {
    /// Takes note of a tenant's asking; what it is told if this is one too many. `what` names such questions.
    pub(super) fn asks(&mut self, now: Duration, tenant: &str, id: u64, what: &str) -> Result<(), String> {
        let lately = self.asked.entry(tenant.to_owned()).or_default();
        lately.retain(|(at, _)| now.saturating_sub(*at) < PER);
        let of_one = lately.iter().filter(|(_, of)| *of == id);
        let (most, most_of_all) = MOST;
        let first_of_one = of_one.clone().next().filter(|_| of_one.count() >= most);
        let first_of_all = lately.front().filter(|_| lately.len() >= most_of_all);
        match first_of_one.or(first_of_all) {
            Some((at, _)) => {
                let seconds = at.saturating_add(PER).saturating_sub(now).as_secs() + 1;
                Err(format!(
                    "too many {what}: {most} for a communicator and {most_of_all} of a tenant are possible in {PER:?}; the next in {seconds} s"
                ))
            }
            None => {
                lately.push_back((now, id));
                Ok(())
            }
        }
    }

    /// A tenant is gone.
    pub(super) fn forget(&mut self, tenant: &str) {
        self.asked.remove(tenant);
    }
}

/// What an agent may still say of a kind of which it may say so much in a second, and as much at once after a pause.
#[derive(Clone, Debug, Default)]
pub(super) struct PerSecond {
    /// Thousandths of a message.
    left: u64,
    since: Option<Duration>,
}

impl PerSecond {
    /// Whether one more may be taken of `most` a second.
    pub(super) fn take(&mut self, now: Duration, most: u32) -> bool {
        let most = u64::from(most);
        let past = self.since.map_or(Duration::MAX, |since| now.saturating_sub(since)).as_micros();
        let earned = u64::try_from(past).unwrap_or(u64::MAX).saturating_mul(most) / 1000;
        if earned > 0 {
            self.since = Some(now);
            self.left = self.left.saturating_add(earned).min(most * 1000);
        }
        let some = self.left >= 1000;
        self.left = self.left.saturating_sub(if some { 1000 } else { 0 });
        some
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_counted() {
        let mut said = PerSecond::default();
        let mut now = Duration::from_secs(5);
        let taken = (0..1000).filter(|_| said.take(now, 100)).count();
        assert_eq!(taken, 100, "as many at once");
        now += Duration::from_millis(105);
        assert_eq!((0..1000).filter(|_| said.take(now, 100)).count(), 10);
        let mut count = 0;
        for _ in 0..10_000 {
            now += Duration::from_micros(100);
            count += usize::from(said.take(now, 100));
        }
        assert_eq!(count, 100, "a second's worth, however fast they come");
    }
}
