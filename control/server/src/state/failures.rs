//! Links that pass nothing any more, and that pass again: found by traces of several agents, never on the word of one while
//! others could tell.

use super::State;
use super::decisions::Trigger;
use super::ports::Pair;
use super::trace::Learned;
use super::verdicts::nanos;
use harmonaize_planner::{DirectedLink, HostId, LinkId, Path};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Hosts that must agree, as far as there are so many who could tell.
const AGREE: usize = 2;

/// Most pairs that are traced anew for one link.
const MOST_ANEW: usize = 512;

/// How long a suspicion stands before pairs are traced for it again.
const SUSPECTED: Duration = Duration::from_millis(300);

/// How long a host's word on a link counts.
const WORD: Duration = Duration::from_secs(10);

/// What hosts' traces tell of links.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// By link: whose packets died there, and when that was told.
    against: BTreeMap<LinkId, BTreeMap<HostId, Duration>>,
    /// By failed link: whose packets have crossed it since.
    failed: BTreeMap<LinkId, BTreeMap<HostId, Duration>>,
    suspected: BTreeMap<LinkId, Duration>,
}

impl State {
    /// Packets are lost on a path: whether some link of it passes nothing, traces tell.
    pub(super) fn suspect(&mut self, now: Duration, path: &Path) {
        let known = path.links().iter().map(|link| link.link);
        for link in known.collect::<BTreeSet<_>>() {
            self.trace_over(now, link);
        }
        self.ask_traces(now);
    }

    /// Has pairs traced anew whose packets may cross a link.
    fn trace_over(&mut self, now: Duration, link: LinkId) {
        let before = self.failures.suspected.get(&link);
        if before.is_some_and(|at| *at + SUSPECTED > now) {
            return;
        }
        self.failures.suspected.insert(link, now);
        let topology = &self.settings.topology;
        let over = |pair: &Pair| {
            let paths = topology.equal_cost_paths(pair.0, pair.1);
            paths.iter().any(|path| path.crosses(link))
        };
        let pairs: Vec<Pair> = self.ports.pairs().filter(over).take(MOST_ANEW).collect();
        self.trace_anew(now, pairs.into_iter());
    }

    /// What an agent's trace of a pair told.
    pub(super) fn paths_learned(&mut self, now: Duration, by: HostId, pair: Pair, learned: &Learned) {
        for link in &learned.dead {
            self.failures.against.entry(link.link).or_default().insert(by, now);
            self.failures.failed.entry(link.link).and_modify(|since| since.clear());
            if self.failures.failed.contains_key(&link.link) {
                continue;
            }
            let agree = self.agreeing(now, link.link);
            if agree >= AGREE.min(self.could_tell(*link)) {
                self.link_failed(now, *link);
            } else {
                self.trace_over(now, link.link);
            }
        }
        for link in &learned.alive {
            if let Some(words) = self.failures.against.get_mut(&link.link) {
                words.remove(&by);
            }
            let Some(since) = self.failures.failed.get_mut(&link.link) else { continue };
            since.insert(by, now);
            let crossed = since.len();
            if crossed >= AGREE.min(self.could_tell(*link)) {
                self.link_restored(now, link.link);
            }
        }
        if learned.moved && learned.dead.is_empty() {
            let (one, other) = (self.host_name(pair.0), self.host_name(pair.1));
            self.want_plan(Trigger::Paths {
                what: format!("connections between {one} and {other} lead another way than was known"),
            });
        }
        self.place_again(now, pair);
    }

    fn agreeing(&mut self, now: Duration, link: LinkId) -> usize {
        let Some(words) = self.failures.against.get_mut(&link) else { return 0 };
        words.retain(|_, at| *at + WORD > now);
        words.len()
    }

    /// How many hosts' agents could find out about a directed link, counted up to as many as must agree; at least one.
    fn could_tell(&self, link: DirectedLink) -> usize {
        let mut hosts = BTreeSet::new();
        for pair in self.ports.pairs() {
            for (from, to) in [pair, (pair.1, pair.0)] {
                if hosts.contains(&from) || !self.can_trace(from) || !self.hosts.contains_key(&to) {
                    continue;
                }
                let paths = self.settings.topology.equal_cost_paths(from, to);
                if paths.iter().any(|path| path.links().contains(&link)) {
                    hosts.insert(from);
                }
                if hosts.len() >= AGREE {
                    return AGREE;
                }
            }
        }
        1
    }

    fn link_failed(&mut self, now: Duration, link: DirectedLink) {
        self.failures.failed.insert(link.link, BTreeMap::new());
        self.failures.suspected.remove(&link.link);
        self.trace_over(now, link.link);
        if self.estimates.fail(&self.settings.topology, nanos(now), link.link) {
            let name = self.settings.topology.link_name(link);
            self.want_plan(Trigger::Paths { what: format!("{name} passes nothing any more") });
        }
    }

    fn link_restored(&mut self, now: Duration, link: LinkId) {
        self.failures.failed.remove(&link);
        self.failures.against.remove(&link);
        self.failures.suspected.remove(&link);
        self.trace_over(now, link);
        if self.estimates.restore(nanos(now), link) {
            let name = self.settings.topology.link_name(DirectedLink { link, forward: true });
            self.want_plan(Trigger::Paths { what: format!("{name} passes packets again") });
        }
    }

    /// A probe crossed a link that counts as failed.
    pub(super) fn crossed(&mut self, now: Duration, by: HostId, path: &Path) {
        let failed = path.links().iter().filter(|link| self.failures.failed.contains_key(&link.link));
        for link in failed.copied().collect::<Vec<_>>() {
            let learned = Learned { alive: [link].into(), ..Learned::default() };
            let ends = (by, by);
            self.paths_learned(now, by, ends, &learned);
            self.trace_over(now, link.link);
        }
        self.ask_traces(now);
    }
}

#[cfg(test)]
impl State {
    /// Links that count as failed.
    pub(super) fn failures_known(&self) -> BTreeSet<LinkId> {
        self.failures.failed.keys().copied().collect()
    }
}
