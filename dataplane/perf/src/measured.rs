//! What is measured: a collective, or messages around the ranks.

use harmonaize_client::{BlockContent, Collective, Rank};

/// The factor by which rank 0 gets more than each other rank in an AllToAll with counts. The popular expert of a mixture does the
/// same.
pub(crate) const SKEW: u32 = 4;

/// What there is a program for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measured {
    /// One of the collectives.
    Collective(Collective),
    /// Each rank sends each other a block, and rank 0 as many as [`SKEW`].
    AllToAllV,
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
            Self::AllToAllV => SKEW.saturating_mul(ranks),
            Self::SendRecv => 1,
        }
    }

    /// Blocks of a rank's input and of its output.
    pub(crate) fn blocks(self, ranks: u32, rank: Rank, root: Rank) -> [u32; 2] {
        match self {
            Self::Collective(collective) => collective.blocks(ranks, rank, root),
            Self::AllToAllV => {
                let each = if rank == Rank(0) { SKEW } else { 1 };
                [SKEW.saturating_add(ranks).saturating_sub(1), each.saturating_mul(ranks)]
            }
            Self::SendRecv => [1, 1],
        }
    }

    /// In place: which blocks of input and output are the same.
    pub(crate) fn shared_block(self, rank: Rank, root: Rank) -> Option<[u32; 2]> {
        match self {
            Self::Collective(collective) => collective.shared_block(rank, root),
            Self::AllToAllV | Self::SendRecv => None,
        }
    }

    /// What a block of a rank's output is, among so many ranks.
    pub(crate) fn content(self, ranks: u32, rank: Rank, block: u32, root: Rank) -> BlockContent {
        match self {
            Self::Collective(collective) => collective.content(rank, block, root),
            Self::AllToAllV if rank == Rank(0) => BlockContent::Input(Rank(block / SKEW), block % SKEW),
            Self::AllToAllV => {
                BlockContent::Input(Rank(block), SKEW.saturating_add(rank.0).saturating_sub(1))
            }
            Self::SendRecv => BlockContent::Input(before(rank, ranks), 0),
        }
    }

    /// Bus bandwidth over algorithm bandwidth.
    pub(crate) fn bus_factor(self, ranks: u32) -> f64 {
        match self {
            Self::Collective(collective) => collective.bus_factor(ranks),
            Self::AllToAllV => Collective::AllToAll.bus_factor(ranks),
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

/// Elements that a rank sends to each in an AllToAll with counts, and that it gets from each. The blocks have `count`
/// elements.
pub(crate) fn skewed_counts(rank: Rank, ranks: u32, count: u64) -> [Vec<u64>; 2] {
    let to = |other: u32| if other == 0 { count.saturating_mul(SKEW.into()) } else { count };
    [(0..ranks).map(to).collect(), (0..ranks).map(|_| to(rank.0)).collect()]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each block that is sent comes out once.
    #[test]
    fn a_skewed_exchange_moves_every_block_once() {
        for ranks in 1..=5 {
            let all: Vec<Rank> = (0..ranks).map(Rank).collect();
            let mut arrived = Vec::new();
            for rank in &all {
                let [sent, received] = Measured::AllToAllV.blocks(ranks, *rank, Rank(0));
                let [send, receive] = skewed_counts(*rank, ranks, 10);
                assert_eq!(
                    [sent, received].map(u64::from),
                    [&send, &receive].map(|counts| counts.iter().sum::<u64>() / 10)
                );
                assert!(received <= Measured::AllToAllV.max_blocks(ranks));
                for block in 0..received {
                    let BlockContent::Input(from, block) =
                        Measured::AllToAllV.content(ranks, *rank, block, Rank(0))
                    else {
                        unreachable!("an input")
                    };
                    arrived.push((from, block));
                }
            }
            arrived.sort_unstable();
            let blocks = |rank: &Rank| Measured::AllToAllV.blocks(ranks, *rank, Rank(0))[0];
            let sent: Vec<_> =
                all.iter().flat_map(|rank| (0..blocks(rank)).map(|block| (*rank, block))).collect();
            assert_eq!(arrived, sent);
        }
    }
}
