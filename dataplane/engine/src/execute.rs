//! Executing one step on memory: where operands lie, which kernel, what is sent from where.

use crate::attachment::Attachment;
use crate::coded::{self, CodedStep};
use crate::communicator_state::{CommunicatorState, ExtraStaging};
use crate::table::{Key, Table};
use arrayvec::ArrayVec;
use harmonaize_abi::{Collective, Rank, ReduceOp, Signature, View, ViewMut};
use harmonaize_core::{MAX_MESSAGE, PeerMessage, Segment};
use harmonaize_plan::{Buffer, MAX_SOURCES, MAX_STEP_PEERS, Operand, Part, Participant, Step, StepKind};
use harmonaize_shm::{EndError, Memory, Span};
use harmonaize_transport::{Landing, LinkId, SendError, Transport};
use std::collections::VecDeque;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Destinations that one pass of a kernel writes; the rest are copied from the first.
pub(crate) const MAX_DESTINATIONS: usize = 8;

/// A step that cannot be executed: a bug here or in the plan, or what a peer sent. Ends the communicator.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExecuteError {
    #[error("operand {0:?} lies nowhere")]
    Operand(Operand),
    #[error("step without source")]
    NoSource,
    #[error(transparent)]
    Memory(#[from] harmonaize_shm::MemoryError),
    #[error("kernel: {0}")]
    Kernel(String),
    #[error("participant {} sent no chunk that could be decoded: {error}", .peer.0)]
    Chunk { peer: Participant, error: harmonaize_codec::CodecError },
    #[error("attachment: {0}")]
    End(#[from] EndError),
}

/// Frames that the transport had no room for, in order.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    frames: VecDeque<Frame>,
}

#[derive(Debug)]
struct Frame {
    link: LinkId,
    path: u16,
    header: ArrayVec<u8, MAX_MESSAGE>,
    payload: Option<(Landing, Span, u64)>,
}

impl Backlog {
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Sends a frame now, or keeps it for later. A link that is down swallows it: the link's end is on its way.
    pub(crate) fn send(
        &mut self,
        transport: &mut dyn Transport,
        (link, path): (LinkId, u16),
        header: &[u8],
        payload: Option<(Landing, Span, u64)>,
    ) {
        let kept = payload.clone();
        let full = !self.frames.is_empty()
            || matches!(transport.send(link, path, header, payload), Err(SendError::Full));
        if full && let Ok(header) = header.try_into() {
            self.frames.push_back(Frame { link, path, header, payload: kept });
        }
    }

    /// Tries again; how many frames went out.
    pub(crate) fn flush(&mut self, transport: &mut dyn Transport) -> usize {
        let mut sent = 0;
        while let Some(frame) = self.frames.front() {
            let result = transport.send(frame.link, frame.path, &frame.header, frame.payload.clone());
            if matches!(result, Err(SendError::Full)) {
                break;
            }
            self.frames.pop_front();
            sent += 1;
        }
        sent
    }
}

/// A fetch or store that an attachment is asked for.
#[derive(Debug)]
pub(crate) struct PendingTransfer {
    pub(crate) attachment: Key,
    pub(crate) tag: u64,
    pub(crate) store: bool,
    pub(crate) offset: u64,
    pub(crate) span: Span,
}

/// What [`run`] leaves to the caller.
pub(crate) enum StepResult {
    /// The memory from which the step's sends go, if any.
    Sends(Option<Span>),
    /// The same of a coded step.
    Coded(CodedStep),
    /// A fetch or store to start.
    Transfer(PendingTransfer),
}

/// One step in its segment.
pub(crate) struct Context<'a> {
    pub(crate) member: &'a CommunicatorState,
    pub(crate) attachments: &'a Table<Attachment>,
    pub(crate) channel: u16,
    pub(crate) sources: &'a ArrayVec<PeerMessage, MAX_STEP_PEERS>,
}

/// Executes a step's memory operands. Cost: one pass over each source and destination; no allocation.
pub(crate) fn run(context: &Context<'_>, step: u32, tag: u64) -> Result<StepResult, ExecuteError> {
    let (segment, size) = context.member.segment_and_size(context.channel).ok_or(ExecuteError::NoSource)?;
    let signature = segment.signature;
    let step = segment.program.steps.get(step as usize).ok_or(ExecuteError::NoSource)?;
    let place = |operand: &Operand| context.place(segment, size, &signature, operand);
    if coded::is_coded(step) {
        return coded::run(context, segment, size, &signature, step).map(StepResult::Coded);
    }
    match step.kind {
        StepKind::Fetch | StepKind::Store => transfer(context, step, tag, &place),
        StepKind::Move | StepKind::Reduce { .. } => {
            let posted = context.sources.iter().any(|message| message.posted);
            let hidden = |operand: &Operand| context.is_aliased(segment, operand);
            compute(context.member.ranks, step, &signature, (&place, &hidden), posted)?;
            Ok(StepResult::Sends(send_from(step, &place)?))
        }
    }
}

