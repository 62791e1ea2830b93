//! What comes to a worker: answers, sums, and other workers' bytes.

use super::config::{Codes, Reason, Tensors, WorkerConfig};
use super::work::{Flight, Work};
use super::{State, Worker};
use crate::PayloadFormat;
use crate::packet::{Content, Header, Kind, Sealed};
use crate::sum::split;
use harmonaize_abi::SegmentIndex;
use harmonaize_kernels::codes::Squares;
use std::collections::VecDeque;
use std::time::Duration;

/// How far above a chunk a sum is after which that chunk counts as lost. What is less far out of order was overtaken.
const REORDERING_THRESHOLD: u64 = 3;

impl Worker {
    /// Takes any bytes that came from the network.
    pub fn receive(&mut self, now: Duration, bytes: &[u8], tensors: &mut impl Tensors) {
        let WorkerConfig { communicator, worker, ref key, .. } = self.config;
        let ours = |sealed: &Sealed<'_>| {
            (sealed.communicator(), sealed.worker()) == (communicator, worker) && !sealed.kind().of_workers()
        };
        let Some(sealed) = Sealed::read(bytes).ok().filter(ours) else {
            self.counters.unrecognized += 1;
            return;
        };
        let Ok((header, payload)) = sealed.open(key) else {
            self.counters.tag += 1;
            return;
        };
        let known = match self.state {
            State::Idle | State::Ended => false,
            State::Beginning => matches!(header.kind, Kind::Granted | Kind::Lost),
            State::Running { incarnation } => header.incarnation == incarnation || header.kind == Kind::Lost,
        };
        if header.session != self.session || !known {
            self.counters.stale += 1;
            return;
        }
        // An answer to what was sent after all that was answered before: no replay keeps a dead aggregator alive.
        if header.sequence > self.last_answered && header.sequence <= self.sequence {
            self.last_answered = header.sequence;
            self.silence.note_answer();
        }
        // Answers overtake one another; for losses each counts.
        if header.sequence != 0 {
            self.losses.record_answer();
        }
        match header.kind {
            Kind::Lost => self.end(Reason::Lost),
            Kind::Granted => {
                if self.state == State::Beginning {
                    self.window = u64::from(header.window.max(1));
                    self.state = State::Running { incarnation: header.incarnation };
                    self.silence.note_answer();
                }
            }
            Kind::Waiting => self.handle_waiting(now, &header),
            Kind::Result => self.handle_sum(now, &header, payload, tensors),
            Kind::Begin | Kind::Contribution | Kind::Acknowledge => {}
        }
    }

    fn handle_waiting(&mut self, now: Duration, header: &Header) {
        self.window = u64::from(header.window.max(1));
        let Some(mut flight) = self.chunks.waiting(header.chunk) else { return };
        flight.part_received = Some(header.note == 1);
        if flight.root && header.note == 1 {
            return self.finished(now, header.chunk, flight);
        }
        // A question follows the part on its way: where that has not come it is lost. What waits for a slot, or for others, is
        // not, and its time-out begins anew.
        let lost = header.note == 0 && flight.requested_at.is_some();
        // By Karn's rule, as for sums: to the only question since an answer, or to the part, which had no slot.
        let since = match flight.requests {
            0 => Some(flight.sent).filter(|_| !flight.retransmitted && flight.waits == 0),
            1 => flight.requested_at,
            _ => None,
        };
        if let Some(since) = since {
            self.answer_rtt.sample(now.saturating_sub(since));
        }
        flight.requests = 0;
        flight.due = if lost { now } else { now + self.answer_rtt.retry(flight.waits) };
        flight.waits += u32::from(!lost);
        self.due = self.due.min(flight.due);
        self.chunks.set(header.chunk, flight);
    }

    fn handle_sum(&mut self, now: Duration, header: &Header, payload: &[u8], tensors: &mut impl Tensors) {
        self.window = u64::from(header.window.max(1));
        let chunk = header.chunk;
        let Some(content) = Content::of(header.note) else {
            self.counters.wrong += 1;
            return;
        };
        if content.adds() && header.count < self.config.hosts {
            self.counters.wrong += 1;
            return;
        }
        let Some(flight) = self.chunks.waiting(chunk) else {
            self.counters.duplicates += 1;
            return;
        };
        let Flight { segment, offset, elements, .. } = flight;
        if self.sizes(&flight).1 != Some(payload.len()) || content != flight.content {
            self.counters.wrong += 1;
            // Of a sum there is no other length; of another's bytes it is what was called there.
            if content == Content::Spread {
                self.end(Reason::Lost);
            }
            return;
        }
        let coded = matches!(self.config.format, PayloadFormat::Shared { .. }) && content == Content::Sum;
        let sum = if coded { self.judged_sum(payload) } else { Some((payload, Squares::default())) };
        let Some((sum, lost)) = sum else { return self.end(Reason::Bound) };
        let of_all = self.ranges_at(segment, offset, elements);
        let Some(work) = work_of(&mut self.work, segment) else { return };
        match content {
            Content::Ranges => {
                let Some(to) = self.ranges.get_mut(of_all) else { return };
                to.copy_from_slice(payload);
                work.ranged += elements as u64;
            }
            Content::Sum | Content::Other(..) => tensors.write(segment, offset, elements, sum),
            Content::Spread => tensors.write_broadcast(segment, offset, payload),
            Content::Nothing => {}
        }
        work.squares = work.squares.and(lost);
        self.finished(now, chunk, flight);
    }

    /// A chunk is done here.
    fn finished(&mut self, now: Duration, chunk: u64, flight: Flight) {
        let Flight { segment, elements, content, .. } = flight;
        if content != Content::Ranges
            && let Some(work) = work_of(&mut self.work, segment)
        {
            work.summed += elements as u64;
        }
        self.counters.sums += 1;
        self.summed = now;
        // Of a chunk that was asked for, and whose part was sent once, this is the most that it can be. It has to count: where queues fill,
        // all chunks are asked for before they come, and nothing else would tell that sums take longer now.
        if !flight.retransmitted {
            self.sum_rtt.sample(now.saturating_sub(flight.sent));
        }
        if flight.attempts > 1 {
            self.losses.record_answer();
        }
        self.silence.note_answer();
        self.chunks.finish(chunk, flight);
        if content != Content::Ranges {
            self.detect_losses(now, chunk);
        }
    }

    /// A sum of codes and what it says that it lost; `None` if that is more than it may be.
    fn judged_sum<'a>(&self, payload: &'a [u8]) -> Option<(&'a [u8], Squares)> {
        let (codes, squares) = split(payload)?;
        let (error, signal) = squares.split_first_chunk()?;
        let of = |bytes: &[u8; 4]| f64::from(f32::from_le_bytes(*bytes));
        let Codes { max_error: most, spread, .. } = self.config.codes;
        let lost = Squares { error: of(error) * spread, signal: of(signal.first_chunk()?) };
        (lost.error == 0.0 || lost.error <= most * lost.signal).then_some((codes, lost))
    }

    /// Has what is so far below a sum, and was sent once, asked for at once. Cost: each chunk is looked at once.
    fn detect_losses(&mut self, now: Duration, summed: u64) {
        self.judged = self.judged.max(self.chunks.had());
        while self.judged + REORDERING_THRESHOLD <= summed {
            let mut hole = self.chunks.flight(self.judged);
            if hole.made && !hole.done && hole.attempts == 1 {
                hole.due = now;
                self.chunks.set(self.judged, hole);
                self.due = now;
            }
            self.judged += 1;
        }
    }
}

/// The work on a segment.
fn work_of(work: &mut VecDeque<Work>, segment: SegmentIndex) -> Option<&mut Work> {
    let front = work.front().map(|work| work.segment).unwrap_or_default();
    let at = segment.0.checked_sub(front.0).and_then(|at| usize::try_from(at).ok());
    work.get_mut(at?)
}
