//! Communicators that go on with fewer ranks or with more: whoever is left of one, and whoever wants in, becomes a new one of the
//! same name. The one before is not touched: its ranks leave it once they are in the new one, and keep it if there will be none.
//!
//! What becomes of one that failed is as its tenant agreed on: it is over; or its place and what was promised for it are kept for its
//! members for a while, and then it is over. Where nothing was agreed on they may go on as long as they are there, and nothing is kept.

use super::agreements::Left;
use super::communicator::{Communicator, EndCause};
use super::form::Group;
use super::{Fact as Logged, SessionId, State};
use harmonaize_abi::Rank;
use harmonaize_abi::session::OnFailure;
use harmonaize_api::v1::{self, FailureKind, JoinRefusedKind};
use harmonaize_codec::Budget;
use harmonaize_disclose::{Fact, JoinFailure};
use harmonaize_planner::{HostId, Rate};
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
    /// Whether a set may have become complete.
    changed: bool,
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

/// A communicator that has ended.
#[derive(Debug)]
struct Past {
    key: Key,
    budget: Budget,
    /// What was promised for it, and where it ran.
    agreement: Option<Left>,
    hosts: Vec<HostId>,
    going: Going,
    /// Whether its members had more time because what they went on in did not come about.
    prolonged: bool,
    /// Ranks whose processes are there still, and their agents' sessions.
    ranks: BTreeMap<u32, SessionId>,
}

/// Whether the members of a communicator that has ended can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Going {
    /// As long as they are there.
    Open,
    /// Until `at`; what was promised for it and its place are kept for them.
    Until { at: Duration, within: Duration },
    /// No, or not any more: they had so long.
    Over { within: Option<Duration> },
}

impl Going {
    /// As was agreed on, for communicators that fail.
    fn after(now: Duration, kind: FailureKind, agreement: Option<&Left>) -> Self {
        match agreement.and_then(Left::on_failure).filter(|_| kind != FailureKind::Operator) {
            None => Self::Open,
            Some(OnFailure::End) => Self::Over { within: None },
            Some(OnFailure::Regroup { within }) => Self::Until { at: now.saturating_add(within), within },
        }
    }
}

/// The communicator that a set goes on from.
struct Before {
    id: u64,
    budget: Budget,
    /// Its ranks that are expected to go on.
    expected: BTreeSet<u32>,
}

impl Regroups {
    /// How many places sets of a tenant take that wait, and communicators of other names than this one that are kept for their members.
    pub(super) fn places(&self, tenant: &str, name: &str) -> usize {
        let kept = self.past.values().filter(|past| matches!(past.going, Going::Until { .. }));
        let kept = kept.map(|past| &past.key).filter(|(_, of)| of != name);
        let all: BTreeSet<&Key> = self.sets.keys().chain(kept).filter(|(of, _)| of == tenant).collect();
        all.len()
    }

    /// What is set aside for members of communicators that ended: by communicator, along its hosts.
    pub(super) fn set_aside(&self) -> impl Iterator<Item = (u64, &[HostId], Rate)> {
        let kept = self.past.iter().filter(|(_, past)| matches!(past.going, Going::Until { .. }));
        kept.filter_map(|(id, past)| Some((*id, past.hosts.as_slice(), past.agreement.as_ref()?.rate())))
    }

    /// Whether a process asks to go on from a communicator that is over; and how long its members had.
    fn over(&self, key: &Key, from: SessionId, asked: &v1::Regroup) -> Option<Option<Duration>> {
        let past = self.past.get(&asked.communicator).filter(|past| past.key == *key)?;
        match past.going {
            Going::Over { within } if past.ranks.get(&asked.member) == Some(&from) => Some(within),
            _ => None,
        }
    }

    /// Who is expected may have changed.
    pub(super) fn look(&mut self) {
        self.changed |= !self.sets.is_empty();
    }

    /// A process no longer waits.
    pub(super) fn withdraw(&mut self, key: &Key, session: SessionId, request: u64) {
        if let Some(set) = self.sets.get_mut(key) {
            set.retain(|came| (came.session, came.request) != (session, request));
            if set.is_empty() {
                self.sets.remove(key);
            }
            self.look();
        }
    }

    /// A rank has left a communicator; of one that has ended it is no longer expected.
    pub(super) fn left(&mut self, id: u64, rank: u32, session: SessionId) {
        if let Some(past) = self.past.get_mut(&id)
            && past.ranks.get(&rank) == Some(&session)
        {
            past.ranks.remove(&rank);
        }
        self.forget_empty();
    }

