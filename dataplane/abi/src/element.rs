//! Elements of a tensor that Rust has no type for: bools of any byte, floats of 8 bits, complex numbers.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A byte that is false where it is 0, else true.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct Bool(u8);

impl Bool {
    /// Whether it is true.
    pub const fn get(self) -> bool {
        self.0 != 0
    }
}

impl From<bool> for Bool {
    fn from(value: bool) -> Self {
        Self(value.into())
    }
}

impl PartialEq for Bool {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl Eq for Bool {}

macro_rules! complex {
    ($($(#[$meta:meta])* $name:ident: $part:ty;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name {
            /// The real part.
            pub re: $part,
            /// The imaginary part.
            pub im: $part,
        }
    )*};
}

complex! {
    /// A complex number of two `f32`.
    Complex64: f32;
    /// A complex number of two `f64`.
    Complex128: f64;
}

/// What tells one 8-bit float from another. Codes are magnitudes, without the sign.
struct Float8 {
    /// Bits of the mantissa.
    mantissa: u32,
    /// What the exponent of 1 is.
    bias: u32,
    /// The greatest finite number.
    greatest: u32,
    /// Infinity, or the greatest number where there is none. What is above is NaN.
    infinity: u32,
    /// The NaN that conversions give.
    nan: u8,
}

impl Float8 {
    const fn encode(&self, value: f32) -> u8 {
        let bits = value.to_bits();
        let (sign, magnitude) = ((bits >> 24) as u8 & 0x80, bits & 0x7fff_ffff);
        let code = if magnitude > f32::INFINITY.to_bits() {
            return self.nan;
        } else if magnitude == f32::INFINITY.to_bits() {
            self.infinity
        } else {
            let code = if magnitude < (128 - self.bias) << 23 {
                // A number whose last bit is worth the least subnormal: adding it rounds to multiples of that.
                let shift = f32::from_bits((127 + 24 - self.bias - self.mantissa) << 23);
                (f32::from_bits(magnitude) + shift).to_bits() - shift.to_bits()
            } else {
                let dropped = 23 - self.mantissa;
                let rounded = magnitude + (magnitude >> dropped & 1) + (1 << (dropped - 1)) - 1;
                (rounded >> dropped) - ((127 - self.bias) << self.mantissa)
            };
            if code > self.greatest { self.greatest } else { code }
        };
        sign | code as u8
    }

    const fn decode(&self, code: u8) -> f32 {
        let (sign, magnitude) = ((code as u32 & 0x80) << 24, code as u32 & 0x7f);
        let value = if magnitude > self.infinity {
            return f32::NAN;
        } else if magnitude > self.greatest {
            f32::INFINITY
        } else if magnitude >> self.mantissa == 0 {
            magnitude as f32 * f32::from_bits((128 - self.bias - self.mantissa) << 23)
        } else {
            f32::from_bits((magnitude << (23 - self.mantissa)) + ((127 - self.bias) << 23))
        };
        f32::from_bits(value.to_bits() | sign)
    }
}

macro_rules! float8 {
    ($($(#[$meta:meta])* $name:ident = $form:expr;)*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            const FORMAT: Float8 = $form;

            /// The number of these bits.
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// Its bits.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// The nearest number, of two the even one. What is finite stays so: beyond the greatest number it is the greatest.
            pub const fn from_f32(value: f32) -> Self {
                Self(Self::FORMAT.encode(value))
            }

            /// The same number.
            pub const fn to_f32(self) -> f32 {
                Self::FORMAT.decode(self.0)
            }
        }
    )*};
}

float8! {
    /// OCP's E4M3 (e4m3fn): 4 bits of exponent, 3 of mantissa. Its greatest number is 448, which infinities become too; NaN is 0x7f, and 0xff.
    /// Equal where the bits are.
    F8E4M3 = Float8 { mantissa: 3, bias: 7, greatest: 0x7e, infinity: 0x7e, nan: 0x7f };
    /// OCP's E5M2: 5 bits of exponent, 2 of mantissa. Its greatest finite number is 57,344; infinities stay what they are. Equal where the
    /// bits are.
    F8E5M2 = Float8 { mantissa: 2, bias: 15, greatest: 0x7b, infinity: 0x7c, nan: 0x7e };
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn numbers_are_those_of_the_formats() {
        let e4m3 = |bits| F8E4M3::from_bits(bits).to_f32();
        let (least, least_normal) = (e4m3(1), e4m3(8));
        assert_eq!((least, least_normal, e4m3(0x38), e4m3(0xb9)), (0.001_953_125, 0.015_625, 1.0, -1.125));
        assert_eq!((e4m3(0x7e), e4m3(0xfe)), (448.0, -448.0));
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan() && e4m3(0x80).is_sign_negative());
        let e5m2 = |bits| F8E5M2::from_bits(bits).to_f32();
        let (least, least_normal) = (e5m2(1), e5m2(4));
        assert_eq!(
            (least, least_normal, e5m2(0x3c), e5m2(0xbd)),
            (0.000_015_258_789, 0.000_061_035_156, 1.0, -1.25)
        );
        assert_eq!((e5m2(0x7b), e5m2(0x7c), e5m2(0xfc)), (57_344.0, f32::INFINITY, f32::NEG_INFINITY));
        assert!([0x7d, 0x7e, 0x7f, 0xfd, 0xff].iter().all(|bits| e5m2(*bits).is_nan()));
    }

