//! A guest's kernel: Debian's package, fetched but never installed, kept by its version.

use super::modules::Modules;
use super::{AMD64, Architecture, payload};
use crate::aarch64::{self, archive::Archive};
use anyhow::{Context, Result, bail};
use harmonaize_testkit::workspace;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What is taken from the package: the image, and the modules that a network of virtual machines may need. A star stands for
/// no `/`; what matches and is a folder is taken with all in it.
const MEMBERS: &[&str] = &[
    "./boot/vmlinuz-*",
    "./lib/modules/*/modules.builtin",
    "./lib/modules/*/kernel/arch/*",
    "./lib/modules/*/kernel/crypto/*",
    "./lib/modules/*/kernel/fs/configfs/*",
    "./lib/modules/*/kernel/lib/*",
    "./lib/modules/*/kernel/net/*",
    "./lib/modules/*/kernel/drivers/infiniband/core",
    "./lib/modules/*/kernel/drivers/infiniband/sw",
    "./lib/modules/*/kernel/drivers/net/*.ko",
    "./lib/modules/*/kernel/drivers/virtio/*",
];

/// A kernel that is ready to boot.
#[derive(Debug)]
pub struct Kernel {
    image: PathBuf,
    modules: Modules,
    version: String,
}

impl Kernel {
    /// The newest kernel that Debian's package lists name, fetched and unpacked unless that was done before.
    ///
    /// When the lists name none or the fetch fails, the one prepared last stands in for it.
    pub fn prepare(architecture: &Architecture) -> Result<Self> {
        let kept = super::folder().join("kernel").join(architecture.debian);
        fs::create_dir_all(&kept).with_context(|| format!("cannot create {}", kept.display()))?;
        let done = |folder: &Path| folder.join("vmlinux").is_file();
        let current = newest(architecture).and_then(|(package, version)| {
            let folder = kept.join(format!("{package}_{version}"));
            if !done(&folder) {
                eprintln!("Fetching {package} {version} (60 to 70 MB; it is not installed).");
                fetch(architecture, &format!("{package}:{}={version}", architecture.debian), &folder)?;
            }
            Ok(folder)
        });
        let folder = match current {
            Ok(folder) => folder,
            Err(error) => {
                let entries = fs::read_dir(&kept)?.filter_map(Result::ok).map(|entry| entry.path());
                let last = entries.filter(|folder| done(folder)).max_by_key(|folder| modified(folder));
                let Some(last) = last else { return Err(error.context("there is no kernel for the guest")) };
                eprintln!("note: {error:#}; {} stands in", last.display());
                last
            }
        };
        Self::open(&folder)
    }

    fn open(folder: &Path) -> Result<Self> {
        let version = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let modules = Modules::find(&only(&folder.join("lib/modules"))?)?;
        Ok(Self { image: folder.join("vmlinux"), modules, version })
    }

    /// The uncompressed image.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// The package's name and version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Names and contents of modules in the order in which to load them, with those that they depend on.
    pub fn modules(&self, wanted: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
        self.modules.load(wanted)
    }
}

fn modified(folder: &Path) -> Option<std::time::SystemTime> {
    fs::metadata(folder).and_then(|folder| folder.modified()).ok()
}

/// Name and version of the package that the metapackage of the architecture stands for.
///
/// The machine's own lists name its own architecture's alone; the others' kernels are built from the same source, so
/// they have the same version, and the same name but for its end.
fn newest(architecture: &Architecture) -> Result<(String, String)> {
    let meta = format!("linux-image-{}", AMD64.debian);
    let depends = apt_cache(&["depends", &meta])?;
    let Some(package) = dependency(&depends) else {
        bail!("Debian's package lists do not name {meta}; refresh them: `apt-get update`")
    };
    let shown = apt_cache(&["show", "--no-all-versions", &package])?;
    let version = shown.lines().find_map(|line| line.strip_prefix("Version: "));
    let version = version.with_context(|| format!("the package lists give {package} no version"))?;
    Ok((twin(&package, architecture)?, version.trim().to_owned()))
}