    /// An agent is gone, and with it its ranks.
    pub(super) fn session_ended(&mut self, session: SessionId) {
        self.past.values_mut().for_each(|past| past.ranks.retain(|_, of| *of != session));
        self.forget_empty();
    }

    fn forget_empty(&mut self) {
        self.past.retain(|_, past| !past.ranks.is_empty());
        self.look();
    }

    /// A communicator that was in use has ended: its ranks may go on, but for those that are lost.
    pub(super) fn ended(
        &mut self,
        now: Duration,
        (id, ended): (u64, &Communicator),
        cause: &EndCause,
        agreement: Option<Left>,
    ) {
        let going = Going::after(now, cause.kind, agreement.as_ref());
        // Where nobody can go on, who counts as lost and is there after all is told so too.
        let may = !matches!(going, Going::Over { .. });
        let lost = |rank: &u32| may && cause.kind == FailureKind::RanksLost && cause.ranks.contains(rank);
        let there = ended.members.iter().filter(|member| !member.closed);
        let there = there.filter_map(|member| Some((member, member.session?)));
        let ranks = there.flat_map(|(member, session)| {
            let left = member.ranks.iter().filter(|rank| !member.left.contains(rank) && !lost(rank));
            left.map(move |rank| (*rank, session))
        });
        let past = Past {
            key: (ended.tenant.clone(), ended.name.clone()),
            budget: ended.coding.agreed().clone(),
            agreement,
            hosts: ended.members.iter().map(|member| member.host).collect(),
            going,
            prolonged: false,
            ranks: ranks.collect(),
        };
        if ended.epoch != 0 && !past.ranks.is_empty() {
            self.past.insert(id, past);
        }
        self.look();
    }

    /// What members of a communicator went on in did not come about: they may try again until then, whatever time they had; but once.
    pub(super) fn prolong(&mut self, id: u64, until: Duration) {
        if let Some(past) = self.past.get_mut(&id)
            && let Going::Until { at, .. } = &mut past.going
            && *at < until
            && !past.prolonged
        {
            (*at, past.prolonged) = (until, true);
        }
    }

    /// What was promised for a communicator that has ended, for the one that goes on from it.
    pub(super) fn take_agreement(&mut self, id: u64) -> Option<Left> {
        self.past.get_mut(&id).and_then(|past| past.agreement.take())
    }

    /// A communicator of this name is in use that went on from none: nothing is kept any more for those before it.
    pub(super) fn superseded(&mut self, tenant: &str, name: &str) {
        let same = |past: &&mut Past| (past.key.0.as_str(), past.key.1.as_str()) == (tenant, name);
        for past in self.past.values_mut().filter(same) {
            if let Going::Until { .. } = past.going {
                (past.going, past.agreement) = (Going::Open, None);
            }
        }
    }

    /// A tenant is gone: nothing is kept of what it had.
    pub(super) fn forget(&mut self, tenant: &str) {
        self.past.retain(|_, past| past.key.0 != tenant);
    }

    /// A communicator that went on from another is in use.
    pub(super) fn succeeded(&mut self, before: u64) {
        self.past.remove(&before);
        self.look();
    }
}

