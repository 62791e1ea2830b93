//! The reference: lanes one at a time.

use super::{LANES, Simd};
use half::f16;

/// Every CPU.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn each<A: Copy, B>(a: [A; LANES], f: impl Fn(A) -> B) -> [B; LANES] {
    a.map(f)
}

#[inline(always)]
fn both<A: Copy + Default, B>(a: [A; LANES], b: [A; LANES], f: impl Fn(A, A) -> B) -> [B; LANES] {
    let mut right = b.into_iter();
    a.map(|left| f(left, right.next().unwrap_or_default()))
}

#[inline(always)]
fn chosen(conditions: [bool; LANES], yes: [u32; LANES], no: [u32; LANES]) -> [u32; LANES] {
    let mut choices = yes.into_iter().zip(no);
    conditions.map(|condition| {
        let (yes, no) = choices.next().unwrap_or_default();
        if condition { yes } else { no }
    })
}

/// Little-endian.
#[inline(always)]
fn bytes(halves: [u16; LANES]) -> [u8; 2 * LANES] {
    let mut bytes = [0; 2 * LANES];
    for (pair, half) in bytes.chunks_exact_mut(2).zip(halves) {
        pair.copy_from_slice(&half.to_le_bytes());
    }
    bytes
}

#[inline(always)]
fn of_bytes(bytes: [u8; 2 * LANES]) -> [u16; LANES] {
    let mut halves = [0; LANES];
    for (half, pair) in halves.iter_mut().zip(bytes.chunks_exact(2)) {
        *half = pair.iter().rev().fold(0, |high, byte| high << 8 | u16::from(*byte));
    }
    halves
}

/// The lane at `index`, which is taken modulo 16.
#[inline(always)]
fn at<T: Copy + Default>(lanes: &[T; LANES], index: usize) -> T {
    lanes.get(index % LANES).copied().unwrap_or_default()
}

impl Simd for Portable {
    type Floats = [f32; LANES];
    type Ints = [u32; LANES];
    type Doubles = [f64; LANES];

    #[inline(always)]
    fn floats(self, lanes: [f32; LANES]) -> [f32; LANES] {
        lanes
    }

    #[inline(always)]
    fn lanes(self, floats: [f32; LANES]) -> [f32; LANES] {
        floats
    }

    #[inline(always)]
    fn ints(self, lanes: [u32; LANES]) -> [u32; LANES] {
        lanes
    }

    #[inline(always)]
    fn doubles(self, lanes: [f64; LANES]) -> [f64; LANES] {
        lanes
    }

    #[inline(always)]
    fn double_lanes(self, doubles: [f64; LANES]) -> [f64; LANES] {
        doubles
    }

    #[inline(always)]
    fn accumulate(self, floats: [f32; LANES], by: f64, sum: [f64; LANES]) -> [f64; LANES] {
        core::array::from_fn(|i| at(&sum, i) + f64::from(at(&floats, i)) * by)
    }

