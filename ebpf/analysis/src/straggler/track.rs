//! Lateness of each of several things of a kind (ranks, edges), unit by unit. It shows which of them are late for good.

use super::ring::{Baseline, PENDING, median};
use super::{Limits, Unit};
use std::time::Duration;

/// Units before the first finding.
const WARM_UP: usize = 8;
/// The most that one score counts for. So a long pause does not make up for units that are nearly in time.
const MAX_SCORE: f64 = 1.1;
/// Values of a late item that its median is taken over.
const LATE: usize = 32;
/// Things whose usual lateness is looked at, where there are more.
const SAMPLED: usize = 64;

/// A thing became late, or is so no longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transition<K> {
    pub(super) key: K,
    /// Whether it is late from now on.
    pub(super) late: bool,
    /// The first unit in which it was late.
    pub(super) since: Unit,
    /// The last unit in which it was late.
    pub(super) until: Unit,
    /// Its median lateness.
    pub(super) by: Duration,
    /// In how many units.
    pub(super) units: u64,
}

/// All things of a kind.
#[derive(Debug, Clone, Default)]
pub(super) struct Track<K> {
    items: Vec<Item<K>>,
    scratch: Vec<i64>,
    units: usize,
}

#[derive(Debug, Clone)]
struct Item<K> {
    key: K,
    usual: Baseline,
    /// The latest values in parts of their thresholds, the newest last.
    scores: [f64; PENDING],
    /// The values themselves.
    values: [i64; PENDING],
    /// When the running row of large scores began.
    large_since: Option<Unit>,
    late: Option<Late>,
    absent: u32,
}

#[derive(Debug, Clone)]
struct Late {
    since: Unit,
    until: Unit,
    threshold: f64,
    by: [i64; LATE],
    count: usize,
    units: u64,
}

impl Late {
    fn push(&mut self, value: i64, unit: Unit) {
        if let Some(by) = self.by.get_mut(self.count % LATE) {
            *by = value;
        }
        self.count += 1;
        self.units += 1;
        self.until = unit;
    }

    fn transition<K>(&self, key: K, late: bool) -> Transition<K> {
        let mut by = self.by;
        let known = self.count.min(LATE);
        let middle = by.get_mut(..known).and_then(median).unwrap_or_default();
        let by = Duration::from_nanos(u64::try_from(middle).unwrap_or_default());
        Transition { key, late, since: self.since, until: self.until, by, units: self.units }
    }
}

impl<K: Copy + Ord> Track<K> {
    /// Takes the lateness of each thing in a unit, in ascending order of keys, and tells of those that turned.
    ///
    /// Work for each unit: a selection over the window of each thing. `floor` is the least lateness that counts. A unit that
    /// `overlaps` those before it makes the last of them later, if it is, and counts for no further one.
    pub(super) fn take(
        &mut self,
        (unit, overlaps): (Unit, bool),
        lateness: &[(K, i64)],
        floor: i64,
        limits: &Limits,
        mut turned: impl FnMut(Transition<K>),
    ) {
        self.units = self.units.saturating_add(usize::from(!overlaps));
        self.add_items(lateness, limits.max_items);
        let common = self.common();
        let tail = limits.tails * self.tail();
        let warm = self.units > WARM_UP;
        for item in &mut self.items {
            let place = lateness.binary_search_by(|(key, _)| key.cmp(&item.key));
            let Some((_, value)) = place.ok().and_then(|place| lateness.get(place)) else {
                item.absent = item.absent.saturating_add(1);
                if item.absent > limits.forget
                    && let Some(late) = item.late.take()
                {
                    turned(late.transition(item.key, false));
                }
                continue;
            };
            item.absent = 0;
            let own = item.usual.spread().map_or(0, |spread| spread.deviation);
            let noise = limits.deviations * own.max(common) as f64;
            let threshold = noise.max(tail).max(floor as f64).max(1.0);
            item.take((unit, overlaps), *value, (threshold, warm), &mut turned);
        }
        self.items.retain(|item| item.late.is_some() || item.absent <= 2 * limits.forget);
    }

