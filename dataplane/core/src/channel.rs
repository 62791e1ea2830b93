//! The interpreter of one channel: the segment it runs, which steps are issued, which have completed.

use crate::counts::Counts;
use harmonaize_abi::{Epoch, OperationId, SegmentId, SegmentIndex, Signature, StepId};
use harmonaize_plan::{Buffer, Coding, Operand, Program, Retention, Slot, Step};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A step not yet issued.
const NOT_ISSUED: u8 = u8::MAX;

/// The segment that a channel runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Segment {
    /// Its number on the communicator.
    pub number: SegmentId,
    /// The operation that it belongs to, which may have been completed.
    pub operation: OperationId,
    /// The signature of the operation.
    pub signature: Signature,
    /// The epoch whose plan it follows.
    pub epoch: Epoch,
    /// The first element, of every block.
    pub lo: u64,
    /// One past the last element, of every block.
    pub hi: u64,
    /// Its program.
    pub program: Arc<Program>,
    /// The compression of the operands that its program compresses.
    pub coding: Option<Coding>,
    pub(crate) retention: Retention,
    /// How many elements each block has, if that differs.
    pub(crate) counts: Option<Arc<Counts>>,
    /// Its index in its session with an aggregator, if one sums it. Its program does not run unless it is left to the hosts.
    pub aggregated: Option<SegmentIndex>,
    /// How it is begun again, if it is although its sum is there.
    pub resume: Option<Resume>,
}

/// How the hosts begin a segment again whose result somebody has.
///
/// No input is read: the program's first steps copy the result where it is kept, and elsewhere what adds nothing to a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// Whether the result is kept here. It stands for the input of the first local rank, or of a broadcast's root.
    pub source: bool,
    /// Whether it was done here: outputs have been written, and may belong to the tenant again.
    pub completed: bool,
}

impl Segment {
    /// The elements of an operand: where they begin in its tensor, and how many there are.
    pub fn elements(&self, operand: &Operand) -> (u64, u64) {
        let part = operand.part;
        let Some(counts) = &self.counts else {
            let (start, elements) = part.elements(self.lo, self.hi);
            return (
                u64::from(part.block).saturating_mul(self.signature.count).saturating_add(start),
                elements,
            );
        };
        let (collective, ranks) = (counts.collective(), counts.ranks());
        let of = |index| counts.get(index).map_or(0, |(_, count)| count);
        let before = |index: &dyn Fn(u32) -> u32| {
            (0..part.block).map(|block| of(index(block))).fold(0, u64::saturating_add)
        };
        let (offset, count) = match operand.buffer {
            Buffer::Input(rank) => {
                let index = |block| collective.count_of_input(rank, block, ranks);
                (before(&index), of(index(part.block)))
            }
            Buffer::Output(rank) => {
                let index = |block| collective.count_of_output(rank, block, ranks);
                (before(&index), of(index(part.block)))
            }
            Buffer::Staging(_) | Buffer::Peer(_) => (0, of(part.block)),
        };
        // A block ends where it ends, within the segment or before it.
        let (start, elements) = part.elements(self.lo.min(count), self.hi.min(count));
        (offset.saturating_add(start), elements)
    }

    /// Where an operand of a staging slot begins in it, in elements.
    pub fn offset_in_slot(&self, slot: Slot, operand: &Operand) -> u64 {
        let part = operand.part;
        let Some(divisor) = self.program.slots.get(usize::from(slot.0)) else { return 0 };
        let count = match &self.counts {
            Some(counts) => counts.get(part.block).map_or(0, |(_, count)| count),
            None => self.hi,
        };
        part.offset_in_slot(*divisor, self.lo.min(count), self.hi.min(count))
    }

    /// Whether its result waits in staging: for everybody's acknowledgement, or until it is done here ([`Segment::retains_output`]).
    pub fn stages_output(&self) -> bool {
        self.retention == Retention::HoldOutputs || self.aggregated.is_some() && self.retains_output()
    }

