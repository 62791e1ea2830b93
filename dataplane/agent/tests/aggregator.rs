//! An aggregator as it runs, with the real control server, and workers that know what control told them: over loopback.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod settings;

use harmonaize_abi::{Dtype, Epoch, GrantId, ReduceOp, SegmentIndex};
use harmonaize_agent::aggregator::{self, AggregatorConfig, ParentConfig};
use harmonaize_agent::control::{Control, Event, Settings, connect};
use harmonaize_aggregator::packet::HEADER_BYTES;
use harmonaize_aggregator::{Codes, Event as Done, Key, PayloadFormat, Task, Tensors, Worker, WorkerConfig};
use harmonaize_api::v1::operator_client::OperatorClient;
use harmonaize_api::v1::{self, from_agent};
use harmonaize_identity::Protection;
use harmonaize_server::{Config, Server};
use harmonaize_testkit::topology::star_with_aggregator;
use harmonaize_transport::datagram::{DatagramConfig, Datagrams};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(30);
const HOSTS: usize = 4;
/// Elements of a segment; no multiple of a chunk's.
const ELEMENTS: u64 = 50_001;

fn any() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn control() -> Config {
    let mut config = settings::config(&star_with_aggregator(HOSTS, 1000, "0us"), LIMIT);
    config.settings.telemetry_interval = Duration::ZERO;
    config
}

