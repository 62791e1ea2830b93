//! From what the next epoch of a communicator is to be to a recipe for each participant.

use crate::state::ctx::ctx;
use crate::state::effects::Effects;
use crate::state::job::aggregation::weigh;
use crate::state::job::algorithm::choose_algorithm;
use crate::state::job::codec::{budget_to_proto, coding};
use crate::state::job::coding::choose_coding;
use crate::state::job::communicator::Member;
use crate::state::job::communicators::Communicators;
use crate::state::job::congestion_control::choose_congestion;
use crate::state::job::grant::{Grantee, grant_aggregation};
use crate::state::job::lifecycle::{Change, EpochConfig, Planned};
use crate::state::job::link_reuse::carried;
use crate::state::job::over_tcp::over_tcp;
use crate::state::job::rate_limits::{connection_limits, rate_limits_by};
use crate::state::job::reduction::AggregationChoice;
use crate::state::output::SessionId;
use crate::state::reason::Reason;
use crate::state::settings::Settings;
use crate::state::tenants::agreements::Agreements;
use crate::state::tenants::hints::AllHints;
use crate::state::view::{View, view};
use crate::state::world::agents::Session;
use crate::state::world::aggregators::Aggregators;
use crate::state::world::handovers::HandOvers;
use crate::state::world::iterations::Operations;
use crate::state::world::link_state::LinkState;
use crate::state::world::link_state::ports::{Port, pair_of};
use crate::state::world::operator::Operator;
use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_api::{LINK_BYTES, SECRET_BYTES};
use harmonaize_plan::{AlgorithmRange, AlgorithmTable};
use harmonaize_planner::{
    CodecChoice, CongestionChoices, HostId, LinkUse, Path, Policy, Request, RingEdge, RouteClass, Routes,
    Tuning, off_ring_paths,
};
use rand::Rng;
use rand_chacha::ChaCha20Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What the next epoch of a communicator is to be.
#[derive(Debug, Default)]
pub(super) struct Proposal {
    /// Participants along the ring.
    pub order: Vec<u32>,
    /// Paths of its hops; empty where any will do.
    pub hops: Vec<RingEdge>,
    /// Why.
    pub plan: Option<Planned>,
    /// The decision that it is part of.
    pub decision: Option<u64>,
    /// Whether links go on whatever their ways are.
    pub same_links: bool,
}

/// The parts that a proposal takes.
#[derive(Debug)]
pub(crate) struct Proposer<'a> {
    pub now: Duration,
    pub settings: &'a Settings,
    pub sessions: &'a BTreeMap<SessionId, Session>,
    pub hosts: &'a BTreeMap<HostId, SessionId>,
    pub iterations: &'a BTreeMap<CommunicatorId, Operations>,
    pub operator: &'a Operator,
    pub handovers: &'a HandOvers,
    pub agreements: &'a Agreements,
    pub hints: &'a AllHints,
    pub communicators: &'a mut Communicators,
    pub link_state: &'a mut LinkState,
    pub aggregators: &'a mut Aggregators,
    pub random: &'a mut ChaCha20Rng,
    pub effects: &'a mut Effects,
}

/// Lends a controller's parts that a [`Proposer`] takes.
macro_rules! proposer {
    ($of:expr, $now:expr) => {
        $crate::state::job::reconcile::proposer::Proposer {
            now: $now,
            settings: &$of.settings,
            sessions: &$of.sessions,
            hosts: &$of.hosts,
            iterations: &$of.iterations,
            operator: &$of.operator,
            handovers: &$of.handovers,
            agreements: &$of.agreements,
            hints: &$of.hints,
            communicators: &mut $of.communicators,
            link_state: &mut $of.link_state,
            aggregators: &mut $of.aggregators,
            random: &mut $of.random,
            effects: &mut $of.outbox,
        }
    };
}
pub(crate) use proposer;

/// How the participants of an epoch are connected.
struct Connected {
    /// Source ports that connections hold, by connecting host.
    ports: Vec<(HostId, u16)>,
    /// Source ports of each link between two participants, the lower first.
    numbers: BTreeMap<(u32, u32), Vec<u16>>,
    /// Links that go on from the epoch in use.
    carried: BTreeSet<(u32, u32)>,
}

