//! Rows in four registers: aarch64's Advanced SIMD. Streaming stores are plain ones here.

use super::{Job, LANES, Simd, cast, plain};
use crate::reduce::{Format, Pair};
use core::mem::transmute;
use std::arch::aarch64::*;

/// Proof that the CPU has Advanced SIMD.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

/// # Safety
/// The CPU must have Advanced SIMD.
#[target_feature(enable = "neon")]
pub(super) unsafe fn run<J: Job>(job: J) -> J::Output {
    job.run(Neon(()))
}

/// Four lanes each, in order.
type Floats = [float32x4_t; 4];
type Ints = [uint32x4_t; 4];
/// Two lanes each, in order.
type Doubles = [float64x2_t; 4];

plain!(uint8x16_t int8x16_t uint16x8_t int16x8_t uint32x4_t int32x4_t uint64x2_t int64x2_t float32x4_t float64x2_t);

#[inline(always)]
fn each<A, B>([a, b, c, d]: [A; 4], f: impl Fn(A) -> B) -> [B; 4] {
    [f(a), f(b), f(c), f(d)]
}

#[inline(always)]
fn both<A, B>([a, b, c, d]: [A; 4], [e, f, g, h]: [A; 4], of: impl Fn(A, A) -> B) -> [B; 4] {
    [of(a, e), of(b, f), of(c, g), of(d, h)]
}

#[inline(always)]
fn chosen([a, b, c, d]: Ints, [e, f, g, h]: Ints, [i, j, k, l]: Ints) -> Ints {
    // SAFETY: the registers exist, so the CPU has the instruction set.
    unsafe { [vbslq_u32(a, e, i), vbslq_u32(b, f, j), vbslq_u32(c, g, k), vbslq_u32(d, h, l)] }
}

#[inline(always)]
fn exceeds(left: Ints, right: Ints) -> Ints {
    // SAFETY: as above.
    both(left, right, |a, b| unsafe { vcgtq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)) })
}

/// (a + b X) (c + d X) modulo X^2, X = 2^32: ac + (ad + bc) X.
///
/// # Safety
/// The CPU must have Advanced SIMD.
#[inline(always)]
unsafe fn product_u64(left: uint64x2_t, right: uint64x2_t) -> uint64x2_t {
    // SAFETY: the caller's promise.
    unsafe {
        let swapped = vrev64q_u32(vreinterpretq_u32_u64(right));
        let cross = vpaddlq_u32(vmulq_u32(vreinterpretq_u32_u64(left), swapped));
        vmlal_u32(vshlq_n_u64::<32>(cross), vmovn_u64(left), vmovn_u64(right))
    }
}

/// Products of complex numbers: (a + bi) times (c, d), less or more bi times (d, c).
///
/// # Safety
/// The CPU must have Advanced SIMD.
#[inline(always)]
unsafe fn product_pairs_f32(left: float32x4_t, right: float32x4_t) -> float32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let real = vmulq_f32(vtrn1q_f32(left, left), right);
        let imaginary = vmulq_f32(vtrn2q_f32(left, left), vrev64q_f32(right));
        let signs = vreinterpretq_u32_u64(vdupq_n_u64(1 << 31));
        vaddq_f32(real, vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(imaginary), signs)))
    }
}

/// As above.
///
/// # Safety
/// The CPU must have Advanced SIMD.
#[inline(always)]
unsafe fn product_pairs_f64(left: float64x2_t, right: float64x2_t) -> float64x2_t {
    // SAFETY: the caller's promise.
    unsafe {
        let real = vmulq_f64(vdupq_laneq_f64::<0>(left), right);
        let imaginary = vmulq_f64(vdupq_laneq_f64::<1>(left), vextq_f64::<1>(right, right));
        let signs = transmute::<[u64; 2], uint64x2_t>([1 << 63, 0]);
        vaddq_f64(real, vreinterpretq_f64_u64(veorq_u64(vreinterpretq_u64_f64(imaginary), signs)))
    }
}

/// The lesser or the greater lanes of 64 bits: `$compare` gives ones where the left is to be taken.
macro_rules! extrema {
    ($($name:ident: $register:ty = $compare:ident $select:ident;)*) => {$(
        /// # Safety
        /// The CPU must have Advanced SIMD.
        #[inline(always)]
        unsafe fn $name(left: $register, right: $register) -> $register {
            // SAFETY: the caller's promise.
            unsafe { $select($compare(left, right), left, right) }
        }
    )*};
}

extrema! {
    min_u64: uint64x2_t = vcltq_u64 vbslq_u64;
    max_u64: uint64x2_t = vcgtq_u64 vbslq_u64;
    min_i64: int64x2_t = vcltq_s64 vbslq_s64;
    max_i64: int64x2_t = vcgtq_s64 vbslq_s64;
}

