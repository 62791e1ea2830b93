//! A fabric and its agents in virtual time. It has switches that hash, and cross traffic. Its agents trace, probe, prepare,
//! switch and report what holds them up, each after a while of its own.

use super::topology::leaf_spine;
use super::world::{SECOND, join_of, lost, settings_of};
use harmonaize_abi::CommunicatorId;
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, CongestionCause, CongestionLevel, from_agent, to_agent};
use harmonaize_codec::Codec;
use harmonaize_planner::{DirectedLink, HostId, LinkId, Node, Path, SwitchId, Topology};
use harmonaize_server::state::testing::{CommunicatorView, EpochView, MemberView, Testing as _};
use harmonaize_server::state::{Controller, Fact, Output, SessionId, Settings};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

mod routes;
mod spent;
mod tenants;
mod trains;
use routes::Routes;
use spent::Spent;
use tenants::Tenants;

pub(super) const MS: Duration = Duration::from_millis(1);

/// All hosts of [`two_by_two`].
pub(super) const EVERYONE: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

/// Two racks of four hosts, two spines, 2:1: hosts at 1 Gbit/s, each leaf's uplinks at 1 Gbit/s.
pub(super) fn two_by_two() -> String {
    leaf_spine(&EVERYONE.map(|host| host / 4), 2, || "50us".to_owned())
}

/// What is to happen.
#[derive(Clone, Debug)]
enum Event {
    /// An agent says something in a session.
    Say(SessionId, Box<from_agent::Message>),
    /// An agent looks at its connections.
    Look(usize),
}

/// A stranger's flow: what it takes of a directed link.
#[derive(Clone, Copy, Debug)]
pub(super) struct CrossTraffic {
    pub link: DirectedLink,
    pub bits: u64,
}

/// A communicator at one agent.
#[derive(Debug)]
struct Part {
    recipes: BTreeMap<u64, v1::Recipe>,
    epoch: u64,
}

#[derive(Debug, Default)]
struct Agent {
    session: Option<SessionId>,
    parts: BTreeMap<u64, Part>,
    /// By communicator, epoch, peer and port: what was told last, and when.
    notified: BTreeMap<(u64, u64, u32, u16), (bool, Duration)>,
    liar: bool,
    deaf: bool,
}

/// Everything.
pub(super) struct Fabric {
    pub state: Controller,
    pub now: Duration,
    pub topology: Topology,
    pub rng: ChaCha8Rng,
    pub facts: Vec<(Duration, Fact)>,
    pub cross_traffic: BTreeMap<u32, CrossTraffic>,
    pub dead: BTreeSet<LinkId>,
    /// By communicator: when each later epoch was in use by all.
    pub switches: BTreeMap<u64, Vec<Duration>>,
    /// When each Change left, by communicator.
    pub changes: BTreeMap<u64, Vec<Duration>>,
    agents: Vec<Agent>,
    events: BTreeMap<(Duration, u64), Event>,
    count: u64,
    sessions: u64,
    pub probes: u64,
    /// Whether agents take own bursts for others' traffic.
    pub noisy: bool,
    /// The part of the time in which a connection of ours sends, as trains meet it.
    pub busy: f64,
    /// Trains under way, until when, and how often one met another on a link.
    trains: Vec<(Duration, Path)>,
    pub met: usize,
    /// Packets of traces, and of those the ones that crossed a link, one way.
    pub traced: u64,
    pub traced_over: BTreeMap<LinkId, u64>,
    salt: u64,
    routes: Routes,
    pub spent: Spent,
    coding: u64,
    /// What readers of events were answered, in order.
    pub read: Vec<v1::EventsRead>,
    pub tenants: Tenants,
}

impl Fabric {
    /// Everything whole and idle, agents connected. Links of communicators have `paths` connections each.
    pub(super) fn new(seed: u64, paths: u32) -> Self {
        Self::of(settings_of(&two_by_two()), seed, paths, 0)
    }

    /// The same once its paths are traced.
    pub(super) fn traced(seed: u64, paths: u32) -> Self {
        let mut fabric = Self::new(seed, paths);
        fabric.run(SECOND * 3);
        fabric
    }

    /// The same with a communicator of tenant a over some hosts in use.
    pub(super) fn formed(seed: u64, paths: u32, hosts: &[usize]) -> (Self, u64) {
        let mut fabric = Self::traced(seed, paths);
        let id = fabric.form("a", "world", hosts);
        fabric.run(SECOND * 3);
        (fabric, id)
    }

