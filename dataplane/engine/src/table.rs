//! A table of things with stable keys. A key is never valid for a later thing in the same place, for a place is given up before its
//! keys come again.

/// Names an entry: its place and how often the place was reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) struct Key {
    pub(crate) index: u16,
    pub(crate) generation: u16,
}

/// Entries by [`Key`].
#[derive(Debug)]
pub(crate) struct Table<T> {
    entries: Vec<(u16, Option<T>)>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { entries: Vec::new() }
    }
}

impl<T> Table<T> {
    /// Enters a value, unless all of 65,536 places are taken or given up.
    pub(crate) fn insert(&mut self, value: T) -> Option<Key> {
        let free = |(generation, entry): &(u16, Option<T>)| entry.is_none() && *generation < u16::MAX;
        let free = self.entries.iter().position(free);
        let index = match free {
            Some(index) => index,
            None => {
                self.entries.push((0, None));
                self.entries.len() - 1
            }
        };
        let key = u16::try_from(index).ok()?;
        let (generation, entry) = self.entries.get_mut(index)?;
        *generation = generation.checked_add(1)?;
        *entry = Some(value);
        Some(Key { index: key, generation: *generation })
    }

    /// A table with these places, each with how often it was reused.
    pub(crate) fn from_places(entries: Vec<(u16, Option<T>)>) -> Self {
        Self { entries }
    }

    /// All places, each with how often it was reused.
    pub(crate) fn all_places(&self) -> impl Iterator<Item = (u16, Option<&T>)> {
        self.entries.iter().map(|(generation, entry)| (*generation, entry.as_ref()))
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        let (generation, entry) = self.entries.get(usize::from(key.index))?;
        entry.as_ref().filter(|_| *generation == key.generation)
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let (generation, entry) = self.entries.get_mut(usize::from(key.index))?;
        entry.as_mut().filter(|_| *generation == key.generation)
    }

    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let (generation, entry) = self.entries.get_mut(usize::from(key.index))?;
        if *generation == key.generation { entry.take() } else { None }
    }

    /// How many places there are.
    pub(crate) fn places(&self) -> usize {
        self.entries.len()
    }

    /// The key of the entry at a place.
    pub(crate) fn key_at(&self, place: usize) -> Option<Key> {
        let (generation, entry) = self.entries.get(place)?;
        entry.as_ref()?;
        Some(Key { index: u16::try_from(place).ok()?, generation: *generation })
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().filter_map(|(_, entry)| entry.as_ref())
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.entries.iter_mut().filter_map(|(_, entry)| entry.as_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_does_not_reach_the_next_tenant_of_its_place() {
        let mut table = Table::default();
        let first = table.insert('a').unwrap();
        assert_eq!(table.remove(first), Some('a'));
        let second = table.insert('b').unwrap();
        assert_eq!(first.index, second.index);
        assert_eq!((table.get(first), table.get(second)), (None, Some(&'b')));
        assert_eq!(table.remove(first), None);
        assert_eq!(table.key_at(0), Some(second));
    }

    #[test]
    fn a_place_is_given_up_before_its_keys_come_again() {
        let mut table = Table::default();
        let first = table.insert(0).unwrap();
        assert_eq!(table.remove(first), Some(0));
        for value in 1..=1 << 16 {
            let key = table.insert(value).unwrap();
            assert_ne!(key, first, "after {value}");
            assert_eq!(table.get(first), None);
            assert_eq!(table.remove(key), Some(value));
        }
        assert_eq!(table.places(), 2);
    }
}
