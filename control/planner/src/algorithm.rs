//! Which algorithm an operation takes, by the time that each is predicted to take. That time has a hop's delay, what a message costs the
//! hosts, the bytes over what the fabric carries, and the bytes that a host adds up. Source: Hockney, "The communication challenge for
//! MPP", 1994; Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005.

use crate::all_to_all::{exchange_rate, usage};
use crate::conditions::Conditions;
use crate::ring_order::Racks;
use harmonaize_abi::{Collective, Pattern};
use harmonaize_plan::{Algorithm, AlgorithmRange, AlgorithmTable};
use harmonaize_topology::{DirectedLink, HostId, Node, Path, PathFinder, Topology};
use harmonaize_units::{Bytes, Nanos, Rate};
use std::collections::BTreeMap;

/// What a message costs those who send and receive it, about. It comes on top of the route's time and stands where nobody has
/// measured it.
pub(crate) const MESSAGE_OVERHEAD: f64 = 10e-6;

/// What the ring must take longer for an operation to go otherwise than in one shot. It is a part of the ring's time. Where the
/// two are about alike, the ring asks less of the switches.
const MIN_GAIN: f64 = 0.1;

/// The largest operations that go otherwise than along the ring. That is the most that one host may be sent by all others at once, for a switch's
/// port has to hold it, and above it a ring's messages are as large as can be.
const MAX_BURST: u64 = 1 << 20;

/// Sizes stay as they are unless they should be larger or smaller by more than this part.
const HYSTERESIS: f64 = 0.25;

/// Most ranges of sizes of a collective that are chosen: the table has room for those that an operator adds.
const MAX_CHOSEN: usize = 4;

/// What taking part costs a host, as its agent has measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostCosts {
    /// Seconds to send and receive a message, beside the way that it takes.
    pub message: f64,
    /// Seconds to add up a byte.
    pub reduced_byte: f64,
}

impl Default for HostCosts {
    fn default() -> Self {
        Self { message: MESSAGE_OVERHEAD, reduced_byte: 0.0 }
    }
}

impl HostCosts {
    /// The larger of both, of each.
    pub fn max(self, other: Self) -> Self {
        Self {
            message: self.message.max(other.message),
            reduced_byte: self.reduced_byte.max(other.reduced_byte),
        }
    }
}

/// What the racks of a group are to an algorithm that goes by them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RackCosts {
    /// How many there are.
    pub racks: u32,
    /// Hosts of the largest.
    pub largest: u32,
    /// Hosts of the smallest. So many of each send to other racks.
    pub smallest: u32,
    /// What each host can send to the next in its rack.
    pub within: Rate,
    /// What each of those who send to other racks can send to its like in the next, all at once.
    pub across: Rate,
}

impl RackCosts {
    /// Of a ring of hosts that stand in racks. `others`: how many others take as much on a link. None without racks. Cost: a look at the
    /// paths of two pairs for each host.
    pub fn new(
        topology: &Topology,
        conditions: &Conditions,
        ring: &[HostId],
        racks: &Racks,
        others: &BTreeMap<DirectedLink, u32>,
    ) -> Option<Self> {
        let Racks { sizes, from } = racks;
        let (largest, smallest) = (*sizes.iter().max()?, *sizes.iter().min()?);
        let around = ring.iter().cycle().skip(*from as usize).take(ring.len());
        let ring: Vec<HostId> = around.copied().collect();
        let mut rest = ring.as_slice();
        let mut hosts = Vec::new();
        for rack in sizes {
            let (rack, behind) = rest.split_at_checked(*rack as usize)?;
            hosts.push(rack);
            rest = behind;
        }
        let within = hosts.iter().flat_map(|rack| rack.iter().zip(rack.iter().cycle().skip(1)));
        let next = hosts.iter().cycle().skip(1);
        let across =
            hosts.iter().zip(next).flat_map(|(rack, next)| rack.iter().zip(*next).take(smallest as usize));
        let pair = |(from, to): (&HostId, &HostId)| (*from, *to);
        let within = usage(topology, within.map(pair).filter(|(from, to)| from != to), 1.0);
        let across = usage(topology, across.map(pair), 1.0);
        let [within, across] = [within, across].map(|usage| exchange_rate(&usage, conditions, others));
        Some(Self { racks: sizes.len() as u32, largest, smallest, within, across })
    }
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
    /// Whether there are few enough hosts for each to send to all others.
    pub straight: bool,
    /// What taking part costs each host.
    pub host: HostCosts,
    /// In which racks they stand; none where that is not known, or operations cannot go by it.
    pub racks: Option<RackCosts>,
}

