//! Where the two rings of an attachment lie in their shared segment.
//!
//! Six control words, each on a pair of cache lines of its own, then the submission entries (128 bytes), then the
//! completion entries (64 bytes).

use crate::ring::{Cells, Consumer, Producer};
use crate::{MAX_ENTRIES, Memory, MemoryError};
use harmonaize_abi::{Completion, Submission};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Distance between control words: a pair of cache lines, which prefetchers fetch together.
const LINE: u64 = 128;
const CONTROL: u64 = 3 * LINE;
const ENTRIES_AT: u64 = 1024;
/// Words of a submission.
pub(crate) const SUBMISSION: usize = size_of::<Submission>() / 8;
/// Words of a completion.
pub(crate) const COMPLETION: usize = size_of::<Completion>() / 8;

/// Which of the two rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingKind {
    Submissions,
    Completions,
}

/// Bytes of a segment, or `None` if `entries` is not a power of two up to [`MAX_ENTRIES`].
pub(crate) fn segment_bytes(entries: u32) -> Option<u64> {
    let valid = entries.is_power_of_two() && entries <= MAX_ENTRIES;
    valid.then(|| ENTRIES_AT + u64::from(entries) * (SUBMISSION + COMPLETION) as u64 * 8)
}

/// One ring in a segment.
#[derive(Debug)]
pub(crate) struct Shared {
    memory: Arc<Memory>,
    capacity: u64,
    control: u64,
    entries: u64,
    words: u64,
}

pub(crate) type Submitter = Producer<Shared, SUBMISSION>;
pub(crate) type SubmissionReader = Consumer<Shared, SUBMISSION>;
pub(crate) type Completer = Producer<Shared, COMPLETION>;
pub(crate) type CompletionReader = Consumer<Shared, COMPLETION>;

impl Shared {
    /// The ring in a segment of `entries` entries.
    pub(crate) fn new(memory: &Arc<Memory>, entries: u32, which: RingKind) -> Result<Self, MemoryError> {
        let bytes = segment_bytes(entries).ok_or(MemoryError::BadSize(entries.into()))?;
        memory.view(0, bytes)?;
        let capacity = u64::from(entries);
        let (control, entries, words) = match which {
            RingKind::Submissions => (0, ENTRIES_AT, SUBMISSION as u64),
            RingKind::Completions => {
                (CONTROL, ENTRIES_AT + capacity * SUBMISSION as u64 * 8, COMPLETION as u64)
            }
        };
        Ok(Self { memory: Arc::clone(memory), capacity, control, entries, words })
    }

    fn at(&self, offset: u64) -> &AtomicU64 {
        // SAFETY: `new` checked that the segment holds every control word and entry, callers stay below them, and both the
        // mapping (page-aligned) and the offset are multiples of 8. Everybody accesses these words atomically, or is another
        // process, which cannot make an atomic load or store here undefined.
        unsafe { AtomicU64::from_ptr(self.memory.base().wrapping_add(offset as usize).cast()) }
    }
}

impl Cells for Shared {
    type Word = AtomicU64;

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn head(&self) -> &AtomicU64 {
        self.at(self.control)
    }

    fn tail(&self) -> &AtomicU64 {
        self.at(self.control + LINE)
    }

    fn sleep_number(&self) -> &AtomicU64 {
        self.at(self.control + 2 * LINE)
    }

    fn word(&self, index: u64, word: usize) -> &AtomicU64 {
        let (slot, word) = (index & (self.capacity - 1), word as u64 % self.words);
        self.at(self.entries + (slot * self.words + word) * 8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_do_not_overlap_and_fit() {
        assert_eq!(segment_bytes(0), None);
        assert_eq!(segment_bytes(48), None);
        assert_eq!(segment_bytes(MAX_ENTRIES * 2), None);
        let bytes = segment_bytes(4).unwrap();
        let memory = Memory::private(bytes as usize).unwrap();
        assert!(Shared::new(&memory, 8, RingKind::Submissions).is_err());
        let rings = [RingKind::Submissions, RingKind::Completions]
            .map(|which| Shared::new(&memory, 4, which).unwrap());
        let mut addresses = Vec::new();
        for ring in &rings {
            addresses
                .extend([ring.head(), ring.tail(), ring.sleep_number()].map(|word| word.as_ptr() as usize));
            for index in 0..4 {
                addresses
                    .extend((0..ring.words as usize).map(|word| ring.word(index, word).as_ptr() as usize));
            }
        }
        let base = memory.base() as usize;
        assert!(addresses.iter().all(|address| *address >= base && address + 8 <= base + bytes as usize));
        let count = addresses.len();
        addresses.sort_unstable();
        addresses.dedup();
        assert_eq!(addresses.len(), count);
        assert_eq!(count, 6 + 4 * (SUBMISSION + COMPLETION));
    }
}
