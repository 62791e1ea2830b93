//! Whether a group of hosts does better with aggregators on the path, and with which. There may be several, of which one is above the
//! others. It also finds the size of operations from which on it does.
//!
//! By an aggregator each host sends and receives an operation's bytes once; in a ring of n hosts it sends 2(n-1)/n of them over
//! 2(n-1) steps, or, directly, to all at once. What an aggregator carries for each host is the least of what the hosts' ways to its
//! switch carry, its link, and its core, each shared by all hosts and by the communicators that it serves.

use crate::algorithm::MESSAGE_OVERHEAD;
use crate::conditions::Conditions;
use ecmp::EcmpRoutes;
use harmonaize_topology::DirectedLink;
use harmonaize_topology::{AggregatorId, HostId, Node, Topology};
use harmonaize_units::{Bytes, Nanos, Rate};
use std::collections::BTreeMap;

mod ecmp;
mod reason;
mod tree;

pub use reason::{AggregationReason, AggregationTimes, Drawback};
pub use tree::LeafAggregator;

/// Bytes of a packet beside its payload: Ethernet with its gap, IP, UDP, and the aggregation's own header.
const HEADER_BYTES: f64 = 38.0 + 28.0 + 80.0;
/// What it must gain: a tenth of the time.
const MAX_TIME_RATIO: f64 = 0.9;
/// Sizes that are looked at: powers of two, 1 KiB to 256 MiB.
const SIZE_EXPONENTS: std::ops::RangeInclusive<u32> = 10..=28;
/// The size of which the reason speaks, if nothing is known of operations.
const TYPICAL_BYTES: u64 = 64 << 20;

/// An aggregator that could be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AggregatorOffer {
    /// Which.
    pub aggregator: AggregatorId,
    /// Payload of a packet.
    pub payload: Bytes,
    /// Bytes of a tensor that it stands for: more than its payload where tensors go in codes.
    pub tensor_bytes: Bytes,
    /// Of a tensor, what a host's codes allow in a second; 0 where there are none.
    pub codec_rate: Rate,
    /// Packets in, and as many out, that it does in a second; 0 where that is not known.
    pub packets_per_second: u64,
    /// Communicators that it serves beside this one.
    pub other_communicators: u32,
    /// Whether its sums can go on to an aggregator above, which takes all of the group's agents too.
    pub supports_parents: bool,
}

/// How an aggregator would serve a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AggregationPlan {
    /// Which; of several the one above the others.
    pub aggregator: AggregatorId,
    /// Those below it, each with some of the hosts; all others send to the one above.
    pub leaves: Vec<LeafAggregator>,
    /// Whether tensors go in codes.
    pub coded: bool,
    /// Payload that each host can send, and receive, in a second.
    pub rate: Rate,
    /// The same where aggregators serve no other communicator at the moment.
    pub exclusive_rate: Rate,
    /// One way between the farthest host and it, by one below if there is one on the way.
    pub delay: Nanos,
    /// Operations of so many bytes and more are faster by it.
    pub min_bytes: Bytes,
    /// Broadcasts of at least, and at most, so many bytes are.
    pub broadcasts: Option<[Bytes; 2]>,
    /// Barriers are.
    pub barriers: bool,
}

/// What was decided for a group, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AggregationDecision {
    /// The best aggregator; none where none is worth it.
    pub plan: Option<AggregationPlan>,
    /// Why.
    pub reason: AggregationReason,
}

