//! `harmonaize-agent observe` as people run it: cross traffic, an interface that goes and comes back, Ctrl-C, replay.

use crate::own::namespaces;
use crate::whole::LIMIT;
use harmonaize_analysis::trace::{self, Record};
use harmonaize_testkit::found::{compare, period_error};
use harmonaize_testkit::namespace::Namespace;
use harmonaize_testkit::truth::{Injection, Span, Truth};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

const PROGRAM: &str = env!("CARGO_BIN_EXE_harmonaize-agent");

/// A running `observe --json`; ended if the test fails.
struct Observing {
    child: Child,
    lines: Receiver<Value>,
}

impl Drop for Observing {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Observing {
    fn begin(namespace: &Namespace, arguments: &[&str]) -> Self {
        let mut command = Command::new(PROGRAM);
        command.arg("observe").args(arguments).args(["--json", "--interval", "50ms"]).stdout(Stdio::piped());
        let mut child = namespace.spawn(&mut command).unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send(serde_json::from_str(&line).unwrap());
            }
        });
        Self { child, lines }
    }

    /// The first line for which something holds.
    fn line(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|error| panic!("{what}: {error}"));
            if holds(&line) {
                return line;
            }
        }
    }

    fn interrupt(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                assert!(status.success(), "{status}");
                return;
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }
}

fn wire(near: &Namespace, far: &Namespace) {
    near.ip(&[format!("link add wire type veth peer name wire netns {}", far.name())]).unwrap();
    for (side, address) in [(near, "10.9.0.1"), (far, "10.9.0.2")] {
        side.ip(&[format!("addr add {address}/24 dev wire"), "link set wire up".to_owned()]).unwrap();
    }
}

/// Sends so many bytes over a connection of their own.
fn send(near: &Namespace, far: &Namespace, bytes: usize) {
    let listener = far.enter(|| TcpListener::bind("10.9.0.2:0")).unwrap().unwrap();
    let target = listener.local_addr().unwrap();
    let mut sender = near.enter(|| TcpStream::connect_timeout(&target, LIMIT)).unwrap().unwrap();
    let (mut receiver, _) = listener.accept().unwrap();
    receiver.set_read_timeout(Some(LIMIT)).unwrap();
    let receiving = std::thread::spawn(move || {
        let mut taken = Vec::new();
        receiver.read_to_end(&mut taken).unwrap();
        taken.len()
    });
    sender.write_all(&vec![7; bytes]).unwrap();
    drop(sender);
    assert_eq!(receiving.join().unwrap(), bytes);
}

fn egress(line: &Value) -> u64 {
    line["links"][0]["egress"]["bytes"].as_u64().unwrap_or(0)
}

