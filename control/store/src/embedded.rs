//! A store in a file (redb).

use crate::record::{Job, Tenant, Withdrawal, WithdrawalKind};
use crate::{Change, Damage, Store, StoreError, Stored};
use harmonaize_abi::CommunicatorId;
use prost::Message;
use redb::backends::FileBackend;
use redb::{
    Builder, Database, DatabaseError, ReadOnlyTable, ReadableDatabase, ReadableTable, StorageBackend,
    TableDefinition,
};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// How records lie in the file.
const FORMAT: u32 = 1;

/// Memory that pages of the file are kept in.
const CACHE_BYTES: usize = 16 << 20;

const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
const TENANTS: TableDefinition<&str, &[u8]> = TableDefinition::new("tenants");
const WITHDRAWALS: TableDefinition<(&str, i32), &[u8]> = TableDefinition::new("withdrawals");
const PLANS: TableDefinition<u64, &[u8]> = TableDefinition::new("plans");
// Files of before agreements, and of before communicators that failed and jobs were kept, have no such tables until the first change is
// written.
const AGREEMENTS: TableDefinition<u64, &[u8]> = TableDefinition::new("agreements");
const PASTS: TableDefinition<u64, &[u8]> = TableDefinition::new("pasts");
const JOBS: TableDefinition<(&str, &str), &[u8]> = TableDefinition::new("jobs");

/// Keeps records in a file that one process has open at a time. A crash at any point, of the process or of the machine, leaves
/// the groups that were written and perhaps the one that was being written.
#[derive(Debug)]
pub struct Embedded {
    database: Database,
    path: PathBuf,
}

