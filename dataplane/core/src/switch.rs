//! Changing the plan under way: all prepare, the leader proposes (or somebody else says that all have prepared), each promises how
//! far it will go, the leader commits to the maximum. Nobody stops unless the commit takes longer than the promised segments last.

use crate::CoreError;
use crate::communicator::{Action, Communicator};
use crate::epoch::{Epoch, EpochPlan};
use crate::message::Control;
use harmonaize_plan::Participant;

/// A plan that is about to take over.
#[derive(Debug)]
pub(crate) struct Switch {
    pub(crate) epoch: Epoch,
    /// This participant's links for it are up.
    pub(crate) ready: bool,
    /// This participant's promise: first segment that it will not begin before the commit.
    pub(crate) promised_below: Option<u64>,
    /// Leader: everyone's promises.
    promises: Vec<Option<u64>>,
    proposed: bool,
    /// First segment of the new plan.
    pub(crate) commit: Option<u64>,
}

impl Switch {
    pub(crate) fn new(epoch: Epoch, participants: u32) -> Self {
        Self {
            epoch,
            ready: false,
            promised_below: None,
            promises: vec![None; participants as usize],
            proposed: false,
            commit: None,
        }
    }

    /// Leader: whether it is time to propose, given the highest epoch for which each participant is prepared. Says so once.
    pub(crate) fn propose(&mut self, prepared: &[u32]) -> bool {
        let open = self.ready && self.commit.is_none();
        let all = open && prepared.iter().all(|epoch| *epoch == self.epoch.number());
        all && !std::mem::replace(&mut self.proposed, true)
    }

    /// Leader: takes a promise; the switch point once all have promised. Says so once.
    pub(crate) fn record_promise(&mut self, from: Participant, below: u64) -> Option<u64> {
        *self.promises.get_mut(from.0 as usize)? = Some(below);
        if self.commit.is_some() {
            return None;
        }
        self.promises.iter().copied().try_fold(0, |most, promise| Some(most.max(promise?)))
    }

    /// Whether a segment runs under the new plan (`Some(true)`), under the old one, or must not begin yet (`None`).
    pub(crate) fn governs(&self, segment: u64) -> Option<bool> {
        match (self.commit, self.promised_below) {
            (Some(commit), _) => Some(segment >= commit),
            (None, Some(below)) if segment >= below => None,
            _ => Some(false),
        }
    }
}

impl Communicator {
    /// Prepares a new plan. [`Communicator::handle_links_up`] must follow when its links are, or [`Communicator::abandon`].
    /// The links to the participants in `carried` are today's, with what is under way on them; at the other end it must be the
    /// same ones.
    ///
    /// # Errors
    /// If another change is under way, the epoch is not newer, members, channels or chunk differ from today's, or a link cannot be
    /// carried over: it is to nobody, is down, or landing slots differ.
    pub fn handle_plan_change(
        &mut self,
        decided: EpochPlan,
        carried: &[Participant],
    ) -> Result<(), CoreError> {
        self.check_open()?;
        let today = &self.current.config;
        if self.next.is_some() {
            return Err(CoreError::BadPlan("another change is under way"));
        }
        if decided.epoch <= today.epoch {
            return Err(CoreError::BadPlan("the epoch is not newer"));
        }
        if self.withdrawn.is_some_and(|withdrawn| decided.epoch <= withdrawn) {
            return Err(CoreError::BadPlan("another participant gave up this change"));
        }
        if decided.plan.group() != &self.group {
            return Err(CoreError::BadPlan("members differ"));
        }
        if decided.channels != today.channels || decided.tuning.chunk_bytes != today.tuning.chunk_bytes {
            return Err(CoreError::BadPlan("channels or chunk size differ"));
        }
        if carried.iter().any(|peer| self.departures.is_down(*peer)) {
            return Err(CoreError::BadPlan("a link to carry over is down"));
        }
        let mut epoch = Epoch::new(decided, self.me, self.access.clone())?;
        epoch.reuse_links(&self.current, carried)?;
        self.next = Some(Switch::new(epoch, self.group.participants()));
        Ok(())
    }

    /// Gives up a change that some participant cannot prepare, for everybody: the others get [`Action::Retire`] of that
    /// epoch. False if it is too late for that: promises were made, and all links were up.
    pub fn abandon(&mut self, epoch: u32) -> bool {
        self.give_up(epoch) && {
            self.send_withdrawn(epoch);
            true
        }
    }

    fn give_up(&mut self, epoch: u32) -> bool {
        let early = self
            .next
            .take_if(|s| s.epoch.number() == epoch && s.promised_below.is_none() && s.commit.is_none())
            .is_some();
        if early {
            self.withdrawn = self.withdrawn.max(Some(epoch));
            self.departures.withdraw();
        }
        early
    }

    fn send_withdrawn(&mut self, epoch: u32) {
        if self.leader() == self.me {
            self.broadcast_control(&Control::Withdrawn { epoch });
        } else {
            self.send_control(self.leader(), Control::Withdrawn { epoch });
        }
    }

    /// As [`Communicator::abandon`], when it is found here.
    pub(crate) fn withdraw(&mut self, epoch: u32) {
        if self.give_up(epoch) {
            self.actions.push_back(Action::Retire { epoch });
            self.send_withdrawn(epoch);
        }
    }

