//! What a task needs from outside the workspace: Debian packages, and cargo tools of pinned versions.

use crate::workspace;
use anyhow::{Context, Result, bail};
use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// What the emulation needs: `ip` and `tc`. The rest (util-linux) is essential in Debian.
pub const EMULATION: &[&str] = &["iproute2"];

/// What building needs: the headers of the verbs, what reads them for the bindings, and the devices' drivers. Libbpf, which
/// is built along, needs the library by which it reads objects, and that one needs another.
pub const BUILDING: &[&str] = &[
    "libibverbs-dev",
    "librdmacm-dev",
    "libclang-dev",
    "ibverbs-providers",
    "pkg-config",
    "libelf-dev",
    "zlib1g-dev",
    "make",
];

/// What the tests of the C library compile with; sanitizers come with the first.
pub const C: &[&str] = &["gcc", "g++", "clang"];

/// Both MPIs, whose programs the tests of the library for MPI run.
pub const MPI: &[&str] = &["openmpi-bin", "libopenmpi-dev", "mpich", "libmpich-dev"];

/// What building and testing the Python wheel needs; binutils for the libraries that stand in for CUDA's.
pub const PYTHON: &[&str] = &["python3", "python3-venv", "gcc", "libc6-dev", "binutils"];

/// What the tests of several controls need: the server, the client that makes and restores snapshots, and clocks that step.
pub const ETCD: &[&str] = &["etcd-server", "etcd-client", "faketime"];

/// What the virtual machine with SoftRoCE needs: its emulator, and what is packed into the guest.
pub const SOFTROCE: &[&str] = &[
    "qemu-system-x86",
    "ibverbs-utils",
    "ibverbs-providers",
    "perftest",
    "iproute2",
    "iputils-ping",
    "busybox-static",
    "binutils",
    "xz-utils",
    "zstd",
];

/// What building for aarch64 needs beside what is unpacked under `target`. It is the linker, the C library, the emulator,
/// and what reads the C headers for bindings.
pub const AARCH64: &[&str] = &[
    "gcc-aarch64-linux-gnu",
    "libc6-dev-arm64-cross",
    "qemu-user-static",
    "libclang-dev",
    "pkg-config",
    "make",
];

/// What offload units need beside the machine with SoftRoCE: their emulator.
pub const DPU: &[&str] = &["qemu-system-arm"];

/// What starts ranks as Slurm does: its control, its daemon and its commands.
pub const SLURM: &[&str] = &["slurm-wlm"];

/// What reads a scrape as Prometheus does not: the reference parser of OpenMetrics. [`promtool`] comes by itself.
pub const METRICS: &[&str] = &["python3-prometheus-client"];

/// What shows control's page as operators see it, and letters for it.
pub const BROWSER: &[&str] = &["chromium", "fonts-dejavu-core"];

/// What packing needs, and what makes and boots the Debian on which a package is tested.
pub const PACKAGE: &[&str] = &["binutils", "mmdebstrap", "systemd-container"];

/// A tool that cargo installs, and the version that the project uses.
#[derive(Debug, Clone, Copy)]
pub struct Tool {
    /// The crate's name, which is the program's too.
    pub name: &'static str,
    /// The version to install when there is none.
    pub version: &'static str,
    /// Whether to build it with its default features, or with none.
    pub default_features: bool,
}

/// The test runner.
pub const NEXTEST: Tool = Tool { name: "cargo-nextest", version: "0.9.143", default_features: true };
/// The check of licences, bans and sources of dependencies.
pub const DENY: Tool = Tool { name: "cargo-deny", version: "0.20.2", default_features: true };

/// The check for dependencies that are listed and not used.
pub const MACHETE: Tool = Tool { name: "cargo-machete", version: "0.9.2", default_features: true };

/// What makes a book of Markdown. Without its server, its watching of files and its search, which nothing here needs.
pub const MDBOOK: Tool = Tool { name: "mdbook", version: "0.5.4", default_features: false };

/// Whether to ask before installing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consent {
    /// Ask on the terminal. Where there is none, say what is missing and install it.
    Ask,
    /// Install without asking.
    Given,
}

impl Consent {
    /// Given by `--yes`, or on a CI machine (`CI=true`).
    pub fn from_flag(yes: bool) -> Self {
        let on_ci = std::env::var("CI").is_ok_and(|value| value == "true");
        if yes || on_ci { Self::Given } else { Self::Ask }
    }

    /// Whether somebody is asked, by whether a terminal can answer.
    fn asks(self, terminal: bool) -> bool {
        self == Self::Ask && terminal
    }

