//! Sessions with an epoch's aggregator: the messages by which participants agree on them, and what they do to segments.

use super::Communicator;
use crate::action::{Action, CodingReport};
use crate::aggregation::{Aggregation, AggregationState};
use crate::channel::{Resume, Segment};
use crate::message::Control;
use harmonaize_abi::{AggregatorTask, ChannelId, Epoch, Nanos, SegmentId, SegmentIndex};
use harmonaize_aggregator::{Agreement, Audience, Leader, Summation};
use harmonaize_plan::{Participant, Retention};
use std::time::Duration;

impl Communicator {
    /// Sends the leader a message of this participant's: [`Agreement::Ask`] of session 0 wants a first session.
    pub(super) fn send_to_leader(&mut self, now: Nanos, epoch: Epoch, agreement: Agreement) {
        if self.shared.is_leader() {
            self.handle_as_leader(now, epoch, self.shared.me, agreement);
        } else {
            let control = Control::Aggregation { epoch, generation: 0, agreement };
            self.shared.send_on(epoch, self.shared.leader(), control);
        }
    }

    /// The leader's part: a message to it, its own among them.
    fn handle_as_leader(&mut self, now: Nanos, epoch: Epoch, from: Participant, agreement: Agreement) {
        // What is over needs no agreement.
        self.shared.retire_epoch();
        let leads = self.shared.is_leader();
        // One epoch after another: nothing of the one before can be undone any more.
        let current = self.shared.epochs.current().number() == epoch;
        let state = self.shared.epochs.aggregation_mut(epoch).filter(|_| leads);
        let Some(state) = state else { return };
        let sent = match (&mut state.leader, agreement) {
            (None, Agreement::Ask { .. }) => {
                state.leader_needed = true;
                return if current {
                    self.start_leading(now, epoch)
                };
            }
            // Who asks for a first session has one.
            (Some(_), Agreement::Ask { session: 0 }) | (None, _) => return,
            (Some(leader), message) => leader.receive(now.into(), from.0 as u16, message),
        };
        self.announce(now, epoch, sent);
    }

    fn start_leading(&mut self, now: Nanos, epoch: Epoch) {
        let participants = self.shared.group.participants();
        let Some(state) = self.shared.epochs.aggregation_mut(epoch) else { return };
        let Aggregation { backoff, max_backoff, .. } = state.config;
        let mut leader = Leader::new(participants as u16, 1, backoff, max_backoff);
        let sent = leader.restart();
        state.leader = Some(leader);
        self.announce(now, epoch, Some(sent));
    }

    /// Sends the leader's message to all, this participant among them.
    fn announce(&mut self, now: Nanos, epoch: Epoch, sent: Option<(Audience, Agreement)>) {
        let Some((_, agreement)) = sent else { return };
        let mut generation = self.shared.acknowledgements.generation();
        let undoes = self.shared.epochs.aggregation(epoch).filter(|state| state.is_frozen());
        if let (Agreement::Resume { session, from, .. }, Some(state)) = (agreement, undoes) {
            let leader = state.leader.as_ref().filter(|_| state.config.eager);
            if let Some(holder) = leader.and_then(|leader| leader.sum_holder(session, from)) {
                self.broadcast_agreement(now, epoch, holder, generation);
            }
            generation = generation.wrapping_add(1);
        }
        self.broadcast_agreement(now, epoch, agreement, generation);
    }

    fn broadcast_agreement(&mut self, now: Nanos, epoch: Epoch, agreement: Agreement, generation: u8) {
        for peer in self.shared.peers() {
            self.shared.send_on(epoch, peer, Control::Aggregation { epoch, generation, agreement });
        }
        self.follow_leader(now, epoch, agreement, generation);
    }

    /// A message of another participant. False if it may not send this.
    pub(super) fn handle_agreement(
        &mut self,
        now: Nanos,
        from: Participant,
        epoch: Epoch,
        agreement: Agreement,
        generation: u8,
    ) -> bool {
        match agreement {
            Agreement::Ask { .. } | Agreement::Stopped { .. } => {
                self.handle_as_leader(now, epoch, from, agreement);
                self.shared.is_leader()
            }
            // What everybody has acknowledged stays done.
            Agreement::Resume { from: first, .. }
                if generation != self.shared.acknowledgements.generation()
                    && first < self.shared.acknowledgements.acked_by_all() =>
            {
                false
            }
            Agreement::Stop { .. } | Agreement::HaveSums { .. } | Agreement::Resume { .. } => {
                let leads = from == self.shared.leader();
                if leads {
                    self.follow_leader(now, epoch, agreement, generation);
                }
                leads
            }
            Agreement::Done { .. } | Agreement::DoneEverywhere { .. } => false,
        }
    }

