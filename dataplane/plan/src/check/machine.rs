//! One participant as it runs. It issues a step on symbols, with its memory and what is at the other end of its
//! links.

use super::grid::Grid;
use super::memory::{Content, Memory};
use super::values::{Value, Values};
use super::{Fault, Usage};
use crate::plan::{Local, Plan, Request};
use crate::program::{Buffer, Encoding, Operand, Part, Participant, Program, Step, StepKind};
use harmonaize_abi::Rank;

/// What goes from one participant to another.
pub(super) struct Message {
    /// Which count its length follows from.
    pub(super) block: u32,
    pub(super) index: u32,
    pub(super) of: u32,
    pub(super) encoding: Encoding,
    /// `None`: an empty message.
    pub(super) content: Option<Content>,
}

/// Links between participants, each `[from, to]`.
pub(super) trait Links {
    /// The next message, if one has arrived.
    fn receive(&mut self, values: &mut Values, grid: &Grid, link: [Participant; 2])
    -> Result<Message, Fault>;

    /// Takes a message.
    fn send(
        &mut self,
        values: &mut Values,
        grid: &Grid,
        link: [Participant; 2],
        message: Message,
    ) -> Result<(), Fault>;
}

pub(super) struct Machine {
    me: Participant,
    memory: Memory,
    next: u32,
    committed: bool,
    sent: u64,
    received: u64,
}

impl Machine {
    pub(super) fn new(
        plan: &Plan,
        request: Request,
        me: Participant,
        program: &Program,
        local: &Local<'_>,
        grid: &Grid,
    ) -> Self {
        let memory = Memory::new(plan, request, me, program, local, grid);
        Self { me, memory, next: 0, committed: false, sent: 0, received: 0 }
    }

    /// The step to issue next.
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// Everybody has acknowledged the segment: committed steps may be issued.
    pub(super) fn acknowledge(&mut self) {
        self.committed = true;
        self.memory.acknowledge();
    }

    /// What a rank's output holds, by block and range of the grid.
    pub(super) fn output(&self, rank: Rank) -> impl Iterator<Item = (u32, u32, Option<Value>)> {
        self.memory.output(rank)
    }

    /// What the program has needed.
    pub(super) fn usage(&self, program: &Program) -> Usage {
        Usage {
            staging: program.slots.iter().map(|divisor| 1.0 / f64::from((*divisor).max(1))).sum(),
            sent: self.sent,
            received: self.received,
        }
    }

    /// Carries out the next step, which is `step`, on symbols, and notes what it goes on using until it completes.
    pub(super) fn execute(
        &mut self,
        values: &mut Values,
        grid: &Grid,
        links: &mut impl Links,
        step: &Step,
    ) -> Result<(), Fault> {
        let (me, index) = (self.me, self.next);
        self.next += 1;
        self.memory.begin(index);
        for after in &step.after {
            self.memory.complete(*after);
        }
        let mut sources = Vec::with_capacity(step.sources.len());
        for operand in &step.sources {
            let content = match operand.buffer {
                Buffer::Peer(peer) => {
                    self.received += 1;
                    let message = links.receive(values, grid, [peer, me])?;
                    message.take(operand, step.destinations.is_empty()).ok_or(Fault::Message(peer))?
                }
                _ => self.memory.read(values, grid, index, operand)?,
            };
            sources.push(content);
        }
        let result = match step.kind {
            StepKind::Reduce { last } => Some(reduce(values, &sources, last)?),
            _ => sources.pop(),
        };
        let form = match (step.kind, step.sources.first()) {
            (StepKind::Reduce { .. }, _) | (_, None) => Encoding::Exact,
            (_, Some(source)) => source.encoding,
        };
        for operand in &step.destinations {
            let content = result.as_ref().map(|result| encode(values, me, result, form, operand.encoding));
            let content = content.transpose()?;
            match (operand.buffer, content) {
                (Buffer::Peer(peer), content) => {
                    self.sent += 1;
                    let Part { block, index, of } = operand.part;
                    let message = Message { block, index, of, encoding: operand.encoding, content };
                    links.send(values, grid, [me, peer], message)?;
                }
                (_, Some(content)) => {
                    self.memory.write(values, grid, index, operand, &content, self.committed)?;
                }
                (_, None) => return Err(Fault::Sources),
            }
        }
        note_unfinished(&mut self.memory, grid, index, step);
        Ok(())
    }
}

impl Message {
    /// What the message brings, if it is what the operand expects.
    fn take(self, operand: &Operand, nothing: bool) -> Option<Content> {
        let part = Part { block: self.block, index: self.index, of: self.of };
        let fits = (part, self.encoding) == (operand.part, operand.encoding);
        match self.content {
            Some(content) if fits && !nothing => Some(content),
            None if fits && nothing => Some(Vec::new()),
            _ => None,
        }
    }
}

/// Which memory a step goes on using after it was issued: what it fetches, stores or sends.
fn note_unfinished(memory: &mut Memory, grid: &Grid, index: u32, step: &Step) {
    let is_peer = |operand: &&Operand| matches!(operand.buffer, Buffer::Peer(_));
    let sends = step.destinations.iter().any(|operand| is_peer(&operand));
    let kept = step.destinations.iter().find(|operand| !is_peer(operand));
    match step.kind {
        StepKind::Fetch | StepKind::Store => {
            step.sources.iter().for_each(|operand| memory.reading(grid, index, operand));
            step.destinations.iter().for_each(|operand| memory.writing(grid, index, operand));
        }
        StepKind::Move | StepKind::Reduce { .. } if sends => {
            if let Some(operand) = kept.or(step.sources.first()) {
                memory.reading(grid, index, operand);
            }
        }
        StepKind::Move | StepKind::Reduce { .. } => memory.complete(index),
    }
}

/// Reduces range by range.
fn reduce(values: &mut Values, sources: &[Content], last: bool) -> Result<Content, Fault> {
    let length = sources.first().map_or(0, Vec::len);
    let mut column = Vec::with_capacity(sources.len());
    let mut result = Vec::with_capacity(length);
    for index in 0..length {
        column.clear();
        for source in sources {
            column.push(*source.get(index).ok_or(Fault::Mixed)?);
        }
        result.push(values.reduce(&column, last)?);
    }
    Ok(result)
}

/// The symbols after a change of form.
fn encode(
    values: &mut Values,
    by: Participant,
    content: &Content,
    from: Encoding,
    to: Encoding,
) -> Result<Content, Fault> {
    match to {
        Encoding::Coded(stage) if from != to => {
            content.iter().map(|value| values.encode(by, stage, *value)).collect()
        }
        _ => Ok(content.clone()),
    }
}
