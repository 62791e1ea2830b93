//! Messages from rank to rank beside the collectives: any sizes, in any order, received from somebody or from anybody.

use super::memory::POISON;
use super::network::Payload;
use super::scenario::{MICROSECOND, MILLISECOND, Scenario, generator};
use super::world::{Event, Input, World};
use harmonaize_abi::{Direction, Dtype, Epoch, P2pSignature, Rank, Sequence, StepId, Token};
use harmonaize_core::{CoreError, Message, Nanos, P2pCall, P2pReceipt, PeerMessage};
use harmonaize_plan::Participant;
use rand::RngExt;
use std::collections::BTreeMap;
use std::time::Duration;

/// In a token: it is of a message.
pub(crate) const P2P: u64 = 1 << 31;

/// What a rank sends and receives, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct P2pScript {
    pub(crate) acts: Vec<P2pSignature>,
    pub(crate) depth: usize,
    pub(crate) think: u64,
}

/// A rank's messages so far.
#[derive(Debug, Default)]
pub(crate) struct P2pState {
    pub(crate) called: usize,
    /// By call: its tensor, until it has ended.
    open: BTreeMap<u64, Vec<u8>>,
    pub(crate) done: usize,
    waits: bool,
}

impl P2pState {
    pub(crate) fn is_open(&self) -> bool {
        !self.open.is_empty()
    }
}

/// A piece that is on its way from a landing slot, or from another tensor, to a tensor.
#[derive(Debug)]
pub(crate) struct Store {
    at: Participant,
    to: (Rank, Token),
    offset: usize,
    content: Vec<u8>,
    landing: Option<(Epoch, u32, Sequence)>,
    step: StepId,
}

fn content(seed: u64, from: Rank, to: Rank, number: u64, bytes: usize) -> Vec<u8> {
    let mut rng = generator(seed ^ number << 40 ^ u64::from(from.0) << 20 ^ u64::from(to.0), 71);
    (0..bytes).map(|_| rng.random()).collect()
}

impl Scenario {
    /// Ranks send each other messages, beside what else they do.
    pub(crate) fn messaging(mut self) -> Self {
        let mut rng = generator(self.seed, 70);
        let ranks = self.group.ranks();
        let (depth, think) =
            (rng.random_range(1..=4), [0, 20 * MICROSECOND, MILLISECOND][rng.random_range(0..3)]);
        let mut scripts = vec![P2pScript { acts: Vec::new(), depth, think }; ranks as usize];
        // Who receives from anybody does so always, and messages of one size.
        let any: Vec<Option<u64>> =
            (0..ranks).map(|_| rng.random_bool(0.3).then(|| rng.random_range(0..600))).collect();
        for _ in 0..rng.random_range(1..4 * ranks.min(8)) {
            let (from, to) = (Rank(rng.random_range(0..ranks)), Rank(rng.random_range(0..ranks)));
            // Its own, which could take the place of another's, might wait for itself.
            if from == to && any[to.0 as usize].is_some() {
                continue;
            }
            let most = [16, 600, 4000][rng.random_range(0..3)];
            let count = any[to.0 as usize].unwrap_or_else(|| rng.random_range(0..most));
            let dtype = match any[to.0 as usize] {
                Some(_) => Dtype::U8,
                None => [Dtype::U8, Dtype::U64][rng.random_range(0..2)],
            };
            let sent = P2pSignature { direction: Direction::Send, peer: Some(to), dtype, count };
            scripts[from.0 as usize].acts.push(sent);
            let peer = any[to.0 as usize].is_none().then_some(from);
            let received = P2pSignature { direction: Direction::Receive, peer, dtype, count };
            scripts[to.0 as usize].acts.push(received);
        }
        // A rank may send itself what it receives next only if both can be in flight.
        scripts.iter_mut().for_each(|script| script.depth = script.depth.max(2));
        self.p2p = scripts;
        self
    }

    /// One end of a message is of another size.
    pub(crate) fn with_a_wrong_message(mut self) -> Self {
        let mut rng = generator(self.seed, 72);
        self.timeouts.fill(Duration::from_secs(600));
        let (from, to) = self.new_message(&mut rng);
        let signature = |direction, peer, count| P2pSignature { direction, peer, dtype: Dtype::U8, count };
        self.p2p[from.0 as usize].acts.push(signature(Direction::Send, Some(to), 700));
        self.p2p[to.0 as usize].acts.push(signature(Direction::Receive, Some(from), 701));
        self.scripts.iter_mut().for_each(|script| script.leaves = false);
        self
    }

