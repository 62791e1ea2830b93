//! An agent: the real one's parts, from its session with control to its engine, on the world's runtime.

use crate::control::{PATIENCE, SILENCE};
use crate::links::Network;
use crate::wires::Wires;
use harmonaize_agent::agent::Agent;
use harmonaize_agent::control::{Event, Settings, connect};
use harmonaize_agent::counters::{Counted, Counters};
use harmonaize_agent::engines::Engines;
use harmonaize_agent::paths::Paths;
use harmonaize_agent::session::{Quota, SessionRequest, TenantLimits};
use harmonaize_agent::telemetry;
use harmonaize_agent::wiring::{Remainder, Wiring};
use harmonaize_api::v1;
use harmonaize_engine::{Engine, Runner, prepare};
use harmonaize_identity::Protection;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use std::mem::ManuallyDrop;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{AbortHandle, spawn_local};

/// Longer than this an engine does not wait without a look.
const NAP: Duration = Duration::from_secs(1);

/// Rounds that an engine has done something in a millisecond.
const ROUNDS: u32 = 50;

/// How much room the queues of an agent have, and how slow it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    commands: usize,
    requests: usize,
    /// Towards control and from it; what the engine notices has 512 for itself.
    session: usize,
    /// Most milliseconds that checking a recipe takes.
    check: u64,
}

impl Sizes {
    pub(crate) fn new(random: &mut ChaCha8Rng) -> Self {
        Self {
            commands: *[1, 2, 1024].get(random.random_range(0..3)).unwrap(),
            requests: *[1, 2, 1024].get(random.random_range(0..3)).unwrap(),
            session: *[514, 1024].get(random.random_range(0..2)).unwrap(),
            check: *[0, 10, 1500].get(random.random_range(0..3)).unwrap(),
        }
    }
}

/// An agent that runs.
pub(crate) struct Host {
    pub(crate) requests: mpsc::Sender<SessionRequest>,
    /// Something was submitted to the engine.
    pub(crate) bell: Arc<Notify>,
    /// The engine has done something.
    pub(crate) done: Arc<Notify>,
    pub(crate) limits: TenantLimits,
    pub(crate) port: u16,
    pub(crate) counters: Counters,
    /// Whether the agent's task goes on, and the engine's thread.
    pub(crate) agent_runs: watch::Sender<bool>,
    pub(crate) engine_runs: watch::Sender<bool>,
    /// Has the agent end in order.
    pub(crate) stop: Arc<Notify>,
    tasks: Vec<AbortHandle>,
}

impl Host {
    pub(crate) fn start(
        index: usize,
        network: &Network,
        wires: &Wires,
        sizes: Sizes,
        mut random: ChaCha8Rng,
    ) -> Self {
        let (bell, done) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let links = network.endpoint(Arc::clone(&bell));
        let (port, due) = (links.port(), links.due());
        let (notices, heard) = mpsc::unbounded_channel();
        let notify = Box::new(move |notice| drop(notices.send(notice)));
        let engine = Engine::new(Box::new(links), notify).unwrap();
        let (handle, runner) = prepare(engine, sizes.commands).unwrap();
        let counters = Counters::default();
        let engines = Engines::new(vec![handle], counters.clone());
        let name = format!("h{index}");
        let listen = (Ipv4Addr::LOCALHOST, port).into();
        let settings =
            Settings::new(vec!["control:1".to_owned()], Protection::InsecureLoopback, name.clone(), listen);
        let control = connect(Settings {
            dial: Some(wires.dial(index)),
            queue: sizes.session,
            session_timeout: SILENCE,
            join_timeout: PATIENCE,
            connect_timeout: Duration::from_secs(2),
            retry: (Duration::from_millis(100), Duration::from_secs(1)),
            ..settings
        });
        let telemetry = telemetry::begin(None, &name, Ipv4Addr::LOCALHOST.into(), &[]).unwrap();
        // Nobody traces over IPv6: no socket is opened.
        let paths = Paths::begin("[::1]:1".parse().unwrap(), false);
        let agent = Agent::new(engines, control.to_control, telemetry.handle(), paths, counters.clone());
        let (requests, asked) = mpsc::channel(sizes.requests);
        let wiring = Wiring::new(agent, heard, asked, control.events);
        let stop = Arc::new(Notify::new());
        let (agent_runs, engine_runs) = (watch::Sender::new(true), watch::Sender::new(true));
        let take = move || Duration::from_millis(random.random_range(0..=sizes.check));
        let tasks = vec![
            control.task.abort_handle(),
            spawn_local(agent_task(
                wiring,
                (Arc::clone(&bell), Arc::clone(&stop)),
                agent_runs.subscribe(),
                take,
            ))
            .abort_handle(),
            spawn_local(engine_task(
                runner,
                (Arc::clone(&bell), Arc::clone(&done)),
                due,
                engine_runs.subscribe(),
            ))
            .abort_handle(),
        ];
        let limits = TenantLimits::of(Quota::default(), &counters);
        Self { requests, bell, done, limits, port, counters, agent_runs, engine_runs, stop, tasks }
    }

