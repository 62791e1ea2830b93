//! Message streams between two participants on one channel: order, credit, and what has arrived but is not consumed.

use crate::message::Payload;
use harmonaize_abi::{OperationId, SegmentId, Sequence, Signature};
use serde::{Deserialize, Serialize};

/// The description of a data message that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Arrival {
    pub(crate) operation: OperationId,
    pub(crate) segment: SegmentId,
    pub(crate) signature: Signature,
    pub(crate) payload: Payload,
}

/// Both directions between this participant and one peer on one channel in one epoch. Counters wrap; differences count.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Stream {
    slots: u32,
    sent: u32,
    credited: u32,
    arrived: u32,
    consumed: u32,
    credit_sent: u32,
    arrivals: Box<[Option<Arrival>]>,
}

impl Stream {
    /// A stream of which each end has `slots` landing slots (at least one).
    pub(crate) fn new(slots: u32) -> Self {
        let slots = slots.max(1);
        Self {
            slots,
            sent: 0,
            credited: 0,
            arrived: 0,
            consumed: 0,
            credit_sent: 0,
            arrivals: vec![None; slots as usize].into_boxed_slice(),
        }
    }

    /// Whether the peer has a free slot for one more message.
    pub(crate) fn may_send(&self) -> bool {
        self.sent.wrapping_sub(self.credited) < self.slots
    }

    /// Takes the number for the next message.
    pub(crate) fn send(&mut self) -> Sequence {
        debug_assert!(self.may_send(), "the peer has no free slot");
        let sequence = Sequence(self.sent);
        self.sent = sequence.next().0;
        self.check();
        sequence
    }

    /// The peer has consumed `credit` messages. False if it claims more than were sent.
    #[must_use]
    pub(crate) fn handle_credit(&mut self, credit: u32) -> bool {
        let outstanding = self.sent.wrapping_sub(self.credited);
        let newly = credit.wrapping_sub(self.credited);
        if newly > outstanding {
            // An older count, overtaken on another path: how far back it is depends on how long it was under way.
            return self.credited.wrapping_sub(credit) < u32::MAX / 2;
        }
        self.credited = credit;
        self.check();
        true
    }

    /// A message has landed. False if it is out of order or overruns the window.
    #[must_use]
    pub(crate) fn handle_arrival(&mut self, sequence: Sequence, arrival: Arrival) -> bool {
        self.land(sequence, Some(arrival))
    }

    /// The same of what the caller keeps account of, as [`Self::peek`] does not.
    #[must_use]
    pub(crate) fn handle_piece(&mut self, sequence: Sequence) -> bool {
        self.land(sequence, None)
    }

    fn land(&mut self, sequence: Sequence, arrival: Option<Arrival>) -> bool {
        if sequence != Sequence(self.arrived) || self.arrived.wrapping_sub(self.consumed) >= self.slots {
            return false;
        }
        let index = sequence.slot(self.slots) as usize;
        if let Some(slot) = self.arrivals.get_mut(index) {
            *slot = arrival;
        }
        self.arrived = sequence.next().0;
        self.check();
        true
    }

    /// The `ahead`-th message that is not consumed yet, and its number.
    pub(crate) fn peek(&self, ahead: u32) -> Option<(Sequence, Arrival)> {
        let sequence = Sequence(self.consumed).ahead(ahead);
        if self.arrived.wrapping_sub(self.consumed) <= ahead {
            return None;
        }
        let arrival = *self.arrivals.get(sequence.slot(self.slots) as usize)?;
        Some((sequence, arrival?))
    }

    /// Whether the `ahead`-th message that is not consumed yet has arrived.
    pub(crate) fn has_arrived(&self, ahead: u32) -> bool {
        ahead < self.arrived.wrapping_sub(self.consumed)
    }

    /// The number of the `ahead`-th message that is not consumed yet, if the peer has credit for it.
    pub(crate) fn expect(&self, ahead: u32) -> Option<Sequence> {
        (ahead < self.slots).then(|| Sequence(self.consumed).ahead(ahead))
    }

    /// Frees the slot of the oldest message.
    pub(crate) fn consume(&mut self) {
        debug_assert!(self.has_arrived(0), "a message is consumed that has not arrived");
        self.consumed = self.consumed.wrapping_add(1);
        self.check();
    }

    /// What must hold between two calls, in each direction.
    fn check(&self) {
        debug_assert!(
            self.sent.wrapping_sub(self.credited) <= self.slots,
            "more is sent than there are slots"
        );
        debug_assert!(
            self.arrived.wrapping_sub(self.consumed) <= self.slots,
            "more has arrived than there are slots"
        );
        debug_assert!(
            self.consumed.wrapping_sub(self.credit_sent) <= self.slots,
            "more is consumed than the peer had credit for"
        );
    }

    /// What to tell the peer with the next frame.
    pub(crate) fn take_credit(&mut self) -> u32 {
        self.credit_sent = self.consumed;
        self.consumed
    }

    /// Whether the peer should hear of freed slots even if nothing else goes its way: when half of them are.
    pub(crate) fn credit_due(&self) -> bool {
        self.consumed.wrapping_sub(self.credit_sent) >= self.slots.div_ceil(2)
    }
}
