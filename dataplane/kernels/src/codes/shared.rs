//! Codes that add without being decoded: rotated blocks on a uniform grid whose range all ranks share (THC, NSDI 2024).

use super::hadamard::{Norm, ROWS, load, padded, restore, rotate};
use super::memory::{Source, Target};
use super::noise::Stream;
use super::rows::{RowTarget, SCALE, add_rows, get_row, put, put_row, row_bytes};
use super::{NAN, ROW, Squares};
use crate::simd::{LANES, Simd};

/// Codes of a number of bits, or sums of such.
#[derive(Clone, Copy)]
pub(super) struct CodeLayout {
    pub(super) bits: usize,
    pub(super) block: usize,
    pub(super) ranks: usize,
    pub(super) seed: u64,
}

impl CodeLayout {
    /// The greatest code of one rank.
    const fn most(self) -> usize {
        (1 << self.bits) - 1
    }

    /// Bits of a code, or of a sum: 6, 8 or 16.
    pub(super) const fn width(self) -> usize {
        match (self.ranks, self.most() * self.ranks) {
            (1, _) => self.bits,
            (_, ..=63) => 6,
            (_, ..=255) => 8,
            _ => 16,
        }
    }

    /// Where the grid ends, in standard deviations: what lies beyond is cut off. The best for normal elements.
    const fn end(self) -> f32 {
        match self.bits {
            1 => 1.0,
            2 => 1.16,
            3 => 1.81,
            _ => 2.31,
        }
    }

    /// What values grow by on average to make up for the cut: 1 / (1 - 2 Q(end)). Not at 4 bits: there the cut takes a fiftieth, and noise that
    /// grew by as much would lose more than that.
    const fn growth(self) -> f32 {
        match self.bits {
            1 => 1.464_797_4,
            2 => 1.326_345_8,
            3 => 1.075_610_9,
            _ => 1.0,
        }
    }
}

/// Writes each block's norm, in f32: what ranks take the greatest of, which is the range of all.
#[inline(always)]
pub(super) fn ranges<S: Simd>(simd: S, block: usize, source: Source<'_>, to: Target<'_>, elements: usize) {
    let mut tile = [simd.splat(0.0); ROWS];
    for (index, first) in (0..elements).step_by(block).enumerate() {
        let size = block.min(padded(elements - first));
        let range = match load(simd, source, first, tile.get_mut(..size / ROW).unwrap_or_default()) {
            Norm::Zeros(_) => 0.0,
            Norm::NotFinite => f32::from_bits(NAN),
            Norm::Of(norm) => norm,
        };
        to.put(4 * index, range.to_le_bytes());
    }
}

/// One rank's codes.
pub(super) struct Pass<'a> {
    pub(super) form: CodeLayout,
    /// What the rank rounds by, unlike any other's.
    pub(super) noise: u64,
    pub(super) ranges: Source<'a>,
    pub(super) source: Source<'a>,
    pub(super) to: Target<'a>,
    pub(super) elements: usize,
}

impl Pass<'_> {
    /// Cost: as of rotated codes, and some 10 instructions a row for random numbers.
    #[inline(always)]
    pub(super) fn encode<S: Simd>(&self, simd: S) -> Squares {
        let Self { form, .. } = *self;
        let mut tile = [simd.splat(0.0); ROWS];
        let (mut all, mut to) = (Squares::default(), 0);
        for (index, first) in (0..self.elements).step_by(form.block).enumerate() {
            let size = form.block.min(padded(self.elements - first));
            let tile = tile.get_mut(..size / ROW).unwrap_or_default();
            let range = f32::from_le_bytes(self.ranges.get(4 * index));
            let (norm, unit) = rotate(simd, self.source, first, tile, Stream::new(form.seed, index));
            let rows = to + SCALE;
            let usable = range.is_finite() && range > 0.0;
            let (range, squares) = match norm {
                Norm::NotFinite => (f32::from_bits(NAN), Squares { error: f64::NAN, signal: f64::NAN }),
                Norm::Of(norm) if !usable => {
                    let signal = f64::from(norm) * f64::from(norm);
                    (range, Squares { error: signal, signal })
                }
                Norm::Zeros(signal) if !usable => (range, Squares { error: signal, signal }),
                Norm::Of(_) | Norm::Zeros(_) => {
                    let (error, signal) = self.rows(simd, tile, unit / range, rows, index);
                    let square = f64::from(range) * f64::from(range) / size as f64;
                    (range, Squares { error: f64::from(error) * square, signal: f64::from(signal) * square })
                }
            };
            if !usable || range.is_nan() {
                for to in (rows..).step_by(row_bytes(form.bits)).take(tile.len()) {
                    put(self.to, to, [0; LANES], form.bits);
                }
            }
            self.to.put(to, range.to_le_bytes());
            all = all.and(squares);
            to = rows + size / ROW * row_bytes(form.bits);
        }
        all
    }

    /// Writes the codes of rotated rows, whose range times `factor` is 1. Returns the sums of squares of what is lost and of the
    /// elements.
    #[inline(always)]
    fn rows<S: Simd>(&self, simd: S, tile: &[S::Floats], factor: f32, to: usize, index: usize) -> (f32, f32) {
        let Self { form, .. } = *self;
        let mut noise = Stream::new(self.noise, index).uniform(simd);
        let factor = simd.splat(factor);
        let most = form.most() as f32;
        let step = 2.0 * form.end() / most;
        let (inverse, middle) = (simd.splat(1.0 / step), simd.splat(most / 2.0));
        let (top, bottom) = (simd.splat_int(most.to_bits()), simd.splat_int(0));
        let integers = simd.splat(12_582_912.0);
        let (grown, offset) = (simd.splat(step * form.growth()), simd.splat(-form.end() * form.growth()));
        let (mut error, mut signal) = (simd.splat(0.0), simd.splat(0.0));
        for (row, to) in tile.iter().zip((to..).step_by(row_bytes(form.bits))) {
            let row = simd.mul(*row, factor);
            let place = simd.bits(simd.fused(row, inverse, middle));
            // Floats from 0 on are in order as integers, those below 0 are negative.
            let place = simd.where_exceeds(place, top, top, place);
            let place = simd.of_bits(simd.where_exceeds(bottom, place, bottom, place));
            let rounded = simd.add(simd.add(place, noise.next(simd)), integers);
            let value = simd.fused(simd.sub(rounded, integers), grown, offset);
            let lost = simd.sub(row, value);
            error = simd.fused(lost, lost, error);
            signal = simd.fused(row, row, signal);
            let codes = simd.and(simd.bits(rounded), simd.splat_int(0xff));
            put_row(simd, self.to, to, codes, form.bits);
        }
        (simd.sum(error), simd.sum(signal))
    }
}

