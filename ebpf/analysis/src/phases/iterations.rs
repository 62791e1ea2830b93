//! Whether traffic falls into groups of the same bytes at the same distances, and where one ends.

use crate::nanos;
use harmonaize_abi::Nanos;
use std::time::Duration;

/// A stretch of activity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) began: Nanos,
    pub(super) ended: Nanos,
    pub(super) bytes: u64,
}

/// How a job's traffic goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IterationPattern {
    /// A silence of this length parts two groups.
    pub(super) gap: Duration,
    /// From one group's beginning to the next's: the median.
    pub(super) period: Duration,
    /// Bytes of a group: the median.
    pub(super) bytes: u64,
    /// What most groups differ from that, in bytes.
    pub(super) spread: u64,
}

/// Distances that differ by no more than this part are the same.
const SAME_PERIOD: f64 = 0.05;

impl IterationPattern {
    /// Whether it comes once in so many iterations of such a period. That is what is part of each, or of every second.
    pub(super) fn has_period(&self, period: Duration) -> bool {
        is_multiple(self.period, period)
    }
}

/// Whether a period is so many of another one.
pub(super) fn is_multiple(long: Duration, period: Duration) -> bool {
    let (own, period) = (nanos(long), nanos(period));
    let many = (own as f64 / period.max(1) as f64).round();
    own.abs_diff(period.saturating_mul(many as u64)) as f64 <= SAME_PERIOD * period as f64
}

/// Silences tried, shortest first: 1 ms, and each half as long again as the one before, to some 30 s.
pub(super) const SHORTEST_GAP: Duration = Duration::from_millis(1);
const GAPS: u32 = 26;
/// A group of less than this part of the usual bytes is chatter.
pub(super) const CHATTER: f64 = 0.05;
/// What is believed: so many distances at least, of which a part is near the median. None is longer than so many medians, as
/// those of groups of groups are, and none shorter. Nearly all groups' bytes have to be so near to each other. Each is about as
/// unlikely in traffic at random times (one in a million) as the others.
const EVIDENCE: [Evidence; 6] = [
    Evidence { min_periods: 7, part: 1.0, near: 0.12, within: (0.4, 2.2), bytes: 0.2 },
    Evidence { min_periods: 9, part: 1.0, near: 0.2, within: (0.4, 2.2), bytes: 0.2 },
    Evidence { min_periods: 12, part: 0.9, near: 0.3, within: (0.0, 2.2), bytes: 0.2 },
    Evidence { min_periods: 16, part: 0.8, near: 0.35, within: (0.0, 3.0), bytes: 0.03 },
    Evidence { min_periods: 20, part: 0.65, near: 0.35, within: (0.4, 3.0), bytes: 0.01 },
    Evidence { min_periods: 24, part: 0.85, near: 0.35, within: (0.0, 2.2), bytes: 0.2 },
];
/// Of groups, this part has to have the same bytes.
const REGULAR: f64 = 0.85;
/// The fewest distances of all that are believed.
const MIN_PERIODS: usize = 7;

struct Evidence {
    min_periods: usize,
    part: f64,
    near: f64,
    within: (f64, f64),
    bytes: f64,
}

/// The median of numbers, the lower one of two; reorders them.
pub(super) fn median<T: Copy + Ord>(numbers: &mut [T]) -> Option<T> {
    let middle = numbers.len().checked_sub(1)? / 2;
    Some(*numbers.select_nth_unstable(middle).1)
}

/// Joins what is sorted by its beginning and parted by no more than `gap`.
pub(super) fn joined(spans: &[Span], gap: Duration) -> Vec<Span> {
    let mut groups: Vec<Span> = Vec::new();
    for span in spans {
        match groups.last_mut() {
            Some(last) if span.began <= last.ended.after(gap) => {
                last.ended = last.ended.max(span.ended);
                last.bytes = last.bytes.saturating_add(span.bytes);
            }
            _ => groups.push(*span),
        }
    }
    groups
}

/// The rhythm of spans that are sorted by their beginning, if they have one. Of several, that of the longest silences: buckets
/// of an iteration may be alike.
pub(super) fn find(spans: &[Span]) -> Option<IterationPattern> {
    let mut fine = joined(spans, SHORTEST_GAP / 2);
    let mut found = None;
    let mut gap = SHORTEST_GAP;
    for _ in 0..GAPS {
        fine = joined(&fine, gap);
        if fine.len() < MIN_PERIODS {
            break;
        }
        found = regular(&fine, gap).or(found);
        gap += gap / 2;
    }
    let (mut rhythm, gap) = found?;
    let inner = longest_gap_within(spans, gap);
    rhythm.gap = between(inner, rhythm.gap);
    Some(rhythm)
}

