//! Which way connections take: agents trace ports ahead of their use, and again now and then; what they say is kept with the ports.

use super::ports::{MOST_POOL, Pair};
use super::{SessionId, State};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_planner::{DirectedLink, HostId, Path, Topology};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

/// Ports that a question asks about, as many as an agent takes; and ports that a pool begins with.
pub(super) const QUESTION_PORTS: usize = 64;

/// Questions that an agent has at a time.
const MOST_OPEN: usize = 2;

/// How long an agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(4);

/// How long what was traced counts as fresh.
const FRESH: Duration = Duration::from_secs(20);

/// First and last pause after a question without an answer.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// Until so many hosts are connected all their pairs are traced; beyond, those that communicators link.
pub(super) const ALL_PAIRS: usize = 24;

/// Most pairs that are traced.
pub(super) const MOST_PAIRS: usize = 16384;

/// Ports that must die at a link, and none pass it, for it to count as failed.
const DEATHS: usize = 2;

/// What is asked, and when what is asked next.
#[derive(Debug, Default)]
pub(super) struct Traces {
    asked: u64,
    open: BTreeMap<u64, Asked>,
    legs: BTreeMap<(Pair, bool), Leg>,
    due: BTreeSet<(Duration, Pair, bool)>,
    busy: BTreeMap<SessionId, usize>,
}

/// A question that waits for its answer.
#[derive(Debug)]
struct Asked {
    pair: Pair,
    /// Whether the end that is connected to was asked, about the way back.
    back: bool,
    of: SessionId,
    ports: Vec<u16>,
    deadline: Duration,
}

/// One direction of a pair.
#[derive(Debug)]
struct Leg {
    /// None while a question is open.
    due: Option<Duration>,
    failures: u32,
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
    /// When the next question or the end of one is due.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let due = self.due.first().map(|(at, _, _)| *at);
        due.into_iter().chain(self.open.values().map(|asked| asked.deadline)).min()
    }

    /// A leg is asked about at that time, or sooner if it was to be sooner.
    fn set_due(&mut self, pair: Pair, back: bool, at: Duration) {
        let Some(leg) = self.legs.get_mut(&(pair, back)) else { return };
        if let Some(due) = leg.due.filter(|due| *due > at) {
            self.due.remove(&(due, pair, back));
            self.due.insert((at, pair, back));
            leg.due = Some(at);
        }
    }

    fn put_back(&mut self, pair: Pair, back: bool, at: Duration, failures: u32) {
        if let Some(leg) = self.legs.get_mut(&(pair, back)) {
            if let Some(due) = leg.due {
                self.due.remove(&(due, pair, back));
            }
            *leg = Leg { due: Some(at), failures };
            self.due.insert((at, pair, back));
        }
    }

    fn add(&mut self, pair: Pair, at: Duration) {
        for back in [false, true] {
            if self.legs.len() < MOST_PAIRS * 2 && !self.legs.contains_key(&(pair, back)) {
                self.legs.insert((pair, back), Leg { due: Some(at), failures: 0 });
                self.due.insert((at, pair, back));
            }
        }
    }

    fn close(&mut self, question: u64) -> Option<Asked> {
        let asked = self.open.remove(&question)?;
        if let Some(busy) = self.busy.get_mut(&asked.of) {
            *busy = busy.saturating_sub(1);
        }
        Some(asked)
    }
}

/// The pair of two hosts: who of them connects is always the same.
pub(super) fn pair_of(one: HostId, other: HostId) -> Pair {
    (one.min(other), one.max(other))
}

impl State {
    /// Has these pairs traced from now on.
    pub(super) fn want_traced(&mut self, now: Duration, pairs: impl Iterator<Item = Pair>) {
        for pair in pairs.filter(|pair| pair.0 != pair.1) {
            if self.can_trace(pair.0) || self.can_trace(pair.1) {
                self.traces.add(pair, now);
            }
        }
    }

    /// Has pairs traced again at once.
    pub(super) fn trace_anew(&mut self, now: Duration, pairs: impl Iterator<Item = Pair>) {
        for pair in pairs {
            self.traces.set_due(pair, false, now);
            self.traces.set_due(pair, true, now);
        }
    }

