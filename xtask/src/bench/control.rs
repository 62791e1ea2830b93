//! Suite control: from what happens on the wire to better plans for what runs, on two racks and two spines with real agents.
//!
//! Links all have one rate: four hosts a rack against two uplinks are oversubscribed twofold. On each rack hangs one host more,
//! without an agent, whose traffic nobody announces.

mod job;
mod onset;
mod order;
mod scale;
mod withdrawn;

use super::lab::Lab;
use super::part::{self, Outcome, Part};
use super::row::{Better, Case};
use crate::plans::{self, Plan};
use crate::topology::{Topology, racks_and_strangers};
use crate::workspace::Binaries;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
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
pub struct Effort {
    /// Onsets of congestion.
    pub onsets: usize,
    /// Rounds of the other parts.
    pub rounds: usize,
    /// For how long a bandwidth or a period is taken.
    pub span: Duration,
    /// For how long periodic jobs run before that: control learns their rhythm meanwhile.
    pub learning: Duration,
    /// Parts alone: onset, order, stagger, drain, cut, planner; all if empty.
    pub only: Vec<String>,
    /// Where pictures are drawn.
    pub figures: Option<PathBuf>,
}

impl Effort {
    /// For figures.
    pub fn new(onsets: usize, only: &[String]) -> Self {
        let (span, learning) = (Duration::from_secs(2), Duration::from_secs(8));
        Self { onsets, rounds: 5, span, learning, only: only.to_vec(), figures: None }
    }

    /// Shows that everything runs, and measures nothing worth a figure. The planner's part needs a build of its own.
    pub fn smoke(only: &[String]) -> Self {
        let short = ["onset", "order", "stagger", "drain", "cut"].map(str::to_owned).to_vec();
        let only = if only.is_empty() { short } else { only.to_vec() };
        let (span, learning) = (Duration::from_millis(500), Duration::from_secs(2));
        Self { onsets: 1, rounds: 1, span, learning, only, figures: None }
    }
}

/// What all parts work with.
struct Suite {
    effort: Effort,
    binaries: Binaries,
    stop: Arc<AtomicBool>,
}

const PARTS: &[Part<Suite>] = &[
    ("onset", onset::onset),
    ("order", order::order),
    ("stagger", order::stagger),
    ("drain", withdrawn::drain),
    ("cut", withdrawn::cut),
    ("planner", scale::planner),
];

/// Names of parts, for `--only`.
pub fn parts() -> Vec<&'static str> {
    part::names(PARTS)
}

/// Measures.
pub fn run(effort: Effort, binaries: Binaries, stop: Arc<AtomicBool>) -> Outcome {
    let suite = Suite { effort, binaries, stop };
    part::run(&suite, PARTS, &suite.effort.only)
}

fn case(case: String, better: Better, bar: f64) -> Case {
    Case { suite: "control", case, size: 0, ranks: HOSTS, better, bar }
}

impl Suite {
    /// The fabric with agents; `control` are more lines for control's configuration.
    fn lab(&self, control: &str) -> Result<Lab> {
        let rate = format!("{}Mbit/s", RATE / 1_000_000);
        let topology = racks_and_strangers(RACKS, HOSTS_A_RACK, SPINES, &rate);
        Lab::on(Topology::parse(&topology)?, self.binaries.clone(), Arc::clone(&self.stop), |mut setup| {
            setup.strangers = RACKS;
            setup.control += control;
            setup.measure(&rate);
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
    let plan =
        plan_when(lab, name, "with known paths", |plan| plan.known() && !plan.crossed("spine").is_empty())?;
    let spine = plan.crossed("spine").first().context("no spine")?.to_string();
    Ok((plan, spine))
}
