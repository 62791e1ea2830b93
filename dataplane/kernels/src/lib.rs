//! Element-wise reduction and copying of tensor bytes: one pass over any number of sources and destinations. There are
//! a scalar reference and the CPU's vector instructions, which give the same bits. Forms of fewer bits are in
//! [`codes`].
//!
//! # What a result is
//! - Element `i` of every source is read before element `i` of any destination is written, so a destination may be
//!   exactly a source (in place). A destination that overlaps a source, or another destination, at a different offset
//!   gets unspecified values. Memory outside the destinations is never written, none outside the views ever read.
//! - The order is `((s0 op s1) op s2) ...` for each element; no contraction, no reassociation.
//! - Integers wrap. Floats round to nearest even, subnormals are kept. Floats of 8 and 16 bits are widened to `f32`, the
//!   whole pass (and its factors and division) is computed in `f32`, and the result is rounded once, at its end.
//! - A finite result beyond the greatest number of an 8-bit float is that number. Infinities of `f8e5m2` stay what they are;
//!   what would be infinite in `f8e4m3` is its greatest number.
//! - A float result that is NaN is always *the* NaN of its type: sign 0, quiet, payload 0 (`0x7f` and `0x7e` of 8 bits, `0x7e00`, `0x7fc0`,
//!   `0x7fc0_0000`, `0x7ff8_0000_0000_0000`), also for a pass with one source. `Min` and `Max` are NaN where any operand
//!   is NaN, and hold -0 less than +0 (IEEE 754-2019 minimum and maximum).
//! - Division by `n`: floats divide (`f16` and `bf16` in `f32`) by `n` rounded to the type they compute in; integers
//!   truncate towards zero, the wrapped result being the dividend.
//! - A factor is rounded to the type that floats compute in; integers are multiplied by its whole part, and wrap.
//! - Bools are 0 or 1 after any pass: a byte that is not 0 is true. Their sum and greater is "or", their product and lesser "and".
//! - Complex numbers are pairs of floats to all but products: `(a + bi)(c + di)` is `(ac - bd) + (ad + bc)i`, so computed.
//! - All of the above holds bit for bit on every [`Isa`], so ranks on different CPUs agree.
//!
//! # Memory that others write
//! Views are read and written through raw pointers of any alignment, and what is read decides no address and no branch:
//! a tenant that changes its tensor during a pass changes values in the destinations, nothing else. Of codes it may also falsify the
//! squares that are told, and of blocks that are not zeros where bytes lie within the destination.
//!
//! Architecture invariant: no allocation, no threads, no I/O.

pub mod codes;
mod divide;
mod element;
mod error;
mod isa;
mod pass;
pub mod polyval;
mod reduce;
mod scalar;
mod simd;
#[cfg(test)]
mod tests;

pub use error::KernelError;
pub use isa::Isa;

use element::{Divisor, Factor};
use harmonaize_abi::{Dtype, ReduceOp, View, ViewMut};
use pass::Pass;

/// Most sources that one pass reads.
pub const MAX_SOURCES: usize = 8;

/// Bytes to all destinations together from which on an operation writes past the caches, where the CPU can.
/// They are twice the caches of a core and more: little of it would still be there for whoever reads it next. Memory is spared
/// reading each line before it is written. On a server of 2 MiB a core and 260 MiB shared, streaming two sources of 8 MiB
/// into one destination is 1.4 times as fast, of 64 MiB 1.8 times.
pub const STREAM_FROM: usize = 8 << 20;

/// How a pass is run.
#[derive(Clone, Copy, Debug)]
pub struct PassOptions {
    isa: Isa,
    whole: usize,
}

impl PassOptions {
    /// By an instruction set, for tests and benchmarks.
    pub fn by(isa: Isa) -> Self {
        Self { isa, whole: 0 }
    }

    /// As a part of tensors that have `whole` bytes each, of which one part is passed over after the other. Whether they pay to be
    /// written past the caches depends on the whole, not on a part.
    pub fn part_of(whole: usize) -> Self {
        Self { whole, ..Self::default() }
    }

    /// The bytes of the tensors, and from how many on they stream.
    fn streaming(self) -> (usize, usize) {
        (self.whole, STREAM_FROM)
    }
}

impl Default for PassOptions {
    /// By the widest instruction set of this CPU, over whole tensors.
    fn default() -> Self {
        Self::by(Isa::detect())
    }
}

