//! Arithmetic on what a pass holds in registers: the rules of each element type, one lane at a time, and the reductions.

use half::{bf16, f16};

/// One value, or a vector of values, of the type that a pass computes in.
pub(crate) trait Lane: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn minimum(self, other: Self) -> Self;
    fn maximum(self, other: Self) -> Self;
    fn divide(self, by: &Divisor) -> Self;
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
    fn fold<L: Lane>(left: L, right: L) -> L;
}

macro_rules! folds {
    ($($name:ident $method:ident;)*) => {$(
        pub(crate) struct $name;

        impl Fold for $name {
            #[inline(always)]
            fn fold<L: Lane>(left: L, right: L) -> L {
                left.$method(right)
            }
        }
    )*};
}

folds! {
    Sum sum;
    Product product;
    Min minimum;
    Max maximum;
}

/// The number of ranks that an average divides by, 1 at least, and what stands in for it where no divider is.
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
    ($($float:ty;)*) => {$(
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
        }
    )*};
}

float_lanes! {
    f32;
    f64;
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
    f32: f32, core::convert::identity, |lane: f32| if lane.is_nan() { f32::from_bits(0x7fc0_0000) } else { lane };
    f64: f64, core::convert::identity, |lane: f64| if lane.is_nan() { f64::from_bits(0x7ff8 << 48) } else { lane };
    f16: f32, f16::to_f32, |lane: f32| if lane.is_nan() { f16::from_bits(0x7e00) } else { f16::from_f32(lane) };
    bf16: f32, bf16::to_f32, |lane: f32| if lane.is_nan() { bf16::from_bits(0x7fc0) } else { bf16::from_f32(lane) };
}
