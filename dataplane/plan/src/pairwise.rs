//! AllToAll, Gather and Scatter, pairwise. In round `d` each participant sends to the one `d` places on and receives from the one `d`
//! places back, a message per source and destination rank. Of a Gather the root is the only destination, of a Scatter the only source. Each
//! block crosses one link, once. Within a participant, blocks are copied between the messages. Where it is coded, each message is encoded
//! once and decoded once. What stays within a participant stays exact.
//!
//! In place the root's own block is written over by itself alone: nothing needs to be held back.
//!
//! Sends and receives of a round alternate, send first: with one landing slot a peer, a second send may wait for what the
//! peer receives after its own first send, but never for more than that.

use crate::builder::{self, Builder, Feeder, Rotation, coded, coded_peer, input, remote_count, staged};
use crate::plan::{Local, Plan, PlanError, Request};
use crate::program::{Access, Buffer, Operand, Part, Participant, Program, Retention, Slot, Stage, StepKind};
use harmonaize_abi::Rank;
use std::collections::HashMap;

/// Slots for each of fetching ahead and storing behind.
const STAGED: u32 = 4;
/// Slots for what is encoded, until it is sent.
const ENCODED: u32 = 3;

/// One block's way as this participant sees it.
#[derive(Clone, Copy)]
enum Action {
    Send { from: Rank, to: Rank, peer: Participant },
    Copy { from: Rank, to: Rank },
    Receive { from: Rank, to: Rank, peer: Participant },
}

/// The program of the participant at `position`.
pub(crate) fn program(
    plan: &Plan,
    request: Request,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    if request.collective.is_rooted() {
        plan.position_of_root(request.root)?;
    }
    let coded = request.codes() && plan.participants() > 1;
    if coded && local.retention == Retention::CopyInputs {
        return Err(PlanError::Copied);
    }
    if local.retention == Retention::HoldOutputs && !request.collective.can_be_in_place() {
        return Err(PlanError::InPlace);
    }
    let actions = actions(plan, request, position, me)?;
    let copied = local.retention == Retention::CopyInputs && plan.participants() > 1;
    let (sends, copies): (Vec<_>, Vec<_>) =
        actions.iter().partition(|action| matches!(action, Action::Send { .. } | Action::Receive { .. }));
    let mut builder = Builder::default();
    let stores = remote_count(plan.group().local(me), local) > 0;
    let stores = if stores { Some(Rotation::new(&mut builder, STAGED, 1)?) } else { None };
    let encoded = if coded { Some(Rotation::new(&mut builder, ENCODED, 1)?) } else { None };
    let mut exchange = Exchange {
        request,
        ranks: plan.group().ranks(),
        local,
        stores,
        encoded,
        feeder: None,
        copies: HashMap::new(),
    };
    if copied {
        exchange.copy(&mut builder, &sends)?;
        exchange.feed(&mut builder, &copies)?;
        exchange.run(&mut builder, &copies)?;
        builder.end_copying();
        exchange.run(&mut builder, &sends)?;
    } else {
        exchange.feed(&mut builder, &actions)?;
        exchange.run(&mut builder, &actions)?;
    }
    builder.finish()
}

/// Everything that this participant does, in order.
fn actions(plan: &Plan, request: Request, position: u32, me: Participant) -> Result<Vec<Action>, PlanError> {
    let group = plan.group();
    let mine = group.local(me);
    let pairs = |from: &[Rank], to: &[Rank]| -> Vec<(Rank, Rank)> {
        let pairs = from.iter().flat_map(|from| to.iter().map(move |to| (*from, *to)));
        pairs.filter(|(from, to)| request.pair(*from, *to).is_some()).collect()
    };
    let mut copies = pairs(mine, mine).into_iter().map(|(from, to)| Action::Copy { from, to });
    let mut actions = Vec::new();
    for distance in 1..plan.participants() {
        let next = plan.at(position, distance)?;
        let previous = plan.at(position, plan.participants() - distance)?;
        let mut sends = pairs(mine, group.local(next)).into_iter();
        let mut receives = pairs(group.local(previous), mine).into_iter();
        loop {
            let (send, receive) = (sends.next(), receives.next());
            if send.is_none() && receive.is_none() {
                break;
            }
            actions.extend(send.map(|(from, to)| Action::Send { from, to, peer: next }));
            actions.extend(copies.next());
            actions.extend(receive.map(|(from, to)| Action::Receive { from, to, peer: previous }));
        }
    }
    actions.extend(copies);
    Ok(actions)
}

struct Exchange<'a> {
    request: Request,
    ranks: u32,
    local: &'a Local<'a>,
    /// Where blocks for remote ranks wait to be stored.
    stores: Option<Rotation>,
    /// Where messages are encoded, if they are.
    encoded: Option<Rotation>,
    /// Brings blocks of remote ranks.
    feeder: Option<Feeder>,
    /// Blocks copied beforehand.
    copies: HashMap<(Rank, Rank), Slot>,
}

