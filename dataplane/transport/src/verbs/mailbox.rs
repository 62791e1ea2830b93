//! The messages that one end writes into the other's mailbox, and the count of free slots there.

use crate::{DownReason, Landing, MAX_HEADER};
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a mailbox's slot: head, header, and a small payload.
pub(super) const SLOT: usize = 1024;

/// Length of [`Head`].
pub(super) const HEAD: usize = size_of::<Head>();

/// Fewest slots of a mailbox, with which credits still flow.
const FEWEST: u32 = 8;

/// Most slots of a mailbox.
const MOST: u32 = 4096;

/// Whether a mailbox may have so many slots.
pub(super) fn sound_slots(slots: u32) -> bool {
    slots.is_power_of_two() && (FEWEST..=MOST).contains(&slots)
}

/// The nearest count of slots that a mailbox may have.
pub(super) fn nearest_slots(slots: u32) -> u32 {
    slots.clamp(FEWEST, MOST).next_power_of_two()
}

/// What a message carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A header alone.
    Bare,
    /// A header; its payload was written into the slot before.
    Landed(Landing, u32),
    /// A header, and behind it a payload that the receiver copies into the slot.
    Carried(Landing, u32),
    /// Nothing but free slots.
    Credit,
}

/// The bytes before a message's header.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Head {
    number: U32,
    kind: u8,
    reserved: u8,
    header_bytes: U16,
    ring: U16,
    reserved_too: U16,
    sequence: U32,
    payload_bytes: U32,
    credits: U32,
}

/// A head that was found sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    /// How many messages went before it on its path.
    pub(super) number: u32,
    pub(super) kind: Kind,
    pub(super) header_bytes: u16,
    /// Slots of the receiver's peer that are free again.
    pub(super) credits: u32,
}

impl Message {
    pub(super) fn head(self) -> Head {
        let nowhere = Landing { ring: 0, sequence: 0 };
        let (code, landing, bytes) = match self.kind {
            Kind::Bare => (1, nowhere, 0),
            Kind::Landed(landing, bytes) => (2, landing, bytes),
            Kind::Carried(landing, bytes) => (3, landing, bytes),
            Kind::Credit => (4, nowhere, 0),
        };
        Head {
            number: self.number.into(),
            kind: code,
            reserved: 0,
            header_bytes: self.header_bytes.into(),
            ring: landing.ring.into(),
            reserved_too: 0.into(),
            sequence: landing.sequence.into(),
            payload_bytes: bytes.into(),
            credits: self.credits.into(),
        }
    }

    /// Bytes of the whole message.
    pub(super) fn bytes(self) -> usize {
        let carried = if let Kind::Carried(_, bytes) = self.kind { bytes as usize } else { 0 };
        HEAD.saturating_add(usize::from(self.header_bytes)).saturating_add(carried)
    }

    /// Reads what lies in a mailbox's slot, where message `number` is due.
    pub(super) fn read(slot: &[u8], number: u32) -> Result<Self, DownReason> {
        let wrong = |what: String| Err(DownReason::Protocol(what));
        let Ok((head, _)) = Head::read_from_prefix(slot) else { return wrong("a short message".into()) };
        if head.number.get() != number {
            return wrong(format!("message {} where {number} was due", head.number));
        }
        let landing = Landing { ring: head.ring.get(), sequence: head.sequence.get() };
        let bytes = head.payload_bytes.get();
        let kind = match head.kind {
            1 => Kind::Bare,
            2 => Kind::Landed(landing, bytes),
            3 => Kind::Carried(landing, bytes),
            4 => Kind::Credit,
            other => return wrong(format!("a message of kind {other}")),
        };
        let (header_bytes, credits) = (head.header_bytes.get(), head.credits.get());
        let message = Self { number, kind, header_bytes, credits };
        if usize::from(header_bytes) > MAX_HEADER || message.bytes() > SLOT {
            return wrong(format!("a message of {} bytes, {header_bytes} of them header", message.bytes()));
        }
        Ok(message)
    }
}

/// Free slots in the peer's mailbox, and slots of ours that it does not know to be free yet.
///
/// The last free slot is kept for a message that returns credit. Both ends cannot run dry at once: whoever spends its last
/// slot thereby gives the other at least half of its own mailbox, and so on in turn.
#[derive(Debug)]
pub(super) struct Credits {
    ours: u32,
    theirs: u32,
    free: u32,
    unreturned: u32,
}

impl Credits {
    /// Of two mailboxes of so many slots, both empty.
    pub(super) fn new(ours: u32, theirs: u32) -> Self {
        Self { ours, theirs, free: theirs, unreturned: 0 }
    }

    /// Whether a frame may go.
    pub(super) fn frame(&self) -> bool {
        self.free > 1
    }

