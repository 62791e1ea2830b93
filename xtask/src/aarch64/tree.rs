//! Folders of packages that are unpacked and not installed, kept by version under `target/aarch64`.

use super::archive::{self, Archive};
use super::folder;
use anyhow::{Context, Result};
use std::cmp::Ordering;
use std::fs;
use std::path::PathBuf;

/// The file that says that a folder is whole. It holds what was asked for, then the packages that must be installed
/// beside it.
const MARK: &str = "whole";

/// A folder of unpacked packages, kept by the version of one of them.
#[derive(Debug)]
pub(crate) struct Tree<'a> {
    /// Where the versions of it lie.
    pub(crate) home: PathBuf,
    /// The package whose version counts.
    pub(crate) key: &'a str,
    /// What is asked for: a tree that was made for something else is not used.
    pub(crate) request: &'a str,
    /// Roughly how much there is to download.
    pub(crate) size: u32,
    /// Which packages are in it, at a version of the key.
    pub(crate) contents: fn(&Archive, &str) -> Result<Contents>,
}

/// The packages of a tree.
#[derive(Debug)]
pub(crate) struct Contents {
    /// Unpacked in the folder.
    pub(crate) unpacked: Vec<String>,
    /// Installed beside it.
    pub(crate) installed: Vec<String>,
}

impl Tree<'_> {
    /// Version, folder and packages to be installed: from an earlier run unless the machine's package lists name a newer
    /// version. None when the archive has no such package.
    pub(crate) fn find(&self, lists: &mut Option<Archive>) -> Result<Option<(String, PathBuf, Vec<String>)>> {
        let mut kept = self.newest()?;
        if let (Some(version), Some(known)) = (&kept, archive::listed_version(self.key))
            && archive::compare(version, &known)? == Ordering::Less
        {
            kept = None;
        }
        let version = match kept {
            Some(version) => version,
            None => {
                let archive = match lists.take() {
                    Some(archive) => archive,
                    None => Archive::fetch(folder().join("apt"))?,
                };
                let archive = lists.insert(archive);
                let Some(version) = archive.candidate(self.key)? else { return Ok(None) };
                if !self.whole(&version) {
                    self.fetch(archive, &version)?;
                }
                version
            }
        };
        let folder = self.folder(&version);
        let mark = fs::read_to_string(folder.join(MARK))?;
        Ok(Some((version, folder, mark.lines().skip(1).map(str::to_owned).collect())))
    }

    fn folder(&self, version: &str) -> PathBuf {
        self.home.join(version)
    }

    fn whole(&self, version: &str) -> bool {
        let mark = fs::read_to_string(self.folder(version).join(MARK));
        mark.is_ok_and(|mark| mark.lines().next() == Some(self.request))
    }

    fn newest(&self) -> Result<Option<String>> {
        let mut newest: Option<String> = None;
        for entry in fs::read_dir(&self.home).into_iter().flatten() {
            let version = entry?.file_name().to_string_lossy().into_owned();
            let newer = match &newest {
                Some(newest) => archive::compare(&version, newest)? == Ordering::Greater,
                None => true,
            };
            if newer && self.whole(&version) {
                newest = Some(version);
            }
        }
        Ok(newest)
    }

    /// Unpacks the packages into a folder that appears whole or not at all.
    fn fetch(&self, archive: &Archive, version: &str) -> Result<()> {
        let folder = self.folder(version);
        let part = folder.with_file_name(format!("part-{}", std::process::id()));
        let contents = (self.contents)(archive, version)?;
        eprintln!(
            "Fetching {} {version} and what belongs to it (some {} MB; not installed).",
            self.key, self.size
        );
        if part.exists() {
            fs::remove_dir_all(&part)?;
        }
        archive.unpack(&contents.unpacked, &part)?;
        let mut mark = vec![self.request.to_owned()];
        mark.extend(contents.installed);
        fs::write(part.join(MARK), mark.join("\n"))?;
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::rename(&part, &folder).with_context(|| format!("cannot put {} in its place", folder.display()))
    }
}

/// Packages of arm64 that nothing has to be installed for.
pub(crate) fn unpacked(packages: &[&str]) -> Contents {
    let unpacked = packages.iter().map(|package| format!("{package}:arm64")).collect();
    Contents { unpacked, installed: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_reused_only_when_whole() {
        let home = tempfile::tempdir().unwrap();
        let tree = |asked: &'static str| Tree {
            home: home.path().to_path_buf(),
            key: "x",
            request: asked,
            size: 0,
            contents: |_, _| Ok(unpacked(&[])),
        };
        let version = "1.2-3";
        let folder = home.path().join(version);
        fs::create_dir_all(&folder).unwrap();
        assert!(!tree("a b").whole(version));
        fs::write(folder.join(MARK), "a b\nlibllvm22\n").unwrap();
        assert!(tree("a b").whole(version));
        assert!(!tree("a b c").whole(version));
        assert_eq!(tree("a b").newest().unwrap().as_deref(), Some(version));
        fs::create_dir_all(home.path().join("1.3-1")).unwrap();
        assert_eq!(tree("a b").newest().unwrap().as_deref(), Some(version), "the newer one is not whole");
    }
}
