//! What operators' tools and Prometheus get from an agent, over its real sockets.

use crate::made_up::{begin, key, pass};
use crate::{block, wait};
use harmonaize_agent::config::Telemetry;
use harmonaize_agent::counters::Counters;
use harmonaize_agent::telemetry::{Running, Shown};
use harmonaize_analysis::trace::{Record, replay};
use harmonaize_api::v1;
use harmonaize_api::v1::telemetry_client::TelemetryClient;
use harmonaize_events::{InterfaceTotals, Socket, SocketKey};
use harmonaize_identity::Protection;
use harmonaize_loader::fake::Fake;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tonic::transport::Channel;

pub(crate) async fn connect(socket: &Path) -> TelemetryClient<Channel> {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
    TelemetryClient::new(endpoint.connect().await.unwrap())
}

async fn ask(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut answer = String::new();
    // A request that is cut off may be answered by a reset.
    let _ = stream.read_to_string(&mut answer).await;
    answer
}

#[test]
fn operators_and_prometheus_see_what_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("telemetry.sock");
    let fake = Fake::default();
    fake.scene().interfaces.insert("made0".into(), 7);
    let (handle, thread) = begin(&fake, None);
    let asked = Telemetry { socket: Some(socket.clone()), ..Telemetry::default() };
    block(async {
        let mut running = Running::new(handle.clone(), thread, true);
        let (control, _said) = mpsc::channel(8);
        running.serve(shown(&asked), &control, &Counters::default()).await;
        assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        {
            let mut scene = fake.scene();
            let totals = scene.totals.entry(7).or_insert_with(InterfaceTotals::default);
            (totals.egress.packets, totals.egress.bytes) = (3, 300);
        }
        pass(&fake, key(7, 1), 100);
        pass(&fake, key(7, 2), 200);
        let socket_of = SocketKey { local_port: 2, namespace: 9, ..SocketKey::default() };
        let known = Socket {
            srtt_ns: 5_000,
            congestion_window: 10,
            delivery_rate: 1_000,
            user: 77,
            cgroup: 88,
            ..Socket::default()
        };
        fake.scene().endpoints.sockets.insert(socket_of, known);
        let mut client = connect(&socket).await;
        watched(&mut client, &fake).await;
        flows(&mut client).await;
        traced(&mut client).await;
        scraped(running.metrics().unwrap()).await;
        let kept = client.phases(v1::PhasesRequest { last: 0, follow: false }).await.unwrap();
        assert!(kept.into_inner().message().await.unwrap().is_none());
        drop(client);
        running.end().await;
    });
    assert!(!socket.exists());
}

fn shown(telemetry: &Telemetry) -> Shown<'_> {
    let metrics = (std::net::Ipv4Addr::LOCALHOST, 0).into();
    Shown {
        telemetry: Some(telemetry),
        metrics,
        host: "h0",
        protection: &Protection::InsecureLoopback,
        succeeds: false,
    }
}

async fn watched(client: &mut TelemetryClient<Channel>, fake: &Fake) {
    let request = v1::WatchRequest { interval_ns: 1, flows: 1 };
    let mut snapshots = client.watch(request).await.unwrap().into_inner();
    let first = snapshots.message().await.unwrap().unwrap();
    assert_eq!((first.host.as_str(), first.flow_count, first.flows.len()), ("h0", 2, 1));
    let link = &first.links[0];
    assert_eq!((link.interface.as_str(), link.index, link.capacity_bps), ("made0", 7, 8_000_000_000));
    assert_eq!(link.counters.unwrap().egress_bytes, 300);
    assert_eq!((link.egress_bps, first.interval_ns), (0, 0));
    pass(fake, key(7, 2), 1_000);
    fake.scene().totals.entry(7).or_default().egress.bytes += 1_000;
    // At most ten a second, however many are asked for.
    let second = snapshots.message().await.unwrap().unwrap();
    assert!(second.interval_ns >= 50_000_000, "{}", second.interval_ns);
    let fastest = &second.flows[0];
    let egress = fastest.egress.as_ref().unwrap();
    assert_eq!((fastest.local_port, egress.bytes, egress.packets), (2, 1_200, 2));
    let rate = 8_000_000_000_000_u128 / u128::from(second.interval_ns);
    assert_eq!(u128::from(egress.rate_bps), rate);
    assert_eq!(u128::from(second.links[0].egress_bps), rate);
    assert!(second.time_ns > 1_700_000_000_000_000_000, "CLOCK_REALTIME: {}", second.time_ns);
}

