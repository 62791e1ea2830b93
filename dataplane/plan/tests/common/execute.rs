//! Runs programs on real elements under an adversarial scheduler. Sends, fetches and stores read their memory only when
//! they complete, which is as late as chance has it. Written from the description in `program.rs` alone, as an oracle for
//! the checker.

use super::Case;
use harmonaize_abi::{BlockContent, Rank};
use harmonaize_plan::{
    Buffer, Encoding, Operand, Part, Participant, Program, Request, Stage, Step, StepKind,
};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use std::collections::{HashMap, VecDeque};

/// A sum, and a fingerprint of how it was computed.
type Element = (u64, u64);

const POISON: Element = (0xdead_dead_dead_dead, 0xbad);
/// What completing a reduction multiplies with, in place of an Average's division.
const LAST: u64 = 0x9e37_79b9_7f4a_7c15;

struct Message {
    /// There once it was sent.
    payload: Option<Vec<Element>>,
    elements: usize,
    /// Consumed, but its slot is held until this step of the receiver completes.
    blocked_on: Option<usize>,
}

struct Actor {
    pc: usize,
    /// Steps that were issued and have not completed.
    pending: Vec<usize>,
    done: Vec<bool>,
    slots: Vec<Vec<Element>>,
    /// By slot: of how many parts it holds one.
    divisors: Vec<u32>,
    sequences: HashMap<usize, Vec<(u32, u64)>>,
}

/// A communicator's memories and channels.
pub struct World<'a> {
    case: &'a Case,
    elements: u64,
    landing_slots: usize,
    aliased: bool,
    /// Whether steps complete only when nothing can be issued.
    lazy: bool,
    inputs: Vec<Vec<Element>>,
    outputs: Vec<Vec<Element>>,
    originals: Vec<Vec<Element>>,
    actors: Vec<Actor>,
    /// By sender and receiver: messages from the oldest whose slot is not free, and its number.
    channels: HashMap<(u32, u32), (u64, VecDeque<Message>)>,
}

impl<'a> World<'a> {
    /// Fresh inputs.
    pub fn new(
        case: &'a Case,
        programs: &[Program],
        elements: u64,
        landing_slots: usize,
        aliased: bool,
        random: &mut ChaCha8Rng,
    ) -> Self {
        let ranks = case.plan.group().ranks() as usize;
        let Request { collective, root, .. } = case.request;
        let blocks = |rank: usize| collective.blocks(ranks as u32, Rank(rank as u32), root);
        let lengths = |rank: usize| blocks(rank).map(|blocks| blocks as usize * elements as usize);
        let originals: Vec<Vec<Element>> = (0..ranks)
            .map(|rank| {
                (0..lengths(rank)[0])
                    .map(|_| {
                        let value: u64 = random.random();
                        (value, value)
                    })
                    .collect()
            })
            .collect();
        let mut world = Self {
            case,
            elements,
            landing_slots,
            aliased,
            lazy: random.random(),
            inputs: originals.clone(),
            // In place, the larger tensor stands for both.
            outputs: (0..ranks).map(|rank| vec![POISON; *lengths(rank).iter().max().unwrap()]).collect(),
            originals,
            actors: Vec::new(),
            channels: HashMap::new(),
        };
        world.actors = programs.iter().map(|program| world.actor(program)).collect();
        world
    }

    fn actor(&self, program: &Program) -> Actor {
        Actor {
            pc: 0,
            pending: Vec::new(),
            done: vec![false; program.steps.len()],
            slots: program
                .slots
                .iter()
                .map(|divisor| vec![POISON; self.elements.div_ceil(u64::from((*divisor).max(1))) as usize])
                .collect(),
            divisors: program.slots.iter().map(|divisor| (*divisor).max(1)).collect(),
            sequences: HashMap::new(),
        }
    }

