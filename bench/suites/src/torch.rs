//! Trainings by PyTorch's DDP over the service, from the wheel, beside Gloo. It also times a small call from C and from Python.

use crate::lab::measured;
use crate::part::{self, Outcome, Part};
use crate::row::{Case, Row};
use crate::suite::Request;
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::c_library;
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket};
use harmonaize_testkit::fabric::Fabric;
use harmonaize_testkit::job;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::python::Environment;
use harmonaize_testkit::topology::{self, Topology};
use harmonaize_testkit::workspace::{self, Binaries, Profile, root};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Bytes of the model's gradients.
const GRADIENTS: u64 = 4 * 6 * (2048 * 2048 + 2048);
/// How long a training may take.
const LIMIT: Duration = Duration::from_secs(300);

/// The suite's parts.
pub(crate) const PARTS: &[Part<Torch>] =
    &[("host", on_a_host), ("links", on_links), ("start", start), ("calls", small_calls)];

/// What all parts need.
pub(crate) struct Torch {
    request: Request,
    binaries: Binaries,
    stop: Arc<AtomicBool>,
    environment: Environment,
}

/// Runs the parts that were asked for.
pub(crate) fn run(request: Request, binaries: Binaries, stop: Arc<AtomicBool>) -> Result<Outcome> {
    let environment = Environment::shared();
    environment.add_tools(request.consent())?;
    environment.add_torch(request.consent())?;
    environment.add_wheel(&environment.build_wheel("dist", true, |_| ())?)?;
    let only = request.only.clone();
    Ok(part::run(&Torch { request, binaries, stop, environment }, PARTS, &only))
}

/// What exchanges the gradients.
struct Contestant {
    name: &'static str,
    backend: &'static str,
    /// What the hook takes beside the backend; `-`: no hook.
    budget: &'static str,
    /// What of Gloo's exposed communication it may have over links.
    bar: f64,
}

const GLOO: Contestant = Contestant { name: "Gloo", backend: "gloo", budget: "-", bar: 0.0 };
const EXACT: Contestant = Contestant { name: "exact", backend: "harmonaize", budget: "-", bar: 1.0 };
const OURS: [Contestant; 3] = [
    EXACT,
    Contestant { name: "match bf16", backend: "gloo", budget: "match bf16", bar: 0.6 },
    Contestant { name: "vNMSE 0.01", backend: "gloo", budget: "0.01", bar: 0.35 },
];

/// What rank 0 of a training prints.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Training {
    step_ms: f64,
    exposed_ms: f64,
    formed_s: f64,
    loss: f64,
}

impl Torch {
    /// So many hosts at 1 Gbit/s. Ranks run on the hosts themselves, as root, for Gloo's connect to each other.
    fn deploy(&self, hosts: usize) -> Result<Deployment> {
        let fabric = Fabric::build(&Topology::parse(&topology::star(hosts, "1Gbit/s"))?)?;
        let tenant = Tenant { name: "a".to_owned(), user: 0 };
        Deployment::start(fabric, Setup::new(self.binaries.clone(), &[tenant]))
    }

    /// Runs a rank per entry of `hosts`, and returns what rank 0 printed.
    fn run(
        &self,
        deployment: &mut Deployment,
        hosts: &[usize],
        program: impl Fn(usize) -> Command,
    ) -> Result<String> {
        let logs = logs()?;
        let mut ranks = Vec::new();
        for (rank, host) in hosts.iter().enumerate() {
            let host = deployment.hosts().get(*host).context("no such host")?;
            let mut command = program(rank);
            command.env("OMP_NUM_THREADS", "1").env("HARMONAIZE_SOCKET", socket(host, "a"));
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", hosts.len().to_string());
            let log = logs.join(format!("torch-{rank}.log"));
            ranks.push(Process::start(&format!("rank {rank}"), &mut command, &host.namespace, &log)?);
        }
        job::wait(&mut ranks, LIMIT, || {
            ensure!(!self.stop.load(Ordering::Relaxed), "interrupted");
            deployment.check()
        })?;
        Ok(std::fs::read_to_string(ranks.first().context("no rank")?.log())?)
    }

    /// One training, a rank per entry of `hosts`.
    fn train(
        &self,
        deployment: &mut Deployment,
        hosts: &[usize],
        by: &Contestant,
        steps: usize,
        seed: usize,
    ) -> Result<Training> {
        let store = logs()?.join("torch-store");
        let _ = std::fs::remove_file(&store);
        let interface = if hosts.iter().all(|host| *host == 0) { "lo" } else { "eth0" };
        let printed = self.run(deployment, hosts, |rank| {
            let mut command = self.environment.python();
            command.arg(root().join("bench/peers/ddp.py")).arg(&store);
            command.args([rank, hosts.len()].map(|number| number.to_string())).args([by.backend, by.budget]);
            command.args([steps, seed].map(|number| number.to_string()));
            command.env("GLOO_SOCKET_IFNAME", interface);
            command
        })?;
        measured(&printed)?.into_iter().next().context("nothing was printed")
    }