    /// The same with these settings, and agents that code so many bytes a second (0: they have not measured).
    pub(super) fn of(mut settings: Settings, seed: u64, paths: u32, coding: u64) -> Self {
        settings.paths = paths;
        settings.source_ports = Some((20000, 29999));
        settings.telemetry_interval = Duration::ZERO;
        let topology = settings.topology.clone();
        let mut fabric = Self {
            state: Controller::new(settings, [seed as u8; 32]),
            now: SECOND,
            rng: ChaCha8Rng::seed_from_u64(seed),
            facts: Vec::new(),
            cross_traffic: BTreeMap::new(),
            dead: BTreeSet::new(),
            switches: BTreeMap::new(),
            changes: BTreeMap::new(),
            agents: (0..topology.hosts().len()).map(|_| Agent::default()).collect(),
            events: BTreeMap::new(),
            count: 0,
            sessions: 0,
            probes: 0,
            noisy: false,
            busy: 0.0,
            trains: Vec::new(),
            met: 0,
            traced: 0,
            traced_over: BTreeMap::new(),
            salt: seed,
            routes: Routes::default(),
            spent: Spent::default(),
            coding,
            read: Vec::new(),
            tenants: Tenants::default(),
            topology,
        };
        for host in 0..fabric.agents.len() {
            fabric.connect(host);
        }
        fabric
    }

    pub(super) fn link(&self, from: &str, to: &str) -> DirectedLink {
        let node = |name: &str| {
            let switch = self.topology.switches().iter().position(|switch| switch.name == name);
            switch.map_or_else(
                || Node::Host(self.topology.host(name).unwrap()),
                |id| Node::Switch(SwitchId(id)),
            )
        };
        *self.topology.path_along(&[node(from), node(to)]).unwrap().links().first().unwrap()
    }

    fn after(&mut self, wait: Duration, event: Event) {
        self.count += 1;
        self.events.insert((self.now + wait, self.count), event);
    }

    fn between(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_micros(self.rng.random_range(least * 1000..=most * 1000))
    }

    /// From now on a stranger's flow takes so much of a link.
    pub(super) fn cross(&mut self, number: u32, link: DirectedLink, bits: u64) {
        self.cross_traffic.insert(number, CrossTraffic { link, bits });
        self.sample_all();
    }

    /// From now on no stranger takes anything.
    pub(super) fn calm(&mut self) {
        self.cross_traffic.clear();
        self.sample_all();
    }

    /// How often a communicator has switched to a later epoch.
    pub(super) fn switch_count(&self, id: u64) -> usize {
        self.switches.get(&id).map_or(0, Vec::len)
    }

    /// The host's agent opens a session.
    pub(super) fn connect(&mut self, host: usize) {
        self.sessions += 1;
        let session = SessionId(self.sessions);
        let speed = self.coding;
        let told = |name: &str| v1::CodecSpeed { codec: name.to_owned(), encode: speed, decode: speed };
        let address = format!("10.0.{}.{}", (host + 1) / 256, (host + 1) % 256);
        let abilities = v1::Capabilities {
            trace: true,
            probe: true,
            probe_address: format!("{address}:4001"),
            probe_key: vec![host as u8; 32],
            rate_limit: true,
            congestion_reports: true,
            codecs: Codec::NAMED.iter().map(|(name, _)| told(name)).collect(),
            ..v1::Capabilities::default()
        };
        let parts = std::mem::take(&mut self.agents[host].parts);
        let running = parts.values().filter_map(|part| part.recipes.get(&part.epoch));
        let running = running.map(|recipe| v1::Recipe { peers: Vec::new(), ..recipe.clone() }).collect();
        self.agents[host] = Agent { session: Some(session), parts, ..Agent::default() };
        let hello = v1::Hello {
            running,
            ended: self.tenants.ended(host),
            protocol_version: PROTOCOL_VERSION,
            host: format!("h{host}"),
            listen: format!("{address}:4000"),
            capabilities: Some(abilities),
            ..v1::Hello::default()
        };
        self.send(session, from_agent::Message::Hello(hello));
    }

