//! Records as they come, written as a trace for a reader that is never waited for. The reader is a file's own thread,
//! or a stream.

use crate::telemetry::failed;
use anyhow::Context;
use harmonaize_analysis::trace::{Lost, LostKind, Record, Writer};
use std::fs::{File, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use tokio::sync::mpsc;

/// Bytes that are gathered before they go on.
const PART: usize = 64 << 10;
/// Parts that may wait for the reader.
const PARTS: usize = 64;

/// Some of a trace's bytes.
pub type Part = Vec<u8>;

/// A queue of parts.
pub fn parts() -> (mpsc::Sender<Part>, mpsc::Receiver<Part>) {
    mpsc::channel(PARTS)
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Tap {
    writer: WriterBox,
    to: mpsc::Sender<Part>,
    /// Records left out since the last that was written.
    dropped: u64,
    /// Bytes that have gone on.
    passed: u64,
}

/// A writer has no other way to show itself.
struct WriterBox(Writer);

impl std::fmt::Debug for WriterBox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Writer").field(&self.0.bytes().len()).finish()
    }
}

impl Tap {
    pub(crate) fn new(to: mpsc::Sender<Part>) -> Self {
        let mut writer = Writer::new();
        writer.begin();
        Self { writer: WriterBox(writer), to, dropped: 0, passed: 0 }
    }

    /// Writes a record, or leaves it out while the reader does not keep up. Returns how many were left out.
    pub(crate) fn write(&mut self, record: &Record) -> u64 {
        if self.writer.0.bytes().len() >= PART && !self.pass() {
            self.dropped += 1;
            return 1;
        }
        let writer = &mut self.writer.0;
        if self.dropped > 0 {
            let count = std::mem::take(&mut self.dropped);
            writer.write(&Record::Lost(Lost { time_ns: record.time().0, kind: LostKind::Records, count }));
        }
        writer.write(record);
        0
    }

    /// Lets go what was gathered. False once nobody reads any more.
    pub(crate) fn flush(&mut self) -> bool {
        self.empty();
        !self.to.is_closed()
    }

    /// The same; whether nothing is left.
    fn empty(&mut self) -> bool {
        self.writer.0.bytes().is_empty() || self.pass()
    }

    fn pass(&mut self) -> bool {
        let Ok(place) = self.to.try_reserve() else { return false };
        let writer = &mut self.writer.0;
        place.send(writer.bytes().to_vec());
        self.passed += writer.bytes().len() as u64;
        writer.clear();
        true
    }
}

/// A file that a trace is written to, by a thread of its own, and the one before it. Both together are bounded.
#[derive(Debug)]
pub(crate) struct Recording {
    path: PathBuf,
    /// Of both files.
    bytes: u64,
    pub(crate) tap: Tap,
    thread: JoinHandle<std::io::Result<()>>,
}

impl Recording {
    /// Makes the file, which the agent's own user alone may read. One that is there, of the agent before, is kept under its name with `.1`
    /// behind it, in place of the one before.
    pub(crate) fn begin(path: &Path, bytes: u64) -> anyhow::Result<Self> {
        if std::fs::metadata(path).is_ok_and(|known| known.is_file() && known.len() > 0) {
            keep(path)?;
        }
        let open = || {
            let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
            if file.metadata()?.is_file() {
                // It may have been there, empty, with others.
                file.set_permissions(Permissions::from_mode(0o600))?;
            }
            Ok::<_, std::io::Error>(file)
        };
        let file = open().with_context(|| format!("cannot write to {}", path.display()))?;
        let (to, from) = parts();
        let thread = std::thread::Builder::new()
            .name("record".into())
            .spawn(move || copy(from, file))
            .context("cannot start a thread")?;
        Ok(Self { path: path.to_owned(), bytes, tap: Tap::new(to), thread })
    }

    /// Whether the file has its half of what both may have, and nothing waits to go into it.
    pub(crate) fn is_full(&mut self) -> bool {
        self.tap.passed >= self.bytes / 2 && self.tap.empty()
    }

    /// Goes on in a new file, which begins a trace of its own. The thread of the one before ends by itself.
    pub(crate) fn renew(self) -> anyhow::Result<Self> {
        // It may be empty so far: then it is what that thread still writes to.
        if std::fs::metadata(&self.path).is_ok_and(|known| known.is_file()) {
            keep(&self.path)?;
        }
        Self::begin(&self.path, self.bytes)
    }

    /// Waits until everything is in the file.
    pub(crate) fn end(self) {
        let Self { path, tap, thread, .. } = self;
        let Tap { writer, to, .. } = tap;
        // The thread has ended only after an error, which it returns.
        let _ = to.blocking_send(writer.0.into_bytes());
        drop(to);
        match thread.join() {
            Ok(Ok(())) => tracing::info!(file = %path.display(), "the trace is whole"),
            Ok(Err(error)) => failed("writing the trace", &error),
            Err(_) => {
                tracing::error!(file = %path.display(), "the thread that writes the trace has panicked")
            }
        }
    }
}

