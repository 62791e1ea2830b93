//! The table on tenants that control may add: where they come in, and the most that each may have.

use super::error::ValueError;
use super::quota::table_with_quota;
use crate::session::Quota;
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

table_with_quota! {
    struct FileControlTenants {
        sockets: PathBuf,
        #[serde(default = "most_tenants")]
        tenants: usize,
        #[serde(default = "least_uid")]
        least_uid: u32,
    }
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
    pub(super) fn check(self, folder: &Path) -> Result<ControlTenants, ValueError> {
        if self.least_uid == 0 {
            return Err(ValueError::LeastUid);
        }
        let quota = self.quota().map_err(ValueError::ControlTenantsQuota)?;
        Ok(ControlTenants {
            sockets: folder.join(self.sockets),
            tenants: self.tenants,
            least_uid: self.least_uid,
            quota,
        })
    }
}
