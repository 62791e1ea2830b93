//! Communicators that go on with fewer ranks or with more. Whoever is left of one, and whoever wants in,
//! becomes a new one of the same name. The one before is not touched: its ranks leave it once they are in the
//! new one, and keep it if there will be none.
//!
//! What becomes of one that failed is as its tenant agreed on: it is over; or its place and what was promised
//! for it are kept for its members for a while, and then it is over. Where nothing was agreed on they may go
//! on as long as they are there, and nothing is kept.

use crate::state::ctx::Ctx;
use crate::state::effects::{Effects, Note};
use crate::state::job::communicator::{Communicator, EndCause};
use crate::state::job::group::Group;
use crate::state::output::{Fact as Logged, SessionId};
use crate::state::tenants::budgets::InSum;
use crate::state::tenants::inherited::InheritedAgreement;
use crate::state::tenants::joins::{Joins, job_named};
use crate::state::tenants::past::{Going, Key, Pasts};
use crate::state::timed::{Due, Timed};
use crate::state::world::agents::OpenJoin;
use harmonaize_abi::session::{Clause, job_of};
use harmonaize_abi::{CommunicatorId, Rank};
use harmonaize_api::v1::{self, JoinRefusedKind};
use harmonaize_codec::Budget;
use harmonaize_disclose::{Fact, JoinFailure};
use std::collections::BTreeSet;
use std::time::Duration;

/// Most jobs of which a tenant has communicators at once.
const MOST_JOBS: usize = 64;

/// Who wants to go on, and what is left of communicators that ended.
#[derive(Debug, Default)]
pub(crate) struct Regroups {
    sets: Timed<Key, Vec<Came>>,
    /// Communicators that have ended.
    pub past: Pasts,
    changed: Changed,
}

/// Which sets may have become complete.
#[derive(Debug, Default)]
struct Changed {
    all: bool,
    keys: BTreeSet<Key>,
}

/// A process that wants to be a rank of the next communicator.
#[derive(Clone, Debug)]
struct Came {
    session: SessionId,
    request: u64,
    /// Of which communicator it is a rank, if it is, and which.
    member: Option<(CommunicatorId, u32)>,
    key: u32,
    least: u32,
    until: Duration,
}

impl Due for Vec<Came> {
    fn next_timeout(&self) -> Option<Duration> {
        self.iter().map(|came| came.until).min()
    }
}

/// The communicator that a set goes on from.
struct Before {
    id: CommunicatorId,
    budget: Budget,
    /// Its ranks that are expected to go on.
    expected: BTreeSet<u32>,
}

impl Regroups {
    /// Who is expected may have changed, under whatever name.
    pub(crate) fn mark_all_due(&mut self) {
        self.changed.all |= !self.sets.is_empty();
    }

    /// The same under one name.
    pub(crate) fn mark_due(&mut self, key: &Key) {
        if self.sets.contains_key(key) {
            self.changed.keys.insert(key.clone());
        }
    }

    /// A process no longer waits.
    pub(crate) fn withdraw(&mut self, key: &Key, session: SessionId, request: u64) {
        if let Some(set) = self.sets.get_mut(key) {
            set.retain(|came| (came.session, came.request) != (session, request));
            if set.is_empty() {
                self.sets.remove(key);
            }
            self.mark_due(key);
        }
    }

    /// Takes out all that wait for communicators of a tenant's job.
    pub(crate) fn take_of_job(&mut self, (tenant, job): &Key) -> Vec<(SessionId, u64)> {
        let of = |key: &&Key| key.0 == *tenant && job_named(&key.1) == job;
        let keys: Vec<Key> = self.sets.keys().filter(of).cloned().collect();
        let taken = keys.iter().filter_map(|key| self.sets.remove(key));
        taken.flatten().map(|came| (came.session, came.request)).collect()
    }

    /// A process wants to go on, or in.
    pub(crate) fn regroup(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        joins: &Joins,
        from: SessionId,
        (join, asked): (v1::Join, v1::Regroup),
    ) {
        let key = (join.tenant, join.communicator);
        if let Some(within) = self.past.over(&key, from, &asked) {
            let failure = JoinFailure::Expired { within };
            return effects.refuse_join(from, join.request, JoinRefusedKind::Over, &failure);
        }
        let member = self.member(ctx, &key, from, &asked);
        let came = Came {
            session: from,
            request: join.request,
            member,
            key: asked.key,
            least: asked.min_ranks,
            until: ctx.now.saturating_add(match join.timeout_ns {
                0 => ctx.settings.join_timeout,
                nanos => Duration::from_nanos(nanos).min(ctx.settings.join_timeout),
            }),
        };
        if let Err((kind, failure)) = self.check_regroup(ctx, joins, &key, &came) {
            return effects.refuse_join(from, join.request, kind, &failure);
        }
        effects.joins_open.push((from, join.request, OpenJoin::Regroup(key.clone())));
        self.sets.entry(key.clone()).or_default().push(came);
        self.mark_due(&key);
    }

