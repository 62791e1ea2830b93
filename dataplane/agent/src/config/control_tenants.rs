//! The table on tenants that control may add: where they come in, and the most that each may have.

use super::tenant::with_budgets;
use crate::session::Quota;
use harmonaize_units::{Bytes, Nanos};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Within which bounds control may have tenants served here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlTenants {
    /// The folder of their sockets, which are named NAME.sock. It must exist.
    pub sockets: PathBuf,
    /// Most tenants at once.
    pub tenants: usize,
    /// The lowest user that may attach, at least 1.
    pub least_uid: u32,
    /// The most that one may have, and what it has where control does not say.
    pub quota: Quota,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileControlTenants {
    sockets: PathBuf,
    #[serde(default = "most_tenants")]
    tenants: usize,
    #[serde(default = "least_uid")]
    least_uid: u32,
    arena: Option<Bytes>,
    regions: Option<u32>,
    attachments: Option<u32>,
    communicators: Option<u32>,
    operation_timeout: Option<Nanos>,
    operations: Option<u32>,
    descriptors: Option<u32>,
    landing: Option<Bytes>,
    attaches: Option<u32>,
    joins: Option<u32>,
    log_lines: Option<u32>,
    session_percent: Option<u32>,
}

const fn most_tenants() -> usize {
    16
}

/// Users below are the system's.
const fn least_uid() -> u32 {
    1000
}

impl FileControlTenants {
    /// Checks the table; a relative path is one of `folder`'s.
    pub(super) fn check(self, folder: &Path) -> Result<ControlTenants, String> {
        if self.least_uid == 0 {
            return Err("`least_uid` of [control_tenants] is 0: no process of root attaches for a tenant of control's".into());
        }
        let budgets = [
            self.operations,
            self.descriptors,
            self.attaches,
            self.joins,
            self.log_lines,
            self.session_percent,
        ];
        let usual =
            with_budgets(Quota::default(), budgets).map_err(|why| format!("[control_tenants]: {why}"))?;
        Ok(ControlTenants {
            sockets: folder.join(self.sockets),
            tenants: self.tenants,
            least_uid: self.least_uid,
            quota: Quota {
                attachments: self.attachments.unwrap_or(usual.attachments),
                arena_bytes: self.arena.map_or(usual.arena_bytes, |bytes| bytes.0),
                landing_bytes: self.landing.map_or(usual.landing_bytes, |bytes| bytes.0),
                regions: self.regions.unwrap_or(usual.regions),
                communicators: self.communicators.unwrap_or(usual.communicators),
                operation_timeout: self.operation_timeout.map_or(usual.operation_timeout, Into::into),
                ..usual
            },
        })
    }
}
