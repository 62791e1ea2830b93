//! How an agreement is kept: what its communicator's operations took, against what was promised.
//!
//! A clause is broken, or kept again, by what was measured within a window, not by one operation: of targets more than one operation
//! in a hundred, and at least two, were late; of bandwidth, large operations together had less. And it is broken while the
//! provider's own plan gives less than was promised, whether the tenant sends or not.

use harmonaize_abi::session::{BULK_BYTES, Clause, Constraints, Record};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// Operations that are older say nothing any more.
const WINDOW: Duration = Duration::from_secs(30);

/// Most operations and iterations that are kept.
const MOST: usize = 1024;

/// Fewest large operations that tell a bandwidth.
const LEAST_BULK: usize = 3;

/// A bandwidth that was too little is enough again from so much more on.
const AGAIN: f64 = 1.05;

/// An operation, or the operations of an iteration together.
#[derive(Clone, Copy, Debug)]
struct Took {
    at: Duration,
    bytes: u64,
    time: Duration,
}

/// What is measured of one agreement.
#[derive(Clone, Debug)]
pub struct Watch {
    wanted: Constraints,
    /// Bus bandwidth of an AllReduce over its bytes a second: 2(n-1)/n.
    factor: f64,
    operations: VecDeque<Took>,
    iterations: VecDeque<Took>,
    /// Of the iteration that is not whole yet.
    gathered: (u64, Duration),
    /// Whether the plan gives less than was promised.
    short: bool,
    broken: BTreeSet<Clause>,
    record: Record,
}

impl Watch {
    /// For a communicator of so many ranks that was promised this.
    pub fn new(wanted: Constraints, ranks: u32) -> Self {
        let ranks = f64::from(ranks.max(1));
        Self {
            wanted,
            factor: 2.0 * (ranks - 1.0) / ranks,
            operations: VecDeque::new(),
            iterations: VecDeque::new(),
            gathered: (0, Duration::ZERO),
            short: false,
            broken: BTreeSet::new(),
            record: Record::default(),
        }
    }

    /// What came before an agreement goes on to count in the next of the same communicator.
    pub fn follows(mut self, before: &Self) -> Self {
        self.record = before.record;
        self
    }

    /// An operation of `bytes` took `time` from its last rank's call.
    pub fn operation(&mut self, now: Duration, bytes: u64, time: Duration) {
        let took = Took { at: now, bytes, time };
        self.record.operations += 1;
        self.record.late += u64::from(self.is_late(&took));
        push(&mut self.operations, took);
        if let Some(iteration) = self.wanted.iteration {
            self.gathered.0 = self.gathered.0.saturating_add(bytes);
            self.gathered.1 = self.gathered.1.saturating_add(time);
            if self.gathered.0 >= iteration.bytes {
                let (bytes, time) = std::mem::take(&mut self.gathered);
                push(&mut self.iterations, Took { at: now, bytes, time });
            }
        }
    }

    /// Whether the plan gives less than was promised.
    pub fn planned(&mut self, short: bool) {
        self.short = short;
    }

    /// What is broken now; whether that is other than before.
    pub fn judge(&mut self, now: Duration) -> (&BTreeSet<Clause>, bool) {
        let since = now.saturating_sub(WINDOW);
        self.operations.retain(|took| took.at >= since);
        self.iterations.retain(|took| took.at >= since);
        let mut broken = BTreeSet::new();
        let covered = self.operations.iter().filter(|took| self.target(took.bytes).is_some());
        let late = self.operations.iter().filter(|took| self.is_late(took));
        if too_many(late.count(), covered.count()) {
            broken.insert(Clause::Completion);
        }
        if let Some(iteration) = self.wanted.iteration {
            let late = self.iterations.iter().filter(|took| took.time > iteration.p99);
            if too_many(late.count(), self.iterations.len()) {
                broken.insert(Clause::Iteration);
            }
        }
        let bulk = || self.operations.iter().filter(|took| took.bytes >= BULK_BYTES);
        let (bytes, time) =
            bulk().fold((0.0, 0.0), |sum, took| (sum.0 + took.bytes as f64, sum.1 + took.time.as_secs_f64()));
        let busbw = if time > 0.0 { bytes * self.factor / time } else { 0.0 };
        self.record.busbw = busbw.min(1e18) as u64;
        let was = self.broken.contains(&Clause::Bandwidth);
        let enough = self.wanted.min_busbw as f64 * if was { AGAIN } else { 1.0 };
        if self.wanted.min_busbw > 0 && bulk().count() >= LEAST_BULK && busbw < enough {
            broken.insert(Clause::Bandwidth);
        }
        if self.short {
            let Constraints { min_busbw, iteration, completions, .. } = &self.wanted;
            broken.extend((*min_busbw > 0).then_some(Clause::Bandwidth));
            broken.extend(iteration.is_some().then_some(Clause::Iteration));
            broken.extend((!completions.is_empty()).then_some(Clause::Completion));
        }
        self.record.breaches += broken.difference(&self.broken).count() as u64;
        let changed = broken != self.broken;
        self.broken = broken;
        (&self.broken, changed)
    }

    /// What was not kept when it was judged last.
    pub fn broken(&self) -> &BTreeSet<Clause> {
        &self.broken
    }

