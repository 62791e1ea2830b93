//! 16 lanes in one register: AVX-512 F, BW, DQ and VL.

use super::avx2::{prefetch_to_write, sum4, sum8};
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
        #[allow(unused_unsafe)] // some bodies are made of safe functions alone
        fn $name(self, $($argument: $type),*) -> $result {
            // SAFETY: `self` proves that the CPU has the instruction set; what is transmuted has the same size, and any bits
            // are valid in it.
            unsafe { $body }
        }
    )*};
}

impl Simd for Avx512 {
    type Floats = __m512;
    type Ints = __m512i;
    type Doubles = [__m512d; 2];

    by! {
        floats(lanes: [f32; LANES]) -> __m512 = transmute(lanes);
        lanes(floats: __m512) -> [f32; LANES] = transmute(floats);
        ints(lanes: [u32; LANES]) -> __m512i = transmute(lanes);
        doubles(lanes: [f64; LANES]) -> [__m512d; 2] = transmute(lanes);
        double_lanes(doubles: [__m512d; 2]) -> [f64; LANES] = transmute(doubles);
        accumulate(floats: __m512, by: f64, sum: [__m512d; 2]) -> [__m512d; 2] = {
            let by = _mm512_set1_pd(by);
            let add = |floats, sum| _mm512_add_pd(sum, _mm512_mul_pd(_mm512_cvtps_pd(floats), by));
            let [low, high] = sum;
            [add(_mm512_castps512_ps256(floats), low), add(_mm512_extractf32x8_ps::<1>(floats), high)]
        };
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
        min(left: __m512i, right: __m512i) -> __m512i = _mm512_min_epu32(left, right);
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
        fold(words: __m512i) -> [u8; LANES / 2] = {
            let upper = _mm256_slli_epi32::<4>(_mm512_extracti32x8_epi32::<1>(words));
            let both = _mm256_or_si256(_mm512_castsi512_si256(words), upper);
            _mm_cvtsi128_si64(_mm256_cvtepi32_epi8(both)).to_le_bytes()
        };
        unfold(bytes: [u8; LANES / 2]) -> __m512i = {
            let both = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(bytes)));
            let low = _mm256_and_si256(both, _mm256_set1_epi32(15));
            _mm512_inserti32x8::<1>(_mm512_castsi256_si512(low), _mm256_srli_epi32::<4>(both))
        };
        narrow_halves(words: __m512i) -> [u8; 2 * LANES] = transmute(_mm512_cvtepi32_epi16(words));
        widen_halves(halves: [u8; 2 * LANES]) -> __m512i =
            _mm512_cvtepu16_epi32(transmute::<[u8; 2 * LANES], __m256i>(halves));
        to_f16(floats: __m512) -> [u8; 2 * LANES] =
            transmute(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(floats));
        of_f16(halves: [u8; 2 * LANES]) -> __m512 =
            _mm512_cvtph_ps(transmute::<[u8; 2 * LANES], __m256i>(halves));
        lookup(words: __m512i, table: __m512) -> __m512 = _mm512_permutexvar_ps(words, table);
        negate(floats: __m512, lanes: u16) -> __m512 = {
            let bits = _mm512_castps_si512(floats);
            _mm512_castsi512_ps(_mm512_mask_xor_epi32(bits, lanes, bits, _mm512_set1_epi32(i32::MIN)))
        };
        sum(floats: __m512) -> f32 = {
            let upper = _mm512_extractf32x8_ps::<1>(floats);
            sum8(_mm256_add_ps(_mm512_castps512_ps256(floats), upper))
        };
        sum_doubles(doubles: [__m512d; 2]) -> f64 = {
            let [low, high] = doubles;
            let sums = _mm512_add_pd(low, high);
            sum4(_mm256_add_pd(_mm512_castpd512_pd256(sums), _mm512_extractf64x4_pd::<1>(sums)))
        };
        prefetch(at: *const u8) -> () = _mm_prefetch::<_MM_HINT_T0>(at.cast());
        prefetch_write(at: *const u8) -> () = prefetch_to_write(at);
        fence() -> () = _mm_sfence();
        greatest(words: __m512i) -> u32 = _mm512_reduce_max_epu32(words);
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8, row: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_stream_ps(to.cast(), row) };
    }

    #[inline(always)]
    unsafe fn stream_halves(self, to: *mut u8, halves: [u8; 2 * LANES]) {
        // SAFETY: the caller's promise.
        unsafe {
            let [low, high] = transmute::<[u8; 2 * LANES], [__m128i; 2]>(halves);
            _mm_stream_si128(to.cast(), low);
            _mm_stream_si128(to.add(16).cast(), high);
        }
    }

    #[inline(always)]
    fn butterfly<const H: usize>(self, own: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let other = match H {
                1 => _mm512_permute_ps::<0b10_11_00_01>(own),
                2 => _mm512_permute_ps::<0b01_00_11_10>(own),
                4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(own, own),
                _ => _mm512_shuffle_f32x4::<0b01_00_11_10>(own, own),
            };
            let signs: [f32; LANES] = core::array::from_fn(|i| if i & H == 0 { 1.0 } else { -1.0 });
            // Times 1 or -1 is exact: a fused sum is the sum.
            _mm512_fmadd_ps(own, transmute::<[f32; LANES], __m512>(signs), other)
        }
    }
}
