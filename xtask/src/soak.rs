//! `cargo xtask soak`: the simulation's tests, and two emulated offload units. They run for as long as asked, with new seeds
//! each round.

use crate::{dpu, fuzz};
use anyhow::{Context, Result, anyhow, bail};
use harmonaize_testkit::strict;
use harmonaize_testkit::workspace;
use std::num::NonZero;
use std::ops::Range;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread::available_parallelism;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What `cargo xtask soak` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask soak --minutes 30                 seeds from the clock on
  cargo xtask soak --minutes 1 --first 4711     again from a seed that failed
  cargo xtask soak --suite aggregation --seeds 10000 --round 5000 --release
                                                so many seeds, rounds on all processors at once
  cargo xtask soak --suite dpu --minutes 60     two emulated offload units alone, with other data each time
  cargo xtask soak --suite store --minutes 0    5,000 crashes of the machine under control's store
  cargo xtask soak --suite leaders --round 2000 --minutes 0
                                                200 faults of the leader of three controls
  cargo xtask soak --suite core --release       one suite, optimised, without debug assertions")]
pub struct Args {
    /// How long to go on; the round that runs then is finished
    #[arg(long, default_value_t = 10)]
    pub minutes: u64,
    /// So many seeds in place of minutes: the rounds of a suite run side by side, one on each processor
    #[arg(long, conflicts_with = "minutes", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub seeds: Option<u64>,
    /// The first seed; from the clock if left out
    #[arg(long)]
    pub first: Option<u64>,
    /// Seeds in a round
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub round: u64,
    /// This suite alone: core (communicators in virtual time), aggregation (workers and aggregators in virtual time),
    /// wiring (agents with control in virtual time, one in ten seeds), plan
    /// (damaged programs against the checker), codec (damaged chunks, twenty a seed), store (crashes of control's machine, ten a
    /// seed), control (kills of control, one a hundred seeds), leaders (faults of
    /// the leader of three controls, one in ten seeds), processes (200 faults of agents and of tenants' processes), stragglers and congestion (findings over
    /// hours of simulation, from the round's first seed), late (an operation that waits a minute for a rank), hostile (tenants that harm their
    /// agent for five minutes), release (programs of this tree with those of the release before, which it builds), dpu (two
    /// hosts with offload units, in virtual machines) or fuzz (every decoder, each for a minute)
    #[arg(long)]
    pub suite: Option<String>,
    /// Optimise the tests, and leave debug assertions out
    #[arg(long)]
    pub release: bool,
    /// Install missing packages without asking
    #[arg(long)]
    pub yes: bool,
}

/// What is run round by round.
struct Suite {
    name: &'static str,
    work: Work,
}

enum Work {
    /// Tests that take their seeds from the environment.
    Tests {
        package: &'static str,
        test: &'static str,
        /// Those alone that are too long for every build.
        long: bool,
        environment: fn(&Range<u64>) -> Environment,
    },
    /// Two hosts with offload units.
    OffloadUnits,
    /// All fuzz targets, each for a minute, from what earlier rounds found.
    Fuzz,
}

const SUITES: &[Suite] = &[
    Suite::of("core", "harmonaize-core", "simulation", range),
    Suite::of("aggregation", "harmonaize-aggregator", "simulation", range),
    // A seed is a process of some tenths of a second.
    Suite::of("wiring", "harmonaize-agent", "simulation", |seeds| {
        let count = (seeds.end.saturating_sub(seeds.start) / 10).max(1);
        range(&(seeds.start..seeds.start.saturating_add(count)))
    }),
    Suite::of("plan", "harmonaize-plan", "mutations", |seeds| from_first(seeds, 1)),
    // A seed takes some 0.1 ms.
    Suite::of("codec", "harmonaize-codec", "damage", |seeds| {
        runs_from(seeds.start, seeds.end.saturating_sub(seeds.start).saturating_mul(20))
    }),
    Suite::of("store", "harmonaize-store", "crashes", |seeds| from_first(seeds, 1)),
    Suite::of("control", "harmonaize-server", "store", |seeds| from_first(seeds, 100)),
    Suite::long("stragglers", "harmonaize-analysis", "stragglers", |seeds| from_first(seeds, 1)),
    Suite::long("congestion", "harmonaize-analysis", "congestion", |seeds| from_first(seeds, 1)),
    Suite::of("leaders", "harmonaize-tests", "availability", |seeds| from_first(seeds, 10)),
    Suite::of("processes", "harmonaize-tests", "processes", |seeds| runs_from(seeds.start, 200)),
    Suite::long("late", "harmonaize-tests", "faults", |_| Vec::new()),
    Suite::long("hostile", "harmonaize-tests", "hostile", |_| Vec::new()),
    Suite::long("release", "harmonaize-tests", "handover", |_| Vec::new()),
    Suite { name: "dpu", work: Work::OffloadUnits },
    Suite { name: "fuzz", work: Work::Fuzz },
];

