//! What control must still know after a crash: records, the changes to them, and where they are kept.
//!
//! A [`Store`] takes changes in groups: all of a group or none, and durable when [`Store::write`] returns. [`Embedded`] keeps
//! them in a file (redb), [`etcd::Etcd`] where several controls find them, [`Memory`] nowhere. Agents are the truth of what runs; a plan here is only what they do not tell.
#![forbid(unsafe_code)]

mod backup;
mod change;
mod damage;
mod embedded;
pub mod etcd;
mod memory;
mod record;

pub use backup::{backup, restore};
pub use change::{Change, Stored};
pub use damage::Damage;
pub use embedded::Embedded;
pub use memory::Memory;
pub use record::{
    Agreement, Connection, Epoch, Fabric, Job, JobBid, Link, Loss, Past, PastRank, Plan, Tenant, Withdrawal,
    WithdrawalKind,
};
// For tests that break what lies under a store.
pub use redb::StorageBackend;

use std::path::PathBuf;

/// Where records are kept.
pub trait Store: Send {
    /// Everything that is there.
    ///
    /// # Errors
    /// Where it cannot be read, or makes no sense.
    fn read(&self) -> Result<Stored, StoreError>;

    /// Carries out all changes, in order, or none. They are durable when it returns well.
    ///
    /// # Errors
    /// Where they cannot be written. Whether they are there after the next start is then not known.
    fn write(&mut self, changes: &[Change]) -> Result<(), StoreError>;
}

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has it open.
    #[error(
        "{path} is in use by another process{owner}: is a second control server running on it? give each a store of its own",
        path = path.display(), owner = owner.map_or_else(String::new, |pid| format!(" (pid {pid})"))
    )]
    InUse {
        /// The file.
        path: PathBuf,
        /// Who has it, where the system tells.
        owner: Option<u32>,
    },
    /// The file cannot be opened or made.
    #[error("{path}: {source}", path = path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is no store, or damaged.
    #[error("{path} is no store, or damaged: {why}; restore a copy, or move it away to start with nothing", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found.
        why: Damage,
    },
    /// A newer control has written it.
    #[error(
        "{path} has format {found}, this control knows up to {supported}: start the control that wrote it, or a newer one",
        path = path.display()
    )]
    Format {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The newest that is known here.
        supported: u32,
    },
    /// Another control leads now.
    #[error("another control leads by now: nothing was written")]
    Superseded,
    /// It cannot be read or written now.
    #[error("{path}: {why}", path = path.display())]
    Failed {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
}