    /// The mean of the latest scores of a thing: at 1 and beyond it is late.
    pub(super) fn score(&self, key: K) -> f64 {
        let place = self.items.binary_search_by(|item| item.key.cmp(&key));
        let item = place.ok().and_then(|place| self.items.get(place));
        item.map_or(0.0, |item| item.scores.iter().sum::<f64>() / PENDING as f64)
    }

    /// All things that are known.
    pub(super) fn keys(&self) -> impl Iterator<Item = K> {
        self.items.iter().map(|item| item.key)
    }

    /// What is late now.
    pub(super) fn late(&self) -> impl Iterator<Item = Transition<K>> {
        self.items.iter().filter_map(|item| Some(item.late.as_ref()?.transition(item.key, true)))
    }

    /// Makes places for things that are new.
    fn add_items(&mut self, lateness: &[(K, i64)], most: usize) {
        for (key, _) in lateness {
            if let Err(place) = self.items.binary_search_by(|item| item.key.cmp(key))
                && self.items.len() < most
            {
                let usual = Baseline::default();
                let (scores, values) = ([0.0; PENDING], [0; PENDING]);
                self.items.insert(
                    place,
                    Item { key: *key, usual, scores, values, large_since: None, late: None, absent: 0 },
                );
            }
        }
    }

    /// The usual deviation of most things.
    fn common(&mut self) -> i64 {
        self.scratch.clear();
        let quiet = self.items.iter().filter(|item| item.late.is_none());
        self.scratch.extend(quiet.filter_map(|item| Some(item.usual.spread()?.deviation)));
        median(&mut self.scratch).unwrap_or_default()
    }

    /// The lateness that one in ten cases reaches, for most of what is not late. Of many things, only some are sampled. While
    /// little is known, more.
    fn tail(&mut self) -> f64 {
        self.scratch.clear();
        let step = self.items.len().div_ceil(SAMPLED).max(1);
        let mut known = 0;
        for item in self.items.iter().filter(|item| item.late.is_none()).step_by(step) {
            known += item.usual.values().len();
            self.scratch.extend(item.usual.upper());
        }
        let upper = median(&mut self.scratch).unwrap_or_default();
        upper as f64 * (1.0 + 24.0 / known.max(1) as f64)
    }
}

impl<K: Copy> Item<K> {
    /// Takes a value of a unit and updates whether the item is late. It is late at three in a row of at least 0.6 whose mean is
    /// 1, and no longer at three in a row below 0.5.
    fn take(
        &mut self,
        (unit, overlaps): (Unit, bool),
        value: i64,
        (threshold, warm): (f64, bool),
        turned: &mut impl FnMut(Transition<K>),
    ) {
        // What was late enough to be found stays so, whatever the noise of the others.
        let threshold = self.late.as_ref().map_or(threshold, |late| threshold.min(late.threshold));
        let score = (value as f64 / threshold).min(MAX_SCORE);
        if overlaps {
            let ([.., last], [.., last_value]) = (&mut self.scores, &mut self.values);
            if score <= *last {
                return;
            }
            (*last, *last_value) = (score, value);
        } else {
            let [_, second, third] = self.scores;
            self.scores = [second, third, score];
            let [_, second, third] = self.values;
            self.values = [second, third, value];
        }
        self.large_since = if score < 0.6 { None } else { self.large_since.or(Some(unit)) };
        if let Some(late) = &mut self.late {
            if score >= 0.5 && !overlaps {
                late.push(value, unit);
            }
            if self.scores.iter().all(|score| *score < 0.5) {
                turned(late.transition(self.key, false));
                self.late = None;
            }
            return;
        }
        if !overlaps {
            self.usual.push(value);
        }
        let mean = self.scores.iter().sum::<f64>() / PENDING as f64;
        let row =
            self.large_since.filter(|_| warm && mean >= 1.0 && self.scores.iter().all(|score| *score >= 0.6));
        if let Some(since) = row {
            self.usual.discard();
            let mut late = Late { since, until: unit, threshold, by: [0; LATE], count: 0, units: 0 };
            for value in self.values {
                late.push(value, unit);
            }
            late.units = (unit.number.saturating_sub(since.number) + 1).max(late.units);
            turned(late.transition(self.key, true));
            self.late = Some(late);
        }
    }
}
