//! Constraints: what a tenant wants of one of its communicators; and agreements: what of it the provider has promised.

use super::Budget;
use super::list::bounded;
use crate::Collective;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Most [`Target`]s of one communicator.
pub const MAX_COMPLETIONS: usize = 4;
/// The largest weight.
pub const MAX_WEIGHT: u32 = 64;
/// Bytes of the largest operation or iteration that a target can be for.
pub const MAX_TARGET_BYTES: u64 = 1 << 44;
/// The shortest and longest targets.
pub const TARGETS: (Duration, Duration) = (Duration::from_micros(10), Duration::from_secs(3600));
/// The least and most bytes a second that can be asked for.
pub const BUSBW: (u64, u64) = (1_000, 1_000_000_000_000);
/// The shortest and longest time for members to [go on](OnFailure::Regroup) in.
pub const REGROUP: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3600));
/// Operations of fewer bytes say nothing of bandwidth: their delays are what takes the time.
pub const MIN_BANDWIDTH_BYTES: u64 = 1 << 20;

/// So many bytes are through within so long, in 99 of 100 cases.
///
/// A target for single operations is for those of its collective. Of an iteration all operations count; its time is predicted as if they were of
/// this collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Target {
    /// Of what.
    pub collective: Collective,
    /// At most so many: of each rank's tensor, of the larger where input and output differ.
    pub bytes: u64,
    /// From when the last rank has called until the last has its result.
    pub p99: Duration,
}

impl core::fmt::Display for Target {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Self { collective, bytes, p99 } = self;
        write!(f, "{collective} of {bytes} B within {p99:?}")
    }
}

/// How much a communicator matters beside others, of whoever's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Priority {
    /// A quarter of the usual share; nothing is promised.
    Low,
    /// The usual share.
    #[default]
    Normal,
    /// Four times the usual share.
    High,
}

/// What becomes of a communicator that fails. It fails when it ends because ranks are lost, or with another error than
/// that an operator ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OnFailure {
    /// It is over. Nothing is kept of it, and its members cannot regroup.
    End,
    /// Its members are expected to regroup.
    Regroup {
        /// How long its place and what was promised for it are kept for them. Then the one that goes on has formed of those who came,
        /// or it is over.
        within: Duration,
    },
}

/// What a tenant wants of one communicator: intent, no mechanism. What is left out is the provider's choice.
///
/// ```
/// # use harmonaize_abi::session::{Constraints, Priority};
/// # use core::time::Duration;
/// let serving = Constraints::new().priority(Priority::High).p99(64 << 10, Duration::from_millis(5));
/// assert!(serving.check().is_ok());
/// let contradictory = serving.priority(Priority::Low).min_busbw(100_000_000);
/// assert!(contradictory.check().unwrap_err()[0].text.contains("low priority"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Constraints {
    /// What may be lost of its tensors; what its ranks said when they joined, if left out.
    pub budget: Option<Budget>,
    /// Targets for single operations, by collective, and of ascending sizes.
    #[serde(deserialize_with = "bounded::<MAX_COMPLETIONS, _, _>")]
    pub completions: Vec<Target>,
    /// A target for all operations of one iteration together: their times are added.
    pub iteration: Option<Target>,
    /// How much it matters beside others.
    pub priority: Priority,
    /// Its share of what it shares with others, relative to theirs; 1 to [`MAX_WEIGHT`].
    pub weight: u32,
    /// Least bus bandwidth of operations of [`MIN_BANDWIDTH_BYTES`] and more, bytes a second; 0 for none. Bus bandwidth is as NCCL's tests
    /// reckon it ([`Collective::bus_factor`]).
    pub min_busbw: u64,
    /// Whether its operations may be summed on the way.
    pub aggregation: bool,
    /// What becomes of it when it fails; if left out its members may regroup, and nothing is kept for them.
    pub on_failure: Option<OnFailure>,
    /// Whether its sums and products of floats have the same bits in every run. Whichever route they have, they are added in one order,
    /// rank by rank of a host and then host by host, by each host's lowest rank. They are exact then, whatever a budget lets be lost.
    pub ordered: bool,
}

