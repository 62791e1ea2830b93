//! The loop over memory that all vector instruction sets share, compiled once per instruction set, element type and
//! reduction.

use crate::element::{Fold, Lane};
use crate::pass::Pass;
use harmonaize_abi::View;

/// Bytes of memory in a CPU register. A value exists only on a CPU that has the register's instruction set: the unsafe
/// loads are the only way to one, which makes arithmetic on it safe.
pub(crate) trait Register: Copy {
    /// Bytes that it holds.
    const BYTES: usize;

    /// # Safety
    /// The CPU must have the instruction set; `from` must be readable for `BYTES` bytes, at any alignment.
    unsafe fn load(from: *const u8) -> Self;

    /// The first `bytes`, less than `BYTES`, and zeros.
    ///
    /// # Safety
    /// The CPU must have the instruction set; `from` must be readable for `bytes` bytes, at any alignment.
    unsafe fn load_first(from: *const u8, bytes: usize) -> Self;

    /// # Safety
    /// `to` must be writable for `BYTES` bytes, at any alignment.
    unsafe fn store(self, to: *mut u8);

    /// # Safety
    /// `to` must be writable for `bytes` bytes, less than `BYTES`, at any alignment.
    unsafe fn store_first(self, to: *mut u8, bytes: usize);

    /// Stores past the caches; [`Register::fence`] orders it before later stores.
    ///
    /// # Safety
    /// `to` must be writable for `BYTES` bytes and a multiple of `BYTES`.
    unsafe fn stream(self, to: *mut u8);

    /// Makes earlier streaming stores visible before later stores.
    ///
    /// # Safety
    /// The CPU must have the instruction set.
    unsafe fn fence();
}

/// Defines, for an instruction set's vectors in scope under the names of their element types, the function from operation
/// and element type to kernel. Blocks are of 8 registers of lanes: 4 vectors where one widens to two.
macro_rules! kernels {
    ($features:literal) => {
        /// The kernel for an operation and an element type.
        pub(crate) fn kernel(
            op: harmonaize_abi::ReduceOp,
            dtype: harmonaize_abi::Dtype,
        ) -> crate::pass::Kernel {
            use crate::element::{Max, Min, Product, Sum};
            use harmonaize_abi::ReduceOp;
            match op {
                ReduceOp::Sum | ReduceOp::Average => of::<Sum>(dtype),
                ReduceOp::Product => of::<Product>(dtype),
                ReduceOp::Min => of::<Min>(dtype),
                ReduceOp::Max => of::<Max>(dtype),
            }
        }

        fn of<O: crate::element::Fold>(dtype: harmonaize_abi::Dtype) -> crate::pass::Kernel {
            use harmonaize_abi::Dtype;
            match dtype {
                Dtype::I8 => run::<I8, O, 8>,
                Dtype::U8 => run::<U8, O, 8>,
                Dtype::I32 => run::<I32, O, 8>,
                Dtype::U32 => run::<U32, O, 8>,
                Dtype::I64 => run::<I64, O, 8>,
                Dtype::U64 => run::<U64, O, 8>,
                Dtype::F16 => run::<F16, O, 4>,
                Dtype::Bf16 => run::<Bf16, O, 4>,
                Dtype::F32 => run::<F32, O, 8>,
                Dtype::F64 => run::<F64, O, 8>,
            }
        }

        /// # Safety
        /// As [`crate::vector::run`].
        #[target_feature(enable = $features)]
        unsafe fn run<V: crate::vector::Vector, O: crate::element::Fold, const N: usize>(
            pass: &crate::pass::Pass<'_>,
        ) {
            // SAFETY: the caller's promise.
            unsafe { crate::vector::run::<V, O, N>(pass) }
        }
    };
}
pub(crate) use kernels;

/// Defines a vector of integers in one register: its name, the register and what it wraps, its lanes, and the intrinsics
/// (or functions of the same shape) of its arithmetic.
macro_rules! integers {
    ($($name:ident: $register:ident, [$lane:ty; $count:literal], $sum:ident $product:ident $min:ident $max:ident;)*) => {$(
        #[derive(Clone, Copy)]
        struct $name($register);

        impl crate::vector::Vector for $name {
            type Register = $register;

            #[inline(always)]
            fn unpack(register: $register) -> Self {
                Self(register)
            }

            #[inline(always)]
            fn pack(self) -> $register {
                self.0
            }
        }

        impl crate::element::Lane for $name {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                // SAFETY: the register exists, so the CPU has the instruction set.
                Self($register(unsafe { $sum(self.0.0, other.0.0) }))
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                // SAFETY: as above.
                Self($register(unsafe { $product(self.0.0, other.0.0) }))
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                // SAFETY: as above.
                Self($register(unsafe { $min(self.0.0, other.0.0) }))
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                // SAFETY: as above.
                Self($register(unsafe { $max(self.0.0, other.0.0) }))
            }

            #[inline(always)]
            fn divide(self, by: &crate::element::Divisor) -> Self {
                // SAFETY: of the same size, and any bits are valid in both.
                let mut lanes: [$lane; $count] = unsafe { core::mem::transmute(self.0) };
                for lane in &mut lanes {
                    *lane = crate::divide::Quotient::quotient(*lane, by);
                }
                // SAFETY: as above.
                Self(unsafe { core::mem::transmute::<[$lane; $count], $register>(lanes) })
            }
        }
    )*};
}
pub(crate) use integers;

