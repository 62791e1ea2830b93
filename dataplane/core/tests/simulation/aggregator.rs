//! An aggregator as hosts see it: its sums, and sessions that end. Sums come when all have given their part, to some and not
//! to others when it dies. What goes on between packets is simulated where the aggregator is.

use super::memory::{self, POISON};
use super::network::{Location, Place};
use super::node::Track;
use super::scenario::MICROSECOND;
use super::world::{CopyOut, Event, Input, World};
use harmonaize_abi::{AggregatorTask, ChannelId, Epoch, SegmentIndex, Signature};
use harmonaize_core::{Nanos, Segment};
use harmonaize_plan::{Access, Participant};
use rand::RngExt;
use std::collections::HashMap;

/// A segment of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Submitted {
    pub(crate) epoch: Epoch,
    pub(crate) session: u64,
    pub(crate) index: SegmentIndex,
}

/// The aggregator; it has no memory of what was before its last death.
#[derive(Debug, Default)]
pub(crate) struct Aggregator {
    pub(crate) dead: bool,
    parts: HashMap<Submitted, Vec<(Participant, ChannelId)>>,
    /// Bytes of one for all.
    spread: HashMap<Submitted, Vec<u8>>,
}

/// A participant in a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Joined {
    pub(crate) session: u64,
    submitted: SegmentIndex,
    summed: SegmentIndex,
    /// When its last sum comes.
    last: u64,
    pub(crate) ended: bool,
}

impl World {
    pub(crate) fn join(&mut self, p: Participant, epoch: Epoch, session: u64) {
        let joined =
            Joined { session, submitted: SegmentIndex(0), summed: SegmentIndex(0), last: 0, ended: false };
        let before = self.nodes[p.0 as usize].joined.insert(epoch, joined);
        let grows = before.is_none_or(|before| before.session < session) || self.scenario.hostile.is_some();
        assert!(grows, "sessions have growing numbers");
        self.statistics.sessions += 1;
        if self.aggregator.dead {
            self.end_session(p, epoch, session);
        }
    }

    /// A participant notices some time later that its session is over.
    fn end_session(&mut self, p: Participant, epoch: Epoch, session: u64) {
        let at = self.now + self.rng.random_range(self.scenario.silence.clone());
        self.at(at, Event::Input(p, Input::SessionEnded { epoch, session }));
    }

    /// One asks for a session that nobody is in.
    pub(crate) fn probe_aggregator(&mut self, p: Participant, epoch: Epoch, session: u64) {
        let node = &mut self.nodes[p.0 as usize];
        let before = node.joined.get(&epoch).map_or(0, |joined| joined.session);
        // Who could not open one may go on refusing it.
        let asked = node.probed.insert(epoch, session).unwrap_or(0);
        assert!(before.max(asked) < session, "sessions have growing numbers");
        self.statistics.probes += 1;
        let there = !self.aggregator.dead;
        let wait = match there {
            true => self.scenario.weather.wait(&mut self.rng),
            false => self.rng.random_range(self.scenario.silence.clone()),
        };
        self.at(self.now + wait, Event::Input(p, Input::Knocked { epoch, there }));
    }

    pub(crate) fn knocked(&mut self, p: Participant, epoch: Epoch, there: bool) {
        let core = &mut self.nodes[p.0 as usize].core;
        match there {
            true => core.handle_aggregator_alive(Nanos(self.now), epoch),
            false => core.handle_aggregation_ended(Nanos(self.now), epoch),
        }
    }

    /// The aggregator dies, or comes back: either way it knows none of its sessions any more.
    pub(crate) fn aggregator(&mut self, dead: bool) {
        self.aggregator = Aggregator { dead, ..Aggregator::default() };
        for p in (0..self.scenario.group.participants()).map(Participant) {
            let joined = self.nodes[p.0 as usize].joined.clone();
            for (epoch, joined) in joined {
                self.end_session(p, epoch, joined.session);
            }
        }
    }

    /// One participant gives up its sessions.
    pub(crate) fn despair(&mut self) {
        let p = Participant(self.rng.random_range(0..self.scenario.group.participants()));
        for (epoch, joined) in self.nodes[p.0 as usize].joined.clone() {
            self.end_session(p, epoch, joined.session);
        }
    }

