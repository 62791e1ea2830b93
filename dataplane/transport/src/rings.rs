//! The rings of one link: where its payloads may land, and nowhere else.

use crate::{DownReason, Landing, Ring};
use harmonaize_abi::ViewMut;

/// Rings by number, sorted.
#[derive(Debug, Default)]
pub(crate) struct Rings(Vec<(u16, Ring)>);

impl Rings {
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
        match self.0.binary_search_by_key(&number, |(number, _)| *number) {
            Ok(_) => Err(DownReason::Protocol(format!("ring {number} is attached already"))),
            Err(at) => {
                self.0.insert(at, (number, ring));
                Ok(())
            }
        }
    }

    /// The first `bytes` bytes of the slot that `landing` names, or what the sender did wrong.
    pub(crate) fn slot(&self, landing: Landing, bytes: u32) -> Result<ViewMut<'_>, DownReason> {
        let ring = self
            .0
            .binary_search_by_key(&landing.ring, |(number, _)| *number)
            .ok()
            .and_then(|at| self.0.get(at))
            .map(|(_, ring)| ring)
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
