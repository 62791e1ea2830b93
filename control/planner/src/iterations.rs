//! The rhythm of a job: how often it communicates, and for how long, from when its operations began and ended.

use harmonaize_units::{Bytes, Nanos};

/// Most iterations that are looked at, the newest: what was before a change shall soon be forgotten.
const MAX_ITERATIONS: usize = 12;

/// Most operations of an iteration.
const MAX_OPERATIONS: usize = 32;

/// Fewest iterations that make a rhythm.
const MIN_ITERATIONS: usize = 4;

/// One operation of a communicator, from its first call to its last end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// When the first rank called.
    pub began: Nanos,
    /// When the last had its result.
    pub ended: Nanos,
    /// Bytes of a rank's tensor.
    pub bytes: Bytes,
}

/// Iterations: a busy part of one or more operations, then a quiet one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IterationPattern {
    /// From the beginning of a busy part to the next, the median.
    pub period: Nanos,
    /// How long the busy part lasts, the median; at most the period.
    pub busy: Nanos,
    /// Bytes of a rank's tensors in a busy part; 0 where not known.
    pub bytes: Bytes,
    /// When the newest busy part began.
    pub last_began: Nanos,
    /// Operations of a busy part.
    pub operations: u32,
    /// The longest silence within a busy part, the median.
    pub longest_gap: Nanos,
}

impl IterationPattern {
    /// The rhythm of these operations, oldest first; none where they are too few or not regular. An iteration has as many
    /// operations as it takes for sizes to repeat exactly, and for all periods, else for four of five, or quiet parts of them that are not short, to
    /// lie a tenth of the period from the median at most; the silence between iterations is at least twice as long as any within. Where sizes have
    /// changed of late, as after what a job does to begin, the newest few iterations count.
    pub fn detect(operations: &[Operation]) -> Option<Self> {
        let tries = [(MAX_ITERATIONS, 1.0), (MAX_ITERATIONS, 0.8), (MIN_ITERATIONS + 1, 1.0)];
        tries.into_iter().find_map(|(iterations, alike)| {
            // Many first: of operations of one size most are as far from the next one as others, also where they are an iteration together.
            (1..=MAX_OPERATIONS.min(operations.len() / MIN_ITERATIONS)).rev().find_map(|count| {
                if iterations < MAX_ITERATIONS && operations.len() >= count * MAX_ITERATIONS {
                    // There are enough to tell.
                    return None;
                }
                let newest = operations.len().saturating_sub(count * iterations);
                Self::detect_with(operations.get(newest..)?, count, alike)
            })
        })
    }

