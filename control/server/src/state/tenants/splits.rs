//! Communicators that split: their ranks that name the same color become one of their own. The one that they
//! are of goes on. Control receives one request a rank, and answers all at once. Each color's communicator
//! forms, or nobody's does.

use crate::state::breach::Breach;
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::communicator::Communicator;
use crate::state::job::group::Group;
use crate::state::output::SessionId;
use crate::state::tenants::budgets::InSum;
use crate::state::timed::{Due, Timed};
use crate::state::world::agents::OpenJoin;
use harmonaize_abi::{CommunicatorId, Rank};
use harmonaize_api::v1::{self, JoinRefusedKind};
use harmonaize_disclose::JoinFailure;
use std::collections::BTreeMap;
use std::time::Duration;

/// Who has called, by the communicator that splits.
#[derive(Debug, Default)]
pub(crate) struct Splits {
    sets: Timed<CommunicatorId, Called>,
}

/// The ranks that have called.
#[derive(Debug)]
struct Called {
    ranks: BTreeMap<u32, Asked>,
    /// When the first of them has waited long enough: then it is over for all.
    until: Duration,
}

impl Due for Called {
    fn next_timeout(&self) -> Option<Duration> {
        Some(self.until)
    }
}

/// What one rank wants.
#[derive(Clone, Copy, Debug)]
struct Asked {
    session: SessionId,
    request: u64,
    color: Option<u32>,
    key: u32,
}

impl Splits {
    /// A rank has called. Returns the groups that are to form, if it was the last. `had` counts what its
    /// job has of communicators, and its tenant in sum.
    ///
    /// # Errors
    /// Where an agent speaks for ranks of others.
    pub(crate) fn split(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        (join, asked): (v1::Join, v1::Split),
        had: (usize, InSum),
    ) -> Result<Vec<Group>, Breach> {
        let (id, rank, request) = (CommunicatorId(asked.communicator), asked.rank, join.request);
        let Some((parent, index)) = ctx.part(from, id)? else {
            effects.refuse_join(from, request, JoinRefusedKind::Over, &JoinFailure::SplitOver);
            return Ok(Vec::new());
        };
        if !parent.members.get(index).is_some_and(|member| member.ranks.contains(&rank)) {
            return Err(Breach::OtherSplit);
        }
        let set = self.sets.get(&id);
        if set.is_some_and(|set| set.ranks.contains_key(&rank)) {
            let failure = JoinFailure::SplitTwice { rank: Rank(rank) };
            effects.refuse_join(from, request, JoinRefusedKind::DuplicateRank, &failure);
            return Ok(Vec::new());
        }
        effects.joins_open.push((from, request, OpenJoin::Split(id)));
        let patience = match join.timeout_ns {
            0 => ctx.settings.join_timeout,
            nanos => Duration::from_nanos(nanos).min(ctx.settings.join_timeout),
        };
        let until = ctx.now.saturating_add(patience);
        let set = self.sets.entry(id).or_insert_with(|| Called { ranks: BTreeMap::new(), until });
        set.until = set.until.min(until);
        set.ranks.insert(rank, Asked { session: from, request, color: asked.color, key: asked.key });
        let gone: Vec<Rank> = (0..parent.ranks).filter(|rank| !parent.holds(*rank)).map(Rank).collect();
        if !gone.is_empty() {
            self.fail(effects, id, JoinRefusedKind::RankLost, &JoinFailure::SplitLost { ranks: gone });
            return Ok(Vec::new());
        }
        if ctx.sessions.get(&from).is_some_and(|session| ctx.is_withdrawn(session.host)) {
            let failure = JoinFailure::Maintenance { rank: Rank(rank) };
            self.fail(effects, id, JoinRefusedKind::Unavailable, &failure);
            return Ok(Vec::new());
        }
        if set.ranks.len() < parent.ranks as usize {
            return Ok(Vec::new());
        }
        Ok(self.complete(ctx, effects, (id, parent), had))
    }

