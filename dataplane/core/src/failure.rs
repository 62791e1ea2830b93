//! Why a communicator ended, in terms of ranks alone.

use harmonaize_abi::{Collective, Dtype, OperationId, P2pSignature, Rank, Signature};
use serde::{Deserialize, Serialize};

/// Why a communicator ended. A participant keeps the first reason that it learns, and sends it to the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Failure {
    /// No progress within the time allowed.
    #[error("operation {operation} made no progress in time; ranks that never called it: {missing:?}")]
    Timeout {
        /// Number of the operation.
        operation: OperationId,
        /// The signature that was called, if a local rank called it.
        signature: Option<Signature>,
        /// Ranks that never called it; empty if all did and the data did not move.
        missing: Vec<Rank>,
    },
    /// Ranks called different things.
    #[error("ranks called different operations as number {operation}: {calls:?}")]
    Mismatch {
        /// Number of the operation.
        operation: OperationId,
        /// Who called what: one rank per differing call.
        calls: Vec<(Rank, Signature)>,
    },
    /// Ranks reported different things of one count of an uneven operation.
    #[error("ranks disagree on a count of operation {operation}, from rank {from} to {to:?}: {reported:?}")]
    Counts {
        /// Number of the operation.
        operation: OperationId,
        /// Whose block.
        from: Rank,
        /// For whom, where each pair has a count.
        to: Option<Rank>,
        /// Who reported what.
        reported: Vec<(Rank, u64)>,
    },
    /// A send or a receive made no progress within the time allowed.
    #[error(
        "rank {rank}'s {call} made no progress in time; ranks that never called its other end: {missing:?}"
    )]
    P2pTimeout {
        /// Who called it.
        rank: Rank,
        /// What.
        call: P2pSignature,
        /// Who has not called the other end: one rank, or any that could have. Empty if that was called and nothing moved.
        missing: Vec<Rank>,
    },
    /// Both ends of a message called different things: type and elements.
    #[error(
        "message {number} from rank {from} to rank {to} was sent as {sent:?} and received as {received:?}"
    )]
    P2pMismatch {
        /// Its number among those of the two.
        number: u64,
        /// Who sent it.
        from: Rank,
        /// Who received it.
        to: Rank,
        /// What was sent.
        sent: (Dtype, u64),
        /// What the receive was of.
        received: (Dtype, u64),
    },
    /// Ranks are gone: their process, their host, or the way to it.
    #[error("ranks lost: {ranks:?}")]
    RanksLost {
        /// Who.
        ranks: Vec<Rank>,
    },
    /// The provider ended it.
    #[error("ended by the provider")]
    Dissolved,
    /// A rank aborted it.
    #[error("aborted by rank {rank}")]
    Aborted {
        /// Who.
        rank: Rank,
    },
    /// A participant broke the protocol or ran into a bug.
    #[error("internal error at the participant of ranks {ranks:?}")]
    Internal {
        /// Whose participant.
        ranks: Vec<Rank>,
    },
}

impl Failure {
    /// Of one of the [`Collective::counts`](harmonaize_abi::Collective::counts) among so many ranks.
    pub(crate) fn of_counts(
        operation: OperationId,
        collective: Collective,
        ranks: u32,
        index: u32,
        reported: Vec<(Rank, u64)>,
    ) -> Self {
        let (from, to) = match collective.is_pairwise() {
            true => (index / ranks.max(1), Some(Rank(index % ranks.max(1)))),
            false => (index, None),
        };
        Self::Counts { operation, from: Rank(from), to, reported }
    }

    pub(crate) fn shorten(&mut self) -> bool {
        fn halve<T>(list: &mut Vec<T>) -> bool {
            let cut = !list.is_empty();
            list.truncate(list.len() / 2);
            cut
        }
        match self {
            Self::Timeout { missing: list, .. }
            | Self::P2pTimeout { missing: list, .. }
            | Self::RanksLost { ranks: list }
            | Self::Internal { ranks: list } => halve(list),
            Self::Mismatch { calls, .. } => halve(calls),
            Self::Counts { reported, .. } => halve(reported),
            Self::P2pMismatch { .. } | Self::Dissolved | Self::Aborted { .. } => false,
        }
    }
}
