//! The codec of all calls: prost's, with a limit on memory. It takes no message whose content would fill far more memory than it
//! has bytes. Two bytes can stand for an element of a list that takes hundreds.

use prost::Message;
use prost::bytes::Buf;
use prost::encoding::{WireType, decode_key, decode_varint};
use std::marker::PhantomData;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::{ProstDecoder, ProstEncoder};

/// Bytes of memory that any message may fill.
const BASE: usize = 64 << 20;

/// Bytes of memory that a message may fill beyond that for each of its own. They are as many as a packed number of one
/// byte does.
const RATIO: usize = 8;

/// Bytes of memory that a text, or a list of numbers, takes beside its content. A list of them grows by doubling.
const HEADER: usize = 48;

/// Bytes of memory that a number takes, likewise.
const NUMBER: usize = 16;

/// How deep prost follows messages within messages.
const DEPTH: u32 = 100;

/// How a message lies in memory.
struct Shape {
    /// Its own bytes, without what its lists and texts point to.
    bytes: usize,
    /// Numbers of its fields that are messages, and the place of each in [`SHAPES`].
    messages: &'static [(u32, usize)],
}

/// A message whose shape is known.
pub(crate) trait Shaped {
    /// Its place in [`SHAPES`].
    const SHAPE: usize;
}

// `SHAPES`, and a `Shaped` for each message.
include!(concat!(env!("OUT_DIR"), "/shapes.rs"));

/// The codec of a call.
pub(crate) struct Bounded<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Bounded<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for Bounded<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Shaped + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = BoundedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(ProstDecoder::default())
    }
}

/// Decodes what fills no more memory than it may.
pub(crate) struct BoundedDecoder<U>(ProstDecoder<U>);

impl<U: Message + Default + Shaped> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let content = source.chunk();
        if content.len() < source.remaining() {
            return Err(Status::internal("a message came in pieces, which cannot be looked at"));
        }
        check::<U>(content)?;
        self.0.decode(source)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}

/// Refuses content of a message that would fill too much memory.
fn check<U: Shaped>(content: &[u8]) -> Result<(), Status> {
    let most = content.len().saturating_mul(RATIO).saturating_add(BASE);
    let fits = SHAPES.get(U::SHAPE).and_then(|shape| charge(shape, content, 0, most));
    if fits.is_none() {
        let bytes = content.len();
        let text = format!("a message of {bytes} bytes would fill more than {most} bytes of memory");
        return Err(Status::resource_exhausted(text));
    }
    Ok(())
}

/// Returns what is left of so many bytes of memory with this content decoded; none where that is more. What is no message is counted up
/// to where the decoder finds that.
fn charge(shape: &Shape, mut content: &[u8], depth: u32, most: usize) -> Option<usize> {
    // A list grows by doubling.
    let mut left = most.checked_sub(2 * shape.bytes)?;
    while let Some((number, bytes)) = next_field(&mut content) {
        let inner = shape.messages.iter().find(|(known, _)| *known == number);
        let inner = inner.and_then(|(_, place)| SHAPES.get(*place));
        left = match (bytes, inner) {
            (Some(bytes), Some(inner)) if depth < DEPTH => charge(inner, bytes, depth + 1, left)?,
            (Some(bytes), _) => left.checked_sub(bytes.len().saturating_mul(RATIO) + HEADER)?,
            (None, _) => left.checked_sub(NUMBER)?,
        };
    }
    Some(left)
}

/// Takes a field off: its number, and its content where that has a length. None at the end, and where the decoder fails.
fn next_field<'a>(content: &mut &'a [u8]) -> Option<(u32, Option<&'a [u8]>)> {
    let (number, wire_type) = decode_key(content).ok()?;
    let fixed = match wire_type {
        WireType::Varint => {
            decode_varint(content).ok()?;
            0
        }
        WireType::SixtyFourBit => 8,
        WireType::ThirtyTwoBit => 4,
        // The decoder passes over what is within a group; here it counts.
        WireType::StartGroup | WireType::EndGroup => 0,
        WireType::LengthDelimited => {
            let length = usize::try_from(decode_varint(content).ok()?).ok()?;
            return Some((number, Some(take(content, length)?)));
        }
    };
    take(content, fixed)?;
    Some((number, None))
}

/// Takes so many bytes off.
fn take<'a>(content: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, after) = content.split_at_checked(count)?;
    *content = after;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{self, from_agent};
    use prost::encoding::encode_varint;
    use tonic::Code;

    /// A Hello of an agent with so many empty communicators, as bytes.
    fn empty_communicators(count: usize) -> Vec<u8> {
        let one = v1::Hello { running: vec![v1::Recipe::default()], ..v1::Hello::default() }.encode_to_vec();
        assert_eq!(one.len(), 2, "a field of no length");
        let none: v1::FromAgent = from_agent::Message::Hello(v1::Hello::default()).into();
        let mut message = none.encode_to_vec();
        assert_eq!(message.pop(), Some(0), "its length");
        encode_varint((count * one.len()) as u64, &mut message);
        message.extend(one.repeat(count));
        message
    }

    fn communicator(number: u64, hosts: u32) -> v1::Recipe {
        let part = |rank| v1::Participant { ranks: vec![rank], host: format!("h{rank}") };
        v1::Recipe {
            communicator: number,
            tenant: "a".to_owned(),
            name: format!("c{number}"),
            participants: (0..hosts).map(part).collect(),
            order: (0..hosts).collect(),
            ..v1::Recipe::default()
        }
    }

    #[test]
    fn empty_elements_without_number_are_refused() {
        let few = empty_communicators(10_000);
        check::<v1::FromAgent>(&few).unwrap();
        let decoded = v1::FromAgent::decode(few.as_slice()).unwrap();
        let Some(from_agent::Message::Hello(hello)) = decoded.message else { panic!("no Hello") };
        assert_eq!(hello.running.len(), 10_000);
        for count in [1 << 20, 8 << 20] {
            let refused = check::<v1::FromAgent>(&empty_communicators(count)).unwrap_err();
            assert_eq!(refused.code(), Code::ResourceExhausted);
            assert!(refused.message().contains("bytes of memory"), "{refused}");
        }
        // Nor does it help to be no message in the end: until the decoder sees that, memory is full.
        let mut broken = empty_communicators(1 << 20);
        *broken.last_mut().unwrap() = 7;
        check::<v1::FromAgent>(&broken).unwrap_err();
    }

    #[test]
    fn a_host_of_many_large_communicators_is_taken() {
        let running: Vec<v1::Recipe> = (0..200).map(|number| communicator(number, 1024)).collect();
        let hello = v1::Hello { running, ..v1::Hello::default() };
        let message: v1::FromAgent = from_agent::Message::Hello(hello).into();
        check::<v1::FromAgent>(&message.encode_to_vec()).unwrap();
    }

    #[test]
    fn plain_bytes_are_taken_however_many() {
        let chunk = v1::BackupChunk { bytes: vec![171; 10 << 20], total: 10 << 20 };
        check::<v1::BackupChunk>(&chunk.encode_to_vec()).unwrap();
        let order = v1::Recipe { order: vec![1; 10 << 20], ..v1::Recipe::default() };
        check::<v1::Recipe>(&order.encode_to_vec()).unwrap();
    }

    #[test]
    fn what_is_cut_off_is_left_to_the_decoder() {
        let whole = communicator(7, 3).encode_to_vec();
        for length in 0..whole.len() {
            check::<v1::Recipe>(&whole[..length]).unwrap();
        }
        check::<v1::Recipe>(&[0xff; 64]).unwrap();
    }
}
