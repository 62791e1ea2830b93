//! The views of a coding pass as bytes by place. Every access is checked against the view, and none makes a reference to
//! it.

use crate::STREAM_FROM;
use crate::simd::{LANES, ROW_BYTES, Simd};
use harmonaize_abi::{View, ViewMut};
use std::marker::PhantomData;
use std::ptr::copy_nonoverlapping;

/// How far ahead memory is asked for. The CPU's own prefetching ends at each page, and a core's misses must be many at a time.
/// Encoders of 25 MiB ran at 30, 37 and 51 GB/s with 2, 8 and 16 KiB.
const AHEAD: usize = 16 << 10;

/// What a pass reads.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pointer: *const u8,
    bytes: usize,
    memory: PhantomData<View<'a>>,
}

/// What a pass writes.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
    pointer: *mut u8,
    bytes: usize,
    /// Whether it, or what it is a part of, is so large that writing past the caches pays.
    large: bool,
    memory: PhantomData<ViewMut<'a>>,
}

/// Whether `size` bytes lie at `at` in `bytes`; all but one comparison does not depend on `at`.
#[inline(always)]
fn fits(bytes: usize, at: usize, size: usize) -> bool {
    bytes.checked_sub(size).is_some_and(|last| at <= last)
}

impl<'a> Source<'a> {
    pub(super) fn new(view: View<'a>) -> Self {
        Self { pointer: view.pointer(), bytes: view.bytes(), memory: PhantomData }
    }

    /// The `N` bytes that lie `at` bytes from the start; zeros if not all are there.
    #[inline(always)]
    pub(super) fn get<const N: usize>(self, at: usize) -> [u8; N] {
        if !fits(self.bytes, at, N) {
            return [0; N];
        }
        // SAFETY: the view is readable, and the bytes lie in it.
        unsafe { self.pointer.add(at).cast::<[u8; N]>().read_unaligned() }
    }

    /// The row of elements from element `element` on, zeros for those behind the view's end.
    #[inline(always)]
    pub(super) fn row<S: Simd>(self, simd: S, element: usize) -> S::Floats {
        simd.prefetch(self.pointer.wrapping_add(4 * element + AHEAD));
        self.load(simd, element)
    }

    #[inline(always)]
    fn load<S: Simd>(self, simd: S, element: usize) -> S::Floats {
        let at = 4 * element;
        let mut rest = [0_f32; LANES];
        let from = if fits(self.bytes, at, ROW_BYTES) {
            self.pointer.wrapping_add(at).cast()
        } else {
            self.first(at, &mut rest);
            &raw const rest
        };
        // SAFETY: a row lies there, in the view or in `rest`.
        simd.floats(unsafe { from.read_unaligned() })
    }

    /// The `bytes` bytes from `at` on, as [`Target::part`].
    #[inline(always)]
    pub(super) fn part(self, at: usize, bytes: usize) -> Option<Self> {
        let pointer = self.pointer.wrapping_add(at);
        if fits(self.bytes, at, bytes) { Some(Self { pointer, bytes, ..self }) } else { None }
    }

    /// The `N` rows from element `element` on, if all are there.
    #[inline(always)]
    pub(super) fn rows<const N: usize>(self, element: usize) -> Option<Rows<'a, N>> {
        let at = 4 * element;
        let pointer = self.pointer.wrapping_add(at);
        fits(self.bytes, at, N * ROW_BYTES).then_some(Rows { pointer, memory: PhantomData })
    }

    /// Copies what lies `at` bytes from the start, as many bytes as `row` has or as there are.
    #[cold]
    #[inline(never)]
    fn first(self, at: usize, row: &mut [f32; LANES]) {
        let bytes = self.bytes.saturating_sub(at).min(ROW_BYTES);
        if bytes > 0 {
            // SAFETY: `bytes` bytes lie in the view from `at` on, no more than the row has.
            unsafe { copy_nonoverlapping(self.pointer.add(at), row.as_mut_ptr().cast(), bytes) };
        }
    }
}

/// `N` rows of a source, all of them there.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a, const N: usize> {
    pointer: *const u8,
    memory: PhantomData<View<'a>>,
}

impl<const N: usize> Rows<'_, N> {
    /// Row `index`, zeros from `N` on.
    #[inline(always)]
    pub(super) fn row<S: Simd>(self, simd: S, index: usize) -> S::Floats {
        if index >= N {
            return simd.splat(0.0);
        }
        // SAFETY: the rows lie in a view that is readable.
        simd.floats(unsafe { self.pointer.add(index * ROW_BYTES).cast::<[f32; LANES]>().read_unaligned() })
    }

    /// Asks for the memory that will be read in a while.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(self, simd: S, index: usize) {
        simd.prefetch(self.pointer.wrapping_add(index * ROW_BYTES + AHEAD));
    }
}

