//! One pass over memory, checked: what a kernel is given.

use crate::element::Divisor;
use crate::simd::ROW_BYTES;
use crate::{KernelError, MAX_SOURCES};
use harmonaize_abi::{Dtype, View, ViewMut};

/// A pass at least this long first does the few elements before its destination's next aligned address.
const ALIGN_FROM: usize = 4096;

/// Sources and destinations of one pass. Holds: 1 to [`MAX_SOURCES`] sources, at least 1 destination, each of exactly
/// `bytes` bytes, a whole number of elements.
pub(crate) struct Pass<'a> {
    pub(crate) sources: &'a [View<'a>],
    pub(crate) destinations: &'a [ViewMut<'a>],
    pub(crate) bytes: usize,
    pub(crate) divide: Option<&'a Divisor>,
    /// Bit `i`: destination `i` (of the first 64) is written past the caches. All such lie alike modulo [`ROW_BYTES`].
    pub(crate) streams: u64,
    /// Bytes before the first address that is a multiple of [`ROW_BYTES`] in the destinations that stream. If none streams,
    /// it is that of the first destination. Whole elements, less than a row.
    pub(crate) head: usize,
}

impl<'a> Pass<'a> {
    /// A pass over a part of tensors of `whole` bytes. Each destination may be written past the caches where all of them together are
    /// `stream_from` bytes or more.
    ///
    /// Inline, so that its fields are written where they stay: what is copied in wider pieces waits for the narrower stores before, in all
    /// as long as a pass over 2 KiB takes.
    #[inline(always)]
    pub(crate) fn new(
        dtype: Dtype,
        sources: &'a [View<'a>],
        destinations: &'a [ViewMut<'a>],
        divide: Option<&'a Divisor>,
        (whole, stream_from): (usize, usize),
    ) -> Result<Self, KernelError> {
        let given = sources.len();
        let Some(first) = sources.first().filter(|_| given <= MAX_SOURCES) else {
            return Err(KernelError::Sources { given });
        };
        if destinations.is_empty() {
            return Err(KernelError::NoDestination);
        }
        let bytes = first.bytes();
        let other = |given: &usize| *given != bytes;
        let source = sources.iter().map(|view| view.bytes()).find(other);
        if let Some(given) = source.or_else(|| destinations.iter().map(|view| view.bytes()).find(other)) {
            return Err(KernelError::Length { expected: bytes, given });
        }
        if !bytes.is_multiple_of(dtype.size()) {
            return Err(KernelError::PartialElement { bytes, dtype });
        }
        let mut pass = Self { sources, destinations, bytes, divide, streams: 0, head: 0 };
        if bytes >= ALIGN_FROM {
            pass.place(dtype.size(), bytes.max(whole).saturating_mul(destinations.len()) >= stream_from);
        }
        Ok(pass)
    }

    /// Chooses the head and, if `stream`, what streams. A destination that overlaps a source does not: its lines are in
    /// the cache once the source has been read, and writing past the cache would evict them first.
    #[inline(never)]
    fn place(&mut self, element: usize, stream: bool) {
        let head = |destination: &ViewMut<'_>| {
            Some(destination.pointer().addr().wrapping_neg() % ROW_BYTES)
                .filter(|head| head.is_multiple_of(element))
        };
        self.head = self.destinations.first().and_then(head).unwrap_or(0);
        if !stream {
            return;
        }
        for (index, destination) in self.destinations.iter().enumerate().take(u64::BITS as usize) {
            let Some(head) = head(destination) else { continue };
            let overlaps = |source: &View<'_>| {
                source.pointer().addr().abs_diff(destination.pointer().addr()) < self.bytes
            };
            if (self.streams == 0 || head == self.head) && !self.sources.iter().any(overlaps) {
                self.streams |= 1 << index;
                self.head = head;
            }
        }
    }
}
