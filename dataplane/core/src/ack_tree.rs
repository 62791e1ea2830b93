//! Cumulative acknowledgement of segments, up and down a tree of participants.
//!
//! They ride on data. Where no data goes they go by themselves: at once where operations wait for them, and else when there is a
//! batch of them, or they are old. Of small operations, which are done before, they were most of the messages.
//!
//! What is done can be undone, together at all (see `aggregation`): each time a generation of acknowledgements begins, and one of
//! an earlier generation has no meaning any more. A neighbour may be one generation ahead; its acknowledgements are kept until this
//! participant is there, too.

use crate::message::Header;
use harmonaize_abi::{Nanos, SegmentId};
use harmonaize_plan::Participant;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Children of a node.
const FANOUT: u32 = 4;
/// How old an acknowledgement may be that nobody waits for.
const MAX_ACK_DELAY: Duration = Duration::from_millis(20);

/// This participant's place in the tree (a heap of degree four over participants' numbers) and what it knows.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AckTree {
    me: u32,
    participants: u32,
    /// By child (in order): all below it have done every segment below this.
    children_done: Vec<SegmentId>,
    /// What each child, and the parent, reported in the next generation.
    children_next_generation: Vec<SegmentId>,
    parent_next_generation: SegmentId,
    generation: u8,
    done: SegmentId,
    acked_by_all: SegmentId,
    reported_to_parent: SegmentId,
    reported_to_children: Vec<SegmentId>,
    /// Operations wait for acknowledgements of segments below this.
    awaited: SegmentId,
    /// Segments of which acknowledgements are a batch.
    batch: u64,
    /// Since when there is something to tell.
    pending_since: Option<Nanos>,
}

impl AckTree {
    /// Of a communicator that has so many segments under way at most.
    pub(crate) fn new(me: Participant, participants: u32, channels: u16) -> Self {
        let children = (1..=FANOUT).filter(|i| me.0 * FANOUT + i < participants).count();
        Self {
            me: me.0,
            participants,
            children_done: vec![SegmentId(0); children],
            children_next_generation: vec![SegmentId(0); children],
            parent_next_generation: SegmentId(0),
            generation: 0,
            done: SegmentId(0),
            acked_by_all: SegmentId(0),
            reported_to_parent: SegmentId(0),
            reported_to_children: vec![SegmentId(0); children],
            awaited: SegmentId(0),
            // The others go on meanwhile.
            batch: u64::from(channels / 2).max(1),
            pending_since: None,
        }
    }

    fn parent(&self) -> Option<u32> {
        (self.me > 0).then(|| (self.me - 1) / FANOUT)
    }

    fn child(&self, peer: u32) -> Option<usize> {
        let child = peer.checked_sub(self.me * FANOUT + 1)?;
        (child < self.children_done.len() as u32 && peer < self.participants).then_some(child as usize)
    }

    /// Every segment below this is done by everybody.
    pub(crate) fn acked_by_all(&self) -> SegmentId {
        self.acked_by_all
    }

    fn subtree_done(&self) -> SegmentId {
        self.children_done.iter().copied().fold(self.done, SegmentId::min)
    }

    fn advance(&mut self) {
        if self.me == 0 {
            self.acked_by_all = self.acked_by_all.max(self.subtree_done());
        }
        debug_assert!(self.acked_by_all <= self.done, "all have done what is not done here");
    }

    /// Every segment below `done` is done here.
    pub(crate) fn advance_local(&mut self, done: SegmentId) {
        self.done = self.done.max(done);
        self.advance();
    }

    /// The first segment that is not done here.
    pub(crate) fn local_done(&self) -> SegmentId {
        self.done
    }

    /// Which this is.
    pub(crate) fn generation(&self) -> u8 {
        self.generation
    }