    /// The host dies: its agent's session ends, and a peer in each of its communicators finds its links down.
    pub(super) fn kill(&mut self, host: usize) {
        self.tenants.ended.retain(|(of, _), _| *of != host);
        let dead = std::mem::take(&mut self.agents[host]);
        let Some(session) = dead.session else { return };
        self.spent.on("session ended", || self.state.session_ended(self.now, session));
        self.run_until_quiet();
        for communicator in dead.parts.into_keys().filter(|id| self.ids().contains(id)).collect::<Vec<_>>() {
            let members = self.communicator(communicator).members;
            let of_host = members.iter().find(|member| member.host == HostId(host));
            let ranks = of_host.map_or_else(Vec::new, |member| member.ranks.clone());
            let tells = |member: &MemberView| Some((member.host.0, member.session?));
            if let Some((peer, session)) = members.iter().find_map(tells) {
                self.dissolved(peer, communicator);
                self.send(session, from_agent::Message::Failed(lost(communicator, ranks)));
            }
        }
    }

    /// From now on the agent claims that others congest whatever it sends on. It does so as fast as it can, and finds everything
    /// dead.
    pub(super) fn lies(&mut self, host: usize) {
        self.agents[host].liar = true;
        self.after(MS, Event::Look(host));
    }

    /// From now on what the agent is asked to prepare it never answers for.
    pub(super) fn deaf(&mut self, host: usize, deaf: bool) {
        self.agents[host].deaf = deaf;
    }

    /// One rank on each host joins; the communicator's id.
    pub(super) fn form(&mut self, tenant: &str, name: &str, hosts: &[usize]) -> u64 {
        self.create_within(tenant, name, hosts, None)
    }

    /// The same with what may be lost.
    pub(super) fn create_within(
        &mut self,
        tenant: &str,
        name: &str,
        hosts: &[usize],
        budget: Option<v1::Budget>,
    ) -> u64 {
        let before: BTreeSet<u64> = self.ids();
        for (rank, host) in hosts.iter().enumerate() {
            let (request, budget) = (self.count + 1000 + rank as u64, budget.clone());
            let join = join_of(tenant, name, rank as u32, hosts.len() as u32);
            let join = v1::Join { request, budget, ..join };
            let session = self.agents[*host].session.unwrap();
            self.send(session, from_agent::Message::Join(join));
        }
        *self.ids().difference(&before).next().expect("a communicator formed")
    }

    pub(super) fn communicator(&self, id: u64) -> CommunicatorView {
        self.state.communicator_view(CommunicatorId(id)).unwrap()
    }

    /// What a communicator runs by.
    pub(super) fn epoch(&self, id: u64) -> EpochView {
        self.communicator(id).current.unwrap()
    }

    /// The session of a participant's agent.
    pub(super) fn session(&self, id: u64, participant: usize) -> SessionId {
        self.communicator(id).members[participant].session.unwrap()
    }

    /// The newest recipe that an agent has of a communicator.
    pub(super) fn recipe_of(&self, host: usize, id: u64) -> v1::Recipe {
        self.agents[host].parts[&id].recipes.last_key_value().unwrap().1.clone()
    }

    pub(super) fn send(&mut self, session: SessionId, message: from_agent::Message) {
        let (state, now, kind) = (&mut self.state, self.now, spent::kind(&message));
        self.spent.on(kind, || state.message(now, session, message.into()));
        self.run_until_quiet();
    }

    /// Carries out what control decided.
    pub(super) fn run_until_quiet(&mut self) {
        loop {
            let outputs = self.spent.on("outputs", || self.state.take_outputs());
            if outputs.is_empty() {
                return;
            }
            for output in outputs {
                match output {
                    Output::Send(session, message) => self.deliver(session, message),
                    Output::End(session) => {
                        let agent = self.agents.iter_mut().find(|agent| agent.session == Some(session));
                        if let Some(agent) = agent {
                            *agent = Agent::default();
                        }
                    }
                    Output::Status(..) => {}
                    Output::Keep(changes) => self.keep(&changes),
                    Output::Fact(fact) => {
                        if let Fact::EpochCurrent { communicator, epoch, .. } = &fact
                            && epoch.0 > 1
                        {
                            self.switches.entry(communicator.0).or_default().push(self.now);
                        }
                        self.facts.push((self.now, fact));
                    }
                }
            }
        }
    }

