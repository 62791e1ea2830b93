//! A job that was found: its bursts are cut into phases.

use super::finding::Address;
use super::flow::Burst;
use super::group::DetectedJob;
use super::iterations::{CHATTER, IterationPattern, Span, median, merge_groups};
use super::sides::{ALIKE, Hosts, Kinds, SIDE_GAP};
use super::table::Table;
use crate::nanos;
use harmonaize_abi::Nanos;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Phases that the period is taken over.
const PERIOD_OVER: usize = 129;
/// Phases whose bytes tell what is usual.
const USUAL_OVER: usize = 15;
/// What a phase may lack of the usual bytes. It is the larger of this part of them, and so many times what most differ by.
pub(super) const SIZE_TOLERANCE: (f64, u64) = (0.01, 3);
/// The least part of the usual bytes that a phase has once the next has come, or none comes.
const MIN_PART: f64 = 0.85;
/// The largest part of the usual bytes that a phase has then.
const MAX_PART: f64 = 1.4;
/// What makes a whole phase more than this is none of its parts.
const MAX_SPLIT_PART: f64 = 1.1;
/// The least part of the usual bytes that a phase has where something was lost.
const MIN_PART_LOSSY: f64 = 0.5;
/// The most phases that may turn out to be parts of iterations. That is checked each time there are `RECONSIDER_EVERY` more.
const PARTS: u64 = 512;
const RECONSIDER_EVERY: u64 = 16;
/// Bursts that may wait to be cut; beyond, the oldest go.
const MAX_TAIL: usize = 1 << 16;
/// The phases in which stages of a pipeline show how they differ. They are as many as pass before a straggler is found.
const STAGE_PHASES: usize = 8;
/// No silence that parts phases is shorter.
const SHORTEST_GAP: Duration = Duration::from_micros(500);

/// A job.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) number: u64,
    pub(super) connections: Vec<u32>,
    pub(super) pattern: IterationPattern,
    has_sides: bool,
    /// Those of the connections that carry sends alone, and their bursts behind the last phase.
    pub(super) sends: BTreeSet<u32>,
    pending_sends: Vec<Burst>,
    /// Hosts that are watched.
    watched: usize,
    kinds: Kinds,
    /// Bytes of phases without what looks like side groups, and whether there was any, while these are not told apart.
    without: VecDeque<(u64, bool)>,
    /// Bursts behind the last phase.
    pub(super) pending_bursts: Vec<Burst>,
    /// Everything that began until then has been told.
    pub(super) closed: Nanos,
    /// The latest activity known.
    pub(super) last_seen: Nanos,
    /// When the last phase was told, or the job was found.
    pub(super) reported: Nanos,
    /// When to look again.
    pub(super) next_cut: Nanos,
    pub(super) since: Nanos,
    pub(super) iterations: u64,
    pub(super) starts: VecDeque<(u64, Nanos)>,
    sizes: VecDeque<u64>,
    next: u64,
    /// Phases so far, as long as they may turn out to be parts of iterations.
    parts: Vec<Span>,
    pub(super) lossy: bool,
    pub(super) hosts: Vec<Address>,
    pub(super) ring: bool,
    /// How far apart hosts usually begin.
    pub(super) spreads: VecDeque<Duration>,
    /// How long each host computed in the first phases with sends: stages of a pipeline differ.
    computed: BTreeMap<Address, Vec<Duration>>,
    /// When each host had the last bytes of the last phase.
    pub(super) ended: BTreeMap<Address, Nanos>,
    scratch: Vec<(Burst, bool)>,
}

/// The bursts of a phase, in the order of their beginning.
pub(super) struct PhaseBursts {
    pub(super) iteration: u64,
    pub(super) began: Nanos,
    pub(super) ended: Nanos,
    pub(super) bytes: u64,
    pub(super) bursts: Vec<Burst>,
    /// Side groups since the phase before.
    pub(super) sides: Vec<Vec<Burst>>,
    /// Sends point to point since then.
    pub(super) sends: Vec<Burst>,
    pub(super) lossy: bool,
}

