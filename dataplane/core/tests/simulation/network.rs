//! Links: frames in order on each connection, at any time across connections, read from memory when they are sent.

use super::memory::POISON;
use super::scenario::{MILLISECOND, Weather};
use super::world::{Event, Input, World};
use harmonaize_abi::{ChannelId, Epoch, OperationId, Rank, SegmentId, Sequence, StepId, Token};
use harmonaize_core::{self as core, Header, Kind, Message};
use harmonaize_plan::Participant;
use rand::RngExt;
use std::collections::HashMap;

/// One direction of a link.
#[derive(Debug, Default)]
pub(crate) struct Direction {
    /// By path: when its last frame is read, and when it arrives.
    paths: HashMap<u16, (u64, u64)>,
    /// The receiving end knows that it is down.
    pub(crate) down: bool,
}

/// From where a payload is read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Payload {
    pub(crate) source: Option<Location>,
    /// Of a message from rank to rank: its sender, the token of the call, the first byte and how many.
    pub(crate) piece: Option<(Rank, Token, usize, usize)>,
    pub(crate) channel: ChannelId,
    pub(crate) step: StepId,
    pub(crate) sequence: Sequence,
}

/// Memory of a participant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Input(u32),
    Output(u32),
    Staging(ChannelId, u16),
    Landing(Epoch, u32, ChannelId, Sequence),
}

/// A piece of it; `operation` and `segment` say when it may be touched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Location {
    pub(crate) place: Place,
    pub(crate) operation: OperationId,
    pub(crate) segment: SegmentId,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// A frame under way.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) from: Participant,
    pub(crate) to: Participant,
    /// The epoch that its link was made for.
    pub(crate) link: Epoch,
    pub(crate) message: Vec<u8>,
    pub(crate) payload: Option<Payload>,
    pub(crate) content: Vec<u8>,
    pub(crate) arrives: u64,
    pub(crate) sent: u64,
}

impl Weather {
    /// Some time until something happens.
    pub(crate) fn wait(&self, rng: &mut impl RngExt) -> u64 {
        let usual = rng.random_range(0..=self.delay.max(1));
        let usual = if rng.random_bool(0.5) { usual / 16 } else { usual };
        if self.stalls > 0.0 && rng.random_bool(self.stalls) {
            usual + rng.random_range(0..=self.stall)
        } else {
            usual
        }
    }
}

impl World {
    /// Breaks one of an epoch's new links if that is to happen, before, while or after it is agreed on.
    pub(crate) fn cut(&mut self, epoch: Epoch) {
        let all = self.scenario.group.participants();
        let Some((_, low, high)) = self.scenario.cut.iter().find(|(cut, ..)| *cut == epoch).copied() else {
            return;
        };
        if low == high || low.0 >= all || self.scenario.carried_by(epoch, low).contains(&high) {
            return;
        }
        let at = self.now + self.rng.random_range(0..3 * MILLISECOND);
        for (at_end, peer) in [(low, high), (high, low)] {
            let at = at + self.rng.random_range(0..MILLISECOND);
            self.at(at, Event::Down { at: at_end, link: epoch, peer });
        }
        self.statistics.cut += 1;
    }

    /// Control hears that somebody cannot prepare an epoch, and tells everybody.
    pub(crate) fn give_up(&mut self, epoch: Epoch) {
        for p in (0..self.scenario.group.participants()).map(Participant) {
            let at = self.now + self.rng.random_range(0..2 * MILLISECOND);
            self.at(at, Event::Input(p, Input::Abandon(epoch)));
        }
    }

    /// Control may say so before the leader has heard it from everybody; to some, later than all else, or never.
    pub(crate) fn all_prepared(&mut self, epoch: Epoch) {
        let up = self.up.entry(epoch).or_default();
        *up += 1;
        if *up < self.nodes.len() || self.rng.random_bool(0.3) {
            return;
        }
        for p in (0..self.scenario.group.participants()).map(Participant) {
            let at = self.now + self.rng.random_range(0..3 * MILLISECOND);
            if self.rng.random_bool(0.9) {
                self.at(at, Event::Input(p, Input::AllPrepared(epoch)));
            }
        }
    }

