//! The rings of one link: where its payloads may land, and nowhere else.

use crate::{DownReason, Landing, Ring};
use harmonaize_abi::ViewMut;
use harmonaize_shm::Span;

/// Rings by number, sorted.
#[derive(Debug, Default)]
pub(crate) struct Rings(Vec<Attached>);

#[derive(Debug)]
struct Attached {
    number: u16,
    ring: Ring,
    slots: Vec<Slot>,
}

/// What is known of the payloads of one slot.
#[derive(Clone, Debug, Default)]
struct Slot {
    /// The last whose arrival has begun.
    begun: Option<u32>,
    /// The span that a payload to come shall go to instead.
    posted: Option<(u32, Span)>,
    /// A payload is on its way into a posted span.
    busy: bool,
}

impl Rings {
    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a ring. Refused: a number twice, no slots, or slots that do not lie in the memory.
    pub(crate) fn attach(&mut self, number: u16, ring: Ring) -> Result<(), DownReason> {
        let need = u64::from(ring.slot_bytes) * u64::from(ring.slots);
        if ring.slots == 0 || need > ring.memory.bytes() as u64 {
            return Err(DownReason::Protocol(format!(
                "ring {number}: {} slots of {} bytes do not fit {} bytes",
                ring.slots,
                ring.slot_bytes,
                ring.memory.bytes()
            )));
        }
        match self.0.binary_search_by_key(&number, |attached| attached.number) {
            Ok(_) => Err(DownReason::Protocol(format!("ring {number} is attached already"))),
            Err(at) => {
                let slots = vec![Slot::default(); ring.slots as usize];
                self.0.insert(at, Attached { number, ring, slots });
                Ok(())
            }
        }
    }

    fn get_mut(&mut self, landing: Landing) -> Option<(&Ring, &mut Slot)> {
        let at = self.0.binary_search_by_key(&landing.ring, |attached| attached.number).ok()?;
        let Attached { ring, slots, .. } = self.0.get_mut(at)?;
        let slot = landing.sequence.checked_rem(ring.slots)?;
        Some((ring, slots.get_mut(slot as usize)?))
    }

    /// See [`crate::Transport::post`].
    pub(crate) fn post(&mut self, landing: Landing, span: Span) -> bool {
        let Some((ring, slot)) = self.get_mut(landing) else { return false };
        let fits = span.bytes() > 0 && span.bytes() <= ring.slot_bytes as usize;
        let late = slot.begun.is_some_and(|begun| begun.wrapping_sub(landing.sequence) < u32::MAX / 2);
        let taken = fits && !late && slot.posted.is_none();
        if taken {
            slot.posted = Some((landing.sequence, span));
        }
        taken
    }

    /// A payload of `bytes` bytes begins to arrive. Returns the span that was posted for it, if any, or what the sender
    /// did wrong.
    pub(crate) fn begin(&mut self, landing: Landing, bytes: u32) -> Result<Option<Span>, DownReason> {
        self.slot(landing, bytes)?;
        let Some((_, slot)) = self.get_mut(landing) else { return Ok(None) };
        if slot.busy {
            // Or a header on another path could pass for that of the payload that is still being written.
            return Err(DownReason::Protocol(format!(
                "two payloads at once for a slot of ring {}",
                landing.ring
            )));
        }
        slot.begun = Some(landing.sequence);
        let posted = slot.posted.take_if(|(sequence, _)| *sequence == landing.sequence);
        let posted = posted.map(|(_, span)| span).filter(|span| span.bytes() == bytes as usize);
        slot.busy = posted.is_some();
        Ok(posted)
    }

    /// The payload that has begun to arrive is there.
    pub(crate) fn landed(&mut self, landing: Landing) {
        if let Some((_, slot)) = self.get_mut(landing) {
            slot.busy = false;
        }
    }

    /// The first `bytes` bytes of the slot that `landing` names, or what the sender did wrong.
    pub(crate) fn slot(&self, landing: Landing, bytes: u32) -> Result<ViewMut<'_>, DownReason> {
        let ring = self
            .0
            .binary_search_by_key(&landing.ring, |attached| attached.number)
            .ok()
            .and_then(|at| self.0.get(at))
            .map(|attached| &attached.ring)
            .ok_or_else(|| DownReason::Protocol(format!("a frame for unknown ring {}", landing.ring)))?;
        if bytes > ring.slot_bytes {
            return Err(DownReason::Protocol(format!(
                "a payload of {bytes} bytes for ring {}, whose slots have {}",
                landing.ring, ring.slot_bytes
            )));
        }
        let slot = landing.sequence.checked_rem(ring.slots).unwrap_or(0);
        let offset = slot as usize * ring.slot_bytes as usize;
        ring.memory
            .view_mut()
            .range(offset, bytes as usize)
            .ok_or_else(|| DownReason::Protocol(format!("ring {} is smaller than its slots", landing.ring)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_shm::Memory;

    /// It is as if one path were still writing to a posted span. Another path then brings a frame that names the same
    /// slot.
    #[test]
    fn a_slot_being_written_takes_no_second_payload() {
        let memory = Memory::private(4096).unwrap();
        let span = |offset, bytes| Span::new(&memory, offset, bytes).unwrap();
        let mut rings = Rings::default();
        rings.attach(3, Ring { memory: span(0, 2048), slot_bytes: 1024, slots: 2 }).unwrap();
        let landing = |sequence| Landing { ring: 3, sequence };
        assert!(rings.post(landing(0), span(2048, 500)));
        assert_eq!(rings.begin(landing(0), 500).unwrap().map(|span| span.bytes()), Some(500));
        for again in [0, 2] {
            let refused = rings.begin(landing(again), 500);
            assert!(matches!(refused, Err(DownReason::Protocol(_))), "{again}: {refused:?}");
        }
        assert!(rings.begin(landing(1), 500).unwrap().is_none());
        rings.landed(landing(0));
        assert!(rings.begin(landing(2), 500).unwrap().is_none());
    }
}
