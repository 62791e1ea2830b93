//! Communicators that go on with fewer ranks or with more: whoever is left of one, and whoever wants in, becomes a new one of the
//! same name. The one before is not touched: its ranks leave it once they are in the new one, and keep it if there will be none.
//!
//! What becomes of one that failed is as its tenant agreed on: it is over; or its place and what was promised for it are kept for its
//! members for a while, and then it is over. Where nothing was agreed on they may go on as long as they are there, and nothing is kept.

mod past;

use super::communicator::Communicator;
use super::recipe::Group;
use super::{SessionId, State};
use harmonaize_abi::Rank;
use harmonaize_api::v1::{self, JoinRefusedKind};
use harmonaize_codec::Budget;
use harmonaize_disclose::{Fact, JoinFailure};
use past::{Going, Past, Unstored};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A tenant and its name for a communicator.
type Key = (String, String);

/// Who wants to go on, and what is left of communicators that ended.
#[derive(Debug, Default)]
pub(super) struct Regroups {
    sets: BTreeMap<Key, Vec<Came>>,
    /// Communicators that have ended, until none of their ranks is left or the next one is in use.
    past: BTreeMap<u64, Past>,
    /// Those of which something else may have to be stored than is, and those of which something is.
    unsaved: BTreeSet<u64>,
    stored: BTreeSet<u64>,
    again: Unstored,
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
    member: Option<(u64, u32)>,
    key: u32,
    least: u32,
    until: Duration,
}

/// The communicator that a set goes on from.
struct Before {
    id: u64,
    budget: Budget,
    /// Its ranks that are expected to go on.
    expected: BTreeSet<u32>,
}

impl Regroups {
    /// Who is expected may have changed, under whatever name.
    pub(super) fn mark_all_due(&mut self) {
        self.changed.all |= !self.sets.is_empty();
    }

    /// The same under one name.
    pub(super) fn mark_due(&mut self, key: &Key) {
        if self.sets.contains_key(key) {
            self.changed.keys.insert(key.clone());
        }
    }

    /// A process no longer waits.
    pub(super) fn withdraw(&mut self, key: &Key, session: SessionId, request: u64) {
        if let Some(set) = self.sets.get_mut(key) {
            set.retain(|came| (came.session, came.request) != (session, request));
            if set.is_empty() {
                self.sets.remove(key);
            }
            self.mark_due(key);
        }
    }
}

impl State {
    /// A process wants to go on, or in.
    pub(super) fn regroup(&mut self, now: Duration, from: SessionId, join: v1::Join, asked: v1::Regroup) {
        let key = (join.tenant, join.communicator);
        if let Some(within) = self.regroups.over(&key, from, &asked) {
            let failure = JoinFailure::Expired { within };
            return self.refuse_join(from, join.request, JoinRefusedKind::Over, &failure);
        }
        let member = self.member(&key, from, &asked);
        let came = Came {
            session: from,
            request: join.request,
            member,
            key: asked.key,
            least: asked.min_ranks,
            until: now.saturating_add(match join.timeout_ns {
                0 => self.settings.join_timeout,
                nanos => Duration::from_nanos(nanos).min(self.settings.join_timeout),
            }),
        };
        if let Err((kind, failure)) = self.check_regroup(&key, &came) {
            return self.refuse_join(from, join.request, kind, &failure);
        }
        if let Some(session) = self.sessions.get_mut(&from) {
            session.joins.insert(join.request, (key.clone(), None));
        }
        self.regroups.sets.entry(key.clone()).or_default().push(came);
        self.regroups.mark_due(&key);
    }

    /// Which rank a process is, if it is one of a communicator under this name.
    fn member(&self, key: &Key, from: SessionId, asked: &v1::Regroup) -> Option<(u64, u32)> {
        let (id, rank) = (asked.communicator, asked.previous_rank);
        let live = self.communicators.get(&id).is_some_and(|known| {
            let member = known.member_of(from).filter(|member| member.ranks.contains(&rank));
            (&known.tenant, &known.name) == (&key.0, &key.1) && member.is_some() && known.holds(rank)
        });
        let past = self.regroups.past.get(&id);
        let past = past.is_some_and(|past| past.key == *key && past.ranks.get(&rank) == Some(&from));
        (live || past).then_some((id, rank))
    }

