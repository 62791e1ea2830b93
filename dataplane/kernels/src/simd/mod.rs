//! Rows of 64 bytes in vector registers, alike on every instruction set. All kernels are written once, on these. A row is 16 lanes of
//! 32 bits, or as many as fit of another width. Lanes that always number 16 make even sums the same bits everywhere.

/// Defines methods of an instruction set: each body is an expression of intrinsics.
macro_rules! by {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty = $body:expr;)*) => {$(
        #[inline(always)]
        #[allow(unused_unsafe)] // some bodies are made of safe functions alone
        fn $name(self, $($argument: $type),*) -> $result {
            // SAFETY: `self` proves that the CPU has the instruction set; what is transmuted has the same size, and any bits
            // are valid in it.
            unsafe { $body }
        }
    )*};
}

/// Defines methods of an instruction set that take two rows. Each is an intrinsic (or a function of the same shape) on two registers.
macro_rules! lanewise {
    ($($type:ty { $($name:ident = $intrinsic:ident;)* })*) => {$($(
        #[inline(always)]
        fn $name(self, left: $type, right: $type) -> $type {
            // SAFETY: `self` proves that the CPU has the instruction set.
            both(left, right, |a, b| unsafe { cast($intrinsic(cast(a), cast(b))) })
        }
    )*)*};
}

/// Declares methods of [`Simd`] that take two rows, with the reference: what becomes of two lanes.
macro_rules! reference {
    ($($row:ident { $($name:ident: [$lane:ty; $count:literal] = $of:expr;)* })*) => {$($(
        #[inline(always)]
        fn $name(self, left: Self::$row, right: Self::$row) -> Self::$row {
            cast::<[$lane; $count], _>(both(cast(left), cast(right), $of))
        }
    )*)*};
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use crate::element::Lane;
use crate::reduce::{Block, Format};
use crate::{Isa, KernelError};
use core::array::from_fn;
use half::f16;
use harmonaize_abi::{Complex64, Complex128};
use std::ops::{BitAnd, BitOr, BitXor, Div, Sub};
use std::ptr::copy_nonoverlapping;

/// Elements of a row of 32-bit lanes.
pub(crate) const LANES: usize = 16;
/// Bytes of a row.
pub(crate) const ROW_BYTES: usize = 4 * LANES;

/// Bytes without padding, any of which are valid.
///
/// # Safety
/// The type must be so.
pub(crate) unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($type:ty)*) => {$(
        // SAFETY: numbers, or registers of them.
        unsafe impl crate::simd::Plain for $type {}
    )*};
}
use plain;

plain!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64 Complex64 Complex128);

// SAFETY: an array has no padding but its elements'.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// The same bytes as another type.
#[inline(always)]
pub(crate) fn cast<A: Plain, B: Plain>(a: A) -> B {
    const { assert!(size_of::<A>() == size_of::<B>()) };
    // SAFETY: of one size, without padding, and any bytes are a `B`.
    unsafe { core::mem::transmute_copy(&a) }
}

#[inline(always)]
fn both<A: Copy, B, const N: usize>(a: [A; N], b: [A; N], f: impl Fn(A, A) -> B) -> [B; N] {
    let mut right = b.into_iter();
    // As many on either side.
    a.map(|left| f(left, right.next().unwrap_or(left)))
}

/// The lane at `index`, which is taken modulo their number.
#[inline(always)]
fn at<T: Copy + Default, const N: usize>(lanes: &[T; N], index: usize) -> T {
    lanes.get(index % N).copied().unwrap_or_default()
}

/// An instruction set. A value of it exists only on a CPU that has it, which makes the arithmetic safe. The methods' own bodies are the
/// reference, lanes one at a time. Arithmetic rounds to nearest even, [`Simd::fused`] once; integers wrap.
pub(crate) trait Simd: Copy {
    /// 16 lanes of f32.
    type Floats: Plain;
    /// 64 bytes as they lie in memory; 16 lanes of 32 bits.
    type Ints: Plain;
    /// 8 lanes of f64.
    type Doubles: Plain;
    /// As many rows as fill 8 registers, one at least.
    type Eight<E: Format>: Block;
    /// Half as many: of elements that are computed in twice their width.
    type Four<E: Format>: Block;