impl Embedded {
    /// Opens the file, or makes it (mode 0600).
    ///
    /// # Errors
    /// Where another process has it, it cannot be had, is damaged, or was written by a newer control.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let cannot = |source| StoreError::Open { path: path.to_owned(), source };
        if !path.try_exists().map_err(cannot)? {
            make(path)?;
        }
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(cannot)?;
        let status = file.metadata().map_err(cannot)?;
        if !status.is_file() {
            return Err(cannot(std::io::Error::other("not a regular file")));
        }
        let unusable = |error| unusable(path, (status.dev(), status.ino()), error);
        let backend = FileBackend::new(file).map_err(unusable)?;
        Self::prepare(builder().create_with_backend(backend).map_err(unusable)?, path)
    }

    /// Opens what lies on `backend` instead of a file; `name` stands for it in errors. An empty one becomes a store; a crash
    /// meanwhile may leave what cannot be opened.
    ///
    /// # Errors
    /// As [`Embedded::open`].
    pub fn on(backend: impl StorageBackend, name: &Path) -> Result<Self, StoreError> {
        let opened = builder().create_with_backend(backend);
        let database = opened.map_err(|error| unusable(name, (0, 0), error))?;
        Self::prepare(database, name)
    }

    /// Makes the tables, and looks at the format.
    fn prepare(database: Database, path: &Path) -> Result<Self, StoreError> {
        let store = Self { database, path: path.to_owned() };
        let found = store.format().map_err(|error| store.failed(error))?;
        match found {
            Some(FORMAT) => {}
            Some(found) if found > FORMAT => {
                return Err(StoreError::Format { path: store.path, found, supported: FORMAT });
            }
            Some(found) => return Err(store.damaged(Damage::Format(found))),
            None => store.begin().map_err(|error| store.failed(error))?,
        }
        Ok(store)
    }

    /// The format, or none in a file without tables.
    fn format(&self) -> Result<Option<u32>, redb::Error> {
        let read = self.database.begin_read()?;
        let table = match read.open_table(META) {
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            table => table?,
        };
        let format = table.get("format")?;
        Ok(Some(format.and_then(|bytes| number(bytes.value())).unwrap_or(0)))
    }

    fn begin(&self) -> Result<(), redb::Error> {
        let write = self.database.begin_write()?;
        write.open_table(META)?.insert("format", FORMAT.to_le_bytes().as_slice())?;
        write.open_table(TENANTS)?;
        write.open_table(WITHDRAWALS)?;
        write.open_table(PLANS)?;
        write.commit()?;
        Ok(())
    }

    fn failed(&self, error: impl std::fmt::Display) -> StoreError {
        StoreError::Failed { path: self.path.clone(), why: error.to_string() }
    }

    fn damaged(&self, why: Damage) -> StoreError {
        StoreError::Damaged { path: self.path.clone(), why }
    }

    fn try_read(&self) -> Result<Result<Stored, Damage>, redb::Error> {
        let read = self.database.begin_read()?;
        let mut stored = Stored::default();
        let meta = read.open_table(META)?;
        stored.boot = meta.get("boot")?.and_then(|bytes| number(bytes.value()));
        if let Some(bytes) = meta.get("fabric")? {
            let Ok(fabric) = Message::decode(bytes.value()) else { return Ok(Err(Damage::Fabric)) };
            stored.fabric = Some(fabric);
        }
        for entry in read.open_table(TENANTS)?.iter()? {
            let (name, bytes) = entry?;
            let Ok(tenant) = Tenant::decode(bytes.value()) else {
                return Ok(Err(Damage::Tenant(name.value().to_owned())));
            };
            stored.tenants.insert(name.value().to_owned(), tenant);
        }
        for entry in read.open_table(WITHDRAWALS)?.iter()? {
            let (key, bytes) = entry?;
            let (target, kind) = key.value();
            let record = Withdrawal::decode(bytes.value()).ok();
            let Some((kind, record)) = WithdrawalKind::try_from(kind).ok().zip(record) else {
                return Ok(Err(Damage::Withdrawal(target.to_owned())));
            };
            stored.withdrawals.insert((target.to_owned(), kind), record);
        }
        if let Some(jobs) = later(read.open_table(JOBS))? {
            for entry in jobs.iter()? {
                let (key, bytes) = entry?;
                let (tenant, name) = key.value();
                let Ok(job) = Job::decode(bytes.value()) else {
                    let (tenant, name) = (tenant.to_owned(), name.to_owned());
                    return Ok(Err(Damage::Job { tenant, name }));
                };
                stored.jobs.insert((tenant.to_owned(), name.to_owned()), job);
            }
        }
        let plans = records(Some(read.open_table(PLANS)?), Damage::Plan)?;
        let agreements = records(later(read.open_table(AGREEMENTS))?, Damage::Agreement)?;
        let pasts = records(later(read.open_table(PASTS))?, Damage::Past)?;
        let fill = || {
            (stored.plans, stored.agreements, stored.pasts) = (plans?, agreements?, pasts?);
            Ok(stored)
        };
        Ok(fill())
    }

    fn try_write(&self, changes: &[Change]) -> Result<(), redb::Error> {
        // Durable when `commit` returns: redb's default.
        let write = self.database.begin_write()?;
        {
            let mut meta = write.open_table(META)?;
            let mut tenants = write.open_table(TENANTS)?;
            let mut withdrawals = write.open_table(WITHDRAWALS)?;
            let mut plans = write.open_table(PLANS)?;
            let mut agreements = write.open_table(AGREEMENTS)?;
            let mut pasts = write.open_table(PASTS)?;
            let mut jobs = write.open_table(JOBS)?;
            for change in changes {
                match change {
                    Change::Boot(boot) => drop(meta.insert("boot", boot.to_le_bytes().as_slice())?),
                    Change::Fabric(fabric) => {
                        meta.insert("fabric", fabric.encode_to_vec().as_slice())?;
                    }
                    Change::Tenant(tenant) => {
                        tenants.insert(tenant.name.as_str(), tenant.encode_to_vec().as_slice())?;
                    }
                    Change::NoTenant(name) => drop(tenants.remove(name.as_str())?),
                    Change::Withdraw(record) => {
                        let key = (record.target.as_str(), record.kind() as i32);
                        withdrawals.insert(key, record.encode_to_vec().as_slice())?;
                    }
                    Change::Restore(target, kind) => {
                        withdrawals.remove((target.as_str(), *kind as i32))?;
                    }
                    Change::Plan(plan) => {
                        plans.insert(plan.communicator, plan.encode_to_vec().as_slice())?;
                    }
                    Change::NoPlan(communicator) => drop(plans.remove(communicator.0)?),
                    Change::Agreement(record) => {
                        agreements.insert(record.communicator, record.encode_to_vec().as_slice())?;
                    }
                    Change::NoAgreement(communicator) => drop(agreements.remove(communicator.0)?),
                    Change::Past(record) => {
                        pasts.insert(record.communicator, record.encode_to_vec().as_slice())?;
                    }
                    Change::NoPast(communicator) => drop(pasts.remove(communicator.0)?),
                    Change::Job(record) => {
                        let key = (record.tenant.as_str(), record.name.as_str());
                        jobs.insert(key, record.encode_to_vec().as_slice())?;
                    }
                    Change::NoJob(tenant, name) => drop(jobs.remove((tenant.as_str(), name.as_str()))?),
                }
            }
        }
        write.commit()?;
        Ok(())
    }
}

