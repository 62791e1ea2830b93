//! What two ends tell each other over the TCP link beneath: queue pairs, rings, last words.

use crate::{DownReason, Landing, LinkRefusal, MAX_HEADER, MAX_PATHS};
use harmonaize_verbs::RemoteAddress;

const MAGIC: u32 = 0x4252_5648;

/// Of this exchange and of the mailbox's messages.
pub(super) const VERSION: u16 = 1;

/// Most devices that a link may spread over.
pub(super) const MAX_RAILS: usize = 16;

const PREFIX: usize = 8;

/// Most bytes of a last word in one frame.
pub(super) const MAX_PIECE: usize = MAX_HEADER - PREFIX - 10;

/// Where memory is to be reached, by rail.
pub(super) type Places = Vec<RemoteMemory>;

/// Memory as one device's peers reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteMemory {
    pub(super) address: u64,
    pub(super) rkey: u32,
}

/// One end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PathEnd {
    pub(super) number: u16,
    pub(super) queue_pair: u32,
    pub(super) packet_sequence: u32,
    pub(super) gid: [u8; 16],
    pub(super) lid: u16,
    /// Of the port, in bytes.
    pub(super) mtu: u16,
    pub(super) mailbox: RemoteMemory,
}

/// A ring of the receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RingEnd {
    pub(super) number: u16,
    pub(super) slot_bytes: u32,
    pub(super) slots: u32,
    pub(super) places: Places,
}

/// One frame of the exchange.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Control<'a> {
    /// The first: what the link is to be like.
    Hello {
        paths: u16,
        rails: u16,
        /// Slots of each mailbox, a power of two.
        slots: u32,
    },
    Path(PathEnd),
    /// This end's queue pairs take and give.
    Ready,
    Ring(RingEnd),
    /// A payload waits for a ring that was not announced, or is too long for its slots.
    Want {
        landing: Landing,
        bytes: u32,
    },
    /// A piece of a header that did not get out before its queue pair ended.
    Piece {
        path: u16,
        message: u32,
        total: u16,
        offset: u16,
        bytes: &'a [u8],
    },
    /// The link cannot come up, and why.
    Refuse(&'a str),
}

impl<'a> Control<'a> {
    /// Appends the frame's bytes, at most [`MAX_HEADER`].
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[self.kind(), 0]);
        match self {
            Self::Hello { paths, rails, slots } => {
                out.extend_from_slice(&paths.to_le_bytes());
                out.extend_from_slice(&rails.to_le_bytes());
                out.extend_from_slice(&slots.to_le_bytes());
            }
            Self::Path(end) => {
                out.extend_from_slice(&end.number.to_le_bytes());
                out.extend_from_slice(&end.queue_pair.to_le_bytes());
                out.extend_from_slice(&end.packet_sequence.to_le_bytes());
                out.extend_from_slice(&end.gid);
                out.extend_from_slice(&end.lid.to_le_bytes());
                out.extend_from_slice(&end.mtu.to_le_bytes());
                end.mailbox.encode(out);
            }
            Self::Ready => {}
            Self::Ring(ring) => {
                out.extend_from_slice(&ring.number.to_le_bytes());
                out.extend_from_slice(&ring.slot_bytes.to_le_bytes());
                out.extend_from_slice(&ring.slots.to_le_bytes());
                ring.places.iter().take(MAX_RAILS).for_each(|place| place.encode(out));
            }
            Self::Want { landing, bytes } => {
                out.extend_from_slice(&landing.ring.to_le_bytes());
                out.extend_from_slice(&landing.sequence.to_le_bytes());
                out.extend_from_slice(&bytes.to_le_bytes());
            }
            Self::Piece { path, message, total, offset, bytes } => {
                out.extend_from_slice(&path.to_le_bytes());
                out.extend_from_slice(&message.to_le_bytes());
                out.extend_from_slice(&total.to_le_bytes());
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(bytes.get(..bytes.len().min(MAX_PIECE)).unwrap_or(&[]));
            }
            Self::Refuse(why) => {
                let end = (0..=why.len().min(MAX_HEADER - PREFIX)).rev().find(|at| why.is_char_boundary(*at));
                let why = end.and_then(|end| why.get(..end)).unwrap_or("");
                out.extend_from_slice(why.as_bytes());
            }
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Hello { .. } => 1,
            Self::Path(_) => 2,
            Self::Ready => 3,
            Self::Ring(_) => 4,
            Self::Want { .. } => 5,
            Self::Piece { .. } => 6,
            Self::Refuse(_) => 7,
        }
    }

    /// What the peer said. A frame that is not of this exchange is refused.
    pub(super) fn decode(frame: &'a [u8]) -> Result<Self, DownReason> {
        let mut rest = Reader(frame);
        if rest.u32() != Some(MAGIC) {
            return Err(DownReason::Refused(LinkRefusal::NoRdma));
        }
        let version = rest.u16().unwrap_or(0);
        if version != VERSION {
            let refusal = LinkRefusal::RdmaVersion { theirs: version, ours: VERSION };
            return Err(DownReason::Refused(refusal));
        }
        let kind = rest.u16().map_or(0, |kind| kind);
        let read = rest.control(kind).filter(|_| rest.0.is_empty());
        read.ok_or_else(|| {
            let bytes = frame.len();
            DownReason::Protocol(format!(
                "a malformed frame of kind {kind} and {bytes} bytes in the exchange"
            ))
        })
    }
}

