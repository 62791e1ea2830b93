//! `cargo xtask bench SUITE`: each bar is one row, measured beside what it is compared with.

pub mod aggregation;
pub mod cluster;
mod codec;
pub mod compression;
pub mod control;
pub mod cooperation;
mod figures;
pub mod lab;
pub mod launcher;
pub mod part;
pub mod perftest;
mod pictures;
pub mod rdma;
pub mod row;
pub mod small;
pub mod suites;
pub mod telemetry;
pub mod testbed;

use crate::packages::{self, Consent};
use crate::workspace::{Binaries, Profile};
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use lab::Lab;
use part::Outcome;
use row::{Row, table};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Interleaved runs of each contestant; `--full` makes more.
const RUNS: usize = 5;
const FULL_RUNS: usize = 15;

/// A suite of rows.
#[derive(clap::ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suite {
    /// Four hosts, links of 1 Gbit/s: AllReduce, AllToAll, AllGather and ReduceScatter against one TCP stream's goodput
    Shaped,
    /// Two ranks on one host: what agent and rings add to the plan alone
    Service,
    /// Four ranks on one host against Gloo and Open MPI
    Intra,
    /// The hosts of a testbed with RDMA devices, against perftest: needs --hosts
    Rdma,
    /// Four hosts: what telemetry costs, and whether what it finds is true, against the log of a training over Gloo and ours
    Telemetry,
    /// Eight hosts, two racks, two spines: from congestion, drains and failures to better plans for what runs
    Control,
    /// Four hosts: AllReduces in fewer bits against exact ones, and what control chooses on fast and slow links
    Compression,
    /// One core as an aggregator, beside what kernel and machine can; four and eight hosts with an aggregator against the same without
    Aggregation,
    /// Eight hosts far apart: small AllReduces along the ring, in one shot, in two, and as control chooses
    Small,
    /// Eight hosts, two racks, two spines: what tenants gain by being told, and what that tells them
    Cooperation,
    /// One core: every codec's speed against memcpy, error and ratio, on synthetic tensors and float32 files of NumPy
    Codec,
}

/// What `cargo xtask bench` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask bench shaped                     a table on standard output
  cargo xtask bench intra --yes --json out.json installs Gloo and Open MPI when missing
  cargo xtask bench rdma --hosts testbed.toml  hosts that are reached by ssh
  cargo xtask bench codec gradients.npy        codecs, on a recorded tensor too
  cargo xtask bench codec --pytorch --yes      codecs, and PyTorch beside them

A file for --hosts:
  [[host]]
  name = \"n1\"                # also whom ssh asks for, unless `ssh` or `launcher` says otherwise
  ssh = \"root@n1.lab\"
  address = \"10.1.0.1\"       # on the fabric
  device = \"mlx5_0\"          # or with its port, mlx5_0:1
  gid_index = 3               # left out: the one for RoCEv2 with the address
Beside the hosts it may have `launcher` (such as \"ip netns exec {host}\", or \"local\"), `programs` (the folder where
they are installed on the hosts), `folder`, `control` (the address of it on the first host), `ports` and `rate`.")]
pub struct Args {
    /// Which rows
    #[arg(value_enum)]
    pub suite: Suite,
    /// Suite codec: float32 files of NumPy to code besides
    #[arg(value_name = "FILE.npy")]
    pub files: Vec<PathBuf>,
    /// Draw each row against its bar into this folder, as SVG, and what suite control, compression, aggregation, cooperation and codec show besides
    #[arg(long, value_name = "FOLDER")]
    pub figures: Option<PathBuf>,
    /// Write the rows as a JSON array too; `-` prints it on a line of standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Suite rdma: the file that describes the hosts
    #[arg(long, value_name = "FILE")]
    pub hosts: Option<PathBuf>,
    /// Suites rdma, telemetry, control, compression, aggregation, small, cooperation and codec: how many rounds, pairs of runs with telemetry and without, or onsets of congestion
    #[arg(long, value_name = "NUMBER")]
    pub rounds: Option<usize>,
    /// These parts alone; the other suites have none. Suite rdma: stream, latency, allreduce, loss, slow, failure. Suite telemetry: packet, mark, busbw, busbw-shaped, processor,
    /// thread, decision, phases, stragglers, congestion, congestion-busy; with --traces the folders of traces, such as gloo-long. Suite control: onset, order, stagger, drain, cut, planner.
    /// Suite compression: speed, slow, fast, layers, convolutional, transformer. Suite aggregation: core, large, codes, wide, eight, lossy, faults, killed, small, fair, hog, tree.
    /// Suite cooperation: tenant, targets, inference, adversary, subscribers
    #[arg(long, value_delimiter = ',', value_name = "PART")]
    pub only: Vec<String>,
    /// Suites rdma, telemetry, control, compression, aggregation, small, cooperation and codec: show that all programs run, in a short round; no bar is held against it
    #[arg(long)]
    pub smoke: bool,
    /// Suite codec: time PyTorch's conversions and quantisation too, in each round (1.4 GB from PyPI)
    #[arg(long)]
    pub pytorch: bool,
    /// Suite telemetry: record the traces that tests replay into this folder (tests/traces), and measure nothing
    #[arg(long, value_name = "FOLDER")]
    pub traces: Option<PathBuf>,
    /// Suite telemetry: keep the traces and logs of trainings whose verdicts on stragglers are wrong in this folder
    #[arg(long, value_name = "FOLDER")]
    pub wrong: Option<PathBuf>,
    /// More runs, and rows that last longer
    #[arg(long)]
    pub full: bool,
    /// Install missing packages and peers without asking
    #[arg(long)]
    pub yes: bool,
}

