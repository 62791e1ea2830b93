//! Whether a group of hosts does better with an aggregator on the way, or with several of which one is above the others, with which, and
//! from which size of operation on.
//!
//! By an aggregator each host sends and receives an operation's bytes once; in a ring of n hosts it sends 2(n-1)/n of them over
//! 2(n-1) steps, or, directly, to all at once. What an aggregator carries for each host is the least of what the hosts' ways to its
//! switch carry, its link, and its core, each shared by all hosts and by the communicators that it serves.

use crate::conditions::Conditions;
use crate::direct::MESSAGE;
use crate::path::DirectedLink;
use crate::topology::{AggregatorId, HostId, Node, Topology};
use crate::units::{Bytes, Nanos, Rate};
use spread::Spread;
use std::collections::BTreeMap;

mod spread;
mod tree;

pub use tree::Leaf;

/// Bytes of a packet beside its payload: Ethernet with its gap, IP, UDP, and the aggregation's own header.
const HEADERS: f64 = 38.0 + 28.0 + 80.0;
/// What it must gain: a tenth of the time.
const GAIN: f64 = 0.9;
/// Sizes that are looked at: powers of two, 1 KiB to 256 MiB.
const SIZES: std::ops::RangeInclusive<u32> = 10..=28;
/// The size of which the reason speaks, if nothing is known of operations.
const TYPICAL: u64 = 64 << 20;

/// An aggregator that could be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Which.
    pub aggregator: AggregatorId,
    /// Payload of a packet.
    pub payload: Bytes,
    /// Bytes of a tensor that it stands for: more than its payload where tensors go in codes.
    pub carries: Bytes,
    /// Of a tensor, what a host's codes allow in a second; 0 where there are none.
    pub coder: Rate,
    /// Packets in, and as many out, that it does in a second; 0 where that is not known.
    pub packets_per_second: u64,
    /// Communicators that it serves beside this one.
    pub others: u32,
    /// Whether its sums can go on to an aggregator above, which takes all of the group's agents too.
    pub parents: bool,
}

/// How an aggregator would serve a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aggregated {
    /// Which; of several the one above the others.
    pub aggregator: AggregatorId,
    /// Those below it, each with some of the hosts; all others send to the one above.
    pub leaves: Vec<Leaf>,
    /// Whether tensors go in codes.
    pub coded: bool,
    /// Payload that each host can send, and receive, in a second.
    pub rate: Rate,
    /// The same where aggregators serve no other communicator at the moment.
    pub alone: Rate,
    /// One way between the farthest host and it, by one below if there is one on the way.
    pub delay: Nanos,
    /// Operations of so many bytes and more are faster by it.
    pub least: Bytes,
    /// Broadcasts of at least, and at most, so many bytes are.
    pub broadcasts: Option<[Bytes; 2]>,
    /// Barriers are.
    pub barriers: bool,
}

/// What was decided for a group, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aggregation {
    /// The best aggregator; none where none is worth it.
    pub chosen: Option<Aggregated>,
    /// In words.
    pub reason: String,
}