    /// Whether a destination of a step is memory that another operand of the step stands for already, and is not written again.
    ///
    /// Of a segment that was completed here and is begun again all outputs lie in one place. Not every step has that of the first
    /// local rank: a tensor that is not mapped is stored from staging.
    pub fn is_aliased(&self, step: &Step, operand: &Operand) -> bool {
        let output = |operand: &Operand| matches!(operand.buffer, Buffer::Output(_));
        let mut operands = step.sources.iter().chain(&step.destinations);
        let first = operands.find(|other| output(other) && other.part == operand.part);
        self.resume.is_some_and(|resume| resume.completed)
            && output(operand)
            && first.is_some_and(|first| first.buffer != operand.buffer)
    }

    /// Whether its result stays in staging until everybody has it, since the operation may be completed before.
    pub fn retains_output(&self) -> bool {
        self.retention == Retention::CopyInputs && self.lo < self.hi
    }
}

/// The interpreter of one segment after another: its steps in order.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Channel {
    segment: Option<Segment>,
    /// By step: parts of it that are still under way, or [`NOT_ISSUED`].
    pending: Vec<u8>,
    next: usize,
    /// The next step to consider for [`crate::Action::Post`].
    next_post: usize,
    unfinished: usize,
    /// Steps before this one are not committed ones.
    committed: usize,
    uncommitted_remaining: usize,
    /// Whether the aggregator has summed the segment.
    summed: bool,
    /// Whether the sum was copied from staging to the outputs.
    copied_out: bool,
    /// Whether that copy is still on its way to tensors that are not mapped. Whoever takes it over says so again.
    #[serde(skip)]
    copying: bool,
}

impl Channel {
    pub(crate) fn segment(&self) -> Option<&Segment> {
        self.segment.as_ref()
    }

    pub(crate) fn begin(&mut self, segment: Segment) {
        debug_assert!(self.segment.is_none(), "a channel runs one segment at a time");
        let steps = &segment.program.steps;
        self.pending.clear();
        self.pending.resize(steps.len(), NOT_ISSUED);
        self.next = 0;
        self.next_post = 0;
        self.unfinished = steps.len();
        self.committed = steps.iter().position(|step| step.committed).unwrap_or(steps.len());
        self.uncommitted_remaining = self.committed;
        (self.summed, self.copied_out) = (false, false);
        self.segment = Some(segment);
    }

    /// The next step in order if its dependencies have completed; `acknowledged` lets committed ones pass.
    pub(crate) fn ready(&self, acknowledged: bool) -> Option<(StepId, &Segment, &Step)> {
        let segment = self.segment.as_ref().filter(|segment| segment.aggregated.is_none())?;
        let step = segment.program.steps.get(self.next)?;
        if step.committed && (!acknowledged || self.uncommitted_remaining > 0) {
            return None;
        }
        let met = step.after.iter().all(|&earlier| self.pending.get(earlier as usize) == Some(&0));
        met.then_some((StepId(self.next as u32), segment, step))
    }

    /// The next step has been issued and waits for `parts` completions.
    pub(crate) fn issue(&mut self, parts: u8) {
        let step = self.next;
        debug_assert!(parts != NOT_ISSUED, "more parts than a step may have");
        debug_assert_eq!(
            self.pending.get(step),
            Some(&NOT_ISSUED),
            "a step is issued twice, or there is none"
        );
        self.next += 1;
        if let Some(pending) = self.pending.get_mut(step) {
            *pending = parts;
        }
        if parts == 0 {
            self.finish_step(step);
        }
    }

    /// One part of a step has completed. False if none was under way.
    #[must_use]
    pub(crate) fn complete(&mut self, step: StepId) -> bool {
        let step = step.0 as usize;
        match self.pending.get_mut(step) {
            Some(pending) if *pending != NOT_ISSUED && *pending > 0 => {
                *pending -= 1;
                if *pending == 0 {
                    self.finish_step(step);
                }
                true
            }
            _ => false,
        }
    }

