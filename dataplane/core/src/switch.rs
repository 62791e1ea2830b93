//! A plan that is about to take over. It holds who is prepared for it, what was promised, and from which segment on it
//! governs.

use crate::epoch::EpochState;
use harmonaize_abi::{Epoch, SegmentId};
use harmonaize_plan::Participant;
use serde::{Deserialize, Serialize};

/// A plan that is about to take over.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Switch {
    pub(crate) epoch: EpochState,
    /// Whether this participant's links for it are up.
    pub(crate) ready: bool,
    /// This participant's promise: the first segment that it will not begin before the commit.
    pub(crate) promised_below: Option<SegmentId>,
    /// At the leader: everyone's promises.
    promises: Vec<Option<SegmentId>>,
    proposed: bool,
    /// The first segment of the new plan.
    commit: Option<SegmentId>,
}

impl Switch {
    pub(crate) fn new(epoch: EpochState, participants: u32) -> Self {
        Self {
            epoch,
            ready: false,
            promised_below: None,
            promises: vec![None; participants as usize],
            proposed: false,
            commit: None,
        }
    }

    /// At the leader: whether it is time to propose, given the highest epoch for which each participant is prepared. True once.
    pub(crate) fn propose(&mut self, prepared: &[Epoch]) -> bool {
        let open = self.ready && self.commit.is_none();
        let all = open && prepared.iter().all(|epoch| *epoch == self.epoch.number());
        all && !std::mem::replace(&mut self.proposed, true)
    }

    /// At the leader: takes a promise. Returns the segment to switch at once all have promised, before the commit.
    pub(crate) fn record_promise(&mut self, from: Participant, below: SegmentId) -> Option<SegmentId> {
        *self.promises.get_mut(from.0 as usize)? = Some(below);
        if self.commit.is_some() {
            return None;
        }
        self.promises.iter().copied().try_fold(SegmentId(0), |most, promise| Some(most.max(promise?)))
    }

    /// Commits to a segment. False if that is done already, or breaks this participant's promise.
    pub(crate) fn commit(&mut self, segment: SegmentId) -> bool {
        let may = self.commit.is_none() && self.promised_below.is_some_and(|below| segment >= below);
        if may {
            self.commit = Some(segment);
        }
        may
    }

    /// The first segment of the new plan, once that is agreed on.
    pub(crate) fn committed(&self) -> Option<SegmentId> {
        self.commit
    }

    /// Whether a segment runs under the new plan (`Some(true)`), under the old one, or must not begin yet (`None`).
    pub(crate) fn governs(&self, segment: SegmentId) -> Option<bool> {
        match (self.commit, self.promised_below) {
            (Some(commit), _) => Some(segment >= commit),
            (None, Some(below)) if segment >= below => None,
            _ => Some(false),
        }
    }
}
