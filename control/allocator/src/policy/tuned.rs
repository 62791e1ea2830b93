//! Jobs with the workers and the batch that they were tuned for. It finds how fast they are on each kind, and keeps them where
//! they are.

use super::Candidate;
use crate::allocation::{Allocation, Free};
use crate::inventory::{Inventory, Kind, KindId};

/// A kind with what is free of it.
pub(super) struct Pool<'a> {
    pub(super) id: KindId,
    pub(super) kind: &'a Kind,
    pub(super) free: Free,
}

impl<'a> Pool<'a> {
    /// All of an inventory.
    pub(super) fn all(inventory: &'a Inventory) -> Vec<Self> {
        inventory.kinds().map(|(id, kind)| Self { id, kind, free: Free::all(kind) }).collect()
    }
}

/// Steps a second of a job on a kind, by its profile; 0 where it cannot run there. Control would measure it; a policy that has it
/// beforehand has an advantage.
pub(super) fn steps_per_second(candidate: &Candidate<'_>, id: KindId, kind: &Kind) -> f64 {
    candidate.job.tuned_speed(candidate.model, (id, kind)).and_then(Result::ok).unwrap_or(0.0)
}

/// Accelerators for a job: those that it has, where they are free. Else they are those with the lowest numbers, of the fastest
/// kind with room. Takes them.
pub(super) fn place(candidate: &Candidate<'_>, pools: &mut [Pool<'_>]) -> Option<Allocation> {
    if let Some(current) = candidate.current
        && pools.get_mut(current.kind.0).is_some_and(|pool| pool.free.take(&current.accelerators))
    {
        return Some(current.clone());
    }
    let workers = candidate.job.workers;
    let with_room = pools.iter_mut().filter(|pool| pool.free.count() >= workers);
    let speeds = with_room.map(|pool| (steps_per_second(candidate, pool.id, pool.kind), pool));
    // Of equal ones the first.
    let (_, pool) = speeds
        .filter(|(speed, _)| *speed > 0.0)
        .reduce(|best, next| if next.0 > best.0 { next } else { best })?;
    let accelerators = pool.free.take_lowest(workers)?;
    Some(Allocation { kind: pool.id, accelerators })
}
