//! Least attained service: whoever has had the least goes first, and those who had more make room. Source: Gu et al., "Tiresias",
//! NSDI 2019, without its queues.

use super::tuned::{Pool, place};
use super::{Candidate, Policy, PolicyError, Round};
use crate::allocation::Allocation;

/// Least attained service, with the workers that jobs were tuned for. Of two with as much the earlier one goes first. A job that does not
/// fit lets later ones pass.
#[derive(Debug, Clone, Copy, Default)]
pub struct LeastAttained;

impl Policy for LeastAttained {
    fn name(&self) -> &'static str {
        "LAS"
    }

    fn needs_tuned_speeds(&self) -> bool {
        true
    }

    fn allocate(&mut self, round: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError> {
        let mut pools = Pool::all(round.inventory);
        let mut given: Vec<Option<Allocation>> = vec![None; round.jobs.len()];
        let mut order: Vec<(&mut Option<Allocation>, &Candidate<'_>)> =
            given.iter_mut().zip(round.jobs).collect();
        order.sort_by(|(_, one), (_, other)| {
            let by_arrival = || one.job.arrival.total_cmp(&other.job.arrival);
            one.attained.total_cmp(&other.attained).then_with(by_arrival).then(one.number.cmp(&other.number))
        });
        for (given, candidate) in order {
            *given = place(candidate, &mut pools);
        }
        Ok(given)
    }
}
