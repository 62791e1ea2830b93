//! `cargo xtask package`: packages with daemons, command line, manual and units, and images. All come from one list of files. Their
//! tests are here too.

mod chart;
mod contents;
mod deb;
mod oci;
mod root;
mod rpm;
mod tar;

use crate::aarch64::toolchain::{Prepared, TARGET, Toolchain};
use anyhow::{Context, Result, bail};
use contents::Contents;
pub(crate) use contents::Libraries;
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::strict;
use harmonaize_testkit::workspace::{self, Binaries, Profile};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// What `cargo xtask package` takes.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask package --yes                    everything, in target/package
  cargo xtask package --format deb,tar         the Debian package and the tarball alone
  cargo xtask package --format oci             container images, as archives of OCI layouts
  cargo xtask package --format chart --test    Helm charts, rendered, and read as Kubernetes and the daemons read them
  cargo xtask package --arch arm64             for hosts and offload units with aarch64 cores
  cargo xtask package --smoke --test           quick to build, compared with each other, and installed, used and purged on a
                                               fresh Debian, as CI does
  cargo xtask package --upgrade old.deb,new.deb
                                               a host with the one is upgraded to the other and back under load")]
pub struct Args {
    /// The architecture of the programs
    #[arg(long, value_enum, default_value_t = Arch::HOST)]
    pub arch: Arch,
    /// What to make
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Format::ALL)]
    pub format: Vec<Format>,
    /// Take the programs as they are from this folder, instead of building them
    #[arg(long, value_name = "FOLDER")]
    pub release_dir: Option<PathBuf>,
    /// Programs that are not optimised and bear no build, in a package that is not compressed much
    #[arg(long)]
    pub smoke: bool,
    /// Make it again, render the charts, and install the Debian package on a fresh Debian 12 with systemd, in namespaces of this
    /// machine: init, hello, daemons, purge
    #[arg(long)]
    pub test: bool,
    /// Make nothing, and upgrade a fresh Debian from the first package to the second and back, while a tenant computes
    #[arg(long, value_name = "EARLIER,LATER", value_delimiter = ',', num_args = 1, conflicts_with_all = ["format", "release_dir", "smoke", "test", "arch"])]
    pub upgrade: Vec<PathBuf>,
    /// Install missing packages without asking
    #[arg(long)]
    pub yes: bool,
}

/// A way to hand the programs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For Debian and what descends from it.
    Deb,
    /// For Fedora, RHEL, SUSE and what descends from them.
    Rpm,
    /// For any other system with systemd.
    Tar,
    /// Container images.
    Oci,
    /// Helm charts.
    Chart,
}

impl Format {
    const ALL: [Self; 5] = [Self::Deb, Self::Rpm, Self::Tar, Self::Oci, Self::Chart];
}

/// An architecture as Debian names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Arch {
    /// x86-64.
    Amd64,
    /// aarch64.
    Arm64,
}

impl Arch {
    /// This machine's.
    pub(crate) const HOST: Self = if cfg!(target_arch = "aarch64") { Self::Arm64 } else { Self::Amd64 };

    fn name(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// An error unless a machine of `host` can cross-compile for it.
    pub(crate) fn check_cross(self, host: Self) -> Result<()> {
        match (host, self) {
            (Self::Amd64, Self::Arm64) => Ok(()),
            _ => bail!("no cross compiler for {} is taken on {} machines", self.name(), host.name()),
        }
    }

    /// As compilers and rpm name it.
    pub(crate) fn machine(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }

    /// As `readelf` names it.
    pub(crate) fn elf(self) -> &'static str {
        match self {
            Self::Amd64 => "Advanced Micro Devices X86-64",
            Self::Arm64 => "AArch64",
        }
    }

    /// What GNU's tools for it begin with.
    fn prefix(self) -> &'static str {
        match self {
            _ if self == Self::HOST => "",
            Self::Amd64 => "x86_64-linux-gnu-",
            Self::Arm64 => "aarch64-linux-gnu-",
        }
    }
}

