//! What a job has: accelerators of one kind; and whether all that is given fits.

use crate::inventory::{Inventory, Kind, KindId};
use std::collections::BTreeSet;
use thiserror::Error;

/// Accelerators of one kind, by number: a host's own lie together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    /// Of which kind.
    pub kind: KindId,
    /// Which of the kind, a worker on each.
    pub accelerators: Vec<u32>,
}

impl Allocation {
    /// How many workers run.
    pub fn workers(&self) -> u32 {
        u32::try_from(self.accelerators.len()).unwrap_or(u32::MAX)
    }

    /// Workers on each host, in the accelerators' order. A job that spans more hosts than it can be predicted on counts as spread
    /// evenly over as many as that.
    pub fn shape(&self, kind: &Kind) -> Vec<u32> {
        let mut shape: Vec<(u32, u32)> = Vec::new();
        for accelerator in &self.accelerators {
            let host = kind.host(*accelerator);
            match shape.last_mut() {
                Some((last, workers)) if *last == host => *workers += 1,
                _ => shape.push((host, 1)),
            }
        }
        if shape.len() <= kind.job_hosts as usize {
            return shape.into_iter().map(|(_, workers)| workers).collect();
        }
        let each = self.workers().div_ceil(kind.job_hosts);
        let mut even = vec![each; (self.workers() / each) as usize];
        even.extend(Some(self.workers() % each).filter(|rest| *rest > 0));
        even
    }
}

/// What is wrong with what a policy gives.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum AllocationError {
    /// The inventory has no such kind.
    #[error("job {job} is given kind number {kind}, which the inventory does not have")]
    UnknownKind {
        /// The job's place.
        job: usize,
        /// The kind's number.
        kind: usize,
    },
    /// Nothing of a kind.
    #[error("job {job} is given no accelerators of a kind: it should be given nothing")]
    Nothing {
        /// The job's place.
        job: usize,
    },
    /// The kind has no such accelerator, or it is given twice.
    #[error("accelerator {accelerator} of {kind}, given to job {job}, is not there or given twice")]
    NotFree {
        /// The job's place.
        job: usize,
        /// The kind's name.
        kind: String,
        /// The accelerator's number.
        accelerator: u32,
    },
    /// Not one decision for each job.
    #[error("{given} decisions for {jobs} jobs")]
    Count {
        /// Decisions.
        given: usize,
        /// Jobs.
        jobs: usize,
    },
}

/// Whether these allocations fit together: every accelerator is there, and given once.
///
/// # Errors
///
/// The first accelerator that is not free.
pub fn check(inventory: &Inventory, given: &[Option<Allocation>]) -> Result<(), AllocationError> {
    let mut used: BTreeSet<(KindId, u32)> = BTreeSet::new();
    for (job, allocation) in given.iter().enumerate() {
        let Some(allocation) = allocation else { continue };
        let kind = inventory
            .kind(allocation.kind)
            .ok_or(AllocationError::UnknownKind { job, kind: allocation.kind.0 })?;
        if allocation.accelerators.is_empty() {
            return Err(AllocationError::Nothing { job });
        }
        for accelerator in &allocation.accelerators {
            if *accelerator >= kind.capacity() || !used.insert((allocation.kind, *accelerator)) {
                let (kind, accelerator) = (kind.name.clone(), *accelerator);
                return Err(AllocationError::NotFree { job, kind, accelerator });
            }
        }
    }
    Ok(())
}

/// Which accelerators of one kind are free.
#[derive(Debug, Clone)]
pub(crate) struct Free {
    free: Vec<bool>,
    count: u32,
}

impl Free {
    /// All of a kind.
    pub(crate) fn all(kind: &Kind) -> Self {
        Self { free: vec![true; kind.capacity() as usize], count: kind.capacity() }
    }

    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Takes these, if all of them are free.
    pub(crate) fn take(&mut self, accelerators: &[u32]) -> bool {
        let are_free =
            accelerators.iter().all(|each| self.free.get(*each as usize).copied().unwrap_or(false));
        if are_free {
            for each in accelerators {
                if let Some(free) = self.free.get_mut(*each as usize) {
                    *free = false;
                    self.count -= 1;
                }
            }
        }
        are_free
    }

    /// Takes the free ones with the lowest numbers, if there are so many.
    pub(crate) fn take_lowest(&mut self, workers: u32) -> Option<Vec<u32>> {
        if workers == 0 || workers > self.count {
            return None;
        }
        let lowest: Vec<u32> = (0u32..)
            .zip(&self.free)
            .filter(|(_, free)| **free)
            .map(|(each, _)| each)
            .take(workers as usize)
            .collect();
        self.take(&lowest).then_some(lowest)
    }

    /// Takes up to so many free ones of a host.
    pub(crate) fn take_of_host(&mut self, kind: &Kind, host: u32, most: u32) -> Vec<u32> {
        let first = host * kind.accelerators;
        let of_host = (first..first + kind.accelerators)
            .filter(|each| self.free.get(*each as usize).copied().unwrap_or(false));
        let taken: Vec<u32> = of_host.take(most as usize).collect();
        self.take(&taken);
        taken
    }

    /// How many of a host are free.
    pub(crate) fn of_host(&self, kind: &Kind, host: u32) -> u32 {
        let first = (host * kind.accelerators) as usize;
        let of_host = self.free.iter().skip(first).take(kind.accelerators as usize);
        u32::try_from(of_host.filter(|free| **free).count()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inventory() -> Inventory {
        let kind = Kind { name: "a".to_owned(), hosts: 4, accelerators: 4, job_hosts: 2 };
        Inventory::new(vec![kind]).unwrap()
    }

    fn given(accelerators: &[u32]) -> Option<Allocation> {
        Some(Allocation { kind: KindId(0), accelerators: accelerators.to_vec() })
    }

    #[test]
    fn an_accelerator_is_given_once() {
        let inventory = inventory();
        assert_eq!(check(&inventory, &[given(&[0, 1]), None, given(&[2])]), Ok(()));
        let twice = check(&inventory, &[given(&[0, 1]), given(&[1])]);
        assert_eq!(twice, Err(AllocationError::NotFree { job: 1, kind: "a".to_owned(), accelerator: 1 }));
        assert!(check(&inventory, &[given(&[16])]).is_err());
        assert_eq!(check(&inventory, &[given(&[])]), Err(AllocationError::Nothing { job: 0 }));
        let unknown = Allocation { kind: KindId(1), accelerators: vec![0] };
        assert_eq!(
            check(&inventory, &[Some(unknown)]),
            Err(AllocationError::UnknownKind { job: 0, kind: 1 })
        );
    }

    #[test]
    fn the_shape_counts_workers_by_host() {
        let inventory = inventory();
        let kind = inventory.kind(KindId(0)).unwrap();
        assert_eq!(given(&[2, 3, 4]).unwrap().shape(kind), [2, 1]);
        // Three hosts, where two are the most: spread evenly.
        assert_eq!(given(&[3, 4, 8, 9, 10]).unwrap().shape(kind), [3, 2]);
    }

    #[test]
    fn free_ones_are_taken_from_the_lowest() {
        let inventory = inventory();
        let kind = inventory.kind(KindId(0)).unwrap();
        let mut free = Free::all(kind);
        assert!(free.take(&[1]) && !free.take(&[0, 1]));
        assert_eq!(free.take_lowest(2), Some(vec![0, 2]));
        assert_eq!((free.of_host(kind, 0), free.take_of_host(kind, 1, 3)), (1, vec![4, 5, 6]));
        assert_eq!((free.count(), free.take_lowest(11)), (10, None));
    }
}
