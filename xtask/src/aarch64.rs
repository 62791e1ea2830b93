//! `cargo xtask aarch64`: builds programs and wheel for the offload unit's architecture, and runs tests of the result under emulation.

pub mod archive;
pub mod toolchain;
pub(crate) mod tree;

use crate::wheel;
use anyhow::Result;
use harmonaize_testkit::packages::Consent;
use harmonaize_testkit::strict;
use harmonaize_testkit::workspace;
use std::time::Instant;
pub use toolchain::folder;
use toolchain::{Prepared, Toolchain};

/// What `cargo xtask aarch64` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask aarch64 --yes                      build and test; installs what is missing
  cargo xtask aarch64 -- test -p harmonaize-plan any call of cargo for that architecture
  cargo xtask aarch64 -- build --release -p harmonaize-agent
                                                 the agent for an offload unit")]
pub struct Args {
    /// Install missing packages without asking
    #[arg(long)]
    pub yes: bool,
    /// A call of cargo to make instead
    #[arg(last = true)]
    pub cargo: Vec<String>,
}

/// Packages whose tests run under emulation, in one call: cargo unifies features over what a call names.
///
/// `kernels` has code of this architecture alone, `abi` lays out bytes that both architectures read, `shm` relies on the
/// order in which memory is seen.
const TESTED: &[&str] = &["harmonaize-kernels", "harmonaize-abi", "harmonaize-shm"];

/// Tests that search every interleaving of a model: the same on every architecture, and minutes long under emulation.
const MODELS: &str = "tests::model::";

/// Tests of pages that the kernel wipes in children: the emulator takes the wish and does not pass it on.
const WIPED: &str = "fork::tests::";

/// Packages that only a developer's machine runs.
const NOT_OF_A_UNIT: &[&str] = &[
    "harmonaize-bench",
    "harmonaize-fuzz",
    "harmonaize-schemas",
    "harmonaize-suites",
    "harmonaize-testkit",
    "harmonaize-tests",
    "xtask",
];

/// Builds what runs on an offload unit, or in a guest of it. Every task that needs some of its programs does it by this very
/// call, since cargo unifies features over what a call names.
pub(crate) fn build(toolchain: &Toolchain) -> Result<()> {
    let begun = Instant::now();
    let mut build = toolchain.cargo();
    build.args(["build", "--locked", "--quiet", "--workspace"]);
    NOT_OF_A_UNIT.iter().for_each(|package| {
        build.args(["--exclude", package]);
    });
    workspace::run(&mut build)?;
    println!("all that runs there is built for aarch64 after {:.0} s", begun.elapsed().as_secs_f64());
    Ok(())
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let begun = Instant::now();
    let consent = Consent::from_flag(args.yes);
    let toolchain = match Toolchain::prepare(consent)? {
        Prepared::Ready(toolchain) => toolchain,
        Prepared::Impossible(why) => return strict::skip("building and testing for aarch64", why),
    };
    println!("{} is ready after {:.0} s", toolchain.version(), begun.elapsed().as_secs_f64());
    if !args.cargo.is_empty() {
        return workspace::run(toolchain.cargo().args(&args.cargo));
    }
    build(&toolchain)?;
    let tested = Instant::now();
    let mut tests = toolchain.cargo();
    tests.args(["test", "--locked", "--quiet", "--no-fail-fast", "--lib", "--bins", "--tests"]);
    TESTED.iter().for_each(|package| {
        tests.args(["--package", package]);
    });
    tests.args(["--", "--skip", MODELS, "--skip", WIPED]);
    workspace::run(&mut tests)?;
    println!("its tests have passed after {:.0} s", tested.elapsed().as_secs_f64());
    wheel::cross(&toolchain, false, consent)
}
