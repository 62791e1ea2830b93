//! Programs for a guest: found here, with the shared libraries that they need, without their debug information.

use super::Architecture;
use super::initramfs::Initramfs;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where programs are looked for.
const FOLDERS: &[&str] = &["/usr/bin", "/usr/sbin", "/bin", "/sbin"];

/// Adds a program of this machine by its name, as `/usr/bin/NAME`.
pub fn add_installed(tree: &mut Initramfs, architecture: &Architecture, name: &str) -> Result<()> {
    let found = FOLDERS.iter().map(|folder| Path::new(folder).join(name)).find(|path| path.is_file());
    let Some(path) = found else { bail!("{name} is not installed") };
    add(tree, architecture, &path, &format!("/usr/bin/{name}"))
}

/// Adds the provider of verbs on SoftRoCE, which the library loads by its configuration.
pub fn add_verbs(tree: &mut Initramfs, architecture: &Architecture) -> Result<()> {
    let folder = PathBuf::from(format!("/usr/lib/{}/libibverbs", architecture.libraries));
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut found = false;
    for entry in entries {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("librxe-")) {
            add(tree, architecture, &path, &path.to_string_lossy())?;
            found = true;
        }
    }
    if !found {
        bail!("{} has no provider for SoftRoCE", folder.display());
    }
    let driver = "/etc/libibverbs.d/rxe.driver";
    tree.file(driver, fs::read(driver).with_context(|| format!("cannot read {driver}"))?);
    Ok(())
}

/// Adds the program or library `path` as `inside`, with its interpreter and the libraries that it needs.
pub fn add(tree: &mut Initramfs, architecture: &Architecture, path: &Path, inside: &str) -> Result<()> {
    let mut todo = vec![(path.to_path_buf(), inside.to_owned())];
    while let Some((path, inside)) = todo.pop() {
        if tree.has(&inside) {
            continue;
        }
        let needs = Needs::of(&path)?;
        tree.program(&inside, without_debug_information(&path)?);
        if let Some(interpreter) = needs.interpreter {
            todo.push((PathBuf::from(&interpreter), interpreter));
        }
        for name in needs.libraries {
            // The interpreter again, under its own name: it stands where programs name it.
            if name.starts_with("ld-linux") {
                continue;
            }
            let inside = format!("/usr/lib/{}/{name}", architecture.libraries);
            let places = [inside.clone(), format!("/lib/{}/{name}", architecture.libraries)];
            let Some(place) = places.iter().map(PathBuf::from).find(|place| place.is_file()) else {
                bail!("{} needs {name}, which is not installed", path.display());
            };
            todo.push((place, inside));
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

fn without_debug_information(path: &Path) -> Result<Vec<u8>> {
    let folder = super::folder();
    fs::create_dir_all(&folder)?;
    let part = folder.join(format!("stripped-{}", std::process::id()));
    let mut strip = Command::new("strip");
    strip.args(["--strip-debug", "-o"]).arg(&part).arg(path);
    crate::workspace::run(&mut strip)?;
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
}
