//! Executes the core's steps on real memory, and checks what must hold of it.

use super::memory::{self, POISON, Tensor};
use super::network::{Location, Payload, Place};
use super::node::Track;
use super::world::{Event, Input, Transfer, World};
use harmonaize_abi::{
    BlockContent, ChannelId, Dtype, Holders, OperationId, Rank, SegmentId, Sequence, Signature, StepId,
};
use harmonaize_core::{Header, Message, PeerMessage, Segment};
use harmonaize_plan::{self as plan, Access, Operand, Participant, Retention, Step, StepKind};
use rand::RngExt;

/// What a step belongs to.
pub(crate) struct Context {
    pub(crate) at: Participant,
    pub(crate) channel: ChannelId,
    pub(crate) index: StepId,
    pub(crate) segment: Segment,
    pub(crate) signature: Signature,
}

impl World {
    /// Memory first, then sends.
    pub(crate) fn step(
        &mut self,
        at: Participant,
        channel: ChannelId,
        index: StepId,
        sources: &[PeerMessage],
        sends: &[PeerMessage],
    ) {
        let core = &self.nodes[at.0 as usize].core;
        let segment = core.segment(channel).unwrap().clone();
        let signature = segment.signature;
        self.begin(at, channel, &segment, &signature);
        let program = segment.program.clone();
        let step = &program.steps[index.0 as usize];
        let context = Context { at, channel, index, segment, signature };
        self.check_order(&context, step);
        if matches!(step.kind, StepKind::Fetch | StepKind::Store) {
            return self.begin_transfer(&context, step);
        }
        if step
            .sources
            .iter()
            .chain(&step.destinations)
            .any(|operand| operand.encoding != plan::Encoding::Exact)
        {
            if let Err(peer) = self.coded(&context, step, sources, sends) {
                assert!(self.scenario.hostile.is_some(), "a chunk of {peer:?} that is none");
                self.nodes[at.0 as usize].core.handle_breach(peer);
            }
            return;
        }
        let mut arrived = sources.iter();
        let mut contents = Vec::new();
        let mut consumed = Vec::new();
        for operand in &step.sources {
            let location = match operand.buffer {
                plan::Buffer::Peer(peer) => {
                    let message = arrived.next().unwrap();
                    assert_eq!(message.peer, peer);
                    let location = self.landed(&context, message);
                    consumed.push(location);
                    self.posted(&context, step, message).unwrap_or(location)
                }
                _ => self.locate(&context, operand, false),
            };
            let content = self.read(at, &location);
            contents.push(match operand.buffer {
                plan::Buffer::Input(rank) => memory::scaled(&context.signature, rank, content),
                _ => content,
            });
        }
        assert!(arrived.next().is_none());
        let result = match step.kind {
            StepKind::Reduce { last } => {
                let contents: Vec<&[u8]> = contents.iter().map(Vec::as_slice).collect();
                let last_of = last.then(|| self.scenario.group.ranks());
                memory::reduce(&context.signature, &contents, last_of)
            }
            _ => contents.into_iter().next().unwrap_or_default(),
        };
        for location in consumed {
            self.free_landing(at, &location);
        }
        let mut from = None;
        for operand in &step.destinations {
            if !matches!(operand.buffer, plan::Buffer::Peer(_)) && !context.segment.is_aliased(step, operand)
            {
                let location = self.locate(&context, operand, false);
                self.check_write(&context, step, &location);
                self.write(at, &location, &result);
                from = from.or(Some(location));
            }
        }
        if from.is_none() && !sends.is_empty() {
            from = step.sources.first().map(|source| self.locate(&context, source, false));
        }
        self.send_all(&context, step, sends, from);
        if sends.is_empty() {
            self.step_complete(at, &context.segment, index);
        }
    }

