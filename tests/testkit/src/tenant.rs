//! A tenant's process: its own user, a namespace with nothing but loopback, and of the run folder only its socket.

use crate::fabric::{Fabric, RUN};
use crate::namespace::Namespace;
use anyhow::{Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Hides the run folder, shows the tenant's folder at the same path, gives up every privilege, runs the program.
///
/// `$1` run folder, `$2` the tenant's folder, `$3` user and group, then the program and its arguments.
const CONFINE: &str = r#"
set -e
run=$1 folder=$2 user=$3
shift 3
cd "$folder"
mount -t tmpfs -o mode=711,size=64k tmpfs "$run"
mkdir -p -m 711 "$folder"
mount --no-canonicalize --bind . "$folder"
cd /
exec setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all -- "$@"
"#;

/// Where the processes of one tenant on one host run.
#[derive(Debug, Clone)]
pub struct TenantSpace {
    /// The namespace: loopback alone.
    pub namespace: Namespace,
    /// The user and group of its processes; never root.
    pub user: u32,
    /// The one folder of the fabric's run folder that they see.
    pub folder: PathBuf,
    /// Whether its processes run only where nobody else's would: what they cost others is then what others do for them.
    pub yields: bool,
}

impl TenantSpace {
    /// Makes the space; `folder` (with the agent's socket for this tenant) must be inside the fabric's run folder.
    pub fn make(fabric: &Fabric, label: &str, user: u32, folder: &Path) -> Result<Self> {
        if user == 0 {
            bail!("a tenant's processes do not run as root");
        }
        if !folder.starts_with(fabric.folder()) || folder == fabric.folder() {
            bail!("{} is not inside {}", folder.display(), fabric.folder().display());
        }
        Ok(Self { namespace: fabric.isolated(label)?, user, folder: folder.to_path_buf(), yields: false })
    }

    /// A command that runs `program` confined; add its arguments, then start it in [`TenantSpace::namespace`].
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(if self.yields { "chrt" } else { "unshare" });
        if self.yields {
            command.args(["--idle", "0", "unshare"]);
        }
        command.args(["--mount", "--propagation", "private", "sh", "-c", CONFINE, "confine", RUN]);
        command.arg(&self.folder).arg(self.user.to_string()).arg(program);
        command
    }
}