    fn check_regroup(&self, key: &Key, came: &Came) -> Result<(), (JoinRefusedKind, JoinFailure)> {
        use JoinRefusedKind as Kind;
        let (tenant, name) = key;
        self.check_names(tenant, name)?;
        let set = self.regroups.sets.get(key).map(Vec::as_slice).unwrap_or_default();
        let (ranks, most) = (set.len() as u32 + 1, self.settings.most_ranks);
        if let Some(ranks) = [came.least, ranks].into_iter().find(|ranks| *ranks == 0 || *ranks > most) {
            return Err((Kind::Invalid, JoinFailure::BadSize { ranks, max: most }));
        }
        if let Some((_, rank)) = came.member
            && set.iter().any(|other| other.member == came.member)
        {
            return Err((Kind::DuplicateRank, JoinFailure::DuplicateRank { rank: Rank(rank) }));
        }
        let session = self.sessions.get(&came.session);
        if session.is_some_and(|session| self.is_withdrawn(session.host)) {
            let rank = Rank(came.member.map_or(0, |(_, rank)| rank));
            return Err((Kind::Unavailable, JoinFailure::Maintenance { rank }));
        }
        let anew = set.is_empty() && !self.has_place(key);
        if anew && self.communicators_of(tenant, name) >= self.settings.most_communicators {
            let most = self.settings.most_communicators;
            return Err((Kind::Limit, JoinFailure::TooManyCommunicators { max: most }));
        }
        Ok(())
    }

    /// What a tenant has of communicators, each once: those that run or form, sets that wait for ranks, and those that are kept for their
    /// members. Of the latter not one whose place is taken by what forms or waits under its name, or is about to under this one.
    pub(super) fn communicators_of(&self, tenant: &str, name: &str) -> usize {
        let live = self.communicators.values().filter(|known| known.tenant == tenant).count();
        let sets = || self.waiting.keys().chain(self.regroups.sets.keys()).filter(|(of, _)| of == tenant);
        let forming =
            self.communicators.values().filter(|known| known.is_forming() && known.tenant == tenant);
        let coming: BTreeSet<&str> =
            forming.map(|known| known.name.as_str()).chain(sets().map(|(_, name)| name.as_str())).collect();
        let kept = self.regroups.retained_names(tenant).into_iter().filter(|kept| *kept != name);
        live + sets().count() + kept.filter(|kept| !coming.contains(kept.as_str())).count()
    }

    /// Whether a communicator forms under a name, or ranks wait for one.
    fn is_coming(&self, key: &Key) -> bool {
        let forms =
            |known: &Communicator| known.is_forming() && (&known.tenant, &known.name) == (&key.0, &key.1);
        self.waiting.contains_key(key)
            || self.regroups.sets.contains_key(key)
            || self.communicators.values().any(forms)
    }

    /// Whether the first who wants to go on under a name needs no room for one more communicator: the one before is kept for its members, or
    /// runs and will be left. Who does not leave it has no such place the next time.
    fn has_place(&self, key: &Key) -> bool {
        let Some(Before { id, .. }) = self.before(key) else { return false };
        let named = |known: &&Communicator| (&known.tenant, &known.name) == (&key.0, &key.1);
        match self.regroups.past.get(&id) {
            Some(past) => matches!(past.going, Going::Until { .. }) && !self.is_coming(key),
            None => self.communicators.values().filter(named).count() == 1 && !self.waiting.contains_key(key),
        }
    }

    /// The latest communicator of a name that is or was in use and has ranks left; none where that one is over. Those whose hosts are withdrawn
    /// are not expected to go on.
    fn before(&self, key: &Key) -> Option<Before> {
        let named = |known: &&Communicator| (&known.tenant, &known.name) == (&key.0, &key.1);
        let live = self.communicators.iter().filter(|(_, known)| !known.is_forming() && named(known));
        let live = live.map(|(id, _)| *id).max();
        let past = self.regroups.past.iter().filter(|(_, past)| past.key == *key);
        let past = past.map(|(id, _)| *id).max();
        let id = live.max(past)?;
        if self.regroups.past.get(&id).is_some_and(|past| matches!(past.going, Going::Over { .. })) {
            return None;
        }
        if let Some(known) = self.communicators.get(&id) {
            let stays = known.members.iter().filter(|member| !self.is_withdrawn(member.host));
            let expected = stays.flat_map(|member| member.ranks.iter().copied());
            let expected = expected.filter(|rank| known.holds(*rank)).collect();
            return Some(Before { id, budget: known.coding.agreed().clone(), expected });
        }
        let past = self.regroups.past.get(&id)?;
        let host = |session: &SessionId| self.sessions.get(session).map(|session| session.host);
        let stays = past
            .ranks
            .iter()
            .filter(|(_, session)| host(session).is_some_and(|host| !self.is_withdrawn(host)));
        let absent = past.absent.iter().filter(|(_, host)| !self.is_withdrawn(**host)).map(|(rank, _)| *rank);
        let expected = stays.map(|(rank, _)| *rank).chain(absent).collect();
        Some(Before { id, budget: past.budget.clone(), expected })
    }

