//! Point to point: messages from one rank to another, beside the collectives and in no order with them.
//!
//! A send becomes an offer to the receiver's participant. The receive that matches it asks for the message, from a byte on
//! (a pull); pieces follow, as many as there are landing slots; when all are in place the sender hears of it, and both calls
//! have ended. Nothing lands that no receive waits for, so messages hold up neither each other nor a collective.
//!
//! What was under way on links that a new plan closes may be lost. Once it has taken over, a sender offers again what has not
//! ended, and a receiver pulls from the first byte that is missing. Offers, pulls and pieces that came before are ignored.

use crate::action::{Action, P2pReceipt, PeerMessage};
use crate::error::CoreError;
use crate::failure::Failure;
use crate::message::{Header, Kind};
use crate::report::MessageInFlight;
use crate::shared::Shared;
use harmonaize_abi::{
    ChannelId, Direction, Dtype, Epoch, Nanos, OperationId, P2pSignature, Rank, Sequence, StepId, Token,
};
use harmonaize_plan::Participant;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// Most offers from one participant that no receive has matched; more is a breach. It also bounds the headers to it that wait as it
/// offers again.
const MAX_OFFERS: usize = 1 << 16;
/// Most pieces under way at once; a power of two, and at most 1024, for the numbers of their completions.
const MAX_PARTS: usize = 1 << 10;
/// Most bytes that are copied at once between two local ranks.
const COPY_BYTES: u64 = 256 << 10;
/// Most such copies under way at once, of all messages.
const MAX_COPIES: usize = 32;

/// Returns the most bytes that pieces under way have where no tensor is mapped. The communicator has so many landing slots of a stream
/// and pieces of at most so many bytes.
pub fn p2p_staging_bytes(participants: u32, landing_slots: u32, piece_bytes: u32) -> u64 {
    // Of each peer one piece is stored at a time.
    let peers = u64::from(participants.saturating_sub(1)).saturating_mul(u64::from(landing_slots) + 1);
    let pieces = peers.saturating_add(MAX_COPIES as u64).min(MAX_PARTS as u64);
    pieces.saturating_mul(COPY_BYTES.max(piece_bytes.into()))
}

/// A rank's call of one end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct P2pCall {
    /// Which end, of what.
    pub signature: P2pSignature,
    /// The caller's name for the call; its completion carries the same.
    pub token: Token,
    /// How long the communicator may make no progress while the call is in flight. Then it ends.
    pub timeout: Duration,
}

/// One message: its sender, its receiver, and its number among those from the one to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct MessageId {
    from: Rank,
    to: Rank,
    number: u64,
}

/// A call in flight.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Open {
    rank: Rank,
    call: P2pCall,
    bytes: u64,
    at: Nanos,
}

/// A local rank's send.
#[derive(Debug, Serialize, Deserialize)]
struct Send {
    id: MessageId,
    open: Open,
    /// How often it was pulled, and the next byte to go.
    round: u32,
    next: u64,
    /// Pieces that are being read.
    reading: u32,
    /// The receiver has all of it.
    received: bool,
    wire_bytes: u64,
}

/// A local rank's receive.
#[derive(Debug, Serialize, Deserialize)]
struct Receive {
    open: Open,
    matched: Option<Matched>,
}

/// The message that a receive gets.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Matched {
    id: MessageId,
    /// How often it was pulled.
    round: u32,
    /// Bytes that have arrived, or that a local copy has begun.
    arrived: u64,
    /// Bytes that are in the tensor.
    stored: u64,
}

/// A send that no receive has matched.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Offer {
    id: MessageId,
    dtype: Dtype,
    count: u64,
}

/// A piece that has landed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Piece {
    id: MessageId,
    at: u64,
    bytes: u32,
    sequence: Sequence,
    peer: Participant,
    link: Epoch,
    /// It was there before, or nobody waits for it.
    stale: bool,
}

/// A piece that the caller is working on.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Work {
    Send { id: MessageId, peer: Participant, link: Epoch },
    Receive { id: MessageId, bytes: u32, peer: Participant, link: Epoch },
    Copy { id: MessageId, bytes: u64 },
}

/// A slot for work, whose number completions carry.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Part {
    generation: u32,
    work: Option<Work>,
}

