//! All mappings of an attachment's tensor memory, in one space of offsets.

use crate::{Memory, MemoryError};
use harmonaize_abi::{View, ViewMut};
use std::sync::Arc;

/// The arena, from offset 0 on, and the regions that were added behind it. A range lies in one of them.
#[derive(Debug)]
pub struct Regions {
    arena: Arc<Memory>,
    /// Each with its first offset, ascending, apart from each other.
    added: Vec<(u64, Arc<Memory>)>,
}

fn end(base: u64, memory: &Memory) -> Option<u64> {
    base.checked_add(memory.bytes() as u64)
}

impl Regions {
    /// An arena alone.
    pub fn new(arena: Arc<Memory>) -> Self {
        Self { arena, added: Vec::new() }
    }

    /// The first of all.
    pub fn arena(&self) -> &Arc<Memory> {
        &self.arena
    }

    /// All of them, each with its first offset, ascending.
    pub fn all(&self) -> impl Iterator<Item = (u64, &Arc<Memory>)> {
        std::iter::once((0, &self.arena)).chain(self.added.iter().map(|(base, memory)| (*base, memory)))
    }

    /// Adds a region that begins at `base`.
    ///
    /// # Errors
    /// [`MemoryError::Taken`] where others have some of these offsets.
    pub fn add(&mut self, base: u64, memory: Arc<Memory>) -> Result<(), MemoryError> {
        let at = self.added.partition_point(|(before, _)| *before < base);
        let before = at.checked_sub(1).and_then(|at| self.added.get(at));
        let before = before.map_or(end(0, &self.arena), |(base, memory)| end(*base, memory));
        let after = self.added.get(at).map_or(u64::MAX, |(base, _)| *base);
        let apart = before.is_some_and(|before| before <= base);
        if !apart || end(base, &memory).is_none_or(|end| end > after) {
            return Err(MemoryError::Taken(base));
        }
        self.added.insert(at, (base, memory));
        Ok(())
    }

    /// Takes away the region that begins at `base`; the arena stays.
    pub fn remove(&mut self, base: u64) -> Option<Arc<Memory>> {
        let at = self.added.binary_search_by_key(&base, |(base, _)| *base).ok()?;
        Some(self.added.remove(at).1)
    }

    /// The mapping of a range, and where in it the range begins. Of the arena a comparison; else a binary search.
    #[inline]
    pub fn locate(&self, offset: u64, bytes: u64) -> Result<(&Arc<Memory>, u64), MemoryError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.arena.bytes() as u64 => Ok((&self.arena, offset)),
            _ => self.locate_added(offset, bytes),
        }
    }

    #[inline(never)]
    fn locate_added(&self, offset: u64, bytes: u64) -> Result<(&Arc<Memory>, u64), MemoryError> {
        let after = self.added.partition_point(|(base, _)| *base <= offset);
        let found = after.checked_sub(1).and_then(|at| self.added.get(at));
        let inside = found.and_then(|(base, memory)| {
            let at = offset.checked_sub(*base)?;
            at.checked_add(bytes).filter(|end| *end <= memory.bytes() as u64).map(|_| (memory, at))
        });
        inside.ok_or_else(|| MemoryError::OutOfRange { offset, bytes, size: self.bytes() })
    }

    /// Length of all in bytes.
    pub fn bytes(&self) -> u64 {
        let added = self.added.iter().map(|(_, memory)| memory.bytes() as u64);
        added.fold(self.arena.bytes() as u64, u64::saturating_add)
    }

    /// A range to read.
    pub fn view(&self, offset: u64, bytes: u64) -> Result<View<'_>, MemoryError> {
        let (memory, at) = self.locate(offset, bytes)?;
        memory.view(at, bytes)
    }

    /// A range to write.
    pub fn view_mut(&self, offset: u64, bytes: u64) -> Result<ViewMut<'_>, MemoryError> {
        let (memory, at) = self.locate(offset, bytes)?;
        memory.view_mut(at, bytes)
    }

    /// Copies bytes out.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let (memory, at) = self.locate(offset, into.len() as u64)?;
        memory.read(at, into)
    }

    /// Copies bytes in.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        let (memory, at) = self.locate(offset, from.len() as u64)?;
        memory.write(at, from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = 4096;

    fn memory(pages: u64) -> Arc<Memory> {
        Memory::private((pages * PAGE) as usize).unwrap()
    }

    #[test]
    fn a_range_lies_in_one_region() {
        let mut regions = Regions::new(memory(2));
        let (one, other) = (memory(1), memory(3));
        // Back to back with the arena, then after a gap.
        regions.add(2 * PAGE, Arc::clone(&one)).unwrap();
        regions.add(8 * PAGE, Arc::clone(&other)).unwrap();
        let at =
            |offset, bytes| regions.locate(offset, bytes).map(|(memory, at)| (memory.address(), at)).ok();
        assert_eq!(at(2 * PAGE, PAGE), Some((one.address(), 0)));
        assert_eq!(at(3 * PAGE - 1, 1), Some((one.address(), PAGE - 1)));
        assert_eq!(at(9 * PAGE, 2 * PAGE), Some((other.address(), PAGE)));
        for (offset, bytes) in [
            (2 * PAGE - 1, 2),
            (0, 3 * PAGE),
            (3 * PAGE - 1, 2),
            (3 * PAGE, 1),
            (5 * PAGE, 0),
            (7 * PAGE, 2 * PAGE),
            (8 * PAGE, 3 * PAGE + 1),
            (11 * PAGE, 1),
            (2 * PAGE, u64::MAX),
            (u64::MAX, 1),
        ] {
            assert_eq!(at(offset, bytes), None, "{bytes} bytes at {offset}");
        }
        assert_eq!(regions.bytes(), 6 * PAGE);
        assert!(regions.remove(0).is_none() && regions.remove(9 * PAGE).is_none());
        assert!(Arc::ptr_eq(&regions.remove(2 * PAGE).unwrap(), &one));
        assert!(regions.locate(2 * PAGE, 1).is_err() && regions.locate(8 * PAGE, 1).is_ok());
    }

    proptest! {
        #[test]
        fn regions_never_overlap(asked in prop::collection::vec((0u64..40, 1u64..5, any::<bool>()), 0..40)) {
            let mut regions = Regions::new(memory(1));
            let mut owners = [0u64; 48];
            owners[0] = regions.locate(0, 1).unwrap().0.address();
            for (base, pages, remove) in asked {
                let places = base as usize..(base + pages) as usize;
                if remove {
                    if let Some(gone) = regions.remove(base * PAGE) {
                        owners.iter_mut().filter(|owner| **owner == gone.address()).for_each(|owner| *owner = 0);
                    }
                } else {
                    let new = memory(pages);
                    let free = owners[places.clone()].iter().all(|owner| *owner == 0);
                    prop_assert_eq!(regions.add(base * PAGE, Arc::clone(&new)).is_ok(), free);
                    if free {
                        owners[places].fill(new.address());
                    }
                }
                for (page, owner) in owners.iter().enumerate() {
                    let found = regions.locate(page as u64 * PAGE, PAGE);
                    prop_assert_eq!(found.map_or(0, |(memory, _)| memory.address()), *owner);
                }
            }
        }
    }
}
