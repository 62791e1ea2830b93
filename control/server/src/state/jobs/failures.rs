//! Failures of jobs' workers, and what is stored of jobs. A control that starts anew goes on with their waits and bids, and knows whose
//! workers have met and which job is to leave its hosts when.

use crate::state::effects::Effects;
use crate::state::world::operator::Operator;
use harmonaize_abi::Nanos;
use harmonaize_abi::session::{JobBid, Price};
use harmonaize_store::{Change, Job as Stored, JobBid as StoredBid};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long after the last failure a job's failures are forgotten. Workers that fail by themselves do so sooner: at their start, or at a
/// checkpoint. In weeks of training some fail for their hosts' sake.
const FAILURES_FORGOTTEN: Duration = Duration::from_secs(3600);

/// How long workers wait before they start again, from the second failure on. Each further failure doubles it.
const FIRST_BACKOFF: Duration = Duration::from_secs(10);

/// How long they wait at most.
const LONGEST_BACKOFF: Duration = Duration::from_secs(300);

/// How long after the last failure the waits begin anew. A job that fails every other hour waits as long as it can.
const BACKOFF_FORGOTTEN: Duration = Duration::from_secs(24 * 3600);

/// How long after it could not be stored it is tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// A tenant's name, and its job's.
type Key = (String, String);

/// Generations of a job in which a worker failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Failures {
    /// Those without [`FAILURES_FORGOTTEN`] between them.
    recent: u32,
    /// Those without [`BACKOFF_FORGOTTEN`] between them.
    waited_for: u32,
    /// When the last one was; the start of control where that was before.
    last: Duration,
    /// How long before that it was.
    before: Duration,
}

impl Failures {
    /// How long ago the last one was.
    fn age(&self, now: Duration) -> Duration {
        now.saturating_sub(self.last).saturating_add(self.before)
    }

    /// Those that count still.
    pub(super) fn recent(&self, now: Duration) -> u32 {
        if self.age(now) < FAILURES_FORGOTTEN { self.recent } else { 0 }
    }

    /// Those that make workers wait.
    pub(super) fn waited_for(&self) -> u32 {
        self.waited_for
    }

    /// One more.
    pub(super) fn add(&mut self, now: Duration) {
        let waited_for = if self.age(now) < BACKOFF_FORGOTTEN { self.waited_for } else { 0 };
        let recent = self.recent(now);
        *self = Self {
            recent: recent.saturating_add(1),
            waited_for: waited_for.saturating_add(1),
            last: now,
            before: Duration::ZERO,
        };
    }

    /// Until when no worker starts.
    pub(super) fn backoff_until(&self) -> Duration {
        let wait =
            |doublings| FIRST_BACKOFF.saturating_mul(2_u32.saturating_pow(doublings)).min(LONGEST_BACKOFF);
        let wait = self.waited_for.checked_sub(2).map_or(Duration::ZERO, wait);
        self.last.saturating_add(wait.saturating_sub(self.before))
    }

    /// Those of an earlier start. A clock that was set back makes them later, and never future.
    fn stored(operator: &Operator, record: &Stored) -> Self {
        let began = operator.realtime(Duration::ZERO);
        Self {
            recent: record.recent_failures,
            waited_for: record.failures,
            last: Duration::ZERO,
            before: began.since(Nanos(record.last_failure_ns)),
        }
    }
}

/// What a control that starts anew is to know of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Persisted {
    /// How often its workers have failed.
    pub failures: Failures,
    /// Whether its workers have started together, and have formed no communicator yet: of an elastic job.
    pub unformed: bool,
    /// What it bids, once its tenant has said so.
    pub bid: Option<JobBid>,
    /// When it leaves hosts for which it was outbid.
    pub leaves: Option<Duration>,
}

impl Persisted {
    /// What is stored of it; none where nothing has to be.
    fn record(&self, operator: &Operator, (tenant, name): &Key) -> Option<Stored> {
        let Self { failures, unformed, bid, leaves } = *self;
        let before = u64::try_from(failures.before.as_nanos()).unwrap_or(u64::MAX);
        let of = |bid: JobBid| StoredBid {
            least_millionths: bid.least.0,
            further_millionths: bid.further.0,
            checkpoint_ns: bid.checkpoint_ns,
        };
        (unformed || failures.waited_for > 0 || bid.is_some() || leaves.is_some()).then(|| Stored {
            tenant: tenant.clone(),
            name: name.clone(),
            recent_failures: failures.recent,
            failures: failures.waited_for,
            last_failure_ns: operator.realtime(failures.last).0.saturating_sub(before),
            unformed,
            bid: bid.map(of),
            leaves_ns: leaves.map_or(0, |at| operator.realtime(at).0),
        })
    }

    /// That of an earlier start.
    fn stored(operator: &Operator, record: &Stored) -> Self {
        let of = |bid: StoredBid| JobBid {
            least: Price(bid.least_millionths),
            further: Price(bid.further_millionths),
            checkpoint_ns: bid.checkpoint_ns,
        };
        Self {
            failures: Failures::stored(operator, record),
            unformed: record.unformed,
            // What makes no sense is none of ours.
            bid: record.bid.map(of).filter(|bid| bid.check().is_ok()),
            leaves: Some(record.leaves_ns).filter(|at| *at > 0).map(|at| operator.time(Nanos(at))),
        }
    }
}

