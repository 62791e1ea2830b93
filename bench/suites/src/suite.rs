//! A suite of benchmarks: what a run is asked for, how much it measures, and what its parts work with.

use crate::part::{self, Outcome, Part};
use crate::row::Row;
use crate::sweep;
use anyhow::Result;
use clap::builder::PossibleValuesParser;
use harmonaize_testkit::packages::Consent;
use harmonaize_testkit::workspace::Binaries;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Interleaved runs of each contestant where none are given, and with `full`.
const ROUNDS: (usize, usize) = (5, 15);

/// What a run of a suite is asked for: options of `cargo xtask bench`.
#[derive(Debug, Clone, clap::Args)]
pub struct Request {
    /// Suite codec: float32 files of NumPy to code besides
    #[arg(value_name = "FILE.npy")]
    pub files: Vec<PathBuf>,
    /// Draw each row against its bar into this folder, as SVG, and what suite control, compression, aggregation, cooperation, codec and sharing show besides;
    /// suite sweep writes its page and its runs there, and into target/sweep without it
    #[arg(long, value_name = "FOLDER")]
    pub figures: Option<PathBuf>,
    /// Suite rdma: the file that describes the hosts; it has a slash, or ends in .toml. Suites rdma and sweep: names of hosts whose agents run
    #[arg(long, value_name = "FILE|HOST,HOST")]
    pub hosts: Option<String>,
    /// With --hosts by name: the agents' socket there
    #[arg(long, value_name = "SOCKET", default_value = "/run/harmonaize/tenants/bench.sock")]
    pub agent: PathBuf,
    /// With --hosts by name: the folder of harmonaize-perf, here and there
    #[arg(long, value_name = "FOLDER", default_value = "/usr/bin")]
    pub programs: PathBuf,
    /// With --hosts by name: print the commands, and start nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Suites service, rdma, telemetry, control, compression, aggregation, small, sweep, cooperation, codec, sharing, torch and trust: how many rounds, pairs of runs with telemetry and without, or onsets of congestion
    #[arg(long, value_name = "NUMBER")]
    pub rounds: Option<usize>,
    /// These parts alone; the other suites have none. Suite service: added, threads, calls, state. Suite rdma: stream, latency, allreduce, loss, slow, failure, aggregated. Suite telemetry: packet, mark, busbw, busbw-shaped, processor,
    /// thread, decision, phases, stragglers, congestion, congestion-busy; with --traces the folders of traces, such as gloo-long. Suite control: onset, order, stagger, drain, cut, planner, page.
    /// Suite compression: speed, slow, fast, layers, convolutional, transformer. Suite aggregation: core, large, codes, wide, eight, lossy, faults, killed, small, fair, hog, tree.
    /// Suite cooperation: tenant, targets, inference, adversary, subscribers. Suite sweep: host, shaped, unshaped, unprotected, racks, by-racks, recorded, senders, preloaded. Suite sharing: host, links, classes, link-classes, engine-weights, link-weights, hostile, idle.
    /// Suite trust: cut, tenants, protection, tls, sessions, streams. Suite torch: host, links, start, calls. Suite allocation: gavel, sia, queues, fairness, adapting, market, time, own
    #[arg(long, value_delimiter = ',', value_name = "PART")]
    pub only: Vec<String>,
    /// Suites service, rdma, telemetry, control, compression, aggregation, small, sweep, cooperation, codec, sharing, torch, trust and allocation: show that all programs run, in a short round; no bar is held against it
    #[arg(long)]
    pub smoke: bool,
    /// Suite codec: time PyTorch's conversions and quantisation too, in each round (1.4 GB from PyPI)
    #[arg(long)]
    pub pytorch: bool,
    /// Suite telemetry: record the traces that tests replay into this folder (tests/traces), and measure nothing
    #[arg(long, value_name = "FOLDER")]
    pub traces: Option<PathBuf>,
    /// Suite telemetry: keep the traces and logs of trainings whose findings on stragglers are wrong in this folder
    #[arg(long, value_name = "FOLDER")]
    pub wrong: Option<PathBuf>,
    /// Suite sweep, and suite rdma by hosts' names: sizes in bytes, with K, M or G; of the sweep 1K to 256M by 4 without it
    #[arg(long, value_delimiter = ',', value_name = "SIZE", value_parser = sweep::size)]
    pub sizes: Vec<u64>,
    /// Suite rdma by hosts' names: element types of what harmonaize-perf prints, as it names them; float without it
    #[arg(long, value_delimiter = ',', value_name = "TYPE", value_parser = plain_name)]
    pub types: Vec<String>,
    /// Suite sweep: numbers of ranks on one host; 2, 3, 4 and 8 without it, and of part preloaded 2 and 4
    #[arg(long, value_delimiter = ',', value_name = "NUMBER", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(2..=64))]
    pub ranks: Vec<usize>,
    /// Suite sweep: which collectives; all without it, and of part preloaded all_reduce
    #[arg(long, value_delimiter = ',', value_parser = collectives())]
    pub collectives: Vec<String>,
    /// Suite sweep, part recorded: files of HARMONAIZE_MINA and HARMONAIZE_MCCS by name, such as vit-base or setup-1_resnet_0; all without it
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub recordings: Vec<String>,
    /// More runs, and rows that last longer
    #[arg(long)]
    pub full: bool,
    /// Install missing packages and peers without asking
    #[arg(long)]
    pub yes: bool,
}