    reference! {
        Floats {
            add: [f32; 16] = Lane::sum;
            sub: [f32; 16] = f32::sub;
            mul: [f32; 16] = Lane::product;
            div: [f32; 16] = f32::div;
            minimum: [f32; 16] = Lane::minimum;
            maximum: [f32; 16] = Lane::maximum;
            multiply_pairs: [Complex64; 8] = Lane::product;
        }
        Doubles {
            add_f64: [f64; 8] = Lane::sum;
            mul_f64: [f64; 8] = Lane::product;
            div_f64: [f64; 8] = f64::div;
            minimum_f64: [f64; 8] = Lane::minimum;
            maximum_f64: [f64; 8] = Lane::maximum;
            multiply_pairs_f64: [Complex128; 4] = Lane::product;
        }
        Ints {
            and: [u32; 16] = u32::bitand;
            or: [u32; 16] = u32::bitor;
            xor: [u32; 16] = u32::bitxor;
            add_8: [u8; 64] = Lane::sum;
            mul_8: [u8; 64] = Lane::product;
            min_i8: [i8; 64] = Lane::minimum;
            max_i8: [i8; 64] = Lane::maximum;
            min_u8: [u8; 64] = Lane::minimum;
            max_u8: [u8; 64] = Lane::maximum;
            add_16: [u16; 32] = Lane::sum;
            mul_16: [u16; 32] = Lane::product;
            min_i16: [i16; 32] = Lane::minimum;
            max_i16: [i16; 32] = Lane::maximum;
            min_u16: [u16; 32] = Lane::minimum;
            max_u16: [u16; 32] = Lane::maximum;
            add_32: [u32; 16] = Lane::sum;
            mul_32: [u32; 16] = Lane::product;
            min_i32: [i32; 16] = Lane::minimum;
            max_i32: [i32; 16] = Lane::maximum;
            min_u32: [u32; 16] = Lane::minimum;
            max_u32: [u32; 16] = Lane::maximum;
            add_64: [u64; 8] = Lane::sum;
            mul_64: [u64; 8] = Lane::product;
            min_i64: [i64; 8] = Lane::minimum;
            max_i64: [i64; 8] = Lane::maximum;
            min_u64: [u64; 8] = Lane::minimum;
            max_u64: [u64; 8] = Lane::maximum;
        }
    }

    /// The type's one NaN where a lane is NaN.
    #[inline(always)]
    fn one_nan(self, floats: Self::Floats) -> Self::Floats {
        let one = |lane: f32| if lane.is_nan() { f32::from_bits(0x7fc0_0000) } else { lane };
        self.floats(self.lanes(floats).map(one))
    }

    /// As [`Simd::one_nan`].
    #[inline(always)]
    fn one_nan_f64(self, doubles: Self::Doubles) -> Self::Doubles {
        let one = |lane: f64| if lane.is_nan() { f64::from_bits(0x7ff8 << 48) } else { lane };
        cast(cast::<_, [f64; 8]>(doubles).map(one))
    }

    #[inline(always)]
    fn floats(self, lanes: [f32; LANES]) -> Self::Floats {
        cast(lanes)
    }

    #[inline(always)]
    fn lanes(self, floats: Self::Floats) -> [f32; LANES] {
        cast(floats)
    }

    #[inline(always)]
    fn ints(self, lanes: [u32; LANES]) -> Self::Ints {
        cast(lanes)
    }

    #[inline(always)]
    fn bits(self, floats: Self::Floats) -> Self::Ints {
        cast(floats)
    }

