//! The worker: a host's side. Segments in; packets out and in; sums written, and at the end of a session the reason why.

use crate::PayloadFormat;
use crate::losses::Losses;
use crate::packet::{Content, HEADER_BYTES, Header, Kind, seal};
use crate::rtt::RttEstimator;
use crate::sum::SQUARES;
use harmonaize_abi::SegmentIndex;
use harmonaize_kernels::codes::Squares;
use std::collections::VecDeque;
use std::time::Duration;

mod chunks;
mod config;
mod receive;
mod silence;
mod work;

use chunks::Chunks;
pub use config::{Codes, Event, Reason, Task, Tensors, WorkerConfig, WorkerCounters};
use silence::Silence;
use work::{Flight, Work};

/// Windows between the lowest chunk without a sum and the highest that is sent. What is lost holds up nothing but itself for as long as
/// it takes to ask for it and to send it again.
pub const MAX_WINDOWS_AHEAD: u32 = 4;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Beginning,
    Running { incarnation: u64 },
    Ended,
}

/// A worker.
pub struct Worker {
    config: WorkerConfig,
    state: State,
    session: u64,
    work: VecDeque<Work>,
    chunks: Chunks,
    /// Ranges of all hosts, segment after segment in turn; each has room for as many.
    ranges: Vec<u8>,
    /// Elements of a chunk of ranges.
    ranges_chunk: u64,
    /// The first chunk of the segment that is submitted next.
    end: u64,
    window: u64,
    /// How many workers here use one window together.
    sharers: u16,
    /// Chunks below were looked at for losses.
    judged: u64,
    sequence: u64,
    last_answered: u64,
    begin_due: Duration,
    begins: u32,
    /// Nothing is due before.
    due: Duration,
    silence: Silence,
    losses: Losses,
    acked: u64,
    /// When the last sum came.
    summed: Duration,
    ended: Option<Reason>,
    /// How long sums take, and answers to questions.
    sum_rtt: RttEstimator,
    answer_rtt: RttEstimator,
    counters: WorkerCounters,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("Worker");
        f.field("session", &self.session)
            .field("had", &self.chunks.had())
            .field("next", &self.chunks.next())
            .finish()
    }
}

impl Worker {
    /// A worker without a session. All that it will ever need is allocated here.
    pub fn new(config: WorkerConfig) -> Self {
        let sum_rtt = RttEstimator::new(config.min_retry, config.max_retry);
        let most = usize::try_from(config.codes.segment_elements).unwrap_or(usize::MAX);
        Self {
            ranges: vec![0; config.segments * config.format.ranges_bytes(most)],
            ranges_chunk: config.format.ranged(config.elements as usize) as u64,
            end: 0,
            state: State::Idle,
            session: 0,
            work: VecDeque::with_capacity(config.segments),
            chunks: Chunks::new(usize::from(config.window.max(1)) * MAX_WINDOWS_AHEAD as usize),
            window: 1,
            sharers: 1,
            judged: 0,
            sequence: 0,
            last_answered: 0,
            begin_due: Duration::ZERO,
            begins: 0,
            due: Duration::MAX,
            silence: Silence::new(config.timeout),
            losses: Losses::new(config.max_loss_permille, config.timeout),
            acked: 0,
            summed: Duration::ZERO,
            ended: None,
            sum_rtt,
            answer_rtt: sum_rtt,
            counters: WorkerCounters::default(),
            config,
        }
    }

    /// The number of the last packet: they go on over all sessions, and to another process.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Goes on numbering packets where another process's worker has stopped.
    pub fn resume_sequence(&mut self, sequence: u64) {
        (self.sequence, self.last_answered) = (sequence, sequence);
    }

    /// Begins the session that all workers have agreed on; what was submitted before is forgotten.
    pub fn begin(&mut self, now: Duration, session: u64) {
        self.work.clear();
        (self.state, self.session, self.ended) = (State::Beginning, session, None);
        self.chunks.clear();
        (self.end, self.window, self.acked, self.judged) = (0, 1, 0, 0);
        (self.begin_due, self.begins, self.due) = (now, 0, Duration::MAX);
        self.silence.note_answer();
        self.losses.begin(now);
    }

    /// Whether the aggregator has answered in this session.
    pub fn is_answered(&self) -> bool {
        matches!(self.state, State::Running { .. })
    }

    /// Whether segments are submitted that are not done.
    pub fn is_busy(&self) -> bool {
        !self.work.is_empty()
    }

    /// Whether nothing is submitted, nothing is asked, and so nothing that comes is waited for.
    pub fn is_idle(&self) -> bool {
        !self.is_busy() && self.poll_timeout().is_none()
    }

    /// From now on this worker and others use one window together, so many in all. Those of other hosts need not: who sends less
    /// holds the others up as who is slow does.
    pub fn share_window(&mut self, sharers: u16) {
        self.sharers = sharers.max(1);
    }

