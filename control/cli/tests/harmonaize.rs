//! The program itself against a real server: output, exit status, errors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_analysis::trace::{Record, Writer};
use harmonaize_api::PROTOCOL_VERSION;
use harmonaize_api::v1::provider_client::ProviderClient;
use harmonaize_api::v1::{self, from_agent, to_agent};
use harmonaize_events::{Mark, MarkKind};
use harmonaize_server::{Config, Server};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

const TOPOLOGY: &str = r#"
host = [{ name = "h0" }, { name = "h1" }]
switch = [{ name = "s" }]
link = [{ from = "h0", to = "s", rate = "1Gbit/s", delay = "50us" }, { from = "h1", to = "s", rate = "1Gbit/s" }]
"#;

fn harmonaize(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_harmonaize"))
        .args(arguments)
        .env_remove("HARMONAIZE_CONTROL")
        .env_remove("HARMONAIZE_TLS")
        .env_remove("HARMONAIZE_AGENT")
        .output()
        .unwrap()
}

fn outcome(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// Runs the program beside the server that this test's runtime serves.
async fn ask(control: SocketAddr, arguments: &'static [&'static str]) -> (i32, String, String) {
    let run = move || {
        let control = control.to_string();
        let arguments: Vec<&str> = ["--insecure-loopback", "--control", &control]
            .into_iter()
            .chain(arguments.iter().copied())
            .collect();
        outcome(&harmonaize(&arguments))
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

async fn serve() -> SocketAddr {
    serve_with("").await
}

/// Control with more keys in its configuration.
async fn serve_with(keys: &str) -> SocketAddr {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("topology.toml"), TOPOLOGY).unwrap();
    let path = folder.path().join("control.toml");
    let config = "listen = \"127.0.0.1:0\"\ninsecure_loopback = true\ntopology = \"topology.toml\"\ntenant = [{ name = \"a\" }]\n";
    std::fs::write(&path, format!("{keys}{config}")).unwrap();
    let server = Server::bind(Config::load(&path).unwrap()).await.unwrap();
    let address = server.local_address();
    tokio::spawn(server.run(std::future::pending()));
    address
}

/// An agent that does what it is told, and says so.
async fn run_fake_agent(control: SocketAddr, host: &str, rank: u32) {
    let mut client = ProviderClient::connect(format!("http://{control}")).await.unwrap();
    let (up, stream) = mpsc::channel(16);
    let listen = "127.0.0.1:9".to_owned();
    let hello =
        v1::Hello { protocol_version: PROTOCOL_VERSION, host: host.to_owned(), listen, ..Default::default() };
    up.send(from_agent::Message::Hello(hello).into()).await.unwrap();
    let (tenant, communicator) = ("a".to_owned(), "world".to_owned());
    let join = v1::Join { request: 1, tenant, communicator, rank, ranks: 2, ..v1::Join::default() };
    up.send(from_agent::Message::Join(join).into()).await.unwrap();
    let mut down = client.session(ReceiverStream::new(stream)).await.unwrap().into_inner();
    let mut communicators = vec![];
    tokio::spawn(async move {
        while let Ok(Some(message)) = down.message().await {
            let answer = match message.message.unwrap() {
                to_agent::Message::Form(recipe) | to_agent::Message::Change(recipe) => {
                    communicators = vec![v1::CommunicatorReport {
                        communicator: recipe.communicator,
                        operations_completed: 5 - u64::from(rank),
                        bytes_sent: 1 << 20,
                        ..Default::default()
                    }];
                    let (communicator, epoch) = (recipe.communicator, recipe.epoch);
                    from_agent::Message::Prepared(v1::Prepared { communicator, epoch, links: None })
                }
                to_agent::Message::Ready(v1::Ready { communicator, epoch }) => {
                    from_agent::Message::Switched(v1::Switched { communicator, epoch, first_segment: 1 })
                }
                to_agent::Message::ReportRequest(v1::ReportRequest { id }) => {
                    let mut communicators = communicators.clone();
                    // It may be asked before it has formed.
                    if let Some(first) = communicators.first_mut().filter(|_| rank == 0) {
                        first.in_flight = vec![v1::OperationReport {
                            operation: 4,
                            call: "barrier()".to_owned(),
                            waiting_for: vec![],
                            age_ns: 7_000_000_000,
                        }];
                        first.messages = vec![v1::MessageReport {
                            rank: 0,
                            call: "send(9 x f32, to rank 1)".to_owned(),
                            waiting_for: vec![1],
                            age_ns: 3_000_000_000,
                        }];
                    }
                    from_agent::Message::Report(v1::Report { id, communicators, ..Default::default() })
                }
                _ => continue,
            };
            if up.send(answer.into()).await.is_err() {
                return;
            }
        }
    });
}

/// The status once the communicator runs.
async fn running(control: SocketAddr) -> serde_json::Value {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    loop {
        let (code, out, err) = ask(control, &["status", "--json", "--patience", "30s"]).await;
        assert_eq!((code, err.as_str()), (0, ""));
        let status: serde_json::Value = serde_json::from_str(&out).unwrap();
        if status["communicators"][0]["phase"] == "running" {
            return status;
        }
        assert!(std::time::Instant::now() < deadline, "{out}");
    }
}

#[tokio::test]
async fn sees_reorders_and_dissolves() {
    let control = serve().await;
    let (code, out, _) = ask(control, &["status"]).await;
    assert_eq!(code, 0);
    assert!(out.contains("0 of 2 agents connected, 0 communicators") && out.contains("h1    away"), "{out}");
    run_fake_agent(control, "h0", 0).await;
    run_fake_agent(control, "h1", 1).await;
    let status = running(control).await;
    let known = &status["communicators"][0];
    assert_eq!(
        (&known["tenant"], &known["name"], &known["epoch"]),
        (&"a".into(), &"world".into(), &1.into())
    );
    assert_eq!((&known["bytes_sent"], &known["operations_completed"]), (&(2_u64 << 20).into(), &4.into()));
    assert_eq!(known["in_flight"][0]["waiting_for"], serde_json::json!([1]), "its agent has not begun it");
    assert_eq!(status["agents"][0]["connected"], true);

    let (_, out, _) = ask(control, &["status", "--patience", "30s"]).await;
    assert!(out.contains(": 2 of 2 agents connected, 1 communicator, 0 ended with an error\n"), "{out}");
    let mut lines = out.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    assert!(lines.any(|words| words == ["a/world", "4", "barrier()", "7.0s", "1"]), "{out}");
    let message = ["a/world", "0", "send(9", "x", "f32,", "to", "rank", "1)", "3.0s", "1"];
    assert!(lines.any(|words| words == message), "{out}");

    let (code, out, err) = ask(control, &["reorder", "a/world", "h1,h0", "--wait", "30s"]).await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.ends_with(": epoch 2 is in use, order h1,h0\n"), "{out}");
    let status = running(control).await;
    assert_eq!(status["communicators"][0]["epoch"], 2);
    for _ in 0..2 {
        let (code, out, err) = ask(control, &["reorder", "a/world", "--automatic", "--wait", "30s"]).await;
        assert_eq!((code, err.as_str()), (0, ""));
        assert!(
            out.contains(": control chooses its order, epoch ") && out.ends_with(" is in use\n"),
            "{out}"
        );
        let (_, out, _) = ask(control, &["reorder", "a/world", "--automatic", "--json"]).await;
        let told: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            (&told["automatic"], &told["in_use"], &told["order"]),
            (&true.into(), &true.into(), &serde_json::Value::Null)
        );
        let (_, out, _) = ask(control, &["plans", "--json"]).await;
        let plans: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert_eq!(plans["plans"][0]["pinned"], false, "{out}");
    }
    let (code, _, err) = ask(control, &["reorder", "a/world", "h1,h7"]).await;
    assert_eq!(
        (code, err.as_str()),
        (1, "harmonaize: `h7` has no part in it; the communicator's hosts are h0, h1\n")
    );

    let (code, out, _) = ask(control, &["dissolve", "a/world", "--json"]).await;
    let told: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &told["communicator"]), (0, &status["communicators"][0]["communicator"]), "{out}");
    let (code, _, err) = ask(control, &["dissolve", "a/world"]).await;
    assert_eq!(code, 4);
    assert_eq!(err, "harmonaize: no communicator is named a/world; see `harmonaize status`\n");
    let (code, _, err) = ask(control, &["dissolve", "12ab"]).await;
    assert_eq!((code, err.as_str()), (4, "harmonaize: no such communicator; it may have ended\n"));
}

