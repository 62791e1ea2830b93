//! Rows in two registers: AVX2, F16C for binary16, and FMA.

use super::{Job, LANES, Simd, cast, plain};
use crate::reduce::{Format, Pair};
use core::mem::transmute;
use std::arch::x86_64::*;

/// Proof that the CPU has AVX2, F16C and FMA.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

/// # Safety
/// The CPU must have AVX2, F16C and FMA.
#[target_feature(enable = "avx2,f16c,fma")]
pub(super) unsafe fn run<J: Job>(job: J) -> J::Output {
    job.run(Avx2(()))
}

/// The lower 8 lanes, and the upper.
type Floats = [__m256; 2];
type Ints = [__m256i; 2];
type Doubles = [__m256d; 2];

plain!(__m256 __m256i __m256d);

#[inline(always)]
fn each<A, B>([low, high]: [A; 2], f: impl Fn(A) -> B) -> [B; 2] {
    [f(low), f(high)]
}

#[inline(always)]
fn both<A, B>([a, b]: [A; 2], [c, d]: [A; 2], f: impl Fn(A, A) -> B) -> [B; 2] {
    [f(a, c), f(b, d)]
}

/// `yes` where the mask's bytes have their top bit set.
#[inline(always)]
fn chosen(mask: Ints, [yes, yes_high]: Ints, [no, no_high]: Ints) -> Ints {
    let [low, high] = mask;
    // SAFETY: the registers exist, so the CPU has the instruction set.
    unsafe { [_mm256_blendv_epi8(no, yes, low), _mm256_blendv_epi8(no_high, yes_high, high)] }
}

/// The lower halves of 32-bit lanes whose upper halves are 0.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn packed([low, high]: Ints) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high)) }
}

/// The sum of 8 lanes: 4 apart, 2 apart, neighbours.
///
/// # Safety
/// The CPU must have AVX.
#[inline(always)]
pub(super) unsafe fn sum8(floats: __m256) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(floats), _mm256_extractf128_ps::<1>(floats));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

/// The sum of 4 lanes: 2 apart, neighbours.
///
/// # Safety
/// The CPU must have AVX.
#[inline(always)]
pub(super) unsafe fn sum4(doubles: __m256d) -> f64 {
    // SAFETY: the caller's promise.
    unsafe {
        let two = _mm_add_pd(_mm256_castpd256_pd128(doubles), _mm256_extractf128_pd::<1>(doubles));
        _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)))
    }
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

/// Products of complex numbers: (a + bi) times (c, d), less or more bi times (d, c).
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn product_pairs_ps(left: __m256, right: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let real = _mm256_mul_ps(_mm256_moveldup_ps(left), right);
        let imaginary = _mm256_mul_ps(_mm256_movehdup_ps(left), _mm256_permute_ps::<0b10_11_00_01>(right));
        _mm256_addsub_ps(real, imaginary)
    }
}

/// As above.
///
/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn product_pairs_pd(left: __m256d, right: __m256d) -> __m256d {
    // SAFETY: the caller's promise.
    unsafe {
        let real = _mm256_mul_pd(_mm256_movedup_pd(left), right);
        let imaginary = _mm256_mul_pd(_mm256_permute_pd::<0b1111>(left), _mm256_permute_pd::<0b0101>(right));
        _mm256_addsub_pd(real, imaginary)
    }
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
        _mm256_blendv_ps(value, _mm256_set1_ps(f32::from_bits(0x7fc0_0000)), unordered)
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
        _mm256_blendv_pd(value, _mm256_set1_pd(f64::from_bits(0x7ff8 << 48)), unordered)
    }
}

/// The lesser and the greater of two registers of floats, by an instruction set's intrinsics.
///
/// MIN and MAX instructions give their second operand where one is NaN, and where both are zeros. Taken in both orders and
/// joined by "or", the minimum's bits hold NaN and the lesser zero. The maximum needs "and" for the greater zero, which
/// loses NaN: it is put back.
macro_rules! extrema {
    ($($register:ty: $minimum:ident $maximum:ident = $min:ident $max:ident $or:ident $and:ident $nan_where_unordered:ident;)*) => {$(
        /// # Safety
        /// The CPU must have the instruction set.
        #[inline(always)]
        unsafe fn $minimum(left: $register, right: $register) -> $register {
            // SAFETY: the caller's promise.
            unsafe { $or($min(left, right), $min(right, left)) }
        }

        /// # Safety
        /// As above.
        #[inline(always)]
        unsafe fn $maximum(left: $register, right: $register) -> $register {
            // SAFETY: the caller's promise.
            unsafe { $nan_where_unordered($and($max(left, right), $max(right, left)), left, right) }
        }
    )*};
}
pub(super) use extrema;

