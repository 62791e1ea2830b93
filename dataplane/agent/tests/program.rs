//! `harmonaize-agent` as a process: how its log looks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests alone

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// An aggregator, which starts without privileges and without control.
const AGGREGATOR: &str = "name = \"agg0\"\ncontrol = \"127.0.0.1:1\"\ninsecure_loopback = true\nlisten = \"127.0.0.1:0\"\n\
    pool = \"1MiB\"\npackets_per_second = 1000\nmetrics = \"127.0.0.1:0\"\n";

/// What the aggregator logs into a pipe until it is up.
fn logged(more: &[&str]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("aggregator.toml");
    std::fs::write(&config, AGGREGATOR).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_harmonaize-agent"));
    command.args(["--role", "aggregator", "--config"]).arg(&config).args(more);
    command.env_remove("NO_COLOR").env_remove("RUST_LOG").stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = Vec::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok) {
        let up = line.contains("aggregator is up");
        lines.push(line);
        if up {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(lines.last().is_some_and(|line| line.contains("aggregator is up")), "{lines:?}");
    lines
}

#[test]
fn a_log_into_a_pipe_has_no_colours() {
    let lines = logged(&[]);
    assert!(lines.iter().all(|line| !line.contains('\u{1b}')), "{lines:?}");
}

#[test]
fn a_log_as_json_is_an_object_a_line() {
    for line in logged(&["--log-json"]) {
        let object: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert!(object["timestamp"].is_string() && object["level"].is_string(), "{line}");
    }
}
