//! Who has series of their own. All that live have them, while there is room, and of those that are over the ones
//! used last.

use std::collections::BTreeMap;

/// Values of a bounded number of keys. What lives goes before what is over; of what is over, the oldest goes first.
#[derive(Clone, Debug)]
pub struct Recent<K, V> {
    room: usize,
    entries: BTreeMap<K, Entry<V>>,
    /// Keys that are over, by when.
    over: BTreeMap<u64, K>,
    clock: u64,
}

#[derive(Clone, Debug)]
struct Entry<V> {
    value: V,
    /// How many live under the key.
    living: u32,
    /// Where it stands in `over`.
    over_at: u64,
}

impl<K: Ord + Clone, V: Default> Recent<K, V> {
    /// For so many keys.
    pub const fn new(room: usize) -> Self {
        Self { room, entries: BTreeMap::new(), over: BTreeMap::new(), clock: 0 }
    }

    /// One begins to live under this key. Whether the key has a value of its own; not where as many others live as there is room for.
    ///
    /// Cost: a search in two trees of at most so many keys.
    pub fn begin(&mut self, key: &K) -> bool {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.living += 1;
            self.over.remove(&entry.over_at);
            return true;
        }
        if self.entries.len() >= self.room {
            let Some((_, oldest)) = self.over.pop_first() else { return false };
            self.entries.remove(&oldest);
        }
        self.entries.insert(key.clone(), Entry { value: V::default(), living: 1, over_at: 0 });
        true
    }

    /// The same, where no more than `share` of the keys for which `alike` holds have values. Of these the one that has long been over goes
    /// first. The key itself is one of them.
    ///
    /// Cost: as of [`Self::begin`], and for a new key a look at each.
    pub fn begin_within(&mut self, key: &K, share: usize, alike: impl Fn(&K) -> bool) -> bool {
        let new = !self.entries.contains_key(key);
        if new && self.entries.keys().filter(|known| alike(known)).count() >= share {
            let oldest = self.over.iter().find(|(_, over)| alike(over)).map(|(at, _)| *at);
            let Some(oldest) = oldest.and_then(|at| self.over.remove(&at)) else { return false };
            self.entries.remove(&oldest);
        }
        self.begin(key)
    }

    /// One that began under this key, with a value of its own, is over. The value stays until its room is needed.
    pub fn end(&mut self, key: &K) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        entry.living = entry.living.saturating_sub(1);
        if entry.living == 0 {
            self.clock += 1;
            entry.over_at = self.clock;
            self.over.insert(self.clock, key.clone());
        }
    }

    /// Returns the key's value, if it has one.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.entries.get_mut(key).map(|entry| &mut entry.value)
    }

    /// Returns all, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(key, entry)| (key, &entry.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(recent: &Recent<u32, u32>) -> Vec<u32> {
        recent.iter().map(|(key, _)| *key).collect()
    }

    #[test]
    fn living_ones_stay_and_the_oldest_go() {
        let mut recent: Recent<u32, u32> = Recent::new(3);
        assert!(recent.begin(&100));
        for key in 0..10_000 {
            assert!(recent.begin(&key) || key == 100, "{key}");
            recent.end(&key);
        }
        assert_eq!(keys(&recent), [100, 9998, 9999]);
        // One that lives again does not go.
        assert!(recent.begin(&9998) && recent.begin(&1));
        assert_eq!(keys(&recent), [1, 100, 9998]);
        assert!(!recent.begin(&2), "all live");
        recent.end(&100);
        assert_eq!(keys(&recent), [1, 100, 9998], "it lived twice under that key, once too often ended");
    }

    #[test]
    fn those_alike_have_their_share_alone() {
        let mut recent: Recent<u32, u32> = Recent::new(8);
        let even = |key: &u32| key.is_multiple_of(2);
        for key in (0..20).step_by(2) {
            assert_eq!(recent.begin_within(&key, 3, even), key < 6, "{key}");
        }
        assert!(recent.begin_within(&4, 3, even), "it has a value already");
        // Of its own kind one has ended, of the others none.
        (1..10).step_by(2).for_each(|key| assert!(recent.begin(&key)));
        recent.end(&2);
        assert!(recent.begin_within(&20, 3, even) && !recent.begin_within(&22, 3, even));
        assert_eq!(keys(&recent), [0, 1, 3, 4, 5, 7, 9, 20]);
    }

    #[test]
    fn a_value_outlives_its_end() {
        let mut recent: Recent<u32, u32> = Recent::new(1);
        recent.begin(&7);
        *recent.get_mut(&7).unwrap() += 5;
        recent.end(&7);
        recent.begin(&7);
        assert_eq!(recent.get_mut(&7), Some(&mut 5));
        assert!(!recent.begin(&8) && recent.get_mut(&8).is_none());
    }
}
