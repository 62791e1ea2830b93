//! The judge of one subject: from each unit the lateness of its ranks and of its edges.

use super::ring::{Baseline, Spread, WINDOW, median, quantile};
use super::track::{Track, Transition};
use super::{EdgeTimes, Kind, Limits, Observed, RankTimes, Straggler, Subject, Unit};
use crate::nanos;
use harmonaize_abi::Nanos;
use std::collections::BTreeMap;
use std::time::Duration;

type Rank = u32;
type Ends = (u32, u32);

/// Lately judged sizes, to tell an iteration's main operations from the small ones between them.
const SIZES: usize = 64;

/// All that is remembered of a subject.
#[derive(Debug, Default)]
pub(super) struct SubjectState {
    last: Option<u64>,
    ranks: BTreeMap<Rank, RankMemory>,
    edges: BTreeMap<Ends, EdgeMemory>,
    compute: Track<Rank>,
    network: Track<Ends>,
    /// Which rank a late edge is laid to.
    blamed: BTreeMap<Ends, Rank>,
    /// How long a unit is on the network, once all ranks are there.
    duration: Baseline,
    /// How long the mean rank is in a unit.
    mean: Baseline,
    gaps: RecentValues,
    sizes: RecentValues,
    scratch: Vec<i64>,
    /// How long the median rank computed; nothing where that is not known.
    median_compute: Duration,
    of_ranks: Vec<(Rank, i64)>,
    of_edges: Vec<(Ends, i64)>,
    /// Of each edge: how much longer it was busy than others, and by how much it stands out.
    excess_by_edge: Vec<(i64, i64)>,
    transitions: Vec<Transition<Ends>>,
}

#[derive(Debug, Default)]
struct RankMemory {
    /// When it ended the last unit, and which that was.
    ended: Option<(u64, Nanos)>,
    /// When it ended the last unit that overlapped none before it.
    judged: Option<Nanos>,
    /// By how much it starts after the median rank: the distance of clocks, where it is not late.
    offset: Baseline,
}

#[derive(Debug, Default)]
struct EdgeMemory {
    transit: Baseline,
    rtt: Baseline,
}

/// The last values of something, for their upper end.
#[derive(Debug)]
struct RecentValues {
    values: [i64; SIZES],
    count: usize,
    next: usize,
}

impl Default for RecentValues {
    fn default() -> Self {
        Self { values: [0; SIZES], count: 0, next: 0 }
    }
}

impl RecentValues {
    /// Whether a value is at least a third of what the upper end was lately. The value is kept. The upper end is the 15th of 16: rare
    /// pauses lie beyond.
    fn is_large(&mut self, value: i64) -> bool {
        if let Some(place) = self.values.get_mut(self.next) {
            *place = value;
        }
        self.next = (self.next + 1) % SIZES;
        self.count = (self.count + 1).min(SIZES);
        let mut values = self.values;
        let upper = values.get_mut(..self.count).and_then(|values| quantile(values, 15, 16));
        upper.is_none_or(|upper| value >= upper / 3)
    }
}

/// `later - earlier`, whichever is later.
fn apart(later: Nanos, earlier: Nanos) -> i64 {
    later.0.wrapping_sub(earlier.0).cast_signed()
}

/// The nanoseconds of a duration, for differences.
fn signed(span: Duration) -> i64 {
    nanos(span).cast_signed()
}

impl SubjectState {
    /// Takes the next unit. Units that are not after the last are left out.
    pub(super) fn take(
        &mut self,
        subject: Subject,
        observed: &Observed,
        limits: &Limits,
        found: &mut impl FnMut(Straggler),
    ) {
        if self.last.is_some_and(|last| observed.unit <= last)
            || observed.ranks.len() > limits.max_items
            || observed.edges.len() > limits.max_items
        {
            return;
        }
        let start = observed.ranks.iter().filter_map(|rank| rank.start).min();
        let first = observed.edges.iter().filter_map(|edge| edge.first).min();
        let end = observed.ranks.iter().filter_map(|rank| rank.end).max();
        let last = observed.edges.iter().filter_map(|edge| edge.arrived.or(edge.last)).max();
        let began = start.or(first).unwrap_or_default();
        let unit = Unit { number: observed.unit, began, ended: end.or(last).unwrap_or(began) };
        let overlaps = self.overlaps(observed);
        if !overlaps && self.measure_ranks(observed) {
            self.judge_ranks(unit, subject, limits, found);
        }
        self.record_ends(observed);
        if !overlaps {
            self.record_judged();
        }
        if self.measure_edges(observed, limits) {
            self.judge_edges((unit, overlaps), subject, limits, found);
        }
        self.last = Some(observed.unit);
    }

