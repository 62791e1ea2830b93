//! What every part of a communicator works on: epochs, operations, acknowledgements, and the queues of actions and messages.

use crate::ack_tree::AckTree;
use crate::action::Action;
use crate::epoch_set::EpochSet;
use crate::error::CoreError;
use crate::failure::Failure;
use crate::message::{Control, Header, Kind, Message};
use crate::operation::Operations;
use harmonaize_abi::{Epoch, OperationId, Rank, Signature};
use harmonaize_plan::{Group, Participant};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Control messages to one participant that may wait before what a peer sends may add to them. They wait to be polled; those about
/// local ranks are not counted. A peer that asks in good faith has a few: it asks ever more rarely.
const MAX_QUEUED: usize = 256;

/// Messages about each local rank that may wait beside: that it has left, twice on the links of two epochs.
const QUEUED_PER_RANK: usize = 4;

/// The state that the parts of a communicator share.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Shared {
    pub(crate) me: Participant,
    pub(crate) group: Group,
    pub(crate) epochs: EpochSet,
    pub(crate) operations: Operations,
    pub(crate) acknowledgements: AckTree,
    pub(crate) actions: VecDeque<Action>,
    /// By message: its receiver, and the epoch of its link if that is not the usual one.
    outbox: VecDeque<(Participant, Option<Epoch>, Message)>,
    failure: Option<Failure>,
}

impl Shared {
    pub(crate) fn new(
        me: Participant,
        group: Group,
        epochs: EpochSet,
        operations: Operations,
        channels: u16,
    ) -> Self {
        let participants = group.participants();
        Self {
            me,
            acknowledgements: AckTree::new(me, participants, channels),
            actions: VecDeque::with_capacity(10 + usize::from(channels)),
            outbox: VecDeque::with_capacity(4 * participants as usize),
            failure: None,
            group,
            epochs,
            operations,
        }
    }

    /// The lowest participant leads.
    pub(crate) fn leader(&self) -> Participant {
        Participant(0)
    }

    pub(crate) fn is_leader(&self) -> bool {
        self.leader() == self.me
    }

    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// What a call gets once the communicator has ended.
    pub(crate) fn check_open(&self) -> Result<(), CoreError> {
        self.failure().map_or(Ok(()), |failure| Err(CoreError::Ended(failure.clone())))
    }

    /// Ends the communicator here and tells everybody. That holds for a failure learnt from a peer too: whoever sees our
    /// links go down next must have learnt from us why.
    pub(crate) fn fail(&mut self, failure: Failure) {
        if self.has_failed() {
            return;
        }
        self.broadcast(&Control::Abort { failure: failure.clone() });
        self.actions.clear();
        self.actions.push_back(Action::Ended(failure.clone()));
        self.failure = Some(failure);
    }

    /// Ends the communicator because of a participant that broke the protocol.
    pub(crate) fn fail_internal(&mut self, participant: Participant) {
        self.fail(Failure::Internal { ranks: self.group.local(participant).to_vec() });
    }

    /// Ends the communicator because a peer called something else than a rank did here.
    pub(crate) fn fail_mismatch(
        &mut self,
        operation: OperationId,
        call: (Rank, Signature),
        peer: Participant,
        signature: Signature,
    ) {
        let other = self.group.local(peer).iter().map(|rank| (*rank, signature));
        let calls = std::iter::once(call).chain(other.take(1)).collect();
        self.fail(Failure::Mismatch { operation, calls });
    }

    pub(crate) fn send(&mut self, to: Participant, control: Control) {
        let twice = matches!(
            control,
            Control::Left { .. } | Control::Abort { .. } | Control::Inquire { .. } | Control::Answer { .. }
        );
        let message = self.control_message(to, control);
        // Until the old epoch is done, a peer may have closed its link, or not know of the commit; and either link may have
        // broken with nobody here knowing.
        let next = self.epochs.next().filter(|s| twice && s.ready && !s.epoch.reuses_link(to));
        match next.map(|switch| switch.epoch.number()) {
            Some(next) => {
                self.outbox.push_back((to, Some(next), message.clone()));
                self.outbox.push_back((to, Some(self.epochs.current().number()), message));
            }
            None => self.outbox.push_back((to, None, message)),
        }
    }

