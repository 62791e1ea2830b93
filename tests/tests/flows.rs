//! Flows of all hosts through control, end to end: eight agents on an emulated fabric, and a reader that follows.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_testkit::deployment::Deployment;
use harmonaize_tests::job::deploy;
use harmonaize_tests::racks;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const RATE: &str = "100Mbit/s";
/// How long anything may take: a bound for machines that are busy with other things, and no figure.
const PATIENCE: Duration = Duration::from_secs(60);
const HOSTS: usize = 8;

/// `harmonaize flows --follow` beside control.
struct Reader {
    child: Child,
    rows: Receiver<(Instant, Value)>,
    /// How often each connection was printed, by host and its remote end, and when it was first.
    seen: BTreeMap<(String, String, u64), (usize, Instant)>,
}

impl Reader {
    fn start(deployment: &Deployment) -> Self {
        let mut command = Command::new(deployment.binaries().path("harmonaize").unwrap());
        command.env("HARMONAIZE_CONTROL", deployment.operators_address().to_string());
        command.arg("--tls").arg(deployment.operator());
        command.args(["flows", "--follow", "-o", "json", "--cause", "cross_traffic"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = deployment.fabric().control().enter(|| command.spawn()).unwrap().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sink, rows) = channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let row = serde_json::from_str(&line).unwrap();
                if sink.send((Instant::now(), row)).is_err() {
                    return;
                }
            }
        });
        Self { child, rows, seen: BTreeMap::new() }
    }

    /// Reads until each of these has been printed.
    fn until(&mut self, wanted: &[(String, String, u64)]) {
        let deadline = Instant::now() + PATIENCE;
        while !wanted.iter().all(|key| self.seen.contains_key(key)) {
            let left = deadline.saturating_duration_since(Instant::now());
            let next = self.rows.recv_timeout(left);
            let (at, row) =
                next.unwrap_or_else(|_| panic!("not in {PATIENCE:?}: {wanted:?}; {:?}", self.seen));
            self.take(at, &row);
        }
    }

    fn take(&mut self, at: Instant, row: &Value) {
        assert_eq!(row["schema"], "harmonaize.rows/1", "{row}");
        assert_ne!(row["kind"], "host", "{row}");
        let text = |of: &str| row[of].as_str().unwrap().to_owned();
        let key = (text("host"), text("remote"), row["remote_port"].as_u64().unwrap());
        self.seen.entry(key).or_insert((0, at)).0 += 1;
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection from each host to the next, over which something went.
struct Connections {
    /// Host, and the remote end that it connected to.
    keys: Vec<(String, String, u64)>,
    began: Instant,
    _open: Vec<(TcpStream, TcpStream)>,
}

fn connect(deployment: &Deployment) -> Connections {
    let hosts = deployment.hosts();
    let (mut keys, mut open) = (Vec::new(), Vec::new());
    let began = Instant::now();
    for (position, host) in hosts.iter().enumerate() {
        let next = &hosts[(position + 1) % hosts.len()];
        let address = *next.addresses.first().unwrap();
        let listener =
            next.namespace.enter(|| TcpListener::bind(SocketAddr::from((address, 0)))).unwrap().unwrap();
        let target = listener.local_addr().unwrap();
        let mut stream = host.namespace.enter(|| TcpStream::connect(target)).unwrap().unwrap();
        stream.write_all(b"bytes").unwrap();
        let (other, _) = listener.accept().unwrap();
        keys.push((host.name.clone(), target.ip().to_string(), target.port().into()));
        open.push((stream, other));
    }
    Connections { keys, began, _open: open }
}

#[test]
fn a_reader_follows_every_flow_of_eight_hosts_once() {
    let Some(mut deployment) = deploy(&racks(2, 4, 1, RATE), |setup| setup.measure(RATE)) else { return };
    deployment.wait_until_ready().unwrap();
    assert_eq!(deployment.hosts().len(), HOSTS);
    let mut reader = Reader::start(&deployment);
    // Once these are printed, all agents answer.
    let first = connect(&deployment);
    reader.until(&first.keys);
    let second = connect(&deployment);
    reader.until(&second.keys);
    let lag = second.keys.iter().map(|key| reader.seen[key].1.duration_since(second.began)).max();
    println!("the last of {HOSTS} flows was printed {:?} after the first connection began", lag.unwrap());
    // Each reading later than those is another chance to print one twice.
    let third = connect(&deployment);
    reader.until(&third.keys);
    let all = [&first, &second, &third].into_iter().flat_map(|connections| &connections.keys);
    for key in all {
        assert_eq!(reader.seen[key].0, 1, "{key:?}");
    }
    // The agent leaves out what is not asked for.
    let (host, peer, port) = &second.keys[0];
    let said = deployment.harmonaize(&["flows", "--host", host, "--peer", peer, "-o", "json"]).unwrap();
    let rows: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(rows.iter().any(|row| row["remote_port"] == *port), "{said}");
    assert!(rows.iter().all(|row| row["host"] == host.as_str() && row["remote"] == peer.as_str()), "{said}");
    // A trace begins with a record of who made it, and agents have seen the flows above.
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("all.pftrace");
    let arguments = ["trace", "--seconds", "1", "--out", out.to_str().unwrap()];
    let text = deployment.harmonaize(&arguments).unwrap();
    let words: Vec<&str> = text.lines().next().unwrap().split(' ').collect();
    let [.., "from", records, "records"] = words[..] else { panic!("{text}") };
    assert!(records.parse::<usize>().unwrap() > HOSTS, "{text}");
    assert!(std::fs::metadata(out).unwrap().len() > 0);
    deployment.check().unwrap();
}
