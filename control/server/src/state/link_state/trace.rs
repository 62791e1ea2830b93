//! Which way connections take: agents trace ports ahead of their use, and again now and then; what they say is kept with the ports.
//!
//! Traces are packets on links that tenants pay for, so they are few: a pair is traced until each of its paths has some ports, then one
//! port of each path every now and then, and nothing is sent across what is withdrawn. Pairs next to each other in rings come first.

mod choose;

use super::LinkState;
use super::paths::pairs_of;
use super::ports::{Pair, Sample, pair_of};
use crate::state::effects::{Ctx, Effects};
use crate::state::{Fact, SessionId};
use choose::TraceChoice;
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::{DirectedLink, HostId, Path, Topology};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

/// Ports that a question asks about, and ports that a pool begins with and grows by: agents take up to 64.
pub(super) const BATCH: usize = 24;

/// Questions that an agent has at a time.
const MOST_OPEN: usize = 2;

/// Least time between two questions to an agent of which none is urgent.
const PACE: Duration = Duration::from_millis(50);

/// Least time between two orders to trace all ports of a pair anew.
const ANEW: Duration = Duration::from_millis(250);

/// How long an agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(4);

/// First and last pause after a question without an answer, and before a port is asked about again of which no way was told.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// Until so many hosts are connected all their pairs are traced; beyond, those that communicators link.
pub(super) const ALL_PAIRS: usize = 24;

/// Most pairs that are traced.
pub(super) const MOST_PAIRS: usize = 16384;

/// Most addresses that are told of for being no switch's.
pub(in crate::state) const MOST_STRANGE: usize = 32;

/// How often it is looked at which pairs no communicator links; those twice in a row are forgotten.
const UNLINKED: Duration = Duration::from_secs(600);

/// Ports that must die at a link, and none pass it, for it to count as failed.
const DEATHS: usize = 2;

/// One direction of a pair: whether it is the way back.
type Direction = (Pair, bool);

/// Who asks about a direction.
fn asker((pair, back): Direction) -> HostId {
    if back { pair.1 } else { pair.0 }
}

/// What is asked, and when what is asked next.
#[derive(Debug, Default)]
pub(super) struct Traces {
    next_trace: u64,
    open: BTreeMap<u64, PendingTrace>,
    legs: BTreeMap<Direction, Leg>,
    queues: BTreeMap<HostId, Queue>,
    /// When each host's agent is next to be asked something, if it has room for a question.
    due: BTreeSet<(Duration, HostId)>,
    busy: BTreeMap<SessionId, usize>,
    /// Addresses that answered, are no switch's in the topology, and were told of.
    strange: BTreeSet<IpAddr>,
    /// Pairs that no communicator linked when that was looked at last, and when.
    unlinked: BTreeSet<Pair>,
    looked: Duration,
}

/// What a host's agent is to be asked.
#[derive(Debug, Default)]
struct Queue {
    urgent: BTreeSet<Direction>,
    due: BTreeSet<(Duration, Direction)>,
    /// Nothing but what is urgent is asked before.
    paced: Duration,
    /// As it stands in [`Traces::due`].
    at: Option<Duration>,
}

impl Queue {
    fn next(&self) -> Option<Duration> {
        let first = self.due.first().map(|(at, _)| (*at).max(self.paced));
        self.urgent.first().map(|_| Duration::ZERO).or(first)
    }
}

/// A question that waits for its answer.
#[derive(Debug)]
struct PendingTrace {
    direction: Direction,
    of: SessionId,
    ports: Vec<u16>,
    deadline: Duration,
}

/// When a direction is asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// A question is open.
    Open,
    /// Before all that is not urgent.
    Urgent,
    At(Duration),
}

/// One direction of a pair.
#[derive(Debug)]
struct Leg {
    when: When,
    /// Until nothing more is to be asked, all comes before what is not.
    urgent: bool,
    failures: u32,
    /// All that was learned before then is to be traced again.
    anew: Option<Duration>,
    /// When that was last said.
    reported_at: Option<Duration>,
}

/// What an answer says of the fabric.
#[derive(Debug, Default)]
pub(super) struct Learned {
    /// Whether a port leads another way than was known.
    pub moved: bool,
    /// Whether the way of a port was not known before.
    pub first: bool,
    /// Links that packets died at or are led around.
    pub dead: BTreeSet<DirectedLink>,
    /// Links that packets crossed.
    pub alive: BTreeSet<DirectedLink>,
}

impl Traces {
    /// When the next question or the end of one is due, as far as agents may be asked: an answer makes room.
    fn deadline(&self, free: impl Fn(HostId) -> bool) -> Option<Duration> {
        let due = self.due.iter().find(|(_, host)| free(*host)).map(|(at, _)| *at);
        let ends = self.open.values().map(|asked| asked.deadline);
        due.into_iter().chain(ends).min()
    }

