//! AllReduce: a ring between participants (reduce-scatter, then all-gather), and one many-source step for the ranks within
//! each. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
//!
//! The segment is one chunk per participant. Chunk `c` starts at position `c` of the order, gathers contributions along the
//! ring, is complete at position `c - 1`, and goes round once more; so each chunk is reduced once and all ranks end with the
//! same bits. A message is consumed before the next is sent: a step that needed both a message and credit would deadlock
//! when every peer has but one landing slot.

use crate::builder::{Builder, Contributions, Rotation, input, outputs, peer, remote_count, staged};
use crate::plan::{Local, Plan, PlanError};
use crate::program::{Access, MAX_SOURCES, Operand, Part, Participant, Program, Retention, Slot, StepKind};
use harmonaize_abi::Rank;

/// Parts of a segment where one participant must stage it.
const STAGED_PARTS: u32 = 4;

/// The program of the participant at `position`.
pub(crate) fn program(
    plan: &Plan,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let ranks = plan.group().local(me);
    match plan.participants() {
        1 => within(ranks, ranks, local),
        _ => Ring::program(plan, position, ranks, local),
    }
}

/// One participant: from all inputs straight to the outputs of some ranks, safe in place.
pub(crate) fn within(ranks: &[Rank], to: &[Rank], local: &Local<'_>) -> Result<Program, PlanError> {
    let mut builder = Builder::default();
    let direct = ranks.len() <= MAX_SOURCES && remote_count(ranks, local) == 0;
    let of = if direct { 1 } else { STAGED_PARTS };
    let parts = parts(of);
    let mut landing = Landing::new(&mut builder, to, local, of, false)?;
    let mut contributions = Contributions::new(&mut builder, ranks, local, &parts, false)?;
    for part in parts {
        let landed = landing.next(part)?;
        contributions.reduce(&mut builder, None, part, true, landed.destinations.clone())?;
        landing.store(&mut builder, &landed);
    }
    builder.finish()
}

/// Where complete chunks go: to the outputs, or to slots that hold them until the acknowledgement.
pub(crate) struct Landing<'a> {
    ranks: &'a [Rank],
    local: &'a Local<'a>,
    /// By chunk, where outputs are held back.
    retained: Vec<Slot>,
    /// Where remote ranks' results wait to be stored.
    staging: Option<Rotation>,
}

/// The places of one complete chunk.
pub(crate) struct Landed {
    pub(crate) destinations: Vec<Operand>,
    staged: Option<Operand>,
}

impl<'a> Landing<'a> {
    pub(crate) fn new(
        builder: &mut Builder,
        ranks: &'a [Rank],
        local: &'a Local<'a>,
        of: u32,
        hold: bool,
    ) -> Result<Self, PlanError> {
        let held = if hold { builder.slots(of, of)? } else { Vec::new() };
        let store = !hold && remote_count(ranks, local) > 0;
        let staging = if store { Some(Rotation::new(builder, 3.min(of), of)?) } else { None };
        Ok(Self { ranks, local, retained: held, staging })
    }

    /// Where the complete `part` goes; it can be sent on from the first destination.
    pub(crate) fn next(&mut self, part: Part) -> Result<Landed, PlanError> {
        if let Some(slot) = self.retained.get(part.index as usize) {
            return Ok(Landed { destinations: vec![staged(*slot, part)], staged: None });
        }
        let mut destinations = outputs(self.ranks, self.local, Access::Mapped, part);
        let staged = match &mut self.staging {
            Some(rotation) => Some(staged(rotation.next()?, part)),
            None => None,
        };
        destinations.extend(staged);
        Ok(Landed { destinations, staged })
    }

    /// Stores a chunk to the remote ranks, once it is there.
    pub(crate) fn store(&self, builder: &mut Builder, landed: &Landed) {
        if let Some(staged) = landed.staged {
            builder.store(staged, &outputs(self.ranks, self.local, Access::Remote, staged.part));
        }
    }

