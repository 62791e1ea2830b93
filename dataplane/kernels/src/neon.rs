//! Vectors of 16 bytes: aarch64's Advanced SIMD, which every aarch64 CPU has. Streaming stores are plain ones here.

use crate::element::{Divisor, Lane};
use crate::vector::{Ragged, Register, Vector, halves, integers, kernels};
use std::arch::aarch64::*;
use std::ptr::copy_nonoverlapping;

kernels!("neon");

/// 16 bytes.
#[derive(Clone, Copy)]
struct Quad(uint8x16_t);

impl Register for Quad {
    const BYTES: usize = 16;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { vld1q_u8(from) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { vst1q_u8(to, self.0) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { self.store(to) }
    }

    #[inline(always)]
    unsafe fn fence() {}
}

impl Ragged for Quad {
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
    I8: Quad, [i8; 16], sum_8 product_8 min_i8 max_i8;
    U8: Quad, [u8; 16], sum_8 product_8 vminq_u8 vmaxq_u8;
    I32: Quad, [i32; 4], sum_32 product_32 min_i32 max_i32;
    U32: Quad, [u32; 4], sum_32 product_32 min_u32 max_u32;
    I64: Quad, [i64; 2], sum_64 product_64 min_i64 max_i64;
    U64: Quad, [u64; 2], sum_64 product_64 min_u64 max_u64;
}

/// Intrinsics on other lanes than bytes, and what takes several, as functions of bytes.
macro_rules! of_bytes {
    ($($name:ident: $from:ident, |$left:ident, $right:ident| $result:expr, $to:expr;)*) => {$(
        /// # Safety
        /// The CPU must have Advanced SIMD.
        #[inline(always)]
        unsafe fn $name(left: uint8x16_t, right: uint8x16_t) -> uint8x16_t {
            // SAFETY: the caller's promise.
            unsafe {
                let ($left, $right) = ($from(left), $from(right));
                $to($result)
            }
        }
    )*};
}

of_bytes! {
    sum_8: identity, |a, b| vaddq_u8(a, b), identity;
    product_8: identity, |a, b| vmulq_u8(a, b), identity;
    min_i8: vreinterpretq_s8_u8, |a, b| vminq_s8(a, b), vreinterpretq_u8_s8;
    max_i8: vreinterpretq_s8_u8, |a, b| vmaxq_s8(a, b), vreinterpretq_u8_s8;
    sum_32: vreinterpretq_u32_u8, |a, b| vaddq_u32(a, b), vreinterpretq_u8_u32;
    product_32: vreinterpretq_u32_u8, |a, b| vmulq_u32(a, b), vreinterpretq_u8_u32;
    min_u32: vreinterpretq_u32_u8, |a, b| vminq_u32(a, b), vreinterpretq_u8_u32;
    max_u32: vreinterpretq_u32_u8, |a, b| vmaxq_u32(a, b), vreinterpretq_u8_u32;
    min_i32: vreinterpretq_s32_u8, |a, b| vminq_s32(a, b), vreinterpretq_u8_s32;
    max_i32: vreinterpretq_s32_u8, |a, b| vmaxq_s32(a, b), vreinterpretq_u8_s32;
    sum_64: vreinterpretq_u64_u8, |a, b| vaddq_u64(a, b), vreinterpretq_u8_u64;
    product_64: vreinterpretq_u64_u8, |a, b| product_u64(a, b), vreinterpretq_u8_u64;
    min_u64: vreinterpretq_u64_u8, |a, b| vbslq_u64(vcltq_u64(a, b), a, b), vreinterpretq_u8_u64;
    max_u64: vreinterpretq_u64_u8, |a, b| vbslq_u64(vcgtq_u64(a, b), a, b), vreinterpretq_u8_u64;
    min_i64: vreinterpretq_s64_u8, |a, b| vbslq_s64(vcltq_s64(a, b), a, b), vreinterpretq_u8_s64;
    max_i64: vreinterpretq_s64_u8, |a, b| vbslq_s64(vcgtq_s64(a, b), a, b), vreinterpretq_u8_s64;
}

#[inline(always)]
fn identity(bytes: uint8x16_t) -> uint8x16_t {
    bytes
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

/// A vector of floats in one register. FMIN and FMAX give NaN if either operand is, and hold -0 less than +0.
macro_rules! floats {
    ($($name:ident: $raw:ident, $nan:expr, $divisor:ident, $from:ident $to:ident, $add:ident $mul:ident $div:ident $min:ident
        $max:ident, $set:ident $equal:ident $select:ident;)*) => {$(
        #[derive(Clone, Copy)]
        struct $name($raw);

        impl $name {
            /// The type's one NaN where a lane is NaN.
            #[inline(always)]
            fn one_nan(self) -> Self {
                // SAFETY: made from a register, which exists, so the CPU has the instruction set.
                Self(unsafe { $select($equal(self.0, self.0), self.0, $set($nan)) })
            }
        }

        impl Vector for $name {
            type Register = Quad;

            #[inline(always)]
            fn unpack(register: Quad) -> Self {
                // SAFETY: the register exists, so the CPU has the instruction set.
                Self(unsafe { $from(register.0) })
            }

            #[inline(always)]
            fn pack(self) -> Quad {
                // SAFETY: as above.
                Quad(unsafe { $to(self.one_nan().0) })
            }
        }

        impl Lane for $name {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                // SAFETY: made from a register, which exists, so the CPU has the instruction set.
                Self(unsafe { $add(self.0, other.0) })
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                // SAFETY: as above.
                Self(unsafe { $mul(self.0, other.0) })
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                // SAFETY: as above.
                Self(unsafe { $min(self.0, other.0) })
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                // SAFETY: as above.
                Self(unsafe { $max(self.0, other.0) })
            }

            #[inline(always)]
            fn divide(self, by: &Divisor) -> Self {
                // SAFETY: as above.
                Self(unsafe { $div(self.0, $set(by.$divisor)) })
            }
        }
    )*};
}

floats! {
    F32: float32x4_t, f32::from_bits(0x7fc0_0000), single, vreinterpretq_f32_u8 vreinterpretq_u8_f32, vaddq_f32 vmulq_f32
        vdivq_f32 vminq_f32 vmaxq_f32, vdupq_n_f32 vceqq_f32 vbslq_f32;
    F64: float64x2_t, f64::from_bits(0x7ff8 << 48), double, vreinterpretq_f64_u8 vreinterpretq_u8_f64, vaddq_f64 vmulq_f64
        vdivq_f64 vminq_f64 vmaxq_f64, vdupq_n_f64 vceqq_f64 vbslq_f64;
}

halves! {
    F16 of F32;
    Bf16 of F32;
}

/// The lower 4 elements, then the upper.
impl Vector for F16 {
    type Register = Quad;

