//! The program against an agent's service that is played: output, exit status, errors, and the terminal that it gives back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_analysis::trace::{Record, Writer};
use harmonaize_api::v1::telemetry_server::{Telemetry, TelemetryServer};
use harmonaize_api::v1::{self, finding::Finding as Found};
use harmonaize_events::{Mark, MarkKind};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::pin::Pin;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status};

const REAL: u64 = 1_763_755_542_000_000_000;
const LIMIT: Duration = Duration::from_secs(30);

type Stream<T> = Pin<Box<dyn tokio_stream::Stream<Item = Result<T, Status>> + Send>>;

/// An agent that says what it is given, and no more.
#[derive(Default)]
struct FakeAgent {
    trace: Vec<Vec<u8>>,
    /// Whether it ends its streams with an error.
    broken: bool,
}

impl FakeAgent {
    fn stream<T: Send + 'static>(&self, items: Vec<T>, go_on: bool) -> Stream<T> {
        let (sender, receiver) = mpsc::channel(16);
        let broken = self.broken;
        tokio::spawn(async move {
            for item in items {
                if sender.send(Ok(item)).await.is_err() {
                    return;
                }
            }
            if broken {
                let _ = sender.send(Err(Status::internal("the ring is gone\u{1b}[2J"))).await;
            } else if go_on {
                sender.closed().await;
            }
        });
        Box::pin(ReceiverStream::new(receiver))
    }
}

#[tonic::async_trait]
impl Telemetry for FakeAgent {
    type WatchStream = Stream<v1::Snapshot>;
    type FlowsStream = Stream<v1::FlowsReply>;
    type PhasesStream = Stream<v1::Finding>;
    type TraceStream = Stream<v1::TracePart>;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        assert_eq!(request.into_inner(), v1::WatchRequest { interval_ns: 1_000_000_000, flows: 100 });
        let link = v1::Link { interface: "eth0".to_owned(), egress_bps: 94_000_000, ..Default::default() };
        let snapshot = v1::Snapshot {
            host: "h0".to_owned(),
            time_ns: REAL,
            interval_ns: 1_000_000_000,
            links: vec![link],
            flows: vec![flow(1)],
            flow_count: 1,
            ..Default::default()
        };
        let unrated = v1::Link { egress_bps: 0, ..snapshot.links[0].clone() };
        let first = v1::Snapshot { interval_ns: 0, links: vec![unrated], ..snapshot.clone() };
        Ok(Response::new(self.stream(vec![first, snapshot], true)))
    }

    async fn flows(&self, request: Request<v1::FlowsRequest>) -> Result<Response<Self::FlowsStream>, Status> {
        let wanted = request.into_inner().interface;
        let part =
            |ports: std::ops::Range<u32>| v1::FlowsReply { time_ns: REAL, flows: ports.map(flow).collect() };
        let parts = if wanted == "eth9" { vec![] } else { vec![part(1..3), part(3..4)] };
        Ok(Response::new(self.stream(parts, false)))
    }

    async fn phases(
        &self,
        request: Request<v1::PhasesRequest>,
    ) -> Result<Response<Self::PhasesStream>, Status> {
        let v1::PhasesRequest { last, follow } = request.into_inner();
        let all = findings();
        let skip = if last == 0 { 0 } else { all.len().saturating_sub(last as usize) };
        Ok(Response::new(self.stream(all.into_iter().skip(skip).collect(), follow)))
    }

    async fn trace(&self, request: Request<v1::TraceRequest>) -> Result<Response<Self::TraceStream>, Status> {
        assert_eq!(request.into_inner().duration_ns, 2_000_000_000);
        let part = |bytes: &Vec<u8>| v1::TracePart { bytes: bytes.clone(), realtime_offset_ns: REAL as i64 };
        Ok(Response::new(self.stream(self.trace.iter().map(part).collect(), false)))
    }
}