    /// Forgets the attempt: nothing is in flight. Staging with copies stays, and their tenants may have gone on.
    pub fn restart(&mut self, programs: &[Program]) {
        self.channels.clear();
        for (me, program) in programs.iter().enumerate() {
            let fresh = self.actor(program);
            let copying = program.copying as usize;
            let old = core::mem::replace(&mut self.actors[me], fresh);
            let copied = copying > 0 && old.done[..copying].iter().all(|done| *done);
            if copied {
                let actor = &mut self.actors[me];
                actor.slots = old.slots;
                actor.pc = copying;
                actor.done[..copying].fill(true);
                for rank in self.case.plan.group().local(Participant(me as u32)) {
                    if !self.shared(*rank) {
                        self.inputs[rank.0 as usize].fill(POISON);
                    }
                }
            }
        }
    }

    /// Runs all steps that are not committed, or about `limit` events; then, if it got there, the committed ones.
    pub fn run(
        &mut self,
        programs: &[Program],
        limit: Option<usize>,
        random: &mut ChaCha8Rng,
    ) -> Result<bool, String> {
        for committed in [false, true] {
            let mut events = 0;
            loop {
                if !committed && limit.is_some_and(|limit| events >= limit) {
                    return Ok(false);
                }
                events += 1;
                let mut choices = self.choices(programs, committed);
                if self.lazy && choices.iter().any(|(_, what)| what.is_none()) {
                    choices.retain(|(_, what)| what.is_none());
                }
                if choices.is_empty() {
                    break;
                }
                let (me, what) = choices[random.random_range(0..choices.len())];
                match what {
                    None => self.issue(me, &programs[me])?,
                    Some(index) => self.complete(me, index, &programs[me])?,
                }
            }
            for (me, actor) in self.actors.iter().enumerate() {
                if let Some(step) = programs[me].steps.get(actor.pc)
                    && (committed || !step.committed)
                {
                    return Err(format!("participant {me} is stuck at step {}", actor.pc));
                }
            }
            if self.channels.values().any(|(_, messages)| !messages.is_empty()) {
                return Err("messages left over".into());
            }
        }
        Ok(true)
    }

    /// Everything that may happen next.
    fn choices(&self, programs: &[Program], committed: bool) -> Vec<(usize, Option<usize>)> {
        let mut choices = Vec::new();
        for (me, actor) in self.actors.iter().enumerate() {
            choices.extend((0..actor.pending.len()).filter_map(|index| {
                // Messages of a channel are sent in order.
                let step = &programs[me].steps[actor.pending[index]];
                let earlier = |peer| {
                    actor.pending[..index].iter().any(|other| {
                        programs[me].steps[*other].destinations.iter().any(|operand| operand.buffer == peer)
                    })
                };
                let blocked = step
                    .destinations
                    .iter()
                    .any(|operand| matches!(operand.buffer, Buffer::Peer(_)) && earlier(operand.buffer));
                (!blocked).then_some((me, Some(index)))
            }));
            if let Some(step) = programs[me].steps.get(actor.pc)
                && (committed || !step.committed)
                && self.ready(me as u32, actor, step)
            {
                choices.push((me, None));
            }
        }
        choices
    }

    fn ready(&self, me: u32, actor: &Actor, step: &Step) -> bool {
        let after = step.after.iter().all(|after| actor.done[*after as usize]);
        let messages = step.sources.iter().all(|operand| match operand.buffer {
            Buffer::Peer(peer) => self.channels.get(&(peer.0, me)).is_some_and(|(_, messages)| {
                let next = messages.iter().find(|message| message.blocked_on.is_none());
                next.is_some_and(|message| message.payload.is_some())
            }),
            _ => true,
        });
        let credit = step.destinations.iter().all(|operand| match operand.buffer {
            Buffer::Peer(peer) => {
                self.channels.get(&(me, peer.0)).map_or(0, |(_, messages)| messages.len())
                    < self.landing_slots
            }
            _ => true,
        });
        after && messages && credit
    }

