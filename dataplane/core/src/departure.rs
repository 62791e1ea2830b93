//! Who is gone, and how a communicator ends: links that go down, ranks that leave, the last words to everybody.

use crate::communicator::{Action, Communicator};
use crate::message::Control;
use crate::{CoreError, Failure};
use harmonaize_abi::Rank;
use harmonaize_plan::Participant;

/// Who and what is no longer there.
#[derive(Debug)]
pub(crate) struct Departures {
    /// By participant: its link of the current epoch is down.
    current: Vec<bool>,
    /// By participant: its link of the next epoch is down.
    next: Vec<bool>,
    /// Ranks that left, and how many operations they took part in.
    departed: Vec<(Rank, u64)>,
}

impl Departures {
    pub(crate) fn new(participants: u32) -> Self {
        let none = vec![false; participants as usize];
        Self { current: none.clone(), next: none, departed: Vec::new() }
    }

    /// The next epoch is the current one.
    pub(crate) fn retire(&mut self) {
        std::mem::swap(&mut self.current, &mut self.next);
        self.next.fill(false);
    }

    /// Whether the link of the current epoch to a peer is down.
    pub(crate) fn is_down(&self, peer: Participant) -> bool {
        self.current.get(peer.0 as usize) == Some(&true)
    }

    /// Whether a link of the next epoch is down.
    pub(crate) fn next_is_down(&self) -> bool {
        self.next.contains(&true)
    }

    /// There is no next epoch.
    pub(crate) fn withdraw(&mut self) {
        self.next.fill(false);
    }

    /// Whether any rank has left.
    pub(crate) fn any_departed(&self) -> bool {
        !self.departed.is_empty()
    }

    fn leave(&mut self, rank: Rank, operations: u64) -> bool {
        let new = !self.has_departed(rank);
        if new {
            self.departed.push((rank, operations));
        }
        new
    }

    fn has_departed(&self, rank: Rank) -> bool {
        self.departed.iter().any(|(left, _)| *left == rank)
    }
}

impl Communicator {
    /// The link to a peer that was made for the epoch `link` has gone down.
    pub fn handle_link_down(&mut self, link: u32, peer: Participant) {
        if self.failure().is_some() {
            return;
        }
        let index = peer.0 as usize;
        if self.current.link(peer) == Some(link)
            && let Some(down) = self.departures.current.get_mut(index)
        {
            *down = true;
        }
        let next = self.next.as_ref().filter(|switch| switch.epoch.link(peer) == Some(link));
        if let Some((epoch, ready)) = next.map(|switch| (switch.epoch.number(), switch.ready)) {
            if let Some(down) = self.departures.next.get_mut(index) {
                *down = true;
            }
            if ready {
                // Before any promise this is a plan that cannot be, not a peer that is gone.
                self.withdraw(epoch);
            }
        }
        self.refuse_impossible();
    }

    /// Whether a peer cannot be reached any more. A peer closes the old link once all of its segments are done by everybody, which
    /// it may know before we do, even of the commit; before that, what is to go by the old link cannot go by another. The new
    /// one it may have given up, until the commit.
    fn is_lost(&self, peer: usize) -> bool {
        let current = self.departures.current.get(peer) == Some(&true);
        let next = self.departures.next.get(peer) == Some(&true);
        let needed =
            |below: Option<u64>| below.is_none_or(|below| self.acknowledgements.local_done() < below);
        match &self.next {
            Some(switch) if switch.commit.is_some() => next || current && needed(switch.commit),
            Some(switch) if switch.ready => current && (next || needed(switch.promised_below)),
            _ => current,
        }
    }