    /// One end of a message is never called, at the end of all others.
    pub(crate) fn with_half_a_message(mut self) -> Self {
        let mut rng = generator(self.seed, 73);
        self.timeouts.fill(Duration::from_nanos(500 * MILLISECOND));
        let (from, to) = self.new_message(&mut rng);
        let (rank, direction, peer) = match rng.random_bool(0.5) {
            true => (from, Direction::Send, to),
            false => (to, Direction::Receive, from),
        };
        let signature = P2pSignature { direction, peer: Some(peer), dtype: Dtype::U8, count: 500 };
        self.p2p[rank.0 as usize].acts.push(signature);
        self.scripts.iter_mut().for_each(|script| script.leaves = false);
        self
    }

    /// Between whom another message can be, behind all others.
    fn new_message(&self, rng: &mut impl RngExt) -> (Rank, Rank) {
        let any = |rank: &Rank| {
            let mut acts = self.p2p[rank.0 as usize].acts.iter();
            acts.any(|act| act.direction == Direction::Receive && act.peer.is_none())
        };
        let receivers: Vec<Rank> = self.ranks().filter(|rank| !any(rank)).collect();
        let to = match receivers.is_empty() {
            true => Rank(0),
            false => receivers[rng.random_range(0..receivers.len())],
        };
        (Rank(rng.random_range(0..self.group.ranks())), to)
    }

    /// Whether nobody receives from anybody.
    pub(crate) fn names_senders(&self) -> bool {
        let mut acts = self.p2p.iter().flat_map(|script| &script.acts);
        acts.all(|act| act.peer.is_some())
    }
}

impl World {
    /// A rank's next message, after some thought.
    pub(crate) fn schedule_message(&mut self, rank: Rank) {
        let Some(script) = self.scenario.p2p.get(rank.0 as usize) else { return };
        let (state, refused) = (&self.messages[rank.0 as usize], &self.ranks[rank.0 as usize]);
        let next = state.called < script.acts.len() && state.open.len() < script.depth;
        if !next || state.waits || refused.gone || refused.refused {
            return;
        }
        let at = self.now + self.rng.random_range(0..=script.think + 1);
        self.messages[rank.0 as usize].waits = true;
        let home = self.home(rank);
        self.at(at, Event::Input(home, Input::Message(rank)));
    }

    /// Whether a rank has sent and received everything.
    pub(crate) fn has_messaged(&self, rank: Rank) -> bool {
        let acts = self.scenario.p2p.get(rank.0 as usize).map_or(0, |script| script.acts.len());
        self.messages[rank.0 as usize].done == acts
    }

    pub(crate) fn call_message(&mut self, p: Participant, rank: Rank) {
        self.messages[rank.0 as usize].waits = false;
        if self.ranks[rank.0 as usize].gone {
            return;
        }
        let script = &self.scenario.p2p[rank.0 as usize];
        let number = self.messages[rank.0 as usize].called;
        let signature = script.acts[number];
        let token = Token(u64::from(rank.0) << 32 | P2P | number as u64);
        let call = P2pCall { signature, token, timeout: self.scenario.timeouts[rank.0 as usize] };
        match self.nodes[p.0 as usize].core.handle_p2p_call(Nanos(self.now), rank, call) {
            Ok(()) => {
                self.active = self.now;
                let same =
                    |act: &&P2pSignature| act.direction == Direction::Send && act.peer == signature.peer;
                let before = script.acts[..number].iter().filter(same).count() as u64;
                let bytes = signature.bytes().unwrap() as usize;
                let tensor = match (signature.direction, signature.peer) {
                    (Direction::Send, Some(to)) => content(self.scenario.seed, rank, to, before, bytes),
                    _ => vec![POISON; bytes],
                };
                let state = &mut self.messages[rank.0 as usize];
                state.open.insert(token.0, tensor);
                state.called += 1;
                self.schedule_message(rank);
            }
            Err(CoreError::Ended(_)) => self.ranks[rank.0 as usize].refused = true,
            Err(error) => panic!("rank {rank}'s message is refused: {error}"),
        }
    }

    /// A rank's tensor.
    fn message(&mut self, rank: Rank, token: Token) -> &mut Vec<u8> {
        self.messages[rank.0 as usize].open.get_mut(&token.0).expect("a message that has ended is touched")
    }

