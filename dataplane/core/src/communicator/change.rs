//! Changing the plan under way. All prepare, the leader proposes (or somebody else reports that all have prepared), each promises how
//! far it will go, the leader commits to the maximum. Nobody stops unless the commit takes longer than the promised segments last.

use super::Communicator;
use crate::action::Action;
use crate::epoch::EpochPlan;
use crate::error::CoreError;
use crate::message::Control;
use harmonaize_abi::{Epoch, SegmentId};
use harmonaize_plan::Participant;

impl Communicator {
    /// Prepares a new plan. [`Communicator::handle_links_up`] must follow when its links are up, or [`Communicator::abandon`].
    ///
    /// The links to the participants in `carried` are the current ones, with what is under way on them; at the other end it must be
    /// the same ones.
    ///
    /// # Errors
    /// If another change is under way, the epoch is not newer, members, channels or chunk differ from today's, or a link cannot be
    /// carried over: it is to nobody, is down, or landing slots differ.
    pub fn handle_plan_change(
        &mut self,
        decided: EpochPlan,
        carried: &[Participant],
    ) -> Result<(), CoreError> {
        self.shared.check_open()?;
        self.shared.epochs.prepare(decided, carried)
    }

    /// Gives up a change that some participant cannot prepare, for everybody: the others get [`Action::Retire`] of that
    /// epoch. False if it is too late for that: promises were made, and all links were up.
    pub fn abandon(&mut self, epoch: Epoch) -> bool {
        let given_up = self.shared.epochs.give_up(epoch);
        if given_up {
            self.send_withdrawn(epoch);
        }
        given_up
    }

    fn send_withdrawn(&mut self, epoch: Epoch) {
        if self.shared.is_leader() {
            self.shared.broadcast(&Control::Withdrawn { epoch });
        } else {
            self.shared.send(self.shared.leader(), Control::Withdrawn { epoch });
        }
    }

    /// As [`Communicator::abandon`], when it is found here.
    pub(super) fn withdraw(&mut self, epoch: Epoch) {
        if self.shared.epochs.give_up(epoch) {
            self.shared.actions.push_back(Action::Retire { epoch });
            self.send_withdrawn(epoch);
        }
    }

    /// Somebody gave up a change: the leader, then, for all.
    pub(super) fn handle_withdrawn(&mut self, from: Participant, epoch: Epoch) {
        let shared = &mut self.shared;
        let leads = shared.is_leader();
        let may = leads || from == shared.leader();
        if shared.has_failed() || !may || epoch <= shared.epochs.current().number() {
            return;
        }
        let withdrawn = shared.epochs.is_withdrawn(epoch);
        match shared.epochs.switch_to(epoch) {
            Some(switch) if switch.committed().is_some() => return,
            Some(switch) => {
                switch.promised_below = None;
                self.withdraw(epoch);
            }
            None if leads && !withdrawn => self.send_withdrawn(epoch),
            None => {}
        }
        self.shared.epochs.note_withdrawn(epoch);
        self.refuse_impossible();
    }

    /// All links of a plan in preparation are up here.
    pub fn handle_links_up(&mut self, epoch: Epoch) {
        let shared = &mut self.shared;
        if shared.has_failed() {
            return;
        }
        let Some(switch) = shared.epochs.switch_to(epoch) else { return };
        if switch.epoch.any_down() {
            return self.withdraw(epoch);
        }
        switch.ready = true;
        shared.epochs.note_prepared(shared.me, epoch);
        if shared.is_leader() {
            self.propose();
        } else {
            shared.send(shared.leader(), Control::Prepared { epoch });
        }
    }

    /// A participant is prepared for an epoch.
    pub(super) fn handle_prepared(&mut self, from: Participant, epoch: Epoch) {
        self.shared.epochs.note_prepared(from, epoch);
        if self.shared.is_leader() && !self.shared.has_failed() {
            self.propose();
        }
    }

    /// Proposes a prepared plan, if all are prepared.
    fn propose(&mut self) {
        if let Some(epoch) = self.shared.epochs.propose() {
            self.shared.broadcast(&Control::Propose { epoch });
            self.send_promise(epoch);
        }
    }

    /// Somebody who need not be trusted reports that all participants have prepared a plan. Promises are made without waiting for
    /// the leader to learn so over links that may be slow. If it is wrong, the leader misses a promise, and nothing is switched.
    pub fn handle_all_prepared(&mut self, epoch: Epoch) {
        let ready = self.shared.epochs.switch_to(epoch).is_some_and(|switch| switch.ready);
        if ready && !self.shared.has_failed() {
            self.send_promise(epoch);
        }
    }

    /// Promises, once, not to begin segments beyond those at hand until the commit.
    fn send_promise(&mut self, epoch: Epoch) {
        let ahead = self.scheduler.segments_ahead(&self.shared.operations);
        let below = SegmentId(self.scheduler.begun().0 + ahead);
        let switch = self.shared.epochs.switch_to(epoch).filter(|switch| switch.promised_below.is_none());
        let Some(switch) = switch else { return };
        switch.promised_below = Some(below);
        if self.shared.is_leader() {
            self.handle_promise(self.shared.me, epoch, below);
        } else {
            self.shared.send(self.shared.leader(), Control::Promise { epoch, below });
        }
    }

    pub(super) fn handle_proposal(&mut self, from: Participant, epoch: Epoch) -> bool {
        if from != self.shared.leader() {
            return false;
        }
        if epoch <= self.shared.epochs.current().number() {
            // The commit came before it, over links that are quicker.
            return true;
        }
        let Some(switch) = self.shared.epochs.switch_to(epoch) else {
            // We gave it up, which the leader will learn.
            return self.shared.epochs.is_withdrawn(epoch);
        };
        let ready = switch.ready;
        if ready {
            self.send_promise(epoch);
        }
        ready
    }

    pub(super) fn handle_promise(&mut self, from: Participant, epoch: Epoch, below: SegmentId) {
        let Some(switch) = self.shared.epochs.switch_to(epoch) else { return };
        if let Some(segment) = switch.record_promise(from, below) {
            self.shared.broadcast(&Control::Commit { epoch, segment });
            self.handle_commit(epoch, segment);
        }
    }

    pub(super) fn handle_commit(&mut self, epoch: Epoch, segment: SegmentId) -> bool {
        let committed = self.shared.epochs.switch_to(epoch).is_some_and(|switch| switch.commit(segment));
        if committed {
            self.shared.actions.push_back(Action::Switched { epoch, segment });
            self.departures.resend(&mut self.shared);
            self.refuse_impossible();
        }
        committed
    }
}
