//! The sixteen bytes before every frame on a connection.

use crate::{DownReason, Landing, MAX_HEADER};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of [`Wire`].
pub(super) const WIRE: usize = size_of::<Wire>();

/// Most bytes before a payload.
pub(super) const HEAD: usize = WIRE + MAX_HEADER;

/// Payloads of at least so many bytes count as large.
pub(super) const LARGE: usize = 16 << 10;

const MAGIC: u16 = 0x7A48;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A header alone.
    Bare,
    /// A header and a payload, which may be empty.
    Payload(Landing, u32),
    /// Nothing but a sign of life.
    Heartbeat,
}

/// As on the wire.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Wire {
    magic: U16,
    kind: u8,
    reserved: u8,
    header_bytes: U16,
    ring: U16,
    sequence: U32,
    payload_bytes: U32,
}

impl Wire {
    pub(super) fn new(kind: Kind, header_bytes: u16) -> Self {
        let (code, landing, bytes) = match kind {
            Kind::Bare => (1, Landing { ring: 0, sequence: 0 }, 0),
            Kind::Payload(landing, bytes) => (2, landing, bytes),
            Kind::Heartbeat => (3, Landing { ring: 0, sequence: 0 }, 0),
        };
        Self {
            magic: MAGIC.into(),
            kind: code,
            reserved: 0,
            header_bytes: header_bytes.into(),
            ring: landing.ring.into(),
            sequence: landing.sequence.into(),
            payload_bytes: bytes.into(),
        }
    }

    /// What the peer says comes next, and how long its header is.
    pub(super) fn decode(&self) -> Result<(Kind, usize), DownReason> {
        let wrong = |what: String| Err(DownReason::Protocol(what));
        if self.magic.get() != MAGIC || self.reserved != 0 {
            return wrong(format!("a frame starts with {:#06x}", self.magic.get()));
        }
        let header_bytes = usize::from(self.header_bytes.get());
        if header_bytes > MAX_HEADER {
            return wrong(format!("a header of {header_bytes} bytes"));
        }
        let landing = Landing { ring: self.ring.get(), sequence: self.sequence.get() };
        let plain = landing == Landing { ring: 0, sequence: 0 } && self.payload_bytes.get() == 0;
        match self.kind {
            1 if plain => Ok((Kind::Bare, header_bytes)),
            2 => Ok((Kind::Payload(landing, self.payload_bytes.get()), header_bytes)),
            3 if plain && header_bytes == 0 => Ok((Kind::Heartbeat, 0)),
            kind => wrong(format!("a malformed frame of kind {kind}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_what_it_encodes_and_nothing_else() {
        let landing = Landing { ring: 7, sequence: u32::MAX };
        for (kind, bytes) in [(Kind::Bare, 512), (Kind::Payload(landing, u32::MAX), 0), (Kind::Heartbeat, 0)]
        {
            assert_eq!(Wire::new(kind, bytes).decode(), Ok((kind, usize::from(bytes))));
        }
        assert!(Wire::new(Kind::Bare, 513).decode().is_err());
        assert!(Wire::new(Kind::Heartbeat, 1).decode().is_err());
        let good = Wire::new(Kind::Bare, 0);
        for at in [0, 1, 2, 3, 6, 8, 12] {
            let mut bytes: [u8; WIRE] = zerocopy::transmute!(good);
            bytes[at] ^= 0x80;
            let bad: Wire = zerocopy::transmute!(bytes);
            assert!(bad.decode().is_err(), "byte {at}");
        }
    }
}
