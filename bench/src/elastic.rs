//! An elastic training: a stated amount of work done by however many ranks there are. It loses ranks and takes others in. With
//! the provider's events and choices, or as plain launchers do it, which know what they see themselves.

pub mod model;
pub mod trainer;

use crate::seeded::SplitMix64;
pub use harmonaize_testkit::elastic::Line;
use std::path::PathBuf;
use std::time::Duration;

/// Numbers at the end of each gradient tensor, in which the first rank tells all what comes next.
pub const DECISION_NUMBERS: usize = 7;
/// Most ranks: those that leave are told by a bit each.
pub const MOST_RANKS: usize = 64;
/// What a micro-batch counts, in hundredths of one, as long as no more than the least are accumulated.
pub const WHOLE: u64 = 100;

/// What is trained, and how; the same at all ranks.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The work, in hundredths of micro-batches.
    pub work: u64,
    /// What an accelerator takes for a micro-batch. It is slept.
    pub compute: Duration,
    /// The fewest and the most micro-batches that a rank accumulates before gradients are exchanged.
    pub accumulate: (u32, u32),
    /// What a micro-batch beyond the fewest counts, in hundredths. A step over a larger batch is worth less than as many steps over
    /// smaller ones (McCandlish et al., An Empirical Model of Large-Batch Training, 2018).
    pub beyond: u64,
    /// How often the state is saved, at least.
    pub every: Duration,
    /// What saving takes, and restoring.
    pub cost: Duration,
    /// The folder that all hosts share: the saved state, and who waits to be taken in.
    pub shared: PathBuf,
    /// Whether it hears the provider's events and leaves choices to it.
    pub subscribed: bool,
}

impl Recipe {
    /// What a step of so many micro-batches on each of so many ranks counts, in hundredths.
    pub fn worth(&self, accumulate: u64, ranks: u64) -> u64 {
        let least = u64::from(self.accumulate.0).min(accumulate);
        (least * WHOLE + (accumulate - least) * self.beyond) * ranks
    }
}

/// The number by which micro-batch `number` is known in sums: 20 bits, so that they stay exact.
pub fn tag(number: u64) -> u64 {
    SplitMix64::named(0, &[number]).next_u64() >> 44
}

/// The sum of micro-batches' numbers, from `first` on.
pub fn tags(first: u64, count: u64) -> u64 {
    (first..first.saturating_add(count)).map(tag).sum()
}

/// What the first rank has decided for all; told behind the gradients, in which the others have zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Micro-batches of the next step; 0 for the fewest.
    pub accumulate: u32,
    /// Save the state before it.
    pub save: bool,
    /// Go on as another communicator before it.
    pub regroup: bool,
    /// Without these ranks.
    pub excluded: u64,
}

impl Decision {
    /// As numbers of 16 bits, whose sum with zeros is exact in `f32`.
    pub fn encode(&self) -> [f32; DECISION_NUMBERS] {
        let flags = u64::from(self.save) << 32 | u64::from(self.regroup) << 33;
        let part = |word: u64, place: usize| ((word >> (16 * place)) & 0xffff) as f32;
        let first = u64::from(self.accumulate) | flags;
        std::array::from_fn(
            |place| if place < 3 { part(first, place) } else { part(self.excluded, place - 3) },
        )
    }

    /// From numbers.
    pub fn decode([a, b, c, excluded @ ..]: [f32; DECISION_NUMBERS]) -> Self {
        let whole = |parts: &[f32]| parts.iter().rev().fold(0, |word: u64, part| word << 16 | *part as u64);
        let first = whole(&[a, b, c]);
        let flag = |bit: u32| first >> bit & 1 == 1;
        Self { accumulate: first as u32, save: flag(32), regroup: flag(33), excluded: whole(&excluded) }
    }

    /// Whether it goes on without this rank.
    pub fn excludes(&self, rank: usize) -> bool {
        rank < MOST_RANKS && self.excluded >> rank & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decision_survives_the_sum_with_zeros() {
        let decision = Decision { accumulate: 16, save: true, regroup: false, excluded: 1 << 63 | 2 };
        assert_eq!(Decision::decode(decision.encode()), decision);
        assert_eq!(Decision::decode([0.0; DECISION_NUMBERS]), Decision::default());
        let leaving = [0, 1, 62, 63, 64].map(|rank| decision.excludes(rank));
        assert_eq!(leaving, [false, true, false, true, false]);
    }

    #[test]
    fn what_is_accumulated_beyond_the_fewest_counts_less() {
        let recipe = Recipe {
            work: 1,
            compute: Duration::ZERO,
            accumulate: (2, 16),
            beyond: 70,
            every: Duration::ZERO,
            cost: Duration::ZERO,
            shared: PathBuf::new(),
            subscribed: false,
        };
        assert_eq!([1, 2, 3, 16].map(|count| recipe.worth(count, 1)), [100, 200, 270, 1180]);
        assert_eq!(recipe.worth(3, 8), 8 * 270);
    }
}
