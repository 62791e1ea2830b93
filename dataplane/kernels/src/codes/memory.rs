//! The views of a coding pass as bytes by place: every access is checked against the view, none makes a reference to it.

use crate::STREAM_FROM;
use crate::simd::{LANES, Simd};
use harmonaize_abi::{View, ViewMut};
use std::marker::PhantomData;
use std::ptr::copy_nonoverlapping;

/// Bytes of a row of f32.
const ROW_BYTES: usize = 4 * LANES;

/// How far ahead memory is asked for: the CPU's own prefetching ends at each page.
const AHEAD: usize = 2048;

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
        let at = 4 * element;
        simd.prefetch(self.pointer.wrapping_add(at + AHEAD));
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

impl<'a> Target<'a> {
    pub(super) fn new(view: ViewMut<'a>) -> Self {
        Self { pointer: view.pointer(), bytes: view.bytes(), memory: PhantomData }
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
        self.bytes >= STREAM_FROM && self.pointer.addr().is_multiple_of(ROW_BYTES)
    }

    /// [`Target::put_row`] past the caches; to be used where the view [streams](Target::streams), and before a fence.
    #[inline(always)]
    pub(super) fn stream_row<S: Simd>(self, simd: S, element: usize, row: S::Floats) {
        let at = 4 * element;
        if fits(self.bytes, at, ROW_BYTES) && element.is_multiple_of(LANES) && self.streams() {
            // SAFETY: the view is writable, the row lies in it, and at a multiple of its bytes.
            unsafe { simd.stream(self.pointer.add(at), row) };
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