/// Decides for a group of hosts whose ring carries `ring` from each to the next, who can have so much of a tensor summed in a second by
/// codes of their own (`coded`; 0: they have none), and where operations have `operation` bytes (0: not known). Cost: the hosts times the switches for each offer.
pub fn aggregation(
    topology: &Topology,
    conditions: &Conditions,
    hosts: &[HostId],
    (ring, coded): (Rate, Rate),
    operation: Bytes,
    offers: &[Offer],
) -> Aggregation {
    let none = |reason: String| Aggregation { chosen: None, reason };
    if hosts.len() < 2 {
        return none("nothing crosses a wire".to_owned());
    }
    if offers.is_empty() {
        return none("no aggregator is there".to_owned());
    }
    if ring.0 == 0 {
        return none("nothing passes now".to_owned());
    }
    let size = if operation.0 == 0 { TYPICAL } else { operation.0 };
    let by_hosts = |way: &Way| Hosts {
        count: hosts.len() as f64,
        rate: bytes(ring),
        coded: bytes(coded),
        delay: way.between,
    };
    let mut best: Option<Candidate> = None;
    let mut refused = Vec::new();
    for offer in offers {
        let Some(name) = topology.aggregators().get(offer.aggregator.0).map(named(topology)) else {
            continue;
        };
        let Some(way) = Way::to(topology, conditions, hosts, offer) else {
            refused.push(format!("not all hosts reach {name} over open links"));
            continue;
        };
        let coded = offer.carries > offer.payload;
        let candidate = Candidate { root: offer.aggregator, leaves: Vec::new(), coded, way, size, name };
        if !candidate.pays_at_all(&by_hosts(&candidate.way)) {
            refused.push(candidate.words(&by_hosts(&candidate.way)));
        } else if best.as_ref().is_none_or(|best| candidate.time() < best.time()) {
            best = Some(candidate);
        }
    }
    if let Some((root, leaves, way)) = tree::best(topology, conditions, hosts, offers, size as f64) {
        let of = |id: AggregatorId| topology.aggregators().get(id.0).map(named(topology)).unwrap_or_default();
        let below: Vec<String> = leaves.iter().map(|leaf| of(leaf.aggregator)).collect();
        let name = format!("{} above {}", of(root), below.join(", "));
        let candidate = Candidate { root, leaves, coded: false, way, size, name };
        // Several machines' memory and one way more are worth what one aggregator is to the hosts.
        let most = best.as_ref().map_or(f64::INFINITY, |best| GAIN * best.time());
        if candidate.time() < most && candidate.pays_at_all(&by_hosts(&candidate.way)) {
            best = Some(candidate);
        } else if best.is_none() {
            refused.push(candidate.words(&by_hosts(&candidate.way)));
        }
    }
    match best {
        Some(candidate) => {
            let idle: Vec<Offer> = offers.iter().map(|offer| Offer { others: 0, ..offer.clone() }).collect();
            let alone = candidate.alone(topology, conditions, hosts, &idle);
            let hosts = by_hosts(&candidate.way);
            candidate.decided(&hosts, alone)
        }
        None => none(refused.join("; ")),
    }
}

/// One aggregator, or several, for operations of `size` bytes.
struct Candidate {
    root: AggregatorId,
    leaves: Vec<Leaf>,
    coded: bool,
    way: Way,
    size: u64,
    name: String,
}

impl Candidate {
    fn time(&self) -> f64 {
        self.way.time(self.size as f64)
    }

    fn pays(&self, hosts: &Hosts, size: u64) -> bool {
        self.way.time(size as f64) < GAIN * hosts.time(size as f64)
    }

    /// Whether the largest operations are faster.
    fn pays_at_all(&self, hosts: &Hosts) -> bool {
        self.pays(hosts, 1 << SIZES.end())
    }

    fn words(&self, hosts: &Hosts) -> String {
        format!(
            "{}{} in {} by {}, {} by the hosts",
            Bytes(self.size),
            if self.coded { " in codes that add" } else { "" },
            Nanos((self.time() * 1e9) as u64),
            self.name,
            Nanos((hosts.time(self.size as f64) * 1e9) as u64)
        )
    }

    /// Its rate where aggregators, of these offers, serve no others: of one the same, of several the best.
    fn alone(&self, topology: &Topology, conditions: &Conditions, hosts: &[HostId], idle: &[Offer]) -> f64 {
        let way = if self.leaves.is_empty() {
            let same = |offer: &&Offer| {
                offer.aggregator == self.root && (offer.carries > offer.payload) == self.coded
            };
            idle.iter().find(same).and_then(|offer| Way::to(topology, conditions, hosts, offer))
        } else {
            tree::best(topology, conditions, hosts, idle, self.size as f64).map(|(_, _, way)| way)
        };
        way.map_or(self.way.rate, |way| way.rate.max(self.way.rate))
    }

