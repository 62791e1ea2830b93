//! A named network namespace: running code, and starting processes, inside it.

use anyhow::{Context, Result, anyhow, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Where `ip netns` keeps the names.
pub const NAMES: &str = "/run/netns";

/// A network namespace known by its name to `ip netns`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// The namespace of that name, which need not exist yet.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }

    /// The name, as `ip netns exec` takes it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that stands for the namespace, as `nsenter --net=` takes it.
    pub fn path(&self) -> PathBuf {
        Path::new(NAMES).join(&self.name)
    }

    /// Runs `work` on a thread that has entered the namespace.
    ///
    /// A socket opened there belongs to the namespace for good, wherever it is used afterwards.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let file = File::open(self.path())
            .with_context(|| format!("there is no network namespace named {}", self.name))?;
        std::thread::scope(|scope| {
            let inside = scope.spawn(move || {
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
                Ok::<T, rustix::io::Errno>(work())
            });
            match inside.join() {
                Ok(Ok(value)) => Ok(value),
                Ok(Err(errno)) => {
                    Err(errno).with_context(|| format!("cannot enter {}; this needs root", self.name))
                }
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Starts a process inside; it keeps this process's mounts, so cgroup2 and bpffs stay visible.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        self.enter(|| command.spawn())?
            .with_context(|| format!("cannot start `{}`", crate::workspace::describe(command)))
    }

    /// Writes one kernel setting of this namespace, for example `net.ipv4.ip_forward`.
    pub fn set(&self, setting: &str, value: &str) -> Result<()> {
        let path = Path::new("/proc/sys").join(setting.replace('.', "/"));
        self.enter(|| std::fs::write(&path, value))?
            .with_context(|| format!("cannot set {setting} to {value} in {}", self.name))
    }

    /// Runs a batch of `ip` commands inside, one a line.
    pub fn ip(&self, lines: &[String]) -> Result<()> {
        self.enter(|| batch("ip", lines))?
    }

    /// Runs a batch of `tc` commands inside, one a line.
    pub fn tc(&self, lines: &[String]) -> Result<()> {
        self.enter(|| batch("tc", lines))?
    }
}

/// Gives a batch of lines to `ip` or `tc`. An error carries what the program said and the line it was about.
pub fn batch(program: &str, lines: &[String]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let mut child = Command::new(program)
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {program}; Debian's package iproute2 has it"))?;
    let mut input = child.stdin.take().ok_or_else(|| anyhow!("{program} has no standard input"))?;
    let written = input.write_all((lines.join("\n") + "\n").as_bytes());
    drop(input);
    let output = child.wait_with_output()?;
    if output.status.success() {
        return written.with_context(|| format!("cannot write to {program}"));
    }
    let said = String::from_utf8_lossy(&output.stderr);
    // Both programs name the failed line as "Command failed -:3".
    let failed = said
        .rsplit_once("-:")
        .and_then(|(_, number)| number.trim().parse::<usize>().ok())
        .and_then(|number| lines.get(number.saturating_sub(1)));
    match failed {
        Some(line) => bail!("`{program} {line}` failed: {}", said.trim()),
        None => bail!("{program} failed: {}", said.trim()),
    }
}
