//! A job that was found: its bursts are cut into phases.

use super::finding::Address;
use super::flow::Burst;
use super::group::DetectedJob;
use super::iterations::{CHATTER, IterationPattern, Span, median, merge_groups};
use super::sides::{ALIKE, Hosts, Kinds, SIDE_GAP_NS};
use super::table::Table;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Phases that the period is taken over.
const PERIOD_OVER: usize = 129;
/// Phases whose bytes tell what is usual.
const USUAL_OVER: usize = 15;
/// A phase lacks no more of the usual bytes than this part, or than so many times what most differ by;
pub(super) const SIZE_TOLERANCE: (f64, u64) = (0.01, 3);
/// if the next one has come, or none comes, it has this part at least,
const MIN_PART: f64 = 0.85;
/// and no more than this,
const MAX_PART: f64 = 1.4;
/// What makes a whole phase more than this is none of its parts.
const MAX_SPLIT_PART: f64 = 1.1;
/// unless something was lost: then it has at least this.
const MIN_PART_LOSSY: f64 = 0.5;
/// So many phases may turn out to be parts of iterations, which is looked for each time there are so many more.
const PARTS: u64 = 512;
const RECONSIDER_EVERY: u64 = 16;
/// Bursts that may wait to be cut; beyond, the oldest go.
const MAX_TAIL: usize = 1 << 16;
/// No silence that parts phases is shorter.
const SHORTEST_GAP_NS: u64 = 500_000;

/// A job.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) number: u64,
    pub(super) connections: Vec<u32>,
    pub(super) pattern: IterationPattern,
    has_sides: bool,
    /// Hosts that are watched.
    watched: usize,
    kinds: Kinds,
    /// Bytes of phases without what looks like side groups, and whether there was any, while these are not told apart.
    without: VecDeque<(u64, bool)>,
    /// Bursts behind the last phase.
    pub(super) pending_bursts: Vec<Burst>,
    /// Everything that began until then has been told.
    pub(super) closed_ns: u64,
    /// The latest activity known.
    pub(super) last_seen_ns: u64,
    /// When the last phase was told, or the job was found.
    pub(super) reported_ns: u64,
    /// When to look again.
    pub(super) next_cut_ns: u64,
    pub(super) since_ns: u64,
    pub(super) iterations: u64,
    starts: VecDeque<(u64, u64)>,
    sizes: VecDeque<u64>,
    next: u64,
    /// Phases so far, as long as they may turn out to be parts of iterations.
    parts: Vec<Span>,
    pub(super) lossy: bool,
    pub(super) hosts: Vec<Address>,
    pub(super) ring: bool,
    /// How far apart hosts usually begin.
    pub(super) spreads: VecDeque<u64>,
    /// When each host had the last bytes of the last phase.
    pub(super) ended: BTreeMap<Address, u64>,
    scratch: Vec<(Burst, bool)>,
}

/// The bursts of a phase, in the order of their beginning.
pub(super) struct PhaseBursts {
    pub(super) iteration: u64,
    pub(super) began_ns: u64,
    pub(super) ended_ns: u64,
    pub(super) bytes: u64,
    pub(super) bursts: Vec<Burst>,
    /// Side groups since the phase before.
    pub(super) sides: Vec<Vec<Burst>>,
    pub(super) lossy: bool,
}

/// Bursts without a longer silence among them.
#[derive(Debug, Clone, Copy)]
struct Group {
    /// Places of the first burst, and behind the last.
    from: usize,
    to: usize,
    began_ns: u64,
    ended_ns: u64,
    bytes: u64,
    /// Every burst is known whole.
    whole: bool,
    /// Not acknowledgements alone.
    has_data: bool,
}

/// What is to be done with the first groups.
enum Decision {
    /// Nothing yet.
    Wait,
    /// Forget so many bursts, until that time.
    Drop(Group),
    /// They are a phase.
    Phase(Group),
}

impl Job {
    pub(super) fn new(number: u64, found: DetectedJob, now_ns: u64) -> Self {
        let DetectedJob { connections, pattern, has_sides, kinds, bursts: pending_bursts, .. } = found;
        let last_seen_ns = pending_bursts.iter().map(|burst| burst.ended_ns).max().unwrap_or(now_ns);
        Self {
            number,
            connections,
            pattern,
            has_sides,
            watched: 0,
            kinds,
            without: VecDeque::new(),
            since_ns: pending_bursts.iter().map(|burst| burst.began_ns).min().unwrap_or(now_ns),
            pending_bursts,
            closed_ns: 0,
            last_seen_ns,
            reported_ns: now_ns,
            next_cut_ns: 0,
            iterations: 0,
            starts: VecDeque::new(),
            sizes: VecDeque::new(),
            next: 0,
            parts: Vec::new(),
            lossy: false,
            hosts: Vec::new(),
            ring: false,
            spreads: VecDeque::new(),
            ended: BTreeMap::new(),
            scratch: Vec::new(),
        }
    }

