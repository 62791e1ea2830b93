//! The communicator: puts calls, streams, channels, acknowledgements, switches and failures together.

mod change;
mod session;

use crate::action::{Action, CodingReport};
use crate::admission::{Admission, Interleaving};
use crate::channel::Segment;
use crate::departures::Departures;
use crate::epoch::EpochPlan;
use crate::epoch_set::EpochSet;
use crate::error::{BadPlan, CoreError};
use crate::failure::Failure;
use crate::inquiries::{self, Answer, Inquiries, Suspect};
use crate::message::{Control, Header, Kind, Payload};
use crate::operation::{Call, CallOutcome, Operations};
use crate::p2p::{P2p, P2pCall};
use crate::report::{self, InFlight, MessageInFlight};
use crate::scheduler::{Begin, Scheduler};
use crate::shared::Shared;
use crate::stream::Arrival;
use harmonaize_abi::{
    ChannelId, Epoch, Nanos, OperationId, Rank, SegmentId, Signature, SlotId, StepId, Token,
};
use harmonaize_aggregator::Agreement;
use harmonaize_plan::{Access, Participant, PlanError};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The parts that a communicator is made from.
#[derive(Clone, Debug)]
pub struct Config {
    /// This participant.
    pub me: Participant,
    /// The first plan.
    pub plan: EpochPlan,
    /// The access to each local rank's memory.
    pub access: Vec<(Rank, Access)>,
    /// How long others have at most to say what they called, before an operation fails for its time-out.
    pub inquiry: Duration,
    /// Operations in flight at once; a call beyond them is refused.
    pub operations: usize,
}

/// A communicator at one participant: a state machine that does no input or output and has no clock.
///
/// The caller drives it by four kinds of methods:
///
/// - `handle_*` tell it of what happened: calls of local ranks, frames, completions, links, departures, decisions of control. Those
///   of one link come in the order in which they happened. After any of them, poll.
/// - [`Communicator::poll`] returns the next [`Action`]. The caller executes each action before it polls again, and polls until
///   there is none. Where it has operations wait, it polls [control messages](Communicator::poll_control) alone.
/// - [`Communicator::poll_timeout`] returns when time alone has consequences. It changes with any other method: ask again after
///   polling. When that time has come, call [`Communicator::handle_timeout`] and poll; too early a call does nothing.
/// - All others only read.
///
/// Time is [`Nanos`] since an instant that the caller chose once. It never goes back from one method to the next, and may stand
/// still. After [`Action::Ended`] the communicator takes no more calls; once [`Communicator::finished`] is true it can be dropped.
#[derive(Debug, Serialize, Deserialize)]
pub struct Communicator {
    shared: Shared,
    admission: Admission,
    scheduler: Scheduler,
    inquiries: Inquiries,
    departures: Departures,
    p2p: P2p,
    /// Whether messages from rank to rank are looked at before segments at the next poll.
    p2p_first: bool,
    /// By participant: the last operation that it is known to have called.
    last_calls: Vec<Option<(OperationId, Signature)>>,
}

impl Communicator {
    /// A communicator whose links are up.
    pub fn new(config: Config) -> Result<Self, CoreError> {
        let Config { me, plan, access, inquiry, operations } = config;
        let group = plan.plan.group().clone();
        let (participants, channels) = (group.participants(), plan.channels);
        let p2p = P2p::new(channels, plan.tuning.chunk_bytes, plan.epoch);
        if group.local(me).is_empty() {
            return Err(BadPlan::NoLocalRank.into());
        }
        let epochs = EpochSet::new(me, plan, access)?;
        let operations = Operations::new(group.local(me), operations);
        Ok(Self {
            shared: Shared::new(me, group, epochs, operations, channels),
            admission: Admission::default(),
            scheduler: Scheduler::new(channels, participants),
            inquiries: Inquiries::new(inquiry),
            departures: Departures::default(),
            p2p,
            p2p_first: false,
            last_calls: vec![None; participants as usize],
        })
    }