    /// What operations came to.
    pub fn record(&self) -> Record {
        self.record
    }

    /// When something may be other than it was judged last, though nothing happens.
    pub fn due(&self) -> Option<Duration> {
        let oldest = self.operations.front().filter(|_| !self.broken.is_empty())?;
        Some(oldest.at.saturating_add(WINDOW).saturating_add(Duration::from_nanos(1)))
    }

    /// How long an operation of this size may take, where that was said.
    fn target(&self, bytes: u64) -> Option<Duration> {
        self.wanted.completions.iter().find(|target| bytes <= target.bytes).map(|target| target.p99)
    }

    fn is_late(&self, took: &Took) -> bool {
        self.target(took.bytes).is_some_and(|target| took.time > target)
    }
}

fn push(kept: &mut VecDeque<Took>, took: Took) {
    if kept.len() == MOST {
        kept.pop_front();
    }
    kept.push_back(took);
}

fn too_many(late: usize, of: usize) -> bool {
    late >= 2 && late * 100 > of
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(second: u64) -> Duration {
        Duration::from_secs(second)
    }

    fn broken(watch: &mut Watch, now: u64) -> Vec<Clause> {
        watch.judge(at(now)).0.iter().copied().collect()
    }

    #[test]
    fn one_late_operation_is_none_and_two_in_a_hundred_are_enough() {
        let mut watch = Watch::new(Constraints::new().p99(1 << 10, MS).p99(1 << 20, MS * 10), 4);
        for _ in 0..150 {
            watch.operation(at(1), 1 << 10, MS);
            // Of the larger ones' size, and longer than the smaller ones may take.
            watch.operation(at(1), 1 << 15, MS * 9);
        }
        // Larger than any target.
        watch.operation(at(1), 1 << 30, MS * 1000);
        watch.operation(at(1), 512, MS * 2);
        assert_eq!(broken(&mut watch, 1), []);
        (0..3).for_each(|_| watch.operation(at(2), 1 << 20, MS * 11));
        assert_eq!(broken(&mut watch, 2), [Clause::Completion]);
        assert_eq!(
            watch.record(),
            Record { operations: 305, late: 4, busbw: watch.record().busbw, breaches: 1 }
        );
        assert!(!watch.judge(at(2)).1, "judged again, it is the same");
        assert_eq!(watch.due(), Some(at(31) + Duration::from_nanos(1)));
        assert_eq!(broken(&mut watch, 33), []);
    }

    #[test]
    fn bandwidth_is_that_of_large_operations_with_hysteresis() {
        // 4 ranks: 1 MiB in 10 ms is 157 MB/s.
        let mut watch = Watch::new(Constraints::new().min_busbw(150_000_000), 4);
        (0..5).for_each(|_| watch.operation(at(1), 1 << 10, MS * 50));
        (0..2).for_each(|_| watch.operation(at(1), 1 << 20, MS * 50));
        assert_eq!(broken(&mut watch, 1), [], "two tell nothing");
        watch.operation(at(1), 1 << 20, MS * 50);
        assert_eq!(broken(&mut watch, 1), [Clause::Bandwidth]);
        (0..10).for_each(|_| watch.operation(at(40), 1 << 20, MS * 10));
        assert_eq!(broken(&mut watch, 40), [Clause::Bandwidth], "157 is less than 1.05 times 150");
        (0..100).for_each(|_| watch.operation(at(41), 1 << 20, MS * 9));
        assert_eq!(broken(&mut watch, 41), []);
        assert!((watch.record().busbw as f64 / 173e6 - 1.0).abs() < 0.02, "{:?}", watch.record());
    }

    #[test]
    fn an_iteration_is_its_operations_together() {
        let mut watch = Watch::new(Constraints::new().iteration(4 << 20, MS * 40), 4);
        for second in 0..3 {
            (0..4).for_each(|_| watch.operation(at(second), 1 << 20, MS * 9));
        }
        assert_eq!(broken(&mut watch, 3), []);
        for second in 4..6 {
            (0..4).for_each(|_| watch.operation(at(second), 1 << 20, MS * 11));
        }
        assert_eq!(broken(&mut watch, 6), [Clause::Iteration]);
    }

    #[test]
    fn a_plan_that_gives_less_breaks_what_it_was_for() {
        let mut watch = Watch::new(Constraints::new().min_busbw(1_000_000).p99(1, MS), 2);
        watch.planned(true);
        assert_eq!(watch.judge(at(1)), (&BTreeSet::from([Clause::Completion, Clause::Bandwidth]), true));
        watch.planned(false);
        assert_eq!(watch.judge(at(2)), (&BTreeSet::new(), true));
        let next = Watch::new(Constraints::new(), 2).follows(&watch);
        assert_eq!(next.record().breaches, 2);
    }

    #[test]
    fn what_was_not_asked_for_is_never_broken() {
        let mut watch = Watch::new(Constraints::new().weight(3), 4);
        watch.planned(true);
        (0..2000).for_each(|_| watch.operation(at(1), 1 << 20, MS * 1000));
        assert_eq!(broken(&mut watch, 1), []);
        assert_eq!(watch.record().operations, 2000);
    }
}