extrema! {
    __m256: minimum_ps maximum_ps = _mm256_min_ps _mm256_max_ps _mm256_or_ps _mm256_and_ps nan_where_unordered_ps;
    __m256d: minimum_pd maximum_pd = _mm256_min_pd _mm256_max_pd _mm256_or_pd _mm256_and_pd nan_where_unordered_pd;
}

/// Asks for a line to write it. Without `prefetchw` a CPU of x86-64 does nothing.
#[inline(always)]
pub(super) fn prefetch_to_write(at: *const u8) {
    // SAFETY: reads and writes nothing, and never faults.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, readonly, preserves_flags));
    }
}

impl Simd for Avx2 {
    type Floats = Floats;
    type Ints = Ints;
    type Doubles = Doubles;
    type Eight<E: Format> = Pair<Pair<E>>;
    type Four<E: Format> = Pair<E>;

    lanewise! {
        Floats {
            add = _mm256_add_ps;
            sub = _mm256_sub_ps;
            mul = _mm256_mul_ps;
            div = _mm256_div_ps;
            minimum = minimum_ps;
            maximum = maximum_ps;
            multiply_pairs = product_pairs_ps;
        }
        Doubles {
            add_f64 = _mm256_add_pd;
            mul_f64 = _mm256_mul_pd;
            div_f64 = _mm256_div_pd;
            minimum_f64 = minimum_pd;
            maximum_f64 = maximum_pd;
            multiply_pairs_f64 = product_pairs_pd;
        }
        Ints {
            and = _mm256_and_si256;
            or = _mm256_or_si256;
            xor = _mm256_xor_si256;
            add_8 = _mm256_add_epi8;
            mul_8 = product_epi8;
            min_i8 = _mm256_min_epi8;
            max_i8 = _mm256_max_epi8;
            min_u8 = _mm256_min_epu8;
            max_u8 = _mm256_max_epu8;
            add_16 = _mm256_add_epi16;
            mul_16 = _mm256_mullo_epi16;
            min_i16 = _mm256_min_epi16;
            max_i16 = _mm256_max_epi16;
            min_u16 = _mm256_min_epu16;
            max_u16 = _mm256_max_epu16;
            add_32 = _mm256_add_epi32;
            mul_32 = _mm256_mullo_epi32;
            min_i32 = _mm256_min_epi32;
            max_i32 = _mm256_max_epi32;
            min_u32 = _mm256_min_epu32;
            max_u32 = _mm256_max_epu32;
            add_64 = _mm256_add_epi64;
            mul_64 = product_epi64;
            min_i64 = min_epi64;
            max_i64 = max_epi64;
            min_u64 = min_epu64;
            max_u64 = max_epu64;
        }
    }

