//! The loop over memory, compiled once per instruction set, element type and reduction.

use crate::divide::Quotient;
use crate::element::{Bits, Divisor, Element, Factor, Fold, Lane, Max, Min, Product, Sum, binary};
use crate::pass::Pass;
use crate::scalar;
use crate::simd::{Job, LANES, Plain, ROW_BYTES, Simd, cast, dispatch};
use crate::{Isa, KernelError};
use half::{bf16, f16};
use harmonaize_abi::{Bool, Complex64, Complex128, Dtype, F8E4M3, F8E5M2, ReduceOp};
use std::iter::{empty, once};
use std::marker::PhantomData;

/// Runs a pass.
///
/// # Errors
/// [`KernelError::Isa`] if this CPU lacks the instruction set, [`KernelError::Reduction`] if bools have none such; nothing is written then.
///
/// # Safety
/// The pass must be of `dtype`.
#[inline(always)]
pub(crate) unsafe fn run(isa: Isa, op: ReduceOp, dtype: Dtype, pass: &Pass<'_>) -> Result<(), KernelError> {
    // SAFETY: the caller's promise.
    unsafe {
        match (op, dtype) {
            (ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd, Dtype::Bool) => {
                dispatch(isa, Reduce::<Bool, Min>(pass, PhantomData))
            }
            (ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr, Dtype::Bool) => {
                dispatch(isa, Reduce::<Bool, Max>(pass, PhantomData))
            }
            (ReduceOp::BitXor, Dtype::Bool) => dispatch(isa, Reduce::<Bool, Sum>(pass, PhantomData)),
            (_, Dtype::Bool) => Err(KernelError::Reduction { op, dtype }),
            (ReduceOp::BitAnd, _) => dispatch(isa, Reduce::<Bits, Min>(pass, PhantomData)),
            (ReduceOp::BitOr, _) => dispatch(isa, Reduce::<Bits, Max>(pass, PhantomData)),
            (ReduceOp::BitXor, _) => dispatch(isa, Reduce::<Bits, Sum>(pass, PhantomData)),
            (ReduceOp::Product, Dtype::Complex64) => {
                dispatch(isa, Reduce::<Complex64, Product>(pass, PhantomData))
            }
            (ReduceOp::Product, Dtype::Complex128) => {
                dispatch(isa, Reduce::<Complex128, Product>(pass, PhantomData))
            }
            (ReduceOp::Sum | ReduceOp::Average | ReduceOp::PremulSum, _) => of::<Sum>(isa, dtype, pass),
            (ReduceOp::Product, _) => of::<Product>(isa, dtype, pass),
            (ReduceOp::Min, _) => of::<Min>(isa, dtype, pass),
            (ReduceOp::Max, _) => of::<Max>(isa, dtype, pass),
        }
    }
}

/// `$result` with `$element` as the Rust type of an element type: of a complex one, that of its parts. `$bool` of bools.
macro_rules! by_dtype {
    ($dtype:ident, $element:ident => $result:expr, $bool:expr) => {{
        macro_rules! with {
            ($type:ty) => {{
                type $element = $type;
                $result
            }};
        }
        match $dtype {
            Dtype::I8 => with!(i8),
            Dtype::U8 => with!(u8),
            Dtype::I16 => with!(i16),
            Dtype::U16 => with!(u16),
            Dtype::I32 => with!(i32),
            Dtype::U32 => with!(u32),
            Dtype::I64 => with!(i64),
            Dtype::U64 => with!(u64),
            Dtype::F16 => with!(f16),
            Dtype::Bf16 => with!(bf16),
            Dtype::F32 | Dtype::Complex64 => with!(f32),
            Dtype::F64 | Dtype::Complex128 => with!(f64),
            Dtype::F8E4M3 => with!(F8E4M3),
            Dtype::F8E5M2 => with!(F8E5M2),
            Dtype::Bool => $bool,
        }
    }};
}

/// Runs a pass that adds its sources up, each times its factor.
///
/// # Errors
/// As [`run`].
///
/// # Safety
/// As [`run`].
pub(crate) unsafe fn run_scaled(
    isa: Isa,
    dtype: Dtype,
    pass: &Pass<'_>,
    factors: &[Factor],
) -> Result<(), KernelError> {
    let none = KernelError::Reduction { op: ReduceOp::PremulSum, dtype };
    by_dtype!(dtype, E => dispatch(isa, ScaledSum::<E>(pass, factors, PhantomData)), Err(none))
}

