//! Ranks that want to join, until all of a communicator are there or their time is over.

use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::codec::budget;
use crate::state::job::group::Group;
use crate::state::output::SessionId;
use crate::state::timed::{Due, Timed};
use crate::state::world::agents::OpenJoin;
use harmonaize_abi::Rank;
use harmonaize_abi::session::job_of;
use harmonaize_api::v1::{self, JoinRefusedKind};
use harmonaize_codec::{Budget, BudgetError};
use harmonaize_disclose::JoinFailure;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The job that a communicator is of, by its name: the job's own, or a name in it.
pub(crate) fn job_named(communicator: &str) -> &str {
    match job_of(communicator) {
        "" => communicator,
        job => job,
    }
}

/// The same where groups of a split are of the job of the communicator that was split.
pub(crate) fn root_job_named(communicator: &str) -> &str {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_group = |text: &str| text.split_once('.').is_some_and(|(of, by)| is_number(of) && is_number(by));
    let mut root = communicator;
    while let Some((parent, group)) = root.rsplit_once('#')
        && is_group(group)
        && !parent.is_empty()
    {
        root = parent;
    }
    job_named(root)
}

/// Joins of one tenant under one name.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub ranks: u32,
    pub since: Duration,
    pub deadline: Duration,
    /// By rank: whose session, and the agent's number for the join.
    pub joined: BTreeMap<u32, (SessionId, u64)>,
    /// Of the first to join; all others have the same.
    pub budget: Budget,
    /// Until when which rank waits, where that is less long than control does. The first is the next to give up.
    pub patience: BTreeSet<(Duration, u32)>,
    /// Ranks that were here, and waited for the others in vain.
    pub gave_up: BTreeSet<u32>,
}

impl Due for Waiting {
    fn next_timeout(&self) -> Option<Duration> {
        Some(self.next_deadline())
    }
}

impl Waiting {
    /// When the next of its ranks gives up.
    pub(crate) fn next_deadline(&self) -> Duration {
        self.patience.first().map_or(self.deadline, |(until, _)| self.deadline.min(*until))
    }

    /// That not all have joined in time. Ranks that gave up are named only where nobody else was missing:
    /// those that time out a moment later would else take them for the cause.
    fn timeout(&self) -> JoinFailure {
        let absent = || (0..self.ranks).filter(|rank| !self.joined.contains_key(rank));
        let never_came: Vec<Rank> = absent().filter(|rank| !self.gave_up.contains(rank)).map(Rank).collect();
        let missing = if never_came.is_empty() { absent().map(Rank).collect() } else { never_came };
        JoinFailure::Timeout { ranks: self.ranks, missing }
    }
}

/// Joins that wait for others.
#[derive(Debug, Default)]
pub(crate) struct Joins {
    waiting: Timed<(String, String), Waiting>,
}

impl Joins {
    /// Returns joins by tenant and name.
    pub(crate) fn waiting(&self) -> &BTreeMap<(String, String), Waiting> {
        &self.waiting
    }