    by! {
        one_nan(floats: Floats) -> Floats = each(floats, |a| nan_where_unordered_ps(a, a, a));
        one_nan_f64(doubles: Doubles) -> Doubles = each(doubles, |a| nan_where_unordered_pd(a, a, a));
        accumulate(floats: Floats, by: f64, sum: [Doubles; 2]) -> [Doubles; 2] = {
            let by = _mm256_set1_pd(by);
            let add = |floats, sum| _mm256_add_pd(sum, _mm256_mul_pd(_mm256_cvtps_pd(floats), by));
            let ([low, high], [[a, b], [c, d]]) = (floats, sum);
            [
                [add(_mm256_castps256_ps128(low), a), add(_mm256_extractf128_ps::<1>(low), b)],
                [add(_mm256_castps256_ps128(high), c), add(_mm256_extractf128_ps::<1>(high), d)],
            ]
        };
        fused(left: Floats, right: Floats, plus: Floats) -> Floats = {
            let ([a, b], [c, d], [e, f]) = (left, right, plus);
            [_mm256_fmadd_ps(a, c, e), _mm256_fmadd_ps(b, d, f)]
        };
        shl(words: Ints, by: u32) -> Ints =
            each(words, |a| _mm256_sll_epi32(a, _mm_cvtsi32_si128(by.cast_signed())));
        shr(words: Ints, by: u32) -> Ints =
            each(words, |a| _mm256_srl_epi32(a, _mm_cvtsi32_si128(by.cast_signed())));
        signed(words: Ints) -> Floats = each(words, |a| _mm256_cvtepi32_ps(a));
        where_above(left: Floats, right: Floats, yes: Ints, no: Ints) -> Ints =
            chosen(both(left, right, |a, b| _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b))), yes, no);
        where_exceeds(left: Ints, right: Ints, yes: Ints, no: Ints) -> Ints =
            chosen(both(left, right, |a, b| _mm256_cmpgt_epi32(a, b)), yes, no);
        exceeding(left: Ints, right: Ints) -> u16 = {
            let [low, high] = both(left, right, |a, b| {
                _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, b)))
            });
            (low | high << 8) as u16
        };
        narrow(words: Ints) -> [u8; LANES] = {
            let halves = packed(each(words, |a| _mm256_and_si256(a, _mm256_set1_epi32(0xff))));
            let (low, high) = (_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
            transmute(_mm_packus_epi16(low, high))
        };
        widen(bytes: [u8; LANES]) -> Ints = {
            let bytes: __m128i = transmute(bytes);
            [_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))]
        };
        widen_signed(bytes: [u8; LANES]) -> Ints = {
            let bytes: __m128i = transmute(bytes);
            [_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes))]
        };
        fold(words: Ints) -> [u8; LANES / 2] = {
            let [low, high] = words;
            let both = _mm256_or_si256(low, _mm256_slli_epi32::<4>(high));
            let halves = _mm_packus_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256::<1>(both));
            _mm_cvtsi128_si64(_mm_packus_epi16(halves, halves)).to_le_bytes()
        };
        unfold(bytes: [u8; LANES / 2]) -> Ints = {
            let both = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(bytes)));
            [_mm256_and_si256(both, _mm256_set1_epi32(15)), _mm256_srli_epi32::<4>(both)]
        };
        narrow_halves(words: Ints) -> [u8; 2 * LANES] =
            transmute(packed(each(words, |a| _mm256_and_si256(a, _mm256_set1_epi32(0xffff)))));
        widen_halves(halves: [u8; 2 * LANES]) -> Ints =
            each(transmute::<[u8; 2 * LANES], [__m128i; 2]>(halves), |a| _mm256_cvtepu16_epi32(a));
        to_f16(floats: Floats) -> [u8; 2 * LANES] = transmute::<[__m128i; 2], [u8; 2 * LANES]>(each(floats, |a| {
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a)
        }));
        of_f16(halves: [u8; 2 * LANES]) -> Floats =
            each(transmute::<[u8; 2 * LANES], [__m128i; 2]>(halves), |a| _mm256_cvtph_ps(a));
        lookup(words: Ints, table: Floats) -> Floats = {
            let [low, high] = table;
            each(words, |a| {
                let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(a));
                _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, a), _mm256_permutevar8x32_ps(high, a), upper)
            })
        };
        sum(floats: Floats) -> f32 = {
            let [low, high] = floats;
            sum8(_mm256_add_ps(low, high))
        };
        sum_f64(doubles: [Doubles; 2]) -> f64 = {
            let [[a, b], [c, d]] = doubles;
            sum4(_mm256_add_pd(_mm256_add_pd(a, c), _mm256_add_pd(b, d)))
        };
        prefetch(at: *const u8) -> () = _mm_prefetch::<_MM_HINT_T0>(at.cast());
        prefetch_write(at: *const u8) -> () = prefetch_to_write(at);
        fence() -> () = _mm_sfence();
        negate(floats: Floats, lanes: u16) -> Floats = {
            let [low, high] = floats;
            let word = i32::from(lanes);
            let flipped = |a, shifts| {
                let signs = _mm256_sllv_epi32(_mm256_set1_epi32(word), shifts);
                _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_and_si256(signs, _mm256_set1_epi32(i32::MIN))))
            };
            [
                flipped(low, _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24)),
                flipped(high, _mm256_setr_epi32(23, 22, 21, 20, 19, 18, 17, 16)),
            ]
        };
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8, [low, high]: Ints) {
        // SAFETY: the caller's promise.
        unsafe {
            _mm256_stream_si256(to.cast(), low);
            _mm256_stream_si256(to.add(32).cast(), high);
        }
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
    fn butterfly<const H: usize>(self, own: Floats) -> Floats {
        // SAFETY: as above.
        unsafe {
            match H {
                // Times 1 or -1 is exact: a fused sum is the sum.
                1 => each(own, |a| {
                    let signs = _mm256_setr_ps(1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0);
                    _mm256_fmadd_ps(a, signs, _mm256_permute_ps::<0b10_11_00_01>(a))
                }),
                2 => each(own, |a| {
                    let signs = _mm256_setr_ps(1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0);
                    _mm256_fmadd_ps(a, signs, _mm256_permute_ps::<0b01_00_11_10>(a))
                }),
                4 => each(own, |a| {
                    let signs = _mm256_setr_ps(1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0);
                    _mm256_fmadd_ps(a, signs, _mm256_permute2f128_ps::<1>(a, a))
                }),
                _ => {
                    let [low, high] = own;
                    [_mm256_add_ps(high, low), _mm256_sub_ps(low, high)]
                }
            }
        }
    }
}