/// Decides on aggregation for a group of hosts whose ring carries `ring` from each to the next.
/// They can have so much of a tensor summed in a second by codes of their own (`coded`; 0: they have none). Operations have
/// `operation` bytes (0: not known). Cost: the hosts times the switches for each offer.
pub fn decide_aggregation(
    topology: &Topology,
    conditions: &Conditions,
    hosts: &[HostId],
    (ring, coded): (Rate, Rate),
    operation: Bytes,
    offers: &[AggregatorOffer],
) -> AggregationDecision {
    let none = |reason: AggregationReason| AggregationDecision { plan: None, reason };
    if hosts.len() < 2 {
        return none(AggregationReason::OneHost);
    }
    if offers.is_empty() {
        return none(AggregationReason::NoOffer);
    }
    if ring.0 == 0 {
        return none(AggregationReason::NothingPasses);
    }
    let size = if operation.0 == 0 { TYPICAL_BYTES } else { operation.0 };
    let by_hosts = |way: &AggregatorPath| HostCosts {
        count: hosts.len() as f64,
        rate: bytes_per_second(ring),
        coded: bytes_per_second(coded),
        delay: way.max_host_delay,
    };
    let mut best: Option<Candidate> = None;
    let mut refused = Vec::new();
    for offer in offers {
        let Some(name) = topology.aggregators().get(offer.aggregator.0).map(aggregator_name(topology)) else {
            continue;
        };
        let Some(way) = AggregatorPath::to(topology, conditions, hosts, offer) else {
            refused.push(Drawback::Unreachable(name));
            continue;
        };
        let coded = offer.tensor_bytes > offer.payload;
        let candidate =
            Candidate { root: offer.aggregator, leaves: Vec::new(), coded, path: way, size, name };
        if !candidate.is_ever_faster(&by_hosts(&candidate.path)) {
            refused.push(Drawback::Slower(candidate.times(&by_hosts(&candidate.path))));
        } else if best.as_ref().is_none_or(|best| candidate.time() < best.time()) {
            best = Some(candidate);
        }
    }
    if let Some((root, leaves, way)) = tree::best_tree(topology, conditions, hosts, offers, size as f64) {
        let of = |id: AggregatorId| {
            topology.aggregators().get(id.0).map(aggregator_name(topology)).unwrap_or_default()
        };
        let below: Vec<String> = leaves.iter().map(|leaf| of(leaf.aggregator)).collect();
        let name = format!("{} above {}", of(root), below.join(", "));
        let candidate = Candidate { root, leaves, coded: false, path: way, size, name };
        // Several machines' memory and one way more are worth what one aggregator is to the hosts.
        let most = best.as_ref().map_or(f64::INFINITY, |best| MAX_TIME_RATIO * best.time());
        if candidate.time() < most && candidate.is_ever_faster(&by_hosts(&candidate.path)) {
            best = Some(candidate);
        } else if best.is_none() {
            refused.push(Drawback::Slower(candidate.times(&by_hosts(&candidate.path))));
        }
    }
    match best {
        Some(candidate) => {
            let idle: Vec<AggregatorOffer> = offers
                .iter()
                .map(|offer| AggregatorOffer { other_communicators: 0, ..offer.clone() })
                .collect();
            let alone = candidate.exclusive_rate(topology, conditions, hosts, &idle);
            let hosts = by_hosts(&candidate.path);
            candidate.into_decision(&hosts, alone)
        }
        None => none(AggregationReason::NoneFaster(refused)),
    }
}

/// One aggregator, or several, for operations of `size` bytes.
struct Candidate {
    root: AggregatorId,
    leaves: Vec<LeafAggregator>,
    coded: bool,
    path: AggregatorPath,
    size: u64,
    name: String,
}

impl Candidate {
    fn time(&self) -> f64 {
        self.path.time(self.size as f64)
    }

    fn is_faster(&self, hosts: &HostCosts, size: u64) -> bool {
        self.path.time(size as f64) < MAX_TIME_RATIO * hosts.time(size as f64)
    }

    /// Whether the largest operations are faster.
    fn is_ever_faster(&self, hosts: &HostCosts) -> bool {
        self.is_faster(hosts, 1 << SIZE_EXPONENTS.end())
    }

