//! Whether what telemetry finds is true: phases, stragglers and congestion, against logs of those who made them.

use super::figures::{magnitudes, summary};
use super::found::{Found, held, period_error, phases, replay, wrong};
use super::training::{self, Course, Narrow, Slow};
use super::truth::{Span, Truth};
use super::{HOSTS, Suite};
use crate::bench::lab::Lab;
use crate::bench::row::{Better, Case, Row};
use crate::fabric::Fabric;
use crate::peers::Gloo;
use crate::process::Process;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// Iterations at a training's beginning that are not compared: the job is made out meanwhile.
const FIRST: usize = 10;
/// The most that the period found may be off, in percent.
const PERIOD: f64 = 0.3;
/// The most that beginning and end of a phase may be off at the median, in milliseconds.
const BEGINNING_MS: f64 = 1.0;
const END_MS: f64 = 2.0;
/// A straggler must be found within so many iterations.
const WITHIN: usize = 3;
/// The most from a burst's first packet to the verdict, at the median, in milliseconds.
const CONGESTION_MS: f64 = 10.0;
/// Time of a trace before and after what it is replayed for.
const BEFORE_NS: u64 = 200_000_000;
const AFTER_NS: u64 = 1_000_000_000;

fn case(case: String, ranks: usize) -> Case {
    Case { suite: "telemetry", case, size: 0, ranks, better: Better::Less, bar: 1.0 }
}

/// A training's time, and some around it.
fn window(truth: &Truth) -> Span {
    let all = || truth.ranks.iter().flatten();
    let began = all().map(|iteration| iteration.began_ns).min().unwrap_or_default();
    let ended = all().map(|iteration| iteration.done_ns).max().unwrap_or_default();
    Span { began_ns: began.saturating_sub(BEFORE_NS), ended_ns: ended + AFTER_NS }
}

/// The traces that the agents have recorded, host by host.
fn traces(fabric: &Fabric) -> Vec<PathBuf> {
    fabric.hosts().iter().map(|host| host.folder.join("trace")).collect()
}

/// A training over torch and Gloo of which no agent knows: its phases, as the agents make them out, against its log.
pub(super) fn foreign(suite: &Suite) -> Result<Vec<Row>> {
    let peer = Gloo::prepare(suite.consent)?;
    let mut lab = suite.lab(true)?;
    let program = lab.program("replay");
    let truth = training::gloo(&mut lab, &peer, &Course::clean(suite.effort.iterations))?;
    let fabric = lab.end()?;
    let found = phases(&replay(&program, &traces(&fabric), window(&truth))?);
    let agreement = held(&truth, &found, FIRST);
    let count = agreement.logged;
    eprintln!("phases: of {count} logged {} were found; {} more found", agreement.matched, agreement.extra);
    eprintln!("  beginnings off by ms {}", summary(&agreement.beginnings_ms));
    eprintln!("  ends off by ms {}", summary(&agreement.ends_ms));
    let missed = 100.0 * (count - agreement.matched) as f64 / count.max(1) as f64;
    let period = period_error(&truth, &found, FIRST);
    let what = |what: &str| case(format!("torch + Gloo, {count} iterations: {what}"), HOSTS);
    Ok(vec![
        what("phases not found, %").limit(&[missed], 1.0),
        match period {
            Some(error) => what("period, % off its log").limit(&[error.abs()], PERIOD),
            None => what("period, % off its log").missing("limit", "no phases were found"),
        },
        what("phase's beginning, ms off its log").limit(&magnitudes(&agreement.beginnings_ms), BEGINNING_MS),
        what("phase's end, ms off its log").limit(&magnitudes(&agreement.ends_ms), END_MS),
    ])
}

/// The course of the training with a number: nothing, a slow worker, a slow link, or both, at ranks that go round.
fn course(number: usize, iterations: usize) -> Course {
    let from = iterations / 2;
    let rank = (number / 2 + number / 8) % HOSTS;
    let slow = Some(Slow { rank, from, by_ms: 10.0 + 2.0 * (number % 5) as f64 });
    // Of another rank, so that both can be told apart; some iterations earlier, so that each has its own time.
    let narrow = Some(Narrow { rank: (rank + 2) % HOSTS, after: from - iterations / 8, rate: 250_000_000 });
    let clean = Course::clean(iterations);
    match (number / 2) % 4 {
        0 => Course { slow, ..clean },
        1 => Course { narrow, ..clean },
        2 => Course { slow, narrow, ..clean },
        _ => clean,
    }
}

