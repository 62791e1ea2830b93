//! Who may say and ask what of control, over real connections with certificates.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

mod log;

use harmonaize_api::v1::operator_client::OperatorClient;
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_api::v1::{self, JoinRefusedKind, from_agent, to_agent};
use harmonaize_identity::{Authority, CONTROL, Folder, Protection, Remote, Use};
use harmonaize_server::state::RequestRefusal;
use harmonaize_server::{Config, Server};
use harmonaize_testkit::agents::{Agent, LIMIT, hello_of};
use log::Log;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

const CONFIG: &str = r#"
listen = "127.0.0.1:0"
tls = "control"
topology = "topology.toml"
[[tenant]]
name = "a"
hosts = ["h0"]
[[operator]]
name = "ada"
role = "admin"
[[operator]]
name = "otto"
role = "operator"
[[operator]]
name = "vera"
role = "viewer"
"#;

const TOPOLOGY: &str = "host = [{ name = \"h0\" }, { name = \"h1\" }]\nswitch = [{ name = \"s\" }]\n\
    aggregator = [{ name = \"agg0\", switch = \"s\", rate = \"1Gbit/s\" }]\n\
    link = [{ from = \"h0\", to = \"s\", rate = \"1Gbit/s\" }, { from = \"h1\", to = \"s\", rate = \"1Gbit/s\" }]\n";

struct Provider {
    folder: tempfile::TempDir,
    authority: Authority,
    address: SocketAddr,
    operators: SocketAddr,
}

impl Provider {
    async fn start() -> Self {
        Self::start_as(CONFIG).await
    }

    async fn start_as(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create().unwrap();
        let control = Folder(folder.path().join("control"));
        authority.issue(CONTROL, Use::Control).unwrap().write(&control).unwrap();
        std::fs::write(folder.path().join("topology.toml"), TOPOLOGY).unwrap();
        let config = folder.path().join("control.toml");
        std::fs::write(&config, text).unwrap();
        let server = Server::bind(Config::load(&config).unwrap()).await.unwrap();
        let (address, operators) = (server.local_address(), server.operators_address());
        tokio::spawn(server.run(std::future::pending()));
        Self { folder, authority, address, operators }
    }

    /// A connection of who holds a certificate of this name.
    async fn connect(&self, name: &str) -> Channel {
        self.connect_to(self.address, name).await
    }

    async fn connect_to(&self, address: SocketAddr, name: &str) -> Channel {
        let protection = issued(&self.authority, name, self.folder.path());
        Remote::at(&protection, CONTROL, &address.to_string()).unwrap().connect().await.unwrap()
    }

    /// A session of an agent whose certificate has `name`, and which says that it is `host`.
    async fn hello(&self, name: &str, host: &str) -> Agent {
        let agent = Agent::open(self.connect(name).await).await.unwrap();
        agent.send(from_agent::Message::Hello(hello_of(host))).await.unwrap();
        agent
    }

    /// The same once it is welcome.
    async fn welcome(&self, host: &str) -> Agent {
        Agent::hello(self.connect(host).await, hello_of(host)).await.unwrap().0
    }
}

fn issued(authority: &Authority, name: &str, folder: &Path) -> Protection {
    let folder = Folder(folder.join(name));
    authority.issue(name, Use::Session).unwrap().write(&folder).unwrap();
    Protection::Mutual(folder)
}

#[tokio::test]
async fn an_agent_speaks_for_its_own_host_alone() {
    let provider = Provider::start().await;
    for (name, host) in [("h1", "h0"), ("ada", "h0"), ("agg0", "h0"), ("h0", "agg0"), ("h0", "")] {
        let error = provider.hello(name, host).await.next().await.unwrap_err();
        let error: Status = error.downcast().unwrap();
        assert_eq!(error.code(), Code::PermissionDenied, "{name} as {host}: {error}");
        assert!(error.message().contains(name), "{error}");
        // Nor does it answer for another.
        let part = v1::AnswerPart { host: host.to_owned(), ..v1::AnswerPart::default() };
        let mut client = ProviderClient::new(provider.connect(name).await);
        let refused = client.answer(tokio_stream::once(part)).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{name} as {host}: {refused}");
    }
    // Those were nobody's session: the host's own agent is let in.
    provider.welcome("h0").await;
}

