//! How an agreement is kept: what its communicator's operations took, against what was promised.
//!
//! A clause is broken, or kept again, by what was measured within a window, not by one operation: of targets more than one operation
//! in a hundred, and at least two, were late; of bandwidth, large operations together had less. And it is broken while the
//! provider's own plan gives less than was promised, whether the tenant sends or not.
//!
//! One operation in a hundred may be late because others are not. An operation that stalls keeps those others from being: it counts as often
//! as its target has passed while it ran (what is left out else is known as coordinated omission), and before it has ended. After one that
//! failed nothing comes any more: then nothing is kept of what was promised of operations.

use harmonaize_abi::session::{Clause, Constraints, MIN_BANDWIDTH_BYTES, Record, Target};
use harmonaize_abi::{Bytes, Collective, OperationId};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// Operations that are older say nothing any more.
const WINDOW: Duration = Duration::from_secs(30);

/// Most operations and iterations that are kept.
const MAX_SAMPLES: usize = 1024;

/// Fewest large operations that tell a bandwidth, unless one takes as long as a [`STALL`].
const MIN_LARGE_OPERATIONS: usize = 3;

/// An operation that takes so long counts as often as its target has passed meanwhile.
const STALL: Duration = Duration::from_secs(1);

/// A bandwidth that was too little is enough again from so much more on.
const RECOVERY_RATIO: f64 = 1.05;

/// An operation of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number on the communicator, from 0.
    pub number: OperationId,
    /// Of what; none of one that is not known here: it is held against nothing but an iteration's time.
    pub collective: Option<Collective>,
    /// Of each rank's tensor; of the larger where input and output differ.
    pub bytes: Bytes,
}

/// An operation, or the operations of an iteration together.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Duration,
    collective: Option<Collective>,
    bytes: u64,
    time: Duration,
}

/// What is measured of one agreement.
#[derive(Clone, Debug)]
pub struct Watch {
    constraints: Constraints,
    ranks: u32,
    operations: VecDeque<Sample>,
    iterations: VecDeque<Sample>,
    /// Of the iteration that is not whole yet.
    partial_iteration: (u64, Duration),
    /// The operation that has not ended and has run longest, as far as is known. It stands as its number, and what it has taken
    /// so far.
    longest_open: Option<(OperationId, Sample)>,
    /// Whether the plan gives less than was promised.
    rate_short: bool,
    /// Whether operations failed.
    failed: bool,
    broken: BTreeSet<Clause>,
    record: Record,
}

impl Watch {
    /// For a communicator of so many ranks that was promised this.
    pub fn new(constraints: Constraints, ranks: u32) -> Self {
        Self {
            constraints,
            ranks,
            operations: VecDeque::new(),
            iterations: VecDeque::new(),
            partial_iteration: (0, Duration::ZERO),
            longest_open: None,
            rate_short: false,
            failed: false,
            broken: BTreeSet::new(),
            record: Record::default(),
        }
    }

    /// What came before an agreement goes on to count in the next of the same communicator.
    pub fn continued_from(mut self, before: &Self) -> Self {
        self.record = before.record;
        self
    }

    /// An operation took `time` from its last rank's call.
    pub fn operation(&mut self, now: Duration, call: Call, time: Duration) {
        let Call { number, collective, bytes: Bytes(bytes) } = call;
        self.longest_open = self.longest_open.filter(|(open, _)| *open != number);
        let took = Sample { at: now, collective, bytes, time };
        self.record.operations += 1;
        self.record.late += u64::from(self.is_late(&took));
        push(&mut self.operations, took);
        if let Some(iteration) = self.constraints.iteration {
            self.partial_iteration.0 = self.partial_iteration.0.saturating_add(bytes);
            self.partial_iteration.1 = self.partial_iteration.1.saturating_add(time);
            if self.partial_iteration.0 >= iteration.bytes {
                let (bytes, time) = std::mem::take(&mut self.partial_iteration);
                push(&mut self.iterations, Sample { at: now, collective: None, bytes, time });
            }
        }
    }

    /// An operation that all ranks have called has taken `time` since, and has not ended.
    pub fn operation_open(&mut self, now: Duration, call: Call, time: Duration) {
        let Call { number, collective, bytes: Bytes(bytes) } = call;
        self.longest_open = Some((number, Sample { at: now, collective, bytes, time }));
    }

    /// Operations failed, and the communicator with them, through no fault of the tenant's.
    pub fn failed(&mut self) {
        self.failed = true;
        let Record { operations, late, .. } = &mut self.record;
        (*operations, *late) = (*operations + 1, *late + 1);
    }

    /// Whether the plan gives less than was promised.
    pub fn set_rate_short(&mut self, short: bool) {
        self.rate_short = short;
    }

