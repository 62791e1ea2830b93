//! Error feedback: where what sums are owed lies, and what of it a segment leaves as it is.
//!
//! Of a rank whose tensors are not mapped, both halves of a segment lie in staging. What is owed is fetched before any of its input is, and what
//! is left out is stored before the part's output is; an attachment ends both in the order in which they were asked for. So no step waits for
//! them: whoever has the input has what is owed, and an operation whose outputs are stored has stored what it left out.

use crate::attachment::Attachment;
use crate::communicator_state::{CommunicatorState, Pending};
use crate::context::Context;
use crate::passes::{Kernel, Pass, PassSharing};
use crate::slices::Slices;
use crate::step::{ExecuteError, is_coded, tensor_range};
use crate::table::{Key, Table};
use crate::transfer::{PendingTransfer, tag};
use harmonaize_abi::{ChannelId, StepId};
use harmonaize_codec::ErrorFeedback;
use harmonaize_core::Segment;
use harmonaize_plan::{Buffer, Operand, Part};
use harmonaize_shm::{Memory, MemoryError, Span};
use std::sync::Arc;

/// In tags, the step of a transfer that nobody waits for.
const UNTRACKED: StepId = StepId(0xf_ffff);
/// Less the place among the local ranks: the step of a fetch of what stays owed.
const FETCH_RESIDUAL: u32 = UNTRACKED.0 - 1;
/// The lowest of those; no program has so many steps.
const LOWEST_STEP: u32 = 0xf_0000;

/// Where both halves of a rank's account of a part lie.
struct ResidualPair<'a> {
    /// Of the part.
    residual_in: (&'a Arc<Memory>, u64),
    residual_out: (&'a Arc<Memory>, u64),
    bytes: u64,
    /// In staging: the rank's attachment, and where the part's halves are in its tensors.
    remote: Option<(Key, [u64; 2])>,
}

/// Bytes of a half of a segment in staging.
fn half(segment: &Segment, size: u64) -> u64 {
    ((segment.hi - segment.lo) * size).next_multiple_of(64)
}

/// What a local rank's call on a channel's segment says, if it has feedback.
fn call<'a>(member: &'a CommunicatorState, segment: &Segment, place: usize) -> Option<&'a Pending> {
    let local = member.locals.get(place)?;
    member.pending(segment.operation, local.rank).filter(|call| call.feedback.is_some())
}

fn is_mapped(attachments: &Table<Attachment>, key: Key) -> bool {
    attachments.get(key).is_some_and(Attachment::is_mapped)
}

/// Makes room for what the ranks of a channel's segment owe whose tensors are not mapped. Allocates only when that is more than any
/// before on this channel.
pub(crate) fn reserve(
    member: &mut CommunicatorState,
    channel: ChannelId,
    attachments: &Table<Attachment>,
) -> Result<(), MemoryError> {
    let Some((segment, size)) = member.segment_and_size(channel) else { return Ok(()) };
    let away = |place: &usize| {
        let local = member.locals.get(*place);
        call(member, segment, *place).is_some()
            && local.is_some_and(|local| !is_mapped(attachments, local.attachment))
    };
    let Some(last) = (0..member.locals.len()).rev().find(away) else { return Ok(()) };
    let bytes = 2 * (last as u64 + 1) * half(segment, size);
    let Some(owing) = member.residual_staging.get_mut(usize::from(channel.0)) else { return Ok(()) };
    if owing.as_ref().is_none_or(|memory| bytes > memory.bytes() as u64) {
        let bytes = usize::try_from(bytes.max(64)).map_err(|_| MemoryError::BadSize(bytes))?;
        *owing = Some(Memory::private(bytes)?);
    }
    Ok(())
}

/// What stays owed was fetched: where it goes back to, in the other half.
pub(crate) fn carried(
    member: &CommunicatorState,
    key: Key,
    channel: ChannelId,
    place: usize,
) -> Option<PendingTransfer> {
    let (segment, size) = member.segment_and_size(channel)?;
    let [_, left_out] = call(member, segment, place)?.feedback?;
    let memory = member.residual_staging.get(usize::from(channel.0))?.as_ref()?;
    let at = 2 * place as u64 * half(segment, size);
    let span = Span::new(memory, at, (segment.hi - segment.lo) * size).ok()?;
    let attachment = member.locals.get(place)?.attachment;
    let offset = left_out.offset + segment.lo * size;
    Some(PendingTransfer { attachment, tag: tag(key, channel, UNTRACKED), store: true, offset, span })
}

/// Whether a tag's step is none of a program. If it is a fetch of what stays owed, it also gives the local
/// rank.
pub(crate) fn is_untracked(step: StepId) -> Option<Option<usize>> {
    (step.0 >= LOWEST_STEP).then(|| FETCH_RESIDUAL.checked_sub(step.0).map(|place| place as usize))
}

