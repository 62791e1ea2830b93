//! `cargo xtask ci`: everything that a change must pass, stage by stage, with the time of each.

use crate::{aarch64, ebpf, fuzz, sanitize, site, test, tidy};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::strict;
use harmonaize_testkit::workspace::{self, Binaries, Profile};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The time that one run may take on two cores.
const BUDGET: Duration = Duration::from_secs(90 * 60);

/// What `cargo xtask ci` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask ci --yes --strict      what CI runs
  cargo xtask ci --only fmt,tidy     some stages")]
pub struct Args {
    /// Install missing packages and tools without asking
    #[arg(long)]
    pub yes: bool,
    /// Fail where a stage or a test would be skipped for what this machine lacks
    #[arg(long)]
    pub strict: bool,
    /// Run these stages alone: packages, fmt, tidy, clippy, deny, machete, doc, test, wheel, package, ebpf, softroce, aarch64, dpu, bench, fuzz, sanitize, demo
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
    ("machete", |args| machete(Consent::from_flag(args.yes))),
    ("doc", |args| site::run(&site::Args { yes: args.yes })),
    ("test", |args| test::run(&test::Args { yes: args.yes, runner: Vec::new() })),
    ("wheel", |args| task(args, &["wheel"])),
    ("package", |args| task(args, &["package", "--smoke", "--test"])),
    ("ebpf", |args| ebpf::check(Consent::from_flag(args.yes))),
    ("softroce", |args| task(args, &["softroce", "test"])),
    ("aarch64", |args| aarch64::run(&aarch64::Args { yes: args.yes, cargo: Vec::new() })),
    ("dpu", |args| task(args, &["dpu"])),
    // Whether all of it runs; nothing is timed.
    ("bench", |args| {
        task(args, &["bench", "telemetry", "--smoke"])?;
        task(args, &["bench", "control", "--smoke"])?;
        task(args, &["bench", "compression", "--smoke"])?;
        task(args, &["bench", "aggregation", "--smoke", "--only", "core"])?;
        task(args, &["bench", "cooperation", "--smoke", "--only", "tenant"])?;
        task(args, &["bench", "codec", "--smoke"])?;
        task(args, &["bench", "small", "--smoke"])?;
        let drawn =
            ["bench", "sharing", "--smoke", "--rounds", "1", "--only", "host", "--figures", "target/figures"];
        task(args, &drawn)?;
        task(args, &["bench", "allocation", "--smoke"])?;
        task(args, &["bench", "trust", "--smoke"])
    }),
    ("fuzz", |_| fuzz::run(&fuzz::Args { seconds: fuzz::SECONDS, ..fuzz::Args::default() })),
    ("sanitize", |args| sanitize::run(&sanitize::Args { yes: args.yes, ..sanitize::Args::default() })),
    ("demo", |args| task(args, &["demo", "--steps", "60"])),
];

/// Runs the task: every stage, even after one has failed, each as a process of its own. So what a failed one said can be said
/// again at the end: of a long run, its end alone is read.
pub fn run(args: &Args) -> Result<()> {
    if let Some(unknown) = args.only.iter().find(|name| STAGES.iter().all(|(stage, _)| stage != name)) {
        bail!("there is no stage named {unknown}; `cargo xtask ci --help` lists them");
    }
    let chosen =
        STAGES.iter().filter(|(name, _)| args.only.is_empty() || args.only.iter().any(|only| only == name));
    let chosen: Vec<&(&str, Stage)> = chosen.collect();
    // What the stages run reads the variable, and a process sets none of its own.
    let marked = !args.strict || strict::is_strict();
    if let ([(_, stage)], true) = (chosen.as_slice(), marked) {
        return stage(args);
    }
    let folder = workspace::root().join("target/ci");
    std::fs::create_dir_all(&folder)?;
    // A copy: the stages build this program anew.
    let program = folder.join("xtask");
    std::fs::copy(std::env::current_exe()?, &program).context("cannot copy this program")?;
    let begun = Instant::now();
    let (mut rows, mut failures) = (Vec::new(), String::new());
    for (name, _) in chosen {
        println!("== {name}");
        let started = Instant::now();
        let log = folder.join(format!("{name}.log"));
        let mut stage = Command::new(&program);
        stage.current_dir(workspace::root()).args(["ci", "--only", name]).args(args.yes.then_some("--yes"));
        if args.strict {
            stage.env(strict::VARIABLE, "1");
        }
        let fine = teed(&mut stage, &log)?;
        if !fine {
            println!("== {name} FAILED");
            let said = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
            failures += &format!(
                "\n== what failed in {name}; all of it: {}\n{}\n",
                log.display(),
                failure_excerpt(&said)
            );
        }
        rows.push((*name, started.elapsed(), fine));
    }
    println!("{failures}\n{}", table(&rows, begun.elapsed()));
    let failed: Vec<&str> = rows.iter().filter(|(_, _, fine)| !fine).map(|(name, _, _)| *name).collect();
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    if begun.elapsed() > BUDGET {
        bail!("all stages passed, and took longer than the budget");
    }
    Ok(())
}

/// Runs a command whose output, both streams in one, goes on to this one's and into a file. Whether it ended well. It has no
/// terminal: a question would not be seen, as it ends no line.
fn teed(command: &mut Command, log: &Path) -> Result<bool> {
    let (output, end) = std::io::pipe()?;
    command.stdin(Stdio::null()).stdout(end.try_clone()?).stderr(end);
    let mut child = command.spawn().context("cannot start a stage")?;
    // The command holds the pipe's other end; the output would not end while it lives.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut file = std::fs::File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let (mut output, mut line) = (BufReader::new(output), Vec::new());
    while output.read_until(b'\n', &mut line)? > 0 {
        std::io::stdout().write_all(&line)?;
        file.write_all(&line)?;
        line.clear();
    }
    Ok(child.wait()?.success())
}

