//! Small AllReduces and Barriers by direct exchange. It is for sizes at which the number of hops counts and not the number of
//! bytes.
//!
//! One shot: everybody sends its whole contribution to everybody, and each adds all of them up. Two: each adds up the part of
//! the segment that it owns, and sends the sum to all; over `n` participants 2(n-1)/n segments are sent by each, as in a ring, but
//! in two hops. Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.
//!
//! Contributions are added in the order of participants, the same number at a time, whatever the plan's order and whoever adds:
//! so all ranks end with the same bits after one shot, and one shot and two give the same bits.
//!
//! Everything that goes out in a shot goes out before anything of it is received, and no peer gets two messages in a shot: one
//! landing slot a peer is enough.

use crate::allreduce::{Landing, copy_inputs, parts};
use crate::builder::{Builder, Contributions, Rotation, input, peer, staged};
use crate::plan::{Local, Plan, PlanError};
use crate::program::{
    Access, MAX_STEP_PEERS, Operand, Part, Participant, Program, Retention, Slot, StepKind,
};
use harmonaize_abi::Rank;

/// The program of an AllReduce in one shot, or of a Reduce to a root alone. It is that of the participant at
/// `position`, of several.
pub(crate) fn one_shot(
    plan: &Plan,
    root: Option<Rank>,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let (ranks, whole) = (plan.group().local(me), Part::whole(0));
    let mut builder = Builder::default();
    let hold = local.retention == Retention::HoldOutputs;
    let mut own = LocalContribution::new(&mut builder, ranks, local, [whole].into_iter())?;
    let own = own.take(&mut builder, whole)?;
    match root.and_then(|root| plan.group().participant_of(root)) {
        None => send(&mut builder, own, whole, &others(plan, position)?),
        Some(end) if end == me => {}
        Some(end) => {
            builder.send(own, end);
            return builder.finish();
        }
    }
    let to = root.as_ref().map_or(ranks, core::slice::from_ref);
    let mut landing = Landing::new(&mut builder, to, local, 1, hold)?;
    let partial = partial(&mut builder, plan, 1)?;
    let landed = landing.next(whole)?;
    add_up(&mut builder, plan, (me, own), partial, landed.destinations.clone())?;
    landing.store(&mut builder, &landed);
    landing.commit(&mut builder);
    builder.finish()
}

/// An AllReduce in two shots: the program of the participant at `position`, of several.
pub(crate) fn two_shot(
    plan: &Plan,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let (ranks, of) = (plan.group().local(me), plan.participants());
    let part = |owner: Participant| Part { block: 0, index: owner.0, of };
    let peers = others(plan, position)?;
    let mut builder = Builder::default();
    let mut own =
        LocalContribution::new(&mut builder, ranks, local, peers.iter().copied().chain([me]).map(part))?;
    let hold = local.retention == Retention::HoldOutputs;
    let mut landing = Landing::new(&mut builder, ranks, local, of, hold)?;
    for to in &peers {
        let from = own.take(&mut builder, part(*to))?;
        builder.send(from, *to);
    }
    let mine = own.take(&mut builder, part(me))?;
    let partial = partial(&mut builder, plan, of)?;
    let landed = landing.next(mine.part)?;
    add_up(&mut builder, plan, (me, mine), partial, landed.destinations.clone())?;
    send(&mut builder, *landed.destinations.first().ok_or(PlanError::Inconsistent)?, part(me), &peers);
    landing.store(&mut builder, &landed);
    for distance in 1..of {
        let from = plan.at(position, of - distance)?;
        let landed = landing.next(part(from))?;
        builder.copy(peer(from, part(from)), landed.destinations.clone());
        landing.store(&mut builder, &landed);
    }
    landing.commit(&mut builder);
    builder.finish()
}

/// A Barrier in one shot: an empty message from everybody to everybody.
pub(crate) fn barrier(plan: &Plan, position: u32) -> Result<Program, PlanError> {
    let (mut builder, peers) = (Builder::default(), others(plan, position)?);
    for some in peers.chunks(MAX_STEP_PEERS) {
        let messages = some.iter().map(|to| peer(*to, Part::whole(0)));
        builder.push(StepKind::Move, Vec::new(), messages.collect());
    }
    for from in &peers {
        builder.push(StepKind::Move, vec![peer(*from, Part::whole(0))], Vec::new());
    }
    builder.finish()
}

