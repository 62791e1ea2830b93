//! A state machine with agents that are played: who got what.

use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_planner::Topology;
use harmonaize_server::state::testing::EpochView;
use harmonaize_server::state::{Controller, Output, SessionId, Settings};
use harmonaize_store::Change;
use std::collections::BTreeMap;
use std::time::Duration;

pub(super) const SECOND: Duration = Duration::from_secs(1);

/// Two leaves with hosts in turn, a spine, two tenants.
pub(super) fn settings(hosts: usize) -> Settings {
    let mut text = String::new();
    for switch in ["spine", "leaf0", "leaf1"] {
        text += &format!("[[switch]]\nname = \"{switch}\"\n");
    }
    let mut link = |from: &str, to: &str| {
        text +=
            &format!("[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nrate = \"1Gbit/s\"\ndelay = \"50us\"\n");
    };
    link("leaf0", "spine");
    link("leaf1", "spine");
    for host in 0..hosts {
        link(&format!("h{host}"), &format!("leaf{}", host % 2));
    }
    for host in 0..hosts {
        text += &format!("[[host]]\nname = \"h{host}\"\n");
    }
    settings_of(&text)
}

/// The same for a topology.
pub(super) fn settings_of(topology: &str) -> Settings {
    Settings {
        topology: Topology::parse(topology).unwrap(),
        tenants: vec!["a".to_owned(), "b".to_owned()],
        join_timeout: SECOND * 60,
        prepare_timeout: SECOND * 10,
        recovery_timeout: SECOND * 30,
        operation_timeout: SECOND * 30,
        paths: 2,
        source_ports: Some((20000, 20999)),
        most_ranks: 64,
        most_communicators: 6,
        telemetry_interval: SECOND,
        replan: true,
        turns: true,
        compression: true,
        direct: BTreeMap::new(),
        terms: BTreeMap::new(),
        most_weight: 8,
        longest_regroup: SECOND * 600,
    }
}

pub(super) struct World {
    pub state: Controller,
    pub now: Duration,
    /// What each session got and has not been looked at.
    pub got: BTreeMap<SessionId, Vec<to_agent::Message>>,
    pub ended: Vec<SessionId>,
    pub status: Vec<v1::StatusReply>,
    next: u64,
}

impl World {
    pub(super) fn new(settings: Settings, seed: u8) -> Self {
        let state = Controller::new(settings, [seed; 32]);
        let (got, ended, status) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { state, now: SECOND, got, ended, status, next: 1 }
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
                    agreed.extend(changes.into_iter().filter(|one| matches!(one, Change::Agreement(_))));
                }
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
        let heard = self.received(session);
        assert!(matches!(heard.as_slice(), [to_agent::Message::Welcome(_)]), "{heard:?}");
        session
    }

    pub(super) fn gone(&mut self, session: SessionId) {
        self.state.session_ended(self.now, session);
        self.run_until_quiet();
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
        let (tenant, communicator) = (tenant.to_owned(), name.to_owned());
        let request = request(&tenant, name, rank);
        self.send(
            session,
            from_agent::Message::Join(v1::Join {
                request,
                tenant,
                communicator,
                rank,
                ranks,
                ..v1::Join::default()
            }),
        );
    }

    /// What a communicator runs by.
    pub(super) fn epoch(&self, id: u64) -> EpochView {
        self.state.communicator_view(id).unwrap().current.unwrap()
    }

    /// The one refusal that a session got.
    pub(super) fn refusal(&mut self, session: SessionId) -> v1::JoinRefused {
        match self.received(session).as_slice() {
            [to_agent::Message::JoinRefused(refused)] => refused.clone(),
            other => panic!("no refusal but {other:?}"),
        }
    }

    /// A communicator with one rank for each session, in use.
    pub(super) fn form(&mut self, sessions: &[SessionId], name: &str) -> u64 {
        for (rank, session) in sessions.iter().enumerate() {
            self.join(*session, name, rank as u32, sessions.len() as u32);
        }
        let ids: Vec<u64> = sessions.iter().map(|session| self.recipe(*session).communicator).collect();
        self.prepare(sessions, ids[0], 1);
        ids[0]
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
            self.send(*session, from_agent::Message::Prepared(v1::Prepared { communicator, epoch }));
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

pub(super) fn request(tenant: &str, name: &str, rank: u32) -> u64 {
    let text = tenant.bytes().chain(name.bytes());
    text.fold(u64::from(rank), |sum, byte| sum.wrapping_mul(251).wrapping_add(u64::from(byte)))
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
