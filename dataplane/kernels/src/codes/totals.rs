//! What an encoder lost, summed as it goes.

use super::Squares;
use crate::simd::{Simd, cast};

/// Sums of squares. Those of each lane are by themselves, in f64, beside those of parts that had to be summed
/// apart.
pub(super) struct Totals<S: Simd> {
    error: [S::Doubles; 2],
    signal: [S::Doubles; 2],
    apart: Squares,
}

impl<S: Simd> Totals<S> {
    #[inline(always)]
    pub(super) fn new() -> Self {
        let zeros = [cast([0.0; 8]); 2];
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
        self.apart.and(Squares { error: simd.sum_f64(self.error), signal: simd.sum_f64(self.signal) })
    }
}
