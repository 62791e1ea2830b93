//! The package itself: its tree, its fields, and Debian's own program that packs both.

use super::{Arch, Programs, empty, folder};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::workspace;
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Libraries that programs may link, by the names that they are loaded by, and the packages that have them.
const LIBRARIES: &[(&str, &str)] = &[
    ("libc.so.6", "libc6"),
    ("libm.so.6", "libc6"),
    ("ld-linux-x86-64.so.2", "libc6"),
    ("ld-linux-aarch64.so.1", "libc6"),
    ("libgcc_s.so.1", "libgcc-s1"),
    ("libibverbs.so.1", "libibverbs1"),
    ("librdmacm.so.1", "librdmacm1"),
    ("libelf.so.1", "libelf1"),
    ("libz.so.1", "zlib1g"),
];

/// What programs and maintainer scripts call beside what every Debian has.
const CALLED: &[&str] = &["iproute2", "passwd"];

/// Where completions go, by the folder of the manual that has them; and their endings there and here.
const COMPLETIONS: &[(&str, &str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions", ".bash"),
    ("zsh", "usr/share/zsh/vendor-completions", ""),
    ("fish", "usr/share/fish/vendor_completions.d", ""),
];

/// A package to be made.
pub(super) struct Package<'a> {
    pub arch: Arch,
    pub version: &'a str,
    /// Seconds since 1970 that no file in it is newer than.
    pub time: u64,
    /// Whether packing quickly matters more than its size.
    pub quick: bool,
}

impl Package<'_> {
    /// Makes it of these programs; its file.
    pub(super) fn make(&self, programs: &Programs) -> Result<PathBuf> {
        let tree = folder().join("tree");
        empty(&tree)?;
        for (name, program) in &programs.paths {
            let installed = tree.join("usr/bin").join(name);
            make_parent(&installed)?;
            let mut strip = Command::new(format!("{}strip", self.arch.prefix()));
            workspace::run(strip.arg("--strip-unneeded").arg("-o").arg(&installed).arg(program))?;
            mode(&installed, 0o755)?;
        }
        let mut needs = self.needs(programs)?;
        needs.extend(CALLED.iter().map(|package| (*package).to_owned()));
        self.lay_out(&tree, programs)?;
        self.describe(&tree, &needs.into_iter().collect::<Vec<_>>().join(", "))?;
        let file = folder().join(format!("harmonaize_{}_{}.deb", self.version, self.arch.name()));
        let mut pack = Command::new("dpkg-deb");
        pack.env("SOURCE_DATE_EPOCH", self.time.to_string()).arg("--root-owner-group");
        pack.args(if self.quick { ["-Zgzip", "-z1"] } else { ["-Zxz", "-z6"] });
        pack.arg("--build").arg(&tree).arg(&file).stdout(Stdio::null());
        workspace::run(&mut pack)?;
        Ok(file)
    }

    /// All files but the programs.
    fn lay_out(&self, tree: &Path, programs: &Programs) -> Result<()> {
        let own = workspace::root().join("xtask/package");
        for (from, to) in [
            ("etc", "etc/harmonaize"),
            ("systemd", "usr/lib/systemd/system"),
            ("monitoring", "usr/share/doc/harmonaize/monitoring"),
        ] {
            for file in files(&own.join(from))? {
                copy(&file, &tree.join(to).join(name(&file)?), 0o644)?;
            }
        }
        for page in files(&programs.manual.join("man"))? {
            packed(&page, &tree.join("usr/share/man/man1").join(format!("{}.gz", name(&page)?)))?;
        }
        for (shell, to, ending) in COMPLETIONS {
            for file in files(&programs.manual.join(shell))? {
                let name = name(&file)?;
                copy(&file, &tree.join(to).join(name.strip_suffix(ending).unwrap_or(name)), 0o644)?;
            }
        }
        let documents = tree.join("usr/share/doc/harmonaize");
        copy(&workspace::root().join("LICENSE"), &documents.join("copyright"), 0o644)?;
        packed(&workspace::root().join("CHANGELOG.md"), &documents.join("changelog.gz"))
    }

    /// What dpkg reads: fields, scripts, files that an operator may change, and a sum of each file.
    fn describe(&self, tree: &Path, needs: &str) -> Result<()> {
        let control = tree.join("DEBIAN");
        fs::create_dir(&control)?;
        let (mut sums, mut changed, mut bytes) = (String::new(), String::new(), 0);
        let mut open = vec![tree.to_owned()];
        let mut all = Vec::new();
        while let Some(folder) = open.pop() {
            mode(&folder, 0o755)?;
            for entry in fs::read_dir(&folder)? {
                let path = entry?.path();
                if path.is_dir() { open.push(path) } else { all.push(path) }
            }
        }
        all.sort();
        for path in &all {
            let inside = path.strip_prefix(tree)?;
            bytes += path.metadata()?.len();
            if inside.starts_with("etc") {
                changed += &format!("/{}\n", inside.display());
            }
            let output = Command::new("md5sum").current_dir(tree).arg(inside).output()?;
            sums += &String::from_utf8(output.stdout)?;
        }
        let (version, arch) = (self.version, self.arch.name());
        let fields = format!(
            "Package: harmonaize\nVersion: {version}\nArchitecture: {arch}\nSection: net\nPriority: optional\n\
             Maintainer: The harmonaize project <packages@harmonaize.invalid>\nInstalled-Size: {}\nDepends: {needs}\n\
             Recommends: ibverbs-providers\nDescription: collective communication as a service\n \
             The provider's daemons and command line: control, which forms communicators and plans\n \
             their routes; the agent of a host, which runs its tenants' collectives; the same program as\n \
             an aggregator, which sums on the way; and harmonaize, the operators' command line.\n",
            bytes.div_ceil(1024),
        );
        for (name, text) in [("control", fields), ("md5sums", sums), ("conffiles", changed)] {
            fs::write(control.join(name), text)?;
            mode(&control.join(name), 0o644)?;
        }
        for script in files(&workspace::root().join("xtask/package/debian"))? {
            copy(&script, &control.join(name(&script)?), 0o755)?;
        }
        Ok(())
    }

    /// The packages with the libraries that programs load.
    fn needs(&self, programs: &Programs) -> Result<BTreeSet<String>> {
        let mut readelf = Command::new(format!("{}readelf", self.arch.prefix()));
        readelf.env("LC_ALL", "C").args(["--dynamic", "--version-info", "--wide"]);
        readelf.args(programs.paths.iter().map(|(_, path)| path));
        let output = readelf.output().context("cannot start readelf, of Debian's package binutils")?;
        if !output.status.success() {
            bail!("`{}` ended with {}", workspace::describe(&readelf), output.status);
        }
        needs(&String::from_utf8_lossy(&output.stdout))
    }
}

