//! ReduceScatter along the ring, or in one shot.
//! Every block goes once round the ring, from the participant after its owner to its owner, and gathers contributions on the
//! way: one pass for the first rank of each participant, one for the second, and so on. In one shot it goes from everybody straight to
//! its owner. Either way each participant sends as many bytes. Sources: those of AllReduce, whose first half this is.
//!
//! Along the ring a block is added up in the ring's order, beginning after its owner; in one shot in the order of participants, as AllReduce in
//! one shot and in two. Local ranks' contributions are added up first. Each block is added up once, so there is nothing that ranks could
//! have different bits of.
//!
//! A message is consumed before the next is sent, and in one shot everything of a pass is sent before anything of it is received: one
//! landing slot a peer is enough.

use crate::allreduce::copy_inputs;
use crate::builder::{Builder, Contributions, Rotation, input, peer, remote_count, staged};
use crate::one_two_shot::{add_up, partial};
use crate::plan::{Algorithm, Local, Plan, PlanError};
use crate::program::{Access, Buffer, Operand, Part, Participant, Program, Retention, Slot, StepKind};
use harmonaize_abi::Rank;

/// Slots for sums that wait to be sent, and for results that wait to be stored.
const STAGED: u32 = 3;

/// What this participant adds to each block.
enum LocalContribution<'a> {
    /// The local ranks' inputs, added up as they are used.
    Inputs(Contributions<'a>),
    /// Their sums, copied beforehand; by block.
    Copies(Vec<Slot>),
}

struct Scatter<'a> {
    builder: Builder,
    ranks: &'a [Rank],
    local: &'a Local<'a>,
    own: LocalContribution<'a>,
    /// Where sums wait to be sent.
    outgoing: Option<Rotation>,
    /// By local rank, its result until the acknowledgement, if it is held back.
    retained: Vec<Slot>,
    /// Where results wait to be stored to remote ranks.
    stores: Option<Rotation>,
}

/// The program of the participant at `position`.
pub(crate) fn program(
    plan: &Plan,
    algorithm: Algorithm,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let (group, all) = (plan.group(), plan.participants());
    let direct = algorithm == Algorithm::OneShot && all > 1;
    let passes = (0..all).map(|each| group.local(Participant(each)).len()).max().unwrap_or(0);
    // Blocks in the order in which this participant adds to them, the own ones last in their pass; how far back their owners stand.
    let mut blocks = Vec::new();
    for pass in 0..passes {
        for round in 1..=all {
            let back = if direct && round < all { all - round } else { round };
            let owner = plan.at(position, all - back)?;
            blocks.extend(group.local(owner).get(pass).map(|rank| (back, owner, *rank)));
        }
    }
    let parts: Vec<Part> = blocks.iter().map(|(_, _, rank)| Part::whole(rank.0)).collect();
    let mut scatter = Scatter::new(group.local(me), local, (all, group.ranks(), direct), &parts)?;
    let sum = if direct { partial(&mut scatter.builder, plan, 1)? } else { None };
    let (next, previous) = (plan.at(position, 1)?, plan.at(position, all - 1)?);
    for (back, owner, rank) in blocks {
        let block = Part::whole(rank.0);
        match (direct, back == all) {
            (true, false) => {
                let own = scatter.take(block)?;
                scatter.builder.send(own, owner);
            }
            (true, true) => {
                let own = scatter.take(block)?;
                let landed = scatter.land(rank)?;
                add_up(&mut scatter.builder, plan, (me, own), sum, vec![landed])?;
                scatter.store(rank, landed);
            }
            (false, last) => {
                let arrived = (back > 1).then(|| peer(previous, block));
                scatter.relay(rank, arrived, (!last).then_some(next))?;
            }
        }
    }
    scatter.finish()
}

impl<'a> Scatter<'a> {
    fn new(
        ranks: &'a [Rank],
        local: &'a Local<'a>,
        (participants, blocks, direct): (u32, u32, bool),
        parts: &[Part],
    ) -> Result<Self, PlanError> {
        let mut builder = Builder::default();
        let several = participants > 1;
        let own = if several && local.retention == Retention::CopyInputs {
            // By block, not in the order of their use: the copies lie in the same slots in every order.
            let blocks: Vec<Part> = (0..blocks).map(Part::whole).collect();
            LocalContribution::Copies(copy_inputs(&mut builder, ranks, local, &blocks)?)
        } else {
            LocalContribution::Inputs(Contributions::new(&mut builder, ranks, local, parts, several)?)
        };
        let copied = matches!(own, LocalContribution::Copies(_));
        let direct_input = |rank| (local.access)(rank) == Access::Mapped && !local.scaled;
        let as_it_is = copied || matches!(ranks, [rank] if direct_input(*rank));
        let waits = several && !as_it_is || participants > 2 && !direct;
        let outgoing = if waits { Some(Rotation::new(&mut builder, STAGED, 1)?) } else { None };
        let hold = several && local.retention == Retention::HoldOutputs;
        let held = if hold { builder.slots(ranks.len() as u32, 1)? } else { Vec::new() };
        let stores = !hold && remote_count(ranks, local) > 0;
        let stores = if stores { Some(Rotation::new(&mut builder, STAGED, 1)?) } else { None };
        Ok(Self { builder, ranks, local, own, outgoing, retained: held, stores })
    }

