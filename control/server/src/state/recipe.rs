//! From a complete set of joins, or a new order, to a recipe for each participant.

use super::aggregator_refusals::Refusals;
use super::codec::CodecState;
use super::communicator::{Communicator, Member};
use super::lifecycle::{Change, EpochConfig, Lifecycle, Planned};
use super::link_state::{Port, pair_of};
use super::{Fact, SessionId, State};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_api::{LINK_BYTES, SECRET_BYTES};
use harmonaize_codec::Budget;
use harmonaize_planner::{
    Bytes, DirectThresholds, HostId, Job, LinkUse, Path, Policy, Request, RingEdge, Routes, Tuning,
    off_ring_paths, order, tuning,
};
use rand::Rng;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
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

/// The ranks of a communicator that is about to form.
#[derive(Debug)]
pub(super) struct Group {
    /// By rank, from 0 without gaps: whose session, and the agent's number for the join.
    pub joined: BTreeMap<u32, (SessionId, u64)>,
    pub budget: Budget,
    /// Where it goes on from another: see [`Communicator::before`].
    pub before: Vec<u32>,
    pub succeeds: Option<u64>,
}

impl State {
    /// All ranks have joined.
    pub(super) fn form(&mut self, now: Duration, (tenant, name): (String, String), group: &Group) {
        let ranks = group.joined.len() as u32;
        let mut by_session: BTreeMap<SessionId, Vec<(u32, u64)>> = BTreeMap::new();
        for (rank, (session, request)) in &group.joined {
            by_session.entry(*session).or_default().push((*rank, *request));
        }
        let mut members: Vec<Member> = by_session
            .into_iter()
            .filter_map(|(session, requests)| {
                let host = self.sessions.get(&session)?.host;
                let ranks = requests.iter().map(|(rank, _)| *rank).collect();
                let left = BTreeSet::new();
                Some(Member { host, session: Some(session), ranks, requests, departed: left, closed: false })
            })
            .collect();
        members.sort_by_key(|member| member.ranks.first().copied());
        let hosts: Vec<HostId> = members.iter().map(|member| member.host).collect();
        self.formed = self.formed.wrapping_add(1);
        let id = u64::from(self.boot) << 32 | u64::from(self.formed);
        self.fact(Fact::Formed {
            communicator: id,
            tenant: tenant.clone(),
            name: name.clone(),
            ranks,
            hosts: hosts.iter().map(|host| self.host_name(*host)).collect(),
        });
        let communicator = Communicator {
            tenant,
            name,
            ranks,
            members,
            tuning: tuning(&self.settings.topology, &hosts),
            lifecycle: Lifecycle::default(),
            next_epoch: 1,
            last_change: String::new(),
            pinned: false,
            changes: VecDeque::new(),
            backoff_until: None,
            failures: 0,
            coding: CodecState::new(group.budget.clone()),
            refused: Refusals::default(),
            before: group.before.clone(),
            succeeds: group.succeeds,
        };
        let proposal = self.first_plan(now, id, &hosts);
        self.communicators.insert(id, communicator);
        self.learn_usage(id);
        self.note_maintenance(now, Some(id));
        self.propose(now, id, proposal);
        self.with_links(now, |links, ctx, effects| links.trace_communicator(ctx, effects, id));
    }

    /// What a communicator that forms begins with: planned beside all others, who stay as they are for now.
    fn first_plan(&mut self, now: Duration, id: u64, hosts: &[HostId]) -> Proposal {
        let mut jobs = self.jobs(now);
        jobs.iter_mut().for_each(|job| job.movable = false);
        jobs.push(Job {
            communicator: id,
            hosts: hosts.to_vec(),
            connections: self.settings.paths,
            weight: self.agreements.quarters(id),
            guaranteed: self.agreements.promised(id),
            rate_limit: None,
            operation: Bytes(0),
            iteration_pattern: None,
            current: None,
            movable: true,
        });
        let conditions = self.conditions();
        let plan = if self.settings.replan { self.fit_plan(&jobs, &conditions) } else { None };
        match plan.and_then(|plan| plan.assignments.into_iter().find(|part| part.communicator == id)) {
            Some(part) => {
                let plan = Some(Planned::from(&part));
                Proposal { order: part.order, hops: part.edges, plan, ..Proposal::default() }
            }
            None => {
                let ring = order(&self.settings.topology, hosts).into_iter().map(|index| index as u32);
                Proposal { order: ring.collect(), ..Proposal::default() }
            }
        }
    }