/// Offers the transport the first memory destination of a step for the payload that the step will consume.
pub(crate) fn post(
    context: &Context<'_>,
    transport: &mut dyn Transport,
    step: u32,
    peer: Participant,
    landing: Landing,
) -> Result<(), ExecuteError> {
    let (segment, size) = context.member.segment_and_size(context.channel).ok_or(ExecuteError::NoSource)?;
    let signature = segment.signature;
    let step = segment.program.steps.get(step as usize).ok_or(ExecuteError::NoSource)?;
    let route = context.member.links(segment.epoch).and_then(|links| links.route(peer, context.channel));
    let to = step.destinations.iter().find(|operand| !is_peer_operand(operand));
    let (Some((link, _)), Some(to)) = (route, to) else { return Err(ExecuteError::NoSource) };
    let (memory, offset, bytes) = context.place(segment, size, &signature, to)?;
    transport.post(link, landing, Span::new(memory, offset, bytes)?);
    Ok(())
}

pub(crate) type Located<'a> = (&'a Arc<Memory>, u64, u64);

/// The bytes that sends carry: the first memory destination, or else the only source.
fn send_from<'a>(
    step: &Step,
    place: &dyn Fn(&Operand) -> Result<Located<'a>, ExecuteError>,
) -> Result<Option<Span>, ExecuteError> {
    if step.destinations.iter().all(|operand| !is_peer_operand(operand)) {
        return Ok(None);
    }
    let from = step.destinations.iter().find(|operand| !is_peer_operand(operand)).or(step.sources.first());
    let Some(from) = from else { return Ok(None) };
    let (memory, offset, bytes) = place(from)?;
    Ok((bytes > 0).then(|| Span::new(memory, offset, bytes)).transpose()?)
}

pub(crate) fn is_peer_operand(operand: &Operand) -> bool {
    matches!(operand.buffer, Buffer::Peer(_))
}

/// Where operands lie, and which destinations are left out.
type Places<'a, 'b> =
    (&'b dyn Fn(&Operand) -> Result<Located<'a>, ExecuteError>, &'b dyn Fn(&Operand) -> bool);

/// `posted`: the only source lies in the first memory destination already.
fn compute<'a>(
    ranks: u32,
    step: &Step,
    signature: &Signature,
    (place, hidden): Places<'a, '_>,
    posted: bool,
) -> Result<(), ExecuteError> {
    let mut sources = ArrayVec::<View<'_>, MAX_SOURCES>::new();
    for operand in &step.sources {
        let (memory, offset, bytes) = place(operand)?;
        sources.try_push(memory.view(offset, bytes)?).map_err(|_| ExecuteError::Operand(*operand))?;
    }
    if sources.first().is_none_or(|source| source.bytes() == 0) {
        return Ok(());
    }
    let divide = match step.kind {
        StepKind::Reduce { last: true } if signature.reduce == ReduceOp::Average => Some(ranks),
        _ => None,
    };
    let written = |operand: &&Operand| !is_peer_operand(operand) && !hidden(operand);
    let mut passes = step.destinations.iter().filter(written).peekable();
    let mut first: Option<View<'_>> = None;
    if let (true, Some(operand)) = (posted, passes.peek()) {
        let (memory, offset, bytes) = place(operand)?;
        first = Some(memory.view(offset, bytes)?);
        passes.next();
    }
    while passes.peek().is_some() {
        let mut destinations = ArrayVec::<ViewMut<'_>, MAX_DESTINATIONS>::new();
        for operand in passes.by_ref().take(MAX_DESTINATIONS) {
            let (memory, offset, bytes) = place(operand)?;
            destinations.push(memory.view_mut(offset, bytes)?);
        }
        let result = match (first, &step.kind) {
            (Some(result), _) => harmonaize_kernels::copy(result, &destinations),
            (None, StepKind::Reduce { .. }) => {
                harmonaize_kernels::reduce(signature.reduce, signature.dtype, &sources, &destinations, divide)
            }
            (None, _) => {
                let source = sources.first().copied().ok_or(ExecuteError::NoSource)?;
                harmonaize_kernels::copy(source, &destinations)
            }
        };
        result.map_err(|error| ExecuteError::Kernel(error.to_string()))?;
        first = first.or(destinations.first().map(|destination| destination.as_view()));
    }
    Ok(())
}

fn transfer<'a>(
    context: &Context<'_>,
    step: &Step,
    tag: u64,
    place: &dyn Fn(&Operand) -> Result<Located<'a>, ExecuteError>,
) -> Result<StepResult, ExecuteError> {
    let source = step.sources.first().ok_or(ExecuteError::NoSource)?;
    let destination = step.destinations.first().ok_or(ExecuteError::NoSource)?;
    let store = matches!(step.kind, StepKind::Store);
    let (remote, staged) = if store { (destination, source) } else { (source, destination) };
    let (rank, output) = match remote.buffer {
        Buffer::Input(rank) if !store => (rank, false),
        Buffer::Output(rank) if store => (rank, true),
        _ => return Err(ExecuteError::Operand(*remote)),
    };
    let (segment, size) = context.member.segment_and_size(context.channel).ok_or(ExecuteError::NoSource)?;
    let signature = segment.signature;
    let local = context.member.local(rank).ok_or(ExecuteError::Operand(*remote))?;
    let call = context.member.pending(segment.operation, rank).ok_or(ExecuteError::Operand(*remote))?;
    let base = if output { call.output.offset } else { call.input.offset };
    let (offset, bytes) = tensor_range(segment, size, &signature, remote.part);
    let (memory, at, _) = place(staged)?;
    let span = Span::new(memory, at, bytes)?;
    Ok(StepResult::Transfer(PendingTransfer {
        attachment: local.attachment,
        tag,
        store,
        offset: base + offset,
        span,
    }))
}