#[tokio::test]
async fn a_watched_page_comes_again_while_somebody_reads() {
    let control = serve().await.to_string();
    let watch = move || {
        for command in ["status", "topology", "plans"] {
            let mut watching = Command::new(env!("CARGO_BIN_EXE_harmonaize"))
                .args(["--insecure-loopback", "--control", &control, command, "--watch=100ms"])
                .env_remove("HARMONAIZE_CONTROL")
                .env_remove("HARMONAIZE_TLS")
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines().map_while(Result::ok);
            let head = lines.next().unwrap();
            let head = head.split([' ', ';']).next().unwrap().to_owned();
            assert_eq!(lines.filter(|line| line.starts_with(&head)).take(2).count(), 2, "{command}");
            assert!(watching.wait().unwrap().success(), "{command}");
        }
    };
    tokio::task::spawn_blocking(watch).await.unwrap();
}

#[tokio::test]
async fn top_shows_what_agents_report_to_control() {
    let control = serve().await;
    let (code, out, err) = ask(control, &["top", "--once"]).await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("harmonaize top  fabric  ") && out.contains("0 of 2 hosts report"), "{out}");
    let mut client = ProviderClient::connect(format!("http://{control}")).await.unwrap();
    let (up, stream) = mpsc::channel(16);
    let (host, listen) = ("h1".to_owned(), "127.0.0.1:9".to_owned());
    let hello = v1::Hello { protocol_version: PROTOCOL_VERSION, host, listen, ..Default::default() };
    up.send(from_agent::Message::Hello(hello).into()).await.unwrap();
    let mut down = client.session(ReceiverStream::new(stream)).await.unwrap().into_inner();
    let Some(to_agent::Message::Welcome(welcome)) = down.message().await.unwrap().unwrap().message else {
        panic!("not welcome")
    };
    assert_eq!(welcome.telemetry_interval_ns, 1_000_000_000);
    let link = v1::Link { interface: "eth7".to_owned(), egress_bps: 123_000_000, ..Default::default() };
    let good = v1::TelemetryReport { sequence: 1, links: vec![link.clone()], ..Default::default() };
    let bad = v1::TelemetryReport { sequence: 2, links: vec![link; 65], ..Default::default() };
    for report in [good, bad] {
        up.send(from_agent::Message::Telemetry(report).into()).await.unwrap();
    }
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    loop {
        let (code, out, _) = ask(control, &["top", "--once"]).await;
        assert_eq!(code, 0);
        let host = out.lines().find(|line| line.starts_with(" h1")).unwrap();
        let words: Vec<&str> = host.split_whitespace().collect();
        // host, state, told, flows, cost, lost, refused, dropped
        if words[1] == "reports" && words[6] == "1" {
            assert!(
                out.contains("eth7") && out.contains("123M") && out.contains("1 of 2 hosts report"),
                "{out}"
            );
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{out}");
    }
}

