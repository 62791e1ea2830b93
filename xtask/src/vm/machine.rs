//! One run of a virtual machine: its emulator, its console's lines, its end within a time limit.

use super::Architecture;
use super::kernel::Kernel;
use anyhow::{Context, Result, bail};
use harmonaize_guest::{LARGEST, MTU, Mark};
use harmonaize_testkit::process::wait_until;
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// A machine that is ready to start.
#[derive(Debug)]
pub struct Machine<'a> {
    /// The processor and what goes with it.
    pub architecture: &'a Architecture,
    /// The kernel.
    pub kernel: &'a Kernel,
    /// The archive with the guest's files.
    pub initramfs: &'a Path,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Virtual processors.
    pub processors: u32,
    /// Use the processor itself instead of emulating one.
    pub kvm: bool,
    /// Network cards.
    pub cards: Vec<Card>,
}

/// A network card of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// Its address, `02:00:00:00:00:01`.
    pub mac: String,
    /// Where its wire ends.
    pub wire: Wire,
}

/// The other end of a card's wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wire {
    /// A machine that connects to this socket, which has to be new; its path, short. Until then what is sent is lost.
    Listen(PathBuf),
    /// A machine that listens on this socket already.
    Connect(PathBuf),
    /// A hub, and a machine for each of these sockets, to which it connects as to that of [`Wire::Listen`].
    Hub(Vec<PathBuf>),
}

impl Wire {
    /// The emulator's options for the card of this number; the last is what the card is attached to.
    fn options(&self, number: usize) -> Vec<String> {
        let id = format!("n{number}");
        let stream = |id: &str, server: &str, path: &Path| {
            // A comma would end the path; the emulator takes two for one.
            let path = path.display().to_string().replace(',', ",,");
            format!("stream,id={id},server={server},addr.type=unix,addr.path={path}")
        };
        match self {
            Self::Listen(path) => vec![stream(&id, "on", path)],
            Self::Connect(path) => vec![stream(&id, "off", path)],
            Self::Hub(paths) => {
                let ports = (0..).zip(paths).flat_map(|(port, path): (u32, _)| {
                    let wire = format!("{id}w{port}");
                    let port = format!("hubport,id={id}p{port},hubid={number},netdev={wire}");
                    [stream(&wire, "on", path), port]
                });
                ports.chain([format!("hubport,id={id},hubid={number}")]).collect()
            }
        }
    }
}

/// What came of a run.
#[derive(Debug, Clone, PartialEq)]
pub enum GuestOutcome {
    /// The guest said how many of its steps had failed, and ended by itself.
    Done(u32),
    /// The emulator ended otherwise.
    Died(String),
    /// It ran past its limit and was ended.
    TimedOut,
}

/// The status with which the debug port makes the emulator end. It is `value << 1 | 1`; anything even does not come from
/// the guest.
fn guest_status(code: Option<i32>) -> Option<u32> {
    let code = u32::try_from(code?).ok()?;
    (code & 1 == 1).then_some(code >> 1)
}