impl Simd for Neon {
    type Floats = Floats;
    type Ints = Ints;
    type Doubles = Doubles;
    type Eight<E: Format> = Pair<E>;
    type Four<E: Format> = E;

    // FMIN and FMAX give NaN if either operand is, and hold -0 less than +0.
    lanewise! {
        Floats {
            add = vaddq_f32;
            sub = vsubq_f32;
            mul = vmulq_f32;
            div = vdivq_f32;
            minimum = vminq_f32;
            maximum = vmaxq_f32;
            multiply_pairs = product_pairs_f32;
        }
        Doubles {
            add_f64 = vaddq_f64;
            mul_f64 = vmulq_f64;
            div_f64 = vdivq_f64;
            minimum_f64 = vminq_f64;
            maximum_f64 = vmaxq_f64;
            multiply_pairs_f64 = product_pairs_f64;
        }
        Ints {
            and = vandq_u32;
            or = vorrq_u32;
            xor = veorq_u32;
            add_8 = vaddq_u8;
            mul_8 = vmulq_u8;
            min_i8 = vminq_s8;
            max_i8 = vmaxq_s8;
            min_u8 = vminq_u8;
            max_u8 = vmaxq_u8;
            add_16 = vaddq_u16;
            mul_16 = vmulq_u16;
            min_i16 = vminq_s16;
            max_i16 = vmaxq_s16;
            min_u16 = vminq_u16;
            max_u16 = vmaxq_u16;
            add_32 = vaddq_u32;
            mul_32 = vmulq_u32;
            min_i32 = vminq_s32;
            max_i32 = vmaxq_s32;
            min_u32 = vminq_u32;
            max_u32 = vmaxq_u32;
            add_64 = vaddq_u64;
            mul_64 = product_u64;
            min_i64 = min_i64;
            max_i64 = max_i64;
            min_u64 = min_u64;
            max_u64 = max_u64;
        }
    }

