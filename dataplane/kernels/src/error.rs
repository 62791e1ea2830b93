//! Why a pass was refused, before it touched any memory.

use crate::{Isa, MAX_SOURCES};
use harmonaize_abi::{Dtype, ReduceOp};
use std::fmt;

/// Why a pass was refused. Nothing was read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelError {
    /// A pass reads 1 to [`MAX_SOURCES`] sources.
    Sources {
        /// Sources given.
        given: usize,
    },
    /// A pass writes at least one destination.
    NoDestination,
    /// A view differs in length from the first source.
    Length {
        /// Bytes of the first source.
        expected: usize,
        /// Bytes of the view that differs.
        given: usize,
    },
    /// The length is not a whole number of elements.
    PartialElement {
        /// Bytes of each view.
        bytes: usize,
        /// Element type, whose size does not divide `bytes`.
        dtype: Dtype,
    },
    /// The result was to be divided by 0.
    DivideByZero,
    /// Elements of this type are not so reduced, or not so reduced and divided.
    Reduction {
        /// The reduction.
        op: ReduceOp,
        /// Element type.
        dtype: Dtype,
    },
    /// There must be a factor for each source.
    Factors {
        /// Sources.
        expected: usize,
        /// Factors given.
        given: usize,
    },
    /// The code has no blocks of this size.
    Block,
    /// Coded bytes that no encoder wrote.
    Content,
    /// This CPU lacks the instruction set.
    Isa {
        /// The instruction set that was asked for.
        isa: Isa,
    },
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sources { given } => write!(f, "a pass reads 1 to {MAX_SOURCES} sources, not {given}"),
            Self::NoDestination => f.write_str("a pass needs at least one destination"),
            Self::Length { expected, given } => {
                write!(f, "views of one pass differ in length: {given} bytes beside {expected}")
            }
            Self::PartialElement { bytes, dtype } => {
                write!(f, "{bytes} bytes are not a whole number of {dtype} elements")
            }
            Self::DivideByZero => f.write_str("an average over 0 ranks does not exist"),
            Self::Reduction { op, dtype } => write!(f, "{dtype} has no {op}"),
            Self::Factors { expected, given } => write!(f, "{given} factors for {expected} sources"),
            Self::Block => f.write_str("this code has no blocks of that size"),
            Self::Content => f.write_str("these coded bytes are damaged"),
            Self::Isa { isa } => write!(f, "this CPU lacks {isa}"),
        }
    }
}

impl std::error::Error for KernelError {}
