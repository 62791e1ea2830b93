//! Broadcast: a chain along the ring order from the root's participant, down which the parts of a segment follow one
//! another.

use crate::builder::{Builder, Feeder, Rotation, input, outputs, peer, remote_count, staged};
use crate::plan::{Local, Plan, PlanError};
use crate::program::{Access, Operand, Part, Participant, Program, Retention, Slot, StepKind};
use crate::segmentation::BROADCAST_PARTS;
use harmonaize_abi::Rank;

/// Slots in which remote ranks' parts wait.
const STAGED: u32 = 3;

struct Link<'a> {
    ranks: &'a [Rank],
    local: &'a Local<'a>,
    next: Option<Participant>,
}

/// The program of the participant at `position`.
pub(crate) fn program(
    plan: &Plan,
    root: Rank,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let participants = plan.participants();
    let unknown = PlanError::Root { root, ranks: plan.group().ranks() };
    let first = plan.group().participant_of(root).and_then(|first| plan.position(first)).ok_or(unknown)?;
    let last = (position + 1) % participants == first;
    let next = if last { None } else { Some(plan.at(position, 1)?) };
    let link = Link { ranks: plan.group().local(me), local, next };
    let mut builder = Builder::default();
    if position != first {
        link.relay(&mut builder, plan.at(position, participants - 1)?)?;
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

fn parts() -> impl Iterator<Item = Part> {
    (0..BROADCAST_PARTS).map(|index| Part { block: 0, index, of: BROADCAST_PARTS })
}

impl Link<'_> {
    fn mapped(&self, part: Part) -> Vec<Operand> {
        outputs(self.ranks, self.local, Access::Mapped, part)
    }

    fn store(&self, builder: &mut Builder, staged: Operand) {
        builder.store(staged, &outputs(self.ranks, self.local, Access::Remote, staged.part));
    }

    fn send(&self, builder: &mut Builder, from: Operand) {
        if let Some(next) = self.next {
            builder.send(from, next);
        }
    }

    fn rotation(&self, builder: &mut Builder) -> Result<Option<Rotation>, PlanError> {
        match remote_count(self.ranks, self.local) {
            0 => Ok(None),
            _ => Rotation::new(builder, STAGED, BROADCAST_PARTS).map(Some),
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
        for part in parts() {
            self.deliver(builder, peer(previous, part), &mut staging, true)?;
        }
        Ok(())
    }

    /// The root's input can be sent as it lies.
    fn start_mapped(&self, builder: &mut Builder, root: Rank) -> Result<(), PlanError> {
        let mut staging = self.rotation(builder)?;
        for part in parts() {
            self.send(builder, input(root, part));
            self.deliver(builder, input(root, part), &mut staging, false)?;
        }
        Ok(())
    }

    /// The root's input is fetched ahead.
    fn start_remote(&self, builder: &mut Builder, root: Rank) -> Result<(), PlanError> {
        let fetches = parts().map(|part| input(root, part)).collect();
        let mut feeder = Feeder::new(builder, fetches, STAGED as usize, BROADCAST_PARTS)?;
        for _ in parts() {
            let fetched = feeder.take()?;
            self.forward(builder, fetched);
            feeder.give_back(builder, &[fetched]);
        }
        Ok(())
    }

    /// The root's input is copied first, so that it may be overwritten when the operation is done here.
    fn start_copied(&self, builder: &mut Builder, root: Rank) -> Result<(), PlanError> {
        let slots: Vec<Slot> = builder.slots(BROADCAST_PARTS, BROADCAST_PARTS)?;
        let kind = match (self.local.access)(root) {
            Access::Mapped => StepKind::Move,
            Access::Remote => StepKind::Fetch,
        };
        for (slot, part) in slots.iter().zip(parts()) {
            builder.push(kind, vec![input(root, part)], vec![staged(*slot, part)]);
        }
        builder.end_copying();
        for (slot, part) in slots.iter().zip(parts()) {
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
