//! Things by key, and when something of each is due.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::ops::Deref;
use std::time::Duration;

/// Most things whose times are read anew each time that somebody asks what is due.
const MOST_CHANGED: usize = 16;

/// Something of which something is due at a time.
pub(crate) trait Due {
    /// Returns when the next thing of it is due, if anything is.
    fn next_timeout(&self) -> Option<Duration>;
}

/// Things by key. Whatever is lent to be changed is noted: its time is read anew until the next refresh.
#[derive(Debug)]
pub(crate) struct Timed<K, V> {
    all: BTreeMap<K, V>,
    /// When something of each is due, as of the last refresh.
    times: BTreeMap<K, Duration>,
    /// The same, the earliest first.
    by_time: BTreeSet<(Duration, K)>,
    /// Those that were added, lent or removed since.
    changed: BTreeSet<K>,
}

impl<K, V> Default for Timed<K, V> {
    fn default() -> Self {
        let (all, times) = (BTreeMap::new(), BTreeMap::new());
        Self { all, times, by_time: BTreeSet::new(), changed: BTreeSet::new() }
    }
}

impl<K, V> Deref for Timed<K, V> {
    type Target = BTreeMap<K, V>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

impl<K: Ord + Clone, V: Due> Timed<K, V> {
    /// Adds a thing, in place of any of this key.
    pub(crate) fn insert(&mut self, key: K, value: V) {
        self.note(&key);
        self.all.insert(key, value);
    }

    /// Removes a thing and returns it.
    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        self.note(key);
        self.all.remove(key)
    }

    /// Lends a thing to be changed.
    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.note(key);
        self.all.get_mut(key)
    }

    /// Lends a thing's place to be changed.
    pub(crate) fn entry(&mut self, key: K) -> btree_map::Entry<'_, K, V> {
        self.note(&key);
        self.all.entry(key)
    }

    /// Lends all to be changed.
    pub(crate) fn values_mut(&mut self) -> btree_map::ValuesMut<'_, K, V> {
        self.changed.extend(self.all.keys().cloned());
        self.all.values_mut()
    }

    /// Returns when the next thing of any of them is due.
    pub(crate) fn next_timeout(&self) -> Option<Duration> {
        let unchanged = self.by_time.iter().find(|(_, key)| !self.changed.contains(key));
        let changed = self.changed.iter().filter_map(|key| self.all.get(key)?.next_timeout());
        changed.chain(unchanged.map(|(at, _)| *at)).min()
    }

    /// Returns the keys of those of which something is due by now, ascending.
    pub(crate) fn due(&self, now: Duration) -> Vec<K> {
        let unchanged = self.by_time.iter().take_while(|(at, _)| *at <= now).map(|(_, key)| key);
        let unchanged = unchanged.filter(|key| !self.changed.contains(*key));
        let is_due = |key: &&K| self.all.get(*key).and_then(V::next_timeout).is_some_and(|at| at <= now);
        let mut due: Vec<K> = unchanged.chain(self.changed.iter().filter(is_due)).cloned().collect();
        due.sort_unstable();
        due
    }

    /// Notes the times of those that were changed.
    pub(crate) fn refresh(&mut self) {
        for key in std::mem::take(&mut self.changed) {
            let time = self.all.get(&key).and_then(V::next_timeout);
            let before = match time {
                Some(at) => self.times.insert(key.clone(), at),
                None => self.times.remove(&key),
            };
            // The set orders by both: what it removes must have them both.
            let mut place = (before.unwrap_or_default(), key);
            if before.is_some() {
                self.by_time.remove(&place);
            }
            if let Some(at) = time {
                place.0 = at;
                self.by_time.insert(place);
            }
        }
    }

    /// A thing is about to change. Only so many wait for a refresh.
    fn note(&mut self, key: &K) {
        if self.changed.len() >= MOST_CHANGED {
            self.refresh();
        }
        self.changed.insert(key.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha20Rng;

    #[derive(Debug)]
    struct Thing(Option<Duration>);

    impl Due for Thing {
        fn next_timeout(&self) -> Option<Duration> {
            self.0
        }
    }

    #[test]
    fn times_are_those_of_a_scan() {
        for seed in 0..100_u64 {
            let mut random = ChaCha20Rng::seed_from_u64(seed);
            let mut draw = |below: u64| random.next_u64() % below;
            let mut all = Timed::<u64, Thing>::default();
            for step in 0..300 {
                let key = draw(3 * MOST_CHANGED as u64);
                let at = Some(Duration::from_secs(draw(40))).filter(|_| draw(3) > 0);
                match draw(40) {
                    0..10 => all.insert(key, Thing(at)),
                    10..16 => drop(all.remove(&key)),
                    16 => all.refresh(),
                    17 => all.values_mut().for_each(|thing| thing.0 = at),
                    18..24 => all.entry(key).or_insert(Thing(None)).0 = at,
                    _ => all.get_mut(&key).into_iter().for_each(|thing| thing.0 = at),
                }
                let now = Duration::from_secs(draw(40));
                let due = all.iter().filter(|(_, thing)| thing.0.is_some_and(|at| at <= now));
                let due: Vec<u64> = due.map(|(key, _)| *key).collect();
                let first = all.values().filter_map(|thing| thing.0).min();
                assert_eq!((all.next_timeout(), all.due(now)), (first, due), "seed {seed}, step {step}");
            }
        }
    }

    #[test]
    fn what_changed_is_few() {
        let mut all = Timed::<u64, Thing>::default();
        (0..1000).for_each(|key| all.insert(key, Thing(Some(Duration::from_secs(key)))));
        assert!(all.changed.len() <= MOST_CHANGED && all.by_time.len() >= 1000 - MOST_CHANGED);
    }
}
