//! Point to point: what a rank sends another, or receives of it.

use crate::collective::{Dtype, Rank, Signature};
use core::fmt;
use serde::{Deserialize, Serialize};

/// In [`crate::Submission::root`] of a receive: from whichever rank sends first.
pub const ANY_RANK: u32 = u32::MAX;

/// Which end of a message a rank calls. The codes stand in [`crate::Submission::collective`], where no collective has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u8)]
pub enum Direction {
    /// Its tensor goes to another rank.
    Send = 64,
    /// Its tensor becomes another rank's.
    Receive = 65,
}

impl Direction {
    /// The value behind a code received from elsewhere, or `None` if this version does not know it.
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            64 => Some(Self::Send),
            65 => Some(Self::Receive),
            _ => None,
        }
    }

    /// The code that stands in descriptors.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

/// What a rank calls of a message. Both ends give the same type and number of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct P2pSignature {
    /// Which end.
    pub direction: Direction,
    /// The other end; `None` receives from any.
    pub peer: Option<Rank>,
    /// Element type.
    pub dtype: Dtype,
    /// Elements.
    pub count: u64,
}

impl P2pSignature {
    /// Bytes of the tensor; `None` if that is no number.
    pub const fn bytes(&self) -> Option<u64> {
        self.count.checked_mul(self.dtype.size() as u64)
    }
}

impl fmt::Display for P2pSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { direction, peer, dtype, count } = self;
        let (name, way) = match direction {
            Direction::Send => ("send", "to"),
            Direction::Receive => ("receive", "from"),
        };
        write!(f, "{name}({count} x {dtype}, {way} ")?;
        match peer {
            Some(peer) => write!(f, "rank {peer})"),
            None => f.write_str("any rank)"),
        }
    }
}

/// What a rank has called: a collective, or its end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Called {
    /// A collective.
    Collective(Signature),
    /// A send or a receive.
    P2p(P2pSignature),
}

impl fmt::Display for Called {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Collective(signature) => signature.fmt(f),
            Self::P2p(signature) => signature.fmt(f),
        }
    }
}
