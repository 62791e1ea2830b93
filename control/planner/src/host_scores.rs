//! How good hosts are for one more worker of a job, as scores. The allocator of jobs goes by them, and so do others' schedulers. A host is
//! scored by the predicted time of an AllReduce between it, the job's other workers, and hosts nearby that its further workers could get.

use crate::algorithm::{GroupCosts, HostCosts, delays_by};
use crate::all_to_all::{exchange_usage_by, rate_of_all, usage_by};
use crate::conditions::{Conditions, LinkUse};
use crate::ring_order::{Place, order, place_of};
use crate::tuning::tuning_by;
use harmonaize_topology::{DirectedLink, HostId, Node, Path, PathFinder, Topology};
use harmonaize_units::Bytes;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The score of the best hosts.
pub const MAX_HOST_SCORE: u8 = 10;

/// Most hosts between which an operation is predicted. With more of them the time of a score grows, and its meaning hardly changes.
const MAX_GROUP: usize = 8;

/// In so many steps hosts differ in what others leave of their links. Hosts that do not differ are predicted once.
const STEPS: u64 = 16;

/// Times within this factor are alike.
const SAME: f64 = 1.001;

/// Most hosts between which a job's operation is predicted as a whole. The cost grows with the pairs.
pub const MAX_PREDICTED_HOSTS: usize = 64;

/// What a job's operations are predicted by.
#[derive(Clone, Copy, Debug)]
pub struct Beside<'a> {
    /// The fabric.
    pub topology: &'a Topology,
    /// As it is now.
    pub conditions: &'a Conditions,
    /// How many communicators of other jobs use each link.
    pub others: &'a BTreeMap<DirectedLink, u32>,
    /// Bytes of a typical operation.
    pub operation: Bytes,
}

/// What scores are made of.
#[derive(Clone, Copy, Debug)]
pub struct HostScores<'a> {
    /// What operations are predicted by.
    pub beside: Beside<'a>,
    /// Hosts that the job has.
    pub placed: &'a BTreeSet<HostId>,
    /// Hosts, each once, of which one is to get the job's next worker.
    pub candidates: &'a [HostId],
    /// Workers that the job is to have in all. More than 8 count as 8.
    pub workers: usize,
}

/// Ways over links that are open. Where there are none, over those to avoid too. They are the ways of connections.
struct OpenPaths<'a> {
    open: PathFinder<'a>,
    whole: PathFinder<'a>,
}

impl<'a> OpenPaths<'a> {
    fn new(Beside { topology, conditions, .. }: Beside<'a>) -> Self {
        let open = PathFinder::excluding(topology, move |link| conditions.usable(link) != LinkUse::Open);
        let whole = PathFinder::excluding(topology, move |link| conditions.usable(link) == LinkUse::Failed);
        Self { open, whole }
    }

    fn between(&mut self, from: HostId, to: HostId) -> Vec<Path> {
        let open = self.open.between(from, to);
        if open.is_empty() { self.whole.between(from, to) } else { open }
    }

    /// How many links between switches lie between two hosts; none where there is no way.
    fn crossings(&mut self, from: HostId, to: HostId) -> Option<u64> {
        self.open.crossings(from, to).or_else(|| self.whole.crossings(from, to))
    }
}

/// Hosts that are alike, and what is predicted if one of them gets the next worker.
struct Timed<'a> {
    place: Place<'a>,
    /// Hosts of the job that they reach, and hosts of the group that was predicted.
    size: (usize, usize),
    seconds: f64,
    /// Whether there was no time to predict it, though something may reach it.
    late: bool,
    hosts: Vec<HostId>,
}

