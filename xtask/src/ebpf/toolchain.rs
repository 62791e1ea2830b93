//! The tool chain of the programs: Debian's compiler and the linker. The compiler has a library for the kernel's machine;
//! the linker is built against that compiler's LLVM. Unpacked and built under `target`, beside whatever is installed.

use super::{folder, printed};
use crate::aarch64::archive::Archive;
use crate::aarch64::tree::{Contents, Tree};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use toml::{Table, Value};

/// The machine in the kernel, as the compiler names it.
pub(super) const TARGET: &str = "bpfel-unknown-none";
/// The package whose version counts: the library for that machine.
const KEY: &str = "libstd-rust-web-dev-bpf";
/// The linker's version.
const LINKER: &str = "0.13.0";
/// Where Debian's libraries are.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// What came of the preparation.
#[derive(Debug)]
pub(super) enum Prepared {
    /// Everything is there.
    Ready(Toolchain),
    /// This machine cannot have it; why.
    Impossible(String),
}

/// A tool chain that is ready to be used.
#[derive(Debug)]
pub(super) struct Toolchain {
    version: String,
    /// The version of the package of LLVM.
    llvm: String,
    compiler: PathBuf,
    linker: PathBuf,
}

impl Toolchain {
    /// Finds what an earlier run left, or fetches and builds it; installs what only root can.
    pub(super) fn prepare(consent: Consent) -> Result<Prepared> {
        if let Some(why) = impossible() {
            return Ok(Prepared::Impossible(why));
        }
        let tree = Tree { home: folder().join("rust"), key: KEY, request: "compiler", size: 160, contents };
        let Some((version, rust, needs)) = tree.find(&mut None)? else {
            return Ok(Prepared::Impossible(format!("Debian's package lists do not name {KEY}")));
        };
        let needs: Vec<&str> = needs.iter().map(String::as_str).collect();
        let missing = packages::missing(&needs).join(" ");
        if !missing.is_empty() && !rustix::process::geteuid().is_root() {
            return Ok(Prepared::Impossible(format!("it needs root to install {missing}")));
        }
        packages::require(&needs, consent)?;
        let Some(package) = needs.first() else { bail!("rustc-web {version} names no package of LLVM") };
        let llvm = printed(Command::new("dpkg-query").args(["-W", "-f", "${Version}", package]))?;
        let compiler = write_compiler(&rust)?;
        let linker = linker(package, consent)?;
        Ok(Prepared::Ready(Self { version, llvm: format!("{package} {llvm}"), compiler, linker }))
    }

    /// What decides how the objects come out.
    pub(super) fn record(&self) -> Table {
        let entry = |name: &str, value: String| (name.to_owned(), Value::String(value));
        Table::from_iter([
            entry("compiler", format!("rustc-web {}", self.version)),
            entry("linker", format!("bpf-linker {LINKER}")),
            entry("llvm", self.llvm.clone()),
        ])
    }

    /// Has a call of cargo build for the machine, with no path of this one in what it builds.
    pub(super) fn apply(&self, cargo: &mut Command, program: &str) -> Result<()> {
        for variable in ["RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "RUSTFLAGS", "CARGO_TARGET_DIR"] {
            cargo.env_remove(variable);
        }
        cargo.env("RUSTC", &self.compiler);
        // Inline assembly for this machine is not stable, in our programs and in the library beneath.
        cargo.env("RUSTC_BOOTSTRAP", format!("aya_ebpf,{program}"));
        let home = match std::env::var_os("CARGO_HOME") {
            Some(home) => PathBuf::from(home),
            None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cargo"),
        };
        let root = workspace::root();
        let flags = [
            "-Cdebuginfo=2".to_owned(),
            // Instructions on words of 32 bits, which Linux 5.1 and later have: one for each three without.
            "-Ctarget-cpu=v3".to_owned(),
            "-Clink-arg=--btf".to_owned(),
            // Else clearing a structure is a call of a loop over its bytes.
            "-Clink-arg=--disable-expand-memcpy-in-order".to_owned(),
            format!("-Clinker={}", self.linker.display()),
            format!("--remap-path-prefix={}=crates", home.join("registry").join("src").display()),
            format!("--remap-path-prefix={}=.", root.display()),
        ];
        cargo.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
        Ok(())
    }
}

