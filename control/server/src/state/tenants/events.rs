//! What tenants are told while their communicators run. Facts go into the tenant's feed of `disclose`, and
//! what that makes of them goes to whoever waits for it.

use crate::state::breach::Breach;
use crate::state::ctx::Ctx;
use crate::state::effects::{Effects, Note};
use crate::state::job::communicator::Communicator;
use crate::state::output::SessionId;
use crate::state::refusal::RequestRefusal;
use crate::state::tenants::agreements::Agreements;
use crate::state::tenants::batch::choose_batch;
use crate::state::tenants::readers::{Reader, Readers};
use crate::state::tenants::slowdown::{Latest, QUIET, Slowdown};
use crate::state::timed::{Due, Timed};
use crate::state::world::withdrawals::NOTICE;
use harmonaize_abi::session::{
    BatchChoice, BatchKnobs, Choice, ChoiceReason, Event, EventBatch, EventCursor, EventKind, Knobs, Refusal,
};
use harmonaize_abi::{Bytes, CommunicatorId, CongestionLevel, Rank};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_disclose::{Fact, Feed, Limits, choose};
use harmonaize_planner::{HostId, Rate};
use rand::Rng;
use rand_chacha::ChaCha20Rng;
use std::collections::BTreeMap;
use std::time::Duration;

/// Longest wait: then the reader is told that nothing came, and asks again.
const LONGEST: Duration = Duration::from_secs(60);

/// The tenants' feeds, and who waits for them.
#[derive(Debug)]
pub(crate) struct Events {
    random: ChaCha20Rng,
    feeds: Timed<String, Feed>,
    readers: Readers,
    /// By communicator: the least slowdown that it has been planned for, which is what it can expect.
    best: BTreeMap<CommunicatorId, f64>,
    /// What of each tenant's own slows its communicators, as it was when `best` was determined. It is which
    /// there are, what they weigh, and what they are promised.
    own: BTreeMap<String, Own>,
    /// By communicator: what it was planned for last.
    slowdowns: BTreeMap<CommunicatorId, f64>,
    /// By communicator: the part of its expected rate that others leave it by the last plan.
    pub(crate) remaining: BTreeMap<CommunicatorId, f64>,
    /// By communicator: what its operations show.
    pub(crate) slowness: BTreeMap<CommunicatorId, Slowdown>,
    /// By tenant: whose operations were heard of last.
    pub(crate) latest: BTreeMap<String, Latest>,
    /// All facts that went into feeds: what tenants would see if nothing stood between.
    #[cfg(feature = "testing")]
    pub(crate) facts: Vec<(Duration, CommunicatorId, Fact)>,
}

/// A tenant's communicators, each with its share in quarters and what it is promised.
type Own = BTreeMap<CommunicatorId, (u32, Rate)>;

impl Due for Feed {
    fn next_timeout(&self) -> Option<Duration> {
        self.next_due()
    }
}

impl Reader {
    /// What it is answered, unless it is to wait on.
    fn answer(&self, feeds: &BTreeMap<String, Feed>, now: Duration, request: u64) -> Option<v1::EventsRead> {
        match feeds.get(&self.tenant).map(|feed| feed.read(self.from)) {
            None => Some(refused(request, &RequestRefusal::TenantGone)),
            Some(Err(error)) => Some(refused(request, &error.into())),
            Some(Ok(batch)) if batch.events.is_empty() && batch.missed == 0 && now < self.until => None,
            Some(Ok(batch)) => Some(read(request, batch)),
        }
    }
}

impl Events {
    /// No tenant has a feed. Names of feeds come from `random`.
    pub(crate) fn new(random: ChaCha20Rng) -> Self {
        Self {
            random,
            feeds: Timed::default(),
            readers: Readers::default(),
            best: BTreeMap::new(),
            own: BTreeMap::new(),
            slowdowns: BTreeMap::new(),
            remaining: BTreeMap::new(),
            slowness: BTreeMap::new(),
            latest: BTreeMap::new(),
            #[cfg(feature = "testing")]
            facts: Vec::new(),
        }
    }

