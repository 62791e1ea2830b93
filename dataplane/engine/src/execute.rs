//! Executing one step on memory: where operands lie, which kernel, what is sent from where.

use crate::coded;
use crate::communicator_state::CommunicatorState;
use crate::context::Context;
use crate::passes::{Kernel, Pass, PassSharing};
use crate::slices::Slices;
use crate::step::{
    ExecuteError, Located, MAX_DESTINATIONS, StepResult, is_coded, is_peer_operand, tensor_range,
};
use crate::transfer::PendingTransfer;
use arrayvec::ArrayVec;
use harmonaize_abi::{ChannelId, Pattern, Rank, ReduceOp, Signature, StepId, Tag};
use harmonaize_core::{PeerMessage, Segment};
use harmonaize_plan::{Buffer, MAX_SOURCES, Operand, Participant, Slot, Step, StepKind};
use harmonaize_shm::Span;
use harmonaize_transport::{Landing, Transport};
use zerocopy::IntoBytes;

/// Steps whose blocks are copied at once, at most: an AllToAll of four ranks has as many.
const MAX_BLOCKS: usize = 16;

/// Executes a step's memory operands, or goes on with them. Cost: one pass over each source and destination; no allocation.
pub(crate) fn run(
    context: &Context<'_>,
    (passes, slices): (&mut PassSharing, &mut Slices),
    step: StepId,
    tag: Tag,
) -> Result<StepResult, ExecuteError> {
    let (segment, size) = context.member.segment_and_size(context.channel).ok_or(ExecuteError::NoSource)?;
    let signature = segment.signature;
    let number = step.0 as usize;
    let step = segment.program.steps.get(number).ok_or(ExecuteError::NoSource)?;
    let place = |operand: &Operand| context.place(segment, size, operand);
    if is_coded(step) {
        let done = coded::run(context, (passes, slices), (segment, size), step)?;
        return Ok(done.map_or(StepResult::Unfinished, StepResult::Coded));
    }
    match step.kind {
        StepKind::Fetch | StepKind::Store => transfer(context, step, tag, &place),
        StepKind::Move | StepKind::Reduce { .. } => {
            let by = (&mut *passes, &mut *slices);
            match copy_blocks(context, by, (segment, size), number)? {
                Some(0) => {}
                Some(steps) => return Ok(StepResult::Copied { steps }),
                None => return Ok(StepResult::Unfinished),
            }
            let posted = context.sources.iter().any(|message| message.posted);
            let aliased = |operand: &Operand| segment.is_aliased(step, operand);
            let factors = factors(context, segment, step)?;
            let whole = whole_bytes(context.member, &signature);
            let by = (passes, slices, whole, context.member.ranks);
            match compute(by, step, &signature, (&place, &aliased), posted, factors)? {
                true => Ok(StepResult::Sends(send_from(step, &place)?)),
                false => Ok(StepResult::Unfinished),
            }
        }
    }
}

/// The bytes of the largest tensor of which a step writes a part, if only the ranks read it next. Otherwise it is 0. What goes on to a
/// peer is better left in the caches.
fn whole_bytes(member: &CommunicatorState, signature: &Signature) -> usize {
    let elements = signature.count.saturating_mul(signature.collective.max_blocks(member.ranks).into());
    let bytes = elements.saturating_mul(signature.dtype.size() as u64);
    if member.participants == 1 { usize::try_from(bytes).unwrap_or(usize::MAX) } else { 0 }
}

/// By source of a step of a `PremulSum`, what it is multiplied by; none where none is.
fn factors(
    context: &Context<'_>,
    segment: &Segment,
    step: &Step,
) -> Result<Option<ArrayVec<f64, MAX_SOURCES>>, ExecuteError> {
    let input = |operand: &Operand| match operand.buffer {
        Buffer::Input(rank) => Some(rank),
        _ => None,
    };
    let scales = segment.signature.reduce == ReduceOp::PremulSum;
    if !scales || step.sources.iter().all(|operand| input(operand).is_none()) {
        return Ok(None);
    }
    let factor = |operand: &Operand| {
        let Some(rank) = input(operand) else { return Ok(1.0) };
        let call = context.member.pending(segment.operation, rank);
        call.map(|call| call.factor).ok_or(ExecuteError::Operand(*operand))
    };
    step.sources.iter().take(MAX_SOURCES).map(factor).collect::<Result<_, _>>().map(Some)
}

/// What a step has fetched for a `PremulSum`: of which segment, with elements of which size, from where and to where.
struct Fetched<'a> {
    segment: &'a Segment,
    size: u64,
    from: (Rank, &'a Operand),
    to: (Slot, &'a Operand),
}

/// What a step has fetched, if it is to be scaled.
fn fetch_to_scale(member: &CommunicatorState, (channel, step): (ChannelId, StepId)) -> Option<Fetched<'_>> {
    let (segment, size) = member.segment_and_size(channel)?;
    let Step { kind: StepKind::Fetch, sources, destinations, .. } =
        segment.program.steps.get(step.0 as usize)?
    else {
        return None;
    };
    let ([source], [staged]) = (sources.as_slice(), destinations.as_slice()) else { return None };
    let (Buffer::Input(rank), Buffer::Staging(slot)) = (source.buffer, staged.buffer) else { return None };
    let scales = segment.signature.reduce == ReduceOp::PremulSum;
    scales.then_some(Fetched { segment, size, from: (rank, source), to: (slot, staged) })
}

