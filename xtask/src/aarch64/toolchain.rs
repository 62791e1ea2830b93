//! The cross toolchain: Debian's compiler with the arm64 standard library, and the C libraries that crates link.

use super::archive::Archive;
use super::tree::{Contents, Tree, unpacked};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::packages::{self, Consent};
use harmonaize_testkit::workspace;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use toml::{Table, Value};

/// The target, as the compiler names it.
pub const TARGET: &str = "aarch64-unknown-linux-gnu";
/// Where Debian's cross compiler keeps the C library of the target.
const CROSS: &str = "/usr/aarch64-linux-gnu";
/// What runs programs of the target.
pub(crate) const EMULATOR: &str = "qemu-aarch64-static";
/// Debian's folder of the target's libraries.
const LIBRARIES: &str = "aarch64-linux-gnu";
/// The C libraries that crates link, with what those need and the provider of SoftRoCE; Debian's names, for arm64.
const LINKED: &[&str] = &[
    "libibverbs-dev",
    "libibverbs1",
    "ibverbs-providers",
    "librdmacm-dev",
    "librdmacm1",
    "libnl-3-dev",
    "libnl-3-200",
    "libnl-route-3-dev",
    "libnl-route-3-200",
    "libelf-dev",
    "libelf1",
    "zlib1g-dev",
    "zlib1g",
];
/// What programs load in an image; Debian's names, for arm64.
const LOADED: &[&str] = &[
    "libc6",
    "libgcc-s1",
    "libibverbs1",
    "ibverbs-providers",
    "libnl-3-200",
    "libnl-route-3-200",
    "libelf1",
    "zlib1g",
];

/// What came of the preparation.
#[derive(Debug)]
pub enum Prepared {
    /// Everything is there.
    Ready(Toolchain),
    /// This machine cannot have it; why.
    Impossible(String),
}

/// A toolchain that is ready to be used, unpacked under `target/aarch64`.
#[derive(Debug)]
pub struct Toolchain {
    version: String,
    sysroot: PathBuf,
    config: PathBuf,
}

impl Toolchain {
    /// Finds what an earlier run left, or fetches it from Debian's archive; installs what only root can.
    pub fn prepare(consent: Consent) -> Result<Prepared> {
        if let Some(why) = impossible() {
            return Ok(Prepared::Impossible(why));
        }
        let least = rust_version(&fs::read_to_string(workspace::root().join("Cargo.toml"))?)?;
        let mut lists = None;
        let rust = Tree {
            home: folder().join("rust"),
            key: "rustc-web",
            request: "compiler",
            size: 150,
            contents: compiler,
        };
        let linked = LINKED.join(" ");
        let sysroot = Tree {
            home: folder().join("sysroot"),
            key: "libibverbs-dev",
            request: &linked,
            size: 2,
            contents: libraries,
        };
        let Some((version, rust, needs)) = rust.find(&mut lists)? else {
            return Ok(Prepared::Impossible("Debian's package lists do not name rustc-web".into()));
        };
        if minor(&version) < Some(least) {
            let (major, minor) = least;
            let why =
                format!("Debian's rustc-web is {version}, and the workspace needs Rust {major}.{minor}");
            return Ok(Prepared::Impossible(why));
        }
        let Some((_, sysroot, _)) = sysroot.find(&mut lists)? else {
            return Ok(Prepared::Impossible("Debian's package lists do not name libibverbs-dev".into()));
        };
        let mut installed = packages::AARCH64.to_vec();
        installed.extend(needs.iter().map(String::as_str));
        if !packages::missing(&installed).is_empty() && !rustix::process::geteuid().is_root() {
            let missing = packages::missing(&installed).join(" ");
            return Ok(Prepared::Impossible(format!("it needs root to install {missing}")));
        }
        packages::require(&installed, consent)?;
        let config = folder().join("config.toml");
        write(&config, &settings(&write_compiler(&rust)?, &sysroot).to_string(), 0o644)?;
        Ok(Prepared::Ready(Self { version: format!("rustc-web {version}"), sysroot, config }))
    }

    /// The compiler's package and version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Debian's arm64 libraries that the programs link, laid out as in a system's root. The C library is not among them.
    pub fn sysroot(&self) -> &Path {
        &self.sysroot
    }

    /// The folder of the target's C library and loader (`lib/` in it).
    pub fn c_library(&self) -> &Path {
        Path::new(CROSS)
    }

    /// Debian's arm64 libraries that programs load, the C library among them, laid out as in a system's root. Those that a cross compiler
    /// brings get no security updates.
    pub(crate) fn loaded(&self) -> Result<PathBuf> {
        let loaded = LOADED.join(" ");
        let contents = |_: &Archive, _: &str| Ok(unpacked(LOADED));
        let tree = Tree { home: folder().join("system"), key: "libc6", request: &loaded, size: 3, contents };
        let found = tree.find(&mut None)?.context("Debian's package lists do not name libc6")?;
        Ok(found.1)
    }

