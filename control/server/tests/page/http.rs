//! Who gets the page, and what is in it, without a browser.

use super::{FABRIC, HOSTILE, config, start};
use harmonaize_api::v1;
use harmonaize_api::v1::operator_client::OperatorClient;
use harmonaize_identity::{Authority, CONTROL, Folder, Protection, Remote, Use};
use harmonaize_planner::Topology;
use harmonaize_server::{Config, Server};
use harmonaize_testkit::agents::LIMIT;
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codegen::http::{Request, StatusCode};

/// The answer to a request of HTTP/1.1: head and body.
async fn ask(address: SocketAddr, line: &str, host: &str) -> (String, String) {
    let asked = async {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.to_ascii_lowercase(), body.to_owned())
    };
    timeout(LIMIT, asked).await.unwrap()
}

/// Events as a browser reads them.
struct Events(BufReader<TcpStream>);

impl Events {
    async fn open(address: SocketAddr) -> Self {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        Self(BufReader::new(stream))
    }

    /// The next event's name, and what it says.
    async fn next(&mut self) -> (String, Value) {
        let mut name = String::new();
        let read = async {
            loop {
                let mut line = String::new();
                assert!(self.0.read_line(&mut line).await.unwrap() > 0, "the stream has ended");
                if let Some(event) = line.strip_prefix("event: ") {
                    name = event.trim().to_owned();
                } else if let Some(data) = line.strip_prefix("data: ") {
                    return (name, serde_json::from_str(data).unwrap());
                }
            }
        };
        timeout(LIMIT, read).await.unwrap()
    }
}

#[tokio::test]
async fn without_certificates_this_machine_alone_reads() {
    let (_, page) = start(config(FABRIC)).await;
    for host in ["127.0.0.1", "localhost", "[::1]", &page.to_string()] {
        let (head, body) = ask(page, "GET /", host).await;
        assert!(head.starts_with("http/1.1 200") && body.contains("page.js"), "{host}: {head}");
        assert!(head.contains("content-security-policy: default-src 'none'; script-src 'self';"), "{head}");
        assert!(head.contains("nosniff") && !head.contains("access-control"), "{head}");
    }
    // A name of somebody else's that leads here is how a page of his would read ours.
    for host in ["evil.example", "10.0.0.1", "localhost.evil.example", "", "a@b@c"] {
        let (head, _) = ask(page, "GET /snapshot", host).await;
        assert!(head.starts_with("http/1.1 403") || head.starts_with("http/1.1 400"), "{host}: {head}");
    }
    for (line, code) in [("POST /snapshot", "405"), ("DELETE /events", "405"), ("GET /nothing", "404")] {
        let (head, _) = ask(page, line, "localhost").await;
        assert!(head.starts_with(&format!("http/1.1 {code}")) && head.contains("nosniff"), "{line}: {head}");
    }
}

#[tokio::test]
async fn nothing_in_the_files_runs_or_comes_from_elsewhere() {
    let (_, page) = start(config(FABRIC)).await;
    let mut bytes = 0;
    for file in ["/", "/page.js", "/page.css", "/icon.svg"] {
        let (head, body) = ask(page, &format!("GET {file}"), "localhost").await;
        assert!(head.starts_with("http/1.1 200"), "{head}");
        let outside = body.replace("http://www.w3.org/2000/svg", "").contains("://");
        assert!(!outside, "{file} names another place");
        for written in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "style=",
            " onclick=\"",
        ] {
            assert!(!body.contains(written), "{file} has {written}");
        }
        bytes += body.len();
    }
    assert!(bytes < 64 << 10, "{bytes} bytes of files");
}

#[tokio::test]
async fn certificates_with_a_role_alone_get_it() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::create().unwrap();
    let control = Folder(folder.path().join("control"));
    authority.issue(CONTROL, Use::Control).unwrap().write(&control).unwrap();
    std::fs::write(folder.path().join("topology.toml"), FABRIC.topology()).unwrap();
    let text = "listen = \"127.0.0.1:0\"\npage = \"127.0.0.1:0\"\nmetrics = \"127.0.0.1:0\"\ntls = \"control\"\ntopology = \"topology.toml\"\n\
        operator = [{ name = \"vera\", role = \"viewer\" }, { name = \"ada\", role = \"admin\" }]\n";
    let path = folder.path().join("control.toml");
    std::fs::write(&path, text).unwrap();
    let server = Server::bind(Config::load(&path).unwrap()).await.unwrap();
    let page = server.page_address().unwrap();
    tokio::spawn(server.run(std::future::pending()));
    let issue = |authority: &Authority, name: &str, of: &str| {
        let own = Folder(folder.path().join(format!("{of}-{name}")));
        authority.issue(name, Use::Session).unwrap().write(&own).unwrap();
        std::fs::copy(control.0.join("ca.crt"), own.0.join("ca.crt")).unwrap();
        Protection::Mutual(own)
    };
    let cases = [("vera", 200), ("ada", 200), ("mallory", 403), ("h0", 403)];
    for (name, code) in cases {
        for path in ["/", "/page.js", "/snapshot"] {
            let own = issue(&authority, name, "ours");
            let mut channel = Remote::at(&own, CONTROL, &page.to_string()).unwrap().connect().await.unwrap();
            let uri = format!("https://control{path}");
            let request = Request::get(uri).body(Body::empty()).unwrap();
            let answer = timeout(LIMIT, async {
                std::future::poll_fn(|cx| GrpcService::<Body>::poll_ready(&mut channel, cx)).await.unwrap();
                GrpcService::<Body>::call(&mut channel, request).await.unwrap()
            });
            let answer = answer.await.unwrap();
            assert_eq!(answer.status(), StatusCode::from_u16(code).unwrap(), "{name} {path}");
            assert!(answer.headers().contains_key("content-security-policy"), "{name} {path}");
        }
    }
    // Nobody is somebody by another's authority, without a certificate, or in the clear.
    let stranger = issue(&Authority::create().unwrap(), "vera", "theirs");
    let mut channel = Remote::at(&stranger, CONTROL, &page.to_string()).unwrap().connect().await.ok();
    if let Some(channel) = &mut channel {
        let request = Request::get("https://control/").body(Body::empty()).unwrap();
        let ready = std::future::poll_fn(|cx| GrpcService::<Body>::poll_ready(channel, cx)).await;
        assert!(ready.is_err() || GrpcService::<Body>::call(channel, request).await.is_err());
    }
    let mut plain = TcpStream::connect(page).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let mut said = Vec::new();
    let _ = timeout(LIMIT, plain.read_to_end(&mut said)).await.unwrap();
    assert!(!String::from_utf8_lossy(&said).contains("HTTP/"), "{said:?}");
}