    /// Segments from `from` on are not done any more, anywhere; what everybody has acknowledged is below.
    pub(crate) fn undo(&mut self, from: SegmentId, generation: u8) {
        self.generation = generation;
        self.done = self.done.min(from);
        // Who was here before this one has not heard what was told in the generation before.
        self.reported_to_parent = SegmentId(0);
        self.reported_to_children.fill(SegmentId(0));
        for (below, ahead) in self.children_done.iter_mut().zip(&mut self.children_next_generation) {
            *below = (*below).min(from).max(std::mem::take(ahead));
        }
        self.acked_by_all =
            self.acked_by_all.max(std::mem::take(&mut self.parent_next_generation).min(self.done));
        self.advance();
    }

    /// What a peer's header says.
    pub(crate) fn handle_header(&mut self, peer: Participant, header: &Header) {
        let acknowledged = header.acknowledged;
        if header.generation == self.generation.wrapping_add(1) {
            if self.parent() == Some(peer.0) {
                self.parent_next_generation = self.parent_next_generation.max(acknowledged);
            } else if let Some(ahead) =
                self.child(peer.0).and_then(|child| self.children_next_generation.get_mut(child))
            {
                *ahead = (*ahead).max(acknowledged);
            }
            return;
        }
        if header.generation != self.generation {
            return;
        }
        if self.parent() == Some(peer.0) {
            self.acked_by_all = self.acked_by_all.max(acknowledged.min(self.done));
        } else if let Some(below) = self.child(peer.0).and_then(|child| self.children_done.get_mut(child)) {
            *below = (*below).max(acknowledged);
            self.advance();
        }
    }

    /// A gone peer, next to this one in the tree, that took acknowledgements of segments below `begun` with it. Who
    /// leaves in good order has told all it knew, so this one did not.
    pub(crate) fn lost_neighbor(&self, begun: SegmentId, gone: impl Fn(u32) -> bool) -> Option<Participant> {
        // What it reported in the next generation holds as soon as this one is there, too.
        let children = self
            .children_done
            .iter()
            .zip(&self.children_next_generation)
            .map(|(below, ahead)| *below.max(ahead));
        let children = (self.me * FANOUT + 1..).zip(children);
        let parent = self.parent().map(|parent| (parent, self.acked_by_all.max(self.parent_next_generation)));
        let mut heard = parent.into_iter().chain(children);
        heard.find(|(peer, heard)| *heard < begun && gone(*peer)).map(|(peer, _)| Participant(peer))
    }

    /// Has a header to this peer say it; counts as told.
    pub(crate) fn fill_header(&mut self, peer: Participant, header: &mut Header) {
        let everyone = self.acked_by_all;
        header.generation = self.generation;
        header.acknowledged = SegmentId(0);
        if self.parent() == Some(peer.0) {
            self.reported_to_parent = self.subtree_done();
            header.acknowledged = self.reported_to_parent;
        } else if let Some(told) =
            self.child(peer.0).and_then(|child| self.reported_to_children.get_mut(child))
        {
            *told = everyone;
            header.acknowledged = everyone;
        }
    }

    /// Operations wait for acknowledgements of all segments below this.
    pub(crate) fn await_below(&mut self, segment: SegmentId) {
        self.awaited = self.awaited.max(segment);
    }

    /// Peers that have not heard what they could, what they have heard and what there is to hear.
    fn pending_peers(&self) -> impl Iterator<Item = (Participant, SegmentId, SegmentId)> {
        let parent = self.parent().map(|parent| (parent, self.reported_to_parent, self.subtree_done()));
        let children = (self.me * FANOUT + 1..).zip(&self.reported_to_children);
        let children = children.map(|(child, told)| (child, *told, self.acked_by_all));
        let all = parent.into_iter().chain(children).filter(|(_, told, known)| told < known);
        all.map(|(peer, told, known)| (Participant(peer), told, known))
    }

    /// Whether a peer has not heard what it could.
    pub(crate) fn has_pending(&self) -> bool {
        self.pending_peers().next().is_some()
    }

