//! `harmonaize hello`: two emulated hosts on this machine, one verified AllReduce between them, and nothing of it stays.
//!
//! All of it lives in namespaces of its own, network, mounts and processes, whose first process is this program again
//! ([`inside`]). The kernel ends every other process there, and removes devices, mounts and files, as soon as that one ends. That one
//! ends when its standard input does: with this program, however that ends.

mod inside;

use crate::{Failure, init};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

pub(crate) const HELP: &str = "\
It makes two hosts and a switch (network namespaces), starts control and two agents with the certificates that `harmonaize init`
made, and has two ranks add up a tensor, of which every element is checked. All of it is gone when it ends. It needs root and the
program `ip` (Debian's package iproute2), and disturbs nothing that runs.";

/// How long all of it may take.
const LIMIT: Duration = Duration::from_secs(60);

/// What `harmonaize hello` takes.
#[derive(clap::Args)]
pub(crate) struct Hello {
    /// What `harmonaize init` made
    #[arg(default_value = init::FOLDER)]
    folder: PathBuf,
    /// Be the first process in the namespaces
    #[arg(long, hide = true)]
    inside: bool,
}

impl Hello {
    pub(crate) async fn run(self) -> Result<String, Failure> {
        if self.inside { inside::run(&self.folder).await } else { self.outside().await }
    }

    /// Makes the namespaces and waits for what is inside them, or for a signal.
    async fn outside(self) -> Result<String, Failure> {
        if !rustix::process::geteuid().is_root() {
            let text = "hello makes network namespaces, which needs root: sudo harmonaize hello";
            return Err(Failure::Refused(text.to_owned()));
        }
        let refused = |error: std::io::Error| Failure::Refused(error.to_string());
        let mut command = std::process::Command::new("unshare");
        command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]);
        command.arg(std::env::current_exe().map_err(refused)?).arg("hello").arg(&self.folder).arg("--inside");
        // A group of its own: Ctrl-C is for this process, which then ends that one.
        command.process_group(0).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Command::from(command).kill_on_drop(true).spawn().map_err(|error| {
            Failure::Refused(format!("cannot start `unshare`, of Debian's package util-linux: {error}"))
        })?;
        let (life, complaint) = (child.stdin.take(), child.stderr.take());
        let mut text = String::new();
        let ended = async {
            if let Some(mut complaint) = complaint {
                let _ = complaint.read_to_string(&mut text).await;
            }
            child.wait().await
        };
        let status = tokio::select! {
            status = ended => Some(status.map_err(refused)?),
            stopped = stopped() => { stopped.map_err(refused)?; None }
            () = tokio::time::sleep(LIMIT) => {
                text = format!("it took longer than {} s", LIMIT.as_secs());
                None
            }
        };
        drop(life);
        let Some(status) = status else {
            let _ = child.wait().await;
            let why = if text.is_empty() { "stopped; nothing of it is left" } else { &text };
            return Err(Failure::Refused(why.to_owned()));
        };
        outcome(status, &text)
    }
}

/// Completes with a signal that asks this process to end.
async fn stopped() -> std::io::Result<()> {
    let [mut interrupt, mut terminate, mut hangup] =
        [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, signal(SignalKind::hangup())?];
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// What the first process inside said, whose text this process says in its place.
fn outcome(status: ExitStatus, text: &str) -> Result<String, Failure> {
    if status.success() {
        return Ok(String::new());
    }
    let text = text.trim().trim_start_matches("harmonaize: ");
    Err(Failure::Refused(match (text, status.signal()) {
        ("", Some(signal)) => format!("what was in the namespaces ended by signal {signal}"),
        ("", None) => format!("what was in the namespaces ended with {status}"),
        (text, _) => text.to_owned(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_inside_is_said_once() {
        let ended = |status: i32, text: &str| {
            outcome(ExitStatus::from_raw(status), text).map_err(|failure| failure.to_string())
        };
        assert_eq!(ended(0, "a warning"), Ok(String::new()));
        assert_eq!(ended(1 << 8, "harmonaize: no bridge\n"), Err("no bridge".to_owned()));
        assert!(ended(9, "").unwrap_err().contains("signal 9"));
        assert!(ended(3 << 8, " ").unwrap_err().contains("exit status: 3"));
    }
}
