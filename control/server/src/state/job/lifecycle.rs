//! The stages of a communicator's life, and what it runs by in each epoch.

use crate::state::job::reduction::AggregationChoice;
use crate::state::reason::Reason;
use harmonaize_abi::Epoch;
use harmonaize_planner::{
    AlgorithmChoice, Assignment, AssignmentReason, CodecChoice, CongestionChoices, HostId, Nanos, Rate,
    RateLimits,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What a plan predicts of a communicator.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Planned {
    /// What each host sends to the next, as planned.
    pub share: Rate,
    /// What links are held to.
    pub pace: Option<Rate>,
    /// Predicted time of a typical operation.
    pub time: Nanos,
    /// That time relative to the communicator alone on an idle fabric.
    pub slowdown: f64,
    /// Whether it has less for communicators that matter more to its tenant.
    pub gives_way: bool,
    /// Why.
    pub reason: AssignmentReason,
}

impl From<&Assignment> for Planned {
    fn from(assignment: &Assignment) -> Self {
        let Assignment { share, rate_limit: pace, time, slowdown, yields: gives_way, reason, .. } =
            assignment;
        let (share, pace, time, slowdown, gives_way) = (*share, *pace, *time, *slowdown, *gives_way);
        Self { share, pace, time, slowdown, gives_way, reason: reason.clone() }
    }
}

/// What a communicator runs by in one epoch.
#[derive(Clone, Debug)]
pub(crate) struct EpochConfig {
    /// Its number; the first is 1.
    pub epoch: Epoch,
    /// Participants along the ring.
    pub order: Vec<u32>,
    /// Source ports that its connections hold, by connecting host.
    pub ports: Vec<(HostId, u16)>,
    /// Source ports of each link between two participants, the lower first.
    pub links: BTreeMap<(u32, u32), Vec<u16>>,
    /// Participants all of whose links go over TCP alone, where links go over RDMA otherwise.
    pub over_tcp: BTreeSet<u32>,
    /// What the planner predicts of it; none where it was not planned.
    pub plan: Option<Planned>,
    /// What its connections are held to.
    pub rate_limits: RateLimits,
    /// By which TCP congestion control its links go.
    pub congestion: CongestionChoices,
    /// How its tensors travel.
    pub codec: CodecChoice,
    /// Which algorithm operations take, by size.
    pub algorithm: AlgorithmChoice,
    /// How its large operations are summed.
    pub aggregation: AggregationChoice,
}

impl EpochConfig {
    /// Takes up a port that a link's connection has already, in place of one that is not known.
    pub(crate) fn learn_port(&mut self, ends: (u32, u32), held: (HostId, u16)) {
        let ports = self.links.entry(ends).or_default();
        match ports.iter_mut().find(|port| **port == 0) {
            Some(slot) => *slot = held.1,
            None => ports.push(held.1),
        }
        if !self.ports.contains(&held) {
            self.ports.push(held);
        }
    }
}

/// A change to an epoch that agents prepare or switch to.
#[derive(Debug)]
pub(crate) struct Change {
    /// The epoch that is to be in use.
    pub to: EpochConfig,
    /// Why.
    pub reason: Reason,
    /// The decision that it is part of.
    pub decision: Option<u64>,
    /// Participants that have prepared it.
    pub prepared: BTreeSet<usize>,
    /// Participants that use it.
    pub switched: BTreeSet<usize>,
    /// Until when all must have prepared it; none once they have.
    pub deadline: Option<Duration>,
}

impl Change {
    /// A change that no participant has prepared yet.
    pub(crate) fn new(to: EpochConfig, reason: Reason, decision: Option<u64>, deadline: Duration) -> Self {
        let (prepared, switched) = (BTreeSet::new(), BTreeSet::new());
        Self { to, reason, decision, prepared, switched, deadline: Some(deadline) }
    }

    /// Whether some participant may use it already.
    pub(crate) fn in_use(&self) -> bool {
        self.deadline.is_none() || !self.switched.is_empty()
    }
}

/// A change that has become the epoch in use.
#[derive(Debug)]
pub(crate) struct Completed {
    /// The epoch that was in use before; none where this is the first.
    pub before: Option<Box<EpochConfig>>,
    /// Why it was changed.
    pub reason: Reason,
    /// The decision that the change was part of.
    pub decision: Option<u64>,
}

/// The stage of a communicator. Ranks may leave it in each of them.
#[derive(Debug, Default)]
pub(crate) enum Lifecycle {
    /// Its first epoch is not proposed yet.
    #[default]
    New,
    /// Its first epoch is prepared.
    Forming(Box<Change>),
    /// An epoch is in use.
    Running(Box<EpochConfig>),
    /// An epoch is in use while the next is prepared or switched to.
    Changing { from: Box<EpochConfig>, change: Box<Change> },
}

impl Lifecycle {
    /// Returns the epoch in use; none while the first is prepared.
    pub(crate) fn current(&self) -> Option<&EpochConfig> {
        match self {
            Self::New | Self::Forming(_) => None,
            Self::Running(current) | Self::Changing { from: current, .. } => Some(current),
        }
    }

    /// Returns the epoch in use, to be amended.
    pub(crate) fn current_mut(&mut self) -> Option<&mut EpochConfig> {
        match self {
            Self::New | Self::Forming(_) => None,
            Self::Running(current) | Self::Changing { from: current, .. } => Some(current),
        }
    }

    /// Returns the change under way.
    pub(crate) fn change(&self) -> Option<&Change> {
        match self {
            Self::Forming(change) | Self::Changing { change, .. } => Some(change),
            Self::New | Self::Running(_) => None,
        }
    }

    /// Returns the change under way, to be advanced.
    pub(crate) fn change_mut(&mut self) -> Option<&mut Change> {
        match self {
            Self::Forming(change) | Self::Changing { change, .. } => Some(change),
            Self::New | Self::Running(_) => None,
        }
    }

    /// Returns the epoch in use and the one under way.
    pub(crate) fn configs(&self) -> impl Iterator<Item = &EpochConfig> {
        self.current().into_iter().chain(self.change().map(|change| &change.to))
    }

    /// Returns the epoch in use and the one under way, to be amended.
    pub(crate) fn configs_mut(&mut self) -> impl Iterator<Item = &mut EpochConfig> {
        let (current, change) = match self {
            Self::New => (None, None),
            Self::Forming(change) => (None, Some(change)),
            Self::Running(current) => (Some(current), None),
            Self::Changing { from, change } => (Some(from), Some(change)),
        };
        current.map(AsMut::as_mut).into_iter().chain(change.map(|change| &mut change.to))
    }

    /// Begins a change. The communicator is new, or runs and has none under way.
    pub(crate) fn begin(&mut self, change: Change) {
        let change = Box::new(change);
        let last = self.current().map_or(Epoch(0), |current| current.epoch);
        debug_assert!(change.to.epoch > last, "epoch {} after {last}", change.to.epoch);
        *self = match std::mem::take(self) {
            Self::New => Self::Forming(change),
            Self::Running(from) => Self::Changing { from, change },
            other => {
                debug_assert!(false, "a change is begun in {other:?}");
                other
            }
        };
    }

    /// Makes the epoch under way the one in use; none where no change is under way.
    pub(crate) fn complete(&mut self) -> Option<Completed> {
        let (before, change) = match std::mem::take(self) {
            Self::Forming(change) => (None, change),
            Self::Changing { from, change } => (Some(from), change),
            other => {
                *self = other;
                return None;
            }
        };
        let Change { to, reason, decision, .. } = *change;
        *self = Self::Running(Box::new(to));
        Some(Completed { before, reason, decision })
    }

    /// Gives the change under way up and returns it; none where no epoch is in use, or none changes.
    pub(crate) fn abandon(&mut self) -> Option<Box<Change>> {
        match std::mem::take(self) {
            Self::Changing { from, change } => {
                *self = Self::Running(from);
                Some(change)
            }
            other => {
                *self = other;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_codec::Budget;
    use harmonaize_planner::CodecReason;

    fn config(epoch: u32) -> EpochConfig {
        EpochConfig {
            epoch: Epoch(epoch),
            order: vec![0, 1],
            ports: Vec::new(),
            links: BTreeMap::new(),
            over_tcp: BTreeSet::new(),
            plan: None,
            rate_limits: RateLimits::default(),
            congestion: CongestionChoices::default(),
            codec: CodecChoice::exact(Budget::Exact, CodecReason::Exact),
            algorithm: AlgorithmChoice::default(),
            aggregation: AggregationChoice::default(),
        }
    }

    fn change(epoch: u32) -> Change {
        Change::new(config(epoch), Reason::Formed, Some(7), Duration::from_secs(1))
    }

    #[test]
    fn an_epoch_is_in_use_once_complete() {
        let mut life = Lifecycle::default();
        life.begin(change(1));
        assert!(life.current().is_none() && life.change().is_some());
        assert!(life.abandon().is_none(), "the first epoch has none to return to");
        assert!(life.complete().is_some_and(|done| done.before.is_none() && done.decision == Some(7)));
        life.begin(change(3));
        let epochs: Vec<u32> = life.configs().map(|config| config.epoch.0).collect();
        let deadline = life.change().and_then(|change| change.deadline);
        assert_eq!((epochs.as_slice(), deadline), ([1, 3].as_slice(), Some(Duration::from_secs(1))));
        assert!(
            life.complete().is_some_and(|done| done.before.is_some_and(|before| before.epoch == Epoch(1)))
        );
        assert!(life.complete().is_none() && life.current().is_some_and(|current| current.epoch == Epoch(3)));
    }

    #[test]
    fn a_change_given_up_leaves_the_epoch_in_use() {
        let mut life = Lifecycle::Running(Box::new(config(2)));
        life.begin(change(3));
        assert_eq!(life.configs_mut().count(), 2);
        assert!(life.abandon().is_some_and(|change| change.to.epoch == Epoch(3)));
        assert!(matches!(&life, Lifecycle::Running(current) if current.epoch == Epoch(2)));
    }
}
