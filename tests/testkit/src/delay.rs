//! Links with delays for kernels without netem. A thread takes frames from one end of a link and lets them go at the other, each so much
//! later, and no faster than the link's rate. The shaping before it lets a bucket of bytes through at once, which are more than all of a
//! small operation.
//!
//! Each end is a macvtap device, which is read and written as a file. Segments that travel as one buffer (TSO) are one read and one
//! write, for the header that says so (virtio's) is handed on as it came.

use anyhow::{Context, Result, ensure};
use rustix::event::epoll;
use rustix::fs::{CWD, FileType, Mode, OFlags, makedev, mknodat, open};
use rustix::io::Errno;
use rustix::time::Timespec;
use std::collections::{BTreeMap, VecDeque};
use std::io::{PipeWriter, pipe};
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::namespace::Namespace;

/// Most bytes of a read: a buffer of segments and the headers before it.
const MOST: usize = 1 << 17;
/// Frames of an end that are read in a row.
const BURST: usize = 64;
/// Buffers that are kept for the next frames.
const FREE_BUFFERS: usize = 4096;
/// What epoll says of the pipe whose other end is here.
const STOP: u64 = u64::MAX;

/// A link.
#[derive(Debug)]
pub(crate) struct Wire {
    /// The devices at its ends.
    pub(crate) ends: [OwnedFd; 2],
    /// Which of them leads to a switch.
    pub(crate) switches: [bool; 2],
    /// One way.
    pub(crate) delay: Duration,
    /// Bits a second, each way.
    pub(crate) rate: u64,
    /// Most bytes of a frame.
    pub(crate) frame: usize,
}

/// The thread, which ends with this.
#[derive(Debug)]
pub(crate) struct Delays {
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Delays {
    /// Starts the thread.
    pub(crate) fn start(wires: Vec<Wire>) -> Result<Self> {
        let (end, stop) = pipe()?;
        let end = OwnedFd::from(end);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = |fd: &OwnedFd, data: u64| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(data), epoll::EventFlags::IN)
        };
        watch(&end, STOP)?;
        for (fd, data) in wires.iter().flat_map(|wire| &wire.ends).zip(0..) {
            watch(fd, data)?;
        }
        let carry = move || {
            // Or the kernel wakes it some 50 us late.
            let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
            use_realtime_priority();
            if let Err(error) = forward(&wires, &epoll) {
                eprintln!("warning: links with delays carry nothing any more: {error}");
            }
            drop(end);
        };
        let thread = std::thread::Builder::new().name("delays".to_owned()).spawn(carry)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Delays {
    fn drop(&mut self) {
        drop(self.stop.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            eprintln!("warning: the thread that delays frames panicked");
        }
    }
}

/// Has this thread go before all programs: a link is none of those who wait for processors.
fn use_realtime_priority() {
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    let mut command = Command::new("chrt");
    command.args(["--fifo", "--pid", "1", &thread]).stdin(Stdio::null()).stdout(Stdio::null());
    if !command.status().is_ok_and(|status| status.success()) {
        eprintln!("warning: links with delays wait for processors as programs do");
    }
}

/// Opens the macvtap devices of a namespace, by their names. Their nodes are made in `folder`, and are gone again on return.
pub(crate) fn open_all(namespace: &Namespace, folder: &Path) -> Result<BTreeMap<String, OwnedFd>> {
    // Only a process that sees the namespace's sysfs can tell their numbers.
    let list = "for f in /sys/class/net/*/tap*/dev; do echo \"$f $(cat \"$f\")\"; done";
    let mut command = Command::new("ip");
    let output = command.args(["netns", "exec", namespace.name(), "sh", "-c", list]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    let mut all = BTreeMap::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let parsed = line.split_once(' ').and_then(|(path, numbers)| {
            let (major, minor) = numbers.split_once(':')?;
            Some((path.split('/').nth(4)?, major.parse().ok()?, minor.parse().ok()?))
        });
        let (name, major, minor) = parsed.with_context(|| format!("no device's number: {line}"))?;
        let node = folder.join(name);
        mknodat(CWD, &node, FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, makedev(major, minor))
            .with_context(|| format!("cannot make {}", node.display()))?;
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = open(&node, flags, Mode::empty());
        std::fs::remove_file(&node)?;
        all.insert(name.to_owned(), opened.with_context(|| format!("cannot open {}", node.display()))?);
    }
    Ok(all)
}

/// One direction of a link.
struct Direction<'a> {
    to: &'a OwnedFd,
    pacer: Pacer,
    /// Frames and when they arrive, in order.
    frames: VecDeque<(Instant, Vec<u8>)>,
}

