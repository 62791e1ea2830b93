//! What is left of communicators that ended. That is who of their members may go on, until when, and what is kept for
//! them meanwhile.
//!
//! Where something was agreed on it outlives a restart of control: it is stored together with the end of its
//! agreement, and agents say in their first message which of their ended communicators still have processes.
//! One of which control died before it could store that it had failed is known by its agreement, which then
//! is there still.

use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::codec;
use crate::state::job::communicator::{Communicator, EndCause};
use crate::state::output::SessionId;
use crate::state::settings::Settings;
use crate::state::tenants::inherited::InheritedAgreement;
use crate::state::time::nanos;
use crate::state::timed::{Due, Timed};
use crate::state::world::operator::Operator;
use harmonaize_abi::session::{Budget as Said, OnFailure};
use harmonaize_abi::{CommunicatorId, Nanos};
use harmonaize_api::v1::{self, FailureKind};
use harmonaize_codec::Budget;
use harmonaize_planner::{HostId, Rate};
use harmonaize_store::{Change, Past as Stored, PastRank};
use prost::Message;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long after something could not be stored that is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// What could not be stored: of communicators that failed, and that nothing is promised for these any more.
#[derive(Debug, Default)]
struct Unstored {
    pasts: BTreeSet<CommunicatorId>,
    agreements: BTreeSet<CommunicatorId>,
    /// When it is tried again.
    pub at: Option<Duration>,
}

impl Unstored {
    fn is_empty(&self) -> bool {
        self.pasts.is_empty() && self.agreements.is_empty()
    }
}

/// A communicator that has ended.
#[derive(Debug)]
pub(crate) struct Past {
    pub key: Key,
    pub budget: Budget,
    /// What was promised for it, and where it ran.
    pub agreement: Option<InheritedAgreement>,
    hosts: Vec<HostId>,
    pub going: Going,
    /// Whether its members had more time because what they went on in did not come about.
    prolonged: bool,
    /// Ranks whose processes are there still, and their agents' sessions.
    pub ranks: BTreeMap<u32, SessionId>,
    /// Ranks of agents that have no session, and until when they may come back.
    pub absent: BTreeMap<u32, HostId>,
    absent_until: Duration,
    /// Whether a communicator forms that goes on from it.
    forms: bool,
}

impl Past {
    /// Until when it is kept for its members, as long as none of them is about to go on.
    fn retained_until(&self) -> Option<Duration> {
        match self.going {
            Going::Until { at, .. } if !self.forms => Some(at),
            _ => None,
        }
    }

    /// When agents that have not come back are waited for no longer.
    fn awaits_until(&self) -> Option<Duration> {
        (!self.absent.is_empty()).then_some(self.absent_until)
    }
}

impl Due for Past {
    fn next_timeout(&self) -> Option<Duration> {
        self.retained_until().into_iter().chain(self.awaits_until()).min()
    }
}

/// Whether the members of a communicator that has ended can go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Going {
    /// As long as they are there.
    Open,
    /// Until `at`; what was promised for it and its place are kept for them.
    Until { at: Duration, within: Duration },
    /// No, or not any more: they had so long.
    Over { within: Option<Duration> },
}

impl Going {
    /// As was agreed on, for communicators that fail.
    fn after(now: Duration, kind: FailureKind, agreement: Option<&InheritedAgreement>) -> Self {
        match agreement.and_then(InheritedAgreement::on_failure).filter(|_| kind != FailureKind::Operator) {
            None => Self::Open,
            Some(OnFailure::End) => Self::Over { within: None },
            Some(OnFailure::Regroup { within }) => Self::Until { at: now.saturating_add(within), within },
        }
    }
}

/// A tenant and its name for a communicator.
pub(crate) type Key = (String, String);

/// Communicators that have ended, until none of their ranks is left or the next one is in use.
#[derive(Debug, Default)]
pub(crate) struct Pasts {
    past: Timed<CommunicatorId, Past>,
    /// Communicators from which others go on that form, and those.
    forming: BTreeSet<(CommunicatorId, CommunicatorId)>,
    /// Those of which something else may have to be stored than is, and those of which something is.
    unsaved: BTreeSet<CommunicatorId>,
    stored: BTreeSet<CommunicatorId>,
    again: Unstored,
    /// Names under which somebody else may be expected now.
    changed: BTreeSet<Key>,
}

