//! What a phase's bursts say of hosts, edges, rings, and who was late.

use super::finding::{Address, EdgePhase, HostPhase, Late, Phase, RingSteps};
use super::flow::{Burst, Quality};
use super::iterations::median;
use super::job::{Job, PhaseBursts, remember};
use super::sides::waits;
use super::table::{HEAVY_BYTES, Table};
use crate::nanos;
use harmonaize_abi::Nanos;
use std::collections::BTreeMap;
use std::time::Duration;

/// Edges that carry less than this part of the busiest one's bytes have acknowledgements and words alone.
const MIN_EDGE_PART: f64 = 0.05;
/// Edges of a ring carry at least this part of the busiest one's.
const MIN_RING_EDGE_PART: f64 = 0.5;
/// Hosts of a job that are told apart.
const MAX_HOSTS: usize = 1024;
/// Phases over which hosts' usual distance is taken.
const SPREAD_OVER: usize = 32;
/// A host is late by at least this, and by so many usual distances.
const LATE: Duration = Duration::from_millis(1);
const LATE_SPREADS: u32 = 4;
/// Before so many phases nothing is usual.
const MIN_SPREADS: usize = 4;
/// Bursts that a step's size is looked for in.
const SAMPLES: usize = 64;

#[derive(Debug, Default)]
struct Edge {
    first: Nanos,
    last_sent: Nanos,
    arrived: Nanos,
    /// When the latest burst began.
    active: [Duration; 2],
    bytes: u64,
    quality: Quality,
}

/// The phase that a cut is.
pub(super) fn phase(job: &mut Job, cut: &PhaseBursts, table: &mut Table) -> Phase {
    let mut edges: BTreeMap<(Address, Address), Edge> = BTreeMap::new();
    let mut firsts: BTreeMap<Address, Nanos> = BTreeMap::new();
    let mut began: BTreeMap<(u32, bool), Nanos> = BTreeMap::new();
    for burst in &cut.bursts {
        let Some((from, to)) = ends(table, burst.connection, burst.reverse) else { continue };
        began.entry((burst.connection, burst.reverse)).or_insert(burst.began);
        // What is caused by what came in the other way says nothing of the host.
        let caused = began.get(&(burst.connection, !burst.reverse)).is_some_and(|at| *at <= burst.began);
        let edge = edges.entry((from, to)).or_default();
        if !(caused && burst.is_ack_only()) {
            firsts.entry(from).or_insert(burst.began);
            edge.first = if edge.first == Nanos(0) { burst.began } else { edge.first };
        }
        let end = if burst.leaving { &mut edge.last_sent } else { &mut edge.arrived };
        *end = burst.ended.max(*end);
        let [leaving, coming] = &mut edge.active;
        *(if burst.leaving { leaving } else { coming }) += burst.ended.since(burst.began);
        edge.bytes += if burst.is_counted { burst.bytes } else { 0 };
    }
    for place in &job.connections {
        for (reverse, quality) in [false, true].into_iter().zip(table.quality(*place)) {
            if let Some(edge) = ends(table, *place, reverse).and_then(|ends| edges.get_mut(&ends)) {
                edge.quality.rtt_count += quality.rtt_count;
                edge.quality.rtt_sum = edge.quality.rtt_sum.saturating_add(quality.rtt_sum);
                edge.quality.retransmissions += quality.retransmissions;
            }
        }
    }
    let most = edges.values().map(|edge| edge.bytes).max().unwrap_or_default();
    let busy = |part: f64| {
        let list = edges.iter().filter(move |(_, edge)| edge.bytes as f64 > part * most as f64);
        list.map(|((from, to), _)| (*from, *to)).collect::<Vec<_>>()
    };
    let ring = ring(&busy(MIN_RING_EDGE_PART));
    admit(job, ring.as_deref(), &busy(MIN_EDGE_PART));
    let groups: Vec<&[Burst]> = cut.sides.iter().chain([&cut.bursts]).map(Vec::as_slice).collect();
    let mut waited = waits(&job.ended, &groups, &cut.sends, table);
    if !cut.sends.is_empty() {
        job.level_stages(&firsts, &mut waited);
    }
    let none = BTreeMap::new();
    let alone = cut.sides.is_empty() && cut.sends.is_empty();
    let late = late(job, &firsts, if alone { &none } else { &waited });
    let place = |host: &Address| job.hosts.iter().position(|known| known == host);
    let told = edges.iter().filter(|(_, edge)| edge.bytes as f64 > MIN_EDGE_PART * most as f64).filter_map(
        |((from, to), edge)| {
            let (from, to) = (u32::try_from(place(from)?).ok()?, u32::try_from(place(to)?).ok()?);
            Some(edge.to_edge_phase(from, to))
        },
    );
    let mut told: Vec<EdgePhase> = told.collect();
    told.sort_unstable_by_key(|edge| (edge.from, edge.to));
    let received = |host: &Address| {
        let to = edges.iter().filter(|((_, to), _)| to == host);
        to.map(|(_, edge)| if edge.arrived == Nanos(0) { edge.last_sent } else { edge.arrived })
            .max()
            .unwrap_or_default()
    };
    let hosts = job.hosts.iter().map(|host| HostPhase {
        host: *host,
        first_sent: firsts.get(host).copied().unwrap_or_default(),
        last_received: received(host),
        waited: waited.get(host).copied().unwrap_or_default(),
    });
    let hosts: Vec<HostPhase> = hosts.collect();
    job.ended = hosts
        .iter()
        .map(|host| (host.host, host.last_received))
        .filter(|(_, ended)| *ended != Nanos(0))
        .collect();
    Phase {
        job: job.number,
        iteration: cut.iteration,
        began: cut.began,
        ended: cut.ended,
        bytes: cut.bytes,
        period: job.period(),
        ring: ring.map(|hosts| steps(hosts.len(), most, &cut.bursts)),
        late,
        lossy: cut.lossy,
        hosts,
        edges: told,
    }
}