    /// Forms what is complete.
    pub(super) fn close_regroups(&mut self, now: Duration) {
        loop {
            let Changed { all, keys } = std::mem::take(&mut self.regroups.changed);
            let keys = if all { self.regroups.sets.keys().cloned().collect() } else { keys };
            if keys.is_empty() {
                return;
            }
            for key in &keys {
                self.close_regroup(now, key, false);
            }
        }
    }

    /// Forms a set that is complete, or whose time is over and that is large enough. Whether it did.
    fn close_regroup(&mut self, now: Duration, key: &Key, over: bool) -> bool {
        let before = self.before(key);
        let Some(set) = self.regroups.sets.get(key) else { return false };
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
            self.note_newcomers(now, key, before.map(|before| before.id), members.len());
            return false;
        }
        let mut set = self.regroups.sets.remove(key).unwrap_or_default();
        // Stable: newcomers stay as they came.
        set.sort_by_key(|came| (came.key, member(came).is_none(), member(came)));
        let ranks = (0..).zip(&set).map(|(rank, came)| (rank, (came.session, came.request)));
        let group = Group {
            joined: ranks.collect(),
            before: set.iter().map(|came| member(came).map_or(0, |rank| rank.saturating_add(1))).collect(),
            succeeds: before.as_ref().map(|before| before.id),
            budget: before.map_or(Budget::Exact, |before| before.budget),
        };
        for came in &set {
            self.forget_join(came.session, came.request);
        }
        self.form(now, key.clone(), &group);
        true
    }

    /// Members of a communicator that runs hear that processes wait to be taken in.
    fn note_newcomers(&mut self, now: Duration, key: &Key, before: Option<u64>, members: usize) {
        let waiting = self.regroups.sets.get(key).map_or(0, Vec::len).saturating_sub(members);
        if let Some(before) = before {
            self.note(now, before, Fact::Newcomers { waiting: waiting as u32 });
        }
    }

    /// When [`State::expire_regroups`] has something to do.
    pub(super) fn regroups_deadline(&self) -> Option<Duration> {
        let waiting = self.regroups.sets.values().flatten().map(|came| came.until);
        waiting.min()
    }

    fn turn_away(&mut self, key: &Key, came: &Came, kind: JoinRefusedKind, failure: &JoinFailure) {
        self.forget_join(came.session, came.request);
        self.regroups.withdraw(key, came.session, came.request);
        self.refuse_join(came.session, came.request, kind, failure);
    }

    /// Goes on with those who came where a member has waited long enough; else refuses whoever has.
    pub(super) fn expire_regroups(&mut self, now: Duration) {
        let late = |set: &&Vec<Came>| set.iter().any(|came| came.until <= now);
        let keys = self.regroups.sets.iter().filter(|(_, set)| late(set));
        for key in keys.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
            let before = self.before(&key);
            let id = before.as_ref().map(|before| before.id);
            let late: Vec<Came> = self.regroups.sets.get(&key).into_iter().flatten().cloned().collect();
            let (late, others): (Vec<Came>, Vec<Came>) = late.into_iter().partition(|came| came.until <= now);
            // A newcomer's patience says nothing of how long members may take.
            let counts = |came: &Came| id.is_none() || came.member.map(|(of, _)| of) == id;
            if late.iter().any(counts) && self.close_regroup(now, &key, true) {
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
                self.turn_away(&key, &process, JoinRefusedKind::Timeout, &failure);
            }
        }
    }
}

#[cfg(test)]
impl Regroups {
    /// How many processes wait.
    pub(super) fn processes(&self) -> usize {
        self.sets.values().map(Vec::len).sum()
    }

    /// Whether nothing is known of communicators that ended.
    pub(super) fn is_empty(&self) -> bool {
        self.past.is_empty()
    }
}
