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
use crate::channel::{Channel, Restored, Segment};
use crate::communicator::{Action, Coded, Communicator};
use crate::epoch::Epoch;
use crate::message::{Control, Header, Kind, Message};
use crate::operation::Operation;
use harmonaize_abi::{Collective, Dtype, ReduceOp, Signature};
use harmonaize_aggregator::{Agreement, Audience, Form, Leader, Way};
use harmonaize_plan::{Participant, Retention};
use std::time::Duration;

/// Which operations an epoch's aggregator sums. All participants are its workers, each by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aggregation {
    /// Of these elements with this reduction, or f32 in codes.
    pub form: Form,
    /// Whether averages are summed, too, where sums are: their sum is divided here.
    pub averages: bool,
    /// Whether elements of other types, and other reductions, go this way too, of each type what an aggregator adds as it is.
    pub others: bool,
    /// AllReduces of at least so many bytes.
    pub least_bytes: u64,
    /// Whether small operations, of which inputs are copied elsewhere, are done as soon as their sum is here: sums of tensors, broadcasts
    /// and barriers.
    pub at_once: bool,
    /// Broadcasts of at least, and at most, so many bytes; the small ones only at once.
    pub broadcasts: Option<[u64; 2]>,
    /// Barriers, at once.
    pub barriers: bool,
    /// For how long hosts sum after a session with the aggregator failed; twice as long each time,
    pub hold: Nanos,
    /// up to this.
    pub most_hold: Nanos,
}

impl Aggregation {
    /// What an AllReduce like this is to the aggregator, if it is anything: of the epoch's form, or else elements of its own.
    pub fn form_of(&self, signature: &Signature) -> Option<Form> {
        let Signature { dtype, reduce, .. } = *signature;
        let op = if reduce == ReduceOp::Average && self.averages { ReduceOp::Sum } else { reduce };
        let own = match self.form {
            Form::Tensor { dtype: own, op: summed } => (dtype, op) == (own, summed),
            Form::Shared { .. } => (dtype, op) == (Dtype::F32, ReduceOp::Sum),
        };
        let other = Form::Tensor { dtype, op };
        if own { Some(self.form) } else { Some(other).filter(|form| self.others && form.is_possible()) }
    }
}

/// What aggregation came to in an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aggregated {
    /// Segments that the aggregator summed and that were not undone.
    pub segments: u64,
    /// Segments that it was to sum and the hosts did.
    pub again: u64,
    /// Fewest participants whose parts are in a sum: fewer than all only where partial sums are allowed.
    pub least: u16,
}

impl Aggregated {
    /// Fewest participants whose parts are in a sum, if that is fewer than all; else 0.
    pub fn short_of(&self, participants: u32) -> u16 {
        if u32::from(self.least) < participants { self.least } else { 0 }
    }
}

/// By whom a segment is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Hosts,
    /// As the session's so manieth.
    Aggregator(u64),
    /// Nobody yet: it is being agreed on.
    Unknown,
}

/// Aggregation in an epoch at this participant.
#[derive(Debug)]
pub(crate) struct State {
    rules: Aggregation,
    /// At the leading participant, once it has begun.
    leader: Option<Leader>,
    /// The leader is wanted.
    asked: bool,
    /// The newest session that was heard of.
    session: u64,
    /// The next session is being agreed on.
    stopped: bool,
    way: Way,
    /// The first segment that goes the way.
    from: u64,
    /// Segments of the session so far.
    next: u64,
    /// In which session, and who has the sums of segments below which.
    held: Option<(u64, u64, u16)>,
}

impl State {
    pub(crate) fn new(rules: Aggregation) -> Self {
        let way = Way::Hosts;
        Self {
            rules,
            leader: None,
            asked: false,
            session: 0,
            stopped: true,
            way,
            from: 0,
            next: 0,
            held: None,
        }
    }

    /// Whether operations like this are aggregated. Depends only on what all participants share.
    pub(crate) fn takes(&self, signature: &Signature) -> bool {
        let Aggregation { least_bytes, broadcasts, barriers, .. } = self.rules;
        let bytes = signature.count.saturating_mul(signature.dtype.size() as u64);
        match signature.collective {
            Collective::AllReduce => bytes >= least_bytes.max(1) && self.rules.form_of(signature).is_some(),
            Collective::Broadcast => {
                broadcasts.is_some_and(|[least, most]| (least.max(1)..=most).contains(&bytes))
            }
            Collective::Barrier => barriers && self.rules.at_once,
            Collective::AllToAll | Collective::AllGather | Collective::ReduceScatter => false,
        }
    }

