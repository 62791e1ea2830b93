//! Vectors of 64 bytes: AVX-512 F, BW, DQ and VL.

use super::{NAN_F32, NAN_F64, UPPER};
use crate::vector::{Ragged, Register, Vector, halves, integers, kernels};
use std::arch::x86_64::*;

kernels!("avx512f,avx512bw,avx512dq,avx512vl");

/// 64 bytes.
#[derive(Clone, Copy)]
struct Zmm(__m512i);

impl Register for Zmm {
    const BYTES: usize = 64;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { _mm512_loadu_si512(from.cast()) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_stream_si512(to.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: every x86-64 CPU has SSE.
        unsafe { _mm_sfence() }
    }
}

impl Ragged for Zmm {
    #[inline(always)]
    unsafe fn load_first(from: *const u8, bytes: usize) -> Self {
        // SAFETY: the caller's promise; masked bytes are not touched.
        Self(unsafe { _mm512_maskz_loadu_epi8(first(bytes), from.cast()) })
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise; masked bytes are not touched.
        unsafe { _mm512_mask_storeu_epi8(to.cast(), first(bytes), self.0) }
    }
}

/// The mask of the first `bytes` bytes, less than 64.
#[inline(always)]
fn first(bytes: usize) -> __mmask64 {
    (1 << bytes) - 1
}

integers! {
    I8: Zmm, [i8; 64], _mm512_add_epi8 product_epi8 _mm512_min_epi8 _mm512_max_epi8;
    U8: Zmm, [u8; 64], _mm512_add_epi8 product_epi8 _mm512_min_epu8 _mm512_max_epu8;
    I32: Zmm, [i32; 16], _mm512_add_epi32 _mm512_mullo_epi32 _mm512_min_epi32 _mm512_max_epi32;
    U32: Zmm, [u32; 16], _mm512_add_epi32 _mm512_mullo_epi32 _mm512_min_epu32 _mm512_max_epu32;
    I64: Zmm, [i64; 8], _mm512_add_epi64 _mm512_mullo_epi64 _mm512_min_epi64 _mm512_max_epi64;
    U64: Zmm, [u64; 8], _mm512_add_epi64 _mm512_mullo_epi64 _mm512_min_epu64 _mm512_max_epu64;
}

/// Bytes at even and at odd places, multiplied in lanes of 16 bits.
///
/// # Safety
/// The CPU must have AVX-512 BW.
#[inline(always)]
unsafe fn product_epi8(left: __m512i, right: __m512i) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let even = _mm512_mullo_epi16(left, right);
        let odd = _mm512_mullo_epi16(_mm512_srli_epi16::<8>(left), _mm512_srli_epi16::<8>(right));
        _mm512_mask_blend_epi8(0x5555_5555_5555_5555, _mm512_slli_epi16::<8>(odd), even)
    }
}

floats! {
    F32: Zmm, __m512, single, _mm512_castsi512_ps _mm512_castps_si512, _mm512_add_ps _mm512_mul_ps _mm512_div_ps
        _mm512_set1_ps, _mm512_min_ps _mm512_max_ps _mm512_or_ps _mm512_and_ps nan_where_unordered_ps;
    F64: Zmm, __m512d, double, _mm512_castsi512_pd _mm512_castpd_si512, _mm512_add_pd _mm512_mul_pd _mm512_div_pd
        _mm512_set1_pd, _mm512_min_pd _mm512_max_pd _mm512_or_pd _mm512_and_pd nan_where_unordered_pd;
}

/// `value`, and the one NaN where a lane of `left` or `right` is NaN.
///
/// # Safety
/// The CPU must have AVX-512 F.
#[inline(always)]
unsafe fn nan_where_unordered_ps(value: __m512, left: __m512, right: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let unordered = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(left, right);
        _mm512_mask_mov_ps(value, unordered, _mm512_set1_ps(f32::from_bits(NAN_F32)))
    }
}

/// `value`, and the one NaN where a lane of `left` or `right` is NaN.
///
/// # Safety
/// The CPU must have AVX-512 F.
#[inline(always)]
unsafe fn nan_where_unordered_pd(value: __m512d, left: __m512d, right: __m512d) -> __m512d {
    // SAFETY: the caller's promise.
    unsafe {
        let unordered = _mm512_cmp_pd_mask::<_CMP_UNORD_Q>(left, right);
        _mm512_mask_mov_pd(value, unordered, _mm512_set1_pd(f64::from_bits(NAN_F64)))
    }
}

halves! {
    F16 of F32;
    Bf16 of F32;
}

/// The lower 16 elements, then the upper.
impl Vector for F16 {
    type Register = Zmm;

    #[inline(always)]
    fn unpack(register: Zmm) -> Self {
        // SAFETY: the register exists, so the CPU has the instruction set.
        unsafe {
            let lower = _mm512_castsi512_si256(register.0);
            let upper = _mm512_extracti64x4_epi64::<1>(register.0);
            Self(F32(_mm512_cvtph_ps(lower)), F32(_mm512_cvtph_ps(upper)))
        }
    }

    #[inline(always)]
    fn pack(self) -> Zmm {
        // SAFETY: as above. Rounding is to nearest even, whatever the thread's control register says.
        unsafe {
            let lower = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0.one_nan().0);
            let upper = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1.one_nan().0);
            Zmm(_mm512_inserti64x4::<1>(_mm512_castsi256_si512(lower), upper))
        }
    }
}

/// The 16 elements at even places, then those at odd places.
impl Vector for Bf16 {
    type Register = Zmm;

    #[inline(always)]
    fn unpack(register: Zmm) -> Self {
        // SAFETY: the register exists, so the CPU has the instruction set.
        unsafe {
            let even = _mm512_slli_epi32::<16>(register.0);
            let odd = _mm512_and_si512(register.0, _mm512_set1_epi32(UPPER));
            Self(F32(_mm512_castsi512_ps(even)), F32(_mm512_castsi512_ps(odd)))
        }
    }

    #[inline(always)]
    fn pack(self) -> Zmm {
        // SAFETY: as above.
        unsafe {
            let even = _mm512_srli_epi32::<16>(rounded(self.0));
            let odd = _mm512_and_si512(rounded(self.1), _mm512_set1_epi32(UPPER));
            Zmm(_mm512_or_si512(even, odd))
        }
    }
}

/// Lanes whose upper 16 bits are the nearest bfloat16 (ties to even), in integers: VCVTNEPS2BF16 would flush subnormals.
///
/// # Safety
/// The CPU must have AVX-512 F.
#[inline(always)]
unsafe fn rounded(lanes: F32) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = _mm512_castps_si512(lanes.one_nan().0);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff))
    }
}