    /// What holds now.
    pub(super) fn current(&self, subject: Subject) -> impl Iterator<Item = Straggler> {
        let compute = self.compute.late().map(move |turn| straggler(subject, turn.key, &turn, None));
        let ranks = self.blamed.values().copied().collect::<std::collections::BTreeSet<_>>();
        let network = ranks.into_iter().filter_map(move |rank| self.straggler_of(subject, rank));
        compute.chain(network)
    }

    /// Lateness of the ranks into `of_ranks`; false where this unit says nothing of it.
    ///
    /// Where every rank's end of the unit before is known and none had started before it, the time between is what counts:
    /// both are by one clock, and a rank that had its result late starts late without being slow. Else the start itself, less
    /// what is usual for the rank.
    fn measure_ranks(&mut self, observed: &Observed) -> bool {
        self.of_ranks.clear();
        let started = || observed.ranks.iter().filter_map(|rank| Some((rank.rank, rank.start?, rank.waited)));
        if started().count() < 2 {
            return false;
        }
        for (rank, start, waited) in started() {
            let before = self.ranks.get(&rank).and_then(|memory| memory.ended);
            let ended = before.filter(|(unit, _)| Some(*unit) == self.last).map(|(_, ended)| ended);
            let gap = ended.map(|ended| apart(start, ended)).filter(|gap| *gap >= 0);
            let Some(gap) = gap else { break };
            self.of_ranks.push((rank, gap.saturating_sub_unsigned(nanos(waited))));
        }
        if self.of_ranks.len() == started().count() {
            let middle = self.level();
            self.median_compute = Duration::from_nanos(u64::try_from(middle).unwrap_or_default());
            return self.gaps.is_large(middle);
        }
        self.of_ranks.clear();
        self.median_compute = Duration::ZERO;
        self.of_ranks.extend(started().map(|(rank, start, _)| (rank, start.0.cast_signed())));
        self.level();
        for (rank, lateness) in &mut self.of_ranks {
            let memory = self.ranks.entry(*rank).or_default();
            let usual = memory.offset.spread().map(|spread| spread.median);
            if !self.compute.late().any(|turn| turn.key == *rank) {
                memory.offset.push(*lateness);
            }
            *lateness = usual.map_or(0, |usual| lateness.saturating_sub(usual));
        }
        true
    }

    /// Makes the values of ranks distances from their median, which it returns.
    fn level(&mut self) -> i64 {
        self.scratch.clear();
        self.scratch.extend(self.of_ranks.iter().map(|(_, value)| *value));
        let middle = median(&mut self.scratch).unwrap_or_default();
        for (_, value) in &mut self.of_ranks {
            *value = value.wrapping_sub(middle);
        }
        middle
    }

    /// Whether a rank started this unit before it had ended the last one that overlapped none. Both are then late for one reason.
    fn overlaps(&self, observed: &Observed) -> bool {
        observed.ranks.iter().any(|times| {
            let judged = self.ranks.get(&times.rank).and_then(|memory| memory.judged);
            times.start.zip(judged).is_some_and(|(start, judged)| start < judged)
        })
    }

    /// The unit that the ranks have ended just now is one that others may overlap.
    fn record_judged(&mut self) {
        for memory in self.ranks.values_mut() {
            memory.judged = memory.ended.map(|(_, ended)| ended);
        }
    }

    fn record_ends(&mut self, observed: &Observed) {
        for RankTimes { rank, end, .. } in &observed.ranks {
            if let Some(end) = end {
                self.ranks.entry(*rank).or_default().ended = Some((observed.unit, *end));
            }
        }
        let present = |rank: &Rank| observed.ranks.binary_search_by_key(rank, |times| times.rank).is_ok();
        if self.ranks.len() > 2 * observed.ranks.len() {
            self.ranks.retain(|rank, _| present(rank));
        }
    }