/// A word of letters and digits.
fn plain_name(text: &str) -> Result<String, String> {
    let plain = !text.is_empty() && text.chars().all(|letter| letter.is_ascii_alphanumeric());
    plain.then(|| text.to_owned()).ok_or_else(|| format!("{text:?} is no name of letters and digits"))
}

/// The names of the sweep's collectives.
fn collectives() -> PossibleValuesParser {
    PossibleValuesParser::new(sweep::COLLECTIVES.iter().map(|collective| collective.name))
}

impl Request {
    /// Whether to ask before installing.
    pub fn consent(&self) -> Consent {
        Consent::from_flag(self.yes)
    }

    /// The number of rounds, at least one.
    pub fn rounds(&self) -> usize {
        self.rounds_of(ROUNDS)
    }

    /// The same where the suite has numbers of its own: the usual one, and that with `full`.
    pub fn rounds_of(&self, (usual, full): (usize, usize)) -> usize {
        self.rounds.unwrap_or(if self.full { full } else { usual }).max(1)
    }
}

/// How much a suite measures.
pub trait BenchBudget: Sized + 'static {
    /// The suite's parts.
    const PARTS: &'static [Part<Bench<Self>>];
    /// The parts of a smoke run that names none; all if empty.
    const SMOKE: &'static [&'static str] = &[];

    /// What a run for figures measures.
    fn new(request: &Request) -> Self;

    /// What a smoke run measures.
    fn smoke() -> Self;
}

/// What a suite works with.
#[derive(Debug)]
pub struct Bench<B> {
    /// How much is measured.
    pub budget: B,
    /// What was asked for.
    pub request: Request,
    /// The built programs.
    pub binaries: Binaries,
    /// Set where the run is to end early.
    pub stop: Arc<AtomicBool>,
}

impl<B: BenchBudget> Bench<B> {
    /// A suite for what was asked for.
    pub(crate) fn of(mut request: Request, binaries: Binaries, stop: Arc<AtomicBool>) -> Self {
        let budget = if request.smoke { B::smoke() } else { B::new(&request) };
        if request.smoke && request.only.is_empty() {
            request.only = B::SMOKE.iter().map(|part| (*part).to_owned()).collect();
        }
        Self { budget, request, binaries, stop }
    }

    /// Runs the parts that were asked for.
    pub(crate) fn run(self) -> Outcome {
        part::run(&self, B::PARTS, &self.request.only)
    }
}

/// How a suite runs.
#[derive(Clone, Copy)]
pub enum Run {
    /// It builds what it needs itself.
    Alone(fn(&Request) -> Result<Outcome>),
    /// With the programs of the release profile.
    Built(fn(Request, Binaries, Arc<AtomicBool>) -> Result<Outcome>),
}

/// A suite.
#[derive(Clone, Copy)]
pub struct Suite {
    /// Its name.
    pub name: &'static str,
    /// What it measures, in a line.
    pub about: &'static str,
    /// The folders of the tree whose programs it measures.
    pub rooms: &'static [&'static str],
    /// Names of its parts, from which `only` chooses.
    pub parts: fn(&Request) -> Vec<&'static str>,
    /// How it runs.
    pub run: Run,
}

impl Suite {
    /// A suite that is made of parts.
    pub(crate) const fn of_parts<B: BenchBudget>(
        name: &'static str,
        rooms: &'static [&'static str],
        about: &'static str,
    ) -> Self {
        let run = Run::Built(|request, binaries, stop| Ok(Bench::<B>::of(request, binaries, stop).run()));
        Self { name, about, rooms, parts: |_| part::names(B::PARTS), run }
    }

    /// A suite without parts.
    pub(crate) const fn whole(
        name: &'static str,
        rooms: &'static [&'static str],
        about: &'static str,
        run: Run,
    ) -> Self {
        Self { name, about, rooms, parts: |_| Vec::new(), run }
    }
}

impl From<Vec<Row>> for Outcome {
    fn from(rows: Vec<Row>) -> Self {
        Self { rows, problems: Vec::new() }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::Request;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        request: Request,
    }

    /// What these options ask for.
    pub(crate) fn request(arguments: &[&str]) -> Request {
        Line::try_parse_from([&["bench"], arguments].concat()).unwrap().request
    }

    #[test]
    fn types_are_plain_names() {
        assert_eq!(request(&["--types", "float,half"]).types, ["float", "half"]);
        assert!(Line::try_parse_from(["bench", "--types", "float;reboot"]).is_err());
        assert!(Line::try_parse_from(["bench", "--types", "--json=x"]).is_err());
    }
}