    /// Which rank a process is, if it is one of a communicator under this name.
    fn member(
        &self,
        ctx: &Ctx<'_>,
        key: &Key,
        from: SessionId,
        request: &v1::Regroup,
    ) -> Option<(CommunicatorId, u32)> {
        let (id, rank) = (CommunicatorId(request.communicator), request.previous_rank);
        let live = ctx.communicators.get(&id).is_some_and(|known| {
            let member = known.member_of(from).filter(|member| member.ranks.contains(&rank));
            (&known.tenant, &known.name) == (&key.0, &key.1) && member.is_some() && known.holds(rank)
        });
        let past = self.past.get(id);
        let past = past.is_some_and(|past| past.key == *key && past.ranks.get(&rank) == Some(&from));
        (live || past).then_some((id, rank))
    }

    fn check_regroup(
        &self,
        ctx: &Ctx<'_>,
        joins: &Joins,
        key: &Key,
        came: &Came,
    ) -> Result<(), (JoinRefusedKind, JoinFailure)> {
        use JoinRefusedKind as Kind;
        let (tenant, name) = key;
        ctx.check_names(tenant, name)?;
        let set = self.sets.get(key).map(Vec::as_slice).unwrap_or_default();
        let (ranks, most) = (set.len() as u32 + 1, ctx.settings.most_ranks);
        if let Some(ranks) = [came.least, ranks].into_iter().find(|ranks| *ranks == 0 || *ranks > most) {
            return Err((Kind::Invalid, JoinFailure::BadSize { ranks, max: most }));
        }
        if let Some((_, rank)) = came.member
            && set.iter().any(|other| other.member == came.member)
        {
            return Err((Kind::DuplicateRank, JoinFailure::DuplicateRank { rank: Rank(rank) }));
        }
        let session = ctx.sessions.get(&came.session);
        if session.is_some_and(|session| ctx.is_withdrawn(session.host)) {
            let rank = Rank(came.member.map_or(0, |(_, rank)| rank));
            return Err((Kind::Unavailable, JoinFailure::Maintenance { rank }));
        }
        let anew = set.is_empty() && !self.has_place(ctx, joins, key);
        if anew {
            self.check_room(ctx, joins, tenant, name).map_err(|failure| (Kind::Limit, failure))?;
        }
        if came.member.is_none() {
            // Who goes on is counted already.
            let terms = ctx.settings.terms(tenant);
            let room = self.in_sum(ctx, joins, tenant, Some(came.session)).check(&terms, anew.into(), 1);
            room.map_err(|failure| (Kind::Limit, failure))?;
        }
        Ok(())
    }

    /// Whether a tenant may have one more communicator, of this name.
    ///
    /// # Errors
    /// Where its job has as many as one may, or the tenant has ones of as many jobs.
    pub(crate) fn check_room(
        &self,
        ctx: &Ctx<'_>,
        joins: &Joins,
        tenant: &str,
        name: &str,
    ) -> Result<(), JoinFailure> {
        let most = ctx.settings.most_communicators;
        if self.communicators_of(ctx, joins, tenant, name) >= most {
            return Err(JoinFailure::TooManyCommunicators { max: most });
        }
        let live = ctx.communicators.values().filter(|known| known.tenant == tenant);
        let sets = joins.waiting().keys().chain(self.sets.keys()).filter(|(of, _)| of == tenant);
        let kept = self.past.retained_names(tenant);
        let names = live.map(|known| known.name.as_str()).chain(sets.map(|(_, name)| name.as_str()));
        let jobs: BTreeSet<&str> = names.chain(kept.into_iter().map(String::as_str)).map(job_of).collect();
        if jobs.len() >= MOST_JOBS && !jobs.contains(job_of(name)) {
            return Err(JoinFailure::TooManyJobs { max: MOST_JOBS });
        }
        Ok(())
    }