    /// A local rank calls an operation. It is number n for a rank that has called n before.
    pub fn handle_call(&mut self, now: Nanos, rank: Rank, call: Call) -> Result<OperationId, CoreError> {
        self.shared.check_open()?;
        let Call { signature, in_place, .. } = call;
        let ranks = self.shared.group.ranks();
        if !fits(&signature, call.counts.as_deref(), ranks) {
            return Err(CoreError::BadCounts);
        }
        if signature.collective.is_rooted() && signature.root.0 >= self.shared.group.ranks() {
            return Err(CoreError::BadRoot(signature.root));
        }
        if in_place && !signature.collective.can_be_in_place() {
            return Err(CoreError::Plan(PlanError::InPlace));
        }
        let number = match self.shared.operations.call(now, rank, ranks, call) {
            CallOutcome::Accepted(number) => number,
            CallOutcome::Full => return Err(CoreError::Full),
            CallOutcome::NotLocal => return Err(CoreError::NotLocal(rank)),
            CallOutcome::Counts { number, count, reported } => {
                let failure = Failure::of_counts(number, signature.collective, ranks, count, reported);
                self.shared.fail(failure.clone());
                return Err(CoreError::Ended(failure));
            }
            CallOutcome::Mismatch { number, other } => {
                let failure = Failure::Mismatch { operation: number, calls: vec![other, (rank, signature)] };
                self.shared.fail(failure.clone());
                return Err(CoreError::Ended(failure));
            }
        };
        let other = (0..).map(Participant).zip(&self.last_calls).find_map(|(peer, last)| {
            last.filter(|(operation, theirs)| *operation == number && *theirs != signature)
                .map(|last| (peer, last.1))
        });
        if let Some((peer, theirs)) = other {
            self.shared.fail_mismatch(number, (rank, signature), peer, theirs);
        }
        self.refuse_impossible();
        Ok(number)
    }

    /// A local rank calls a send or a receive. They may come in any order with collectives, and between two ranks messages arrive in
    /// the order of their sends.
    ///
    /// # Errors
    /// [`CoreError::BadRoot`] where the peer is no rank, [`CoreError::BadCounts`] where the bytes are no number.
    pub fn handle_p2p_call(&mut self, now: Nanos, rank: Rank, call: P2pCall) -> Result<(), CoreError> {
        self.shared.check_open()?;
        self.p2p.handle_call(now, &mut self.shared, rank, call)?;
        self.refuse_impossible();
        Ok(())
    }

    /// The channel on which pieces of messages from rank to rank land, and on which their completions are told.
    pub fn p2p_channel(&self) -> ChannelId {
        self.p2p.channel()
    }

    /// The segment on a channel.
    pub fn segment(&self, channel: ChannelId) -> Option<&Segment> {
        self.scheduler.segment(channel)
    }

    /// The signature of an operation in flight.
    pub fn signature(&self, operation: OperationId) -> Option<Signature> {
        self.shared.operations.get(operation).map(|operation| operation.signature)
    }

    /// The epoch that the next segment runs under, as far as is known here.
    pub fn active_epoch(&self) -> Epoch {
        self.shared.epochs.control_epoch()
    }

    /// The epoch whose links a change may carry over.
    pub fn link_epoch(&self) -> Epoch {
        self.shared.epochs.current().number()
    }

    /// The plan of an epoch, the current one or the next.
    pub fn plan(&self, epoch: Epoch) -> Option<&EpochPlan> {
        self.shared.epochs.get(epoch).map(|epoch| &epoch.config)
    }

    /// Why it ended, if it has.
    pub fn failure(&self) -> Option<&Failure> {
        self.shared.failure()
    }

    /// This participant.
    pub fn me(&self) -> Participant {
        self.shared.me
    }

    /// The token of a local rank's call.
    pub fn token(&self, operation: OperationId, rank: Rank) -> Option<Token> {
        self.shared.operations.get(operation)?.token(self.shared.operations.local(rank)?)
    }

