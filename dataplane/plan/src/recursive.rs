//! AllReduce in as many exchanges as participants have binary digits. Each is with a partner twice as far along the plan's
//! order.
//!
//! Recursive doubling: partners exchange all that they have, so every participant adds up everything. Recursive halving and doubling:
//! of what is left each exchange halves, either partner adds up one half; then they double what is complete, in the reverse order. It sends
//! the bytes of a ring in fewer messages. Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication
//! operations in MPICH", 2005; Rabenseifner, "Optimization of collective reduction operations", 2004.
//!
//! Where participants are not a power of two, as many as are too many add their contribution to that of the one before in the order, and get the
//! result from there: [`Folding`].
//!
//! Contributions are added in the order of the plan, two neighbours first, then two such pairs, and so on. In doubling every participant
//! computes the same expression; in halving each part is added up by one. So all ranks end with the same bits.
//!
//! No two messages to a peer follow one another but with one of its own between them, which says that the first was consumed: one landing
//! slot a peer is enough.

use crate::allreduce::Landing;
use crate::builder::{Builder, Rotation, peer, staged};
use crate::one_two_shot::LocalContribution;
use crate::plan::{Local, Plan, PlanError};
use crate::program::{Operand, Part, Participant, Program, Retention, Slot, StepKind};

/// Which participants take part in the exchanges, and which go by a neighbour.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Folding {
    all: u32,
    /// Binary digits of the partners' numbers.
    levels: u32,
}

/// What a participant does in an exchange by powers of two.
pub(crate) enum Role {
    /// It takes part under this number, and for its neighbour where it has one: that one's position.
    Partner(u32, Option<u32>),
    /// The participant at this position takes part for it.
    Neighbour(u32),
}

impl Folding {
    /// Of at least one participant.
    pub(crate) fn of(participants: u32) -> Self {
        Self { all: participants, levels: participants.max(1).ilog2() }
    }

    /// How many exchanges there are.
    pub(crate) fn levels(self) -> u32 {
        self.levels
    }

    /// How many take part in the exchanges.
    pub(crate) fn partners(self) -> u32 {
        1 << self.levels
    }

    /// How many go by a neighbour.
    fn neighbours(self) -> u32 {
        self.all - self.partners()
    }

    /// Where a partner stands in the order; for one more than there are, where the order ends.
    pub(crate) fn position(self, partner: u32) -> u32 {
        partner + partner.min(self.neighbours())
    }

    /// What the participant at a position does.
    pub(crate) fn role(self, position: u32) -> Role {
        let neighbours = self.neighbours();
        if position >= 2 * neighbours {
            Role::Partner(position - neighbours, None)
        } else if position.is_multiple_of(2) {
            Role::Partner(position / 2, Some(position + 1))
        } else {
            Role::Neighbour(position - 1)
        }
    }

    /// Positions of all whose contributions so many partners have together, from a first one on. Returns where they begin, and
    /// how many.
    pub(crate) fn span(self, first: u32, partners: u32) -> (u32, u32) {
        let start = self.position(first);
        (start, self.position(first + partners) - start)
    }

    /// The part that a partner keeps after so many exchanges in which it halves.
    pub(crate) fn owned(partner: u32, exchanges: u32) -> Part {
        let digit = |index: u32, level: u32| 2 * index + (partner >> level & 1);
        Part { block: 0, index: (0..exchanges).fold(0, digit), of: 1 << exchanges }
    }

    /// The partner that adds up a part of so many as there are partners.
    pub(crate) fn owner(self, part: u32) -> u32 {
        (0..self.levels).fold(0, |owner, level| 2 * owner + (part >> level & 1))
    }
}

/// The other half of what a part is half of.
pub(crate) const fn sibling(part: Part) -> Part {
    Part { index: part.index ^ 1, ..part }
}

/// By recursive doubling: the program of the participant at `position`, of several.
pub(crate) fn doubling(
    plan: &Plan,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let mut begun = Begun::new(plan, me, local)?;
    let mut sums = Rotation::new(&mut begun.builder, 2, 1)?;
    let landed = begun.landed()?;
    let Begun { builder, own, whole, .. } = &mut begun;
    let (whole, folding) = (*whole, Folding::of(plan.participants()));
    match folding.role(position) {
        Role::Neighbour(of) => exchange_by(builder, *own, plan.at(of, 0)?, landed.clone()),
        Role::Partner(number, neighbour) => {
            let neighbour = neighbour.map(|position| plan.at(position, 0)).transpose()?;
            let mut sum = *own;
            if let Some(neighbour) = neighbour {
                let to = staged(sums.next()?, whole);
                let sources = vec![sum, peer(neighbour, whole)];
                builder.push(StepKind::Reduce { last: false }, sources, vec![to]);
                sum = to;
            }
            for level in 0..folding.levels() {
                let partner = plan.at(folding.position(number ^ 1 << level), 0)?;
                builder.send(sum, partner);
                let sources = in_order(number >> level & 1 == 0, sum, peer(partner, whole));
                if level + 1 == folding.levels() {
                    builder.push(StepKind::Reduce { last: true }, sources, landed.clone());
                } else {
                    let to = staged(sums.next()?, whole);
                    builder.push(StepKind::Reduce { last: false }, sources, vec![to]);
                    sum = to;
                }
            }
            if let Some(neighbour) = neighbour {
                builder.send(*landed.first().ok_or(PlanError::Inconsistent)?, neighbour);
            }
        }
    }
    begun.finish()
}

