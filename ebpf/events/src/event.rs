//! What is told at once, through the ring buffer.

use crate::{FlowKey, shared};

/// What an [`Event`] tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum EventKind {
    /// The first packet of a flow passed in this direction.
    FlowBegan = 1,
    /// Traffic goes on after an idle gap: a burst began. The event also says what is known of the one that ended.
    BurstBegan = 2,
    /// A mark (CE) or a CNP after a clean while. `total` counts marks and CNPs of the flow.
    CongestionBegan = 3,
    /// A packet was sent again. `total` counts TCP retransmissions, or RoCE repeats, of the flow.
    Retransmission = 4,
    /// RoCE sequence numbers are missing. `total` counts them for the flow.
    Gap = 5,
    /// RoCE: a NAK passed. `total` counts those of the flow.
    Refusal = 6,
    /// A packet that left was acknowledged now, much later than the least that this ever took.
    /// `flow` is what left; `count` says which of its round trips this was. TCP: `total` counts the bytes of the flow until the packet had left,
    /// it too. At most one a millisecond is told, of all flows together; none that took 30 ms more than the least, for such acknowledgements
    /// may have been delayed.
    LateRtt = 7,
}

impl EventKind {
    /// The kind with a number; none for one that this version does not know.
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::FlowBegan,
            2 => Self::BurstBegan,
            3 => Self::CongestionBegan,
            4 => Self::Retransmission,
            5 => Self::Gap,
            6 => Self::Refusal,
            7 => Self::LateRtt,
            _ => return None,
        })
    }
}

shared! {
    /// Something that happened on a flow.
    pub struct Event {
        /// When.
        pub time_ns: u64,
        /// On which flow; `direction` is that of the packet, for TCP too.
        pub flow: FlowKey,
        /// An [`EventKind`], by its number.
        pub kind: u32,
        /// `LateRtt`: how many round trips of the flow have ended, this one too, modulo 2^32. Else 0.
        pub count: u32,
        /// Depends on the kind; else 0.
        pub total: u64,
        /// `BurstBegan`: when the burst that ended had begun. `LateRtt` of TCP: when what the one before measured had left, or later. Else 0.
        pub burst_began_ns: u64,
        /// `BurstBegan`: when its last packet passed. `LateRtt`: when the packet left that was acknowledged. Else 0.
        pub burst_ended_ns: u64,
        /// `BurstBegan`: its bytes on the wire. `LateRtt` of TCP: those between what the two measured, modulo 2^32. Else 0.
        pub burst_bytes: u64,
        /// `LateRtt` of TCP: from when the one before had ended until the packet left that was acknowledged, in nanoseconds; at most 2^32 - 1. Else 0.
        pub paused_ns: u32,
        /// `LateRtt` of TCP: of `burst_bytes`, those of that packet. Else 0.
        pub size: u32,
    }
}
