//! Codes of blocks that share a scale: the block's greatest magnitude becomes the grid's.

use super::memory::{Rows, Source, Target};
use super::noise::Uniform;
use super::rows::{RowTarget, SCALE, get_row, put, put_row, row_bytes};
use super::totals::Totals;
use super::{BLOCK, Blocks, Grid, INFINITE, NAN, ROW, Rounding, Squares};
use crate::simd::{LANES, Simd};

/// Rows of the largest block.
const ROWS: usize = *BLOCK.end() / ROW;
/// Blocks whose greatest magnitude is less become zeros: 2^-100, far above where products of scales lose bits.
const LEAST: f32 = f32::from_bits((127 - 100) << 23);
/// Added to a float of magnitude below 2^22, it leaves the nearest integer in the lowest bits.
const INTEGERS: f32 = 12_582_912.0;

/// Integers as two's complement of `BITS` bits.
struct Integers<const BITS: usize>;

impl<const BITS: usize> Integers<BITS> {
    /// The greatest magnitude.
    const TOP: f32 = ((1_i32 << (BITS - 1)) - 1) as f32;

    /// Bits of codes, and the values that they stand for.
    #[inline(always)]
    fn encode<S: Simd>(simd: S, row: S::Floats) -> (S::Ints, S::Floats) {
        let rounded = simd.add(row, simd.splat(INTEGERS));
        let codes = simd.bits(rounded);
        let codes = if BITS == 8 { codes } else { simd.and(codes, simd.splat_int((1 << BITS) - 1)) };
        (codes, simd.sub(rounded, simd.splat(INTEGERS)))
    }

    /// The values of the row of codes at `at`.
    #[inline(always)]
    fn decode<S: Simd>(simd: S, from: Source<'_>, at: usize) -> S::Floats {
        if BITS == 8 {
            return simd.signed(simd.widen_signed(from.get(at)));
        }
        // The sign's bit flipped: the number is 8 more than it was.
        let codes = simd.xor(get_row(simd, from, at, BITS), simd.splat_int(8));
        simd.sub(simd.signed(codes), simd.splat(8.0))
    }
}

/// Cost: reads 4 bytes an element, writes one, or half of one; a dozen instructions a row.
#[inline(always)]
pub(super) fn encode<S: Simd>(
    simd: S,
    grid: Grid,
    rounding: Rounding,
    blocks: Blocks,
    source: Source<'_>,
    to: Target<'_>,
    elements: usize,
) -> Squares {
    let pass = Pass { blocks, source, to, elements };
    match (grid, rounding) {
        (Grid::Int8, Rounding::Nearest) => pass.encode::<S, 8, false>(simd),
        (Grid::Int8, Rounding::Stochastic) => pass.encode::<S, 8, true>(simd),
        (Grid::Int4, Rounding::Nearest) => pass.encode::<S, 4, false>(simd),
        (Grid::Int4, Rounding::Stochastic) => pass.encode::<S, 4, true>(simd),
    }
}

struct Pass<'a> {
    blocks: Blocks,
    source: Source<'a>,
    to: Target<'a>,
    elements: usize,
}