/// The place with the most of these hosts. All workers of a job that comes at once are drawn there.
fn largest_place<'a: 't, 't>(kinds: impl Iterator<Item = &'t Timed<'a>>) -> Option<Place<'a>> {
    let mut places: BTreeMap<&Place<'a>, usize> = BTreeMap::new();
    for kind in kinds {
        *places.entry(&kind.place).or_default() += kind.hosts.len();
    }
    let largest = places.into_iter().min_by_key(|(_, hosts)| Reverse(*hosts));
    largest.map(|(place, _)| place.clone())
}

/// What tells hosts apart: where they hang, whether the job has them, and per own link its rate, what is left of it in steps, its use, and
/// how many others take.
type Alike<'a> = (Place<'a>, bool, Vec<(u64, u64, LinkUse, u32)>);

impl<'a> HostScores<'a> {
    /// Scores each candidate from 0 to [`MAX_HOST_SCORE`]. A host that does not reach the others has 0, and no other has. A host with twice
    /// the best one's time has half the score. Of the best, those next to the job's hosts have the full score, and others one less. While
    /// the job has no hosts, one place takes theirs. The same input gives the same scores. Cost: one prediction for each kind of host.
    ///
    /// `late` is asked before each prediction. Once it is, hosts are scored by their place alone, and have half of what is the most there.
    pub fn scores(&self, mut late: impl FnMut() -> bool) -> BTreeMap<HostId, u8> {
        let mut kinds: BTreeMap<Alike<'a>, Vec<HostId>> = BTreeMap::new();
        for host in self.candidates {
            kinds.entry(self.alike(*host)).or_default().push(*host);
        }
        let topology = self.beside.topology;
        let placed: BTreeSet<Place<'a>> = self.placed.iter().map(|host| place_of(topology, *host)).collect();
        // Where there is little time it goes to those that are likely the best.
        let mut kinds: Vec<(Alike<'a>, Vec<HostId>)> = kinds.into_iter().collect();
        kinds.sort_by_key(|((place, ..), _)| !placed.contains(place));
        let pool: BTreeSet<HostId> = self.placed.iter().chain(self.candidates).copied().collect();
        let mut pool: Vec<(Reverse<u64>, HostId)> =
            pool.into_iter().map(|host| (Reverse(self.free(host)), host)).collect();
        pool.retain(|(free, _)| free.0 > 0);
        let mut routes = OpenPaths::new(self.beside);
        let times: Vec<Timed<'a>> = kinds
            .into_iter()
            .map(|((place, ..), hosts)| {
                let first = hosts.first().copied();
                let late = late();
                let timed = first.filter(|_| !late).and_then(|host| self.time(&mut routes, &pool, host));
                let (size, seconds) = timed.unwrap_or(((0, 0), f64::INFINITY));
                let late = late && first.is_some_and(|host| self.free(host) > 0);
                Timed { place, size, seconds, late, hosts }
            })
            .collect();
        // From hosts with fewer the others cannot be reached.
        let size = times.iter().map(|kind| kind.size).max().unwrap_or_default();
        let best = times.iter().filter(|kind| kind.size == size).map(|kind| kind.seconds);
        let best = best.fold(f64::INFINITY, f64::min);
        let is_best = |kind: &&Timed<'a>| kind.size == size && kind.seconds <= best * SAME;
        let near: BTreeSet<Place<'a>> = match self.placed.is_empty() {
            false => placed,
            true => largest_place(times.iter().filter(is_best)).into_iter().collect(),
        };
        let mut scores = BTreeMap::new();
        for kind in &times {
            let most = if near.contains(&kind.place) { MAX_HOST_SCORE } else { MAX_HOST_SCORE - 1 };
            let score = match kind.size == size && kind.seconds.is_finite() {
                false if kind.late => most / 2,
                false => 0,
                true if is_best(&kind) => most,
                true => ((best / kind.seconds * f64::from(MAX_HOST_SCORE)) as u8).clamp(1, most),
            };
            scores.extend(kind.hosts.iter().map(|host| (*host, score)));
        }
        scores
    }

