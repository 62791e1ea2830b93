//! Segments that an aggregator sums: the worker of an epoch, its datagrams, and the tensors behind both.

use crate::attachment::Attachment;
use crate::coded::mix;
use crate::communicator_state::{CommunicatorState, ExtraStaging};
use crate::passes::{Kernel, Pass, PassSharing};
use crate::slices::Slices;
use crate::step::Located;
use crate::table::Table;
use arrayvec::ArrayVec;
use harmonaize_abi::{
    ChannelId, Epoch, Rank, ReduceOp, SHARED_CODEC, SegmentIndex, Signature, View, ViewMut,
};
use harmonaize_aggregator::{Event, PayloadFormat, Tensors, Worker};
use harmonaize_core::{CodingReport, Nanos, Segment};
use harmonaize_kernels::Isa;
use harmonaize_kernels::codes::{Code, PartOf, Squares, Store, decode_part, encode_shared, ranges, signal};
use harmonaize_plan::MAX_SOURCES;
use harmonaize_shm::Memory;
use std::sync::Arc;

mod endpoint;
mod path;

pub(crate) use path::AggregatorPath;
use path::{BATCH, Coder, Session};

/// Calls to receive in a row.
const MAX_RECEIVE_CALLS: usize = 8;
/// Rounds of the loop between two calls to receive for an idle worker.
const MAX_IDLE_POLLS: u32 = 16;

/// Packets in, what they say to the communicator, packets out. How much was done.
pub(crate) fn progress(
    path: &mut AggregatorPath,
    now: Nanos,
    member: &mut CommunicatorState,
    attachments: &Table<Attachment>,
) -> usize {
    let time = now.into();
    let AggregatorPath { epoch, address, worker, datagrams, reconnect, coder, idle_polls, session, .. } =
        path;
    *idle_polls = (*idle_polls + 1) % MAX_IDLE_POLLS;
    // What comes to an idle worker is late; others need not wait for the calls that find that there is nothing.
    let mut reach = SegmentTensors { member, attachments, epoch: *epoch, coder: Some(coder) };
    let mut worked = 0;
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
    worked += notify_core(now, *epoch, worker, session, member);
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
    worked + notify_core(now, *epoch, worker, session, member)
}

