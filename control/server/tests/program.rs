//! `harmonaize-control` as a process: its configuration's errors, its start and its end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use harmonaize_api::v1;
use harmonaize_api::v1::provider_client::ProviderClient;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(30);

fn control(folder: &Path, config: &str) -> Command {
    std::fs::write(folder.join("topology.toml"), "[[host]]\nname = \"h0\"\n").unwrap();
    std::fs::write(folder.join("control.toml"), config).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_harmonaize-control"));
    command.arg("--config").arg(folder.join("control.toml")).env_remove("RUST_LOG");
    command.stderr(Stdio::piped()).stdout(Stdio::piped());
    command
}

const GOOD: &str = "listen = \"127.0.0.1:0\"\ntopology = \"topology.toml\"\n\
    insecure_loopback = true\npage = \"127.0.0.1:0\"\nmetrics = \"127.0.0.1:0\"\n";

#[test]
fn errors_name_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let output = control(folder.path(), &format!("{GOOD}lisen = 1\n")).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    let expected = format!(
        "harmonaize-control: {}/control.toml: line 6, column 1: unknown field `lisen`",
        folder.path().display()
    );
    assert!(text.starts_with(&expected), "{text}");
}

#[test]
fn checks_and_stops() {
    let folder = tempfile::tempdir().unwrap();
    let output = control(folder.path(), GOOD).arg("--check").output().unwrap();
    assert_eq!(
        (output.status.code(), output.stdout.as_slice()),
        (Some(0), b"ok: 1 hosts, 0 links, 0 tenants\n".as_slice())
    );
}

#[test]
fn says_that_the_address_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = control(folder.path(), &GOOD.replace("127.0.0.1:0", &address)).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains(&format!("cannot listen on {address}: Address already in use")), "{text}");
}

#[test]
fn a_log_into_a_pipe_has_no_colours() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = control(folder.path(), GOOD).env_remove("NO_COLOR").spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let first = log.next().unwrap().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(first.contains("control serves") && !first.contains('\u{1b}'), "{first}");
}

#[test]
fn a_log_that_nobody_reads_ends_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = control(folder.path(), GOOD).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    log.read_line(&mut String::new()).unwrap();
    drop(log);
    // It logs its end.
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn ends_on_signal() {
    for signal in ["-TERM", "-INT"] {
        let folder = tempfile::tempdir().unwrap();
        let mut child = control(folder.path(), GOOD).arg("--log-json").spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let first = log.next().unwrap().unwrap();
        assert!(first.starts_with('{') && first.contains("control serves"), "{first}");
        assert!(Command::new("kill").arg(signal).arg(child.id().to_string()).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(0), "{signal}");
        let rest: Vec<String> = log.map(Result::unwrap).collect();
        assert!(rest.iter().any(|line| line.contains("control goes down")), "{rest:?}");
    }
}

#[tokio::test]
async fn connections_without_end_leave_control_descriptors() {
    harmonaize_identity::raise_open_files();
    let folder = tempfile::tempdir().unwrap();
    let free = |_| TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let [listen, page, metrics] = [(); 3].map(free);
    let text = format!(
        "listen = \"{listen}\"\ntopology = \"topology.toml\"\ninsecure_loopback = true\npage = \"{page}\"\nmetrics = \"{metrics}\"\n"
    );
    let direct = control(folder.path(), &text);
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -S -n 32 && ulimit -H -n 256 && exec \"$0\" \"$@\""]);
    command.arg(direct.get_program()).args(direct.get_args()).env_remove("RUST_LOG");
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(log.any(|line| line.contains("control serves")), "control has ended");
    std::thread::spawn(move || log.for_each(drop));

    let connected = |at| (0..400).filter_map(move |_| TcpStream::connect(at).ok());
    let strangers: Vec<TcpStream> = [listen, page, metrics].into_iter().flat_map(connected).collect();
    assert!(strangers.len() > 600, "{} strangers", strangers.len());
    let begun = Instant::now();
    loop {
        let connected = ProviderClient::connect(format!("http://{listen}")).await;
        if let Ok(mut operator) = connected
            && operator.status(v1::StatusRequest { patience_ns: 1 }).await.is_ok()
        {
            break;
        }
        assert!(begun.elapsed() < LIMIT, "strangers keep operators out");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    assert_eq!(
        files.split_whitespace().take(2).collect::<Vec<_>>(),
        ["256", "256"],
        "raised, and no further"
    );
    child.kill().unwrap();
    child.wait().unwrap();
}
