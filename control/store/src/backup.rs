//! Copies of a store, and what is made of one.

use crate::{Damage, Embedded, Store, StoreError, Stored};
use redb::StorageBackend;
use redb::backends::InMemoryBackend;
use std::io::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What stands for a copy in errors.
const NAME: &str = "the copy of the store";

/// Returns all of it as the bytes of a store's file.
///
/// # Errors
/// Where there is no memory for it.
pub fn backup(stored: Stored) -> Result<Vec<u8>, StoreError> {
    let image = Image::default();
    Embedded::on(image.clone(), Path::new(NAME))?.write(&stored.changes())?;
    image.bytes().map_err(|error| StoreError::Failed { path: NAME.into(), why: error.to_string() })
}

/// Makes the store at `path` anew of a copy. An earlier one is kept beside it, and its name returned. The number of the last start
/// becomes `boot`, which shall be random: communicators that were formed after the copy have ids that must not be given again.
///
/// # Errors
/// Where the copy is no store, a process has the store open, or a file cannot be written. Then the store is as it was.
pub fn restore(copy: &Path, path: &Path, boot: u32) -> Result<(Stored, Option<PathBuf>), StoreError> {
    let cannot = |path: &Path| {
        let path = path.to_owned();
        move |source| StoreError::Open { path, source }
    };
    let bytes = std::fs::read(copy).map_err(cannot(copy))?;
    if bytes.is_empty() {
        return Err(StoreError::Damaged { path: copy.to_owned(), why: Damage::Empty });
    }
    let image = Image::default();
    image.set_len(bytes.len() as u64).and_then(|()| image.write(0, &bytes)).map_err(cannot(copy))?;
    let mut stored = Embedded::on(image, copy)?.read()?;
    stored.boot = Some(boot);
    let beside = |suffix: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(suffix);
        PathBuf::from(name)
    };
    let fresh = beside(".restoring");
    // Of a restore that was interrupted.
    remove(&fresh)?;
    let made = Embedded::open(&fresh).and_then(|mut store| store.write(&stored.clone().changes()));
    let placed = made.and_then(|()| place(&fresh, path, &beside(".replaced")));
    if placed.is_err() {
        // What failed is told; a rest of it harms nobody.
        let _ = std::fs::remove_file(&fresh);
    }
    Ok((stored, placed?))
}

/// Gives the new store its name, and an earlier one that of `kept`.
fn place(fresh: &Path, path: &Path, kept: &Path) -> Result<Option<PathBuf>, StoreError> {
    let cannot = |source| StoreError::Open { path: path.to_owned(), source };
    let earlier = path.try_exists().map_err(cannot)?;
    // Held until the new one has the name: no control starts on what goes away.
    let _held = match earlier.then(|| Embedded::open(path)) {
        Some(Err(error @ (StoreError::InUse { .. } | StoreError::Open { .. }))) => return Err(error),
        // A damaged one is what is to be replaced.
        Some(Err(_)) | None => None,
        Some(Ok(store)) => Some(store),
    };
    if earlier {
        remove(kept)?;
        std::fs::hard_link(path, kept).map_err(cannot)?;
    }
    std::fs::rename(fresh, path).map_err(cannot)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(cannot)?;
    Ok(earlier.then(|| kept.to_owned()))
}

/// Removes a file, if it is there.
fn remove(path: &Path) -> Result<(), StoreError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(StoreError::Open { path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// A file in memory that is still there when its store is closed.
#[derive(Clone, Debug, Default)]
struct Image(Arc<InMemoryBackend>);

impl Image {
    fn bytes(&self) -> Result<Vec<u8>, Error> {
        let length = usize::try_from(self.0.len()?).map_err(Error::other)?;
        let mut bytes = vec![0; length];
        self.0.read(0, &mut bytes)?;
        Ok(bytes)
    }
}

impl StorageBackend for Image {
    fn len(&self) -> Result<u64, Error> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        self.0.read(offset, out)
    }

    fn set_len(&self, bytes: u64) -> Result<(), Error> {
        self.0.set_len(bytes)
    }

    fn sync_data(&self) -> Result<(), Error> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.0.write(offset, data)
    }
}
