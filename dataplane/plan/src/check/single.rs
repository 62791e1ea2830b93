//! Runs one participant's program alone. What is agreed on with the others arrives as agreed on, and whatever it sends must be that.

use super::agreed::{AgreedContent, AgreedMessage, Protocol, Results, Sum};
use super::grid::Grid;
use super::machine::{Links, Machine, Message};
use super::values::{Terms, Value, Values};
use super::{CheckError, Fault, Found, Usage};
use crate::plan::{Local, Plan, Request};
use crate::program::{Encoding, MAX_STEP_PEERS, Part, Participant, Program, Stage};
use harmonaize_abi::{BlockContent, Collective, Rank};
use std::collections::{BTreeMap, HashMap, VecDeque};

pub(super) struct SingleCheck<'a> {
    plan: &'a Plan,
    request: Request,
    me: Participant,
    program: &'a Program,
    protocol: Protocol<'a>,
    grid: Grid,
    values: Values,
    machine: Machine,
    ends: Ends,
}

/// This participant's ends of its links, and what it has made.
struct Ends {
    me: Participant,
    collective: Collective,
    ranks: u32,
    /// By link.
    links: BTreeMap<[Participant; 2], Channel>,
    terms: AllTerms,
    /// Sums that were sent, by range of the grid.
    made: HashMap<(Sum, u32), Value>,
    /// By range of the grid: the complete sum of who adds it up, where it is added up by one.
    complete: Vec<Option<Sum>>,
    /// What everybody adds up in pairs.
    leaves: Vec<Sum>,
    /// When the last step happened that talked to anybody.
    clock: u64,
    /// When this step happens, where it talks to anybody.
    step: Option<u64>,
}

/// One link.
struct Channel {
    next: VecDeque<AgreedMessage>,
    /// When the last message was received.
    freed: Option<u64>,
}

/// Sets of ranks of participants that follow one another in the order.
struct AllTerms {
    all: u32,
    set_len: usize,
    /// By position: the ranks of all before it, `set_len` words each.
    before: Vec<u64>,
    /// How often what complete sums are made of was encoded.
    encodings: u32,
}

impl<'a> SingleCheck<'a> {
    /// `Err`: the plan has no such participant.
    pub(super) fn new(
        plan: &'a Plan,
        request: Request,
        me: Participant,
        program: &'a Program,
        local: &Local<'_>,
        grid: Grid,
    ) -> Result<Self, CheckError> {
        let protocol = Protocol::new(plan, request);
        let ends = Ends::new(plan, request, me, &protocol, &grid).ok_or(CheckError::Participant(me))?;
        Ok(Self {
            machine: Machine::new(plan, request, me, program, local, &grid),
            values: Values::new(plan.group().ranks(), request.collective.reduces()),
            plan,
            request,
            me,
            program,
            protocol,
            grid,
            ends,
        })
    }

    /// A peer that something is sent to, if there is one.
    pub(super) fn sends_to(&self) -> Option<Participant> {
        let mut to = self.ends.links.keys().filter(|[from, _]| *from == self.me);
        to.next().map(|[_, to]| *to)
    }

    /// The outcome.
    pub(super) fn finish(mut self) -> Result<Usage, CheckError> {
        let mut committed = false;
        for step in &self.program.steps {
            if step.committed && !core::mem::replace(&mut committed, true) {
                self.machine.acknowledge();
            }
            let wrong = {
                let (participant, step) = (self.me, self.machine.next());
                move |fault| CheckError::Step { participant, step, fault }
            };
            self.ends.step = None;
            self.machine.execute(&mut self.values, &self.grid, &mut self.ends, step).map_err(wrong)?;
        }
        let mut left = self.ends.links.iter().filter(|(_, channel)| !channel.next.is_empty());
        if let Some(([from, to], channel)) = left.next() {
            let (from, to, count) = (*from, *to, channel.next.len());
            return Err(match from == self.me {
                true => CheckError::Unsent { from, to, count },
                false => CheckError::Unreceived { from, to, count },
            });
        }
        self.outputs()?;
        Ok(self.machine.usage(self.program))
    }

