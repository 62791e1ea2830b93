//! Events: what a tenant is told, while its collectives run, of what the provider knows. Coarse in value, in time and in number, so
//! that a tenant can adapt and cannot reckon the provider's fabric from them.
//!
//! A [`Feed`] is one tenant's. Facts go in when they come up ([`Feed::note`]); at whole ticks, and at no other time, the feed makes
//! events of what has changed since ([`Feed::tick`]). What follows from that:
//!
//! - A quantity is a [`CongestionLevel`] of three, with hysteresis: shares within a level are told alike.
//! - Between two ticks a communicator has at most one event of a kind: what came and went between them is not told, and the time
//!   of a fact is known to a tick.
//! - Congestion, capacity and changes of plan are told of all communicators of the tenant alike, at the level of the one that has it
//!   worst. Which of its ranks share a link with whom would be told by naming them, and by naming one communicator too: a tenant
//!   can have one for each two of its ranks. Ranks are named where the tenant must act on them and would see it anyway (failure,
//!   maintenance).
//! - Ranks that are late by their own computing are named: their processes are the tenant's. Of those that are late by the network one
//!   is named at a time, of all communicators of the tenant, and another only once [`Limits::pause`] is over since. All that are late
//!   at once share a link, so to name two would be to say which. Nothing is said of communicators of two hosts: that
//!   one is named would say that those two are on different sides of a slow link.
//! - A tenant has at most so many events a tick; the rest waits, merged, and none is lost.

use harmonaize_abi::session::{Clause, Event, EventBatch, EventCursor, EventKind, MAX_EVENTS};
use harmonaize_abi::{CommunicatorId, CongestionLevel, Rank, StragglerCause};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Below this share of the expected rate a communicator is [`CongestionLevel::Mild`]ly slowed; from [`MILD_END`] on no more.
const MILD: f64 = 0.8;
/// See [`MILD`].
const MILD_END: f64 = 0.9;
/// Below this share it is [`CongestionLevel::Severe`]; from [`SEVERE_END`] on no more.
const SEVERE: f64 = 0.5;
/// See [`SEVERE`].
const SEVERE_END: f64 = 0.6;

/// Fewest hosts of a communicator of which a rank is named that is late by the network.
const MIN_HOSTS: usize = 3;

/// The level of a share of the expected rate (1 is all of it), after `before`. What is no number changes nothing.
fn level(before: CongestionLevel, share: f64) -> CongestionLevel {
    let (severe, mild) = match before {
        CongestionLevel::Severe => (SEVERE_END, MILD_END),
        CongestionLevel::Mild => (SEVERE, MILD_END),
        CongestionLevel::None => (SEVERE, MILD),
    };
    match share {
        share if share.is_nan() => before,
        share if share < severe => CongestionLevel::Severe,
        share if share < mild => CongestionLevel::Mild,
        _ => CongestionLevel::None,
    }
}

/// Something that the provider knows of one communicator of the tenant. It has no room for the name of a host, link or switch.
#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// Others' traffic leaves it this share of its expected rate.
    Congestion {
        /// From 0 to 1.
        share: f64,
    },
    /// What the provider can give at all (links that are gone or drained) is this share of what it was.
    Capacity {
        /// From 0 to 1.
        share: f64,
    },
    /// These ranks are lost.
    Failure {
        /// Of the communicator.
        ranks: Vec<Rank>,
        /// Until when the others are expected to go on, on the clock of `now`, if that was agreed on.
        regroup_by: Option<Duration>,
    },
    /// The hosts of these ranks, and of no others, will be taken away, or are. For each rank it names when that is, on the clock
    /// of `now`.
    Maintenance {
        /// Of the communicator.
        ranks: BTreeMap<Rank, Duration>,
    },
    /// Its operations take another way.
    PlanChanged,
    /// So many processes of the tenant wait to be taken in.
    Newcomers {
        /// None any more: 0.
        waiting: u32,
    },
    /// Of what was agreed on for it this is not kept now, and nothing else.
    Agreement {
        /// Of the agreement.
        broken: BTreeSet<Clause>,
    },
    /// What was agreed on for the communicator that it goes on from cannot be promised for it: because of these. Or its members have not
    /// gone on in time.
    AgreementEnded {
        /// Of that agreement.
        clauses: BTreeSet<Clause>,
    },
    /// These ranks hold its operations up for this cause, and no others: by how much each.
    Stragglers {
        /// Why they are late.
        cause: StragglerCause,
        /// Of the communicator.
        ranks: BTreeMap<Rank, Duration>,
        /// How many hosts the communicator has.
        hosts: usize,
    },
    /// The communicator has ended. Nothing more is told of it but what ranks were lost, what was not kept, and that no more is promised.
    Ended,
}

