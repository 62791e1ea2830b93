//! Writing chunks and reading them.

use crate::passes::{Passes, elements, whole};
use crate::{Codec, CodecError, HEADER_BYTES, Header, Squares, Store};
use harmonaize_abi::{View, ViewMut};
use harmonaize_kernels::codes::PartOf;
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
    whole(|passes| encode_by(passes, codec, seed, source, to))
}

/// [`encode`] in slices; none: the turn is over before it is done.
pub(crate) fn encode_by(
    passes: &mut Passes<'_>,
    codec: Codec,
    seed: u64,
    source: View<'_>,
    to: ViewMut<'_>,
) -> Result<Option<Encoded>, CodecError> {
    let elements = elements(source.bytes())?;
    let most = codec.max_payload(elements).ok_or(KernelError::Block)?;
    let short = CodecError::Short { expected: HEADER_BYTES.saturating_add(most), given: to.bytes() };
    let payload = to.range(HEADER_BYTES, most).ok_or(short)?;
    let count = u32::try_from(elements).map_err(|_| KernelError::Block)?;
    u32::try_from(most).map_err(|_| KernelError::Block)?;
    let isa = Isa::detect();
    let done = passes.run(elements, (2, codec.weight()), |part, so_far| {
        let source = part.of(source)?;
        let room = codec.max_payload(part.elements).ok_or(KernelError::Block)?;
        let to = payload.range(so_far.bytes, room).ok_or(short)?;
        let bytes = match codec {
            Codec::Fixed(code) => {
                let place = PartOf { first: part.first, whole: most };
                let lost = codes::encode_part(isa, code, seed, source, to, place)?;
                so_far.squares = so_far.squares.and(lost);
                room
            }
            Codec::NonzeroBlocks => codes::encode_nonzero(isa, source, to)?,
        };
        so_far.bytes += bytes;
        Ok(())
    })?;
    let Some(done) = done else { return Ok(None) };
    let (bytes, squares) = (done.bytes, done.squares);
    let length = u32::try_from(bytes).map_err(|_| KernelError::Block)?;
    let header = Header { codec, payload: length, elements: count, seed, squares, measured: 1.0 }.to_bytes();
    let head = to.range(0, HEADER_BYTES).ok_or(short)?;
    copy(View::from(&header[..]), &[head])?;
    Ok(Some(Encoded { bytes: HEADER_BYTES + bytes, squares }))
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
    whole(|passes| {
        let header = passes.header(|| header(from))?;
        Ok(decode_by(passes, &header, from, store, to)?.map(|()| header))
    })
}

/// [`decode`] in slices, of a chunk that has this header; none: the turn is over before it is done. What is wrong is found before anything is
/// written, unless somebody changes the payload between two turns.
pub(crate) fn decode_by(
    passes: &mut Passes<'_>,
    header: &Header,
    from: View<'_>,
    store: Store,
    to: ViewMut<'_>,
) -> Result<Option<()>, CodecError> {
    let (expected, whole) = (elements(to.bytes())?, to.bytes());
    if header.elements as usize != expected {
        return Err(CodecError::Elements { expected, given: header.elements.into() });
    }
    let bytes = header.payload as usize;
    let short = CodecError::Short { expected: HEADER_BYTES.saturating_add(bytes), given: from.bytes() };
    let payload = from.range(HEADER_BYTES, bytes).ok_or(short)?;
    let isa = Isa::detect();
    let operands = if store == Store::Set { 2 } else { 3 };
    let done = passes.run(expected, (operands, header.codec.weight()), |part, so_far| {
        let to = part.of_mut(to)?;
        let read = match header.codec {
            Codec::Fixed(code) => {
                let length = code.bytes(part.elements).ok_or(KernelError::Block)?;
                let coded = payload.range(so_far.bytes, length).ok_or(short)?;
                let place = PartOf { first: part.first, whole };
                codes::decode_part(isa, code, header.seed, coded, store, to, place)?;
                length
            }
            Codec::NonzeroBlocks => {
                if part.first == 0 {
                    codes::check_nonzero(payload, expected).map_err(|_| CodecError::Payload)?;
                }
                let left = bytes.saturating_sub(so_far.bytes);
                let rest = payload.range(so_far.bytes, left).ok_or(CodecError::Payload)?;
                codes::decode_nonzero_part(isa, rest, store, to, whole)?
            }
        };
        so_far.bytes += read;
        Ok(())
    })?;
    Ok(done.map(|_| ()))
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
