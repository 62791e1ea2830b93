//! What protected state costs a training between hosts that agents copy and send in its gaps, and what a restore takes.

use crate::lab::{Lab, options};
use crate::row::{Case, Row};
use crate::suite::Request;
use anyhow::{Context, Result};
use harmonaize_testkit::workspace::Binaries;
use serde::Deserialize;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const HOSTS: usize = 4;
/// Bytes that a step reduces, and of each rank's state.
const BYTES: u64 = 4 << 20;
const STATE: u64 = 16 << 20;
/// Microseconds that a step computes, and steps in a row: as usual, and in a smoke run.
const COMPUTE_US: u64 = 30_000;
const STEPS: [u64; 2] = [50, 3];
/// What the AllReduces may take of what they take without protection, and a restore of what a store takes.
const REDUCED: f64 = 1.02;
const RESTORED: f64 = 0.1;
/// How long a run may take.
const LIMIT: Duration = Duration::from_secs(300);

/// What rank 0 prints.
#[derive(Deserialize)]
struct Protected {
    plain_us: f64,
    beside_us: f64,
    seal_us: f64,
    sealed: f64,
    restored_seconds: f64,
}

/// The rows. Steps with protection and without take turns in each round. The store is a TCP stream from one host to another over a link of
/// 1 Gbit/s; all ranks' states come from it, as without replicas.
pub(crate) fn measure(request: &Request, binaries: &Binaries, stop: &Arc<AtomicBool>) -> Result<Vec<Row>> {
    let (rounds, steps) = match request.smoke {
        true => (request.rounds_of((1, 1)), STEPS[1]),
        false => (request.rounds(), STEPS[0]),
    };
    let mut store = Lab::build(2, "1Gbit/s", binaries.clone(), Arc::clone(stop))?;
    let states = STATE * HOSTS as u64;
    let stored =
        (0..rounds).map(|_| Ok(states as f64 / store.stream(states)?)).collect::<Result<Vec<_>>>()?;
    store.end().context("the lab of the store did not end in order")?;
    let mut lab = Lab::build(HOSTS, "10Gbit/s", binaries.clone(), Arc::clone(stop))?;
    let hosts: Vec<usize> = (0..HOSTS).collect();
    let numbers =
        options(&[("--bytes", BYTES), ("--state", STATE), ("--compute-us", COMPUTE_US), ("--steps", steps)]);
    let arguments = [vec!["protected".to_owned()], numbers].concat();
    let mut found = Vec::new();
    for round in 1..=rounds {
        let one: Protected = lab.figures("calls", &hosts, &arguments, LIMIT)?.pop().context("no figure")?;
        eprintln!(
            "run {round}/{rounds}: AllReduce {:.0} us, and {:.0} beside protection; restored in {:.3} s",
            one.plain_us, one.beside_us, one.restored_seconds
        );
        found.push(one);
    }
    lab.end().context("the lab did not end in order")?;
    Ok(rows(&found, &stored))
}

fn rows(found: &[Protected], stored: &[f64]) -> Vec<Row> {
    let case = |what: &str, bar: f64| {
        let state = STATE >> 20;
        let what = format!(
            "state of {state} MiB a rank protected, {HOSTS} hosts, 10 Gbit/s, steps of 30 ms: {what}"
        );
        Case::less("service", what, bar).of(BYTES, HOSTS)
    };
    let of = |figure: fn(&Protected) -> f64| found.iter().map(figure).collect::<Vec<f64>>();
    let (beside, plain) = (of(|one| one.beside_us), of(|one| one.plain_us));
    vec![
        case("AllReduce p50 us", REDUCED).compare(&beside, &plain, "without protection"),
        case("us that a seal holds the job, median", 1.0).state(&of(|one| one.seal_us)),
        case("% of the steps not sealed", 1.0).state(&of(|one| 100.0 * (1.0 - one.sealed))),
        case("s to restore, one rank anew", RESTORED).compare(
            &of(|one| one.restored_seconds),
            stored,
            "all from a store at 1 Gbit/s",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_of_what_it_costs_and_takes() {
        let one = |beside_us, restored_seconds| Protected {
            plain_us: 1000.0,
            beside_us,
            seal_us: 100.0,
            sealed: 0.5,
            restored_seconds,
        };
        let passes = |beside_us, seconds| {
            let rows = rows(&[one(beside_us, seconds)], &[1.0]);
            assert!(rows[1].pass.is_none() && rows[2].ours == Some(50.0));
            [rows[0].passed(), rows[3].passed()]
        };
        assert_eq!(passes(1019.0, 0.099), [true, true]);
        assert_eq!(passes(1021.0, 0.101), [false, false]);
    }
}