    /// A host's agent has a session: pairs with all that are there, where those are few.
    pub(super) fn trace_host(&mut self, now: Duration, host: HostId) {
        if self.hosts.len() <= ALL_PAIRS {
            let others: Vec<HostId> = self.hosts.keys().copied().filter(|other| *other != host).collect();
            self.want_traced(now, others.into_iter().map(|other| pair_of(host, other)));
        }
        let known: Vec<Pair> = self.ports.pairs().filter(|pair| pair.0 == host || pair.1 == host).collect();
        self.trace_anew(now, known.into_iter());
    }

    pub(super) fn can_trace(&self, host: HostId) -> bool {
        let session = self.hosts.get(&host).and_then(|session| self.sessions.get(session));
        session.is_some_and(|session| session.abilities.trace)
    }

    /// Asks what is due.
    pub(super) fn ask_traces(&mut self, now: Duration) {
        while let Some((at, pair, back)) = self.traces.due.first().copied().filter(|(at, ..)| *at <= now) {
            self.traces.due.remove(&(at, pair, back));
            if let Some(leg) = self.traces.legs.get_mut(&(pair, back)) {
                leg.due = None;
            }
            let (from, to) = if back { (pair.1, pair.0) } else { pair };
            let target = self.hosts.get(&to).and_then(|session| self.sessions.get(session));
            let asked = self.hosts.get(&from).filter(|_| self.can_trace(from)).copied();
            let (Some(of), Some(target)) = (asked, target.map(|session| session.listen)) else {
                self.traces.put_back(pair, back, now + RETRY.1, 0);
                continue;
            };
            let ports = self.ports_to_trace(now, pair, back);
            if ports.is_empty() {
                self.traces.put_back(pair, back, now + FRESH, 0);
                continue;
            }
            if self.traces.busy.get(&of).copied().unwrap_or(0) >= MOST_OPEN {
                self.traces.put_back(pair, back, now + Duration::from_millis(20), 0);
                continue;
            }
            self.ask_trace(now, (pair, back), of, (from, target), ports);
        }
    }

    fn ask_trace(
        &mut self,
        now: Duration,
        (pair, back): (Pair, bool),
        of: SessionId,
        (from, target): (HostId, std::net::SocketAddr),
        ports: Vec<u16>,
    ) {
        let own = self.hosts.get(&from).and_then(|session| self.sessions.get(session));
        let (listen, own) = (target.port(), own.map_or(0, |session| session.listen.port()));
        let pairs = ports.iter().map(|port| match back {
            false => v1::PortPair { source_port: u32::from(*port), destination_port: u32::from(listen) },
            true => v1::PortPair { source_port: u32::from(own), destination_port: u32::from(*port) },
        });
        let hops = self.switches_between(pair) as u32;
        self.traces.asked += 1;
        let question = self.traces.asked;
        let message = v1::TracePaths {
            question,
            address: target.ip().to_string(),
            ports: pairs.collect(),
            hops: hops.clamp(1, 16),
        };
        let deadline = now.saturating_add(PATIENCE);
        self.traces.open.insert(question, Asked { pair, back, of, ports, deadline });
        *self.traces.busy.entry(of).or_default() += 1;
        self.send(of, to_agent::Message::TracePaths(message));
    }

    /// Ports of a pool that were never traced, then those in use, then those that were traced longest ago. A pool that is there
    /// for the first time, or in which some way is missing, grows.
    fn ports_to_trace(&mut self, now: Duration, pair: Pair, back: bool) -> Vec<u16> {
        let known = |port: &super::ports::Port| if back { port.back.is_some() } else { port.there.is_some() };
        let have = self.ports.pool_of(pair).count();
        if have == 0 || (have < MOST_POOL && !back && self.lacks_ways(pair)) {
            self.ports.pool(pair, QUESTION_PORTS);
        }
        let mut ports: Vec<_> = self
            .ports
            .pool_of(pair)
            .map(|(number, port)| (known(port), !self.ports.in_use(pair, number), port.traced, number))
            .filter(|(known, _, traced, _)| !known || *traced + FRESH / 2 <= now)
            .collect();
        ports.sort_unstable();
        ports.truncate(QUESTION_PORTS);
        ports.into_iter().map(|(.., number)| number).collect()
    }

    /// Whether all of a pool is traced, and there is still a path that fewer than a few of its ports take, both ways.
    fn lacks_ways(&self, pair: Pair) -> bool {
        let pool: Vec<_> = self.ports.pool_of(pair).collect();
        let traced = pool.iter().all(|(_, port)| port.there.is_some() && port.back.is_some());
        let enough = (self.settings.paths as usize).saturating_mul(4);
        let lead = |path: &Path| {
            let same =
                |port: &super::ports::Port| port.is_same_both_ways() && port.there.as_ref() == Some(path);
            pool.iter().filter(|(_, port)| same(port)).count()
        };
        let paths = self.settings.topology.equal_cost_paths(pair.0, pair.1);
        traced && paths.iter().any(|path| lead(path) < enough)
    }