    /// Ends the communicator if an operation was called that ranks that are gone cannot take part in, or if one that has
    /// begun cannot be acknowledged any more.
    pub(crate) fn refuse_impossible(&mut self) {
        if self.failure().is_some() {
            return;
        }
        if let Some(peer) =
            self.acknowledgements.lost_neighbor(self.begun, |peer| self.is_lost(peer as usize))
        {
            let mut ranks = self.group.local(peer).to_vec();
            ranks.sort_unstable();
            self.fail(Failure::RanksLost { ranks });
            return;
        }
        let (first, end) = self.operations.bounds();
        if first == end && self.acknowledgements.acked_by_all() >= self.begun {
            return;
        }
        let left = self.departures.departed.iter();
        let left = left.filter(|(_, operations)| end > *operations).map(|(rank, _)| *rank);
        let lost = (0..self.group.participants()).filter(|peer| self.is_lost(*peer as usize));
        let lost = lost.flat_map(|peer| self.group.local(Participant(peer)).iter().copied());
        let lost = lost.filter(|rank| !self.departures.has_departed(*rank));
        let mut ranks: Vec<Rank> = left.chain(lost).collect();
        if !ranks.is_empty() {
            ranks.sort_unstable();
            self.fail(Failure::RanksLost { ranks });
        }
    }

    /// A local rank's process is gone, or it has left. With an operation in flight the communicator ends.
    pub fn handle_rank_departed(&mut self, rank: Rank) {
        let Some(called) = self.operations.called(rank) else { return };
        if self.departures.has_departed(rank) {
            return;
        }
        if self.failure().is_none() && self.awaits_completion(rank, called) {
            self.fail(Failure::RanksLost { ranks: vec![rank] });
        }
        self.departures.leave(rank, called);
        if self.failure().is_none() {
            self.broadcast_control(&Control::Left { rank, operations: called });
            self.refuse_impossible();
        }
    }

    /// A peer says that a rank of its left.
    pub(crate) fn handle_peer_departed(&mut self, from: Participant, rank: Rank, operations: u64) -> bool {
        if !self.group.local(from).contains(&rank) {
            return false;
        }
        self.departures.leave(rank, operations);
        self.refuse_impossible();
        true
    }

    /// Says again which local ranks left: what was said on links that others close may be lost.
    pub(crate) fn resend_departures(&mut self) {
        let local = self.operations.ranks().to_vec();
        let left = self.departures.departed.to_vec();
        for (rank, operations) in left.into_iter().filter(|(rank, _)| local.contains(rank)) {
            self.broadcast_control(&Control::Left { rank, operations });
        }
    }

    /// Whether every local rank has left and no peer needs anything from here. True only when there is nothing to poll.
    pub fn finished(&self) -> bool {
        let mut local = self.operations.ranks().iter();
        let told = self.outbox.is_empty() && self.actions.is_empty();
        told && local.all(|rank| self.departures.has_departed(*rank))
            && match self.failure() {
                Some(_) => self.operations.oldest().is_none(),
                None => {
                    self.acknowledgements.acked_by_all() >= self.begun && !self.acknowledgements.has_pending()
                }
            }
    }

    /// The provider ends the communicator.
    pub fn dissolve(&mut self, failure: Failure) {
        self.fail(failure);
    }

    /// The participant goes away for good, and its ranks with it.
    pub fn shut_down(&mut self) {
        self.fail(Failure::RanksLost { ranks: self.group.local(self.me).to_vec() });
    }

    /// A participant broke the protocol, in a way that the caller found.
    pub fn handle_breach(&mut self, participant: Participant) {
        self.fail(Failure::Internal { ranks: self.group.local(participant).to_vec() });
    }

    /// Ends the communicator here and tells everybody. That holds for a failure learnt from a peer too: whoever sees our
    /// links go down next must have heard from us why.
    pub(crate) fn fail(&mut self, failure: Failure) {
        if self.failure().is_some() {
            return;
        }
        self.broadcast_control(&Control::Abort { failure: failure.clone() });
        self.actions.clear();
        self.actions.push_back(Action::Ended(failure.clone()));
        self.inquiry = None;
        self.failure = Some(failure);
    }

    /// What a call gets once the communicator has ended.
    pub(crate) fn check_open(&self) -> Result<(), CoreError> {
        self.failure().map_or(Ok(()), |failure| Err(CoreError::Ended(failure.clone())))
    }
}
