//! The planner alone: how fast it plans anew where there is much, and how far it is from the optimum where that can be had.

use super::{Suite, case};
use crate::bench::row::{Better, Row};
use crate::job::printed;
use crate::workspace;
use anyhow::{Context, Result};
use serde::Deserialize;

/// The most that one event may take to be planned for, in seconds.
const SECONDS: f64 = 1.0;
/// How far from the optimum the heuristic may be, in percent.
const OFF: f64 = 5.0;

/// What `cargo run -p harmonaize-planner --example scale` prints with `--json`.
#[derive(Debug, Deserialize)]
struct Scale {
    hosts: u64,
    communicators: u64,
    /// Of each event.
    seconds: Vec<f64>,
    /// Of each case that was small enough to solve, by how many percent the heuristic was worse.
    off_percent: Vec<f64>,
}

pub(super) fn planner(_: &Suite) -> Result<Vec<Row>> {
    let mut example = workspace::cargo();
    example.args(["run", "--quiet", "--release", "--package", "harmonaize-planner", "--example", "scale"]);
    let text = printed(example.args(["--", "--json"]))?;
    let line =
        text.lines().find(|line| line.starts_with('{')).with_context(|| format!("no figures in: {text}"))?;
    rows(&serde_json::from_str(line)?)
}

fn rows(found: &Scale) -> Result<Vec<Row>> {
    let (hosts, communicators) = (found.hosts, found.communicators);
    let speed = format!("{hosts} hosts, {communicators} communicators: s to plan for one event");
    let quality = format!("{} cases that were solved: % off the optimum, the worst", found.off_percent.len());
    let quality = case(quality, Better::Less, 1.0);
    Ok(vec![
        case(speed, Better::Less, 1.0).limit(&found.seconds, SECONDS),
        match found.off_percent.iter().copied().reduce(f64::max) {
            Some(worst) => quality.limit(&[worst], OFF),
            None => quality.missing("limit", "no case was solved"),
        },
    ])
}