/// What of a failed stage's output tells why: what stands around its words of failure, and its end.
fn failure_excerpt(said: &str) -> String {
    const FAILURE_MARKERS: &[&str] = &["FAILED", "panicked at", "error:", "error["];
    const BEFORE: usize = 2;
    const AFTER: usize = 8;
    const END: usize = 20;
    const MOST: usize = 150;
    let lines: Vec<&str> = said.lines().collect();
    let mut chosen = vec![false; lines.len()];
    for (at, line) in lines.iter().enumerate() {
        if FAILURE_MARKERS.iter().any(|word| line.contains(word)) {
            chosen
                .iter_mut()
                .take(at + AFTER)
                .skip(at.saturating_sub(BEFORE))
                .for_each(|chosen| *chosen = true);
        }
    }
    chosen.iter_mut().rev().take(END).for_each(|chosen| *chosen = true);
    let told: Vec<&str> =
        lines.iter().zip(chosen).filter(|(_, chosen)| *chosen).map(|(line, _)| *line).collect();
    told.iter().skip(told.len().saturating_sub(MOST)).fold(String::new(), |text, line| text + line + "\n")
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

/// Runs another task, with the programs that the tests have built. A release build takes minutes and gigabytes, and shows no more. This
/// very program too is the one that was built with them: `cargo xtask` would build it with other features.
fn task(args: &Args, words: &[&str]) -> Result<()> {
    cargo(&["build", "--quiet", "--workspace", "--bins", "--tests"])?;
    let programs = Binaries::folder_of(Profile::Dev);
    let mut task = workspace::calling_cargo(programs.join("xtask"));
    task.env("HARMONAIZE_BINARIES", programs);
    task.args(words).args(args.yes.then_some("--yes"));
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

/// Fails where a crate lists a dependency that it does not use. Of a copy of manifests and sources without the workspace in `ebpf`: the tool
/// takes the nearest workspace for that of a crate, which of the rooms in `ebpf` is another.
fn machete(consent: Consent) -> Result<()> {
    let program = packages::tool(packages::MACHETE, consent)?;
    let copy = workspace::target().join("machete");
    let tree = tidy::Tree::read(&workspace::root())?;
    let _ = std::fs::remove_dir_all(&copy);
    let other = |path: &Path| path == Path::new("ebpf/Cargo.toml") || path.starts_with("ebpf/programs");
    for file in tree.manifests.iter().chain(&tree.rust).filter(|file| !other(&file.path)) {
        let path = copy.join(&file.path);
        std::fs::create_dir_all(path.parent().unwrap_or(&copy))?;
        std::fs::write(&path, &file.text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let output = Command::new(program).arg("--no-ignore").current_dir(&copy).output()?;
    let said =
        [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    print!("{said}");
    // It ends well where it could not read a manifest.
    if !output.status.success() || said.contains("error when handling") {
        bail!("cargo-machete found dependencies that nobody uses, or could not look");
    }
    Ok(())
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
    fn an_excerpt_has_failures_and_the_end() {
        let quiet = "fine\n".repeat(100);
        let said = format!("{quiet}before\ntest a ... FAILED\nbecause\n{quiet}last\n");
        let told = failure_excerpt(&said);
        assert!(told.contains("before\ntest a ... FAILED\nbecause\n") && told.ends_with("last\n"));
        assert_eq!(told.lines().count(), 2 + 8 + 20, "{told}");
        assert_eq!(failure_excerpt("x FAILED\n"), "x FAILED\n");
    }

    #[test]
    fn a_stages_output_is_streamed_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("stage.log");
        let mut command = Command::new("sh");
        assert!(!teed(command.args(["-c", "echo one; echo two >&2; exit 3"]), &log).unwrap());
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "one\ntwo\n");
        assert!(teed(&mut Command::new("true"), &log).unwrap());
        // Nobody answers it.
        let answers = folder.path().join("answers");
        std::fs::write(&answers, "yes\n").unwrap();
        let mut asking = Command::new("sh");
        asking.stdin(std::fs::File::open(&answers).unwrap()).args(["-c", "read answer || echo none"]);
        assert!(teed(&mut asking, &log).unwrap());
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "none\n");
    }

    #[test]
    fn a_forge_runs_each_stage_once() {
        let path = workspace::root().join(".github/workflows/ci.yml");
        let workflow = std::fs::read_to_string(path).unwrap();
        let (_, jobs) = workflow.split_once("stages:\n          - ").unwrap();
        let lines = jobs.lines().map(|line| line.trim_start().trim_start_matches("- "));
        let mut run: Vec<&str> =
            lines.take_while(|line| *line != "env:").flat_map(|line| line.split(',')).collect();
        let mut stages: Vec<&str> = STAGES.iter().map(|(name, _)| *name).collect();
        run.sort_unstable();
        stages.sort_unstable();
        assert_eq!(run, stages);
    }

    #[test]
    fn the_job_that_builds_the_site_uploads_it() {
        let path = workspace::root().join(".github/workflows/ci.yml");
        let workflow = std::fs::read_to_string(path).unwrap();
        let (_, step) = workflow.split_once("uses: actions/upload-pages-artifact@").unwrap();
        assert!(step.contains(&format!("path: target/{}\n", site::FOLDER)), "{step}");
        assert!(workflow.contains("if: contains(matrix.stages, 'doc')"));
    }

    #[test]
    fn an_unknown_stage_is_refused() {
        let args = Args { yes: false, strict: false, only: vec!["fly".into()] };
        assert!(run(&args).unwrap_err().to_string().contains("no stage named fly"));
    }
}
