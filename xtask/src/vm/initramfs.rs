//! The guest's files, and the archive that the kernel unpacks (newc; Linux, Documentation/driver-api/early-userspace).

use anyhow::{Context, Result};
use cpio::newc::{self, Builder};
use harmonaize_guest::{Job, MODULES, PATH};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

const FOLDER: u32 = 0o040_755;
const FILE: u32 = 0o100_644;
const PRIVATE: u32 = 0o100_600;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// Folders that stand for those in `/usr`, as in Debian.
const MERGED: &[&str] = &["bin", "sbin", "lib", "lib64"];

/// The tree of files; paths are absolute paths of the guest.
#[derive(Debug)]
pub struct Initramfs {
    entries: BTreeMap<String, (u32, Vec<u8>)>,
}

impl Default for Initramfs {
    fn default() -> Self {
        let mut tree = Self { entries: BTreeMap::new() };
        for name in MERGED {
            tree.folder(&format!("/usr/{name}"));
            tree.entries.insert((*name).to_owned(), (LINK, format!("usr/{name}").into_bytes()));
        }
        for name in ["dev", "etc", "proc", "root", "run", "sys", "tmp", "var"] {
            tree.folder(&format!("/{name}"));
        }
        tree
    }
}

impl Initramfs {
    /// Adds an empty folder, and those above it.
    pub fn folder(&mut self, path: &str) {
        let mut above = String::new();
        for part in inside(path).split('/').filter(|part| !part.is_empty()) {
            if !above.is_empty() {
                above.push('/');
            }
            above.push_str(part);
            self.entries.entry(above.clone()).or_insert((FOLDER, Vec::new()));
        }
    }

    /// Adds a file that nobody runs.
    pub fn file(&mut self, path: &str, contents: impl Into<Vec<u8>>) {
        self.put(path, FILE, contents.into());
    }

    /// Adds a file that its owner alone reads.
    pub fn private(&mut self, path: &str, contents: impl Into<Vec<u8>>) {
        self.put(path, PRIVATE, contents.into());
    }

    /// Adds a program.
    pub fn program(&mut self, path: &str, contents: impl Into<Vec<u8>>) {
        self.put(path, PROGRAM, contents.into());
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, to: &str) {
        self.put(path, LINK, to.as_bytes().to_vec());
    }

    /// Adds modules, by name, for the first process to load in this order.
    pub fn modules(&mut self, modules: Vec<(String, Vec<u8>)>) {
        let mut order = String::new();
        for (name, contents) in modules {
            order.push_str(&format!("{name}\n"));
            self.file(&format!("{}/{name}.ko", MODULES), contents);
        }
        self.file(&format!("{}/order", MODULES), order);
    }

    /// Whether there is such an entry.
    pub fn has(&self, path: &str) -> bool {
        self.entries.contains_key(&inside(path))
    }

    fn put(&mut self, path: &str, mode: u32, contents: Vec<u8>) {
        let path = inside(path);
        if let Some((above, _)) = path.rsplit_once('/') {
            self.folder(above);
        }
        self.entries.insert(path, (mode, contents));
    }

    /// Writes the archive to a file, and returns its length in bytes.
    pub fn write(&self, path: &Path) -> Result<u64> {
        let file = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
        let mut output = BufWriter::new(file);
        self.archive(&mut output).with_context(|| format!("cannot write {}", path.display()))?;
        output.flush()?;
        Ok(std::fs::metadata(path)?.len())
    }

    fn archive(&self, output: &mut impl Write) -> Result<()> {
        for (number, (path, (mode, contents))) in (1_u32..).zip(&self.entries) {
            let length = u32::try_from(contents.len());
            let length = length.with_context(|| format!("{path} is too long for the archive"))?;
            let mut entry = Builder::new(path).ino(number).mode(*mode).write(&mut *output, length);
            entry.write_all(contents)?;
            entry.finish()?;
        }
        newc::trailer(output)?;
        Ok(())
    }
}

/// The archive of one run, removed when dropped.
#[derive(Debug)]
pub struct Image(PathBuf);

impl Image {
    /// Writes the tree with a job in it, under a name that no other run takes.
    pub fn write(tree: &mut Initramfs, job: &Job, name: &str) -> Result<Self> {
        tree.file(PATH, serde_json::to_vec(job)?);
        sweep(&super::folder());
        let image = Self(super::folder().join(format!("{name}-{}.cpio", std::process::id())));
        tree.write(&image.0)?;
        Ok(image)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            eprintln!("warning: {} stays: {error}", self.0.display());
        }
    }
}

/// Removes the archives of runs that a signal ended before they could. Their names have the number of a process that is gone.
fn sweep(folder: &Path) {
    let process = |path: &Path| -> Option<u32> {
        let name = path.file_name()?.to_str()?.strip_suffix(".cpio")?;
        name.rsplit_once('-')?.1.parse().ok()
    };
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let gone = |process: u32| !Path::new("/proc").join(process.to_string()).exists();
        if process(&path).is_some_and(gone)
            && let Err(error) = std::fs::remove_file(&path)
        {
            eprintln!("warning: {} stays: {error}", path.display());
        }
    }
}

/// A path as the archive has it: without a leading slash, in `/usr` where that stands for it.
fn inside(path: &str) -> String {
    let path = path.trim_matches('/');
    match path.split_once('/') {
        Some((first, _)) if MERGED.contains(&first) => format!("usr/{path}"),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_holds_its_entries() {
        let tree = Initramfs { entries: BTreeMap::from([("etc/x".into(), (FILE, b"hello".to_vec()))]) };
        let mut bytes = Vec::new();
        tree.archive(&mut bytes).unwrap();
        let mut expected = b"07070100000001000081a400000000000000000000000100000000".to_vec();
        expected.extend_from_slice(b"0000000500000000000000000000000000000000");
        expected.extend_from_slice(b"0000000600000000etc/x\0hello\0\0\0");
        assert_eq!(String::from_utf8_lossy(&bytes[..expected.len()]), String::from_utf8_lossy(&expected));
        assert_eq!((expected.len() % 4, bytes.len() % 4), (0, 0));
        assert!(bytes[expected.len()..].windows(10).any(|window| window == b"TRAILER!!!"));
    }

    #[test]
    fn folders_precede_their_entries() {
        let mut tree = Initramfs::default();
        tree.program("/bin/tool", "x");
        tree.link("/a/b/c", "../d");
        assert!(tree.has("/usr/bin/tool") && tree.has("/bin/tool") && !tree.has("/usr/bin/other"));
        let names: Vec<&String> = tree.entries.keys().collect();
        let at = |name: &str| names.iter().position(|other| *other == name).unwrap();
        assert!(at("a") < at("a/b") && at("a/b") < at("a/b/c"));
        assert!(at("usr") < at("usr/bin") && at("usr/bin") < at("usr/bin/tool"));
    }

    #[test]
    fn archives_of_dead_runs_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let own = format!("test-{}.cpio", std::process::id());
        // Beyond the largest number that a process has (Linux, PID_MAX_LIMIT).
        for name in ["test-5000000.cpio", &own, "test.cpio", "test-5000000.txt", "test-x.cpio"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        sweep(folder.path());
        let left = std::fs::read_dir(folder.path()).unwrap();
        let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        let mut expected = [own.as_str(), "test-5000000.txt", "test-x.cpio", "test.cpio"];
        expected.sort_unstable();
        assert_eq!(left, expected);
    }
}
