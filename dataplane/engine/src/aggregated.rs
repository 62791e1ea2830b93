//! Segments that an aggregator sums: the worker of an epoch, its datagrams, and the tensors behind both.
//!
//! Tensors that are not mapped lie in staging meanwhile. A segment's inputs are fetched before the worker has it, and its result is
//! stored before the segment counts as done, or, where it is held, before its operation ends.

use crate::attachment::Attachment;
use crate::coded::mix;
use crate::communicator_state::{CommunicatorState, Local};
use crate::passes::{Kernel, Pass, PassSharing};
use crate::slices::Slices;
use crate::step::{ExecuteError, Located};
use crate::table::{Key, Table};
use crate::transfer::PendingTransfer;
use arrayvec::ArrayVec;
use harmonaize_abi::{
    AggregatorTask, ChannelId, Epoch, ReduceOp, SHARED_CODEC, SegmentIndex, Signature, View, ViewMut,
};
use harmonaize_aggregator::{Event, PayloadFormat, Task, Tensors, Worker};
use harmonaize_core::{Aggregation, CodingReport, Nanos, Segment};
use harmonaize_kernels::Isa;
use harmonaize_kernels::codes::{Code, PartOf, Squares, Store, decode_part, encode_shared, ranges, signal};
use harmonaize_plan::MAX_SOURCES;
use harmonaize_shm::Memory;
use std::sync::Arc;

mod away;
mod endpoint;
mod path;
mod transfers;

pub(crate) use away::{Away, Purpose, is_for_aggregator};
pub(crate) use path::AggregatorPath;
use path::{BATCH, Coder, Session};
use transfers::{any_remote, is_fetched, is_remote};
pub(crate) use transfers::{fetch, handle_transferred, reserve_aside};

/// Calls to receive in a row.
const MAX_RECEIVE_CALLS: usize = 8;
/// Rounds of the loop between two calls to receive for an idle worker.
const MAX_IDLE_POLLS: u32 = 16;

/// Packets in, what they say to the communicator, packets out. What is to be stored of tensors that are not mapped goes into
/// `transfers`. How much was done.
pub(crate) fn progress(
    path: &mut AggregatorPath,
    now: Nanos,
    (key, member): (Key, &mut CommunicatorState),
    attachments: &Table<Attachment>,
    transfers: &mut Vec<PendingTransfer>,
) -> usize {
    let time = now.into();
    let mut worked = submit_fetched(path, now, member, attachments);
    let AggregatorPath { epoch, address, worker, datagrams, reconnect, coder, idle_polls, session, .. } =
        path;
    *idle_polls = (*idle_polls + 1) % MAX_IDLE_POLLS;
    // What comes to an idle worker is late; others need not wait for the calls that find that there is nothing.
    let mut reach = SegmentTensors { member, attachments, epoch: *epoch, coder: Some(coder) };
    for _ in 0..if worker.is_idle() && *idle_polls > 0 { 0 } else { MAX_RECEIVE_CALLS } {
        let received = datagrams.receive(&mut |from, bytes| {
            if from == *address {
                worker.receive(time, bytes, &mut reach);
            }
        });
        if datagrams.take_refusal() {
            worker.handle_refused(time);
        }
        if received == 0 {
            break;
        }
        worked += received;
    }
    let of = (key, *epoch);
    worked += notify_core(now, of, (&mut *worker, &mut *session), member, attachments, transfers);
    let reach = SegmentTensors { member, attachments, epoch: *epoch, coder: Some(coder) };
    let mut write = |room: &mut [u8]| Some((*address, worker.poll_transmit(time, &reach, room)?));
    while worked < 2 * BATCH && datagrams.push(&mut write) {
        worked += 1;
    }
    datagrams.flush();
    // The host's address has changed, or there is no route: what was not sent now is asked for on the way that there is then.
    if datagrams.has_no_route() && reconnect.is_due(now) {
        datagrams.restrict_to(*address);
        if !datagrams.has_no_route() {
            let (communicator, epoch, from) = (member.id.0, *epoch, datagrams.local_address());
            tracing::info!(communicator, %epoch, ?from, "a way to the aggregator is found anew");
        }
    }
    // Sending may have found that the aggregator is silent.
    worked + notify_core(now, of, (worker, session), member, attachments, transfers)
}