    /// A payload to come may go to its place at once, unless it has arrived. From here on the transport may write there at
    /// any time, so nobody else may rely on what the memory holds.
    pub(crate) fn post(
        &mut self,
        at: Participant,
        channel: ChannelId,
        index: StepId,
        peer: Participant,
        sequence: Sequence,
    ) {
        let core = &self.nodes[at.0 as usize].core;
        let segment = core.segment(channel).unwrap().clone();
        let signature = segment.signature;
        self.begin(at, channel, &segment, &signature);
        let program = segment.program.clone();
        let step = &program.steps[index.0 as usize];
        assert_eq!((&step.kind, step.sources[0].buffer), (&StepKind::Move, plan::Buffer::Peer(peer)));
        let context = Context { at, channel, index, segment, signature };
        let location = self.locate(&context, memory_destination(step), false);
        self.check_write(&context, step, &location);
        let node = &mut self.nodes[at.0 as usize];
        let link = node.link(context.segment.epoch, peer);
        let delivered = node.delivered.get(&(link, peer.0, channel)).copied().unwrap_or(0);
        if delivered > sequence.0 || self.rng.random_bool(0.2) {
            return;
        }
        let before = node.posts.insert((link, peer.0, channel, sequence), (location, false));
        assert!(self.scenario.hostile.is_some() || before.is_none(), "posted twice");
        self.write(at, &location, &vec![POISON; location.bytes]);
    }

    /// Where the payload of a message is that was posted for; the post is over.
    fn posted(&mut self, context: &Context, step: &Step, message: &PeerMessage) -> Option<Location> {
        let node = &mut self.nodes[context.at.0 as usize];
        let link = node.link(context.segment.epoch, message.peer);
        let key = (link, message.peer.0, context.channel, message.sequence);
        let post = node.posts.remove(&key);
        let there = post.is_some_and(|(_, there)| there);
        assert!(self.scenario.hostile.is_some() || there == message.posted, "posted, or not");
        let (location, _) = post.filter(|_| message.posted)?;
        let destination = self.locate(context, memory_destination(step), false);
        assert_eq!((location.place, location.offset), (destination.place, destination.offset));
        Some(location)
    }

    pub(crate) fn send_all(
        &mut self,
        context: &Context,
        step: &Step,
        sends: &[PeerMessage],
        from: Option<Location>,
    ) {
        let peers = step.destinations.iter().filter(|o| matches!(o.buffer, plan::Buffer::Peer(_)));
        assert_eq!(peers.count(), sends.len());
        if let Some(track) = self.nodes[context.at.0 as usize].tracks.get_mut(&context.segment.number)
            && !sends.is_empty()
        {
            track.parts.insert(context.index, sends.len());
        }
        for send in sends {
            let bytes = from.map_or(0, |from| from.bytes);
            let coded = step.destinations.iter().any(|operand| operand.encoding != plan::Encoding::Exact);
            assert!(bytes == send.bytes as usize || coded && bytes < send.bytes as usize);
            let room = if coded { plan::CODED_ROOM } else { 0 };
            assert!(
                bytes <= (self.scenario.plan.tuning.chunk_bytes.max(16) + room) as usize,
                "a message over the chunk size"
            );
            let node = &mut self.nodes[context.at.0 as usize];
            assert!(!node.retired.contains(&context.segment.epoch), "data on retired links");
            *node.wire.entry(context.segment.operation).or_default() += bytes as u64;
            let payload = Payload {
                piece: None,
                source: from,
                channel: context.channel,
                step: context.index,
                sequence: send.sequence,
            };
            let message = Message { header: send.header, control: None };
            self.send(context.at, send.peer, context.segment.epoch, message, Some(payload));
        }
    }

