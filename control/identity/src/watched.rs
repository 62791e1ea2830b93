//! Files that may change while what they say is in use.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// What tells a file from what it was before: when it was changed last, which it is, and its length.
pub(crate) type Stamp = Option<(SystemTime, u64, u64)>;

/// A file's stamp now; none where there is no such file.
pub(crate) fn stamp(path: &Path) -> Stamp {
    let file = std::fs::metadata(path).ok()?;
    Some((file.modified().ok()?, file.ino(), file.len()))
}

/// Files that are looked at now and then.
#[derive(Debug)]
pub struct Watched {
    files: Vec<PathBuf>,
    /// As they were when they were read.
    read: Vec<Stamp>,
    /// As they were at the last look.
    seen: Vec<Stamp>,
}

impl Watched {
    /// Files that are about to be read.
    pub fn new(files: Vec<PathBuf>) -> Self {
        let read: Vec<Stamp> = files.iter().map(|file| stamp(file)).collect();
        Self { files, seen: read.clone(), read }
    }

    /// Watches these files from now on, which have just been read. What is known of files that stay is kept.
    pub fn watch(&mut self, files: Vec<PathBuf>) {
        let known = |file: &PathBuf, stamps: &[Stamp]| {
            let at = self.files.iter().position(|known| known == file);
            at.map_or_else(|| stamp(file), |at| stamps.get(at).copied().flatten())
        };
        let read = files.iter().map(|file| known(file, &self.read)).collect();
        let seen = files.iter().map(|file| known(file, &self.seen)).collect();
        (self.files, self.read, self.seen) = (files, read, seen);
    }

    /// Whether they are to be read again. They have changed since, and not since the last poll, so that whoever writes them
    /// has most likely finished. True once for each change.
    pub fn changed(&mut self) -> bool {
        let now: Vec<Stamp> = self.files.iter().map(|file| stamp(file)).collect();
        let settled = now == self.seen;
        let changed = settled && now != self.read;
        if changed {
            self.read.clone_from(&now);
        }
        self.seen = now;
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_told_once_and_when_it_has_settled() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "a").unwrap();
        let mut watched = Watched::new(vec![file.clone(), folder.path().join("none")]);
        assert!(!watched.changed());
        std::fs::write(&file, "ab").unwrap();
        assert!(!watched.changed(), "someone may be writing still");
        std::fs::write(&file, "abc").unwrap();
        assert!(!watched.changed(), "and was");
        assert_eq!([watched.changed(), watched.changed()], [true, false]);
        std::fs::remove_file(&file).unwrap();
        assert_eq!([watched.changed(), watched.changed(), watched.changed()], [false, true, false]);
    }
}