#[tokio::test]
async fn operators_see_and_steer() {
    let control = serve().await;
    run_fake_agent(control, "h0", 0).await;
    run_fake_agent(control, "h1", 1).await;
    running(control).await;
    let (code, out, err) = ask(control, &["plans"]).await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("a/world") && out.contains("h0 h1") && out.contains("LINKS OF RINGS"), "{out}");
    let (_, out, _) = ask(control, &["plans", "a/world", "--json"]).await;
    let plans: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(plans["plans"][0]["order"], serde_json::json!(["h0", "h1"]));
    assert_eq!(plans["plans"][0]["ring_edges"][0]["from"], "h0");
    assert_eq!(ask(control, &["plans", "a/none"]).await.0, 4);

    let (code, out, _) = ask(control, &["topology"]).await;
    assert_eq!(code, 0);
    assert!(
        out.starts_with(
            "2 hosts (2 connected), 1 switch, 4 links, each one way: 0 congested, 0 failed, 0 dr"
        ),
        "{out}"
    );
    let (_, out, _) = ask(control, &["topology", "-o", "jsonpath={.hosts[?@.connected==true].name}"]).await;
    assert_eq!(out, "h0 h1\n");
    let (_, out, _) = ask(control, &["status", "-o", "yaml"]).await;
    assert!(out.starts_with("---\n") && out.contains("\n    name: \"world\"\n"), "{out}");
    let (code, out, err) = ask(control, &["plan", "--dry-run", "--drain", "s"]).await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains(" of 1 communicator would change"), "{out}");
    assert_eq!(ask(control, &["plan"]).await.0, 2);

    let (code, _, err) = ask(control, &["drain", "h0", "s9"]).await;
    assert_eq!((code, err.as_str()), (4, "harmonaize: the topology has no host or switch `s9`\n"));
    let (code, out, err) = ask(control, &["drain", "h0", "h1:s", "--reason", "a fan", "--wait", "0s"]).await;
    assert_eq!((code, err.as_str()), (0, ""));
    let mut lines = out.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    assert!(
        lines.any(|words| words[0] == "h1:s" && words[1] == "link" && words.ends_with(&["a", "fan"])),
        "{out}"
    );
    let (_, out, _) = ask(control, &["drain", "--json"]).await;
    let drains: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(drains["withdrawals"][0]["target"], "h0");
    assert_eq!(
        (&drains["withdrawals"][0]["remaining"], &drains["withdrawals"][0]["in_effect"]),
        (&1.into(), &true.into())
    );
    let (_, out, _) = ask(control, &["topology", "--json"]).await;
    let fabric: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&fabric["links"][2]["from"], &fabric["links"][2]["state"]),
        (&"h1".into(), &"withdrawn".into())
    );
    assert_eq!(fabric["hosts"][0]["withdrawn"], true);
    let (code, out, _) = ask(control, &["drain", "h0", "--end"]).await;
    assert_eq!((code, out.as_str()), (0, "h0: may be used again\n"));
    let (code, out, _) = ask(control, &["drain", "h1:s", "--end", "--json"]).await;
    let restored = |out: &str| {
        let told: serde_json::Value = serde_json::from_str(out).unwrap();
        (told["restored"][0]["target"].clone(), told["restored"][0]["kind"].clone())
    };
    assert_eq!((code, restored(&out)), (0, ("h1:s".into(), "drain".into())));
    assert_eq!(ask(control, &["drain"]).await.1, "nothing is drained\n");
    let (code, _, err) = ask(control, &["drain", "h0", "--end"]).await;
    assert_eq!((code, err.as_str()), (1, "harmonaize: h0 is not drained\n"));

    let (code, _, err) = ask(control, &["maintenance", "s"]).await;
    assert_eq!((code, err.as_str()), (2, "harmonaize: for how long? say --for 2h\n"));
    let (code, out, err) = ask(control, &["maintenance", "s", "--from", "+2h", "--for", "30min"]).await;
    assert_eq!((code, err.as_str(), out.contains("not yet")), (0, "", true), "{out}");
    let (code, _, err) =
        ask(control, &["maintenance", "s", "--from", "2020-01-01T00:00:00Z", "--for", "2h"]).await;
    assert_eq!((code, err.as_str()), (1, "harmonaize: the window is over already\n"));
    let (code, out, _) = ask(control, &["maintenance", "s", "--cancel", "--json"]).await;
    assert_eq!((code, restored(&out)), (0, ("s".into(), "maintenance".into())));
    assert_eq!(ask(control, &["maintenance"]).await.1, "no maintenance is planned\n");

    assert_eq!(ask(control, &["tenants", "add", "b"]).await, (0, "tenant b: added\n".into(), String::new()));
    let (_, out, _) = ask(control, &["tenants"]).await;
    assert!(out.contains("configuration") && out.contains("  b       added 20"), "{out}");
    let (code, _, err) = ask(control, &["tenants", "remove", "a"]).await;
    assert_eq!((code, err.contains("stands in the configuration file")), (1, true));
    let done = |out: &str| {
        let told: serde_json::Value = serde_json::from_str(out).unwrap();
        (told["tenant"].clone(), told["outcome"].clone())
    };
    let (code, out, _) = ask(control, &["tenants", "remove", "b", "--json"]).await;
    assert_eq!((code, done(&out)), (0, ("b".into(), "removed".into())));
    let (code, out, _) = ask(control, &["tenants", "--json", "add", "c"]).await;
    assert_eq!((code, done(&out)), (0, ("c".into(), "added".into())));
    let (_, out, _) = ask(control, &["tenants", "-o", "jsonpath={.tenants[*].name}"]).await;
    assert_eq!(out, "a c\n");

    let (code, out, err) = ask(control, &["explain"]).await;
    assert_eq!((code, err.as_str(), out.is_empty()), (0, "", false));
    let (code, out, _) = ask(control, &["top", "--once", "--width", "140"]).await;
    assert_eq!(code, 0);
    assert!(out.contains("PLANS") && out.contains("SWITCHES") && out.contains("h0 h1"), "{out}");
    let (code, out, _) = ask(control, &["top", "--once", "-o", "jsonpath={.hosts[*].host}"]).await;
    assert_eq!((code, out.as_str()), (0, "h0 h1\n"));
    let (code, out, _) =
        ask(control, &["top", "--once", "--host", "h1", "-o", "jsonpath={.hosts[*].host}"]).await;
    assert_eq!((code, out.as_str()), (0, "h1\n"));
    let (code, _, err) = ask(control, &["top", "--once", "--host", "h9"]).await;
    assert_eq!((code, err.as_str()), (4, "harmonaize: the topology has no host `h9`\n"));
    assert_eq!(ask(control, &["top", "--json"]).await.0, 2);
}