    fn decided(self, hosts: &Hosts, alone: f64) -> Aggregation {
        // From the largest size down, as far as it pays.
        let sizes = SIZES.rev().map(|power| 1_u64 << power);
        let least = sizes.take_while(|size| self.pays(hosts, *size)).last();
        let words = self.words(hosts);
        let Some(least) = least.map(Bytes) else { return Aggregation { chosen: None, reason: words } };
        let single = self.leaves.is_empty();
        let aggregated = Aggregated {
            aggregator: self.root,
            coded: self.coded,
            rate: Rate((self.way.rate * 8.0) as u64),
            alone: Rate((alone * 8.0) as u64),
            delay: Nanos((self.way.delay * 1e9) as u64),
            least,
            // Sums alone go through several.
            broadcasts: self.way.broadcasts(hosts).filter(|_| single),
            barriers: single && self.way.barriers(hosts),
            leaves: self.leaves,
        };
        Aggregation { chosen: Some(aggregated), reason: format!("{words}; from {least} on") }
    }
}

fn named(topology: &Topology) -> impl Fn(&crate::Aggregator) -> String {
    |aggregator| format!("{} at {}", aggregator.name, topology.node_name(Node::Switch(aggregator.switch)))
}

fn bytes(rate: Rate) -> f64 {
    rate.0 as f64 / 8.0
}

fn seconds(delay: Nanos) -> f64 {
    delay.0 as f64 / 1e9
}

/// What hosts do among themselves; bytes and seconds.
struct Hosts {
    count: f64,
    rate: f64,
    /// Of a tensor, by codes of their own; 0 where they have none.
    coded: f64,
    /// One way between two of them.
    delay: f64,
}

impl Hosts {
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
        let chain = size / rate + (count - 1.0) * (delay + MESSAGE);
        chain.min((count - 1.0) * (size / rate + MESSAGE) + delay)
    }

    /// The faster of telling all, and of telling one more in each of as many rounds as double up to all.
    fn barrier(&self) -> f64 {
        let Self { count, delay, .. } = *self;
        (delay + (count - 1.0) * MESSAGE).min(count.log2().ceil() * (delay + MESSAGE))
    }
}

/// The hosts' ways to an aggregator; bytes and seconds.
struct Way {
    /// Payload a second and host.
    rate: f64,
    /// Of a tensor, what a host brings through in a second.
    tensor: f64,
    delay: f64,
    /// What a packet takes of its core.
    packet: f64,
    /// One way between the two hosts that are farthest from each other, at most.
    between: f64,
}

impl Way {
    /// None where a host has no way of open links.
    fn to(topology: &Topology, conditions: &Conditions, hosts: &[HostId], offer: &Offer) -> Option<Self> {
        let aggregator = topology.aggregators().get(offer.aggregator.0)?;
        let spread = Spread::new(topology, conditions, aggregator.switch);
        let mut loads: BTreeMap<DirectedLink, f64> = BTreeMap::new();
        let mut farthest = 0.0_f64;
        for host in hosts {
            farthest = farthest.max(spread.add(Node::Host(*host), &mut loads)?);
        }
        let (count, takers) = (hosts.len() as f64, 1.0 + f64::from(offer.others));
        let payload = offer.payload.0.max(1) as f64;
        let goes = payload / (payload + HEADERS);
        // Sums go the same ways back.
        let links = loads.iter().map(|(link, load)| {
            let both = [*link, link.reversed()].map(|link| conditions.available(link));
            both.into_iter().map(bytes).fold(f64::INFINITY, f64::min) * goes / load
        });
        let link = bytes(aggregator.rate) * goes / (count * takers);
        let core = match offer.packets_per_second {
            0 => f64::INFINITY,
            packets => packets as f64 * payload / (count * takers),
        };
        let rate = links.fold(link.min(core), f64::min);
        let delay = farthest + seconds(aggregator.delay);
        let coder = if offer.coder.0 == 0 { f64::INFINITY } else { bytes(offer.coder) };
        let tensor = (rate * offer.carries.0 as f64 / payload).min(coder);
        let packet = match offer.packets_per_second {
            0 => 0.0,
            packets => takers / packets as f64,
        };
        (rate > 1.0).then_some(Self { rate, tensor, delay, packet, between: 2.0 * farthest })
    }

