//! Part killed: how long an operation takes in which the aggregator is killed, early, in the middle or late.

use super::{JUMBO, LIMIT, STAR, Suite, without_aggregator};
use crate::lab::{Lab, options};
use crate::row::{Case, Row};
use crate::runs::interleave;
use crate::steady::Steady;
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::clock::monotonic_ns;
use harmonaize_testkit::topology::{Topology, star_with_aggregator};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// For how long an operation may go on longer than the hosts' own, us.
const TAKE_OVER: f64 = 200_000.0;
/// When it is killed: after these parts of the least time that the operation takes.
const AFTER: [(&str, f64); 3] = [("early", 0.1), ("in the middle", 0.5), ("late", 0.9)];
/// How long tenants may take to join.
const JOIN: Duration = Duration::from_secs(6);

/// 4 hosts, a large operation every so often; in the second the aggregator is killed. What that one takes, against the hosts' own in the
/// same round and what a takeover may cost. `steady` checks every result.
pub(super) fn killed(suite: &Suite) -> Result<Vec<Row>> {
    let topology = star_with_aggregator(STAR.hosts, STAR.rate, STAR.delay);
    let size = suite.budget.large;
    let mut hosts = suite.fabric(without_aggregator(&topology), STAR, |setup| setup)?;
    let mut once = || Suite::one_run(&mut hosts, size);
    let usual = once()?;
    // The hosts alone, then the aggregator killed at each moment.
    let runs = interleave(suite.budget.rounds, 1 + AFTER.len(), |which| {
        match which.checked_sub(1).and_then(|moment| AFTER.get(moment)) {
            None => once(),
            Some((_, after)) => killed_after(suite, &topology, *after, usual),
        }
    })?;
    let (by_hosts, killed) = runs.split_first().context("no runs")?;
    let limits: Vec<f64> = by_hosts.iter().map(|time| time + TAKE_OVER).collect();
    let row = |((when, _), took): (&(&str, f64), &Vec<f64>)| {
        eprintln!("killed {when}: {took:.0?} us, by the hosts alone {by_hosts:.0?} us");
        let what = format!(
            "allreduce f32, {} hosts, {} Mbit/s, the aggregator killed {when}: us",
            STAR.hosts, STAR.rate
        );
        Case::less("aggregation", what, 1.0).of(size, STAR.hosts).compare(
            took,
            &limits,
            "200 ms more than the hosts alone",
        )
    };
    Ok(AFTER.iter().zip(killed).map(row).collect())
}

/// What the operation took in which the aggregator was killed, us.
fn killed_after(suite: &Suite, topology: &str, after: f64, usual: f64) -> Result<f64> {
    let fabric = Topology { mtu: JUMBO, forwards: true, ..Topology::parse(topology)? };
    let mut lab = Lab::on(fabric, suite.binaries.clone(), Arc::clone(&suite.stop), |setup| setup)?;
    let bytes = suite.budget.large;
    // Each ends before the next begins, by whomever it is done.
    let every = (2.0 * usual) as u64 + 400_000;
    let from = monotonic_ns()? + u64::try_from(JOIN.as_nanos())?;
    let arguments = options(&[
        ("--bytes", bytes),
        ("--in-flight", 1),
        ("--every-us", every),
        ("--from-ns", from),
        ("--until-ns", from + 1500 * every),
    ]);
    let job = lab.start("steady", &(0..STAR.hosts).collect::<Vec<_>>(), &arguments)?;
    let least_ns = bytes as f64 * 8e3 / STAR.rate as f64;
    let due = from + 1000 * every + (after * least_ns) as u64;
    while monotonic_ns()? < due {
        lab.check()?;
        let left = Duration::from_nanos(due.saturating_sub(monotonic_ns()?));
        std::thread::sleep(left.min(Duration::from_millis(10)));
    }
    let aggregator = lab.deployment().aggregator(0)?.id();
    let mut kill = Command::new("kill");
    ensure!(kill.args(["-9", &aggregator.to_string()]).status()?.success(), "it cannot be killed");
    let at = monotonic_ns()?;
    let steady: Vec<Steady> = lab.finish_without_check(job, LIMIT)?;
    spanning(steady.first().context("no figures")?, at)
}

/// How long the operation took that was under way at a time, in us. It is an error if the aggregator did all of
/// it, or if hosts did one before it.
fn spanning(steady: &Steady, at: u64) -> Result<f64> {
    let Steady { done_ns, took_us, aggregated, .. } = steady;
    let place = done_ns.partition_point(|done| *done < at);
    let of = |what: Option<&f64>| what.copied().context("none was under way when it was killed");
    let (took, done) = (of(took_us.get(place))?, done_ns.get(place).copied().unwrap_or_default());
    ensure!(done.saturating_sub((took * 1e3) as u64) < at, "none was under way when it was killed");
    let (before, killed) = aggregated.split_at_checked(place).context("no word on who did them")?;
    ensure!(place > 0 && before.iter().all(|by| *by), "hosts did operations before it was killed");
    ensure!(killed.first() == Some(&false), "the aggregator did all of the operation in which it was killed");
    Ok(took)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operation_of_the_kill_is_found() {
        let steady = |aggregated: [bool; 3]| Steady {
            bytes: 8,
            done_ns: vec![1_000_000, 3_000_000, 5_000_000],
            took_us: vec![500.0, 700.0, 900.0],
            aggregated: aggregated.to_vec(),
        };
        let killed = steady([true, false, false]);
        assert_eq!(spanning(&killed, 2_400_000).unwrap(), 700.0);
        for between in [1_500_000, 2_300_000, 3_500_000, 6_000_000] {
            assert!(spanning(&killed, between).is_err());
        }
        assert!(spanning(&killed, 800_000).is_err(), "nothing shows that it did anything");
        assert!(spanning(&steady([true, true, false]), 2_400_000).is_err());
        assert!(spanning(&steady([false, false, false]), 2_400_000).is_err());
    }
}