async fn flows(client: &mut TelemetryClient<Channel>) {
    for (interface, count) in [("", 2), ("made0", 2), ("other", 0)] {
        let request = v1::FlowsRequest { interface: interface.into() };
        let mut parts = client.flows(request).await.unwrap().into_inner();
        let mut flows = Vec::new();
        while let Some(part) = parts.message().await.unwrap() {
            flows.extend(part.flows);
        }
        assert_eq!(flows.len(), count, "{interface}");
        for flow in flows {
            // The kernel knows of one of them.
            let known = flow.local_port == 2;
            let tcp = flow.kernel.map(|kernel| (kernel.srtt_ns, kernel.cwnd, kernel.delivery_bps));
            assert_eq!(tcp, known.then_some((5_000, 10, 8_000)));
            let end = flow.end.map(|end| (end.pid, end.uid, end.cgroup_id));
            assert_eq!(end, known.then_some((0, 77, 88)));
        }
    }
}

async fn traced(client: &mut TelemetryClient<Channel>) {
    let mut parts = client.trace(v1::TraceRequest { duration_ns: 300_000_000 }).await.unwrap().into_inner();
    let mut bytes = Vec::new();
    while let Some(part) = parts.message().await.unwrap() {
        assert!(part.realtime_offset_ns > 0);
        bytes.extend(part.bytes);
    }
    let mut records = Vec::new();
    replay(&bytes, |record| records.push(*record)).unwrap();
    assert!(
        matches!(records[..], [Record::Observer(_), Record::Link(link), ..] if link.interface == 7),
        "{records:?}"
    );
}

async fn scraped(address: SocketAddr) {
    let answer = ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    for line in [
        "harmonaize_interface_packets_total{interface=\"made0\",direction=\"egress\"} 3",
        "harmonaize_link_congestion_level{interface=\"made0\",direction=\"ingress\",cause=\"own\"} 0",
        "harmonaize_telemetry_lost_total{what=\"marks\"} 0",
        "harmonaize_communicators 0",
    ] {
        assert!(answer.lines().any(|one| one == line), "{line} in {answer}");
    }
    assert!(answer.ends_with("# EOF\n"), "{answer}");
    let long = [b"GET /metrics HTTP/1.1\r\nX: ".to_vec(), vec![b'x'; 9 << 10]].concat();
    for (request, status) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"\xff\xfe\r\n\r\n", "400"),
        (&long, "431"),
    ] {
        let answer = ask(address, request).await;
        assert!(
            answer.is_empty() || answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{status}: {answer}"
        );
    }
    // Who opens connections and says nothing holds nobody up but those that wait for a place.
    let mut silent = Vec::new();
    for _ in 0..4 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    assert!(ask(address, b"GET /metrics?x=1 HTTP/1.0\r\n\r\n").await.contains("# EOF"));
}

#[test]
fn only_a_stale_socket_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let (stale, file, taken) =
        (folder.path().join("stale"), folder.path().join("file"), folder.path().join("taken"));
    drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
    std::fs::write(&file, "kept").unwrap();
    let _other = std::os::unix::net::UnixListener::bind(&taken).unwrap();
    let fake = Fake::default();
    fake.scene().interfaces.insert("made0".into(), 7);
    for (path, served) in [(&stale, true), (&file, false), (&taken, false)] {
        let (handle, thread) = begin(&fake, None);
        block(async {
            let mut running = Running::new(handle, thread, true);
            let (control, _said) = mpsc::channel(8);
            let asked = Telemetry { socket: Some(path.clone()), ..Telemetry::default() };
            running.serve(shown(&asked), &control, &Counters::default()).await;
            if served {
                let mut client = connect(path).await;
                let first = client.watch(v1::WatchRequest::default()).await.unwrap();
                assert!(first.into_inner().message().await.unwrap().is_some());
            }
            running.end().await;
        });
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept");
    assert!(taken.exists());
    wait("the socket is gone with its agent", || !stale.exists());
}

#[test]
fn a_successor_shows_what_the_agent_before_has_shown() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let before = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let scrapes = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let metrics = scrapes.local_addr().unwrap();
    let fake = Fake::default();
    fake.scene().interfaces.insert("made0".into(), 7);
    let (handle, thread) = begin(&fake, None);
    block(async {
        let mut running = Running::new(handle, thread, true);
        let (control, _said) = mpsc::channel(8);
        let asked = Telemetry { socket: Some(socket.clone()), ..Telemetry::default() };
        let shown = Shown { metrics, succeeds: true, ..shown(&asked) };
        running.serve(shown, &control, &Counters::default()).await;
        // The agent before still listens.
        let mut client = connect(&socket).await;
        assert!(client.watch(v1::WatchRequest::default()).await.is_ok());
        drop((before, scrapes));
        let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
        while TcpStream::connect(metrics).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        assert!(ask(metrics, request).await.ends_with("# EOF\n"));
        drop(client);
        running.end().await;
    });
    assert!(!socket.exists());
}