/// What this participant adds to each part.
pub(crate) enum LocalContribution<'a> {
    /// The input of its only rank, sent from where it lies.
    Input(Rank),
    /// What its ranks add, copied beforehand; by part.
    Copies(Vec<Slot>),
    /// The local ranks' inputs, brought together ahead of their use.
    Inputs(Contributions<'a>, Rotation),
}

impl<'a> LocalContribution<'a> {
    /// Of `parts`, which must be asked for in this order.
    pub(crate) fn new(
        builder: &mut Builder,
        ranks: &'a [Rank],
        local: &'a Local<'a>,
        parts: impl Iterator<Item = Part>,
    ) -> Result<Self, PlanError> {
        let parts: Vec<Part> = parts.collect();
        let of = parts.len() as u32;
        match (local.retention, ranks) {
            (Retention::CopyInputs, _) => {
                Ok(Self::Copies(copy_inputs(builder, ranks, local, &self::parts(of))?))
            }
            (_, [rank]) if (local.access)(*rank) == Access::Mapped && !local.scaled => Ok(Self::Input(*rank)),
            _ => {
                let contributions = Contributions::new(builder, ranks, local, &parts, false)?;
                Ok(Self::Inputs(contributions, Rotation::new(builder, of.min(MAX_STEP_PEERS as u32), of)?))
            }
        }
    }

    pub(crate) fn take(&mut self, builder: &mut Builder, part: Part) -> Result<Operand, PlanError> {
        match self {
            Self::Input(rank) => Ok(input(*rank, part)),
            Self::Copies(slots) => {
                let slot = slots.get(part.index as usize).ok_or(PlanError::Inconsistent)?;
                Ok(staged(*slot, part))
            }
            Self::Inputs(contributions, rotation) => {
                let own = staged(rotation.next()?, part);
                contributions.pass_on(builder, part, vec![own])?;
                Ok(own)
            }
        }
    }
}

/// All others, from the next in the plan's order on: no two participants begin with the same.
pub(crate) fn others(plan: &Plan, position: u32) -> Result<Vec<Participant>, PlanError> {
    (1..plan.participants()).map(|distance| plan.at(position, distance)).collect()
}

/// Sends to all of them from one place.
pub(crate) fn send(builder: &mut Builder, from: Operand, part: Part, peers: &[Participant]) {
    for some in peers.chunks(MAX_STEP_PEERS) {
        builder.copy(from, some.iter().map(|to| peer(*to, part)).collect());
    }
}

/// Where a sum waits that takes more than one step.
pub(crate) fn partial(builder: &mut Builder, plan: &Plan, of: u32) -> Result<Option<Slot>, PlanError> {
    let several = plan.participants() as usize > MAX_STEP_PEERS;
    several.then(|| builder.slot(of)).transpose()
}

/// Adds everybody's contribution to a part up, `own` among them.
pub(crate) fn add_up(
    builder: &mut Builder,
    plan: &Plan,
    (me, own): (Participant, Operand),
    partial: Option<Slot>,
    destinations: Vec<Operand>,
) -> Result<(), PlanError> {
    let contribution = |from| if from == me { own } else { peer(from, own.part) };
    let all: Vec<Operand> = (0..plan.participants()).map(Participant).map(contribution).collect();
    let sum = partial.map(|slot| staged(slot, own.part));
    let mut begun = None;
    let mut groups = all.chunks(MAX_STEP_PEERS).peekable();
    while let Some(group) = groups.next() {
        let sources = begun.into_iter().chain(group.iter().copied()).collect();
        if groups.peek().is_none() {
            builder.push(StepKind::Reduce { last: true }, sources, destinations);
            return Ok(());
        }
        let sum = sum.ok_or(PlanError::Inconsistent)?;
        builder.push(StepKind::Reduce { last: false }, sources, vec![sum]);
        begun = Some(sum);
    }
    Err(PlanError::Inconsistent)
}