    /// What is broken now; whether that is other than before.
    pub fn evaluate(&mut self, now: Duration) -> (&BTreeSet<Clause>, bool) {
        let since = now.saturating_sub(WINDOW);
        self.operations.retain(|took| took.at >= since);
        self.iterations.retain(|took| took.at >= since);
        self.longest_open = self.longest_open.filter(|(_, took)| took.at >= since);
        let mut broken = BTreeSet::new();
        let open = self.longest_open.map(|(_, took)| took);
        let late = open.filter(|took| self.is_late(took));
        let targets = self.operations.iter().chain(&late);
        let targets = targets.filter_map(|took| Some((took.time, self.target(took)?)));
        if p99_exceeded(targets) {
            broken.insert(Clause::Completion);
        }
        if let Some(Target { p99, .. }) = self.constraints.iteration {
            let open = open
                .map(|took| self.partial_iteration.1.saturating_add(took.time))
                .filter(|time| *time > p99);
            let all = self.iterations.iter().map(|took| took.time).chain(open);
            if p99_exceeded(all.map(|time| (time, p99))) {
                broken.insert(Clause::Iteration);
            }
        }
        // At most all its bytes are through: of one that is open that counts only where it is too little.
        let slow =
            |took: &Sample| self.on_bus(took) < self.constraints.min_busbw as f64 * took.time.as_secs_f64();
        let slow = open.filter(slow);
        let large = |took: &&Sample| took.bytes >= MIN_BANDWIDTH_BYTES && took.collective.is_some();
        let bulk = || self.operations.iter().chain(&slow).filter(large);
        let (bytes, time) =
            bulk().fold((0.0, 0.0), |sum, took| (sum.0 + self.on_bus(took), sum.1 + took.time.as_secs_f64()));
        let busbw = if time > 0.0 { bytes / time } else { 0.0 };
        self.record.busbw = busbw.min(1e18) as u64;
        let was = self.broken.contains(&Clause::Bandwidth);
        let enough = self.constraints.min_busbw as f64 * if was { RECOVERY_RATIO } else { 1.0 };
        let tells = bulk().count() >= MIN_LARGE_OPERATIONS || bulk().any(|took| took.time >= STALL);
        if self.constraints.min_busbw > 0 && tells && busbw < enough {
            broken.insert(Clause::Bandwidth);
        }
        if self.rate_short || self.failed {
            let Constraints { min_busbw, iteration, completions, .. } = &self.constraints;
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
    pub fn broken_clauses(&self) -> &BTreeSet<Clause> {
        &self.broken
    }

    /// What operations came to.
    pub fn record(&self) -> Record {
        self.record
    }

    /// When something may be other than it was judged last, though nothing happens.
    pub fn next_due(&self) -> Option<Duration> {
        let open = self.longest_open.iter().map(|(_, took)| took);
        let oldest = self.operations.front().into_iter().chain(open).min_by_key(|took| took.at);
        let oldest = oldest.filter(|_| !self.broken.is_empty())?;
        Some(oldest.at.saturating_add(WINDOW).saturating_add(Duration::from_nanos(1)))
    }

    /// An operation's bytes as bus bandwidth counts them.
    fn on_bus(&self, took: &Sample) -> f64 {
        took.bytes as f64 * took.collective.map_or(0.0, |collective| collective.bus_factor(self.ranks))
    }

    /// How long an operation like this may take, where that was said.
    fn target(&self, took: &Sample) -> Option<Duration> {
        let covers =
            |target: &&Target| Some(target.collective) == took.collective && took.bytes <= target.bytes;
        self.constraints.completions.iter().find(covers).map(|target| target.p99)
    }

    fn is_late(&self, took: &Sample) -> bool {
        self.target(took).is_some_and(|target| took.time > target)
    }
}

fn push(kept: &mut VecDeque<Sample>, took: Sample) {
    if kept.len() == MAX_SAMPLES {
        kept.pop_front();
    }
    kept.push_back(took);
}

/// Whether more than one in a hundred times, and at least two, exceed their limits. Each time comes with the longest that it may
/// be.
fn p99_exceeded(times: impl Iterator<Item = (Duration, Duration)>) -> bool {
    let (late, of) = times.fold((0_u64, 0_u64), |(late, of), (time, target)| {
        let counts = if time < STALL { 1 } else { periods_elapsed(target, time) };
        (late.saturating_add(if time > target { counts } else { 0 }), of.saturating_add(counts))
    });
    late >= 2 && late.saturating_mul(100) > of
}

/// How often a target has passed in a time; at least once.
fn periods_elapsed(target: Duration, time: Duration) -> u64 {
    let times = time.as_nanos() / target.as_nanos().max(1);
    u64::try_from(times).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(second: u64) -> Duration {
        Duration::from_secs(second)
    }

    fn ended(watch: &mut Watch, now: Duration, bytes: u64, time: Duration) {
        ended_as(watch, Some(Collective::AllReduce), now, bytes, time);
    }

    fn ended_as(
        watch: &mut Watch,
        collective: Option<Collective>,
        now: Duration,
        bytes: u64,
        time: Duration,
    ) {
        let number = OperationId(watch.record().operations);
        watch.operation(now, Call { number, collective, bytes: Bytes(bytes) }, time);
    }

    fn broken(watch: &mut Watch, now: u64) -> Vec<Clause> {
        watch.evaluate(at(now)).0.iter().copied().collect()
    }

    #[test]
    fn two_late_in_a_hundred_break_p99() {
        let mut watch = Watch::new(Constraints::new().p99(1 << 10, MS).p99(1 << 20, MS * 10), 4);
        for _ in 0..150 {
            ended(&mut watch, at(1), 1 << 10, MS);
            // Of the larger ones' size, and longer than the smaller ones may take.
            ended(&mut watch, at(1), 1 << 15, MS * 9);
        }
        // Larger than any target.
        ended(&mut watch, at(1), 1 << 30, MS * 1000);
        ended(&mut watch, at(1), 512, MS * 2);
        assert_eq!(broken(&mut watch, 1), []);
        (0..3).for_each(|_| ended(&mut watch, at(2), 1 << 20, MS * 11));
        assert_eq!(broken(&mut watch, 2), [Clause::Completion]);
        assert_eq!(
            watch.record(),
            Record { operations: 305, late: 4, busbw: watch.record().busbw, breaches: 1 }
        );
        assert!(!watch.evaluate(at(2)).1, "judged again, it is the same");
        assert_eq!(watch.next_due(), Some(at(31) + Duration::from_nanos(1)));
        assert_eq!(broken(&mut watch, 33), []);
    }

    #[test]
    fn bandwidth_is_that_of_large_operations_with_hysteresis() {
        // 4 ranks: 1 MiB in 10 ms is 157 MB/s.
        let mut watch = Watch::new(Constraints::new().min_busbw(150_000_000), 4);
        (0..5).for_each(|_| ended(&mut watch, at(1), 1 << 10, MS * 50));
        (0..2).for_each(|_| ended(&mut watch, at(1), 1 << 20, MS * 50));
        assert_eq!(broken(&mut watch, 1), [], "two tell nothing");
        ended(&mut watch, at(1), 1 << 20, MS * 50);
        assert_eq!(broken(&mut watch, 1), [Clause::Bandwidth]);
        (0..10).for_each(|_| ended(&mut watch, at(40), 1 << 20, MS * 10));
        assert_eq!(broken(&mut watch, 40), [Clause::Bandwidth], "157 is less than 1.05 times 150");
        (0..100).for_each(|_| ended(&mut watch, at(41), 1 << 20, MS * 9));
        assert_eq!(broken(&mut watch, 41), []);
        assert!((watch.record().busbw as f64 / 173e6 - 1.0).abs() < 0.02, "{:?}", watch.record());
    }

    #[test]
    fn an_iteration_is_its_operations_together() {
        let mut watch = Watch::new(Constraints::new().iteration(4 << 20, MS * 40), 4);
        for second in 0..3 {
            (0..4).for_each(|_| ended(&mut watch, at(second), 1 << 20, MS * 9));
        }
        assert_eq!(broken(&mut watch, 3), []);
        for second in 4..6 {
            (0..4).for_each(|_| ended(&mut watch, at(second), 1 << 20, MS * 11));
        }
        assert_eq!(broken(&mut watch, 6), [Clause::Iteration]);
    }

    #[test]
    fn plan_below_guarantee_breaks_its_clause() {
        let mut watch = Watch::new(Constraints::new().min_busbw(1_000_000).p99(1, MS), 2);
        watch.set_rate_short(true);
        assert_eq!(watch.evaluate(at(1)), (&BTreeSet::from([Clause::Completion, Clause::Bandwidth]), true));
        watch.set_rate_short(false);
        assert_eq!(watch.evaluate(at(2)), (&BTreeSet::new(), true));
        let next = Watch::new(Constraints::new(), 2).continued_from(&watch);
        assert_eq!(next.record().breaches, 2);
    }

    #[test]
    fn what_was_not_asked_for_is_never_broken() {
        let mut watch = Watch::new(Constraints::new().weight(3), 4);
        watch.set_rate_short(true);
        (0..2000).for_each(|_| ended(&mut watch, at(1), 1 << 20, MS * 1000));
        assert_eq!(broken(&mut watch, 1), []);
        assert_eq!(watch.record().operations, 2000);
    }

    /// An operation of a fabric that stalls breaks what was promised before it has ended. It was kept as an outlier.
    #[test]
    fn stalled_operations_count_once_per_target() {
        let wanted =
            Constraints::new().p99(1 << 20, MS * 10).min_busbw(10_000_000).iteration(8 << 20, MS * 400);
        let mut watch = Watch::new(wanted, 4);
        (0..200).for_each(|_| ended(&mut watch, at(1), 1 << 20, MS * 9));
        let stalled =
            Call { number: OperationId(200), collective: Some(Collective::AllReduce), bytes: Bytes(1 << 20) };
        watch.operation_open(at(2), stalled, MS * 9);
        assert_eq!(broken(&mut watch, 2), [], "it is in time yet");
        watch.operation_open(at(2), stalled, MS * 900);
        assert_eq!(broken(&mut watch, 2), [], "one of 201");
        watch.operation_open(at(5), stalled, MS * 4000);
        assert_eq!(broken(&mut watch, 5), [Clause::Completion, Clause::Iteration]);
        // 200 MiB in 1.8 s, and one more in a minute.
        watch.operation_open(at(20), stalled, MS * 60_000);
        assert_eq!(broken(&mut watch, 20), [Clause::Completion, Clause::Iteration, Clause::Bandwidth]);
        assert_eq!(watch.record().late, 0, "it has not ended");
        watch.operation(at(21), stalled, MS * 61_000);
        assert!(watch.longest_open.is_none() && watch.record().late == 1);
        assert_eq!(broken(&mut watch, 21), [Clause::Completion, Clause::Bandwidth]);
        assert_eq!(watch.next_due(), Some(at(31) + Duration::from_nanos(1)));
        assert_eq!(broken(&mut watch, 52), []);
        // Nobody tells of it any more.
        watch.operation_open(at(60), stalled, MS * 4000);
        assert_eq!(broken(&mut watch, 60), [Clause::Completion, Clause::Iteration, Clause::Bandwidth]);
        assert_eq!(watch.next_due(), Some(at(90) + Duration::from_nanos(1)));
        assert_eq!(broken(&mut watch, 91), []);
    }

    /// Of 8 ranks, at six tenths of what was promised, and at eleven tenths of it. The busbw is reckoned as that of each
    /// collective.
    #[test]
    fn each_collective_has_its_own_bandwidth() {
        let promised = 100_000_000;
        for collective in Collective::ALL.iter().filter(|one| one.has_data()) {
            for (part, expected) in [(0.6, vec![Clause::Bandwidth]), (1.1, vec![])] {
                let mut watch = Watch::new(Constraints::new().min_busbw(promised), 8);
                let bytes = 1_u64 << 20;
                let seconds = bytes as f64 * collective.bus_factor(8) / (promised as f64 * part);
                let time = Duration::from_secs_f64(seconds);
                (0..5).for_each(|_| ended_as(&mut watch, Some(*collective), at(1), bytes, time));
                assert_eq!(broken(&mut watch, 1), expected, "{collective} at {part}");
                assert!((watch.record().busbw as f64 / promised as f64 - part).abs() < 1e-3);
            }
        }
        let mut watch = Watch::new(Constraints::new().min_busbw(promised), 8);
        (0..5).for_each(|_| ended_as(&mut watch, None, at(1), 1 << 20, at(1)));
        assert_eq!((broken(&mut watch, 1), watch.record().busbw), (vec![], 0), "nobody knows what they were");
    }

    #[test]
    fn a_target_is_for_its_collective_alone() {
        let wanted = Constraints::new().p99_of(Collective::AllGather, 1 << 16, MS * 10).p99(1 << 16, MS * 50);
        let mut watch = Watch::new(wanted, 4);
        let others = Collective::ALL.iter().filter(|one| **one != Collective::AllGather);
        for other in others.map(|one| Some(*one)).chain([None]) {
            (0..9).for_each(|_| ended_as(&mut watch, other, at(1), 1 << 10, MS * 40));
        }
        assert_eq!(broken(&mut watch, 1), []);
        (0..9).for_each(|_| ended_as(&mut watch, Some(Collective::AllGather), at(1), 1 << 10, MS * 40));
        assert_eq!((broken(&mut watch, 1), watch.record().late), (vec![Clause::Completion], 9));
    }

    #[test]
    fn failures_break_all_operation_clauses() {
        let mut watch = Watch::new(Constraints::new().weight(2).p99(1, MS), 2);
        ended(&mut watch, at(1), 1, MS);
        watch.failed();
        assert_eq!(broken(&mut watch, 1), [Clause::Completion]);
        assert_eq!((watch.record().operations, watch.record().late, watch.record().breaches), (2, 1, 1));
    }
}