/// Hosts of a communicator are going to be taken away, as its tenant has been told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Maintenance {
    /// Since when that is so.
    pub announced: Duration,
    /// When the first is; not after `told` where nobody waits for a time, but until its jobs have gone.
    pub at: Duration,
}

/// What a tenant has been told of a communicator and still holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CurrentState {
    /// How much it is slowed, for whatever reason.
    pub slowdown: CongestionLevel,
    /// If hosts of it are going to be taken away.
    pub maintenance: Option<Maintenance>,
}

/// How coarse a feed is, and how much it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Between two moments at which events are made.
    pub tick: Duration,
    /// Most events of a tick.
    pub burst: usize,
    /// Most events that are kept for those who read late.
    pub capacity: usize,
    /// Since a rank that was named is late by the network no longer, until another may be named.
    pub pause: Duration,
}

impl Default for Limits {
    /// One tick a second, 64 events in it, and 4,096 kept. At most one rank that is late by the network is named in ten minutes.
    fn default() -> Self {
        Self { tick: Duration::from_secs(1), burst: 64, capacity: 4096, pause: Duration::from_mins(10) }
    }
}

/// Why a cursor is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CursorError {
    /// It is not of this feed: another tenant's, or from before the provider began anew. What was missed is not known.
    Unknown,
    /// It is of this feed, and beyond what the feed has ever told.
    Ahead {
        /// The next event's number.
        next: u64,
    },
}

impl std::fmt::Display for CursorError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unknown => f.write_str("the cursor is not of this feed of events; begin without one"),
            Self::Ahead { next } => {
                write!(f, "the cursor is beyond event {next}, the next that there will be; begin without one")
            }
        }
    }
}

impl std::error::Error for CursorError {}

/// What events of one communicator are about; of each there is at most one a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Failure,
    Maintenance,
    Capacity,
    Congestion,
    PlanChanged,
    Newcomers,
    Agreement,
    AgreementEnded,
    Compute,
    Network,
}

/// Something of a communicator that differs, or may differ, from what has been told of it.
#[derive(Clone, Debug, Default)]
struct Subject {
    /// Its own; what is told is the worst of its kind.
    level: CongestionLevel,
    /// With times of those that are lost, go, or are late. Of those that are late by the network, what may be told.
    ranks: BTreeMap<Rank, Duration>,
    /// Processes.
    waiting: u32,
    clauses: BTreeSet<Clause>,
    regroup_by: Option<Duration>,
    /// The communicator's name.
    name: String,
    /// Whether the communicator is no more.
    ended: bool,
    /// Since when it is as it is.
    since: Duration,
    /// What has last been told, if anything.
    last_sent: Option<EventKind>,
    /// Whether there may be something to tell; and, of all that wait, which waits longest.
    waiting_order: Option<u64>,
    /// The tick within which it began to wait.
    waiting_since_tick: u128,
}

/// The events of one tenant.
#[derive(Debug)]
pub struct Feed {
    limits: Limits,
    number: u64,
    /// By communicator; one that ended and its successor of the same name are two.
    subjects: BTreeMap<(CommunicatorId, Kind), Subject>,
    /// Of congestion and of capacity: how the communicator is that has it worst.
    worst: BTreeMap<Kind, CongestionLevel>,
    /// Ranks that are late by the network, by how much.
    late: BTreeMap<(CommunicatorId, Rank), Duration>,
    /// The one that was named last, and since when it is late no longer, if it is not.
    named: Option<((CommunicatorId, Rank), Option<Duration>)>,
    events: VecDeque<Event>,
    /// The next event's number.
    next: u64,
    /// Counts what has begun to wait.
    order: u64,
    /// The tick of which events have been made last.
    last_tick: u128,
}

impl Feed {
    /// An empty feed. `number` must be one that nobody can guess from another feed's, and new whenever a feed begins anew.
    pub fn new(number: u64, limits: Limits) -> Self {
        let tick = limits.tick.max(Duration::from_millis(1));
        let limits = Limits { tick, burst: limits.burst.max(1), capacity: limits.capacity.max(1), ..limits };
        Self {
            limits,
            number,
            subjects: BTreeMap::new(),
            worst: BTreeMap::new(),
            late: BTreeMap::new(),
            named: None,
            events: VecDeque::new(),
            next: 0,
            order: 0,
            last_tick: 0,
        }
    }