impl Pasts {
    /// Returns one that has ended.
    pub(crate) fn get(&self, id: CommunicatorId) -> Option<&Past> {
        self.past.get(&id)
    }

    /// Returns the latest under a name.
    pub(crate) fn latest(&self, key: &Key) -> Option<CommunicatorId> {
        self.past.iter().filter(|(_, past)| past.key == *key).map(|(id, _)| *id).max()
    }

    /// A communicator that goes on from `before` begins to form.
    pub(crate) fn next_forms(&mut self, before: CommunicatorId, next: CommunicatorId) {
        self.forming.insert((before, next));
        self.update_forms(before);
    }

    /// It forms no longer: it is in use, or it is over.
    pub(crate) fn next_formed(&mut self, before: CommunicatorId, next: CommunicatorId) {
        self.forming.remove(&(before, next));
        self.update_forms(before);
    }

    /// Whether a communicator forms that goes on from this one.
    fn forms(&self, before: CommunicatorId) -> bool {
        let last = CommunicatorId(u64::MAX);
        self.forming.range((before, CommunicatorId(0))..=(before, last)).next().is_some()
    }

    fn update_forms(&mut self, before: CommunicatorId) {
        let forms = self.forms(before);
        if let Some(past) = self.past.get_mut(&before) {
            past.forms = forms;
        }
    }

    /// Takes in one that has ended.
    fn insert(&mut self, id: CommunicatorId, past: Past) {
        let forms = self.forms(id);
        self.past.insert(id, Past { forms, ..past });
    }

    /// Whether nothing is known of communicators that ended.
    #[cfg(feature = "testing")]
    pub(crate) fn is_empty(&self) -> bool {
        self.past.is_empty()
    }

