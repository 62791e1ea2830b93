//! Operations of a tenant while something is done to the management network or to other tenants, and on protected links.

use super::{Trust, case};
use crate::lab::{Lab, options};
use crate::row::{Better, Row, median};
use crate::runs::interleave;
use crate::steady::{Interval, Steady, nanos};
use anyhow::{Context, Result, ensure};
use harmonaize_plan::Algorithm;
use harmonaize_testkit::clock::monotonic_ns;
use harmonaize_testkit::job::Job;
use std::time::Duration;

/// How links are protected, the reference first; and bytes of an AllReduce, with how many a run has.
const PROTECTIONS: [&str; 3] = ["none", "authenticated", "encrypted"];
const SIZES: [(u64, u64); 3] = [(1 << 10, 1000), (1 << 20, 200), (64 << 20, 10)];
const HOSTS: [usize; 4] = [0, 1, 2, 3];
const BYTES: u64 = 16 << 20;
/// What of the bandwidth before must be left while a host's way to control is cut.
const LEAST_BUSBW: f64 = 0.98;
/// No operation may fail: the limit lies below one.
const NONE: f64 = 0.5;
/// How long a job may take to join and to settle. The other limits are for an agent to come again, and for a
/// job to end.
const JOIN: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_secs(15);
const LIMIT: Duration = Duration::from_secs(60);
/// How often it is looked whether to go on.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// The tenant of the jobs.
const OWN: &str = "a";
/// A tenant that comes and goes, and its user on each host.
const COMES: &str = "c";
const USER: &str = "12345";

/// What became of a job beside which something happened.
struct Comparison {
    /// Of its operations, those that failed: it ends with the first.
    failed: f64,
    /// Bus bandwidth of each round: in the window before, and while it happened, bytes a second.
    busbw: [Vec<f64>; 2],
}

/// A host's management network is cut and joined again.
pub(super) fn cut(suite: &Trust) -> Result<Vec<Row>> {
    let (rounds, window) = (suite.rounds(), suite.seconds(60, 8));
    let mut lab = suite.lab(HOSTS.len(), |_| ())?;
    let host = lab.deployment_hosts().get(1).context("no host")?.name.clone();
    let job = steady(&mut lab, (2 * window + AGAIN) * u32::try_from(rounds)?)?;
    let mut windows = Vec::new();
    for round in 1..=rounds {
        let before = passes(&mut lab, window)?;
        lab.fabric().set_management(&host, false)?;
        let during = passes(&mut lab, window)?;
        ensure!(!has_session(&mut lab, &host)?, "{host} has its session with control although it is cut off");
        lab.fabric().set_management(&host, true)?;
        lab.deployment().wait_until_ready()?;
        eprintln!("run {round}/{rounds}: {host} was cut off from control for {window:?}");
        windows.push([before, during]);
    }
    let compared = compare(&mut lab, job, &windows)?;
    lab.end().context("the lab did not end in order")?;
    let what = format!("a host's way to control is cut for {} s", window.as_secs());
    Ok(compared.rows(&what, LEAST_BUSBW))
}

/// A tenant is added and removed again and again.
pub(super) fn tenants(suite: &Trust) -> Result<Vec<Row>> {
    let (rounds, window) = (suite.rounds(), suite.seconds(10, 2));
    let each = if suite.request.smoke { 5_u32 } else { 100 }.div_ceil(u32::try_from(rounds)?);
    let served = "[control_tenants]\nsockets = \"{folder}\"\n";
    let mut lab = suite.lab(HOSTS.len(), |setup| setup.agent += served)?;
    let job = steady(&mut lab, 2 * window * u32::try_from(rounds)? + AGAIN)?;
    let mut windows = Vec::new();
    for round in 1..=rounds {
        let before = passes(&mut lab, window)?;
        let from = monotonic_ns()?;
        for _ in 0..each {
            lab.deployment().harmonaize(&["tenants", "add", COMES, "--uid", USER])?;
            lab.deployment().wait_until("the tenant is not served", |this| {
                Ok((this.hosts_that_serve(COMES)? == HOSTS.len()).then_some(()))
            })?;
            passes(&mut lab, window / each / 2)?;
            lab.deployment().harmonaize(&["tenants", "remove", COMES])?;
            passes(&mut lab, window / each / 2)?;
        }
        windows.push([before, Interval(from, monotonic_ns()?)]);
        eprintln!("run {round}/{rounds}: a tenant came and went {each} times");
    }
    let times = rounds * each as usize;
    let compared = compare(&mut lab, job, &windows)?;
    lab.end().context("the lab did not end in order")?;
    Ok(compared.rows(&format!("another tenant is added and removed {times} times"), 0.0))
}

