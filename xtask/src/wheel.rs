//! `cargo xtask wheel`: builds the Python wheel, installs it into a fresh environment, and runs its tests as ranks on an emulated fabric.

use anyhow::Result;
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket};
use harmonaize_testkit::fabric::{self, Fabric};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::python::Environment;
use harmonaize_testkit::strict;
use harmonaize_testkit::topology::{self, Topology};
use harmonaize_testkit::workspace::{self, Binaries, Profile};
use std::path::PathBuf;
use std::time::Instant;

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
    let tests = Environment::shared();
    tests.add_tools(consent)?;
    let wheel = tests.build_wheel(args.release)?;
    println!("{} is built after {:.0} s", wheel.display(), begun.elapsed().as_secs_f64());
    if args.build {
        return Ok(());
    }
    // One without a compiler's or torch's traces: the wheel needs nothing.
    let bare = Environment::at(workspace::target().join("wheel/bare"));
    bare.make()?;
    bare.pip(&["--no-index"], &[&wheel])?;
    workspace::run(
        bare.python().args(["-c", "import harmonaize; print('harmonaize', harmonaize.__version__)"]),
    )?;
    tests.add_torch(consent)?;
    tests.add_wheel(&wheel)?;
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