#[tokio::test]
async fn names_are_escaped_and_replies_are_those_of_tools() {
    let (control, page) = start(config(FABRIC)).await;
    let mut played = FABRIC.connect(control).await.unwrap();
    let id = played.form(HOSTILE, "<script>alert(1)</script>", &[0, 1, 4, 5], LIMIT).await.unwrap();
    let (head, body) = ask(page, "GET /snapshot", "localhost").await;
    assert!(head.contains("content-type: application/json"), "{head}");
    assert!(!body.contains(['<', '>', '&']), "{body}");
    let all: Value = serde_json::from_str(&body).unwrap();
    let key = harmonaize_api::communicator_text(id);
    let own = &all["sections"]["communicators"][&key];
    assert_eq!(
        (own["tenant"].as_str(), own["name"].as_str()),
        (Some(HOSTILE), Some("<script>alert(1)</script>"))
    );
    let mut client = OperatorClient::connect(format!("http://{control}")).await.unwrap();
    let plans = client.plans(v1::PlansRequest { communicator: id }).await.unwrap().into_inner();
    let plan = &all["sections"]["plans"][&key];
    assert_eq!(plan["order"], serde_json::to_value(&plans.plans[0].order).unwrap());
    assert_eq!(all["sections"]["hosts"].as_object().unwrap().len(), FABRIC.len());
    // Both directions of each.
    let topology = Topology::parse(&FABRIC.topology()).unwrap();
    assert_eq!(all["sections"]["links"].as_object().unwrap().len(), topology.links().len() * 2);
    assert_eq!(all["sections"]["tenants"][HOSTILE]["communicators"], 1);
}

#[tokio::test]
async fn browsers_get_everything_once_and_then_changes() {
    let (control, page) = start(config(FABRIC)).await;
    let mut events = Events::open(page).await;
    let (name, all) = events.next().await;
    assert_eq!(name, "all");
    assert!(all["sections"]["hosts"]["h3"]["connected"].is_null());
    let mut played = FABRIC.connect(control).await.unwrap();
    let id = played.form("a", "world", &[2, 6], LIMIT).await.unwrap();
    let (mut known, mut number, mut changes) = (all.clone(), all["number"].as_u64().unwrap(), 0);
    let key = harmonaize_api::communicator_text(id);
    while known["sections"]["plans"][&key].is_null() {
        let (name, change) = events.next().await;
        // Who reads too slowly gets everything again.
        assert!(name == "all" || change["number"] == number + 1, "{name} {change}");
        assert!(change["number"].as_u64().unwrap() > number, "{name} twice: {change}");
        number = change["number"].as_u64().unwrap();
        changes += usize::from(name == "change");
        let idle = &change["sections"]["links"]["h7:leaf1"];
        assert!(name == "all" || idle.is_null(), "nothing of this link has changed: {idle}");
        for (section, entries) in change["sections"].as_object().unwrap() {
            for (key, entry) in entries.as_object().unwrap() {
                known["sections"][section][key] = entry.clone();
            }
        }
    }
    assert!(changes > 0, "everything, over and over");
    drop(played);
    loop {
        let (_, change) = events.next().await;
        if change["sections"]["hosts"]["h2"]["connected"].is_null()
            && !change["sections"]["hosts"]["h2"].is_null()
        {
            break;
        }
    }
}

#[tokio::test]
async fn a_stream_ends_where_too_many_look_on() {
    let (_, page) = start(config(FABRIC)).await;
    let mut all = Vec::new();
    for _ in 0..64 {
        let mut events = Events::open(page).await;
        events.next().await;
        all.push(events);
    }
    let (head, _) = ask(page, "GET /snapshot", "localhost").await;
    assert!(head.starts_with("http/1.1 429"), "{head}");
    all.clear();
    let freed = async {
        while !ask(page, "GET /snapshot", "localhost").await.0.starts_with("http/1.1 200") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LIMIT, freed).await.unwrap();
}
