//! Codes that are narrower floats, each element by itself.

use super::memory::{Rows, Source, Target};
use super::rows::RowTarget;
use super::totals::Totals;
use super::{INFINITE, ROW, Squares};
use crate::simd::{LANES, Simd};

/// Rows whose squares are summed in f32 before they go into the totals.
const ROWS: usize = 16;
/// Their elements.
const GROUP: usize = ROWS * ROW;

/// A group's squares are good in f32 while their sum, with what is lost, lies in between. What is lost is infinite where an element
/// became so.
const GOOD: std::ops::RangeInclusive<f32> = 1e-24..=1e34;

/// A 16-bit float.
pub(super) trait Narrow {
    /// The elements, none of them NaN, and as f32 what they were rounded to.
    fn encode<S: Simd>(simd: S, row: S::Floats) -> ([u8; 2 * LANES], S::Floats);
    fn decode<S: Simd>(simd: S, row: [u8; 2 * LANES]) -> S::Floats;
    /// Its NaN.
    const NAN: u16;
}

pub(super) struct Brain;
pub(super) struct Half;

impl Narrow for Brain {
    const NAN: u16 = 0x7fc0;

    #[inline(always)]
    fn encode<S: Simd>(simd: S, row: S::Floats) -> ([u8; 2 * LANES], S::Floats) {
        let rounded = simd.round_to_bf16(row);
        let back = simd.and(rounded, simd.splat_int(0xffff_0000));
        (simd.narrow_halves(simd.shr(rounded, 16)), simd.of_bits(back))
    }

    #[inline(always)]
    fn decode<S: Simd>(simd: S, row: [u8; 2 * LANES]) -> S::Floats {
        simd.of_bits(simd.shl(simd.widen_halves(row), 16))
    }
}

impl Narrow for Half {
    const NAN: u16 = 0x7e00;

    #[inline(always)]
    fn encode<S: Simd>(simd: S, row: S::Floats) -> ([u8; 2 * LANES], S::Floats) {
        let halves = simd.to_f16(row);
        (halves, simd.of_f16(halves))
    }

    #[inline(always)]
    fn decode<S: Simd>(simd: S, row: [u8; 2 * LANES]) -> S::Floats {
        simd.of_f16(row)
    }
}

/// Cost: reads 4 bytes an element, writes 2; a dozen instructions a row.
#[inline(always)]
pub(super) fn encode<S: Simd, N: Narrow>(
    simd: S,
    source: Source<'_>,
    to: Target<'_>,
    elements: usize,
) -> Squares {
    let mut all = Totals::new();
    let mut group = 0;
    while let Some(rows) = source.rows::<ROWS>(group) {
        let (mut error, mut signal) = ([simd.splat(0.0); 2], [simd.splat(0.0); 2]);
        for pair in 0..ROWS / 2 {
            for (odd, (error, signal)) in error.iter_mut().zip(&mut signal).enumerate() {
                let index = 2 * pair + odd;
                rows.prefetch(simd, index);
                let row = rows.row(simd, index);
                let (halves, back) = N::encode(simd, row);
                to.put_halves(simd, 2 * (group + ROW * index), halves);
                let lost = simd.sub(row, back);
                *error = simd.fused(lost, lost, *error);
                *signal = simd.fused(row, row, *signal);
            }
        }
        let [error, signal] = [error, signal].map(|[even, odd]| simd.add(even, odd));
        if GOOD.contains(&simd.sum(simd.add(error, signal))) {
            all.add(simd, error, signal, 1.0);
        } else if !zeros(simd, rows) {
            all.add_apart(careful::<S, N>(simd, source, to, group, group + GROUP));
        }
        group += GROUP;
    }
    all.add_apart(careful::<S, N>(simd, source, to, group, elements));
    all.squares(simd)
}

/// Whether all elements are zeros: nothing is lost of them, and tensors that have many have whole groups.
#[inline(always)]
fn zeros<S: Simd>(simd: S, rows: Rows<'_, ROWS>) -> bool {
    let mut any = simd.splat_int(0);
    for index in 0..ROWS {
        any = simd.or(any, simd.bits(rows.row(simd, index)));
    }
    simd.greatest(any) == 0
}

/// Encodes less than a group, or again one whose squares f32 does not sum up. Either f32 does not hold the squares,
/// or the group has a NaN; then its squares' sum is NaN.
#[cold]
#[inline(never)]
fn careful<S: Simd, N: Narrow>(
    simd: S,
    source: Source<'_>,
    to: Target<'_>,
    from: usize,
    end: usize,
) -> Squares {
    let mut all = Squares::default();
    for at in (from..end).step_by(ROW) {
        let row = source.row(simd, at);
        let magnitude = simd.and(simd.bits(row), simd.splat_int(0x7fff_ffff));
        let nan = simd.exceeding(magnitude, simd.splat_int(INFINITE));
        let (mut halves, back) = N::encode(simd, row);
        for (index, half) in halves.chunks_exact_mut(2).enumerate() {
            if nan >> index & 1 == 1 {
                half.copy_from_slice(&N::NAN.to_le_bytes());
            }
        }
        to.put_halves(simd, 2 * at, halves);
        for (value, back) in simd.lanes(row).into_iter().zip(simd.lanes(back)) {
            let (value, lost) = (f64::from(value), f64::from(value) - f64::from(back));
            all = all.and(Squares { error: lost * lost, signal: value * value });
        }
    }
    all.rounded()
}

/// Cost: reads 2 bytes an element, writes 4 (and reads them, where it adds).
#[inline(always)]
pub(super) fn decode<S: Simd, N: Narrow>(simd: S, from: Source<'_>, place: RowTarget<'_>) {
    let sign = simd.splat(place.sign());
    for at in (0..place.elements).step_by(ROW) {
        let row = N::decode(simd, from.get(2 * at));
        place.put(simd, at, simd.mul(row, sign));
    }
}

/// Elements as they are.
#[inline(always)]
pub(super) fn decode_whole<S: Simd>(simd: S, from: Source<'_>, place: RowTarget<'_>) {
    let sign = simd.splat(place.sign());
    for at in (0..place.elements).step_by(ROW) {
        place.put(simd, at, simd.mul(from.row(simd, at), sign));
    }
}
