//! Arithmetic on what a pass holds in registers. It has the rules of each element type, one lane at a time, and the
//! reductions.

use half::{bf16, f16};
use harmonaize_abi::{Bool, Complex64, Complex128, F8E4M3, F8E5M2};

/// One value, or a vector of values, of the type that a pass computes in.
pub(crate) trait Lane: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn minimum(self, other: Self) -> Self;
    fn maximum(self, other: Self) -> Self;
    fn divide(self, by: &Divisor) -> Self;
    fn scale(self, by: &Factor) -> Self;
}

/// Defines methods that take two values, as expressions of both.
macro_rules! binary {
    (|$left:ident, $right:ident| $($name:ident = $result:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, other: Self) -> Self {
            let ($left, $right) = (self, other);
            $result
        }
    )*};
}
pub(crate) use binary;

/// A reduction, chosen when a kernel is compiled.
pub(crate) trait Fold {
    /// Whether it adds: what most programs wait for. Only sums are divided, and have loops of their own for few views.
    const ADDS: bool;

    fn fold<L: Lane>(left: L, right: L) -> L;
}

macro_rules! folds {
    ($($name:ident $method:ident $adds:literal;)*) => {$(
        pub(crate) struct $name;

        impl Fold for $name {
            const ADDS: bool = $adds;

            #[inline(always)]
            fn fold<L: Lane>(left: L, right: L) -> L {
                left.$method(right)
            }
        }
    )*};
}

folds! {
    Sum sum true;
    Product product false;
    Min minimum false;
    Max maximum false;
}

/// The number of ranks that an average divides by, 1 at least. The other fields stand in for it where no
/// divider is.
pub(crate) struct Divisor {
    pub(crate) ranks: u32,
    pub(crate) single: f32,
    pub(crate) double: f64,
    /// floor(2^64 * (2^l - n) / n) + 1 for n ranks, l being the least with 2^l >= n.
    pub(crate) multiplier: u64,
    /// min(l, 1).
    pub(crate) halve: u32,
    /// l - 1, or 0 if l is 0.
    pub(crate) shift: u32,
}

impl Divisor {
    /// `None` for 0.
    pub(crate) fn new(ranks: u32) -> Option<Self> {
        let width = u32::BITS - ranks.checked_sub(1)?.leading_zeros();
        let wide = u128::from(ranks);
        // Less than 2^64: (2^l - n) < n because 2^(l - 1) < n.
        let multiplier = ((((1 << width) - wide) << 64) / wide + 1) as u64;
        let (halve, shift) = (width.min(1), width.saturating_sub(1));
        Some(Self { ranks, single: ranks as f32, double: f64::from(ranks), multiplier, halve, shift })
    }
}

/// What a source is multiplied by, in each type that lanes are computed in.
#[derive(Clone, Copy)]
pub(crate) struct Factor {
    pub(crate) single: f32,
    pub(crate) double: f64,
    /// The whole part, of which a narrower integer has the lowest bits.
    pub(crate) whole: i64,
}

impl Factor {
    pub(crate) fn new(factor: f64) -> Self {
        Self { single: factor as f32, double: factor, whole: factor as i64 }
    }
}

macro_rules! integer_lanes {
    ($($integer:ty, $quotient:ty;)*) => {$(
        impl Lane for $integer {
            binary! {
                |a, b|
                sum = a.wrapping_add(b);
                product = a.wrapping_mul(b);
                minimum = Ord::min(a, b);
                maximum = Ord::max(a, b);
            }

            #[inline(always)]
            fn divide(self, by: &Divisor) -> Self {
                // The quotient is no further from 0 than the dividend: it fits. i64's divisor is positive: no overflow.
                (self as $quotient / by.ranks as $quotient) as Self
            }

            #[inline(always)]
            fn scale(self, by: &Factor) -> Self {
                self.wrapping_mul(by.whole as Self)
            }
        }
    )*};
}

integer_lanes! {
    i8, i64;
    u8, u64;
    i16, i64;
    u16, u64;
    i32, i64;
    u32, u64;
    i64, i64;
    u64, u64;
}

macro_rules! float_lanes {
    ($($float:ty, $factor:ident;)*) => {$(
        impl Lane for $float {
            binary! {
                |a, b|
                sum = a + b;
                product = a * b;
                minimum = if a.is_nan() || b.is_nan() {
                    Self::NAN
                } else if a < b || (a == b && a.is_sign_negative()) {
                    a
                } else {
                    b
                };
                maximum = if a.is_nan() || b.is_nan() {
                    Self::NAN
                } else if a > b || (a == b && a.is_sign_positive()) {
                    a
                } else {
                    b
                };
            }

            #[inline(always)]
            fn divide(self, by: &Divisor) -> Self {
                self / by.ranks as Self
            }

            #[inline(always)]
            fn scale(self, by: &Factor) -> Self {
                self * by.$factor
            }
        }
    )*};
}

