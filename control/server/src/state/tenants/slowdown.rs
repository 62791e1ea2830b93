//! Whether a communicator's operations take longer than they used to, while agents report queues on its
//! paths. That is congestion too, though no plan shows it. What others take comes and goes. Trains prove too
//! little of it where they are shorter than what switches let pass at once.
//!
//! It is compared with the communicator's own past alone, and only while it is the tenant's only one that
//! communicates: what a tenant does to itself is nobody's congestion.

use harmonaize_abi::{Bytes, CommunicatorId};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Fewest operations of a size that say what is usual; most that are kept, and of how many sizes.
const FEWEST: usize = 8;
const MOST: usize = 256;
const MOST_SIZES: usize = 16;

/// The latest operations, by which it is judged.
const LATEST: usize = 4;

/// More of its usual speed is none the less usual: processors and own bursts make as much.
const SLOW: f64 = 0.5;

/// For how long an agent's report of a long queue counts. It spans some iterations of a job that computes for
/// a second or two.
const NOTICE_INTERVAL: Duration = Duration::from_secs(6);

/// Who has told of no operation for so long does not communicate.
pub(crate) const QUIET: Duration = Duration::from_secs(3);

/// What operations of one size took.
#[derive(Debug, Default)]
struct Took {
    /// Oldest first.
    order: VecDeque<Duration>,
    /// The same, ascending.
    sorted: Vec<Duration>,
}

impl Took {
    fn push(&mut self, took: Duration) {
        let oldest = (self.order.len() >= MOST).then(|| self.order.pop_front()).flatten();
        if let Some(at) = oldest.and_then(|oldest| self.sorted.binary_search(&oldest).ok()) {
            self.sorted.remove(at);
        }
        self.order.push_back(took);
        self.sorted.insert(self.sorted.partition_point(|other| *other < took), took);
    }
}

/// The two of a tenant's communicators that told of an operation last, the latest first, and when.
pub(crate) type Latest = [Option<(CommunicatorId, Duration)>; 2];

/// One communicator's operations.
#[derive(Debug, Default)]
pub(crate) struct Slowdown {
    /// By bytes: the time from the last rank's call.
    took: BTreeMap<Bytes, Took>,
    /// The newest ones' parts of their usual speed.
    latest: VecDeque<f64>,
    /// When an agent last said that a long queue stands.
    queue: Option<Duration>,
    /// What was made of it last.
    noted: f64,
}

impl Slowdown {
    /// An agent says that a long queue stands on one of its paths.
    pub(crate) fn queue_stands(&mut self, now: Duration) {
        self.queue = Some(now);
    }

    /// Takes note of the part of its usual speed that others leave it. Returns whether that is another than
    /// before.
    pub(crate) fn note(&mut self, share: f64) -> bool {
        std::mem::replace(&mut self.noted, share) != share
    }

    pub(crate) fn operation(&mut self, bytes: Bytes, took: Duration) {
        if let Some(usual) = self.usual(bytes) {
            if self.latest.len() >= LATEST {
                self.latest.pop_front();
            }
            self.latest.push_back(usual.div_duration_f64(took.max(Duration::from_nanos(1))).min(1.0));
        }
        if self.took.len() >= MOST_SIZES && !self.took.contains_key(&bytes) {
            self.took.pop_first();
        }
        self.took.entry(bytes).or_default().push(took);
    }

    /// What operations of this size usually take: a quarter of them took less.
    fn usual(&self, bytes: Bytes) -> Option<Duration> {
        let kept = &self.took.get(&bytes)?.sorted;
        kept.get(kept.len() / 4).copied().filter(|_| kept.len() >= FEWEST)
    }

    /// Returns the part of its usual speed that it has now. It is 1 where no queue stands, too little is
    /// known, or the part is more than half.
    pub(crate) fn share(&self, now: Duration) -> f64 {
        let stands = self.queue.is_some_and(|at| at + NOTICE_INTERVAL > now);
        if !stands || self.latest.len() < LATEST {
            return 1.0;
        }
        let mut parts: Vec<f64> = self.latest.iter().copied().collect();
        parts.sort_by(f64::total_cmp);
        parts.get(parts.len() / 2).copied().filter(|part| *part <= SLOW).unwrap_or(1.0)
    }

    /// What was before says nothing of what comes.
    pub(crate) fn forget(&mut self) {
        self.took.clear();
        self.latest.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn recent_operations_are_compared_by_size() {
        let (mut slowness, now) = (Slowdown::default(), Duration::from_secs(10));
        slowness.queue = Some(now);
        (0..20).for_each(|_| slowness.operation(Bytes(1 << 20), MS * 30));
        (0..20).for_each(|_| slowness.operation(Bytes(1 << 10), MS));
        assert_eq!(slowness.share(now), 1.0);
        // One that was late is none.
        slowness.operation(Bytes(1 << 20), MS * 900);
        assert_eq!(slowness.share(now), 1.0);
        (0..3).for_each(|_| slowness.operation(Bytes(1 << 20), MS * 300));
        assert_eq!(slowness.share(now), 0.1);
        (0..4).for_each(|_| slowness.operation(Bytes(1 << 20), MS * 50));
        assert_eq!(slowness.share(now), 1.0);
        (0..4).for_each(|_| slowness.operation(Bytes(1 << 20), MS * 300));
        assert_eq!(slowness.share(now + NOTICE_INTERVAL), 1.0, "nobody says any more that a queue stands");
        slowness.forget();
        assert_eq!(slowness.share(now), 1.0);
    }

    #[test]
    fn history_is_bounded() {
        let mut slowness = Slowdown::default();
        for bytes in 0..1000 {
            (0..2 * MOST as u32).for_each(|took| slowness.operation(Bytes(bytes), MS * (took * 7 % 100)));
        }
        // The newest stay: of 256, the 65th from below.
        let mut newest: Vec<Duration> =
            (MOST as u32..2 * MOST as u32).map(|took| MS * (took * 7 % 100)).collect();
        newest.sort_unstable();
        assert_eq!(slowness.usual(Bytes(999)), Some(newest[MOST / 4]));
        assert_eq!((slowness.took.len(), slowness.latest.len()), (MOST_SIZES, LATEST));
        assert!(
            slowness
                .took
                .values()
                .all(|kept| kept.order.len() == MOST && kept.sorted.len() == MOST && kept.sorted.is_sorted())
        );
    }
}