/// The parts of the suite, from which `--only` chooses.
fn parts(args: &Args) -> Vec<&'static str> {
    match args.suite {
        Suite::Rdma => rdma::PARTS.to_vec(),
        Suite::Telemetry if args.traces.is_some() => telemetry::TRACES.to_vec(),
        Suite::Telemetry => telemetry::parts(),
        Suite::Control => control::parts(),
        Suite::Compression => compression::parts(),
        Suite::Aggregation => aggregation::parts(),
        Suite::Cooperation => cooperation::parts(),
        Suite::Shaped | Suite::Service | Suite::Intra | Suite::Small | Suite::Codec => Vec::new(),
    }
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let suite = args.suite.to_possible_value().context("a suite without a name")?;
    part::known(suite.get_name(), &parts(args), &args.only)?;
    if args.suite == Suite::Rdma {
        return rdma(args);
    }
    if args.suite != Suite::Codec && !args.files.is_empty() {
        bail!("only the suite codec takes files");
    }
    if args.suite != Suite::Codec && args.pytorch {
        bail!("only the suite codec compares with PyTorch so");
    }
    if args.suite == Suite::Codec {
        let rounds = args.rounds.unwrap_or(if args.full { FULL_RUNS } else { RUNS }).max(1);
        let effort = if args.smoke { codec::Effort::Smoke } else { codec::Effort::Rounds(rounds) };
        let pytorch = args.pytorch.then(|| Consent::from_flag(args.yes));
        let rows = codec::run(effort, &args.files, args.figures.as_deref(), pytorch)?;
        told(args, &rows)?;
        return if args.smoke { Ok(()) } else { judged(&rows) };
    }
    let consent = Consent::from_flag(args.yes);
    packages::require(&[packages::EMULATION, packages::BUILDING].concat(), consent)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    eprintln!("Building (minutes, the first time)");
    let binaries = Binaries::build_with(Profile::Release, &["harmonaize-bench"])?;
    let began = Instant::now();
    let outcome = match args.suite {
        Suite::Telemetry if args.traces.is_some() => {
            let folder = args.traces.as_deref().unwrap_or(Path::new(""));
            return telemetry::record(folder, &args.only, binaries, consent, stop);
        }
        Suite::Telemetry => telemetry::run(telemetry_effort(args), binaries, consent, stop),
        Suite::Control => control::run(control_effort(args), binaries, stop),
        Suite::Compression => compression::run(compression_effort(args), binaries, stop),
        Suite::Aggregation => aggregation::run(aggregation_effort(args), binaries, stop),
        Suite::Cooperation => cooperation::run(cooperation_effort(args), binaries, stop),
        Suite::Small => {
            let rounds = args.rounds.unwrap_or(if args.full { FULL_RUNS } else { RUNS }).max(1);
            let effort = if args.smoke { small::Effort::smoke() } else { small::Effort::new(rounds) };
            small::run(effort, binaries, stop)
        }
        _ => return star(args, binaries, consent, stop),
    };
    eprintln!("{:.0} s without the build", began.elapsed().as_secs_f64());
    finished(args, outcome)
}

/// The suites that have one star of hosts.
fn star(args: &Args, binaries: Binaries, consent: Consent, stop: Arc<AtomicBool>) -> Result<()> {
    let runs = if args.full { FULL_RUNS } else { RUNS };
    let hosts = if args.suite == Suite::Shaped { 4 } else { 1 };
    let began = Instant::now();
    let mut lab = Lab::build(hosts, "1Gbit/s", binaries, stop)?;
    let rows = match args.suite {
        Suite::Shaped => suites::shaped(&mut lab, runs)?,
        Suite::Service => suites::service(&mut lab, runs)?,
        Suite::Intra => suites::intra(&mut lab, runs, consent)?,
        Suite::Rdma
        | Suite::Telemetry
        | Suite::Control
        | Suite::Compression
        | Suite::Aggregation
        | Suite::Small
        | Suite::Cooperation
        | Suite::Codec => {
            bail!("this suite has other hosts")
        }
    };
    drop(lab);
    eprintln!("{:.0} s without the build", began.elapsed().as_secs_f64());
    told(args, &rows)?;
    judged(&rows)
}

fn telemetry_effort(args: &Args) -> telemetry::Effort {
    const PAIRS: usize = 20;
    const FULL_PAIRS: usize = 60;
    let pairs = args.rounds.unwrap_or(if args.full { FULL_PAIRS } else { PAIRS }).max(1);
    let effort =
        if args.smoke { telemetry::Effort::smoke() } else { telemetry::Effort::new(pairs, &args.only) };
    telemetry::Effort { wrong: args.wrong.clone(), ..effort }
}

