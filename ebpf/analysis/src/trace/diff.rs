//! What two traces, or two lists of findings, do not have in common.

use super::Record;
use harmonaize_abi::Nanos;
use std::time::Duration;

/// Something with a time at which it may be compared with a tolerance.
pub trait Timed {
    /// When it was, or began.
    fn time(&self) -> Nanos;

    /// Whether both say the same, but for their times.
    fn same_content(&self, other: &Self) -> bool;
}

/// What one side has, and the other has not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference<T> {
    /// Only in the first, in its order.
    pub first: Vec<T>,
    /// Only in the second, in its order.
    pub second: Vec<T>,
    /// Pairs that say the same within the tolerance.
    pub common: u64,
    /// The largest distance of the times of such a pair.
    pub largest: Duration,
}

impl<T> Difference<T> {
    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.first.is_empty() && self.second.is_empty()
    }
}

/// Pairs what says the same at times at most `tolerance` apart, the earliest first, and tells what is left.
///
/// Both sides may be in any order. Where many say the same within the tolerance, the time grows with their number.
pub fn diff<T: Timed + Clone>(first: &[T], second: &[T], tolerance: Duration) -> Difference<T> {
    let sorted = |side: &[T]| {
        let mut order: Vec<usize> = (0..side.len()).collect();
        order.sort_by_key(|at| side.get(*at).map_or(Nanos(0), Timed::time));
        order
    };
    let (mut used_first, mut used_second) = (vec![false; first.len()], vec![false; second.len()]);
    let (by_first, by_second) = (sorted(first), sorted(second));
    let (mut from, mut common, mut largest) = (0, 0, Duration::ZERO);
    for at in by_first {
        let Some(one) = first.get(at) else { continue };
        let time = one.time();
        let early = |place: &usize| {
            let used = used_second.get(*place).copied().unwrap_or(true);
            used || second.get(*place).is_none_or(|other| other.time().after(tolerance) < time)
        };
        while by_second.get(from).is_some_and(early) {
            from += 1;
        }
        for place in by_second.iter().skip(from) {
            let (Some(other), Some(used)) = (second.get(*place), used_second.get_mut(*place)) else {
                continue;
            };
            if other.time() > time.after(tolerance) {
                break;
            }
            if !*used && one.same_content(other) {
                *used = true;
                if let Some(used) = used_first.get_mut(at) {
                    *used = true;
                }
                common += 1;
                largest = largest.max(other.time().abs_diff(time));
                break;
            }
        }
    }
    let left = |side: &[T], used: &[bool]| {
        side.iter().zip(used).filter(|(_, used)| !**used).map(|(one, _)| one.clone()).collect()
    };
    let (first, second) = (left(first, &used_first), left(second, &used_second));
    Difference { first, second, common, largest }
}

/// [`diff`] of records: times within their contents have to be equal.
pub fn diff_records(first: &[Record], second: &[Record], tolerance: Duration) -> Difference<Record> {
    diff(first, second, tolerance)
}

impl Timed for Record {
    fn time(&self) -> Nanos {
        Self::time(self)
    }

    fn same_content(&self, other: &Self) -> bool {
        let without = |record: &Self| {
            let mut record = *record;
            match &mut record {
                Self::Observer(observer) => observer.time_ns = 0,
                Self::Event(event) => event.time_ns = 0,
                Self::Tcp { time_ns, .. } | Self::Roce { time_ns, .. } | Self::Totals { time_ns, .. } => {
                    *time_ns = 0;
                }
                Self::Mark(mark) => mark.time_ns = 0,
                Self::Owner(owner) => owner.time_ns = 0,
                Self::Link(link) => link.time_ns = 0,
                Self::Lost(lost) => lost.time_ns = 0,
                Self::Port(port) => port.time_ns = 0,
                Self::Completion(completion) => completion.time_ns = 0,
            }
            record
        };
        without(self) == without(other)
    }
}