#[test]
fn cross_traffic_is_observed_while_an_interface_goes_and_comes_back() {
    let Some(([near, far], _fabric)) = namespaces(["near", "far"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    wire(&near, &far);
    let record = trace.to_str().unwrap();
    let observing = Observing::begin(&near, &["--interface", "wire", "--record", record]);
    observing.line("it has begun", |line| line["links"][0]["interface"] == "wire");
    send(&near, &far, 3_000_000);
    // Flows are read a moment before or after totals.
    let shows = |line: &Value| egress(line) > 3_000_000 && line["flows"].as_u64() >= Some(1);
    let line = observing.line("the transfer shows", shows);
    assert_eq!(line["kind"], "standing", "{line}");
    assert!(line["time_ns"].as_u64() > Some(1_700_000_000_000_000_000), "{line}");
    near.ip(&["link del wire".to_owned()]).unwrap();
    let line = observing.line("it is missed", |line| line["links"].as_array().is_some_and(Vec::is_empty));
    assert!(line["missing"][0].as_str().unwrap().contains("wire"), "{line}");
    wire(&near, &far);
    let line = observing.line("it is back", |line| line["links"][0]["interface"] == "wire");
    assert_eq!(
        (line["lost"]["gaps"].as_u64(), line["lost"]["events"].as_u64()),
        (Some(1), Some(0)),
        "{line}"
    );
    send(&near, &far, 2_000_000);
    observing.line("the second transfer shows", |line| egress(line) > 2_000_000);
    observing.interrupt();
    // Nothing is left on the interface: the same can begin again.
    let again = Observing::begin(&near, &["--duration", "200ms"]);
    again.line("all that are up are observed", |line| line["links"][0]["interface"] == "wire");
    drop(again);
    let early = Observing::begin(&near, &["--xdp", "--run-time"]);
    early.line("it has begun", |line| line["links"][0]["interface"] == "wire");
    let shown = near.enter(|| Command::new("ip").args(["-o", "link", "show", "wire"]).output());
    assert!(String::from_utf8(shown.unwrap().unwrap().stdout).unwrap().contains("xdp"));
    send(&near, &far, 1_000_000);
    let answered = |line: &Value| line["links"][0]["ingress"]["tcp_packets"].as_u64() > Some(2);
    let line = early.line("answers are counted before the stack", answered);
    let ran = |program: &Value| program["program"] == "count_xdp" && program["runs"].as_u64() > Some(2);
    assert!(line["cost"].as_array().is_some_and(|programs| programs.iter().any(ran)), "{line}");
    early.interrupt();

    let replayed = Command::new(PROGRAM).args(["observe", "--json", "--replay", record]).output().unwrap();
    assert!(replayed.status.success(), "{replayed:?}");
    let said = String::from_utf8(replayed.stderr).unwrap();
    assert!(said.contains("replayed") && !said.contains("ends within"), "{said}");
    // What passed is no training: the only thing that may be found of it is how congested the link is.
    for finding in lines(&replayed.stdout) {
        assert_eq!(finding["kind"], "congestion", "{finding}");
    }
}

fn lines(printed: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(printed).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns what is found in the recorded traces of a run's hosts together. The truth about it comes with it, and what
/// its times are ahead, in nanoseconds.
fn replayed(run: &str) -> (Vec<Value>, Truth, u64) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces").join(run);
    let truth = Truth::read(&folder.join("truth.json")).unwrap();
    let mut command = Command::new(PROGRAM);
    command.args(["observe", "--json"]);
    for host in 0..truth.places.len() {
        command.arg("--replay").arg(folder.join(format!("h{host}.trace")));
    }
    let printed = command.output().unwrap();
    assert!(printed.status.success(), "{printed:?}");
    let mut offset_ns = None;
    let first = std::fs::read(folder.join("h0.trace")).unwrap();
    trace::replay(&first, |record| {
        if let Record::Observer(observer) = record {
            offset_ns.get_or_insert(observer.realtime_offset_ns);
        }
    })
    .unwrap();
    (lines(&printed.stdout), truth, offset_ns.unwrap().try_into().unwrap())
}

/// The program as it ships finds an external training's iterations in the traces of its hosts.
#[test]
fn phases_of_a_recorded_training_are_those_of_its_log() {
    let (found, truth, offset_ns) = replayed("gloo-long");
    let phases: Vec<&Value> = found.iter().filter(|line| line["kind"] == "phase").collect();
    assert!(phases.len() >= 100, "{} phases", phases.len());
    let at = |line: &Value, field: &str| line[field].as_u64().unwrap() - offset_ns;
    let spans: Vec<Span> = phases
        .iter()
        .map(|line| Span { began_ns: at(line, "start_ns"), ended_ns: at(line, "end_ns") })
        .collect();
    let agreement = compare(&truth, &spans, 10);
    assert_eq!((agreement.logged, agreement.matched, agreement.extra), (100, 100, 0), "{agreement:?}");
    let period = period_error(&truth, &spans, 10).unwrap();
    assert!(period.abs() < 0.3, "the period is {period}% off");
    assert!(!found.iter().any(|line| line["kind"] == "straggler"), "{found:?}");
}

#[test]
fn the_slow_worker_of_a_recorded_training_is_named() {
    let (found, truth, _) = replayed("gloo-slow-worker");
    let [Injection::Compute { rank, by_ns, .. }] = truth.injections[..] else { panic!("{truth:?}") };
    let late: Vec<&Value> = found.iter().filter(|line| line["kind"] == "straggler").collect();
    let [late] = late[..] else { panic!("{late:?}") };
    assert_eq!((&late["cause"], &late["ended_ns"]), (&"compute".into(), &0.into()), "{late}");
    assert_eq!(late["host"], truth.places[rank].address.to_string());
    assert!(late["delay_ns"].as_u64().unwrap().abs_diff(by_ns) * 10 <= by_ns * 3, "{late}");
}

#[test]
fn what_cannot_be_observed_is_said() {
    let run = |arguments: &[&str]| {
        let output = Command::new(PROGRAM).args(arguments).env("RUST_BACKTRACE", "0").output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace");
    std::fs::write(&file, "no trace at all, but some words").unwrap();
    let (done, said) = run(&["observe", "--replay", file.to_str().unwrap()]);
    assert!(!done && said.contains("not a trace"), "{said}");
    let (done, said) = run(&["observe", "--interface", "a/b"]);
    assert!(!done && said.contains("a/b"), "{said}");
    let (done, said) = run(&[]);
    assert!(!done && said.contains("--config"), "{said}");
    let (done, said) = run(&["--config", "x", "observe"]);
    assert!(!done && said.contains("cannot be used"), "{said}");
    if harmonaize_testkit::strict::can_make_namespaces() {
        let (done, said) = run(&["observe", "--interface", "no-such-one"]);
        assert!(!done && said.contains("no interface named no-such-one"), "{said}");
    }
}
