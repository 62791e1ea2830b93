//! A disk that crashes: what was not synced survives in part, sector by sector, in any order.

use harmonaize_store::StorageBackend;
use rand::{Rng, RngExt};
use rand_chacha::ChaCha20Rng;
use std::io::Error;
use std::sync::{Arc, Mutex, MutexGuard};

/// What a disk writes as a whole.
const SECTOR: usize = 512;

/// A disk that is shared with who crashes it.
#[derive(Clone, Debug)]
pub(crate) struct Disk(Arc<Mutex<Inside>>);

#[derive(Debug)]
struct Inside {
    /// What reads see.
    seen: Vec<u8>,
    /// What the last sync left.
    synced: Vec<u8>,
    /// Since then.
    unsynced: Vec<Operation>,
    /// Operations until the crash.
    operations_until_crash: Option<u64>,
    /// Whether syncs only seem to happen.
    drops_syncs: bool,
}

#[derive(Debug)]
enum Operation {
    Write(usize, Vec<u8>),
    Length(usize),
}

impl Disk {
    /// With these bytes on it.
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        let inside = Inside {
            synced: bytes.clone(),
            seen: bytes,
            unsynced: Vec::new(),
            operations_until_crash: None,
            drops_syncs: false,
        };
        Self(Arc::new(Mutex::new(inside)))
    }

    /// Crashes in the midst of the operation so many from now: it and all later ones fail.
    pub(crate) fn crash_after(&self, operations: u64) {
        self.0.lock().unwrap().operations_until_crash = Some(operations);
    }

    /// Empty; says that it has synced, and has not.
    pub(crate) fn dropping_syncs() -> Self {
        let disk = Self::new(Vec::new());
        disk.0.lock().unwrap().drops_syncs = true;
        disk
    }

    /// What is on it when the machine starts again.
    pub(crate) fn survives(&self, random: &mut ChaCha20Rng) -> Vec<u8> {
        let inside = self.0.lock().unwrap();
        let mut bytes = inside.synced.clone();
        // Some crashes keep all, some nothing, most a part.
        let keep: f64 = [0.0, 0.1, 0.5, 0.9, 1.0][random.random_range(0..5)];
        for operation in &inside.unsynced {
            match operation {
                Operation::Length(length) if random.random_bool(keep) => bytes.resize(*length, 0),
                Operation::Length(_) => {}
                Operation::Write(at, data) => {
                    // Whole, or torn.
                    let whole = random.next_u32().is_multiple_of(2);
                    let all = random.random_bool(keep);
                    let mut from = 0;
                    while from < data.len() {
                        let to = ((at + from) / SECTOR * SECTOR + SECTOR - at).min(data.len());
                        if if whole { all } else { random.random_bool(keep) } {
                            if bytes.len() < at + to {
                                bytes.resize(at + to, 0);
                            }
                            bytes[at + from..at + to].copy_from_slice(&data[from..to]);
                        }
                        from = to;
                    }
                }
            }
        }
        bytes
    }

    /// Ready for one more operation that changes it.
    fn change(&self) -> Result<MutexGuard<'_, Inside>, Error> {
        let mut inside = self.live()?;
        if let Some(left) = &mut inside.operations_until_crash {
            *left = left.saturating_sub(1);
        }
        Ok(inside)
    }

    fn live(&self) -> Result<MutexGuard<'_, Inside>, Error> {
        let inside = self.0.lock().unwrap();
        if inside.operations_until_crash == Some(0) {
            Err(Error::other("the machine has crashed"))
        } else {
            Ok(inside)
        }
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> Result<u64, Error> {
        Ok(self.live()?.seen.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let (inside, at) = (self.live()?, offset as usize);
        let bytes = inside.seen.get(at..at + out.len());
        out.copy_from_slice(bytes.ok_or_else(|| Error::other("beyond the end"))?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<(), Error> {
        let mut inside = self.change()?;
        inside.seen.resize(len as usize, 0);
        inside.unsynced.push(Operation::Length(len as usize));
        Ok(())
    }

    fn sync_data(&self) -> Result<(), Error> {
        let mut inside = self.change()?;
        // A crash within a sync has synced nothing for sure.
        if inside.operations_until_crash == Some(0) {
            return Err(Error::other("the machine has crashed"));
        }
        if !inside.drops_syncs {
            inside.synced = inside.seen.clone();
            inside.unsynced.clear();
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        let (mut inside, at) = (self.change()?, offset as usize);
        let end = at + data.len();
        if inside.seen.len() < end {
            inside.seen.resize(end, 0);
        }
        inside.seen[at..end].copy_from_slice(data);
        inside.unsynced.push(Operation::Write(at, data.to_vec()));
        Ok(())
    }
}