    /// What this participant adds to a block, in one place.
    fn take(&mut self, block: Part) -> Result<Operand, PlanError> {
        if let (LocalContribution::Inputs(_), [rank]) = (&self.own, self.ranks)
            && (self.local.access)(*rank) == Access::Mapped
            && !self.local.scaled
        {
            return Ok(input(*rank, block));
        }
        match &mut self.own {
            LocalContribution::Copies(slots) => {
                let slot = slots.get(block.block as usize).ok_or(PlanError::Inconsistent)?;
                Ok(staged(*slot, block))
            }
            LocalContribution::Inputs(contributions) => {
                let slot = self.outgoing.as_mut().ok_or(PlanError::Inconsistent)?.next()?;
                contributions.pass_on(&mut self.builder, block, vec![staged(slot, block)])?;
                Ok(staged(slot, block))
            }
        }
    }

    /// Adds to what has arrived of a block, if anything should have. It sends the block on or, if complete, brings it to
    /// its output.
    fn relay(
        &mut self,
        rank: Rank,
        arrived: Option<Operand>,
        next: Option<Participant>,
    ) -> Result<(), PlanError> {
        let block = Part::whole(rank.0);
        match (arrived, next) {
            (None, Some(next)) => {
                if let LocalContribution::Inputs(contributions) = &mut self.own
                    && contributions.single()
                {
                    return contributions.pass_on(&mut self.builder, block, vec![peer(next, block)]);
                }
                let own = self.take(block)?;
                self.builder.send(own, next);
            }
            (arrived, Some(next)) => {
                let slot = self.outgoing.as_mut().ok_or(PlanError::Inconsistent)?.next()?;
                let sum = staged(slot, block);
                self.add(arrived, block, false, sum)?;
                self.builder.send(sum, next);
            }
            (arrived, None) => {
                let landed = self.land(rank)?;
                self.add(arrived, block, true, landed)?;
                self.store(rank, landed);
            }
        }
        Ok(())
    }

    fn add(
        &mut self,
        arrived: Option<Operand>,
        block: Part,
        last: bool,
        to: Operand,
    ) -> Result<(), PlanError> {
        match &mut self.own {
            LocalContribution::Inputs(contributions) => {
                contributions.reduce(&mut self.builder, arrived, block, last, vec![to])
            }
            LocalContribution::Copies(slots) => {
                let slot = slots.get(block.block as usize).ok_or(PlanError::Inconsistent)?;
                let sources = arrived.into_iter().chain([staged(*slot, block)]).collect();
                self.builder.push(StepKind::Reduce { last }, sources, vec![to]);
                Ok(())
            }
        }
    }

    /// Where a local rank's result goes first.
    fn land(&mut self, rank: Rank) -> Result<Operand, PlanError> {
        let (whole, block) = (Part::whole(0), Part::whole(rank.0));
        let at = self.ranks.iter().position(|local| *local == rank).ok_or(PlanError::Inconsistent)?;
        if let Some(slot) = self.retained.get(at) {
            return Ok(staged(*slot, block));
        }
        match (self.local.access)(rank) {
            Access::Mapped => Ok(Operand::exact(Buffer::Output(rank), whole)),
            Access::Remote => Ok(staged(self.stores.as_mut().ok_or(PlanError::Inconsistent)?.next()?, block)),
        }
    }

    /// Brings a remote rank's result on to its output, unless it is held back.
    fn store(&mut self, rank: Rank, landed: Operand) {
        if self.retained.is_empty() && (self.local.access)(rank) == Access::Remote {
            self.builder.store(landed, &[Operand::exact(Buffer::Output(rank), Part::whole(0))]);
        }
    }

    /// Writes what was held back, if anything was.
    fn finish(mut self) -> Result<Program, PlanError> {
        if !self.retained.is_empty() {
            self.builder.begin_committed();
        }
        for (slot, rank) in self.retained.iter().zip(self.ranks) {
            let held = staged(*slot, Part::whole(rank.0));
            let output = Operand::exact(Buffer::Output(*rank), Part::whole(0));
            match (self.local.access)(*rank) {
                Access::Mapped => self.builder.copy(held, vec![output]),
                Access::Remote => self.builder.store(held, &[output]),
            }
        }
        self.builder.finish()
    }
}