    /// The rhythm, if an iteration has so many operations, and such a part of them is alike.
    fn detect_with(operations: &[Operation], count: usize, part: f64) -> Option<Self> {
        let repeats = operations.iter().zip(operations.get(count..)?);
        let pairs = operations.len() - count;
        if repeats.filter(|(one, next)| one.bytes == next.bytes).count() * 10 < pairs * 9 {
            return None;
        }
        // The busy part begins after the longest silence.
        let silence = |offset: usize| {
            let before = operations.iter().skip(offset).step_by(count);
            let after = operations.iter().skip(offset + 1).step_by(count);
            median(before.zip(after).map(|(one, next)| next.began.0.saturating_sub(one.ended.0)).collect())
        };
        let mut silences: Vec<(u64, usize)> = (0..count).map(|offset| (silence(offset), offset)).collect();
        silences.sort_by_key(|(silence, offset)| (std::cmp::Reverse(*silence), *offset));
        let (longest, last) = *silences.first()?;
        let within = silences.get(1).map_or(0, |(second, _)| *second);
        if within.saturating_mul(2) > longest {
            // Any row of operations is regular if it is long enough; these do not belong together.
            return None;
        }
        let first = (last + 1) % count;
        let parts: Vec<&[Operation]> = operations.get(first..)?.chunks_exact(count).collect();
        let begins: Vec<u64> =
            parts.iter().filter_map(|part| part.first()).map(|operation| operation.began.0).collect();
        let next = begins.iter().skip(1);
        let periods: Vec<u64> =
            begins.iter().zip(next).map(|(one, next)| next.saturating_sub(*one)).collect();
        let period = median(periods.clone());
        let lasts = parts.iter().filter_map(|part| {
            let ended = part.iter().map(|operation| operation.ended.0).max()?;
            Some(ended.saturating_sub(part.first()?.began.0))
        });
        let lasts: Vec<u64> = lasts.collect();
        let quiet: Vec<u64> =
            periods.iter().zip(&lasts).map(|(period, last)| period.saturating_sub(*last)).collect();
        // How long a busy part lasts is up to others too; what lies between is the job's own.
        let own = median(quiet.clone());
        let alike = |all: &[u64], middle: u64| {
            let regular = all.iter().filter(|found| found.abs_diff(middle) <= period / 10).count();
            regular as f64 >= all.len() as f64 * part
        };
        let regular = alike(&periods, period) || own >= period / 4 && alike(&quiet, own);
        if periods.len() + 1 < MIN_ITERATIONS || period == 0 || !regular {
            return None;
        }
        let bytes = parts.last()?.iter().map(|operation| operation.bytes.0).fold(0, u64::saturating_add);
        let newest = operations.iter().skip(first).step_by(count).next_back()?;
        let busy = Nanos(median(lasts).min(period));
        Some(Self {
            period: Nanos(period),
            busy,
            bytes: Bytes(bytes),
            last_began: newest.began,
            operations: count as u32,
            longest_gap: Nanos(within),
        })
    }
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Iterations of 100 ms: operations of these bytes back to back, 10 ms each.
    fn steady(iterations: u64, bytes: &[u64]) -> Vec<Operation> {
        let each = |iteration: u64| {
            let operation = move |(index, bytes): (usize, &u64)| {
                let began = (iteration * 100 + index as u64 * 11) * 1_000_000;
                Operation { began: Nanos(began), ended: Nanos(began + 10_000_000), bytes: Bytes(*bytes) }
            };
            bytes.iter().enumerate().map(operation).collect::<Vec<_>>()
        };
        (0..iterations).flat_map(each).collect()
    }

    #[test]
    fn finds_iterations_of_one_or_more_operations() {
        for bytes in [&[7][..], &[5, 5, 5], &[1, 2, 3, 1]] {
            let busy = (bytes.len() as u64 - 1) * 11 + 10;
            let expected = IterationPattern {
                period: Nanos(100_000_000),
                busy: Nanos(busy * 1_000_000),
                bytes: Bytes(bytes.iter().sum()),
                last_began: Nanos(900_000_000),
                operations: bytes.len() as u32,
                longest_gap: Nanos(if bytes.len() > 1 { 1_000_000 } else { 0 }),
            };
            assert_eq!(IterationPattern::detect(&steady(10, bytes)), Some(expected));
            // It begins wherever the record does.
            assert_eq!(IterationPattern::detect(&steady(10, bytes)[bytes.len() / 2..]), Some(expected));
        }
        assert_eq!(IterationPattern::detect(&steady(3, &[7])), None);
        assert_eq!(IterationPattern::detect(&[]), None);
    }

    #[test]
    fn one_pause_is_tolerated_irregular_is_not() {
        let mut operations = steady(12, &[4, 4]);
        for operation in &mut operations[14..] {
            operation.began.0 += 5_000_000_000;
            operation.ended.0 += 5_000_000_000;
        }
        assert_eq!(
            IterationPattern::detect(&operations).map(|rhythm| rhythm.period),
            Some(Nanos(100_000_000))
        );
        let mut at = 0;
        let chaos = (0_u64..40).map(|index| {
            at += (index * index * 7919) % 97 * 1_000_000;
            Operation { began: Nanos(at), ended: Nanos(at + 1000), bytes: Bytes(8) }
        });
        assert_eq!(IterationPattern::detect(&chaos.collect::<Vec<_>>()), None);
    }