/// Why this machine cannot have the tool chain, whatever is installed.
fn impossible() -> Option<String> {
    let architecture = std::env::consts::ARCH;
    if architecture != "x86_64" {
        return Some(format!("Debian's compiler is taken for amd64, and this machine is {architecture}"));
    }
    let debian = ["/usr/bin/apt-get", "/usr/bin/dpkg-deb"].iter().all(|program| Path::new(program).is_file());
    (!debian).then(|| "it comes from Debian's packages, and this machine has no apt".into())
}

/// The compiler with its own library and that for the machine in the kernel. The library of LLVM that it loads has to be
/// installed.
fn contents(archive: &Archive, version: &str) -> Result<Contents> {
    let mut numbers = version.split('.');
    let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) else {
        bail!("{KEY} has an odd version: {version}")
    };
    let shared = format!("libstd-rust-web-{major}.{minor}");
    let mut installed = archive.depends(&shared, version)?;
    installed.retain(|name| name.starts_with("libllvm"));
    let names = ["rustc-web", &shared, "libstd-rust-web-dev", KEY];
    Ok(Contents { unpacked: names.iter().map(|name| format!("{name}={version}")).collect(), installed })
}

/// Writes the program that starts the unpacked compiler, and returns its path.
fn write_compiler(rust: &Path) -> Result<PathBuf> {
    let program = rust.join("rustc");
    let quoted = format!("'{}'", rust.display().to_string().replace('\'', r"'\''"));
    let script =
        format!("#!/bin/sh\nLD_LIBRARY_PATH={quoted}{LIBRARIES} exec {quoted}/usr/bin/rustc \"$@\"\n");
    // Not written anew where it is so already: cargo looks at the compiler's time of change.
    if fs::read_to_string(&program).ok().as_ref() != Some(&script) {
        fs::write(&program, script).with_context(|| format!("cannot write {}", program.display()))?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    }
    Ok(program)
}

/// The linker, built against the installed LLVM of `package` (`libllvm22`).
fn linker(package: &str, consent: Consent) -> Result<PathBuf> {
    let major = package.trim_start_matches("libllvm");
    let home = folder().join(format!("linker-{LINKER}-llvm-{major}"));
    let program = home.join("bin").join("bpf-linker");
    if program.is_file() {
        return Ok(program);
    }
    consent.obtain(&format!("bpf-linker {LINKER} (one to four minutes to build)"))?;
    let library = home.join("lib").join("libLLVM.so");
    fs::create_dir_all(home.join("lib"))?;
    if !library.exists() {
        std::os::unix::fs::symlink(installed_library(major)?, &library)?;
    }
    let mut install = workspace::cargo();
    install.args(["install", "--locked", "--quiet", "--version", LINKER, "bpf-linker"]);
    install.args(["--no-default-features", "--features", &format!("llvm-{major}"), "--root"]).arg(&home);
    install.arg("--target-dir").arg(home.join("build")).env("LLVM_PREFIX", &home);
    workspace::run(&mut install).context("cannot install bpf-linker")?;
    fs::remove_dir_all(home.join("build"))?;
    Ok(program)
}

/// The library of LLVM of a major version: `libLLVM.so.22.1`.
fn installed_library(major: &str) -> Result<PathBuf> {
    let prefix = format!("libLLVM.so.{major}.");
    for entry in fs::read_dir(LIBRARIES)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            return Ok(entry.path());
        }
    }
    bail!("{LIBRARIES} has no {prefix}*")
}
