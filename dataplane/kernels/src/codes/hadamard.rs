//! The randomised Hadamard rotation of a block. Random signs come first, then the transform. After it every element holds
//! something of all, and they are spread nearly as normal ones are, whatever they were.

use super::memory::Source;
use super::noise::Stream;
use super::rows::RowTarget;
use super::{INFINITE, ROTATED, ROW};
use crate::simd::Simd;

/// Rows of the largest block.
pub(super) const ROWS: usize = *ROTATED.end() / ROW;
/// A block's sum of squares is good in f32 while it lies in between.
const GOOD: std::ops::RangeInclusive<f32> = 1e-20..=1e30;
/// Blocks whose greatest magnitude is less become zeros.
const LEAST: u32 = (127 - 100) << 23;
/// Blocks whose norm is greater are as good as infinite. So what is lost of smaller ones, and sums over all ranks, stay finite.
const MOST: f64 = f64::from_bits((1023 + 112) << 52);

/// Elements of the block that holds the last `count` elements: a power of two, a row at least.
#[inline(always)]
pub(super) fn padded(count: usize) -> usize {
    count.next_power_of_two().max(ROW)
}

/// What a block holds.
pub(super) enum Norm {
    /// Nothing but what is as good as 0; the sum of its squares.
    Zeros(f64),
    /// A NaN, an infinity, or too great a norm.
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
        _ if squares.sqrt() > MOST => Norm::NotFinite,
        _ => Norm::Of(squares.sqrt() as f32),
    }
}

/// [`load`], then flips random signs and transforms; norms grow by the root of the elements' number. With a norm comes the unit
/// of the rows, which is 1 or the norm.
#[inline(always)]
pub(super) fn rotate<S: Simd>(
    simd: S,
    source: Source<'_>,
    first: usize,
    tile: &mut [S::Floats],
    signs: Stream,
) -> (Norm, f32) {
    let mut squares = simd.splat(0.0);
    let mut flips = Signs::new(signs);
    for (index, row) in tile.iter_mut().enumerate() {
        let own = source.row(simd, first + ROW * index);
        squares = simd.fused(own, own, squares);
        *row = within(simd, simd.negate(own, flips.of(index)));
    }
    let squares = simd.sum(squares);
    let result = if GOOD.contains(&squares) {
        (Norm::Of(squares.sqrt()), 1.0)
    } else {
        let norm = load(simd, source, first, tile);
        let unit = if let Norm::Of(norm) = norm { norm } else { 1.0 };
        let factor = simd.splat(1.0 / unit);
        let mut flips = Signs::new(signs);
        for (index, row) in tile.iter_mut().enumerate() {
            *row = within(simd, simd.negate(simd.mul(*row, factor), flips.of(index)));
        }
        (norm, unit)
    };
    between(simd, tile);
    result
}

/// The inverse of [`rotate`], but for a factor of the elements' number; rows go to `place` from element `first` on.
#[inline(always)]
pub(super) fn restore<S: Simd>(
    simd: S,
    tile: &mut [S::Floats],
    signs: Stream,
    place: RowTarget<'_>,
    first: usize,
) {
    between(simd, tile);
    let mut flips = Signs::new(signs);
    for ((index, row), at) in tile.iter().enumerate().zip((first..place.elements).step_by(ROW)) {
        place.put(simd, at, simd.negate(within(simd, *row), flips.of(index)));
    }
}

/// Random signs of rows: 64 bits of the stream are for four.
struct Signs {
    stream: Stream,
    bits: u64,
}

impl Signs {
    #[inline(always)]
    fn new(stream: Stream) -> Self {
        Self { stream, bits: 0 }
    }

    /// Those of row `index`; to be asked in order.
    #[inline(always)]
    fn of(&mut self, index: usize) -> u16 {
        if index.is_multiple_of(4) {
            self.bits = self.stream.next();
        }
        (self.bits >> (16 * (index % 4))) as u16
    }
}

/// The stages between elements of one row.
#[inline(always)]
fn within<S: Simd>(simd: S, row: S::Floats) -> S::Floats {
    let row = simd.butterfly::<2>(simd.butterfly::<1>(row));
    simd.butterfly::<8>(simd.butterfly::<4>(row))
}

/// A stage of two.
#[inline(always)]
fn two<S: Simd>(simd: S, a: S::Floats, b: S::Floats) -> (S::Floats, S::Floats) {
    (simd.add(a, b), simd.sub(a, b))
}

/// Two stages of four.
#[inline(always)]
fn four<S: Simd>(simd: S, [a, b, c, d]: [S::Floats; 4]) -> [S::Floats; 4] {
    let ((ac, a_c), (bd, b_d)) = (two(simd, a, c), two(simd, b, d));
    let ((a, b), (c, d)) = (two(simd, ac, bd), two(simd, a_c, b_d));
    [a, b, c, d]
}

/// The stages between rows, three at a time: each brings a row into registers once.
#[inline(always)]
fn between<S: Simd>(simd: S, tile: &mut [S::Floats]) {
    let mut eighth = tile.len() / 8;
    while eighth >= 1 {
        for part in tile.chunks_exact_mut(8 * eighth) {
            let (low, high) = part.split_at_mut(4 * eighth);
            let ((ab, cd), (ef, gh)) = (low.split_at_mut(2 * eighth), high.split_at_mut(2 * eighth));
            let ((a, b), (c, d)) = (ab.split_at_mut(eighth), cd.split_at_mut(eighth));
            let ((e, f), (g, h)) = (ef.split_at_mut(eighth), gh.split_at_mut(eighth));
            let low = a.iter_mut().zip(b).zip(c).zip(d);
            let high = e.iter_mut().zip(f).zip(g).zip(h);
            for ((((a, b), c), d), (((e, f), g), h)) in low.zip(high) {
                let [(ae, a_e), (bf, b_f), (cg, c_g), (dh, d_h)] =
                    [two(simd, *a, *e), two(simd, *b, *f), two(simd, *c, *g), two(simd, *d, *h)];
                [*a, *b, *c, *d] = four(simd, [ae, bf, cg, dh]);
                [*e, *f, *g, *h] = four(simd, [a_e, b_f, c_g, d_h]);
            }
        }
        eighth /= 8;
    }
    // One or two stages are left where the rows' number is no power of eight.
    match tile.len().trailing_zeros() % 3 {
        1 => {
            for pair in tile.chunks_exact_mut(2) {
                if let [a, b] = pair {
                    (*a, *b) = two(simd, *a, *b);
                }
            }
        }
        2 => {
            for part in tile.chunks_exact_mut(4) {
                if let [a, b, c, d] = part {
                    [*a, *b, *c, *d] = four(simd, [*a, *b, *c, *d]);
                }
            }
        }
        _ => {}
    }
}