    fn judge_ranks(
        &mut self,
        unit: Unit,
        subject: Subject,
        limits: &Limits,
        found: &mut impl FnMut(Straggler),
    ) {
        let floor =
            nanos(limits.least).max((nanos(self.median_compute) as f64 * limits.part) as u64).cast_signed();
        let ranks = &mut self.ranks;
        self.compute.take((unit, false), &self.of_ranks, floor, limits, |turn| {
            if let Some(memory) = ranks.get_mut(&turn.key).filter(|_| turn.late) {
                memory.offset.discard();
            }
            let mut straggler = straggler(subject, turn.key, &turn, None);
            straggler.found = unit.ended.max(unit.began);
            found(straggler);
        });
    }

    /// Lateness of the edges into `of_edges`; false where this unit says nothing of it.
    ///
    /// An edge that was busy for longer than its bytes take at the lower quartile of paces is late by the rest of it; unless that
    /// is a large part of the unit, no more than the unit was held up. An edge that stands out by its round trips, its
    /// retransmissions, or the time that its last bytes took to arrive, is late by what held the unit up, where that is known.
    fn measure_edges(&mut self, observed: &Observed, limits: &Limits) -> bool {
        self.of_edges.clear();
        let total = observed.edges.iter().fold(0u64, |sum, edge| sum.saturating_add(edge.bytes));
        if observed.edges.len() < 2 || total == 0 {
            return false;
        }
        if !self.sizes.is_large(i64::try_from(total).unwrap_or(i64::MAX)) {
            return false;
        }
        let heaviest = observed.edges.iter().map(|edge| edge.bytes).max().unwrap_or_default();
        let edges = || observed.edges.iter().filter(move |edge| edge.bytes >= heaviest / 8 && edge.bytes > 0);
        let both = self.unit_duration(observed);
        let took = both.map(|(took, _)| took);
        let common = Common {
            time_per_byte: self.over(edges().filter_map(picoseconds_per_byte)),
            lag: self.over(edges().filter_map(|edge| self.transit_beyond_usual(edge))),
            rtt: self.over(edges().filter_map(|edge| edge.rtt.map(signed))),
            retransmissions: self.over(edges().map(|edge| edge.retransmissions.cast_signed())),
            unit_duration: took,
            excess: both.and_then(|(took, mean)| {
                let beyond = excess(&self.duration, took, limits)?;
                Some(beyond.min(excess(&self.mean, mean, limits)?))
            }),
        };
        self.excess_by_edge.clear();
        for edge in edges() {
            self.excess_by_edge.push((busy_excess(edge, &common), self.stands_out(edge, &common, limits)));
        }
        let busiest = self.excess_by_edge.iter().map(|(busy, _)| *busy).max().unwrap_or_default();
        let most = self.excess_by_edge.iter().map(|(_, beyond)| *beyond).max().unwrap_or_default();
        for (edge, (busy, beyond)) in edges().zip(&self.excess_by_edge) {
            let ends = (edge.from, edge.to);
            // Behind a slow edge others are a little busier too: only what is like the worst counts, or what was late before.
            let kept = self.blamed.contains_key(&ends);
            let share = if kept { 4 } else { 2 };
            let busy = if *busy >= busiest / share { *busy } else { 0 };
            let stands_out = (kept || *beyond > 0) && *beyond >= most / share;
            let held_up = if stands_out { common.excess.unwrap_or(*beyond) } else { 0 };
            self.of_edges.push((ends, busy.max(held_up)));
        }
        // While a rank is late its neighbours' first steps are done before it comes, and units are shorter.
        if let Some((took, mean)) =
            both.filter(|_| self.blamed.is_empty() && self.compute.late().next().is_none())
        {
            self.duration.push(took);
            self.mean.push(mean);
        }
        self.remember(observed);
        true
    }