/// A header to send to a peer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Note {
    to: Participant,
    kind: Kind,
    id: MessageId,
    /// Elements of an offer; the first byte of a pull.
    value: u64,
    /// Of an offer.
    dtype: Dtype,
    /// Of a pull.
    round: u32,
}

/// The messages in flight at a participant.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct P2p {
    /// The channel of its streams, behind those of the collectives.
    channel: ChannelId,
    piece_bytes: u64,
    sends: Vec<Send>,
    receives: Vec<Receive>,
    offers: VecDeque<Offer>,
    /// By sender and receiver: the next message that is sent here, or offered from elsewhere.
    next: HashMap<(Rank, Rank), u64>,
    pieces: VecDeque<Piece>,
    /// Peers on whose stream a piece is being stored.
    storing: Vec<(Participant, Epoch)>,
    parts: Vec<Part>,
    free: Vec<u32>,
    notes: VecDeque<Note>,
    ended: VecDeque<Action>,
    credits: VecDeque<(Participant, Epoch)>,
    /// The epoch that was in force at the last poll.
    epoch: Epoch,
    /// When something last moved.
    moved: Nanos,
    /// The link of a note that goes out a second time.
    again: Option<(Note, Epoch)>,
}

impl P2p {
    /// Of a communicator with so many channels for collectives, whose pieces have so many bytes at most.
    pub(crate) fn new(channels: u16, piece_bytes: u32, epoch: Epoch) -> Self {
        Self {
            channel: ChannelId(channels),
            piece_bytes: u64::from(piece_bytes.max(1)),
            sends: Vec::new(),
            receives: Vec::new(),
            offers: VecDeque::new(),
            next: HashMap::new(),
            pieces: VecDeque::new(),
            storing: Vec::new(),
            parts: Vec::new(),
            free: Vec::new(),
            notes: VecDeque::new(),
            ended: VecDeque::new(),
            credits: VecDeque::new(),
            epoch,
            moved: Nanos(0),
            again: None,
        }
    }

    /// The channel of its streams.
    pub(crate) fn channel(&self) -> ChannelId {
        self.channel
    }

    /// Whether no call is in flight and nothing is to be polled.
    pub(crate) fn is_idle(&self) -> bool {
        self.sends.is_empty()
            && self.receives.is_empty()
            && self.ended.is_empty()
            && self.notes.is_empty()
            && self.again.is_none()
            && self.pieces.is_empty()
    }

    /// A local rank calls. Which message a receive gets shows when one is offered.
    pub(crate) fn handle_call(
        &mut self,
        now: Nanos,
        shared: &mut Shared,
        rank: Rank,
        call: P2pCall,
    ) -> Result<(), CoreError> {
        let P2pSignature { direction, peer, dtype, count } = call.signature;
        if !shared.operations.ranks().contains(&rank) {
            return Err(CoreError::NotLocal(rank));
        }
        if let Some(peer) = peer.filter(|peer| peer.0 >= shared.group.ranks()) {
            return Err(CoreError::BadRoot(peer));
        }
        let bytes = call.signature.bytes().ok_or(CoreError::BadCounts)?;
        let open = Open { rank, call, bytes, at: now };
        match (direction, peer) {
            (Direction::Send, None) => return Err(CoreError::BadRoot(rank)),
            (Direction::Send, Some(to)) => {
                let next = self.next.entry((rank, to)).or_default();
                let id = MessageId { from: rank, to, number: *next };
                *next += 1;
                self.sends.push(Send {
                    id,
                    open,
                    round: 0,
                    next: 0,
                    reading: 0,
                    received: false,
                    wire_bytes: 0,
                });
                let offer = Offer { id, dtype, count };
                match remote(shared, to) {
                    Some(home) => self.notes.push_back(Note::offer(home, offer)),
                    None => self.take_offer(shared, offer),
                }
            }
            (Direction::Receive, _) => {
                let receive = Receive { open, matched: None };
                let first = self.offers.iter().position(|offer| receive.accepts(offer));
                self.receives.push(receive);
                if let Some(offer) = first.and_then(|at| self.offers.remove(at)) {
                    let last = self.receives.len() - 1;
                    self.match_offer(shared, last, offer);
                }
            }
        }
        Ok(())
    }