    /// What a tenant has over all hosts, as a rank joins at `from`, if one does. Nothing is counted where it has no limit. Of ranks that
    /// wait under the name of a communicator that runs, newcomers alone are counted.
    pub(crate) fn in_sum(
        &self,
        ctx: &Ctx<'_>,
        joins: &Joins,
        tenant: &str,
        from: Option<SessionId>,
    ) -> InSum {
        let (terms, mut sum) = (ctx.settings.terms(tenant), InSum::default());
        if (terms.communicators, terms.ranks, terms.landing) == (None, None, None) && !terms.bound_processes()
        {
            return sum;
        }
        let live = || ctx.communicators.values().filter(|known| known.tenant == tenant);
        live().for_each(|known| sum.add(known.ranks.into()));
        // Who has closed it has given back what it took.
        let open = live().flat_map(|known| known.members.iter().filter(|member| !member.closed));
        open.for_each(|member| sum.add_links(member.links));
        let waiting = joins.waiting().iter().filter(|((of, _), _)| of == tenant);
        waiting.for_each(|(_, waiting)| sum.add(waiting.ranks.into()));
        if terms.bound_processes() {
            let members = live().flat_map(|known| known.members.iter().filter_map(|member| member.session));
            let waiting = joins.waiting().iter().filter(|((of, _), _)| of == tenant);
            let waiting =
                waiting.flat_map(|(_, waiting)| waiting.joined.values().map(|(session, _)| *session));
            let sessions: BTreeSet<SessionId> = members.chain(waiting).chain(from).collect();
            let usages =
                sessions.iter().filter_map(|session| ctx.sessions.get(session)?.processes.get(tenant));
            usages.for_each(|usage| sum.add_processes(*usage));
        }
        for ((_, name), set) in self.sets.iter().filter(|((of, _), _)| of == tenant) {
            if live().any(|known| known.name == *name) {
                sum.ranks += set.iter().filter(|came| came.member.is_none()).count() as u64;
            } else {
                sum.add(set.len() as u64);
            }
        }
        sum
    }

    /// What a tenant's job has of communicators, each once. They are those that run or form, sets that wait for
    /// ranks, and those that are kept for their members. Of the latter not one whose place is taken by what forms
    /// or waits under its name, or is about to under this one. The job is that of `name`.
    pub(crate) fn communicators_of(&self, ctx: &Ctx<'_>, joins: &Joins, tenant: &str, name: &str) -> usize {
        let job = job_of(name);
        let own = || {
            let live = ctx.communicators.values();
            live.filter(|known| known.tenant == tenant && job_of(&known.name) == job)
        };
        let sets = || {
            let sets = joins.waiting().keys().chain(self.sets.keys());
            sets.filter(|(of, name)| of == tenant && job_of(name) == job)
        };
        let forming = own().filter(|known| known.is_forming());
        let coming: BTreeSet<&str> =
            forming.map(|known| known.name.as_str()).chain(sets().map(|(_, name)| name.as_str())).collect();
        let kept = self.past.retained_names(tenant).into_iter();
        let kept = kept.filter(|kept| *kept != name && job_of(kept) == job);
        own().count() + sets().count() + kept.filter(|kept| !coming.contains(kept.as_str())).count()
    }

    /// Whether a communicator forms under a name, or ranks wait for one.
    fn is_coming(&self, ctx: &Ctx<'_>, joins: &Joins, key: &Key) -> bool {
        let forms =
            |known: &Communicator| known.is_forming() && (&known.tenant, &known.name) == (&key.0, &key.1);
        joins.waiting().contains_key(key)
            || self.sets.contains_key(key)
            || ctx.communicators.values().any(forms)
    }

    /// Whether the first who wants to go on under a name needs no room for one more communicator. It needs
    /// none where the one before is kept for its members, or runs and will be left. Who does not leave it
    /// has no such place the next time.
    fn has_place(&self, ctx: &Ctx<'_>, joins: &Joins, key: &Key) -> bool {
        let Some(Before { id, .. }) = self.before(ctx, key) else { return false };
        let named = |known: &&Communicator| (&known.tenant, &known.name) == (&key.0, &key.1);
        match self.past.get(id) {
            Some(past) => matches!(past.going, Going::Until { .. }) && !self.is_coming(ctx, joins, key),
            None => {
                ctx.communicators.values().filter(named).count() == 1 && !joins.waiting().contains_key(key)
            }
        }
    }

