//! Which paths connections take. Agents trace ports ahead of their use, and again now and then. What they report is kept with
//! the ports.
//!
//! Traces are packets on links that tenants pay for, so they are few: a pair is traced until each of its
//! paths has some ports, then one port of each path every now and then, and nothing is sent across what is
//! withdrawn. Pairs next to each other in rings come first.

mod choose;

use super::LinkState;
use super::paths::pairs_of;
use super::ports::{Pair, pair_of};
use super::routes::{self, MAX_HOPS};
use super::traces::{Direction, PendingTrace, RETRY, When, retry};
use crate::state::ctx::Ctx;
use crate::state::effects::Effects;
use crate::state::output::SessionId;
use choose::TraceChoice;
use harmonaize_abi::CommunicatorId;
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::HostId;
use std::collections::BTreeSet;
use std::time::Duration;

/// Least time between two questions to an agent of which none is urgent.
const PACE: Duration = Duration::from_millis(50);

/// Least time between two orders to trace all ports of a pair anew.
const ANEW: Duration = Duration::from_millis(250);

/// Where packets of RoCE v2 go, by UDP.
const ROCE_PORT: u16 = 4791;

/// How long an agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(4);

/// How many hops beyond the last that answered are traced where the topology lacks the switches on the way.
const FURTHER: usize = 4;

/// Until so many hosts are connected all their pairs are traced; beyond, those that communicators link.
pub(crate) const ALL_PAIRS: usize = 24;

/// How often it is looked at which pairs no communicator links; those twice in a row are forgotten.
const UNLINKED: Duration = Duration::from_secs(600);

impl LinkState {
    /// Has the paths between a communicator's hosts traced, first those between neighbours in its ring. These
    /// alone, unless all pairs are few.
    pub(crate) fn trace_communicator(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, id: CommunicatorId) {
        let Some(known) = ctx.communicators.get(&id) else { return };
        let (ring, others) = pairs_of(known);
        self.want_traced(ctx, ring.iter().copied().chain(others));
        self.trace_first(ring.into_iter());
        self.ask_traces(ctx, effects);
    }

    /// Has these pairs traced from now on.
    pub(crate) fn want_traced(&mut self, ctx: &Ctx<'_>, pairs: impl Iterator<Item = Pair>) {
        for pair in pairs.filter(|pair| pair.0 != pair.1) {
            if ctx.can_trace(pair.0, pair.1) || ctx.can_trace(pair.1, pair.0) {
                self.traces.add(pair, ctx.now);
            }
        }
    }

    /// Has these pairs traced before all others, as far as something of them is not known.
    pub(crate) fn trace_first(&mut self, pairs: impl Iterator<Item = Pair>) {
        for pair in pairs {
            self.traces.urge((pair, false));
            self.traces.urge((pair, true));
        }
    }

    /// Has pairs traced again at once, whatever is known of them.
    pub(crate) fn trace_anew(&mut self, ctx: &Ctx<'_>, pairs: impl Iterator<Item = Pair>) {
        for pair in pairs {
            for direction in [(pair, false), (pair, true)] {
                self.trace_direction_anew(ctx, direction);
            }
        }
    }

    pub(crate) fn trace_direction_anew(&mut self, ctx: &Ctx<'_>, direction: Direction) {
        if let Some(leg) = self.traces.legs.get_mut(&direction) {
            if leg.reported_at.is_none_or(|said| said + ANEW <= ctx.now) {
                (leg.reported_at, leg.anew) = (Some(ctx.now), Some(ctx.now));
            }
            self.traces.urge(direction);
        }
    }

    /// A host's agent has a session: pairs with all that are there, where those are few.
    pub(crate) fn trace_host(&mut self, ctx: &Ctx<'_>, host: HostId) {
        if ctx.hosts.len() <= ALL_PAIRS {
            let others: Vec<HostId> = ctx.hosts.keys().copied().filter(|other| *other != host).collect();
            self.want_traced(ctx, others.into_iter().map(|other| pair_of(host, other)));
        }
        let known: Vec<Pair> = self.ports.pairs().filter(|pair| pair.0 == host || pair.1 == host).collect();
        for pair in known {
            self.traces.hasten((pair, false), ctx.now);
            self.traces.hasten((pair, true), ctx.now);
        }
    }

    /// A host's agent has no session any more.
    pub(crate) fn session_ended(&mut self, host: HostId) {
        self.traces.session_ended(host);
    }

    /// Asks what is due.
    pub(crate) fn ask_traces(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        for pair in self.ports.take_taken() {
            self.traces.hasten((pair, false), ctx.now);
            self.traces.hasten((pair, true), ctx.now);
        }
        for host in self.traces.due(ctx.now) {
            self.ask_traces_of(ctx, effects, host);
        }
    }

    pub(crate) fn ask_traces_of(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, host: HostId) {
        while self.traces.is_free(host) {
            let Some((direction, urgent)) = self.traces.next(ctx.now, host) else { return };
            let (pair, back) = direction;
            let to = if back { pair.0 } else { pair.1 };
            let target = ctx.hosts.get(&to).and_then(|session| ctx.sessions.get(session));
            let asked = ctx.hosts.get(&host).filter(|_| ctx.can_trace(host, to)).copied();
            let (Some(of), Some(target)) = (asked, target.map(|session| session.listen)) else {
                self.traces.put(direction, When::At(ctx.now + RETRY.1));
                continue;
            };
            let chosen = self.choose_or_grow(ctx, direction);
            if chosen.ports.is_empty() {
                if let Some(leg) = self.traces.legs.get_mut(&direction) {
                    (leg.anew, leg.urgent) = (None, false);
                }
                // Never at once again: a moment later at the soonest.
                let next = chosen.next.max(ctx.now + PACE);
                self.traces.put(direction, When::At(next));
                continue;
            }
            if !urgent {
                self.traces.pace(host, ctx.now + PACE);
            }
            self.ask_trace(ctx, effects, direction, of, (host, target), chosen.ports);
        }
    }

