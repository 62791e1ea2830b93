//! Runs all programs together until nobody can go on, and looks at what the outputs then hold.

use super::grid::Grid;
use super::memory::{Content, Memory};
use super::values::{Value, Values};
use super::{CheckError, Fault, Found, Report, Usage, Wait};
use crate::plan::{Local, Plan, Request};
use crate::program::{Form, Operand, Participant, Place, Program, Step, StepKind};
use harmonaize_abi::{Collective, Rank};
use std::collections::{HashMap, VecDeque};

pub(super) struct Run<'a> {
    plan: &'a Plan,
    request: Request,
    programs: &'a [Program],
    landing_slots: u32,
    grid: Grid,
    values: Values,
    machines: Vec<Machine>,
    /// By sender and receiver: messages in landing slots.
    channels: HashMap<(Participant, Participant), VecDeque<Message>>,
    encodings: u32,
}

struct Machine {
    memory: Memory,
    next: u32,
    committed: bool,
    sent: u64,
    received: u64,
    queued: bool,
}

struct Message {
    index: u32,
    of: u32,
    form: Form,
    /// `None`: an empty message.
    content: Option<Content>,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        request: Request,
        programs: &'a [Program],
        locals: &[Local<'_>],
        landing_slots: u32,
        grid: Grid,
    ) -> Self {
        let machine = |(me, (program, local)): (u32, (&Program, &Local<'_>))| Machine {
            memory: Memory::new(plan, request, Participant(me), program, local, &grid),
            next: 0,
            committed: false,
            sent: 0,
            received: 0,
            queued: true,
        };
        Self {
            machines: (0..).zip(programs.iter().zip(locals)).map(machine).collect(),
            values: Values::new(plan.group().ranks(), request.collective.reduces()),
            plan,
            request,
            programs,
            landing_slots,
            grid,
            channels: HashMap::new(),
            encodings: 0,
        }
    }

    /// The verdict.
    pub(super) fn finish(mut self) -> Result<Report, CheckError> {
        let mut runnable: VecDeque<Participant> = (0..self.plan.participants()).map(Participant).collect();
        while let Some(me) = runnable.pop_front() {
            if let Some(machine) = self.machines.get_mut(me.0 as usize) {
                machine.queued = false;
            }
            self.advance(me, &mut runnable)?;
        }
        for me in (0..self.plan.participants()).map(Participant) {
            if let Some((step, wait)) = self.stuck(me) {
                return Err(CheckError::Deadlock { participant: me, step, wait });
            }
        }
        let mut left: Vec<_> = self.channels.iter().filter(|(_, messages)| !messages.is_empty()).collect();
        left.sort_by_key(|(channel, _)| **channel);
        if let Some(((from, to), messages)) = left.first() {
            return Err(CheckError::Unreceived { from: *from, to: *to, count: messages.len() });
        }
        self.commit()?;
        self.outputs()?;
        Ok(self.report())
    }

    fn step(&self, me: Participant) -> Option<(u32, &'a Step)> {
        let machine = self.machines.get(me.0 as usize)?;
        let step = self.programs.get(me.0 as usize)?.steps.get(machine.next as usize)?;
        Some((machine.next, step))
    }

    /// Issues a participant's steps as far as messages and credit reach.
    fn advance(&mut self, me: Participant, runnable: &mut VecDeque<Participant>) -> Result<(), CheckError> {
        while let Some((index, step)) = self.step(me) {
            if step.committed || self.blocked(me, step).is_some() {
                return Ok(());
            }
            self.issue(me, index, step)?;
            for operand in step.sources.iter().chain(&step.destinations) {
                if let Place::Peer(peer) = operand.place
                    && let Some(machine) = self.machines.get_mut(peer.0 as usize)
                    && !core::mem::replace(&mut machine.queued, true)
                {
                    runnable.push_back(peer);
                }
            }
        }
        Ok(())
    }

    /// What a step must wait for before it can be issued.
    fn blocked(&self, me: Participant, step: &Step) -> Option<Wait> {
        let waiting = |from, to| self.channels.get(&(from, to)).map_or(0, VecDeque::len);
        let message = step.sources.iter().find_map(|operand| match operand.place {
            Place::Peer(peer) if waiting(peer, me) == 0 => Some(Wait::Message(peer)),
            _ => None,
        });
        message.or_else(|| {
            step.destinations.iter().find_map(|operand| match operand.place {
                Place::Peer(peer) if waiting(me, peer) >= self.landing_slots as usize => {
                    Some(Wait::Credit(peer))
                }
                _ => None,
            })
        })
    }

    fn stuck(&self, me: Participant) -> Option<(u32, Wait)> {
        let (index, step) = self.step(me)?;
        if step.committed { None } else { self.blocked(me, step).map(|wait| (index, wait)) }
    }

    /// Everybody has acknowledged: runs the committed steps.
    fn commit(&mut self) -> Result<(), CheckError> {
        for me in (0..self.plan.participants()).map(Participant) {
            if let Some(machine) = self.machines.get_mut(me.0 as usize) {
                machine.committed = true;
                machine.memory.acknowledge();
            }
            while let Some((index, step)) = self.step(me) {
                self.issue(me, index, step)?;
            }
        }
        Ok(())
    }

    fn issue(&mut self, me: Participant, index: u32, step: &Step) -> Result<(), CheckError> {
        self.execute(me, index, step).map_err(|fault| CheckError::Step {
            participant: me,
            step: index,
            fault,
        })
    }

    /// Carries a step out on symbols, and notes what it goes on using until it completes.
    fn execute(&mut self, me: Participant, index: u32, step: &Step) -> Result<(), Fault> {
        let machine = self.machines.get_mut(me.0 as usize).ok_or(Fault::Place)?;
        machine.next += 1;
        machine.memory.begin(index);
        for after in &step.after {
            machine.memory.complete(*after);
        }
        let mut sources = Vec::with_capacity(step.sources.len());
        for operand in &step.sources {
            let content = match operand.place {
                Place::Peer(peer) => {
                    machine.received += 1;
                    let message = self.channels.get_mut(&(peer, me)).and_then(VecDeque::pop_front);
                    let message = message.ok_or(Fault::Message(peer))?;
                    message.take(operand, step.destinations.is_empty()).ok_or(Fault::Message(peer))?
                }
                _ => machine.memory.read(&mut self.values, &self.grid, index, operand)?,
            };
            sources.push(content);
        }
        let result = match step.kind {
            StepKind::Reduce { last } => Some(reduce(&mut self.values, &sources, last)?),
            _ => sources.pop(),
        };
        let form = match (step.kind, step.sources.first()) {
            (StepKind::Reduce { .. }, _) | (_, None) => Form::Exact,
            (_, Some(source)) => source.form,
        };
        for operand in &step.destinations {
            let content =
                result.as_ref().map(|result| encode(&mut self.values, me, result, form, operand.form));
            let content = content.transpose()?;
            match (operand.place, content) {
                (Place::Peer(peer), content) => {
                    machine.sent += 1;
                    let (index, of) = (operand.part.index, operand.part.of);
                    let message = Message { index, of, form: operand.form, content };
                    self.channels.entry((me, peer)).or_default().push_back(message);
                }
                (_, Some(content)) => {
                    let committed = machine.committed;
                    machine.memory.write(
                        &mut self.values,
                        &self.grid,
                        index,
                        operand,
                        &content,
                        committed,
                    )?;
                }
                (_, None) => return Err(Fault::Sources),
            }
        }
        note_unfinished(machine, &self.grid, index, step);
        Ok(())
    }

    /// Every output holds its result.
    fn outputs(&mut self) -> Result<(), CheckError> {
        if self.request.collective == Collective::Barrier {
            return Ok(());
        }
        let mut reference: HashMap<(u32, u32), Value> = HashMap::new();
        for rank in (0..self.plan.group().ranks()).map(Rank) {
            let me = self.plan.group().participant_of(rank).ok_or(CheckError::Root(rank))?;
            let Some(machine) = self.machines.get(me.0 as usize) else { continue };
            for (block, atom, value) in machine.memory.output(rank) {
                let wrong = |found| CheckError::Output { rank, block, found };
                let value = value.ok_or(wrong(Found::Nothing))?;
                self.encodings = self.encodings.max(self.values.encodings(value));
                let expected = match self.request.collective {
                    Collective::AllToAll => self.values.leaf(Rank(block), rank.0, atom),
                    Collective::Broadcast => self.values.leaf(self.request.root, 0, atom),
                    Collective::AllGather => self.values.leaf(Rank(block), 0, atom),
                    Collective::AllReduce | Collective::ReduceScatter | Collective::Barrier => {
                        let scattered = self.request.collective == Collective::ReduceScatter;
                        let of = if scattered { rank.0 } else { block };
                        match self.values.complete(value) {
                            (false, _) => return Err(wrong(Found::Other)),
                            (true, false) => return Err(wrong(Found::Unfinished)),
                            (true, true) if self.values.position(value) != Some((of, atom)) => {
                                return Err(wrong(Found::Other));
                            }
                            (true, true) => {}
                        }
                        value
                    }
                };
                if self.values.plain(value) != expected && value != expected {
                    return Err(wrong(Found::Other));
                }
                // What all ranks end with must be the same bits.
                let alike = matches!(self.request.collective, Collective::AllReduce | Collective::AllGather);
                if alike && *reference.entry((block, atom)).or_insert(value) != value {
                    return Err(wrong(Found::Different));
                }
            }
        }
        Ok(())
    }

    fn report(&self) -> Report {
        let usage = self.machines.iter().zip(self.programs).map(|(machine, program)| Usage {
            staging: program.slots.iter().map(|divisor| 1.0 / f64::from((*divisor).max(1))).sum(),
            sent: machine.sent,
            received: machine.received,
        });
        let messages = self.machines.iter().map(|machine| machine.sent).sum();
        Report { usage: usage.collect(), messages, encodings: self.encodings }
    }
}

impl Message {
    /// What the message brings, if it is what the operand expects.
    fn take(self, operand: &Operand, nothing: bool) -> Option<Content> {
        let fits = (self.index, self.of, self.form) == (operand.part.index, operand.part.of, operand.form);
        match self.content {
            Some(content) if fits && !nothing => Some(content),
            None if fits && nothing => Some(Vec::new()),
            _ => None,
        }
    }
}

/// Which memory a step goes on using after it was issued: what it fetches, stores or sends.
fn note_unfinished(machine: &mut Machine, grid: &Grid, index: u32, step: &Step) {
    let is_peer = |operand: &&Operand| matches!(operand.place, Place::Peer(_));
    let sends = step.destinations.iter().any(|operand| is_peer(&operand));
    let memory = step.destinations.iter().find(|operand| !is_peer(operand));
    match step.kind {
        StepKind::Fetch | StepKind::Store => {
            step.sources.iter().for_each(|operand| machine.memory.reading(grid, index, operand));
            step.destinations.iter().for_each(|operand| machine.memory.writing(grid, index, operand));
        }
        StepKind::Move | StepKind::Reduce { .. } if sends => {
            if let Some(operand) = memory.or(step.sources.first()) {
                machine.memory.reading(grid, index, operand);
            }
        }
        StepKind::Move | StepKind::Reduce { .. } => machine.memory.complete(index),
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
    from: Form,
    to: Form,
) -> Result<Content, Fault> {
    match to {
        Form::Coded(stage) if from != to => {
            content.iter().map(|value| values.encode(by, stage, *value)).collect()
        }
        _ => Ok(content.clone()),
    }
}
