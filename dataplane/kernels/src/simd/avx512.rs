//! Rows in one register: AVX-512 F, BW, DQ and VL.

use super::avx2::{extrema, prefetch_to_write, sum4, sum8};
use super::{Job, LANES, Simd, cast, plain};
use crate::reduce::{Format, Pair};
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

plain!(__m512 __m512i __m512d);

#[inline(always)]
fn both<A, B>(left: A, right: A, f: impl Fn(A, A) -> B) -> B {
    f(left, right)
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

/// Products of complex numbers: (a + bi) times (c, d), less or more bi times (d, c).
///
/// # Safety
/// The CPU must have AVX-512 F.
#[inline(always)]
unsafe fn product_pairs_ps(left: __m512, right: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let real = _mm512_mul_ps(_mm512_moveldup_ps(left), right);
        let imaginary = _mm512_mul_ps(_mm512_movehdup_ps(left), _mm512_permute_ps::<0b10_11_00_01>(right));
        // Times 1 is exact: a fused difference is the difference.
        _mm512_fmaddsub_ps(real, _mm512_set1_ps(1.0), imaginary)
    }
}

/// As above.
///
/// # Safety
/// The CPU must have AVX-512 F.
#[inline(always)]
unsafe fn product_pairs_pd(left: __m512d, right: __m512d) -> __m512d {
    // SAFETY: the caller's promise.
    unsafe {
        let real = _mm512_mul_pd(_mm512_movedup_pd(left), right);
        let imaginary = _mm512_mul_pd(_mm512_permute_pd::<0xff>(left), _mm512_permute_pd::<0x55>(right));
        _mm512_fmaddsub_pd(real, _mm512_set1_pd(1.0), imaginary)
    }
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
        _mm512_mask_mov_ps(value, unordered, _mm512_set1_ps(f32::from_bits(0x7fc0_0000)))
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
        _mm512_mask_mov_pd(value, unordered, _mm512_set1_pd(f64::from_bits(0x7ff8 << 48)))
    }
}

extrema! {
    __m512: minimum_ps maximum_ps = _mm512_min_ps _mm512_max_ps _mm512_or_ps _mm512_and_ps nan_where_unordered_ps;
    __m512d: minimum_pd maximum_pd = _mm512_min_pd _mm512_max_pd _mm512_or_pd _mm512_and_pd nan_where_unordered_pd;
}

/// The mask of the first `bytes` bytes, less than 64.
#[inline(always)]
fn first(bytes: usize) -> __mmask64 {
    (1 << bytes) - 1
}

impl Simd for Avx512 {
    type Floats = __m512;
    type Ints = __m512i;
    type Doubles = __m512d;
    type Eight<E: Format> = Pair<Pair<Pair<E>>>;
    type Four<E: Format> = Pair<Pair<E>>;

    lanewise! {
        __m512 {
            add = _mm512_add_ps;
            sub = _mm512_sub_ps;
            mul = _mm512_mul_ps;
            div = _mm512_div_ps;
            minimum = minimum_ps;
            maximum = maximum_ps;
            multiply_pairs = product_pairs_ps;
        }
        __m512d {
            add_f64 = _mm512_add_pd;
            mul_f64 = _mm512_mul_pd;
            div_f64 = _mm512_div_pd;
            minimum_f64 = minimum_pd;
            maximum_f64 = maximum_pd;
            multiply_pairs_f64 = product_pairs_pd;
        }
        __m512i {
            and = _mm512_and_si512;
            or = _mm512_or_si512;
            xor = _mm512_xor_si512;
            add_8 = _mm512_add_epi8;
            mul_8 = product_epi8;
            min_i8 = _mm512_min_epi8;
            max_i8 = _mm512_max_epi8;
            min_u8 = _mm512_min_epu8;
            max_u8 = _mm512_max_epu8;
            add_16 = _mm512_add_epi16;
            mul_16 = _mm512_mullo_epi16;
            min_i16 = _mm512_min_epi16;
            max_i16 = _mm512_max_epi16;
            min_u16 = _mm512_min_epu16;
            max_u16 = _mm512_max_epu16;
            add_32 = _mm512_add_epi32;
            mul_32 = _mm512_mullo_epi32;
            min_i32 = _mm512_min_epi32;
            max_i32 = _mm512_max_epi32;
            min_u32 = _mm512_min_epu32;
            max_u32 = _mm512_max_epu32;
            add_64 = _mm512_add_epi64;
            mul_64 = _mm512_mullo_epi64;
            min_i64 = _mm512_min_epi64;
            max_i64 = _mm512_max_epi64;
            min_u64 = _mm512_min_epu64;
            max_u64 = _mm512_max_epu64;
        }
    }

    by! {
        one_nan(floats: __m512) -> __m512 = nan_where_unordered_ps(floats, floats, floats);
        one_nan_f64(doubles: __m512d) -> __m512d = nan_where_unordered_pd(doubles, doubles, doubles);
        accumulate(floats: __m512, by: f64, sum: [__m512d; 2]) -> [__m512d; 2] = {
            let by = _mm512_set1_pd(by);
            let add = |floats, sum| _mm512_add_pd(sum, _mm512_mul_pd(_mm512_cvtps_pd(floats), by));
            let [low, high] = sum;
            [add(_mm512_castps512_ps256(floats), low), add(_mm512_extractf32x8_ps::<1>(floats), high)]
        };
        fused(left: __m512, right: __m512, plus: __m512) -> __m512 = _mm512_fmadd_ps(left, right, plus);
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
        sum_f64(doubles: [__m512d; 2]) -> f64 = {
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
    unsafe fn stream(self, to: *mut u8, row: __m512i) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_stream_si512(to.cast(), row) };
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
    unsafe fn load_first(self, from: *const u8, bytes: usize) -> __m512i {
        // SAFETY: the caller's promise; masked bytes are not touched.
        unsafe { _mm512_maskz_loadu_epi8(first(bytes), from.cast()) }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut u8, bytes: usize, row: __m512i) {
        // SAFETY: the caller's promise; masked bytes are not touched.
        unsafe { _mm512_mask_storeu_epi8(to.cast(), first(bytes), row) };
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