    #[inline(always)]
    fn add(self, left: [f32; LANES], right: [f32; LANES]) -> [f32; LANES] {
        both(left, right, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, left: [f32; LANES], right: [f32; LANES]) -> [f32; LANES] {
        both(left, right, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, left: [f32; LANES], right: [f32; LANES]) -> [f32; LANES] {
        both(left, right, |a, b| a * b)
    }

    #[inline(always)]
    fn fused(self, left: [f32; LANES], right: [f32; LANES], plus: [f32; LANES]) -> [f32; LANES] {
        core::array::from_fn(|i| at(&left, i).mul_add(at(&right, i), at(&plus, i)))
    }

    #[inline(always)]
    fn bits(self, floats: [f32; LANES]) -> [u32; LANES] {
        each(floats, f32::to_bits)
    }

    #[inline(always)]
    fn of_bits(self, words: [u32; LANES]) -> [f32; LANES] {
        each(words, f32::from_bits)
    }

    #[inline(always)]
    fn and(self, left: [u32; LANES], right: [u32; LANES]) -> [u32; LANES] {
        both(left, right, |a, b| a & b)
    }

    #[inline(always)]
    fn or(self, left: [u32; LANES], right: [u32; LANES]) -> [u32; LANES] {
        both(left, right, |a, b| a | b)
    }

    #[inline(always)]
    fn xor(self, left: [u32; LANES], right: [u32; LANES]) -> [u32; LANES] {
        both(left, right, |a, b| a ^ b)
    }

    #[inline(always)]
    fn plus(self, left: [u32; LANES], right: [u32; LANES]) -> [u32; LANES] {
        both(left, right, u32::wrapping_add)
    }

    #[inline(always)]
    fn max(self, left: [u32; LANES], right: [u32; LANES]) -> [u32; LANES] {
        both(left, right, u32::max)
    }

    #[inline(always)]
    fn min(self, left: [u32; LANES], right: [u32; LANES]) -> [u32; LANES] {
        both(left, right, u32::min)
    }

    #[inline(always)]
    fn shl(self, words: [u32; LANES], by: u32) -> [u32; LANES] {
        each(words, |word| word << (by % 32))
    }

    #[inline(always)]
    fn shr(self, words: [u32; LANES], by: u32) -> [u32; LANES] {
        each(words, |word| word >> (by % 32))
    }

    #[inline(always)]
    fn signed(self, words: [u32; LANES]) -> [f32; LANES] {
        each(words, |word| word.cast_signed() as f32)
    }

    #[inline(always)]
    fn where_above(
        self,
        left: [f32; LANES],
        right: [f32; LANES],
        yes: [u32; LANES],
        no: [u32; LANES],
    ) -> [u32; LANES] {
        chosen(both(left, right, |a, b| a > b), yes, no)
    }

    #[inline(always)]
    fn where_exceeds(
        self,
        left: [u32; LANES],
        right: [u32; LANES],
        yes: [u32; LANES],
        no: [u32; LANES],
    ) -> [u32; LANES] {
        chosen(both(left, right, |a, b| a.cast_signed() > b.cast_signed()), yes, no)
    }

    #[inline(always)]
    fn exceeding(self, left: [u32; LANES], right: [u32; LANES]) -> u16 {
        let found = both(left, right, |a, b| a.cast_signed() > b.cast_signed());
        found.iter().rev().fold(0, |mask, above| mask << 1 | u16::from(*above))
    }

    #[inline(always)]
    fn narrow(self, words: [u32; LANES]) -> [u8; LANES] {
        each(words, |word| word as u8)
    }

    #[inline(always)]
    fn widen(self, bytes: [u8; LANES]) -> [u32; LANES] {
        each(bytes, u32::from)
    }

    #[inline(always)]
    fn widen_signed(self, bytes: [u8; LANES]) -> [u32; LANES] {
        each(bytes, |byte| i32::from(byte.cast_signed()).cast_unsigned())
    }

    #[inline(always)]
    fn fold(self, words: [u32; LANES]) -> [u8; LANES / 2] {
        core::array::from_fn(|i| (at(&words, i) | at(&words, i + LANES / 2) << 4) as u8)
    }

    #[inline(always)]
    fn unfold(self, bytes: [u8; LANES / 2]) -> [u32; LANES] {
        let row = u64::from_le_bytes(bytes);
        core::array::from_fn(|i| (row >> (8 * (i % 8) + 4 * (i / 8)) & 15) as u32)
    }

    #[inline(always)]
    fn narrow_halves(self, words: [u32; LANES]) -> [u8; 2 * LANES] {
        bytes(each(words, |word| word as u16))
    }

    #[inline(always)]
    fn widen_halves(self, halves: [u8; 2 * LANES]) -> [u32; LANES] {
        each(of_bytes(halves), u32::from)
    }

    #[inline(always)]
    fn to_f16(self, floats: [f32; LANES]) -> [u8; 2 * LANES] {
        bytes(each(floats, |float| f16::from_f32(float).to_bits()))
    }

    #[inline(always)]
    fn of_f16(self, halves: [u8; 2 * LANES]) -> [f32; LANES] {
        each(of_bytes(halves), |half| f16::from_bits(half).to_f32())
    }

    #[inline(always)]
    fn butterfly<const H: usize>(self, floats: [f32; LANES]) -> [f32; LANES] {
        core::array::from_fn(|i| {
            let (own, other) = (at(&floats, i), at(&floats, i ^ H));
            if i & H == 0 { other + own } else { other - own }
        })
    }

    #[inline(always)]
    fn lookup(self, words: [u32; LANES], table: [f32; LANES]) -> [f32; LANES] {
        each(words, |word| at(&table, word as usize))
    }

    #[inline(always)]
    fn negate(self, floats: [f32; LANES], lanes: u16) -> [f32; LANES] {
        core::array::from_fn(|i| {
            let sign = u32::from(lanes >> (i % LANES) & 1) << 31;
            f32::from_bits(at(&floats, i).to_bits() ^ sign)
        })
    }
}
