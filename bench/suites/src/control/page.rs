//! Control's page before made-up agents, in headless Chromium. It measures how soon the page is there, how soon it shows what
//! happens, and its memory.

use super::scale::figures;
use super::{Suite, case};
use crate::row::{Better, Row};
use anyhow::{Context, Result};
use harmonaize_testkit::workspace;
use serde::Deserialize;

/// Racks, hosts of each, spines, communicators, and minutes.
const FABRIC: [&str; 5] = ["63", "16", "16", "500", "10"];
/// The most until the first paint, and from an event until it is shown.
const MS: f64 = 1000.0;
/// The most that the heap may grow by from the first third of the time to the last.
const GROWTH: f64 = 1.1;

/// What `cargo run -p harmonaize-server --example page` prints at its end.
#[derive(Debug, Deserialize)]
struct Page {
    first_paint_ms: f64,
    events_ms: Vec<f64>,
    /// After a collection each, at even intervals.
    heaps_mb: Vec<f64>,
}

pub(super) fn page(suite: &Suite) -> Result<Vec<Row>> {
    let pictures = tempfile::tempdir()?;
    let mut example = workspace::cargo();
    example.args([
        "run",
        "--quiet",
        "--release",
        "--package",
        "harmonaize-server",
        "--example",
        "page",
        "--",
    ]);
    example.args(FABRIC).arg(suite.request.figures.as_deref().unwrap_or(pictures.path()));
    let Page { first_paint_ms, events_ms, heaps_mb } = figures(&mut example)?;
    let last_event = events_ms.iter().copied().reduce(f64::max).context("no event was shown")?;
    let third = heaps_mb.len().div_ceil(3);
    let least = |heaps: &mut dyn Iterator<Item = &f64>| heaps.copied().reduce(f64::min).context("no heap");
    let early = least(&mut heaps_mb.iter().take(third))?;
    let late = least(&mut heaps_mb.iter().rev().take(third))?;
    let of = |what: &str| case(format!("page, 1,008 hosts, 500 communicators: {what}"), Better::Less, 1.0);
    Ok(vec![
        of("ms to the first paint").limit(&[first_paint_ms], MS),
        of("ms until the last of 20 events is shown").limit(&[last_event], MS),
        of("MB of the tab's heap over ten minutes, late against early").limit(&[late], early * GROWTH),
    ])
}
