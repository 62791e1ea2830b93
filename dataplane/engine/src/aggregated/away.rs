//! What is on its way of a channel's segment whose tensors are not mapped.

use harmonaize_abi::{Epoch, SegmentId, SegmentIndex, StepId};
use harmonaize_core::CodingReport;
use harmonaize_shm::Memory;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// In tags, the steps of these transfers. No program has so many, and those of error feedback are above.
const STEPS: RangeInclusive<u32> = 0xe_0000..=0xe_ffff;

/// What follows once all of a segment's transfers have ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// Its inputs are there: the worker may have it.
    Fetch,
    /// Its result is where it belongs, and so it is done as this segment of the epoch's session.
    Store { epoch: Epoch, index: SegmentIndex, coded: Option<CodingReport> },
    /// What was held of it is where it belongs.
    CopyOut,
}

/// A channel's transfers for an aggregator. They are of one segment at a time.
#[derive(Debug, Default)]
pub(crate) struct Away {
    /// Where inputs are fetched to, by local rank; then where an average lies that is stored.
    pub(crate) inputs: Option<Arc<Memory>>,
    of: Option<(SegmentId, Purpose)>,
    /// Transfers that have not ended.
    pending: usize,
    /// How often some have begun: those of a segment that hosts have begun again may end late.
    number: u16,
}

impl Away {
    /// So many transfers of a segment begin. Returns the step of their tags.
    pub(crate) fn begin(&mut self, segment: SegmentId, purpose: Purpose, transfers: usize) -> StepId {
        self.number = self.number.wrapping_add(1);
        (self.of, self.pending) = (Some((segment, purpose)), transfers);
        self.step()
    }

    fn step(&self) -> StepId {
        StepId(STEPS.start() + u32::from(self.number))
    }

    /// A transfer has ended. Returns of what, if it was the last of these.
    pub(crate) fn end_one(&mut self, step: StepId) -> Option<(SegmentId, Purpose)> {
        if step != self.step() {
            return None;
        }
        self.pending = self.pending.checked_sub(1)?;
        self.of.filter(|_| self.pending == 0)
    }

    /// What was held of a segment is on its way to one more tensor, as another process had it. `step` is that of its transfer's tag.
    pub(crate) fn inherit(&mut self, segment: SegmentId, step: StepId) {
        // A number has 16 bits, and so have steps of these transfers.
        self.number = step.0.saturating_sub(*STEPS.start()) as u16;
        (self.of, self.pending) = (Some((segment, Purpose::CopyOut)), self.pending + 1);
    }

    /// Whether hosts do again what a transfer is for, if its session ends. What was held is not: its segment is done.
    pub(crate) fn begins_again(&self, step: StepId) -> bool {
        step != self.step() || !matches!(self.of, Some((_, Purpose::CopyOut)))
    }

    /// Whether a segment's transfers have begun.
    pub(crate) fn has_begun(&self, segment: SegmentId) -> bool {
        self.of.is_some_and(|(of, _)| of == segment)
    }

    /// Whether they have begun and ended.
    pub(crate) fn has_ended(&self, segment: SegmentId) -> bool {
        self.has_begun(segment) && self.pending == 0
    }
}

/// Whether a tag's step is that of such transfers.
pub(crate) fn is_for_aggregator(step: StepId) -> bool {
    STEPS.contains(&step.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_late_is_no_segments_that_follows() {
        let mut away = Away::default();
        let first = away.begin(SegmentId(4), Purpose::Fetch, 2);
        assert!(is_for_aggregator(first) && away.has_begun(SegmentId(4)) && !away.has_ended(SegmentId(4)));
        assert!(away.end_one(first).is_none());
        let second = away.begin(SegmentId(8), Purpose::Fetch, 1);
        assert!(away.end_one(first).is_none(), "one of the segment before");
        assert!(!away.has_ended(SegmentId(8)) && !away.has_begun(SegmentId(4)));
        assert!(matches!(away.end_one(second), Some((SegmentId(8), Purpose::Fetch))));
        assert!(away.has_ended(SegmentId(8)));
        assert!(away.end_one(second).is_none(), "one more than there were");
    }

    #[test]
    fn what_is_inherited_ends_once_and_is_no_later_segments() {
        let mut before = Away::default();
        before.begin(SegmentId(4), Purpose::Fetch, 1);
        let step = before.begin(SegmentId(4), Purpose::CopyOut, 3);
        assert!(before.end_one(step).is_none() && !before.begins_again(step));
        let mut away = Away::default();
        // One of three has ended.
        (0..2).for_each(|_| away.inherit(SegmentId(4), step));
        assert!(!away.begins_again(step), "another process may inherit it too");
        assert!(away.end_one(step).is_none() && !away.has_ended(SegmentId(4)));
        assert!(matches!(away.end_one(step), Some((SegmentId(4), Purpose::CopyOut))));
        assert_ne!(away.begin(SegmentId(8), Purpose::Fetch, 1), step);
        assert!(away.end_one(step).is_none());
    }

    #[test]
    fn steps_stay_apart_from_those_of_others() {
        let mut away = Away::default();
        for _ in 0..=u32::from(u16::MAX) {
            assert!(is_for_aggregator(away.begin(SegmentId(1), Purpose::CopyOut, 1)));
        }
        assert!(!is_for_aggregator(StepId(0xf_0000)) && !is_for_aggregator(StepId(0xd_ffff)));
    }
}