    /// Gives an offer to the first receive that it fits, or keeps it.
    fn take_offer(&mut self, shared: &mut Shared, offer: Offer) {
        match self.receives.iter().position(|receive| receive.accepts(&offer)) {
            Some(at) => self.match_offer(shared, at, offer),
            None => self.offers.push_back(offer),
        }
    }

    fn match_offer(&mut self, shared: &mut Shared, at: usize, offer: Offer) {
        let Some(receive) = self.receives.get_mut(at) else { return };
        let MessageId { from, to, number } = offer.id;
        let P2pSignature { dtype, count, .. } = receive.open.call.signature;
        if (dtype, count) != (offer.dtype, offer.count) {
            let (sent, received) = ((offer.dtype, offer.count), (dtype, count));
            return shared.fail(Failure::P2pMismatch { number, from, to, sent, received });
        }
        receive.matched = Some(Matched { id: offer.id, round: 1, arrived: 0, stored: 0 });
        if receive.open.bytes == 0 {
            return self.finish_receive(shared, at);
        }
        if let Some(peer) = remote(shared, from) {
            self.notes.push_back(Note::pull(peer, offer.id, 0, 1));
        }
    }

    /// Whether a message from this rank to that one was ever sent here, or offered from elsewhere.
    fn is_known(&self, id: MessageId) -> bool {
        self.next.get(&(id.from, id.to)).is_some_and(|next| id.number < *next)
    }

    /// A header came from a peer on the link that was made for the epoch `link`. False if it is none of the protocol.
    #[must_use]
    pub(crate) fn handle_frame(
        &mut self,
        now: Nanos,
        shared: &mut Shared,
        (peer, link): (Participant, Epoch),
        kind: Kind,
        header: &Header,
        bytes: u32,
    ) -> bool {
        let Ok(to) = u32::try_from(header.count) else { return false };
        let id = MessageId { from: Rank(header.root), to: Rank(to), number: header.operation };
        let (theirs, ours) = match kind {
            Kind::Offer | Kind::Piece => (id.from, id.to),
            _ => (id.to, id.from),
        };
        let known = shared.group.local(peer).contains(&theirs);
        if !known || !shared.operations.ranks().contains(&ours) {
            return false;
        }
        match kind {
            Kind::Offer => self.handle_offer(now, shared, peer, id, header),
            Kind::Pull => self.handle_pull(id, header),
            Kind::Received => self.handle_received(id),
            Kind::Piece => self.handle_piece(now, shared, (peer, link), id, header, bytes),
            Kind::Data | Kind::Credit | Kind::Acknowledge | Kind::Control => false,
        }
    }

    fn handle_offer(
        &mut self,
        now: Nanos,
        shared: &mut Shared,
        peer: Participant,
        id: MessageId,
        header: &Header,
    ) -> bool {
        let Some(dtype) = Dtype::from_code(header.dtype) else { return false };
        let next = self.next.entry((id.from, id.to)).or_default();
        // One before it went by a link that is closed, and comes again as this one does.
        if id.number > *next {
            return true;
        }
        if id.number == *next {
            *next += 1;
            self.moved = now;
            let theirs = |offer: &&Offer| shared.group.local(peer).contains(&offer.id.from);
            if self.offers.len() >= MAX_OFFERS && self.offers.iter().filter(theirs).count() >= MAX_OFFERS {
                return false;
            }
            self.take_offer(shared, Offer { id, dtype, count: header.segment });
            return true;
        }
        let waiting = |note: &&Note| note.to == peer;
        if self.notes.len() >= MAX_OFFERS && self.notes.iter().filter(waiting).count() >= MAX_OFFERS {
            return false;
        }
        let matched = self
            .receives
            .iter_mut()
            .find_map(|receive| receive.matched.as_mut().filter(|matched| matched.id == id));
        if let Some(matched) = matched {
            matched.round += 1;
            let note = Note::pull(peer, id, matched.arrived, matched.round);
            self.notes.push_back(note);
        } else if self.offers.iter().all(|offer| offer.id != id) {
            self.notes.push_back(Note::received(peer, id));
        }
        true
    }