    /// Operations in flight, for people.
    pub fn in_flight(&self) -> Vec<InFlight> {
        report::in_flight(&self.shared, self.scheduler.done(), &self.scheduler.awaited(&self.shared.group))
    }

    /// Sends and receives in flight, for people.
    pub fn messages_in_flight(&self) -> Vec<MessageInFlight> {
        self.p2p.in_flight(&self.shared)
    }

    /// Control messages to a participant that wait to be polled, and the most that there may be. The limit holds while the
    /// communicator is in force.
    pub fn queued(&self, to: Participant) -> (usize, usize) {
        (self.shared.queued_for(to), self.shared.queue_limit())
    }

    /// Operations that have ended here, at all local ranks.
    pub fn operations_ended(&self) -> u64 {
        self.shared.operations.bounds().0.0
    }

    /// A frame came from a peer on the link that was made for the epoch `link`. A data frame's payload lies in its slot, or
    /// where it was posted.
    pub fn handle_frame(
        &mut self,
        now: Nanos,
        from: Participant,
        link: Epoch,
        header: Header,
        control: Option<Control>,
        payload: Payload,
    ) {
        if self.shared.has_failed() || from == self.me() || from.0 >= self.shared.group.participants() {
            return;
        }
        let queued = self.shared.queued();
        let before = self.shared.acknowledgements.acked_by_all();
        self.shared.acknowledgements.handle_header(from, &header);
        if self.shared.acknowledgements.acked_by_all() > before {
            self.inquiries.note_progress(now);
        }
        let right = match header.kind {
            k if k == Kind::Acknowledge as u8 => true,
            k if k == Kind::Credit as u8 => self.shared.epochs.handle_credit(from, link, &header),
            k if k == Kind::Data as u8 => {
                self.inquiries.note_progress(now);
                self.shared.epochs.handle_credit(from, link, &header)
                    && self.handle_data(now, from, link, &header, payload)
            }
            k if k == Kind::Control as u8 => {
                control.is_some_and(|control| self.handle_control(now, from, control))
            }
            k => {
                Kind::of_p2p(k).is_some_and(|kind| self.handle_p2p(now, (from, link), kind, &header, payload))
            }
        };
        // Who asks on and on, and does not read what it is answered, has no more memory of this participant's.
        if !right || (!self.shared.has_failed() && self.shared.is_crowded(queued)) {
            self.shared.fail_internal(from);
        }
    }

    fn handle_p2p(
        &mut self,
        now: Nanos,
        (from, link): (Participant, Epoch),
        kind: Kind,
        header: &Header,
        payload: Payload,
    ) -> bool {
        if kind == Kind::Piece && !self.shared.epochs.handle_credit(from, link, header) {
            return false;
        }
        let right = self.p2p.handle_frame(now, &mut self.shared, (from, link), kind, header, payload.bytes);
        // Whom it is for may have left.
        if kind == Kind::Offer {
            self.refuse_impossible();
        }
        right
    }

    fn handle_data(
        &mut self,
        now: Nanos,
        from: Participant,
        link: Epoch,
        header: &Header,
        payload: Payload,
    ) -> bool {
        let Some(signature) = header.signature() else { return false };
        let operation = OperationId(header.operation);
        let shared = &mut self.shared;
        // Who called something else counts segments otherwise too; nothing more can be asked of the message.
        let other = shared.operations.caller(operation).filter(|(_, ours)| *ours != signature);
        if let Some(call) = other {
            shared.fail_mismatch(operation, call, from, signature);
            return true;
        }
        if header.epoch < shared.epochs.current().number() {
            let suspect = Suspect { peer: from, operation, count: None };
            self.inquiries.handle_unexpected(now, shared, suspect);
            return true;
        }
        let arrival = Arrival { operation, segment: SegmentId(header.segment), signature, payload };
        if shared.epochs.get(header.epoch).is_none_or(|epoch| epoch.link(from) != Some(link)) {
            return false;
        }
        let Some(stream) = shared.epochs.stream_mut(header.epoch, from, header.channel) else { return false };
        if !stream.handle_arrival(header.sequence, arrival) {
            return false;
        }
        if let Some(last) = self.last_calls.get_mut(from.0 as usize)
            && last.is_none_or(|(earlier, _)| earlier <= operation)
        {
            *last = Some((operation, signature));
        }
        true
    }