/// Defines the arithmetic of a vector of two halves, each half's being the other vector's.
macro_rules! halves {
    ($($name:ident of $half:ident;)*) => {$(
        /// Two registers of lanes, made from one register of narrower elements.
        #[derive(Clone, Copy)]
        struct $name($half, $half);

        impl crate::element::Lane for $name {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                Self(self.0.sum(other.0), self.1.sum(other.1))
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                Self(self.0.product(other.0), self.1.product(other.1))
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                Self(self.0.minimum(other.0), self.1.minimum(other.1))
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                Self(self.0.maximum(other.0), self.1.maximum(other.1))
            }

            #[inline(always)]
            fn divide(self, by: &crate::element::Divisor) -> Self {
                Self(self.0.divide(by), self.1.divide(by))
            }
        }
    )*};
}
pub(crate) use halves;

/// A register's worth of elements, widened to the type that they are computed in.
pub(crate) trait Vector: Lane {
    type Register: Register;
    fn unpack(register: Self::Register) -> Self;
    /// Rounds to nearest even; any NaN becomes the type's one NaN.
    fn pack(self) -> Self::Register;
}

/// Cost: reads every source once and writes every destination once, in blocks of `N` registers that stay in registers
/// while the sources are folded in: per block, one predictable branch a source and a destination. Destinations that
/// stream cost memory one transfer a byte, the others two where they miss the caches.
///
/// # Safety
/// The CPU must have `V`'s instruction set, and `pass` must be of `V`'s element type.
#[inline(always)]
pub(crate) unsafe fn run<V: Vector, O: Fold, const N: usize>(pass: &Pass<'_>) {
    let Some((first, others)) = pass.sources.split_first() else { return };
    let width = V::Register::BYTES;
    let mut offset = pass.head(width);
    if offset > 0 {
        // SAFETY: the head is whole elements, fewer bytes than `width` and than the pass.
        unsafe { partial::<V, O>(pass, first, others, 0, offset) };
    }
    if pass.streams != 0 {
        while pass.bytes - offset >= N * width {
            // SAFETY: the block lies within every view; `offset` is such that what streams is aligned.
            unsafe { block::<V, O, N, true>(pass, first, others, offset) };
            offset += N * width;
        }
        // SAFETY: the caller's promise.
        unsafe { V::Register::fence() };
    } else {
        while pass.bytes - offset >= N * width {
            // SAFETY: the block lies within every view.
            unsafe { block::<V, O, N, false>(pass, first, others, offset) };
            offset += N * width;
        }
    }
    while pass.bytes - offset >= width {
        // SAFETY: the block lies within every view.
        unsafe { block::<V, O, 1, false>(pass, first, others, offset) };
        offset += width;
    }
    if pass.bytes > offset {
        // SAFETY: less than `width` bytes remain, whole elements.
        unsafe { partial::<V, O>(pass, first, others, offset, pass.bytes - offset) };
    }
}

/// Reduces `N` registers' worth of memory at `offset`.
///
/// # Safety
/// As [`run`]; the block must lie within the pass, and what streams must be aligned at `offset`.
#[inline(always)]
unsafe fn block<V: Vector, O: Fold, const N: usize, const STREAM: bool>(
    pass: &Pass<'_>,
    first: &View<'_>,
    others: &[View<'_>],
    offset: usize,
) {
    let width = V::Register::BYTES;
    // SAFETY: the caller's promise covers `N * width` bytes at `offset` in every view.
    unsafe {
        let from = first.pointer().add(offset);
        let mut lanes = [V::unpack(V::Register::load(from)); N];
        for (index, lane) in lanes.iter_mut().enumerate() {
            *lane = V::unpack(V::Register::load(from.add(index * width)));
        }
        for source in others {
            let from = source.pointer().add(offset);
            for (index, lane) in lanes.iter_mut().enumerate() {
                *lane = O::fold(*lane, V::unpack(V::Register::load(from.add(index * width))));
            }
        }
        if let Some(divisor) = &pass.divide {
            for lane in &mut lanes {
                *lane = lane.divide(divisor);
            }
        }
        let mut packed = [V::Register::load(from); N];
        for (packed, lane) in packed.iter_mut().zip(&lanes) {
            *packed = lane.pack();
        }
        let mut streams = pass.streams;
        for destination in pass.destinations {
            let to = destination.pointer().add(offset);
            for (index, packed) in packed.iter().enumerate() {
                if STREAM && streams & 1 == 1 {
                    packed.stream(to.add(index * width));
                } else {
                    packed.store(to.add(index * width));
                }
            }
            streams >>= 1;
        }
    }
}

/// Reduces `bytes` bytes at `offset`, less than a register's.
///
/// # Safety
/// As [`run`]; `offset..offset + bytes` must lie within the pass.
#[inline(always)]
unsafe fn partial<V: Vector, O: Fold>(
    pass: &Pass<'_>,
    first: &View<'_>,
    others: &[View<'_>],
    offset: usize,
    bytes: usize,
) {
    // SAFETY: the caller's promise covers `bytes` bytes at `offset` in every view.
    unsafe {
        let mut lane = V::unpack(V::Register::load_first(first.pointer().add(offset), bytes));
        for source in others {
            let register = V::Register::load_first(source.pointer().add(offset), bytes);
            lane = O::fold(lane, V::unpack(register));
        }
        if let Some(divisor) = &pass.divide {
            lane = lane.divide(divisor);
        }
        let packed = lane.pack();
        for destination in pass.destinations {
            packed.store_first(destination.pointer().add(offset), bytes);
        }
    }
}