#[tokio::test]
async fn a_tenant_joins_where_the_operator_lets_it() {
    let provider = Provider::start().await;
    let join = |request| v1::Join {
        request,
        tenant: "a".into(),
        communicator: "c".into(),
        rank: 0,
        ranks: 1,
        ..v1::Join::default()
    };
    let mut agent = provider.welcome("h1").await;
    for request in [7, 8] {
        agent.send(from_agent::Message::Join(join(request))).await.unwrap();
        let answer = agent.next().await.unwrap();
        let to_agent::Message::JoinRefused(refused) = answer else { panic!("{answer:?}") };
        assert_eq!((refused.request, refused.kind()), (request, JoinRefusedKind::UnknownTenant));
    }
    let mut agent = provider.welcome("h0").await;
    agent.send(from_agent::Message::Join(join(9))).await.unwrap();
    let answer = agent.next().await.unwrap();
    assert!(matches!(answer, to_agent::Message::Form(_)), "{answer:?}");
}

#[tokio::test]
async fn an_agent_asks_nothing_for_tenants_of_other_hosts() {
    use from_agent::Message;
    let provider = Provider::start().await;
    let (tenant, communicator) = ("a".to_owned(), "c".to_owned());
    let questions = |request| {
        let (tenant, communicator) = (tenant.clone(), communicator.clone());
        [
            Message::ReadEvents(v1::ReadEvents { request, tenant: tenant.clone(), ..Default::default() }),
            Message::Negotiate(v1::Negotiate {
                request,
                tenant: tenant.clone(),
                communicator: communicator.clone(),
                propose: None,
            }),
            Message::BeginIteration(v1::BeginIteration {
                request,
                tenant: tenant.clone(),
                communicator: communicator.clone(),
                accumulate_min: 1,
                accumulate_max: 1,
                checkpoint: None,
                batch: None,
            }),
            Message::AwaitOrder(v1::AwaitOrder { request, tenant: tenant.clone(), ..Default::default() }),
            Message::SetBid(v1::SetBid { request, tenant: tenant.clone(), ..Default::default() }),
            Message::Hint(v1::Hint { request, tenant, communicator, hints: None }),
        ]
    };
    let why = |answer: to_agent::Message| match answer {
        to_agent::Message::EventsRead(v1::EventsRead { request, refused, .. })
        | to_agent::Message::Negotiated(v1::Negotiated { request, refused, .. })
        | to_agent::Message::IterationChoice(v1::IterationChoice { request, refused, .. })
        | to_agent::Message::Hinted(v1::Hinted { request, refused, .. })
        | to_agent::Message::BidSet(v1::BidSet { request, refused })
        | to_agent::Message::RunnerOrder(v1::RunnerOrder { request, refused, .. }) => (request, refused),
        other => panic!("{other:?}"),
    };
    for (host, elsewhere) in [("h1", true), ("h0", false)] {
        let mut agent = provider.welcome(host).await;
        for question in questions(7) {
            agent.send(question).await.unwrap();
            let (answered, refused) = why(agent.next().await.unwrap());
            let why = RequestRefusal::Elsewhere.to_string();
            assert_eq!((answered, refused == why), (7, elsewhere), "{host}: {refused}");
        }
    }
}

/// Checks that the audit has one line since it was read, and that it has all of these.
fn has(log: &Log, what: &[&str]) {
    let lines = log.audit();
    let all = |line: &String| what.iter().all(|what| line.contains(what)) && line.contains("from=127.0.0.");
    assert!(lines.len() == 1 && lines.iter().all(all), "{what:?}: {lines:#?}");
}

#[tokio::test]
async fn the_audit_names_asker_place_request_and_outcome() {
    let (log, _default) = Log::begin();
    let provider = Provider::start().await;
    let mut clients = Vec::new();
    for name in ["ada", "otto", "vera", "h0"] {
        clients.push(OperatorClient::new(provider.connect(name).await));
    }
    let [ada, otto, vera, stranger] = clients.try_into().unwrap();
    let withdraw = || v1::WithdrawRequest { targets: vec!["h1".into()], kind: 1, ..Default::default() };
    let add = || v1::AddTenantRequest { name: "b".into(), uids: vec![3002], ..Default::default() };
    let has = |what: &[&str]| has(&log, what);
    // Who looks leaves no line.
    vera.clone().topology(v1::TopologyRequest::default()).await.unwrap();
    assert_eq!(log.audit(), Vec::<String>::new());
    otto.clone().withdraw(withdraw()).await.unwrap();
    has(&["INFO", "otto", "done", "h1"]);
    let nowhere = v1::WithdrawRequest { targets: vec!["h9".into()], ..withdraw() };
    otto.clone().withdraw(nowhere).await.unwrap_err();
    has(&["WARN", "otto", "not done", "h9", "why="]);
    vera.clone().withdraw(withdraw()).await.unwrap_err();
    has(&["WARN", "vera", "refused", "viewer"]);
    otto.clone().add_tenant(add()).await.unwrap_err();
    has(&["WARN", "otto", "refused", "admin"]);
    ada.clone().add_tenant(add()).await.unwrap();
    has(&["INFO", "ada", "done", "b"]);
    stranger.clone().topology(v1::TopologyRequest::default()).await.unwrap_err();
    has(&["WARN", "h0", "refused", "operator"]);
    // An agent that says that it is another, and one that speaks for a tenant that is not on its host.
    provider.hello("h1", "h0").await.next().await.unwrap_err();
    has(&["WARN", "h1", "session refused"]);
    let mut agent = provider.welcome("h1").await;
    let asked = v1::ReadEvents { tenant: "a".into(), ..Default::default() };
    agent.send(from_agent::Message::ReadEvents(asked)).await.unwrap();
    agent.next().await.unwrap();
    has(&["WARN", "h1", "events", "not for this host's agent"]);
}