/// # Safety
/// As [`run`].
unsafe fn of<O: Fold>(isa: Isa, dtype: Dtype, pass: &Pass<'_>) -> Result<(), KernelError> {
    let none = KernelError::Reduction { op: ReduceOp::Sum, dtype };
    by_dtype!(dtype, E => dispatch(isa, Reduce::<E, O>(pass, PhantomData)), Err(none))
}

/// An element type, in rows of memory.
pub(crate) trait Format {
    /// A row's elements, in the type that they are computed in.
    type Lanes<S: Simd>: Lane;
    /// As many rows as have 8 registers of lanes.
    type Block<S: Simd>: Block;
    /// Whether conversion is most of the work, and most of the code. Such elements have one loop in vectors, that of sums.
    const CONVERTS: bool = false;

    fn unpack<S: Simd>(simd: S, row: S::Ints) -> Self::Lanes<S>;

    /// Rounds to nearest even; any NaN becomes the type's one NaN.
    fn pack<S: Simd>(simd: S, lanes: Self::Lanes<S>) -> S::Ints;
}

/// Rows that lie side by side in memory.
pub(crate) trait Block {
    const BYTES: usize;
    type Lanes<S: Simd>: Lane;
    type Rows<S: Simd>: Copy;

    /// # Safety
    /// `from` must be readable for `BYTES` bytes, at any alignment.
    unsafe fn load<S: Simd>(simd: S, from: *const u8) -> Self::Lanes<S>;

    fn pack<S: Simd>(simd: S, lanes: Self::Lanes<S>) -> Self::Rows<S>;

    /// Stores, past the caches where it streams; a fence orders that before later stores.
    ///
    /// # Safety
    /// `to` must be writable for `BYTES` bytes, at any alignment, or, where it streams, at a multiple of 64.
    unsafe fn store<S: Simd>(simd: S, rows: Self::Rows<S>, to: *mut u8, streams: bool);
}

impl<E: Format> Block for E {
    const BYTES: usize = ROW_BYTES;
    type Lanes<S: Simd> = E::Lanes<S>;
    type Rows<S: Simd> = S::Ints;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const u8) -> E::Lanes<S> {
        // SAFETY: the caller's promise.
        E::unpack(simd, unsafe { from.cast::<S::Ints>().read_unaligned() })
    }

    #[inline(always)]
    fn pack<S: Simd>(simd: S, lanes: E::Lanes<S>) -> S::Ints {
        E::pack(simd, lanes)
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, row: S::Ints, to: *mut u8, streams: bool) {
        if streams {
            // SAFETY: the caller's promise.
            unsafe { simd.stream(to, row) }
        } else {
            // SAFETY: the caller's promise.
            unsafe { to.cast::<S::Ints>().write_unaligned(row) }
        }
    }
}

/// Two of a kind, to make blocks of: unlike an array's, its parts stay in registers.
#[derive(Clone, Copy)]
pub(crate) struct Pair<T>(T, T);

impl<B: Block> Block for Pair<B> {
    const BYTES: usize = 2 * B::BYTES;
    type Lanes<S: Simd> = Pair<B::Lanes<S>>;
    type Rows<S: Simd> = Pair<B::Rows<S>>;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const u8) -> Self::Lanes<S> {
        // SAFETY: the caller's promise covers both.
        unsafe { Pair(B::load(simd, from), B::load(simd, from.add(B::BYTES))) }
    }

    #[inline(always)]
    fn pack<S: Simd>(simd: S, lanes: Self::Lanes<S>) -> Self::Rows<S> {
        Pair(B::pack(simd, lanes.0), B::pack(simd, lanes.1))
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, rows: Self::Rows<S>, to: *mut u8, streams: bool) {
        // SAFETY: the caller's promise covers both.
        unsafe {
            B::store(simd, rows.0, to, streams);
            B::store(simd, rows.1, to.add(B::BYTES), streams);
        }
    }
}

impl<L: Lane> Lane for Pair<L> {
    binary! {
        |a, b|
        sum = Self(a.0.sum(b.0), a.1.sum(b.1));
        product = Self(a.0.product(b.0), a.1.product(b.1));
        minimum = Self(a.0.minimum(b.0), a.1.minimum(b.1));
        maximum = Self(a.0.maximum(b.0), a.1.maximum(b.1));
    }