    /// Hands a frame to the transport, which reads its payload later.
    pub(crate) fn send(
        &mut self,
        from: Participant,
        to: Participant,
        epoch: Epoch,
        mut message: Message,
        payload: Option<Payload>,
    ) {
        self.check_acknowledged(from, to, &message.header);
        self.statistics.frames += 1;
        let hostile = self.scenario.hostile == Some(from);
        if hostile && self.rng.random_bool(0.02) {
            self.spoil(&mut message.header);
        }
        let path = payload.map_or(0, |payload| payload.channel.0 % self.scenario.paths);
        let mut buffer = [0; harmonaize_core::MAX_MESSAGE];
        let used = message.encode(&mut buffer);
        let weather = self.scenario.weather;
        let (read, flight) = (weather.wait(&mut self.rng), weather.wait(&mut self.rng));
        let made = self.nodes[from.0 as usize].link(epoch, to);
        let link = self.links.entry((made, from, to)).or_default();
        let (last_read, last_arrival) = link.paths.entry(path).or_default();
        *last_read = (*last_read).max(self.now + read);
        *last_arrival = (*last_arrival + 1).max(*last_read + flight);
        let (read, arrives) = (*last_read, *last_arrival);
        let sent = read + weather.wait(&mut self.rng);
        let frame = Frame {
            from,
            to,
            link: made,
            message: buffer[..used].to_vec(),
            payload,
            content: Vec::new(),
            arrives,
            sent,
        };
        self.at(read, Event::Read(Box::new(frame)));
    }

    /// The transport reads a frame's payload and sends it.
    pub(crate) fn read_frame(&mut self, mut frame: Box<Frame>) {
        let sender = &self.nodes[frame.from.0 as usize];
        if !sender.alive || (frame.payload.is_some() && (sender.failure.is_some() || sender.closed)) {
            return;
        }
        let open = sender.has(frame.link, frame.to);
        if let Some(payload) = frame.payload {
            if let Some(source) = payload.source {
                frame.content = self.read(frame.from, &source);
            }
            if let Some(piece) = payload.piece {
                // What a closed link had left is not read.
                if !open {
                    return;
                }
                frame.content = self.read_piece(piece);
            }
            let completion = Input::Completed { channel: payload.channel, step: payload.step };
            self.at(frame.sent, Event::Input(frame.from, completion));
        }
        self.at(frame.arrives, Event::Deliver(frame));
    }

    /// A frame arrives. Its payload overwrites its landing slot, or what was posted for it, whether or not the last
    /// one was consumed.
    pub(crate) fn deliver(&mut self, frame: Frame) {
        let data = frame.payload.is_some();
        let down = self.links.get(&(frame.link, frame.from, frame.to)).is_some_and(|link| link.down);
        let node = &mut self.nodes[frame.to.0 as usize];
        let open = node.alive && !node.closed && node.has(frame.link, frame.from);
        if down || !open {
            let piece = frame.payload.is_some_and(|payload| payload.piece.is_some());
            let harmless = !data || piece || self.faulty;
            assert!(
                harmless || node.failure.is_some(),
                "data from {:?} to {:?} is lost",
                frame.from,
                frame.to
            );
            return;
        }
        let mut posted = None;
        if let Some(payload) = frame.payload {
            let hostile = self.scenario.hostile.is_some();
            let key = (frame.link, frame.from.0, payload.channel);
            let plan = self.plans.iter().find(|plan| plan.epoch == frame.link);
            let slots = plan.map_or(1, |plan| plan.landing_slots) as usize;
            let bytes =
                (self.scenario.plan.tuning.chunk_bytes.max(16) + harmonaize_plan::CODED_ROOM) as usize;
            let ring = node.landing.entry(key).or_insert_with(|| vec![(false, vec![POISON; bytes]); slots]);
            let (occupied, slot) = &mut ring[payload.sequence.0 as usize % slots];
            let stale = payload.piece.is_some();
            assert!(
                hostile || stale || !*occupied,
                "a message overwrites another that is not consumed yet: {key:?}"
            );
            assert!(frame.content.len() <= slot.len(), "a message of {} bytes", frame.content.len());
            *occupied = true;
            *node.delivered.entry(key).or_default() += 1;
            let key = (key.0, key.1, key.2, payload.sequence);
            match node.posts.get_mut(&key) {
                Some((location, there)) if location.bytes == frame.content.len() => {
                    *there = true;
                    posted = Some(*location);
                }
                _ => {
                    node.posts.remove(&key);
                    slot[..frame.content.len()].copy_from_slice(&frame.content);
                }
            }
        }
        if let Some(location) = posted {
            self.write(frame.to, &location, &frame.content);
            self.statistics.posted += 1;
        }
        let payload = core::Payload { bytes: frame.content.len() as u32, posted: posted.is_some() };
        let input = Input::Frame { from: frame.from, link: frame.link, message: frame.message, payload };
        self.input(frame.to, input);
    }