    fn issue(&mut self, me: usize, program: &Program) -> Result<(), String> {
        let index = self.actors[me].pc;
        let step = &program.steps[index];
        self.actors[me].pc += 1;
        let sends = step.destinations.iter().any(|operand| matches!(operand.buffer, Buffer::Peer(_)));
        if matches!(step.kind, StepKind::Fetch | StepKind::Store) {
            // Until it completes, anything may be there.
            let length = self.length(step.destinations[0].part);
            self.write(me, &step.destinations[0], &vec![POISON; length])?;
            self.actors[me].pending.push(index);
            return Ok(());
        }
        let mut sources = Vec::new();
        for operand in &step.sources {
            let content = match operand.buffer {
                Buffer::Peer(peer) => self.consume(me, peer, operand, index, sends)?,
                _ => self.read(me, operand)?,
            };
            // What is sent on as it is, is not decoded.
            let kept = step
                .destinations
                .iter()
                .any(|to| to.encoding == operand.encoding && to.encoding != Encoding::Exact);
            sources.push(if kept { content } else { decoded(&content, operand.encoding) });
        }
        let result = match step.kind {
            StepKind::Reduce { last } => Some(reduce(&sources, last)),
            _ => sources.pop(),
        };
        let result = match (step.sources.first(), step.destinations.first()) {
            (Some(from), Some(to)) if from.encoding == Encoding::Exact => {
                result.map(|exact| encoded(&exact, to.encoding, me))
            }
            _ => result,
        };
        for operand in &step.destinations {
            if !matches!(operand.buffer, Buffer::Peer(_)) {
                self.write(me, operand, result.as_ref().ok_or("nothing to write")?)?;
            }
        }
        for operand in &step.destinations {
            if let Buffer::Peer(peer) = operand.buffer {
                let (base, messages) = self.channels.entry((me as u32, peer.0)).or_default();
                let sequence = *base + messages.len() as u64;
                let elements = result.as_ref().map_or(0, Vec::len);
                // A message straight from a landing slot has its payload; any other is read when it is sent.
                let straight = step.destinations.iter().all(|each| matches!(each.buffer, Buffer::Peer(_)))
                    && step.sources.first().is_some_and(|source| matches!(source.buffer, Buffer::Peer(_)));
                let payload = if straight { result.clone() } else { None };
                messages.push_back(Message { payload, elements, blocked_on: None });
                self.actors[me].sequences.entry(index).or_default().push((peer.0, sequence));
            }
        }
        if sends {
            self.actors[me].pending.push(index);
        } else {
            self.actors[me].done[index] = true;
        }
        Ok(())
    }

    fn complete(&mut self, me: usize, pending: usize, program: &Program) -> Result<(), String> {
        let index = self.actors[me].pending.remove(pending);
        let step = &program.steps[index];
        match step.kind {
            StepKind::Fetch | StepKind::Store => {
                let content = self.read(me, &step.sources[0])?;
                self.write(me, &step.destinations[0], &content)?;
            }
            _ => self.sent(me, index, step)?,
        }
        for (base, messages) in self
            .channels
            .iter_mut()
            .filter(|((_, to), _)| *to as usize == me)
            .map(|(_, (base, messages))| (base, messages))
        {
            while messages.front().is_some_and(|message| message.blocked_on == Some(index)) {
                messages.pop_front();
                *base += 1;
            }
        }
        self.actors[me].done[index] = true;
        Ok(())
    }

    fn sent(&mut self, me: usize, index: usize, step: &Step) -> Result<(), String> {
        let memory = step.destinations.iter().find(|operand| !matches!(operand.buffer, Buffer::Peer(_)));
        let from = memory.or(step.sources.first());
        let content = match from {
            Some(operand) if !matches!(operand.buffer, Buffer::Peer(_)) => self.read(me, operand)?,
            _ => Vec::new(),
        };
        for (peer, sequence) in self.actors[me].sequences.remove(&index).unwrap_or_default() {
            let Some((base, messages)) = self.channels.get_mut(&(me as u32, peer)) else { continue };
            let Some(at) = sequence.checked_sub(*base) else { continue };
            if let Some(message) = messages.get_mut(at as usize)
                && message.payload.is_none()
            {
                message.payload = Some(content.clone());
            }
        }
        Ok(())
    }

