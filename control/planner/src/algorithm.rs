//! Up to which size an operation goes straight from each host to all others, by the time that each way takes: a hop's delay and
//! the bytes over what the fabric carries so. Source: Hockney, "The communication challenge for MPP", 1994.

use crate::path::PathFinder;
use crate::topology::{HostId, Node, Topology};
use harmonaize_units::{Bytes, Nanos, Rate};
use std::collections::BTreeMap;

/// What a message costs those who send and receive it, about, beside the way that it takes.
pub(crate) const MESSAGE_OVERHEAD: f64 = 10e-6;

/// What the ring must take longer for an AllReduce to go in two shots, as a part of its time: where the two are about alike, the
/// ring asks less of the switches.
const MIN_GAIN: f64 = 0.1;

/// Most that one host may be sent by all others at once: a switch's port has to hold it.
const MAX_BURST: u64 = 1 << 20;

/// Sizes stay as they are unless they should be larger or smaller by more than this part.
const HYSTERESIS: f64 = 0.25;

/// Up to which sizes operations go directly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirectThresholds {
    /// In one shot: everything from each to all; 0 for none.
    pub one_shot: Bytes,
    /// In two, if larger than that: from each to who adds a part up, and from there to all; 0 for none.
    pub two_shot: Bytes,
}

/// What decides it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupCosts {
    /// Hosts that take part.
    pub hosts: u32,
    /// One way between those that are farthest from each other.
    pub delay: Nanos,
    /// One way from a host to the next along the ring, on average.
    pub hop_delay: Nanos,
    /// What each host can send in all, to all others alike.
    pub direct_rate: Rate,
    /// What each host can send to the next along the ring.
    pub ring_rate: Rate,
    /// Most bytes of a message.
    pub chunk: Bytes,
}

/// Delays in a group: one way between those that are farthest from each other, and from one to the next along a ring, on average.
/// Cost: a look at the paths of each pair.
pub fn delays(topology: &Topology, ring: &[HostId]) -> (Nanos, Nanos) {
    let mut ways = PathFinder::new(topology);
    let mut delay = |from: HostId, to: HostId| {
        let paths = ways.between(from, to).into_iter();
        paths.map(|path| topology.path_delay(&path)).max().unwrap_or_default()
    };
    let mut farthest = Nanos(0);
    for (at, from) in ring.iter().enumerate() {
        for to in ring.iter().skip(at + 1) {
            farthest = farthest.max(delay(*from, *to));
        }
    }
    let hops = ring.iter().zip(ring.iter().cycle().skip(1));
    let sum = hops.fold(0_u64, |sum, (from, to)| sum.saturating_add(delay(*from, *to).0));
    (farthest, Nanos(sum / ring.len().max(1) as u64))
}

/// Groups of hosts that hang alike of which every two are looked at; with more, from one to all others.
const MAX_GROUPS: usize = 64;

/// One way between any two hosts of a fabric at most: the longest of the shortest ways, or up to twice that in a fabric of very many
/// switches. It is the same whoever's hosts stand where.
pub fn max_delay(topology: &Topology) -> Nanos {
    let mut groups: BTreeMap<Vec<Node>, (Nanos, HostId)> = BTreeMap::new();
    for host in (0..topology.hosts().len()).map(HostId) {
        let links = topology.links_at(Node::Host(host)).iter().filter_map(|id| topology.links().get(id.0));
        let (mut switches, mut longest) = (Vec::new(), Nanos(0));
        for link in links {
            switches.push(if link.from == Node::Host(host) { link.to } else { link.from });
            longest = longest.max(link.delay);
        }
        switches.sort();
        let group = groups.entry(switches).or_insert((longest, host));
        *group = (*group).max((longest, host));
    }
    // A host's own link counts at both ends of a way within its group.
    let own = groups.values().map(|(longest, _)| longest.0).max().unwrap_or_default();
    let hosts: Vec<HostId> = groups.values().map(|(_, host)| *host).collect();
    if hosts.len() <= MAX_GROUPS {
        return delays(topology, &hosts).0.max(Nanos(own.saturating_mul(2)));
    }
    let mut ways = PathFinder::new(topology);
    let first = hosts.first().copied().unwrap_or(HostId(0));
    let paths = hosts.iter().flat_map(|host| ways.between(first, *host));
    let longest = paths.map(|path| topology.path_delay(&path).0).max().unwrap_or_default();
    Nanos(longest.saturating_mul(2))
}