impl State {
    /// A process wants to go on, or in.
    pub(super) fn regroup(&mut self, now: Duration, from: SessionId, join: v1::Join, asked: v1::Regroup) {
        let key = (join.tenant, join.communicator);
        if let Some(within) = self.regroups.over(&key, from, &asked) {
            let failure = JoinFailure::Over { within };
            return self.refuse_join(from, join.request, JoinRefusedKind::Over, &failure);
        }
        let member = self.member(&key, from, &asked);
        let came = Came {
            session: from,
            request: join.request,
            member,
            key: asked.key,
            least: asked.least,
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
        self.regroups.sets.entry(key).or_default().push(came);
        self.regroups.look();
    }

    /// Which rank a process is, if it is one of a communicator under this name.
    fn member(&self, key: &Key, from: SessionId, asked: &v1::Regroup) -> Option<(u64, u32)> {
        let (id, rank) = (asked.communicator, asked.member);
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
            return Err((Kind::Invalid, JoinFailure::BadSize { ranks, most }));
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
        let anew = set.is_empty() && self.before(key).is_none();
        if anew && self.communicators_of(tenant, name) >= self.settings.most_communicators {
            let most = self.settings.most_communicators;
            return Err((Kind::Limit, JoinFailure::TooManyCommunicators { most }));
        }
        Ok(())
    }

    /// What a tenant has of communicators, those that wait included, and those kept for their members but under this name.
    pub(super) fn communicators_of(&self, tenant: &str, name: &str) -> usize {
        let live = self.communicators.values().filter(|known| known.tenant == tenant).count();
        let waiting = self.waiting.keys().filter(|(of, _)| of == tenant).count();
        live + waiting + self.regroups.places(tenant, name)
    }

    /// The latest communicator of a name that is or was in use and has ranks left; none where that one is over. Those whose hosts are withdrawn
    /// are not expected to go on.
    fn before(&self, key: &Key) -> Option<Before> {
        let named = |known: &&Communicator| (&known.tenant, &known.name) == (&key.0, &key.1);
        let live = self.communicators.iter().filter(|(_, known)| known.epoch != 0 && named(known));
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
        let expected = stays.map(|(rank, _)| *rank).collect();
        Some(Before { id, budget: past.budget.clone(), expected })
    }

    /// Forms what is complete.
    pub(super) fn close_regroups(&mut self, now: Duration) {
        while std::mem::take(&mut self.regroups.changed) {
            for key in self.regroups.sets.keys().cloned().collect::<Vec<_>>() {
                self.close_regroup(now, &key, false);
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
        waiting.chain(self.kept().into_iter().map(|(_, at)| at)).min()
    }

    /// Communicators that are kept for their members, of which none is about to go on, and until when.
    fn kept(&self) -> Vec<(u64, Duration)> {
        let kept = self.regroups.past.iter().filter_map(|(id, past)| match past.going {
            Going::Until { at, .. } => Some((*id, at)),
            Going::Open | Going::Over { .. } => None,
        });
        let mut kept: Vec<(u64, Duration)> = kept.collect();
        // Asked at each turn, and mostly there are none.
        if !kept.is_empty() {
            let next = self.communicators.values().filter_map(|known| known.succeeds);
            let next: BTreeSet<u64> = next.collect();
            kept.retain(|(id, _)| !next.contains(id));
        }
        kept
    }

    /// The members of a communicator had their time: it goes on with those who came, or is over.
    fn expire_kept(&mut self, now: Duration) {
        for (id, _) in self.kept().into_iter().filter(|(_, at)| *at <= now) {
            let Some(key) = self.regroups.past.get(&id).map(|past| past.key.clone()) else { continue };
            let latest = self.before(&key).is_some_and(|before| before.id == id);
            if !latest || !self.close_regroup(now, &key, true) {
                self.end_kept(now, id);
            }
        }
    }

    /// A communicator that is kept for its members is over. Whether there was one.
    pub(super) fn end_kept(&mut self, now: Duration, id: u64) -> bool {
        let Some(past) = self.regroups.past.get_mut(&id) else { return false };
        let Going::Until { within, .. } = past.going else { return false };
        (past.going, past.agreement) = (Going::Over { within: Some(within) }, None);
        let key = past.key.clone();
        self.refuse_over(id, &key, Some(within));
        let (tenant, name) = key;
        self.note_over(now, id, &tenant, &name);
        self.fact(Logged::NotRegrouped { communicator: id, tenant, name, within });
        true
    }

    /// A communicator has ended: what is kept of it, and who waits for what will not be.
    pub(super) fn keep_or_refuse(&mut self, id: u64) {
        let Some((key, going)) = self.regroups.past.get(&id).map(|past| (past.key.clone(), past.going))
        else {
            return;
        };
        match going {
            Going::Open => {}
            Going::Until { within, .. } => {
                let (tenant, name) = key;
                self.fact(Logged::Kept { communicator: id, tenant, name, within });
            }
            Going::Over { within } => self.refuse_over(id, &key, within),
        }
    }

    /// Refuses those who wait to go on from a communicator that is over.
    fn refuse_over(&mut self, id: u64, key: &Key, within: Option<Duration>) {
        let waiting = self.regroups.sets.get(key).into_iter().flatten();
        let members = waiting.filter(|came| came.member.is_some_and(|(of, _)| of == id));
        for came in members.cloned().collect::<Vec<_>>() {
            self.turn_away(key, &came, JoinRefusedKind::Over, &JoinFailure::Over { within });
        }
    }

    fn turn_away(&mut self, key: &Key, came: &Came, kind: JoinRefusedKind, failure: &JoinFailure) {
        self.forget_join(came.session, came.request);
        self.regroups.withdraw(key, came.session, came.request);
        self.refuse_join(came.session, came.request, kind, failure);
    }

    /// Goes on with those who came where a member has waited long enough; else refuses whoever has.
    pub(super) fn expire_regroups(&mut self, now: Duration) {
        self.expire_kept(now);
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
                let failure = JoinFailure::Regroup { came, least, missing: missing.clone() };
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