/// Gives a file its other name.
fn keep(path: &Path) -> anyhow::Result<()> {
    let mut kept = path.as_os_str().to_owned();
    kept.push(".1");
    std::fs::rename(path, &kept).with_context(|| format!("cannot keep {}", path.display()))
}

fn copy(mut from: mpsc::Receiver<Part>, mut file: File) -> std::io::Result<()> {
    while let Some(part) = from.blocking_recv() {
        file.write_all(&part)?;
    }
    file.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use harmonaize_analysis::trace::replay;
    use harmonaize_events::Event;
    use std::time::{Duration, Instant};

    fn event(time_ns: u64) -> Record {
        Record::Event(Event {
            time_ns,
            total: time_ns.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            ..Event::default()
        })
    }

    #[test]
    fn a_reader_that_sleeps_loses_records_which_the_trace_says() {
        let (to, mut from) = parts();
        let mut tap = Tap::new(to);
        let mut written = 0;
        while tap.write(&event(written)) == 0 {
            written += 1;
        }
        assert_eq!((1..100).map(|more| tap.write(&event(written + more))).sum::<u64>(), 99);
        assert!(tap.flush());
        let mut bytes = from.try_recv().unwrap();
        assert_eq!(tap.write(&event(written + 100)), 0);
        while let Ok(part) = from.try_recv() {
            bytes.extend(part);
        }
        assert!(tap.flush());
        bytes.extend(from.try_recv().unwrap());
        let mut read = Vec::new();
        replay(&bytes, |record| read.push(*record)).unwrap();
        assert_eq!(read.len() as u64, written + 2);
        let lost = Lost { time_ns: written + 100, kind: LostKind::Records, count: 100 };
        assert_eq!(read[written as usize..], [Record::Lost(lost), event(written + 100)]);
        drop(from);
        assert!(!tap.flush());
    }

    #[test]
    fn a_restart_keeps_the_trace_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.trace");
        for time in 1..=3 {
            let mut recording = Recording::begin(&path, u64::MAX).unwrap();
            assert_eq!(recording.tap.write(&event(time)), 0);
            recording.end();
        }
        let times = |name: &str| {
            let mut times = Vec::new();
            let bytes = std::fs::read(folder.path().join(name)).unwrap();
            replay(&bytes, |record| times.push(record.time().0)).unwrap();
            times
        };
        assert_eq!((times("run.trace"), times("run.trace.1")), (vec![3], vec![2]));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
        // What is no file stays.
        drop(Recording::begin(Path::new("/dev/null"), 1).unwrap());
        assert!(!Path::new("/dev/null.1").exists());
    }

    #[test]
    fn a_recording_is_bounded_and_its_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        // Empty, and anybody's to read.
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let bound = 4 * PART as u64;
        let (mut recording, mut files) = (Recording::begin(&path, bound).unwrap(), 1);
        for time in 0..100_000 {
            while recording.tap.write(&event(time)) > 0 {
                std::thread::yield_now();
            }
            if recording.is_full() {
                (recording, files) = (recording.renew().unwrap(), files + 1);
            }
        }
        recording.end();
        assert!(files > 4, "{files}");
        let mut last = 100_000;
        for name in ["trace", "trace.1"] {
            let file = folder.path().join(name);
            // The thread of the one before ends by itself.
            let deadline = Instant::now() + Duration::from_secs(20);
            let times = loop {
                let mut times = Vec::new();
                let whole = replay(&std::fs::read(&file).unwrap(), |record| times.push(record.time().0));
                if whole.is_ok() && times.last() == Some(&(last - 1)) {
                    break times;
                }
                assert!(
                    Instant::now() < deadline,
                    "{name} ends at {:?}, the next begins at {last}",
                    times.last()
                );
                std::thread::yield_now();
            };
            let found = std::fs::metadata(&file).unwrap();
            assert_eq!(found.permissions().mode() & 0o777, 0o600, "{name}");
            // One part may be on its way when it is full.
            assert!(found.len() <= bound / 2 + 2 * PART as u64, "{name}: {}", found.len());
            last = times[0];
        }
    }

    #[test]
    fn a_file_holds_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let mut recording = Recording::begin(&path, u64::MAX).unwrap();
        for time in 0..5_000 {
            while recording.tap.write(&event(time)) > 0 {
                std::thread::yield_now();
            }
        }
        recording.end();
        let mut times = Vec::new();
        replay(&std::fs::read(&path).unwrap(), |record| times.push(record.time().0)).unwrap();
        // What was left out while the thread slept is told in the trace.
        times.dedup();
        assert_eq!(times, (0..5_000).collect::<Vec<_>>());
        assert!(Recording::begin(Path::new("/no/such/folder/trace"), 1).is_err());
    }
}