impl Default for Constraints {
    /// None.
    fn default() -> Self {
        Self {
            budget: None,
            completions: Vec::new(),
            iteration: None,
            priority: Priority::Normal,
            weight: 1,
            min_busbw: 0,
            aggregation: true,
            on_failure: None,
            ordered: false,
        }
    }
}

/// One of the things that a tenant can want.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Clause {
    /// [`Constraints::budget`].
    Budget,
    /// [`Constraints::completions`].
    Completion,
    /// [`Constraints::iteration`].
    Iteration,
    /// [`Constraints::priority`].
    Priority,
    /// [`Constraints::weight`].
    Weight,
    /// [`Constraints::min_busbw`].
    Bandwidth,
    /// [`Constraints::aggregation`].
    Aggregation,
    /// [`Constraints::on_failure`].
    OnFailure,
    /// [`Constraints::ordered`].
    Order,
}

/// Why something cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Reason {
    /// What.
    pub clause: Clause,
    /// For people: the value, and what would do.
    pub text: String,
}

/// What the provider has promised for one communicator, until that ends or another agreement takes its place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Agreement {
    /// Counts the communicator's agreements from 1; 0 where nothing was ever agreed on.
    pub number: u64,
    /// What is promised.
    pub constraints: Constraints,
    /// Since when, in nanoseconds since 1970.
    pub since_ns: u64,
    /// What of it is not kept now.
    pub broken: Vec<Clause>,
    /// How it was kept.
    pub record: Record,
}

/// What a communicator's operations came to since the agreement, as the provider measured it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Record {
    /// Operations that were looked at.
    pub operations: u64,
    /// Those that took longer than a target lets them.
    pub late: u64,
    /// Bus bandwidth of the latest ones of [`MIN_BANDWIDTH_BYTES`] and more, bytes a second; 0 where there were none.
    pub busbw: u64,
    /// How often a clause ceased to be kept.
    pub breaches: u64,
}

/// What comes of a proposal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Negotiated {
    /// This is in force.
    Agreed(Agreement),
    /// What was in force before still is.
    Refused {
        /// Why; at least one.
        reasons: Vec<Reason>,
        /// What could be had instead; none where that could not be asked. To take it, propose it.
        counter: Option<Constraints>,
    },
}

