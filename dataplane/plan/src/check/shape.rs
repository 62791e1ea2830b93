//! What can be said of each step alone. Its operands exist, fit its kind, and have one length, whatever ranks' counts are.

use super::{CheckError, Fault};
use crate::plan::{Local, Plan, Request};
use crate::program::{
    Access, Buffer, Encoding, MAX_SOURCES, Operand, Participant, Program, Retention, Stage, Step, StepKind,
};
use harmonaize_abi::Rank;

struct Shape<'a> {
    plan: &'a Plan,
    request: Request,
    me: Participant,
    ranks: &'a [Rank],
    local: &'a Local<'a>,
    slots: &'a [u32],
}

/// Checks every step of a participant's program by itself.
pub(super) fn check(
    plan: &Plan,
    request: Request,
    me: Participant,
    program: &Program,
    local: &Local<'_>,
) -> Result<(), CheckError> {
    let ranks = plan.group().local(me);
    let shape = Shape { plan, request, me, ranks, local, slots: &program.slots };
    let copies = local.retention == Retention::CopyInputs && plan.participants() > 1;
    let mut committed = false;
    for (step, index) in program.steps.iter().zip(0..) {
        let at = |fault| CheckError::Step { participant: me, step: index, fault };
        shape.step(step, index).map_err(at)?;
        let talks = step.sources.iter().chain(&step.destinations).any(is_peer);
        if (committed && !step.committed) || (step.committed && talks) {
            return Err(at(Fault::Committed));
        }
        if index < program.copying && (!copies || talks || step.committed) {
            return Err(at(Fault::Copying));
        }
        committed = step.committed;
    }
    if program.copying as usize > program.steps.len() {
        return Err(CheckError::Step { participant: me, step: program.copying, fault: Fault::Copying });
    }
    Ok(())
}

fn is_peer(operand: &Operand) -> bool {
    matches!(operand.buffer, Buffer::Peer(_))
}