/// An agent on whose routes these switches answer, as far as it is asked.
async fn run_tracing_agent(control: SocketAddr, host: &str, route: [&'static str; 3]) {
    let mut client = ProviderClient::connect(format!("http://{control}")).await.unwrap();
    let (up, stream) = mpsc::channel(16);
    let hello = v1::Hello {
        protocol_version: PROTOCOL_VERSION,
        host: host.to_owned(),
        listen: "127.0.0.1:9".to_owned(),
        capabilities: Some(v1::Capabilities { trace: true, ..Default::default() }),
        ..Default::default()
    };
    up.send(from_agent::Message::Hello(hello).into()).await.unwrap();
    let mut down = client.session(ReceiverStream::new(stream)).await.unwrap().into_inner();
    tokio::spawn(async move {
        while let Ok(Some(message)) = down.message().await {
            let Some(to_agent::Message::TracePaths(question)) = message.message else { continue };
            let path = |ports: &v1::PortPair| v1::TracedPath {
                source_port: ports.source_port,
                destination_port: ports.destination_port,
                hops: route.iter().take(question.hops as usize).map(|hop| (*hop).to_owned()).collect(),
            };
            let paths = question.ports.iter().map(path).collect();
            let traced = v1::PathsTraced { request: question.request, paths, error: String::new() };
            if up.send(from_agent::Message::PathsTraced(traced).into()).await.is_err() {
                return;
            }
        }
    });
}

#[tokio::test]
async fn a_topology_is_discovered_from_agents_traces() {
    let control = serve_with("source_ports = \"20000-20999\"\n").await;
    let (code, _, err) = ask(control, &["topology", "discover"]).await;
    assert_eq!((code, err.starts_with("harmonaize: no agent has traced a route yet")), (1, true), "{err}");
    run_tracing_agent(control, "h0", ["10.0.0.1", "10.0.0.3", "10.0.0.2"]).await;
    run_tracing_agent(control, "h1", ["10.0.0.2", "10.0.0.3", "10.0.0.1"]).await;
    // Control's own topology has one switch and no address, and stays what it is.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    let made = loop {
        let (code, out, err) = ask(control, &["topology", "discover"]).await;
        let missing = ["Hosts without traces", "ends before its host", "end before their hosts"];
        if code == 0 && !missing.iter().any(|text| out.contains(text)) {
            break out;
        }
        assert!(std::time::Instant::now() < deadline, "{out}{err}");
    };
    for address in ["10.0.0.1", "10.0.0.2", "10.0.0.3"] {
        assert!(made.contains(&format!("addresses = [\"{address}\"]")), "{made}");
    }
    let folder = tempfile::tempdir().unwrap();
    let file: &'static str = folder.path().join("fabric.toml").to_str().unwrap().to_owned().leak();
    let (code, out, err) = ask(control, vec!["topology", "discover", "--out", file].leak()).await;
    assert!(code == 0 && out.starts_with(file) && out.ends_with(" marked as unsure\n"), "{out}{err}");
    let (code, out, err) = outcome(&harmonaize(&["topology", "check", file]));
    assert_eq!((code, out), (0, format!("{file}: 2 hosts, 3 switches, 4 links: ok\n")), "{err}");
}