    fn times(&self, hosts: &HostCosts) -> AggregationTimes {
        AggregationTimes {
            bytes: Bytes(self.size),
            coded: self.coded,
            aggregator: self.name.clone(),
            aggregated: Nanos((self.time() * 1e9) as u64),
            by_hosts: Nanos((hosts.time(self.size as f64) * 1e9) as u64),
        }
    }

    /// Its rate where aggregators, of these offers, serve no others: of one the same, of several the best.
    fn exclusive_rate(
        &self,
        topology: &Topology,
        conditions: &Conditions,
        hosts: &[HostId],
        idle: &[AggregatorOffer],
    ) -> f64 {
        let way = if self.leaves.is_empty() {
            let same = |offer: &&AggregatorOffer| {
                offer.aggregator == self.root && (offer.tensor_bytes > offer.payload) == self.coded
            };
            idle.iter().find(same).and_then(|offer| AggregatorPath::to(topology, conditions, hosts, offer))
        } else {
            tree::best_tree(topology, conditions, hosts, idle, self.size as f64).map(|(_, _, way)| way)
        };
        way.map_or(self.path.rate, |way| way.rate.max(self.path.rate))
    }

    fn into_decision(self, hosts: &HostCosts, alone: f64) -> AggregationDecision {
        // From the largest size down, as far as it pays.
        let sizes = SIZE_EXPONENTS.rev().map(|power| 1_u64 << power);
        let least = sizes.take_while(|size| self.is_faster(hosts, *size)).last();
        let times = self.times(hosts);
        let Some(least) = least.map(Bytes) else {
            let reason = AggregationReason::NoneFaster(vec![Drawback::Slower(times)]);
            return AggregationDecision { plan: None, reason };
        };
        let single = self.leaves.is_empty();
        let aggregated = AggregationPlan {
            aggregator: self.root,
            coded: self.coded,
            rate: Rate((self.path.rate * 8.0) as u64),
            exclusive_rate: Rate((alone * 8.0) as u64),
            delay: Nanos((self.path.delay * 1e9) as u64),
            min_bytes: least,
            // Sums alone go through several.
            broadcasts: self.path.broadcasts(hosts).filter(|_| single),
            barriers: single && self.path.barriers(hosts),
            leaves: self.leaves,
        };
        AggregationDecision { plan: Some(aggregated), reason: AggregationReason::Faster(times, least) }
    }
}

fn aggregator_name(topology: &Topology) -> impl Fn(&crate::Aggregator) -> String {
    |aggregator| format!("{} at {}", aggregator.name, topology.node_name(Node::Switch(aggregator.switch)))
}

fn bytes_per_second(rate: Rate) -> f64 {
    rate.0 as f64 / 8.0
}

fn seconds(delay: Nanos) -> f64 {
    delay.0 as f64 / 1e9
}

/// What hosts do among themselves; bytes and seconds.
struct HostCosts {
    count: f64,
    rate: f64,
    /// Of a tensor, by codes of their own; 0 where they have none.
    coded: f64,
    /// One way between two of them.
    delay: f64,
}

impl HostCosts {
    /// The fastest of a ring, of sending directly in two steps or in one, and of their codes.
    fn time(&self, size: f64) -> f64 {
        let Self { count, rate, coded, delay } = *self;
        let shared = 2.0 * (count - 1.0) / count * size / rate;
        let ring = shared + 2.0 * (count - 1.0) * delay;
        let two = shared + 2.0 * delay;
        let one = (count - 1.0) * size / rate + delay;
        let coded = if coded > 0.0 { size / coded + 2.0 * delay } else { f64::INFINITY };
        ring.min(two).min(one).min(coded)
    }

    /// The faster of a chain, down which pieces follow one another, and of sending to all at once.
    fn broadcast(&self, size: f64) -> f64 {
        let Self { count, rate, delay, .. } = *self;
        let chain = size / rate + (count - 1.0) * (delay + MESSAGE_OVERHEAD);
        chain.min((count - 1.0) * (size / rate + MESSAGE_OVERHEAD) + delay)
    }

