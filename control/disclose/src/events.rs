//! Events: what a tenant is told, while its collectives run, of what the provider knows. Coarse in value, in time and in number, so
//! that a tenant can adapt and cannot reckon the provider's fabric from them.
//!
//! A [`Feed`] is one tenant's. Facts go in when they come up ([`Feed::note`]); at whole ticks, and at no other time, the feed makes
//! events of what has changed since ([`Feed::tick`]). What follows from that:
//!
//! - A quantity is a [`Level`] of three, with hysteresis: shares within a level are told alike.
//! - Between two ticks a communicator has at most one event of a kind: what came and went between them is not told, and the time
//!   of a fact is known to a tick.
//! - Congestion, capacity and changes of plan concern a communicator as a whole. Which of its ranks share a link with
//!   whom would be told by naming them; ranks are named where the tenant must act on them and would see it anyway (failure,
//!   maintenance).
//! - A tenant has at most so many events a tick; the rest waits, merged, and none is lost.

use harmonaize_abi::Rank;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Below this share of the expected rate a communicator is [`Level::Mild`]ly slowed; from [`MILD_END`] on no more.
const MILD: f64 = 0.8;
/// See [`MILD`].
const MILD_END: f64 = 0.9;
/// Below this share it is [`Level::Severe`]; from [`SEVERE_END`] on no more.
const SEVERE: f64 = 0.5;
/// See [`SEVERE`].
const SEVERE_END: f64 = 0.6;

/// How much of the expected rate is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Nothing worth telling.
    #[default]
    None,
    /// Up to half of it.
    Mild,
    /// More than half.
    Severe,
}

impl Level {
    /// The level of a share of the expected rate (1 is all of it), after this one. What is no number changes nothing.
    fn after(self, share: f64) -> Self {
        let (severe, mild) = match self {
            Self::Severe => (SEVERE_END, MILD_END),
            Self::Mild => (SEVERE, MILD_END),
            Self::None => (SEVERE, MILD),
        };
        match share {
            share if share.is_nan() => self,
            share if share < severe => Self::Severe,
            share if share < mild => Self::Mild,
            _ => Self::None,
        }
    }
}

/// What an agreement is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Term {
    /// The rate that was promised.
    Bandwidth,
    /// The time within which an operation was promised to end.
    Latency,
    /// The time within which an iteration was.
    Iteration,
}

/// Something that the provider knows of one communicator of the tenant. Nothing here names a host, link or switch, and it
/// could not: there is no room for it.
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
    },
    /// The hosts of these ranks will be taken away.
    Maintenance {
        /// Of the communicator.
        ranks: Vec<Rank>,
        /// When, on the clock of `now`.
        at: Duration,
    },
    /// The maintenance of these ranks is called off, or over.
    MaintenanceOver {
        /// Of the communicator.
        ranks: Vec<Rank>,
    },
    /// Its operations take another way.
    PlanChanged,
    /// What was agreed on does not hold (any more), or holds again.
    Agreement {
        /// Which.
        term: Term,
        /// Whether it holds.
        kept: bool,
    },
    /// The communicator has ended: nothing more is told of it.
    Ended,
}

/// What an event says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum What {
    /// Others' traffic slows it this much now.
    Congestion(Level),
    /// The provider can give this much less now.
    Capacity(Level),
    /// These ranks are lost; ascending.
    Failure(Vec<Rank>),
    /// These ranks, ascending, and no others, will lose their hosts.
    Maintenance {
        /// None: it is called off, or over.
        ranks: Vec<Rank>,
        /// When the first does, rounded down to a tick; zero if none does.
        at: Duration,
    },
    /// Its operations take another way since.
    PlanChanged,
    /// This does not hold (any more), or holds again.
    Agreement {
        /// Which.
        term: Term,
        /// Whether it holds.
        kept: bool,
    },
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Event {
    /// Its number in the tenant's feed, from 0, without gaps.
    pub number: u64,
    /// The communicator, by the name that the tenant gave it.
    pub communicator: String,
    /// What it says.
    pub what: What,
    /// Since when, rounded down to a tick, on the clock of `now`.
    pub since: Duration,
}

/// How coarse a feed is, and how much it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Between two moments at which events are made.
    pub tick: Duration,
    /// Most events of a tick.
    pub burst: usize,
    /// Most events that are kept for those who read late.
    pub kept: usize,
}

