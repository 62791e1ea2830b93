//! An agent hands its place to a successor, step by step, beside its event loop.

use crate::agent::Agent;
use crate::control::{LedgerImage, Pause};
use crate::handover::{Greeting, HandOverError, LINKS, OVER_TCP, Obstacle, Offer, Peer, Place};
use crate::served::Tenants;
use crate::session::FrozenSession;
use harmonaize_engine::{Command, EngineImage};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// How long sessions and the session with control may take to come to rest; tenants' operations go on meanwhile.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a hand-over is called off. The text goes to the successor and to the operator.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandingError {
    /// Something of this agent cannot be handed over now.
    #[error(transparent)]
    Obstacle(#[from] Obstacle),
    /// None is configured.
    #[error("there is no place for successors")]
    NoPlace,
    /// They cannot be had for another process.
    #[error("sockets cannot be handed over: {0}")]
    Sockets(std::io::Error),
    /// Something went on for too long.
    #[error("{0} did not come to rest within {FREEZE_TIMEOUT:?}")]
    TooSlow(&'static str),
    /// Not all threads of the engine are there.
    #[error("a thread of the engine has ended")]
    EngineEnded,
    /// Control has not answered all joins.
    #[error("control's session cannot be handed over: joins are open")]
    JoinsOpen,
    /// The engine cannot stand still, or cannot be described.
    #[error(transparent)]
    Engine(#[from] harmonaize_engine::HandOverError),
    /// The successor does not take it.
    #[error(transparent)]
    Peer(#[from] HandOverError),
    /// Whatever talks to the successor has panicked.
    #[error(transparent)]
    Task(#[from] tokio::task::JoinError),
}

/// A hand-over, or that there is none.
pub(super) struct Handing {
    place: Option<Place>,
    own: Greeting,
    /// Whether links go over RDMA, but for those that control has go over TCP.
    over_rdma: bool,
    /// Whether control could do that when it was last there.
    control_can: bool,
    /// Whether it was asked to.
    requested: bool,
    /// When control is asked again to leave links as they are, for processes that have not come to this agent, a successor. None where
    /// they need not.
    keeps_from: Option<Instant>,
    standing: mpsc::UnboundedReceiver<FrozenSession>,
    stage: Stage,
}

enum Stage {
    Idle,
    /// The successor says who it is. The socket where other agents connect is for it.
    Greeting(JoinHandle<Result<Peer, HandOverError>>, OwnedFd),
    /// Links come to go over TCP alone.
    Links {
        peer: Peer,
        agents: OwnedFd,
        deadline: Instant,
    },
    /// The successor starts.
    Starting(JoinHandle<Result<Peer, HandOverError>>),
    /// Sessions come to rest.
    Sessions {
        peer: Peer,
        deadline: Instant,
        sessions: Vec<FrozenSession>,
    },
    /// The session with control ends.
    Control {
        peer: Peer,
        deadline: Instant,
        sessions: Vec<FrozenSession>,
    },
    /// The engine comes to a stand: which threads have.
    Engines {
        peer: Peer,
        since: Instant,
        sessions: Vec<FrozenSession>,
        images: Vec<Option<EngineImage>>,
    },
    /// The successor takes everything in; since when the engine stands still.
    Giving(JoinHandle<Result<i32, HandOverError>>, Instant),
}

impl Handing {
    /// Nobody has come yet. `over_rdma` is whether links go over RDMA by the agent's configuration, and `succeeds` whether this agent took
    /// another's place.
    pub(super) fn new(
        own: Greeting,
        (over_rdma, succeeds): (bool, bool),
        standing: mpsc::UnboundedReceiver<FrozenSession>,
    ) -> Self {
        let (place, stage) = (None, Stage::Idle);
        let keeps_from = succeeds.then(Instant::now);
        Self { place, own, over_rdma, control_can: false, requested: false, keeps_from, standing, stage }
    }

    /// There is a session with control, which forgot with the one before what it was asked for, or will. `control_can` is whether it can
    /// have links go over TCP alone.
    pub(super) fn connected(&mut self, agent: &mut Agent, control_can: bool, awaited: usize) {
        self.control_can = control_can;
        if self.requested && control_can {
            agent.ask_over_tcp(OVER_TCP);
        }
        self.keeps_from = self.keeps_from.map(|_| Instant::now());
        self.keep(agent, awaited);
    }

    /// Has control leave links over TCP while so many processes have not come to this agent, a successor. An operation that waits for one
    /// would keep an epoch over RDMA under way until then, and no later successor could be handed its links.
    pub(super) fn keep(&mut self, agent: &mut Agent, awaited: usize) {
        let now = Instant::now();
        let due = self.keeps_from.is_some_and(|at| now >= at || awaited == 0);
        if !due || !self.over_rdma || !self.control_can || self.requested {
            return;
        }
        let time = if awaited > 0 { OVER_TCP } else { Duration::ZERO };
        self.keeps_from = (awaited > 0).then(|| now + OVER_TCP / 2);
        agent.ask_over_tcp(time);
    }

    /// Whether a hand-over is under way.
    pub(super) fn is_running(&self) -> bool {
        !matches!(self.stage, Stage::Idle)
    }

    /// From now on successors come there.
    pub(super) fn open(&mut self, place: Option<Place>) {
        self.place = place;
    }

    /// The next process that asks for this agent's place.
    pub(super) async fn next(&self) -> Peer {
        match &self.place {
            Some(place) => place.next().await,
            None => std::future::pending().await,
        }
    }

    /// Begins with a successor. `agents` is the socket where other agents connect.
    pub(super) fn begin(&mut self, peer: Peer, agents: std::io::Result<OwnedFd>) {
        let agents = match agents {
            Ok(agents) => agents,
            Err(error) => {
                tracing::error!(%error, "sockets cannot be handed over");
                return peer.refuse(&error.to_string());
            }
        };
        tracing::info!(pid = peer.pid, "a successor asks for this agent's place");
        let own = self.own.clone();
        let hearing = tokio::task::spawn_blocking(move || peer.greeted(&own).map(|()| peer));
        self.stage = Stage::Greeting(hearing, agents);
    }

    /// Asks control to have links go over TCP alone, where they go over RDMA. An agent without such links needs no control, but is
    /// called off where some are made before its end.
    fn ask(&mut self, agent: &mut Agent, connected: bool) -> Result<(), Obstacle> {
        if !self.over_rdma {
            return Ok(());
        }
        self.requested = connected && self.control_can;
        if self.requested {
            tracing::info!("control is asked to have links go over TCP, which the successor can be handed");
            agent.ask_over_tcp(OVER_TCP);
        }
        Obstacle::of_links(agent.over_rdma(), connected, self.control_can).map_or(Ok(()), Err)
    }

    /// How many communicators have links that cannot be handed over.
    fn late(&self, agent: &Agent) -> usize {
        if self.over_rdma { agent.over_rdma() } else { 0 }
    }

    /// Has the successor start, with all sockets.
    fn start(&self, peer: Peer, agents: OwnedFd, tenants: &mut Tenants) -> Result<Stage, HandingError> {
        let place = self.place.as_ref().ok_or(HandingError::NoPlace)?;
        let own = place.descriptor();
        let listeners = own.and_then(|own| Ok(([agents, own], tenants.server().listeners()?)));
        let (ours, listeners) = listeners.map_err(|error| {
            peer.refuse(&error.to_string());
            HandingError::Sockets(error)
        })?;
        let (paths, sockets): (Vec<_>, Vec<_>) = listeners.into_iter().unzip();
        let sockets: Vec<OwnedFd> = ours.into_iter().chain(sockets).collect();
        let admitting = move || peer.admit(&Offer { sockets: paths }, &sockets).map(|()| peer);
        Ok(Stage::Starting(tokio::task::spawn_blocking(admitting)))
    }

    /// A thread of the engine stands still, or goes on.
    pub(super) fn handed(
        &mut self,
        thread: usize,
        image: Result<Box<EngineImage>, harmonaize_engine::HandOverError>,
    ) -> Result<(), HandingError> {
        let Stage::Engines { images, .. } = &mut self.stage else { return Ok(()) };
        let image = image?;
        if let Some(place) = images.get_mut(thread) {
            *place = Some(*image);
        }
        Ok(())
    }

    /// Goes on as far as it can without waiting for long. `connected` is whether there is a session with control, and `idle` whether nothing
    /// of it is still to be taken in.
    pub(super) async fn step(
        &mut self,
        agent: &mut Agent,
        tenants: &mut Tenants,
        pause: &Pause,
        (connected, idle): (bool, bool),
    ) {
        if let Err(why) = self.advance(agent, tenants, pause, (connected, idle)).await {
            self.call_off(agent, tenants, pause, &why.to_string());
        }
    }

    /// All goes on as before.
    pub(super) fn call_off(&mut self, agent: &mut Agent, tenants: &mut Tenants, pause: &Pause, why: &str) {
        tracing::error!(why, "the hand-over is called off; this agent goes on");
        match std::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::Links { peer, .. } | Stage::Sessions { peer, .. } | Stage::Control { peer, .. } => {
                peer.refuse(why);
            }
            Stage::Engines { peer, .. } => {
                peer.refuse(why);
                agent.command_all(|_| Command::Resume);
            }
            Stage::Giving(..) => drop(agent.command_all(|_| Command::Resume)),
            Stage::Idle | Stage::Greeting(..) | Stage::Starting(_) => {}
        }
        // Another control may be there by now, which would end the session of an agent that says what it does not know.
        if std::mem::take(&mut self.requested) {
            self.keeps_from = Some(Instant::now());
            self.keep(agent, tenants.server().awaited());
        }
        pause.set(false);
        self.release(tenants);
    }

    /// Has sessions go on, and lets go of what they said of themselves when they came to rest.
    pub(super) fn release(&mut self, tenants: &mut Tenants) {
        tenants.server().freeze(false);
        while self.standing.try_recv().is_ok() {}
    }

    async fn advance(
        &mut self,
        agent: &mut Agent,
        tenants: &mut Tenants,
        pause: &Pause,
        (connected, idle): (bool, bool),
    ) -> Result<(), HandingError> {
        let in_time = |deadline: Instant, what: &'static str| match Instant::now() < deadline {
            true => Ok(()),
            false => Err(HandingError::TooSlow(what)),
        };
        let stage = std::mem::replace(&mut self.stage, Stage::Idle);
        self.stage = match stage {
            Stage::Greeting(hearing, agents) if hearing.is_finished() => {
                let peer = hearing.await??;
                let bound = Obstacle::of_attachments(tenants.server().bound());
                let asked = bound.map_or_else(|| self.ask(agent, connected), Err);
                let deadline = Instant::now() + LINKS;
                self.stage = Stage::Links { peer, agents, deadline };
                return Ok(asked?);
            }
            Stage::Links { peer, agents, deadline } => {
                peer.waits()?;
                let late = self.late(agent);
                if late > 0 {
                    self.stage = Stage::Links { peer, agents, deadline };
                    if connected && !self.control_can {
                        return Err(Obstacle::OldControl.into());
                    }
                    let in_time = Instant::now() < deadline;
                    let obstacle = Obstacle::Late { communicators: late };
                    return if in_time { Ok(()) } else { Err(obstacle.into()) };
                }
                self.start(peer, agents, tenants)?
            }
            Stage::Starting(starting) if starting.is_finished() => {
                let peer = starting.await??;
                // Those that stood still at this process's own beginning have gone on since.
                while self.standing.try_recv().is_ok() {}
                tenants.server().freeze(true);
                Stage::Sessions { peer, deadline: Instant::now() + FREEZE_TIMEOUT, sessions: Vec::new() }
            }
            Stage::Sessions { peer, deadline, mut sessions } => {
                sessions.extend(std::iter::from_fn(|| self.standing.try_recv().ok()));
                let standing = sessions.len() >= tenants.server().connections();
                // Control may have said something of links while the successor started.
                if !standing || self.late(agent) > 0 {
                    self.stage = Stage::Sessions { peer, deadline, sessions };
                    // They have attached meanwhile, and their requests are not read.
                    Obstacle::of_attachments(tenants.server().bound()).map_or(Ok(()), Err)?;
                    return in_time(deadline, if standing { "links over RDMA" } else { "tenants' requests" });
                }
                pause.set(true);
                Stage::Control { peer, deadline, sessions }
            }
            Stage::Control { peer, deadline, mut sessions } => {
                // Whoever had just proved itself over TCP is a connection since, and comes to rest as a session.
                sessions.extend(std::iter::from_fn(|| self.standing.try_recv().ok()));
                let standing = sessions.len() >= tenants.server().connections();
                if connected || !idle || !standing || !agent.rests() {
                    self.stage = Stage::Control { peer, deadline, sessions };
                    let what = if standing { "the session with control" } else { "tenants' requests" };
                    return in_time(deadline, what);
                }
                let since = Instant::now();
                let threads = agent.command_all(|thread| Command::HandOver { thread });
                let threads = threads.ok_or(HandingError::EngineEnded)?;
                let images = (0..threads).map(|_| None).collect();
                Stage::Engines { peer, since, sessions, images }
            }
            Stage::Engines { peer, since, sessions, images }
                if images.iter().all(Option::is_some) && agent.has_sent_all() =>
            {
                let ledger = pause.image().await;
                let Some(ledger) = ledger else {
                    self.stage = Stage::Engines { peer, since, sessions, images };
                    return Err(HandingError::JoinsOpen);
                };
                let parts = (tenants.added(), agent.image(), ledger);
                let images = images.into_iter().flatten().collect();
                Stage::Giving(
                    tokio::task::spawn_blocking(move || give(&peer, images, sessions, parts)),
                    since,
                )
            }
            Stage::Giving(giving, since) if giving.is_finished() => {
                let given = giving
                    .await
                    .map_err(HandingError::Task)
                    .and_then(|given| given.map_err(HandingError::Peer));
                match given {
                    Ok(pid) => {
                        tracing::info!(pid, stood = ?since.elapsed(), "the successor is the agent from now on");
                        if let Ok(pid) = u32::try_from(pid) {
                            harmonaize_program::succeeded_by(pid);
                        }
                        // Nothing may end in order: all that this process has is the successor's.
                        std::process::exit(0);
                    }
                    Err(why) => {
                        agent.command_all(|_| Command::Resume);
                        return Err(why);
                    }
                }
            }
            stage => stage,
        };
        Ok(())
    }
}

fn give(
    peer: &Peer,
    engines: Vec<EngineImage>,
    sessions: Vec<FrozenSession>,
    parts: (Vec<Vec<u8>>, crate::agent::AgentImage, LedgerImage),
) -> Result<i32, HandOverError> {
    peer.give(engines, sessions, parts)?;
    Ok(peer.pid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{self, Event, Settings};
    use crate::counters::Counters;
    use crate::engines::Engines;
    use crate::handover::VERSION;
    use crate::paths::Paths;
    use crate::recipe::tests::recipe;
    use crate::session::{Freeze, Quota, SessionServer, SocketRules, TenantRules};
    use harmonaize_abi::SegmentId;
    use harmonaize_api::v1::{Abandon, Recipe, from_agent};
    use harmonaize_engine::{CommunicatorId, Engine, Epoch, Notice, start};
    use harmonaize_identity::Protection;
    use harmonaize_transport::loopback::Hub;
    use std::net::{Ipv4Addr, SocketAddr};
    use std::os::unix::net::UnixStream;

    /// An agent whose links go over RDMA, where a successor waits.
    struct World {
        handing: Handing,
        agent: Agent,
        tenants: Tenants,
        pause: Pause,
        successor: Peer,
        sent: mpsc::Receiver<from_agent::Message>,
    }

    impl World {
        /// Control has been asked to have links go over TCP. The agent has one communicator.
        fn new(stage: impl FnOnce(Peer, Instant) -> Stage) -> Self {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            let (peer, successor) = Peer::pair().unwrap();
            let (freeze, standing) = Freeze::new(false);
            let (requests, _asked) = mpsc::channel(1);
            let sockets = std::collections::BTreeMap::new();
            let server =
                SessionServer::bind_frozen(None, requests, Counters::default(), freeze, sockets).unwrap();
            let tenants = Tenants::serve(server, Vec::new(), None, None).unwrap();
            let (to_control, sent) = mpsc::channel(1024);
            let transport = Box::new(Hub::new().endpoint().unwrap());
            let engine = Engine::new(transport, Box::new(|_| {})).unwrap();
            let engines =
                Engines::new(vec![start(engine, 0, Duration::ZERO).unwrap().0], Counters::default());
            let telemetry = crate::telemetry::begin(None, "h0", address.ip(), &[]).unwrap().handle();
            let paths = Paths::begin(address, false);
            let agent = Agent::new(engines, to_control, telemetry, paths, Counters::default());
            let settings =
                Settings::new(vec![address.to_string()], Protection::InsecureLoopback, "h0".into(), address);
            let pause = control::connect(settings).pause;
            let (build, links) = (String::new(), String::new());
            let own = Greeting { version: VERSION, build, host: "h0".into(), threads: 0, links };
            let mut handing = Handing::new(own, (true, false), standing);
            handing.stage = stage(peer, Instant::now() + LINKS);
            (handing.control_can, handing.requested) = (true, true);
            let mut world = Self { handing, agent, tenants, pause, successor, sent };
            world.recipe(Event::Form(recipe(4, 1)));
            world
        }

        /// Links come to go over TCP.
        fn waiting() -> Self {
            let agents = UnixStream::pair().unwrap().0.into();
            Self::new(|peer, deadline| Stage::Links { peer, agents, deadline })
        }

        /// Control has this recipe prepared.
        fn recipe(&mut self, event: Event) {
            let check = self.agent.handle_control(event).unwrap();
            self.agent.handle_checked(Some(check.run()));
        }

        /// Goes on, with a session with control.
        async fn step(&mut self) {
            let Self { handing, agent, tenants, pause, .. } = self;
            handing.step(agent, tenants, pause, (true, true)).await;
        }

        /// For how long control was asked to have links go over TCP.
        fn requests(&mut self) -> Vec<u64> {
            let sent = std::iter::from_fn(|| self.sent.try_recv().ok());
            sent.filter_map(|message| match message {
                from_agent::Message::LinksOverTcp(request) => Some(request.for_ns),
                _ => None,
            })
            .collect()
        }
    }

    #[tokio::test]
    async fn a_successor_that_is_gone_has_links_go_back() {
        let mut world = World::waiting();
        world.step().await;
        assert!(world.handing.is_running() && world.requests().is_empty());
        let (_, another) = Peer::pair().unwrap();
        drop(std::mem::replace(&mut world.successor, another));
        world.step().await;
        assert!(!world.handing.is_running());
        assert_eq!(world.requests(), [0]);
    }

    /// As a successor, that a process has not come to.
    #[tokio::test]
    async fn links_stay_on_tcp_until_all_processes_have_come() {
        let long = u64::try_from(OVER_TCP.as_nanos()).unwrap();
        let successor = || {
            let mut world = World::new(|_, _| Stage::Idle);
            (world.handing.requested, world.handing.keeps_from) = (false, Some(Instant::now()));
            world
        };
        let mut world = successor();
        world.handing.connected(&mut world.agent, true, 0);
        assert_eq!(world.requests(), [0], "all have come: control need not wait");
        world.handing.keep(&mut world.agent, 0);
        world.handing.connected(&mut world.agent, true, 0);
        assert!(world.requests().is_empty(), "once");
        let mut world = successor();
        world.handing.connected(&mut world.agent, true, 2);
        world.handing.keep(&mut world.agent, 1);
        assert_eq!(world.requests(), [long]);
        world.handing.connected(&mut world.agent, true, 1);
        assert_eq!(world.requests(), [long], "of another session");
        world.handing.keeps_from = Some(Instant::now());
        world.handing.keep(&mut world.agent, 1);
        assert_eq!(world.requests(), [long], "before control forgets");
        world.handing.connected(&mut world.agent, false, 1);
        assert!(world.requests().is_empty(), "of a release that does not know it");
        world.handing.connected(&mut world.agent, true, 0);
        assert_eq!(world.requests(), [0]);
        // A later hand-over asks for itself.
        let mut world = successor();
        world.handing.connected(&mut world.agent, true, 1);
        world.handing.requested = true;
        world.handing.keep(&mut world.agent, 0);
        assert_eq!(world.requests(), [long]);
        world.handing.call_off(&mut world.agent, &mut world.tenants, &world.pause, "over");
        assert_eq!(world.requests(), [0], "all have come meanwhile");
    }

    #[tokio::test]
    async fn control_stays_while_links_may_use_rdma() {
        let mut world = World::new(|peer, deadline| Stage::Sessions { peer, deadline, sessions: Vec::new() });
        let stays = |world: &World| matches!(world.handing.stage, Stage::Sessions { .. });
        world.step().await;
        assert!(stays(&world), "its links go over RDMA");
        world.recipe(Event::Change(Recipe { epoch: 2, over_tcp: vec![0], ..recipe(4, 1) }));
        let (communicator, epoch) = (CommunicatorId(7), Epoch(2));
        world.agent.handle_notice(Notice::Switched { communicator, epoch, segment: SegmentId(0) });
        let again = world.agent.handle_control(Event::Change(Recipe { epoch: 3, ..recipe(4, 1) })).unwrap();
        world.step().await;
        assert!(stays(&world), "they are to go over RDMA again, as far as this agent knows");
        world.agent.handle_checked(Some(again.run()));
        world.step().await;
        assert!(stays(&world));
        world.agent.handle_control(Event::Abandon(Abandon {
            communicator: 7,
            epoch: 3,
            ..Abandon::default()
        }));
        world.step().await;
        assert!(matches!(world.handing.stage, Stage::Control { .. }));
    }

    #[tokio::test]
    async fn the_engine_goes_on_while_a_connection_is_no_session() {
        let mut world = World::new(|peer, deadline| Stage::Control { peer, deadline, sessions: Vec::new() });
        let folder = tempfile::tempdir().unwrap();
        let (path, uids) = (folder.path().join("a.sock"), vec![rustix::process::geteuid().as_raw()]);
        let rules = TenantRules {
            tenant: "a".into(),
            socket: Some(SocketRules { path: path.clone(), uids }),
            secret: None,
            addresses: Vec::new(),
            quota: Quota::default(),
            remote: false,
            rdma: false,
            handshake: Duration::from_secs(60),
        };
        world.tenants.server().apply(&[rules]).unwrap();
        let visitor = UnixStream::connect(&path).unwrap();
        for there in [1, 0] {
            while world.tenants.server().connections() != there {
                tokio::task::yield_now().await;
            }
            let World { handing, agent, tenants, pause, .. } = &mut world;
            assert!(agent.rests());
            handing.step(agent, tenants, pause, (false, true)).await;
            match there {
                0 => assert!(matches!(handing.stage, Stage::Engines { .. })),
                _ => assert!(matches!(handing.stage, Stage::Control { .. }), "it is not handed over"),
            }
            let _ = visitor.shutdown(std::net::Shutdown::Both);
        }
    }

    #[tokio::test]
    async fn a_control_that_cannot_move_links_is_told_nothing_of_them() {
        let mut world = World::waiting();
        world.step().await;
        assert!(world.handing.is_running() && world.successor.waits().is_ok());
        world.handing.call_off(&mut world.agent, &mut world.tenants, &world.pause, "over");
        assert_eq!(world.requests(), [0], "they need not any more");
        // Another one leads from now on.
        let mut world = World::waiting();
        world.handing.connected(&mut world.agent, false, 0);
        world.step().await;
        assert!(!world.handing.is_running(), "nothing is waited for");
        let why = world.successor.waits().unwrap_err().to_string();
        assert!(why.contains(&Obstacle::OldControl.to_string()), "{why}");
        assert!(world.requests().is_empty(), "it takes the session for broken");
    }
}
