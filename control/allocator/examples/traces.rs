//! Runs a policy over workloads in virtual time, and prints a line of JSON for each.
#![allow(clippy::print_stdout)] // what it is for

use harmonaize_allocator::{
    Allocation, Artifact, Fifo, Gavel, Inventory, Job, LeastAttained, MarketPolicy, Model, Outcome, Policy,
    PolicyError, Pollux, Round, Settings, Sia, SimulationError, Synthetic, finish_time_ratios, simulate,
};
use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

const USAGE: &str = "traces POLICY WORKLOADS [SCALE ROUNDS | fair]
  POLICY     fifo, las, gavel, sia, pollux or market
  WORKLOADS  a folder of the artifact's workloads, such as saturn or scale/scale_32x/workload-1, or seed:NUMBER for one of our own
  SCALE      so many times the hosts, for ROUNDS rounds alone; of our own, so many times the jobs too, which arrive so many times as often
  fair       also finish-time fairness, for which each job is run alone
The artifact's folder sia-simulator stands in HARMONAIZE_SIA.";

/// The most rounds of a run to the end.
const ROUNDS: usize = 100_000;

/// How long each decision took, in milliseconds.
struct Timed {
    policy: Box<dyn Policy>,
    times: Vec<f64>,
}

impl Policy for Timed {
    fn name(&self) -> &'static str {
        self.policy.name()
    }

    fn needs_tuned_speeds(&self) -> bool {
        self.policy.needs_tuned_speeds()
    }

    fn allocate(&mut self, round: &Round<'_>) -> Result<Vec<Option<Allocation>>, PolicyError> {
        let began = Instant::now();
        let given = self.policy.allocate(round);
        self.times.push(began.elapsed().as_secs_f64() * 1e3);
        given
    }
}

/// What a run is of.
struct World {
    inventory: Inventory,
    models: Vec<Model>,
    workloads: Vec<(String, Vec<Job>)>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (policy, workloads, scale, rounds, fair): (_, _, u32, usize, bool) = match arguments.as_slice() {
        [policy, workloads] => (policy, workloads, 1, ROUNDS, false),
        [policy, workloads, fair] if fair == "fair" => (policy, workloads, 1, ROUNDS, true),
        [policy, workloads, scale, rounds] => (policy, workloads, scale.parse()?, rounds.parse()?, false),
        _ => return Err(USAGE.into()),
    };
    let world = match workloads.strip_prefix("seed:") {
        Some(seed) => {
            let made = Synthetic::new(seed.parse()?, 160 * scale as usize, 180.0 / f64::from(scale))?;
            let workloads = vec![(workloads.clone(), made.jobs)];
            World { inventory: made.inventory, models: made.models, workloads }
        }
        None => recorded(workloads)?,
    };
    let inventory = world.inventory.scaled(scale)?;
    for (name, jobs) in &world.workloads {
        let (make, round, adapts_batch) = named(policy).ok_or(USAGE)?;
        let policy = make();
        let settings = Settings { round, adapts_batch, rounds };
        let mut timed = Timed { policy, times: Vec::new() };
        let outcome = match simulate(&inventory, &world.models, jobs, &mut timed, settings) {
            Ok(outcome) => outcome,
            // So many rounds are all that was asked for.
            Err(SimulationError::Endless { rounds, .. }) if rounds < ROUNDS => {
                Outcome { jobs: Vec::new(), rounds }
            }
            Err(error) => return Err(error.into()),
        };
        let ratios = if fair {
            let models = &world.models;
            finish_time_ratios(&inventory, models, (jobs.as_slice(), &outcome), &make, settings)?
        } else {
            Vec::new()
        };
        print(name, jobs.len(), &outcome, &mut timed, &fairness(&ratios));
    }
    Ok(())
}

/// Makes a policy.
type Make = fn() -> Box<dyn Policy>;

/// How a policy is made, the round in seconds that its authors use, and whether jobs choose their batches.
fn named(policy: &str) -> Option<(Make, u32, bool)> {
    let tuned = |make: Make| Some((make, 360, false));
    let adapting = |make: Make| Some((make, 60, true));
    match policy {
        "fifo" => tuned(|| Box::new(Fifo)),
        "las" => tuned(|| Box::new(LeastAttained)),
        "gavel" => tuned(|| Box::new(Gavel::default())),
        "sia" => adapting(|| Box::new(Sia::default())),
        "pollux" => adapting(|| Box::new(Pollux::default())),
        "market" => adapting(|| Box::new(MarketPolicy::default())),
        _ => None,
    }
}

/// Fields of the line on finish-time fairness; none where it was not asked for.
fn fairness(ratios: &[Option<f64>]) -> String {
    let known: Vec<f64> = ratios.iter().copied().flatten().collect();
    if known.is_empty() {
        return String::new();
    }
    let mean = known.iter().sum::<f64>() / known.len() as f64;
    let most = known.iter().copied().fold(0.0, f64::max);
    let unknown = ratios.len() - known.len();
    format!(",\"fairness_mean\":{mean:.4},\"fairness_max\":{most:.4},\"fairness_unknown\":{unknown}")
}

fn print(name: &str, jobs: usize, outcome: &Outcome, timed: &mut Timed, fairness: &str) {
    timed.times.sort_by(f64::total_cmp);
    let at = |part: f64| {
        let place = (timed.times.len().saturating_sub(1) as f64 * part).round() as usize;
        timed.times.get(place).copied().unwrap_or(0.0)
    };
    println!(
        "{{\"workload\":\"{name}\",\"policy\":\"{}\",\"jobs\":{jobs},\"rounds\":{},\"completion_hours\":{:.4},\"makespan_hours\":{:.3},\
         \"restarts\":{:.3},\"accelerator_hours\":{:.3},\"policy_p50_ms\":{:.3},\"policy_p95_ms\":{:.3},\"policy_max_ms\":{:.1}{fairness}}}",
        timed.name(),
        outcome.rounds,
        outcome.mean_completion_hours(),
        outcome.makespan_hours(),
        outcome.mean_restarts(),
        outcome.mean_accelerator_hours(),
        at(0.5),
        at(0.95),
        at(1.0),
    );
}

/// The artifact's workloads whose paths begin so.
fn recorded(workloads: &str) -> Result<World, Box<dyn Error>> {
    let folder = std::env::var("HARMONAIZE_SIA").map_err(|_| USAGE)?;
    let root = Path::new(&folder);
    let start = format!("workloads/{workloads}");
    let mut files = BTreeMap::new();
    read(root, root, &mut files)?;
    files.retain(|path, _| path.starts_with("traces/") || path.starts_with(&start));
    let artifact = Artifact::parse(&files)?;
    let workloads: Vec<(String, Vec<Job>)> = artifact
        .workloads
        .into_iter()
        .map(|(path, jobs)| (path.trim_start_matches("workloads/").trim_end_matches(".csv").to_owned(), jobs))
        .collect();
    if workloads.is_empty() {
        return Err(format!("{folder} has no {start}").into());
    }
    Ok(World { inventory: artifact.inventory, models: artifact.models, workloads })
}

/// All tables below a folder, by path.
fn read(root: &Path, folder: &Path, files: &mut BTreeMap<String, String>) -> Result<(), Box<dyn Error>> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            read(root, &path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "csv") {
            let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
            files.insert(name, std::fs::read_to_string(&path)?);
        }
    }
    Ok(())
}