impl GroupCosts {
    fn seconds(nanos: Nanos) -> f64 {
        nanos.0 as f64 / 1e9
    }

    fn peers(&self) -> f64 {
        f64::from(self.hosts.saturating_sub(1))
    }

    /// Time of an AllReduce in one shot.
    pub fn one_shot(&self, bytes: Bytes) -> f64 {
        let each = MESSAGE_OVERHEAD + bytes.0 as f64 * 8.0 / self.direct_rate.0 as f64;
        Self::seconds(self.delay) + self.peers() * each
    }

    /// In two.
    pub fn two_shot(&self, bytes: Bytes) -> f64 {
        let each =
            MESSAGE_OVERHEAD + bytes.0 as f64 * 8.0 / f64::from(self.hosts) / self.direct_rate.0 as f64;
        2.0 * (Self::seconds(self.delay) + self.peers() * each)
    }

    /// Along the ring.
    pub fn ring(&self, bytes: Bytes) -> f64 {
        let each = MESSAGE_OVERHEAD + bytes.0 as f64 * 8.0 / f64::from(self.hosts) / self.ring_rate.0 as f64;
        2.0 * self.peers() * (Self::seconds(self.hop_delay) + each)
    }

    /// The least time of an AllReduce: along the ring, or in the shots that are possible.
    pub fn fastest(&self, bytes: Bytes) -> f64 {
        if self.hosts < 2 {
            return 0.0;
        }
        let ring = self.ring(bytes);
        let most = MAX_BURST / u64::from(self.hosts - 1);
        let one = if bytes.0 <= most.min(self.chunk.0) { self.one_shot(bytes) } else { ring };
        let two = if bytes.0 <= MAX_BURST { self.two_shot(bytes) } else { ring };
        ring.min(one).min(two)
    }

    /// The least time of an AllGather or a ReduceScatter of which so many bytes are at each host: along the ring, or straight to all where
    /// that is possible.
    pub fn gather(&self, bytes: Bytes) -> f64 {
        if self.hosts < 2 {
            return 0.0;
        }
        let ring = self.ring(bytes) / 2.0;
        let direct = if bytes.0 <= MAX_BURST { self.two_shot(bytes) / 2.0 } else { ring };
        ring.min(direct)
    }

    /// Time of an AllToAll of which so many bytes are at each host: with one other host after another.
    pub fn exchange(&self, bytes: Bytes) -> f64 {
        let each = MESSAGE_OVERHEAD
            + bytes.0 as f64 * 8.0 / f64::from(self.hosts.max(1)) / self.direct_rate.0 as f64;
        self.peers() * (Self::seconds(self.delay) + each)
    }

    /// Time of a Broadcast from host to host, in chunks.
    pub fn chain(&self, bytes: Bytes) -> f64 {
        if self.hosts < 2 {
            return 0.0;
        }
        let first = bytes.0.min(self.chunk.0);
        let seconds = |bytes: u64| bytes as f64 * 8.0 / self.ring_rate.0 as f64;
        self.peers() * (Self::seconds(self.hop_delay) + MESSAGE_OVERHEAD + seconds(first))
            + seconds(bytes.0 - first)
    }

    /// Time of a Barrier: each round reaches twice as many.
    pub fn barrier(&self) -> f64 {
        let rounds = self.hosts.max(1).next_power_of_two().ilog2();
        f64::from(rounds) * (Self::seconds(self.delay) + MESSAGE_OVERHEAD)
    }

