//! Programs for a guest: found with the shared libraries that they need, without their debug information.

use super::initramfs::Initramfs;
use super::{AMD64, Architecture};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where programs are looked for in a root.
const FOLDERS: &[&str] = &["usr/bin", "usr/sbin", "bin", "sbin"];

/// Where a guest's programs and libraries come from.
#[derive(Debug, Clone)]
pub struct Userland {
    architecture: &'static Architecture,
    /// Folders that are laid out as a system's root; what the first has counts.
    roots: Vec<PathBuf>,
}

impl Userland {
    /// What is installed on this machine.
    pub fn here() -> Self {
        Self::new(&AMD64, vec![PathBuf::from("/")])
    }

    /// What is in these folders, each laid out as a system's root.
    pub fn new(architecture: &'static Architecture, roots: Vec<PathBuf>) -> Self {
        Self { architecture, roots }
    }

    fn first(&self, inside: impl Fn(&Path) -> Vec<PathBuf>) -> Option<PathBuf> {
        self.roots.iter().flat_map(|root| inside(root)).find(|path| path.is_file())
    }

    fn program(&self, name: &str) -> Result<PathBuf> {
        let found = self.first(|root| FOLDERS.iter().map(|folder| root.join(folder).join(name)).collect());
        found.with_context(|| format!("{name} is not installed"))
    }

    fn library(&self, name: &str) -> Option<PathBuf> {
        let ours = self.architecture.libraries;
        // The last is where a cross compiler has the C library.
        let folders = [format!("usr/lib/{ours}"), format!("lib/{ours}"), "lib".to_owned()];
        self.first(|root| folders.iter().map(|folder| root.join(folder).join(name)).collect())
    }

    fn interpreter(&self, path: &str) -> Result<PathBuf> {
        let found = self.first(|root| vec![root.join(path.trim_start_matches('/'))]);
        found.with_context(|| format!("the interpreter {path} is not installed"))
    }

    /// The folder with the providers of verbs, with the root in which it is.
    fn verbs(&self) -> Result<(&Path, PathBuf)> {
        let inside = format!("usr/lib/{}/libibverbs", self.architecture.libraries);
        let found = self.roots.iter().find(|root| root.join(&inside).is_dir());
        let root = found.with_context(|| format!("there is no folder {inside}"))?;
        Ok((root, root.join(inside)))
    }
}

/// Adds a program by its name, as `/usr/bin/NAME`.
pub fn add_installed(tree: &mut Initramfs, from: &Userland, name: &str) -> Result<()> {
    add(tree, from, &from.program(name)?, &format!("/usr/bin/{name}"))
}

/// Adds the provider of verbs on SoftRoCE, which the library loads by its configuration.
pub fn add_verbs(tree: &mut Initramfs, from: &Userland) -> Result<()> {
    let (root, folder) = from.verbs()?;
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut found = false;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("librxe-") {
            let inside = format!("/usr/lib/{}/libibverbs/{name}", from.architecture.libraries);
            add(tree, from, &entry.path(), &inside)?;
            found = true;
        }
    }
    if !found {
        bail!("{} has no provider for SoftRoCE", folder.display());
    }
    let driver = "etc/libibverbs.d/rxe.driver";
    tree.file(driver, fs::read(root.join(driver)).with_context(|| format!("cannot read {driver}"))?);
    Ok(())
}

/// Adds the program or library `path` as `inside`, with its interpreter and the libraries that it needs.
pub fn add(tree: &mut Initramfs, from: &Userland, path: &Path, inside: &str) -> Result<()> {
    let mut todo = vec![(path.to_path_buf(), inside.to_owned())];
    while let Some((path, inside)) = todo.pop() {
        if tree.has(&inside) {
            continue;
        }
        let needs = Needs::of(&path)?;
        tree.program(&inside, without_debug_information(from.architecture, &path)?);
        if let Some(interpreter) = needs.interpreter {
            todo.push((from.interpreter(&interpreter)?, interpreter));
        }
        for name in needs.libraries {
            // The interpreter again, under its own name: it stands where programs name it.
            if name.starts_with("ld-linux") {
                continue;
            }
            let Some(place) = from.library(&name) else {
                bail!("{} needs {name}, which is not installed", path.display());
            };
            todo.push((place, format!("/usr/lib/{}/{name}", from.architecture.libraries)));
        }
    }
    Ok(())
}