    fn deliver(&mut self, session: SessionId, message: to_agent::Message) {
        use to_agent::Message;
        let Some(host) = self.agents.iter().position(|agent| agent.session == Some(session)) else { return };
        match message {
            Message::Form(recipe) | Message::Change(recipe) => self.recipe(host, session, recipe),
            Message::Ready(ready) => {
                let wait = self.between(1, 15);
                let part = self.agents[host].parts.get_mut(&ready.communicator).unwrap();
                let first = part.epoch == 0;
                assert!(part.recipes.contains_key(&ready.epoch), "ready for what was never prepared");
                part.epoch = ready.epoch;
                part.recipes.retain(|epoch, _| *epoch >= ready.epoch);
                if !first {
                    let v1::Ready { communicator, epoch } = ready;
                    let switched = v1::Switched { communicator, epoch, first_segment: 1 };
                    self.after(wait, Event::Say(session, Box::new(from_agent::Message::Switched(switched))));
                }
                self.sample_soon(host);
            }
            Message::Abandon(abandon) => {
                let part = self.agents[host].parts.get_mut(&abandon.communicator).unwrap();
                assert!(part.epoch < abandon.epoch, "an epoch in use is given up");
                part.recipes.remove(&abandon.epoch);
            }
            Message::Dissolve(end) => self.dissolved(host, end.communicator),
            Message::TracePaths(question) => {
                let answer = self.trace(host, &question);
                let wait = self.between(2, 40);
                self.after(wait, Event::Say(session, Box::new(from_agent::Message::PathsTraced(answer))));
            }
            Message::ProbePath(question) => {
                self.probes += 1;
                let (answer, wait) = (self.probe(host, &question), self.between(5, 30));
                self.trains.retain(|(until, _)| *until > self.now);
                if let Some(path) = self.probed_path(host, &question) {
                    let meets = |other: &Path| other.links().iter().any(|link| path.links().contains(link));
                    self.met += self.trains.iter().filter(|(_, other)| meets(other)).count();
                    self.trains.push((self.now + wait, path));
                }
                self.after(wait, Event::Say(session, Box::new(from_agent::Message::PathProbed(answer))));
            }
            Message::EventsRead(read) => self.read.push(read),
            Message::Negotiated(answer) => self.tenants.negotiated.push(answer),
            Message::IterationChoice(answer) => self.tenants.chosen.push(answer),
            Message::Hinted(answer) => self.tenants.hinted.push(answer),
            Message::Refused(refused) => panic!("refused: {}", refused.reason),
            other => self.tenants.others.push(other),
        }
    }

    fn recipe(&mut self, host: usize, session: SessionId, recipe: v1::Recipe) {
        let (communicator, epoch) = (recipe.communicator, recipe.epoch);
        if epoch > 1 && recipe.me == 0 {
            self.changes.entry(communicator).or_default().push(self.now);
        }
        let mut order = recipe.order.clone();
        order.sort_unstable();
        assert!(order.iter().copied().eq(0..recipe.participants.len() as u32));
        let part = self.agents[host].parts.entry(communicator);
        let part = part.or_insert_with(|| Part { recipes: BTreeMap::new(), epoch: 0 });
        assert!(part.recipes.insert(epoch, recipe).is_none(), "an epoch comes once");
        if !self.agents[host].deaf {
            let wait = self.between(1, 6);
            let prepared = v1::Prepared { communicator, epoch, links: None };
            self.after(wait, Event::Say(session, Box::new(from_agent::Message::Prepared(prepared))));
        }
    }

    /// Which spine a leaf sends a packet to: by a hash over those whose links live.
    fn route(&self, from: HostId, to: HostId, ports: (u16, u16)) -> Option<Path> {
        let paths = self.routes.between(&self.topology, from, to);
        let lives = |path: &&Path| !path.links().iter().any(|link| self.dead.contains(&link.link));
        let alive: Vec<&Path> = paths.iter().filter(lives).collect();
        let key = [from.0 as u64, to.0 as u64, u64::from(ports.0), u64::from(ports.1), self.salt];
        let hash = key.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, part| {
            let mixed = (hash ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^ (mixed >> 29)
        });
        alive.get((hash >> 17) as usize % alive.len().max(1)).map(|path| (*path).clone())
    }

    fn host_at(&self, address: &str) -> HostId {
        let address = address.split(':').next().unwrap().parse::<std::net::Ipv4Addr>();
        let [.., high, low] = address.unwrap().octets();
        HostId(usize::from(high) * 256 + usize::from(low) - 1)
    }

