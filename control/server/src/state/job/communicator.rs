//! A communicator's life from its recipe to its end.

use crate::state::job::codec::CodecState;
use crate::state::job::lifecycle::{Change, Completed, EpochConfig, Lifecycle};
use crate::state::job::refusals::Refusals;
use crate::state::output::SessionId;
use crate::state::settings::Settings;
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_api::v1::{self, FailureKind, to_agent};
use harmonaize_codec::{Budget, Codec};
use harmonaize_planner::{AlgorithmOverride, DirectedLink, HostId, Topology, Tuning, exchange_usage};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// How many changes of one communicator control makes in a while. What passes nothing, or was withdrawn, is
/// left however often that happens.
pub(crate) const MOST_RECENT: usize = 8;

/// Larger groups stay exact, and send to nobody but the next: each host would send to very many at once.
pub(crate) const MOST_DIRECT: usize = 64;

/// First and last pause after a change that was given up.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A communicator.
#[derive(Debug)]
pub(crate) struct Communicator {
    pub tenant: String,
    pub name: String,
    pub ranks: u32,
    /// Its participants; indices are the same in every epoch.
    pub members: Vec<Member>,
    pub tuning: Tuning,
    /// Its stage, with the epochs that it runs by.
    pub lifecycle: Lifecycle,
    /// Number that the next epoch gets.
    pub next_epoch: Epoch,
    pub last_change: String,
    /// Whether an operator chose the order: then it is no longer control's to choose.
    pub pinned: bool,
    /// When its plan changed lately, oldest first.
    pub changes: VecDeque<Duration>,
    /// Until when it is left alone because changes were given up.
    pub backoff_until: Option<Duration>,
    /// Changes given up in a row.
    pub failures: u32,
    /// What its ranks let be lost, and what its operations told of codecs.
    pub coding: CodecState,
    /// Aggregators that it does without for a while.
    pub refused: Refusals,
    /// Where it goes on from another: by rank, one more than the rank there, and 0 for newcomers.
    pub before: Vec<u32>,
    /// Which it goes on from, until its own first epoch is in use.
    pub succeeds: Option<CommunicatorId>,
    /// Whether control has started since it formed, and not all of its agents have been back.
    pub restarted: bool,
}

/// A participant.
#[derive(Debug)]
pub(crate) struct Member {
    pub host: HostId,
    /// None only while control waits for it to come back.
    pub session: Option<SessionId>,
    /// Until when it may come back; none while it has a session.
    pub lease: Option<Duration>,
    /// Ascending.
    pub ranks: Vec<u32>,
    /// By rank: the agent's number of the join.
    pub requests: Vec<(u32, u64)>,
    pub departed: BTreeSet<u32>,
    pub closed: bool,
    /// What its agent holds for it, as that said last.
    pub links: v1::LinkUsage,
}

/// Why a communicator ends.
#[derive(Clone, Debug)]
pub(crate) struct EndCause {
    pub kind: FailureKind,
    pub ranks: Vec<u32>,
    pub detail: String,
}

impl Communicator {
    /// Returns what it runs by; none while the first epoch is prepared.
    pub(crate) fn current(&self) -> Option<&EpochConfig> {
        self.lifecycle.current()
    }

    /// Returns the change to another epoch that is under way.
    pub(crate) fn change(&self) -> Option<&Change> {
        self.lifecycle.change()
    }

    /// Returns what it is about to run by, else what it runs by.
    pub(crate) fn latest(&self) -> Option<&EpochConfig> {
        self.change().map(|change| &change.to).or_else(|| self.current())
    }

    /// Returns the hosts of two participants.
    pub(crate) fn hosts_of(&self, (one, other): (u32, u32)) -> Option<(HostId, HostId)> {
        let host = |index: u32| self.members.get(index as usize).map(|member| member.host);
        host(one).zip(host(other))
    }

    /// Whether its first epoch is not in use yet.
    pub(crate) fn is_forming(&self) -> bool {
        self.current().is_none()
    }

