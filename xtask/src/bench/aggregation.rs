//! Suite aggregation: what a core does as an aggregator, beside what the machine can; and AllReduces by an aggregator against the same
//! hosts' own.

use super::lab::{Lab, Measured};
use super::part::{self, Outcome, Part};
use super::row::{Better, Case, Row, median};
use crate::topology::star_with_aggregator;
use crate::workspace::Binaries;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

const MIB: u64 = 1 << 20;

/// How much is measured.
#[derive(Debug, Clone)]
pub struct Effort {
    /// Rounds in which everything has its turn.
    pub rounds: usize,
    /// Milliseconds of each turn.
    pub turn: u64,
    /// Bytes of a large operation.
    pub large: u64,
    /// Parts alone: core, large, small; all if empty.
    pub only: Vec<String>,
}

impl Effort {
    /// For figures.
    pub fn new(rounds: usize, only: &[String]) -> Self {
        Self { rounds, turn: 100, large: 64 * MIB, only: only.to_vec() }
    }

    /// Shows that everything runs, and measures nothing worth a figure.
    pub fn smoke(only: &[String]) -> Self {
        Self { rounds: 1, turn: 5, large: 4 * MIB, only: only.to_vec() }
    }
}

struct Suite {
    effort: Effort,
    binaries: Binaries,
    stop: Arc<AtomicBool>,
}

const PARTS: &[Part<Suite>] = &[("core", core), ("large", large), ("small", small)];

/// Measures.
pub fn run(effort: Effort, binaries: Binaries, stop: Arc<AtomicBool>) -> Outcome {
    let suite = Suite { effort, binaries, stop };
    part::run(&suite, PARTS, &suite.effort.only)
}

/// What `aggregator` prints for a size of chunk.
#[derive(Debug, Deserialize)]
struct Figures {
    bytes: u64,
    kernel_ns: Vec<f64>,
    aggregator_ns: Vec<f64>,
    ceiling: Vec<f64>,
    sum_loop: Vec<f64>,
}

/// The sum loop against the ceiling of sums; packets a second, in and as many out, beside those of the kernel alone.
fn core(suite: &Suite) -> Result<Vec<Row>> {
    let (rounds, turn) = (suite.effort.rounds.to_string(), suite.effort.turn.to_string());
    let mut command = Command::new(suite.binaries.path("aggregator")?);
    command.args(["--rounds", &rounds, "--turn", &turn]).stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().context("cannot start the program `aggregator`")?;
    ensure!(output.status.success(), "the program `aggregator` ended with {}", output.status);
    let printed = String::from_utf8_lossy(&output.stdout);
    let figures: Vec<Figures> = printed.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(!figures.is_empty(), "no figures");
    let mut rows = Vec::new();
    for Figures { bytes, kernel_ns, aggregator_ns, ceiling, sum_loop } in figures {
        let middle = |values: &[f64]| median(values).unwrap_or(f64::NAN);
        let (kernel, own) = (middle(&kernel_ns), middle(&aggregator_ns));
        eprintln!(
            "chunks of {bytes} bytes: {:.0} packets a second and core through the kernel and the aggregator, {:.0} through the kernel alone ({kernel:.0} ns), {:.0} through the aggregator alone ({own:.0} ns)",
            1e9 / (kernel + own),
            1e9 / kernel,
            1e9 / own,
        );
        let case = Case {
            suite: "aggregation",
            case: format!("sum loop, chunks of {bytes} bytes: GB/s of parts"),
            size: bytes,
            ranks: 1,
            better: Better::More,
            bar: 0.5,
        };
        let rates = |values: &[f64]| values.iter().map(|rate| rate / 1e9).collect::<Vec<f64>>();
        rows.push(case.compare(&rates(&sum_loop), &rates(&ceiling), "one pass over a long vector"));
    }
    Ok(rows)
}

/// 4 hosts at 1 Gbit/s, a large operation.
fn large(suite: &Suite) -> Result<Vec<Row>> {
    against_hosts(suite, 4, "0us", &[(suite.effort.large, 1.42)])
}

/// 8 hosts at 1 Gbit/s, half a millisecond on each host's link and none at the aggregator.
fn small(suite: &Suite) -> Result<Vec<Row>> {
    against_hosts(suite, 8, "500us", &[(24 << 10, 1.4), (4 << 10, 1.0)])
}

/// Operations of these sizes where there is an aggregator, against the same hosts without; each size with its bar.
fn against_hosts(suite: &Suite, hosts: usize, delay: &str, sizes: &[(u64, f64)]) -> Result<Vec<Row>> {
    let topology = star_with_aggregator(hosts, 1000, delay);
    let alone = topology.split("[[aggregator]]").next().unwrap_or_default();
    let by_aggregator = suite.times(&topology, hosts, sizes, true)?;
    let by_hosts = suite.times(alone, hosts, sizes, false)?;
    let mut rows = Vec::new();
    for (size, bar) in sizes {
        let of = |measured: &[Measured]| {
            let found = measured.iter().find(|measured| measured.bytes == *size);
            found.map(|found| found.times_us.clone()).with_context(|| format!("no figure for {size} bytes"))
        };
        let case = Case {
            suite: "aggregation",
            case: format!("allreduce f32, {hosts} hosts, 1 Gbit/s, {delay} a link: us"),
            size: *size,
            ranks: hosts,
            better: Better::Less,
            bar: 1.0 / bar,
        };
        rows.push(case.compare(&of(&by_aggregator)?, &of(&by_hosts)?, "the same by the hosts alone"));
    }
    Ok(rows)
}

impl Suite {
    /// Times of operations on a fabric; an error where an aggregator that is there has summed nothing.
    fn times(
        &self,
        topology: &str,
        hosts: usize,
        sizes: &[(u64, f64)],
        aggregated: bool,
    ) -> Result<Vec<Measured>> {
        let mut lab = Lab::on(topology, self.binaries.clone(), Arc::clone(&self.stop), |setup| setup)?;
        let list = sizes.iter().map(|(size, _)| size.to_string()).collect::<Vec<_>>().join(",");
        let iterations = (4 * self.effort.rounds).to_string();
        let everyone: Vec<usize> = (0..hosts).collect();
        let arguments =
            ["--collective", "allreduce", "--bytes", &list, "--warmup", "2", "--iterations", &iterations];
        let measured = lab.ours(&everyone, &arguments)?;
        if aggregated {
            lab.deployment().wait_until("the aggregator has summed nothing", |this| {
                let fabric = this.ask(&["topology"])?;
                let tenants = fabric.pointer("/aggregators/0/report/tenants").and_then(Value::as_array);
                let sums = |tenant: &Value| tenant.get("sums").and_then(Value::as_u64).unwrap_or(0);
                Ok(tenants.is_some_and(|tenants| tenants.iter().any(|tenant| sums(tenant) > 0)).then_some(()))
            })?;
        }
        Ok(measured)
    }
}