/// Offset and length in bytes of a part of a rank's tensor.
pub(crate) fn tensor_range(segment: &Segment, size: u64, signature: &Signature, part: Part) -> (u64, u64) {
    let (start, elements) = part.elements(segment.lo, segment.hi);
    ((u64::from(part.block) * signature.count + start) * size, elements * size)
}

impl<'a> Context<'a> {
    /// Where an operand's bytes lie.
    pub(crate) fn place(
        &self,
        segment: &Segment,
        size: u64,
        signature: &Signature,
        operand: &Operand,
    ) -> Result<Located<'a>, ExecuteError> {
        let missing = || ExecuteError::Operand(*operand);
        let (offset, bytes) = tensor_range(segment, size, signature, operand.part);
        match operand.buffer {
            Buffer::Input(rank) | Buffer::Output(rank) => {
                if let Some(kept) = self.resume_source(segment, operand.buffer) {
                    let start = segment.lo * size;
                    let memory = self.member.staging_of(self.channel).ok_or_else(missing)?;
                    let at = self.member.extra_offset(segment, size, kept).checked_add(offset);
                    let at = at.and_then(|at| at.checked_sub(start)).ok_or_else(missing)?;
                    return Ok((memory, at, bytes));
                }
                let local = self.member.local(rank).ok_or_else(missing)?;
                let call = self.member.pending(segment.operation, rank).ok_or_else(missing)?;
                let output = matches!(operand.buffer, Buffer::Output(_));
                let region = if output { &call.output } else { &call.input };
                let end = self.attachments.get(local.attachment).ok_or_else(missing)?;
                let memory = end.end.memory().ok_or_else(missing)?;
                Ok((memory, region.offset + offset, bytes))
            }
            Buffer::Staging(slot) => {
                let (memory, at) =
                    self.member.staging(self.channel, segment, size, slot).ok_or_else(missing)?;
                Ok((memory, at, bytes))
            }
            Buffer::Peer(peer) => self.landing(segment.epoch, peer, bytes).ok_or_else(missing),
        }
    }

    /// What stands for a tensor of a segment that is begun again although what it comes to is there.
    fn resume_source(&self, segment: &Segment, place: Buffer) -> Option<ExtraStaging> {
        let restored = segment.resume?;
        match place {
            // Of a broadcast it is the root's.
            Buffer::Input(rank) => {
                let of_root = segment.signature.collective == Collective::Broadcast;
                let gives = restored.source && (of_root || self.is_first(rank));
                Some(if gives { ExtraStaging::Result } else { ExtraStaging::Neutral })
            }
            Buffer::Output(_) if restored.completed => Some(ExtraStaging::Neutral),
            _ => None,
        }
    }

    /// Whether a destination stands for the same memory as another.
    fn is_aliased(&self, segment: &Segment, operand: &Operand) -> bool {
        let whole = segment.resume.is_some_and(|restored| restored.completed);
        matches!(operand.buffer, Buffer::Output(rank) if whole && !self.is_first(rank))
    }

    fn is_first(&self, rank: Rank) -> bool {
        self.member.locals.first().is_some_and(|first| first.rank == rank)
    }

    /// The landing slot of the message that this step consumes from a peer.
    pub(crate) fn landing(&self, epoch: u32, peer: Participant, bytes: u64) -> Option<Located<'a>> {
        let message = self.sources.iter().find(|message| message.peer == peer)?;
        let memory = self.member.links(epoch)?.landing.get(peer.0 as usize)?.as_ref()?;
        let slot = u64::from(message.sequence % self.member.landing_slots);
        let slot = u64::from(self.channel) * u64::from(self.member.landing_slots) + slot;
        Some((memory, slot * u64::from(self.member.slot_bytes), bytes))
    }
}

/// Sends a step's messages; how many of them were empty, and thus complete at once.
pub(crate) fn send_all(
    member: &mut CommunicatorState,
    transport: &mut dyn Transport,
    sends: &[PeerMessage],
    from: Option<&Span>,
    tag: u64,
) -> usize {
    let mut empty = 0;
    for message in sends {
        member.bytes_sent += u64::from(message.bytes);
        let payload = from.filter(|_| message.bytes > 0).map(|span| {
            (Landing { ring: message.header.channel, sequence: message.sequence }, span.clone(), tag)
        });
        empty += usize::from(payload.is_none());
        let Some(links) = member.epochs.iter().find(|links| links.epoch == message.header.epoch) else {
            continue;
        };
        let Some(route) = links.route(message.peer, message.header.channel) else { continue };
        member.backlog.send(transport, route, message.header.as_bytes(), payload);
    }
    empty
}
