//! A store that is gone with its process.

use crate::{Change, Store, StoreError, Stored};

/// Keeps records as long as it lives.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    stored: Stored,
}

impl Memory {
    /// With nothing in it.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Store for Memory {
    fn read(&self) -> Result<Stored, StoreError> {
        Ok(self.stored.clone())
    }

    fn write(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        changes.iter().for_each(|change| self.stored.apply(change));
        Ok(())
    }
}