    /// Hosts whose agents are to be asked something by then, if they have room for a question.
    fn due(&self, now: Duration) -> BTreeSet<HostId> {
        self.due.range(..=(now, HostId(usize::MAX))).map(|(_, host)| *host).collect()
    }

    /// What a host's agent is to be asked has changed.
    fn queue_changed(&mut self, host: HostId) {
        let Some(queue) = self.queues.get_mut(&host) else { return };
        let next = queue.next();
        if let Some(at) = queue.at.take_if(|at| next != Some(*at)) {
            self.due.remove(&(at, host));
        }
        if queue.at.is_none() {
            queue.at = next;
            self.due.extend(next.map(|at| (at, host)));
        }
    }

    /// Nothing more is asked of a host's agent for a while but what is urgent.
    fn pace(&mut self, host: HostId, until: Duration) {
        if let Some(queue) = self.queues.get_mut(&host) {
            queue.paced = until;
            self.queue_changed(host);
        }
    }

    /// Says when a direction is asked about, whatever it was to be before.
    fn put(&mut self, direction: Direction, when: When) {
        let Some(leg) = self.legs.get_mut(&direction) else { return };
        let queue = self.queues.entry(asker(direction)).or_default();
        match std::mem::replace(&mut leg.when, when) {
            When::Urgent => drop(queue.urgent.remove(&direction)),
            When::At(at) => drop(queue.due.remove(&(at, direction))),
            When::Open => {}
        }
        match when {
            When::Urgent => drop(queue.urgent.insert(direction)),
            When::At(at) => drop(queue.due.insert((at, direction))),
            When::Open => {}
        }
        self.queue_changed(asker(direction));
    }

    /// A direction is asked about at that time, or sooner if it was to be sooner.
    fn hasten(&mut self, direction: Direction, at: Duration) {
        if let Some(When::At(before)) = self.legs.get(&direction).map(|leg| leg.when)
            && at < before
        {
            self.put(direction, When::At(at));
        }
    }

    /// A direction is asked about before all that is not urgent.
    fn urge(&mut self, direction: Direction) {
        let Some(leg) = self.legs.get_mut(&direction) else { return };
        leg.urgent = true;
        if leg.when != When::Open {
            self.put(direction, When::Urgent);
        }
    }

    fn add(&mut self, pair: Pair, at: Duration) {
        for direction in [(pair, false), (pair, true)] {
            if self.legs.len() < MOST_PAIRS * 2 && !self.legs.contains_key(&direction) {
                let leg = Leg { when: When::Open, urgent: false, failures: 0, anew: None, reported_at: None };
                self.legs.insert(direction, leg);
                self.put(direction, When::At(at));
            }
        }
    }

    fn forget(&mut self, pair: Pair) {
        for direction in [(pair, false), (pair, true)] {
            // Out of the queues.
            self.put(direction, When::Open);
            self.legs.remove(&direction);
        }
    }

    /// What a host is asked next, if anything is due.
    fn next(&self, now: Duration, host: HostId) -> Option<(Direction, bool)> {
        let queue = self.queues.get(&host)?;
        if let Some(direction) = queue.urgent.first() {
            return Some((*direction, true));
        }
        let due = queue.due.first().filter(|(at, _)| *at <= now && queue.paced <= now);
        due.map(|(_, direction)| (*direction, false))
    }

    fn close(&mut self, question: u64) -> Option<PendingTrace> {
        let asked = self.open.remove(&question)?;
        if let Some(busy) = self.busy.get_mut(&asked.of) {
            *busy = busy.saturating_sub(1);
        }
        Some(asked)
    }
}

impl LinkState {
    /// Has these pairs traced from now on.
    pub(super) fn want_traced(&mut self, ctx: &Ctx<'_>, pairs: impl Iterator<Item = Pair>) {
        for pair in pairs.filter(|pair| pair.0 != pair.1) {
            if ctx.can_trace(pair.0) || ctx.can_trace(pair.1) {
                self.traces.add(pair, ctx.now);
            }
        }
    }

    /// Has these pairs traced before all others, as far as something of them is not known.
    pub(super) fn trace_first(&mut self, pairs: impl Iterator<Item = Pair>) {
        for pair in pairs {
            self.traces.urge((pair, false));
            self.traces.urge((pair, true));
        }
    }

    /// Has pairs traced again at once, whatever is known of them.
    pub(super) fn trace_anew(&mut self, ctx: &Ctx<'_>, pairs: impl Iterator<Item = Pair>) {
        for pair in pairs {
            for direction in [(pair, false), (pair, true)] {
                self.trace_direction_anew(ctx, direction);
            }
        }
    }