/// What the store has of jobs.
#[derive(Clone, Debug, Default)]
pub(super) struct StoredJobs {
    /// What an earlier start left, of jobs whose runners have not come back.
    earlier: BTreeMap<Key, Persisted>,
    /// Until when they may.
    until: Option<Duration>,
    /// Jobs of which the store has a record, or may have one.
    stored: BTreeSet<Key>,
    /// Jobs whose record is not the store's.
    unsaved: BTreeSet<Key>,
    /// Those that could not be stored, and when they are tried again.
    again: BTreeSet<Key>,
    again_at: Option<Duration>,
}

impl StoredJobs {
    /// Takes up what an earlier start left, of jobs that may come back `until` then.
    pub(super) fn restore(&mut self, operator: &Operator, records: BTreeMap<Key, Stored>, until: Duration) {
        self.stored = records.keys().cloned().collect();
        let of = |(key, record)| (key, Persisted::stored(operator, &record));
        self.earlier = records.into_iter().map(of).collect();
        self.until = (!self.earlier.is_empty()).then_some(until);
    }

    /// Returns what is known of a job that comes.
    pub(super) fn take(&mut self, key: &Key) -> Persisted {
        self.earlier.remove(key).unwrap_or_default()
    }

    /// A job is otherwise than before, or it is gone.
    pub(super) fn changed(&mut self, key: Key) {
        self.unsaved.insert(key);
    }

    /// A tenant is no more.
    pub(super) fn forget_tenant(&mut self, tenant: &str) {
        let gone = self.earlier.extract_if(.., |(owner, _), _| owner == tenant);
        self.unsaved.extend(gone.map(|(key, _)| key));
    }

    /// Returns when [`StoredJobs::expire`] has something to do.
    pub(super) fn next_timeout(&self) -> Option<Duration> {
        self.until.into_iter().chain(self.again_at).min()
    }

    /// Forgets jobs that have not come back, and stores once more what could not be.
    pub(super) fn expire(&mut self, now: Duration) {
        if self.until.take_if(|until| *until <= now).is_some() {
            self.unsaved.extend(std::mem::take(&mut self.earlier).into_keys());
        }
        if self.again_at.take_if(|at| *at <= now).is_some() {
            self.unsaved.append(&mut self.again);
        }
    }

    /// Has stored what has changed. `of` says what is to be kept of a job that is there.
    pub(super) fn store(
        &mut self,
        operator: &Operator,
        effects: &mut Effects,
        of: impl Fn(&Key) -> Option<Persisted>,
    ) {
        for key in std::mem::take(&mut self.unsaved) {
            let kept = of(&key).or_else(|| self.earlier.get(&key).copied()).unwrap_or_default();
            match kept.record(operator, &key) {
                Some(record) => {
                    self.stored.insert(key);
                    effects.store(Change::Job(record));
                }
                None if self.stored.remove(&key) => effects.store(Change::NoJob(key.0, key.1)),
                None => {}
            }
        }
    }

    /// Some of this could not be stored: it is tried again after a pause.
    pub(super) fn store_again(&mut self, now: Duration, changes: &[Change]) {
        for change in changes {
            let key = match change {
                Change::Job(job) => (job.tenant.clone(), job.name.clone()),
                Change::NoJob(tenant, name) => (tenant.clone(), name.clone()),
                _ => continue,
            };
            self.stored.insert(key.clone());
            self.again.insert(key);
            self.again_at.get_or_insert(now.saturating_add(AGAIN));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_and_begin_anew_after_a_day() {
        let hour = Duration::from_secs(3600);
        let (mut failures, mut now) = (Failures::default(), hour);
        assert_eq!(failures.backoff_until(), Duration::ZERO);
        for seconds in [0, 10, 20, 40, 80, 160, 300, 300] {
            failures.add(now);
            assert_eq!((failures.recent(now), failures.recent(now + hour)), (1, 0));
            assert_eq!(failures.backoff_until(), now + Duration::from_secs(seconds));
            now += 2 * hour;
        }
        now += 24 * hour;
        failures.add(now);
        assert_eq!(failures.backoff_until(), now);
        failures.add(now);
        assert_eq!((failures.recent(now), failures.backoff_until()), (2, now + FIRST_BACKOFF));
        failures.waited_for = u32::MAX;
        failures.add(now);
        assert_eq!(failures.backoff_until(), now + LONGEST_BACKOFF);
    }

    #[test]
    fn time_before_the_start_counts() {
        let (second, hour) = (Duration::from_secs(1), FAILURES_FORGOTTEN);
        let (last, before) = (Duration::ZERO, 5 * second);
        let mut failures = Failures { recent: 3, waited_for: 3, last, before };
        assert_eq!(failures.backoff_until(), 15 * second);
        assert_eq!([hour - 6 * second, hour - 5 * second].map(|now| failures.recent(now)), [3, 0]);
        failures.add(second);
        assert_eq!((failures.recent(second), failures.backoff_until()), (4, 41 * second));
    }
}
