//! `cargo xtask bench SUITE`: each bar is one row, measured beside what it is compared with.

pub mod lab;
pub mod row;
pub mod suites;

use crate::packages::{self, Consent};
use crate::workspace::{Binaries, Profile};
use anyhow::{Context, Result, bail};
use lab::Lab;
use row::{Row, table};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Interleaved runs of each contestant; `--full` makes more.
const RUNS: usize = 5;
const FULL_RUNS: usize = 15;

/// A suite of rows.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suite {
    /// Four hosts, links of 1 Gbit/s: AllReduce and AllToAll against one TCP stream's goodput
    Shaped,
    /// Two ranks on one host: what agent and rings add to the plan alone
    Service,
    /// Four ranks on one host against Gloo and Open MPI
    Intra,
}

/// What `cargo xtask bench` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask bench shaped                     a table on standard output
  cargo xtask bench intra --yes --json out.json installs Gloo and Open MPI when missing")]
pub struct Args {
    /// Which rows
    #[arg(value_enum)]
    pub suite: Suite,
    /// Write the rows as a JSON array too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// More runs, and rows that last longer
    #[arg(long)]
    pub full: bool,
    /// Install missing packages and peers without asking
    #[arg(long)]
    pub yes: bool,
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let consent = Consent::from_flag(args.yes);
    packages::require(packages::EMULATION, consent)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    eprintln!("Building (minutes, the first time)");
    let binaries = Binaries::build_with(Profile::Release, &["harmonaize-bench"])?;
    let runs = if args.full { FULL_RUNS } else { RUNS };
    let hosts = if args.suite == Suite::Shaped { 4 } else { 1 };
    let began = Instant::now();
    let mut lab = Lab::build(hosts, "1Gbit/s", binaries, stop)?;
    let rows = match args.suite {
        Suite::Shaped => suites::shaped(&mut lab, runs)?,
        Suite::Service => suites::service(&mut lab, runs)?,
        Suite::Intra => suites::intra(&mut lab, runs, consent)?,
    };
    drop(lab);
    eprintln!("{:.0} s without the build", began.elapsed().as_secs_f64());
    println!("{}\n\n{}", machine(), table(&rows));
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&rows)? + "\n";
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let failed: Vec<&Row> = rows.iter().filter(|row| !row.pass).collect();
    if !failed.is_empty() {
        bail!("{} of {} rows do not reach their bar", failed.len(), rows.len());
    }
    Ok(())
}

/// The machine, in a line.
fn machine() -> String {
    let first = |path: &str, key: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        line.split_once(':').map_or(line, |(_, value)| value).trim().to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!(
        "{}, {cores} cores, {} of memory, kernel {}, TCP congestion control {}",
        first("/proc/cpuinfo", "model name"),
        first("/proc/meminfo", "MemTotal"),
        first("/proc/sys/kernel/osrelease", ""),
        first("/proc/sys/net/ipv4/tcp_congestion_control", "")
    )
}