    /// One end closes its side of links; the other ends hear of it after the last frames.
    pub(crate) fn close_links(&mut self, from: Participant, links: &[(Epoch, Participant)], within: u64) {
        for (made, to) in links.iter().copied().filter(|(_, to)| *to != from) {
            let link = self.links.entry((made, from, to)).or_default();
            let last = link.paths.values().map(|(_, arrival)| *arrival).max().unwrap_or(0);
            let alive = self.nodes[from.0 as usize].alive;
            let base = if alive { last.max(self.now) } else { self.now };
            let down = base + 1 + self.rng.random_range(0..=within);
            self.at(down, Event::Down { at: to, link: made, peer: from });
        }
    }

    /// Changes a header as no honest participant would.
    fn spoil(&mut self, header: &mut Header) {
        let any = self.rng.random::<u64>();
        match self.rng.random_range(0..12) {
            0 => header.channel = ChannelId(any as u16),
            1 => header.epoch = Epoch(header.epoch.0.wrapping_add(any as u32 % 3)),
            2 => header.sequence = header.sequence.ahead(any as u32 % 5),
            3 => header.credit = any as u32,
            4 => header.acknowledged = SegmentId(any),
            5 => header.kind = any as u8 % 10,
            6 => header.operation = any,
            7 => header.segment = header.segment.wrapping_add(any % 3),
            8 => header.count = any,
            9 => header.collective = any as u8 % 6,
            10 => header.reduce = any as u8,
            _ => header.root = any as u32,
        }
    }

    /// A frame that has no reason.
    pub(crate) fn inject(&mut self, from: Participant) {
        let to = Participant(self.rng.random_range(0..self.scenario.group.participants()));
        if to == from {
            return;
        }
        let kinds = [
            Kind::Data,
            Kind::Credit,
            Kind::Acknowledge,
            Kind::Control,
            Kind::Offer,
            Kind::Pull,
            Kind::Piece,
            Kind::Received,
        ];
        let kind = kinds[self.rng.random_range(0..kinds.len())];
        let epoch = Epoch(self.scenario.plan.epoch.0.wrapping_add(self.rng.random_range(0..3)));
        let mut header = Header::new(kind, epoch);
        for _ in 0..self.rng.random_range(0..4) {
            self.spoil(&mut header);
        }
        let control = (header.kind == Kind::Control as u8).then(|| Box::new(self.any_control()));
        let message = Message { header, control };
        let mut buffer = [0; harmonaize_core::MAX_MESSAGE];
        let used = message.encode(&mut buffer);
        let mut message = buffer[..used].to_vec();
        if self.rng.random_bool(0.2) {
            let at = self.rng.random_range(0..message.len());
            message[at] ^= 1 << self.rng.random_range(0..8);
        }
        let payload = core::Payload { bytes: self.rng.random_range(0..3) * 8, posted: false };
        let epoch = if self.rng.random_bool(0.9) { self.scenario.plan.epoch } else { epoch };
        self.input(to, Input::Frame { from, link: epoch, message, payload });
    }
}
