//! The tables on tenants: where each comes in, and what it proves itself with.

use super::Rdma;
use super::quota::table_with_quota;
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

/// Checks the tables and reads the secrets, whose paths are relative to `folder`.
pub(super) fn read_all(
    tenants: Vec<FileTenant>,
    rdma: Option<&Rdma>,
    folder: &Path,
) -> Result<Vec<TenantRules>, String> {
    for (index, tenant) in tenants.iter().enumerate() {
        let twice = |other: &FileTenant| {
            other.name == tenant.name || (other.socket.is_some() && other.socket == tenant.socket)
        };
        if tenants.iter().take(index).any(twice) {
            return Err(format!("tenant `{}`: name or socket is there twice", tenant.name));
        }
    }
    tenants.into_iter().map(|tenant| tenant.rules(rdma, folder)).collect()
}

impl FileTenant {
    /// The file with its secret, if it has one.
    pub(super) fn secret_file(&self, folder: &Path) -> Option<PathBuf> {
        self.secret.as_ref().map(|file| folder.join(file))
    }

    fn rules(self, rdma: Option<&Rdma>, folder: &Path) -> Result<TenantRules, String> {
        let name = self.name.clone();
        let wrong = |what: &str| Err(format!("tenant `{name}`: {what}"));
        if !is_tenant_name(&self.name) {
            return wrong("not a usable name: 1 to 63 visible ASCII characters, no slash");
        }
        let quota = self.quota().map_err(|why| format!("tenant `{name}`: {why}"))?;
        if self.rdma && rdma.is_none() {
            return wrong("`rdma` is true, but there is no table [rdma]");
        }
        let socket = match (&self.socket, self.uids.is_empty()) {
            (Some(_), true) => return wrong("`uids` is empty, nobody could attach"),
            (None, false) => return wrong("`uids` without `socket`"),
            (Some(path), false) => Some(SocketRules { path: path.clone(), uids: self.uids.clone() }),
            (None, true) => None,
        };
        let secret = match (&self.secret, self.addresses.is_empty()) {
            (Some(_), true) => {
                return wrong("`secret` without `addresses`, from which processes may come over TCP");
            }
            (_, false) if !self.rdma => {
                return wrong("`addresses` without `rdma = true`: they are those of RDMA devices");
            }
            (None, false) if socket.is_none() => {
                return wrong("`addresses` without `secret`, the file that those processes prove to know");
            }
            (None, _) => None,
            (Some(_), false) if rdma.is_none_or(|rdma| rdma.listen.is_none()) => {
                return wrong("`addresses` without `listen` in [rdma], where those processes would connect");
            }
            (Some(file), false) => {
                let path = folder.join(file);
                let secret = read_secret(&path)
                    .map_err(|why| format!("tenant `{}`: `secret`, {}: {why}", self.name, path.display()))?;
                Some(secret)
            }
        };
        if socket.is_none() && secret.is_none() {
            return wrong("neither `socket` nor `addresses`, nobody could attach");
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
fn read_secret(path: &Path) -> Result<Secret, String> {
    // Something else than a file, such as a pipe, must not hold the agent up.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = file.map_err(|error| error.to_string())?;
    let found = file.metadata().map_err(|error| error.to_string())?;
    if !found.is_file() {
        return Err("no file".into());
    }
    let mode = found.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!("its mode {mode:03o} lets others at it; `chmod 600` it"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_SECRET + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MAX_SECRET {
        return Err(format!("more than {MAX_SECRET} bytes"));
    }
    Secret::new(&bytes).ok_or_else(|| {
        format!("fewer than {MIN_SECRET} bytes; make one with `head -c 32 /dev/urandom | base64`")
    })
}