/// A length between two, nearer to the shorter; but at least the shortest gap.
fn between(shorter: Duration, longer: Duration) -> Duration {
    let mean = (nanos(shorter.max(SHORTEST_GAP)) as f64 * nanos(longer) as f64).sqrt();
    Duration::from_nanos(mean as u64).clamp(SHORTEST_GAP, longer.max(SHORTEST_GAP))
}

/// The longest silence within groups that are parted by `gap`.
fn longest_gap_within(spans: &[Span], gap: Duration) -> Duration {
    let (mut end, mut longest) = (None, Duration::ZERO);
    for span in spans {
        if let Some(end) = end {
            let silence = span.began.since(end);
            if silence <= gap {
                longest = longest.max(silence);
            }
        }
        end = end.max(Some(span.ended));
    }
    longest
}

/// Returns the iteration pattern of groups, and the gap that they were made by. The pattern's gap is the shortest silence between
/// them. How a job began need not fit: some of the first groups may be left out.
fn regular(groups: &[Span], gap: Duration) -> Option<(IterationPattern, Duration)> {
    let mut sizes: Vec<u64> = groups.iter().map(|group| group.bytes).collect();
    let usual = median(&mut sizes)?;
    // Many small ones may pull the median down: those that matter are the larger ones.
    let largest = sizes.iter().max().copied().unwrap_or_default();
    let bar = if (usual as f64) < CHATTER * largest as f64 { largest / 2 } else { usual };
    let real: Vec<Span> =
        groups.iter().filter(|group| group.bytes as f64 > CHATTER * bar as f64).copied().collect();
    // The last may still go on, and the first have begun earlier.
    let real = real.get(..real.len().checked_sub(1)?)?;
    let skips = [0, 1, 2, 4, real.len().saturating_sub(64), real.len().saturating_sub(32)];
    skips.into_iter().find_map(|skip| Some((verify_evidence(real.get(skip..)?)?, gap)))
}

fn verify_evidence(groups: &[Span]) -> Option<IterationPattern> {
    let mut sizes: Vec<u64> = groups.iter().map(|group| group.bytes).collect();
    let bytes = median(&mut sizes)?;
    if bytes == 0 {
        return None;
    }
    let distance = |pair: &[Span]| match pair {
        [one, next] => nanos(next.began.since(one.began)),
        _ => 0,
    };
    let mut distances: Vec<u64> = groups.windows(2).map(distance).collect();
    let middle = median(&mut distances)?;
    let near = |numbers: &[u64], middle: u64, part: f64| {
        let near = |one: &&u64| one.abs_diff(middle) as f64 <= part * middle as f64;
        numbers.iter().filter(near).count() as f64 / numbers.len() as f64
    };
    let within = |distance: u64, (least, most): (f64, f64)| {
        (least..=most).contains(&(distance as f64 / middle.max(1) as f64))
    };
    let fits = |one: &Evidence| {
        distances.len() >= one.min_periods
            && near(&distances, middle, one.near) >= one.part
            && distances.iter().all(|distance| within(*distance, one.within))
            && near(&sizes, bytes, one.bytes) >= REGULAR
    };
    if !EVIDENCE.iter().any(fits) {
        return None;
    }
    let silence = |pair: &[Span]| match pair {
        [one, next] => next.began.since(one.ended),
        _ => Duration::ZERO,
    };
    let mut silences: Vec<Duration> = groups.windows(2).map(silence).collect();
    silences.sort_unstable();
    let gap = silences.get(silences.len() / 10).copied()?;
    let mut spreads: Vec<u64> = sizes.iter().map(|size| size.abs_diff(bytes)).collect();
    spreads.sort_unstable();
    let spread = spreads.get(spreads.len() * 17 / 20).copied().unwrap_or_default();
    Some(IterationPattern { gap, period: Duration::from_nanos(middle), bytes, spread })
}

/// Silences between groups of groups are at least `APART / APART_OF` times those within. They are no longer than `AS_LONG` times
/// such a group.
const APART: u32 = 5;
const APART_OF: u32 = 2;
const AS_LONG: u32 = 2;
/// So many groups of groups at least.
const BLOCKS: usize = 6;