/// Real trainings, ours and Gloo's in turn, with and without injected delays: how many verdicts are right and in time.
pub(super) fn stragglers(suite: &Suite) -> Result<Vec<Row>> {
    const ITERATIONS: usize = 40;
    let iterations = ITERATIONS.min(suite.effort.iterations);
    // One alone, as for a look whether all runs, is ours: it needs no package.
    let peer = (suite.effort.trainings > 1).then(|| Gloo::prepare(suite.consent)).transpose()?;
    let mut lab = suite.lab(true)?;
    let program = lab.program("replay");
    let mut truths = Vec::new();
    for number in 0..suite.effort.trainings {
        let course = course(number, iterations);
        truths.push(match peer.as_ref().filter(|_| number % 2 == 1) {
            Some(peer) => training::gloo(&mut lab, peer, &course)?,
            None => training::ours(&mut lab, &course)?,
        });
    }
    let fabric = lab.end()?;
    let mut right = [0usize; 2];
    for (number, truth) in truths.iter().enumerate() {
        let wrong = wrong(truth, &replay(&program, &traces(&fabric), window(truth))?, WITHIN);
        let what = &truth.injections;
        eprintln!(
            "training {number}, {:?}, {what:?}: {}",
            truth.library,
            if wrong.is_empty() { "right".to_owned() } else { wrong.join("; ") }
        );
        if let Some(right) = right.get_mut(number % 2) {
            *right += usize::from(wrong.is_empty());
        }
    }
    let of = |library: usize| truths.len().div_ceil(2) - library * (truths.len() % 2);
    let row = |(library, name): (usize, &str)| {
        let all = of(library);
        let right = right.get(library).copied().unwrap_or_default();
        let what = format!("stragglers, {name}: trainings with the right verdict within {WITHIN} iterations");
        let case = Case { better: Better::More, ..case(what, HOSTS) };
        Row { runs: all, ..case.compare(&[right as f64], &[all as f64], "all trainings") }
    };
    Ok([(0, "ours"), (1, "torch + Gloo")]
        .into_iter()
        .filter(|(library, _)| of(*library) > 0)
        .map(row)
        .collect())
}

/// A foreign flow that bursts over a link of 1 Gbit/s: how long until the agent says that the link is congested.
pub(super) fn congestion(suite: &Suite) -> Result<Vec<Row>> {
    let mut lab = suite.lab(true)?;
    let program = lab.program("replay");
    let bursts = bursts(&mut lab, suite.effort.bursts)?;
    let fabric = lab.end()?;
    let (Some(first), Some(last)) = (bursts.first(), bursts.last()) else { bail!("no burst") };
    let span = Span {
        began_ns: first.began_ns.saturating_sub(2 * BEFORE_NS),
        ended_ns: last.handed_over_ns + AFTER_NS,
    };
    let found = replay(&program, traces(&fabric).get(..1).context("no trace")?, span)?;
    let mut delays = Vec::new();
    for (place, burst) in bursts.iter().enumerate() {
        let end = bursts.get(place + 1).map_or(u64::MAX, |next| next.began_ns);
        let at = found.iter().find_map(|one| match one {
            Found::Congestion { leaving: true, state, cause, found_ns, .. }
                if state != "none" && cause != "own" && (burst.began_ns..end).contains(found_ns) =>
            {
                Some(*found_ns)
            }
            _ => None,
        });
        delays.extend(at.map(|at| (at - burst.began_ns) as f64 / 1e6));
    }
    eprintln!(
        "congestion: {} of {} bursts found, ms after onset {}",
        delays.len(),
        bursts.len(),
        summary(&delays)
    );
    // One that was not found has no time: it counts as one that takes longer than all.
    delays.resize(bursts.len(), f64::MAX);
    let what = "a foreign flow congests a link of 1 Gbit/s: ms to the verdict".to_owned();
    Ok(vec![case(what, 2).limit(&delays, CONGESTION_MS)])
}

/// A burst, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Burst {
    began_ns: u64,
    handed_over_ns: u64,
}

/// Has a flow burst from the first host to the second.
fn bursts(lab: &mut Lab, count: usize) -> Result<Vec<Burst>> {
    let hosts = lab.fabric().hosts().to_vec();
    let [from, to, ..] = hosts.as_slice() else { bail!("a flow needs two hosts") };
    let address = to.addresses.first().context("a host without address")?;
    let deadline = Instant::now() + Duration::from_secs(10 + 2 * count as u64);
    let mut receive = Command::new(lab.program("bursts"));
    receive.arg("receive").arg(format!("{address}:0"));
    let log = lab.logs().join("bursts-receive.log");
    let mut receiver = Process::start("the bursts' receiver", &mut receive, &to.namespace, &log)?;
    let listens = receiver.line_by(deadline, |_| true)?;
    let mut send = Command::new(lab.program("bursts"));
    send.args(["send", &listens, "--bursts", &count.to_string()]);
    let log = lab.logs().join("bursts-send.log");
    let mut sender = Process::start("the bursts' sender", &mut send, &from.namespace, &log)?;
    sender.succeed_by(deadline)?;
    receiver.succeed_by(deadline)?;
    lab.check()?;
    let text = std::fs::read_to_string(sender.log())?;
    let lines = text.lines().filter(|line| line.starts_with('{'));
    let bursts: Vec<Burst> = lines.map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(bursts.len() == count, "{} bursts instead of {count}", bursts.len());
    Ok(bursts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn courses_go_round_kinds_and_ranks() {
        let courses: Vec<Course> = (0..20).map(|number| course(number, 40)).collect();
        let kinds = |slow: bool, narrow: bool| {
            courses.iter().filter(|one| (one.slow.is_some(), one.narrow.is_some()) == (slow, narrow)).count()
        };
        assert_eq!(
            (kinds(true, false), kinds(false, true), kinds(true, true), kinds(false, false)),
            (6, 6, 4, 4)
        );
        let ranks = courses.iter().filter_map(|one| one.slow.map(|slow| slow.rank));
        assert_eq!(ranks.collect::<std::collections::BTreeSet<_>>().len(), HOSTS);
        assert!(
            courses.iter().all(|one| one.narrow.is_none_or(|narrow| narrow.after < 20 && narrow.rank < 4))
        );
    }
}
