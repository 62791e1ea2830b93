//! `cargo xtask wheel`: builds the Python wheel and installs it into a fresh environment. It runs the wheel's tests as ranks on an
//! emulated fabric. That for aarch64 is imported under emulation.

use crate::aarch64::toolchain::{Prepared, TARGET, Toolchain, folder};
use crate::package::{self, Arch, Libraries};
use anyhow::{Result, bail};
use harmonaize_testkit::deployment::{Deployment, Setup, Tenant, socket};
use harmonaize_testkit::fabric::{self, Fabric};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::python::Environment;
use harmonaize_testkit::strict;
use harmonaize_testkit::topology::{self, Topology};
use harmonaize_testkit::workspace::{self, Binaries, Profile};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Hosts of the fabric, and the rate of their links. The rate is slow enough for tensors to be compressed where a
/// budget allows.
const HOSTS: usize = 2;
const RATE: &str = "100Mbit/s";

/// What `cargo xtask wheel` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask wheel --yes                    build, install, test; installs what is missing
  cargo xtask wheel --release --build        the wheel for tenants, in target/wheel/dist
  cargo xtask wheel --release --arch arm64   that for aarch64, in target/wheel/dist-arm64
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
    /// The architecture of the wheel. Another one than this machine's is built by Debian's cross compiler, and not tested
    #[arg(long, value_enum, default_value_t = Arch::HOST)]
    pub arch: Arch,
    /// Only build the wheel
    #[arg(long)]
    pub build: bool,
    /// Run a Python program by torchrun instead of the tests, as two ranks on the fabric's first host
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    /// Run tests of PyTorch's repository instead, such as its test/distributed/tensor: what they do by gloo goes by the wheel
    #[arg(long, value_name = "PATH", conflicts_with = "program")]
    pub tests: Option<PathBuf>,
    /// Arguments for pytest, or for the program
    #[arg(last = true)]
    pub arguments: Vec<String>,
}

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let consent = Consent::from_flag(args.yes);
    if args.arch != Arch::HOST {
        args.arch.check_cross(Arch::HOST)?;
        if args.program.is_some() || args.tests.is_some() || !args.arguments.is_empty() {
            bail!("tests and programs run on this machine, which is of another architecture");
        }
        return match Toolchain::prepare(consent)? {
            Prepared::Ready(toolchain) => cross(&toolchain, args.release, consent),
            Prepared::Impossible(why) => strict::skip("the wheel for aarch64", why),
        };
    }
    packages::require(&[packages::BUILDING, packages::PYTHON].concat(), consent)?;
    let begun = Instant::now();
    let tests = Environment::shared();
    tests.add_tools(consent)?;
    let wheel = tests.build_wheel("dist", args.release, |_| ())?;
    println!("{} is built after {:.0} s", wheel.display(), begun.elapsed().as_secs_f64());
    check(&wheel, args.arch, &tests)?;
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

/// Builds the wheel for aarch64, checks it, and imports it under emulation.
pub(crate) fn cross(toolchain: &Toolchain, release: bool, consent: Consent) -> Result<()> {
    const IMPORT: &str = "import platform, sys; sys.path.insert(0, sys.argv[1]); import harmonaize; \
                          print('harmonaize', harmonaize.__version__, 'on', platform.machine())";
    let begun = Instant::now();
    let tools = Environment::shared();
    tools.add_tools(consent)?;
    let wheel = tools.build_wheel("dist-arm64", release, |maturin| {
        maturin.args(["--target", TARGET, "--target-dir"]).arg(folder().join("build"));
        toolchain.configure(maturin);
    })?;
    println!("{} is built after {:.0} s", wheel.display(), begun.elapsed().as_secs_f64());
    let files = check(&wheel, Arch::Arm64, &tools)?;
    workspace::run(toolchain.python()?.args(["-c", IMPORT]).arg(files))
}

/// Checks that a wheel's library is as the wheel's name says. Returns the folder with the wheel's files.
fn check(wheel: &Path, arch: Arch, tools: &Environment) -> Result<PathBuf> {
    let files = workspace::target().join("wheel/files");
    package::empty(&files)?;
    workspace::run(tools.python().args(["-m", "zipfile", "-e"]).arg(wheel).arg(&files))?;
    let library = Libraries::of(arch, &[files.join("harmonaize/_core.abi3.so")])?;
    compare(&wheel.file_name().unwrap_or_default().to_string_lossy(), arch, &library)?;
    Ok(files)
}

