//! `cargo xtask ebpf`: builds the programs for the kernel from their source, and checks that the committed objects are theirs.

mod c;
mod object;
mod toolchain;

use anyhow::{Context, Result, bail};
use c::Compiler;
use harmonaize_testkit::packages::Consent;
use harmonaize_testkit::strict;
use harmonaize_testkit::workspace;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use toml::{Table, Value};
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

/// The objects of the programs in Rust: each with the program that it is of, and with its features.
const PROGRAMS: &[(&str, &str, &str)] =
    &[("telemetry", "telemetry", ""), ("diagnosis", "telemetry", "diagnosis"), ("loss", "loss", "")];

/// Names the folder of the objects that tests load instead of the committed ones.
pub const OBJECTS: &str = "HARMONAIZE_EBPF_OBJECTS";

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    match &args.action {
        Action::Build(consent) => build(Consent::from_flag(consent.yes)),
        Action::Check(consent) => check(Consent::from_flag(consent.yes)),
    }
}

/// The tools for both languages.
struct Tools {
    rust: Toolchain,
    c: Compiler,
}

impl Tools {
    /// Finds or fetches them; else says why there are none.
    fn prepare(consent: Consent) -> Result<Result<Self, String>> {
        let rust = match Toolchain::prepare(consent)? {
            Prepared::Ready(toolchain) => toolchain,
            Prepared::Impossible(why) => return Ok(Err(why)),
        };
        let none = "Debian's package lists name no compiler of C for them";
        Ok(Compiler::prepare(consent)?.map(|c| Self { rust, c }).ok_or_else(|| none.to_owned()))
    }

    /// What decides how the objects come out.
    fn record(&self) -> Table {
        let mut record = self.rust.record();
        record.extend(self.c.record().map(|(name, value)| (name.to_owned(), Value::String(value))));
        record
    }

    /// Builds every object into `into`.
    fn compile(&self, into: &Path) -> Result<()> {
        let begun = Instant::now();
        fs::create_dir_all(into)?;
        compile(&self.rust, into)?;
        self.c.compile(into)?;
        println!("the programs are built after {:.0} s", begun.elapsed().as_secs_f64());
        Ok(())
    }
}

/// The names of all objects.
fn objects() -> impl Iterator<Item = &'static str> {
    PROGRAMS.iter().map(|(object, ..)| *object).chain(c::OBJECTS.iter().map(|(name, ..)| *name))
}

fn build(consent: Consent) -> Result<()> {
    let tools = match Tools::prepare(consent)? {
        Ok(tools) => tools,
        Err(why) => bail!("the programs cannot be built here: {why}"),
    };
    let committed = committed();
    tools.compile(&committed)?;
    let record = "# Made by `cargo xtask ebpf build`: what the objects beside it were built with.\n"
        .to_owned()
        + &tools.record().to_string();
    fs::write(committed.join("record.toml"), record)?;
    for program in objects() {
        let length = fs::metadata(committed.join(format!("{program}.o")))?.len();
        println!("{program}.o: {length} bytes");
    }
    Ok(())
}

/// Proves that the committed objects are those of the source. It can do so as far as the archive still has what they
/// were built with.
pub fn check(consent: Consent) -> Result<()> {
    formatted()?;
    let tools = match Tools::prepare(consent)? {
        Ok(tools) => tools,
        Err(why) => return strict::skip("building the programs and comparing the committed objects", why),
    };
    let built = folder().join("objects");
    tools.compile(&built)?;
    let committed = committed();
    let read = |folder: &Path, program: &str| {
        let path = folder.join(format!("{program}.o"));
        fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let mut different = Vec::new();
    for program in objects() {
        if read(&committed, program)? != read(&built, program)? {
            different.push(program);
        }
    }
    if different.is_empty() {
        println!("the committed objects are those of the source");
        return Ok(());
    }
    let different = different.join(", ");
    let record: Table = fs::read_to_string(committed.join("record.toml"))?.parse()?;
    if record == tools.record() {
        bail!("{different}: not what the source gives; run `cargo xtask ebpf build` and commit ebpf/objects");
    }
    eprintln!(
        "NOT PROVEN: the committed objects ({different}) were built with other tools than there are now."
    );
    eprintln!("recorded:\n{record}now:\n{}", tools.record());
    eprintln!("Testing what these tools build instead.");
    let mut test = workspace::cargo();
    test.args(["test", "--locked", "--quiet", "--package", "harmonaize-loader"]);
    test.args(["--package", "harmonaize-core-c"]).env(OBJECTS, &built);
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

/// Builds every program in Rust into `into`.
fn compile(toolchain: &Toolchain, into: &Path) -> Result<()> {
    let build = folder().join("build");
    for (object, program, features) in PROGRAMS {
        let mut cargo = workspace::cargo();
        cargo.current_dir(workspace::root().join("ebpf"));
        cargo.args(["build", "--quiet", "--release", "--locked", "--bin", program, "--features", features]);
        cargo.args(["--target", toolchain::TARGET, "--target-dir"]).arg(&build);
        toolchain.apply(&mut cargo, program)?;
        workspace::run(&mut cargo)?;
        let linked = build.join(toolchain::TARGET).join("release").join(program);
        let bytes = fs::read(&linked).with_context(|| format!("cannot read {}", linked.display()))?;
        object::put(object, &bytes, into)?;
    }
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