    /// A process of a tenant wants events.
    pub(crate) fn read(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        session: SessionId,
        request: v1::ReadEvents,
    ) -> Result<(), Breach> {
        let v1::ReadEvents { request, tenant, from, wait_ns } = request;
        if self.readers.waits(session, request) {
            return Err(Breach::ReadTwice);
        }
        if !ctx.settings.tenants.contains(&tenant) {
            send(effects, session, refused(request, &RequestRefusal::UnknownTenant));
            return Ok(());
        }
        if !self.readers.has_room(session, &tenant) {
            send(effects, session, refused(request, &RequestRefusal::TooManyReaders));
            return Ok(());
        }
        // There is one for whoever asks, also with a cursor from before control began.
        let end = self.feed(&tenant).end();
        let from = from.map_or(end, |v1::EventCursor { feed, next }| EventCursor { feed, next });
        let wait = Duration::from_nanos(wait_ns).min(LONGEST);
        let reader = Reader { tenant, from, until: ctx.now.saturating_add(wait) };
        // Its own answer alone: of many who read on after a tick each would else look for all.
        match reader.answer(&self.feeds, ctx.now, request) {
            Some(answer) => send(effects, session, answer),
            None => self.readers.add(session, request, reader),
        }
        Ok(())
    }

    /// The process that waited is gone.
    pub(crate) fn cancel(&mut self, session: SessionId, request: u64) {
        self.readers.remove(session, request);
    }

    /// An iteration of a tenant's job begins: answers which of its choices fits what it has been told.
    pub(crate) fn begin_iteration(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        asked: &v1::BeginIteration,
    ) {
        let (knobs, batch) = (asked.knobs(), asked.batch());
        let checked = knobs.check().and_then(|()| batch.map_or(Ok(()), |batch| batch.check()));
        let choice = match (ctx.named(&asked.tenant, &asked.communicator), checked) {
            (Err(refused), _) => Err(refused),
            (_, Err(error)) => Err(error.into()),
            (Ok(id), Ok(())) => self.chosen(ctx, &asked.tenant, id, &knobs, batch.as_ref()),
        };
        let answer = v1::IterationChoice::answer(asked.request, choice.map_err(Refusal::from));
        effects.send(from, to_agent::Message::IterationChoice(answer));
    }

    /// What is chosen for an iteration.
    fn chosen(
        &mut self,
        ctx: &Ctx<'_>,
        tenant: &str,
        id: CommunicatorId,
        knobs: &Knobs,
        batch: Option<&BatchKnobs>,
    ) -> Result<(Choice, Option<BatchChoice>), RequestRefusal> {
        let state = self.feed(tenant).current_state(id);
        let choice = choose(knobs, &state, clock(ctx, ctx.now));
        let Some((batch, communicator)) = batch.zip(ctx.communicators.get(&id)) else {
            return Ok((choice, None));
        };
        let (_, most) = knobs.accumulate;
        let chosen = choose_batch(batch, most, communicator.ranks, state.slowdown);
        let (accumulate, batch) = chosen?;
        let reason = match (choice.checkpoint, state.slowdown) {
            (true, _) => choice.reason,
            (false, CongestionLevel::None) => ChoiceReason::Usual,
            (false, _) => ChoiceReason::Slow,
        };
        Ok((Choice { accumulate, reason, ..choice }, Some(batch)))
    }

    pub(crate) fn feed(&mut self, tenant: &str) -> &mut Feed {
        let Self { feeds, random, .. } = self;
        let new = || Feed::new(random.next_u64(), Limits::default());
        feeds.entry(tenant.to_owned()).or_insert_with(new)
    }

    /// Takes note of a fact for a tenant.
    pub(crate) fn note(&mut self, ctx: &Ctx<'_>, Note { tenant, id, name, fact }: Note) {
        #[cfg(feature = "testing")]
        self.facts.push((ctx.now, id, fact.clone()));
        self.feed(&tenant).note((id, &name), fact, clock(ctx, ctx.now));
    }

    /// A communicator is about to be forgotten.
    pub(crate) fn forget(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId) {
        effects.note(ctx, id, Fact::Ended);
        self.best.remove(&id);
        self.slowdowns.remove(&id);
        self.remaining.remove(&id);
        self.slowness.remove(&id);
    }