    /// Runs the contestants in turn, a seed a round. By contestant, what came of each round.
    fn rounds(
        &self,
        deployment: &mut Deployment,
        hosts: &[usize],
        all: &[&Contestant],
    ) -> Result<Vec<Vec<Training>>> {
        let (rounds, steps) = if self.request.smoke {
            (self.request.rounds_of((1, 1)), 2)
        } else {
            (self.request.rounds(), 10)
        };
        let mut trained = vec![Vec::new(); all.len()];
        for round in 1..=rounds {
            eprint!("run {round}/{rounds}, {} ranks on {} hosts:", hosts.len(), deployment.hosts().len());
            for (by, trained) in all.iter().zip(&mut trained) {
                let this = self.train(deployment, hosts, by, steps, round)?;
                eprint!(
                    " {} {:.1} ms exposed of {:.1}, loss {:.4};",
                    by.name, this.exposed_ms, this.step_ms, this.loss
                );
                trained.push(this);
            }
            eprintln!();
        }
        Ok(trained)
    }
}

/// The folder of what ranks print.
fn logs() -> Result<PathBuf> {
    let logs = workspace::target().join("bench-logs");
    std::fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
    Ok(logs)
}

fn figures(trained: &[Training], of: fn(&Training) -> f64) -> Vec<f64> {
    trained.iter().map(of).collect()
}

fn case(what: String, bar: f64, ranks: usize) -> Case {
    Case::less("torch", what, bar).of(GRADIENTS, ranks)
}

/// Processes on one host.
fn on_a_host(suite: &Torch) -> Result<Vec<Row>> {
    let mut deployment = suite.deploy(1)?;
    let mut rows = Vec::new();
    for ranks in [2, 4] {
        let trained = suite.rounds(&mut deployment, &vec![0; ranks], &[&EXACT, &GLOO])?;
        let [ours, gloo] = trained.as_slice() else { continue };
        let what = format!("DDP, 25 M parameters, {ranks} processes on one host: communication exposed, ms");
        rows.push(case(what, 0.5, ranks).compare(
            &figures(ours, |trained| trained.exposed_ms),
            &figures(gloo, |trained| trained.exposed_ms),
            "Gloo",
        ));
    }
    deployment.end().context("control or an agent did not end in order")?;
    Ok(rows)
}

/// A process on each of four hosts.
fn on_links(suite: &Torch) -> Result<Vec<Row>> {
    let mut deployment = suite.deploy(4)?;
    let all: Vec<&Contestant> = std::iter::once(&GLOO).chain(&OURS).collect();
    let trained = suite.rounds(&mut deployment, &[0, 1, 2, 3], &all)?;
    deployment.end().context("control or an agent did not end in order")?;
    let Some((gloo, others)) = trained.split_first() else { return Ok(Vec::new()) };
    let losses = figures(gloo, |trained| trained.loss);
    let ends = |choose: fn(f64, f64) -> f64| losses.iter().copied().reduce(choose).unwrap_or(f64::NAN);
    let spread = ends(f64::max) - ends(f64::min);
    let rows = OURS.iter().zip(others).flat_map(|(by, trained)| {
        let what = |figure: &str| format!("DDP, 25 M parameters, 4 hosts, {}: {figure}", by.name);
        let exposed = case(what("communication exposed, ms"), by.bar, 4);
        let off: Vec<f64> =
            trained.iter().zip(&losses).map(|(trained, gloo)| (trained.loss - gloo).abs()).collect();
        let loss = case(what("loss off Gloo's, beside Gloo's spread over seeds"), 1.0, 4);
        let spreads = vec![spread; off.len()];
        [
            exposed.compare(
                &figures(trained, |trained| trained.exposed_ms),
                &figures(gloo, |trained| trained.exposed_ms),
                "Gloo",
            ),
            // One seed has no spread.
            if losses.len() > 1 { loss.compare(&off, &spreads, "spread") } else { loss.state(&off) },
        ]
    });
    Ok(rows.collect())
}

