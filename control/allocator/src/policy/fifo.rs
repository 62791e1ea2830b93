//! First in, first out. A job that has started runs to its end, and no job starts before one that arrived earlier.

use super::tuned::{Pool, place};
use super::{Candidate, Policy, PolicyError, Round};
use crate::allocation::Allocation;

/// First in, first out, with the workers that jobs were tuned for. The first job that does not fit holds all later ones back.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fifo;

impl Policy for Fifo {
    fn name(&self) -> &'static str {
        "FIFO"
    }

    fn needs_tuned_speeds(&self) -> bool {
        true
    }

    fn allocate(&mut self, round: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError> {
        let mut pools = Pool::all(round.inventory);
        let mut given: Vec<Option<Allocation>> = round
            .jobs
            .iter()
            .map(|candidate| {
                let current = candidate.current?;
                let pool = pools.get_mut(current.kind.0)?;
                pool.free.take(&current.accelerators).then(|| current.clone())
            })
            .collect();
        let waiting = given.iter_mut().zip(round.jobs).filter(|(given, _)| given.is_none());
        let mut waiting: Vec<(&mut Option<Allocation>, &Candidate<'_>)> = waiting.collect();
        waiting.sort_by(|(_, one), (_, other)| {
            one.job.arrival.total_cmp(&other.job.arrival).then(one.number.cmp(&other.number))
        });
        for (given, candidate) in waiting {
            *given = place(candidate, &mut pools);
            if given.is_none() {
                break;
            }
        }
        Ok(given)
    }
}