    fn handle_control(&mut self, now: Nanos, from: Participant, control: Control) -> bool {
        match control {
            Control::Inquire { operation, count } => {
                inquiries::answer(&mut self.shared, from, operation, count);
            }
            Control::Answer { operation, count, missing, call, reported } => {
                let answer = Answer { missing, call, reported };
                self.inquiries.handle_answer(now, &mut self.shared, from, (operation, count), answer);
            }
            Control::Left { rank, operations } => {
                if !self.shared.group.local(from).contains(&rank) {
                    return false;
                }
                self.departures.note(rank, operations);
                self.refuse_impossible();
            }
            Control::Abort { failure } => self.shared.fail(failure),
            Control::Prepared { epoch } => self.handle_prepared(from, epoch),
            Control::Propose { epoch } => return self.handle_proposal(from, epoch),
            Control::Promise { epoch, below } => self.handle_promise(from, epoch, below),
            Control::Commit { epoch, segment } => {
                return from == self.shared.leader() && self.handle_commit(epoch, segment);
            }
            Control::Withdrawn { epoch } => self.handle_withdrawn(from, epoch),
            Control::Aggregation { epoch, generation, agreement } => {
                return self.handle_agreement(now, from, epoch, agreement, generation);
            }
        }
        true
    }

    /// A send, fetch or store that an [`Action::Step`] asked for has ended.
    pub fn handle_completion(&mut self, now: Nanos, channel: ChannelId, step: StepId) {
        if self.shared.has_failed() {
            return;
        }
        if channel == self.p2p.channel() {
            let right = self.p2p.handle_completion(now, &mut self.shared, step);
            debug_assert!(right, "a completion that nobody waits for");
            return;
        }
        let right = self.scheduler.handle_completion(channel, step);
        debug_assert!(right, "a completion that nobody waits for");
        self.inquiries.note_progress(now);
    }

    /// An action is under way: what a collective waits for counts from now, unless the action is a message's. Whatever happens
    /// meanwhile is told as ever, and nothing is polled but [control messages](Self::poll_control). After a failure the rest of the action is left.
    pub fn handle_progress(&mut self, now: Nanos, action: &Action) {
        if !self.shared.has_failed() && !action.is_p2p() {
            self.inquiries.note_progress(now);
        }
    }

    /// The totals of a step with compressed operands.
    pub fn handle_coded(&mut self, operation: OperationId, step: &CodingReport) {
        let Some(operation) = self.shared.operations.get_mut(operation) else { return };
        operation.wire_bytes += step.wire_bytes;
        operation.coded.get_or_insert_default().add(step);
    }

    /// From now on large operations wait for their interleave slot here, and others for what this participant would send. `None`
    /// ends that.
    pub fn set_interleaving(&mut self, rules: Option<Interleaving>) {
        self.admission.set_rules(rules);
    }

    /// An interleave slot is granted. Nothing changes if another is waited for.
    pub fn handle_slot_granted(&mut self, slot: SlotId) {
        self.admission.grant(OperationId(slot.0));
    }

    /// The link to a peer that was made for the epoch `link` has gone down.
    pub fn handle_link_down(&mut self, link: Epoch, peer: Participant) {
        if self.shared.has_failed() {
            return;
        }
        if let Some(next) = self.shared.epochs.handle_link_down(link, peer) {
            // Before any promise this is a plan that cannot be, not a peer that is gone.
            self.withdraw(next);
        }
        self.p2p.handle_link_down(peer, link);
        self.refuse_impossible();
    }