/// Gives the worker those segments in order whose inputs are all here. How many.
fn submit_fetched(
    path: &mut AggregatorPath,
    now: Nanos,
    member: &mut CommunicatorState,
    attachments: &Table<Attachment>,
) -> usize {
    let mut submitted = 0;
    while let Some((index, channel)) = path.awaited.front().copied() {
        let segment = member.core.segment(channel);
        let Some(segment) = segment.filter(|s| s.epoch == path.epoch && s.aggregated == Some(index)) else {
            // Hosts have begun it again.
            path.awaited.pop_front();
            continue;
        };
        if !is_fetched(member, channel, segment.number) {
            break;
        }
        path.awaited.pop_front();
        submitted += 1;
        let tensors = SegmentTensors { member, attachments, epoch: path.epoch, coder: Some(&path.coder) };
        if tensors.copy_fetched_root(channel).is_none() {
            let me = member.core.me().0;
            member.fail_internal(&format!("participant {me}'s fetched broadcast lies nowhere"));
            break;
        }
        submit(path, now, member, (index, channel));
    }
    submitted
}

/// Gives the worker a channel's segment.
fn submit(
    path: &mut AggregatorPath,
    now: Nanos,
    member: &mut CommunicatorState,
    (index, channel): (SegmentIndex, ChannelId),
) {
    let Some(segment) = member.core.segment(channel) else { return };
    let (task, given) = task_of(member, segment, path.coder.rules);
    member.bytes_sent += given;
    if !path.worker.submit(index, task) {
        path.awaited.clear();
        member.core.handle_aggregation_ended(now, path.epoch);
    }
}

/// The task of a segment for the aggregator, and the bytes that this participant sends of it.
fn task_of(member: &CommunicatorState, segment: &Segment, rules: Aggregation) -> (Task, u64) {
    let signature = segment.signature;
    let elements = segment.hi - segment.lo;
    match signature.collective.traits().aggregator {
        Some(AggregatorTask::Broadcast) => {
            let bytes = elements * signature.dtype.size() as u64;
            let root = member.local(signature.root).is_some();
            (Task::Broadcast { bytes, root }, if root { bytes } else { 0 })
        }
        Some(AggregatorTask::Barrier) => (Task::Barrier, 0),
        Some(AggregatorTask::Sum) | None => {
            let format = rules.format_of(&signature);
            let task = match format.filter(|format| rules.format != *format) {
                Some(PayloadFormat::Tensor { dtype, op }) => Task::Other { elements, dtype, op },
                _ => Task::Sum(elements),
            };
            (task, format.map_or(0, |format| format.sent(elements)))
        }
    }
}

/// A segment's results are all here. Those that nobody holds go to tensors that are not mapped, if there are any, and the segment is done
/// when they are there.
fn handle_done(
    now: Nanos,
    (key, epoch): (Key, Epoch),
    (index, coded): (SegmentIndex, Option<CodingReport>),
    member: &mut CommunicatorState,
    attachments: &Table<Attachment>,
    transfers: &mut Vec<PendingTransfer>,
) {
    let done = member.core.aggregated_segment(epoch, index);
    if let Some((channel, segment)) = done
        && !segment.stages_output()
        && member.core.failure().is_none()
    {
        let purpose = Purpose::Store { epoch, index, coded };
        match transfers::store(member, (key, channel), attachments, (purpose, false), transfers) {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => return member.fail_internal(&error.to_string()),
        }
    }
    member.core.handle_aggregated(now, epoch, index, coded.as_ref());
}