/// Delays in a group, each of one direction. First between those that are farthest from each other, then from one to the next
/// along a ring, on average. Cost: a look at the paths of each pair.
pub fn delays(topology: &Topology, ring: &[HostId]) -> (Nanos, Nanos) {
    let mut ways = PathFinder::new(topology);
    delays_by(topology, ring, |from, to| ways.between(from, to))
}

/// The same where these are the paths between two.
pub(crate) fn delays_by(
    topology: &Topology,
    ring: &[HostId],
    mut paths: impl FnMut(HostId, HostId) -> Vec<Path>,
) -> (Nanos, Nanos) {
    let mut delay = |from: HostId, to: HostId| longest_of(topology, paths(from, to));
    let mut farthest = Nanos(0);
    for (at, from) in ring.iter().enumerate() {
        for to in ring.iter().skip(at + 1) {
            farthest = farthest.max(delay(*from, *to));
        }
    }
    (farthest, hop_delay_by(ring, delay))
}

/// One way from one to the next along a ring, on average.
pub fn hop_delay(topology: &Topology, ring: &[HostId]) -> Nanos {
    let mut ways = PathFinder::new(topology);
    hop_delay_by(ring, |from, to| longest_of(topology, ways.between(from, to)))
}

/// The delay of the slowest of these paths, one way.
fn longest_of(topology: &Topology, paths: impl IntoIterator<Item = Path>) -> Nanos {
    paths.into_iter().map(|path| topology.path_delay(&path)).max().unwrap_or_default()
}

fn hop_delay_by(ring: &[HostId], mut delay: impl FnMut(HostId, HostId) -> Nanos) -> Nanos {
    let hops = ring.iter().zip(ring.iter().cycle().skip(1));
    let sum = hops.fold(0_u64, |sum, (from, to)| sum.saturating_add(delay(*from, *to).0));
    Nanos(sum / ring.len().max(1) as u64)
}

/// Groups of hosts that hang alike of which every two are looked at; with more, from one to all others.
const MAX_GROUPS: usize = 64;