/// When what goes one way arrives.
struct Pacer {
    delay: Duration,
    rate: u64,
    /// Of a buffer of segments so many bytes have to be at the other end before any goes on. A host receives it as a whole. A switch sends
    /// its first frame while it receives the second.
    most: usize,
    /// When all that came so far is on its way.
    free: Instant,
}

impl Pacer {
    fn transmission_time(&self, bytes: usize) -> Duration {
        Duration::from_nanos((bytes as u64).saturating_mul(8_000_000_000) / self.rate.max(1))
    }

    /// When what comes now arrives.
    fn arrival(&mut self, now: Instant, bytes: usize) -> Instant {
        let begins = self.free.max(now);
        self.free = begins + self.transmission_time(bytes);
        begins + self.transmission_time(bytes.min(self.most)) + self.delay
    }
}

fn forward(wires: &[Wire], epoll: &OwnedFd) -> rustix::io::Result<()> {
    let ends: Vec<&OwnedFd> = wires.iter().flat_map(|wire| &wire.ends).collect();
    let begun = Instant::now();
    let ways = wires.iter().flat_map(|wire| {
        let Wire { ends: [one, other], switches: [near, far], delay, rate, frame } = wire;
        [(other, far), (one, near)].map(|(to, switch)| {
            let most = if *switch { *frame } else { usize::MAX };
            let pace = Pacer { delay: *delay, rate: *rate, most, free: begun };
            Direction { to, pacer: pace, frames: VecDeque::new() }
        })
    });
    let mut ways: Vec<Direction<'_>> = ways.collect();
    let mut spare: Vec<Vec<u8>> = Vec::new();
    let mut buffer = vec![0; MOST];
    let mut events = Vec::with_capacity(64);
    loop {
        let now = Instant::now();
        for way in &mut ways {
            while let Some((_, mut frame)) = way.frames.pop_front_if(|(due, _)| *due <= now) {
                // What a device has no room for is lost, as on any link.
                let _ = rustix::io::write(way.to, &frame);
                if spare.len() < FREE_BUFFERS {
                    frame.clear();
                    spare.push(frame);
                }
            }
        }
        let next = ways.iter().filter_map(|way| way.frames.front()).map(|(due, _)| *due).min();
        let wait = next.map(|due| due.saturating_duration_since(now));
        let wait = wait.and_then(|wait| Timespec::try_from(wait).ok());
        events.clear();
        match epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), wait.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        for event in &events {
            let index = event.data.u64();
            if index == STOP {
                return Ok(());
            }
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            let (Some(from), Some(way)) = (ends.get(index), ways.get_mut(index)) else { continue };
            for _ in 0..BURST {
                let Ok(bytes) = rustix::io::read(from, &mut buffer) else { break };
                let mut frame = spare.pop().unwrap_or_default();
                frame.extend_from_slice(buffer.get(..bytes).unwrap_or_default());
                way.frames.push_back((way.pacer.arrival(Instant::now(), bytes), frame));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_forward_frame_by_frame() {
        let now = Instant::now();
        let microseconds = Duration::from_micros;
        let pace = |most| Pacer { delay: microseconds(500), rate: 1_000_000_000, most, free: now };
        let (mut to_switch, mut to_host) = (pace(9000), pace(usize::MAX));
        assert_eq!(to_switch.arrival(now, 27_000), now + microseconds(572));
        assert_eq!(to_host.arrival(now, 27_000), now + microseconds(716));
        // The next waits for all of it, on either.
        assert_eq!(to_switch.arrival(now + microseconds(100), 125), now + microseconds(717));
        assert_eq!(to_host.arrival(now + microseconds(100), 125), now + microseconds(717));
        assert_eq!(
            to_host.arrival(now + microseconds(1000), 125),
            now + microseconds(1501),
            "it is free again"
        );
    }
}
