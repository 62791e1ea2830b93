//! A fresh Debian 12 with systemd, booted in namespaces of this machine. On it a package is installed, used, upgraded and purged.

use super::folder;
use anyhow::{Context, Result, bail};
use harmonaize_testkit::fabric;
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::strict;
use harmonaize_testkit::workspace;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Where it is made: in memory, where its installation waits for no disk.
const ROOT: &str = "/dev/shm/harmonaize-package";
/// Debian's release.
const RELEASE: &str = "bookworm";
/// What boots it, and what the test looks at processes with. All else is what apt itself needs.
const INCLUDED: &str = "systemd-sysv,procps";
/// How long it may run, in seconds.
const LIMIT: &str = "240";
/// Privileges that a container lacks and a machine has: those of the agent's unit.
const CAPABILITIES: &str = "CAP_NET_ADMIN,CAP_BPF,CAP_PERFMON";

/// Starts the script when the system is up, and ends the system with its outcome.
fn unit(script: &str) -> String {
    format!(
        "[Unit]
After=basic.target
SuccessAction=exit
FailureAction=exit
[Service]
Type=oneshot
ExecStart=/package/{script}
StandardOutput=file:/package/log
StandardError=inherit
"
    )
}

/// Installs the package there and runs `xtask/package/test.sh`. `version` is what its programs call themselves, where that is known.
pub(super) fn test(package: &Path, version: &Option<String>, consent: Consent) -> Result<()> {
    run(
        "the package's test",
        "test.sh",
        &[("harmonaize.deb", package)],
        version.as_deref().unwrap_or(""),
        consent,
    )
}

/// Runs `xtask/package/upgrade.sh` there: from the earlier package to the later and back, under load.
pub(super) fn upgrade(earlier: &Path, later: &Path, consent: Consent) -> Result<()> {
    run("the upgrade", "upgrade.sh", &[("earlier.deb", earlier), ("later.deb", later)], "", consent)
}

/// Runs one script of `xtask/package` on such a system, with each package under its name and a file `version` in the script's folder.
fn run(what: &str, script: &str, debs: &[(&str, &Path)], version: &str, consent: Consent) -> Result<()> {
    if !fabric::privileged() {
        return strict::skip(what, "it boots a system in namespaces, which needs root");
    }
    packages::require(packages::PACKAGE, consent)?;
    let begun = Instant::now();
    let root = Path::new(ROOT);
    fs::create_dir_all(root)?;
    let lock = fs::File::open(root)?;
    lock.try_lock().with_context(|| format!("another test of a package runs in {ROOT}"))?;
    make(root, debs)?;
    println!("a fresh Debian is there after {:.0} s", begun.elapsed().as_secs_f64());
    let inside = root.join("package");
    fs::create_dir_all(&inside)?;
    for script in [script, "common.sh"] {
        fs::copy(workspace::root().join("xtask/package").join(script), inside.join(script))?;
    }
    for (name, package) in debs {
        fs::copy(package, inside.join(name))?;
    }
    fs::write(inside.join("version"), version)?;
    fs::write(root.join("etc/systemd/system/package-test.service"), unit(script))?;
    fs::create_dir_all(folder())?;
    let log = fs::File::create(folder().join("boot.log"))?;
    let mut boot = Command::new("timeout");
    boot.args(["--kill-after=10", LIMIT, "systemd-nspawn", "--quiet", "--register=no", "--keep-unit"]);
    boot.args(["--private-network", "--console=pipe", "--system-call-filter=bpf perf_event_open"]);
    boot.arg(format!("--capability={CAPABILITIES}")).arg("--directory").arg(root);
    boot.args(["--boot", "systemd.unit=package-test.service"]);
    boot.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let status = boot.status().context("cannot start systemd-nspawn")?;
    print!("{}", fs::read_to_string(inside.join("log")).unwrap_or_default());
    let passed = status.success() && inside.join("passed").exists();
    fs::remove_dir_all(root).with_context(|| format!("cannot remove {ROOT}"))?;
    if !passed {
        let boot = folder().join("boot.log");
        bail!("{what} ended with {status}; what the system did is in {}", boot.display());
    }
    println!("{what} has passed after {:.0} s", begun.elapsed().as_secs_f64());
    Ok(())
}

/// Makes the system, which has packages that ours need in its cache: it has no network.
fn make(root: &Path, debs: &[(&str, &Path)]) -> Result<()> {
    // Of a test that was killed.
    for entry in fs::read_dir(root)? {
        let path = entry?.path();
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.with_context(|| format!("cannot remove {}", path.display()))?;
    }
    let mut make = Command::new("mmdebstrap");
    make.args(["--quiet", "--variant=apt", "--format=directory", "--skip=cleanup/apt"]);
    make.args(["--dpkgopt=force-unsafe-io", &format!("--include={INCLUDED}")]);
    let install = "apt-get --quiet --quiet --yes --no-install-recommends --download-only install";
    for (_, package) in debs {
        let name = package.file_name().and_then(|name| name.to_str()).context("a package without a name")?;
        make.arg(format!("--customize-hook=copy-in {} /tmp", package.display()));
        make.arg(format!("--customize-hook=chroot \"$1\" {install} /tmp/{name}"));
        make.arg(format!("--customize-hook=rm \"$1\"/tmp/{name}"));
    }
    make.arg(RELEASE).arg(root).stdout(Stdio::null());
    make.env("DEBIAN_FRONTEND", "noninteractive");
    workspace::run(&mut make)
}