/// Forming a group of eight processes on one host, the wheel's import included.
fn start(suite: &Torch) -> Result<Vec<Row>> {
    let mut deployment = suite.deploy(1)?;
    let trained = suite.rounds(&mut deployment, &[0; 8], &[&EXACT, &GLOO])?;
    deployment.end().context("control or an agent did not end in order")?;
    let [ours, gloo] = trained.as_slice() else { return Ok(Vec::new()) };
    let (ours, gloo) = (figures(ours, |trained| trained.formed_s), figures(gloo, |trained| trained.formed_s));
    let what = "init_process_group of 8 processes on one host, s";
    Ok(vec![
        case(what.to_owned(), 1.0, 8).limit(&ours, 1.0),
        case(what.to_owned(), 1.0, 8).stated().compare(&ours, &gloo, "Gloo"),
    ])
}

/// Bytes of the small call, and microseconds that it may take longer than in Rust from C, and from Python.
const SMALL: (u64, f64, f64) = (1024, 1.0, 8.0);

/// What `overhead.py` prints: medians in microseconds.
#[derive(Deserialize)]
struct FromPython {
    module_us: f64,
    torch_us: f64,
    gloo_us: f64,
}

/// A small AllReduce of two processes on one host, in Rust, in C, from Python and by torch.
fn small_calls(suite: &Torch) -> Result<Vec<Row>> {
    let (rounds, [calls, turns]) = if suite.request.smoke {
        (suite.request.rounds_of((1, 1)), ["100", "1"])
    } else {
        (suite.request.rounds(), ["10000", "30"])
    };
    let (rust, c) = latency_programs()?;
    let mut deployment = suite.deploy(1)?;
    let (mut alone, mut added) = (Vec::new(), [const { Vec::new() }; 3]);
    let (mut by_torch, mut by_gloo) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        let mut median = |program: &Path| -> Result<f64> {
            let printed = suite.run(&mut deployment, &[0, 0], |_| {
                let mut command = Command::new(program);
                command.arg(calls);
                command
            })?;
            let nanoseconds = printed.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
            Ok(nanoseconds.with_context(|| format!("no figure in: {printed}"))? / 1e3)
        };
        let (in_rust, in_c) = (median(&rust)?, median(&c)?);
        let printed = suite.run(&mut deployment, &[0, 0], |_| {
            let mut command = suite.environment.python();
            command.arg(root().join("dataplane/python/tests/overhead.py")).arg(turns);
            command
                .env("GLOO_SOCKET_IFNAME", "lo")
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", "29500");
            command
        })?;
        let FromPython { module_us, torch_us, gloo_us } =
            measured(&printed)?.into_iter().next().context("nothing was printed")?;
        eprintln!(
            "run {round}/{rounds}: Rust {in_rust:.2} us, C {in_c:.2}, Python {module_us:.2}, torch {torch_us:.2}, \
             its Gloo {gloo_us:.2}"
        );
        alone.push(in_rust);
        by_torch.push(torch_us);
        by_gloo.push(gloo_us);
        for (added, taken) in added.iter_mut().zip([in_c, module_us, torch_us]) {
            added.push(taken - in_rust);
        }
    }
    deployment.end().context("control or an agent did not end in order")?;
    let (bytes, by_c, by_python) = SMALL;
    let case = |figure: &str| {
        Case::less("torch", format!("AllReduce, 1 KiB, 2 processes on one host, {figure}"), 1.0).of(bytes, 2)
    };
    let mut rows = vec![case("in Rust: p50 us").state(&alone)];
    let limits = [("in C", by_c), ("from Python", by_python), ("by torch.distributed", by_python)];
    for ((by, limit), added) in limits.into_iter().zip(&added) {
        rows.push(case(&format!("{by}: us added to Rust's p50")).limit(added, limit));
    }
    rows.push(case("by torch.distributed: p50 us").stated().compare(&by_torch, &by_gloo, "Gloo"));
    Ok(rows)
}

/// The examples that measure the small call, in Rust and in C.
fn latency_programs() -> Result<(PathBuf, PathBuf)> {
    let mut cargo = workspace::cargo();
    cargo.args(["build", "--release", "--package", "harmonaize-c", "--example", "latency"]);
    let built = workspace::executables(&mut cargo, &["latency"])?;
    let (_, rust) = built.into_iter().next().context("cargo has built no example latency")?;
    let folder = workspace::target().join("bench-c");
    c_library::install(&c_library::build(Profile::Release)?, &folder)?;
    let (lib, c) = (folder.join("lib"), folder.join("latency"));
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-O2"]).arg(root().join("dataplane/c/examples/latency.c"));
    compile.arg("-I").arg(folder.join("include")).arg("-L").arg(&lib).arg("-lharmonaize");
    compile.arg(format!("-Wl,-rpath,{}", lib.display())).arg("-o").arg(&c);
    workspace::run(&mut compile)?;
    Ok((rust, c))
}
