//! A child process that is never left behind: own process group, ended by id, waited for.

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::namespace::Namespace;

/// How long a process may take to end by itself after SIGTERM.
const GRACE: Duration = Duration::from_secs(3);

/// Waits for a child's end until the deadline; `None` when it still runs.
///
/// # Errors
/// If the kernel does not say whether it has ended.
pub fn wait_until(child: &mut Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A running child; dropping it ends its whole process group and waits for it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts `command` inside `namespace` with both output streams in the file `log`, which is made anew.
    pub fn start(name: &str, command: &mut Command, namespace: &Namespace, log: &Path) -> Result<Self> {
        Self::spawn(name, command, log, |command| namespace.spawn(command))
    }

    /// Starts `command` where this process is, likewise.
    pub fn start_here(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        Self::spawn(name, command, log, |command| Ok(command.spawn()?))
    }

    fn spawn(
        name: &str,
        command: &mut Command,
        log: &Path,
        spawn: impl FnOnce(&mut Command) -> Result<Child>,
    ) -> Result<Self> {
        let output = std::fs::File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).process_group(0);
        let child = spawn(command).with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name: name.to_owned(), child, log: log.to_path_buf(), ended: None })
    }

    /// The name that it was started under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The file that holds what it printed.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// The last `bytes` bytes of what it printed, for an error message.
    pub fn log_tail(&self, bytes: u64) -> String {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = std::fs::File::open(&self.log)?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
            let mut tail = Vec::new();
            file.take(bytes).read_to_end(&mut tail)?;
            Ok(tail)
        };
        match read() {
            Ok(tail) => String::from_utf8_lossy(&tail).into_owned(),
            Err(error) => format!("({}: {error})", self.log.display()),
        }
    }

    /// Waits for the first line that it prints and that is `wanted`, until the deadline.
    pub fn line_by(&mut self, deadline: Instant, wanted: impl Fn(&str) -> bool) -> Result<String> {
        loop {
            let ended = self.status()?.is_some();
            let text = std::fs::read_to_string(&self.log).unwrap_or_default();
            let whole = text.rfind('\n').and_then(|end| text.get(..end)).unwrap_or_default();
            if let Some(line) = whole.lines().find(|line| wanted(line)) {
                return Ok(line.to_owned());
            }
            if ended || Instant::now() >= deadline {
                bail!(
                    "{} has not said what was expected; its last lines:\n{}",
                    self.name,
                    self.log_tail(4096)
                );
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Its exit status if it has ended.
    pub fn status(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().with_context(|| format!("cannot wait for {}", self.name))?;
        }
        Ok(self.ended)
    }

    /// Waits for its end until the deadline; `None` when it still runs.
    pub fn wait_until(&mut self, deadline: Instant) -> Result<Option<ExitStatus>> {
        if self.ended.is_none() {
            let ended = wait_until(&mut self.child, deadline);
            self.ended = ended.with_context(|| format!("cannot wait for {}", self.name))?;
        }
        Ok(self.ended)
    }

    /// Waits for success until the deadline; an error carries the end of what it printed.
    pub fn succeed_by(&mut self, deadline: Instant) -> Result<()> {
        match self.wait_until(deadline)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => {
                bail!("{} ended with {status}; its last lines:\n{}", self.name, self.log_tail(4096))
            }
            None => bail!("{} has not ended in time; its last lines:\n{}", self.name, self.log_tail(4096)),
        }
    }

    /// Sends a signal to its whole process group; nothing happens when it has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if self.status()?.is_some() {
            return Ok(());
        }
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        match id.map(|group| kill_process_group(group, signal)) {
            Some(Ok(())) | Some(Err(rustix::io::Errno::SRCH)) => Ok(()),
            Some(Err(error)) => Err(error).with_context(|| format!("cannot signal {}", self.name)),
            None => bail!("{} has no process id", self.name),
        }
    }

    /// Ends it: SIGTERM, a grace of three seconds, SIGKILL; then waits for it.
    pub fn end(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        if let Some(status) = self.wait_until(Instant::now() + GRACE)? {
            return Ok(status);
        }
        self.signal(Signal::KILL)?;
        let status = self.child.wait()?;
        self.ended = Some(status);
        Ok(status)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("warning: {} may still run: {error:#}", self.name);
        }
        // The library by which a clock steps removes these as its process ends, and not where that is killed.
        for name in ["faketime_shm_", "sem.faketime_sem_"] {
            let _ = std::fs::remove_file(format!("/dev/shm/{name}{}", self.child.id()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_process_leaves_no_clock_files() {
        let log = std::env::temp_dir().join(format!("harmonaize-process-{}", std::process::id()));
        let mut command = Command::new("sh");
        let script = "touch /dev/shm/faketime_shm_$$ /dev/shm/sem.faketime_sem_$$; echo made; sleep 60";
        let mut process = Process::start_here("a sleeper", command.args(["-c", script]), &log).unwrap();
        process.line_by(Instant::now() + Duration::from_secs(10), |line| line == "made").unwrap();
        let left = [
            format!("/dev/shm/faketime_shm_{}", process.id()),
            format!("/dev/shm/sem.faketime_sem_{}", process.id()),
        ];
        assert!(left.iter().all(|path| Path::new(path).exists()));
        process.signal(Signal::KILL).unwrap();
        drop(process);
        std::fs::remove_file(log).unwrap();
        assert!(left.iter().all(|path| !Path::new(path).exists()));
    }
}