    /// All ranks have called.
    fn complete(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        (id, parent): (CommunicatorId, &Communicator),
        (of_job, in_sum): (usize, InSum),
    ) -> Vec<Group> {
        let Some(set) = self.sets.get(&id) else { return Vec::new() };
        let mut colors: BTreeMap<u32, Vec<(u32, u32, Asked)>> = BTreeMap::new();
        for (rank, asked) in &set.ranks {
            if let Some(color) = asked.color {
                colors.entry(color).or_default().push((asked.key, *rank, *asked));
            }
        }
        let most = ctx.settings.most_communicators;
        let ranks = colors.values().map(|ranks| ranks.len() as u64).sum();
        let room = match of_job + colors.len() > most {
            true => Err(JoinFailure::TooManyCommunicators { max: most }),
            false => in_sum.check(&ctx.settings.terms(&parent.tenant), colors.len(), ranks),
        };
        if let Err(failure) = room {
            self.fail(effects, id, JoinRefusedKind::Limit, &failure);
            return Vec::new();
        }
        let number = next_number(ctx, parent);
        let name = |color: &u32| format!("{}#{number}.{color}", parent.name);
        if let Some(longest) = colors.keys().next_back().map(name)
            && let Err((kind, failure)) = ctx.check_names(&parent.tenant, &longest)
        {
            self.fail(effects, id, kind, &failure);
            return Vec::new();
        }
        let Some(set) = self.sets.remove(&id) else { return Vec::new() };
        for Asked { session, request, .. } in set.ranks.values().filter(|asked| asked.color.is_none()) {
            effects.end_join(*session, *request, JoinRefusedKind::LeftOut, &JoinFailure::LeftOut);
        }
        let group = |(color, mut ranks): (u32, Vec<(u32, u32, Asked)>)| {
            ranks.sort_by_key(|(key, rank, _)| (*key, *rank));
            let joined = ranks.iter().map(|(_, _, asked)| (asked.session, asked.request));
            effects.joins_over.extend(joined.clone());
            Group {
                key: (parent.tenant.clone(), name(&color)),
                joined: (0..).zip(joined).collect(),
                budget: parent.coding.agreed().clone(),
                before: Vec::new(),
                succeeds: None,
            }
        };
        colors.into_iter().map(group).collect()
    }

    /// A communicator does not split: whoever has called is told why.
    fn fail(
        &mut self,
        effects: &mut Effects,
        id: CommunicatorId,
        kind: JoinRefusedKind,
        failure: &JoinFailure,
    ) {
        for Asked { session, request, .. } in
            self.sets.remove(&id).into_iter().flat_map(|set| set.ranks.into_values())
        {
            effects.end_join(session, request, kind, failure);
        }
    }

    /// Ranks of a communicator are gone, without which it cannot split.
    pub(crate) fn lost(&mut self, effects: &mut Effects, id: CommunicatorId, ranks: &[u32]) {
        let ranks = ranks.iter().copied().map(Rank).collect();
        self.fail(effects, id, JoinRefusedKind::RankLost, &JoinFailure::SplitLost { ranks });
    }

    /// A communicator is over.
    pub(crate) fn over(&mut self, effects: &mut Effects, id: CommunicatorId) {
        self.fail(effects, id, JoinRefusedKind::Over, &JoinFailure::SplitOver);
    }

    /// A rank no longer waits.
    pub(crate) fn withdraw(&mut self, id: CommunicatorId, session: SessionId, request: u64) {
        let Some(set) = self.sets.get_mut(&id) else { return };
        set.ranks.retain(|_, asked| (asked.session, asked.request) != (session, request));
        if set.ranks.is_empty() {
            self.sets.remove(&id);
        }
    }

    /// Returns when the next set has waited long enough.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        self.sets.next_timeout()
    }

    /// Refuses the sets that have waited long enough, and says who never called.
    pub(crate) fn expire(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        for id in self.sets.due(ctx.now) {
            let ranks = ctx.communicators.get(&id).map_or(0, |parent| parent.ranks);
            let called = |rank: &u32| self.sets.get(&id).is_some_and(|set| set.ranks.contains_key(rank));
            let missing = (0..ranks).filter(|rank| !called(rank)).map(Rank).collect();
            self.fail(effects, id, JoinRefusedKind::Timeout, &JoinFailure::SplitTimeout { ranks, missing });
        }
    }
}

/// Which split of a communicator is the next: one more than those from which communicators are there.
fn next_number(ctx: &Ctx<'_>, parent: &Communicator) -> u64 {
    let of_parent = ctx.communicators.values().filter(|known| known.tenant == parent.tenant);
    let numbers = of_parent.filter_map(|known| {
        let rest = known.name.strip_prefix(parent.name.as_str())?.strip_prefix('#')?;
        rest.split_once('.')?.0.parse::<u64>().ok()
    });
    numbers.max().unwrap_or(0).saturating_add(1)
}

#[cfg(feature = "testing")]
impl Splits {
    /// How many ranks wait.
    pub(crate) fn ranks(&self) -> usize {
        self.sets.values().map(|set| set.ranks.len()).sum()
    }
}