    /// Whether an operation like this, if it is small, is done as soon as its sum is here.
    fn at_once(&self, signature: &Signature) -> bool {
        let sums = matches!(self.rules.form_of(signature), Some(Form::Tensor { op: ReduceOp::Sum, .. }));
        self.rules.at_once && (sums || signature.collective != Collective::AllReduce)
    }

    /// Bytes that a participant sends of so many elements; `root`: of a broadcast, whether it is its own.
    pub(crate) fn bytes(&self, signature: &Signature, elements: u64, root: bool) -> u64 {
        match signature.collective {
            Collective::Broadcast if root => elements.saturating_mul(signature.dtype.size() as u64),
            Collective::AllReduce => self.rules.form_of(signature).map_or(0, |form| form.sent(elements)),
            _ => 0,
        }
    }

    /// Whether what is done must stay as it was told.
    fn frozen(&self) -> bool {
        self.stopped && self.way == Way::Aggregator
    }

    fn by(&self, segment: u64) -> By {
        match self.way {
            _ if self.stopped => By::Unknown,
            Way::Aggregator if segment >= self.from => By::Aggregator(self.next),
            _ => By::Hosts,
        }
    }
}

impl Epoch {
    /// Whether operations like this may go by the epoch's aggregator. Where inputs are only copied aside they may not, for their copy is
    /// gone once the operation is, unless their sum is kept.
    pub(crate) fn aggregates(&self, signature: &Signature, retention: Retention) -> bool {
        let state = self.aggregation.as_ref().filter(|state| state.takes(signature));
        state.is_some_and(|state| retention != Retention::CopyInputs || state.at_once(signature))
    }

    /// Whether inputs of an operation like this, which usually are copied, must be kept because it may have to be begun again.
    pub(crate) fn needs_inputs(&self, signature: &Signature) -> bool {
        let state = self.aggregation.as_ref().filter(|state| state.takes(signature));
        state.is_some_and(|state| !state.at_once(signature))
    }
}