impl<'a> Target<'a> {
    pub(super) fn new(view: ViewMut<'a>) -> Self {
        Self::part_of(view, view.bytes())
    }

    /// A part of `whole` bytes.
    pub(super) fn part_of(view: ViewMut<'a>, whole: usize) -> Self {
        let large = whole >= STREAM_FROM;
        Self { pointer: view.pointer(), bytes: view.bytes(), large, memory: PhantomData }
    }

    /// The `bytes` bytes from `at` on, if all are there. Where `bytes` is a constant, accesses at constant places are checked when
    /// they are compiled.
    #[inline(always)]
    pub(super) fn part(self, at: usize, bytes: usize) -> Option<Self> {
        let pointer = self.pointer.wrapping_add(at);
        if fits(self.bytes, at, bytes) { Some(Self { pointer, bytes, ..self }) } else { None }
    }

    /// The same bytes, to read.
    #[inline(always)]
    pub(super) fn source(self) -> Source<'a> {
        Source { pointer: self.pointer.cast_const(), bytes: self.bytes, memory: PhantomData }
    }

    /// Writes the bytes `at` bytes from the start, if there is room for all of them.
    #[inline(always)]
    pub(super) fn put<const N: usize>(self, at: usize, bytes: [u8; N]) {
        if fits(self.bytes, at, N) {
            // SAFETY: the view is writable, and the bytes' place lies in it.
            unsafe { self.pointer.add(at).cast::<[u8; N]>().write_unaligned(bytes) };
        }
    }

    /// [`Source::row`] of what is to be written next.
    #[inline(always)]
    pub(super) fn row<S: Simd>(self, simd: S, element: usize) -> S::Floats {
        simd.prefetch_write(self.pointer.wrapping_add(4 * element + AHEAD));
        self.source().load(simd, element)
    }

    /// Writes a row of 16-bit codes, past the caches if that pays; before a fence.
    #[inline(always)]
    pub(super) fn put_halves<S: Simd>(self, simd: S, at: usize, halves: [u8; 2 * LANES]) {
        let streams = self.large && self.pointer.addr().is_multiple_of(LANES);
        if streams && fits(self.bytes, at, 2 * LANES) && at.is_multiple_of(LANES) {
            // SAFETY: the view is writable, the row lies in it, and at a multiple of 16.
            unsafe { simd.stream_halves(self.pointer.add(at), halves) };
        } else {
            self.put(at, halves);
        }
    }

    /// Copies `bytes` bytes of `from`, from its byte `first` on, to byte `at`, if they are there and have room.
    #[inline(always)]
    pub(super) fn copy(self, at: usize, from: Source<'_>, first: usize, bytes: usize) {
        if fits(self.bytes, at, bytes) && fits(from.bytes, first, bytes) {
            // SAFETY: the bytes lie in a view that is readable, their place in one that is writable.
            unsafe { std::ptr::copy(from.pointer.add(first), self.pointer.add(at), bytes) };
        }
    }

    /// Writes the row of elements from element `element` on, as far as the view goes.
    #[inline(always)]
    pub(super) fn put_row<S: Simd>(self, simd: S, element: usize, row: S::Floats) {
        let at = 4 * element;
        if fits(self.bytes, at, ROW_BYTES) {
            // SAFETY: the view is writable, and the row, of as many bytes, lies in it.
            unsafe { self.pointer.add(at).cast::<S::Floats>().write_unaligned(row) };
        } else {
            self.put_first(at, simd.lanes(row));
        }
    }

    /// Whether writing all rows of the view past the caches pays, and can be.
    pub(super) fn streams(self) -> bool {
        self.large && self.pointer.addr().is_multiple_of(ROW_BYTES)
    }

    /// [`Target::put_row`] past the caches; to be used where the view [streams](Target::streams), and before a fence.
    #[inline(always)]
    pub(super) fn stream_row<S: Simd>(self, simd: S, element: usize, row: S::Floats) {
        let at = 4 * element;
        if fits(self.bytes, at, ROW_BYTES) && element.is_multiple_of(LANES) && self.streams() {
            // SAFETY: the view is writable, the row lies in it, and at a multiple of its bytes.
            unsafe { simd.stream(self.pointer.add(at), simd.bits(row)) };
        } else {
            self.put_row(simd, element, row);
        }
    }

    #[cold]
    #[inline(never)]
    fn put_first(self, at: usize, row: [f32; LANES]) {
        let bytes = self.bytes.saturating_sub(at).min(ROW_BYTES);
        if bytes > 0 {
            // SAFETY: `bytes` bytes lie in the view from `at` on, no more than the row has.
            unsafe { copy_nonoverlapping(row.as_ptr().cast(), self.pointer.add(at), bytes) };
        }
    }
}
