//! Codes of 1 to 4 bits of rotated blocks. Each element becomes the nearest of few centroids that are best for normal ones.

use super::hadamard::{Norm, ROWS, padded, restore, rotate};
use super::memory::{Source, Target};
use super::rows::{RowTarget, SCALE, get_row, put, put_row, row_bytes};
use super::{Blocks, NAN, ROW, Squares};
use crate::simd::{LANES, Simd};

/// Magnitudes of Lloyd's and Max's centroids at 1 to 4 bits, for a normal distribution of variance 1. Those of `bits` bits
/// begin at `2^(bits - 1)`. Source: Max, "Quantizing for minimum distortion", 1960.
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
struct Quantiser<S: Simd, const BITS: usize> {
    /// The value of each code.
    values: S::Floats,
    /// The threshold in each part of the magnitudes, where there is one at most. A part's magnitudes are nearest to the same
    /// multiple of 1/4.
    thresholds: S::Floats,
    /// The number of thresholds below each part.
    below: S::Floats,
}

impl<S: Simd, const BITS: usize> Quantiser<S, BITS> {
    const HALF: usize = 1 << (BITS - 1);

    #[inline(always)]
    fn new(simd: S) -> Self {
        let halves = CENTROIDS.get(Self::HALF..2 * Self::HALF).unwrap_or_default();
        let thresholds = || halves.windows(2).map(|pair| pair.iter().sum::<f32>() / 2.0);
        let part = |threshold: f32| (4.0 * threshold).round_ties_even() as usize;
        let within = |index| thresholds().find(|threshold| part(*threshold) == index).unwrap_or(f32::MAX);
        let below = |index| thresholds().filter(|threshold| part(*threshold) < index).count() as u32;
        Self {
            values: simd.floats(Self::table()),
            thresholds: simd.floats(core::array::from_fn(within)),
            below: simd.of_bits(simd.ints(core::array::from_fn(below))),
        }
    }

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
    fn encode(&self, simd: S, row: S::Floats) -> S::Ints {
        /// Added to a float of magnitude below 2^22, it leaves the nearest integer in the lowest bits.
        const INTEGERS: f32 = 12_582_912.0;
        let bits = simd.bits(row);
        let magnitude = simd.and(bits, simd.splat_int(0x7fff_ffff));
        // The last part has all above.
        let bounded = simd.of_bits(simd.min_u32(magnitude, simd.splat_int(3.75_f32.to_bits())));
        let part = simd.bits(simd.fused(bounded, simd.splat(4.0), simd.splat(INTEGERS)));
        let below = simd.bits(simd.lookup(part, self.below));
        let threshold = simd.lookup(part, self.thresholds);
        let one = simd.where_above(simd.of_bits(magnitude), threshold, simd.splat_int(1), simd.splat_int(0));
        let code = simd.add_32(below, one);
        let sign = simd.and(simd.shr(bits, 32 - BITS as u32), simd.splat_int(Self::HALF as u32));
        simd.or(code, sign)
    }
}

