//! The server over loopback with agents that are played by the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_planner::Topology;
use harmonaize_server::state::Settings;
use harmonaize_server::{Config, Server};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

const LIMIT: Duration = Duration::from_secs(20);

fn config() -> Config {
    let mut topology = "[[switch]]\nname = \"s\"\n".to_owned();
    for host in 0..3 {
        topology += &format!("[[host]]\nname = \"h{host}\"\n");
        topology += &format!("[[link]]\nfrom = \"h{host}\"\nto = \"s\"\nrate = \"1Gbit/s\"\n");
    }
    let settings = Settings {
        topology: Topology::parse(&topology).unwrap(),
        tenants: vec!["a".to_owned(), "b".to_owned()],
        join_timeout: Duration::from_secs(60),
        prepare_timeout: Duration::from_secs(60),
        recovery_timeout: Duration::from_secs(60),
        operation_timeout: Duration::from_secs(30),
        peer_timeout: Duration::from_secs(5),
        paths: 1,
        source_ports: None,
        most_ranks: 64,
        most_communicators: 8,
    };
    let listen = "127.0.0.1:0".parse().unwrap();
    Config { listen, session_timeout: Duration::from_secs(10), settings }
}

struct Control {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Control {
    async fn start(config: Config) -> Self {
        let server = Server::bind(config).await.unwrap();
        let address = server.local_address();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            server
                .run(async {
                    let _ = stopped.await;
                })
                .await
                .unwrap();
        });
        Self { address, stop: Some(stop), task }
    }

    async fn client(&self) -> ProviderClient<Channel> {
        ProviderClient::connect(format!("http://{}", self.address)).await.unwrap()
    }

    async fn stop(mut self) {
        self.stop.take().unwrap().send(()).unwrap();
        tokio::time::timeout(LIMIT, self.task).await.unwrap().unwrap();
    }
}

struct Agent {
    up: mpsc::Sender<v1::FromAgent>,
    down: Streaming<v1::ToAgent>,
}

impl Agent {
    async fn open(control: &Control) -> Self {
        let (up, stream) = mpsc::channel(16);
        let down = control.client().await.session(ReceiverStream::new(stream)).await.unwrap().into_inner();
        Self { up, down }
    }

    async fn hello(control: &Control, host: &str) -> Self {
        let mut agent = Self::open(control).await;
        agent.say_hello(host, PROTOCOL_VERSION).await;
        let to_agent::Message::Welcome(welcome) = agent.next().await else { panic!("no welcome") };
        assert_eq!(welcome.tenants, ["a", "b"]);
        agent
    }

    async fn say_hello(&mut self, host: &str, protocol_version: u32) {
        let listen = "127.0.0.1:9".to_owned();
        let hello = v1::Hello {
            protocol_version,
            host: host.to_owned(),
            listen,
            build: String::new(),
            running: vec![],
        };
        self.say(from_agent::Message::Hello(hello)).await;
    }

    async fn say(&mut self, message: from_agent::Message) {
        self.up.send(message.into()).await.unwrap();
    }

    async fn join(&mut self, tenant: &str, rank: u32, ranks: u32) {
        let join = v1::Join {
            request: u64::from(rank) + 100,
            tenant: tenant.to_owned(),
            communicator: "world".to_owned(),
            rank,
            ranks,
        };
        self.say(from_agent::Message::Join(join)).await;
    }

    async fn next(&mut self) -> to_agent::Message {
        self.next_or_end().await.expect("the stream goes on")
    }

    async fn next_or_end(&mut self) -> Option<to_agent::Message> {
        let next = tokio::time::timeout(LIMIT, self.down.message()).await.expect("an answer in time");
        next.ok()??.message
    }

    async fn form(&mut self) -> v1::Recipe {
        match self.next().await {
            to_agent::Message::Form(recipe) => recipe,
            other => panic!("no recipe but {other:?}"),
        }
    }

    /// Prepares an epoch, and waits until all have.
    async fn prepare(agents: &mut [&mut Self], communicator: u64, epoch: u64) {
        for agent in agents.iter_mut() {
            agent.say(from_agent::Message::Prepared(v1::Prepared { communicator, epoch })).await;
        }
        for agent in agents {
            assert_eq!(agent.next().await, to_agent::Message::Ready(v1::Ready { communicator, epoch }));
        }
    }
}

#[tokio::test]
async fn forms_reorders_and_closes() {
    let control = Control::start(config()).await;
    let mut first = Agent::hello(&control, "h0").await;
    let mut second = Agent::hello(&control, "h2").await;
    first.join("a", 0, 4).await;
    first.join("a", 3, 4).await;
    second.join("a", 1, 4).await;
    second.join("a", 2, 4).await;
    let (mine, yours) = (first.form().await, second.form().await);
    let ranks =
        |recipe: &v1::Recipe| recipe.participants.iter().map(|part| part.ranks.clone()).collect::<Vec<_>>();
    assert_eq!(ranks(&mine), [vec![0, 3], vec![1, 2]]);
    assert_eq!((mine.me, yours.me, &mine.order), (0, 1, &vec![0, 1]));
    let requests: Vec<u64> = yours.local.iter().map(|local| local.request).collect();
    assert_eq!(requests, [101, 102]);
    let ([there], [here]) = (mine.peers.as_slice(), yours.peers.as_slice()) else { panic!("one peer each") };
    assert_eq!((&there.link, &there.secret), (&here.link, &here.secret));
    assert_eq!((there.link.len(), there.secret.len()), (16, 32));
    assert_eq!((there.initiate, here.initiate), (true, false));
    let id = mine.communicator;
    Agent::prepare(&mut [&mut first, &mut second], id, 1).await;

    let mut operator = control.client().await;
    let hosts = vec!["h2".to_owned(), "h0".to_owned()];
    let reply = operator.reorder(v1::ReorderRequest { communicator: id, hosts }).await.unwrap().into_inner();
    assert_eq!(reply.epoch, 2);
    for agent in [&mut first, &mut second] {
        let to_agent::Message::Change(recipe) = agent.next().await else { panic!("no change") };
        assert_eq!((recipe.epoch, recipe.order.as_slice()), (2, [1, 0].as_slice()));
        assert_ne!(recipe.peers[0].link, there.link);
    }
    Agent::prepare(&mut [&mut first, &mut second], id, 2).await;
    for agent in [&mut first, &mut second] {
        agent
            .say(from_agent::Message::Switched(v1::Switched { communicator: id, epoch: 2, first_segment: 9 }))
            .await;
    }
    for agent in [&mut first, &mut second] {
        agent.say(from_agent::Message::Closed(v1::Closed { communicator: id })).await;
    }
    let deadline = tokio::time::Instant::now() + LIMIT;
    loop {
        let status = operator.status(v1::StatusRequest { patience_ns: 1 }).await.unwrap().into_inner();
        if status.communicators.is_empty() {
            assert_eq!(status.errors, 0);
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "{status:?}");
    }
    control.stop().await;
}
