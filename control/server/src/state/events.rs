//! What tenants are told while their communicators run: facts go into the tenant's feed of `disclose`, and what that makes of them
//! goes to whoever waits for it.

use super::communicator::Communicator;
use super::slowdown::{Latest, QUIET, Slowdown};
use super::{SessionId, State};
use harmonaize_abi::Rank;
use harmonaize_abi::session::{Clause, Event, EventBatch, EventCursor, EventKind, Level};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_disclose::{Fact, Feed, Limits};
use harmonaize_planner::{HostId, Rate};
use rand::Rng;
use std::collections::BTreeMap;
use std::time::Duration;

/// Most readers of one agent that wait at once.
const MOST_READERS: usize = 4096;

/// How long before a window of maintenance begins its hosts' ranks are told: enough to save in, and by then few are called off.
pub(super) const NOTICE: Duration = Duration::from_secs(120);

/// Longest wait: then the reader is told that nothing came, and asks again.
const LONGEST: Duration = Duration::from_secs(60);

/// The tenants' feeds, and who waits for them.
#[derive(Debug, Default)]
pub(super) struct Events {
    feeds: BTreeMap<String, Feed>,
    readers: BTreeMap<(SessionId, u64), Reader>,
    /// By communicator: the least slowdown that it has been planned for, which is what it can expect.
    best: BTreeMap<u64, f64>,
    /// What of each tenant's own slows its communicators, as it was when `best` was looked at: which there are, what they weigh, and
    /// what they are promised.
    own: BTreeMap<String, Own>,
    /// By communicator: what it was planned for last.
    slowdowns: BTreeMap<u64, f64>,
    /// By communicator: the part of its expected rate that others leave it by the last plan.
    pub(super) remaining: BTreeMap<u64, f64>,
    /// By communicator: what its operations show.
    pub(super) slowness: BTreeMap<u64, Slowdown>,
    /// By tenant: whose operations were heard of last.
    pub(super) latest: BTreeMap<String, Latest>,
    /// All facts that went into feeds: what tenants would see if nothing stood between.
    #[cfg(feature = "testing")]
    pub(super) facts: Vec<(Duration, u64, Fact)>,
}

/// A tenant's communicators, each with its share in quarters and what it is promised.
type Own = BTreeMap<u64, (u32, Rate)>;

#[derive(Debug)]
struct Reader {
    tenant: String,
    from: EventCursor,
    until: Duration,
}

impl Reader {
    /// What it is answered, unless it is to wait on.
    fn answer(&self, feeds: &BTreeMap<String, Feed>, now: Duration, request: u64) -> Option<v1::EventsRead> {
        match feeds.get(&self.tenant).map(|feed| feed.read(self.from)) {
            None => Some(refused(request, "the tenant is gone")),
            Some(Err(error)) => Some(refused(request, &error.to_string())),
            Some(Ok(batch)) if batch.events.is_empty() && batch.missed == 0 && now < self.until => None,
            Some(Ok(batch)) => Some(read(request, batch)),
        }
    }
}