    /// Writes what was held back, if anything was.
    pub(crate) fn commit(&self, builder: &mut Builder) {
        if self.retained.is_empty() {
            return;
        }
        builder.begin_committed();
        let of = self.retained.len() as u32;
        for (index, slot) in (0..of).zip(&self.retained) {
            let held = staged(*slot, Part { block: 0, index, of });
            let mapped = outputs(self.ranks, self.local, Access::Mapped, held.part);
            if !mapped.is_empty() {
                builder.copy(held, mapped);
            }
            builder.store(held, &outputs(self.ranks, self.local, Access::Remote, held.part));
        }
    }
}

/// What this participant adds to each part.
pub(crate) enum LocalContribution<'a> {
    /// The local ranks' inputs.
    Inputs(Contributions<'a>),
    /// Their reduction, copied beforehand; by part.
    Copies(Vec<Slot>),
}

impl<'a> LocalContribution<'a> {
    /// Of all parts, which must be asked for in the order of `used`. `carried`: whether what a peer sends is reduced along.
    pub(crate) fn new(
        builder: &mut Builder,
        ranks: &'a [Rank],
        local: &'a Local<'a>,
        used: &[Part],
        carried: bool,
    ) -> Result<Self, PlanError> {
        match local.retention {
            // By part, not in the order of their use: the copies lie in the same slots in every order.
            Retention::CopyInputs => {
                Ok(Self::Copies(copy_inputs(builder, ranks, local, &parts(used.len() as u32))?))
            }
            _ => Ok(Self::Inputs(Contributions::new(builder, ranks, local, used, carried)?)),
        }
    }

    /// Whether it can be sent from where it lies.
    pub(crate) fn is_single(&self) -> bool {
        match self {
            Self::Copies(_) => true,
            Self::Inputs(contributions) => contributions.single(),
        }
    }

    /// Sends it from where it lies.
    pub(crate) fn send(
        &mut self,
        builder: &mut Builder,
        part: Part,
        to: Participant,
    ) -> Result<(), PlanError> {
        match self {
            Self::Copies(slots) => builder.send(copy_of(slots, part)?, to),
            Self::Inputs(contributions) => contributions.pass_on(builder, part, vec![peer(to, part)])?,
        }
        Ok(())
    }

    /// Adds it to what has arrived, if anything should have.
    pub(crate) fn add(
        &mut self,
        builder: &mut Builder,
        arrived: Option<Operand>,
        part: Part,
        last: bool,
        destinations: Vec<Operand>,
    ) -> Result<(), PlanError> {
        match self {
            Self::Copies(slots) => {
                let sources = arrived.into_iter().chain([copy_of(slots, part)?]).collect();
                builder.push(StepKind::Reduce { last }, sources, destinations);
                Ok(())
            }
            Self::Inputs(contributions) => contributions.reduce(builder, arrived, part, last, destinations),
        }
    }
}

fn copy_of(slots: &[Slot], part: Part) -> Result<Operand, PlanError> {
    let slot = slots.get(part.index as usize).ok_or(PlanError::Inconsistent)?;
    Ok(staged(*slot, part))
}

struct Ring<'a> {
    builder: Builder,
    chunks: u32,
    position: u32,
    next: Participant,
    previous: Participant,
    own: LocalContribution<'a>,
    landing: Landing<'a>,
    /// Where incomplete chunks wait to be sent, unless the held slots serve.
    partial: Option<Rotation>,
}

impl<'a> Ring<'a> {
    fn program(
        plan: &Plan,
        position: u32,
        ranks: &'a [Rank],
        local: &'a Local<'a>,
    ) -> Result<Program, PlanError> {
        let chunks = plan.participants();
        let mut builder = Builder::default();
        let used: Vec<Part> = (0..chunks).map(|round| chunk(position, round, chunks)).collect();
        let own = LocalContribution::new(&mut builder, ranks, local, &used, true)?;
        let hold = local.retention == Retention::HoldOutputs;
        let landing = Landing::new(&mut builder, ranks, local, chunks, hold)?;
        let partial = if hold { None } else { Some(Rotation::new(&mut builder, 2, chunks)?) };
        let (next, previous) = (plan.at(position, 1)?, plan.at(position, chunks - 1)?);
        let mut ring = Self { builder, chunks, position, next, previous, own, landing, partial };
        ring.reduce_scatter()?;
        ring.all_gather()?;
        ring.landing.commit(&mut ring.builder);
        ring.builder.finish()
    }

