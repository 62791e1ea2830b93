//! Writing chunks and reading them.

use crate::{Codec, CodecError, HEADER_BYTES, Header, Squares, Store};
use harmonaize_abi::{Dtype, View, ViewMut};
use harmonaize_kernels::{Isa, KernelError, codes, copy};

/// A chunk that was written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Encoded {
    /// Bytes of the chunk, with its header.
    pub bytes: usize,
    /// What it lost.
    pub squares: Squares,
}

/// Writes the f32 elements of `source` as a chunk at the start of `to`, which has at least [`Codec::max_bytes`]. The same seed,
/// codec and elements give the same bytes on every CPU.
///
/// # Errors
/// [`CodecError::Short`] if `to` is, and [`CodecError::Kernel`] if `source` is no whole number of elements or the codec has no
/// such blocks; nothing is written then.
pub fn encode(codec: Codec, seed: u64, source: View<'_>, to: ViewMut<'_>) -> Result<Encoded, CodecError> {
    let elements = elements(source.bytes())?;
    let most = codec.max_payload(elements).ok_or(KernelError::Block)?;
    let short = CodecError::Short { expected: HEADER_BYTES.saturating_add(most), given: to.bytes() };
    let payload = to.range(HEADER_BYTES, most).ok_or(short)?;
    let count = u32::try_from(elements).map_err(|_| KernelError::Block)?;
    u32::try_from(most).map_err(|_| KernelError::Block)?;
    let isa = Isa::detect();
    let (bytes, squares) = match codec {
        Codec::Fixed(code) => (most, codes::encode(isa, code, seed, source, payload)?),
        Codec::NonzeroBlocks => (codes::encode_nonzero(isa, source, payload)?, Squares::default()),
    };
    let length = u32::try_from(bytes).map_err(|_| KernelError::Block)?;
    let header = Header { codec, payload: length, elements: count, seed, squares, measured: 1.0 }.to_bytes();
    let head = to.range(0, HEADER_BYTES).ok_or(short)?;
    copy(View::from(&header[..]), &[head])?;
    Ok(Encoded { bytes: HEADER_BYTES + bytes, squares })
}

/// Sets other squares in the header of the chunk at the start of `chunk`. They are of all that was lost on the way to the chunk's
/// elements. With them comes the part of that, 0 to 1, which encoders measured where the rest is a bound.
///
/// # Errors
/// As [`header`].
pub fn state(squares: Squares, measured: f32, chunk: ViewMut<'_>) -> Result<(), CodecError> {
    let stated = Header { squares, measured, ..header(chunk.as_view())? }.to_bytes();
    let head = chunk.range(0, HEADER_BYTES);
    let head = head.ok_or(CodecError::Short { expected: HEADER_BYTES, given: chunk.bytes() })?;
    Ok(copy(View::from(&stated[..]), &[head])?)
}

/// Reads the chunk at the start of `from` into the f32 elements of `to`. The chunk must have exactly as many elements. Bytes
/// behind the chunk are left alone; the header is copied before it is looked at, so that nobody can change it meanwhile.
///
/// # Errors
/// All of [`CodecError`]; nothing is written then.
pub fn decode(from: View<'_>, store: Store, to: ViewMut<'_>) -> Result<Header, CodecError> {
    let expected = elements(to.bytes())?;
    let header = header(from)?;
    if header.elements as usize != expected {
        return Err(CodecError::Elements { expected, given: header.elements.into() });
    }
    let bytes = header.payload as usize;
    let short = CodecError::Short { expected: HEADER_BYTES.saturating_add(bytes), given: from.bytes() };
    let payload = from.range(HEADER_BYTES, bytes).ok_or(short)?;
    let isa = Isa::detect();
    match header.codec {
        Codec::Fixed(code) => codes::decode(isa, code, header.seed, payload, store, to)?,
        Codec::NonzeroBlocks => match codes::decode_nonzero(isa, payload, store, to) {
            Err(KernelError::Content) => return Err(CodecError::Payload),
            decoded => decoded?,
        },
    }
    Ok(header)
}

/// Reads the header at the start of `from`.
///
/// # Errors
/// As [`Header::from_bytes`], and [`CodecError::Short`].
pub fn header(from: View<'_>) -> Result<Header, CodecError> {
    let short = CodecError::Short { expected: HEADER_BYTES, given: from.bytes() };
    let mut bytes = [0; HEADER_BYTES];
    copy(from.range(0, HEADER_BYTES).ok_or(short)?, &[ViewMut::from(&mut bytes[..])])?;
    Header::from_bytes(&bytes)
}

fn elements(bytes: usize) -> Result<usize, KernelError> {
    let dtype = Dtype::F32;
    if bytes.is_multiple_of(dtype.size()) {
        Ok(bytes / dtype.size())
    } else {
        Err(KernelError::PartialElement { bytes, dtype })
    }
}
