//! A tenant's job on a deployment. Its ranks are spread over the hosts, each a confined process that reaches its agent
//! alone.

use crate::deployment::{Deployment, Tenant, socket, tenant_folder};
use crate::process::Process;
use crate::tenant::TenantSpace;
use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A tenant's spaces, one a host, made once and used by one job after another.
#[derive(Debug)]
pub struct Spaces {
    tenant: String,
    spaces: Vec<(TenantSpace, PathBuf)>,
}

impl Spaces {
    /// Makes a space for the tenant on each host.
    pub fn make(deployment: &Deployment, tenant: &Tenant) -> Result<Self> {
        let fabric = deployment.fabric();
        let space = |host: &crate::fabric::Host| {
            let label = format!("{}-{}", tenant.name, host.name);
            let folder = tenant_folder(host, &tenant.name);
            let space = TenantSpace::make(fabric, &label, tenant.user, &folder)?;
            Ok((space, socket(host, &tenant.name)))
        };
        let spaces = deployment.hosts().iter().map(space).collect::<Result<_>>()?;
        Ok(Self { tenant: tenant.name.clone(), spaces })
    }

    /// From now on its processes run only where nobody else's would.
    pub fn yield_processors(&mut self) {
        self.spaces.iter_mut().for_each(|(space, _)| space.yields = true);
    }

    /// Starts one rank per entry of `hosts`, which names each rank's host by position. A rank gets `--socket`, `--rank`,
    /// `--ranks`, `--name` and then `arguments`; what it prints goes to `TENANT-NAME-RANK.log` in `logs`.
    pub fn start(
        &self,
        name: &str,
        hosts: &[usize],
        program: &Path,
        arguments: &[String],
        logs: &Path,
    ) -> Result<Job> {
        let mut ranks = Vec::new();
        for (rank, host) in hosts.iter().enumerate() {
            let seat = ["--rank", &rank.to_string(), "--ranks", &hosts.len().to_string()].map(str::to_owned);
            let arguments = [&seat[..], arguments].concat();
            ranks.push(self.start_one(name, &rank.to_string(), *host, program, &arguments, logs)?);
        }
        Ok(Job { name: name.to_owned(), ranks })
    }

    /// Starts one process of a job. It gets `--socket`, `--name` and then `arguments`; what it prints goes to
    /// `TENANT-NAME-LABEL.log` in `logs`.
    pub fn start_one(
        &self,
        name: &str,
        label: &str,
        host: usize,
        program: &Path,
        arguments: &[String],
        logs: &Path,
    ) -> Result<Process> {
        let title = format!("rank {label} of tenant {}'s {name}", self.tenant);
        let log = logs.join(format!("{}-{name}-{label}.log", self.tenant));
        self.start_command(&title, host, program, &log, |command, socket| {
            command.arg("--socket").arg(socket).args(["--name", name]).args(arguments);
        })
    }

    /// Starts a program on a host as the tenant; `arguments` adds what it takes, given the agent's socket.
    pub fn start_command(
        &self,
        title: &str,
        host: usize,
        program: &Path,
        log: &Path,
        arguments: impl FnOnce(&mut Command, &Path),
    ) -> Result<Process> {
        let (space, socket) =
            self.spaces.get(host).with_context(|| format!("there is no host number {host}"))?;
        let mut command = space.command(program);
        // Ranks share few cores: each computes on one.
        command.env("RAYON_NUM_THREADS", "1");
        arguments(&mut command, socket);
        Process::start(title, &mut command, &space.namespace, log)
    }
}

/// The running ranks of a job; dropping it ends them.
#[derive(Debug)]
pub struct Job {
    name: String,
    ranks: Vec<Process>,
}

impl Job {
    /// The name under which its ranks join.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The ranks' logs, by rank.
    pub fn logs(&self) -> Vec<PathBuf> {
        self.ranks.iter().map(|rank| rank.log().to_path_buf()).collect()
    }