/// Encodes rotated blocks. It reads 4 bytes an element, and takes per row some 20 instructions for the
/// rotation and 10 to 30 for the code.
#[inline(always)]
pub(super) fn encode<S: Simd>(
    simd: S,
    bits: usize,
    blocks: Blocks,
    source: Source<'_>,
    to: Target<'_>,
    elements: usize,
) -> Squares {
    let pass = Pass { blocks, source, to, elements };
    match bits {
        1 => pass.encode::<S, 1>(simd),
        2 => pass.encode::<S, 2>(simd),
        3 => pass.encode::<S, 3>(simd),
        _ => pass.encode::<S, 4>(simd),
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
    fn encode<S: Simd, const BITS: usize>(&self, simd: S) -> Squares {
        let mut tile = [simd.splat(0.0); ROWS];
        let quantiser = Quantiser::<S, BITS>::new(simd);
        let (mut all, mut to) = (Squares::default(), 0);
        for (index, first) in (0..self.elements).step_by(self.blocks.block).enumerate() {
            let size = self.blocks.block.min(padded(self.elements - first));
            let tile = tile.get_mut(..size / ROW).unwrap_or_default();
            let rows = to + SCALE;
            let (norm, unit) = rotate(simd, self.source, first, tile, self.blocks.stream(index));
            let (scale, squares) = match norm {
                Norm::Of(norm) => {
                    let (dot, length) = self.rows(simd, &quantiser, tile, unit / norm, rows);
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

    /// Writes the codes of rotated rows times `factor`; the sums of the centroids' products with these, and of their squares.
    #[inline(always)]
    fn rows<S: Simd, const BITS: usize>(
        &self,
        simd: S,
        quantiser: &Quantiser<S, BITS>,
        tile: &[S::Floats],
        factor: f32,
        to: usize,
    ) -> (f32, f32) {
        let factor = simd.splat(factor);
        let (mut dot, mut length) = (simd.splat(0.0), simd.splat(0.0));
        for (row, to) in tile.iter().zip((to..).step_by(row_bytes(BITS))) {
            let row = simd.mul(*row, factor);
            let codes = quantiser.encode(simd, row);
            let values = simd.lookup(codes, quantiser.values);
            dot = simd.fused(row, values, dot);
            length = simd.fused(values, values, length);
            put_row(simd, self.to, to, codes, BITS);
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
pub(super) fn decode<S: Simd>(simd: S, bits: usize, blocks: Blocks, from: Source<'_>, place: RowTarget<'_>) {
    match bits {
        1 => values::<S, 1>(simd, blocks, from, place),
        2 => values::<S, 2>(simd, blocks, from, place),
        3 => values::<S, 3>(simd, blocks, from, place),
        _ => values::<S, 4>(simd, blocks, from, place),
    }
}

#[inline(always)]
fn values<S: Simd, const BITS: usize>(simd: S, blocks: Blocks, from: Source<'_>, place: RowTarget<'_>) {
    let table = simd.floats(Quantiser::<S, BITS>::table());
    let mut tile = [simd.splat(0.0); ROWS];
    let mut at = 0;
    for (index, first) in (0..place.elements).step_by(blocks.block).enumerate() {
        let size = blocks.block.min(padded(place.elements - first));
        let scale = f32::from_le_bytes(from.get(at));
        at += SCALE;
        if !scale.is_finite() {
            place.nan(first, size);
        } else {
            let table = simd.mul(table, simd.splat(scale * place.sign()));
            let tile = tile.get_mut(..size / ROW).unwrap_or_default();
            for (row, at) in tile.iter_mut().zip((at..).step_by(row_bytes(BITS))) {
                *row = simd.lookup(get_row(simd, from, at, BITS), table);
            }
            restore(simd, tile, blocks.stream(index), place, first);
        }
        at += size / ROW * row_bytes(BITS);
    }
}

#[cfg(test)]
mod tests {
    use super::{CENTROIDS, Quantiser};
    use crate::simd::{Job, LANES, Simd, dispatch};

    struct Codes<const BITS: usize>([f32; LANES]);

    impl<const BITS: usize> Job for Codes<BITS> {
        type Output = [u8; LANES];

        fn run<S: Simd>(self, simd: S) -> [u8; LANES] {
            simd.narrow(Quantiser::<S, BITS>::new(simd).encode(simd, simd.floats(self.0)))
        }
    }

    /// Counted by hand, on both sides of every threshold and of every part's end.
    fn counted<const BITS: usize>() {
        let half = 1 << (BITS - 1);
        let middles: Vec<f32> =
            CENTROIDS[half..2 * half].windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        let ends = (0..40).map(|end| end as f32 / 8.0).chain([60.0, 1e30]);
        for near in middles.iter().copied().chain(ends) {
            let mut row = [0.0; LANES];
            let around = [near, near.next_up(), near.next_down(), near * 1.01, near * 0.99];
            row.iter_mut()
                .zip(around.into_iter().flat_map(|value| [value, -value]))
                .for_each(|(a, b)| *a = b);
            let expected = row.map(|value: f32| {
                let above = middles.iter().filter(|middle| value.abs() > **middle).count();
                (above + if value.is_sign_negative() { half } else { 0 }) as u8
            });
            for isa in crate::Isa::ALL.iter().filter(|isa| isa.is_available()) {
                assert_eq!(dispatch(*isa, Codes::<BITS>(row)), Ok(expected), "{isa}: {row:?}");
            }
        }
    }

    #[test]
    fn codes_count_the_thresholds_below() {
        counted::<1>();
        counted::<2>();
        counted::<3>();
        counted::<4>();
    }
}