    /// Ends all at once, as when its process is killed.
    pub(crate) fn kill(&self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }

    /// What only a broken invariant leads to has not happened.
    pub(crate) fn check(&self) {
        for counted in [
            Counted::CommandLost,
            Counted::MessageLost,
            Counted::CommunicatorPanic,
            Counted::AttachmentPanic,
            Counted::SessionPanic,
        ] {
            assert_eq!(self.counters.get(counted), 0, "{counted:?}");
        }
    }
}

/// The agent's task, as the daemon's but for tenants of its configuration, hand-overs and signals.
async fn agent_task(
    mut wiring: Wiring,
    (bell, stop): (Arc<Notify>, Arc<Notify>),
    mut runs: watch::Receiver<bool>,
    mut take: impl FnMut() -> Duration,
) {
    while runs.wait_for(|runs| *runs).await.is_ok() {
        let next = tokio::select! {
            next = wiring.next() => next,
            () = stop.notified() => {
                wiring.agent.stop();
                None
            }
        };
        match next {
            None => {}
            Some(Remainder::Check(check)) => {
                let takes = take();
                wiring.check(async move {
                    tokio::time::sleep(takes).await;
                    check.run()
                });
            }
            Some(Remainder::Event(Event::ServeTenants(_))) => {
                wiring.agent.tenants_served(v1::TenantsServed::default());
            }
            Some(Remainder::Event(event)) => wiring.handle_control(event),
            Some(Remainder::Notice(notice)) => panic!("nobody hands over: {notice:?}"),
        }
        bell.notify_one();
    }
}

/// The engine's thread: works while there is work, then waits for more, or for a timer.
async fn engine_task(
    runner: Runner,
    (bell, done): (Arc<Notify>, Arc<Notify>),
    due: Arc<Mutex<Option<Instant>>>,
    mut runs: watch::Receiver<bool>,
) {
    // What a process leaves that is killed: it drops nothing, and so frees no page of a tenant's.
    let mut runner = ManuallyDrop::new(runner);
    let mut busy = 0;
    while runs.wait_for(|runs| *runs).await.is_ok() {
        match runner.round() {
            None => return drop(ManuallyDrop::into_inner(runner)),
            Some(0) => {
                let timer = runner.sleep_timeout().unwrap_or(NAP).min(NAP);
                let next = due.lock().unwrap().map(|due| due.saturating_duration_since(Instant::now()));
                let wait = next.unwrap_or(NAP).min(timer);
                let _ = tokio::time::timeout(wait, bell.notified()).await;
            }
            Some(_) => {
                done.notify_waiters();
                busy += 1;
                match busy % ROUNDS {
                    0 => tokio::time::sleep(Duration::from_millis(1)).await,
                    _ => tokio::task::yield_now().await,
                }
            }
        }
    }
}