fn flow(port: u32) -> v1::Flow {
    let owner =
        v1::FlowOwner { tenant: "a".to_owned(), communicator: 0xab, epoch: 2, participant: 0, peer: 1 };
    let egress = v1::FlowDirection {
        packets: 10,
        bytes: 15_000,
        rtt_samples: 2,
        min_rtt_ns: 90_000,
        last_rtt_ns: 110_000,
        mean_rtt_ns: 100_000,
        ..Default::default()
    };
    v1::Flow {
        interface: "eth0".to_owned(),
        protocol: v1::FlowProtocol::Tcp.into(),
        local: "10.0.0.1".to_owned(),
        local_port: port,
        remote: "fd00::2".to_owned(),
        remote_port: 7200,
        egress: Some(egress),
        owner: (port == 1).then_some(owner),
        job: if port == 2 { "5".to_owned() } else { String::new() },
        ..Default::default()
    }
}

fn findings() -> Vec<v1::Finding> {
    let operation = v1::Operation {
        communicator: 0xab,
        operation: 41,
        bytes: 1 << 20,
        ranks: vec![v1::RankTiming {
            rank: 3,
            called_ns: REAL,
            ended_ns: REAL + 12_300_000,
            failed: false,
            ..Default::default()
        }],
        complete: true,
        ..Default::default()
    };
    let phase = v1::TrafficPhase {
        job: "5".to_owned(),
        iteration: 7,
        start_ns: REAL,
        end_ns: REAL + 4_000_000,
        bytes: 98 << 20,
        ring_hosts: 4,
        ring_steps: 6,
        delayed_host: "10.0.0.3".to_owned(),
        delay_ns: 2_000_000,
        ..Default::default()
    };
    let congestion = v1::Congestion {
        interface: "eth0".to_owned(),
        level: v1::CongestionLevel::Severe.into(),
        cause: v1::CongestionCause::CrossTraffic.into(),
        since_ns: REAL,
        delay: true,
        ..Default::default()
    };
    let straggler = v1::Straggler {
        communicator: 0xab,
        rank: 3,
        host: "h2".to_owned(),
        cause: v1::StragglerCause::Network.into(),
        delay_ns: 9_000_000,
        edge_from: Some(2),
        edge_to: Some(3),
        ..Default::default()
    };
    [
        Found::Operation(operation),
        Found::Phase(phase),
        Found::Congestion(congestion),
        Found::Straggler(straggler),
        Found::Lost(v1::LostFindings { count: 9 }),
    ]
    .into_iter()
    .enumerate()
    .map(|(index, found)| v1::Finding { time_ns: REAL + index as u64, finding: Some(found) })
    .collect()
}

/// A trace of one operation, as bytes.
fn recorded() -> Vec<u8> {
    let mut writer = Writer::new();
    for (time_ns, kind) in [(1000, MarkKind::Called), (9000, MarkKind::Ended)] {
        let mark =
            Mark { time_ns, communicator: 0xab, operation: 4, rank: 2, kind: kind as u32, ..Mark::default() };
        writer.write(&Record::Mark(mark));
    }
    writer.into_bytes()
}

/// Serves on `agent.sock` in a folder until the folder is dropped with the test's runtime.
fn serve(played: FakeAgent) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent.sock");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let incoming = UnixListenerStream::new(tokio::net::UnixListener::from_std(listener).unwrap());
    let service = TelemetryServer::new(played);
    tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
    let socket = format!("unix:{}", path.display());
    (folder, socket)
}

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_harmonaize"));
    command.args(arguments).env_remove("HARMONAIZE_CONTROL").env_remove("HARMONAIZE_AGENT");
    command
}