    /// Says that `what` is missing, and asks for it where a terminal can answer.
    ///
    /// # Errors
    /// If the answer is no.
    pub fn obtain(self, what: &str) -> Result<()> {
        eprintln!("This needs {what}, which is not installed.");
        if !self.asks(std::io::stdin().is_terminal()) {
            eprintln!("Installing it.");
            return Ok(());
        }
        eprint!("Install it now? [y/N] ");
        std::io::stderr().flush()?;
        let mut answer = String::new();
        std::io::stdin().lock().read_line(&mut answer)?;
        if !matches!(answer.trim(), "y" | "Y" | "yes") {
            bail!("{what} is not installed");
        }
        Ok(())
    }
}

/// Installs those of the Debian packages that are missing, after saying which.
pub fn require(packages: &[&str], consent: Consent) -> Result<()> {
    let missing = missing(packages);
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    let what = format!("Debian's {} {list}", if missing.len() == 1 { "package" } else { "packages" });
    if !rustix::process::geteuid().is_root() {
        bail!("{what} is not installed, and installing needs root: `sudo apt-get install {list}`");
    }
    consent.obtain(&what)?;
    let apt = || {
        let mut apt = Command::new("apt-get");
        apt.env("DEBIAN_FRONTEND", "noninteractive").arg("-qq").stdin(Stdio::null());
        apt
    };
    workspace::run(apt().arg("update"))?;
    workspace::run(apt().args(["install", "--yes", "--no-install-recommends"]).args(&missing))
}

/// Those of the Debian packages that are not installed.
pub fn missing<'a>(packages: &[&'a str]) -> Vec<&'a str> {
    packages.iter().copied().filter(|package| !installed(package)).collect()
}

fn installed(package: &str) -> bool {
    let query = Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package]).output();
    query.is_ok_and(|output| output.stdout == b"installed")
}

/// Where promtool is, from the path or unpacked before; none where neither has it.
pub fn promtool() -> Option<PathBuf> {
    let unpacked = promtool_folder().join("usr/bin/promtool");
    on_path("promtool").or_else(|| unpacked.is_file().then_some(unpacked))
}

/// Where a program is, from the path; none where it is not.
pub fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.is_file())
}

fn promtool_folder() -> PathBuf {
    workspace::target().join("tools").join("prometheus")
}

/// Unpacks promtool from Debian's package, where it is missing. The package is not installed: that would start a server.
pub fn require_promtool(consent: Consent) -> Result<()> {
    if promtool().is_some() {
        return Ok(());
    }
    consent.obtain("promtool of Debian's package prometheus (unpacked under target)")?;
    let folder = promtool_folder();
    std::fs::create_dir_all(&folder)?;
    workspace::run(Command::new("apt-get").args(["-qq", "download", "prometheus"]).current_dir(&folder))?;
    let is_package = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "deb");
    let mut files = std::fs::read_dir(&folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let package = files.find(is_package).context("apt-get downloaded no package")?;
    workspace::run(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&folder))?;
    std::fs::remove_file(package).context("cannot remove the package")
}

/// The program of a cargo tool: from the path, from `target/tools`, or installed there after saying so.
pub fn tool(tool: Tool, consent: Consent) -> Result<PathBuf> {
    let kept = workspace::target().join("tools").join("bin").join(tool.name);
    if let Some(program) = on_path(tool.name).or_else(|| kept.is_file().then(|| kept.clone())) {
        return Ok(program);
    }
    consent.obtain(&format!("{} {} (a minute or two to build)", tool.name, tool.version))?;
    let mut install = workspace::cargo();
    install.args(["install", "--locked", "--quiet", "--version", tool.version, tool.name, "--root"]);
    let folder = workspace::target().join("tools");
    install
        .arg(&folder)
        .args((!tool.default_features).then_some("--no-default-features"))
        .arg("--target-dir")
        .arg(folder.join("build"));
    // It runs for seconds: what would make it quicker takes minutes to build.
    for (name, value) in [("OPT_LEVEL", "1"), ("LTO", "off"), ("CODEGEN_UNITS", "16")] {
        install.env(format!("CARGO_PROFILE_RELEASE_{name}"), value);
    }
    workspace::run(&mut install).with_context(|| format!("cannot install {}", tool.name))?;
    // Hundreds of megabytes that nothing reads again; what is left of them does no harm.
    let _ = std::fs::remove_dir_all(folder.join("build"));
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_alone_is_asked() {
        assert!(Consent::Ask.asks(true) && !Consent::Ask.asks(false));
        assert!(!Consent::Given.asks(true) && !Consent::Given.asks(false));
    }
}
