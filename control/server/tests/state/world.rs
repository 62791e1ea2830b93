//! A state machine with agents that are played: who got what.

use super::topology;
use harmonaize_abi::CommunicatorId;
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_planner::Topology;
use harmonaize_server::Config;
use harmonaize_server::state::testing::{EpochView, MemberView, Testing as _};
use harmonaize_server::state::{Controller, Fact, Output, Reason, ReorderError, SessionId, Settings};
use harmonaize_store::{Change, Stored};
use std::collections::BTreeMap;
use std::time::Duration;

pub(super) const SECOND: Duration = Duration::from_secs(1);

/// Two leaves with hosts in turn, a spine, two tenants.
pub(super) fn settings(hosts: usize) -> Settings {
    let mut text = ["spine", "leaf0", "leaf1"].map(topology::switch).concat();
    text += &["leaf0", "leaf1"].map(|leaf| topology::link(leaf, "spine", "50us")).concat();
    for host in 0..hosts {
        text += &topology::host(host);
        text += &topology::link(&format!("h{host}"), &format!("leaf{}", host % 2), "50us");
    }
    settings_of(&text)
}

/// The same for a topology.
pub(super) fn settings_of(topology: &str) -> Settings {
    const TEXT: &str = r#"
        listen = "127.0.0.1:0"
        topology = ""
        insecure_loopback = true
        lease = "30s"
        paths = 2
        source_ports = "20000-20999"
        most_ranks = 64
        most_communicators = 6
        tenant = [{ name = "a" }, { name = "b" }]
    "#;
    Config::parse(TEXT, Topology::parse(topology).unwrap()).unwrap().settings
}

pub(super) struct World {
    pub state: Controller,
    pub now: Duration,
    /// What each session got and has not been looked at.
    pub got: BTreeMap<SessionId, Vec<to_agent::Message>>,
    pub ended: Vec<SessionId>,
    pub status: Vec<v1::StatusReply>,
    /// Why epochs came to use.
    pub reasons: Vec<Reason>,
    /// What control has had stored.
    pub stored: Stored,
    next: u64,
}

impl World {
    pub(super) fn new(settings: Settings, seed: u8) -> Self {
        let state = Controller::new(settings, [seed; 32]);
        let (got, ended, status) = (BTreeMap::new(), Vec::new(), Vec::new());
        let (reasons, stored) = (Vec::new(), Stored::default());
        Self { state, now: SECOND, got, ended, status, reasons, stored, next: 1 }
    }

    /// The first hosts of four have a communicator in use, with a rank each.
    pub(super) fn formed<const N: usize>() -> (Self, [SessionId; N], u64) {
        let mut world = Self::new(settings(4), 7);
        let sessions = std::array::from_fn(|host| world.agent(host));
        let id = world.form(&sessions, "world");
        (world, sessions, id)
    }

    /// Carries out what the state decided.
    pub(super) fn run_until_quiet(&mut self) {
        let mut agreed = Vec::new();
        for output in self.state.take_outputs() {
            match output {
                Output::Send(session, message) => self.got.entry(session).or_default().push(message),
                Output::End(session) => self.ended.push(session),
                Output::Status(_, reply) => self.status.push(*reply),
                Output::Keep(changes) => {
                    changes.iter().for_each(|change| self.stored.apply(change));
                    agreed.extend(changes.into_iter().filter(|one| matches!(one, Change::Agreement(_))));
                }
                Output::Fact(Fact::EpochCurrent { reason, .. }) => self.reasons.push(reason),
                Output::Fact(_) => {}
            }
        }
        if !agreed.is_empty() {
            self.state.apply_stored(self.now, &agreed);
            self.run_until_quiet();
        }
    }

    pub(super) fn send(&mut self, from: SessionId, message: from_agent::Message) {
        self.state.message(self.now, from, message.into());
        self.run_until_quiet();
    }

    /// What a session got since it was looked at last.
    pub(super) fn received(&mut self, session: SessionId) -> Vec<to_agent::Message> {
        self.got.remove(&session).unwrap_or_default()
    }

