//! Sends point to point within an iteration: parts of a sequence that meet, stages of a pipeline. They are part of an iteration, and of no phase.
//!
//! They are told from AllReduces by their connections. An AllReduce reaches every host with bursts that follow each other, over
//! connections that are busy together. Connections that are seldom busy with those are for sends. So sends over the connections of AllReduces
//! are not told apart.

use super::finding::Address;
use super::flow::Burst;
use super::iterations::median;
use super::sides::{Hosts, SENDS_ON, SIDE_GAP};
use super::table::{HEAVY_BYTES, Table};
use harmonaize_abi::Nanos;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A connection of AllReduces is busy together with another one in this part of its groups of bursts. Other connections
/// are for sends.
const TOGETHER: (usize, usize) = (3, 4);
/// It is so in this part of the other's groups, too.
const MUTUAL: (usize, usize) = (1, 2);
/// So many clusters of connections are tried, those with the most bytes first.
const MAX_CLUSTERS: usize = 16;

/// Bursts without a silence: the connections, and each one's bytes.
type Group = BTreeMap<u32, u64>;

/// The connections that carry sends alone, by bursts in the order of their beginning; none where no others make AllReduces.
pub(super) fn connections(bursts: &[Burst], hosts: &Hosts, table: &Table) -> BTreeSet<u32> {
    let (mut groups, mut until): (Vec<Group>, _) = (Vec::new(), None::<Nanos>);
    let (mut bytes, mut counts) = (Group::new(), BTreeMap::<u32, usize>::new());
    for burst in bursts.iter().filter(|burst| burst.bytes >= HEAVY_BYTES) {
        if until.is_none_or(|until| burst.began > until.after(SIDE_GAP)) {
            groups.push(Group::new());
        }
        until = until.max(Some(burst.ended));
        let Some(group) = groups.last_mut() else { continue };
        if !group.contains_key(&burst.connection) {
            *counts.entry(burst.connection).or_default() += 1;
        }
        let counted = if burst.is_counted { burst.bytes } else { 0 };
        for sums in [group, &mut bytes] {
            let sum = sums.entry(burst.connection).or_default();
            *sum = sum.saturating_add(counted);
        }
    }
    let mut free: Vec<(u64, u32)> = bytes.iter().map(|(place, bytes)| (*bytes, *place)).collect();
    free.sort_unstable();
    let mut main: Option<(u64, BTreeSet<u32>)> = None;
    for _ in 0..MAX_CLUSTERS {
        let Some((_, first)) = free.pop() else { break };
        let own = groups.iter().filter(|group| group.contains_key(&first));
        let with = together(own);
        let all = with.get(&first).copied().unwrap_or_default();
        let joins = |one: &u32| {
            let with = with.get(one).copied().unwrap_or_default();
            let of = counts.get(one).copied().unwrap_or_default();
            reaches(with, of, TOGETHER) && reaches(with, all, MUTUAL)
        };
        let mut cluster: BTreeSet<u32> = free.iter().map(|(_, one)| *one).filter(joins).collect();
        cluster.insert(first);
        free.retain(|(_, one)| !cluster.contains(one));
        let (mut reached, mut all) = (0_u64, 0_u64);
        for group in &groups {
            let own = || group.iter().filter(|(one, _)| cluster.contains(one));
            let bytes = own().fold(0_u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
            let ends = own().filter_map(|(one, _)| Some(table.connection(*one)?.ends));
            let ends: BTreeSet<Address> = ends.flat_map(|ends| [ends.first.0, ends.second.0]).collect();
            all = all.saturating_add(bytes);
            reached = reached.saturating_add(if ends == hosts.all { bytes } else { 0 });
        }
        if reached >= all / 2 && main.as_ref().is_none_or(|(most, _)| reached > *most) {
            main = Some((reached, cluster));
        }
    }
    let Some((_, main)) = main else { return BTreeSet::new() };
    let with = together(groups.iter().filter(|group| group.keys().any(|one| main.contains(one))));
    let apart = |(one, of): (u32, usize)| {
        let with = with.get(&one).copied().unwrap_or_default();
        (!main.contains(&one) && !reaches(with, of, TOGETHER)).then_some(one)
    };
    counts.into_iter().filter_map(apart).collect()
}

/// In how many of some groups each connection is.
fn together<'a>(groups: impl Iterator<Item = &'a Group>) -> BTreeMap<u32, usize> {
    let mut with = BTreeMap::new();
    groups.flat_map(|group| group.keys()).for_each(|one| *with.entry(*one).or_default() += 1);
    with
}