    fn sum_place(&self, p: Participant, channel: ChannelId, segment: &Segment) -> Vec<Location> {
        let size = segment.signature.dtype.size() as u64;
        let (start, bytes) = ((segment.lo * size) as usize, ((segment.hi - segment.lo) * size) as usize);
        let (operation, number) = (segment.operation, segment.number);
        if segment.stages_output() {
            let place = Place::Staging(channel, 0);
            return vec![Location { place, operation, segment: number, offset: 0, bytes }];
        }
        let local = self.scenario.group.local(p).iter();
        let output = |rank: &harmonaize_abi::Rank| Location {
            place: Place::Output(rank.0),
            operation,
            segment: number,
            offset: start,
            bytes,
        };
        local.map(output).collect()
    }

    pub(crate) fn aggregate(&mut self, p: Participant, channel: ChannelId) {
        let node = &mut self.nodes[p.0 as usize];
        let segment = node.core.segment(channel).unwrap().clone();
        let Some(index) = segment.aggregated else { return };
        let signature = segment.signature;
        self.begin(p, channel, &segment, &signature);
        let bytes = (segment.hi - segment.lo) as usize * signature.dtype.size();
        let task = signature.collective.traits().aggregator;
        let root = self.home(signature.root) == p && task == Some(AggregatorTask::Broadcast);
        assert!(bytes > 0 || !signature.collective.has_data(), "nothing to sum");
        let node = &mut self.nodes[p.0 as usize];
        node.staging[usize::from(channel.0)].slots = vec![vec![POISON; bytes]];
        node.tracks.insert(segment.number, Track { uncommitted: 1, parts: HashMap::default() });
        node.aggregated.insert(channel, segment.number);
        let sends = root || task == Some(AggregatorTask::Sum);
        *node.wire.entry(segment.operation).or_default() += if sends { bytes as u64 } else { 0 };
        let given = root.then(|| {
            let (operation, number) = (segment.operation, segment.number);
            let offset = segment.lo as usize * signature.dtype.size();
            let place = Place::Input(signature.root.0);
            let given = self.read(p, &Location { place, operation, segment: number, offset, bytes });
            for location in self.sum_place(p, channel, &segment) {
                self.write(p, &location, &given);
            }
            given
        });
        let node = &mut self.nodes[p.0 as usize];
        let Some(joined) = node.joined.get_mut(&segment.epoch) else { return };
        if self.scenario.hostile.is_some() && joined.submitted != index {
            return;
        }
        assert_eq!(joined.submitted, index, "segments out of order");
        joined.submitted = joined.submitted.next();
        let session = joined.session;
        let submitted = Submitted { epoch: segment.epoch, session, index };
        self.statistics.aggregated += 1;
        if self.aggregator.dead {
            return self.end_session(p, segment.epoch, session);
        }
        let parts = self.aggregator.parts.entry(submitted).or_default();
        parts.push((p, channel));
        if signature.collective.traits().aggregator == Some(AggregatorTask::Broadcast) {
            // Who asks has it as soon as the root has given it.
            let waiting = if given.is_some() { parts.clone() } else { vec![(p, channel)] };
            self.aggregator.spread.extend(given.map(|given| (submitted, given)));
            if let Some(given) = self.aggregator.spread.get(&submitted).cloned() {
                waiting.into_iter().for_each(|(p, channel)| self.bring(p, channel, submitted, given.clone()));
            }
        } else if parts.len() == self.nodes.len() {
            let wait = self.scenario.weather.wait(&mut self.rng);
            self.at(self.now + wait, Event::Sum(submitted));
        }
    }

