//! What is measured: a collective, or messages around the ranks.

use harmonaize_client::{BlockContent, Collective, Rank};

/// What nccl-tests has a program for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measured {
    /// One of the collectives.
    Collective(Collective),
    /// Each rank sends to the next one around, and receives from the one before.
    SendRecv,
}

impl Measured {
    pub(crate) fn reduces(self) -> bool {
        matches!(self, Self::Collective(collective) if collective.reduces())
    }

    pub(crate) fn is_rooted(self) -> bool {
        matches!(self, Self::Collective(collective) if collective.is_rooted())
    }

    pub(crate) fn can_be_in_place(self) -> bool {
        matches!(self, Self::Collective(collective) if collective.can_be_in_place())
    }

    /// Blocks of the largest tensor of any rank.
    pub(crate) fn max_blocks(self, ranks: u32) -> u32 {
        match self {
            Self::Collective(collective) => collective.max_blocks(ranks),
            Self::SendRecv => 1,
        }
    }

    /// Blocks of a rank's input and of its output.
    pub(crate) fn blocks(self, ranks: u32, rank: Rank, root: Rank) -> [u32; 2] {
        match self {
            Self::Collective(collective) => collective.blocks(ranks, rank, root),
            Self::SendRecv => [1, 1],
        }
    }

    /// In place: which blocks of input and output are the same.
    pub(crate) fn shared_block(self, rank: Rank, root: Rank) -> Option<[u32; 2]> {
        match self {
            Self::Collective(collective) => collective.shared_block(rank, root),
            Self::SendRecv => None,
        }
    }

    /// What a block of a rank's output is, among so many ranks.
    pub(crate) fn content(self, ranks: u32, rank: Rank, block: u32, root: Rank) -> BlockContent {
        match self {
            Self::Collective(collective) => collective.content(rank, block, root),
            Self::SendRecv => BlockContent::Input(before(rank, ranks), 0),
        }
    }

    /// Bus bandwidth over algorithm bandwidth.
    pub(crate) fn bus_factor(self, ranks: u32) -> f64 {
        match self {
            Self::Collective(collective) => collective.bus_factor(ranks),
            Self::SendRecv => 1.0,
        }
    }
}

/// The rank after another, around.
pub(crate) fn next(rank: Rank, ranks: u32) -> Rank {
    Rank((rank.0 + 1) % ranks.max(1))
}

/// The rank before another, around.
pub(crate) fn before(rank: Rank, ranks: u32) -> Rank {
    Rank((rank.0 + ranks.saturating_sub(1)) % ranks.max(1))
}