impl State {
    /// A process of a tenant wants events.
    pub(super) fn read_events(
        &mut self,
        now: Duration,
        session: SessionId,
        request: v1::ReadEvents,
    ) -> Result<(), &'static str> {
        let v1::ReadEvents { request, tenant, from, wait_ns } = request;
        if self.events.readers.contains_key(&(session, request)) {
            return Err("a number of ReadEvents twice");
        }
        let waiting = self.events.readers.range((session, 0)..=(session, u64::MAX)).count();
        if !self.settings.tenants.contains(&tenant) {
            self.send_events(session, refused(request, "the provider does not know this tenant"));
            return Ok(());
        }
        if waiting >= MOST_READERS {
            self.send_events(session, refused(request, "too many processes wait for events; try again"));
            return Ok(());
        }
        // There is one for whoever asks, also with a cursor from before control began.
        let end = self.feed(&tenant).end();
        let from = from.map_or(end, |v1::EventCursor { feed, next }| EventCursor { feed, next });
        let wait = Duration::from_nanos(wait_ns).min(LONGEST);
        let reader = Reader { tenant, from, until: now.saturating_add(wait) };
        // Its own answer alone: of many who read on after a tick each would else look for all.
        match reader.answer(&self.events.feeds, now, request) {
            Some(answer) => self.send_events(session, answer),
            None => drop(self.events.readers.insert((session, request), reader)),
        }
        Ok(())
    }

    fn send_events(&mut self, session: SessionId, answer: v1::EventsRead) {
        self.send(session, to_agent::Message::EventsRead(answer));
    }

    pub(super) fn feed(&mut self, tenant: &str) -> &mut Feed {
        let Self { events, random, .. } = self;
        let new = || Feed::new(random.next_u64(), Limits::default());
        events.feeds.entry(tenant.to_owned()).or_insert_with(new)
    }

    /// The clock of the feeds: CLOCK_REALTIME.
    pub(super) fn events_clock(&self, now: Duration) -> Duration {
        Duration::from_nanos(self.operator.realtime(now))
    }

    /// Takes note of a fact about a communicator that there is.
    pub(super) fn note(&mut self, now: Duration, id: u64, fact: Fact) {
        let clock = self.events_clock(now);
        let Some(known) = self.communicators.get(&id) else { return };
        let (tenant, name) = (known.tenant.clone(), known.name.clone());
        #[cfg(feature = "testing")]
        self.events.facts.push((now, id, fact.clone()));
        self.feed(&tenant).note((id, &name), fact, clock);
    }

    /// A communicator's operations take another way.
    pub(super) fn note_plan_changed(&mut self, now: Duration, id: u64) {
        self.note(now, id, Fact::PlanChanged);
    }

    /// Ranks are lost, and their communicator with them; the others are expected to go on within so long, if that was agreed on.
    pub(super) fn note_lost(&mut self, now: Duration, id: u64, ranks: &[u32], within: Option<Duration>) {
        let ranks = ranks.iter().copied().map(Rank).collect();
        let regroup_by = within.map(|within| self.events_clock(now).saturating_add(within));
        self.note(now, id, Fact::Failure { ranks, regroup_by });
    }

    /// The members of a communicator that has ended have not gone on in time: nothing is promised for it any more.
    pub(super) fn note_over(&mut self, now: Duration, id: u64, tenant: &str, name: &str) {
        let clock = self.events_clock(now);
        let feed = self.feed(tenant);
        let over = Fact::AgreementEnded { clauses: [Clause::OnFailure].into() };
        feed.note((id, name), over, clock);
        feed.note((id, name), Fact::Ended, clock);
    }

    /// A communicator is about to be forgotten.
    pub(super) fn note_end(&mut self, now: Duration, id: u64) {
        self.note(now, id, Fact::Ended);
        self.events.best.remove(&id);
        self.events.slowdowns.remove(&id);
        self.events.remaining.remove(&id);
        self.events.slowness.remove(&id);
    }

    /// What tenants run themselves is nobody else's traffic: where that has changed, a communicator's best becomes what leaves it the share
    /// of it that it had. Who starts one communicator beside another would else be told whether the two meet.
    fn own_changed(&mut self, planned: &[(u64, f64)]) {
        let mut own: BTreeMap<String, Own> = BTreeMap::new();
        for (id, known) in &self.communicators {
            let terms = (self.agreements.quarters(*id), self.agreements.promised(*id));
            own.entry(known.tenant.clone()).or_default().insert(*id, terms);
        }
        let Events { best, own: before, slowdowns, .. } = &mut self.events;
        let tenant = |id: u64| self.communicators.get(&id).map(|known| &known.tenant);
        let changed: Vec<u64> = planned
            .iter()
            .map(|(id, _)| *id)
            .filter(|id| tenant(*id).is_some_and(|tenant| own.get(tenant) != before.get(tenant)))
            .collect();
        for (id, slowdown) in planned {
            let was = slowdowns.insert(*id, *slowdown).unwrap_or(*slowdown);
            if changed.contains(id)
                && let Some(best) = best.get_mut(id)
                && slowdown.is_finite()
                && was.is_finite()
                && was > 0.0
            {
                *best *= slowdown / was;
            }
        }
        *before = own;
        changed.into_iter().for_each(|id| self.forget_usual(id));
    }

    /// How all communicators are slowed now, by what was planned last. While something is out of use that is the cause of what they
    /// would lack without others' traffic, and this of the rest. Returns those that are planned.
    pub(super) fn note_rates(&mut self, now: Duration) -> Vec<u64> {
        let withdrawn = self.withdrawn();
        let whole = withdrawn.hosts.is_empty() && withdrawn.switches.is_empty() && withdrawn.links.is_empty();
        let whole = whole && !self.link_state.failures.any();
        let undisturbed = if whole { BTreeMap::new() } else { self.undisturbed(now) };
        let slowdown = |known: &Communicator| Some(known.current()?.plan.as_ref()?.slowdown);
        let planned = self.communicators.iter().filter_map(|(id, known)| Some((*id, slowdown(known)?)));
        let planned: Vec<(u64, f64)> = planned.collect();
        self.own_changed(&planned);
        let ids = planned.iter().map(|(id, _)| *id).collect();
        for (id, slowdown) in planned {
            let best = self.events.best.entry(id).or_insert(slowdown);
            *best = best.min(slowdown);
            let part = |of: f64, slowdown: f64| {
                if slowdown.is_finite() && slowdown > 0.0 { (of / slowdown).min(1.0) } else { 0.0 }
            };
            let (congestion, capacity) = match undisturbed.get(&id) {
                Some(alone) if alone.is_finite() => (part(*alone, slowdown), part(*best, *alone)),
                Some(_) => (1.0, 0.0),
                None => (part(*best, slowdown), 1.0),
            };
            self.events.remaining.insert(id, congestion);
            self.note_congestion(now, id, true);
            self.note(now, id, Fact::Capacity { share: capacity });
        }
        ids
    }

    /// How all communicators would be slowed, as they run or are about to, if others had no traffic.
    fn undisturbed(&self, now: Duration) -> BTreeMap<u64, f64> {
        let mut jobs = self.jobs(now);
        jobs.iter_mut().for_each(|job| job.movable = false);
        let mut conditions = self.conditions();
        for (link, _) in self.link_state.estimates() {
            let rate = self.settings.topology.links().get(link.link.0).map(|link| link.rate);
            conditions.set_available(link, rate.unwrap_or_default());
        }
        let plan = self.checked(&jobs, &conditions).ok();
        let each = plan.into_iter().flat_map(|plan| plan.assignments);
        each.map(|part| (part.communicator, part.slowdown)).collect()
    }

    /// An operation took so many nanoseconds from its last rank's call, as all agents tell.
    pub(super) fn operation_took(&mut self, now: Duration, id: u64, bytes: u64, took: u64) {
        let Some(tenant) = self.communicators.get(&id).map(|known| &known.tenant) else { return };
        let Events { slowness, latest, .. } = &mut self.events;
        let latest = match latest.get_mut(tenant) {
            Some(latest) => latest,
            None => latest.entry(tenant.clone()).or_default(),
        };
        if latest[0].is_none_or(|(last, _)| last != id) {
            latest.swap(0, 1);
        }
        latest[0] = Some((id, now));
        // Those before it were forgotten as it told of its own.
        let other = latest[1].filter(|(other, heard)| *heard + QUIET > now && slowness.contains_key(other));
        let own = slowness.entry(id).or_default();
        own.operation(bytes, took);
        if let Some((other, _)) = other {
            own.forget();
            self.forget_usual(other);
            self.note_congestion(now, other, false);
        }
        self.note_congestion(now, id, false);
    }

    /// An agent says that a long queue stands on a path of a communicator.
    pub(super) fn queue_stands(&mut self, now: Duration, id: u64) {
        self.events.slowness.entry(id).or_default().queue_stands(now);
    }

    /// A communicator is slowed by others as the last plan says, or as its operations show, whichever is worse. Always noted where a plan was
    /// made, else where it is other than before.
    pub(super) fn note_congestion(&mut self, now: Duration, id: u64, planned: bool) {
        let measured = self.events.slowness.get(&id).map_or(1.0, |known| known.share(now));
        let share = self.events.remaining.get(&id).copied().unwrap_or(1.0).min(measured);
        let other = self.events.slowness.entry(id).or_default().note(share);
        if planned || other {
            self.note(now, id, Fact::Congestion { share });
        }
    }

    /// A communicator's own tenant runs other things now.
    pub(super) fn forget_usual(&mut self, id: u64) {
        if let Some(known) = self.events.slowness.get_mut(&id) {
            known.forget();
        }
    }

    /// Which ranks' hosts are taken away, or will be: of one communicator, or of all.
    pub(super) fn note_maintenance(&mut self, now: Duration, one: Option<u64>) {
        let hosts = self.hosts_to_go(now);
        let wanted = |id: &u64| one.is_none_or(|one| one == *id);
        for id in self.communicators.keys().copied().filter(wanted).collect::<Vec<_>>() {
            let Some(known) = self.communicators.get(&id) else { continue };
            let ranks = known.members.iter().filter_map(|member| Some((member, *hosts.get(&member.host)?)));
            let ranks = ranks.flat_map(|(member, at)| member.ranks.iter().map(move |rank| (Rank(*rank), at)));
            let ranks: BTreeMap<Rank, Duration> = ranks.collect();
            self.note(now, id, Fact::Maintenance { ranks });
        }
    }

    /// Hosts that operators have withdrawn, or will soon, and when; on the feeds' clock.
    fn hosts_to_go(&self, now: Duration) -> BTreeMap<HostId, Duration> {
        let mut hosts: BTreeMap<HostId, Duration> = BTreeMap::new();
        let soon = self.operator.realtime(now.saturating_add(NOTICE));
        for (host, from_ns) in self.host_withdrawals(self.operator.realtime(now)) {
            if from_ns > soon {
                continue;
            }
            let at = Duration::from_nanos(from_ns);
            hosts.entry(host).and_modify(|first| *first = at.min(*first)).or_insert(at);
        }
        hosts
    }

    /// When [`State::expire_events`] has something to do.
    pub(super) fn events_deadline(&self) -> Option<Duration> {
        let began = self.events_clock(Duration::ZERO);
        let due = self.events.feeds.values().filter_map(Feed::next_due).map(|at| at.saturating_sub(began));
        due.chain(self.events.readers.values().map(|reader| reader.until)).min()
    }

    /// Makes the events that are due, and answers who waits for them, or has waited long enough.
    pub(super) fn expire_events(&mut self, now: Duration) {
        let clock = self.events_clock(now);
        self.events.feeds.values_mut().for_each(|feed| feed.poll(clock));
        self.answer_readers(now);
    }

    fn answer_readers(&mut self, now: Duration) {
        let mut answers = Vec::new();
        let Events { feeds, readers, .. } = &mut self.events;
        readers.retain(|(session, request), reader| match reader.answer(feeds, now, *request) {
            Some(answer) => {
                answers.push((*session, answer));
                false
            }
            None => true,
        });
        for (session, answer) in answers {
            self.send_events(session, answer);
        }
    }

    /// A tenant is no more.
    pub(super) fn forget_feed(&mut self, now: Duration, tenant: &str) {
        self.events.feeds.remove(tenant);
        self.answer_readers(now);
    }

    /// A session is over.
    pub(super) fn forget_readers(&mut self, session: SessionId) {
        self.events.readers.retain(|(of, _), _| *of != session);
    }
}

