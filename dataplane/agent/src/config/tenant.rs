//! The tables on tenants: where each comes in, and what it proves itself with.

use super::Rdma;
use super::quota::{QuotaError, table_with_quota};
use crate::session::{SocketRules, TenantRules};
use harmonaize_abi::session::{MIN_SECRET, Secret};
use harmonaize_api::is_tenant_name;
use rustix::fs::OFlags;
use std::io::Read;
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a process may take to say hello, or to prove whose it is.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// Most bytes of a secret's file.
const MAX_SECRET: u64 = 64 << 10;

/// What makes no sense in a tenant's table.
#[derive(Debug, thiserror::Error)]
pub enum TenantError {
    /// Another table has its name or its socket.
    #[error("name or socket is there twice")]
    Twice,
    /// No tenant can have the name.
    #[error("not a usable name: 1 to 63 visible ASCII characters, no slash")]
    Name,
    /// What it may have.
    #[error(transparent)]
    Quota(#[from] QuotaError),
    /// It would attach over RDMA, which this host does not offer.
    #[error("`rdma` is true, but there is no table [rdma]")]
    NoRdma,
    /// No user may attach at its socket.
    #[error("`uids` is empty, nobody could attach")]
    NoUids,
    /// Users may attach, but nowhere.
    #[error("`uids` without `socket`")]
    UidsWithoutSocket,
    /// Nobody may prove to know its secret.
    #[error("`secret` without `addresses`, from which processes may come over TCP")]
    SecretWithoutAddresses,
    /// Addresses of devices that it does not use.
    #[error("`addresses` without `rdma = true`: they are those of RDMA devices")]
    AddressesWithoutRdma,
    /// Processes on other machines would have nothing to prove.
    #[error("`addresses` without `secret`, the file that those processes prove to know")]
    AddressesWithoutSecret,
    /// Processes on other machines would have nowhere to connect.
    #[error("`addresses` without `listen` in [rdma], where those processes would connect")]
    AddressesWithoutListen,
    /// The file with its secret.
    #[error("`secret`, {}: {error}", path.display())]
    Secret {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        error: SecretError,
    },
    /// No process could attach.
    #[error("neither `socket` nor `addresses`, nobody could attach")]
    NowhereToAttach,
}

/// What is wrong with the file of a secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// Something else is there.
    #[error("no file")]
    NoFile,
    /// Others can read or write it.
    #[error("its mode {0:03o} lets others at it; `chmod 600` it")]
    Mode(u32),
    /// Too many bytes.
    #[error("more than {MAX_SECRET} bytes")]
    TooLong,
    /// Too few bytes.
    #[error("fewer than {MIN_SECRET} bytes; make one with `head -c 32 /dev/urandom | base64`")]
    TooShort,
}

table_with_quota! {
    struct FileTenant {
        name: String,
        socket: Option<PathBuf>,
        #[serde(default)]
        uids: Vec<u32>,
        #[serde(default)]
        remote: bool,
        #[serde(default)]
        rdma: bool,
        secret: Option<PathBuf>,
        #[serde(default)]
        addresses: Vec<IpAddr>,
    }
}

/// Checks the tables and reads the secrets, whose paths are relative to `folder`. An error has the tenant's name beside it.
pub(super) fn read_all(
    tenants: Vec<FileTenant>,
    rdma: Option<&Rdma>,
    folder: &Path,
) -> Result<Vec<TenantRules>, (String, TenantError)> {
    for (index, tenant) in tenants.iter().enumerate() {
        let twice = |other: &FileTenant| {
            other.name == tenant.name || (other.socket.is_some() && other.socket == tenant.socket)
        };
        if tenants.iter().take(index).any(twice) {
            return Err((tenant.name.clone(), TenantError::Twice));
        }
    }
    let rules = |tenant: FileTenant| {
        let name = tenant.name.clone();
        tenant.rules(rdma, folder).map_err(|error| (name, error))
    };
    tenants.into_iter().map(rules).collect()
}

impl FileTenant {
    /// The file with its secret, if it has one.
    pub(super) fn secret_file(&self, folder: &Path) -> Option<PathBuf> {
        self.secret.as_ref().map(|file| folder.join(file))
    }

    fn rules(self, rdma: Option<&Rdma>, folder: &Path) -> Result<TenantRules, TenantError> {
        if !is_tenant_name(&self.name) {
            return Err(TenantError::Name);
        }
        let quota = self.quota()?;
        if self.rdma && rdma.is_none() {
            return Err(TenantError::NoRdma);
        }
        let socket = match (&self.socket, self.uids.is_empty()) {
            (Some(_), true) => return Err(TenantError::NoUids),
            (None, false) => return Err(TenantError::UidsWithoutSocket),
            (Some(path), false) => Some(SocketRules { path: path.clone(), uids: self.uids.clone() }),
            (None, true) => None,
        };
        let secret = match (&self.secret, self.addresses.is_empty()) {
            (Some(_), true) => return Err(TenantError::SecretWithoutAddresses),
            (_, false) if !self.rdma => return Err(TenantError::AddressesWithoutRdma),
            (None, false) if socket.is_none() => return Err(TenantError::AddressesWithoutSecret),
            (None, _) => None,
            (Some(_), false) if rdma.is_none_or(|rdma| rdma.listen.is_none()) => {
                return Err(TenantError::AddressesWithoutListen);
            }
            (Some(file), false) => {
                let path = folder.join(file);
                Some(read_secret(&path).map_err(|error| TenantError::Secret { path, error })?)
            }
        };
        if socket.is_none() && secret.is_none() {
            return Err(TenantError::NowhereToAttach);
        }
        Ok(TenantRules {
            tenant: self.name,
            socket,
            secret,
            addresses: self.addresses.iter().map(IpAddr::to_canonical).collect(),
            quota,
            remote: self.remote,
            rdma: self.rdma,
            handshake: HANDSHAKE,
        })
    }
}

/// A secret from a file that nobody but its owner can read.
fn read_secret(path: &Path) -> Result<Secret, SecretError> {
    // Something else than a file, such as a pipe, must not hold the agent up.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(SecretError::NoFile);
    }
    let mode = found.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(SecretError::Mode(mode));
    }
    let mut bytes = Vec::new();
    file.take(MAX_SECRET + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_SECRET {
        return Err(SecretError::TooLong);
    }
    Secret::new(&bytes).ok_or(SecretError::TooShort)
}
