//! Broadcast by a chain, in one shot, or down a binomial tree. The chain runs along the ring order from the root's
//! participant, and the parts of a segment follow one another down it; the shot goes from there to everybody.

use crate::builder::{Builder, Feeder, Rotation, input, outputs, peer, remote_count, staged};
use crate::one_two_shot;
use crate::plan::{Algorithm, Local, Plan, PlanError, Request};
use crate::program::{Access, Operand, Part, Participant, Program, Retention, Slot, StepKind};
use crate::segmentation::CHAIN_PARTS;
use crate::tree;
use harmonaize_abi::Rank;

/// Slots in which remote ranks' parts wait.
const STAGED: u32 = 3;

struct Link<'a> {
    ranks: &'a [Rank],
    local: &'a Local<'a>,
    /// Of how many parts a segment is.
    of: u32,
    next: Vec<Participant>,
}

/// The program of the participant at `position`.
pub(crate) fn program(
    plan: &Plan,
    request: Request,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let (participants, root) = (plan.participants(), request.root);
    let first = plan.position_of_root(root)?;
    let place = (position + participants - first) % participants;
    // How far on are those who get it straight from here, how far back is who it comes from, and in how many parts.
    let (next, back, of): (Vec<u32>, _, _) = match (request.algorithm, place) {
        (Algorithm::OneShot, 0) => ((1..participants).collect(), 0, 1),
        (Algorithm::OneShot, _) => (Vec::new(), place, 1),
        (Algorithm::BinomialTree, 0) => (tree::to_children(0, participants).rev().collect(), 0, 1),
        (Algorithm::BinomialTree, _) => {
            (tree::to_children(place, participants).rev().collect(), tree::to_parent(place), 1)
        }
        _ => ((1..participants.min(2)).filter(|next| place + next < participants).collect(), 1, CHAIN_PARTS),
    };
    let next = next.into_iter().map(|distance| plan.at(position, distance)).collect::<Result<_, _>>()?;
    let link = Link { ranks: plan.group().local(me), local, of, next };
    let mut builder = Builder::default();
    if position != first {
        link.relay(&mut builder, plan.at(position, participants - back)?)?;
    } else if local.retention == Retention::CopyInputs && participants > 1 {
        link.start_copied(&mut builder, root)?;
    } else {
        match (local.access)(root) {
            Access::Mapped => link.start_mapped(&mut builder, root)?,
            Access::Remote => link.start_remote(&mut builder, root)?,
        }
    }
    builder.finish()
}

impl Link<'_> {
    fn parts(&self) -> impl Iterator<Item = Part> + use<> {
        let of = self.of;
        (0..of).map(move |index| Part { block: 0, index, of })
    }

    fn mapped(&self, part: Part) -> Vec<Operand> {
        outputs(self.ranks, self.local, Access::Mapped, part)
    }

    fn store(&self, builder: &mut Builder, staged: Operand) {
        builder.store(staged, &outputs(self.ranks, self.local, Access::Remote, staged.part));
    }

    fn send(&self, builder: &mut Builder, from: Operand) {
        one_two_shot::send(builder, from, from.part, &self.next);
    }

    fn rotation(&self, builder: &mut Builder) -> Result<Option<Rotation>, PlanError> {
        match remote_count(self.ranks, self.local) {
            0 => Ok(None),
            _ => Rotation::new(builder, STAGED.min(self.of), self.of).map(Some),
        }
    }

    /// Copies `source` to the mapped outputs and, where there are remote ones, through staging to these. Passes it on
    /// from its first new place if `send`.
    fn deliver(
        &self,
        builder: &mut Builder,
        source: Operand,
        staging: &mut Option<Rotation>,
        send: bool,
    ) -> Result<(), PlanError> {
        let part = source.part;
        let mut destinations = self.mapped(part);
        let staged = match staging {
            Some(rotation) => Some(staged(rotation.next()?, part)),
            None => None,
        };
        destinations.extend(staged);
        let first = *destinations.first().ok_or(PlanError::Inconsistent)?;
        builder.copy(source, destinations);
        if send {
            self.send(builder, first);
        }
        if let Some(staged) = staged {
            self.store(builder, staged);
        }
        Ok(())
    }

    /// Not the root's: receive, pass on, store.
    fn relay(&self, builder: &mut Builder, previous: Participant) -> Result<(), PlanError> {
        let mut staging = self.rotation(builder)?;
        for part in self.parts() {
            self.deliver(builder, peer(previous, part), &mut staging, true)?;
        }
        Ok(())
    }

    /// The root's input can be sent as it lies.
    fn start_mapped(&self, builder: &mut Builder, root: Rank) -> Result<(), PlanError> {
        let mut staging = self.rotation(builder)?;
        for part in self.parts() {
            self.send(builder, input(root, part));
            self.deliver(builder, input(root, part), &mut staging, false)?;
        }
        Ok(())
    }

    /// The root's input is fetched ahead.
    fn start_remote(&self, builder: &mut Builder, root: Rank) -> Result<(), PlanError> {
        let fetches = self.parts().map(|part| (input(root, part), part)).collect();
        let mut feeder = Feeder::new(builder, fetches, STAGED as usize, self.of)?;
        for _ in self.parts() {
            let fetched = feeder.take()?;
            self.forward(builder, fetched);
            feeder.give_back(builder, &[fetched]);
        }
        Ok(())
    }

    /// The root's input is copied first, so that it may be overwritten when the operation is done here.
    fn start_copied(&self, builder: &mut Builder, root: Rank) -> Result<(), PlanError> {
        let slots: Vec<Slot> = builder.slots(self.of, self.of)?;
        let kind = match (self.local.access)(root) {
            Access::Mapped => StepKind::Move,
            Access::Remote => StepKind::Fetch,
        };
        for (slot, part) in slots.iter().zip(self.parts()) {
            builder.push(kind, vec![input(root, part)], vec![staged(*slot, part)]);
        }
        builder.end_copying();
        for (slot, part) in slots.iter().zip(self.parts()) {
            self.forward(builder, staged(*slot, part));
        }
        Ok(())
    }

    /// Sends, copies and stores a staged part.
    fn forward(&self, builder: &mut Builder, staged: Operand) {
        self.send(builder, staged);
        let mapped = self.mapped(staged.part);
        if !mapped.is_empty() {
            builder.copy(staged, mapped);
        }
        self.store(builder, staged);
    }
}