    /// Most chunks that are made and have no sum.
    fn most_open(&self) -> u64 {
        u64::from((self.config.window / self.sharers).max(1))
    }

    /// Ends the session: others have left it.
    pub fn stop(&mut self) {
        (self.state, self.ended) = (State::Ended, None);
    }

    /// Gives a segment to be done, the next after the last. `false` if there is no room, or no session.
    pub fn submit(&mut self, segment: SegmentIndex, task: Task) -> bool {
        let follows = self.work.back().is_none_or(|last| last.segment.next() == segment);
        let running = matches!(self.state, State::Beginning | State::Running { .. });
        let (elements, of_form) = match task {
            Task::Sum(elements) => (elements, true),
            Task::Other { elements, .. } => (elements, false),
            Task::Broadcast { bytes, .. } => (bytes, false),
            Task::Barrier => (1, false),
        };
        let coded = of_form && self.ranges_chunk > 0;
        let short = !coded || elements <= self.config.codes.segment_elements;
        let cut = self.chunk(task);
        let fits =
            running && follows && short && elements > 0 && cut > 0 && self.work.len() < self.config.segments;
        if fits {
            let ranged = if coded { 0 } else { elements };
            self.work.push_back(Work {
                segment,
                task,
                elements,
                first: self.end,
                ranges_made: ranged,
                ranged,
                made: 0,
                summed: 0,
                squares: Squares::default(),
            });
            self.end += self.chunks_of_ranges(task) + elements.div_ceil(cut);
        }
        fits
    }