    pub(crate) fn send_piece(
        &mut self,
        p: Participant,
        (rank, token): (Rank, Token),
        offset: u64,
        step: StepId,
        message: &PeerMessage,
    ) {
        assert!(self.nodes[p.0 as usize].failure.is_none(), "a piece after the end");
        let channel = self.nodes[p.0 as usize].core.p2p_channel();
        let bytes = message.bytes as usize;
        let source = (rank, token, offset as usize, bytes);
        let payload =
            Payload { source: None, piece: Some(source), channel, step, sequence: message.sequence };
        let (epoch, header) = (message.header.epoch, message.header);
        self.send(p, message.peer, epoch, Message { header, control: None }, Some(payload));
    }

    /// What a piece has when it is sent.
    pub(crate) fn read_piece(
        &mut self,
        (rank, token, offset, bytes): (Rank, Token, usize, usize),
    ) -> Vec<u8> {
        self.message(rank, token)[offset..offset + bytes].to_vec()
    }

    pub(crate) fn store_piece(
        &mut self,
        p: Participant,
        to: (Rank, Token),
        offset: u64,
        step: StepId,
        message: &PeerMessage,
    ) {
        let node = &self.nodes[p.0 as usize];
        let (channel, peer) = (node.core.p2p_channel(), message.peer.0);
        let link = node.link(message.header.epoch, message.peer);
        let ring = node.landing.get(&(link, peer, channel)).expect("a piece that has landed");
        let (occupied, slot) = &ring[message.sequence.0 as usize % ring.len()];
        assert!(*occupied || self.scenario.hostile.is_some(), "a piece that has not landed is stored");
        let content = slot[..message.bytes as usize].to_vec();
        let landing = Some((link, peer, message.sequence));
        self.later(Store { at: p, to, offset: offset as usize, content, landing, step });
    }

    pub(crate) fn copy_piece(
        &mut self,
        p: Participant,
        (from, to): ((Rank, Token), (Rank, Token)),
        (offset, bytes): (u64, u64),
        step: StepId,
    ) {
        let (offset, bytes) = (offset as usize, bytes as usize);
        let content = self.message(from.0, from.1)[offset..offset + bytes].to_vec();
        self.later(Store { at: p, to, offset, content, landing: None, step });
    }

    /// It takes some time, or none.
    fn later(&mut self, store: Store) {
        let wait = match self.rng.random_bool(0.5) {
            true => 0,
            false => self.scenario.weather.wait(&mut self.rng),
        };
        self.at(self.now + wait, Event::Piece(Box::new(store)));
    }

    pub(crate) fn piece_stored(&mut self, store: Store) {
        let Store { at, to, offset, content, landing, step } = store;
        let node = &mut self.nodes[at.0 as usize];
        if !node.alive || node.failure.is_some() || node.closed {
            return;
        }
        let channel = node.core.p2p_channel();
        if let Some((link, peer, sequence)) = landing
            && let Some(ring) = node.landing.get_mut(&(link, peer, channel))
        {
            let slot = sequence.0 as usize % ring.len();
            ring[slot].0 = false;
        }
        self.statistics.pieces += 1;
        self.message(to.0, to.1)[offset..offset + content.len()].copy_from_slice(&content);
        self.input(at, Input::Completed { channel, step });
    }

    pub(crate) fn message_ended(&mut self, rank: Rank, token: Token, receipt: &P2pReceipt) {
        let script = &self.scenario.p2p[rank.0 as usize];
        let signature = script.acts[(token.0 & (P2P - 1)) as usize];
        assert_eq!(receipt.signature, signature);
        assert!(signature.peer.is_none_or(|peer| peer == receipt.peer), "{receipt:?}");
        let tensor = self.messages[rank.0 as usize].open.remove(&token.0).expect("a message ends twice");
        let state = &mut self.messages[rank.0 as usize];
        state.done += 1;
        if signature.direction == Direction::Receive {
            let at = (token.0 & (P2P - 1)) as usize;
            let before = script.acts[..at]
                .iter()
                .filter(|act| act.direction == Direction::Receive && act.peer == signature.peer)
                .count();
            let ordered = signature.peer.is_none() || receipt.number == before as u64;
            assert!(ordered, "not what was sent then: {receipt:?}");
            let right = content(self.scenario.seed, receipt.peer, rank, receipt.number, tensor.len());
            assert!(
                self.scenario.hostile.is_some() || tensor == right,
                "rank {rank} received something else"
            );
            self.statistics.messages += 1;
        }
        self.schedule_message(rank);
        self.schedule_rank(rank);
    }

    pub(crate) fn message_failed(&mut self, rank: Rank, token: Token) {
        let ended = self.messages[rank.0 as usize].open.remove(&token.0);
        assert!(ended.is_some(), "a message ends twice");
    }
}