impl Edge {
    fn to_edge_phase(&self, from: u32, to: u32) -> EdgePhase {
        let [leaving, coming] = self.active;
        EdgePhase {
            from,
            to,
            first: self.first,
            last: if self.last_sent == Nanos(0) { self.arrived } else { self.last_sent },
            arrived: self.arrived,
            active: if self.last_sent == Nanos(0) { coming } else { leaving },
            bytes: self.bytes,
            rtt: Duration::from_nanos(
                nanos(self.quality.rtt_sum).checked_div(self.quality.rtt_count).unwrap_or(0),
            ),
            retransmissions: self.quality.retransmissions,
        }
    }
}

fn ends(table: &Table, connection: u32, reverse: bool) -> Option<(Address, Address)> {
    let ends = table.connection(connection)?.ends;
    Some(if reverse { (ends.second.0, ends.first.0) } else { (ends.first.0, ends.second.0) })
}

/// New hosts find places: in the ring's order if they are the first, else as they come.
fn admit(job: &mut Job, ring: Option<&[Address]>, edges: &[(Address, Address)]) {
    job.ring = ring.is_some();
    let both = edges.iter().flat_map(|(from, to)| [*from, *to]);
    for host in ring.unwrap_or_default().iter().copied().chain(both) {
        if job.hosts.len() < MAX_HOSTS && !job.hosts.contains(&host) {
            job.hosts.push(host);
        }
    }
}

/// The host that began late, if one did.
fn late(
    job: &mut Job,
    firsts: &BTreeMap<Address, Nanos>,
    waited: &BTreeMap<Address, Duration>,
) -> Option<Late> {
    let start =
        |host: &Address| Some(firsts.get(host)?.before(waited.get(host).copied().unwrap_or_default()));
    let mut starts: Vec<(Nanos, Address)> =
        job.hosts.iter().filter_map(|host| Some((start(host)?, *host))).collect();
    if starts.len() < 2 {
        return None;
    }
    starts.sort_unstable();
    let (last, host) = starts.pop()?;
    let mut others: Vec<Nanos> = starts.iter().map(|(start, _)| *start).collect();
    let by = last.since(median(&mut others)?);
    let mut usual: Vec<Duration> = job.spreads.iter().copied().collect();
    let known = usual.len() >= MIN_SPREADS;
    let usual = median(&mut usual).unwrap_or_default();
    if known && by >= LATE.saturating_add(usual.saturating_mul(LATE_SPREADS)) {
        return Some(Late { host, by });
    }
    remember(&mut job.spreads, by, SPREAD_OVER);
    None
}

