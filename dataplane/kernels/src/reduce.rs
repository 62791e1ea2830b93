//! The loop over memory, compiled once per instruction set, element type and reduction.

use crate::divide::Quotient;
use crate::element::{Divisor, Element, Fold, Lane, Max, Min, Product, Sum, binary};
use crate::pass::Pass;
use crate::scalar;
use crate::simd::{Job, Plain, ROW_BYTES, Simd, cast, dispatch};
use crate::{Isa, KernelError};
use half::{bf16, f16};
use harmonaize_abi::{Dtype, ReduceOp};
use std::iter::{empty, once};
use std::marker::PhantomData;

/// Runs a pass.
///
/// # Errors
/// [`KernelError::Isa`] if this CPU lacks the instruction set; nothing is written then.
///
/// # Safety
/// The pass must be of `dtype`.
#[inline(always)]
pub(crate) unsafe fn run(isa: Isa, op: ReduceOp, dtype: Dtype, pass: &Pass<'_>) -> Result<(), KernelError> {
    // SAFETY: the caller's promise.
    unsafe {
        match op {
            ReduceOp::Sum | ReduceOp::Average => of::<Sum>(isa, dtype, pass),
            ReduceOp::Product => of::<Product>(isa, dtype, pass),
            ReduceOp::Min => of::<Min>(isa, dtype, pass),
            ReduceOp::Max => of::<Max>(isa, dtype, pass),
        }
    }
}

/// # Safety
/// As [`run`].
unsafe fn of<O: Fold>(isa: Isa, dtype: Dtype, pass: &Pass<'_>) -> Result<(), KernelError> {
    match dtype {
        Dtype::I8 => dispatch(isa, Reduce::<i8, O>(pass, PhantomData)),
        Dtype::U8 => dispatch(isa, Reduce::<u8, O>(pass, PhantomData)),
        Dtype::I16 => dispatch(isa, Reduce::<i16, O>(pass, PhantomData)),
        Dtype::U16 => dispatch(isa, Reduce::<u16, O>(pass, PhantomData)),
        Dtype::I32 => dispatch(isa, Reduce::<i32, O>(pass, PhantomData)),
        Dtype::U32 => dispatch(isa, Reduce::<u32, O>(pass, PhantomData)),
        Dtype::I64 => dispatch(isa, Reduce::<i64, O>(pass, PhantomData)),
        Dtype::U64 => dispatch(isa, Reduce::<u64, O>(pass, PhantomData)),
        Dtype::F16 => dispatch(isa, Reduce::<f16, O>(pass, PhantomData)),
        Dtype::Bf16 => dispatch(isa, Reduce::<bf16, O>(pass, PhantomData)),
        Dtype::F32 => dispatch(isa, Reduce::<f32, O>(pass, PhantomData)),
        Dtype::F64 => dispatch(isa, Reduce::<f64, O>(pass, PhantomData)),
    }
}

/// An element type, in rows of memory.
pub(crate) trait Format {
    /// A row's elements, in the type that they are computed in.
    type Lanes<S: Simd>: Lane;
    /// As many rows as have 8 registers of lanes.
    type Block<S: Simd>: Block;

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
}

