//! `cargo xtask sanitize`: tests of the rooms with unsafe code under AddressSanitizer, and under Miri where there is one.

use crate::instrument;
use anyhow::Result;
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace;
use std::process::Stdio;

/// What `cargo xtask sanitize` takes.
#[derive(Debug, Default, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask sanitize                            what CI runs
  cargo xtask sanitize harmonaize-shm -- memory   tests of one package with this in their names")]
pub struct Args {
    /// Tests of these packages alone
    #[arg(value_name = "PACKAGE")]
    pub packages: Vec<String>,
    /// Tests with these words in their names alone
    #[arg(last = true, value_name = "TEST")]
    pub tests: Vec<String>,
    /// Install what is missing without asking
    #[arg(long)]
    pub yes: bool,
}

/// Rooms that map memory, call C or read what others wrote, and whose tests need no other program.
const PACKAGES: &[&str] = &[
    "harmonaize-shm",
    "harmonaize-codec",
    "harmonaize-verbs",
    "harmonaize-transport",
    "harmonaize-staging",
    "harmonaize-engine",
];

/// Tests of arithmetic alone, whose minutes find nothing.
const ARITHMETIC: &str = "not binary(adaptation)";

/// Rooms whose unsafe code asks the kernel for nothing, which Miri does not have.
const INTERPRETED: &[&str] = &["harmonaize-abi", "harmonaize-kernels"];

/// Threads of tests may outlive them, so leaks are not looked for.
const OPTIONS: &str = "detect_leaks=0:detect_stack_use_after_return=1";

/// Runs the task; fails where a test does, or the sanitizer finds something.
pub fn run(args: &Args) -> Result<()> {
    let mut command =
        workspace::calling_cargo(packages::tool(packages::NEXTEST, Consent::from_flag(args.yes))?);
    command.args(["nextest", "run", "--cargo-quiet", "--lib", "--tests"]);
    instrument::apply(&mut command, "sanitize", "-Zsanitizer=address")?;
    match args.packages.as_slice() {
        [] => command.args(PACKAGES.iter().flat_map(|package| ["--package", package])),
        packages => command.args(packages.iter().flat_map(|package| ["--package", package])),
    };
    command.args(["-E", ARITHMETIC]);
    workspace::run(command.env("ASAN_OPTIONS", OPTIONS).args(&args.tests))?;
    if args.packages.is_empty() { interpret() } else { Ok(()) }
}

/// Runs tests under Miri. Only nightly tool chains have it, and none is needed for anything else: that it is skipped is said, and no failure.
fn interpret() -> Result<()> {
    let mut version = workspace::cargo();
    version.args(["miri", "--version"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if !version.status().is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: {} under Miri: this tool chain has none (`cargo miri`)", INTERPRETED.join(", "));
        return Ok(());
    }
    let mut command = workspace::cargo();
    command.args(["miri", "test", "--lib"]);
    command.args(INTERPRETED.iter().flat_map(|package| ["--package", package]));
    workspace::run(&mut command)
}
