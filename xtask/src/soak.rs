//! `cargo xtask soak`: the simulation's tests for as long as asked, each round with seeds not used before.

use crate::workspace;
use anyhow::{Context, Result, bail};
use std::ops::Range;
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// What `cargo xtask soak` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask soak --minutes 30                 seeds from the clock on
  cargo xtask soak --minutes 1 --first 4711     again from a seed that failed")]
pub struct Args {
    /// How long to go on; the round that runs then is finished
    #[arg(long, default_value_t = 10)]
    pub minutes: u64,
    /// The first seed; from the clock if left out
    #[arg(long)]
    pub first: Option<u64>,
    /// Seeds in a round
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub round: u64,
    /// The crate whose tests simulate
    #[arg(long, default_value = "harmonaize-core")]
    pub package: String,
    /// The part of a test's name that marks a simulation
    #[arg(long, default_value = "simulat")]
    pub tests: String,
}

/// Runs the task; the error of a failing round names its seeds.
pub fn run(args: &Args) -> Result<()> {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut first = args.first.unwrap_or(clock.wrapping_mul(1_000_000));
    let end = Instant::now() + Duration::from_secs(args.minutes.saturating_mul(60));
    let (mut rounds, begun) = (0_u64, first);
    loop {
        let seeds = first..first.wrapping_add(args.round);
        let ran = round(args, &seeds)?;
        if ran == 0 {
            bail!("{} has no test whose name holds \"{}\"", args.package, args.tests);
        }
        rounds += 1;
        first = seeds.end;
        println!("round {rounds}: {ran} tests passed with seeds {}..{}", seeds.start, seeds.end);
        if Instant::now() >= end {
            break;
        }
    }
    println!("{rounds} rounds passed, seeds {begun}..{first}");
    Ok(())
}

/// One round; returns how many tests ran.
fn round(args: &Args, seeds: &Range<u64>) -> Result<u64> {
    let range = format!("{}..{}", seeds.start, seeds.end);
    let mut tests = workspace::cargo();
    tests.args(["test", "--locked", "--quiet", "--release", "-p", &args.package, &args.tests]);
    tests.env("HARMONAIZE_SEEDS", &range).stdin(Stdio::null());
    let output = tests.output().context("cannot start cargo")?;
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        println!("{said}{}", String::from_utf8_lossy(&output.stderr));
        match failing_seed(&said) {
            Some(seed) => bail!(
                "seed {seed} failed; again: HARMONAIZE_SEEDS={seed}..{} cargo test --release -p {} {}",
                seed.saturating_add(1),
                args.package,
                args.tests
            ),
            None => bail!("a round failed, with HARMONAIZE_SEEDS={range}"),
        }
    }
    Ok(said.lines().filter_map(passed).sum())
}

/// The last number printed after the word seed.
fn failing_seed(said: &str) -> Option<u64> {
    let numbers = said.match_indices("seed").filter_map(|(at, word)| {
        let rest = said.get(at + word.len()..)?.trim_start_matches([' ', ':', '=', '#']);
        let digits = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
        rest.get(..digits)?.parse().ok()
    });
    numbers.last()
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
        assert_eq!(failing_seed("panicked: seed 12: rank 3 waits\nseed=77 failed"), Some(77));
        assert_eq!(failing_seed("seeds 1..9 fine"), None);
        assert_eq!(passed("test result: ok. 5 passed; 0 failed"), Some(5));
    }
}