    /// The folder where cargo leaves programs of the dev profile.
    pub fn programs(&self) -> PathBuf {
        folder().join("build").join(TARGET).join("debug")
    }

    /// A call of one of the target's programs, under emulation.
    pub fn emulated(&self, program: &Path) -> Command {
        let mut command = Command::new(EMULATOR);
        command.args(emulation(&self.sysroot)).arg(program);
        command
    }

    /// A call of Debian's Python for the target, under emulation, with the modules of its minimal package.
    pub(crate) fn python(&self) -> Result<Command> {
        let tree = Tree {
            home: folder().join("python"),
            key: "python3",
            request: "minimal",
            size: 3,
            contents: python,
        };
        let found = tree.find(&mut None)?;
        let (_, root, _) = found.context("Debian's package lists do not name python3")?;
        let mut programs = fs::read_dir(root.join("usr/bin"))?;
        let program = programs.next().context("Debian's package of Python has no program")??.path();
        let mut command = Command::new(EMULATOR);
        // What this machine has for its own Python is not for that one.
        command.args(emulation(&root)).arg(program).args(["-I", "-S"]);
        Ok(command)
    }

    /// A cargo call for the target, in the workspace's root.
    pub fn cargo(&self) -> Command {
        let mut cargo = workspace::cargo();
        self.configure(&mut cargo);
        cargo
    }

