//! What an encoder lost, summed as it goes.

use super::Squares;
use crate::simd::{LANES, Simd};

/// Sums of squares: those of each lane by themselves, in f64, and those of parts that had to be summed apart.
pub(super) struct Totals<S: Simd> {
    error: S::Doubles,
    signal: S::Doubles,
    apart: Squares,
}

impl<S: Simd> Totals<S> {
    #[inline(always)]
    pub(super) fn new(simd: S) -> Self {
        let zeros = simd.doubles([0.0; LANES]);
        Self { error: zeros, signal: zeros, apart: Squares::default() }
    }

    /// Adds sums of squares of each lane, in units whose square is `by`.
    #[inline(always)]
    pub(super) fn add(&mut self, simd: S, error: S::Floats, signal: S::Floats, by: f64) {
        self.error = simd.accumulate(error, by, self.error);
        self.signal = simd.accumulate(signal, by, self.signal);
    }

    #[inline(always)]
    pub(super) fn add_apart(&mut self, squares: Squares) {
        self.apart = self.apart.and(squares);
    }

    #[inline(always)]
    pub(super) fn squares(self, simd: S) -> Squares {
        self.apart.and(Squares { error: simd.sum_doubles(self.error), signal: simd.sum_doubles(self.signal) })
    }
}
