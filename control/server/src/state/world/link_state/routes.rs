//! The addresses that answered on the routes between hosts, whether the topology has them or not.
//!
//! An agent may report what it likes: hops of a route, routes to a host, and hosts that one host traces are bounded, so no host
//! takes another's place.

use super::ports::Pair;
use harmonaize_planner::HostId;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

/// Most hops of a route.
pub(crate) const MAX_HOPS: usize = 16;

/// Most routes from one host to another: the latest.
const MAX_ROUTES: usize = 8;

/// Most pairs of all hosts together, but for one of each host.
const MAX_PAIRS: usize = 8192;

/// Most hosts to which a host's routes are kept.
const MAX_PEERS: usize = 64;

/// How many of the hops are there up to the last that answered.
pub(crate) fn answered(hops: &[Option<IpAddr>]) -> usize {
    hops.iter().rposition(Option::is_some).map_or(0, |last| last + 1)
}

/// A route as an agent reported it.
#[derive(Debug)]
pub(crate) struct Route {
    /// The port of the connecting end: the latest that took it.
    pub port: u16,
    /// By time to live from 1: the address that answered, if one did.
    pub hops: Vec<Option<IpAddr>>,
    /// When the answer came.
    pub at: Duration,
}

/// The latest routes from each host to some others, oldest first.
#[derive(Debug, Default)]
pub(crate) struct TracedRoutes {
    by_host: BTreeMap<HostId, BTreeMap<HostId, Vec<Route>>>,
}

impl TracedRoutes {
    /// Keeps a route from one host to another, of a fabric of so many hosts. One on which nobody answered is none.
    pub(crate) fn insert(
        &mut self,
        hosts: usize,
        (from, to): (HostId, HostId),
        port: u16,
        hops: &[Option<IpAddr>],
        at: Duration,
    ) {
        let hops: Vec<Option<IpAddr>> = hops.iter().copied().take(MAX_HOPS).collect();
        if hops.iter().all(Option::is_none) {
            return;
        }
        let peers = self.by_host.entry(from).or_default();
        let max_peers = (MAX_PAIRS / hosts.max(1)).clamp(1, MAX_PEERS);
        if !peers.contains_key(&to) && peers.len() >= max_peers {
            let newest = |routes: &Vec<Route>| routes.last().map(|route| route.at);
            let stale = peers.iter().min_by_key(|(_, routes)| newest(routes)).map(|(peer, _)| *peer);
            if let Some(peer) = stale {
                peers.remove(&peer);
            }
        }
        let routes = peers.entry(to).or_default();
        routes.retain(|route| route.port != port && route.hops != hops);
        if routes.len() >= MAX_ROUTES {
            routes.remove(0);
        }
        routes.push(Route { port, hops, at });
    }

    /// Returns the routes between two hosts, in both directions.
    pub(crate) fn between(&self, (one, other): Pair) -> impl Iterator<Item = &Route> {
        let routes = move |(from, to): (HostId, HostId)| self.by_host.get(&from)?.get(&to);
        [(one, other), (other, one)].into_iter().filter_map(routes).flatten()
    }

    /// Returns all routes: from which host, to which.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (HostId, HostId, &Route)> {
        self.by_host.iter().flat_map(|(from, peers)| {
            peers.iter().flat_map(move |(to, routes)| routes.iter().map(move |route| (*from, *to, route)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIR: (HostId, HostId) = (HostId(0), HostId(1));

    fn hops(last: &[u8]) -> Vec<Option<IpAddr>> {
        last.iter().map(|last| Some(IpAddr::from([10, 0, 0, *last]))).collect()
    }

    fn seconds(count: usize) -> Duration {
        Duration::from_secs(count as u64)
    }

    #[test]
    fn a_route_stays_once_with_its_latest_port() {
        let mut routes = TracedRoutes::default();
        routes.insert(2, PAIR, 7, &hops(&[1, 2]), seconds(0));
        routes.insert(2, PAIR, 8, &hops(&[1, 3]), seconds(1));
        routes.insert(2, PAIR, 9, &hops(&[1, 2]), seconds(2));
        let ports =
            |routes: &TracedRoutes| -> Vec<u16> { routes.iter().map(|(.., route)| route.port).collect() };
        assert_eq!(ports(&routes), [8, 9]);
        // A port that takes another route now has left the one before.
        routes.insert(2, PAIR, 8, &hops(&[1, 4]), seconds(3));
        assert_eq!(ports(&routes), [9, 8]);
        let last = routes.iter().last().map(|(from, to, route)| (from, to, route.hops.clone(), route.at));
        assert_eq!(last, Some((PAIR.0, PAIR.1, hops(&[1, 4]), seconds(3))));
    }

    #[test]
    fn silence_is_no_route() {
        let mut routes = TracedRoutes::default();
        routes.insert(2, PAIR, 7, &[None, None], seconds(0));
        assert_eq!(routes.iter().count(), 0);
        routes.insert(2, PAIR, 7, &[None, hops(&[1])[0]], seconds(1));
        routes.insert(2, PAIR, 7, &[None, None], seconds(2));
        assert_eq!(routes.iter().count(), 1, "what was known stays");
    }

    #[test]
    fn a_hostile_agent_fills_its_own_part_alone() {
        let mut routes = TracedRoutes::default();
        routes.insert(1000, (HostId(999), HostId(0)), 1, &hops(&[9]), seconds(0));
        for peer in 0..200 {
            for port in 0..100_u8 {
                let long: Vec<u8> = (0..100).map(|hop| port.wrapping_add(hop)).collect();
                let pair = (HostId(500), HostId(peer));
                routes.insert(1000, pair, u16::from(port), &hops(&long), seconds(peer));
            }
        }
        assert!(routes.iter().all(|(.., route)| route.hops.len() <= MAX_HOPS));
        let own: Vec<(HostId, u16)> = routes
            .iter()
            .filter(|(from, ..)| *from == HostId(500))
            .map(|(_, to, route)| (to, route.port))
            .collect();
        assert_eq!(own.len(), MAX_ROUTES * (MAX_PAIRS / 1000), "so many routes to each of so many hosts");
        assert_eq!((own[0], own[7]), ((HostId(192), 92), (HostId(192), 99)), "the latest");
        assert_eq!(routes.iter().count(), own.len() + 1, "another's is still there");
    }

    #[test]
    fn pairs_are_bounded_however_many_hosts_there_are() {
        for (hosts, peers) in [(0, 64), (24, 64), (1000, 8), (16384, 1)] {
            let mut routes = TracedRoutes::default();
            for peer in 0..100 {
                routes.insert(hosts, (HostId(0), HostId(peer)), 1, &hops(&[1]), seconds(peer));
            }
            assert_eq!(routes.iter().count(), peers, "{hosts} hosts");
        }
    }
}