    /// What has happened, each once.
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(reason) = self.ended.take() {
            return Some(Event::Ended(reason));
        }
        let done =
            self.state != State::Ended && self.work.front().is_some_and(|work| work.summed == work.elements);
        let work = if done { self.work.pop_front() } else { None };
        work.map(|Work { segment, squares, .. }| Event::Done { segment, squares })
    }

    /// How much of a segment is in a chunk; 0 if there is no such chunk. In elements, or in bytes as many as those of
    /// a sum.
    fn chunk(&self, task: Task) -> u64 {
        let elements = self.config.elements.max(1);
        match task {
            Task::Sum(_) | Task::Barrier => u64::from(elements),
            Task::Other { dtype, .. } => {
                self.config.format.elements_of_other(elements as usize, dtype) as u64
            }
            Task::Broadcast { .. } => self.config.format.sum_bytes(elements as usize).unwrap_or(1) as u64,
        }
    }

    /// Chunks of ranges of a segment.
    fn chunks_of_ranges(&self, task: Task) -> u64 {
        match task {
            Task::Sum(elements) if self.ranges_chunk > 0 => elements.div_ceil(self.ranges_chunk),
            _ => 0,
        }
    }

    /// Bytes of this worker's part of a chunk, and of what comes back.
    fn sizes(&self, flight: &Flight) -> (Option<usize>, Option<usize>) {
        let (form, elements) = (self.config.format, flight.elements);
        match flight.content {
            Content::Sum => (form.part_bytes(elements), form.sum_bytes(elements)),
            Content::Other(dtype, _) => {
                let bytes = elements.checked_mul(dtype.size());
                (bytes, bytes)
            }
            Content::Ranges => {
                let bytes = Some(form.ranges_bytes(elements));
                (bytes, bytes)
            }
            // Who has the bytes is told that they are in, and gets none.
            Content::Spread if flight.root => (Some(elements), None),
            Content::Spread => (Some(0), Some(elements)),
            Content::Nothing => (Some(0), Some(0)),
        }
    }

    /// When [`Worker::poll_transmit`] is to be called at the latest.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let due = match self.state {
            State::Idle | State::Ended => return None,
            State::Beginning => self.begin_due,
            State::Running { .. } => self.ack_timeout().into_iter().fold(self.due, Duration::min),
        };
        let ends = self.silence.silence_timeout().into_iter().chain(self.silence.refused_timeout());
        let due = ends.fold(due, Duration::min);
        (due != Duration::MAX).then_some(due)
    }

    /// Writes the next packet to `packet` and returns its length; `None` if nothing is to be sent now. `packet` has at least
    /// [`HEADER_BYTES`] and a chunk's bytes.
    pub fn poll_transmit(
        &mut self,
        now: Duration,
        tensors: &impl Tensors,
        packet: &mut [u8],
    ) -> Option<usize> {
        if self.silence.refused_timeout().is_some_and(|end| now >= end) {
            self.end(Reason::Refused);
        }
        if self.silence.silence_timeout().is_some_and(|end| now >= end) {
            self.end(Reason::Silent);
        }
        match self.state {
            State::Idle | State::Ended => None,
            State::Beginning => {
                if now < self.begin_due {
                    return None;
                }
                self.begin_due = now + self.silence.retry(self.answer_rtt, self.begins);
                self.begins += 1;
                self.note_request(now);
                self.bare(Kind::Begin, 0, 0, 0, packet)
            }
            State::Running { incarnation } => {
                if let Some(chunk) = self.overdue(now) {
                    return self.retransmit(now, incarnation, chunk, tensors, packet);
                }
                if let Some(chunk) = self.make() {
                    return self.part(now, incarnation, chunk, tensors, packet);
                }
                let tells = self.ack_timeout().is_some_and(|due| now >= due);
                if tells {
                    self.bare(Kind::Acknowledge, incarnation, self.chunks.had(), 0, packet)
                } else {
                    None
                }
            }
        }
    }

    /// When a packet of its own reports to the aggregator that all sums are there. None where there is nothing to report. Parts that follow
    /// tell it as well, and come before where one operation follows the other.
    fn ack_timeout(&self) -> Option<Duration> {
        let finished = self.chunks.had() == self.chunks.next() && self.acked < self.chunks.had();
        finished.then(|| self.summed + self.sum_rtt.retry(0))
    }

    /// The lowest chunk that is overdue; if none is, finds out when the next will be.
    fn overdue(&mut self, now: Duration) -> Option<u64> {
        if now < self.due {
            return None;
        }
        let mut least = Duration::MAX;
        for (chunk, flight) in self.chunks.all_waiting() {
            if flight.due <= now {
                return Some(chunk);
            }
            least = least.min(flight.due);
        }
        self.due = least;
        None
    }

    /// Makes the next chunk, if the window has room and there is work. Ranges go first, those of segments to come too: so they are there when
    /// the turn is on their codes. But these never take the last place in flight: others may not have come so far, and wait for codes
    /// from here. Cost: a look at each segment that is submitted.
    fn make(&mut self) -> Option<u64> {
        if self.chunks.open() >= self.most_open() {
            return None;
        }
        let limit = self.chunks.had() + self.window.min(self.chunks.capacity());
        let of_ranges = self.ranges_chunk;
        let below = |at: u64| (at < limit).then_some(at);
        let spare = self.chunks.open() + 1 < self.most_open();
        let turn = self.work.iter().position(|work| work.made < work.elements);
        let mut ahead = self.work.iter_mut().enumerate();
        let ahead = ahead.find(|(_, work)| work.ranges_made < work.elements);
        let ranges = ahead.filter(|(at, _)| spare || Some(*at) == turn).and_then(|(_, work)| {
            let at = below(work.first + work.ranges_made / of_ranges.max(1))?;
            let elements = (work.elements - work.ranges_made).min(of_ranges);
            let offset = work.ranges_made;
            work.ranges_made += elements;
            Some((
                at,
                Flight {
                    segment: work.segment,
                    offset,
                    elements: elements as usize,
                    content: Content::Ranges,
                    ..Flight::default()
                },
            ))
        });
        let (at, flight) = ranges.or_else(|| {
            let task = self.work.iter().find(|work| work.made < work.elements)?.task;
            let (chunk, ahead) = (self.chunk(task), self.chunks_of_ranges(task));
            let work = self.work.iter_mut().find(|work| work.made < work.elements)?;
            let at =
                below(work.first + ahead + work.made / chunk).filter(|_| work.ranged == work.elements)?;
            let elements = (work.elements - work.made).min(chunk);
            let offset = work.made;
            work.made += elements;
            let (content, root) = match task {
                Task::Sum(_) => (Content::Sum, false),
                Task::Other { dtype, op, .. } => (Content::Other(dtype, op), false),
                Task::Broadcast { root, .. } => (Content::Spread, root),
                Task::Barrier => (Content::Nothing, false),
            };
            let (segment, elements) = (work.segment, elements as usize);
            Some((at, Flight { segment, offset, elements, content, root, ..Flight::default() }))
        })?;
        self.chunks.make(at, flight);
        Some(at)
    }

    fn note_request(&mut self, now: Duration) {
        self.silence.note_request(now);
        if self.losses.record_request(now) {
            self.end(Reason::Losses);
        }
    }

    /// The network says that nobody is where the aggregator was. Whoever can send packets to this host could have said so: the aggregator is
    /// asked at once, and given up if it does not answer within a part of the patience.
    pub fn handle_refused(&mut self, now: Duration) {
        if self.silence.is_refused() {
            return;
        }
        match self.state {
            State::Idle | State::Ended => return,
            State::Beginning => self.begin_due = now,
            State::Running { .. } => {
                let Some((chunk, flight)) = self.chunks.all_waiting().next() else { return };
                self.chunks.set(chunk, Flight { due: now, ..flight });
                self.due = now;
            }
        }
        self.silence.note_refusal(now);
    }

    fn end(&mut self, reason: Reason) {
        if self.state != State::Ended {
            (self.state, self.ended) = (State::Ended, Some(reason));
        }
    }

    /// Asks for a chunk, or sends it again where the part is known to be missing. A question is short, and what is late is not lost.
    fn retransmit(
        &mut self,
        now: Duration,
        incarnation: u64,
        chunk: u64,
        tensors: &impl Tensors,
        packet: &mut [u8],
    ) -> Option<usize> {
        self.note_request(now);
        if self.state == State::Ended {
            return None;
        }
        let mut flight = self.chunks.flight(chunk);
        if flight.part_received == Some(false) {
            self.counters.retransmits += 1;
            return self.part(now, incarnation, chunk, tensors, packet);
        }
        flight.due = now + self.silence.retry(self.answer_rtt, flight.requests);
        flight.attempts += 1;
        flight.requests += 1;
        flight.requested_at = Some(now);
        self.chunks.set(chunk, flight);
        self.due = self.due.min(flight.due);
        self.bare(Kind::Acknowledge, incarnation, chunk, 1, packet)
    }

    fn part(
        &mut self,
        now: Duration,
        incarnation: u64,
        chunk: u64,
        tensors: &impl Tensors,
        packet: &mut [u8],
    ) -> Option<usize> {
        let mut flight = self.chunks.flight(chunk);
        let Flight { segment, offset, elements, content, root, .. } = flight;
        let bytes = self.sizes(&flight).0?;
        let packet = packet.get_mut(..HEADER_BYTES + bytes)?;
        let payload = packet.get_mut(HEADER_BYTES..)?;
        match (content, self.config.format) {
            (Content::Spread, _) if root => tensors.read_broadcast(segment, offset, payload),
            (Content::Spread | Content::Nothing, _) => {}
            (Content::Ranges, _) => tensors.ranges(segment, offset, elements, payload),
            (Content::Sum, PayloadFormat::Tensor { .. }) | (Content::Other(..), _) => {
                tensors.read(segment, offset, elements, payload);
            }
            (Content::Sum, PayloadFormat::Shared { .. }) => {
                let (codes, squares) = payload.split_at_mut_checked(bytes.checked_sub(SQUARES)?)?;
                let of_all = self.ranges.get(self.ranges_at(segment, offset, elements))?;
                let Squares { error, signal } = tensors.encode(segment, offset, elements, of_all, codes);
                for (to, square) in squares.chunks_exact_mut(size_of::<f32>()).zip([error, signal]) {
                    to.copy_from_slice(&(square as f32).to_le_bytes());
                }
            }
        }
        (flight.sent, flight.part_received, flight.requested_at, flight.retransmitted) =
            (now, None, None, flight.attempts > 0);
        flight.requests = 0;
        // Who is answered backs off no more: it is loss that is in the way, not a queue.
        let usual = if flight.retransmitted { self.answer_rtt } else { self.sum_rtt };
        flight.due = now + self.silence.retry(usual, 0);
        flight.attempts += 1;
        self.chunks.set(chunk, flight);
        self.due = self.due.min(flight.due);
        self.seal(Kind::Contribution, incarnation, chunk, content.note(), packet);
        Some(HEADER_BYTES + bytes)
    }

    /// Where the ranges of these elements lie.
    fn ranges_at(&self, segment: SegmentIndex, offset: u64, elements: usize) -> std::ops::Range<usize> {
        let form = self.config.format;
        let of = |elements: u64| form.ranges_bytes(usize::try_from(elements).unwrap_or(usize::MAX));
        let turn = (segment.0 % self.config.segments.max(1) as u64) as usize;
        let at = turn * of(self.config.codes.segment_elements) + of(offset);
        at..at + form.ranges_bytes(elements)
    }

    fn bare(
        &mut self,
        kind: Kind,
        incarnation: u64,
        chunk: u64,
        note: u8,
        packet: &mut [u8],
    ) -> Option<usize> {
        let packet = packet.get_mut(..HEADER_BYTES)?;
        self.seal(kind, incarnation, chunk, note, packet);
        Some(HEADER_BYTES)
    }

    fn seal(&mut self, kind: Kind, incarnation: u64, chunk: u64, note: u8, packet: &mut [u8]) {
        self.sequence += 1;
        self.acked = self.chunks.had();
        self.counters.sent += 1;
        let header = Header {
            kind,
            worker: self.config.worker,
            count: u16::from(kind == Kind::Contribution),
            communicator: self.config.communicator,
            session: self.session,
            incarnation,
            sequence: self.sequence,
            chunk,
            had: self.chunks.had(),
            window: 0,
            note,
        };
        seal(&header, &self.config.key, packet);
    }

    /// What was sent, taken and dropped.
    pub fn counters(&self) -> WorkerCounters {
        self.counters
    }
}
