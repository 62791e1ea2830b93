//! The binomial tree over the plan's order, counted from the root's participant, and a Reduce along it. Each hop reaches twice as many; the
//! root sends, or receives, a tensor for each binary digit of the participants' number.
//!
//! A participant adds what its children send to its own contribution, nearest first. So contributions are added in the plan's order,
//! beginning with those of the root's participant. Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication
//! operations in MPICH", 2005.
//!
//! A child sends one message, and nobody but a child does: one landing slot a peer is enough.

use crate::allreduce::Landing;
use crate::builder::{Builder, Rotation, peer, staged};
use crate::one_two_shot::LocalContribution;
use crate::plan::{Local, Plan, PlanError, Request};
use crate::program::{Part, Participant, Program, Retention, StepKind};

/// Places from a participant back to its parent: of one so many places after the root's, which is not 0.
pub(crate) const fn to_parent(place: u32) -> u32 {
    1 << place.trailing_zeros()
}

/// Places from a participant on to its children, nearest first.
pub(crate) fn to_children(place: u32, all: u32) -> impl DoubleEndedIterator<Item = u32> + use<> {
    let digits = if place == 0 { u32::BITS - 1 } else { place.trailing_zeros() };
    (0..digits).map(|digit| 1 << digit).filter(move |distance| *distance < all.saturating_sub(place))
}

/// Hops from the root to a participant.
pub(crate) const fn depth(place: u32) -> u32 {
    place.count_ones()
}

/// A Reduce: the program of the participant at `position`, of several.
pub(crate) fn reduce(
    plan: &Plan,
    request: Request,
    position: u32,
    me: Participant,
    local: &Local<'_>,
) -> Result<Program, PlanError> {
    let (ranks, all, whole) = (plan.group().local(me), plan.participants(), Part::whole(0));
    let root = plan.position_of_root(request.root)?;
    let place = (position + all - root) % all;
    let mut builder = Builder::default();
    let mut own = LocalContribution::new(&mut builder, ranks, local, [whole].into_iter())?;
    let mut sum = own.take(&mut builder, whole)?;
    // Wherever in the order this participant stands: slots are the same in every order.
    let mut sums = Rotation::new(&mut builder, 2, 1)?;
    let children: Vec<u32> = to_children(place, all).collect();
    if place > 0 {
        for distance in children {
            let sources = vec![sum, peer(plan.at(position, distance)?, whole)];
            sum = staged(sums.next()?, whole);
            builder.push(StepKind::Reduce { last: false }, sources, vec![sum]);
        }
        builder.send(sum, plan.at(position, all - to_parent(place))?);
        return builder.finish();
    }
    let to = [request.root];
    let mut landing = Landing::new(&mut builder, &to, local, 1, local.retention == Retention::HoldOutputs)?;
    let landed = landing.next(whole)?;
    let count = children.len();
    for (distance, number) in children.into_iter().zip(1..) {
        let sources = vec![sum, peer(plan.at(position, distance)?, whole)];
        if number == count {
            builder.push(StepKind::Reduce { last: true }, sources, landed.destinations.clone());
        } else {
            sum = staged(sums.next()?, whole);
            builder.push(StepKind::Reduce { last: false }, sources, vec![sum]);
        }
    }
    landing.store(&mut builder, &landed);
    landing.commit(&mut builder);
    builder.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_is_the_child_of_its_parent() {
        for all in 1..=70 {
            let mut reached = vec![0; all as usize];
            for place in 0..all {
                for distance in to_children(place, all) {
                    let child = place + distance;
                    reached[child as usize] += 1;
                    assert_eq!((to_parent(child), depth(child)), (distance, depth(place) + 1));
                }
            }
            assert!(reached[0] == 0 && reached[1..].iter().all(|times| *times == 1), "{all}: {reached:?}");
        }
    }
}