    /// Has a call of cargo, or of maturin, build with this.
    pub(crate) fn configure(&self, command: &mut Command) {
        // Each of these would win over the configuration.
        for variable in ["RUSTC", "RUSTC_WRAPPER", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS", "CARGO_TARGET_DIR"]
        {
            command.env_remove(variable);
        }
        command.arg("--config").arg(&self.config);
    }
}

/// The folder of everything that is kept for the architecture.
pub fn folder() -> PathBuf {
    workspace::target().join("aarch64")
}

/// Why this machine cannot have the toolchain, whatever is installed.
fn impossible() -> Option<String> {
    let architecture = std::env::consts::ARCH;
    if architecture == "aarch64" {
        return Some("this machine is of that architecture; `cargo xtask test` tests it".into());
    }
    if architecture != "x86_64" {
        return Some(format!(
            "Debian's cross compiler is taken for amd64, and this machine is {architecture}"
        ));
    }
    let debian = ["/usr/bin/apt-get", "/usr/bin/dpkg-deb"].iter().all(|program| Path::new(program).is_file());
    (!debian).then(|| "it comes from Debian's packages, and this machine has no apt".into())
}

/// The compiler with the standard libraries of both architectures; the library of LLVM that it loads has to be installed.
fn compiler(archive: &Archive, version: &str) -> Result<Contents> {
    let Some((major, minor)) = minor(version) else { bail!("rustc-web has an odd version: {version}") };
    let shared = format!("libstd-rust-web-{major}.{minor}");
    let mut installed = archive.depends(&shared, version)?;
    installed.retain(|name| name.starts_with("libllvm"));
    let names = ["rustc-web", &shared, "libstd-rust-web-dev", "libstd-rust-web-dev:arm64"];
    Ok(Contents { unpacked: names.iter().map(|name| format!("{name}={version}")).collect(), installed })
}

fn libraries(_: &Archive, _: &str) -> Result<Contents> {
    Ok(unpacked(LINKED))
}

/// The Python that is Debian's default, as far as the interpreter itself needs it.
fn python(archive: &Archive, version: &str) -> Result<Contents> {
    let depends = archive.depends("python3", version)?;
    let python = depends.iter().find(|name| name.starts_with("python3."));
    let python = python.context("Debian's python3 depends on no release of Python")?;
    let [program, modules] = ["", "lib"].map(|before| format!("{before}{python}-minimal"));
    Ok(unpacked(&[&program, &modules, "libexpat1", "zlib1g"]))
}

/// Writes the program that starts the unpacked compiler, and returns its path.
fn write_compiler(rust: &Path) -> Result<PathBuf> {
    let program = rust.join("rustc");
    let quoted = format!("'{}'", rust.display().to_string().replace('\'', r"'\''"));
    let script = format!(
        "#!/bin/sh\nLD_LIBRARY_PATH={quoted}/usr/lib/x86_64-linux-gnu exec {quoted}/usr/bin/rustc \"$@\"\n"
    );
    write(&program, &script, 0o755)?;
    Ok(program)
}

/// Writes a file unless it is so already: cargo looks at the compiler's time of change.
fn write(path: &Path, text: &str, mode: u32) -> Result<()> {
    if fs::read_to_string(path).is_ok_and(|found| found == text) {
        return Ok(());
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    Ok(())
}

/// The folders of the target's libraries.
fn libraries_in(sysroot: &Path) -> [String; 2] {
    ["usr/lib", "lib"].map(|folder| sysroot.join(folder).join(LIBRARIES).display().to_string())
}

/// What the emulator takes before a program: where the target's libraries are.
fn emulation(sysroot: &Path) -> Vec<String> {
    let path = format!("LD_LIBRARY_PATH={}", libraries_in(sysroot).join(":"));
    ["-L", CROSS, "-E", &path].map(str::to_owned).into()
}

/// Cargo's configuration for the target.
fn settings(compiler: &Path, sysroot: &Path) -> Table {
    let text = |path: &Path| Value::String(path.display().to_string());
    let list = |items: Vec<String>| Value::Array(items.into_iter().map(Value::String).collect());
    let inside = |path: &str| sysroot.join(path).display().to_string();
    let [usr, root] = libraries_in(sysroot);
    let include = inside("usr/include");
    let build = Table::from_iter([
        ("rustc".into(), text(compiler)),
        ("target".into(), TARGET.into()),
        ("target-dir".into(), text(&folder().join("build"))),
    ]);
    let search = [
        format!("-Lnative={usr}"),
        format!("-Clink-arg=-Wl,-rpath-link,{usr}"),
        format!("-Clink-arg=-Wl,-rpath-link,{root}"),
    ];
    let emulator = std::iter::once(EMULATOR.to_owned()).chain(emulation(sysroot)).collect();
    let target = Table::from_iter([
        ("linker".into(), "aarch64-linux-gnu-gcc".into()),
        ("rustflags".into(), list(search.into())),
        ("runner".into(), list(emulator)),
    ]);
    let underscored = TARGET.replace('-', "_");
    let environment = Table::from_iter([
        (format!("CFLAGS_{underscored}"), format!("-I{include} -I{include}/{LIBRARIES}").into()),
        (format!("PKG_CONFIG_ALLOW_CROSS_{underscored}"), "1".into()),
        (format!("PKG_CONFIG_SYSROOT_DIR_{underscored}"), text(sysroot)),
        (format!("PKG_CONFIG_LIBDIR_{underscored}"), format!("{usr}/pkgconfig").into()),
        (
            format!("BINDGEN_EXTRA_CLANG_ARGS_{underscored}"),
            format!("--target={LIBRARIES} '-I{include}' -I{CROSS}/include").into(),
        ),
    ]);
    // Quick to build: what little runs under emulation gains by optimised kernels and random inputs alone.
    let level = |level: i64| Value::Table(Table::from_iter([("opt-level".into(), level.into())]));
    let mut packages = Table::from_iter([("*".into(), level(0)), ("proptest".into(), level(2))]);
    let optimised = ["planner", "allocator", "plan", "analysis", "loader", "events"];
    packages.extend(optimised.map(|name| (format!("harmonaize-{name}"), level(0))));
    let profile = Table::from_iter([
        ("opt-level".into(), 0.into()),
        ("debug".into(), false.into()),
        ("incremental".into(), false.into()),
        ("package".into(), Value::Table(packages)),
    ]);
    Table::from_iter([
        ("build".into(), Value::Table(build)),
        ("target".into(), Value::Table(Table::from_iter([(TARGET.into(), Value::Table(target))]))),
        ("env".into(), Value::Table(environment)),
        ("profile".into(), Value::Table(Table::from_iter([("dev".into(), Value::Table(profile))]))),
    ])
}

/// The compiler's version in a package's: `1.96.0+dfsg1` is 1.96.
fn minor(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The oldest compiler that the workspace's manifest allows.
fn rust_version(manifest: &str) -> Result<(u32, u32)> {
    let manifest: Table = manifest.parse()?;
    let version =
        manifest.get("workspace").and_then(|table| table.get("package")?.get("rust-version")?.as_str());
    version.and_then(minor).context("the workspace's manifest gives no rust-version")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_first_two_numbers() {
        assert_eq!(minor("1.96.0+dfsg1-1~deb12u2"), Some((1, 96)));
        assert_eq!(minor("1.95"), Some((1, 95)));
        assert!(minor("1.85.0+dfsg3-1~deb12u3") < Some((1, 95)));
        assert_eq!(minor("odd"), None);
        assert_eq!(rust_version("[workspace.package]\nrust-version = \"1.95\"").unwrap(), (1, 95));
        assert!(rust_version("[workspace]").is_err());
    }

    #[test]
    fn the_settings_survive_odd_paths() {
        let settings = settings(Path::new("/a b/\"c\"/rustc"), Path::new("/a b/root"));
        let read: Table = settings.to_string().parse().unwrap();
        assert_eq!(read["build"]["rustc"].as_str(), Some("/a b/\"c\"/rustc"));
        assert_eq!(read["build"]["target"].as_str(), Some(TARGET));
        assert_eq!(read["target"][TARGET]["linker"].as_str(), Some("aarch64-linux-gnu-gcc"));
        let runner: Vec<_> = read["target"][TARGET]["runner"].as_array().unwrap().iter().collect();
        assert_eq!(runner[0].as_str(), Some("qemu-aarch64-static"));
        assert_eq!(
            runner[4].as_str(),
            Some("LD_LIBRARY_PATH=/a b/root/usr/lib/aarch64-linux-gnu:/a b/root/lib/aarch64-linux-gnu")
        );
    }
}
