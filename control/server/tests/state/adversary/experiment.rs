//! A fabric drawn from a seed, and a tenant who wants to know where its ranks stand. It shows what the tenant is told while things
//! happen.

use super::evidence::Evidence;
use super::using::STEP;
use crate::fabric::{CrossTraffic, Fabric};
use crate::topology::leaf_spine;
use crate::world::{SECOND, settings_of};
use harmonaize_abi::session::{Constraints, EventCursor, EventKind, Negotiated};
use harmonaize_abi::{CommunicatorId, CongestionLevel};
use harmonaize_api::v1;
use harmonaize_disclose::{CurrentState, Fact};
use harmonaize_planner::{HostId, delays};
use harmonaize_server::state::testing::Testing as _;
use harmonaize_store::WithdrawalKind;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(super) const RACKS: usize = 4;
const HOSTS: usize = 5;
const SPINES: usize = 2;
/// The adversary's ranks, each on a host of its own.
pub(super) const RANKS: usize = 12;

/// Which communicators the adversary has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strategy {
    /// Every two ranks, all the time.
    Pairs,
    /// Three at a time, so that every two are together in some, all the time.
    Threes,
    /// Half of the ranks, others whenever something may happen.
    Turns,
    /// Two jobs, each of half of the ranks: no adversary, but a tenant at work.
    Jobs,
}

/// What happens for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    Nothing,
    /// A stranger's traffic between a leaf and all spines.
    Stranger,
    /// Another tenant's communicator comes and goes.
    Neighbour,
    /// A link of a leaf is drained.
    Link,
    /// A spine is drained.
    Spine,
    /// A host is drained and taken away.
    Host,
    /// All hosts of a rack are drained, and taken away one after the other.
    Rack,
    /// A window of maintenance is entered for all hosts of a rack, and is called off before it begins.
    CalledOff,
}

/// Draws what happens: of 20.
const MIX: [(Cause, u32); 8] = [
    (Cause::Nothing, 2),
    (Cause::Stranger, 6),
    (Cause::Neighbour, 4),
    (Cause::Link, 3),
    (Cause::Spine, 1),
    (Cause::Host, 2),
    (Cause::Rack, 1),
    (Cause::CalledOff, 1),
];

/// All that came of one fabric.
pub(super) struct Seen {
    /// The rack of each rank: what is to be found out.
    pub racks: Vec<usize>,
    /// One way between two ranks, seconds.
    pub delays: Vec<Vec<f64>>,
    /// What the tenant sees of its own hosts' going: for each time at which some went, which.
    pub gone: Vec<BTreeSet<usize>>,
    /// What it is told.
    pub evidence: Evidence,
    /// What it would be told with nothing between it and what the provider knows.
    pub raw: Evidence,
    /// For each while: what happened, and how slow the tenant was, was told to be, and was known to be.
    pub whiles: Vec<(Cause, [f64; 2])>,
}

struct Experiment {
    fabric: Fabric,
    /// The host of each rank.
    hosts: Vec<usize>,
    /// The rack of each host.
    racks: Vec<usize>,
    strategy: Strategy,
    /// The ranks of each communicator that the adversary has had, by id.
    groups: BTreeMap<u64, Vec<usize>>,
    rng: ChaCha8Rng,
    /// By how much edges are late: of its own, so that what else happens is the same without.
    lateness: ChaCha8Rng,
    /// Hosts that are drained and will be taken away.
    going: BTreeSet<usize>,
    /// Facts that were looked at, and what they left of each communicator's rate.
    read: usize,
    shares: BTreeMap<u64, [f64; 2]>,
    began: Duration,
    samples: Vec<Sample>,
}

/// How two jobs stand at a moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// What is left of each one's rate, what it has been told, and whether it runs.
    pub jobs: [(f64, CurrentState, bool); 2],
    /// Whether a host of each will be taken away.
    pub going: [bool; 2],
    /// When the first sample was taken.
    pub began: Duration,
}

fn topology(rng: &mut ChaCha8Rng, racks: &[usize]) -> String {
    leaf_spine(racks, SPINES, || format!("{}us", rng.random_range(20..60)))
}