    pub(super) fn hello(&mut self, hello: v1::Hello) -> SessionId {
        let session = SessionId(self.next);
        self.next += 1;
        self.send(session, from_agent::Message::Hello(hello));
        session
    }

    /// An agent that is welcomed.
    pub(super) fn agent(&mut self, host: usize) -> SessionId {
        let session = self.hello(hello(host, vec![]));
        only!(self.received(session), Welcome);
        session
    }

    /// Agents that say this of themselves; what they hear is dropped.
    pub(super) fn connect(&mut self, hellos: impl IntoIterator<Item = v1::Hello>) -> Vec<SessionId> {
        let sessions: Vec<SessionId> = hellos.into_iter().map(|hello| self.hello(hello)).collect();
        self.ignore(&sessions);
        sessions
    }

    /// Drops what these sessions got.
    pub(super) fn ignore(&mut self, sessions: &[SessionId]) {
        sessions.iter().for_each(|session| drop(self.received(*session)));
    }

    /// Whether these sessions got nothing.
    pub(super) fn is_quiet(&mut self, sessions: &[SessionId]) -> bool {
        sessions.iter().all(|session| self.received(*session).is_empty())
    }

    /// A session ends: its agent goes on, as far as anybody knows.
    pub(super) fn gone(&mut self, session: SessionId) {
        self.state.session_ended(self.now, session);
        self.run_until_quiet();
    }

    /// An agent's host dies, and its session ends. The first of its peers in each communicator reports that
    /// its ranks are lost.
    pub(super) fn dies(&mut self, session: SessionId) {
        let ids = self.state.communicator_ids().into_iter();
        let views: Vec<_> = ids.filter_map(|id| Some((id, self.state.communicator_view(id)?))).collect();
        self.gone(session);
        for (CommunicatorId(communicator), view) in views {
            let ranks = |member: &MemberView| (member.session == Some(session)).then(|| member.ranks.clone());
            let Some(ranks) = view.members.iter().find_map(ranks) else { continue };
            let mut peers = view.members.iter().filter_map(|member| member.session);
            if let Some(peer) = peers.find(|peer| *peer != session) {
                self.send(peer, from_agent::Message::Failed(lost(communicator, ranks)));
            }
        }
    }

    pub(super) fn wait(&mut self, time: Duration) {
        self.now += time;
        self.state.expire(self.now);
        self.run_until_quiet();
    }

    pub(super) fn join(&mut self, session: SessionId, name: &str, rank: u32, ranks: u32) {
        self.join_as(session, "a", name, rank, ranks);
    }

    pub(super) fn join_as(&mut self, session: SessionId, tenant: &str, name: &str, rank: u32, ranks: u32) {
        self.send(session, from_agent::Message::Join(join_of(tenant, name, rank, ranks)));
    }

    /// One rank of each session joins as this says; their recipes.
    pub(super) fn join_all(&mut self, sessions: &[SessionId], join: &v1::Join) -> Vec<v1::Recipe> {
        for (rank, session) in (0..).zip(sessions) {
            let request = request(&join.tenant, &join.communicator, rank);
            let join = v1::Join { request, rank, ranks: sessions.len() as u32, ..join.clone() };
            self.send(*session, from_agent::Message::Join(join));
        }
        self.recipes(sessions)
    }

    /// The one recipe that each session got.
    pub(super) fn recipes(&mut self, sessions: &[SessionId]) -> Vec<v1::Recipe> {
        sessions.iter().map(|session| self.recipe(*session)).collect()
    }

    pub(super) fn dissolve(&mut self, id: u64) -> bool {
        let found = self.state.dissolve(self.now, CommunicatorId(id), "over");
        self.run_until_quiet();
        found
    }

