//! Whether what telemetry finds is true: phases and stragglers, against logs of those who made them.

use super::training::{self, Course, Narrow, Slow};
use super::{HOSTS, Suite, Telemetry};
use crate::figures::{magnitudes, percentile, summary};
use crate::findings;
use crate::peers::Gloo;
use crate::row::{Better, Case, Row};
use anyhow::Result;
use harmonaize_testkit::fabric::Fabric;
use harmonaize_testkit::found::{compare, errors, false_alarms, period_error, phases, replay};
use harmonaize_testkit::python::Environment;
use harmonaize_testkit::strict;
use harmonaize_testkit::truth::{Span, Truth};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Iterations at a training's beginning that are not compared: the job is made out meanwhile.
const FIRST: usize = 10;
/// Iterations of the long one of the traces: a hundred are compared.
const LONG: usize = FIRST + 100;
/// The most that the period found may be off, in percent.
const PERIOD: f64 = 0.3;
/// The most phases that may be missed, in percent. The next is how many may be found where the log has none: a limit of 0 can be no
/// reference.
const MISSED: f64 = 2.0;
const EXTRA: f64 = 0.5;
/// The most that a phase's beginning and end may be off at the median, in milliseconds. The last is for nine
/// in ten.
const BEGINNING_MS: f64 = 1.0;
const END_MS: f64 = 2.0;
const NINE_IN_TEN_MS: f64 = 5.0;
/// A straggler must be found within so many iterations.
const WITHIN: usize = 3;
/// Time of a trace before and after what it is replayed for.
pub(super) const BEFORE_NS: u64 = 200_000_000;
pub(super) const AFTER_NS: u64 = 1_000_000_000;

fn case(case: String, ranks: usize) -> Case {
    Case::less("telemetry", case, 1.0).of(0, ranks)
}

/// Runs short trainings, and keeps what the agents recorded of each beside its log.
pub(super) fn traces_into(suite: &Suite, folder: &Path) -> Result<()> {
    let peer = Gloo::prepare(suite.request.consent())?;
    let mut lab = suite.lab(Telemetry::Recorded)?;
    let program = suite.binaries.path("replay")?;
    let slow = Some(Slow { rank: 2, from: 16, by_ms: 15.0 });
    let narrow = Some(Narrow { rank: 1, after: 12, rate: 200_000_000 });
    let courses = [
        ("clean", Course::clean(36)),
        ("slow-worker", Course { slow, ..Course::clean(32) }),
        ("slow-link", Course { narrow, ..Course::clean(26) }),
        ("long", Course::clean(LONG)),
    ];
    let wanted =
        |name: &str| suite.request.only.is_empty() || suite.request.only.iter().any(|only| only == name);
    let mut truths = Vec::new();
    for (name, course) in &courses {
        let (external, own) = (format!("gloo-{name}"), format!("ours-{name}"));
        if wanted(&external) {
            truths.push((external, training::gloo(&mut lab, &peer, course)?));
        }
        // Of own operations every mark is recorded: a long trace would say no more, in megabytes.
        if wanted(&own) && course.iterations != LONG {
            truths.push((own, training::ours(&mut lab, course)?));
        }
    }
    let fabric = lab.end()?;
    for (name, truth) in truths {
        keep(&program, &fabric, &truth, &folder.join(name))?;
    }
    Ok(())
}

/// Keeps what the agents recorded of a training beside its log.
fn keep(program: &Path, fabric: &Fabric, truth: &Truth, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    let span = window(truth);
    for (host, trace) in traces(fabric).iter().enumerate() {
        let mut cut = Command::new(program);
        cut.args(["--from-ns", &span.began_ns.to_string(), "--to-ns", &span.ended_ns.to_string()]);
        cut.arg("--cut").arg(folder.join(format!("h{host}.trace"))).arg(trace);
        harmonaize_testkit::workspace::run(&mut cut)?;
    }
    std::fs::write(folder.join("truth.json"), serde_json::to_string(truth)? + "\n")?;
    eprintln!("{}", folder.display());
    Ok(())
}