    /// Starts the next epoch of a communicator. Returns its number; none where there is no such communicator.
    pub(super) fn propose(&mut self, now: Duration, id: u64, proposal: Proposal) -> Option<u64> {
        let Proposal { order, hops, plan, decision, same_links } = proposal;
        let communicator = self.communicators.get(&id)?;
        let epoch = communicator.next_epoch;
        let addresses: Vec<String> = communicator.members.iter().map(|member| self.address(member)).collect();
        let hosts: Vec<HostId> = communicator.members.iter().map(|member| member.host).collect();
        let mut wanted = Self::planned_paths(&hosts, &order, &hops);
        let mut ports = Vec::new();
        if !same_links {
            self.choose_others(&hosts, &mut wanted);
        }
        let carried = self.carried(id, (&order, &hops, same_links), &mut wanted, &mut ports);
        if same_links {
            // Of those that go on nobody asks where they go.
            self.choose_others(&hosts, &mut wanted);
        }
        let mut numbers = self.take_ports(&hosts, wanted, &mut ports);
        let held = self.rate_limits_by(id, plan.as_ref());
        let rates = self.connection_limits(id, &order, held);
        let carried_over = carried.keys().copied().collect();
        numbers.extend(carried);
        let links = self.introduce(&hosts, &addresses, &numbers, &rates, &carried_over);
        let communicator = self.communicators.get(&id)?;
        let participants: Vec<v1::Participant> = communicator
            .members
            .iter()
            .map(|member| v1::Participant { ranks: member.ranks.clone(), host: self.host_name(member.host) })
            .collect();
        let current = communicator.current().and_then(|current| current.plan.as_ref());
        let planned = plan.as_ref().or(current).cloned();
        let by = planned.as_ref();
        let (coding, algorithm) = (self.choose_coding(now, id, by), self.choose_algorithm(id, &order, by));
        let tuning = self.tuning_message(communicator.tuning, algorithm.sizes);
        let aggregation = self.choose_aggregation(id, &coding, by);
        let communicator = self.communicators.get(&id)?;
        let mut recipes = Vec::new();
        for ((index, member), peers) in communicator.members.iter().enumerate().zip(links) {
            let local = member
                .requests
                .iter()
                .map(|(rank, request)| v1::LocalRank { rank: *rank, request: *request });
            let recipe = v1::Recipe {
                communicator: id,
                tenant: communicator.tenant.clone(),
                name: communicator.name.clone(),
                epoch,
                participants: participants.clone(),
                order: order.clone(),
                me: index as u32,
                peers,
                tuning: Some(tuning),
                local_ranks: local.collect(),
                budget: coding.budget(),
                coding: coding.coding(),
                aggregation: aggregation.recipe(index as u32),
                previous_ranks: if epoch == 1 { communicator.before.clone() } else { Vec::new() },
            };
            recipes.extend(member.session.map(|session| (session, recipe)));
        }
        let deadline = now.saturating_add(self.settings.prepare_timeout);
        let to = EpochConfig {
            epoch,
            order,
            ports,
            links: numbers,
            plan,
            rate_limits: held,
            codec: coding,
            algorithm,
            aggregation,
        };
        if let Some(communicator) = self.communicators.get_mut(&id) {
            communicator.next_epoch += 1;
            communicator.lifecycle.begin(Change::new(to, decision, deadline));
        }
        for (session, recipe) in recipes {
            let first = epoch == 1;
            let message =
                if first { to_agent::Message::Form(recipe) } else { to_agent::Message::Change(recipe) };
            self.send(session, message);
        }
        Some(epoch)
    }

    /// Which paths the connections between each two participants shall take, from the lower, as planned along the ring; empty for all
    /// others.
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

    /// Which paths those connections shall take of which the plan says nothing: as the planner has it; empty where any will do.
    fn choose_others(&mut self, hosts: &[HostId], wanted: &mut BTreeMap<(u32, u32), Vec<Path>>) {
        let paths = self.settings.paths;
        self.link_state.ports.refresh(paths as usize);
        let conditions = self.conditions();
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

    /// Source ports for all connections: of those that lead the wanted way both ways, else any that leads over open links alone,
    /// else one whose way is not known.
    fn take_ports(
        &mut self,
        hosts: &[HostId],
        requested: BTreeMap<(u32, u32), Vec<Path>>,
        reserved: &mut Vec<(HostId, u16)>,
    ) -> BTreeMap<(u32, u32), Vec<u16>> {
        let conditions = self.conditions();
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

    /// Links between all participants, fresh but for those that are carried over: for each its peers, in ascending order.
    fn introduce(
        &mut self,
        hosts: &[HostId],
        addresses: &[String],
        numbers: &BTreeMap<(u32, u32), Vec<u16>>,
        rates: &BTreeMap<(u32, u32), u64>,
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
                let peer = |me: usize, participant: usize, address: &String, initiate| v1::Peer {
                    participant: participant as u32,
                    address: address.clone(),
                    link: only_new(&link),
                    secret: only_new(&secret),
                    reused: goes_on,
                    initiate,
                    source_ports: source_ports.clone(),
                    rate_bps: rates.get(&(me as u32, participant as u32)).copied().unwrap_or(0),
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

    pub(super) fn tuning_message(&self, tuning: Tuning, direct: DirectThresholds) -> v1::Tuning {
        let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        v1::Tuning {
            channels: tuning.channels,
            chunk_bytes: tuning.chunk.0,
            segment_bytes: tuning.segment.0,
            copy_bytes: tuning.copy_threshold.0,
            landing_slots: tuning.landing_slots,
            operation_timeout_ns: nanos(self.settings.operation_timeout),
            peer_timeout_ns: 0,
            one_shot_bytes: direct.one_shot.0,
            two_shot_bytes: direct.two_shot.0,
        }
    }
}
