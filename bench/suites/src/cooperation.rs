//! Suite cooperation: what being told and asked is worth to a tenant, and costs others. It runs on two racks and two spines with
//! real agents.

mod adversary;
mod inference;
mod subscribers;
mod tenant;

use super::lab::Lab;
use super::part::Part;
use super::row::{Better, Case};
use super::suite::{Bench, BenchBudget, Request};
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::deployment::Tenant;
use harmonaize_testkit::job::printed;
use harmonaize_testkit::topology::{Topology, racks_with_unmanaged_hosts};
use harmonaize_testkit::workspace;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Racks, hosts with agents in each, and spines; on each rack hangs one host more, without an agent.
const RACKS: usize = 2;
const HOSTS_A_RACK: usize = 4;
const SPINES: usize = 2;
const HOSTS: usize = RACKS * HOSTS_A_RACK;
/// Rate of every link in bits a second: what two cores forward over three switches with time to spare.
const RATE: u64 = 200_000_000;

/// The position of the tenant that fills links, beside the lab's own.
const BULK_TENANT: usize = 1;

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Budget {
    /// Rounds, each of all contestants in turn.
    pub rounds: usize,
}

/// What all parts work with.
type Suite = Bench<Budget>;

impl BenchBudget for Budget {
    const PARTS: &'static [Part<Suite>] = &[
        ("tenant", tenant::tenant),
        ("targets", inference::targets),
        ("inference", inference::inference),
        ("adversary", adversary::adversary),
        ("subscribers", subscribers::subscribers),
    ];

    fn new(request: &Request) -> Self {
        Self { rounds: request.rounds() }
    }

    fn smoke() -> Self {
        Self { rounds: 1 }
    }
}

fn case(case: &str, better: Better, bar: f64) -> Case {
    Case::new("cooperation", case, better, bar).of(0, HOSTS)
}

/// Runs an experiment of control's own tests, in virtual time; all that it printed, and the line with its figures.
fn experiment(test: &str, ignored: bool, environment: &[(&str, &str)]) -> Result<(String, String)> {
    let mut experiment = workspace::cargo();
    experiment.args(["test", "--quiet", "--release", "--package", "harmonaize-server", "--test", "state"]);
    experiment.args([test, "--", "--exact", "--nocapture"]);
    experiment.args(ignored.then_some("--ignored")).envs(environment.iter().copied());
    let text = printed(&mut experiment)?;
    let line = text.lines().find(|line| line.starts_with('{')).map(str::to_owned);
    let line = line.with_context(|| format!("no figures in: {text}"))?;
    Ok((text, line))
}

impl Suite {
    /// An error when a signal has asked to stop.
    fn go_on(&self) -> Result<()> {
        ensure!(!self.stop.load(Ordering::Relaxed), "interrupted");
        Ok(())
    }

    /// The fabric with agents; `control` and `agent` are more lines for their configurations.
    fn lab(&self, control: &str, agent: &str) -> Result<Lab> {
        let rate = format!("{}Mbit/s", RATE / 1_000_000);
        let topology = racks_with_unmanaged_hosts(RACKS, HOSTS_A_RACK, SPINES, &rate);
        Lab::on(Topology::parse(&topology)?, self.binaries.clone(), Arc::clone(&self.stop), |mut setup| {
            setup.tenants.push(Tenant { name: "b".to_owned(), user: 3002 });
            setup.unmanaged_hosts = RACKS;
            setup.control += control;
            setup.agent += agent;
            setup.measure(&rate);
            setup
        })
    }
}
