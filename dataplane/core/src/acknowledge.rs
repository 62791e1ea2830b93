//! Cumulative acknowledgement of segments, up and down a tree of participants.
//!
//! What is done can be undone, together at all (see `aggregation`): each time a generation of acknowledgements begins, and one of
//! an earlier says nothing any more. A neighbour may be one generation ahead; what it says is kept until this one is there, too.

use crate::message::Header;
use harmonaize_plan::Participant;

/// Children of a node.
const DEGREE: u32 = 4;

/// This participant's place in the tree (a heap of degree four over participants' numbers) and what it knows.
#[derive(Debug)]
pub(crate) struct Acknowledgements {
    me: u32,
    participants: u32,
    /// By child (in order): all below it have done every segment below this.
    below: Vec<u64>,
    /// What each child, and the parent, said in the next generation.
    ahead: Vec<u64>,
    parent_ahead: u64,
    generation: u8,
    done: u64,
    everyone: u64,
    told_parent: u64,
    told_children: Vec<u64>,
}

impl Acknowledgements {
    pub(crate) fn new(me: Participant, participants: u32) -> Self {
        let children = (1..=DEGREE).filter(|i| me.0 * DEGREE + i < participants).count();
        Self {
            me: me.0,
            participants,
            below: vec![0; children],
            ahead: vec![0; children],
            parent_ahead: 0,
            generation: 0,
            done: 0,
            everyone: 0,
            told_parent: 0,
            told_children: vec![0; children],
        }
    }

    fn parent(&self) -> Option<u32> {
        (self.me > 0).then(|| (self.me - 1) / DEGREE)
    }

    fn child(&self, peer: u32) -> Option<usize> {
        let child = peer.checked_sub(self.me * DEGREE + 1)?;
        (child < self.below.len() as u32 && peer < self.participants).then_some(child as usize)
    }

    /// Every segment below this is done by everybody.
    pub(crate) fn everyone(&self) -> u64 {
        self.everyone
    }

    fn mine_and_below(&self) -> u64 {
        self.below.iter().copied().fold(self.done, u64::min)
    }

    fn settle(&mut self) {
        if self.me == 0 {
            self.everyone = self.everyone.max(self.mine_and_below());
        }
    }

    /// Every segment below `done` is done here.
    pub(crate) fn done(&mut self, done: u64) {
        self.done = self.done.max(done);
        self.settle();
    }

    /// The first segment that is not done here.
    pub(crate) fn mine(&self) -> u64 {
        self.done
    }

    /// Which this is.
    pub(crate) fn generation(&self) -> u8 {
        self.generation
    }

    /// Segments from `from` on are not done any more, anywhere; what everybody has acknowledged is below.
    pub(crate) fn undo(&mut self, from: u64, generation: u8) {
        self.generation = generation;
        self.done = self.done.min(from);
        // Who was here before this one has not heard what was told in the generation before.
        self.told_parent = 0;
        self.told_children.fill(0);
        for (below, ahead) in self.below.iter_mut().zip(&mut self.ahead) {
            *below = (*below).min(from).max(std::mem::take(ahead));
        }
        self.everyone = self.everyone.max(std::mem::take(&mut self.parent_ahead).min(self.done));
        self.settle();
    }

    /// What a peer's header says.
    pub(crate) fn heard(&mut self, peer: Participant, header: &Header) {
        let acknowledged = header.acknowledged;
        if header.generation == self.generation.wrapping_add(1) {
            if self.parent() == Some(peer.0) {
                self.parent_ahead = self.parent_ahead.max(acknowledged);
            } else if let Some(ahead) = self.child(peer.0).and_then(|child| self.ahead.get_mut(child)) {
                *ahead = (*ahead).max(acknowledged);
            }
            return;
        }
        if header.generation != self.generation {
            return;
        }
        if self.parent() == Some(peer.0) {
            self.everyone = self.everyone.max(acknowledged.min(self.done));
        } else if let Some(below) = self.child(peer.0).and_then(|child| self.below.get_mut(child)) {
            *below = (*below).max(acknowledged);
            self.settle();
        }
    }

    /// A peer next to this one in the tree that is gone and took acknowledgements of segments below `begun` with it. Who
    /// leaves in good order has told all it knew, so this one did not.
    pub(crate) fn severed(&self, begun: u64, gone: impl Fn(u32) -> bool) -> Option<Participant> {
        // What it said in the next generation holds as soon as this one is there, too.
        let children = self.below.iter().zip(&self.ahead).map(|(below, ahead)| *below.max(ahead));
        let children = (self.me * DEGREE + 1..).zip(children);
        let parent = self.parent().map(|parent| (parent, self.everyone.max(self.parent_ahead)));
        let mut heard = parent.into_iter().chain(children);
        heard.find(|(peer, heard)| *heard < begun && gone(*peer)).map(|(peer, _)| Participant(peer))
    }

    /// Has a header to this peer say it; counts as told.
    pub(crate) fn tell(&mut self, peer: Participant, header: &mut Header) {
        let everyone = self.everyone;
        header.generation = self.generation;
        header.acknowledged = 0;
        if self.parent() == Some(peer.0) {
            self.told_parent = self.mine_and_below();
            header.acknowledged = self.told_parent;
        } else if let Some(told) = self.child(peer.0).and_then(|child| self.told_children.get_mut(child)) {
            *told = everyone;
            header.acknowledged = everyone;
        }
    }

    /// A peer that should hear of an acknowledgement even if no data goes its way.
    pub(crate) fn due(&self) -> Option<Participant> {
        if let Some(parent) = self.parent()
            && self.told_parent < self.mine_and_below()
        {
            return Some(Participant(parent));
        }
        let child = self.told_children.iter().position(|told| *told < self.everyone)?;
        Some(Participant(self.me * DEGREE + 1 + child as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Kind;

    #[test]
    fn everyone_is_the_minimum_over_the_whole_tree() {
        for participants in 1..=30_u32 {
            let mut nodes: Vec<_> =
                (0..participants).map(|i| Acknowledgements::new(Participant(i), participants)).collect();
            for (i, node) in nodes.iter_mut().enumerate() {
                node.done(10 + (i as u64 * 7) % 5);
            }
            let expected = (0..u64::from(participants)).map(|i| 10 + (i * 7) % 5).min().unwrap();
            let mut messages = 0;
            while let Some((from, to)) =
                (0..nodes.len()).find_map(|i| nodes[i].due().map(|to| (i, to.0 as usize)))
            {
                let mut header = Header::new(Kind::Acknowledge, 0);
                nodes[from].tell(Participant(to as u32), &mut header);
                nodes[to].heard(Participant(from as u32), &header);
                messages += 1;
                assert!(messages < 1000, "acknowledgements never settle");
            }
            assert!(nodes.iter().all(|n| n.everyone() == expected), "{participants} participants");
        }
    }
}