impl RemoteMemory {
    fn encode(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.address.to_le_bytes());
        out.extend_from_slice(&self.rkey.to_le_bytes());
    }
}

/// What is left of a frame.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn place(&mut self) -> Option<RemoteMemory> {
        Some(RemoteMemory { address: self.take().map(u64::from_le_bytes)?, rkey: self.u32()? })
    }

    fn all(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    fn control(&mut self, kind: u16) -> Option<Control<'a>> {
        match kind {
            1 => {
                let (paths, rails, slots) = (self.u16()?, self.u16()?, self.u32()?);
                let sound = (1..=MAX_PATHS).contains(&paths)
                    && (1..=MAX_RAILS).contains(&usize::from(rails))
                    && super::mailbox::sound_slots(slots);
                sound.then_some(Control::Hello { paths, rails, slots })
            }
            2 => Some(Control::Path(PathEnd {
                number: self.u16()?,
                queue_pair: self.u32()?,
                packet_sequence: self.u32()?,
                gid: self.take()?,
                lid: self.u16()?,
                mtu: self.u16()?,
                mailbox: self.place()?,
            })),
            3 => Some(Control::Ready),
            4 => {
                let (number, slot_bytes, slots) = (self.u16()?, self.u32()?, self.u32()?);
                let mut places = Vec::new();
                while !self.0.is_empty() && places.len() < MAX_RAILS {
                    places.push(self.place()?);
                }
                let sound = slots > 0 && !places.is_empty();
                sound.then_some(Control::Ring(RingEnd { number, slot_bytes, slots, places }))
            }
            5 => {
                let landing = Landing { ring: self.u16()?, sequence: self.u32()? };
                Some(Control::Want { landing, bytes: self.u32()? })
            }
            6 => {
                let (path, message, total, offset) = (self.u16()?, self.u32()?, self.u16()?, self.u16()?);
                let bytes = self.all();
                let end = usize::from(offset) + bytes.len();
                let sound = end <= usize::from(total) && usize::from(total) <= MAX_HEADER;
                sound.then_some(Control::Piece { path, message, total, offset, bytes })
            }
            7 => std::str::from_utf8(self.all()).ok().map(Control::Refuse),
            _ => None,
        }
    }
}

/// A ring of the peer's, which are sorted.
pub(super) fn ring(rings: &[RingEnd], number: u16) -> Option<&RingEnd> {
    rings.binary_search_by_key(&number, |ring| ring.number).ok().and_then(|at| rings.get(at))
}

