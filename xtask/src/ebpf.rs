//! `cargo xtask ebpf`: builds the programs for the kernel from their source, and checks that the committed objects are theirs.

mod object;
mod toolchain;

use crate::packages::Consent;
use crate::workspace;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use toml::Table;
use toolchain::{Prepared, Toolchain};

/// What `cargo xtask ebpf` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask ebpf build --yes   the objects of ebpf/objects from ebpf/programs, after a change there
  cargo xtask ebpf check --yes   what CI runs: the committed objects are those of the source")]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Build the programs and put them in the place of the committed objects
    Build(Consented),
    /// Build the programs and compare; where the compiler is not the recorded one, test what it built
    Check(Consented),
}

/// What both take.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Consented {
    /// Install missing packages and tools without asking
    #[arg(long)]
    pub yes: bool,
}

/// The programs, each an object of its own.
const PROGRAMS: &[&str] = &["telemetry", "loss"];

/// Names the folder of the objects that tests load instead of the committed ones.
pub const OBJECTS: &str = "HARMONAIZE_EBPF_OBJECTS";

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    match &args.action {
        Action::Build(consent) => build(Consent::from_flag(consent.yes)),
        Action::Check(consent) => check(Consent::from_flag(consent.yes)),
    }
}

fn build(consent: Consent) -> Result<()> {
    let toolchain = match Toolchain::prepare(consent)? {
        Prepared::Ready(toolchain) => toolchain,
        Prepared::Impossible(why) => bail!("the programs cannot be built here: {why}"),
    };
    let committed = committed();
    compile(&toolchain, &committed)?;
    let record = "# Made by `cargo xtask ebpf build`: what the objects beside it were built with.\n"
        .to_owned()
        + &toolchain.record().to_string();
    fs::write(committed.join("record.toml"), record)?;
    for program in PROGRAMS {
        let length = fs::metadata(committed.join(format!("{program}.o")))?.len();
        println!("{program}.o: {length} bytes");
    }
    Ok(())
}

/// Proves that the committed objects are those of the source, as far as the archive still has what they were built with.
pub fn check(consent: Consent) -> Result<()> {
    formatted()?;
    let toolchain = match Toolchain::prepare(consent)? {
        Prepared::Ready(toolchain) => toolchain,
        Prepared::Impossible(why) => {
            eprintln!("SKIPPED: the programs are not built, and the committed objects not compared: {why}.");
            return Ok(());
        }
    };
    let built = folder().join("objects");
    fs::create_dir_all(&built)?;
    compile(&toolchain, &built)?;
    let committed = committed();
    let read = |folder: &Path, program: &str| {
        let path = folder.join(format!("{program}.o"));
        fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let mut different = Vec::new();
    for program in PROGRAMS {
        if read(&committed, program)? != read(&built, program)? {
            different.push(*program);
        }
    }
    if different.is_empty() {
        println!("the committed objects are those of the source");
        return Ok(());
    }
    let different = different.join(", ");
    let record: Table = fs::read_to_string(committed.join("record.toml"))?.parse()?;
    if record == toolchain.record() {
        bail!("{different}: not what the source gives; run `cargo xtask ebpf build` and commit ebpf/objects");
    }
    eprintln!(
        "NOT PROVEN: the committed objects ({different}) were built with other tools than there are now."
    );
    eprintln!("recorded:\n{record}now:\n{}", toolchain.record());
    eprintln!("Testing what these tools build instead.");
    let mut test = workspace::cargo();
    test.args(["test", "--locked", "--quiet", "--package", "harmonaize-loader"]).env(OBJECTS, &built);
    workspace::run(&mut test)
}

/// The folder of everything that is kept for the programs.
fn folder() -> PathBuf {
    workspace::target().join("ebpf")
}

/// The committed objects.
fn committed() -> PathBuf {
    workspace::root().join("ebpf").join("objects")
}

/// The workspace of the programs has no other check of its format.
fn formatted() -> Result<()> {
    let mut format = workspace::cargo();
    format.args(["fmt", "--manifest-path", "ebpf/programs/Cargo.toml", "--", "--check"]);
    workspace::run(&mut format)
}

/// Builds every program into `into`.
fn compile(toolchain: &Toolchain, into: &Path) -> Result<()> {
    let begun = Instant::now();
    let build = folder().join("build");
    let mut cargo = workspace::cargo();
    cargo.current_dir(workspace::root().join("ebpf"));
    cargo.args(["build", "--quiet", "--release", "--locked", "--target", toolchain::TARGET, "--target-dir"]);
    cargo.arg(&build);
    toolchain.apply(&mut cargo, PROGRAMS)?;
    workspace::run(&mut cargo)?;
    fs::create_dir_all(into)?;
    for program in PROGRAMS {
        let linked = build.join(toolchain::TARGET).join("release").join(program);
        let bytes = fs::read(&linked).with_context(|| format!("cannot read {}", linked.display()))?;
        let stripped =
            object::strip(&bytes).with_context(|| format!("{} is no usable object", linked.display()))?;
        let text = String::from_utf8_lossy(&stripped);
        let root = workspace::root();
        if text.contains(&*root.to_string_lossy()) {
            bail!("{program} names the path of this tree, {}", root.display());
        }
        fs::write(into.join(format!("{program}.o")), stripped)?;
    }
    println!("the programs are built after {:.0} s", begun.elapsed().as_secs_f64());
    Ok(())
}

/// What a command prints.
fn printed(command: &mut Command) -> Result<String> {
    let shown = workspace::describe(command);
    let output = command.output().with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