    /// Sends a message on the link of an epoch.
    pub(crate) fn send_on(&mut self, epoch: Epoch, to: Participant, control: Control) {
        let message = self.control_message(to, control);
        self.outbox.push_back((to, Some(epoch), message));
    }

    fn control_message(&mut self, to: Participant, control: Control) -> Message {
        let mut header = Header::new(Kind::Control, self.epochs.current().number());
        self.acknowledgements.fill_header(to, &mut header);
        Message { header, control: Some(Box::new(control)) }
    }

    /// Every other participant.
    pub(crate) fn peers(&self) -> impl Iterator<Item = Participant> + use<> {
        let me = self.me;
        (0..self.group.participants()).map(Participant).filter(move |peer| *peer != me)
    }

    pub(crate) fn broadcast(&mut self, control: &Control) {
        self.peers().for_each(|peer| self.send(peer, control.clone()));
    }

    /// How many control messages wait.
    pub(crate) fn queued(&self) -> usize {
        self.outbox.len()
    }

    /// How many of them are for this participant.
    pub(crate) fn queued_for(&self, peer: Participant) -> usize {
        self.outbox.iter().filter(|(to, ..)| *to == peer).count()
    }

    /// The most that may be for one participant.
    pub(crate) fn queue_limit(&self) -> usize {
        MAX_QUEUED.saturating_add(QUEUED_PER_RANK.saturating_mul(self.operations.ranks().len()))
    }

    /// Whether more than may wait for somebody, of whom there are more than when `before` messages waited. Looks at the last message's
    /// receiver: an answer is for one, and what is for all comes to each.
    pub(crate) fn is_crowded(&self, before: usize) -> bool {
        let limit = self.queue_limit();
        self.outbox.len() > before.max(limit)
            && self.outbox.back().is_some_and(|(to, ..)| self.queued_for(*to) > limit)
    }

    /// The next control message.
    pub(crate) fn poll_control(&mut self) -> Option<Action> {
        while let Some((to, epoch, message)) = self.outbox.pop_front() {
            let epoch = epoch.unwrap_or(self.epochs.control_epoch());
            if self.epochs.get(epoch).is_some() {
                return Some(Action::Send { to, epoch, message });
            }
        }
        None
    }

    /// An acknowledgement that goes without data; with `all` whichever is not told yet.
    pub(crate) fn poll_acknowledgement(&mut self, now: crate::Nanos, all: bool) -> Option<Action> {
        let to = self.acknowledgements.poll_due(now, all)?;
        Some(self.bare(Kind::Acknowledge, to, self.epochs.control_epoch(), |_| {}))
    }

    /// Returns the sending of a header alone.
    pub(crate) fn bare(
        &mut self,
        kind: Kind,
        to: Participant,
        epoch: Epoch,
        fill: impl FnOnce(&mut Header),
    ) -> Action {
        let mut header = Header::new(kind, epoch);
        fill(&mut header);
        self.acknowledgements.fill_header(to, &mut header);
        Action::Send { to, epoch, message: Message { header, control: None } }
    }

    /// Makes the new plan the current one when every segment of the old one is acknowledged by all.
    pub(crate) fn retire_epoch(&mut self) {
        if let Some(epoch) = self.epochs.retire(self.acknowledgements.acked_by_all()) {
            self.actions.push_back(Action::Retire { epoch });
        }
    }

    /// Whether there is no action or message to poll.
    pub(crate) fn is_idle(&self) -> bool {
        self.outbox.is_empty() && self.actions.is_empty()
    }
}