/// An error unless a library runs wherever its wheel's name says.
fn compare(name: &str, arch: Arch, library: &Libraries) -> Result<()> {
    let Some(least) = least_glibc(name, arch) else {
        bail!("{name} is not named as for CPython from 3.11 on and manylinux on {}", arch.machine());
    };
    if !library.machines.iter().eq([arch.elf()]) {
        bail!("{name} has a library for {:?}", library.machines);
    }
    if library.glibc > Some(least) {
        bail!("{name} has a library that needs glibc {:?}", library.glibc);
    }
    let everywhere = |name: &str| {
        ["libc.so.6", "libgcc_s.so.1", "libm.so.6"].contains(&name) || name.starts_with("ld-linux-")
    };
    match library.names.iter().find(|name| !everywhere(name)) {
        Some(other) => bail!("{name} has a library that loads {other}, which not every system has"),
        None => Ok(()),
    }
}

/// The least version of glibc that a wheel's name asks for. It applies if the wheel is for the stable ABI of
/// CPython 3.11.
fn least_glibc(name: &str, arch: Arch) -> Option<(u32, u32)> {
    let (_, platforms) = name.strip_suffix(".whl")?.split_once("-cp311-abi3-")?;
    platforms.split('.').find_map(|platform| {
        let version = platform.strip_prefix("manylinux_")?.strip_suffix(arch.machine())?;
        let (major, minor) = version.strip_suffix('_')?.split_once('_')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    })
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
            match &args.tests {
                // Their configuration is for PyTorch's own CI.
                Some(tests) => {
                    command.args(["--noconftest", "-c", "/dev/null", "-p", "as_gloo"]);
                    command.arg(std::path::absolute(tests)?);
                    command.env("PYTHONPATH", sources().join("tests/as_gloo"));
                    command.envs(sockets.first().map(|socket| ("HARMONAIZE_SOCKET", socket)));
                }
                None => {
                    command.arg(sources().join("tests")).env("HARMONAIZE_SOCKETS", sockets.join(","));
                }
            }
        }
    }
    command.args(&args.arguments).env("PYTHONDONTWRITEBYTECODE", "1").env("OMP_NUM_THREADS", "1");
    let ran = workspace::run(&mut command);
    deployment.check()?;
    ran
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheels_name_says_its_least_glibc() {
        let least = |platforms: &str| {
            least_glibc(&format!("harmonaize-0.2.0-cp311-abi3-{platforms}.whl"), Arch::Arm64)
        };
        assert_eq!(least("manylinux_2_34_aarch64"), Some((2, 34)));
        assert_eq!(least("manylinux2014_aarch64.manylinux_2_17_aarch64"), Some((2, 17)));
        assert_eq!(least("linux_aarch64"), None);
        assert_eq!(least("manylinux_2_34_x86_64"), None);
        assert_eq!(least_glibc("harmonaize-0.2.0-cp311-cp311-manylinux_2_34_aarch64.whl", Arch::Arm64), None);
    }

    #[test]
    fn amd64_machines_alone_cross_compile() {
        Arch::Arm64.check_cross(Arch::Amd64).unwrap();
        let error = Arch::Amd64.check_cross(Arch::Arm64).unwrap_err().to_string();
        assert!(error.contains("for amd64 is taken on arm64 machines"), "{error}");
    }

    #[test]
    fn a_library_beyond_its_wheels_name_is_refused() {
        let name = "harmonaize-0.2.0-cp311-abi3-manylinux_2_34_aarch64.whl";
        let listed = "  Machine:                           AArch64\n\
             0x01 (NEEDED)  Shared library: [libgcc_s.so.1]\n 0x01 (NEEDED)  Shared library: [libc.so.6]\n\
             0x01 (NEEDED)  Shared library: [ld-linux-aarch64.so.1]\n\
             0x0010:   Name: GLIBC_2.17  Flags: none  Version: 3\n  0x0020:   Name: GLIBC_2.34  Flags: none  Version: 2\n";
        let compared = |listed: &str| compare(name, Arch::Arm64, &Libraries::read(listed));
        compared(listed).unwrap();
        for (found, other, why) in [
            ("2.34", "2.36", "glibc Some((2, 36))"),
            ("AArch64", "Advanced Micro Devices X86-64", "X86-64"),
            ("libgcc_s.so.1", "libibverbs.so.1", "loads libibverbs.so.1"),
        ] {
            let error = compared(&listed.replace(found, other)).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