/// What a file names in its ELF headers.
#[derive(Debug, Default, PartialEq, Eq)]
struct Needs {
    interpreter: Option<String>,
    libraries: Vec<String>,
}

impl Needs {
    fn of(path: &Path) -> Result<Self> {
        let output = Command::new("readelf").args(["-ldW"]).arg(path).env("LC_ALL", "C").output();
        let output = output.context("cannot start readelf; it is in Debian's binutils")?;
        if !output.status.success() {
            bail!("{} is no program: {}", path.display(), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(Self::parse(&String::from_utf8_lossy(&output.stdout)))
    }

    fn parse(headers: &str) -> Self {
        let between = |line: &str, from: &str, to: char| -> Option<String> {
            Some(line.split_once(from)?.1.split_once(to)?.0.trim().to_owned())
        };
        Self {
            interpreter: headers.lines().find_map(|line| between(line, "program interpreter:", ']')),
            libraries: headers
                .lines()
                .filter(|line| line.contains("(NEEDED)"))
                .filter_map(|line| between(line, "[", ']'))
                .collect(),
        }
    }
}

fn without_debug_information(architecture: &Architecture, path: &Path) -> Result<Vec<u8>> {
    let folder = super::folder();
    fs::create_dir_all(&folder)?;
    let part = folder.join(format!("stripped-{}", std::process::id()));
    let mut strip = Command::new(architecture.strip);
    strip.args(["--strip-debug", "-o"]).arg(&part).arg(path);
    harmonaize_testkit::workspace::run(&mut strip)?;
    let bytes = fs::read(&part)?;
    fs::remove_file(&part)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_are_read_from_the_headers() {
        let headers = "  INTERP 0x318\n      [Requesting program interpreter: /lib64/ld-linux-x86-64.so.2]\n\
             0x0000000000000001 (NEEDED)             Shared library: [libibverbs.so.1]\n\
             0x000000000000000e (SONAME)             Library soname: [x.so]\n\
             0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]\n";
        let expected = Needs {
            interpreter: Some("/lib64/ld-linux-x86-64.so.2".into()),
            libraries: vec!["libibverbs.so.1".into(), "libc.so.6".into()],
        };
        assert_eq!(Needs::parse(headers), expected);
        assert_eq!(Needs::parse("There is no dynamic section in this file."), Needs::default());
    }

    #[test]
    fn the_first_matching_root_wins() {
        let home = tempfile::tempdir().unwrap();
        let [own, sysroot, cross] = ["own", "sysroot", "cross"].map(|name| home.path().join(name));
        for file in [
            own.join("usr/bin/tool"),
            own.join("usr/lib/aarch64-linux-gnu/libboth.so.1"),
            sysroot.join("lib/aarch64-linux-gnu/libboth.so.1"),
            sysroot.join("usr/lib/x86_64-linux-gnu/libforeign.so.1"),
            sysroot.join("lib/aarch64-linux-gnu/libroot.so.1"),
            cross.join("lib/libc.so.6"),
            cross.join("lib/ld-linux-aarch64.so.1"),
        ] {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        let from = Userland::new(&crate::vm::ARM64, vec![own.clone(), sysroot.clone(), cross.clone()]);
        assert_eq!(from.program("tool").unwrap(), own.join("usr/bin/tool"));
        assert!(from.program("other").unwrap_err().to_string().contains("other is not installed"));
        let both = from.library("libboth.so.1").unwrap();
        assert_eq!(both, own.join("usr/lib/aarch64-linux-gnu/libboth.so.1"));
        assert_eq!(from.library("libroot.so.1"), Some(sysroot.join("lib/aarch64-linux-gnu/libroot.so.1")));
        assert_eq!(from.library("libc.so.6"), Some(cross.join("lib/libc.so.6")));
        assert_eq!(from.library("libforeign.so.1"), None, "of another architecture");
        let interpreter = from.interpreter("/lib/ld-linux-aarch64.so.1").unwrap();
        assert_eq!(interpreter, cross.join("lib/ld-linux-aarch64.so.1"));
        assert!(from.interpreter("/lib64/ld-linux-x86-64.so.2").is_err());
    }
}