/// Returns the iteration pattern of groups of groups, if the groups were parts of iterations. There are always as many, with the
/// same silence behind them. Silences that are hardly longer than others (a pause every tenth iteration), or much longer than all
/// before (an evaluation), are none.
pub(super) fn merge_groups(spans: &[Span]) -> Option<IterationPattern> {
    let silence = |pair: &[Span]| match pair {
        [one, next] => next.began.since(one.ended),
        _ => Duration::ZERO,
    };
    let mut silences: Vec<Duration> = spans.windows(2).map(silence).collect();
    silences.sort_unstable();
    let jump = silences.windows(2).rev().find(|pair| match pair {
        [shorter, longer] => longer.saturating_mul(APART_OF) >= shorter.saturating_mul(APART),
        _ => false,
    })?;
    let (inner, outer) = (jump.first().copied()?, jump.last().copied()?);
    let gap = between(inner, outer);
    let blocks = joined(spans, gap);
    // The first and the last may not be whole.
    let blocks = blocks.get(1..blocks.len().checked_sub(1)?)?;
    let parts = |block: &Span| {
        let within = |span: &&Span| span.began >= block.began && span.ended <= block.ended;
        spans.iter().filter(within).count()
    };
    let many = parts(blocks.first()?);
    let mut lengths: Vec<Duration> = blocks.iter().map(|block| block.ended.since(block.began)).collect();
    let length = median(&mut lengths)?;
    let alike = blocks.iter().all(|block| parts(block) == many) && outer <= length.saturating_mul(AS_LONG);
    if many < 2 || blocks.len() < BLOCKS || !alike {
        return None;
    }
    let mut distances: Vec<Duration> = blocks
        .windows(2)
        .map(|pair| match pair {
            [one, next] => next.began.since(one.began),
            _ => Duration::ZERO,
        })
        .collect();
    let mut sizes: Vec<u64> = blocks.iter().map(|block| block.bytes).collect();
    let (period, bytes) = (median(&mut distances)?, median(&mut sizes)?);
    let mut spreads: Vec<u64> = sizes.iter().map(|size| size.abs_diff(bytes)).collect();
    Some(IterationPattern { gap, period, bytes, spread: median(&mut spreads)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Groups of 2 ms with such silences behind them, over and over.
    fn spans(silences: &[u32], count: usize) -> Vec<Span> {
        let mut at = Nanos(10_000_000);
        let mut spans = Vec::new();
        for silence in silences.iter().copied().cycle().take(count) {
            spans.push(Span { began: at, ended: at.after(2 * MS), bytes: 1000 });
            at = at.after((2 + silence) * MS);
        }
        spans
    }

    #[test]
    fn equal_buckets_are_parts_of_iterations() {
        let found = merge_groups(&spans(&[3, 3, 3, 12], 40)).unwrap();
        assert_eq!((found.bytes, found.period, found.spread), (4000, 29 * MS, 0));
        assert!((3 * MS..12 * MS).contains(&found.gap));
        // Too few, a pause that is hardly one, an evaluation, and nothing at all.
        assert_eq!(merge_groups(&spans(&[3, 3, 3, 12], 20)), None);
        assert_eq!(merge_groups(&spans(&[3, 3, 3, 6], 80)), None);
        assert_eq!(merge_groups(&spans(&[3, 3, 3, 120], 80)), None);
        assert_eq!(merge_groups(&spans(&[3], 80)), None);
        assert_eq!(merge_groups(&spans(&[3, 3, 12, 3, 12, 3, 3, 3, 12], 80)), None);
        assert_eq!(merge_groups(&[]), None);
    }

    #[test]
    fn only_regular_groups_have_a_pattern() {
        let found = find(&spans(&[20], 12)).unwrap();
        assert_eq!((found.bytes, found.period), (1000, 22 * MS));
        // Buckets of an iteration, once there are enough of them.
        assert_eq!(find(&spans(&[3, 3, 20], 40)).unwrap().bytes, 3000);
        assert_eq!(find(&spans(&[20], 7)), None);
        let wild: Vec<u32> = (0..200_u32).map(|at| at * at * at % 211).collect();
        assert_eq!(find(&spans(&wild, 200)), None);
        assert_eq!(find(&[]), None);
    }
}
