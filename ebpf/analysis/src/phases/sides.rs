//! What a job's ranks exchange beside its AllReduces: broadcasts, gathers and barriers. It also has when each rank had its part
//! in it.
//!
//! In everything by which each rank's bytes get to every rank, a host receives as much as it sends: rings, trees, halving
//! and doubling, a reduction to one rank and a broadcast of it. Who begins a broadcast receives little, who ends a gather sends
//! little. So a group of bursts is taken for such a *side* group if silences part it from others, every host of the
//! job has a part in it, and some host that is watched all around has no such balance; or if it carries nothing but words. Where a
//! rank is late for an AllReduce, what the others do meanwhile looks alike, but the late one has no part in it.

use super::finding::Address;
use super::flow::Burst;
use super::iterations::median;
use super::job::remember;
use super::sends::add_waits;
use super::table::Table;
use harmonaize_abi::Nanos;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

/// Silences that part groups: as long as those that end a burst.
pub(super) const SIDE_GAP: Duration = Duration::from_micros(500);
/// At an end of bytes a host moves less than this part of the other direction's bytes. All but the nearest kind is at 0: the root of a
/// broadcast that scatters and gathers sends twice of what it receives.
const BALANCE: f64 = 0.75;

/// A host's part in a group of bursts.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Part {
    /// When its own first bytes passed, acknowledgements not among them; 0 if none did.
    pub(super) first: Nanos,
    /// The last that it received before that; 0 where it had received nothing.
    pub(super) before: Nanos,
    /// The last that it sent or received.
    pub(super) last: Nanos,
    /// Bytes of bursts that are more than words.
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// Who sends something on does so within this.
pub(super) const SENDS_ON: Duration = Duration::from_millis(1);

impl Part {
    /// Whether it began by itself, and not with something that it had just received.
    fn begins_alone(&self) -> bool {
        self.first != Nanos(0) && (self.before == Nanos(0) || self.first > self.before.after(SENDS_ON))
    }
}

/// The part of each host in bursts that are in the order of their beginning.
pub(super) fn parts<'a>(bursts: impl Iterator<Item = &'a Burst>, table: &Table) -> BTreeMap<Address, Part> {
    let mut parts: BTreeMap<Address, Part> = BTreeMap::new();
    let mut began = BTreeSet::new();
    for burst in bursts {
        let Some(ends) = table.connection(burst.connection).map(|connection| connection.ends) else {
            continue;
        };
        let (from, to) =
            if burst.reverse { (ends.second.0, ends.first.0) } else { (ends.first.0, ends.second.0) };
        began.insert((burst.connection, burst.reverse));
        // What is caused by what came in the other way says nothing of the host.
        if burst.is_ack_only() && began.contains(&(burst.connection, !burst.reverse)) {
            continue;
        }
        let bytes = if burst.is_counted && !burst.is_announcement() { burst.bytes } else { 0 };
        let sender = parts.entry(from).or_default();
        if sender.first == Nanos(0) {
            sender.first = burst.began;
        }
        sender.last = sender.last.max(burst.ended);
        sender.sent = sender.sent.saturating_add(bytes);
        let receiver = parts.entry(to).or_default();
        if receiver.first == Nanos(0) {
            receiver.before = receiver.before.max(burst.ended);
        }
        receiver.last = receiver.last.max(burst.ended);
        receiver.received = receiver.received.saturating_add(bytes);
    }
    for part in parts.values_mut().filter(|part| part.first != Nanos(0)) {
        part.before = part.before.min(part.first);
    }
    parts
}

/// Everybody's ends and those that are watched, of a job's connections.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    pub(super) all: BTreeSet<Address>,
    pub(super) watched: BTreeSet<Address>,
}