fn outcome(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// Runs the program beside the service that this test's runtime serves.
async fn ask(arguments: &[&str]) -> (i32, String, String) {
    let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
    let run = move || {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        outcome(&program(&arguments).stdin(Stdio::null()).output().unwrap())
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

/// Each row has the fields of its kind in the schema, and no others; so has what lies in it.
#[tokio::test]
async fn rows_are_as_their_schema_says() {
    let schema: serde_json::Value =
        serde_json::from_str(include_str!("../../../docs/rows.schema.json")).unwrap();
    let same = |definition: &serde_json::Value, value: &serde_json::Value| {
        let mut fields: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        let required = definition["required"].as_array().unwrap();
        let mut wanted: Vec<&str> = required.iter().map(|field| field.as_str().unwrap()).collect();
        fields.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(fields, wanted);
        assert_eq!(definition["properties"].as_object().unwrap().len(), wanted.len());
    };
    let (_folder, socket) = serve(FakeAgent::default());
    let mut kinds = std::collections::BTreeSet::new();
    for command in ["flows", "phases"] {
        let (_, out, _) = ask(&[command, "--agent", &socket, "-o", "json"]).await;
        for row in out.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()) {
            let kind = row["kind"].as_str().unwrap();
            kinds.insert(kind.to_owned());
            let definition = &schema["$defs"][kind];
            same(definition, &row);
            assert_eq!(definition["properties"]["schema"]["const"], row["schema"]);
            for (field, of) in
                [("egress", "FlowDirection"), ("owner", "FlowOwner"), ("compression", "CompressedOperation")]
            {
                if let Some(value) = row.get(field).filter(|value| !value.is_null()) {
                    same(&schema["$defs"][of], value);
                }
            }
            for (field, of) in [("ranks", "RankTiming"), ("edges", "Edge")] {
                let list = row.get(field).and_then(serde_json::Value::as_array);
                list.into_iter().flatten().for_each(|value| same(&schema["$defs"][of], value));
            }
        }
    }
    assert_eq!(
        kinds.iter().map(String::as_str).collect::<Vec<_>>(),
        ["congestion", "flow", "lost", "operation", "phase", "straggler"]
    );
}

#[tokio::test]
async fn rows_as_yaml_are_those_of_json() {
    let (_folder, socket) = serve(FakeAgent::default());
    for command in ["flows", "phases"] {
        let (_, json, _) = ask(&[command, "--agent", &socket, "-o", "json"]).await;
        let rows: Vec<serde_json::Value> =
            json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (code, yaml, err) = ask(&[command, "--agent", &socket, "-o", "yaml"]).await;
        assert_eq!((code, err.as_str(), rows.is_empty()), (0, "", false));
        let documents: Vec<serde_json::Value> = serde_saphyr::from_multiple(&yaml).unwrap();
        assert_eq!(documents, rows, "{yaml}");
    }
}

#[tokio::test]
async fn flows_are_listed() {
    let (folder, socket) = serve(FakeAgent::default());
    let (code, out, err) = ask(&["flows", "--agent", &socket, "--json"]).await;
    assert_eq!((code, err.as_str()), (0, ""));
    let flows: Vec<serde_json::Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let row = (&flows[0]["schema"], &flows[0]["kind"], &flows[0]["time_ns"]);
    assert_eq!(row, (&"harmonaize.rows/1".into(), &"flow".into(), &REAL.into()));
    assert_eq!(flows.iter().map(|flow| flow["local_port"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3]);
    let owner = serde_json::json!({"tenant": "a", "communicator": "00000000000000ab", "epoch": 2, "participant": 0, "peer": 1});
    assert_eq!((&flows[0]["owner"], &flows[0]["job"]), (&owner, &"".into()));
    assert_eq!((&flows[1]["owner"], &flows[1]["job"]), (&serde_json::Value::Null, &"5".into()));
    let rtt = |of: &str| flows[0]["egress"][of].as_u64().unwrap();
    assert_eq!(
        ["rtt_samples", "min_rtt_ns", "last_rtt_ns", "mean_rtt_ns"].map(rtt),
        [2, 90_000, 110_000, 100_000]
    );
    assert_eq!(flows[0]["ingress"], serde_json::Value::Null);

    // Every field is explained.
    let (_, help, _) = ask(&["flows", "--help"]).await;
    let mut fields: Vec<&String> = flows[0].as_object().unwrap().keys().collect();
    fields.extend(flows[0]["egress"].as_object().unwrap().keys());
    assert!(fields.len() > 25, "{fields:?}");
    for field in fields {
        assert!(help.contains(field.as_str()), "{field} is not explained");
    }
    let (_, out, _) = ask(&["flows", "--agent", &socket]).await;
    assert!(out.contains("10.0.0.1:1  [fd00::2]:7200  a/00000000000000ab  14.6KiB"), "{out}");
    let (_, out, _) = ask(&["flows", "--agent", &socket, "--interface", "eth9"]).await;
    assert_eq!(out, "no flow has been seen\n");
    // Filters are this program's where it asks an agent.
    let (_, out, _) = ask(&["flows", "--agent", &socket, "--tenant", "a", "-o", "wide"]).await;
    assert!(out.lines().count() == 2 && out.contains("  min rtt  ") && out.contains("  90us  "), "{out}");
    let (_, out, _) = ask(&["flows", "--agent", &socket, "--cause", "cross_traffic", "--json"]).await;
    assert_eq!(out.lines().count(), 2, "{out}");
    let template = "jsonpath={.host}{.protocol} {.local_port}{\"\\t\"}{.owner.tenant}";
    let (code, out, err) = ask(&["flows", "--agent", &socket, "--tenant", "a", "-o", template]).await;
    assert_eq!((code, err.as_str(), out.as_str()), (0, "", "tcp 1\ta\n"));
    let rows = folder.path().join("rows").to_string_lossy().into_owned();
    for _ in 0..2 {
        let limits = ["--max-bytes", "1B", "--keep", "3"];
        let command = [&["flows", "--agent", &socket, "--json", "--file", &rows][..], &limits].concat();
        assert_eq!(ask(&command).await, (0, String::new(), String::new()));
    }
    let ports = ["rows", "rows.1", "rows.2", "rows.3"].map(|name| {
        let text = std::fs::read_to_string(folder.path().join(name)).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["local_port"].as_u64().unwrap()
    });
    assert_eq!((ports, folder.path().join("rows.4").exists()), ([3, 2, 1, 3], false));
    assert_eq!(ask(&["flows", "--agent", &socket, "--file", &rows]).await.0, 2);
    let (code, _, err) = ask(&["flows", "--agent", &socket, "-o", "jsonpath={.host"]).await;
    assert_eq!((code, err.contains("a brace is not closed")), (2, true), "{err}");
}

#[tokio::test]
async fn findings_are_listed() {
    let (_folder, socket) = serve(FakeAgent::default());
    let (code, out, err) = ask(&["phases", "--agent", &socket, "--json"]).await;
    assert_eq!((code, err.as_str()), (0, ""));
    let said: Vec<serde_json::Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let kinds: Vec<&str> = said.iter().map(|one| one["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["operation", "phase", "congestion", "straggler", "lost"]);
    assert_eq!(
        (&said[0]["time_ns"], &said[0]["ranks"][0]["ended_ns"]),
        (&REAL.into(), &(REAL + 12_300_000).into())
    );
    assert_eq!((&said[1]["ring_steps"], &said[1]["delayed_host"]), (&6.into(), &"10.0.0.3".into()));
    assert_eq!((&said[2]["delay"], &said[2]["level"]), (&true.into(), &"severe".into()));
    assert_eq!((&said[3]["edge_to"], &said[3]["cause"]), (&3.into(), &"network".into()));
    assert_eq!(said[4]["count"], 9);
    let (_, help, _) = ask(&["phases", "--help"]).await;
    for field in said.iter().flat_map(|one| one.as_object().unwrap().keys()) {
        assert!(help.contains(field.as_str()), "{field} is not explained");
    }
    let (_, out, _) = ask(&["phases", "--agent", &socket, "--last", "4"]).await;
    let expected = "\
20:05:42.000  job 5: iteration 7, 4.0ms, 98.0MiB, 10.0.0.3 delayed by 2.0ms
20:05:42.000  eth0 out: congestion severe, by cross traffic
20:05:42.000  00000000000000ab: rank 3 on h2 is late by 9.0ms (network)
20:05:42.000  9 findings were lost
";
    assert_eq!(out, expected);
}

#[tokio::test]
async fn a_picture_of_top_as_text() {
    let (_folder, socket) = serve(FakeAgent::default());
    let (code, out, err) = ask(&["top", "--agent", &socket, "--once", "--width", "80"]).await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("harmonaize top  h0  20:05:42.000"), "{out}");
    assert!(
        out.contains("94.0M") && out.contains("10.0.0.1:1") && out.lines().all(|line| line.len() <= 80),
        "{out}"
    );
    let (_, out, _) = ask(&["top", "--agent", &socket, "--once", "--filter", "nothing has this"]).await;
    assert!(!out.contains("10.0.0.1:1"), "{out}");
    let (code, _, err) = ask(&["top", "--agent", &socket]).await;
    assert_eq!(
        (code, err.as_str()),
        (1, "harmonaize: top needs a terminal; `--once` prints one picture as text\n")
    );
}

#[tokio::test]
async fn traces_are_recorded_and_converted() {
    let bytes = recorded();
    let halves = bytes.chunks(bytes.len() / 2 + 1).map(<[u8]>::to_vec).collect();
    let (folder, socket) = serve(FakeAgent { trace: halves, ..FakeAgent::default() });
    let [out, kept, again] = ["a.pftrace", "a.trace", "b.pftrace"].map(|name| folder.path().join(name));
    let name = |path: &Path| path.to_str().unwrap().to_owned();
    let (out_name, kept_name) = (name(&out), name(&kept));
    let arguments = ["trace", "--agent", &socket, "--seconds", "2", "--out", &out_name, "--keep", &kept_name];
    let (code, said, err) = ask(&arguments).await;
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(said.ends_with(" from 2 records\n"), "{said}");
    assert_eq!(std::fs::read(&kept).unwrap(), bytes);
    let made = std::fs::read(&out).unwrap();
    let text = b"communicator 00000000000000ab";
    assert!(made.windows(text.len()).any(|window| window == text));

    // Several agents in one call.
    let (_folder, other) = serve(FakeAgent { trace: vec![bytes.clone()], ..FakeAgent::default() });
    let both = format!("{socket},{other}");
    let arguments = ["trace", "--agent", &both, "--seconds", "2", "--out", &out_name];
    let (code, said, err) = ask(&arguments).await;
    assert!((code, err.as_str()) == (0, "") && said.ends_with(" from 4 records\n"), "{said}{err}");
    assert_eq!(ask(&[&arguments[..], &["--keep", &kept_name]].concat()).await.0, 2);

    // A file that was cut off is used as far as it goes; what is none is refused.
    let mut torn = bytes.clone();
    torn.pop();
    std::fs::write(&kept, torn).unwrap();
    let again_name = name(&again);
    let (code, said, _) = ask(&["trace", "--from", &kept_name, "--out", &again_name]).await;
    assert!(
        code == 0 && said.contains(" from 1 record\n") && said.contains("ends within a record"),
        "{said}"
    );
    std::fs::write(&kept, "no trace at all").unwrap();
    let (code, _, err) = ask(&["trace", "--from", &kept_name, "--out", &again_name]).await;
    assert_eq!((code, err), (1, format!("harmonaize: {kept_name}: these bytes are not a trace\n")));
    let (code, _, err) = ask(&["trace", "--from", "/nowhere", "--out", &again_name]).await;
    assert!(code == 1 && err.starts_with("harmonaize: /nowhere: No such file"), "{err}");
    let unwritable = ["trace", "--agent", &socket, "--seconds", "2", "--out", "/nowhere/a"];
    let (code, _, err) = ask(&unwritable).await;
    assert!(code == 1 && err.starts_with("harmonaize: /nowhere/a: No such file"), "{err}");
}

#[tokio::test]
async fn recorded_traces_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, records: &[Record]| {
        let mut writer = Writer::new();
        records.iter().for_each(|record| writer.write(record));
        let path = folder.path().join(name);
        std::fs::write(&path, writer.into_bytes()).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let mark = |time_ns: u64, bytes: u64| {
        Record::Mark(Mark { time_ns, bytes, kind: MarkKind::Sent as u32, ..Mark::default() })
    };
    let first = write("first", &[mark(1_000, 1), mark(2_000, 2), mark(3_000, 3)]);
    let second = write("second", &[mark(1_000, 1), mark(2_400, 2), mark(3_000, 4)]);
    let compared = async |one: &str, other: &str, tolerance: &str| {
        let (code, said, err) = ask(&["trace", "--diff", one, other, "--tolerance", tolerance]).await;
        assert_eq!((code, err.as_str()), (0, ""));
        serde_json::from_str::<serde_json::Value>(&said).unwrap()
    };
    let own = compared(&first, &first, "0ns").await;
    assert_eq!(own, serde_json::json!({"first": [], "second": [], "common": 3, "largest_ns": 0}));
    let told = compared(&first, &second, "400ns").await;
    assert_eq!((&told["common"], &told["largest_ns"]), (&2.into(), &400.into()), "{told}");
    for (side, bytes) in [("first", "bytes: 3"), ("second", "bytes: 4")] {
        let [one] = &told[side].as_array().unwrap()[..] else { panic!("{told}") };
        assert_eq!((&one["record"], &one["time_ns"]), (&"mark".into(), &3_000.into()));
        assert!(one["says"].as_str().unwrap().contains(bytes), "{one}");
    }
    assert_eq!(compared(&first, &second, "399ns").await["common"], 1);
    let (code, _, err) = ask(&["trace", "--diff", &first, "/nowhere"]).await;
    assert!(code == 1 && err.starts_with("harmonaize: /nowhere: No such file"), "{err}");
    for wrong in [&["trace", "--diff", &first][..], &["trace", "--diff", &first, &second, "--out", "/tmp/x"]]
    {
        assert_eq!(ask(wrong).await.0, 2, "{wrong:?}");
    }
}

#[tokio::test]
async fn reports_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("no.sock");
    let socket = format!("unix:{}", path.display());
    let (code, _, err) = ask(&["flows", "--agent", &socket]).await;
    let expected =
        format!("harmonaize: the agent's socket {} cannot be reached: No such file", path.display());
    assert!(code == 3 && err.starts_with(&expected), "{err}");
    std::fs::write(&path, "").unwrap();
    let (code, _, err) = ask(&["top", "--once", "--agent", &socket]).await;
    assert!(code == 3 && err.contains("cannot be reached: it is no socket"), "{err}");
    std::fs::remove_file(&path).unwrap();
    drop(UnixListener::bind(&path).unwrap());
    let (code, _, err) = ask(&["phases", "--agent", &socket]).await;
    assert!(code == 3 && err.contains("cannot be reached: Connection refused"), "{err}");

    let both = format!("control,{socket}");
    for wrong in [
        &["flows", "--agent", "h0:7000"][..],
        &["flows", "--agent", &socket, "--follow"],
        &["flows", "--agent", &socket, "--host", "h0"],
        &["phases", "--agent", &socket, "--tenant", "a"],
        &["phases", "--cause", "weather"],
        &["flows", "--since", "yesterday"],
        &["trace", "--out", "/tmp/x"],
        &["trace", "--out", "/tmp/x", "--seconds", "0"],
        &["trace", "--out", "/tmp/x", "--seconds", "1", "--from", "/tmp/y"],
        &["trace", "--out", "/tmp/x", "--seconds", "1", "--keep", "/tmp/y"],
        &["trace", "--out", "/tmp/x", "--seconds", "1", "--agent", &socket, "--host", "h0"],
        &["trace", "--out", "/tmp/x", "--seconds", "1", "--agent", &both],
        &["trace", "--out", "/tmp/x", "--from", "/tmp/y", "--host", "h0"],
        &["top", "--once", "--agent", &socket, "--host", "h0"],
        &["top", "--width", "80"],
        &["top", "--interval", "1"],
    ] {
        assert_eq!(ask(wrong).await.0, 2, "{wrong:?}");
    }
    let (_folder, socket) = serve(FakeAgent { broken: true, ..FakeAgent::default() });
    let (code, out, err) = ask(&["phases", "--agent", &socket]).await;
    assert_eq!((code, out.lines().count(), err.as_str()), (1, 5, "harmonaize: the ring is gone?[2J\n"));
}

/// The program in a terminal of its own, which is read to its end.
struct InTerminal {
    child: std::process::Child,
    master: std::fs::File,
    shown: Vec<u8>,
}

impl InTerminal {
    /// With this value of the variable `NO_COLOR`.
    fn start(socket: &str, no_color: &str) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        tcsetwinsize(&master, Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let slave = || std::fs::File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let mut command = program(&["top", "--agent", socket]);
        command.env("NO_COLOR", no_color);
        let child = command.stdin(slave()).stdout(slave()).stderr(slave()).spawn().unwrap();
        rustix::io::ioctl_fionbio(&master, true).unwrap();
        Self { child, master: master.into(), shown: Vec::new() }
    }

    /// Reads until the screen has shown this.
    fn until(&mut self, expected: &str) {
        let deadline = Instant::now() + LIMIT;
        let mut part = [0; 4096];
        while !self.shown.windows(expected.len()).any(|window| window == expected.as_bytes()) {
            match self.master.read(&mut part) {
                Ok(count) => self.shown.extend(&part[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    std::thread::yield_now();
                }
                Err(error) => panic!("{error}: {}", String::from_utf8_lossy(&self.shown)),
            }
            assert!(Instant::now() < deadline, "{expected}: {}", String::from_utf8_lossy(&self.shown));
        }
    }

    fn raw(&self) -> bool {
        let modes = tcgetattr(&self.master).unwrap().local_modes;
        !modes.contains(LocalModes::ICANON) && !modes.contains(LocalModes::ECHO)
    }

    /// Its exit status, once it has given the terminal back.
    fn ended(mut self) -> std::process::ExitStatus {
        self.until("\u{1b}[?1049l");
        let status = self.child.wait().unwrap();
        assert!(!self.raw(), "the terminal is as it was");
        status
    }
}

#[tokio::test]
async fn top_has_colours_unless_no_color_is_set() {
    let (_folder, socket) = serve(FakeAgent::default());
    let play = move || {
        for (no_color, coloured) in [("", true), ("1", false)] {
            let mut terminal = InTerminal::start(&socket, no_color);
            terminal.until("10.0.0.1:1");
            let shown = String::from_utf8_lossy(&terminal.shown).into_owned();
            assert_eq!(shown.contains("[38;"), coloured, "NO_COLOR={no_color}: {shown:?}");
            // Titles are reversed, and nothing takes that back before they are written.
            assert!(
                shown.contains("\u{1b}[7m") && !shown.contains("\u{1b}[;m"),
                "NO_COLOR={no_color}: {shown:?}"
            );
            terminal.master.write_all(b"q").unwrap();
            assert_eq!(terminal.ended().code(), Some(0), "NO_COLOR={no_color}");
        }
    };
    tokio::task::spawn_blocking(play).await.unwrap();
}

#[tokio::test]
async fn the_terminal_is_given_back_however_it_ends() {
    let (_folder, socket) = serve(FakeAgent::default());
    for how in ["q", "\u{3}", "SIGTERM", "SIGHUP"] {
        let socket = socket.clone();
        let play = move || {
            let mut terminal = InTerminal::start(&socket, "");
            terminal.until("10.0.0.1:1");
            assert!(terminal.raw(), "{how}");
            // Another size, another picture.
            let size = Winsize { ws_row: 40, ws_col: 140, ws_xpixel: 0, ws_ypixel: 0 };
            terminal.shown.clear();
            tcsetwinsize(&terminal.master, size).unwrap();
            // The kernel tells a terminal's own session alone; this process is of none.
            let process = rustix::process::Pid::from_child(&terminal.child);
            let signal = |signal| rustix::process::kill_process(process, signal).unwrap();
            signal(rustix::process::Signal::WINCH);
            terminal.until("q quit  ? help");
            terminal.master.write_all(b"?").unwrap();
            // A word: blanks that were blank before are not drawn again.
            // A key that comes with a change of size waits for the next one: crossterm's reader takes one event of both.
            let mut keys = terminal.master.try_clone().unwrap();
            let (over, waits) = std::sync::mpsc::channel::<()>();
            let pressing = std::thread::spawn(move || {
                while waits.recv_timeout(Duration::from_millis(200)) == Err(RecvTimeoutError::Timeout) {
                    keys.write_all(b"1").unwrap();
                }
            });
            terminal.until("another");
            drop(over);
            pressing.join().unwrap();
            match how {
                "SIGTERM" => signal(rustix::process::Signal::TERM),
                "SIGHUP" => signal(rustix::process::Signal::HUP),
                key => terminal.master.write_all(key.as_bytes()).unwrap(),
            }
            assert_eq!(terminal.ended().code(), Some(0), "{how}");
        };
        tokio::task::spawn_blocking(play).await.unwrap();
    }
}