    /// Takes a fact of the tenant's communicator `id`, named `name`; at most a tick later an event may follow.
    pub fn note(&mut self, (id, name): (CommunicatorId, &str), fact: Fact, now: Duration) {
        let kind = match &fact {
            Fact::Congestion { .. } => Kind::Congestion,
            Fact::Capacity { .. } => Kind::Capacity,
            Fact::Failure { .. } => Kind::Failure,
            Fact::Maintenance { .. } => Kind::Maintenance,
            Fact::PlanChanged => Kind::PlanChanged,
            Fact::Newcomers { .. } => Kind::Newcomers,
            Fact::Agreement { .. } => Kind::Agreement,
            Fact::AgreementEnded { .. } => Kind::AgreementEnded,
            Fact::Stragglers { cause: StragglerCause::Compute, .. } => Kind::Compute,
            Fact::Stragglers { cause: StragglerCause::Network, .. } => Kind::Network,
            Fact::Ended => {
                // What ended it, and what was not kept as it did.
                let lost = |kind: Kind, subject: &Subject| {
                    let broken = kind == Kind::Agreement && !subject.clauses.is_empty();
                    let told = matches!(kind, Kind::Failure | Kind::AgreementEnded);
                    subject.waiting_order.is_some() && (told || broken)
                };
                self.subjects.retain(|(of, kind), subject| {
                    subject.ended |= *of == id;
                    *of != id || lost(*kind, subject)
                });
                self.update_level(Kind::Capacity, now);
                self.update_level(Kind::Congestion, now);
                self.late.retain(|(of, _), _| *of != id);
                self.name_late(now);
                return;
            }
        };
        let subject = self.subjects.entry((id, kind)).or_default();
        if subject.name.is_empty() {
            name.clone_into(&mut subject.name);
        }
        let changed = match fact {
            Fact::Congestion { share } | Fact::Capacity { share } => {
                subject.level = level(subject.level, share);
                self.update_level(kind, now);
                return;
            }
            Fact::PlanChanged => {
                self.plan_changed(now);
                return;
            }
            Fact::Failure { ranks, regroup_by } => {
                subject.regroup_by = regroup_by;
                // Those already told of are not told of again.
                let before = subject.ranks.len();
                subject.ranks.extend(ranks.into_iter().map(|rank| (rank, now)));
                subject.ranks.len() > before
            }
            Fact::Maintenance { ranks } => std::mem::replace(&mut subject.ranks, ranks) != subject.ranks,
            Fact::Newcomers { waiting } => std::mem::replace(&mut subject.waiting, waiting) != waiting,
            Fact::AgreementEnded { clauses } => {
                subject.clauses = clauses;
                true
            }
            Fact::Agreement { broken } => std::mem::replace(&mut subject.clauses, broken) != subject.clauses,
            Fact::Stragglers { cause: StragglerCause::Compute, ranks, .. } => {
                let same = subject.ranks.keys().eq(ranks.keys());
                subject.ranks = ranks;
                !same
            }
            Fact::Stragglers { cause: StragglerCause::Network, ranks, hosts } => {
                self.late.retain(|(of, _), _| *of != id);
                let ranks = ranks.into_iter().filter(|_| hosts >= MIN_HOSTS);
                self.late.extend(ranks.map(|(rank, by)| ((id, rank), by)));
                self.name_late(now);
                return;
            }
            Fact::Ended => false,
        };
        if changed {
            self.enqueue((id, kind), now);
        }
    }

    /// A subject has something to tell: at the next whole tick, however long there was nothing.
    fn enqueue(&mut self, key: (CommunicatorId, Kind), now: Duration) {
        let tick = now.as_nanos() / self.limits.tick.as_nanos();
        // What waits for a tick that is late is not held up by what comes meanwhile.
        if self.subjects.values().all(|subject| subject.waiting_order.is_none()) {
            self.last_tick = self.last_tick.max(tick);
        }
        let Some(subject) = self.subjects.get_mut(&key) else { return };
        subject.since = now;
        if subject.waiting_order.is_none() {
            (subject.waiting_order, subject.waiting_since_tick) = (Some(self.order), tick);
            self.order += 1;
        }
    }

    /// Updates a communicator's level from those of its subjects. If the worst level is another, or some have not been notified
    /// of it, all are to be notified.
    fn update_level(&mut self, kind: Kind, now: Duration) {
        let of_kind = || self.subjects.iter().filter(move |((_, of), _)| *of == kind);
        let worst = of_kind().map(|(_, subject)| subject.level).max().unwrap_or_default();
        let changed = self.worst.insert(kind, worst).unwrap_or_default() != worst;
        let new = |subject: &Subject| {
            worst != CongestionLevel::None && subject.last_sent.is_none() && subject.waiting_order.is_none()
        };
        let due = of_kind().filter(|(_, subject)| changed || new(subject)).map(|(key, _)| *key);
        for key in due.collect::<Vec<_>>() {
            self.enqueue(key, now);
        }
    }