    /// Takes note of a segment at its first step.
    pub(crate) fn begin(
        &mut self,
        at: Participant,
        channel: ChannelId,
        segment: &Segment,
        signature: &Signature,
    ) {
        self.check_epoch(at, segment);
        let retention = self.retention(at, segment, signature);
        let node = &mut self.nodes[at.0 as usize];
        if node.aggregated.get(&channel) == Some(&segment.number) && segment.aggregated.is_none() {
            // Given up to the hosts.
            node.aggregated.remove(&channel);
            node.staging[usize::from(channel.0)].segment = None;
            node.done = node.done.min(segment.number);
            self.statistics.again += 1;
            self.statistics.restored += u64::from(segment.resume.is_some());
            self.statistics.segments -= 1;
        }
        let (kept, [first, last]) =
            node.retained.entry(segment.operation).or_insert((retention, [segment.number; 2]));
        if segment.number < *first {
            // It has its first step after a later one, which may follow another plan.
            (*kept, *first) = (retention, segment.number);
        }
        *last = segment.number.max(*last);
        let staging = &mut node.staging[usize::from(channel.0)];
        if staging.segment == Some(segment.number) {
            return;
        }
        let kept = staging.slots.first().cloned().unwrap_or_default();
        assert!(staging.segment.is_none_or(|before| before < segment.number));
        staging.segment = Some(segment.number);
        let elements = |divisor: &u32| (segment.hi - segment.lo).div_ceil(u64::from(*divisor)) as usize;
        let slots = segment.program.slots.iter();
        let slots =
            slots.map(|divisor| elements(divisor) * signature.dtype.size() + plan::CODED_ROOM as usize);
        staging.slots = slots.map(|bytes| vec![POISON; bytes]).collect();
        if segment.resume.is_some() {
            let nothing: &[u8] = match signature.dtype {
                Dtype::F32 => &[0, 0, 0, 0x80],
                Dtype::Complex128 => &[0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x80],
                dtype => &[0; 8][..dtype.size()],
            };
            let nothing = nothing.repeat((segment.hi - segment.lo) as usize);
            assert_eq!(kept.len(), nothing.len());
            staging.slots.extend([kept, nothing]);
        }
        let uncommitted = segment.program.steps.iter().filter(|step| !step.committed).count();
        node.tracks.insert(segment.number, Track { uncommitted, parts: Default::default() });
        self.statistics.segments += 1;
    }

    /// How an operation's inputs are kept that begins with this segment.
    fn retention(&self, at: Participant, segment: &Segment, signature: &Signature) -> Retention {
        let plan = self.plans.iter().find(|plan| plan.epoch == segment.epoch).unwrap();
        let mut local = self.scenario.group.local(at).iter();
        let in_place = local.any(|rank| {
            let act = self.scenario.scripts[rank.0 as usize].acts.get(segment.operation.0 as usize);
            act.is_some_and(|act| act.in_place)
        });
        plan::retention(&plan.plan, signature, in_place, &plan.tuning)
    }

    /// Inputs that are not kept elsewhere belong to the tenant again only when nobody may need them.
    pub(crate) fn check_retained(&self, at: Participant, operation: OperationId) {
        let kept = self.nodes[at.0 as usize].retained.get(&operation);
        let shared = self.scenario.group.participants() > 1 && self.scenario.hostile.is_none();
        if let Some((Retention::KeepInputs | Retention::HoldOutputs, [_, last])) = kept
            && shared
        {
            assert!(
                self.done_by_all() > *last,
                "operation {operation} ends before everybody has acknowledged it"
            );
        }
    }

    /// Poisons the staging of channels whose segment is over.
    pub(crate) fn release_staging(&mut self, at: Participant) {
        let node = &mut self.nodes[at.0 as usize];
        for (channel, staging) in (0..).map(ChannelId).zip(&mut node.staging) {
            let number = node.core.segment(channel).map(|segment| segment.number);
            if staging.segment.is_some() && number != staging.segment {
                staging.slots.iter_mut().for_each(|slot| slot.fill(POISON));
            }
        }
    }

    pub(crate) fn landed(&self, context: &Context, message: &PeerMessage) -> Location {
        let link = self.nodes[context.at.0 as usize].link(context.segment.epoch, message.peer);
        let place = Place::Landing(link, message.peer.0, context.channel, message.sequence);
        let (operation, segment) = (context.segment.operation, context.segment.number);
        Location { place, operation, segment, offset: 0, bytes: message.bytes as usize }
    }