impl Communicator {
    /// By whom the next segment, one of an operation that may be aggregated, is run in an epoch. A segment for the aggregator counts
    /// as begun.
    pub(crate) fn run_by(&mut self, now: Nanos, epoch: u32, segment: u64) -> By {
        let Some(state) = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_mut()) else {
            return By::Hosts;
        };
        let by = state.by(segment);
        if let By::Aggregator(_) = by {
            state.next += 1;
        }
        if by == By::Unknown && state.session == 0 && !std::mem::replace(&mut state.asked, true) {
            self.ask(now, epoch, 0);
        }
        by
    }

    /// Tells the leader that a session is over here; number 0 that one is wanted.
    fn ask(&mut self, now: Nanos, epoch: u32, session: u64) {
        let ask = Agreement::Ask { session };
        if self.leader() == self.me {
            self.lead_aggregation(now, epoch, self.me, ask);
        } else {
            self.tell_agreement(self.leader(), epoch, ask, 0);
        }
    }

    fn tell_agreement(&mut self, to: Participant, epoch: u32, agreement: Agreement, generation: u8) {
        let mut header = Header::new(Kind::Control, self.current.number());
        self.acknowledgements.tell(to, &mut header);
        let control = Control::Aggregation { epoch, generation, agreement };
        self.outbox.push_back((to, Some(epoch), Message { header, control: Some(Box::new(control)) }));
    }

    /// The leader's part: a message to it, its own among them.
    fn lead_aggregation(&mut self, now: Nanos, epoch: u32, from: Participant, agreement: Agreement) {
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
                state.asked = true;
                return if current {
                    self.begin_to_lead(now, epoch, participants)
                };
            }
            // Who asks for a first session has one.
            (Some(_), Agreement::Ask { session: 0 }) | (None, _) => return,
            (Some(leader), message) => leader.receive(since(now), from.0 as u16, message),
        };
        self.announce(now, epoch, said);
    }

    fn begin_to_lead(&mut self, now: Nanos, epoch: u32, participants: u32) {
        let Some(state) = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_mut()) else { return };
        let Aggregation { hold, most_hold, .. } = state.rules;
        let mut leader = Leader::new(participants as u16, 1, since(hold), since(most_hold));
        let said = leader.restart();
        state.leader = Some(leader);
        self.announce(now, epoch, Some(said));
    }

    /// Sends all, itself too, what the leader says.
    fn announce(&mut self, now: Nanos, epoch: u32, said: Option<(Audience, Agreement)>) {
        let Some((_, agreement)) = said else { return };
        let mut generation = self.acknowledgements.generation();
        let state = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_ref());
        let undoes = state.filter(|state| state.frozen());
        if let (Agreement::Resume { session, from, .. }, Some(state)) = (agreement, undoes) {
            let leader = state.leader.as_ref().filter(|_| state.rules.at_once);
            if let Some(held) = leader.and_then(|leader| leader.held(session, from)) {
                self.tell_all_of(now, epoch, held, generation);
            }
            generation = generation.wrapping_add(1);
        }
        self.tell_all_of(now, epoch, agreement, generation);
    }

    fn tell_all_of(&mut self, now: Nanos, epoch: u32, agreement: Agreement, generation: u8) {
        for peer in (0..self.group.participants()).map(Participant) {
            if peer != self.me {
                self.tell_agreement(peer, epoch, agreement, generation);
            }
        }
        self.follow(now, epoch, agreement, generation);
    }

    /// A message of another participant. False if it may not say this.
    pub(crate) fn agree(
        &mut self,
        now: Nanos,
        from: Participant,
        epoch: u32,
        agreement: Agreement,
        generation: u8,
    ) -> bool {
        match agreement {
            Agreement::Ask { .. } | Agreement::Stopped { .. } => {
                self.lead_aggregation(now, epoch, from, agreement);
                self.leader() == self.me
            }
            Agreement::Stop { .. } | Agreement::Held { .. } | Agreement::Resume { .. } => {
                if from == self.leader() {
                    self.follow(now, epoch, agreement, generation);
                }
                from == self.leader()
            }
            Agreement::Whole { .. } | Agreement::Settled { .. } => false,
        }
    }

    /// What the leader says, at each participant.
    fn follow(&mut self, now: Nanos, epoch: u32, agreement: Agreement, generation: u8) {
        match agreement {
            Agreement::Stop { session } => self.stop_session(now, epoch, session),
            Agreement::Held { session, below, worker } => {
                if let Some(state) = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_mut()) {
                    state.held = Some((session, below, worker));
                }
            }
            Agreement::Resume { session, from, way } => {
                self.resume_session(epoch, session, from, way, generation);
            }
            _ => {}
        }
    }

    fn stop_session(&mut self, now: Nanos, epoch: u32, session: u64) {
        let (done, begun, everyone) = (self.done, self.begun, self.acknowledgements.everyone());
        let Some(state) = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_mut()) else { return };
        if session <= state.session {
            return;
        }
        (state.session, state.stopped) = (session, true);
        let (whole, settled) = match state.way {
            Way::Aggregator => {
                self.actions.push_back(Action::Quit { epoch });
                (done, everyone)
            }
            // Nothing that hosts have begun is undone.
            Way::Hosts => (begun, begun),
        };
        let stopped = Agreement::Stopped { session, whole, settled };
        if self.leader() == self.me {
            self.lead_aggregation(now, epoch, self.me, stopped);
        } else {
            self.tell_agreement(self.leader(), epoch, stopped, 0);
        }
    }

    fn resume_session(&mut self, epoch: u32, session: u64, from: u64, way: Way, generation: u8) {
        let (me, whole) = (self.me, self.done);
        if generation != self.acknowledgements.generation() {
            self.done = self.done.min(from);
            self.acknowledgements.undo(from, generation);
        }
        let Some(state) = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_mut()) else { return };
        if session != state.session || !state.stopped {
            return;
        }
        (state.stopped, state.way, state.from, state.next) = (false, way, from, 0);
        let held = state.held.take().filter(|(of, ..)| *of == session);
        for channel in &mut self.channels {
            let undone = |segment: &&Segment| segment.epoch == epoch && segment.number >= from;
            let Some(segment) = channel.segment().filter(undone) else { continue };
            let (operation, whole) = (segment.operation, segment.number < whole);
            let giver = held.filter(|(_, below, _)| segment.number < *below);
            let giver = giver.map(|(_, _, worker)| u32::from(worker) == me.0);
            let restored = match segment.signature.collective {
                _ if segment.retention != Retention::CopyInputs => None,
                Collective::AllReduce => giver.map(|gives| Restored { gives, whole }),
                // The root has what it gave, or still its input.
                Collective::Broadcast => whole.then_some(Restored { gives: true, whole }),
                Collective::Barrier
                | Collective::AllToAll
                | Collective::AllGather
                | Collective::ReduceScatter => None,
            };
            if channel.by_hosts(restored)
                && let Some(operation) = self.operations.get_mut(operation)
            {
                operation.again += 1;
            }
        }
        if way == Way::Aggregator {
            self.actions.push_back(Action::Join { epoch, session });
        }
    }

    /// The segment that is `index` of an epoch's session, and its channel.
    pub fn aggregated_as(&self, epoch: u32, index: u64) -> Option<(u16, &Segment)> {
        let segments = (0..).zip(&self.channels).filter_map(|(at, channel)| Some((at, channel.segment()?)));
        let mut this = segments.filter(|(_, s)| s.epoch == epoch && s.aggregated == Some(index));
        this.next()
    }

    /// All sums of a session's segment `index` have been written, each of at least `hosts` participants' parts; of codes, with what
    /// they lost, which stays in the receipt if hosts do the segment again.
    pub fn aggregated(&mut self, now: Nanos, epoch: u32, index: u64, hosts: u16, coded: Option<&Coded>) {
        let ended = self.failure.is_some();
        let state = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_ref());
        if ended || state.is_none_or(|state| state.stopped) {
            return;
        }
        let summed = self.channels.iter_mut().find_map(|channel| channel.sum(epoch, index, hosts));
        if let Some((operation, coded)) = summed.zip(coded) {
            self.coded(operation, coded);
        }
        self.moved(now);
    }

    /// What aggregation came to in an operation so far. Sums that may still be undone count as long as they are not: so all participants
    /// say the same of one that is complete.
    pub(crate) fn aggregated_in(&self, operation: &Operation) -> Option<Aggregated> {
        let under_way = self
            .channels
            .iter()
            .filter(|channel| channel.segment().is_some_and(|segment| segment.operation == operation.number));
        let least = under_way.map(Channel::hosts).fold(operation.least, u16::min);
        let Operation { given, again, .. } = *operation;
        (given > 0).then_some(Aggregated { segments: given.saturating_sub(again), again, least })
    }

    /// The session has ended here; or the aggregator does not answer an [`Action::Knock`].
    pub fn aggregation_ended(&mut self, now: Nanos, epoch: u32) {
        let state = self.epoch(epoch).and_then(|epoch| epoch.aggregation.as_ref());
        let open = state.filter(|state| !state.stopped && state.way == Way::Aggregator);
        match open.map(|state| state.session) {
            Some(session) if self.failure.is_none() => self.ask(now, epoch, session),
            _ => self.knocked(now, epoch, false),
        }
    }

    /// The aggregator answers an [`Action::Knock`].
    pub fn aggregation_answers(&mut self, now: Nanos, epoch: u32) {
        self.knocked(now, epoch, true);
    }

    fn knocked(&mut self, now: Nanos, epoch: u32, there: bool) {
        if self.current.number() != epoch || self.failure.is_some() {
            return;
        }
        let leader = self.current.aggregation.as_mut().and_then(|state| state.leader.as_mut());
        let said = leader.and_then(|leader| leader.knocked(since(now), there));
        self.announce(now, epoch, said);
    }

    /// Whether what is done here must not grow, because a leader counts with it.
    pub(crate) fn frozen(&self) -> bool {
        let next = self.next.as_ref().map(|switch| &switch.epoch);
        let mut states =
            [Some(&self.current), next].into_iter().flatten().filter_map(|epoch| epoch.aggregation.as_ref());
        states.any(State::frozen)
    }

    /// When hosts have summed for long enough; while there is something to sum.
    pub(crate) fn aggregation_due(&self) -> Option<Nanos> {
        self.operations.oldest()?;
        let due = self.current.aggregation.as_ref()?.leader.as_ref()?.poll_timeout()?;
        Some(Nanos(u64::try_from(due.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// The leader's timer, and a leader that was wanted before its epoch was the current one.
    pub(crate) fn attend_aggregation(&mut self, now: Nanos) {
        let (epoch, participants) = (self.current.number(), self.group.participants());
        if self.leader() != self.me || self.failure.is_some() {
            return;
        }
        let Some(state) = self.current.aggregation.as_mut() else { return };
        match &mut state.leader {
            Some(leader) => {
                let session = leader.poll(since(now));
                self.actions.extend(session.map(|session| Action::Knock { epoch, session }));
            }
            None if state.asked => self.begin_to_lead(now, epoch, participants),
            None => {}
        }
    }
}

fn since(now: Nanos) -> Duration {
    Duration::from_nanos(now.0)
}