    /// Who is late by the network has changed, or a pause is over. Who was named stays so as long as it is late. Another, the latest,
    /// is named only once the pause after that is over.
    fn name_late(&mut self, now: Duration) {
        let pause = self.limits.pause;
        self.named = match self.named {
            Some((named, _)) if self.late.contains_key(&named) => Some((named, None)),
            Some((named, None)) => Some((named, Some(now))),
            Some((named, Some(over))) if now < over.saturating_add(pause) => Some((named, Some(over))),
            before => {
                let latest = self.late.iter().max_by_key(|(_, by)| **by);
                latest.map(|(named, _)| (*named, None)).or(before)
            }
        };
        let named = self.named.filter(|(_, over)| over.is_none()).map(|(named, _)| named);
        let mut changed = Vec::new();
        for ((id, kind), subject) in &mut self.subjects {
            let ranks = named.filter(|(of, _)| of == id).map(|(_, rank)| (rank, now));
            if *kind == Kind::Network && subject.ranks.keys().ne(ranks.iter().map(|(rank, _)| rank)) {
                subject.ranks = ranks.into_iter().collect();
                changed.push((*id, *kind));
            }
        }
        changed.into_iter().for_each(|key| self.enqueue(key, now));
    }

    /// When another rank may be named that is late by the network, where one is to be.
    fn next_name(&self) -> Option<Duration> {
        let over = self.named?.1.filter(|_| !self.late.is_empty())?;
        Some(over.saturating_add(self.limits.pause))
    }

    /// Some communicator's operations take another way: whose, and whether one's or all's, is not told.
    fn plan_changed(&mut self, now: Duration) {
        let live = self.subjects.iter().filter(|(_, subject)| !subject.ended);
        let names = live.map(|((id, _), subject)| (*id, subject.name.clone()));
        for (id, name) in names.collect::<BTreeMap<_, _>>() {
            self.subjects.entry((id, Kind::PlanChanged)).or_default().name = name;
            self.enqueue((id, Kind::PlanChanged), now);
        }
    }

    /// Makes the events that are due. At any time; only the first call within a tick does something.
    pub fn poll(&mut self, now: Duration) {
        let tick = now.as_nanos() / self.limits.tick.as_nanos();
        if tick <= self.last_tick {
            return;
        }
        if self.next_name().is_some_and(|at| at <= now) {
            self.name_late(now);
        }
        self.last_tick = tick;
        let mut waiting: Vec<(u64, (CommunicatorId, Kind))> = self
            .subjects
            .iter()
            .filter(|(_, subject)| subject.waiting_since_tick < tick)
            .filter_map(|(key, subject)| subject.waiting_order.map(|order| (order, *key)))
            .collect();
        waiting.sort();
        let mut left = self.limits.burst;
        for (_, key) in waiting {
            if left == 0 {
                return;
            }
            let Some(subject) = self.subjects.get_mut(&key) else { continue };
            subject.waiting_order = None;
            let subject_since = subject.since;
            let worst = self.worst.get(&key.1).copied().unwrap_or_default();
            let kind = subject.kind(key.1, worst, self.limits.tick);
            // A change that was undone before anybody heard of it, or that only shows below a tick.
            if subject.last_sent.as_ref() == kind.as_ref()
                || (subject.last_sent.is_none() && kind == baseline_event(key.1))
            {
                continue;
            }
            let Some(kind) = kind else { continue };
            if key.1 != Kind::PlanChanged {
                subject.last_sent = Some(kind.clone());
            }
            let communicator = subject.name.clone();
            if subject.ended {
                self.subjects.remove(&key);
            }
            let (number, since_ns) = (self.next, floor(subject_since, self.limits.tick));
            self.events.push_back(Event { number, communicator, kind, since_ns });
            self.next += 1;
            left -= 1;
            if self.events.len() > self.limits.capacity {
                self.events.pop_front();
            }
        }
    }

    /// When [`Feed::poll`] has something to do, if it has.
    pub fn next_due(&self) -> Option<Duration> {
        let waits = self.subjects.values().any(|subject| subject.waiting_order.is_some());
        let next = u64::try_from((self.last_tick + 1).saturating_mul(self.limits.tick.as_nanos())).ok()?;
        let next = Duration::from_nanos(next);
        waits.then_some(next).into_iter().chain(self.next_name().map(|at| at.max(next))).min()
    }