    /// The time of the faster of two barriers. One notifies all at once; the other notifies one more in each of as many rounds as
    /// double up to all.
    fn barrier(&self) -> f64 {
        let Self { count, delay, .. } = *self;
        (delay + (count - 1.0) * MESSAGE_OVERHEAD).min(count.log2().ceil() * (delay + MESSAGE_OVERHEAD))
    }
}

/// The hosts' ways to an aggregator; bytes and seconds.
struct AggregatorPath {
    /// Payload a second and host.
    rate: f64,
    /// Of a tensor, what a host brings through in a second.
    tensor_rate: f64,
    delay: f64,
    /// What a packet takes of its core.
    packet_time: f64,
    /// One way between the two hosts that are farthest from each other, at most.
    max_host_delay: f64,
}

impl AggregatorPath {
    /// None where a host has no way of open links.
    fn to(
        topology: &Topology,
        conditions: &Conditions,
        hosts: &[HostId],
        offer: &AggregatorOffer,
    ) -> Option<Self> {
        let aggregator = topology.aggregators().get(offer.aggregator.0)?;
        let spread = EcmpRoutes::new(topology, conditions, aggregator.switch);
        let mut loads: BTreeMap<DirectedLink, f64> = BTreeMap::new();
        let mut farthest = 0.0_f64;
        for host in hosts {
            farthest = farthest.max(spread.add_load(Node::Host(*host), &mut loads)?);
        }
        let (count, takers) = (hosts.len() as f64, 1.0 + f64::from(offer.other_communicators));
        let payload = offer.payload.0.max(1) as f64;
        let goes = payload / (payload + HEADER_BYTES);
        // Sums go the same ways back.
        let links = loads.iter().map(|(link, load)| {
            let both = [*link, link.reversed()].map(|link| conditions.available(link));
            both.into_iter().map(bytes_per_second).fold(f64::INFINITY, f64::min) * goes / load
        });
        let link = bytes_per_second(aggregator.rate) * goes / (count * takers);
        let core = match offer.packets_per_second {
            0 => f64::INFINITY,
            packets => packets as f64 * payload / (count * takers),
        };
        let rate = links.fold(link.min(core), f64::min);
        let delay = farthest + seconds(aggregator.delay);
        let coder = if offer.codec_rate.0 == 0 { f64::INFINITY } else { bytes_per_second(offer.codec_rate) };
        let tensor = (rate * offer.tensor_bytes.0 as f64 / payload).min(coder);
        let packet = match offer.packets_per_second {
            0 => 0.0,
            packets => takers / packets as f64,
        };
        (rate > 1.0).then_some(Self {
            rate,
            tensor_rate: tensor,
            delay,
            packet_time: packet,
            max_host_delay: 2.0 * farthest,
        })
    }

    fn time(&self, size: f64) -> f64 {
        size / self.tensor_rate + 2.0 * self.delay
    }

    /// Sizes of broadcasts that are faster this way: from the least up as far as they are.
    fn broadcasts(&self, hosts: &HostCosts) -> Option<[Bytes; 2]> {
        let time = |size: f64| size / self.rate + 2.0 * (self.delay + MESSAGE_OVERHEAD);
        let pays = |size: &u64| time(*size as f64) < MAX_TIME_RATIO * hosts.broadcast(*size as f64);
        let sizes = SIZE_EXPONENTS.map(|power| 1_u64 << power);
        let mut sizes = sizes.skip_while(|size| !pays(size)).take_while(pays);
        let least = sizes.next()?;
        let most = sizes.last().unwrap_or(least);
        // What is smaller than all that is looked at is like the least of it.
        Some([Bytes(if least == 1 << SIZE_EXPONENTS.start() { 1 } else { least }), Bytes(most)])
    }