impl Machine<'_> {
    fn command(&self) -> Command {
        // The emulator does not outlive us, however we end.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", self.architecture.emulator]);
        command.args(["-M", self.architecture.machine]);
        if self.kvm {
            command.args(["-accel", "kvm", "-cpu", "host"]);
        } else {
            command.args(["-accel", "tcg,thread=multi", "-cpu", self.architecture.processor]);
        }
        command.args(["-smp", &self.processors.to_string(), "-m", &self.memory_mib.to_string()]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        if self.architecture.debug_exit {
            command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]);
        }
        for (number, card) in self.cards.iter().enumerate() {
            for option in card.wire.options(number) {
                command.arg("-netdev").arg(option);
            }
            let mac = &card.mac;
            command.arg("-device").arg(format!("virtio-net-pci,netdev=n{number},mac={mac},host_mtu={MTU}"));
        }
        command.arg("-kernel").arg(self.kernel.image()).arg("-initrd").arg(self.initramfs);
        let console = self.architecture.console;
        // Only what ends the kernel is printed; the guest shows the rest when a step has failed.
        command.arg("-append");
        // The processor's counter as the clock: the emulated timer, which a kernel would rather trust, costs microseconds a
        // look, and much more on a busy machine. Other architectures do not know the words.
        let clock = if self.architecture.debug_exit { " tsc=reliable clocksource=tsc" } else { "" };
        command.arg(format!("console={console} quiet loglevel=1 panic=-1 oops=panic mitigations=off{clock}"));
        command
    }

    /// Starts it. Each line of its console, without the line's end, goes to `on_line` on a thread of its own, then `None`.
    /// A `false` from there ends the reading.
    pub fn start(&self, on_line: impl Fn(Option<String>) -> bool + Send + 'static) -> Result<Emulator> {
        let mut command = self.command();
        command.args(["-serial", "stdio"]).stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().context("cannot start the emulator")?;
        let output = child.stdout.take();
        let emulator = Emulator(child);
        let output = output.context("the emulator has no output")?;
        std::thread::spawn(move || read_lines(output, on_line));
        Ok(emulator)
    }

    /// Runs it, and gives every line of its console, without the line's end, to `on_line`.
    pub fn run(&self, limit: Duration, mut on_line: impl FnMut(&str)) -> Result<GuestOutcome> {
        let deadline = Instant::now() + limit;
        let (sender, lines) = mpsc::channel();
        let mut emulator = self.start(move |line| sender.send(line).is_ok())?;
        let mut failed = None;
        loop {
            match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Some(line)) => {
                    if let Some(Mark::Halt(count)) = Mark::find(&line) {
                        failed = Some(count);
                    }
                    on_line(&line);
                }
                Ok(None) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => return Ok(GuestOutcome::TimedOut),
            }
        }
        let Some(status) = emulator.wait_until(deadline)? else { return Ok(GuestOutcome::TimedOut) };
        Ok(self.outcome(failed, status))
    }

    /// The guest's word, how many steps failed, counts when the console and the emulator's status agree.
    pub fn outcome(&self, printed: Option<u32>, status: ExitStatus) -> GuestOutcome {
        let agreed = if self.architecture.debug_exit {
            printed.filter(|failed| guest_status(status.code()) == Some((*failed).min(LARGEST)))
        } else {
            printed.filter(|_| status.success())
        };
        match agreed {
            Some(failed) => GuestOutcome::Done(failed),
            None => {
                GuestOutcome::Died(format!("the emulator ended with {status}, the guest said {printed:?}"))
            }
        }
    }

    /// Runs it with our terminal as its console, until it powers off.
    pub fn interact(&self) -> Result<()> {
        let mut command = self.command();
        command.args(["-serial", "mon:stdio"]);
        let status = command.status().context("cannot start the emulator")?;
        if status.success() || guest_status(status.code()).is_some() {
            Ok(())
        } else {
            bail!("the emulator ended with {status}")
        }
    }
}

fn read_lines(output: impl Read, on_line: impl Fn(Option<String>) -> bool) {
    for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        if !on_line(Some(line.trim_end_matches('\r').to_owned())) {
            return;
        }
    }
    on_line(None);
}

/// The emulator's process, which leads a group of its own; dropping it ends the group.
#[derive(Debug)]
pub struct Emulator(Child);

impl Emulator {
    /// Waits for its end until the deadline; `None` when it still runs.
    pub fn wait_until(&mut self, deadline: Instant) -> Result<Option<ExitStatus>> {
        Ok(wait_until(&mut self.0, deadline)?)
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Some(group) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            // An error means that it is gone already; the wait tells.
            let _ = kill_process_group(group, Signal::KILL);
        }
        if let Err(error) = self.0.wait() {
            eprintln!("warning: the emulator may still run: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_odd_statuses_are_the_guests() {
        assert_eq!(guest_status(Some(1)), Some(0));
        assert_eq!(guest_status(Some(5)), Some(2));
        assert_eq!(guest_status(Some(255)), Some(LARGEST));
        assert_eq!(guest_status(Some(0)), None, "a panic");
        assert_eq!(guest_status(None), None, "a signal");
    }

    #[test]
    fn lines_lose_their_ends_alone() {
        let (sender, lines) = mpsc::channel();
        read_lines(&b"a b\r\n\n c"[..], move |line| sender.send(line).is_ok());
        let lines: Vec<Option<String>> = lines.iter().collect();
        assert_eq!(lines, [Some("a b"), Some(""), Some(" c"), None].map(|line| line.map(str::to_owned)));
    }

    #[test]
    fn a_wires_path_survives_a_comma() {
        let option = Wire::Listen("/run/a,b".into()).options(0).concat();
        assert_eq!(option, "stream,id=n0,server=on,addr.type=unix,addr.path=/run/a,,b");
        let option = Wire::Connect("w".into()).options(1).concat();
        assert_eq!(option, "stream,id=n1,server=off,addr.type=unix,addr.path=w");
    }

    #[test]
    fn a_hub_has_a_port_for_each_wire_and_the_card() {
        let options = Wire::Hub(vec!["a".into(), "b".into()]).options(2);
        assert_eq!(
            options,
            [
                "stream,id=n2w0,server=on,addr.type=unix,addr.path=a",
                "hubport,id=n2p0,hubid=2,netdev=n2w0",
                "stream,id=n2w1,server=on,addr.type=unix,addr.path=b",
                "hubport,id=n2p1,hubid=2,netdev=n2w1",
                "hubport,id=n2,hubid=2",
            ]
        );
    }
}
