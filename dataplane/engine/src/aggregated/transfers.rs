//! Tensors that are not mapped, of segments that an aggregator does: fetched into staging before, stored from there after.
//!
//! Segments follow each other, so one is fetched while others are summed and stored. What an attachment is asked for ends in
//! order. So what is under way of a segment that hosts begin again ends before what they fetch and store of it, and the
//! staging that it is fetched to is none of their program's.

use super::away::{Away, Purpose};
use crate::attachment::Attachment;
use crate::communicator_state::CommunicatorState;
use crate::step::{ExecuteError, Located};
use crate::table::{Key, Table};
use crate::transfer::{PendingTransfer, tag};
use arrayvec::ArrayVec;
use harmonaize_abi::{AggregatorTask, ChannelId, Rank, ReduceOp, SegmentId, StepId};
use harmonaize_core::{Nanos, Segment};
use harmonaize_plan::MAX_SOURCES;
use harmonaize_shm::{Memory, MemoryError, Span};

/// Local ranks, by their places, whose tensors are not mapped: each with its attachment, and where the segment is in its tensor.
type Remote = ArrayVec<(usize, Key, u64), MAX_SOURCES>;

/// Whether a local rank's tensors are reached by fetches and stores alone.
pub(crate) fn is_remote(attachments: &Table<Attachment>, key: Key) -> bool {
    attachments.get(key).is_some_and(|attachment| !attachment.is_mapped())
}

/// Whether any local rank's are.
pub(crate) fn any_remote(member: &CommunicatorState, attachments: &Table<Attachment>) -> bool {
    member.locals.iter().any(|local| is_remote(attachments, local.attachment))
}

/// Bytes of a segment, and of its place in staging.
fn room(segment: &Segment, size: u64) -> (u64, u64) {
    let bytes = (segment.hi - segment.lo) * size;
    (bytes, bytes.next_multiple_of(64))
}

/// The local ranks whose tensors are not mapped, of those who `take_part`.
fn remote(
    member: &CommunicatorState,
    attachments: &Table<Attachment>,
    segment: &Segment,
    output: bool,
    of_rank: impl Fn(Rank) -> bool,
) -> Result<Remote, ExecuteError> {
    let mut found = Remote::new();
    let at = segment.lo * segment.signature.dtype.size() as u64;
    for (place, local) in member.locals.iter().enumerate() {
        if segment.lo == segment.hi || !of_rank(local.rank) || !is_remote(attachments, local.attachment) {
            continue;
        }
        let call = member.pending(segment.operation, local.rank).ok_or(ExecuteError::NoSource)?;
        let tensor = if output { &call.output } else { &call.input };
        found.try_push((place, local.attachment, tensor.offset + at)).map_err(|_| ExecuteError::NoSource)?;
    }
    Ok(found)
}

/// Makes room for inputs of a channel's segment. Allocates only when that is more than any before on this channel.
fn reserve(away: &mut Away, bytes: u64) -> Result<(), MemoryError> {
    if away.inputs.as_ref().is_none_or(|memory| bytes > memory.bytes() as u64) {
        let bytes = usize::try_from(bytes.max(64)).map_err(|_| MemoryError::BadSize(bytes))?;
        away.inputs = Some(Memory::private(bytes)?);
    }
    Ok(())
}

/// Has the inputs of a channel's segment fetched, once. What that takes goes into `pending`.
pub(crate) fn fetch(
    member: &mut CommunicatorState,
    (key, channel): (Key, ChannelId),
    attachments: &Table<Attachment>,
    pending: &mut Vec<PendingTransfer>,
) -> Result<(), ExecuteError> {
    let Some((segment, size)) = member.segment_and_size(channel) else { return Ok(()) };
    let (number, signature) = (segment.number, segment.signature);
    let (bytes, room) = room(segment, size);
    let asked =
        remote(member, attachments, segment, false, |rank| match signature.collective.traits().aggregator {
            Some(AggregatorTask::Sum) => true,
            Some(AggregatorTask::Broadcast) => rank == signature.root,
            Some(AggregatorTask::Barrier) | None => false,
        })?;
    let places = member.locals.len() as u64;
    let Some(away) = member.away.get_mut(usize::from(channel.0)) else { return Ok(()) };
    if away.has_begun(number) {
        return Ok(());
    }
    if !asked.is_empty() {
        // An average is divided there too.
        reserve(away, places * room)?;
    }
    let step = away.begin(number, Purpose::Fetch, asked.len());
    let Some(memory) = &away.inputs else { return Ok(()) };
    let tag = tag(key, channel, step);
    for (place, attachment, offset) in asked {
        let span = Span::new(memory, place as u64 * room, bytes)?;
        pending.push(PendingTransfer { attachment, tag, store: false, offset, span });
    }
    Ok(())
}

