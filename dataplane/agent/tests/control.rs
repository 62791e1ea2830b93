//! The agent's session against the real control server, over loopback.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod settings;

use harmonaize_abi::{CommunicatorId, Epoch};
use harmonaize_agent::control::{Control, Event, Settings, connect};
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_api::v1::{self, RefusedKind, from_agent};
use harmonaize_identity::Protection;
use harmonaize_server::{Config, Server};
use harmonaize_testkit::topology::star;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(30);

fn config(listen: SocketAddr) -> Config {
    Config { listen, ..settings::config(&star(2, "1Gbit/s"), LIMIT) }
}

struct Server0 {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Server0 {
    async fn start(listen: SocketAddr) -> Self {
        Self::of(config(listen)).await
    }

    async fn of(config: Config) -> Self {
        let server = Server::bind(config).await.unwrap();
        let address = server.local_address();
        let (stop, stopped) = oneshot::channel();
        let stopped = async {
            let _ = stopped.await;
        };
        let task = tokio::spawn(async move { server.run(stopped).await.unwrap() });
        Self { address, stop, task }
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        timeout(LIMIT, self.task).await.unwrap().unwrap();
    }
}

fn any() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn agent(control: SocketAddr, host: &str) -> Control {
    let mut settings = Settings::new(
        vec![control.to_string()],
        Protection::InsecureLoopback,
        host.to_owned(),
        "127.0.0.1:9".parse().unwrap(),
    );
    settings.retry = (Duration::from_millis(5), Duration::from_millis(50));
    connect(settings)
}

async fn next(agent: &mut Control) -> Event {
    timeout(LIMIT, agent.events.recv()).await.expect("an event in time").expect("the task runs")
}

/// The next event that is not about the session.
async fn next_event(agent: &mut Control) -> Event {
    loop {
        match next(agent).await {
            Event::Connected(_) | Event::Disconnected { .. } => {}
            event => return event,
        }
    }
}

async fn join(agent: &Control, rank: u32) {
    let (tenant, communicator) = ("a".to_owned(), "world".to_owned());
    let join = v1::Join {
        request: u64::from(rank) + 1,
        tenant,
        communicator,
        rank,
        ranks: 2,
        ..v1::Join::default()
    };
    agent.to_control.send(from_agent::Message::Join(join)).await.unwrap();
}

async fn formed(agents: &mut [Control; 2]) -> u64 {
    let mut ids = Vec::new();
    for agent in agents.iter_mut() {
        let Event::Form(recipe) = next_event(agent).await else { panic!("no recipe") };
        let prepared = v1::Prepared { communicator: recipe.communicator, epoch: recipe.epoch, links: None };
        agent.to_control.send(from_agent::Message::Prepared(prepared)).await.unwrap();
        ids.push(recipe.communicator);
    }
    for agent in agents {
        assert_eq!(
            next_event(agent).await,
            Event::Ready { communicator: CommunicatorId(ids[0]), epoch: Epoch(1) }
        );
    }
    ids[0]
}

#[tokio::test]
async fn forms_and_answers_reports() {
    let control = Server0::start(any()).await;
    let mut agents = ["h0", "h1"].map(|host| agent(control.address, host));
    join(&agents[0], 0).await;
    join(&agents[1], 1).await;
    let id = formed(&mut agents).await;
    let mut operator = ProviderClient::connect(format!("http://{}", control.address)).await.unwrap();
    let patience_ns = LIMIT.as_nanos() as u64;
    let asking = tokio::spawn(async move { operator.status(v1::StatusRequest { patience_ns }).await });
    for agent in &mut agents {
        let Event::ReportRequest { id } = next_event(agent).await else { panic!("no question") };
        let report = v1::Report { id, errors: 3, ..v1::Report::default() };
        agent.to_control.send(from_agent::Message::Report(report)).await.unwrap();
    }
    let status = asking.await.unwrap().unwrap().into_inner();
    assert!(status.agents.iter().all(|agent| agent.report.as_ref().is_some_and(|report| report.errors == 3)));

    // The second agent goes, and its host has another, which knows of nothing: the first is told who is lost.
    let [mut first, second] = agents;
    drop(second.to_control);
    timeout(LIMIT, second.task).await.unwrap().unwrap();
    let _second = agent(control.address, "h1");
    let Event::Dissolve(dissolved) = next_event(&mut first).await else { panic!("not dissolved") };
    assert_eq!((dissolved.communicator, dissolved.ranks.as_slice()), (id, [1].as_slice()));
    assert_eq!(dissolved.kind(), v1::FailureKind::RanksLost);
    control.stop().await;
}

#[tokio::test]
async fn outlives_a_restart_of_control() {
    let control = Server0::start(any()).await;
    let address = control.address;
    let mut agents = ["h0", "h1"].map(|host| agent(address, host));
    join(&agents[0], 0).await;
    join(&agents[1], 1).await;
    let id = formed(&mut agents).await;
    control.stop().await;
    for agent in &mut agents {
        while !matches!(next(agent).await, Event::Disconnected { .. }) {}
    }
    let control = Server0::start(address).await;
    // Both come back with the communicator: it is whole again, and can be changed.
    for agent in &mut agents {
        assert_eq!(
            next_event(agent).await,
            Event::Ready { communicator: CommunicatorId(id), epoch: Epoch(1) }
        );
    }
    let mut operator = ProviderClient::connect(format!("http://{address}")).await.unwrap();
    let hosts = vec!["h1".to_owned(), "h0".to_owned()];
    let epoch =
        operator.reorder(v1::ReorderRequest { communicator: id, hosts }).await.unwrap().into_inner().epoch;
    for agent in &mut agents {
        let Event::Change(recipe) = next_event(agent).await else { panic!("no change") };
        assert_eq!((recipe.epoch, recipe.order.as_slice()), (epoch, [1, 0].as_slice()));
        assert_eq!(recipe.peers.len(), 1);
        assert_eq!(recipe.local_ranks.len(), 1);
    }
    control.stop().await;
}

/// A connection to control that can be cut. What is sent over it then gets nowhere, and nobody learns that it does not
/// arrive.
struct Way {
    address: SocketAddr,
    open: watch::Sender<bool>,
}

impl Way {
    async fn to(control: SocketAddr) -> Self {
        let listener = TcpListener::bind(any()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (open, is_open) = watch::channel(true);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let far = TcpStream::connect(control).await.unwrap();
                let (near, far) = (near.into_split(), far.into_split());
                tokio::spawn(pass(near.0, far.1, is_open.clone()));
                tokio::spawn(pass(far.0, near.1, is_open.clone()));
            }
        });
        Self { address, open }
    }
}