/// The programs of the package, and the crate of each.
const PROGRAMS: &[(&str, &str)] = &[
    ("harmonaize", "harmonaize-cli"),
    ("harmonaize-agent", "harmonaize-agent"),
    ("harmonaize-control", "harmonaize-server"),
    ("harmonaize-perf", "harmonaize-perf"),
];

/// Runs the task.
pub fn run(args: &Args) -> Result<()> {
    let consent = Consent::from_flag(args.yes);
    let begun = Instant::now();
    match args.upgrade.as_slice() {
        [] => {}
        [earlier, later] => return root::upgrade(earlier, later, consent),
        _ => bail!("--upgrade takes two packages, as in --upgrade old.deb,new.deb"),
    }
    packages::require(packages::PACKAGE, consent)?;
    let source = Source::read(args)?;
    let Some(programs) = build(args, consent, &source)? else { return Ok(()) };
    println!("programs and manual are there after {:.0} s", begun.elapsed().as_secs_f64());
    if args.test && args.arch != Arch::HOST {
        bail!("the test runs the programs on this machine, which is of another architecture");
    }
    let package = Package { arch: args.arch, version: &source.package, time: source.time, quick: args.smoke };
    let contents = Contents::lay_out(args.arch, &programs)?;
    let (mut deb, mut tar) = (None, None);
    for format in &args.format {
        let made = match format {
            Format::Deb => {
                let file = deb.insert(deb::make(&package, &contents)?);
                deb::check(file, &contents)?;
                vec![file.clone()]
            }
            Format::Rpm => {
                let file = rpm::make(&package, &contents, consent)?;
                rpm::check(&file, &contents)?;
                vec![file]
            }
            Format::Tar => {
                let file = tar.insert(tar::make(&package, &contents)?);
                tar::check(file, &package, &contents)?;
                vec![file.clone()]
            }
            Format::Oci => {
                oci::make(&package, &contents, &oci::System::of(args.arch, programs.toolchain.as_ref())?)?
            }
            Format::Chart => chart::make(&package)?,
        };
        let after = begun.elapsed().as_secs_f64();
        made.iter().for_each(|file| println!("{} after {after:.0} s", file.display()));
    }
    if args.test {
        if args.format.contains(&Format::Chart) {
            chart::test(&package, &programs, consent)?;
        }
        tar.map_or(Ok(()), |file| tar::repeat(&file, &package, &contents))?;
        deb.map_or(Ok(()), |file| root::test(&file, &source.program, consent))?;
    }
    Ok(())
}

/// What each package says of itself.
const SUMMARY: &str = "collective communication as a service";
/// The lines that say more.
const DESCRIPTION: [&str; 3] = [
    "The provider's daemons and command line: control, which forms communicators and plans",
    "their routes; the agent of a host, which runs its tenants' collectives; the same program as",
    "an aggregator, which sums on the way; and harmonaize, the operators' command line.",
];

/// A package to be made.
struct Package<'a> {
    arch: Arch,
    version: &'a str,
    /// Seconds since 1970 that no file in it is newer than.
    time: u64,
    /// Whether packing quickly matters more than its size.
    quick: bool,
}

/// What the sources are, as versions tell it.
struct Source {
    /// The compiler's variable `HARMONAIZE_BUILD`; none where programs bear no build.
    build: Option<String>,
    /// What programs answer to `--version`; none where that is not ours to say.
    program: Option<String>,
    /// The package's version: a later commit has a higher one.
    package: String,
    /// Seconds since 1970 of the last commit.
    time: u64,
}

