//! What a scheduler of Kubernetes gets of control: the answers of `k8s.io/kube-scheduler/extender/v1`, and to whom they go.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_api::v1::operator_client::OperatorClient;
use harmonaize_api::v1::{WithdrawRequest, WithdrawalKind};
use harmonaize_identity::{Authority, CONTROL, Folder, Protection, Remote, Use};
use harmonaize_planner::Topology;
use harmonaize_server::{Config, Server};
use harmonaize_testkit::agents::{Agent, LIMIT, LeafSpine, hello_of};
use serde_json::{Value, json};
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codegen::http::{Request, StatusCode};
use tonic::transport::Endpoint;

/// Two racks of four hosts, and two spines.
const FABRIC: LeafSpine = LeafSpine { racks: 2, hosts: 4, spines: 2 };

const HEAD: &str = "listen = \"127.0.0.1:0\"\npage = \"127.0.0.1:0\"\nmetrics = \"127.0.0.1:0\"\ntopology = \"topology.toml\"\n";

/// A control that takes agents to come back for hardly any time.
async fn start() -> (SocketAddr, SocketAddr) {
    start_with("allocator = { policy = \"fifo\", round = \"1us\" }\n").await
}

/// A control without certificates, and where it listens: for agents, and for schedulers.
async fn start_with(keys: &str) -> (SocketAddr, SocketAddr) {
    let more = "scheduler_extender = \"127.0.0.1:0\"\ninsecure_loopback = true\nsession_timeout = \"120s\"\n";
    let tenants = "tenant = [{ name = \"a\" }, { name = \"b\", hosts = [\"h1\"] }]\n\
                   scheduler_namespaces = { research = [\"a\"], team-b = [\"b\"] }\n";
    let topology = Topology::parse(&FABRIC.topology()).unwrap();
    let server = Server::bind(Config::parse(&format!("{HEAD}{more}{keys}{tenants}"), topology).unwrap());
    let server = server.await.unwrap();
    let addresses = (server.local_address(), server.extender_address().unwrap());
    tokio::spawn(server.run(std::future::pending()));
    addresses
}

/// Agents of these hosts.
async fn agents(control: SocketAddr, hosts: impl IntoIterator<Item = usize>) -> Vec<Agent> {
    let channel = Endpoint::from_shared(format!("http://{control}")).unwrap().connect().await.unwrap();
    let mut agents = Vec::new();
    for host in hosts {
        agents.push(Agent::hello(channel.clone(), hello_of(&format!("h{host}"))).await.unwrap().0);
    }
    agents
}

