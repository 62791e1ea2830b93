//! Commands on the hosts of a testbed. They are started by ssh or another launcher, and end when the one who started
//! them ends.

use anyhow::{Context, Result, bail, ensure};
use harmonaize_program::remote;
use harmonaize_testkit::process::wait_until;
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long a short command may take.
const SHORT: Duration = Duration::from_secs(30);
/// How long a program may take to be gone once it was told to end.
const GRACE: Duration = Duration::from_secs(5);
/// Most lines that are kept of a program for an error message.
const MAX_RECENT_LINES: usize = 200;

/// Runs a program, and kills it when standard input ends: a launcher's own end does not reach its program otherwise.
const GUARD: &str = r#"exec 3<&0
"$@" </dev/null 3<&- &
program=$!
(read -r line <&3; kill -9 $program) >/dev/null 2>&1 3<&3 &
guard=$!
exec 3<&-
wait $program
status=$?
kill $guard 2>/dev/null
exit $status"#;

/// How commands get to one host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launcher {
    argv: Vec<String>,
    /// The far end is a shell that takes one line (ssh).
    quotes: bool,
}

impl Launcher {
    /// From a template such as `ssh {host}` or `ip netns exec {host}`; `local` starts commands here.
    pub fn new(template: &str, host: &str) -> Result<Self> {
        let words: Vec<String> =
            template.split_whitespace().map(|word| word.replace("{host}", host)).collect();
        let Some(first) = words.first() else { bail!("the launcher is empty; `local` starts commands here") };
        if first == "local" {
            ensure!(words.len() == 1, "`local` is a launcher without further words");
            return Ok(Self { argv: Vec::new(), quotes: false });
        }
        let quotes = Path::new(first).file_name().is_some_and(|name| name == "ssh");
        Ok(Self { argv: words, quotes })
    }