    pub(crate) fn locate(&self, context: &Context, operand: &Operand, transfer: bool) -> Location {
        let lo = context.segment.lo;
        let size = context.signature.dtype.size() as u64;
        let (start, elements) = context.segment.elements(operand);
        let remote = |rank: Rank| {
            assert!(self.scenario.group.local(context.at).contains(&rank), "another participant's rank");
            let remote = self.scenario.access[rank.0 as usize] == Access::Remote;
            assert_eq!(remote, transfer, "rank {rank}'s memory is reached the wrong way");
        };
        let (place, start) = match operand.buffer {
            plan::Buffer::Input(rank) => {
                remote(rank);
                (Place::Input(rank.0), start)
            }
            plan::Buffer::Output(rank) => {
                remote(rank);
                (Place::Output(rank.0), start)
            }
            plan::Buffer::Staging(slot) => {
                (Place::Staging(context.channel, slot.0), context.segment.offset_in_slot(slot, operand))
            }
            plan::Buffer::Peer(_) => unreachable!("peers have messages, not places"),
        };
        let (operation, segment) = (context.segment.operation, context.segment.number);
        let (offset, bytes) = ((start * size) as usize, (elements * size) as usize);
        let slots = context.segment.program.slots.len() as u16;
        let first = |rank: u32| self.scenario.group.local(context.at).first() == Some(&Rank(rank));
        // What is kept, and what adds nothing, lie after the program's slots.
        let kept = context.segment.resume.and_then(|restored| match place {
            Place::Input(rank) => {
                let of_root = context.signature.collective.traits().input_of == Holders::Root;
                Some(slots + u16::from(!(restored.source && (of_root || first(rank)))))
            }
            Place::Output(_) if restored.completed => Some(slots + 1),
            _ => None,
        });
        if let Some(slot) = kept {
            let place = Place::Staging(context.channel, slot);
            let offset = offset - (lo * size) as usize;
            return Location { place, operation, segment, offset, bytes };
        }
        Location { place, operation, segment, offset, bytes }
    }

    fn memory(&mut self, at: Participant, location: &Location) -> &mut [u8] {
        let node = &mut self.nodes[at.0 as usize];
        let gone = "memory of an operation that has ended is touched";
        let memory: &mut [u8] = match location.place {
            Place::Input(rank) => {
                Tensor::input_mut(self.tensors.get_mut(&(rank, location.operation)).expect(gone))
            }
            Place::Output(rank) => {
                Tensor::output_mut(self.tensors.get_mut(&(rank, location.operation)).expect(gone))
            }
            Place::Staging(channel, slot) => {
                let staging = &mut node.staging[usize::from(channel.0)];
                assert_eq!(staging.segment, Some(location.segment), "staging of a segment that is over");
                &mut staging.slots[usize::from(slot)]
            }
            Place::Landing(epoch, peer, channel, sequence) => {
                let ring = node.landing.get_mut(&(epoch, peer, channel));
                let Some(ring) = ring else {
                    assert!(self.scenario.hostile.is_some(), "nothing has landed there");
                    return &mut [];
                };
                let slot = sequence.0 as usize % ring.len();
                &mut ring[slot].1
            }
        };
        &mut memory[location.offset..location.offset + location.bytes]
    }

    pub(crate) fn read(&mut self, at: Participant, location: &Location) -> Vec<u8> {
        let hostile = self.scenario.hostile.is_some();
        let mut content = self.memory(at, location).to_vec();
        if hostile {
            content.resize(location.bytes, 0);
        }
        content
    }

    pub(crate) fn write(&mut self, at: Participant, location: &Location, content: &[u8]) {
        assert_eq!(location.bytes, content.len(), "source and destination differ in length");
        self.memory(at, location).copy_from_slice(content);
    }