    #[test]
    fn distant_operations_are_not_one_iteration() {
        // Silences of 20, 30, 40, 20, .. ms.
        let mut at = 0;
        let row = (0_u64..48).map(|index| {
            at += 10_000_000 * (3 + index % 3);
            Operation { began: Nanos(at), ended: Nanos(at + 10_000_000), bytes: Bytes(8) }
        });
        assert_eq!(IterationPattern::detect(&row.collect::<Vec<_>>()), None);
    }

    #[test]
    fn occasional_delays_keep_the_period() {
        // It computes for 60 ms; every other time its operation takes twice as long.
        let mut at = 0;
        let operation = |index: u64| {
            let began = at + 60_000_000;
            at = began + 40_000_000 * (1 + index % 2);
            Operation { began: Nanos(began), ended: Nanos(at), bytes: Bytes(8) }
        };
        let operations: Vec<_> = (0..12).map(operation).collect();
        let found = IterationPattern::detect(&operations)
            .map(|rhythm| (rhythm.operations, rhythm.busy <= Nanos(80_000_000)));
        assert_eq!(found, Some((1, true)));
    }

    #[test]
    fn equal_operations_group_into_one_iteration() {
        // Most periods between single ones are alike, too.
        let found =
            IterationPattern::detect(&steady(7, &[5; 8])).map(|rhythm| (rhythm.operations, rhythm.period));
        assert_eq!(found, Some((8, Nanos(100_000_000))));
    }

    #[test]
    fn one_long_iteration_is_not_split() {
        let mut operations = steady(8, &[5; 8]);
        for operation in operations.iter_mut().skip(40) {
            operation.began.0 += 30_000_000;
            operation.ended.0 += 30_000_000;
        }
        let found = IterationPattern::detect(&operations).map(|rhythm| (rhythm.operations, rhythm.period));
        assert_eq!(found, Some((8, Nanos(100_000_000))));
    }

    #[test]
    fn changed_sizes_do_not_make_irregular_regular() {
        let mut operations = steady(16, &[7]);
        for (index, operation) in operations.iter_mut().enumerate().take(11) {
            operation.bytes = Bytes(index as u64);
        }
        assert_eq!(IterationPattern::detect(&operations), None);
    }

    #[test]
    fn startup_does_not_hide_the_period() {
        let mut operations = steady(6, &[7]);
        operations[0].bytes = Bytes(0);
        assert_eq!(
            IterationPattern::detect(&operations).map(|rhythm| rhythm.period),
            Some(Nanos(100_000_000))
        );
        operations.truncate(5);
        assert_eq!(IterationPattern::detect(&operations), None);
    }

    #[test]
    fn what_was_before_a_change_is_soon_forgotten() {
        let mut operations = steady(30, &[7]);
        for (index, operation) in operations.iter_mut().enumerate() {
            // The last twelve iterations take 160 ms.
            let later = (index as u64).saturating_sub(18) * 60_000_000;
            operation.began.0 += later;
            operation.ended.0 += later;
        }
        assert_eq!(
            IterationPattern::detect(&operations).map(|rhythm| rhythm.period),
            Some(Nanos(160_000_000))
        );
    }

    proptest! {
        #[test]
        fn any_operations_give_a_valid_period(times in prop::collection::vec((any::<u64>(), any::<u64>(), 0_u64..3), 0..80)) {
            let operation = |(began, ended, bytes): &(u64, u64, u64)| {
                Operation { began: Nanos(*began), ended: Nanos(*ended), bytes: Bytes(*bytes) }
            };
            let operations: Vec<Operation> = times.iter().map(operation).collect();
            if let Some(rhythm) = IterationPattern::detect(&operations) {
                prop_assert!(rhythm.busy <= rhythm.period && rhythm.period > Nanos(0));
            }
        }
    }
}