    /// The first step from `post` on that is not issued yet. It is at most `ahead` behind the next to be
    /// issued.
    pub(crate) fn postable(&self, ahead: usize) -> Option<(usize, &Segment, &Step)> {
        let segment = self.segment.as_ref().filter(|segment| segment.aggregated.is_none())?;
        let at = self.next_post.max(self.next);
        let step = segment.program.steps.get(at).filter(|_| at < self.next + ahead)?;
        Some((at, segment, step))
    }

    /// Considers the steps after this one from now on.
    pub(crate) fn skip_posts_to(&mut self, step: usize) {
        self.next_post = step + 1;
    }

    /// The steps before `step` that have not completed, and whether each has been issued.
    pub(crate) fn incomplete_before(&self, step: usize) -> impl Iterator<Item = (&Step, bool)> {
        let steps = self.segment.iter().flat_map(|segment| &segment.program.steps);
        let steps = steps.zip(&self.pending).take(step);
        steps.filter(|(_, pending)| **pending != 0).map(|(step, pending)| (step, *pending != NOT_ISSUED))
    }

    fn finish_step(&mut self, step: usize) {
        debug_assert!(step < self.next, "a step ends that was not issued");
        self.unfinished -= 1;
        if step < self.committed {
            self.uncommitted_remaining -= 1;
        }
        debug_assert!(self.uncommitted_remaining <= self.unfinished, "a part is larger than the whole");
    }

    /// Whether this participant's part in the segment is done but for what waits for the acknowledgement.
    pub(crate) fn done(&self) -> bool {
        if self.aggregated() { self.summed } else { self.uncommitted_remaining == 0 }
    }

    fn aggregated(&self) -> bool {
        self.segment.as_ref().is_some_and(|segment| segment.aggregated.is_some())
    }

    /// The aggregator has summed the segment; its operation.
    pub(crate) fn handle_sum(&mut self) -> Option<OperationId> {
        let operation = self.segment.as_ref()?.operation;
        self.summed = true;
        Some(operation)
    }

    /// Whether a sum is to be copied to the outputs, now that everybody has acknowledged. True once.
    pub(crate) fn take_copy_out(&mut self) -> bool {
        self.aggregated()
            && self.summed
            && !std::mem::replace(&mut self.copied_out, true)
            && self.stages_output()
    }

    /// Whether a sum is to be copied to the outputs as soon as it is done here. True once.
    pub(crate) fn take_eager_copy_out(&mut self) -> bool {
        self.segment.as_ref().is_some_and(Segment::retains_output) && self.take_copy_out()
    }

    /// The copy that was asked for goes on.
    pub(crate) fn defer_copy_out(&mut self) {
        self.copying = self.segment.is_some();
    }

    /// That copy has ended.
    pub(crate) fn end_copy_out(&mut self) {
        self.copying = false;
    }

    /// The segment whose sum is on its way to the outputs.
    pub(crate) fn copying(&self) -> Option<SegmentId> {
        self.segment.as_ref().filter(|_| self.copying).map(|segment| segment.number)
    }

    fn stages_output(&self) -> bool {
        self.segment.as_ref().is_some_and(Segment::stages_output)
    }

    /// Begins an aggregated segment again, by its program; false if it is none.
    pub(crate) fn fall_back(&mut self, restored: Option<Resume>) -> bool {
        let Some(segment) = self.segment.take_if(|segment| segment.aggregated.is_some()) else {
            return false;
        };
        self.begin(Segment { aggregated: None, resume: restored, ..segment });
        true
    }

    /// Whether nothing at all is left to do, given that everybody has (or has not) acknowledged.
    pub(crate) fn released(&self, acknowledged: bool) -> bool {
        if self.copying {
            return false;
        }
        if self.aggregated() {
            return acknowledged && self.summed && (self.copied_out || !self.stages_output());
        }
        let kept = self.segment.as_ref().is_some_and(|s| s.retention != Retention::KeepInputs);
        self.segment.is_some() && self.unfinished == 0 && (acknowledged || !kept)
    }

    pub(crate) fn clear(&mut self) -> Option<Segment> {
        debug_assert!(self.done(), "a channel is cleared under its segment");
        self.segment.take()
    }
}