/// An aggregator that runs until its end is dropped, and where it tells its metrics.
fn aggregator(control: SocketAddr) -> (oneshot::Sender<()>, tokio::task::JoinHandle<()>, SocketAddr) {
    // A port that was free a moment ago: the listener takes no port 0, for who scrapes must know it.
    let metrics = std::net::TcpListener::bind(any()).unwrap().local_addr().unwrap();
    let config = AggregatorConfig {
        name: "agg0".to_owned(),
        control: vec![control.to_string()],
        protection: Protection::InsecureLoopback,
        listen: any(),
        pool: 1 << 20,
        mtu: 1500,
        spin: Duration::ZERO,
        packets_per_second: Some(10_000_000),
        parent: ParentConfig { timeout: Duration::from_millis(100), retry_after: Duration::from_millis(2) },
        metrics,
        verbs: None,
        sandbox: Default::default(),
        source: None,
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async {
        let _ = stopped.await;
    };
    let task = tokio::spawn(async move { aggregator::run(config, stopped).await.unwrap() });
    (stop, task, metrics)
}

fn agent(control: SocketAddr, host: usize) -> Control {
    let listen = "127.0.0.1:9".parse().unwrap();
    let mut settings =
        Settings::new(vec![control.to_string()], Protection::InsecureLoopback, format!("h{host}"), listen);
    settings.abilities = v1::Capabilities { aggregation: true, ..v1::Capabilities::default() };
    connect(settings)
}

async fn next(agent: &mut Control) -> Event {
    loop {
        match timeout(LIMIT, agent.events.recv()).await.expect("an event in time").expect("the task runs") {
            Event::Connected(_) | Event::Disconnected { .. } => {}
            event => return event,
        }
    }
}

async fn fabric(operator: &mut OperatorClient<tonic::transport::Channel>) -> v1::FabricAggregator {
    operator.topology(v1::TopologyRequest {}).await.unwrap().into_inner().aggregators.remove(0)
}

/// Host `h`'s element `i` is `h + i`, small enough to be whole.
struct Ramp {
    host: f32,
    written: u64,
}

impl Tensors for Ramp {
    fn read(&self, _: SegmentIndex, offset: u64, _: usize, bytes: &mut [u8]) {
        for (to, at) in bytes.chunks_exact_mut(4).zip(offset..) {
            to.copy_from_slice(&(self.host + at as f32).to_le_bytes());
        }
    }
    fn write(&mut self, _: SegmentIndex, offset: u64, elements: usize, bytes: &[u8]) {
        for (sum, at) in bytes.chunks_exact(4).zip(offset..) {
            assert_eq!(sum, (6.0 + 4.0 * at as f32).to_le_bytes());
        }
        self.written += elements as u64;
    }
}

/// Workers by what control told them; each sums some segments.
fn sum(recipes: &[v1::Recipe], session: u64) {
    let begun = Instant::now();
    let mut hosts: Vec<(Worker, Datagrams, Ramp, SocketAddr)> = recipes
        .iter()
        .map(|recipe| {
            let told = recipe.aggregation.as_ref().expect("an aggregator");
            let bytes = HEADER_BYTES + 4 * told.chunk_elements as usize;
            let config = WorkerConfig {
                communicator: GrantId(told.communicator),
                worker: told.worker as u16,
                key: Key::new(&told.key.as_slice().try_into().unwrap()),
                format: PayloadFormat::Tensor { dtype: Dtype::F32, op: ReduceOp::Sum },
                elements: told.chunk_elements,
                window: told.window as u16,
                segments: 4,
                codes: Codes::default(),
                hosts: told.workers as u16,
                timeout: LIMIT,
                min_retry: Duration::from_millis(2),
                max_retry: Duration::from_millis(100),
                max_loss_permille: 1000,
            };
            let mut worker = Worker::new(config);
            worker.begin(Duration::ZERO, session);
            assert!((0..3).all(|segment| worker.submit(SegmentIndex(segment), Task::Sum(ELEMENTS))));
            let socket = Datagrams::bind(any(), DatagramConfig { bytes, ..DatagramConfig::default() });
            let ramp = Ramp { host: told.worker as f32, written: 0 };
            (worker, socket.unwrap(), ramp, told.address.parse().unwrap())
        })
        .collect();
    while hosts.iter().any(|(_, _, ramp, _)| ramp.written < 3 * ELEMENTS) {
        assert!(begun.elapsed() < LIMIT, "not done in time");
        for (worker, socket, ramp, to) in &mut hosts {
            while socket.push(|room| Some((*to, worker.poll_transmit(begun.elapsed(), ramp, room)?))) {}
            socket.flush();
            socket.receive(&mut |_, packet| worker.receive(begun.elapsed(), packet, ramp));
            while let Some(event) = worker.poll_event() {
                assert!(matches!(event, Done::Done { .. }), "{event:?}");
            }
        }
        std::thread::yield_now();
    }
}

async fn scraped(metrics: SocketAddr) -> String {
    let mut stream = tokio::net::TcpStream::connect(metrics).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

#[tokio::test]
async fn grants_are_summed_and_repeated_after_a_restart() {
    let server = Server::bind(control()).await.unwrap();
    let address = server.local_address();
    let (_stop_control, stopped) = oneshot::channel::<()>();
    tokio::spawn(server.run(async {
        let _ = stopped.await;
    }));
    let mut operator = OperatorClient::connect(format!("http://{address}")).await.unwrap();
    let (stop, task, metrics) = aggregator(address);
    while !fabric(&mut operator).await.connected {
        tokio::task::yield_now().await;
    }
    let mut agents: Vec<Control> = (0..HOSTS).map(|host| agent(address, host)).collect();
    for (rank, agent) in (0..).zip(&agents) {
        let (tenant, communicator) = ("a".to_owned(), "world".to_owned());
        let (request, ranks) = (u64::from(rank) + 1, HOSTS as u32);
        let join = v1::Join { request, tenant, communicator, rank, ranks, ..v1::Join::default() };
        agent.to_control.send(from_agent::Message::Join(join)).await.unwrap();
    }
    let mut recipes = Vec::new();
    for agent in &mut agents {
        let Event::Form(recipe) = next(agent).await else { panic!("no recipe") };
        recipes.push(recipe);
    }
    let id = recipes[0].communicator;
    for agent in &agents {
        let prepared = v1::Prepared { communicator: id, epoch: 1, links: None };
        agent.to_control.send(from_agent::Message::Prepared(prepared)).await.unwrap();
    }
    let first = recipes.clone();
    tokio::task::spawn_blocking(move || sum(&first, 1)).await.unwrap();
    let told = scraped(metrics).await;
    let chunk = u64::from(recipes[0].aggregation.as_ref().unwrap().chunk_elements);
    let sums = 3 * ELEMENTS.div_ceil(chunk);
    assert!(told.contains(&format!("harmonaize_aggregator_sums_total{{tenant=\"a\"}} {sums}")), "{told}");
    // What it reports reaches operators through control.
    loop {
        let shown = fabric(&mut operator).await;
        let report = shown.report.as_ref().and_then(|report| report.tenants.first().cloned());
        if report.is_some_and(|tenant| tenant.sums == sums) {
            assert_eq!((shown.communicators, shown.switch.as_str()), (1, "s0"));
            break;
        }
        tokio::task::yield_now().await;
    }

    // Another start has another address and incarnation: agents are told of both by another epoch.
    stop.send(()).unwrap();
    timeout(LIMIT, task).await.expect("it ends in time").unwrap();
    let (stop, task, metrics) = aggregator(address);
    let before = std::mem::take(&mut recipes);
    for agent in &mut agents {
        let recipe = loop {
            match next(agent).await {
                Event::Ready { epoch: Epoch(1), .. } => {}
                Event::Change(recipe) => break recipe,
                other => panic!("no other epoch but {other:?}"),
            }
        };
        recipes.push(recipe);
    }
    for (recipe, before) in recipes.iter().zip(&before) {
        let [now, before] = [recipe, before].map(|recipe| recipe.aggregation.as_ref().unwrap());
        assert!(now.address != before.address && now.communicator != before.communicator);
    }
    tokio::task::spawn_blocking(move || sum(&recipes, 1)).await.unwrap();

    // A communicator that has ended is withdrawn, and counted still.
    for (rank, agent) in (0..).zip(&agents) {
        let leave = v1::Leave { communicator: id, rank, request: 0 };
        agent.to_control.send(from_agent::Message::Leave(leave)).await.unwrap();
    }
    let begun = Instant::now();
    loop {
        let told = scraped(metrics).await;
        if told.contains("harmonaize_aggregator_communicators{tenant=\"a\"} 0") {
            assert!(told.contains(&format!("sums_total{{tenant=\"a\"}} {sums}")), "{told}");
            break;
        }
        assert!(begun.elapsed() < LIMIT, "{told}");
    }
    stop.send(()).unwrap();
    timeout(LIMIT, task).await.expect("it ends in time").unwrap();
}
