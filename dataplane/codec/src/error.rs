//! Why a chunk could not be written or read.

use crate::Codec;
use harmonaize_kernels::KernelError;
use thiserror::Error;

/// Why a chunk could not be written or read. Nothing was written to the destination.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum CodecError {
    /// The chunk ends before its header does, or before what the header promises.
    #[error("a chunk of {given} bytes, which needs {expected}")]
    Short {
        /// Bytes that it must have.
        expected: usize,
        /// Bytes that it has.
        given: usize,
    },
    /// The first bytes are not those of a chunk.
    #[error("this is no chunk: it begins with {found:#06x}")]
    Magic {
        /// The first two bytes.
        found: u16,
    },
    /// A later version wrote it.
    #[error("a chunk of version {version}, not {}", crate::VERSION)]
    Version {
        /// The chunk's version.
        version: u8,
    },
    /// The header's bytes are not those that its check is of.
    #[error("a chunk's header is damaged")]
    Damaged,
    /// The header names a codec, or parameters of one, that this version does not know.
    #[error("a chunk of unknown codec {id} with parameters {parameters:?}")]
    Codec {
        /// The codec's number.
        id: u8,
        /// Its bits, the power of two of its block, and its flags.
        parameters: [u8; 3],
    },
    /// It holds another number of elements.
    #[error("a chunk of {given} elements where {expected} are expected")]
    Elements {
        /// Elements that the caller has room for.
        expected: usize,
        /// Elements that it holds.
        given: u64,
    },
    /// Another codec than those that are to exchange chunks agreed on.
    #[error("a chunk of {given:?}, which is not the codec that was agreed on")]
    NotAgreed {
        /// The chunk's.
        given: Codec,
    },
    /// The payload is not what an encoder could have written.
    #[error("a chunk's payload is damaged")]
    Payload,
    /// The views do not fit, or this CPU lacks something.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}