    #[inline(always)]
    fn divide(self, by: &Divisor) -> Self {
        Self(self.0.divide(by), self.1.divide(by))
    }

    #[inline(always)]
    fn scale(self, by: &Factor) -> Self {
        Self(self.0.scale(by), self.1.scale(by))
    }
}

/// Defines the lanes of a type that is computed in itself. Given are its row, its arithmetic, the quotient by a divisor, the row of a
/// factor, and what a row becomes before it is stored.
macro_rules! lanes {
    ($($element:ty: $name:ident($row:ident), $sum:ident $product:ident $minimum:ident $maximum:ident $scale:ident,
        |$simd:ident, $lanes:ident, $by:ident| $quotient:expr, $factor:expr, $pack:expr;)*) => {$(
        #[derive(Clone, Copy)]
        pub(crate) struct $name<S: Simd>(S, S::$row);

        impl<S: Simd> Lane for $name<S> {
            binary! {
                |a, b|
                sum = Self(a.0, a.0.$sum(a.1, b.1));
                product = Self(a.0, a.0.$product(a.1, b.1));
                minimum = Self(a.0, a.0.$minimum(a.1, b.1));
                maximum = Self(a.0, a.0.$maximum(a.1, b.1));
            }

            #[inline(always)]
            fn divide(self, $by: &Divisor) -> Self {
                let Self($simd, $lanes) = self;
                Self($simd, $quotient)
            }

            #[inline(always)]
            fn scale(self, $by: &Factor) -> Self {
                let Self($simd, $lanes) = self;
                Self($simd, $simd.$scale($lanes, $factor))
            }
        }

        impl Format for $element {
            type Lanes<S: Simd> = $name<S>;
            type Block<S: Simd> = S::Eight<Self>;

            #[inline(always)]
            fn unpack<S: Simd>(simd: S, row: S::Ints) -> $name<S> {
                $name(simd, cast(row))
            }

            #[inline(always)]
            fn pack<S: Simd>(simd: S, lanes: $name<S>) -> S::Ints {
                cast($pack(simd, lanes.1))
            }
        }
    )*};
}

lanes! {
    i8: I8(Ints), add_8 mul_8 min_i8 max_i8 mul_8,
        |_simd, lanes, by| quotients::<_, i8, 64>(lanes, by), cast([by.whole as i8; 64]), same;
    u8: U8(Ints), add_8 mul_8 min_u8 max_u8 mul_8,
        |_simd, lanes, by| quotients::<_, u8, 64>(lanes, by), cast([by.whole as u8; 64]), same;
    i16: I16(Ints), add_16 mul_16 min_i16 max_i16 mul_16,
        |_simd, lanes, by| quotients::<_, i16, 32>(lanes, by), cast([by.whole as i16; 32]), same;
    u16: U16(Ints), add_16 mul_16 min_u16 max_u16 mul_16,
        |_simd, lanes, by| quotients::<_, u16, 32>(lanes, by), cast([by.whole as u16; 32]), same;
    i32: I32(Ints), add_32 mul_32 min_i32 max_i32 mul_32,
        |_simd, lanes, by| quotients::<_, i32, 16>(lanes, by), cast([by.whole as i32; 16]), same;
    u32: U32(Ints), add_32 mul_32 min_u32 max_u32 mul_32,
        |_simd, lanes, by| quotients::<_, u32, 16>(lanes, by), cast([by.whole as u32; 16]), same;
    i64: I64(Ints), add_64 mul_64 min_i64 max_i64 mul_64,
        |_simd, lanes, by| quotients::<_, i64, 8>(lanes, by), cast([by.whole; 8]), same;
    u64: U64(Ints), add_64 mul_64 min_u64 max_u64 mul_64,
        |_simd, lanes, by| quotients::<_, u64, 8>(lanes, by), cast([by.whole as u64; 8]), same;
    f32: F32(Floats), add mul minimum maximum mul,
        |simd, lanes, by| simd.div(lanes, simd.splat(by.single)), cast([by.single; LANES]), S::one_nan;
    f64: F64(Doubles), add_f64 mul_f64 minimum_f64 maximum_f64 mul_f64,
        |simd, lanes, by| simd.div_f64(lanes, cast([by.double; 8])), cast([by.double; 8]), S::one_nan_f64;
    Complex64: C64(Floats), add multiply_pairs minimum maximum mul,
        |simd, lanes, by| simd.div(lanes, simd.splat(by.single)), cast([by.single; LANES]), S::one_nan;
    Complex128: C128(Doubles), add_f64 multiply_pairs_f64 minimum_f64 maximum_f64 mul_f64,
        |simd, lanes, by| simd.div_f64(lanes, cast([by.double; 8])), cast([by.double; 8]), S::one_nan_f64;
}