    /// A local rank's process is gone, or it has left. With an operation in flight the communicator ends.
    pub fn handle_rank_departed(&mut self, rank: Rank) {
        let Some(operations) = self.shared.operations.called(rank) else { return };
        if self.departures.contains(rank) {
            return;
        }
        if self.shared.operations.awaits_completion(rank, operations) || self.p2p.concerns(rank) {
            self.shared.fail(Failure::RanksLost { ranks: vec![rank] });
        }
        self.departures.note(rank, operations);
        if !self.shared.has_failed() {
            self.shared.broadcast(&Control::Left { rank, operations });
            self.refuse_impossible();
        }
    }

    fn refuse_impossible(&mut self) {
        self.departures.refuse_impossible(&mut self.shared, &self.p2p, self.scheduler.begun());
    }

    /// The provider ends the communicator, or a local rank aborts it.
    pub fn dissolve(&mut self, failure: Failure) {
        self.shared.fail(failure);
    }

    /// The participant goes away for good, and its ranks with it.
    pub fn shut_down(&mut self) {
        let ranks = self.shared.group.local(self.me()).to_vec();
        self.shared.fail(Failure::RanksLost { ranks });
    }

    /// A participant broke the protocol, in a way that the caller found.
    pub fn handle_breach(&mut self, participant: Participant) {
        self.shared.fail_internal(participant);
    }

    /// Whether every local rank has left and no peer needs anything from here. True only when there is nothing to poll.
    pub fn finished(&self) -> bool {
        let shared = &self.shared;
        let mut local = shared.operations.ranks().iter();
        shared.is_idle()
            && self.p2p.is_idle()
            && local.all(|rank| self.departures.contains(*rank))
            && match shared.failure() {
                Some(_) => shared.operations.oldest().is_none(),
                None => {
                    let acknowledgements = &shared.acknowledgements;
                    acknowledgements.acked_by_all() >= self.scheduler.begun()
                        && !acknowledgements.has_pending()
                }
            }
    }

    /// When [`Communicator::handle_timeout`] and [`Communicator::poll`] are to be called although nothing happens.
    pub fn poll_timeout(&self) -> Option<Nanos> {
        if self.shared.has_failed() {
            return None;
        }
        // Hosts sum on while there is nothing to sum.
        let busy = self.shared.operations.oldest().is_some();
        let session = self.shared.epochs.session_timeout().filter(|_| busy);
        let inquiry = self.inquiries.poll_timeout(&self.shared);
        let p2p = self.p2p.poll_timeout(self.inquiries.last_progress());
        self.deferred_until().into_iter().chain(inquiry).chain(session).chain(p2p).min()
    }

    /// Whether something waits for time alone that is no time-out. That is an operation for its interleave slot, the end of a
    /// slot, or an acknowledgement for data to go with.
    pub fn is_deferred(&self) -> bool {
        !self.shared.has_failed() && self.deferred_until().is_some()
    }

    fn deferred_until(&self) -> Option<Nanos> {
        let acknowledgements = self.shared.acknowledgements.poll_timeout();
        self.admission.poll_timeout().into_iter().chain(acknowledgements).min()
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Nanos) {
        self.handle_aggregation_timeout(now);
        self.inquiries.handle_timeout(now, &mut self.shared);
        self.p2p.handle_timeout(now, self.inquiries.last_progress(), &mut self.shared);
    }

    /// The next thing to do, if any.
    pub fn poll(&mut self, now: Nanos) -> Option<Action> {
        if let Some(action) = self.shared.poll_control().or_else(|| self.shared.actions.pop_front()) {
            return Some(action);
        }
        if self.shared.has_failed() {
            return self.p2p.poll_failed().or_else(|| report::poll_failed(&mut self.shared));
        }
        self.handle_aggregation_timeout(now);
        // In turns, so that neither waits for the end of the other.
        self.p2p_first = !self.p2p_first;
        let mut action = if self.p2p_first { self.p2p.poll(&mut self.shared) } else { None };
        action = action.or_else(|| self.poll_segments(now));
        if action.is_some() {
            return action;
        }
        if let Some(action) = self.shared.poll_control().or_else(|| self.shared.actions.pop_front()) {
            return Some(action);
        }
        if self.shared.has_failed() {
            return None;
        }
        if let Some(action) = self.scheduler.poll_credit(&mut self.shared) {
            return Some(action);
        }
        if let Some(action) = self.p2p.poll(&mut self.shared) {
            return Some(action);
        }
        self.poll_acknowledgement(now)
    }