impl Source {
    fn read(args: &Args) -> Result<Self> {
        let version = env!("CARGO_PKG_VERSION");
        let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
        let time = git(&["log", "-1", "--format=%ct"])?.parse().context("git gives no time")?;
        let day = git(&["log", "-1", "--format=%cd", "--date=format-local:%Y%m%d%H%M%S"])?;
        let changed = !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
        let commit = format!("g{commit}{}", if changed { ".changed" } else { "" });
        let build = (!args.smoke && args.release_dir.is_none()).then(|| commit.clone());
        let program = match &build {
            Some(build) => Some(format!("{version}+{build}")),
            None => args.release_dir.is_none().then(|| version.to_owned()),
        };
        Ok(Self { build, program, package: format!("{version}+{day}.{commit}"), time })
    }
}

fn git(arguments: &[&str]) -> Result<String> {
    let mut git = Command::new("git");
    git.current_dir(workspace::root()).env("TZ", "UTC").args(arguments);
    let output = git.output().context("cannot start git")?;
    if !output.status.success() {
        bail!("`{}` ended with {}", workspace::describe(&git), output.status);
    }
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Programs, each at its path, the folder with their manual, and what built them for another architecture.
struct Programs {
    paths: Vec<(&'static str, PathBuf)>,
    manual: PathBuf,
    toolchain: Option<Toolchain>,
}

impl Programs {
    /// Those in a folder, which must be there. They write their manual when they are run by `start`.
    fn take(folder: &Path, start: impl Fn(&Path) -> Command) -> Result<Self> {
        let manual = self::folder().join("manual");
        empty(&manual)?;
        let mut paths = Vec::new();
        for (name, _) in PROGRAMS {
            let path = folder.join(name);
            if !path.is_file() {
                bail!("{} is not there", path.display());
            }
            workspace::run(start(&path).arg("--manual").arg(&manual))?;
            paths.push((*name, path));
        }
        Ok(Self { paths, manual, toolchain: None })
    }
}

/// The folder where everything is made.
fn folder() -> PathBuf {
    workspace::target().join("package")
}

/// Builds the programs, and has them write their manual; none where this machine cannot.
fn build(args: &Args, consent: Consent, source: &Source) -> Result<Option<Programs>> {
    if args.arch == Arch::HOST {
        let folder = match &args.release_dir {
            Some(folder) => folder.clone(),
            // As other tasks build them.
            None if args.smoke => {
                Binaries::build_with(Profile::Dev, &["harmonaize-perf"])?.folder().to_owned()
            }
            None => {
                packages::require(packages::BUILDING, consent)?;
                compile(workspace::cargo(), args, source)?;
                Binaries::folder_of(Profile::Release)
            }
        };
        return Programs::take(&folder, |path| Command::new(path)).map(Some);
    }
    args.arch.check_cross(Arch::HOST)?;
    if args.release_dir.is_some() {
        bail!("--release-dir takes programs of this machine's architecture, which write their manual");
    }
    let toolchain = match Toolchain::prepare(consent)? {
        Prepared::Ready(toolchain) => toolchain,
        Prepared::Impossible(why) => return strict::skip("a package for arm64", why).map(|()| None),
    };
    compile(toolchain.cargo(), args, source)?;
    let kind = if args.smoke { "debug" } else { "release" };
    let folder = crate::aarch64::toolchain::folder().join("build").join(TARGET).join(kind);
    let programs = Programs::take(&folder, |path| toolchain.emulated(path))?;
    Ok(Some(Programs { toolchain: Some(toolchain), ..programs }))
}

/// Has cargo build the programs.
fn compile(mut cargo: Command, args: &Args, source: &Source) -> Result<()> {
    cargo.args(["build", "--locked", "--quiet"]).args((!args.smoke).then_some("--release"));
    PROGRAMS.iter().for_each(|(_, package)| {
        cargo.args(["--package", package]);
    });
    cargo.env_remove("HARMONAIZE_BUILD").envs(source.build.iter().map(|build| ("HARMONAIZE_BUILD", build)));
    workspace::run(&mut cargo)
}

/// Makes a folder with nothing in it.
pub(crate) fn empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}