    fn trace(&mut self, host: usize, question: &v1::TracePaths) -> v1::PathsTraced {
        assert!(question.ports.len() <= 64 && (1..=16).contains(&question.hops));
        let to = self.host_at(&question.address);
        let liar = self.agents[host].liar;
        let mut crossed = Vec::new();
        let paths = question.ports.iter().map(|ports| {
            let v1::PortPair { source_port, destination_port } = *ports;
            let way = self.route(HostId(host), to, (source_port as u16, destination_port as u16));
            crossed.extend(way.iter().flat_map(|way| way.links()).map(|link| link.link));
            let switches = way.map(|way| self.topology.switches_of(&way)).unwrap_or_default();
            let hops = switches.iter().map(|id| self.topology.switches()[id.0].addresses[0].to_string());
            let mut hops: Vec<String> = hops.collect();
            if liar {
                hops.truncate(1);
            }
            v1::TracedPath { source_port, destination_port, hops }
        });
        let paths: Vec<v1::TracedPath> = paths.collect();
        self.traced += u64::from(question.hops) * paths.len() as u64;
        for link in crossed {
            *self.traced_over.entry(link).or_default() += 1;
        }
        v1::PathsTraced { request: question.request, paths, error: String::new() }
    }

    /// What strangers take of a link.
    fn cross_traffic_on(&self, link: DirectedLink) -> u64 {
        self.cross_traffic.values().filter(|flow| flow.link == link).map(|flow| flow.bits).sum()
    }

    /// What one of our connections moves on a path, of those that are all our own. It is its part of what cross traffic leaves on the
    /// narrowest link.
    fn moved(&self, own: &[Path], path: &Path) -> u64 {
        let part = |link: &DirectedLink| {
            let sharing = own.iter().filter(|path| path.links().contains(link)).count();
            1_000_000_000_u64.saturating_sub(self.cross_traffic_on(*link)) / sharing.max(1) as u64
        };
        path.links().iter().map(part).min().unwrap_or(0)
    }

    /// Every agent looks at its connections within some milliseconds: something has changed.
    pub(super) fn sample_all(&mut self) {
        for host in 0..self.agents.len() {
            self.sample_soon(host);
        }
    }

    fn sample_soon(&mut self, host: usize) {
        let wait = self.between(2, 10);
        self.after(wait, Event::Look(host));
    }

    /// Connections along the rings that leave an agent, each with its path.
    fn sends(&self, host: usize) -> Vec<(u64, u64, u32, u16, Path)> {
        let mut sends = Vec::new();
        for (id, part) in &self.agents[host].parts {
            let Some(recipe) = part.recipes.get(&part.epoch) else { continue };
            let at = recipe.order.iter().position(|index| *index == recipe.me).unwrap();
            let next = recipe.order[(at + 1) % recipe.order.len()];
            let Some(peer) = recipe.peers.iter().find(|peer| peer.participant == next) else { continue };
            let to = self.host_at(&peer.address);
            for port in &peer.source_ports {
                let port = *port as u16;
                let ports = if peer.initiate { (port, 4000) } else { (4000, port) };
                if let Some(path) = self.route(HostId(host), to, ports) {
                    sends.push((*id, part.epoch, next, port, path));
                }
            }
        }
        sends
    }

    /// Every path that own connections along rings take now, by communicator.
    pub(super) fn own_paths(&self, id: u64) -> Vec<Path> {
        let all = (0..self.agents.len()).flat_map(|host| self.sends(host));
        all.filter(|(of, ..)| *of == id).map(|(.., path)| path).collect()
    }

    /// Every path that any connection of a communicator takes now, also those beside the ring.
    pub(super) fn all_paths(&self, id: u64) -> Vec<Path> {
        let mut paths = Vec::new();
        for (host, agent) in self.agents.iter().enumerate() {
            let Some(part) = agent.parts.get(&id) else { continue };
            let peers = part.recipes.get(&part.epoch).map_or(&[][..], |recipe| &recipe.peers);
            for peer in peers {
                for port in peer.source_ports.iter().map(|port| *port as u16) {
                    let ports = if peer.initiate { (port, 4000) } else { (4000, port) };
                    paths.extend(self.route(HostId(host), self.host_at(&peer.address), ports));
                }
            }
        }
        paths
    }