impl Default for Limits {
    /// Once in a second, 64 of them, and 4,096 kept.
    fn default() -> Self {
        Self { tick: Duration::from_secs(1), burst: 64, kept: 4096 }
    }
}

/// Where a reader stands in a feed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cursor {
    /// The feed's own number: another tenant's cursor, or one of a feed that is no more, is known by it.
    pub feed: u64,
    /// The next event.
    pub next: u64,
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

/// What a reader gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch<'a> {
    /// Events that it comes too late for.
    pub missed: u64,
    /// The events, in order.
    pub events: Vec<&'a Event>,
    /// Where it stands then.
    pub cursor: Cursor,
}

/// What events of one communicator are about; of each there is at most one a tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Failure,
    Maintenance,
    Agreement(Term),
    Capacity,
    Congestion,
    PlanChanged,
}

/// Something of a communicator that differs, or may differ, from what has been told of it.
#[derive(Clone, Debug, Default)]
struct Subject {
    level: Level,
    ranks: BTreeMap<Rank, Duration>,
    /// Of an agreement: whether it is broken.
    broken: bool,
    /// Since when it is as it is.
    since: Duration,
    /// What has last been told, if anything.
    told: Option<What>,
    /// Whether there may be something to tell; and, of all that wait, which waits longest.
    waits: Option<u64>,
}

/// The events of one tenant.
#[derive(Debug)]
pub struct Feed {
    limits: Limits,
    number: u64,
    subjects: BTreeMap<(String, Kind), Subject>,
    events: VecDeque<Event>,
    /// The next event's number.
    next: u64,
    /// Counts what has begun to wait.
    order: u64,
    /// The tick of which events have been made last.
    ticked: u128,
}

impl Feed {
    /// An empty feed. `number` must be one that nobody can guess from another feed's, and new whenever a feed begins anew.
    pub fn new(number: u64, limits: Limits) -> Self {
        let tick = limits.tick.max(Duration::from_millis(1));
        let limits = Limits { tick, burst: limits.burst.max(1), kept: limits.kept.max(1) };
        let (subjects, events) = (BTreeMap::new(), VecDeque::new());
        Self { limits, number, subjects, events, next: 0, order: 0, ticked: 0 }
    }

    /// Takes a fact of the tenant's communicator; at most a tick later an event may follow.
    pub fn note(&mut self, communicator: &str, fact: Fact, now: Duration) {
        let kind = match &fact {
            Fact::Congestion { .. } => Kind::Congestion,
            Fact::Capacity { .. } => Kind::Capacity,
            Fact::Failure { .. } => Kind::Failure,
            Fact::Maintenance { .. } | Fact::MaintenanceOver { .. } => Kind::Maintenance,
            Fact::PlanChanged => Kind::PlanChanged,
            Fact::Agreement { term, .. } => Kind::Agreement(*term),
            Fact::Ended => {
                self.subjects.retain(|(name, _), _| name != communicator);
                return;
            }
        };
        let order = self.order;
        let subject = self.subjects.entry((communicator.to_owned(), kind)).or_default();
        let changed = match fact {
            Fact::Congestion { share } | Fact::Capacity { share } => {
                let level = subject.level.after(share);
                std::mem::replace(&mut subject.level, level) != level
            }
            Fact::Failure { ranks } => {
                // Those already told of are not told of again.
                let before = subject.ranks.len();
                subject.ranks.extend(ranks.into_iter().map(|rank| (rank, now)));
                subject.ranks.len() > before
            }
            Fact::Maintenance { ranks, at } => {
                let before = subject.ranks.clone();
                subject.ranks.extend(ranks.into_iter().map(|rank| (rank, at)));
                subject.ranks != before
            }
            Fact::MaintenanceOver { ranks } => {
                let (before, over) = (subject.ranks.len(), BTreeSet::from_iter(ranks));
                subject.ranks.retain(|rank, _| !over.contains(rank));
                subject.ranks.len() < before
            }
            Fact::Agreement { kept, .. } => std::mem::replace(&mut subject.broken, !kept) == kept,
            Fact::PlanChanged => true,
            Fact::Ended => false,
        };
        if changed {
            subject.since = now;
            if subject.waits.is_none() {
                subject.waits = Some(order);
                self.order += 1;
            }
        }
    }