/// Variables of the environment, with their values.
type Environment = Vec<(&'static str, String)>;

impl Suite {
    /// Tests that every build runs.
    const fn of(
        name: &'static str,
        package: &'static str,
        test: &'static str,
        environment: fn(&Range<u64>) -> Environment,
    ) -> Self {
        Self { name, work: Work::Tests { package, test, long: false, environment } }
    }

    /// Tests that are too long for every build.
    const fn long(
        name: &'static str,
        package: &'static str,
        test: &'static str,
        environment: fn(&Range<u64>) -> Environment,
    ) -> Self {
        Self { name, work: Work::Tests { package, test, long: true, environment } }
    }
}

fn range(seeds: &Range<u64>) -> Environment {
    vec![("HARMONAIZE_SEEDS", format!("{}..{}", seeds.start, seeds.end))]
}

fn runs_from(first: u64, runs: u64) -> Environment {
    vec![("HARMONAIZE_SEED", first.to_string()), ("HARMONAIZE_RUNS", runs.to_string())]
}

/// The first seed, and how many: one in `each`, at least one.
fn from_first(seeds: &Range<u64>, each: u64) -> Environment {
    runs_from(seeds.start, (seeds.end.saturating_sub(seeds.start) / each.max(1)).max(1))
}

/// Runs the task; the error of a failing round names its seeds.
pub fn run(args: &Args) -> Result<()> {
    let wanted = |suite: &&Suite| args.suite.as_ref().is_none_or(|name| suite.name == name);
    let suites: Vec<&Suite> = SUITES.iter().filter(wanted).collect();
    if suites.is_empty() {
        bail!("there is no such suite; `cargo xtask soak --help` lists them");
    }
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let begun = args.first.unwrap_or(clock.saturating_mul(1_000_000));
    if let Some(count) = args.seeds {
        return suites.into_iter().try_for_each(|suite| side_by_side(suite, begun, count, args));
    }
    let end = Instant::now() + Duration::from_secs(args.minutes.saturating_mul(60));
    let (mut first, mut rounds) = (begun, 0_u64);
    loop {
        let seeds = first..first.saturating_add(args.round);
        for suite in &suites {
            match &suite.work {
                Work::Tests { package, test, long, environment } => {
                    let which = (*package, *test, *long);
                    let ran = round(suite.name, which, &environment(&seeds), args.release, None, &seeds)?;
                    println!("{}: {ran} tests passed with seeds {}..{}", suite.name, seeds.start, seeds.end);
                }
                Work::OffloadUnits => offload_units(args.yes, seeds.start)?,
                Work::Fuzz => fuzz::run(&fuzz::Args { seconds: 60, ..fuzz::Args::default() })?,
            }
        }
        rounds += 1;
        first = seeds.end;
        if Instant::now() >= end || first == u64::MAX {
            break;
        }
    }
    println!("{rounds} rounds passed, seeds {begun}..{first}");
    Ok(())
}

/// So many seeds of a suite: each processor takes the next round once it has finished one, with one thread.
fn side_by_side(suite: &Suite, begun: u64, count: u64, args: &Args) -> Result<()> {
    let Work::Tests { package, test, long, environment } = &suite.work else {
        println!("SKIPPED: {}: a round has its processors to itself; --minutes runs them", suite.name);
        return Ok(());
    };
    let processors = available_parallelism().map_or(1, NonZero::get);
    let each = of_round(count, args.round, processors);
    let (next, end, passed) = (AtomicU64::new(begun), begun.saturating_add(count), AtomicU64::new(0));
    workspace::run(tests_of((package, test), args.release).arg("--no-run"))?;
    let since = Instant::now();
    let rate = |seeds: u64| seeds as f64 / since.elapsed().as_secs_f64().max(1e-3);
    let lane = || -> Result<u64> {
        let mut tests = 0;
        loop {
            let first = next.fetch_add(each, SeqCst);
            if first >= end {
                return Ok(tests);
            }
            let seeds = first..first.saturating_add(each).min(end);
            let which = (*package, *test, *long);
            // Whoever has an error keeps the others from beginning more.
            tests = round(suite.name, which, &environment(&seeds), args.release, Some(1), &seeds)
                .inspect_err(|_| next.store(end, SeqCst))?;
            let so_far = passed.fetch_add(seeds.end - seeds.start, SeqCst) + seeds.end - seeds.start;
            println!(
                "{}: seeds {}..{} passed; {so_far} of {count}, {:.1} a second",
                suite.name,
                seeds.start,
                seeds.end,
                rate(so_far)
            );
        }
    };
    let outcomes: Vec<Result<u64>> = std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..processors).map(|_| scope.spawn(lane)).collect();
        let ended = |_| Err(anyhow!("a thread panicked"));
        lanes.into_iter().map(|lane| lane.join().unwrap_or_else(ended)).collect()
    });
    let tests = outcomes.into_iter().collect::<Result<Vec<u64>>>()?.into_iter().max().unwrap_or(0);
    println!(
        "{}: {count} seeds passed ({begun}..{end}), {tests} tests each, in {:.0} s on {processors} processors: {:.1} a second",
        suite.name,
        since.elapsed().as_secs_f64(),
        rate(count)
    );
    Ok(())
}