/// The halves of a part of the segment, of those local ranks that have an account. They come in the order of the local ranks; the first
/// is the participant's.
fn halves<'a>(
    context: &Context<'a>,
    segment: &'a Segment,
    part: Part,
) -> impl Iterator<Item = Result<(usize, ResidualPair<'a>), ExecuteError>> {
    let (member, attachments, channel) = (context.member, context.attachments, context.channel);
    let given = (0..member.locals.len()).filter_map(move |place| {
        let feedback = call(member, segment, place)?.feedback?;
        Some((place, member.locals.get(place)?.attachment, feedback))
    });
    given.map(move |(place, attachment, [owed, left_out])| {
        let size = segment.signature.dtype.size() as u64;
        let local = member.locals.get(place).ok_or(ExecuteError::NoSource)?;
        let operand = Operand::exact(Buffer::Input(local.rank), part);
        let (offset, bytes) = tensor_range(segment, size, &operand);
        let there = [owed.offset + offset, left_out.offset + offset];
        let end = attachments.get(attachment).ok_or(ExecuteError::NoSource)?;
        if let Some(regions) = end.end.memory() {
            let [residual_in, residual_out] = there.map(|at| regions.locate(at, bytes));
            let (residual_in, residual_out) = (residual_in?, residual_out?);
            return Ok((place, ResidualPair { residual_in, residual_out, bytes, remote: None }));
        }
        let memory = member.residual_staging.get(usize::from(channel.0)).and_then(Option::as_ref);
        let memory = memory.ok_or(ExecuteError::NoSource)?;
        let half = half(segment, size);
        let owed = 2 * place as u64 * half + offset - segment.lo * size;
        let [residual_in, residual_out] = [owed, owed + half].map(|at| (memory, at));
        let remote = Some((attachment, there));
        Ok((place, ResidualPair { residual_in, residual_out, bytes, remote }))
    })
}

/// This participant's account of a part of the segment, if a local rank gave one.
pub(crate) fn account<'a>(
    context: &Context<'a>,
    segment: &'a Segment,
    part: Part,
) -> Result<Option<ErrorFeedback<'a>>, ExecuteError> {
    let first = halves(context, segment, part).next().transpose()?;
    first.map(|(_, halves)| halves.account()).transpose()
}

impl<'a> ResidualPair<'a> {
    fn account(&self) -> Result<ErrorFeedback<'a>, ExecuteError> {
        let Self { residual_in: (owed, from), residual_out: (left_out, to), bytes, .. } = *self;
        Ok(ErrorFeedback {
            residual_in: owed.view(from, bytes)?,
            residual_out: left_out.view_mut(to, bytes)?,
        })
    }
}

/// A segment begins, perhaps once more, by another plan: what its program does not settle stays owed. Without feedback it costs a
/// look at each local rank's call; with it a copy of the segment where that is not coded. What has to be fetched for it goes into `pending`, for
/// before anything else of the segment is. Returns whether all is done; if not, it is to be called again.
pub(crate) fn begin(
    context: &Context<'_>,
    (passes, slices): (&mut PassSharing, &mut Slices),
    key: Key,
    pending: &mut Vec<PendingTransfer>,
) -> Result<bool, ExecuteError> {
    let (segment, _) = context.member.segment_and_size(context.channel).ok_or(ExecuteError::NoSource)?;
    let coded = segment.aggregated.is_none() && segment.program.steps.iter().any(is_coded);
    let mut done = true;
    for (index, halves) in halves(context, segment, Part::whole(0)).enumerate() {
        let (place, halves) = halves?;
        let settled = coded && index == 0;
        match halves.remote {
            _ if halves.bytes == 0 => {}
            // It was asked for in the first turn.
            Some(_) if slices.is_resumed() => {}
            Some((attachment, [offset, _])) => {
                let step = if settled {
                    UNTRACKED
                } else {
                    StepId(FETCH_RESIDUAL - (place as u32).min(FETCH_RESIDUAL - LOWEST_STEP))
                };
                let (memory, at) = halves.residual_in;
                let span = Span::new(memory, at, halves.bytes)?;
                let tag = tag(key, context.channel, step);
                pending.push(PendingTransfer { attachment, tag, store: false, offset, span });
            }
            None if settled => {}
            None => {
                let [(from, start), (to, at)] = [halves.residual_in, halves.residual_out];
                let (sources, destinations) = ([(from, start, halves.bytes)], [(to, at, halves.bytes)]);
                let (kernel, whole) = (&Kernel::Copy, 0);
                let pass = Pass { kernel, whole, sources: &sources, destinations: &destinations };
                done = done && passes.run(&[pass], slices)?;
            }
        }
    }
    Ok(done)
}

/// Stores a part's residual, once the part of the segment was encoded. What has to be stored for it goes into
/// `pending`.
pub(crate) fn store_residual(
    context: &Context<'_>,
    key: Key,
    part: Part,
    pending: &mut Vec<PendingTransfer>,
) -> Result<(), ExecuteError> {
    let (segment, _) = context.member.segment_and_size(context.channel).ok_or(ExecuteError::NoSource)?;
    let Some((_, halves)) = halves(context, segment, part).next().transpose()? else { return Ok(()) };
    if let Some((attachment, [_, offset])) = halves.remote {
        let (memory, at) = halves.residual_out;
        let span = Span::new(memory, at, halves.bytes)?;
        let tag = tag(key, context.channel, UNTRACKED);
        pending.push(PendingTransfer { attachment, tag, store: true, offset, span });
    }
    Ok(())
}
