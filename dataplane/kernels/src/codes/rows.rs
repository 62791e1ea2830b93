//! Rows of 16 codes as bytes, and where decoded rows go.

use super::hadamard::padded;
use super::memory::{Source, Target};
use super::{NAN, ROW, Store};
use crate::simd::{LANES, Simd};

/// Bytes of a block's scale.
pub(super) const SCALE: usize = 4;

/// Bytes of a row of codes of `bits` bits.
pub(super) const fn row_bytes(bits: usize) -> usize {
    ROW / 8 * bits
}

/// Bytes of `elements` elements in blocks with a scale each, all rows whole.
pub(super) fn bytes(elements: usize, block: usize, bits: usize) -> Option<usize> {
    let codes = elements.div_ceil(ROW).checked_mul(row_bytes(bits))?;
    elements.div_ceil(block).checked_mul(SCALE)?.checked_add(codes)
}

/// Bytes of `elements` elements in rotated blocks, the last of which is padded to a power of two.
pub(super) fn rotated_bytes(elements: usize, block: usize, bits: usize) -> Option<usize> {
    let (whole, rest) = (elements / block, elements % block);
    let last = if rest == 0 { 0 } else { SCALE + padded(rest).min(block) / ROW * row_bytes(bits) };
    whole.checked_mul(SCALE + block / ROW * row_bytes(bits))?.checked_add(last)
}

/// Where the values go.
#[derive(Clone, Copy)]
pub(super) struct RowTarget<'a> {
    pub(super) to: Target<'a>,
    pub(super) store: Store,
    pub(super) elements: usize,
}

impl RowTarget<'_> {
    /// The `elements` elements from `first` on, if all are there; as [`Target::part`].
    #[inline(always)]
    pub(super) fn part(self, first: usize, elements: usize) -> Option<Self> {
        self.to.part(4 * first, 4 * elements).map(|to| Self { to, elements, ..self })
    }

    /// 1, or -1 where values are taken off: what scales are multiplied with.
    #[inline(always)]
    pub(super) fn sign(self) -> f32 {
        if self.store == Store::Subtract { -1.0 } else { 1.0 }
    }

    /// Writes or adds (signs are the caller's) the row that begins with element `at`.
    #[inline(always)]
    pub(super) fn put<S: Simd>(self, simd: S, at: usize, row: S::Floats) {
        match self.store {
            Store::Set => self.to.stream_row(simd, at, row),
            Store::Add | Store::Subtract => {
                let sum = simd.add(self.to.row(simd, at), row);
                self.to.put_row(simd, at, sum);
            }
        }
    }

    /// Makes `elements` elements NaN.
    #[cold]
    #[inline(never)]
    pub(super) fn nan(self, at: usize, elements: usize) {
        for element in at..(at + elements).min(self.elements) {
            self.to.put(4 * element, NAN.to_le_bytes());
        }
    }
}

/// A 1 in each byte.
const ONES: u128 = u128::from_le_bytes([1; LANES]);

/// A row of codes of `bits` bits (1, 2, 3, 4 or 8). It is folded in halves: byte `i` of 4-bit codes holds code `i` and above it
/// code `i + 8`. Byte `i` of 2-bit codes holds the codes `i`, `i + 4`, `i + 8` and `i + 12`, and so on. Of 3-bit codes the lower
/// 2 bits come first, then the upper one.
#[inline(always)]
fn pack(codes: [u8; LANES], bits: usize) -> u128 {
    let row = u128::from_le_bytes(codes);
    let four = |row: u128| (row as u64) | ((row >> 64) as u64) << 4;
    let two = |row: u128| (four(row) as u32) | ((four(row) >> 32) as u32) << 2;
    match bits {
        8 => row,
        4 => u128::from(four(row)),
        3 => {
            let upper = row >> 2 & ONES;
            u128::from(two(row & (3 * ONES))) | pack(upper.to_le_bytes(), 1) << 32
        }
        2 => u128::from(two(row)),
        _ => u128::from((two(row) as u16) | ((two(row) >> 16) as u16) << 1),
    }
}

/// The inverse of [`pack`].
#[inline(always)]
fn unpack(row: u128, bits: usize) -> [u8; LANES] {
    let one = |row: u128| (row as u32 & 0x5555) | (row as u32 & 0xaaaa) << 15;
    let two = |row: u32| u64::from(row & 0x3333_3333) | u64::from(row & 0xcccc_cccc) << 30;
    let four =
        |row: u64| u128::from(row & 0x0f0f_0f0f_0f0f_0f0f) | u128::from(row & 0xf0f0_f0f0_f0f0_f0f0) << 60;
    let bytes = match bits {
        8 => row,
        4 => four(row as u64),
        3 => four(two(row as u32)) | four(two(one(row >> 32))) << 2,
        2 => four(two(row as u32)),
        _ => four(two(one(row))),
    };
    bytes.to_le_bytes()
}

/// Writes a row of codes that have no bit above theirs, but where they are 8. Of 6-bit codes the lower 4 come first, then the upper 2,
/// each as such codes are.
#[inline(always)]
pub(super) fn put_row<S: Simd>(simd: S, target: Target<'_>, to: usize, codes: S::Ints, bits: usize) {
    match bits {
        8 => target.put(to, simd.narrow(codes)),
        6 => {
            let upper = u64::from_le_bytes(simd.fold(simd.shr(codes, 4)));
            target.put(to, simd.fold(simd.and(codes, simd.splat_int(15))));
            target.put(to + LANES / 2, ((upper as u32) | ((upper >> 32) as u32) << 2).to_le_bytes());
        }
        4 => target.put(to, simd.fold(codes)),
        _ => put(target, to, simd.narrow(codes), bits),
    }
}

