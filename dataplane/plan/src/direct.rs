//! AllReduce by direct exchange, in two shots. Every participant sends its contribution to each part of the segment straight to
//! the part's owner, which reduces them and sends the result straight to everybody.
//!
//! What is sent is coded. Each element is so encoded twice on its way, whatever the number of participants: as a contribution, and
//! as part of the result, once for all, whose decoded form is what every rank gets, the owner's own included. Between the two it is
//! added up in its exact form. A ring would have to decode, add and encode at every hop.
//!
//! Contributions are encoded some rounds ahead of what is received; every send waits for credit alone, every receive for a
//! message alone, so one landing slot a peer is enough.

use crate::allreduce::Landing;
use crate::builder::{Builder, Contributions, Rotation, coded, coded_peer, staged};
use crate::plan::{Local, Plan, PlanError};
use crate::program::{MAX_STEP_PEERS, Operand, Part, Participant, Program, Retention, Slot, Stage, StepKind};
use harmonaize_abi::Rank;

/// Contributions that are encoded before the first is received.
pub(crate) const AHEAD: u32 = 3;

struct Direct<'a> {
    builder: Builder,
    plan: &'a Plan,
    position: u32,
    me: Participant,
    contributions: Contributions<'a>,
    /// Where several ranks' contribution is reduced before it is encoded.
    local: Option<Slot>,
    /// Encoded contributions until they are sent.
    outgoing: Rotation,
    sum: Slot,
    result: Slot,
}

/// The program of the participant at `position`, of several.
pub(crate) fn program(
    plan: &Plan,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    if local.retention == Retention::CopyInputs {
        return Err(PlanError::Copied);
    }
    let (ranks, of): (&[Rank], u32) = (plan.group().local(me), plan.participants());
    let mut builder = Builder::default();
    let hold = local.retention == Retention::HoldOutputs;
    let landing = Landing::new(&mut builder, ranks, local, of, hold)?;
    let ahead = AHEAD.min(of - 1);
    let outgoing = Rotation::new(&mut builder, ahead, of)?;
    let (sum, result) = (builder.slot(of)?, builder.slot(of)?);
    let part_of = |participant: Participant| Part { block: 0, index: participant.0, of };
    // In the order in which they are used: those that go ahead, the own one, the rest.
    let mut parts =
        (1..of).map(|round| plan.at(position, round).map(part_of)).collect::<Result<Vec<_>, _>>()?;
    parts.insert(ahead as usize, part_of(me));
    let contributions = Contributions::new(&mut builder, ranks, local, &parts, false)?;
    let local = if contributions.single() { None } else { Some(builder.slot(of)?) };
    let direct = Direct { builder, plan, position, me, contributions, local, outgoing, sum, result };
    direct.finish(landing, ahead)
}

impl Direct<'_> {
    fn finish(mut self, mut landing: Landing<'_>, ahead: u32) -> Result<Program, PlanError> {
        let all = self.plan.participants();
        for round in 1..=ahead {
            self.contribute(round)?;
        }
        let own = staged(self.sum, self.part(self.me));
        self.contributions.pass_on(&mut self.builder, own.part, vec![own])?;
        for round in 1..all {
            let from = self.back(round)?;
            let sources = vec![own, coded_peer(from, own.part, Stage::Contribution)];
            self.builder.push(StepKind::Reduce { last: round + 1 == all }, sources, vec![own]);
            if round + ahead < all {
                self.contribute(round + ahead)?;
            }
        }
        self.conclude(own)?;
        let mine = coded(self.result, own.part, Stage::Result);
        self.land(&mut landing, mine)?;
        for round in 1..all {
            let from = self.back(round)?;
            let part = self.part(from);
            self.land(&mut landing, coded_peer(from, part, Stage::Result))?;
        }
        landing.commit(&mut self.builder);
        self.builder.finish()
    }

    /// Encodes the contribution to the part of the participant `round` places on, and sends it there.
    fn contribute(&mut self, round: u32) -> Result<(), PlanError> {
        let to = self.plan.at(self.position, round)?;
        let part = self.part(to);
        let destinations = vec![
            coded(self.outgoing.next()?, part, Stage::Contribution),
            coded_peer(to, part, Stage::Contribution),
        ];
        match self.local {
            None => self.contributions.pass_on(&mut self.builder, part, destinations),
            Some(slot) => {
                let local = staged(slot, part);
                self.contributions.pass_on(&mut self.builder, part, vec![local])?;
                self.builder.copy(local, destinations);
                Ok(())
            }
        }
    }

    /// Encodes the sum, and sends it to all others.
    fn conclude(&mut self, sum: Operand) -> Result<(), PlanError> {
        let result = coded(self.result, sum.part, Stage::Result);
        let peers = (1..self.plan.participants()).map(|round| self.plan.at(self.position, round));
        let peers = peers.collect::<Result<Vec<_>, _>>()?;
        for (index, some) in peers.chunks(MAX_STEP_PEERS).enumerate() {
            let sent = some.iter().map(|peer| coded_peer(*peer, sum.part, Stage::Result));
            let (from, kept) = if index == 0 { (sum, Some(result)) } else { (result, None) };
            self.builder.copy(from, kept.into_iter().chain(sent).collect());
        }
        Ok(())
    }

    /// Decodes a result to where it belongs.
    fn land(&mut self, landing: &mut Landing<'_>, result: Operand) -> Result<(), PlanError> {
        let landed = landing.next(result.part)?;
        self.builder.copy(result, landed.destinations.clone());
        landing.store(&mut self.builder, &landed);
        Ok(())
    }

    /// The part that a participant owns, the same in every order.
    fn part(&self, owner: Participant) -> Part {
        Part { block: 0, index: owner.0, of: self.plan.participants() }
    }

    /// Who stands `round` places back.
    fn back(&self, round: u32) -> Result<Participant, PlanError> {
        self.plan.at(self.position, self.plan.participants() - round)
    }
}