/// Tells the communicator what has happened to the worker.
fn notify_core(
    now: Nanos,
    (key, epoch): (Key, Epoch),
    (worker, session): (&mut Worker, &mut Session),
    member: &mut CommunicatorState,
    attachments: &Table<Attachment>,
    transfers: &mut Vec<PendingTransfer>,
) -> usize {
    let mut told = 0;
    if session.probe_only && worker.is_answered() {
        session.probe_only = false;
        member.core.handle_aggregator_alive(now, epoch);
    }
    while let Some(event) = worker.poll_event() {
        told += 1;
        match event {
            Event::Done { segment, squares } => {
                let coded = squares != Squares::default();
                let Squares { error, signal } = squares;
                let told = CodingReport {
                    codec: SHARED_CODEC,
                    error,
                    measured: error,
                    squares: signal,
                    ..CodingReport::default()
                };
                let done = (segment, coded.then_some(told));
                handle_done(now, (key, epoch), done, member, attachments, transfers);
            }
            Event::Ended(_) if std::mem::take(&mut session.probe_only) => {
                member.core.handle_aggregation_ended(now, epoch)
            }
            Event::Ended(reason) => {
                session.abandoned = true;
                let (communicator, counters) = (member.id.0, worker.counters());
                tracing::info!(
                    communicator,
                    %epoch,
                    ?reason,
                    ?counters,
                    "the aggregator is given up; hosts take over"
                );
                member.core.handle_aggregation_ended(now, epoch);
            }
        }
    }
    told
}

/// The local ranks' tensors of the segments that are being aggregated.
pub(crate) struct SegmentTensors<'a> {
    pub(crate) member: &'a CommunicatorState,
    pub(crate) attachments: &'a Table<Attachment>,
    pub(crate) epoch: Epoch,
    pub(crate) coder: Option<&'a Coder>,
}

impl<'a> SegmentTensors<'a> {
    fn segment(&self, index: SegmentIndex) -> Option<(ChannelId, &'a Segment, Signature)> {
        let (channel, segment) = self.member.core.aggregated_segment(self.epoch, index)?;
        Some((channel, segment, segment.signature))
    }

