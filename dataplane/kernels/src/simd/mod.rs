//! Vectors of 16 lanes of 32 bits, alike on every instruction set, on which the kernels of codes are written once: lanes that
//! always number 16 make even sums the same bits everywhere.

mod portable;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use crate::{Isa, KernelError};

/// Elements of a row: one vector.
pub(crate) const LANES: usize = 16;

/// An instruction set. A value of it exists only on a CPU that has it, which makes the arithmetic safe. All operations round to
/// nearest even, [`Simd::fused`] once.
pub(crate) trait Simd: Copy {
    /// 16 lanes of f32.
    type Floats: Copy;
    /// 16 lanes of 32 bits.
    type Ints: Copy;
    /// 16 lanes of f64.
    type Doubles: Copy;

    fn floats(self, lanes: [f32; LANES]) -> Self::Floats;
    fn lanes(self, floats: Self::Floats) -> [f32; LANES];
    fn ints(self, lanes: [u32; LANES]) -> Self::Ints;
    fn doubles(self, lanes: [f64; LANES]) -> Self::Doubles;
    fn double_lanes(self, doubles: Self::Doubles) -> [f64; LANES];
    /// `sum + floats * by` in f64, rounded twice.
    fn accumulate(self, floats: Self::Floats, by: f64, sum: Self::Doubles) -> Self::Doubles;
    fn add(self, left: Self::Floats, right: Self::Floats) -> Self::Floats;
    fn sub(self, left: Self::Floats, right: Self::Floats) -> Self::Floats;
    fn mul(self, left: Self::Floats, right: Self::Floats) -> Self::Floats;
    /// `left * right + plus`, rounded once.
    fn fused(self, left: Self::Floats, right: Self::Floats, plus: Self::Floats) -> Self::Floats;
    fn bits(self, floats: Self::Floats) -> Self::Ints;
    fn of_bits(self, words: Self::Ints) -> Self::Floats;
    fn and(self, left: Self::Ints, right: Self::Ints) -> Self::Ints;
    fn or(self, left: Self::Ints, right: Self::Ints) -> Self::Ints;
    fn xor(self, left: Self::Ints, right: Self::Ints) -> Self::Ints;
    /// Wraps.
    fn plus(self, left: Self::Ints, right: Self::Ints) -> Self::Ints;
    /// The greater, unsigned.
    fn max(self, left: Self::Ints, right: Self::Ints) -> Self::Ints;
    /// The lesser, unsigned.
    fn min(self, left: Self::Ints, right: Self::Ints) -> Self::Ints;
    /// `by` less than 32.
    fn shl(self, words: Self::Ints, by: u32) -> Self::Ints;
    /// Zeros come in; `by` less than 32.
    fn shr(self, words: Self::Ints, by: u32) -> Self::Ints;
    /// The nearest float of each lane as a signed integer.
    fn signed(self, words: Self::Ints) -> Self::Floats;
    /// `yes` where `left > right`, `no` elsewhere and where one is NaN.
    fn where_above(
        self,
        left: Self::Floats,
        right: Self::Floats,
        yes: Self::Ints,
        no: Self::Ints,
    ) -> Self::Ints;
    /// `yes` where `left > right`, both signed, `no` elsewhere.
    fn where_exceeds(
        self,
        left: Self::Ints,
        right: Self::Ints,
        yes: Self::Ints,
        no: Self::Ints,
    ) -> Self::Ints;
    /// Bit `i`: lane `i` of `left` exceeds that of `right`, both signed.
    fn exceeding(self, left: Self::Ints, right: Self::Ints) -> u16;
    /// The lowest byte of each lane.
    fn narrow(self, words: Self::Ints) -> [u8; LANES];
    fn widen(self, bytes: [u8; LANES]) -> Self::Ints;
    fn widen_signed(self, bytes: [u8; LANES]) -> Self::Ints;
    /// Byte `i`: the lowest 4 bits of lane `i`, and above them those of lane `i + 8`. What lanes hold above must be 0.
    fn fold(self, words: Self::Ints) -> [u8; LANES / 2];
    /// The inverse of [`Simd::fold`].
    fn unfold(self, bytes: [u8; LANES / 2]) -> Self::Ints;
    /// The lower half of each lane, little-endian.
    fn narrow_halves(self, words: Self::Ints) -> [u8; 2 * LANES];
    fn widen_halves(self, halves: [u8; 2 * LANES]) -> Self::Ints;
    /// To binary16; a NaN stays one, with bits that depend on the CPU.
    fn to_f16(self, floats: Self::Floats) -> [u8; 2 * LANES];
    /// From binary16, as above.
    fn of_f16(self, halves: [u8; 2 * LANES]) -> Self::Floats;
    /// One stage of the Hadamard transform: the sum with lane `i ^ H` where `i & H` is 0, the difference from it elsewhere.
    fn butterfly<const H: usize>(self, floats: Self::Floats) -> Self::Floats;
    /// The entry at each lane's lowest 4 bits.
    fn lookup(self, words: Self::Ints, table: Self::Floats) -> Self::Floats;
    /// Flips the sign of lane `i` where bit `i` is set.
    fn negate(self, floats: Self::Floats, lanes: u16) -> Self::Floats;

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
    unsafe fn stream(self, to: *mut u8, row: Self::Floats) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Self::Floats>().write_unaligned(row) };
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

    #[inline(always)]
    fn splat(self, value: f32) -> Self::Floats {
        self.floats([value; LANES])
    }

    #[inline(always)]
    fn splat_int(self, value: u32) -> Self::Ints {
        self.ints([value; LANES])
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
    fn sum_doubles(self, doubles: Self::Doubles) -> f64 {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = self.double_lanes(doubles);
        let [a, b, c, d] = [(a + i) + (e + m), (b + j) + (f + n), (c + k) + (g + o), (d + l) + (h + p)];
        (a + c) + (b + d)
    }

    /// The greatest lane, unsigned.
    #[inline(always)]
    fn greatest(self, words: Self::Ints) -> u32 {
        let lanes = self.lanes(self.of_bits(words));
        lanes.iter().fold(0, |most, lane| most.max(lane.to_bits()))
    }
}

/// Work that is compiled for each instruction set.
pub(crate) trait Job {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs `job` with the instruction set `isa`.
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
        _ => job.run(portable::Portable),
    })
}
