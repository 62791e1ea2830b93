//! What every package holds: the tree of files that is laid out once, and the libraries that its programs load.

use super::{Arch, Programs, empty, folder};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::workspace;
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where completions go, by the folder of the manual that has them; and their endings there and here.
const COMPLETIONS: &[(&str, &str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions", ".bash"),
    ("zsh", "usr/share/zsh/vendor-completions", ""),
    ("fish", "usr/share/fish/vendor_completions.d", ""),
];

/// The files, laid out as in a system's root; all belong to root.
pub(super) struct Contents {
    /// The folder with them.
    pub tree: PathBuf,
    /// Every file, sorted.
    pub files: Vec<File>,
    /// What the programs load.
    pub libraries: Libraries,
}

/// A file of the tree.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct File {
    /// Its path from the root on, as `/usr/bin/harmonaize`.
    pub path: String,
    /// Its permissions.
    pub mode: u32,
    /// Whether an operator changes it, so that an upgrade must not.
    pub config: bool,
}

/// The libraries that programs load when they start.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Libraries {
    /// What the programs run on.
    pub machines: BTreeSet<String>,
    /// By the names that they are loaded by.
    pub names: BTreeSet<String>,
    /// The least version of glibc that has all that is called.
    pub glibc: Option<(u32, u32)>,
}

impl Contents {
    /// Lays them out.
    pub(super) fn lay_out(arch: Arch, programs: &Programs) -> Result<Self> {
        let tree = folder().join("tree");
        empty(&tree)?;
        for (name, program) in &programs.paths {
            let installed = tree.join("usr/bin").join(name);
            make_parent(&installed)?;
            let mut strip = Command::new(format!("{}strip", arch.prefix()));
            workspace::run(strip.arg("--strip-unneeded").arg("-o").arg(&installed).arg(program))?;
            mode(&installed, 0o755)?;
        }
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
        packed(&workspace::root().join("CHANGELOG.md"), &documents.join("changelog.gz"))?;
        let files = listed(&tree)?;
        let paths: Vec<PathBuf> = programs.paths.iter().map(|(_, path)| path.clone()).collect();
        Ok(Self { tree, files, libraries: Libraries::of(arch, &paths)? })
    }

    /// A row for each file, as [`rows`] reads them in a package.
    pub(super) fn rows(&self) -> Vec<String> {
        let rwx = |mode: u32| -> String {
            "rwxrwxrwx"
                .chars()
                .zip((0..9).rev())
                .map(|(letter, bit)| if mode >> bit & 1 == 1 { letter } else { '-' })
                .collect()
        };
        self.files.iter().map(|file| format!("-{} root/root {}", rwx(file.mode), file.path)).collect()
    }
}

/// The files in the listing of an archive, as `tar --list --verbose` prints it. Each has mode, owner and path from `folder` on; they
/// are sorted by path.
pub(super) fn rows(listed: &str, folder: &str) -> Vec<String> {
    let row = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (mode, owner) = (fields.first()?, fields.get(1)?.replace("0/0", "root/root"));
        let path = fields.get(5)?.strip_prefix(folder)?;
        (!mode.starts_with('d')).then(|| format!("{mode} {owner} {path}"))
    };
    let mut rows: Vec<String> = listed.lines().filter_map(row).collect();
    rows.sort_by(|a, b| a.rsplit(' ').next().cmp(&b.rsplit(' ').next()));
    rows
}

/// An error where a package has other rows than the list.
pub(super) fn compare(package: &str, found: &[String], expected: &[String]) -> Result<()> {
    let beside = |rows: &[String], others: &[String]| -> Vec<String> {
        rows.iter().filter(|row| !others.contains(row)).cloned().collect()
    };
    let (more, fewer) = (beside(found, expected), beside(expected, found));
    if found != expected {
        bail!("{package} has what the list has not: {more:?}; and has not what it has: {fewer:?}");
    }
    println!("{package} has the {} files of the list, with their modes and owners", expected.len());
    Ok(())
}

/// The files of a tree; gives its folders the mode that packages say.
fn listed(tree: &Path) -> Result<Vec<File>> {
    let (mut found, mut open) = (Vec::new(), vec![tree.to_owned()]);
    while let Some(folder) = open.pop() {
        mode(&folder, 0o755)?;
        for path in files(&folder)? {
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let mode = path.metadata()?.permissions().mode() & 0o7777;
            let inside = path.strip_prefix(tree)?;
            let config = inside.starts_with("etc");
            found.push(File { path: format!("/{}", inside.display()), mode, config });
        }
    }
    found.sort();
    Ok(found)
}

impl Libraries {
    /// Those that these files load themselves.
    pub(crate) fn of(arch: Arch, files: &[PathBuf]) -> Result<Self> {
        let mut readelf = Command::new(format!("{}readelf", arch.prefix()));
        readelf
            .args(["--file-header", "--dynamic", "--version-info", "--wide"])
            .args(files)
            .env("LC_ALL", "C");
        let output = readelf.output().context("cannot start readelf, of Debian's package binutils")?;
        Ok(Self::read(&String::from_utf8_lossy(&output.stdout)))
    }

    /// Those in what `readelf` lists.
    pub(crate) fn read(listed: &str) -> Self {
        let between = |line: &str, open: &str, close: char| {
            line.split_once(open)
                .and_then(|(_, rest)| rest.split_once(close))
                .map(|(word, _)| word.to_owned())
        };
        let version = |text: String| {
            let (major, minor) = text.split_once('.')?;
            let minor = minor.split('.').next()?;
            Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
        };
        let glibc = listed.lines().filter_map(|line| between(line, "Name: GLIBC_", ' ')).filter_map(version);
        let names = listed.lines().filter_map(|line| between(line, "Shared library: [", ']'));
        let machines = listed.lines().filter_map(|line| line.trim_start().strip_prefix("Machine:"));
        let machines = machines.map(|machine| machine.trim().to_owned()).collect();
        Self { machines, names: names.collect(), glibc: glibc.max() }
    }
}

pub(super) fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

pub(super) fn name(path: &Path) -> Result<&str> {
    path.file_name().and_then(|name| name.to_str()).with_context(|| format!("{} has no name", path.display()))
}

fn make_parent(path: &Path) -> Result<()> {
    Ok(fs::create_dir_all(path.parent().context("a file in no folder")?)?)
}

pub(super) fn mode(path: &Path, mode: u32) -> Result<()> {
    Ok(fs::set_permissions(path, Permissions::from_mode(mode))?)
}

pub(super) fn copy(from: &Path, to: &Path, bits: u32) -> Result<()> {
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
    fn a_listing_is_compared_with_the_list() {
        let listed = "drwxr-xr-x root/root 0 2026-11-27 10:00 ./usr/bin/\n\
             -rwxr-xr-x 0/0 12 2026-11-27 10:00 ./usr/bin/b\n-rw-r--r-- root/root 1 2026-11-27 10:00 ./etc/a\n";
        let file = |path: &str, mode| File { path: path.into(), mode, config: false };
        let files = vec![file("/etc/a", 0o644), file("/usr/bin/b", 0o755)];
        let contents = Contents { tree: PathBuf::new(), files, libraries: Libraries::default() };
        compare("it", &rows(listed, "."), &contents.rows()).unwrap();
        let other = listed.replace("-rw-r--r-- root", "-rw-r--rw- nobody");
        let error = compare("it", &rows(&other, "."), &contents.rows()).unwrap_err().to_string();
        assert!(error.contains("-rw-r--rw- nobody/root /etc/a"), "{error}");
    }
}