/// A trace of one operation, as bytes.
fn recorded() -> Vec<u8> {
    let mut writer = Writer::new();
    for (time_ns, kind) in [(1000, MarkKind::Called), (9000, MarkKind::Ended)] {
        let mark = Mark { time_ns, communicator: 0xab, operation: 4, kind: kind as u32, ..Mark::default() };
        writer.write(&Record::Mark(mark));
    }
    writer.into_bytes()
}

/// An agent that has recorded this trace by the time it is asked for one.
async fn run_recording_agent(control: SocketAddr, host: &'static str, bytes: Vec<u8>) {
    let mut client = ProviderClient::connect(format!("http://{control}")).await.unwrap();
    let (up, stream) = mpsc::channel(16);
    let (host, listen) = (host.to_owned(), "127.0.0.1:9".to_owned());
    let hello =
        v1::Hello { protocol_version: PROTOCOL_VERSION, host: host.clone(), listen, ..Default::default() };
    up.send(from_agent::Message::Hello(hello).into()).await.unwrap();
    let mut down = client.session(ReceiverStream::new(stream)).await.unwrap().into_inner();
    assert!(down.message().await.unwrap().is_some(), "it is welcomed");
    tokio::spawn(async move {
        let _up = up;
        while let Ok(Some(message)) = down.message().await {
            let Some(to_agent::Message::Question(question)) = message.message else { continue };
            assert_eq!((question.kind(), question.duration_ns), (v1::RowKind::Trace, 2_000_000_000));
            let trace = Some(v1::TracePart { bytes: bytes.clone(), realtime_offset_ns: 1 });
            let (id, host) = (question.id, host.clone());
            let part = v1::AnswerPart { id, host, trace, ..Default::default() };
            client.answer(tokio_stream::once(part)).await.unwrap();
        }
    });
}

#[tokio::test]
async fn traces_of_all_hosts_come_through_control() {
    let control = serve().await;
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| -> &'static str { folder.path().join(name).to_str().unwrap().to_owned().leak() };
    let (out, kept) = (file("all.pftrace"), file("h1.trace"));
    let all: &'static [&str] = vec!["trace", "--seconds", "2", "--out", out].leak();
    let (code, _, err) = ask(control, all).await;
    let away = |host: &str| format!("harmonaize: {host}: its agent has no session with control\n");
    let none = "harmonaize: no host has recorded anything\n";
    assert_eq!((code, err), (1, away("h0") + &away("h1") + none));
    run_recording_agent(control, "h0", recorded()).await;
    let (code, text, err) = ask(control, all).await;
    assert_eq!((code, err), (0, away("h1")));
    assert!(text.ends_with(" from 2 records\n"), "{text}");
    run_recording_agent(control, "h1", recorded()).await;
    let (code, text, err) = ask(control, all).await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(text.ends_with(" from 4 records\n") && std::fs::metadata(out).unwrap().len() > 0, "{text}");
    let one = ["--host", "h1", "--keep", kept];
    let (code, text, err) = ask(control, [all, &one[..]].concat().leak()).await;
    assert!((code, err.as_str()) == (0, "") && text.ends_with(" from 2 records\n"), "{text}{err}");
    assert_eq!(std::fs::read(kept).unwrap(), recorded());
}

