//! The worker: a host's side. Segments in; packets out and in; sums written, and at the end of a session the reason why.

use crate::Form;
use crate::packet::{HEADER_BYTES, Header, Key, Kind, Sealed, seal};
use crate::round_trip::RoundTrip;
use std::collections::VecDeque;
use std::time::Duration;

/// How far above a chunk a sum is after which that chunk is taken for lost: what is less far out of order was overtaken.
const LATER: u64 = 3;
/// Windows between the lowest chunk without a sum and the highest that is sent. What is lost holds up nothing but itself for as long as
/// it takes to ask for it and to send it again.
pub const SPAN: u32 = 4;
/// Questions over which losses are judged.
const JUDGED: u32 = 64;

/// The memory behind segments; offsets and lengths in elements of the tensor, of which `bytes` hold the form's.
pub trait Tensors {
    /// Copies this host's part of `elements` elements from `offset` of a segment to `bytes`.
    fn read(&self, segment: u64, offset: u64, elements: usize, bytes: &mut [u8]);
    /// Takes their sum. It is called once for each, in any order, and never after the session's end.
    fn write(&mut self, segment: u64, offset: u64, elements: usize, bytes: &[u8]);
}

/// What a worker is told when the communicator forms.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// The communicator.
    pub communicator: u64,
    /// Which of the aggregator's workers this is.
    pub worker: u16,
    /// The key of this worker.
    pub key: Key,
    /// What payloads are.
    pub form: Form,
    /// Elements of a chunk.
    pub elements: u32,
    /// Most chunks that are sent and have no sum yet, whatever the aggregator grants.
    pub window: u16,
    /// Most segments that are submitted and not done.
    pub segments: usize,
    /// Hosts of the whole communicator: a sum of fewer is taken only if `partial`.
    pub hosts: u16,
    /// Whether sums may leave hosts out.
    pub partial: bool,
    /// For how long questions may go unanswered.
    pub patience: Duration,
    /// The shortest time after which a chunk is sent again.
    pub retry_least: Duration,
    /// The longest; well below the patience.
    pub retry_most: Duration,
    /// Unanswered questions of a thousand above which a session is left: 900 is one answer in ten.
    pub loss_most: u32,
}

/// Why a session has ended. Agreement among the workers follows ([`crate::Leader`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The aggregator does not answer.
    Silent,
    /// It has no such session: it restarted, its parent is gone, or workers' lengths differ.
    Lost,
    /// Too many packets are lost on the way.
    Losses,
}

/// What a worker tells its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// All sums of a segment have been written; of each, at least this many hosts' parts are in it.
    Done {
        /// The segment; they are done in order.
        segment: u64,
        /// Fewest hosts in one of its sums.
        hosts: u16,
    },
    /// The session has ended here: nothing is sent or written any more.
    Ended(Reason),
}

/// What was sent, taken, and dropped. All are packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerCounters {
    /// Sent, of all kinds.
    pub sent: u64,
    /// Of these, parts that had been sent before.
    pub sent_again: u64,
    /// Sums taken.
    pub sums: u64,
    /// Sums that were there already, or were not asked for.
    pub duplicates: u64,
    /// Of another session or incarnation.
    pub stale: u64,
    /// Of no shape, another communicator, worker or direction.
    pub strange: u64,
    /// Wrong tags.
    pub tag: u64,
    /// Sums of a wrong length, or of too few hosts.
    pub wrong: u64,
}

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

#[derive(Clone, Copy, Default)]
struct Flight {
    segment: u64,
    offset: u64,
    elements: usize,
    sent: Duration,
    due: Duration,
    attempts: u32,
    /// What the aggregator last said of this part: that it is in, or that it is not.
    held: Option<bool>,
    /// It was asked since the part was sent.
    asked: bool,
    done: bool,
}

struct Work {
    segment: u64,
    elements: u64,
    /// Elements of which chunks have been made.
    made: u64,
    /// Elements whose sums are there.
    summed: u64,
    hosts: u16,
}

/// A worker.
pub struct Worker {
    config: WorkerConfig,
    state: State,
    session: u64,
    work: VecDeque<Work>,
    flights: Vec<Flight>,
    /// All sums below this chunk are there.
    had: u64,
    /// The next chunk.
    next: u64,
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
        Self {
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
        (self.had, self.next, self.window, self.told) = (0, 0, 1, 0);
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
        let fits = running && follows && elements > 0 && self.work.len() < self.config.segments;
        if fits {
            self.work.push_back(Work { segment, elements, made: 0, summed: 0, hosts: u16::MAX });
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
        work.map(|work| Event::Done { segment: work.segment, hosts: work.hosts })
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
                if self.make() {
                    return self.part(now, incarnation, self.next - 1, tensors, packet);
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
            if !flight.done && flight.due <= now {
                return Some(chunk);
            }
            if !flight.done {
                least = least.min(flight.due);
            }
        }
        self.due = least;
        None
    }

    /// Makes the next chunk, if the window has room and there is work.
    fn make(&mut self) -> bool {
        let most = self.window.min(self.flights.len() as u64);
        let in_flight = self.open < u64::from(self.config.window.max(1));
        in_flight && self.next < self.had + most && self.make_any()
    }

    fn make_any(&mut self) -> bool {
        let Some(work) = self.work.iter_mut().find(|work| work.made < work.elements) else { return false };
        let elements = (work.elements - work.made).min(u64::from(self.config.elements));
        let flight = Flight {
            segment: work.segment,
            offset: work.made,
            elements: elements as usize,
            ..Flight::default()
        };
        work.made += elements;
        self.set(self.next, flight);
        self.next += 1;
        self.open += 1;
        true
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
        let bytes = self.config.form.part_bytes(flight.elements)?;
        let packet = packet.get_mut(..HEADER_BYTES + bytes)?;
        let payload = packet.get_mut(HEADER_BYTES..)?;
        tensors.read(flight.segment, flight.offset, flight.elements, payload);
        (flight.sent, flight.held, flight.asked) = (now, None, false);
        flight.due = now + self.round_trip.retry(flight.attempts);
        flight.attempts += 1;
        self.set(chunk, flight);
        self.due = self.due.min(flight.due);
        self.seal(Kind::Contribution, incarnation, chunk, 0, packet);
        Some(HEADER_BYTES + bytes)
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
        if flight.done {
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
        while few && self.next <= chunk && chunk < self.had + self.flights.len() as u64 && self.make_any() {
            self.set(self.next - 1, Flight { due: now, ..self.flight(self.next - 1) });
            self.due = now;
        }
        if chunk < self.had || chunk >= self.next || self.flight(chunk).done {
            self.counters.duplicates += 1;
            return;
        }
        let mut flight = self.flight(chunk);
        if self.config.form.sum_bytes(flight.elements) != Some(payload.len()) {
            self.counters.wrong += 1;
            return;
        }
        let front = self.work.front().map_or(0, |work| work.segment);
        let at = flight.segment.checked_sub(front).and_then(|at| usize::try_from(at).ok());
        let Some(work) = at.and_then(|at| self.work.get_mut(at)) else { return };
        tensors.write(flight.segment, flight.offset, flight.elements, payload);
        work.summed += flight.elements as u64;
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
            self.had += 1;
        }
        self.judge(now, chunk);
    }

    /// Has what is so far below a sum, and was sent once, asked for at once. Cost: each chunk is looked at once.
    fn judge(&mut self, now: Duration, summed: u64) {
        self.judged = self.judged.max(self.had);
        while self.judged + LATER <= summed {
            let mut hole = self.flight(self.judged);
            if !hole.done && hole.attempts == 1 {
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
