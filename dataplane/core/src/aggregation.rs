//! Segments that an aggregator on the way sums, and the hosts' own algorithm in its place when it does not.
//!
//! What the workers agree on when a session ends is `harmonaize_aggregator`'s; here are the messages that carry it, and what it does to
//! segments. What is *whole* is what is done here, *settled* what everybody has acknowledged, so that no further messages tell of
//! either. A segment that is aggregated keeps its channel until everybody has acknowledged it: until then it can be begun again
//! from its input, and its output, where that is the input, is held in staging.
//!
//! From the aggregator to the hosts: all stop, say what is done, and run what is not done everywhere again by their program
//! (`docs/protocol.md` says why nothing is lost or counted twice). Done segments can be undone by that, so acknowledgements have a
//! generation, which the leader counts. From the hosts to the aggregator nothing is undone: each says how far it has begun and begins
//! nothing more, and the aggregator has what follows. An epoch begins like this, so that all know from where on.
//!
//! Small operations are done at once where the rules say so: the sum goes from staging to the outputs as soon as it is done here, and stays in
//! staging until everybody has it. Begun again by the hosts, such a segment has the sum of one who has it for an input, and nothing of
//! the others, so that all end with the same bits; who has it touches no tensor any more.

use crate::Nanos;
use crate::channel::{Resume, Segment};
use crate::communicator::{Action, CodingReport, Communicator};
use crate::epoch::Epoch;
use crate::message::{Control, Header, Kind, Message};
use crate::operation::Operation;
use harmonaize_abi::{Collective, Dtype, ReduceOp, Signature};
use harmonaize_aggregator::{Agreement, Audience, Leader, PayloadFormat, Summation};
use harmonaize_plan::{Participant, Retention};
use std::time::Duration;

/// Which operations an epoch's aggregator sums. All participants are its workers, each by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aggregation {
    /// Of these elements with this reduction, or f32 in codes.
    pub format: PayloadFormat,
    /// AllReduces of at least so many bytes.
    pub min_bytes: u64,
    /// Whether small operations, of which inputs are copied elsewhere, are done as soon as their sum is here: sums of tensors, broadcasts
    /// and barriers.
    pub eager: bool,
    /// Broadcasts of at least, and at most, so many bytes; the small ones only at once.
    pub broadcast_bytes: Option<[u64; 2]>,
    /// Barriers, at once.
    pub barriers: bool,
    /// For how long hosts sum after a session with the aggregator failed; twice as long each time,
    pub backoff: Nanos,
    /// up to this.
    pub max_backoff: Nanos,
}

impl Aggregation {
    /// What an AllReduce like this is to the aggregator: elements of their own type and reduction, or, in an epoch of codes,
    /// sums of f32 alone. An average is a sum that is divided here.
    pub fn format_of(&self, signature: &Signature) -> Option<PayloadFormat> {
        let Signature { dtype, reduce, .. } = *signature;
        let op = if reduce == ReduceOp::Average { ReduceOp::Sum } else { reduce };
        match self.format {
            PayloadFormat::Tensor { .. } => {
                Some(PayloadFormat::Tensor { dtype, op }).filter(|form| form.is_supported())
            }
            PayloadFormat::Shared { .. } => {
                Some(self.format).filter(|_| (dtype, op) == (Dtype::F32, ReduceOp::Sum))
            }
        }
    }
}

/// What aggregation came to in an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AggregationReport {
    /// Segments that the aggregator summed and that were not undone.
    pub segments: u64,
    /// Segments that it was to sum and the hosts did.
    pub fallback_segments: u64,
}

/// By whom a segment is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Executor {
    Hosts,
    /// As the session's so manieth.
    Aggregator(u64),
    /// Nobody yet: it is being agreed on.
    Unknown,
}