#[tokio::test]
async fn a_trace_that_cannot_be_read_costs_no_other_hosts() {
    let control = serve().await;
    let folder = tempfile::tempdir().unwrap();
    let out: &'static str = folder.path().join("all.pftrace").to_str().unwrap().to_owned().leak();
    let all: &'static [&str] = vec!["trace", "--seconds", "2", "--out", out].leak();
    run_recording_agent(control, "h0", b"not a trace at all".to_vec()).await;
    let (code, _, err) = ask(control, [all, &["--host", "h0"][..]].concat().leak()).await;
    let unread = "harmonaize: h0: these bytes are not a trace\n";
    let none = "harmonaize: no host has a trace that can be read\n";
    assert_eq!((code, err), (1, unread.to_owned() + none));
    run_recording_agent(control, "h1", recorded()).await;
    let (code, text, err) = ask(control, all).await;
    assert_eq!((code, err.as_str()), (0, unread));
    assert!(text.ends_with(" from 2 records\n"), "{text}");
}

#[test]
fn reports_unreachable_control() {
    // Bound and never served: nobody else can have the port, and nobody listens.
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap().to_string();
    drop(socket);
    let (code, out, err) = outcome(&harmonaize(&["--insecure-loopback", "--control", &address, "status"]));
    assert_eq!((code, out.as_str()), (3, ""));
    assert!(err.starts_with(&format!("harmonaize: control at {address} cannot be reached: ")), "{err}");
}

#[test]
fn checks_and_shows_topologies() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fabric.toml");
    std::fs::write(&file, TOPOLOGY).unwrap();
    let name = file.to_str().unwrap();
    let (code, out, err) = outcome(&harmonaize(&["topology", "check", name]));
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(out, format!("{name}: 2 hosts, 1 switch, 2 links: ok\n"));
    let (code, out, _) = outcome(&harmonaize(&["topology", "show", name]));
    assert!(
        code == 0
            && out.contains("  h0    s   1Gbit/s  50us\n")
            && out.contains("RING OVER ALL HOSTS\n  h0 h1\n"),
        "{out}"
    );
    std::fs::write(&file, TOPOLOGY.replace("1Gbit/s\" }]", "1Gb\" }]")).unwrap();
    let (code, _, err) = outcome(&harmonaize(&["topology", "check", name]));
    assert_eq!(code, 1);
    assert!(
        err.starts_with(&format!("harmonaize: {name}: line 4, column 102: `1Gb` is not a rate")),
        "{err}"
    );
    let (code, _, err) = outcome(&harmonaize(&["topology", "check", "/nowhere.toml"]));
    assert_eq!((code, err.starts_with("harmonaize: /nowhere.toml: No such file")), (1, true));
}

#[test]
fn help_and_usage() {
    let (code, out, _) = outcome(&harmonaize(&["--help"]));
    assert_eq!(code, 0);
    let words = "status reorder dissolve topology plans explain drain maintenance tenants HARMONAIZE_CONTROL";
    for word in words.split(' ').chain(["Examples:", "Exit status:"]) {
        assert!(out.contains(word), "{word} is missing in:\n{out}");
    }
    let commands = "status, topology, topology import, topology new, tenants, plans, explain, plan, drain, maintenance, reorder, top, \
                  flows, phases, trace, tenant, tenant constraints, tenant hints, tenant events, tenant receipts, tenant trace, dissolve";
    for command in commands.split(", ") {
        let arguments: Vec<&str> = command.split(' ').chain(["--help"]).collect();
        let (_, out, _) = outcome(&harmonaize(&arguments));
        let example = format!("  harmonaize {command}");
        assert!(out.contains("Examples:\n") && out.contains(&example), "{command}:\n{out}");
    }
    assert_eq!(outcome(&harmonaize(&["dissolve", "no id"])).0, 2);
    assert_eq!(outcome(&harmonaize(&["reorder", "12ab", "h0", "--wait", "10"])).0, 2);
}