impl Pass<'_> {
    #[inline(always)]
    fn encode<S: Simd, const BITS: usize, const STOCHASTIC: bool>(&self, simd: S) -> Squares {
        let mut all = Totals::new();
        let whole = self.whole::<S, BITS, STOCHASTIC>(simd, &mut all);
        let mut to = whole * (SCALE + ROWS * row_bytes(BITS));
        for (index, first) in (0..self.elements).step_by(self.blocks.block).enumerate().skip(whole) {
            let count = self.blocks.block.min(self.elements - first);
            let noise = STOCHASTIC.then(|| self.blocks.stream(index).uniform(simd));
            all.add_apart(self.block::<S, BITS>(simd, first, count.div_ceil(ROW), to, noise));
            to += SCALE + count.div_ceil(ROW) * row_bytes(BITS);
        }
        all.squares(simd)
    }

    /// Encodes all whole blocks of the largest size, and tells how many. While one is encoded, the greatest magnitude of the next
    /// is found: else each would wait for its own.
    #[inline(always)]
    fn whole<S: Simd, const BITS: usize, const STOCHASTIC: bool>(
        &self,
        simd: S,
        all: &mut Totals<S>,
    ) -> usize {
        if self.blocks.block != ROWS * ROW {
            return 0;
        }
        let mut index = 0;
        let mut rows = self.source.rows::<ROWS>(0);
        let mut greatest = rows.map_or(0, |rows| self::greatest(simd, rows));
        let bytes = SCALE + ROWS * row_bytes(BITS);
        while let (Some(this), Some(to)) = (rows, self.to.part(index * bytes, bytes)) {
            let first = index * ROWS * ROW;
            let mut noise = STOCHASTIC.then(|| self.blocks.stream(index).uniform(simd));
            rows = self.source.rows::<ROWS>(first + ROWS * ROW);
            let next = rows.unwrap_or(this);
            if !(LEAST.to_bits()..INFINITE).contains(&greatest) {
                all.add_apart(self.block::<S, BITS>(simd, first, ROWS, index * bytes, noise));
                greatest = self::greatest(simd, next);
            } else {
                let grid = Scaled::new::<BITS, STOCHASTIC>(f32::from_bits(greatest));
                to.put(0, grid.scale.to_le_bytes());
                let mut most = [simd.splat_int(0); 2];
                let mut sums = [Sums::new(simd); 2];
                for pair in 0..ROWS / 2 {
                    for (odd, (most, sums)) in most.iter_mut().zip(&mut sums).enumerate() {
                        let row = 2 * pair + odd;
                        this.prefetch(simd, row);
                        *most = simd.max_u32(*most, magnitude(simd, next.row(simd, row)));
                        let codes = sums.row::<BITS>(simd, this.row(simd, row), grid.inverse, &mut noise);
                        put_row(simd, to, SCALE + row * row_bytes(BITS), codes, BITS);
                    }
                }
                let [even, odd] = sums;
                let (error, signal) = (simd.add(even.error, odd.error), simd.add(even.signal, odd.signal));
                all.add(simd, error, signal, grid.square());
                let [even, odd] = most;
                greatest = simd.greatest(simd.max_u32(even, odd));
            }
            index += 1;
        }
        index
    }

    /// Encodes the block of `rows` rows from element `first` to byte `to` on.
    #[inline(always)]
    fn block<S: Simd, const BITS: usize>(
        &self,
        simd: S,
        first: usize,
        rows: usize,
        to: usize,
        mut noise: Option<Uniform<S>>,
    ) -> Squares {
        let mut tile = [simd.splat(0.0); ROWS];
        let mut greatest = simd.splat_int(0);
        for (row, at) in tile.iter_mut().take(rows).zip((first..).step_by(ROW)) {
            *row = self.source.row(simd, at);
            greatest = simd.max_u32(greatest, magnitude(simd, *row));
        }
        let tile = tile.get(..rows).unwrap_or_default();
        let greatest = simd.greatest(greatest);
        if !(LEAST.to_bits()..INFINITE).contains(&greatest) {
            return self.unusual::<S, BITS>(simd, tile, greatest, to);
        }
        let greatest = f32::from_bits(greatest);
        let grid = if noise.is_some() {
            Scaled::new::<BITS, true>(greatest)
        } else {
            Scaled::new::<BITS, false>(greatest)
        };
        self.to.put(to, grid.scale.to_le_bytes());
        let mut sums = Sums::new(simd);
        for (row, to) in tile.iter().zip((to + SCALE..).step_by(row_bytes(BITS))) {
            let codes = sums.row::<BITS>(simd, *row, grid.inverse, &mut noise);
            put_row(simd, self.to, to, codes, BITS);
        }
        let (error, signal) = (simd.sum(sums.error), simd.sum(sums.signal));
        Squares { error: f64::from(error) * grid.square(), signal: f64::from(signal) * grid.square() }
    }

    /// A block of too small magnitudes, or with one that is not finite.
    #[cold]
    #[inline(never)]
    fn unusual<S: Simd, const BITS: usize>(
        &self,
        simd: S,
        tile: &[S::Floats],
        greatest: u32,
        to: usize,
    ) -> Squares {
        let finite = greatest < INFINITE;
        self.to.put(to, if finite { [0; 4] } else { NAN.to_le_bytes() });
        let mut all = Squares::default();
        for (row, to) in tile.iter().zip((to + SCALE..).step_by(row_bytes(BITS))) {
            put(self.to, to, [0; LANES], BITS);
            let square = |value: f32| if finite { f64::from(value) * f64::from(value) } else { f64::NAN };
            let lost = simd.lanes(*row).into_iter().map(square).sum();
            all = all.and(Squares { error: lost, signal: lost });
        }
        all
    }
}

#[inline(always)]
fn magnitude<S: Simd>(simd: S, row: S::Floats) -> S::Ints {
    simd.and(simd.bits(row), simd.splat_int(0x7fff_ffff))
}

/// The greatest magnitude's bits.
#[inline(always)]
fn greatest<S: Simd>(simd: S, rows: Rows<'_, ROWS>) -> u32 {
    let rows = (0..ROWS).map(|index| magnitude(simd, rows.row(simd, index)));
    simd.greatest(rows.fold(simd.splat_int(0), |most, row| simd.max_u32(most, row)))
}