float_lanes! {
    f32, single;
    f64, double;
}

/// Complex numbers: all but products are those of their parts.
macro_rules! complex_lanes {
    ($($complex:ident;)*) => {$(
        impl Lane for $complex {
            binary! {
                |a, b|
                sum = Self { re: a.re.sum(b.re), im: a.im.sum(b.im) };
                product = Self { re: a.re * b.re - a.im * b.im, im: a.re * b.im + a.im * b.re };
                minimum = Self { re: Lane::minimum(a.re, b.re), im: Lane::minimum(a.im, b.im) };
                maximum = Self { re: Lane::maximum(a.re, b.re), im: Lane::maximum(a.im, b.im) };
            }

            #[inline(always)]
            fn divide(self, by: &Divisor) -> Self {
                Self { re: self.re.divide(by), im: self.im.divide(by) }
            }

            #[inline(always)]
            fn scale(self, by: &Factor) -> Self {
                Self { re: self.re.scale(by), im: self.im.scale(by) }
            }
        }
    )*};
}

complex_lanes! {
    Complex64;
    Complex128;
}

/// The bits of a byte, each a number of 0 or 1. A product is "and", and so is the lesser. The greater is "or". A sum, without its
/// carry, is "exclusive or". They are neither divided nor scaled.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bits(u8);

impl Lane for Bits {
    binary! {
        |a, b|
        sum = Self(a.0 ^ b.0);
        product = Self(a.0 & b.0);
        minimum = Self(a.0 & b.0);
        maximum = Self(a.0 | b.0);
    }

    #[inline(always)]
    fn divide(self, _by: &Divisor) -> Self {
        self
    }

    #[inline(always)]
    fn scale(self, _by: &Factor) -> Self {
        self
    }
}

/// An element as it lies in memory, and the lane that it is computed in.
pub(crate) trait Element: Copy {
    type Lane: Lane;
    fn widen(self) -> Self::Lane;
    /// Rounds to nearest even; any NaN becomes the type's one NaN.
    fn narrow(lane: Self::Lane) -> Self;
}

macro_rules! elements {
    ($($element:ty: $lane:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Element for $element {
            type Lane = $lane;

            #[inline(always)]
            fn widen(self) -> $lane {
                $widen(self)
            }

            #[inline(always)]
            fn narrow(lane: $lane) -> Self {
                $narrow(lane)
            }
        }
    )*};
}

elements! {
    i8: i8, core::convert::identity, core::convert::identity;
    u8: u8, core::convert::identity, core::convert::identity;
    i16: i16, core::convert::identity, core::convert::identity;
    u16: u16, core::convert::identity, core::convert::identity;
    i32: i32, core::convert::identity, core::convert::identity;
    u32: u32, core::convert::identity, core::convert::identity;
    i64: i64, core::convert::identity, core::convert::identity;
    u64: u64, core::convert::identity, core::convert::identity;
    Bits: Bits, core::convert::identity, core::convert::identity;
    Bool: Bits, |element: Bool| Bits(element.get().into()), |lane: Bits| (lane.0 != 0).into();
    f32: f32, core::convert::identity, |lane: f32| if lane.is_nan() { f32::from_bits(0x7fc0_0000) } else { lane };
    f64: f64, core::convert::identity, |lane: f64| if lane.is_nan() { f64::from_bits(0x7ff8 << 48) } else { lane };
    f16: f32, f16::to_f32, |lane: f32| if lane.is_nan() { f16::from_bits(0x7e00) } else { f16::from_f32(lane) };
    F8E4M3: f32, F8E4M3::to_f32, F8E4M3::from_f32;
    F8E5M2: f32, F8E5M2::to_f32, F8E5M2::from_f32;
    Complex64: Complex64, core::convert::identity,
        |lane: Complex64| Complex64 { re: Element::narrow(lane.re), im: Element::narrow(lane.im) };
    Complex128: Complex128, core::convert::identity,
        |lane: Complex128| Complex128 { re: Element::narrow(lane.re), im: Element::narrow(lane.im) };
    bf16: f32, bf16::to_f32, |lane: f32| if lane.is_nan() { bf16::from_bits(0x7fc0) } else { bf16::from_f32(lane) };
}