    /// The nearest finite magnitude by search, the even code of two; `value` is none of the special ones.
    fn nearest(value: f32, greatest: u8, decode: impl Fn(u8) -> f32) -> u8 {
        let magnitude = f64::from(value.abs().min(decode(greatest)));
        let distance = |code: u8| (f64::from(decode(code)) - magnitude).abs();
        let before = |one: u8, other: u8| (distance(one), one & 1) < (distance(other), other & 1);
        let code = (1..=greatest).fold(0, |best, code| if before(code, best) { code } else { best });
        code | if value.is_sign_negative() { 0x80 } else { 0 }
    }

    #[test]
    fn conversions_give_the_nearest_and_saturate() {
        // All codes, what lies half way to the next one and a bit to either side, and every exponent of f32.
        let codes = |decode: fn(u8) -> f32| (0..=255).map(decode).collect::<Vec<_>>();
        for (decode, encode, greatest, infinity, nan) in [
            (
                (|bits| F8E4M3::from_bits(bits).to_f32()) as fn(u8) -> f32,
                (|value| F8E4M3::from_f32(value).to_bits()) as fn(f32) -> u8,
                0x7e,
                0x7e,
                0x7f,
            ),
            (
                |bits| F8E5M2::from_bits(bits).to_f32(),
                |value| F8E5M2::from_f32(value).to_bits(),
                0x7b,
                0x7c,
                0x7e,
            ),
        ] {
            let codes = codes(decode);
            let middles = codes.windows(2).filter_map(|pair| Some((pair.first()? + pair.last()?) / 2.0));
            let exponents = (0..255_u32).map(|exponent| f32::from_bits(exponent << 23 | 0x6f_ffff));
            let values =
                codes.iter().copied().chain(middles).chain(exponents).filter(|value| value.is_finite());
            for value in values {
                for bits in [-1, 0, 1].map(|more| value.to_bits().wrapping_add_signed(more)) {
                    let value = f32::from_bits(bits);
                    if value.is_finite() {
                        assert_eq!(encode(value), nearest(value, greatest, decode), "{value:e}");
                    }
                }
            }
            assert_eq!((encode(f32::INFINITY), encode(f32::NEG_INFINITY)), (infinity, infinity | 0x80));
            assert_eq!((encode(f32::NAN), encode(-f32::NAN)), (nan, nan));
            for (code, value) in (0..=255_u8).zip(codes) {
                assert_eq!(encode(value), if value.is_nan() { nan } else { code }, "{code:#x}");
            }
        }
    }
}
