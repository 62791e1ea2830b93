//! 16 lanes in four registers: aarch64's Advanced SIMD. Binary16 is the reference's: its conversion is no baseline feature of
//! every toolchain.

use super::portable::Portable;
use super::{Job, LANES, Simd};
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
type Doubles = [float64x2_t; 8];

/// A method's body: an expression of intrinsics, or one that is taken for each register.
macro_rules! by {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty = $body:expr;)*) => {$(
        #[inline(always)]
        #[allow(unused_unsafe)] // some bodies are made of other methods alone
        fn $name(self, $($argument: $type),*) -> $result {
            // SAFETY: `self` proves that the CPU has the instruction set; what is transmuted has the same size, and any bits
            // are valid in it.
            unsafe { $body }
        }
    )*};
}

#[inline(always)]
fn each<A: Copy, B>([a, b, c, d]: [A; 4], f: impl Fn(A) -> B) -> [B; 4] {
    [f(a), f(b), f(c), f(d)]
}

#[inline(always)]
fn both<A: Copy, B>([a, b, c, d]: [A; 4], [e, f, g, h]: [A; 4], of: impl Fn(A, A) -> B) -> [B; 4] {
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

impl Simd for Neon {
    type Floats = Floats;
    type Ints = Ints;
    type Doubles = Doubles;

    by! {
        floats(lanes: [f32; LANES]) -> Floats = transmute(lanes);
        lanes(floats: Floats) -> [f32; LANES] = transmute(floats);
        ints(lanes: [u32; LANES]) -> Ints = transmute(lanes);
        doubles(lanes: [f64; LANES]) -> Doubles = transmute(lanes);
        double_lanes(doubles: Doubles) -> [f64; LANES] = transmute(doubles);
        accumulate(floats: Floats, by: f64, sum: Doubles) -> Doubles = {
            let by = vdupq_n_f64(by);
            let add = |floats, sum| vaddq_f64(sum, vmulq_f64(vcvt_f64_f32(floats), by));
            let ([e, f, g, h], [i, j, k, l, m, n, o, p]) = (floats, sum);
            [
                add(vget_low_f32(e), i),
                add(vget_high_f32(e), j),
                add(vget_low_f32(f), k),
                add(vget_high_f32(f), l),
                add(vget_low_f32(g), m),
                add(vget_high_f32(g), n),
                add(vget_low_f32(h), o),
                add(vget_high_f32(h), p),
            ]
        };
        add(left: Floats, right: Floats) -> Floats = both(left, right, |a, b| vaddq_f32(a, b));
        sub(left: Floats, right: Floats) -> Floats = both(left, right, |a, b| vsubq_f32(a, b));
        mul(left: Floats, right: Floats) -> Floats = both(left, right, |a, b| vmulq_f32(a, b));
        fused(left: Floats, right: Floats, plus: Floats) -> Floats = {
            let ([a, b, c, d], [e, f, g, h], [i, j, k, l]) = (left, right, plus);
            [vfmaq_f32(i, a, e), vfmaq_f32(j, b, f), vfmaq_f32(k, c, g), vfmaq_f32(l, d, h)]
        };
        bits(floats: Floats) -> Ints = each(floats, |a| vreinterpretq_u32_f32(a));
        of_bits(words: Ints) -> Floats = each(words, |a| vreinterpretq_f32_u32(a));
        and(left: Ints, right: Ints) -> Ints = both(left, right, |a, b| vandq_u32(a, b));
        or(left: Ints, right: Ints) -> Ints = both(left, right, |a, b| vorrq_u32(a, b));
        xor(left: Ints, right: Ints) -> Ints = both(left, right, |a, b| veorq_u32(a, b));
        plus(left: Ints, right: Ints) -> Ints = both(left, right, |a, b| vaddq_u32(a, b));
        max(left: Ints, right: Ints) -> Ints = both(left, right, |a, b| vmaxq_u32(a, b));
        min(left: Ints, right: Ints) -> Ints = both(left, right, |a, b| vminq_u32(a, b));
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
            Portable.to_f16(transmute::<Floats, [f32; LANES]>(floats));
        of_f16(halves: [u8; 2 * LANES]) -> Floats =
            transmute::<[f32; LANES], Floats>(Portable.of_f16(halves));
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