/// Bursts without a longer silence among them.
#[derive(Debug, Clone, Copy)]
struct Group {
    /// Places of the first burst, and behind the last.
    from: usize,
    to: usize,
    began: Nanos,
    ended: Nanos,
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
    pub(super) fn new(number: u64, found: DetectedJob, now: Nanos) -> Self {
        let DetectedJob { connections, pattern, has_sides, sends, kinds, bursts, .. } = found;
        let (pending_sends, pending_bursts): (Vec<Burst>, Vec<Burst>) =
            bursts.into_iter().partition(|burst| sends.contains(&burst.connection));
        let last_seen = pending_bursts.iter().map(|burst| burst.ended).max().unwrap_or(now);
        Self {
            number,
            connections,
            pattern,
            has_sides,
            sends,
            pending_sends,
            watched: 0,
            kinds,
            without: VecDeque::new(),
            since: pending_bursts.iter().map(|burst| burst.began).min().unwrap_or(now),
            pending_bursts,
            closed: Nanos(0),
            last_seen,
            reported: now,
            next_cut: Nanos(0),
            iterations: 0,
            starts: VecDeque::new(),
            sizes: VecDeque::new(),
            next: 0,
            parts: Vec::new(),
            lossy: false,
            hosts: Vec::new(),
            ring: false,
            spreads: VecDeque::new(),
            computed: BTreeMap::new(),
            ended: BTreeMap::new(),
            scratch: Vec::new(),
        }
    }

    /// A burst of one of its connections has ended. One that began before the end of what was told is of what was told.
    pub(super) fn take(&mut self, burst: Burst) {
        let sends = self.sends.contains(&burst.connection);
        let list = if sends {
            &mut self.pending_sends
        } else {
            self.last_seen = self.last_seen.max(burst.ended);
            &mut self.pending_bursts
        };
        if burst.began > self.closed {
            if list.len() >= MAX_TAIL {
                list.drain(..MAX_TAIL / 2);
                self.lossy = true;
            }
            list.push(burst);
        }
    }

    /// The period: from the first to the last phase that is remembered.
    pub(super) fn period(&self) -> Duration {
        match (self.starts.front(), self.starts.back()) {
            (Some((first, from)), Some((last, to))) if last > first => {
                Duration::from_nanos(nanos(to.since(*from)) / (last - first))
            }
            _ => self.pattern.period,
        }
    }