/// Tells the communicator what has happened to the worker.
fn notify_core(
    now: Nanos,
    epoch: Epoch,
    worker: &mut Worker,
    session: &mut Session,
    member: &mut CommunicatorState,
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
                let coded = coded.then_some(told);
                member.core.handle_aggregated(now, epoch, segment, coded.as_ref());
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
        let size = segment.signature.dtype.size() as u64;
        let base = if segment.retains_output() {
            self.member.extra_offset(segment, size, ExtraStaging::Result)
        } else {
            0
        };
        Some((self.member.staging_of(channel)?, base + at, bytes))
    }

    /// Where bytes of a broadcast go, from `at` of the segment on.
    fn places(
        &self,
        channel: ChannelId,
        segment: &Segment,
        at: u64,
        bytes: u64,
    ) -> Option<ArrayVec<Located<'a>, MAX_SOURCES>> {
        if segment.stages_output() {
            return Some(ArrayVec::from_iter([self.staged_output(channel, segment, at, bytes)?]));
        }
        let mut places = self.outputs(segment, &segment.signature, segment.lo, bytes)?;
        places.iter_mut().for_each(|(_, place, _)| *place += at);
        Some(places)
    }

    /// Bytes of the root's input, from `at` of the segment on.
    fn root_input(&self, segment: &Segment, at: u64, bytes: u64) -> Option<Located<'a>> {
        let signature = &segment.signature;
        let (memory, tensor) = self.tensor(segment, signature, signature.root, false, segment.lo)?;
        Some((memory, tensor + at, bytes))
    }

    fn load_broadcast(&self, index: SegmentIndex, at: u64, to: &mut [u8]) -> Option<()> {
        let (_, segment, _) = self.segment(index)?;
        let (memory, from, bytes) = self.root_input(segment, at, to.len() as u64)?;
        harmonaize_kernels::copy(memory.view(from, bytes).ok()?, &[to.into()]).ok()
    }

    fn store_broadcast(&self, index: SegmentIndex, at: u64, bytes: &[u8]) -> Option<()> {
        let (channel, segment, _) = self.segment(index)?;
        let places = views(&self.places(channel, segment, at, bytes.len() as u64)?)?;
        harmonaize_kernels::copy(bytes.into(), &places).ok()
    }

    /// What a root broadcasts, to its own ranks. Returns whether all is done.
    pub(crate) fn copy_root_output(
        &self,
        channel: ChannelId,
        (passes, slices): (&mut PassSharing, &mut Slices),
    ) -> Option<bool> {
        let segment = self.member.core.segment(channel)?;
        let bytes = (segment.hi - segment.lo) * segment.signature.dtype.size() as u64;
        let destinations = &self.places(channel, segment, 0, bytes)?;
        let sources = &[self.root_input(segment, 0, bytes)?];
        passes.run(&[Pass { kernel: &Kernel::Copy, whole: 0, sources, destinations }], slices).ok()
    }

    /// A rank's memory and where in it the tensor's bytes from element `at` on lie.
    fn tensor(
        &self,
        segment: &Segment,
        signature: &Signature,
        rank: Rank,
        output: bool,
        at: u64,
    ) -> Option<(&'a Arc<Memory>, u64)> {
        let local = self.member.local(rank)?;
        let call = self.member.pending(segment.operation, rank)?;
        let region = if output { &call.output } else { &call.input };
        let regions = self.attachments.get(local.attachment)?.end.memory()?;
        let (memory, offset) = regions.locate(region.offset, region.bytes).ok()?;
        Some((memory, offset + at * signature.dtype.size() as u64))
    }

    fn outputs(
        &self,
        segment: &Segment,
        signature: &Signature,
        at: u64,
        bytes: u64,
    ) -> Option<ArrayVec<Located<'a>, MAX_SOURCES>> {
        let mut places = ArrayVec::new();
        for local in &self.member.locals {
            let (memory, offset) = self.tensor(segment, signature, local.rank, true, at)?;
            places.try_push((memory, offset, bytes)).ok()?;
        }
        Some(places)
    }

    fn inputs(
        &self,
        segment: &Segment,
        signature: &Signature,
        at: u64,
        elements: usize,
    ) -> Option<ArrayVec<View<'a>, MAX_SOURCES>> {
        let bytes = (elements * signature.dtype.size()) as u64;
        let mut parts = ArrayVec::new();
        for local in &self.member.locals {
            let (memory, at) = self.tensor(segment, signature, local.rank, false, at)?;
            parts.try_push(memory.view(at, bytes).ok()?).ok()?;
        }
        Some(parts)
    }

    fn add_up(&self, index: SegmentIndex, offset: u64, elements: usize, to: &mut [u8]) -> Option<()> {
        let (_, segment, signature) = self.segment(index)?;
        let parts = self.inputs(segment, &signature, segment.lo + offset, elements)?;
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
        let (_, segment, signature) = self.segment(index)?;
        let parts = self.inputs(segment, &signature, segment.lo + offset, elements)?;
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
        let (_, segment, signature) = self.segment(index)?;
        let parts = self.inputs(segment, &signature, segment.lo + offset, elements)?;
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
        let outputs = if holds {
            ArrayVec::from_iter([self.staged_output(channel, segment, offset * size, bytes)?])
        } else {
            self.outputs(segment, &signature, segment.lo + offset, bytes)?
        };
        let outputs = views(&outputs)?;
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

    /// Copies a sum that was held to where it belongs. Returns whether all is done.
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
        let destinations = &self.outputs(segment, &signature, segment.lo, bytes)?;
        let kernel = &match signature.reduce {
            op @ ReduceOp::Average => {
                Kernel::Reduce { op, dtype: signature.dtype, divide: Some(self.member.ranks) }
            }
            _ => Kernel::Copy,
        };
        passes.run(&[Pass { kernel, whole: 0, sources, destinations }], slices).ok()
    }
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
