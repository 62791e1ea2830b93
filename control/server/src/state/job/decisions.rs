//! What control decided about plans, why, and when each stage was reached: a bounded list, newest last.

use crate::state::reason::Reason;
use harmonaize_abi::{CommunicatorId, Epoch, Nanos};
use harmonaize_planner::{PlanReason, Score};
use std::collections::VecDeque;
use std::time::Duration;

/// Most decisions that are kept.
const MOST_DECISIONS: usize = 256;

/// Why control planned anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// An agent's report on a path moved an estimate.
    CongestionReport(Noticed),
    /// A probe told that a link is congested no more, or differently.
    Probe {
        /// The host that sent the packets.
        host: String,
    },
    /// A link passes nothing any more, or again; or connections lead another way than was known.
    Paths {
        /// What was found, in words.
        what: String,
    },
    /// An estimate faded because nothing has spoken for it for long.
    Faded,
    /// A communicator formed or ended.
    Communicators,
    /// An aggregator is there, may be asked again, or serves no more what it was granted.
    Aggregators,
    /// A drain or maintenance began or ended.
    Withdrawn,
    /// The topology's file was read again, and says something else.
    Topology,
    /// The ranks of a communicator agreed on another budget.
    Budget,
    /// A tenant has been promised something for a communicator.
    Agreement,
    /// A tenant has said which of its communicators matters how much to it.
    Hints,
    /// A communicator's coded operations lose or send otherwise than was thought.
    Losses,
    /// An operator gave an order up that was pinned.
    Unpinned,
    /// An agent's links are to go over TCP for a hand-over, or need not any more.
    HandOver,
    /// A communicator can be changed again, after a change that was under way or had failed.
    Settled,
}

/// A report that made control plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Noticed {
    /// The host that told.
    pub host: String,
    /// The path, in words: hosts and switches.
    pub path: String,
    /// Level and cause, in words.
    pub what: String,
    /// Since when the agent thinks so, CLOCK_REALTIME by its own clock.
    pub since: Nanos,
    /// When the agent found it, likewise.
    pub found: Nanos,
    /// When control received it.
    pub received: Duration,
}

impl std::fmt::Display for Trigger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::CongestionReport(noticed) => {
                write!(f, "{} tells of {} on {}", noticed.host, noticed.what, noticed.path)
            }
            Self::Probe { host } => write!(f, "a probe from {host} moved an estimate"),
            Self::Paths { what } => f.write_str(what),
            Self::Faded => f.write_str("nothing has spoken for an estimate for long"),
            Self::Communicators => f.write_str("a communicator formed or ended"),
            Self::Aggregators => f.write_str("an aggregator has come, or what it was granted has changed"),
            Self::Agreement => f.write_str("something was promised for a communicator"),
            Self::Hints => f.write_str("a tenant put its tasks in order"),
            Self::Losses => f.write_str("coded operations lose or send otherwise than was thought"),
            Self::Withdrawn => f.write_str("a drain or maintenance began or ended"),
            Self::Topology => f.write_str("the topology has changed"),
            Self::Budget => f.write_str("the ranks of a communicator agreed on another budget"),
            Self::Unpinned => f.write_str("an order is control's to choose again"),
            Self::HandOver => {
                f.write_str("an agent's links are to go over TCP for a hand-over, or need not any more")
            }
            Self::Settled => f.write_str("a communicator can be changed again"),
        }
    }
}

/// What became of one communicator's change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// Agents prepare it or switch to it.
    #[default]
    UnderWay,
    /// All use it.
    InUse,
    /// It was given up; why.
    GivenUp(String),
    /// The communicator ended first.
    Ended,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::UnderWay => f.write_str("under way"),
            Self::InUse => f.write_str("in use"),
            Self::GivenUp(why) => write!(f, "given up: {why}"),
            Self::Ended => f.write_str("ended"),
        }
    }
}