    fn consume(
        &mut self,
        me: usize,
        peer: Participant,
        operand: &Operand,
        index: usize,
        hold: bool,
    ) -> Result<Vec<Element>, String> {
        let wanted = self.length(operand.part);
        let (base, messages) = self.channels.get_mut(&(peer.0, me as u32)).ok_or("no channel")?;
        let message = messages.iter_mut().find(|message| message.blocked_on.is_none()).ok_or("no message")?;
        let payload = message.payload.clone().ok_or("message not sent")?;
        if payload.len() != wanted && self.case.request.collective.has_data() {
            return Err(format!("participant {me} wants {wanted} elements, {} came", message.elements));
        }
        message.blocked_on = Some(if hold { index } else { usize::MAX });
        while messages.front().is_some_and(|message| message.blocked_on == Some(usize::MAX)) {
            messages.pop_front();
            *base += 1;
        }
        Ok(payload)
    }

    /// Whether a rank's input is its output.
    fn shared(&self, rank: Rank) -> bool {
        self.aliased && self.case.in_place(rank)
    }

    /// Where a rank's input and output begin in the memory that they share.
    fn starts(&self, rank: Rank) -> [usize; 2] {
        let Request { collective, root, .. } = self.case.request;
        let shared = collective.shared_block(rank, root).filter(|_| self.shared(rank));
        let [of_input, of_output] = shared.unwrap_or_default();
        [of_output, of_input].map(|block| block as usize * self.elements as usize)
    }

    fn length(&self, part: Part) -> usize {
        part.elements(0, self.elements).1 as usize
    }

    fn memory(&mut self, me: usize, operand: &Operand) -> Result<&mut [Element], String> {
        let (start, length) = operand.part.elements(0, self.elements);
        let tensor = (u64::from(operand.part.block) * self.elements + start) as usize;
        let (memory, start) = match operand.buffer {
            Buffer::Input(rank) if self.shared(rank) => {
                let [at, _] = self.starts(rank);
                (&mut self.outputs[rank.0 as usize], at + tensor)
            }
            Buffer::Input(rank) => (&mut self.inputs[rank.0 as usize], tensor),
            Buffer::Output(rank) => {
                let [_, at] = self.starts(rank);
                (&mut self.outputs[rank.0 as usize], at + tensor)
            }
            Buffer::Staging(slot) => {
                let slots = &mut self.actors[me];
                let divisor = *slots.divisors.get(usize::from(slot.0)).ok_or("no such slot")?;
                // The part of so many that it lies in is at the slot's start.
                let holds = u64::from(operand.part.index) * u64::from(divisor) / u64::from(operand.part.of);
                let first = self.elements * holds / u64::from(divisor);
                (&mut slots.slots[usize::from(slot.0)], start.saturating_sub(first) as usize)
            }
            Buffer::Peer(_) => return Err("a peer is no memory".into()),
        };
        memory.get_mut(start..start + length as usize).ok_or_else(|| format!("{operand:?} is too small"))
    }

    fn read(&mut self, me: usize, operand: &Operand) -> Result<Vec<Element>, String> {
        self.memory(me, operand).map(|memory| memory.to_vec())
    }

    fn write(&mut self, me: usize, operand: &Operand, content: &[Element]) -> Result<(), String> {
        if let Buffer::Output(rank) = operand.buffer
            && self.shared(rank)
            && content.contains(&POISON)
        {
            let Request { collective, root, coded, .. } = self.case.request;
            let content = collective.content(rank, operand.part.block, root);
            if !coded && matches!(content, BlockContent::Input(of, _) if of == rank) {
                return Ok(()); // Stores its own input in place: the same bytes all the while.
            }
        }
        let memory = self.memory(me, operand)?;
        if memory.len() != content.len() {
            return Err(format!("{operand:?} holds {}, not {}", memory.len(), content.len()));
        }
        memory.copy_from_slice(content);
        Ok(())
    }

    /// In place, a rank's output begins as its input.
    pub fn place_inputs(&mut self) {
        for rank in 0..self.inputs.len() {
            if self.shared(Rank(rank as u32)) {
                let [at, _] = self.starts(Rank(rank as u32));
                let original = &self.originals[rank];
                self.outputs[rank][at..at + original.len()].copy_from_slice(original);
            }
        }
    }

