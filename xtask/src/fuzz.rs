//! `cargo xtask fuzz`: the targets of `tests/fuzz` under libFuzzer, from their kept corpora on.

use crate::instrument;
use anyhow::{Context, Result, bail};
use harmonaize_testkit::workspace;
use std::collections::BTreeSet;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread::available_parallelism;

/// What `cargo xtask fuzz` takes.
#[derive(Debug, Default, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask fuzz                            each target for 15 seconds, as CI does
  cargo xtask fuzz session rings --seconds 600
  cargo xtask fuzz --seconds 60 --keep        and keeps, of what was found, what covers more")]
pub struct Args {
    /// These targets alone; all if none is given
    #[arg(value_name = "TARGET")]
    pub targets: Vec<String>,
    /// How long each target runs; all processors have one at a time
    #[arg(long, default_value_t = SECONDS)]
    pub seconds: u64,
    /// Put into the kept corpora what of the new inputs covers more
    #[arg(long)]
    pub keep: bool,
}

/// How long each target runs in CI. The 19 of them have 285 s of processor time, five minutes with their starts.
pub(crate) const SECONDS: u64 = 15;

/// Most bytes that one input may add to a kept corpus, and most inputs of it.
const KEPT_BYTES: u64 = 512;
const KEPT: usize = 48;

/// What a target's run came to.
struct Ran {
    name: String,
    /// Edges that were covered, and inputs run, as libFuzzer counts them.
    edges: u64,
    inputs: u64,
    failed: Option<String>,
}

/// Runs the task; fails where a target does, with the input and the command that runs it again.
pub fn run(args: &Args) -> Result<()> {
    let program = build()?;
    let all = names()?;
    if let Some(unknown) = args.targets.iter().find(|name| !all.contains(*name)) {
        bail!("there is no target {unknown}; there are {}", Vec::from_iter(all).join(", "));
    }
    let chosen: Vec<&String> =
        all.iter().filter(|name| args.targets.is_empty() || args.targets.contains(name)).collect();
    let ran = in_parallel(&chosen, |name| one(&program, name, args.seconds))?;
    println!("{:<14} {:>8} {:>12}", "target", "edges", "inputs");
    for ran in &ran {
        println!("{:<14} {:>8} {:>12}", ran.name, ran.edges, ran.inputs);
    }
    let failed: Vec<&str> = ran.iter().filter_map(|ran| ran.failed.as_deref()).collect();
    if !failed.is_empty() {
        bail!("{}", failed.join("\n"));
    }
    if args.keep {
        chosen.into_iter().try_for_each(|name| keep(&program, name))?;
    }
    Ok(())
}

/// Builds the program of the targets, in which the project's own crates count their edges. All others are as in every build.
fn build() -> Result<PathBuf> {
    let mut cargo = workspace::cargo();
    instrument::apply(&mut cargo, "fuzz", FEEDBACK)?;
    // Of the whole workspace: cargo unifies features over what a call names, and others' crates serve as they are built for the tests.
    cargo.args([
        "build",
        "--workspace",
        "--bin",
        "harmonaize-fuzz",
        "--features",
        "harmonaize-fuzz/libfuzzer",
    ]);
    let built = workspace::executables(&mut cargo, &["harmonaize-fuzz"])?;
    built.into_iter().map(|(_, path)| path).next().context("cargo has not built the program")
}

/// What has the compiler count edges and note comparisons; as cargo-fuzz has it.
const FEEDBACK: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

fn kept() -> PathBuf {
    workspace::root().join("tests/fuzz/corpora")
}

/// The targets: each has a folder of kept inputs, which a test of theirs checks.
fn names() -> Result<BTreeSet<String>> {
    let folders = std::fs::read_dir(kept()).context("there are no kept corpora")?;
    folders.map(|folder| Ok(folder?.file_name().to_string_lossy().into_owned())).collect()
}

