//! The planner alone: how fast it plans anew where there is much. How far it is from the optimum, its own tests say.

use super::{Suite, case};
use crate::row::{Better, Row};
use anyhow::{Context, Result};
use harmonaize_testkit::job::printed;
use harmonaize_testkit::workspace;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::process::Command;

/// The most that one event may take to be planned for, in seconds.
const SECONDS: f64 = 1.0;
/// What `cargo run -p harmonaize-planner --example scale` prints with `--json`.
#[derive(Debug, Deserialize)]
struct Scale {
    hosts: u64,
    communicators: u64,
    /// For one event.
    replan_ms: f64,
}

/// Events, each in a process of its own.
const EVENTS: usize = 3;

pub(super) fn planner(_: &Suite) -> Result<Vec<Row>> {
    let mut example = workspace::cargo();
    example.args(["run", "--quiet", "--release", "--package", "harmonaize-planner", "--example", "scale"]);
    example.args(["--", "--json"]);
    let found = (0..EVENTS).map(|_| figures(&mut example)).collect::<Result<Vec<Scale>>>()?;
    let first = found.first().context("no event")?;
    let what =
        format!("{} hosts, {} communicators: s to plan for one event", first.hosts, first.communicators);
    let seconds: Vec<f64> = found.iter().map(|event| event.replan_ms / 1000.0).collect();
    Ok(vec![case(what, Better::Less, 1.0).limit(&seconds, SECONDS)])
}

/// What an example prints as a line of JSON.
pub(super) fn figures<T: DeserializeOwned>(example: &mut Command) -> Result<T> {
    let text = printed(example)?;
    let line =
        text.lines().find(|line| line.starts_with('{')).with_context(|| format!("no figures in: {text}"))?;
    Ok(serde_json::from_str(line)?)
}
