//! Reduce by a chain, in one shot, or up a [binomial tree](crate::tree). The chain runs along the ring order and ends at the root's
//! participant; the parts of a segment follow one another down it and gather contributions. The shot goes from everybody straight to there.
//! Along the chain and in one shot the root's participant receives, and each other sends, at most a tensor at a time; along the chain
//! nobody receives more.
//!
//! Along the chain a part is added up in the ring's order, beginning after the root's participant; in one shot in the order of
//! participants, as AllReduce.
//!
//! A message is consumed before the next is sent: one landing slot a peer is enough.

use crate::allreduce::{Landing, LocalContribution, parts, within};
use crate::builder::{Builder, Rotation, peer, staged};
use crate::one_two_shot::one_shot;
use crate::plan::{Algorithm, Local, Plan, PlanError, Request};
use crate::program::{Participant, Program, Retention};
use crate::segmentation::CHAIN_PARTS;
use crate::tree;

/// Slots for sums that wait to be sent.
const STAGED: u32 = 2;

/// The program of the participant at `position`.
pub(crate) fn program(
    plan: &Plan,
    request: Request,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let (ranks, root, all) = (plan.group().local(me), request.root, plan.participants());
    let end = plan.position_of_root(root)?;
    if all == 1 {
        return within(ranks, &[root], local);
    }
    if request.algorithm == Algorithm::OneShot {
        return one_shot(plan, Some(root), position, me, local);
    }
    if request.algorithm == Algorithm::BinomialTree {
        return tree::reduce(plan, request, position, me, local);
    }
    let (next, previous) = (plan.at(position, 1)?, plan.at(position, all - 1)?);
    let previous = ((end + 1) % all != position).then_some(previous);
    let (mut builder, parts) = (Builder::default(), parts(CHAIN_PARTS));
    let mut own = LocalContribution::new(&mut builder, ranks, local, &parts, previous.is_some())?;
    let arrived = |part| previous.map(|previous| peer(previous, part));
    if position == end {
        let hold = local.retention == Retention::HoldOutputs;
        let to = [root];
        let mut landing = Landing::new(&mut builder, &to, local, CHAIN_PARTS, hold)?;
        for part in parts {
            let landed = landing.next(part)?;
            own.add(&mut builder, arrived(part), part, true, landed.destinations.clone())?;
            landing.store(&mut builder, &landed);
        }
        landing.commit(&mut builder);
    } else {
        // Wherever in the order this participant stands: slots are the same in every order.
        let waits = all > 2 || !own.is_single();
        let mut partial = waits.then(|| Rotation::new(&mut builder, STAGED, CHAIN_PARTS)).transpose()?;
        for part in parts {
            if previous.is_none() && own.is_single() {
                own.send(&mut builder, part, next)?;
                continue;
            }
            let slot = partial.as_mut().ok_or(PlanError::Inconsistent)?.next()?;
            let sum = staged(slot, part);
            own.add(&mut builder, arrived(part), part, false, vec![sum])?;
            builder.send(sum, next);
        }
    }
    builder.finish()
}
