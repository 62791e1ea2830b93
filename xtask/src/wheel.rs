//! `cargo xtask wheel`: builds the Python wheel, installs it into a fresh environment, and runs its tests as ranks on an emulated fabric.

use anyhow::{Context, Result, bail};
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket};
use harmonaize_testkit::fabric::{self, Fabric};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::strict;
use harmonaize_testkit::topology::{self, Topology};
use harmonaize_testkit::workspace::{self, Binaries, Profile};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// What builds the wheel and tests it, but for torch.
const TOOLS: &[&str] = &["maturin==1.16.0", "numpy>=2,<3", "pytest>=9,<10", "expecttest==0.3.0"];

/// The PyTorch that tests run with, and what it needs to be imported.
const TORCH: &str = "torch==2.15.0";
const TORCH_NEEDS: &[&str] = &["typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "filelock"];

/// Hosts of the fabric, and the rate of their links: slow enough for tensors to be compressed where a budget allows.
const HOSTS: usize = 2;
const RATE: &str = "100Mbit/s";

/// What `cargo xtask wheel` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask wheel --yes                    build, install, test; installs what is missing
  cargo xtask wheel --release --build        the wheel for tenants, in target/wheel/dist
  cargo xtask wheel --program dataplane/python/examples/hello_torch.py
                                             a program of one's own on the fabric
  cargo xtask wheel -- -k ddp                tests whose names contain a word; arguments go to pytest")]
pub struct Args {
    /// Install missing packages without asking
    #[arg(long)]
    pub yes: bool,
    /// Optimise the wheel
    #[arg(long)]
    pub release: bool,
    /// Only build the wheel
    #[arg(long)]
    pub build: bool,
    /// Run a Python program by torchrun instead of the tests, as two ranks on the fabric's first host
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    /// Arguments for pytest, or for the program
    #[arg(last = true)]
    pub arguments: Vec<String>,
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let consent = Consent::from_flag(args.yes);
    packages::require(&[packages::BUILDING, packages::PYTHON].concat(), consent)?;
    let begun = Instant::now();
    let place = workspace::target().join("wheel");
    std::fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    let tests = Environment { folder: place.join("venv") };
    if !tests.runs("import maturin, numpy, pytest, expecttest")? {
        consent.obtain(&format!("an environment in {} with {}", tests.folder.display(), TOOLS.join(", ")))?;
        tests.make()?;
        tests.pip(&[], TOOLS)?;
    }
    let wheel = build(&tests, &place.join("dist"), args.release)?;
    println!("{} is built after {:.0} s", wheel.display(), begun.elapsed().as_secs_f64());
    if args.build {
        return Ok(());
    }
    // One without a compiler's or torch's traces: the wheel needs nothing.
    let bare = Environment { folder: place.join("bare") };
    bare.make()?;
    bare.pip(&["--no-index"], &[&wheel])?;
    workspace::run(
        bare.python().args(["-c", "import harmonaize; print('harmonaize', harmonaize.__version__)"]),
    )?;
    if !tests.runs("import torch")? {
        consent.obtain(&format!("{TORCH} in {}, 1.4 GB", tests.folder.display()))?;
        tests.pip(&[], TORCH_NEEDS)?;
        tests.pip(&["--no-deps"], &[TORCH])?;
        // PyPI's is built for CUDA, whose libraries are three times as large as torch. Tests need none of them.
        let stubs = sources().join("tests/cuda-stubs.sh");
        workspace::run(Command::new("bash").arg(stubs).arg(&tests.folder))?;
    }
    tests.pip(&["--no-index", "--no-deps", "--force-reinstall"], &[&wheel])?;
    println!("torch and the wheel are installed after {:.0} s", begun.elapsed().as_secs_f64());
    if !fabric::privileged() {
        return strict::skip("the wheel's tests", "they make network namespaces, which needs root");
    }
    packages::require(packages::EMULATION, consent)?;
    let tested = Instant::now();
    on_fabric(&tests, args)?;
    println!("the wheel's tests have passed after {:.0} s", tested.elapsed().as_secs_f64());
    Ok(())
}

fn sources() -> PathBuf {
    workspace::root().join("dataplane/python")
}

/// Builds the wheel, alone in a folder.
fn build(tests: &Environment, into: &Path, release: bool) -> Result<PathBuf> {
    let _ = std::fs::remove_dir_all(into);
    let mut maturin = tests.python();
    maturin.args(["-m", "maturin", "build", "--quiet", "--locked", "--manifest-path"]);
    maturin.arg(sources().join("Cargo.toml")).arg("--out").arg(into).args(release.then_some("--release"));
    workspace::run(&mut maturin)?;
    let wheels: Vec<PathBuf> =
        std::fs::read_dir(into)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    match wheels.as_slice() {
        [wheel] => Ok(wheel.clone()),
        others => bail!("{} wheels in {}", others.len(), into.display()),
    }
}

/// Runs the tests, or a program, beside control and agents.
fn on_fabric(tests: &Environment, args: &Args) -> Result<()> {
    let fabric = Fabric::build(&Topology::parse(&topology::star(HOSTS, RATE))?)?;
    let tenants = [Tenant { name: "a".into(), user: 0 }];
    let mut deployment = Deployment::start(fabric, Setup::new(Binaries::build(Profile::Dev)?, &tenants))?;
    let sockets = deployment.hosts().iter().map(|host| socket(host, "a"));
    let sockets: Vec<String> = sockets.map(|path| path.to_string_lossy().into_owned()).collect();
    let mut command = tests.python();
    match &args.program {
        Some(program) => {
            command
                .args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
                .arg(program);
            command.envs(sockets.first().map(|socket| ("HARMONAIZE_SOCKET", socket)));
        }
        None => {
            command.args(["-m", "pytest", "-q", "--durations=5", "-p", "no:cacheprovider"]);
            command.arg(sources().join("tests")).env("HARMONAIZE_SOCKETS", sockets.join(","));
        }
    }
    command.args(&args.arguments).env("PYTHONDONTWRITEBYTECODE", "1").env("OMP_NUM_THREADS", "1");
    let ran = workspace::run(&mut command);
    deployment.check()?;
    ran
}

/// A virtual environment of Python's.
struct Environment {
    folder: PathBuf,
}

impl Environment {
    fn make(&self) -> Result<()> {
        workspace::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&self.folder))
    }

    fn python(&self) -> Command {
        let mut python = Command::new(self.folder.join("bin/python"));
        python.current_dir(workspace::root());
        python
    }

    /// Whether a line of Python runs there.
    fn runs(&self, line: &str) -> Result<bool> {
        if !self.folder.join("bin/python").is_file() {
            return Ok(false);
        }
        Ok(self.python().args(["-c", line]).stderr(Stdio::null()).status()?.success())
    }

    fn pip(&self, options: &[&str], packages: &[impl AsRef<OsStr>]) -> Result<()> {
        let mut pip = self.python();
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(options);
        workspace::run(pip.args(packages))
    }
}
