//! What parts of control read beside their own fields, and what they have done by others.

use super::agents::Session;
use super::communicator::Communicator;
use super::decisions::Trigger;
use super::iterations::Operations;
use super::{Fact, Output, SessionId, Settings};
use harmonaize_api::v1::to_agent;
use harmonaize_planner::{Drains, HostId, Node, Path, SwitchId};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// What a part reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ctx<'a> {
    /// Time since control started.
    pub now: Duration,
    /// What the operator decided.
    pub settings: &'a Settings,
    /// Sessions of hosts' agents.
    pub sessions: &'a BTreeMap<SessionId, Session>,
    /// The session of each host's agent.
    pub hosts: &'a BTreeMap<HostId, SessionId>,
    /// Communicators by id.
    pub communicators: &'a BTreeMap<u64, Communicator>,
    /// What agents told of each communicator's operations.
    pub iterations: &'a BTreeMap<u64, Operations>,
    /// What is to carry nothing now.
    pub withdrawn: &'a Drains,
}

impl Ctx<'_> {
    /// Returns the name of a host.
    pub(super) fn host_name(&self, host: HostId) -> String {
        self.settings.topology.hosts().get(host.0).map_or_else(String::new, |host| host.name.clone())
    }

    /// Whether a communicator has traffic, as far as agents tell.
    pub(super) fn seems_busy(&self, id: u64) -> bool {
        let interval = self.settings.telemetry_interval;
        let heard = self.iterations.get(&id).map(Operations::last_report);
        interval.is_zero() || heard.is_none_or(|at| at + interval * 3 > self.now)
    }

    pub(super) fn can_trace(&self, host: HostId) -> bool {
        let session = self.hosts.get(&host).and_then(|session| self.sessions.get(session));
        session.is_some_and(|session| session.abilities.trace)
    }

    /// Switches on the shortest ways between two hosts.
    pub(super) fn switches_between(&self, pair: (HostId, HostId)) -> usize {
        let paths = self.settings.topology.equal_cost_paths(pair.0, pair.1);
        paths.first().map_or(1, |path| path.links().len().saturating_sub(1)).clamp(1, 16)
    }

    pub(super) fn probe_address(&self, host: HostId) -> Option<SocketAddr> {
        self.sessions.get(self.hosts.get(&host)?)?.abilities.probe
    }

    /// Whether every switch of a path can be named.
    pub(super) fn is_named(&self, path: &Path) -> bool {
        let topology = &self.settings.topology;
        let switches = topology.switches_of(path);
        let known =
            |id: &SwitchId| topology.switches().get(id.0).is_some_and(|switch| !switch.addresses.is_empty());
        !switches.is_empty() && switches.iter().all(known)
    }

    /// A path in words: its host, switches and host.
    pub(super) fn path_text(&self, path: &Path) -> String {
        let topology = &self.settings.topology;
        let ends: Vec<(Node, Node)> = path.links().iter().filter_map(|link| topology.ends(*link)).collect();
        let nodes = ends.first().map(|(from, _)| *from).into_iter().chain(ends.iter().map(|(_, to)| *to));
        nodes.map(|node| topology.node_name(node)).collect::<Vec<_>>().join(" > ")
    }
}

/// A connection's source port that control learned from an agent.
#[derive(Clone, Copy, Debug)]
pub(super) struct LearnedPort {
    /// The connection's communicator.
    pub communicator: u64,
    /// Its participants, the lower first.
    pub ends: (u32, u32),
    /// The host that connects.
    pub host: HostId,
    /// The port.
    pub port: u16,
}

/// What a part has done, in order.
#[derive(Debug, Default)]
pub(super) struct Effects {
    /// Messages and facts.
    pub outputs: Vec<Output>,
    /// The first thing that makes control plan.
    pub trigger: Option<Trigger>,
    /// Ports of connections that control did not know.
    pub ports: Vec<LearnedPort>,
    /// Communicators on whose paths a long queue stands, as an agent says.
    pub queues: Vec<u64>,
}

impl Effects {
    /// Sends a message.
    pub(super) fn send(&mut self, to: SessionId, message: to_agent::Message) {
        self.outputs.push(Output::Send(to, message));
    }

    /// Tells the operator's log.
    pub(super) fn fact(&mut self, fact: Fact) {
        self.outputs.push(Output::Fact(fact));
    }

    /// Something moved that may make another plan better.
    pub(super) fn want_plan(&mut self, trigger: Trigger) {
        self.trigger.get_or_insert(trigger);
    }

    /// Tells the operator's log what was refused of a host's agent: the first of a kind, and then ever more rarely.
    pub(super) fn unusual(&mut self, ctx: &Ctx<'_>, host: HostId, count: u64, why: &str) {
        if count.is_power_of_two() {
            let host = ctx.host_name(host);
            self.fact(Fact::TelemetryRefused { host, count, why: why.to_owned() });
        }
    }
}
