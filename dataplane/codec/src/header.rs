//! What stands before a chunk's payload.

use crate::codec::Fields;
use crate::{Codec, CodecError, Squares};

/// The version that is written and read here.
pub const VERSION: u8 = 1;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 48;
/// Bytes that the check is of.
const CHECKED: usize = HEADER_BYTES - 4;
/// The first two bytes, as a little-endian number: "hz".
const MAGIC: u16 = 0x7a68;

/// What stands before a chunk's payload, 48 bytes, all numbers little-endian:
///
/// | bytes | what |
/// |---|---|
/// | 0, 1 | 0x68 0x7a |
/// | 2 | version: 1 |
/// | 3 | codec: 0 exact, 1 bf16, 2 binary16, 3 integers in blocks, 4 rotated blocks, 5 blocks that are not zeros |
/// | 4 | bits of an element's code |
/// | 5 | the block's size as a power of two; 0 where there are none |
/// | 6 | flags: 1 = rounded stochastically; the rest 0 |
/// | 7 | 0 |
/// | 8 to 11 | the part of the squared error that encoders measured, 0 to 1, f32 |
/// | 12 to 15 | bytes of the payload |
/// | 16 to 19 | elements |
/// | 20 to 27 | seed |
/// | 28 to 35 | the squared error that the chunk stands for, f64 |
/// | 36 to 43 | the squared tensor that it is an error of, f64 |
/// | 44 to 47 | check of bytes 0 to 43: FNV-1a, 32 bits |
///
/// Where the squared error is a bound, as of sums, encoders measured less of it. The squares are of what the chunk's encoder lost, or of more, where it says so ([`crate::state`]); none is negative.
/// The payload has no check: whatever it holds, it decodes to numbers, or, of blocks that are not zeros, is refused, and links have checks of their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Header {
    /// How the payload holds the elements.
    pub codec: Codec,
    /// Bytes of the payload.
    pub payload: u32,
    /// Elements, f32.
    pub elements: u32,
    /// What the encoder's random choices came from.
    pub seed: u64,
    /// What was lost, of what; NaN where the encoder met one.
    pub squares: Squares,
    /// The part of the squared error that encoders measured, 0 to 1: all of it where it is no bound.
    pub measured: f32,
}

impl Header {
    /// The squared error that encoders measured.
    pub(crate) fn measured_error(&self) -> f64 {
        // What is all of it stays what it is where that is infinite.
        if self.measured < 1.0 { self.squares.error * f64::from(self.measured) } else { self.squares.error }
    }

    /// The header's bytes.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let Fields { id, bits, block, flags } = self.codec.fields();
        let mut bytes = [0; HEADER_BYTES];
        let parts: [(usize, &[u8]); 8] = [
            (0, &MAGIC.to_le_bytes()),
            (2, &[VERSION, id, bits, block, flags]),
            (8, &self.measured.to_le_bytes()),
            (12, &self.payload.to_le_bytes()),
            (16, &self.elements.to_le_bytes()),
            (20, &self.seed.to_le_bytes()),
            (28, &self.squares.error.to_le_bytes()),
            (36, &self.squares.signal.to_le_bytes()),
        ];
        for (at, part) in parts {
            bytes.iter_mut().skip(at).zip(part).for_each(|(byte, from)| *byte = *from);
        }
        let check = check(&bytes).to_le_bytes();
        bytes.iter_mut().skip(CHECKED).zip(check).for_each(|(byte, from)| *byte = from);
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`CodecError::Magic`], [`CodecError::Version`], [`CodecError::Damaged`], [`CodecError::Codec`], and
    /// [`CodecError::Payload`] where the payload's length is none that the codec gives so many elements, a sum of squares is negative, or
    /// what was measured is no part.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Result<Self, CodecError> {
        let magic = u16::from_le_bytes(part(bytes, 0));
        if magic != MAGIC {
            return Err(CodecError::Magic { found: magic });
        }
        let [version, id, bits, block, flags, reserved] = part(bytes, 2);
        if version != VERSION {
            return Err(CodecError::Version { version });
        }
        if u32::from_le_bytes(part(bytes, CHECKED)) != check(bytes) {
            return Err(CodecError::Damaged);
        }
        let unknown = CodecError::Codec { id, parameters: [bits, block, flags] };
        if reserved != 0 {
            return Err(unknown);
        }
        let codec = Codec::from_fields(Fields { id, bits, block, flags }).ok_or(unknown)?;
        let header = Self {
            codec,
            payload: u32::from_le_bytes(part(bytes, 12)),
            elements: u32::from_le_bytes(part(bytes, 16)),
            seed: u64::from_le_bytes(part(bytes, 20)),
            squares: Squares {
                error: f64::from_le_bytes(part(bytes, 28)),
                signal: f64::from_le_bytes(part(bytes, 36)),
            },
            measured: f32::from_le_bytes(part(bytes, 8)),
        };
        let negative = header.squares.error < 0.0 || header.squares.signal < 0.0;
        if negative
            || !(0.0..=1.0).contains(&header.measured)
            || !codec.can_have(header.elements as usize, header.payload as usize)
        {
            return Err(CodecError::Payload);
        }
        Ok(header)
    }
}

/// `N` bytes from `at` on.
fn part<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.iter_mut().zip(bytes.iter().skip(at)).for_each(|(byte, from)| *byte = *from);
    part
}

/// FNV-1a (Fowler, Noll, Vo) of the bytes before the check.
fn check(bytes: &[u8; HEADER_BYTES]) -> u32 {
    bytes
        .iter()
        .take(CHECKED)
        .fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}