    /// Switches on the shortest ways between two hosts.
    fn switches_between(&self, pair: Pair) -> usize {
        let paths = self.settings.topology.equal_cost_paths(pair.0, pair.1);
        paths.first().map_or(1, |path| path.links().len().saturating_sub(1)).clamp(1, 16)
    }

    /// An agent's answer. Whatever it says, it is about the ports that were asked for.
    pub(super) fn traced(&mut self, now: Duration, from: SessionId, answer: &v1::PathsTraced) {
        if self.traces.open.get(&answer.question).is_none_or(|asked| asked.of != from) {
            return;
        }
        let Some(asked) = self.traces.close(answer.question) else { return };
        let (pair, back) = (asked.pair, asked.back);
        let most = self.switches_between(pair);
        let asked_ports: BTreeSet<u16> = asked.ports.iter().copied().collect();
        let mut seen: BTreeMap<u16, Vec<Option<IpAddr>>> = BTreeMap::new();
        for path in answer.paths.iter().take(QUESTION_PORTS) {
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
            self.learn(now, (pair, back), *port, hops, &mut learned, &mut died);
        }
        let dead = died.into_iter().filter(|(link, count)| *count >= DEATHS && !learned.alive.contains(link));
        learned.dead = dead.map(|(link, _)| link).collect();
        let complete = !seen.is_empty();
        let failures = self.traces.legs.get(&(pair, back)).map_or(0, |leg| leg.failures);
        let more = complete && !self.ports_to_trace(now, pair, back).is_empty();
        let (next, failures) = match (complete, more) {
            (true, true) => (Duration::ZERO, 0),
            (true, false) => (FRESH, 0),
            (false, _) => (retry(failures), failures.saturating_add(1)),
        };
        self.traces.put_back(pair, back, now.saturating_add(next), failures);
        let by = if back { pair.1 } else { pair.0 };
        self.paths_learned(now, by, pair, &learned);
        self.ask_traces(now);
    }

    /// Takes in the way of one port, and which links it tells to be alive, or dead because it was known to cross them.
    fn learn(
        &mut self,
        now: Duration,
        (pair, back): (Pair, bool),
        number: u16,
        hops: &[Option<IpAddr>],
        learned: &mut Learned,
        died: &mut BTreeMap<DirectedLink, usize>,
    ) {
        let topology = &self.settings.topology;
        let (from, to) = if back { (pair.1, pair.0) } else { pair };
        let found = topology.traced_path(from, to, hops).ok();
        let Some(port) = self.ports.traced_mut(pair, number) else { return };
        port.traced = now;
        let leg = if back { &mut port.back } else { &mut port.there };
        let before = leg.clone();
        let broken = before.as_ref().and_then(|before| broken_at(topology, before, hops));
        // A switch that did not answer, while one behind it did, tells nothing new.
        let kept = before.clone().filter(|_| found.is_none() && broken.is_none());
        let found = found.or(kept);
        leg.clone_from(&found);
        learned.moved |= before.is_some() && before != found;
        learned.first |= before.is_none() && found.is_some();
        learned.alive.extend(found.iter().flat_map(|path| path.links()));
        if let Some(link) = broken {
            *died.entry(link).or_default() += 1;
        }
    }

    /// Questions whose time is over, and new ones.
    pub(super) fn expire_traces(&mut self, now: Duration) {
        let late: Vec<u64> = self
            .traces
            .open
            .iter()
            .filter(|(_, asked)| asked.deadline <= now || !self.sessions.contains_key(&asked.of))
            .map(|(question, _)| *question)
            .collect();
        for question in late {
            let Some(asked) = self.traces.close(question) else { continue };
            let failures = self.traces.legs.get(&(asked.pair, asked.back)).map_or(0, |leg| leg.failures);
            let at = now.saturating_add(retry(failures));
            self.traces.put_back(asked.pair, asked.back, at, failures.saturating_add(1));
        }
        let sessions = &self.sessions;
        self.traces.busy.retain(|session, _| sessions.contains_key(session));
        self.ask_traces(now);
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