/// The bits of a row: [`Bits`], 512 of them.
#[derive(Clone, Copy)]
pub(crate) struct BitLanes<S: Simd>(S, S::Ints);

impl<S: Simd> Lane for BitLanes<S> {
    binary! {
        |a, b|
        sum = Self(a.0, a.0.xor(a.1, b.1));
        product = Self(a.0, a.0.and(a.1, b.1));
        minimum = Self(a.0, a.0.and(a.1, b.1));
        maximum = Self(a.0, a.0.or(a.1, b.1));
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

impl Format for Bits {
    type Lanes<S: Simd> = BitLanes<S>;
    type Block<S: Simd> = S::Eight<Self>;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, row: S::Ints) -> BitLanes<S> {
        BitLanes(simd, row)
    }

    #[inline(always)]
    fn pack<S: Simd>(_simd: S, lanes: BitLanes<S>) -> S::Ints {
        lanes.1
    }
}

/// Bytes of 0 and 1.
impl Format for Bool {
    type Lanes<S: Simd> = BitLanes<S>;
    type Block<S: Simd> = S::Eight<Self>;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, row: S::Ints) -> BitLanes<S> {
        BitLanes(simd, simd.min_u8(row, simd.splat_int(0x0101_0101)))
    }

    #[inline(always)]
    fn pack<S: Simd>(_simd: S, lanes: BitLanes<S>) -> S::Ints {
        lanes.1
    }
}

#[inline(always)]
fn same<S, R>(_simd: S, row: R) -> R {
    row
}

#[inline(always)]
fn quotients<R: Plain, T: Quotient + Plain, const N: usize>(row: R, by: &Divisor) -> R {
    let mut lanes: [T; N] = cast(row);
    for lane in &mut lanes {
        *lane = lane.quotient(by);
    }
    cast(lanes)
}

/// The lower 16 elements, then the upper.
impl Format for f16 {
    type Lanes<S: Simd> = Pair<F32<S>>;
    type Block<S: Simd> = S::Four<Self>;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, row: S::Ints) -> Pair<F32<S>> {
        let [lower, upper] = cast(row);
        Pair(F32(simd, simd.of_f16(lower)), F32(simd, simd.of_f16(upper)))
    }

    #[inline(always)]
    fn pack<S: Simd>(simd: S, lanes: Pair<F32<S>>) -> S::Ints {
        cast([simd.to_f16(simd.one_nan(lanes.0.1)), simd.to_f16(simd.one_nan(lanes.1.1))])
    }
}

/// The 16 elements at even places, then those at odd places.
impl Format for bf16 {
    type Lanes<S: Simd> = Pair<F32<S>>;
    type Block<S: Simd> = S::Four<Self>;

    #[inline(always)]
    fn unpack<S: Simd>(simd: S, row: S::Ints) -> Pair<F32<S>> {
        let odd = simd.and(row, simd.splat_int(0xffff_0000));
        Pair(F32(simd, simd.of_bits(simd.shl(row, 16))), F32(simd, simd.of_bits(odd)))
    }

    #[inline(always)]
    fn pack<S: Simd>(simd: S, lanes: Pair<F32<S>>) -> S::Ints {
        let even = simd.round_to_bf16(simd.one_nan(lanes.0.1));
        let odd = simd.round_to_bf16(simd.one_nan(lanes.1.1));
        simd.or(simd.shr(even, 16), simd.and(odd, simd.splat_int(0xffff_0000)))
    }
}

/// An 8-bit float; codes are magnitudes, without the sign.
trait Float8 {
    /// Bits of its mantissa.
    const MANTISSA: u32;
    /// What the exponent of 1 is.
    const BIAS: u32;
    /// The greatest finite number.
    const GREATEST: u32;
    /// Infinity, or the greatest number where there is none. What is above is NaN.
    const INFINITY: u32;
    /// The one NaN.
    const NAN: u32;
}

