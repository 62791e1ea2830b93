//! The server over loopback with agents that are played by the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_planner::Topology;
use harmonaize_server::{Config, Server};
use harmonaize_testkit::agents::{Agent, LIMIT, hello_of};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

fn config() -> Config {
    let mut topology = "[[switch]]\nname = \"s\"\n".to_owned();
    for host in 0..3 {
        topology += &format!("[[host]]\nname = \"h{host}\"\n");
        topology += &format!("[[link]]\nfrom = \"h{host}\"\nto = \"s\"\nrate = \"1Gbit/s\"\n");
    }
    const TEXT: &str = r#"
        listen = "127.0.0.1:0"
        topology = ""
        insecure_loopback = true
        prepare_timeout = "60s"
        lease = "60s"
        session_timeout = "10s"
        tenant = [{ name = "a" }, { name = "b" }]
    "#;
    Config::parse(TEXT, Topology::parse(&topology).unwrap()).unwrap()
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

/// An agent's session, without a word.
async fn open(control: &Control) -> Agent {
    let channel = Endpoint::from_shared(format!("http://{}", control.address)).unwrap();
    Agent::open(channel.connect().await.unwrap()).await.unwrap()
}

/// An agent of this host, which is welcome.
async fn hello(control: &Control, host: &str) -> Agent {
    let mut agent = open(control).await;
    agent.send(from_agent::Message::Hello(hello_of(host))).await.unwrap();
    let to_agent::Message::Welcome(welcome) = agent.next().await.unwrap() else { panic!("no welcome") };
    assert_eq!(welcome.tenants, ["a", "b"]);
    agent
}

async fn join(agent: &Agent, tenant: &str, rank: u32, ranks: u32) {
    let join = v1::Join {
        request: u64::from(rank) + 100,
        tenant: tenant.to_owned(),
        communicator: "world".to_owned(),
        rank,
        ranks,
        ..v1::Join::default()
    };
    agent.send(from_agent::Message::Join(join)).await.unwrap();
}

#[tokio::test]
async fn forms_reorders_and_closes() {
    let control = Control::start(config()).await;
    let mut first = hello(&control, "h0").await;
    let mut second = hello(&control, "h2").await;
    join(&first, "a", 0, 4).await;
    join(&first, "a", 3, 4).await;
    join(&second, "a", 1, 4).await;
    join(&second, "a", 2, 4).await;
    let (mine, yours) = (first.form().await.unwrap(), second.form().await.unwrap());
    let ranks =
        |recipe: &v1::Recipe| recipe.participants.iter().map(|part| part.ranks.clone()).collect::<Vec<_>>();
    assert_eq!(ranks(&mine), [vec![0, 3], vec![1, 2]]);
    assert_eq!((mine.me, yours.me, &mine.order), (0, 1, &vec![0, 1]));
    let requests: Vec<u64> = yours.local_ranks.iter().map(|local| local.request).collect();
    assert_eq!(requests, [101, 102]);
    let ([there], [here]) = (mine.peers.as_slice(), yours.peers.as_slice()) else { panic!("one peer each") };
    assert_eq!((&there.link, &there.secret), (&here.link, &here.secret));
    assert_eq!((there.link.len(), there.secret.len()), (16, 32));
    assert_eq!((there.initiate, here.initiate), (true, false));
    let id = mine.communicator;
    Agent::prepare(&mut [&mut first, &mut second], id, 1).await.unwrap();

    let mut operator = control.client().await;
    let hosts = vec!["h2".to_owned(), "h0".to_owned()];
    let reply = operator.reorder(v1::ReorderRequest { communicator: id, hosts }).await.unwrap().into_inner();
    assert_eq!(reply.epoch, 2);
    for agent in [&mut first, &mut second] {
        let to_agent::Message::Change(recipe) = agent.next().await.unwrap() else { panic!("no change") };
        assert_eq!((recipe.epoch, recipe.order.as_slice()), (2, [1, 0].as_slice()));
        assert_ne!(recipe.peers[0].link, there.link);
    }
    Agent::prepare(&mut [&mut first, &mut second], id, 2).await.unwrap();
    for agent in [&mut first, &mut second] {
        agent
            .send(from_agent::Message::Switched(v1::Switched {
                communicator: id,
                epoch: 2,
                first_segment: 9,
            }))
            .await
            .unwrap();
    }
    for agent in [&mut first, &mut second] {
        agent.send(from_agent::Message::Closed(v1::Closed { communicator: id })).await.unwrap();
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

async fn status(control: &Control) -> v1::StatusReply {
    control.client().await.status(v1::StatusRequest { patience_ns: 1 }).await.unwrap().into_inner()
}

/// Asks for the status until it is as wanted.
async fn until(control: &Control, what: &str, wanted: impl Fn(&v1::StatusReply) -> bool) {
    let deadline = tokio::time::Instant::now() + LIMIT;
    loop {
        let status = status(control).await;
        if wanted(&status) {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "{what}: {status:?}");
    }
}

#[tokio::test]
async fn a_lost_agent_is_told_to_its_own_peers() {
    let control = Control::start(config()).await;
    let mut agents = Vec::new();
    for host in ["h0", "h1", "h2"] {
        agents.push(hello(&control, host).await);
    }
    let mut ids = Vec::new();
    for (tenant, pair) in [("a", [0, 1]), ("b", [1, 2])] {
        for (rank, agent) in pair.into_iter().enumerate() {
            join(&agents[agent], tenant, rank as u32, 2).await;
        }
        let id = agents[pair[0]].form().await.unwrap().communicator;
        assert_eq!(agents[pair[1]].form().await.unwrap().communicator, id);
        let [first, second] = agents.get_disjoint_mut(pair).unwrap();
        Agent::prepare(&mut [first, second], id, 1).await.unwrap();
        ids.push(id);
    }
    drop(agents.remove(0));
    // Its session's end alone ends nothing.
    let phases = |status: &v1::StatusReply| {
        let known = status.communicators.iter();
        known.map(|known| (known.communicator, known.phase())).collect::<Vec<_>>()
    };
    let waits = [(ids[0], v1::Phase::Recovering), (ids[1], v1::Phase::Running)];
    until(&control, "it is waited for", |status| phases(status) == waits).await;
    // Its host comes back at once, and has lost it.
    hello(&control, "h0").await;
    let end = loop {
        match agents[0].next().await.unwrap() {
            to_agent::Message::Dissolve(end) => break end,
            to_agent::Message::ReportRequest(_) => {}
            other => panic!("not dissolved but {other:?}"),
        }
    };
    assert_eq!((end.communicator, end.kind(), end.ranks), (ids[0], v1::FailureKind::RanksLost, vec![0]));
    assert_eq!(phases(&status(&control).await), waits[1..]);
    control.stop().await;
}

#[tokio::test]
async fn refusals_end_the_stream() {
    let control = Control::start(config()).await;
    let mut first = hello(&control, "h0").await;
    for (host, version, kind) in [
        ("h0", PROTOCOL_VERSION, v1::RefusedKind::HostInUse),
        ("h1", PROTOCOL_VERSION + 1, v1::RefusedKind::Version),
        ("h9", PROTOCOL_VERSION, v1::RefusedKind::UnknownHost),
    ] {
        let mut other = open(&control).await;
        let hello = v1::Hello { protocol_version: version, ..hello_of(host) };
        other.send(from_agent::Message::Hello(hello)).await.unwrap();
        let to_agent::Message::Refused(refused) = other.next().await.unwrap() else { panic!("not refused") };
        assert_eq!((refused.kind(), refused.protocol_version), (kind, PROTOCOL_VERSION));
        assert_eq!(other.next_or_end().await.unwrap(), None);
    }
    // A breach of its own ends it, after a word why.
    first
        .send(from_agent::Message::Prepared(v1::Prepared { communicator: 1, epoch: 1, links: None }))
        .await
        .unwrap();
    first.up.send(v1::FromAgent { message: None }).await.unwrap();
    let to_agent::Message::Refused(refused) = first.next().await.unwrap() else { panic!("not refused") };
    assert_eq!(refused.reason, "breach of protocol: a message without content");
    assert_eq!(first.next_or_end().await.unwrap(), None);
    control.stop().await;
}

#[tokio::test]
async fn late_ranks_are_named_over_the_wire() {
    let mut config = config();
    config.settings.join_timeout = Duration::from_millis(50);
    let control = Control::start(config).await;
    let mut agent = hello(&control, "h0").await;
    join(&agent, "a", 1, 3).await;
    let to_agent::Message::JoinRefused(refused) = agent.next().await.unwrap() else { panic!("not refused") };
    assert_eq!((refused.request, refused.ranks.as_slice()), (101, [0, 2].as_slice()));
    assert_eq!(refused.text, "ranks 0, 2 of 3 have not joined in time");
    control.stop().await;
}

#[tokio::test]
async fn who_never_says_hello_is_let_go() {
    let mut config = config();
    config.session_timeout = Duration::from_millis(200);
    let control = Control::start(config).await;
    let mut mute = open(&control).await;
    assert_eq!(mute.next_or_end().await.unwrap(), None);
    control.stop().await;
}

/// A host that vanishes says nothing, not even goodbye: an agent whose runtime stands still, with its socket open.
#[tokio::test]
async fn a_silent_agent_is_noticed() {
    let mut config = config();
    config.session_timeout = Duration::from_millis(400);
    let control = Control::start(config).await;
    let address = control.address;
    let (said, hears) = oneshot::channel();
    let (thaw, frozen) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let agent = runtime.block_on(async {
            let control = Control { address, stop: None, task: tokio::spawn(async {}) };
            hello(&control, "h0").await
        });
        said.send(()).unwrap();
        let _ = frozen.recv();
        drop(agent);
    });
    hears.await.unwrap();
    until(&control, "the session ends", |status| !status.agents[0].connected).await;
    thaw.send(()).unwrap();
    thread.join().unwrap();
    control.stop().await;
}

/// Bytes that are no HTTP/2, and streams cut in the middle, cost nobody else anything.
#[tokio::test]
async fn garbage_costs_only_its_connection() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let control = Control::start(config()).await;
    let mut agent = hello(&control, "h0").await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let frame_too_large = [preface.clone(), vec![0xff; 64]].concat();
    for garbage in [vec![0; 4096], b"GET / HTTP/1.1\r\n\r\n".to_vec(), preface, frame_too_large] {
        let mut socket = tokio::net::TcpStream::connect(control.address).await.unwrap();
        socket.write_all(&garbage).await.unwrap();
        socket.shutdown().await.unwrap();
        let mut answer = Vec::new();
        let _ =
            tokio::time::timeout(LIMIT, socket.read_to_end(&mut answer)).await.expect("the connection ends");
    }
    join(&agent, "a", 0, 1).await;
    assert_eq!(agent.form().await.unwrap().participants.len(), 1);
    control.stop().await;
}