    /// Where what comes of a segment is held: its bytes from `at` on.
    fn staged_output(
        &self,
        channel: ChannelId,
        segment: &Segment,
        at: u64,
        bytes: u64,
    ) -> Option<Located<'a>> {
        let (memory, base, _) = self.member.result(channel, segment)?;
        Some((memory, base + at, bytes))
    }

    /// Where bytes of a result go, from `at` of the segment on: to staging if they are held or to be stored, and else, or then as well,
    /// to the outputs that are mapped.
    fn places(
        &self,
        channel: ChannelId,
        segment: &Segment,
        at: u64,
        bytes: u64,
    ) -> Option<ArrayVec<Located<'a>, MAX_SOURCES>> {
        let held = segment.stages_output();
        let mut places = ArrayVec::new();
        if held || any_remote(self.member, self.attachments) {
            places.push(self.staged_output(channel, segment, at, bytes)?);
        }
        if !held {
            self.add_outputs(segment, at, bytes, &mut places)?;
        }
        Some(places)
    }

    /// Bytes of the root's input, from `at` of the segment on.
    fn root_input(&self, channel: ChannelId, segment: &Segment, at: u64, bytes: u64) -> Option<Located<'a>> {
        let mut locals = self.member.locals.iter();
        let place = locals.position(|local| local.rank == segment.signature.root)?;
        let (memory, tensor) = self.input(channel, segment, place)?;
        Some((memory, tensor + at, bytes))
    }

    fn load_broadcast(&self, index: SegmentIndex, at: u64, to: &mut [u8]) -> Option<()> {
        let (channel, segment, _) = self.segment(index)?;
        let (memory, from, bytes) = self.root_input(channel, segment, at, to.len() as u64)?;
        harmonaize_kernels::copy(memory.view(from, bytes).ok()?, &[to.into()]).ok()
    }

    fn store_broadcast(&self, index: SegmentIndex, at: u64, bytes: &[u8]) -> Option<()> {
        let (channel, segment, _) = self.segment(index)?;
        let places = views(&self.places(channel, segment, at, bytes.len() as u64)?)?;
        harmonaize_kernels::copy(bytes.into(), &places).ok()
    }

    /// What a root broadcasts, to its own ranks. Returns whether all is done. What is fetched of it is copied
    /// [later](Self::copy_fetched_root).
    pub(crate) fn copy_root_output(
        &self,
        channel: ChannelId,
        (passes, slices): (&mut PassSharing, &mut Slices),
    ) -> Option<bool> {
        let segment = self.member.core.segment(channel)?;
        if self.fetches_root(segment) {
            return Some(true);
        }
        let bytes = (segment.hi - segment.lo) * segment.signature.dtype.size() as u64;
        let destinations = &self.places(channel, segment, 0, bytes)?;
        let sources = &[self.root_input(channel, segment, 0, bytes)?];
        passes.run(&[Pass { kernel: &Kernel::Copy, whole: 0, sources, destinations }], slices).ok()
    }

    /// The same of a root whose tensor was fetched; nothing of others.
    fn copy_fetched_root(&self, channel: ChannelId) -> Option<()> {
        let segment = self.member.core.segment(channel)?;
        if !self.fetches_root(segment) {
            return Some(());
        }
        let bytes = (segment.hi - segment.lo) * segment.signature.dtype.size() as u64;
        let places = views(&self.places(channel, segment, 0, bytes)?)?;
        let (memory, from, _) = self.root_input(channel, segment, 0, bytes)?;
        harmonaize_kernels::copy(memory.view(from, bytes).ok()?, &places).ok()
    }

    /// Whether a segment is a broadcast of a local rank's whose tensors are not mapped.
    fn fetches_root(&self, segment: &Segment) -> bool {
        let Signature { collective, root, .. } = segment.signature;
        let local = self.member.local(root).filter(|_| segment.lo < segment.hi);
        collective.traits().aggregator == Some(AggregatorTask::Broadcast)
            && local.is_some_and(|local| is_remote(self.attachments, local.attachment))
    }

    /// A local rank's memory, and where in it its tensor's part of the segment lies; none if it is not mapped.
    fn mapped(&self, segment: &Segment, local: &Local, output: bool) -> Option<(&'a Arc<Memory>, u64)> {
        let call = self.member.pending(segment.operation, local.rank)?;
        let region = if output { &call.output } else { &call.input };
        let regions = self.attachments.get(local.attachment)?.end.memory()?;
        let (memory, offset) = regions.locate(region.offset, region.bytes).ok()?;
        Some((memory, offset + segment.lo * segment.signature.dtype.size() as u64))
    }

    /// Where the segment's part of a local rank's input lies, mapped or fetched.
    fn input(&self, channel: ChannelId, segment: &Segment, place: usize) -> Option<(&'a Arc<Memory>, u64)> {
        let local = self.member.locals.get(place)?;
        if is_remote(self.attachments, local.attachment) {
            let (memory, at, _) = transfers::fetched(self.member, (channel, segment), place)?;
            return Some((memory, at));
        }
        self.mapped(segment, local, false)
    }

    /// Adds the outputs that are mapped, from `at` of the segment on.
    fn add_outputs(
        &self,
        segment: &Segment,
        at: u64,
        bytes: u64,
        places: &mut ArrayVec<Located<'a>, MAX_SOURCES>,
    ) -> Option<()> {
        for local in &self.member.locals {
            if !is_remote(self.attachments, local.attachment) {
                let (memory, offset) = self.mapped(segment, local, true)?;
                places.try_push((memory, offset + at, bytes)).ok()?;
            }
        }
        Some(())
    }

    /// The local ranks' elements of a segment, from `offset` on.
    fn inputs(
        &self,
        channel: ChannelId,
        segment: &Segment,
        offset: u64,
        elements: usize,
    ) -> Option<ArrayVec<View<'a>, MAX_SOURCES>> {
        let size = segment.signature.dtype.size();
        let (at, bytes) = (offset * size as u64, (elements * size) as u64);
        let mut parts = ArrayVec::new();
        for place in 0..self.member.locals.len() {
            let (memory, from) = self.input(channel, segment, place)?;
            parts.try_push(memory.view(from + at, bytes).ok()?).ok()?;
        }
        Some(parts)
    }

    fn add_up(&self, index: SegmentIndex, offset: u64, elements: usize, to: &mut [u8]) -> Option<()> {
        let (channel, segment, signature) = self.segment(index)?;
        let parts = self.inputs(channel, segment, offset, elements)?;
        self.reduce(&signature, &parts, to.into())
    }

    fn reduce(&self, signature: &Signature, parts: &[View<'_>], to: ViewMut<'_>) -> Option<()> {
        match parts {
            [only] => harmonaize_kernels::copy(*only, &[to]).ok(),
            several => {
                let (op, dtype) = (signature.reduce, signature.dtype);
                harmonaize_kernels::reduce(op, dtype, several, &[to], None).ok()
            }
        }
    }

    /// Has `work` look at this host's elements: its only rank's, or the sum of several, of at most a chunk.
    fn of_host<T>(
        &self,
        index: SegmentIndex,
        offset: u64,
        elements: usize,
        work: impl FnOnce(View<'_>, u64) -> Option<T>,
    ) -> Option<T> {
        let (channel, segment, signature) = self.segment(index)?;
        let parts = self.inputs(channel, segment, offset, elements)?;
        let seed = self.seed(segment, offset);
        if let [only] = parts.as_slice() {
            return work(*only, seed);
        }
        let mut sum = self.coder?.sum.try_borrow_mut().ok()?;
        let to = ViewMut::from(sum.get_mut(..elements)?);
        self.reduce(&signature, &parts, to)?;
        work(to.as_view(), seed)
    }

    /// What a chunk is rotated by: the same at all hosts.
    fn seed(&self, segment: &Segment, offset: u64) -> u64 {
        let words = [self.member.id.0, segment.operation.0, segment.number.0, offset];
        words.into_iter().fold(0x6861_726d_6f6e_6169, |seed, word| mix(seed ^ word))
    }

    fn norms(&self, index: SegmentIndex, offset: u64, elements: usize, to: &mut [u8]) -> Option<()> {
        let PayloadFormat::Shared { block, .. } = self.coder?.rules.format else { return None };
        let block = usize::from(block);
        let several = self.member.locals.len() > 1;
        let piece = if several { self.coder?.sum.try_borrow().ok()?.len() } else { elements }.max(1);
        let norms_bytes = piece.div_ceil(block) * size_of::<f32>();
        for (at, to) in (0..elements).step_by(piece).zip(to.chunks_mut(norms_bytes)) {
            let elements = piece.min(elements - at);
            let norms = |from: View<'_>, _| ranges(Isa::detect(), block, from, to.into()).ok();
            self.of_host(index, offset + at as u64, elements, norms)?;
        }
        Some(())
    }

    fn code(
        &self,
        index: SegmentIndex,
        offset: u64,
        elements: usize,
        of_all: &[u8],
        to: &mut [u8],
    ) -> Option<Squares> {
        let PayloadFormat::Shared { bits, block, .. } = self.coder?.rules.format else { return None };
        let me = u64::from(self.member.core.me().0);
        let encoded = self.of_host(index, offset, elements, |from, seed| {
            let (bits, block, noise) = (bits.into(), block.into(), mix(seed ^ (me + 1)));
            encode_shared(Isa::detect(), bits, block, seed, noise, of_all.into(), from, to.into()).ok()
        })?;
        let (channel, segment, _) = self.segment(index)?;
        let parts = self.inputs(channel, segment, offset, elements)?;
        if let [_] = parts.as_slice() {
            return Some(encoded);
        }
        let squares = parts.iter().map(|part| signal(Isa::detect(), *part).ok());
        Some(Squares { signal: squares.sum::<Option<f64>>()?, ..encoded })
    }

    fn write_sum(&self, index: SegmentIndex, offset: u64, elements: usize, sum: &[u8]) -> Option<()> {
        let (channel, segment, signature) = self.segment(index)?;
        let size = signature.dtype.size() as u64;
        let bytes = elements as u64 * size;
        let holds = segment.stages_output();
        let outputs = views(&self.places(channel, segment, offset * size, bytes)?)?;
        let (first, others) = outputs.split_first()?;
        let coder = self.coder?;
        // What is held is divided when it goes to the outputs.
        let average = signature.reduce == ReduceOp::Average && !holds;
        match coder.rules.format_of(&signature)? {
            PayloadFormat::Tensor { .. } if !average => {
                return harmonaize_kernels::copy(sum.into(), &outputs).ok();
            }
            PayloadFormat::Tensor { .. } => harmonaize_kernels::copy(sum.into(), &[*first]).ok()?,
            PayloadFormat::Shared { bits, block, ranks } => {
                let code = Code::Shared { bits: bits.into(), block: block.into(), ranks: ranks.into() };
                let seed = self.seed(segment, offset);
                // What is read again here stays in the caches.
                let read = holds || average || !others.is_empty();
                let whole = if read { 0 } else { signature.count.saturating_mul(size) as usize };
                let part = PartOf { first: 0, whole };
                decode_part(Isa::detect(), code, seed, sum.into(), Store::Set, *first, part).ok()?;
            }
        }
        if average {
            let (op, dtype, of) = (signature.reduce, signature.dtype, Some(self.member.ranks));
            harmonaize_kernels::reduce(op, dtype, &[first.as_view()], &[*first], of).ok()?;
        }
        if others.is_empty() { Some(()) } else { harmonaize_kernels::copy(first.as_view(), others).ok() }
    }

    /// Copies a sum that was held to the outputs that are mapped, and an average that is to be stored aside. Returns whether all is done.
    ///
    /// It stays held, and goes on to be copied, if hosts begin its segment again between two slices.
    pub(crate) fn copy_out(
        &self,
        channel: ChannelId,
        (passes, slices): (&mut PassSharing, &mut Slices),
    ) -> Option<bool> {
        let segment = self.member.core.segment(channel)?;
        let signature = segment.signature;
        let bytes = (segment.hi - segment.lo) * signature.dtype.size() as u64;
        let sources = &[self.staged_output(channel, segment, 0, bytes)?];
        let mut destinations = ArrayVec::new();
        self.add_outputs(segment, 0, bytes, &mut destinations)?;
        let kernel = &match signature.reduce {
            op @ ReduceOp::Average => {
                if bytes > 0 && any_remote(self.member, self.attachments) {
                    destinations.try_push(transfers::fetched(self.member, (channel, segment), 0)?).ok()?;
                }
                Kernel::Reduce { op, dtype: signature.dtype, divide: Some(self.member.ranks) }
            }
            _ => Kernel::Copy,
        };
        if destinations.is_empty() {
            return Some(true);
        }
        let destinations = &destinations;
        passes.run(&[Pass { kernel, whole: 0, sources, destinations }], slices).ok()
    }
}

/// Has a sum that was held stored in the tensors that are not mapped. Their operation does not end before.
pub(crate) fn store_staged(
    member: &mut CommunicatorState,
    (key, channel): (Key, ChannelId),
    attachments: &Table<Attachment>,
    transfers: &mut Vec<PendingTransfer>,
) -> Result<(), ExecuteError> {
    let Some(segment) = member.core.segment(channel) else { return Ok(()) };
    let aside = segment.signature.reduce == ReduceOp::Average;
    if transfers::store(member, (key, channel), attachments, (Purpose::CopyOut, aside), transfers)? {
        member.core.defer_copy_out(channel);
    }
    Ok(())
}

/// Views of what lies there.
fn views<'a>(places: &[Located<'a>]) -> Option<ArrayVec<ViewMut<'a>, MAX_SOURCES>> {
    places.iter().map(|(memory, at, bytes)| memory.view_mut(*at, *bytes).ok()).collect()
}