impl Float8 for F8E4M3 {
    const MANTISSA: u32 = 3;
    const BIAS: u32 = 7;
    const GREATEST: u32 = 0x7e;
    const INFINITY: u32 = 0x7e;
    const NAN: u32 = 0x7f;
}

impl Float8 for F8E5M2 {
    const MANTISSA: u32 = 2;
    const BIAS: u32 = 15;
    const GREATEST: u32 = 0x7b;
    const INFINITY: u32 = 0x7c;
    const NAN: u32 = 0x7e;
}

/// By way of binary16, which holds all of them: its exponent's bias is 15.
#[inline(always)]
fn widen_f8<S: Simd, E: Float8>(simd: S, bytes: [u8; LANES]) -> F32<S> {
    let words = simd.widen(bytes);
    let magnitude = simd.and(words, simd.splat_int(0x7f));
    let sign = simd.shl(simd.and(words, simd.splat_int(0x80)), 8);
    let halves = simd.narrow_halves(simd.or(simd.shl(magnitude, 10 - E::MANTISSA), sign));
    let scale = f32::from_bits((127 + 15 - E::BIAS) << 23);
    let floats = simd.bits(simd.mul(simd.of_f16(halves), simd.splat(scale)));
    let nan = simd.splat_int(0x7fc0_0000);
    F32(simd, simd.of_bits(simd.where_exceeds(magnitude, simd.splat_int(E::INFINITY), nan, floats)))
}

/// Rounds to nearest even, and to the greatest number what is finite beyond it.
#[inline(always)]
fn narrow_f8<S: Simd, E: Float8>(simd: S, lanes: F32<S>) -> [u8; LANES] {
    let bits = simd.bits(simd.one_nan(lanes.1));
    let sign = simd.and(simd.shr(bits, 24), simd.splat_int(0x80));
    let magnitude = simd.and(bits, simd.splat_int(0x7fff_ffff));
    let dropped = 23 - E::MANTISSA;
    let odd = simd.and(simd.shr(magnitude, dropped), simd.splat_int(1));
    let half = simd.splat_int((1 << (dropped - 1)) - 1);
    let rounded = simd.shr(simd.add_32(simd.add_32(magnitude, odd), half), dropped);
    let rebased = ((127 - E::BIAS) << E::MANTISSA).wrapping_neg();
    let normal = simd.add_32(rounded, simd.splat_int(rebased));
    // A number whose last bit is worth the least subnormal: adding it rounds to multiples of that.
    let shift = (127 + 24 - E::BIAS - E::MANTISSA) << 23;
    let shifted = simd.bits(simd.add(simd.of_bits(magnitude), simd.of_bits(simd.splat_int(shift))));
    let subnormal = simd.add_32(shifted, simd.splat_int(shift.wrapping_neg()));
    let least_normal = simd.splat_int((128 - E::BIAS) << 23);
    let code = simd.where_exceeds(least_normal, magnitude, subnormal, normal);
    let code = simd.min_u32(code, simd.splat_int(E::GREATEST));
    let greatest = simd.splat_int(0x7f7f_ffff);
    let code = simd.where_exceeds(magnitude, greatest, simd.splat_int(E::INFINITY), code);
    let infinity = simd.splat_int(0x7f80_0000);
    let code = simd.where_exceeds(magnitude, infinity, simd.splat_int(E::NAN), code);
    simd.narrow(simd.or(code, sign))
}

macro_rules! float8_formats {
    ($($element:ident;)*) => {$(
        /// A quarter of a row's elements after another.
        impl Format for $element {
            type Lanes<S: Simd> = Pair<Pair<F32<S>>>;
            type Block<S: Simd> = Self;
            const CONVERTS: bool = true;

            #[inline(always)]
            fn unpack<S: Simd>(simd: S, row: S::Ints) -> Self::Lanes<S> {
                let [a, b, c, d] = cast(row);
                Pair(
                    Pair(widen_f8::<S, Self>(simd, a), widen_f8::<S, Self>(simd, b)),
                    Pair(widen_f8::<S, Self>(simd, c), widen_f8::<S, Self>(simd, d)),
                )
            }

            #[inline(always)]
            fn pack<S: Simd>(simd: S, lanes: Self::Lanes<S>) -> S::Ints {
                let Pair(Pair(a, b), Pair(c, d)) = lanes;
                cast([
                    narrow_f8::<S, Self>(simd, a),
                    narrow_f8::<S, Self>(simd, b),
                    narrow_f8::<S, Self>(simd, c),
                    narrow_f8::<S, Self>(simd, d),
                ])
            }
        }
    )*};
}