/// What the adversary sees of a fabric in so many whiles, and what it asks for.
pub(super) fn watch(seed: u64, strategy: Strategy, whiles: usize, rounds: usize) -> Seen {
    let mut world = Experiment::new(seed, strategy);
    let (mut told, mut raw) = (Evidence::new(), Evidence::new());
    let mut gone = Vec::new();
    if strategy == Strategy::Pairs {
        (0..rounds).for_each(|_| world.meet(&mut told, &mut raw));
    }
    world.regroup();
    world.ask(&mut told, &mut raw, rounds);
    let mut seen = Vec::new();
    for _ in 0..whiles {
        world.regroup();
        let begin = world.here();
        let cause = world.happen(&mut gone);
        let alive: Vec<Vec<usize>> = world.groups.values().cloned().collect();
        let slow = world.listen(begin, &mut told, &mut raw);
        told.end_of_while(&alive);
        raw.end_of_while(&alive);
        seen.push((cause, slow));
    }
    let place = |rank: usize| HostId(world.hosts[rank]);
    let one_way = |i, j| delays(&world.fabric.topology, &[place(i), place(j)]).0.0 as f64 / 1e9;
    Seen {
        racks: world.hosts.iter().map(|host| world.racks[*host]).collect(),
        delays: (0..RANKS).map(|i| (0..RANKS).map(|j| one_way(i, j)).collect()).collect(),
        gone,
        evidence: told,
        raw,
        whiles: seen,
    }
}

/// Two jobs' moments while so much happens.
pub(super) fn watch_jobs(seed: u64, whiles: usize) -> Vec<Sample> {
    let mut world = Experiment::new(seed, Strategy::Jobs);
    world.began = world.fabric.now;
    for _ in 0..whiles {
        world.regroup();
        let _ = world.happen(&mut Vec::new());
    }
    world.samples
}