/// The most that one direction between any two hosts of a fabric takes. It is the longest of the shortest paths, or up to twice that
/// in a fabric of very many switches. It is the same whoever's hosts stand where.
pub fn max_delay(topology: &Topology) -> Nanos {
    let mut groups: BTreeMap<Vec<Node>, (Nanos, HostId)> = BTreeMap::new();
    for (host, _) in topology.hosts_there() {
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
    Nanos(longest_of(topology, paths).0.saturating_mul(2))
}

impl GroupCosts {
    fn seconds(nanos: Nanos) -> f64 {
        nanos.0 as f64 / 1e9
    }

    fn peers(&self) -> f64 {
        f64::from(self.hosts.saturating_sub(1))
    }

    /// Time to send a message of so many bytes straight to another host, without the delay.
    fn sent(&self, bytes: f64) -> f64 {
        self.host.message + bytes * 8.0 / self.direct_rate.0 as f64
    }

    /// Time to add up a part of so many bytes.
    fn reduced(&self, bytes: Bytes, part: f64) -> f64 {
        bytes.0 as f64 * part * self.host.reduced_byte
    }

    /// The part of a tensor that is not one host's own.
    fn others(&self) -> f64 {
        self.peers() / f64::from(self.hosts.max(1))
    }

    /// Segments of at most so many chunks.
    fn segments(&self, bytes: Bytes, chunks: u64) -> f64 {
        bytes.0.div_ceil(self.chunk.0.saturating_mul(chunks).max(1)).max(1) as f64
    }

    /// Hops of a binomial tree.
    fn rounds(&self) -> f64 {
        f64::from(self.hosts.max(1).next_power_of_two().ilog2())
    }

    /// Time of an AllReduce in one shot.
    pub fn one_shot(&self, bytes: Bytes) -> f64 {
        let each = self.sent(bytes.0 as f64) + self.reduced(bytes, 1.0);
        Self::seconds(self.delay) + self.peers() * each
    }

    /// In two.
    pub fn two_shot(&self, bytes: Bytes) -> f64 {
        let each = self.sent(bytes.0 as f64 / f64::from(self.hosts));
        2.0 * (Self::seconds(self.delay) + self.peers() * each) + self.reduced(bytes, self.others())
    }

    /// Along the ring.
    pub fn ring(&self, bytes: Bytes) -> f64 {
        let each = self.host.message + bytes.0 as f64 * 8.0 / f64::from(self.hosts) / self.ring_rate.0 as f64;
        2.0 * self.peers() * (Self::seconds(self.hop_delay) + each) + self.reduced(bytes, self.others())
    }

    /// Exchanges between partners, and hosts that go by a neighbour.
    fn exchanges(&self) -> (f64, f64) {
        let levels = self.hosts.max(1).ilog2();
        (f64::from(levels), if self.hosts.is_power_of_two() { 0.0 } else { 1.0 })
    }

    /// By recursive doubling: everything in each exchange. A neighbour's contribution comes first, and its result last.
    fn doubling(&self, bytes: Bytes) -> f64 {
        let (levels, folded) = self.exchanges();
        let hops = levels + 2.0 * folded;
        hops * (Self::seconds(self.delay) + self.sent(bytes.0 as f64))
            + hops * (self.segments(bytes, 1) - 1.0) * self.host.message
            + self.reduced(bytes, levels + folded)
    }

    /// By recursive halving and doubling: of what partners have a half, then a quarter, and back.
    fn halving(&self, bytes: Bytes) -> f64 {
        let (levels, folded) = self.exchanges();
        let part = 1.0 - 0.5_f64.powf(levels);
        let messages = 2.0 * (levels + folded);
        let segments = self.segments(bytes, if folded > 0.0 { 1 } else { 2 });
        messages * (Self::seconds(self.delay) + segments * self.host.message)
            + 2.0 * (part + folded) * bytes.0 as f64 * 8.0 / self.direct_rate.0 as f64
            + self.reduced(bytes, part + folded)
    }

    /// By racks: along the ring of each, between the owners of each part along rings through all racks, and back. Segments are in
    /// different phases at a time, so the narrower of a host's port and the links between racks decides.
    fn hierarchical(&self, bytes: Bytes, racks: RackCosts) -> f64 {
        let segments = self.segments(bytes, 1);
        let (columns, all) = (f64::from(racks.smallest.max(1)), f64::from(racks.racks.max(1)));
        let hops = 2.0 * f64::from(racks.largest.saturating_sub(1));
        let (rounds, crossings) = (hops.min(2.0 * columns), 2.0 * (all - 1.0));
        let sent = |parts: f64, rate: Rate| bytes.0 as f64 * 8.0 / parts / rate.0 as f64;
        let within = rounds * sent(columns, racks.within);
        let across = crossings * sent(columns * all, racks.across);
        let narrowest = across.max(within + crossings * sent(columns * all, racks.within));
        hops * Self::seconds(self.hop_delay)
            + crossings * Self::seconds(self.delay)
            + segments * (rounds + crossings) * self.host.message
            + narrowest.max(narrowest + (within + across - narrowest) / segments)
            + self.reduced(bytes, self.others())
    }

    /// The least time of an AllReduce.
    pub fn fastest(&self, bytes: Bytes) -> f64 {
        self.least(Collective::AllReduce, bytes)
    }

    /// The least time of an AllGather or a ReduceScatter of which so many bytes are at each host.
    pub fn gather(&self, bytes: Bytes) -> f64 {
        self.least(Collective::AllGather, bytes)
    }

    /// Time of an AllToAll of which so many bytes are at each host: with one other host after another.
    pub fn exchange(&self, bytes: Bytes) -> f64 {
        let each = self.sent(bytes.0 as f64 / f64::from(self.hosts.max(1)));
        self.peers() * (Self::seconds(self.delay) + each)
    }

    /// Time of a Broadcast from host to host, in chunks.
    pub fn chain(&self, bytes: Bytes) -> f64 {
        if self.hosts < 2 {
            return 0.0;
        }
        let first = bytes.0.min(self.chunk.0);
        let seconds = |bytes: u64| bytes as f64 * 8.0 / self.ring_rate.0 as f64;
        self.peers() * (Self::seconds(self.hop_delay) + self.host.message + seconds(first))
            + seconds(bytes.0 - first)
    }

    /// Along a binomial tree: the root sends, or is sent, everything in each round.
    fn tree(&self, bytes: Bytes) -> f64 {
        let rounds = self.rounds();
        rounds * (Self::seconds(self.delay) + self.sent(bytes.0 as f64))
            + rounds * (self.segments(bytes, 1) - 1.0) * self.host.message
    }

    /// Time of a Barrier: each round reaches twice as many.
    pub fn barrier(&self) -> f64 {
        self.rounds() * (Self::seconds(self.delay) + self.host.message)
    }

    /// Predicted time of an operation in seconds, by an algorithm that its collective can take.
    pub fn time(&self, collective: Collective, algorithm: Algorithm, bytes: Bytes) -> f64 {
        if self.hosts < 2 {
            return 0.0;
        }
        // Contributions to a tensor are added up by one host, or by each on a chain or tree.
        let added = |part: f64| if collective.reduces() { self.reduced(bytes, part) } else { 0.0 };
        match (collective.traits().pattern, algorithm) {
            (Pattern::ReduceDistribute, Algorithm::OneShot) => self.one_shot(bytes),
            (Pattern::ReduceDistribute, Algorithm::TwoShot) => self.two_shot(bytes),
            (Pattern::ReduceDistribute, Algorithm::RecursiveDoubling) => self.doubling(bytes),
            (Pattern::ReduceDistribute, Algorithm::RecursiveHalving) => self.halving(bytes),
            (Pattern::ReduceDistribute, Algorithm::Hierarchical) => match self.racks {
                Some(racks) => self.hierarchical(bytes, racks),
                None => self.ring(bytes),
            },
            (Pattern::ReduceDistribute, _) => self.ring(bytes),
            (Pattern::Gather, Algorithm::OneShot) => self.two_shot(bytes) / 2.0,
            (Pattern::Gather, _) => self.ring(bytes) / 2.0,
            (Pattern::Chain, Algorithm::OneShot) => {
                Self::seconds(self.delay) + self.peers() * self.sent(bytes.0 as f64) + added(self.peers())
            }
            (Pattern::Chain, Algorithm::BinomialTree) => self.tree(bytes) + added(self.rounds()),
            (Pattern::Chain, _) => self.chain(bytes) + added(1.0),
            (Pattern::Pairwise, _) => self.exchange(bytes),
            (Pattern::Dissemination, Algorithm::OneShot) => {
                Self::seconds(self.delay) + self.peers() * self.host.message
            }
            (Pattern::Dissemination, _) => self.barrier(),
        }
    }

    /// The largest operation that may go so unless an operator says so. Larger ones keep to the links of the ring, whose paths control
    /// plans, and on which it sees cross traffic.
    fn most(&self, collective: Collective, algorithm: Algorithm) -> u64 {
        match algorithm {
            Algorithm::OneShot | Algorithm::TwoShot if !self.straight => 0,
            Algorithm::OneShot if collective.traits().pattern != Pattern::Gather => {
                (MAX_BURST / u64::from(self.hosts.saturating_sub(1).max(1))).min(self.chunk.0)
            }
            _ => MAX_BURST,
        }
    }

    /// The algorithm that is predicted to be the fastest, the ring where it is about as fast, with its time.
    fn best(&self, collective: Collective, bytes: Bytes) -> (Algorithm, f64) {
        let ring = self.time(collective, Algorithm::Ring, bytes);
        let can = |algorithm: &&Algorithm| bytes.0 <= self.most(collective, **algorithm);
        let others = Algorithm::of(collective.traits().pattern).iter().skip(1).filter(can);
        let times = others.map(|algorithm| (*algorithm, self.time(collective, *algorithm, bytes)));
        let pays = |(algorithm, time): &(Algorithm, f64)| {
            let gain = if *algorithm == Algorithm::OneShot { 0.0 } else { MIN_GAIN };
            *time <= ring * (1.0 - gain)
        };
        let best = times.filter(pays).min_by(|one, other| one.1.total_cmp(&other.1));
        best.unwrap_or((Algorithm::Ring, ring))
    }

    fn least(&self, collective: Collective, bytes: Bytes) -> f64 {
        if self.hosts < 2 {
            return 0.0;
        }
        self.best(collective, bytes).1
    }

    /// Returns the algorithm that is predicted to be the fastest at each size. It stays as `current` has it where that is about
    /// the same already.
    pub fn choose(&self, current: &AlgorithmTable) -> AlgorithmTable {
        if self.hosts < 2 || self.direct_rate.0 == 0 || self.ring_rate.0 == 0 {
            return AlgorithmTable::RING;
        }
        if self.hosts == 2 {
            // One shot crosses the links that the ring does, once: rates, and with them who else is there, decide nothing.
            return AlgorithmTable::direct(self.most(Collective::AllReduce, Algorithm::OneShot), 0);
        }
        let ranges = Collective::ALL.iter().flat_map(|&collective| {
            let target = self.ranges(collective);
            let before: Vec<(u64, Algorithm)> =
                ranges_of(current, collective).map(|range| (range.up_to, range.algorithm)).collect();
            let kept = if about_the_same(&target, &before) { before } else { target };
            kept.into_iter().map(move |(up_to, algorithm)| AlgorithmRange { collective, up_to, algorithm })
        });
        AlgorithmTable::new(ranges).unwrap_or_default()
    }

    /// The ranges of sizes of a collective.
    fn ranges(&self, collective: Collective) -> Vec<(u64, Algorithm)> {
        let best = |bytes: u64| self.best(collective, Bytes(bytes)).0;
        if !collective.has_data() {
            return if best(0) == Algorithm::Ring { Vec::new() } else { vec![(u64::MAX, best(0))] };
        }
        let mut ranges = Vec::new();
        let mut from = 1;
        while from <= MAX_BURST {
            let algorithm = best(from);
            let up_to = last_of(from, |bytes| best(bytes) == algorithm);
            ranges.push((up_to, algorithm));
            from = up_to + 1;
        }
        ranges.truncate(MAX_CHOSEN);
        while ranges.last().is_some_and(|(_, algorithm)| *algorithm == Algorithm::Ring) {
            ranges.pop();
        }
        ranges
    }
}

/// The ranges of a collective.
fn ranges_of(table: &AlgorithmTable, collective: Collective) -> impl Iterator<Item = AlgorithmRange> + '_ {
    table.ranges().filter(move |range| range.collective == collective)
}