    /// The leader's message, at each participant.
    fn follow_leader(&mut self, now: Nanos, epoch: Epoch, agreement: Agreement, generation: u8) {
        match agreement {
            Agreement::Stop { session } => self.stop_session(now, epoch, session),
            Agreement::HaveSums { session, below, worker } => {
                if let Some(state) = self.shared.epochs.aggregation_mut(epoch) {
                    state.sum_holder = Some((session, below, worker));
                }
            }
            Agreement::Resume { session, from, summation } => {
                self.resume_session(epoch, session, from, summation, generation);
            }
            Agreement::Ask { .. }
            | Agreement::Stopped { .. }
            | Agreement::Done { .. }
            | Agreement::DoneEverywhere { .. } => {}
        }
    }

    fn stop_session(&mut self, now: Nanos, epoch: Epoch, session: u64) {
        let (done, begun) = (self.scheduler.done(), self.scheduler.begun());
        let everyone = self.shared.acknowledgements.acked_by_all();
        let Some(state) = self.shared.epochs.aggregation_mut(epoch) else { return };
        if session <= state.session {
            return;
        }
        (state.session, state.stopped) = (session, true);
        let (done, done_everywhere) = match state.summation {
            Summation::Aggregator => {
                self.shared.actions.push_back(Action::Leave { epoch });
                (done, everyone)
            }
            // Nothing that hosts have begun is undone.
            Summation::Hosts => (begun, begun),
        };
        self.send_to_leader(now, epoch, Agreement::Stopped { session, done, done_everywhere });
    }

    fn resume_session(
        &mut self,
        epoch: Epoch,
        session: u64,
        from: SegmentId,
        summation: Summation,
        generation: u8,
    ) {
        let done = self.scheduler.done();
        if generation != self.shared.acknowledgements.generation() {
            self.scheduler.undo(from);
            self.shared.acknowledgements.undo(from, generation);
        }
        let Some(state) = self.shared.epochs.aggregation_mut(epoch) else { return };
        if session != state.session || !state.stopped {
            return;
        }
        (state.stopped, state.summation, state.from_segment, state.next_index) =
            (false, summation, from, SegmentIndex(0));
        let holder = state.sum_holder.take().filter(|(of, ..)| *of == session);
        let me = self.shared.me.0;
        for channel in self.scheduler.channels_mut() {
            let undone = |segment: &&Segment| segment.epoch == epoch && segment.number >= from;
            let Some(segment) = channel.segment().filter(undone) else { continue };
            let (operation, completed) = (segment.operation, segment.number < done);
            let holder = holder.filter(|(_, below, _)| segment.number < *below);
            let resume = match segment.signature.collective.traits().aggregator {
                _ if segment.retention != Retention::CopyInputs => None,
                Some(AggregatorTask::Sum) => {
                    holder.map(|(_, _, worker)| Resume { source: u32::from(worker) == me, completed })
                }
                // The root has what it gave, or still its input.
                Some(AggregatorTask::Broadcast) => completed.then_some(Resume { source: true, completed }),
                Some(AggregatorTask::Barrier) | None => None,
            };
            if channel.fall_back(resume)
                && let Some(operation) = self.shared.operations.get_mut(operation)
            {
                operation.fallback_segments += 1;
            }
        }
        if summation == Summation::Aggregator {
            self.shared.actions.push_back(Action::Join { epoch, session });
        }
    }

    /// The segment that is `index` of an epoch's session, and its channel. Segments of sessions before, which may still wait for
    /// everybody's acknowledgement, have indices of their own.
    pub fn aggregated_segment(&self, epoch: Epoch, index: SegmentIndex) -> Option<(ChannelId, &Segment)> {
        let from = self.shared.epochs.aggregation(epoch)?.from_segment;
        let segments = self.scheduler.channels().filter_map(|(at, channel)| Some((at, channel.segment()?)));
        let mut of_session = segments.filter(|(_, s)| s.epoch == epoch && s.number >= from);
        of_session.find(|(_, s)| s.aggregated == Some(index))
    }

