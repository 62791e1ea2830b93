//! Everything that analysis takes in, as one stream of records that can be saved, replayed, merged and compared.
//!
//! Records are the words of the trace's format: their times are nanoseconds, `_ns`. [`Record::time`] is the one to reckon with.

mod codec;
mod diff;
mod label;
mod merge;
mod raw;
#[cfg(test)]
mod tests;

pub use codec::{Damage, Error, LARGEST, Reader, Replayed, VERSION, Writer, replay};
pub use diff::{Difference, Timed, diff, diff_records};
pub use label::Label;
pub use merge::merge;

use harmonaize_abi::{CommunicatorId, Epoch, Nanos};
use harmonaize_events::{Event, FlowKey, InterfaceTotals, Mark, RoceCounters, TcpFlow};

/// One thing that was observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(
    clippy::large_enum_variant,
    reason = "records are passed by reference and never collected on a hot path"
)]
pub enum Record {
    /// Who observes what follows, until the next of these. A stream without one is of host 0.
    Observer(Observer),
    /// What the programs told at once.
    Event(Event),
    /// A snapshot of a TCP connection that has changed since its last.
    Tcp {
        /// When it was read.
        time_ns: u64,
        /// Which connection, `direction` 0.
        key: FlowKey,
        /// Its counters.
        flow: TcpFlow,
    },
    /// A snapshot of a RoCE flow that has changed since its last.
    Roce {
        /// When it was read.
        time_ns: u64,
        /// Which flow.
        key: FlowKey,
        /// Its counters.
        counters: RoceCounters,
    },
    /// A snapshot of an interface's totals.
    Totals {
        /// When it was read.
        time_ns: u64,
        /// What crossed it.
        totals: InterfaceTotals,
    },
    /// What the engine says of an operation of this host's own.
    Mark(Mark),
    /// A flow belongs to one of this host's own communicators, or does no longer.
    Owner(Owner),
    /// An interface is watched, or no longer.
    Link(Link),
    /// Something was lost: what follows may have a gap before it.
    Lost(Lost),
    /// What an RDMA device has counted itself, where no program sees its packets.
    Port(Port),
    /// How long a message took over an own queue pair, where no program sees its packets.
    Completion(Completion),
}

/// Who observes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Observer {
    /// When this began to hold.
    pub time_ns: u64,
    /// A number that tells the hosts of a merged trace apart.
    pub host: u64,
    /// CLOCK_REALTIME less CLOCK_MONOTONIC on that host; 0 where it is not known.
    pub realtime_offset_ns: i64,
}

/// Whose a flow is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// When this began to hold.
    pub time_ns: u64,
    /// The flow: for TCP with `direction` 0.
    pub flow: FlowKey,
    /// The tenant.
    pub tenant: Label,
    /// The communicator.
    pub communicator: CommunicatorId,
    /// The epoch since which the flow carries it.
    pub epoch: Epoch,
    /// Which participant this side of the flow is.
    pub from: u32,
    /// Which participant the other side is.
    pub to: u32,
    /// False when the flow belongs to the communicator no longer.
    pub owned: bool,
}

/// An interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link {
    /// When this began to hold.
    pub time_ns: u64,
    /// Its index in its network namespace.
    pub interface: u32,
    /// Its name.
    pub name: Label,
    /// What it carries in each direction, in bytes per second; 0 where that is not known.
    pub bytes_per_second: u64,
    /// False when it is watched no longer.
    pub watched: bool,
}

/// What was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum LostKind {
    /// Events that found no room in the ring.
    Events = 1,
    /// Flows that the full table evicted.
    Flows = 2,
    /// Marks that found no room in the engine's queue.
    Marks = 3,
    /// Records that the recorder of this trace left out.
    Records = 4,
    /// Nothing was observed for a while, as over a restart; `count` is its length in nanoseconds, 0 where not known.
    Gap = 5,
}

impl LostKind {
    /// The kind with a number; none for one that this version does not know.
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::Events,
            2 => Self::Flows,
            3 => Self::Marks,
            4 => Self::Records,
            5 => Self::Gap,
            _ => return None,
        })
    }
}

/// A loss, noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lost {
    /// When it was noticed: it happened before.
    pub time_ns: u64,
    /// What.
    pub kind: LostKind,
    /// How many since the last such record.
    pub count: u64,
}

/// What an RDMA device has counted at one of its ports, since the device was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port {
    /// When it was read.
    pub time_ns: u64,
    /// The index of the interface that has its addresses.
    pub interface: u32,
    /// The port's number.
    pub number: u32,
    /// The device's name.
    pub device: Label,
    /// NAKs that came in of receivers that were not ready.
    pub not_ready: u64,
    /// Of what leaves.
    pub egress: PortDirection,
    /// Of what comes in.
    pub ingress: PortDirection,
}

/// What a port has counted in one direction; 0 where its device does not count it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortDirection {
    /// Packets.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Marks on them, or congestion notifications that ask for less of them.
    pub ecn_ce: u64,
    /// Packets of them that were lost or sent again.
    pub lost: u64,
}

/// A message over an own queue pair, as the engine timed it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Completion {
    /// When its completion was seen.
    pub time_ns: u64,
    /// The flow that leaves by the queue pair.
    pub flow: FlowKey,
    /// From handing it to the device until then, in nanoseconds.
    pub took_ns: u64,
    /// Payload bytes that the device had meanwhile for the same engine, carried out or not.
    pub bytes: u64,
}

impl Record {
    /// When it was observed.
    pub const fn time(&self) -> Nanos {
        Nanos(match self {
            Self::Observer(observer) => observer.time_ns,
            Self::Event(event) => event.time_ns,
            Self::Tcp { time_ns, .. } | Self::Roce { time_ns, .. } | Self::Totals { time_ns, .. } => *time_ns,
            Self::Mark(mark) => mark.time_ns,
            Self::Owner(owner) => owner.time_ns,
            Self::Link(link) => link.time_ns,
            Self::Lost(lost) => lost.time_ns,
            Self::Port(port) => port.time_ns,
            Self::Completion(completion) => completion.time_ns,
        })
    }
}
