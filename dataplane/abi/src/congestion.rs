//! Congestion and stragglers: one level and one cause for each. They go from what is found of a link or a rank to the event
//! that a tenant reads.

use serde::{Deserialize, Serialize};

/// How congested a link, a path or a tenant's communicator is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum CongestionLevel {
    /// Not congested; a communicator: nothing worth reporting is lost.
    #[default]
    None,
    /// A link is full or has a standing queue; a communicator loses up to half of the expected rate.
    Mild,
    /// A link's queue is long or packets are lost; a communicator loses more than half of the expected rate.
    Severe,
}

impl CongestionLevel {
    /// Returns its name: `none`, `mild` or `severe`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mild => "mild",
            Self::Severe => "severe",
        }
    }
}

/// Whose traffic congests a link or a path. No tenant is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CongestionCause {
    /// Not known. Always so where the level is [`CongestionLevel::None`].
    #[default]
    Unknown,
    /// Own communicators.
    Own,
    /// Cross traffic takes part or all of it, seen by the host or not.
    CrossTraffic,
}

impl CongestionCause {
    /// Returns its name: `unknown`, `own` or `others`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Own => "own",
            Self::CrossTraffic => "others",
        }
    }
}

/// Why a rank holds the others up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum StragglerCause {
    /// It calls late: its process is slow.
    Compute,
    /// It calls in time, and its bytes move late: it is behind a slow link.
    Network,
}

impl StragglerCause {
    /// Returns its name: `compute` or `network`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Network => "network",
        }
    }
}
