//! The guest's first process: mounts, modules, hosts, the job's steps, a report on the console, the power off.

#![forbid(unsafe_code)]

mod hosts;
mod links;

use anyhow::{Context, Result, bail};
use harmonaize_guest::{Job, LARGEST, MODULES, Mark, PATH, Server, Status, Step};
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process_group, setrlimit};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How often a condition is looked at again: a turn costs little, even emulated.
const POLL: Duration = Duration::from_millis(5);
/// The I/O port that ends the emulator with a status, as an offset in `/dev/port`.
const DEBUG_EXIT: u64 = 0xf4;

/// File systems in the order in which they are mounted: type, and where.
const MOUNTS: &[(&str, &str)] = &[
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("devpts", "/dev/pts"),
    ("tmpfs", "/dev/shm"),
    ("tmpfs", "/run"),
    ("tmpfs", "/tmp"),
    ("debugfs", "/sys/kernel/debug"),
    ("cgroup2", "/sys/fs/cgroup"),
];

/// Runs the job to its end and powers off; returns only where that fails.
fn main() {
    if std::process::id() != 1 {
        eprintln!("this program is the first process of a guest; see `cargo xtask softroce --help`");
        std::process::exit(2);
    }
    let failed = match work() {
        Ok(failed) => failed,
        Err(error) => {
            println!("the guest failed: {error:#}");
            1
        }
    };
    mark(&Mark::Halt(failed));
    if let Err(error) = end(failed) {
        println!("the guest cannot power off: {error:#}");
    }
}

fn work() -> Result<u32> {
    timed("mounts", mounts)?;
    let text = fs::read_to_string(PATH).with_context(|| format!("cannot read {}", PATH))?;
    let job: Job = serde_json::from_str(&text).with_context(|| format!("{} is no job", PATH))?;
    setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None })
        .context("cannot lift the memlock limit")?;
    timed("modules", modules)?;
    if job.hosts > 0 {
        timed("hosts", || hosts::build(job.hosts))?;
    }
    if !job.links.is_empty() {
        timed("links", || links::build(&job.links))?;
    }
    let mut failed = 0_u32;
    for step in &job.steps {
        mark(&Mark::Begin(step.name.clone()));
        let begun = Instant::now();
        let mut status = run(step);
        if !status.fine() {
            explain();
        }
        if !status.fine() && step.repeats {
            println!("\n{} failed once, and runs a second time", step.name);
            status = run(step);
            if !status.fine() {
                explain();
            }
        }
        if !status.fine() {
            failed = failed.saturating_add(1);
        }
        mark(&Mark::End { name: step.name.clone(), status, seconds: begun.elapsed().as_secs_f64() });
    }
    if job.shell {
        shell(job.hosts)?;
    }
    Ok(failed)
}

/// Prints on a line of its own: a test may have left one unfinished.
fn mark(mark: &Mark) {
    println!("\n{mark}");
}

fn timed(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let begun = Instant::now();
    let done = work();
    let status = if done.is_ok() { Status::Code(0) } else { Status::Code(1) };
    mark(&Mark::End { name: name.to_owned(), status, seconds: begun.elapsed().as_secs_f64() });
    if done.is_err() {
        explain();
    }
    done.with_context(|| format!("in {name}"))
}

fn mounts() -> Result<()> {
    for (kind, place) in MOUNTS {
        fs::create_dir_all(place).with_context(|| format!("cannot create {place}"))?;
        mount(*kind, *place, *kind, MountFlags::empty(), None)
            .with_context(|| format!("cannot mount {place}"))?;
    }
    Ok(fs::create_dir_all("/run/netns")?)
}

fn modules() -> Result<()> {
    let order = fs::read_to_string(format!("{}/order", MODULES)).context("no list of modules")?;
    for name in order.lines() {
        let file =
            File::open(format!("{}/{name}.ko", MODULES)).with_context(|| format!("no module {name}"))?;
        match rustix::system::finit_module(&file, c"", 0) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error).with_context(|| format!("cannot load {name}")),
        }
    }
    Ok(())
}

/// A command in a process group of its own, which the drop ends.
struct Running(Child);

impl Running {
    fn start(words: &[String], step: &Step) -> Result<Self> {
        let words = words.iter().map(|word| hosts::with_gid_index(word)).collect::<Result<Vec<String>>>()?;
        let Some((program, arguments)) = words.split_first() else { bail!("{} has no command", step.name) };
        let mut command = Command::new(program);
        command.args(arguments).env_clear().env("PATH", "/usr/bin:/usr/sbin").env("HOME", "/root");
        command.envs(&step.environment).stdin(Stdio::null()).process_group(0);
        Ok(Self(command.spawn().with_context(|| format!("cannot start {program}"))?))
    }

    fn wait_until(&mut self, deadline: Instant) -> Result<Option<ExitStatus>> {
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(group) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            // The group may be gone, which is as well.
            let _ = kill_process_group(group, Signal::KILL);
        }
        if let Err(error) = self.0.wait() {
            println!("cannot wait for process {}: {error}", self.0.id());
        }
    }
}

fn run(step: &Step) -> Status {
    run_until(step, Instant::now() + Duration::from_secs(step.limit_s)).unwrap_or_else(|error| {
        println!("{}: {error:#}", step.name);
        Status::NotStarted
    })
}