    /// Whether all ranks have ended well; an error with its last lines when one has not.
    pub fn ended(&mut self) -> Result<bool> {
        ended(&mut self.ranks)
    }

    /// Asks all ranks to stop.
    pub fn stop(&mut self) -> Result<()> {
        self.ranks.iter_mut().try_for_each(|rank| rank.signal(Signal::TERM))
    }

    /// Waits until all ranks have ended well; `check` is asked meanwhile whether to go on.
    pub fn wait(&mut self, limit: Duration, check: impl FnMut() -> Result<()>) -> Result<()> {
        wait(&mut self.ranks, limit, check)
    }
}

/// Whether all processes have ended well; an error with its last lines when one has not.
fn ended(processes: &mut [Process]) -> Result<bool> {
    let mut all = true;
    for process in processes {
        match process.status()? {
            None => all = false,
            Some(status) if status.success() => {}
            Some(status) => {
                bail!("{} ended with {status}; its last lines:\n{}", process.name(), process.log_tail(2048))
            }
        }
    }
    Ok(all)
}

/// Waits until all processes have ended well; `check` is asked meanwhile whether to go on.
///
/// # Errors
/// Where one has not, with its last lines.
pub fn wait(processes: &mut [Process], limit: Duration, mut check: impl FnMut() -> Result<()>) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !ended(processes)? {
        check()?;
        if Instant::now() > deadline {
            let late = processes.iter_mut().find_map(|process| match process.status() {
                Ok(None) => Some(format!("{}:\n{}", process.name(), process.log_tail(2048))),
                _ => None,
            });
            bail!("not ended within {limit:?}: {}", late.unwrap_or_default());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Programs where a tenant's user may run them. They are as they are, or a copy when a folder above is closed
/// to others.
#[derive(Debug)]
pub struct Programs {
    folder: PathBuf,
    copied: bool,
}

impl Programs {
    /// Makes the named programs of `folder` reachable.
    pub fn publish(folder: &Path, names: &[&str]) -> Result<Self> {
        for name in names {
            let path = folder.join(name);
            path.metadata().with_context(|| format!("{} is not there", path.display()))?;
        }
        let folder = folder.canonicalize().with_context(|| format!("cannot reach {}", folder.display()))?;
        if folder.ancestors().all(open_to_others) {
            return Ok(Self { folder, copied: false });
        }
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let copies = format!("harmonaize-programs-{}-{count}", std::process::id());
        let copies = std::env::temp_dir().join(copies);
        std::fs::create_dir(&copies).with_context(|| format!("cannot make {}", copies.display()))?;
        let programs = Self { folder: copies, copied: true };
        std::fs::set_permissions(&programs.folder, std::fs::Permissions::from_mode(0o711))?;
        for name in names {
            std::fs::copy(folder.join(name), programs.folder.join(name))?;
        }
        Ok(programs)
    }

    /// The path of one of them.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

fn open_to_others(folder: &Path) -> bool {
    folder.metadata().is_ok_and(|found| found.permissions().mode() & 0o001 != 0)
}

impl Drop for Programs {
    fn drop(&mut self) {
        if self.copied
            && let Err(error) = std::fs::remove_dir_all(&self.folder)
        {
            eprintln!("warning: {} stays: {error}", self.folder.display());
        }
    }
}

/// Runs a program outside any fabric and returns what it printed. An error carries what it wrote on its other
/// stream.
pub fn printed(command: &mut Command) -> Result<String> {
    let shown = crate::workspace::describe(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{shown}` ended with {}: {}", output.status, said.trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{shown}` printed what is no text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_in_private_folders_are_copied() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("p"), "x").unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let programs = Programs::publish(folder.path(), &["p"]).unwrap();
        let path = programs.path("p");
        assert!(path != folder.path().join("p") && path.exists());
        let again = Programs::publish(folder.path(), &["p"]).unwrap();
        drop(programs);
        assert!(!path.exists());
        assert!(again.path("p").exists(), "two of one process, as two networks have");
        assert!(Programs::publish(folder.path(), &["missing"]).is_err());
    }
}