    /// As [`Communicator::poll`], but of what goes at once where the caller has operations wait: words to peers that carry nothing of an
    /// operation, and the ends of operations that nothing else is to be done for. None of it moves bytes of tensors. `midst` is the
    /// action that the caller has begun and not ended.
    pub fn poll_control(&mut self, now: Nanos, midst: Option<&Action>) -> Option<Action> {
        if self.shared.has_failed() {
            return None;
        }
        // What is done here is where it belongs before anybody learns of it. Every word acknowledges what is done, control's too.
        let moves = |action: &Action| matches!(action, Action::CopyOut { .. } | Action::Aggregate { .. });
        if midst.is_some_and(moves) || self.shared.actions.iter().any(moves) {
            return None;
        }
        if let Some(word) = self.shared.poll_control() {
            return Some(word);
        }
        if midst.is_none() && self.shared.actions.is_empty() {
            self.scheduler.advance(&mut self.shared);
            if self.shared.actions.iter().any(moves) {
                return None;
            }
        }
        // Slots that a step consumes are read until it is over, so nobody hears before that they are free.
        if midst.is_none() {
            let action = self.shared.poll_control().or_else(|| self.shared.actions.pop_front());
            let action =
                action.or_else(|| report::poll_completed(&mut self.shared, self.scheduler.settled()));
            let action = action.or_else(|| self.p2p.poll_control(&mut self.shared));
            let action = action.or_else(|| self.scheduler.poll_credit(&mut self.shared));
            if action.is_some() {
                return action;
            }
        }
        self.poll_acknowledgement(now)
    }

    fn poll_acknowledgement(&mut self, now: Nanos) -> Option<Action> {
        // Who changes plans, or leaves, waits for those of everything that is done.
        let all = self.shared.epochs.next().is_some() || self.departures.any();
        self.shared.poll_acknowledgement(now, all)
    }

    /// Advances, begins and issues until there is an action, or nothing more to begin.
    fn poll_segments(&mut self, now: Nanos) -> Option<Action> {
        loop {
            self.scheduler.advance(&mut self.shared);
            // What is done here is where it belongs before anybody learns of it.
            if let Some(action) = self.shared.actions.pop_front() {
                return Some(action);
            }
            if let Some(action) = report::poll_completed(&mut self.shared, self.scheduler.settled()) {
                return Some(action);
            }
            self.scheduler.release_slot(now, &mut self.shared, &mut self.admission);
            let begun = self.scheduler.begun();
            while self.begin_segment(now) {}
            if let Some(action) = self.scheduler.poll_step(now, &mut self.shared, &mut self.inquiries) {
                return Some(action);
            }
            // A segment without steps is done as it begins.
            if begun == self.scheduler.begun() {
                return None;
            }
        }
    }

    fn begin_segment(&mut self, now: Nanos) -> bool {
        match self.scheduler.begin_segment(now, &mut self.shared, &mut self.admission) {
            Begin::Begun => true,
            Begin::NotYet => false,
            Begin::SessionNeeded(epoch) => {
                self.send_to_leader(now, epoch, Agreement::Ask { session: 0 });
                false
            }
        }
    }
}

/// Whether counts are those of an operation like this. They are there if it is uneven, of the right number, and none over
/// the most.
fn fits(signature: &Signature, counts: Option<&[u64]>, ranks: u32) -> bool {
    let collective = signature.collective;
    match counts {
        None => !signature.uneven,
        Some(counts) => {
            signature.uneven
                && collective.can_be_uneven()
                && counts.len() == collective.said_counts(ranks) as usize
                && counts.iter().all(|count| *count <= signature.count)
        }
    }
}