    /// The sizes up to which each way is the fastest; `current` where they are about that already.
    pub fn thresholds(&self, current: DirectThresholds) -> DirectThresholds {
        if self.hosts < 2 || self.direct_rate.0 == 0 || self.ring_rate.0 == 0 {
            return DirectThresholds::default();
        }
        let most = MAX_BURST / u64::from(self.hosts - 1);
        if self.hosts == 2 {
            // One shot crosses the links that the ring does, once: rates, and with them who else is there, decide nothing.
            return DirectThresholds { one_shot: Bytes(most.min(self.chunk.0)), two_shot: Bytes(0) };
        }
        let pays = |bytes| self.one_shot(bytes) <= self.two_shot(bytes).min(self.ring(bytes));
        let one = largest(1, most.min(self.chunk.0), pays);
        let pays = |bytes| self.two_shot(bytes) <= self.ring(bytes) * (1.0 - MIN_GAIN);
        let two = largest(one.0 + 1, MAX_BURST, pays);
        DirectThresholds {
            one_shot: with_hysteresis(one, current.one_shot),
            two_shot: with_hysteresis(two, current.two_shot),
        }
    }
}

/// The largest size from `first` up to `most` at which something holds that holds at every smaller one; 0 where it does not at `first`.
/// Where it holds lies together, but need not begin there: a slow ring is the slower the more it carries.
fn largest(first: u64, most: u64, holds: impl Fn(Bytes) -> bool) -> Bytes {
    if first > most || !holds(Bytes(first)) {
        return Bytes(0);
    }
    let (mut holding, mut beyond) = (first, most.saturating_add(1));
    while holding + 1 < beyond {
        let middle = holding + (beyond - holding) / 2;
        if holds(Bytes(middle)) {
            holding = middle;
        } else {
            beyond = middle;
        }
    }
    Bytes(holding)
}