    /// The next phase, if one has ended. `running` are the bursts that have not ended, each with whether all of it is known.
    pub(super) fn cut(
        &mut self,
        running: &[(Burst, bool)],
        table: &Table,
        now: Nanos,
    ) -> Option<PhaseBursts> {
        let hosts = Hosts::of(self.connections.iter().filter(|one| !self.sends.contains(one)), table);
        self.watched = hosts.watched.len();
        let mut bursts = std::mem::take(&mut self.scratch);
        let found = loop {
            bursts.clear();
            bursts.extend(self.pending_bursts.iter().map(|burst| (*burst, true)));
            let runs =
                |one: &&(Burst, bool)| one.0.began > self.closed && !self.sends.contains(&one.0.connection);
            bursts.extend(running.iter().filter(runs));
            sort(&mut bursts);
            let gap = self.pattern.gap;
            let mut sides = hosts.take(&mut bursts, &mut self.kinds, table, (now, gap, self.has_sides));
            let mut decision = self.decide(&bursts, now);
            if !sides.is_empty() && !matches!(decision, Decision::Phase(group) if self.is_usual(&group)) {
                decision = self.restore(&mut bursts, &mut sides, now).unwrap_or(decision);
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
                    sides.retain(|side| side.first().is_some_and(|one| one.began < group.ended));
                    let mut cut = self.phase(&group, part, sides, now);
                    let sent = running.iter().map(|(burst, _)| burst);
                    let sent = sent.filter(|burst| self.sends.contains(&burst.connection));
                    let before = |burst: &&Burst| burst.began > self.closed && burst.began < group.ended;
                    cut.sends = self.pending_sends.iter().chain(sent).filter(before).copied().collect();
                    cut.sends.sort_unstable_by_key(|burst| (burst.began, burst.connection, burst.reverse));
                    self.close(&group);
                    break Some(cut);
                }
            }
        };
        self.scratch = bursts;
        found
    }

    /// What looks like a side group may be part of a phase that would lack it. It is of the phase that is whole with all of them, or all
    /// but one.
    fn restore(
        &self,
        bursts: &mut Vec<(Burst, bool)>,
        sides: &mut Vec<Vec<Burst>>,
        now: Nanos,
    ) -> Option<Decision> {
        for but in [None].into_iter().chain((0..sides.len()).map(Some)) {
            let restored = sides.iter().enumerate().filter(|(at, _)| Some(*at) != but);
            let mut all = bursts.clone();
            all.extend(restored.flat_map(|(_, side)| side).map(|burst| (*burst, true)));
            sort(&mut all);
            if let Decision::Phase(group) = self.decide(&all, now)
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
        hosts.take(&mut main, &mut self.kinds, table, (Nanos(u64::MAX), Duration::MAX, true));
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
        now: Nanos,
    ) -> PhaseBursts {
        let period = nanos(self.period()).max(1);
        // Only where something was lost may an iteration have been missed; else it was a long one.
        let missed = self.starts.back().filter(|_| self.lossy).map_or(0, |(_, began)| {
            let apart = nanos(group.began.since(*began));
            (apart.saturating_add(period / 2) / period).saturating_sub(1)
        });
        let iteration = self.next.saturating_add(missed);
        self.next = iteration.saturating_add(1);
        remember(&mut self.starts, (iteration, group.began), PERIOD_OVER);
        remember(&mut self.sizes, group.bytes, USUAL_OVER);
        let mut sizes: Vec<u64> = self.sizes.iter().copied().collect();
        if sizes.len() >= 5 {
            self.pattern.bytes = median(&mut sizes).unwrap_or(self.pattern.bytes);
        }
        if self.iterations == 0 {
            self.since = group.began;
        }
        self.iterations += 1;
        self.reported = now;
        self.reconsider(group);
        let lossy = std::mem::take(&mut self.lossy);
        let Group { began, ended, bytes, .. } = *group;
        PhaseBursts { iteration, began, ended, bytes, bursts, sides, sends: Vec::new(), lossy }
    }

    /// Whether what was taken for iterations are parts of them: buckets may be as alike as iterations are.
    fn reconsider(&mut self, group: &Group) {
        if self.iterations > PARTS {
            self.parts = Vec::new();
            return;
        }
        self.parts.push(Span { began: group.began, ended: group.ended, bytes: group.bytes });
        if self.iterations.is_multiple_of(RECONSIDER_EVERY)
            && let Some(rhythm) = merge_groups(&self.parts)
        {
            self.pattern = rhythm;
            self.starts.clear();
            self.sizes.clear();
            self.parts = Vec::new();
        }
    }

    /// Adds to how long hosts have `waited` in sends what they usually compute more than the one that computes least. Until that is known, none
    /// has computed. `firsts` are their first bytes of a phase.
    pub(super) fn level_stages(
        &mut self,
        firsts: &BTreeMap<Address, Nanos>,
        waited: &mut BTreeMap<Address, Duration>,
    ) {
        let known = |host: &Address| {
            let computed = self.computed.get(host).filter(|computed| computed.len() >= STAGE_PHASES)?;
            median(&mut computed.clone())
        };
        let least = self.computed.keys().map(known).min().flatten();
        let usual: BTreeMap<Address, Option<Duration>> =
            firsts.keys().map(|host| (*host, known(host))).collect();
        for (host, first) in firsts {
            let Some(ended) = self.ended.get(host) else { continue };
            let waited = waited.entry(*host).or_default();
            let own = first.since(*ended).saturating_sub(*waited);
            let more = match (usual.get(host).copied().flatten(), least) {
                (Some(usual), Some(least)) => usual.saturating_sub(least).min(own),
                _ => own,
            };
            *waited = waited.saturating_add(more);
            let computed = self.computed.entry(*host).or_default();
            if computed.len() < STAGE_PHASES {
                computed.push(own);
            }
        }
    }

    fn close(&mut self, group: &Group) {
        self.closed = self.closed.max(group.ended);
        let closed = self.closed;
        self.pending_bursts.retain(|burst| burst.began > closed);
        self.pending_sends.retain(|burst| burst.began > closed);
    }

    /// A phase lacks, or has more than, no more of the usual bytes than this.
    fn lacks(&self) -> f64 {
        let (part, times) = SIZE_TOLERANCE;
        (part * self.pattern.bytes as f64).max(self.pattern.spread.saturating_mul(times) as f64)
    }

    fn is_usual(&self, group: &Group) -> bool {
        group.bytes.abs_diff(self.pattern.bytes) as f64 <= self.lacks()
    }

    fn decide(&self, bursts: &[(Burst, bool)], now: Nanos) -> Decision {
        let mut gap = self.pattern.gap;
        loop {
            let decision = self.decide_by(bursts, gap, now);
            let much = MAX_PART * self.pattern.bytes as f64;
            match decision {
                // Two phases may have come without the usual silence between.
                Decision::Drop(group) | Decision::Phase(group)
                    if group.bytes as f64 > much && gap > SHORTEST_GAP =>
                {
                    gap = (gap / 2).max(SHORTEST_GAP);
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
        while let Some(next) = group_at(bursts, at, SIDE_GAP).filter(|next| next.to <= group.to) {
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

    fn decide_by(&self, bursts: &[(Burst, bool)], gap: Duration, now: Nanos) -> Decision {
        let usual = self.pattern.bytes as f64;
        let lacks = self.lacks();
        let most = if self.lossy { MIN_PART_LOSSY } else { MIN_PART } * usual;
        let enough = if self.lossy { most } else { (usual - lacks).max(most) };
        let patience = self.pattern.period.saturating_mul(4).max(Duration::from_secs(1));
        let mut sum: Option<Group> = None;
        let mut at = 0;
        while let Some(group) = group_at(bursts, at, gap) {
            at = group.to;
            let over = now > group.ended.after(gap) && group.whole;
            let last = at >= bursts.len();
            if last && !over {
                return Decision::Wait;
            }
            let chatter = (group.bytes as f64) < CHATTER * usual;
            match sum {
                None if chatter => {
                    // The first words of ranks that wait for a late one, or nothing of ours.
                    let next = group_at(bursts, at, gap);
                    let reach = group.ended.after(patience);
                    match next {
                        _ if !group.has_data => return Decision::Drop(group),
                        None if now <= reach => return Decision::Wait,
                        Some(next) if next.began <= reach => sum = Some(group),
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
            Some(group) if now > group.ended.after(patience) => {
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
    bursts.sort_unstable_by_key(|(burst, _)| (burst.began, burst.connection, burst.reverse));
}

/// The group that begins at a place.
fn group_at(bursts: &[(Burst, bool)], from: usize, gap: Duration) -> Option<Group> {
    let (first, _) = bursts.get(from)?;
    let mut group = Group {
        from,
        to: from,
        began: first.began,
        ended: first.ended,
        bytes: 0,
        whole: true,
        has_data: false,
    };
    for (burst, whole) in bursts.get(from..)? {
        if burst.began > group.ended.after(gap) {
            break;
        }
        group.to += 1;
        group.ended = group.ended.max(burst.ended);
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
            began: self.began,
            ended: self.ended.max(next.ended),
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