/// Aggregation in an epoch at this participant.
#[derive(Debug)]
pub(crate) struct AggregationState {
    config: Aggregation,
    /// At the leading participant, once it has begun.
    leader: Option<Leader>,
    /// The leader is wanted.
    leader_needed: bool,
    /// The newest session that was heard of.
    session: u64,
    /// The next session is being agreed on.
    stopped: bool,
    summation: Summation,
    /// The first segment that goes the way.
    from_segment: u64,
    /// Segments of the session so far.
    next_index: u64,
    /// In which session, and who has the sums of segments below which.
    sum_holder: Option<(u64, u64, u16)>,
}

impl AggregationState {
    pub(crate) fn new(config: Aggregation) -> Self {
        let summation = Summation::Hosts;
        Self {
            config,
            leader: None,
            leader_needed: false,
            session: 0,
            stopped: true,
            summation,
            from_segment: 0,
            next_index: 0,
            sum_holder: None,
        }
    }

    /// Whether operations like this are aggregated. Depends only on what all participants share.
    pub(crate) fn supports(&self, signature: &Signature) -> bool {
        let Aggregation { min_bytes: least_bytes, broadcast_bytes: broadcasts, barriers, .. } = self.config;
        let bytes = signature.count.saturating_mul(signature.dtype.size() as u64);
        match signature.collective {
            Collective::AllReduce => {
                bytes >= least_bytes.max(1) && self.config.format_of(signature).is_some()
            }
            Collective::Broadcast => {
                broadcasts.is_some_and(|[least, most]| (least.max(1)..=most).contains(&bytes))
            }
            Collective::Barrier => barriers && self.config.eager,
            Collective::AllToAll | Collective::AllGather | Collective::ReduceScatter => false,
        }
    }

    /// Whether an operation like this, if it is small, is done as soon as its sum is here.
    fn is_eager(&self, signature: &Signature) -> bool {
        let sums =
            matches!(self.config.format_of(signature), Some(PayloadFormat::Tensor { op: ReduceOp::Sum, .. }));
        self.config.eager && (sums || signature.collective != Collective::AllReduce)
    }

    /// Bytes that a participant sends of so many elements; `root`: of a broadcast, whether it is its own.
    pub(crate) fn bytes(&self, signature: &Signature, elements: u64, root: bool) -> u64 {
        match signature.collective {
            Collective::Broadcast if root => elements.saturating_mul(signature.dtype.size() as u64),
            Collective::AllReduce => self.config.format_of(signature).map_or(0, |form| form.sent(elements)),
            _ => 0,
        }
    }

    /// Whether what is done must stay as it was told.
    fn is_frozen(&self) -> bool {
        self.stopped && self.summation == Summation::Aggregator
    }

    fn executor(&self, segment: u64) -> Executor {
        match self.summation {
            _ if self.stopped => Executor::Unknown,
            Summation::Aggregator if segment >= self.from_segment => Executor::Aggregator(self.next_index),
            _ => Executor::Hosts,
        }
    }
}

impl Epoch {
    /// Whether operations like this may go by the epoch's aggregator. Where inputs are only copied aside they may not, for their copy is
    /// gone once the operation is, unless their sum is kept.
    pub(crate) fn aggregates(&self, signature: &Signature, retention: Retention) -> bool {
        let state = self.aggregation.as_ref().filter(|state| state.supports(signature));
        state.is_some_and(|state| retention != Retention::CopyInputs || state.is_eager(signature))
    }

    /// Whether inputs of an operation like this, which usually are copied, must be kept because it may have to be begun again.
    pub(crate) fn needs_inputs(&self, signature: &Signature) -> bool {
        let state = self.aggregation.as_ref().filter(|state| state.supports(signature));
        state.is_some_and(|state| !state.is_eager(signature))
    }
}