    /// A burst of one of its connections has ended. One that began before the end of what was told is of what was told.
    pub(super) fn take(&mut self, burst: Burst) {
        self.last_seen_ns = self.last_seen_ns.max(burst.ended_ns);
        if burst.began_ns > self.closed_ns {
            if self.pending_bursts.len() >= MAX_TAIL {
                self.pending_bursts.drain(..MAX_TAIL / 2);
                self.lossy = true;
            }
            self.pending_bursts.push(burst);
        }
    }

    /// The period: from the first to the last phase that is remembered.
    pub(super) fn period_ns(&self) -> u64 {
        match (self.starts.front(), self.starts.back()) {
            (Some((first, from)), Some((last, to))) if last > first => {
                (to.saturating_sub(*from)) / (last - first)
            }
            _ => self.pattern.period_ns,
        }
    }

    /// The next phase, if one has ended. `running` are the bursts that have not ended, each with whether all of it is known.
    pub(super) fn cut(
        &mut self,
        running: &[(Burst, bool)],
        table: &Table,
        now_ns: u64,
    ) -> Option<PhaseBursts> {
        let hosts = Hosts::of(&self.connections, table);
        self.watched = hosts.watched.len();
        let mut bursts = std::mem::take(&mut self.scratch);
        let found = loop {
            bursts.clear();
            bursts.extend(self.pending_bursts.iter().map(|burst| (*burst, true)));
            bursts.extend(running.iter().filter(|(burst, _)| burst.began_ns > self.closed_ns));
            sort(&mut bursts);
            let gap_ns = self.pattern.gap_ns;
            let mut sides = hosts.take(&mut bursts, &mut self.kinds, table, (now_ns, gap_ns, self.has_sides));
            let mut decision = self.decide(&bursts, now_ns);
            if !sides.is_empty() && !matches!(decision, Decision::Phase(group) if self.is_usual(&group)) {
                decision = self.restore(&mut bursts, &mut sides, now_ns).unwrap_or(decision);
            }
            match decision {
                Decision::Wait => break None,
                Decision::Drop(group) => self.close(&group),
                Decision::Phase(group) => {
                    let part = bursts.get(group.from..group.to).unwrap_or_default();
                    if !self.has_sides {
                        self.detect_sides(part, &hosts, table);
                    }
                    let part = part.iter().map(|(burst, _)| *burst).collect();
                    sides.retain(|side| side.first().is_some_and(|one| one.began_ns < group.ended_ns));
                    let cut = self.phase(&group, part, sides, now_ns);
                    self.close(&group);
                    break Some(cut);
                }
            }
        };
        self.scratch = bursts;
        found
    }

    /// What looks like a side group may be part of a phase that would lack it: the phase that is whole with all of them, or all but one.
    fn restore(
        &self,
        bursts: &mut Vec<(Burst, bool)>,
        sides: &mut Vec<Vec<Burst>>,
        now_ns: u64,
    ) -> Option<Decision> {
        for but in [None].into_iter().chain((0..sides.len()).map(Some)) {
            let restored = sides.iter().enumerate().filter(|(at, _)| Some(*at) != but);
            let mut all = bursts.clone();
            all.extend(restored.flat_map(|(_, side)| side).map(|burst| (*burst, true)));
            sort(&mut all);
            if let Decision::Phase(group) = self.decide(&all, now_ns)
                && self.is_usual(&group)
            {
                *bursts = all;
                *sides = but.map(|but| sides.swap_remove(but)).into_iter().collect();
                return Some(Decision::Phase(group));
            }
        }
        None
    }

    /// Whether phases have side groups, without which they are as alike.
    fn detect_sides(&mut self, bursts: &[(Burst, bool)], hosts: &Hosts, table: &Table) {
        let mut main = bursts.to_vec();
        hosts.take(&mut main, &mut self.kinds, table, (u64::MAX, u64::MAX, true));
        let some = 2 * hosts.imbalance(&main, table) < hosts.imbalance(bursts, table);
        let bytes = main.iter().filter(|(burst, _)| burst.is_counted).map(|(burst, _)| burst.bytes).sum();
        remember(&mut self.without, (bytes, some), USUAL_OVER);
        let mut sizes: Vec<u64> = self.without.iter().map(|(bytes, _)| *bytes).collect();
        let with_sides = self.without.iter().filter(|(_, some)| *some).count();
        let Some(usual) = median(&mut sizes) else { return };
        let alike = |bytes: &&u64| bytes.abs_diff(usual) as f64 <= SIZE_TOLERANCE.0 * usual as f64;
        let is_regular =
            2 * usual > self.pattern.bytes && sizes.iter().filter(alike).count() + 1 >= sizes.len();
        if with_sides >= ALIKE && is_regular {
            self.has_sides = true;
            (self.pattern.bytes, self.pattern.spread) = (usual, 0);
            self.sizes.clear();
        }
    }