    /// Whether all outputs are right, and the same bits where they must be.
    pub fn verify(&self) -> Result<(), String> {
        let elements = self.elements as usize;
        let Request { collective, root, .. } = self.case.request;
        let output = |rank: usize| {
            let [_, blocks] = collective.blocks(self.outputs.len() as u32, Rank(rank as u32), root);
            let [_, at] = self.starts(Rank(rank as u32));
            &self.outputs[rank][at..at + blocks as usize * elements]
        };
        for rank in 0..self.outputs.len() {
            for (index, (sum, print)) in output(rank).iter().enumerate() {
                let reduced = |at: usize| {
                    let inputs = self.originals.iter().map(|input| input[at].0);
                    inputs.fold(0, u64::wrapping_add).wrapping_mul(LAST)
                };
                let (block, offset) = ((index / elements) as u32, index % elements);
                let at = |block: u32| block as usize * elements + offset;
                let expected = match collective.content(Rank(rank as u32), block, root) {
                    BlockContent::Unwritten => continue,
                    BlockContent::Input(of, block) => self.originals[of.0 as usize][at(block)].0,
                    BlockContent::Reduction(block) => reduced(at(block)),
                };
                if *sum != expected {
                    return Err(format!("rank {rank} element {index} is {sum:#x}, not {expected:#x}"));
                }
                if collective.replicates() && *print != output(0)[index].1 {
                    return Err(format!(
                        "rank {rank} element {index} was computed another way than rank 0's"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// What makes coded elements unlike exact ones, and the stages unlike each other.
fn salt(form: Encoding) -> u64 {
    match form {
        Encoding::Exact => 0,
        Encoding::Coded(Stage::Contribution) => 0x5555_1111_0000_ffff,
        Encoding::Coded(Stage::Result) => 0x1234_5678_9abc_def0,
        Encoding::Coded(Stage::Moved) => 0x0f1e_2d3c_4b5a_6978,
    }
}

/// Nothing is lost of a sum, but everybody rounds in a way of his own.
fn encoded(content: &[Element], form: Encoding, by: usize) -> Vec<Element> {
    let rounded = |print: u64| print.wrapping_mul(LAST).wrapping_add(by as u64);
    let print = |print| if form == Encoding::Exact { print } else { rounded(print) };
    content.iter().map(|(value, of)| (value ^ salt(form), print(*of))).collect()
}

fn decoded(content: &[Element], form: Encoding) -> Vec<Element> {
    content.iter().map(|(value, print)| (value ^ salt(form), *print)).collect()
}

fn reduce(sources: &[Vec<Element>], last: bool) -> Vec<Element> {
    let length = sources.first().map_or(0, Vec::len);
    (0..length)
        .map(|index| {
            let elements = sources.iter().map(|source| source.get(index).copied().unwrap_or(POISON));
            let (sum, print) = elements.fold((0_u64, 17_u64), |(sum, print), (value, other)| {
                (sum.wrapping_add(value), (print ^ other).wrapping_mul(LAST).rotate_left(29))
            });
            if last { (sum.wrapping_mul(LAST), print.wrapping_add(1)) } else { (sum, print) }
        })
        .collect()
}

/// Runs programs once under a random schedule. With a second set of programs it runs the first only part of the way, and
/// then these.
pub fn execute(
    case: &Case,
    programs: &[Program],
    again: Option<&[Program]>,
    random: &mut ChaCha8Rng,
) -> Result<(), String> {
    let elements = [0, 1, 2, 5, 13, 32][random.random_range(0..6)];
    let landing_slots = random.random_range(1..=3);
    let aliased = random.random();
    let mut world = World::new(case, programs, elements, landing_slots, aliased, random);
    world.place_inputs();
    match again {
        Some(again) if case.plan.participants() > 1 => {
            let steps: usize = programs.iter().map(|program| program.steps.len()).sum();
            let limit = random.random_range(0..2 * steps + 1);
            if !world.run(programs, Some(limit), random)? {
                world.restart(again);
                world.run(again, None, random)?;
            }
        }
        _ => {
            world.run(programs, None, random)?;
        }
    }
    world.verify()
}