    /// Returns the latest communicator of a name that is or was in use and has ranks left. There is none where that one is over. Ranks
    /// whose hosts are withdrawn are not expected to go on.
    fn before(&self, ctx: &Ctx<'_>, key: &Key) -> Option<Before> {
        let named = |known: &&Communicator| (&known.tenant, &known.name) == (&key.0, &key.1);
        let live = ctx.communicators.iter().filter(|(_, known)| !known.is_forming() && named(known));
        let live = live.map(|(id, _)| *id).max();
        let id = live.max(self.past.latest(key))?;
        if self.past.get(id).is_some_and(|past| matches!(past.going, Going::Over { .. })) {
            return None;
        }
        if let Some(known) = ctx.communicators.get(&id) {
            let stays = known.members.iter().filter(|member| !ctx.is_withdrawn(member.host));
            let expected = stays.flat_map(|member| member.ranks.iter().copied());
            let expected = expected.filter(|rank| known.holds(*rank)).collect();
            return Some(Before { id, budget: known.coding.agreed().clone(), expected });
        }
        let past = self.past.get(id)?;
        let host = |session: &SessionId| ctx.sessions.get(session).map(|session| session.host);
        let stays = past
            .ranks
            .iter()
            .filter(|(_, session)| host(session).is_some_and(|host| !ctx.is_withdrawn(host)));
        let absent = past.absent.iter().filter(|(_, host)| !ctx.is_withdrawn(**host)).map(|(rank, _)| *rank);
        let expected = stays.map(|(rank, _)| *rank).chain(absent).collect();
        Some(Before { id, budget: past.budget.clone(), expected })
    }

    /// Takes the sets that are complete, to be formed.
    pub(crate) fn take_complete(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) -> Vec<Group> {
        for key in self.past.take_changed() {
            self.mark_due(&key);
        }
        let Changed { all, keys } = std::mem::take(&mut self.changed);
        let keys = if all { self.sets.keys().cloned().collect() } else { keys };
        keys.iter().filter_map(|key| self.close(ctx, effects, key, false)).collect()
    }

    /// Takes a set that is complete, or whose time is over and that is large enough.
    fn close(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, key: &Key, over: bool) -> Option<Group> {
        let before = self.before(ctx, key);
        let set = self.sets.get(key)?;
        let member = |came: &Came| {
            let (id, rank) = came.member?;
            (id == before.as_ref()?.id).then_some(rank)
        };
        let members: BTreeSet<u32> = set.iter().filter_map(member).collect();
        let least = set.iter().map(|came| came.least).max().unwrap_or(1);
        let ready = match &before {
            Some(before) => !members.is_empty() && (over || before.expected.is_subset(&members)),
            None => over,
        };
        if !ready || set.len() < least as usize {
            // Members of a communicator that runs hear that processes wait to be taken in.
            let waiting = set.len().saturating_sub(members.len()) as u32;
            if let Some(before) = before {
                effects.note(ctx, before.id, Fact::Newcomers { waiting });
            }
            return None;
        }
        let mut set = self.sets.remove(key).unwrap_or_default();
        // Stable: newcomers stay as they came.
        set.sort_by_key(|came| (came.key, member(came).is_none(), member(came)));
        let ranks = (0..).zip(&set).map(|(rank, came)| (rank, (came.session, came.request)));
        let group = Group {
            key: key.clone(),
            joined: ranks.collect(),
            before: set.iter().map(|came| member(came).map_or(0, |rank| rank.saturating_add(1))).collect(),
            succeeds: before.as_ref().map(|before| before.id),
            budget: before.map_or(Budget::Exact, |before| before.budget),
        };
        effects.joins_over.extend(set.iter().map(|came| (came.session, came.request)));
        Some(group)
    }

