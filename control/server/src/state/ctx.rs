//! What parts of control read beside their own fields.

use crate::state::breach::Breach;
use crate::state::job::communicator::Communicator;
use crate::state::output::SessionId;
use crate::state::refusal::RequestRefusal;
use crate::state::settings::Settings;
use crate::state::world::agents::Session;
use crate::state::world::handovers::HandOvers;
use crate::state::world::iterations::Operations;
use crate::state::world::operator::Operator;
use harmonaize_abi::CommunicatorId;
use harmonaize_abi::session::{MAX_NAME, is_name};
use harmonaize_api::v1::JoinRefusedKind;
use harmonaize_api::{SECRET_BYTES, train_key};
use harmonaize_disclose::JoinFailure;
use harmonaize_planner::{HostId, Node, Path, SwitchId};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// What a part reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ctx<'a> {
    /// Time since control started.
    pub now: Duration,
    /// What the operator decided.
    pub settings: &'a Settings,
    /// Sessions of hosts' agents.
    pub sessions: &'a BTreeMap<SessionId, Session>,
    /// The session of each host's agent.
    pub hosts: &'a BTreeMap<HostId, SessionId>,
    /// Communicators by id.
    pub communicators: &'a BTreeMap<CommunicatorId, Communicator>,
    /// What agents told of each communicator's operations.
    pub iterations: &'a BTreeMap<CommunicatorId, Operations>,
    /// What operators decided while control runs, and the clock.
    pub operator: &'a Operator,
    /// Hosts whose links are to go over TCP alone.
    pub handovers: &'a HandOvers,
}

impl<'a> Ctx<'a> {
    /// Returns the name of a host.
    pub(crate) fn host_name(&self, host: HostId) -> String {
        self.settings.host_name(host)
    }

    /// Whether a communicator has traffic, as far as agents tell.
    pub(crate) fn seems_busy(&self, id: CommunicatorId) -> bool {
        let interval = self.settings.telemetry_interval;
        let heard = self.iterations.get(&id).map(Operations::last_report);
        interval.is_zero() || heard.is_none_or(|at| at + interval * 3 > self.now)
    }

    /// Whether a host's agent traces the ways of its links to another. Those of queue pairs are traced between the addresses at which
    /// agents listen, so that both ends must send from these.
    pub(crate) fn can_trace(&self, from: HostId, to: HostId) -> bool {
        let able = |host, can: fn(&Session) -> bool| self.session_of(host).is_some_and(can);
        let sends_there = |host| able(host, |session| session.abilities.queue_pair_routes);
        let routes = !self.links_by_queue_pairs((from, to)) || sends_there(from) && sends_there(to);
        able(from, |session| session.abilities.trace) && routes
    }

    /// Whether links between two hosts go over RDMA: both have agents that say so.
    pub(crate) fn links_by_queue_pairs(&self, pair: (HostId, HostId)) -> bool {
        let goes = |host| self.session_of(host).is_some_and(|session| session.abilities.links_over_tcp);
        goes(pair.0) && goes(pair.1)
    }

    /// Switches on the shortest ways between two hosts.
    pub(crate) fn switches_between(&self, pair: (HostId, HostId)) -> usize {
        let paths = self.settings.topology.equal_cost_paths(pair.0, pair.1);
        paths.first().map_or(1, |path| path.links().len().saturating_sub(1)).clamp(1, 16)
    }

    /// Whether a host sends and answers packet trains.
    pub(crate) fn can_probe(&self, host: HostId) -> bool {
        self.session_of(host).is_some_and(|session| session.abilities.probe.is_some())
    }

    /// Where `to` answers the trains of `from`, and their key.
    pub(crate) fn train_to(&self, from: HostId, to: HostId) -> Option<(SocketAddr, [u8; SECRET_BYTES])> {
        let (address, key) = self.session_of(to)?.abilities.probe?;
        let IpAddr::V4(source) = self.session_of(from)?.listen.ip() else { return None };
        Some((address, train_key(&key, source)))
    }

    fn session_of(&self, host: HostId) -> Option<&Session> {
        self.sessions.get(self.hosts.get(&host)?)
    }

