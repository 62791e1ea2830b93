//! Source ports of links: from the operator's range, each at most once per connecting host, the longest
//! unused first.
//!
//! Those of a pool are kept for one pair of hosts, because agents have traced which way they lead.

use harmonaize_planner::{HostId, Path};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most ports of a pool.
pub(crate) const MOST_POOL: usize = 192;

/// Two hosts that may be linked; the first connects.
pub(crate) type Pair = (HostId, HostId);

/// Returns the pair of two hosts: who of them connects is always the same.
pub(crate) fn pair_of(one: HostId, other: HostId) -> Pair {
    (one.min(other), one.max(other))
}

/// Who has which port.
#[derive(Debug)]
pub(crate) struct Ports {
    range: Option<(u16, u16)>,
    next: BTreeMap<HostId, u16>,
    used: BTreeSet<(HostId, u16)>,
    pools: BTreeMap<Pair, BTreeMap<u16, Port>>,
    /// Whose pool a port is in.
    pooled: BTreeMap<(HostId, u16), Pair>,
    released: u64,
    /// Pairs all of whose ways were looked for.
    explored: BTreeSet<Pair>,
    /// Paths from one host to another that enough free ports of their pool take, both ways. It has only pairs
    /// that are explored.
    paths: BTreeMap<(HostId, HostId), Vec<Path>>,
    /// Pairs of which `known` is to be made anew.
    stale: BTreeSet<Pair>,
    /// Pairs of which connections took ports since that was looked at.
    taken: BTreeSet<Pair>,
}

/// How one direction of a port's way was looked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    /// When an answer last spoke of it.
    pub at: Option<Duration>,
    /// Answers in a row from which no way could be told.
    pub silent: u32,
    /// Whether it spoke of queue pairs, and not of connections.
    pub queue_pairs: bool,
}

/// A port of a pool.
#[derive(Clone, Debug, Default)]
pub(crate) struct Port {
    /// Which way it leads from the connecting end; none while that is not known.
    pub there: Option<Path>,
    /// Which way packets come back, from the end that is connected to.
    pub back: Option<Path>,
    /// How it was looked for, there and back.
    pub samples: [Sample; 2],
    used: bool,
    /// Orders free ports by when they were released.
    freed: u64,
}

impl Port {
    /// Whether packets come back the way that they go.
    pub(crate) fn is_symmetric(&self) -> bool {
        let there = self.there.as_ref();
        there.is_some_and(|there| self.back.as_ref().is_some_and(|back| *back == there.reversed()))
    }

    /// The way from the connecting end, or back to it.
    pub(crate) fn leg(&self, back: bool) -> Option<&Path> {
        if back { self.back.as_ref() } else { self.there.as_ref() }
    }

    /// How that way was looked for.
    pub(crate) fn sample(&self, back: bool) -> Sample {
        let [there, home] = self.samples;
        if back { home } else { there }
    }

    /// That way is not known any more.
    pub(crate) fn forget(&mut self, back: bool) {
        let [there, home] = &mut self.samples;
        *(if back { home } else { there }) = Sample::default();
        *(if back { &mut self.back } else { &mut self.there }) = None;
    }

    /// Whether a link holds it now.
    pub(crate) fn is_used(&self) -> bool {
        self.used
    }
}

impl Ports {
    pub(crate) fn new(range: Option<(u16, u16)>) -> Self {
        Self {
            range,
            next: BTreeMap::new(),
            used: BTreeSet::new(),
            pools: BTreeMap::new(),
            pooled: BTreeMap::new(),
            released: 0,
            explored: BTreeSet::new(),
            paths: BTreeMap::new(),
            stale: BTreeSet::new(),
            taken: BTreeSet::new(),
        }
    }

    /// A port for a link that `host` connects; 0, that is any, where none is free. `held` remembers it for
    /// [`Ports::release`].
    pub(crate) fn take(&mut self, host: HostId, held: &mut Vec<(HostId, u16)>) -> u16 {
        let Some((first, last)) = self.range else { return 0 };
        let start = self.next.get(&host).copied().unwrap_or(first).clamp(first, last);
        let Some(port) = (start..=last).chain(first..start).find(|port| !self.used.contains(&(host, *port)))
        else {
            return 0;
        };
        self.next.insert(host, if port == last { first } else { port + 1 });
        self.used.insert((host, port));
        held.push((host, port));
        port
    }

    /// The port of a pair's pool that `cost` finds cheapest, among equals the longest unused. None where none
    /// is free or `cost` gives none a price.
    pub(crate) fn take_traced(
        &mut self,
        pair: Pair,
        reserved: &mut Vec<(HostId, u16)>,
        cost: impl Fn(&Port) -> Option<u64>,
    ) -> Option<u16> {
        let free = self.pools.get_mut(&pair)?.iter_mut().filter(|(_, port)| !port.used);
        let priced = free.filter_map(|(number, port)| Some(((cost(port)?, port.freed, *number), port)));
        let ((_, _, number), port) = priced.min_by_key(|(key, _)| *key)?;
        port.used = true;
        reserved.push((pair.0, number));
        self.stale.insert(pair);
        self.taken.insert(pair);
        Some(number)
    }