    fn handle_pull(&mut self, id: MessageId, header: &Header) -> bool {
        if !self.is_known(id) {
            return false;
        }
        // One that has ended was pulled again before its receiver knew.
        let Some(send) = self.sends.iter_mut().find(|send| send.id == id) else { return true };
        if header.segment > send.open.bytes {
            return false;
        }
        let round = header.sequence.0;
        if round > send.round {
            (send.round, send.next) = (round, header.segment);
        }
        true
    }

    fn handle_received(&mut self, id: MessageId) -> bool {
        if !self.is_known(id) {
            return false;
        }
        if let Some(at) = self.sends.iter().position(|send| send.id == id) {
            if let Some(send) = self.sends.get_mut(at) {
                send.received = true;
            }
            self.finish_send(at);
        }
        true
    }

    fn handle_piece(
        &mut self,
        now: Nanos,
        shared: &mut Shared,
        (peer, link): (Participant, Epoch),
        id: MessageId,
        header: &Header,
        bytes: u32,
    ) -> bool {
        // What a link had left that is no longer needed here.
        let Some((_, stream)) = shared.epochs.stream_of_link(peer, link, self.channel) else {
            return link < shared.epochs.current().number();
        };
        if header.channel != self.channel || !stream.handle_piece(header.sequence) {
            return false;
        }
        let receive = self.receives.iter_mut().find(|receive| receive.gets(id));
        let (at, mut stale) = (header.segment, true);
        if let Some(Receive { open, matched: Some(matched) }) = receive
            && matched.arrived == at
        {
            let end = at.saturating_add(u64::from(bytes));
            if bytes == 0 || end > open.bytes {
                return false;
            }
            (matched.arrived, stale) = (end, false);
            self.moved = now;
        }
        let sequence = header.sequence;
        self.pieces.push_back(Piece { id, at, bytes, sequence, peer, link, stale });
        true
    }

    /// A part of what an action asked for has ended. False if none was under way.
    #[must_use]
    pub(crate) fn handle_completion(&mut self, now: Nanos, shared: &mut Shared, step: StepId) -> bool {
        let (index, generation) = (step.0 & (MAX_PARTS as u32 - 1), step.0 / MAX_PARTS as u32);
        let Some(part) = self.parts.get_mut(index as usize) else { return false };
        // That of a link which is closed since.
        if part.generation & (MAX_PARTS as u32 - 1) != generation {
            return true;
        }
        let Some(work) = part.work.take() else { return false };
        part.generation = part.generation.wrapping_add(1);
        self.free.push(index);
        self.moved = now;
        match work {
            Work::Send { id, .. } => {
                if let Some(at) = self.sends.iter().position(|send| send.id == id) {
                    if let Some(send) = self.sends.get_mut(at) {
                        send.reading = send.reading.saturating_sub(1);
                    }
                    self.finish_send(at);
                }
            }
            Work::Receive { id, bytes, peer, link } => {
                self.storing.retain(|storing| *storing != (peer, link));
                self.release_slot(shared, peer, link);
                self.stored(shared, id, u64::from(bytes));
            }
            Work::Copy { id, bytes } => self.stored(shared, id, bytes),
        }
        true
    }

    /// Frees the landing slot of a stream's oldest piece.
    fn release_slot(&mut self, shared: &mut Shared, peer: Participant, link: Epoch) {
        if let Some((_, stream)) = shared.epochs.stream_of_link(peer, link, self.channel) {
            stream.consume();
            if stream.credit_due() {
                self.credits.push_back((peer, link));
            }
        }
    }

    fn stored(&mut self, shared: &mut Shared, id: MessageId, bytes: u64) {
        let Some(at) = self.receives.iter().position(|receive| receive.gets(id)) else { return };
        let Some(Receive { open, matched: Some(matched) }) = self.receives.get_mut(at) else { return };
        matched.stored += bytes;
        debug_assert!(matched.stored <= matched.arrived, "more is stored than has arrived");
        if matched.stored == open.bytes {
            self.finish_receive(shared, at);
        }
    }

    fn finish_receive(&mut self, shared: &Shared, at: usize) {
        let Receive { open, matched } = self.receives.remove(at);
        let Some(Matched { id, .. }) = matched else { return };
        match remote(shared, id.from) {
            Some(peer) => self.notes.push_back(Note::received(peer, id)),
            None => {
                let _ = self.handle_received(id);
            }
        }
        self.end(&open, id, id.from, 0);
    }

