//! Packets between workers and aggregators. Each has a header of fixed length, a payload, and a tag that only the two ends
//! can make.
//!
//! A packet is believed only after its tag: until then nothing but its length, version and names is looked at. The table of fields
//! is in `docs/protocol.md`.

use crate::PayloadFormat;
use harmonaize_abi::{Dtype, GrantId, ReduceOp, keyed};
use harmonaize_kernels::polyval::Polyval;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of the protocol.
pub const VERSION: u8 = 2;
/// Bytes of a header, the tag included.
pub const HEADER_BYTES: usize = size_of::<Wire>();
/// Most bytes of a payload: with the headers of UDP and IPv6 it fits a frame of 9,000 bytes.
pub const MAX_PAYLOAD: usize = 8192;
/// Most workers of a communicator.
pub const MAX_WORKERS: u16 = 1024;

/// What the parts of a chunk are; the note of a Contribution or a Result says it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Content {
    /// Elements or codes of the communicator's form, which are added.
    #[default]
    Sum,
    /// Ranges of shared codes, of which the greatest counts.
    Ranges,
    /// Bytes of one worker, for all others, whose parts are empty.
    Spread,
    /// Nothing: all parts are empty, and all wait for the last.
    Nothing,
    /// Elements of another type, or reduced otherwise, than the form says.
    Other(Dtype, ReduceOp),
}

/// In a note: what follows in it are the codes of a type and of a reduction.
const OTHER: u8 = 128;
/// Bits of a reduction's code in a note.
const OP_BITS: u8 = 3;

impl Content {
    pub(crate) fn of(note: u8) -> Option<Self> {
        match note {
            0 => Some(Self::Sum),
            1 => Some(Self::Ranges),
            2 => Some(Self::Spread),
            3 => Some(Self::Nothing),
            _ => {
                let codes = note.checked_sub(OTHER)?;
                let (dtype, op) = (codes >> OP_BITS, codes & ((1 << OP_BITS) - 1));
                let (dtype, op) = (Dtype::from_code(dtype)?, ReduceOp::from_code(op)?);
                PayloadFormat::Tensor { dtype, op }.is_supported().then_some(Self::Other(dtype, op))
            }
        }
    }

    pub(crate) const fn note(self) -> u8 {
        match self {
            Self::Sum => 0,
            Self::Ranges => 1,
            Self::Spread => 2,
            Self::Nothing => 3,
            Self::Other(dtype, op) => OTHER | dtype.code() << OP_BITS | op.code(),
        }
    }

    /// Whether parts are added.
    pub(crate) const fn adds(self) -> bool {
        matches!(self, Self::Sum | Self::Ranges | Self::Other(..))
    }
}

const MAGIC: U16 = U16::from_bytes(*b"hA");
/// Bytes of a tag: the first half of an HMAC-SHA256.
const TAG: usize = 16;

/// The header as it is on the wire, little-endian.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Wire {
    magic: U16,
    version: u8,
    kind: u8,
    worker: U16,
    count: U16,
    communicator: U64,
    session: U64,
    incarnation: U64,
    sequence: U64,
    chunk: U64,
    had: U64,
    length: U16,
    window: U16,
    note: u8,
    reserved: [u8; 3],
    tag: [u8; TAG],
}

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// From a worker: begin this session, or say that it has begun.
    Begin = 1,
    /// Its answer: the session is open, with so many chunks in flight.
    Granted = 2,
    /// From a worker: its part of a chunk.
    Contribution = 3,
    /// To a worker: a chunk's sum.
    Result = 4,
    /// From a worker: what results it has, and whether there is that of a chunk.
    Acknowledge = 5,
    /// To a worker: that chunk has no sum yet; the note says whether this worker's part is in.
    Waiting = 6,
    /// To a worker: this session is lost here, and nothing more will come of it.
    Lost = 7,
}

impl Kind {
    const ALL: [Self; 7] = [
        Self::Begin,
        Self::Granted,
        Self::Contribution,
        Self::Result,
        Self::Acknowledge,
        Self::Waiting,
        Self::Lost,
    ];

    /// Whether workers send it; aggregators send the others.
    pub const fn of_workers(self) -> bool {
        matches!(self, Self::Begin | Self::Contribution | Self::Acknowledge)
    }