impl Communicator {
    /// By whom the next segment, one of an operation that may be aggregated, is run in an epoch. A segment for the aggregator counts
    /// as begun.
    pub(crate) fn assign_executor(&mut self, now: Nanos, epoch: u32, segment: u64) -> Executor {
        let Some(state) = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_mut()) else {
            return Executor::Hosts;
        };
        let by = state.executor(segment);
        if let Executor::Aggregator(_) = by {
            state.next_index += 1;
        }
        if by == Executor::Unknown && state.session == 0 && !std::mem::replace(&mut state.leader_needed, true)
        {
            self.request_session(now, epoch, 0);
        }
        by
    }

    /// Tells the leader that a session is over here; number 0 that one is wanted.
    fn request_session(&mut self, now: Nanos, epoch: u32, session: u64) {
        let ask = Agreement::Ask { session };
        if self.leader() == self.me {
            self.handle_as_leader(now, epoch, self.me, ask);
        } else {
            self.send_agreement(self.leader(), epoch, ask, 0);
        }
    }

    fn send_agreement(&mut self, to: Participant, epoch: u32, agreement: Agreement, generation: u8) {
        let mut header = Header::new(Kind::Control, self.current.number());
        self.acknowledgements.fill_header(to, &mut header);
        let control = Control::Aggregation { epoch, generation, agreement };
        self.outbox.push_back((to, Some(epoch), Message { header, control: Some(Box::new(control)) }));
    }

    /// The leader's part: a message to it, its own among them.
    fn handle_as_leader(&mut self, now: Nanos, epoch: u32, from: Participant, agreement: Agreement) {
        // What is over needs no agreement.
        self.retire_epoch();
        let participants = self.group.participants();
        let leads = self.leader() == self.me;
        // One epoch after another: nothing of the one before can be undone any more.
        let current = self.current.number() == epoch;
        let Some(state) = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_mut()).filter(|_| leads)
        else {
            return;
        };
        let said = match (&mut state.leader, agreement) {
            (None, Agreement::Ask { .. }) => {
                state.leader_needed = true;
                return if current {
                    self.start_leading(now, epoch, participants)
                };
            }
            // Who asks for a first session has one.
            (Some(_), Agreement::Ask { session: 0 }) | (None, _) => return,
            (Some(leader), message) => leader.receive(to_duration(now), from.0 as u16, message),
        };
        self.announce(now, epoch, said);
    }

    fn start_leading(&mut self, now: Nanos, epoch: u32, participants: u32) {
        let Some(state) = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_mut()) else { return };
        let Aggregation { backoff: hold, max_backoff: most_hold, .. } = state.config;
        let mut leader = Leader::new(participants as u16, 1, to_duration(hold), to_duration(most_hold));
        let said = leader.restart();
        state.leader = Some(leader);
        self.announce(now, epoch, Some(said));
    }

    /// Sends all, itself too, what the leader says.
    fn announce(&mut self, now: Nanos, epoch: u32, said: Option<(Audience, Agreement)>) {
        let Some((_, agreement)) = said else { return };
        let mut generation = self.acknowledgements.generation();
        let state = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_ref());
        let undoes = state.filter(|state| state.is_frozen());
        if let (Agreement::Resume { session, from, .. }, Some(state)) = (agreement, undoes) {
            let leader = state.leader.as_ref().filter(|_| state.config.eager);
            if let Some(held) = leader.and_then(|leader| leader.sum_holder(session, from)) {
                self.broadcast_agreement(now, epoch, held, generation);
            }
            generation = generation.wrapping_add(1);
        }
        self.broadcast_agreement(now, epoch, agreement, generation);
    }

    fn broadcast_agreement(&mut self, now: Nanos, epoch: u32, agreement: Agreement, generation: u8) {
        for peer in (0..self.group.participants()).map(Participant) {
            if peer != self.me {
                self.send_agreement(peer, epoch, agreement, generation);
            }
        }
        self.follow_leader(now, epoch, agreement, generation);
    }

    /// A message of another participant. False if it may not say this.
    pub(crate) fn handle_agreement(
        &mut self,
        now: Nanos,
        from: Participant,
        epoch: u32,
        agreement: Agreement,
        generation: u8,
    ) -> bool {
        match agreement {
            Agreement::Ask { .. } | Agreement::Stopped { .. } => {
                self.handle_as_leader(now, epoch, from, agreement);
                self.leader() == self.me
            }
            Agreement::Stop { .. } | Agreement::HaveSums { .. } | Agreement::Resume { .. } => {
                if from == self.leader() {
                    self.follow_leader(now, epoch, agreement, generation);
                }
                from == self.leader()
            }
            Agreement::Done { .. } | Agreement::DoneEverywhere { .. } => false,
        }
    }

    /// What the leader says, at each participant.
    fn follow_leader(&mut self, now: Nanos, epoch: u32, agreement: Agreement, generation: u8) {
        match agreement {
            Agreement::Stop { session } => self.stop_session(now, epoch, session),
            Agreement::HaveSums { session, below, worker } => {
                if let Some(state) = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_mut()) {
                    state.sum_holder = Some((session, below, worker));
                }
            }
            Agreement::Resume { session, from, summation: way } => {
                self.resume_session(epoch, session, from, way, generation);
            }
            _ => {}
        }
    }

    fn stop_session(&mut self, now: Nanos, epoch: u32, session: u64) {
        let (done, begun, everyone) = (self.done, self.begun, self.acknowledgements.acked_by_all());
        let Some(state) = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_mut()) else { return };
        if session <= state.session {
            return;
        }
        (state.session, state.stopped) = (session, true);
        let (whole, settled) = match state.summation {
            Summation::Aggregator => {
                self.actions.push_back(Action::Leave { epoch });
                (done, everyone)
            }
            // Nothing that hosts have begun is undone.
            Summation::Hosts => (begun, begun),
        };
        let stopped = Agreement::Stopped { session, done: whole, done_everywhere: settled };
        if self.leader() == self.me {
            self.handle_as_leader(now, epoch, self.me, stopped);
        } else {
            self.send_agreement(self.leader(), epoch, stopped, 0);
        }
    }

    fn resume_session(&mut self, epoch: u32, session: u64, from: u64, way: Summation, generation: u8) {
        let (me, whole) = (self.me, self.done);
        if generation != self.acknowledgements.generation() {
            self.done = self.done.min(from);
            self.acknowledgements.undo(from, generation);
        }
        let Some(state) = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_mut()) else { return };
        if session != state.session || !state.stopped {
            return;
        }
        (state.stopped, state.summation, state.from_segment, state.next_index) = (false, way, from, 0);
        let held = state.sum_holder.take().filter(|(of, ..)| *of == session);
        for channel in &mut self.channels {
            let undone = |segment: &&Segment| segment.epoch == epoch && segment.number >= from;
            let Some(segment) = channel.segment().filter(undone) else { continue };
            let (operation, whole) = (segment.operation, segment.number < whole);
            let giver = held.filter(|(_, below, _)| segment.number < *below);
            let giver = giver.map(|(_, _, worker)| u32::from(worker) == me.0);
            let restored = match segment.signature.collective {
                _ if segment.retention != Retention::CopyInputs => None,
                Collective::AllReduce => giver.map(|gives| Resume { source: gives, completed: whole }),
                // The root has what it gave, or still its input.
                Collective::Broadcast => whole.then_some(Resume { source: true, completed: whole }),
                Collective::Barrier
                | Collective::AllToAll
                | Collective::AllGather
                | Collective::ReduceScatter => None,
            };
            if channel.fall_back(restored)
                && let Some(operation) = self.operations.get_mut(operation)
            {
                operation.fallback_segments += 1;
            }
        }
        if way == Summation::Aggregator {
            self.actions.push_back(Action::Join { epoch, session });
        }
    }

    /// The segment that is `index` of an epoch's session, and its channel.
    pub fn aggregated_segment(&self, epoch: u32, index: u64) -> Option<(u16, &Segment)> {
        let segments = (0..).zip(&self.channels).filter_map(|(at, channel)| Some((at, channel.segment()?)));
        let mut this = segments.filter(|(_, s)| s.epoch == epoch && s.aggregated == Some(index));
        this.next()
    }

    /// All sums of a session's segment `index` have been written; of codes, with what they lost, which stays in the receipt if hosts do the
    /// segment again.
    pub fn handle_aggregated(&mut self, now: Nanos, epoch: u32, index: u64, coded: Option<&CodingReport>) {
        let ended = self.failure.is_some();
        let state = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_ref());
        if ended || state.is_none_or(|state| state.stopped) {
            return;
        }
        let summed = self.channels.iter_mut().find_map(|channel| channel.handle_sum(epoch, index));
        if let Some((operation, coded)) = summed.zip(coded) {
            self.handle_coded(operation, coded);
        }
        self.note_progress(now);
    }

    /// What aggregation came to in an operation so far. Sums that may still be undone count as long as they are not: so all participants
    /// say the same of one that is complete.
    pub(crate) fn aggregation_report(&self, operation: &Operation) -> Option<AggregationReport> {
        let Operation { aggregated_segments: given, fallback_segments: again, .. } = *operation;
        (given > 0)
            .then_some(AggregationReport { segments: given.saturating_sub(again), fallback_segments: again })
    }

    /// The session has ended here; or the aggregator does not answer an [`Action::ProbeAggregator`].
    pub fn handle_aggregation_ended(&mut self, now: Nanos, epoch: u32) {
        let state = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_ref());
        let open = state.filter(|state| !state.stopped && state.summation == Summation::Aggregator);
        match open.map(|state| state.session) {
            Some(session) if self.failure.is_none() => self.request_session(now, epoch, session),
            _ => self.handle_probe_outcome(now, epoch, false),
        }
    }

    /// The aggregator answers an [`Action::ProbeAggregator`].
    pub fn handle_aggregator_alive(&mut self, now: Nanos, epoch: u32) {
        self.handle_probe_outcome(now, epoch, true);
    }

    fn handle_probe_outcome(&mut self, now: Nanos, epoch: u32, there: bool) {
        if self.current.number() != epoch || self.failure.is_some() {
            return;
        }
        let leader = self.current.aggregation.as_mut().and_then(|state| state.leader.as_mut());
        let said = leader.and_then(|leader| leader.handle_probe_outcome(to_duration(now), there));
        self.announce(now, epoch, said);
    }

    /// Whether what is done here must not grow, because a leader counts with it.
    pub(crate) fn is_frozen(&self) -> bool {
        let next = self.next.as_ref().map(|switch| &switch.epoch);
        let mut states =
            [Some(&self.current), next].into_iter().flatten().filter_map(|epoch| epoch.aggregation.as_ref());
        states.any(AggregationState::is_frozen)
    }

    /// When hosts have summed for long enough; while there is something to sum.
    pub(crate) fn aggregation_timeout(&self) -> Option<Nanos> {
        self.operations.oldest()?;
        let due = self.current.aggregation.as_ref()?.leader.as_ref()?.poll_timeout()?;
        Some(Nanos(u64::try_from(due.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// The leader's timer, and a leader that was wanted before its epoch was the current one.
    pub(crate) fn handle_aggregation_timeout(&mut self, now: Nanos) {
        let (epoch, participants) = (self.current.number(), self.group.participants());
        if self.leader() != self.me || self.failure.is_some() {
            return;
        }
        let Some(state) = self.current.aggregation.as_mut() else { return };
        match &mut state.leader {
            Some(leader) => {
                let session = leader.poll(to_duration(now));
                self.actions.extend(session.map(|session| Action::ProbeAggregator { epoch, session }));
            }
            None if state.leader_needed => self.start_leading(now, epoch, participants),
            None => {}
        }
    }
}

fn to_duration(now: Nanos) -> Duration {
    Duration::from_nanos(now.0)
}
