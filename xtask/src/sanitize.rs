//! `cargo xtask sanitize`: tests of the rooms with unsafe code under AddressSanitizer.

use crate::instrument;
use anyhow::Result;
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace;

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
    "harmonaize-transport",
    "harmonaize-staging",
    "harmonaize-engine",
];

/// Tests of arithmetic alone, whose minutes find nothing.
const ARITHMETIC: &str = "not binary(adaptation)";

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
    workspace::run(command.env("ASAN_OPTIONS", OPTIONS).args(&args.tests))
}
