//! Suite control, on two racks and two spines with real agents. It measures from what happens on the wire to better plans
//! for what runs.
//!
//! Links all have one rate: four hosts a rack against two uplinks are oversubscribed twofold. On each rack hangs one host more,
//! without an agent, whose traffic nobody announces.

mod job;
mod onset;
mod order;
mod page;
mod scale;
mod withdrawn;

use super::findings::SOCKET;
use super::lab::Lab;
use super::part::Part;
use super::row::{Better, Case};
use super::suite::{Bench, BenchBudget, Request};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::plans::{self, Plan};
use harmonaize_testkit::topology::{Topology, racks_with_unmanaged_hosts};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Racks, hosts with agents in each, and spines.
const RACKS: usize = 2;
const HOSTS_A_RACK: usize = 4;
const SPINES: usize = 2;
const HOSTS: usize = RACKS * HOSTS_A_RACK;
/// Rate of every link in bits a second: what two cores forward over three switches with time to spare.
const RATE: u64 = 200_000_000;
/// How long control may take for what is asked of it before a part fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Budget {
    /// Onsets of congestion.
    pub onsets: usize,
    /// Rounds of the other parts.
    pub rounds: usize,
    /// For how long a bandwidth or a period is taken.
    pub span: Duration,
    /// For how long periodic jobs run before that: control learns their rhythm meanwhile.
    pub learning: Duration,
}

/// What all parts work with.
type Suite = Bench<Budget>;

impl BenchBudget for Budget {
    const PARTS: &'static [Part<Suite>] = &[
        ("onset", onset::onset),
        ("order", order::order),
        ("stagger", order::stagger),
        ("drain", withdrawn::drain),
        ("cut", withdrawn::cut),
        ("planner", scale::planner),
        ("page", page::page),
    ];
    const SMOKE: &'static [&'static str] = &["onset", "order", "stagger", "drain", "cut"];

    fn new(request: &Request) -> Self {
        Self {
            onsets: request.rounds_of((30, 30)),
            rounds: 5,
            span: Duration::from_secs(2),
            learning: Duration::from_secs(8),
        }
    }

    fn smoke() -> Self {
        Self { onsets: 1, rounds: 1, span: Duration::from_millis(500), learning: Duration::from_secs(2) }
    }
}

fn case(case: String, better: Better, bar: f64) -> Case {
    Case::new("control", case, better, bar).of(0, HOSTS)
}

impl Suite {
    /// The fabric with agents; `control` are more lines for control's configuration.
    fn lab(&self, control: &str) -> Result<Lab> {
        let rate = format!("{}Mbit/s", RATE / 1_000_000);
        let topology = racks_with_unmanaged_hosts(RACKS, HOSTS_A_RACK, SPINES, &rate);
        Lab::on(Topology::parse(&topology)?, self.binaries.clone(), Arc::clone(&self.stop), |mut setup| {
            setup.unmanaged_hosts = RACKS;
            setup.control += control;
            setup.measure(&rate);
            let shown = format!("interval = \"3ms\"\nsocket = \"{{folder}}/{SOCKET}\"\n");
            setup.agent = setup.agent.replace("interval = \"3ms\"\n", &shown);
            setup
        })
    }
}

/// The plan of the job of that name, once it is as `wanted`.
fn plan_when(lab: &mut Lab, name: &str, what: &str, wanted: impl Fn(&Plan) -> bool) -> Result<Plan> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        lab.check()?;
        let plans = plans::plans(lab.deployment())?;
        let plan = plans.iter().find(|plan| plan.name == name);
        if let Some(plan) = plan.filter(|plan| wanted(plan)) {
            return Ok(plan.clone());
        }
        if Instant::now() > deadline {
            bail!("{name} has no plan {what} after {PATIENCE:?}: {plan:?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The plan of a job and a spine that it crosses, once control knows all its paths.
fn spine_of(lab: &mut Lab, name: &str) -> Result<(Plan, String)> {
    let plan = plan_when(lab, name, "with known paths", |plan| {
        plan.paths_known() && !plan.crossed("spine").is_empty()
    })?;
    let spine = plan.crossed("spine").first().context("no spine")?.to_string();
    Ok((plan, spine))
}
