//! Ranks that want to join, until all of a communicator are there or their time is over.

use super::codec::budget;
use super::recipe::Group;
use super::{SessionId, State};
use harmonaize_abi::Rank;
use harmonaize_api::v1::{self, JoinRefusedKind};
use harmonaize_codec::{Budget, BudgetError};
use harmonaize_disclose::JoinFailure;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Joins of one tenant under one name.
#[derive(Debug)]
pub(super) struct Waiting {
    pub ranks: u32,
    pub since: Duration,
    pub deadline: Duration,
    /// By rank: whose session, and the agent's number for the join.
    pub joined: BTreeMap<u32, (SessionId, u64)>,
    /// Of the first to join; all others have the same.
    pub budget: Budget,
    /// By rank: until when it waits, where that is less long than control does.
    pub patience: BTreeMap<u32, Duration>,
    /// Ranks that were here, and waited for the others in vain.
    pub gave_up: BTreeSet<u32>,
}

impl Waiting {
    /// When the next of its ranks gives up.
    pub(super) fn next_deadline(&self) -> Duration {
        self.patience.values().copied().fold(self.deadline, Duration::min)
    }

    /// That not all have joined in time. Ranks that gave up are named only where nobody else was missing: those that time
    /// out a moment later would else take them for the cause.
    fn timeout(&self) -> JoinFailure {
        let absent = || (0..self.ranks).filter(|rank| !self.joined.contains_key(rank));
        let never_came: Vec<Rank> = absent().filter(|rank| !self.gave_up.contains(rank)).map(Rank).collect();
        let missing = if never_came.is_empty() { absent().map(Rank).collect() } else { never_came };
        JoinFailure::Timeout { ranks: self.ranks, missing }
    }
}