/// The hosts of a ring in its order, the lowest address first, if edges are one.
fn ring(edges: &[(Address, Address)]) -> Option<Vec<Address>> {
    let next: BTreeMap<Address, Address> = edges.iter().copied().collect();
    let reached: std::collections::BTreeSet<Address> = edges.iter().map(|(_, to)| *to).collect();
    if next.len() != edges.len() || reached.len() != edges.len() {
        return None;
    }
    let (first, _) = next.first_key_value()?;
    let mut ring = vec![*first];
    let mut at = next.get(first)?;
    while at != first && ring.len() < edges.len() {
        ring.push(*at);
        at = next.get(at)?;
    }
    (at == first && ring.len() == edges.len() && ring.len() > 1).then_some(ring)
}

/// A ring's steps, by the size that its bursts have in common: most of them are a few of it.
fn steps(hosts: usize, edge_bytes: u64, bursts: &[Burst]) -> RingSteps {
    let hosts = u32::try_from(hosts).unwrap_or(u32::MAX);
    let unknown = RingSteps { hosts, steps: 0, bytes: 0 };
    let mut sizes: Vec<u64> =
        bursts.iter().filter(|one| one.is_counted && one.bytes >= HEAVY_BYTES).map(|one| one.bytes).collect();
    sizes.sort_unstable();
    let every = sizes.len() / SAMPLES + 1;
    let sizes: Vec<u64> = sizes.into_iter().step_by(every).collect();
    let fits = |size: u64| {
        let fits = |burst: &&u64| {
            let many = (**burst + size / 2) / size;
            (1..=8).contains(&many) && burst.abs_diff(many * size) as f64 <= 0.04 * size as f64
        };
        4 * sizes.iter().filter(fits).count() >= 3 * sizes.len()
    };
    let Some(size) = sizes.iter().rev().copied().find(|size| fits(*size)) else { return unknown };
    let turn = u64::from(hosts.saturating_sub(1)) * 2;
    let count = edge_bytes as f64 / size as f64;
    let turns = (count / turn.max(1) as f64).round().max(1.0);
    let steps = turns * turn as f64;
    if (steps - count).abs() > 0.1 * count {
        return unknown;
    }
    RingSteps { hosts, steps: steps as u32, bytes: (edge_bytes as f64 / steps) as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(number: u32) -> Address {
        [0, 0, 0, number]
    }

    #[test]
    fn a_ring_is_one_cycle_through_all() {
        let edges = |list: &[(u32, u32)]| list.iter().map(|(a, b)| (host(*a), host(*b))).collect::<Vec<_>>();
        let found = |list| ring(&edges(list)).map(|ring| ring.iter().map(|host| host[3]).collect::<Vec<_>>());
        assert_eq!(found(&[(1, 4), (4, 2), (2, 1)]), Some(vec![1, 4, 2]));
        assert_eq!(found(&[(1, 2), (2, 1)]), Some(vec![1, 2]));
        for none in
            [&[(1, 2), (2, 3)][..], &[(1, 2), (2, 1), (3, 4), (4, 3)], &[(1, 2), (1, 3)], &[], &[(1, 1)]]
        {
            assert_eq!(found(none), None, "{none:?}");
        }
        assert_eq!(found(&[(1, 2), (3, 2), (2, 1)]), None);
    }

    #[test]
    fn steps_are_what_bursts_have_in_common() {
        let bursts = |sizes: &[u64]| {
            let burst = |bytes: &u64| Burst { bytes: *bytes, is_counted: true, ..Burst::default() };
            sizes.iter().map(burst).collect::<Vec<_>>()
        };
        // Gloo cuts a step in two; some bursts are of several.
        let sizes = [53_784, 107_568, 107_796, 53_898, 215_658, 161_694, 53_784, 107_796];
        let found = steps(4, 36 * 53_850, &bursts(&sizes));
        assert_eq!(found, RingSteps { hosts: 4, steps: 36, bytes: 53_850 });
        let none = steps(4, 1_000_000, &bursts(&[10_000, 17_123, 33_891, 51_177, 5_111]));
        assert_eq!((none.steps, none.bytes), (0, 0));
        assert_eq!(steps(4, 0, &[]).steps, 0);
    }
}