    /// Takes the names under which somebody else may be expected now.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<Key> {
        std::mem::take(&mut self.changed)
    }

    fn mark_due(&mut self, key: &Key) {
        self.changed.insert(key.clone());
    }

    /// Names of a tenant's communicators that are kept for their members.
    pub(crate) fn retained_names(&self, tenant: &str) -> BTreeSet<&String> {
        let kept = self.past.values().filter(|past| matches!(past.going, Going::Until { .. }));
        kept.filter(|past| past.key.0 == tenant).map(|past| &past.key.1).collect()
    }

    /// What is set aside for members of communicators that ended: by communicator, along its hosts.
    pub(crate) fn set_aside(&self) -> impl Iterator<Item = (CommunicatorId, &[HostId], Rate)> {
        let kept = self.past.iter().filter(|(_, past)| matches!(past.going, Going::Until { .. }));
        kept.filter_map(|(id, past)| Some((*id, past.hosts.as_slice(), past.agreement.as_ref()?.rate())))
    }

    /// Whether a process asks to go on from a communicator that is over; and how long its members had.
    pub(crate) fn over(&self, key: &Key, from: SessionId, asked: &v1::Regroup) -> Option<Option<Duration>> {
        let past = self.past.get(&CommunicatorId(asked.communicator)).filter(|past| past.key == *key)?;
        match past.going {
            Going::Over { within } if past.ranks.get(&asked.previous_rank) == Some(&from) => Some(within),
            _ => None,
        }
    }

    /// Whether it is known to have ended.
    pub(crate) fn is_past(&self, id: CommunicatorId) -> bool {
        self.past.contains_key(&id)
    }

    /// A rank has left a communicator; of one that has ended it is no longer expected.
    pub(crate) fn member_left(&mut self, id: CommunicatorId, rank: u32, session: SessionId) {
        if let Some(past) = self.past.get_mut(&id)
            && past.ranks.get(&rank) == Some(&session)
        {
            past.ranks.remove(&rank);
            let key = past.key.clone();
            self.mark_due(&key);
            self.forget_empty();
        }
    }

    /// A host's agent has no session any more; its ranks are waited for until then.
    pub(crate) fn session_ended(&mut self, (host, session): (HostId, SessionId), until: Duration) {
        for id in self.ids_where(|past| past.ranks.values().any(|of| *of == session)) {
            let Some(past) = self.past.get_mut(&id) else { continue };
            let gone = past.ranks.extract_if(.., |_, of| *of == session).map(|(rank, _)| (rank, host));
            let before = past.absent.len();
            past.absent.extend(gone);
            if past.absent.len() > before {
                past.absent_until = past.absent_until.max(until);
            }
        }
    }

    /// A host's agent has said of a communicator that has ended which ranks are still there.
    pub(crate) fn back(
        &mut self,
        id: CommunicatorId,
        (host, session): (HostId, SessionId),
        here: impl Iterator<Item = u32>,
    ) {
        let Some(past) = self.past.get_mut(&id) else { return };
        for rank in here {
            if past.absent.get(&rank) == Some(&host) {
                past.absent.remove(&rank);
                past.ranks.insert(rank, session);
            }
        }
        let key = past.key.clone();
        self.mark_due(&key);
    }

    /// Takes in which ranks were lost as a communicator ended, from a member's agent. They are not waited for where their agents
    /// are away.
    pub(crate) fn lost(&mut self, id: CommunicatorId, from: SessionId, ranks: &[u32]) {
        let Some(past) = self.past.get_mut(&id) else { return };
        if past.ranks.values().any(|session| *session == from) {
            past.absent.retain(|rank, _| !ranks.contains(rank));
            let key = past.key.clone();
            self.mark_due(&key);
        }
    }

    /// Agents of these hosts have said all that they know: what they did not name is gone.
    pub(crate) fn all_back(&mut self, hosts: &BTreeMap<HostId, SessionId>) {
        let gone = |host: &HostId| hosts.contains_key(host);
        let ids = self.ids_where(|past| past.absent.values().any(gone));
        self.give_up(ids, gone);
    }

    /// Waits no longer for ranks of these communicators whose hosts are `gone`.
    fn give_up(&mut self, ids: Vec<CommunicatorId>, gone: impl Fn(&HostId) -> bool) {
        for id in &ids {
            let Some(past) = self.past.get_mut(id) else { continue };
            past.absent.retain(|_, host| !gone(host));
            self.changed.insert(past.key.clone());
        }
        if !ids.is_empty() {
            self.forget_empty();
        }
    }

    fn ids_where(&self, applies: impl Fn(&Past) -> bool) -> Vec<CommunicatorId> {
        self.past.iter().filter(|(_, past)| applies(past)).map(|(id, _)| *id).collect()
    }

    fn forget_empty(&mut self) {
        self.forget_where(|past| past.ranks.is_empty() && past.absent.is_empty());
    }

    fn forget_where(&mut self, applies: impl Fn(&Past) -> bool) {
        for id in self.ids_where(applies) {
            self.past.remove(&id);
            self.unsaved.insert(id);
        }
    }

    /// A communicator that was in use has ended, while agents of these hosts have sessions. Its ranks may go
    /// on, but for those that are lost.
    pub(crate) fn ended(
        &mut self,
        now: Duration,
        (id, ended): (CommunicatorId, &Communicator),
        cause: &EndCause,
        agreement: Option<InheritedAgreement>,
        hosts: &BTreeMap<HostId, SessionId>,
    ) {
        let going = Going::after(now, cause.kind, agreement.as_ref());
        // Where nobody can go on, who counts as lost and is there after all is told so too.
        let may = !matches!(going, Going::Over { .. });
        let lost = |rank: &u32| may && cause.kind == FailureKind::RanksLost && cause.ranks.contains(rank);
        let (mut ranks, mut absent) = (BTreeMap::new(), BTreeMap::new());
        let leases = ended.members.iter().filter_map(|member| member.lease);
        let absent_until = leases.max().unwrap_or(now);
        for member in ended.members.iter().filter(|member| !member.closed) {
            let left = member.ranks.iter().filter(|rank| !member.departed.contains(rank) && !lost(rank));
            match member.session {
                Some(session) => ranks.extend(left.map(|rank| (*rank, session))),
                None if member.lease.is_some_and(|until| until > now)
                    && !hosts.contains_key(&member.host) =>
                {
                    absent.extend(left.map(|rank| (*rank, member.host)));
                }
                None => {}
            }
        }
        let past = Past {
            key: (ended.tenant.clone(), ended.name.clone()),
            budget: ended.coding.agreed().clone(),
            agreement,
            hosts: ended.members.iter().map(|member| member.host).collect(),
            going,
            prolonged: false,
            ranks,
            absent,
            absent_until,
            forms: false,
        };
        let key = past.key.clone();
        let some_left = !past.ranks.is_empty() || !past.absent.is_empty();
        if some_left && !ended.is_forming() {
            self.insert(id, past);
            self.unsaved.insert(id);
        }
        self.mark_due(&key);
    }

    /// Gives members more time, as what they went on in did not come about. They may try again until then, whatever time they
    /// had, but once.
    pub(crate) fn prolong(&mut self, id: CommunicatorId, until: Duration) {
        if let Some(past) = self.past.get_mut(&id)
            && let Going::Until { at, .. } = &mut past.going
            && *at < until
            && !past.prolonged
        {
            (*at, past.prolonged) = (until, true);
            self.unsaved.insert(id);
        }
    }

    /// What was promised for a communicator that has ended, for the one that goes on from it.
    pub(crate) fn take_agreement(&mut self, id: CommunicatorId) -> Option<InheritedAgreement> {
        self.unsaved.insert(id);
        self.past.get_mut(&id).and_then(|past| past.agreement.take())
    }

    /// Drops what is kept for earlier communicators of this name. A communicator of the name is in use that went on from none.
    pub(crate) fn superseded(&mut self, tenant: &str, name: &str) {
        self.overtaken(tenant, name, CommunicatorId(u64::MAX));
    }

    /// The same of a communicator with this number.
    pub(crate) fn overtaken(&mut self, tenant: &str, name: &str, by: CommunicatorId) {
        let before = self.past.range(..by).filter(|(_, past)| past.key.0 == tenant && past.key.1 == name);
        let kept = before.filter(|(_, past)| matches!(past.going, Going::Until { .. }));
        for id in kept.map(|(id, _)| *id).collect::<Vec<_>>() {
            let Some(past) = self.past.get_mut(&id) else { continue };
            (past.going, past.agreement) = (Going::Open, None);
            self.unsaved.insert(id);
        }
    }

    /// A tenant is gone: nothing is kept of what it had.
    pub(crate) fn forget(&mut self, tenant: &str) {
        self.forget_where(|past| past.key.0 == tenant);
    }

    /// A communicator that went on from another under its name is in use.
    pub(crate) fn succeeded(&mut self, before: CommunicatorId, key: &Key) {
        self.past.remove(&before);
        self.unsaved.insert(before);
        self.mark_due(key);
    }

    /// The latest that is kept of a name from before a communicator of it.
    pub(crate) fn retained_predecessor(
        &self,
        tenant: &str,
        name: &str,
        id: CommunicatorId,
    ) -> Option<CommunicatorId> {
        let before = self.past.range(..id).rev();
        let mut kept = before.filter(|(_, past)| matches!(past.going, Going::Until { .. }));
        kept.find(|(_, past)| past.key.0 == tenant && past.key.1 == name).map(|(id, _)| *id)
    }

    /// Gives those up that have not come back in time.
    pub(crate) fn expire_absent(&mut self, now: Duration) {
        let mut late = self.past.due(now);
        let awaits = |id: &CommunicatorId| self.past.get(id)?.awaits_until();
        late.retain(|id| awaits(id).is_some_and(|until| until <= now));
        self.give_up(late, |_| true);
    }

    /// Ends what is kept of a communicator for its members. Returns its name, and how long they had; none
    /// where nothing was kept.
    pub(crate) fn end_retained(&mut self, id: CommunicatorId) -> Option<(Key, Duration)> {
        let past = self.past.get_mut(&id)?;
        let Going::Until { within, .. } = past.going else { return None };
        (past.going, past.agreement) = (Going::Over { within: Some(within) }, None);
        let key = past.key.clone();
        self.unsaved.insert(id);
        Some((key, within))
    }

    /// Returns those whose members had their time to go on, and of which none is about to, ascending.
    pub(crate) fn overdue(&self, now: Duration) -> Vec<CommunicatorId> {
        let mut overdue = self.past.due(now);
        let kept = |id: &CommunicatorId| self.past.get(id)?.retained_until();
        overdue.retain(|id| kept(id).is_some_and(|until| until <= now));
        overdue
    }

    /// Returns when something of those that ended is due.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        self.past.next_timeout().into_iter().chain(self.again.at).min()
    }

    /// Has what has changed of communicators that failed stored.
    pub(crate) fn store(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        for id in std::mem::take(&mut self.unsaved) {
            match self.record(ctx, id) {
                Some(record) => {
                    self.stored.insert(id);
                    effects.store(Change::Past(Box::new(record)));
                }
                None if self.stored.remove(&id) => effects.store(Change::NoPast(id)),
                None => {}
            }
        }
    }

    /// Some of this could not be stored. What was to be kept of communicators that failed, or no longer, is
    /// stored once more after a pause, as it is then. So is that nothing is promised for them any more, or a
    /// restart would find both.
    pub(crate) fn store_again(&mut self, now: Duration, changes: &[Change]) {
        let again = &mut self.again;
        for change in changes {
            match change {
                Change::Past(record) => drop(again.pasts.insert(CommunicatorId(record.communicator))),
                Change::NoPast(id) => {
                    self.stored.insert(*id);
                    again.pasts.insert(*id);
                }
                Change::NoAgreement(id) => drop(again.agreements.insert(*id)),
                _ => {}
            }
        }
        if !again.is_empty() {
            again.at.get_or_insert(now.saturating_add(AGAIN));
        }
    }

    /// Has stored what could not be, once it is time.
    pub(crate) fn expire_unstored(&mut self, now: Duration, effects: &mut Effects) {
        if self.again.at.is_some_and(|at| at <= now) {
            let Unstored { pasts, agreements, .. } = std::mem::take(&mut self.again);
            self.unsaved.extend(pasts);
            agreements.into_iter().for_each(|id| effects.store(Change::NoAgreement(id)));
        }
    }

    /// What is to be stored of a communicator that failed; nothing where nothing was agreed on.
    fn record(&self, ctx: &Ctx<'_>, id: CommunicatorId) -> Option<Stored> {
        let past = self.past.get(&id)?;
        let (within, until_ns) = match past.going {
            Going::Open => return None,
            Going::Until { at, within } => (within, ctx.operator.realtime(at).0.max(1)),
            Going::Over { within } => (within.unwrap_or_default(), 0),
        };
        let host = |session: &SessionId| ctx.sessions.get(session).map(|session| session.host);
        let here = past.ranks.iter().filter_map(|(rank, session)| Some((*rank, host(session)?)));
        let ranks = here.chain(past.absent.iter().map(|(rank, host)| (*rank, *host)));
        let lossy = Some(&past.budget).filter(|budget| **budget != Budget::Exact);
        let (tenant, name) = past.key.clone();
        Some(Stored {
            communicator: id.0,
            tenant,
            name,
            budget: lossy
                .map_or_else(Vec::new, |budget| v1::Budget::from(&Said::from(budget)).encode_to_vec()),
            hosts: past.hosts.iter().map(|host| ctx.host_name(*host)).collect(),
            ranks: ranks.map(|(rank, host)| PastRank { rank, host: ctx.host_name(host) }).collect(),
            agreement: past.agreement.as_ref().filter(|_| until_ns > 0).map(|left| left.record(id)),
            within_ns: nanos(within).0,
            until_ns,
            prolonged: past.prolonged,
        })
    }

    /// Takes up what an earlier start left of communicators that failed. Their members have as long as agents
    /// may take to come back, at least: while control was away nobody could ask.
    pub(crate) fn restore(
        &mut self,
        settings: &Settings,
        operator: &Operator,
        stored: BTreeMap<CommunicatorId, Stored>,
    ) {
        let absent_until = settings.lease;
        for (id, record) in stored {
            self.stored.insert(id);
            let host = |name: &String| settings.topology.host(name);
            let absent = record.ranks.iter().filter_map(|one| Some((one.rank, host(&one.host)?)));
            let absent: BTreeMap<u32, HostId> = absent.collect();
            if absent.is_empty() || !settings.tenants.contains(&record.tenant) {
                self.unsaved.insert(id);
                continue;
            }
            let within = Some(Duration::from_nanos(record.within_ns)).filter(|within| !within.is_zero());
            let until = operator.time(Nanos(record.until_ns)).max(absent_until);
            let going = match within.filter(|_| record.until_ns > 0) {
                Some(within) => Going::Until { at: until, within },
                None => Going::Over { within },
            };
            let lossy = (!record.budget.is_empty()).then(|| v1::Budget::decode(record.budget.as_slice()));
            let budget = codec::budget(lossy.and_then(Result::ok).as_ref()).unwrap_or(Budget::Exact);
            let past = Past {
                hosts: record.hosts.iter().filter_map(host).collect(),
                key: (record.tenant, record.name),
                budget,
                agreement: record
                    .agreement
                    .map(|agreement| InheritedAgreement::stored(&agreement, record.ranks.len())),
                going,
                prolonged: record.prolonged,
                ranks: BTreeMap::new(),
                absent,
                absent_until,
                forms: false,
            };
            self.insert(id, past);
        }
    }

    /// Takes in a communicator that failed, of which control knows nothing but what was promised. Control died before it could
    /// store the failure. What becomes of its members counts from now.
    pub(crate) fn recover(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        recipe: &v1::Recipe,
        agreement: InheritedAgreement,
    ) {
        let id = CommunicatorId(recipe.communicator);
        let going = Going::after(ctx.now, FailureKind::RanksLost, Some(&agreement));
        let host = |part: &v1::Participant| ctx.settings.topology.host(&part.host);
        let hosts = recipe.participants.iter().filter_map(host).collect();
        let ranks = recipe.participants.iter().filter_map(|part| Some((host(part)?, &part.ranks)));
        let absent = ranks.flat_map(|(host, ranks)| ranks.iter().map(move |rank| (*rank, host)));
        let past = Past {
            key: (recipe.tenant.clone(), recipe.name.clone()),
            budget: codec::budget(recipe.budget.as_ref()).unwrap_or(Budget::Exact),
            agreement: Some(agreement),
            hosts,
            going,
            prolonged: false,
            ranks: BTreeMap::new(),
            absent: absent.collect(),
            absent_until: ctx.now.saturating_add(ctx.settings.lease),
            forms: false,
        };
        self.insert(id, past);
        self.unsaved.insert(id);
        effects.store(Change::NoAgreement(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A communicator that is kept until 5 s. One of its agents has gone and has until 3 s; another is there.
    fn past() -> Past {
        Past {
            key: ("a".to_owned(), "world".to_owned()),
            budget: Budget::Exact,
            agreement: None,
            hosts: vec![HostId(0), HostId(1)],
            going: Going::Until { at: SECOND * 5, within: SECOND * 5 },
            prolonged: false,
            ranks: [(1, SessionId(1))].into(),
            absent: [(0, HostId(0))].into(),
            absent_until: SECOND * 3,
            forms: false,
        }
    }

    #[test]
    fn what_members_have_time_for_is_due() {
        let ids = [1, 2, 3, 4].map(CommunicatorId);
        let [first, second, third, fourth] = ids;
        let mut pasts = Pasts::default();
        pasts.next_forms(second, third);
        pasts.insert(first, past());
        pasts.insert(second, Past { absent: BTreeMap::new(), ..past() });
        assert_eq!(pasts.next_timeout(), Some(SECOND * 3));
        pasts.expire_absent(SECOND * 3);
        assert!(pasts.get(first).is_some_and(|past| past.absent.is_empty()));
        assert_eq!((pasts.next_timeout(), pasts.overdue(SECOND * 9)), (Some(SECOND * 5), vec![first]));
        pasts.next_forms(first, third);
        pasts.next_forms(first, fourth);
        pasts.next_formed(first, third);
        assert_eq!((pasts.next_timeout(), pasts.overdue(SECOND * 9)), (None, vec![]), "a next one forms");
        pasts.next_formed(first, fourth);
        pasts.next_formed(second, third);
        pasts.prolong(second, SECOND * 7);
        assert_eq!((pasts.next_timeout(), pasts.overdue(SECOND * 5)), (Some(SECOND * 5), vec![first]));
        assert_eq!(pasts.overdue(SECOND * 7), [first, second]);
        assert!(pasts.end_retained(first).is_some());
        assert_eq!((pasts.next_timeout(), pasts.overdue(SECOND * 7)), (Some(SECOND * 7), vec![second]));
        pasts.superseded("a", "world");
        assert_eq!(pasts.next_timeout(), None);
        pasts.session_ended((HostId(1), SessionId(1)), SECOND * 20);
        assert_eq!(pasts.next_timeout(), Some(SECOND * 20));
        pasts.expire_absent(SECOND * 20);
        assert!(ids.iter().all(|id| pasts.get(*id).is_none()) && pasts.next_timeout().is_none());
    }
}
