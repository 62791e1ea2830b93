//! Codes of blocks that share a scale: the block's greatest magnitude becomes the grid's.

use super::memory::{Source, Target};
use super::noise::{Stream, Uniform};
use super::rows::{Place, SCALE, get, put, row_bytes};
use super::{BLOCK, Grid, INFINITE, NAN, ROW, Rounding, Squares};
use crate::simd::{LANES, Simd};

/// Rows of the largest block.
const ROWS: usize = *BLOCK.end() / ROW;
/// Blocks whose greatest magnitude is less become zeros: 2^-100, far above where products of scales lose bits.
const LEAST: f32 = f32::from_bits((127 - 100) << 23);
/// Added to a float of magnitude below 2^22, it leaves the nearest integer in the lowest bits.
const INTEGERS: f32 = 12_582_912.0;

/// A grid, once values are divided by the scale.
trait Codes {
    const BITS: usize;
    /// The greatest magnitude.
    const TOP: f32;
    /// Bits of codes, and the values that they stand for.
    fn encode<S: Simd>(simd: S, row: S::Floats) -> (S::Words, S::Floats);
    fn decode<S: Simd>(simd: S, codes: [u8; LANES]) -> S::Floats;
}

/// Integers as two's complement of `BITS` bits.
struct Integers<const BITS: usize>;

impl<const BITS: usize> Codes for Integers<BITS> {
    const BITS: usize = BITS;
    const TOP: f32 = ((1_i32 << (BITS - 1)) - 1) as f32;

    #[inline(always)]
    fn encode<S: Simd>(simd: S, row: S::Floats) -> (S::Words, S::Floats) {
        let rounded = simd.add(row, simd.splat(INTEGERS));
        let codes = simd.bits(rounded);
        let codes = if BITS == 8 { codes } else { simd.and(codes, simd.splat_word((1 << BITS) - 1)) };
        (codes, simd.sub(rounded, simd.splat(INTEGERS)))
    }

    #[inline(always)]
    fn decode<S: Simd>(simd: S, codes: [u8; LANES]) -> S::Floats {
        if BITS == 8 {
            return simd.signed(simd.widen_signed(codes));
        }
        // The sign's bit to the top of a byte and back: what is above 4 bits of two's complement.
        let codes = simd.xor(simd.widen(codes), simd.splat_word(8));
        simd.sub(simd.signed(codes), simd.splat(8.0))
    }
}

/// Floats of 8 bits with `MANTISSA` bits of mantissa and subnormals.
struct Floats<const MANTISSA: u32>;

impl<const MANTISSA: u32> Floats<MANTISSA> {
    /// The exponent's bias.
    const BIAS: u32 = (1 << (6 - MANTISSA)) - 1;
    /// The least normal number.
    const NORMAL: f32 = f32::from_bits((128 - Self::BIAS) << 23);
    /// The distance of subnormal numbers.
    const STEP: f32 = f32::from_bits((128 - Self::BIAS - MANTISSA) << 23);
    /// What f32 drops.
    const DROPPED: u32 = 23 - MANTISSA;
    /// The difference of both exponents, where a code's stands.
    const OFFSET: u32 = (127 - Self::BIAS) << MANTISSA;
}

impl<const MANTISSA: u32> Codes for Floats<MANTISSA> {
    const BITS: usize = 8;
    const TOP: f32 = if MANTISSA == 3 { 448.0 } else { 57_344.0 };

    #[inline(always)]
    fn encode<S: Simd>(simd: S, row: S::Floats) -> (S::Words, S::Floats) {
        let bits = simd.bits(row);
        let sign = simd.and(bits, simd.splat_word(1 << 31));
        let bits = simd.xor(bits, sign);
        // Normal numbers: to nearest even among the upper bits.
        let odd = simd.and(simd.shr(bits, Self::DROPPED), simd.splat_word(1));
        let below_half = simd.splat_word((1 << (Self::DROPPED - 1)) - 1);
        let above = simd.shr(simd.plus(simd.plus(bits, odd), below_half), Self::DROPPED);
        let normal = simd.plus(above, simd.splat_word(Self::OFFSET.wrapping_neg()));
        let normal_value = simd.of_bits(simd.shl(above, Self::DROPPED));
        // Subnormal ones: to the nearest multiple of their distance, as integers.
        let large = simd.splat(INTEGERS * Self::STEP);
        let shifted = simd.add(simd.of_bits(bits), large);
        let subnormal = simd.and(simd.bits(shifted), simd.splat_word(0xff));
        let subnormal_value = simd.sub(shifted, large);
        let least = simd.splat(Self::NORMAL);
        let magnitude = simd.of_bits(bits);
        let codes = simd.where_above(least, magnitude, subnormal, normal);
        let value = simd.where_above(least, magnitude, simd.bits(subnormal_value), simd.bits(normal_value));
        (simd.or(codes, simd.shr(sign, 24)), simd.of_bits(simd.or(value, sign)))
    }