    #[inline(always)]
    fn unpack(register: Quad) -> Self {
        // SAFETY: the register exists, so the CPU has the instruction set.
        unsafe {
            let elements = vreinterpretq_f16_u8(register.0);
            Self(F32(vcvt_f32_f16(vget_low_f16(elements))), F32(vcvt_high_f32_f16(elements)))
        }
    }

    #[inline(always)]
    fn pack(self) -> Quad {
        // SAFETY: as above.
        unsafe {
            let lower = vcvt_f16_f32(self.0.one_nan().0);
            Quad(vreinterpretq_u8_f16(vcvt_high_f16_f32(lower, self.1.one_nan().0)))
        }
    }
}

/// The 4 elements at even places, then those at odd places.
impl Vector for Bf16 {
    type Register = Quad;

    #[inline(always)]
    fn unpack(register: Quad) -> Self {
        // SAFETY: the register exists, so the CPU has the instruction set.
        unsafe {
            let pairs = vreinterpretq_u32_u8(register.0);
            let odd = vandq_u32(pairs, vdupq_n_u32(0xffff_0000));
            Self(F32(vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs))), F32(vreinterpretq_f32_u32(odd)))
        }
    }

    #[inline(always)]
    fn pack(self) -> Quad {
        // SAFETY: as above.
        unsafe {
            // The odd places' upper halves, with the even places' inserted below.
            Quad(vreinterpretq_u8_u32(vsriq_n_u32::<16>(rounded(self.1), rounded(self.0))))
        }
    }
}

/// Lanes whose upper 16 bits are the nearest bfloat16, ties to even.
///
/// # Safety
/// The CPU must have Advanced SIMD.
#[inline(always)]
unsafe fn rounded(lanes: F32) -> uint32x4_t {
    // SAFETY: the caller's promise.
    unsafe {
        let bits = vreinterpretq_u32_f32(lanes.one_nan().0);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff))
    }
}