    fn alike(&self, host: HostId) -> Alike<'a> {
        let Beside { topology, conditions, others, .. } = self.beside;
        let mut links: Vec<(u64, u64, LinkUse, u32)> = self
            .own_links(host)
            .map(|(rate, link)| {
                let left = u128::from(conditions.available(link).0) * u128::from(STEPS);
                let steps = u64::try_from(left / u128::from(rate.max(1))).unwrap_or(STEPS);
                let others = others.get(&link).copied().unwrap_or(0);
                (rate, steps, conditions.usable(link), others)
            })
            .collect();
        links.sort_unstable();
        (place_of(topology, host), self.placed.contains(&host), links)
    }

    /// The links of a host with their rates, both directions of each.
    fn own_links(&self, host: HostId) -> impl Iterator<Item = (u64, DirectedLink)> + use<'a> {
        let topology = self.beside.topology;
        let links = topology.links_at(Node::Host(host)).iter();
        let links = links.filter_map(move |link| Some((*link, topology.links().get(link.0)?.rate.0)));
        links.flat_map(|(link, rate)| [true, false].map(|forward| (rate, DirectedLink { link, forward })))
    }

    /// What one more job has of a host's links that are open, in bits a second.
    fn free(&self, host: HostId) -> u64 {
        let Beside { conditions, others, .. } = self.beside;
        let open = self.own_links(host).filter(|(_, link)| conditions.usable(*link) == LinkUse::Open);
        let left = open.map(|(_, link)| {
            let takers = 1 + u64::from(others.get(&link).copied().unwrap_or(0));
            conditions.available(link).0 / takers
        });
        left.fold(0, u64::saturating_add)
    }

    /// The predicted time of an operation in seconds where the next worker gets this host, and its [size](Timed::size); none where nothing
    /// reaches it. Of the job's hosts those that it does not reach are left out. `pool`: hosts that could be in the job, and what each
    /// has left.
    fn time(
        &self,
        routes: &mut OpenPaths<'_>,
        pool: &[(Reverse<u64>, HostId)],
        host: HostId,
    ) -> Option<((usize, usize), f64)> {
        if self.free(host) == 0 {
            return None;
        }
        let reached = self.placed.iter().copied().filter(|known| routes.crossings(*known, host).is_some());
        let mut group: Vec<HostId> = reached.take(MAX_GROUP - 1).collect();
        if group.is_empty() && !self.placed.is_empty() {
            return None;
        }
        let reached = group.len();
        if !group.contains(&host) {
            group.push(host);
        }
        // Every group has as many hosts where it can, so that their times compare.
        let size = self.workers.max(self.placed.len().saturating_add(1)).min(MAX_GROUP);
        let first = group.first().copied().unwrap_or(host);
        let mut nearby: Vec<(u64, Reverse<u64>, HostId)> = pool
            .iter()
            .filter(|(_, other)| !group.contains(other))
            .filter_map(|(free, other)| Some((routes.crossings(first, *other)?, *free, *other)))
            .collect();
        nearby.sort_unstable();
        let lacking = size.saturating_sub(group.len());
        group.extend(nearby.into_iter().take(lacking).map(|(_, _, other)| other));
        Some(((reached, group.len()), self.beside.predict(routes, &group)))
    }
}