    /// What has been told of a communicator and still holds.
    pub fn current_state(&self, id: CommunicatorId) -> CurrentState {
        let told = |kind| {
            self.subjects.get(&(id, kind)).and_then(|subject| Some((subject.last_sent.as_ref()?, subject)))
        };
        let level = |kind| match told(kind) {
            Some((EventKind::Congestion(level) | EventKind::Capacity(level), _)) => *level,
            _ => CongestionLevel::None,
        };
        let maintenance = told(Kind::Maintenance).and_then(|(kind, subject)| match kind {
            EventKind::Maintenance { ranks, at_ns } if !ranks.is_empty() => {
                Some(Maintenance { announced: subject.since, at: Duration::from_nanos(*at_ns) })
            }
            _ => None,
        });
        CurrentState { slowdown: level(Kind::Congestion).max(level(Kind::Capacity)), maintenance }
    }

    /// Where a reader stands who wants nothing of what has been.
    pub fn end(&self) -> EventCursor {
        EventCursor { feed: self.number, next: self.next }
    }

    /// Up to [`MAX_EVENTS`] events from a cursor on.
    ///
    /// # Errors
    /// Where the cursor is none of this feed's.
    pub fn read(&self, from: EventCursor) -> Result<EventBatch, CursorError> {
        if from.feed != self.number {
            return Err(CursorError::Unknown);
        }
        if from.next > self.next {
            return Err(CursorError::Ahead { next: self.next });
        }
        let first = self.events.front().map_or(self.next, |event| event.number);
        let missed = first.saturating_sub(from.next);
        let begin = usize::try_from(from.next.saturating_sub(first)).unwrap_or(usize::MAX);
        let events: Vec<Event> = self.events.iter().skip(begin).take(MAX_EVENTS).cloned().collect();
        let next = events.last().map_or(from.next.max(first), |event| event.number + 1);
        Ok(EventBatch { missed, events, cursor: EventCursor { feed: self.number, next } })
    }
}

impl Subject {
    /// What is to be told of it as it is; `None` if there is nothing to tell.
    fn kind(&self, kind: Kind, worst: CongestionLevel, tick: Duration) -> Option<EventKind> {
        let ranks = || self.ranks.keys().copied().collect();
        match kind {
            Kind::Failure if self.ranks.is_empty() => None,
            Kind::Failure => {
                let regroup_by_ns = self.regroup_by.map_or(0, |by| floor(by, tick));
                Some(EventKind::Failure { ranks: ranks(), regroup_by_ns })
            }
            Kind::Maintenance => {
                let first = self.ranks.values().min().copied().unwrap_or_default();
                Some(EventKind::Maintenance { ranks: ranks(), at_ns: floor(first, tick) })
            }
            Kind::Capacity => Some(EventKind::Capacity(worst)),
            Kind::Congestion => Some(EventKind::Congestion(worst)),
            Kind::PlanChanged => Some(EventKind::PlanChanged),
            Kind::Newcomers => Some(EventKind::Newcomers { waiting: self.waiting }),
            Kind::Agreement => {
                Some(EventKind::AgreementBroken { clauses: self.clauses.iter().copied().collect() })
            }
            Kind::AgreementEnded => {
                Some(EventKind::AgreementEnded { clauses: self.clauses.iter().copied().collect() })
            }
            Kind::Compute => Some(EventKind::Stragglers { cause: StragglerCause::Compute, ranks: ranks() }),
            Kind::Network => Some(EventKind::Stragglers { cause: StragglerCause::Network, ranks: ranks() }),
        }
    }
}

/// What holds of a communicator of which nothing has been told.
fn baseline_event(kind: Kind) -> Option<EventKind> {
    match kind {
        Kind::Failure | Kind::PlanChanged | Kind::AgreementEnded => None,
        Kind::Maintenance => Some(EventKind::Maintenance { ranks: Vec::new(), at_ns: 0 }),
        Kind::Capacity => Some(EventKind::Capacity(CongestionLevel::None)),
        Kind::Congestion => Some(EventKind::Congestion(CongestionLevel::None)),
        Kind::Newcomers => Some(EventKind::Newcomers { waiting: 0 }),
        Kind::Agreement => Some(EventKind::AgreementBroken { clauses: Vec::new() }),
        Kind::Compute => Some(EventKind::Stragglers { cause: StragglerCause::Compute, ranks: Vec::new() }),
        Kind::Network => Some(EventKind::Stragglers { cause: StragglerCause::Network, ranks: Vec::new() }),
    }
}

/// Nanoseconds, rounded down to a whole tick.
fn floor(time: Duration, tick: Duration) -> u64 {
    let below = time.as_nanos() % tick.as_nanos().max(1);
    u64::try_from(time.as_nanos() - below).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