/// A first deployment: certificates, a control that wants them, and an operator who has one.
#[tokio::test]
async fn init_makes_what_control_and_its_operators_need() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    std::fs::write(at("topology.toml"), TOPOLOGY).unwrap();
    let (tls, topology) = (at("tls"), at("topology.toml"));
    let init = |more: &[&str]| {
        let fixed = ["init", &tls, "--topology", &topology];
        outcome(&harmonaize(&[&fixed, more].concat()))
    };
    let (code, out, err) = init(&["--operator", "alice"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("operators/alice: made") && out.contains("hosts/h0: made"), "{out}");
    let key = std::fs::read(at("tls/operators/alice/tls.key")).unwrap();
    // Again: what is there stays.
    let (code, out, err) = init(&["--operator", "alice", "--operator", "bob"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("operators/alice: there already") && out.contains("operators/bob: made"), "{out}");
    assert_eq!(std::fs::read(at("tls/operators/alice/tls.key")).unwrap(), key);
    let (code, _, err) = init(&["--operator", "h0"]);
    assert_eq!(code, 2, "{err}");
    let config = "listen = \"127.0.0.1:0\"\ntopology = \"topology.toml\"\ntls = \"tls/control\"\n\
                  [[operator]]\nname = \"alice\"\nrole = \"viewer\"\n";
    std::fs::write(at("control.toml"), config).unwrap();
    let server = Server::bind(Config::load(at("control.toml").as_ref()).unwrap()).await.unwrap();
    let control = server.local_address().to_string();
    tokio::spawn(server.run(std::future::pending()));
    let ask = |operator: String, arguments: &'static [&'static str]| {
        let (control, tls) = (control.clone(), at(&format!("tls/operators/{operator}")));
        let run =
            move || outcome(&harmonaize(&[&["--control", &control, "--tls", &tls], arguments].concat()));
        tokio::task::spawn_blocking(run)
    };
    let (code, out, err) = ask("alice".into(), &["status", "--json"]).await.unwrap();
    assert_eq!(code, 0, "{out}{err}");
    let (code, _, err) = ask("alice".into(), &["tenants", "add", "b"]).await.unwrap();
    assert_eq!((code, err.contains("alice has the role of viewer")), (1, true), "{err}");
    let (code, _, err) = ask("bob".into(), &["status"]).await.unwrap();
    assert_eq!((code, err.contains("bob is no operator")), (1, true), "{err}");
    let (code, _, err) = ask("carol".into(), &["status"]).await.unwrap();
    assert_eq!((code, err.contains("carol/ca.crt: No such file")), (3, true), "{err}");
    // Renewed, while control runs.
    assert_eq!(init(&["--operator", "alice", "--renew"]).0, 0);
    assert_ne!(std::fs::read(at("tls/operators/alice/tls.key")).unwrap(), key);
    let (code, out, err) = ask("alice".into(), &["status", "--json"]).await.unwrap();
    assert_eq!(code, 0, "{out}{err}");
    // And revoked.
    let revoke = |more: &[&str]| outcome(&harmonaize(&[&["revoke", &tls], more].concat()));
    assert_eq!(revoke(&[]).0, 2);
    let (code, _, err) = revoke(&["--operator", "carol"]);
    assert_eq!((code, err.contains("carol/tls.crt: No such file")), (1, true), "{err}");
    let (code, out, err) = revoke(&["--operator", "alice"]);
    assert_eq!((code, out.contains("ca.crl: 1 certificate is revoked")), (0, true), "{out}{err}");
    assert_ne!(ask("alice".into(), &["status"]).await.unwrap().0, 0);
    let (code, _, err) = ask("bob".into(), &["status"]).await.unwrap();
    assert_eq!((code, err.contains("bob is no operator")), (1, true), "{err}");
}

#[tokio::test]
async fn backup_writes_a_store() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy");
    let (control, path) = (serve().await, copy.to_str().unwrap().to_owned());
    let path: &'static str = path.leak();
    let arguments: &'static [&'static str] = vec!["backup", path].leak();
    let (code, said, _) = ask(control, arguments).await;
    assert!(code == 0 && said.starts_with(path), "{said}");
    let first = std::fs::read(&copy).unwrap();
    // Again, in the place of the first.
    assert_eq!(ask(control, arguments).await.0, 0);
    assert_eq!(std::fs::read(&copy).unwrap().len(), first.len());
    let mode = std::os::unix::fs::PermissionsExt::mode(&copy.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let nowhere: &'static [&'static str] = vec!["backup", "/proc/nothing/copy"].leak();
    let (code, _, error) = ask(control, nowhere).await;
    assert!(code != 0 && error.contains("/proc/nothing/copy"), "{error}");
}