impl State {
    pub(super) fn join(
        &mut self,
        now: Duration,
        from: SessionId,
        mut join: v1::Join,
    ) -> Result<(), &'static str> {
        let session = self.sessions.get(&from);
        let open = session.is_some_and(|session| session.joins.contains_key(&join.request));
        let drained = session.is_some_and(|session| self.is_withdrawn(session.host));
        if open {
            return Err("a join with the number of an open one");
        }
        if let Some(asked) = join.regroup.take() {
            self.regroup(now, from, join, asked);
            return Ok(());
        }
        let budget = match self.check_join(&join) {
            Ok(budget) => budget,
            Err((kind, failure)) => {
                self.refuse_join(from, join.request, kind, &failure);
                return Ok(());
            }
        };
        if drained {
            let failure = JoinFailure::Maintenance { rank: Rank(join.rank) };
            self.refuse_join(from, join.request, JoinRefusedKind::Unavailable, &failure);
            return Ok(());
        }
        let key = (join.tenant, join.communicator);
        let deadline = now.saturating_add(self.settings.join_timeout);
        let waiting = self.waiting.entry(key.clone()).or_insert_with(|| Waiting {
            ranks: join.ranks,
            since: now,
            deadline,
            joined: BTreeMap::new(),
            budget,
            patience: BTreeMap::new(),
            gave_up: BTreeSet::new(),
        });
        waiting.joined.insert(join.rank, (from, join.request));
        waiting.gave_up.remove(&join.rank);
        let until = now.saturating_add(Duration::from_nanos(join.timeout_ns));
        if join.timeout_ns > 0 && until < waiting.deadline {
            waiting.patience.insert(join.rank, until);
        }
        let complete = waiting.joined.len() == waiting.ranks as usize;
        if let Some(session) = self.sessions.get_mut(&from) {
            session.joins.insert(join.request, (key.clone(), Some(join.rank)));
        }
        if complete && let Some(waiting) = self.waiting.remove(&key) {
            for (session, request) in waiting.joined.values() {
                self.forget_join(*session, *request);
            }
            let Waiting { joined, budget, .. } = waiting;
            self.form(now, key, &Group { joined, budget, before: Vec::new(), succeeds: None });
        }
        Ok(())
    }

    /// What its tenant lets be lost, where the join can be.
    fn check_join(&self, join: &v1::Join) -> Result<Budget, (JoinRefusedKind, JoinFailure)> {
        use JoinRefusedKind as Kind;
        let (rank, ranks, most) = (Rank(join.rank), join.ranks, self.settings.most_ranks);
        let name = &join.communicator;
        self.check_names(&join.tenant, name)?;
        if ranks == 0 || ranks > most {
            return Err((Kind::Invalid, JoinFailure::BadSize { ranks, max: most }));
        }
        if rank.0 >= ranks {
            return Err((Kind::Invalid, JoinFailure::RankOutside { rank, ranks }));
        }
        let budget = budget(join.budget.as_ref());
        let bad = |error: BudgetError| (Kind::Budget, JoinFailure::BadBudget { why: error.to_string() });
        let budget = budget.map_err(bad)?;
        let waiting = self.waiting.get(&(join.tenant.clone(), name.clone()));
        let mut live = self.communicators.values().filter(|known| known.tenant == join.tenant);
        let held = live.any(|known| known.name == *name && known.holds(rank.0));
        if held || waiting.is_some_and(|waiting| waiting.joined.contains_key(&rank.0)) {
            return Err((Kind::DuplicateRank, JoinFailure::DuplicateRank { rank }));
        }
        let Some(waiting) = waiting else {
            let most = self.settings.most_communicators;
            if self.communicators_of(&join.tenant, name) >= most {
                return Err((Kind::Limit, JoinFailure::TooManyCommunicators { max: most }));
            }
            return Ok(budget);
        };
        if waiting.ranks != ranks {
            let first = waiting.joined.keys().next().copied().map_or(Rank(0), Rank);
            let failure = JoinFailure::SizeMismatch { rank, ranks, first, first_ranks: waiting.ranks };
            return Err((Kind::SizeMismatch, failure));
        }
        if waiting.budget != budget {
            let others = waiting.joined.keys().copied().map(Rank).collect();
            let (budget, theirs) = (budget.to_string(), waiting.budget.to_string());
            return Err((
                Kind::Budget,
                JoinFailure::BudgetMismatch { rank, budget, differing_ranks: others, other_budget: theirs },
            ));
        }
        Ok(budget)
    }

    /// Takes back an open join of an agent, whatever it was for.
    pub(super) fn withdraw_join(
        &mut self,
        (session, request): (SessionId, u64),
        (key, rank): ((String, String), Option<u32>),
    ) {
        match rank {
            Some(rank) => self.withdraw(&key, rank),
            None => self.regroups.withdraw(&key, session, request),
        }
    }

    /// Takes a rank out of a set that waits.
    fn withdraw(&mut self, key: &(String, String), rank: u32) {
        let Some(waiting) = self.waiting.get_mut(key) else { return };
        waiting.joined.remove(&rank);
        waiting.patience.remove(&rank);
        if waiting.joined.is_empty() {
            self.waiting.remove(key);
        }
    }

    pub(super) fn expire_joins(&mut self, now: Duration) {
        self.expire_impatient(now);
        let late = self.waiting.iter().filter(|(_, waiting)| waiting.deadline <= now);
        for key in late.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
            let Some(waiting) = self.waiting.remove(&key) else { continue };
            let failure = waiting.timeout();
            for (session, request) in waiting.joined.into_values() {
                self.forget_join(session, request);
                self.refuse_join(session, request, JoinRefusedKind::Timeout, &failure);
            }
        }
    }

    /// Refuses ranks that wait less long than control does; the others go on waiting.
    fn expire_impatient(&mut self, now: Duration) {
        let late = self.waiting.iter().flat_map(|(key, waiting)| {
            let late = waiting.patience.iter().filter(|(_, until)| **until <= now);
            late.map(|(rank, _)| (key.clone(), *rank, waiting.timeout()))
        });
        for (key, rank, failure) in late.collect::<Vec<_>>() {
            let waiting = self.waiting.get_mut(&key);
            let joined = waiting.and_then(|waiting| {
                waiting.gave_up.insert(rank);
                waiting.joined.get(&rank).copied()
            });
            self.withdraw(&key, rank);
            if let Some((session, request)) = joined {
                self.forget_join(session, request);
                self.refuse_join(session, request, JoinRefusedKind::Timeout, &failure);
            }
        }
    }
}