    /// All sums of a session's segment `index` have been written. The losses of compressed ones stay in the receipt if hosts do the
    /// segment again.
    pub fn handle_aggregated(
        &mut self,
        now: Nanos,
        epoch: Epoch,
        index: SegmentIndex,
        coded: Option<&CodingReport>,
    ) {
        let stopped = self.shared.epochs.aggregation(epoch).is_none_or(|state| state.stopped);
        if self.shared.has_failed() || stopped {
            return;
        }
        let channel = self.aggregated_segment(epoch, index).map(|(channel, _)| channel);
        let summed = channel.and_then(|channel| self.scheduler.channel_mut(channel)?.handle_sum());
        if let Some((operation, coded)) = summed.zip(coded) {
            self.handle_coded(operation, coded);
        }
        self.inquiries.note_progress(now);
    }

    /// What an [`Action::CopyOut`] copies is still on its way, to tensors that are not mapped. Until
    /// [`Communicator::handle_copied_out`] the operation does not end, and the channel keeps what is copied.
    pub fn defer_copy_out(&mut self, channel: ChannelId) {
        if let Some(channel) = self.scheduler.channel_mut(channel) {
            channel.defer_copy_out();
        }
    }

    /// A copy that was [deferred](Communicator::defer_copy_out) has ended.
    pub fn handle_copied_out(&mut self, now: Nanos, channel: ChannelId) {
        if self.shared.has_failed() {
            return;
        }
        if let Some(channel) = self.scheduler.channel_mut(channel) {
            channel.end_copy_out();
        }
        self.inquiries.note_progress(now);
    }

    /// The session has ended here; or the aggregator does not answer an [`Action::ProbeAggregator`].
    pub fn handle_aggregation_ended(&mut self, now: Nanos, epoch: Epoch) {
        let open = |state: &&AggregationState| !state.stopped && state.summation == Summation::Aggregator;
        let open = self.shared.epochs.aggregation(epoch).filter(open);
        match open.map(|state| state.session) {
            Some(session) if !self.shared.has_failed() => {
                self.send_to_leader(now, epoch, Agreement::Ask { session })
            }
            _ => self.handle_probe_outcome(now, epoch, false),
        }
    }

    /// Aggregation in an epoch, if it has an aggregator. It is not among what is encoded of a communicator.
    pub fn aggregation(&self, epoch: Epoch) -> Option<&AggregationState> {
        self.shared.epochs.aggregation(epoch)
    }

    /// Goes on with aggregation in an epoch where another process stood, in a session that ends. Hosts take over until the next.
    pub fn inherit_aggregation(&mut self, now: Nanos, epoch: Epoch, state: AggregationState) {
        let Some(inherited) = self.shared.epochs.get_mut(epoch) else { return };
        inherited.config.aggregation = Some(state.config);
        inherited.aggregation = Some(state);
        self.handle_aggregation_ended(now, epoch);
    }

    /// The aggregator answers an [`Action::ProbeAggregator`].
    pub fn handle_aggregator_alive(&mut self, now: Nanos, epoch: Epoch) {
        self.handle_probe_outcome(now, epoch, true);
    }

    fn handle_probe_outcome(&mut self, now: Nanos, epoch: Epoch, alive: bool) {
        if self.shared.epochs.current().number() != epoch || self.shared.has_failed() {
            return;
        }
        let leader = self.shared.epochs.aggregation_mut(epoch).and_then(|state| state.leader.as_mut());
        let sent = leader.and_then(|leader| leader.handle_probe_outcome(now.into(), alive));
        self.announce(now, epoch, sent);
    }

    /// The leader's timer, and a leader that was wanted before its epoch was the current one.
    pub(super) fn handle_aggregation_timeout(&mut self, now: Nanos) {
        let epoch = self.shared.epochs.current().number();
        if !self.shared.is_leader() || self.shared.has_failed() {
            return;
        }
        let Some(state) = self.shared.epochs.aggregation_mut(epoch) else { return };
        match &mut state.leader {
            Some(leader) => {
                let session = leader.poll(Duration::from(now));
                self.shared.actions.extend(session.map(|session| Action::ProbeAggregator { epoch, session }));
            }
            None if state.leader_needed => self.start_leading(now, epoch),
            None => {}
        }
    }
}