    /// By how much an edge's bytes take longer than others' and than usual; 0 where that is within the noise.
    fn stands_out(&self, edge: &EdgeTimes, common: &Common, limits: &Limits) -> i64 {
        let memory = self.edges.get(&(edge.from, edge.to));
        let clear = |beyond: i64, usual: Option<Spread>| {
            let noise = usual.map_or(0.0, |usual| usual.deviation as f64 * limits.stands_out);
            if beyond as f64 >= noise.max(nanos(limits.min_rtt_excess) as f64) { beyond } else { 0 }
        };
        let usual = memory.and_then(|memory| memory.rtt.spread());
        let delay = common.rtt.zip(edge.rtt).map_or(0, |(others, own)| {
            let rest = usual.map_or(others, |usual| usual.median.max(others));
            let beyond = signed(own).saturating_sub(rest);
            if beyond >= rest / 2 { clear(beyond, usual) } else { 0 }
        });
        let usual = memory.and_then(|memory| memory.transit.spread());
        let lag = common.lag.zip(self.transit_beyond_usual(edge));
        let lag = lag.map_or(0, |(others, own)| clear(own.saturating_sub(others), usual));
        let repeated = common.retransmissions.is_some_and(|others| {
            edge.retransmissions >= 3 && edge.retransmissions.cast_signed() >= others.saturating_mul(4)
        });
        let repeats = if repeated { signed(limits.min_rtt_excess) } else { 0 };
        delay.max(lag).max(repeats)
    }

    /// The lower quartile of values, one for each edge: of three edges a slow host has two.
    fn over(&self, values: impl Iterator<Item = i64>) -> Option<i64> {
        let mut values: Vec<i64> = values.collect();
        if values.len() < 2 { None } else { quantile(&mut values, 1, 4) }
    }

    fn transit_beyond_usual(&self, edge: &EdgeTimes) -> Option<i64> {
        let usual = self.edges.get(&(edge.from, edge.to))?.transit.spread()?;
        Some(transit(edge)?.saturating_sub(usual.median))
    }

    /// How long the unit took from the moment at which all ranks had started, and at the mean. The first is what the
    /// shortest of the ranks' calls took. None where the ranks are not all known.
    ///
    /// A pause of one rank makes the mean longer, and not the shortest. Ranks that have been apart for some units, each as early
    /// as its neighbour is late, and come together again make the shortest longer, and not the mean. A slow edge does both.
    fn unit_duration(&self, observed: &Observed) -> Option<(i64, i64)> {
        let known = |rank: &Rank| observed.ranks.binary_search_by_key(rank, |times| times.rank).is_ok();
        if !observed.edges.iter().all(|edge| known(&edge.from) && known(&edge.to)) {
            return None;
        }
        let (mut shortest, mut sum) = (i64::MAX, 0_i128);
        for rank in &observed.ranks {
            let took = apart(rank.end?, rank.start?);
            shortest = shortest.min(took);
            sum += i128::from(took);
        }
        let mean = sum.checked_div(observed.ranks.len() as i128)?;
        Some((shortest, i64::try_from(mean).unwrap_or(i64::MAX)))
    }

    fn remember(&mut self, observed: &Observed) {
        for edge in &observed.edges {
            let ends = (edge.from, edge.to);
            if self.blamed.contains_key(&ends) {
                continue;
            }
            let memory = self.edges.entry(ends).or_default();
            if let Some(transit) = transit(edge) {
                memory.transit.push(transit);
            }
            if let Some(rtt) = edge.rtt {
                memory.rtt.push(signed(rtt));
            }
        }
        if self.edges.len() > 2 * observed.edges.len() + WINDOW {
            let present =
                |ends: &Ends| observed.edges.binary_search_by_key(ends, |edge| (edge.from, edge.to)).is_ok();
            self.edges.retain(|ends, _| present(ends));
        }
    }

    fn judge_edges(
        &mut self,
        (unit, overlaps): (Unit, bool),
        subject: Subject,
        limits: &Limits,
        found: &mut impl FnMut(Straggler),
    ) {
        let took = nanos(unit.ended.since(unit.began));
        let usual = self.duration.spread().and_then(|usual| u64::try_from(usual.median).ok());
        let part = usual.unwrap_or(took).min(took) as f64 * limits.network_part;
        let floor = nanos(limits.least).max(part as u64).cast_signed();
        let mut turns = std::mem::take(&mut self.transitions);
        turns.clear();
        self.network.take((unit, overlaps), &self.of_edges, floor, limits, |turn| turns.push(turn));
        let at = unit.ended.max(unit.began);
        for turn in &turns {
            if turn.late {
                let rank = self.culprit(turn.key);
                let known = self.blamed.values().any(|charged| *charged == rank);
                self.blamed.insert(turn.key, rank);
                self.duration.discard();
                self.mean.discard();
                if let Some(memory) = self.edges.get_mut(&turn.key) {
                    memory.transit.discard();
                    memory.rtt.discard();
                }
                if !known {
                    found(Straggler { found: at, ..straggler(subject, rank, turn, Some(turn.key)) });
                }
            } else if let Some(rank) = self.blamed.remove(&turn.key)
                && !self.blamed.values().any(|charged| *charged == rank)
            {
                found(Straggler { found: at, ..straggler(subject, rank, turn, Some(turn.key)) });
            }
        }
        self.transitions = turns;
    }

