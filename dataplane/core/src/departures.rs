//! Ranks that have left, and whether the rest can go on without those that are gone.

use crate::failure::Failure;
use crate::message::Control;
use crate::p2p::P2p;
use crate::shared::Shared;
use harmonaize_abi::{Rank, SegmentId};
use harmonaize_plan::Participant;
use serde::{Deserialize, Serialize};

/// Ranks that have left.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Departures {
    /// Each rank, and how many operations it took part in.
    departed: Vec<(Rank, u64)>,
}

impl Departures {
    /// Whether any rank has left.
    pub(crate) fn any(&self) -> bool {
        !self.departed.is_empty()
    }

    /// Whether a rank has left.
    pub(crate) fn contains(&self, rank: Rank) -> bool {
        self.departed.iter().any(|(left, _)| *left == rank)
    }

    /// Notes that a rank has left after so many operations.
    pub(crate) fn note(&mut self, rank: Rank, operations: u64) {
        if !self.contains(rank) {
            self.departed.push((rank, operations));
        }
    }

    /// Reports again which local ranks left: what was sent on links that others close may be lost.
    pub(crate) fn resend(&self, shared: &mut Shared) {
        for (rank, operations) in self.departed.iter().copied() {
            if shared.operations.ranks().contains(&rank) {
                shared.broadcast(&Control::Left { rank, operations });
            }
        }
    }

    /// Ends the communicator if what it has begun cannot end well any more.
    /// A peer may be gone whose ranks have not left, or an operation or a message be called that ranks that have left cannot take
    /// part in. Or one of the `begun` segments cannot be acknowledged any more.
    pub(crate) fn refuse_impossible(&self, shared: &mut Shared, p2p: &P2p, begun: SegmentId) {
        if shared.has_failed() {
            return;
        }
        let acknowledgements = &shared.acknowledgements;
        let done = acknowledgements.local_done();
        let is_lost = |peer: u32| shared.epochs.is_lost(Participant(peer), done);
        if let Some(peer) = acknowledgements.lost_neighbor(begun, is_lost) {
            let ranks = shared.group.local(peer).to_vec();
            return fail_lost(shared, ranks);
        }
        let ranks = p2p.missing(shared, |rank| self.contains(rank), |peer| shared.epochs.is_lost(peer, done));
        if !ranks.is_empty() {
            return fail_lost(shared, ranks);
        }
        let (first, end) = shared.operations.bounds();
        let busy = first != end || acknowledgements.acked_by_all() < begun;
        let left = self.departed.iter().filter(|(_, operations)| busy && end.0 > *operations);
        let left = left.map(|(rank, _)| *rank);
        let lost = (0..shared.group.participants()).filter(|peer| is_lost(*peer));
        let lost = lost.flat_map(|peer| shared.group.local(Participant(peer)).iter().copied());
        let lost = lost.filter(|rank| !self.contains(*rank));
        let ranks: Vec<Rank> = left.chain(lost).collect();
        if !ranks.is_empty() {
            fail_lost(shared, ranks);
        }
    }
}

fn fail_lost(shared: &mut Shared, mut ranks: Vec<Rank>) {
    ranks.sort_unstable();
    ranks.dedup();
    shared.fail(Failure::RanksLost { ranks });
}
