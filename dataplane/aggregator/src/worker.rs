//! The worker: a host's side. Segments in; packets out and in; sums written, and at the end of a session the reason why.

use crate::Form;
use crate::packet::{HEADER_BYTES, Header, Kind, RANGES, Sealed, seal};
use crate::round_trip::RoundTrip;
use crate::sum::{SQUARES, split};
use harmonaize_kernels::codes::Squares;
use std::collections::VecDeque;
use std::time::Duration;

mod config;
mod work;

pub use config::{Codes, Event, Reason, Tensors, WorkerConfig, WorkerCounters};
use work::{Flight, Work};

/// How far above a chunk a sum is after which that chunk is taken for lost: what is less far out of order was overtaken.
const LATER: u64 = 3;
/// Windows between the lowest chunk without a sum and the highest that is sent. What is lost holds up nothing but itself for as long as
/// it takes to ask for it and to send it again.
pub const SPAN: u32 = 4;
/// Questions over which losses are judged.
const JUDGED: u32 = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    /// What the aggregator said of its incarnation, or 0.
    Beginning {
        incarnation: u64,
    },
    Running {
        incarnation: u64,
    },
    Ended,
}

/// A worker.
pub struct Worker {
    config: WorkerConfig,
    state: State,
    session: u64,
    work: VecDeque<Work>,
    flights: Vec<Flight>,
    /// Ranges of all hosts, segment after segment in turn; each has room for as many.
    ranges: Vec<u8>,
    /// Elements of a chunk of ranges.
    ranges_chunk: u64,
    /// All sums below this chunk are there.
    had: u64,
    /// No chunk from here on has been made.
    next: u64,
    /// The first chunk of the segment that is submitted next.
    end: u64,
    window: u64,
    /// Chunks that are made and have no sum.
    open: u64,
    /// Chunks below were looked at for losses.
    judged: u64,
    sequence: u64,
    echoed: u64,
    begin_due: Duration,
    begins: u32,
    /// Nothing is due before.
    due: Duration,
    unanswered: Option<Duration>,
    questions: u32,
    answers: u32,
    told: u64,
    ended: Option<Reason>,
    round_trip: RoundTrip,
    counters: WorkerCounters,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("Worker");
        f.field("session", &self.session).field("had", &self.had).field("next", &self.next).finish()
    }
}

impl Worker {
    /// A worker without a session. All that it will ever need is allocated here.
    pub fn new(config: WorkerConfig) -> Self {
        let round_trip = RoundTrip::new(config.retry_least, config.retry_most);
        let most = usize::try_from(config.codes.segment_elements).unwrap_or(usize::MAX);
        Self {
            ranges: vec![0; config.segments * config.form.ranges_bytes(most)],
            ranges_chunk: config.form.ranged(config.elements as usize) as u64,
            end: 0,
            state: State::Idle,
            session: 0,
            work: VecDeque::with_capacity(config.segments),
            flights: vec![Flight::default(); usize::from(config.window.max(1)) * SPAN as usize],
            had: 0,
            next: 0,
            window: 1,
            open: 0,
            judged: 0,
            sequence: 0,
            echoed: 0,
            begin_due: Duration::ZERO,
            begins: 0,
            due: Duration::MAX,
            unanswered: None,
            questions: 0,
            answers: 0,
            told: 0,
            ended: None,
            round_trip,
            counters: WorkerCounters::default(),
            config,
        }
    }

    /// Begins the session that all workers have agreed on; what was submitted before is forgotten.
    pub fn begin(&mut self, now: Duration, session: u64) {
        self.work.clear();
        (self.state, self.session, self.ended) = (State::Beginning { incarnation: 0 }, session, None);
        (self.had, self.next, self.end, self.window, self.told) = (0, 0, 0, 1, 0);
        self.flights.fill(Flight::default());
        (self.open, self.judged) = (0, 0);
        (self.begin_due, self.begins, self.due) = (now, 0, Duration::MAX);
        (self.unanswered, self.questions, self.answers) = (None, 0, 0);
    }