    /// Somebody gave up a change: the leader, then, for all.
    pub(crate) fn handle_withdrawn(&mut self, from: Participant, epoch: u32) {
        let leads = self.leader() == self.me;
        if self.failure().is_some() || !(leads || from == self.leader()) || epoch <= self.current.number() {
            return;
        }
        let committed = self.next.as_ref().is_some_and(|s| s.epoch.number() == epoch && s.commit.is_some());
        if committed {
            return;
        }
        if let Some(switch) = self.next.as_mut().filter(|switch| switch.epoch.number() == epoch) {
            switch.promised_below = None;
            self.withdraw(epoch);
        } else if leads && self.withdrawn.is_none_or(|before| before < epoch) {
            self.send_withdrawn(epoch);
        }
        self.withdrawn = self.withdrawn.max(Some(epoch));
        self.refuse_impossible();
    }

    /// All links of a plan in preparation are up here.
    pub fn handle_links_up(&mut self, epoch: u32) {
        if self.failure().is_some() {
            return;
        }
        let Some(switch) = self.next.as_mut().filter(|switch| switch.epoch.number() == epoch) else { return };
        if self.departures.next_is_down() {
            return self.withdraw(epoch);
        }
        switch.ready = true;
        if let Some(prepared) = self.prepared.get_mut(self.me.0 as usize) {
            *prepared = epoch;
        }
        if self.leader() == self.me {
            self.propose_if_leader();
        } else {
            self.send_control(self.leader(), Control::Prepared { epoch });
        }
    }

    /// The lowest participant leads.
    pub(crate) fn leader(&self) -> Participant {
        Participant(0)
    }

    /// Proposes a prepared plan, if this participant leads and all are prepared.
    pub(crate) fn propose_if_leader(&mut self) {
        if self.leader() != self.me || self.failure().is_some() {
            return;
        }
        let Some(switch) = &mut self.next else { return };
        let epoch = switch.epoch.number();
        if switch.propose(&self.prepared) {
            self.broadcast_control(&Control::Propose { epoch });
            self.send_promise(epoch);
        }
    }

    /// Somebody who need not be trusted says that all participants have prepared a plan: promises are made without waiting for the
    /// leader to hear so over links that may be slow. If it is wrong, the leader misses a promise, and nothing is switched.
    pub fn handle_all_prepared(&mut self, epoch: u32) {
        let ready = |switch: &Switch| switch.epoch.number() == epoch && switch.ready;
        if self.failure().is_none() && self.next.as_ref().is_some_and(ready) {
            self.send_promise(epoch);
        }
    }

    /// Promises, once, not to begin segments beyond those at hand until the commit.
    fn send_promise(&mut self, epoch: u32) {
        let below = self.begun + self.segments_ahead();
        let Some(switch) = self.next.as_mut().filter(|switch| switch.promised_below.is_none()) else {
            return;
        };
        switch.promised_below = Some(below);
        if self.leader() == self.me {
            self.handle_promise(self.me, epoch, below);
        } else {
            self.send_control(self.leader(), Control::Promise { epoch, below });
        }
    }

    pub(crate) fn handle_proposal(&mut self, from: Participant, epoch: u32) -> bool {
        if from != self.leader() {
            return false;
        }
        if epoch <= self.current.number() {
            // The commit came before it, over links that are quicker.
            return true;
        }
        let Some(switch) = self.next.as_ref().filter(|switch| switch.epoch.number() == epoch) else {
            // We gave it up, which the leader will hear.
            return self.withdrawn.is_some_and(|withdrawn| epoch <= withdrawn);
        };
        if !switch.ready {
            return false;
        }
        self.send_promise(epoch);
        true
    }

    pub(crate) fn handle_promise(&mut self, from: Participant, epoch: u32, below: u64) {
        let Some(switch) = self.next.as_mut().filter(|switch| switch.epoch.number() == epoch) else { return };
        if let Some(segment) = switch.record_promise(from, below) {
            self.broadcast_control(&Control::Commit { epoch, segment });
            self.handle_commit(epoch, segment);
        }
    }

    pub(crate) fn handle_commit(&mut self, epoch: u32, segment: u64) -> bool {
        let Some(switch) = self.next.as_mut().filter(|switch| switch.epoch.number() == epoch) else {
            return false;
        };
        if switch.commit.is_some() || switch.promised_below.is_none_or(|below| segment < below) {
            return false;
        }
        switch.commit = Some(segment);
        self.actions.push_back(Action::Switched { epoch, segment });
        self.resend_departures();
        self.refuse_impossible();
        true
    }

    /// Makes the new plan the current one when every segment of the old one is acknowledged by all.
    pub(crate) fn retire_epoch(&mut self) {
        let everyone = self.acknowledgements.acked_by_all();
        let Some(switch) = self.next.take_if(|s| s.commit.is_some_and(|commit| everyone >= commit)) else {
            return;
        };
        let mut old = std::mem::replace(&mut self.current, switch.epoch);
        self.current.take_over_streams(&mut old);
        self.departures.retire();
        self.actions.push_back(Action::Retire { epoch: old.number() });
    }
}
