//! `cargo xtask ci`: everything that a change must pass, stage by stage, with the time of each.

use crate::packages::{self, Consent};
use crate::workspace::{self, Binaries, Profile};
use crate::{aarch64, ebpf, test, tidy};
use anyhow::{Result, bail};
use std::process::Command;
use std::time::{Duration, Instant};

/// The time that one run may take on two cores.
const BUDGET: Duration = Duration::from_secs(90 * 60);

/// What `cargo xtask ci` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask ci --yes               what CI runs
  cargo xtask ci --only fmt,tidy     some stages")]
pub struct Args {
    /// Install missing packages and tools without asking
    #[arg(long)]
    pub yes: bool,
    /// Run these stages alone: packages, fmt, tidy, clippy, deny, doc, test, ebpf, softroce, aarch64, dpu, bench, demo
    #[arg(long, value_delimiter = ',', value_name = "STAGE")]
    pub only: Vec<String>,
}

type Stage = fn(&Args) -> Result<()>;

/// The stages, quick ones first.
const STAGES: &[(&str, Stage)] = &[
    ("packages", |args| packages::require(packages::BUILDING, Consent::from_flag(args.yes))),
    ("fmt", |_| cargo(&["fmt", "--all", "--", "--check"])),
    ("tidy", |_| tidy::run(&tidy::Args {})),
    ("clippy", |_| {
        cargo(&["clippy", "--locked", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])
    }),
    ("deny", |args| deny(Consent::from_flag(args.yes))),
    ("doc", |_| {
        let mut doc = workspace::cargo();
        doc.args(["doc", "--locked", "--quiet", "--no-deps", "--keep-going"]);
        // Documents for ourselves too: links to private items are welcome.
        doc.env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private-intra-doc-links");
        workspace::run(&mut doc)
    }),
    ("test", |args| test::run(&test::Args { yes: args.yes, runner: Vec::new() })),
    ("ebpf", |args| ebpf::check(Consent::from_flag(args.yes))),
    ("softroce", |args| task(args, &["softroce", "test"])),
    ("aarch64", |args| aarch64::run(&aarch64::Args { yes: args.yes, cargo: Vec::new() })),
    ("dpu", |args| task(args, &["dpu"])),
    // Whether all of it runs; nothing is timed.
    ("bench", |args| {
        task(args, &["bench", "telemetry", "--smoke"])?;
        task(args, &["bench", "control", "--smoke"])?;
        task(args, &["bench", "compression", "--smoke"])
    }),
    ("demo", |args| task(args, &["demo", "--steps", "60"])),
];

/// Runs the task: every stage, even after one has failed.
pub fn run(args: &Args) -> Result<()> {
    if let Some(unknown) = args.only.iter().find(|name| STAGES.iter().all(|(stage, _)| stage != name)) {
        bail!("there is no stage named {unknown}; `cargo xtask ci --help` lists them");
    }
    let chosen =
        STAGES.iter().filter(|(name, _)| args.only.is_empty() || args.only.iter().any(|only| only == name));
    let begun = Instant::now();
    let mut rows = Vec::new();
    for (name, stage) in chosen {
        println!("== {name}");
        let started = Instant::now();
        let done = stage(args);
        if let Err(error) = &done {
            println!("== {name} FAILED: {error:#}");
        }
        rows.push((*name, started.elapsed(), done.is_ok()));
    }
    println!("\n{}", table(&rows, begun.elapsed()));
    let failed: Vec<&str> = rows.iter().filter(|(_, _, fine)| !fine).map(|(name, _, _)| *name).collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    if begun.elapsed() > BUDGET {
        bail!("all stages passed, and took longer than the budget");
    }
    Ok(())
}

fn table(rows: &[(&str, Duration, bool)], total: Duration) -> String {
    let minutes = |time: Duration| time.as_secs_f64() / 60.0;
    let mut lines = vec![format!("{:<8} {:>8}  result", "stage", "minutes")];
    for (name, time, fine) in rows {
        lines.push(format!("{name:<8} {:>8.1}  {}", minutes(*time), if *fine { "passed" } else { "FAILED" }));
    }
    lines.push(format!("{:<8} {:>8.1}  of a budget of {:.0}", "all", minutes(total), minutes(BUDGET)));
    lines.join("\n")
}

fn cargo(arguments: &[&str]) -> Result<()> {
    workspace::run(workspace::cargo().args(arguments))
}

/// Another task, with the programs that the tests have built: a release build takes minutes and gigabytes, and shows no
/// more. By cargo, for the stages before may have built this very program anew.
fn task(args: &Args, words: &[&str]) -> Result<()> {
    cargo(&["build", "--quiet", "--workspace", "--bins", "--tests"])?;
    let mut task = workspace::cargo();
    task.env("HARMONAIZE_BINARIES", Binaries::folder_of(Profile::Dev));
    task.arg("xtask").args(words).args(args.yes.then_some("--yes"));
    workspace::run(&mut task)
}

fn deny(consent: Consent) -> Result<()> {
    let program = packages::tool(packages::DENY, consent)?;
    let mut command = Command::new(program);
    command.current_dir(workspace::root()).args(["--config", ".deny.toml", "check"]);
    command.args(["bans", "licenses", "sources"]);
    eprintln!("SKIPPED: advisories; their database is not reached from here.");
    workspace::run(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_holds_time_against_the_budget() {
        let rows = [("fmt", Duration::from_secs(6), true), ("test", Duration::from_secs(90), false)];
        let expected = "stage     minutes  result\nfmt           0.1  passed\ntest          1.5  FAILED\n\
                        all           1.6  of a budget of 90";
        assert_eq!(table(&rows, Duration::from_secs(96)), expected);
    }

    #[test]
    fn an_unknown_stage_is_refused() {
        let args = Args { yes: false, only: vec!["fly".into()] };
        assert!(run(&args).unwrap_err().to_string().contains("no stage named fly"));
    }
}