/// What `harmonaize slurm nodes` says where `sinfo` prints this, and what `sinfo` was asked.
async fn slurm_nodes(
    control: SocketAddr,
    sinfo: &'static str,
    arguments: &'static [&'static str],
) -> ((i32, String, String), String) {
    let run = move || {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let script = format!("#!/bin/sh\necho \"$@\" > {}\n{sinfo}\n", path("asked").display());
        std::fs::write(path("sinfo"), script).unwrap();
        std::fs::set_permissions(path("sinfo"), std::fs::Permissions::from_mode(0o755)).unwrap();
        let search = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
        let output = Command::new(env!("CARGO_BIN_EXE_harmonaize"))
            .args(["--insecure-loopback", "--control", &control.to_string(), "slurm", "nodes"])
            .args(arguments)
            .env("PATH", search)
            .env_remove("HARMONAIZE_TLS")
            .output();
        (outcome(&output.unwrap()), std::fs::read_to_string(path("asked")).unwrap())
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

#[tokio::test]
async fn free_nodes_of_slurm_become_a_list_for_it() {
    const SINFO: &str = "\
         printf '%s all* up\\n' 'h0 idle' 'h1 mixed' 'h2 allocated' 'h7 idle' 'h8 idle' 'h9 down*'; \
         test $# = 5 || printf '%s\\n' 'h0 idle gpu up' 'h6 idle gpu up' 'h5 idle old down'";
    let control = serve_with("allocator = { policy = \"fifo\" }\n").await;
    run_fake_agent(control, "h0", 0).await;
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while ask(control, &["topology", "-o", "jsonpath={.hosts[*].connected}"]).await.1 != "true false\n" {
        assert!(std::time::Instant::now() < deadline);
    }
    let unknown = "harmonaize: left out, not in control's topology: h[7-8]\n";
    let away = format!("harmonaize: left out, no agent is connected: h1\n{unknown}");
    let ((code, out, err), asked) =
        slurm_nodes(control, SINFO, &["--workers", "1..4", "--partition", "all"]).await;
    assert_eq!((code, out.as_str(), err.as_str()), (0, "h0\n", away.as_str()));
    assert_eq!(asked, "--noheader --Node --format %N %T %P %a --partition=all\n");
    let ((code, out, err), _) = slurm_nodes(control, SINFO, &["--workers", "2"]).await;
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(
        err.contains("harmonaize: of 1 node the job would get none: its runners are on 1 hosts"),
        "{err}"
    );
    assert!(err.ends_with("; the nearest range that would get hosts is 1..2\n"), "{err}");

    run_fake_agent(control, "h1", 1).await;
    running(control).await;
    let ((code, out, err), _) = slurm_nodes(control, SINFO, &["--workers", "2", "--tenant", "a"]).await;
    assert_eq!((code, out.as_str(), err.as_str()), (0, "h[0-1]\n", unknown));
    let ((code, out, _), _) =
        slurm_nodes(control, SINFO, &["--workers", "1..2", "--idle-only", "-o", "json"]).await;
    let choice: serde_json::Value = serde_json::from_str(&out).unwrap();
    let reason = "not in control's topology";
    let left_out = serde_json::json!([{"host": "h7", "reason": reason}, {"host": "h8", "reason": reason}]);
    let expected = serde_json::json!({"nodelist": "h0", "hosts": ["h0"], "excluded": left_out});
    assert_eq!((code, choice), (0, expected));
    let ((code, _, err), _) = slurm_nodes(control, SINFO, &["--workers", "1", "--tenant", "z"]).await;
    assert_eq!((code, err), (4, format!("{unknown}harmonaize: there is no tenant `z`\n")));

    let (code, _, err) = ask(control, &["drain", "h0", "h1", "--wait", "0s"]).await;
    assert_eq!(code, 0, "{err}");
    let ((code, out, err), _) = slurm_nodes(control, SINFO, &["--workers", "1"]).await;
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.starts_with("harmonaize: left out, drained or under maintenance: h[0-1]\n"), "{err}");
    assert!(err.ends_with("harmonaize: control has no use of any free node of Slurm\n"), "{err}");
}

#[tokio::test]
async fn why_slurm_gives_no_node_is_said() {
    let control = serve().await;
    for (sinfo, expected) in [
        (
            "echo 'slurm_load_partitions: no controller' >&2; exit 1",
            "sinfo failed (exit status: 1): slurm_load",
        ),
        ("true", "sinfo lists no node; is the partition right?"),
        ("echo h0 allocated 'all*' up", "Slurm has no free node: none of 1 node\n"),
        ("echo h0 idle gpu up", "Slurm has no default partition; give --partition with one of: gpu\n"),
        ("echo h0 idle 'all*' down", "no job starts in this partition of Slurm: all is down\n"),
        ("echo PARTITION AVAIL TIMELIMIT", "sinfo prints `PARTITION AVAIL TIMELIMIT`, not a node"),
    ] {
        let ((code, out, err), _) = slurm_nodes(control, sinfo, &["--workers", "1"]).await;
        assert_eq!((code, out.as_str()), (1, ""));
        assert!(err.starts_with(&format!("harmonaize: {expected}")), "{err}");
    }
}
