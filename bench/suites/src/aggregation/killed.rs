//! Part killed: how long an operation takes in which the aggregator is killed, early, in the middle or late.

use super::fairness::Steady;
use super::{JUMBO, LIMIT, Star, Suite};
use crate::lab::Lab;
use crate::row::{Better, Case, Row, median};
use anyhow::{Context, Result, ensure};
use harmonaize_testkit::clock::monotonic_ns;
use harmonaize_testkit::topology::{Topology, star_with_aggregator};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const HOSTS: usize = 4;
/// Of each host's link, Mbit/s.
const RATE: u64 = 250;
/// For how long an operation may go on longer than the hosts' own, us.
const TAKE_OVER: f64 = 200_000.0;
/// When it is killed: after these parts of the least time that the operation takes.
const AFTER: [(&str, f64); 3] = [("early", 0.1), ("in the middle", 0.5), ("late", 0.9)];
/// How long tenants may take to join.
const JOIN: Duration = Duration::from_secs(6);

/// 4 hosts, a large operation every so often; in the second the aggregator is killed. What that one takes, against the hosts' own and what a
/// takeover may cost. `steady` checks every result.
pub(super) fn killed(suite: &Suite) -> Result<Vec<Row>> {
    let star = Star { hosts: HOSTS, rate: RATE, delay: "0us", mtu: JUMBO, faults: None };
    let topology = star_with_aggregator(HOSTS, RATE, "0us");
    let alone = topology.split("[[aggregator]]").next().unwrap_or_default();
    let size = suite.budget.large;
    let by_hosts = suite.times(alone, star, &[(size, 1.0)], false)?.of(size)?;
    let usual = median(&by_hosts).context("nothing was timed")?;
    let mut rows = Vec::new();
    for (when, after) in AFTER {
        let mut took = Vec::new();
        for _ in 0..suite.budget.rounds {
            took.push(killed_after(suite, &topology, after, usual)?);
        }
        eprintln!("killed {when}: {took:.0?} us, by the hosts alone {usual:.0} us");
        let case = Case {
            suite: "aggregation",
            case: format!("allreduce f32, {HOSTS} hosts, {RATE} Mbit/s, the aggregator killed {when}: us"),
            size,
            ranks: HOSTS,
            better: Better::Less,
            bar: 1.0,
        };
        rows.push(case.compare(&took, &[usual + TAKE_OVER], "200 ms more than the hosts alone"));
    }
    Ok(rows)
}

/// What the operation took in which the aggregator was killed, us.
fn killed_after(suite: &Suite, topology: &str, after: f64, usual: f64) -> Result<f64> {
    let fabric = Topology { mtu: JUMBO, forwards: true, ..Topology::parse(topology)? };
    let mut lab = Lab::on(fabric, suite.binaries.clone(), Arc::clone(&suite.stop), |setup| setup)?;
    let bytes = suite.budget.large;
    // Each ends before the next begins, by whomever it is done.
    let every = (2.0 * usual) as u64 + 400_000;
    let from = monotonic_ns()? + u64::try_from(JOIN.as_nanos())?;
    let options = [
        ("--bytes", bytes),
        ("--in-flight", 1),
        ("--every-us", every),
        ("--from-ns", from),
        ("--until-ns", from + 1500 * every),
    ];
    let arguments: Vec<String> =
        options.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]).collect();
    let job = lab.start("steady", &(0..HOSTS).collect::<Vec<_>>(), &arguments)?;
    let least_ns = bytes as f64 * 8e3 / RATE as f64;
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

/// What the operation took that was under way at a time and not all the aggregator's, us; those before it were.
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