    /// The aggregator has all parts, which were read until now.
    pub(crate) fn sum(&mut self, of: Submitted) {
        let Some(parts) = self.aggregator.parts.remove(&of) else { return };
        let (mut contents, mut signatures) = (Vec::new(), Vec::new());
        for (p, channel) in &parts {
            let node = &self.nodes[p.0 as usize];
            let joined = node
                .joined
                .get(&of.epoch)
                .is_some_and(|joined| joined.session == of.session && !joined.ended);
            let segment =
                node.core.segment(*channel).filter(|segment| segment.aggregated == Some(of.index)).cloned();
            let Some(segment) = segment.filter(|_| joined && node.alive && node.failure.is_none()) else {
                return;
            };
            let signature = segment.signature;
            let size = signature.dtype.size();
            let (offset, bytes) = (segment.lo as usize * size, (segment.hi - segment.lo) as usize * size);
            for rank in self.scenario.group.local(*p).to_vec() {
                let (operation, segment) = (segment.operation, segment.number);
                let location = Location { place: Place::Input(rank.0), operation, segment, offset, bytes };
                contents.push(self.read(*p, &location));
            }
            signatures.push((signature, segment.number));
        }
        let (signature, number) = signatures[0];
        if self.scenario.hostile.is_some() && signatures.iter().any(|other| *other != (signature, number)) {
            return;
        }
        assert!(
            signatures.iter().all(|other| *other == (signature, number)),
            "segments differ: {signatures:?}"
        );
        let contents: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
        let sum = memory::reduce(&signature, &contents, None);
        for (p, channel) in parts {
            self.bring(p, channel, of, sum.clone());
        }
    }

    /// What comes of a segment is on its way to one.
    fn bring(&mut self, p: Participant, channel: ChannelId, of: Submitted, sum: Vec<u8>) {
        let wait = self.scenario.weather.wait(&mut self.rng);
        let joined = self.nodes[p.0 as usize].joined.get_mut(&of.epoch);
        let Some(joined) = joined.filter(|joined| joined.session == of.session) else { return };
        joined.last = (joined.last + 1).max(self.now + wait);
        let at = joined.last;
        self.at(at, Event::Summed { at: p, channel, of, sum });
    }

    /// Divided, if it is an average.
    fn divided(&self, signature: &Signature, sum: &[u8]) -> Vec<u8> {
        if !signature.collective.reduces() {
            return sum.to_vec();
        }
        memory::reduce(signature, &[sum], Some(self.scenario.group.ranks()))
    }

    /// A sum comes, unless the aggregator has died meanwhile: then it may.
    pub(crate) fn summed(&mut self, p: Participant, channel: ChannelId, of: Submitted, sum: &[u8]) {
        let lost = self.aggregator.dead && self.rng.random_bool(0.5);
        let node = &mut self.nodes[p.0 as usize];
        let open = node.alive && !node.closed && node.failure.is_none() && !lost;
        let joined = node.joined.get_mut(&of.epoch).filter(|joined| joined.session == of.session && open);
        let Some(joined) = joined.filter(|joined| !joined.ended) else { return };
        if joined.summed != of.index {
            // Segments are done in order.
            let sum = sum.to_vec();
            return self.at(self.now + 10 * MICROSECOND, Event::Summed { at: p, channel, of, sum });
        }
        let segment =
            node.core.segment(channel).filter(|segment| segment.aggregated == Some(of.index)).cloned();
        let Some(segment) = segment else { return };
        joined.summed = joined.summed.next();
        let sum = if segment.stages_output() { sum.to_vec() } else { self.divided(&segment.signature, sum) };
        for location in self.sum_place(p, channel, &segment).into_iter().filter(|at| at.bytes > 0) {
            self.check_sum_write(&location);
            self.write(p, &location, &sum);
        }
        self.input(p, Input::Summed(of));
    }

    fn check_sum_write(&self, location: &Location) {
        if let Place::Output(rank) = location.place {
            let tensor = &self.tensors[&(rank, location.operation)];
            assert!(tensor.output.is_some(), "an input in place is overwritten before it may be");
        }
    }

    pub(crate) fn take_sum(&mut self, p: Participant, of: Submitted) {
        let node = &mut self.nodes[p.0 as usize];
        let open =
            node.joined.get(&of.epoch).is_some_and(|joined| joined.session == of.session && !joined.ended);
        let segment = node.core.aggregated_segment(of.epoch, of.index).map(|(_, segment)| segment.number);
        let Some(number) = segment.filter(|_| open && node.failure.is_none()) else { return };
        node.core.handle_aggregated(Nanos(self.now), of.epoch, of.index, None);
        node.tracks.get_mut(&number).unwrap().uncommitted = 0;
        self.advance(p);
    }