    #[inline(always)]
    fn decode<S: Simd>(simd: S, codes: [u8; LANES]) -> S::Floats {
        let codes = simd.widen(codes);
        let sign = simd.and(codes, simd.splat_word(0x80));
        let codes = simd.xor(codes, sign);
        let normal = simd.shl(simd.plus(codes, simd.splat_word(Self::OFFSET)), Self::DROPPED);
        let subnormal = simd.mul(simd.signed(codes), simd.splat(Self::STEP));
        let least = simd.splat_word((1 << MANTISSA) - 1);
        let value = simd.where_exceeds(codes, least, normal, simd.bits(subnormal));
        simd.of_bits(simd.or(value, simd.shl(sign, 24)))
    }
}

/// Cost: reads 4 bytes an element, writes one, or half of one; a dozen instructions a row.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the code's three, and the pass's five")]
pub(super) fn encode<S: Simd>(
    simd: S,
    grid: Grid,
    block: usize,
    rounding: Rounding,
    seed: u64,
    source: Source<'_>,
    to: Target<'_>,
    elements: usize,
) -> Squares {
    let pass = Pass { block, seed, source, to, elements };
    match (grid, rounding) {
        (Grid::Int8, Rounding::Nearest) => pass.encode::<S, Integers<8>, false>(simd),
        (Grid::Int8, Rounding::Stochastic) => pass.encode::<S, Integers<8>, true>(simd),
        (Grid::Int4, Rounding::Nearest) => pass.encode::<S, Integers<4>, false>(simd),
        (Grid::Int4, Rounding::Stochastic) => pass.encode::<S, Integers<4>, true>(simd),
        (Grid::E4m3, _) => pass.encode::<S, Floats<3>, false>(simd),
        (Grid::E5m2, _) => pass.encode::<S, Floats<2>, false>(simd),
    }
}

struct Pass<'a> {
    block: usize,
    seed: u64,
    source: Source<'a>,
    to: Target<'a>,
    elements: usize,
}

