//! What is found of links: the words of a finding.

use super::monitor::Monitor;
use crate::trace::Timed;
use harmonaize_abi::{CongestionCause, CongestionLevel, Nanos};
use harmonaize_events::Direction;
use std::time::Duration;

/// A link as this host sees it: an interface in one direction. It is the whole interface, or the part on the route to one other
/// end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link {
    /// The interface's index in its network namespace.
    pub interface: u32,
    /// Which way the bytes go that are or would be held up.
    pub direction: Direction,
    /// Which of its paths.
    pub path: Path,
}

/// A class of paths that share their fate, as far as this host can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Path {
    /// The interface itself: everything that crosses it.
    Whole,
    /// What goes to, or comes from, another end.
    Remote {
        /// Its address, as in a flow's key.
        address: [u32; 4],
        /// RoCE: the UDP source port, which chooses among equal paths. It is 0 for TCP, where all connections but our own count
        /// as one.
        port: u16,
    },
    /// What an own TCP connection takes: its two ports choose among equal paths.
    Connection {
        /// The other end's address, as in a flow's key.
        address: [u32; 4],
        /// The port on this side.
        local: u16,
        /// The port on the other side.
        remote: u16,
    },
    /// All that crosses an RDMA device's port, as the device counts it.
    Rdma,
}

impl Path {
    /// The address of the other end; none of the interface itself, or of a port.
    pub const fn address(&self) -> Option<[u32; 4]> {
        match self {
            Self::Whole | Self::Rdma => None,
            Self::Remote { address, .. } | Self::Connection { address, .. } => Some(*address),
        }
    }
}

/// Which signals speak for congestion.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Signals {
    /// Round trips are longer than at rest.
    pub delay: bool,
    /// Queues mark packets, or ask senders to slow down.
    pub ecn_ce: bool,
    /// Packets are lost.
    pub loss: bool,
    /// The link carries about all that it can.
    pub load: bool,
    /// A long queue stood for a while, of which too little was ours. What others send takes the remainder of the link.
    pub starved: bool,
}

/// A link's state, or its cause, has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Congestion {
    /// Which link.
    pub link: Link,
    /// Its state from now on.
    pub level: CongestionLevel,
    /// Who is the cause.
    pub cause: CongestionCause,
    /// When what led to this state began; for a mere change of the cause, when the state began.
    pub since: Nanos,
    /// When it was found.
    pub found: Nanos,
    /// What spoke for congestion then.
    pub signals: Signals,
    /// Bytes that own communicators moved in a second then.
    pub own_rate: u64,
    /// Bytes that all other traffic seen here moved in a second then.
    pub cross_traffic_rate: u64,
    /// What it can carry in a second, in bytes, as told or as seen; 0 where neither is known.
    pub capacity: u64,
    /// The round trip then; 0 where none was measured.
    pub rtt: Duration,
    /// The round trip at rest; 0 where none was measured.
    pub min_rtt: Duration,
    /// Of a million packets, those that were marked then.
    pub ecn_ce_ppm: u32,
    /// Of a million packets, those that were lost or sent again then.
    pub lost_ppm: u32,
    /// Of a million, the part of the capacity that was in use then; 0 where the capacity is not known.
    pub used_ppm: u32,
}

impl Congestion {
    /// A link that is not congested, and of which nothing was measured.
    pub fn none(link: Link, now: Nanos) -> Self {
        Self {
            link,
            level: CongestionLevel::None,
            cause: CongestionCause::Unknown,
            since: now,
            found: now,
            signals: Signals::default(),
            own_rate: 0,
            cross_traffic_rate: 0,
            capacity: 0,
            rtt: Duration::ZERO,
            min_rtt: Duration::ZERO,
            ecn_ce_ppm: 0,
            lost_ppm: 0,
            used_ppm: 0,
        }
    }
}

impl Monitor {
    /// How the link stands now.
    pub(super) fn finding(&self, now: Nanos) -> Congestion {
        let measure = &self.measure;
        Congestion {
            link: self.link,
            level: self.hysteresis.level,
            cause: self.cause.get(),
            since: self.hysteresis.since,
            found: now,
            signals: measure.signals,
            own_rate: measure.own_rate,
            cross_traffic_rate: measure.cross_traffic_rate,
            capacity: measure.capacity,
            rtt: measure.rtt,
            min_rtt: self.min_rtt.min().unwrap_or_default(),
            ecn_ce_ppm: measure.ecn_ce_ppm,
            lost_ppm: measure.lost_ppm,
            used_ppm: measure.used_ppm,
        }
    }
}

impl Timed for Congestion {
    fn time(&self) -> Nanos {
        self.found
    }

    fn same_content(&self, other: &Self) -> bool {
        (self.link, self.level, self.cause) == (other.link, other.level, other.cause)
    }
}
