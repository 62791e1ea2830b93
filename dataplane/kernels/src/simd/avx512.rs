//! 16 lanes in one register: AVX-512 F, BW, DQ and VL.

use super::avx2::sum8;
use super::{Job, LANES, Simd};
use core::mem::transmute;
use std::arch::x86_64::*;

/// Proof that the CPU has AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

/// # Safety
/// The CPU must have AVX-512 F, BW, DQ and VL.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn run<J: Job>(job: J) -> J::Output {
    job.run(Avx512(()))
}

/// A method's body: an expression of intrinsics.
macro_rules! by {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($argument: $type),*) -> $result {
            // SAFETY: `self` proves that the CPU has the instruction set; what is transmuted has the same size, and any bits
            // are valid in it.
            unsafe { $body }
        }
    )*};
}

impl Simd for Avx512 {
    type Floats = __m512;
    type Words = __m512i;

    by! {
        floats(lanes: [f32; LANES]) -> __m512 = transmute(lanes);
        lanes(floats: __m512) -> [f32; LANES] = transmute(floats);
        words(lanes: [u32; LANES]) -> __m512i = transmute(lanes);
        add(left: __m512, right: __m512) -> __m512 = _mm512_add_ps(left, right);
        sub(left: __m512, right: __m512) -> __m512 = _mm512_sub_ps(left, right);
        mul(left: __m512, right: __m512) -> __m512 = _mm512_mul_ps(left, right);
        fused(left: __m512, right: __m512, plus: __m512) -> __m512 = _mm512_fmadd_ps(left, right, plus);
        bits(floats: __m512) -> __m512i = _mm512_castps_si512(floats);
        of_bits(words: __m512i) -> __m512 = _mm512_castsi512_ps(words);
        and(left: __m512i, right: __m512i) -> __m512i = _mm512_and_si512(left, right);
        or(left: __m512i, right: __m512i) -> __m512i = _mm512_or_si512(left, right);
        xor(left: __m512i, right: __m512i) -> __m512i = _mm512_xor_si512(left, right);
        plus(left: __m512i, right: __m512i) -> __m512i = _mm512_add_epi32(left, right);
        max(left: __m512i, right: __m512i) -> __m512i = _mm512_max_epu32(left, right);
        shl(words: __m512i, by: u32) -> __m512i = _mm512_sll_epi32(words, _mm_cvtsi32_si128(by.cast_signed()));
        shr(words: __m512i, by: u32) -> __m512i = _mm512_srl_epi32(words, _mm_cvtsi32_si128(by.cast_signed()));
        signed(words: __m512i) -> __m512 = _mm512_cvtepi32_ps(words);
        where_above(left: __m512, right: __m512, yes: __m512i, no: __m512i) -> __m512i =
            _mm512_mask_blend_epi32(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(left, right), no, yes);
        where_exceeds(left: __m512i, right: __m512i, yes: __m512i, no: __m512i) -> __m512i =
            _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(left, right), no, yes);
        exceeding(left: __m512i, right: __m512i) -> u16 = _mm512_cmpgt_epi32_mask(left, right);
        narrow(words: __m512i) -> [u8; LANES] = transmute(_mm512_cvtepi32_epi8(words));
        widen(bytes: [u8; LANES]) -> __m512i = _mm512_cvtepu8_epi32(transmute::<[u8; LANES], __m128i>(bytes));
        widen_signed(bytes: [u8; LANES]) -> __m512i =
            _mm512_cvtepi8_epi32(transmute::<[u8; LANES], __m128i>(bytes));
        narrow_halves(words: __m512i) -> [u8; 2 * LANES] = transmute(_mm512_cvtepi32_epi16(words));
        widen_halves(halves: [u8; 2 * LANES]) -> __m512i =
            _mm512_cvtepu16_epi32(transmute::<[u8; 2 * LANES], __m256i>(halves));
        to_f16(floats: __m512) -> [u8; 2 * LANES] =
            transmute(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(floats));
        of_f16(halves: [u8; 2 * LANES]) -> __m512 =
            _mm512_cvtph_ps(transmute::<[u8; 2 * LANES], __m256i>(halves));
        lookup(words: __m512i, table: &[f32; LANES]) -> __m512 =
            _mm512_permutexvar_ps(words, transmute::<[f32; LANES], __m512>(*table));
        negate(floats: __m512, lanes: u16) -> __m512 = {
            let bits = _mm512_castps_si512(floats);
            _mm512_castsi512_ps(_mm512_mask_xor_epi32(bits, lanes, bits, _mm512_set1_epi32(i32::MIN)))
        };
        sum(floats: __m512) -> f32 = {
            let upper = _mm512_extractf32x8_ps::<1>(floats);
            sum8(_mm256_add_ps(_mm512_castps512_ps256(floats), upper))
        };
        prefetch(at: *const u8) -> () = _mm_prefetch::<_MM_HINT_T0>(at.cast());
        fence() -> () = _mm_sfence();
        greatest(words: __m512i) -> u32 = _mm512_reduce_max_epu32(words);
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8, row: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_stream_ps(to.cast(), row) };
    }

    #[inline(always)]
    fn butterfly<const H: usize>(self, own: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let (other, differ) = match H {
                1 => (_mm512_permute_ps::<0b10_11_00_01>(own), 0xaaaa),
                2 => (_mm512_permute_ps::<0b01_00_11_10>(own), 0xcccc),
                4 => (_mm512_shuffle_f32x4::<0b10_11_00_01>(own, own), 0xf0f0),
                _ => (_mm512_shuffle_f32x4::<0b01_00_11_10>(own, own), 0xff00),
            };
            _mm512_mask_sub_ps(_mm512_add_ps(other, own), differ, other, own)
        }
    }
}