/// Hands bytes on while the way is open.
async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut is_open: watch::Receiver<bool>) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        if is_open.wait_for(|open| *open).await.is_err() || to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn a_cut_of_the_way_to_control_ends_nothing() {
    let mut config = config(any());
    config.session_timeout = Duration::from_millis(400);
    let control = Server0::of(config).await;
    let way = Way::to(control.address).await;
    let mut agents = [agent(control.address, "h0"), agent(way.address, "h1")];
    join(&agents[0], 0).await;
    join(&agents[1], 1).await;
    let id = formed(&mut agents).await;
    let mut operator = ProviderClient::connect(format!("http://{}", control.address)).await.unwrap();
    let mut phase = async || {
        let request = v1::StatusRequest { patience_ns: 1 };
        operator.status(request).await.unwrap().into_inner().communicators[0].phase()
    };
    way.open.send(false).unwrap();
    // Longer than a silent session lives.
    timeout(LIMIT, async { while phase().await != v1::Phase::Recovering {} })
        .await
        .expect("the session ends");
    let want = v1::SetBudget { communicator: id, rank: 1, budget: None };
    agents[1].to_control.send(from_agent::Message::SetBudget(want)).await.unwrap();
    way.open.send(true).unwrap();
    timeout(LIMIT, async { while phase().await != v1::Phase::Running {} }).await.expect("it comes back");
    // Neither was told of an end; the second may use what it used.
    let ready = Event::Ready { communicator: CommunicatorId(id), epoch: Epoch(1) };
    while next_event(&mut agents[1]).await != ready {}
    let hosts = vec!["h1".to_owned(), "h0".to_owned()];
    operator.reorder(v1::ReorderRequest { communicator: id, hosts }).await.unwrap();
    for agent in &mut agents {
        loop {
            match next_event(agent).await {
                Event::ReportRequest { .. } | Event::Ready { .. } => {}
                Event::Change(recipe) => break assert_eq!(recipe.order, [1, 0]),
                other => panic!("{other:?}"),
            }
        }
    }
    control.stop().await;
}

