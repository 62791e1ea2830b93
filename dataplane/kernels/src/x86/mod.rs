//! Kernels for x86-64, with AVX2 and with AVX-512.

/// The NaN that results hold.
const NAN_F32: u32 = 0x7fc0_0000;
/// The NaN that results hold.
const NAN_F64: u64 = 0x7ff8 << 48;
/// The upper half of a lane of 32 bits.
const UPPER: i32 = 0xffff_0000_u32 as i32;

/// Defines a vector of floats in one register: its name, the register, the type the CPU's float instructions take, the
/// field of [`Divisor`](crate::element::Divisor), and the intrinsics.
///
/// MIN and MAX instructions give their second operand where one is NaN, and where both are zeros. Taken in both orders and
/// joined by "or", the minimum's bits hold NaN and the lesser zero. The maximum needs "and" for the greater zero, which
/// loses NaN: it is put back.
macro_rules! floats {
    ($($name:ident: $register:ident, $raw:ident, $divisor:ident, $from:ident $to:ident, $add:ident $mul:ident $div:ident
        $set:ident, $min:ident $max:ident $or:ident $and:ident $nan_where_unordered:ident;)*) => {$(
        #[derive(Clone, Copy)]
        struct $name($raw);

        impl $name {
            /// The type's one NaN where a lane is NaN.
            #[inline(always)]
            fn one_nan(self) -> Self {
                // SAFETY: made from a register, which exists, so the CPU has the instruction set.
                Self(unsafe { $nan_where_unordered(self.0, self.0, self.0) })
            }
        }

        impl crate::vector::Vector for $name {
            type Register = $register;

            #[inline(always)]
            fn unpack(register: $register) -> Self {
                // SAFETY: the register exists, so the CPU has the instruction set.
                Self(unsafe { $from(register.0) })
            }

            #[inline(always)]
            fn pack(self) -> $register {
                // SAFETY: as above.
                $register(unsafe { $to(self.one_nan().0) })
            }
        }

        impl crate::element::Lane for $name {
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
                Self(unsafe { $or($min(self.0, other.0), $min(other.0, self.0)) })
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                // SAFETY: as above.
                Self(unsafe {
                    let greater = $and($max(self.0, other.0), $max(other.0, self.0));
                    $nan_where_unordered(greater, self.0, other.0)
                })
            }

            #[inline(always)]
            fn divide(self, by: &crate::element::Divisor) -> Self {
                // SAFETY: as above.
                Self(unsafe { $div(self.0, $set(by.$divisor)) })
            }
        }
    )*};
}

pub(crate) mod avx2;
pub(crate) mod avx512;
pub(crate) mod clmul;