/// What a target's runs found, and may find; is made where it is not there.
fn folder(name: &str, part: &str) -> Result<PathBuf> {
    let folder = workspace::target().join("fuzz").join(name).join(part);
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

fn command(program: &Path, name: &str) -> Command {
    let mut command = Command::new(program);
    command.env("HARMONAIZE_FUZZ", name).current_dir(workspace::root()).stdin(Stdio::null());
    command
}

fn one(program: &Path, name: &str, seconds: u64) -> Result<Ran> {
    let (found, failures) = (folder(name, "found")?, folder(name, "failures")?);
    let mut run = command(program, name);
    run.arg(format!("-max_total_time={seconds}")).arg(format!("-artifact_prefix={}/", failures.display()));
    run.args(["-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1", "-reload=0"]);
    let output = run.arg(&found).arg(kept().join(name)).output().context("cannot start a target")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let failed = (!output.status.success()).then(|| {
        let input = said
            .lines()
            .rev()
            .find_map(|line| line.split_once("Test unit written to "))
            .map(|(_, path)| path);
        let again = input.map_or_else(String::new, |input| {
            format!("run again: HARMONAIZE_FUZZ={name} {} {input}\n", program.display())
        });
        format!("{name} failed\n{again}{}", ending(&said))
    });
    let executed = said.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    let inputs = executed.and_then(|count| count.trim().parse().ok()).unwrap_or(0);
    Ok(Ran { name: name.to_owned(), edges: edges(&said), inputs, failed })
}

/// The edges that libFuzzer told last.
fn edges(said: &str) -> u64 {
    let count = |line: &str| line.split_once(" cov: ")?.1.split_whitespace().next()?.parse().ok();
    said.lines().rev().find_map(count).unwrap_or(0)
}

/// The lines before a failing target's end that say why.
fn ending(said: &str) -> String {
    let telling =
        |line: &&str| !line.starts_with('#') && !line.starts_with("stat::") && !line.trim().is_empty();
    let lines: Vec<&str> = said.lines().filter(telling).collect();
    lines.iter().skip(lines.len().saturating_sub(60)).fold(String::new(), |text, line| text + line + "\n")
}

/// Does something for each name, on all processors at once.
fn in_parallel(names: &[&String], each: impl Fn(&str) -> Result<Ran> + Sync) -> Result<Vec<Ran>> {
    let (next, done) = (Mutex::new(names.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                loop {
                    let name = next.lock().ok().and_then(|mut names| names.next());
                    let Some(name) = name else { return };
                    let ran = each(name);
                    if let Ok(mut done) = done.lock() {
                        done.push(ran);
                    }
                }
            });
        }
    });
    let done = done.into_inner().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
    let mut done = done.into_iter().collect::<Result<Vec<Ran>>>()?;
    done.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(done)
}

/// Adds to a kept corpus those of the new inputs that cover more, short ones first.
fn keep(program: &Path, name: &str) -> Result<()> {
    let (found, merged, kept) = (folder(name, "found")?, folder(name, "merged")?, kept().join(name));
    std::fs::remove_dir_all(&merged)?;
    let merged = folder(name, "merged")?;
    let mut merge = command(program, name);
    merge.args(["-merge=1", &format!("-max_len={KEPT_BYTES}")]).args([&merged, &kept, &found]);
    let output = merge.output().context("cannot start a target")?;
    if !output.status.success() {
        bail!("{name} cannot be merged\n{}", ending(&String::from_utf8_lossy(&output.stderr)));
    }
    let mut inputs = Vec::new();
    for input in std::fs::read_dir(&merged)? {
        let input = input?;
        inputs.push((input.metadata()?.len(), input.file_name()));
    }
    inputs.sort();
    std::fs::remove_dir_all(&kept)?;
    std::fs::create_dir_all(&kept)?;
    // Evenly over all lengths: the long ones reach farthest.
    let each = inputs.len().div_ceil(KEPT).max(1);
    for (_, input) in inputs.iter().rev().step_by(each) {
        std::fs::copy(merged.join(input), kept.join(input))?;
    }
    Ok(())
}