impl Shape<'_> {
    fn step(&self, step: &Step, index: u32) -> Result<(), Fault> {
        if let Some(after) = step.after.iter().find(|after| **after >= index) {
            return Err(Fault::After(*after));
        }
        let first = step.sources.iter().chain(&step.destinations).next().ok_or(Fault::Destinations)?;
        let mut length = None;
        for operand in step.sources.iter().chain(&step.destinations) {
            let part = operand.part;
            if part.index >= part.of || (part.index, part.of) != (first.part.index, first.part.of) {
                return Err(Fault::Part(part));
            }
            let count = self.operand(step.kind, operand)?;
            if *length.get_or_insert(count) != count {
                return Err(Fault::Part(part));
            }
        }
        if repeats(&step.destinations, |_| true) || repeats(&step.sources, is_peer) {
            return Err(Fault::Repeated);
        }
        if step.destinations.iter().any(|operand| matches!(operand.buffer, Buffer::Input(_))) {
            return Err(Fault::Destinations);
        }
        self.counts(step)?;
        let input = |operand: &Operand| matches!(operand.buffer, Buffer::Input(_));
        if self.local.scaled && step.sources.iter().any(input) && step.destinations.iter().all(is_peer) {
            return Err(Fault::Unscaled);
        }
        let coded = |operand: &Operand| operand.encoding != Encoding::Exact;
        if !step.sources.iter().chain(&step.destinations).any(coded) {
            return Ok(());
        }
        if self.request.codes() && fits(step) { Ok(()) } else { Err(Fault::Encoding) }
    }

    /// Checks an operand by itself. Which count its length follows from.
    fn operand(&self, kind: StepKind, operand: &Operand) -> Result<u32, Fault> {
        let Request { collective, root, .. } = self.request;
        let (ranks, block) = (self.plan.group().ranks(), operand.part.block);
        let (blocks, count) = match operand.buffer {
            Buffer::Input(rank) | Buffer::Output(rank) => {
                if !self.ranks.contains(&rank) {
                    return Err(Fault::Buffer);
                }
                let reached = match kind {
                    StepKind::Move | StepKind::Reduce { .. } => Access::Mapped,
                    StepKind::Fetch | StepKind::Store => Access::Remote,
                };
                if (self.local.access)(rank) != reached {
                    return Err(Fault::Access(rank));
                }
                if operand.encoding != Encoding::Exact {
                    return Err(Fault::Encoding);
                }
                let [input, output] = collective.blocks(ranks, rank, root);
                match operand.buffer {
                    Buffer::Input(_) => (input, collective.count_of_input(rank, block, ranks)),
                    _ => (output, collective.count_of_output(rank, block, ranks)),
                }
            }
            Buffer::Staging(slot) => match self.slots.get(usize::from(slot.0)) {
                None => return Err(Fault::Buffer),
                Some(divisor) if operand.part.enclosing(*divisor).is_none() => {
                    return Err(Fault::SlotSize(slot));
                }
                Some(_) => (collective.counts(ranks), block),
            },
            Buffer::Peer(peer) => {
                if peer == self.me || peer.0 >= self.plan.participants() {
                    return Err(Fault::Buffer);
                }
                (collective.counts(ranks), block)
            }
        };
        if block >= blocks { Err(Fault::Part(operand.part)) } else { Ok(count) }
    }

    /// Numbers and kinds of operands.
    fn counts(&self, step: &Step) -> Result<(), Fault> {
        let staging = |operand: &Operand| matches!(operand.buffer, Buffer::Staging(_));
        match (step.kind, step.sources.as_slice(), step.destinations.as_slice()) {
            (StepKind::Move, [], to) if to.iter().all(is_peer) => Ok(()),
            (StepKind::Move, [], _) => Err(Fault::Destinations),
            (StepKind::Move, [from], []) if !is_peer(from) => Err(Fault::Destinations),
            (StepKind::Move, [_], _) => Ok(()),
            (StepKind::Reduce { .. }, _, _) if !self.request.collective.reduces() => Err(Fault::Reduce),
            (StepKind::Reduce { .. }, from, to) if (1..=MAX_SOURCES).contains(&from.len()) => {
                if to.iter().all(is_peer) { Err(Fault::Destinations) } else { Ok(()) }
            }
            (StepKind::Fetch, [from], [to]) => match (from.buffer, to.encoding) {
                (Buffer::Input(_), Encoding::Exact) if staging(to) => Ok(()),
                (Buffer::Input(_), _) if staging(to) => Err(Fault::Encoding),
                _ => Err(Fault::Destinations),
            },
            (StepKind::Store, [from], [to]) => match (to.buffer, from.encoding) {
                (Buffer::Output(_), Encoding::Exact) if staging(from) => Ok(()),
                (Buffer::Output(_), _) if staging(from) => Err(Fault::Encoding),
                _ => Err(Fault::Destinations),
            },
            _ => Err(Fault::Sources),
        }
    }
}

/// Whether a step with a coded operand is one of those that there are. They encode (and send), send what was encoded, decode,
/// or add.
fn fits(step: &Step) -> bool {
    let staging = |operand: &Operand| matches!(operand.buffer, Buffer::Staging(_));
    let (from, to) = (step.sources.as_slice(), step.destinations.as_slice());
    let all = |form: Encoding| to.iter().all(|operand| operand.encoding == form);
    match (step.kind, from) {
        (StepKind::Move, [from]) => match (from.encoding, to.first().map(|operand| operand.encoding)) {
            (Encoding::Exact, Some(form)) => {
                let kept = to.iter().filter(|operand| staging(operand)).count();
                all(form) && kept == 1 && to.iter().all(|to| staging(to) || is_peer(to)) && !is_peer(from)
            }
            (_, Some(Encoding::Exact)) => {
                from.encoding != Encoding::Coded(Stage::Contribution)
                    && all(Encoding::Exact)
                    && !to.iter().any(is_peer)
            }
            (form, Some(_)) => all(form) && staging(from) && to.iter().all(is_peer),
            (_, None) => false,
        },
        (StepKind::Reduce { .. }, [sum, added]) => {
            let apart = is_peer(added) && added.encoding == Encoding::Coded(Stage::Contribution);
            apart && staging(sum) && sum.encoding == Encoding::Exact && to == [*sum]
        }
        _ => false,
    }
}

/// Whether two of the operands that count lie in the same place. That is the same peer or slot, or the same block of a
/// tensor.
fn repeats(operands: &[Operand], counts: impl Fn(&Operand) -> bool) -> bool {
    let same = |a: &Operand, b: &Operand| a.buffer == b.buffer && a.part.block == b.part.block;
    operands.iter().enumerate().any(|(index, operand)| {
        counts(operand) && operands.iter().take(index).any(|other| same(operand, other))
    })
}
