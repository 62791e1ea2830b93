//! A suite of benchmarks: what a run is asked for, how much it measures, and what its parts work with.

use crate::part::{self, Outcome, Part};
use crate::row::Row;
use anyhow::Result;
use harmonaize_testkit::packages::Consent;
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
    /// Suite sweep: sizes, ranks on one host and collectives; its own where none is given.
    pub sizes: Vec<u64>,
    /// See `sizes`.
    pub ranks: Vec<usize>,
    /// See `sizes`.
    pub collectives: Vec<String>,
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