    /// An agent tells what changed of its own connections, and again what holds for a second.
    fn sample(&mut self, host: usize) {
        let Some(session) = self.agents[host].session else { return };
        let liar = self.agents[host].liar;
        let (mut again, mut soon) = (false, false);
        let sends = self.sends(host);
        let keys: BTreeSet<_> =
            sends.iter().map(|(id, epoch, peer, port, _)| (*id, *epoch, *peer, *port)).collect();
        self.agents[host].notified.retain(|key, _| keys.contains(key));
        let own = || (0..self.agents.len()).flat_map(|host| self.sends(host)).map(|(.., path)| path);
        let own: Vec<Path> = if self.noisy { Vec::new() } else { own().collect() };
        for (id, epoch, peer, port, path) in sends {
            let burst = self.noisy && self.rng.random_bool(0.5);
            let shared = path.links().iter().any(|link| self.cross_traffic_on(*link) >= 200_000_000);
            let held = liar || burst || shared;
            // What is starved is said more often; now and then without cause.
            let starved = self.noisy && (shared || self.rng.random_bool(0.05));
            let pause = if starved { MS * 50 } else { SECOND };
            soon |= starved;
            let key = (id, epoch, peer, port);
            let told = self.agents[host].notified.get(&key).copied();
            let changed = told.is_none_or(|(before, _)| before != held);
            let old = told.is_some_and(|(before, at)| before && self.now >= at + pause);
            again |= held;
            if !(changed || old || liar) || self.rng.random_bool(0.02) {
                // One in fifty is lost, and told again a second later.
                continue;
            }
            self.agents[host].notified.insert(key, (held, self.now));
            // Where next to nothing is left, queues are long.
            let nothing = path.links().iter().any(|link| self.cross_traffic_on(*link) > 900_000_000);
            let level = match (held, liar || nothing) {
                (true, true) => CongestionLevel::Severe,
                (true, false) => CongestionLevel::Mild,
                _ => CongestionLevel::None,
            };
            let cause = if held { CongestionCause::CrossTraffic } else { CongestionCause::Unspecified };
            let congestion = v1::Congestion {
                interface: "eth0".to_owned(),
                level: level.into(),
                cause: cause.into(),
                loss: liar,
                delay: held,
                own_bps: match self.noisy {
                    true => self.rng.random_range(100_000_000..1_300_000_000),
                    false => self.moved(&own, &path),
                },
                capacity_bps: 1_000_000_000,
                starved: starved && held,
                ..v1::Congestion::default()
            };
            self.report(session, (id, epoch, peer, port), congestion);
        }
        if again || self.noisy {
            let wait = match (liar, soon) {
                (true, _) => MS * 2,
                (false, true) => MS * 50,
                _ => SECOND,
            };
            self.after(wait, Event::Look(host));
        }
    }

    /// Sends an agent's report on a connection: its communicator, epoch, peer and port.
    fn report(
        &mut self,
        session: SessionId,
        (communicator, epoch, peer, port): (u64, u64, u32, u16),
        congestion: v1::Congestion,
    ) {
        let (congestion, source_port) = (Some(congestion), u32::from(port));
        let report =
            v1::CongestionReport { congestion, communicator, epoch, peer, source_port, queue_pair: false };
        self.send(session, from_agent::Message::CongestionReport(report));
    }

    /// Goes on for so long.
    pub(super) fn run(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            let next = self.events.first_key_value().map(|(key, _)| key.0);
            let deadline = self.spent.on("next deadline", || self.state.next_deadline());
            let at = next.into_iter().chain(deadline).min().filter(|at| *at <= until);
            let Some(at) = at else {
                self.now = until;
                return;
            };
            assert!(at >= self.now || deadline == Some(at), "time goes on");
            self.now = self.now.max(at);
            if deadline.is_some_and(|deadline| deadline <= self.now) {
                self.spent.on("expire", || self.state.expire(self.now));
                self.state.lost_plans(self.now);
                self.run_until_quiet();
                let after = self.state.next_deadline();
                assert!(
                    after.is_none_or(|after| after > self.now),
                    "expired, and still due at {:?}",
                    self.now
                );
                continue;
            }
            let Some((_, event)) = self.events.pop_first() else { continue };
            match event {
                Event::Say(session, message) => {
                    if self.agents.iter().any(|agent| agent.session == Some(session)) {
                        self.send(session, *message);
                    }
                }
                Event::Look(host) => self.sample(host),
            }
        }
    }
}