/// A grid for a block.
struct Scaled {
    /// What codes are multiplied with.
    scale: f32,
    /// What elements are multiplied with.
    inverse: f32,
}

impl Scaled {
    /// Brings `greatest` to the grid's greatest, such that it times the scale is finite.
    #[inline(always)]
    fn new<const BITS: usize, const STOCHASTIC: bool>(greatest: f32) -> Self {
        // With noise the greatest must stay where it cannot be rounded up.
        let top = if STOCHASTIC { Integers::<BITS>::TOP * (1.0 - 1e-6) } else { Integers::<BITS>::TOP };
        let scale = greatest / top;
        let fits = (scale * Integers::<BITS>::TOP).is_finite();
        let most = (f32::MAX / Integers::<BITS>::TOP).next_down().next_down();
        Self { scale: if fits { scale } else { most }, inverse: top / greatest }
    }

    /// The square of the codes' unit.
    #[inline(always)]
    fn square(&self) -> f64 {
        f64::from(self.scale) * f64::from(self.scale)
    }
}

/// Sums of squares of rows, in the unit of their codes: of what is lost, and of the elements.
#[derive(Clone, Copy)]
struct Sums<S: Simd> {
    error: S::Floats,
    signal: S::Floats,
}

impl<S: Simd> Sums<S> {
    #[inline(always)]
    fn new(simd: S) -> Self {
        Self { error: simd.splat(0.0), signal: simd.splat(0.0) }
    }

    /// The codes of a row, each element times `inverse`.
    #[inline(always)]
    fn row<const BITS: usize>(
        &mut self,
        simd: S,
        row: S::Floats,
        inverse: f32,
        noise: &mut Option<Uniform<S>>,
    ) -> S::Ints {
        let row = simd.mul(row, simd.splat(inverse));
        let noisy = match noise {
            Some(noise) => simd.add(row, noise.next(simd)),
            None => row,
        };
        let (codes, back) = Integers::<BITS>::encode(simd, noisy);
        let lost = simd.sub(row, back);
        self.error = simd.fused(lost, lost, self.error);
        self.signal = simd.fused(row, row, self.signal);
        codes
    }
}

/// Decodes blocks. It reads one byte an element, or half of one, and writes 4 (and reads them, where it adds). It
/// takes four instructions a row.
#[inline(always)]
pub(super) fn decode<S: Simd>(simd: S, grid: Grid, block: usize, from: Source<'_>, place: RowTarget<'_>) {
    match grid {
        Grid::Int8 => values::<S, 8>(simd, block, from, place),
        Grid::Int4 => values::<S, 4>(simd, block, from, place),
    }
}

/// Decodes all whole blocks of the largest size, and tells how many.
#[inline(always)]
fn whole<S: Simd, const BITS: usize>(simd: S, from: Source<'_>, place: RowTarget<'_>) -> usize {
    let bytes = SCALE + ROWS * row_bytes(BITS);
    let mut index = 0;
    while let (Some(from), Some(part)) =
        (from.part(index * bytes, bytes), place.part(index * ROWS * ROW, ROWS * ROW))
    {
        let scale = f32::from_le_bytes(from.get(0));
        if scale.is_finite() {
            let scale = simd.splat(scale * place.sign());
            for row in 0..ROWS {
                let values = Integers::<BITS>::decode(simd, from, SCALE + row * row_bytes(BITS));
                part.put(simd, row * ROW, simd.mul(values, scale));
            }
        } else {
            part.nan(0, ROWS * ROW);
        }
        index += 1;
    }
    index
}

#[inline(always)]
fn values<S: Simd, const BITS: usize>(simd: S, block: usize, from: Source<'_>, place: RowTarget<'_>) {
    let whole = if block == ROWS * ROW { whole::<S, BITS>(simd, from, place) } else { 0 };
    let mut at = whole * (SCALE + ROWS * row_bytes(BITS));
    for first in (0..place.elements).step_by(block).skip(whole) {
        let end = (first + block).min(place.elements);
        let scale = f32::from_le_bytes(from.get(at));
        at += SCALE;
        if !scale.is_finite() {
            place.nan(first, block);
        } else {
            let scale = simd.splat(scale * place.sign());
            let codes = (at..).step_by(row_bytes(BITS));
            for (element, code) in (first..end).step_by(ROW).zip(codes) {
                let row = Integers::<BITS>::decode(simd, from, code);
                place.put(simd, element, simd.mul(row, scale));
            }
        }
        at += (end - first).div_ceil(ROW) * row_bytes(BITS);
    }
}