/// Seeds of each round: `most`, or fewer, so that every processor has one.
fn of_round(count: u64, most: u64, processors: usize) -> u64 {
    most.min(count.div_ceil(processors.max(1) as u64)).max(1)
}

fn tests_of((package, test): (&str, &str), release: bool) -> Command {
    let mut tests = workspace::cargo();
    tests.args(["test", "--quiet", "-p", package, "--test", test]).args(release.then_some("--release"));
    tests
}

/// One round of a suite of tests, on so many threads if that is said; returns how many tests ran.
fn round(
    name: &str,
    (package, test, long): (&str, &str, bool),
    environment: &[(&str, String)],
    release: bool,
    threads: Option<usize>,
    seeds: &Range<u64>,
) -> Result<u64> {
    let mut tests = tests_of((package, test), release);
    tests.arg("--").args(long.then_some("--ignored"));
    tests.args(threads.map(|threads| format!("--test-threads={threads}")));
    tests.envs(environment.iter().map(|(name, value)| (name, value)));
    let output = tests.stdin(Stdio::null()).output().context("cannot start cargo")?;
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        println!("{said}{}", String::from_utf8_lossy(&output.stderr));
        match again(&said) {
            Some(line) => bail!("{name} failed; {line}"),
            None => bail!("{name} failed with seeds {}..{}", seeds.start, seeds.end),
        }
    }
    match said.lines().filter_map(passed).sum() {
        0 => bail!("{package} has no tests in {test}"),
        ran => Ok(ran),
    }
}

/// Two hosts with offload units, in a process of their own: it handles signals, and prints its seed.
fn offload_units(yes: bool, seed: u64) -> Result<()> {
    let absent = dpu::absent();
    if !yes && !absent.is_empty() {
        let why = format!("{} not installed; --yes installs it", absent.join(" "));
        return strict::skip("offload units", why);
    }
    // Rounds differ in the low bits.
    let seed = u32::try_from(seed & u64::from(u32::MAX))?.to_string();
    let mut task = workspace::cargo();
    task.args(["xtask", "dpu", "--pairs", "2", "--seed", &seed]);
    if yes {
        task.arg("--yes");
    }
    workspace::run(task.stdin(Stdio::null()))
}

/// The line by which a failing test says how to run it again.
fn again(said: &str) -> Option<&str> {
    said.lines().map(str::trim).find(|line| line.contains("HARMONAIZE_SEED"))
}

fn passed(line: &str) -> Option<u64> {
    let rest = line.trim().strip_prefix("test result: ok. ")?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_failing_seed_is_found() {
        let said = "panicked\n  run again: HARMONAIZE_SEED=77 cargo test x\nfailures:";
        assert_eq!(again(said), Some("run again: HARMONAIZE_SEED=77 cargo test x"));
        assert_eq!(again("seeds 1..9 fine"), None);
        assert_eq!(passed("test result: ok. 5 passed; 0 failed"), Some(5));
    }

    #[test]
    fn every_processor_has_a_round() {
        for (count, most, processors, each) in
            [(10_000, 500, 2, 500), (100, 500, 4, 25), (3, 500, 16, 1), (0, 500, 0, 1)]
        {
            assert_eq!(of_round(count, most, processors), each, "{count} on {processors}");
        }
    }

    #[test]
    fn an_unknown_suite_is_refused() {
        let args = Args {
            minutes: 0,
            seeds: None,
            first: None,
            round: 1,
            suite: Some("fly".into()),
            release: false,
            yes: false,
        };
        assert!(run(&args).unwrap_err().to_string().contains("no such suite"));
    }
}