    #[inline(always)]
    fn of_bits(self, words: Self::Ints) -> Self::Floats {
        cast(words)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Floats {
        cast([value; LANES])
    }

    #[inline(always)]
    fn splat_int(self, value: u32) -> Self::Ints {
        cast([value; LANES])
    }

    /// `sum + floats * by` in f64, rounded twice.
    #[inline(always)]
    fn accumulate(self, floats: Self::Floats, by: f64, sum: [Self::Doubles; 2]) -> [Self::Doubles; 2] {
        let (floats, sum): (_, [f64; LANES]) = (self.lanes(floats), cast(sum));
        cast::<[f64; LANES], _>(from_fn(|i| at(&sum, i) + f64::from(at(&floats, i)) * by))
    }

    /// `left * right + plus`, rounded once.
    #[inline(always)]
    fn fused(self, left: Self::Floats, right: Self::Floats, plus: Self::Floats) -> Self::Floats {
        let [left, right, plus] = [left, right, plus].map(|floats| self.lanes(floats));
        self.floats(from_fn(|i| at(&left, i).mul_add(at(&right, i), at(&plus, i))))
    }

    /// `by` less than 32.
    #[inline(always)]
    fn shl(self, words: Self::Ints, by: u32) -> Self::Ints {
        cast(cast::<_, [u32; LANES]>(words).map(|word| word << (by % 32)))
    }

    /// Zeros come in; `by` less than 32.
    #[inline(always)]
    fn shr(self, words: Self::Ints, by: u32) -> Self::Ints {
        cast(cast::<_, [u32; LANES]>(words).map(|word| word >> (by % 32)))
    }

    /// The nearest float of each lane as a signed integer.
    #[inline(always)]
    fn signed(self, words: Self::Ints) -> Self::Floats {
        cast(cast::<_, [i32; LANES]>(words).map(|word| word as f32))
    }

    /// `yes` where `left > right`, `no` elsewhere and where one is NaN.
    #[inline(always)]
    fn where_above(
        self,
        left: Self::Floats,
        right: Self::Floats,
        yes: Self::Ints,
        no: Self::Ints,
    ) -> Self::Ints {
        let (left, right) = (self.lanes(left), self.lanes(right));
        let (yes, no): ([u32; LANES], [u32; LANES]) = (cast(yes), cast(no));
        self.ints(from_fn(|i| if at(&left, i) > at(&right, i) { at(&yes, i) } else { at(&no, i) }))
    }

    /// `yes` where `left > right`, both signed, `no` elsewhere.
    #[inline(always)]
    fn where_exceeds(
        self,
        left: Self::Ints,
        right: Self::Ints,
        yes: Self::Ints,
        no: Self::Ints,
    ) -> Self::Ints {
        let above = self.exceeding(left, right);
        let (yes, no): ([u32; LANES], [u32; LANES]) = (cast(yes), cast(no));
        self.ints(from_fn(|i| if above >> (i % LANES) & 1 == 1 { at(&yes, i) } else { at(&no, i) }))
    }

    /// Bit `i`: lane `i` of `left` exceeds that of `right`, both signed.
    #[inline(always)]
    fn exceeding(self, left: Self::Ints, right: Self::Ints) -> u16 {
        let above = both(cast::<_, [i32; LANES]>(left), cast(right), |a, b| a > b);
        above.iter().rev().fold(0, |mask, above| mask << 1 | u16::from(*above))
    }

    /// The lowest byte of each lane.
    #[inline(always)]
    fn narrow(self, words: Self::Ints) -> [u8; LANES] {
        cast::<_, [u32; LANES]>(words).map(|word| word as u8)
    }

    #[inline(always)]
    fn widen(self, bytes: [u8; LANES]) -> Self::Ints {
        cast(bytes.map(u32::from))
    }

    #[inline(always)]
    fn widen_signed(self, bytes: [u8; LANES]) -> Self::Ints {
        cast(bytes.map(|byte| i32::from(byte.cast_signed())))
    }

    /// Byte `i`: the lowest 4 bits of lane `i`, and above them those of lane `i + 8`. What lanes hold above must be 0.
    #[inline(always)]
    fn fold(self, words: Self::Ints) -> [u8; LANES / 2] {
        let words: [u32; LANES] = cast(words);
        from_fn(|i| (at(&words, i) | at(&words, i + LANES / 2) << 4) as u8)
    }

    /// The inverse of [`Simd::fold`].
    #[inline(always)]
    fn unfold(self, bytes: [u8; LANES / 2]) -> Self::Ints {
        let row = u64::from_le_bytes(bytes);
        self.ints(from_fn(|i| (row >> (8 * (i % 8) + 4 * (i / 8)) & 15) as u32))
    }

    /// The lower half of each lane, little-endian.
    #[inline(always)]
    fn narrow_halves(self, words: Self::Ints) -> [u8; 2 * LANES] {
        cast(cast::<_, [u32; LANES]>(words).map(|word| (word as u16).to_le_bytes()))
    }

    #[inline(always)]
    fn widen_halves(self, halves: [u8; 2 * LANES]) -> Self::Ints {
        cast(cast::<_, [[u8; 2]; LANES]>(halves).map(|half| u32::from(u16::from_le_bytes(half))))
    }

    /// To binary16; a NaN stays one, with bits that depend on the CPU.
    #[inline(always)]
    fn to_f16(self, floats: Self::Floats) -> [u8; 2 * LANES] {
        cast(self.lanes(floats).map(|float| f16::from_f32(float).to_le_bytes()))
    }

    /// From binary16, as above.
    #[inline(always)]
    fn of_f16(self, halves: [u8; 2 * LANES]) -> Self::Floats {
        self.floats(cast::<_, [[u8; 2]; LANES]>(halves).map(|half| f16::from_le_bytes(half).to_f32()))
    }

    /// Lanes whose upper 16 bits are the nearest bfloat16: in integers, for x86's own conversion flushes subnormals. NaN is lost.
    #[inline(always)]
    fn round_to_bf16(self, floats: Self::Floats) -> Self::Ints {
        let bits = self.bits(floats);
        let odd = self.and(self.shr(bits, 16), self.splat_int(1));
        self.add_32(self.add_32(bits, odd), self.splat_int(0x7fff))
    }

    /// One stage of the Hadamard transform. It is the sum with lane `i ^ H` where `i & H` is 0, and the difference from it
    /// elsewhere.
    #[inline(always)]
    fn butterfly<const H: usize>(self, floats: Self::Floats) -> Self::Floats {
        let lanes = self.lanes(floats);
        self.floats(from_fn(|i| {
            let (own, other) = (at(&lanes, i), at(&lanes, i ^ H));
            if i & H == 0 { other + own } else { other - own }
        }))
    }

    /// The entry at each lane's lowest 4 bits.
    #[inline(always)]
    fn lookup(self, words: Self::Ints, table: Self::Floats) -> Self::Floats {
        let table = self.lanes(table);
        self.floats(cast::<_, [u32; LANES]>(words).map(|word| at(&table, word as usize)))
    }

    /// Flips the sign of lane `i` where bit `i` is set.
    #[inline(always)]
    fn negate(self, floats: Self::Floats, lanes: u16) -> Self::Floats {
        let signs = from_fn(|i| u32::from(lanes >> (i % LANES) & 1) << 31);
        self.of_bits(self.xor(self.bits(floats), self.ints(signs)))
    }

    /// The lanes' sum, in pairs: 8 apart, 4 apart, 2 apart, neighbours.
    #[inline(always)]
    fn sum(self, floats: Self::Floats) -> f32 {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = self.lanes(floats);
        let [a, b, c, d] = [(a + i) + (e + m), (b + j) + (f + n), (c + k) + (g + o), (d + l) + (h + p)];
        (a + c) + (b + d)
    }

    /// The lanes' sum, as above.
    #[inline(always)]
    fn sum_f64(self, doubles: [Self::Doubles; 2]) -> f64 {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]: [f64; LANES] = cast(doubles);
        let [a, b, c, d] = [(a + i) + (e + m), (b + j) + (f + n), (c + k) + (g + o), (d + l) + (h + p)];
        (a + c) + (b + d)
    }