    fn barriers(&self, hosts: &HostCosts) -> bool {
        2.0 * (self.delay + MESSAGE_OVERHEAD) + hosts.count * self.packet_time
            < MAX_TIME_RATIO * hosts.barrier()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conditions::LinkUse;
    use harmonaize_topology::text::{host, link, star_text, switch};

    fn star(hosts: usize, delay: &str, aggregator: &str) -> Topology {
        let mut text = star_text(hosts, "1Gbit/s", delay);
        text += &format!("[[aggregator]]\nname = \"agg0\"\nswitch = \"s0\"\nrate = \"{aggregator}\"\n");
        Topology::parse(&text).unwrap()
    }

    fn offer(packets_per_second: u64) -> AggregatorOffer {
        let (aggregator, payload, coder) = (AggregatorId(0), Bytes(8192), Rate(0));
        AggregatorOffer {
            aggregator,
            payload,
            tensor_bytes: payload,
            codec_rate: coder,
            packets_per_second,
            other_communicators: 0,
            supports_parents: true,
        }
    }

    fn decide(topology: &Topology, conditions: &Conditions, offer: AggregatorOffer) -> AggregationDecision {
        let hosts: Vec<HostId> = (0..topology.hosts().len()).map(HostId).collect();
        decide_aggregation(topology, conditions, &hosts, (Rate(1_000_000_000), Rate(0)), Bytes(0), &[offer])
    }

    #[test]
    fn wide_aggregator_serves_large_operations_at_bound_rates() {
        for hosts in [4, 8] {
            let topology = star(hosts, "50us", "8Gbit/s");
            let decided = decide(&topology, &Conditions::clear(&topology), offer(0));
            let chosen = decided.plan.unwrap();
            let goes = 8192.0 / (8192.0 + HEADER_BYTES);
            assert!((chosen.rate.0 as f64 / 1e9 - goes).abs() < 1e-3, "{chosen:?}");
            assert_eq!(chosen.delay, Nanos(50_000));
            let by_hosts = HostCosts { count: hosts as f64, rate: 125e6, coded: 0.0, delay: 1e-4 };
            let least = chosen.min_bytes.0 as f64;
            let here = |size: f64| size / bytes_per_second(chosen.rate) + 1e-4;
            assert!(here(least) < MAX_TIME_RATIO * by_hosts.time(least));
            assert!(here(least / 2.0) >= MAX_TIME_RATIO * by_hosts.time(least / 2.0) || least <= 1024.0);
            let named = matches!(
                &decided.reason,
                AggregationReason::Faster(times, from) if times.aggregator == "agg0 at s0" && *from == chosen.min_bytes
            );
            assert!(named, "{}", decided.reason);
        }
    }

    #[test]
    fn broadcasts_and_barriers_aggregate_when_faster() {
        let decide_for = |hosts: usize| {
            let topology = star(hosts, "500us", &format!("{hosts}Gbit/s"));
            decide(&topology, &Conditions::clear(&topology), offer(0)).plan.unwrap()
        };
        let eight = decide_for(8);
        let [least, most] = eight.broadcasts.unwrap();
        // A small one takes the hosts one way, and this way two halves of it.
        assert!(least.0 > 1024 && least.0 <= 4096, "{least}");
        assert!((1 << 20..64 << 20).contains(&most.0), "a chain's delay is nothing to a large one: {most}");
        assert!(!eight.barriers, "hosts tell all in one way");
        assert!(decide_for(64).barriers, "63 messages take longer than a way");
    }

    #[test]
    fn slow_or_shared_aggregator_is_not_used() {
        let wide = star(4, "50us", "4Gbit/s");
        let clear = Conditions::clear(&wide);
        assert!(decide(&wide, &clear, offer(0)).plan.is_some());
        assert_eq!(decide(&wide, &clear, offer(20_000)).plan, None, "20,000 packets a second");
        assert_eq!(decide(&wide, &clear, AggregatorOffer { other_communicators: 3, ..offer(0) }).plan, None);
        // Of a wider link others take a part, as long as they have something to sum.
        let wider = star(4, "50us", "16Gbit/s");
        let beside = |others| {
            let offer = AggregatorOffer { other_communicators: others, ..offer(0) };
            decide(&wider, &Conditions::clear(&wider), offer).plan.unwrap()
        };
        assert_eq!((beside(0).rate, beside(0).exclusive_rate), (beside(3).rate, beside(3).exclusive_rate));
        assert!(beside(4).rate < beside(0).rate && beside(4).exclusive_rate == beside(0).exclusive_rate);
        let narrow = star(4, "50us", "1Gbit/s");
        let decided = decide(&narrow, &Conditions::clear(&narrow), offer(0));
        let slower = matches!(
            &decided.reason,
            AggregationReason::NoneFaster(all) if matches!(all.as_slice(), [Drawback::Slower(_), ..])
        );
        assert!(decided.plan.is_none() && slower, "{}", decided.reason);
        let two = star(2, "50us", "2Gbit/s");
        assert_eq!(decide(&two, &Conditions::clear(&two), offer(0)).plan, None, "two hosts gain nothing");
    }

    #[test]
    fn missing_paths_and_aggregators_are_reported() {
        let topology = star(4, "50us", "4Gbit/s");
        let mut conditions = Conditions::clear(&topology);
        conditions.restrict(crate::LinkId(2), LinkUse::Failed);
        let decided = decide(&topology, &conditions, offer(0));
        let unreachable = Drawback::Unreachable("agg0 at s0".to_owned());
        assert_eq!(decided.reason, AggregationReason::NoneFaster(vec![unreachable.clone()]));
        let two = AggregationReason::NoneFaster(vec![unreachable; 2]).to_string();
        let one = "not all hosts reach agg0 at s0 over open links";
        assert_eq!(two, format!("{one}; {one}"));
        let hosts = [HostId(0), HostId(1), HostId(3)];
        let all = |hosts: &[HostId], offers: &[AggregatorOffer]| {
            decide_aggregation(
                &topology,
                &conditions,
                hosts,
                (Rate(1_000_000_000), Rate(0)),
                Bytes(0),
                offers,
            )
        };
        assert!(all(&hosts, &[offer(0)]).plan.is_some(), "who is not there counts for nothing");
        assert_eq!(all(&hosts, &[]).reason, AggregationReason::NoOffer);
        assert_eq!(all(&hosts[..1], &[offer(0)]).reason, AggregationReason::OneHost);
    }

    #[test]
    fn racks_share_uplinks_and_spread_over_spines() {
        let mut text = ["spine0", "spine1", "leaf0", "leaf1"].map(switch).concat();
        for (leaf, spine) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            text += &link(format!("leaf{leaf}"), format!("spine{spine}"), "1Gbit/s", "10us");
        }
        text += &(0..8).map(|at| host(at, format!("leaf{}", at / 4), "1Gbit/s", "0us")).collect::<String>();
        text += "[[aggregator]]\nname = \"agg0\"\nswitch = \"leaf0\"\nrate = \"8Gbit/s\"\n";
        let topology = Topology::parse(&text).unwrap();
        let conditions = Conditions::clear(&topology);
        let hosts: Vec<HostId> = (0..8).map(HostId).collect();
        let way = AggregatorPath::to(&topology, &conditions, &hosts, &offer(0)).unwrap();
        // Four hosts of the other rack over two uplinks of 1 Gbit/s each.
        let goes = 8192.0 / (8192.0 + HEADER_BYTES);
        assert!((way.rate - 0.5 * 125e6 * goes).abs() < 1.0, "{}", way.rate);
        assert!((way.delay - 20e-6).abs() < 1e-9);
        let mut closed = conditions.clone();
        closed.restrict(crate::LinkId(0), LinkUse::Failed);
        let way = AggregatorPath::to(&topology, &closed, &hosts, &offer(0)).unwrap();
        assert!((way.rate - 0.25 * 125e6 * goes).abs() < 1.0, "one uplink is left: {}", way.rate);
    }
}
