//! What the hosts of recorded traces sent over time, one line a host. It serves simulations of what such traffic leaves of its
//! link.

#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::Parser;
use harmonaize_analysis::trace::{Record, replay};
use std::collections::HashMap;
use std::path::PathBuf;

/// What the hosts of recorded traces sent over time.
#[derive(Parser)]
#[command(after_help = "Example:
  goodput tests/traces/* > dataplane/codec/tests/traces/recorded.txt")]
struct Arguments {
    /// Folders of recorded traces
    #[arg(required = true)]
    folders: Vec<PathBuf>,
    /// Milliseconds that a figure is the mean of
    #[arg(long, default_value_t = 50)]
    every: u64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let every = arguments.every.max(1);
    println!(
        "# Bytes a second that a host of a recorded trace sent, in {every} ms each: name, then figures."
    );
    for folder in &arguments.folders {
        let name = folder.file_name().context("a folder without a name")?.to_string_lossy();
        for host in 0.. {
            let path = folder.join(format!("h{host}.trace"));
            if !path.exists() {
                break;
            }
            let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let sent = sent(&bytes, every * 1_000_000)?;
            let rates = sent.iter().map(|bytes| (bytes * 1000 / every).to_string());
            println!("{name}/h{host} {}", rates.collect::<Vec<_>>().join(" "));
        }
    }
    Ok(())
}

/// Bytes on the wire of all its TCP connections, by periods of `every` nanoseconds. The last period may be cut short and is
/// left out.
fn sent(bytes: &[u8], every: u64) -> Result<Vec<u64>> {
    let (mut before, mut sent, mut began) = (HashMap::new(), Vec::new(), None);
    replay(bytes, |record| {
        let Record::Tcp { time_ns, key, flow } = record else { return };
        let all = flow.egress.traffic.bytes;
        // What it had sent before it was first seen belongs to no period.
        let last = before.insert(*key, all).unwrap_or(all);
        let period = time_ns.saturating_sub(*began.get_or_insert(*time_ns)) / every;
        let period = usize::try_from(period).unwrap_or(usize::MAX).min(1 << 20);
        if sent.len() <= period {
            sent.resize(period + 1, 0);
        }
        if let Some(sent) = sent.get_mut(period) {
            *sent += all.saturating_sub(last);
        }
    })?;
    sent.pop();
    Ok(sent)
}