impl Hosts {
    /// Those of connections.
    pub(super) fn of<'a>(connections: impl IntoIterator<Item = &'a u32>, table: &Table) -> Self {
        let mut hosts = Self::default();
        for place in connections {
            let Some(connection) = table.connection(*place) else { continue };
            hosts.all.extend([connection.ends.first.0, connection.ends.second.0]);
            hosts.watched.extend(table.local_ends(connection));
        }
        hosts
    }

    /// By how many bytes what watched hosts send differs from what they receive. A side group is what unbalances an iteration.
    pub(super) fn imbalance(&self, bursts: &[(Burst, bool)], table: &Table) -> u64 {
        let parts = parts(bursts.iter().map(|(burst, _)| burst), table);
        let watched = parts.iter().filter(|(host, _)| self.watched.contains(*host));
        watched.map(|(_, part)| part.sent.abs_diff(part.received)).sum()
    }

    /// What a group of bursts is.
    fn kind(&self, bursts: &[(Burst, bool)], table: &Table) -> Kind {
        let parts = parts(bursts.iter().map(|(burst, _)| burst), table);
        let moves = |part: &Part| part.sent + part.received > 0;
        if !parts.values().any(moves) {
            let all = self.all.iter().all(|host| parts.get(host).is_some_and(|part| part.first != Nanos(0)));
            return if all { Kind::Announcement } else { Kind::PartialAnnouncement };
        }
        let balanced = |part: &Part| {
            let (less, more) = (part.sent.min(part.received), part.sent.max(part.received));
            less as f64 >= BALANCE * more as f64
        };
        if !self.all.iter().all(|host| parts.get(host).is_some_and(moves)) {
            Kind::Piece
        } else if parts.iter().all(|(host, part)| balanced(part) || !self.watched.contains(host)) {
            Kind::Whole
        } else {
            Kind::Side
        }
    }

    /// Takes side groups that are over out of bursts, which are in the order of their beginning. Of words it takes those that a
    /// silence of `gap` follows, and of bytes, if `bytes`, those that recur.
    pub(super) fn take(
        &self,
        bursts: &mut Vec<(Burst, bool)>,
        kinds: &mut Kinds,
        table: &Table,
        (now, gap, bytes): (Nanos, Duration, bool),
    ) -> Vec<Vec<Burst>> {
        let (mut from, mut until) = (0, None::<Nanos>);
        let mut groups = Vec::new();
        for (at, (burst, _)) in bursts.iter().enumerate() {
            if until.is_some_and(|until| burst.began > until.after(SIDE_GAP)) {
                groups.push((from..at, until.unwrap_or_default()));
                from = at;
            }
            until = until.max(Some(burst.ended));
        }
        if let Some(until) = until
            && now > until.after(SIDE_GAP)
        {
            groups.push((from..bursts.len(), until));
        }
        let of = |group: &Range<usize>| bursts.get(group.clone()).unwrap_or_default();
        let mut are: Vec<(Range<usize>, Kind)> = groups
            .into_iter()
            .map(|(group, ended)| {
                let kind = match self.kind(of(&group), table) {
                    _ if !of(&group).iter().all(|(_, whole)| *whole) => Kind::Whole,
                    // Where all have said that they are ready, what they are ready for follows soon.
                    Kind::Announcement => {
                        let next_began = bursts.get(group.end).map_or(now, |(burst, _)| burst.began);
                        let apart = next_began > ended.after(gap);
                        if apart { Kind::Announcement } else { Kind::PartialAnnouncement }
                    }
                    kind => kind,
                };
                (group, kind)
            })
            .collect();
        let size = |group: &Range<usize>| {
            let counted = of(group).iter().filter(|(burst, _)| burst.is_counted);
            counted.map(|(burst, _)| burst.bytes).sum::<u64>()
        };
        for (group, _) in are.iter().filter(|(_, kind)| *kind == Kind::Side) {
            kinds.note(of(group).first().map_or(Nanos(0), |(burst, _)| burst.began), size(group));
        }
        let recurs = |group: &Range<usize>| kinds.has(size(group));
        self.join_pieces(&mut are, of, recurs, table);
        let is_side = |(group, kind): &&(Range<usize>, Kind)| {
            *kind == Kind::Announcement || bytes && *kind == Kind::Side && recurs(group)
        };
        let sides: Vec<Range<usize>> = are.iter().filter(is_side).map(|(group, _)| group.clone()).collect();
        let taken = sides.iter().map(|side| of(side).iter().map(|(burst, _)| *burst).collect()).collect();
        let mut at = 0;
        bursts.retain(|_| {
            at += 1;
            !sides.iter().any(|side| side.contains(&(at - 1)))
        });
        taken
    }

    /// Joins pieces of a side group for which a rank was late. Pieces that are whole together are no side groups: a tree's way to its
    /// root, and the way back.
    fn join_pieces<'a>(
        &self,
        groups: &mut Vec<(Range<usize>, Kind)>,
        of: impl Fn(&Range<usize>) -> &'a [(Burst, bool)],
        recurs: impl Fn(&Range<usize>) -> bool,
        table: &Table,
    ) {
        let mut from = 0;
        while let Some((first, kind)) = groups.get(from).cloned() {
            let is_piece = |group: &&(Range<usize>, Kind)| {
                matches!(group.1, Kind::Piece | Kind::Side | Kind::PartialAnnouncement)
            };
            let pieces = groups.iter().skip(from).take_while(is_piece).take(MAX_PIECES);
            let unions: Vec<(Range<usize>, Kind)> = pieces
                .map(|(last, kind)| {
                    let all = first.start..last.end;
                    // Words behind it are for what comes next.
                    let union = if *kind == Kind::PartialAnnouncement {
                        Kind::Piece
                    } else {
                        self.kind(of(&all), table)
                    };
                    (all, union)
                })
                .collect();
            let side = unions.iter().position(|(all, kind)| *kind == Kind::Side && recurs(all));
            let whole = unions.iter().rposition(|(_, kind)| *kind == Kind::Whole);
            let joined = side.or(whole).and_then(|at| Some((at, unions.get(at)?.clone())));
            let (more, joined) = joined.unwrap_or((0, (first, kind)));
            groups.splice(from..=from + more, [joined]);
            from += 1;
        }
    }
}

