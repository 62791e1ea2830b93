//! `cargo xtask test`: builds, and runs every test, in namespaces too where the privilege is there.

use anyhow::{Context, Result, bail};
use harmonaize_testkit::c_library;
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::strict;
use harmonaize_testkit::workspace::{self, Binaries, Profile};
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

/// What `cargo xtask test` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask test                       asks before it installs anything
  cargo xtask test --yes                 installs what is missing
  cargo xtask test -- -p harmonaize-plan only those; arguments go to the test runner")]
pub struct Args {
    /// Install missing packages and tools without asking
    #[arg(long)]
    pub yes: bool,
    /// Arguments for the test runner
    #[arg(last = true)]
    pub runner: Vec<String>,
}

/// How many tests passed and failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed.
    pub failed: u64,
    /// Of those that passed, the ones that failed when first tried.
    pub flaky: u64,
}

impl Count {
    /// Adds what another part counted.
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.flaky += other.flaky;
    }
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let consent = Consent::from_flag(args.yes);
    let needed = [
        packages::BUILDING,
        packages::C,
        packages::MPI,
        packages::ETCD,
        packages::SLURM,
        packages::METRICS,
        packages::BROWSER,
    ]
    .concat();
    packages::require(&needed, consent)?;
    packages::require_promtool(consent)?;
    if harmonaize_testkit::fabric::privileged() {
        packages::require(packages::EMULATION, consent)?;
    } else {
        strict::skip("end-to-end tests in network namespaces", "this is not root")?;
    }
    // One selection in all calls: cargo unifies features over what a call names, and builds anew what differs.
    let all: &[&str] = if args.runner.is_empty() { &["--workspace"] } else { &[] };
    workspace::run(workspace::cargo().args(["build", "--bins", "--tests"]).args(all))?;
    c_library::build(Profile::Dev)?;
    c_library::NCCL.build(Profile::Dev)?;
    c_library::NCCL_PLUGIN.build(Profile::Dev)?;
    c_library::MPI.build(Profile::Dev)?;
    let mut count = Count::default();
    let mut wrong = Vec::new();
    let mut tests = match packages::tool(packages::NEXTEST, consent) {
        Ok(nextest) => {
            let mut command = workspace::calling_cargo(nextest);
            command.args(["nextest", "run", "--no-fail-fast"]).args(all);
            command
        }
        Err(error) => {
            eprintln!("note: {error:#}; `cargo test` stands in for it");
            let mut command = workspace::cargo();
            command.args(["test", "--no-fail-fast", "--lib", "--bins", "--tests"]).args(all);
            command
        }
    };
    tests.env("HARMONAIZE_BINARIES", Binaries::folder_of(Profile::Dev)).args(&args.runner);
    stage(&mut tests, &mut count, &mut wrong)?;
    if args.runner.is_empty() {
        let mut documents = workspace::cargo();
        documents.args(["test", "--quiet", "--doc", "--no-fail-fast"]).args(all);
        stage(&mut documents, &mut count, &mut wrong)?;
    }
    if count.failed == 0 && !wrong.is_empty() {
        bail!("{} went wrong before its tests had run", wrong.join(" and "));
    }
    let Count { passed, failed, flaky } = count;
    println!("{passed} passed, {failed} failed; {flaky} passed only when tried again");
    match count {
        Count { failed: 0, passed: 0, .. } => bail!("no test ran"),
        Count { failed: 0, .. } => Ok(()),
        Count { failed, .. } => bail!("{failed} tests failed"),
    }
}

fn stage(command: &mut Command, count: &mut Count, wrong: &mut Vec<String>) -> Result<()> {
    let (ran, fine) = counted(command)?;
    count.add(ran);
    if !fine {
        wrong.push(format!("`{}`", workspace::describe(command)));
    }
    Ok(())
}

/// Runs a test runner, passes on what it prints, and counts by its closing lines; true when it ended well.
fn counted(command: &mut Command) -> Result<(Count, bool)> {
    let shown = workspace::describe(command);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start `{shown}`"))?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let (mut count, complained) = std::thread::scope(|scope| {
        let printed = scope.spawn(|| out.map_or(Count::default(), |pipe| passed_on(pipe, false)));
        let complained = err.map_or(Count::default(), |pipe| passed_on(pipe, true));
        (printed.join().unwrap_or_default(), complained)
    });
    let status = child.wait()?;
    count.add(complained);
    Ok((count, status.success()))
}

fn passed_on(pipe: impl Read, to_stderr: bool) -> Count {
    let mut count = Count::default();
    for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        if to_stderr {
            eprintln!("{line}");
        } else {
            println!("{line}");
        }
        count.add(closing(&line).unwrap_or_default());
    }
    count
}

/// The counts in a closing line of nextest or of libtest.
pub(crate) fn closing(line: &str) -> Option<Count> {
    let nextest = line.trim_start().starts_with("Summary") && line.contains("run:");
    // nextest passes on what a test printed that failed, indented: libtest's own line there tells of that one again.
    if !nextest && !line.starts_with("test result:") {
        return None;
    }
    let words: Vec<&str> =
        line.split(|letter: char| !letter.is_alphanumeric()).filter(|word| !word.is_empty()).collect();
    let before = |word: &str| -> Option<u64> {
        let at = words.iter().position(|other| *other == word)?;
        words.get(at.checked_sub(1)?)?.parse().ok()
    };
    Some(Count {
        passed: before("passed").unwrap_or(0),
        // A test that ran out of time has failed, and so has one that could not be started.
        failed: ["failed", "timed", "exec"].into_iter().filter_map(before).sum(),
        flaky: before("flaky").unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_counted() {
        let count = |passed, failed| Some(Count { passed, failed, flaky: 0 });
        assert_eq!(
            closing("     Summary [   0.5s] 12 tests run: 12 passed (1 slow), 3 skipped"),
            count(12, 0)
        );
        assert_eq!(
            closing("Summary [ 1.0s] 9/12 tests run: 6 passed, 2 failed, 1 timed out, 3 skipped"),
            count(6, 3)
        );
        assert_eq!(
            closing("Summary [ 9.0s] 12 tests run: 12 passed (2 slow, 1 flaky), 3 skipped"),
            Some(Count { passed: 12, failed: 0, flaky: 1 })
        );
        assert_eq!(closing("test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured"), count(4, 0));
        assert_eq!(closing("test result: FAILED. 1 passed; 2 failed; 0 ignored"), count(1, 2));
        assert_eq!(closing("    test result: FAILED. 0 passed; 1 failed; 0 ignored"), None);
        assert_eq!(closing("test tests::a ... ok"), None);
        assert_eq!(closing("Summary of the plan"), None);
    }
}