fn with_hysteresis(target: Bytes, current: Bytes) -> Bytes {
    let (new, old) = (target.0 as f64, current.0 as f64);
    let near = new > 0.0 && old > 0.0 && new <= old * (1.0 + HYSTERESIS) && new >= old / (1.0 + HYSTERESIS);
    if near { current } else { target }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reach() -> GroupCosts {
        let gigabit = Rate(1_000_000_000);
        let delay = Nanos(1_000_000);
        GroupCosts {
            hosts: 8,
            delay,
            hop_delay: delay,
            direct_rate: gigabit,
            ring_rate: gigabit,
            chunk: Bytes(64 << 10),
        }
    }

    #[test]
    fn eight_hosts_a_millisecond_apart() {
        let found = reach().thresholds(DirectThresholds::default());
        // One shot sends 7 S, two 1.75 S and a millisecond more: level at 1.07 ms * 125 MB/s / 5.25.
        assert!((found.one_shot.0 as f64 - 25_476.0).abs() < 3.0, "{found:?}");
        assert_eq!(found.two_shot, Bytes(MAX_BURST));
        assert!((reach().ring(Bytes(0)) - 14.14e-3).abs() < 1e-6);
    }

    #[test]
    fn other_collectives_use_link_time() {
        let (reach, megabyte) = (reach(), Bytes(1 << 20));
        // 8 MiB at 125 MB/s are 67 ms: seven eighths of them cross each link once, or twice in an AllReduce; and 7 ways of 1 ms.
        let near = |one: f64, other: f64| (one / other - 1.0).abs() < 0.05;
        let large = Bytes(megabyte.0 * 8);
        assert!(near(reach.gather(large), reach.ring(large) / 2.0) && near(reach.gather(large), 65.8e-3));
        assert!(near(reach.exchange(large), 65.8e-3), "{}", reach.exchange(large));
        assert!(near(reach.chain(large), 67.1e-3 + 7e-3 + 6.0 * 0.52e-3), "{}", reach.chain(large));
        assert!(reach.gather(Bytes(1 << 10)) < 2e-3, "straight to all");
        assert!(near(reach.barrier(), 3.03e-3), "{}", reach.barrier());
        let alone = GroupCosts { hosts: 1, ..reach };
        let times = [alone.gather(large), alone.exchange(large), alone.chain(large), alone.barrier()];
        assert_eq!(times, [0.0; 4]);
    }

    #[test]
    fn two_hosts_use_one_shot() {
        let found = GroupCosts { hosts: 2, ..reach() }.thresholds(DirectThresholds::default());
        assert_eq!(found, DirectThresholds { one_shot: Bytes(64 << 10), two_shot: Bytes(0) });
        assert_eq!(
            GroupCosts { hosts: 1, ..reach() }.thresholds(DirectThresholds::default()),
            DirectThresholds::default()
        );
        assert_eq!(
            GroupCosts { direct_rate: Rate(0), ..reach() }.thresholds(DirectThresholds::default()),
            DirectThresholds::default()
        );
    }

    #[test]
    fn direct_sizes_start_at_the_smallest() {
        let (delay, hop) = (Nanos(7_716_621), Nanos(696_563));
        let far = GroupCosts {
            hosts: 11,
            delay,
            hop_delay: hop,
            direct_rate: Rate(30_299_156_556),
            ring_rate: Rate(1_749_143_609),
            ..reach()
        };
        let found = far.thresholds(DirectThresholds::default());
        assert!(
            far.two_shot(Bytes(MAX_BURST)) < far.ring(Bytes(MAX_BURST))
                && far.ring(Bytes(70_000)) < far.two_shot(Bytes(70_000))
        );
        assert_eq!(found.two_shot, Bytes(0), "{found:?}");
    }

    #[test]
    fn a_narrow_fabric_keeps_to_the_ring_sooner() {
        let near = Nanos(20_000);
        let wide = GroupCosts { delay: near, hop_delay: near, ..reach() };
        let narrow = GroupCosts { direct_rate: Rate(250_000_000), ..wide };
        let [wide, narrow] = [wide, narrow].map(|reach| reach.thresholds(DirectThresholds::default()));
        assert!(narrow.two_shot < wide.two_shot && narrow.one_shot < wide.one_shot, "{narrow:?} {wide:?}");
    }

    #[test]
    fn ring_hops_can_be_shorter_than_farthest_pair() {
        let (topology, ring) = crate::all_to_all::tests::racks(2, "1Gbit/s");
        let (farthest, hop) = delays(&topology, &ring);
        // Two racks of two: 50 us a link, four links between racks, two within.
        assert_eq!((farthest, hop), (Nanos(200_000), Nanos(150_000)));
        assert_eq!(delays(&topology, &ring[..1]), (Nanos(0), Nanos(0)));
    }

    proptest! {
        #[test]
        fn chosen_algorithm_is_the_fastest(
            hosts in 3_u32..64,
            delay in 0_u64..10_000_000,
            hop in 0_u64..10_000_000,
            direct in 1_000_000_u64..400_000_000_000,
            ring in 1_000_000_u64..400_000_000_000,
            bytes in 1_u64..4_000_000,
        ) {
            let (delay, hop, direct, ring) = (Nanos(delay), Nanos(hop), Rate(direct), Rate(ring));
            let reach = GroupCosts { hosts, delay, hop_delay: hop, direct_rate: direct, ring_rate: ring, chunk: Bytes(64 << 10) };
            let found = reach.thresholds(DirectThresholds::default());
            let bytes = Bytes(bytes);
            let fastest = reach.one_shot(bytes).min(reach.two_shot(bytes)).min(reach.ring(bytes));
            if bytes <= found.one_shot {
                prop_assert!(reach.one_shot(bytes) <= fastest, "{:?} {:?}", reach, found);
            } else if bytes <= found.two_shot {
                prop_assert!(reach.two_shot(bytes) <= reach.ring(bytes) * 0.9 + 1e-12, "{:?} {:?}", reach, found);
            }
            prop_assert_eq!(reach.thresholds(found), found, "it stays");
        }

        #[test]
        fn small_changes_keep_thresholds(one in 1_u64..1_000_000, by in 0.81_f64..1.24) {
            let near = Bytes((one as f64 * by).round().max(1.0) as u64);
            prop_assume!(near.0 as f64 <= one as f64 * 1.25 && near.0 as f64 >= one as f64 / 1.25);
            prop_assert_eq!(with_hysteresis(near, Bytes(one)), Bytes(one));
            prop_assert_eq!(with_hysteresis(Bytes(one * 2), Bytes(one)), Bytes(one * 2));
            prop_assert_eq!(with_hysteresis(Bytes(0), Bytes(one)), Bytes(0));
        }
    }
}
