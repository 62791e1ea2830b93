//! Rust types of tensor elements.

use half::{bf16, f16};
use harmonaize_abi::{Bool, Complex64, Complex128, Dtype, F8E4M3, F8E5M2};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A Rust type whose values are a tensor's elements.
pub trait Element: Copy + FromBytes + IntoBytes + Immutable + sealed::Sealed {
    /// The tensor's element type.
    const DTYPE: Dtype;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident,)*) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: Dtype = Dtype::$dtype;
        }
        const _: () = assert!(size_of::<$rust>() == Dtype::$dtype.size());
    )*};
}

elements! {
    i8 => I8,
    u8 => U8,
    i16 => I16,
    u16 => U16,
    i32 => I32,
    u32 => U32,
    i64 => I64,
    u64 => U64,
    f16 => F16,
    bf16 => Bf16,
    f32 => F32,
    f64 => F64,
    Bool => Bool,
    Complex64 => Complex64,
    Complex128 => Complex128,
    F8E4M3 => F8E4M3,
    F8E5M2 => F8E5M2,
}