fn control_effort(args: &Args) -> control::Effort {
    const ONSETS: usize = 30;
    let onsets = args.rounds.unwrap_or(ONSETS).max(1);
    let effort = if args.smoke {
        control::Effort::smoke(&args.only)
    } else {
        control::Effort::new(onsets, &args.only)
    };
    control::Effort { figures: args.figures.clone(), ..effort }
}

fn compression_effort(args: &Args) -> compression::Effort {
    let rounds = args.rounds.unwrap_or(if args.full { FULL_RUNS } else { RUNS }).max(1);
    let only = &args.only;
    let effort =
        if args.smoke { compression::Effort::smoke(only) } else { compression::Effort::new(rounds, only) };
    compression::Effort { figures: args.figures.clone(), ..effort }
}

fn aggregation_effort(args: &Args) -> aggregation::Effort {
    let rounds = args.rounds.unwrap_or(if args.full { FULL_RUNS } else { RUNS }).max(1);
    let only = &args.only;
    if args.smoke { aggregation::Effort::smoke(only) } else { aggregation::Effort::new(rounds, only) }
}

fn cooperation_effort(args: &Args) -> cooperation::Effort {
    let rounds = args.rounds.unwrap_or(if args.full { FULL_RUNS } else { RUNS }).max(1);
    let only = &args.only;
    let effort =
        if args.smoke { cooperation::Effort::smoke(only) } else { cooperation::Effort::new(rounds, only) };
    cooperation::Effort { figures: args.figures.clone(), ..effort }
}

/// The suite on a testbed's hosts: nothing is emulated, and nothing built where the hosts have the programs.
fn rdma(args: &Args) -> Result<()> {
    let Some(file) = &args.hosts else {
        bail!(
            "the suite rdma needs --hosts FILE; `cargo xtask bench --help` shows one, and `cargo xtask softroce bench` has its own"
        )
    };
    let testbed = testbed::Testbed::read(file)?;
    if testbed.programs.is_none() {
        packages::require(packages::BUILDING, Consent::from_flag(args.yes))?;
    }
    let rounds = args.rounds.unwrap_or(if args.full { FULL_RUNS } else { RUNS }).max(1);
    let effort = if args.smoke { rdma::Effort::smoke() } else { rdma::Effort::new(rounds, &args.only) };
    let began = Instant::now();
    let outcome = rdma::run(testbed, effort)?;
    eprintln!("{:.0} s", began.elapsed().as_secs_f64());
    finished(args, outcome)
}

/// Prints what came of parts; an error where one failed, or where a bar was not reached and bars are held.
fn finished(args: &Args, outcome: Outcome) -> Result<()> {
    told(args, &outcome.rows)?;
    if !outcome.problems.is_empty() {
        bail!("{}", outcome.problems.join("; "));
    }
    if args.smoke { Ok(()) } else { judged(&outcome.rows) }
}

/// Prints the rows, as JSON too where that was asked for.
fn told(args: &Args, rows: &[Row]) -> Result<()> {
    println!("{}\n\n{}", machine(), table(rows));
    if let Some(folder) = &args.figures {
        let suite = args.suite.to_possible_value().context("a suite without a name")?;
        pictures::of_rows(folder, suite.get_name(), rows)?;
        pictures::of_ideals(folder, suite.get_name(), rows)?;
    }
    match &args.json {
        Some(path) if path.as_os_str() == "-" => println!("{}", serde_json::to_string(rows)?),
        Some(path) => write_json(path, rows)?,
        None => {}
    }
    Ok(())
}

/// Writes the rows to a file.
pub(crate) fn write_json<T: serde::Serialize + ?Sized>(path: &Path, rows: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(rows)? + "\n";
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// An error where a row does not reach its bar.
fn judged(rows: &[Row]) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn an_unknown_part_is_refused_before_anything_is_built() {
        let wrong = |line: &str| {
            let line = Line::try_parse_from(format!("bench {line}").split(' ')).unwrap();
            run(&line.args).unwrap_err().to_string()
        };
        assert_eq!(
            wrong("control --only onset,typo"),
            "the suite control has no part typo; it has onset, order, stagger, drain, cut, planner"
        );
        let lines =
            ["rdma --only typo", "telemetry --only gloo-long", "telemetry --traces /tmp --only packet"];
        for line in lines {
            assert!(wrong(line).contains("has no part"), "{line}");
        }
        for suite in ["shaped", "service", "intra", "small", "codec"] {
            let expected = format!("the suite {suite} has no parts; leave --only out");
            assert_eq!(wrong(&format!("{suite} --only large")), expected);
        }
    }

    #[test]
    fn the_help_names_every_part() {
        let help = Line::command().render_long_help().to_string();
        let help: Vec<&str> = help.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').collect();
        for suite in Suite::value_variants() {
            let name = suite.to_possible_value().unwrap();
            let line = Line::try_parse_from(["bench", name.get_name()]).unwrap();
            for part in parts(&line.args) {
                assert!(help.contains(&part), "{part} of {}", name.get_name());
            }
        }
    }
}