/// How many calls [`calls`] makes: each that operators have.
const CALLS: usize = 19;

/// What calls of each role say: look, change, administer.
async fn calls(provider: &Provider, name: &str) -> [Code; 3] {
    let channel = provider.connect(name).await;
    let mut control = ProviderClient::new(channel.clone());
    let mut operator = OperatorClient::new(channel);
    let code = |error: Status| error.code();
    let mut looks =
        vec![control.status(v1::StatusRequest { patience_ns: 1 }).await.err().map_or(Code::Ok, code)];
    looks.push(
        control.watch_telemetry(v1::WatchTelemetryRequest::default()).await.err().map_or(Code::Ok, code),
    );
    looks.push(control.leader(v1::LeaderRequest {}).await.err().map_or(Code::Ok, code));
    looks.push(operator.topology(v1::TopologyRequest::default()).await.err().map_or(Code::Ok, code));
    looks.push(operator.tenants(v1::TenantsRequest::default()).await.err().map_or(Code::Ok, code));
    looks.push(operator.explain(v1::ExplainRequest::default()).await.err().map_or(Code::Ok, code));
    looks.push(operator.dry_run(v1::DryRunRequest::default()).await.err().map_or(Code::Ok, code));
    looks.push(operator.withdrawals(v1::WithdrawalsRequest::default()).await.err().map_or(Code::Ok, code));
    looks.push(operator.traced_paths(v1::TracedPathsRequest::default()).await.err().map_or(Code::Ok, code));
    looks.push(operator.ask(v1::AskRequest::default()).await.err().map_or(Code::Ok, code));
    // This control allocates no hosts.
    let what_if = operator.what_if(v1::WhatIfRequest::default()).await.err().map(code);
    looks.push(what_if.filter(|code| *code != Code::FailedPrecondition).unwrap_or(Code::Ok));
    let plans = operator.plans(v1::PlansRequest { communicator: 1 }).await.err().map(code);
    looks.push(plans.filter(|code| *code != Code::NotFound).unwrap_or(Code::Ok));
    let reason = String::new();
    let mut changes =
        vec![control.dissolve(v1::DissolveRequest { communicator: 1, reason }).await.err().map(code)];
    changes
        .push(control.reorder(v1::ReorderRequest { communicator: 1, hosts: vec![] }).await.err().map(code));
    let withdraw = v1::WithdrawRequest { targets: vec!["h9".into()], kind: 1, ..Default::default() };
    changes.push(operator.withdraw(withdraw).await.err().map(code));
    let restore = v1::RestoreRequest { targets: vec!["h9".into()], kind: 1 };
    changes.push(operator.restore(restore).await.err().map(code));
    let mut administers = vec![
        operator
            .add_tenant(v1::AddTenantRequest { name: name.into(), ..Default::default() })
            .await
            .err()
            .map_or(Code::Ok, code),
    ];
    administers.push(
        operator
            .remove_tenant(v1::RemoveTenantRequest { name: name.into() })
            .await
            .err()
            .map_or(Code::Ok, code),
    );
    administers.push(operator.backup(v1::BackupRequest {}).await.err().map_or(Code::Ok, code));
    let same = |codes: Vec<Code>| {
        assert!(codes.iter().all(|code| *code == codes[0]), "{name}: {codes:?}");
        codes[0]
    };
    // Who may change something hears that there is no such thing.
    let refused = |code: Option<Code>| match code {
        Some(Code::PermissionDenied) => Code::PermissionDenied,
        _ => Code::Ok,
    };
    [same(looks), same(changes.into_iter().map(refused).collect()), same(administers)]
}