    /// Whether so many slots are owed that a message must go for their sake, and may.
    pub(super) fn must_return(&self) -> bool {
        self.unreturned >= self.ours / 2 && self.free > 0
    }

    /// Takes a slot of the peer's for a message; returns the credit that the message is to carry.
    pub(super) fn spend(&mut self) -> u32 {
        self.free = self.free.saturating_sub(1);
        std::mem::take(&mut self.unreturned)
    }

    /// A message of the peer's has been read, which carried `credits`.
    pub(super) fn read(&mut self, credits: u32) -> Result<(), DownReason> {
        self.unreturned = self.unreturned.saturating_add(1);
        match self.free.checked_add(credits) {
            Some(free) if free <= self.theirs => self.free = free,
            _ => {
                return Err(DownReason::Protocol(format!(
                    "{credits} slots given back, of {} free",
                    self.free
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(message: Message) -> [u8; SLOT] {
        let mut slot = [0; SLOT];
        slot[..HEAD].copy_from_slice(message.head().as_bytes());
        slot
    }

    #[test]
    fn messages_come_back_as_they_went() {
        let landing = Landing { ring: u16::MAX, sequence: u32::MAX };
        for kind in [Kind::Bare, Kind::Landed(landing, u32::MAX), Kind::Carried(landing, 400), Kind::Credit] {
            let message = Message { number: u32::MAX, kind, header_bytes: 512, credits: 9 };
            assert_eq!(Message::read(&slot(message), u32::MAX), Ok(message));
        }
    }

    #[test]
    fn messages_out_of_turn_or_bounds_are_breaches() {
        let landing = Landing { ring: 1, sequence: 2 };
        let good = Message { number: 4, kind: Kind::Bare, header_bytes: 0, credits: 0 };
        let fits = Kind::Carried(landing, (SLOT - HEAD) as u32);
        Message::read(&slot(Message { kind: fits, ..good }), 4).unwrap();
        let over = Kind::Carried(landing, (SLOT - HEAD + 1) as u32);
        let huge = Kind::Carried(landing, u32::MAX);
        for (message, due) in [
            (good, 5),
            (Message { header_bytes: 513, ..good }, 4),
            (Message { kind: over, ..good }, 4),
            (Message { kind: huge, ..good }, 4),
        ] {
            let read = Message::read(&slot(message), due);
            assert!(matches!(read, Err(DownReason::Protocol(_))), "{message:?}: {read:?}");
        }
        for kind in [0, 5, 255] {
            let mut slot = slot(good);
            slot[4] = kind;
            assert!(matches!(Message::read(&slot, 4), Err(DownReason::Protocol(_))), "kind {kind}");
        }
    }

    #[test]
    fn slots_are_few_and_a_power_of_two() {
        for (asked, got) in [(0, 8), (8, 8), (9, 16), (100, 128), (u32::MAX, 4096)] {
            assert_eq!(nearest_slots(asked), got);
            assert!(sound_slots(got));
        }
        assert!(!sound_slots(0) && !sound_slots(4) && !sound_slots(96) && !sound_slots(8192));
    }

    #[test]
    fn more_credit_than_was_spent_is_a_breach() {
        let mut credits = Credits::new(8, 16);
        credits.spend();
        credits.read(1).unwrap();
        assert!(matches!(credits.read(1), Err(DownReason::Protocol(_))));
        assert!(matches!(credits.read(u32::MAX), Err(DownReason::Protocol(_))));
    }

    /// Two ends that send whenever they may, with messages in flight read in any order of the two directions.
    #[test]
    fn ends_that_send_all_they_can_never_run_dry_both() {
        for seed in 1..200_u64 {
            let (slots_a, slots_b) = (8 << (seed % 4), 8 << (seed / 4 % 4));
            let mut ends = [Credits::new(slots_a, slots_b), Credits::new(slots_b, slots_a)];
            let mut flight = [std::collections::VecDeque::new(), std::collections::VecDeque::new()];
            let (mut random, mut frames) = (seed, [0; 2]);
            for _ in 0..20_000 {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let at = (random >> 33) as usize % 2;
                if random >> 40 & 1 == 0 && ends[at].frame() {
                    frames[at] += 1;
                    flight[at].push_back(ends[at].spend());
                } else if let Some(given) = flight[1 - at].pop_front() {
                    ends[at].read(given).unwrap();
                    if ends[at].must_return() {
                        flight[at].push_back(ends[at].spend());
                    }
                }
                assert!(
                    flight[0].len() <= slots_b as usize && flight[1].len() <= slots_a as usize,
                    "seed {seed}"
                );
                let stuck = flight.iter().all(|f| f.is_empty()) && ends.iter().all(|end| !end.frame());
                assert!(!stuck, "seed {seed}: {ends:?}");
            }
            assert!(frames.iter().all(|frames| *frames > 1000), "seed {seed}: {frames:?}");
        }
    }
}