/// The last size from `first` on, at most [`MAX_BURST`], up to which something holds. It holds at `first`, and is sampled at steps of an
/// eighth.
fn last_of(first: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let mut holding = first;
    loop {
        let next = (holding + (holding / 8).max(1)).min(MAX_BURST);
        if next == holding {
            return holding;
        }
        if holds(next) {
            holding = next;
            continue;
        }
        let mut beyond = next;
        while holding + 1 < beyond {
            let middle = holding + (beyond - holding) / 2;
            if holds(middle) {
                holding = middle;
            } else {
                beyond = middle;
            }
        }
        return holding;
    }
}

/// Whether two lists of ranges have the same algorithms, about as far.
fn about_the_same(target: &[(u64, Algorithm)], current: &[(u64, Algorithm)]) -> bool {
    let near = |((new, by), (old, was)): (&(u64, Algorithm), &(u64, Algorithm))| {
        let (new, old) = (*new as f64, *old as f64);
        by == was && new <= old * (1.0 + HYSTERESIS) && new >= old / (1.0 + HYSTERESIS)
    };
    target.len() == current.len() && target.iter().zip(current).all(near)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring_order::racks;
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
            straight: true,
            host: HostCosts::default(),
            racks: None,
        }
    }

    fn chosen(reach: &GroupCosts, collective: Collective) -> Vec<(u64, Algorithm)> {
        let table = reach.choose(&AlgorithmTable::RING);
        ranges_of(&table, collective).map(|range| (range.up_to, range.algorithm)).collect()
    }

    #[test]
    fn eight_hosts_a_millisecond_apart() {
        let found = chosen(&reach(), Collective::AllReduce);
        // One shot sends 7 S, two 1.75 S and a millisecond more: level at 1.07 ms * 125 MB/s / 5.25.
        let [(one, Algorithm::OneShot), (two, Algorithm::TwoShot)] = found[..] else { panic!("{found:?}") };
        assert!((one as f64 - 25_476.0).abs() < 3.0 && two == MAX_BURST, "{found:?}");
        assert!((reach().ring(Bytes(0)) - 14.14e-3).abs() < 1e-6);
    }

    #[test]
    fn many_hosts_near_each_other_go_by_powers_of_two() {
        let near = Nanos(20_000);
        let reach = GroupCosts { hosts: 32, delay: near, hop_delay: near, ..reach() };
        // 5 exchanges of 30 us, where 31 messages to all take 330.
        assert!(
            (reach.time(Collective::AllReduce, Algorithm::RecursiveDoubling, Bytes(0)) - 150e-6).abs() < 1e-9
        );
        let found = chosen(&reach, Collective::AllReduce);
        let names: Vec<Algorithm> = found.iter().map(|(_, algorithm)| *algorithm).collect();
        assert_eq!(names[..2], [Algorithm::RecursiveDoubling, Algorithm::RecursiveHalving], "{found:?}");
        // Level where what doubling sends beside 2 S takes the other five exchanges: 150 us at 125 MB/s over 3.06.
        assert!((found[0].0 as f64 - 6122.0).abs() < 10.0, "{found:?}");
        for collective in [Collective::Broadcast, Collective::Reduce] {
            assert_eq!(chosen(&reach, collective)[0].1, Algorithm::BinomialTree);
        }
        let many = GroupCosts { hosts: 300, straight: false, ..reach };
        let found = chosen(&many, Collective::AllReduce);
        assert_eq!(found[0].1, Algorithm::RecursiveDoubling, "{found:?}");
        assert!(chosen(&many, Collective::AllGather).is_empty(), "nobody sends to all");
    }

    #[test]
    fn what_adding_costs_moves_sizes() {
        let near = Nanos(20_000);
        let cheap = GroupCosts { hosts: 16, delay: near, hop_delay: near, ..reach() };
        // 4 tensors are added up by doubling, less than one by halving.
        let slow = HostCosts { reduced_byte: 10e-9, ..HostCosts::default() };
        let [cheap, dear] = [cheap, GroupCosts { host: slow, ..cheap }].map(|reach| {
            let found = chosen(&reach, Collective::AllReduce);
            assert_eq!(found[0].1, Algorithm::RecursiveDoubling, "{found:?}");
            found[0].0
        });
        assert!(dear < cheap / 2, "{dear} {cheap}");
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
        let found = GroupCosts { hosts: 2, ..reach() }.choose(&AlgorithmTable::RING);
        assert_eq!(found, AlgorithmTable::direct(64 << 10, 0));
        let none = [GroupCosts { hosts: 1, ..reach() }, GroupCosts { direct_rate: Rate(0), ..reach() }];
        assert_eq!(none.map(|reach| reach.choose(&found)), [AlgorithmTable::RING; 2]);
    }

    #[test]
    fn a_slow_ring_is_left_where_it_pays_again() {
        let (delay, hop) = (Nanos(7_716_621), Nanos(696_563));
        let far = GroupCosts {
            hosts: 11,
            delay,
            hop_delay: hop,
            direct_rate: Rate(30_299_156_556),
            ring_rate: Rate(1_749_143_609),
            ..reach()
        };
        let found = chosen(&far, Collective::AllReduce);
        let names: Vec<Algorithm> = found.iter().map(|(_, algorithm)| *algorithm).collect();
        assert_eq!(names, [Algorithm::OneShot, Algorithm::Ring, Algorithm::TwoShot], "{found:?}");
    }

    #[test]
    fn a_narrow_fabric_keeps_to_the_ring_sooner() {
        let near = Nanos(20_000);
        let wide = GroupCosts { delay: near, hop_delay: near, ..reach() };
        let narrow = GroupCosts { direct_rate: Rate(250_000_000), ..wide };
        let last =
            |reach: &GroupCosts| chosen(reach, Collective::AllReduce).last().map_or(0, |range| range.0);
        assert!(last(&narrow) < last(&wide), "{} {}", last(&narrow), last(&wide));
    }

    /// Two racks of six whose uplinks carry half of what a host sends. Within a rack all is as wide as hosts are. From rack to rack
    /// goes as much as the tensor has, where a ring sends eleven sixths of it.
    #[test]
    fn a_narrow_spine_is_crossed_by_racks() {
        let choose = |uplink| {
            let (topology, ring) = crate::all_to_all::tests::racks(6, uplink);
            let (conditions, others) = (Conditions::clear(&topology), BTreeMap::new());
            let found = racks(&topology, &ring);
            assert_eq!(found, Racks { sizes: vec![6, 6], from: 0 });
            let racks = RackCosts::new(&topology, &conditions, &ring, &found, &others).unwrap();
            let (delay, hop_delay) = delays(&topology, &ring);
            let usage = crate::all_to_all::exchange_usage(&topology, &ring);
            let direct_rate = exchange_rate(&usage, &conditions, &others);
            let ring_rate = Rate((racks.across.0 * 6).min(1_000_000_000));
            let racks = Some(racks);
            GroupCosts { hosts: 12, delay, hop_delay, direct_rate, ring_rate, racks, ..reach() }
        };
        let narrow = choose("500Mbit/s");
        let racks = narrow.racks.unwrap();
        assert_eq!((racks.racks, racks.largest, racks.smallest), (2, 6, 6));
        assert!((racks.within.0 as f64 / 1e9 - 1.0).abs() < 1e-6, "{racks:?}");
        assert!((racks.across.0 as f64 / 1e9 - 0.5 / 6.0).abs() < 1e-6, "{racks:?}");
        let by_racks = |costs: &GroupCosts| {
            let chosen = chosen(costs, Collective::AllReduce);
            chosen
                .iter()
                .filter(|(_, algorithm)| *algorithm == Algorithm::Hierarchical)
                .map(|(up_to, _)| *up_to)
                .max()
        };
        assert_eq!(by_racks(&narrow), Some(MAX_BURST));
        assert_eq!(by_racks(&GroupCosts { racks: None, ..narrow }), None);
        assert_eq!(by_racks(&choose("6Gbit/s")), None);
        // Large ones would take little more than what the links between racks take.
        let bytes = Bytes(64 << 20);
        let bound = 2.0 * bytes.0 as f64 * 8.0 / 12.0 / racks.across.0 as f64;
        let share = bound / narrow.time(Collective::AllReduce, Algorithm::Hierarchical, bytes);
        assert!(share > 0.85 && share <= 1.0, "{share}");
    }

    #[test]
    fn ring_hops_can_be_shorter_than_farthest_pair() {
        let (topology, ring) = crate::all_to_all::tests::racks(2, "1Gbit/s");
        let (farthest, hop) = delays(&topology, &ring);
        // Two racks of two: 50 us a link, four links between racks, two within.
        assert_eq!((farthest, hop), (Nanos(200_000), Nanos(150_000)));
        assert_eq!(delays(&topology, &ring[..1]), (Nanos(0), Nanos(0)));
    }

    #[test]
    fn hosts_that_are_gone_count_for_no_delay() {
        // A leaf for each host: of so many groups one is looked at.
        let leaves = |count: usize| {
            let mut text = "[[switch]]\nname = \"spine\"\n".to_owned();
            for at in 0..count {
                text += &format!("[[switch]]\nname = \"s{at}\"\n[[host]]\nname = \"h{at}\"\n");
                for ends in [format!("from = \"h{at}\""), "from = \"spine\"".to_owned()] {
                    text +=
                        &format!("[[link]]\n{ends}\nto = \"s{at}\"\nrate = \"1Gbit/s\"\ndelay = \"50us\"\n");
                }
            }
            Topology::parse(&text).unwrap()
        };
        let before = leaves(MAX_GROUPS + 2);
        let now = leaves(MAX_GROUPS + 1).numbered_as(&before);
        assert_eq!([max_delay(&before), max_delay(&now)], [Nanos(400_000); 2]);
    }

    proptest! {
        #[test]
        fn chosen_algorithm_is_the_fastest(
            hosts in 3_u32..64,
            delay in 0_u64..10_000_000,
            hop in 0_u64..10_000_000,
            direct in 1_000_000_u64..400_000_000_000,
            ring in 1_000_000_u64..400_000_000_000,
            collective in prop::sample::select(Collective::ALL),
            bytes in 1_u64..4_000_000,
            racks in prop::option::of((2_u32..9, 1_u32..9, 1_000_000_u64..400_000_000_000)),
        ) {
            let (delay, hop, direct, ring) = (Nanos(delay), Nanos(hop), Rate(direct), Rate(ring));
            let racks = racks.map(|(racks, smallest, rate)| {
                let (largest, within, across) = (smallest + 1, Rate(rate), Rate(rate / 2));
                RackCosts { racks, largest, smallest, within, across }
            });
            let reach = GroupCosts { hosts, delay, hop_delay: hop, direct_rate: direct, ring_rate: ring, racks, ..reach() };
            let found = reach.choose(&AlgorithmTable::RING);
            prop_assert_eq!(reach.choose(&found), found, "it stays");
            let bytes = if collective.has_data() { bytes } else { 0 };
            let taken = found.choose(collective, bytes);
            prop_assert!(bytes <= reach.most(collective, taken) || taken == Algorithm::Ring);
            let time = |algorithm: &Algorithm| reach.time(collective, *algorithm, Bytes(bytes));
            prop_assert!(taken == Algorithm::Ring || time(&taken) <= time(&Algorithm::Ring) * 1.05);
            for other in Algorithm::of(collective.traits().pattern) {
                let can = bytes <= reach.most(collective, *other) && ranges_of(&found, collective).count() < MAX_CHOSEN;
                // Between the steps at which it is looked, as good as alike.
                let better = time(other) < time(&taken).min(time(&Algorithm::Ring) * (1.0 - MIN_GAIN)) * 0.9;
                prop_assert!(!can || !better, "{:?} {:?}: {} not {}", reach, found, taken, other);
            }
        }

        #[test]
        fn small_changes_keep_sizes(one in 1_u64..1_000_000, by in 0.81_f64..1.24) {
            let near = (one as f64 * by).round().max(1.0) as u64;
            prop_assume!(near as f64 <= one as f64 * 1.25 && near as f64 >= one as f64 / 1.25);
            let of = |size: u64| [(size, Algorithm::OneShot)];
            prop_assert!(about_the_same(&of(near), &of(one)));
            prop_assert!(!about_the_same(&of(one * 2), &of(one)));
            prop_assert!(!about_the_same(&of(one), &[(one, Algorithm::TwoShot)]));
            prop_assert!(!about_the_same(&of(one), &[]));
        }
    }
}
