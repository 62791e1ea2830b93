//! What a fabric carries where each host of a group sends as much directly to each other one. Compressed AllReduces do so.

use crate::conditions::{Conditions, LinkUse};
use harmonaize_topology::{DirectedLink, Path, PathFinder};
use harmonaize_topology::{HostId, Node, Topology};
use harmonaize_units::Rate;
use std::collections::BTreeMap;

/// What each of these hosts' own links carry: of the slowest.
pub fn line_rate(topology: &Topology, hosts: &[HostId]) -> Rate {
    let of_host = |host: &HostId| {
        let links = topology.links_at(Node::Host(*host)).iter();
        links
            .filter_map(|link| topology.links().get(link.0))
            .map(|link| link.rate.0)
            .fold(0, u64::saturating_add)
    };
    Rate(hosts.iter().map(of_host).min().unwrap_or_default())
}

/// The part of what one host sends in all that crosses each directed link: equal-cost paths are taken alike. Cost: the group's pairs
/// times their paths.
pub fn exchange_usage(topology: &Topology, hosts: &[HostId]) -> Vec<(DirectedLink, f64)> {
    let mut ways = PathFinder::new(topology);
    exchange_usage_by(hosts, |from, to| ways.between(from, to))
}

/// The same where these are the paths between two.
pub(crate) fn exchange_usage_by(
    hosts: &[HostId],
    paths: impl FnMut(HostId, HostId) -> Vec<Path>,
) -> Vec<(DirectedLink, f64)> {
    let others = hosts.len().saturating_sub(1).max(1) as f64;
    let pairs = hosts.iter().flat_map(|from| hosts.iter().map(move |to| (*from, *to)));
    usage_by(pairs.filter(|(from, to)| from != to), 1.0 / others, paths)
}

/// The same where each of these pairs has such a part of what a host sends.
pub(crate) fn usage(
    topology: &Topology,
    pairs: impl Iterator<Item = (HostId, HostId)>,
    part: f64,
) -> Vec<(DirectedLink, f64)> {
    let mut ways = PathFinder::new(topology);
    usage_by(pairs, part, |from, to| ways.between(from, to))
}

/// The same where these are the paths between two.
pub(crate) fn usage_by(
    pairs: impl Iterator<Item = (HostId, HostId)>,
    part: f64,
    mut paths: impl FnMut(HostId, HostId) -> Vec<Path>,
) -> Vec<(DirectedLink, f64)> {
    let mut parts: BTreeMap<DirectedLink, f64> = BTreeMap::new();
    for (from, to) in pairs {
        let paths = paths(from, to);
        let part = part / paths.len().max(1) as f64;
        for link in paths.iter().flat_map(|path| path.links()) {
            *parts.entry(*link).or_default() += part;
        }
    }
    parts.into_iter().collect()
}

/// What each host can send in all in such an exchange. On each link `others` so many communicators take as much as this one. What
/// passes nothing or is avoided does not count: connections go other ways.
pub fn exchange_rate(
    usage: &[(DirectedLink, f64)],
    conditions: &Conditions,
    others: &BTreeMap<DirectedLink, u32>,
) -> Rate {
    let open = usage.iter().filter(|(link, _)| conditions.usable(*link) == LinkUse::Open);
    rate_of_all(open, conditions, others)
}

/// The same where each of these links counts.
pub(crate) fn rate_of_all<'a>(
    usage: impl Iterator<Item = &'a (DirectedLink, f64)>,
    conditions: &Conditions,
    others: &BTreeMap<DirectedLink, u32>,
) -> Rate {
    let rates = usage.map(|(link, part)| {
        let takers = 1.0 + f64::from(others.get(link).copied().unwrap_or(0));
        conditions.available(*link).0 as f64 / (takers * part)
    });
    Rate(rates.fold(f64::INFINITY, f64::min) as u64)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use harmonaize_topology::LinkId;
    use harmonaize_topology::text::{host, link, switch};

    /// Two racks of `per_rack` hosts at 1 Gbit/s, one spine, uplinks at `uplink`.
    pub(crate) fn racks(per_rack: usize, uplink: &str) -> (Topology, Vec<HostId>) {
        let mut text = ["spine", "leaf0", "leaf1"].map(switch).concat();
        text += &["leaf0", "leaf1"].map(|leaf| link(leaf, "spine", uplink, "50us")).concat();
        for at in 0..2 * per_rack {
            text += &host(at, format!("leaf{}", at / per_rack), "1Gbit/s", "50us");
        }
        (Topology::parse(&text).unwrap(), (0..2 * per_rack).map(HostId).collect())
    }

    #[test]
    fn a_wide_fabric_carries_what_hosts_send() {
        let (topology, hosts) = racks(4, "8Gbit/s");
        let usage = exchange_usage(&topology, &hosts);
        let rate = exchange_rate(&usage, &Conditions::clear(&topology), &BTreeMap::new());
        assert!((rate.0 as f64 / 1e9 - 1.0).abs() < 1e-6, "{rate}");
    }

    #[test]
    fn narrow_fabrics_divide_rate_among_crossing_pairs() {
        for per_rack in [1, 2, 4] {
            let (topology, hosts) = racks(per_rack, "1Gbit/s");
            let usage = exchange_usage(&topology, &hosts);
            let mut conditions = Conditions::clear(&topology);
            // Of each rack's hosts this part of what they send crosses its uplink.
            let crossing = (per_rack * per_rack) as f64 / (2 * per_rack - 1) as f64;
            let expected = 1e9 / crossing;
            let rate = |conditions: &Conditions, others: &BTreeMap<DirectedLink, u32>| {
                exchange_rate(&usage, conditions, others).0 as f64
            };
            assert!((rate(&conditions, &BTreeMap::new()) / expected - 1.0).abs() < 1e-6);
            let up = DirectedLink { link: LinkId(0), forward: true };
            assert!((rate(&conditions, &BTreeMap::from([(up, 1)])) / expected - 0.5).abs() < 1e-6);
            conditions.set_available(up, Rate(100_000_000));
            assert!((rate(&conditions, &BTreeMap::new()) / expected - 0.1).abs() < 1e-6);
        }
    }
}