    /// Returns when the next rank gives up.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        self.waiting.next_timeout()
    }

    /// Takes a join in, or refuses it. Returns the ranks that are complete with it. `room` says whether its
    /// tenant may have one more communicator.
    pub(crate) fn join(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        join: v1::Join,
        room: Result<(), JoinFailure>,
    ) -> Option<Group> {
        let drained = ctx.sessions.get(&from).is_some_and(|session| ctx.is_withdrawn(session.host));
        let budget = match self.check_join(ctx, &join, room) {
            Ok(budget) => budget,
            Err((kind, failure)) => {
                effects.refuse_join(from, join.request, kind, &failure);
                return None;
            }
        };
        if drained {
            let failure = JoinFailure::Maintenance { rank: Rank(join.rank) };
            effects.refuse_join(from, join.request, JoinRefusedKind::Unavailable, &failure);
            return None;
        }
        let key = (join.tenant, join.communicator);
        let deadline = ctx.now.saturating_add(ctx.settings.join_timeout);
        let waiting = self.waiting.entry(key.clone()).or_insert_with(|| Waiting {
            ranks: join.ranks,
            since: ctx.now,
            deadline,
            joined: BTreeMap::new(),
            budget,
            patience: BTreeSet::new(),
            gave_up: BTreeSet::new(),
        });
        waiting.joined.insert(join.rank, (from, join.request));
        waiting.gave_up.remove(&join.rank);
        let until = ctx.now.saturating_add(Duration::from_nanos(join.timeout_ns));
        if join.timeout_ns > 0 && until < waiting.deadline {
            waiting.patience.insert((until, join.rank));
        }
        let complete = waiting.joined.len() == waiting.ranks as usize;
        effects.joins_open.push((from, join.request, OpenJoin::Rank(key.clone(), join.rank)));
        let Waiting { joined, budget, .. } = complete.then(|| self.waiting.remove(&key))??;
        effects.joins_over.extend(joined.values().copied());
        Some(Group { key, joined, budget, before: Vec::new(), succeeds: None })
    }

    /// What its tenant lets be lost, where the join can be.
    fn check_join(
        &self,
        ctx: &Ctx<'_>,
        join: &v1::Join,
        room: Result<(), JoinFailure>,
    ) -> Result<Budget, (JoinRefusedKind, JoinFailure)> {
        use JoinRefusedKind as Kind;
        let (rank, ranks, most) = (Rank(join.rank), join.ranks, ctx.settings.most_ranks);
        let name = &join.communicator;
        ctx.check_names(&join.tenant, name)?;
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
        let mut live = ctx.communicators.values().filter(|known| known.tenant == join.tenant);
        // Of one that no agent tells of any more, nobody knows whether it is there.
        let held = live.any(|known| known.name == *name && known.holds(rank.0) && !known.is_out_of_sight());
        if held || waiting.is_some_and(|waiting| waiting.joined.contains_key(&rank.0)) {
            return Err((Kind::DuplicateRank, JoinFailure::DuplicateRank { rank }));
        }
        let Some(waiting) = waiting else {
            return room.map(|()| budget).map_err(|failure| (Kind::Limit, failure));
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

    /// Takes a rank out of a set that waits.
    pub(crate) fn withdraw(&mut self, key: &(String, String), rank: u32) {
        let Some(waiting) = self.waiting.get_mut(key) else { return };
        waiting.joined.remove(&rank);
        waiting.patience.retain(|(_, of)| *of != rank);
        if waiting.joined.is_empty() {
            self.waiting.remove(key);
        }
    }

    /// Takes out all that wait for communicators of a tenant's job.
    pub(crate) fn take_of_job(&mut self, (tenant, job): &(String, String)) -> Vec<(SessionId, u64)> {
        let of = |key: &&(String, String)| key.0 == *tenant && job_named(&key.1) == job;
        let keys: Vec<(String, String)> = self.waiting.keys().filter(of).cloned().collect();
        let taken = keys.iter().filter_map(|key| self.waiting.remove(key));
        taken.flat_map(|waiting| waiting.joined.into_values()).collect()
    }

    /// Refuses ranks whose time is over.
    pub(crate) fn expire(&mut self, now: Duration, effects: &mut Effects) {
        self.expire_impatient(now, effects);
        for key in self.waiting.due(now) {
            let Some(waiting) = self.waiting.remove(&key) else { continue };
            let failure = waiting.timeout();
            for (session, request) in waiting.joined.into_values() {
                effects.end_join(session, request, JoinRefusedKind::Timeout, &failure);
            }
        }
    }

    /// Refuses ranks that wait less long than control does; the others go on waiting.
    fn expire_impatient(&mut self, now: Duration, effects: &mut Effects) {
        let mut late = Vec::new();
        for key in self.waiting.due(now) {
            let Some(waiting) = self.waiting.get(&key) else { continue };
            let ranks = waiting.patience.iter().take_while(|(until, _)| *until <= now);
            let ranks: BTreeSet<u32> = ranks.map(|(_, rank)| *rank).collect();
            late.extend(ranks.into_iter().map(|rank| (key.clone(), rank, waiting.timeout())));
        }
        for (key, rank, failure) in late {
            let waiting = self.waiting.get_mut(&key);
            let joined = waiting.and_then(|waiting| {
                waiting.gave_up.insert(rank);
                waiting.joined.get(&rank).copied()
            });
            self.withdraw(&key, rank);
            if let Some((session, request)) = joined {
                effects.end_join(session, request, JoinRefusedKind::Timeout, &failure);
            }
        }
    }
}