impl Store for Embedded {
    fn read(&self) -> Result<Stored, StoreError> {
        let stored = self.try_read().map_err(|error| self.failed(error))?;
        stored.map_err(|why| self.damaged(why))
    }

    fn write(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        self.try_write(changes).map_err(|error| self.failed(error))
    }
}

/// Makes an empty store under another name and gives it its own once all of it is written. A crash leaves none or a whole one,
/// and of two processes at once one makes it.
fn make(path: &Path) -> Result<(), StoreError> {
    let cannot = |source| StoreError::Open { path: path.to_owned(), source };
    let (parent, name) = (path.parent(), path.file_name());
    let folder = parent.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = name.ok_or_else(|| cannot(std::io::Error::other("not the name of a file")))?;
    let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let unique = format!(".{}.{}-{clock}", name.to_string_lossy(), std::process::id());
    let fresh = folder.join(unique);
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&fresh);
    let made = FileBackend::new(file.map_err(cannot)?)
        .and_then(|backend| builder().create_with_backend(backend))
        .map_err(|error| unusable(path, (0, 0), error))
        .and_then(|database| Embedded::prepare(database, path))
        .map(drop)
        .and_then(|()| match std::fs::hard_link(&fresh, path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(cannot(error)),
            _ => Ok(()),
        });
    let removed = std::fs::remove_file(&fresh).map_err(cannot);
    made.and(removed)?;
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(cannot)
}

/// A table that earlier formats of the file do not have, if it is there.
fn later<T>(table: Result<T, redb::TableError>) -> Result<Option<T>, redb::TableError> {
    match table {
        Err(redb::TableError::TableDoesNotExist(_)) => Ok(None),
        table => table.map(Some),
    }
}

/// Returns a table's records by communicator; or the one that cannot be read.
fn records<T: Message + Default>(
    table: Option<ReadOnlyTable<u64, &[u8]>>,
    damage: fn(CommunicatorId) -> Damage,
) -> Result<Result<BTreeMap<CommunicatorId, T>, Damage>, redb::Error> {
    let mut records = BTreeMap::new();
    let Some(table) = table else { return Ok(Ok(records)) };
    for entry in table.iter()? {
        let (communicator, bytes) = entry?;
        let communicator = CommunicatorId(communicator.value());
        let Ok(record) = T::decode(bytes.value()) else { return Ok(Err(damage(communicator))) };
        records.insert(communicator, record);
    }
    Ok(Ok(records))
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
    builder
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_le_bytes)
}

/// What redb's refusal means to people.
fn unusable(path: &Path, file: (u64, u64), error: DatabaseError) -> StoreError {
    let path = path.to_owned();
    match error {
        DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => {
            StoreError::InUse { path, owner: owner(file) }
        }
        DatabaseError::Storage(redb::StorageError::Io(source))
            if source.kind() != std::io::ErrorKind::InvalidData =>
        {
            StoreError::Open { path, source }
        }
        error => StoreError::Damaged { path, why: Damage::Database(error) },
    }
}

/// The process that locks a file, by `/proc/locks`. That file has lines such as
/// `1: FLOCK  ADVISORY  WRITE 4242 00:1f:1234 0 EOF`.
fn owner((device, inode): (u64, u64)) -> Option<u32> {
    let file = format!("{:02x}:{:02x}:{inode}", device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xf_ff00);
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let line = locks.lines().map(words).find(|words| words.contains(&file))?;
    let at = line.iter().position(|word| *word == file)?;
    line.get(at.checked_sub(1)?)?.parse().ok().filter(|pid| *pid > 0)
}