#[tokio::test]
async fn operators_do_what_their_roles_say_and_nobody_else_anything() {
    use Code::{Ok as Done, PermissionDenied as Denied};
    let (log, _default) = Log::begin();
    let provider = Provider::start().await;
    assert_eq!(calls(&provider, "ada").await, [Done, Done, Done]);
    assert_eq!(calls(&provider, "otto").await, [Done, Done, Denied]);
    assert_eq!(calls(&provider, "vera").await, [Done, Denied, Denied]);
    for name in ["h0", "agg0", "mallory", "ADA"] {
        log.audit();
        assert_eq!(calls(&provider, name).await, [Denied, Denied, Denied], "{name}");
        // Each call has its line.
        let lines = log.audit();
        let refused = |line: &String| line.contains(name) && line.contains("refused");
        assert!(lines.len() == CALLS && lines.iter().all(refused), "{name}: {lines:#?}");
    }
}

#[tokio::test]
async fn a_strangers_certificate_gets_no_connection() {
    let (log, _default) = Log::begin();
    let provider = Provider::start().await;
    let stranger = issued(&Authority::create().unwrap(), "ada", &provider.folder.path().join("stranger"));
    let ours = provider.folder.path().join("control/ca.crt");
    std::fs::copy(ours, provider.folder.path().join("stranger/ada/ca.crt")).unwrap();
    let remote = Remote::at(&stranger, CONTROL, &provider.address.to_string()).unwrap();
    // TLS 1.3 tells a client of its refusal only with the first answer.
    let refused = match remote.connect().await {
        Err(_) => true,
        Ok(channel) => ProviderClient::new(channel).status(v1::StatusRequest::default()).await.is_err(),
    };
    assert!(refused, "a stranger was answered");
    let told = |line: &String| line.contains("handshake refused") && line.contains("from=127.0.0.1:");
    assert!(log.audit().iter().any(told), "no line of the refused handshake");
    let plain = ProviderClient::connect(format!("http://{}", provider.address)).await;
    if let Ok(mut client) = plain {
        assert!(client.status(v1::StatusRequest::default()).await.is_err(), "plain text was answered");
    }
}

#[tokio::test]
async fn agents_and_operators_have_listeners_of_their_own() {
    let (log, _default) = Log::begin();
    let provider = Provider::start_as(&format!("listen_operators = \"127.0.0.2:0\"{CONFIG}")).await;
    assert_ne!(provider.operators, provider.address);
    let status = async |address, name| {
        let mut client = ProviderClient::new(provider.connect_to(address, name).await);
        client.status(v1::StatusRequest::default()).await.err().map_or(Code::Ok, |status| status.code())
    };
    assert_eq!(status(provider.operators, "vera").await, Code::Ok);
    assert_eq!(status(provider.address, "vera").await, Code::PermissionDenied);
    has(&log, &["WARN", "vera", "refused", "status"]);
    let mut operator = OperatorClient::new(provider.connect("vera").await);
    let refused = operator.tenants(v1::TenantsRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented, "{refused}");
    has(&log, &["WARN", "vera", "refused", "/harmonaize.provider.v1.Operator/Tenants"]);
    let (_up, stream) = mpsc::channel(1);
    let mut agent = ProviderClient::new(provider.connect_to(provider.operators, "h0").await);
    let refused = agent.session(ReceiverStream::new(stream)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    has(&log, &["WARN", "h0", "refused", "session"]);
    let part = tokio_stream::once(v1::AnswerPart::default());
    assert_eq!(agent.answer(part).await.unwrap_err().code(), Code::PermissionDenied);
    has(&log, &["WARN", "h0", "refused", "answer"]);
    provider.welcome("h0").await;
}

#[tokio::test]
async fn nobody_takes_more_of_control_than_his_part() {
    let provider = Provider::start().await;
    // Two sessions of a certificate, and no third.
    let mut agent = ProviderClient::new(provider.connect("h0").await);
    let mut held = Vec::new();
    for number in 0..3 {
        let (up, stream) = mpsc::channel(1);
        let opened = agent.session(ReceiverStream::new(stream)).await;
        let code = opened.as_ref().err().map_or(Code::Ok, Status::code);
        assert_eq!(code, if number < 2 { Code::Ok } else { Code::ResourceExhausted }, "{opened:?}");
        held.push((up, opened));
    }
    // A message that is too large for a call is not taken in.
    let mut operator = OperatorClient::new(provider.connect("otto").await);
    let targets = vec!["x".repeat(80 << 10)];
    let refused = operator.dry_run(v1::DryRunRequest { targets }).await.unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    // Who calls as fast as he can is told when to call again, and another is not held up.
    let refused = loop {
        if let Err(refused) = operator.tenants(v1::TenantsRequest {}).await {
            break refused;
        }
    };
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().starts_with("otto may call 200 times a second; call again in "), "{refused}");
    let mut other = OperatorClient::new(provider.connect("vera").await);
    other.tenants(v1::TenantsRequest {}).await.unwrap();
}