/// The name that a kernel for this machine has for another architecture.
fn twin(package: &str, architecture: &Architecture) -> Result<String> {
    let stem = package.strip_suffix(AMD64.debian).with_context(|| format!("{package} is an odd name"))?;
    Ok(format!("{stem}{}", architecture.debian))
}

/// The first kernel in the answer of `apt-cache depends`.
fn dependency(answer: &str) -> Option<String> {
    let names = answer.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    names.map(str::trim).find(|name| name.starts_with("linux-image-")).map(str::to_owned)
}

fn apt_cache(arguments: &[&str]) -> Result<String> {
    let output = Command::new("apt-cache").args(arguments).stderr(Stdio::null()).output();
    let output = output.context("cannot start apt-cache; this needs Debian's packages")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Downloads the package and leaves what is needed of it in `folder`, which appears whole or not at all.
fn fetch(architecture: &Architecture, package: &str, folder: &Path) -> Result<()> {
    let part = folder.with_extension(format!("part-{}", std::process::id()));
    if part.exists() {
        fs::remove_dir_all(&part)?;
    }
    fs::create_dir_all(&part)?;
    if architecture.debian == AMD64.debian {
        let mut download = Command::new("apt-get");
        // As ourselves: apt's own user may not write here.
        download.args(["-qq", "-o", "APT::Sandbox::User=root", "download", package]);
        workspace::run(download.current_dir(&part).stdin(Stdio::null()))?;
    } else {
        Archive::fetch(aarch64::folder().join("apt"))?.download(&[package.to_owned()], &part)?;
    }
    let archive = only(&part)?;
    unpack(&archive, &part)?;
    fs::remove_file(&archive)?;
    let packed = only(&part.join("boot"))?;
    payload::unpack(&packed, &part.join("vmlinux"))?;
    fs::remove_dir_all(part.join("boot"))?;
    if fs::rename(&part, folder).is_err() && !folder.is_dir() {
        bail!("cannot rename {} to {}", part.display(), folder.display());
    }
    Ok(())
}

/// Unpacks the wanted members of a package.
fn unpack(archive: &Path, folder: &Path) -> Result<()> {
    let mut contents = Command::new("dpkg-deb");
    contents.arg("--fsys-tarfile").arg(archive).stdout(Stdio::piped());
    let mut contents = contents.spawn().context("cannot start dpkg-deb")?;
    let pipe = contents.stdout.take().context("dpkg-deb has no output")?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--wildcards", "--no-wildcards-match-slash", "--directory"])
        .arg(folder)
        .args(MEMBERS)
        .stdin(pipe);
    let unpacked = workspace::run(&mut tar);
    let status = contents.wait()?;
    unpacked?;
    if !status.success() {
        bail!("dpkg-deb cannot read {}: {status}", archive.display());
    }
    Ok(())
}

/// The one entry of a folder.
fn only(folder: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    match (entries.next(), entries.next()) {
        (Some(entry), None) => Ok(entry?.path()),
        _ => bail!("{} should have one entry", folder.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metapackage_leads_to_the_kernel() {
        let answer = "linux-image-amd64\n  Depends: linux-image-6.1.0-56-amd64\n  Conflicts: x\n";
        assert_eq!(dependency(answer).as_deref(), Some("linux-image-6.1.0-56-amd64"));
        assert_eq!(dependency("linux-image-amd64\n  Suggests: linux-image-none\n"), None);
    }

    #[test]
    fn another_architectures_kernel_has_our_version() {
        let ours = "linux-image-6.1.0-56-amd64";
        assert_eq!(twin(ours, &crate::vm::ARM64).unwrap(), "linux-image-6.1.0-56-arm64");
        assert_eq!(twin(ours, &AMD64).unwrap(), ours);
        assert!(twin("linux-image-cloud", &AMD64).is_err());
    }
}