    pub(crate) fn release(&mut self, held: &mut Vec<(HostId, u16)>) {
        for held in held.drain(..) {
            let pair = self.pooled.get(&held).copied();
            let pool = pair.and_then(|pair| self.pools.get_mut(&pair));
            if let Some(port) = pool.and_then(|pool| pool.get_mut(&held.1)) {
                self.stale.extend(pair);
                self.released += 1;
                (port.used, port.freed) = (false, self.released);
            } else {
                self.used.remove(&held);
            }
        }
    }

    /// Takes those of these ports that are free; links of an earlier start of control have them.
    pub(crate) fn retake(&mut self, wanted: Vec<(HostId, u16)>) -> Vec<(HostId, u16)> {
        wanted.into_iter().filter(|held| !self.pooled.contains_key(held) && self.used.insert(*held)).collect()
    }

    /// Puts up to `count` more ports into a pair's pool. A quarter of its host's range always stays for
    /// others.
    pub(crate) fn pool(&mut self, pair: Pair, count: usize) -> usize {
        let Some((first, last)) = self.range else { return 0 };
        let range = usize::from(last - first) + 1;
        let own = self.used.range((pair.0, 0)..=(pair.0, u16::MAX)).count();
        let room = (range - range / 4).saturating_sub(own);
        let have = self.pools.get(&pair).map_or(0, BTreeMap::len);
        let mut taken = Vec::new();
        for _ in 0..count.min(room).min(MOST_POOL.saturating_sub(have)) {
            self.take(pair.0, &mut taken);
        }
        for held in &taken {
            self.pooled.insert(*held, pair);
            self.pools.entry(pair).or_default().insert(held.1, Port::default());
        }
        taken.len()
    }

    /// A pair's pool.
    pub(crate) fn pool_of(&self, pair: Pair) -> impl Iterator<Item = (u16, &Port)> {
        self.pools.get(&pair).into_iter().flatten().map(|(number, port)| (*number, port))
    }

    /// A port of a pool.
    pub(crate) fn traced(&self, pair: Pair, port: u16) -> Option<&Port> {
        self.pools.get(&pair)?.get(&port)
    }

    /// Whether what is known of a port's way is that of queue pairs; none where nothing is known of it.
    pub(crate) fn is_of_queue_pairs(&self, pair: Pair, port: u16, back: bool) -> Option<bool> {
        let port = self.traced(pair, port)?;
        port.leg(back).map(|_| port.sample(back).queue_pairs)
    }

    /// A port of a pool, to be changed.
    pub(crate) fn traced_mut(&mut self, pair: Pair, port: u16) -> Option<&mut Port> {
        self.stale.insert(pair);
        self.pools.get_mut(&pair)?.get_mut(&port)
    }

    /// Puts a port that a connection has already into its pair's pool. Whether it may be had: no other pair
    /// has it.
    pub(crate) fn adopt(&mut self, pair: Pair, port: u16, held: &mut Vec<(HostId, u16)>) -> bool {
        let mine = (pair.0, port);
        if self.pooled.get(&mine).is_some_and(|owner| *owner != pair) || self.in_use(pair, port) {
            return false;
        }
        let pool = self.pools.entry(pair).or_default();
        if pool.len() >= MOST_POOL * 2 {
            return false;
        }
        pool.entry(port).or_default().used = true;
        self.pooled.insert(mine, pair);
        self.used.insert(mine);
        if !held.contains(&mine) {
            held.push(mine);
        }
        self.stale.insert(pair);
        self.taken.insert(pair);
        true
    }

    /// Notes that all paths of a pair were looked for. Before that, what is known of some would keep plans
    /// from the others.
    pub(crate) fn explored(&mut self, pair: Pair) {
        if self.explored.insert(pair) {
            self.stale.insert(pair);
        }
    }

    /// Whether all ways of a pair were looked for.
    pub(crate) fn is_explored(&self, pair: Pair) -> bool {
        self.explored.contains(&pair)
    }

    /// Brings [`Ports::known`] up to date: paths that at least `least` free ports take.
    pub(crate) fn refresh(&mut self, least: usize) {
        for pair in std::mem::take(&mut self.stale) {
            let mut counts: BTreeMap<&Path, usize> = BTreeMap::new();
            let pool = self.pools.get(&pair).into_iter().flatten();
            for (_, port) in pool.filter(|(_, port)| port.is_symmetric()) {
                if let Some(path) = &port.there {
                    *counts.entry(path).or_default() += usize::from(!port.used);
                }
            }
            let explored = self.explored.contains(&pair);
            let enough = counts.into_iter().filter(|(_, free)| explored && *free >= least);
            let paths: Vec<Path> = enough.map(|(path, _)| path.clone()).collect();
            if paths.is_empty() {
                self.paths.remove(&pair);
                self.paths.remove(&(pair.1, pair.0));
            } else {
                self.paths.insert((pair.1, pair.0), paths.iter().map(Path::reversed).collect());
                self.paths.insert(pair, paths);
            }
        }
    }

