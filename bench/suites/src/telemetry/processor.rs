//! What telemetry costs in processor time of the agents' threads, an operation at a time. Other load on the machine moves
//! that less than it moves bandwidth.

use super::{HOSTS, Suite, Telemetry};
use crate::figures::summary;
use crate::lab::Lab;
use crate::row::{Case, Row};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::Path;

/// Messages of these bytes, and how many operations are a run. A run is a second and more, since who has been idle has saved up processor
/// time that it spends at first.
const SIZES: [(u64, usize); 2] = [(128 << 10, 4000), (4 << 20, 160)];
/// The most that telemetry may add, in percent.
const LIMIT: f64 = 3.0;

/// What the threads of a name have taken.
#[derive(Debug, Clone, Copy, Default)]
struct Taken {
    /// Processor time, in nanoseconds.
    time_ns: u64,
    /// How often they slept.
    sleeps: u64,
}

/// Runs AllReduce over unshaped links with telemetry and without, in turn, and compares what the agents took.
pub(super) fn processor(suite: &Suite) -> Result<Vec<Row>> {
    let modes = [
        ("off", Telemetry::Off),
        ("programs", Telemetry::Programs),
        ("packets", Telemetry::Packets),
        ("on", Telemetry::On),
    ];
    let mut labs = Vec::new();
    for (name, telemetry) in modes {
        labs.push((name, suite.unshaped(telemetry)?));
    }
    let mut rows = Vec::new();
    for (bytes, operations) in SIZES {
        let mut figures: BTreeMap<(&str, String), Vec<f64>> = BTreeMap::new();
        for round in 0..suite.budget.pairs {
            for which in 0..labs.len() {
                let place = (which + round) % labs.len();
                let Some((name, lab)) = labs.get_mut(place) else { continue };
                let (threads, wall) = run(lab, bytes, operations)?;
                let each = operations as f64;
                let mut note = |what: &str, value: f64| {
                    figures.entry((name, what.to_owned())).or_default().push(value);
                };
                let all: u64 = threads.values().map(|taken| taken.time_ns).sum();
                note("all us", all as f64 / each / 1e3);
                note("wall us", wall);
                for (thread, taken) in &threads {
                    note(&format!("{thread} us"), taken.time_ns as f64 / each / 1e3);
                    note(&format!("{thread} sleeps"), taken.sleeps as f64 / each);
                }
            }
        }
        for ((name, what), values) in &figures {
            eprintln!("processor, {bytes} bytes, {name}: {what} an operation {}", summary(values));
        }
        let of = |name: &'static str| figures.get(&(name, "all us".to_owned())).cloned().unwrap_or_default();
        let added: Vec<f64> =
            of("on").iter().zip(of("off")).map(|(on, off)| (on / off - 1.0) * 100.0).collect();
        let case = Case::less(
            "telemetry",
            "allreduce f32, unshaped: % that telemetry adds to the agents' processor time",
            1.0,
        )
        .of(bytes, HOSTS);
        rows.push(case.limit(&added, LIMIT));
    }
    Ok(rows)
}

/// One run: what the agents' threads took, by name, and microseconds of an operation at the median.
fn run(lab: &mut Lab, bytes: u64, operations: usize) -> Result<(BTreeMap<String, Taken>, f64)> {
    let before = taken(lab)?;
    let wall = super::cost::operation(lab, bytes, operations)?;
    let mut after = taken(lab)?;
    for (name, taken) in &mut after {
        let earlier = before.get(name).copied().unwrap_or_default();
        taken.time_ns = taken.time_ns.saturating_sub(earlier.time_ns);
        taken.sleeps = taken.sleeps.saturating_sub(earlier.sleeps);
    }
    Ok((after, wall))
}

/// What the threads of all agents have taken so far, by their names.
fn taken(lab: &mut Lab) -> Result<BTreeMap<String, Taken>> {
    let mut all: BTreeMap<String, Taken> = BTreeMap::new();
    for host in 0..HOSTS {
        let tasks = Path::new("/proc").join(lab.deployment().agent(host)?.id().to_string()).join("task");
        for task in std::fs::read_dir(&tasks).with_context(|| format!("cannot read {}", tasks.display()))? {
            let task = task?.path();
            let read = |file: &str| std::fs::read_to_string(task.join(file));
            // A thread may end meanwhile.
            let (Ok(name), Ok(times), Ok(status)) = (read("comm"), read("schedstat"), read("status")) else {
                continue;
            };
            let entry = all.entry(name.trim().to_owned()).or_default();
            entry.time_ns += first(&times).unwrap_or_default();
            let sleeps = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            entry.sleeps += sleeps.and_then(first).unwrap_or_default();
        }
    }
    Ok(all)
}

fn first(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse().ok()
}
