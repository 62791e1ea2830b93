//! What the programs in the kernel and the agent agree on byte by byte: keys of flows, their counters, events, losses.
//!
//! Every structure is `repr(C)` without padding. Times are nanoseconds of CLOCK_MONOTONIC unless a name says otherwise;
//! sizes are bytes. A *packet* is one on the wire: a buffer that the device cuts into segments, or that it merged from
//! several, counts as that many. *Ingress* and *egress* are as the interface sees them.
#![no_std]
#![forbid(unsafe_code)]

mod counters;
mod endpoint;
mod event;
mod key;
mod mark;
mod totals;

pub use counters::{RoceCounters, RoceEntry, RttStats, TcpCounters, TcpEntry, TcpFlow, Traffic, state};
pub use endpoint::{DEVICE_NAME, EndpointLosses, PROCESS_NAME, QueuePair, QueuePairKey, Socket, SocketKey};
pub use event::{Event, EventKind};
pub use key::{Direction, FlowKey, FoldingSecret, Protocol, RequestKey, RequestSent, ShortKey};
pub use mark::{Mark, MarkKind, SAMPLED_BLOCKS};
pub use totals::{InterfaceTotals, Losses, Totals};

/// The UDP port of RoCE v2 (InfiniBand Architecture, annex A17).
pub const ROCE_PORT: u16 = 4791;
/// Packet sequence numbers of RoCE have 24 bits.
pub const PSN_MASK: u32 = 0x00ff_ffff;
/// How many places there are for interfaces; one that is registered lies at its index modulo this, or a few further.
pub const INTERFACE_SLOTS: u32 = 256;
/// In how many places, from its index on, a registered interface may lie.
pub const INTERFACE_PROBES: u32 = 4;
/// How many nested headers (VLAN tags not counted) are followed before a packet counts as `other`.
pub const EXTENSION_HEADERS: usize = 6;
/// How far into a buffer headers may reach before its packets count as `other`, in bytes.
pub const HEADERS_END: usize = 256;

/// The attributes that every structure here has.
macro_rules! shared {
    ($($(#[$attribute:meta])* pub struct $name:ident { $($fields:tt)* })*) => {$(
        $(#[$attribute])*
        #[cfg_attr(
            feature = "zerocopy",
            derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout)
        )]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[repr(C)]
        pub struct $name { $($fields)* }
    )*};
}
use shared;
