//! What a service manager runs to reload an agent. The agent's files are read again, or the program that was installed
//! since takes its place.

use crate::handover::LINKS;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a successor may take: links over RDMA come to go over TCP first, and then it is longer than each of its own limits.
const LIMIT: Duration = LINKS.saturating_add(Duration::from_secs(30));
/// How often it is looked whether it is done.
const EVERY: Duration = Duration::from_millis(10);
/// The variables that systemd gives to the first process of a unit alone. They give where it reports, and the
/// microseconds in which it must.
const OF_THE_UNIT: [&str; 2] = ["NOTIFY_SOCKET", "WATCHDOG_USEC"];

/// Reloads the agent that runs as process `agent` by the configuration at `config`. Where it runs the program that this is, it reads its files again.
/// Else this program takes its place, with its tenants and their operations in flight, as a process of its own.
///
/// # Errors
/// If the process is none that this user may look at, or did not hand over. It goes on then.
pub fn reload(agent: u32, config: &Path) -> Result<()> {
    let process = Path::new("/proc").join(agent.to_string());
    let pid = i32::try_from(agent).ok().and_then(Pid::from_raw).context("no process has this number")?;
    let runs = process.join("exe").metadata().with_context(|| format!("process {agent}"))?;
    if is_same(&runs, &Path::new("/proc/self/exe").metadata()?) {
        return kill_process(pid, Signal::HUP).with_context(|| format!("process {agent}"));
    }
    let environment = std::fs::read(process.join("environ")).with_context(|| format!("process {agent}"))?;
    let mut successor = Command::new(std::env::current_exe().context("this program has no file")?);
    successor.arg("--config").arg(config).arg("--take-over").stdin(Stdio::null());
    successor.envs(OF_THE_UNIT.iter().filter_map(|name| Some((name, variable(&environment, name)?))));
    let mut successor = successor.spawn().context("cannot start a successor")?;
    let end = Instant::now() + LIMIT;
    let over = || !process.join("exe").metadata().is_ok_and(|now| is_same(&now, &runs));
    while !over() {
        if let Some(status) = successor.try_wait()? {
            bail!("agent {agent} goes on: its successor ended with {status}");
        }
        if Instant::now() > end {
            successor.kill()?;
            successor.wait()?;
            bail!("agent {agent} goes on: its successor was not done within {LIMIT:?}");
        }
        std::thread::sleep(EVERY);
    }
    ensure!(successor.try_wait()?.is_none(), "agent {agent} is gone, and so is its successor");
    Ok(())
}

/// Whether both are of one file.
fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// A variable of a process's environment, in which each ends with a zero byte.
fn variable<'a>(environment: &'a [u8], name: &str) -> Option<&'a str> {
    let variables = environment.split(|byte| *byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
    variables.filter_map(|text| text.split_once('=')).find(|(one, _)| *one == name).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_found_among_others() {
        let environment = b"A=1\0WATCHDOG_PID=7\0WATCHDOG_USEC=30000000\0\xff=2\0NOTIFY_SOCKET=/run/a=b";
        let found = OF_THE_UNIT.map(|name| variable(environment, name));
        assert_eq!(found, [Some("/run/a=b"), Some("30000000")]);
        assert_eq!(variable(b"A=1\0XWATCHDOG_USEC=3\0", "WATCHDOG_USEC"), None);
        assert_eq!(variable(b"", "A"), None);
    }

    #[test]
    fn a_process_that_is_not_there_is_named() {
        let error = reload(u32::MAX, Path::new("agent.toml")).unwrap_err();
        assert_eq!(error.to_string(), "no process has this number");
        let error = reload(i32::MAX.unsigned_abs(), Path::new("agent.toml")).unwrap_err();
        assert_eq!(error.to_string(), format!("process {}", i32::MAX));
    }

    #[test]
    fn a_successor_that_fails_leaves_the_process_as_it_is() {
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        // This test's program takes no `--config`.
        let error = reload(other.id(), Path::new("agent.toml")).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("agent {} goes on: its successor ended with", other.id())),
            "{error}"
        );
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