    pub(super) fn reorder(&mut self, id: u64, hosts: &[&str]) -> Result<u64, ReorderError> {
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_owned()).collect();
        let epoch = self.state.reorder(self.now, CommunicatorId(id), &hosts);
        self.run_until_quiet();
        epoch.map(u64::from)
    }

    /// What a communicator runs by.
    pub(super) fn epoch(&self, id: u64) -> EpochView {
        self.state.communicator_view(CommunicatorId(id)).unwrap().current.unwrap()
    }

    /// The one refusal that a session got.
    pub(super) fn refusal(&mut self, session: SessionId) -> v1::JoinRefused {
        only!(self.received(session), JoinRefused)
    }

    /// A communicator with one rank for each session, in use.
    pub(super) fn form(&mut self, sessions: &[SessionId], name: &str) -> u64 {
        let id = self.join_all(sessions, &join_of("a", name, 0, 0))[0].communicator;
        self.prepare(sessions, id, 1);
        id
    }

    /// The one recipe that a session got.
    pub(super) fn recipe(&mut self, session: SessionId) -> v1::Recipe {
        match self.received(session).as_slice() {
            [to_agent::Message::Form(recipe) | to_agent::Message::Change(recipe)] => recipe.clone(),
            other => panic!("no recipe but {other:?}"),
        }
    }

    pub(super) fn prepare(&mut self, sessions: &[SessionId], communicator: u64, epoch: u64) {
        for session in sessions {
            assert_eq!(self.received(*session), [], "not before all have prepared");
            self.send(
                *session,
                from_agent::Message::Prepared(v1::Prepared { communicator, epoch, links: None }),
            );
        }
        for session in sessions {
            assert_eq!(
                self.received(*session),
                [to_agent::Message::Ready(v1::Ready { communicator, epoch })]
            );
        }
    }

    pub(super) fn status(&mut self) -> v1::StatusReply {
        self.state.ask_status(self.now, SECOND);
        self.wait(SECOND);
        self.status.pop().expect("an answer after its patience")
    }
}

/// What a peer says of a host that has died.
pub(super) fn lost(communicator: u64, ranks: Vec<u32>) -> v1::Failed {
    let (kind, detail) = (v1::FailureKind::RanksLost.into(), "its links are down".to_owned());
    v1::Failed { communicator, kind, ranks, detail }
}

pub(super) fn request(tenant: &str, name: &str, rank: u32) -> u64 {
    let text = tenant.bytes().chain(name.bytes());
    text.fold(u64::from(rank), |sum, byte| sum.wrapping_mul(251).wrapping_add(u64::from(byte)))
}

/// A rank's join of a communicator.
pub(super) fn join_of(tenant: &str, name: &str, rank: u32, ranks: u32) -> v1::Join {
    let request = request(tenant, name, rank);
    let (tenant, communicator) = (tenant.to_owned(), name.to_owned());
    v1::Join { request, tenant, communicator, rank, ranks, ..v1::Join::default() }
}

/// What an agent that has this recipe says after control has restarted.
pub(super) fn running(recipe: &v1::Recipe) -> Vec<v1::Recipe> {
    let aggregation = recipe.aggregation.clone().map(|told| v1::Aggregation { key: vec![], ..told });
    vec![v1::Recipe { peers: vec![], aggregation, ..recipe.clone() }]
}

/// An operation that a participant's rank of the same number called and ended at these moments.
pub(super) fn operation(
    communicator: u64,
    operation: u64,
    bytes: u64,
    rank: u32,
    (called_ns, ended_ns): (u64, u64),
) -> v1::Operation {
    let ranks = vec![v1::RankTiming { rank, called_ns, ended_ns, ..Default::default() }];
    v1::Operation { communicator, operation, bytes, participant: rank, ranks, ..Default::default() }
}

pub(super) fn hello(host: usize, running: Vec<v1::Recipe>) -> v1::Hello {
    v1::Hello {
        protocol_version: PROTOCOL_VERSION,
        host: format!("h{host}"),
        listen: format!("10.0.0.{host}:4000"),
        build: "test".to_owned(),
        running,
        ..v1::Hello::default()
    }
}
