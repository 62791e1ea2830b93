//! A file of rows that begins anew when it is full, as logs do.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Error, ErrorKind, Read, Result, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Rows at `path`; those before at `path.1`, and so on to `path.N`, the oldest.
pub(crate) struct Rotated {
    path: PathBuf,
    max_bytes: u64,
    keep: u32,
    file: BufWriter<File>,
    bytes: u64,
}

impl Rotated {
    /// Goes on behind the rows that are there. A file has at most `max_bytes`, but one row at least; `keep` older ones stay.
    pub(crate) fn open(path: PathBuf, max_bytes: u64, keep: u32) -> Result<Self> {
        let (file, bytes) = append(&path)?;
        Ok(Self { path, max_bytes, keep, file, bytes })
    }

    /// Writes rows, each in one file.
    pub(crate) fn write(&mut self, rows: &str) -> Result<()> {
        for row in rows.split_inclusive('\n') {
            let bytes = row.len() as u64;
            if self.bytes > 0 && self.bytes.saturating_add(bytes) > self.max_bytes {
                self.rotate()?;
            }
            self.file.write_all(row.as_bytes())?;
            self.bytes += bytes;
        }
        self.file.flush()
    }

    fn rotate(&mut self) -> Result<()> {
        self.file.flush()?;
        let older = |number: u32| {
            let mut name = self.path.as_os_str().to_owned();
            if number > 0 {
                name.push(format!(".{number}"));
            }
            PathBuf::from(name)
        };
        // Whoever collects rows may have taken a file away.
        let if_there = |outcome: Result<()>| match outcome {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            outcome => outcome,
        };
        for number in (0..self.keep).rev() {
            if_there(std::fs::rename(older(number), older(number + 1)))?;
        }
        if self.keep == 0 {
            if_there(std::fs::remove_file(&self.path))?;
        }
        (self.file, self.bytes) = append(&self.path)?;
        Ok(())
    }
}

/// Opens a file that this user alone may read, behind its last row, and returns its length. A row that was cut off is ended.
fn append(path: &Path) -> Result<(BufWriter<File>, u64)> {
    let mut file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(Error::new(ErrorKind::InvalidInput, "no regular file"));
    }
    let mut last = *b"\n";
    if metadata.len() > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    let ending: &[u8] = if last == *b"\n" { b"" } else { b"\n" };
    file.write_all(ending)?;
    Ok((BufWriter::new(file), metadata.len() + ending.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_full_file_becomes_an_older_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows");
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).ok();
        let mut rows = Rotated::open(path.clone(), 25, 2).unwrap();
        rows.write("row 00000\nrow 00001\nrow 00002\n").unwrap();
        assert_eq!(read("rows.1").as_deref(), Some("row 00000\nrow 00001\n"));
        for number in 3..7 {
            rows.write(&format!("row 0000{number}\n")).unwrap();
        }
        let texts = ["rows", "rows.1", "rows.2", "rows.3"].map(|name| read(name).unwrap_or_default());
        assert_eq!(texts, ["row 00006\n", "row 00004\nrow 00005\n", "row 00002\nrow 00003\n", ""]);
        // A row that is longer than a file may be has one for itself.
        rows.write(&format!("{}\nrow 8\n", "long".repeat(9))).unwrap();
        assert_eq!((read("rows").unwrap().as_str(), read("rows.1").unwrap().len()), ("row 8\n", 37));
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn rows_go_on_behind_those_that_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows");
        std::fs::write(&path, "row 0\nrow").unwrap();
        Rotated::open(path.clone(), 16, 0).unwrap().write("row 1\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "row 0\nrow\nrow 1\n");
        Rotated::open(path.clone(), 16, 0).unwrap().write("row 2\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "row 2\n");
        assert!(!folder.path().join("rows.1").exists());
        for keep in [0, 2] {
            let mut rows = Rotated::open(path.clone(), 7, keep).unwrap();
            std::fs::remove_file(&path).unwrap();
            rows.write("row 3\n").unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "row 3\n");
        }
        assert!(Rotated::open("/dev/null".into(), 16, 0).is_err());
    }
}