    /// Ends a send that is received, once nothing reads its tensor any more.
    fn finish_send(&mut self, at: usize) {
        if self.sends.get(at).is_some_and(Send::is_over) {
            let Send { id, open, wire_bytes, .. } = self.sends.remove(at);
            self.end(&open, id, id.to, wire_bytes);
        }
    }

    fn end(&mut self, open: &Open, id: MessageId, peer: Rank, wire_bytes: u64) {
        let receipt = P2pReceipt { number: id.number, signature: open.call.signature, peer, wire_bytes };
        self.ended.push_back(Action::P2pComplete { rank: open.rank, token: open.call.token, receipt });
    }

    /// The next thing to do, if any.
    pub(crate) fn poll(&mut self, shared: &mut Shared) -> Option<Action> {
        if let Some(action) = self.poll_end(shared) {
            return Some(action);
        }
        self.poll_piece(shared)
            .or_else(|| self.poll_copy(shared))
            .or_else(|| self.poll_send(shared))
            .or_else(|| self.poll_credit(shared))
    }

    /// The next thing to do that moves no bytes of a message.
    pub(crate) fn poll_control(&mut self, shared: &mut Shared) -> Option<Action> {
        self.poll_end(shared).or_else(|| self.poll_credit(shared))
    }

    /// The next call that has ended, or else an offer, a pull or a word of receipt.
    fn poll_end(&mut self, shared: &mut Shared) -> Option<Action> {
        if shared.epochs.current().number() != self.epoch {
            self.handle_new_epoch(shared);
        }
        self.ended.pop_front().or_else(|| self.poll_note(shared))
    }

    /// A new plan is in force: what went by links that are closed now goes again.
    fn handle_new_epoch(&mut self, shared: &Shared) {
        self.epoch = shared.epochs.current().number();
        self.forget_reading(|peer, link| !shared.epochs.has_link(peer, link));
        let receives = &mut self.receives;
        self.pieces.retain_mut(|piece| {
            let kept = shared.epochs.has_link(piece.peer, piece.link);
            let mut matched = receives.iter_mut().filter_map(|receive| receive.matched.as_mut());
            if let Some(matched) = matched.find(|matched| matched.id == piece.id && !piece.stale) {
                // Nothing that follows one that is gone is there either.
                piece.stale = piece.at >= matched.arrived;
                if !kept {
                    matched.arrived = matched.arrived.min(piece.at);
                }
            }
            kept
        });
        let renewed = |rank| remote(shared, rank).filter(|peer| !shared.epochs.current().reuses_link(*peer));
        for send in self.sends.iter().filter(|send| !send.received) {
            let (id, P2pSignature { dtype, count, .. }) = (send.id, send.open.call.signature);
            if let Some(to) = renewed(id.to) {
                self.notes.push_back(Note::offer(to, Offer { id, dtype, count }));
            }
        }
        for matched in self.receives.iter_mut().filter_map(|receive| receive.matched.as_mut()) {
            if let Some(to) = renewed(matched.id.from) {
                matched.round += 1;
                self.notes.push_back(Note::pull(to, matched.id, matched.arrived, matched.round));
            }
        }
    }

    /// Links are closed: what was to go by them is not read any more, and nothing is heard of it.
    fn forget_reading(&mut self, closed: impl Fn(Participant, Epoch) -> bool) {
        for (index, part) in (0..).zip(&mut self.parts) {
            let Some(Work::Send { id, .. }) = part
                .work
                .take_if(|work| matches!(work, Work::Send { peer, link, .. } if closed(*peer, *link)))
            else {
                continue;
            };
            part.generation = part.generation.wrapping_add(1);
            self.free.push(index);
            if let Some(send) = self.sends.iter_mut().find(|send| send.id == id) {
                send.reading = send.reading.saturating_sub(1);
            }
        }
        while let Some(at) = self.sends.iter().position(Send::is_over) {
            self.finish_send(at);
        }
    }

    /// A link has gone down.
    pub(crate) fn handle_link_down(&mut self, peer: Participant, link: Epoch) {
        self.forget_reading(|of, which| (of, which) == (peer, link));
    }