impl Exchange<'_> {
    /// Where the block that one has for the other lies, and where it belongs.
    fn places(&self, from: Rank, to: Rank) -> Result<[Operand; 2], PlanError> {
        let [of_input, of_output] = self.request.pair(from, to).ok_or(PlanError::Inconsistent)?;
        Ok([input(from, Part::whole(of_input)), Operand::exact(Buffer::Output(to), Part::whole(of_output))])
    }

    /// The same block in staging and as a message.
    fn part(&self, from: Rank, to: Rank) -> Result<Part, PlanError> {
        let [of_input, _] = self.request.pair(from, to).ok_or(PlanError::Inconsistent)?;
        Ok(Part::whole(self.request.collective.count_of_input(from, of_input, self.ranks)))
    }

    /// Fetches what the actions will need of remote ranks.
    fn feed(&mut self, builder: &mut Builder, actions: &[Action]) -> Result<(), PlanError> {
        let mut fetches = Vec::new();
        for action in actions {
            if let Action::Send { from, to, .. } | Action::Copy { from, to } = *action
                && (self.local.access)(from) == Access::Remote
            {
                let [block, _] = self.places(from, to)?;
                fetches.push((block, self.part(from, to)?));
            }
        }
        self.feeder = Some(Feeder::new(builder, fetches, STAGED as usize, 1)?);
        Ok(())
    }

    /// Copies every block that will be sent into a slot of its own.
    fn copy(&mut self, builder: &mut Builder, actions: &[Action]) -> Result<(), PlanError> {
        let mut blocks: Vec<(Rank, Rank)> = actions
            .iter()
            .filter_map(|action| match action {
                Action::Send { from, to, .. } => Some((*from, *to)),
                _ => None,
            })
            .collect();
        // By rank, not by position: the copies lie in the same slots in every order.
        blocks.sort_unstable();
        for (from, to) in blocks {
            let slot = builder.slot(1)?;
            let kind = match (self.local.access)(from) {
                Access::Mapped => StepKind::Move,
                Access::Remote => StepKind::Fetch,
            };
            let [block, _] = self.places(from, to)?;
            builder.push(kind, vec![block], vec![staged(slot, self.part(from, to)?)]);
            self.copies.insert((from, to), slot);
        }
        Ok(())
    }

    fn run(&mut self, builder: &mut Builder, actions: &[Action]) -> Result<(), PlanError> {
        for action in actions {
            match *action {
                Action::Send { from, to, peer } => {
                    let (source, part) = (self.source(from, to)?, self.part(from, to)?);
                    match &mut self.encoded {
                        None => builder.copy(source, vec![builder::peer(peer, part)]),
                        Some(slots) => {
                            let kept = coded(slots.next()?, part, Stage::Moved);
                            builder.copy(source, vec![kept, coded_peer(peer, part, Stage::Moved)]);
                        }
                    }
                    self.give_back(builder, source, (from, to));
                }
                Action::Copy { from, to } => {
                    let source = self.source(from, to)?;
                    self.deliver(builder, source, from, to)?;
                    self.give_back(builder, source, (from, to));
                }
                Action::Receive { from, to, peer: sender } => {
                    let part = self.part(from, to)?;
                    let message = match self.encoded {
                        None => builder::peer(sender, part),
                        Some(_) => coded_peer(sender, part, Stage::Moved),
                    };
                    self.deliver(builder, message, from, to)?;
                }
            }
        }
        Ok(())
    }

    fn source(&mut self, from: Rank, to: Rank) -> Result<Operand, PlanError> {
        if let Some(slot) = self.copies.get(&(from, to)) {
            return Ok(staged(*slot, self.part(from, to)?));
        }
        let [block, _] = self.places(from, to)?;
        match (self.local.access)(from) {
            Access::Mapped => Ok(block),
            Access::Remote => self.feeder.as_mut().ok_or(PlanError::Inconsistent)?.take(),
        }
    }

    fn give_back(&mut self, builder: &mut Builder, source: Operand, block: (Rank, Rank)) {
        if let Some(feeder) = &mut self.feeder
            && !self.copies.contains_key(&block)
        {
            feeder.give_back(builder, &[source]);
        }
    }

    /// Puts the block that `from` has for `to`, both local or the message of a peer, into its output.
    fn deliver(
        &mut self,
        builder: &mut Builder,
        source: Operand,
        from: Rank,
        to: Rank,
    ) -> Result<(), PlanError> {
        let ([_, output], part) = (self.places(from, to)?, self.part(from, to)?);
        if (self.local.access)(to) == Access::Mapped {
            builder.copy(source, vec![output]);
            return Ok(());
        }
        let staged = match (source.buffer, &mut self.stores) {
            (Buffer::Staging(_), _) => source,
            (_, Some(rotation)) => {
                let target = staged(rotation.next()?, part);
                builder.copy(source, vec![target]);
                target
            }
            (_, None) => return Err(PlanError::Inconsistent),
        };
        builder.store(staged, &[output]);
        Ok(())
    }
}