/// Defines the lanes of a type that is computed in itself: its row, its arithmetic, the quotient by a divisor, and what a row becomes before it
/// is stored.
macro_rules! lanes {
    ($($element:ty: $name:ident($row:ident), $sum:ident $product:ident $minimum:ident $maximum:ident,
        |$simd:ident, $lanes:ident, $by:ident| $quotient:expr, $pack:expr;)*) => {$(
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
    i8: I8(Ints), add_8 mul_8 min_i8 max_i8, |_simd, lanes, by| quotients::<_, i8, 64>(lanes, by), same;
    u8: U8(Ints), add_8 mul_8 min_u8 max_u8, |_simd, lanes, by| quotients::<_, u8, 64>(lanes, by), same;
    i16: I16(Ints), add_16 mul_16 min_i16 max_i16, |_simd, lanes, by| quotients::<_, i16, 32>(lanes, by), same;
    u16: U16(Ints), add_16 mul_16 min_u16 max_u16, |_simd, lanes, by| quotients::<_, u16, 32>(lanes, by), same;
    i32: I32(Ints), add_32 mul_32 min_i32 max_i32, |_simd, lanes, by| quotients::<_, i32, 16>(lanes, by), same;
    u32: U32(Ints), add_32 mul_32 min_u32 max_u32, |_simd, lanes, by| quotients::<_, u32, 16>(lanes, by), same;
    i64: I64(Ints), add_64 mul_64 min_i64 max_i64, |_simd, lanes, by| quotients::<_, i64, 8>(lanes, by), same;
    u64: U64(Ints), add_64 mul_64 min_u64 max_u64, |_simd, lanes, by| quotients::<_, u64, 8>(lanes, by), same;
    f32: F32(Floats), add mul minimum maximum, |simd, lanes, by| simd.div(lanes, simd.splat(by.single)), S::one_nan;
    f64: F64(Doubles), add_f64 mul_f64 minimum_f64 maximum_f64,
        |simd, lanes, by| simd.div_f64(lanes, cast([by.double; 8])), S::one_nan_f64;
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

/// A pass of elements `E` whose reduction is `O`.
struct Reduce<'a, E, O>(&'a Pass<'a>, PhantomData<(E, O)>);

impl<E: Element + Format, O: Fold> Job for Reduce<'_, E, O> {
    type Output = ();

    /// Cost: reads every source once and writes every destination once, in blocks of several rows that stay in
    /// registers while the sources are folded in: per block, one predictable branch a source and a destination. Destinations
    /// that stream cost memory one transfer a byte, the others two where they miss the caches. A pass of one source or two into
    /// one destination that stays in the caches, as a segment's steps and an aggregator's parts are, has none of these branches.
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let pass = self.0;
        let Some((first, others)) = pass.sources.split_first() else { return };
        let first = first.pointer();
        // SAFETY: a pass's views hold `bytes` bytes, whole elements; the head is whole elements, fewer bytes than a row and than the pass,
        // and brings what streams to a multiple of 64.
        unsafe {
            match (pass.destinations, others, pass.divide, pass.streams) {
                ([to], [], None, 0) => {
                    Views { first, others: empty(), to: once(to.pointer()) }
                        .reduce::<S, E, O>(simd, pass, None, 0);
                }
                ([to], [other], None, 0) => {
                    let (others, to) = (once(other.pointer()), once(to.pointer()));
                    Views { first, others, to }.reduce::<S, E, O>(simd, pass, None, 0);
                }
                (to, others, divide, streams) => {
                    let (others, to) =
                        (others.iter().map(|view| view.pointer()), to.iter().map(|view| view.pointer()));
                    Views { first, others, to }.reduce::<S, E, O>(simd, pass, divide, streams);
                }
            }
        }
    }
    #[inline(always)]
    fn run_portable(self) {
        // SAFETY: a pass of elements `E`, as whoever made it promised.
        unsafe { scalar::run::<E, O>(self.0) }
    }
}

/// What a pass reads and writes.
#[derive(Clone)]
struct Views<Sources, Destinations> {
    first: *const u8,
    others: Sources,
    to: Destinations,
}

impl<Sources, Destinations> Views<Sources, Destinations>
where
    Sources: Iterator<Item = *const u8> + Clone,
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
        let (bytes, mut offset) = (pass.bytes, pass.head);
        // SAFETY: the caller's promise; each step lies between the offset and `bytes`, and is a multiple of 64 bytes until the last.
        unsafe {
            if offset > 0 {
                self.part::<S, E, O>(simd, divide, 0, offset);
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
            if bytes > offset {
                self.part::<S, E, O>(simd, divide, offset, bytes - offset);
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
            let mut lanes = B::load(simd, self.first.add(offset));
            for source in self.others.clone() {
                lanes = O::fold(lanes, B::load(simd, source.add(offset)));
            }
            if let Some(divisor) = divide {
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
            let mut lanes = E::unpack(simd, simd.load_first(self.first.add(offset), bytes));
            for source in self.others.clone() {
                lanes = O::fold(lanes, E::unpack(simd, simd.load_first(source.add(offset), bytes)));
            }
            if let Some(divisor) = divide {
                lanes = lanes.divide(divisor);
            }
            let row = E::pack(simd, lanes);
            for to in self.to.clone() {
                simd.store_first(to.add(offset), bytes, row);
            }
        }
    }
}