fn refused(request: u64, why: &str) -> v1::EventsRead {
    v1::EventsRead { request, refused: why.to_owned(), ..v1::EventsRead::default() }
}

fn read(request: u64, batch: EventBatch) -> v1::EventsRead {
    let EventBatch { missed, events, cursor: EventCursor { feed, next } } = batch;
    let events = events.into_iter().map(to_proto).collect();
    v1::EventsRead {
        request,
        missed,
        events,
        cursor: Some(v1::EventCursor { feed, next }),
        ..Default::default()
    }
}

fn to_proto(event: Event) -> v1::TenantEvent {
    use v1::EventKind as Told;
    let Event { number, communicator, kind, since_ns } = event;
    let level = |level| match level {
        Level::None => v1::EventLevel::None,
        Level::Mild => v1::EventLevel::Mild,
        Level::Severe => v1::EventLevel::Severe,
    };
    let numbers = |ranks: Vec<Rank>| ranks.into_iter().map(|Rank(rank)| rank).collect();
    let mut waiting = 0;
    let mut clauses = Vec::new();
    let (kind, level, ranks, at_ns) = match kind {
        EventKind::Congestion(how) => (Told::Congestion, level(how), Vec::new(), 0),
        EventKind::Capacity(how) => (Told::Capacity, level(how), Vec::new(), 0),
        EventKind::Failure { ranks, regroup_by_ns } => {
            (Told::Failure, level(Level::None), numbers(ranks), regroup_by_ns)
        }
        EventKind::Maintenance { ranks, at_ns } => {
            (Told::Maintenance, level(Level::None), numbers(ranks), at_ns)
        }
        EventKind::PlanChanged => (Told::PlanChanged, level(Level::None), Vec::new(), 0),
        EventKind::Newcomers { waiting: count } => {
            waiting = count;
            (Told::Newcomers, level(Level::None), Vec::new(), 0)
        }
        EventKind::AgreementBroken { clauses: broken } => {
            clauses = harmonaize_api::clause_numbers(&broken);
            (Told::AgreementBroken, level(Level::None), Vec::new(), 0)
        }
        EventKind::AgreementEnded { clauses: lost } => {
            clauses = harmonaize_api::clause_numbers(&lost);
            (Told::AgreementEnded, level(Level::None), Vec::new(), 0)
        }
    };
    let (kind, level) = (kind.into(), level.into());
    v1::TenantEvent { number, communicator, kind, level, ranks, at_ns, since_ns, clauses, waiting }
}
