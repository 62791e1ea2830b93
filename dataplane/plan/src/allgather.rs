//! AllGather: every block goes round the ring, or in one shot from its participant straight to all. Round the ring there is one pass for
//! the first rank of each participant, one for the second, and so on. Either way each participant sends as many bytes. Source: Chan,
//! Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience", 2007.
//!
//! In place an input is its own block of the output, and is written over by itself alone: nothing needs to be held back. Coded it
//! goes in one shot: who has a block encodes it once, and all ranks, its own participant's too, get what the same code decodes to, so that
//! all end with the same bits. What a block's own participant decodes then differs from the input, and in place it is held back.
//!
//! In a pass each participant sends its block, if it has one, before it receives, and what it receives it sends on before it receives again:
//! one landing slot a peer is enough.

use crate::builder::{
    Builder, Feeder, Rotation, coded, coded_peer, input, outputs, peer, remote_count, staged,
};
use crate::one_two_shot::{others, send};
use crate::plan::{Algorithm, Local, Plan, PlanError, Request};
use crate::program::{
    Access, Buffer, Encoding, MAX_STEP_PEERS, Operand, Part, Participant, Program, Retention, Slot, Stage,
    StepKind,
};
use harmonaize_abi::Rank;

/// Slots for each of fetching ahead and storing behind.
const STAGED: u32 = 4;

struct Gather<'a> {
    builder: Builder,
    ranks: &'a [Rank],
    local: &'a Local<'a>,
    /// By local rank, the copy of its input, if they are copied.
    copies: Vec<Slot>,
    /// Brings inputs of remote ranks.
    feeder: Feeder,
    /// Where blocks wait to be stored to remote ranks.
    stores: Option<Rotation>,
    /// Where own blocks are encoded, if they are.
    encoded: Option<Rotation>,
    /// By local rank, its decoded block until the acknowledgement, if it is held back.
    retained: Vec<Slot>,
}

/// The program of the participant at `position`.
pub(crate) fn program(
    plan: &Plan,
    request: Request,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let (group, all) = (plan.group(), plan.participants());
    let codes = request.coded && all > 1;
    if codes && local.retention == Retention::CopyInputs {
        return Err(PlanError::Copied);
    }
    let direct = codes || request.algorithm == Algorithm::OneShot;
    let mut gather = Gather::new(group.local(me), local, all > 1, codes)?;
    let peers = others(plan, position)?;
    let next = if direct { peers.as_slice() } else { peers.get(..1).unwrap_or(&[]) };
    let passes = (0..all).map(|each| group.local(Participant(each)).len()).max().unwrap_or(0);
    for pass in 0..passes {
        gather.own(pass, next)?;
        for back in 1..all {
            let owner = plan.at(position, all - back)?;
            let Some(rank) = group.local(owner).get(pass) else { continue };
            if direct {
                gather.receive(*rank, owner, &[])?;
            } else {
                let on = if back + 1 < all { next } else { &[] };
                gather.receive(*rank, plan.at(position, all - 1)?, on)?;
            }
        }
    }
    gather.finish()
}

impl<'a> Gather<'a> {
    fn new(ranks: &'a [Rank], local: &'a Local<'a>, several: bool, codes: bool) -> Result<Self, PlanError> {
        let mut builder = Builder::default();
        let mut copies = Vec::new();
        if several && local.retention == Retention::CopyInputs {
            for rank in ranks {
                let slot = builder.slot(1)?;
                let kind = match (local.access)(*rank) {
                    Access::Mapped => StepKind::Move,
                    Access::Remote => StepKind::Fetch,
                };
                let (own, copy) = (Part::whole(0), Part::whole(rank.0));
                builder.push(kind, vec![input(*rank, own)], vec![staged(slot, copy)]);
                copies.push(slot);
            }
            builder.end_copying();
        }
        let remote = ranks.iter().filter(|rank| (local.access)(**rank) == Access::Remote);
        let fetches = if copies.is_empty() {
            remote.map(|rank| (input(*rank, Part::whole(0)), Part::whole(rank.0))).collect()
        } else {
            Vec::new()
        };
        let feeder = Feeder::new(&mut builder, fetches, STAGED as usize, 1)?;
        let stores = remote_count(ranks, local) > 0;
        let stores = if stores { Some(Rotation::new(&mut builder, STAGED, 1)?) } else { None };
        let encoded = if codes { Some(Rotation::new(&mut builder, 2, 1)?) } else { None };
        let hold = codes && local.retention == Retention::HoldOutputs;
        let held = if hold { builder.slots(ranks.len() as u32, 1)? } else { Vec::new() };
        Ok(Self { builder, ranks, local, copies, feeder, stores, encoded, retained: held })
    }