    by! {
        one_nan(floats: Floats) -> Floats =
            each(floats, |a| vbslq_f32(vceqq_f32(a, a), a, vdupq_n_f32(f32::from_bits(0x7fc0_0000))));
        one_nan_f64(doubles: Doubles) -> Doubles =
            each(doubles, |a| vbslq_f64(vceqq_f64(a, a), a, vdupq_n_f64(f64::from_bits(0x7ff8 << 48))));
        accumulate(floats: Floats, by: f64, sum: [Doubles; 2]) -> [Doubles; 2] = {
            let by = vdupq_n_f64(by);
            let add = |floats, sum| vaddq_f64(sum, vmulq_f64(vcvt_f64_f32(floats), by));
            let ([e, f, g, h], [[i, j, k, l], [m, n, o, p]]) = (floats, sum);
            let two = |a, low, high| [add(vget_low_f32(a), low), add(vget_high_f32(a), high)];
            cast([[two(e, i, j), two(f, k, l)], [two(g, m, n), two(h, o, p)]])
        };
        fused(left: Floats, right: Floats, plus: Floats) -> Floats = {
            let ([a, b, c, d], [e, f, g, h], [i, j, k, l]) = (left, right, plus);
            [vfmaq_f32(i, a, e), vfmaq_f32(j, b, f), vfmaq_f32(k, c, g), vfmaq_f32(l, d, h)]
        };
        shl(words: Ints, by: u32) -> Ints = each(words, |a| vshlq_u32(a, vdupq_n_s32(by.cast_signed())));
        shr(words: Ints, by: u32) -> Ints = each(words, |a| vshlq_u32(a, vdupq_n_s32(-by.cast_signed())));
        signed(words: Ints) -> Floats = each(words, |a| vcvtq_f32_s32(vreinterpretq_s32_u32(a)));
        where_above(left: Floats, right: Floats, yes: Ints, no: Ints) -> Ints =
            chosen(both(left, right, |a, b| vcgtq_f32(a, b)), yes, no);
        where_exceeds(left: Ints, right: Ints, yes: Ints, no: Ints) -> Ints =
            chosen(exceeds(left, right), yes, no);
        exceeding(left: Ints, right: Ints) -> u16 = {
            let places: Ints = transmute::<[u32; LANES], Ints>(core::array::from_fn(|i| 1 << i));
            let [a, b, c, d] = both(exceeds(left, right), places, |a, b| vandq_u32(a, b));
            vaddvq_u32(vorrq_u32(vorrq_u32(a, b), vorrq_u32(c, d))) as u16
        };
        narrow(words: Ints) -> [u8; LANES] = {
            let [a, b, c, d] = each(words, |a| vmovn_u32(a));
            transmute(vcombine_u8(vmovn_u16(vcombine_u16(a, b)), vmovn_u16(vcombine_u16(c, d))))
        };
        widen(bytes: [u8; LANES]) -> Ints = {
            let bytes: uint8x16_t = transmute(bytes);
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes)));
            [
                vmovl_u16(vget_low_u16(low)),
                vmovl_u16(vget_high_u16(low)),
                vmovl_u16(vget_low_u16(high)),
                vmovl_u16(vget_high_u16(high)),
            ]
        };
        widen_signed(bytes: [u8; LANES]) -> Ints = {
            let bytes: int8x16_t = transmute(bytes);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes)));
            transmute([
                vmovl_s16(vget_low_s16(low)),
                vmovl_s16(vget_high_s16(low)),
                vmovl_s16(vget_low_s16(high)),
                vmovl_s16(vget_high_s16(high)),
            ])
        };
        fold(words: Ints) -> [u8; LANES / 2] = {
            let [a, b, c, d] = words;
            let low = vmovn_u32(vsliq_n_u32::<4>(a, c));
            let high = vmovn_u32(vsliq_n_u32::<4>(b, d));
            transmute(vmovn_u16(vcombine_u16(low, high)))
        };
        unfold(bytes: [u8; LANES / 2]) -> Ints = {
            let both = vmovl_u8(transmute::<[u8; LANES / 2], uint8x8_t>(bytes));
            let (low, high) = (vmovl_u16(vget_low_u16(both)), vmovl_u16(vget_high_u16(both)));
            let mask = vdupq_n_u32(15);
            [vandq_u32(low, mask), vandq_u32(high, mask), vshrq_n_u32::<4>(low), vshrq_n_u32::<4>(high)]
        };
        narrow_halves(words: Ints) -> [u8; 2 * LANES] = {
            let [a, b, c, d] = each(words, |a| vmovn_u32(a));
            transmute([vcombine_u16(a, b), vcombine_u16(c, d)])
        };
        widen_halves(halves: [u8; 2 * LANES]) -> Ints =
            each(transmute::<[u8; 2 * LANES], [uint16x4_t; 4]>(halves), |a| vmovl_u16(a));
        to_f16(floats: Floats) -> [u8; 2 * LANES] =
            transmute::<[float16x4_t; 4], [u8; 2 * LANES]>(each(floats, |a| vcvt_f16_f32(a)));
        of_f16(halves: [u8; 2 * LANES]) -> Floats =
            each(transmute::<[u8; 2 * LANES], [float16x4_t; 4]>(halves), |a| vcvt_f32_f16(a));
        lookup(words: Ints, table: Floats) -> Floats = {
            let table: uint8x16x4_t = transmute(table);
            each(words, |a| {
                // The four bytes of an entry stand at 4 times its place.
                let places = vmulq_u32(vandq_u32(a, vdupq_n_u32(15)), vdupq_n_u32(0x0404_0404));
                let bytes = vaddq_u32(places, vdupq_n_u32(0x0302_0100));
                vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)))
            })
        };
        negate(floats: Floats, lanes: u16) -> Floats = {
            let shifts: [int32x4_t; 4] =
                transmute::<[i32; LANES], [int32x4_t; 4]>(core::array::from_fn(|i| 31 - i as i32));
            let word = vdupq_n_u32(u32::from(lanes));
            let signs = each(shifts, |shift| vandq_u32(vshlq_u32(word, shift), vdupq_n_u32(1 << 31)));
            both(floats, transmute::<Ints, Floats>(signs), |a, sign| {
                vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(sign)))
            })
        };
    }

    #[inline(always)]
    fn butterfly<const H: usize>(self, own: Floats) -> Floats {
        let [a, b, c, d] = own;
        // SAFETY: as above.
        unsafe {
            match H {
                // The second lane of each sum and difference is another's.
                1 => each(own, |a| {
                    let other = vrev64q_f32(a);
                    vtrn1q_f32(vaddq_f32(other, a), vrev64q_f32(vsubq_f32(other, a)))
                }),
                2 => each(own, |a| {
                    let other = vextq_f32::<2>(a, a);
                    let (sum, difference) = (vaddq_f32(other, a), vsubq_f32(other, a));
                    vcombine_f32(vget_low_f32(sum), vget_high_f32(difference))
                }),
                4 => [vaddq_f32(b, a), vsubq_f32(a, b), vaddq_f32(d, c), vsubq_f32(c, d)],
                _ => [vaddq_f32(c, a), vaddq_f32(d, b), vsubq_f32(a, c), vsubq_f32(b, d)],
            }
        }
    }
}