    pub(crate) fn free_landing(&mut self, at: Participant, location: &Location) {
        let hostile = self.scenario.hostile.is_some();
        let Place::Landing(epoch, peer, channel, sequence) = location.place else { return };
        let ring = self.nodes[at.0 as usize].landing.get_mut(&(epoch, peer, channel));
        let Some(ring) = ring else { return };
        let slot = sequence.0 as usize % ring.len();
        let (occupied, memory) = &mut ring[slot];
        assert!(hostile || *occupied, "a message that has not arrived is consumed");
        *occupied = false;
        memory.fill(POISON);
    }

    fn begin_transfer(&mut self, context: &Context, step: &Step) {
        let (source, destination) = (&step.sources[0], &step.destinations[0]);
        let fetch = step.kind == StepKind::Fetch;
        let from = self.locate(context, source, fetch);
        let to = self.locate(context, destination, !fetch);
        self.check_write(context, step, &to);
        if let Some(track) = self.nodes[context.at.0 as usize].tracks.get_mut(&context.segment.number) {
            track.parts.insert(context.index, 1);
        }
        let (at, channel, step) = (context.at, context.channel, context.index);
        let transfer = Box::new(Transfer { at, from, to, channel, step, content: None });
        let wait = self.scenario.weather.wait(&mut self.rng);
        self.at(self.now + wait, if fetch { Event::Fetch(transfer) } else { Event::Store(transfer) });
    }

    /// Half of a fetch or store: first it is read, later it is written and reported.
    pub(crate) fn transfer(&mut self, mut transfer: Box<Transfer>) {
        let node = &self.nodes[transfer.at.0 as usize];
        if !node.alive || node.failure.is_some() || node.closed {
            return;
        }
        match transfer.content.take() {
            None => {
                let content = self.read(transfer.at, &transfer.from);
                transfer.content = Some(match transfer.from.place {
                    Place::Input(rank) => {
                        let acts = &self.scenario.scripts[rank as usize].acts;
                        let signature = acts[transfer.from.operation.0 as usize].signature;
                        memory::scaled(&signature, Rank(rank), content)
                    }
                    _ => content,
                });
                let wait = self.scenario.weather.wait(&mut self.rng);
                self.at(self.now + wait, Event::Fetch(transfer));
            }
            Some(content) => {
                self.write(transfer.at, &transfer.to, &content);
                let input = Input::Completed { channel: transfer.channel, step: transfer.step };
                let wait = self.rng.random_range(0..=self.scenario.weather.delay);
                self.at(self.now + wait, Event::Input(transfer.at, input));
            }
        }
    }

    /// A part of a step has completed.
    pub(crate) fn complete_part(&mut self, at: Participant, channel: ChannelId, step: StepId) {
        let node = &mut self.nodes[at.0 as usize];
        let segment = node.core.segment(channel).expect("a segment that is under way").clone();
        let track = node.tracks.get_mut(&segment.number).unwrap();
        let parts = track.parts.get_mut(&step).expect("a step that is under way");
        *parts -= 1;
        if *parts == 0 {
            track.parts.remove(&step);
            self.step_complete(at, &segment, step);
        }
    }

    pub(crate) fn step_complete(&mut self, at: Participant, segment: &Segment, step: StepId) {
        let node = &mut self.nodes[at.0 as usize];
        if !segment.program.steps[step.0 as usize].committed {
            node.tracks.get_mut(&segment.number).unwrap().uncommitted -= 1;
        }
        self.advance(at);
    }

    /// Counts what is done, from outside.
    pub(crate) fn advance(&mut self, at: Participant) {
        let node = &mut self.nodes[at.0 as usize];
        while node.tracks.get(&node.done).is_some_and(|track| track.uncommitted == 0) {
            node.done = node.done.next();
        }
    }

    pub(crate) fn done_by_all(&self) -> SegmentId {
        self.nodes.iter().map(|node| node.done).min().unwrap_or_default()
    }

