//! From a complete set of joins, or a new order, to a recipe for each participant.

use super::communicator::{Communicator, Member, Pending};
use super::join::Waiting;
use super::{Fact, SessionId, State};
use harmonaize_api::v1::{self, to_agent};
use harmonaize_api::{LINK_BYTES, SECRET_BYTES};
use harmonaize_planner::{HostId, Tuning, order, tuning};
use rand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

impl State {
    /// All ranks have joined.
    pub(super) fn form(&mut self, now: Duration, (tenant, name): (String, String), waiting: &Waiting) {
        let mut by_session: BTreeMap<SessionId, Vec<(u32, u64)>> = BTreeMap::new();
        for (rank, (session, request)) in &waiting.joined {
            by_session.entry(*session).or_default().push((*rank, *request));
        }
        let mut members: Vec<Member> = by_session
            .into_iter()
            .filter_map(|(session, requests)| {
                let host = self.sessions.get(&session)?.host;
                let ranks = requests.iter().map(|(rank, _)| *rank).collect();
                let left = BTreeSet::new();
                Some(Member { host, session: Some(session), ranks, requests, left, closed: false })
            })
            .collect();
        members.sort_by_key(|member| member.ranks.first().copied());
        let hosts: Vec<HostId> = members.iter().map(|member| member.host).collect();
        let ring = order(&self.settings.topology, &hosts).into_iter().map(|index| index as u32).collect();
        self.formed = self.formed.wrapping_add(1);
        let id = u64::from(self.boot) << 32 | u64::from(self.formed);
        self.fact(Fact::Formed {
            communicator: id,
            tenant: tenant.clone(),
            name: name.clone(),
            ranks: waiting.ranks,
            hosts: hosts.iter().map(|host| self.host_name(*host)).collect(),
        });
        let communicator = Communicator {
            tenant,
            name,
            ranks: waiting.ranks,
            members,
            tuning: tuning(&self.settings.topology, &hosts),
            epoch: 0,
            order: Vec::new(),
            ports: Vec::new(),
            pending: None,
            next_epoch: 1,
            recovering: None,
            last_change: String::new(),
        };
        self.communicators.insert(id, communicator);
        self.propose(now, id, ring);
    }

    /// Starts the next epoch of a communicator with this order; its number.
    pub(super) fn propose(&mut self, now: Duration, id: u64, order: Vec<u32>) -> u64 {
        let Some(communicator) = self.communicators.get(&id) else { return 0 };
        let epoch = communicator.next_epoch;
        let addresses: Vec<String> = communicator.members.iter().map(|member| self.address(member)).collect();
        let hosts: Vec<HostId> = communicator.members.iter().map(|member| member.host).collect();
        let mut ports = Vec::new();
        let links = self.introduce(&hosts, &addresses, &mut ports);
        let Some(communicator) = self.communicators.get(&id) else { return 0 };
        let participants: Vec<v1::Participant> = communicator
            .members
            .iter()
            .map(|member| v1::Participant { ranks: member.ranks.clone(), host: self.host_name(member.host) })
            .collect();
        let tuning = self.tuning_message(communicator.tuning);
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
                local: local.collect(),
            };
            recipes.extend(member.session.map(|session| (session, recipe)));
        }
        let deadline = Some(now.saturating_add(self.settings.prepare_timeout));
        let (prepared, switched) = (BTreeSet::new(), BTreeSet::new());
        if let Some(communicator) = self.communicators.get_mut(&id) {
            communicator.next_epoch += 1;
            communicator.pending = Some(Pending { epoch, order, ports, prepared, switched, deadline });
        }
        for (session, recipe) in recipes {
            let first = epoch == 1;
            let message =
                if first { to_agent::Message::Form(recipe) } else { to_agent::Message::Change(recipe) };
            self.send(session, message);
        }
        epoch
    }

    /// Fresh links between all participants: for each its peers, in ascending order.
    fn introduce(
        &mut self,
        hosts: &[HostId],
        addresses: &[String],
        held: &mut Vec<(HostId, u16)>,
    ) -> Vec<Vec<v1::Peer>> {
        let mut links: Vec<Vec<v1::Peer>> = hosts.iter().map(|_| Vec::new()).collect();
        for (low, (host, low_address)) in hosts.iter().zip(addresses).enumerate() {
            for (high, high_address) in addresses.iter().enumerate().skip(low + 1) {
                let mut link = [0; LINK_BYTES];
                let mut secret = [0; SECRET_BYTES];
                self.random.fill_bytes(&mut link);
                self.random.fill_bytes(&mut secret);
                let source_ports: Vec<u32> =
                    (0..self.settings.paths).map(|_| u32::from(self.ports.take(*host, held))).collect();
                let peer = |participant: usize, address: &String, initiate| v1::Peer {
                    participant: participant as u32,
                    address: address.clone(),
                    link: link.to_vec(),
                    secret: secret.to_vec(),
                    initiate,
                    source_ports: source_ports.clone(),
                    rate_bits: 0,
                };
                let ends = [(low, peer(high, high_address, true)), (high, peer(low, low_address, false))];
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

    pub(super) fn tuning_message(&self, tuning: Tuning) -> v1::Tuning {
        let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        v1::Tuning {
            channels: tuning.channels,
            chunk_bytes: tuning.chunk.0,
            segment_bytes: tuning.segment.0,
            copy_bytes: tuning.copy.0,
            landing_slots: tuning.landing_slots,
            operation_timeout_ns: nanos(self.settings.operation_timeout),
            peer_timeout_ns: nanos(self.settings.peer_timeout),
        }
    }
}