    /// Returns paths that enough free ports of their pool take both ways, as of the last refresh. They are by
    /// where they begin and end.
    pub(crate) fn paths(&self) -> &BTreeMap<(HostId, HostId), Vec<Path>> {
        &self.paths
    }

    /// Pairs of which connections took ports since this was asked last.
    pub(crate) fn take_taken(&mut self) -> BTreeSet<Pair> {
        std::mem::take(&mut self.taken)
    }

    /// Pairs with a pool.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = Pair> {
        self.pools.keys().copied()
    }

    /// Whether a link holds any port of a pair's pool now.
    pub(crate) fn is_linked(&self, pair: Pair) -> bool {
        self.pools.get(&pair).is_some_and(|pool| pool.values().any(Port::is_used))
    }

    /// Gives back the ports of a pair's pool, none of which a link holds. Nothing is known of the pair's
    /// paths any more.
    pub(crate) fn forget(&mut self, pair: Pair) {
        for number in self.pools.remove(&pair).unwrap_or_default().into_keys() {
            self.pooled.remove(&(pair.0, number));
            self.used.remove(&(pair.0, number));
        }
        self.explored.remove(&pair);
        self.stale.insert(pair);
    }

    /// Whether a link holds a port of a pool now.
    pub(crate) fn in_use(&self, pair: Pair, port: u16) -> bool {
        self.traced(pair, port).is_some_and(|port| port.used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_planner::Topology;

    #[test]
    fn gives_each_once_and_round() {
        let (mut ports, mut held, mut later) = (Ports::new(Some((10, 12))), Vec::new(), Vec::new());
        let host = HostId(0);
        assert_eq!([10, 11].map(|_| ports.take(host, &mut held)), [10, 11]);
        assert_eq!(ports.take(HostId(1), &mut later), 10);
        ports.release(&mut held);
        assert_eq!([(); 4].map(|()| ports.take(host, &mut later)), [12, 10, 11, 0]);
        assert_eq!(Ports::new(None).take(host, &mut held), 0);
    }

    #[test]
    fn a_pair_that_is_forgotten_gives_its_ports_back() {
        let (mut ports, mut held, mut later) = (Ports::new(Some((10, 17))), Vec::new(), Vec::new());
        let pair = (HostId(0), HostId(1));
        assert_eq!(ports.pool(pair, 4), 4);
        ports.explored(pair);
        assert_eq!(ports.take_traced(pair, &mut held, |_| Some(0)), Some(10));
        assert!(ports.is_linked(pair));
        ports.release(&mut held);
        assert!(!ports.is_linked(pair));
        ports.forget(pair);
        assert!(!ports.is_explored(pair) && ports.pairs().next().is_none());
        let all = [(); 9].map(|()| ports.take(HostId(0), &mut later));
        assert_eq!(all.iter().filter(|port| **port != 0).count(), 8, "{all:?}");
    }

    #[test]
    fn pools_keep_their_ports() {
        let mut ports = Ports::new(Some((10, 17)));
        let (pair, other) = ((HostId(0), HostId(1)), (HostId(0), HostId(2)));
        assert_eq!([ports.pool(pair, 4), ports.pool(other, 4)], [4, 2], "a quarter stays");
        assert_eq!(ports.pool(other, 4), 0);
        let mut held = Vec::new();
        assert_eq!([(); 3].map(|()| ports.take(HostId(0), &mut held)), [16, 17, 0]);
        let text = "[[host]]\nname = \"a\"\n[[host]]\nname = \"b\"\n[[link]]\nfrom = \"a\"\nto = \"b\"\nrate = \"1Gbit/s\"\n";
        let way = Topology::parse(text).unwrap().equal_cost_paths(HostId(0), HostId(1))[0].clone();
        let port = ports.traced_mut(pair, 12).unwrap();
        (port.there, port.back) = (Some(way.clone()), Some(way.reversed()));
        let known = |port: &Port| port.is_symmetric().then_some(0);
        let mut held = Vec::new();
        assert_eq!([(); 2].map(|()| ports.take_traced(pair, &mut held, known)), [Some(12), None]);
        assert!(ports.in_use(pair, 12));
        ports.release(&mut held);
        let mut held = Vec::new();
        let all = [(); 5].map(|()| ports.take_traced(pair, &mut held, |_| Some(0)));
        assert_eq!(all, [Some(10), Some(11), Some(13), Some(12), None], "the longest unused first");
        assert_eq!(ports.take_traced(other, &mut held, |port| port.there.as_ref().map(|_| 0)), None);
    }
}