fn run_until(step: &Step, deadline: Instant) -> Result<Status> {
    let mut server = match &step.server {
        Some(server) => Some(serve(server, step, deadline)?),
        None => None,
    };
    let client = Running::start(&step.command, step)?.wait_until(deadline)?;
    let client = client.map_or(Status::TimedOut, status);
    match &mut server {
        Some(server) if client.fine() => Ok(server.wait_until(deadline)?.map_or(Status::TimedOut, status)),
        _ => Ok(client),
    }
}

fn status(status: ExitStatus) -> Status {
    match (status.code(), status.signal()) {
        (Some(code), _) => Status::Code(code),
        (None, signal) => Status::Signal(signal.unwrap_or(0)),
    }
}

/// Starts a server and waits until it listens.
fn serve(server: &Server, step: &Step, deadline: Instant) -> Result<Running> {
    let mut running = Running::start(&server.command, step)?;
    loop {
        if listens(&fs::read_to_string("/proc/net/tcp")?, server.port)
            || listens(&fs::read_to_string("/proc/net/tcp6").unwrap_or_default(), server.port)
        {
            return Ok(running);
        }
        if let Some(status) = running.wait_until(Instant::now())? {
            bail!("the server ended before it listened: {status}");
        }
        if Instant::now() >= deadline {
            bail!("the server does not listen on port {}", server.port);
        }
        std::thread::sleep(POLL);
    }
}

/// Whether a table of the kernel's TCP sockets has a listening one (state 0A) on the port.
fn listens(table: &str, port: u16) -> bool {
    let port = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.nth(1).is_some_and(|local| local.ends_with(&port)) && words.nth(1) == Some("0A")
    })
}

/// Prints what devices have counted and the kernel's last messages, for whoever looks for a cause.
fn explain() {
    device_counters();
    kernel_messages();
}

/// Each RDMA device's counters that are not zero.
fn device_counters() {
    for device in fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten() {
        let counters = fs::read_dir(device.path().join("ports/1/hw_counters"));
        let counted = counters.into_iter().flatten().flatten().filter_map(|counter| {
            let value = fs::read_to_string(counter.path()).ok()?.trim().to_owned();
            (value != "0").then(|| format!("{} {value}", counter.file_name().to_string_lossy()))
        });
        let (name, counted) = (device.file_name(), counted.collect::<Vec<String>>());
        println!("{}: {}", name.to_string_lossy(), counted.join(", "));
    }
}

fn kernel_messages() {
    let read = || -> std::io::Result<Vec<String>> {
        let flags = rustix::fs::OFlags::NONBLOCK.bits();
        let mut file = OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open("/dev/kmsg")?;
        let mut messages = Vec::new();
        let mut record = [0; 8192];
        // Each read is one record; at the end a read would wait.
        while let Ok(length) = file.read(&mut record) {
            let text = String::from_utf8_lossy(record.get(..length).unwrap_or_default());
            let line = text.lines().next().unwrap_or_default();
            messages.push(line.split_once(';').map_or(line, |(_, message)| message).to_owned());
        }
        Ok(messages)
    };
    match read() {
        Ok(messages) => {
            let first = messages.len().saturating_sub(20);
            println!("\nthe kernel's last messages:");
            messages.iter().skip(first).for_each(|message| println!("  {message}"));
        }
        Err(error) => println!("cannot read the kernel's messages: {error}"),
    }
}

fn shell(count: u32) -> Result<()> {
    println!("\n{}", hosts::describe(count));
    println!("`exit` powers off; Ctrl-a x ends the emulator.\n");
    let mut shell = Command::new("/usr/bin/busybox");
    shell.args(["setsid", "-c", "/usr/bin/busybox", "sh", "-l"]);
    shell.env_clear().env("HOME", "/root").env("TERM", "linux").env("PS1", "guest# ");
    shell.env("PATH", "/usr/bin:/usr/sbin:/usr/lib/applets").current_dir("/root");
    let status = shell.status().context("cannot start the shell")?;
    println!("the shell ended with {status}");
    Ok(())
}

/// Ends the emulator with the count of failed steps, or powers off where it has no such port.
fn end(failed: u32) -> Result<()> {
    std::io::stdout().flush()?;
    // The console's last bytes have to be out before the machine is gone.
    rustix::termios::tcdrain(std::io::stdout()).context("cannot drain the console")?;
    rustix::fs::sync();
    if let Ok(mut port) = OpenOptions::new().write(true).open("/dev/port") {
        port.seek(SeekFrom::Start(DEBUG_EXIT))?;
        port.write_all(&[u8::try_from(failed.min(LARGEST)).unwrap_or(u8::MAX)])?;
    }
    Ok(rustix::system::reboot(rustix::system::RebootCommand::PowerOff)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listening_port_is_found_in_procfs() {
        let table = "  sl  local_address rem_address   st tx_queue\n\
                     \x20  0: 00000000:4989 00000000:0000 0A 00000000:00000000\n\
                     \x20  1: 0100007F:1F90 0100007F:4989 01 00000000:00000000\n";
        assert!(listens(table, 0x4989));
        assert!(!listens(table, 0x1f90), "connected, not listening");
        assert!(!listens(table, 0x0989));
    }
}
