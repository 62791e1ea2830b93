//! `cargo xtask bench SUITE`: each bar is one row, measured beside what it is compared with.

use anyhow::{Context, Result, bail};
use clap::builder::{PossibleValue, PossibleValuesParser};
use harmonaize_suites::part::{self, Outcome};
use harmonaize_suites::pictures;
use harmonaize_suites::row::{Row, table};
use harmonaize_suites::suite::{self, Request, Run, SUITES};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace::{Binaries, Profile};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

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
    #[arg(value_parser = names())]
    pub suite: String,
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

/// The suites' names.
fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(SUITES.iter().map(|suite| PossibleValue::new(suite.name).help(suite.about)))
}

impl Args {
    fn request(&self) -> Request {
        Request {
            rounds: self.rounds,
            full: self.full,
            smoke: self.smoke,
            only: self.only.clone(),
            figures: self.figures.clone(),
            files: self.files.clone(),
            pytorch: self.pytorch,
            hosts: self.hosts.clone(),
            traces: self.traces.clone(),
            wrong: self.wrong.clone(),
            consent: Consent::from_flag(self.yes),
        }
    }
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let suite = suite::named(&args.suite).context("there is no such suite")?;
    let request = args.request();
    part::check_names(suite.name, &(suite.parts)(&request), &args.only)?;
    if suite.name != "codec" && !args.files.is_empty() {
        bail!("only the suite codec takes files");
    }
    if suite.name != "codec" && args.pytorch {
        bail!("only the suite codec compares with PyTorch so");
    }
    let run = match suite.run {
        Run::Alone(run) => {
            let began = Instant::now();
            let outcome = run(&request)?;
            eprintln!("{:.0} s", began.elapsed().as_secs_f64());
            return finished(args, outcome);
        }
        Run::Built(run) => run,
    };
    packages::require(&[packages::EMULATION, packages::BUILDING].concat(), request.consent)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    eprintln!("Building (minutes, the first time)");
    let binaries = Binaries::build_with(Profile::Release, &["harmonaize-bench"])?;
    let began = Instant::now();
    let outcome = run(request, binaries, stop)?;
    eprintln!("{:.0} s without the build", began.elapsed().as_secs_f64());
    if args.traces.is_some() { Ok(()) } else { finished(args, outcome) }
}

/// Prints what came of parts; an error where one failed, or where a bar was not reached and bars are held.
fn finished(args: &Args, outcome: Outcome) -> Result<()> {
    print_rows(args, &outcome.rows)?;
    if !outcome.problems.is_empty() {
        bail!("{}", outcome.problems.join("; "));
    }
    if args.smoke { Ok(()) } else { check_bars(&outcome.rows) }
}

/// Prints the rows, as JSON too where that was asked for.
fn print_rows(args: &Args, rows: &[Row]) -> Result<()> {
    println!("{}\n\n{}", machine(), table(rows));
    if let Some(folder) = &args.figures {
        pictures::of_rows(folder, &args.suite, rows)?;
        pictures::of_ideals(folder, &args.suite, rows)?;
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
fn check_bars(rows: &[Row]) -> Result<()> {
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
    fn an_unknown_part_is_refused_before_building() {
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
        for suite in SUITES {
            let line = Line::try_parse_from(["bench", suite.name]).unwrap();
            for part in (suite.parts)(&line.args.request()) {
                assert!(help.contains(&part), "{part} of {}", suite.name);
            }
        }
    }
}