impl Proposer<'_> {
    pub(crate) fn view(&self) -> View<'_> {
        view!(self, self.now)
    }

    /// Starts the next epoch of a communicator. Returns its number; none where there is no such communicator.
    pub(super) fn propose(&mut self, id: CommunicatorId, proposal: Proposal, why: Reason) -> Option<Epoch> {
        let Proposal { order, hops, plan, decision, same_links } = proposal;
        let communicator = self.communicators.get(&id)?;
        let epoch = communicator.next_epoch;
        let hosts: Vec<HostId> = communicator.members.iter().map(|member| member.host).collect();
        let over_tcp = over_tcp(&self.view().ctx, communicator);
        let same = (same_links, &over_tcp);
        let Connected { ports, numbers, carried } = self.connect(id, &hosts, (&order, &hops), same);
        let rate_limits = rate_limits_by(&self.view(), id, plan.as_ref());
        let rates = connection_limits(&self.view().ctx, id, &order, rate_limits);
        let addresses: Vec<String> =
            self.communicators.get(&id)?.members.iter().map(|member| self.address(member)).collect();
        let congestion = choose_congestion(&self.view().ctx, id);
        let links = self.introduce(&hosts, &addresses, &numbers, (&rates, &congestion), &carried);
        let current = self.communicators.get(&id)?.current().and_then(|current| current.plan.as_ref());
        let by = plan.as_ref().or(current).cloned();
        let view = self.view();
        let codec = choose_coding(&view, id, by.as_ref());
        let algorithm = choose_algorithm(&view, id, &order, by.as_ref());
        let aggregation = self.choose_aggregation(id, &codec, by.as_ref())?;
        let links_of = numbers;
        let to = EpochConfig {
            epoch,
            order,
            ports,
            links: links_of,
            over_tcp,
            plan,
            rate_limits,
            congestion,
            codec,
            algorithm,
            aggregation,
        };
        let recipes = self.recipes(id, &to, links);
        let deadline = self.now.saturating_add(self.settings.prepare_timeout);
        let communicator = self.communicators.get_mut(&id)?;
        communicator.next_epoch = epoch.next();
        communicator.lifecycle.begin(Change::new(to, why, decision, deadline));
        for (session, recipe) in recipes {
            let first = epoch == Epoch(1);
            let message =
                if first { to_agent::Message::Form(recipe) } else { to_agent::Message::Change(recipe) };
            self.effects.send(session, message);
        }
        Some(epoch)
    }

    /// Chooses the ports of all connections of a communicator's next epoch.
    fn connect(
        &mut self,
        id: CommunicatorId,
        hosts: &[HostId],
        (order, hops): (&[u32], &[RingEdge]),
        (same_links, over_tcp): (bool, &BTreeSet<u32>),
    ) -> Connected {
        let mut wanted = Self::planned_paths(hosts, order, hops);
        let mut ports = Vec::new();
        if !same_links {
            self.choose_others(hosts, &mut wanted);
        }
        let proposed = (order, hops, over_tcp, same_links);
        let reused = carried(&self.view(), id, proposed, &mut wanted, &mut ports);
        if same_links {
            // Of those that go on nobody asks where they go.
            self.choose_others(hosts, &mut wanted);
        }
        let mut numbers = self.take_ports(hosts, wanted, &mut ports);
        let carried = reused.keys().copied().collect();
        numbers.extend(reused);
        Connected { ports, numbers, carried }
    }

    /// Decides how the next epoch has large operations summed, and grants it.
    fn choose_aggregation(
        &mut self,
        id: CommunicatorId,
        coding: &CodecChoice,
        planned: Option<&Planned>,
    ) -> Option<AggregationChoice> {
        let known = self.communicators.get(&id)?;
        let weighed = weigh(&self.view(), known, id, coding, planned);
        let sums = self.agreements.reduction_policy(id);
        let grantee = Grantee { id, known, coding, sums };
        let ctx = ctx!(self, self.now);
        Some(grant_aggregation(self.aggregators, &ctx, self.effects, self.random, &grantee, weighed))
    }

    /// Returns the recipe of each participant that is there, for its agent.
    fn recipes(
        &self,
        id: CommunicatorId,
        to: &EpochConfig,
        links: Vec<Vec<v1::Peer>>,
    ) -> Vec<(SessionId, v1::Recipe)> {
        let Some(communicator) = self.communicators.get(&id) else { return Vec::new() };
        let participants: Vec<v1::Participant> = communicator
            .members
            .iter()
            .map(|member| v1::Participant {
                ranks: member.ranks.clone(),
                host: self.settings.host_name(member.host),
            })
            .collect();
        let tuning = tuning_message(communicator.tuning, &to.algorithm.table);
        let mut recipes = Vec::new();
        for ((index, member), peers) in communicator.members.iter().enumerate().zip(links) {
            let local = member
                .requests
                .iter()
                .map(|(rank, request)| v1::LocalRank { rank: *rank, request: *request });
            let recipe = v1::Recipe {
                communicator: id.0,
                tenant: communicator.tenant.clone(),
                name: communicator.name.clone(),
                epoch: to.epoch.into(),
                participants: participants.clone(),
                order: to.order.clone(),
                me: index as u32,
                peers,
                tuning: Some(tuning.clone()),
                local_ranks: local.collect(),
                budget: budget_to_proto(&to.codec.budget),
                coding: coding(&to.codec),
                aggregation: to.aggregation.recipe(index as u32),
                previous_ranks: if to.epoch == Epoch(1) { communicator.before.clone() } else { Vec::new() },
                weight: self.settings.terms(&communicator.tenant).weight,
                racks: to.algorithm.racks.sizes.clone(),
                racks_from: to.algorithm.racks.from,
                links: None,
                over_tcp: to.over_tcp.iter().copied().collect(),
            };
            recipes.extend(member.session.map(|session| (session, recipe)));
        }
        recipes
    }

    /// Returns the paths that connections between each two participants shall take, from the lower. They are
    /// as planned along the ring, and empty for all other pairs.
    fn planned_paths(hosts: &[HostId], order: &[u32], hops: &[RingEdge]) -> BTreeMap<(u32, u32), Vec<Path>> {
        let mut wanted = BTreeMap::new();
        let ring = order.iter().zip(order.iter().cycle().skip(1)).zip(hops);
        for ((from, to), hop) in ring.filter(|((from, to), hop)| from != to && !hop.paths.is_empty()) {
            let paths = hop.paths.iter().map(|path| if from < to { path.clone() } else { path.reversed() });
            wanted.entry((*from.min(to), *from.max(to))).or_insert_with(|| paths.collect());
        }
        let count = hosts.len() as u32;
        for (low, high) in (0..count).flat_map(|low| (low + 1..count).map(move |high| (low, high))) {
            wanted.entry((low, high)).or_default();
        }
        wanted
    }

    /// Chooses paths for the connections of which the plan says nothing. They are as the planner has it, and
    /// empty where any will do.
    fn choose_others(&mut self, hosts: &[HostId], wanted: &mut BTreeMap<(u32, u32), Vec<Path>>) {
        let paths = self.settings.paths;
        self.link_state.ports.refresh(paths as usize);
        let conditions = self.view().conditions();
        let request = Request {
            topology: &self.settings.topology,
            conditions: &conditions,
            jobs: &[],
            routes: Routes::Listed(self.link_state.ports.paths()),
            policy: Policy::default(),
        };
        let host = |index: u32| hosts.get(index as usize).copied();
        let open = wanted.iter_mut().filter(|(_, paths)| paths.is_empty());
        let (pairs, open): (Vec<_>, Vec<_>) =
            open.filter_map(|((low, high), paths)| Some((host(*low).zip(host(*high))?, paths))).unzip();
        for (ways, found) in open.into_iter().zip(off_ring_paths(&request, &pairs, paths)) {
            *ways = found;
        }
    }

    /// Source ports for all connections. They are those that lead the wanted path both ways, else any that
    /// leads over open links alone, else one whose path is not known.
    fn take_ports(
        &mut self,
        hosts: &[HostId],
        requested: BTreeMap<(u32, u32), Vec<Path>>,
        reserved: &mut Vec<(HostId, u16)>,
    ) -> BTreeMap<(u32, u32), Vec<u16>> {
        let conditions = self.view().conditions();
        let mut numbers = BTreeMap::new();
        for ((low, high), paths) in requested {
            let host = |index: u32| hosts.get(index as usize).copied();
            let Some((low_host, high_host)) = host(low).zip(host(high)) else { continue };
            let pair = pair_of(low_host, high_host);
            let ports = (0..self.settings.paths as usize).map(|connection| {
                let path = paths.get(connection % paths.len().max(1));
                let path = path.map(|path| if pair.0 == low_host { path.clone() } else { path.reversed() });
                let cost = |port: &Port| {
                    let uses =
                        [&port.there, &port.back].map(|leg| leg.as_ref().map(|path| conditions.path(path)));
                    let fits = path.is_some() && port.there == path;
                    match (fits, port.is_symmetric(), uses) {
                        (true, true, _) => Some(0),
                        (true, false, [Some(LinkUse::Open), Some(LinkUse::Open)]) => Some(1),
                        (_, same, [Some(LinkUse::Open), Some(LinkUse::Open)]) => {
                            Some(if same { 2 } else { 3 })
                        }
                        // It is traced while it is in use.
                        (_, _, [None, None | Some(LinkUse::Open)] | [Some(LinkUse::Open), None]) => Some(4),
                        _ => None,
                    }
                };
                self.link_state.ports.take_traced(pair, reserved, cost).unwrap_or_else(|| {
                    let port = self.link_state.ports.take(pair.0, reserved);
                    if port != 0 {
                        self.link_state.ports.adopt(pair, port, reserved);
                    }
                    port
                })
            });
            let ports: Vec<u16> = ports.collect();
            numbers.insert((low, high), ports);
        }
        numbers
    }

    /// Links between all participants, fresh but for those that are carried over: for each its peers, in
    /// ascending order.
    fn introduce(
        &mut self,
        hosts: &[HostId],
        addresses: &[String],
        numbers: &BTreeMap<(u32, u32), Vec<u16>>,
        (rates, congestion): (&BTreeMap<(u32, u32), u64>, &CongestionChoices),
        carried: &BTreeSet<(u32, u32)>,
    ) -> Vec<Vec<v1::Peer>> {
        let mut links: Vec<Vec<v1::Peer>> = hosts.iter().map(|_| Vec::new()).collect();
        for (low, (low_host, low_address)) in hosts.iter().zip(addresses).enumerate() {
            for (high, (high_host, high_address)) in hosts.iter().zip(addresses).enumerate().skip(low + 1) {
                let mut link = [0; LINK_BYTES];
                let mut secret = [0; SECRET_BYTES];
                self.random.fill_bytes(&mut link);
                self.random.fill_bytes(&mut secret);
                let goes_on = carried.contains(&(low as u32, high as u32));
                let only_new = |bytes: &[u8]| if goes_on { Vec::new() } else { bytes.to_vec() };
                let ports = numbers.get(&(low as u32, high as u32)).into_iter().flatten();
                let source_ports: Vec<u32> = ports.map(|port| u32::from(*port)).collect();
                let route = RouteClass::of(&self.settings.topology, *low_host, *high_host);
                let control =
                    congestion.control(route).map_or_else(String::new, |control| control.to_string());
                let peer = |me: usize, participant: usize, address: &String, initiate| v1::Peer {
                    participant: participant as u32,
                    address: address.clone(),
                    link: only_new(&link),
                    secret: only_new(&secret),
                    reused: goes_on,
                    initiate,
                    source_ports: source_ports.clone(),
                    rate_bps: rates.get(&(me as u32, participant as u32)).copied().unwrap_or(0),
                    congestion_control: control.clone(),
                };
                let low_connects = low_host < high_host;
                let ends = [
                    (low, peer(low, high, high_address, low_connects)),
                    (high, peer(high, low, low_address, !low_connects)),
                ];
                for (at, peer) in ends {
                    if let Some(peers) = links.get_mut(at) {
                        peers.push(peer);
                    }
                }
            }
        }
        links
    }

    fn address(&self, member: &Member) -> String {
        let session = member.session.and_then(|session| self.sessions.get(&session));
        session.map_or_else(String::new, |session| session.listen.to_string())
    }
}

/// Returns how a communicator is tuned, as recipes have it.
pub(crate) fn tuning_message(tuning: Tuning, algorithms: &AlgorithmTable) -> v1::Tuning {
    let range = |range: AlgorithmRange| v1::AlgorithmRange {
        collective: range.collective.to_string(),
        up_to_bytes: range.up_to,
        algorithm: range.algorithm.to_string(),
    };
    v1::Tuning {
        channels: tuning.channels,
        chunk_bytes: tuning.chunk.0,
        segment_bytes: tuning.segment.0,
        copy_bytes: tuning.copy_threshold.0,
        landing_slots: tuning.landing_slots,
        algorithms: algorithms.ranges().map(range).collect(),
    }
}