/// The packages that have what `readelf` lists, with the least version of the C library.
fn needs(listed: &str) -> Result<BTreeSet<String>> {
    let mut needs = BTreeSet::new();
    let between = |line: &str, open: &str, close: char| {
        line.split_once(open).and_then(|(_, rest)| rest.split_once(close)).map(|(word, _)| word.to_owned())
    };
    let version = |text: String| {
        let (major, minor) = text.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    };
    let least =
        listed.lines().filter_map(|line| between(line, "Name: GLIBC_", ' ')).filter_map(version).max();
    for library in listed.lines().filter_map(|line| between(line, "Shared library: [", ']')) {
        let Some((_, package)) = LIBRARIES.iter().find(|(known, _)| *known == library) else {
            bail!("{library} is of no package that is listed in xtask/src/package/deb.rs");
        };
        needs.insert(match least {
            Some((major, minor)) if *package == "libc6" => format!("libc6 (>= {major}.{minor})"),
            _ => (*package).to_owned(),
        });
    }
    Ok(needs)
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

fn name(path: &Path) -> Result<&str> {
    path.file_name().and_then(|name| name.to_str()).with_context(|| format!("{} has no name", path.display()))
}

fn make_parent(path: &Path) -> Result<()> {
    Ok(fs::create_dir_all(path.parent().context("a file in no folder")?)?)
}

fn mode(path: &Path, mode: u32) -> Result<()> {
    Ok(fs::set_permissions(path, Permissions::from_mode(mode))?)
}

fn copy(from: &Path, to: &Path, bits: u32) -> Result<()> {
    make_parent(to)?;
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    mode(to, bits)
}

/// Copies a file compressed by gzip, the same each time.
fn packed(from: &Path, to: &Path) -> Result<()> {
    make_parent(to)?;
    let output = fs::File::create(to)?;
    workspace::run(Command::new("gzip").args(["-9", "--no-name", "--stdout"]).arg(from).stdout(output))?;
    mode(to, 0o644)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_needs_the_packages_of_its_libraries() {
        let listed = " 0x01 (NEEDED)  Shared library: [libibverbs.so.1]\n 0x01 (NEEDED)  Shared library: [libc.so.6]\n\
             0x01 (NEEDED)  Shared library: [libm.so.6]\n\
             0x0010:   Name: GLIBC_2.4  Flags: none  Version: 3\n  0x0020:   Name: GLIBC_2.34  Flags: none  Version: 2\n\
             0x0030:   Name: IBVERBS_1.1  Flags: none  Version: 4\n";
        let found: Vec<String> = needs(listed).unwrap().into_iter().collect();
        assert_eq!(found, ["libc6 (>= 2.34)", "libibverbs1"]);
        let unknown = needs(" (NEEDED) Shared library: [libodd.so.9]\n").unwrap_err().to_string();
        assert!(unknown.contains("libodd.so.9"), "{unknown}");
    }
}