/// Where the payload goes.
pub(super) fn slot_address(rings: &[RingEnd], landing: Landing, rail: usize) -> Option<RemoteAddress> {
    let ring = ring(rings, landing.ring)?;
    let place = ring.places.get(rail)?;
    let slot = landing.sequence.checked_rem(ring.slots)?;
    let offset = u64::from(slot).wrapping_mul(ring.slot_bytes.into());
    Some(RemoteAddress { address: place.address.wrapping_add(offset), rkey: place.rkey })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames() -> Vec<Control<'static>> {
        let place = RemoteMemory { address: u64::MAX - 5, rkey: 7 };
        vec![
            Control::Hello { paths: 64, rails: 16, slots: 256 },
            Control::Path(PathEnd {
                number: 63,
                queue_pair: 0xFF_FFFF,
                packet_sequence: 9,
                gid: std::array::from_fn(|i| i as u8),
                lid: 3,
                mtu: 4096,
                mailbox: place,
            }),
            Control::Ready,
            Control::Ring(RingEnd {
                number: 5,
                slot_bytes: 1,
                slots: u32::MAX,
                places: vec![place; MAX_RAILS],
            }),
            Control::Want { landing: Landing { ring: 1, sequence: 2 }, bytes: 3 },
            Control::Piece {
                path: 1,
                message: 2,
                total: 512,
                offset: 512 - MAX_PIECE as u16,
                bytes: &[8; MAX_PIECE],
            },
            Control::Refuse("no queue pairs left"),
        ]
    }

    #[test]
    fn every_frame_comes_back_as_it_went_and_fits_a_header() {
        for frame in frames() {
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            assert!(bytes.len() <= MAX_HEADER, "{frame:?} has {} bytes", bytes.len());
            assert_eq!(Control::decode(&bytes), Ok(frame));
        }
    }

    #[test]
    fn frames_are_those_released() {
        use harmonaize_schemas::{Schema, bytes, check};
        let line = |(number, frame): (usize, Control<'_>)| {
            let mut encoded = Vec::new();
            frame.encode(&mut encoded);
            bytes(&format!("Frame {}", number + 1), &encoded)
        };
        let lines: Vec<String> = frames().into_iter().enumerate().map(line).collect();
        let remedy = "Agents of the release before could not make RDMA links with this one any more. Leave these frames as they are; a new \
            one goes only to a peer that is known to have it. Test: cargo test -p harmonaize-transport released";
        check("exchange", Schema::Grows, &lines, remedy).unwrap_or_else(|broken| panic!("{broken}"));
    }

    #[test]
    fn a_long_refusal_is_cut_at_a_character() {
        let (mut bytes, why) = (Vec::new(), "é".repeat(400) + "x");
        Control::Refuse(&why).encode(&mut bytes);
        assert_eq!(Control::decode(&bytes), Ok(Control::Refuse("é".repeat(252).as_str())));
    }

    #[test]
    fn a_frame_cut_short_or_too_long_is_a_breach() {
        for frame in frames() {
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            for end in 0..bytes.len() {
                let cut = Control::decode(&bytes[..end]);
                let open_ended =
                    matches!(frame, Control::Refuse(_) | Control::Piece { .. } | Control::Ring(_));
                match cut {
                    Err(DownReason::Refused(_)) => assert!(end < 6, "{frame:?} cut at {end}"),
                    Err(DownReason::Protocol(_)) => {}
                    other => assert!(open_ended, "{frame:?} cut at {end}: {other:?}"),
                }
            }
            if !matches!(frame, Control::Refuse(_)) {
                bytes.push(0);
                assert!(
                    matches!(Control::decode(&bytes), Err(DownReason::Protocol(_))),
                    "{frame:?} and a byte"
                );
            }
        }
    }

    #[test]
    fn another_version_and_plain_tcp_are_refused_by_name() {
        let mut bytes = Vec::new();
        Control::Ready.encode(&mut bytes);
        bytes[4] = 2;
        let error = Control::decode(&bytes).unwrap_err();
        assert_eq!(error, DownReason::Refused(LinkRefusal::RdmaVersion { theirs: 2, ours: 1 }));
        let error = Control::decode(b"a frame of the engine").unwrap_err();
        assert_eq!(error, DownReason::Refused(LinkRefusal::NoRdma));
    }

    #[test]
    fn what_cannot_be_is_a_breach() {
        let bad = [
            Control::Hello { paths: 0, rails: 1, slots: 256 },
            Control::Hello { paths: 65, rails: 1, slots: 256 },
            Control::Hello { paths: 1, rails: 0, slots: 256 },
            Control::Hello { paths: 1, rails: 1, slots: 255 },
            Control::Ring(RingEnd { number: 0, slot_bytes: 1, slots: 0, places: vec![] }),
            Control::Piece { path: 0, message: 0, total: 3, offset: 2, bytes: b"ab" },
            Control::Piece { path: 0, message: 0, total: 513, offset: 0, bytes: b"ab" },
        ];
        for frame in bad {
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            assert!(matches!(Control::decode(&bytes), Err(DownReason::Protocol(_))), "{frame:?}");
        }
    }
}