    /// What tenants run themselves is nobody else's traffic. Where that has changed, a communicator's best
    /// becomes what leaves it the share of it that it had. Who starts one communicator beside another would
    /// else be told whether the two meet.
    fn own_changed(&mut self, ctx: &Ctx<'_>, agreements: &Agreements, planned: &[(CommunicatorId, f64)]) {
        let mut own: BTreeMap<String, Own> = BTreeMap::new();
        for (id, known) in ctx.communicators {
            let terms = (agreements.quarters(*id), agreements.promised(*id));
            own.entry(known.tenant.clone()).or_default().insert(*id, terms);
        }
        let Events { best, own: before, slowdowns, .. } = self;
        let tenant = |id: CommunicatorId| ctx.communicators.get(&id).map(|known| &known.tenant);
        let changed: Vec<CommunicatorId> = planned
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

    /// How all communicators are slowed now, by what was planned last. While something is out of use that is
    /// the cause of what they would lack without others' traffic, and this of the rest. Returns those that
    /// are planned.
    pub(crate) fn note_rates(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        agreements: &Agreements,
        undisturbed: &BTreeMap<CommunicatorId, f64>,
    ) -> Vec<CommunicatorId> {
        let slowdown = |known: &Communicator| Some(known.current()?.plan.as_ref()?.slowdown);
        let planned = ctx.communicators.iter().filter_map(|(id, known)| Some((*id, slowdown(known)?)));
        let planned: Vec<(CommunicatorId, f64)> = planned.collect();
        self.own_changed(ctx, agreements, &planned);
        let ids = planned.iter().map(|(id, _)| *id).collect();
        for (id, slowdown) in planned {
            let best = self.best.entry(id).or_insert(slowdown);
            *best = best.min(slowdown);
            let part = |of: f64, slowdown: f64| {
                if slowdown.is_finite() && slowdown > 0.0 { (of / slowdown).min(1.0) } else { 0.0 }
            };
            let (congestion, capacity) = match undisturbed.get(&id) {
                Some(alone) if alone.is_finite() => (part(*alone, slowdown), part(*best, *alone)),
                Some(_) => (1.0, 0.0),
                None => (part(*best, slowdown), 1.0),
            };
            self.remaining.insert(id, congestion);
            self.note_congestion(ctx, effects, id, true);
            effects.note(ctx, id, Fact::Capacity { share: capacity });
        }
        ids
    }

    /// An operation took so long from its last rank's call, as all agents tell.
    pub(crate) fn operation_took(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        id: CommunicatorId,
        (bytes, took): (Bytes, Duration),
    ) {
        let now = ctx.now;
        let Some(tenant) = ctx.communicators.get(&id).map(|known| &known.tenant) else { return };
        let Events { slowness, latest, .. } = self;
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
            self.note_congestion(ctx, effects, other, false);
        }
        self.note_congestion(ctx, effects, id, false);
    }

    /// An agent says that a long queue stands on a path of a communicator.
    pub(crate) fn queue_stands(&mut self, now: Duration, id: CommunicatorId) {
        self.slowness.entry(id).or_default().queue_stands(now);
    }

    /// A communicator is slowed by others as the last plan says, or as its operations show, whichever is
    /// worse. Always noted where a plan was made, else where it is other than before.
    fn note_congestion(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId, planned: bool) {
        let measured = self.slowness.get(&id).map_or(1.0, |known| known.share(ctx.now));
        let share = self.remaining.get(&id).copied().unwrap_or(1.0).min(measured);
        let other = self.slowness.entry(id).or_default().note(share);
        if planned || other {
            effects.note(ctx, id, Fact::Congestion { share });
        }
    }

    /// A communicator's own tenant runs other things now.
    fn forget_usual(&mut self, id: CommunicatorId) {
        if let Some(known) = self.slowness.get_mut(&id) {
            known.forget();
        }
    }

    /// Returns when [`Events::expire`] has something to do.
    pub(crate) fn next_timeout(&self, ctx: &Ctx<'_>) -> Option<Duration> {
        let began = clock(ctx, Duration::ZERO);
        let due = self.feeds.next_timeout().map(|at| at.saturating_sub(began));
        due.into_iter().chain(self.readers.next_timeout()).min()
    }

    /// Makes the events that are due, and answers who waits for them, or has waited long enough.
    pub(crate) fn expire(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        let clock = clock(ctx, ctx.now);
        let due = self.feeds.due(clock);
        for tenant in &due {
            self.feeds.get_mut(tenant).into_iter().for_each(|feed| feed.poll(clock));
        }
        // Without new events there is nothing for those that may wait on.
        self.answer_readers(ctx, effects, Some(ctx.now).filter(|_| due.is_empty()));
    }

    fn answer_readers(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, late: Option<Duration>) {
        let Events { feeds, readers, .. } = self;
        let answers = readers.answer(late, |request, reader| reader.answer(feeds, ctx.now, request));
        for (session, answer) in answers {
            send(effects, session, answer);
        }
    }

