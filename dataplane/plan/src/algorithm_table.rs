//! Which algorithm an operation takes, by its collective and its size.

use crate::plan::Algorithm;
use harmonaize_abi::Collective;
use serde::{Deserialize, Serialize};

/// Most ranges of sizes that a collective has.
pub const MAX_RANGES: usize = 12;

/// Operations of a collective that take one algorithm: those larger than of the range before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlgorithmRange {
    /// Which collective.
    pub collective: Collective,
    /// The largest of them, in bytes of the larger of a rank's tensors.
    pub up_to: u64,
    /// How they go.
    pub algorithm: Algorithm,
}

/// Algorithms by collective and size, alike at all participants of a communicator. What is larger than the last range goes by
/// [`Algorithm::Ring`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AlgorithmTable {
    /// By the collective's code: the largest of each range, ascending, and its algorithm.
    ranges: [[Option<(u64, Algorithm)>; MAX_RANGES]; Collective::ALL.len()],
}

/// Why a range does not fit into a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The collective's data does not move so.
    #[error("{collective} cannot go by {algorithm}")]
    Algorithm {
        /// Which collective.
        collective: Collective,
        /// What it was to go by.
        algorithm: Algorithm,
    },
    /// It ends where the range before ends, or sooner.
    #[error("{collective}: the range up to {up_to} bytes does not go beyond the one before")]
    Order {
        /// Which collective.
        collective: Collective,
        /// Where the range ends.
        up_to: u64,
    },
    /// There is no room for it.
    #[error("{0} has more than {MAX_RANGES} ranges of sizes")]
    TooMany(Collective),
}

impl Default for AlgorithmTable {
    fn default() -> Self {
        Self::RING
    }
}

impl AlgorithmTable {
    /// [`Algorithm::Ring`] for all.
    pub const RING: Self = Self { ranges: [[None; MAX_RANGES]; Collective::ALL.len()] };

    /// A table of these ranges, ascending for each collective.
    ///
    /// # Errors
    /// The first range that does not fit.
    pub fn new(ranges: impl IntoIterator<Item = AlgorithmRange>) -> Result<Self, TableError> {
        let mut table = Self::default();
        for AlgorithmRange { collective, up_to, algorithm } in ranges {
            if !Algorithm::of(collective.traits().pattern).contains(&algorithm) {
                return Err(TableError::Algorithm { collective, algorithm });
            }
            let row = table.ranges.get_mut(usize::from(collective.code()));
            let row = row.ok_or(TableError::TooMany(collective))?;
            if row.iter().flatten().any(|(before, _)| *before >= up_to) {
                return Err(TableError::Order { collective, up_to });
            }
            let free = row.iter_mut().find(|range| range.is_none());
            *free.ok_or(TableError::TooMany(collective))? = Some((up_to, algorithm));
        }
        Ok(table)
    }

    /// One algorithm for operations of all sizes, of each collective that can take it.
    pub fn all_by(algorithm: Algorithm) -> Self {
        let mut table = Self::default();
        for (row, collective) in table.ranges.iter_mut().zip(Collective::ALL) {
            let can = Algorithm::of(collective.traits().pattern).contains(&algorithm);
            if let Some(first) = row.first_mut().filter(|_| can) {
                *first = Some((u64::MAX, algorithm));
            }
        }
        table
    }

    /// What goes straight between participants. It goes in one shot up to a size, and in two beyond it up to another. AllGathers and
    /// ReduceScatters are each half of an AllReduce in two, and go in one shot up to the larger. Barriers have no bytes: they go in one
    /// shot unless that size is 0.
    pub fn direct(one_shot: u64, two_shot: u64) -> Self {
        let mut ranges = Vec::new();
        for &collective in Collective::ALL {
            let algorithms = Algorithm::of(collective.traits().pattern);
            let twice = algorithms.contains(&Algorithm::TwoShot);
            let one = if collective.is_rooted() || twice || !collective.has_data() {
                one_shot
            } else {
                one_shot.max(two_shot)
            };
            if algorithms.contains(&Algorithm::OneShot) && one > 0 {
                ranges.push(AlgorithmRange { collective, up_to: one, algorithm: Algorithm::OneShot });
            }
            if twice && two_shot > one_shot {
                ranges.push(AlgorithmRange { collective, up_to: two_shot, algorithm: Algorithm::TwoShot });
            }
        }
        Self::new(ranges).unwrap_or_default()
    }