    pub(crate) fn session_ended(&mut self, p: Participant, epoch: Epoch, session: u64) {
        let node = &mut self.nodes[p.0 as usize];
        let open = node.joined.get_mut(&epoch).filter(|joined| joined.session == session && !joined.ended);
        if let Some(joined) = open.filter(|_| node.failure.is_none()) {
            joined.ended = true;
            node.core.handle_aggregation_ended(Nanos(self.now), epoch);
        }
    }

    /// Nothing is written for the session any more; until now some of a sum may have been.
    pub(crate) fn quit(&mut self, p: Participant, epoch: Epoch) {
        let node = &mut self.nodes[p.0 as usize];
        node.joined.remove(&epoch);
        let begun: Vec<_> = node.aggregated.clone().into_iter().collect();
        for (channel, number) in begun {
            let node = &self.nodes[p.0 as usize];
            let segment =
                node.core.segment(channel).filter(|s| s.number == number && s.epoch == epoch).cloned();
            let open = node.tracks.get(&number).is_some_and(|track| track.uncommitted == 1);
            let Some(segment) = segment.filter(|_| open) else { continue };
            for location in self.sum_place(p, channel, &segment) {
                let bytes = self.rng.random_range(0..=location.bytes);
                self.write(p, &Location { bytes, ..location }, &vec![POISON; bytes]);
            }
        }
    }

    /// Held sums go to the outputs, to those that are not mapped later.
    pub(crate) fn copy_out(&mut self, p: Participant, channel: ChannelId) {
        let core = &self.nodes[p.0 as usize].core;
        let segment = core.segment(channel).unwrap().clone();
        let (number, operation, signature) = (segment.number, segment.operation, segment.signature);
        let own = segment.retains_output() && self.nodes[p.0 as usize].done > number;
        let right = own || self.done_by_all() > number || self.scenario.hostile.is_some();
        assert!(right, "settled before everybody is done");
        // It may have been given up to the hosts meanwhile, who have done nothing yet.
        assert!(segment.stages_output() || segment.resume.is_some_and(|restored| restored.completed));
        let bytes = (segment.hi - segment.lo) as usize * signature.dtype.size();
        let held =
            Location { place: Place::Staging(channel, 0), operation, segment: number, offset: 0, bytes };
        let held = self.read(p, &held);
        let sum = self.divided(&signature, &held);
        let offset = segment.lo as usize * signature.dtype.size();
        let mut outputs = Vec::new();
        for rank in self.scenario.group.local(p).to_vec() {
            let place = Place::Output(rank.0);
            let location = Location { place, operation, segment: number, offset, bytes: sum.len() };
            match self.scenario.access[rank.0 as usize] {
                Access::Mapped => self.write(p, &location, &sum),
                Access::Remote => outputs.push(location),
            }
        }
        if !outputs.is_empty() && bytes > 0 {
            let node = &mut self.nodes[p.0 as usize];
            node.core.defer_copy_out(channel);
            node.copying += 1;
            self.statistics.copied_late += 1;
            let wait = self.scenario.weather.wait(&mut self.rng);
            let copy = Box::new(CopyOut { at: p, channel, outputs, content: sum });
            self.at(self.now + wait, Event::CopiedOut(copy));
        }
    }

    /// A held sum has come to the outputs that are not mapped, whose operation has not ended before.
    pub(crate) fn copied_out(&mut self, CopyOut { at, channel, outputs, content }: CopyOut) {
        let node = &self.nodes[at.0 as usize];
        if !node.alive || node.failure.is_some() || node.closed {
            return;
        }
        outputs.iter().for_each(|location| self.write(at, location, &content));
        let wait = self.rng.random_range(0..=self.scenario.weather.delay);
        self.at(self.now + wait, Event::Input(at, Input::CopiedOut(channel)));
    }
}