    /// The next offer, pull or word of receipt. While a plan takes over, a peer may have closed the old link or not have the new one, so
    /// both carry it.
    fn poll_note(&mut self, shared: &mut Shared) -> Option<Action> {
        loop {
            let (note, epoch) = match self.again.take() {
                Some(again) => again,
                None => {
                    let note = self.notes.pop_front()?;
                    let next = shared.epochs.next().filter(|s| s.ready && !s.epoch.reuses_link(note.to));
                    match next.map(|switch| switch.epoch.number()) {
                        Some(next) => {
                            self.again = Some((note, shared.epochs.current().number()));
                            (note, next)
                        }
                        None => (note, shared.epochs.control_epoch()),
                    }
                }
            };
            if shared.epochs.get(epoch).is_some() {
                let Note { to, kind, id, value, dtype, round } = note;
                return Some(shared.bare(kind, to, epoch, |header| {
                    id.write(header);
                    (header.segment, header.dtype, header.sequence) = (value, dtype.code(), Sequence(round));
                }));
            }
        }
    }

    /// A slot for work, and the number of its completion; `None` while there are too many.
    fn part(&mut self, work: Work) -> Option<StepId> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.parts.len() < MAX_PARTS => {
                self.parts.push(Part::default());
                self.parts.len() as u32 - 1
            }
            None => return None,
        };
        let part = self.parts.get_mut(index as usize)?;
        part.work = Some(work);
        let most = MAX_PARTS as u32;
        Some(StepId((part.generation & (most - 1)) * most + index))
    }

    /// A piece that is to be stored: the oldest of its stream, all before which is in place.
    fn poll_piece(&mut self, shared: &mut Shared) -> Option<Action> {
        loop {
            let at = (0..self.pieces.len()).find(|at| self.is_next(*at))?;
            let Piece { id, at: offset, bytes, sequence, peer, link, stale } = *self.pieces.get(at)?;
            let receive = self.receives.iter().find(|receive| receive.gets(id));
            let open = receive.filter(|_| !stale).map(|receive| receive.open);
            let epoch = shared.epochs.stream_of_link(peer, link, self.channel).map(|(epoch, _)| epoch);
            let (Some(Open { rank, call, .. }), Some(epoch)) = (open, epoch) else {
                self.pieces.remove(at);
                self.release_slot(shared, peer, link);
                continue;
            };
            let step = self.part(Work::Receive { id, bytes, peer, link })?;
            self.pieces.remove(at);
            self.storing.push((peer, link));
            let header = Header::new(Kind::Piece, epoch);
            let message = PeerMessage { peer, sequence, bytes, posted: false, header };
            return Some(Action::P2pReceive { rank, token: call.token, offset, step, message });
        }
    }

    fn is_next(&self, at: usize) -> bool {
        let Some(piece) = self.pieces.get(at) else { return false };
        let stream = (piece.peer, piece.link);
        let mut matched = self.receives.iter().filter_map(|receive| receive.matched);
        let matched = matched.find(|matched| matched.id == piece.id);
        let in_order = piece.stale || matched.is_none_or(|matched| matched.stored == piece.at);
        let first = self.pieces.iter().take(at).all(|other| (other.peer, other.link) != stream);
        in_order && first && !self.storing.contains(&stream)
    }

    /// The next bytes from one local rank's tensor to another's.
    fn poll_copy(&mut self, shared: &Shared) -> Option<Action> {
        for at in 0..self.receives.len() {
            let Some(Receive { open, matched: Some(matched) }) = self.receives.get(at) else { continue };
            let (id, offset, total) = (matched.id, matched.arrived, open.bytes);
            if offset == total || remote(shared, id.from).is_some() {
                continue;
            }
            let to = (open.rank, open.call.token);
            let from = self.sends.iter().find(|send| send.id == id)?;
            let from = (from.open.rank, from.open.call.token);
            if self.copies() >= MAX_COPIES {
                return None;
            }
            let bytes = (total - offset).min(COPY_BYTES);
            let step = self.part(Work::Copy { id, bytes })?;
            if let Some(Receive { matched: Some(matched), .. }) = self.receives.get_mut(at) {
                matched.arrived += bytes;
            }
            return Some(Action::P2pCopy { from, to, offset, bytes, step });
        }
        None
    }

    /// How many copies between local ranks are under way.
    fn copies(&self) -> usize {
        self.parts.iter().filter(|part| matches!(part.work, Some(Work::Copy { .. }))).count()
    }

    /// The next piece to a peer that has pulled and has a landing slot free.
    fn poll_send(&mut self, shared: &mut Shared) -> Option<Action> {
        let epoch = shared.epochs.control_epoch();
        for at in 0..self.sends.len() {
            let send = self.sends.get(at)?;
            let (id, offset) = (send.id, send.next);
            if send.round == 0 || send.received || offset >= send.open.bytes {
                continue;
            }
            let Some(peer) = remote(shared, id.to) else { continue };
            let state = shared.epochs.get(epoch).filter(|epoch| !epoch.is_down(peer));
            let Some(link) = state.and_then(|state| state.link(peer)) else { continue };
            let stream = shared.epochs.stream(epoch, peer, self.channel);
            if !stream.is_some_and(|stream| stream.may_send()) {
                continue;
            }
            let bytes = (send.open.bytes - offset).min(self.piece_bytes);
            let (rank, token) = (send.open.rank, send.open.call.token);
            let step = self.part(Work::Send { id, peer, link })?;
            let stream = shared.epochs.stream_mut(epoch, peer, self.channel)?;
            let mut header = Header::new(Kind::Piece, epoch);
            id.write(&mut header);
            (header.channel, header.segment) = (self.channel, offset);
            (header.sequence, header.credit) = (stream.send(), stream.take_credit());
            shared.acknowledgements.fill_header(peer, &mut header);
            let sequence = header.sequence;
            let send = self.sends.get_mut(at)?;
            send.next += bytes;
            send.reading += 1;
            send.wire_bytes += bytes;
            let message = PeerMessage { peer, sequence, bytes: bytes as u32, posted: false, header };
            return Some(Action::P2pSend { rank, token, offset, step, message });
        }
        None
    }

    fn poll_credit(&mut self, shared: &mut Shared) -> Option<Action> {
        while let Some((peer, link)) = self.credits.pop_front() {
            let channel = self.channel;
            let Some((epoch, stream)) = shared.epochs.stream_of_link(peer, link, channel) else { continue };
            if stream.credit_due() {
                let credit = stream.take_credit();
                let fill = |header: &mut Header| (header.channel, header.credit) = (channel, credit);
                return Some(shared.bare(Kind::Credit, peer, epoch, fill));
            }
        }
        None
    }

    /// The next call that has failed with the communicator.
    pub(crate) fn poll_failed(&mut self) -> Option<Action> {
        self.pieces.clear();
        self.notes.clear();
        self.again = None;
        if let Some(action) = self.ended.pop_front() {
            return Some(action);
        }
        let send = self.sends.pop().map(|send| (send.open, send.id.number));
        let receive = || {
            let Receive { open, matched } = self.receives.pop()?;
            Some((open, matched.map_or(0, |matched| matched.id.number)))
        };
        let (open, number) = send.or_else(receive)?;
        let operation = OperationId(number);
        Some(Action::Fail { rank: open.rank, token: open.call.token, operation })
    }

    /// When the first call in flight has waited for its time-out. Time counts from the call, or from the last progress.
    pub(crate) fn poll_timeout(&self, last_progress: Nanos) -> Option<Nanos> {
        let since = self.moved.max(last_progress);
        self.open().map(|open| open.at.max(since).after(open.call.timeout)).min()
    }

    /// Ends the communicator if a call has waited for too long.
    pub(crate) fn handle_timeout(&self, now: Nanos, last_progress: Nanos, shared: &mut Shared) {
        let since = self.moved.max(last_progress);
        let late = |open: &Open| now >= open.at.max(since).after(open.call.timeout);
        let Some((open, matched)) = self.calls().find(|(open, _)| late(open)) else { return };
        let (rank, call, missing) = (open.rank, open.call.signature, awaits(shared, open, matched));
        shared.fail(Failure::P2pTimeout { rank, call, missing });
    }

    /// The calls in flight, and of each whether its other end was called as far as is known here.
    fn calls(&self) -> impl Iterator<Item = (&Open, bool)> {
        let pulled = |send: &Send| send.round > 0 || send.received;
        let here = |send: &Send| self.receives.iter().any(|receive| receive.gets(send.id));
        let sends = self.sends.iter().map(move |send| (&send.open, pulled(send) || here(send)));
        let receives = self.receives.iter().map(|receive| (&receive.open, receive.matched.is_some()));
        sends.chain(receives)
    }

    /// The calls in flight, for people.
    pub(crate) fn in_flight(&self, shared: &Shared) -> Vec<MessageInFlight> {
        let describe = |(open, matched): (&Open, bool)| MessageInFlight {
            rank: open.rank,
            call: open.call.signature,
            since: open.at,
            awaits: awaits(shared, open, matched),
        };
        self.calls().map(describe).collect()
    }

    fn open(&self) -> impl Iterator<Item = &Open> {
        let receives = self.receives.iter().map(|receive| &receive.open);
        self.sends.iter().map(|send| &send.open).chain(receives)
    }

    /// Whether a local rank has a call in flight, or another waits for it to receive.
    pub(crate) fn concerns(&self, rank: Rank) -> bool {
        self.open().any(|open| open.rank == rank) || self.offers.iter().any(|offer| offer.id.to == rank)
    }

    /// Ranks that a call in flight needs and that are gone. Gone is who `has_left` and was to send or to receive, and all at a
    /// participant that `is_lost`.
    pub(crate) fn missing(
        &self,
        shared: &Shared,
        has_left: impl Fn(Rank) -> bool,
        is_lost: impl Fn(Participant) -> bool,
    ) -> Vec<Rank> {
        let sends = self.sends.iter().filter(|send| !send.received).map(|send| send.id.to);
        let peer = |receive: &Receive| match receive.matched {
            Some(matched) => Some(matched.id.from),
            None => receive.open.call.signature.peer,
        };
        let needed = sends.chain(self.receives.iter().filter_map(peer));
        let homes = needed.filter_map(|rank| remote(shared, rank)).filter(|home| is_lost(*home));
        let lost = homes.flat_map(|home| shared.group.local(home).iter().copied());
        // What has been sent to the end is received by a rank that leaves, and of one that leaves nothing is to come.
        let unmatched = self.receives.iter().filter(|receive| receive.matched.is_none());
        let senders = unmatched.filter_map(|receive| receive.open.call.signature.peer);
        let left = senders.chain(self.offers.iter().map(|offer| offer.id.to)).filter(|rank| has_left(*rank));
        lost.chain(left).collect()
    }
}