/// One communicator's part in a decision. Times are control's: since it started.
#[derive(Clone, Debug, PartialEq)]
pub struct Changed {
    /// Which.
    pub communicator: CommunicatorId,
    /// The new epoch.
    pub epoch: Epoch,
    /// Why.
    pub reason: Reason,
    /// When the change was sent.
    pub sent: Duration,
    /// When all had prepared it.
    pub prepared: Option<Duration>,
    /// When the first used it.
    pub first_switched: Option<Duration>,
    /// When all used it.
    pub switched: Option<Duration>,
    /// What became of it.
    pub outcome: Outcome,
}

impl Changed {
    /// A change that was sent just now.
    pub(crate) fn new(communicator: CommunicatorId, epoch: Epoch, reason: Reason, sent: Duration) -> Self {
        let outcome = Outcome::UnderWay;
        Self {
            communicator,
            epoch,
            reason,
            sent,
            prepared: None,
            first_switched: None,
            switched: None,
            outcome,
        }
    }
}

/// A decision that changed something.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// Counts from 1.
    pub number: u64,
    /// When it was taken: time since control started.
    pub at: Duration,
    /// Why.
    pub trigger: Trigger,
    /// What was predicted if all had stayed as it was.
    pub before: Score,
    /// What is predicted for the plan.
    pub after: Score,
    /// Why this plan.
    pub reason: PlanReason,
    /// Who changes.
    pub changes: Vec<Changed>,
}

/// How often control has planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Times that a plan was made.
    pub plans: u64,
    /// Of those, the ones that changed something.
    pub decisions: u64,
    /// Changes of communicators that all came to use.
    pub switches: u64,
    /// Changes that were given up.
    pub given_up: u64,
    /// Plans that did not pass the check.
    pub unfit: u64,
}

/// What is kept of decisions.
#[derive(Debug, Default)]
pub(crate) struct Decisions {
    recent: VecDeque<Decision>,
    pub counts: Counts,
}

impl Decisions {
    /// Number that the next decision has.
    pub(crate) fn next(&self) -> u64 {
        self.counts.decisions + 1
    }

    pub(crate) fn add(&mut self, decision: Decision) {
        self.counts.decisions = decision.number;
        if self.recent.len() == MOST_DECISIONS {
            self.recent.pop_front();
        }
        self.recent.push_back(decision);
    }

    /// A communicator's part in a decision that is still kept.
    pub(crate) fn changed(
        &mut self,
        number: Option<u64>,
        communicator: CommunicatorId,
    ) -> Option<&mut Changed> {
        let decision = self.recent.iter_mut().rev().find(|decision| Some(decision.number) == number)?;
        decision.changes.iter_mut().find(|changed| changed.communicator == communicator)
    }

    /// Whether a decision that is still kept came of what tenants run and are promised, and not of the
    /// fabric.
    pub(crate) fn is_of_tenants(&self, number: Option<u64>) -> bool {
        let mut kept = self.recent.iter().rev();
        let decision = kept.find(|decision| Some(decision.number) == number);
        decision.is_some_and(|decision| {
            matches!(decision.trigger, Trigger::Communicators | Trigger::Agreement | Trigger::Settled)
        })
    }

    pub(crate) fn switched(&mut self, now: Duration, number: Option<u64>, communicator: CommunicatorId) {
        self.counts.switches += u64::from(number.is_some());
        if let Some(changed) = self.changed(number, communicator) {
            (changed.switched, changed.outcome) = (Some(now), Outcome::InUse);
        }
    }

    pub(crate) fn given_up(&mut self, number: Option<u64>, communicator: CommunicatorId, why: &str) {
        self.counts.given_up += u64::from(number.is_some());
        if let Some(changed) = self.changed(number, communicator) {
            changed.outcome = Outcome::GivenUp(why.to_owned());
        }
    }

    pub(crate) fn ended(&mut self, number: Option<u64>, communicator: CommunicatorId) {
        if let Some(changed) = self.changed(number, communicator) {
            changed.outcome = Outcome::Ended;
        }
    }

    /// Returns what was decided lately, oldest first.
    pub(crate) fn recent(&self) -> impl Iterator<Item = &Decision> {
        self.recent.iter()
    }
}