    fn command(&self, command: &[&str]) -> Command {
        let quoted = self.quotes.then(|| quoted(command));
        let rest: Vec<&str> = match &quoted {
            Some(line) => vec![line],
            None => command.to_vec(),
        };
        let mut words = self.argv.iter().map(String::as_str).chain(rest);
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words);
        command
    }

    /// A program's command as a person would type it here.
    pub(crate) fn shown_command(&self, program: &[&str]) -> String {
        let command = self.command(program);
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        quoted(&words.map(|word| word.to_string_lossy()).collect::<Vec<_>>())
    }

    /// Runs a shell script with arguments `$1`, `$2` ... and `input`; returns what it printed.
    pub fn shell(&self, script: &str, arguments: &[&str], input: &[u8]) -> Result<String> {
        let mut command = self.command(&[&["sh", "-c", script, "sh"], arguments].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let shown = self.shown();
        let mut running = Running(command.spawn().with_context(|| format!("cannot start {shown}"))?);
        let mut given = running.0.stdin.take().context("no standard input")?;
        let (output, errors) = (running.0.stdout.take(), running.0.stderr.take());
        let (written, printed, said) = std::thread::scope(|scope| {
            // A command that does not read its input closes it.
            let writer = scope.spawn(move || given.write_all(input));
            let errors = scope.spawn(move || text(errors));
            let output = scope.spawn(move || text(output));
            let deadline = Instant::now() + SHORT.max(Duration::from_micros(input.len() as u64));
            if matches!(running.wait_until(deadline), Ok(None)) {
                running.kill();
            }
            (writer.join(), output.join().unwrap_or_default(), errors.join().unwrap_or_default())
        });
        let status = running.0.wait()?;
        ensure!(status.success(), "{shown}: a command ended with {status}: {}", said.trim());
        ensure!(matches!(written, Ok(Ok(()))), "{shown}: a command did not take its input");
        Ok(printed)
    }

    /// Writes a file there, of this mode, with folders above it.
    pub fn write(&self, path: &Path, contents: &[u8], mode: u32) -> Result<()> {
        let script = r#"mkdir -p "${1%/*}" && umask 077 && cat > "$1.part" && chmod "$2" "$1.part" && mv "$1.part" "$1""#;
        self.shell(script, &[&path.to_string_lossy(), &format!("{mode:o}")], contents).map(drop)
    }

    /// Starts a program; `name` is for messages.
    pub fn start(&self, name: &str, program: &[&str]) -> Result<Remote> {
        let mut command = self.command(&[&["sh", "-c", GUARD, "guard"], program].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child =
            command.spawn().with_context(|| format!("cannot start {name} by {}", self.shown()))?;
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (sender, lines) = mpsc::channel();
        let other = sender.clone();
        std::thread::spawn(move || output.map(|output| read_lines(output, &sender)));
        std::thread::spawn(move || errors.map(|errors| read_lines(errors, &other)));
        Ok(Remote { name: name.to_owned(), running: Running(child), input, lines, recent_lines: Vec::new() })
    }

    fn shown(&self) -> String {
        if self.argv.is_empty() { "the shell".into() } else { format!("`{}`", self.argv.join(" ")) }
    }
}

/// A command as a shell reads it back.
pub(crate) fn quoted(command: &[impl AsRef<str>]) -> String {
    command.iter().map(|word| remote::quoted(word.as_ref())).collect::<Vec<_>>().join(" ")
}

fn text(stream: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    if let Some(mut stream) = stream {
        // What was read before an error is worth showing.
        let _ = stream.read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn read_lines(stream: impl Read, lines: &mpsc::Sender<(Instant, String)>) {
    for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if lines.send((Instant::now(), line)).is_err() {
            return;
        }
    }
}

/// A child that leads a process group, which the drop ends.
#[derive(Debug)]
struct Running(Child);

impl Running {
    fn wait_until(&mut self, deadline: Instant) -> Result<Option<ExitStatus>> {
        Ok(wait_until(&mut self.0, deadline)?)
    }

    fn kill(&mut self) {
        if let Some(group) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            // It may be gone, which is as well.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(Some(_))) {
            self.kill();
            let _ = self.0.wait();
        }
    }
}

/// A program on a host; the drop ends it there.
#[derive(Debug)]
pub struct Remote {
    name: String,
    running: Running,
    /// Its end is the program's.
    input: Option<ChildStdin>,
    lines: Receiver<(Instant, String)>,
    recent_lines: Vec<String>,
}

impl Remote {
    /// The next line for which `wanted` is true, and when it came. An error when the program ends before, or in time has
    /// not printed it.
    pub fn line(&mut self, deadline: Instant, wanted: impl Fn(&str) -> bool) -> Result<(Instant, String)> {
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((when, line)) => {
                    self.keep(line.clone());
                    if wanted(&line) {
                        return Ok((when, line));
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{} has not come so far in time; its last lines:\n{}", self.name, self.last())
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("{} ended before it came so far; its last lines:\n{}", self.name, self.last())
                }
            }
        }
    }

    /// Waits for its end, which has to be a good one. Returns all that it printed and was not taken before.
    pub fn finish(&mut self, deadline: Instant) -> Result<Vec<String>> {
        let mut rest = Vec::new();
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((_, line)) => {
                    self.keep(line.clone());
                    rest.push(line);
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{} has not ended in time; its last lines:\n{}", self.name, self.last())
                }
            }
        }
        match self.running.wait_until(deadline)? {
            Some(status) if status.success() => Ok(rest),
            Some(status) => bail!("{} ended with {status}; its last lines:\n{}", self.name, self.last()),
            None => bail!("{} has not ended in time", self.name),
        }
    }

    /// Whether it has ended.
    pub fn ended(&mut self) -> bool {
        matches!(self.running.0.try_wait(), Ok(Some(_)))
    }

    /// Kills it there, and says when that was asked.
    pub fn kill(&mut self) -> Instant {
        let when = Instant::now();
        self.input = None;
        when
    }

    fn keep(&mut self, line: String) {
        if self.recent_lines.len() >= MAX_RECENT_LINES {
            self.recent_lines.remove(0);
        }
        self.recent_lines.push(line);
    }

    fn last(&self) -> String {
        let first = self.recent_lines.len().saturating_sub(20);
        self.recent_lines.iter().skip(first).map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.input = None;
        if !matches!(self.running.wait_until(Instant::now() + GRACE), Ok(Some(_))) {
            eprintln!("warning: {} may still run", self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local() -> Launcher {
        Launcher::new("local", "h").unwrap()
    }

    #[test]
    fn ssh_gets_one_quoted_line() {
        let launcher = Launcher::new("ip netns exec {host}", "h1").unwrap();
        let words = |command: Command| -> Vec<String> {
            std::iter::once(command.get_program())
                .chain(command.get_args())
                .map(|word| word.to_string_lossy().into())
                .collect()
        };
        assert_eq!(words(launcher.command(&["echo", "a b"])), ["ip", "netns", "exec", "h1", "echo", "a b"]);
        let launcher = Launcher::new("/usr/bin/ssh root@{host}", "h1").unwrap();
        assert_eq!(
            words(launcher.command(&["echo", "it's"])),
            ["/usr/bin/ssh", "root@h1", r"echo 'it'\''s'"]
        );
        assert_eq!(launcher.shown_command(&["a", "b c"]), r"/usr/bin/ssh root@h1 'a '\''b c'\'''");
        assert!(Launcher::new(" ", "h").is_err() && Launcher::new("local {host}", "h").is_err());
    }

    #[test]
    fn failed_scripts_report_their_reason() {
        assert_eq!(local().shell("cat; echo $2", &["a", "b c"], b"in ").unwrap(), "in b c\n");
        let error = local().shell("echo why >&2; exit 3", &[], b"").unwrap_err().to_string();
        assert!(error.contains("why") && error.contains('3'), "{error}");
        let error =
            Launcher::new("/nowhere/launcher", "h").unwrap().shell("true", &[], b"").unwrap_err().to_string();
        assert!(error.contains("/nowhere/launcher"), "{error}");
    }

    #[test]
    fn files_come_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        local().write(&path, b"#!/bin/sh\necho ran\n", 0o755).unwrap();
        assert_eq!(local().shell("\"$1\"", &[&path.to_string_lossy()], b"").unwrap(), "ran\n");
    }

    #[test]
    fn program_output_and_exit_are_reported() {
        let soon = || Instant::now() + Duration::from_secs(20);
        let mut good = local().start("good", &["sh", "-c", "echo one; echo two; echo three"]).unwrap();
        assert_eq!(good.line(soon(), |line| line == "two").unwrap().1, "two");
        assert_eq!(good.finish(soon()).unwrap(), ["three"]);
        let mut bad = local().start("bad", &["sh", "-c", "echo cause; exit 4"]).unwrap();
        let error = bad.finish(soon()).unwrap_err().to_string();
        assert!(error.contains("cause") && error.contains('4'), "{error}");
        let mut early = local().start("early", &["sh", "-c", "echo cause"]).unwrap();
        assert!(early.line(soon(), |line| line == "never").unwrap_err().to_string().contains("cause"));
    }

    #[test]
    fn a_program_ends_with_its_remote() {
        let mut remote = local().start("long", &["sh", "-c", "echo $$; exec sleep 600"]).unwrap();
        let (_, id) = remote.line(Instant::now() + Duration::from_secs(20), |_| true).unwrap();
        remote.kill();
        let there = Path::new("/proc").join(id);
        let deadline = Instant::now() + Duration::from_secs(20);
        while there.exists() && !remote.ended() {
            assert!(Instant::now() < deadline, "it still runs");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(remote);
        assert!(!there.exists());
    }
}