/// Adds one rank's codes to a sum, or begins one with them. Where both ranges are not the same, the block becomes NaN.
#[inline(always)]
pub(super) fn add<S: Simd>(
    simd: S,
    total: CodeLayout,
    from: Source<'_>,
    to: Target<'_>,
    begin: bool,
    elements: usize,
) {
    let (bits, width) = (total.bits, total.width());
    let (mut from_at, mut to_at) = (0, 0);
    for first in (0..elements).step_by(total.block) {
        let rows = total.block.min(padded(elements - first)) / ROW;
        let range: [u8; SCALE] = from.get(from_at);
        let same = begin || to.source().get(to_at) == range;
        to.put(to_at, if same { range } else { NAN.to_le_bytes() });
        (from_at, to_at) = (from_at + SCALE, to_at + SCALE);
        if (bits, width) == (4, 6) {
            add_rows((from, from_at), (to, to_at), begin, rows);
        } else {
            for row in 0..rows {
                let codes = get_row(simd, from, from_at + row * row_bytes(bits), bits);
                let at = to_at + row * row_bytes(width);
                if width == 16 {
                    let sum = if begin {
                        codes
                    } else {
                        simd.add_32(codes, simd.widen_halves(to.source().get(at)))
                    };
                    to.put(at, simd.narrow_halves(sum));
                } else {
                    let sum =
                        if begin { codes } else { simd.add_32(codes, get_row(simd, to.source(), at, width)) };
                    put_row(simd, to, at, sum, width);
                }
            }
        }
        (from_at, to_at) = (from_at + rows * row_bytes(bits), to_at + rows * row_bytes(width));
    }
}

/// Cost: as of rotated codes.
#[inline(always)]
pub(super) fn decode<S: Simd>(simd: S, form: CodeLayout, from: Source<'_>, place: RowTarget<'_>) {
    let width = form.width();
    let step = 2.0 * form.end() / form.most() as f32 * form.growth();
    let middle = simd.splat(-((form.most() * form.ranks) as f32 / 2.0));
    let mut tile = [simd.splat(0.0); ROWS];
    let mut at = 0;
    for (index, first) in (0..place.elements).step_by(form.block).enumerate() {
        let size = form.block.min(padded(place.elements - first));
        let range = f32::from_le_bytes(from.get(at));
        at += SCALE;
        if !range.is_finite() {
            place.nan(first, size);
        } else {
            let factor = simd.splat(range * place.sign() * step / size as f32);
            let tile = tile.get_mut(..size / ROW).unwrap_or_default();
            for (row, at) in tile.iter_mut().zip((at..).step_by(row_bytes(width))) {
                let codes = if width == 16 {
                    simd.widen_halves(from.get(at))
                } else {
                    get_row(simd, from, at, width)
                };
                *row = simd.mul(simd.add(simd.signed(codes), middle), factor);
            }
            restore(simd, tile, Stream::new(form.seed, index), place, first);
        }
        at += size / ROW * row_bytes(width);
    }
}