impl Receive {
    /// Whether it waits for a message like this.
    fn accepts(&self, offer: &Offer) -> bool {
        let from = self.open.call.signature.peer;
        self.matched.is_none()
            && self.open.rank == offer.id.to
            && from.is_none_or(|from| from == offer.id.from)
    }

    /// Whether this message is the one that it gets.
    fn gets(&self, id: MessageId) -> bool {
        self.matched.is_some_and(|matched| matched.id == id)
    }
}

impl Note {
    fn offer(to: Participant, Offer { id, dtype, count }: Offer) -> Self {
        Self { to, kind: Kind::Offer, id, value: count, dtype, round: 0 }
    }

    fn pull(to: Participant, id: MessageId, at: u64, round: u32) -> Self {
        Self { to, kind: Kind::Pull, id, value: at, dtype: Dtype::U8, round }
    }

    fn received(to: Participant, id: MessageId) -> Self {
        Self { to, kind: Kind::Received, id, value: 0, dtype: Dtype::U8, round: 0 }
    }
}

impl Send {
    fn is_over(&self) -> bool {
        self.received && self.reading == 0
    }
}

impl MessageId {
    fn write(self, header: &mut Header) {
        (header.root, header.count) = (self.from.0, self.to.0.into());
        header.operation = self.number;
    }
}

/// Who has not called the other end of a call in flight, which is known to be `matched` or not.
fn awaits(shared: &Shared, open: &Open, matched: bool) -> Vec<Rank> {
    match open.call.signature.peer {
        _ if matched => Vec::new(),
        Some(peer) => vec![peer],
        None => (0..shared.group.ranks()).map(Rank).filter(|other| *other != open.rank).collect(),
    }
}

/// The participant of a rank that is not local.
fn remote(shared: &Shared, rank: Rank) -> Option<Participant> {
    shared.group.participant_of(rank).filter(|home| *home != shared.me)
}