    /// The greatest lane, unsigned.
    #[inline(always)]
    fn greatest(self, words: Self::Ints) -> u32 {
        cast::<_, [u32; LANES]>(words).into_iter().fold(0, u32::max)
    }

    /// Asks for the memory at `at`, which need not exist.
    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}

    /// Asks for the memory at `at`, which need not exist, to write it.
    #[inline(always)]
    fn prefetch_write(self, _at: *const u8) {}

    /// Makes rows that were streamed visible before later stores.
    #[inline(always)]
    fn fence(self) {}

    /// Stores past the caches, where the CPU can.
    ///
    /// # Safety
    /// `to` must be writable for 64 bytes, and a multiple of 64.
    #[inline(always)]
    unsafe fn stream(self, to: *mut u8, row: Self::Ints) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Self::Ints>().write_unaligned(row) };
    }

    /// Stores past the caches, where the CPU can.
    ///
    /// # Safety
    /// `to` must be writable for 32 bytes, and a multiple of 16.
    #[inline(always)]
    unsafe fn stream_halves(self, to: *mut u8, halves: [u8; 2 * LANES]) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[u8; 2 * LANES]>().write_unaligned(halves) };
    }

    /// The first `bytes` bytes of a row, and zeros.
    ///
    /// # Safety
    /// `from` must be readable for `bytes` bytes, fewer than 64.
    #[inline(always)]
    unsafe fn load_first(self, from: *const u8, bytes: usize) -> Self::Ints {
        let mut first = [0_u8; ROW_BYTES];
        // SAFETY: the caller's promise, and `bytes` is less than the array's.
        unsafe { copy_nonoverlapping(from, first.as_mut_ptr(), bytes) };
        cast(first)
    }

    /// Stores the first `bytes` bytes of a row.
    ///
    /// # Safety
    /// `to` must be writable for `bytes` bytes, fewer than 64.
    #[inline(always)]
    unsafe fn store_first(self, to: *mut u8, bytes: usize, row: Self::Ints) {
        let first: [u8; ROW_BYTES] = cast(row);
        // SAFETY: the caller's promise, and `bytes` is less than the array's.
        unsafe { copy_nonoverlapping(first.as_ptr(), to, bytes) };
    }
}

/// Every CPU: the reference.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Simd for Portable {
    type Floats = [f32; LANES];
    type Ints = [u32; LANES];
    type Doubles = [f64; 8];
    type Eight<E: Format> = E;
    type Four<E: Format> = E;
}

/// Work that is compiled for each instruction set.
pub(crate) trait Job {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;

    /// Runs where there are no vectors.
    #[inline(always)]
    fn run_portable(self) -> Self::Output
    where
        Self: Sized,
    {
        self.run(Portable)
    }
}

/// Runs `job` with the instruction set `isa`.
#[inline(always)]
pub(crate) fn dispatch<J: Job>(isa: Isa, job: J) -> Result<J::Output, KernelError> {
    if !isa.is_available() {
        return Err(KernelError::Isa { isa });
    }
    Ok(match isa {
        // SAFETY: available, as was just seen.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2::run(job) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { avx512::run(job) },
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => unsafe { neon::run(job) },
        _ => job.run_portable(),
    })
}
