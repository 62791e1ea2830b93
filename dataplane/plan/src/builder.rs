//! Puts a program together: numbers slots and steps, and makes each step wait for those whose staging it touches.

use crate::plan::{Local, PlanError};
use crate::program::{
    Access, Buffer, Encoding, MAX_SOURCES, Operand, Part, Participant, Program, Slot, Stage, Step, StepKind,
};
use harmonaize_abi::Rank;
use std::collections::VecDeque;

/// A program under construction.
#[derive(Default)]
pub(crate) struct Builder {
    steps: Vec<Step>,
    slots: Vec<u32>,
    unfinished: Vec<Unfinished>,
    copying: u32,
    committed: bool,
}

/// Steps that touch a slot and were not yet waited for, each with the part that it touches.
#[derive(Default)]
struct Unfinished {
    /// Of how many parts the slot holds one.
    divisor: u32,
    reads: Vec<(u32, Part)>,
    writes: Vec<(u32, Part)>,
}

impl Unfinished {
    /// Takes out those of `steps` that touch what `part` does. Only parts of a whole segment lie side by side wherever they are.
    fn take(divisor: u32, steps: &mut Vec<(u32, Part)>, part: Part) -> impl Iterator<Item = u32> {
        let end = |part: Part| u64::from(part.index) + 1;
        let before = |one: Part, other: Part| {
            end(one) * u64::from(other.of) <= u64::from(other.index) * u64::from(one.of)
        };
        let apart = |other: Part| {
            divisor == 1 && part.block == other.block && (before(part, other) || before(other, part))
        };
        let (kept, taken): (Vec<_>, Vec<_>) = steps.drain(..).partition(|(_, other)| apart(*other));
        *steps = kept;
        taken.into_iter().map(|(step, _)| step)
    }
}

impl Builder {
    /// A new slot of one `divisor`-th of the segment.
    pub(crate) fn slot(&mut self, divisor: u32) -> Result<Slot, PlanError> {
        let number =
            u16::try_from(self.slots.len()).map_err(|_| PlanError::TooLarge(usize::from(u16::MAX)))?;
        self.slots.push(divisor);
        self.unfinished.push(Unfinished { divisor, ..Unfinished::default() });
        Ok(Slot(number))
    }

    /// `count` new slots of one `divisor`-th of the segment each.
    pub(crate) fn slots(&mut self, count: u32, divisor: u32) -> Result<Vec<Slot>, PlanError> {
        (0..count).map(|_| self.slot(divisor)).collect()
    }

    /// Ends the steps that secure the inputs.
    pub(crate) fn end_copying(&mut self) {
        self.copying = self.steps.len() as u32;
    }

    /// Begins the steps that wait for the acknowledgement.
    pub(crate) fn begin_committed(&mut self) {
        self.committed = true;
        for slot in &mut self.unfinished {
            (slot.reads, slot.writes) = (Vec::new(), Vec::new());
        }
    }

    /// The program.
    pub(crate) fn finish(self) -> Result<Program, PlanError> {
        match u32::try_from(self.steps.len()) {
            Ok(_) => Ok(Program { steps: self.steps, slots: self.slots, copying: self.copying }),
            Err(_) => Err(PlanError::TooLarge(u32::MAX as usize)),
        }
    }

    /// Copies a source to destinations.
    pub(crate) fn copy(&mut self, source: Operand, destinations: Vec<Operand>) {
        self.push(StepKind::Move, vec![source], destinations);
    }

    /// Sends a source to a peer.
    pub(crate) fn send(&mut self, source: Operand, to: Participant) {
        self.copy(source, vec![peer(to, source.part)]);
    }

    /// Stores a staged result to the outputs of remote ranks.
    pub(crate) fn store(&mut self, staged: Operand, outputs: &[Operand]) {
        for output in outputs {
            self.push(StepKind::Store, vec![staged], vec![*output]);
        }
    }