impl Constraints {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets this be lost of tensors.
    #[must_use]
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = Some(budget);
        self
    }

    /// Wants AllReduces of up to so many bytes to end within `p99`, in 99 of 100 cases.
    #[must_use]
    pub fn p99(self, bytes: u64, p99: Duration) -> Self {
        self.p99_of(Collective::AllReduce, bytes, p99)
    }

    /// Wants operations of a collective of up to so many bytes to end within `p99`, in 99 of 100 cases. A Barrier has none: 1 will do.
    #[must_use]
    pub fn p99_of(mut self, collective: Collective, bytes: u64, p99: Duration) -> Self {
        self.completions.push(Target { collective, bytes, p99 });
        self.completions.sort_by_key(|completion| (completion.collective, completion.bytes));
        self
    }

    /// Wants the operations of an iteration, of so many bytes together, to take at most `p99` together.
    #[must_use]
    pub fn iteration(mut self, bytes: u64, p99: Duration) -> Self {
        self.iteration = Some(Target { collective: Collective::AllReduce, bytes, p99 });
        self
    }

    /// Matters so much.
    #[must_use]
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Has this share, relative to others'.
    #[must_use]
    pub fn weight(mut self, weight: u32) -> Self {
        self.weight = weight;
        self
    }

    /// Wants so many bytes a second of bus bandwidth.
    #[must_use]
    pub fn min_busbw(mut self, bytes_a_second: u64) -> Self {
        self.min_busbw = bytes_a_second;
        self
    }

    /// Says whether operations may be summed on the way.
    #[must_use]
    pub fn aggregation(mut self, allowed: bool) -> Self {
        self.aggregation = allowed;
        self
    }

    /// Says what becomes of it when it fails.
    #[must_use]
    pub fn on_failure(mut self, policy: OnFailure) -> Self {
        self.on_failure = Some(policy);
        self
    }

    /// Says whether sums of floats have the same bits in every run.
    #[must_use]
    pub fn ordered(mut self, wanted: bool) -> Self {
        self.ordered = wanted;
        self
    }

    /// Whether it wants a part of the network for itself: then others have less to share.
    pub fn wants_guarantee(&self) -> bool {
        self.min_busbw > 0 || self.iteration.is_some() || !self.completions.is_empty()
    }

    /// The nearest that makes sense, of all but a budget. Values are brought into range. Of times that contradict each other it has the
    /// longer one, of too many targets those for the smallest operations, and beside a guarantee the usual priority for the low one.
    /// [`Constraints::check`] passes it.
    #[must_use]
    pub fn clamped(&self) -> Self {
        let within = |target: Target| Target {
            collective: target.collective,
            bytes: target.bytes.clamp(1, MAX_TARGET_BYTES),
            p99: target.p99.clamp(TARGETS.0, TARGETS.1),
        };
        let mut mended = self.clone();
        mended.weight = self.weight.clamp(1, MAX_WEIGHT);
        if self.min_busbw > 0 {
            mended.min_busbw = self.min_busbw.clamp(BUSBW.0, BUSBW.1);
        }
        mended.iteration = self.iteration.map(within);
        let targets = &mut mended.completions;
        targets.iter_mut().for_each(|target| *target = within(*target));
        targets.sort_by_key(|target| (target.collective, target.bytes, Reverse(target.p99)));
        targets.dedup_by_key(|target| (target.collective, target.bytes));
        targets.truncate(MAX_COMPLETIONS);
        mended.order_times();
        if let Some(OnFailure::Regroup { within }) = &mut mended.on_failure {
            *within = (*within).clamp(REGROUP.0, REGROUP.1);
        }
        if self.priority == Priority::Low && mended.wants_guarantee() {
            mended.priority = Priority::Normal;
        }
        mended
    }

    /// Has no larger operation of a collective end sooner than a smaller one.
    pub fn order_times(&mut self) {
        let mut before: Option<Target> = None;
        for target in &mut self.completions {
            if let Some(before) = before.filter(|before| before.collective == target.collective) {
                target.p99 = target.p99.max(before.p99);
            }
            before = Some(*target);
        }
    }

    /// Whether it makes sense, whoever the provider is: values in range, and nothing that contradicts itself. A budget has a check of
    /// its own.
    ///
    /// # Errors
    /// Everything that does not.
    pub fn check(&self) -> Result<(), Vec<Reason>> {
        let mut reasons = Vec::new();
        let mut wrong = |clause, text| reasons.push(Reason { clause, text });
        if !(1..=MAX_WEIGHT).contains(&self.weight) {
            wrong(Clause::Weight, format!("a weight of {}; 1 to {MAX_WEIGHT} are possible", self.weight));
        }
        if self.min_busbw != 0 && !(BUSBW.0..=BUSBW.1).contains(&self.min_busbw) {
            let text = format!(
                "a bus bandwidth of {} B/s; {} to {} are possible, or 0 for none",
                self.min_busbw, BUSBW.0, BUSBW.1
            );
            wrong(Clause::Bandwidth, text);
        }
        if self.completions.len() > MAX_COMPLETIONS {
            // Of the others nothing is said: there may be any number.
            wrong(Clause::Completion, format!("more than {MAX_COMPLETIONS} targets for operations"));
            return Err(reasons);
        }
        let targets = self.completions.iter().map(|target| (Clause::Completion, target));
        for (clause, target) in targets.chain(self.iteration.iter().map(|it| (Clause::Iteration, it))) {
            let Target { bytes, p99, .. } = *target;
            if bytes == 0 || bytes > MAX_TARGET_BYTES {
                wrong(clause, format!("a target for {bytes} B; it is for 1 to {MAX_TARGET_BYTES} B"));
            }
            if p99 < TARGETS.0 || p99 > TARGETS.1 {
                wrong(
                    clause,
                    format!("a target of {p99:?}; {:?} to {:?} are possible", TARGETS.0, TARGETS.1),
                );
            }
        }
        for (smaller, larger) in self.completions.iter().zip(self.completions.iter().skip(1)) {
            let ascend = (smaller.collective, smaller.bytes) < (larger.collective, larger.bytes);
            if !ascend || (larger.collective == smaller.collective && larger.p99 < smaller.p99) {
                let text = format!(
                    "{smaller} and {larger} contradict each other: larger operations take longer, and each size has one target"
                );
                wrong(Clause::Completion, text);
            }
        }
        if let Some(OnFailure::Regroup { within }) = self.on_failure
            && !(REGROUP.0..=REGROUP.1).contains(&within)
        {
            let text = format!("{within:?} to regroup in; {:?} to {:?} are possible", REGROUP.0, REGROUP.1);
            wrong(Clause::OnFailure, text);
        }
        if self.priority == Priority::Low && self.wants_guarantee() {
            let text = "low priority gives way to others, so nothing can be promised beside it; \
                leave out the targets and the bandwidth, or the priority";
            wrong(Clause::Priority, text.into());
        }
        if reasons.is_empty() { Ok(()) } else { Err(reasons) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clauses(constraints: &Constraints) -> Vec<Clause> {
        let reasons = constraints.check().err().unwrap_or_default();
        reasons.into_iter().map(|reason| reason.clause).collect()
    }

    fn regroup(within: Duration) -> Constraints {
        Constraints::new().on_failure(OnFailure::Regroup { within })
    }

    #[test]
    fn what_makes_sense_passes() {
        assert_eq!(clauses(&Constraints::new().on_failure(OnFailure::End)), []);
        assert_eq!(clauses(&Constraints::new()), []);
        let second = Duration::from_secs(1);
        let all = Constraints::new()
            .budget(Budget::MatchBf16)
            .p99(1 << 20, second)
            .p99(1 << 10, second / 1000)
            .iteration(64 << 20, second * 2)
            .priority(Priority::High)
            .weight(MAX_WEIGHT)
            .min_busbw(BUSBW.1)
            .aggregation(false)
            .on_failure(OnFailure::Regroup { within: REGROUP.1 });
        assert_eq!(clauses(&all), []);
        assert!(all.completions[0].bytes < all.completions[1].bytes, "sorted");
    }

    #[test]
    fn sums_in_order_pass_with_and_without_aggregation() {
        for good in [Constraints::new().ordered(true), Constraints::new().ordered(true).aggregation(false)] {
            assert_eq!((clauses(&good), good.clamped()), (Vec::new(), good.clone()));
        }
    }

    #[test]
    fn each_value_out_of_range_is_named() {
        let second = Duration::from_secs(1);
        let long = Duration::from_secs(3601);
        let cases = [
            (Constraints::new().weight(0), Clause::Weight, "0"),
            (Constraints::new().weight(65), Clause::Weight, "65"),
            (Constraints::new().min_busbw(1), Clause::Bandwidth, "1 B/s"),
            (Constraints::new().min_busbw(u64::MAX), Clause::Bandwidth, "18446744073709551615"),
            (Constraints::new().p99(0, second), Clause::Completion, "0 B"),
            (Constraints::new().p99(u64::MAX, second), Clause::Completion, "18446744073709551615"),
            (Constraints::new().p99(1, Duration::ZERO), Clause::Completion, "0ns"),
            (Constraints::new().p99(1, long), Clause::Completion, "3601s"),
            (Constraints::new().iteration(1, Duration::MAX), Clause::Iteration, "3600s"),
            (Constraints::new().iteration(0, second), Clause::Iteration, "0 B"),
            (regroup(Duration::ZERO), Clause::OnFailure, "0ns"),
            (regroup(long), Clause::OnFailure, "3601s"),
        ];
        for (constraints, clause, named) in cases {
            let reasons = constraints.check().unwrap_err();
            assert!(
                reasons.len() == 1 && reasons[0].clause == clause && reasons[0].text.contains(named),
                "{reasons:?}"
            );
        }
        let mut many = Constraints::new();
        for size in 1..=5_u64 {
            many = many.p99(size << 10, second);
        }
        assert_eq!(clauses(&many), [Clause::Completion]);
    }

    #[test]
    fn what_is_mended_makes_sense_and_is_near() {
        let ms = Duration::from_millis(1);
        let sensible = Constraints::new().p99(1, ms).p99(2, ms).weight(3).priority(Priority::High);
        assert_eq!(sensible.clamped(), sensible);
        let low = Constraints::new().priority(Priority::Low);
        assert_eq!(low.clamped(), low);
        assert_eq!(low.weight(99).min_busbw(7).clamped(), Constraints::new().weight(64).min_busbw(BUSBW.0));
        assert_eq!(regroup(Duration::MAX).clamped(), regroup(REGROUP.1));
        let crossed = Constraints::new().p99(4, ms).p99(2, ms * 3).p99(2, ms * 2).p99(0, Duration::ZERO);
        let expected = Constraints::new().p99(1, TARGETS.0).p99(2, ms * 3).p99(4, ms * 3);
        assert_eq!(crossed.clamped(), expected);
        let many =
            (1..9).fold(Constraints::new().iteration(u64::MAX, Duration::MAX), |all, size| all.p99(size, ms));
        let first = (1..5)
            .fold(Constraints::new().iteration(MAX_TARGET_BYTES, TARGETS.1), |all, size| all.p99(size, ms));
        assert_eq!(many.clamped(), first);
        assert_eq!(clauses(&crossed.clamped()), []);
    }

    #[test]
    fn contradictions_are_named() {
        let ms = Duration::from_millis(1);
        assert_eq!(clauses(&Constraints::new().p99(1 << 20, ms).p99(1 << 10, ms * 2)), [Clause::Completion]);
        assert_eq!(clauses(&Constraints::new().p99(1 << 20, ms).p99(1 << 20, ms)), [Clause::Completion]);
        // Not between collectives, whichever order they come in.
        let gather = |all: Constraints| all.p99_of(Collective::AllGather, 1 << 20, ms / 2);
        assert_eq!(clauses(&gather(Constraints::new()).p99(1 << 20, ms)), []);
        let mut crossed = gather(gather(Constraints::new()).p99(1 << 20, ms)).p99(1 << 10, ms);
        let text = crossed.check().unwrap_err().remove(0).text;
        assert!(text.starts_with("allgather of 1048576 B within 500µs and allgather of"), "{text}");
        crossed = crossed.clamped();
        assert_eq!((clauses(&crossed), crossed.completions.len()), (Vec::new(), 3));
        crossed.completions.reverse();
        assert_eq!(clauses(&crossed), [Clause::Completion; 2]);
        let low = Constraints::new().priority(Priority::Low);
        assert_eq!(clauses(&low), []);
        assert_eq!(clauses(&low.clone().min_busbw(1_000_000)), [Clause::Priority]);
        assert_eq!(clauses(&low.clone().p99(1, ms)), [Clause::Priority]);
        assert_eq!(clauses(&low.iteration(1, ms)), [Clause::Priority]);
    }
}