    /// Whether every switch of a path can be named.
    pub(crate) fn is_named(&self, path: &Path) -> bool {
        let topology = &self.settings.topology;
        let switches = topology.switches_of(path);
        let known =
            |id: &SwitchId| topology.switches().get(id.0).is_some_and(|switch| !switch.addresses.is_empty());
        !switches.is_empty() && switches.iter().all(known)
    }

    /// A path in words: its host, switches and host.
    pub(crate) fn path_text(&self, path: &Path) -> String {
        let topology = &self.settings.topology;
        let ends: Vec<(Node, Node)> = path.links().iter().filter_map(|link| topology.ends(*link)).collect();
        let nodes = ends.first().map(|(from, _)| *from).into_iter().chain(ends.iter().map(|(_, to)| *to));
        nodes.map(|node| topology.node_name(node)).collect::<Vec<_>>().join(" > ")
    }

    /// Returns a communicator and the index of an agent in it; `None` for one that has ended.
    ///
    /// # Errors
    /// Where it is a communicator of others.
    pub(crate) fn part(
        &self,
        from: SessionId,
        id: CommunicatorId,
    ) -> Result<Option<(&'a Communicator, usize)>, Breach> {
        let Some(known) = self.communicators.get(&id) else { return Ok(None) };
        let index = known.index_of(from).ok_or(Breach::OtherCommunicator)?;
        Ok(Some((known, index)))
    }

    /// Returns the tenant's communicator of this name that runs: the latest, where an older one still ends.
    ///
    /// # Errors
    /// What the tenant is told where there is none.
    pub(crate) fn named(&self, tenant: &str, name: &str) -> Result<CommunicatorId, RequestRefusal> {
        if !self.settings.tenants.iter().any(|known| known == tenant) {
            return Err(RequestRefusal::UnknownTenant);
        }
        let runs = |known: &Communicator| known.tenant == tenant && known.name == name && !known.is_forming();
        let found = self.communicators.iter().rev().find(|(_, known)| runs(known));
        let none = || RequestRefusal::NoCommunicator(name.chars().take(80).collect());
        found.map(|(id, _)| *id).ok_or_else(none)
    }

    /// Whether there is such a tenant, and it can name a communicator so, by the rule that agents have too.
    ///
    /// # Errors
    /// Why a join is refused.
    pub(crate) fn check_names(
        &self,
        tenant: &String,
        name: &str,
    ) -> Result<(), (JoinRefusedKind, JoinFailure)> {
        if !self.settings.tenants.contains(tenant) {
            return Err((JoinRefusedKind::UnknownTenant, JoinFailure::UnknownTenant));
        }
        if !is_name(name) {
            return Err((JoinRefusedKind::Invalid, JoinFailure::BadName { max: MAX_NAME }));
        }
        Ok(())
    }

    /// Whether a tenant may not be on a host, by the file or by the operator who added it.
    pub(crate) fn is_elsewhere(&self, tenant: &str, host: &str) -> bool {
        let listed = self.settings.hosts.get(tenant);
        listed.is_some_and(|hosts| !hosts.contains(host)) || self.operator.is_elsewhere(tenant, host)
    }

    /// Whether a host is to get no new communicators.
    pub(crate) fn is_withdrawn(&self, host: HostId) -> bool {
        self.operator.withdrawn().hosts.contains(&host)
    }

    /// Returns the agent of the participant that leads a communicator.
    pub(crate) fn leader(&self, id: CommunicatorId) -> Option<SessionId> {
        self.communicators.get(&id)?.members.iter().find(|member| !member.closed)?.session
    }

    /// Returns the tenant and name of a communicator.
    pub(crate) fn owner(&self, id: CommunicatorId) -> Option<(String, String)> {
        self.communicators.get(&id).map(|known| (known.tenant.clone(), known.name.clone()))
    }
}

/// Lends a controller's parts that [`Ctx`] reads, and leaves the others free.
macro_rules! ctx {
    ($of:expr, $now:expr) => {
        $crate::state::ctx::Ctx {
            now: $now,
            settings: &$of.settings,
            sessions: &$of.sessions,
            hosts: &$of.hosts,
            communicators: &$of.communicators,
            iterations: &$of.iterations,
            operator: &$of.operator,
            handovers: &$of.handovers,
        }
    };
}
pub(crate) use ctx;
