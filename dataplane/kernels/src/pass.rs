//! One pass over memory, checked: what a kernel is given.

use crate::element::Divisor;
use crate::{KernelError, MAX_SOURCES};
use harmonaize_abi::{Dtype, View, ViewMut};

/// Runs a pass.
///
/// # Safety
/// The CPU must have the kernel's instruction set, and the pass must be of the kernel's element type.
pub(crate) type Kernel = unsafe fn(&Pass<'_>);

/// Sources and destinations of one pass. Holds: 1 to [`MAX_SOURCES`] sources, at least 1 destination, each of exactly
/// `bytes` bytes, a whole number of elements.
pub(crate) struct Pass<'a> {
    pub(crate) sources: &'a [View<'a>],
    pub(crate) destinations: &'a [ViewMut<'a>],
    pub(crate) bytes: usize,
    pub(crate) divide: Option<Divisor>,
}

impl<'a> Pass<'a> {
    pub(crate) fn new(
        dtype: Dtype,
        sources: &'a [View<'a>],
        destinations: &'a [ViewMut<'a>],
        divide: Option<u32>,
    ) -> Result<Self, KernelError> {
        let given = sources.len();
        let Some(first) = sources.first().filter(|_| given <= MAX_SOURCES) else {
            return Err(KernelError::Sources { given });
        };
        if destinations.is_empty() {
            return Err(KernelError::NoDestination);
        }
        let bytes = first.bytes();
        let lengths =
            sources.iter().map(|view| view.bytes()).chain(destinations.iter().map(|view| view.bytes()));
        for given in lengths {
            if given != bytes {
                return Err(KernelError::Length { expected: bytes, given });
            }
        }
        if !bytes.is_multiple_of(dtype.size()) {
            return Err(KernelError::PartialElement { bytes, dtype });
        }
        let divide = match divide {
            Some(ranks) => Some(Divisor::new(ranks).ok_or(KernelError::DivideByZero)?),
            None => None,
        };
        Ok(Self { sources, destinations, bytes, divide })
    }
}