impl Pass<'_> {
    #[inline(always)]
    fn encode<S: Simd, C: Codes, const STOCHASTIC: bool>(&self, simd: S) -> Squares {
        let mut all = Squares::default();
        let mut to = 0;
        for (index, first) in (0..self.elements).step_by(self.block).enumerate() {
            let count = self.block.min(self.elements - first);
            let noise = STOCHASTIC.then(|| Stream::new(self.seed, index).uniform(simd));
            all = all.and(self.block::<S, C>(simd, first, count.div_ceil(ROW), to, noise));
            to += SCALE + count.div_ceil(ROW) * row_bytes(C::BITS);
        }
        all
    }

    /// Encodes the block of `rows` rows from element `first` to byte `to` on.
    #[inline(always)]
    fn block<S: Simd, C: Codes>(
        &self,
        simd: S,
        first: usize,
        rows: usize,
        to: usize,
        noise: Option<Uniform<S>>,
    ) -> Squares {
        let mut tile = [simd.splat(0.0); ROWS];
        let mut greatest = simd.splat_word(0);
        for (row, at) in tile.iter_mut().take(rows).zip((first..).step_by(ROW)) {
            *row = self.source.row(simd, at);
            greatest = simd.max(greatest, simd.and(simd.bits(*row), simd.splat_word(0x7fff_ffff)));
        }
        let tile = tile.get(..rows).unwrap_or_default();
        let greatest = simd.greatest(greatest);
        if greatest >= INFINITE || f32::from_bits(greatest) < LEAST {
            return self.unusual::<S, C>(simd, tile, greatest, to);
        }
        let greatest = f32::from_bits(greatest);
        // With noise the greatest must stay where it cannot be rounded up.
        let top = if noise.is_some() { C::TOP * (1.0 - 1e-6) } else { C::TOP };
        let scale = scale(greatest, top, C::TOP);
        self.to.put(to, scale.to_le_bytes());
        let sums = self.rows::<S, C>(simd, tile, top / greatest, to + SCALE, noise);
        let square = f64::from(scale) * f64::from(scale);
        Squares { error: f64::from(sums.0) * square, signal: f64::from(sums.1) * square }
    }

    /// Encodes rows, each element times `inverse`; sums of squares of what is lost and of the products.
    #[inline(always)]
    fn rows<S: Simd, C: Codes>(
        &self,
        simd: S,
        tile: &[S::Floats],
        inverse: f32,
        to: usize,
        mut noise: Option<Uniform<S>>,
    ) -> (f32, f32) {
        let inverse = simd.splat(inverse);
        let (mut error, mut signal) = (simd.splat(0.0), simd.splat(0.0));
        for (row, to) in tile.iter().zip((to..).step_by(row_bytes(C::BITS))) {
            let row = simd.mul(*row, inverse);
            let noisy = match &mut noise {
                Some(noise) => simd.add(row, noise.next(simd)),
                None => row,
            };
            let (codes, back) = C::encode(simd, noisy);
            put(self.to, to, simd.narrow(codes), C::BITS);
            let lost = simd.sub(row, back);
            error = simd.fused(lost, lost, error);
            signal = simd.fused(row, row, signal);
        }
        (simd.sum(error), simd.sum(signal))
    }

    /// A block of too small magnitudes, or with one that is not finite.
    #[cold]
    #[inline(never)]
    fn unusual<S: Simd, C: Codes>(&self, simd: S, tile: &[S::Floats], greatest: u32, to: usize) -> Squares {
        let finite = greatest < INFINITE;
        self.to.put(to, if finite { [0; 4] } else { NAN.to_le_bytes() });
        let mut all = Squares::default();
        for (row, to) in tile.iter().zip((to + SCALE..).step_by(row_bytes(C::BITS))) {
            put(self.to, to, [0; LANES], C::BITS);
            let square = |value: f32| if finite { f64::from(value) * f64::from(value) } else { f64::NAN };
            let lost = simd.lanes(*row).into_iter().map(square).sum();
            all = all.and(Squares { error: lost, signal: lost });
        }
        all
    }
}

/// The scale that brings `greatest` to `top`, such that `most` times it is finite.
#[inline(always)]
fn scale(greatest: f32, top: f32, most: f32) -> f32 {
    let scale = greatest / top;
    if (scale * most).is_finite() { scale } else { scale.next_down().next_down() }
}

/// Cost: reads one byte an element, or half of one, writes 4 (and reads them, where it adds); four instructions a row.
#[inline(always)]
pub(super) fn decode<S: Simd>(simd: S, grid: Grid, block: usize, from: Source<'_>, place: Place<'_>) {
    match grid {
        Grid::Int8 => values::<S, Integers<8>>(simd, block, from, place),
        Grid::Int4 => values::<S, Integers<4>>(simd, block, from, place),
        Grid::E4m3 => values::<S, Floats<3>>(simd, block, from, place),
        Grid::E5m2 => values::<S, Floats<2>>(simd, block, from, place),
    }
}

#[inline(always)]
fn values<S: Simd, C: Codes>(simd: S, block: usize, from: Source<'_>, place: Place<'_>) {
    let mut at = 0;
    for first in (0..place.elements).step_by(block) {
        let end = (first + block).min(place.elements);
        let scale = f32::from_le_bytes(from.get(at));
        at += SCALE;
        if !scale.is_finite() {
            place.nan(first, block);
        } else {
            let scale = simd.splat(scale * place.sign());
            let codes = (at..).step_by(row_bytes(C::BITS));
            for (element, code) in (first..end).step_by(ROW).zip(codes) {
                let row = C::decode(simd, get(from, code, C::BITS));
                place.put(simd, element, simd.mul(row, scale));
            }
        }
        at += (end - first).div_ceil(ROW) * row_bytes(C::BITS);
    }
}