    /// A step, made to wait for every unfinished step that it would disturb in staging.
    pub(crate) fn push(&mut self, kind: StepKind, sources: Vec<Operand>, destinations: Vec<Operand>) {
        let index = self.steps.len() as u32;
        let mut after = Vec::new();
        for operand in &sources {
            if let Some(slot) = self.unfinished_at(operand) {
                after.extend(Unfinished::take(slot.divisor, &mut slot.writes, operand.part));
            }
        }
        for operand in &destinations {
            if let Some(slot) = self.unfinished_at(operand) {
                after.extend(Unfinished::take(slot.divisor, &mut slot.writes, operand.part));
                after.extend(Unfinished::take(slot.divisor, &mut slot.reads, operand.part));
            }
        }
        after.sort_unstable();
        after.dedup();
        let sends = destinations.iter().any(|operand| matches!(operand.buffer, Buffer::Peer(_)));
        let memory = destinations.iter().find(|operand| !matches!(operand.buffer, Buffer::Peer(_)));
        let (read, written) = match kind {
            StepKind::Fetch => (None, destinations.first()),
            StepKind::Store => (sources.first(), None),
            _ if sends => (memory.or(sources.first()), None),
            _ => (None, None),
        };
        if let Some((slot, part)) =
            read.and_then(|operand| Some((self.unfinished_at(operand)?, operand.part)))
        {
            slot.reads.push((index, part));
        }
        if let Some((slot, part)) =
            written.and_then(|operand| Some((self.unfinished_at(operand)?, operand.part)))
        {
            slot.writes.push((index, part));
        }
        self.steps.push(Step { kind, sources, destinations, after, committed: self.committed });
    }

    fn unfinished_at(&mut self, operand: &Operand) -> Option<&mut Unfinished> {
        match operand.buffer {
            Buffer::Staging(slot) => self.unfinished.get_mut(usize::from(slot.0)),
            _ => None,
        }
    }
}

/// A part of a rank's input.
pub(crate) fn input(rank: Rank, part: Part) -> Operand {
    Operand::exact(Buffer::Input(rank), part)
}

/// A part in a staging slot. Its block is the number of its count, as that of a message.
pub(crate) fn staged(slot: Slot, part: Part) -> Operand {
    Operand::exact(Buffer::Staging(slot), part)
}

/// A part as a message.
pub(crate) fn peer(participant: Participant, part: Part) -> Operand {
    Operand::exact(Buffer::Peer(participant), part)
}

/// A part in a staging slot, coded.
pub(crate) fn coded(slot: Slot, part: Part, stage: Stage) -> Operand {
    Operand { encoding: Encoding::Coded(stage), ..staged(slot, part) }
}

/// A part as a message, coded.
pub(crate) fn coded_peer(participant: Participant, part: Part, stage: Stage) -> Operand {
    Operand { encoding: Encoding::Coded(stage), ..peer(participant, part) }
}

/// A part of the outputs of those ranks that are reached as `access` says.
pub(crate) fn outputs(ranks: &[Rank], local: &Local<'_>, access: Access, part: Part) -> Vec<Operand> {
    let reached = ranks.iter().filter(|rank| (local.access)(**rank) == access);
    reached.map(|rank| Operand::exact(Buffer::Output(*rank), part)).collect()
}

/// How many of the ranks are remote.
pub(crate) fn remote_count(ranks: &[Rank], local: &Local<'_>) -> usize {
    ranks.iter().filter(|rank| (local.access)(**rank) == Access::Remote).count()
}

/// Slots used in turn.
pub(crate) struct Rotation {
    slots: Vec<Slot>,
    next: usize,
}

impl Rotation {
    pub(crate) fn new(builder: &mut Builder, count: u32, divisor: u32) -> Result<Self, PlanError> {
        Ok(Self { slots: builder.slots(count, divisor)?, next: 0 })
    }

    /// The slot used longest ago.
    pub(crate) fn next(&mut self) -> Result<Slot, PlanError> {
        let slot = self.slots.get(self.next).copied().ok_or(PlanError::Inconsistent)?;
        self.next = (self.next + 1) % self.slots.len();
        Ok(slot)
    }
}

/// Fetches remote inputs ahead of their use, in the order of their use, as far as its slots reach.
pub(crate) struct Feeder {
    queue: VecDeque<(Operand, Part)>,
    ready: VecDeque<Operand>,
    free: VecDeque<Slot>,
}

impl Feeder {
    /// A feeder of `inputs`, each with the same part as staging names it; the first fetches are issued. It has at most `ahead` slots of one
    /// `divisor`-th of the segment.
    pub(crate) fn new(
        builder: &mut Builder,
        inputs: Vec<(Operand, Part)>,
        ahead: usize,
        divisor: u32,
    ) -> Result<Self, PlanError> {
        let slots = builder.slots(inputs.len().min(ahead) as u32, divisor)?;
        let mut feeder = Self { queue: inputs.into(), ready: VecDeque::new(), free: slots.into() };
        feeder.refill(builder);
        Ok(feeder)
    }

