//! Trainings by PyTorch's DDP over the service, from the wheel, beside Gloo.

use crate::lab::measured;
use crate::part::{self, Outcome, Part};
use crate::row::{Case, Row};
use crate::suite::Request;
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket};
use harmonaize_testkit::fabric::Fabric;
use harmonaize_testkit::job;
use harmonaize_testkit::process::Process;
use harmonaize_testkit::python::Environment;
use harmonaize_testkit::topology::{self, Topology};
use harmonaize_testkit::workspace::{self, Binaries, root};
use serde::Deserialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Bytes of the model's gradients.
const GRADIENTS: u64 = 4 * 6 * (2048 * 2048 + 2048);
/// How long a training may take.
const LIMIT: Duration = Duration::from_secs(300);

/// The suite's parts.
pub(crate) const PARTS: &[Part<Torch>] = &[("host", on_a_host), ("links", on_links), ("start", start)];

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
    environment.add_tools(request.consent)?;
    environment.add_torch(request.consent)?;
    environment.add_wheel(&environment.build_wheel(true)?)?;
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

    /// One training, a rank per entry of `hosts`.
    fn train(
        &self,
        deployment: &mut Deployment,
        hosts: &[usize],
        by: &Contestant,
        steps: usize,
        seed: usize,
    ) -> Result<Training> {
        let logs = workspace::target().join("bench-logs");
        std::fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
        let store = logs.join("torch-store");
        let _ = std::fs::remove_file(&store);
        let interface = if hosts.iter().all(|host| *host == 0) { "lo" } else { "eth0" };
        let mut ranks = Vec::new();
        for (rank, host) in hosts.iter().enumerate() {
            let host = deployment.hosts().get(*host).context("no such host")?;
            let mut command = self.environment.python();
            command.arg(root().join("bench/peers/ddp.py")).arg(&store);
            command.args([rank, hosts.len()].map(|number| number.to_string())).args([by.backend, by.budget]);
            command.args([steps, seed].map(|number| number.to_string()));
            command.env("GLOO_SOCKET_IFNAME", interface).env("OMP_NUM_THREADS", "1");
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", hosts.len().to_string());
            command.env("HARMONAIZE_SOCKET", socket(host, "a"));
            let log = logs.join(format!("torch-{rank}.log"));
            ranks.push(Process::start(
                &format!("rank {rank} of a training"),
                &mut command,
                &host.namespace,
                &log,
            )?);
        }
        job::wait(&mut ranks, LIMIT, || {
            ensure!(!self.stop.load(Ordering::Relaxed), "interrupted");
            deployment.check()
        })?;
        let printed = std::fs::read_to_string(ranks.first().context("no rank")?.log())?;
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