/// Cost: a pass over each local rank's part of the chunk, and a search among the channels.
impl Tensors for SegmentTensors<'_> {
    fn read(&self, segment: SegmentIndex, offset: u64, elements: usize, bytes: &mut [u8]) {
        if self.add_up(segment, offset, elements, bytes).is_none() {
            // A tenant that is gone took its tensor with it, and ends the communicator.
            bytes.fill(0);
        }
    }

    fn write(&mut self, segment: SegmentIndex, offset: u64, elements: usize, bytes: &[u8]) {
        let _ = self.write_sum(segment, offset, elements, bytes);
    }

    fn read_broadcast(&self, segment: SegmentIndex, offset: u64, bytes: &mut [u8]) {
        if self.load_broadcast(segment, offset, bytes).is_none() {
            bytes.fill(0);
        }
    }

    fn write_broadcast(&mut self, segment: SegmentIndex, offset: u64, bytes: &[u8]) {
        let _ = self.store_broadcast(segment, offset, bytes);
    }

    fn ranges(&self, segment: SegmentIndex, offset: u64, elements: usize, bytes: &mut [u8]) {
        if self.norms(segment, offset, elements, bytes).is_none() {
            bytes.fill(0);
        }
    }

    fn encode(
        &self,
        segment: SegmentIndex,
        offset: u64,
        elements: usize,
        ranges: &[u8],
        bytes: &mut [u8],
    ) -> Squares {
        let lost = self.code(segment, offset, elements, ranges, bytes);
        lost.unwrap_or_else(|| {
            bytes.fill(0);
            Squares::default()
        })
    }
}