    /// Whether it can be given another epoch now. All its ranks must be there. No change may be under way, or
    /// have been given up lately.
    pub(crate) fn can_change(&self) -> bool {
        self.phase() == v1::Phase::Running && self.backoff_until.is_none()
    }

    /// Returns the number of the epoch in use as messages have it: 0 while the first is prepared.
    pub(crate) fn epoch(&self) -> Epoch {
        self.current().map_or(Epoch(0), |current| current.epoch)
    }

    /// Returns the number of the epoch under way as messages have it: 0 where none is.
    pub(crate) fn pending_epoch(&self) -> Epoch {
        self.change().map_or(Epoch(0), |change| change.to.epoch)
    }

    /// Returns the codec of the epoch in use.
    pub(crate) fn codec(&self) -> Codec {
        self.current().map_or(Codec::EXACT, |current| current.codec.codec)
    }

    /// Takes note of a change of plan.
    pub(crate) fn changes_now(&mut self, now: Duration) {
        if self.changes.len() >= MOST_RECENT {
            self.changes.pop_front();
        }
        self.changes.push_back(now);
    }

    /// Makes the epoch under way the one in use.
    pub(crate) fn complete_change(&mut self, now: Duration) -> Option<Completed> {
        let codec = self.codec();
        let completed = self.lifecycle.complete()?;
        if self.codec() != codec {
            self.coding.changed(now);
        }
        Some(completed)
    }

    /// Leaves it alone for a while, for a change was given up.
    pub(crate) fn back_off(&mut self, now: Duration) {
        self.failures = self.failures.saturating_add(1);
        let pause = BACKOFF.0.saturating_mul(1 << (self.failures - 1).min(16)).min(BACKOFF.1);
        self.backoff_until = Some(now.saturating_add(pause));
    }