    fn time(&self, size: f64) -> f64 {
        size / self.tensor + 2.0 * self.delay
    }

    /// Sizes of broadcasts that are faster this way: from the least up as far as they are.
    fn broadcasts(&self, hosts: &Hosts) -> Option<[Bytes; 2]> {
        let time = |size: f64| size / self.rate + 2.0 * (self.delay + MESSAGE);
        let pays = |size: &u64| time(*size as f64) < GAIN * hosts.broadcast(*size as f64);
        let sizes = SIZES.map(|power| 1_u64 << power);
        let mut sizes = sizes.skip_while(|size| !pays(size)).take_while(pays);
        let least = sizes.next()?;
        let most = sizes.last().unwrap_or(least);
        // What is smaller than all that is looked at is like the least of it.
        Some([Bytes(if least == 1 << SIZES.start() { 1 } else { least }), Bytes(most)])
    }

    fn barriers(&self, hosts: &Hosts) -> bool {
        2.0 * (self.delay + MESSAGE) + hosts.count * self.packet < GAIN * hosts.barrier()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conditions::Use;

    fn star(hosts: usize, delay: &str, aggregator: &str) -> Topology {
        let mut text = "[[switch]]\nname = \"s0\"\n".to_owned();
        for host in 0..hosts {
            text += &format!(
                "[[host]]\nname = \"h{host}\"\n[[link]]\nfrom = \"h{host}\"\nto = \"s0\"\nrate = \"1Gbit/s\"\ndelay = \"{delay}\"\n"
            );
        }
        text += &format!("[[aggregator]]\nname = \"agg0\"\nswitch = \"s0\"\nrate = \"{aggregator}\"\n");
        Topology::parse(&text).unwrap()
    }

    fn offer(packets_per_second: u64) -> Offer {
        let (aggregator, payload, coder) = (AggregatorId(0), Bytes(8192), Rate(0));
        Offer { aggregator, payload, carries: payload, coder, packets_per_second, others: 0, parents: true }
    }

    fn decide(topology: &Topology, conditions: &Conditions, offer: Offer) -> Aggregation {
        let hosts: Vec<HostId> = (0..topology.hosts().len()).map(HostId).collect();
        aggregation(topology, conditions, &hosts, (Rate(1_000_000_000), Rate(0)), Bytes(0), &[offer])
    }

    #[test]
    fn a_wide_aggregator_takes_large_operations_and_the_rates_are_as_bounds_say() {
        for hosts in [4, 8] {
            let topology = star(hosts, "50us", "8Gbit/s");
            let decided = decide(&topology, &Conditions::clear(&topology), offer(0));
            let chosen = decided.chosen.unwrap();
            let goes = 8192.0 / (8192.0 + HEADERS);
            assert!((chosen.rate.0 as f64 / 1e9 - goes).abs() < 1e-3, "{chosen:?}");
            assert_eq!(chosen.delay, Nanos(50_000));
            let by_hosts = Hosts { count: hosts as f64, rate: 125e6, coded: 0.0, delay: 1e-4 };
            let least = chosen.least.0 as f64;
            let here = |size: f64| size / bytes(chosen.rate) + 1e-4;
            assert!(here(least) < GAIN * by_hosts.time(least));
            assert!(here(least / 2.0) >= GAIN * by_hosts.time(least / 2.0) || least <= 1024.0);
            assert!(decided.reason.contains("by agg0 at s0"), "{}", decided.reason);
        }
    }

    #[test]
    fn broadcasts_go_by_it_where_a_chain_is_long_and_barriers_where_hosts_are_many() {
        let decide_for = |hosts: usize| {
            let topology = star(hosts, "500us", &format!("{hosts}Gbit/s"));
            decide(&topology, &Conditions::clear(&topology), offer(0)).chosen.unwrap()
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
    fn a_narrow_link_a_slow_core_or_many_others_make_it_worth_nothing() {
        let wide = star(4, "50us", "4Gbit/s");
        let clear = Conditions::clear(&wide);
        assert!(decide(&wide, &clear, offer(0)).chosen.is_some());
        assert_eq!(decide(&wide, &clear, offer(20_000)).chosen, None, "20,000 packets a second");
        assert_eq!(decide(&wide, &clear, Offer { others: 3, ..offer(0) }).chosen, None);
        // Of a wider link others take a part, as long as they have something to sum.
        let wider = star(4, "50us", "16Gbit/s");
        let beside = |others| {
            let offer = Offer { others, ..offer(0) };
            decide(&wider, &Conditions::clear(&wider), offer).chosen.unwrap()
        };
        assert_eq!((beside(0).rate, beside(0).alone), (beside(3).rate, beside(3).alone));
        assert!(beside(4).rate < beside(0).rate && beside(4).alone == beside(0).alone);
        let narrow = star(4, "50us", "1Gbit/s");
        let decided = decide(&narrow, &Conditions::clear(&narrow), offer(0));
        assert!(decided.chosen.is_none() && decided.reason.contains("by the hosts"), "{}", decided.reason);
        let two = star(2, "50us", "2Gbit/s");
        assert_eq!(decide(&two, &Conditions::clear(&two), offer(0)).chosen, None, "two hosts gain nothing");
    }

    #[test]
    fn a_closed_way_and_no_aggregator_are_told() {
        let topology = star(4, "50us", "4Gbit/s");
        let mut conditions = Conditions::clear(&topology);
        conditions.restrict(crate::LinkId(2), Use::Failed);
        let decided = decide(&topology, &conditions, offer(0));
        assert_eq!(decided.reason, "not all hosts reach agg0 at s0 over open links");
        let hosts = [HostId(0), HostId(1), HostId(3)];
        let all = |hosts: &[HostId], offers: &[Offer]| {
            aggregation(&topology, &conditions, hosts, (Rate(1_000_000_000), Rate(0)), Bytes(0), offers)
        };
        assert!(all(&hosts, &[offer(0)]).chosen.is_some(), "who is not there counts for nothing");
        assert_eq!(all(&hosts, &[]).reason, "no aggregator is there");
        assert_eq!(all(&hosts[..1], &[offer(0)]).reason, "nothing crosses a wire");
    }

    #[test]
    fn racks_share_their_uplinks_and_spread_over_spines() {
        let mut text = String::new();
        for switch in ["spine0", "spine1", "leaf0", "leaf1"] {
            text += &format!("[[switch]]\nname = \"{switch}\"\n");
        }
        for leaf in 0..2 {
            for spine in 0..2 {
                text += &format!(
                    "[[link]]\nfrom = \"leaf{leaf}\"\nto = \"spine{spine}\"\nrate = \"1Gbit/s\"\ndelay = \"10us\"\n"
                );
            }
        }
        for host in 0..8 {
            let leaf = host / 4;
            text += &format!(
                "[[host]]\nname = \"h{host}\"\n[[link]]\nfrom = \"h{host}\"\nto = \"leaf{leaf}\"\nrate = \"1Gbit/s\"\n"
            );
        }
        text += "[[aggregator]]\nname = \"agg0\"\nswitch = \"leaf0\"\nrate = \"8Gbit/s\"\n";
        let topology = Topology::parse(&text).unwrap();
        let conditions = Conditions::clear(&topology);
        let hosts: Vec<HostId> = (0..8).map(HostId).collect();
        let way = Way::to(&topology, &conditions, &hosts, &offer(0)).unwrap();
        // Four hosts of the other rack over two uplinks of 1 Gbit/s each.
        let goes = 8192.0 / (8192.0 + HEADERS);
        assert!((way.rate - 0.5 * 125e6 * goes).abs() < 1.0, "{}", way.rate);
        assert!((way.delay - 20e-6).abs() < 1e-9);
        let mut closed = conditions.clone();
        closed.restrict(crate::LinkId(0), Use::Failed);
        let way = Way::to(&topology, &closed, &hosts, &offer(0)).unwrap();
        assert!((way.rate - 0.25 * 125e6 * goes).abs() < 1.0, "one uplink is left: {}", way.rate);
    }
}