/// Whether what a step has fetched is to be scaled.
pub(crate) fn is_scaled(member: &CommunicatorState, step: (ChannelId, StepId)) -> bool {
    fetch_to_scale(member, step).is_some()
}

/// Multiplies what a step has fetched, of a `PremulSum`, by its rank's factor where it lies: in staging. Or goes on with that. Returns
/// whether all is done.
pub(crate) fn scale_fetched(
    member: &CommunicatorState,
    (channel, step): (ChannelId, StepId),
    (passes, slices): (&mut PassSharing, &mut Slices),
) -> Result<bool, ExecuteError> {
    let fetch = fetch_to_scale(member, (channel, step));
    let Some(Fetched { segment, size, from: (rank, source), to }) = fetch else { return Ok(true) };
    let call = member.pending(segment.operation, rank).ok_or(ExecuteError::Operand(*source))?;
    let (memory, at) = member.staging(channel, segment, size, to).ok_or(ExecuteError::Operand(*to.1))?;
    let (_, bytes) = tensor_range(segment, size, to.1);
    if bytes == 0 {
        return Ok(true);
    }
    let factors = ArrayVec::from_iter([call.factor]);
    let (kernel, whole) = (Kernel::SumScaled { dtype: segment.signature.dtype, factors }, 0);
    let fetched = [(memory, at, bytes)];
    passes.run(&[Pass { kernel: &kernel, whole, sources: &fetched, destinations: &fetched }], slices)
}

/// Offers the transport the first memory destination of a step for the payload that the step will consume.
pub(crate) fn post(
    context: &Context<'_>,
    transport: &mut dyn Transport,
    step: StepId,
    peer: Participant,
    landing: Landing,
) -> Result<(), ExecuteError> {
    let (segment, size) = context.member.segment_and_size(context.channel).ok_or(ExecuteError::NoSource)?;
    let step = segment.program.steps.get(step.0 as usize).ok_or(ExecuteError::NoSource)?;
    let route = context.member.links(segment.epoch).and_then(|links| links.route(peer, context.channel));
    let to = step.destinations.iter().find(|operand| !is_peer_operand(operand));
    let (Some((link, _)), Some(to)) = (route, to) else { return Err(ExecuteError::NoSource) };
    let (memory, offset, bytes) = context.place(segment, size, to)?;
    transport.post(link, landing, Span::new(memory, offset, bytes)?);
    Ok(())
}

/// Bytes of memory that so many steps from this one on read and write here.
pub(crate) fn touched(member: &CommunicatorState, channel: ChannelId, step: StepId, steps: u32) -> u64 {
    let Some((segment, size)) = member.segment_and_size(channel) else { return 0 };
    let steps = segment.program.steps.iter().skip(step.0 as usize).take(steps as usize);
    let operands = steps.flat_map(|step| step.sources.iter().chain(&step.destinations));
    let here = operands.filter(|operand| !is_peer_operand(operand));
    here.map(|operand| tensor_range(segment, size, operand).1).sum()
}

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

/// Where operands lie, and which destinations are left out.
type Places<'a, 'b> =
    (&'b dyn Fn(&Operand) -> Result<Located<'a>, ExecuteError>, &'b dyn Fn(&Operand) -> bool);

/// `by`: with whom passes are shared, and their slices; what [`whole_bytes`] says, and how many ranks there are. `posted`: the only
/// source lies in the first memory destination already. `factors`: what sources are multiplied by. Returns whether all is done.
fn compute<'a>(
    (passes, slices, whole, ranks): (&mut PassSharing, &mut Slices, usize, u32),
    step: &Step,
    signature: &Signature,
    (place, aliased): Places<'a, '_>,
    posted: bool,
    factors: Option<ArrayVec<f64, MAX_SOURCES>>,
) -> Result<bool, ExecuteError> {
    let mut sources = ArrayVec::<Located<'_>, MAX_SOURCES>::new();
    for operand in &step.sources {
        sources.try_push(place(operand)?).map_err(|_| ExecuteError::Operand(*operand))?;
    }
    if sources.first().is_none_or(|(.., bytes)| *bytes == 0) {
        return Ok(true);
    }
    let (op, dtype) = (signature.reduce, signature.dtype);
    let mut kernel = match (factors, &step.kind) {
        (Some(factors), _) => Kernel::SumScaled { dtype, factors },
        (None, StepKind::Reduce { last }) => {
            Kernel::Reduce { op, dtype, divide: (*last && op == ReduceOp::Average).then_some(ranks) }
        }
        (None, _) => Kernel::Copy,
    };
    let written = |operand: &&Operand| !is_peer_operand(operand) && !aliased(operand);
    let mut remaining = step.destinations.iter().filter(written).peekable();
    // Once a destination has the result, others get it from there.
    let mut result = false;
    if let Some(operand) = remaining.next_if(|_| posted) {
        sources = ArrayVec::from_iter([place(operand)?]);
        (kernel, result) = (Kernel::Copy, true);
    }
    while remaining.peek().is_some() {
        let mut destinations = ArrayVec::<Located<'_>, MAX_DESTINATIONS>::new();
        for operand in remaining.by_ref().take(MAX_DESTINATIONS) {
            destinations.push(place(operand)?);
        }
        let pass = Pass { kernel: &kernel, whole, sources: &sources, destinations: &destinations };
        if !passes.run(&[pass], slices)? {
            return Ok(false);
        }
        if let (false, Some(first)) = (result, destinations.first()) {
            sources = ArrayVec::from_iter([*first]);
            (kernel, result) = (Kernel::Copy, true);
        }
    }
    Ok(true)
}

