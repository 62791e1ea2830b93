//! Cumulative acknowledgement of segments, up and down a tree of participants.
//!
//! They ride on data. Where none goes that way they are told by themselves: at once where operations wait for them, and else when there is a
//! batch of them, or they are old: of small operations, which are done before, they were most of the messages.
//!
//! What is done can be undone, together at all (see `aggregation`): each time a generation of acknowledgements begins, and one of
//! an earlier says nothing any more. A neighbour may be one generation ahead; what it says is kept until this one is there, too.

use crate::Nanos;
use crate::message::Header;
use harmonaize_plan::Participant;

/// Children of a node.
const DEGREE: u32 = 4;
/// How old an acknowledgement may be that nobody waits for.
const OLD: Nanos = Nanos(20_000_000);

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
    /// Operations wait for acknowledgements of segments below this.
    awaited: u64,
    /// Segments of which acknowledgements are a batch.
    batch: u64,
    /// Since when there is something to tell.
    since: Option<Nanos>,
}

impl Acknowledgements {
    /// Of a communicator that has so many segments under way at most.
    pub(crate) fn new(me: Participant, participants: u32, channels: u16) -> Self {
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
            awaited: 0,
            // The others go on meanwhile.
            batch: u64::from(channels / 2).max(1),
            since: None,
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

    /// Operations wait for acknowledgements of all segments below this.
    pub(crate) fn await_below(&mut self, segment: u64) {
        self.awaited = self.awaited.max(segment);
    }

    /// Peers that have not heard what they could, what they have heard and what there is to hear.
    fn untold(&self) -> impl Iterator<Item = (Participant, u64, u64)> {
        let parent = self.parent().map(|parent| (parent, self.told_parent, self.mine_and_below()));
        let children = (self.me * DEGREE + 1..).zip(&self.told_children);
        let children = children.map(|(child, told)| (child, *told, self.everyone));
        let all = parent.into_iter().chain(children).filter(|(_, told, known)| told < known);
        all.map(|(peer, told, known)| (Participant(peer), told, known))
    }

    /// Whether a peer has not heard what it could.
    pub(crate) fn is_untold(&self) -> bool {
        self.untold().next().is_some()
    }

    /// A peer that should hear of an acknowledgement even if no data goes its way; with `all` whoever has not heard what it could.
    pub(crate) fn due(&mut self, now: Nanos, all: bool) -> Option<Participant> {
        if !self.is_untold() {
            self.since = None;
            return None;
        }
        let all = all || now >= self.since.get_or_insert(now).after(OLD);
        let due = |told, known| told < self.awaited || known - told >= self.batch;
        self.untold().find(|(_, told, known)| all || due(*told, *known)).map(|(peer, ..)| peer)
    }

    /// When one is old.
    pub(crate) fn old(&self) -> Option<Nanos> {
        self.since.map(|since| since.after(OLD))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Kind;

    /// Has all say what is due until nothing is; how many messages that took.
    fn settle(nodes: &mut [Acknowledgements], now: Nanos) -> usize {
        let mut messages = 0;
        while let Some((from, to)) =
            (0..nodes.len()).find_map(|i| nodes[i].due(now, false).map(|to| (i, to.0 as usize)))
        {
            let mut header = Header::new(Kind::Acknowledge, 0);
            nodes[from].tell(Participant(to as u32), &mut header);
            nodes[to].heard(Participant(from as u32), &header);
            messages += 1;
            assert!(messages < 1000, "acknowledgements never settle");
        }
        messages
    }

    #[test]
    fn what_nobody_waits_for_is_told_by_the_batch_or_when_it_is_old() {
        let nodes = |count| (0..count).map(move |i| Acknowledgements::new(Participant(i), count, 8));
        let mut nodes: Vec<_> = nodes(8).collect();
        let all = |nodes: &mut [Acknowledgements], done| nodes.iter_mut().for_each(|node| node.done(done));
        all(&mut nodes, 3);
        assert_eq!(settle(&mut nodes, Nanos(5)), 0);
        all(&mut nodes, 4);
        assert_eq!(settle(&mut nodes, Nanos(6)), 14, "one up and one down each of seven ways");
        assert!(nodes.iter().all(|node| node.everyone() == 4 && node.old().is_none()));
        all(&mut nodes, 5);
        assert_eq!(settle(&mut nodes, Nanos(7)), 0);
        nodes.iter_mut().for_each(|node| node.await_below(5));
        assert_eq!(settle(&mut nodes, Nanos(8)), 14, "somebody waits");
        all(&mut nodes, 6);
        assert_eq!(settle(&mut nodes, Nanos(9)), 0);
        assert_eq!(nodes[7].old(), Some(Nanos(9).after(OLD)));
        let mut now = Nanos(9);
        for _ in 0..4 {
            now = now.after(OLD);
            settle(&mut nodes, now);
        }
        assert!(nodes.iter().all(|node| node.everyone() == 6 && !node.is_untold()));
    }

    #[test]
    fn everyone_is_the_minimum_over_the_whole_tree() {
        for participants in 1..=30_u32 {
            let mut nodes: Vec<_> =
                (0..participants).map(|i| Acknowledgements::new(Participant(i), participants, 1)).collect();
            for (i, node) in nodes.iter_mut().enumerate() {
                node.done(10 + (i as u64 * 7) % 5);
            }
            let expected = (0..u64::from(participants)).map(|i| 10 + (i * 7) % 5).min().unwrap();
            settle(&mut nodes, Nanos(0));
            assert!(nodes.iter().all(|n| n.everyone() == expected), "{participants} participants");
        }
    }
}