    /// What a step waits for has happened.
    fn check_order(&self, context: &Context, step: &Step) {
        let node = &self.nodes[context.at.0 as usize];
        let track = &node.tracks[&context.segment.number];
        assert!(
            step.after.iter().all(|earlier| !track.parts.contains_key(&StepId(*earlier))),
            "a step too early"
        );
        if step.committed && self.scenario.hostile.is_none() {
            assert!(self.done_by_all() > context.segment.number, "committed before everybody is done");
        }
    }

    /// In place, nothing is overwritten that another run of the segment would need.
    pub(crate) fn check_write(&self, context: &Context, step: &Step, location: &Location) {
        let Place::Output(rank) = location.place else { return };
        let tensor = &self.tensors[&(rank, context.segment.operation)];
        let shared = self.scenario.group.participants() > 1;
        let Signature { collective, dtype, count, root, .. } = context.signature;
        // What it decodes to of its own.
        let decodes = || {
            let block = location.offset as u64 / (count * dtype.size() as u64);
            matches!(collective.content(Rank(rank), block as u32, root), BlockContent::Input(Rank(of), _) if of == rank)
        };
        let coded = context.segment.coding.is_some() && location.bytes > 0;
        let overwrites = collective.reduces() || coded && collective.can_be_in_place() && decodes();
        if tensor.output.is_none() && shared && overwrites {
            let copied = context.segment.program.copying > 0;
            assert!(copied || step.committed, "an input in place is overwritten before it may be");
        }
    }

    /// All switch at the same segment, and run every segment under the plan that governs it.
    fn check_epoch(&self, at: Participant, segment: &Segment) {
        if self.scenario.hostile.is_some() {
            return;
        }
        let governing =
            self.nodes[at.0 as usize].switched.iter().rev().find(|(_, from)| **from <= segment.number);
        let epoch = governing.map_or(self.scenario.plan.epoch, |(epoch, _)| *epoch);
        assert_eq!(segment.epoch, epoch, "segment {} runs under another plan", segment.number);
    }

    /// Nobody claims more than is true.
    pub(crate) fn check_acknowledged(&self, from: Participant, to: Participant, header: &Header) {
        if self.scenario.hostile.is_some() {
            return;
        }
        let child = to.0 > 0 && (to.0 - 1) / 4 == from.0;
        let most = if child { self.done_by_all() } else { self.nodes[from.0 as usize].done };
        assert!(header.acknowledged <= most, "{from:?} acknowledges {} of {most}", header.acknowledged);
    }

    /// A rank has got what it should have got, and keeps its input.
    pub(crate) fn check_output(&mut self, rank: Rank, operation: OperationId, tensor: &Tensor) {
        if self.scenario.hostile.is_some() {
            return;
        }
        let acts = |rank: Rank| self.scenario.scripts[rank.0 as usize].acts.get(operation.0 as usize);
        let signature = acts(rank).unwrap().signature;
        let differs = |other| acts(other).is_none_or(|act| act.signature != signature);
        if self.scenario.ranks().any(differs)
            || self.scenario.wrong_count.is_some_and(|(at, ..)| at == operation)
        {
            return;
        }
        let (seed, ranks) = (self.scenario.seed, self.scenario.group.ranks());
        if !self.check_coded(rank, operation, &signature, tensor) {
            let expected = memory::expected(seed, operation, rank, &signature, ranks);
            assert!(
                *tensor.output() == expected,
                "rank {rank} has wrong results of operation {operation}: {signature}"
            );
        }
        if tensor.output.is_some() {
            let input = memory::input(seed, operation, rank, &signature, ranks);
            assert!(tensor.input == input, "rank {rank}'s input of operation {operation} has changed");
        }
    }
}

/// The memory that a step writes first.
fn memory_destination(step: &Step) -> &Operand {
    let memory = |operand: &&Operand| !matches!(operand.buffer, plan::Buffer::Peer(_));
    step.destinations.iter().find(memory).expect("a step that copies to memory")
}