    fn phase(
        &mut self,
        group: &Group,
        bursts: Vec<Burst>,
        sides: Vec<Vec<Burst>>,
        now_ns: u64,
    ) -> PhaseBursts {
        let period = self.period_ns().max(1);
        // Only where something was lost may an iteration have been missed; else it was a long one.
        let missed = self.starts.back().filter(|_| self.lossy).map_or(0, |(_, began)| {
            let apart = group.began_ns.saturating_sub(*began);
            (apart.saturating_add(period / 2) / period).saturating_sub(1)
        });
        let iteration = self.next.saturating_add(missed);
        self.next = iteration.saturating_add(1);
        remember(&mut self.starts, (iteration, group.began_ns), PERIOD_OVER);
        remember(&mut self.sizes, group.bytes, USUAL_OVER);
        let mut sizes: Vec<u64> = self.sizes.iter().copied().collect();
        if sizes.len() >= 5 {
            self.pattern.bytes = median(&mut sizes).unwrap_or(self.pattern.bytes);
        }
        if self.iterations == 0 {
            self.since_ns = group.began_ns;
        }
        self.iterations += 1;
        self.reported_ns = now_ns;
        self.reconsider(group);
        let lossy = std::mem::take(&mut self.lossy);
        let Group { began_ns, ended_ns, bytes, .. } = *group;
        PhaseBursts { iteration, began_ns, ended_ns, bytes, bursts, sides, lossy }
    }

    /// Whether what was taken for iterations are parts of them: buckets may be as alike as iterations are.
    fn reconsider(&mut self, group: &Group) {
        if self.iterations > PARTS {
            self.parts = Vec::new();
            return;
        }
        self.parts.push(Span { began_ns: group.began_ns, ended_ns: group.ended_ns, bytes: group.bytes });
        if self.iterations.is_multiple_of(RECONSIDER_EVERY)
            && let Some(rhythm) = merge_groups(&self.parts)
        {
            self.pattern = rhythm;
            self.starts.clear();
            self.sizes.clear();
            self.parts = Vec::new();
        }
    }

    fn close(&mut self, group: &Group) {
        self.closed_ns = self.closed_ns.max(group.ended_ns);
        let closed = self.closed_ns;
        self.pending_bursts.retain(|burst| burst.began_ns > closed);
    }

    /// A phase lacks, or has more than, no more of the usual bytes than this.
    fn lacks(&self) -> f64 {
        let (part, times) = SIZE_TOLERANCE;
        (part * self.pattern.bytes as f64).max(self.pattern.spread.saturating_mul(times) as f64)
    }

    fn is_usual(&self, group: &Group) -> bool {
        group.bytes.abs_diff(self.pattern.bytes) as f64 <= self.lacks()
    }

    fn decide(&self, bursts: &[(Burst, bool)], now_ns: u64) -> Decision {
        let mut gap_ns = self.pattern.gap_ns;
        loop {
            let decision = self.decide_by(bursts, gap_ns, now_ns);
            let much = MAX_PART * self.pattern.bytes as f64;
            match decision {
                // Two phases may have come without the usual silence between.
                Decision::Drop(group) | Decision::Phase(group)
                    if group.bytes as f64 > much && gap_ns > SHORTEST_GAP_NS =>
                {
                    gap_ns = (gap_ns / 2).max(SHORTEST_GAP_NS);
                }
                Decision::Phase(group) if group.bytes as f64 > much => return Decision::Drop(group),
                Decision::Phase(group) => return Decision::Phase(self.trim(bursts, group)),
                decision => return decision,
            }
        }
    }

    /// Takes off what belongs to the next iteration: words, and what is more than the usual bytes.
    fn trim(&self, bursts: &[(Burst, bool)], group: Group) -> Group {
        let mut best: Option<Group> = None;
        let mut all: Option<Group> = None;
        let mut at = group.from;
        while let Some(next) = group_at(bursts, at, SIDE_GAP_NS).filter(|next| next.to <= group.to) {
            at = next.to;
            let sum = all.map_or(next, |before| before.with(&next));
            all = Some(sum);
            let bursts = bursts.get(next.from..next.to).unwrap_or_default();
            let few = bursts.iter().all(|(burst, _)| burst.is_announcement()) && self.is_call(bursts);
            let off = |one: &Group| one.bytes.abs_diff(self.pattern.bytes);
            if !few && (!self.has_sides || best.is_none_or(|best| off(&sum) < off(&best))) {
                best = Some(sum);
            }
        }
        best.filter(|_| at == group.to).unwrap_or(group)
    }