    /// What to ask about a direction; a pool in which some path has too few ports grows first.
    fn choose_or_grow(&mut self, ctx: &Ctx<'_>, (pair, back): Direction) -> TraceChoice {
        let anew = self.traces.legs.get(&(pair, back)).and_then(|leg| leg.anew);
        let mut chosen = self.choose(ctx, pair, back, anew);
        if chosen.grow > 0 {
            if self.ports.pool(pair, chosen.grow) > 0 {
                chosen = self.choose(ctx, pair, back, anew);
            } else {
                chosen.explored = true;
            }
        }
        if chosen.explored {
            self.ports.explored(pair);
        }
        chosen
    }

    fn ask_trace(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        (pair, back): Direction,
        of: SessionId,
        (from, target): (HostId, std::net::SocketAddr),
        ports: Vec<u16>,
    ) {
        let own = ctx.hosts.get(&from).and_then(|session| ctx.sessions.get(session));
        let (listen, own) = (target.port(), own.map_or(0, |session| session.listen.port()));
        let queue_pairs = ctx.links_by_queue_pairs(pair);
        let pairs = ports.iter().map(|port| {
            let (source_port, destination_port) = match (queue_pairs, back) {
                // Both ends send from the port.
                (true, _) => (*port, ROCE_PORT),
                (false, false) => (*port, listen),
                (false, true) => (own, *port),
            };
            v1::PortPair { source_port: source_port.into(), destination_port: destination_port.into() }
        });
        let hops = self.hops_of(ctx, pair) as u32;
        let (pairs, deadline) = (pairs.collect(), ctx.now.saturating_add(PATIENCE));
        let direction = (pair, back);
        let question = self.traces.ask(PendingTrace { direction, of, ports, queue_pairs, deadline });
        let address = target.ip().to_string();
        let message = v1::TracePaths { request: question, address, ports: pairs, hops, queue_pairs };
        effects.send(of, to_agent::Message::TracePaths(message));
    }

    /// How far packets between two hosts are traced: over as many switches as the topology has there. Where it lacks those that
    /// answer, further with each question, until no more do.
    fn hops_of(&self, ctx: &Ctx<'_>, pair: Pair) -> usize {
        let switches = ctx.switches_between(pair);
        if !self.is_uncharted(ctx, pair) {
            return switches;
        }
        let furthest = self.routes.between(pair).map(|route| routes::answered(&route.hops)).max();
        furthest.map_or(switches, |hops| switches.max(hops + FURTHER)).min(MAX_HOPS)
    }

    /// When a direction is asked about after its answer, and the other that may have waited for it. One that
    /// is being searched goes on as urgent as it was.
    pub(crate) fn answered(&mut self, ctx: &Ctx<'_>, direction: Direction, told: bool) {
        let Some(leg) = self.traces.legs.get_mut(&direction) else { return };
        let failures = if told { 0 } else { leg.failures.saturating_add(1) };
        let pause = if told { Duration::ZERO } else { retry(leg.failures) };
        leg.failures = failures;
        let urgent = leg.urgent && told;
        let (pair, back) = direction;
        let next = if urgent { When::Urgent } else { When::At(ctx.now.saturating_add(pause)) };
        self.traces.put(direction, next);
        if told && !self.ports.is_explored(pair) {
            match urgent {
                true => self.traces.urge((pair, !back)),
                false => self.traces.hasten((pair, !back), ctx.now),
            }
        }
    }

    /// Questions whose time is over, and new ones.
    pub(crate) fn expire_traces(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        for PendingTrace { direction, .. } in self.traces.take_late(ctx.now) {
            self.answered(ctx, direction, false);
        }
        self.forget_unlinked(ctx);
        self.ask_traces(ctx, effects);
    }

    /// Forgets pairs that no communicator has linked for a while. Their ports and their place are for others. It forgets none
    /// where all pairs are traced anyway.
    fn forget_unlinked(&mut self, ctx: &Ctx<'_>) {
        if ctx.now < self.traces.looked.saturating_add(UNLINKED) {
            return;
        }
        self.traces.looked = ctx.now;
        let before = std::mem::take(&mut self.traces.unlinked);
        if ctx.hosts.len() <= ALL_PAIRS {
            return;
        }
        let linked: BTreeSet<Pair> = ctx
            .communicators
            .values()
            .map(pairs_of)
            .flat_map(|(ring, all)| ring.into_iter().chain(all))
            .collect();
        let known = self.traces.legs.keys().map(|(pair, _)| *pair).chain(self.ports.pairs());
        for pair in known.collect::<BTreeSet<Pair>>() {
            if linked.contains(&pair) || self.ports.is_linked(pair) {
                continue;
            }
            if before.contains(&pair) {
                self.traces.forget(pair);
                self.ports.forget(pair);
            } else {
                self.traces.unlinked.insert(pair);
            }
        }
    }
}
