//! Which bytes of an attachment's memory are in use. Allocation is first fit over a map of free pieces, in units of 64
//! bytes.

use std::collections::BTreeMap;

/// Tensors start at multiples of this.
pub(crate) const ALIGNMENT: u64 = 64;

/// The free pieces of an arena.
#[derive(Debug)]
pub(crate) struct Arena {
    /// Length by offset; neighbours are always merged.
    free: BTreeMap<u64, u64>,
}

impl Arena {
    pub(crate) fn new(bytes: u64) -> Self {
        let usable = bytes - bytes % ALIGNMENT;
        Self { free: (usable > 0).then_some((0, usable)).into_iter().collect() }
    }

    /// The offset of `bytes` bytes, or `None` if no free piece is large enough. Linear in free pieces.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        if bytes == 0 {
            return Some(0);
        }
        let bytes = bytes.checked_next_multiple_of(ALIGNMENT)?;
        let (offset, length) =
            self.free.iter().find(|(_, length)| **length >= bytes).map(|(o, l)| (*o, *l))?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        Some(offset)
    }

    /// Gives back what [`Self::take`] gave for the same number of bytes.
    pub(crate) fn give_back(&mut self, mut offset: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let mut length = bytes.next_multiple_of(ALIGNMENT);
        if let Some(next) = self.free.remove(&(offset + length)) {
            length += next;
        }
        if let Some((before, bytes)) = self.free.range(..offset).next_back().map(|(o, l)| (*o, *l))
            && before + bytes == offset
        {
            self.free.remove(&before);
            (offset, length) = (before, length + bytes);
        }
        self.free.insert(offset, length);
    }

    /// Bytes free in all, and in the largest piece.
    pub(crate) fn room(&self) -> (u64, u64) {
        (self.free.values().sum(), self.free.values().copied().max().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_never_overlap_and_all_comes_back(
            arena in 0u64..10_000,
            steps in prop::collection::vec((0u64..2_000, any::<prop::sample::Index>(), any::<bool>()), 0..100),
        ) {
            let mut free = Arena::new(arena);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (bytes, index, give) in steps {
                if give && !taken.is_empty() {
                    let (offset, bytes) = taken.swap_remove(index.index(taken.len()));
                    free.give_back(offset, bytes);
                } else if let Some(offset) = free.take(bytes) {
                    prop_assert_eq!(offset % ALIGNMENT, 0);
                    prop_assert!(offset + bytes <= arena);
                    for (other, length) in &taken {
                        prop_assert!(bytes == 0 || *length == 0 || offset + bytes <= *other || other + length <= offset);
                    }
                    taken.push((offset, bytes));
                } else {
                    prop_assert!(free.room().1 < bytes);
                }
            }
            for (offset, bytes) in taken {
                free.give_back(offset, bytes);
            }
            let usable = arena - arena % ALIGNMENT;
            prop_assert_eq!(free.room(), (usable, usable));
            prop_assert!(free.free.len() <= 1);
            prop_assert_eq!(free.take(u64::MAX), None);
        }
    }
}