/// Copies the blocks of a step and of those after it, if each goes as it is. Each must have a destination of its own.
/// That is so in some operations within this host. Then their order is nobody's concern, and threads that share them wait
/// once for each other. Returns how many steps are done so; none where fewer than two can be, and `None` while some of them
/// is left.
fn copy_blocks(
    context: &Context<'_>,
    (passes, slices): (&mut PassSharing, &mut Slices),
    (segment, size): (&Segment, u64),
    first: usize,
) -> Result<Option<u32>, ExecuteError> {
    let traits = segment.signature.collective.traits();
    let blocks = matches!(traits.pattern, Pattern::Gather | Pattern::Pairwise) && !traits.reduces;
    if !blocks || context.member.participants != 1 || segment.resume.is_some() {
        return Ok(Some(0));
    }
    let place = |operand: &Operand| match operand.buffer {
        Buffer::Input(_) | Buffer::Output(_) => context.place(segment, size, operand).ok(),
        Buffer::Staging(_) | Buffer::Peer(_) => None,
    };
    let mut blocks = ArrayVec::<(Located<'_>, ArrayVec<Located<'_>, MAX_DESTINATIONS>), MAX_BLOCKS>::new();
    for step in segment.program.steps.iter().skip(first).take(MAX_BLOCKS) {
        let ([source], StepKind::Move) = (step.sources.as_slice(), &step.kind) else { break };
        if step.destinations.len() > MAX_DESTINATIONS {
            break;
        }
        let destinations: ArrayVec<_, MAX_DESTINATIONS> = step.destinations.iter().map_while(place).collect();
        let Some(source) = place(source).filter(|_| destinations.len() == step.destinations.len()) else {
            break;
        };
        blocks.push((source, destinations));
    }
    if blocks.len() < 2 {
        return Ok(Some(0));
    }
    let whole = whole_bytes(context.member, &segment.signature);
    let copies: ArrayVec<_, MAX_BLOCKS> = blocks
        .iter()
        .map(|(source, destinations)| Pass {
            kernel: &Kernel::Copy,
            whole,
            sources: std::slice::from_ref(source),
            destinations,
        })
        .collect();
    let done = passes.run(&copies, slices)?;
    Ok(done.then_some(copies.len() as u32))
}

fn transfer<'a>(
    context: &Context<'_>,
    step: &Step,
    tag: Tag,
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
    if context.resume_source(segment, remote.buffer).is_some() {
        // What stands for an input lies here, and an output that is done already needs nothing.
        let ((from, start, bytes), (to, at, _)) = (place(remote)?, place(staged)?);
        if !store && bytes > 0 {
            harmonaize_kernels::copy(from.view(start, bytes)?, &[to.view_mut(at, bytes)?])
                .map_err(|error| ExecuteError::Kernel(error.to_string()))?;
        }
        return Ok(StepResult::Transferred);
    }
    let local = context.member.local(rank).ok_or(ExecuteError::Operand(*remote))?;
    let call = context.member.pending(segment.operation, rank).ok_or(ExecuteError::Operand(*remote))?;
    let base = if output { call.output.offset } else { call.input.offset };
    let (offset, bytes) = tensor_range(segment, size, remote);
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

/// Sends a step's messages; how many of them were empty, and thus complete at once.
pub(crate) fn send_all(
    member: &mut CommunicatorState,
    transport: &mut dyn Transport,
    sends: &[PeerMessage],
    from: Option<&Span>,
    tag: Tag,
) -> usize {
    let mut empty = 0;
    for message in sends {
        member.bytes_sent += u64::from(message.bytes);
        let payload = from.filter(|_| message.bytes > 0).map(|span| {
            (Landing { ring: message.header.channel.0, sequence: message.sequence.0 }, span.clone(), tag)
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
