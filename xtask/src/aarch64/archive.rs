//! Debian's archive seen through a state of our own, so that the machine's architectures stay as they are.

use anyhow::{Context, Result, bail};
use harmonaize_testkit::workspace;
use std::cmp::Ordering;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Package lists of amd64 and of arm64 in a folder, from the machine's own sources.
#[derive(Debug)]
pub struct Archive {
    folder: PathBuf,
}

impl Archive {
    /// Fetches the package lists into `folder` (some 60 MB).
    pub fn fetch(folder: PathBuf) -> Result<Self> {
        for inside in ["lists/partial", "cache/archives/partial"] {
            let inside = folder.join(inside);
            fs::create_dir_all(&inside).with_context(|| format!("cannot create {}", inside.display()))?;
        }
        let archive = Self { folder };
        workspace::run(archive.apt("apt-get").args(["-qq", "update"]))?;
        Ok(archive)
    }

    /// The version of a package that apt would choose; `NAME` or `NAME:arm64`.
    pub fn candidate(&self, package: &str) -> Result<Option<String>> {
        let policy = printed(self.apt("apt-cache").args(["policy", package]))?;
        Ok(candidate(&policy))
    }

    /// The names of the packages that one version of a package depends on.
    pub fn depends(&self, package: &str, version: &str) -> Result<Vec<String>> {
        let shown = printed(self.apt("apt-cache").arg("show").arg(format!("{package}={version}")))?;
        Ok(depends(&shown))
    }

    /// Downloads packages (`NAME`, `NAME:arm64`, each with or without `=VERSION`) into a folder that is there.
    pub fn download(&self, packages: &[String], folder: &Path) -> Result<()> {
        let mut download = self.apt("apt-get");
        // As ourselves: apt's own user may not write here.
        download.args(["-qq", "-o", "APT::Sandbox::User=root", "download"]).args(packages);
        workspace::run(download.current_dir(folder))
    }

    /// Downloads packages and unpacks them in `folder`, with the fields of each in `var/lib/dpkg/status.d`.
    pub fn unpack(&self, packages: &[String], folder: &Path) -> Result<()> {
        let downloads = folder.join("downloads");
        let fields = folder.join("var/lib/dpkg/status.d");
        fs::create_dir_all(&downloads)?;
        fs::create_dir_all(&fields)?;
        self.download(packages, &downloads)?;
        let mut count = 0;
        for entry in fs::read_dir(&downloads)? {
            let package = entry?.path();
            workspace::run(Command::new("dpkg-deb").arg("--extract").arg(&package).arg(folder))?;
            let field =
                |names: &[&str]| printed(Command::new("dpkg-deb").arg("--field").arg(&package).args(names));
            fs::write(fields.join(field(&["Package"])?.trim()), field(&[])?)?;
            count += 1;
        }
        if count != packages.len() {
            bail!("apt-get brought {count} packages of {}: {}", packages.len(), packages.join(" "));
        }
        fs::remove_dir_all(&downloads)?;
        Ok(())
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LC_ALL", "C").stdin(Stdio::null());
        let option = |name: &str, inside: &str| format!("{name}={}", self.folder.join(inside).display());
        command.args(["-o", &option("Dir::State::lists", "lists"), "-o", &option("Dir::Cache", "cache")]);
        command.args(["-o", "APT::Architectures::=amd64", "-o", "APT::Architectures::=arm64"]);
        command
    }
}

/// The version of a package that the machine's own lists name, without a look at the network.
pub fn listed_version(package: &str) -> Option<String> {
    let policy = printed(Command::new("apt-cache").env("LC_ALL", "C").args(["policy", package])).ok()?;
    candidate(&policy)
}

/// How two versions compare by Debian's rules.
pub fn compare(one: &str, other: &str) -> Result<Ordering> {
    let holds = |relation: &str| -> Result<bool> {
        let mut dpkg = Command::new("dpkg");
        dpkg.args(["--compare-versions", one, relation, other]);
        Ok(dpkg.status().context("cannot start dpkg")?.success())
    };
    Ok(match (holds("lt")?, holds("gt")?) {
        (true, _) => Ordering::Less,
        (_, true) => Ordering::Greater,
        _ => Ordering::Equal,
    })
}

fn printed(command: &mut Command) -> Result<String> {
    let shown = workspace::describe(command);
    let output = command.output().with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn candidate(policy: &str) -> Option<String> {
    let version = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "))?;
    (version != "(none)").then(|| version.to_owned())
}

fn depends(shown: &str) -> Vec<String> {
    let list = shown.lines().find_map(|line| line.strip_prefix("Depends: ")).unwrap_or_default();
    let first = |item: &str| item.split([' ', '|', '(', ':']).next().unwrap_or_default().to_owned();
    list.split(", ").map(first).filter(|name| !name.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_candidate_is_read_from_a_policy() {
        let policy =
            "rustc-web:\n  Installed: (none)\n  Candidate: 1.96.0+dfsg1-1~deb12u2\n  Version table:\n";
        assert_eq!(candidate(policy).as_deref(), Some("1.96.0+dfsg1-1~deb12u2"));
        assert_eq!(candidate("x:\n  Installed: (none)\n  Candidate: (none)\n"), None);
        assert_eq!(candidate(""), None);
    }

    #[test]
    fn dependencies_are_names() {
        let shown =
            "Package: a\nDepends: libc6 (>= 2.34), libllvm22, b:any | c\nDescription: Depends: not this\n";
        assert_eq!(depends(shown), ["libc6", "libllvm22", "b"]);
        assert_eq!(depends("Package: a\n"), Vec::<String>::new());
    }
}