/// Reduces `sources` (1 to [`MAX_SOURCES`]) into every one of `destinations` (at least 1) in one pass. `divide: Some(n)` then divides each
/// element by `n`, which is the last step of an `Average`. `Average` adds like `Sum`, and these two alone are divided. `PremulSum` adds
/// like `Sum` what [`sum_scaled`] has multiplied. All views have the same length, a whole number of elements; a length of 0 does nothing.
///
/// # Errors
/// See [`KernelError`]; nothing is written then.
pub fn reduce(
    op: ReduceOp,
    dtype: Dtype,
    sources: &[View<'_>],
    destinations: &[ViewMut<'_>],
    divide: Option<u32>,
) -> Result<(), KernelError> {
    reduce_with(PassOptions::default(), op, dtype, sources, destinations, divide)
}

/// [`reduce`] by these options.
///
/// # Errors
/// As [`reduce`], and [`KernelError::Isa`] if this CPU lacks the instruction set.
pub fn reduce_with(
    options: PassOptions,
    op: ReduceOp,
    dtype: Dtype,
    sources: &[View<'_>],
    destinations: &[ViewMut<'_>],
    divide: Option<u32>,
) -> Result<(), KernelError> {
    if !op.takes(dtype)
        || divide.is_some()
            && !(matches!(op, ReduceOp::Sum | ReduceOp::Average) && ReduceOp::Average.takes(dtype))
    {
        return Err(KernelError::Reduction { op, dtype });
    }
    let divisor;
    let divide = match divide {
        None => None,
        Some(ranks) => {
            divisor = Divisor::new(ranks).ok_or(KernelError::DivideByZero)?;
            Some(&divisor)
        }
    };
    let pass = Pass::new(dtype, sources, destinations, divide, options.streaming())?;
    // SAFETY: of one `dtype`.
    unsafe { reduce::run(options.isa, op, dtype, &pass) }
}

/// Adds `sources` up as [`reduce`] does, each multiplied by the factor at its place.
///
/// # Errors
/// As [`reduce`], and [`KernelError::Factors`] where their numbers differ.
pub fn sum_scaled(
    dtype: Dtype,
    sources: &[View<'_>],
    factors: &[f64],
    destinations: &[ViewMut<'_>],
) -> Result<(), KernelError> {
    sum_scaled_with(PassOptions::default(), dtype, sources, factors, destinations)
}

/// [`sum_scaled`] by these options.
///
/// # Errors
/// As [`sum_scaled`], and [`KernelError::Isa`] if this CPU lacks the instruction set.
pub fn sum_scaled_with(
    options: PassOptions,
    dtype: Dtype,
    sources: &[View<'_>],
    factors: &[f64],
    destinations: &[ViewMut<'_>],
) -> Result<(), KernelError> {
    let op = ReduceOp::PremulSum;
    if !op.takes(dtype) {
        return Err(KernelError::Reduction { op, dtype });
    }
    let pass = Pass::new(dtype, sources, destinations, None, options.streaming())?;
    if factors.len() != sources.len() {
        return Err(KernelError::Factors { expected: sources.len(), given: factors.len() });
    }
    let mut by = [Factor::new(1.0); MAX_SOURCES];
    by.iter_mut().zip(factors).for_each(|(by, factor)| *by = Factor::new(*factor));
    // SAFETY: of one `dtype`.
    unsafe { reduce::run_scaled(options.isa, dtype, &pass, by.get(..factors.len()).unwrap_or_default()) }
}

/// Copies `source` to every one of `destinations` (at least 1), all of the same length. A destination that is exactly the
/// source is left alone.
///
/// # Errors
/// [`KernelError::NoDestination`] and [`KernelError::Length`]; nothing is written then.
pub fn copy(source: View<'_>, destinations: &[ViewMut<'_>]) -> Result<(), KernelError> {
    copy_with(PassOptions::default(), source, destinations)
}

/// [`copy`] by these options.
///
/// # Errors
/// As [`copy`], and [`KernelError::Isa`] if this CPU lacks the instruction set.
pub fn copy_with(
    options: PassOptions,
    source: View<'_>,
    destinations: &[ViewMut<'_>],
) -> Result<(), KernelError> {
    // One source is folded with nothing: its bytes, in whatever lanes.
    let sources = [source];
    let pass = |to| Pass::new(Dtype::U8, &sources, to, None, options.streaming());
    // SAFETY: both are of bytes.
    let copy = |pass| unsafe { reduce::run(options.isa, ReduceOp::Sum, Dtype::U8, &pass) };
    let all = pass(destinations)?;
    let is_source = |destination: &ViewMut<'_>| destination.pointer().cast_const() == source.pointer();
    if !destinations.iter().any(is_source) {
        return copy(all);
    }
    destinations
        .split(is_source)
        .filter(|others| !others.is_empty())
        .try_for_each(|others| copy(pass(others)?))
}