    /// Every output of an own rank holds its result, which is that of all other ranks where it must be.
    fn outputs(&mut self) -> Result<(), CheckError> {
        let (plan, collective) = (self.plan, self.request.collective);
        let ranks = plan.group().local(self.me);
        let rank = *ranks.first().ok_or(CheckError::Participant(self.me))?;
        let mut alike = self.alike().ok_or(CheckError::Output { rank, block: 0, found: Found::Different })?;
        let owners = self.owners();
        for rank in ranks.iter().copied() {
            let outputs: Vec<_> = self.machine.output(rank).collect();
            for (block, atom, value) in outputs {
                let wrong = |found| CheckError::Output { rank, block, found };
                let value = value.ok_or(wrong(Found::Nothing))?;
                let reduced = match collective.content(rank, block, self.request.root) {
                    BlockContent::Unwritten => continue,
                    BlockContent::Reduction(of) => of,
                    BlockContent::Input(of, part) => {
                        let leaf = self.values.leaf(of, part, atom);
                        if self.values.plain(value) != leaf {
                            return Err(wrong(Found::Other));
                        }
                        // What all ranks end with must be the same bits.
                        let expected = match owners.get(&of) {
                            _ if !collective.replicates() => value,
                            None => leaf,
                            Some(owner) => {
                                let encoded = self.values.encode(*owner, Stage::Moved, leaf);
                                encoded.map_err(|_| wrong(Found::Different))?
                            }
                        };
                        if value != expected {
                            return Err(wrong(Found::Different));
                        }
                        continue;
                    }
                };
                match self.values.complete(value) {
                    (true, true) if self.values.position(value) == Some((reduced, atom)) => {}
                    (true, false) => return Err(wrong(Found::Unfinished)),
                    _ => return Err(wrong(Found::Other)),
                }
                let expected = alike.get_mut(atom as usize);
                if expected.is_some_and(|expected| *expected.get_or_insert(value) != value) {
                    return Err(wrong(Found::Different));
                }
            }
        }
        Ok(())
    }

    /// Who encodes each rank's input, where that is done once for all.
    fn owners(&self) -> HashMap<Rank, Participant> {
        let collective = self.request.collective;
        let once = collective.replicates() && !collective.reduces();
        if !once || !self.protocol.codes() {
            return HashMap::new();
        }
        let all = (0..self.plan.participants()).map(Participant);
        let ranks = |owner| self.plan.group().local(owner).iter().map(move |rank| (*rank, owner));
        all.flat_map(ranks).collect()
    }

    /// By range of the grid, the reduction that all ranks have; nothing where no other participant has any.
    fn alike(&mut self) -> Option<Vec<Option<Value>>> {
        let collective = self.request.collective;
        if !(collective.replicates() && collective.reduces()) {
            return Some(Vec::new());
        }
        let mut alike = vec![None; self.grid.atoms() as usize];
        match self.protocol.results().ok()? {
            Results::Own => {}
            Results::Alike(sums) => {
                for (atom, result) in (0..).zip(&mut alike) {
                    *result = Some(self.added_up(&sums, atom)?);
                }
            }
            Results::Tree(leaves) => {
                let all = AgreedContent::Tree(0, leaves.len() as u32);
                for (atom, result) in (0..).zip(&mut alike) {
                    let from = self.me;
                    *result = Some(self.ends.symbol(&mut self.values, from, (Encoding::Exact, all), atom)?);
                }
            }
            Results::Once(parts) => {
                for (part, sum, form) in parts {
                    for atom in self.grid.range(part) {
                        let form = (form, AgreedContent::Sum(sum));
                        let value = self.ends.symbol(&mut self.values, sum.by, form, atom)?;
                        *alike.get_mut(atom as usize)? = Some(value);
                    }
                }
                if alike.contains(&None) {
                    return None;
                }
            }
        }
        Some(alike)
    }

    /// Contributions as everybody adds them up: in the order of participants, [`MAX_STEP_PEERS`] at a time.
    fn added_up(&mut self, sums: &[Sum], atom: u32) -> Option<Value> {
        let groups = sums.chunks(MAX_STEP_PEERS);
        let (mut begun, count) = (None, groups.len());
        for (group, number) in groups.zip(1..) {
            let mut sources: Vec<Value> = begun.into_iter().collect();
            for sum in group {
                let form = (Encoding::Exact, AgreedContent::Sum(*sum));
                sources.push(self.ends.symbol(&mut self.values, sum.by, form, atom)?);
            }
            begun = Some(self.values.reduce(&sources, number == count).ok()?);
        }
        begun
    }
}