    /// Which end of a late edge is to blame. It is the one whose edges are the later in all, or the sender where both are alike.
    fn culprit(&self, (from, to): Ends) -> Rank {
        let sum = |rank: Rank| {
            let touching = self.network.keys().filter(|ends| ends.0 == rank || ends.1 == rank);
            touching.map(|ends| self.network.score(ends)).filter(|score| *score >= 0.6).sum::<f64>()
        };
        let charged = |rank| self.blamed.values().any(|charged| *charged == rank);
        let receiver = sum(to) > 1.1 * sum(from);
        match (charged(from), charged(to)) {
            (true, false) => from,
            (false, true) => to,
            _ if receiver => to,
            _ => from,
        }
    }

    /// The finding on a rank from all edges that are laid to it.
    fn straggler_of(&self, subject: Subject, rank: Rank) -> Option<Straggler> {
        let late = self.network.late().filter(|turn| self.blamed.get(&turn.key) == Some(&rank));
        let mut since = None;
        let mut worst: Option<Transition<Ends>> = None;
        for turn in late {
            since = Some(since.map_or(turn.since, |since: Unit| since.min(turn.since)));
            if worst.is_none_or(|worst| turn.by > worst.by) {
                worst = Some(turn);
            }
        }
        let (since, worst) = since.zip(worst)?;
        Some(straggler(subject, rank, &Transition { since, ..worst }, Some(worst.key)))
    }
}

/// What the edges of a unit have in common.
struct Common {
    /// The lower quartiles, over the edges, of the time that a byte takes. The next: of the last bytes' delay beyond
    /// usual, of round trips, of retransmissions.
    time_per_byte: Option<i64>,
    lag: Option<i64>,
    rtt: Option<i64>,
    retransmissions: Option<i64>,
    /// How long the unit took once all had started.
    unit_duration: Option<i64>,
    /// How much longer than usual the unit took.
    excess: Option<i64>,
}

/// How much longer than usual a unit took, if that stands out. It stands out from what one in ten does, or from the deviations.
fn excess(usual: &Baseline, took: i64, limits: &Limits) -> Option<i64> {
    let (spread, upper) = (usual.spread()?, usual.upper()?);
    let beyond = took.saturating_sub(spread.median);
    let deviates = beyond as f64 > limits.deviations * spread.deviation as f64;
    Some(if took > upper || deviates { beyond } else { 0 })
}

/// How much longer an edge was busy than its bytes take elsewhere.
fn busy_excess(edge: &EdgeTimes, common: &Common) -> i64 {
    let Some((common_pace, own)) = common.time_per_byte.zip(picoseconds_per_byte(edge)) else { return 0 };
    let beyond = i128::from(own.saturating_sub(common_pace)) * i128::from(edge.bytes) / 1000;
    let beyond = i64::try_from(beyond).unwrap_or(i64::MAX);
    let much = common.unit_duration.is_some_and(|took| beyond >= took.saturating_mul(2) / 5);
    let held_up = common.excess.filter(|_| !much).unwrap_or(beyond);
    beyond.min(held_up)
}

fn transit(edge: &EdgeTimes) -> Option<i64> {
    Some(apart(edge.arrived?, edge.last?))
}

/// How long a byte took while the edge was busy, in thousandths of a nanosecond.
fn picoseconds_per_byte(edge: &EdgeTimes) -> Option<i64> {
    let pace = edge.active?.as_nanos() * 1000 / u128::from(edge.bytes.max(1));
    i64::try_from(pace).ok()
}

fn straggler<K>(subject: Subject, rank: Rank, turn: &Transition<K>, edge: Option<Ends>) -> Straggler {
    Straggler {
        subject,
        rank,
        kind: if edge.is_some() { Kind::Network } else { Kind::Compute },
        edge,
        since_unit: turn.since.number,
        since: turn.since.began,
        found: turn.until.ended,
        by: turn.by,
        units: turn.units,
        ended: (!turn.late).then_some(turn.until.ended),
    }
}