    /// Returns when somebody has waited long enough, or something of those that ended is due.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        self.sets.next_timeout().into_iter().chain(self.past.next_timeout()).min()
    }

    fn turn_away(
        &mut self,
        effects: &mut Effects,
        key: &Key,
        came: &Came,
        kind: JoinRefusedKind,
        failure: &JoinFailure,
    ) {
        self.withdraw(key, came.session, came.request);
        effects.end_join(came.session, came.request, kind, failure);
    }

    /// Takes the sets in which a member has waited long enough, to be formed; else refuses whoever has.
    pub(crate) fn expire(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) -> Vec<Group> {
        let now = ctx.now;
        let mut complete = Vec::new();
        for key in self.sets.due(now) {
            let before = self.before(ctx, &key);
            let id = before.as_ref().map(|before| before.id);
            let late: Vec<Came> = self.sets.get(&key).into_iter().flatten().cloned().collect();
            let (late, others): (Vec<Came>, Vec<Came>) = late.into_iter().partition(|came| came.until <= now);
            // A newcomer's patience says nothing of how long members may take.
            let counts = |came: &Came| id.is_none() || came.member.map(|(of, _)| of) == id;
            if late.iter().any(counts)
                && let Some(group) = self.close(ctx, effects, &key, true)
            {
                complete.push(group);
                continue;
            }
            let came = (late.len() + others.len()) as u32;
            let least = late.iter().chain(&others).map(|came| came.least).max().unwrap_or(1);
            let here: BTreeSet<u32> =
                late.iter().chain(&others).filter_map(|came| came.member).map(|(_, rank)| rank).collect();
            let missing = before.map_or(BTreeSet::new(), |before| before.expected);
            let missing: Vec<Rank> = missing.difference(&here).map(|rank| Rank(*rank)).collect();
            for process in late {
                let failure =
                    JoinFailure::Regroup { joined: came, min_members: least, missing: missing.clone() };
                self.turn_away(effects, &key, &process, JoinRefusedKind::Timeout, &failure);
            }
        }
        complete
    }

    /// Gives up on members that have not come back, and stores once more what could not be. Ends what its
    /// members had their time for. Returns the sets that go on with those who came.
    pub(crate) fn expire_past(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) -> Vec<Group> {
        self.past.expire_absent(ctx.now);
        self.past.expire_unstored(ctx.now, effects);
        let mut complete = Vec::new();
        for id in self.past.overdue(ctx.now) {
            let Some(key) = self.past.get(id).map(|past| past.key.clone()) else { continue };
            let latest = self.before(ctx, &key).is_some_and(|before| before.id == id);
            match latest.then(|| self.close(ctx, effects, &key, true)).flatten() {
                Some(group) => complete.push(group),
                None => drop(self.end_retained(effects, id)),
            }
        }
        complete
    }

    /// A communicator that is kept for its members is over. Whether there was one.
    pub(crate) fn end_retained(&mut self, effects: &mut Effects, id: CommunicatorId) -> bool {
        let Some((key, within)) = self.past.end_retained(id) else { return false };
        self.refuse_over(effects, id, &key, Some(within));
        let (tenant, name) = key;
        let over = Fact::AgreementEnded { clauses: [Clause::OnFailure].into() };
        for fact in [over, Fact::Ended] {
            effects.notes.push(Note { tenant: tenant.clone(), id, name: name.clone(), fact });
        }
        effects.fact(Logged::NotRegrouped { communicator: id, tenant, name, within });
        true
    }

    /// Keeps what is left of a communicator that was in use and has ended. Those who wait for what will not be are refused.
    pub(crate) fn ended(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        (id, ended): (CommunicatorId, &Communicator),
        cause: &EndCause,
        agreement: Option<InheritedAgreement>,
    ) {
        self.past.ended(ctx.now, (id, ended), cause, agreement, ctx.hosts);
        self.keep_or_refuse(effects, id);
    }

    /// An agent tells of a communicator that failed, of which control knows nothing but what was promised.
    pub(crate) fn recover(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        recipe: &v1::Recipe,
        agreement: InheritedAgreement,
    ) {
        self.past.recover(ctx, effects, recipe, agreement);
        self.keep_or_refuse(effects, CommunicatorId(recipe.communicator));
    }

    fn keep_or_refuse(&mut self, effects: &mut Effects, id: CommunicatorId) {
        let Some((key, going)) = self.past.get(id).map(|past| (past.key.clone(), past.going)) else { return };
        match going {
            Going::Open => {}
            Going::Until { within, .. } => {
                let (tenant, name) = key;
                effects.fact(Logged::Kept { communicator: id, tenant, name, within });
            }
            Going::Over { within } => self.refuse_over(effects, id, &key, within),
        }
    }

    /// Refuses those who wait to go on from a communicator that is over.
    fn refuse_over(
        &mut self,
        effects: &mut Effects,
        id: CommunicatorId,
        key: &Key,
        within: Option<Duration>,
    ) {
        let waiting = self.sets.get(key).into_iter().flatten();
        let members = waiting.filter(|came| came.member.is_some_and(|(of, _)| of == id));
        for came in members.cloned().collect::<Vec<_>>() {
            self.turn_away(effects, key, &came, JoinRefusedKind::Over, &JoinFailure::Expired { within });
        }
    }
}

#[cfg(feature = "testing")]
impl Regroups {
    /// How many processes wait.
    pub(crate) fn processes(&self) -> usize {
        self.sets.values().map(Vec::len).sum()
    }
}