    /// Returns why its contributions cannot be promised to be added in one order; none where they can.
    pub(crate) fn unordered(&self, settings: &Settings) -> Option<&'static str> {
        if self.members.len() < 2 {
            return None;
        }
        if !settings.algorithms_of(&self.tenant).iter().all(AlgorithmOverride::keeps_order) {
            return Some("the provider has chosen a way for this tenant's operations");
        }
        self.indirect()
    }

    /// Returns why its operations cannot go straight from each of its hosts to all; none where they can.
    pub(crate) fn indirect(&self) -> Option<&'static str> {
        (self.members.len() > MOST_DIRECT).then_some("too many hosts to send to each other directly")
    }

    /// Returns the part of what a host sends that crosses each link where all send to all. Nothing where all
    /// are neighbours in the ring.
    pub(crate) fn exchange(&self) -> &[(DirectedLink, f64)] {
        if self.members.len() > 2 { &self.coding.usage } else { &[] }
    }

    /// This budget holds for all ranks from the next epoch on.
    pub(crate) fn agree_on_budget(&mut self, topology: &Topology, budget: Budget) {
        self.coding.budgets.clear();
        self.coding.agreed = budget;
        self.coding.controller.unbar();
        self.learn_usage(topology);
    }

    /// Learns which links it would load.
    pub(crate) fn learn_usage(&mut self, topology: &Topology) {
        if self.coding.usage.is_empty() && self.members.len() <= MOST_DIRECT {
            let hosts: Vec<HostId> = self.members.iter().map(|member| member.host).collect();
            self.coding.usage = exchange_usage(topology, &hosts);
        }
    }

    /// Whether its ranks let something be lost or did, or its tensors have zeros.
    pub(crate) fn is_coded(&self) -> bool {
        let Some(current) = self.current() else { return false };
        let CodecState { agreed, controller, .. } = &self.coding;
        let lossy = [agreed, &current.codec.budget].into_iter().any(|budget| *budget != Budget::Exact);
        lossy || current.codec.codec != Codec::EXACT || controller.learned().next().is_some()
    }

    /// Checks what holds between calls: an epoch never goes back, and ports and links are of participants
    /// that there are.
    pub(crate) fn check_invariants(&self, topology: &Topology) {
        let epochs: Vec<Epoch> = self.lifecycle.configs().map(|config| config.epoch).collect();
        debug_assert!(epochs.is_sorted_by(|one, next| one < next), "epochs {epochs:?}");
        debug_assert!(
            epochs.iter().all(|epoch| *epoch < self.next_epoch),
            "epochs {epochs:?} of {}",
            self.next_epoch
        );
        let hosts = topology.hosts().len();
        debug_assert!(self.members.iter().all(|member| member.host.0 < hosts), "a host that is not there");
        debug_assert!(
            self.members.iter().all(|member| member.session.is_some() != member.lease.is_some()),
            "who has no session has a lease"
        );
        debug_assert!(!self.is_forming() || self.lease().is_none(), "it forms without an agent");
        let ranks: usize = self.members.iter().map(|member| member.ranks.len()).sum();
        debug_assert_eq!(ranks, self.ranks as usize, "each rank is some participant's");
        for config in self.lifecycle.configs() {
            let mut order = config.order.clone();
            order.sort_unstable();
            debug_assert!(order.into_iter().eq(0..self.members.len() as u32), "order {:?}", config.order);
        }
    }

    /// Returns when it has waited long enough for its agents.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        // Whether one that is away has prepared an epoch, nobody knows.
        self.lease().or_else(|| self.change()?.deadline)
    }

    /// Returns when the next thing of it is due, of all that waits for a time.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        let times = [self.deadline(), self.backoff_until, self.coding.again, self.refused.due()];
        times.into_iter().flatten().min()
    }

    /// Returns when the first of its agents that have no session is given up; none while all have one.
    pub(crate) fn lease(&self) -> Option<Duration> {
        self.members.iter().filter_map(|member| member.lease).min()
    }

    /// Returns the ranks of agents that are given up by now.
    pub(crate) fn lapsed(&self, now: Duration) -> Vec<u32> {
        let gone = self.members.iter().filter(|member| member.lease.is_some_and(|until| until <= now));
        gone.flat_map(|member| member.ranks.iter().copied()).collect()
    }

    /// Whether no agent of it that takes part still has a session.
    pub(crate) fn is_out_of_sight(&self) -> bool {
        self.members.iter().all(|member| member.closed || member.lease.is_some())
    }

    pub(crate) fn member_of(&self, session: SessionId) -> Option<&Member> {
        self.members.iter().find(|member| member.session == Some(session))
    }

    /// Its participant on a host that control waits for.
    pub(crate) fn away_on(&self, host: HostId) -> Option<&Member> {
        self.members.iter().find(|member| member.host == host && member.lease.is_some())
    }

    pub(crate) fn index_of(&self, session: SessionId) -> Option<usize> {
        self.members.iter().position(|member| member.session == Some(session))
    }

    /// Whether a rank is in it and has not left.
    pub(crate) fn holds(&self, rank: u32) -> bool {
        self.members
            .iter()
            .any(|member| member.ranks.contains(&rank) && !member.closed && !member.departed.contains(&rank))
    }

    pub(crate) fn phase(&self) -> v1::Phase {
        let leaving = || self.members.iter().any(|member| member.closed || !member.departed.is_empty());
        match &self.lifecycle {
            _ if self.lease().is_some() => v1::Phase::Recovering,
            Lifecycle::New | Lifecycle::Forming(_) => v1::Phase::Forming,
            Lifecycle::Running(_) | Lifecycle::Changing { .. } if leaving() => v1::Phase::Leaving,
            Lifecycle::Changing { .. } => v1::Phase::Changing,
            Lifecycle::Running(_) => v1::Phase::Running,
        }
    }
}

/// What an agent is told of an end.
pub(crate) fn dissolved(communicator: CommunicatorId, cause: &EndCause) -> to_agent::Message {
    to_agent::Message::Dissolve(v1::Dissolved {
        communicator: communicator.0,
        kind: cause.kind.into(),
        ranks: cause.ranks.clone(),
        reason: cause.detail.clone(),
    })
}

/// Tells an agent to let go of a communicator that it says is running.
pub(crate) fn disowned(id: CommunicatorId) -> to_agent::Message {
    let detail = "control does not know it any more".to_owned();
    dissolved(id, &EndCause { kind: FailureKind::Operator, ranks: Vec::new(), detail })
}