/// Reads a row of codes.
#[inline(always)]
pub(super) fn get_row<S: Simd>(simd: S, source: Source<'_>, at: usize, bits: usize) -> S::Ints {
    match bits {
        8 => simd.widen(source.get(at)),
        6 => {
            let upper = u32::from_le_bytes(source.get(at + LANES / 2));
            let upper = u64::from(upper & 0x3333_3333) | u64::from(upper & 0xcccc_cccc) << 30;
            simd.add_32(simd.unfold(source.get(at)), simd.shl(simd.unfold(upper.to_le_bytes()), 4))
        }
        4 => simd.unfold(source.get(at)),
        _ => simd.widen(get(source, at, bits)),
    }
}

/// Adds rows of 4-bit codes to rows of 6-bit sums, or begins these with them. It does so without unpacking, on the 8 codes of either half
/// of a row at a time.
///
/// Cost: some 20 instructions a row.
#[inline(always)]
pub(super) fn add_rows(
    (from, from_at): (Source<'_>, usize),
    (to, to_at): (Target<'_>, usize),
    begin: bool,
    rows: usize,
) {
    const CODES: usize = row_bytes(4);
    const SUMS: usize = row_bytes(6);
    let both = from.part(from_at, rows * CODES).zip(to.part(to_at, rows * SUMS));
    let Some((from, to)) = both else { return };
    for row in 0..rows {
        let codes = u64::from_le_bytes(from.get(row * CODES));
        let at = row * SUMS;
        let (lower, upper) = if begin {
            (codes, 0)
        } else {
            let sums = to.source();
            add_row(codes, u64::from_le_bytes(sums.get(at)), u32::from_le_bytes(sums.get(at + CODES)))
        };
        to.put(at, lower.to_le_bytes());
        to.put(at + CODES, upper.to_le_bytes());
    }
}

/// Adds a row of 4-bit codes to the lower 4 and the upper 2 bits of a row of sums. Lanes that would exceed 63 spoil their neighbours.
#[inline(always)]
fn add_row(codes: u64, lower: u64, upper: u32) -> (u64, u32) {
    const LOW: u64 = u64::from_le_bytes([0x0f; 8]);
    const TOP: u64 = u64::from_le_bytes([0x10; 8]);
    let first = (lower & LOW) + (codes & LOW);
    let second = (lower >> 4 & LOW) + (codes >> 4 & LOW);
    // What is carried, of code `i` at bit 0 of byte `i` and of code `i + 8` at bit 4; the upper bits have it so from 0 to 3, and of the others
    // two bits above.
    let carried = (first & TOP) >> 4 | (second & TOP);
    let carried = carried as u32 | ((carried >> 32) as u32) << 2;
    ((first & LOW) | (second & LOW) << 4, upper.wrapping_add(carried))
}

/// Writes a row of codes.
#[inline(always)]
pub(super) fn put(target: Target<'_>, to: usize, codes: [u8; LANES], bits: usize) {
    let row = pack(codes, bits);
    match bits {
        8 => target.put(to, row.to_le_bytes()),
        4 => target.put(to, (row as u64).to_le_bytes()),
        3 => {
            let [a, b, c, d, e, f, ..] = row.to_le_bytes();
            target.put(to, [a, b, c, d, e, f]);
        }
        2 => target.put(to, (row as u32).to_le_bytes()),
        _ => target.put(to, (row as u16).to_le_bytes()),
    }
}

/// Reads a row of codes.
#[inline(always)]
pub(super) fn get(source: Source<'_>, at: usize, bits: usize) -> [u8; LANES] {
    let row = match bits {
        8 => u128::from_le_bytes(source.get(at)),
        4 => u128::from(u64::from_le_bytes(source.get(at))),
        3 => {
            let [a, b, c, d, e, f] = source.get(at);
            u128::from(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]))
        }
        2 => u128::from(u32::from_le_bytes(source.get(at))),
        _ => u128::from(u16::from_le_bytes(source.get(at))),
    };
    unpack(row, bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The codes of a row of 6-bit sums, by the layout's definition.
    fn sums(lower: u64, upper: u32) -> [u8; LANES] {
        core::array::from_fn(|code| {
            let four = lower.to_le_bytes()[code % 8] >> (4 * (code / 8)) & 15;
            let two = upper.to_le_bytes()[code % 4] >> (2 * (code / 4)) & 3;
            four | two << 4
        })
    }

    #[test]
    fn rows_of_sums_are_added_lane_by_lane() {
        let mut seed = 1_u64;
        let mut next = || {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            seed ^ seed >> 29
        };
        for _ in 0..1000 {
            let (mut lower, mut upper, mut expected) = (next(), 0, [0; LANES]);
            expected.iter_mut().zip(sums(lower, 0)).for_each(|(sum, code)| *sum += code);
            // Four hosts' codes are 60 at most.
            for codes in [next(), u64::MAX, next()] {
                (lower, upper) = add_row(codes, lower, upper);
                expected.iter_mut().zip(sums(codes, 0)).for_each(|(sum, code)| *sum += code);
            }
            assert_eq!(sums(lower, upper), expected);
        }
    }
}
