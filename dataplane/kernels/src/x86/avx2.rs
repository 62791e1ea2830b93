//! Vectors of 32 bytes: AVX2, and F16C for binary16.

use super::{NAN_F32, NAN_F64, UPPER};
use crate::vector::{Ragged, Register, Vector, halves, integers, kernels};
use std::arch::x86_64::*;
use std::ptr::copy_nonoverlapping;

kernels!("avx2,f16c");

/// 32 bytes.
#[derive(Clone, Copy)]
struct Ymm(__m256i);

impl Register for Ymm {
    const BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm256_loadu_si256(from.cast()) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_si256(to.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_stream_si256(to.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: every x86-64 CPU has SSE.
        unsafe { _mm_sfence() }
    }
}

impl Ragged for Ymm {
    #[inline(always)]
    unsafe fn load_first(from: *const u8, bytes: usize) -> Self {
        let mut first = [0_u8; Self::BYTES];
        // SAFETY: the caller's promise, and `bytes` is less than the array's.
        unsafe {
            copy_nonoverlapping(from, first.as_mut_ptr(), bytes);
            Self::load(first.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut u8, bytes: usize) {
        let mut first = [0_u8; Self::BYTES];
        // SAFETY: the caller's promise, and `bytes` is less than the array's.
        unsafe {
            self.store(first.as_mut_ptr());
            copy_nonoverlapping(first.as_ptr(), to, bytes);
        }
    }
}

integers! {
    I8: Ymm, [i8; 32], _mm256_add_epi8 product_epi8 _mm256_min_epi8 _mm256_max_epi8;
    U8: Ymm, [u8; 32], _mm256_add_epi8 product_epi8 _mm256_min_epu8 _mm256_max_epu8;
    I32: Ymm, [i32; 8], _mm256_add_epi32 _mm256_mullo_epi32 _mm256_min_epi32 _mm256_max_epi32;
    U32: Ymm, [u32; 8], _mm256_add_epi32 _mm256_mullo_epi32 _mm256_min_epu32 _mm256_max_epu32;
    I64: Ymm, [i64; 4], _mm256_add_epi64 product_epi64 min_epi64 max_epi64;
    U64: Ymm, [u64; 4], _mm256_add_epi64 product_epi64 min_epu64 max_epu64;
}

/// Bytes at even and at odd places, multiplied in lanes of 16 bits.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn product_epi8(left: __m256i, right: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let even = _mm256_mullo_epi16(left, right);
        let odd = _mm256_mullo_epi16(_mm256_srli_epi16::<8>(left), _mm256_srli_epi16::<8>(right));
        _mm256_or_si256(_mm256_slli_epi16::<8>(odd), _mm256_and_si256(even, _mm256_set1_epi16(0xff)))
    }
}

/// (a + b X) (c + d X) modulo X^2, X = 2^32: ac + (ad + bc) X.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn product_epi64(left: __m256i, right: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let cross = _mm256_mullo_epi32(left, _mm256_shuffle_epi32::<0b10_11_00_01>(right));
        let cross = _mm256_add_epi32(cross, _mm256_srli_epi64::<32>(cross));
        _mm256_add_epi64(_mm256_mul_epu32(left, right), _mm256_slli_epi64::<32>(cross))
    }
}

/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn min_epi64(left: __m256i, right: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_blendv_epi8(left, right, _mm256_cmpgt_epi64(left, right)) }
}

/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn max_epi64(left: __m256i, right: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_blendv_epi8(right, left, _mm256_cmpgt_epi64(left, right)) }
}

/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn min_epu64(left: __m256i, right: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_blendv_epi8(left, right, greater_epu64(left, right)) }
}

/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn max_epu64(left: __m256i, right: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_blendv_epi8(right, left, greater_epu64(left, right)) }
}

/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn greater_epu64(left: __m256i, right: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let sign = _mm256_set1_epi64x(i64::MIN);
        _mm256_cmpgt_epi64(_mm256_xor_si256(left, sign), _mm256_xor_si256(right, sign))
    }
}

floats! {
    F32: Ymm, __m256, single, _mm256_castsi256_ps _mm256_castps_si256, _mm256_add_ps _mm256_mul_ps _mm256_div_ps
        _mm256_set1_ps, _mm256_min_ps _mm256_max_ps _mm256_or_ps _mm256_and_ps nan_where_unordered_ps;
    F64: Ymm, __m256d, double, _mm256_castsi256_pd _mm256_castpd_si256, _mm256_add_pd _mm256_mul_pd _mm256_div_pd
        _mm256_set1_pd, _mm256_min_pd _mm256_max_pd _mm256_or_pd _mm256_and_pd nan_where_unordered_pd;
}

/// `value`, and the one NaN where a lane of `left` or `right` is NaN.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn nan_where_unordered_ps(value: __m256, left: __m256, right: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let unordered = _mm256_cmp_ps::<_CMP_UNORD_Q>(left, right);
        _mm256_blendv_ps(value, _mm256_set1_ps(f32::from_bits(NAN_F32)), unordered)
    }
}

/// `value`, and the one NaN where a lane of `left` or `right` is NaN.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn nan_where_unordered_pd(value: __m256d, left: __m256d, right: __m256d) -> __m256d {
    // SAFETY: the caller's promise.
    unsafe {
        let unordered = _mm256_cmp_pd::<_CMP_UNORD_Q>(left, right);
        _mm256_blendv_pd(value, _mm256_set1_pd(f64::from_bits(NAN_F64)), unordered)
    }
}

halves! {
    F16 of F32;
    Bf16 of F32;
}

/// The lower 8 elements, then the upper.
impl Vector for F16 {
    type Register = Ymm;

    #[inline(always)]
    fn unpack(register: Ymm) -> Self {
        // SAFETY: the register exists, so the CPU has the instruction set.
        unsafe {
            let lower = _mm256_castsi256_si128(register.0);
            let upper = _mm256_extracti128_si256::<1>(register.0);
            Self(F32(_mm256_cvtph_ps(lower)), F32(_mm256_cvtph_ps(upper)))
        }
    }

    #[inline(always)]
    fn pack(self) -> Ymm {
        // SAFETY: as above. Rounding is to nearest even, whatever the thread's control register says.
        unsafe {
            let lower = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0.one_nan().0);
            let upper = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1.one_nan().0);
            Ymm(_mm256_set_m128i(upper, lower))
        }
    }
}

/// The 8 elements at even places, then those at odd places.
impl Vector for Bf16 {
    type Register = Ymm;

    #[inline(always)]
    fn unpack(register: Ymm) -> Self {
        // SAFETY: the register exists, so the CPU has the instruction set.
        unsafe {
            let even = _mm256_slli_epi32::<16>(register.0);
            let odd = _mm256_and_si256(register.0, _mm256_set1_epi32(UPPER));
            Self(F32(_mm256_castsi256_ps(even)), F32(_mm256_castsi256_ps(odd)))
        }
    }

    #[inline(always)]
    fn pack(self) -> Ymm {
        // SAFETY: as above.
        unsafe {
            let even = _mm256_srli_epi32::<16>(rounded(self.0));
            let odd = _mm256_and_si256(rounded(self.1), _mm256_set1_epi32(UPPER));
            Ymm(_mm256_or_si256(even, odd))
        }
    }
}

/// Lanes whose upper 16 bits are the nearest bfloat16, ties to even.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn rounded(lanes: F32) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm256_castps_si256(lanes.one_nan().0);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff))
    }
}