    fn trace_direction_anew(&mut self, ctx: &Ctx<'_>, direction: Direction) {
        if let Some(leg) = self.traces.legs.get_mut(&direction) {
            if leg.reported_at.is_none_or(|said| said + ANEW <= ctx.now) {
                (leg.reported_at, leg.anew) = (Some(ctx.now), Some(ctx.now));
            }
            self.traces.urge(direction);
        }
    }

    /// A host's agent has a session: pairs with all that are there, where those are few.
    pub(in crate::state) fn trace_host(&mut self, ctx: &Ctx<'_>, host: HostId) {
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

    /// When something is to be asked, or a question has waited long enough.
    pub(super) fn trace_deadline(&self, ctx: &Ctx<'_>) -> Option<Duration> {
        self.traces.deadline(|host| self.is_free(ctx, host))
    }

    fn is_free(&self, ctx: &Ctx<'_>, host: HostId) -> bool {
        let busy = ctx.hosts.get(&host).and_then(|session| self.traces.busy.get(session));
        busy.copied().unwrap_or(0) < MOST_OPEN
    }

    /// Asks what is due.
    pub(in crate::state) fn ask_traces(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        for pair in self.ports.take_taken() {
            self.traces.hasten((pair, false), ctx.now);
            self.traces.hasten((pair, true), ctx.now);
        }
        for host in self.traces.due(ctx.now) {
            self.ask_traces_of(ctx, effects, host);
        }
    }

    fn ask_traces_of(&mut self, ctx: &Ctx<'_>, effects: &mut Effects, host: HostId) {
        while self.is_free(ctx, host) {
            let Some((direction, urgent)) = self.traces.next(ctx.now, host) else { return };
            let (pair, back) = direction;
            let to = if back { pair.0 } else { pair.1 };
            let target = ctx.hosts.get(&to).and_then(|session| ctx.sessions.get(session));
            let asked = ctx.hosts.get(&host).filter(|_| ctx.can_trace(host)).copied();
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
        let pairs = ports.iter().map(|port| match back {
            false => v1::PortPair { source_port: u32::from(*port), destination_port: u32::from(listen) },
            true => v1::PortPair { source_port: u32::from(own), destination_port: u32::from(*port) },
        });
        let hops = ctx.switches_between(pair) as u32;
        self.traces.next_trace += 1;
        let question = self.traces.next_trace;
        let message = v1::TracePaths {
            request: question,
            address: target.ip().to_string(),
            ports: pairs.collect(),
            hops: hops.clamp(1, 16),
        };
        let deadline = ctx.now.saturating_add(PATIENCE);
        self.traces.put((pair, back), When::Open);
        self.traces.open.insert(question, PendingTrace { direction: (pair, back), of, ports, deadline });
        *self.traces.busy.entry(of).or_default() += 1;
        effects.send(of, to_agent::Message::TracePaths(message));
    }

    /// An agent's answer. Whatever it says, it is about the ports that were asked for.
    pub(in crate::state) fn traced(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        from: SessionId,
        answer: &v1::PathsTraced,
    ) {
        if self.traces.open.get(&answer.request).is_none_or(|asked| asked.of != from) {
            return;
        }
        let Some(asked) = self.traces.close(answer.request) else { return };
        let (pair, back) = asked.direction;
        let most = ctx.switches_between(pair);
        let asked_ports: BTreeSet<u16> = asked.ports.iter().copied().collect();
        let mut seen: BTreeMap<u16, Vec<Option<IpAddr>>> = BTreeMap::new();
        for path in answer.paths.iter().take(BATCH) {
            let port = if back { path.destination_port } else { path.source_port };
            let Some(port) = u16::try_from(port).ok().filter(|port| asked_ports.contains(port)) else {
                continue;
            };
            let hops = path.hops.iter().map(|hop| hop.parse().ok()).chain(std::iter::repeat(None));
            seen.insert(port, hops.take(most).collect());
        }
        let mut learned = Learned::default();
        let mut died: BTreeMap<DirectedLink, usize> = BTreeMap::new();
        for (port, hops) in &seen {
            self.report_unknown_hops(ctx, effects, asker(asked.direction), hops);
            self.learn(ctx, (pair, back), *port, hops, &mut learned, &mut died);
        }
        let dead = died.iter().filter(|(link, count)| **count >= DEATHS && !learned.alive.contains(link));
        learned.dead = dead.map(|(link, _)| *link).collect();
        self.answered(ctx, asked.direction, !seen.is_empty());
        if !died.is_empty() {
            // Whether others die there too decides.
            self.trace_direction_anew(ctx, asked.direction);
        }
        self.paths_learned(ctx, effects, asker(asked.direction), pair, &learned);
        self.ask_traces_of(ctx, effects, pair.0);
        self.ask_traces_of(ctx, effects, pair.1);
    }

    /// Tells of addresses on a way that no switch of the topology has, once of each: the way stays unknown for them.
    fn report_unknown_hops(
        &mut self,
        ctx: &Ctx<'_>,
        effects: &mut Effects,
        asker: HostId,
        hops: &[Option<IpAddr>],
    ) {
        for address in hops.iter().flatten() {
            let known = ctx.settings.topology.switch_at(*address).is_some();
            if known || self.traces.strange.len() >= MOST_STRANGE || !self.traces.strange.insert(*address) {
                continue;
            }
            let host = ctx.host_name(asker);
            effects.fact(Fact::UnknownHop { host, address: address.to_string() });
        }
    }

    /// When a direction is asked about after its answer, and the other that may have waited for it. One that is being searched goes on
    /// as urgent as it was.
    fn answered(&mut self, ctx: &Ctx<'_>, direction: Direction, told: bool) {
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

    /// Takes in the way of one port, and which links it tells to be alive, or dead because it was known to cross them.
    fn learn(
        &mut self,
        ctx: &Ctx<'_>,
        (pair, back): Direction,
        number: u16,
        hops: &[Option<IpAddr>],
        learned: &mut Learned,
        died: &mut BTreeMap<DirectedLink, usize>,
    ) {
        let topology = &ctx.settings.topology;
        let (from, to) = if back { (pair.1, pair.0) } else { pair };
        let found = topology.traced_path(from, to, hops).ok();
        let Some(port) = self.ports.traced_mut(pair, number) else { return };
        let leg = if back { &mut port.back } else { &mut port.there };
        let before = leg.clone();
        let broken = before.as_ref().and_then(|before| broken_at(topology, before, hops));
        // A switch that did not answer, while one behind it did, tells nothing new.
        let kept = before.clone().filter(|_| found.is_none() && broken.is_none());
        let found = found.or(kept);
        leg.clone_from(&found);
        if let Some(look) = port.samples.get_mut(usize::from(back)) {
            let silent = if found.is_some() { 0 } else { look.silent.saturating_add(1) };
            *look = Sample { at: Some(ctx.now), silent };
        }
        learned.moved |= before.is_some() && before != found;
        learned.first |= before.is_none() && found.is_some();
        learned.alive.extend(found.iter().flat_map(|path| path.links()));
        if let Some(link) = broken {
            *died.entry(link).or_default() += 1;
        }
    }

    /// Questions whose time is over, and new ones.
    pub(super) fn expire_traces(&mut self, ctx: &Ctx<'_>, effects: &mut Effects) {
        let late: Vec<u64> = self
            .traces
            .open
            .iter()
            .filter(|(_, asked)| asked.deadline <= ctx.now || !ctx.sessions.contains_key(&asked.of))
            .map(|(question, _)| *question)
            .collect();
        for question in late {
            let Some(asked) = self.traces.close(question) else { continue };
            self.answered(ctx, asked.direction, false);
        }
        let sessions = &ctx.sessions;
        self.traces.busy.retain(|session, _| sessions.contains_key(session));
        self.forget_unlinked(ctx);
        self.ask_traces(ctx, effects);
    }

    /// Forgets pairs that no communicator has linked for a while, where not all are traced anyway: their ports and their place are for
    /// others.
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

/// The first link of a known path that packets do not cross any more: another switch answered than the one behind it, or nobody from
/// there on. None where nobody answered at all: that tells of the question, not of the path.
fn broken_at(topology: &Topology, known: &Path, hops: &[Option<IpAddr>]) -> Option<DirectedLink> {
    let named: Vec<_> = hops.iter().map(|hop| hop.and_then(|hop| topology.switch_at(hop))).collect();
    let switches = topology.switches_of(known);
    let differs = named.iter().zip(&switches).position(|(hop, known)| hop.is_some_and(|hop| hop != *known));
    let last = named.iter().rposition(Option::is_some)?;
    let silent = (last + 1 < switches.len()).then_some(last + 1);
    known.links().get(differs.or(silent)?).copied()
}

fn retry(failures: u32) -> Duration {
    RETRY.0.saturating_mul(1 << failures.min(16)).min(RETRY.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_that_is_forgotten_is_not_asked_about() {
        let pair = pair_of(HostId(0), HostId(1));
        let mut traces = Traces::default();
        traces.add(pair, Duration::ZERO);
        traces.urge((pair, true));
        assert!([0, 1].iter().all(|host| traces.next(Duration::ZERO, HostId(*host)).is_some()));
        traces.forget(pair);
        assert!(traces.legs.is_empty());
        assert!([0, 1].iter().all(|host| traces.next(Duration::ZERO, HostId(*host)).is_none()));
    }
}