/// By recursive halving and doubling: the program of the participant at `position`, of several.
pub(crate) fn halving(
    plan: &Plan,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let folding = Folding::of(plan.participants());
    let levels = folding.levels();
    let mut begun = Begun::new(plan, me, local)?;
    let folded = if folding.neighbours() > 0 { Some(begun.builder.slot(1)?) } else { None };
    let sums = (1..levels).map(|level| begun.builder.slot(1 << level)).collect::<Result<Vec<Slot>, _>>()?;
    let landed = begun.landed()?;
    let Begun { builder, own, whole, .. } = &mut begun;
    let (own, whole) = (*own, *whole);
    let places = |part: Part| landed.iter().map(|place| Operand { part, ..*place }).collect::<Vec<_>>();
    let place = |part: Part| places(part).first().copied().ok_or(PlanError::Inconsistent);
    match folding.role(position) {
        Role::Neighbour(of) => exchange_by(builder, own, plan.at(of, 0)?, landed.clone()),
        Role::Partner(number, neighbour) => {
            let neighbour = neighbour.map(|position| plan.at(position, 0)).transpose()?;
            let partner = |level: u32| plan.at(folding.position(number ^ 1 << level), 0);
            let mut sum = own;
            if let (Some(neighbour), Some(slot)) = (neighbour, folded) {
                let to = staged(slot, whole);
                let sources = vec![own, peer(neighbour, whole)];
                builder.push(StepKind::Reduce { last: false }, sources, vec![to]);
                sum = to;
            }
            for level in 0..levels {
                let (partner, part) = (partner(level)?, Folding::owned(number, level + 1));
                builder.send(Operand { part: sibling(part), ..sum }, partner);
                let kept = Operand { part, ..sum };
                let sources = in_order(number >> level & 1 == 0, kept, peer(partner, part));
                match sums.get(level as usize) {
                    Some(slot) => {
                        sum = staged(*slot, part);
                        builder.push(StepKind::Reduce { last: false }, sources, vec![sum]);
                    }
                    None => builder.push(StepKind::Reduce { last: true }, sources, places(part)),
                }
            }
            for level in (0..levels).rev() {
                let (partner, part) = (partner(level)?, Folding::owned(number, level + 1));
                builder.send(place(part)?, partner);
                builder.copy(peer(partner, sibling(part)), places(sibling(part)));
            }
            if let Some(neighbour) = neighbour {
                builder.send(place(whole)?, neighbour);
            }
        }
    }
    begun.finish()
}

/// What all have that take a segment whole: the own contribution in one place, and where the result goes.
pub(crate) struct Begun<'a> {
    pub(crate) builder: Builder,
    whole: Part,
    pub(crate) own: Operand,
    landing: Option<(Landing<'a>, crate::allreduce::Landed)>,
    local: &'a Local<'a>,
    ranks: &'a [harmonaize_abi::Rank],
}

impl<'a> Begun<'a> {
    pub(crate) fn new(plan: &'a Plan, me: Participant, local: &'a Local<'a>) -> Result<Self, PlanError> {
        let (ranks, whole) = (plan.group().local(me), Part::whole(0));
        let mut builder = Builder::default();
        let mut own = LocalContribution::new(&mut builder, ranks, local, [whole].into_iter())?;
        let own = own.take(&mut builder, whole)?;
        Ok(Self { builder, whole, own, landing: None, local, ranks })
    }

    /// The places of the result.
    pub(crate) fn landed(&mut self) -> Result<Vec<Operand>, PlanError> {
        let hold = self.local.retention == Retention::HoldOutputs;
        let mut landing = Landing::new(&mut self.builder, self.ranks, self.local, 1, hold)?;
        let landed = landing.next(self.whole)?;
        let places = landed.destinations.clone();
        self.landing = Some((landing, landed));
        Ok(places)
    }

    /// Stores the result where it must be stored.
    pub(crate) fn finish(mut self) -> Result<Program, PlanError> {
        let (landing, landed) = self.landing.ok_or(PlanError::Inconsistent)?;
        landing.store(&mut self.builder, &landed);
        landing.commit(&mut self.builder);
        self.builder.finish()
    }
}

/// Hands a contribution to the neighbour that takes part for this participant, and takes the result from there.
fn exchange_by(builder: &mut Builder, own: Operand, neighbour: Participant, places: Vec<Operand>) {
    builder.send(own, neighbour);
    builder.copy(peer(neighbour, own.part), places);
}

/// Own and arrived sum, that of those who stand before first.
fn in_order(own_first: bool, own: Operand, arrived: Operand) -> Vec<Operand> {
    if own_first { vec![own, arrived] } else { vec![arrived, own] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_position_has_one_role_and_every_part_one_owner() {
        for all in 1..=70 {
            let folding = Folding::of(all);
            let mut seen = vec![false; all as usize];
            for position in 0..all {
                match folding.role(position) {
                    Role::Partner(number, neighbour) => {
                        assert_eq!(folding.position(number), position);
                        assert_eq!(folding.span(number, 1), (position, 1 + u32::from(neighbour.is_some())));
                        assert!(!core::mem::replace(&mut seen[position as usize], true));
                        if let Some(neighbour) = neighbour {
                            assert!(!core::mem::replace(&mut seen[neighbour as usize], true));
                            assert!(matches!(folding.role(neighbour), Role::Neighbour(of) if of == position));
                        }
                        let part = Folding::owned(number, folding.levels());
                        assert_eq!((folding.owner(part.index), part.of), (number, folding.partners()));
                    }
                    Role::Neighbour(of) => assert_eq!(of + 1, position),
                }
            }
            assert!(seen.iter().all(|seen| *seen), "{all}");
            assert_eq!(folding.span(0, folding.partners()), (0, all));
        }
    }
}