    const fn carries(self) -> bool {
        matches!(self, Self::Contribution | Self::Result)
    }
}

/// What a header says, in the host's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the packet is.
    pub kind: Kind,
    /// The worker that sends it, or that it is sent to.
    pub worker: u16,
    /// Workers of hosts whose parts are in the payload.
    pub count: u16,
    /// The communicator, by its grant.
    pub communicator: GrantId,
    /// The session, which all workers agreed on; later ones have greater numbers.
    pub session: u64,
    /// The aggregator's incarnation, drawn at random when it starts; 0 in what is sent before it is known.
    pub incarnation: u64,
    /// Numbers what a worker sends, from 1; the answer to a packet repeats it, and a sum has 0.
    pub sequence: u64,
    /// The chunk, counted from 0 in a session.
    pub chunk: u64,
    /// From workers: they have all results below this chunk. From aggregators: all workers said so.
    pub had: u64,
    /// From aggregators: how many chunks a worker may have in flight. From workers: 0.
    pub window: u16,
    /// Of [`Kind::Waiting`]: 1 if the worker's part is in. Of [`Kind::Acknowledge`]: 1 if the chunk is asked for. Of
    /// [`Kind::Contribution`] and [`Kind::Result`]: what parts are. Else 0.
    pub note: u8,
}

/// Why bytes are no packet, or none to believe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum PacketError {
    /// Fewer bytes than a header, or another number than it says.
    #[error("the packet's length is not what its header says")]
    Length,
    /// The magic number or a reserved byte is another.
    #[error("these bytes are of another protocol")]
    Magic,
    /// Another version of the protocol.
    #[error("version {0}, and this end speaks version {VERSION}")]
    Version(u8),
    /// An unknown kind.
    #[error("there are no packets of kind {0}")]
    Kind(u8),
    /// The tag was not made with this key over these bytes.
    #[error("the tag is wrong")]
    Tag,
}

/// A key that one worker shares with its aggregator.
///
/// A tag is a pseudorandom function of a universal hash (Carter and Wegman; here HMAC-SHA256 of POLYVAL, RFC 8452, section 3): the hash
/// passes over all bytes at several a cycle, nobody but the two ends can find two packets with the same one, and it is never seen.
#[derive(Clone)]
pub struct Key {
    hash: Polyval,
    mac: Hmac<Sha256>,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// The key of worker `worker` of communicator `communicator`, made with `secret`, which is the aggregator's alone. A worker is
    /// given its key, and cannot make another's.
    pub fn derive(secret: &[u8; 32], communicator: GrantId, worker: u16) -> Self {
        Self::new(&worker_key(secret, communicator, worker))
    }

    /// From the bytes of [`worker_key`].
    pub fn new(bytes: &[u8; 32]) -> Self {
        let mac = keyed(bytes);
        let mut derive = mac.clone();
        derive.update(b"harmonaize aggregation hash");
        Self { hash: Polyval::new(first(derive)), mac }
    }

    /// Cost: a pass of POLYVAL, and two blocks of SHA-256. Both parts are filled up to whole blocks; the header, of fixed length,
    /// says how long the payload is.
    fn tag(&self, header: &[u8], payload: &[u8]) -> [u8; TAG] {
        let mut mac = self.mac.clone();
        mac.update(&self.hash.hash([header, payload]));
        first(mac)
    }
}

/// The bytes of the key of [`Key::derive`], as a worker is told them.
pub fn worker_key(secret: &[u8; 32], communicator: GrantId, worker: u16) -> [u8; 32] {
    let mut mac = keyed(secret);
    mac.update(b"harmonaize aggregation");
    mac.update(&communicator.0.to_le_bytes());
    mac.update(&worker.to_le_bytes());
    mac.finalize().into_bytes().into()
}

/// The first half.
fn first(mac: Hmac<Sha256>) -> [u8; TAG] {
    let whole: [u8; 32] = mac.finalize().into_bytes().into();
    let mut half = [0; TAG];
    half.iter_mut().zip(whole).for_each(|(to, from)| *to = from);
    half
}