/// An AllReduce between two hosts whose links nothing shapes, by how links are protected.
pub(super) fn protection(suite: &Trust) -> Result<Vec<Row>> {
    let labs = PROTECTIONS.map(|protection| unshaped(suite, protection));
    let mut labs = labs.into_iter().collect::<Result<Vec<_>>>()?;
    let mut times = [const { [const { Vec::new() }; PROTECTIONS.len()] }; SIZES.len()];
    for ((bytes, operations), times) in SIZES.iter().zip(&mut times) {
        let operations = if suite.request.smoke { operations.div_ceil(10) } else { *operations };
        let arguments = options(&[("--bytes", *bytes), ("--warmup", 2), ("--iterations", operations)]);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let runs = interleave(suite.rounds(), labs.len(), |which| {
            let lab = labs.get_mut(which).context("no such lab")?;
            let measured = lab.ours(&[0, 1], &arguments)?;
            let middle =
                measured.first().and_then(|one| median(&one.times_us)).context("nothing was timed")?;
            let protection = PROTECTIONS.get(which).copied().unwrap_or_default();
            eprintln!("allreduce of {bytes} bytes, links {protection}: {middle:.1} us");
            Ok(middle)
        })?;
        times.iter_mut().zip(runs).for_each(|(times, runs)| *times = runs);
    }
    for lab in labs {
        lab.end().context("a lab did not end in order")?;
    }
    let rows = SIZES.iter().zip(&times).flat_map(|((bytes, _), [none, protected @ ..])| {
        PROTECTIONS.iter().skip(1).zip(protected).map(|(protection, times)| {
            let what = format!("allreduce f32, 2 hosts, unshaped, links {protection}: us");
            case(what, Better::Less, 1.0).stated().of(*bytes, 2).compare(times, none, "links none")
        })
    });
    Ok(rows.collect())
}

/// Two hosts, links of that protection; all three take the same algorithm.
fn unshaped(suite: &Trust, protection: &str) -> Result<Lab> {
    let lab = suite.lab(2, |setup| {
        setup.agent += &format!("[links]\nprotection = \"{protection}\"\n");
        setup.algorithms = vec![(OWN.to_owned(), Algorithm::Ring)];
    })?;
    lab.fabric().hosts().iter().try_for_each(|host| lab.fabric().set_rate(&host.name, None))?;
    Ok(lab)
}

/// Starts operations back to back for so long, beside the time that it takes to join.
fn steady(lab: &mut Lab, time: Duration) -> Result<Job> {
    let until = monotonic_ns()? + nanos(JOIN + time);
    let job = lab.start(
        "steady",
        &HOSTS,
        &options(&[("--bytes", BYTES), ("--in-flight", 1), ("--until-ns", until)]),
    )?;
    passes(lab, JOIN)?;
    Ok(job)
}

/// So much time passes, as long as nobody asks to stop and no program ends.
fn passes(lab: &mut Lab, time: Duration) -> Result<Interval> {
    let from = monotonic_ns()?;
    let until = from + nanos(time);
    loop {
        lab.check()?;
        let left = until.saturating_sub(monotonic_ns()?);
        if left == 0 {
            return Ok(Interval(from, until));
        }
        std::thread::sleep(CHECK_INTERVAL.min(Duration::from_nanos(left)));
    }
}

fn has_session(lab: &mut Lab, host: &str) -> Result<bool> {
    let status = lab.deployment().status()?;
    let agents =
        status.get("agents").and_then(|agents| agents.as_array()).context("status names no agents")?;
    let own = agents.iter().find(|agent| agent.get("host").is_some_and(|name| name == host));
    own.and_then(|agent| agent.get("connected")?.as_bool()).context("status does not name the host")
}

/// Waits for the job's end. `windows`: of each round, before and during.
fn compare(lab: &mut Lab, job: Job, windows: &[[Interval; 2]]) -> Result<Comparison> {
    let steady = match lab.finish::<Steady>(job, AGAIN * u32::try_from(windows.len())? + LIMIT) {
        Ok(figures) => figures.into_iter().next().context("no figures")?,
        Err(error) => {
            // Not the job's fault where the run was stopped, or a program has ended.
            lab.check()?;
            eprintln!("error: the job has failed: {error:#}");
            return Ok(Comparison { failed: 1.0, busbw: Default::default() });
        }
    };
    let last = windows.last().map_or(0, |[_, during]| during.1);
    ensure!(steady.last() >= last, "the job ended before the last window did");
    let bus = 2.0 * (HOSTS.len() - 1) as f64 / HOSTS.len() as f64;
    let busbw = [0, 1].map(|which| {
        let of = windows.iter().filter_map(|round| round.get(which));
        of.map(|interval| steady.rate(*interval) * bus).collect()
    });
    Ok(Comparison { failed: 0.0, busbw })
}

impl Comparison {
    /// The rows, given what must be left of the bandwidth; 0 where that is stated alone.
    fn rows(&self, what: &str, least: f64) -> Vec<Row> {
        let case =
            |figure: &str, better, bar| case(format!("{what}: {figure}"), better, bar).of(BYTES, HOSTS.len());
        let [before, during] = self.busbw.each_ref().map(|busbw| busbw.iter().map(|rate| rate / 1e6));
        let (before, during): (Vec<f64>, Vec<f64>) = (before.collect(), during.collect());
        vec![
            case("busbw MB/s", Better::More, least).compare(&during, &before, "before"),
            case("operations that failed", Better::Less, 1.0).limit(&[self.failed], NONE),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_operation_that_fails_fails_its_row() {
        let made = |failed, during| Comparison { failed, busbw: [vec![100.0], vec![during]] };
        let passed =
            |one: Comparison, least| one.rows("x", least).iter().map(|row| row.pass).collect::<Vec<_>>();
        assert_eq!(passed(made(0.0, 99.0), LEAST_BUSBW), [Some(true), Some(true)]);
        assert_eq!(passed(made(1.0, 97.0), LEAST_BUSBW), [Some(false), Some(false)]);
        assert_eq!(passed(made(0.0, 1.0), 0.0), [None, Some(true)], "a bandwidth without a bar is stated");
    }
}
