//! The randomised Hadamard rotation of a block: random signs, then the transform, after which every element holds something of
//! all, and they are spread nearly as normal ones are, whatever they were.

use super::memory::Source;
use super::noise::Stream;
use super::rows::Place;
use super::{INFINITE, ROTATED, ROW};
use crate::simd::Simd;

/// Rows of the largest block.
pub(super) const ROWS: usize = *ROTATED.end() / ROW;
/// A block's sum of squares is good in f32 while it lies in between.
const GOOD: std::ops::RangeInclusive<f32> = 1e-20..=1e30;
/// Blocks whose greatest magnitude is less become zeros.
const LEAST: u32 = (127 - 100) << 23;

/// Elements of the block that holds the last `count` elements: a power of two, a row at least.
#[inline(always)]
pub(super) fn padded(count: usize) -> usize {
    count.next_power_of_two().max(ROW)
}

/// What a block holds.
pub(super) enum Norm {
    /// Nothing but what is as good as 0; the sum of its squares.
    Zeros(f64),
    /// A NaN or an infinity.
    NotFinite,
    /// The root of the sum of squares.
    Of(f32),
}

/// Loads the rows of `tile` from element `first` on, and tells their norm.
#[inline(always)]
pub(super) fn load<S: Simd>(simd: S, source: Source<'_>, first: usize, tile: &mut [S::Floats]) -> Norm {
    let mut squares = simd.splat(0.0);
    for (row, at) in tile.iter_mut().zip((first..).step_by(ROW)) {
        *row = source.row(simd, at);
        squares = simd.fused(*row, *row, squares);
    }
    let squares = simd.sum(squares);
    if GOOD.contains(&squares) { Norm::Of(squares.sqrt()) } else { careful(simd, tile) }
}

/// The norm where f32 does not hold the squares.
#[cold]
#[inline(never)]
fn careful<S: Simd>(simd: S, tile: &[S::Floats]) -> Norm {
    let (mut greatest, mut squares) = (0, 0.0_f64);
    for value in tile.iter().flat_map(|row| simd.lanes(*row)) {
        greatest = greatest.max(value.abs().to_bits());
        squares += f64::from(value) * f64::from(value);
    }
    match greatest {
        INFINITE.. => Norm::NotFinite,
        ..LEAST => Norm::Zeros(squares),
        _ => Norm::Of(squares.sqrt().min(f64::from(f32::MAX)) as f32),
    }
}

/// Multiplies the rows with `factor`, flips random signs, and transforms; norms grow by the root of the elements' number.
#[inline(always)]
pub(super) fn rotate<S: Simd>(simd: S, tile: &mut [S::Floats], factor: f32, signs: Stream) {
    let factor = simd.splat(factor);
    let mut signs = Signs::new(signs);
    for row in tile.iter_mut() {
        let flipped = simd.negate(simd.mul(*row, factor), signs.next());
        *row = within(simd, flipped);
    }
    between(simd, tile);
}

/// The inverse of [`rotate`] with factor 1, but for a factor of the elements' number; rows go to `place` from element `first` on.
#[inline(always)]
pub(super) fn restore<S: Simd>(
    simd: S,
    tile: &mut [S::Floats],
    signs: Stream,
    place: Place<'_>,
    first: usize,
) {
    between(simd, tile);
    let mut signs = Signs::new(signs);
    for (row, at) in tile.iter().zip((first..place.elements).step_by(ROW)) {
        place.put(simd, at, simd.negate(within(simd, *row), signs.next()));
    }
}

/// The stages between elements of one row.
#[inline(always)]
fn within<S: Simd>(simd: S, row: S::Floats) -> S::Floats {
    let row = simd.butterfly::<2>(simd.butterfly::<1>(row));
    simd.butterfly::<8>(simd.butterfly::<4>(row))
}

/// The stages between rows, two at a time: each brings a row into registers once.
#[inline(always)]
fn between<S: Simd>(simd: S, tile: &mut [S::Floats]) {
    let mut half = tile.len() / 2;
    while half >= 2 {
        for part in tile.chunks_exact_mut(2 * half) {
            let (low, high) = part.split_at_mut(half);
            let (a, b) = low.split_at_mut(half / 2);
            let (c, d) = high.split_at_mut(half / 2);
            for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
                let (ac, bd) = (simd.add(*a, *c), simd.add(*b, *d));
                let (a_c, b_d) = (simd.sub(*a, *c), simd.sub(*b, *d));
                (*a, *b) = (simd.add(ac, bd), simd.sub(ac, bd));
                (*c, *d) = (simd.add(a_c, b_d), simd.sub(a_c, b_d));
            }
        }
        half /= 4;
    }
    if half == 1 {
        for pair in tile.chunks_exact_mut(2) {
            if let [a, b] = pair {
                (*a, *b) = (simd.add(*a, *b), simd.sub(*a, *b));
            }
        }
    }
}

/// Random signs of rows: 64 bits of the stream are for four.
struct Signs {
    stream: Stream,
    bits: u64,
    left: u32,
}

impl Signs {
    #[inline(always)]
    fn new(stream: Stream) -> Self {
        Self { stream, bits: 0, left: 0 }
    }

    #[inline(always)]
    fn next(&mut self) -> u16 {
        if self.left == 0 {
            (self.bits, self.left) = (self.stream.next(), 4);
        }
        let row = self.bits as u16;
        self.bits >>= 16;
        self.left -= 1;
        row
    }
}
