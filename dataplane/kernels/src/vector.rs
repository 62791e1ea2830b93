//! The loop over memory that all vector instruction sets share, compiled once per instruction set, element type and
//! reduction.

use crate::element::{Divisor, Fold, Lane};
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

    /// # Safety
    /// `to` must be writable for `BYTES` bytes, at any alignment.
    unsafe fn store(self, to: *mut u8);

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

/// A register that can also move fewer bytes than it holds.
pub(crate) trait Ragged: Register {
    /// The first `bytes`, less than `BYTES`, and zeros.
    ///
    /// # Safety
    /// The CPU must have the instruction set; `from` must be readable for `bytes` bytes, at any alignment.
    unsafe fn load_first(from: *const u8, bytes: usize) -> Self;

    /// # Safety
    /// `to` must be writable for `bytes` bytes, less than `BYTES`, at any alignment.
    unsafe fn store_first(self, to: *mut u8, bytes: usize);
}

/// Defines, for an instruction set's vectors in scope under the names of their element types, the function from operation
/// and element type to kernel. Blocks keep 8 registers of lanes: 4 vectors where one widens
/// to two.
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
            use crate::vector::{Eight, Four};
            use harmonaize_abi::Dtype;
            match dtype {
                Dtype::I8 => run::<I8, Eight<I8>, O>,
                Dtype::U8 => run::<U8, Eight<U8>, O>,
                Dtype::I32 => run::<I32, Eight<I32>, O>,
                Dtype::U32 => run::<U32, Eight<U32>, O>,
                Dtype::I64 => run::<I64, Eight<I64>, O>,
                Dtype::U64 => run::<U64, Eight<U64>, O>,
                Dtype::F16 => run::<F16, Four<F16>, O>,
                Dtype::Bf16 => run::<Bf16, Four<Bf16>, O>,
                Dtype::F32 => run::<F32, Eight<F32>, O>,
                Dtype::F64 => run::<F64, Eight<F64>, O>,
            }
        }

        /// # Safety
        /// As [`crate::vector::run`].
        #[target_feature(enable = $features)]
        unsafe fn run<V, B, O>(pass: &crate::pass::Pass<'_>)
        where
            V: crate::vector::Vector<Register: crate::vector::Ragged>,
            B: crate::vector::Vector,
            O: crate::element::Fold,
        {
            // SAFETY: the caller's promise.
            unsafe { crate::vector::run::<V, B, O>(pass) }
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

/// Two of a kind that lie side by side in memory, to make blocks of: unlike an array's, its parts stay in registers.
#[derive(Clone, Copy)]
pub(crate) struct Pair<T>(T, T);

/// A block of 4.
pub(crate) type Four<T> = Pair<Pair<T>>;
/// A block of 8.
pub(crate) type Eight<T> = Pair<Four<T>>;

impl<R: Register> Register for Pair<R> {
    const BYTES: usize = 2 * R::BYTES;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: the caller's promise covers both.
        unsafe { Self(R::load(from), R::load(from.add(R::BYTES))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: the caller's promise covers both.
        unsafe {
            self.0.store(to);
            self.1.store(to.add(R::BYTES));
        }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: the caller's promise covers both.
        unsafe {
            self.0.stream(to);
            self.1.stream(to.add(R::BYTES));
        }
    }

    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: the caller's promise.
        unsafe { R::fence() }
    }
}

impl<L: Lane> Lane for Pair<L> {
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
    fn divide(self, by: &Divisor) -> Self {
        Self(self.0.divide(by), self.1.divide(by))
    }
}

impl<V: Vector> Vector for Pair<V> {
    type Register = Pair<V::Register>;

    #[inline(always)]
    fn unpack(register: Self::Register) -> Self {
        Self(V::unpack(register.0), V::unpack(register.1))
    }

    #[inline(always)]
    fn pack(self) -> Self::Register {
        Pair(self.0.pack(), self.1.pack())
    }
}

/// Cost: reads every source once and writes every destination once, in blocks `B` of several vectors `V` that stay in
/// registers while the sources are folded in: per block, one predictable branch a source and a destination. Destinations
/// that stream cost memory one transfer a byte, the others two where they miss the caches.
///
/// # Safety
/// The CPU must have `V`'s instruction set, and `pass` must be of `V`'s element type.
#[inline(always)]
pub(crate) unsafe fn run<V, B, O>(pass: &Pass<'_>)
where
    V: Vector<Register: Ragged>,
    B: Vector,
    O: Fold,
{
    let Some((first, others)) = pass.sources.split_first() else { return };
    let (width, block_width) = (V::Register::BYTES, B::Register::BYTES);
    let mut offset = pass.head(width);
    if let ([to], None, 0) = (pass.destinations, pass.divide, pass.streams) {
        let (first, to) = (first.pointer(), to.pointer());
        match others {
            // SAFETY: a pass's views hold `bytes` bytes, whole elements, and the head is fewer.
            [] => return unsafe { plain::<V, B, O>(first, None, to, pass.bytes, offset) },
            // SAFETY: as above.
            [one] => return unsafe { plain::<V, B, O>(first, Some(one.pointer()), to, pass.bytes, offset) },
            _ => {}
        }
    }
    // SAFETY: a pass's views hold `bytes` bytes, whole elements; the head is whole elements, fewer bytes than `width` and
    // than the pass, and brings what streams to a multiple of `width`, as each step does that follows.
    unsafe {
        if offset > 0 {
            partial::<V, O>(pass, first, others, 0, offset);
        }
        if pass.streams != 0 {
            while pass.bytes - offset >= block_width {
                block::<B, O, true>(pass, first, others, offset);
                offset += block_width;
            }
            B::Register::fence();
        } else {
            while pass.bytes - offset >= block_width {
                block::<B, O, false>(pass, first, others, offset);
                offset += block_width;
            }
        }
        while pass.bytes - offset >= width {
            block::<V, O, false>(pass, first, others, offset);
            offset += width;
        }
        if pass.bytes > offset {
            partial::<V, O>(pass, first, others, offset, pass.bytes - offset);
        }
    }
}

/// A pass of one source or two into one destination, which stays in the caches: what a segment's steps and an aggregator's parts are.
/// A part of 1,392 bytes takes no longer than its share of a long pass.
///
/// # Safety
/// As [`run`]; the sources must be readable, and `to` writable, for `bytes` bytes, of which the first `head` are done first.
#[inline(always)]
unsafe fn plain<V, B, O>(first: *const u8, second: Option<*const u8>, to: *mut u8, bytes: usize, head: usize)
where
    V: Vector<Register: Ragged>,
    B: Vector,
    O: Fold,
{
    let mut offset = head;
    // SAFETY: the caller's promise; each step lies between the offset and `bytes`.
    unsafe {
        if head > 0 {
            plain_first::<V, O>(first, second, to, 0, head);
        }
        while bytes - offset >= B::Register::BYTES {
            plain_block::<B, O>(first, second, to, offset);
            offset += B::Register::BYTES;
        }
        while bytes - offset >= V::Register::BYTES {
            plain_block::<V, O>(first, second, to, offset);
            offset += V::Register::BYTES;
        }
        if bytes > offset {
            plain_first::<V, O>(first, second, to, offset, bytes - offset);
        }
    }
}

/// A block of [`plain`] at `offset`.
///
/// # Safety
/// As [`plain`]; the block must lie within the pass.
#[inline(always)]
unsafe fn plain_block<B: Vector, O: Fold>(
    first: *const u8,
    second: Option<*const u8>,
    to: *mut u8,
    offset: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut lanes = B::unpack(B::Register::load(first.add(offset)));
        if let Some(second) = second {
            lanes = O::fold(lanes, B::unpack(B::Register::load(second.add(offset))));
        }
        lanes.pack().store(to.add(offset));
    }
}

/// `bytes` bytes of [`plain`] at `offset`, less than a register's.
///
/// # Safety
/// As [`plain`]; the bytes must lie within the pass.
#[inline(always)]
unsafe fn plain_first<V: Vector<Register: Ragged>, O: Fold>(
    first: *const u8,
    second: Option<*const u8>,
    to: *mut u8,
    offset: usize,
    bytes: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut lanes = V::unpack(V::Register::load_first(first.add(offset), bytes));
        if let Some(second) = second {
            lanes = O::fold(lanes, V::unpack(V::Register::load_first(second.add(offset), bytes)));
        }
        lanes.pack().store_first(to.add(offset), bytes);
    }
}

/// Reduces one block of memory at `offset`: all its sources are read before any destination is written.
///
/// # Safety
/// As [`run`]; the block must lie within the pass, and what streams must be aligned at `offset`.
#[inline(always)]
unsafe fn block<B: Vector, O: Fold, const STREAM: bool>(
    pass: &Pass<'_>,
    first: &View<'_>,
    others: &[View<'_>],
    offset: usize,
) {
    // SAFETY: the caller's promise covers the block at `offset` in every view.
    unsafe {
        let mut lanes = B::unpack(B::Register::load(first.pointer().add(offset)));
        for source in others {
            lanes = O::fold(lanes, B::unpack(B::Register::load(source.pointer().add(offset))));
        }
        if let Some(divisor) = pass.divide {
            lanes = lanes.divide(divisor);
        }
        let packed = lanes.pack();
        let mut streams = pass.streams;
        for destination in pass.destinations {
            let to = destination.pointer().add(offset);
            if STREAM && streams & 1 == 1 {
                packed.stream(to);
            } else {
                packed.store(to);
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
unsafe fn partial<V: Vector<Register: Ragged>, O: Fold>(
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
        if let Some(divisor) = pass.divide {
            lane = lane.divide(divisor);
        }
        let packed = lane.pack();
        for destination in pass.destinations {
            packed.store_first(destination.pointer().add(offset), bytes);
        }
    }
}
