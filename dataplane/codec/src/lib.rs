//! Compressed tensors: chunks that say of themselves how to read them, and what each lost.
//! What an encoder left out is kept for the next step. A compressed AllReduce's arithmetic is here, and the choice of the codec
//! that makes an operation end soonest within its tenant's budget.
//!
//! A chunk is a [`Header`] and a payload. [`encode`] writes one into a caller's buffer, whose size [`Codec::max_bytes`] tells
//! beforehand; [`decode`] reads one from bytes that may be anything, and gives values or a [`CodecError`]. Neither allocates. What an
//! AllReduce does with chunks, a caller may do in slices ([`Passes`]), or [as a whole](whole).
//!
//! Architecture invariant: no clock, no socket, no thread, no file; time and speeds come in as arguments.
#![forbid(unsafe_code)]

mod budget;
mod chunk;
mod codec;
mod controller;
mod error;
mod feedback;
mod header;
mod passes;
mod reduction;

pub use budget::{Budget, BudgetError};
pub use chunk::{Encoded, decode, encode, header, state};
pub use codec::Codec;
pub use controller::{Choice, Controller, Level, Outlook};
pub use error::CodecError;
pub use feedback::ErrorFeedback;
pub use harmonaize_kernels::codes::{Code, Grid, Rounding, Squares, Store};
pub use header::{HEADER_BYTES, Header, VERSION};
pub use passes::{Cursor, Load, PART, Passes, whole};
pub use reduction::{Coded, Sums, Terms, shared_spread};