float8_formats! {
    F8E4M3;
    F8E5M2;
}

/// What becomes of a source once it is loaded.
trait Loaded: Copy {
    fn apply<L: Lane>(self, lanes: L) -> L;
}

/// A source as it is.
#[derive(Clone, Copy)]
struct Plainly;

impl Loaded for Plainly {
    #[inline(always)]
    fn apply<L: Lane>(self, lanes: L) -> L {
        lanes
    }
}

impl Loaded for &Factor {
    #[inline(always)]
    fn apply<L: Lane>(self, lanes: L) -> L {
        lanes.scale(self)
    }
}

/// A pass of elements `E` that adds its sources up, each times its factor.
struct ScaledSum<'a, E>(&'a Pass<'a>, &'a [Factor], PhantomData<E>);

impl<E: Element + Format> Job for ScaledSum<'_, E> {
    type Output = ();

    /// Cost: that of [`Reduce`], and a multiplication a source.
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if E::CONVERTS {
            return self.run_portable();
        }
        let Self(pass, factors, _) = self;
        let (Some((first, others)), Some((by, factors))) =
            (pass.sources.split_first(), factors.split_first())
        else {
            return;
        };
        let others = others.iter().zip(factors).map(|(view, by)| (view.pointer(), by));
        let to = pass.destinations.iter().map(|view| view.pointer());
        // SAFETY: as for `Reduce`.
        unsafe {
            Views { first: (first.pointer(), by), others, to }.reduce::<S, E, Sum>(
                simd,
                pass,
                None,
                pass.streams,
            );
        }
    }
    #[inline(always)]
    fn run_portable(self) {
        // SAFETY: a pass of elements `E`, as whoever made it promised.
        unsafe { scalar::run::<E, Sum>(self.0, self.1) }
    }
}

/// A pass of elements `E` whose reduction is `O`.
struct Reduce<'a, E, O>(&'a Pass<'a>, PhantomData<(E, O)>);

impl<E: Format, O: Fold> Reduce<'_, E, O> {
    /// Whether passes of few views have loops of their own.
    const FEW: bool = O::ADDS && !E::CONVERTS;
    /// Whether elements go one at a time.
    const SINGLY: bool = E::CONVERTS && !O::ADDS;
}

impl<E: Element + Format, O: Fold> Job for Reduce<'_, E, O> {
    type Output = ();

    /// Cost: reads every source once and writes every destination once. It does so in blocks of several rows that stay in
    /// registers while the sources are folded in. Per block that is one predictable branch a source and a destination.
    /// Destinations that stream cost memory one transfer a byte, the others two where they miss the caches. A pass of one source
    /// or two into one destination that stays in the caches, as a segment's steps and an aggregator's parts are, has none of
    /// these branches.
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if Self::SINGLY {
            return self.run_portable();
        }
        let pass = self.0;
        let Some((first, others)) = pass.sources.split_first() else { return };
        let first = (first.pointer(), Plainly);
        // SAFETY: a pass's views hold `bytes` bytes, whole elements; the head is whole elements, fewer bytes than a row and than the pass,
        // and brings what streams to a multiple of 64.
        unsafe {
            match (pass.destinations, others, pass.divide, pass.streams) {
                ([to], [], None, 0) if Self::FEW => {
                    Views { first, others: empty(), to: once(to.pointer()) }
                        .reduce::<S, E, O>(simd, pass, None, 0);
                }
                ([to], [other], None, 0) if Self::FEW => {
                    let (others, to) = (once((other.pointer(), Plainly)), once(to.pointer()));
                    Views { first, others, to }.reduce::<S, E, O>(simd, pass, None, 0);
                }
                (to, others, divide, streams) => {
                    let others = others.iter().map(|view| (view.pointer(), Plainly));
                    let to = to.iter().map(|view| view.pointer());
                    Views { first, others, to }.reduce::<S, E, O>(simd, pass, divide, streams);
                }
            }
        }
    }
    #[inline(always)]
    fn run_portable(self) {
        // SAFETY: a pass of elements `E`, as whoever made it promised.
        unsafe { scalar::run::<E, O>(self.0, &[]) }
    }
}

