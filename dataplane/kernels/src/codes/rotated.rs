//! Codes of 1 to 4 bits of rotated blocks: each element becomes the nearest of few centroids that are best for normal ones.

use super::hadamard::{Norm, ROWS, load, padded, restore, rotate};
use super::memory::{Source, Target};
use super::noise::Stream;
use super::rows::{Place, SCALE, get, put, row_bytes};
use super::{NAN, ROW, Squares};
use crate::simd::{LANES, Simd};

/// The magnitudes of Lloyd's and Max's centroids for a normal distribution of variance 1 at 1 to 4 bits (Max, "Quantizing for
/// minimum distortion", 1960), at `2^(bits - 1)` and on.
const CENTROIDS: [f32; LANES] = [
    0.0,
    0.797_884_6,
    0.452_780_04,
    1.510_417_6,
    0.245_094_18,
    0.756_005_3,
    1.343_909_3,
    2.151_945_7,
    0.128_395_03,
    0.388_048_3,
    0.656_759_1,
    0.942_340_46,
    1.256_231_2,
    1.618_046_4,
    2.069_017_2,
    2.732_589_6,
];

/// A quantiser of `BITS` bits. The top bit of a code is the sign, the others count the thresholds that the magnitude is above.
struct Quantiser<const BITS: usize>;

impl<const BITS: usize> Quantiser<BITS> {
    const HALF: usize = 1 << (BITS - 1);

    /// The value of each code.
    #[inline(always)]
    fn table() -> [f32; LANES] {
        core::array::from_fn(|code| {
            let sign = if code & Self::HALF == 0 { 1.0 } else { -1.0 };
            sign * CENTROIDS.get(Self::HALF + code % Self::HALF).copied().unwrap_or_default()
        })
    }

    /// The codes of a row.
    #[inline(always)]
    fn encode<S: Simd>(simd: S, row: S::Floats) -> S::Words {
        let bits = simd.bits(row);
        let magnitude = simd.of_bits(simd.and(bits, simd.splat_word(0x7fff_ffff)));
        let mut code = simd.splat_word(0);
        let halves = CENTROIDS.get(Self::HALF..2 * Self::HALF).unwrap_or_default();
        for (count, pair) in (1..).zip(halves.windows(2)) {
            let threshold = simd.splat(pair.iter().sum::<f32>() / 2.0);
            code = simd.where_above(magnitude, threshold, simd.splat_word(count), code);
        }
        let sign = simd.and(simd.shr(bits, 32 - BITS as u32), simd.splat_word(Self::HALF as u32));
        simd.or(code, sign)
    }
}

/// Cost: reads 4 bytes an element; per row some 20 instructions for the rotation and 10 to 30 for the code.
#[inline(always)]
pub(super) fn encode<S: Simd>(
    simd: S,
    bits: usize,
    block: usize,
    seed: u64,
    source: Source<'_>,
    to: Target<'_>,
    elements: usize,
) -> Squares {
    let pass = Pass { block, seed, source, to, elements };
    match bits {
        1 => pass.encode::<S, 1>(simd),
        2 => pass.encode::<S, 2>(simd),
        3 => pass.encode::<S, 3>(simd),
        _ => pass.encode::<S, 4>(simd),
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
    fn encode<S: Simd, const BITS: usize>(&self, simd: S) -> Squares {
        let mut tile = [simd.splat(0.0); ROWS];
        let (mut all, mut to) = (Squares::default(), 0);
        for (index, first) in (0..self.elements).step_by(self.block).enumerate() {
            let size = self.block.min(padded(self.elements - first));
            let tile = tile.get_mut(..size / ROW).unwrap_or_default();
            let rows = to + SCALE;
            let (scale, squares) = match load(simd, self.source, first, tile) {
                Norm::Of(norm) => {
                    rotate(simd, tile, 1.0 / norm, Stream::new(self.seed, index));
                    let (dot, length) = self.rows::<S, BITS>(simd, tile, rows);
                    let signal = f64::from(norm) * f64::from(norm);
                    let lost = size as f64 * f64::from(length) / (f64::from(dot) * f64::from(dot)) - 1.0;
                    // So scaled, the values' product with what they stand for is its square: no bias (EDEN, section 3).
                    (norm / dot, Squares { error: signal * lost.max(0.0), signal })
                }
                Norm::Zeros(signal) => {
                    self.zeros::<BITS>(rows, tile.len());
                    (0.0, Squares { error: signal, signal })
                }
                Norm::NotFinite => {
                    self.zeros::<BITS>(rows, tile.len());
                    (f32::from_bits(NAN), Squares { error: f64::NAN, signal: f64::NAN })
                }
            };
            self.to.put(to, scale.to_le_bytes());
            all = all.and(squares);
            to = rows + size / ROW * row_bytes(BITS);
        }
        all
    }

    /// Writes the codes of rotated rows; the sums of the centroids' products with the elements, and of their squares.
    #[inline(always)]
    fn rows<S: Simd, const BITS: usize>(&self, simd: S, tile: &[S::Floats], to: usize) -> (f32, f32) {
        let table = Quantiser::<BITS>::table();
        let (mut dot, mut length) = (simd.splat(0.0), simd.splat(0.0));
        for (row, to) in tile.iter().zip((to..).step_by(row_bytes(BITS))) {
            let codes = Quantiser::<BITS>::encode(simd, *row);
            let values = simd.lookup(codes, &table);
            dot = simd.fused(*row, values, dot);
            length = simd.fused(values, values, length);
            put(self.to, to, simd.narrow(codes), BITS);
        }
        (simd.sum(dot), simd.sum(length))
    }

    #[cold]
    #[inline(never)]
    fn zeros<const BITS: usize>(&self, to: usize, rows: usize) {
        for to in (to..).step_by(row_bytes(BITS)).take(rows) {
            put(self.to, to, [0; LANES], BITS);
        }
    }
}

/// Cost: writes 4 bytes an element (and reads them, where it adds); per row some 25 instructions.
#[inline(always)]
pub(super) fn decode<S: Simd>(
    simd: S,
    bits: usize,
    block: usize,
    seed: u64,
    from: Source<'_>,
    place: Place<'_>,
) {
    match bits {
        1 => values::<S, 1>(simd, block, seed, from, place),
        2 => values::<S, 2>(simd, block, seed, from, place),
        3 => values::<S, 3>(simd, block, seed, from, place),
        _ => values::<S, 4>(simd, block, seed, from, place),
    }
}

#[inline(always)]
fn values<S: Simd, const BITS: usize>(simd: S, block: usize, seed: u64, from: Source<'_>, place: Place<'_>) {
    let table = Quantiser::<BITS>::table();
    let mut tile = [simd.splat(0.0); ROWS];
    let mut at = 0;
    for (index, first) in (0..place.elements).step_by(block).enumerate() {
        let size = block.min(padded(place.elements - first));
        let scale = f32::from_le_bytes(from.get(at));
        at += SCALE;
        if !scale.is_finite() {
            place.nan(first, size);
        } else {
            let factor = simd.splat(scale * place.sign());
            let tile = tile.get_mut(..size / ROW).unwrap_or_default();
            for (row, at) in tile.iter_mut().zip((at..).step_by(row_bytes(BITS))) {
                *row = simd.mul(simd.lookup(simd.widen(get(from, at, BITS)), &table), factor);
            }
            restore(simd, tile, Stream::new(seed, index), place, first);
        }
        at += size / ROW * row_bytes(BITS);
    }
}