    /// Sends the block of the local rank of this pass, if there is one. It also brings the block to the local
    /// outputs.
    fn own(&mut self, pass: usize, peers: &[Participant]) -> Result<(), PlanError> {
        let Some(rank) = self.ranks.get(pass).copied() else { return Ok(()) };
        let block = Part::whole(rank.0);
        let source = match (self.copies.get(pass), (self.local.access)(rank)) {
            (Some(slot), _) => staged(*slot, block),
            (None, Access::Mapped) => input(rank, Part::whole(0)),
            (None, Access::Remote) => self.feeder.take()?,
        };
        match self.encode(source, block, peers)? {
            None => {
                send(&mut self.builder, source, block, peers);
                self.deliver(source, rank, &[])?;
            }
            Some(code) => match self.retained.get(pass) {
                None => self.deliver(code, rank, &[])?,
                Some(slot) => self.builder.copy(code, vec![staged(*slot, block)]),
            },
        }
        if self.copies.is_empty() {
            self.feeder.give_back(&mut self.builder, &[source]);
        }
        Ok(())
    }

    /// Encodes a block once and sends that to all, if blocks are coded; where it lies.
    fn encode(
        &mut self,
        source: Operand,
        block: Part,
        peers: &[Participant],
    ) -> Result<Option<Operand>, PlanError> {
        let Some(slots) = &mut self.encoded else { return Ok(None) };
        let code = coded(slots.next()?, block, Stage::Moved);
        for (index, some) in peers.chunks(MAX_STEP_PEERS).enumerate() {
            let sent = some.iter().map(|peer| coded_peer(*peer, block, Stage::Moved));
            let (from, kept) = if index == 0 { (source, Some(code)) } else { (code, None) };
            self.builder.copy(from, kept.into_iter().chain(sent).collect());
        }
        Ok(Some(code))
    }

    /// Brings a rank's block that a peer sends to the local outputs, and sends it on.
    fn receive(&mut self, rank: Rank, from: Participant, on: &[Participant]) -> Result<(), PlanError> {
        let message = match self.encoded {
            None => peer(from, Part::whole(rank.0)),
            Some(_) => coded_peer(from, Part::whole(rank.0), Stage::Moved),
        };
        self.deliver(message, rank, on)
    }

    /// Brings a rank's block to its place in all local outputs, and sends it on from the first.
    fn deliver(&mut self, source: Operand, rank: Rank, on: &[Participant]) -> Result<(), PlanError> {
        let block = Part::whole(rank.0);
        let mut destinations = outputs(self.ranks, self.local, Access::Mapped, block);
        let exact = source.encoding == Encoding::Exact && matches!(source.buffer, Buffer::Staging(_));
        let waiting = match &mut self.stores {
            None => None,
            Some(_) if exact => Some(source),
            Some(rotation) => {
                let slot = staged(rotation.next()?, block);
                destinations.push(slot);
                Some(slot)
            }
        };
        if let Some(first) = destinations.first().copied() {
            self.builder.copy(source, destinations);
            if !on.is_empty() {
                send(&mut self.builder, first, block, on);
            }
        }
        if let Some(waiting) = waiting {
            self.builder.store(waiting, &outputs(self.ranks, self.local, Access::Remote, block));
        }
        Ok(())
    }

    /// Writes what was held back, if anything was.
    fn finish(mut self) -> Result<Program, PlanError> {
        if !self.retained.is_empty() {
            self.builder.begin_committed();
        }
        for (slot, rank) in self.retained.iter().zip(self.ranks) {
            let block = Part::whole(rank.0);
            let held = staged(*slot, block);
            let mapped = outputs(self.ranks, self.local, Access::Mapped, block);
            if !mapped.is_empty() {
                self.builder.copy(held, mapped);
            }
            self.builder.store(held, &outputs(self.ranks, self.local, Access::Remote, block));
        }
        self.builder.finish()
    }
}