    /// Whether most hosts say something in bursts.
    fn is_call(&self, bursts: &[(Burst, bool)]) -> bool {
        let says = bursts.iter().filter(|(burst, _)| !burst.is_ack_only());
        let says: BTreeSet<(u32, bool)> = says.map(|(burst, _)| (burst.connection, burst.reverse)).collect();
        self.watched > 1 && 2 * says.len() > self.hosts.len()
    }

    fn decide_by(&self, bursts: &[(Burst, bool)], gap_ns: u64, now_ns: u64) -> Decision {
        let usual = self.pattern.bytes as f64;
        let lacks = self.lacks();
        let most = if self.lossy { MIN_PART_LOSSY } else { MIN_PART } * usual;
        let enough = if self.lossy { most } else { (usual - lacks).max(most) };
        let patience = self.pattern.period_ns.saturating_mul(4).max(1_000_000_000);
        let mut sum: Option<Group> = None;
        let mut at = 0;
        while let Some(group) = group_at(bursts, at, gap_ns) {
            at = group.to;
            let over = now_ns > group.ended_ns.saturating_add(gap_ns) && group.whole;
            let last = at >= bursts.len();
            if last && !over {
                return Decision::Wait;
            }
            let chatter = (group.bytes as f64) < CHATTER * usual;
            match sum {
                None if chatter => {
                    // The first words of ranks that wait for a late one, or nothing of ours.
                    let next = group_at(bursts, at, gap_ns);
                    let reach = group.ended_ns.saturating_add(patience);
                    match next {
                        _ if !group.has_data => return Decision::Drop(group),
                        None if now_ns <= reach => return Decision::Wait,
                        Some(next) if next.began_ns <= reach => sum = Some(group),
                        _ => return Decision::Drop(group),
                    }
                }
                None => sum = Some(group),
                Some(before) => {
                    let both = before.with(&group);
                    if both.bytes as f64 > MAX_SPLIT_PART * usual && group.bytes as f64 >= MIN_PART * usual {
                        // What came before is not part of this one: a phase that lacks some, or none.
                        let whole = before.bytes as f64 >= most;
                        return if whole { Decision::Phase(before) } else { Decision::Drop(before) };
                    }
                    sum = Some(both);
                }
            }
            if let Some(group) = sum
                && group.bytes as f64 >= enough
            {
                return if group.whole || last { Decision::Phase(group) } else { Decision::Wait };
            }
        }
        match sum {
            Some(group) if now_ns > group.ended_ns.saturating_add(patience) => {
                if group.bytes as f64 >= most {
                    Decision::Phase(group)
                } else {
                    Decision::Drop(group)
                }
            }
            _ => Decision::Wait,
        }
    }
}

fn sort(bursts: &mut [(Burst, bool)]) {
    bursts.sort_unstable_by_key(|(burst, _)| (burst.began_ns, burst.connection, burst.reverse));
}

/// The group that begins at a place.
fn group_at(bursts: &[(Burst, bool)], from: usize, gap_ns: u64) -> Option<Group> {
    let (first, _) = bursts.get(from)?;
    let mut group = Group {
        from,
        to: from,
        began_ns: first.began_ns,
        ended_ns: first.ended_ns,
        bytes: 0,
        whole: true,
        has_data: false,
    };
    for (burst, whole) in bursts.get(from..)? {
        if burst.began_ns > group.ended_ns.saturating_add(gap_ns) {
            break;
        }
        group.to += 1;
        group.ended_ns = group.ended_ns.max(burst.ended_ns);
        group.bytes = group.bytes.saturating_add(if burst.is_counted { burst.bytes } else { 0 });
        group.whole &= whole;
        group.has_data |= !burst.is_ack_only();
    }
    Some(group)
}

impl Group {
    fn with(&self, next: &Self) -> Self {
        Self {
            from: self.from,
            to: next.to,
            began_ns: self.began_ns,
            ended_ns: self.ended_ns.max(next.ended_ns),
            bytes: self.bytes.saturating_add(next.bytes),
            whole: self.whole && next.whole,
            has_data: self.has_data || next.has_data,
        }
    }
}

/// Puts into a list of at most `most`, whose oldest goes.
pub(super) fn remember<T>(list: &mut VecDeque<T>, value: T, most: usize) {
    if list.len() >= most {
        list.pop_front();
    }
    list.push_back(value);
}