/// A training's time, and some around it.
fn window(truth: &Truth) -> Span {
    let all = || truth.ranks.iter().flatten();
    let began = all().map(|iteration| iteration.began_ns).min().unwrap_or_default();
    let ended = all().map(|iteration| iteration.done_ns).max().unwrap_or_default();
    Span { began_ns: began.saturating_sub(BEFORE_NS), ended_ns: ended + AFTER_NS }
}

/// The traces that the agents have recorded, host by host.
pub(super) fn traces(fabric: &Fabric) -> Vec<PathBuf> {
    fabric.hosts().iter().map(|host| host.folder.join("trace")).collect()
}

/// Bytes of a model's buffers: those of ResNet-50, running means and variances of 26,560 channels.
const BUFFER_BYTES: usize = 212_480;

/// Trainings over torch and Gloo of which no agent knows, without and with buffers to broadcast. Their phases, as the agents make them out,
/// stand against their logs.
pub(super) fn phases_of_others(suite: &Suite) -> Result<Vec<Row>> {
    // A look whether all runs installs no gigabyte, but where nothing may be skipped.
    if suite.request.smoke && !strict::is_strict() && !Environment::shared().has_torch()? {
        strict::skip("phases", "torch is not installed")?;
        return Ok(Vec::new());
    }
    let peer = Gloo::prepare(suite.request.consent())?;
    let mut lab = suite.lab(Telemetry::Recorded)?;
    let program = suite.binaries.path("replay")?;
    let plain = Course::clean(suite.budget.iterations);
    let with_buffers = Course { buffer_bytes: BUFFER_BYTES, ..plain.clone() };
    let mut truths = Vec::new();
    for (name, course) in [("torch + Gloo", plain), ("torch + Gloo, buffers", with_buffers)] {
        truths.push((name, training::gloo(&mut lab, &peer, &course)?));
    }
    let fabric = lab.end()?;
    let mut rows = Vec::new();
    for (name, truth) in truths {
        let found = phases(&replay(&program, &traces(&fabric), window(&truth))?);
        rows.extend(phase_rows(name, &truth, &found));
    }
    Ok(rows)
}

fn phase_rows(name: &str, truth: &Truth, found: &[Span]) -> Vec<Row> {
    let agreement = compare(truth, found, FIRST);
    let count = agreement.logged;
    eprintln!("{name}: of {count} logged {} were found; {} more found", agreement.matched, agreement.extra);
    eprintln!("  beginnings off by ms {}", summary(&agreement.beginnings_ms));
    eprintln!("  ends off by ms {}", summary(&agreement.ends_ms));
    let missed = 100.0 * (count - agreement.matched) as f64 / count.max(1) as f64;
    let period = period_error(truth, found, FIRST);
    let what = |what: &str| case(format!("{name}, {count} iterations: {what}"), HOSTS);
    let (beginnings, ends) = (magnitudes(&agreement.beginnings_ms), magnitudes(&agreement.ends_ms));
    let limited = |case: Case, figure: Option<f64>, limit: f64| match figure {
        Some(figure) => case.limit(&[figure], limit),
        None => case.missing("limit", "no phases were found"),
    };
    vec![
        what("phases not found, %").limit(&[missed], MISSED),
        what("phases found that are none").limit(&[agreement.extra as f64], EXTRA),
        limited(what("period, % off its log"), period.map(f64::abs), PERIOD),
        what("phase's beginning, ms off its log").limit(&beginnings, BEGINNING_MS),
        limited(what("phase's beginning, ms off its log, p90"), percentile(&beginnings, 90), NINE_IN_TEN_MS),
        what("phase's end, ms off its log").limit(&ends, END_MS),
        limited(what("phase's end, ms off its log, p90"), percentile(&ends, 90), NINE_IN_TEN_MS),
    ]
}

