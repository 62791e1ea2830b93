//! Broadcast: a chain along the ring order from the root's participant, down which the parts of a segment follow one
//! another; or in one shot, from there to everybody.

use crate::builder::{Builder, Feeder, Rotation, input, outputs, peer, remote_count, staged};
use crate::one_two_shot;
use crate::plan::{Algorithm, Local, Plan, PlanError, Request};
use crate::program::{Access, Operand, Part, Participant, Program, Retention, Slot, StepKind};
use crate::segmentation::CHAIN_PARTS;
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
    let one = request.algorithm == Algorithm::OneShot;
    // How many get it straight from here, and how far back is who it comes from.
    let (next, back) = match (position + participants - first) % participants {
        0 if one => (participants - 1, 0),
        distance if one => (0, distance),
        distance => (u32::from(distance + 1 < participants), 1),
    };
    let next = (1..=next).map(|distance| plan.at(position, distance)).collect::<Result<_, _>>()?;
    let of = if one { 1 } else { CHAIN_PARTS };
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

    /// Copies `source` to the mapped outputs and, where there are remote ones, through staging to these; passes it on
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
