//! A suite of benchmarks: what a run is asked for, how much it measures, what its parts work with, and the table of all suites.

use crate::lab::Lab;
use crate::part::{self, Outcome, Part};
use crate::row::Row;
use crate::testbed::Testbed;
use crate::{aggregation, codec, compression, control, cooperation, rdma, small, suites, telemetry};
use anyhow::{Context, Result};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace::Binaries;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Interleaved runs of each contestant where none are given, and with `full`.
const ROUNDS: (usize, usize) = (5, 15);

/// What a run of a suite is asked for.
#[derive(Debug, Clone)]
pub struct Request {
    /// How many rounds; the suite's own number where none is given.
    pub rounds: Option<usize>,
    /// More rounds than usual.
    pub full: bool,
    /// Shows that everything runs, and measures nothing worth a figure.
    pub smoke: bool,
    /// Parts alone; all if empty.
    pub only: Vec<String>,
    /// The folder into which figures are drawn.
    pub figures: Option<PathBuf>,
    /// Suite codec: float32 files of NumPy.
    pub files: Vec<PathBuf>,
    /// Suite codec: whether PyTorch is timed too.
    pub pytorch: bool,
    /// Suite rdma: the file that describes the hosts.
    pub hosts: Option<PathBuf>,
    /// Suite telemetry: the folder into which traces are recorded, instead of measuring.
    pub traces: Option<PathBuf>,
    /// Suite telemetry: the folder that keeps trainings with wrong verdicts.
    pub wrong: Option<PathBuf>,
    /// Whether to ask before installing.
    pub consent: Consent,
}

impl Request {
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
    fn of(mut request: Request, binaries: Binaries, stop: Arc<AtomicBool>) -> Self {
        let budget = if request.smoke { B::smoke() } else { B::new(&request) };
        if request.smoke && request.only.is_empty() {
            request.only = B::SMOKE.iter().map(|part| (*part).to_owned()).collect();
        }
        Self { budget, request, binaries, stop }
    }

    /// Runs the parts that were asked for.
    fn run(self) -> Outcome {
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
    /// Names of its parts, from which `only` chooses.
    pub parts: fn(&Request) -> Vec<&'static str>,
    /// How it runs.
    pub run: Run,
}

/// A suite that is made of parts.
const fn of_parts<B: BenchBudget>(name: &'static str, about: &'static str) -> Suite {
    let run = Run::Built(|request, binaries, stop| Ok(Bench::<B>::of(request, binaries, stop).run()));
    Suite { name, about, parts: |_| part::names(B::PARTS), run }
}

/// A suite without parts.
const fn whole(name: &'static str, about: &'static str, run: Run) -> Suite {
    Suite { name, about, parts: |_| Vec::new(), run }
}

/// All suites.
pub const SUITES: &[Suite] = &[
    whole(
        "shaped",
        "Four hosts, links of 1 Gbit/s: AllReduce, AllToAll, AllGather and ReduceScatter against one TCP stream's goodput",
        Run::Built(|request, binaries, stop| on_a_star(4, &request, binaries, stop, suites::shaped)),
    ),
    whole(
        "service",
        "Two ranks on one host: what agent and rings add to the plan alone",
        Run::Built(|request, binaries, stop| on_a_star(1, &request, binaries, stop, suites::service)),
    ),
    whole(
        "intra",
        "Four ranks on one host against Gloo and Open MPI",
        Run::Built(|request, binaries, stop| on_a_star(1, &request, binaries, stop, suites::intra)),
    ),
    Suite {
        name: "rdma",
        about: "The hosts of a testbed with RDMA devices, against perftest: needs --hosts",
        parts: |_| rdma::PARTS.to_vec(),
        run: Run::Alone(on_a_testbed),
    },
    Suite {
        parts: |request| match request.traces {
            Some(_) => telemetry::TRACES.to_vec(),
            None => part::names(telemetry::Budget::PARTS),
        },
        run: Run::Built(|request, binaries, stop| {
            if request.traces.is_none() {
                return Ok(Bench::<telemetry::Budget>::of(request, binaries, stop).run());
            }
            let budget = telemetry::Budget::smoke();
            telemetry::record(&Bench { budget, request, binaries, stop })?;
            Ok(Outcome::default())
        }),
        ..of_parts::<telemetry::Budget>(
            "telemetry",
            "Four hosts: what telemetry costs, and whether what it finds is true, against the log of a training over Gloo and ours",
        )
    },
    of_parts::<control::Budget>(
        "control",
        "Eight hosts, two racks, two spines: from congestion, drains and failures to better plans for what runs",
    ),
    of_parts::<compression::Budget>(
        "compression",
        "Four hosts: AllReduces in fewer bits against exact ones, and what control chooses on fast and slow links",
    ),
    of_parts::<aggregation::Budget>(
        "aggregation",
        "One core as an aggregator, beside what kernel and machine can; four and eight hosts with an aggregator against the same without",
    ),
    whole(
        "small",
        "Eight hosts far apart: small AllReduces along the ring, in one shot, in two, and as control chooses",
        Run::Built(|request, binaries, stop| small::run(&request, binaries, stop).map(Outcome::from)),
    ),
    of_parts::<cooperation::Budget>(
        "cooperation",
        "Eight hosts, two racks, two spines: what tenants gain by being told, and what that tells them",
    ),
    whole(
        "codec",
        "One core: every codec's speed against memcpy, error and ratio, on synthetic tensors and float32 files of NumPy",
        Run::Alone(|request| codec::run(request).map(Outcome::from)),
    ),
];

/// The suite of that name.
pub fn named(name: &str) -> Option<&'static Suite> {
    SUITES.iter().find(|suite| suite.name == name)
}

impl From<Vec<Row>> for Outcome {
    fn from(rows: Vec<Row>) -> Self {
        Self { rows, problems: Vec::new() }
    }
}

/// A suite on hosts around one switch, with links of 1 Gbit/s.
fn on_a_star(
    hosts: usize,
    request: &Request,
    binaries: Binaries,
    stop: Arc<AtomicBool>,
    suite: fn(&mut Lab, &Request) -> Result<Vec<Row>>,
) -> Result<Outcome> {
    let mut lab = Lab::build(hosts, "1Gbit/s", binaries, stop)?;
    suite(&mut lab, request).map(Outcome::from)
}

/// The suite rdma on a testbed's hosts: nothing is emulated, and nothing built where the hosts have the programs.
fn on_a_testbed(request: &Request) -> Result<Outcome> {
    let file = request.hosts.as_ref().context(
        "the suite rdma needs --hosts FILE; `cargo xtask bench --help` shows one, and `cargo xtask softroce bench` has its own",
    )?;
    let testbed = Testbed::read(file)?;
    if testbed.programs.is_none() {
        packages::require(packages::BUILDING, request.consent)?;
    }
    let budget = if request.smoke { rdma::Budget::smoke() } else { rdma::Budget::new(request) };
    rdma::run(testbed, budget)
}