    /// A peer that should hear of an acknowledgement even if no data goes there. With `all`, any peer that has not heard what it
    /// could.
    pub(crate) fn poll_due(&mut self, now: Nanos, all: bool) -> Option<Participant> {
        if !self.has_pending() {
            self.pending_since = None;
            return None;
        }
        let all = all || now >= self.pending_since.get_or_insert(now).after(MAX_ACK_DELAY);
        let due = |told: SegmentId, known: SegmentId| told < self.awaited || known.0 - told.0 >= self.batch;
        self.pending_peers().find(|(_, told, known)| all || due(*told, *known)).map(|(peer, ..)| peer)
    }

    /// When one is old.
    pub(crate) fn poll_timeout(&self) -> Option<Nanos> {
        self.pending_since.map(|since| since.after(MAX_ACK_DELAY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Kind;

    /// Has all say what is due until nothing is; how many messages that took.
    fn run_until_idle(nodes: &mut [AckTree], now: Nanos) -> usize {
        let mut messages = 0;
        while let Some((from, to)) =
            (0..nodes.len()).find_map(|i| nodes[i].poll_due(now, false).map(|to| (i, to.0 as usize)))
        {
            let mut header = Header::new(Kind::Acknowledge, harmonaize_abi::Epoch(1));
            nodes[from].fill_header(Participant(to as u32), &mut header);
            nodes[to].handle_header(Participant(from as u32), &header);
            messages += 1;
            assert!(messages < 1000, "acknowledgements never settle");
        }
        messages
    }

    #[test]
    fn unawaited_acks_are_batched_or_delayed() {
        let nodes = |count| (0..count).map(move |i| AckTree::new(Participant(i), count, 8));
        let mut nodes: Vec<_> = nodes(8).collect();
        let all = |nodes: &mut [AckTree], done| nodes.iter_mut().for_each(|node| node.advance_local(done));
        all(&mut nodes, SegmentId(3));
        assert_eq!(run_until_idle(&mut nodes, Nanos(5)), 0);
        all(&mut nodes, SegmentId(4));
        assert_eq!(run_until_idle(&mut nodes, Nanos(6)), 14, "one up and one down each of seven ways");
        assert!(
            nodes.iter().all(|node| node.acked_by_all() == SegmentId(4) && node.poll_timeout().is_none())
        );
        all(&mut nodes, SegmentId(5));
        assert_eq!(run_until_idle(&mut nodes, Nanos(7)), 0);
        nodes.iter_mut().for_each(|node| node.await_below(SegmentId(5)));
        assert_eq!(run_until_idle(&mut nodes, Nanos(8)), 14, "somebody waits");
        all(&mut nodes, SegmentId(6));
        assert_eq!(run_until_idle(&mut nodes, Nanos(9)), 0);
        assert_eq!(nodes[7].poll_timeout(), Some(Nanos(9).after(MAX_ACK_DELAY)));
        let mut now = Nanos(9);
        for _ in 0..4 {
            now = now.after(MAX_ACK_DELAY);
            run_until_idle(&mut nodes, now);
        }
        assert!(nodes.iter().all(|node| node.acked_by_all() == SegmentId(6) && !node.has_pending()));
    }

    #[test]
    fn everyone_is_the_minimum_over_the_whole_tree() {
        for participants in 1..=30_u32 {
            let mut nodes: Vec<_> =
                (0..participants).map(|i| AckTree::new(Participant(i), participants, 1)).collect();
            for (i, node) in nodes.iter_mut().enumerate() {
                node.advance_local(SegmentId(10 + (i as u64 * 7) % 5));
            }
            let expected = (0..u64::from(participants)).map(|i| 10 + (i * 7) % 5).min().unwrap();
            run_until_idle(&mut nodes, Nanos(0));
            assert!(nodes.iter().all(|n| n.acked_by_all().0 == expected), "{participants} participants");
        }
    }
}