/// Some bytes on the wire, and much memory.
#[tokio::test]
async fn a_hello_of_countless_communicators_is_refused() {
    let provider = Provider::start().await;
    let mut agent = Agent::open(provider.connect("h0").await).await.unwrap();
    let running = vec![v1::Recipe::default(); 200_000];
    agent.send(from_agent::Message::Hello(v1::Hello { running, ..hello_of("h0") })).await.unwrap();
    let error: Status = agent.next().await.unwrap_err().downcast().unwrap();
    assert_eq!(error.code(), Code::ResourceExhausted, "{error}");
    assert!(error.message().contains("bytes of memory"), "{error}");
    provider.welcome("h0").await;
}

#[tokio::test]
async fn the_configuration_is_read_again_and_refused_as_a_whole() {
    let provider = Provider::start().await;
    let write = |text: &str| std::fs::write(provider.folder.path().join("control.toml"), text).unwrap();
    let mut operator = OperatorClient::new(provider.connect("ada").await);
    let mut until = async |known: &[&str], code: Code| {
        let deadline = tokio::time::Instant::now() + LIMIT;
        loop {
            let reply = operator.tenants(v1::TenantsRequest {}).await;
            let found = reply.as_ref().err().map_or(Code::Ok, Status::code);
            let tenants = reply.map(|reply| reply.into_inner().tenants).unwrap_or_default();
            let names: Vec<String> = tenants.into_iter().map(|tenant| tenant.name).collect();
            if found == code && names == known {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "{found} {names:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    write(&format!("{CONFIG}[[tenant]]\nname = \"b\"\n"));
    until(&["a", "b"], Code::Ok).await;
    // Nothing of a text that is wrong, or changes what cannot change.
    write(&format!("{CONFIG}[[tenant]]\nname = \"c d\"\n"));
    tokio::time::sleep(Duration::from_millis(1200)).await;
    write(&format!("paths = 2{CONFIG}[[tenant]]\nname = \"e\"\n"));
    tokio::time::sleep(Duration::from_millis(1200)).await;
    until(&["a", "b"], Code::Ok).await;
    write(&CONFIG.replace("\"ada\"", "\"alan\"").replace("hosts = [\"h0\"]", "hosts = [\"h1\"]"));
    until(&[], Code::PermissionDenied).await;
}

#[tokio::test]
async fn the_topology_is_read_again_and_refused_as_a_whole() {
    let provider = Provider::start().await;
    let write = |text: &str| std::fs::write(provider.folder.path().join("topology.toml"), text).unwrap();
    let mut operator = OperatorClient::new(provider.connect("vera").await);
    let mut until = async |known: &[&str]| {
        let deadline = tokio::time::Instant::now() + LIMIT;
        loop {
            let reply = operator.topology(v1::TopologyRequest {}).await.unwrap().into_inner();
            let names: Vec<String> = reply.hosts.into_iter().map(|host| host.name).collect();
            if names == known {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "{names:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let more = TOPOLOGY.replace("{ name = \"h1\" }", "{ name = \"h1\" }, { name = \"h2\" }");
    let more = more.replace("link = [", "link = [{ from = \"h2\", to = \"s\", rate = \"1Gbit/s\" }, ");
    write(&more);
    until(&["h0", "h1", "h2"]).await;
    provider.welcome("h2").await;
    // Links that lead nowhere, and a topology without a tenant's host.
    write(&TOPOLOGY.replace("to = \"s\"", "to = \"t\""));
    tokio::time::sleep(Duration::from_millis(1200)).await;
    write(&TOPOLOGY.replace("h0", "h9"));
    tokio::time::sleep(Duration::from_millis(1200)).await;
    until(&["h0", "h1", "h2"]).await;
    write(TOPOLOGY);
    until(&["h0", "h1"]).await;
}