/// Makes room where an average is divided that is to be stored, of a channel's segment.
pub(crate) fn reserve_aside(
    member: &mut CommunicatorState,
    channel: ChannelId,
    attachments: &Table<Attachment>,
) -> Result<(), MemoryError> {
    let Some((segment, size)) = member.segment_and_size(channel) else { return Ok(()) };
    let averages = segment.signature.reduce == ReduceOp::Average;
    let (_, room) = room(segment, size);
    if !averages || !any_remote(member, attachments) {
        return Ok(());
    }
    member.away.get_mut(usize::from(channel.0)).map_or(Ok(()), |away| reserve(away, room))
}

/// Whether all inputs of a segment are here that have to be fetched.
pub(crate) fn is_fetched(member: &CommunicatorState, channel: ChannelId, segment: SegmentId) -> bool {
    member.away.get(usize::from(channel.0)).is_some_and(|away| away.has_ended(segment))
}

/// Where the fetched input of a local rank lies.
pub(crate) fn fetched<'a>(
    member: &'a CommunicatorState,
    (channel, segment): (ChannelId, &Segment),
    place: usize,
) -> Option<Located<'a>> {
    let (bytes, room) = room(segment, segment.signature.dtype.size() as u64);
    let memory = member.away.get(usize::from(channel.0))?.inputs.as_ref()?;
    Some((memory, place as u64 * room, bytes))
}

/// Has what comes of a channel's segment stored, from there. Returns whether anything is. What that takes goes into `pending`.
pub(crate) fn store(
    member: &mut CommunicatorState,
    (key, channel): (Key, ChannelId),
    attachments: &Table<Attachment>,
    (purpose, aside): (Purpose, bool),
    pending: &mut Vec<PendingTransfer>,
) -> Result<bool, ExecuteError> {
    let Some((segment, size)) = member.segment_and_size(channel) else { return Ok(false) };
    let (number, (bytes, _)) = (segment.number, room(segment, size));
    let asked = remote(member, attachments, segment, true, |_| true)?;
    if asked.is_empty() {
        return Ok(false);
    }
    let from = if aside { fetched(member, (channel, segment), 0) } else { member.result(channel, segment) };
    let (memory, at, _) = from.ok_or(ExecuteError::NoSource)?;
    let span = Span::new(memory, at, bytes)?;
    let Some(away) = member.away.get_mut(usize::from(channel.0)) else { return Ok(false) };
    let tag = tag(key, channel, away.begin(number, purpose, asked.len()));
    for (_, attachment, offset) in asked {
        pending.push(PendingTransfer { attachment, tag, store: true, offset, span: span.clone() });
    }
    Ok(true)
}

/// A fetch or a store has ended.
pub(crate) fn handle_transferred(
    now: Nanos,
    member: &mut CommunicatorState,
    channel: ChannelId,
    step: StepId,
) {
    let away = member.away.get_mut(usize::from(channel.0));
    match away.and_then(|away| away.end_one(step)) {
        // The worker is given it with the next packets.
        None | Some((_, Purpose::Fetch)) => {}
        Some((number, Purpose::Store { epoch, index, coded })) => {
            let segment = member.core.segment(channel).filter(|segment| segment.number == number);
            // Hosts may have begun it again.
            if segment.is_some_and(|segment| segment.epoch == epoch && segment.aggregated == Some(index)) {
                member.core.handle_aggregated(now, epoch, index, coded.as_ref());
            }
        }
        Some((_, Purpose::CopyOut)) => member.core.handle_copied_out(now, channel),
    }
}