impl Ends {
    fn new(
        plan: &Plan,
        request: Request,
        me: Participant,
        protocol: &Protocol<'_>,
        grid: &Grid,
    ) -> Option<Self> {
        let (position, all) = (plan.position(me)?, plan.participants());
        let mut links = BTreeMap::new();
        for distance in 1..all {
            let back = plan.at(position, all - distance).ok()?;
            let next = plan.at(position, distance).ok()?;
            let before = (u64::from(position) + u64::from(all - distance)) % u64::from(all);
            for (link, messages) in [
                ([me, next], protocol.messages(position, distance).ok()?),
                ([back, me], protocol.messages(before as u32, distance).ok()?),
            ] {
                if !messages.is_empty() {
                    links.insert(link, Channel { next: messages.into(), freed: None });
                }
            }
        }
        let terms = AllTerms::new(plan, request, protocol);
        let (collective, ranks) = (request.collective, plan.group().ranks());
        let (mut complete, mut leaves) = (vec![None; grid.atoms() as usize], Vec::new());
        if collective.replicates() && collective.reduces() {
            match protocol.results().ok()? {
                Results::Once(parts) => {
                    for (part, sum, _) in parts {
                        for atom in grid.range(part) {
                            *complete.get_mut(atom as usize)? = Some(sum);
                        }
                    }
                }
                Results::Tree(sums) => leaves = sums,
                Results::Own | Results::Alike(_) => {}
            }
        }
        let (made, clock, step) = (HashMap::new(), 0, None);
        Some(Self { me, collective, ranks, links, terms, made, complete, leaves, clock, step })
    }

    /// The next message over a link, of which one end is here, if the time for it has come. Steps follow the times that are agreed on, and
    /// so does whatever else an end waits for: so nobody can wait for himself.
    fn next(&mut self, link: [Participant; 2], other: Participant) -> Result<AgreedMessage, Fault> {
        let unagreed = if link == [self.me, other] { Fault::Unagreed(other) } else { Fault::Message(other) };
        let channel = self.links.get_mut(&link).ok_or_else(|| unagreed.clone())?;
        let agreed = channel.next.pop_front().ok_or(unagreed)?;
        let now = if link == [self.me, other] { agreed.sent } else { agreed.received };
        let ordered = agreed.sent < agreed.received && channel.freed.is_none_or(|freed| freed < agreed.sent);
        let timely = now >= self.clock && *self.step.get_or_insert(now) == now;
        if !ordered || !timely {
            return Err(Fault::Untimely(other));
        }
        channel.freed = Some(agreed.received);
        self.clock = now;
        Ok(agreed)
    }

    /// What a participant's message holds of a range of the grid, in its form. Nothing if it is an own sum that was never sent.
    fn symbol(
        &self,
        values: &mut Values,
        from: Participant,
        (form, holds): (Encoding, AgreedContent),
        atom: u32,
    ) -> Option<Value> {
        let plain = match (holds, self.sum(holds, atom)) {
            (_, Some(sum)) if sum.by == self.me => *self.made.get(&(sum, atom))?,
            (_, Some(sum)) => values.made(sum, atom, &self.terms.of(sum, &self.terms.set(sum))),
            (AgreedContent::Input(rank, block), None) => values.leaf(rank, block, atom),
            (AgreedContent::Tree(first, leaves), None) if leaves > 1 => {
                let form = Encoding::Exact;
                let mut half =
                    |first| self.symbol(values, from, (form, AgreedContent::Tree(first, leaves / 2)), atom);
                let halves = [half(first)?, half(first + leaves / 2)?];
                values.reduce(&halves, leaves as usize == self.leaves.len()).ok()?
            }
            _ => return None,
        };
        match form {
            Encoding::Exact => Some(plain),
            Encoding::Coded(stage) => values.encode(from, stage, plain).ok(),
        }
    }

    /// The named sum that a message holds of a range of the grid.
    fn sum(&self, holds: AgreedContent, atom: u32) -> Option<Sum> {
        match holds {
            AgreedContent::Sum(sum) => Some(sum),
            AgreedContent::Complete => *self.complete.get(atom as usize)?,
            AgreedContent::Tree(leaf, 1) => self.leaves.get(leaf as usize).copied(),
            AgreedContent::Nothing | AgreedContent::Input(..) | AgreedContent::Tree(..) => None,
        }
    }

    /// Which count the length of what a message holds follows from.
    fn count_of(&self, holds: AgreedContent) -> u32 {
        match holds {
            AgreedContent::Nothing => 0,
            AgreedContent::Input(rank, block) => self.collective.count_of_input(rank, block, self.ranks),
            AgreedContent::Sum(sum) => sum.block,
            AgreedContent::Complete | AgreedContent::Tree(..) => 0,
        }
    }