impl Beside<'_> {
    /// The least predicted time of an AllReduce between a job's hosts. None for fewer than two, for more than [`MAX_PREDICTED_HOSTS`], and
    /// where one cannot be reached.
    pub fn all_reduce(&self, hosts: &[HostId]) -> Option<Duration> {
        if !(2..=MAX_PREDICTED_HOSTS).contains(&hosts.len()) {
            return None;
        }
        let mut routes = OpenPaths::new(*self);
        let first = *hosts.first()?;
        let reached = hosts.iter().all(|host| routes.crossings(first, *host).is_some());
        let seconds = Some(self.predict(&mut routes, hosts)).filter(|_| reached)?;
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// The least predicted time of an AllReduce in a group, in seconds.
    fn predict(&self, routes: &mut OpenPaths<'_>, group: &[HostId]) -> f64 {
        let Self { topology, conditions, others, .. } = *self;
        let ring: Vec<HostId> =
            order(topology, group).into_iter().filter_map(|at| group.get(at)).copied().collect();
        let hops = ring.iter().zip(ring.iter().cycle().skip(1)).map(|(from, to)| (*from, *to));
        let mut paths = |from, to| routes.between(from, to);
        let along = usage_by(hops.filter(|(from, to)| from != to), 1.0, &mut paths);
        let among = exchange_usage_by(group, &mut paths);
        let (delay, hop_delay) = delays_by(topology, &ring, &mut paths);
        let costs = GroupCosts {
            hosts: u32::try_from(group.len()).unwrap_or(u32::MAX),
            delay,
            hop_delay,
            direct_rate: rate_of_all(among.iter(), conditions, others),
            ring_rate: rate_of_all(along.iter(), conditions, others),
            chunk: tuning_by(topology, group, paths).chunk,
            straight: true,
            host: HostCosts::default(),
            racks: None,
        };
        costs.fastest(self.operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::all_to_all::tests::racks;
    use harmonaize_topology::LinkId;
    use harmonaize_topology::text::{host, link, switch};
    use harmonaize_units::Rate;

    /// Two racks of four hosts, and what is asked about them.
    struct Play {
        topology: Topology,
        conditions: Conditions,
        others: BTreeMap<DirectedLink, u32>,
        hosts: Vec<HostId>,
    }

    impl Play {
        fn new(uplink: &str) -> Self {
            let (topology, hosts) = racks(4, uplink);
            let conditions = Conditions::clear(&topology);
            Self { topology, conditions, others: BTreeMap::new(), hosts }
        }

        /// The scores of hosts from 0 to 7; none of those that are no candidates.
        fn scores(&self, placed: &[usize], candidates: &[usize], workers: usize) -> Vec<Option<u8>> {
            self.scores_of(placed, candidates, workers, usize::MAX)
        }

        /// The same with time for so many predictions.
        fn scores_of(
            &self,
            placed: &[usize],
            candidates: &[usize],
            workers: usize,
            mut predictions: usize,
        ) -> Vec<Option<u8>> {
            let placed = placed.iter().copied().map(HostId).collect();
            let candidates: Vec<HostId> = candidates.iter().copied().map(HostId).collect();
            let scores =
                HostScores { beside: self.beside(), placed: &placed, candidates: &candidates, workers };
            let scores = scores.scores(|| {
                let late = predictions == 0;
                predictions = predictions.saturating_sub(1);
                late
            });
            assert_eq!(scores.len(), candidates.len());
            self.hosts.iter().map(|host| scores.get(host).copied()).collect()
        }

        fn beside(&self) -> Beside<'_> {
            let Self { topology, conditions, others, .. } = self;
            Beside { topology, conditions, others, operation: Bytes(1 << 20) }
        }

        fn link_of(&self, host: usize) -> LinkId {
            self.topology.links_at(Node::Host(HostId(host)))[0]
        }

        /// Both directions of a host's link.
        fn directions(&self, host: usize) -> [DirectedLink; 2] {
            let link = self.link_of(host);
            [true, false].map(|forward| DirectedLink { link, forward })
        }
    }

    const ALL: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

    #[test]
    fn hosts_of_the_same_rack_score_highest() {
        let play = Play::new("8Gbit/s");
        let scores = play.scores(&[5], &ALL, 4);
        assert!(scores[4..].iter().all(|score| *score == Some(10)), "{scores:?}");
        assert!(scores[..4].iter().all(|score| score.is_some_and(|score| score < 10)), "{scores:?}");
        // Alike, where the rack alone tells.
        assert_eq!(scores[0], scores[3]);
        let narrow = Play::new("100Mbit/s").scores(&[5], &ALL, 4);
        assert!(narrow[0] < scores[0], "an uplink that is narrow: {narrow:?}");
    }

    #[test]
    fn contended_links_cost_a_host_its_score() {
        let mut play = Play::new("8Gbit/s");
        for link in play.directions(6) {
            play.others.insert(link, 4);
        }
        for link in play.directions(7) {
            play.conditions.set_available(link, Rate(100_000_000));
        }
        let scores = play.scores(&[5], &ALL, 2);
        assert_eq!(scores[4], Some(10));
        assert!(scores[6] < scores[0] && scores[7] < scores[6], "{scores:?}");
    }

    #[test]
    fn one_place_draws_a_job_that_has_no_hosts() {
        let mut play = Play::new("8Gbit/s");
        let idle = play.scores(&[], &ALL, 4);
        let full = |scores: &[Option<u8>]| scores.iter().filter(|score| **score == Some(10)).count();
        assert_eq!((full(&idle[..4]), full(&idle[4..])), (4, 0), "{idle:?}");
        // Fewer hosts are free there, or its links are others'.
        let fewer = play.scores(&[], &[0, 1, 4, 5, 6, 7], 2);
        assert_eq!((full(&fewer[..4]), full(&fewer[4..])), (0, 4), "{fewer:?}");
        for host in 0..4 {
            for link in play.directions(host) {
                play.others.insert(link, 1);
            }
        }
        let contended = play.scores(&[], &ALL, 4);
        assert_eq!((full(&contended[..4]), full(&contended[4..])), (0, 4), "{contended:?}");
    }

    #[test]
    fn hosts_that_nothing_reaches_score_nothing() {
        let mut play = Play::new("8Gbit/s");
        play.conditions.restrict(play.link_of(6), LinkUse::Failed);
        let scores = play.scores(&[5], &ALL, 4);
        assert_eq!((scores[6], scores[7]), (Some(0), Some(10)));
        // The uplink of the first rack.
        play.conditions.restrict(LinkId(0), LinkUse::Failed);
        let scores = play.scores(&[5], &ALL, 4);
        assert_eq!((scores[0], scores[7]), (Some(0), Some(10)), "{scores:?}");
    }

    #[test]
    fn an_unreached_host_costs_no_other_its_score() {
        let mut play = Play::new("8Gbit/s");
        play.conditions.restrict(play.link_of(6), LinkUse::Failed);
        let scores = play.scores(&[5, 6], &ALL, 4);
        assert_eq!((scores[6], scores[7]), (Some(0), Some(10)), "{scores:?}");
        assert!(scores[0].is_some_and(|score| (1..10).contains(&score)), "{scores:?}");
        // Without the uplink of the first rack, whoever reaches more of the job's hosts gets the worker.
        play.conditions.restrict(LinkId(0), LinkUse::Failed);
        let scores = play.scores(&[0, 4, 5], &ALL, 4);
        assert_eq!((scores[1], scores[7]), (Some(0), Some(10)), "{scores:?}");
        // All that the job has is beyond it.
        assert_eq!(play.scores(&[6], &ALL, 4), [Some(0); 8]);
    }

    #[test]
    fn without_time_a_place_alone_tells() {
        let mut play = Play::new("8Gbit/s");
        play.conditions.restrict(play.link_of(6), LinkUse::Failed);
        let scores = play.scores_of(&[5], &ALL, 4, 0);
        assert_eq!(scores, [4, 4, 4, 4, 5, 5, 0, 5].map(Some));
        // The first prediction is of those beside the job's host.
        let some = play.scores_of(&[5], &[0, 1, 4, 7], 4, 1);
        assert_eq!((some[0], some[4], some[7]), (Some(4), Some(10), Some(10)), "{some:?}");
        let none_placed = play.scores_of(&[], &ALL, 4, 0);
        assert_eq!(none_placed, [5, 5, 5, 5, 4, 4, 0, 4].map(Some));
    }

    #[test]
    fn an_operation_across_a_full_uplink_takes_longer() {
        let mut play = Play::new("1Gbit/s");
        let time = |play: &Play, hosts: [usize; 2]| play.beside().all_reduce(&hosts.map(HostId));
        let (within, across) = (time(&play, [0, 1]).unwrap(), time(&play, [0, 4]).unwrap());
        assert!(within < across, "{within:?} {across:?}");
        for forward in [true, false] {
            play.others.insert(DirectedLink { link: LinkId(0), forward }, 9);
        }
        assert_eq!(time(&play, [0, 1]), Some(within));
        assert!(time(&play, [0, 4]).unwrap() > across * 5);
        play.conditions.restrict(LinkId(0), LinkUse::Failed);
        assert_eq!(time(&play, [0, 4]), None);
        assert_eq!(play.beside().all_reduce(&[HostId(0)]), None);
        assert_eq!(play.beside().all_reduce(&[HostId(0); MAX_PREDICTED_HOSTS + 1]), None);
    }

    #[test]
    fn a_failed_spine_leaves_half_the_rate() {
        let mut text = ["spine0", "spine1", "leaf0", "leaf1"].map(switch).concat();
        for (leaf, spine) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            text += &link(format!("leaf{leaf}"), format!("spine{spine}"), "1Gbit/s", "10us");
        }
        text += &[0, 1].map(|at| host(at, format!("leaf{at}"), "2Gbit/s", "10us")).concat();
        let topology = Topology::parse(&text).unwrap();
        let time = |restricted: &[(usize, LinkUse)]| {
            let mut conditions = Conditions::clear(&topology);
            restricted.iter().for_each(|(link, usable)| conditions.restrict(LinkId(*link), *usable));
            let others = BTreeMap::new();
            let operation = Bytes(16 << 20);
            let beside = Beside { topology: &topology, conditions: &conditions, others: &others, operation };
            beside.all_reduce(&[0, 1].map(HostId)).unwrap()
        };
        let whole = time(&[]);
        for usable in [LinkUse::Failed, LinkUse::Avoid] {
            let half = time(&[(0, usable)]);
            assert!(half > whole.mul_f64(1.8), "{usable:?}: {half:?} {whole:?}");
        }
        // Where both are to be avoided they are used all the same.
        assert_eq!(time(&[(0, LinkUse::Avoid), (1, LinkUse::Avoid)]), whole);
    }

    #[test]
    fn a_drained_uplink_alone_carries_what_it_can() {
        let mut play = Play::new("100Mbit/s");
        let across = |play: &Play| play.beside().all_reduce(&[0, 4].map(HostId)).unwrap();
        let narrow = across(&play);
        play.conditions.restrict(LinkId(0), LinkUse::Avoid);
        assert_eq!(across(&play), narrow);
    }

    #[test]
    fn slow_hosts_are_told_from_unreached_ones() {
        let mut play = Play::new("8Gbit/s");
        for link in play.directions(6) {
            play.conditions.set_available(link, Rate(1_000_000));
        }
        play.conditions.restrict(play.link_of(7), LinkUse::Failed);
        let scores = play.scores(&[5], &ALL, 2);
        assert_eq!((scores[6], scores[7]), (Some(1), Some(0)), "{scores:?}");
    }

    #[test]
    fn any_numbers_of_hosts_and_workers_have_scores() {
        let play = Play::new("1Gbit/s");
        assert_eq!(play.scores(&[], &[], 4), [None; 8]);
        assert_eq!(play.scores(&[], &[3], 0)[3], Some(10));
        assert_eq!(play.scores(&[3], &[3], usize::MAX)[3], Some(10));
        let scores = play.scores(&ALL, &ALL, usize::MAX);
        assert!(scores.iter().all(|score| *score == Some(10)), "{scores:?}");
    }
}
