//! Analyses recorded traces, one a host, as the agents do it. It prints what is found as lines of JSON, or cuts a trace.

#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::Parser;
use harmonaize_analysis::trace::{Record, Writer, merge};
use harmonaize_tests::replay::{Replay, records};
use std::io::Write;
use std::path::PathBuf;

/// Prints what is found in recorded traces.
#[derive(Parser)]
#[command(after_help = "Example:
  replay tests/traces/gloo-clean/h*.trace
  replay --from-ns 39000000000 --to-ns 42000000000 --cut short.trace long.trace")]
struct Arguments {
    /// Leaves out what was before, in nanoseconds of CLOCK_MONOTONIC
    #[arg(long, default_value_t = 0)]
    from_ns: u64,
    /// Leaves out what was after
    #[arg(long, default_value_t = u64::MAX)]
    to_ns: u64,
    /// Writes what is between these times to this file instead, as a trace of its own
    #[arg(long, value_name = "FILE")]
    cut: Option<PathBuf>,
    /// The traces, each of one host; of several, what all hosts together show
    #[arg(required = true)]
    traces: Vec<PathBuf>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let read = |path: &PathBuf| -> Result<Vec<Record>> {
        let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let found = records(&bytes, arguments.from_ns, arguments.to_ns);
        found.with_context(|| path.display().to_string())
    };
    let traces: Vec<Vec<Record>> = arguments.traces.iter().map(read).collect::<Result<_>>()?;
    let merged = match traces.as_slice() {
        [alone] => alone.clone(),
        several => merge(&several.iter().map(Vec::as_slice).collect::<Vec<_>>()),
    };
    if let Some(path) = &arguments.cut {
        let mut writer = Writer::new();
        merged.iter().for_each(|record| writer.write(record));
        return std::fs::write(path, writer.into_bytes())
            .with_context(|| format!("cannot write {}", path.display()));
    }
    let mut out = std::io::stdout().lock();
    for found in Replay::of(traces.len()).run(&merged) {
        writeln!(out, "{}", serde_json::to_string(&found)?)?;
    }
    Ok(out.flush()?)
}