/// Whether some of all are at least this part of them.
const fn reaches(some: usize, all: usize, (part, whole): (usize, usize)) -> bool {
    some * whole >= all * part
}

/// What a host did last.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Act {
    /// It ended what came before the sends.
    Ended,
    Word,
    Data,
    Received,
}

/// Goes through sends, and adds to `waited` how long each host was held up in them. It counts since the time in `since`, which becomes when
/// the host did something last.
///
/// A host computes before what it sends by itself. It has waited before what it receives, and before bytes that it sends once another host is ready
/// for them. Where it may have computed meanwhile, as before one of several bytes that it sends on end, it has waited for what is beyond the
/// median time that hosts compute.
pub(super) fn add_waits(
    since: &mut BTreeMap<Address, Nanos>,
    waited: &mut BTreeMap<Address, Duration>,
    bursts: &[Burst],
    table: &Table,
) {
    let mut events = Vec::with_capacity(2 * bursts.len());
    let mut began = BTreeSet::new();
    for burst in bursts {
        let Some(ends) = table.connection(burst.connection).map(|connection| connection.ends) else {
            continue;
        };
        let (first, second) = (ends.first.0, ends.second.0);
        let (from, to) = if burst.reverse { (second, first) } else { (first, second) };
        began.insert((burst.connection, burst.reverse));
        if burst.is_ack_only() && began.contains(&(burst.connection, !burst.reverse)) {
            continue;
        }
        let act = if burst.is_announcement() { Act::Word } else { Act::Data };
        events.push((burst.began, false, from, act));
        // Where a word and bytes come as one burst, the word is at its beginning.
        events.push((burst.began, true, to, Act::Word));
        events.push((burst.ended, true, to, act));
    }
    events.sort_unstable_by_key(|(at, comes, host, _)| (*at, !*comes, *host));
    let mut hosts: BTreeMap<Address, (Act, Nanos)> = BTreeMap::new();
    let (mut computed, mut reactions) = (Vec::new(), Vec::new());
    for (at, comes, host, act) in events {
        let Some(since) = since.get_mut(&host) else { continue };
        let (last, incoming) = hosts.entry(host).or_insert((Act::Ended, Nanos(0)));
        if comes {
            *incoming = at;
            if act == Act::Data {
                *waited.entry(host).or_default() += at.since(*since);
                (*last, *since) = (Act::Received, at.max(*since));
            }
            continue;
        }
        let reacts = *incoming > *since && at <= incoming.after(SENDS_ON);
        if !reacts {
            // Words and bytes that follow each other are no computing.
            computed.extend(Some(at.since(*since)).filter(|passed| *passed > SENDS_ON));
        } else if matches!((act, *last), (Act::Data, Act::Word) | (Act::Word, Act::Word | Act::Data)) {
            *waited.entry(host).or_default() += incoming.since(*since);
        } else {
            reactions.push((host, incoming.since(*since)));
        }
        (*last, *since) = (act, at.max(*since));
    }
    let usual = median(&mut computed).unwrap_or_default();
    for (host, passed) in reactions {
        let sum = waited.entry(host).or_default();
        *sum = sum.saturating_add(passed.saturating_sub(usual));
    }
}