    /// The next input, staged.
    pub(crate) fn take(&mut self) -> Result<Operand, PlanError> {
        self.ready.pop_front().ok_or(PlanError::Inconsistent)
    }

    /// Takes back the slots of operands that the steps issued so far have used, and fetches on.
    pub(crate) fn give_back(&mut self, builder: &mut Builder, operands: &[Operand]) {
        for operand in operands {
            if let Buffer::Staging(slot) = operand.buffer {
                self.free.push_back(slot);
            }
        }
        self.refill(builder);
    }

    fn refill(&mut self, builder: &mut Builder) {
        while !self.queue.is_empty() {
            let Some(slot) = self.free.pop_front() else { return };
            let Some((source, part)) = self.queue.pop_front() else { return };
            let target = staged(slot, part);
            builder.push(StepKind::Fetch, vec![source], vec![target]);
            self.ready.push_back(target);
        }
    }
}

/// Reduces what the local ranks contribute to one part after another, at most [`MAX_SOURCES`] sources a step.
pub(crate) struct Contributions<'a> {
    ranks: &'a [Rank],
    local: &'a Local<'a>,
    feeder: Feeder,
    partial: Option<Slot>,
}

impl<'a> Contributions<'a> {
    /// Contributions of `ranks` to `parts`, which must be asked for in this order. `carried`: whether what a peer sends is
    /// reduced along.
    pub(crate) fn new(
        builder: &mut Builder,
        ranks: &'a [Rank],
        local: &'a Local<'a>,
        parts: &[Part],
        carried: bool,
    ) -> Result<Self, PlanError> {
        let divisor = parts.first().map_or(1, |part| part.of);
        let remote = ranks.iter().filter(|rank| (local.access)(**rank) == Access::Remote);
        let fetch = |part: &Part, rank: &Rank| (input(*rank, *part), *part);
        let fetches =
            parts.iter().flat_map(|part| remote.clone().map(move |rank| fetch(part, rank))).collect();
        let ahead = 2 * remote_count(ranks, local).min(MAX_SOURCES);
        let feeder = Feeder::new(builder, fetches, ahead, divisor)?;
        let several = ranks.len() + usize::from(carried) > MAX_SOURCES;
        let partial = if several { Some(builder.slot(divisor)?) } else { None };
        Ok(Self { ranks, local, feeder, partial })
    }

    /// Whether one operand is all there is, which need be neither reduced nor multiplied.
    pub(crate) fn single(&self) -> bool {
        self.ranks.len() == 1 && !self.local.scaled
    }

    /// Brings all contributions to `part` together in `destinations`; the only one as it is.
    pub(crate) fn pass_on(
        &mut self,
        builder: &mut Builder,
        part: Part,
        destinations: Vec<Operand>,
    ) -> Result<(), PlanError> {
        let [rank] = self.ranks else { return self.reduce(builder, None, part, false, destinations) };
        let source = self.operand(*rank, part)?;
        builder.copy(source, destinations);
        self.feeder.give_back(builder, &[source]);
        Ok(())
    }

    /// Reduces `first` and all contributions to `part`, in this order, into `destinations`.
    pub(crate) fn reduce(
        &mut self,
        builder: &mut Builder,
        first: Option<Operand>,
        part: Part,
        last: bool,
        destinations: Vec<Operand>,
    ) -> Result<(), PlanError> {
        let mut sources: Vec<Operand> = first.into_iter().collect();
        let mut used = Vec::new();
        for rank in self.ranks {
            if sources.len() == MAX_SOURCES {
                let partial = staged(self.partial.ok_or(PlanError::Inconsistent)?, part);
                let full = core::mem::replace(&mut sources, vec![partial]);
                builder.push(StepKind::Reduce { last: false }, full, vec![partial]);
                self.feeder.give_back(builder, &used);
                used.clear();
            }
            let source = self.operand(*rank, part)?;
            used.push(source);
            sources.push(source);
        }
        builder.push(StepKind::Reduce { last }, sources, destinations);
        self.feeder.give_back(builder, &used);
        Ok(())
    }

    fn operand(&mut self, rank: Rank, part: Part) -> Result<Operand, PlanError> {
        match (self.local.access)(rank) {
            Access::Mapped => Ok(input(rank, part)),
            Access::Remote => self.feeder.take(),
        }
    }
}