/// What a pass reads and writes.
#[derive(Clone)]
struct Views<L, Sources, Destinations> {
    first: (*const u8, L),
    others: Sources,
    to: Destinations,
}

impl<L, Sources, Destinations> Views<L, Sources, Destinations>
where
    L: Loaded,
    Sources: Iterator<Item = (*const u8, L)> + Clone,
    Destinations: Iterator<Item = *mut u8> + Clone,
{
    /// # Safety
    /// The views are the pass's, and destinations that stream lie at a multiple of 64 after the head.
    #[inline(always)]
    unsafe fn reduce<S: Simd, E: Format, O: Fold>(
        &self,
        simd: S,
        pass: &Pass<'_>,
        divide: Option<&Divisor>,
        streams: u64,
    ) {
        let (bytes, mut offset, mut part) = (pass.bytes, 0, pass.head);
        // SAFETY: the caller's promise; each step lies between the offset and `bytes`, and is a multiple of 64 bytes but for the
        // first and the last part.
        unsafe {
            // The head, then what is after it; in a second round the rest. One loop, for the code of a part is long.
            loop {
                if part > 0 {
                    self.part::<S, E, O>(simd, divide, offset, part);
                    offset += part;
                }
                if streams != 0 {
                    while bytes - offset >= E::Block::<S>::BYTES {
                        self.block::<S, E::Block<S>, O>(simd, divide, offset, streams);
                        offset += E::Block::<S>::BYTES;
                    }
                    simd.fence();
                } else {
                    while bytes - offset >= E::Block::<S>::BYTES {
                        self.block::<S, E::Block<S>, O>(simd, divide, offset, 0);
                        offset += E::Block::<S>::BYTES;
                    }
                }
                while bytes - offset >= E::BYTES {
                    self.block::<S, E, O>(simd, divide, offset, 0);
                    offset += E::BYTES;
                }
                part = bytes - offset;
                if part == 0 {
                    return;
                }
            }
        }
    }

    /// Reduces one block at `offset`: all its sources are read before any destination is written.
    ///
    /// # Safety
    /// As [`Views::reduce`]; the block must lie within the pass, and what streams must be aligned at `offset`.
    #[inline(always)]
    unsafe fn block<S: Simd, B: Block, O: Fold>(
        &self,
        simd: S,
        divide: Option<&Divisor>,
        offset: usize,
        mut streams: u64,
    ) {
        // SAFETY: the caller's promise covers the block at `offset` in every view.
        unsafe {
            // No closures: they might be compiled apart, without the instruction set.
            let mut lanes = self.first.1.apply(B::load(simd, self.first.0.add(offset)));
            for (source, loaded) in self.others.clone() {
                lanes = O::fold(lanes, loaded.apply(B::load(simd, source.add(offset))));
            }
            if O::ADDS
                && let Some(divisor) = divide
            {
                lanes = lanes.divide(divisor);
            }
            let rows = B::pack(simd, lanes);
            for to in self.to.clone() {
                B::store(simd, rows, to.add(offset), streams & 1 == 1);
                streams >>= 1;
            }
        }
    }

    /// Reduces `bytes` bytes at `offset`, less than a row.
    ///
    /// # Safety
    /// As [`Views::reduce`]; `offset..offset + bytes` must lie within the pass.
    #[inline(always)]
    unsafe fn part<S: Simd, E: Format, O: Fold>(
        &self,
        simd: S,
        divide: Option<&Divisor>,
        offset: usize,
        bytes: usize,
    ) {
        // SAFETY: the caller's promise covers `bytes` bytes at `offset` in every view.
        unsafe {
            let mut lanes =
                self.first.1.apply(E::unpack(simd, simd.load_first(self.first.0.add(offset), bytes)));
            for (source, loaded) in self.others.clone() {
                lanes =
                    O::fold(lanes, loaded.apply(E::unpack(simd, simd.load_first(source.add(offset), bytes))));
            }
            if O::ADDS
                && let Some(divisor) = divide
            {
                lanes = lanes.divide(divisor);
            }
            let row = E::pack(simd, lanes);
            for to in self.to.clone() {
                simd.store_first(to.add(offset), bytes, row);
            }
        }
    }
}