    /// Starts the own chunk, adds to every other as it comes by, and completes the last.
    fn reduce_scatter(&mut self) -> Result<(), PlanError> {
        self.start(chunk(self.position, 0, self.chunks))?;
        for round in 1..self.chunks {
            let part = chunk(self.position, round, self.chunks);
            let arrived = peer(self.previous, part);
            if round + 1 < self.chunks {
                let partial = self.partial(part)?;
                self.own.add(&mut self.builder, Some(arrived), part, false, vec![partial])?;
                self.builder.send(partial, self.next);
            } else {
                let landed = self.landing.next(part)?;
                let destinations = landed.destinations.clone();
                self.own.add(&mut self.builder, Some(arrived), part, true, destinations)?;
                self.pass_on(&landed, true)?;
            }
        }
        Ok(())
    }

    /// Takes every other complete chunk, and passes on all but the last.
    fn all_gather(&mut self) -> Result<(), PlanError> {
        for round in 1..self.chunks {
            let part = chunk(self.position + 1, round, self.chunks);
            let landed = self.landing.next(part)?;
            self.builder.copy(peer(self.previous, part), landed.destinations.clone());
            self.pass_on(&landed, round + 1 < self.chunks)?;
        }
        Ok(())
    }

    fn pass_on(&mut self, landed: &Landed, send: bool) -> Result<(), PlanError> {
        if send {
            let from = *landed.destinations.first().ok_or(PlanError::Inconsistent)?;
            self.builder.send(from, self.next);
        }
        self.landing.store(&mut self.builder, landed);
        Ok(())
    }

    /// Sends the own contribution to a chunk that nobody else has added to.
    fn start(&mut self, part: Part) -> Result<(), PlanError> {
        if self.own.is_single() {
            return self.own.send(&mut self.builder, part, self.next);
        }
        let partial = self.partial(part)?;
        self.own.add(&mut self.builder, None, part, false, vec![partial])?;
        self.builder.send(partial, self.next);
        Ok(())
    }

    /// Where the incomplete `part` waits to be sent.
    fn partial(&mut self, part: Part) -> Result<Operand, PlanError> {
        let slot = match &mut self.partial {
            Some(rotation) => rotation.next()?,
            None => *self.landing.retained.get(part.index as usize).ok_or(PlanError::Inconsistent)?,
        };
        Ok(staged(slot, part))
    }
}

/// The chunk that the participant at `position` deals with in `round`.
fn chunk(position: u32, round: u32, chunks: u32) -> Part {
    let index = (u64::from(position) + u64::from(chunks) - u64::from(round)) % u64::from(chunks);
    Part { block: 0, index: index as u32, of: chunks }
}

/// All parts of a block.
pub(crate) fn parts(of: u32) -> Vec<Part> {
    (0..of).map(|index| Part { block: 0, index, of }).collect()
}

/// Reduces the local inputs into one slot per part.
pub(crate) fn copy_inputs(
    builder: &mut Builder,
    ranks: &[Rank],
    local: &Local<'_>,
    parts: &[Part],
) -> Result<Vec<Slot>, PlanError> {
    let copies = builder.slots(parts.len() as u32, parts.first().map_or(1, |part| part.of))?;
    if let [rank] = ranks {
        let kind = match (local.access)(*rank) {
            Access::Mapped => StepKind::Move,
            Access::Remote => StepKind::Fetch,
        };
        for (slot, part) in copies.iter().zip(parts) {
            builder.push(kind, vec![input(*rank, *part)], vec![staged(*slot, *part)]);
        }
    } else {
        let mut contributions = Contributions::new(builder, ranks, local, parts, false)?;
        for (slot, part) in copies.iter().zip(parts) {
            contributions.reduce(builder, None, *part, false, vec![staged(*slot, *part)])?;
        }
    }
    builder.end_copying();
    Ok(copies)
}