    /// A tenant is no more.
    pub(crate) fn forget_tenant(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, tenant: &str) {
        self.latest.remove(tenant);
        self.feeds.remove(&tenant.to_owned());
        self.answer_readers(ctx, effects, None);
    }

    /// A session is over.
    pub(crate) fn forget_readers(&mut self, session: SessionId) {
        self.readers.forget(session);
    }
}

/// Notes which ranks' hosts are taken away, or will be: of one communicator, or of all.
pub(crate) fn note_maintenance(ctx: &Ctx<'_>, effects: &mut Effects, one: Option<CommunicatorId>) {
    let hosts = hosts_to_go(ctx);
    let wanted = |id: &CommunicatorId| one.is_none_or(|one| one == *id);
    for (id, known) in ctx.communicators.iter().filter(|(id, _)| wanted(id)) {
        let ranks = known.members.iter().filter_map(|member| Some((member, *hosts.get(&member.host)?)));
        let ranks = ranks.flat_map(|(member, at)| member.ranks.iter().map(move |rank| (Rank(*rank), at)));
        effects.note(ctx, *id, Fact::Maintenance { ranks: ranks.collect() });
    }
}

/// Returns the hosts that operators have withdrawn, or will soon, and when; on the feeds' clock.
fn hosts_to_go(ctx: &Ctx<'_>) -> BTreeMap<HostId, Duration> {
    let mut hosts: BTreeMap<HostId, Duration> = BTreeMap::new();
    let soon = ctx.operator.realtime(ctx.now.saturating_add(NOTICE));
    for (host, from) in ctx.operator.host_withdrawals(ctx.settings, ctx.operator.realtime(ctx.now)) {
        if from > soon {
            continue;
        }
        let at = Duration::from(from);
        hosts.entry(host).and_modify(|first| *first = at.min(*first)).or_insert(at);
    }
    hosts
}

/// Returns a time by the clock of the feeds: CLOCK_REALTIME.
pub(crate) fn clock(ctx: &Ctx<'_>, at: Duration) -> Duration {
    ctx.operator.realtime(at).into()
}

fn send(effects: &mut Effects, session: SessionId, answer: v1::EventsRead) {
    effects.send(session, to_agent::Message::EventsRead(answer));
}

fn refused(request: u64, why: &RequestRefusal) -> v1::EventsRead {
    v1::EventsRead { request, refused: why.to_string(), ..v1::EventsRead::default() }
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
    let numbers = |ranks: Vec<Rank>| ranks.into_iter().map(|Rank(rank)| rank).collect();
    let mut waiting = 0;
    let mut clauses = Vec::new();
    let mut cause = v1::StragglerCause::Unspecified;
    let (kind, level, ranks, at_ns) = match kind {
        EventKind::Congestion(how) => (Told::Congestion, how.into(), Vec::new(), 0),
        EventKind::Capacity(how) => (Told::Capacity, how.into(), Vec::new(), 0),
        EventKind::Failure { ranks, regroup_by_ns } => {
            (Told::Failure, v1::CongestionLevel::Unspecified, numbers(ranks), regroup_by_ns)
        }
        EventKind::Maintenance { ranks, at_ns } => {
            (Told::Maintenance, v1::CongestionLevel::Unspecified, numbers(ranks), at_ns)
        }
        EventKind::PlanChanged => (Told::PlanChanged, v1::CongestionLevel::Unspecified, Vec::new(), 0),
        EventKind::Newcomers { waiting: count } => {
            waiting = count;
            (Told::Newcomers, v1::CongestionLevel::Unspecified, Vec::new(), 0)
        }
        EventKind::AgreementBroken { clauses: broken } => {
            clauses = harmonaize_api::clause_numbers(&broken);
            (Told::AgreementBroken, v1::CongestionLevel::Unspecified, Vec::new(), 0)
        }
        EventKind::AgreementEnded { clauses: lost } => {
            clauses = harmonaize_api::clause_numbers(&lost);
            (Told::AgreementEnded, v1::CongestionLevel::Unspecified, Vec::new(), 0)
        }
        EventKind::Stragglers { cause: why, ranks } => {
            cause = why.into();
            (Told::Stragglers, v1::CongestionLevel::Unspecified, numbers(ranks), 0)
        }
    };
    let (kind, level, cause) = (kind.into(), level.into(), cause.into());
    v1::TenantEvent { number, communicator, kind, level, ranks, at_ns, since_ns, clauses, waiting, cause }
}