impl Experiment {
    /// A fabric, and nothing on it.
    fn new(seed: u64, strategy: Strategy) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x5eed);
        let mut racks: Vec<usize> = (0..RACKS * HOSTS).map(|host| host / HOSTS).collect();
        racks.shuffle(&mut rng);
        let mut settings = settings_of(&topology(&mut rng, &racks));
        settings.most_communicators = 128;
        let fabric = Fabric::of(settings, seed, 1, 0);
        let mut hosts: Vec<usize> = (0..racks.len()).collect();
        hosts.shuffle(&mut rng);
        hosts.truncate(RANKS);
        let mut world = Self {
            fabric,
            hosts,
            racks,
            strategy,
            groups: BTreeMap::new(),
            rng,
            lateness: ChaCha8Rng::seed_from_u64(seed ^ 0x1a7e),
            going: BTreeSet::new(),
            read: 0,
            shares: BTreeMap::new(),
            began: Duration::ZERO,
            samples: Vec::new(),
        };
        world.fabric.run(SECOND * 3);
        world
    }

    /// Where feed and facts stand.
    fn here(&mut self) -> (EventCursor, usize) {
        (self.fabric.state.feed_of("a").end(), self.fabric.state.noted_facts().len())
    }

    /// Takes in what has come since. Returns how slow the tenant was told to be at worst, and how much it had lost at worst.
    fn listen(
        &mut self,
        (mut from, facts): (EventCursor, usize),
        evidence: &mut Evidence,
        raw: &mut Evidence,
    ) -> [f64; 2] {
        let (mut worst, mut least) = (CongestionLevel::None, 1.0_f64);
        loop {
            let batch = self.fabric.state.feed_of("a").read(from).unwrap();
            assert_eq!(batch.missed, 0);
            if batch.events.is_empty() {
                break;
            }
            from = batch.cursor;
            for event in batch.events {
                if let EventKind::Congestion(level) = event.kind {
                    worst = worst.max(level);
                }
                evidence.event(&event);
            }
        }
        for (at, id, fact) in self.fabric.state.noted_facts().split_off(facts) {
            let Some(group) = self.groups.get(&id.0) else { continue };
            if let Fact::Congestion { share } = &fact {
                least = least.min(*share);
            }
            raw.fact(at, group, &fact);
        }
        [f64::from(worst as u8), 1.0 - least]
    }

    /// Forms pairs one after the other, in turn with listening: whether the latest meets one before on a link.
    fn meet(&mut self, told: &mut Evidence, raw: &mut Evidence) {
        let mut before = Vec::new();
        for pair in self.draw_pairs() {
            let begin = self.here();
            self.form(pair.clone());
            self.fabric.run(SECOND * 3);
            self.listen(begin, told, raw);
            told.met(&before, &pair);
            raw.met(&before, &pair);
            before.extend(pair);
        }
        self.dissolve_all();
    }

    /// All ranks in pairs, by chance.
    fn draw_pairs(&mut self) -> Vec<Vec<usize>> {
        let mut ranks: Vec<usize> = (0..RANKS).collect();
        ranks.shuffle(&mut self.rng);
        ranks.chunks_mut(2).for_each(<[usize]>::sort_unstable);
        ranks.chunks(2).map(<[usize]>::to_vec).collect()
    }

    fn dissolve_all(&mut self) {
        for id in std::mem::take(&mut self.groups).into_keys() {
            self.fabric.dissolve(id);
        }
        self.fabric.run(SECOND * 2);
    }

    /// Has the communicators that it wants to have.
    fn regroup(&mut self) {
        let running = self.fabric.ids();
        self.groups.retain(|id, _| running.contains(id));
        match self.strategy {
            Strategy::Pairs => {
                for i in 0..RANKS {
                    for j in i + 1..RANKS {
                        if !self.groups.values().any(|group| *group == [i, j]) {
                            self.form(vec![i, j]);
                        }
                    }
                }
            }
            Strategy::Threes => {
                let of = |groups: &BTreeMap<u64, Vec<usize>>, i: usize, j: usize| {
                    groups.values().any(|group| group.contains(&i) && group.contains(&j))
                };
                for (i, j) in (0..RANKS).flat_map(|i| (i + 1..RANKS).map(move |j| (i, j))) {
                    if of(&self.groups, i, j) {
                        continue;
                    }
                    // A third whom neither has met, if there is one.
                    let third = (0..RANKS).filter(|k| *k != i && *k != j);
                    let met = |k: &usize| [i, j].into_iter().filter(|a| of(&self.groups, *a, *k)).count();
                    let mut ranks = vec![i, j, third.min_by_key(met).unwrap()];
                    ranks.sort_unstable();
                    self.form(ranks);
                }
            }
            Strategy::Jobs => {
                for first in [0, RANKS / 2] {
                    let ranks: Vec<usize> = (first..first + RANKS / 2).collect();
                    if !self.groups.values().any(|group| *group == ranks) {
                        self.form(ranks);
                    }
                }
            }
            Strategy::Turns => {
                self.dissolve_all();
                let mut ranks: Vec<usize> = (0..RANKS).collect();
                ranks.shuffle(&mut self.rng);
                ranks.truncate(RANKS / 2);
                ranks.sort_unstable();
                self.form(ranks);
            }
        }
        self.pass(SECOND * 4);
    }

    fn form(&mut self, ranks: Vec<usize>) {
        let hosts: Vec<usize> = ranks.iter().map(|rank| self.hosts[*rank]).collect();
        let id = self.fabric.form("a", &super::evidence::name(&ranks), &hosts);
        self.groups.insert(id, ranks);
    }

    /// Asks for what cannot be had, and reads from its receipts how operations of which size go.
    fn ask(&mut self, told: &mut Evidence, raw: &mut Evidence, rounds: usize) {
        if self.strategy != Strategy::Pairs {
            return;
        }
        let shortest = Constraints::new().p99(64, Duration::from_micros(10));
        let groups = self.groups.clone();
        for (id, group) in &groups {
            let [i, j] = group[..] else { continue };
            let recipe = self.fabric.recipe_of(self.hosts[i], *id);
            let sizes = crate::direct::sizes(&recipe);
            let place = [HostId(self.hosts[i]), HostId(self.hosts[j])];
            let exact = delays(&self.fabric.topology, &place).0.0 as f64;
            let answer = self.fabric.negotiate("a", &super::evidence::name(group), Some(&shortest));
            if let Some(Ok(Negotiated::Refused { counter: Some(counter), .. })) = answer
                && let Some(target) = counter.completions.first()
            {
                told.time(i, j, target.p99.as_secs_f64());
            }
            told.sizes(i, j, sizes);
            raw.time(i, j, exact / 1e9);
            raw.sizes(i, j, sizes);
        }
        // All that its hosts can send, for six pairs one after the other; then it gives it back.
        for _ in 0..rounds {
            let pairs = self.draw_pairs();
            for pair in &pairs {
                let name = super::evidence::name(pair);
                let mut had = 0;
                let mut wanted = Constraints::new().min_busbw(100_000_000);
                for _ in 0..2 {
                    match self.fabric.negotiate("a", &name, Some(&wanted)) {
                        Some(Ok(Negotiated::Agreed(agreed))) => {
                            had = agreed.constraints.min_busbw;
                            break;
                        }
                        Some(Ok(Negotiated::Refused { counter: Some(counter), .. })) => wanted = counter,
                        other => panic!("{other:?}"),
                    }
                }
                told.rate(pair[0], pair[1], had);
                raw.rate(pair[0], pair[1], had);
            }
            for pair in &pairs {
                let _ = self.fabric.negotiate("a", &super::evidence::name(pair), Some(&Constraints::new()));
            }
            self.fabric.run(SECOND * 61);
        }
    }

    /// Goes on for so long, and looks at the jobs meanwhile.
    fn pass(&mut self, time: Duration) {
        if self.strategy != Strategy::Jobs {
            return self.fabric.run(time);
        }
        let until = self.fabric.now + time;
        while self.fabric.now < until {
            self.fabric.run(Duration::from_secs_f64(STEP));
            let facts = self.fabric.state.noted_facts()[self.read..].to_vec();
            self.read += facts.len();
            for (_, id, fact) in facts {
                if let Fact::Congestion { share } | Fact::Capacity { share } = fact {
                    self.shares.entry(id.0).or_insert([1.0; 2])
                        [usize::from(matches!(fact, Fact::Capacity { .. }))] = share;
                }
            }
            let running = self.fabric.ids();
            let mut sample = Sample { jobs: [(1.0, CurrentState::default(), false); 2], ..Sample::default() };
            for (id, ranks) in &self.groups {
                let job = ranks[0] / (RANKS / 2);
                let share = self.shares.get(id).map_or(1.0, |[one, other]| one.min(*other));
                let standing = self.fabric.state.feed_of("a").current_state(CommunicatorId(*id));
                sample.jobs[job] = (share, standing, running.contains(id));
                sample.going[job] = ranks.iter().any(|rank| self.going.contains(&self.hosts[*rank]));
            }
            sample.began = self.began;
            self.samples.push(sample);
        }
    }

    /// Agents find whose bytes move late in each communicator's ring, or that none do. Bytes are late while the links of a rack are
    /// full, up or down.
    fn find_late(&mut self, full: Option<(usize, bool)>) {
        let mut found: BTreeMap<usize, Vec<v1::Straggler>> =
            self.hosts.iter().map(|host| (*host, Vec::new())).collect();
        for (id, group) in &self.groups {
            let Some((rack, up)) = full else { continue };
            let order = self.fabric.recipe_of(self.hosts[group[0]], *id).order;
            let of = |at: usize| group[order[at % order.len()] as usize];
            let is_in = |rank: usize| self.racks[self.hosts[rank]] == rack;
            let mut late: BTreeMap<(usize, usize), u64> = BTreeMap::new();
            for (from, to) in (0..order.len()).map(|at| (of(at), of(at + 1))) {
                if is_in(from) != is_in(to) && is_in(from) == up {
                    late.insert((from, to), self.lateness.random_range(1..20) * 1_000_000);
                }
            }
            let sum = |rank: usize| -> u64 {
                late.iter().filter(|((from, to), _)| *from == rank || *to == rank).map(|(_, by)| by).sum()
            };
            // Whom the analysis would name: the end that has more of it, the sender where that is the same.
            for ((from, to), by) in &late {
                let named = if sum(*to) > sum(*from) { *to } else { *from };
                let rank = group.iter().position(|rank| *rank == named).unwrap() as u32;
                found.entry(self.hosts[named]).or_default().push(v1::Straggler {
                    communicator: *id,
                    rank,
                    cause: v1::StragglerCause::Network.into(),
                    delay_ns: *by,
                    ..v1::Straggler::default()
                });
            }
        }
        for (host, found) in found {
            self.fabric.state.take_stragglers(self.fabric.now, HostId(host), found);
        }
        self.fabric.run_until_quiet();
    }

    /// Something happens, and is over again.
    fn happen(&mut self, gone: &mut Vec<BTreeSet<usize>>) -> Cause {
        let mut draw = self.rng.random_range(0..MIX.iter().map(|(_, part)| part).sum());
        let drawn = MIX.iter().find(|(_, part)| {
            let here = draw < *part;
            draw = draw.saturating_sub(*part);
            here
        });
        let cause = drawn.map_or(Cause::Nothing, |(cause, _)| *cause);
        let rack = self.rng.random_range(0..RACKS);
        match cause {
            Cause::Nothing => self.pass(SECOND * 20),
            Cause::Stranger => {
                let bits = self.rng.random_range(4..9) * 100_000_000;
                let up = self.rng.random_bool(0.5);
                for spine in 0..SPINES {
                    let (leaf, spine) = (format!("leaf{rack}"), format!("spine{spine}"));
                    let (from, to) = if up { (leaf, spine) } else { (spine, leaf) };
                    let link = self.fabric.link(&from, &to);
                    let number = self.fabric.cross_traffic.len() as u32;
                    self.fabric.cross_traffic.insert(number, CrossTraffic { link, bits });
                }
                self.fabric.sample_all();
                self.pass(SECOND * 5);
                self.find_late(Some((rack, up)));
                self.pass(SECOND * 10);
                self.fabric.calm();
                self.find_late(None);
                self.pass(SECOND * 20);
            }
            Cause::Neighbour => {
                let mut hosts: Vec<usize> = (0..self.racks.len()).collect();
                hosts.shuffle(&mut self.rng);
                hosts.truncate(self.rng.random_range(4..10));
                let id = self.fabric.form("b", "b", &hosts);
                self.pass(SECOND * 15);
                self.fabric.dissolve(id);
                self.pass(SECOND * 5);
            }
            Cause::Link | Cause::Spine => {
                let spine = format!("spine{}", self.rng.random_range(0..SPINES));
                let target = if cause == Cause::Spine { spine } else { format!("leaf{rack}:{spine}") };
                self.fabric.drain(&target);
                self.pass(SECOND * 15);
                self.fabric.end_drain(&target);
                self.pass(SECOND * 15);
            }
            Cause::CalledOff => {
                let minutes = self.rng.random_range(2..60);
                let from = (self.fabric.now + SECOND * 60 * minutes).as_nanos() as u64;
                let window = (from, from + 600_000_000_000);
                let of_rack = |host: &usize| self.racks[*host] == rack;
                let hosts: Vec<usize> = (0..self.racks.len()).filter(of_rack).collect();
                for host in &hosts {
                    let (host, kind) = (format!("h{host}"), WithdrawalKind::Maintenance);
                    self.fabric.withdraw(&host, kind, window);
                }
                self.pass(SECOND * 15);
                for host in &hosts {
                    self.fabric.restore(&format!("h{host}"), WithdrawalKind::Maintenance);
                }
                self.pass(SECOND * 5);
            }
            Cause::Host | Cause::Rack => {
                let of_rack = |host: &usize| self.racks[*host] == rack;
                let mut hosts: Vec<usize> = (0..self.racks.len()).filter(of_rack).collect();
                if cause == Cause::Host {
                    hosts.truncate(1);
                }
                for host in &hosts {
                    self.fabric.drain(&format!("h{host}"));
                }
                self.going = hosts.iter().copied().collect();
                self.pass(SECOND * 15);
                for host in &hosts {
                    self.fabric.kill(*host);
                    self.pass(SECOND);
                }
                // No process runs there then: that needs nobody to tell.
                gone.push((0..RANKS).filter(|rank| hosts.contains(&self.hosts[*rank])).collect());
                self.pass(SECOND * 5);
                self.going.clear();
                hosts.iter().for_each(|host| self.fabric.connect(*host));
                for host in &hosts {
                    self.fabric.end_drain(&format!("h{host}"));
                }
                self.pass(SECOND * 10);
            }
        }
        cause
    }
}
