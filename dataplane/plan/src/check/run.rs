//! Runs all programs together until nobody can go on, and looks at what the outputs then hold.

use super::grid::Grid;
use super::machine::{Links, Machine, Message};
use super::values::{Value, Values};
use super::{CheckError, Fault, Found, Report, Usage, Wait};
use crate::plan::{Local, Plan, Request};
use crate::program::{Buffer, Participant, Program, Step};
use harmonaize_abi::{BlockContent, Rank};
use std::collections::{HashMap, VecDeque};

pub(super) struct Run<'a> {
    plan: &'a Plan,
    request: Request,
    programs: &'a [Program],
    landing_slots: u32,
    grid: Grid,
    values: Values,
    machines: Vec<Machine>,
    /// By participant: whether it may be able to go on.
    queued: Vec<bool>,
    channels: Channels,
    encodings: u32,
}

/// By sender and receiver: messages in landing slots.
#[derive(Default)]
struct Channels(HashMap<(Participant, Participant), VecDeque<Message>>);

impl Links for Channels {
    fn receive(&mut self, _: &mut Values, _: &Grid, [from, to]: [Participant; 2]) -> Result<Message, Fault> {
        let message = self.0.get_mut(&(from, to)).and_then(VecDeque::pop_front);
        message.ok_or(Fault::Message(from))
    }

    fn send(
        &mut self,
        _: &mut Values,
        _: &Grid,
        [from, to]: [Participant; 2],
        message: Message,
    ) -> Result<(), Fault> {
        self.0.entry((from, to)).or_default().push_back(message);
        Ok(())
    }
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
        let machine = |(me, (program, local)): (u32, (&Program, &Local<'_>))| {
            Machine::new(plan, request, Participant(me), program, local, &grid)
        };
        Self {
            machines: (0..).zip(programs.iter().zip(locals)).map(machine).collect(),
            queued: vec![true; programs.len()],
            values: Values::new(plan.group().ranks(), request.collective.reduces()),
            plan,
            request,
            programs,
            landing_slots,
            grid,
            channels: Channels::default(),
            encodings: 0,
        }
    }

    /// The outcome.
    pub(super) fn finish(mut self) -> Result<Report, CheckError> {
        let mut runnable: VecDeque<Participant> = (0..self.plan.participants()).map(Participant).collect();
        while let Some(me) = runnable.pop_front() {
            if let Some(queued) = self.queued.get_mut(me.0 as usize) {
                *queued = false;
            }
            self.advance(me, &mut runnable)?;
        }
        for me in (0..self.plan.participants()).map(Participant) {
            if let Some((step, wait)) = self.stuck(me) {
                return Err(CheckError::Deadlock { participant: me, step, wait });
            }
        }
        let mut left: Vec<_> = self.channels.0.iter().filter(|(_, messages)| !messages.is_empty()).collect();
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
        let step = self.programs.get(me.0 as usize)?.steps.get(machine.next() as usize)?;
        Some((machine.next(), step))
    }

    /// Issues a participant's steps as far as messages and credit reach.
    fn advance(&mut self, me: Participant, runnable: &mut VecDeque<Participant>) -> Result<(), CheckError> {
        while let Some((index, step)) = self.step(me) {
            if step.committed || self.blocked(me, step).is_some() {
                return Ok(());
            }
            self.issue(me, index, step)?;
            for operand in step.sources.iter().chain(&step.destinations) {
                if let Buffer::Peer(peer) = operand.buffer
                    && let Some(queued) = self.queued.get_mut(peer.0 as usize)
                    && !core::mem::replace(queued, true)
                {
                    runnable.push_back(peer);
                }
            }
        }
        Ok(())
    }

    /// What a step must wait for before it can be issued.
    fn blocked(&self, me: Participant, step: &Step) -> Option<Wait> {
        let waiting = |from, to| self.channels.0.get(&(from, to)).map_or(0, VecDeque::len);
        let message = step.sources.iter().find_map(|operand| match operand.buffer {
            Buffer::Peer(peer) if waiting(peer, me) == 0 => Some(Wait::Message(peer)),
            _ => None,
        });
        message.or_else(|| {
            step.destinations.iter().find_map(|operand| match operand.buffer {
                Buffer::Peer(peer) if waiting(me, peer) >= self.landing_slots as usize => {
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
                machine.acknowledge();
            }
            while let Some((index, step)) = self.step(me) {
                self.issue(me, index, step)?;
            }
        }
        Ok(())
    }

    fn issue(&mut self, me: Participant, index: u32, step: &Step) -> Result<(), CheckError> {
        let wrong = |fault| CheckError::Step { participant: me, step: index, fault };
        let machine = self.machines.get_mut(me.0 as usize).ok_or_else(|| wrong(Fault::Buffer))?;
        machine.execute(&mut self.values, &self.grid, &mut self.channels, step).map_err(wrong)
    }

    /// Every output holds its result.
    fn outputs(&mut self) -> Result<(), CheckError> {
        let Request { collective, root, .. } = self.request;
        let mut reference: HashMap<(u32, u32), Value> = HashMap::new();
        for rank in (0..self.plan.group().ranks()).map(Rank) {
            let me = self.plan.group().participant_of(rank).ok_or(CheckError::Root(rank))?;
            let Some(machine) = self.machines.get(me.0 as usize) else { continue };
            for (block, atom, value) in machine.output(rank) {
                let wrong = |found| CheckError::Output { rank, block, found };
                let content = collective.content(rank, block, root);
                let value = value.ok_or(wrong(Found::Nothing))?;
                self.encodings = self.encodings.max(self.values.encodings(value));
                let expected = match content {
                    BlockContent::Unwritten => continue,
                    BlockContent::Input(of, part) => self.values.leaf(of, part, atom),
                    BlockContent::Reduction(of) => {
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
                if collective.replicates() && *reference.entry((block, atom)).or_insert(value) != value {
                    return Err(wrong(Found::Different));
                }
            }
        }
        Ok(())
    }

    fn report(&self) -> Report {
        let usage = self.machines.iter().zip(self.programs).map(|(machine, program)| machine.usage(program));
        let usage: Vec<Usage> = usage.collect();
        let messages = usage.iter().map(|usage| usage.sent).sum();
        Report { usage, messages, encodings: self.encodings }
    }
}