/// The course of the training with a number. It has nothing, a slow worker, a slow link, or both, at ranks that go
/// round.
fn course(number: usize, iterations: usize) -> Course {
    let from = iterations / 2;
    let rank = (number / 2 + number / 8) % HOSTS;
    let slow = Some(Slow { rank, from, by_ms: 20.0 + 4.0 * (number % 5) as f64 });
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

/// What became of a library's trainings.
#[derive(Debug, Default)]
struct Tally {
    trainings: usize,
    right: usize,
    alarms: usize,
    seconds: f64,
}

/// Real trainings, ours and Gloo's in turn, with and without injected delays: how many findings are right and in time.
pub(super) fn stragglers(suite: &Suite) -> Result<Vec<Row>> {
    const ITERATIONS: usize = 40;
    let iterations = ITERATIONS.min(suite.budget.iterations);
    // One alone, as for a look whether all runs, is ours: it needs no package.
    let peer = (suite.budget.trainings > 1).then(|| Gloo::prepare(suite.request.consent())).transpose()?;
    let mut lab = suite.lab(Telemetry::Recorded)?;
    let program = suite.binaries.path("replay")?;
    let mut truths = Vec::new();
    for number in 0..suite.budget.trainings {
        let course = course(number, iterations);
        truths.push(match peer.as_ref().filter(|_| number % 2 == 1) {
            Some(peer) => training::gloo(&mut lab, peer, &course)?,
            None => training::ours(&mut lab, &course)?,
        });
    }
    let fabric = lab.end()?;
    let mut tallies = ["ours", "torch + Gloo"].map(|name| (name, Tally::default()));
    for (number, truth) in truths.iter().enumerate() {
        let span = window(truth);
        let found = replay(&program, &traces(&fabric), span)?;
        let wrong = errors(truth, &found, WITHIN);
        let what = &truth.injections;
        eprintln!(
            "training {number}, {:?}, {what:?}: {}",
            truth.library,
            if wrong.is_empty() { "right".to_owned() } else { wrong.join("; ") }
        );
        if let Some((_, tally)) = tallies.get_mut(number % 2) {
            tally.trainings += 1;
            tally.right += usize::from(wrong.is_empty());
            tally.alarms += false_alarms(truth, &found, WITHIN).len();
            tally.seconds += span.ended_ns.saturating_sub(span.began_ns) as f64 / 1e9;
        }
        if let Some(folder) = suite.request.wrong.as_ref().filter(|_| !wrong.is_empty()) {
            keep(&program, &fabric, truth, &folder.join(format!("{number}")))?;
        }
    }
    let rows = |(name, tally): (&str, Tally)| {
        let runs = tally.trainings;
        let what = format!("stragglers, {name}: trainings with the right finding within {WITHIN} iterations");
        let found = Case { better: Better::More, ..case(what, HOSTS) };
        let found = found.compare(&[tally.right as f64], &[runs as f64], "all trainings");
        let alarmed = case(format!("stragglers, {name}"), HOSTS);
        let alarmed = findings::false_alarms(alarmed, tally.alarms, tally.seconds, None);
        [found, alarmed].map(|row| Row { runs, ..row })
    };
    Ok(tallies.into_iter().filter(|(_, tally)| tally.trainings > 0).flat_map(rows).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_testkit::truth::{Iteration, Library, RankLocation};

    #[test]
    fn phases_that_are_none_and_late_ends_miss() {
        const MS: u64 = 1_000_000;
        let iteration = |number: u64| Iteration {
            began_ns: number * 100 * MS,
            called_ns: (number * 100 + 40) * MS,
            done_ns: (number * 100 + 80) * MS,
        };
        let truth = Truth {
            library: Library::Gloo,
            places: vec![RankLocation { host: "h1".to_owned(), address: [10, 0, 0, 1].into() }],
            bits_per_second: 1,
            buckets: 1,
            bucket_bytes: 4,
            injections: Vec::new(),
            ranks: vec![(0..30).map(iteration).collect()],
        };
        let failed = |found: &[Span]| -> Vec<String> {
            let rows = phase_rows("x", &truth, found);
            assert_eq!(rows.len(), 7);
            rows.into_iter().filter(Row::failed).map(|row| row.case).collect()
        };
        let mut found = truth.phases();
        assert_eq!(failed(&found), Vec::<String>::new());
        // Three of twenty end 6 ms late, and one is found between two.
        found.iter_mut().rev().take(3).for_each(|span| span.ended_ns += 6 * MS);
        let extra = Span { began_ns: 1585 * MS, ended_ns: 1590 * MS };
        found.insert(16, extra);
        let name = |what: &str| format!("x, 20 iterations: {what}");
        let expected = [name("phases found that are none"), name("phase's end, ms off its log, p90")];
        assert_eq!(failed(&found), expected);
        // Nothing found misses all that is held.
        assert!(failed(&[]).len() >= 5);
    }

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
