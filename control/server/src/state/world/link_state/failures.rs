//! Links that pass nothing any more, and that pass again. Traces of several agents find them; one's report
//! alone never counts while others could tell.

use super::LinkState;
use super::ports::Pair;
use super::traces::Learned;
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::job::decisions::Trigger;
use crate::state::time::nanos;
use harmonaize_planner::{DirectedLink, HostId, LinkId, Path};
use std::collections::BTreeSet;
use std::time::Duration;

/// Hosts that must agree, as far as there are so many who could tell.
const AGREE: usize = 2;

/// Most pairs that are traced anew for one link.
const MOST_ANEW: usize = 512;

/// How long a suspicion stands before pairs are traced for it again.
const SUSPECTED: Duration = Duration::from_millis(300);

impl LinkState {
    /// Packets are lost on a path: whether some link of it passes nothing, traces tell.
    pub(crate) fn suspect(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, path: &Path) {
        let known = path.links().iter().map(|link| link.link);
        for link in known.collect::<BTreeSet<_>>() {
            self.trace_over(ctx, link);
        }
        self.ask_traces(ctx, effects);
    }

    /// Has pairs traced anew whose packets may cross a link.
    fn trace_over(&mut self, ctx: &Ctx<'_>, link: LinkId) {
        let before = self.failures.suspected.get(&link);
        if before.is_some_and(|at| *at + SUSPECTED > ctx.now) {
            return;
        }
        self.failures.suspected.insert(link, ctx.now);
        let topology = &ctx.settings.topology;
        let over = |pair: &Pair| {
            let paths = topology.equal_cost_paths(pair.0, pair.1);
            paths.iter().any(|path| path.crosses(link))
        };
        let pairs: Vec<Pair> = self.ports.pairs().filter(over).take(MOST_ANEW).collect();
        self.trace_anew(ctx, pairs.into_iter());
    }

    /// What an agent's trace of a pair told.
    pub(crate) fn paths_learned(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        by: HostId,
        pair: Pair,
        learned: &Learned,
    ) {
        for link in &learned.dead {
            self.failures.against.entry(*link).or_default().insert(by);
            if let Some(since) = self.failures.failed.get_mut(link) {
                since.remove(&by);
                continue;
            }
            let agree = self.failures.agreeing(ctx, *link);
            if agree >= AGREE.min(self.observers(ctx, *link)) {
                self.link_failed(ctx, effects, *link);
            } else {
                self.trace_over(ctx, link.link);
            }
        }
        for link in &learned.alive {
            if let Some(words) = self.failures.against.get_mut(link) {
                words.remove(&by);
            }
            let Some(since) = self.failures.failed.get_mut(link) else { continue };
            since.insert(by);
            let crossed = since.len();
            if crossed >= AGREE.min(self.observers(ctx, *link)) {
                self.link_restored(ctx, effects, *link);
            }
        }
        if learned.moved || learned.first {
            self.active_changed();
            let (one, other) = (ctx.host_name(pair.0), ctx.host_name(pair.1));
            let what = if learned.moved { "lead another way than was known" } else { "lead a known way now" };
            effects
                .want_plan(Trigger::Paths { what: format!("connections between {one} and {other} {what}") });
        }
    }

    /// Returns how many hosts' agents could find out about a directed link. It counts up to as many as must
    /// agree, and at least one.
    fn observers(&self, ctx: &Ctx<'_>, link: DirectedLink) -> usize {
        let mut hosts = BTreeSet::new();
        for pair in self.ports.pairs() {
            for (from, to) in [pair, (pair.1, pair.0)] {
                if hosts.contains(&from) || !ctx.can_trace(from, to) || !ctx.hosts.contains_key(&to) {
                    continue;
                }
                let paths = ctx.settings.topology.equal_cost_paths(from, to);
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

    fn link_failed(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, link: DirectedLink) {
        self.failures.failed.insert(link, BTreeSet::new());
        self.failures.suspected.remove(&link.link);
        self.trace_over(ctx, link.link);
        if self.estimates.fail(&ctx.settings.topology, nanos(ctx.now), link.link) {
            let name = ctx.settings.topology.link_name(link);
            effects.want_plan(Trigger::Paths { what: format!("{name} passes nothing any more") });
        }
    }

    fn link_restored(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, link: DirectedLink) {
        self.failures.failed.remove(&link);
        self.failures.against.remove(&link);
        self.failures.suspected.remove(&link.link);
        self.trace_over(ctx, link.link);
        let whole = !self.failures.failed.contains_key(&link.reversed());
        if whole && self.estimates.restore(nanos(ctx.now), link.link) {
            let name = ctx.settings.topology.link_name(link);
            effects.want_plan(Trigger::Paths { what: format!("{name} passes packets again") });
        }
    }

    /// The topology is another: of links that it has no longer nothing is thought, and ways are traced anew.
    pub(crate) fn topology_changed(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        let topology = &ctx.settings.topology;
        self.estimates.forget_gone(topology);
        let there = |link: LinkId| topology.links().get(link.0).is_some_and(|link| !link.is_gone());
        self.failures.against.retain(|link, _| there(link.link));
        self.failures.failed.retain(|link, _| there(link.link));
        self.failures.suspected.retain(|link, _| there(*link));
        self.active_changed();
        let pairs: Vec<Pair> = self.ports.pairs().take(MOST_ANEW).collect();
        self.trace_anew(ctx, pairs.into_iter());
        self.ask_traces(ctx, effects);
    }

    /// A probe crossed a link that counts as failed.
    pub(crate) fn crossed(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, by: HostId, path: &Path) {
        let failed = path.links().iter().filter(|link| self.failures.failed.contains_key(link));
        for link in failed.copied().collect::<Vec<_>>() {
            let learned = Learned { alive: [link].into(), ..Learned::default() };
            let ends = (by, by);
            self.paths_learned(ctx, effects, by, ends, &learned);
            self.trace_over(ctx, link.link);
        }
        self.ask_traces(ctx, effects);
    }
}

#[cfg(feature = "testing")]
impl LinkState {
    /// Links that count as failed.
    pub(crate) fn failed_links(&self) -> BTreeSet<LinkId> {
        self.failures.failed.keys().map(|link| link.link).collect()
    }
}