    /// Notes that what is sent is what is agreed to be of that name. It must be able to be that, and nothing
    /// else was yet.
    fn name(&mut self, values: &Values, sum: Sum, atom: u32, value: Value) {
        let set = self.terms.set(sum);
        let plain = values.plain(value);
        if values.has(plain, (sum.block, atom), &self.terms.of(sum, &set)) {
            self.made.entry((sum, atom)).or_insert(plain);
        }
    }
}

impl Links for Ends {
    fn receive(
        &mut self,
        values: &mut Values,
        grid: &Grid,
        [from, to]: [Participant; 2],
    ) -> Result<Message, Fault> {
        let agreed = self.next([from, to], from)?;
        let AgreedMessage { index, of, encoding: form, content: holds, .. } = agreed;
        let mut atoms = grid.range(Part { block: 0, index, of });
        let content = match holds {
            AgreedContent::Nothing => None,
            _ => Some(
                atoms
                    .try_fold(Vec::new(), |mut content, atom| {
                        content.push(self.symbol(values, from, (form, holds), atom)?);
                        Some(content)
                    })
                    .ok_or(Fault::Message(from))?,
            ),
        };
        Ok(Message { block: self.count_of(holds), index, of, encoding: form, content })
    }

    fn send(
        &mut self,
        values: &mut Values,
        grid: &Grid,
        [from, to]: [Participant; 2],
        message: Message,
    ) -> Result<(), Fault> {
        let AgreedMessage { index, of, encoding: form, content: holds, .. } = self.next([from, to], to)?;
        let unagreed = Fault::Unagreed(to);
        let block = self.count_of(holds);
        if (message.block, message.index, message.of, message.encoding) != (block, index, of, form) {
            return Err(unagreed);
        }
        let content = match (holds, message.content) {
            (AgreedContent::Nothing, None) => return Ok(()),
            (AgreedContent::Nothing, Some(_)) | (_, None) => return Err(unagreed),
            (_, Some(content)) => content,
        };
        let atoms = grid.range(Part { block: 0, index, of });
        if atoms.len() != content.len() {
            return Err(unagreed);
        }
        for (atom, value) in atoms.zip(content) {
            if let Some(sum) = self.sum(holds, atom).filter(|sum| sum.by == from) {
                self.name(values, sum, atom, value);
            }
            if self.symbol(values, from, (form, holds), atom) != Some(value) {
                return Err(unagreed);
            }
        }
        Ok(())
    }
}

impl AllTerms {
    fn new(plan: &Plan, request: Request, protocol: &Protocol<'_>) -> Self {
        let reduces = request.collective.reduces();
        let set_len = if reduces { plan.group().ranks().div_ceil(64) as usize } else { 0 };
        let mut before = vec![0; set_len];
        for each in plan.order() {
            let start = before.len() - set_len;
            before.extend_from_within(start..);
            for rank in plan.group().local(*each) {
                if let Some(word) = before.get_mut(start + set_len + (rank.0 / 64) as usize) {
                    *word |= 1 << (rank.0 % 64);
                }
            }
        }
        Self { all: plan.participants(), set_len, before, encodings: u32::from(protocol.codes()) }
    }

    /// The ranks of all before a position.
    fn before(&self, position: u32) -> &[u64] {
        let start = position as usize * self.set_len;
        self.before.get(start..start + self.set_len).unwrap_or(&[])
    }

    /// The ranks of a sum's participants, counted round the ring.
    fn set(&self, sum: Sum) -> Vec<u64> {
        let (first, behind) = sum.rack.unwrap_or((0, self.all));
        let end = u64::from(sum.start) + u64::from(sum.count);
        let inside = |start: u32, end: u32| {
            let pairs = self.before(end).iter().zip(self.before(start));
            pairs.map(|(with, without)| with & !without)
        };
        match end.checked_sub(u64::from(behind)) {
            None => inside(sum.start, end as u32).collect(),
            Some(round) => {
                let wrapped = inside(first, first.saturating_add(round as u32));
                inside(sum.start, behind).zip(wrapped).map(|(some, more)| some | more).collect()
            }
        }
    }

    fn of<'a>(&self, sum: Sum, set: &'a [u64]) -> Terms<'a> {
        let last = sum.count == self.all;
        Terms { set, last, encodings: if last { self.encodings } else { 0 } }
    }
}
