//! Hosts of a fabric as launchers of MPI want them. Each has a name of its own that resolves, and a shell that reaches it.

use crate::peers::Apart;
use anyhow::{Context, Result};
use harmonaize_testkit::fabric::{Fabric, Host};
use harmonaize_testkit::process::Process;
use std::cell::Cell;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The device of a host on the fabric.
pub(super) const INTERFACE: &str = "eth0";

/// Gives this process's host the name `$1` and the addresses of the file `$2`, and runs the rest.
const NAMED: &str =
    r#"echo "$1" >/proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && exec "$@""#;

/// The hosts, with the files that name them.
#[derive(Debug)]
pub(super) struct Nodes {
    hosts: Vec<Host>,
    addresses: PathBuf,
    shell: PathBuf,
    folder: PathBuf,
    started: Cell<usize>,
}

impl Nodes {
    /// Writes what they need into the fabric's folder.
    pub(super) fn prepare(fabric: &Fabric) -> Result<Self> {
        let folder = fabric.folder().join("_peers");
        std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let (addresses, shell) = (folder.join("hosts"), folder.join("shell"));
        let hosts = fabric.hosts().to_vec();
        let named =
            hosts.iter().filter_map(|host| Some(format!("{} {}\n", host.addresses.first()?, host.name)));
        std::fs::write(&addresses, format!("127.0.0.1 localhost\n{}", named.collect::<String>()))?;
        std::fs::write(&shell, shell_text(fabric.name(), &addresses))?;
        std::fs::set_permissions(&shell, std::fs::Permissions::from_mode(0o755))?;
        Ok(Self { hosts, addresses, shell, folder, started: Cell::new(0) })
    }

    /// A host by its place.
    pub(super) fn host(&self, place: usize) -> Result<&Host> {
        self.hosts.get(place).context("no such host")
    }

    /// What launchers need where ranks are on several hosts; none where all are on one.
    pub(super) fn apart(&self) -> Option<Apart> {
        let hosts = self.hosts.iter().map(|host| host.name.clone()).collect();
        (self.hosts.len() > 1).then(|| Apart { hosts, shell: self.shell.clone(), interface: INTERFACE })
    }

    /// Starts a command on a host. All that it starts, wherever, ends with it: they have a process namespace of their own.
    pub(super) fn start(&self, place: usize, title: &str, command: &Command, log: &Path) -> Result<Process> {
        let host = self.host(place)?;
        self.started.set(self.started.get() + 1);
        // Open MPI's daemons name folders by process, and in a new namespace the same numbers come again.
        let temporary = self.folder.join(self.started.get().to_string());
        std::fs::create_dir(&temporary).with_context(|| format!("cannot make {}", temporary.display()))?;
        let mut outer = Command::new("unshare");
        outer.args(["--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "sh", "-c", NAMED, "named"]);
        outer.arg(&host.name).arg(&self.addresses).arg(command.get_program()).args(command.get_args());
        outer.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        outer.env("TMPDIR", temporary);
        Process::start(title, &mut outer, &host.namespace, log)
    }
}

/// A program `shell [OPTION...] HOST COMMAND...` that starts a command on a host of the fabric, as ssh does.
fn shell_text(fabric: &str, addresses: &Path) -> String {
    format!(
        "#!/bin/sh\nwhile case $1 in -*) true ;; *) false ;; esac; do shift; done\nhost=$1\nshift\n\
         exec nsenter --net=\"/run/netns/{fabric}-$host\" unshare --uts --mount sh -c '{NAMED}' named \"$host\" '{}' sh -c \"$*\"\n",
        addresses.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shell_takes_options_a_host_and_a_command() {
        let folder = tempfile::tempdir().unwrap();
        let text = shell_text("hz-1-0", Path::new("/hosts"));
        // The same with what needs root left out.
        let text = text.replace("nsenter --net=", "echo ").replace(" unshare --uts --mount sh -c", " sh");
        let path = folder.path().join("shell");
        std::fs::write(&path, text).unwrap();
        let output =
            Command::new("sh").arg(&path).args(["-x", "-q", "h3", "proxy", "\"a b\""]).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.starts_with("/run/netns/hz-1-0-h3 sh "), "{said}");
        assert!(said.trim().ends_with("named h3 /hosts sh -c proxy \"a b\""), "{said}");
    }
}