    /// How an operation of so many bytes goes.
    pub fn choose(&self, collective: Collective, bytes: u64) -> Algorithm {
        let row = self.ranges.get(usize::from(collective.code()));
        let mut ranges = row.into_iter().flatten().flatten();
        ranges.find(|(up_to, _)| bytes <= *up_to).map_or(Algorithm::Ring, |(_, algorithm)| *algorithm)
    }

    /// All ranges, collective after collective, each ascending.
    pub fn ranges(&self) -> impl Iterator<Item = AlgorithmRange> + '_ {
        self.ranges.iter().zip(Collective::ALL).flat_map(|(row, &collective)| {
            let range =
                move |&(up_to, algorithm): &(u64, Algorithm)| AlgorithmRange { collective, up_to, algorithm };
            row.iter().flatten().map(range)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(collective: Collective, up_to: u64, algorithm: Algorithm) -> AlgorithmRange {
        AlgorithmRange { collective, up_to, algorithm }
    }

    #[test]
    fn sizes_find_their_range() {
        let ranges = [
            range(Collective::AllReduce, 0, Algorithm::OneShot),
            range(Collective::AllReduce, 4096, Algorithm::RecursiveDoubling),
            range(Collective::Reduce, u64::MAX, Algorithm::BinomialTree),
        ];
        let table = AlgorithmTable::new(ranges).unwrap();
        let sizes = [0, 1, 4096, 4097, u64::MAX].map(|bytes| table.choose(Collective::AllReduce, bytes));
        let doubling = Algorithm::RecursiveDoubling;
        assert_eq!(sizes, [Algorithm::OneShot, doubling, doubling, Algorithm::Ring, Algorithm::Ring]);
        assert_eq!(table.choose(Collective::Reduce, u64::MAX), Algorithm::BinomialTree);
        assert_eq!(table.choose(Collective::Broadcast, 0), Algorithm::Ring);
        assert_eq!(table.ranges().collect::<Vec<_>>(), ranges);
    }

    #[test]
    fn ranges_that_do_not_fit_are_refused() {
        let one = |collective, algorithm| AlgorithmTable::new([range(collective, 1, algorithm)]);
        let (collective, algorithm) = (Collective::Broadcast, Algorithm::TwoShot);
        assert_eq!(one(collective, algorithm), Err(TableError::Algorithm { collective, algorithm }));
        let (collective, up_to) = (Collective::AllReduce, 8);
        let twice = [range(collective, 8, Algorithm::OneShot), range(collective, 8, Algorithm::Ring)];
        assert_eq!(AlgorithmTable::new(twice), Err(TableError::Order { collective, up_to }));
        let many = (0..=MAX_RANGES as u64).map(|up_to| range(collective, up_to, Algorithm::Ring));
        assert_eq!(AlgorithmTable::new(many), Err(TableError::TooMany(collective)));
    }

    #[test]
    fn direct_sizes_are_those_of_each_collective() {
        let table = AlgorithmTable::direct(100, 200);
        let chosen = |collective| [100, 200, 201].map(|bytes| table.choose(collective, bytes));
        let [ring, one, two] = [Algorithm::Ring, Algorithm::OneShot, Algorithm::TwoShot];
        assert_eq!(chosen(Collective::AllReduce), [one, two, ring]);
        assert_eq!(chosen(Collective::AllGather), [one, one, ring]);
        assert_eq!(chosen(Collective::Reduce), [one, ring, ring]);
        assert_eq!(chosen(Collective::AllToAll), [ring; 3]);
        assert_eq!(table.choose(Collective::Barrier, 0), one);
        assert_eq!(AlgorithmTable::direct(0, 0), AlgorithmTable::default());
    }
}