    /// Makes the events that are due. At any time; only the first call within a tick does something.
    pub fn tick(&mut self, now: Duration) {
        let tick = now.as_nanos() / self.limits.tick.as_nanos();
        if tick <= self.ticked {
            return;
        }
        self.ticked = tick;
        let mut waiting: Vec<(u64, (String, Kind))> = self
            .subjects
            .iter()
            .filter_map(|(key, subject)| subject.waits.map(|order| (order, key.clone())))
            .collect();
        waiting.sort();
        let mut left = self.limits.burst;
        for (_, key) in waiting {
            if left == 0 {
                return;
            }
            let Some(subject) = self.subjects.get_mut(&key) else { continue };
            subject.waits = None;
            let since = floor(subject.since, self.limits.tick);
            let what = subject.what(key.1, self.limits.tick);
            // A change that was undone before anybody heard of it, or that only shows below a tick.
            if subject.told.as_ref() == what.as_ref() || (subject.told.is_none() && what == usual(key.1)) {
                continue;
            }
            let Some(what) = what else { continue };
            if key.1 != Kind::PlanChanged {
                subject.told = Some(what.clone());
            }
            self.events.push_back(Event { number: self.next, communicator: key.0, what, since });
            self.next += 1;
            left -= 1;
            if self.events.len() > self.limits.kept {
                self.events.pop_front();
            }
        }
    }

    /// When [`Feed::tick`] has something to do, if it has.
    pub fn due(&self) -> Option<Duration> {
        let waits = self.subjects.values().any(|subject| subject.waits.is_some());
        let next = u64::try_from((self.ticked + 1).saturating_mul(self.limits.tick.as_nanos())).ok()?;
        waits.then(|| Duration::from_nanos(next))
    }

    /// Where a reader stands who wants nothing of what has been.
    pub fn end(&self) -> Cursor {
        Cursor { feed: self.number, next: self.next }
    }

    /// At most `most` events from a cursor on.
    pub fn read(&self, from: Cursor, most: usize) -> Result<Batch<'_>, CursorError> {
        if from.feed != self.number {
            return Err(CursorError::Unknown);
        }
        if from.next > self.next {
            return Err(CursorError::Ahead { next: self.next });
        }
        let first = self.events.front().map_or(self.next, |event| event.number);
        let missed = first.saturating_sub(from.next);
        let begin = usize::try_from(from.next.saturating_sub(first)).unwrap_or(usize::MAX);
        let events: Vec<&Event> = self.events.iter().skip(begin).take(most).collect();
        let next = events.last().map_or(from.next.max(first), |event| event.number + 1);
        Ok(Batch { missed, events, cursor: Cursor { feed: self.number, next } })
    }
}

impl Subject {
    /// What is to be told of it as it is; `None` if there is nothing to tell.
    fn what(&self, kind: Kind, tick: Duration) -> Option<What> {
        let ranks = || self.ranks.keys().copied().collect();
        match kind {
            Kind::Failure if self.ranks.is_empty() => None,
            Kind::Failure => Some(What::Failure(ranks())),
            Kind::Maintenance => {
                let first = self.ranks.values().min().copied().unwrap_or_default();
                Some(What::Maintenance { ranks: ranks(), at: floor(first, tick) })
            }
            Kind::Agreement(term) => Some(What::Agreement { term, kept: !self.broken }),
            Kind::Capacity => Some(What::Capacity(self.level)),
            Kind::Congestion => Some(What::Congestion(self.level)),
            Kind::PlanChanged => Some(What::PlanChanged),
        }
    }
}

/// What holds of a communicator of which nothing has been told.
fn usual(kind: Kind) -> Option<What> {
    match kind {
        Kind::Failure | Kind::PlanChanged => None,
        Kind::Maintenance => Some(What::Maintenance { ranks: Vec::new(), at: Duration::ZERO }),
        Kind::Agreement(term) => Some(What::Agreement { term, kept: true }),
        Kind::Capacity => Some(What::Capacity(Level::None)),
        Kind::Congestion => Some(What::Congestion(Level::None)),
    }
}

/// Rounded down to a whole tick.
fn floor(time: Duration, tick: Duration) -> Duration {
    let below = time.as_nanos() % tick.as_nanos().max(1);
    time.saturating_sub(Duration::from_nanos(u64::try_from(below).unwrap_or_default()))
}

#[cfg(test)]
mod tests;