/// What a group of bursts may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Everybody has a part in it, and is at no end of it: an AllReduce.
    Whole,
    /// Not everybody has a part in it.
    Piece,
    /// Nor is it more than words.
    PartialAnnouncement,
    /// Everybody has a part in it, and some are at an end of it.
    Side,
    /// Everybody said something, and nobody more than that.
    Announcement,
}

/// So many pieces are put together at most.
const MAX_PIECES: usize = 6;

/// Sizes of groups that look like sides. What recurs is one; a piece of an AllReduce that stalled has any size.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    sizes: VecDeque<u64>,
    latest: Nanos,
}

/// Groups that are remembered, how many of them make a kind, and what they differ by.
const REMEMBERED: usize = 64;
pub(super) const ALIKE: usize = 3;
const ALIKE_PART: f64 = 0.02;

impl Kinds {
    fn note(&mut self, began: Nanos, bytes: u64) {
        if began > self.latest {
            self.latest = began;
            remember(&mut self.sizes, bytes, REMEMBERED);
        }
    }

    fn has(&self, bytes: u64) -> bool {
        let alike = |one: &&u64| one.abs_diff(bytes) as f64 <= ALIKE_PART * bytes as f64;
        self.sizes.iter().filter(alike).count() >= ALIKE
    }
}

/// How long each host waited for others between two phases. It counts from its last bytes of a phase, `ended`, to its first of
/// the next. Parts of the next come last. It was held up in side groups and `sends` between them, and because it began with what
/// it had to wait for.
///
/// Between two groups a host computes; that is known of those that begin by themselves. Who sends on what has just come in has waited for
/// it, so that it computed no longer than the median of those.
pub(super) fn waits(
    ended: &BTreeMap<Address, Nanos>,
    groups: &[&[Burst]],
    mut sends: &[Burst],
    table: &Table,
) -> BTreeMap<Address, Duration> {
    let mut left = ended.clone();
    let mut waited: BTreeMap<Address, Duration> = BTreeMap::new();
    for (at, group) in groups.iter().enumerate() {
        let is_last = at + 1 == groups.len();
        let parts = &parts(group.iter(), table);
        let firsts = parts.values().map(|part| part.first).filter(|first| *first != Nanos(0));
        // Some may be in an AllReduce while others send.
        let until = if is_last { firsts.max() } else { firsts.min() }.unwrap_or_default();
        let (before, behind) = sends.split_at(sends.partition_point(|send| send.began < until));
        add_waits(&mut left, &mut waited, before, table);
        sends = behind;
        let since = |host: &Address, time: Nanos| Some(time.since(*left.get(host)?));
        let begins = parts.iter().filter(|(_, part)| part.begins_alone());
        let mut alone: Vec<Duration> = begins.filter_map(|(host, part)| since(host, part.first)).collect();
        let Some(usual) = median(&mut alone) else { continue };
        let mut next = left.clone();
        for (host, part) in parts {
            let until = if is_last { part.first } else { part.last };
            let Some(passed) = since(host, until).filter(|_| until != Nanos(0)) else { continue };
            let begins = since(host, part.first).filter(|_| part.first != Nanos(0)).unwrap_or(passed);
            let computed = if part.begins_alone() { begins } else { begins.min(usual) };
            *waited.entry(*host).or_default() += passed.saturating_sub(computed);
            next.insert(*host, until);
        }
        left = next;
    }
    waited
}