/// The answer to a request of HTTP/1.1: its code and body.
async fn ask(address: SocketAddr, line: &str, headers: &str, body: &[u8]) -> (u16, String) {
    let asked = async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let length = body.len();
        let head =
            format!("{line} HTTP/1.1\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    };
    timeout(LIMIT, asked).await.unwrap()
}

const JSON: &str = "Host: localhost\r\nContent-Type: application/json\r\n";

/// What the extender answers.
async fn call(extender: SocketAddr, verb: &str, args: &Value) -> Value {
    let (code, body) = ask(extender, &format!("POST /{verb}"), JSON, args.to_string().as_bytes()).await;
    assert_eq!(code, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

/// A request of a pod of tenant `a`, by its number.
fn args(pod: usize, nodes: &[&str]) -> Value {
    let labels = json!({ "harmonaize.dev/job": "gang", "harmonaize.dev/workers": "2" });
    let metadata = json!({ "namespace": "a", "uid": format!("uid-{pod}"), "labels": labels });
    json!({ "Pod": { "metadata": metadata }, "NodeNames": nodes })
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[tokio::test]
async fn answers_are_those_of_the_documented_interface() {
    let (control, extender) = start().await;
    let _agents = agents(control, 0..6).await;
    let mut operator = OperatorClient::connect(format!("http://{control}")).await.unwrap();
    let (targets, kind) = (vec!["h3".to_owned()], WithdrawalKind::Drain.into());
    operator.withdraw(WithdrawRequest { targets, kind, ..Default::default() }).await.unwrap();
    for (verb, request, response) in [
        ("filter", include_str!("filter.request.json"), include_str!("filter.response.json")),
        ("prioritize", include_str!("prioritize.request.json"), include_str!("prioritize.response.json")),
    ] {
        assert_eq!(call(extender, verb, &parsed(request)).await, parsed(response), "{verb}");
    }
}

#[tokio::test]
async fn pods_follow_their_first_to_its_rack() {
    let (control, extender) = start().await;
    let _agents = agents(control, 0..8).await;
    let first = call(extender, "prioritize", &args(0, &["h0", "h1", "h2", "h4"])).await;
    assert_eq!(first[0], json!({ "Host": "h0", "Score": 10 }), "{first}");
    // More hosts are free in the other rack now.
    let nodes = ["h4", "h5", "h6", "h1"];
    let second = call(extender, "prioritize", &args(1, &nodes)).await;
    let full: Vec<&str> = second
        .as_array()
        .unwrap()
        .iter()
        .filter(|node| node["Score"] == 10)
        .map(|node| node["Host"].as_str().unwrap())
        .collect();
    assert_eq!(full, ["h1"], "{second}");
    // Another job's are not.
    let mut other = args(2, &nodes);
    other["Pod"]["metadata"]["labels"]["harmonaize.dev/job"] = json!("other");
    let other = call(extender, "prioritize", &other).await;
    assert!(other[0]["Score"] == 10 && other[3]["Score"] != 10, "{other}");
}

#[tokio::test]
async fn pods_of_no_job_keep_all_their_nodes() {
    let (_, extender) = start().await;
    let pod = json!({ "Pod": { "metadata": { "namespace": "kube-system" } }, "NodeNames": ["x", "h0"] });
    let filtered = call(extender, "filter", &pod).await;
    assert_eq!((&filtered["NodeNames"], &filtered["FailedNodes"]), (&json!(["x", "h0"]), &json!({})));
    let scores = call(extender, "prioritize", &pod).await;
    assert_eq!(scores, json!([{ "Host": "x", "Score": 0 }, { "Host": "h0", "Score": 0 }]));
}

#[tokio::test]
async fn nodes_fail_with_a_reason_that_the_pod_shows() {
    let (control, extender) = start().await;
    let _agents = agents(control, 0..2).await;
    let failed = async |namespace: &str, labels: Value| {
        let metadata = json!({ "namespace": namespace, "labels": labels });
        let args = json!({ "Pod": { "metadata": metadata }, "NodeNames": ["h0", "h1"] });
        let scores = call(extender, "prioritize", &args).await;
        assert_eq!(scores[0]["Score"], 0, "{scores}");
        call(extender, "filter", &args).await["FailedNodes"].clone()
    };
    let by_namespace = failed("nobody", json!({ "harmonaize.dev/job": "j" })).await;
    assert!(by_namespace["h0"].as_str().unwrap().contains("no such tenant"), "{by_namespace}");
    let labels = json!({ "harmonaize.dev/job": "j", "harmonaize.dev/tenant": "b" });
    let elsewhere = failed("team-b", labels.clone()).await;
    assert_eq!(elsewhere, json!({ "h0": "the tenant may not be on this host" }));
    // Who makes pods in a namespace is no other tenant by a label.
    let other = failed("a", labels).await;
    assert!(other["h1"].as_str().unwrap().contains("namespace has no pods of tenant `b`"), "{other}");
    let none = failed("nobody", json!({ "harmonaize.dev/job": "j", "harmonaize.dev/workers": "none" })).await;
    assert!(none["h1"].as_str().unwrap().contains("`none` is no number of workers"), "{none}");
}

#[tokio::test]
async fn a_control_that_has_just_begun_to_lead_fails_no_node() {
    let (control, extender) = start_with("").await;
    let _agents = agents(control, 0..2).await;
    for verb in ["filter", "prioritize"] {
        let served = args(0, &["h0", "h1", "nowhere"]);
        assert_ne!(call(extender, verb, &served).await, Value::Null);
        let body = args(0, &["h0", "h6"]).to_string();
        let (code, said) = ask(extender, &format!("POST /{verb}"), JSON, body.as_bytes()).await;
        assert!(code == 503 && said.contains("just begun to lead"), "{verb}: {code} {said}");
    }
}

#[tokio::test]
async fn senseless_requests_are_refused_with_a_text() {
    let (_, extender) = start().await;
    let whole = json!({ "Pod": {}, "Nodes": { "items": [] } }).to_string();
    let numbers = json!({ "Pod": {}, "NodeNames": [1] }).to_string();
    for (body, text) in [
        ("", "no ExtenderArgs"),
        ("{", "no ExtenderArgs"),
        ("[]", "no ExtenderArgs"),
        ("{\"NodeNames\":[]}", "missing field `Pod`"),
        (numbers.as_str(), "expected a string"),
        (whole.as_str(), "nodeCacheCapable: true"),
    ] {
        for verb in ["filter", "prioritize"] {
            let (code, said) = ask(extender, &format!("POST /{verb}"), JSON, body.as_bytes()).await;
            assert!(code == 400 && said.contains(text), "{verb} {body}: {code} {said}");
        }
    }
    let many = json!({ "Pod": {}, "NodeNames": vec!["h0"; 16_384] });
    assert_eq!(call(extender, "filter", &many).await["NodeNames"].as_array().unwrap().len(), 16_384);
    let more = json!({ "Pod": {}, "NodeNames": vec!["h0"; 16_385] }).to_string();
    let (code, said) = ask(extender, "POST /filter", JSON, more.as_bytes()).await;
    assert!(code == 400 && said.contains("at most 16384"), "{code} {said}");
    let deep = vec![b'['; 100_000];
    assert_eq!(ask(extender, "POST /filter", JSON, &deep).await.0, 400);
    let large = vec![b' '; (4 << 20) + 1];
    let (code, said) = ask(extender, "POST /filter", JSON, &large).await;
    assert!(code == 413 && said.contains("4 MiB"), "{code} {said}");
    for (line, headers, expected) in [
        ("GET /filter", JSON, 405),
        ("POST /bind", JSON, 404),
        ("POST /filter", "Host: localhost\r\nContent-Type: text/plain\r\n", 415),
        ("POST /filter", "Host: evil.example\r\nContent-Type: application/json\r\n", 403),
    ] {
        assert_eq!(ask(extender, line, headers, b"{}").await.0, expected, "{line} {headers}");
    }
}

#[tokio::test]
async fn certificates_with_a_role_alone_get_answers() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::create().unwrap();
    let control = Folder(folder.path().join("control"));
    authority.issue(CONTROL, Use::Control).unwrap().write(&control).unwrap();
    std::fs::write(folder.path().join("topology.toml"), FABRIC.topology()).unwrap();
    let load = |more: &str| {
        let operator = "tls = \"control\"\noperator = [{ name = \"kube-scheduler\", role = \"viewer\" }]\n";
        let path = folder.path().join("control.toml");
        std::fs::write(&path, format!("{HEAD}{more}{operator}")).unwrap();
        Config::load(&path).unwrap()
    };
    let server = Server::bind(load("")).await.unwrap();
    assert_eq!(server.extender_address(), None, "it listens though nobody said so");
    drop(server);
    let server = Server::bind(load("scheduler_extender = \"127.0.0.1:0\"\n")).await.unwrap();
    let extender = server.extender_address().unwrap();
    tokio::spawn(server.run(std::future::pending()));
    // Who may ask hears that an empty body is no question.
    for (name, code) in [("kube-scheduler", 400), ("mallory", 403), ("h0", 403)] {
        let own = Folder(folder.path().join(name));
        authority.issue(name, Use::Session).unwrap().write(&own).unwrap();
        std::fs::copy(control.0.join("ca.crt"), own.0.join("ca.crt")).unwrap();
        let remote = Remote::at(&Protection::Mutual(own), CONTROL, &extender.to_string()).unwrap();
        let mut channel = remote.connect().await.unwrap();
        let request = Request::post("https://control/filter").header("content-type", "application/json");
        let request = request.body(Body::empty()).unwrap();
        let answer = timeout(LIMIT, async {
            std::future::poll_fn(|cx| GrpcService::<Body>::poll_ready(&mut channel, cx)).await.unwrap();
            GrpcService::<Body>::call(&mut channel, request).await.unwrap()
        });
        assert_eq!(answer.await.unwrap().status(), StatusCode::from_u16(code).unwrap(), "{name}");
    }
}