    /// Ends the session: others have left it.
    pub fn stop(&mut self) {
        (self.state, self.ended) = (State::Ended, None);
    }

    /// Gives a segment of `elements` elements to be summed, the next after the last. `false` if there is no room, or no session.
    pub fn submit(&mut self, segment: u64, elements: u64) -> bool {
        let follows = self.work.back().is_none_or(|last| last.segment + 1 == segment);
        let running = matches!(self.state, State::Beginning { .. } | State::Running { .. });
        let coded = self.ranges_chunk > 0;
        let short = !coded || elements <= self.config.codes.segment_elements;
        let fits = running && follows && short && elements > 0 && self.work.len() < self.config.segments;
        if fits {
            let ranged = if coded { 0 } else { elements };
            self.work.push_back(Work {
                segment,
                elements,
                first: self.end,
                ranges_made: ranged,
                ranged,
                made: 0,
                summed: 0,
                hosts: u16::MAX,
                squares: Squares::default(),
            });
            self.end += self.chunks_of_ranges(elements) + elements.div_ceil(self.chunk());
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
        work.map(|Work { segment, hosts, squares, .. }| Event::Done { segment, hosts, squares })
    }

    fn chunk(&self) -> u64 {
        u64::from(self.config.elements.max(1))
    }

    /// Chunks of ranges of a segment.
    fn chunks_of_ranges(&self, elements: u64) -> u64 {
        if self.ranges_chunk == 0 { 0 } else { elements.div_ceil(self.ranges_chunk) }
    }

    /// When [`Worker::poll_transmit`] is to be called at the latest.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let due = match self.state {
            State::Idle | State::Ended => return None,
            State::Beginning { .. } => self.begin_due,
            State::Running { .. } => self.due,
        };
        let patience = self.unanswered.map(|since| since + self.config.patience);
        let due = patience.map_or(due, |end| end.min(due));
        (due != Duration::MAX).then_some(due)
    }

    /// Writes the next packet to `packet`, of at least [`HEADER_BYTES`] and a chunk's bytes, and returns its length; `None` if
    /// nothing is to be sent now.
    pub fn poll_transmit(
        &mut self,
        now: Duration,
        tensors: &impl Tensors,
        packet: &mut [u8],
    ) -> Option<usize> {
        if self.unanswered.is_some_and(|since| now.saturating_sub(since) >= self.config.patience) {
            self.end(Reason::Silent);
        }
        match self.state {
            State::Idle | State::Ended => None,
            State::Beginning { incarnation } => {
                if now < self.begin_due {
                    return None;
                }
                self.begin_due = now + self.round_trip.retry(self.begins);
                self.begins += 1;
                self.ask(now);
                self.bare(Kind::Begin, incarnation, 0, 0, packet)
            }
            State::Running { incarnation } => {
                if let Some(chunk) = self.overdue(now) {
                    return self.again(now, incarnation, chunk, tensors, packet);
                }
                if let Some(chunk) = self.make() {
                    return self.part(now, incarnation, chunk, tensors, packet);
                }
                let finished = self.had == self.next && self.told < self.had;
                if finished { self.bare(Kind::Acknowledge, incarnation, self.had, 0, packet) } else { None }
            }
        }
    }

    fn flight(&self, chunk: u64) -> Flight {
        let at = (chunk % self.flights.len().max(1) as u64) as usize;
        self.flights.get(at).copied().unwrap_or_default()
    }

    fn set(&mut self, chunk: u64, flight: Flight) {
        let at = (chunk % self.flights.len().max(1) as u64) as usize;
        if let Some(to) = self.flights.get_mut(at) {
            *to = flight;
        }
    }

    /// The lowest chunk that is overdue; if none is, finds out when the next will be.
    fn overdue(&mut self, now: Duration) -> Option<u64> {
        if now < self.due {
            return None;
        }
        let mut least = Duration::MAX;
        for chunk in self.had..self.next {
            let flight = self.flight(chunk);
            let open = flight.made && !flight.done;
            if open && flight.due <= now {
                return Some(chunk);
            }
            if open {
                least = least.min(flight.due);
            }
        }
        self.due = least;
        None
    }

    /// Makes the next chunk, if the window has room and there is work.
    fn make(&mut self) -> Option<u64> {
        let most = self.window.min(self.flights.len() as u64);
        let in_flight = self.open < u64::from(self.config.window.max(1));
        if in_flight { self.make_below(self.had + most) } else { None }
    }

    /// Makes the next chunk if it is below `limit`. Ranges go first, those of segments to come too: so they are there when the
    /// turn is on their codes. But these never take the last place in flight: others may not have come so far, and wait for codes
    /// from here. Cost: a look at each segment that is submitted.
    fn make_below(&mut self, limit: u64) -> Option<u64> {
        let (chunk, of_ranges) = (self.chunk(), self.ranges_chunk);
        let below = |at: u64| (at < limit).then_some(at);
        let spare = self.open + 1 < u64::from(self.config.window);
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
                    ranges: true,
                    ..Flight::default()
                },
            ))
        });
        let (at, flight) = ranges.or_else(|| {
            let work = self.work.iter_mut().find(|work| work.made < work.elements)?;
            let ahead = if of_ranges == 0 { 0 } else { work.elements.div_ceil(of_ranges) };
            let at =
                below(work.first + ahead + work.made / chunk).filter(|_| work.ranged == work.elements)?;
            let elements = (work.elements - work.made).min(chunk);
            let offset = work.made;
            work.made += elements;
            Some((
                at,
                Flight { segment: work.segment, offset, elements: elements as usize, ..Flight::default() },
            ))
        })?;
        self.set(at, Flight { made: true, ..flight });
        self.next = self.next.max(at + 1);
        self.open += 1;
        Some(at)
    }

    fn ask(&mut self, now: Duration) {
        self.unanswered.get_or_insert(now);
        self.questions += 1;
        // A whole window is asked for at once where answers are late; what is under way is not lost.
        let under_way = u32::from(self.config.window.max(1));
        if self.questions > JUDGED + under_way {
            let unanswered = u64::from(self.questions.saturating_sub(self.answers + under_way));
            if unanswered * 1000 > u64::from(self.config.loss_most) * u64::from(self.questions) {
                self.end(Reason::Losses);
            }
            (self.questions, self.answers) = (self.questions / 2, self.answers / 2);
        }
    }

    fn end(&mut self, reason: Reason) {
        if self.state != State::Ended {
            (self.state, self.ended) = (State::Ended, Some(reason));
        }
    }

    /// Asks for a chunk, or sends it again where the part is known to be missing. A question is short, and what is late is not lost.
    fn again(
        &mut self,
        now: Duration,
        incarnation: u64,
        chunk: u64,
        tensors: &impl Tensors,
        packet: &mut [u8],
    ) -> Option<usize> {
        self.ask(now);
        if self.state == State::Ended {
            return None;
        }
        let mut flight = self.flight(chunk);
        if flight.attempts == 0 || flight.held == Some(false) {
            self.counters.sent_again += u64::from(flight.attempts > 0);
            return self.part(now, incarnation, chunk, tensors, packet);
        }
        flight.due = now + self.round_trip.retry(flight.attempts);
        flight.attempts += 1;
        flight.asked = true;
        self.set(chunk, flight);
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
        let mut flight = self.flight(chunk);
        let Flight { segment, offset, elements, ranges, .. } = flight;
        let form = self.config.form;
        let bytes = if ranges { form.ranges_bytes(elements) } else { form.part_bytes(elements)? };
        let packet = packet.get_mut(..HEADER_BYTES + bytes)?;
        let payload = packet.get_mut(HEADER_BYTES..)?;
        match form {
            Form::Tensor { .. } => tensors.read(segment, offset, elements, payload),
            Form::Shared { .. } if ranges => tensors.ranges(segment, offset, elements, payload),
            Form::Shared { .. } => {
                let (codes, squares) = payload.split_at_mut_checked(bytes.checked_sub(SQUARES)?)?;
                let of_all = self.ranges.get(self.ranges_at(segment, offset, elements))?;
                let Squares { error, signal } = tensors.encode(segment, offset, elements, of_all, codes);
                for (to, square) in squares.chunks_exact_mut(size_of::<f32>()).zip([error, signal]) {
                    to.copy_from_slice(&(square as f32).to_le_bytes());
                }
            }
        }
        (flight.sent, flight.held, flight.asked) = (now, None, false);
        flight.due = now + self.round_trip.retry(flight.attempts);
        flight.attempts += 1;
        self.set(chunk, flight);
        self.due = self.due.min(flight.due);
        self.seal(Kind::Contribution, incarnation, chunk, if ranges { RANGES } else { 0 }, packet);
        Some(HEADER_BYTES + bytes)
    }

    /// Where the ranges of these elements lie.
    fn ranges_at(&self, segment: u64, offset: u64, elements: usize) -> std::ops::Range<usize> {
        let form = self.config.form;
        let of = |elements: u64| form.ranges_bytes(usize::try_from(elements).unwrap_or(usize::MAX));
        let turn = (segment % self.config.segments.max(1) as u64) as usize;
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
        self.told = self.had;
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
            had: self.had,
            window: 0,
            note,
        };
        seal(&header, &self.config.key, packet);
    }

    /// Takes any bytes that came from the network.
    pub fn receive(&mut self, now: Duration, bytes: &[u8], tensors: &mut impl Tensors) {
        let ours = |sealed: &Sealed<'_>| {
            sealed.communicator() == self.config.communicator
                && sealed.worker() == self.config.worker
                && !sealed.kind().of_workers()
        };
        let Some(sealed) = Sealed::read(bytes).ok().filter(ours) else {
            self.counters.strange += 1;
            return;
        };
        let Ok((header, payload)) = sealed.open(&self.config.key) else {
            self.counters.tag += 1;
            return;
        };
        let known = match self.state {
            State::Idle | State::Ended => false,
            State::Beginning { .. } => matches!(header.kind, Kind::Granted | Kind::Lost),
            State::Running { incarnation } => header.incarnation == incarnation || header.kind == Kind::Lost,
        };
        if header.session != self.session || !known {
            self.counters.stale += 1;
            return;
        }
        // An answer to what was sent after all that was answered before: no replay keeps a dead aggregator alive.
        if header.sequence > self.echoed && header.sequence <= self.sequence {
            (self.echoed, self.unanswered) = (header.sequence, None);
        }
        // Answers overtake one another; for losses each counts.
        self.answers = self.answers.saturating_add(u32::from(header.sequence != 0));
        match header.kind {
            Kind::Lost => self.end(Reason::Lost),
            Kind::Granted => {
                if let State::Beginning { incarnation } = self.state {
                    self.window = u64::from(header.window.max(1));
                    if header.note == 1 {
                        self.state = State::Running { incarnation: header.incarnation };
                        self.unanswered = None;
                    } else if header.incarnation != incarnation {
                        // Partial sums wait until all have named the same incarnation.
                        self.state = State::Beginning { incarnation: header.incarnation };
                        self.begin_due = now;
                    }
                }
            }
            Kind::Waiting => self.waiting(now, &header),
            Kind::Result => self.sum(now, &header, payload, tensors),
            Kind::Begin | Kind::Contribution | Kind::Acknowledge => {}
        }
    }

    fn waiting(&mut self, now: Duration, header: &Header) {
        self.window = u64::from(header.window.max(1));
        if header.chunk < self.had || header.chunk >= self.next {
            return;
        }
        let mut flight = self.flight(header.chunk);
        if flight.done || !flight.made {
            return;
        }
        flight.held = Some(header.note == 1);
        // A question follows the part on its way: where that has not come it is lost. What waits for a slot, or for others, is
        // not, and its time-out begins anew.
        let lost = header.note == 0 && flight.asked;
        flight.due = if lost { now } else { now + self.round_trip.retry(flight.attempts.saturating_sub(1)) };
        self.due = self.due.min(flight.due);
        self.set(header.chunk, flight);
    }

    fn sum(&mut self, now: Duration, header: &Header, payload: &[u8], tensors: &mut impl Tensors) {
        self.window = u64::from(header.window.max(1));
        let chunk = header.chunk;
        let few = header.count < self.config.hosts;
        if few && !self.config.partial {
            self.counters.wrong += 1;
            return;
        }
        // A sum without this host's part may come before it was sent: the part is made, and sent as late.
        let limit = self.had + self.flights.len() as u64;
        while few && self.next <= chunk && chunk < limit {
            let Some(made) = self.make_below(limit) else { break };
            self.set(made, Flight { due: now, ..self.flight(made) });
            self.due = now;
        }
        let mut flight = self.flight(chunk);
        if chunk < self.had || chunk >= self.next || !flight.made || flight.done {
            self.counters.duplicates += 1;
            return;
        }
        let Flight { segment, offset, elements, ranges, .. } = flight;
        let form = self.config.form;
        let bytes = if ranges { Some(form.ranges_bytes(elements)) } else { form.sum_bytes(elements) };
        let of_ranges = header.note == RANGES && matches!(form, Form::Shared { .. });
        if bytes != Some(payload.len()) || ranges != of_ranges {
            self.counters.wrong += 1;
            return;
        }
        let coded = matches!(form, Form::Shared { .. }) && !ranges;
        let sum = if coded { self.judged_sum(payload) } else { Some((payload, Squares::default())) };
        let Some((sum, lost)) = sum else { return self.end(Reason::Bound) };
        let of_all = self.ranges_at(segment, offset, elements);
        let front = self.work.front().map_or(0, |work| work.segment);
        let at = flight.segment.checked_sub(front).and_then(|at| usize::try_from(at).ok());
        let Some(work) = at.and_then(|at| self.work.get_mut(at)) else { return };
        if ranges {
            let Some(to) = self.ranges.get_mut(of_all) else { return };
            to.copy_from_slice(payload);
            work.ranged += elements as u64;
        } else {
            tensors.write(segment, offset, elements, sum);
            work.summed += elements as u64;
            work.squares = work.squares.and(lost);
        }
        work.hosts = work.hosts.min(header.count);
        self.counters.sums += 1;
        if flight.attempts == 1 {
            self.round_trip.sample(now.saturating_sub(flight.sent));
        }
        if flight.attempts > 1 {
            self.answers = self.answers.saturating_add(1);
        }
        self.unanswered = None;
        flight.done = true;
        self.set(chunk, flight);
        self.open = self.open.saturating_sub(1);
        while self.had < self.next && self.flight(self.had).done {
            self.set(self.had, Flight::default());
            self.had += 1;
        }
        if !ranges {
            self.judge(now, chunk);
        }
    }

    /// A sum of codes and what it says that it lost; `None` if that is more than it may be.
    fn judged_sum<'a>(&self, payload: &'a [u8]) -> Option<(&'a [u8], Squares)> {
        let (codes, squares) = split(payload)?;
        let (error, signal) = squares.split_first_chunk()?;
        let of = |bytes: &[u8; 4]| f64::from(f32::from_le_bytes(*bytes));
        let Codes { most, spread, .. } = self.config.codes;
        let lost = Squares { error: of(error) * spread, signal: of(signal.first_chunk()?) };
        (lost.error == 0.0 || lost.error <= most * lost.signal).then_some((codes, lost))
    }

    /// Has what is so far below a sum, and was sent once, asked for at once. Cost: each chunk is looked at once.
    fn judge(&mut self, now: Duration, summed: u64) {
        self.judged = self.judged.max(self.had);
        while self.judged + LATER <= summed {
            let mut hole = self.flight(self.judged);
            if hole.made && !hole.done && hole.attempts == 1 {
                hole.due = now;
                self.set(self.judged, hole);
                self.due = now;
            }
            self.judged += 1;
        }
    }

    /// What was sent, taken and dropped.
    pub fn counters(&self) -> WorkerCounters {
        self.counters
    }
}