/// Writes `header` and the tag to the first [`HEADER_BYTES`] of `packet`; the payload follows. Does nothing if `packet` is shorter, or
/// the payload longer than [`MAX_PAYLOAD`].
pub fn seal(header: &Header, key: &Key, packet: &mut [u8]) {
    let Some((to, payload)) = packet.split_at_mut_checked(HEADER_BYTES) else { return };
    if payload.len() > MAX_PAYLOAD {
        return;
    }
    let mut wire = Wire {
        magic: MAGIC,
        version: VERSION,
        kind: header.kind as u8,
        worker: header.worker.into(),
        count: header.count.into(),
        communicator: header.communicator.0.into(),
        session: header.session.into(),
        incarnation: header.incarnation.into(),
        sequence: header.sequence.into(),
        chunk: header.chunk.into(),
        had: header.had.into(),
        length: U16::new(u16::try_from(payload.len()).unwrap_or(u16::MAX)),
        window: header.window.into(),
        note: header.note,
        reserved: [0; 3],
        tag: [0; TAG],
    };
    wire.tag = key.tag(untagged(&wire), payload);
    to.copy_from_slice(wire.as_bytes());
}

fn untagged(wire: &Wire) -> &[u8] {
    wire.as_bytes().get(..HEADER_BYTES - TAG).unwrap_or_default()
}

/// A packet whose shape is right, and whose tag nobody has looked at yet.
#[derive(Clone, Copy)]
pub struct Sealed<'a> {
    wire: &'a Wire,
    kind: Kind,
    payload: &'a [u8],
}

impl<'a> Sealed<'a> {
    /// Reads the shape of any bytes.
    ///
    /// # Errors
    /// All of [`PacketError`] but [`PacketError::Tag`].
    pub fn read(bytes: &'a [u8]) -> Result<Self, PacketError> {
        let (wire, payload) = Wire::ref_from_prefix(bytes).map_err(|_| PacketError::Length)?;
        if wire.magic != MAGIC {
            return Err(PacketError::Magic);
        }
        if wire.version != VERSION {
            return Err(PacketError::Version(wire.version));
        }
        if wire.reserved != [0; 3] {
            return Err(PacketError::Magic);
        }
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u8 == wire.kind);
        let kind = kind.ok_or(PacketError::Kind(wire.kind))?;
        let expected = usize::from(wire.length.get());
        let empty = match Content::of(wire.note).filter(|_| kind.carries()) {
            None => !kind.carries(),
            Some(Content::Sum | Content::Ranges | Content::Other(..)) => false,
            Some(Content::Spread) => kind == Kind::Contribution && payload.is_empty(),
            Some(Content::Nothing) => true,
        };
        if payload.len() != expected || expected > MAX_PAYLOAD || empty != payload.is_empty() {
            return Err(PacketError::Length);
        }
        Ok(Self { wire, kind, payload })
    }

    /// What it says it is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The communicator that it names.
    pub fn communicator(&self) -> GrantId {
        GrantId(self.wire.communicator.get())
    }

    /// The worker that it names.
    pub fn worker(&self) -> u16 {
        self.wire.worker.get()
    }

    /// What it says, once `key`, that of the worker it names, is found to have made its tag.
    ///
    /// # Errors
    /// [`PacketError::Tag`].
    pub fn open(&self, key: &Key) -> Result<(Header, &'a [u8]), PacketError> {
        let wire = self.wire;
        let tag = key.tag(untagged(wire), self.payload);
        if !bool::from(tag.ct_eq(&wire.tag)) {
            return Err(PacketError::Tag);
        }
        let header = Header {
            kind: self.kind,
            worker: wire.worker.get(),
            count: wire.count.get(),
            communicator: GrantId(wire.communicator.get()),
            session: wire.session.get(),
            incarnation: wire.incarnation.get(),
            sequence: wire.sequence.get(),
            chunk: wire.chunk.get(),
            had: wire.had.get(),
            window: wire.window.get(),
            note: wire.note,
        };
        Ok((header, self.payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_that_is_summed_has_a_note() {
        for dtype in Dtype::ALL.iter().copied() {
            for op in ReduceOp::ALL.iter().copied() {
                let content = Content::Other(dtype, op);
                if (PayloadFormat::Tensor { dtype, op }).is_supported() {
                    assert_eq!(Content::of(content.note()), Some(content));
                }
            }
        }
    }
}