#[tokio::test]
async fn waits_for_control_and_says_why() {
    let control = Server0::start(any()).await;
    let address = control.address;
    control.stop().await;
    let mut first = agent(address, "h0");
    join(&first, 0).await;
    let Event::Disconnected { reason, refused } = next(&mut first).await else { panic!("connected") };
    assert!(reason.contains("refused") && refused.is_none(), "{reason}");
    let control = Server0::start(address).await;
    let mut second = agent(address, "h1");
    join(&second, 1).await;
    assert!(matches!(next_event(&mut first).await, Event::Form(_)));
    assert!(matches!(next_event(&mut second).await, Event::Form(_)));

    let mut twin = agent(address, "h1");
    let Event::Disconnected { reason, refused } = next(&mut twin).await else { panic!("connected") };
    assert_eq!(refused, Some(RefusedKind::HostInUse), "{reason}");
    let mut stranger = agent(address, "h9");
    let Event::Disconnected { reason, refused } = next(&mut stranger).await else { panic!("connected") };
    assert_eq!(refused, Some(RefusedKind::UnknownHost), "{reason}");
    control.stop().await;
}

#[tokio::test]
async fn refuses_joins_when_control_stays_away() {
    let control = Server0::start(any()).await;
    let address = control.address;
    control.stop().await;
    let mut settings = Settings::new(
        vec![address.to_string()],
        Protection::InsecureLoopback,
        "h0".to_owned(),
        "127.0.0.1:9".parse().unwrap(),
    );
    settings.retry = (Duration::from_millis(5), Duration::from_millis(10));
    settings.join_timeout = Duration::from_millis(50);
    let mut lonely = connect(settings);
    join(&lonely, 0).await;
    let Event::JoinRefused(refused) = next_event(&mut lonely).await else { panic!("not refused") };
    assert_eq!((refused.request, refused.kind()), (1, v1::JoinRefusedKind::Unavailable));
    assert_eq!(refused.text, "the provider cannot form communicators now; try again later");
}

#[tokio::test]
async fn telemetry_nobody_asked_for_is_dropped() {
    for (interval, taken) in [(Duration::ZERO, (0, 1)), (LIMIT, (1, 0))] {
        let mut config = config(any());
        config.settings.telemetry_interval = interval;
        let control = Server0::of(config).await;
        let mut agent = agent(control.address, "h0");
        let Event::Connected(welcome) = next(&mut agent).await else { panic!("not connected") };
        assert_eq!(welcome.telemetry_interval_ns, interval.as_nanos() as u64);
        let report = v1::TelemetryReport { sequence: 1, ..v1::TelemetryReport::default() };
        agent.to_control.send(from_agent::Message::Telemetry(report)).await.unwrap();
        let mut operator = ProviderClient::connect(format!("http://{}", control.address)).await.unwrap();
        let patience_ns = LIMIT.as_nanos() as u64;
        let asking = tokio::spawn(async move { operator.status(v1::StatusRequest { patience_ns }).await });
        // The answer comes behind the telemetry, where that was sent.
        let Event::ReportRequest { id } = next_event(&mut agent).await else { panic!("no question") };
        agent
            .to_control
            .send(from_agent::Message::Report(v1::Report { id, ..Default::default() }))
            .await
            .unwrap();
        let status = asking.await.unwrap().unwrap().into_inner();
        let told = status.agents[0].telemetry.as_ref();
        assert_eq!(told.map(|told| (told.reports, told.dropped)), Some(taken));
        control.stop().await;
    }
}
