//! What connections are held to. Those along a ring are held to what the plan says. Those to other participants together leave others
//! what these are promised, for exchanges use them alike and no plan counts them.

use crate::plan::RingEdge;
use harmonaize_abi::CommunicatorId;
use harmonaize_topology::DirectedLink;
use harmonaize_topology::Topology;
use harmonaize_units::Rate;
use std::collections::{BTreeMap, BTreeSet};

/// Rates are the same up to this part.
const SAME: f64 = 0.1;

/// The least part of what a link carries that exchanges are limited to. It is above 0 since promises have at most 90% of a link.
const LEAST: f64 = 0.01;

/// What a communicator's connections are held to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// From each participant to the next along the ring.
    pub ring: Option<Rate>,
    /// From each participant to all others together.
    pub exchange: Option<Rate>,
}

impl RateLimits {
    /// Whether a change to these is worth an epoch.
    pub fn is_other(&self, wanted: &Self) -> bool {
        let differs = |now: Option<Rate>, wanted: Option<Rate>| match (now, wanted) {
            (Some(now), Some(wanted)) => (wanted.0 as f64 - now.0 as f64).abs() > SAME * now.0 as f64,
            (now, wanted) => now != wanted,
        };
        differs(self.ring, wanted.ring) || differs(self.exchange, wanted.exchange)
    }

    /// Returns what each of the `able` participants of a ring holds its connection to each other to, bits a second.
    pub fn by_connection(&self, order: &[u32], able: &BTreeSet<u32>) -> BTreeMap<(u32, u32), u64> {
        let mut limits = BTreeMap::new();
        if let Some(Rate(exchange)) = self.exchange {
            let each = (exchange / (order.len() as u64).saturating_sub(1).max(1)).max(1);
            for from in able {
                limits.extend(order.iter().filter(|to| *to != from).map(|to| ((*from, *to), each)));
            }
        }
        for edge @ (from, to) in order.iter().copied().zip(order.iter().copied().cycle().skip(1)) {
            limits.remove(&edge);
            if let Some(Rate(rate)) = self.ring.filter(|_| from != to && able.contains(&from)) {
                limits.insert(edge, rate);
            }
        }
        limits
    }
}

/// A communicator that uses links.
#[derive(Clone, Debug)]
pub struct Sharer<'a> {
    /// Which.
    pub communicator: CommunicatorId,
    /// What is promised for it; 0 where nothing is.
    pub promised: Rate,
    /// The hops of its ring, as far as their paths are known.
    pub hops: Vec<RingEdge>,
    /// The part of what a host sends that crosses each link where all send to all. Empty where all are neighbours in the ring.
    pub exchange: &'a [(DirectedLink, f64)],
}

/// A link on which something is promised.
#[derive(Debug, Default)]
struct Reserved {
    /// Bits a second, by communicator.
    promised: BTreeMap<CommunicatorId, f64>,
    /// Communicators without a promise that exchange over it.
    takers: u32,
}

/// The links on which something is promised.
#[derive(Debug, Default)]
pub struct Reservations(BTreeMap<DirectedLink, Reserved>);

impl Reservations {
    /// Lays all communicators on their links.
    pub fn new(sharers: &[Sharer<'_>]) -> Self {
        let mut links: BTreeMap<DirectedLink, Reserved> = BTreeMap::new();
        for sharer in sharers.iter().filter(|sharer| sharer.promised.0 > 0) {
            for hop in &sharer.hops {
                let part = 1.0 / hop.paths.len().max(1) as f64;
                for link in hop.paths.iter().flat_map(|path| path.links()) {
                    let promised = &mut links.entry(*link).or_default().promised;
                    *promised.entry(sharer.communicator).or_default() += sharer.promised.0 as f64 * part;
                }
            }
        }
        for sharer in sharers.iter().filter(|sharer| sharer.promised.0 == 0) {
            for (link, _) in sharer.exchange {
                links.entry(*link).and_modify(|link| link.takers += 1);
            }
        }
        Self(links)
    }

    /// Returns what each host of a communicator may send in all where all send to all alike. None where it crosses no link on which others
    /// have a promise. Who has none shares alike there what promises leave. Not what cross traffic leaves: it comes and goes, and each
    /// change of it would be an epoch.
    pub fn exchange_limit(
        &self,
        topology: &Topology,
        communicator: CommunicatorId,
        exchange: &[(DirectedLink, f64)],
    ) -> Option<Rate> {
        let rates = exchange.iter().filter_map(|(link, part)| {
            let Reserved { promised, takers } = self.0.get(link)?;
            let others = promised.iter().filter(|(other, _)| **other != communicator).map(|(_, rate)| rate);
            let others = Some(others.sum::<f64>()).filter(|rate| *rate > 0.0)?;
            let rate = topology.links().get(link.link.0)?.rate.0 as f64;
            let takers = takers + u32::from(promised.contains_key(&communicator));
            Some((rate - others).max(rate * LEAST) / (part * f64::from(takers.max(1))))
        });
        rates.min_by(f64::total_cmp).map(|rate| Rate(rate as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::all_to_all::exchange_usage;
    use harmonaize_topology::HostId;
    use harmonaize_topology::text::star_text;

    const MB: u64 = 1_000_000;

    #[test]
    fn exchanges_leave_what_others_are_promised() {
        let topology = Topology::parse(&star_text(4, "1Gbit/s", "0us")).unwrap();
        let hosts = [0, 1, 2].map(HostId);
        let exchange = exchange_usage(&topology, &hosts);
        let paths = |from, to| topology.equal_cost_paths(HostId(from), HostId(to));
        let promised = Sharer {
            communicator: CommunicatorId(1),
            promised: Rate(600 * MB),
            hops: vec![RingEdge { paths: paths(0, 3).to_vec() }, RingEdge { paths: paths(3, 0).to_vec() }],
            exchange: &[],
        };
        let taker = Sharer {
            communicator: CommunicatorId(2),
            promised: Rate(0),
            hops: Vec::new(),
            exchange: &exchange,
        };
        let limit = |sharers: &[Sharer<'_>], id| {
            Reservations::new(sharers).exchange_limit(&topology, id, &exchange).map(|rate| rate.0 / MB)
        };
        assert_eq!(limit(std::slice::from_ref(&taker), CommunicatorId(2)), None, "nothing is promised");
        assert_eq!(
            limit(&[promised.clone(), taker.clone()], CommunicatorId(2)),
            Some(400),
            "host 0 sends all over its link"
        );
        let other = Sharer { communicator: CommunicatorId(3), ..taker.clone() };
        assert_eq!(
            limit(&[promised.clone(), taker, other], CommunicatorId(2)),
            Some(200),
            "two share what is left"
        );
        assert_eq!(limit(&[promised], CommunicatorId(1)), None, "its own promise is not in its way");
    }

    #[test]
    fn connections_along_the_ring_have_the_ring_s_limit() {
        let limits = RateLimits { ring: Some(Rate(9)), exchange: Some(Rate(30)) };
        let by = limits.by_connection(&[0, 2, 1, 3], &[0, 1].into());
        assert_eq!(
            by.into_iter().collect::<Vec<_>>(),
            [((0, 1), 10), ((0, 2), 9), ((0, 3), 10), ((1, 0), 10), ((1, 2), 10), ((1, 3), 9)]
        );
        let near = RateLimits { ring: Some(Rate(100)), exchange: None };
        assert!(!near.is_other(&RateLimits { ring: Some(Rate(109)), exchange: None }));
        assert!(
            near.is_other(&RateLimits { ring: Some(Rate(111)), exchange: None }) && near.is_other(&limits)
        );
    }
}
